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
    enter   all-gather the sequence (tp)    reduce-scatter the gradient    N (n-1)/n each way,
    leave   reduce-scatter the sum (tp)     all-gather the gradient        N: the gathered size

With one rank on an axis each of them is the identity, and no collective is called: one process is
the specification that every layout has to reproduce.

    python parallel.py          draws the grid of a layout and the blocks that ranks exchange
"""

import dataclasses
import hashlib
import math
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

# ---------------------------------------------------------------------------------------------
# 1. Mesh, door, ledger

AXES = ("pp", "dp", "fsdp", "cp", "tp")
UNIONS = {  # groups over several axes at once
    "data": ("dp", "fsdp"),  # ranks that read different samples
    "grad": ("dp", "fsdp", "cp"),  # ranks that hold parts of a dense parameter's gradient
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
        dist.init_process_group(backend, device_id=bind, timeout=timedelta(minutes=10))
    return dist.get_rank(), dist.get_world_size(), local_rank


def stop():
    """Leave the world."""
    if dist.is_initialized():
        dist.destroy_process_group()


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


def build_mesh(sizes, device):
    """Make every process group of the layout. `sizes`: axis -> ranks, with the world as product.
    Collective: all ranks call it in the same order."""
    world = math.prod(sizes.values())
    rank = dist.get_rank() if world > 1 else 0
    mesh = Mesh(dict(sizes), {}, {}, torch.device(device), rank, world)
    below = 1
    for axis in reversed(AXES):
        mesh.coord[axis] = rank // below % sizes[axis]
        below *= sizes[axis]
    for name, axes in UNIONS.items():
        mesh.size[name] = math.prod(sizes[a] for a in axes)
        mesh.coord[name] = 0
        for a in axes:
            mesh.coord[name] = mesh.coord[name] * sizes[a] + mesh.coord[a]
    if world == 1:
        mesh.group = dict.fromkeys([*AXES, *UNIONS])
        return mesh
    shape = tuple(sizes[a] for a in AXES)
    grid = dist.init_device_mesh(mesh.device.type, shape, mesh_dim_names=AXES)
    for axis in AXES:
        mesh.group[axis] = grid.get_group(axis) if sizes[axis] > 1 else None
    for name, axes in UNIONS.items():
        mesh.group[name] = grid[axes]._flatten(name).get_group() if mesh.size[name] > 1 else None
    mesh.control = dist.new_group(backend="gloo")
    return mesh


def count(mesh, axis, op, nbytes):
    calls = mesh.ledger.setdefault((axis, op), [0, 0])
    calls[0] += 1
    calls[1] += nbytes


def all_reduce(mesh, x, axis, op="sum", wait=True):
    """Sum (or max, min) of x over `axis`, in place, on every rank. Sends 2 N (n-1)/n bytes of N.
    With wait=False returns a handle (None at size 1) whose wait() makes x ready."""
    n = mesh.size[axis]
    if n == 1:
        return x if wait else None
    count(mesh, axis, f"all_reduce {op}", 2 * x.numel() * x.element_size() * (n - 1) // n)
    how = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    work = dist.all_reduce(x, how, group=mesh.group[axis], async_op=not wait)
    return x if wait else work


def all_gather(mesh, x, axis):
    """The x of every rank of `axis`, joined along dim 0: [n * x.shape[0], ...]. Sends N (n-1)/n
    bytes of the N gathered."""
    n = mesh.size[axis]
    if n == 1:
        return x
    out = x.new_empty(n * x.shape[0], *x.shape[1:])
    count(mesh, axis, "all_gather", out.numel() * out.element_size() * (n - 1) // n)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    gather(out, x.contiguous(), group=mesh.group[axis])
    return out


def reduce_scatter(mesh, x, axis):
    """This rank's 1/n, along dim 0, of the sum of x over `axis`. Sends N (n-1)/n bytes of N.

    gloo has no direct reduce-scatter; an all-to-all and a sum in rank order moves the same bytes
    and fixes the order of the sum."""
    n = mesh.size[axis]
    if n == 1:
        return x
    assert x.shape[0] % n == 0, (x.shape, n)
    count(mesh, axis, "reduce_scatter", x.numel() * x.element_size() * (n - 1) // n)
    x = x.contiguous()
    if x.device.type == "cpu":
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=mesh.group[axis])
        return parts.view(n, x.shape[0] // n, *x.shape[1:]).sum(0)
    out = x.new_empty(x.shape[0] // n, *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x, group=mesh.group[axis])
    return out


class Pending:
    """Integers on their way through the control group: sum over all ranks, on the host."""

    def __init__(self, mesh, *values):
        self.values = torch.tensor(values, dtype=torch.int64)
        self.work = None
        if mesh.world > 1:
            count(mesh, "world", "all_reduce sum (control)",
                  2 * self.values.numel() * 8 * (mesh.world - 1) // mesh.world)
            self.work = dist.all_reduce(self.values, group=mesh.control, async_op=True)

    def wait(self):
        if self.work is not None:
            self.work.wait()
        return self.values.tolist()


def agree(mesh, error=None):
    """A barrier that carries bad news: if any rank passes an error, all ranks raise it.

    Returns only when all ranks have called it with None."""
    notes = [error and f"rank {mesh.rank}: {error}"]
    if mesh.world > 1:
        notes = [None] * mesh.world
        dist.all_gather_object(notes, error and f"rank {mesh.rank}: {error}", group=mesh.control)
    bad = [note for note in notes if note]
    if bad:
        raise RuntimeError(bad[0])


def tell(mesh, value):
    """Rank 0's value (any Python object), on every rank."""
    box = [value]
    if mesh.world > 1:
        dist.broadcast_object_list(box, src=0, group=mesh.control)
    return box[0]


def ledger_table(mesh):
    """The ledger as text, a line for each (axis, operation)."""
    rows = [f"  {axis:<6} {op:<26} {calls:>6} calls {nbytes:>16,} bytes"
            for (axis, op), (calls, nbytes) in sorted(mesh.ledger.items())]
    return "\n".join(rows) or "  nothing: one process"


# ---------------------------------------------------------------------------------------------
# 2. Conjugate pairs: the two calls around each sublayer, and the bits that do not depend on rank


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return all_gather(mesh, x.transpose(0, 1), "tp").transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(ctx.mesh, grad.transpose(0, 1), "tp").transpose(0, 1), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return reduce_scatter(mesh, x.transpose(0, 1), "tp").transpose(0, 1)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(ctx.mesh, grad.transpose(0, 1), "tp").transpose(0, 1), None


def enter(x, mesh):
    """[B, T/tp, D] -> [B, T, D]: each tp rank gets the whole sequence before a column product.
    Forward: all-gather over tp. Backward: reduce-scatter of the partial gradients over tp."""
    return x if mesh.size["tp"] == 1 else _Enter.apply(x, mesh)


def leave(x, mesh):
    """[B, T, D] partial sums -> [B, T/tp, D]: after a row product each rank keeps its positions.
    Forward: reduce-scatter over tp. Backward: all-gather over tp."""
    return x if mesh.size["tp"] == 1 else _Leave.apply(x, mesh)


def shift_right(x, n):
    """Logical (unsigned) right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def signed(n):
    """The int64 with the same 64 bits as the non-negative integer n modulo 2^64."""
    n %= 1 << 64
    return n - (1 << 64) if n >= 1 << 63 else n


def mix64(x):
    """A bijective scramble of int64 bits: the output function of splitmix64 (Steele, Lea and
    Flood 2014). Integers only, so every device and every slice of a tensor gives the same bits."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def key64(*parts):
    """A 64-bit key (as int64) for any tuple of names and numbers."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def random_bits(key, index):
    """64 random bits for each element of `index` (int64), a function of (key, index) alone.
    `key` is an int or a 0-d int64 tensor."""
    return mix64(mix64(index * signed(0x9E3779B97F4A7C15) + key) ^ key)


# ---------------------------------------------------------------------------------------------
# 4. Sharded data parallelism


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
    start: int = 0

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


def list_params(blocks):
    """Every parameter of the named blocks once, in order: [("embed", module), ...] -> [Param]. A
    weight that two blocks share belongs to the first."""
    params, seen = [], {}
    for b, (block_name, block) in enumerate(blocks):
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

    A module's parameters are views into `weight` (compute dtype; in float32 it is `master`
    itself). Gradients accumulate in float32 over the microbatches of a step. Four verbs move data,
    called by the executor in the order of its actions, never by autograd:

        stage   gather(i)   free(i)   reduce(i)                            wait()
        0       nothing     nothing   all-reduce of grad i over dp x       all reductions
                                      fsdp x cp: 2 P (n-1)/n bytes         are done

    reduce(i) only starts the sum, so the backward of the blocks before i runs meanwhile.
    """

    ALIGN = 16  # elements: parameters begin at multiples of it, so that kernels can use wide loads

    def __init__(self, blocks, mesh, dtype):
        """`blocks`: [(name, module)] in the order of forward, built on the meta device. Allocates
        the storage (zeros) and makes the modules' parameters views into it."""
        self.mesh, self.dtype = mesh, dtype
        self.master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.params = list_params(blocks)
        self.weight, self.master, self.grad, self.exp_avg, self.exp_avg_sq = [], [], [], [], []
        self.steps, self.split, self.pending = [], [], []
        for b in range(len(blocks)):
            self.allocate([p for p in self.params if p.block == b])
        self.bind()

    def allocate(self, params):
        """Place the parameters of one block, decayed ones first, and make its flat buffers."""
        end = 0
        for p in sorted(params, key=lambda p: not p.decay):
            p.start = end
            end += -(-p.numel // self.ALIGN) * self.ALIGN
        self.split.append(max([p.start + p.numel for p in params if p.decay], default=0))
        size = -(-end // self.mesh.size["grad"]) * self.mesh.size["grad"]

        def zeros(dtype):
            return torch.zeros(size, dtype=dtype, device=self.mesh.device)

        for buffers in (self.master, self.grad, self.exp_avg, self.exp_avg_sq):
            buffers.append(zeros(self.master_dtype))
        same = self.dtype == self.master_dtype
        self.weight.append(self.master[-1] if same else zeros(self.dtype))
        self.steps.append([torch.zeros((), device=self.mesh.device) for _ in range(2)])

    def bind(self):
        """Make every module's parameter a view of its block's weight. Its `main_grad` is the view
        of the accumulator, for operations that add their weight's gradient there themselves."""
        self.tensors = [[] for _ in self.weight]
        for p in self.params:
            tensor = torch.nn.Parameter(self.view(self.weight, p))
            tensor.main_grad = self.view(self.grad, p)
            self.tensors[p.block].append(tensor)
            for module, attr in p.owners:
                setattr(module, attr, tensor)

    @staticmethod
    def view(buffers, p):
        return buffers[p.block][p.start : p.start + p.numel].view(p.shape)

    def begin(self):
        """Start a step: every accumulator to zero."""
        torch._foreach_zero_(self.grad)

    def gather(self, i):
        """Make block i's weights whole. At stage 0 they are."""

    def free(self, i):
        """Give the gathered weights of block i back. At stage 0 they stay."""

    def accumulate(self, i, grads):
        """Add one microbatch's gradients of block i: one for each of its tensors, None where the
        operation has added its own (`main_grad`) or the parameter was not used."""
        pairs = [(t.main_grad, g) for t, g in zip(self.tensors[i], grads, strict=True)
                 if g is not None]
        if pairs:
            torch._foreach_add_([acc for acc, _ in pairs], [g for _, g in pairs])

    def reduce(self, i):
        """This rank's gradient of block i is complete: start its sum over dp x fsdp x cp."""
        self.pending.append(all_reduce(self.mesh, self.grad[i], "grad", wait=False))

    def wait(self):
        """All sums that were started are done."""
        for work in self.pending:
            if work is not None:
                work.wait()
        self.pending.clear()

    def grad_norm(self):
        """The global 2-norm of the gradient, each logical element once: a 0-d device tensor."""
        norms = torch._foreach_norm(self.grad)  # padding is zero
        return torch.linalg.vector_norm(torch.stack(norms))

    def adamw(self, lr, beta1, beta2, eps, weight_decay, found_inf):
        """One AdamW step (Loshchilov and Hutter 2019) on the flat buffers, torch's fused one; the
        first part of each block is decayed, the second not. Where the device scalar `found_inf`
        is 1, nothing changes: not the weights, the moments or the step counters."""
        for part, decay in ((0, weight_decay), (1, 0.0)):
            spans = [slice(0, s) if part == 0 else slice(s, None) for s in self.split]
            lists = [[buffer[span] for buffer, span in zip(buffers, spans)]
                     for buffers in (self.master, self.grad, self.exp_avg, self.exp_avg_sq)]
            adamw(*lists, [], [s[part] for s in self.steps], fused=True, amsgrad=False,
                  beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
                  found_inf=found_inf)
        self.refresh()

    def refresh(self):
        """Bring the compute copy up to date with the master weights."""
        if self.dtype != self.master_dtype:
            torch._foreach_copy_(self.weight, self.master)

    def state(self, share=(0, 1)):
        """(kind, Param, data, start) of what a checkpoint holds: `data` is elements start, start+1
        ... of the flattened local tensor, those that lie in slice r of the n equal slices of each
        block's flat buffer, (r, n) = share. (0, 1) is everything."""
        rank, ranks = share
        for kind, buffers in (("param", self.master), ("exp_avg", self.exp_avg),
                              ("exp_avg_sq", self.exp_avg_sq)):
            for p in self.params:
                part = buffers[p.block].numel() // ranks
                start = min(max(p.start, rank * part), p.start + p.numel)
                stop = max(min(p.start + p.numel, (rank + 1) * part), start)
                yield kind, p, buffers[p.block][start:stop], start - p.start


# How much each element adds to a tensor's fingerprint depends on its place in the logical tensor
# and its bits alone, and the sum does not depend on the order: the same values give the same
# fingerprint under any sharding.


def logical_index(shape, full_shape, offset, start, stop, device):
    """Index in the logical tensor of elements [start, stop) of the flattened local tensor, int64;
    -1 for padding past the logical shape."""
    flat = torch.arange(start, stop, device=device)
    index, inside, stride = torch.zeros_like(flat), None, 1
    for n, full, begin in reversed(list(zip(shape, full_shape, offset))):
        at = flat % n + begin
        flat = flat // n
        inside = at < full if inside is None else inside & (at < full)
        index += at * stride
        stride *= full
    return index if inside is None else torch.where(inside, index, -1)


def fingerprint(data, index):
    """Sum modulo 2^64 of a mix of each element's logical index and bits (0-d int64 tensor)."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()]
    mixed = mix64(mix64(index * signed(0x9E3779B97F4A7C15)) ^ data.view(ints).to(torch.int64))
    return torch.where(index < 0, 0, mixed).sum()


def check_replicas(blocks):
    """Raise RuntimeError naming the first parameter whose replicas over dp x fsdp x cp are not
    bit-identical. One all-reduce of a word for each parameter."""
    mesh, prints = blocks.mesh, []
    for p in blocks.params:
        index = logical_index(p.shape, p.full_shape, p.cut_offset(mesh), 0, p.numel, mesh.device)
        prints.append(fingerprint(blocks.view(blocks.master, p).view(-1), index))
    low, high = torch.stack(prints), torch.stack(prints)
    all_reduce(mesh, low, "grad", "min")
    all_reduce(mesh, high, "grad", "max")
    for p, differs in zip(blocks.params, (low != high).tolist()):
        if differs:
            raise RuntimeError(f"the replicas of {p.name} differ between data ranks")


# ---------------------------------------------------------------------------------------------
# 6. Pipeline: a schedule is a list of actions, and one executor runs any list


class Action(NamedTuple):
    """One entry of a schedule: do `kind` ("forward" or "backward") for this microbatch."""

    kind: str
    microbatch: int


def accumulate_schedule(n_microbatch):
    """One stage: forward and backward of each microbatch in turn (gradient accumulation)."""
    return [Action(kind, j) for j in range(n_microbatch) for kind in ("forward", "backward")]


def forward_schedule(n_microbatch):
    """Evaluation: forwards only."""
    return [Action("forward", j) for j in range(n_microbatch)]


def run(actions, fns, blocks, microbatches, keep=None):
    """Run a schedule on this rank's blocks. Returns the sum of the loss over the microbatches.

    `fns`: one function for each block, fn(x, microbatch) -> x; the first ignores x, the last
    returns the loss. `keep[i]`: whether forward keeps block i's graph, or only its input, from
    which backward computes the block again. Without backward actions nothing is kept.

    Autograd only ever sees one block: blocks are joined here by hand, so the order of gathers,
    frees and reductions is the order of these lines."""
    backwards = [a.microbatch for a in actions if a.kind == "backward"]
    training = len(backwards) > 0
    keep = keep or [True] * len(fns)
    saved, total = {}, None
    for kind, j in actions:
        if kind == "forward":
            loss, saved[j] = forward(fns, blocks, microbatches[j], keep, training)
            total = loss.detach() if total is None else total + loss.detach()
        else:
            backward(fns, blocks, microbatches[j], saved.pop(j), reduce=j == backwards[-1])
    blocks.wait()
    return total


def forward(fns, blocks, microbatch, keep, training):
    """Forward of one microbatch. Returns the last output and, when training, [(input, output)] of
    each block, with output None where backward is to compute it again."""
    x, saved = None, []
    for i, fn in enumerate(fns):
        blocks.gather(i)
        graph = training and (keep[i] or i == len(fns) - 1)  # the loss makes its gradient here
        if training and x is not None:
            x = x.detach().requires_grad_()
        with torch.set_grad_enabled(graph):
            y = fn(x, microbatch)
        if training:
            saved.append((x, y if graph else None))
        x = y
        blocks.free(i)
    return x, saved


def backward(fns, blocks, microbatch, saved, reduce):
    """Backward of one microbatch, block by block from the last. With `reduce` the gradients are
    complete after it, and each block's sum over the data ranks starts as soon as it is."""
    grad = None
    for i in reversed(range(len(fns))):
        x, y = saved.pop()
        blocks.gather(i)
        if y is None:
            with torch.enable_grad():
                y = fns[i](x, microbatch)
        inputs = [t for t in (x,) if t is not None]
        grads = torch.autograd.grad(y, inputs + blocks.tensors[i], grad, allow_unused=True)
        grad = grads[0] if inputs else None
        blocks.accumulate(i, grads[len(inputs):])
        if reduce:
            blocks.reduce(i)
        blocks.free(i)


def main():
    """Draw a layout's grid, and what the door counts when its ranks sum one gradient."""
    sizes = layout_of(8, dp=2, fsdp=2, tp=2)
    print("8 ranks as dp 2 x fsdp 2 x tp 2; a row is a group that splits each layer (tp)\n")
    for rank in range(0, 8, 2):
        print(f"    dp {rank // 4}  fsdp {rank // 2 % 2}   | rank {rank}  rank {rank + 1} |")
    print("\nRanks of a column read other samples; their gradients are summed:")
    data = sizes["dp"] * sizes["fsdp"]
    nbytes = 4 * 1000
    print(f"    all-reduce of {nbytes} bytes over {data} ranks sends "
          f"{2 * nbytes * (data - 1) // data} bytes a rank")


if __name__ == "__main__":
    main()
