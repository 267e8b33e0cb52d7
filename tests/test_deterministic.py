"""train.deterministic: losses, norms, weights and moments have the same bits on every layout."""

import math

import parity
import pytest
import torch

import parallel
import train

BASE = {"train.deterministic": True, "train.global_batch": 16, "train.microbatch": 2,
        "model.n_layer": 4, "optim.grad_clip": 0.5, "model.dropout": 0.1, "model.n_kv_head": 4,
        "train.steps": 4, "speed.dtype": "float32"}
UNTIED = {"model.tied": False, "model.bias": True, "data.mask_documents": True}
BF16 = {"speed.dtype": "bfloat16"}


def zero(n, **sizes):
    return {"dp": 1, "zero": n} | sizes


def stages(schedule, chunks=1, **sizes):
    return {"schedule": schedule, "chunks": chunks, "pp": 2} | sizes


LAYOUTS = [(UNTIED, {"dp": 2}), (BF16, zero(1, fsdp=2)), ({}, zero(2, fsdp=2)),
           ({}, zero(3, fsdp=2, offload="optimizer")), (UNTIED, zero(3, fsdp=4, prefetch=0)),
           (BF16, {"dp": 4}), ({}, {"dp": 2, "fsdp": 2, "zero": 1}),
           ({}, zero(3, dp=2, fsdp=2)), (BF16, stages("1f1b")), ({}, stages("zero-bubble")),
           (UNTIED, stages("interleaved", 2)), (UNTIED, stages("gpipe", dp=2)),
           ({}, stages("interleaved", 2, dp=1, fsdp=2, zero=3, zero_pp="regather")),
           (BF16, stages("zero-bubble", dp=1, fsdp=2, zero=2)),
           ({}, {"pp": 4}), ({"speed.recompute": "full"}, zero(3, fsdp=2))]


@pytest.fixture(scope="module")
def alone(tokens):
    """alone(extra): what one process computes, once each."""
    made = {}

    def get(extra):
        key = str(extra)
        if key not in made:
            made[key] = run_some(BASE | extra, str(tokens), 3)
        return made[key]

    return get


def run_some(case, folder, steps, root=None):
    """Losses, norms, and fingerprints of every weight and moment. With `root` it resumes there if
    it can, and saves in the end."""
    torch.use_deterministic_algorithms(True)
    try:
        run = parity.prepare(case | ({"run.dir": root} if root else {}), folder)
        if root:
            train.resume(run)
        out = parity.go(run, steps)
        if root:
            train.save(run)
        run.loader.close()
        return {key: out[key] for key in ("loss", "norm")} | {"prints": parity.prints(run)}
    finally:
        torch.use_deterministic_algorithms(False)


def differing(got, want):
    return ([key for key in ("loss", "norm") if got[key] != want[key]]
            + [key for key, value in want["prints"].items() if got["prints"][key] != value])


@pytest.mark.parametrize("extra, layout", LAYOUTS, ids=str)
def test_every_layout_has_the_bits_of_one_process(extra, layout, alone, world, tokens):
    want = alone(extra | {"speed.recompute": "none"} if "speed.recompute" in extra else extra)
    case = BASE | extra | {f"parallel.{key}": value for key, value in layout.items()}
    ranks = math.prod(layout.get(axis, 1) for axis in parallel.AXES)
    for got in world(ranks).run(run_some, case, str(tokens), 3):
        assert differing(got, want) == []
    assert min(want["norm"]) > 0.5  # clipping is active


def test_resumed_on_other_ranks_no_bit_changes(alone, world, tokens, tmp_path):
    """One step each on 1, 4, 2 and 2 ranks, from checkpoint to checkpoint, are four of one."""
    want = run_some(BASE, str(tokens), 4)
    losses = []
    for ranks, layout in ((1, {}), (4, zero(3, fsdp=4)), (2, {"pp": 2}), (2, {"dp": 2})):
        case = BASE | {f"parallel.{key}": value for key, value in layout.items()}
        got = world(ranks).run(run_some, case, str(tokens), 1, str(tmp_path))[0]
        losses += got["loss"]
    assert losses == want["loss"] and got["prints"] == want["prints"]
    with pytest.raises(ValueError, match="train.microbatch = 4.*only with its 2"):
        run_some(BASE | {"train.microbatch": 4}, str(tokens), 1, str(tmp_path))
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="speed.threads = 2.*only with its 1"):
        run_some(BASE, str(tokens), 1, str(tmp_path))
    torch.set_num_threads(1)


def test_without_it_bits_differ(world, tokens):
    """Else these tests would show nothing."""
    case = BASE | {"train.deterministic": False, "speed.dtype": "float32"}
    want = run_some(case, str(tokens), 3)
    got = world(2).run(run_some, case | {"parallel.dp": 2}, str(tokens), 3)[0]
    assert differing(got, want)


def test_the_norm_is_the_norm(tokens):
    """To the digits that its integers have; nan where one gradient is not finite."""
    run = parity.prepare(BASE | {"speed.dtype": "float64"}, tokens)
    torch.manual_seed(0)
    for grad in run.blocks.grad:
        grad.copy_(torch.randn_like(grad) * 10.0 ** torch.randint(-6, 3, grad.shape))
    want = torch.cat(run.blocks.grad).norm()
    assert abs(run.blocks.grad_norm() / want - 1) < 1e-12
    run.blocks.grad[1][3] = torch.inf
    assert run.blocks.grad_norm().isnan()
    for grad in run.blocks.grad:
        grad.zero_()
    assert run.blocks.grad_norm() == 0


@pytest.mark.quick
@pytest.mark.parametrize("argv, world, words", [
    (["parallel.tp=2", "model.n_kv_head=2", "model.n_head=4"], 2, ["parallel.tp", "1"]),
    (["parallel.reduce_dtype=bfloat16"], 1, ["parallel.reduce_dtype", "None"]),
    (["speed.dtype=float16"], 1, ["speed.dtype", "bfloat16"]),
    (["parallel.dp=3", "train.global_batch=48"], 3, ["dp x parallel.fsdp", "3", "power of two"]),
    (["train.global_batch=48", "train.microbatch=16"], 1, ["train.global_batch", "48", "16, say"]),
    (["train.global_batch=20", "train.microbatch=8"], 1, ["train.global_batch", "20"])])
def test_what_it_cannot_do_is_refused(argv, world, words):
    with pytest.raises(ValueError) as error:
        train.check_config(train.load_config(["train.deterministic=true", *argv]), world)
    for word in words:
        assert word in str(error.value)
