"""kernels.py: every operation and all its gradients against its definition in float64, and against
another implementation where one exists."""

import functools
import math
import shutil

import parity
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels
import parallel

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [F64, F32, BF16, F16]
quick = pytest.mark.quick


@pytest.fixture(params=["as is", "native"])
def products(request, monkeypatch):
    """A CPU without bfloat16 or float16 instructions goes through float32. `native` makes it take
    the path of those that have them (slow here, but the same code)."""
    if request.param == "native":
        monkeypatch.setattr(kernels, "EMULATED", ())


def rand(*shape, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape) * 31)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def grads(f, inputs, seeds=None):
    """Outputs and gradients of f for fixed random upstream gradients (or the given ones)."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = f(*inputs)
    out = list(out) if isinstance(out, tuple) else [out]
    if seeds is None:
        seeds = [rand(*o.shape, dtype=o.dtype, seed=7) for o in out]
    return [o.detach() for o in out] + list(torch.autograd.grad(out, inputs, seeds))


def close(got, want, tol):
    """Largest difference over the largest value (over 1e-4 of the largest of all, where one is
    zero in theory and noise in fact)."""
    got, want = ([t.detach() for t in ts] for ts in (got, want))
    assert len(got) == len(want)
    largest = [float(t.to(F64).abs().max()) if t.numel() else 0.0 for t in want]
    for i, (a, b) in enumerate(zip(got, want)):
        assert a.shape == b.shape, (i, a.shape, b.shape)
        if b.numel():
            error = float((a.to(F64) - b.to(F64)).abs().max())
            assert error <= tol * max(largest[i], 1e-4 * max(largest)), (i, error, largest)


def check(op, ref, inputs, dtype, factor=8):
    """op in `dtype` against ref in float64 on the same (rounded) numbers. In float64 1e-12, else
    `factor` units in the last place of the largest value."""
    inputs = [t.to(dtype) for t in inputs]
    got = grads(op, inputs)
    assert all(t.dtype == dtype for t in got)
    seeds = [rand(*o.shape, dtype=dtype, seed=7) for o in got[: len(got) - len(inputs)]]
    want = grads(ref, [t.to(F64) for t in inputs], [s.to(F64) for s in seeds])
    close(got, want, 1e-12 if dtype == F64 else factor * torch.finfo(dtype).eps)


OPS = {  # name -> (op, definition, shapes)
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w, 1e-5),
                 lambda x, w: kernels.rms_norm_ref(x, w, 1e-5), [(3, 5, 7), (7,)]),
    "rms_norm_row": (lambda x, w: kernels.rms_norm(x, w, 1e-6),
                     lambda x, w: kernels.rms_norm_ref(x, w, 1e-6), [(1, 1000), (1000,)]),
    "layer_norm": (lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5),
                   lambda x, w, b: (x - x.mean(-1, keepdim=True))
                   / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * w + b,
                   [(3, 5, 7), (7,), (7,)]),
    "swiglu": (kernels.swiglu, kernels.swiglu_ref, [(3, 5, 7), (3, 5, 7)]),
    "gelu": (kernels.gelu, lambda x: 0.5 * x * (1 + torch.tanh(
        math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), [(3, 5, 7)]),
    "rotary": (lambda q, k: kernels.rotary(q, k, *tables(9, 6, k.dtype)),
               lambda q, k: kernels.rotary_ref(q, k, *tables(9, 6, k.dtype)),
               [(2, 9, 4, 6), (2, 9, 2, 6)]),
    "attention": (lambda *a: kernels.attention(*a)[0], lambda *a: kernels.attention_ref(*a)[0],
                  [(2, 37, 6, 24), (2, 37, 2, 24), (2, 37, 2, 24)]),
}  # fmt: skip


def tables(T, d, dtype=F64):
    return kernels.rope_tables(T, d, 1e4, dtype=kernels.wide(dtype))


@quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_definition(name, dtype, products):
    op, ref, shapes = OPS[name]
    factor = {"layer_norm": 16}.get(name, 8)
    if dtype == F32 and name == "rotary":  # the tables are rounded to float32 as well
        factor = 16
    check(op, ref, [rand(*s, seed=i) for i, s in enumerate(shapes)], dtype, factor)


@quick
@pytest.mark.parametrize("name", OPS)
def test_layouts(name):
    """Strided, transposed, sliced and expanded inputs, and upstream gradients of every layout."""
    op, ref, shapes = OPS[name]

    def strided(t):
        return torch.stack((t, t + 1), -1)[..., 0]

    def sliced(t):
        return F.pad(t, (3, 2))[..., 3:-2]

    def transposed(t):
        return t.transpose(0, -1).contiguous().transpose(0, -1)

    for change in (strided, sliced, transposed):
        inputs = [change(rand(*s, seed=i)) for i, s in enumerate(shapes)]
        outputs = op(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for other in (strided, transposed, lambda t: torch.ones((), dtype=F64).expand(t.shape)):
            seeds = [other(rand(*o.shape, seed=9)) for o in outputs]
            close(grads(op, inputs, seeds), grads(ref, inputs, seeds), 1e-12)
    expanded = [rand(*s[1:]).expand(s) for s in shapes if len(s) > 1]
    inputs = expanded + [rand(*s) for s in shapes if len(s) == 1]
    close(grads(op, inputs), grads(ref, inputs), 1e-12)


@quick
@pytest.mark.parametrize("name", OPS)
def test_empty_batch(name):
    op, _, shapes = OPS[name]
    inputs = [rand(0, *s[1:]) if len(s) > 1 else rand(*s) for s in shapes]
    for t, want in zip(grads(op, inputs)[-len(inputs) :], inputs):
        assert t.shape == want.shape and not t.count_nonzero()


@quick
@pytest.mark.parametrize("name", OPS)
def test_two_runs_agree_to_the_bit(name):
    op, _, shapes = OPS[name]
    inputs = [rand(*s, dtype=F32, seed=i) for i, s in enumerate(shapes)]
    for a, b in zip(grads(op, inputs), grads(op, inputs)):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------
# Normalisation


@quick
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("weight_dtype", [BF16, F32])
def test_rms_norm_cast_order(eps, weight_dtype):
    """Llama's eager code, written out: float32 up to the cast, the weight after it."""
    x, w = (100 + rand(64, 96)).to(BF16), (1 + 0.1 * rand(96)).to(weight_dtype)
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    want = (w * h.to(BF16)).to(BF16)
    got = kernels.rms_norm(x, w, eps)
    assert got.dtype == BF16
    assert (got.view(torch.int16).int() - want.view(torch.int16).int()).abs().max() <= 1
    assert (got != want).float().mean() < 0.01  # and nearly all to the bit
    assert torch.equal(kernels.rms_norm_ref(x, w, eps), want)


@quick
def test_rms_norm_is_torchs():
    inputs = [rand(5, 33), rand(33)]
    want = grads(lambda x, w: F.rms_norm(x, (33,), w, 1e-5), inputs)
    close(grads(lambda x, w: kernels.rms_norm(x, w, 1e-5), inputs), want, 1e-12)
    assert kernels.layer_norm(inputs[0], inputs[1], None, 1e-5).shape == (5, 33)


# ---------------------------------------------------------------------------------------------
# Rotary


@quick
def test_rotary_is_hugging_face_llama():
    """apply_rotary_pos_emb, written out: x * cos + rotate_half(x) * sin, heads before positions."""
    q, k, d = rand(2, 9, 4, 6), rand(2, 9, 2, 6), 6
    freq = 1.0 / (1e4 ** (torch.arange(0, d, 2, dtype=F64) / d))
    angle = torch.arange(9, dtype=F64)[:, None] * freq
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()

    def turn(x):
        x = x.transpose(1, 2)
        half = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
        return (x * cos + half * sin).transpose(1, 2)

    close(kernels.rotary(q, k, *tables(9, d)), [turn(q), turn(k)], 1e-12)


@quick
def test_rotary_positions_per_sequence():
    q, k = rand(2, 5, 4, 6), rand(2, 5, 2, 6)
    at = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 6, 7]])
    cos, sin = (t[at] for t in tables(8, 6))
    got = grads(lambda q, k: kernels.rotary(q, k, cos, sin), [q, k])
    close(got, grads(lambda q, k: kernels.rotary_ref(q, k, cos, sin), [q, k]), 1e-12)
    alone = kernels.rotary(q[1:], k[1:], *(t[3:] for t in tables(8, 6)))
    assert torch.equal(got[0][1:], alone[0]) and torch.equal(got[1][1:], alone[1])


@quick
def test_rope_tables_hold_at_long_positions():
    cos, sin = kernels.rope_tables(131072, 64, 5e5)
    assert cos.dtype == F32 and cos.shape == (131072, 32)
    for at in (255, 257, 1857, 8191, 131071):
        for i in (0, 1, 7, 31):
            angle = at * 5e5 ** (-2 * i / 64)
            assert abs(float(cos[at, i]) - math.cos(angle)) < 1e-7
            assert abs(float(sin[at, i]) - math.sin(angle)) < 1e-7
    q, k = rand(1, 1, 1, 64, dtype=F32), rand(1, 1, 1, 64, dtype=F32, seed=1)

    def score(i, j):  # depends on the distance only
        a, _ = kernels.rotary(q, k, cos[i : i + 1], sin[i : i + 1])
        _, b = kernels.rotary(q, k, cos[j : j + 1], sin[j : j + 1])
        return float((a * b).sum())

    assert score(0, 5) == pytest.approx(score(8000, 8005), abs=1e-4)
    assert score(0, 5) != pytest.approx(score(0, 6), abs=1e-2)


@quick
def test_rope_scaling_is_llama_3():
    """Hugging Face's _compute_llama3_parameters, by wavelengths, one channel at a time."""
    s = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
    cos, sin = kernels.rope_tables(3, 128, 5e5, scaling=s, dtype=F64)
    kinds = set()
    for i in range(64):
        freq = 5e5 ** (-2 * i / 128)
        wave = 2 * math.pi / freq
        if wave < 8192 / 4:
            kinds.add("kept")
        elif wave > 8192:
            freq = freq / 8
            kinds.add("slowed")
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            freq = (1 - smooth) * freq / 8 + smooth * freq
            kinds.add("between")
        assert float(cos[2, i]) == pytest.approx(math.cos(2 * freq), rel=1e-12)
        assert float(sin[2, i]) == pytest.approx(math.sin(2 * freq), rel=1e-12)
    assert len(kinds) == 3


# ---------------------------------------------------------------------------------------------
# Attention


def sdpa(q, k, v, mask=None):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return o.transpose(1, 2)


def attention(*inputs, **options):
    return kernels.attention(*inputs, **options)[0]


def ref(*inputs):
    return kernels.attention_ref(*inputs)[0]


def qkv(B, T, H, n_kv, d, dtype=F64):
    return [rand(B, T, h, d, dtype=dtype, seed=i) for i, h in enumerate((H, n_kv, n_kv))]


@quick
@pytest.mark.parametrize("heads", [(6, 2), (8, 2), (3, 1), (12, 4), (4, 4)])
def test_attention_groups(heads):
    inputs = qkv(2, 17, *heads, 8)
    close(grads(attention, inputs), grads(sdpa, inputs), 1e-12)


@quick
@pytest.mark.parametrize("T", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("d", [24, 40])
def test_attention_lengths(T, d):
    inputs = qkv(1, T, 2, 1, d)
    tol = 1e-12 if T > 1 else 1e-11  # one key: dq and dk are zero in theory
    close(grads(attention, inputs), grads(sdpa, inputs), tol)


def test_attention_long():
    """Past the length where the CPU path hands over, plain and with intervals."""
    T = kernels.SHORT + 3
    inputs, lo = qkv(1, T, 2, 1, 8), (torch.arange(T)[None] - 500).clamp(min=0)
    close(grads(attention, inputs), grads(ref, inputs), 1e-12)
    got = grads(lambda *a: attention(*a, lo), inputs)
    close(got, grads(lambda *a: ref(*a, lo), inputs), 1e-12)


def starts(documents):
    """lo of sequences packed from documents of these lengths."""
    return torch.tensor([[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)]
                         for row in documents])  # fmt: skip


@quick
@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_attention_of_packed_documents(dtype, products):
    lo = starts([[1, 130, 40, 99], [270]])
    inputs = qkv(2, 270, 4, 2, 8, dtype)
    key = torch.arange(270)
    mask = (key <= key[:, None]) & (key >= lo[:, :, None])
    got = grads(lambda *a: attention(*a, lo), inputs)
    seeds = [rand(*got[0].shape, dtype=dtype, seed=7).to(F64)]
    want = grads(lambda *a: sdpa(*a, mask[:, None]), [t.to(F64) for t in inputs], seeds)
    close(got, want, 1e-12 if dtype == F64 else 16 * torch.finfo(dtype).eps)  # sums of 130 rows


@quick
def test_a_document_is_attended_as_if_alone():
    lo, inputs = starts([[50, 80, 3]]), qkv(1, 133, 2, 2, 8)
    whole = attention(*inputs, lo)
    for a, b in ((0, 50), (50, 130), (130, 133)):
        close([whole[:, a:b]], [attention(*(t[:, a:b] for t in inputs))], 1e-12)


@quick
def test_attention_interval_starts_may_fall():
    """A sliding window whose start jumps back is right too."""
    T = 150
    lo = (torch.arange(T) * 7 % 11).minimum(torch.arange(T))[None].repeat(2, 1)
    inputs = qkv(2, T, 2, 1, 8)
    got = grads(lambda *a: attention(*a, lo), inputs)
    close(got, grads(lambda *a: ref(*a, lo), inputs), 1e-12)


def dense(q, k, v, lo, hi, scale=None, softcap=None):
    """The dense softmax, written another way: (o, lse)."""
    g = q.shape[2] // k.shape[2]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(g, 2))
    s = s / math.sqrt(q.shape[3]) if scale is None else s * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    key = torch.arange(k.shape[1])
    e = torch.where((key >= lo[..., None]) & (key < hi[..., None]), 1, 0)[:, None] * s.exp()
    total = e.sum(-1)
    o = torch.einsum("bhij,bjhd->bihd", e / total.clamp(min=1e-30)[..., None],
                     v.repeat_interleave(g, 2))
    return o, torch.where(total > 0, total.clamp(min=1e-30).log(), -math.inf)


def intervals(B, Tq, Tk, kind, seed=0):
    """Random lo and hi: rising as in training, or in any order; about one row in six is empty."""
    generator = torch.Generator().manual_seed(seed)
    lo, hi = torch.randint(0, Tk + 1, (2, B, Tq), generator=generator).sort(0).values
    lo, hi = (lo.sort(1).values, hi.sort(1).values) if kind == "rising" else (lo, hi)
    hi = torch.where(torch.rand(B, Tq, generator=generator) < 1 / 6, lo, hi)
    return lo.int(), hi.int()


def bounds_of(lo, hi):
    """What the host would know: of each query the lowest lo and the highest hi."""
    return lo.amin(0).numpy(), hi.amax(0).numpy()


@quick
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("Tq, Tk, heads, d", [(1, 1, (3, 1), 8), (37, 37, (6, 2), 24),
                                              (150, 65, (4, 4), 40), (65, 211, (12, 4), 5)])
@pytest.mark.parametrize("kind", ["rising", "any"])
def test_attention_of_any_intervals(kind, Tq, Tk, heads, d, options):
    """Output, log-sum-exp and every gradient, with and without what the host knows; empty rows
    give zero and -inf."""
    q, k, v = (rand(2, T, h, d, seed=i) for i, (T, h) in enumerate(
        ((Tq, heads[0]), (Tk, heads[1]), (Tk, heads[1]))))
    lo, hi = intervals(2, Tq, Tk, kind)
    lo[:, Tq // 2], hi[:, Tq // 2] = 0, 0
    some = (lo < hi)[:, None].expand(-1, heads[0], -1)

    def finite(out):
        assert torch.equal(out[1].isinf(), ~some)
        return out[0], torch.where(some, out[1], 0)

    want = grads(lambda *a: finite(dense(*a, lo, hi, **options)), (q, k, v))
    assert bool((want[0][:, Tq // 2] == 0).all())
    for op in (kernels.attention_ref,
               kernels.attention, functools.partial(kernels.attention, keep=False),
               functools.partial(kernels.attention, bounds=bounds_of(lo, hi))):
        got = grads(lambda *a: finite(op(*a, lo, hi, **options)), (q, k, v))  # noqa: B023
        close(got, want, 1e-11)


@quick
@pytest.mark.parametrize("Tq, Tk", [(40, 40), (33, 77), (kernels.SHORT + 1, 30)])
def test_attention_of_the_full_square(Tq, Tk):
    """hi as a number: the same for all; short ones in row blocks, long ones in torch's kernel."""
    q, k, v = (rand(1, T, h, 8, seed=i) for i, (T, h) in enumerate(((Tq, 4), (Tk, 2), (Tk, 2))))
    all_ = torch.full((1, Tq), Tk)
    want = grads(lambda *a: dense(*a, 0 * all_, all_), (q, k, v))
    close(grads(lambda *a: kernels.attention(*a, hi=Tk), (q, k, v)), want, 1e-11)


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_attention_parts_merge(dtype, products):
    """The gradients through a part of the keys, given the output and log-sum-exp of all of them,
    add up to the whole: what a ring does step by step."""
    T = 70
    q, k, v = qkv(2, T, 4, 2, 16, dtype)
    do = rand(2, T, 4, 16, dtype=dtype, seed=9)
    want = grads(ref, [t.to(F64) for t in (q, k, v)], [do.to(F64)])
    o, lse = kernels.attention_forward(q, k, v)
    delta = kernels.row_sums(do, o)
    parts = []
    for a, b in ((0, 31), (31, T)):
        at = torch.arange(T)[None].expand(2, -1)
        hi = (at + 1 - a).clamp(0, b - a)
        parts.append(kernels.attention_backward(do, q, k[:, a:b], v[:, a:b], o, lse, delta,
                                                torch.zeros_like(hi), hi))
    dq = parts[0][0] + parts[1][0]
    dk, dv = (torch.cat([part[i] for part in parts], 1) for i in (1, 2))
    close([dq, dk, dv], want[1:], 1e-12 if dtype == F64 else 16 * torch.finfo(dtype).eps)


@quick
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_error_beside_torchs_kernel(dtype, monkeypatch):
    """The row blocks themselves (on any CPU) stay within 2.5 times the error of torch's kernel."""
    inputs = qkv(1, 300, 2, 1, 32, dtype)  # several blocks
    seed = [rand(1, 300, 2, 32, dtype=dtype, seed=3)]
    want = grads(sdpa, [t.to(F64) for t in inputs], [seed[0].to(F64)])
    monkeypatch.setattr(kernels, "EMULATED", ())
    ours = grads(attention, inputs, seed)
    theirs = grads(sdpa, inputs, seed)
    for a, b, c in zip(ours, theirs, want):
        rms = [(t.to(F64) - c).square().mean().sqrt() for t in (a, b)]
        assert rms[0] <= 2.5 * rms[1], [float(r) for r in rms]


@quick
def test_kept_and_remade_probabilities_agree():
    """Bit for bit without the log-sum-exp, as in training; with it to rounding."""
    inputs, lo = qkv(2, 50, 4, 2, 8, F32), starts([[20, 30], [50]])
    for at in (None, lo):
        a, b = (grads(lambda *t, k=k, at=at: attention(*t, at, keep=k), inputs)
                for k in (True, False))  # fmt: skip
        close(a, b, 8 * torch.finfo(F32).eps)
        c, d = (grads(lambda *t, k=k, at=at: attention(*t, at, keep=k, with_lse=False), inputs)
                for k in (True, False))  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(c, d))
        close(a, c, 8 * torch.finfo(F32).eps)


# ---------------------------------------------------------------------------------------------
# Linear + cross-entropy

SCALE = torch.tensor(0.37, dtype=F64)
MESH = parallel.build_mesh(parallel.layout_of(1), "cpu")
PIECES = kernels.ce_weight, kernels.ce_forward, kernels.ce_backward


def head(N=23, D=6, V=11, pad=2, dtype=F64):
    x, w = rand(N, D, dtype=dtype), rand(V + pad, D, dtype=dtype, seed=1)
    y = torch.randint(V, (N,), generator=torch.Generator().manual_seed(N))
    if N > 4:
        y[1], y[4] = kernels.IGNORE, V - 1
    return x, w, y


def ours(y, V, scale=SCALE, **options):
    options["chunk"] = options.get("chunk") or max(len(y), 1)
    return lambda x, w: parallel.linear_cross_entropy(MESH, PIECES, x, w, y[None], scale, vocab=V,
                                                      **options)


def torchs(y, V, scale=SCALE):
    return lambda x, w: F.cross_entropy(F.linear(x, w[:V]), y, reduction="sum") * scale


def same_loss(got, want, scale=SCALE, tol=1e-12):
    """Gradients as they are; the value is of the plain sum, not of scale times it."""
    close([got[0] * scale, *got[1:]], want, tol)


@quick
@pytest.mark.parametrize("N", [0, 1, 2, 17, 31, 33])
@pytest.mark.parametrize("chunk", [None, 7])
def test_loss_is_torchs(N, chunk):
    x, w, y = head(N)
    one = [torch.ones((), dtype=F64)]
    got = grads(ours(y, 11, chunk=chunk), [x, w], one)
    same_loss(got, grads(torchs(y, 11), [x, w], one))
    assert not got[2][11:].count_nonzero()  # padding


@quick
@pytest.mark.parametrize("softcap,z_loss", [(None, 0.0), (1.5, 0.0), (None, 0.1), (1.5, 0.1)])
def test_loss_options(softcap, z_loss):
    x, w, y = head()
    one = [torch.ones((), dtype=F64)]

    def ref(x, w):  # by torch's own loss and logsumexp
        z = F.linear(x, w[:11])
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        extra = z_loss * (z.logsumexp(-1).square() * (y != -100)).sum()
        return (F.cross_entropy(z, y, reduction="sum") + extra) * SCALE

    got = grads(ours(y, 11, chunk=7, softcap=softcap, z_loss=z_loss), [x, w], one)
    same_loss(got, grads(ref, [x, w], one))
    plain = kernels.linear_cross_entropy_ref(x, w[:11], y, softcap, z_loss)
    close([got[0]], [plain], 1e-12)


@quick
def test_loss_upstream_gradient():
    """Times 3.7, and used twice; a gradient that is not a scalar is refused."""
    x, w, y = head()
    y[0] = kernels.IGNORE
    for up in (3.7, 0.0):
        seed = [torch.tensor(up, dtype=F64)]
        same_loss(grads(ours(y, 11), [x, w], seed), grads(torchs(y, 11), [x, w], seed))

    def twice(f):
        return lambda x, w: (f(x, w), f(x, w) * 2)[0] + f(x, w)

    one = [torch.ones((), dtype=F64)]
    same_loss(grads(twice(ours(y, 11)), [x, w], one), grads(twice(torchs(y, 11)), [x, w], one))
    with pytest.raises(RuntimeError):
        ours(y, 11)(x.requires_grad_(), w).backward(torch.ones(23, dtype=F64))


@quick
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_adds_to_the_accumulator(dtype, softcap, products):
    """The weight's gradient joins what is there, in float32, and autograd gets none."""
    x, w, y = head(40, 16, 37, 3, dtype)
    w = w / 4
    x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
    acc = rand(40, 16, dtype=kernels.wide(dtype), seed=5)
    before = acc.clone()
    scratch = {}
    options = dict(weight_grad=acc, chunk=20, scratch=scratch, softcap=softcap)
    total = ours(y, 37, SCALE.to(acc.dtype), **options)(x_, w_)
    total.backward()
    assert total.dtype == acc.dtype and x_.grad.dtype == dtype and w_.grad is None and scratch

    def ref(x, w):
        return SCALE * kernels.linear_cross_entropy_ref(x, w[:37], y, softcap)

    want = grads(ref, [x.to(F64), w.to(F64)], [torch.ones((), dtype=F64)])
    tol = 1e-12 if dtype == F64 else 8 * torch.finfo(dtype).eps
    same_loss([total.detach(), x_.grad, acc - before], want, tol=tol)
    assert torch.equal(acc[37:], before[37:])


@quick
def test_loss_value_in_low_precision(products):
    """Computed in float32 from the rounded logits: far better than the dtype's own rounding."""
    for dtype, tol in ((F32, 1e-6), (BF16, 2e-3), (F16, 2e-4)):
        x, w, y = head(40, 16, 37, 3, dtype)
        want = torchs(y, 37, 1.0)(x.to(F64), w.to(F64))
        close([ours(y, 37)(x, w)], [want], tol)


@quick
def test_loss_keeps_small_gradients_in_float16(products):
    """scale enters before rounding: 1e-6 times a probability would vanish, times 1e-6 x stays."""
    x, w, y = head(64, 16, 37, 3, F16)
    scale = torch.tensor(2.0**-12)
    acc = torch.zeros(40, 16)
    ours(y, 37, scale, weight_grad=acc)(x.requires_grad_(), w)
    want = grads(torchs(y, 37, scale), [x.to(F64), w.to(F64)], [torch.ones((), dtype=F64)])
    close([acc], [want[2]], 8 * torch.finfo(F16).eps)


@quick
def test_loss_without_gradients():
    x, w, y = head()
    acc = torch.zeros_like(w)
    with torch.no_grad():
        total = ours(y, 11, weight_grad=acc)(x.requires_grad_(), w.requires_grad_())
    assert not total.requires_grad and not acc.count_nonzero()
    close([total], [torchs(y, 11, 1.0)(x, w)], 1e-12)


@quick
def test_loss_ignored_rows():
    """A chunk with no counted row, and no counted row at all: zero, not NaN."""
    x, w, y = head()
    y[7:14] = kernels.IGNORE
    one = [torch.ones((), dtype=F64)]
    got = grads(ours(y, 11, chunk=7), [x, w], one)
    same_loss(got, grads(torchs(y, 11), [x, w], one))
    assert not got[1][7:14].count_nonzero()
    y[:] = kernels.IGNORE
    assert all(not t.count_nonzero() for t in grads(ours(y, 11, chunk=7), [x, w], one))


@quick
@pytest.mark.parametrize("target", [-1, -99, 11, 12, 18, 2**31 - 1])
def test_loss_of_an_invalid_target_is_nan(target):
    """Never a plausible number; 11 and 12 are padding rows of the weight."""
    x, w, y = head()
    y[3] = target
    total, dx, dw = grads(ours(y, 11, chunk=7), [x, w], [torch.ones((), dtype=F64)])
    assert total.isnan() and dx[3].isnan().all() and dw[:11].isnan().all()
    assert not dx[4:].isnan().any()


@quick
def test_loss_runs_agree_to_the_bit():
    for N in (1, 17, 31, 33, 1017):
        x, w, y = head(N, dtype=F32)
        runs = [grads(ours(y, 11, chunk=32, scratch={}), [x, w]) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs))


@quick
def test_loss_of_confident_and_large_logits():
    """Logits in the hundreds: no overflow, no loss of the small differences."""
    x, w, y = head()
    one = [torch.ones((), dtype=F64)]
    same_loss(grads(ours(y, 11), [x * 200, w], one), grads(torchs(y, 11), [x * 200, w], one))


def loss_shard(x, w, y, V, options):
    """This tp rank's part of the loss: its tokens, its rows of the padded table."""
    n = torch.distributed.get_world_size()
    mesh = parity.mesh_of(parallel.layout_of(n, tp=n))
    r, targets = mesh.rank, y.view(n, -1)
    x, w = x.chunk(n)[r].clone().requires_grad_(), w.chunk(n)[r].clone()
    acc = torch.zeros(w.shape, dtype=kernels.wide(x.dtype))
    total = parallel.linear_cross_entropy(mesh, PIECES, x, w, targets, SCALE.to(acc.dtype), vocab=V,
                                          chunk=4 * n, weight_grad=acc, **options)
    total.backward()
    return total.detach(), x.grad, acc, mesh.ledger


def sharded(world, n, x, w, y, V, options):
    """-> loss, dX, dW of the real rows, from n ranks that hold the vocabulary in n parts."""
    results = world(n).run(loss_shard, x, w, y, V, options)
    assert len({float(r[0]) for r in results}) == 1  # every rank has the same loss
    chunks, size = -(-len(y) // n // 4), len(x) * x[0].numel() * x.element_size()
    for *_, ledger in results:
        assert ledger["tp", "all_reduce max (loss)"][0] == chunks  # two small reductions a chunk
        assert ledger["tp", "all_reduce sum (loss)"][0] == chunks
        assert ledger["tp", "reduce_scatter (loss)"] == [chunks, size * (n - 1) // n]
        assert ledger["tp", "all_gather (loss)"] == [chunks, size * (n - 1) // n]
    dw = torch.cat([r[2] for r in results])
    assert not dw[V:].count_nonzero()
    return [results[0][0], torch.cat([r[1] for r in results]), dw[:V]]


@pytest.mark.parametrize("n,rows", [(2, 6), (2, 8), (3, 4), (4, 3), (4, 4), (3, 11)])
@pytest.mark.parametrize("options", [{}, dict(softcap=1.5, z_loss=0.1)])
def test_loss_over_vocabulary_shards(n, rows, options, world):
    """11 ids on 2 to 4 ranks, padded unevenly, down to ranks that hold padding only; all targets
    of a chunk ignored; all on one rank's rows."""
    V = 11
    x, _, y = head(N=36, V=V)
    y.view(n, -1)[:, :4] = -100  # the first chunk
    y[-V:] = torch.arange(V)  # a target in every place
    w = rand(n * rows, 6, seed=1)
    w[V:] = 50  # padding that would win if it counted
    for targets in (y, torch.where(y < 0, y, V - 1), torch.full_like(y, -100)):
        got = sharded(world, n, x, w, targets, V, options)
        whole = grads(ours(targets, V, **options), [x, w[:V]], [torch.ones((), dtype=F64)])
        close(got, whole, 1e-12)
        if not options:
            want = grads(torchs(targets, V), [x, w[:V]], [torch.ones((), dtype=F64)])
            same_loss(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_loss_over_shards_of_unlike_size(dtype, world):
    """One shard's logits far below the other's, so that its share of the softmax underflows."""
    x, w = rand(10, 6).abs().to(dtype), rand(12, 6, seed=1).to(dtype)
    w[:6] -= 16
    w[6:] += 16
    y = torch.arange(10)
    got = sharded(world, 2, x, w, y, 12, {})
    want = grads(torchs(y, 12), [x.to(F64), w.to(F64)], [torch.ones((), dtype=F64)])
    same_loss(got, want, tol=32 * torch.finfo(dtype).eps)  # logits of 60 carry as much themselves


# ---------------------------------------------------------------------------------------------
# Tracing


def block(x, w, wq, head_w, y, lo):
    """All operations in a row."""
    B, T, D = x.shape
    h = kernels.rms_norm(x, w, 1e-5)
    qkv = (h @ wq).view(B, T, 4, -1)
    q, k = kernels.rotary(qkv[:, :, :2], qkv[:, :, 2:3], *tables(T, qkv.shape[3], F32))
    o = kernels.attention(q, k, qkv[:, :, 3:])[0] + kernels.attention(q, k, qkv[:, :, 3:], lo)[0]
    x = x + kernels.swiglu(o.flatten(2), kernels.gelu(o.flatten(2)))
    return parallel.linear_cross_entropy(MESH, PIECES, x.flatten(0, 1), head_w, y[None],
                                         torch.tensor(0.5), vocab=11, chunk=8)


def block_inputs(dtype=F32):
    x, w, wq, head_w = (rand(*s, dtype=dtype) for s in ((2, 9, 16), (16,), (16, 32), (13, 16)))
    y = torch.arange(18) % 11
    return [x, w, wq, head_w], y, torch.tensor([[0] * 4 + [4] * 5] * 2)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
@pytest.mark.filterwarnings("ignore")  # the compilers' own deprecations
def test_compiles_whole(backend):
    """One graph, forward and backward, with the eager numbers."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    floats, y, lo = block_inputs()
    eager = grads(lambda *a: block(*a, y, lo), floats)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    close(grads(lambda *a: compiled(*a, y, lo), floats), eager, 1e-4)
    torch._dynamo.reset()


@quick
def test_runs_without_values():
    """Under fake tensors: nothing reads a value, shapes do not depend on data."""
    with FakeTensorMode() as mode:
        floats, y, lo = block_inputs()
        out = grads(lambda *a: block(*a, mode.from_tensor(y), mode.from_tensor(lo)), floats)
    assert [t.shape for t in out[1:]] == [t.shape for t in floats]
