"""The operations that a transformer spends its time in, besides the plain matrix products.

    operation             formula                                           saved for backward
    rms_norm              x / rms(x) * w                                    x, 1/rms per row
    layer_norm, gelu      torch's own fused ones                            x
    rotary                turn pairs of channels by position * frequency    the tables only
    swiglu                silu(gate) * up                                   gate, up
    attention             softmax(q k^T / sqrt(d)) v, keys lo_i .. hi_i-1   q, k, v, o, lse (p)
    cross-entropy         -log softmax(x W^T)[target], chunk by chunk       nothing: dx, dW at once

Each comes as `op_ref`, the definition in plain differentiable PyTorch, which is the specification;
then Triton kernels, forward and backward, each an operator of torch; then an autograd function
whose backward is written out, in PyTorch or by these; then the public `op`, whose `how` says which.
(The loss has its pieces here; a loop over chunks, with two sums over ranks, joins them.) Sums and
normalisations are held in float32 whatever the input (in float64 if it is float64); results have
the dtype of the input. Shapes: B sequences, T tokens, H heads of d channels, D channels, V
vocabulary entries, N = B T. The file imports nothing of the project and may be copied alone.
"""

from __future__ import annotations  # without Triton nothing then looks up tl.constexpr

import contextlib
import math

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

triton, jit = None, lambda fn: fn
if torch.version.cuda or torch.version.hip:  # a build of torch that can use it
    with contextlib.suppress(ImportError):
        import triton
        import triton.language as tl

        jit = triton.jit

IGNORE = -100  # a target that does not count


def wide(dtype):
    """The dtype that sums are held in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# The dtypes for whose matrix products this CPU has no instruction. torch then runs a scalar loop,
# many times slower than float32, so the products below go through float32.
EMULATED = tuple(
    dtype for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
    if not (torch.backends.mkldnn.is_available()
            and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()))


def on_cpu(x):
    """Not so a tensor that only has a shape: a dry run's, which stands for one on a GPU."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def emulated(x):
    return x.dtype in EMULATED and on_cpu(x)


# ---- PyTorch or Triton, and what the kernels share ------------------------------------------
# What memory bounds reads an operand once and writes a result once; in between all is float32
# (float64 for float64), to which numbers are converted as they are loaded. No atomics: equal bits
# in every run. What a stride or a program's number multiplies has 64 bits.

AUTO = {  # what `auto` gives to Triton. A CPU has none; inside of a compiled layer torch joins
    # memory-bound operations to their neighbours by itself. Not measured yet: python bench/gpu.py
    "cuda": ("rms_norm", "rotary", "swiglu", "cross_entropy", "attention"),
    "compiled cuda": ("cross_entropy", "attention"),
}


def by_triton(operation, x, how):
    """Does this call go to Triton? how: auto (see AUTO; not float64) | torch | triton."""
    if how != "auto":
        return how == "triton"
    device = ("compiled " if torch.compiler.is_compiling() else "") + x.device.type
    return triton is not None and x.dtype != torch.float64 and operation in AUTO.get(device, ())


def operator(schema, fake, mutates=()):
    """Makes a function an operator of torch: torch.compile puts a call of it into its graph and
    does not look inside. `fake` makes the results' shapes. Without Triton the function is left as
    it is, and not called."""
    def register(fn):
        if triton is None:
            return fn
        name = f"minimesh::{fn.__name__}"
        made = torch.library.custom_op(name, fn, mutates_args=mutates, schema=schema)
        made.register_fake(fake)
        return made

    return register


TILE = 4096  # numbers of each operand that a program holds at a time


def launch(size):
    """16 of a program's `size` numbers to a thread: two of its widest loads, if they have 2 bytes.
    (Fusing is the default; to leave it to that warns.)"""
    lanes = 64 if torch.version.hip else 32
    return dict(num_warps=min(max(size // (16 * lanes), 1), 16), enable_fp_fusion=True)


@jit
def load_wide(x, at, here):
    y = tl.load(x + at, mask=here, other=0.0)
    if y.dtype != tl.float64:
        y = y.to(tl.float32)
    return y


@jit
def store_as(x, at, y, here):
    tl.store(x + at, y.to(x.dtype.element_ty), mask=here)


def as_rows(x, D):
    x = x.reshape(-1, D)
    return x if x.stride(1) == 1 else x.contiguous()


def block_options(size):
    block = min(triton.next_power_of_2(size), TILE)
    return dict(BLOCK=block, **launch(block))


# ---- Normalisation --------------------------------------------------------------------------
def rms_norm_ref(x, weight, eps, residual=None):
    """y = cast(x / sqrt(mean(x^2) + eps)) * weight over the last dim: normalised in float32, cast
    to x.dtype, then times the weight, which is Llama's order (Zhang and Sennrich 2019; Touvron et
    al. 2023). x [..., D], weight [D] -> [..., D] in x.dtype. With a residual (shape and dtype of x)
    that of h = x + residual -> (y, h)."""
    x = x if residual is None else x + residual
    h = x.to(wide(x.dtype))
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    y = (h.to(x.dtype) * weight).to(x.dtype)
    return y if residual is None else (y, x)


@jit
def rms_norm_kernel(
    x, residual, weight, y, h, r, sx, sr, n,
    EPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    here = (row < n) & (channel < D)
    h_ = load_wide(x, row * sx + channel, here)
    if residual is not None:
        h_ += load_wide(residual, row * sr + channel, here)
        h_ = h_.to(h.dtype.element_ty)  # what is normalised is what backward will see
        tl.store(h + row * D + channel, h_, mask=here)
        h_ = h_.to(r.dtype.element_ty)
    r_ = tl.rsqrt(tl.sum(h_ * h_, 1, keep_dims=True) / D + EPS)
    tl.store(r + row, r_, mask=row < n)
    y_ = (h_ * r_).to(y.dtype.element_ty).to(r.dtype.element_ty)
    store_as(y, row * D + channel, y_ * load_wide(weight, channel, channel < D), here)


@jit
def rms_norm_backward_kernel(
    dy, h, weight, r, dh, dx, dweight, sy, sh, sd, n,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With u = h r:   dx = r (dy w - u mean(dy w u)) + dh,   dw = sum over rows of dy u, of which
    each program sums those of its rows, every num_programs-th block of them."""
    pid = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)[None, :]
    w_ = load_wide(weight, channel, channel < D)
    dw_ = tl.zeros([ROWS, BLOCK], dweight.dtype.element_ty)
    for row0 in range(pid * ROWS, n, tl.num_programs(0) * ROWS):
        row = row0 + tl.arange(0, ROWS)[:, None]
        here = (row < n) & (channel < D)
        r_ = tl.load(r + row, mask=row < n, other=0.0)
        u_ = load_wide(h, row * sh + channel, here) * r_
        dy_ = load_wide(dy, row * sy + channel, here)
        dh_ = 0.0
        if dh is not None:
            dh_ = load_wide(dh, row * sd + channel, here)
        dw_ += dy_ * u_
        dy_ *= w_
        dx_ = r_ * (dy_ - u_ * (tl.sum(dy_ * u_, 1, keep_dims=True) / D))
        store_as(dx, row * D + channel, dx_ + dh_, here)
    tl.store(dweight + pid * D + channel, tl.sum(dw_, 0, keep_dims=True), mask=channel < D)


def row_options(D):
    block = triton.next_power_of_2(D)
    rows = max(TILE // block, 1)
    return dict(D=D, ROWS=rows, BLOCK=block, **launch(rows * block))


def rms_norm_results(x, residual, *_):
    h = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), h, x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


@operator("(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
          rms_norm_results)
def rms_norm_forward(x, residual, weight, eps):
    """-> y = rms_norm(h), h = x + residual (empty if there is none), 1/rms of each row in float32.
    See rms_norm_ref."""
    D, weight = x.shape[-1], weight.contiguous()
    y, h, r = rms_norm_results(x, residual)
    if x.numel():
        x, residual = as_rows(x, D), None if residual is None else as_rows(residual, D)
        sizes = x.stride(0), 0 if residual is None else residual.stride(0), len(x)
        given = row_options(D)
        grid = (triton.cdiv(len(x), given["ROWS"]),)
        rms_norm_kernel[grid](x, residual, weight, y, h, r, *sizes, EPS=eps, **given)
    return y, h, r


@operator("(Tensor dy, Tensor h, Tensor weight, Tensor r, Tensor? dh) -> (Tensor, Tensor)",
          lambda dy, h, weight, r, dh: (h.new_empty(h.shape), r.new_empty(h.shape[-1])))
def rms_norm_backward(dy, h, weight, r, dh):
    """-> dx, with dh, the gradient that reaches h without the norm (or None), added to it; and
    dweight in float32: the sum of one part per program, of which there are as many as run at once.
    """
    D, weight, r = h.shape[-1], weight.contiguous(), r.contiguous()
    dx = h.new_empty(h.shape)
    if h.numel() == 0:
        return dx, r.new_zeros(D)
    dy, h, dh = as_rows(dy, D), as_rows(h, D), None if dh is None else as_rows(dh, D)
    sizes = dy.stride(0), h.stride(0), 0 if dh is None else dh.stride(0), len(h)
    given, most = row_options(D), 4  # in the interpreter
    if h.is_cuda:
        most = 2 * torch.cuda.get_device_properties(h.device).multi_processor_count
    parts = r.new_empty(min(triton.cdiv(len(h), given["ROWS"]), most), D)
    rms_norm_backward_kernel[(len(parts),)](dy, h, weight, r, dh, dx, parts, *sizes, **given)
    return dx, parts.sum(0)


class _RMSNorm(torch.autograd.Function):
    """With r = 1/rms, t = dy * x:   dx = r (dy w) - x r^3 (t . w) / D,   dw = sum over rows of r t.
    Both sums are matrix-vector products of t, so the whole backward reads it only twice. With a
    residual x is the sum, and what its gradient is without the norm, dh, is added to dx."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, how):
        ctx.triton = by_triton("rms_norm", x, how)
        if ctx.triton:
            y, h, r = rms_norm_forward(x, residual, weight, eps)
            h = x if residual is None else h
        else:
            h = x if residual is None else x + residual
            h_ = h.to(wide(x.dtype))
            r = torch.linalg.vector_norm(h_, dim=-1, keepdim=True)
            r = r.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            y = (h_ * r).to(x.dtype).mul_(weight)
        ctx.save_for_backward(h, weight, r)
        ctx.added = residual is not None
        return (y, h) if ctx.added else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dh=None):
        x, weight, r = ctx.saved_tensors
        if ctx.triton:
            dx, dw = rms_norm_backward(dy, x, weight, r, dh)
            return dx, dx if ctx.added else None, dw.to(weight.dtype), None, None
        D, w = x.shape[-1], weight.to(r.dtype)
        x_, dy_, r_ = (t.to(r.dtype).reshape(-1, t.shape[-1]) for t in (x, dy, r))
        t = x_ * dy_
        dw = torch.mv(t.t(), r_[:, 0])
        pull = torch.mv(t, w)[:, None] * r_.pow(3).div_(-D)
        dx = (dy_ * w).mul_(r_).addcmul_(x_, pull)
        dx = dx.view(x.shape) if dh is None else dx.view(x.shape).add_(dh)
        dx = dx.to(x.dtype)
        return dx, dx if ctx.added else None, dw.to(weight.dtype), None, None


def rms_norm(x, weight, eps, residual=None, how="auto"):
    """See rms_norm_ref."""
    return _RMSNorm.apply(x, residual, weight, eps, how)


def layer_norm(x, weight, bias, eps, residual=None):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim; bias may be None. With a
    residual, of x + residual -> (y, x + residual)."""
    x = x if residual is None else x + residual
    y = F.layer_norm(x, weight.shape, weight, bias, eps)
    return y if residual is None else (y, x)


# ---- Rotary embedding -----------------------------------------------------------------------
def rope_tables(positions_max, d_head, theta, scaling=None, dtype=torch.float32, device=None):
    """cos and sin of position * f_i, f_i = theta^(-2i/d), each [positions_max, d_head / 2].

    Made in float64 and then cast to `dtype` (float32, or float64; in bfloat16 positions past 256
    would fall together). `scaling` is Llama 3's (keys factor, low_freq_factor, high_freq_factor,
    original_max_len): channels that turn fewer than low_freq_factor times within the original
    length are slowed by `factor`, those above high_freq_factor are kept, a line joins them."""
    freq = theta ** (-torch.arange(0, d_head, 2, dtype=torch.float64, device=device) / d_head)
    if scaling is not None:
        turns = scaling["original_max_len"] * freq / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = freq * (keep + (1 - keep) / scaling["factor"])
    angle = torch.arange(positions_max, dtype=torch.float64, device=device)[:, None] * freq
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary_ref(q, k, cos, sin):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 and x2 the two halves of a head: the
    layout of Hugging Face's Llama (Su et al. 2021). q [B, T, H, d], k [B, T, Hkv, d], cos and sin
    [T, d/2] or, where positions differ between sequences, [B, T, d/2]."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for all heads

    def turn(x):
        x1, x2 = x.to(wide(x.dtype)).chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)

    return turn(q), turn(k)


@jit
def turn_heads(
    x, y, stride, H, cos, sin, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    """The heads of one token."""
    channel = tl.arange(0, BLOCK)[None, :]
    for h0 in range(0, H, HEADS):
        head = (h0 + tl.arange(0, HEADS)[:, None]).to(tl.int64)
        here = (head < H) & (channel < HALF)
        at, to = head * stride + channel, head * (2 * HALF) + channel
        x1, x2 = load_wide(x, at, here), load_wide(x, at + HALF, here)
        store_as(y, to, x1 * cos - x2 * sin, here)
        store_as(y, to + HALF, x2 * cos + x1 * sin, here)


@jit
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, sqb, sqt, sqh, skb, skt, skh, scb, sct, ssb, sst, T, H, HKV,
    SIGN: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    channel = tl.arange(0, BLOCK)[None, :]
    cos_ = load_wide(cos, b * scb + t * sct + channel, channel < HALF)
    sin_ = load_wide(sin, b * ssb + t * sst + channel, channel < HALF) * SIGN
    q += b * sqb + t * sqt
    k += b * skb + t * skt
    turn_heads(q, q_out + token * H * (2 * HALF), sqh, H, cos_, sin_, HALF, Q_HEADS, BLOCK)
    turn_heads(k, k_out + token * HKV * (2 * HALF), skh, HKV, cos_, sin_, HALF, K_HEADS, BLOCK)


def rotary_options(d, *heads):
    block = triton.next_power_of_2(d // 2)
    q, k = (min(triton.next_power_of_2(n), max(TILE // 2 // block, 1)) for n in heads)
    return dict(HALF=d // 2, BLOCK=block, Q_HEADS=q, K_HEADS=k, **launch(q * block))


@operator("(Tensor q, Tensor k, Tensor cos, Tensor sin, int sign) -> (Tensor, Tensor)",
          lambda q, k, cos, sin, sign: (q.new_empty(q.shape), k.new_empty(k.shape)))
def rotary_forward(q, k, cos, sin, sign):
    """-> q and k, new and contiguous, turned by their angles (sign 1) or back (-1: the backward).
    See rotary_ref."""
    B, T, H, d = q.shape
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if q.numel():
        cos, sin = (x.expand(B, T, -1) for x in (cos, sin))
        q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
        strides = [n for x in (q, k, cos, sin) for n in x.stride()[:-1]]
        given = dict(rotary_options(d, H, k.shape[2]), SIGN=sign)
        rotary_kernel[(B * T,)](q, k, cos, sin, q_out, k_out, *strides, T, H, k.shape[2], **given)
    return q_out, k_out


def rotate(x, cos, sin):
    """One multiply and one multiply-add over whole heads: x (cos, cos) + (x2, x1) (-sin, sin)."""
    h = x.to(wide(x.dtype))
    x1, x2 = h.chunk(2, -1)
    cos = torch.cat((cos, cos), -1).unsqueeze(-2)
    sin = torch.cat((-sin, sin), -1).unsqueeze(-2)
    return (h * cos).addcmul_(torch.cat((x2, x1), -1), sin).to(x.dtype)


class _Rotary(torch.autograd.Function):
    """A rotation's transpose is the rotation back: backward needs the tables and nothing else."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, how):
        ctx.save_for_backward(cos, sin)
        ctx.triton = by_triton("rotary", q, how)
        if ctx.triton:
            return rotary_forward(q, k, cos, sin, 1)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        if ctx.triton:
            return *rotary_forward(dq, dk, cos, sin, -1), None, None, None
        return rotate(dq, cos, -sin), rotate(dk, cos, -sin), None, None, None


def rotary(q, k, cos, sin, how="auto"):
    """See rotary_ref. -> (q, k) turned by their positions."""
    return _Rotary.apply(q, k, cos, sin, how)


# ---- Activations ----------------------------------------------------------------------------
def swiglu_ref(gate, up):
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)) (Shazeer 2020). Any shape."""
    return F.silu(gate) * up


@jit
def swiglu_kernel(gate, up, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate_ = load_wide(gate, at, at < n)
    store_as(y, at, gate_ * tl.sigmoid(gate_) * load_wide(up, at, at < n), at < n)


@jit
def swiglu_backward_kernel(dy, gate, up, dgate, dup, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy_, gate_ = load_wide(dy, at, at < n), load_wide(gate, at, at < n)
    s = tl.sigmoid(gate_)
    store_as(dup, at, dy_ * gate_ * s, at < n)
    slope = s * (1 + gate_ * (1 - s))
    store_as(dgate, at, dy_ * load_wide(up, at, at < n) * slope, at < n)


def elementwise(kernel, inputs, outputs):
    n = outputs[0].numel()
    if n:
        given = block_options(n)
        inputs = (x.contiguous() for x in inputs)
        kernel[(triton.cdiv(n, given["BLOCK"]),)](*inputs, *outputs, n, **given)
    return outputs


@operator("(Tensor gate, Tensor up) -> Tensor", lambda gate, up: gate.new_empty(gate.shape))
def swiglu_forward(gate, up):
    """See swiglu_ref."""
    return elementwise(swiglu_kernel, (gate, up), (gate.new_empty(gate.shape),))[0]


@operator("(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)",
          lambda dy, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def swiglu_backward(dy, gate, up):
    """-> dgate, dup."""
    outputs = gate.new_empty(gate.shape), up.new_empty(up.shape)
    return elementwise(swiglu_backward_kernel, (dy, gate, up), outputs)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) is made again in the backward: one pass more, one activation per layer less."""

    @staticmethod
    def forward(ctx, gate, up, how):
        ctx.save_for_backward(gate, up)
        ctx.triton = by_triton("swiglu", gate, how)
        return swiglu_forward(gate, up) if ctx.triton else F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        if ctx.triton:
            return *swiglu_backward(dy, gate, up), None
        dgate = torch.ops.aten.silu_backward(dy * up, gate)
        return dgate, F.silu(gate).mul_(dy), None


def swiglu(gate, up, how="auto"):
    """See swiglu_ref."""
    return _SwiGLU.apply(gate, up, how)


def gelu(x):
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the approximation that GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


# ---- Attention ------------------------------------------------------------------------------
SHORT = 1024  # up to this length the CPU path beats torch's flash kernel and keeps probabilities


def limits(q, k, lo, hi):
    """lo and hi as [B, Tq] int32 tensors."""
    at = torch.arange(q.shape[1], dtype=torch.int32, device=q.device).expand(q.shape[:2])
    hi = at + 1 if hi is None else hi if torch.is_tensor(hi) else torch.full_like(at, hi)
    return torch.zeros_like(at) if lo is None else lo, hi


def attention_ref(q, k, v, lo=None, hi=None, scale=None, softcap=None):
    """o_i = sum_j p_ij v_j, p_ij = exp(s_ij - lse_i), lse_i = log sum_j exp(s_ij), over the keys j
    in lo_i .. hi_i - 1, with s_ij = scale q_i . k_j, capped to softcap tanh(s_ij / softcap). Of an
    empty range o_i is 0 and lse_i -inf. q [B, Tq, H, d], k and v [B, Tk, Hkv, d], H a multiple of
    Hkv (query head h uses key head h // (H / Hkv)); lo and hi [B, Tq] integers; lo None is 0, hi
    None is i + 1 (causal, Tq = Tk), hi the number Tk is all keys; scale None is 1 / sqrt(d).
    -> o [B, Tq, H, d], lse [B, H, Tq]."""
    lo, hi = (x[:, None, :, None] for x in limits(q, k, lo, hi))
    q_, k_, v_ = (t.to(wide(q.dtype)).transpose(1, 2) for t in (q, k, v))
    k_, v_ = (t.repeat_interleave(q.shape[2] // k.shape[2], 1) for t in (k_, v_))
    key = torch.arange(k.shape[1], device=q.device)
    s = q_ @ k_.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s.masked_fill((key < lo) | (key >= hi), -math.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.clamp(min=torch.finfo(s.dtype).min).unsqueeze(-1)).exp()
    return (p @ v_).transpose(1, 2).to(q.dtype), lse


def gather_rows(x, i, j, n_kv):
    """Rows i .. j of [B, T, H, d], the heads of one key head stacked: [B n_kv, H/n_kv (j-i), d].
    So a group of query heads is one matrix and its keys and values need no copies."""
    return x[:, i:j].unflatten(2, (n_kv, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).flatten(1, 2)


def scatter_rows_(x, y, i, j, n_kv):
    """The inverse: writes y into rows i .. j of x."""
    B, _, H, d = x.shape
    y = y.view(B, n_kv, H // n_kv, j - i, d).permute(0, 3, 1, 2, 4)
    x[:, i:j].unflatten(2, (n_kv, -1)).copy_(y)


def rows_of(x, i, j, n_kv):
    """Rows i .. j of what has a number for each head, [B, H, T]: [B n_kv, H/n_kv (j-i), 1]."""
    return x[:, :, i:j].reshape(x.shape[0] * n_kv, x.shape[1] // n_kv * (j - i), 1)


def row_blocks(q, k, hi, bounds):
    """(i, j, a, b): the queries i .. j-1 see keys among a .. b-1 only."""
    rows = 1024 if q.is_cuda else 256 if q.element_size() == 2 else 64
    for i in range(0, q.shape[1], rows):
        j = min(i + rows, q.shape[1])
        a, b = 0, j if hi is None else k.shape[1]
        if bounds is not None:
            begin, end = (x[i:j] for x in bounds)
            some = begin < end
            a, b = (int(begin[some].min()), int(end[some].max())) if some.any() else (0, 0)
        yield i, j, a, b


def row_scores(q, k, lo, hi, block, scale, softcap):
    """The scores of a block of rows, -inf where a key is not seen, and d score / d (q . k) / scale.
    q [B n_kv, group (j-i), d], k [B n_kv, T, d] -> [B n_kv, group (j-i), b-a], None without cap."""
    (i, j, a, b), slope = block, None
    s = q.new_empty(q.shape[0], q.shape[1], b - a)
    s = torch.baddbmm(s, q, k[:, a:b].transpose(1, 2), beta=0, alpha=scale)
    if softcap is not None:
        s.div_(softcap).tanh_()
        slope = 1 - s.square()
        s.mul_(softcap)
    if hi is None:
        s.unflatten(1, (-1, j - i))[..., i - a :] += s.new_full((j - i, j - i), -math.inf).triu_(1)
    key = torch.arange(a, b, device=s.device)
    for limit, beyond in ((lo, torch.lt), (hi, torch.ge)):
        if torch.is_tensor(limit):
            tile = s.view(len(limit), -1, j - i, b - a)
            tile.masked_fill_(beyond(key, limit[:, i:j, None])[:, None], -math.inf)
    return s, slope


def add_product_(out, a, b, alpha=1.0):
    """out += alpha a b, batched; out may be wider than a and b. Not baddbmm_: into the strided
    slice that out is, torch would run it one matrix at a time."""
    out.add_(torch.bmm(a, b), alpha=alpha)


def softmax_(s):
    return torch.softmax(s, -1, out=s) if s.device.type == "cpu" else s.softmax(-1)


def rows_forward(q, k, v, lo, hi, bounds, scale, softcap, kept, with_lse=True):
    """Blocks of queries against the keys that any of them sees: most of what is masked is never
    computed, and no T x T matrix exists. p goes to the list `kept`, if there is one."""
    n_kv = k.shape[2]
    kt, vt = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v))  # [B n_kv, T, d]
    o = torch.empty_like(q)  # with the strides of q, which tp has chosen
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype)) if with_lse else None
    for i, j, a, b in row_blocks(q, k, hi, bounds):
        if a == b:
            o[:, i:j], lse[:, :, i:j] = 0, -math.inf
            continue
        p, _ = row_scores(gather_rows(q, i, j, n_kv), kt, lo, hi, (i, j, a, b), scale, softcap)
        if with_lse:
            top = p.amax(-1, keepdim=True).clamp_(min=torch.finfo(p.dtype).min)  # of none: not -inf
            total = p.sub_(top).exp_().sum(-1, keepdim=True, dtype=lse.dtype)
            lse[:, :, i:j] = (total.log() + top).view(lse[:, :, i:j].shape)
            p.div_(total.clamp_(min=1))  # the largest has given 1
        else:
            p = softmax_(p)
        scatter_rows_(o, torch.bmm(p, vt[:, a:b]), i, j, n_kv)
        if kept is not None:
            kept.append(p)
    return o, lse


def rows_backward(do, q, k, v, lse, delta, lo, hi, bounds, scale, softcap, kept):
    """p = exp(s - lse)   dv = p^T do   dp = do v^T   ds = p (dp - delta)   dq = ds k   dk = ds^T q.
    p is made again, unless it was kept."""
    (B, _, _, d), n_kv = q.shape, k.shape[2]
    kt, vt = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v))
    dk, dv = (t.new_zeros(t.shape, dtype=wide(t.dtype)) for t in (kt, vt))
    dq = torch.zeros_like(q)
    lse = None if lse is None else lse.clamp(min=torch.finfo(lse.dtype).min)
    blocks = (block for block in row_blocks(q, k, hi, bounds) if block[2] < block[3])
    for n, (i, j, a, b) in enumerate(blocks):
        qb, dob = gather_rows(q, i, j, n_kv), gather_rows(do, i, j, n_kv)
        if kept:
            p, slope = kept[n], None
        else:
            p, slope = row_scores(qb, kt, lo, hi, (i, j, a, b), scale, softcap)
            p = softmax_(p) if lse is None else p.sub_(rows_of(lse, i, j, n_kv)).exp_()
        ds = torch.bmm(dob, vt[:, a:b].transpose(1, 2))
        add_product_(dv[:, a:b], p.transpose(1, 2), dob)
        ds.sub_(rows_of(delta, i, j, n_kv)).mul_(p)
        ds = ds if slope is None else ds.mul_(slope)
        scatter_rows_(dq, torch.bmm(ds, kt[:, a:b]), i, j, n_kv)
        add_product_(dk[:, a:b], ds.transpose(1, 2), qb, alpha=scale)
    return dq.mul_(scale), *(t.view(B, n_kv, k.shape[1], d).transpose(1, 2) for t in (dk, dv))


def fused(q, k, lo, hi, softcap):
    """Is this for torch's own kernel: the plain causal or full square, and on a CPU a long one?"""
    plain = lo is None and not torch.is_tensor(hi) and softcap is None
    if q.is_cuda:
        return plain and q.element_size() == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return plain and (not on_cpu(q) or max(q.shape[1], k.shape[1]) > SHORT)


def fused_forward(q, k, v, causal, scale):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    op = torch.ops.aten._scaled_dot_product_flash_attention
    op = op if q.is_cuda else torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = op(q, k, v, 0.0, causal, scale=scale)[:2]
    return o.transpose(1, 2), lse


def fused_backward(do, q, k, v, o, lse, causal, scale):
    do, q, k, v, o = (t.transpose(1, 2) for t in (do, q, k, v, o))
    if q.is_cuda:
        none = q.new_empty(0, dtype=torch.int64)  # the random state of a dropout that there is not
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none,
            scale=scale)
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=scale)
    return [g.transpose(1, 2) for g in grads]


# The same in Triton: no T x T matrix in either direction; blocks of keys that no query of a block
# sees are skipped. Sums are held in float32, each by one program: no atomics, so the same bits in
# every run. Scores are in units of log 2 inside, as the hardware has exp2.


@jit
def load_tile(x, stride, n, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS rows of x, of D channels each; zeros from row n and from channel D on."""
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    return tl.load(x + row * stride + channel, mask=(row < n) & (channel < D), other=0.0)


@jit
def store_tile(x, stride, n, y, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
    y = y.to(x.dtype.element_ty)
    tl.store(x + row * stride + channel, y, mask=(row < n) & (channel < D))


@jit
def score(qk, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """q . k -> the score / log 2, and its slope: d score / d (scale q . k)."""
    if SOFTCAP is None:
        s, slope = qk * (SCALE * 1.4426950408889634), 1.0
    else:
        t = 1 - 2 / (1 + tl.exp2(qk * (SCALE / SOFTCAP * 2.8853900817779268)))  # tanh
        s, slope = t * (SOFTCAP * 1.4426950408889634), 1 - t * t
    return s, slope


@jit
def query_block(lo, hi, Tq, Tk, H, BLOCK_M: tl.constexpr):
    """This program's block of queries: sequence, head, rows, their intervals cut to the keys that
    there are, and the smallest range that holds these. 64 bits for what long strides multiply."""
    n = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    b, h = (pid // n // H).to(tl.int64), (pid // n % H).to(tl.int64)
    i0 = ((n - 1 - pid % n) * BLOCK_M).to(tl.int64)  # last first: if causal, they take longest
    row = i0 + tl.arange(0, BLOCK_M)
    lo_ = tl.maximum(tl.load(lo + b * Tq + row, mask=row < Tq, other=0), 0)
    hi_ = tl.minimum(tl.load(hi + b * Tq + row, mask=row < Tq, other=0), Tk)
    start = tl.min(tl.where(lo_ < hi_, lo_, Tk), 0)
    end = tl.max(tl.where(lo_ < hi_, hi_, 0), 0)
    return b, h, i0, row, lo_[:, None], hi_[:, None], start, end


@jit
def forward_kernel(
    q, k, v, lo, hi, o, lse, sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, Tq, Tk, H, GROUP,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: an online softmax over the keys that any of them sees."""
    b, h, i0, row, lo_, hi_, start, end = query_block(lo, hi, Tq, Tk, H, BLOCK_M)
    q_ = load_tile(q + b * sqb + i0 * sqt + h * sqh, sqt, Tq - i0, D, BLOCK_M, BLOCK_D)
    k += b * skb + start.to(tl.int64) * skt + h // GROUP * skh
    v += b * svb + start.to(tl.int64) * svt + h // GROUP * svh
    key = tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], lse.dtype.element_ty)
    total = tl.zeros([BLOCK_M], lse.dtype.element_ty)
    top = total - 1e30  # not -inf: for a row that has seen no key yet, exp2(-inf) and not nan
    for j0 in range(start, end, BLOCK_N):
        k_ = load_tile(k, skt, end - j0, D, BLOCK_N, BLOCK_D)
        v_ = load_tile(v, svt, end - j0, D, BLOCK_N, BLOCK_D)
        s, _ = score(tl.dot(q_, tl.trans(k_), input_precision="ieee"), SCALE, SOFTCAP)
        s = tl.where((key >= lo_ - j0) & (key < hi_ - j0), s, float("-inf"))
        raised = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - raised[:, None])
        fade = tl.exp2(top - raised)
        top, total = raised, total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v_.dtype), v_, acc * fade[:, None], input_precision="ieee")
        k += BLOCK_N * skt
        v += BLOCK_N * svt
    some = total > 0
    total = tl.where(some, total, 1.0)
    out = o + ((b * Tq + i0) * H + h) * D
    store_tile(out, H * D, Tq - i0, acc / total[:, None], D, BLOCK_M, BLOCK_D)
    top = tl.where(some, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + (b * H + h) * Tq + row, top, mask=row < Tq)


@jit
def dq_kernel(
    q, k, v, do, lo, hi, lse, delta, dq, sqb, sqt, sqh, skb, skt, skh, svb, svt, svh,
    sob, sot, soh, Tq, Tk, H, GROUP,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same loop as the forward's."""
    b, h, i0, row, lo_, hi_, start, end = query_block(lo, hi, Tq, Tk, H, BLOCK_M)
    q_ = load_tile(q + b * sqb + i0 * sqt + h * sqh, sqt, Tq - i0, D, BLOCK_M, BLOCK_D)
    do_ = load_tile(do + b * sob + i0 * sot + h * soh, sot, Tq - i0, D, BLOCK_M, BLOCK_D)
    at = (b * H + h) * Tq + row
    lse_ = tl.load(lse + at, mask=row < Tq, other=0.0)[:, None] * 1.4426950408889634
    delta_ = tl.load(delta + at, mask=row < Tq, other=0.0)[:, None]
    k += b * skb + start.to(tl.int64) * skt + h // GROUP * skh
    v += b * svb + start.to(tl.int64) * svt + h // GROUP * svh
    key = tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dq.dtype.element_ty)
    for j0 in range(start, end, BLOCK_N):
        k_ = load_tile(k, skt, end - j0, D, BLOCK_N, BLOCK_D)
        v_ = load_tile(v, svt, end - j0, D, BLOCK_N, BLOCK_D)
        s, slope = score(tl.dot(q_, tl.trans(k_), input_precision="ieee"), SCALE, SOFTCAP)
        p = tl.where((key >= lo_ - j0) & (key < hi_ - j0), tl.exp2(s - lse_), 0.0)
        ds = p * (tl.dot(do_, tl.trans(v_), input_precision="ieee") - delta_) * slope
        acc = tl.dot(ds.to(k_.dtype), k_, acc, input_precision="ieee")
        k += BLOCK_N * skt
        v += BLOCK_N * svt
    out = dq + ((b * Tq + i0) * H + h) * D
    store_tile(out, H * D, Tq - i0, acc * SCALE, D, BLOCK_M, BLOCK_D)


@jit
def dkv_kernel(
    q, k, v, do, lo, hi, lse, delta, first, last, dk, dv, sqb, sqt, sqh, skb, skt, skh,
    svb, svt, svh, sob, sot, soh, Tq, Tk, H, GROUP,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key head: a loop over its query heads and, in each, over the queries
    `first` to `last`, with the scores turned, [keys, queries], as the last products want them."""
    n = tl.cdiv(Tk, BLOCK_N)
    pid = tl.program_id(0)
    b, g = (pid // n // (H // GROUP)).to(tl.int64), (pid // n % (H // GROUP)).to(tl.int64)
    j0 = (pid % n * BLOCK_N).to(tl.int64)
    start, end = tl.load(first + b * n + pid % n), tl.load(last + b * n + pid % n)
    k_ = load_tile(k + b * skb + j0 * skt + g * skh, skt, Tk - j0, D, BLOCK_N, BLOCK_D)
    v_ = load_tile(v + b * svb + j0 * svt + g * svh, svt, Tk - j0, D, BLOCK_N, BLOCK_D)
    key = (pid % n * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    dk_ = tl.zeros([BLOCK_N, BLOCK_D], dk.dtype.element_ty)
    dv_ = tl.zeros([BLOCK_N, BLOCK_D], dv.dtype.element_ty)
    for h in range(g * GROUP, g * GROUP + GROUP):
        qh = q + b * sqb + start.to(tl.int64) * sqt + h * sqh
        doh = do + b * sob + start.to(tl.int64) * sot + h * soh
        for i0 in range(start, end, BLOCK_M):
            q_ = load_tile(qh, sqt, end - i0, D, BLOCK_M, BLOCK_D)
            do_ = load_tile(doh, sot, end - i0, D, BLOCK_M, BLOCK_D)
            row = i0 + tl.arange(0, BLOCK_M)[None, :]
            lo_ = tl.load(lo + b * Tq + row, mask=row < end, other=0)
            hi_ = tl.minimum(tl.load(hi + b * Tq + row, mask=row < end, other=0), Tk)
            lse_ = tl.load(lse + (b * H + h) * Tq + row, mask=row < end, other=0.0)
            delta_ = tl.load(delta + (b * H + h) * Tq + row, mask=row < end, other=0.0)
            s, slope = score(tl.dot(k_, tl.trans(q_), input_precision="ieee"), SCALE, SOFTCAP)
            p = tl.exp2(s - lse_ * 1.4426950408889634)
            p = tl.where((key >= lo_) & (key < hi_), p, 0.0)
            dv_ = tl.dot(p.to(do_.dtype), do_, dv_, input_precision="ieee")
            ds = p * (tl.dot(v_, tl.trans(do_), input_precision="ieee") - delta_) * slope
            dk_ = tl.dot(ds.to(q_.dtype), q_, dk_, input_precision="ieee")
            qh += BLOCK_M * sqt
            doh += BLOCK_M * sot
    stride = H // GROUP * D
    out = (b * Tk + j0) * stride + g * D
    store_tile(dk + out, stride, Tk - j0, dk_ * SCALE, D, BLOCK_N, BLOCK_D)
    store_tile(dv + out, stride, Tk - j0, dv_, D, BLOCK_N, BLOCK_D)


def flash_options(kernel, d, dtype, arch):
    """Block sizes and launch options; arch is 80, 90, .. or "hip". By what the compilers report:
    next to nothing spills and, at 2 bytes, shared memory stays under 99 KB (227 on 90 and 100)."""
    pad = max(16, triton.next_power_of_2(d))
    hip, big = arch == "hip", arch in (90, 100)
    warps, stages = (4, 1 + (kernel == "forward")) if hip else (8, 3)
    if dtype.itemsize > 2:
        M = N = 32 if pad * dtype.itemsize <= 512 else 16
        warps, stages = 4 if hip or M == 16 else 8, 1
    elif pad > 128:
        M, N, stages = 64 if kernel == "forward" else 32, 32, 1 if hip else 2
    elif kernel == "forward":
        M, N = 128, 32 if hip else 64
    elif kernel == "dq":
        M, N = 64 if hip else 128, 64 if big else 32
    else:
        M, N = 32, 128 if big else 64
    return dict(D=d, BLOCK_D=pad, BLOCK_M=M, BLOCK_N=N, num_warps=warps, num_stages=stages,
                enable_fp_fusion=True)  # fmt: skip


def query_ranges(lo, hi, Tk, block):
    """For each block of keys the first query that may see one, and the first from which on none
    does -> two of [B, blocks]. Exact where lo and hi never fall; else with some that see none. (A
    test in the kernel's loop would be exact always, but its loads would not run ahead any more.)
    """
    some = lo < hi
    reach = torch.where(some, hi, 0).cummax(1).values
    begin = torch.where(some, lo, Tk + block).flip(1).cummin(1).values.flip(1)
    edge = torch.arange(0, Tk, block, dtype=lo.dtype, device=lo.device)
    edge = edge.expand(len(lo), -1).contiguous()
    first = torch.searchsorted(reach, edge, right=True, out_int32=True)
    return first, torch.searchsorted(begin, edge + block, out_int32=True)


def flash_arguments(kernel, scale, softcap, q, k, *others):
    """-> the strides and sizes that end a kernel's arguments, and its options."""
    arch = 80  # also for the interpreter
    if q.is_cuda:
        arch = "hip" if torch.version.hip else 10 * torch.cuda.get_device_capability(q.device)[0]
    strides = [n for x in (q, k, *others) for n in x.stride()[:3]]
    sizes = [q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]]
    given = flash_options(kernel, q.shape[3], q.dtype, arch)
    return strides + sizes, dict(given, SCALE=scale, SOFTCAP=softcap)


@operator("(Tensor q, Tensor k, Tensor v, Tensor lo, Tensor hi, float scale, float? softcap) -> "
          "(Tensor, Tensor)", lambda q, k, v, *_: (q.new_empty(q.shape), q.new_empty(
              q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))))
def flash_forward(q, k, v, lo, hi, scale, softcap):
    """-> o, contiguous, and lse. A query that sees no key has o = 0 and lse = -inf."""
    B, Tq, H, _ = q.shape
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    lo, hi = (x.expand(B, -1).contiguous() for x in (lo, hi))
    o, lse = q.new_empty(q.shape), q.new_empty(B, H, Tq, dtype=wide(q.dtype))
    numbers, given = flash_arguments("forward", scale, softcap, q, k, v)
    grid = (B * H * triton.cdiv(Tq, given["BLOCK_M"]),)
    forward_kernel[grid](q, k, v, lo, hi, o, lse, *numbers, **given)
    return o, lse


@operator("(Tensor do, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor delta, Tensor lo, "
          "Tensor hi, float scale, float? softcap) -> (Tensor, Tensor, Tensor)",
          lambda do, q, k, v, lse, *_: tuple(
              x.new_empty(x.shape, dtype=lse.dtype) for x in (q, k, v)))
def flash_backward(do, q, k, v, lse, delta, lo, hi, scale, softcap):
    """-> dq, dk, dv in the dtype of lse. See attention_backward."""
    B, Tq, H, _ = q.shape
    q, k, v, do = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v, do))
    lo, hi, lse, delta = (x.expand(B, *x.shape[1:]).contiguous() for x in (lo, hi, lse, delta))
    dq, dk, dv = (torch.empty(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
    numbers, given = flash_arguments("dq", scale, softcap, q, k, v, do)
    grid = (B * H * triton.cdiv(Tq, given["BLOCK_M"]),)
    dq_kernel[grid](q, k, v, do, lo, hi, lse, delta, dq, *numbers, **given)
    numbers, given = flash_arguments("dkv", scale, softcap, q, k, v, do)
    first, last = query_ranges(lo, hi, k.shape[1], given["BLOCK_N"])
    grid = (k.shape[2] * first.numel(),)
    dkv_kernel[grid](q, k, v, do, lo, hi, lse, delta, first, last, dk, dv, *numbers, **given)
    return dq, dk, dv


def attention_forward(q, k, v, lo=None, hi=None, bounds=None, scale=None, softcap=None, kept=None,
                      with_lse=True, how="auto"):
    """See attention: (o, lse) without autograd, o in q.dtype or wider."""
    keys = q.shape[1] if hi is None else k.shape[1] if torch.is_tensor(hi) else hi
    assert keys == k.shape[1], (q.shape, k.shape, hi)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if emulated(q):
        q, k, v = q.float(), k.float(), v.float()
    if how != "triton" and fused(q, k, lo, hi, softcap):
        return fused_forward(q, k, v, hi is None, scale)
    if by_triton("attention", q, how):
        return flash_forward(q, k, v, *limits(q, k, lo, hi), scale, softcap)
    with_lse = with_lse or hi is not None  # which also keeps empty rows from being nan
    return rows_forward(q, k, v, lo, hi, bounds, scale, softcap, kept, with_lse)


def attention_backward(do, q, k, v, o, lse, delta, lo=None, hi=None, bounds=None, scale=None,
                       softcap=None, kept=(), how="auto"):
    """(dq, dk, dv), each in q.dtype or wider. o and lse may be merged from more keys than these:
    the part of the gradients that goes through these keys. delta [B, H, Tq]: see row_sums; where
    the gradient of lse was subtracted from it, o is to be None, as torch's kernel does not know."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if emulated(q):
        do, q, k, v = do.float(), q.float(), k.float(), v.float()
        o = None if o is None else o.float()
    if how != "triton" and o is not None and fused(q, k, lo, hi, softcap):
        return fused_backward(do, q, k, v, o, lse, hi is None, scale)
    if by_triton("attention", q, how):
        return flash_backward(do, q, k, v, lse, delta, *limits(q, k, lo, hi), scale, softcap)
    delta = delta.to(q.dtype)
    return rows_backward(do, q, k, v, lse, delta, lo, hi, bounds, scale, softcap, kept)


def row_sums(do, o):
    """sum over channels of do o, [B, T, H, d] -> [B, H, T] in float32: what a row's dp has on
    average, which the softmax takes away."""
    return (do.to(wide(o.dtype)) * o).sum(-1).transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, lo, hi, keep, with_lse, options, how):
        kept = [] if keep and max(q.shape[1], k.shape[1]) <= SHORT else None
        o, lse = attention_forward(q, k, v, lo, hi, *options, kept, with_lse, how)
        o = o.to(q.dtype)
        hi_ = hi if torch.is_tensor(hi) else None
        ctx.save_for_backward(q, k, v, o, lse, lo, hi_, *(kept or ()))
        ctx.hi, ctx.options, ctx.how = None if torch.is_tensor(hi) else hi, options, how
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dlse):
        q, k, v, o, lse, lo, hi, *kept = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        delta = row_sums(do, o)
        if dlse is not None:
            delta, o = delta - dlse, None
        hi = ctx.hi if hi is None else hi
        grads = attention_backward(do, q, k, v, o, lse, delta, lo, hi, *ctx.options, kept, ctx.how)
        return *(g.to(q.dtype) for g in grads), *[None] * 6


def attention(q, k, v, lo=None, hi=None, bounds=None, scale=None, softcap=None, keep=True,
              with_lse=True, how="auto"):
    """See attention_ref; lo and hi [1, Tq] are those of all sequences. The plain causal or full
    square goes to torch's fused kernel, except short ones on a CPU, where row blocks are faster;
    intervals go to Triton on a GPU, in row blocks on a CPU. `bounds` is what the host knows of lo
    and hi: two numpy arrays [Tq], the lowest lo and the highest hi in the batch; row blocks do not
    compute keys outside. `keep`: row blocks of a short sequence keep their probabilities for the
    backward (T^2 / 2 per head); without it they are made again. Without `with_lse` the log-sum-exp
    may be None, which saves row blocks two passes."""
    keep = keep and softcap is None
    return _Attention.apply(q, k, v, lo, hi, keep, with_lse, (bounds, scale, softcap), how)


# ---- Linear + cross-entropy -----------------------------------------------------------------
# of a chunk of tokens, over a vocabulary that may be spread over ranks
def linear_cross_entropy_ref(x, weight, targets, softcap=None, z_loss=0.0):
    """Sum over the counted rows of lse_i - z_i[target_i] + z_loss lse_i^2, where z = x W^T (capped
    to softcap tanh(z / softcap)) and lse_i = log sum_v exp(z_iv). A row whose target is -100 does
    not count. x [N, D], weight [V, D], targets [N] -> scalar."""
    z = (x @ weight.t()).to(wide(x.dtype))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    lse, counted = z.logsumexp(-1), targets != IGNORE
    hit = z.gather(1, torch.where(counted, targets, 0)[:, None])[:, 0]
    return torch.where(counted, lse - hit + z_loss * lse.square(), 0.0).sum()


@jit
def capped(z, SOFTCAP: tl.constexpr):
    """-> softcap tanh(z / softcap) and its slope."""
    slope = 1.0
    if SOFTCAP is not None:
        t = 1 - 2 / (1 + tl.exp(z * (2 / SOFTCAP)))  # tanh
        z, slope = t * SOFTCAP, 1 - t * t
    return z, slope


@jit
def ce_local_kernel(
    logits, local, m, s, hit, stride, V, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: an online softmax's sums."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], m.dtype.element_ty)
    top = tl.full([], -1e30, m.dtype.element_ty)  # not -inf, from which -inf may not be taken
    for j0 in tl.range(0, V, BLOCK, num_stages=3):
        z, _ = capped(load_wide(logits + j0, column, column < V - j0), SOFTCAP)
        z = tl.where(column < V - j0, z, float("-inf"))
        raised = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - raised) + tl.exp(z - raised)
        top = raised
    at = tl.load(local + row)
    z, _ = capped(load_wide(logits, at, (at >= 0) & (at < V)), SOFTCAP)  # of 0 it is 0
    tl.store(m + row, top)
    tl.store(s + row, tl.sum(total, 0))
    tl.store(hit + row, z)


@jit
def ce_grad_kernel(
    logits, local, lse, factor, stride, V,
    SOFTCAP: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one row. Rows that do not count are not even read."""
    blocks = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at, lse_, factor_ = tl.load(local + row), tl.load(lse + row), tl.load(factor + row)
    at = tl.where((at >= 0) & (at < V), at, -1).to(tl.int32)  # columns have 32 bits
    end = tl.where(factor_ != 0, V, 0)
    logits += row * stride
    z, slope = capped(load_wide(logits, column, column < end), SOFTCAP)
    g = tl.exp(z - lse_) * (1 + 2 * Z_LOSS * lse_) - tl.where(column == at, 1.0, 0.0)
    store_as(logits, column, tl.where(column < end, factor_ * g * slope, 0.0), column < V)


def row_factors(logits, *_):
    return tuple(logits.new_empty(len(logits), dtype=wide(logits.dtype)) for _ in range(3))


@operator("(Tensor logits, Tensor local, float? softcap) -> (Tensor, Tensor, Tensor)", row_factors)
def ce_local_triton(logits, local, softcap):
    """See ce_local_, whose m, s and hit these are; the logits are read once and left."""
    n, V = logits.shape
    m, s, hit = row_factors(logits)
    if n == 0 or V == 0:
        return m.fill_(-math.inf), s.zero_(), hit.zero_()
    logits, local = as_rows(logits, V), local.contiguous()
    given = dict(block_options(V), SOFTCAP=softcap)
    ce_local_kernel[(n,)](logits, local, m, s, hit, logits.stride(0), V, **given)
    return m, s, hit


@operator("(Tensor(a!) logits, Tensor local, Tensor lse, Tensor factor, float? softcap, "
          "float z_loss) -> ()", lambda *_: None, mutates=("logits",))
def ce_grad_triton_(logits, local, lse, factor, softcap, z_loss):
    """Overwrites the logits by the gradient with respect to them,

        factor_i (exp(z_iv - lse_i) (1 + 2 z_loss lse_i) - [v = local_i])   (times d z / d logit)

    where lse_i is that of the whole vocabulary. In a row whose factor is 0 it is exactly 0."""
    n, V = logits.shape
    if n and V:
        rows = as_rows(logits, V)
        given = dict(block_options(V), SOFTCAP=softcap, Z_LOSS=z_loss)
        lse, factor = (x.to(wide(logits.dtype)).contiguous() for x in (lse, factor))
        local = local.contiguous()
        grid = (n * triton.cdiv(V, given["BLOCK"]),)
        ce_grad_kernel[grid](rows, local, lse, factor, rows.stride(0), V, **given)
        if rows.data_ptr() != logits.data_ptr():
            logits.copy_(rows)


def ce_local_(logits, prob, local, softcap, tile):
    """First phase, no communication. logits [n, V] of this rank's columns -> prob [n, V], their
    softmax over these columns alone (prob may be logits itself); and per row, in float32: the
    largest logit m, the sum of exp(logit - m), and the target's logit (0 where `local`, the target
    as a column here, is on another rank). `tile` is a small float32 buffer, so that narrow logits
    are widened a few rows at a time within the cache."""
    n, V = logits.shape
    kind = wide(logits.dtype)
    m, s, hit = logits.new_empty((3, n), dtype=kind).unbind()
    if V == 0:  # a rank past the end of a small vocabulary
        return m.fill_(-math.inf), s.zero_(), hit.zero_()
    own = (local >= 0) & (local < V)
    hit.copy_(logits.gather(1, torch.where(own, local, 0)[:, None])[:, 0])
    rows = n if tile is None else tile.shape[0]
    for i in range(0, n, max(rows, 1)):
        z, p = logits[i : i + rows], prob[i : i + rows]
        f = (p if tile is None else tile[: len(z)]).copy_(z)  # nothing, where they are one
        if softcap is not None:
            f.div_(softcap).tanh_().mul_(softcap)
        m[i : i + rows] = f.amax(-1)
        f = torch.softmax(f, -1, out=f) if f.device.type == "cpu" else f.softmax(-1)
        s[i : i + rows] = f.amax(-1).reciprocal_()  # the largest is exp(0) / sum
        if f is not p:
            p.copy_(f)
    if softcap is not None:
        hit.div_(softcap).tanh_().mul_(softcap)
    return m, s, hit.mul_(own)


def ce_grad_(prob, logits, local, lse, mass, hit, softcap, z_loss, tile):
    """Last phase: writes Q over prob and returns row factors r [n] such that the gradient of the
    loss with respect to this rank's logits is r_i Q_i. Row factors are cheaper applied to the
    products' D-wide operands than to V columns: one rank without z-loss then has no pass left.

        d loss_i / d z_iv = r_i prob_iv - [v = target_i],   r_i = mass_i (1 + 2 z_loss lse_i)

    where mass is the share of the whole softmax that lies in this rank's columns. The target's
    entry is therefore (p a - 1) / r, with r held off zero: where r is below 1e-20 no digit of the
    gradient comes from it. Float16 has no room for 1 / r: there r is multiplied in."""
    n, V = prob.shape
    a = 1 + 2 * z_loss * lse
    r = mass * a
    r = torch.where(r.abs() < 1e-20, 1e-20, r)
    if V == 0:
        return r
    own = (local >= 0) & (local < V)
    column = torch.where(own, local, 0)[:, None]
    if prob.dtype == torch.float16:
        prob.mul_(r[:, None])
        r = torch.ones_like(r)
    entry = ((hit - lse).exp() * a - 1) / r
    entry = torch.where(own, entry.to(prob.dtype), prob.gather(1, column)[:, 0])
    prob.scatter_(1, column, entry[:, None])
    if softcap is not None:  # d capped / d raw = 1 - tanh^2
        rows = n if tile is None else tile.shape[0]
        for i in range(0, n, max(rows, 1)):
            f = logits[i : i + rows].to(lse.dtype).div_(softcap).tanh_()
            prob[i : i + rows].mul_(f.square_().neg_().add_(1))
    return r


def add_weight_grad_(acc, g, x, scratch):
    """acc [V, D] += g^T x, g [n, V], x [n, D]. Into a wider accumulator a CPU adds the product in
    blocks that stay in the cache; elsewhere one product is made and added."""
    if acc.dtype == x.dtype:
        acc.addmm_(g.t(), x)
    elif not on_cpu(acc):
        acc.add_(g.t() @ x)
    else:
        for i in range(0, acc.shape[0], 4096):
            part = acc[i : i + 4096]
            out = kept(scratch, "product", part.shape, x)
            part.add_(torch.mm(g[:, i : i + 4096].t(), x, out=out))


def kept(scratch, name, shape, like):
    """A buffer from the caller's dict, grown as needed. The C allocator returns blocks past 32 MB
    to the kernel when they are freed, so that fresh ones cost more in page faults than the loss."""
    size, old = math.prod(shape), scratch.get(name)
    if old is None or old.numel() < size or old.dtype != like.dtype or old.device != like.device:
        old = scratch[name] = like.new_empty(size)
    return old[:size].view(shape)


def ce_weight(weight):
    """The weight in the dtype that the products of the loss run in, once for all chunks."""
    return weight.float() if emulated(weight) else weight


def ce_forward(x, weight, local, softcap, scratch, how="auto"):
    """The logits of a chunk: x [n, D], weight [V, D] (this rank's rows of it) -> their row factors
    (m, s, hit), see ce_local_, and what ce_backward needs of them. `local` [n]: the targets as
    rows of this weight. `scratch` is a dict in which buffers live from call to call."""
    V, kind, tile, dtype = weight.shape[0], wide(x.dtype), None, x.dtype
    x = x.to(weight.dtype)
    z = torch.mm(x, weight.t(), out=kept(scratch, "logits", (len(x), V), x))
    if by_triton("cross_entropy", z, how):
        sums = ce_local_triton(z, local, softcap)
        return sums, (x, weight, local, z, None, tile, softcap, scratch, dtype)
    p = z if softcap is None else kept(scratch, "prob", z.shape, z)
    if x.dtype != kind:
        rows = 16 if on_cpu(x) else len(x)
        tile = kept(scratch, "tile", (rows, V), x.new_empty(0, dtype=kind))
    m, s, hit = ce_local_(z, p, local, softcap, tile)
    return (m, s, hit), (x, weight, local, z, p, tile, softcap, scratch, dtype)


def ce_backward(state, m, s, hit, lse, factor, z_loss, weight_grad):
    """factor_i times the gradient of the chunk's rows: returns that of x (partial: of this rank's
    rows of the weight) and adds the weight's to `weight_grad`. m, s are this rank's, hit and lse
    those of the whole vocabulary; rows whose factor is 0 do not count."""
    x, weight, local, z, p, tile, softcap, scratch, dtype = state
    if p is None:  # Triton has left the logits as they are
        ce_grad_triton_(z, local, lse, factor, softcap, z_loss)
        add_weight_grad_(weight_grad, z, x, scratch)
        return torch.mm(z, weight).to(dtype)
    mass = s * (m - lse).exp()
    r = ce_grad_(p, z, local, lse, mass, hit, softcap, z_loss, tile)
    r = torch.where(factor == 0, 0.0, r * factor)[:, None]
    add_weight_grad_(weight_grad, p, (x * r).to(x.dtype), scratch)
    return torch.mm(p, weight).mul_(r).to(dtype)


def main():
    """Hold each operation to its definition: the largest difference of the outputs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 48, heads, 16) for heads in (4, 2, 2))
    x, w, gate = torch.randn(96, 64), torch.randn(64), torch.randn(96, 64)
    table, targets = torch.randn(1000, 64), torch.randint(1000, (96,))
    cos, sin = rope_tables(48, 16, 10000.0)
    (m, s, hit), _ = ce_forward(x, table, targets, None, {})
    pairs = [
        ("rms_norm", rms_norm(x, w, 1e-5), rms_norm_ref(x, w, 1e-5)),
        ("rotary", rotary(q, k, cos, sin)[0], rotary_ref(q, k, cos, sin)[0]),
        ("swiglu", swiglu(gate, x), swiglu_ref(gate, x)),
        ("attention", attention(q, k, v)[0], attention_ref(q, k, v)[0]),
        ("cross-entropy", (m + s.log() - hit).sum(), linear_cross_entropy_ref(x, table, targets)),
    ]
    print("operation              largest value    largest difference from the definition")
    for name, got, want in pairs:
        print(f"{name:<22} {want.abs().max():13.5f} {(got - want).abs().max():16.2e}")


if __name__ == "__main__":
    main()
