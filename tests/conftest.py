import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
from pool import Pool

import data

HERE = pathlib.Path(__file__).parent
AHEAD = {  # file of cases -> its test, and what its environment needs
    "triton_cases.py": ("test_cases_in_the_interpreter", {"TRITON_INTERPRET": "1"}),
    "triton_ops_cases.py": ("test_cases_in_the_interpreter", {"TRITON_INTERPRET": "1"}),
    "readme_commands.py": ("test_readme_commands_run", {}),
}


@pytest.fixture(scope="session", autouse=True)
def ahead(request, tmp_path_factory):
    """ahead(file): (exit code, what it printed) of pytest on a file of cases that take long. If
    their test is among those of this session they start with it, on what other tests leave idle."""
    folder, running = tmp_path_factory.mktemp("ahead"), {}
    chosen = {getattr(item, "originalname", None) for item in request.session.items}
    for name, (test, needs) in AHEAD.items():
        if test in chosen:
            line = ["nice", "-n", "19", sys.executable, "-m", "pytest", "-q", "-x", "-p",
                    "no:cacheprovider", f"--basetemp={folder}/{name}.tmp", str(HERE / name)]
            with (folder / name).open("w") as out:
                running[name] = subprocess.Popen(
                    line, cwd=HERE.parent, stdout=out, stderr=out, start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"} | needs)
    yield lambda name: (running[name].wait(), (folder / name).read_text())
    for process in running.values():
        if process.poll() is None:  # nobody waited for it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def world():
    """world(n): the pool of n workers, started when first asked for, or again after a failure."""
    pools = {}

    def get(n):
        if n not in pools or not pools[n].processes:
            pools[n] = Pool(n)
        return pools[n]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """As the workers: sums are then in one order."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token folder of short documents with a vocabulary of 51."""
    folder = tmp_path_factory.mktemp("tokens")
    data.synth(folder, tokens=3000, vocab=51, docs=400, seed=1)
    data.synth(folder, tokens=300, vocab=51, docs=40, seed=2, split="val")
    return folder
