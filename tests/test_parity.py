"""Every layout computes what one process computes, and one process computes the specification."""

import itertools
import math
import pathlib
import re

import parity
import pytest
import reference
import torch

import data
import train

LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_len": 24}
GPT2 = {"model.norm": "layernorm", "model.positions": "learned", "model.activation": "gelu",
        "model.bias": True, "kv": "all"}
MODELS = {  # heads that are normalised have more than 2 channels: those multiply noise by 10^4
    "llama": {"model.tied": False, "model.n_layer": 3, "kv": "grouped"},
    "llama3": {"model.rope_scaling": LLAMA3_ROPE, "model.rope_theta": 500.0, "kv": "few"},
    "qwen3": {"model.qk_norm": True, "model.d_head": 6, "model.n_layer": 3, "kv": "few"},
    "gpt2": GPT2,
    "capped": {"model.logit_softcap": 2.0, "model.z_loss": 0.05, "model.bias": True,
               "model.dropout": 0.2, "model.qk_norm": True, "model.d_head": 4, "kv": "grouped"},
    "gpt2 dropped": GPT2 | {"model.dropout": 0.3, "model.tied": False, "kv": "few"},
}
AXES = ("pp", "dp", "fsdp", "cp", "tp")
LAYOUTS = [{axis: n for axis, n in zip(AXES, sizes) if n > 1}  # of up to 8 ranks, all there are
           for sizes in itertools.product(range(1, 9), repeat=5) if 1 < math.prod(sizes) <= 8]
SMALL = [layout for layout in LAYOUTS if math.prod(layout.values()) <= 4]
SMALL += [{"dp": 2, "fsdp": 3}, {"fsdp": 2, "tp": 3}]
LARGE = [{"dp": 2, "cp": 3}, {"pp": 3, "tp": 2}, {"pp": 2, "fsdp": 2, "tp": 2},
         {"pp": 2, "fsdp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2},
         {"pp": 2, "dp": 2, "fsdp": 2}, {"pp": 4, "fsdp": 2}]
OPTIONS = {
    "rounds": [1, 3, "uneven", 6],  # microbatches a step; uneven: the last is smaller
    "ignore": list(parity.RULES),
    "pipe": [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1), ("gpipe", 2),
             ("interleaved", 1)],  # parallel.schedule, parallel.chunks
    "parallel.zero": [0, 1, 2, 3],
    "parallel.zero_pp": ["keep", "regather"],
    "parallel.cp_mode": ["ring", "ulysses"],
    "parallel.prefetch": [0, 1, 2],
    "parallel.offload": ["none", "optimizer"],
    "speed.recompute": ["none", "full", 2, "selective"],
    "speed.keep_gathered": [False, True],
    "speed.pad_vocab": [8, 1],
    "optim.grad_clip": [None, 0.5],
    "data.mask_documents": [False, True],
    "model.window": [None, 3, [5, None]],
    "model": list(MODELS),
}
COVER = parity.covering(OPTIONS)  # every pair of values
DEFAULT = parity.covering(OPTIONS | {"layout": SMALL})  # and of these with a layout
DEFAULT += [COVER[n] | {"layout": layout} for n, layout in enumerate(LARGE)]
DEFAULT += [case | {"pipe": ("zero-bubble", 1), "rounds": 3, "speed.recompute": "none",
                    "parallel.zero_pp": case.get("parallel.zero_pp", "regather")} for case in [
    # of three options and more: a split backward at each stage of zero, and a tied weight
    {"layout": {"pp": 2, "fsdp": 2}, "parallel.zero": 1, "model": "qwen3"},
    {"layout": {"pp": 2, "fsdp": 2}, "parallel.zero": 2, "model": "llama3"},
    {"layout": {"pp": 2, "fsdp": 2}, "parallel.zero": 3, "model": "qwen3",
     "parallel.zero_pp": "keep"},
    {"layout": {"pp": 2, "fsdp": 2}, "parallel.zero": 3, "model": "gpt2"},
    {"layout": {"pp": 2, "dp": 2}, "parallel.zero": 2, "model": "gpt2"},
    {"layout": {"pp": 2, "tp": 2}, "parallel.zero": 0, "model": "llama3", "ignore": "uneven",
     "data.mask_documents": True}]]
ALL = parity.covering(OPTIONS | {"layout": LAYOUTS})


def layouts_of(**sizes):
    """Those of up to 8 ranks whose axes have these sizes."""
    return [layout for layout in LAYOUTS if set(layout) <= set(sizes)
            and all(layout.get(axis, 1) in some for axis, some in sizes.items())]


def of_kind(*axes, has=None):
    """Those of up to 4 ranks of these axes, all with the axis `has`."""
    return [layout for layout in LAYOUTS if math.prod(layout.values()) <= 4
            and set(layout) <= {*axes, has} and has in (None, *layout)]


ZEROS, MASKS, MODES = [0, 1, 2, 3], [False, True], ["ring", "ulysses"]
for axes in (  # whole products, the other options in turn
        {"layout": layouts_of(dp=[1, 2, 4], fsdp=[1, 2, 3, 4]), "parallel.zero": ZEROS,
         "rounds": [1, 3], "speed.recompute": ["none", "full"]},
        {"layout": layouts_of(tp=[2, 3, 4]), "parallel.zero": ZEROS, "model": list(MODELS)},
        {"layout": layouts_of(cp=[2, 4], tp=[1, 2], pp=[1, 2]), "parallel.zero": ZEROS,
         "parallel.cp_mode": MODES, "data.mask_documents": MASKS,
         "model.window": [None, [5, None]]},
        {"layout": layouts_of(pp=[2, 4]), "pipe": OPTIONS["pipe"], "model": ["llama", "qwen3"],
         "rounds": [1, 3], "parallel.zero": ZEROS},
        {"layout": [{"fsdp": 2, "tp": 2}], "parallel.zero": ZEROS, "model": list(MODELS),
         "speed.keep_gathered": [False, True]},
        {"layout": [{"fsdp": 2, "cp": 2}], "parallel.zero": ZEROS, "parallel.cp_mode": MODES,
         "data.mask_documents": MASKS, "model.window": [None, [5, None]]},
        {"layout": [{"pp": 2, "fsdp": 2}], "pipe": OPTIONS["pipe"], "model": ["llama", "qwen3"],
         "parallel.zero": ZEROS, "speed.recompute": OPTIONS["speed.recompute"]},
        # and with more options on every kind of layout of up to 4 ranks
        {"layout": of_kind("dp", "fsdp"), "parallel.zero": ZEROS, "rounds": OPTIONS["rounds"],
         "speed.recompute": OPTIONS["speed.recompute"]},
        {"layout": of_kind("dp", "fsdp", has="tp"), "parallel.zero": ZEROS, "model": list(MODELS)},
        {"layout": of_kind("pp", "dp", "fsdp", "tp", has="cp"), "parallel.zero": ZEROS,
         "parallel.cp_mode": MODES, "data.mask_documents": MASKS,
         "model.window": [None, [5, None]]},
        {"layout": of_kind("dp", "fsdp", "cp", "tp", has="pp"), "pipe": OPTIONS["pipe"],
         "model": ["llama", "qwen3"], "rounds": [1, 3], "parallel.zero": ZEROS}):
    ALL += [COVER[n % len(COVER)] | dict(zip(axes, values))
            for n, values in enumerate(itertools.product(*axes.values()))]


def name_of(case):
    """A test's name: the values of the case."""
    return "-".join("".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else str(v)
                    for v in case.values())


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("extra", [
    {}, {"data.mask_documents": True, "ignore": "uneven", "optim.grad_clip": 0.5,
         "train.microbatch": 5, "speed.recompute": 2},
    {"model.window": [3, None], "data.mask_documents": True, "speed.recompute": "selective"}],
                         ids=["plain", "masked", "window"])
def test_one_process_is_the_reference(name, extra, tokens):
    case = on_layout(MODELS[name] | {"rounds": 1}, {}) | extra | {"model.dropout": 0.0}
    run = parity.prepare(case, tokens)
    got = parity.run_case(case, tokens, return_init=True)
    run.loader.start(0)
    batches = [parity.batch_of(run, run.loader.next()[1]) for _ in range(3)]
    assert [int((b["targets"] != -100).sum()) for b in batches] == got["count"]
    lrs = [train.lr_at(step, run.config["optim"], 3) for step in range(3)]
    want = reference.train(got["init"], run.config["model"], batches, run.config["optim"], lrs)
    assert parity.compare(got, want) is None


@pytest.fixture(scope="session")
def truth(tokens):
    """The single-process result of a case, computed once."""
    known = {}

    def get(case):
        alone = {k: v for k, v in case.items() if not k.startswith(("parallel", "speed"))}
        alone["train.microbatch"] = alone["train.global_batch"]
        key = str(sorted(alone.items()))
        if key not in known:
            known[key] = parity.run_case(alone, tokens)
        return known[key]

    return get


def on_layout(case, layout):
    """The case on a layout ({axis: ranks}): sizes that its axes divide, its rounds turned into a
    microbatch size, its kind of key and value heads into a number."""
    case, (_, dp, fsdp, cp, tp) = dict(case), (layout.get(axis, 1) for axis in AXES)
    odd = next((n for n in (5, 7) if n in layout.values()), 6)
    local = 4 * odd // (dp * fsdp)
    rounds, (schedule, chunks) = case.pop("rounds", 1), case.pop("pipe", ("1f1b", 1))
    size = max(local * 2 // 3, 1) if rounds == "uneven" else -(-local // rounds)
    n_head = 8 if cp * tp == 8 else 2 * odd

    def fits(kv):
        own = max(kv // tp, 1)
        return not (n_head % kv or kv % tp and tp % kv or own % cp and cp % own)

    kv = {"all": n_head, "grouped": next(n for n in (*range(3, n_head), n_head) if fits(n)),
          "few": 2 if tp == 4 else 1}[case.pop("kv", "grouped")]
    parts = math.lcm(2 * cp, cp * tp)
    sizes = {"model.n_head": n_head, "model.n_kv_head": kv, "model.d_head": 2,
             "model.d_ff": 2 * n_head, "train.global_batch": 4 * odd,
             "parallel.schedule": schedule, "parallel.chunks": chunks,
             "data.seq_len": -(-max(12, 6 * cp) // parts) * parts}
    axes = {f"parallel.{axis}": layout.get(axis, 1) for axis in AXES}
    return sizes | case | {"train.microbatch": size} | axes


def check(world, truth, tokens, case):
    """Run a case of OPTIONS on its layout, compare every rank with one process. Stages are uneven,
    if there are few."""
    layout = case["layout"]
    case = MODELS[case["model"]] | case if "model" in case else case
    stages = layout.get("pp", 1) * case.get("pipe", ("1f1b", 1))[1]
    if stages > 1:
        case = case | {"model.n_layer": next(n for n in (3, 5, 8, 16) if n >= stages)}
    case = on_layout({k: v for k, v in case.items() if k not in ("layout", "model")}, layout)
    ranks = math.prod(layout.values())
    results = world(ranks).run(parity.run_case, case, str(tokens), timeout=30 * ranks,
                               beside=lambda: truth(case))
    want = truth(case)
    for rank, got in enumerate(results):
        note = parity.compare(got, want)
        assert note is None, f"{case}: rank {rank}: {note}"
        assert (got["count"], got["pairs"]) == (want["count"], want["pairs"])
        if "pp" in layout:
            check_pipe(got["ledger"], got["sizes"], rank, case)
        else:
            check_ledger(got["ledger"], case, want["params"])


def local_sizes(params, case):
    """{block: (elements of its flat buffer, of these replicated over tp)}: parameters at multiples
    of 16, the vocabulary padded, the whole a multiple of 16 for each data rank."""
    tp, kv = case["parallel.tp"], case["model.n_kv_head"]
    pad, ranks = case.get("speed.pad_vocab", 8), math.prod(
        case[f"parallel.{axis}"] for axis in ("dp", "fsdp", "cp"))
    sizes = {}
    for name, tensor in params.items():
        block, *_, layer, kind = ("." + name).rsplit(".", 2)
        block = ".".join(name.split(".")[: 2 if name.startswith("layers") else 1])
        n = tensor.numel()
        if name in ("embed.tokens.weight", "head.weight"):
            n = -(-tensor.shape[0] // (pad * tp)) * pad * tensor.shape[1]
            whole = False
        elif layer in ("q", "gate", "up") or layer in "kv" and kv >= tp:
            n, whole = n // tp, False
        elif layer in ("o", "down") and kind == "weight":
            n, whole = n // tp, False
        else:  # norms, biases of row products, positions, keys and values of few heads
            whole = True
        n = -(-n // 16) * 16
        total, replicated = sizes.get(block, (0, 0))
        sizes[block] = total + n, replicated + n * whole
    return {b: (-(-n // (16 * ranks)) * 16 * ranks, r) for b, (n, r) in sizes.items()}


def check_ledger(ledger, case, params):
    """The first step's traffic is the textbook's, to the byte (DP 2P(n-1)/n; ZeRO: see Blocks; tp
    and cp: see the two functions below)."""
    d, f, cp, tp, zero = (case[f"parallel.{k}"] for k in ("dp", "fsdp", "cp", "tp", "zero"))
    both = local_sizes(params, case)
    sizes = {b: n for b, (n, _) in both.items()}
    local, f = case["train.global_batch"] // (d * f), f * cp
    m = -(-local // case["train.microbatch"])
    layers = [b for b in sizes if b.startswith("layers")]
    want = {}

    def add(axis, n, op, blocks, times, factor, part=1):
        if n > 1:
            nbytes = times * sum(factor * sizes[b] // part * 8 * (n - 1) // n for b in blocks)
            want[axis, op] = [times * len(blocks), nbytes]

    if zero == 0:
        add("grad", d * f, "all_reduce sum", sizes, 1, 2)
    else:
        add("shard", f, "reduce_scatter", sizes, 1 if zero == 1 else m, 1)
        add("dp", d, "all_reduce sum", sizes, 1, 2, f)
        gathered = list(sizes) if zero < 3 else [*sizes, *layers[:-1]]
        add("shard", f, "all_gather", gathered, 1 if zero < 3 else m, 1)
    if cp > 1:
        check_cp_traffic(ledger, case, local, m, len(layers))
    if tp > 1:
        check_tp_traffic(ledger, case, local, m, len(layers))
        calls, nbytes = ledger["tp", "all_reduce sum (replicated)"]
        most = 2 * 8 * sum(r for _, r in both.values()) * (tp - 1) // tp
        assert calls == 1 and nbytes <= most and (f > 1 and zero or nbytes == most), case
    got = {k: v for k, v in ledger.items() if k[1] != "all_reduce sum (control)"
           and k not in (("loss", "all_reduce sum"), ("copy", "all_reduce sum"),
                         ("model", "all_reduce sum")) and k[0] not in ("tp", "cp")}
    assert got == want, case
    scalars = {("loss", "all_reduce sum"): d * f, ("copy", "all_reduce sum"): f * tp if zero else 1,
               ("model", "all_reduce sum"): 1 if zero else tp}
    for key, n in scalars.items():  # the loss; the squared norm
        assert ledger.get(key, [0, 0]) == ([1, 2 * 8 * (n - 1) // n] if n > 1 else [0, 0])


def check_pipe(ledger, sizes, rank, case):
    """A stage sends what it makes of each microbatch to the next and the gradient to the one
    before. Zero 1, and 2 and 3 that keep: one gather and one scatter of each block a step."""
    p, v, f = (case[f"parallel.{k}"] for k in ("pp", "chunks", "fsdp"))
    d, tp, zero = (case[f"parallel.{k}"] for k in ("dp", "tp", "zero"))
    stage, stages = rank // (d * f * case["parallel.cp"] * tp), p * v
    cp = case["parallel.cp"]
    local = case["train.global_batch"] // (d * f)
    m, f = -(-local // case["train.microbatch"]), f * cp
    each = local * case["data.seq_len"] // (cp * tp) * parity.TINY["model.d_model"] * 8
    mine = range(stage, stages, p)
    n = sum((s < stages - 1) + (s > 0) for s in mine)
    assert ledger["pp", "send"] == [n * m, n * each], case
    tied = case.get("model.tied", True) and stage in (0, p - 1)
    assert (("pp", "send (tied)") in ledger) == tied, case
    sizes = [size for size in sizes if size]
    if f > 1 and zero:
        keep = case["parallel.zero_pp"] == "keep"
        once = [len(sizes), sum(8 * size * (f - 1) // f for size in sizes)]
        times = 1 if zero == 1 or keep else m
        assert ledger["shard", "reduce_scatter"] == [times * x for x in once], case
        if zero < 3 or keep:  # zero 3 that regathers: for each action
            assert ledger["shard", "all_gather"] == once, case


def computed_again(case, n_layer):
    """How many layers are computed again in backward."""
    every = {"none": 0, "selective": 0, "full": 1}.get(case["speed.recompute"],
                                                       case["speed.recompute"])
    return len([i for i in range(n_layer) if every and i % every == 0])


def check_cp_traffic(ledger, case, local, m, n_layer):
    """Each layer, with K = V the keys (values) of a rank: ring: forward c-1 shifts of K + V,
    backward as many and c-1 of their gradients. Ulysses: q, k, v and the output, (c-1)/c of each,
    forward and backward, keys copied where there are fewer than c. Forward again where the layer is
    computed again. Nothing else goes over cp alone."""
    cp, tp, T = case["parallel.cp"], case["parallel.tp"], case["data.seq_len"]
    head = local * T // cp * case["model.d_head"] * 8
    heads, kv = case["model.n_head"] // tp, max(case["model.n_kv_head"] // tp, 1)
    again = computed_again(case, n_layer)
    if case["parallel.cp_mode"] == "ring":
        shifts, nbytes = (cp - 1) * m, (cp - 1) * 2 * kv * head
        want = {"shift (keys)": [(2 * n_layer + again) * x for x in (shifts, nbytes)],
                "shift (gradients of keys)": [n_layer * shifts, n_layer * nbytes]}
    else:
        nbytes = (2 * heads + 2 * max(kv, cp)) * head * (cp - 1) // cp
        want = {"all_to_all": [(2 * n_layer + again) * x for x in (4 * m, nbytes)]}
    assert {op: n for (axis, op), n in ledger.items() if axis == "cp"} == want, case


def check_tp_traffic(ledger, case, local, m, n_layer):
    """Each layer: forward 2 all-gathers and 2 reduce-scatters of B T D, backward 4 (2 if gathered
    sequences are kept) and 2, and the forward's again where the layer is computed again. One
    reduce-scatter and one all-gather for the embedding, for each chunk of the loss one of each and
    two small all-reduces."""
    tp, T, D = case["parallel.tp"], case["data.seq_len"], parity.TINY["model.d_model"]
    T //= case["parallel.cp"]
    nbytes = local * T * D * 8 * (tp - 1) // tp
    again = computed_again(case, n_layer)
    gathers = n_layer * (4 if case["speed.keep_gathered"] else 6) + 2 * again
    scatters = n_layer * 4 + 2 * again
    for op, n in (("all_gather", gathers), ("reduce_scatter", scatters),
                  ("all_gather (embedding)", 1), ("reduce_scatter (embedding)", 1)):
        assert ledger["tp", op] == [n * m, n * nbytes], (op, case)
    rows, chunks, words = max(parity.TINY["speed.loss_chunk"] // tp, 1), 0, [0, 0]
    for j in range(m):
        tokens = min(case["train.microbatch"], local - j * case["train.microbatch"]) * T // tp
        for i in range(0, tokens, rows):
            n = min(rows, tokens - i) * tp
            words = [w + 2 * k * n * 8 * (tp - 1) // tp for w, k in zip(words, (1, 2))]
            chunks += 1
    for op, n in (("all_gather (loss)", nbytes), ("reduce_scatter (loss)", nbytes),
                  ("all_reduce max (loss)", words[0]), ("all_reduce sum (loss)", words[1])):
        assert ledger["tp", op] == [chunks, n], (op, case)


@pytest.mark.parametrize("case", DEFAULT, ids=name_of)
def test_layouts_equal_one_process(case, world, truth, tokens):
    check(world, truth, tokens, case)


@pytest.mark.full
@pytest.mark.parametrize("part", range(0, len(ALL), 10))
def test_every_layout(part, world, truth, tokens):
    for case in ALL[part : part + 10]:
        check(world, truth, tokens, case)


SAVES = [{}, {"tp": 2}, {"pp": 2, "chunks": 2}, {"fsdp": 2, "cp": 2}]
MORE_SAVES = [{"fsdp": 3}, {"dp": 2}, {"dp": 2, "fsdp": 2}, {"tp": 3}, {"tp": 4},
              {"fsdp": 2, "tp": 2}, {"pp": 4}]
REST = {"model": ["llama", "capped"], "zeros": [(0, 3), (3, 0), (1, 2), (3, 3)]}
PAIRS = parity.covering({"saved": SAVES, "resumed": SAVES} | REST)
PAIRS += [{"saved": a, "resumed": b, "model": "capped", "zeros": (3, 1)} for a, b in [
    ({"tp": 2}, {"tp": 3}), ({"tp": 2}, {"tp": 4}), ({"pp": 4}, {"pp": 2, "chunks": 2}),
    ({"dp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}), ({"fsdp": 3}, {"fsdp": 2, "cp": 2})]]
ALL_PAIRS = parity.covering({"saved": SAVES + MORE_SAVES, "resumed": SAVES + MORE_SAVES} | REST)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_saved_on_every_layout_resumed_on_every_other(part, world, tokens, tmp_path):
    for n, case in enumerate(ALL_PAIRS[part::10]):
        check_resumed(case, world, tokens, tmp_path / str(n))


@pytest.mark.parametrize("case", PAIRS, ids=name_of)
def test_saved_on_one_layout_resumed_on_another(case, world, tokens, tmp_path):
    check_resumed(case, world, tokens, tmp_path)


def check_resumed(case, world, tokens, root):
    """Two steps here and two there are the four steps of one process; what is loaded is bit for
    bit what was saved, by fingerprints of every parameter and moment."""
    saved = None
    base = MODELS[case["model"]] | {"train.steps": 4, "optim.grad_clip": 0.5, "kv": "all",
                                    "model.n_layer": 4}
    want = parity.run_case(on_layout(base, {}), tokens, 4)
    for layout, zero, fn in ((case["saved"], case["zeros"][0], parity.run_and_save),
                             (case["resumed"], case["zeros"][1], parity.resume_and_run)):
        axes = {k: n for k, n in layout.items() if k != "chunks"}
        chunks = layout.get("chunks", 1)
        here = on_layout(base | {"parallel.zero": zero, "rounds": 3,
                                 "pipe": ("interleaved", chunks)}, axes)
        results = world(math.prod(axes.values())).run(fn, here, str(tokens), str(root), 2)
        saved = saved or results[0]["saved"]
    for got in results:
        assert got["loaded"] == saved and len(set(saved.values())) > 3 * len(want["params"]) * 0.9
        tail = {k: want[k][2:] for k in ("loss", "norm", "grads")} | {"params": want["params"]}
        assert parity.compare(got, tail) is None


@pytest.mark.quick
@pytest.mark.parametrize("zero", [0, 3])
def test_two_ranks(zero, world, truth, tokens):
    case = {"ignore": "prefix", "rounds": "uneven", "model.dropout": 0.3, "parallel.zero": zero,
            "speed.recompute": "none", "speed.keep_gathered": False}
    for axis in ("fsdp", "tp"):
        check(world, truth, tokens, case | {"layout": {axis: 2}})


def test_stages_are_bit_equal_at_two_ranks(world, tokens):
    """Two summands have one sum: with one microbatch and no clipping, no stage changes a bit."""
    results = [world(2).run(parity.run_case, on_layout(
        {"parallel.zero": zero, "optim.grad_clip": None, "speed.dtype": "float32",
         "model.n_layer": 4}, {"fsdp": 2}), str(tokens))[0] for zero in range(4)]
    for other in results[1:]:
        assert other["loss"] == results[0]["loss"]
        assert all(torch.equal(other["params"][n], p) for n, p in results[0]["params"].items())


@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"dp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}],
                         ids=str)
def test_zero_2_and_3_are_bit_equal(layout, world, tokens):
    case = {"rounds": 3, "optim.grad_clip": 0.5, "speed.dtype": "bfloat16", "model.n_layer": 4}
    a, b = (world(math.prod(layout.values())).run(parity.run_case, on_layout(
        case | {"parallel.zero": zero}, layout), str(tokens))[0] for zero in (2, 3))
    assert a["loss"] == b["loss"] and a["norm"] == b["norm"]
    assert all(torch.equal(b["params"][n], p) for n, p in a["params"].items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lower_precision_stays_near(dtype, world, truth, tokens):
    """Every mode in the compute dtype, against one process in float64: the error of one rounding
    of each weight and activation, and no more with more ranks."""
    unit = {"float32": 2**-24, "bfloat16": 2**-9, "float16": 2**-12}[dtype]
    want = truth(on_layout({"kv": "all"}, {}))
    modes = [({"fsdp": 2}, {"parallel.zero": zero}) for zero in range(4)]
    modes += [({"tp": 2}, {}), ({"cp": 2}, {}), ({"cp": 2}, {"parallel.cp_mode": "ulysses"}),
              ({"pp": 2}, {"parallel.schedule": "zero-bubble"})]
    for layout, options in modes:
        case = on_layout({"speed.dtype": dtype, "parallel.zero": 0, "rounds": 3, "kv": "all"}
                         | options, layout)
        got = world(2).run(parity.run_case, case, str(tokens))[0]
        for step in range(3):
            assert abs(got["loss"][step] / want["loss"][step] - 1) < 16 * unit, (layout, step)
            assert abs(got["norm"][step] / want["norm"][step] - 1) < 64 * unit, (layout, step)


def test_bfloat16_reduction_is_asked_for_and_counted(world, truth, tokens):
    """reduce_dtype halves the bytes of the sums (and only of those), and costs their rounding."""
    base = on_layout({"speed.dtype": "float32", "parallel.zero": 3}, {"fsdp": 2})
    full, half = (world(2).run(parity.run_case, base | {"parallel.reduce_dtype": r},
                               str(tokens))[0] for r in (None, "bfloat16"))
    key = ("shard", "reduce_scatter")
    assert half["ledger"][key] == [full["ledger"][key][0], full["ledger"][key][1] // 2]
    assert half["ledger"]["shard", "all_gather"] == full["ledger"]["shard", "all_gather"]
    assert 0 < abs(half["norm"][0] / full["norm"][0] - 1) < 2**-8


@pytest.mark.parametrize("tp, kv", [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_few_key_heads_on_many_ranks(tp, kv, world, truth, tokens):
    """Eight query heads; a key head that several ranks use has one gradient and stays one."""
    case = {"model.n_head": 8, "model.n_kv_head": kv, "model.d_head": 4, "model.tied": False,
            "model.bias": True}
    check(world, truth, tokens, case | {
        "layout": {"tp": tp}, "parallel.zero": 0, "speed.recompute": "none",
        "speed.keep_gathered": False})


@pytest.mark.quick
def test_the_tolerance():
    """Relative to the largest value, or to 1; of gradients to the largest, or to 1e-4 of the norm.
    What float32 or a factor would do is refused, and so is what is not a number."""
    b = torch.tensor([1.0, 1e-6, -3.0])
    for off, same in ((1e-12, True), (9e-10, True), (1.1e-9, False), (1e-7, False), (1e-4, False)):
        for at in range(3):
            a = b.double().clone()
            a[at] += off * 3
            assert (parity.agree("x", a, b.double()) is None) == same
            assert (parity.agree("x", a, b.double(), 100.0) is None) == same
    tiny = torch.tensor([1e-13, -2e-13])
    assert parity.agree("x", tiny, 0 * tiny) is None  # an absolute bound near 0
    assert parity.agree("x", tiny, 0 * tiny, 100.0) is None and parity.agree("x", tiny, -tiny, 1.0)
    assert parity.agree("x", 1e-13 * b, 2e-13 * b, 1e-9)  # a factor in a small gradient
    for bad in (math.nan, math.inf):
        assert parity.agree("x", torch.tensor([bad]), torch.tensor([1.0]))
        assert parity.agree("x", torch.tensor([bad]), torch.tensor([bad]))
    assert parity.agree("x", torch.ones(2), torch.ones(3))


@pytest.mark.quick
@pytest.mark.parametrize("mask", [False, True])
def test_held_out_loss_is_the_reference_s(mask, tokens):
    """The mean over all targets of the sequences that were asked for, with the documents' masks of
    training, whatever the size of a microbatch."""
    case = on_layout(MODELS["llama"] | {"model.n_layer": 2}, {}) | {"data.mask_documents": mask}
    losses = []
    for size in (1, 3, 24):
        run = parity.prepare(case | {"train.microbatch": size}, tokens)
        losses.append(train.evaluate(run)[0])
    batches = list(data.eval_batches(run.val, 12, 7, 7, 0, 1, mask))
    assert [len(b.tokens) for b in batches] == [7]
    params = parity.logical(run.blocks, run.blocks.master)
    want = reference.mean_loss(params, run.config["model"], parity.batch_of(run, batches)).item()
    assert losses == pytest.approx([want] * 3, rel=1e-12)


def whole_and_resumed(cases, folder, root):
    """Fingerprints after four steps, and after two, a save, a load and two more."""
    out = []
    for n, case in enumerate(cases):
        run = parity.prepare(case, folder)
        parity.go(run, 4)
        parity.run_and_save(case, folder, f"{root}/{n}", 2)
        resumed = parity.prepare(case | {"run.dir": f"{root}/{n}"}, folder)
        assert train.resume(resumed)
        parity.go(resumed, 2)
        steps = [{float(x) for pair in r.blocks.steps for x in pair} for r in (run, resumed)]
        out.append((parity.prints(run), parity.prints(resumed), steps))
        run.loader.close()
        resumed.loader.close()
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(dtype, world, tokens, tmp_path):
    """At every stage: weights, moments, AdamW's step."""
    cases = [on_layout({"parallel.zero": zero, "speed.dtype": dtype, "optim.grad_clip": 0.5,
                        "rounds": 2, "train.steps": 4, "model.dropout": 0.1}, {"fsdp": 2})
             for zero in range(4)]
    for found in world(2).run(whole_and_resumed, cases, str(tokens), str(tmp_path)):
        for zero, (whole, resumed, steps) in enumerate(found):
            differ = [name for name in whole if whole[name] != resumed[name]]
            assert not differ and steps == [{4.0}, {4.0}], (zero, differ)


def pairs(cases):
    """The pairs of values, of two keys, that occur."""
    return {pair for case in cases for pair in itertools.combinations(
        [(key, str(value)) for key, value in case.items()], 2)}


def coverage():
    """The text of tests/COVERAGE.md."""
    lines = ["# What the parity matrix covers", "",
             "Written by `python tests/test_parity.py`, compared by a test. Each case trains three "
             "steps on its\nlayout; loss, gradients, norm, parameters, held-out loss and traffic "
             "are compared on every rank.", "",
             "| ranks | layouts of pp x dp x fsdp x cp x tp | cases, `pytest` | cases, `-m full` |",
             "|---|---|---|---|"]
    count = lambda cases, n: sum(math.prod(c["layout"].values()) == n for c in cases)  # noqa: E731
    for n in range(2, 9):
        layouts = sum(math.prod(layout.values()) == n for layout in LAYOUTS)
        lines.append(f"| {n} | {layouts} | {count(DEFAULT, n)} | {count(ALL, n)} |")
    lines += [f"| all | {len(LAYOUTS)} | {len(DEFAULT)} | {len(ALL)} |", ""]
    for words, cases, layouts in ((f"`pytest`, {len(SMALL)} small layouts", DEFAULT, SMALL),
                                  ("`pytest -m full`, every layout", ALL, LAYOUTS)):
        options = OPTIONS | {"layout": layouts}
        wanted = pairs([dict(zip(two, values)) for two in itertools.combinations(options, 2)
                        for values in itertools.product(*(options[key] for key in two))])
        lines.append(f"{words}: {len(wanted & pairs(cases)):,} of {len(wanted):,} pairs of values.")
    lines += ["", "| option | values |", "|---|---|"]
    lines += [f"| {key} | {', '.join(map(str, values))} |" for key, values in OPTIONS.items()]
    lines += ["", f"Saved on one layout, resumed on another, tensors bit-equal: {len(PAIRS)} pairs,"
              f" in full {len(ALL_PAIRS)}."]
    return "\n".join(lines) + "\n"


def kind(key, *values):
    return lambda case: case.get(key) in values


def model_of(**wanted):
    return lambda case: all(MODELS[case["model"]].get(f"model.{key}") == value
                            for key, value in wanted.items())


SUPPORT = {axis: lambda case, axis=axis: axis in case["layout"] for axis in AXES} | {
    **{f"ZeRO {n}": kind("parallel.zero", n) for n in range(4)},
    **{name: lambda case, name=name: "pp" in case["layout"] and case["pipe"][0] == name
       for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")},
    **{mode: lambda case, mode=mode: "cp" in case["layout"] and case.get("parallel.cp_mode") == mode
       for mode in ("ring", "ulysses")},
    "several microbatches": kind("rounds", 3, "uneven", 6),
    "recomputation": kind("speed.recompute", "full", 2, "selective"),
    "optimizer state on the host": kind("parallel.offload", "optimizer"),
    "packed documents": kind("data.mask_documents", True),
    "sliding window": kind("model.window", 3, [5, None]),
    "embedding and output tied": model_of(tied=None),
    "GPT-2": model_of(norm="layernorm"), "Llama 3": kind("model", "llama3"),
    "Qwen3": kind("model", "qwen3"), "dropout": kind("model", "capped", "gpt2 dropped"),
}  # rows of README's table -> the cases that have it
MARKS = "<!-- tests/test_parity.py writes from here -->\n", "<!-- to here -->\n"


def support():
    """README with its table: how many cases have the row's and the column's choice."""
    lines = [f"| | {' | '.join(AXES)} |", "|---" * (1 + len(AXES)) + "|"]
    for name, has in SUPPORT.items():
        cells = [[sum(has(case) and axis in case["layout"] for case in cases)
                  for cases in (DEFAULT, ALL)] for axis in AXES]
        lines.append(f"| {name} | {' | '.join(f'{a:,} / {b:,}' for a, b in cells)} |")
    before, rest = README.read_text().split(MARKS[0])
    return before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + rest.split(MARKS[1])[1]


README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.quick
def test_the_table_of_what_is_supported_is_of_the_cases():
    assert README.read_text() == support(), "run: python tests/test_parity.py"
    assert f"every pair of options ({len(ALL):,} cases, " in README.read_text()
    assert not re.search(r"\b0 /", README.read_text().split(MARKS[0])[1].split(MARKS[1])[0])


@pytest.mark.quick
def test_coverage_is_written_down():
    text = (pathlib.Path(__file__).parent / "COVERAGE.md").read_text()
    assert text == coverage(), "run: python tests/test_parity.py"
    assert all(a == b for a, b in re.findall(r"([\d,]+) of ([\d,]+) pairs of values", text))


def test_covering_covers_every_pair():
    options = {"a": [1, 2, 3], "b": "xy", "c": [True, False]}
    cases = parity.covering(options)
    for k1, k2 in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(c[k1], c[k2]) for c in cases} == {(x, y) for x in options[k1] for y in options[k2]}
    assert len(cases) < 12


COMPILED = {  # layout and options -> graphs in all: for all layers, steps and microbatches
    "tp": ({"tp": 2}, {}, 1),
    "tp, gathered sequences kept": ({"tp": 2}, {"speed.keep_gathered": True}, 1),
    "tp, recomputation": ({"tp": 2}, {"speed.recompute": "full"}, 2),  # the first is without grad
    "zero 3": ({"fsdp": 2}, {"parallel.zero": 3, "speed.recompute": 2}, 2),
    "1f1b": ({"pp": 2}, {}, 1),
    "zero-bubble": ({"pp": 2}, {"parallel.schedule": "zero-bubble"}, 5),
    "cp": ({"cp": 2}, {}, 4),
}
BY_DEFAULT = "tp, recomputation", "zero-bubble"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside dynamo
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.full) for name in COMPILED])
def test_compiled_layers_equal_plain_ones(name, world, truth, tokens):
    """The same numbers, and the same bytes moved, as without torch.compile; no graph is new after
    the first step, and it is broken only where cp ranks exchange and where a schedule puts weights'
    gradients off."""
    layout, options, n = COMPILED[name]
    case = on_layout(MODELS["capped"] | {"model.n_layer": 4, "rounds": 3}, layout) | options
    want = truth(case)
    plain = world(2).run(parity.run_case, case, str(tokens))
    for got, of_plain in zip(world(2).run(parity.run_compiled, case, str(tokens), timeout=600),
                             plain):
        assert parity.compare(got, want) is None
        assert got["ledger"] == of_plain["ledger"]
        assert got["graphs"] == [n] * 3
        assert bool(got["breaks"]) == (name in ("zero-bubble", "cp"))


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_compiled_to_machine_code(layout, world, truth, tokens):
    """By torch's own compiler."""
    case = on_layout(MODELS["capped"] | {"model.n_layer": 4, "rounds": 3}, layout)
    case |= {"parallel.schedule": "zero-bubble"} if "pp" in layout else {}
    want = truth(case)
    for got in world(2).run(parity.run_case, case | {"speed.compile": True}, str(tokens),
                             timeout=600):
        assert parity.compare(got, want) is None


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "COVERAGE.md").write_text(coverage())
    README.write_text(support())
