"""Tiny Shakespeare, the same wall time: our trainer beside nanoGPT's documented CPU recipe.

    python bench/shakespeare.py --nanogpt CHECKOUT --text tinyshakespeare.txt

Runs nanoGPT's recipe (4 layers, 128 wide, context 64, batch 12, 2000 steps) from a copy of the
checkout, takes the time of its training loop (evaluation left out), and then gives ours the same
number of seconds. Both see the first 90% of the text and are judged on the last 10%, by character
(the text is ASCII, so a character is a byte): the loss in nats, over the whole held-out part for
ours, by nanoGPT's own estimate over 200 random batches for nanoGPT."""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
OURS = ["model.n_layer=4", "model.d_model=128", "model.n_head=4", "model.n_kv_head=4",
        "model.d_ff=352", "data.seq_len=64", "train.global_batch=12", "train.microbatch=12",
        "optim.lr=4e-3", "optim.warmup=100", "optim.min_lr=0.02", "train.eval_every=null",
        "train.eval_sequences=null", "log.sample=null", "log.every=100", "speed.loss_chunk=768"]
RECIPE = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=200",
          "--eval_interval=2000", "--log_interval=100", "--block_size=64", "--batch_size=12",
          "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000",
          "--dropout=0.0"]


def nanogpt(checkout, text, folder):
    """(held-out loss, seconds of training)"""
    copy = folder / "nanogpt"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    shutil.copy(text, copy / "data/shakespeare_char/input.txt")
    subprocess.run([sys.executable, "data/shakespeare_char/prepare.py"], cwd=copy, check=True,
                   stdout=subprocess.DEVNULL, env=os.environ)
    process = subprocess.Popen([sys.executable, "-u", "train.py", *RECIPE], cwd=copy, text=True,
                               stdout=subprocess.PIPE)
    begin, loss = None, None
    for line in process.stdout:
        if found := re.match(r"step (\d+): .*val loss ([\d.]+)", line):
            if found[1] == "0":
                begin = time.perf_counter()
            else:
                loss = float(found[2])
        elif re.match(r"iter 1900:", line):
            seconds = (time.perf_counter() - begin) * 2000 / 1900
    process.wait()
    return loss, seconds


def ours(text, folder, seconds):
    """(held-out loss, seconds of training, steps)"""
    raw = pathlib.Path(text).read_bytes()
    (folder / "train.txt").write_bytes(raw[: len(raw) * 9 // 10])
    (folder / "val.txt").write_bytes(raw[len(raw) * 9 // 10 :])
    for split in ("train", "val"):
        line = [sys.executable, str(ROOT / "data.py"), "prepare", str(folder / f"{split}.txt")]
        subprocess.run([*line, "--out", str(folder / "tokens"), "--split", split], check=True,
                       stderr=subprocess.DEVNULL)
    common = [sys.executable, str(ROOT / "train.py"), *OURS, f"data.path={folder / 'tokens'}"]
    steps = 300
    for name in ("probe", "run"):  # the probe tells how many steps fit into the time
        run = folder / name
        subprocess.run([*common, f"run.dir={run}", f"train.steps={steps}"], check=True,
                       stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rates = [r["tokens_per_second"] for r in rows if "loss" in r][1:]
        took = sum(100 * 12 * 64 / rate for rate in rates)
        if name == "probe":
            steps = int(0.93 * seconds / (took / 300))  # a shared machine varies
    return rows[-1]["val_loss"], took, steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nanogpt", required=True)
    parser.add_argument("--text", required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        loss, seconds = nanogpt(args.nanogpt, args.text, folder)
        print(f"nanoGPT  held-out loss {loss:.4f}  {seconds:.0f} s  2000 steps", flush=True)
        loss, took, steps = ours(args.text, folder, seconds)
        print(f"ours     held-out loss {loss:.4f}  {took:.0f} s  {steps} steps")


if __name__ == "__main__":
    main()
