"""Each operation of kernels.py beside what a user would pick instead, forward + backward.

    python bench/ops.py                        all operations, in turns, medians and ratios
    python bench/ops.py --only attention,loss
    python bench/ops.py --peak                 peak memory of the loss (the plain way wants 7 GB)

A ratio below 1: kernels.py takes less time. Contenders take turns within one process, on a quiet
machine. bfloat16 is timed where the device has instructions for it (or with --dtypes bfloat16).
"""

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import kernels  # noqa: E402
import parallel  # noqa: E402

SHAPES = {
    "llama": dict(B=4, T=512, H=8, Hkv=4, d=64, D=512, ffn=1408, V=8192),
    "gpt2": dict(B=8, T=256, H=6, Hkv=6, d=64, D=384, ffn=1536, V=50304),
}
SCRATCH = {}
MESH = parallel.build_mesh(parallel.layout_of(1), "cpu")


def plain_rotary(q, k, cos, sin):
    """Hugging Face's Llama: tables of the full head width, halves swapped by cat."""
    cos, sin = (torch.cat((t, t), -1)[:, None].to(q.dtype) for t in (cos, sin))

    def turn(x):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return turn(q), turn(k)


def plain_attention(q, k, v):
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def plain_loss(x, w, y, acc):
    return F.cross_entropy(F.linear(x, w).float(), y, reduction="sum") / len(y)


def our_loss(x, w, y, acc):
    scale = torch.tensor(1 / len(y), device=x.device)
    pieces = kernels.ce_weight, kernels.ce_forward, kernels.ce_backward
    return parallel.linear_cross_entropy(MESH, pieces, x, w, y[None], scale, vocab=len(w),
                                         chunk=1024, weight_grad=acc, scratch=SCRATCH)


def cases(s, dtype, device):
    """name -> (ours, plain, inputs that want gradients, other inputs)."""

    def rand(*shape, std=1.0):
        return (torch.randn(shape, device=device) * std).to(dtype).requires_grad_()

    N, heads = s["B"] * s["T"], (s["B"], s["T"])
    q, k, v = (rand(*heads, s[h], s["d"]) for h in ("H", "Hkv", "Hkv"))
    tables = kernels.rope_tables(s["T"], s["d"], 1e4, device=device)
    y = torch.randint(s["V"], (N,), device=device)
    x, head = rand(N, s["D"]), rand(s["V"], s["D"], std=0.02)
    acc = torch.zeros(head.shape, device=device)
    return {
        "rms_norm": (lambda x, w: kernels.rms_norm(x, w, 1e-5),
                     lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), (x, rand(s["D"])), ()),
        "rotary": (kernels.rotary, plain_rotary, (q, k), tables),
        "swiglu": (kernels.swiglu, lambda g, u: F.silu(g) * u,
                   (rand(N, s["ffn"]), rand(N, s["ffn"])), ()),
        "attention": (lambda *a: kernels.attention(*a)[0], plain_attention, (q, k, v), ()),
        "loss": (our_loss, plain_loss, (x, head), (y, acc)),
    }


def once(f, inputs, rest, seeds):
    """Milliseconds of one forward + backward."""
    for t in inputs:
        t.grad = None
    wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    out = f(*inputs, *rest)
    out = out if isinstance(out, tuple) else (out,)
    if not seeds:
        seeds.extend(torch.ones_like(t) if t.dim() == 0 else torch.randn_like(t) for t in out)
    torch.autograd.backward(out, seeds)
    wait()
    return (time.perf_counter() - start) * 1e3


def duel(ours, plain, inputs, rest, seconds):
    """Medians of alternating runs, after one warm round."""
    times, seeds, start = [], ([], []), time.perf_counter()
    while time.perf_counter() < start + seconds or len(times) < 4:
        times.append([once(f, inputs, rest, seed) for f, seed in zip((ours, plain), seeds)])
    a, b = (statistics.median(t) for t in zip(*times[1:]))
    ratios = sorted(x / y for x, y in times[1:])
    low, high = (ratios[int(len(ratios) * q)] for q in (0.1, 0.9))
    return f"{a:9.2f} {b:9.2f} {a / b:7.2f}   ({low:.2f}-{high:.2f})   {len(ratios)}"


def peak(kind, dtype):
    """MB above the inputs (and the weight's gradient) at 4096 x 512 -> 128256, in this process."""
    x = torch.randn(4096, 512).to(dtype).requires_grad_()
    w = (torch.randn(128256, 512) * 0.02).to(dtype).requires_grad_()
    y, acc = torch.randint(128256, (4096,)), torch.ones(128256, 512)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (our_loss if kind == "ours" else plain_loss)(x, w, y, acc).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", default="rms_norm,rotary,swiglu,attention,loss")
    parser.add_argument("--dtypes")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs="?", const="both")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slow = device == "cpu" and torch.bfloat16 in kernels.EMULATED
    names = (args.dtypes or ("float32" if slow else "float32,bfloat16")).split(",")
    if args.peak in ("ours", "plain"):
        return print(peak(args.peak, getattr(torch, names[0])))
    facts = f"{platform.machine()}, {args.threads} threads, torch {torch.__version__}, {device}"
    print(facts + (", bfloat16 products emulated" if slow else ""))
    if args.peak:
        for name in names:
            command = [sys.executable, __file__, "--dtypes", name, "--peak"]
            a, b = (float(subprocess.check_output([*command, k])) for k in ("ours", "plain"))
            print(f"loss, peak MB above inputs, {name}: {a:.0f} against {b:.0f}, {a / b:.3f}")
        return
    print(f"{'':28}{'ours ms':>9} {'plain ms':>9} {'ratio':>7}   (10-90%)   turns")
    for shape, sizes in SHAPES.items():
        for name in names:
            for op, case in cases(sizes, getattr(torch, name), device).items():
                if op in args.only.split(","):
                    print(f"{shape:6} {name:9} {op:11}", duel(*case, args.seconds), flush=True)


if __name__ == "__main__":
    main()
