"""Peak bytes of one rank of a simulated world, at each ZeRO stage, beside the formula. No GPU.

    python bench/memory.py [--config configs/llama3-8b.yaml --ranks 8 --layers 32 --seq-len 8192]
    python bench/memory.py --config configs/llama3-8b-128k.yaml --ranks 16 --cp 8
    python bench/memory.py --context [--layers 4 --seq-len 16384]

The last: activations of a step without recomputation, of one process and of ranks that share the
sequence (parallel.cp), in float32: what is alive at the peak of forward and backward, beyond what
was alive before.

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
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                s = t.untyped_storage()
                self.storages[s._cdata] = s
        self.peak = max(self.peak, self.now())
        return out


def activations(cfg, cp, mode, seq_len):
    """Bytes beyond weights and gradients at the peak of forward and backward, of rank 0 of cp."""
    sizes = parallel.layout_of(cp, cp=cp)
    mesh = parallel.build_mesh(sizes, "cpu")
    with FakeTensorMode(), Meter() as meter:
        model, blocks = model_py.build(cfg, mesh, torch.float32, cp_mode=mode)
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        before = meter.now()
        micro = model.micro(tokens, tokens, scale=torch.ones(()))
        parallel.run(parallel.program(1, 0, "1f1b", 1), model.functions(), blocks, [micro])
        return meter.peak - before


def compare_context(cfg, seq_len):
    print(f"activations at the peak, {cfg.n_layer} layers of {cfg.d_model}, length {seq_len}")
    used = {}
    for mode, cp in [("ring", 1), ("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4)]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cp)
        used[cp] = activations(cfg, cp, mode, seq_len)
        share = used[cp] * cp / used[1]
        print(f"{mode:<8} cp {cp}  {used[cp] / 1e6:>9.1f} MB  {share:.3f} of 1/cp of one")
        dist.destroy_process_group()


def measure(cfg, ranks, seq_len, zero, cp=1):
    """(bytes at rest, peak bytes, block sizes, ledger) of rank 0."""
    mesh = parallel.build_mesh(parallel.layout_of(ranks, fsdp=ranks // cp, cp=cp), "cpu")
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
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--context", action="store_true")
    args = parser.parse_args()
    if args.context:
        section, seq_len = train.load_config([])["model"], args.seq_len or 16384
        return compare_context(model_py.ModelConfig(**section | {
            "n_layer": args.layers or 4, "d_model": 512, "n_head": 8, "n_kv_head": 4, "d_ff": 1408,
            "vocab_size": 8192, "max_len": seq_len}), seq_len)
    config = train.load_config([args.config])
    seq_len = args.seq_len or config["data"]["seq_len"]
    section = config["model"] | {"max_len": seq_len}
    section["n_layer"] = args.layers or section["n_layer"]
    cfg = model_py.ModelConfig(**section)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    saved = 2 * seq_len // args.cp * cfg.d_model * (cfg.n_layer + 1)
    print(f"{args.config}, {args.ranks} ranks, cp {args.cp}, one sequence of {seq_len}, "
          "full recomputation; GB")
    print(f"{'zero':>4} {'formula':>9} {'at rest':>9} {'peak':>9} {'layer inputs':>13}  traffic")
    for zero in range(4):
        rest, peak, sizes, ledger = measure(cfg, args.ranks, seq_len, zero, args.cp)
        traffic = ", ".join(f"{op} {nbytes / 1e9:.1f}" for (_, op), (_, nbytes) in ledger.items())
        print(f"{zero:>4} {formula(sizes, args.ranks, zero) / 1e9:>9.2f} {rest / 1e9:>9.2f} "
              f"{peak / 1e9:>9.2f} {saved / 1e9:>13.2f}  {traffic}")


if __name__ == "__main__":
    main()
