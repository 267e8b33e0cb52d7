"""model.py: sampling, counting, compilation, and the pieces the parity tests do not reach."""

import dataclasses
import functools
import math
import unittest.mock

import parity
import pytest
import torch
import torch._dynamo

import model
import parallel
import train

# ---------------------------------------------------------------------------------------------
# Drawing a token


def frequencies(logits, n=4000, **choices):
    generator = torch.Generator().manual_seed(0)
    drawn = model.pick(logits.expand(n, -1), generator=generator, **choices)
    return torch.bincount(drawn, minlength=logits.shape[-1]) / n


@pytest.mark.quick
def test_pick_draws_from_the_softmax():
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    for temperature in (0.5, 1.0, 2.0):
        got = frequencies(logits, temperature=temperature, top_k=None, top_p=None)
        torch.testing.assert_close(got, (logits[0] / temperature).softmax(-1), atol=0.03, rtol=0)
    assert model.pick(logits, 0, None, None, None).item() == 3


@pytest.mark.quick
def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[None]
    two = frequencies(logits, temperature=1.0, top_k=2, top_p=None)
    torch.testing.assert_close(two, torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    # 0.5 does not reach 0.6, 0.5 + 0.3 does: two stay
    nucleus = frequencies(logits, temperature=1.0, top_k=None, top_p=0.6)
    torch.testing.assert_close(nucleus, torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)
    one = frequencies(logits, temperature=1.0, top_k=None, top_p=0.01)
    assert one[0] == 1 and frequencies(logits, temperature=1.0, top_k=9, top_p=1.0)[3] > 0


@pytest.mark.quick
def test_generation_never_draws_padding_and_stops(tokens):
    run = parity.prepare({"speed.pad_vocab": 64, "speed.dtype": "float32"}, tokens)
    start = torch.zeros(2, 3, dtype=torch.int64)
    out = model.generate(run.model, run.blocks, start, 40, temperature=5.0)
    assert out.shape == (2, 43) and out.max() < 51 and out.min() >= 0
    again = model.generate(run.model, run.blocks, start, 40, temperature=5.0)
    assert torch.equal(out, again)
    greedy = model.generate(run.model, run.blocks, start[:1], 1, temperature=0)
    ended = model.generate(run.model, run.blocks, start[:1], 40, temperature=0,
                           stop=greedy[0, -1].item())
    assert ended.shape == (1, 4)


def sample_on(case, folder):
    run = parity.prepare(case, folder)
    start = torch.tensor([[0, 0], [1, 2], [3, 4]])
    return model.generate(run.model, run.blocks, start, 16, top_k=9)


@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"tp": 2}, {"tp": 3}, {"pp": 2}, {"cp": 2},
                                    {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_every_rank_draws_what_one_process_draws(layout, positions, tokens, world):
    """At every length, also those that ranks cannot share, and past the longest context (13)."""
    case = {"model.n_head": 6, "model.n_kv_head": 1, "model.d_head": 2, "model.max_len": 13,
            "model.positions": positions}
    alone = sample_on(case, tokens)
    case |= {"parallel.zero": 3, "parallel.dp": 1} | {f"parallel.{a}": n for a, n in layout.items()}
    for got in world(math.prod(layout.values())).run(sample_on, case, str(tokens)):
        assert torch.equal(got, alone)


# ---------------------------------------------------------------------------------------------
# Counting


@pytest.mark.quick
def test_flops_are_those_of_the_matrix_products(tokens):
    """Counted by torch's own counter on a forward, three times it is forward and backward; causal
    attention is half of what the counter sees of the square."""
    from torch.utils.flop_counter import FlopCounterMode

    case = {"speed.dtype": "float32", "model.n_layer": 3, "speed.pad_vocab": 1}
    run = parity.prepare(case, tokens)
    cfg, T = run.model.cfg, 12
    ids = torch.zeros(2, T, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        x = None
        for _, block in run.model.named_blocks():
            x = block.logits(x, -1) if block is run.model.head else block(x, run.model.micro(ids))
    by_op = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in by_op.items() if "mm" in str(op) and "bmm" not in str(op))
    others = ids.numel() - len(ids)  # logits were made of the last token only
    products += 2 * cfg.vocab_size * cfg.d_model * others
    attention = 12 * cfg.n_layer * cfg.n_head * cfg.d_head * (T + 1) / 2
    assert model.flops_per_token(cfg, T) == 3 * products / ids.numel() + attention
    with_window = dataclasses.replace(cfg, window=[5, None, 100])
    seen = [sum(min(i + 1, w) for i in range(T)) / T for w in (5, T, T)]
    attention = sum(12 * cfg.n_head * cfg.d_head * keys for keys in seen)
    assert model.flops_per_token(with_window, T) == pytest.approx(
        3 * products / ids.numel() + attention, rel=1e-12)
    lengths = [1, 4, 2, 5]  # of the documents in a sequence of 12
    pos = torch.cat([torch.arange(n) for n in lengths])
    assert model.keys_seen(cfg, pos) == 3 * sum(n * (n + 1) // 2 for n in lengths)
    attention = model.flops(cfg, 12, 1000) - model.flops(cfg, 12, 0)
    assert attention == 12 * 1000 * cfg.n_head * cfg.d_head


@pytest.mark.quick
def test_what_a_step_sees_is_counted(tokens):
    """Of every query and layer the keys in its document and its window, one by one."""
    case = {"data.mask_documents": True, "model.window": [4, None], "model.n_layer": 3}
    run = parity.prepare(case, tokens)
    run.loader.start(0)
    _, batches, pending = train.next_batch(run, False)
    want = 0
    for window in (4, 10**9, 4):
        for b in batches:
            for row in b.lo.tolist():
                want += sum(j > i - window for i, lo in enumerate(row) for j in range(lo, i + 1))
    count, stop, pairs, *_ = pending.wait()
    assert (count, stop, pairs) == (sum(b.n_valid for b in batches), 0, want)


@pytest.mark.quick
def test_parameter_table(capsys):
    cfg = model.ModelConfig(**train.load_config([])["model"] | {"vocab_size": 257, "max_len": 256})
    model.print_table(cfg, 256)
    rows = capsys.readouterr().out.splitlines()
    counts = [int(row.split()[-1].replace(",", "")) for row in rows[1:-2]]
    assert sum(counts) == int(rows[-2].split()[-1].replace(",", ""))
    by_hand = 257 * 192 + 4 * (2 * 192 + 2 * 192 * 192 + 2 * 192 * 96 + 3 * 192 * 512) + 192
    assert sum(counts) == by_hand


# ---------------------------------------------------------------------------------------------
# Compilation


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside dynamo
@pytest.mark.parametrize("extra", [{}, {"model.dropout": 0.2, "data.mask_documents": True},
                                   {"model.window": [4, None]},
                                   {"model.norm": "layernorm", "model.activation": "gelu",
                                    "model.positions": "learned", "model.bias": True}],
                         ids=["llama", "dropout and documents", "windows", "gpt2"])
def test_one_compilation_serves_all_layers(extra, tokens):
    """Whole-graph, forward and backward, no break; once for all layers and steps; same numbers."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    case = extra | {"model.n_layer": 4}
    plain = parity.prepare(case, tokens)
    run = parity.prepare(case, tokens)
    run.model.functions(compiled=True)  # not these: to count the graphs
    forward = torch.compile(model.Layer.forward, dynamic=False, fullgraph=True, backend=backend)
    layers = [lambda x, micro, later, layer=layer: forward(layer, x, micro)
              for layer in run.model.layers.values()]
    run.fns = [run.model.embed, *layers, run.model.head]
    for r in (plain, run):
        r.loader.start(0)
    for _ in range(2):
        losses = []
        for r in (plain, run):
            _, batches, pending = train.next_batch(r, False)
            losses.append(train.train_step(r, batches, pending.wait()[0])[0].item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    kinds = 2 if extra.get("data.mask_documents") else 1  # batches with and without boundaries
    assert 1 <= len(graphs) <= kinds * len(set(run.model.cfg.windows))
    for a, b in zip(plain.blocks.master, run.blocks.master):
        assert parity.agree("parameters", a, b) is None


@pytest.mark.filterwarnings("ignore")  # torch's own, inside dynamo
@pytest.mark.parametrize("split", [False, True])
def test_too_many_compilations_are_an_error(split, tokens, monkeypatch):
    """And not slow code. `split`: graphs that a schedule breaks."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    run = parity.prepare({}, tokens)
    _, layer, *_ = run.model.functions(compiled=True, split=split)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(Exception, match="limit"):
        for T in range(2, 12, 2):
            x, ids = torch.zeros(1, T, 16).double(), torch.zeros(1, T, dtype=torch.int64)
            layer(x, run.model.micro(ids), [])
    assert T == 6
    torch._dynamo.reset()


@pytest.mark.quick
def test_recomputation_saves_what_it_says(tokens):
    """With full recomputation forward keeps each layer's input and no graph; every second: half."""
    for recompute, kept in (("none", 4), ("full", 0), (2, 2)):
        run = parity.prepare({"model.n_layer": 4, "speed.recompute": recompute}, tokens)
        batch = run.loader.loader.step(0)[0]
        micro = train.to_device(run, batch, torch.ones(()))
        run.blocks.begin()
        flow = parallel.Flow(run.fns, run.blocks, [micro], run.keep, run.model.chunks, True, False,
                             {}, {}, {}, [1] * len(run.fns))
        parallel.forward(flow, 0, 0, False)
        graphs = [y is not None and y.grad_fn is not None for _, y, _ in flow.saved[0, 0][1:-1]]
        assert sum(graphs) == kept


def kept_bytes(case, folder):
    """Bytes that one layer keeps for its backward, storages counted once: without parameters and
    rotary tables."""
    run = parity.prepare(case, folder)
    micro = train.to_device(run, run.loader.loader.step(0)[0], torch.ones(()))
    known = {t.untyped_storage().data_ptr() for t in (*run.blocks.weight, micro.cos, micro.sin)}
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    def spy(self, x, pack_=model.Remake.pack):
        kept = pack_(self, x)
        for t in [kept] if isinstance(kept, torch.Tensor) else kept[0][1:]:
            pack(t)
        return kept

    x = run.fns[0](None, micro, None).detach().requires_grad_()
    with (torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
          unittest.mock.patch.object(model.Remake, "pack", spy)):
        y = run.fns[1](x, micro, None)
    del y
    return sum(s.nbytes() for at, s in storages.items() if at not in known)


@pytest.mark.parametrize("extra", [
    {}, {"model.norm": "layernorm", "model.activation": "gelu", "model.bias": True},
    {"model.qk_norm": True, "model.dropout": 0.1}], ids=["llama", "gpt2", "qwen3"])
def test_what_a_layer_keeps_falls_as_one_over_tp(extra, tokens, world):
    case = {"model.n_head": 4, "model.n_kv_head": 4, "data.seq_len": 64, "model.max_len": 64,
            "train.global_batch": 2, "train.microbatch": 2} | extra
    alone = kept_bytes(case, tokens)
    kept = kept_bytes(case | {"speed.keep_gathered": True}, tokens)
    assert alone == kept
    for tp in (2, 4):
        split = case | {"parallel.tp": tp, "parallel.dp": 1}
        assert world(tp).run(kept_bytes, split, str(tokens)) == [alone // tp] * tp
        gathered = 2 * 2 * 64 * 16 * 8  # the inputs of both enters: B T D in float64
        kept = world(tp).run(kept_bytes, split | {"speed.keep_gathered": True}, str(tokens))
        assert kept == [alone // tp + gathered - gathered // tp] * tp


def test_selective_recomputation_keeps_products_and_remakes_the_rest(tokens):
    """Of a Llama layer: the input and the middle of the residual stream with a factor a row, q k v,
    attention's output, gate and up."""
    case = {"model.n_head": 4, "model.n_kv_head": 2, "data.seq_len": 64, "model.max_len": 64,
            "train.global_batch": 2, "train.microbatch": 2}
    tokens_, D, d_kv, ffn = 2 * 64, 16, 8, 24
    want = tokens_ * 8 * (2 * D + 2 + D + 2 * d_kv + D + 2 * ffn)
    got = kept_bytes(case | {"speed.recompute": "selective"}, tokens)
    assert got == want
    assert kept_bytes(case, tokens) > 1.5 * got
