"""The transformer, written once for every layout.

A model is a list of blocks (embedding, layers, head); each maps [B, T, D] to [B, T, D]:

    tokens -> embed -> layer 0 -> ... -> layer L-1 -> head -> loss

    layer:   x ----+--> norm -> enter -> q k v -> attention -> o -> leave --(+)--+--> ...
                   |                                                        |    |
                   +--------------------------------------------------------+    |
             ... --+--> norm -> enter -> gate up -> swiglu -> down -> leave --(+)--> x
                   +----------------------------------------------------------+

Tensor parallelism is the four calls named enter and leave: between them every rank holds the whole
sequence and its share of the heads and of the MLP; outside them every rank holds its share of the
sequence. With one rank they do nothing, and what remains is the plain model.

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
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import kernels
from parallel import (
    Blocks,
    build_mesh,
    declare,
    enter,
    key64,
    layout_of,
    leave,
    list_params,
    logical_index,
    mix64,
    random_bits,
    shift_right,
)


@dataclasses.dataclass
class ModelConfig:
    """The section `model` of config.yaml, which has a remark on each key. Raises ValueError."""

    n_layer: int
    d_model: int
    n_head: int
    n_kv_head: int
    d_head: int | None
    d_ff: int
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
            check(self.d_model % self.n_head == 0, "model.n_head", self.n_head,
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

    tokens: torch.Tensor  # [B, T] int64
    targets: torch.Tensor | None  # [B, T] int64, -100 where nothing is to be predicted
    pos: torch.Tensor | None  # [B, T] int64, None: 0 .. T-1
    lo: torch.Tensor | None  # [B, T] int32, the first key each query sees; None: causal
    cos: torch.Tensor | None  # [T, d_head/2], or [B, T, d_head/2] where pos is given
    sin: torch.Tensor | None
    scale: torch.Tensor | None  # 0-d: what the gradient of the summed loss is multiplied by
    drop_key: torch.Tensor | None  # 0-d int64, of the seed and the step; None: no dropout
    drop_index: torch.Tensor | None  # [B, T] int64: number of the token in the global batch


# ---------------------------------------------------------------------------------------------
# The blocks


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm over the last dim, computed in float32."""

    def __init__(self, cfg, dim):
        super().__init__()
        self.kind, self.eps = cfg.norm, cfg.norm_eps
        self.weight = declare(nn.Parameter(torch.empty(dim)))
        has_bias = cfg.bias and cfg.norm == "layernorm"
        self.bias = declare(nn.Parameter(torch.empty(dim))) if has_bias else None

    def forward(self, x):
        if self.kind == "rmsnorm":
            return kernels.rms_norm(x, self.weight, self.eps)
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


def linear(d_in, d_out, bias, cut, tp):
    """A local nn.Linear, declared: cut 0 splits its outputs over tp (column product), cut 1 its
    inputs (row product: the outputs are partial sums, the bias is whole and added after them)."""
    full = (d_out, d_in)
    d_out, d_in = (d_out // tp, d_in) if cut == 0 else (d_out, d_in // tp)
    layer = nn.Linear(d_in, d_out, bias=bias)
    declare(layer.weight, cut, full)
    if bias:
        declare(layer.bias, 0 if cut == 0 else None, full[:1])
    return layer


class Attention(nn.Module):
    """Causal self-attention with grouped heads: n_head queries share n_kv_head keys and values."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.mesh, self.d_head, self.rotary = mesh, cfg.d_head, cfg.positions == "rotary"
        tp = mesh.size["tp"]
        d_q, d_kv = cfg.n_head * cfg.d_head, cfg.n_kv_head * cfg.d_head
        self.q = linear(cfg.d_model, d_q, cfg.bias, 0, tp)
        self.k = linear(cfg.d_model, d_kv, cfg.bias, 0, tp)
        self.v = linear(cfg.d_model, d_kv, cfg.bias, 0, tp)
        self.o = linear(d_q, cfg.d_model, cfg.bias, 1, tp)
        norm_cfg = dataclasses.replace(cfg, norm="rmsnorm")
        self.q_norm = Norm(norm_cfg, cfg.d_head) if cfg.qk_norm else None
        self.k_norm = Norm(norm_cfg, cfg.d_head) if cfg.qk_norm else None

    def forward(self, x, micro):
        x = enter(x, self.mesh)  # [B, T, D]
        B, T, _ = x.shape
        q = self.q(x).view(B, T, -1, self.d_head)  # [B, T, H, d]
        k = self.k(x).view(B, T, -1, self.d_head)  # [B, T, Hkv, d]
        v = self.v(x).view(B, T, -1, self.d_head)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = kernels.rotary(q, k, micro.cos, micro.sin)
        out = kernels.attention(q, k, v, micro.lo).reshape(B, T, -1)
        return row_product(self.o, out, self.mesh)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate x) * up x); or GELU: down(gelu(up x))."""

    def __init__(self, cfg, mesh):
        super().__init__()
        self.mesh, tp = mesh, mesh.size["tp"]
        gated = cfg.activation == "swiglu"
        self.gate = linear(cfg.d_model, cfg.d_ff, cfg.bias, 0, tp) if gated else None
        self.up = linear(cfg.d_model, cfg.d_ff, cfg.bias, 0, tp)
        self.down = linear(cfg.d_ff, cfg.d_model, cfg.bias, 1, tp)

    def forward(self, x):
        x = enter(x, self.mesh)
        up = self.up(x)
        h = kernels.gelu(up) if self.gate is None else kernels.swiglu(self.gate(x), up)
        return row_product(self.down, h, self.mesh)


def row_product(layer, x, mesh):
    """The product of a row-cut linear, summed over tp, then its bias, once."""
    if mesh.size["tp"] == 1:
        return layer(x)
    y = leave(F.linear(x, layer.weight), mesh)
    return y if layer.bias is None else y + layer.bias


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, place in the model, token, channel): the
    same in one process, on any layout, and when a block is computed again for its backward."""

    def __init__(self, p, place):
        super().__init__()
        self.p, self.number = p, place
        self.place = None  # 0-d int64 on the device: a Python int would be compiled in, per layer

    def forward(self, x, micro):
        if self.p == 0 or micro.drop_key is None:
            return x
        channel = torch.arange(x.shape[-1], device=x.device)
        index = micro.drop_index.unsqueeze(-1) * x.shape[-1] + channel  # [B, T, D]
        bits = shift_right(random_bits(mix64(micro.drop_key + self.place), index), 11)  # 53 bits
        kept = bits >= int(self.p * 2**53)
        return torch.where(kept, x, 0) * (1 / (1 - self.p))


class Layer(nn.Module):
    def __init__(self, cfg, mesh, number):
        super().__init__()
        self.attn_norm = Norm(cfg, cfg.d_model)
        self.attn = Attention(cfg, mesh)
        self.mlp_norm = Norm(cfg, cfg.d_model)
        self.mlp = MLP(cfg, mesh)
        self.attn_drop = Dropout(cfg.dropout, 2 * number + 1)
        self.mlp_drop = Dropout(cfg.dropout, 2 * number + 2)

    def forward(self, x, micro):
        x = x + self.attn_drop(self.attn(self.attn_norm(x), micro), micro)
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x)), micro)


class _Lookup(torch.autograd.Function):
    """weight[index], whose backward adds straight into the float32 accumulator `main_grad`: a
    gradient tensor as large as the table would be written, read and thrown away each microbatch."""

    @staticmethod
    def forward(ctx, index, weight, main_grad):
        ctx.save_for_backward(index)
        ctx.main_grad, ctx.shape = main_grad, weight.shape
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        index, grad = index.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.main_grad is None:
            return None, grad.new_zeros(ctx.shape).index_add_(0, index, grad), None
        ctx.main_grad.index_add_(0, index, grad.to(ctx.main_grad.dtype))
        return None, None, None


class Table(nn.Module):
    """Rows looked up by number."""

    def __init__(self, rows, dim, full_rows):
        super().__init__()
        self.weight = declare(nn.Parameter(torch.empty(rows, dim)), 0, (full_rows, dim))

    def forward(self, index):
        return _Lookup.apply(index, self.weight, getattr(self.weight, "main_grad", None))


class Embed(nn.Module):
    def __init__(self, cfg, vocab_rows):
        super().__init__()
        self.tokens = Table(vocab_rows, cfg.d_model, cfg.vocab_size)
        learned = cfg.positions == "learned"
        self.positions = Table(cfg.max_len, cfg.d_model, cfg.max_len) if learned else None
        self.drop = Dropout(cfg.dropout, 0)

    def forward(self, _, micro):
        x = self.tokens(micro.tokens)
        if self.positions is not None:
            at = micro.pos
            if at is None:
                at = torch.arange(x.shape[1], device=x.device)
            x = x + self.positions(at)
        return self.drop(x, micro)


class Head(nn.Module):
    """Final norm, output layer and loss. The logits of a chunk of tokens exist at a time."""

    def __init__(self, cfg, weight, loss_chunk):
        super().__init__()
        self.vocab, self.softcap, self.z_loss = cfg.vocab_size, cfg.logit_softcap, cfg.z_loss
        self.loss_chunk, self.scratch = loss_chunk, {}
        self.norm = Norm(cfg, cfg.d_model)
        self.weight = weight

    def forward(self, x, micro):
        """The sum of the loss over the tokens with a target (0-d)."""
        x = self.norm(x).reshape(-1, x.shape[-1])  # [B*T, D]
        main_grad = getattr(self.weight, "main_grad", None)
        return kernels.linear_cross_entropy(
            x, self.weight, micro.targets.reshape(-1), micro.scale, valid=self.vocab,
            weight_grad=main_grad, chunk=self.loss_chunk, softcap=self.softcap, z_loss=self.z_loss,
            scratch=self.scratch)

    def logits(self, x):
        """[B, T, D] -> [B, T, V] in float32, without padding of the vocabulary."""
        logits = F.linear(self.norm(x), self.weight)[..., : self.vocab].float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Transformer(nn.Module):
    """The blocks of the whole model. Build it on the meta device: `build` gives it storage."""

    def __init__(self, cfg, mesh, pad_vocab=1, loss_chunk=1024):
        super().__init__()
        self.cfg, self.mesh = cfg, mesh
        rows = -(-cfg.vocab_size // pad_vocab) * pad_vocab
        self.embed = Embed(cfg, rows)
        self.layers = nn.ModuleList(Layer(cfg, mesh, i) for i in range(cfg.n_layer))
        weight = self.embed.tokens.weight
        if not cfg.tied:
            weight = declare(nn.Parameter(torch.empty(rows, cfg.d_model)), 0,
                             (cfg.vocab_size, cfg.d_model))
        self.head = Head(cfg, weight, loss_chunk)
        self.tables = (None, None)

    def named_blocks(self):
        layers = [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]
        return [("embed", self.embed), *layers, ("head", self.head)]

    def functions(self, compiled=False):
        """One function (x, micro) -> x for each block. Compiled, all layers share one
        compilation: what differs between them enters as tensors."""
        forward = Layer.forward
        if compiled:
            forward = torch.compile(forward, dynamic=False, fullgraph=True)
        layers = [lambda x, micro, layer=layer: forward(layer, x, micro) for layer in self.layers]
        return [self.embed, *layers, self.head]

    def micro(self, tokens, targets=None, pos=None, lo=None, scale=None, drop_key=None,
              sample=None):
        """Complete a microbatch: rotary tables at its positions, numbers for dropout."""
        cos, sin = self.tables
        if cos is not None:
            cos, sin = (t[: tokens.shape[1]] if pos is None else t[pos] for t in (cos, sin))
        drop_index = None
        if drop_key is not None and self.cfg.dropout > 0:
            T = tokens.shape[1]
            drop_index = sample.unsqueeze(1) * T + torch.arange(T, device=tokens.device)
        else:
            drop_key = None
        return Micro(tokens, targets, pos, lo, cos, sin, scale, drop_key, drop_index)


def build(cfg, mesh, dtype, pad_vocab=1, loss_chunk=1024, **sharding):
    """Meta model -> storage. Returns (model, Blocks), weights still zero. `sharding`: the options
    of Blocks."""
    with torch.device("meta"):
        model = Transformer(cfg, mesh, pad_vocab, loss_chunk)
    blocks = Blocks(model.named_blocks(), mesh, dtype, **sharding)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.place = torch.tensor(module.number, device=mesh.device)
    if cfg.positions == "rotary":
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        model.tables = kernels.rope_tables(cfg.max_len, cfg.d_head, cfg.rope_theta,
                                           cfg.rope_scaling, table_dtype, mesh.device)
    return model, blocks


# ---------------------------------------------------------------------------------------------
# Initial weights, counts


def init_std(name, cfg):
    """Standard deviation of a parameter's initial values; None means ones, 0 means zeros."""
    if name.endswith("norm.weight"):
        return None
    if name.endswith("bias"):
        return 0.0
    if cfg.depth_init and name.endswith(("attn.o.weight", "mlp.down.weight")):
        return cfg.init_std / math.sqrt(2 * cfg.n_layer)  # two residual branches a layer, GPT-2
    return cfg.init_std


def bell(key, index):
    """Values of mean 0 and variance 1 for each logical index (float64): the sum of four 16-bit
    uniform numbers, whose bell ends at 3.46. Integers up to the last product, so that every
    device and every shard gives the same bits (a logarithm or a cosine would not)."""
    bits = random_bits(key, index)
    total = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    return (total - 2 * 0xFFFF).double() / math.sqrt((2**32 - 1) / 3)


def init_weights(blocks, cfg, seed):
    """Give every parameter its value: a function of (seed, name, index in the logical tensor), so
    the same on any layout, with no full-size draw."""
    for p in blocks.params:
        (data, first), std = blocks.local(blocks.master, p), init_std(p.name, cfg)
        if std is None:
            data.fill_(1.0)
            continue
        if std == 0.0:
            continue
        key = key64("init", seed, p.name)
        for part in data.split(1 << 20):
            index = logical_index(p.shape, p.full_shape, p.cut_offset(blocks.mesh), first,
                                  first + part.numel(), data.device)
            part.copy_(torch.where(index < 0, 0.0, bell(key, index) * std))
            first += part.numel()
    blocks.refresh()


def count_params(blocks):
    """Elements of the logical tensors: padding is not counted, a tied weight counts once."""
    return sum(math.prod(p.full_shape) for p in blocks.params)


def flops_per_token(cfg, seq_len):
    """Floating-point operations of forward and backward for one token: 6 for each weight of a
    matrix product, and causal attention, where a query sees (seq_len + 1) / 2 keys on average."""
    d_q, d_kv = cfg.n_head * cfg.d_head, cfg.n_kv_head * cfg.d_head
    mlp = (3 if cfg.activation == "swiglu" else 2) * cfg.d_model * cfg.d_ff
    layer = 2 * cfg.d_model * d_q + 2 * cfg.d_model * d_kv + mlp
    attention = 12 * cfg.n_layer * d_q * (seq_len + 1) / 2
    return 6 * (cfg.n_layer * layer + cfg.d_model * cfg.vocab_size) + attention


# ---------------------------------------------------------------------------------------------
# Text


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
    done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(n):
        micro = model.micro(tokens[:, -model.cfg.max_len :])
        x = None
        for i, (_, block) in enumerate(model.named_blocks()):
            blocks.gather(i)
            x = block.logits(x[:, -1:]) if block is model.head else block(x, micro)
            blocks.free(i)
        logits = x[:, -1]
        token = pick(logits, temperature, top_k, top_p, generator)
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


# ---------------------------------------------------------------------------------------------
# From the shell


def print_table(cfg, seq_len):
    """Name, local shape, cut and count of every parameter."""
    mesh = build_mesh(layout_of(1), "cpu")
    with torch.device("meta"):
        model = Transformer(cfg, mesh)
    total = 0
    print(f"{'parameter':<32} {'shape':<18} {'cut over tp':<12} {'count':>15}")
    for p in list_params(model.named_blocks()):
        n = math.prod(p.full_shape)
        total += n
        shape = " x ".join(map(str, p.full_shape))
        cut = "whole" if p.cut is None else f"dim {p.cut}"
        print(f"{p.name:<32} {shape:<18} {cut:<12} {n:>15,}")
    print(f"{'all':<64} {total:>15,}")
    flops = flops_per_token(cfg, seq_len)
    print(f"{flops:,.0f} FLOPs a token at length {seq_len}, forward and backward")


def load_for_sampling(path, tokenizer=None):
    """(model, blocks, tokenizer) of a run folder or checkpoint, float32, on the best device."""
    import checkpoint
    import data

    path = pathlib.Path(path)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if not (path / "index.json").exists():
        newest = checkpoint.latest(path, lambda line: print(line, file=sys.stderr))
        if newest is None:
            raise ValueError(f"{path}: no complete checkpoint there")
        path = newest
    meta = checkpoint.read_meta(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = ModelConfig(**meta["config"]["model"])
    model, blocks = build(cfg, build_mesh(layout_of(1), device), torch.float32)
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
    parser.add_argument("what", nargs="?", default="config.yaml", help="a config, or 'sample'")
    parser.add_argument("path", nargs="?", help="sample: a run folder or a checkpoint")
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

        here = pathlib.Path(__file__).parent
        config = yaml.safe_load((here / "config.yaml").read_text())
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
