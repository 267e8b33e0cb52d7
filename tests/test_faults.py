"""Ranks that hang, slow steps, ranks and hosts that are killed: what is said and what goes on."""

import json
import pathlib
import subprocess
import sys
import time

import parity
import pytest
import test_train

import train

ROOT = pathlib.Path(__file__).parent.parent
text = test_train.text  # the fixture

# ---- A rank that does not come. Two ranks are forks of one process; rank 1 sleeps.

OPERATIONS = {  # what rank 0 does, and what its error says
    "all_reduce(m, torch.ones(4), 'shard')": "all_reduce sum over shard: ",
    "all_reduce(m, torch.ones(4), 'dp', 'max', wait=False).wait()": "all_reduce max over dp: ",
    "all_gather(m, torch.ones(4), 'fsdp', 'of it')": "all_gather (of it) over fsdp: ",
    "reduce_scatter(m, torch.ones(4), 'fsdp')": "reduce_scatter over fsdp: ",
    "shift_start(m, torch.ones(4), 'cp').wait()": "shift over cp: ",
    "receive(m, torch.ones(4), 1).wait()": "receive over pp: ",
    "send(m, torch.ones(10**7), 1).wait()": "send over pp: ",
    "Pending(m, 1).wait()": "all_reduce sum (control) over world: ",
    "agree(m)": "agree over world: ",
    "train.train": "all_gather over shard: ",
}
HANG = """
import os, re, runpy, signal, sys, time
root, out, seconds, *cases = sys.argv[1:]
sys.path.insert(0, root)
import sympy, torch, train
from parallel import *

def rank_main(n, case, rank):
    signal.alarm(40)  # the end of a rank that waits for ever
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORTS[n]))
    file = os.open(f"{out}/{n}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    if case.startswith("train.train"):
        forward, calls = train.model_py.Layer.forward, []
        def late(*args, **kw):
            calls.append(1)
            if rank == 1 and len(calls) == 6:
                time.sleep(3 * int(seconds))
            return forward(*args, **kw)
        train.model_py.Layer.forward = late
        sys.argv = ["train.py", *case.split()[1:]]
        runpy.run_path(f"{root}/train.py", run_name="__main__")
    start("cpu")
    axis = next((a for a in ("dp", "cp", "pp") if f"'{a}'" in case), "fsdp")
    axis = "pp" if re.match("receive|send|swap", case) else axis
    m = build_mesh(layout_of(2, **{axis: 2}), "cpu", int(seconds))
    agree(m)
    if rank == 1:
        time.sleep(2 * int(seconds))
        os._exit(0)
    began = time.time()
    try:
        eval(case)
    except RuntimeError as error:
        print(round(time.time() - began, 1), error, flush=True)
    os._exit(0)

PORTS = []
import socket
sockets = [socket.socket() for _ in cases]
for s in sockets:
    s.bind(("127.0.0.1", 0))
    PORTS.append(s.getsockname()[1])
for s in sockets:
    s.close()
pids = {}
for n, case in enumerate(cases):
    for rank in (0, 1):
        pids[n, rank] = os.fork()
        if pids[n, rank] == 0:
            rank_main(n, case, rank)
codes = {key: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for key, pid in pids.items()}
print([codes[len(cases) - 1, rank] for rank in (0, 1)])
"""


@pytest.fixture(scope="module")
def hung(text, tmp_path_factory):
    """{case: what (rank 0, rank 1) said}, and the exit codes of the run of train.py."""
    out = tmp_path_factory.mktemp("hung")
    (out / "hang.py").write_text(HANG)
    *cases, last = OPERATIONS
    run = ["data.path=" + str(text), f"run.dir={out}/run", *test_train.SMALL, "parallel.dp=1",
           "parallel.fsdp=2", "parallel.zero=3", "parallel.timeout=3"]
    cases.append(" ".join([last, *run]))
    done = subprocess.run([sys.executable, out / "hang.py", ROOT, out, "3", *cases],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = {case: [(out / f"{n}-{rank}.txt").read_text() for rank in (0, 1)]
            for n, case in enumerate(OPERATIONS)}
    return said, json.loads(done.stdout)


@pytest.mark.parametrize("case", [*OPERATIONS][:-1])
def test_what_hangs_ends_with_its_name(hung, case):
    """After the mesh's timeout, not the world's."""
    said = hung[0][case][0]
    seconds, _, error = said.partition(" ")
    assert error.startswith(OPERATIONS[case]) and "Timed out" in error, said
    assert 2 < float(seconds) < 10, said


def test_a_run_that_hangs_ends_with_the_name(hung):
    """Rank 0 shows what it waited for and where; rank 1, when it wakes, only says so."""
    (zero, one), codes = hung[0]["train.train"], hung[1]
    assert codes == [1, 1], (zero, one)
    assert zero.splitlines()[-1].startswith("RuntimeError: all_gather over shard: "), zero
    assert zero.count("Traceback") == 1 and "Traceback" not in one, (zero, one)
    assert "train.py: a rank it waited for is gone: " in one and " over " in one, one


# ---- A step that is slow


def test_a_slow_step_is_told_once(tokens, monkeypatch, capsys):
    """Ten times the median of at least ten steps; what is done between steps is not counted."""
    clock = [100.0]
    case = {"log.every": 1000, "train.steps": 40, "checkpoint.every": 15}
    run = parity.prepare(case, str(tokens))

    def step(run, batches, count):
        run.step += 1
        run.samples += run.config["train"]["global_batch"]
        clock[0] += {9: 30.0, 25: 4.9, 30: 5.5}.get(run.step, 0.5)
        return train.torch.tensor([1.0, 1.0, 0.0, 0.0])

    def save(run):
        clock[0] += 60

    with monkeypatch.context() as patch:
        patch.setattr(train, "peak_flops", lambda *_: None)
        patch.setattr(train.Log, "open", lambda self: [])
        patch.setattr(train.time, "perf_counter", lambda: clock[0])
        patch.setattr(train, "train_step", step)
        patch.setattr(train, "save", save)
        train.train(run, train.Log(run), [])
    run.loader.close()
    told = [line for line in capsys.readouterr().out.splitlines() if "took" in line]
    assert told == ["step 30: took 5.50 s, the median of the 29 before it is 0.50 s"]


def test_the_clock_of_a_process():
    """Also in one that was forked late."""
    code = ("import os, time, train; time.sleep(1)\n"
            "if os.fork() == 0: time.sleep(.5)\n"
            "else: os.wait()\n"
            "print(train.age(), flush=True)")
    began = time.time()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    child, parent = map(float, done.stdout.split())
    assert 0.5 <= child <= 5 and child + 1 <= parent <= time.time() - began + 0.1
