"""Every layout computes what one process computes, and one process computes the specification."""

import parity
import pytest
import reference

import data
import train

LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_len": 24}
GPT2 = {"model.norm": "layernorm", "model.positions": "learned", "model.activation": "gelu",
        "model.bias": True, "model.n_kv_head": 4}
MODELS = {
    "llama": {"model.tied": False},
    "llama3": {"model.rope_scaling": LLAMA3_ROPE, "model.rope_theta": 500.0, "model.n_kv_head": 1},
    "qwen3": {"model.qk_norm": True, "model.d_head": 6, "model.tied": True},
    "gpt2": GPT2,
    "capped": {"model.logit_softcap": 2.0, "model.z_loss": 0.05, "model.bias": True},
}
OPTIONS = {
    "train.microbatch": [1, 3, 5, 12],
    "ignore": list(parity.RULES),
    "speed.recompute": ["none", "full", 2],
    "optim.grad_clip": [None, 0.5],
    "data.mask_documents": [False, True],
}


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token folder of short documents with a vocabulary of 51."""
    folder = tmp_path_factory.mktemp("tokens")
    data.synth(folder, tokens=3000, vocab=51, docs=400, seed=1)
    data.synth(folder, tokens=300, vocab=51, docs=40, seed=2, split="val")
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("extra", [{}, {"data.mask_documents": True, "ignore": "uneven",
                                        "optim.grad_clip": 0.5, "train.microbatch": 5}],
                         ids=["plain", "masked"])
def test_one_process_is_the_reference(name, extra, tokens):
    case = MODELS[name] | extra
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
        alone = {k: v for k, v in case.items() if not k.startswith("parallel")}
        key = str(sorted(alone.items()))
        if key not in known:
            known[key] = parity.run_case(alone, tokens)
        return known[key]

    return get


def check(world, truth, tokens, n, case):
    want = truth(case)
    for rank, got in enumerate(world(n).run(parity.run_case, case, str(tokens))):
        note = parity.compare(got, want)
        assert note is None, f"{case}: rank {rank}: {note}"
        assert got["count"] == want["count"]
    if case.get("check_ledger", True):
        check_ledger(got["ledger"], n, case, tokens)


def check_ledger(ledger, n, case, tokens):
    """Stage 0 sends 2 P (n-1)/n bytes a step, P the padded gradient in float64."""
    if n == 1:
        assert ledger == {}
        return
    run = parity.prepare({k: v for k, v in case.items() if not k.startswith("parallel")}, tokens)
    run.loader.close()
    sizes = [-(-g.numel() // n) * n * 8 for g in run.blocks.grad]
    calls, nbytes = ledger["grad", "all_reduce sum"]
    assert calls == 3 * len(sizes)
    assert nbytes == 3 * sum(2 * size * (n - 1) // n for size in sizes)


LAYOUTS = [(1, {}), (2, {"parallel.dp": 2}), (3, {"parallel.dp": 3}), (4, {"parallel.dp": 4}),
           (2, {"parallel.dp": 1, "parallel.fsdp": 2}), (4, {"parallel.dp": 2, "parallel.fsdp": 2})]
ALL = parity.covering(OPTIONS | {"layout": list(range(len(LAYOUTS))), "model": list(MODELS)})


@pytest.mark.parametrize("case", ALL, ids=lambda c: "-".join(map(str, c.values())))
def test_layouts_equal_one_process(case, world, truth, tokens):
    case = dict(case)
    n, layout = LAYOUTS[case.pop("layout")]
    check(world, truth, tokens, n, MODELS[case.pop("model")] | case | layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_with_every_option(name, layout, world, truth, tokens):
    n, sizes = LAYOUTS[layout]
    for case in parity.covering(OPTIONS):
        check(world, truth, tokens, n, MODELS[name] | case | sizes)


@pytest.mark.quick
def test_two_ranks(world, truth, tokens):
    check(world, truth, tokens, 2, {"parallel.dp": 2, "ignore": "prefix", "train.microbatch": 2,
                                    "model.dropout": 0.3})


def test_covering_covers_every_pair():
    options = {"a": [1, 2, 3], "b": "xy", "c": [True, False]}
    cases = parity.covering(options)
    for k1, k2 in (("a", "b"), ("a", "c"), ("b", "c")):
        assert {(c[k1], c[k2]) for c in cases} == {(x, y) for x in options[k1] for y in options[k2]}
    assert len(cases) < 12
