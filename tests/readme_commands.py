"""README's commands, all that need no cluster, no other config and no installing, in a copy of the
project; and the default run, shortened, from nothing. Run by test_style.py, beside other tests."""

import concurrent.futures
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def commands():
    """By the blocks in which they stand."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    return [[line for line in block.replace("\\\n", "").splitlines()
             if line.strip() and not line.startswith("#")] for block in blocks]


def test_every_command(tmp_path):
    """The first block makes what others need; these then run two at a time."""
    copy = tmp_path / "minimesh"
    skip = shutil.ignore_patterns(".git", ".venv", "runs", "tokens", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=skip)
    skipped = ("pip install", "pytest", "configs/", "--nnodes")
    blocks = [[line for line in block if not any(word in line for word in skipped)]
              for block in commands()]
    first, *blocks = [block for block in blocks if block]
    blocks.append(["python train.py train.steps=2 train.eval_sequences=4 log.sample=5"])
    assert len(first) >= 4 and len(blocks) >= 4

    def run(block):
        for line in block:
            words = shlex.split(line, comments=True)
            launch = {"python": [sys.executable],
                      "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}
            done = subprocess.run([*launch[words[0]], *words[1:]], cwd=copy, capture_output=True,
                                  text=True, timeout=600)
            assert done.returncode == 0, (line, done.stderr)

    run(first)
    with concurrent.futures.ThreadPoolExecutor(2) as two:
        list(two.map(run, blocks))
    assert (copy / "runs/default/metrics.jsonl").exists()
