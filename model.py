"""The transformer, written once for every layout.

A model is a list of blocks (embedding, layers, head); each maps [B, T, D] to [B, T, D]:

    tokens -> embed -> layer 0 -> ... -> layer L-1 -> head -> loss

    layer:   x ----+--> norm -> enter: q k v -> attention -> o -> leave --(+)--+--> ...
                   |                                                      |    |
                   +------------------------------------------------------+    |
             ... --+--> norm -> enter: gate up -> swiglu -> down -> leave --(+)--> x
                   +--------------------------------------------------------+

Tensor parallelism is the four calls named enter and leave: between them every rank holds the whole
sequence and its share of the heads and of the MLP; outside them every rank holds its share of the
sequence. With one rank enter is the plain products, leave does nothing, and what remains is the
plain model. With context parallelism "the sequence" is a rank's part of it everywhere but in
attention, which is then that over a ring of ranks, or by heads.

The choices in the config make it GPT-2 (layernorm, learned positions, gelu, bias, tied), Llama
(rmsnorm, rotary, swiglu, grouped heads) or Qwen3 (and qk_norm).

    python model.py                      table of the default model's parameters, FLOPs per token
    python model.py configs/gpt2-124m.yaml
    python model.py sample RUN_OR_CHECKPOINT "def main(" [--temperature 0.8 --top-k 50 --top-p 0.9]
"""

import argparse
import dataclasses
import math
import pathlib
import sys
from collections import Counter
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
import parallel


@dataclasses.dataclass
class ModelConfig:
    """The section `model` of config.yaml, which has a remark on each key. Raises ValueError."""

    n_layer: int
    d_model: int
    n_head: int
    n_kv_head: int
    d_head: int | None
    d_ff: int
    window: int | list | None
    vocab_size: int
    max_len: int
    norm: str
    norm_eps: float
    positions: str
    rope_theta: float
    rope_scaling: dict | None
    activation: str
    bias: bool
    tied: bool
    qk_norm: bool
    dropout: float
    logit_softcap: float | None
    z_loss: float
    init_std: float
    depth_init: bool

    def __post_init__(self):
        if self.d_head is None:
            check(self.n_head > 0 and self.d_model % self.n_head == 0, "model.n_head", self.n_head,
                  f"must divide model.d_model = {self.d_model}, or set model.d_head")
            self.d_head = self.d_model // self.n_head
        for key in ("n_layer", "d_model", "n_head", "n_kv_head", "d_head", "d_ff", "vocab_size",
                    "max_len"):
            check(getattr(self, key) >= 1, f"model.{key}", getattr(self, key), "must be at least 1")
        check(self.n_head % self.n_kv_head == 0, "model.n_kv_head", self.n_kv_head,
              f"must divide model.n_head = {self.n_head}")
        check(0 <= self.dropout < 1, "model.dropout", self.dropout, "must be in [0, 1)")
        check(self.positions != "rotary" or self.d_head % 2 == 0, "model.d_head", self.d_head,
              "must be even for rotary positions")
        windows = self.window if isinstance(self.window, list) else [self.window]
        check(0 < len(windows) <= self.n_layer
              and all(w is None or type(w) is int and w >= 1 for w in windows),
              "model.window", self.window, "must be null, a number of keys from 1, or a list of "
              f"these for the first layers, repeated, of at most model.n_layer = {self.n_layer}")
        self.windows = [windows[i % len(windows)] for i in range(self.n_layer)]
        for key, legal in (("norm", ("rmsnorm", "layernorm")), ("positions", ("rotary", "learned")),
                           ("activation", ("swiglu", "gelu"))):
            check(getattr(self, key) in legal, f"model.{key}", getattr(self, key),
                  f"must be one of {', '.join(legal)}")
        if self.rope_scaling is not None:
            keys = {"factor", "low_freq_factor", "high_freq_factor", "original_max_len"}
            check(set(self.rope_scaling) == keys, "model.rope_scaling", self.rope_scaling,
                  f"must have the keys {', '.join(sorted(keys))}")


def check(ok, key, value, rule):
    if not ok:
        raise ValueError(f"{key} = {value!r}: {rule}")


class Micro(NamedTuple):
    """One microbatch on the device, and what the blocks need to know of it."""

    tokens: torch.Tensor  # [B, T] int64; T here and below: this cp rank's part of the sequence
    targets: torch.Tensor | None  # [B, T] int64, -100 where nothing is to be predicted
    pos: torch.Tensor  # [1, T/tp] or [B, T/tp] int64, of this tp rank's part of that
    steps: dict  # window -> what attention_steps gives
    cos: torch.Tensor | None  # [T, d_head/2], or [B, T, d_head/2] where pos is given
    sin: torch.Tensor | None
    scale: torch.Tensor | None  # 0-d: what the gradient of the summed loss is multiplied by
    drop_key: torch.Tensor | None  # 0-d int64, of the seed and the step; None: no dropout
    drop_index: torch.Tensor | None  # [B, T/tp] int64: number of the token in the global batch


# ---- The blocks -----------------------------------------------------------------------------
class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm over the last dim, computed in float32. With a
    residual, of x + residual, which is returned as well."""

    def __init__(self, cfg, dim, how):
        super().__init__()
        self.kind, self.eps, self.how = cfg.norm, cfg.norm_eps, how
        self.weight = parallel.declare(nn.Parameter(torch.empty(dim)))
        has_bias = cfg.bias and cfg.norm == "layernorm"
        self.bias = parallel.declare(nn.Parameter(torch.empty(dim))) if has_bias else None

    def forward(self, x, residual=None):
        if self.kind == "rmsnorm":
            return kernels.rms_norm(x, self.weight, self.eps, residual, self.how)
        return kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)


def linear(d_in, d_out, bias, cut, tp):
    """A local nn.Linear, declared: cut 0 splits its outputs over tp (column product), cut 1 its
    inputs (row product: the outputs are partial sums, the bias is whole and added after them);
    cut None: whole on every rank, each of which uses some of the outputs."""
    full = (d_out, d_in)
    d_out, d_in = (d_out // tp if cut == 0 else d_out), (d_in // tp if cut == 1 else d_in)
    layer = nn.Linear(d_in, d_out, bias=bias)
    parallel.declare(layer.weight, cut, full)
    if bias:
        parallel.declare(layer.bias, 0 if cut == 0 else None, full[:1])
    return layer


class Attention(nn.Module):
    """Causal self-attention with grouped heads: n_head queries share n_kv_head keys and values.
    With fewer of these than tp ranks, their weights are whole everywhere, and a rank computes the
    one head that its queries need."""

    def __init__(self, cfg, mesh, keep_gathered, window, how):
        super().__init__()
        self.mesh, self.d_head, self.rotary = mesh, cfg.d_head, cfg.positions == "rotary"
        self.window, self.how = window, how
        self.keep, self.enter, self.leave = keep_gathered, parallel.enter, parallel.leave
        tp = mesh.size["tp"]
        d_q, d_kv = cfg.n_head * cfg.d_head, cfg.n_kv_head * cfg.d_head
        self.shared = cfg.n_kv_head < tp  # one key head for several ranks: the number of this one
        self.kv_head = mesh.coord["tp"] * cfg.n_kv_head // tp
        self.q = linear(cfg.d_model, d_q, cfg.bias, 0, tp)
        self.k = linear(cfg.d_model, d_kv, cfg.bias, None if self.shared else 0, tp)
        self.v = linear(cfg.d_model, d_kv, cfg.bias, None if self.shared else 0, tp)
        self.o = linear(d_q, cfg.d_model, cfg.bias, 1, tp)
        norm_cfg = dataclasses.replace(cfg, norm="rmsnorm")
        self.q_norm = Norm(norm_cfg, cfg.d_head, how) if cfg.qk_norm else None
        self.k_norm = Norm(norm_cfg, cfg.d_head, how) if cfg.qk_norm else None

    def kv(self, layer):
        """(weight, bias) of the key or value heads that this rank's queries need."""
        if not self.shared:
            return layer.weight, layer.bias
        rows = slice(self.kv_head * self.d_head, (self.kv_head + 1) * self.d_head)
        weight = layer.weight[rows]
        weight.accumulator = lambda: layer.weight.main_grad[rows]
        return weight, None if layer.bias is None else layer.bias[rows]

    def forward(self, x, micro, later, cheap):
        layers = [(self.q.weight, self.q.bias), self.kv(self.k), self.kv(self.v)]
        q, k, v = (y.unflatten(2, (-1, self.d_head))  # [B, T, H, d], local heads
                   for y in self.enter(x, layers, self.mesh, self.keep, later))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = kernels.rotary(q, k, micro.cos, micro.sin, self.how)
        out = self.attend(q, k, v, micro, cheap is plain).flatten(2)
        return self.leave(out, self.o.weight, self.o.bias, self.mesh, later)

    def attend(self, q, k, v, micro, keep):
        """Attention over the whole sequence, of which this cp rank has a part: local heads."""
        steps = micro.steps[self.window]
        if len(steps) > 1:
            functions = (partial(f, how=self.how) for f in (kernels.attention_forward,
                                                            kernels.attention_backward))
            return parallel.ring_attention(tuple(functions), q, k, v, steps, self.mesh)

        def whole(q, k, v):
            return kernels.attention(q, k, v, *steps[0][2:], keep=keep, with_lse=False,
                                     how=self.how)[0]

        return (whole(q, k, v) if self.mesh.size["cp"] == 1
                else parallel.ulysses(whole, q, k, v, self.mesh))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate x) * up x); or GELU: down(gelu(up x))."""

    def __init__(self, cfg, mesh, keep_gathered, how):
        super().__init__()
        self.mesh, self.keep = mesh, keep_gathered
        self.enter, self.leave = parallel.enter, parallel.leave
        tp, gated = mesh.size["tp"], cfg.activation == "swiglu"
        self.activation = partial(kernels.swiglu, how=how) if gated else kernels.gelu
        self.gate = linear(cfg.d_model, cfg.d_ff, cfg.bias, 0, tp) if gated else None
        self.up = linear(cfg.d_model, cfg.d_ff, cfg.bias, 0, tp)
        self.down = linear(cfg.d_ff, cfg.d_model, cfg.bias, 1, tp)

    def forward(self, x, later, cheap):
        layers = [(layer.weight, layer.bias) for layer in (self.gate, self.up) if layer is not None]
        h = self.enter(x, layers, self.mesh, self.keep, later)  # [B, T, d_ff/tp] each
        h = cheap(self.activation, *h)
        return self.leave(h, self.down.weight, self.down.bias, self.mesh, later)


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, place in the model, token, channel): the
    same in one process, on any layout, and when a block is computed again for its backward."""

    def __init__(self, p, place, device=None):
        super().__init__()
        self.p = p
        self.place = torch.tensor(place, device=device)  # an int would be compiled in, per layer

    def forward(self, x, micro):
        if self.p == 0 or micro.drop_key is None:
            return x
        channel = torch.arange(x.shape[-1], device=x.device)
        index = micro.drop_index.unsqueeze(-1) * x.shape[-1] + channel  # [B, T/tp, D]
        bits = parallel.random_bits(parallel.mix64(micro.drop_key + self.place), index)
        kept = parallel.shift_right(bits, 11) >= int(self.p * 2**53)
        return torch.where(kept, x, 0) * (1 / (1 - self.p))


def plain(fn, *inputs):
    return fn(*inputs)


class Remake:
    """Calls fn(*inputs) now. Where autograd would keep the result, it keeps the recipe, and the
    result is made again when backward asks for it: no communication is among what is repeated."""

    def __init__(self):
        self.made = {}  # address of a result -> (recipe, the result, so that the address is its)
        self.last = None, None  # (recipe, result): several products may have read the same

    def __call__(self, fn, *inputs):
        y = fn(*inputs)
        self.made[y.data_ptr()] = (fn, *(x.detach() for x in inputs)), y
        return y

    def pack(self, x):
        recipe, y = self.made.get(x.data_ptr(), (None, None))
        return x if recipe is None else (recipe, x.shape, x.stride())

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        recipe, shape, stride = kept
        if self.last[0] is not recipe:
            with torch.no_grad():
                self.last = recipe, recipe[0](*recipe[1:])
        return self.last[1].as_strided(shape, stride)


class Layer(nn.Module):
    def __init__(self, cfg, mesh, number, keep_gathered, how):
        super().__init__()
        self.attn_norm = Norm(cfg, cfg.d_model, how)
        self.attn = Attention(cfg, mesh, keep_gathered, cfg.windows[number], how)
        self.mlp_norm = Norm(cfg, cfg.d_model, how)
        self.mlp = MLP(cfg, mesh, keep_gathered, how)
        self.attn_drop = Dropout(cfg.dropout, 2 * number + 1, mesh.device)
        self.mlp_drop = Dropout(cfg.dropout, 2 * number + 2, mesh.device)

    def forward(self, x, micro, later=None, cheap=plain):
        attn = self.attn(cheap(self.attn_norm, x), micro, later, cheap)
        attn = self.attn_drop(attn, micro)
        if cheap is plain:
            h, x = self.mlp_norm(attn, residual=x)  # in one pass: the sum, and its norm
        else:
            x = x + attn
            h = cheap(self.mlp_norm, x)
        return x + self.mlp_drop(self.mlp(h, later, cheap), micro)

    def selective(self, x, micro, later=None):
        """forward that keeps the products and the output of attention, and in backward makes
        again what is cheap: norms, activations, attention's probabilities."""
        cheap = Remake()
        with torch.autograd.graph.saved_tensors_hooks(cheap.pack, cheap.unpack):
            y = self.forward(x, micro, later, cheap)
        cheap.made.clear()
        return y


class Table(nn.Module):
    """Rows to be looked up by number."""

    def __init__(self, rows, dim, cut=None, full_rows=None):
        super().__init__()
        self.weight = parallel.declare(nn.Parameter(torch.empty(rows, dim)), cut,
                                       (full_rows or rows, dim))


class Embed(nn.Module):
    def __init__(self, cfg, mesh, table):
        super().__init__()
        self.mesh, self.tokens = mesh, table
        self.positions = Table(cfg.max_len, cfg.d_model) if cfg.positions == "learned" else None
        self.drop = Dropout(cfg.dropout, 0, mesh.device)

    def forward(self, _, micro, later=None):
        x = parallel.lookup(micro.tokens, self.tokens.weight, self.mesh, later)  # [B, T/tp, D]
        if self.positions is not None:
            x = x + parallel.lookup(micro.pos, self.positions.weight, later=later)
        return self.drop(x, micro)


class Head(nn.Module):
    """Final norm, output layer and loss. The logits of a chunk of tokens exist at a time."""

    def __init__(self, cfg, mesh, weight, loss_chunk, how):
        super().__init__()
        self.mesh, self.vocab, self.chunk, self.how = mesh, cfg.vocab_size, loss_chunk, how
        self.softcap, self.z_loss, self.scratch = cfg.logit_softcap, cfg.z_loss, {}
        self.norm = Norm(cfg, cfg.d_model, how)
        self.weight = weight

    def forward(self, x, micro, later=None):
        """The sum of the loss over the tokens with a target (0-d)."""
        tp = self.mesh.size["tp"]
        x = self.norm(x).reshape(-1, x.shape[-1])  # [B*T/tp, D]
        targets = micro.targets.unflatten(1, (tp, -1)).transpose(0, 1).reshape(tp, -1)
        main_grad = getattr(self.weight, "main_grad", None)
        forward = partial(kernels.ce_forward, how=self.how)
        functions = kernels.ce_weight, forward, kernels.ce_backward
        return parallel.linear_cross_entropy(
            self.mesh, functions, x, self.weight, targets, micro.scale, vocab=self.vocab,
            chunk=self.chunk, weight_grad=main_grad, softcap=self.softcap, z_loss=self.z_loss,
            scratch=self.scratch)

    def logits(self, x, at):
        """Of one position, for every rank: x [B, T/tp, D] -> [B, V] in float32, without padding of
        the vocabulary. `at`: its index here, None where another cp rank has it. All-gathers over tp
        of x and of the logits, a sum over cp."""
        x = parallel.all_gather(self.mesh, self.norm(x).transpose(0, 1), "tp", "sampling")
        x = torch.zeros_like(x[0]) if at is None else x[at].contiguous()  # of [T, B, D]
        x = parallel.all_reduce(self.mesh, x, "cp", what="sampling")
        logits = parallel.all_gather(self.mesh, F.linear(self.weight, x), "tp", "sampling")
        logits = logits[: self.vocab].t().float()  # [rows, B] -> [B, V]
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Transformer(nn.Module):
    """The blocks that this rank holds: all, or with pipeline stages those of its stages. `stages`:
    how many layers each stage has; stage s is the (s // pp)-th chunk of rank s % pp of the
    pipeline, the first begins with the embedding, the last ends with the head. Build it on the
    meta device: `build` gives it storage."""

    def __init__(self, cfg, mesh, pad_vocab=1, loss_chunk=1024, keep_gathered=False, stages=None,
                 cp_mode="ring", how="auto"):
        super().__init__()
        self.cfg, self.mesh, self.cp_mode = cfg, mesh, cp_mode
        stages = stages or [cfg.n_layer]
        p, rank, bounds = mesh.size["pp"], mesh.coord["pp"], [0, *accumulate(stages)]
        self.layers, self.names, self.chunks = nn.ModuleDict(), [], []
        for s in range(rank, len(stages), p):
            numbers, first, last = range(*bounds[s : s + 2]), len(self.names), s == len(stages) - 1
            for i in numbers:
                self.layers[str(i)] = Layer(cfg, mesh, i, keep_gathered, how)
            self.names += ["embed"] * (s == 0) + [f"layers.{i}" for i in numbers] + ["head"] * last
            self.chunks.append(parallel.Chunk(range(first, len(self.names)), last))
        rows = -(-cfg.vocab_size // (pad_vocab * mesh.size["tp"])) * pad_vocab  # of this tp rank
        table = Table(rows, cfg.d_model, 0, cfg.vocab_size)
        if rank == 0:
            self.embed = Embed(cfg, mesh, table)
        if rank == p - 1:
            head = table if cfg.tied else Table(rows, cfg.d_model, 0, cfg.vocab_size)
            self.head = Head(cfg, mesh, head.weight, loss_chunk, how)
        # a weight of two stages is a block of its own, so that both cut it into the same shards
        self.shared = [("embed.tokens", table)] * (cfg.tied and p > 1 and rank in (0, p - 1))
        self.tables, self.in_graph = (None, None), False
        self.parts = parallel.chunks_of(mesh.size["cp"], 0, cp_mode)[1] * mesh.size["tp"]  # of T

    def named_blocks(self):
        return [(name, self.get_submodule(name)) for name in self.names]

    def functions(self, compiled=False, selective=False, split=False):
        """One function (x, micro, later) -> x for each block. Compiled, all layers of one window
        share a compilation: what differs between them enters as tensors. A layer is one graph;
        but attention over cp, and products whose weight gradients a schedule puts off (`split`),
        stay outside. Too many compilations are an error, not a return to slow code."""
        forward = Layer.selective if selective else Layer.forward
        alone, at_once = self.mesh.size["cp"] == 1, compiled and not split
        self.in_graph = compiled and alone
        if compiled:
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            forward = torch.compile(forward, dynamic=False, fullgraph=at_once and alone)
            put_in, put_out = parallel.enter, parallel.leave
            if not at_once:
                put_in, put_out = map(torch.compiler.disable, (parallel.enter, parallel.leave))
            elif self.mesh.size["tp"] > 1:
                put_in = parallel.enter_in_graph(self.mesh)
                put_out = parallel.leave_in_graph(self.mesh)
            for layer in self.layers.values():
                layer.attn.enter = layer.mlp.enter = put_in
                layer.attn.leave = layer.mlp.leave = put_out
                if not alone:
                    layer.attn.attend = torch.compiler.disable(layer.attn.attend)
        # at once: the graphs make the weights' gradients as well
        return [block if not isinstance(block, Layer) else lambda x, micro, later, layer=block:
                forward(layer, x, micro, None if at_once else later)
                for _, block in self.named_blocks()]

    def empty(self, micro):
        """What one stage sends to the next, to be filled: [B, T/tp, D]."""
        B, T = micro.tokens.shape
        return torch.empty(B, T // self.mesh.size["tp"], self.cfg.d_model, dtype=self.dtype,
                           device=self.mesh.device)

    def micro(self, tokens, targets=None, pos=None, lo=None, seen=None, scale=None, drop_key=None,
              sample=None):
        """Complete a microbatch of whole sequences: cut out what belongs to this cp and tp rank,
        and add what attention sees, rotary tables at the positions, numbers for dropout. `lo`,
        `seen`: of documents, see attention_steps."""
        def mine(x):
            return x if x is None else parallel.cut_sequence(x, self.mesh, self.cp_mode)

        T, device, (cos, sin) = tokens.shape[1], tokens.device, self.tables
        c, rank, at = self.mesh.size["cp"], self.mesh.coord["cp"], torch.arange(T, device=device)
        at, pos = mine(at.unsqueeze(0)), mine(pos)  # [1, T/c], [B, T/c]
        lo = mine(lo) if self.cp_mode == "ring" else lo
        steps = {w: parallel.attention_steps(T, c, rank, self.cp_mode, device, lo, seen, w)
                 for w in {self.cfg.windows[int(i)] for i in self.layers}}
        if self.in_graph:  # a graph for every batch is too much for what the host knows of it
            steps = {w: [step._replace(bounds=None)] for w, [step] in steps.items()}
        if cos is not None:
            plain_at = slice(0, T) if c == 1 else at[0]
            cos, sin = (t[plain_at if pos is None else pos] for t in (cos, sin))
        drop_key, drop_index = drop_key if self.cfg.dropout > 0 else None, None
        if drop_key is not None:
            drop_index = parallel.positions_of(sample.unsqueeze(1) * T + at, self.mesh)
        pos = parallel.positions_of(at if pos is None else pos, self.mesh)
        return Micro(mine(tokens), mine(targets), pos, steps, cos, sin, scale, drop_key, drop_index)


def build(cfg, mesh, dtype, pad_vocab=1, loss_chunk=1024, keep_gathered=False, stages=None,
          cp_mode="ring", how="auto", **sharding):
    """Meta model -> storage. Returns (model, Blocks), weights still zero. `sharding`: the options
    of Blocks."""
    with torch.device("meta"):
        model = Transformer(cfg, mesh, pad_vocab, loss_chunk, keep_gathered, stages, cp_mode,
                            how)
    model.dtype, p = dtype, mesh.size["pp"]
    twin = {0: p - 1, p - 1: 0}.get(mesh.coord["pp"]) if cfg.tied and p > 1 else None
    blocks = parallel.Blocks(model.named_blocks(), mesh, dtype, shared=model.shared, twin=twin,
                             **sharding)
    if cfg.positions == "rotary":
        model.tables = kernels.rope_tables(cfg.max_len, cfg.d_head, cfg.rope_theta,
                                           cfg.rope_scaling, blocks.master_dtype, mesh.device)
    return model, blocks


# ---- Initial weights, counts ----------------------------------------------------------------
def init_of(name, cfg):
    """(mean, standard deviation) of a parameter's initial values."""
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    if name.endswith("bias"):
        return 0.0, 0.0
    if cfg.depth_init and name.endswith(("attn.o.weight", "mlp.down.weight")):
        return 0.0, cfg.init_std / math.sqrt(2 * cfg.n_layer)  # two residual branches, GPT-2
    return 0.0, cfg.init_std


def bell(key, index):
    """Values of mean 0 and variance 1 for each logical index (float64): the sum of four 16-bit
    uniform numbers, whose bell ends at 3.46. Integers up to the last product, so that every
    device and every shard gives the same bits (a logarithm or a cosine would not)."""
    bits = parallel.random_bits(key, index)
    total = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 2 * 0xFFFF).double() / math.sqrt((2**32 - 1) / 3)


def init_weights(blocks, cfg, seed):
    """Give every parameter its value: a function of (seed, name, index in the logical tensor), so
    the same on any layout, with no full-size draw."""
    for p in blocks.params:
        (data, first), (mean, std) = blocks.local(blocks.master, p), init_of(p.name, cfg)
        key = parallel.key64("init", seed, p.name)
        for part in data.split(1 << 20):
            index = parallel.logical_index(p.shape, p.full_shape, p.cut_offset(blocks.mesh), first,
                                  first + part.numel(), data.device)
            part.copy_(torch.where(index < 0, 0.0, mean + std * bell(key, index)))
            first += part.numel()
    blocks.refresh()


def whole_model(cfg):
    """The parameters of the whole model as one process would hold them: [Param]."""
    mesh = parallel.build_mesh(parallel.layout_of(1), "cpu")
    with torch.device("meta"):
        return parallel.list_params(Transformer(cfg, mesh).named_blocks())


def count_params(cfg):
    """Elements of the logical tensors: padding is not counted, a tied weight counts once."""
    return sum(math.prod(p.full_shape) for p in whole_model(cfg))


def cut(cfg, n_stage, seq_len):
    """How many layers each stage gets, so that the most loaded has as little work as possible; and
    its work over the mean. The output layer counts as its products (its gradient's are made in the
    forward), the embedding as nothing."""
    head = 6 * cfg.d_model * cfg.vocab_size
    costs = [(flops_per_token(cfg, seq_len) - head) / cfg.n_layer] * cfg.n_layer
    costs[-1] += head
    bounds = parallel.balance(costs, n_stage)
    parts = [sum(costs[i:j]) for i, j in zip(bounds, bounds[1:])]
    return [j - i for i, j in zip(bounds, bounds[1:])], max(parts) * n_stage / sum(parts)


def keys_seen(cfg, pos):
    """Pairs of a query and a key that it sees, summed over all layers. pos: of each query the
    position in its document, p: it sees p + 1 keys, in a layer with a window the last of these."""
    return sum(layers * int((pos + 1).clamp(max=window or cfg.max_len).sum())
               for window, layers in Counter(cfg.windows).items())


def flops(cfg, tokens, pairs):
    """Floating-point operations of forward and backward: for each token 6 for each weight of a
    matrix product, and in attention 12 for each channel of a query and pair, see keys_seen. What
    recomputation repeats is not counted."""
    d_q, d_kv = cfg.n_head * cfg.d_head, cfg.n_kv_head * cfg.d_head
    mlp = (3 if cfg.activation == "swiglu" else 2) * cfg.d_model * cfg.d_ff
    layer = 2 * cfg.d_model * d_q + 2 * cfg.d_model * d_kv + mlp
    return 6 * (cfg.n_layer * layer + cfg.d_model * cfg.vocab_size) * tokens + 12 * d_q * pairs


def flops_per_token(cfg, seq_len):
    """flops of a sequence that is one document, over its tokens."""
    windows = [min(w or seq_len, seq_len) for w in cfg.windows]
    return flops(cfg, seq_len, sum(w * seq_len - w * (w - 1) // 2 for w in windows)) / seq_len


# ---- Text -----------------------------------------------------------------------------------
def pick(logits, temperature, top_k, top_p, generator):
    """Draw one token for each row of logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the first token always stays
        probs = torch.zeros_like(probs).scatter(-1, order, ordered * (before < top_p))
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(model, blocks, tokens, n, temperature=0.8, top_k=None, top_p=None, seed=0, stop=None):
    """Continue tokens [B, T] by up to n tokens; ends early when every row has produced `stop`.
    The context is the last cfg.max_len tokens, computed anew for each token. Collective: every
    rank draws the same tokens."""
    generator = torch.Generator(tokens.device).manual_seed(seed)
    p, stage = model.mesh.size["pp"], model.mesh.coord["pp"]
    schedule = parallel.program(p, stage, "interleaved", 1, len(model.chunks), training=False)
    done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(n):
        context = tokens[:, -model.cfg.max_len :]
        last, pos = context.shape[1] - 1, None
        if extra := -context.shape[1] % model.parts:  # to a length that the ranks can share: what
            context = F.pad(context, (0, extra))  # comes after the last token changes nothing
            pos = torch.arange(context.shape[1], device=tokens.device).clamp(max=last)
            pos = pos.expand(context.shape)
        micro, fns = model.micro(context, pos=pos), model.functions()
        token = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
        held = torch.arange(context.shape[1]).unsqueeze(0)
        held = parallel.cut_sequence(held, model.mesh, model.cp_mode)[0].tolist()
        at = held.index(last) if last in held else None
        if model.chunks[-1].last:
            fns[-1] = lambda x, micro, later, at=at: model.head.logits(x, at)
        logits = parallel.run(schedule, fns, blocks, [micro], None, model.chunks, model.empty)
        if model.chunks[-1].last:
            token = pick(logits[0], temperature, top_k, top_p, generator)
        token = parallel.all_reduce(model.mesh, token, "pp")
        tokens = torch.cat([tokens, token.unsqueeze(1)], dim=1)
        if stop is not None:
            done |= token == stop
            if done.all():
                break
    return tokens


def sample(model, blocks, tokenizer, prompt, n, **choices):
    """The prompt and up to n tokens that the model continues it with, as text."""
    ids = [int(t) for t in tokenizer.encode(prompt)] or [tokenizer.eot]
    tokens = torch.tensor([ids], device=model.mesh.device)
    out = generate(model, blocks, tokens, n, stop=tokenizer.eot, **choices)
    return tokenizer.decode([t for t in out[0].tolist() if t != tokenizer.eot])


# ---- From the shell -------------------------------------------------------------------------
def print_table(cfg, seq_len):
    """Name, local shape, cut and count of every parameter."""
    print(f"{'parameter':<32} {'shape':<18} {'cut over tp':<12} {'count':>15}")
    for p in whole_model(cfg):
        shape, over_tp = " x ".join(map(str, p.full_shape)), f"dim {p.cut}"
        print(f"{p.name:<32} {shape:<18} {'whole' if p.cut is None else over_tp:<12} "
              f"{math.prod(p.full_shape):>15,}")
    print(f"{'all':<64} {count_params(cfg):>15,}")
    flops = flops_per_token(cfg, seq_len)
    print(f"{flops:,.0f} FLOPs a token at length {seq_len}, forward and backward")


def load_for_sampling(path, tokenizer=None):
    """(model, blocks, tokenizer) of a run folder or checkpoint, float32, on the best device."""
    import checkpoint
    import data
    path = checkpoint.find(path)
    meta = checkpoint.read_meta(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = ModelConfig(**meta["config"]["model"])
    model, blocks = build(cfg, parallel.build_mesh(parallel.layout_of(1), device), torch.float32)
    checkpoint.load(path, pieces(blocks, kinds=("param",)))
    return model, blocks, data.load_tokenizer(tokenizer or meta["tokenizer"])


def pieces(blocks, shared=False, kinds=("param", "exp_avg", "exp_avg_sq")):
    """This rank's state in the terms of checkpoint.py; `shared`: what this replica is to write."""
    import checkpoint
    return [checkpoint.Piece(f"{kind}/{p.name}", data, start, p.shape, p.cut_offset(blocks.mesh),
                             p.full_shape)
            for kind, p, data, start in blocks.state(shared) if kind in kinds]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = pathlib.Path(__file__).with_name("config.yaml")
    parser.add_argument("what", nargs="?", default=default, help="a config, or 'sample'")
    parser.add_argument("path", nargs="?", default="runs/default",
                        help="sample: a run folder or a checkpoint")
    parser.add_argument("prompt", nargs="?", default="")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="a name or file, when the recorded one has moved")
    args = parser.parse_args()
    if args.what != "sample":
        import yaml
        config = yaml.safe_load(default.read_text())
        override = yaml.safe_load(pathlib.Path(args.what).read_text())
        section = config["model"] | (override.get("model") or {})
        seq_len = (config["data"] | (override.get("data") or {}))["seq_len"]
        section["vocab_size"] = section["vocab_size"] or 257
        section["max_len"] = section["max_len"] or seq_len
        return print_table(ModelConfig(**section), seq_len)
    loaded = load_for_sampling(args.path, args.tokenizer)
    print(sample(*loaded, args.prompt, args.tokens, temperature=args.temperature,
                 top_k=args.top_k, top_p=args.top_p, seed=args.seed))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        print(f"model.py: error: {error}", file=sys.stderr)
        sys.exit(2)
