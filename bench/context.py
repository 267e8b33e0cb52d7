"""Two gloo ranks, one thread each, that share a sequence of 4096: what the ring costs.

    B='python bench/context.py'
    python bench/duel.py share="$B share" ring="$B ring" ulysses="$B ulysses"
    python bench/duel.py single="$B single" ring="$B ring"      what two ranks gain over one
    python bench/duel.py torch="$B torch" ring="$B ring"        torch's own context_parallel

`share` is the ring with the communication taken out: a rank computes the same steps of attention,
on keys that are its own each time, and no gradient is summed. Its losses mean nothing, its time is
that of a rank's share of the work. torch's side is the plain Llama of bench/tensor.py; its
context_parallel has, in torch 2.13, no rule for a CPU's attention, and says so. Speaks the protocol
of bench/step.py; a step is forward, backward and fused AdamW in float32, no clipping."""

import argparse
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import tensor  # noqa: E402
from sharded import SHAPES, config_of, serve, start_ranks  # noqa: E402

import model as model_py  # noqa: E402
import parallel  # noqa: E402

SHAPES["long"] = (4, 256, 8, 4, 704, 4096, 2048, 1)
SHAPES["wide"] = (2, 512, 8, 4, 1408, 4096, 8192, 1)


def silence():
    """Take the communication out of parallel.py, in this process."""
    parallel.shift_start = lambda mesh, x, axis, what="": parallel.Handle(lambda: x)
    parallel.all_reduce = lambda mesh, x, axis, op="sum", wait=True, what="": (
        x if wait else parallel.Handle(lambda: x))


class Ours(tensor.Ours):
    def __init__(self, cfg, args):
        n, mode = dist.get_world_size(), "ulysses" if args.system == "ulysses" else "ring"
        self.mesh = parallel.build_mesh(parallel.layout_of(n, cp=n), "cpu")
        dtype = getattr(torch, args.dtype)
        self.model, self.blocks = model_py.build(cfg, self.mesh, dtype, cp_mode=mode)
        model_py.init_weights(self.blocks, cfg, 0)
        self.fns = self.model.functions()
        if args.system == "share":
            silence()

    def step(self, tokens, targets):
        return parallel.all_reduce(self.mesh, super().step(tokens, targets), "loss")


class Torch(tensor.Torch):
    def __init__(self, cfg, args):
        super().__init__(cfg, args)
        self.mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        self.whole_tables = self.module.tables

    def step(self, tokens, targets):
        """The mean over a rank's tokens, and the mean of the ranks' gradients."""
        from torch.distributed.tensor.experimental import context_parallel

        tables = self.module.tables = [table.clone() for table in self.whole_tables]
        with context_parallel(self.mesh, buffers=[tokens, targets, *tables],
                              buffer_seq_dims=[1, 1, 0, 0]):
            loss = F.cross_entropy(self.module(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["ring", "ulysses", "share", "single", "torch"])
    parser.add_argument("--shape", default="long", choices=SHAPES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    children = start_ranks(1 if args.system == "single" else args.ranks)
    torch.set_num_threads(1)
    parallel.start("cpu")
    cfg = config_of(args.shape)
    trainer = (Torch if args.system == "torch" else Ours)(cfg, args)
    serve(trainer.step, args, cfg, seed=0, count=SHAPES[args.shape][-1] * cfg.max_len)
    parallel.stop()
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
