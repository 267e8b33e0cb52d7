"""Parallelism on plain collectives: who talks to whom, what is sent, and when.

The world is a grid with five axes. Ranks that differ only along one axis form that axis' group:

    rank = (((pp * DP + dp) * FSDP + fsdp) * CP + cp) * TP + tp    tp innermost: it talks most

                     tp 0    tp 1
           dp 0    | rank 0  rank 1 |  a row: the same samples, each rank a slice of every layer
           dp 1    | rank 2  rank 3 |  a column: other samples, the gradients are summed

    same samples: pp, cp, tp    other samples: dp, fsdp    other tokens: cp (tp between layers)

Everything that moves passes one door (section 1), which counts calls and bytes. Operations that
autograd has to see through come as conjugate pairs (section 2): what one does in forward, the other
does in backward.

    name    forward                         backward                       bytes a rank sends
    enter   all-gather the sequence (tp)    reduce-scatter the gradient,   N (n-1)/n each,
                                            all-gather the sequence again  N: the gathered size
    leave   reduce-scatter the sum (tp)     all-gather the gradient        N (n-1)/n each way
    ring    keys, values go round (cp)      they and their gradients do    N (n-1) each,
                                                                           N: of one rank
    swap    sequence for heads (cp)         heads for sequence             N (n-1)/n each way

With one rank on an axis each of them is the identity, and no collective is called: one process is
the specification that every layout has to reproduce.

    python parallel.py                      draws a layout, a schedule, the steps of a ring
    python parallel.py interleaved 4 8 2    the timeline of a schedule: 4 ranks, 8 microbatches
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import sys
import threading
import time
import uuid
from datetime import timedelta
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.optim.adamw import adamw

# ---- 1. Mesh, door, ledger ------------------------------------------------------------------
AXES = ("pp", "dp", "fsdp", "cp", "tp")
UNIONS = {  # groups over several axes at once
    "data": ("dp", "fsdp"),  # ranks that read different samples
    "shard": ("fsdp", "cp"),  # ranks that hold the shards of one copy of the parameters
    "grad": ("dp", "fsdp", "cp"),  # ranks that hold parts of a dense parameter's gradient
    "loss": ("pp", "dp", "fsdp", "cp"),  # ranks whose parts of the loss add up
    "model": ("pp", "tp"),  # ranks that hold the parts of one model
    "copy": ("pp", "fsdp", "cp", "tp"),  # the same, where the parts are sharded as well
}


@dataclasses.dataclass
class Mesh:
    """The grid as one rank sees it: for each axis (and union of axes) its size, this rank's
    coordinate and the process group (None at size 1). `ledger` counts the traffic: (axis,
    operation) -> [calls, bytes this rank sends]. `control` carries integers between the hosts."""

    size: dict
    coord: dict
    group: dict
    device: torch.device
    rank: int = 0
    world: int = 1
    control: object = None
    patience: tuple = ()  # on a CPU (parallel.timeout,): gloo's sends and receives want to be told
    simulated: bool = False  # one process plays one rank of a world that is not there, of GPUs
    ledger: dict = dataclasses.field(default_factory=dict)


def start(device):
    """Join the world that torchrun describes in the environment, if there is one.

    Returns (rank, world size, local rank); (0, 1, 0) without torchrun."""
    if "RANK" not in os.environ:
        return 0, 1, 0
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if not dist.is_initialized():
        bind = torch.device("cuda", local_rank) if device == "cuda" else None
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))
        dist.init_process_group(backend, store=clean(store, rank, world), rank=rank,
                                world_size=world, device_id=bind, timeout=timedelta(minutes=10))
    return dist.get_rank(), dist.get_world_size(), local_rank


def clean(store, rank, world):
    """A store without the keys of ranks that are gone: torchrun keeps its store over restarts, and
    its agents do not count these alike. Rank 0 hands a new prefix to every rank that answers."""
    me = uuid.uuid4().hex
    if rank:
        store.set(f"minimesh/{rank}", me)
        prefix = store.get(f"minimesh/{me}").decode()  # waits
        store.set(f"{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    until, missing = time.monotonic() + 600, set(range(1, world))
    while missing and time.monotonic() < until:
        for other in missing:
            if store.check([f"minimesh/{other}"]):  # it may be of one that is gone
                store.set(f"minimesh/{store.get(f'minimesh/{other}').decode()}", me)
        time.sleep(0.01)
        missing = {other for other in missing if not store.check([f"{me}/{other}"])}
    if missing:
        raise RuntimeError(f"ranks {sorted(missing)[:8]} did not come within 600 s")
    return dist.PrefixStore(me, store)


def pretend(rank, world):
    """Be one rank of a world that is not there: torch's fake process group moves nothing, at once.
    What an operation gives is then whatever was in its result before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def ranks_of_node():  # as started by torchrun
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def stop():
    """Leave the world."""
    if dist.is_initialized():
        dist.destroy_process_group()


def lost_peer(error):
    """Does the error only say that another rank has ended?"""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",  # gloo's
             "ncclRemoteError", "communicator was aborted")
    return any(word in str(error) for word in words)


def layout_of(world, **sizes):
    """Complete axis sizes from {axis: int or "auto"}; absent axes are 1. At most one of dp and
    fsdp may be "auto": it takes what the others leave of `world`. Raises ValueError."""
    unknown = set(sizes) - set(AXES)
    assert not unknown, f"no such axis: {unknown}"
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    auto = [axis for axis in AXES if sizes[axis] == "auto"]
    if len(auto) > 1:
        raise ValueError("parallel.dp and parallel.fsdp are both auto: give one of them")
    fixed = math.prod(n for n in sizes.values() if n != "auto")
    shown = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
    if auto and world % fixed == 0:
        sizes[auto[0]] = world // fixed
    elif auto:
        raise ValueError(f"parallel: {world} ranks cannot be laid out as {shown}: "
                         f"{fixed} must divide {world}")
    elif fixed != world:
        raise ValueError(f"parallel: {shown} = {fixed} ranks, but {world} were started "
                         f"(torchrun --nproc-per-node {fixed}, or parallel.dp=auto)")
    return sizes


def build_mesh(sizes, device, timeout=600):
    """Make every process group of the layout. `sizes`: axis -> ranks, with the world as product;
    `timeout`: seconds that a rank waits for others. Collective: all call it in the same order."""
    world = math.prod(sizes.values())
    rank = dist.get_rank() if world > 1 else 0
    mesh = Mesh(dict(sizes), {}, {}, torch.device(device), rank, world)
    mesh.coord = dict(zip(AXES, map(int, np.unravel_index(rank, [sizes[a] for a in AXES]))))
    for name, axes in UNIONS.items():
        shape = [sizes[a] for a in axes]
        mesh.size[name] = math.prod(shape)
        mesh.coord[name] = int(np.ravel_multi_index([mesh.coord[a] for a in axes], shape))
    if world == 1:
        mesh.group = dict.fromkeys([*AXES, *UNIONS])
        return mesh
    real = tuple(a for a in AXES if sizes[a] > 1)  # a group costs threads and memory
    shape = tuple(sizes[a] for a in real)
    grid = dist.init_device_mesh(mesh.device.type, shape, mesh_dim_names=real)
    made = {(): None} | {(axis,): grid.get_group(axis) for axis in real}
    for name, axes in ({axis: (axis,) for axis in AXES} | UNIONS).items():
        axes = tuple(a for a in axes if a in real)
        if axes not in made:
            made[axes] = grid[axes]._flatten(name).get_group()
        mesh.group[name] = made[axes]
    mesh.simulated = dist.get_backend() == "fake"
    mesh.control = dist.new_group(backend=None if mesh.simulated else "gloo")
    limit = timedelta(seconds=timeout)
    for group in () if mesh.simulated else {*made.values(), mesh.control} - {None}:
        dist.distributed_c10d._set_pg_timeout(limit, group)  # a group does not inherit it
    mesh.patience = (limit,) if mesh.device.type == "cpu" and not mesh.simulated else ()
    return mesh


def count(mesh, axis, op, nbytes, what=""):
    """Enter a call into the ledger; `what` gives it a line of its own. Returns its name."""
    op = f"{op} ({what})" if what else op
    calls = mesh.ledger.setdefault((axis, op), [0, 0])
    calls[0] += 1
    calls[1] += nbytes
    return f"{op} over {axis}"


@contextlib.contextmanager
def named(name):
    """What fails in here (no answer within parallel.timeout, a rank that is gone) says in what."""
    try:
        yield
    except RuntimeError as error:
        error.args = (f"{name}: {error}",)
        raise


def all_reduce(mesh, x, axis, op="sum", wait=True, what=""):
    """Sum (or max, min) of x over `axis`, in place, on every rank. Sends 2 N (n-1)/n bytes of N.
    With wait=False returns a handle that gives x."""
    n = mesh.size[axis]
    if n == 1:
        return x if wait else Handle(lambda: x)
    assert x.is_contiguous(), (x.shape, x.stride())  # gloo would take what lies between as well
    nbytes = 2 * x.numel() * x.element_size() * (n - 1) // n
    name = count(mesh, axis, f"all_reduce {op}", nbytes, what)
    how = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    with named(name):
        work = dist.all_reduce(x, how, group=mesh.group[axis], async_op=not wait)
    return x if wait else Handle(lambda: x, work, name=name)


class Handle:
    """A collective under way: wait() gives its result. On a GPU the stream waits, not the host."""

    def __init__(self, finish, *works, name="", patience=()):
        self.finish, self.works, self.name, self.patience = finish, works, name, patience

    def wait(self):
        with named(self.name):
            for work in self.works:
                work.wait(*self.patience)
        return self.finish()


def all_gather_into(mesh, out, x, axis, what=""):
    """Start to gather the x of every rank of `axis` into out, joined along dim 0. Sends N (n-1)/n
    bytes of the N gathered. x may be this rank's part of out."""
    n = mesh.size[axis]
    if n == 1:
        out.copy_(x)
        return Handle(lambda: out)
    name = count(mesh, axis, "all_gather", out.numel() * out.element_size() * (n - 1) // n, what)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    return Handle(lambda: out, gather(out, x, group=mesh.group[axis], async_op=True), name=name)


def all_gather_start(mesh, x, axis, what=""):
    """Start to join the x of every rank of `axis` along dim 0: [n * x.shape[0], ...]."""
    if mesh.size[axis] == 1:
        return Handle(lambda: x)
    out = x.new_empty(mesh.size[axis] * x.shape[0], *x.shape[1:])
    return all_gather_into(mesh, out, x.contiguous(), axis, what)


def all_gather(mesh, x, axis, what=""):
    """The x of every rank of `axis`, joined along dim 0."""
    return all_gather_start(mesh, x, axis, what).wait()


def reduce_scatter_start(mesh, x, axis, what=""):
    """Start to sum x over `axis`; the handle gives this rank's 1/n of it along dim 0, in float32
    or better. Sends N (n-1)/n bytes of N.

    gloo has no direct reduce-scatter; an all-to-all and a sum in rank order moves the same bytes
    and fixes the order of the sum."""
    n = mesh.size[axis]
    wide = torch.promote_types(x.dtype, torch.float32)
    if n == 1:
        return Handle(lambda: x)
    assert x.shape[0] % n == 0, (x.shape, n)
    name = count(mesh, axis, "reduce_scatter", x.numel() * x.element_size() * (n - 1) // n, what)
    if x.device.type == "cpu" and not mesh.simulated:
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=mesh.group[axis], async_op=True)
        rows = parts.view(n, x.shape[0] // n, *x.shape[1:])
        return Handle(lambda: rows.sum(0, dtype=wide), work, name=name)
    out = x.new_empty(x.shape[0] // n, *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Handle(lambda: out, scatter(out, x, group=mesh.group[axis], async_op=True), name=name)


def reduce_scatter(mesh, x, axis, what=""):
    """This rank's 1/n, along dim 0, of the sum of x over `axis`, in x.dtype."""
    if mesh.size[axis] == 1:
        return x
    return reduce_scatter_start(mesh, x.contiguous(), axis, what).wait().to(x.dtype)


def all_to_all_start(mesh, x, axis, what=""):
    """Start to send x[i] to rank i of `axis`: the handle gives a tensor whose [i] is what rank i
    sent here. Sends N (n-1)/n bytes of N."""
    n, out = mesh.size[axis], torch.empty_like(x)
    assert x.is_contiguous() and x.shape[0] == n, (x.shape, x.stride(), n)
    name = count(mesh, axis, "all_to_all", x.numel() * x.element_size() * (n - 1) // n, what)
    work = dist.all_to_all_single(out, x, group=mesh.group[axis], async_op=True)
    return Handle(lambda: out, work, name=name)


def add_pairs(parts):
    """The sum of parts[0], parts[1] .. along dim 0, whose number is a power of two, by a binary
    tree: ((0 + 1) + (2 + 3)) + .. The same bits wherever some of these sums were made before."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def reduce_scatter_pairs(mesh, x, axis):
    """This rank's 1/n of the sum of x over `axis`, by add_pairs over the ranks, on any backend."""
    n = mesh.size[axis]
    return x if n == 1 else add_pairs(all_to_all_start(mesh, x.view(n, -1), axis).wait())


def all_reduce_pairs(mesh, x, axis):
    """The sum of x over `axis`, by add_pairs over the ranks: moves what an all-reduce does."""
    return all_gather(mesh, reduce_scatter_pairs(mesh, x, axis), axis)


def exchange(mesh, x, axis, to, source, op, what):
    """Start to send x to the rank at coordinate `to` of `axis`; the handle gives what the one at
    `source` sends here. As one: neither waits for the other to end. x must stay until then."""
    name = count(mesh, axis, op, x.numel() * x.element_size(), what)
    out, group = torch.empty_like(x), mesh.group[axis]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, group=group, group_peer=to),
                                    dist.P2POp(dist.irecv, out, group=group, group_peer=source)])
    return Handle(lambda: out, *works, name=name, patience=mesh.patience)


def shift_start(mesh, x, axis, what=""):
    """Start to send x to the next rank of the ring that `axis` is; the handle gives that of the one
    before. Sends N bytes of N."""
    n, rank = mesh.size[axis], mesh.coord[axis]
    return exchange(mesh, x, axis, (rank + 1) % n, (rank - 1) % n, "shift", what)


class Sending:
    """A send under way. done() does not wait; on a CPU a thread does, as gloo tells nobody else."""

    def __init__(self, work, mesh, name):
        self.work, self.error, self.thread, self.name = work, None, None, name
        self.patience, self.simulated = mesh.patience, mesh.simulated
        if mesh.device.type == "cpu" and not mesh.simulated:
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()

    def watch(self):
        try:
            self.work.wait(*self.patience)
        except Exception as error:
            self.error = error

    def done(self):
        if self.thread is None:
            return self.simulated or self.work.is_completed()
        return not self.thread.is_alive()

    def wait(self):
        with named(self.name):
            self.work.wait() if self.thread is None else self.thread.join()
            if self.error is not None:
                raise self.error


def send(mesh, x, stage):
    """Start to send x to the rank at coordinate `stage` of pp: x must stay as it is until done."""
    name = count(mesh, "pp", "send", x.numel() * x.element_size())
    return Sending(dist.isend(x, group=mesh.group["pp"], group_dst=stage), mesh, name)


def receive(mesh, out, stage):
    """Start to fill `out` with what the rank at coordinate `stage` of pp sends."""
    work = dist.irecv(out, group=mesh.group["pp"], group_src=stage)
    return Handle(lambda: out, work, name="receive over pp", patience=mesh.patience)


def swap(mesh, x, stage, what=""):
    """x of the rank at coordinate `stage` of pp, which gets this rank's."""
    return exchange(mesh, x, "pp", stage, stage, "send", what).wait()


def sum_integers(mesh, *values):
    """Start to sum integers over all ranks, on the host, through the control group."""
    values, works, name = torch.tensor(values, dtype=torch.int64), [], ""
    if mesh.world > 1:
        nbytes = 2 * values.numel() * 8 * (mesh.world - 1) // mesh.world
        name = count(mesh, "world", "all_reduce sum (control)", nbytes)
        works = [dist.all_reduce(values, group=mesh.control, async_op=True)]
    return Handle(values.tolist, *works, name=name)


def agree(mesh, error=None):
    """A barrier that carries bad news: if any rank passes an error, all ranks raise it.

    Returns only when all ranks have called it with None."""
    notes = [error and f"rank {mesh.rank}: {error}"] * mesh.world
    if mesh.world > 1:
        with named("agree over world"):
            dist.all_gather_object(notes, notes[0], group=mesh.control)
    if any(notes):
        raise RuntimeError(next(filter(None, notes)))


def tell(mesh, value):
    """Rank 0's value (any Python object), on every rank."""
    box = [value]
    if mesh.world > 1:
        with named("tell over world"):
            dist.broadcast_object_list(box, src=0, group=mesh.control)
    return box[0]


def ledger_table(mesh):
    """The ledger as text, a line for each (axis, operation)."""
    rows = [f"  {axis:<6} {op:<28} {calls:>6} calls {nbytes:>16,} bytes"
            for (axis, op), (calls, nbytes) in sorted(mesh.ledger.items())]
    return "\n".join(rows) or "  nothing: one process"


# ---- 2. Conjugate pairs around each sublayer, and bits that do not depend on the rank -------
class Now:
    """A `later` that does not wait: a weight's gradient goes into its accumulator in backward."""

    def append(self, part):
        part()


def sequence_first(x, mesh):
    """[B, T, D] -> [T, B, D], so that gathers and scatters over tp need no copies; and back."""
    return x if mesh.size["tp"] == 1 else x.transpose(0, 1)


class _Enter(torch.autograd.Function):
    """Gather, then a product with each weight. What stays for backward is this rank's shard; it is
    gathered again beside the input-gradient product (`keep`: the gathered sequence stays)."""

    @staticmethod
    def forward(ctx, x, mesh, keep, later, *params):
        weights, biases = params[::2], params[1::2]
        whole = all_gather(mesh, sequence_first(x, mesh), "tp")  # [T, B, D]
        ctx.save_for_backward(sequence_first(whole, mesh) if keep else x, *weights)
        ctx.mesh, ctx.keep, ctx.later = mesh, keep, later
        ctx.biased = [b is not None for b in biases]
        # a slice of a weight knows its part of the accumulator, which has no storage as yet
        ctx.accs = [getattr(w, "accumulator", lambda w=w: w.main_grad) for w in weights]
        return tuple(sequence_first(F.linear(whole, w, b), mesh) for w, b in zip(weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, *weights = ctx.saved_tensors
        dx, *dw = enter_backward(ctx.mesh, ctx.keep, x, weights, grads, ctx.later, ctx.accs)
        db = [g.sum((0, 1)) if biased else None for g, biased in zip(grads, ctx.biased)]
        return dx, None, None, None, *[grad for pair in zip(dw, db) for grad in pair]


def enter_backward(mesh, keep, x, weights, grads, later, accs):
    """-> [dx, *dw], dw None where `later` gets them."""
    x, grads = sequence_first(x, mesh), [sequence_first(g, mesh) for g in grads]

    def gather():
        return Handle(lambda: x) if keep else all_gather_start(mesh, x, "tp")

    gathering = None if isinstance(later, list) else gather()
    shape, grads, dx = grads[0].shape[:2], [g.flatten(0, 1) for g in grads], None
    for g, w in zip(grads, weights):
        dx = g @ w if dx is None else dx.addmm_(g, w)
    scattering = reduce_scatter_start(mesh, dx.view(*shape, -1), "tp")

    def weight_part():
        whole = (gathering or gather()).wait().flatten(0, 1)
        for g, acc in zip(grads, accs):
            add_product(acc(), g, whole)

    if later is None:
        whole = gathering.wait().flatten(0, 1)
        dw = [g.t() @ whole for g in grads]
    else:
        later.append(weight_part)
        dw = [None] * len(grads)
    return [sequence_first(scattering.wait().to(dx.dtype), mesh), *dw]


class _Product(torch.autograd.Function):
    """x W^T whose weight's gradient is left to `later`."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.main_grad = later, weight.main_grad
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g, x, acc = grad.flatten(0, 1), x.flatten(0, 1), ctx.main_grad
        ctx.later.append(lambda: add_product(acc, g, x))
        return grad @ weight, None, None


def add_product(acc, g, x):
    """acc [V, D] += g^T x, g [n, V], x [n, D]."""
    acc.addmm_(g.t(), x) if acc.dtype == x.dtype else acc.add_(g.t() @ x)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh, what):  # [T, B, D] -> [T/tp, B, D]
        ctx.mesh, ctx.what = mesh, what
        return reduce_scatter(mesh, x, "tp", what)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return all_gather(ctx.mesh, grad, "tp", ctx.what), None, None


def enter(x, layers, mesh, keep=False, later=None):
    """The whole sequence times this rank's rows of each (weight, bias): x [B, T/tp, D] ->
    [[B, T, rows], ...]. Forward: all-gather of x over tp. Backward: all-gather of x again (not
    with `keep`), reduce-scatter of its partial gradients over tp. With `later` (a list, or Now)
    backward makes functions of the weights' products, which add to `main_grad`, and appends them
    there; without it the products are the gradients that autograd gets."""
    if mesh.size["tp"] == 1 and later is None:
        return [F.linear(x, weight, bias) for weight, bias in layers]
    return _Enter.apply(x, mesh, keep, later, *[t for pair in layers for t in pair])


def leave(x, weight, bias, mesh, later=None):
    """The whole sequence times this rank's columns of the weight, summed over the ranks, and the
    bias added once: x [B, T, columns] -> [B, T/tp, D]. Forward: reduce-scatter over tp. Backward:
    all-gather over tp. `later`: as in enter."""
    if mesh.size["tp"] == 1 and later is None:
        return F.linear(x, weight, bias)
    x = sequence_first(x, mesh)
    y = F.linear(x, weight) if later is None else _Product.apply(x, weight, later)
    y = sequence_first(y if mesh.size["tp"] == 1 else _Leave.apply(y, mesh, ""), mesh)
    return y if bias is None else y + bias


SERIAL = itertools.count()  # operators of torch have names: those of each mesh its own


def operator(name, schema):
    name = f"minimesh::{name}_{next(SERIAL)}"
    return torch.library.custom_op(name, mutates_args=(), schema=schema)


def enter_in_graph(mesh):
    """enter for a layer that torch.compile puts into one graph: what moves, with the products
    beside it, is an operator of torch, which a trace does not look into. The same traffic; the
    weights' gradients go to autograd."""

    @operator("enter", "(Tensor x, Tensor[] weights, Tensor[] biases, bool keep) -> Tensor[]")
    def forward(x, weights, biases, keep):
        whole = all_gather(mesh, sequence_first(x, mesh), "tp")
        ys = [sequence_first(F.linear(whole, w, b), mesh)
              for w, b in zip(weights, biases or [None] * len(weights))]
        return ys + [sequence_first(whole, mesh)] * keep

    @operator("enter_backward",
              "(Tensor x, Tensor[] weights, Tensor[] grads, bool keep) -> Tensor[]")
    def backward(x, weights, grads, keep):
        return enter_backward(mesh, keep, x, weights, grads, None, None)

    def like(x, T, rows):
        return x.new_empty(T, x.shape[0], rows).transpose(0, 1)

    def save(ctx, inputs, output):
        x, weights, biases, ctx.keep = inputs
        ctx.save_for_backward(output[-1] if ctx.keep else x, *weights)
        ctx.n_bias = len(biases)

    def pull(ctx, grads):
        x, *weights = ctx.saved_tensors
        grads = grads[: len(weights)]
        dx, *dw = backward(x, weights, grads, ctx.keep)
        return dx, dw, [g.sum((0, 1)) for g in grads[: ctx.n_bias]], None

    tp = mesh.size["tp"]
    forward.register_fake(lambda x, weights, biases, keep: [
        like(x, x.shape[1] * tp, n) for n in [len(w) for w in weights] + [x.shape[2]] * keep])
    backward.register_fake(lambda x, weights, grads, keep: [
        like(x, grads[0].shape[1] // tp, x.shape[2]), *map(torch.empty_like, weights)])
    forward.register_autograd(pull, setup_context=save)

    def enter(x, layers, mesh, keep=False, later=None):
        weights, biases = zip(*layers)
        return forward(x, list(weights), [b for b in biases if b is not None], keep)[: len(layers)]

    return enter


def leave_in_graph(mesh):
    """leave, likewise."""

    @operator("leave", "(Tensor x) -> Tensor")
    def scatter(x):
        return reduce_scatter(mesh, x, "tp")

    @operator("leave_backward", "(Tensor x) -> Tensor")
    def gather(x):
        return all_gather(mesh, x, "tp")

    tp = mesh.size["tp"]
    scatter.register_fake(lambda x: x.new_empty(len(x) // tp, *x.shape[1:]))
    gather.register_fake(lambda x: x.new_empty(len(x) * tp, *x.shape[1:]))
    scatter.register_autograd(lambda ctx, grad: gather(grad))

    def leave(x, weight, bias, mesh, later=None):
        y = scatter(F.linear(x.transpose(0, 1), weight)).transpose(0, 1)
        return y if bias is None else y + bias

    return leave


def positions_of(x, mesh):
    """This tp rank's positions of what every one of them holds: [B, T, ...] -> [B, T/tp, ...]."""
    tp = mesh.size["tp"]
    assert x.shape[1] % tp == 0, (x.shape, tp)
    return x.chunk(tp, 1)[mesh.coord["tp"]]


def shift_right(x, n):
    """Logical (unsigned) right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def mix64(x):
    """A bijective scramble of int64 bits: the output function of splitmix64 (Steele, Lea and
    Flood 2014). Integers only, so every device and every slice of a tensor gives the same bits."""
    x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)  # as int64
    x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ shift_right(x, 31)


def key64(*parts):
    """A 64-bit key (as int64) for any tuple of names and numbers."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def random_bits(key, index):
    """64 random bits for each element of `index` (int64), a function of (key, index) alone.
    `key` is an int or a 0-d int64 tensor."""
    return mix64(mix64(index * (0x9E3779B97F4A7C15 - 2**64) + key) ^ key)


# ---- 3. A vocabulary split over tp ----------------------------------------------------------
# Rank r holds rows r n .. (r+1) n of the table, which is padded at the end
IGNORE = -100  # a target that does not count


class _Lookup(torch.autograd.Function):
    """This rank's part of weight[index], zero where the row is another's. The backward adds
    straight into the accumulator `main_grad`: a gradient as large as the table would be written,
    read and thrown away each microbatch."""

    @staticmethod
    def forward(ctx, index, weight, main_grad, owner, later):
        n = weight.shape[0]
        foreign = None if owner is None else (index // n != owner).unsqueeze(-1)
        index = index if owner is None else index % n  # the owner's row; elsewhere any will do
        ctx.save_for_backward(index, foreign)
        ctx.main_grad, ctx.shape, ctx.later = main_grad, weight.shape, later
        rows = F.embedding(index, weight)
        return rows if owner is None else rows.masked_fill_(foreign, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        index, foreign = ctx.saved_tensors
        grad = grad if foreign is None else grad.masked_fill(foreign, 0)
        index, grad = index.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.main_grad is None:  # a table that is not of Blocks
            dense = grad.new_zeros(ctx.shape).index_add_(0, index, grad)
            return None, dense, None, None, None
        acc, later = ctx.main_grad, Now() if ctx.later is None else ctx.later
        later.append(lambda: acc.index_add_(0, index, grad.to(acc.dtype)))
        return None, None, None, None, None


def lookup(index, weight, mesh=None, later=None):
    """Rows of a table by number: index [B, T] -> [B, T, D]; with a mesh from a table split over
    tp, where each rank keeps its positions of the sum: [B, T/tp, D]. Forward: reduce-scatter over
    tp. Backward: all-gather over tp. `later`: where the adding to `main_grad` is put; None: it is
    done at once."""
    main_grad = getattr(weight, "main_grad", None)
    if mesh is None or mesh.size["tp"] == 1:
        return _Lookup.apply(index, weight, main_grad, None, later)
    rows = _Lookup.apply(index.t(), weight, main_grad, mesh.coord["tp"], later)
    return _Leave.apply(rows, mesh, "embedding").transpose(0, 1)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loop over chunks. The logits of a chunk are the only V-wide thing there is, and its
    gathered rows the only ones there are: the gradients are made, and sent home, at once."""

    @staticmethod
    def forward(ctx, x, weight, targets, scale, mesh, kernels, o):
        ce_weight, ce_forward, ce_backward = kernels
        start, scratch = mesh.coord["tp"] * weight.shape[0], o["scratch"]
        w = ce_weight(weight[: min(max(o["vocab"] - start, 0), weight.shape[0])])
        losses = x.new_zeros(targets.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        dx = torch.empty_like(x) if o["grad"] else None
        dw = o["weight_grad"]
        if o["grad"] and dw is None:
            dw = losses.new_zeros(weight.shape)
        for i in range(0, len(x), o["rows"]):
            xs = all_gather(mesh, x[i : i + o["rows"]], "tp", "loss")
            t = targets[:, i : i + o["rows"]].reshape(-1)
            (m, s, hit), state = ce_forward(xs, w, t - start, o["softcap"], scratch)
            top = all_reduce(mesh, m.clone(), "tp", "max", what="loss")
            sums = torch.stack((s * (m - top).exp(), hit))
            total, hit = all_reduce(mesh, sums, "tp", what="loss")
            lse, counted = top + total.log(), t != IGNORE
            loss = torch.where(counted, lse - hit + o["z_loss"] * lse.square(), 0.0)
            loss = torch.where(counted & ((t < 0) | (t >= o["vocab"])), math.nan, loss)
            losses[:, i : i + o["rows"]] = loss.view(len(targets), -1)
            if o["grad"]:
                factor = torch.where(loss.isnan(), math.nan, torch.where(counted, scale, 0.0))
                part = ce_backward(state, m, s, hit, lse, factor, o["z_loss"], dw[: len(w)])
                dx[i : i + o["rows"]] = reduce_scatter(mesh, part, "tp", "loss")
        if o["grad"]:
            ctx.types = x.dtype, weight.dtype
            ctx.save_for_backward(dx, None if o["weight_grad"] is not None else dw)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, up):
        dx, dw = ctx.saved_tensors
        dx, dw = (dx * up).to(ctx.types[0]), None if dw is None else (dw * up).to(ctx.types[1])
        return dx, dw, None, None, None, None, None


def linear_cross_entropy(mesh, kernels, x, weight, targets, scale, *, vocab, chunk,
                         weight_grad=None, softcap=None, z_loss=0.0, scratch=None):
    """The sum, over the tokens that have a target, of the cross-entropy of x W^T with it (and of
    z_loss lse^2; logits capped to softcap tanh(logit / softcap)): 0-d, the same on all tp ranks.
    What backward propagates is the gradient of scale * that sum.

    x [N/tp, D], this rank's tokens; weight [rows, D], its rows of the table, of which those past
    `vocab` are padding and never predicted; targets [tp, N/tp], all ranks' ids, -100 where nothing
    is to be predicted (another id outside of the vocabulary makes loss and gradients NaN); scale
    0-d: it enters before anything is rounded to x.dtype. No more than `chunk` tokens' logits exist
    at a time. `kernels`: (ce_weight, ce_forward, ce_backward) of kernels.py. With gradients enabled
    the forward makes them: the weight's is added to `weight_grad` there and then, for an upstream
    gradient of 1 (without it, it goes through autograd). `scratch`: a dict of the caller's, for
    buffers that live from call to call.

    Over tp, each chunk: all-gather of x, MAX of the largest logits, SUM of (sum of exponentials,
    target's logit), reduce-scatter of the gradient of x. The backward moves nothing."""
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    options = dict(vocab=vocab, rows=max(chunk // mesh.size["tp"], 1), weight_grad=weight_grad,
                   softcap=softcap, z_loss=z_loss, scratch={} if scratch is None else scratch,
                   grad=grad)
    return _LinearCrossEntropy.apply(x, weight, targets, scale, mesh, kernels, options)


# ---- 4. Sharded data parallelism ------------------------------------------------------------
@dataclasses.dataclass
class Param:
    """One parameter's place: in which block, where in the block's flat buffer, how it is cut.

    `shape` is local (after the cut over tp, padding included), `full_shape` that of the logical
    tensor without padding; `cut` is the dim that tp cuts, or None where it is replicated over tp
    (its gradient is then partial over tp too)."""

    name: str
    block: int
    owners: list  # every (module, attribute) that holds it: two for a tied weight
    shape: tuple
    full_shape: tuple
    cut: int | None
    decay: bool
    start: int = 0  # in the flat buffer of its block

    @property
    def numel(self):
        return math.prod(self.shape)

    def cut_offset(self, mesh):
        """Where the local tensor begins in the logical one."""
        tp = mesh.coord["tp"]
        return tuple(n * tp if dim == self.cut else 0 for dim, n in enumerate(self.shape))


def declare(tensor, cut=None, full_shape=None):
    """State a parameter's placement where it is defined: the one place that says so. Weight decay
    goes by the logical shape (matrices only), since flat buffers forget it."""
    tensor.cut, tensor.full_shape = cut, tuple(full_shape or tensor.shape)
    return tensor


def list_params(blocks, shared=()):
    """Every parameter of the named blocks once, in order: [("embed", module), ...] -> [Param]. A
    weight that two blocks share belongs to the first; to none of them if it is in `shared`, whose
    modules are blocks of their own, numbered after the others."""
    params, seen = [], {}
    for b, (block_name, block) in [*enumerate(shared, len(blocks)), *enumerate(blocks)]:
        for path, module in block.named_modules():
            for attr, tensor in module.named_parameters(recurse=False):
                if id(tensor) in seen:
                    seen[id(tensor)].owners.append((module, attr))
                    continue
                name = ".".join(part for part in (block_name, path, attr) if part)
                full_shape = getattr(tensor, "full_shape", tuple(tensor.shape))
                param = Param(name, b, [(module, attr)], tuple(tensor.shape), full_shape,
                              getattr(tensor, "cut", None), len(full_shape) >= 2)
                seen[id(tensor)] = param
                params.append(param)
    return params


class Blocks:
    """All parameters of this rank, one flat buffer a block, and what happens to their gradients.

        block 0 (embedding)   weight   | ##### decayed ##### | norms, biases | padding |
        block 1 (layer 0)     grad     | the same places, float32                      |
        ...                   master, exp_avg, exp_avg_sq: the same places, float32

    What tp replicates lies side by side around the end of the decayed part: one slice, whose
    gradient is partial over tp and summed once a step.

    A module's parameters are views into `weight` (compute dtype). Gradients accumulate in float32
    over the microbatches of a step. With f ranks on fsdp x cp and d on dp, rank r's shard is the
    r-th of f equal slices of each buffer; what `zero` makes a shard of:

        zero  weight  grad                    master, moments  a step sends, of P bytes a block
        0     whole   whole                   whole            all-reduce of grad over d f ranks
        1     whole   whole                   shard            reduce-scatter of grad, all-gather
        2     whole   shard (whole in its     shard            of weight: P (f-1)/f each; zero 2
                      block's backward)                        scatters for each microbatch
        3     shard   as 2                    shard            as 2, and gathers a block before
                                                               its forward and its backward

    With d > 1 the shard of the gradient is then all-reduced over dp. With `offload` the master
    weights and moments live on the host, and AdamW runs there. Four verbs move data, called by the
    executor in the order of its actions, never by autograd:

        gather(i)   block i's weights are whole; those of the next blocks are on their way
        free(i)     they are not needed for now
        reduce(i)   block i's gradient of a microbatch is complete: start its sum over the ranks
        wait()      all sums are done

    With `deterministic` each microbatch's gradient is summed by itself, over the data ranks and
    then over the microbatches, by one binary tree: leaf j n + r is the j-th microbatch of data rank
    r of n. Any layout's sums are subtrees of it, so that all have the same bits. It costs zero 2's
    traffic, and log2 of the microbatches shards.
    """

    ALIGN = 16  # elements: parameters begin at multiples of it, so that kernels can use wide loads

    def __init__(self, blocks, mesh, dtype, zero=0, prefetch=1, reduce_dtype=None, offload=False,
                 hold=False, shared=(), twin=None, deterministic=False):
        """`blocks`: [(name, module)] in the order of forward, built on the meta device. Allocates
        the storage (zeros) and makes the modules' parameters views into it. `hold`: gather and
        reduce once a step. `shared`: a weight that several blocks use, as a block of its own;
        `twin`: the stage whose rank has the other copy of it."""
        self.mesh, self.dtype, self.zero, self.prefetch = mesh, dtype, zero, prefetch
        self.offload, self.hold, self.twin, self.deterministic = offload, hold, twin, deterministic
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.reduce_dtype = reduce_dtype or self.master_dtype
        self.params, n = list_params(blocks, shared), len(blocks) + len(shared)
        self.sizes, self.split, self.replicated = zip(*[
            self.place([p for p in self.params if p.block == b]) for b in range(n)])
        self.shards, at = (mesh.size["shard"], mesh.coord["shard"]) if zero else (1, 0)
        self.spans = [(at * n // self.shards, (at + 1) * n // self.shards) for n in self.sizes]
        self.allocate()
        self.bind(blocks)
        self.gathering = [None] * n  # handle of an all-gather under way
        self.whole = [zero < 3 or not size for size in self.sizes]
        self.open = [zero < 2 and not deterministic] * n  # the whole gradient holds something
        self.trees = {}  # (block, use) -> [(level, sum of 2^level rounds)], the highest first
        self.reducing = {}  # block -> handle of a reduce-scatter under way
        self.summing = []  # (block, handle of an all-reduce)

    def place(self, params):
        """Give the parameters of one block their places: decayed ones first, and those that are
        replicated over tp side by side. Returns the size of the block's buffer, the end of its
        decayed part, and where the replicated part begins and ends."""
        end, decayed, replicated = 0, 0, []
        for p in sorted(params, key=lambda p: (not p.decay, p.decay == (p.cut is None))):
            p.start = end
            end += -(-p.numel // self.ALIGN) * self.ALIGN
            decayed = end if p.decay else decayed
            if p.cut is None:
                replicated += [p.start, end]
        ranks = self.mesh.size["grad"] * self.ALIGN
        return -(-end // ranks) * ranks, decayed, (min(replicated, default=0),
                                                   max(replicated, default=0))

    def allocate(self):
        """The buffers: whole where the stage says so, else this rank's shard."""
        def zeros(n, dtype, host=False):
            return torch.zeros(n, dtype=dtype, device="cpu" if host else self.mesh.device,
                               pin_memory=host and self.mesh.device.type == "cuda")

        state = functools.partial(zeros, host=self.offload)
        shard = [hi - lo for lo, hi in self.spans]
        same = self.dtype == self.master_dtype and not self.offload
        if self.zero < 3:
            self.weight = [zeros(n, self.dtype) for n in self.sizes]
            self.lasting = [True] * len(self.sizes)
            self.piece = [w[lo:hi] for w, (lo, hi) in zip(self.weight, self.spans)]
        else:
            self.piece = [zeros(n, self.dtype) for n in shard]
            turns = len(self.sizes) if self.hold else 2 + self.prefetch
            self.weight, self.lasting = take_turns(
                self.sizes, turns, lambda n: zeros(n, self.dtype))
        self.master = self.piece if same else [state(n, self.master_dtype) for n in shard]
        if self.zero < 2:
            self.full_grad = [zeros(n, self.master_dtype) for n in self.sizes]
            self.grad_lasting = [True] * len(self.sizes)
            self.grad = [g[lo:hi] for g, (lo, hi) in zip(self.full_grad, self.spans)]
        else:
            self.full_grad, self.grad_lasting = take_turns(
                self.sizes, len(self.sizes) if self.hold else 2,
                lambda n: zeros(n, self.master_dtype))
            self.grad = [zeros(n, self.master_dtype) for n in shard]
        self.exp_avg, self.exp_avg_sq = ([state(n, self.master_dtype) for n in shard]
                                         for _ in range(2))
        self.host_grad = [state(n, self.master_dtype) for n in shard] if self.offload else self.grad
        self.steps = [[state((), torch.float32) for _ in range(2)] for _ in self.sizes]
        # a gather writes through an alias with a version counter of its own: autograd, which has
        # saved views of the weight, must not take it for a change of value
        self.alias = [torch.empty(0, dtype=w.dtype, device=w.device).set_(w.untyped_storage())
                      for w in self.weight]

    def bind(self, blocks):
        """Make every module's parameter a view of its block's weight. Its `main_grad` is the view
        of the accumulator, for operations that add their weight's gradient there themselves."""
        self.tensors = [[] for _ in self.sizes]
        inside = [set(block.modules()) for _, block in blocks]
        self.uses = [{b} | {p.block for p in self.params if any(m in own for m, _ in p.owners)}
                     for b, own in enumerate(inside)]  # the blocks whose weights block b reads
        for p in self.params:
            tensor = torch.nn.Parameter(self.view(self.weight, p))
            tensor.main_grad = self.view(self.full_grad, p)
            self.tensors[p.block].append(tensor)
            for module, attr in p.owners:
                setattr(module, attr, tensor)
        users = [[b for b, used in enumerate(self.uses) if i in used]
                 for i in range(len(self.sizes))]
        self.last_use = [max(among) for among in users]
        # whose backward completes the gradients of which: that of the first user comes last
        self.closes = [[i for i, among in enumerate(users) if min(among) == b]
                       for b in range(len(blocks))]
        self.tensors = [[t for i in closed for t in self.tensors[i]] for closed in self.closes]
        for buffers, lasting in ((self.weight, self.lasting), (self.full_grad, self.grad_lasting)):
            for buffer, lasts in zip(buffers, lasting):
                lasts or buffer.untyped_storage().resize_(0)

    @staticmethod
    def view(buffers, p):
        return buffers[p.block][p.start : p.start + p.numel].view(p.shape)

    # ---- weights

    def start_gather(self, i):
        """Start block i's all-gather over fsdp x cp, from every rank's piece into `weight`."""
        if self.whole[i] or self.gathering[i] is not None:
            return
        if not self.lasting[i]:
            self.weight[i].untyped_storage().resize_(self.alias[i].numel() * self.dtype.itemsize)
        self.gathering[i] = all_gather_into(self.mesh, self.alias[i], self.piece[i], "shard")

    def gather(self, i, ahead=()):
        """Make whole the weights that block i uses, and start on those of the blocks `ahead`."""
        for j in (i, *ahead[: self.prefetch]):
            for b in self.uses[j]:
                self.start_gather(b)
        self.arrive(self.uses[i])

    def arrive(self, blocks=None):
        """The gathers of these blocks (of all) that are under way are done: what they write, also
        over this rank's own piece, is written."""
        for b in range(len(self.sizes)) if blocks is None else blocks:
            if self.gathering[b] is not None:
                self.gathering[b].wait()
                self.gathering[b], self.whole[b] = None, True

    def free(self, i):
        """Block i is done for now: give back what it was the last to use (zero 3)."""
        for b in self.uses[i]:
            if self.zero == 3 and self.last_use[b] == i and not self.hold:
                self.drop(b)

    def drop(self, b):
        self.whole[b] = not self.sizes[b]
        if not self.lasting[b]:
            self.weight[b].untyped_storage().resize_(0)

    def refresh(self):
        """Bring the compute copy up to date with the master weights: a cast and, at zero 1 and 2,
        an all-gather of each block, which the next forward waits for block by block."""
        self.arrive()
        if self.piece is not self.master:
            torch._foreach_copy_(self.piece, self.master, non_blocking=True)
        if self.zero in (1, 2) and self.shards > 1:
            for i, alias in enumerate(self.alias):
                if self.sizes[i]:
                    self.gathering[i] = all_gather_into(self.mesh, alias, self.piece[i], "shard")
        if self.zero == 3 and self.hold:
            for b in range(len(self.sizes)):
                self.drop(b)

    # ---- gradients

    def begin(self):
        """Start a step: every accumulator to zero."""
        torch._foreach_zero_(self.grad if self.zero >= 2 else self.full_grad)

    def open_grad(self, i):
        """Block i's whole gradient buffer is about to be written (zero 2 and 3: zero it first,
        when the sum that its last user has started is done)."""
        if self.open[i]:
            return
        for j in [j for j in self.reducing if self.full_grad[j] is self.full_grad[i]]:
            self.finish_reduce(j)
        if not self.grad_lasting[i]:
            self.full_grad[i].untyped_storage().resize_(self.sizes[i] * self.master_dtype.itemsize)
        self.full_grad[i].zero_()
        self.open[i] = True

    def accumulate(self, i, grads):
        """Add one microbatch's gradients of block i: one for each of its tensors, None where the
        operation has added its own (`main_grad`) or the parameter was not used."""
        pairs = [(t.main_grad, g) for t, g in zip(self.tensors[i], grads, strict=True)
                 if g is not None]
        if pairs:
            torch._foreach_add_([acc for acc, _ in pairs], [g for _, g in pairs])

    def reduce(self, i, last, use=0):
        """Block i's gradient of a microbatch is complete on this rank, and with `last` that of the
        step: start its sum. Over fsdp x cp a reduce-scatter (zero 2 and 3: for each microbatch),
        over dp an all-reduce of the shard once a step; at zero 0 one all-reduce over both. `use`:
        of a weight that two blocks use, which of them has made it (deterministic only)."""
        if self.deterministic:
            self.add_leaf(i, use)
        elif self.zero == 0:
            if last:
                self.start_sum(i, "grad")
        elif self.sizes[i] and (last or self.zero >= 2 and not self.hold):
            sent = self.full_grad[i]
            sent = sent if self.shards == 1 else sent.to(self.reduce_dtype)
            self.reducing[i] = reduce_scatter_start(self.mesh, sent, "shard"), last

    def add_leaf(self, i, use):
        """Sum block i's gradient of one microbatch over the data ranks, by pairs, and add it to
        those of the microbatches before as a binary counter carries."""
        if not self.sizes[i]:
            return
        if self.zero == 0:
            part = all_reduce_pairs(self.mesh, self.full_grad[i], "grad")
        else:
            part = reduce_scatter_pairs(self.mesh, self.full_grad[i], "shard")
            part = all_reduce_pairs(self.mesh, part, "dp")
        level, tree = 0, self.trees.setdefault((i, use), [])
        while tree and tree[-1][0] == level:
            part, level = tree.pop()[1] + part, level + 1
        tree.append((level, part.clone() if level == 0 else part))
        self.open[i] = False
        if not self.grad_lasting[i]:
            self.full_grad[i].untyped_storage().resize_(0)

    def collect_trees(self):
        """The gradients of the step: of each block the whole tree, of a weight of two uses both."""
        for (i, use), tree in sorted(self.trees.items()):
            [(_, total)] = tree  # the microbatches are a power of two
            self.grad[i].copy_(total if use == 0 else self.grad[i] + total)
        self.trees.clear()

    def start_sum(self, i, axis):
        """Start the all-reduce of block i's gradient (shard) over `axis`, in the reduce dtype."""
        if self.mesh.size[axis] == 1 or not self.sizes[i]:
            return
        sent = self.grad[i].to(self.reduce_dtype)  # itself, where it has that dtype
        self.summing.append((i, all_reduce(self.mesh, sent, axis, wait=False)))

    def finish_reduce(self, i):
        """The reduce-scatter of block i is done: keep its result; the last goes on over dp."""
        handle, last = self.reducing.pop(i)
        part = handle.wait()
        if self.zero >= 2:
            self.grad[i].add_(part)
            self.open[i] = False
            if not self.grad_lasting[i]:
                self.full_grad[i].untyped_storage().resize_(0)
        elif self.shards > 1:
            self.grad[i].copy_(part)
        if last:
            self.start_sum(i, "dp")

    def wait(self):
        """All sums that were started are done."""
        self.collect_trees()
        for i in list(self.reducing):
            self.finish_reduce(i)
        for i, handle in self.summing:
            self.grad[i].copy_(handle.wait())
        self.summing.clear()
        self.sum_replicated()
        self.sum_twins()

    def parted(self):
        """Each block's gradient (shard) in three: before, in and after what tp replicates."""
        for grad, (lo, hi), (begin, end) in zip(self.grad, self.spans, self.replicated):
            begin, end = (min(max(at, lo), hi) - lo for at in (begin, end))
            yield grad[:begin], grad[begin:end], grad[end:]

    def sum_replicated(self):
        """Sum over tp the gradients of what it replicates, in one all-reduce."""
        if self.mesh.size["tp"] > 1:
            parts = [part for _, part, _ in self.parted()]
            sent = torch.cat(parts).to(self.reduce_dtype)
            all_reduce(self.mesh, sent, "tp", what="replicated")
            torch._foreach_copy_(parts, sent.split([len(part) for part in parts]))

    def sum_twins(self):
        """A weight that the first and the last stage share: each sends the other its gradient
        (shard), and both add the two in the order of the stages."""
        if self.twin is not None:
            mine = self.grad[-1].to(self.reduce_dtype)
            other = swap(self.mesh, mine, self.twin, "tied")
            pair = (mine, other) if self.mesh.coord["pp"] < self.twin else (other, mine)
            self.grad[-1].copy_(pair[0] + pair[1])

    def is_second_twin(self):
        return self.twin is not None and self.mesh.coord["pp"] > self.twin

    def grad_norm(self):
        """The global 2-norm of the gradient, each logical element once: a 0-d device tensor. One
        all-reduce of a scalar, over all ranks that hold parts of one copy of the parameters."""
        grads = self.grad  # padding is zero
        if self.mesh.coord["tp"] > 0:  # tp rank 0 counts what all of them hold
            grads = [part for before, _, after in self.parted() for part in (before, after)]
        if self.is_second_twin():  # of the shared block, which is the last
            grads = grads[: -len(grads) // len(self.grad)]
        axis = "copy" if self.zero else "model"
        if self.deterministic:
            return self.norm_of_integers(grads, axis)
        total = torch.stack(torch._foreach_norm(grads)).square().sum()
        return all_reduce(self.mesh, total, axis).sqrt()

    def norm_of_integers(self, grads, axis):
        """The 2-norm by a sum that has no order: squares, over that of the largest element, as
        integers of as many bits as their sum leaves room for. NaN where one is not finite. Three
        all-reduces of a word or two."""
        grads = [g for g in grads if g.numel()]
        bad = torch.stack([(~g.isfinite()).sum() for g in grads]).sum()
        own = self.params if not self.is_second_twin() else [
            p for p in self.params if p.block < len(self.sizes) - 1]
        n = all_reduce(self.mesh, bad.new_tensor(sum(p.numel for p in own)), "pp")
        top = torch.stack([g.abs().amax() for g in grads]).amax().double()
        top = all_reduce(self.mesh, top, axis, "max")
        scale = torch.exp2(62 - torch.log2(n.double()).ceil())
        total = sum(((g.double() / top).square() * scale).round().long().sum() for g in grads)
        total, bad = all_reduce(self.mesh, torch.stack([total, bad]), axis)
        norm = torch.where(top == 0, 0.0, top * (total.double() / scale).sqrt())
        return torch.where(bad > 0, torch.nan, norm).to(self.master_dtype)

    # ---- optimizer and state

    def adamw(self, lr, beta1, beta2, eps, weight_decay, found_inf):
        """One AdamW step (Loshchilov and Hutter 2019) on the flat shards, torch's fused one; the
        first part of each block is decayed, the second not. Where the device scalar `found_inf`
        is 1, nothing changes: not the weights, the moments or the step counters."""
        rounds = [range(len(self.sizes))]
        if self.offload:  # block by block, while the gradients of the next are on their way
            found_inf = found_inf.cpu()
            arrived = [to_host(host, grad) for host, grad in zip(self.host_grad, self.grad)]
            rounds = [[i] for i in rounds[0]]
        for blocks in rounds:
            if self.offload:
                arrived[blocks[0]]()
            for part, decay in ((0, weight_decay), (1, 0.0)):
                adamw(*self.slices(blocks, part), [], [self.steps[i][part] for i in blocks],
                      fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=lr,
                      weight_decay=decay, eps=eps, maximize=False, found_inf=found_inf)
        self.refresh()

    def slices(self, blocks, part):
        """The decayed (part 0) or other (part 1) slices of master, gradient and moments: lists."""
        cuts = [max(self.split[i] - self.spans[i][0], 0) for i in blocks]
        spans = [slice(cut) if part == 0 else slice(cut, None) for cut in cuts]
        return [[buffers[i][span] for i, span in zip(blocks, spans)]
                for buffers in (self.master, self.host_grad, self.exp_avg, self.exp_avg_sq)]

    def local(self, buffers, p, replica=(0, 1)):
        """Parameter p's elements in this rank's shard: (data, index of the first in the flattened
        local tensor). `replica` (r, n): only the r-th of n equal slices of the shard."""
        lo, hi = self.spans[p.block]
        at = lo + (hi - lo) * replica[0] // replica[1]
        stop = lo + (hi - lo) * (replica[0] + 1) // replica[1]
        at, stop = max(at, p.start), min(stop, p.start + p.numel)
        stop = max(at, stop)
        return buffers[p.block][at - lo : stop - lo], min(at - p.start, p.numel)

    def replicas(self, p):
        """(r, n): this rank holds replica r of n of its shard of p."""
        axes, r, n = ["dp" if self.zero else "grad"] + ["tp"] * (p.cut is None), 0, 1
        for axis in axes:
            r, n = r * self.mesh.size[axis] + self.mesh.coord[axis], n * self.mesh.size[axis]
        if self.twin is not None and p.block == len(self.sizes) - 1:
            r, n = 2 * r + self.is_second_twin(), 2 * n
        return r, n

    def state(self, shared=False):
        """(kind, Param, data, start) of what a checkpoint holds, as `local` gives it. `shared`:
        only the slice of it that this replica is to write."""
        self.arrive()  # a gather that ends later would write over what is loaded
        for kind, buffers in (("param", self.master), ("exp_avg", self.exp_avg),
                              ("exp_avg_sq", self.exp_avg_sq)):
            for p in self.params:
                replica = self.replicas(p) if shared else (0, 1)
                yield kind, p, *self.local(buffers, p, replica)


def to_host(host, x):
    """Start to copy x into the (pinned) host tensor; the function returned waits for it."""
    host.copy_(x, non_blocking=True)
    if not x.is_cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def take_turns(sizes, n, make):
    """A buffer for each block, and whether it lasts. Where more than n blocks have the same size,
    they take turns on n buffers, which last; each of the others has one of its own, whose storage
    is given back while it is not needed (the views of it stay valid)."""
    buffers, lasting = [], [sizes.count(size) > n for size in sizes]
    for size, many in zip(sizes, lasting):
        same = [buffer for buffer, other in zip(buffers, sizes) if other == size]
        buffers.append(same[-n] if many and len(same) >= n else make(size))
    return buffers, lasting


# How much each element adds to a tensor's fingerprint depends on its place in the logical tensor
# and its bits alone, and the sum does not depend on the order: the same values give the same
# fingerprint under any sharding.


def logical_index(shape, full_shape, offset, start, stop, device):
    """Index in the logical tensor of elements [start, stop) of the flattened local tensor, int64;
    -1 for padding past the logical shape."""
    rest, index, inside, stride = torch.arange(start, stop, device=device), 0, True, 1
    for n, full, begin in zip(shape[::-1], full_shape[::-1], offset[::-1]):
        at, rest = rest % n + begin, rest // n
        index, inside, stride = index + at * stride, (at < full) & inside, stride * full
    return torch.where(inside, index, -1)


def fingerprint(data, index):
    """Sum modulo 2^64 of a mix of each element's logical index and bits (0-d int64 tensor)."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
    mixed = mix64(mix64(index * (0x9E3779B97F4A7C15 - 2**64)) ^ data.view(ints).to(torch.int64))
    return torch.where(index < 0, 0, mixed).sum()


def fingerprint_of(blocks, p, data, start):
    """Of elements start, start+1 .. of this rank's part of parameter p; a few at a time."""
    total = 0
    for part in data.split(1 << 20):
        index = logical_index(p.shape, p.full_shape, p.cut_offset(blocks.mesh), start,
                              start + part.numel(), data.device)
        total, start = total + fingerprint(part, index), start + part.numel()
    return total


def fingerprints(blocks, names):
    """{kind/name: fingerprint in hex} of every parameter and moment of the whole model, whose
    parameters are `names`: the same on all ranks, and on any layout. Each element is counted by
    one of its replicas; an all-reduce of a word for each on the host."""
    sums = {f"{kind}/{name}": 0 for kind in ("param", "exp_avg", "exp_avg_sq") for name in names}
    for kind, p, data, start in blocks.state(shared=True):
        if data.numel():
            sums[f"{kind}/{p.name}"] = fingerprint_of(blocks, p, data, start).item()
    total = sum_integers(blocks.mesh, *sums.values()).wait()
    return {name: f"{value % 2**64:016x}" for name, value in zip(sums, total)}


def check_replicas(blocks):
    """Raise RuntimeError naming the first parameter whose replicas (over dp; at zero 0 over dp x
    fsdp x cp; over tp what it replicates; a tied weight between its stages) are not bit-identical.
    Two all-reduces, and two more over tp, of a word for each parameter."""
    mesh, params = blocks.mesh, blocks.params
    prints = torch.stack([fingerprint_of(blocks, p, *blocks.local(blocks.master, p))
                          for p in params]).to(mesh.device)
    for axis in ("dp" if blocks.zero else "grad", "tp"):
        held = [axis != "tp" or p.cut is None for p in params]
        low, high = (all_reduce(mesh, prints[held], axis, op) for op in ("min", "max"))
        for p, differs in zip(itertools.compress(params, held), (low != high).tolist()):
            if differs:
                raise RuntimeError(f"the replicas of {p.name} differ between {axis} ranks")
    if blocks.twin is not None:
        mine = prints[[p.block == len(blocks.sizes) - 1 for p in params]]
        if not torch.equal(mine, swap(mesh, mine, blocks.twin, "tied")):
            raise RuntimeError("the tied weight differs between the first and the last stage")


# ---- 5. Context parallelism: c ranks share each sequence ------------------------------------
#     ring       rank r holds chunks r and 2c-1-r of 2c. Keys and values go round: in step i it
#                computes with those of rank r-i, while the next ones are on their way
#     ulysses    rank r holds chunk r of c. For attention it changes them for the whole sequence of
#                1/c of the heads, and back
#
#     who holds what of 8 tokens, c = 2:    ring 0 0 1 1 1 1 0 0    ulysses 0 0 0 0 1 1 1 1
#
# Causal attention is a triangle: with two chunks, one from each end, all ranks have equal work in
# every step. And a query that sees an unbroken range of keys sees, among those that a rank holds
# (in their order), an unbroken range too: a pair of limits describes each step, whatever the mask.


def chunks_of(c, rank, mode):
    """The numbers of the chunks that a rank holds, and of how many."""
    return ((rank, 2 * c - 1 - rank), 2 * c) if mode == "ring" and c > 1 else ((rank,), c)


def cut_sequence(x, mesh, mode):
    """What this cp rank holds of [B, T, ...]: [B, T/c, ...]."""
    mine, n = chunks_of(mesh.size["cp"], mesh.coord["cp"], mode)
    assert x.shape[1] % n == 0, (x.shape, n)
    return x if n == 1 else torch.cat([x.chunk(n, 1)[i] for i in mine], 1)


class Step(NamedTuple):
    """Attention of some queries to some keys, both slices of what two ranks hold, and the limits
    within the slice of the keys as kernels.attention takes them: lo, hi, and what the host knows
    of them."""

    q: slice
    k: slice
    lo: object
    hi: object
    bounds: object


def attention_steps(T, c, rank, mode, device, lo=None, seen=None, window=None):
    """[Step, or None where no query sees a key] for the keys of each rank of the ring; one Step
    where attention sees the whole sequence (c = 1, ulysses). Query i sees keys lo_i .. i, at most
    `window` of them. lo [B, T/c] int32 on the device, of this rank's queries; `seen` [2, T], numpy:
    of each position the lowest and highest lo in the batch. Routing and skipping use that: no
    tensor is read back."""
    c, rank = (1, 0) if mode == "ulysses" else (c, rank)
    if lo is None and (window is None or window >= T):
        return [plain_step(rank, other, T // (2 * c)) for other in range(c)]
    n = T // chunks_of(c, 0, mode)[1]  # tokens of a chunk
    starts = [[i * n for i in chunks_of(c, other, mode)[0]] for other in range(c)]  # by rank
    where = [np.concatenate([np.arange(a, a + n) for a in own]) for own in starts]
    low, high = np.zeros((2, T), np.int64) if seen is None else seen
    if window is not None:
        low, high = (np.maximum(x, np.arange(T) - window + 1) for x in (low, high))
    at = [torch.arange(a, a + n, dtype=torch.int32, device=device) for a in starts[rank]]
    at = torch.cat(at).unsqueeze(0)  # [1, T/c]
    first = at * 0 if lo is None else lo
    first = first if window is None else torch.maximum(first, at - window + 1)
    return [masked_step(where[rank], where[other], (starts[other], n), low, high, first, at,
                        other == rank) for other in range(c)]


def plain_step(rank, other, n):
    """Causal attention, chunks of n: to the own keys as they lie; to those of a rank before, all
    queries to the first chunk; to those of a rank after, the second half of the queries to all."""
    every = slice(None)
    if other == rank:
        return Step(every, every, None, None, None)
    if other < rank:
        return Step(every, slice(0, n), None, n, None)
    return Step(slice(n, None), every, None, 2 * n, None)


def masked_step(mine, theirs, held, low, high, first, at, own):
    """Step for queries at the positions `mine` and keys at `theirs`, numpy; these are the chunks
    `held`. low, high: see `seen`; first, at [B, T/c]: the queries' first keys and positions."""
    begin, begin_last = (np.searchsorted(theirs, x[mine]) for x in (low, high))
    end = np.searchsorted(theirs, mine, "right")
    busy = np.flatnonzero(begin < end)
    if not len(busy):
        return None
    q = k = slice(0, len(mine))
    if not own:
        q = slice(int(busy[0]), int(busy[-1]) + 1)
        k = slice(int(begin[busy].min()), int(end[busy].max()))
        if begin_last[q].max() <= k.start and end[q].min() >= k.stop:
            return Step(q, k, None, k.stop - k.start, None)

    def among(x):  # how many of the keys in k lie before x
        starts, n = held
        return (sum((x[:, q] - a).clamp(0, n) for a in starts) - k.start).clamp(0, k.stop - k.start)

    bounds = [(x[q] - k.start).clip(0, k.stop - k.start) for x in (begin, end)]
    return Step(q, k, among(first), None if own else among(at + 1), bounds)


def attention_work(T, c, mode, lo, window=None):
    """(query, key) pairs that each cp rank computes, of all sequences. lo [B, T], numpy."""
    at = np.arange(T)
    first = lo if window is None else np.maximum(lo, at - window + 1)
    pairs = (at + 1 - first).sum(0)
    if mode == "ulysses":  # all of a share of the heads
        return [int(pairs.sum()) / c] * c
    chunks = pairs.reshape(chunks_of(c, 0, mode)[1], -1).sum(1)
    return [int(chunks[list(chunks_of(c, rank, mode)[0])].sum()) for rank in range(c)]


def draw_ring(c):
    """A line for each chunk of queries, by rank; beside it for each step the chunks of keys: those
    that the rank then has are computed (#, half of it, \\, of the chunk itself) or not (-)."""
    lines, work = [], [[0] * c for _ in range(c)]
    for rank in range(c):
        mine, steps = chunks_of(c, rank, "ring")[0], attention_steps(2 * c, c, rank, "ring", "cpu")
        rows = {q: [["."] * 2 * c for _ in range(c)] for q in mine}
        for i, (q, row) in product(range(c), rows.items()):
            other = (rank - i) % c
            step, keys = steps[other], chunks_of(c, other, "ring")[0]
            for k in keys:
                seen = q in mine[step.q] and k in keys[step.k] and (k <= q or step.hi is not None)
                row[i][k] = "\\" if k == q else "#" if seen else "-"
                work[i][rank] += (1 - 0.5 * (k == q)) * seen
        lines += [(f"rank {rank}  chunk {q}", map("".join, rows[q])) for q in mine]
    lines = [("", [f"step {i}" for i in range(c)]), *lines,
             ("pairs, by rank", [" ".join(f"{n:g}" for n in row) for row in work])]
    wide = max(2 * c + 1, 6)
    return "\n".join(f"{name:<16}" + "".join(f" {text:<{wide}}" for text in texts).rstrip()
                     for name, texts in lines)


def merge_lse(o, lse, o_more, lse_more):
    """Adds to attention over some keys (o [B, T, H, d] in float32, lse [B, H, T]: both changed)
    that over more keys. o is the mean of the two with weights exp(lse); of nothing (-inf) 0."""
    top = torch.maximum(lse, lse_more).clamp(min=torch.finfo(lse.dtype).min)
    a, b = (lse - top).exp(), (lse_more - top).exp()
    total = (a + b).clamp(min=1)  # the larger of the two is 1
    for x in (a, b):
        x.div_(total)
    o.mul_(a.transpose(1, 2).unsqueeze(-1)).add_(o_more * b.transpose(1, 2).unsqueeze(-1))
    lse.copy_(torch.where((a + b) > 0, top + total.log(), -math.inf))


class _Ring(torch.autograd.Function):
    """Backward goes round again; with the keys and values of a rank travel the gradients that the
    ranks before have made for them. What a rank has for its own stays at home until they arrive."""

    @staticmethod
    def forward(ctx, q, k, v, mesh, steps, attend):
        c, rank, kv = mesh.size["cp"], mesh.coord["cp"], torch.stack((k, v))
        kind = torch.promote_types(q.dtype, torch.float32)
        for i in range(c):
            step = steps[(rank - i) % c]
            coming = shift_start(mesh, kv, "cp", "keys") if i < c - 1 else None
            if step is not None:
                part, part_lse = attend[0](q[:, step.q], *kv[:, :, step.k], *step[2:])
            if i == 0:  # every query sees itself
                o, lse = part.to(kind, copy=True), part_lse.clone()
            elif step is not None:
                merge_lse(o[:, step.q], lse[:, :, step.q], part, part_lse)
            kv = coming.wait() if coming else kv
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mesh, ctx.steps, ctx.attend = mesh, steps, attend
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        (q, k, v, o, lse), mesh, steps = ctx.saved_tensors, ctx.mesh, ctx.steps
        c, rank, kind = mesh.size["cp"], mesh.coord["cp"], lse.dtype
        delta = (do.to(kind) * o).sum(-1).transpose(1, 2)
        kv, dq, home, travelling = torch.stack((k, v)), q.new_zeros(q.shape, dtype=kind), None, None
        for i in range(c):
            step = steps[(rank - i) % c]
            coming = shift_start(mesh, kv, "cp", "keys") if i < c - 1 else None
            mine = kv.new_zeros(kv.shape, dtype=kind)
            if step is not None:
                do_, q_, o_ = (x[:, step.q] for x in (do, q, o))
                of_rows = (x[:, :, step.q] for x in (lse, delta))
                dq_, *dkv = ctx.attend[1](do_, q_, *kv[:, :, step.k], o_, *of_rows, *step[2:])
                dq[:, step.q] += dq_
                for full, part in zip(mine, dkv):
                    full[:, step.k] = part
            if travelling:
                mine += travelling.wait()
            home, travelling = (mine, None) if i == 0 else (
                home, shift_start(mesh, mine, "cp", "gradients of keys"))
            kv = coming.wait() if coming else kv
        dk, dv = (home + travelling.wait()).to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


def ring_attention(attend, q, k, v, steps, mesh):
    """Attention of this rank's queries to the keys of all: q [B, T/c, H, d], k and v [B, T/c, Hkv,
    d] -> [B, T/c, H, d]. `attend`: (attention_forward, attention_backward) of kernels.py; `steps`:
    what attention_steps gives. Over cp, in forward: c-1 shifts of keys and values in their dtype,
    each posted before the step that it overlaps; in backward as many again, and c-1 of their
    gradients in float32. Parts are merged, and gradients summed, in float32."""
    return _Ring.apply(q, k, v, mesh, steps, attend)


class _Swap(torch.autograd.Function):
    """For each x, [B, T/c, H, d] -> [B, T, H/c, d] (to_heads), or back. Backward: the other way."""

    @staticmethod
    def forward(ctx, mesh, to_heads, *xs):
        ctx.mesh, ctx.to_heads, c = mesh, to_heads, mesh.size["cp"]
        going = []
        for x in xs:  # [c, T/c, B, H/c, d]: a part for each rank
            x = x.transpose(0, 1)
            x = (x.unflatten(2, (c, -1)).permute(2, 0, 1, 3, 4) if to_heads
                 else x.unflatten(0, (c, -1)))
            going.append(all_to_all_start(mesh, x.contiguous(), "cp"))
        xs = [handle.wait() for handle in going]
        if to_heads:
            return tuple(x.flatten(0, 1).transpose(0, 1) for x in xs)
        return tuple(x.permute(2, 1, 0, 3, 4).flatten(2, 3) for x in xs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return None, None, *_Swap.apply(ctx.mesh, not ctx.to_heads, *grads)


def ulysses(attention, q, k, v, mesh):
    """Attention by heads (Jacobs et al. 2023): attention(q, k, v) gets the whole sequence of H/c
    query heads and the key heads that they need (copied where there are fewer than c). q [B, T/c,
    H, d], k and v [B, T/c, Hkv, d] -> [B, T/c, H, d]. Over cp: all-to-alls of q, k, v and of the
    output, and in backward of their gradients."""
    copies = max(mesh.size["cp"] // k.shape[2], 1)
    k, v = (x.repeat_interleave(copies, 2) if copies > 1 else x for x in (k, v))
    o = attention(*_Swap.apply(mesh, True, q, k, v))
    return _Swap.apply(mesh, False, o)[0]


# ---- 6. Pipeline ----------------------------------------------------------------------------
# A schedule is a list of actions for each rank, and one executor runs any list.
# p ranks hold v chunks of the model each: p v stages. m microbatches go through all of them and
# back; the time in which a rank has nothing to do is the bubble. If a forward takes 1, a backward 2
# (1 for the gradient of its input, 1 for those of its weights) and m >= p (interleaved: p | m):
#
#     schedule       share of bubble    forwards kept (of 1/v rank)
#     gpipe          (p-1)/(mv + p-1)   mv                      the simplest
#     1f1b           (p-1)/(m + p-1)    p - rank                same time, bounded memory
#     interleaved    (p-1)/(mv + p-1)   (v-1)p + 2(p-rank) - 1  v times as many transfers
#     zero-bubble    (p-1)/(3m + p-1)   p - rank                and up to rank + 1 weight parts due


class Action(NamedTuple):
    """One entry of a schedule: do `kind` for this microbatch with this chunk of the rank's model.

    "forward", "backward", or backward in two parts: "input" (the gradient of the chunk's input,
    for which the stage before it waits) and "weight" (those of its weights: nobody waits)."""

    kind: str
    microbatch: int
    chunk: int = 0


def weave(forwards, backwards, warmup):
    """`warmup` forwards; then one forward and one backward in turn; then the other backwards."""
    woven = [a for pair in zip(forwards[warmup:], backwards) for a in pair]
    return forwards[:warmup] + woven + backwards[len(woven) // 2 :]


def need_chunks(name, v, n):
    if v != n:
        raise ValueError(f"parallel.chunks = {v}: {name} has {n} on each rank (interleaved: any)")


def gpipe(p, m, v=1):
    """All forwards, then all backwards (Huang et al. 2019); with v > 1 chunk after chunk (Lamy-
    Poirier 2022). A single rank would keep every activation and gain nothing: it takes turns."""
    if p == 1:
        return interleaved(p, m, v)
    forwards = [Action("forward", j, c) for c in range(v) for j in range(m)]
    backwards = [Action("backward", j, c) for c in reversed(range(v)) for j in range(m)]
    return [forwards + backwards] * p


def one_forward_one_backward(p, m, v=1):
    """1F1B (Narayanan et al. 2021): begin backwards as soon as possible. Rank r has p-1-r ranks
    behind it. It sends them as many microbatches, and from then on gives one and gets one back:
    as much idle time as GPipe, but never more than p - r forwards waiting for their backward.
    A single rank does forward and backward of each in turn: plain gradient accumulation."""
    need_chunks("1f1b", v, 1)
    forwards, backwards = ([Action(kind, j) for j in range(m)] for kind in ("forward", "backward"))
    return [weave(forwards, backwards, min(m, p - 1 - rank)) for rank in range(p)]


def interleaved(p, m, v=1):
    """Interleaved 1F1B, in Megatron's order (Narayanan et al. 2021): p microbatches go through the
    first chunk of every rank, then through the second ..., then the next p follow. The pipeline
    fills and drains by chunks, which takes 1/v of the time.

    Groups need p to divide m. Otherwise it is made for the next multiple, and what concerns
    microbatches that do not exist is left out: no microbatch needs the results of another."""
    if v == 1:
        return one_forward_one_backward(p, m)
    groups = [range(first, first + p) for first in range(0, m, p)]
    forwards = [Action("forward", j, c) for g in groups for c in range(v) for j in g]
    backwards = [Action("backward", j, c) for g in groups for c in reversed(range(v)) for j in g]
    schedule = []
    for rank in range(p):
        # (v-1) p forwards until the last chunk begins, then 2 for each rank behind. With instant
        # transfers 1 would do, as in 1F1B; the other is work to do while a transfer is under way.
        warmup = min(len(forwards), (v - 1) * p + 2 * (p - 1 - rank))
        schedule.append([a for a in weave(forwards, backwards, warmup) if a.microbatch < m])
    return schedule


def zero_bubble(p, m, v=1):
    """ZB-H1 (Qi et al. 2023): 1F1B with each backward in two parts. Only the input part holds up
    the ranks before, so the first gradients arrive sooner; and rank r puts off the weight parts of
    r microbatches, to do them at the end where 1F1B waits for the last gradients."""
    need_chunks("zero-bubble", v, 1)
    schedule = []
    for rank, actions in enumerate(one_forward_one_backward(p, m)):
        parts = []
        for kind, j, _ in actions:
            parts.append(Action("forward" if kind == "forward" else "input", j))
            if kind == "backward" and j >= rank:
                parts.append(Action("weight", j - rank))
        schedule.append(parts + [Action("weight", j) for j in range(max(0, m - rank), m)])
    return schedule


SCHEDULES = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved,
             "zero-bubble": zero_bubble}


def connect(schedule, v):
    """For each rank and action (needs, makes): the result it waits for (or None) and its own, as
    (what, microbatch, stage); a "gradient" is that of the stage's input. ValueError unless every
    stage does every microbatch's forward and backward once."""
    last, found, links = len(schedule) * v - 1, {}, [[] for _ in schedule]
    for rank, actions in enumerate(schedule):
        for kind, j, c in actions:
            s = c * len(schedule) + rank
            found.setdefault((s, j), []).append(kind)
            needs, makes = ("activation", j, s - 1) if s else None, ("activation", j, s)
            if kind == "weight":
                needs, makes = ("gradient", j, s), ("weights", j, s)
            elif kind != "forward":  # the last stage makes the loss, from which the way back begins
                needs, makes = ("gradient", j, s + 1) if s < last else makes, ("gradient", j, s)
            links[rank].append((needs, makes))
    whole = [["backward", "forward"], ["forward", "input", "weight"]]
    if all(kinds == ["forward"] for kinds in found.values()):  # evaluation
        whole = [["forward"]]
    for s, j in {*product(range(last + 1), range(1 + max(j for _, j in found))), *found}:
        if sorted(found.get((s, j), [])) not in whole or s > last:
            raise ValueError(f"stage {s} does {found.get((s, j), [])} for microbatch {j}")
    return links


class Played(NamedTuple):
    """What `simulate` finds. The lists have an entry for each rank."""

    makespan: float  # time until the last action ends
    bubble: float  # share of all ranks' time in which they idle: 1 - busy / (p makespan)
    live: list  # most forwards done whose "backward" or "input" is still to come
    due: list  # most "input" parts done whose "weight" is still to come
    spans: list  # (start, end) of each action
    order: list  # all actions as (rank, index), none before one that it depends on


def unit_cost(kind, stage):
    return 2 if kind == "backward" else 1


def most(actions, more, less):
    """The most actions of kinds `more` at any time whose action of kinds `less` is to come."""
    return max(accumulate((a.kind in more) - (a.kind in less) for a in actions))


def simulate(schedule, v=1, cost=unit_cost, transfer=0):
    """Play a schedule through: Played, or a ValueError if it is not complete or cannot go on.

    An action takes cost(kind, stage). It starts when the one before it on its rank has ended and
    what it needs is there: a result of another rank, `transfer` after that was made."""
    links, p = connect(schedule, v), len(schedule)
    spans, ready, order, waits, moved = [[] for _ in schedule], {None: 0}, [], [], True
    while moved:
        moved, waits = False, []
        for rank, actions in enumerate(schedule):
            for i in range(len(spans[rank]), len(actions)):
                needs, makes = links[rank][i]
                if needs not in ready:
                    waits.append(f"rank {rank} at action {i} {tuple(actions[i])} for {needs}")
                    break
                far = needs is not None and needs[2] % p != rank
                start = max(ready[needs] + transfer * far, spans[rank][-1][1] if i else 0)
                end = ready[makes] = start + cost(actions[i].kind, makes[2])
                spans[rank].append((start, end))
                order.append((end, rank, i))
                moved = True
    if waits:
        raise ValueError("a schedule that cannot go on: " + "; ".join(waits))
    order.sort(key=lambda entry: entry[0])  # stable: at equal times dependencies stay in order
    makespan, busy = order[-1][0], sum(end - start for row in spans for start, end in row)
    return Played(makespan, 1 - busy / (p * makespan),
                  [most(actions, ("forward",), ("backward", "input")) for actions in schedule],
                  [most(actions, ("input",), ("weight",)) for actions in schedule],
                  spans, [entry[1:] for entry in order])


class Transfer(NamedTuple):
    """An entry of a program, between its actions: "send" the result of the action just done to
    rank `peer`, whose `action` needs it; "receive" from `peer` what this rank's `action` needs
    (posted here, waited for before it); or "keep" the result for another `action` of this rank."""

    op: str
    action: Action
    peer: int


def transfers(schedule, v=1, cost=unit_cost):
    """The program of each rank: its actions, and between them what it sends and receives.

    All transfers have one order: that in which results become ready when the schedule is played
    with `cost` (the same on all ranks). Each rank has those it takes part in. So the n-th send from
    a to b is the n-th receive of b from a, and no tags are needed. A receive stands before the
    action during which the result is due, and where no send forbids it one earlier: posted ahead.

    No deadlock, even if every send and receive blocks its rank until the other end is there, or if
    all those of a rank share a queue and hold up what is behind them (NCCL on one communicator).
    Let t be the first transfer in the order that is not done. In the programs of its two ranks,
    before t stand only earlier transfers, all done, and actions that need only those. So both ranks
    come to t, and it is done. More queues, as one for each direction, only take waits away."""
    links, users = connect(schedule, v), {}
    for actions, row, rank in zip(schedule, links, range(len(schedule))):
        users |= {needs: (rank, a) for a, (needs, makes) in zip(actions, row)
                  if needs and needs[2] != makes[2]}
    programs = [[] for _ in schedule]
    for rank, i in simulate(schedule, v, cost).order:
        programs[rank].append(schedule[rank][i])
        peer, user = users.get(links[rank][i][1], (None, None))
        if user:
            programs[rank].append(Transfer("keep" if peer == rank else "send", user, peer))
        if user and peer != rank:
            there = programs[peer]
            ahead = len(there) > 0 and isinstance(there[-1], Action)
            there.insert(len(there) - ahead, Transfer("receive", user, rank))
    return programs


MARKS = {"forward": " bcdefgh", "backward": "ABCDEFGH", "input": "ABCDEFGH", "weight": "wxyzstuv"}


def draw(schedule, v=1, cost=unit_cost):
    """A line for each rank, a column for each unit of time. Microbatch 3 with chunk 0: " 3" is its
    forward, "A3" its backward or input part, "w3" its weight part; with chunk 1: b3, B3, x3."""
    played = simulate(schedule, v, cost)
    wide = 1 + max(len(str(a.microbatch)) for actions in schedule for a in actions)
    lines = []
    for rank, actions in enumerate(schedule):
        line = [" .".ljust(wide)] * round(played.makespan)
        for (kind, j, c), span in zip(actions, played.spans[rank]):
            start, end = map(round, span)
            text = f"{MARKS[kind][c % 8]}{j}".ljust(wide, "=" if end > start + 1 else " ")
            line[start:end] = [text, *["=" * wide] * (end - start - 1)][: end - start]
        lines.append(f"rank {rank:<3}{''.join(line)}")
    lines.append(f"time {played.makespan:g}, bubble {played.bubble:.1%}; at most, by rank: "
                 f"{played.live} forwards kept, {played.due} weight parts due")
    return "\n".join(lines)


def balance(costs, stages):
    """Cut layers of these costs into contiguous, non-empty parts: the largest part as small as
    possible, and of such cuts that of least sum of squares. Returns stages + 1 bounds: stage s is
    layers [bounds[s], bounds[s+1])."""
    if stages > len(costs):
        raise ValueError(f"parallel.pp x parallel.chunks = {stages} stages, but only {len(costs)} "
                         "layers")
    sums, cap = [0, *accumulate(costs)], math.inf

    def capped_square(total, part):
        return total + part * part if part <= cap else math.inf

    for join in (max, capped_square):
        best = {0: (0, [0])}  # layers in the parts so far -> least joined cost, bounds
        for _ in range(stages):
            best = {j: min((join(value, sums[j] - sums[i]), [*bounds, j])
                           for i, (value, bounds) in best.items() if i < j)
                    for j in range(min(best) + 1, len(costs) + 1)}
        cap, bounds = best[len(costs)]
    return bounds


@functools.cache
def program(p, stage, schedule, m, v=1, training=True):
    """What rank `stage` of p does for m microbatches, v chunks a rank: a tuple."""
    lists = SCHEDULES[schedule](p, m, v)
    if not training:  # the forwards in their order
        lists = [[a for a in actions if a.kind == "forward"] for actions in lists]
    return tuple(transfers(lists, v)[stage])


class Chunk(NamedTuple):
    """Consecutive blocks of a rank, as indices in its list. `last`: they end with the loss."""

    blocks: range
    last: bool


@dataclasses.dataclass
class Flow:
    """What the actions of one run share. `saved` and `due` are keyed by (microbatch, chunk)."""

    fns: list
    blocks: Blocks
    microbatches: list
    keep: list
    chunks: list
    training: bool
    split: bool  # backward comes in two parts
    inbox: dict  # action -> handle of what it waits for
    saved: dict  # what the backward of a forward that is done needs
    due: dict  # weight parts that are still to be done
    left: list  # block -> microbatches whose gradient it still lacks

    def close(self, i):
        """The gradients that block i's backward completes are there: start their sums."""
        for b in self.blocks.closes[i]:
            self.left[b] -= 1
            self.blocks.reduce(b, last=self.left[b] == 0)
        if self.blocks.deterministic:  # then each use of a weight has a gradient of its own
            for b in self.blocks.uses[i] - set(self.blocks.closes[i]):
                self.blocks.reduce(b, False, use=1)


def run(program, fns, blocks, microbatches, keep=None, chunks=None, empty=None):
    """Run this rank's program. Returns what the last block returned for each microbatch, which is
    its loss: a list, empty on a rank that does not have that block.

    `fns`: one function for each block, fn(x, microbatch, later) -> x; the first of the model
    ignores x. `later` is where operations put what their weights' gradients take: Now, or a list
    where the schedule does these later; a function that hands on None instead gets them from
    autograd. `keep[i]`: whether forward keeps block i's graph, or only its input, from which
    backward computes the block again. `chunks`: by default all blocks are one. `empty(microbatch)`
    makes the tensor that a stage receives. Without backward actions nothing is kept.

    Autograd only ever sees one block: blocks are joined here by hand, so the order of gathers,
    frees and reductions is the order of these lines."""
    kinds = {entry.kind for entry in program if isinstance(entry, Action)}
    flow = Flow(fns, blocks, microbatches, keep or [True] * len(fns),
                chunks or [Chunk(range(len(fns)), True)], kinds != {"forward"}, "weight" in kinds,
                {}, {}, {}, [len(microbatches)] * len(blocks.sizes))
    losses, sending = [], []
    for n, entry in enumerate(program):
        sending = [sent for sent in sending if not released(*sent)]
        if isinstance(entry, Action):
            result = act(flow, entry, program[n + 1 : n + 2])
            if entry.kind == "forward" and flow.chunks[entry.chunk].last:
                losses.append(result)
        elif entry.op == "receive":
            out = empty(microbatches[entry.action.microbatch])
            flow.inbox[entry.action] = receive(blocks.mesh, out, entry.peer)
        elif entry.op == "send":
            sending.append((send(blocks.mesh, result.contiguous(), entry.peer), result))
        else:
            flow.inbox[entry.action] = Handle(lambda x=result: x)
    for sent, _ in sending:
        sent.wait()
    if flow.training:
        blocks.wait()
    return losses


def released(sent, result):
    """Has the send ended? Then the storage of the result goes: of a stage's output only the graph
    is needed any more."""
    if not sent.done():
        return False
    sent.wait()
    result.untyped_storage().resize_(0)
    return True


def act(flow, action, following):
    """Do an action: returns what the next stage, or the one before, waits for."""
    kind, j, c = action
    if kind == "forward":
        next_is_mine = following and following[0] in [(k, j, c) for k in ("backward", "input")]
        return forward(flow, j, c, next_is_mine)
    return weight(flow, j, c) if kind == "weight" else backward(flow, kind, j, c)


def forward(flow, j, c, backward_follows):
    """Forward of one microbatch through a chunk. Of each block is saved what backward needs:
    (input, output, later), the output None where it is to be computed again; of the last block,
    whose loss makes its gradient at once, the gradient of its input."""
    (order, last), blocks, saved, x = flow.chunks[c], flow.blocks, [], None
    if (action := Action("forward", j, c)) in flow.inbox:
        x = flow.inbox.pop(action).wait()
    for i in order:
        ends = last and i == order[-1]
        blocks.gather(i, ahead=range(i + 1, order.stop))
        if flow.training and x is not None:
            x = x.detach().requires_grad_()
        for b in blocks.uses[i] if flow.training and ends else ():
            blocks.open_grad(b)
        later = [] if flow.split else Now()
        with torch.set_grad_enabled(flow.training and (flow.keep[i] or ends)):
            y = flow.fns[i](x, flow.microbatches[j], later)
        if flow.training and ends:
            grad, *grads = torch.autograd.grad(y, [x, *blocks.tensors[i]], allow_unused=True)
            blocks.accumulate(i, grads)
            flow.close(i)
            saved.append(grad)
        elif flow.training:
            saved.append((x, y if flow.keep[i] else None, later))
        x = y.detach()
        if not (backward_follows and i == order[-1] - last):  # backward begins with that one
            blocks.free(i)
    if flow.training:
        flow.saved[j, c] = saved
    return x


def backward(flow, kind, j, c):
    """Backward of one microbatch through a chunk, block by block from the end; of kind "input"
    only that of the inputs, while what the weights' gradients take is put aside."""
    (order, last), blocks, saved, due = flow.chunks[c], flow.blocks, flow.saved.pop((j, c)), []
    grad = saved.pop() if last else flow.inbox.pop(Action(kind, j, c)).wait()
    first = bool(saved) and saved[0][0] is None  # whose backward does not read its weights
    for i in reversed(order[: len(saved)]):
        x, y, later = saved.pop()
        inputs = [] if x is None else [x]
        if inputs:
            blocks.gather(i, ahead=range(i - 1, order[0] + first - 1, -1))
        for b in blocks.uses[i] if kind == "backward" else ():
            blocks.open_grad(b)
        if y is None:
            later = [] if flow.split else Now()
            with torch.enable_grad():
                y = flow.fns[i](x, flow.microbatches[j], later)
        grads = torch.autograd.grad(y, inputs + blocks.tensors[i], grad, allow_unused=True)
        del y  # with it goes the graph
        grad, rest = grads[0] if inputs else None, grads[len(inputs):]
        if kind == "backward":
            blocks.accumulate(i, rest)
            flow.close(i)
        else:
            due.append((i, rest, later))
        if inputs:
            blocks.free(i)
    if kind == "input":
        flow.due[j, c] = due
    return grad


def weight(flow, j, c):
    """The weights' gradients of one microbatch in a chunk, block by block from the end."""
    for i, grads, later in flow.due.pop((j, c)):
        for b in flow.blocks.uses[i]:
            flow.blocks.open_grad(b)
        flow.blocks.accumulate(i, grads)
        with torch.no_grad():
            for finish in later:
                finish()
        flow.close(i)


def main():
    """Draw the timeline of a schedule; or a layout's grid, a schedule, and the steps of a ring."""
    if len(sys.argv) > 1:
        name, *numbers = sys.argv[1:]
        if name not in SCHEDULES or len(numbers) not in (2, 3):
            raise ValueError(f"{' '.join(sys.argv[1:])}: must be one of {', '.join(SCHEDULES)}, "
                             "ranks, microbatches and, above 1, chunks")
        p, m, v = map(int, (*numbers, 1)[:3])
        return print(draw(SCHEDULES[name](p, m, v), v))
    print("8 ranks as dp 2 x fsdp 2 x tp 2; a row is a group that splits each layer (tp)\n")
    for rank in range(0, 8, 2):
        print(f"    dp {rank // 4}  fsdp {rank // 2 % 2}   | rank {rank}  rank {rank + 1} |")
    print("\npp 4, 1f1b, 6 microbatches: their forwards (3) and backwards (A3=) in time\n\n"
          + draw(one_forward_one_backward(4, 6)))
    print("\ncp 4, ring: two chunks of each sequence a rank; keys go round. Which it computes in "
          "each step:\n# whole, \\ the causal half, - none, . are elsewhere\n\n" + draw_ring(4))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"parallel.py: error: {error}", file=sys.stderr)
        sys.exit(2)
