"""The specification, written a second time: one process, float64, the whole batch at once, plain
torch operators and torch's own AdamW. Shares no code with the project."""

import math

import torch
import torch.nn.functional as F


def norm(p, name, x, cfg, kind=None):
    w, b = p[f"{name}.weight"], p.get(f"{name}.bias")
    if (kind or cfg["norm"]) == "layernorm":
        return F.layer_norm(x, w.shape, w, b, cfg["norm_eps"])
    return F.rms_norm(x, w.shape, w, cfg["norm_eps"])


def lin(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def frequencies(cfg, d):
    freq = 1.0 / cfg["rope_theta"] ** (torch.arange(0, d, 2).double() / d)
    s = cfg["rope_scaling"]
    if s is None:
        return freq
    out = []
    for f in freq.tolist():  # Llama 3.1, as its authors wrote it
        wavelen = 2 * math.pi / f
        if wavelen < s["original_max_len"] / s["high_freq_factor"]:
            out.append(f)
        elif wavelen > s["original_max_len"] / s["low_freq_factor"]:
            out.append(f / s["factor"])
        else:
            smooth = (s["original_max_len"] / wavelen - s["low_freq_factor"]) / (
                s["high_freq_factor"] - s["low_freq_factor"])
            out.append((1 - smooth) * f / s["factor"] + smooth * f)
    return torch.tensor(out, dtype=torch.float64)


def rotate(x, pos, cfg):
    """x [B, T, H, d]: complex multiplication of (x1, x2), the two halves of each head."""
    d = x.shape[-1]
    angle = pos[..., None, None].double() * frequencies(cfg, d)
    turn = torch.polar(torch.ones_like(angle), angle)
    z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
    return torch.cat([z.real, z.imag], -1)


def logits(p, cfg, tokens, pos, lo):
    """tokens, pos, lo [B, T] -> [B, T, V]."""
    B, T = tokens.shape
    d = cfg["d_head"] or cfg["d_model"] // cfg["n_head"]
    x = p["embed.tokens.weight"][tokens]
    if cfg["positions"] == "learned":
        x = x + p["embed.positions.weight"][pos]
    i = torch.arange(T)
    windows = cfg["window"] if isinstance(cfg["window"], list) else [cfg["window"]]
    for n in range(cfg["n_layer"]):
        window = windows[n % len(windows)] or T
        seen = (i <= i[:, None]) & (i >= lo[:, :, None]) & (i[:, None] - i < window)  # [B, T, T]
        a, h = f"layers.{n}.attn", norm(p, f"layers.{n}.attn_norm", x, cfg)
        q, k, v = (lin(p, f"{a}.{s}", h).view(B, T, -1, d) for s in "qkv")
        if cfg["qk_norm"]:
            q = norm(p, f"{a}.q_norm", q, cfg, "rmsnorm")
            k = norm(p, f"{a}.k_norm", k, cfg, "rmsnorm")
        if cfg["positions"] == "rotary":
            q, k = rotate(q, pos, cfg), rotate(k, pos, cfg)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
        x = x + lin(p, f"{a}.o", o.transpose(1, 2).reshape(B, T, -1))
        m, h = f"layers.{n}.mlp", norm(p, f"layers.{n}.mlp_norm", x, cfg)
        up = lin(p, f"{m}.up", h)
        h = F.silu(lin(p, f"{m}.gate", h)) * up if cfg["activation"] == "swiglu" else \
            F.gelu(up, approximate="tanh")
        x = x + lin(p, f"{m}.down", h)
    out = F.linear(norm(p, "head.norm", x, cfg), p.get("head.weight", p["embed.tokens.weight"]))
    cap = cfg["logit_softcap"]
    return out if cap is None else cap * torch.tanh(out / cap)


def mean_loss(p, cfg, batch):
    """Mean over the counted targets of the whole batch, with the z-loss."""
    out = logits(p, cfg, batch["tokens"], batch["pos"], batch["lo"]).flatten(0, 1)
    targets = batch["targets"].flatten()
    loss = F.cross_entropy(out, targets, ignore_index=-100)
    if cfg["z_loss"]:
        loss = loss + cfg["z_loss"] * out.logsumexp(-1)[targets != -100].square().mean()
    return loss


def train(params, cfg, batches, optim, lrs):
    """AdamW steps from `params` (name -> float64). Returns a dict of lists: loss, norm, grads
    (after clipping), and the parameters at the end."""
    p = {name: t.clone().requires_grad_() for name, t in params.items()}
    decay = optim["weight_decay"]
    groups = [{"params": [t for t in p.values() if t.ndim >= 2], "weight_decay": decay},
              {"params": [t for t in p.values() if t.ndim < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, betas=(optim["beta1"], optim["beta2"]), eps=optim["eps"])
    out = {"loss": [], "norm": [], "grads": []}
    for batch, lr in zip(batches, lrs, strict=True):
        loss = mean_loss(p, cfg, batch)
        loss.backward()
        limit = optim["grad_clip"] or math.inf
        out["norm"].append(torch.nn.utils.clip_grad_norm_(p.values(), limit).item())
        out["loss"].append(loss.item())
        out["grads"].append({name: t.grad.clone() for name, t in p.items()})
        for group in opt.param_groups:
            group["lr"] = lr
        opt.step()
        opt.zero_grad()
    out["params"] = {name: t.detach() for name, t in p.items()}
    return out
