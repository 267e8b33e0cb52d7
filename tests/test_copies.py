"""Each module that can be copied alone, in a folder of its own, with the example of README.md."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ALONE = ["parallel", "kernels", "data", "checkpoint"]
EXAMPLES = re.findall(r"^```python (\w+)\.py\n(.*?)^```$", (ROOT / "README.md").read_text(),
                      re.M | re.S)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.quick
def test_every_module_that_stands_alone_has_one_example():
    assert [name for name, _ in EXAMPLES] == ALONE
    for name, code in EXAMPLES:
        assert re.search(rf"\b{name}\.\w+\(", code) and len(code.splitlines()) <= 13
        assert len(prints(code)) >= 2, f"{name}: what would it show?"


def prints(code):
    """What the lines that print say they print: behind `#`, up to two spaces."""
    lines = [line for line in code.splitlines() if line.strip().startswith("print(")]
    assert all("  # " in line for line in lines)
    return [line.rpartition("  # ")[2].split("  ")[0] for line in lines]


@pytest.mark.parametrize("name, code", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example_runs_beside_a_copy(name, code, tmp_path):
    """With nothing else of the project in reach: it prints what README.md says."""
    (tmp_path / "example.py").write_text(code)
    (tmp_path / f"{name}.py").write_bytes((ROOT / f"{name}.py").read_bytes())
    head = code.splitlines()[0]
    command = [sys.executable, "example.py"]
    if head.startswith("# torchrun "):
        command = TORCHRUN + shlex.split(head.partition(":")[0])[2:]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == prints(code)
