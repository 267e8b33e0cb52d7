"""Pools of worker processes that stay alive for the test session: tests send them functions.

Each pool is one gloo world on loopback. Workers come from a forkserver that has imported torch and
has run no operator; a worker that hangs or dies ends its pool, and the next test starts another."""

import io
import multiprocessing
import os
import pathlib
import sys
import tempfile
import traceback

import torch

ROOT = pathlib.Path(__file__).parent.parent


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
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["parity"])
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
