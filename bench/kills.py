"""Kill a run of two ranks again and again, start it again each time, and compare its end with that
of a run that was left alone.

    python bench/kills.py --kills 200
    python bench/kills.py --kills 200 --set checkpoint.every=2 parallel.fsdp=2 parallel.zero=3

Each attempt is two forks of this process, which has imported torch and run no operator. It is left
alone until it has saved a few times (or none), and then, at a random moment, one rank or all get
SIGKILL, or all get SIGTERM; half of the moments lie in a save. Then the
newest complete checkpoint must load, and no step before it may be lost. In the end all numbers and
the last checkpoint are compared, bit for bit. Choices follow from --seed, the machine's timing not.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import sympy  # noqa: E402, F401  (torch imports it in its first step)

import checkpoint  # noqa: E402
import data  # noqa: E402
import train  # noqa: E402, F401

BASE = ["model.n_layer=2", "model.d_model=128", "model.n_head=4", "model.n_kv_head=2",
        "model.d_ff=128", "model.vocab_size=8192", "data.seq_len=32", "train.global_batch=4",
        "train.microbatch=2", "train.eval_every=null", "train.eval_sequences=4", "optim.warmup=2",
        "speed.threads=1", "log.every=1", "log.fingerprint_every=4", "log.sample=null",
        "checkpoint.every=1", "parallel.timeout=60", "parallel.dp=auto", "run.signal_exit_code=3"]
PLACES = ["before the first step", "in a step", "staging", "writing", "index rename", "pruning"]


def rank_main(rank, port, argv, log):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["train.py", *argv]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code or 0)


def start(folder, argv):
    """Both ranks: their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in (0, 1):
        pids.append(os.fork())
        if pids[-1] == 0:
            rank_main(rank, port, [*argv, f"run.dir={folder}"], f"{folder}-{rank}.txt")
            os._exit(0)
    return pids


def ended(pids, codes, wait=0.0):
    """Collect the exit codes of ranks that have ended, for `wait` seconds at most. All?"""
    until = time.time() + wait
    while True:
        for pid in pids:
            if pid not in codes and (got := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(got[1])
        if len(codes) == len(pids) or time.time() >= until:
            return len(codes) == len(pids)
        time.sleep(0.005)


def complete(folder):
    found = checkpoint.checkpoints(folder / "checkpoints")
    return found[-1] if found else (0, None)


def place(folder, keep, was):
    """Where the kill fell, judged from what is in the folder: (place, steps logged). A folder
    without an index is a save under way; without files it was being staged; with the index's
    temporary file it was about to appear; more than `keep` complete ones: pruning was due."""
    root, logged = folder / "checkpoints", 0
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                logged = max(logged, json.loads(line)["step"])
    newest = max(root.glob("step_*"), default=None)
    names = {path.name for path in newest.iterdir()} if newest else set()
    if f"{checkpoint.INDEX}.tmp" in names:
        return "index rename", logged
    if newest and checkpoint.INDEX not in names and int(newest.name[5:]) > was:
        return ("writing" if names else "staging"), logged
    whole = checkpoint.checkpoints(root)
    if len(whole) > keep or len([*root.glob("step_*")]) > len(whole):
        return "pruning", logged
    return ("in a step" if whole and whole[-1][0] > was or logged > was
            else "before the first step"), logged


def in_a_save(folder, last, pids, codes, patience, rng):
    """Wait for the next save to begin, and then a random part of the time a save takes."""
    until, root = time.time() + patience, folder / "checkpoints"
    while time.time() < until and not ended(pids, codes):
        newest = max(root.glob("step_*"), default=None)
        if newest and int(newest.name[5:]) > last and not (newest / checkpoint.INDEX).exists():
            return time.sleep(rng.random() * 0.3)
        time.sleep(0.001)


def saved(folder, step, pids, codes, patience):
    """Wait until the checkpoint of `step` or a later one has its index."""
    until, root = time.time() + patience, folder / "checkpoints"
    while time.time() < until and not ended(pids, codes, 0.005):
        if any(int(path.parent.name[5:]) >= step for path in root.glob(f"*/{checkpoint.INDEX}")):
            return


def attempt(folder, argv, rng, span, steps):
    """Start the run and kill it at a random moment: a row about what happened."""
    last, _ = complete(folder)
    pids, codes = start(folder, argv), {}
    how = rng.choice(["one rank", "all ranks", "all ranks", "SIGTERM"])
    if n := rng.randrange(4):
        saved(folder, last + n, pids, codes, 60)
        ended(pids, codes, rng.random() * 0.2)
    else:
        ended(pids, codes, rng.random() * span)
    if rng.random() < 0.5:
        in_a_save(folder, last, pids, codes, span, rng)
    alive = [pid for pid in pids if pid not in codes]
    victims = [rng.choice(alive)] if how == "one rank" and alive else alive
    for pid in victims:
        os.kill(pid, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    if not ended(pids, codes, 5):  # as torchrun would: a rank waits for one that never joined
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGTERM)
    if not ended(pids, codes, 90):
        for pid in set(pids) - set(codes):
            os.kill(pid, signal.SIGKILL)
        ended(pids, codes, 10)
        raise AssertionError(f"a rank did not end within 90 s of {how} being killed: {codes}")
    where, logged = place(folder, 3, last)
    step, path = complete(folder)
    if path:
        with contextlib.redirect_stdout(io.StringIO()):
            checkpoint.verify(path)
    # every step is saved: a step that is in the log has a save that began before the next one
    assert step >= last and logged <= step + 2, (last, step, logged, where)
    return {"how": how if victims else "nothing (it had ended)", "where": where, "step": step,
            "new": step - last, "codes": [codes[pid] for pid in pids], "killed": bool(victims)}


def fingerprints(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {(row["step"], key): row[key] for row in rows
            for key in ("loss", "grad_norm", "val_loss", "fingerprints") if key in row}


def contents(folder):
    """{tensor and box: its bytes} of the newest checkpoint, and the run's own numbers there."""
    step, path = complete(folder)
    out = {file.name + key: bytes(checkpoint.raw(tensor)) for file in path.glob("*.safetensors")
           for key, tensor in checkpoint.read_safetensors(file).items()}
    out = {key.replace(".1.safetensors", ".safetensors"): value for key, value in out.items()}
    meta = checkpoint.read_meta(path)
    return step, {key: meta[key] for key in meta if key != "config"}, out


def alone(folder, argv):
    """The run to its end, in one go. Returns the seconds it took."""
    pids, codes, began = start(folder, argv), {}, time.time()
    if not ended(pids, codes, 3600) or set(codes.values()) != {0}:
        said = pathlib.Path(f"{folder}-0.txt").read_text()
        raise AssertionError(f"a run that was not killed ended with {codes}: {said[-2000:]}")
    return time.time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600, help="no kill after that many")
    parser.add_argument("--steps", type=int, help="of the run; default: 8 for each kill, 8 more")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="more keys of the config")
    args = parser.parse_args()
    rng, rows, began = random.Random(args.seed), [], time.time()
    with tempfile.TemporaryDirectory() as top:
        top = pathlib.Path(top)
        pid = os.fork()  # as every rank: this process runs no operator
        if pid == 0:
            data.synth(top / "tokens", tokens=30000, vocab=8192, docs=400, seed=1)
            data.synth(top / "tokens", tokens=3000, vocab=8192, docs=40, seed=2, split="val")
            os._exit(0)
        os.waitpid(pid, 0)
        steps = args.steps or 8 * args.kills + 8
        argv = [*BASE, f"data.path={top}/tokens", f"train.steps={steps}", *args.set]
        whole = alone(top / "alone", argv)
        print(f"{steps} steps left alone: {whole:.1f} s", flush=True)
        # a run of two steps tells how long the start takes
        start_s = alone(top / "short", [*argv, "train.steps=2"])
        span = start_s + 6 * whole / steps
        while len(rows) < args.kills and time.time() - began < args.minutes * 60:
            row = attempt(top / "killed", argv, rng, span, steps)
            if not row["killed"]:
                break
            rows.append(row)
            print(f"kill {len(rows)}: {row['how']}, {row['where']}; the newest good checkpoint is "
                  f"of step {row['step']} ({row['new']:+}); exit {row['codes']}", flush=True)
        alone(top / "killed", argv)
        assert contents(top / "killed") == contents(top / "alone"), "the final checkpoints differ"
        a, b = fingerprints(top / "alone"), fingerprints(top / "killed")
        differ = [key for key in a if a[key] != b.get(key)]
        assert not differ, f"other numbers: {differ[:5]}"
        assert len([*(top / "killed" / "checkpoints").iterdir()]) == 3, "left behind"
        counts = {key: collections.Counter(row[key] for row in rows) for key in ("how", "where")}
        print(f"{len(rows)} kills in {time.time() - began:.0f} s, steps {steps}, "
              f"{sum(row['new'] == 0 for row in rows)} attempts without a new checkpoint")
        print("how    " + ", ".join(f"{k} {n}" for k, n in counts["how"].most_common()))
        print("where  " + ", ".join(f"{k} {counts['where'][k]}" for k in PLACES))
        print(f"after every kill the newest checkpoint was good; the end is bit-identical: "
              f"{len(a)} losses, norms and fingerprints, and the final checkpoint")
        shutil.rmtree(top / "short")


if __name__ == "__main__":
    main()
