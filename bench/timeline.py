"""When each block's backward and each block's reduce-scatter ran, as text: two gloo ranks, zero 3.

    python bench/timeline.py [--layers 6 --width 512]

A reduce-scatter is drawn from its start to the moment its data had arrived (a gloo thread says
so), a backward from its first to its last line. Overlap: rows of both kinds that share columns."""

import argparse
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from pool import Pool  # noqa: E402

import model as model_py  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402


def trace(layers, width):
    """[(name, begin, end)] of the last of three steps, seconds from the start of backward."""
    mesh = parallel.build_mesh(parallel.layout_of(2, fsdp=2), "cpu")
    section = train.load_config([])["model"] | {
        "n_layer": layers, "d_model": width, "n_head": 8, "n_kv_head": 4, "d_ff": 3 * width,
        "vocab_size": 1024, "max_len": 256, "tied": False}
    cfg = model_py.ModelConfig(**section)
    model, blocks = model_py.build(cfg, mesh, torch.float32, zero=3)
    model_py.init_weights(blocks, cfg, 0)
    tokens = torch.randint(1024, (4, 257), generator=torch.Generator().manual_seed(mesh.rank))
    micro = model.micro(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(),
                        scale=torch.tensor(1 / 2048))
    names, rows, begun = [n for n, _ in model.named_blocks()], [], {}
    open_grad, accumulate, start = blocks.open_grad, blocks.accumulate, blocks.reduce

    def opened(i):
        open_grad(i)
        begun[i] = time.perf_counter()

    def accumulated(i, grads):
        accumulate(i, grads)
        rows.append((f"backward {names[i]}", begun[i], time.perf_counter()))

    def reduced(i, last):
        begin = time.perf_counter()
        start(i, last)
        work = blocks.reducing[i][0].works[0]
        work.get_future().then(lambda _: rows.append((f"reduce   {names[i]}", begin,
                                                      time.perf_counter())))

    blocks.open_grad, blocks.accumulate, blocks.reduce = opened, accumulated, reduced
    for _ in range(3):
        blocks.begin()
        rows.clear()
        parallel.run(parallel.program(1, 0, "1f1b", 1), model.functions(), blocks, [micro])
        time.sleep(0.2)
    return sorted(rows, key=lambda row: row[1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    pool = Pool(2)
    rows = pool.run(trace, args.layers, args.width, timeout=120)[0]
    pool.close()
    first, end = rows[0][1], max(row[2] for row in rows)
    columns = 76
    for name, begin, stop in rows:
        a, b = (int((t - first) / (end - first) * columns) for t in (begin, stop))
        mark = "#" if name.startswith("backward") else "~"
        print(f"{name:<20} {' ' * a}{mark * max(b - a, 1)}")
    print(f"{'':<20} 0 {'ms'.rjust(columns - 8)} {(end - first) * 1e3:.0f}")


if __name__ == "__main__":
    main()
