"""Processes of the tests, all of them forks of one server that has imported torch, which takes
seconds, and has run no operator.

A Pool is one gloo world on loopback that stays alive for the test session: tests send it functions.
A worker that hangs or dies ends its pool, and the next test starts another. A Script is train.py or
another script of the project as the shell or torchrun would start it, with its own end."""

import io
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from unittest import mock

import torch

ROOT = pathlib.Path(__file__).parent.parent


def server():
    """What forks. It imports what its own path has and is silent about the rest: hence the
    variable, at its start. torch imports sympy and numpy.random in its first step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parity", "pytest", "sympy", "numpy.random"])
    with mock.patch.dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"):
        multiprocessing.forkserver.ensure_running()
    return context


def share_a_device(dist):
    """All groups of this process on one gloo device. Each device has a thread that wakes a hundred
    times a second: with one for each group, idle workers take half of a small machine."""
    group, device = dist.ProcessGroupGloo, dist.ProcessGroupGloo.create_default_device()
    plain = group.__init__

    def sharing(self, store, rank, size, timeout):
        options = group._Options()
        options._devices, options._timeout = [device], timeout
        plain(self, store, rank, size, options)

    group.__init__ = sharing


def worker(rank, world, store, pipe):
    assert "parity" in sys.modules, "the server has not imported what it was told to"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch.distributed as dist

    torch.set_num_threads(1)
    share_a_device(dist)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while (job := pipe.recv()) is not None:
        fn, args = job
        try:
            answer = io.BytesIO()  # a pipe would make a file in shared memory of each tensor
            torch.save(fn(*args), answer)
            pipe.send((True, answer.getvalue()))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    def __init__(self, world):
        context = server()
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=worker, args=(rank, world, self.folder.name + "/store",
                                                           there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, fn, *args, timeout=60, beside=None):
        """fn(*args) on every rank (fn of an importable module). The results by rank. `beside`:
        called here while they are at it."""
        for pipe in self.pipes:
            pipe.send((fn, args))
        try:
            if beside:
                beside()
        except BaseException:
            self.close(kill=True)  # answers that nobody waits for
            raise
        results, bad = [], None
        for rank, pipe in enumerate(self.pipes):
            try:
                answered = pipe.poll(timeout if bad is None else 5)
                ok, value = pipe.recv() if answered else (False, "no answer")
            except EOFError:
                ok, value = False, "the process died"
            if not ok and (bad is None or "Error" in value and "Connection" not in value):
                bad = f"rank {rank}: {value}"
            results.append(torch.load(io.BytesIO(value), weights_only=False) if ok else value)
        if bad is not None:
            self.close(kill=True)
            raise AssertionError(bad)
        return results

    def close(self, kill=False):
        for process, pipe in zip(self.processes, self.pipes):
            if kill:
                process.kill()
            else:
                pipe.send(None)
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.processes, self.pipes = [], []
        self.folder.cleanup()


def script(argv, out, env, before):
    """What a Script does in its process: `python ARGV`, after before(rank)."""
    signal.alarm(100)  # the end of one that waits for ever
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(ROOT)
    os.environ.update(env)
    sys.path[:0], sys.argv = [str(ROOT), str(ROOT / "tests")], argv
    try:
        if before:
            before(int(env.get("RANK", 0)))
        runpy.run_path(argv[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


class Script:
    """`python ARGV` in the project's folder; on `ranks` ranks what torchrun would start, without
    the agent that ends all when one has failed. before(rank) is called first in each process."""

    def __init__(self, *argv, ranks=None, before=None):
        self.argv, self.folder, env = list(map(str, argv)), tempfile.TemporaryDirectory(), {}
        if ranks:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                env = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self.processes, self.ends = [], None
        for rank in range(ranks or 1):
            out = pathlib.Path(self.folder.name) / str(rank)
            out.mkdir()
            own = env and {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(server().Process(target=script, daemon=True, args=(
                self.argv, str(out), env | own, before)))
            self.processes[-1].start()

    def said(self, rank=0):
        """What a rank has said so far: [on stdout, on stderr]."""
        if self.ends:
            return self.ends[rank]
        files = [pathlib.Path(self.folder.name) / str(rank) / name for name in ("out", "err")]
        return [file.read_text() if file.exists() else "" for file in files]

    def wait(self, seconds=60):
        """Until all have ended: `codes` and `apart`, the seconds between the first end and the
        last; stdout and stderr of all ranks, the first one's code that is not 0."""
        until, ends, ranks = time.time() + seconds, [], range(len(self.processes))
        while len(ends) < len(ranks) and time.time() < until:
            gone = sum(p.exitcode is not None for p in self.processes)
            ends += [time.time()] * (gone - len(ends))
            time.sleep(0.005)
        for process in self.processes:
            process.kill()
            process.join()
        self.ends = [self.said(rank) for rank in ranks]
        self.folder.cleanup()
        assert len(ends) == len(ranks), self.ends
        self.codes, self.apart = [p.exitcode for p in self.processes], ends[-1] - ends[0]
        self.returncode = next(filter(None, self.codes), 0)
        self.stdout, self.stderr = map("".join, zip(*self.ends))
        return self
