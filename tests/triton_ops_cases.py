"""RMSNorm, rotary, SwiGLU and the loss in Triton, in its interpreter, against their definitions in
float64. test_triton.py runs this file in a process of its own with TRITON_INTERPRET=1."""

import pytest
import torch

torch.version.cuda = torch.version.cuda or "none"  # kernels.py loads Triton for a GPU's torch only
import kernels as ops  # noqa: E402
from kernels import (  # noqa: E402
    IGNORE,
    ce_grad_,
    ce_local_,
    rms_norm_ref,
    rotary_ref,
    swiglu_ref,
    triton,
    wide,
)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {F64: 1e-12, F32: 6e-7, F16: 1e-3, BF16: 1e-2}  # of the largest: 1 to 5 ulps


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_close(name, x, y, dtype):
    """x in `dtype`, and close to y with what sums in it would cost."""
    assert (x.shape, x.dtype) == (y.shape, dtype), (name, x.shape, x.dtype)
    worst = ((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-3)).item()
    print(f"{name} {worst:.1e}", end="  ")
    assert worst <= TOLERANCE[dtype], (name, worst)  # and not nan


def leaf_of(x):
    return x.to(F64, copy=True).requires_grad_()


def apart(x):
    """The same numbers, each two elements from the next."""
    return x.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]


def strided(shape, dtype, kind, pad=3):
    """Random numbers; "rows": a part of wider rows, "last": the last dim is not the inner one."""
    if kind == "last":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).mT
    if kind == "rows":
        return torch.randn(*shape[:-1], shape[-1] + pad).to(dtype)[..., 2 : 2 - pad]
    if kind == "outer":  # the leading dims do not collapse to one stride
        return torch.randn(shape[0], shape[1] + 2, *shape[2:]).to(dtype)[:, 1:-1]
    return torch.randn(shape).to(dtype)


def norm_case(shape, dtype, kind, residual=True, wdtype=None):
    x, dy, dh, add = (strided(shape, dtype, kind, pad) for pad in (3, 4, 5, 6))
    weight = torch.randn(shape[-1]).to(wdtype or dtype) * 0.3 + 1
    return x, add if residual else None, weight, dy, dh if residual else None


NORM = [  # blocks of rows: 1100 / 128 on 4 programs, 18 / 4, 1 / 128, one row each, ..
    ((1100, 24), F64, "", True, None), ((9, 2, 1000), F64, "outer", True, None),
    ((1, 40), F64, "", False, None), ((3, 5000), F64, "rows", True, None),
    ((6, 17, 1), F64, "rows", False, None), ((24,), F64, "", True, None),
    ((37, 129), F32, "last", True, None), ((130, 64), F32, "rows", False, None),
    ((2, 5, 3, 16), F32, "outer", True, F64), ((600, 33), F16, "", True, None),
    ((4, 4096), F16, "rows", False, F32), ((129, 32), BF16, "rows", True, None),
    ((5, 777), BF16, "", False, F32),
]  # fmt: skip


@pytest.mark.parametrize("case", NORM, ids=str)
def test_rms_norm(case):
    x, add, weight, dy, dh = norm_case(*case)
    dtype, sums = x.dtype, wide(x.dtype)
    weight = apart(weight)
    y, h, r = ops.rms_norm_forward(x, add, weight, 1e-2)
    assert len(h) == 0 if add is None else torch.equal(h, x + add) or dtype == BF16
    h = x if add is None else h
    leaf, w = leaf_of(h), leaf_of(weight)
    y_ = rms_norm_ref(leaf, w, 1e-2)
    loss = (y_ * dy.double()).sum() + (0 if dh is None else (leaf * dh.double()).sum())
    dx_, dw_ = torch.autograd.grad(loss, (leaf, w))
    if add is not None:
        assert_close("h", h, x.double() + add.double(), dtype)
    assert_close("y", y, y_.detach(), dtype)
    assert_close("r", r, (h.double().square().mean(-1) + 1e-2).rsqrt(), sums)
    dx, dw = ops.rms_norm_backward(dy, h, weight, apart(r), dh)
    assert_close("dx", dx, dx_, dtype)
    assert_close("dw", dw, dw_, sums)


@pytest.mark.parametrize("wdtype", [F16, F32])
def test_rms_norm_rounds_as_its_definition(wdtype):
    """First the sum, then the normalised row, and last what is multiplied by the weight."""
    x, add, weight, _, _ = norm_case((40, 300), F16, "", True, wdtype)
    y, h, _ = ops.rms_norm_forward(x, add, weight, 1e-5)
    assert torch.equal(h, x + add)
    assert (y != rms_norm_ref(h, weight, 1e-5)).double().mean() < 0.005  # r may differ by an ulp


TURN = [  # B T H Hkv d, tables with a batch dim, ..; blocks of 16 heads of the widest
    (2, 5, 3, 1, 24, False, F64, ""), (3, 4, 40, 17, 256, True, F64, "heads"),
    (1, 1, 1, 1, 2, False, F64, ""), (2, 3, 6, 2, 6, True, F64, "last"),
    (2, 7, 5, 5, 80, False, F32, "heads"), (1, 3, 33, 3, 128, True, F32, "rows"),
    (2, 3, 4, 2, 64, False, F16, "rows"), (2, 3, 4, 2, 96, True, BF16, "heads"),
]  # fmt: skip


def turn_case(B, T, H, Hkv, d, batch, dtype, kind):
    shapes = (B, T, H, d), (B, T, Hkv, d)
    q, k = (strided(shape, dtype, kind) if kind != "heads" else
            strided((B, shape[2], T, d), dtype, "rows").transpose(1, 2) for shape in shapes)
    angle = torch.randn(*((B,) if batch else ()), T, d // 2, dtype=F64) * 9
    return q, k, *(x.to(wide(dtype)) for x in (angle.cos(), angle.sin()))


@pytest.mark.parametrize("case", TURN, ids=str)
def test_rotary(case):
    """And its transpose, which turns back."""
    q, k, cos, sin = turn_case(*case)
    leaves = [leaf_of(x) for x in (q, k)]
    out_ = rotary_ref(*leaves, cos.double(), sin.double())
    do = [torch.randn(x.shape).to(x.dtype) for x in (q, k)]
    grads_ = torch.autograd.grad(out_, leaves, [x.double() for x in do])
    for name, x, y in zip("qk", ops.rotary_forward(q, k, cos, sin, 1), out_):
        assert_close(name, x, y.detach(), q.dtype)
        assert x.is_contiguous()
    for name, x, y in zip(("dq", "dk"), ops.rotary_forward(*do, cos, sin, -1), grads_):
        assert_close(name, x, y, q.dtype)


def test_rotary_takes_tables_of_any_strides():
    q, k, cos, sin = turn_case(2, 5, 3, 1, 24, True, F64, "")
    want = ops.rotary_forward(q, k, cos, sin, 1)
    views = cos.mT.contiguous().mT, torch.cat((sin, sin), -1)[..., :12]
    assert all(map(torch.equal, ops.rotary_forward(q, k, *views, 1), want))
    shared = cos[:1].expand(2, -1, -1), sin[0]
    one, other = (ops.rotary_forward(q, k, *x, 1) for x in (shared, (cos[0], sin[0])))
    assert all(map(torch.equal, one, other))


GATES = [((1,), F64, ""), ((3, 5, 1001), F64, "rows"), ((4096,), F64, ""), ((37, 41), F32, "last"),
         ((2, 4097), F32, ""), ((3, 999), F16, ""), ((3, 999), BF16, "rows")]  # fmt: skip


@pytest.mark.parametrize("case", GATES, ids=str)
def test_swiglu(case):
    gate, up, dy = (3 * strided(*case) for _ in range(3))
    leaves = [leaf_of(x) for x in (gate, up)]
    y_ = swiglu_ref(*leaves)
    grads_ = torch.autograd.grad(y_, leaves, dy.double())
    assert_close("y", ops.swiglu_forward(gate, up), y_.detach(), gate.dtype)
    for name, x, y in zip(("dgate", "dup"), ops.swiglu_backward(dy, gate, up), grads_):
        assert_close(name, x, y, gate.dtype)


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy's exp, as a GPU's it is then inf
def test_swiglu_of_large_gates():
    gate, one = torch.tensor([-1e4, -200.0, -80.0, 0.0, 80.0, 200.0, 1e4]), torch.ones(7)
    slope = torch.tensor([0.0, 0, 0, 0.5, 1, 1, 1])
    dgate, dup = ops.swiglu_backward(one, gate, one)
    for x, y in ((ops.swiglu_forward(gate, one), gate.clamp(min=0)), (dup, gate.clamp(min=0)),
                 (dgate, slope)):
        assert torch.allclose(x, y, atol=1e-30)


LOSS = [  # n, V of each of two ranks, ..; blocks of 4096 columns
    (7, 37, 50, F64, 5.0, 1e-2, ""), (5, 9000, 4096, F64, None, 1e-2, "rows"),
    (3, 1, 4097, F64, 5.0, 0.0, "last"), (1, 5, 0, F64, None, 0.0, ""),
    (9, 700, 701, F32, 3.0, 1e-2, "rows"), (6, 4100, 30, F32, None, 0.0, ""),
    (6, 300, 211, F16, 5.0, 1e-2, "rows"), (6, 300, 211, BF16, None, 1e-2, ""),
]  # fmt: skip


def loss_case(n, V, dtype, kind, ignored=True):
    """Logits with one outlier a row; targets, every third of which does not count."""
    z = strided((n, V), dtype, kind)
    z[torch.arange(n), torch.randint(V, (n,))] += 8
    targets = torch.randint(V, (n,))
    return z, torch.where(torch.arange(n) % 3 == 1, IGNORE, targets) if ignored else targets


def dense_loss(z, targets, factor, softcap, z_loss):
    """-> lse and the gradient of what ce_forward and ce_backward define, in float64."""
    leaf = leaf_of(z)
    capped = leaf if softcap is None else softcap * torch.tanh(leaf / softcap)
    lse = capped.logsumexp(-1)
    hit = capped.gather(1, targets.clamp(0)[:, None])[:, 0]
    loss = factor.double() * torch.where(targets == IGNORE, 0, lse - hit + z_loss * lse.square())
    return hit.detach(), lse.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def merged(parts):
    top = torch.stack([m for m, _, _ in parts]).amax(0)
    return top + sum(s * (m - top).exp() for m, s, _ in parts).log(), sum(h for _, _, h in parts)


@pytest.mark.parametrize("case", LOSS, ids=str)
def test_loss_over_two_ranks(case):
    n, V, V2, dtype, softcap, z_loss, kind = case
    z, targets = loss_case(n, V + V2, dtype, kind)
    factor = torch.where(targets == IGNORE, 0, torch.rand(n) + 0.5).to(wide(dtype))
    hit_, lse_, grad_ = dense_loss(z, targets, factor, softcap, z_loss)
    ranks = [(z[:, :V], targets), (z[:, V:], targets - V)]
    before, sums = z.clone(), wide(dtype)
    parts = [ops.ce_local_triton(logits, apart(local), softcap) for logits, local in ranks]
    assert torch.equal(z, before)
    for (logits, local), part in zip(ranks, parts):
        tile = None if dtype == sums else torch.empty(n, logits.shape[1], dtype=sums)
        plain = ce_local_(logits.clone(), logits.clone(), local, softcap, tile)
        for name, x, y in zip(("m", "s", "hit"), part, plain):
            assert torch.equal(x.isinf(), y.isinf()) and x.dtype == sums
            assert_close(name, x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0).double(), sums)
            assert softcap is not None or name == "s" or torch.equal(x, y)
    lse, hit = merged(parts)
    assert_close("lse", lse, lse_, sums)
    assert_close("hit", hit, torch.where(targets == IGNORE, 0, hit_), sums)
    for logits, local in ranks:
        rows = (apart(x) for x in (local, lse, factor))
        ops.ce_grad_triton_(logits, *rows, softcap, z_loss)
    assert_close("grad", z, grad_, dtype)
    assert (z[targets == IGNORE] == 0).all()


def test_loss_is_that_of_cross_entropy():
    """torch's; and the plain pair's, row factors times Q."""
    z, targets = loss_case(8, 5000, F64, "")
    leaf = leaf_of(z)
    loss = torch.nn.functional.cross_entropy(leaf, targets, reduction="sum", ignore_index=IGNORE)
    m, s, hit = ops.ce_local_triton(z, targets, None)
    counted = targets != IGNORE
    lse = m + s.log()
    assert_close("loss", (lse - hit)[counted].sum(), loss.detach(), F64)
    p = z.clone()
    ce_local_(p, p, targets, None, None)
    r = ce_grad_(p, z, targets, lse, s * (m - lse).exp(), hit, None, 1e-2, None) * counted
    rows = z.clone()
    ops.ce_grad_triton_(rows, targets, lse, counted.double(), None, 1e-2)
    assert_close("rows", rows, p * r[:, None], F64)
    ops.ce_grad_triton_(z, targets, lse, counted.double(), None, 0.0)
    assert_close("grad", z, torch.autograd.grad(loss, leaf)[0], F64)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_loss_writes_its_columns_only_and_zeros_whatever_was_there():
    wider, local = torch.randn(7, 60), torch.tensor([0, 39, 40, -1, 2**32 + 5, IGNORE, 7])
    z = wider[:, 10:50]
    z[5], z[6, 7] = torch.inf, 1e9
    before, z_ = wider.clone(), z.clone()
    lse = torch.tensor([3.0, 4.0, 5.0, 6.0, 7.0, torch.nan, -torch.inf])
    factor = torch.tensor([1.0, 2.0, torch.nan, 1.0, 1.0, 0.0, 0.0])
    ops.ce_grad_triton_(z, local, lse, factor, None, 0.0)
    assert torch.equal(wider[:, :10], before[:, :10]) and torch.equal(wider[:, 50:], before[:, 50:])
    assert (z[5:] == 0).all() and z[2].isnan().all()  # nan: a target outside of the vocabulary
    want = (z_ - lse[:, None]).exp()
    want[0, 0] -= 1
    want[1, 39] -= 1
    want, rows = want * factor[:, None], [0, 1, 3, 4]
    assert torch.allclose(z[rows], want[rows], rtol=1e-5)
    hit = ops.ce_local_triton(z_, local, None)[2]
    assert torch.equal(hit, torch.stack([z_[0, 0], z_[1, 39], *torch.zeros(4), z_[6, 7]]))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_loss_shows_what_is_not_finite():
    z = torch.randn(3, 5000)
    z[0, 4500], z[1, 17] = torch.nan, -torch.inf
    m, s, _ = ops.ce_local_triton(z, torch.zeros(3).long(), None)
    assert s[0].isnan() and (m + s.log())[1:].isfinite().all()


def test_gradients_without_memory_of_their_own():
    """That of a sum is one number, expanded."""
    one = torch.ones(())
    x, _, weight, _, _ = norm_case((6, 40), F32, "")
    q, k, cos, sin = turn_case(2, 3, 4, 2, 24, False, F32, "")
    r = x.square().mean(-1).rsqrt()
    lo, hi = torch.zeros(2, 3).int(), torch.tensor([[1, 2, 3]] * 2).int()
    lse, delta = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    for call, *shapes in (
            (lambda dy: ops.rms_norm_backward(dy, x, weight, r, dy), x.shape),
            (lambda dq, dk: ops.rotary_forward(dq, dk, cos, sin, -1), q.shape, k.shape),
            (lambda dy: ops.swiglu_backward(dy, x, x), x.shape),
            (lambda do: ops.flash_backward(do, q, k, k, lse, delta, lo, hi, 1.0, None), q.shape)):
        expanded, whole = [one.expand(s) for s in shapes], [torch.ones(s) for s in shapes]
        assert all(map(torch.equal, call(*expanded), call(*whole)))


def every_operation(n=3):
    """-> {name: call}, each with arguments of its own."""
    x, add, weight, dy, dh = norm_case((n, 300, 20), F32, "", True)
    q, k, cos, sin = turn_case(2, n, 3, 2, 20, True, F32, "heads")
    z, targets = loss_case(n, 5000, F32, "", ignored=False)
    lse, one = torch.full((n,), 9.0), torch.ones(n)
    r = (x + add).square().mean(-1).rsqrt()
    return {
        "rms_norm": lambda: ops.rms_norm_forward(x, add, weight, 1e-5),
        "rms_norm_backward": lambda: ops.rms_norm_backward(dy, x, weight, r, dh),
        "rotary": lambda: ops.rotary_forward(q, k, cos, sin, 1),
        "swiglu": lambda: (ops.swiglu_forward(x, add),),
        "swiglu_backward": lambda: ops.swiglu_backward(dy, x, add),
        "ce_local": lambda: ops.ce_local_triton(z, targets, 9.0),
        "ce_grad": lambda: grad_of_logits(z.clone(), targets, lse, one, 9.0, 1e-3),
    }


def grad_of_logits(z, *rest):
    ops.ce_grad_triton_(z, *rest)
    return (z,)


def test_two_runs_give_the_same_bits():
    for name, call in every_operation().items():
        assert all(map(torch.equal, call(), call())), name


def test_of_no_rows_nothing_is_launched(monkeypatch):
    names = ["rms_norm", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward", "ce_local",
             "ce_grad"]  # fmt: skip
    for name in names:
        monkeypatch.setattr(ops, f"{name}_kernel", None)
    x, q, k = torch.empty(2, 0, 40), torch.empty(2, 0, 4, 8), torch.empty(2, 0, 2, 8)
    y, h, r = ops.rms_norm_forward(x, x.clone(), torch.ones(40), 1e-5)
    assert y.shape == h.shape == x.shape and r.shape == (2, 0)
    dx, dw = ops.rms_norm_backward(x, x, torch.ones(40), r, None)
    assert dx.shape == x.shape and torch.equal(dw, torch.zeros(40))
    out = ops.rotary_forward(q, k, torch.empty(0, 4), torch.empty(0, 4), 1)
    assert [y.shape for y in out] == [q.shape, k.shape]
    assert ops.swiglu_forward(x, x).shape == ops.swiglu_backward(x, x, x)[1].shape == x.shape
    for shape in ((0, 7), (5, 0), (0, 0)):
        z, local = torch.empty(shape), torch.zeros(shape[0]).long()
        m, s, hit = ops.ce_local_triton(z, local, None)
        assert torch.equal(m, torch.full(shape[:1], -torch.inf))
        assert torch.equal(s, torch.zeros(shape[:1])) and torch.equal(hit, s)
        ops.ce_grad_triton_(z, local, s, s, None, 0.0)


@pytest.fixture
def moved(monkeypatch):
    """moved(fn, *args): how many elements Triton loads and stores; of each argument, of each new
    result, and of all else. What is loaded or stored twice counts twice."""
    builder, log = triton.runtime.interpreter.InterpreterBuilder, []

    def watch(way, name):
        real = getattr(builder, name)

        def spy(self, ptrs, *rest):
            log.append((way, ptrs.data[rest[way].data.astype(bool)].reshape(-1)))
            return real(self, ptrs, *rest)

        monkeypatch.setattr(builder, name, spy)

    watch(0, "create_masked_load")
    watch(1, "create_masked_store")

    def count(fn, *args):
        log.clear()
        out = fn(*args)
        out = out if isinstance(out, tuple) else (out,)
        storages = [x.untyped_storage() for x in (*args, *out) if torch.is_tensor(x)]
        sizes = {x.data_ptr(): x.nbytes() for x in storages}
        counts = {start: [0, 0] for start in (*sizes, None)}
        for way, pointers in log:
            counts[None][way] += len(pointers)
            for start, size in sizes.items():
                inside = int(((pointers >= start) & (pointers < start + size)).sum())
                counts[start][way] += inside
                counts[None][way] -= inside
        return [tuple(count) for count in counts.values()]

    return count


@pytest.mark.parametrize("dtype", [F32, F16])
def test_norm_moves_each_operand_once(moved, dtype):
    """But the weight once a program, which also writes its part of the weight's gradient."""
    x, add, weight, dy, dh = norm_case((1100, 24), dtype, "")
    y, h, r = ops.rms_norm_forward(x, add, weight, 1e-5)
    load, store, w, w_back = (x.numel(), 0), (0, x.numel()), (9 * 24, 0), (4 * 24, 0)
    rows, none, parts = 1100, (0, 0), (0, 4 * 24)
    forward, back = ops.rms_norm_forward, ops.rms_norm_backward
    counts = moved(forward, x, add, weight, 1e-5)
    assert counts == [load, load, w, store, store, (0, rows), none]
    assert moved(forward, x, None, weight, 1e-5) == [load, w, store, none, (0, rows), none]
    counts = moved(back, dy, h, weight, r, dh)
    assert counts == [load, load, w_back, (rows, 0), load, store, none, parts]


def test_rotary_and_swiglu_move_each_operand_once(moved):
    """But the tables once a token."""
    q, k, cos, sin = turn_case(2, 5, 40, 3, 256, False, F16, "heads")
    Q, K, table = q.numel(), k.numel(), (2 * cos.numel(), 0)
    counts = moved(ops.rotary_forward, q, k, cos, sin, 1)
    assert counts == [(Q, 0), (K, 0), table, table, (0, Q), (0, K), (0, 0)]
    gate, up, dy = (torch.randn(9001) for _ in range(3))
    load, store = (9001, 0), (0, 9001)
    assert moved(ops.swiglu_forward, gate, up) == [load, load, store, (0, 0)]
    assert moved(ops.swiglu_backward, dy, gate, up) == [load, load, load, store, store, (0, 0)]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_loss_reads_logits_twice_and_writes_them_once(moved, softcap):
    """And the one logit of each target once more. Rows that do not count are not read again."""
    n, V, blocks = 6, 9001, 3
    z, targets = loss_case(n, V, F16, "")
    counted = targets != IGNORE
    some = int(counted.sum())
    assert 0 < some < n
    counts = moved(ops.ce_local_triton, z, targets, softcap)
    assert counts == [(n * V + some, 0), (n, 0), *[(0, n)] * 3, (0, 0)]
    lse, factor = torch.full((n,), 9.0), counted.float()
    counts = moved(ops.ce_grad_triton_, z, targets, lse, factor, softcap, 0.1)
    assert counts == [(some * V, n * V), *[(n * blocks, 0)] * 3, (0, 0)]


def test_they_are_operators():
    """Of torch's own check: schema, aliases, and the shapes that a trace sees."""
    x, add, weight, dy, dh = norm_case((3, 5, 40), F32, "rows")
    r = torch.ones(3, 5)
    q, k, cos, sin = turn_case(2, 3, 4, 2, 24, True, F16, "heads")
    z, targets = loss_case(5, 90, F32, "rows", ignored=False)
    given = {
        "rms_norm_forward": [(x, add, weight, 1e-5), (x, None, weight, 1e-5)],
        "rms_norm_backward": [(dy, x, weight, r, dh), (dy, x, weight, r, None)],
        "rotary_forward": [(q, k, cos, sin, 1)], "swiglu_forward": [(x, add)],
        "swiglu_backward": [(dy, x, add)], "ce_local_triton": [(z, targets, 5.0)],
        "ce_grad_triton_": [(z, targets, torch.ones(5), torch.ones(5), None, 0.1)],
    }
    for name, cases in given.items():
        for args in cases:
            torch.library.opcheck(getattr(torch.ops.minimesh, name), args,
                                  test_utils=("test_schema", "test_faketensor"))
