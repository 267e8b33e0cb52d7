"""train.py from the shell: configs refused, runs resumed, interrupted, spread over ranks."""

import json
import math
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

import checkpoint
import data
import train

ROOT = pathlib.Path(__file__).parent.parent
SMALL = ["model.n_layer=2", "model.d_model=32", "model.n_head=4", "model.n_kv_head=2",
         "model.d_ff=48", "data.seq_len=32", "train.global_batch=4", "train.microbatch=2",
         "train.steps=6", "train.eval_sequences=5", "train.eval_every=null", "optim.warmup=2",
         "log.every=1", "log.sample=20", "speed.threads=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A token folder of real text: a few of the standard library's files, by bytes."""
    folder = tmp_path_factory.mktemp("text")
    data.prepare([str(ROOT / "train.py"), str(ROOT / "model.py"), str(ROOT / "parallel.py")],
                        folder, quiet=True)
    data.prepare([str(ROOT / "data.py")], folder, split="val", quiet=True)
    return folder


def command(folder, run, *extra, ranks=None):
    launch = [sys.executable]
    if ranks:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = [f"data.path={folder}", f"run.dir={run}"]
    return [*launch, str(ROOT / "train.py"), *SMALL, *paths, *extra]


def shell(*args, **kw):
    return subprocess.run(command(*args, **kw), cwd=ROOT, capture_output=True, text=True,
                          timeout=120)


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
    (["nothere.yaml"], ["nothere.yaml", "no such file"]),
    (["nonsense"], ["nonsense", "section.key=value"]),
    (["optim=3"], ["optim"]),
])
def test_bad_arguments(argv, words):
    with pytest.raises(ValueError) as error:
        train.load_config(argv)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("argv, world, words", [
    (["parallel.tp=2"], 2, ["parallel.tp", "2"]),
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
@pytest.mark.parametrize("override, words", [
    ({"n_head": 5}, ["model.n_head", "192"]),
    ({"n_kv_head": 4}, ["model.n_kv_head", "6"]),
    ({"norm": "batch"}, ["model.norm", "rmsnorm"]),
    ({"dropout": 1.0}, ["model.dropout"]),
    ({"d_head": 33}, ["model.d_head", "even"]),
    ({"rope_scaling": {"factor": 2}}, ["model.rope_scaling", "original_max_len"]),
    ({"n_layer": 0}, ["model.n_layer"]),
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
    fsdp = config["parallel"]["fsdp"]
    train.check_config(config, 8 if fsdp <= 8 else 4 * fsdp)
    section = config["model"] | {"max_len": config["data"]["seq_len"]}
    train.model_py.ModelConfig(**section)


@pytest.mark.quick
def test_parameter_counts_are_the_published_ones():
    published = {"gpt2-124m": 124_439_808, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
                 "qwen3-0.6b": 596_049_920}
    for name, n in published.items():
        config = train.load_config([str(ROOT / f"configs/{name}.yaml")])
        cfg = train.model_py.ModelConfig(**config["model"] | {"max_len": config["data"]["seq_len"]})
        mesh = train.parallel.build_mesh(train.parallel.layout_of(1), "cpu")
        with torch.device("meta"):
            whole = train.model_py.Transformer(cfg, mesh)
        params = train.parallel.list_params(whole.named_blocks())
        assert sum(math.prod(p.full_shape) for p in params) == n


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
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["vocab_size"] == 257 and config["speed"]["dtype"] == "float32"
    assert (run / "source" / "train.py").read_text() == (ROOT / "train.py").read_text()
    assert [step for step, _ in checkpoint.checkpoints(run / "checkpoints")] == [6]


def test_a_finished_run_says_so(finished, text):
    run, _ = finished
    again = shell(text, run)
    assert again.returncode == 0 and "already at step 6" in again.stdout


def test_sampling_from_the_shell(finished):
    run, _ = finished
    for args in (["--temperature", "0"], ["--top-k", "5", "--top-p", "0.9"]):
        line = [sys.executable, "model.py", "sample", str(run), "def ", "--tokens", "8", *args]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("def ")


def test_another_model_is_refused(finished, text):
    run, _ = finished
    done = shell(text, run, "model.d_ff=64")
    assert done.returncode == 2 and "model.d_ff" in done.stderr and "run.dir" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("extra", [[], ["speed.dtype=bfloat16", "model.dropout=0.1"],
                                   ["speed.dtype=float16"]], ids=["float32", "bfloat16", "float16"])
def test_resuming_is_bit_exact(text, tmp_path, extra):
    """Stopped after 3 steps and started again: losses, weights and moments as without the stop."""
    whole = shell(text, tmp_path / "whole", *extra)
    assert whole.returncode == 0, whole.stderr
    # the schedule must know the whole length, so the stop is a signal
    run = tmp_path / "stopped"
    process = subprocess.Popen(command(text, run, *extra, "checkpoint.every=1"), cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 3"):
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    again = shell(text, run, *extra)
    assert again.returncode == 0 and ("resumed" in again.stdout or "already" in again.stdout)
    a, b = records(tmp_path / "whole"), records(run)
    assert {s: r["loss"] for s, r in a.items()} == {s: r["loss"] for s, r in b.items()}
    assert same_tensors(tmp_path / "whole", run)


def same_tensors(run_a, run_b):
    folders = [checkpoint.latest(run / "checkpoints", print) for run in (run_a, run_b)]
    a, b = (checkpoint.read_safetensors(f / "rank_00000.safetensors") for f in folders)
    assert set(a) == set(b) and len(a) > 20
    return all(torch.equal(a[k], b[k]) for k in a)


def test_ranks_give_the_single_process_run(text, finished, tmp_path):
    """torchrun on 2 ranks, then resumed on 1: the losses of one process to float32 rounding."""
    done = shell(text, tmp_path / "two", "checkpoint.every=3", ranks=2)
    assert done.returncode == 0, done.stderr
    assert "all_reduce sum" in done.stdout and "dp 2 x fsdp 1 = 2 data ranks" in done.stdout
    one, two = records(finished[0]), records(tmp_path / "two")
    for step in one:
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)
        assert two[step]["grad_norm"] == pytest.approx(one[step]["grad_norm"], rel=1e-4)
    newest = checkpoint.latest(tmp_path / "two" / "checkpoints", print)
    for file in newest.iterdir():
        file.unlink()  # as if the machine had died before the last one
    newest.rmdir()
    again = shell(text, tmp_path / "two")
    assert again.returncode == 0 and "resumed" in again.stdout and "at step 3" in again.stdout
    resumed = records(tmp_path / "two")
    for step in one:
        assert resumed[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)


def test_an_error_on_one_rank_ends_all(text, tmp_path):
    began = time.time()
    done = shell(text, tmp_path / "bad", "train.global_batch=5", ranks=2)
    assert done.returncode != 0 and "train.global_batch" in done.stderr
    assert time.time() - began < 60 and not (tmp_path / "bad").exists()


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
    done = shell(text, tmp_path / "half", "speed.dtype=float16", f"optim.loss_scale={large}")
    assert done.returncode == 0, done.stderr
    assert "update skipped" in done.stdout
    meta = checkpoint.read_meta(checkpoint.latest(tmp_path / "half" / "checkpoints", print))
    skipped = done.stdout.count("update skipped")
    assert 0 < skipped < 6
    assert meta["optimizer_step"] == 6 - skipped and meta["loss_scale"] == large * 0.5**skipped
    limited = shell(text, tmp_path / "limit", "speed.dtype=float16", "optim.loss_scale=1e30",
                    "train.max_bad_steps=3")
    assert limited.returncode == 1 and "3 steps in a row" in limited.stderr


def test_profile_and_tensorboard_on_request(text, tmp_path):
    done = shell(text, tmp_path / "p", "log.profile=[2,3]")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "p" / "trace-rank0.json").read_text())["traceEvents"]
    missing = shell(text, tmp_path / "w", "log.wandb=project")
    assert missing.returncode == 2 and "pip install wandb" in missing.stderr
