"""Ranks that hang, slow steps, ranks and hosts that are killed: what is said and what goes on."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import parity
import pytest
import test_train
from pool import Script

import model
import train

ROOT = pathlib.Path(__file__).parent.parent
text = test_train.text  # the fixture

# ---- A rank that does not come: rank 1 sleeps.

OPERATIONS = {  # what rank 0 does, and what its error says
    "all_reduce(m, torch.ones(4), 'shard')": "all_reduce sum over shard: ",
    "all_reduce(m, torch.ones(4), 'dp', 'max', wait=False).wait()": "all_reduce max over dp: ",
    "all_gather(m, torch.ones(4), 'fsdp', 'of it')": "all_gather (of it) over fsdp: ",
    "reduce_scatter(m, torch.ones(4), 'fsdp')": "reduce_scatter over fsdp: ",
    "shift_start(m, torch.ones(4), 'cp').wait()": "shift over cp: ",
    "receive(m, torch.ones(4), 1).wait()": "receive over pp: ",
    "send(m, torch.ones(10**7), 1).wait()": "send over pp: ",
    "sum_integers(m, 1).wait()": "all_reduce sum (control) over world: ",
    "agree(m)": "agree over world: ",
    "train.train": "all_gather over shard: ",
}
HANG = """
import os, re, sys, time, torch
from parallel import *
case, seconds = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
rank, *_ = start("cpu")
axis = next((a for a in ("dp", "cp", "pp") if f"'{a}'" in case), "fsdp")
axis = "pp" if re.match("receive|send|swap", case) else axis
m = build_mesh(layout_of(2, **{axis: 2}), "cpu", seconds)
agree(m)
if rank == 1:
    time.sleep(2 * seconds)
    os._exit(0)
began = time.time()
try:
    eval(case)
except RuntimeError as error:
    print(round(time.time() - began, 1), error, flush=True)
os._exit(0)
"""


def late(rank):
    """Rank 1 sleeps for nine seconds before one of its layers."""
    forward, calls = model.Layer.forward, []

    def sleepy(*args, **kw):
        calls.append(1)
        if rank == 1 and len(calls) == 6:
            time.sleep(9)
        return forward(*args, **kw)

    model.Layer.forward = sleepy


@pytest.fixture(scope="module")
def hung(text, tmp_path_factory):
    """{case: its end}, after a timeout of three seconds; all at once."""
    out = tmp_path_factory.mktemp("hung")
    (out / "hang.py").write_text(HANG)
    runs = {case: Script(out / "hang.py", case, 3, ranks=2) for case in [*OPERATIONS][:-1]}
    runs["train.train"] = test_train.start(
        text, out / "run", "parallel.dp=1", "parallel.fsdp=2", "parallel.zero=3",
        "parallel.timeout=3", ranks=2, before=late)
    return {case: run.wait() for case, run in runs.items()}


@pytest.mark.parametrize("case", [*OPERATIONS][:-1])
def test_what_hangs_ends_with_its_name(hung, case):
    """After the mesh's timeout, not the world's."""
    said = hung[case].said(0)[0]
    seconds, _, error = said.partition(" ")
    assert error.startswith(OPERATIONS[case]) and "Timed out" in error, said
    assert 2 < float(seconds) < 10, said


def test_a_run_that_hangs_ends_with_the_name(hung):
    """Rank 0 shows what it waited for and where; rank 1, when it wakes, only says so."""
    run = hung["train.train"]
    zero, one = ("".join(run.said(rank)) for rank in (0, 1))
    assert run.codes == [1, 1], (zero, one)
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

    def save(run, beside=False):
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


# ---- torchrun starts a run again

STEPS = ["train.steps=12", "train.deterministic=true", "checkpoint.every=1", "log.sample=null",
         "log.fingerprint_every=1"]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """One process that nobody kills: with train.deterministic the bits of every number of ranks."""
    run = tmp_path_factory.mktemp("alone") / "run"
    done = test_train.shell(text, run, *STEPS)
    assert done.returncode == 0, done.stderr
    return numbers(run)


def numbers(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(row["step"], key): row[key] for row in rows
            for key in ("loss", "grad_norm", "fingerprints") if key in row}


class Agent:
    """A torchrun, what it and its ranks said, and its end with all that it started. `inside`: what
    comes before it on its line."""

    def __init__(self, said, argv, *launch, inside=()):
        self.said = said
        line = [*inside, sys.executable, "-m", "torch.distributed.run", "--max-restarts=3",
                "--monitor-interval=0.1", *launch, str(ROOT / "train.py"), *argv]
        with said.open("w") as file:
            self.process = subprocess.Popen(line, cwd=ROOT, stdout=file, stderr=file)

    def ranks(self):
        """The processes that it started, by their rank in it."""
        out = {}
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in map(int, task.read_text().split()):
                env = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                out |= {int(v[11:]): pid for v in env if v.startswith(b"LOCAL_RANK=")}
        return out

    def kill(self):
        """The agent and its ranks, at once."""
        for pid in (self.process.pid, *self.ranks().values()):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def text(self):
        return self.said.read_text()


def wait_for(words, *agents, seconds=90):
    """Until any of them has said it."""
    until = time.time() + seconds
    while not any(words in agent.text() for agent in agents):
        assert time.time() < until and any(a.process.poll() is None for a in agents), \
            [a.text() for a in agents]
        time.sleep(0.02)


def check_end(agent, run, alone, seconds=90):
    """It ends well, says once how long the restart took, and every number is that of the run left
    alone."""
    assert agent.process.wait(seconds) == 0, agent.text()
    said = agent.text()
    assert said.count("resumed ") == said.count("first step after ") == 1, said
    assert numbers(run) == alone
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert folders == [f"step_{step:09d}" for step in (10, 11, 12)]


def test_torchrun_restarts_after_a_rank_is_killed(text, alone, tmp_path):
    """The new ranks meet each other, not the addresses that the old ones left in the store."""
    run = tmp_path / "run"
    argv = [*test_train.SMALL, *STEPS, f"data.path={text}", f"run.dir={run}"]
    agent = Agent(tmp_path / "said.txt", argv, "--standalone", "--nproc-per-node=2")
    try:
        wait_for("step  3/12", agent)
        os.kill(agent.ranks()[1], signal.SIGKILL)
        check_end(agent, run, alone)
        assert agent.text().count("train.py: a rank it waited for is gone: ") <= 1
    finally:
        if agent.process.poll() is None:
            agent.kill()


@pytest.fixture
def hosts():
    """Two network namespaces, each with an address of its own on one wire between them: the
    beginning of a command line in each."""
    names, address = [f"mesh{os.getpid()}-{n}" for n in (0, 1)], "10.77.7.{}/24"
    lines = [f"netns add {name}" for name in names]
    lines += [f"link add wire netns {names[0]} type veth peer name wire netns {names[1]}"]
    for n, name in enumerate(names):
        lines += [f"-n {name} address add {address.format(n + 1)} dev wire",
                  f"-n {name} link set wire up", f"-n {name} link set lo up"]
    try:
        for line in lines:
            try:
                subprocess.run(["ip", *line.split()], check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as e:
                pytest.skip(f"no network namespaces here: {getattr(e, 'stderr', e)}")
        yield [["ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=wire"] for name in names]
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_a_run_goes_on_with_fewer_hosts(hosts, text, alone, tmp_path):
    """An agent of one rank on each of two hosts; all of one is killed. One rank does what two did,
    with the same numbers. Most of the time goes into the wait for a second host to come back."""
    run, agents = tmp_path / "run", []
    argv = [*test_train.SMALL, *STEPS, f"data.path={text}", f"run.dir={run}"]
    launch = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=one",
              "--rdzv-endpoint=10.77.7.1:29500"]
    conf = "--rdzv-conf=last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=2,is_host="
    try:
        for n in (0, 1):  # the first keeps the store, which has to outlive the other
            agents.append(Agent(tmp_path / f"{n}.txt", argv, *launch, f"{conf}{1 - n}",
                                f"--local-addr=10.77.7.{n + 1}", inside=hosts[n]))
        wait_for("dp 2 x fsdp 1", *agents)
        wait_for("step  3/12", *agents)
        agents[1].kill()
        assert agents[0].process.wait(90) == 0, agents[0].text()
        said = agents[0].text()
        assert "dp 1 x fsdp 1" in said and "resumed " in said and "first step after" in said, said
        assert numbers(run) == alone
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.kill()


@pytest.mark.full
def test_kills_at_random_moments():
    """Half a minute to two; `python bench/kills.py --kills 200` is the whole of it."""
    line = [sys.executable, ROOT / "bench/kills.py", "--kills", "6"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the end is bit-identical" in done.stdout, done.stdout


@pytest.mark.full
def test_every_row_of_the_comparison_runs():
    """That needs no checkout, but one: torch's context parallelism is not for a CPU."""
    line = [sys.executable, ROOT / "bench/compare.py", "--quick"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = [row for row in done.stdout.splitlines() if "does not run" in row]
    assert [row.split("|")[1].strip() for row in bad] == ["torch context_parallel"], bad
