"""Checkpoints of a training run: ours against torch.distributed.checkpoint, on the same tensors.

    python bench/ckpt.py                 one process, two threads
    python bench/ckpt.py --ranks 2       two gloo ranks, one thread each, ZeRO 3

The Llama shape with short sequences, so that a save of its weights and moments lasts for some
steps. The contenders take turns, in an order that rotates; each round begins with steps beside
which nothing is saved. `kept`: torch's stager, kept between saves (a call with defaults makes a new
one). Saves end when their bytes are on the disk (both call fsync); loads read the page cache.

    stall   seconds that the call keeps the training thread
    done    seconds until every rank knows, after a step, that the save is complete
    step    seconds of a step beside which nothing is saved (median)
    lost    seconds that training loses to a save: stall and longer steps
    slow    the mean step that begins while this rank writes, over `step`
    save, load    GB/s of all ranks together, nothing beside them

Last comes `@bench [{"what", "unit", "ours", "theirs"}, ...]`, each round of ours and of DCP."""

import argparse
import collections
import functools
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings

from sharded import start_ranks

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402

import checkpoint  # noqa: E402
import data  # noqa: E402
import model as model_py  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402


def build(folder, args):
    if dist.get_rank() == 0:
        data.synth(folder / "tokens", tokens=200_000, vocab=8192, docs=100, seed=0)
    dist.barrier()
    config, n = train.load_config([]), args.ranks
    train.merge(config, {
        "model": {"n_layer": args.layers, "d_model": args.width, "n_head": 8, "n_kv_head": 4,
                  "d_ff": 1408, "vocab_size": 8192, "tied": False},
        "data": {"path": str(folder / "tokens"), "seq_len": 64}, "checkpoint": {"keep": 1},
        "train": {"steps": 10**6, "global_batch": n}, "run": {"dir": str(folder / "run")},
        "parallel": {"dp": 1, "fsdp": n, "zero": 3 if n > 1 else 0}}, "bench")
    run = train.build(config, parallel.build_mesh(train.check_config(config, n), "cpu"))
    run.loader.start(0)
    return run


def step(run, ended=False):
    """Its seconds; the sums over all ranks of `ended` and of the saver's counts."""
    clock = time.perf_counter()
    _, batches, pending = train.next_batch(run, ended)
    count, ended, _, *counts = pending.wait()
    train.train_step(run, batches, count)[0].item()
    return time.perf_counter() - clock, ended, counts


def ours(run):
    """Seconds that the call took, that all took until every rank knew of the end, and of the steps
    meanwhile: [(did it begin while this rank was writing, seconds)]."""
    clock, times = time.perf_counter(), []
    train.save(run, beside=True)
    stall = time.perf_counter() - clock
    while run.saver.save:
        writing = run.saver.thread.is_alive()
        seconds, _, counts = step(run)
        times.append((writing, seconds))
        train.settle(run, counts)
    assert run.saver.done and not run.saver.failures
    return stall, time.perf_counter() - clock, times


def theirs(run, path, group, stager):
    clock, times, ended = time.perf_counter(), [], 0
    future = dcp.async_save(tensors(run), checkpoint_id=path, process_group=group,
                            async_stager=stager)
    stall = time.perf_counter() - clock
    while ended < run.mesh.world:
        writing = not future.done()
        seconds, ended, _ = step(run, not writing)
        times.append((writing, seconds))
    return stall, time.perf_counter() - clock, times


def tensors(run):  # of this rank alone: nothing is saved twice
    return {f"{p.name}/{run.mesh.rank}": p.data for p in model_py.pieces(run.blocks, shared=True)}


def timed(fn):
    dist.barrier()
    clock = time.perf_counter()
    fn()
    dist.barrier()
    return time.perf_counter() - clock


def alone(run, name, path):
    """Seconds of a save and a load with nothing beside them."""
    if name == "ours":
        pieces = model_py.pieces(run.blocks, shared=True)
        newest = f"{run.config['run']['dir']}/checkpoints/step_{run.step:09d}"
        return timed(lambda: train.save(run)), timed(lambda: checkpoint.load(newest, pieces))
    return (timed(lambda: dcp.save(tensors(run), checkpoint_id=path)),
            timed(lambda: dcp.load(tensors(run), checkpoint_id=path)))


def measure(run, folder, args):
    """{name: [a row of figures a round]}."""
    dcp_way = functools.partial(theirs, path=folder / "dcp", group=dist.new_group(backend="gloo"))
    stager = DefaultStager(StagingOptions(False, False, False, False))
    beside = {"ours": ours, "dcp": functools.partial(dcp_way, stager=None),
              "kept": functools.partial(dcp_way, stager=stager)}
    rows, names, everyone = collections.defaultdict(list), [*beside], range(args.rounds + 1)
    for r in everyone:
        for name in names[r % 3 :] + names[: r % 3]:
            plain = statistics.median(step(run)[0] for _ in range(6))
            stall, until, times = beside[name](run)
            shutil.rmtree(folder / "dcp", ignore_errors=True)
            row = {"stall": stall, "done": until, "step": plain, "lost": stall + sum(
                       seconds - plain for _, seconds in times),
                   "slow": statistics.mean([s for writing, s in times if writing] or [plain])
                   / plain}
            step(run)
            if name != "kept":
                row["save"], row["load"] = alone(run, name, folder / "dcp")
                shutil.rmtree(folder / "dcp", ignore_errors=True)
            rows[name] += [row] * (r > 0)  # the first round allocates
            dist.barrier()
    run.loader.close()
    return rows


def records(rows, size):
    """What bench/compare.py reads."""
    names = {"stall": "stall of the training thread",
             "slow": "step while it writes, over one without",
             "done": "until all ranks know that it is complete",
             "save": "save alone", "load": "load, page cache"}
    for key, what in names.items():
        unit = "GB/s" if key in ("save", "load") else "x" if key == "slow" else "s"
        scale = (lambda x: size / 1e9 / x) if unit == "GB/s" else float
        yield {"what": what, "unit": unit, "ours": [scale(row[key]) for row in rows["ours"]],
               "theirs": [scale(row[key]) for row in rows["dcp"]]}


def spread(x):
    return f"{statistics.median(x):7.3f} ({min(x):.3f}-{max(x):.3f})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dir")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    children = start_ranks(args.ranks)
    torch.set_num_threads(2 // args.ranks)
    rank, _, _ = parallel.start("cpu")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        box = [folder]
        dist.broadcast_object_list(box, src=0)
        folder = pathlib.Path(box[0])
        run = build(folder, args)
        mine = sum(x.nbytes for x in tensors(run).values())
        [size] = parallel.sum_integers(run.mesh, mine).wait()
        rows = measure(run, folder, args)
    parallel.stop()
    for child in children:
        child.wait()
    if rank:
        return
    print(f"{size / 1e6:.0f} MB, {args.ranks} ranks, {args.rounds} rounds")
    for name, of_rounds in rows.items():
        for key in of_rounds[0]:
            fast = key in ("save", "load")  # shown as GB/s
            x = [size / 1e9 / row[key] if fast else row[key] for row in of_rounds]
            over = [row[key] / dcp[key] for row, dcp in zip(of_rounds, rows["dcp"])]
            over = [1 / ratio for ratio in over] if fast else over
            print(f"{name:<5} {key:<6}", spread(x), "  over dcp's", spread(over))
    print("@bench", json.dumps([*records(rows, size)]))


if __name__ == "__main__":
    main()
