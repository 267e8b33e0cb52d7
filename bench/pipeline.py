"""Pipelines on the loopback: schedules played on sleeping stages, and ours against torch's 1F1B.

    python bench/pipeline.py sleep [--t 0.06 --steps 5]
    B='python bench/pipeline.py'
    python bench/duel.py --rounds 3 --steps 3 torch="$B torch" ours="$B ours"
    python bench/pipeline.py ours --schedule zero-bubble < /dev/null    any schedule, either system

sleep: four gloo ranks, 8 microbatches. A rank's forward, and the two parts of its backward, sleep
for t each (with 2 chunks a rank half of it a chunk): no core is short, so what the executor adds to
the simulated time is its own. The loss costs nothing.

ours, torch: two gloo ranks, one thread each, 8 microbatches. Speaks the protocol of bench/step.py.
A step is forward, backward and fused AdamW in float32, no clipping, on random tokens, which count
once. torch's side is a plain Llama (bench/tensor.py), cut where ours is, in PipelineStage; logits
and cross-entropy on the last. Same weights and tokens: the losses must agree."""

import argparse
import pathlib
import statistics
import sys
import time
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from sharded import SHAPES, config_of, serve, start_ranks  # noqa: E402
from tensor import Layer  # noqa: E402

import model as model_py  # noqa: E402
import parallel  # noqa: E402

MICROBATCHES = 8
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # schedule -> a rank


# ---- Stages that sleep


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, t, later):
        time.sleep(t)
        ctx.t, ctx.later = t, later
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.t)
        weight_part = lambda: time.sleep(ctx.t)  # noqa: E731
        weight_part() if ctx.later is None else ctx.later.append(weight_part)
        return grad, None, None, None


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))


def sleeper(mesh, schedule, t):
    """A step of the schedule, as a function."""
    p, stage, v = mesh.size["pp"], mesh.coord["pp"], CHUNKS[schedule]
    ends = stage == p - 1  # the last block of the last stage is the loss
    with torch.device("meta"):
        modules = [Scalar() for _ in range(v + ends)]
    blocks = parallel.Blocks([(str(i), m) for i, m in enumerate(modules)], mesh, torch.float32)
    fns = [lambda x, m, later, b=b: _Nap.apply(m if x is None else x, b.weight, t / v, later)
           for b in modules[:v]] + [lambda x, m, later: (x * modules[-1].weight).sum()] * ends
    chunks = [parallel.Chunk(range(c, c + 1), False) for c in range(v)]
    if ends:
        chunks[-1] = parallel.Chunk(range(v - 1, v + 1), True)
    program = parallel.program(p, stage, schedule, MICROBATCHES, v)
    micros = [torch.ones(64) for _ in range(MICROBATCHES)]

    def step():
        blocks.begin()
        parallel.run(program, fns, blocks, micros, chunks=chunks, empty=torch.empty_like)

    return step


def sleep(args):
    """The table: time of a step (between barriers) and what the simulation says."""
    mesh = parallel.build_mesh(parallel.layout_of(4, pp=4), "cpu")
    for name, v in CHUNKS.items():
        lists, times = parallel.SCHEDULES[name](4, MICROBATCHES, v), []
        played = parallel.simulate(lists, v, lambda kind, s, v=v: parallel.unit_cost(kind, s) / v)
        step = sleeper(mesh, name, args.t)
        for _ in range(args.steps + 1):
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            times.append(time.perf_counter() - begin)
        took = statistics.median(times[1:])  # the first opens the connections
        if mesh.rank == 0:
            if name == "gpipe":
                print(f"t = {args.t * 1e3:g} ms, median of {args.steps} steps\n")
                print("| schedule | simulated / t | measured / t | measured / simulated (range) | "
                      "bubble, simulated | measured |\n|---|---|---|---|---|---|")
            low, mid, high = (x / args.t / played.makespan
                              for x in (min(times[1:]), took, max(times[1:])))
            print(f"| {name} | {played.makespan:g} | {took / args.t:.2f} | "
                  f"{mid:.3f} ({low:.3f}-{high:.3f}) | {played.bubble:.1%} | "
                  f"{1 - 3 * MICROBATCHES * args.t / took:.1%} |", flush=True)


# ---- Ours and torch's


def build(cfg, args):
    """Our model on this rank, and how many layers each stage has."""
    n = dist.get_world_size()
    stages, _ = model_py.cut(cfg, n * CHUNKS[args.schedule], cfg.max_len)
    mesh = parallel.build_mesh(parallel.layout_of(n, pp=n), "cpu")
    model, blocks = model_py.build(cfg, mesh, torch.float32, stages=stages)
    model_py.init_weights(blocks, cfg, 0)
    return model, blocks, stages


class Ours:
    def __init__(self, cfg, args):
        self.model, self.blocks, _ = build(cfg, args)
        self.mesh = self.blocks.mesh
        self.fns = self.model.functions(split=args.schedule == "zero-bubble")
        self.program = parallel.program(self.mesh.size["pp"], self.mesh.coord["pp"], args.schedule,
                                        MICROBATCHES, CHUNKS[args.schedule])

    def step(self, tokens, targets):
        scale = torch.tensor(1 / targets.numel())
        micros = [self.model.micro(*pair, scale=scale)
                  for pair in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES))]
        self.blocks.begin()
        losses = parallel.run(self.program, self.fns, self.blocks, micros,
                              chunks=self.model.chunks, empty=self.model.empty)
        self.blocks.adamw(1e-3, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
        loss = sum(losses, torch.zeros(()))
        return parallel.all_reduce(self.mesh, loss, "loss") / targets.numel()


class Stage(nn.Module):
    """Some layers, behind the embedding if `first`, before norm and logits if `last`."""

    def __init__(self, cfg, numbers, first, last, tables):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model) if first else nn.Identity()
        self.layers = nn.ModuleDict({str(i): Layer(cfg) for i in numbers})
        self.norm = nn.RMSNorm(cfg.d_model, cfg.norm_eps) if last else nn.Identity()
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False) if last else nn.Identity()
        self.tables = tables

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, *self.tables)
        return self.head(self.norm(x))


TORCH = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
         "interleaved": pipelining.ScheduleInterleaved1F1B,
         "zero-bubble": pipelining.ScheduleInterleavedZeroBubble}


class Torch:
    def __init__(self, cfg, args):
        source, _, stages = build(cfg, args)
        rank, n, bounds = dist.get_rank(), dist.get_world_size(), [0, *accumulate(stages)]
        weights = {name.replace("embed.tokens", "embed").replace("head.norm", "norm"): weight
                   for name, weight in source.named_parameters()}
        self.first, self.last, parts = rank == 0, rank == n - 1, []
        for s in range(rank, len(stages), n):
            module = Stage(cfg, range(*bounds[s : s + 2]), s == 0, s == len(stages) - 1,
                           source.tables)
            module.load_state_dict({name: weights.pop(name) for name in module.state_dict()})
            parts.append(pipelining.PipelineStage(module, s, len(stages), torch.device("cpu")))
        assert not weights
        count = MICROBATCHES * args.sequences * cfg.max_len

        def loss(logits, targets):
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count

        several = issubclass(TORCH[args.schedule], pipelining.schedules.PipelineScheduleMulti)
        self.schedule = TORCH[args.schedule](parts if several else parts[0], MICROBATCHES, loss,
                                             scale_grads=False)
        params = [p for part in parts for p in part.submod.parameters()]
        self.opt = torch.optim.AdamW(
            [{"params": [p for p in params if p.ndim > 1]},
             {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0}],
            lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self, tokens, targets):
        losses = [torch.zeros(())]
        given = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*[tokens] * self.first, **given, return_outputs=False)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        loss = sum(losses).detach()
        dist.all_reduce(loss)
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=["sleep", "ours", "torch"])
    parser.add_argument("--t", type=float, default=0.06, help="sleep: seconds")
    parser.add_argument("--steps", type=int, default=5, help="sleep: of each schedule")
    parser.add_argument("--schedule", default="1f1b", choices=CHUNKS)
    parser.add_argument("--shape", default="llama", choices=SHAPES)
    parser.add_argument("--sequences", type=int, default=1, help="in a microbatch")
    args = parser.parse_args()
    children = start_ranks(4 if args.system == "sleep" else 2)
    torch.set_num_threads(1)
    parallel.start("cpu")
    if args.system == "sleep":
        sleep(args)
    else:
        SHAPES[args.shape] = (*SHAPES[args.shape][:-1], MICROBATCHES * args.sequences)
        cfg = config_of(args.shape)
        trainer = (Ours if args.system == "ours" else Torch)(cfg, args)
        count = SHAPES[args.shape][-1] * cfg.max_len
        serve(trainer.step, args, cfg, seed=0, count=count)
    parallel.stop()
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
