"""The Triton kernels in their interpreter against a dense softmax in float64. test_triton.py runs
this file in a process of its own with TRITON_INTERPRET=1, which Triton reads when imported."""

import pytest
import torch

torch.version.cuda = torch.version.cuda or "none"  # kernels.py loads Triton for a GPU's torch only
from kernels import flash_backward, flash_forward  # noqa: E402

#          B  Tq  Tk   H Hkv d   dtype          cap   scale  intervals
CASES = [
    (2, 33, 37, 3, 1, 24, torch.float64, None, None, "documents"),
    (1, 37, 41, 8, 2, 40, torch.float64, 5.0, 0.3, "random"),
    (1, 35, 67, 2, 1, 80, torch.float64, None, 0.3, "random"),
    (1, 1, 1, 4, 4, 16, torch.float64, 5.0, None, "all"),
    (1, 33, 40, 6, 2, 16, torch.float32, None, None, "window"),
    (1, 33, 39, 4, 4, 96, torch.float32, 5.0, 0.3, "random"),
    (1, 130, 133, 4, 2, 40, torch.float16, None, None, "window"),
    (1, 131, 67, 3, 1, 96, torch.float16, 5.0, 0.3, "random"),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}  # of the largest


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def intervals(kind, B, Tq, Tk):
    """lo, hi [B, Tq]. Every kind but "all" has empty ones, at 0, at Tk, and in between."""
    i = torch.arange(Tq).expand(B, -1)
    if kind == "all":
        return torch.zeros(B, Tq).int(), torch.full((B, Tq), Tk).int()
    if kind == "random":  # in no order, some ends before their begins, some beyond the keys
        lo, hi = torch.randint(-4, Tk + 5, (2, B, Tq)).int()
        return torch.where(i % 5 == 0, lo.clamp(max=9), lo), hi
    hi = (i + 1 + (Tk - Tq) // 2 + torch.arange(B)[:, None]).clamp(0, Tk)  # causal, some see none
    lo = hi - 20 if kind == "window" else hi // 17 * 17
    empty = (i % 11 == 7) | (i == Tq - 1)
    return lo.clamp(0).int(), torch.where(empty, lo, hi).int()


def make(B, Tq, Tk, H, Hkv, d, dtype, kind, seed=0):
    """q and do with strides of their own, k and v slices of a longer sequence."""
    torch.manual_seed(seed)
    q = torch.randn(B, Tq, (H + 3) * d).to(dtype)[..., d : (H + 1) * d].unflatten(2, (H, d))
    k, v = torch.randn(B, Tk + 9, 2, Hkv, d).to(dtype)[:, 5 : Tk + 5].unbind(2)
    do = torch.randn(B, H, d, Tq).to(dtype).permute(0, 3, 1, 2)
    return q, k, v, do, *intervals(kind, B, Tq, Tk)


def dense(q, k, v, lo, hi, scale, cap):
    """-> o [B, Tq, H, d], lse [B, H, Tq], differentiable."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    s = s if cap is None else cap * torch.tanh(s / cap)
    key = torch.arange(k.shape[1])
    seen = ((key >= lo[..., None]) & (key < hi[..., None]))[:, None]
    e = s.exp() * seen
    total = e.sum(-1)
    some, total = total > 0, total.clamp(min=1e-300)
    o = torch.einsum("bhij,bjhd->bihd", e / total[..., None], v)
    return o, torch.where(some, total.log(), -torch.inf)


def delta_of(do, o, dlse):
    return (do.to(dlse.dtype) * o).sum(-1).transpose(1, 2) - dlse


def assert_close(name, x, y, tolerance):
    assert x.shape == y.shape
    assert x.isfinite().all(), name
    worst = (x.double() - y).abs().max() / y.abs().max().clamp(min=1e-3)
    print(f"{name} {worst:.1e}", end="  ")
    assert worst <= tolerance, (name, worst.item())


def reference(q, k, v, do, dlse, lo, hi, scale, cap):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = dense(*leaves, lo, hi, scale, cap)
    some = lse.isfinite()
    loss = (o * do.double()).sum() + (lse[some] * dlse.double()[some]).sum()
    return o.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_equals_dense_softmax(case):
    """Also with a gradient that comes to lse itself, which the caller takes off delta."""
    *sizes, dtype, cap, scale, kind = case
    q, k, v, do, lo, hi = make(*sizes, dtype, kind)
    scale = sizes[-1] ** -0.5 if scale is None else scale
    o, lse = flash_forward(q, k, v, lo, hi, scale, cap)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (o.dtype, lse.dtype) == (dtype, wide)
    dlse = torch.randn(lse.shape).to(wide)
    o_, lse_, grads_ = reference(q, k, v, do, dlse, lo, hi, scale, cap)
    empty = (lo.clamp(min=0) >= hi.clamp(max=sizes[2]))[:, None].expand_as(lse)
    assert kind == "all" or 0.02 < empty.double().mean() < 0.7
    assert (lse[empty] == -torch.inf).all() and (o.transpose(1, 2)[empty] == 0).all()
    given = (do, q, k, v, lse, delta_of(do, o, dlse), lo, hi, scale, cap)
    grads = flash_backward(*given)
    assert (grads[0].transpose(1, 2)[empty] == 0).all()
    tolerance = TOLERANCE[dtype]
    assert_close("lse", lse[~empty], lse_[~empty], min(tolerance, 1e-5))
    assert_close("o", o, o_, tolerance)
    for name, x, y in zip(("dq", "dk", "dv"), grads, grads_):
        assert x.dtype == wide
        assert_close(name, x, y, tolerance)


def test_parts_of_the_keys_add_up():
    """As a ring does it: forward by halves of the keys, merge, backward by halves with the merged
    lse. Some queries see one half only, some neither."""
    q, k, v, do, lo, hi = make(1, 35, 66, 4, 2, 16, torch.float64, "random")
    halves = []
    for a, b in ((0, 33), (33, 66)):
        halves.append((k[:, a:b], v[:, a:b], (lo - a).clamp(0, b - a), (hi - a).clamp(0, b - a)))
    parts = [flash_forward(q, *half, 0.3, 5.0) for half in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [(part[1] - lse).exp().nan_to_num(0).transpose(1, 2)[..., None] for part in parts]
    o = sum(weight * part[0] for weight, part in zip(weights, parts))
    o_, lse_, grads_ = reference(q, k, v, do, torch.zeros_like(lse), lo, hi, 0.3, 5.0)
    assert torch.equal(lse == -torch.inf, lse_ == -torch.inf)
    assert_close("o", o, o_, 1e-12)
    delta = delta_of(do, o, torch.zeros_like(lse))
    grads = [flash_backward(do, q, k, v, lse, delta, lo, hi, 0.3, 5.0)
             for k, v, lo, hi in halves]
    assert_close("dq", grads[0][0] + grads[1][0], grads_[0], 1e-12)
    assert_close("dk", torch.cat((grads[0][1], grads[1][1]), 1), grads_[1], 1e-12)
    assert_close("dv", torch.cat((grads[0][2], grads[1][2]), 1), grads_[2], 1e-12)


def test_blocks_that_nobody_sees_are_not_read():
    """What is not a number there would show: 0 times it is none. Blocks are 32 by 32 here."""
    q, k, v, do, lo, hi = make(1, 70, 91, 2, 1, 16, torch.float64, "all")
    i = torch.arange(70)
    begin = torch.where(i < 32, i // 2, 64 + i // 4)  # sees 4 .. 27, or 74 .. 90
    empty = (i < 8) | ((i >= 32) & (i < 40)) | (i >= 61)  # their lo lie between, and must not count
    lo[:] = torch.where(empty, 45, begin)
    hi[:] = torch.where(empty, 45, begin + 12)
    clean = flash_forward(q, k, v, lo, hi, 0.3, None)
    delta = delta_of(do, clean[0], torch.zeros_like(clean[1]))
    rest = (clean[1], delta, lo, hi, 0.3, None)
    grads = flash_backward(do, q, k, v, *rest)
    k_, v_, q_, do_ = (x.clone() for x in (k, v, q, do))
    k_[:, 28:72] = v_[:, 28:72] = torch.nan
    q_[:, empty] = do_[:, empty] = torch.nan
    o, lse = flash_forward(q, k_, v_, lo, hi, 0.3, None)
    assert torch.equal(o, clean[0]) and torch.equal(lse, clean[1])
    assert torch.equal(flash_backward(do, q, k_, v_, *rest)[0], grads[0])
    for x, y in zip(flash_backward(do_, q_, k, v, *rest)[1:], grads[1:]):
        assert torch.equal(x, y)


def test_they_are_operators():
    """Of torch's own check; and a compiled function holds them in one graph."""
    q, k, v, do, lo, hi = make(1, 17, 20, 2, 1, 16, torch.float32, "window")
    forward, backward = torch.ops.minimesh.flash_forward, torch.ops.minimesh.flash_backward
    o, lse = flash_forward(q, k, v, lo, hi, 0.3, None)
    delta = delta_of(do, o, torch.zeros_like(lse))
    which = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward, (q, k, v, lo, hi, 0.3, None), test_utils=which)
    torch.library.opcheck(backward, (do, q, k, v, lse, delta, lo, hi, 0.3, 5.0), test_utils=which)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def both(q):
        o, lse = flash_forward(q * 1, k, v, lo, hi, 0.3, None)
        return o, *flash_backward(do, q, k, v, lse, delta, lo, hi, 0.3, None)

    for x, y in zip(both(q), (o, *flash_backward(do, q, k, v, lse, delta, lo, hi, 0.3, None))):
        assert torch.equal(x, y)


def test_two_runs_give_the_same_bits():
    q, k, v, do, lo, hi = make(1, 33, 40, 2, 1, 24, torch.float32, "random")
    runs = []
    for _ in range(2):
        o, lse = flash_forward(q, k, v, lo, hi, 0.3, 5.0)
        delta = delta_of(do, o, torch.zeros_like(lse))
        runs.append((o, lse, *flash_backward(do, q, k, v, lse, delta, lo, hi, 0.3, 5.0)))
    assert all(torch.equal(x, y) for x, y in zip(*runs))
