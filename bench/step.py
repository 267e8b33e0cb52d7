"""One training step of this project on a fixed shape, on demand: an entry for a duel of trainers.

    python bench/step.py --shape llama --dtype float32 [--compile] [--threads 2]
    python bench/step.py --shape llama --floor     instead: the step's matrix products alone

Prints `@bench {"ready": true, ...}` when warm; for each line `go N` on stdin runs N steps and
prints `@bench {"step_s": [...], "loss": x, "rss_mb": [...]}`; leaves at the end of its input. Run
by hand, `echo go 5 | python bench/step.py --shape llama` times five steps. A step is train.py's
own: batch, forward, backward, AdamW, without clipping; the tokens are random. The floor makes, for
every weight, the product of the forward and the two of the backward at their sizes."""

import argparse
import json
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import data  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402

GPT2 = {"norm": "layernorm", "positions": "learned", "activation": "gelu", "n_layer": 6,
        "d_model": 384, "n_head": 6, "n_kv_head": 6, "d_ff": 1536, "tied": True}
SHAPES = {  # model section, sequence length, vocabulary, sequences a step
    "gpt2": (GPT2, 256, 50304, 8),
    "gpt2-bytes": (GPT2, 256, 256, 8),
    "llama": ({"n_layer": 8, "d_model": 512, "n_head": 8, "n_kv_head": 4, "d_ff": 1408,
               "tied": False}, 512, 8192, 4),
    "gpt2-tiny": (GPT2 | {"n_layer": 2, "d_model": 64, "n_head": 4, "n_kv_head": 4, "d_ff": 256},
                  64, 512, 2),
    "tiny": ({"n_layer": 2, "d_model": 64, "n_head": 4, "n_kv_head": 2, "d_ff": 176,
              "tied": False}, 64, 512, 2),
}


def say(**record):
    print("@bench " + json.dumps(record), flush=True)


def peak_rss_mb():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024


def build(args, folder):
    model, seq_len, vocab, batch = SHAPES[args.shape]
    data.synth(folder, tokens=1_000_000, vocab=vocab, docs=100, seed=0)
    config = train.load_config([])
    train.merge(config, {
        "model": model | {"vocab_size": vocab}, "data": {"path": str(folder), "seq_len": seq_len},
        "optim": {"grad_clip": None, "lr": 1e-3}, "train": {"steps": 10**6, "global_batch": batch,
                                                          "microbatch": args.microbatch or batch},
        "speed": {"dtype": args.dtype, "compile": args.compile, "loss_chunk": args.loss_chunk},
    }, "bench")
    sizes = train.check_config(config, 1)
    return train.build(config, parallel.build_mesh(sizes, "cpu"))


def products(run, n, dtype):
    """A function that makes the products of a step of n tokens, with new memory for each result as
    in a step."""
    looked_up = ["embed.positions.weight"] + ["embed.tokens.weight"] * (not run.model.cfg.tied)
    weights = [torch.randn(p.full_shape, dtype=dtype) for p in run.blocks.params
               if len(p.full_shape) == 2 and p.name not in looked_up]
    widths = {size for w in weights for size in w.shape}
    rows = {size: torch.randn(n, size, dtype=dtype) for size in widths}

    def step():
        begin = time.perf_counter()
        with torch.no_grad():
            for w in weights:
                rows[w.shape[1]] @ w.t()
                rows[w.shape[0]] @ w
                rows[w.shape[0]].t() @ rows[w.shape[1]]
        return time.perf_counter() - begin, 0.0

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--loss-chunk", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--floor", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        clock = time.perf_counter()
        run = build(args, folder)
        run.loader.start(0)

        def step():
            begin = time.perf_counter()
            _, batches = run.loader.next()
            loss = train.train_step(run, batches, sum(b.n_valid for b in batches))[0].item()
            return time.perf_counter() - begin, loss

        if args.floor:
            tokens = run.config["train"]["global_batch"] * run.config["data"]["seq_len"]
            step = products(run, tokens, getattr(torch, args.dtype))
        for _ in range(args.warmup):
            step()
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        t = run.config["train"]
        n = sum(p.numel for p in run.blocks.params)
        say(ready=True, params=n, tokens_per_step=t["global_batch"] * run.config["data"]["seq_len"],
            warmup_s=round(time.perf_counter() - clock, 1))
        for line in sys.stdin:
            times, losses = zip(*(step() for _ in range(int(line.split()[1]))))
            say(step_s=times, loss=losses[-1], rss_mb=[peak_rss_mb()])
        run.loader.close()


if __name__ == "__main__":
    main()
