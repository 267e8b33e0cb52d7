"""Train a language model: config -> mesh -> data -> model -> optimizer -> loop, in this order.

    python train.py                                        the default run, on whatever is there
    python train.py configs/gpt2-124m.yaml optim.lr=6e-4   a config, keys overridden
    torchrun --nproc-per-node 8 train.py configs/llama3-8b.yaml
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        train.py configs/llama3-70b.yaml                   the same line on both nodes
    python train.py configs/llama3-405b.yaml --plan world=16384 rank=all hardware=h100
                                                           what it would take: nothing is needed

One step, on every rank:

    batch ----> microbatches: forward, backward, forward, backward ...    (parallel.run)
    gradients:  summed over microbatches (float32), then over the data ranks while backward runs
    norm -----> clip -> AdamW -> the next step's weights

The loss is a sum over all target tokens of the global batch, divided by their number, which is
known before the first forward. Nothing is averaged over ranks or microbatches, so every layout
computes what one process computes.

The same command again resumes from the newest checkpoint of run.dir. Ctrl-C (or SIGTERM) saves one
at the end of the step; those of checkpoint.every are written by a thread while training goes on.
A step reads no tensor on the host; the log does, one step late.
"""

import collections
import contextlib
import copy
import dataclasses
import difflib
import functools
import itertools
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import statistics
import sys
import time
import traceback
import weakref

import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import checkpoint
import data
import kernels
import model as model_py
import parallel
from model import check

HERE = pathlib.Path(__file__).parent

# ---- Config ---------------------------------------------------------------------------------
NULL = type(None)
TYPES = {  # of the keys whose default does not tell; the others keep the type of their default
    (int, NULL): "model.d_head model.vocab_size model.max_len train.eval_every "
                 "train.eval_sequences parallel.check_replicas_every speed.threads "
                 "checkpoint.every checkpoint.keep checkpoint.keep_every log.sample "
                 "log.fingerprint_every",
    (float, NULL): "model.logit_softcap optim.grad_clip",
    (str, NULL): "init.from parallel.reduce_dtype checkpoint.dir log.wandb",
    (str, dict, NULL): "data.path",
    (dict, NULL): "model.rope_scaling", (list, NULL): "log.profile parallel.stages",
    (int, list, NULL): "model.window",
    (int, str): "parallel.dp parallel.fsdp speed.recompute", (bool, str): "speed.compile",
}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
WHY_NOT = dict.fromkeys(  # keys that people look for, and what to do instead
    ("attn_dropout", "attention_dropout", "attn_pdrop"),
    "fused kernels and other layouts could not repeat its masks: use model.dropout")
WHY_NOT |= dict.fromkeys(
    ("accumulation", "gradient_accumulation_steps"),
    "it follows from train.global_batch, train.microbatch and the data ranks")


def coerce(key, value, default):
    """`value` in the type of `default`, or a ValueError. PyYAML reads 3e-4 as a string."""
    kinds = next((kinds for kinds, keys in TYPES.items() if key in keys.split()), (type(default),))
    for kind in kinds:
        if type(value) is kind:
            return value
        if kind in (int, float) and type(value) in (int, float, str):
            with contextlib.suppress(ValueError, OverflowError):
                if kind(float(value)) == float(value):
                    return kind(float(value))
    shown, such = ("null" if v is None else repr(v) for v in (value, default))
    names = " or ".join("null" if kind is NULL else kind.__name__ for kind in kinds)
    raise ValueError(f"{key} = {shown}: must be of type {names}, such as {such}")


def flat(config):
    return {f"{section}.{key}": v for section, keys in config.items() for key, v in keys.items()}


def merge(config, override, where):
    """Put the sections of `override` into config. Unknown keys are errors."""
    known = flat(config)
    for section, keys in override.items():
        check(section in config and isinstance(keys, dict), f"{where}: section", section,
              f"must be one of {', '.join(config)}, each with keys")
        for key, value in keys.items():
            name = f"{section}.{key}"
            if name not in known:
                near = (difflib.get_close_matches(name, known, 1)
                        or [other for other in known if other.endswith(f".{key}")])
                raise ValueError(f"{where}: unknown key {name}: " + (
                    WHY_NOT[key] if key in WHY_NOT else f"did you mean {near[0]}?" if near
                    else f"{section} has {', '.join(config[section])}"))
            config[section][key] = coerce(name, value, known[name])


def parse(text, where):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ValueError(f"{where}: {' '.join(str(e).split())}") from None


def load_config(argv):
    """config.yaml, then each argument in order: a YAML file, or section.key=value."""
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    for arg in argv:
        name, equals, text = arg.partition("=")
        if equals:
            section, _, key = name.partition(".")
            check(key != "", name, text, "overrides are written section.key=value")
            merge(config, {section: {key: parse(text, name)}}, "command line")
        else:
            path = pathlib.Path(arg)
            check(path.suffix in (".yaml", ".yml"), "argument", arg,
                  "must be a .yaml file or section.key=value")
            check(path.exists(), "config", arg, "no such file")
            override = parse(path.read_text(), arg) or {}
            check(isinstance(override, dict), "config", arg, "must have sections with keys")
            merge(config, override, arg)
    return config


def check_config(config, world):
    """Every rule that a config must keep, before anything is allocated. Returns the axis sizes."""
    v = flat(config)
    choices = {
        "optim.schedule": [*SCHEDULES], "speed.dtype": ["auto", *DTYPES],
        "speed.compile": [True, False, "auto"], "parallel.zero": [0, 1, 2, 3],
        "parallel.offload": ["none", "optimizer"], "parallel.schedule": [*parallel.SCHEDULES],
        "parallel.zero_pp": ["keep", "regather"], "parallel.cp_mode": ["ring", "ulysses"],
        "parallel.reduce_dtype": [None, "float32", "bfloat16"],
        "speed.kernels": ["auto", "torch", "triton"],
        "speed.matmul": ["highest", "high", "medium"],
    }
    tests = [  # keys, what a value passes unless it is null, the same in words
        ("parallel.ep", lambda n: n == 1, "only 1 is built so far"),
        ("parallel.dp parallel.fsdp", lambda n: n == "auto" or (isinstance(n, int) and n >= 1),
         "must be at least 1, or auto"),
        ("parallel.pp parallel.cp parallel.tp parallel.chunks parallel.check_replicas_every "
         "parallel.timeout train.steps train.global_batch train.microbatch train.eval_every "
         "train.eval_sequences train.max_bad_steps data.seq_len speed.loss_chunk speed.pad_vocab "
         "speed.threads checkpoint.every checkpoint.keep checkpoint.keep_every log.every "
         "log.fingerprint_every", lambda n: n >= 1, "must be at least 1"),
        ("parallel.prefetch optim.warmup", lambda n: n >= 0, "must be at least 0"),
        ("optim.decay", lambda x: 0 <= x <= 1, "must be a fraction, 0 to 1"),
        ("optim.beta1 optim.beta2", lambda x: 0 <= x < 1, "must be in [0, 1)"),
        ("optim.grad_clip", lambda x: x > 0, "must be above 0, or null"),
        ("speed.recompute", lambda n: n in ("none", "selective", "full")
         or (isinstance(n, int) and n >= 1),
         "must be none, selective, full, or n >= 1 for every n-th layer"),
        ("log.profile", lambda steps: len(steps) == 2 and 0 < steps[0] <= steps[1],
         "must be [first, last], two steps counted from 1"),
        ("model.max_len", lambda n: n >= v["data.seq_len"],
         f"must hold data.seq_len = {v['data.seq_len']}"),
    ]
    for key, legal in choices.items():
        check(v[key] in legal, key, v[key], f"must be one of {json.dumps(legal)}")
    for keys, passes, words in tests:
        for key in keys.split():
            check(v[key] is None or passes(v[key]), key, v[key], words)
    check(v["speed.recompute"] != "selective" or v["speed.compile"] is not True, "speed.recompute",
          "selective", "a compiled layer chooses by itself what to keep: use none, or "
          "speed.compile=false")
    check(v["speed.kernels"] != "triton" or kernels.triton is not None, "speed.kernels", "triton",
          "needs the package triton and a torch that is built for a GPU: use auto")
    sizes = parallel.layout_of(world, **{axis: v[f"parallel.{axis}"] for axis in parallel.AXES})
    check_tp(config, sizes["tp"])
    check_cp(config, sizes["cp"], sizes["tp"])
    check_pp(config["parallel"], config["model"]["n_layer"])
    checkpoint_root(config)  # raises where a URL is of no known kind
    if v["train.deterministic"]:
        check_deterministic(v, sizes["dp"] * sizes["fsdp"])
    ranks, batch = sizes["dp"] * sizes["fsdp"], v["train.global_batch"]
    check(batch % ranks == 0, "train.global_batch", batch,
          f"the {ranks} data ranks must divide it: {-(-batch // ranks) * ranks}, say")
    return sizes


def check_tp(config, tp):
    """What a split of the layers over tp ranks asks of the model."""
    m = config["model"]
    for key in ("n_head", "d_ff"):
        check(m[key] % tp == 0, f"model.{key}", m[key],
              f"parallel.tp = {tp} must divide it: {-(-m[key] // tp) * tp}, say")
    kv = m["n_kv_head"]
    legal = [n for n in range(1, tp + 1) if kv % n == 0 or n % kv == 0]
    check(kv % tp == 0 or tp % kv == 0, "model.n_kv_head", kv,
          f"parallel.tp = {tp} must divide it or be divided by it: parallel.tp={legal[-1]}, say")


def check_cp(config, cp, tp):
    """What a split of the sequence over cp ranks, and of their parts over tp ranks, asks."""
    m, seq_len, mode = config["model"], config["data"]["seq_len"], config["parallel"]["cp_mode"]
    parts = math.lcm(parallel.chunks_of(cp, 0, mode)[1], cp * tp)
    check(seq_len % parts == 0, "data.seq_len", seq_len,
          f"parallel.cp = {cp} ({mode}) and parallel.tp = {tp} split it: {parts} must "
          f"divide it: {-(-seq_len // parts) * parts}, say")
    if mode == "ulysses":
        heads, kv = m["n_head"] // tp, max(m["n_kv_head"] // tp, 1)
        check(heads % cp == 0, "model.n_head", m["n_head"],
              f"ulysses spreads the {heads} of a tp rank over parallel.cp = {cp}: "
              f"{-(-heads // cp) * cp * tp}, say, or parallel.cp_mode=ring")
        check(kv % cp == 0 or cp % kv == 0, "model.n_kv_head", m["n_kv_head"],
              f"parallel.cp = {cp} must divide the {kv} of a tp rank or be divided by them, for "
              "ulysses: parallel.cp_mode=ring, say")


def check_pp(p, n_layer):
    """What a split of the depth asks of the schedule and the model."""
    stages, given = p["pp"] * p["chunks"], p["stages"]
    parallel.SCHEDULES[p["schedule"]](p["pp"], 1, p["chunks"])  # raises where chunks do not fit it
    check(stages <= n_layer, "parallel.pp x parallel.chunks", stages,
          f"each stage has at least one of model.n_layer = {n_layer} layers")
    check(given is None or len(given) == stages and all(type(n) is int and n >= 1 for n in given)
          and sum(given) == n_layer,
          "parallel.stages", given,
          f"must be {stages} numbers, at least 1 each, {n_layer} together, or null")


def check_deterministic(v, ranks):
    """What sums of the same bits on every layout ask for."""
    for key, legal in (("parallel.tp", [1]), ("parallel.cp", [1]),
                       ("parallel.reduce_dtype", [None]),
                       ("speed.dtype", ["auto", "float32", "bfloat16", "float64"])):
        check(v[key] in legal, key, v[key],
              f"train.deterministic needs {' or '.join(map(str, legal))}")
    batch, rows = v["train.global_batch"], v["train.microbatch"]
    check(ranks & (ranks - 1) == 0, "parallel.dp x parallel.fsdp", ranks,
          "train.deterministic needs a power of two")
    n = batch // (rows * ranks)
    check(n * rows * ranks == batch and n & (n - 1) == 0, "train.global_batch", batch,
          f"train.deterministic needs train.microbatch = {rows} x {ranks} data ranks x a power of "
          f"two: {rows * ranks}, say")


# ---- Learning rate --------------------------------------------------------------------------
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


# ---- Build: the order of application --------------------------------------------------------
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
    saver: checkpoint.Saver
    step: int = 0
    samples: int = 0  # since the run began: with the seed, the data position
    origin: str = ""  # what a new run's weights were read from


def open_data(config, mesh):
    """The training sources with their weights, and the validation split of the first that has
    one. Rank 0 makes the default token files if they are wanted and missing."""
    path = config["data"]["path"]
    if path is None:
        path = HERE / "tokens" / "stdlib"
        with checkpoint.together(functools.partial(parallel.agree, mesh)):
            if mesh.rank == 0 and not data.shards(path, "train"):
                data.prepare_default(path)
    folders = path if isinstance(path, dict) else {str(path): 1.0}
    sources = [data.Tokens(folder, "train") for folder in folders]  # Loader sees that they agree
    held_out = (data.Tokens(folder, "val") for folder in folders if data.shards(folder, "val"))
    return sources, list(folders.values()), next(held_out, None)


def build(config, mesh, blank=None):
    """Data, model, weights, optimizer state, in the order in which each needs the one before.
    `blank`: data.Blank of a dry run, which reads no data, and whose weights have no values."""
    d, t, s, p = (config[section] for section in ("data", "train", "speed", "parallel"))
    sources, weights, val = ([blank], [1.0], None) if blank else open_data(config, mesh)
    cfg = resolve_model(config, sources[0])
    on_gpu = mesh.device.type == "cuda"
    s["dtype"] = ("bfloat16" if on_gpu else "float32") if s["dtype"] == "auto" else s["dtype"]
    selective = s["recompute"] == "selective"
    s["compile"] = on_gpu and not selective if s["compile"] == "auto" else s["compile"]
    dtype = DTYPES[s["dtype"]]
    loader = data.Loader(  # wrong input ends here, before any weight
        sources, weights, d["seq_len"], t["seed"], t["global_batch"], t["microbatch"],
        mesh.coord["data"], mesh.size["data"], d["mask_documents"], pin=on_gpu)
    model, blocks = model_py.build(
        cfg, mesh, dtype, s["pad_vocab"], s["loss_chunk"], s["keep_gathered"],
        p["stages"] or model_py.cut(cfg, p["pp"] * p["chunks"], d["seq_len"])[0], p["cp_mode"],
        s["kernels"], zero=p["zero"], prefetch=p["prefetch"],
        reduce_dtype=DTYPES.get(p["reduce_dtype"]), offload=p["offload"] == "optimizer",
        hold=p["pp"] > 1 and p["zero_pp"] == "keep", deterministic=t["deterministic"])
    if not blank:
        model_py.init_weights(blocks, cfg, t["seed"])
    n = {"none": 0, "selective": 0, "full": 1}.get(s["recompute"], s["recompute"])
    keep = [name[:7] != "layers." or not n or int(name[7:]) % n != 0 for name in model.names]
    scalar = functools.partial(torch.tensor, device=mesh.device)
    scale = scalar(config["optim"]["loss_scale"] if dtype == torch.float16 else 1.0,
                   dtype=blocks.master_dtype)
    fns = model.functions(s["compile"], selective, p["schedule"] == "zero-bubble")
    return Run(config, mesh, model, blocks, fns, keep, loader, val, sources[0].tokenizer_path,
               scale, scalar(parallel.key64("dropout", t["seed"])), scalar(0), scalar(0),
               checkpoint.Saver(mesh.world))


def resolve_model(config, tokens):
    """ModelConfig, with what is left to the data filled in."""
    m = config["model"]
    m["vocab_size"] = m["vocab_size"] or tokens.vocab_size
    m["max_len"] = m["max_len"] or config["data"]["seq_len"]
    check(m["vocab_size"] >= tokens.vocab_size, "model.vocab_size", m["vocab_size"],
          f"the token files hold ids up to {tokens.vocab_size - 1}")
    return model_py.ModelConfig(**m)


# ---- Step -----------------------------------------------------------------------------------
def to_device(run, batch, scale=None, drop_key=None):
    """A microbatch of the loader on the device, completed for the model."""
    put = lambda x: x if x is None else x.to(run.mesh.device, non_blocking=True)  # noqa: E731
    pos = batch.pos if run.config["data"]["mask_documents"] else None
    return run.model.micro(put(batch.tokens), put(batch.targets), put(pos), put(batch.lo),
                           batch.seen, scale, drop_key, put(batch.sample))


def next_batch(run, stop):
    """The next step's microbatches, and on its way through the control group, of the global batch
    (each data rank counted once): the number of target tokens, whether any rank wants to stop, the
    pairs of a query and a key that it sees, and how far the saves of all ranks are."""
    samples, batches = run.loader.next()
    mine = run.mesh.coord["pp"] == run.mesh.coord["cp"] == run.mesh.coord["tp"] == 0
    count = sum(b.n_valid for b in batches) if mine else 0
    pairs = sum(model_py.keys_seen(run.model.cfg, b.pos) for b in batches) if mine else 0
    return samples, batches, parallel.sum_integers(run.mesh, count, int(stop), pairs,
                                                   *run.saver.counts)


def train_step(run, batches, count):
    """One optimizer step on `batches`, whose global batch has `count` target tokens. Returns
    device scalars [loss, gradient norm, 1 if the step was skipped, such steps in a row]."""
    optim, blocks, mesh = run.config["optim"], run.blocks, run.mesh
    drop_key = parallel.mix64(run.drop_key + run.step)
    scale = run.scale / max(count, 1)
    micros = [to_device(run, b, scale, drop_key) for b in batches]
    blocks.begin()
    losses = schedule(run, micros, training=True)
    if run.config["train"]["deterministic"]:
        loss = sum_losses(run, losses)
    else:
        loss = parallel.all_reduce(mesh, losses.sum(), "loss")
    loss = loss / max(count, 1)
    norm, found_inf = clip(run, optim["grad_clip"])
    blocks.adamw(lr_at(run.step, optim, run.config["train"]["steps"]), optim["beta1"],
                 optim["beta2"], optim["eps"], optim["weight_decay"], found_inf)
    if blocks.dtype == torch.float16:
        rescale(run, found_inf)
    run.bad.copy_((run.bad + 1) * found_inf.long())
    run.step += 1
    run.samples += run.config["train"]["global_batch"]
    return torch.stack([loss, norm, found_inf.to(loss.dtype), run.bad.to(loss.dtype)])


def sum_losses(run, losses):
    """The sum of the losses [m] of all ranks' microbatches, in the order of gradients' trees."""
    leaves = parallel.all_gather(run.mesh, losses, "data", "losses")  # [n m]
    leaves = leaves.view(-1, len(losses)).t().flatten()
    return parallel.all_reduce(run.mesh, parallel.add_pairs(leaves), "pp")  # others have zeros


def schedule(run, micros, training):
    """Forward, or forward and backward, of all microbatches in the order of the config's schedule.
    Returns the loss of each, [m], on the ranks of the last stage (elsewhere zeros)."""
    p = run.config["parallel"]
    program = parallel.program(p["pp"], run.mesh.coord["pp"], p["schedule"], len(micros),
                               p["chunks"], training)
    losses = parallel.run(program, run.fns, run.blocks, micros, run.keep, run.model.chunks,
                          run.model.empty)
    return torch.stack(losses) if losses else torch.zeros(
        len(micros), dtype=run.blocks.master_dtype, device=run.mesh.device)


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
    """(loss per token that counts, bits per byte at the tokens a byte of the whole split) on the
    held-out split, the same on every layout."""
    d, t, mesh = run.config["data"], run.config["train"], run.mesh
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    batches = data.eval_batches(run.val, d["seq_len"], t["eval_sequences"], t["microbatch"],
                                mesh.coord["data"], mesh.size["data"], d["mask_documents"])
    while micros := [to_device(run, b) for b in itertools.islice(batches, 4 * mesh.size["pp"])]:
        total[0] += schedule(run, micros, training=False).sum()
        if run.model.chunks[-1].last:
            total[1] += sum((micro.targets != data.IGNORE).sum() for micro in micros)
    total = parallel.all_reduce(mesh, total, "loss").tolist()
    loss = total[0] / max(total[1], 1)
    return loss, loss / math.log(2) * run.val.n_tokens / run.val.n_bytes


# ---- Checkpoints ----------------------------------------------------------------------------
def checkpoint_root(config):
    return checkpoint.place(config["checkpoint"]["dir"] or f"{config['run']['dir']}/checkpoints")


def save(run, beside=False):
    """Write a checkpoint of the current step; each data rank writes its share of every tensor.
    `beside`: return when that is copied, a thread writes it while training goes on."""
    mesh, saver, c = run.mesh, run.saver, run.config["checkpoint"]
    root = checkpoint_root(run.config)
    if saver.save:
        clock, before = time.perf_counter(), saver.save.step
        drain(run)
        if (waited := time.perf_counter() - clock) >= 0.1:
            say(run, f"checkpoint of step {run.step} waited {waited:.1f} s for that of {before}")
    if saver.done == run.step:
        return root
    meta = {"step": run.step, "samples": run.samples, "config": run.config,
            "tokenizer": run.tokenizer, "eot": run.loader.sources[0].eot,
            "loss_scale": run.scale.item(), "good": run.good.item(), "bad": run.bad.item(),
            "optimizer_step": run.blocks.steps[0][0].item(), "threads": torch.get_num_threads()}
    pieces, who = model_py.pieces(run.blocks, shared=True), (mesh.rank, mesh.world)
    kept = c["keep"], c["keep_every"]
    if beside:
        saver.start(checkpoint.Save(root, run.step, saver.stage(pieces), meta, *who, *kept))
    else:
        checkpoint.save(root, run.step, pieces, meta, *who,
                        functools.partial(parallel.agree, mesh), *kept)
    return root


def settle(run, counts):
    """Go on with the save under way. One that failed on any rank is given up on all."""
    step = run.saver.save and run.saver.save.step
    try:
        run.saver.settle(*counts, functools.partial(parallel.agree, run.mesh))
    except RuntimeError as e:
        if parallel.lost_peer(e):
            raise
        say(run, f"warning: no checkpoint of step {step}, training goes on: {e}")


def drain(run):
    """Wait for the save under way on all ranks: now and then they see whether all are there."""
    while run.saver.save:
        run.saver.thread.join(0.05)
        settle(run, parallel.sum_integers(run.mesh, *run.saver.counts).wait())


def resume(run):
    """Load the newest good checkpoint of run.dir, if there is one. Rank 0 looks, all ranks load;
    what cannot be read whole is passed over with a warning, and the one before is tried."""
    root, mesh = checkpoint_root(run.config), run.mesh
    paths, error = [], None
    with checkpoint.together(functools.partial(parallel.agree, mesh)):
        if mesh.rank == 0 and checkpoint.latest(root, lambda line: say(run, f"warning: {line}")):
            paths = [path for _, path in reversed(checkpoint.checkpoints(root))]
    for path in parallel.tell(mesh, paths):
        meta, error = checkpoint.read_meta(path), None
        check_same_model(path, meta["config"]["model"], run.config["model"])
        check_same_sums(path, meta, run.config["train"])
        try:
            agreed(mesh, checkpoint.load, path, model_py.pieces(run.blocks))
        except ValueError as e:
            error = e
            say(run, f"warning: passed over: {e}")
            continue
        restore(run, meta)
        say(run, f"resumed {path} at step {run.step}")
        return True
    if error:
        raise ValueError(f"{root}: none there can be read, move it away to start afresh: {error}")
    return False


def check_same_sums(path, meta, t):
    """train.deterministic: the bits hang on the shape of a microbatch and the number of threads."""
    for key, theirs, ours in (
            ("train.microbatch", meta["config"]["train"]["microbatch"], t["microbatch"]),
            ("speed.threads", meta.get("threads"), torch.get_num_threads())):
        check(not t["deterministic"] or theirs == ours, key, ours,
              f"train.deterministic goes on from {path} only with its {theirs}")


def agreed(mesh, fn, *args):
    """fn(*args) on every rank. What cannot be read or does not fit on one is an error on all."""
    out = error = None
    try:
        out = fn(*args)
    except (ValueError, OSError) as e:
        error = e
    try:
        parallel.agree(mesh, error)
    except RuntimeError as e:
        if parallel.lost_peer(e):
            raise
        raise ValueError(str(e)) from error
    return out


def begin(run):
    """A run without a checkpoint: weights from init.from, if it names any. Rank 0 looks, all ranks
    load. Moments, step and data position stay those of a new run."""
    source, mesh = run.config["init"]["from"], run.mesh
    if source is not None:
        path = agreed(mesh, lambda: checkpoint.find(source) if mesh.rank == 0 else None)
        path = parallel.tell(mesh, path)
        run.origin = f"{path} (step {agreed(mesh, take_weights, run, path)})"
        run.blocks.refresh()


def take_weights(run, path):
    """The parameters of a checkpoint of the same model and tokenizer; its step."""
    meta, ours = checkpoint.read_meta(path), run.config["model"]
    check_same_model(path, meta["config"]["model"], ours, "init.from, or these keys",
                     ("dropout", "z_loss", "init_std", "depth_init"))
    theirs, mine = (file.read_bytes() if file.is_file() else file  # another file may be the same
                    for file in map(pathlib.Path, (str(meta["tokenizer"]), run.tokenizer)))
    check(theirs == mine, "init.from", str(path),
          f"its tokenizer is {meta['tokenizer']}, that of the data {run.tokenizer}")
    checkpoint.load(path, model_py.pieces(run.blocks, kinds=("param",)))
    return meta["step"]


def check_same_model(path, theirs, ours, remedy="run.dir", free=()):
    """That the models agree in all but the keys `free` and the length of rotary positions."""
    free = {*free, *(["max_len"] if ours["positions"] == "rotary" else [])}
    theirs, ours = (m | {"d_head": m["d_head"] or m["d_model"] // m["n_head"]}
                    for m in (theirs, ours))
    differ = [f"{k} (checkpoint {theirs.get(k)!r}, config {ours[k]!r})"
              for k in ours if theirs.get(k) != ours[k] and k not in free]
    if differ:
        raise ValueError(f"{path} is of another model: model.{', model.'.join(differ)}; "
                         f"choose another {remedy}")


def restore(run, meta):
    """What is not a tensor of the model or the optimizer."""
    run.blocks.refresh()
    run.step, run.samples = meta["step"], meta["samples"]
    for counter in itertools.chain(*run.blocks.steps):
        counter.fill_(meta["optimizer_step"])
    if run.blocks.dtype == torch.float16:
        run.scale.fill_(meta["loss_scale"])
    run.good.fill_(meta["good"])
    run.bad.fill_(meta["bad"])


# ---- Log ------------------------------------------------------------------------------------
PEAK = {  # dense bfloat16 / float16 FLOP/s by a part of the device's name, from the data sheets
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "MI300X": 1307e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "4090": 165e12, "A10G": 70e12,
}


def say(run, line):
    if run.mesh.rank == 0:
        print(line, flush=True)


def peak_flops(device, dtype):
    """FLOP/s that this rank could do at best: from the table; of a CPU the best of a few products,
    made while the other ranks make theirs; None where neither is known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device) if dtype.itemsize == 2 else ""
        return next((peak for part, peak in PEAK.items() if part in name), None)
    x, times = torch.ones(512, 512, dtype=dtype), []
    while sum(times) < 0.2:
        clock = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - clock)
    return 2 * len(x) ** 3 / min(times)


def memory_gb(device):
    """Peak memory of this process: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    scale = 1 if sys.platform == "darwin" else 1024  # getrusage speaks bytes there, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e9


def age():
    """Seconds since this process began; where /proc does not tell, those it used."""
    with contextlib.suppress(OSError):
        ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.process_time()


class Log:
    """One line a logged step on the terminal, one record in metrics.jsonl (and TensorBoard, wandb
    when asked for). A step's numbers are copied to the host without waiting and read when the next
    step has been launched."""

    def __init__(self, run):
        self.run, self.waiting, t = run, None, run.config["train"]
        self.every, self.steps = run.config["log"]["every"], t["steps"]
        self.tokens_per_step = t["global_batch"] * run.config["data"]["seq_len"]
        self.peak, self.flops = peak_flops(run.mesh.device, run.blocks.dtype), 0
        self.sinks = self.open() if run.mesh.rank == 0 else []
        self.clock, self.at = time.perf_counter(), run.step
        self.began, self.age = (self.clock, run.step), age()
        self.before, self.times = self.clock, collections.deque(maxlen=100)  # of single steps

    def open(self):
        """The run folder: the resolved config, a copy of the source, metrics.jsonl without what a
        resumed run will write again, and whoever else is told: [f(step, record)]."""
        log, folder = self.run.config["log"], pathlib.Path(self.run.config["run"]["dir"])
        (folder / "source").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(self.run.config, sort_keys=False))
        for file in HERE.glob("*.py"):
            shutil.copy(file, folder / "source")
        metrics = folder / "metrics.jsonl"
        old = metrics.read_text().splitlines(True) if metrics.exists() else []
        kept = [line for line in old if json.loads(line)["step"] <= self.run.step]
        metrics.write_text("".join(kept))
        file = metrics.open("a", buffering=1)  # a line that is written is there
        sinks = [lambda step, row: file.write(json.dumps({"step": step} | row) + "\n")]
        try:
            if log["tensorboard"]:
                from torch.utils.tensorboard import SummaryWriter
                board = SummaryWriter(str(folder))
                sinks.append(lambda step, row: [board.add_scalar(*kv, step) for kv in row.items()])
            if log["wandb"]:
                import wandb
                wandb.init(project=log["wandb"], dir=str(folder), config=self.run.config)
                sinks.append(lambda step, row: wandb.log(row, step=step))
        except ImportError as e:
            raise ValueError(f"log: {e}: pip install {e.name}, or switch it off") from e
        return sinks

    def write(self, step, row):
        """One record: numbers in full precision."""
        for sink in self.sinks:
            sink(step, row)

    def fingerprint(self):
        """Into metrics.jsonl a fingerprint of every parameter and moment: `checkpoint.py diff`
        finds the first step and tensor where two runs part, whatever their layouts."""
        names = [p.name for p in model_py.whole_model(self.run.model.cfg)]
        row = {"fingerprints": parallel.fingerprints(self.run.blocks, names)}
        for sink in self.sinks[:1]:  # a dashboard has no use for it
            sink(self.run.step, row)

    def push(self, step, metrics, pairs):
        """Start the copy of a step's numbers to the host, tell if it took more than ten times what
        is usual, then deal with the step before."""
        host = metrics.to("cpu", non_blocking=True)
        event = torch.cuda.current_stream().record_event() if metrics.is_cuda else None
        now, usual = time.perf_counter(), statistics.median(self.times or [math.inf])
        seconds = now - self.before
        if len(self.times) >= 10 and seconds > 10 * usual:
            say(self.run, f"step {step}: took {seconds:.2f} s, the median of the {len(self.times)} "
                          f"before it is {usual:.2f} s")
        self.times.append(seconds)
        self.before = now
        self.flush()
        self.waiting = step, host, event, now, pairs

    def flush(self):
        """All ranks see the same numbers, so all end the run at the same step."""
        if self.waiting is None:
            return
        (step, host, event, now, pairs), self.waiting = self.waiting, None
        if event:
            event.synchronize()
        if step == self.began[1] + 1 > 1:
            say(self.run, f"first step after {self.age + now - self.began[0]:.1f} s")
        loss, norm, skipped, bad = host.tolist()
        limit = self.run.config["train"]["max_bad_steps"]
        self.flops += model_py.flops(self.run.model.cfg, self.tokens_per_step, pairs)
        if skipped:
            say(self.run, f"step {step}: gradient norm {norm}, update skipped ({bad:.0f} in a row)")
        if bad >= limit:
            raise RuntimeError(f"{limit} steps in a row without a finite gradient, the last {step}")
        if step % self.every and step != self.steps and step != 1:
            return
        seconds = max(now - self.clock, 1e-9)
        rate = (step - self.at) * self.tokens_per_step / seconds
        left = (self.steps - step) * (now - self.began[0]) / max(step - self.began[1], 1)
        mfu = self.peak and self.flops / seconds / self.run.mesh.world / self.peak
        self.clock, self.at, self.flops = now, step, 0
        lr = lr_at(step - 1, self.run.config["optim"], self.steps)
        memory, width = memory_gb(self.run.mesh.device), len(str(self.steps))
        row = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_second": rate,
               "memory_gb": memory}
        self.write(step, row | {"mfu": mfu} if mfu else row)
        say(self.run, f"step {step:>{width}}/{self.steps}  loss {loss:.4f}  lr {lr:.2e}  "
            f"norm {norm:.3f}  {rate:,.0f} tokens/s{f'  mfu {mfu:.1%}' if mfu else ''}  "
            f"{memory:.2f} GB  {left // 60:.0f}m{left % 60:02.0f}s left")


# ---- Plot -----------------------------------------------------------------------------------
def curves(file):
    """[(step, loss)] of training and of held-out data in a metrics.jsonl, each step once and in
    order; what is not finite is left out."""
    found = {"loss": {}, "val_loss": {}}
    for row in map(json.loads, file.read_text().splitlines()):
        for key in found:
            if math.isfinite(row.get(key, math.nan)):
                found[key][row["step"]] = row[key]
    return [sorted(points.items()) for points in found.values()]


def smooth(points):
    """At most some 600 of the points, each the mean of up to 1/25 of all of them, as many before
    it as after: a straight line stays as it is."""
    n, out = len(points), []
    for i in sorted({*range(0, n, n // 600 + 1), n - 1}):
        k = min(i, n - 1 - i, n // 50)
        out.append((points[i][0], statistics.fmean(loss for _, loss in points[i - k : i + k + 1])))
    return out


def frame(line, dots):
    """place(step, loss) -> (across, up), as fractions of the picture that holds all points; the
    steps and losses at 0, 1/4 .. 1 of it; the name of the axis of steps. That is logarithmic if
    the first tenth of the line makes more than half of its way down."""
    (steps, losses), (first, top) = zip(*line, *dots), line[0]
    early = min(loss for step, loss in line if step <= first + (line[-1][0] - first) / 10)
    log = top - early > (top - min(loss for _, loss in line)) / 2
    scale, back = (math.log, math.exp) if log else (float, float)
    left, width = scale(min(steps)), scale(max(steps)) - scale(min(steps))
    low, height = min(losses), max(losses) - min(losses) or 1.0
    place = lambda step, loss: ((scale(step) - left) / width, (loss - low) / height)  # noqa: E731
    return (place, [round(back(left + width * i / 4)) for i in range(5)],
            [f"{low + height * i / 4:.4g}" for i in range(5)], "steps" + " (log)" * log)


def as_text(line, dots, w=60, h=12):
    """The picture in (w + 1) x (h + 1) characters: the line, and over it the dots."""
    (place, steps, losses, axis), cells = frame(line, dots), [[" "] * (w + 1) for _ in range(h + 1)]
    for (x, y), (x2, y2) in itertools.pairwise(place(*point) for point in line):
        n = math.ceil(max((x2 - x) * w, abs(y2 - y) * h, 1) - 1e-6)  # no more than a cell a step
        for i in range(n + 1):
            cells[round((1 - y - (y2 - y) * i / n) * h)][round((x + (x2 - x) * i / n) * w)] = "."
    for x, y in (place(*point) for point in dots):
        cells[round((1 - y) * h)][round(x * w)] = "o"
    at = dict(zip(range(h, -1, -h // 4), losses))
    rows = [f"{at.get(i, ''):>11} |" + "".join(row).rstrip() for i, row in enumerate(cells)]
    return "\n".join([f"{'loss':>11}   . training, smoothed   o held out", *rows,
                      f"{'':12}+" + f"{'+':->{w // 4}}" * 4,
                      f"{axis:>11}  " + "".join(f"{step:<{w // 4}}" for step in steps).rstrip()])


def as_svg(line, dots):
    """The same picture as an image."""
    place, steps, losses, axis = frame(line, dots)
    at = lambda x, y: (round(60 + 560 * x, 2), round(340 - 310 * y, 2))  # noqa: E731
    path, circles = ([at(*place(*point)) for point in points] for points in (line, dots))
    ticks = [(*at(i / 4, i / 4), step, loss) for i, (step, loss) in enumerate(zip(steps, losses))]
    grid = "".join(f"M60 {y}H620M{x} 30V340" for x, y, *_ in ticks)
    return "\n".join([
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 380" font-family="sans-serif" '
        'font-size="12">', '<rect width="640" height="380" fill="white"/>',
        f'<text x="60" y="18">loss: training (line, smoothed), held out (dots); {axis}</text>',
        f'<path d="{grid}" stroke="#ddd"/>',
        *[f'<text x="{x}" y="358" text-anchor="middle">{step}</text>' for x, _, step, _ in ticks],
        *[f'<text x="54" y="{y}" text-anchor="end">{loss}</text>' for _, y, _, loss in ticks],
        f'<polyline points="{" ".join(f"{x},{y}" for x, y in path)}" fill="none" stroke="#27c"/>',
        *[f'<circle cx="{x}" cy="{y}" r="4" fill="#d52"/>' for x, y in circles], "</svg>\n"])


def plot(run):
    """The losses of the whole run, as metrics.jsonl has them, on the terminal and in loss.svg."""
    if run.mesh.rank:
        return
    folder = pathlib.Path(run.config["run"]["dir"])
    line, dots = curves(folder / "metrics.jsonl")
    if len(line) >= 2:
        say(run, as_text(smooth(line), dots))
        (folder / "loss.svg").write_text(as_svg(smooth(line), dots))


# ---- Loop -----------------------------------------------------------------------------------
def train(run, log, stop):
    """Steps until train.steps, or until any rank is asked to stop. Returns True if stopped."""
    t, c, profile = run.config["train"], run.config["checkpoint"], profiler(run)
    if c["every"] and c["async"]:  # the memory that a save needs, before the first step
        run.saver.stage(model_py.pieces(run.blocks, shared=True))
    run.loader.start(run.samples)
    ahead = next_batch(run, bool(stop))
    while run.step < t["steps"]:
        samples, batches, pending = ahead
        assert samples == run.samples, (samples, run.samples)
        count, wanted, pairs, *counts = pending.wait()
        settle(run, counts)
        if wanted:
            return True
        if run.step + 1 < t["steps"]:
            ahead = next_batch(run, bool(stop))
        log.push(run.step + 1, train_step(run, batches, count), pairs)
        aside = time.perf_counter()
        if profile:
            profile.step()
        if run.step == log.began[1] + 1 and run.mesh.world > 1:
            say(run, "sent by rank 0 in the first step:\n" + parallel.ledger_table(run.mesh))
            if run.mesh.size["cp"] > 1:
                say(run, f"attention in it: the most loaded of {run.mesh.size['cp']} cp ranks had "
                         f"{attention_load(run, batches):.3f} of the mean")
        last = run.step == t["steps"]
        if t["eval_every"] and run.step % t["eval_every"] == 0 and not last:
            report(run, log)
        if (n := run.config["log"]["fingerprint_every"]) and run.step % n == 0:
            log.fingerprint()
        if c["every"] and run.step % c["every"] == 0 and not last:
            log.flush()  # what resumes from here does not write this step's record again
            save(run, beside=c["async"])
        if (n := run.config["parallel"]["check_replicas_every"]) and run.step % n == 0:
            parallel.check_replicas(run.blocks)
        log.before += time.perf_counter() - aside  # no part of the next step
    return False


def attention_load(run, batches):
    """The work of attention of the most loaded cp rank, over the mean: 1 for causal attention,
    more where documents are uneven."""
    mode, work = run.config["parallel"]["cp_mode"], []
    for batch in batches:
        lo = (torch.zeros_like(batch.tokens) if batch.lo is None else batch.lo).numpy()
        work += [parallel.attention_work(lo.shape[1], run.mesh.size["cp"], mode, lo, window)
                 for window in run.model.cfg.windows]
    total = [sum(of_rank) for of_rank in zip(*work)]
    return max(total) * len(total) / sum(total)


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
    """torch.profiler around the steps of log.profile, if there are any."""
    if run.config["log"]["profile"] is None:
        return None
    first, last = run.config["log"]["profile"]
    file = pathlib.Path(run.config["run"]["dir"]) / f"trace-rank{run.mesh.rank}.json"
    steps = torch.profiler.schedule(wait=first - 1, warmup=0, active=last - first + 1, repeat=1)
    trace = torch.profiler.profile(
        schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(str(file)))
    trace.start()
    return trace


def introduce(run, sizes):
    """What is about to be trained, on what, in a few lines."""
    c, mesh, steps = run.config, run.mesh, run.config["train"]["steps"]
    seq_len, batch = c["data"]["seq_len"], c["train"]["global_batch"]
    on_gpu = mesh.device.type == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    how = c["speed"]["dtype"] + (", compiled" if c["speed"]["compile"] else ", not compiled")
    tokens = sum(s.n_tokens for s in run.loader.sources)
    params = model_py.count_params(run.model.cfg)
    say(run, f"model   {params:,} parameters, {how}, {mesh.world} x {where}")
    say(run, f"ranks   dp {sizes['dp']} x fsdp {sizes['fsdp']} = {mesh.size['data']} data ranks"
             + "".join(f", each of {axis} {sizes[axis]}"
                       for axis in ("cp", "tp") if sizes[axis] > 1))
    if sizes["pp"] > 1:
        p, cfg = c["parallel"], run.model.cfg
        layers, load = model_py.cut(cfg, p["pp"] * p["chunks"], seq_len)
        load = "" if p["stages"] else f", the most loaded has {load:.2f} of the mean"
        say(run, f"stages  {p['pp']} x {p['chunks']}, {p['schedule']}: layers "
                 f"{' + '.join(map(str, p['stages'] or layers))}{load}")
    if sizes["tp"] > parallel.ranks_of_node():
        say(run, f"        tp {sizes['tp']} spans nodes of {parallel.ranks_of_node()} ranks: each "
                 "layer's traffic crosses the network")
    say(run, f"data    {tokens:,} tokens ({run.tokenizer}); {batch} x {seq_len} = "
             f"{batch * seq_len:,} a step, {steps * batch * seq_len / tokens:.2f} epochs in all")
    if run.origin:
        say(run, f"weights from {run.origin}")
    say(run, f"run     {c['run']['dir']}")


def finish(run, log, stopped):
    """Evaluate, save, show the losses and some text."""
    log.flush()
    if not stopped:
        report(run, log)
    say(run, f"checkpoint of step {run.step} in {save(run)}")
    plot(run)
    n = run.config["log"]["sample"]
    if n and not stopped:
        tokenizer = data.load_tokenizer(run.tokenizer)
        text = model_py.sample(run.model, run.blocks, tokenizer, run.config["log"]["prompt"], n,
                               top_k=50, seed=run.config["train"]["seed"])
        say(run, "---\n" + text)


# ---- Plan: the dry run ----------------------------------------------------------------------
# A card in nodes of NODE: FLOP/s, bytes of memory, and bytes/s that it sends at best, to its node
# and, through a network card of its own, to others
Hardware = collections.namedtuple("Hardware", "peak memory inside between")
HARDWARE = {  # data sheets of DGX H100, H200, B200 and AMD's MI300X platform: NVLink 4 and 5 and
    # Infinity Fabric, one direction; a network of 400 Gb/s a card
    "h100": Hardware(PEAK["H100"], 80e9, 450e9, 50e9),
    "h200": Hardware(PEAK["H200"], 141e9, 450e9, 50e9),
    "b200": Hardware(PEAK["B200"], 180e9, 900e9, 50e9),
    "mi300x": Hardware(PEAK["MI300X"], 192e9, 448e9, 50e9),
}
NODE, PRODUCTS, LINKS, CALL, ROOM = 8, 0.6, 0.8, 20e-6, 0.92  # what predict assumes
FLASH = {  # operator: its products of queries and keys, which argument is q, which says causal
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (2, 0, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (5, 1, 7),
}


class Meter(TorchDispatchMode):
    """Counts what passes through torch's operators: FLOPs of products, bytes of the storages alive.
    `peak`: their highest sum; `lasting`: what of it was in the storages that `tell` has named.

    A storage is seen when an operator gets or gives it; a weak reference tells its end. That one
    shrinks is not seen: those which are sent or named may do so, and are asked for their size
    whenever the sum, then perhaps too high, passes the peak."""

    def __init__(self):
        from torch.utils.flop_counter import flop_registry  # imports triton, where it is
        super().__init__()
        aten = torch.ops.aten
        self.counted = flop_registry | {aten.addmm_: flop_registry[aten.addmm]}
        self.sizes, self.alive, self.kinds, self.loose, self.lasting = {}, {}, {}, set(), {}
        self.now = self.peak = self.flops = self.attention = 0

    def tell(self, kind, buffers):
        """Name storages that last. What is of the host is not counted."""
        for x in buffers:
            self.kinds.setdefault(x.untyped_storage()._cdata, kind)
            self.see(x, kind != "host")

    def see(self, x, loose):
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if self.kinds.get(key) == "host":
            return
        if key not in self.alive:
            self.alive[key] = weakref.ref(storage, functools.partial(self.end, key))
        if loose:
            self.loose.add(key)
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size

    def end(self, key, _):
        self.now -= self.sizes.pop(key)
        self.loose.discard(key)
        del self.alive[key]

    def weigh(self):
        for key in self.loose:
            size = self.alive[key]().nbytes()
            self.now += size - self.sizes[key]
            self.sizes[key] = size
        if self.now > self.peak:
            self.peak, self.lasting = self.now, {key: self.sizes.get(key, 0) for key in self.kinds}

    def parts(self):
        """The peak by kinds; what has no name are activations."""
        parts = collections.Counter(activations=self.peak - sum(self.lasting.values()))
        for key, size in self.lasting.items():
            parts[self.kinds[key]] += size
        return parts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        out = func(*args, **kwargs)
        if func.namespace == "prim":  # a question
            return out
        for x in tree_leaves((args, out)):
            if isinstance(x, torch.Tensor):
                self.see(x, func.namespace == "c10d")
        if self.now > self.peak:
            self.weigh()
        if packet in FLASH:
            products, at, causal = FLASH[packet]
            (B, H, T, d), keys = args[at].shape, args[at + 1].shape[2]
            done = 2 * products * B * H * d * (T * (T + 1) // 2 if any(args[causal:]) else T * keys)
            self.flops, self.attention = self.flops + done, self.attention + done
        elif packet in self.counted:
            self.flops += self.counted[packet](*args, **kwargs, out_val=out)
        return out


def play(config, sizes, rank, gloo=False):
    """One step of `rank` of a world that is not there: what it held, sent and computed. `gloo`:
    with the traffic of CPUs, to compare with a run on these."""
    config, world = copy.deepcopy(config), math.prod(sizes.values())
    d, t, s = config["data"], config["train"], config["speed"]
    s["compile"], s["dtype"] = False, "bfloat16" if s["dtype"] == "auto" else s["dtype"]
    parallel.pretend(rank, world)
    try:
        mesh = parallel.build_mesh(sizes, "cpu")
        mesh.simulated = not gloo
        with FakeTensorMode() as fake:
            run = build(config, mesh, data.Blank(config["model"]["vocab_size"]))
        b, meter = run.blocks, Meter()
        meter.tell("parameters", b.weight + b.piece)
        meter.tell("gradients", b.full_grad + b.grad)
        meter.tell("host" if b.offload else "optimizer",
                   b.master + b.exp_avg + b.exp_avg_sq + b.host_grad * b.offload)
        run.loader.start(0)
        _, batches, pending = next_batch(run, False)  # counts those of one rank: nobody answers
        pending.wait()
        run.loader.close()
        with fake, meter:
            train_step(run, tree_map_only(torch.Tensor, fake.from_tensor, batches),
                       t["global_batch"] * d["seq_len"])
        return {"rank": rank, "coord": mesh.coord, "parameters": sum(p.numel for p in b.params),
                "parts": meter.parts(), "peak": meter.peak, "ledger": mesh.ledger,
                "flops": meter.flops, "attention": meter.attention, "rounds": len(batches)}
    finally:
        parallel.stop()


def distinct(config, sizes, cfg):
    """One of all ranks that do the same. Of stages with the same layers those before which no other
    has as much to keep; of cp the first and the last (all, with windows). Of tp the first: where
    the vocabulary ends the last has less to do."""
    p, t, every = config["parallel"], config["train"], config["speed"]["recompute"]
    n, dp, fsdp, cp, tp = sizes.values()
    rounds = -(-t["global_batch"] // (dp * fsdp * t["microbatch"]))
    schedule = parallel.SCHEDULES[p["schedule"]](n, rounds, p["chunks"])
    kept, layers = parallel.simulate(schedule, p["chunks"]), iter(range(cfg.n_layer))
    chunks = [[(cfg.windows[i], isinstance(every, int) and i % every == 0)
               for i in itertools.islice(layers, k)] for k in p["stages"]]

    def like(pp, other):
        return (chunks[pp::n] == chunks[other::n] and 0 < other < pp < n - 1
                and kept.live[pp] <= kept.live[other] and kept.due[pp] <= kept.due[other])

    stages = [pp for pp in range(n) if not any(like(pp, other) for other in range(pp))]
    of_cp = {0, cp - 1} if cfg.windows == [None] * cfg.n_layer else range(cp)
    return [(pp * dp * fsdp * cp + c) * tp for pp in stages for c in sorted(of_cp)]


def rate(hardware, sizes, axis, op):
    """Bytes/s of a rank in an operation over `axis`. A group with k of its ranks in each node has
    k network cards there, a ring or a pair of ranks one."""
    axes = parallel.AXES if axis == "world" else parallel.UNIONS.get(axis, (axis,))
    node = itertools.islice(itertools.product(*map(range, sizes.values())), NODE)  # the first
    near = sum(all(at == 0 or a in axes for a, at in zip(sizes, rank)) for rank in node)
    inside = near == math.prod(sizes[a] for a in axes)
    cards = 1 if op.startswith(("shift", "send")) else near
    return hardware.inside if inside else min(hardware.inside, cards * hardware.between)


def predict(config, sizes, hardware, got):
    """Seconds of a step from what a rank computed and sent, by parts. Assumed: products run at
    PRODUCTS of the card's peak, which pays for all between them; links at LINKS of theirs and CALL
    seconds a call; traffic of sharded weights and gradients hides behind the compute of its
    microbatches (of one, if it is once a step), rings behind attention; stages wait for sends as
    the simulator says; control integers cost nothing; all else is exposed."""
    p, m, speed = config["parallel"], got["rounds"], hardware.peak * PRODUCTS
    compute, by_axis, by_kind = got["flops"] / speed, collections.Counter(), collections.Counter()
    for (axis, op), (calls, nbytes) in got["ledger"].items():
        seconds = calls * CALL + nbytes / rate(hardware, sizes, axis, op) / LINKS
        by_axis[axis] += seconds
        by_kind["blocks" if axis in ("shard", "dp", "grad") else op.split()[0]] += seconds
    sends = by_kind["send"] / max(got["ledger"].get(("pp", "send"), [0])[0], 1)
    once = p["zero"] < 2 or p["pp"] > 1 and p["zero_pp"] == "keep"
    exposed = (max(0.0, by_kind["blocks"] - compute / (m if once else 1))
               + max(0.0, by_kind["shift"] - got["attention"] / speed)
               + by_kind.total() - by_kind["blocks"] - by_kind["shift"] - by_kind["send"]
               - by_axis["world"])
    actions = parallel.SCHEDULES[p["schedule"]](p["pp"], m, p["chunks"])
    unit = (compute + exposed) / (3 * m * p["chunks"])
    idle, waits = (parallel.simulate(actions, p["chunks"], transfer=t).bubble
                   for t in (0, sends / unit))
    return {"compute": compute, "by_axis": by_axis, "exposed": exposed, "idle": idle,
            "bubble": (compute + exposed) * waits / (1 - waits),
            "step": (compute + exposed) / (1 - waits)}


def show(got, seconds, hardware):
    """A rank of a plan, in a few lines."""
    at = ", ".join(f"{axis} {got['coord'][axis]}" for axis in parallel.AXES)
    parts = " + ".join(f"{kind} {got['parts'][kind] / 1e9:.3g}"
                       for kind in ("parameters", "gradients", "optimizer", "activations"))
    share, by_axis, sent = got["peak"] / hardware.memory, seconds["by_axis"], {}
    for (axis, _), row in sorted(got["ledger"].items()):
        sent[axis] = [a + b for a, b in zip(sent.get(axis, (0, 0)), row)]
    print(f"rank {got['rank']} ({at}): {got['parameters']:,} parameters\n"
          f"  memory  {parts} = {got['peak'] / 1e9:.3g} GB at the peak, {share:.0%} of the card's: "
          + ("fits" if share <= ROOM else "does not fit"))
    for axis, (calls, nbytes) in sent.items():
        print(f"  {axis:<6} {calls:>8,} calls {nbytes:>19,} bytes, {by_axis[axis]:.3g} s")
    print(f"  step    {got['flops'] / 1e12:,.4g} TFLOP in {seconds['compute']:.3g} s + exposed "
          f"{seconds['exposed']:.3g} s + bubble {seconds['bubble']:.3g} s (the schedule's own: "
          f"{seconds['idle']:.1%}) = {seconds['step']:.3g} s")


def plan_words(words):
    """What follows --plan: the numbers of ranks, the ranks to play, the hardware."""
    given = {"world": None, "rank": "all", "hardware": "h100"}
    for word in words:
        key, _, text = word.partition("=")
        check(key in given, "--plan", word, f"must be one of {'=, '.join(given)}=")
        given[key] = text
    world, rank, hardware = given.values()
    check((world or "").isdecimal() and int(world) > 0, "--plan world", world,
          "must be the number of ranks, at least 1")
    check(rank == "all" or rank.isdecimal() and int(rank) < int(world), "--plan rank", rank,
          f"must be all, or from 0 to {int(world) - 1}")
    check(hardware in HARDWARE, "--plan hardware", hardware,
          f"must be one of {', '.join(HARDWARE)}")
    return int(world), rank, hardware


def plan(argv, words):
    """A step of one of all ranks that do the same, without a GPU, a token or another process."""
    config, (world, rank, name) = load_config(argv), plan_words(words)
    sizes, hardware = check_config(config, world), HARDWARE[name]
    m, p, seq_len = config["model"], config["parallel"], config["data"]["seq_len"]
    if m["vocab_size"] is None:
        path = config["data"]["path"] or HERE / "tokens" / "stdlib"
        path = next(iter(path)) if isinstance(path, dict) else path
        check(any(pathlib.Path(path).glob("train-*.tokens")), "model.vocab_size", None,
              f"a plan needs the number, as there are no token files in {path}")
        m["vocab_size"] = data.Tokens(path).vocab_size
    cfg = model_py.ModelConfig(**m | {"max_len": m["max_len"] or seq_len})
    p["stages"] = p["stages"] or model_py.cut(cfg, p["pp"] * p["chunks"], seq_len)[0]
    shape = " x ".join(f"{axis} {n}" for axis, n in sizes.items())
    print(f"plan of {world:,} ranks, {shape}, on {name}: {hardware.peak / 1e12:,.0f} TFLOP/s and "
          f"{hardware.memory / 1e9:.0f} GB a card")
    steps = []
    for r in distinct(config, sizes, cfg) if rank == "all" else [int(rank)]:
        got = play(config, sizes, r)
        steps.append(predict(config, sizes, hardware, got))
        show(got, steps[-1], hardware)
    slowest, tokens = max(s["step"] for s in steps), config["train"]["global_batch"] * seq_len
    useful = model_py.flops_per_token(cfg, seq_len) * tokens / world / hardware.peak
    print(f"predicted: {slowest:.3g} s a step, {tokens / slowest:,.0f} tokens/s, mfu "
          f"{useful / slowest:.1%}\nassumed: products at {PRODUCTS:.0%} of the peak, links at "
          f"{LINKS:.0%} of {hardware.inside / 1e9:.0f} GB/s inside a node of {NODE} and "
          f"{hardware.between / 1e9:.0f} GB/s a card\nbetween nodes, {CALL * 1e6:.0f} us a call; "
          f"{1 - ROOM:.0%} of memory left to others than torch; one document a sequence; "
          "not compiled.\nStages with the same layers are played once, the one with most to keep. "
          "What hides behind what: predict in train.py")
    return 0


def main(argv):
    if "--plan" in argv:
        at = argv.index("--plan")
        return plan(argv[:at], argv[at + 1 :])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world, local_rank = parallel.start(device)
    error = None
    try:
        config = load_config(argv)
        sizes = check_config(config, world)
    except ValueError as e:
        error = e
    # there is no mesh as yet: its control group is the group of all ranks
    everyone, bad = parallel.Mesh({}, {}, {}, torch.device("cpu"), rank, world), error is not None
    any_bad, first_bad = parallel.sum_integers(everyone, bad, bad and rank == 0).wait()
    if bad and (rank == 0 or not first_bad):
        raise error
    if any_bad:
        return 2  # another rank tells the mistake (most often every rank has found it)
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    torch.set_float32_matmul_precision(config["speed"]["matmul"])
    exact = config["train"]["deterministic"]
    if torch.are_deterministic_algorithms_enabled() != exact:  # the call imports the compiler
        torch.use_deterministic_algorithms(exact)
    if config["speed"]["threads"]:
        torch.set_num_threads(config["speed"]["threads"])
    run = build(config, parallel.build_mesh(sizes, device, config["parallel"]["timeout"]))
    resumed = resume(run) or begin(run)
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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no farewell to ranks that may be gone: gloo's threads can abort in it
    parallel.stop()
    sys.exit(code)
