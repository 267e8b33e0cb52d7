"""Peak bytes of one rank of a simulated world, at each ZeRO stage, beside the formula. No GPU.

    python bench/memory.py [--config configs/llama3-8b.yaml --ranks 8 --layers 32 --seq-len 8192]

One real step (train.py's blocks and executor: forward, backward, reduction, AdamW) runs under
FakeTensorMode with torch's fake process group: every tensor has a shape and a size and no memory. A
dispatch mode adds up the storages that are alive. Formula, P parameters padded, f ranks, L the
largest layer, compute dtype bfloat16 (2 bytes):

    zero 0   2P + 4P + 12P               weights, gradients, master and moments
    zero 1   2P + 4P + 12P/f
    zero 2   2P + 4P/f + 12P/f + 4 (2L)              two layers' gradients take turns
    zero 3   2P/f + 4P/f + 12P/f + 4 (2L) + 2 (3L)   three layers' weights take turns

What the peak has on top: activations (printed: inputs of each layer, as recomputation keeps them),
one block's intermediates, and the embedding's or head's whole weight and gradient while in use."""

import argparse
import pathlib
import sys
import weakref

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import model as model_py  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402


class Meter(TorchDispatchMode):
    """Bytes of all storages alive, and their highest sum."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = weakref.WeakValueDictionary(), 0

    def now(self):
        return sum(s.nbytes() for s in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                s = t.untyped_storage()
                self.storages[s._cdata] = s
        self.peak = max(self.peak, self.now())
        return out


def measure(cfg, ranks, seq_len, zero):
    """(bytes at rest, peak bytes, block sizes, ledger) of rank 0."""
    mesh = parallel.build_mesh(parallel.layout_of(ranks, fsdp=ranks), "cpu")
    with FakeTensorMode(), Meter() as meter:
        model, blocks = model_py.build(cfg, mesh, torch.bfloat16, 128, 1024, zero=zero)
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        micro = model.micro(tokens, tokens, scale=torch.ones(()))
        keep = [True] + [False] * cfg.n_layer + [True]
        blocks.begin()
        actions = parallel.program(1, 0, "1f1b", 1)
        parallel.run(actions, model.functions(), blocks, [micro], keep)
        blocks.grad_norm()
        blocks.adamw(1e-3, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
        return meter.now(), meter.peak, blocks.sizes, mesh.ledger


def formula(sizes, ranks, zero):
    P, L = sum(sizes), max(sizes[1:-1])
    f = ranks if zero else 1
    weights = 2 * P if zero < 3 else 2 * P // f + 2 * 3 * L
    grads = 4 * P if zero < 2 else 4 * P // f + 4 * 2 * L
    return weights + grads + 12 * P // f


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default=str(ROOT / "configs/llama3-8b.yaml"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq-len", type=int)
    args = parser.parse_args()
    config = train.load_config([args.config])
    seq_len = args.seq_len or config["data"]["seq_len"]
    section = config["model"] | {"max_len": seq_len}
    section["n_layer"] = args.layers or section["n_layer"]
    cfg = model_py.ModelConfig(**section)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    saved = 2 * seq_len * cfg.d_model * (cfg.n_layer + 1)
    print(f"{args.config}, {args.ranks} ranks, one sequence of {seq_len}, full recomputation; GB")
    print(f"{'zero':>4} {'formula':>9} {'at rest':>9} {'peak':>9} {'layer inputs':>13}  traffic")
    for zero in range(4):
        rest, peak, sizes, ledger = measure(cfg, args.ranks, seq_len, zero)
        traffic = ", ".join(f"{op} {nbytes / 1e9:.1f}" for (_, op), (_, nbytes) in ledger.items())
        print(f"{zero:>4} {formula(sizes, args.ranks, zero) / 1e9:>9.2f} {rest / 1e9:>9.2f} "
              f"{peak / 1e9:>9.2f} {saved / 1e9:>13.2f}  {traffic}")


if __name__ == "__main__":
    main()
