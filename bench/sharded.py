"""Two gloo ranks, one thread each: our blocks against torch DDP and FSDP2 around the same model.

    B='python bench/sharded.py'
    python bench/duel.py DDP="$B ddp" ours="$B ours --zero 0"
    python bench/duel.py FSDP2="$B fsdp2" ours="$B ours --zero 3"

Speaks the protocol of bench/step.py. A step is forward, backward and fused AdamW in float32, no
clipping, on random tokens; tokens_per_step counts both ranks."""

import argparse
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import kernels  # noqa: E402
import model as model_py  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402

SHAPES = {  # layers, width, heads, kv heads, ffn, sequence, vocabulary, sequences a rank
    "llama": (8, 512, 8, 4, 1408, 512, 8192, 4),
    "large": (16, 768, 12, 4, 2048, 512, 16384, 2),
    "tiny": (2, 64, 4, 2, 176, 64, 512, 2),
}


def start_ranks(n):
    """This process is rank 0 and owns stdin; the others are its children."""
    if "RANK" in os.environ:
        return []
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL,
                                 env={**os.environ, **env, "RANK": str(r), "LOCAL_RANK": str(r)})
                for r in range(1, n)]
    os.environ.update(env, RANK="0", LOCAL_RANK="0")
    return children


def config_of(shape):
    layers, width, heads, kv_heads, ffn, seq_len, vocab, _ = SHAPES[shape]
    section = train.load_config([])["model"]
    return model_py.ModelConfig(**section | {
        "n_layer": layers, "d_model": width, "n_head": heads, "n_kv_head": kv_heads, "d_ff": ffn,
        "vocab_size": vocab, "max_len": seq_len, "tied": False})


class Ours:
    def __init__(self, cfg, zero):
        n = dist.get_world_size()
        self.mesh = parallel.build_mesh(parallel.layout_of(n, fsdp=n), "cpu")
        self.model, self.blocks = model_py.build(cfg, self.mesh, torch.float32, zero=zero)
        model_py.init_weights(self.blocks, cfg, 0)
        self.fns = self.model.functions()

    def step(self, tokens, targets, count):
        self.blocks.begin()
        micro = self.model.micro(tokens, targets, scale=torch.tensor(1 / count))
        actions = parallel.program(1, 0, "1f1b", 1)
        [loss] = parallel.run(actions, self.fns, self.blocks, [micro])
        self.blocks.adamw(1e-3, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
        return parallel.all_reduce(self.mesh, loss, "data") / count


class Plain(torch.nn.Module):
    """The same model as one module, for torch's wrappers: gradients go through autograd."""

    def __init__(self, cfg):
        super().__init__()
        mesh = parallel.build_mesh(parallel.layout_of(1), "cpu")
        self.model = model_py.Transformer(cfg, mesh)
        for p in self.parameters():
            torch.nn.init.ones_(p) if p.ndim == 1 else torch.nn.init.normal_(p, std=0.02)
        self.model.tables = kernels.rope_tables(cfg.max_len, cfg.d_head, cfg.rope_theta)

    def forward(self, tokens, targets, count):
        micro = self.model.micro(tokens, targets, scale=torch.tensor(1 / count))
        x = None
        for _, block in self.model.named_blocks():
            x = block(x, micro)
        return x


class Torch:
    def __init__(self, cfg, kind):
        torch.manual_seed(0)
        self.module = Plain(cfg)
        if kind == "ddp":
            self.run = torch.nn.parallel.DistributedDataParallel(self.module)
        else:
            from torch.distributed.fsdp import fully_shard

            mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
            for _, block in self.module.model.named_blocks():
                fully_shard(block, mesh=mesh)
            self.run = fully_shard(self.module, mesh=mesh)
        self.opt = torch.optim.AdamW(self.run.parameters(), lr=1e-3, betas=(0.9, 0.95),
                                     weight_decay=0.1, fused=True)

    def step(self, tokens, targets, count):
        # torch averages over ranks; count / ranks makes that the sum over all tokens
        loss = self.run(tokens, targets, count / dist.get_world_size())
        loss.backward()
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / count


def peak_rss_mb():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024


def serve(take_step, args, cfg, seed, count, params=None):
    """Warm up, then do what rank 0 reads from stdin and passes on. A step is take_step(tokens,
    targets) on random tokens; all ranks together train on `count` tokens in it. `params`: how many
    the model has, if it is not our Llama."""
    batch, rank, n = SHAPES[args.shape][-1], dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)

    def step():
        data = torch.randint(cfg.vocab_size, (batch, cfg.max_len + 1), generator=generator)
        dist.barrier()
        begin = time.perf_counter()
        loss = take_step(data[:, :-1].contiguous(), data[:, 1:].contiguous()).item()
        dist.barrier()
        return time.perf_counter() - begin, loss

    for _ in range(2):
        step()
    pathlib.Path("/proc/self/clear_refs").write_text("5")

    def say(**record):
        if rank == 0:
            print("@bench " + json.dumps(record), flush=True)

    heads = cfg.d_head * (cfg.n_head + cfg.n_kv_head)
    layer = cfg.d_model * (2 + 2 * heads + 3 * cfg.d_ff)
    params = params or cfg.n_layer * layer + cfg.d_model * (2 * cfg.vocab_size + 1)
    say(ready=True, params=params, tokens_per_step=count)
    while True:
        line = [sys.stdin.readline() if rank == 0 else None]
        dist.broadcast_object_list(line, src=0)
        if not line[0]:
            return
        times, losses = zip(*(step() for _ in range(int(line[0].split()[1]))))
        rss = [None] * n
        dist.all_gather_object(rss, peak_rss_mb())
        say(step_s=times, loss=losses[-1], rss_mb=rss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["ours", "ddp", "fsdp2"])
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--shape", default="llama", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    children = start_ranks(args.ranks)
    torch.set_num_threads(1)
    rank, n, _ = parallel.start("cpu")
    cfg = config_of(args.shape)
    trainer = Ours(cfg, args.zero) if args.system == "ours" else Torch(cfg, args.system)
    count = n * SHAPES[args.shape][-1] * cfg.max_len  # every rank has sequences of its own
    serve(functools.partial(trainer.step, count=count), args, cfg, seed=rank, count=count)
    parallel.stop()
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
