"""Train a language model: config -> mesh -> data -> model -> optimizer -> loop, in this order.

    python train.py                                        the default run, on whatever is there
    python train.py configs/gpt2-124m.yaml optim.lr=6e-4   a config, keys overridden
    torchrun --nproc-per-node 8 train.py configs/llama3-8b.yaml
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        train.py configs/llama3-70b.yaml                   the same line on both nodes

One step, on every rank:

    batch ----> microbatches: forward, backward, forward, backward ...    (parallel.run)
    gradients:  summed over microbatches (float32), then over the data ranks while backward runs
    norm -----> clip -> AdamW -> the next step's weights

The loss is a sum over all target tokens of the global batch, divided by their number, which is
known before the first forward. Nothing is averaged over ranks or microbatches, so every layout
computes what one process computes.

The same command again resumes from the newest checkpoint of run.dir. Ctrl-C (or SIGTERM) saves one
at the end of the step. Nothing here reads a tensor on the host, except one step late for the log.
"""

import dataclasses
import difflib
import json
import math
import pathlib
import resource
import shutil
import signal
import sys
import time
import traceback

import torch
import yaml

import checkpoint
import data
import model as model_py
import parallel
from model import check

HERE = pathlib.Path(__file__).parent

# ---------------------------------------------------------------------------------------------
# Config

OPTIONAL = {  # types of the keys whose default does not tell (null or a word that stands for one)
    "model.d_head": int, "model.vocab_size": int, "model.max_len": int, "model.rope_scaling": dict,
    "model.logit_softcap": float, "data.path": (str, dict), "optim.grad_clip": float,
    "train.eval_every": int, "train.eval_sequences": int, "parallel.dp": (int, str),
    "parallel.fsdp": (int, str), "parallel.check_replicas_every": int, "speed.compile": (bool, str),
    "speed.recompute": (int, str), "speed.threads": int, "checkpoint.every": int,
    "checkpoint.keep": int, "parallel.reduce_dtype": str, "log.sample": int,
    "log.wandb": str, "log.profile": list,
}
NULLABLE = {key for key in OPTIONAL if key not in
            ("parallel.dp", "parallel.fsdp", "speed.compile", "speed.recompute")}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
          "float16": torch.float16}
WHY_NOT = {  # keys that people look for, and what to do instead
    "attn_dropout": "attention probabilities have no dropout (fused kernels and other layouts "
                    "could not repeat it): use model.dropout",
    "accumulation": "it follows from train.global_batch, train.microbatch and the data ranks",
}
WHY_NOT |= dict.fromkeys(("attention_dropout", "attn_pdrop"), WHY_NOT["attn_dropout"])
WHY_NOT["gradient_accumulation_steps"] = WHY_NOT["accumulation"]


def coerce(key, value, default):
    """`value` in the type of `default`, or a ValueError. PyYAML reads 3e-4 as a string."""
    if value is None:
        check(key in NULLABLE, key, value, "null is not a choice here")
        return None
    want = OPTIONAL.get(key, type(default))
    for kind in want if isinstance(want, tuple) else (want,):
        if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
            return value
        if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
        if kind is int and isinstance(value, str | float):
            try:
                if float(value) == int(float(value)):
                    return int(float(value))
            except ValueError:
                pass
    names = " or ".join(k.__name__ for k in (want if isinstance(want, tuple) else (want,)))
    raise ValueError(f"{key} = {value!r}: must be of type {names} (default: {default!r})")


def merge(config, override, where):
    """Put the sections of `override` into config. Unknown keys are errors."""
    for section, keys in override.items():
        if section not in config or not isinstance(keys, dict):
            near = difflib.get_close_matches(str(section), config, 1)
            raise ValueError(f"{where}: unknown section {section!r}"
                             + (f", did you mean {near[0]!r}?" if near else
                                f": one of {', '.join(config)}, each with keys"))
        for key, value in keys.items():
            name = f"{section}.{key}"
            if key not in config[section]:
                everywhere = [f"{s}.{k}" for s in config for k in config[s]]
                near = difflib.get_close_matches(name, everywhere, 1)
                near = near or [n for n in everywhere if n.endswith(f".{key}")]
                raise ValueError(f"{where}: unknown key {name}" + (
                    f": {WHY_NOT[key]}" if key in WHY_NOT else
                    f", did you mean {near[0]}?" if near else
                    f": {section} has {', '.join(config[section])}"))
            config[section][key] = coerce(name, value, config[section][key])


def load_config(argv):
    """config.yaml, then each argument in order: a YAML file, or section.key=value."""
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    for arg in argv:
        if "=" in arg:
            name, _, text = arg.partition("=")
            section, _, key = name.partition(".")
            check(key != "", name, text, "overrides are written section.key=value")
            merge(config, {section: {key: yaml.safe_load(text)}}, "command line")
            continue
        path = pathlib.Path(arg)
        check(path.suffix in (".yaml", ".yml"), "argument", arg,
              "must be a .yaml file or section.key=value")
        check(path.exists(), "config", arg, "no such file")
        merge(config, yaml.safe_load(path.read_text()) or {}, arg)
    return config


def check_config(config, world):
    """Every rule that a config must keep, before anything is allocated. Returns the axis sizes."""
    m, t, o, p, s = (config[k] for k in ("model", "train", "optim", "parallel", "speed"))
    for key in ("pp", "cp", "ep"):
        check(p[key] == 1, f"parallel.{key}", p[key], "only 1 is built so far")
    check(p["zero"] in (0, 1, 2, 3), "parallel.zero", p["zero"], "must be 0, 1, 2 or 3")
    check(p["prefetch"] >= 0, "parallel.prefetch", p["prefetch"], "must be at least 0")
    check(p["offload"] in ("none", "optimizer"), "parallel.offload", p["offload"],
          "must be none or optimizer")
    check(p["reduce_dtype"] in (None, "float32", "bfloat16"), "parallel.reduce_dtype",
          p["reduce_dtype"], "must be null, float32 or bfloat16")
    axes = {axis: p[axis] for axis in parallel.AXES}
    for axis, n in axes.items():
        check(n == "auto" or (isinstance(n, int) and n >= 1), f"parallel.{axis}", n,
              "must be at least 1" + (", or auto" if axis in ("dp", "fsdp") else ""))
    sizes = parallel.layout_of(world, **axes)
    check_tp(config, sizes["tp"])
    ranks = sizes["dp"] * sizes["fsdp"]
    for key in ("steps", "global_batch", "microbatch", "max_bad_steps"):
        check(t[key] >= 1, f"train.{key}", t[key], "must be at least 1")
    check(t["global_batch"] % ranks == 0, "train.global_batch", t["global_batch"],
          f"the {ranks} data ranks must divide it: {-(-t['global_batch'] // ranks) * ranks}, say")
    check(config["data"]["seq_len"] >= 1, "data.seq_len", config["data"]["seq_len"], "at least 1")
    check(m["max_len"] is None or m["max_len"] >= config["data"]["seq_len"], "model.max_len",
          m["max_len"], f"must hold data.seq_len = {config['data']['seq_len']}")
    check(o["schedule"] in SCHEDULES, "optim.schedule", o["schedule"],
          f"must be one of {', '.join(SCHEDULES)}")
    check(o["warmup"] >= 0, "optim.warmup", o["warmup"], "must be at least 0")
    check(0 <= o["decay"] <= 1, "optim.decay", o["decay"], "must be a fraction, 0 to 1")
    check(o["grad_clip"] is None or o["grad_clip"] > 0, "optim.grad_clip", o["grad_clip"],
          "must be above 0, or null")
    for key in ("beta1", "beta2"):
        check(0 <= o[key] < 1, f"optim.{key}", o[key], "must be in [0, 1)")
    check(s["dtype"] in ("auto", *DTYPES), "speed.dtype", s["dtype"],
          f"must be one of auto, {', '.join(DTYPES)}")
    check(s["compile"] in (True, False, "auto"), "speed.compile", s["compile"],
          "must be true, false or auto")
    check(s["recompute"] in ("none", "selective", "full") or (isinstance(s["recompute"], int)
          and s["recompute"] >= 1), "speed.recompute", s["recompute"],
          "must be none, selective, full, or n >= 1 for every n-th layer")
    check(s["recompute"] != "selective" or s["compile"] is not True, "speed.recompute", "selective",
          "a compiled layer chooses by itself what to keep: use none, or speed.compile=false")
    for key in ("loss_chunk", "pad_vocab"):
        check(s[key] >= 1, f"speed.{key}", s[key], "must be at least 1")
    for name in ("log.every", "checkpoint.every", "checkpoint.keep", "train.eval_every",
                 "train.eval_sequences", "parallel.check_replicas_every", "speed.threads"):
        value = config[name.split(".")[0]][name.split(".")[1]]
        check(value is None or value >= 1, name, value, "must be at least 1")
    profile = config["log"]["profile"]
    check(profile is None or (len(profile) == 2 and 0 < profile[0] <= profile[1]), "log.profile",
          profile, "must be [first, last], two steps counted from 1")
    return sizes


def check_tp(config, tp):
    """What a split of the layers over tp ranks asks of the model."""
    m, seq_len = config["model"], config["data"]["seq_len"]
    for key in ("n_head", "d_ff"):
        check(m[key] % tp == 0, f"model.{key}", m[key],
              f"parallel.tp = {tp} must divide it: {-(-m[key] // tp) * tp}, say")
    kv = m["n_kv_head"]
    legal = [n for n in range(1, tp + 1) if kv % n == 0 or n % kv == 0]
    check(kv % tp == 0 or tp % kv == 0, "model.n_kv_head", kv,
          f"parallel.tp = {tp} must divide it or be divided by it: parallel.tp={legal[-1]}, say")
    check(seq_len % tp == 0, "data.seq_len", seq_len, f"parallel.tp = {tp} must divide it, as the "
          f"sequence is split between layers: {-(-seq_len // tp) * tp}, say")


# ---------------------------------------------------------------------------------------------
# Learning rate

SCHEDULES = {  # how far from lr down to min_lr, 0 to 1, at x = 0 .. 1 of the steps after warmup
    "cosine": lambda x, decay: 0.5 - 0.5 * math.cos(math.pi * x),
    "linear": lambda x, decay: x,
    "wsd": lambda x, decay: max(0.0, (x - (1 - decay)) / decay) if decay else 0.0,
}


def lr_at(step, optim, steps):
    """Learning rate of step 0 .. steps-1: linear warmup to lr, then the schedule down to min_lr."""
    if step < optim["warmup"]:
        return optim["lr"] * (step + 1) / optim["warmup"]
    x = (step - optim["warmup"]) / max(steps - 1 - optim["warmup"], 1)
    fallen = SCHEDULES[optim["schedule"]](min(x, 1.0), optim["decay"])
    return optim["lr"] * (1 - fallen * (1 - optim["min_lr"]))


# ---------------------------------------------------------------------------------------------
# Build: the order of application


@dataclasses.dataclass
class Run:
    """Everything that a step needs, passed along in place of globals."""

    config: dict
    mesh: parallel.Mesh
    model: model_py.Transformer
    blocks: parallel.Blocks
    fns: list  # one function for each block
    keep: list  # for each block: does forward keep its graph
    loader: data.Loader
    val: data.Tokens | None
    tokenizer: str  # a name or a file, for data.load_tokenizer
    scale: torch.Tensor  # 0-d: loss scale (1 but for float16)
    drop_key: torch.Tensor  # 0-d: of the seed; dropout's masks follow from it and the step
    good: torch.Tensor  # 0-d: steps since the loss scale changed
    bad: torch.Tensor  # 0-d: steps in a row without a finite gradient
    step: int = 0
    samples: int = 0  # since the run began: with the seed, the data position


def open_data(config, mesh):
    """The training sources with their weights, and the validation split of the first that has
    one. Rank 0 of each host makes the default token files if they are wanted and missing."""
    path, error = config["data"]["path"], None
    if path is None:
        path = HERE / "tokens" / "stdlib"
        if mesh.rank == 0 and not any(path.glob("train-*.tokens")):
            try:
                data.prepare_default(path)
            except (ValueError, OSError) as e:
                error = str(e)
        parallel.agree(mesh, error)
    folders = path if isinstance(path, dict) else {str(path): 1.0}
    sources = [data.Tokens(folder, "train") for folder in folders]
    first = sources[0]
    for folder, source in zip(folders, sources):
        check(source.tokenizer_name == first.tokenizer_name, "data.path", folder,
              f"tokenized by {source.tokenizer_name}, but {next(iter(folders))} by "
              f"{first.tokenizer_name}")
    val = None
    for folder in folders:
        if any(pathlib.Path(folder).glob("val-*.tokens")):
            val = data.Tokens(folder, "val")
            break
    return sources, list(folders.values()), val


def build(config, mesh):
    """Data, model, weights, optimizer state, in the order in which each needs the one before."""
    d, t, s = config["data"], config["train"], config["speed"]
    sources, weights, val = open_data(config, mesh)  # wrong input ends here, before any weight
    cfg = resolve_model(config, sources[0])
    on_gpu = mesh.device.type == "cuda"
    s["dtype"] = ("bfloat16" if on_gpu else "float32") if s["dtype"] == "auto" else s["dtype"]
    selective = s["recompute"] == "selective"
    s["compile"] = on_gpu and not selective if s["compile"] == "auto" else s["compile"]
    dtype = DTYPES[s["dtype"]]
    loader = data.Loader(
        sources, weights, d["seq_len"], t["seed"], t["global_batch"], t["microbatch"],
        mesh.coord["data"], mesh.size["data"], d["mask_documents"], pin=on_gpu)
    p = config["parallel"]
    model, blocks = model_py.build(
        cfg, mesh, dtype, s["pad_vocab"], s["loss_chunk"], s["keep_gathered"], zero=p["zero"],
        prefetch=p["prefetch"], reduce_dtype=DTYPES.get(p["reduce_dtype"]),
        offload=p["offload"] == "optimizer")
    model_py.init_weights(blocks, cfg, t["seed"])
    n = {"none": 0, "selective": 0, "full": 1}.get(s["recompute"], s["recompute"])
    layers = [not n or i % n != 0 for i in range(cfg.n_layer)]
    scalar = lambda x, dt: torch.tensor(x, dtype=dt, device=mesh.device)  # noqa: E731
    scale = scalar(config["optim"]["loss_scale"] if dtype == torch.float16 else 1.0,
                   blocks.master_dtype)
    fns = model.functions(s["compile"], selective)
    return Run(config, mesh, model, blocks, fns, [True, *layers, True], loader, val,
               sources[0].tokenizer_path, scale,
               scalar(parallel.key64("dropout", t["seed"]), torch.int64),
               scalar(0, torch.int64), scalar(0, torch.int64))


def resolve_model(config, tokens):
    """ModelConfig, with what is left to the data filled in."""
    m = config["model"]
    m["vocab_size"] = m["vocab_size"] or tokens.vocab_size
    m["max_len"] = m["max_len"] or config["data"]["seq_len"]
    check(m["vocab_size"] >= tokens.vocab_size, "model.vocab_size", m["vocab_size"],
          f"the token files hold ids up to {tokens.vocab_size - 1}")
    return model_py.ModelConfig(**m)


# ---------------------------------------------------------------------------------------------
# Step


def to_device(run, batch, scale=None, drop_key=None):
    """A microbatch of the loader on the device, completed for the model."""
    put = lambda x: x if x is None else x.to(run.mesh.device, non_blocking=True)  # noqa: E731
    pos = batch.pos if run.config["data"]["mask_documents"] else None
    return run.model.micro(put(batch.tokens), put(batch.targets), put(pos), put(batch.lo), scale,
                           drop_key, put(batch.sample))


def next_batch(run, stop):
    """The next step's microbatches, and on its way through the control group: the number of target
    tokens in the global batch (each data rank counted once) and whether any rank wants to stop."""
    samples, batches = run.loader.next()
    mine = run.mesh.coord["pp"] == run.mesh.coord["cp"] == run.mesh.coord["tp"] == 0
    count = sum(b.n_valid for b in batches) if mine else 0
    return samples, batches, parallel.Pending(run.mesh, count, int(stop))


def train_step(run, batches, count):
    """One optimizer step on `batches`, whose global batch has `count` target tokens. Returns
    device scalars [loss, gradient norm, 1 if the step was skipped, such steps in a row]."""
    optim, blocks, mesh = run.config["optim"], run.blocks, run.mesh
    drop_key = parallel.mix64(run.drop_key + run.step)
    scale = run.scale / max(count, 1)
    micros = [to_device(run, b, scale, drop_key) for b in batches]
    blocks.begin()
    actions = parallel.accumulate_schedule(len(micros))
    loss = parallel.run(actions, run.fns, blocks, micros, run.keep)
    loss = parallel.all_reduce(mesh, loss.to(blocks.master_dtype), "data") / max(count, 1)
    norm, found_inf = clip(run, optim["grad_clip"])
    blocks.adamw(lr_at(run.step, optim, run.config["train"]["steps"]), optim["beta1"],
                 optim["beta2"], optim["eps"], optim["weight_decay"], found_inf)
    if blocks.dtype == torch.float16:
        rescale(run, found_inf)
    run.bad.copy_((run.bad + 1) * found_inf.long())
    run.step += 1
    run.samples += run.config["train"]["global_batch"]
    return torch.stack([loss, norm, found_inf.to(loss.dtype), run.bad.to(loss.dtype)])


def clip(run, limit):
    """Undo the loss scale and scale gradients of norm above `limit` down to it. Returns the norm
    before, and a float32 flag: 1 where it is not finite."""
    norm = run.blocks.grad_norm() / run.scale
    factor = 1 / run.scale
    if limit is not None:
        factor = factor * (limit / (norm + 1e-6)).clamp(max=1.0)
    if limit is not None or run.blocks.dtype == torch.float16:
        torch._foreach_mul_(run.blocks.grad, factor)
    return norm, (~torch.isfinite(norm)).float()


def rescale(run, found_inf):
    """float16: halve the loss scale after an overflow, double it after 2000 good steps. Every rank
    sees the same flag, so all decide alike."""
    run.good.copy_(torch.where(found_inf > 0, 0, run.good + 1))
    grow = run.good == 2000
    run.scale.mul_(torch.where(found_inf > 0, 0.5, torch.where(grow, 2.0, 1.0)).to(run.scale.dtype))
    run.good.masked_fill_(grow, 0)


@torch.no_grad()
def evaluate(run):
    """(loss per token, bits per byte) on the held-out split, the same on every layout."""
    d, t, mesh = run.config["data"], run.config["train"], run.mesh
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in data.eval_batches(run.val, d["seq_len"], t["eval_sequences"], t["microbatch"],
                                   mesh.coord["data"], mesh.size["data"], d["mask_documents"]):
        micro = to_device(run, batch)
        loss = parallel.run(parallel.forward_schedule(1), run.fns, run.blocks, [micro])
        total[0] += loss
        total[1] += batch.n_valid
    total = parallel.all_reduce(mesh, total, "data").tolist()
    loss = total[0] / max(total[1], 1)
    return loss, loss / math.log(2) * run.val.n_tokens / run.val.n_bytes


# ---------------------------------------------------------------------------------------------
# Checkpoints


def save(run):
    """Write a checkpoint of the current step; each data rank writes its share of every tensor."""
    mesh = run.mesh
    meta = {"step": run.step, "samples": run.samples, "config": run.config,
            "tokenizer": run.tokenizer, "loss_scale": run.scale.item(), "good": run.good.item(),
            "bad": run.bad.item(), "optimizer_step": run.blocks.steps[0][0].item()}
    root = pathlib.Path(run.config["run"]["dir"]) / "checkpoints"
    checkpoint.save(root, run.step, model_py.pieces(run.blocks, shared=True), meta, mesh.rank,
                    mesh.world, lambda error=None: parallel.agree(mesh, error))
    if mesh.rank == 0 and run.config["checkpoint"]["keep"] is not None:
        checkpoint.prune(root, run.config["checkpoint"]["keep"])
    return root


def resume(run):
    """Load the newest good checkpoint of run.dir, if there is one. Rank 0 looks, all ranks load;
    what cannot be read whole is passed over with a warning, and the one before is tried."""
    root, mesh = pathlib.Path(run.config["run"]["dir"]) / "checkpoints", run.mesh
    paths, error = [], None
    if mesh.rank == 0 and root.exists():
        try:
            if checkpoint.latest(root, lambda line: say(run, f"warning: {line}")):
                paths = [path for _, path in reversed(checkpoint.checkpoints(root))]
        except (ValueError, OSError) as e:
            error = e
    parallel.agree(mesh, error)
    paths = parallel.tell(mesh, paths)
    for path in paths:
        meta, error = checkpoint.read_meta(path), None
        check_same_model(path, meta["config"]["model"], run.config["model"])
        try:
            checkpoint.load(path, model_py.pieces(run.blocks))
        except (ValueError, OSError) as e:
            error = e
        try:
            parallel.agree(mesh, error)
        except RuntimeError as e:
            if parallel.lost_peer(e):
                raise
            reason = e
            say(run, f"warning: passed over: {e}")
            continue
        restore(run, meta)
        say(run, f"resumed {path} at step {run.step}")
        return True
    if paths:
        raise ValueError(f"{root}: none there can be read, move it away to start afresh: {reason}")
    return False


def check_same_model(path, theirs, ours):
    differ = [f"{k} (checkpoint {theirs.get(k)!r}, config {ours[k]!r})"
              for k in ours if theirs.get(k) != ours[k] and k != "max_len"]
    if differ:
        raise ValueError(f"{path} is of another model: model.{', model.'.join(differ)}; "
                         f"choose another run.dir")


def restore(run, meta):
    """What is not a tensor of the model or the optimizer."""
    run.blocks.refresh()
    run.step, run.samples = meta["step"], meta["samples"]
    for counters in run.blocks.steps:
        for counter in counters:
            counter.fill_(meta["optimizer_step"])
    if run.blocks.dtype == torch.float16:
        run.scale.fill_(meta["loss_scale"])
    run.good.fill_(meta["good"])
    run.bad.fill_(meta["bad"])


# ---------------------------------------------------------------------------------------------
# Log

PEAK = {  # dense bfloat16 / float16 FLOP/s by a part of the device's name, from the data sheets
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "MI300X": 1307e12,
    "L40S": 362e12, "L4": 121e12, "4090": 165e12, "A10G": 70e12,
}


def say(run, line):
    if run.mesh.rank == 0:
        print(line, flush=True)


def memory_gb(device):
    """Peak memory of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    scale = 1 if sys.platform == "darwin" else 1024  # getrusage speaks bytes there, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


class Log:
    """One line a logged step on the terminal, one record in metrics.jsonl (and TensorBoard, wandb
    when asked for). A step's numbers are copied to the host without waiting and read when the next
    step has been launched."""

    def __init__(self, run):
        self.run, self.waiting = run, None
        self.every, self.steps = run.config["log"]["every"], run.config["train"]["steps"]
        cfg, mesh, t = run.model.cfg, run.mesh, run.config["train"]
        self.tokens_per_step = t["global_batch"] * run.config["data"]["seq_len"]
        self.flops = model_py.flops_per_token(cfg, run.config["data"]["seq_len"])
        self.peak = None
        if mesh.device.type == "cuda" and run.blocks.dtype in (torch.bfloat16, torch.float16):
            name = torch.cuda.get_device_name(mesh.device)
            self.peak = next((peak for part, peak in PEAK.items() if part in name), None)
        self.sinks = self.open() if mesh.rank == 0 else []
        self.clock, self.at = time.perf_counter(), run.step
        self.began = (self.clock, run.step)

    def open(self):
        """The run folder: metrics.jsonl without what a resumed run will write again, the resolved
        config, a copy of the source, and the optional writers."""
        log, folder = self.run.config["log"], pathlib.Path(self.run.config["run"]["dir"])
        (folder / "source").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(self.run.config, sort_keys=False))
        for file in HERE.glob("*.py"):
            shutil.copy(file, folder / "source" / file.name)
        metrics = folder / "metrics.jsonl"
        old = metrics.read_text().splitlines() if metrics.exists() else []
        kept = [line for line in old if json.loads(line)["step"] <= self.run.step]
        metrics.write_text("".join(line + "\n" for line in kept))
        self.file = metrics.open("a")
        sinks = []
        if log["tensorboard"]:
            writer = need("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))
            sinks.append(lambda step, row: [writer.add_scalar(k, v, step) for k, v in row.items()])
        if log["wandb"]:
            wandb = need("wandb", "wandb")
            wandb.init(project=log["wandb"], dir=str(folder), config=self.run.config)
            sinks.append(lambda step, row: wandb.log(row, step=step))
        return sinks

    def write(self, step, row):
        """One record: numbers in full precision."""
        if self.run.mesh.rank == 0:
            self.file.write(json.dumps({"step": step} | row) + "\n")
            self.file.flush()
            for sink in self.sinks:
                sink(step, row)

    def push(self, step, metrics):
        """Start the copy of a step's numbers to the host, then deal with the step before."""
        host = metrics.to("cpu", non_blocking=True)
        event = None
        if metrics.is_cuda:
            event = torch.cuda.Event()
            event.record()
        before, self.waiting = self.waiting, (step, host, event, time.perf_counter())
        if before:
            self.read(*before)

    def flush(self):
        if self.waiting:
            self.read(*self.waiting)
        self.waiting = None

    def read(self, step, host, event, now):
        """All ranks see the same numbers, so all end the run at the same step."""
        if event:
            event.synchronize()
        loss, norm, skipped, bad = host.tolist()
        limit = self.run.config["train"]["max_bad_steps"]
        if skipped:
            say(self.run, f"step {step}: gradient norm {norm}, update skipped ({bad:.0f} in a row)")
        if bad >= limit:
            raise RuntimeError(f"{limit} steps in a row without a finite gradient, the last {step}")
        if step % self.every and step != self.steps and step != 1:
            return
        rate = (step - self.at) * self.tokens_per_step / max(now - self.clock, 1e-9)
        left = (self.steps - step) * (now - self.began[0]) / max(step - self.began[1], 1)
        self.clock, self.at = now, step
        lr = lr_at(step - 1, self.run.config["optim"], self.steps)
        mfu = self.flops * rate / self.run.mesh.world / self.peak if self.peak else None
        memory, width = memory_gb(self.run.mesh.device), len(str(self.steps))
        row = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_second": rate,
               "memory_gb": memory}
        self.write(step, row | {"mfu": mfu} if mfu else row)
        say(self.run, f"step {step:>{width}}/{self.steps}  loss {loss:.4f}  lr {lr:.2e}  "
            f"norm {norm:.3f}  {rate:,.0f} tokens/s{f'  mfu {mfu:.1%}' if mfu else ''}  "
            f"{memory:.2f} GB  {left // 60:.0f}m{left % 60:02.0f}s left")


def need(module, package):
    """Import an optional package, or say which one is missing."""
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as e:
        raise ValueError(f"this needs the package {package}: pip install {package}") from e


# ---------------------------------------------------------------------------------------------
# Loop


def train(run, log, stop):
    """Steps until train.steps, or until any rank is asked to stop. Returns True if stopped."""
    t, every = run.config["train"], run.config["checkpoint"]["every"]
    profile = profiler(run)
    run.loader.start(run.samples)
    ahead = next_batch(run, bool(stop))
    while run.step < t["steps"]:
        samples, batches, pending = ahead
        assert samples == run.samples, (samples, run.samples)
        count, wanted = pending.wait()
        if wanted:
            return True
        if run.step + 1 < t["steps"]:
            ahead = next_batch(run, bool(stop))
        log.push(run.step + 1, train_step(run, batches, count))
        profile.step()
        if run.step == log.began[1] + 1 and run.mesh.world > 1:
            say(run, "sent by rank 0 in the first step:\n" + parallel.ledger_table(run.mesh))
        last = run.step == t["steps"]
        if t["eval_every"] and run.step % t["eval_every"] == 0 and not last:
            report(run, log)
        if every and run.step % every == 0 and not last:
            save(run)
        if (n := run.config["parallel"]["check_replicas_every"]) and run.step % n == 0:
            parallel.check_replicas(run.blocks)
    return False


def report(run, log):
    log.flush()
    if run.val is None:
        return
    clock = time.perf_counter()
    loss, bits = evaluate(run)
    log.write(run.step, {"val_loss": loss, "val_bits_per_byte": bits})
    say(run, f"step {run.step}: held-out loss {loss:.4f}, {bits:.4f} bits per byte")
    log.clock += time.perf_counter() - clock  # not training time


def profiler(run):
    """torch.profiler around the steps of log.profile, or something that does nothing."""
    steps = run.config["log"]["profile"]
    if steps is None:
        return Quiet()
    path = pathlib.Path(run.config["run"]["dir"]) / f"trace-rank{run.mesh.rank}.json"
    wait = steps[0] - 1
    trace = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=wait, warmup=0, active=steps[1] - wait, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(path)))
    trace.start()
    return trace


class Quiet:
    def step(self):
        pass


def introduce(run, sizes):
    """What is about to be trained, on what, in a few lines."""
    c, mesh, steps = run.config, run.mesh, run.config["train"]["steps"]
    seq_len, batch = c["data"]["seq_len"], c["train"]["global_batch"]
    on_gpu = mesh.device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    how = c["speed"]["dtype"] + (", compiled" if c["speed"]["compile"] else "")
    tokens = sum(s.n_tokens for s in run.loader.sources)
    params = model_py.count_params(run.blocks)
    say(run, f"model   {params:,} parameters, {how}, {mesh.world} x {where}")
    say(run, f"ranks   dp {sizes['dp']} x fsdp {sizes['fsdp']} = {mesh.size['data']} data ranks"
             + (f", each of tp {sizes['tp']}" if sizes["tp"] > 1 else ""))
    if sizes["tp"] > parallel.ranks_of_node():
        say(run, f"        tp {sizes['tp']} spans nodes of {parallel.ranks_of_node()} ranks: each "
                 "layer's traffic crosses the network")
    say(run, f"data    {tokens:,} tokens ({run.tokenizer}); {batch} x {seq_len} = "
             f"{batch * seq_len:,} a step, {steps * batch * seq_len / tokens:.2f} epochs in all")
    say(run, f"run     {c['run']['dir']}")


def finish(run, log, stopped):
    """Evaluate, save, show some text."""
    log.flush()
    if not stopped:
        report(run, log)
    root = save(run)
    say(run, f"checkpoint of step {run.step} in {root}")
    n = run.config["log"]["sample"]
    if n and not stopped:
        tokenizer = data.load_tokenizer(run.tokenizer)
        text = model_py.sample(run.model, run.blocks, tokenizer, run.config["log"]["prompt"], n,
                               top_k=50, seed=run.config["train"]["seed"])
        say(run, "---\n" + text)


def main(argv):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world, local_rank = parallel.start(device)
    error = None
    try:
        config = load_config(argv)
        sizes = check_config(config, world)
    except ValueError as e:
        error = e
    everyone, bad = parallel.Mesh({}, {}, {}, torch.device("cpu"), rank, world), error is not None
    any_bad, first_bad = parallel.Pending(everyone, bad, bad and rank == 0).wait()
    if bad and (rank == 0 or not first_bad):
        raise error
    if any_bad:
        return 2  # another rank tells the mistake (most often every rank has found it)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if config["speed"]["threads"]:
        torch.set_num_threads(config["speed"]["threads"])
    run = build(config, parallel.build_mesh(sizes, device))
    resumed = resume(run)
    introduce(run, sizes)
    if resumed and run.step >= config["train"]["steps"]:
        say(run, f"already at step {run.step} of train.steps = {config['train']['steps']}: "
                 "raise it, or choose another run.dir")
        return 0
    stop = []  # a signal puts itself here; a second one ends the process at once
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, frame: (stop.append(n), signal.signal(n, signal.SIG_DFL)))
    log = Log(run)
    stopped = train(run, log, stop)
    finish(run, log, stopped)
    run.loader.close()
    return config["run"]["signal_exit_code"] if stopped else 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        code = 2
    except Exception as error:
        if parallel.lost_peer(error):  # whoever failed first shows the traceback
            print(f"train.py: a rank it waited for is gone: {error!s:.100}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.exit(1)  # without a farewell to ranks that may be gone
    parallel.stop()
    sys.exit(code)
