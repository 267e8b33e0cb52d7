"""The Triton kernels on a GPU beside its memory, torch's flash attention and torch.compile.

    python bench/gpu.py                                   tables for bench/RESULTS.md
    python bench/gpu.py --step configs/gpt2-124m.yaml     instead: real training steps of a config
    python bench/gpu.py --tiny [--step CONFIG]            is the script in order? Also on a CPU, if
                                                          kernels.triton is there, interpreted

What memory bounds cannot take less time than its bytes: each operand read once, each result written
once. A case states them; over the time they are GB/s, to be held against a plain copy. Attention is
bound by products: 4 d for each head and pair of a query and a key that it sees, 10 d backward.

A time is the median of many runs, each alone: 256 MB are written, which empties the L2 (and leaves
it dirty: ce_local, which writes nothing, pays for that), the GPU sleeps a millisecond, so that the
host is ahead and its time does not show, and two events enclose the work. What the host needs to
launch it has a column of its own: small shapes wait for that. `differs`: the largest difference
over the largest value, from the definition in float32 (attention: from how="torch"), since no test
runs kernels on a GPU; past 0.03 it is a failure. nan: failed, see the end; the exit status is 1.
"""

import argparse
import collections
import contextlib
import datetime
import gc
import math
import pathlib
import statistics
import sys
import tempfile
import time
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import data  # noqa: E402
import kernels  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402

EPS, NAN = 1e-5, math.nan
LLAMA = dict(N=8192, D=4096, H=32, Hkv=8, d=128, ffn=14336, V=128256, rows=2048, copy=2**30,
             heads=(128, 64), lengths=(2048, 8192), tokens=16384, seen=1024)
TINY = dict(N=16, D=48, H=4, Hkv=2, d=16, ffn=80, V=300, rows=6, copy=2**20,
            heads=(16,), lengths=(32, 64), tokens=128, seen=16)
TINY_MODEL = dict(n_layer=2, d_model=64, n_head=4, n_kv_head=2, d_head=None, d_ff=128,
                  vocab_size=257)


class Clock:
    """Times functions. One that fails is a nan in the tables and a line at the end."""

    def __init__(self, device, repeats):
        self.device, self.repeats, self.failures = device, repeats, []
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.compile = torch.compile if device == "cuda" else lambda fn: fn
        self.flush = torch.empty(2**28 if device == "cuda" else 0, dtype=torch.int8, device=device)

    def attempt(self, name, fn, failed=None):
        try:
            return fn()
        except Exception as error:
            text = " ".join(str(error).split())
            self.failures.append(f"{name}: {type(error).__name__}: {text:.300}")
            return failed

    def __call__(self, name, fn, prepare=tuple):
        """-> median milliseconds of fn(*prepare()), and median microseconds to launch it."""
        def median():
            turns = [self.once(fn, prepare()) for _ in range(self.repeats + 3)]  # 3 compile, warm
            return [statistics.median(column) for column in zip(*turns[3:])]

        return self.attempt(name, median, (NAN, NAN))

    def once(self, fn, given):
        if self.device == "cpu":
            start = time.perf_counter()
            fn(*given)
            return (time.perf_counter() - start) * 1e3, NAN
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(2_000_000)  # cycles
        begin.record()
        start = time.perf_counter()
        fn(*given)
        launch = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), launch * 1e6

    def differs(self, name, pairs):
        def worst(x, y):
            ratio = ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
            return math.inf if math.isnan(ratio) else ratio  # max() can pass over a nan

        found = self.attempt(name, lambda: max(worst(x, y) for x, y in pairs()), NAN)
        if found > 0.03:
            self.failures.append(f"{name}: differs by {found:.3g}")
        return found


# ---- What memory bounds. A way to do it is (forward, prepare, backward): forward(), and
# backward(*prepare()). A case: its operation in AUTO, title, ways, bytes of forward and backward.


def by_autograd(fn, inputs, seeds):
    leaves = [x.detach().requires_grad_() for x in inputs]

    def prepare():
        out = fn(*leaves)
        return out if isinstance(out, tuple) else (out,)

    return torch.no_grad()(prepare), prepare, lambda *out: torch.autograd.grad(out, leaves, seeds)


def ways(forward, backward, path, ref, inputs, seeds, compile):
    """Ours by its operators, the PyTorch path, the definition compiled, and in float32."""
    wide = ([x.float() for x in xs] for xs in (inputs, seeds))
    return dict(triton=(forward, forward, backward), torch=by_autograd(path, inputs, seeds),
                compiled=by_autograd(compile(ref), inputs, seeds), truth=by_autograd(ref, *wide))


def norm_case(s, e, rand, compile, add):
    """x (residual) -> y (h), and r; dy h (dh) -> dx, and dw in float32. The weight once each."""
    N, D, passes = s["N"], s["D"], (4, 4) if add else (2, 3)
    x, dy, w = rand(N, D), rand(N, D), rand(D)
    h, dh = (rand(N, D), rand(N, D)) if add else (None, None)
    return "rms_norm", "rms_norm" + ", residual" * add, ways(
        lambda: kernels.rms_norm_forward(x, h, w, EPS),
        lambda y, h, r: kernels.rms_norm_backward(dy, h if add else x, w, r, dh),
        lambda x, w, *h: kernels.rms_norm(x, w, EPS, *h, how="torch"),
        lambda x, w, *h: kernels.rms_norm_ref(x, w, EPS, *h),
        (x, w, h) if add else (x, w), (dy, dh) if add else (dy,), compile,
    ), (passes[0] * N * D * e + D * e + 4 * N, passes[1] * N * D * e + D * (e + 4) + 4 * N)


def rotary_case(s, e, rand, compile):
    """q k -> q k, forward and backward; cos and sin of each token once, in float32."""
    N, H, Hkv, d = s["N"], s["H"], s["Hkv"], s["d"]
    q, k, dq, dk = (rand(1, N, heads, d) for heads in (H, Hkv, H, Hkv))
    tables = kernels.rope_tables(N, d, 500000.0, device=q.device)
    return "rotary", "rotary", ways(
        lambda: kernels.rotary_forward(q, k, *tables, 1),
        lambda *_: kernels.rotary_forward(dq, dk, *tables, -1),
        lambda q, k: kernels.rotary(q, k, *tables, how="torch"),
        lambda q, k: kernels.rotary_ref(q, k, *tables), (q, k), (dq, dk), compile,
    ), (2 * N * (H + Hkv) * d * e + 2 * N * (d // 2) * 4,) * 2


def swiglu_case(s, e, rand, compile):
    """gate up -> y; dy gate up -> dgate dup."""
    gate, up, dy = (rand(s["N"], s["ffn"]) for _ in range(3))
    return "swiglu", "swiglu", ways(
        lambda: (kernels.swiglu_forward(gate, up),),
        lambda _: kernels.swiglu_backward(dy, gate, up),
        lambda gate, up: kernels.swiglu(gate, up, how="torch"), kernels.swiglu_ref,
        (gate, up), (dy,), compile,
    ), (3 * s["N"] * s["ffn"] * e, 5 * s["N"] * s["ffn"] * e)


def sums_ref(logits, local):
    z = logits.float()
    top = z.amax(-1)
    return top, (z - top[:, None]).exp().sum(-1), z.gather(1, local[:, None])[:, 0]


def slope_ref(logits, local, lse, factor):
    hit = torch.arange(logits.shape[1], device=logits.device) == local[:, None]
    g = factor[:, None] * ((logits.float() - lse[:, None]).exp() - hit.float())
    return (g.to(logits.dtype),)


def loss_case(s, e, rand, compile):
    """logits -> three float32 a row; logits, two float32 -> logits; and the target's number. They
    are overwritten by their gradient, time after time. (The PyTorch path writes the softmax in its
    forward already, and leaves the factors to its products.)"""
    n, V = s["rows"], s["V"]
    logits = rand(n, V)
    before, local = logits.float().clone(), torch.randint(V, (n,), device=logits.device)
    factor = torch.full((n,), 1 / n, device=logits.device)
    tile = None if e == 4 else torch.empty_like(before)

    def way(sums, slope):  # backward: of m, s, hit and lse
        return sums, lambda: (*(out := sums()), out[0] + out[1].log()), slope

    def ours(m, s, hit, lse):
        kernels.ce_grad_triton_(logits, local, lse, factor, None, 0.0)
        return (logits,)

    plain, slope = compile(sums_ref), compile(slope_ref)
    return "cross_entropy", "ce_local, ce_grad", dict(
        triton=way(lambda: kernels.ce_local_triton(logits, local, None), ours),
        torch=way(lambda: kernels.ce_local_(logits, logits, local, None, tile),
                  lambda m, s, hit, lse: kernels.ce_grad_(logits, logits, local, lse, s * (
                      m - lse).exp(), hit, None, 0.0, tile)),
        compiled=way(lambda: plain(logits, local),
                     lambda m, s, hit, lse: slope(logits, local, lse, factor)),
        truth=way(lambda: sums_ref(before, local),
                  lambda m, s, hit, lse: slope_ref(before, local, lse, factor)),
    ), (n * V * e + n * (8 + 3 * 4), 2 * n * V * e + n * (8 + 2 * 4))


def memory_lines(clock, s, copy, totals, make, *more):
    """Forward and backward of a case; adds to totals[operation][way]."""
    rand = partial(torch.randn, device=clock.device, dtype=clock.dtype)
    op, title, ways, moved = make(s, clock.dtype.itemsize, lambda *n: rand(n), clock.compile, *more)
    names, both = (f"{title}, forward", f"{title}, backward"), (ways["triton"], ways.pop("truth"))
    differs = [clock.differs(names[0], lambda: zip(*(way[0]() for way in both))),
               clock.differs(names[1], lambda: zip(*(way[2](*way[1]()) for way in both)))]
    if clock.device == "cpu":
        del ways["compiled"]
    for i, (name, nbytes) in enumerate(zip(names, moved)):
        times = {key: clock(f"{name}, {key}", way[2 * i], way[1] if i else tuple)
                 for key, way in ways.items()}
        for key, (ms, _) in times.items():
            totals[op][key] += ms
        (ms, launch), rate = times["triton"], nbytes / times["triton"][0] / 1e6
        print(f"| {name} | {nbytes / 1e6:,.1f} | {ms:.3f} | {rate:,.0f} | {rate / copy:.2f} | "
              f"{launch:.0f} | {times['torch'][0]:.3f} | "
              f"{times.get('compiled', (NAN,))[0]:.3f} | {differs[i]:.1e} |", flush=True)


def memory_table(clock, s, totals):
    x, y = torch.zeros(2, s["copy"], dtype=torch.uint8, device=clock.device)
    copy = 2 * s["copy"] / clock("device copy", partial(y.copy_, x))[0] / 1e6
    print(f"device copy: {copy:,.0f} GB/s ({s['copy'] / 2**20:,.0f} MiB, read and written); an "
          "operation is to reach 0.85 of it\n\n| operation | MB | Triton ms | GB/s | of the copy | "
          "launch us | PyTorch path ms | compiled definition ms | differs |\n" + "|---" * 9 + "|")
    del x, y
    for case in ((norm_case, False), (norm_case, True), (rotary_case,), (swiglu_case,),
                 (loss_case,)):
        clock.attempt(case[0].__name__, partial(memory_lines, clock, s, copy, totals, *case))


# ---- Attention


def flash(length, q, k, v):
    """torch's flash kernel, causal, on sequences of `length`: equal documents are just these."""
    heads = [x.unflatten(1, (-1, length)).flatten(0, 1).transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else contextlib.nullcontext():
        o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2).reshape(q.shape)


def attention_line(clock, s, totals, d, T, keys):
    B, seen, at = s["tokens"] // T, s["seen"], torch.arange(T, dtype=torch.int32)
    q, k, v, do = (torch.randn(B, T, heads, d, device=clock.device, dtype=clock.dtype)
                   for heads in (s["H"], s["Hkv"], s["Hkv"], s["H"]))
    first = {"causal": at * 0, "documents": at // seen * seen, "window": (at - seen + 1).clamp(0)}
    first = first[keys]
    lo = None if keys == "causal" else first.to(clock.device).repeat(B, 1)
    bounds = None if lo is None else (first.numpy(), at.numpy() + 1)
    flops = 4 * d * s["H"] * B * int((at + 1 - first).sum())
    fns = {how: lambda *x, how=how: kernels.attention(*x, lo, None, bounds, how=how)[0]
           for how in ("triton", "torch")}
    if keys != "window":
        fns["flash"] = partial(flash, T if lo is None else seen)

    def both(fn):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = fn(*leaves)
        return out, *torch.autograd.grad(out, leaves, do)

    name, rates = f"attention, d {d}, T {T}, {keys}", {"flash": (NAN, NAN)}
    differs = clock.differs(name, lambda: zip(both(fns["triton"]), both(fns["torch"])))
    for key, fn in fns.items():
        one, _ = clock(f"{name}, {key}, forward", partial(torch.no_grad()(fn), q, k, v))
        two, _ = clock(f"{name}, {key}, both", partial(both, fn))
        rates[key] = flops / one / 1e9, 3.5 * flops / two / 1e9
        if lo is not None:  # without, auto is torch's fused kernel
            totals["attention"][key] += two
    columns = [f"{f:.1f} | {ours:.1f} | {ours / f:.2f} | {path:.1f}"
               for f, ours, path in zip(rates["flash"], rates["triton"], rates["torch"])]
    keys += "" if lo is None else f" of {seen}"
    print(f"| {d} | {B} x {T} | {keys} | {' | '.join(columns)} | {differs:.1e} |", flush=True)


def attention_table(clock, s, totals):
    parts = [f"{direction}: flash | Triton | ratio | PyTorch path"
             for direction in ("forward", "forward + backward")]
    print(f"\nAttention, {s['H']} heads on {s['Hkv']}, TFLOP/s. flash: torch's kernel alone; "
          "the PyTorch path is that or, with intervals, row blocks.\n\n| d | sequences | keys | "
          + " | ".join(parts) + " | differs |\n" + "|---" * 12 + "|")
    for d in s["heads"]:
        for T in s["lengths"]:
            for keys in ("causal", "documents", "window"):
                line = partial(attention_line, clock, s, totals, d, T, keys)
                clock.attempt(f"attention, d {d}, T {T}, {keys}", line)


def auto_line(totals):
    """Does AUTO["cuda"] hold? Of attention: with intervals."""
    ratios = {op: ms["triton"] / ms["torch"] for op, ms in totals.items()}
    print("\nTriton's time over the PyTorch path's, eager, forward + backward: "
          + ", ".join(f"{op} {ratio:.2f}" for op, ratio in ratios.items()))
    faster = tuple(op for op, ratio in ratios.items() if ratio < 1)
    says = tuple(op for op in kernels.AUTO["cuda"] if op in ratios)
    print(f'measured `"cuda": {faster}`, kernels.AUTO has `{says}`: '
          + ("the same" if {*faster} == {*says} else "NOT the same"))


# ---- Whole steps


def step_config(args, device, folder, compile, how):
    """The config as it stands, but on one GPU, with fewer microbatches and random tokens."""
    config = train.load_config([args.step])
    config["model"] |= TINY_MODEL if args.tiny else {}
    micro = args.microbatch or (1 if args.tiny else config["train"]["microbatch"])
    train.merge(config, {
        "data": {"path": str(folder), "seq_len": 32 if args.tiny else config["data"]["seq_len"]},
        "train": {"steps": 10**6, "microbatch": micro, "global_batch": micro * args.accumulate},
        "parallel": dict.fromkeys(("pp", "dp", "fsdp", "cp", "tp", "chunks"), 1)
        | {"stages": None, "zero": 0, "offload": "none"},
        "speed": {"dtype": "bfloat16" if device == "cuda" else "float32", "compile": compile,
                  "kernels": how}}, "bench")
    return config


def timed_steps(run, steps, device):
    """-> seconds a step, FLOPs a step, the last loss. Like train.train, without its log."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    tokens = run.config["train"]["global_batch"] * run.config["data"]["seq_len"]
    run.loader.start(0)
    for i in range(-3, steps):  # three compile and warm
        if i == 0:
            wait()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            flops, start = 0, time.perf_counter()
        _, batches, pending = train.next_batch(run, False)
        count, _, pairs = pending.wait()
        metrics = train.train_step(run, batches, count)
        if i >= 0:
            flops += train.model_py.flops(run.model.cfg, tokens, pairs)
    wait()
    seconds = (time.perf_counter() - start) / steps
    run.loader.close()
    return seconds, flops / steps, metrics[0].item()


def step_line(args, device, folder, compile, how):
    config = step_config(args, device, folder, compile, how)
    torch.set_float32_matmul_precision(config["speed"]["matmul"])
    run = train.build(config, parallel.build_mesh(train.check_config(config, 1), device))
    seconds, flops, loss = timed_steps(run, args.steps, device)
    rate = config["train"]["global_batch"] * config["data"]["seq_len"] / seconds
    peak = train.peak_flops(run.mesh.device, run.blocks.dtype)  # None: not in train.PEAK
    print(f"| {'compiled' if compile else 'eager'} | {how} | {rate:,.0f} | {seconds * 1e3:,.1f} | "
          f"{flops / seconds / (peak or NAN):.1%} | {train.memory_gb(run.mesh.device):.2f} | "
          f"{loss:.4f} |", flush=True)


def step_table(args, clock):
    hows = ("torch", "auto", "triton")[: 2 + (kernels.triton is not None)]
    with tempfile.TemporaryDirectory() as folder:
        config = step_config(args, clock.device, folder, False, "auto")
        m, t, speed = config["model"], config["train"], config["speed"]
        data.synth(folder, tokens=2**21, vocab=m["vocab_size"] or 257, docs=2**11)
        print(f"{args.step}: {m['n_layer']} layers of {m['d_model']}, {speed['dtype']}, recompute "
              f"{speed['recompute']}; a step: {args.accumulate} microbatches of {t['microbatch']} "
              f"x {config['data']['seq_len']} random tokens; mean of {args.steps} steps\n\n"
              "| layers | kernels | tokens/s | step ms | MFU | peak GB | loss |")
        print("|---" * 7 + "|", flush=True)
        for compile in (False, True)[: 1 + (clock.device == "cuda")]:
            for how in hows:
                line = partial(step_line, args, clock.device, folder, compile, how)
                clock.attempt(f"compile {compile}, kernels {how}", line)
                torch._dynamo.reset()
                gc.collect()
                if clock.device == "cuda":
                    clock.attempt("empty_cache", torch.cuda.empty_cache)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="memory,attention")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--step", metavar="CONFIG")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches a step")
    parser.add_argument("--microbatch", type=int, help="sequences; default: the config's")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        sys.exit("bench/gpu.py: torch sees no GPU here; --tiny checks the script on a CPU")
    if kernels.triton is None and not args.step:
        sys.exit("bench/gpu.py: kernels.py has no Triton: it needs the package and torch for a GPU")
    if args.tiny:
        args.repeats, args.steps, args.accumulate = 2, 2, 2
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    version = getattr(kernels.triton, "__version__", None)
    print(f"{datetime.date.today()}, {card}, torch {torch.__version__}, Triton {version}, CUDA "
          f"{torch.version.cuda}: `python bench/gpu.py {' '.join(sys.argv[1:])}`\n")
    torch.manual_seed(0)
    clock, s = Clock(device, args.repeats), TINY if args.tiny else LLAMA
    totals = collections.defaultdict(collections.Counter)
    if args.step:
        step_table(args, clock)
    else:
        tables = dict(memory=memory_table, attention=attention_table)
        for name in args.only.split(","):
            tables[name](clock, s, totals)
        auto_line(totals)
    for line in clock.failures:
        print(f"\nFAILED {line}")
    return 1 if clock.failures else 0


if __name__ == "__main__":
    sys.exit(main())
