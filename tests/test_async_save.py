"""Saves beside the training: what they hold, who waits, what a failure, a signal and a kill leave.

Runs go through train.main, in this process or in two ranks of the pool; `hook` stands where a save
writes a file and makes that slow, impossible or deadly."""

import contextlib
import errno
import io
import json
import os
import pathlib
import random
import shutil
import signal
import threading
import time
from unittest import mock

import pytest
import torch
from test_train import SMALL, start

import checkpoint
import data
import parallel
import train

ROOT = pathlib.Path(__file__).parent.parent
# main leaves metrics.jsonl, whose every line is written at once, to the end of the process
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
TWO = ["parallel.dp=1", "parallel.fsdp=2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    data.prepare([str(ROOT / "README.md")], folder, quiet=True)
    return folder


def until(true):
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("waited for 10 s in vain")


def on_rank(hook, argv):
    """train.main(argv) with hook(run, step, path) before every file of a save: (exit code, or the
    error; what it said; where the copies lie)."""
    runs, out, places, real = [], io.StringIO(), set(), checkpoint.write_file
    build, stage = train.build, checkpoint.Saver.stage

    def built(*args):
        runs.append(build(*args))
        return runs[0]

    def staged(saver, pieces):
        copies = stage(saver, pieces)
        places.add(tuple(p.data.data_ptr() for p in copies))
        return copies

    def write(path, head, tensors=()):
        hook(runs[0], int(path.parent.name[5:]), path)
        real(path, head, tensors)

    before = [(n, signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM)]
    with (mock.patch.object(train, "build", built), contextlib.redirect_stdout(out),
          mock.patch.object(checkpoint, "write_file", write),
          mock.patch.object(checkpoint.Saver, "stage", staged)):
        try:
            code = train.main(argv)
        except Exception as e:
            if parallel.lost_peer(e):
                raise
            code = f"{type(e).__name__}: {e}"
    for number, handler in before:
        signal.signal(number, handler)
    return code, out.getvalue(), places


@pytest.fixture
def go(text, tmp_path, world):
    """go(name, *argv, hook=, ranks=): a run of 6 steps that saves every second; what each rank
    returned."""
    def go(name, *argv, hook=None, ranks=1):
        base = ["train.steps=6", "checkpoint.every=2", "checkpoint.keep=null", "log.sample=null"]
        argv = [*SMALL, *base, f"data.path={text}", f"run.dir={tmp_path / name}", *argv]
        args = on_rank, hook or at_once, argv
        return world(2).run(*args) if ranks == 2 else [on_rank(*args[1:])]
    return go


def at_once(run, step, path):
    pass


def beside():
    return threading.current_thread() is not threading.main_thread()


def by_the_loop(run, step, path):
    assert not beside() and run.step == step


def hold(run, step, path):
    """Write only when two more steps have been trained."""
    if beside():
        until(lambda: run.step >= step + 2)


def left(root):
    """{step: {file: its bytes}}; of an index without what differs between any two runs."""
    out = {}
    for step, folder in checkpoint.checkpoints(root / "checkpoints"):
        out[step] = {path.name: path.read_bytes() for path in folder.iterdir()}
        index = json.loads(out[step]["index.json"])
        out[step]["index.json"] = index
        del index["written"], index["meta"]["config"]
    return out


# What is saved


@pytest.mark.parametrize("ranks, argv", [
    (1, []), (1, ["speed.dtype=float16", "optim.loss_scale=1e8"]),
    (1, ["parallel.offload=optimizer"]), (2, []), (2, [*TWO, "parallel.zero=1"]),
    (2, [*TWO, "parallel.zero=2"]), (2, ["parallel.tp=2"]),
    (2, [*TWO, "parallel.zero=3", "parallel.offload=optimizer"])],
    ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_a_slow_save_holds_the_step_of_its_call(go, tmp_path, ranks, argv):
    """Bit for bit what a save leaves that nothing runs beside; a resumed run is the same run."""
    for code, _, places in go("beside", *argv, hook=hold, ranks=ranks):
        assert code == 0 and len(places) == 1  # the copies lie where they lay
    results = go("alone", *argv, "checkpoint.async=false", hook=by_the_loop, ranks=ranks)
    assert {code for code, _, _ in results} == {0}
    a, b = left(tmp_path / "beside"), left(tmp_path / "alone")
    assert list(a) == [2, 4, 6] and set(a[2]) == {"index.json", *checkpoint.read_index(
        tmp_path / "beside/checkpoints/step_000000002")["files"]} and len(a[2]) == ranks + 1
    assert a == b and a[2] != a[4]
    if "speed.dtype=float16" in argv:  # the loss scale falls from step to step
        assert len({a[step]["index.json"]["meta"]["loss_scale"] for step in a}) == 3
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"beside/checkpoints/step_{step:09d}")
    code, said, _ = go("beside", *argv, ranks=ranks)[0]
    assert code == 0 and "at step 2" in said and left(tmp_path / "beside")[6] == b[6]


def test_the_second_waits_for_the_first(go, tmp_path):
    writing = []

    def slow(run, step, path):
        if beside() and path.suffix != ".tmp":
            writing.append(step)
            assert len(set(writing)) == 1
            time.sleep(0.2)
            writing.clear()

    (code, said, places), = go("run", "checkpoint.every=1", hook=slow)
    assert code == 0 and len(places) == 1
    waits = [line for line in said.splitlines() if "waited" in line]
    assert [line.split()[3:5] + line.split()[-1:] for line in waits] == [
        [str(n), "waited", str(n - 1)] for n in range(2, 7)]
    assert all(float(line.split()[5]) >= 0.1 for line in waits)
    assert list(left(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_the_last_and_every_nth_are_kept(go, tmp_path):
    (code, _, _), = go("run", "checkpoint.every=1", "checkpoint.keep=2", "checkpoint.keep_every=3")
    assert code == 0 and list(left(tmp_path / "run")) == [3, 5, 6]
    with pytest.raises(ValueError, match="checkpoint.keep_every"):
        train.check_config(train.load_config(["checkpoint.keep_every=0"]), 1)


# What goes wrong


def full(run, step, path, of="rank_00001"):
    """The disk of one rank is full at step 4, in the middle of a file."""
    hold(run, step, path)
    if step == 4 and of in path.name:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")


def full_for_index(run, step, path):
    full(run, step, path, of="index.json")


@pytest.mark.parametrize("hook, rank", [(full, 1), (full_for_index, 0)])
def test_a_full_disk_costs_one_checkpoint(go, tmp_path, hook, rank):
    results = go("run", hook=hook, ranks=2)
    assert [code for code, _, _ in results] == [0, 0] and results[1][1] == ""
    said = [line for line in results[0][1].splitlines() if "No space" in line]
    assert len(said) == 1 and f"step 4, training goes on: rank {rank}: " in said[0]
    assert not list((tmp_path / "run/checkpoints/step_000000004").iterdir())
    go("alone", "checkpoint.async=false", ranks=2)
    a, b = left(tmp_path / "run"), left(tmp_path / "alone")
    assert list(a) == [2, 6] and a == {2: b[2], 6: b[6]}


def test_the_last_save_must_succeed(go, tmp_path):
    def fail(run, step, path):
        if step == 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    (code, _, _), = go("run", hook=fail)
    assert code == "RuntimeError: rank 0: [Errno 28] No space left on device"
    assert list(left(tmp_path / "run")) == [2, 4]


def interrupt(run, step, path):
    """SIGTERM, of rank 1 alone, while both write; the one is slower than the other."""
    if beside() and step == 2 and path.suffix != ".tmp":
        if run.mesh.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3 * run.mesh.rank)


def test_a_signal_waits_for_both_checkpoints(go, tmp_path):
    results = go("run", "run.signal_exit_code=17", "train.steps=60", hook=interrupt, ranks=2)
    assert [code for code, _, _ in results] == [17, 17]
    first, last = left(tmp_path / "run")
    assert first == 2 and 2 < last < 60
    for _, folder in checkpoint.checkpoints(tmp_path / "run/checkpoints"):
        checkpoint.verify(folder)
    for name in ("run", "whole"):
        results = go(name, "checkpoint.every=null", "train.steps=60", ranks=2)
        assert ("resumed" in results[0][1]) == (name == "run")
    assert left(tmp_path / "run")[60] == left(tmp_path / "whole")[60]


def test_a_stop_at_the_step_of_a_save_needs_no_other(go, monkeypatch):
    """Saved at step 4 and stopped before the next."""
    files, next_batch = [], train.next_batch
    monkeypatch.setattr(train, "next_batch", lambda run, stop: next_batch(run, run.step == 3))
    (code, said, _), = go("run", hook=lambda run, step, path: files.append((step, path.suffix)))
    assert code == 0 and "checkpoint of step 4 in" in said
    assert files == [(step, suffix) for step in (2, 4) for suffix in (".safetensors", ".tmp")]


def die(rank):
    """While both write step 4 rank 1 dies; the thread of rank 0 would go on for long."""
    real = checkpoint.write_file

    def write(path, head, tensors=()):
        if "step_000000004" in str(path):
            path.write_bytes(head + b"half")
            if rank == 0:
                time.sleep(60)
            time.sleep(0.2)
            os._exit(9)
        real(path, head, tensors)

    checkpoint.write_file = write


def test_a_kill_in_the_middle_leaves_the_one_before(go, text, tmp_path):
    """Rank 1 dies while both write; rank 0 ends with an error and does not wait for its thread."""
    done = start(text, tmp_path / "run", "checkpoint.every=2", "log.sample=null", "train.steps=600",
                 ranks=2, before=die).wait(50)
    assert done.codes == [1, 9], done.stderr
    assert "a rank it waited for is gone" in done.said(0)[1]
    root = tmp_path / "run/checkpoints"
    assert len(list((root / "step_000000004").iterdir())) == 2  # what the next save removes
    path = checkpoint.latest(root, lambda line: None)
    checkpoint.verify(path)
    assert checkpoint.read_meta(path)["step"] == 2
    for name in ("run", "whole"):
        go(name, "train.steps=8", ranks=2)
    assert left(tmp_path / "run")[8] == left(tmp_path / "whole")[8]
    assert left(tmp_path / "run")[4] == left(tmp_path / "whole")[4]


# The protocol by itself


class Stub:
    """A Save whose parts take random times and fail now and then."""

    def __init__(self, step, draw):
        self.step, self.draw, self.dropped = step, draw, False

    def write(self):
        time.sleep(self.draw.random() * 0.004)
        if self.draw.random() < 0.15:
            raise OSError("full")

    commit = write

    def drop(self):
        self.dropped = True


@pytest.mark.quick
def test_sums_that_come_late_are_the_same_decision_on_all_ranks():
    """Three ranks, sums that are two rounds old: all go on in the same round, and what failed
    anywhere is dropped everywhere."""
    savers, draws = [checkpoint.Saver(3) for _ in range(3)], [random.Random(r) for r in range(3)]
    late, ends = [(0, 0)] * 2, {"done": 0, "dropped": 0}

    def agree(error):
        raise RuntimeError(error)

    for n in range(1500):
        late.append([sum(counts) for counts in zip(*(s.counts for s in savers))])
        sums, was, raised = late.pop(0), [s.save for s in savers], []
        for saver in savers:
            try:
                saver.settle(*sums, agree)
            except RuntimeError:
                raised.append(saver)
        assert len({(s.begun, s.done, s.save is None) for s in savers}) == 1, n
        assert len(raised) in (0, 3) and all(save.dropped for save in was if raised)
        if savers[0].save is None:
            ends["dropped" if raised else "done"] += was[0] is not None
            assert raised or was[0] is None or savers[0].done == was[0].step
            for saver, draw in zip(savers, draws):
                saver.stage([])
                saver.start(Stub(n, draw))
        time.sleep(0.0005)
    assert min(ends.values()) > 10, ends


@pytest.mark.quick
def test_the_copy_has_the_bits_of_every_dtype():
    saver, places = checkpoint.Saver(1), set()
    for value in (1, 0):
        pieces = [checkpoint.Piece(str(t), torch.full((n,), value, dtype=t), 0, (n,), (0,), (n,))
                  for n, t in enumerate([*checkpoint.DTYPES.values()])]
        copies = saver.stage(pieces)
        places.add(saver.memory.data_ptr())
        for copy, piece in zip(copies, pieces):
            assert torch.equal(copy.data, piece.data) and copy[2:] == piece[2:]
            piece.data.zero_()
            assert copy.data.tolist() == [value] * len(copy.data)
    assert len(places) == 1
