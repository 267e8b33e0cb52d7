"""Two gloo ranks, one thread each: our tensor + sequence parallelism against torch's DTensor.

    B='python bench/tensor.py'
    python bench/duel.py DTensor="$B dtensor" ours="$B ours"
    python bench/duel.py torch="$B torch-single" DTensor="$B dtensor"    what two ranks gain
    python bench/duel.py single="$B single" ours="$B ours"

Speaks the protocol of bench/step.py. A step is forward, backward and fused AdamW in float32, no
clipping; both ranks read the same random tokens, which count once. torch's side is a plain Llama
of nn.Linear, nn.RMSNorm and scaled_dot_product_attention, parallelized by torchtitan's plan for
Llama. All start from the same weights and see the same tokens, so the losses must agree."""

import argparse
import contextlib
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from ops import plain_rotary  # noqa: E402
from sharded import SHAPES, config_of, serve, start_ranks  # noqa: E402

import model as model_py  # noqa: E402
import parallel  # noqa: E402


def build(cfg, tp, keep=False):
    mesh = parallel.build_mesh(parallel.layout_of(tp, tp=tp), "cpu")
    model, blocks = model_py.build(cfg, mesh, torch.float32, keep_gathered=keep)
    model_py.init_weights(blocks, cfg, 0)
    return model, blocks


class Ours:
    def __init__(self, cfg, args):
        self.model, self.blocks = build(cfg, dist.get_world_size(), args.keep)
        self.fns = self.model.functions()

    def step(self, tokens, targets):
        self.blocks.begin()
        micro = self.model.micro(tokens, targets, scale=torch.tensor(1 / targets.numel()))
        actions = parallel.program(1, 0, "1f1b", 1)
        [loss] = parallel.run(actions, self.fns, self.blocks, [micro])
        self.blocks.adamw(1e-3, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
        return loss / targets.numel()


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.d_head = cfg.d_head
        self.q = nn.Linear(cfg.d_model, cfg.n_head * cfg.d_head, bias=False)
        self.k = nn.Linear(cfg.d_model, cfg.n_kv_head * cfg.d_head, bias=False)
        self.v = nn.Linear(cfg.d_model, cfg.n_kv_head * cfg.d_head, bias=False)
        self.o = nn.Linear(cfg.n_head * cfg.d_head, cfg.d_model, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (f(x).unflatten(-1, (-1, self.d_head)) for f in (self.q, self.k, self.v))
        q, k = plain_rotary(q, k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.up = nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.down = nn.Linear(cfg.d_ff, cfg.d_model, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(cfg.d_model, cfg.norm_eps), Attention(cfg)
        self.mlp_norm, self.mlp = nn.RMSNorm(cfg.d_model, cfg.norm_eps), MLP(cfg)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


OUR_NAME = {"embed.weight": "embed.tokens.weight", "norm.weight": "head.norm.weight"}


class Plain(nn.Module):
    """Ours as one would write it without us, and with our weights."""

    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layer))
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.norm = nn.RMSNorm(cfg.d_model, cfg.norm_eps)
        source, _ = build(cfg, 1)
        self.tables = source.tables
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(source.get_parameter(OUR_NAME.get(name, name)))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, *self.tables)
        return self.head(self.norm(x))


def parallelize(module, loss):
    """torchtitan's plan for Llama, with the sequence split between sublayers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    split, whole, cut = Shard(1), Replicate(), loss == "parallel"
    parallelize_module(module, mesh, {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Shard(-1) if cut else whole,
                                use_local_output=not cut)})
    for layer in module.layers:
        parallelize_module(layer, mesh, {
            "attn_norm": SequenceParallel(),
            "attn": PrepareModuleInput(input_layouts=(split, None, None),
                                       desired_input_layouts=(whole, None, None)),
            "attn.q": ColwiseParallel(),
            "attn.k": ColwiseParallel(),
            "attn.v": ColwiseParallel(),
            "attn.o": RowwiseParallel(output_layouts=split),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
            "mlp.gate": ColwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=split)})


class Torch:
    def __init__(self, cfg, args):
        self.module, self.around_loss = Plain(cfg), contextlib.nullcontext
        if args.system == "dtensor":
            parallelize(self.module, args.loss)
            if args.loss == "parallel":
                self.around_loss = torch.distributed.tensor.parallel.loss_parallel
        params = list(self.module.parameters())
        self.opt = torch.optim.AdamW(
            [{"params": [p for p in params if p.ndim > 1]},
             {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self, tokens, targets):
        with self.around_loss():
            loss = F.cross_entropy(self.module(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["ours", "dtensor", "single", "torch-single"])
    parser.add_argument("--shape", default="llama", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--keep", action="store_true", help="ours: speed.keep_gathered")
    parser.add_argument("--loss", default="parallel", choices=["parallel", "plain"],
                        help="dtensor: loss_parallel, or on logits gathered from all ranks")
    args = parser.parse_args()
    children = start_ranks(1 if args.system.endswith("single") else args.ranks)
    torch.set_num_threads(args.threads)
    parallel.start("cpu")
    cfg = config_of(args.shape)
    trainer = (Ours if args.system in ("ours", "single") else Torch)(cfg, args)
    serve(trainer.step, args, cfg, seed=0, count=SHAPES[args.shape][-1] * cfg.max_len)
    parallel.stop()
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
