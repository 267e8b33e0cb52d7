"""The pieces of parallel.py by themselves: mesh, door, pairs, random bits, flat blocks."""

import collections
import inspect
import math
import subprocess
import sys
import textwrap
import unittest.mock

import parity
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import model
import parallel
import train


def mesh_of(**sizes):
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return parity.mesh_of(parallel.layout_of(world, **sizes))


# ---------------------------------------------------------------------------------------------
# Mesh and door


@pytest.mark.quick
def test_layout_of():
    sizes = {"pp": 1, "dp": 4, "fsdp": 3, "cp": 1, "tp": 1}
    assert parallel.layout_of(12, dp="auto", fsdp=3) == sizes
    assert parallel.layout_of(1, dp="auto")["dp"] == 1


def where(sizes):
    mesh = mesh_of(**sizes)
    return mesh.coord, {k: v is not None for k, v in mesh.group.items()}


def test_the_grid_is_row_major_with_tp_innermost(world):
    for rank, (coord, groups) in enumerate(world(4).run(where, {"dp": 2, "tp": 2})):
        assert (coord["dp"], coord["tp"]) == divmod(rank, 2)
        assert coord["data"] == coord["grad"] == rank // 2 and coord["shard"] == 0
        assert groups == {"pp": False, "dp": True, "fsdp": False, "cp": False, "tp": True,
                          "data": True, "shard": False, "grad": True, "loss": True,
                          "model": True, "copy": True}
    for rank, (coord, _) in enumerate(world(4).run(where, {"dp": 2, "fsdp": 2})):
        assert (coord["dp"], coord["fsdp"], coord["data"]) == (rank // 2, rank % 2, rank)


def collectives(sizes, axis, dtype):
    """Every operation of the door on known values; what this rank received."""
    mesh = mesh_of(**sizes)
    r, n = mesh.coord[axis], mesh.size[axis]
    x = torch.arange(4 * n).to(dtype) + 100 * r
    out = {"sum": parallel.all_reduce(mesh, x.clone(), axis),
           "max": parallel.all_reduce(mesh, x.clone(), axis, "max"),
           "min": parallel.all_reduce(mesh, x.clone(), axis, "min"),
           "gather": parallel.all_gather(mesh, x, axis),
           "scatter": parallel.reduce_scatter(mesh, x, axis),
           "scatter 2d": parallel.reduce_scatter(mesh, x.view(2 * n, 2), axis)}
    count, stop = parallel.sum_integers(mesh, mesh.rank, 1).wait()
    assert (count, stop) == (sum(range(mesh.world)), mesh.world)
    assert parallel.tell(mesh, f"rank {mesh.rank}") == "rank 0"
    return r, out, mesh.ledger


@pytest.mark.parametrize("n, sizes, axis", [
    (2, {"dp": 2}, "dp"), (3, {"fsdp": 3}, "shard"), (4, {"dp": 2, "tp": 2}, "tp"),
    (4, {"dp": 2, "tp": 2}, "dp"), (4, {"dp": 2, "fsdp": 2}, "grad")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_collectives_on_every_axis_and_dtype(n, sizes, axis, dtype, world):
    group = math.prod(sizes[a] for a in parallel.UNIONS.get(axis, (axis,)) if a in sizes)
    base = torch.arange(4 * group)
    total = base * group + 100 * sum(range(group))
    if dtype == torch.bfloat16:  # 8 bits: sums of these integers are rounded once or twice
        close = dict(rtol=2**-7, atol=0)
    else:
        close = dict(rtol=0, atol=0)
    for r, out, ledger in world(n).run(collectives, sizes, axis, dtype):
        torch.testing.assert_close(out["sum"].float(), total.float(), **close)
        torch.testing.assert_close(out["max"].float(), (base + 100 * (group - 1)).to(dtype).float())
        torch.testing.assert_close(out["min"].float(), base.to(dtype).float())
        every = torch.cat([(base + 100 * q).to(dtype) for q in range(group)])
        assert torch.equal(out["gather"], every)
        mine = total[4 * r : 4 * r + 4].float()
        torch.testing.assert_close(out["scatter"].float(), mine, **close)
        torch.testing.assert_close(out["scatter 2d"].float(), mine.view(2, 2), **close)
        size = base.numel() * dtype.itemsize
        assert ledger[axis, "all_reduce sum"] == [1, 2 * size * (group - 1) // group]
        assert ledger[axis, "all_gather"] == [1, size * (group - 1)]
        assert ledger[axis, "reduce_scatter"] == [2, 2 * (size * (group - 1) // group)]


@pytest.mark.quick
def test_one_process_calls_no_collective():
    mesh = mesh_of()
    x = torch.ones(4)
    assert parallel.all_reduce(mesh, x, "grad") is x and parallel.all_gather(mesh, x, "tp") is x
    assert parallel.positions_of(x[None], mesh)[0].equal(x)
    assert parallel.reduce_scatter(mesh, x, "shard") is x and mesh.ledger == {}
    assert parallel.ledger_table(mesh) == "  nothing: one process"


def disagree(bad):
    mesh = mesh_of(dp="auto")
    try:
        parallel.agree(mesh, "the disk is full" if mesh.rank == bad else None)
    except RuntimeError as error:
        return str(error)


def test_an_error_of_one_rank_is_raised_on_all(world):
    assert world(3).run(disagree, 1) == ["rank 1: the disk is full"] * 3
    assert world(3).run(disagree, None) == [None] * 3


def pairs(B, T, D, keep):
    """enter and leave around a column and a row product, and their gradients, on this tp rank."""
    mesh = mesh_of(tp=torch.distributed.get_world_size())
    n, r = mesh.size["tp"], mesh.coord["tp"]
    x, up, down = draw(B, T, D)
    mine = x[:, r * T // n : (r + 1) * T // n].clone().requires_grad_()
    F = up.shape[0]
    u = up[r * F // n : (r + 1) * F // n].clone().requires_grad_()
    d = down[:, r * F // n : (r + 1) * F // n].clone().requires_grad_()
    bias = torch.zeros(u.shape[0], dtype=u.dtype, requires_grad=True)
    a, b = parallel.enter(mine, [(u, bias), (u, None)], mesh, keep)
    y = parallel.leave(torch.tanh((a + b) / 2), d, torch.ones(D, dtype=u.dtype), mesh)
    (y**2).sum().backward()
    return r, y.detach(), mine.grad, u.grad, d.grad, bias.grad * 2, mesh.ledger


def draw(B, T, D):
    g = torch.Generator().manual_seed(3)
    shapes = ((B, T, D), (12, D), (D, 12))
    return [torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("keep", [False, True])
def test_enter_and_leave_are_conjugate(n, keep, world):
    """Values, gradients and bytes: forward an all-gather and a reduce-scatter of B T D; backward
    the same, and unless the gathered sequence was kept the all-gather again."""
    x, up, down = (t.requires_grad_() for t in draw(2, 12, 5))
    bias = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    y = torch.tanh(x @ up.t() + bias) @ down.t() + 1
    (y**2).sum().backward()
    for r, got, dx, du, dd, db, ledger in world(n).run(pairs, 2, 12, 5, keep):
        rows, cut = slice(r * 12 // n, (r + 1) * 12 // n), slice(r * 12 // n, (r + 1) * 12 // n)
        for a, b in ((got, y[:, rows]), (dx, x.grad[:, rows]), (du, up.grad[cut]),
                     (dd, down.grad[:, cut]), (db, bias.grad[cut])):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
        size = 2 * 12 * 5 * 8 * (n - 1) // n
        assert ledger == {("tp", "all_gather"): [3 - keep, (3 - keep) * size],
                          ("tp", "reduce_scatter"): [2, 2 * size]}


# ---------------------------------------------------------------------------------------------
# Random bits, initial weights, dropout


def splitmix64(state):
    """The published reference in Python's integers: one output for a state."""
    mask = (1 << 64) - 1
    z = state & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


@pytest.mark.quick
def test_mix64_is_splitmix64():
    values = [0, 1, 2, 12345, 2**63 - 1, -1, -(2**63), 0x9E3779B97F4A7C15 - 2**64]
    got = parallel.mix64(torch.tensor(values))
    assert [int(g) % 2**64 for g in got] == [splitmix64(v) for v in values]
    # the first outputs of the generator with seed 0, from its authors' site
    assert [splitmix64(k * 0x9E3779B97F4A7C15) for k in (1, 2)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.quick
def test_initial_weights_have_the_stated_moments():
    z = model.bell(parallel.key64("x"), torch.arange(200_000))
    assert abs(z.mean()) < 0.01 and abs(z.std() - 1) < 0.01 and z.abs().max() <= 3.4642
    a, b = z[:-1], z[1:]
    assert abs((a * b).mean()) < 0.01
    other = model.bell(parallel.key64("y"), torch.arange(200_000))
    assert abs((z * other).mean()) < 0.01


@pytest.mark.quick
def test_initial_weights_by_kind(tokens):
    run = parity.prepare({"model.n_layer": 4, "model.d_model": 64, "model.d_ff": 256,
                          "model.bias": True, "model.init_std": 0.02}, str(tokens))
    for p in run.blocks.params:
        values = run.blocks.view(run.blocks.master, p)[: p.full_shape[0]]
        if p.name.endswith("norm.weight"):
            assert (values == 1).all()
        elif p.name.endswith("bias"):
            assert (values == 0).all()
        else:
            deep = p.name.endswith(("attn.o.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 4) if deep else 0.02
            assert values.std() == pytest.approx(std, rel=0.1), p.name


def first_weights(case, folder):
    run = parity.prepare(case, folder)
    return parity.logical(run.blocks, run.blocks.master)


def test_initial_weights_do_not_depend_on_the_layout(world, tokens):
    folder = str(tokens)
    heads = {"model.n_head": 6, "model.n_kv_head": 3, "model.d_head": 4}
    for dtype in ("float32", "float64"):
        alone = first_weights(heads | {"speed.dtype": dtype}, folder)
        for zero, axis in ((0, "fsdp"), (3, "fsdp"), (0, "tp")):
            case = heads | {f"parallel.{axis}": 3, "parallel.dp": 1, "parallel.zero": zero,
                            "speed.dtype": dtype}
            for got in world(3).run(first_weights, case, folder):
                assert all(torch.equal(got[name], alone[name]) for name in alone)


@pytest.mark.quick
def test_dropout_is_a_function_of_its_place():
    layer = model.Dropout(0.25, 3)
    layer.place = torch.tensor(3)
    x = torch.ones(4, 10, 8)
    index = torch.arange(40).view(4, 10)

    def mask(key, index, place=3):
        layer.place = torch.tensor(place)
        micro = model.Micro(*[None] * 7, torch.tensor(key), index)
        return layer(x[: len(index)], micro)

    whole = mask(7, index)
    assert whole.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert abs((whole == 0).float().mean() - 0.25) < 0.06
    assert torch.equal(mask(7, index[2:]), whole[2:])  # another microbatch, the same tokens
    for other in (mask(8, index), mask(7, index + 40), mask(7, index, 4)):
        assert 0.2 < (other != whole).float().mean() < 0.6


# ---------------------------------------------------------------------------------------------
# Flat blocks


@pytest.mark.quick
def test_fingerprint_does_not_depend_on_the_cut():
    x = torch.randn(5, 7)
    index = parallel.logical_index((5, 7), (5, 7), (0, 0), 0, 35, "cpu")
    whole = parallel.fingerprint(x.view(-1), index)
    parts = torch.zeros((), dtype=torch.int64)
    for start in range(0, 35, 8):
        stop = min(start + 8, 35)
        index = parallel.logical_index((5, 7), (5, 7), (0, 0), start, stop, "cpu")
        parts += parallel.fingerprint(x.view(-1)[start:stop], index)
    columns = torch.zeros((), dtype=torch.int64)
    for c in (0, 4):  # cut over dim 1, the last column of the second is padding
        local = torch.nn.functional.pad(x, (0, 1))[:, c : c + 4].contiguous()
        index = parallel.logical_index((5, 4), (5, 7), (0, c), 0, 20, "cpu")
        columns += parallel.fingerprint(local.view(-1), index)
    assert whole == parts == columns
    y = x.clone()
    y[2, 3] += 1e-6
    index = torch.arange(35)
    assert parallel.fingerprint(y.view(-1), index) != whole
    assert parallel.fingerprint(x.t().contiguous().view(-1), index) != whole


def test_enter_and_leave_are_operators(monkeypatch):
    """Of torch's own check: schema, aliases, the autograd that is registered, the shapes that a
    trace sees; as rank 0 of two that are not there."""
    made, real = [], parallel.operator

    def operator(name, schema):
        make = real(name, schema)
        return lambda fn: made.append(make(fn)) or made[-1]

    monkeypatch.setattr(parallel, "operator", operator)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = parallel.build_mesh(parallel.layout_of(2, tp=2), "cpu")
    parallel.enter_in_graph(mesh)
    parallel.leave_in_graph(mesh)
    x, w, v = (torch.randn(*shape).requires_grad_() for shape in ((3, 4, 5), (6, 5), (2, 5)))
    biases = [torch.randn(6).requires_grad_(), torch.randn(2).requires_grad_()]
    grads = [torch.randn(3, 8, 6), torch.randn(3, 8, 2)]
    y = torch.randn(8, 3, 5).requires_grad_()
    for op, args in ((made[0], (x, [w, v], biases, False)), (made[0], (x, [w], [], True)),
                     (made[1], (x, [w, v], grads, False)), (made[2], (y,)), (made[3], (y,))):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor",
                                                    "test_autograd_registration"))
    torch.distributed.destroy_process_group()


def spoil(case, folder, name):
    run = parity.prepare(case, folder)
    parallel.check_replicas(run.blocks)
    if run.mesh.coord["dp"] == 1 or run.mesh.coord["tp"] == 1:
        for p in run.blocks.params:
            data, _ = run.blocks.local(run.blocks.master, p)
            if p.name == name and data.numel():
                data[-1] += 1e-12
    try:
        parallel.check_replicas(run.blocks)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("zero, fsdp, axis, name", [
    (0, 1, "dp", "layers.1.mlp.up.weight"), (3, 2, "dp", "layers.1.mlp.up.weight"),
    (0, 1, "tp", "layers.1.attn_norm.weight"), (2, 2, "tp", "head.norm.weight")])
def test_a_replica_that_differs_is_named(zero, fsdp, axis, name, world, tokens):
    case = {"parallel.dp": 1, f"parallel.{axis}": 2, "parallel.fsdp": fsdp, "parallel.zero": zero}
    said = world(2 * fsdp).run(spoil, case, str(tokens), name)
    assert all(note is None or name in note for note in said)
    assert any(said)  # on the ranks whose shard holds it


@pytest.mark.quick
def test_weight_decay_is_on_matrices_only(tokens):
    """With zero gradients matrices shrink by (1 - lr decay) a step, nothing else moves."""
    run = parity.prepare({"model.bias": True, "model.norm": "layernorm"}, str(tokens))
    before = parity.logical(run.blocks, run.blocks.master)
    run.blocks.begin()
    for _ in range(10):
        run.blocks.adamw(0.01, 0.9, 0.95, 1e-8, 0.1, torch.zeros(()))
    for name, now in parity.logical(run.blocks, run.blocks.master).items():
        factor = (1 - 0.01 * 0.1) ** 10 if before[name].ndim == 2 else 1.0
        torch.testing.assert_close(now, before[name] * factor, rtol=1e-12, atol=0)


def test_a_thousand_small_gradients_add_up(tokens):
    """In bfloat16 a sum of ones stalls at 256; the accumulator is float32."""
    run = parity.prepare({"speed.dtype": "bfloat16"}, str(tokens))
    run.blocks.begin()
    ones = [torch.ones_like(t) for t in run.blocks.tensors[1]]
    for _ in range(1000):
        run.blocks.accumulate(1, ones)
    assert all((t.main_grad == 1000).all() for t in run.blocks.tensors[1])


class Sometimes(torch.nn.Module):
    """`extra` takes part only where a microbatch says so; `never` in none."""

    def __init__(self):
        super().__init__()
        self.always = torch.nn.Parameter(torch.empty(8, 8))
        self.extra = torch.nn.Parameter(torch.empty(8, 8))
        self.never = torch.nn.Parameter(torch.empty(3))

    def forward(self, x, use_extra):
        y = x @ self.always
        return torch.tanh(y + x @ self.extra if use_extra else y)


def conditional(zero, dtype, ranks=None):
    """Gradients after three microbatches a rank; `extra` is used in one of them on rank 1 only.
    Without `ranks` this process is a rank; with it, one process that does all their work."""
    mesh = mesh_of(fsdp=1 if ranks else torch.distributed.get_world_size())
    with torch.device("meta"):
        modules = [torch.nn.Linear(4, 8), Sometimes(), torch.nn.Linear(8, 1)]
    blocks = parallel.Blocks(list(zip("abc", modules)), mesh, dtype, zero=zero)
    for p in blocks.params:
        values, start = blocks.local(blocks.master, p)
        values.copy_(torch.arange(start, start + values.numel()).sin())
    blocks.refresh()
    first, middle, last = modules
    fns = [lambda _, m, later: first(m[0]), lambda x, m, later: middle(x, m[1]),
           lambda x, m, later: last(x).sum()]
    batches = [((torch.arange(20) * (r + 2 * j + 1)).cos().view(5, 4).to(dtype), (r, j) == (1, 1))
               for r in (range(ranks) if ranks else [mesh.rank]) for j in range(3)]
    blocks.begin()
    parallel.run(parallel.program(1, 0, "1f1b", len(batches)), fns, blocks, batches)
    return parity.logical(blocks, blocks.grad)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_that_are_used_sometimes_or_never(zero, world):
    """No hang, no error, the gradient of one process; zero where a parameter was not used."""
    want = conditional(0, torch.float64, ranks=2)
    for got in world(2).run(conditional, zero, torch.float64):
        assert all(parity.agree(name, got[name], g, 1.0) is None for name, g in want.items())
        assert (got["b.never"] == 0).all() and (got["b.extra"] != 0).any()
    for got in world(2).run(conditional, zero, torch.bfloat16):
        assert all(torch.isfinite(g).all() for g in got.values())


def live(blocks):
    """Bytes of storage held by parameters, gradients and optimizer state."""
    names = ("weight", "piece", "master", "full_grad", "grad", "exp_avg", "exp_avg_sq")
    tensors = [t for name in names for t in getattr(blocks, name)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def watch(case, folder):
    """Live bytes at rest and while each block runs, forward and backward, in one step."""
    run = parity.prepare(case, folder)
    seen = collections.Counter()

    def spy(fn):
        def inner(x, micro, later):
            seen["in a block"] = max(seen["in a block"], live(run.blocks))
            return fn(x, micro, later)
        return inner

    run.fns = [spy(fn) for fn in run.fns]
    run.loader.start(0)
    _, batches, pending = train.next_batch(run, False)
    train.train_step(run, batches, pending.wait()[0])
    seen["at rest"] = live(run.blocks)
    sizes, span = run.blocks.sizes, [hi - lo for lo, hi in run.blocks.spans]
    return dict(seen), sizes, span


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype, c", [("float32", 4), ("bfloat16", 2)])
def test_live_bytes_are_the_table_s(zero, dtype, c, world, tokens):
    """At rest: weights, gradients and moments by the table of Blocks, plus the buffers that equal
    layers take turns on. While a block runs: nothing more than that block and the next ones."""
    case = {"parallel.dp": 1, "parallel.fsdp": 2, "parallel.zero": zero, "speed.dtype": dtype,
            "model.n_layer": 8, "model.d_model": 32, "model.tied": False, "train.microbatch": 12}
    seen, sizes, span = world(2).run(watch, case, str(tokens))[0]
    P, S, layer = sum(sizes), sum(span), sizes[1]
    weights = c * P if zero < 3 else c * S + c * 3 * layer  # 3 = 1 + prefetch + 1
    grads = 4 * P if zero < 2 else 4 * S + 4 * 2 * layer
    state = (8 if c == 4 else 12) * (P if zero == 0 else S)
    assert seen["at rest"] == weights + grads + state
    ends = sizes[0] + sizes[-1]
    assert seen["in a block"] <= weights + grads + state + (c + 4) * ends


class Wide(torch.nn.Linear):
    """A block whose gradient the test writes itself."""


def summed(layout, zero, dtype, reduce_dtype, values, rounds):
    """What the ranks' sum of gradients is, rank r's being values[r] in every element and each of
    so many microbatches; one number, as it is the same everywhere."""
    mesh = mesh_of(**layout)
    with torch.device("meta"):
        module = Wide(8, 8, bias=False)
    blocks = parallel.Blocks([("a", module)], mesh, dtype, zero=zero, reduce_dtype=reduce_dtype)
    blocks.begin()
    for j in range(rounds):
        blocks.open_grad(0)
        blocks.accumulate(0, [torch.full((8, 8), values[mesh.rank], dtype=dtype)])
        blocks.reduce(0, last=j == rounds - 1)
    blocks.wait()
    data, _ = blocks.local(blocks.grad, blocks.params[0])
    return data.dtype, set(data.tolist())


@pytest.mark.parametrize("zero, layout", [
    (0, {"dp": 4}), (0, {"dp": 2, "fsdp": 2}), (1, {"dp": 2, "fsdp": 2}), (2, {"fsdp": 4}),
    (2, {"dp": 2, "fsdp": 2}), (3, {"fsdp": 4}), (3, {"dp": 2, "fsdp": 2})], ids=str)
def test_sums_over_ranks_and_microbatches_are_wide(zero, layout, world):
    """In bfloat16 256 + 1 is 256; in float16 60000 + 60000 is infinite and 1e-7 / 4 is zero. Sums
    are in float32, whatever the weights are; and with reductions in bfloat16 what is sent is
    rounded, not the sum over microbatches: 300 ones do not stall at 256."""
    bf16, f16 = torch.bfloat16, torch.float16
    one = float(torch.tensor(1e-7, dtype=f16))
    for dtype, reduce_dtype, values, rounds, want in (
            (bf16, None, [256, 1, 1, 1], 1, 259), (f16, None, [60000] * 4, 2, 480000),
            (f16, None, [one] * 4, 1, 4 * one), (bf16, bf16, [1] * 4, 300, 1200)):
        args = layout, zero, dtype, reduce_dtype, values, rounds
        found = [got for got in world(4).run(summed, *args) if got[1]]  # not only padding
        assert found and all(got == (torch.float32, {want}) for got in found), (args, found)


def norm_of_ones(case, folder):
    """The gradient norm where every logical element of the gradient is 1."""
    run = parity.prepare(case, folder)
    run.blocks.begin()
    for p in run.blocks.params:
        data, start = run.blocks.local(run.blocks.grad, p)
        index = parallel.logical_index(p.shape, p.full_shape, p.cut_offset(run.mesh), start,
                                       start + data.numel(), "cpu")
        data.copy_((index >= 0).to(data.dtype))
    return run.blocks.grad_norm().item(), model.count_params(run.model.cfg)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4}, {"pp": 2}, {"fsdp": 2, "tp": 2},
                                    {"pp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}, {"dp": 2, "cp": 2}],
                         ids=str)
def test_the_norm_of_ones_is_the_root_of_their_number(layout, world, tokens):
    """Norms, biases, few key heads and a tied weight are on several ranks and count once, padding
    not at all."""
    axes = {f"parallel.{axis}": n for axis, n in ({"dp": 1} | layout).items()}
    for extra in ({"model.qk_norm": True, "parallel.zero": 0}, {"parallel.zero": 3}):
        case = axes | extra | {"model.n_kv_head": 1, "model.bias": True, "model.norm": "layernorm"}
        for norm, n in world(math.prod(layout.values())).run(norm_of_ones, case, str(tokens)):
            assert norm == pytest.approx(math.sqrt(n), rel=1e-12)


def refresh_again(case, folder):
    """Weights are drawn, then others come from a checkpoint, whose pieces `state` gives: how many
    gathers into the same buffer were under way at once, and while there were pieces."""
    run, real = parity.prepare(case, folder), parallel.all_gather_into
    at_once, most = collections.Counter(), []

    def start(mesh, out, *args):
        handle, key = real(mesh, out, *args), out.data_ptr()
        at_once[key] += 1
        most.append(at_once[key])

        def finish():
            at_once[key] -= 1
            return handle.wait()

        return parallel.Handle(finish)

    with unittest.mock.patch.object(parallel, "all_gather_into", start):
        run.blocks.refresh()
        next(run.blocks.state())
        late = sum(at_once.values())
        run.blocks.refresh()
        run.blocks.refresh()
        for i in range(len(run.blocks.sizes)):
            run.blocks.gather(i)
    return most, late


@pytest.mark.parametrize("zero", [1, 2])
def test_weights_that_are_gathered_again_arrive_last(zero, world, tokens):
    """Two gathers into one buffer may end in any order: the second waits for the first, and so does
    a checkpoint that is loaded."""
    case = {"parallel.dp": 1, "parallel.fsdp": 2, "parallel.zero": zero}
    for most, late in world(2).run(refresh_again, case, str(tokens)):
        assert len(most) > 4 and set(most) == {1} and late == 0


def one_after_the_other(cases, folder):
    """Steps of two runs in one process, in turns: what both find."""
    runs = [parity.prepare(case, folder) for case in cases]
    outs = [parity.first(run) for run in runs]
    for _ in range(2):
        for run, out in zip(runs, outs):
            parity.one_step(run, out)
    return outs


def test_two_models_on_two_meshes_do_not_meet(world, tokens):
    """In the same processes, on other axes: each has the numbers that it has alone."""
    folder = str(tokens)
    cases = [{"parallel.dp": 2, "parallel.tp": 2}, {"parallel.dp": 1, "parallel.fsdp": 2,
             "parallel.cp": 2, "parallel.zero": 3, "model.n_layer": 3}]
    alone = [{key: n for key, n in case.items() if key[:5] == "model"} for case in cases]
    want = one_after_the_other(alone, folder)
    for outs in world(4).run(one_after_the_other, cases, folder):
        for got, one in zip(outs, want):
            assert parity.compare(got, one | {"params": {}}) is None


@pytest.mark.quick
def test_nothing_that_moves_has_a_group_by_default():
    """Called without a mesh it is an error; there is no group that would be taken instead."""
    names = [name for name, thing in vars(parallel).items() if callable(thing)
             and getattr(thing, "__module__", "") == "parallel"]
    moving = [name for name in names
              if "mesh" in inspect.signature(getattr(parallel, name)).parameters]
    for name in moving:
        default = inspect.signature(getattr(parallel, name)).parameters["mesh"].default
        assert default is inspect.Parameter.empty or name == "lookup", name
    assert {"all_reduce", "all_gather", "reduce_scatter", "shift_start", "send", "receive",
            "swap", "enter", "leave", "linear_cross_entropy", "ring_attention",
            "Blocks"} <= set(moving)  # lookup without one is of a table that is not split
    with pytest.raises(TypeError, match="mesh"):
        parallel.all_reduce(x=torch.ones(1), axis="tp")


def poisoned(case, folder):
    """A run in which torch fills what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    try:
        run = parity.prepare(case, folder)
        tables = [t.dtype for t in run.model.tables]
        assert not any(t.is_meta for t in (*run.model.parameters(), *run.model.buffers()))
        return parity.run_case(case, folder, 2) if case["speed.dtype"] == "float64" else {}, tables
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", [{"fsdp": 2, "tp": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_nothing_reads_memory_before_it_is_written(layout, world, tokens):
    """Weights, tables, buffers of gathers, padding: with NaN in all new memory the numbers are
    those of one process without. Rotary tables stay in float32 where weights are bfloat16."""
    folder, axes = str(tokens), {f"parallel.{axis}": n for axis, n in ({"dp": 1} | layout).items()}
    case = {"model.n_layer": 2, "parallel.zero": 3, "model.qk_norm": True, "speed.dtype": "float64"}
    want = parity.run_case(case | {"parallel.zero": 0}, folder, 2)
    for got, tables in world(4).run(poisoned, case | axes, folder):
        assert parity.compare(got, want) is None and tables == [torch.float64] * 2
    for _, tables in world(4).run(poisoned, case | axes | {"speed.dtype": "bfloat16"}, folder):
        assert tables == [torch.float32] * 2


# ---------------------------------------------------------------------------------------------
# Executor


@pytest.mark.quick
def test_accumulation_is_a_schedule_of_one_stage():
    for name in ("gpipe", "1f1b", "interleaved"):
        assert parallel.program(1, 0, name, 2) == (
            ("forward", 0, 0), ("backward", 0, 0), ("forward", 1, 0), ("backward", 1, 0))


def test_a_crash_on_one_rank_ends_all_within_seconds(tmp_path):
    """torchrun with an exception on rank 1: the job fails and shows that rank's exception."""
    script = tmp_path / "crash.py"
    script.write_text(textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(parity.__file__.rsplit("/", 2)[0])!r})
        import parallel, torch
        rank, world, _ = parallel.start("cpu")
        mesh = parallel.build_mesh(parallel.layout_of(world, dp="auto"), "cpu")
        if rank == 1:
            raise OSError("no such luck")
        parallel.all_reduce(mesh, torch.ones(1), "dp")
    """))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*line, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "no such luck" in done.stderr
