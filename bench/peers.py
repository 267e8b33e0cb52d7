"""One training step of another trainer on a shape of bench/step.py, on demand: entries for a duel.

    python bench/peers.py nanogpt --path CHECKOUT --shape gpt2 [--compile]
    python bench/peers.py litgpt --path CHECKOUT --shape llama [--compile]
    python bench/peers.py hf --shape llama [--compile]      of the installed package transformers
    python bench/peers.py hf --shape llama --wrap ddp       or fsdp2: on two gloo ranks

Speaks the protocol of bench/step.py; nothing of a peer is copied here, its model is imported. A
step is forward, the peer's own loss, backward and AdamW in float32, no clipping, on random tokens.
AdamW is torch's fused one for all (nanoGPT and litgpt take another on a CPU, which is slower).
With --wrap each rank has one thread, and sequences of its own."""

import argparse
import importlib.util
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import sharded  # noqa: E402
import step as step_py  # noqa: E402

import model as model_py  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402


def nanogpt(cfg, path):
    """Its file is called model.py, as ours is."""
    spec = importlib.util.spec_from_file_location("nanogpt", pathlib.Path(path) / "model.py")
    sys.modules["nanogpt"] = peer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peer)
    model = peer.GPT(peer.GPTConfig(
        block_size=cfg.max_len, vocab_size=cfg.vocab_size, n_layer=cfg.n_layer, n_head=cfg.n_head,
        n_embd=cfg.d_model, dropout=0.0, bias=cfg.bias))
    return model, lambda run, tokens, targets: run(tokens, targets)[1]


def hf(cfg, path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, intermediate_size=cfg.d_ff,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, use_cache=False,
        num_key_value_heads=cfg.n_kv_head, max_position_embeddings=cfg.max_len,
        tie_word_embeddings=cfg.tied, attn_implementation="sdpa"))
    return model, lambda run, tokens, targets: run(
        input_ids=tokens, labels=targets, shift_labels=targets).loss


def litgpt(cfg, path):
    sys.path.insert(0, path)
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy  # as its pretrain.py does

    model = GPT(Config(
        block_size=cfg.max_len, vocab_size=cfg.vocab_size, padded_vocab_size=cfg.vocab_size,
        n_layer=cfg.n_layer, n_head=cfg.n_head, n_query_groups=cfg.n_kv_head, n_embd=cfg.d_model,
        intermediate_size=cfg.d_ff, rotary_percentage=1.0, parallel_residual=False, bias=cfg.bias,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP"))
    return model, lambda run, tokens, targets: chunked_cross_entropy(run(tokens), targets)


PEERS = {"nanogpt": nanogpt, "hf": hf, "litgpt": litgpt}


def wrapped(model, how):
    """In torch's data parallelism, sharded (layer by layer) or not."""
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--path", help="its checkout")
    parser.add_argument("--shape", required=True, choices=step_py.SHAPES)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="without --wrap")
    parser.add_argument("--wrap", choices=["ddp", "fsdp2"])
    args = parser.parse_args()
    children = sharded.start_ranks(2 if args.wrap else 1)
    torch.set_num_threads(1 if args.wrap else args.threads)
    parallel.start("cpu")
    section, seq_len, vocab, batch = step_py.SHAPES[args.shape]
    sharded.SHAPES[args.shape] = (batch,)
    cfg = model_py.ModelConfig(**train.load_config([])["model"] | section | {
        "vocab_size": vocab, "max_len": seq_len})
    torch.manual_seed(0)
    model, loss_of = PEERS[args.peer](cfg, args.path)
    params = sum(p.numel() for p in model.parameters())
    run = wrapped(model, args.wrap) if args.wrap else model
    opt = torch.optim.AdamW(run.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1,
                            fused=True)
    run = torch.compile(run) if args.compile else run

    def take_step(tokens, targets):
        loss = loss_of(run, tokens, targets)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss

    sharded.serve(take_step, args, cfg, seed=dist.get_rank(), params=params,
                  count=dist.get_world_size() * batch * seq_len)
    parallel.stop()
    for child in children:
        child.wait()


if __name__ == "__main__":
    main()
