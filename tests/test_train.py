"""train.py from the shell: configs refused, runs resumed, interrupted, spread over ranks."""

import functools
import importlib
import json
import math
import os
import pathlib
import shutil
import signal
import time

import parity
import pytest
import torch
import yaml
from pool import Script

import checkpoint
import data
import kernels
import parallel
import train

ROOT = pathlib.Path(__file__).parent.parent
SMALL = ["model.n_layer=2", "model.d_model=32", "model.n_head=4", "model.n_kv_head=2",
         "model.d_ff=48", "data.seq_len=32", "train.global_batch=4", "train.microbatch=2",
         "train.steps=6", "train.eval_sequences=5", "train.eval_every=null", "optim.warmup=2",
         "log.every=1", "log.fingerprint_every=3", "log.sample=20", "speed.threads=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A token folder of real text: a few of the standard library's files, by bytes."""
    folder = tmp_path_factory.mktemp("text")
    data.prepare([str(ROOT / "train.py"), str(ROOT / "model.py"), str(ROOT / "parallel.py")],
                        folder, quiet=True)
    data.prepare([str(ROOT / "data.py")], folder, split="val", quiet=True)
    return folder


def start(folder, run, *extra, **how):
    return Script("train.py", *SMALL, f"data.path={folder}", f"run.dir={run}", *extra, **how)


def shell(*args, **how):
    return start(*args, **how).wait()


def records(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "loss" in row}


# ---------------------------------------------------------------------------------------------
# Config


@pytest.mark.quick
@pytest.mark.parametrize("argv, words", [
    (["optim.lrr=1"], ["optim.lrr", "optim.lr"]),
    (["optimm.lr=1"], ["optimm", "optim"]),
    (["optim.lr=fast"], ["optim.lr", "fast", "float"]),
    (["train.steps=1.5"], ["train.steps", "1.5", "int"]),
    (["train.steps=true"], ["train.steps", "True", "int"]),
    (["model.tied=1"], ["model.tied", "bool"]),
    (["train.steps=null"], ["train.steps", "null"]),
    (["model.attn_dropout=0.1"], ["model.attn_dropout", "model.dropout"]),
    (["train.gradient_accumulation_steps=2"], ["train.microbatch"]),
    (["optim.name=muon"], ["optim.name"]),
    (["optim.muon=true"], ["optim.muon"]),
    (["train.stop_at_loss=2.0"], ["train.stop_at_loss"]),
    (["nothere.yaml"], ["nothere.yaml", "no such file"]),
    (["nonsense"], ["nonsense", "section.key=value"]),
    (["optim=3"], ["optim"]),
    (["log.prompt=[a"], ["log.prompt", "parsing"]),
])
def test_bad_arguments(argv, words):
    with pytest.raises(ValueError) as error:
        train.load_config(argv)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("argv, world, words", [
    (["parallel.ep=2"], 2, ["parallel.ep", "2"]),
    (["parallel.cp=3"], 3, ["data.seq_len", "256", "parallel.cp = 3 (ring)", "258"]),
    (["parallel.cp=8", "data.seq_len=24"], 8, ["data.seq_len", "24", "16", "32"]),
    (["parallel.cp=4", "parallel.cp_mode=ulysses"], 4, ["model.n_head", "6", "8", "ring"]),
    (["parallel.cp=2", "parallel.cp_mode=ulysses"], 2, ["model.n_kv_head", "3", "ring"]),
    (["parallel.cp=2", "parallel.cp_mode=striped"], 2, ["parallel.cp_mode", "ring", "ulysses"]),
    (["parallel.tp=4"], 4, ["model.n_head", "6", "parallel.tp = 4", "8"]),
    (["parallel.tp=5", "model.n_head=10", "model.n_kv_head=5"], 5, ["model.d_ff", "512", "515"]),
    (["parallel.tp=2"], 2, ["model.n_kv_head", "3", "parallel.tp = 2", "parallel.tp=1"]),
    (["parallel.tp=3", "model.d_ff=513"], 3, ["data.seq_len", "256", "parallel.tp = 3", "258"]),
    (["parallel.pp=5"], 5, ["parallel.pp", "5", "model.n_layer = 4"]),
    (["parallel.pp=2", "parallel.chunks=3", "parallel.schedule=interleaved"], 2,
     ["parallel.chunks", "6", "model.n_layer = 4"]),
    (["parallel.pp=2", "parallel.chunks=2"], 2, ["parallel.chunks = 2", "1f1b", "interleaved"]),
    (["parallel.pp=3"], 4, ["pp 3", "3 must divide 4"]),
    (["parallel.schedule=dualpipe"], 1, ["parallel.schedule", "dualpipe", "zero-bubble"]),
    (["parallel.pp=2", "parallel.stages=[1,2]"], 2, ["parallel.stages", "2 numbers", "4"]),
    (["parallel.pp=2", "parallel.stages=[1.5,2.5]"], 2, ["parallel.stages", "2 numbers", "4"]),
    (["speed.recompute=selective", "speed.compile=true"], 1, ["speed.recompute", "speed.compile"]),
    (["parallel.timeout=0"], 1, ["parallel.timeout", "0", "at least 1"]),
    (["parallel.zero=4"], 1, ["parallel.zero", "4"]),
    (["parallel.offload=all"], 1, ["parallel.offload", "all", "optimizer"]),
    (["parallel.reduce_dtype=float16"], 1, ["parallel.reduce_dtype", "bfloat16"]),
    (["parallel.dp=2"], 4, ["2", "4", "torchrun"]),
    (["parallel.dp=auto", "parallel.fsdp=auto"], 4, ["auto"]),
    (["parallel.fsdp=3"], 4, ["3 must divide 4"]),
    (["parallel.dp=0"], 1, ["parallel.dp", "0"]),
    (["train.global_batch=10"], 4, ["train.global_batch", "4 data ranks", "12"]),
    (["optim.schedule=step"], 1, ["optim.schedule", "step", "cosine", "wsd"]),
    (["speed.dtype=fp8"], 1, ["speed.dtype", "fp8", "bfloat16"]),
    (["speed.recompute=0"], 1, ["speed.recompute"]),
    (["speed.compile=maybe"], 1, ["speed.compile", "maybe"]),
    (["speed.kernels=cuda"], 1, ["speed.kernels", "cuda", "triton"]),
    (["speed.matmul=tf32"], 1, ["speed.matmul", "tf32", "high"]),
    (["checkpoint.keep=0"], 1, ["checkpoint.keep"]),
    (["log.profile=[3,2]"], 1, ["log.profile"]),
    (["model.max_len=8"], 1, ["model.max_len", "data.seq_len"]),
    (["optim.grad_clip=0"], 1, ["optim.grad_clip", "null"]),
])
def test_bad_config(argv, world, words):
    with pytest.raises(ValueError) as error:
        train.check_config(train.load_config(argv), world)
    for word in words:
        assert word in str(error.value)


@pytest.mark.quick
def test_triton_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "triton", None)
    with pytest.raises(ValueError, match="speed.kernels = 'triton'.*auto"):
        train.check_config(train.load_config(["speed.kernels=triton"]), 1)


@pytest.mark.quick
def test_precision_of_float32_products_is_set(monkeypatch):
    """Before anything is built."""
    def build(*_):
        raise RuntimeError(torch.get_float32_matmul_precision())

    monkeypatch.setattr(train, "build", build)
    for precision in ("high", "highest"):
        with pytest.raises(RuntimeError, match=f"^{precision}$"):
            train.main([f"speed.matmul={precision}"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_does_not_wait_for_the_gpu(tokens):
    """torch itself would raise. (Without a GPU: test_a_step_reads_no_value.)"""
    config = parity.config_of({"data.path": str(tokens), "speed.dtype": "bfloat16"})
    run = train.build(config, parallel.build_mesh(train.check_config(config, 1), "cuda"))
    run.loader.start(0)
    for mode in ("default", "error"):  # the first step allocates and compiles
        _, batches, pending = train.next_batch(run, False)
        torch.cuda.set_sync_debug_mode(mode)
        train.train_step(run, batches, pending.wait()[0])
        torch.cuda.set_sync_debug_mode("default")
    run.loader.close()


@pytest.mark.quick
@pytest.mark.parametrize("override, words", [
    ({"n_head": 5}, ["model.n_head", "192"]),
    ({"n_kv_head": 4}, ["model.n_kv_head", "6"]),
    ({"norm": "batch"}, ["model.norm", "rmsnorm"]),
    ({"dropout": 1.0}, ["model.dropout"]),
    ({"d_head": 33}, ["model.d_head", "even"]),
    ({"rope_scaling": {"factor": 2}}, ["model.rope_scaling", "original_max_len"]),
    ({"n_layer": 0}, ["model.n_layer"]),
    ({"window": 0}, ["model.window", "null"]),
    ({"window": [8, True]}, ["model.window"]),
    ({"window": [None] * 5}, ["model.window", "model.n_layer = 4"]),
])
def test_bad_model(override, words):
    section = train.load_config([])["model"] | {"vocab_size": 50, "max_len": 16} | override
    with pytest.raises(ValueError) as error:
        train.model_py.ModelConfig(**section)
    for word in words:
        assert word in str(error.value)


@pytest.mark.quick
def test_values_take_the_type_of_the_default():
    config = train.load_config(["optim.lr=3e-4", "optim.weight_decay=0", "train.steps=1e3",
                                "parallel.dp=2", "model.logit_softcap=30",
                                "data.path={a: 1.0, b: 2.0}"])
    assert config["optim"]["lr"] == 3e-4 and type(config["optim"]["weight_decay"]) is float
    assert config["train"]["steps"] == 1000 and type(config["train"]["steps"]) is int
    assert config["parallel"]["dp"] == 2 and config["model"]["logit_softcap"] == 30.0
    assert config["data"]["path"] == {"a": 1.0, "b": 2.0}


@pytest.mark.quick
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_legal(path):
    config = train.load_config([str(path)])
    ranks = math.prod(config["parallel"][axis] for axis in ("pp", "fsdp", "cp", "tp"))
    train.check_config(config, 8 if ranks <= 8 else 4 * ranks)
    section = config["model"] | {"max_len": config["data"]["seq_len"]}
    train.model_py.ModelConfig(**section)


@pytest.mark.quick
def test_parameter_counts_are_the_published_ones():
    published = {"gpt2-124m": 124_439_808, "llama3-1b": 1_235_814_400,
                 "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
                 "llama3-405b": 405_853_388_800,
                 "qwen3-0.6b": 596_049_920}
    for name, n in published.items():
        config = train.load_config([str(ROOT / f"configs/{name}.yaml")])
        cfg = train.model_py.ModelConfig(**config["model"] | {"max_len": config["data"]["seq_len"]})
        assert train.model_py.count_params(cfg) == n


@pytest.mark.quick
def test_the_memory_arithmetic_of_the_long_config():
    """Each figure of its remark, from the parameters."""
    file = ROOT / "configs/llama3-8b-128k.yaml"
    config = train.load_config([str(file)])
    text = " ".join(line.lstrip("# ") for line in file.read_text().splitlines() if line[:1] == "#")
    p, T, batch = config["parallel"], config["data"]["seq_len"], config["train"]["global_batch"]
    cfg = train.model_py.ModelConfig(**config["model"] | {"max_len": T})
    sizes = {}
    for param in train.model_py.whole_model(cfg):
        sizes[param.block] = sizes.get(param.block, 0) + math.prod(param.full_shape)
    total, (layer, head) = sum(sizes.values()), (sizes[1], sizes[cfg.n_layer + 1])
    ranks, mine = p["fsdp"] * p["cp"], T // p["cp"]
    each = mine * cfg.d_model * 2
    for figure in (f"{batch} sequences x {T:,} = {batch * T:,} tokens", f"group of {p['cp']} ranks",
                   f"reads {batch // p['fsdp']} of them", f"holds {mine:,} tokens",
                   f"{total / 1e9:.2f} B parameters x 18 bytes / {ranks} ranks = "
                   f"{total * 18 / ranks / 1e9:.1f} GB",
                   f"take turns: {layer * (3 * 2 + 2 * 4) / 1e9:.1f} GB",
                   f"while in use: {head * (2 + 4) / 1e9:.1f} GB",
                   f"inputs of {cfg.n_layer + 1} blocks, {mine:,} x {cfg.d_model} x 2 bytes = "
                   f"{each / 1e6:.0f} MB each, {each * (cfg.n_layer + 1) / 1e9:.1f} GB",
                   f"On one rank: {each * p['cp'] * (cfg.n_layer + 1) / 1e9:.1f} GB"):
        assert figure in text, figure


# ---------------------------------------------------------------------------------------------
# Schedule and optimizer


@pytest.mark.quick
def test_learning_rate():
    optim = {"lr": 1.0, "min_lr": 0.1, "warmup": 10, "decay": 0.25, "schedule": "cosine"}
    assert [train.lr_at(s, optim, 111) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert train.lr_at(10, optim, 111) == pytest.approx(1.0)
    assert train.lr_at(60, optim, 111) == pytest.approx(0.55)  # half way of 10 .. 110
    assert train.lr_at(110, optim, 111) == pytest.approx(0.1)
    optim["schedule"] = "linear"
    assert train.lr_at(35, optim, 111) == pytest.approx(1 - 0.9 * 0.25)
    optim["schedule"] = "wsd"
    assert [train.lr_at(s, optim, 111) for s in (10, 50, 85)] == pytest.approx([1.0] * 3)
    assert train.lr_at(110, optim, 111) == pytest.approx(0.1)
    for schedule in train.SCHEDULES:
        rates = [train.lr_at(s, optim | {"schedule": schedule}, 50) for s in range(10, 50)]
        assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.1)


# ---------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A whole run from the shell."""
    run = tmp_path_factory.mktemp("run") / "a"
    done = shell(text, run)
    assert done.returncode == 0, done.stderr
    return run, done


def test_a_run_leaves_what_it_promises(finished):
    run, done = finished
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len([line for line in lines if "tokens/s" in line]) == 6
    assert "bits per byte" in done.stdout and "---" in done.stdout
    rows = records(run)
    assert list(rows) == [1, 2, 3, 4, 5, 6]
    for row in rows.values():
        assert {"step", "loss", "grad_norm", "lr", "tokens_per_second", "memory_gb"} <= set(row)
    assert 5.0 < rows[1]["loss"] < 6.0  # log(257) = 5.55 before anything is learnt
    of_a_token = [row["mfu"] / row["tokens_per_second"] for row in rows.values()]  # over the peak
    assert of_a_token == pytest.approx([of_a_token[0]] * 6) and 0 < of_a_token[0]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    prints = {row["step"]: row["fingerprints"] for row in lines if "fingerprints" in row}
    assert list(prints) == [3, 6] and prints[3] != prints[6]
    assert {"param/embed.tokens.weight", "exp_avg_sq/head.norm.weight"} <= set(prints[6])
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == 257 and config["speed"]["dtype"] == "float32"
    assert (run / "source" / "train.py").read_text() == (ROOT / "train.py").read_text()
    assert [step for step, _ in checkpoint.checkpoints(run / "checkpoints")] == [6]
    losses, held_out = train.curves(run / "metrics.jsonl")
    assert losses == [(s, row["loss"]) for s, row in rows.items()] and held_out[0][0] == 6
    assert train.as_text(losses, held_out) in done.stdout
    assert (run / "loss.svg").read_text() == train.as_svg(losses, held_out)


def test_a_run_that_does_not_compile_imports_no_compiler(text, tmp_path):
    """It takes as long as torch itself."""
    (tmp_path / "probe.py").write_text(
        "import sys, train\ntrain.main(sys.argv[1:])\n"
        "print(*(name in sys.modules for name in ('torch._dynamo', 'torch._inductor')))")
    done = Script(tmp_path / "probe.py", *SMALL, f"data.path={text}", f"run.dir={tmp_path}/run",
                  "log.sample=null").wait()
    assert done.returncode == 0 and done.stdout.endswith("\nFalse False\n"), done.stdout


def test_a_finished_run_says_so(finished, text):
    run, _ = finished
    again = shell(text, run)
    assert again.returncode == 0 and "already at step 6" in again.stdout


def test_sampling_from_the_shell(finished):
    run, _ = finished
    for args in (["--temperature", "0"], ["--top-k", "5", "--top-p", "0.9"]):
        done = Script("model.py", "sample", run, "def ", "--tokens", "8", *args).wait()
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("def ")


def test_another_model_is_refused(finished, text):
    run, _ = finished
    done = shell(text, run, "model.d_ff=64")
    assert done.returncode == 2 and "model.d_ff" in done.stderr and "run.dir" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("extra", [
    [], pytest.param(["speed.dtype=bfloat16", "model.dropout=0.1"], marks=pytest.mark.full),
    ["speed.dtype=float16", "model.dropout=0.1"]], ids=["float32", "bfloat16", "float16"])
def test_resuming_is_bit_exact(text, tmp_path, extra):
    """Stopped after 3 steps and started again: losses, weights and moments as without the stop."""
    whole = shell(text, tmp_path / "whole", *extra)
    assert whole.returncode == 0, whole.stderr
    # the schedule must know the whole length, so the stop is a signal
    run = tmp_path / "stopped"
    process = start(text, run, *extra, "checkpoint.every=1")
    while "\nstep 3/" not in process.said()[0] and process.processes[0].is_alive():
        time.sleep(0.001)
    os.kill(process.processes[0].pid, signal.SIGINT)
    assert process.wait().returncode == 0, process.stderr
    again = shell(text, run, *extra)
    assert again.returncode == 0 and ("resumed" in again.stdout or "already" in again.stdout)
    a, b = records(tmp_path / "whole"), records(run)
    assert {s: r["loss"] for s, r in a.items()} == {s: r["loss"] for s, r in b.items()}
    assert train.curves(run / "metrics.jsonl") == train.curves(tmp_path / "whole/metrics.jsonl")
    assert same_tensors(tmp_path / "whole", run)


def same_tensors(run_a, run_b):
    folders = [checkpoint.latest(run / "checkpoints", print) for run in (run_a, run_b)]
    a, b = (checkpoint.read_safetensors(f / "rank_00000.safetensors") for f in folders)
    assert set(a) == set(b) and len(a) > 20
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("split, words", [
    ([], "dp 2 x fsdp 1 = 2 data ranks"),
    (["parallel.dp=1", "parallel.cp=2"], "the most loaded of 2 cp ranks had 1.000 of the mean"),
    (["parallel.dp=1", "parallel.pp=2"], "stages  2 x 1, 1f1b: layers 1 + 1")])
def test_ranks_give_the_single_process_run(split, words, text, finished, tmp_path):
    """2 ranks, then resumed on 1: the losses of one process to float32 rounding. With
    pp the checkpoints go through fsspec."""
    root = tmp_path / "elsewhere"
    where = f"checkpoint.dir={'file://' if 'parallel.pp=2' in split else ''}{root}"
    done = shell(text, tmp_path / "two", "checkpoint.every=3", where, *split, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "sent by rank 0 in the first step" in done.stdout and words in done.stdout
    assert done.stdout.count("training, smoothed") == 1 and (tmp_path / "two/loss.svg").exists()
    assert "crosses the network" not in done.stdout
    one, two = records(finished[0]), records(tmp_path / "two")
    for step in one:
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)
        assert two[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-4)
    newest = checkpoint.latest(root, print)
    assert newest.name == "step_000000006" and not (tmp_path / "two" / "checkpoints").exists()
    for file in newest.iterdir():
        file.unlink()  # as if the machine had died before the last one
    newest.rmdir()
    again = shell(text, tmp_path / "two", where)
    assert again.returncode == 0 and "resumed" in again.stdout and "at step 3" in again.stdout
    resumed = records(tmp_path / "two")
    for step in one:
        assert resumed[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)


def test_tp_over_several_nodes_is_said(text, monkeypatch, capsys):
    """torchrun tells how many ranks this node has; tp 2 on nodes of one is allowed, and said."""
    run = train.build(train.load_config([*SMALL, f"data.path={text}"]),
                      train.parallel.build_mesh(train.parallel.layout_of(1), "cpu"))
    run.config["parallel"] |= {"pp": 2, "chunks": 1}
    sizes = train.parallel.layout_of(4, pp=2, tp=2)
    for ranks, said in ((2, False), (1, True)):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        train.introduce(run, sizes)
        told = capsys.readouterr().out
        assert "dp 1 x fsdp 1 = 1 data ranks, each of tp 2\n" in told
        assert "stages  2 x 1, 1f1b: layers 1 + 1, the most loaded has " in told
        assert ("tp 2 spans nodes of 1 ranks" in told) == said
    run.loader.close()


def test_a_mistake_that_all_ranks_find_is_told_once(text, tmp_path):
    done = shell(text, tmp_path / "bad", "train.global_batch=5", ranks=2)
    assert done.codes == [2, 2] and done.stderr.count("train.py: error: train.global_batch") == 1
    assert not (tmp_path / "bad").exists()


# ---- One of two ranks fails. There is no launcher that would end the other one: it has to notice
# by itself.

GONE = "train.py: a rank it waited for is gone"
FAULTS = {  # case: (what fails on rank 1, with what; what rank 1 says, what rank 0 says)
    "config": ("parallel.layout_of", "ValueError('only here')", "train.py: error: only here", ""),
    "data": ("data.Loader.step", "OSError(5, 'only here')", "OSError: [Errno 5] only here", GONE),
    "forward": ("model.Layer.forward", "RuntimeError('only here')", "RuntimeError: only here",
                GONE),
    "optimizer": ("parallel.Blocks.adamw", "AssertionError('only here')",
                  "AssertionError: only here", GONE),
    "save": ("checkpoint.write_rank", "PermissionError(13, 'only here')",
             "PermissionError: [Errno 13] only here", "RuntimeError: rank 1: [Errno 13] only here"),
    "load": ("checkpoint.load", "KeyError('only here')", "KeyError: 'only here'", GONE),
    "unreadable": ("checkpoint.stored", "PermissionError(13, 'only here')",
                   "rank 1: [Errno 13] only here", "rank 1: [Errno 13] only here"),
}


def fail(place, error, rank):
    """On rank 1 what is at place raises this error."""
    def failing(*args, **kw):
        raise eval(error)

    if rank == 1:
        module, *path, name = place.split(".")
        setattr(functools.reduce(getattr, path, importlib.import_module(module)), name, failing)


@pytest.fixture(scope="module")
def one_fails(text, finished, tmp_path_factory):
    """one_fails(case): the folder of a run on 2 ranks at ZeRO 3, and the run."""
    out, known = tmp_path_factory.mktemp("faults"), {}

    def run(case):
        if case not in known:
            if case in ("load", "unreadable"):
                shutil.copytree(finished[0], out / case)
            known[case] = shell(text, out / case, "parallel.dp=1", "parallel.fsdp=2",
                                "parallel.zero=3", "checkpoint.every=1", ranks=2,
                                before=functools.partial(fail, *FAULTS[case][:2]))
        return out / case, known[case]

    return run


@pytest.mark.parametrize("case", FAULTS)
def test_a_rank_that_fails_ends_all_and_says_why(one_fails, case):
    """Both ranks end with an error, within 10 s of each other; the one that failed shows a
    traceback, or one line where the mistake is the user's; the other one does not pretend to know
    better."""
    _, done = one_fails(case)
    zero, one = ("".join(done.said(rank)) for rank in (0, 1))
    assert set(done.codes) <= {1, 2} and done.apart < 10, (done.codes, zero, one)
    _, _, said, other = FAULTS[case]
    assert said in one, one
    assert ("Traceback" in one) == (case not in ("config", "unreadable"))
    assert other in zero, zero
    if other in ("", GONE):
        assert "Traceback" not in zero and "train.py: error" not in zero


def test_a_checkpoint_closed_to_one_rank_is_the_same_error_on_all(one_fails):
    """Neither writing nor reading: no rank goes on, nothing counts as complete that is not, and
    nothing that was complete is lost."""
    for case, complete in (("save", []), ("unreadable", [6])):
        folder, done = one_fails(case)
        last = {done.said(rank)[1].splitlines()[-1] for rank in (0, 1)}
        assert len(last) == 1 and "rank 1: [Errno 13] only here" in last.pop()
        root = folder / "checkpoints"
        assert [step for step, _ in checkpoint.checkpoints(root)] == complete
    root = one_fails("save")[0] / "checkpoints"
    assert not [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("what, words", [
    (["data.path=/nowhere"], ["/nowhere"]),
    (["data.seq_len=10000000"], ["data.seq_len"]),
    (["model.vocab_size=100"], ["model.vocab_size", "256"]),
])
def test_bad_data_ends_with_one_line(text, tmp_path, what, words):
    done = shell(text, tmp_path / "bad", *what)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "bad").exists()


def test_a_gradient_that_is_not_finite_changes_nothing(text, tmp_path):
    """float16 with an absurd loss scale: the first updates are skipped, the scale halves, and the
    step counter of AdamW counts only the others."""
    large = float(2**26)
    done = shell(text, tmp_path / "half", "speed.dtype=float16", f"optim.loss_scale={large}",
                 "train.steps=16")
    assert done.returncode == 0, done.stderr
    assert "update skipped" in done.stdout
    meta = checkpoint.read_meta(checkpoint.latest(tmp_path / "half" / "checkpoints", print))
    skipped = done.stdout.count("update skipped")
    assert 0 < skipped < 16
    assert meta["optimizer_step"] == 16 - skipped and meta["loss_scale"] == large * 0.5**skipped
    limited = shell(text, tmp_path / "limit", "speed.dtype=float16", "optim.loss_scale=1e30",
                    "train.max_bad_steps=3")
    assert limited.returncode == 1 and "3 steps in a row" in limited.stderr


def test_profile_and_tensorboard_on_request(text, tmp_path):
    done = shell(text, tmp_path / "p", "log.profile=[2,3]")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "p" / "trace-rank0.json").read_text())["traceEvents"]
    missing = shell(text, tmp_path / "w", "log.wandb=project")
    assert missing.returncode == 2 and "pip install wandb" in missing.stderr
