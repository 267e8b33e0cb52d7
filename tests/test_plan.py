"""The dry run: what a rank of a world that is not there holds, sends and computes, beside what real
ranks do, and beside formulas."""

import gc
import itertools
import pathlib
import time

import parity
import pytest
import torch

import kernels
import model
import parallel
import train

ROOT = pathlib.Path(__file__).parent.parent
SMALL = {"train.global_batch": 8, "train.microbatch": 4, "speed.dtype": "float32",
         "data.seq_len": 128, "model.d_model": 64, "model.d_ff": 160, "model.vocab_size": 501,
         "speed.loss_chunk": 64}
ONE = {"parallel.dp": 1}
SHARDED = {"parallel.dp": 1, "parallel.fsdp": 2, "train.microbatch": 2}
PIPE = {"parallel.dp": 1, "parallel.pp": 2, "model.n_layer": 4}
LAYOUTS = [  # world, cases; all but the first are part of the long tests
    (2, [SHARDED | {"parallel.zero": 1}, ONE | {"parallel.tp": 2}, ONE | {"parallel.cp": 2},
         SHARDED | {"parallel.zero": 3, "speed.recompute": "full"},
         PIPE | {"parallel.schedule": "zero-bubble", "model.tied": False}]),
    (2, [{}, SHARDED | {"parallel.zero": 2}, PIPE,
         PIPE | {"parallel.schedule": "interleaved", "parallel.chunks": 2},
         ONE | {"parallel.cp": 2, "parallel.cp_mode": "ulysses"}]),
    (4, [SHARDED | {"parallel.dp": 2, "parallel.zero": 2},
         PIPE | {"parallel.fsdp": 2, "parallel.zero": 3, "parallel.zero_pp": "regather"},
         ONE | {"parallel.tp": 2, "parallel.cp": 2}]),
]


def patient(wait):
    """Handle.wait that gives gloo's thread time to let go of the tensors it has sent."""
    def wait_longer(handle):
        result = wait(handle)
        time.sleep(0.001)
        return result
    return wait_longer


def first_steps(cases, folder):
    """Of each case what this rank sends in the first step, and the most bytes that the allocator
    of torch has given out at a time in it, what was there before among them: its own record."""
    short, wait, out = kernels.SHORT, parallel.Handle.wait, []
    kernels.SHORT, parallel.Handle.wait = 0, patient(wait)  # 0: fused attention, as on a GPU
    gc.collect()
    for case in cases:
        with torch.profiler.profile(profile_memory=True) as profile:
            run = parity.prepare(case, folder)
            run.mesh.ledger.clear()
            run.loader.start(0)
            _, batches, pending = train.next_batch(run, False)
            run.loader.close()
            count = pending.wait()[0]
            with torch.profiler.record_function("the step"):
                train.train_step(run, batches, count)
        events = profile.profiler.kineto_results.events()
        [begin] = [e.start_ns() for e in events if e.name() == "the step"]
        moves = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        sums = itertools.accumulate(nbytes for _, nbytes in moves)
        peak = max(total for total, (at, _) in zip(sums, moves) if at >= begin)
        out.append((run.mesh.ledger, peak))
        del run, batches
        gc.collect()  # or it ends within the next record
    kernels.SHORT, parallel.Handle.wait = short, wait
    return out


def played(case, world, rank, **how):
    config = parity.config_of(case)
    return train.play(config, train.check_config(config, world), rank, **how)


@pytest.mark.parametrize("ranks, cases", [
    pytest.param(*row, marks=[pytest.mark.full] if i else []) for i, row in enumerate(LAYOUTS)])
def test_a_plan_is_what_happens(ranks, cases, world, tokens):
    """Of every rank the ledger to the byte, and the peak within 5 %. Seen: within 0.3 %, but for a
    tensor that a thread of gloo has not let go of yet."""
    cases = [SMALL | case for case in cases]
    real = world(ranks).run(first_steps, cases, str(tokens), timeout=300)
    for i, case in enumerate(cases):
        for rank in range(ranks):
            got, (ledger, peak) = played(case, ranks, rank, gloo=True), real[rank][i]
            assert got["ledger"] == ledger, (case, rank)
            assert sum(nbytes for _, nbytes in ledger.values()) > 1000
            assert got["peak"] == pytest.approx(peak, rel=0.05), (case, rank)
            assert sum(got["parts"].values()) == got["peak"]


def test_gpus_send_what_cpus_send():
    """But have no second copy of what is summed, here the gradient of a large vocabulary."""
    case = SMALL | SHARDED | {"parallel.zero": 1, "data.seq_len": 16, "model.vocab_size": 8001}
    cpu, gpu = (played(case, 2, 1, gloo=gloo) for gloo in (True, False))
    assert cpu["ledger"] == gpu["ledger"] and cpu["flops"] == gpu["flops"]
    assert cpu["peak"] > gpu["peak"] + 0.9 * 4 * 8001 * 64 / 2


def test_flops_of_all_ranks_are_the_formula():
    """6 for each weight and token; of attention, for each pair and channel, 4 forward and 10
    backward, where the scores are made again. Padding of the vocabulary is not computed."""
    config = parity.config_of(SMALL)
    cfg = model.ModelConfig(**config["model"] | {"max_len": 128})
    pairs = cfg.n_layer * 8 * 128 * 129 // 2
    whole = model.flops(cfg, 8 * 128, 0) + 14 * cfg.n_head * cfg.d_head * pairs
    assert played(SMALL, 1, 0)["flops"] == whole
    split, ring = ONE | {"parallel.pp": 2, "parallel.tp": 2}, ONE | {"parallel.cp": 2}
    assert sum(played(SMALL | split, 4, rank)["flops"] for rank in range(4)) == whole
    assert sum(played(SMALL | ring, 2, rank)["flops"] for rank in range(2)) == whole
    again = played(SMALL | {"speed.recompute": "full"}, 1, 0)["flops"]
    layers = whole - 6 * cfg.d_model * cfg.vocab_size * 8 * 128
    attention = 14 * cfg.n_head * cfg.d_head * pairs
    assert again == whole + (layers - attention) // 3 + attention * 4 // 14


def test_offloaded_state_takes_no_memory_of_the_card():
    plain, off = (played(SMALL | SHARDED | {"speed.dtype": "bfloat16", "parallel.zero": 1,
                                            "parallel.offload": how}, 2, 0)
                  for how in ("none", "optimizer"))
    assert plain["parts"]["optimizer"] > 0 == off["parts"]["optimizer"]
    assert off["peak"] <= plain["peak"] - plain["parts"]["optimizer"] * 0.9


# ---- what is predicted from it


@pytest.mark.quick
@pytest.mark.parametrize("sizes, axis, op, rate", [
    ({"tp": 8, "fsdp": 2}, "tp", "all_gather", 450e9),
    ({"tp": 8, "fsdp": 2}, "shard", "all_gather", 50e9),  # ranks 0 and 8: a card in each node
    ({"fsdp": 16}, "shard", "reduce_scatter", 400e9),  # 8 cards in each
    ({"tp": 2, "fsdp": 8}, "shard", "reduce_scatter", 200e9),
    ({"fsdp": 4, "dp": 4}, "dp", "all_reduce sum", 100e9),
    ({"cp": 16}, "cp", "shift (keys)", 50e9),
    ({"cp": 4, "pp": 4}, "cp", "shift (keys)", 450e9),
    ({"cp": 4, "pp": 4}, "pp", "send", 50e9),
])  # fmt: skip
def test_rates(sizes, axis, op, rate):
    sizes = parallel.layout_of(16, **sizes)
    assert train.rate(train.HARDWARE["h100"], sizes, axis, op) == rate


def predicted(ledger, rounds=10, **keys):
    """Of 10 s of products, 5 of them attention, and these seconds of traffic inside a node."""
    h = train.HARDWARE["h100"]
    config = parity.config_of({f"parallel.{key}": value for key, value in keys.items()})
    sizes = parallel.layout_of(8, **{axis: keys.get(axis, 1) for axis in parallel.AXES})
    got = {"flops": 10 * h.peak * train.PRODUCTS, "attention": 5 * h.peak * train.PRODUCTS,
           "rounds": rounds, "ledger": {
               key: [0, seconds * h.inside * train.LINKS] for key, seconds in ledger.items()}}
    return train.predict(config, sizes, h, got)


@pytest.mark.quick
def test_what_is_exposed():
    shard, ring = {("shard", "all_gather"): 5}, {("cp", "shift (keys)"): 6}
    assert predicted({("tp", "all_gather"): 2}, tp=8, dp=1)["step"] == pytest.approx(12)
    assert predicted(shard, fsdp=8, dp=1, zero=3)["exposed"] == pytest.approx(0)
    assert predicted(shard, fsdp=8, dp=1, zero=1)["exposed"] == pytest.approx(4)  # once a step
    assert predicted(ring, cp=8, dp=1)["exposed"] == pytest.approx(1)
    assert predicted({("cp", "all_to_all"): 6}, cp=8, dp=1)["exposed"] == pytest.approx(6)
    piped = predicted({}, rounds=2, pp=8, dp=1)
    assert piped["idle"] == pytest.approx(7 / 9)  # (p-1) / (m + p-1)
    assert piped["step"] == pytest.approx(45) and piped["bubble"] == pytest.approx(35)


@pytest.mark.quick
def test_ranks_that_do_the_same_are_played_once():
    def stages(schedule, **case):
        case = {"model.n_layer": 8, "parallel.schedule": schedule, "parallel.dp": 1,
                "parallel.stages": [2] * 4} | case
        config = parity.config_of(case)
        cfg = model.ModelConfig(**config["model"] | {"max_len": 12})
        return train.distinct(config, parallel.layout_of(8, pp=4, cp=2), cfg)

    assert stages("1f1b") == [0, 1, 2, 3, 6, 7]  # stages 0, 1, 3, both of cp
    assert stages("zero-bubble") == list(range(8))  # 2 has more weight parts due than 1
    assert stages("1f1b", **{"model.window": [4, 8, 8, 8]}) == list(range(8))


# ---- from the shell


@pytest.mark.quick
@pytest.mark.parametrize("argv, words, told", [
    ([], [], ["--plan world", "None", "at least 1"]),
    ([], ["world=0"], ["--plan world", "0", "at least 1"]),
    ([], ["world=many"], ["--plan world", "many"]),
    ([], ["wrld=4"], ["wrld=4", "world", "rank", "hardware"]),
    ([], ["world=4", "rank=4"], ["--plan rank", "4", "all", "0 to 3"]),
    ([], ["world=4", "rank=-1"], ["--plan rank", "-1"]),
    ([], ["world=4", "hardware=tpu"], ["--plan hardware", "tpu", "h100", "mi300x"]),
    (["parallel.fsdp=3"], ["world=4"], ["3 must divide 4"]),
    (["train.global_batch=10"], ["world=4"], ["train.global_batch", "4 data ranks"]),
    (["data.path=/nowhere"], ["world=4"], ["model.vocab_size", "None", "/nowhere"]),
    (["model.vocab_size=99", "model.n_kv_head=4"], ["world=4"], ["model.n_kv_head"]),
])
def test_mistakes(argv, words, told, monkeypatch):
    monkeypatch.setattr(train, "play", None)  # nothing is built
    with pytest.raises(ValueError) as error:
        train.main([*argv, "--plan", *words])
    for word in told:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plan_from_the_shell(capsys):
    case = SMALL | PIPE | SHARDED | {"parallel.tp": 2, "speed.dtype": "auto"}
    argv = [f"{key}={value}" for key, value in (parity.TINY | case).items()]
    assert train.main([*argv, "--plan", "world=8", "hardware=h200"]) == 0
    text = capsys.readouterr().out
    assert "plan of 8 ranks, pp 2 x dp 1 x fsdp 2 x cp 1 x tp 2" in text and "141 GB" in text
    assert text.count("rank 0 (pp 0") == text.count("rank 4 (pp 1") == 1
    assert text.count("fits") == 2 and "33.3%" in text  # 1 / (2 + 1)
    assert not torch.distributed.is_initialized()
    assert train.main([*argv, "--plan", "world=8", "rank=5"]) == 0
    assert "rank 5 (pp 1, dp 0, fsdp 0, cp 0, tp 1)" in capsys.readouterr().out


BIG = [str(ROOT / "configs/llama3-405b.yaml"), "--plan", "world=16384"]


def test_a_rank_of_16384(capsys):
    """Two microbatches of it, and its state by formula: 2 bytes a weight, 4 a gradient, 12 of
    master weights and moments over 16 ranks."""
    assert train.main([BIG[0], "train.global_batch=256", *BIG[1:], "rank=1024"]) == 0
    text = capsys.readouterr().out
    params = int(text.split(": ")[2].split()[0].replace(",", ""))
    assert params > 126 * 3.1e9 / 16 / 8
    state = [f"parameters {params * 2 / 1e9:.3g} ", f"gradients {params * 4 / 1e9:.3g} ",
             f"optimizer {params * 12 / 16 / 1e9:.3g} "]
    for part in state:
        assert part in text


@pytest.mark.full
def test_16384_ranks_in_two_minutes(capsys):
    clock = time.perf_counter()
    assert train.main(BIG) == 0
    assert time.perf_counter() - clock < 120
    assert capsys.readouterr().out.count("fits") == 3
