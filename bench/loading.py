"""What data.py costs against what a user would pick instead, on the same two cores, taking turns.

    python bench/loading.py --ranks FILE [--text PATH...] [--turns 7]

(a) Tokenizing: the tokens of `data.prepare`'s path (read, encode, hand over), 2 processes, against
    tiktoken's encode_ordinary_batch(num_threads=2) on the same texts in memory.
(b) A batch from a memory map: Loader.step against the usual idiom (map reopened, slices stacked).

Prints medians of alternating runs, and the ratio with its smallest and largest turn. Last comes
`@bench [{"what", "unit", "ours", "theirs"}, ...]`, each turn of both.
"""
import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tiktoken
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import data  # noqa: E402


def timed(fn):
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def duel(turns, ours, theirs):
    """Seconds a turn, of ours and of theirs: who goes first alternates."""
    ours(), theirs()
    times = ([], [])
    for turn in range(turns):
        for which in ((0, 1), (1, 0))[turn % 2]:
            times[which].append(timed((ours, theirs)[which]))
    return times


def report(name, unit, times, scale, goal):
    """`scale`: seconds -> the unit. Returns what bench/compare.py reads."""
    ratios = sorted(b / a for a, b in zip(*times))
    ours, theirs = ([scale(t) for t in side] for side in times)
    median = statistics.median(ratios)
    print(f"{name}: ours {statistics.median(ours):.4g} {unit}, theirs "
          f"{statistics.median(theirs):.4g} {unit}, ratio {median:.2f} "
          f"({ratios[0]:.2f} to {ratios[-1]:.2f}), goal {goal}: "
          f"{'met' if median >= goal else 'NOT met'}")
    return {"what": name, "unit": unit, "ours": ours, "theirs": theirs}


def tokenizing(paths, ranks, turns):
    files = data.find_text(paths)
    texts = [Path(p).read_text("utf-8", errors="replace") for p, _ in files]
    size = sum(os.path.getsize(p) for p, _ in files) / 1e6
    tok = data.load_tokenizer(ranks)
    counts = []
    encode = functools.partial(data._encode, ranks, "train", 0.0)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        list(pool.map(encode, itertools.islice(data._pieces(files), 4)))  # started and loaded

        def ours():
            work = pool.map(encode, data._pieces(files))
            counts.append(sum(len(d[1]) - (d[3] is not None) for w in work for d in w))

        def theirs():
            counts.append(sum(map(len, tok.bpe.encode_ordinary_batch(texts, num_threads=2))))

        times = duel(turns, ours, theirs)
    print(f"{len(files)} files, {size:.1f} MB, tokens: ours {counts[0]}, theirs {counts[1]}")
    return report("tokenizing, 2 processes against tiktoken's 2 threads", "MB/s", times,
                  lambda t: size / t, 1.2)


def batches(turns, b, T, size, n=300):
    with tempfile.TemporaryDirectory() as folder:
        data.synth(folder, tokens=size, vocab=50257, docs=1000)
        loader = data.Loader([data.Tokens(folder)], None, T, 0, b, b)

        def ours():
            for k in range(n):
                loader.step(k * b)

        def theirs():
            for _ in range(n):
                m = np.memmap(loader.sources[0].files[0], np.uint16, "r", 128, (size,))
                at = torch.randint(len(m) - T, (b,))
                torch.stack([torch.from_numpy(m[i : i + T].astype(np.int64)) for i in at])
                torch.stack([torch.from_numpy(m[i + 1 : i + 1 + T].astype(np.int64)) for i in at])

        times = duel(turns, ours, theirs)
    return report(f"batch of {b} x {T}, over nanoGPT's way", "us", times, lambda t: t / n * 1e6, 5)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--ranks", help="a tiktoken ranks file; without it only batches are measured")
    ap.add_argument("--text", nargs="+", default=[sysconfig.get_path("stdlib") + "/" + g
                                                  for g in ("*.py", "[a-rt-z]*/*.py")])
    ap.add_argument("--turns", type=int, default=7)
    ap.add_argument("--skip-batches", action="store_true")
    ap.add_argument("--tokens", type=int, default=50_000_000, help="in the file of the batches")
    args = ap.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"numpy {np.__version__}, torch {torch.__version__}, tiktoken {tiktoken.__version__}")
    shapes = [] if args.skip_batches else [(8, 256), (4, 512), (12, 1024)]
    found = [batches(args.turns, b, T, args.tokens) for b, T in shapes]
    if args.ranks:
        found.append(tokenizing(args.text, args.ranks, args.turns))
    print("@bench", json.dumps(found))


if __name__ == "__main__":
    main()
