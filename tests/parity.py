"""The parity harness: one case on one layout, and the one function that says what equal means.

A case is a dict of dotted config keys (and `ignore`, a rule for targets that do not count).
`run_case` trains it for a few steps through train.py's own build and train_step, on this process'
place in the layout, and returns logical (unsharded) tensors."""

import copy
import dataclasses
import functools
import itertools

import torch

import parallel
import train

TINY = {
    "model.n_layer": 2, "model.d_model": 16, "model.n_head": 4, "model.n_kv_head": 2,
    "model.d_ff": 24, "model.vocab_size": 51, "model.init_std": 0.2, "data.seq_len": 12,
    "train.global_batch": 24, "train.microbatch": 6, "train.steps": 3, "train.seed": 5,
    "train.eval_sequences": 7, "optim.lr": 0.003, "optim.warmup": 2, "speed.dtype": "float64",
    "speed.compile": False, "speed.loss_chunk": 25, "speed.pad_vocab": 8,
    # AdamW divides a gradient by its size: where that is near eps, noise in the last digits becomes
    # a step, and an ill-conditioned case (normalised heads of 2 channels) multiplies it in the next
    # steps: to 2e-9 in the third with lr 0.01 and eps 1e-8, to 5e-12 with these.
    "optim.eps": 1e-6,
}


def agree(name, a, b, grad_norm=None):
    """None, or what differs: the one tolerance of the project. Gradients (grad_norm given) agree
    if max|a-b| <= 1e-9 max(max|b|, 1e-4 grad_norm), other values if it is at most
    1e-9 max(1, max|b|)."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    if a.shape != b.shape:
        return f"{name}: shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if a.numel() == 0:
        return None
    off, size = (a - b).abs(), b.abs().max().item()
    bound = 1e-9 * (max(1.0, size) if grad_norm is None else max(size, 1e-4 * grad_norm))
    if off.max().item() <= bound and bool(torch.isfinite(a).all()):
        return None
    at = tuple(int(i) for i in torch.unravel_index(off.nan_to_num(torch.inf).argmax(), off.shape))
    return f"{name}{list(at)}: {a[at].item()!r} and {b[at].item()!r}"


def compare(got, want):
    """The first step, tensor and index at which two results of run_case part, or None."""
    for step in range(len(want["loss"])):
        where = f"step {step + 1}: "
        norm = want["norm"][step]
        notes = [agree(where + "loss", got["loss"][step], want["loss"][step]),
                 agree(where + "norm", got["norm"][step], norm)]
        if set(got["grads"][step]) != set(want["grads"][step]):
            return f"names {set(got['grads'][step]) ^ set(want['grads'][step])}"
        notes += [agree(where + f"grad {n}", got["grads"][step][n], g, norm)
                  for n, g in want["grads"][step].items()]
        for note in notes:
            if note:
                return note
    for n, p in want["params"].items():
        if note := agree(f"after the last step: {n}", got["params"][n], p):
            return note
    return agree("held-out loss", got["val_loss"], want["val_loss"]) if "val_loss" in want else None


@functools.cache
def default_config():
    """config.yaml, read once: PyYAML takes as long for it as some ranks for a step."""
    return train.load_config([])


def config_of(case):
    """The full config of a case, through the loader's own coercion."""
    config = copy.deepcopy(default_config())
    for key, value in (TINY | case).items():
        if "." in key:
            section, _, name = key.partition(".")
            train.merge(config, {section: {name: value}}, "case")
    return config


class Ignoring:
    """A loader whose targets are ignored where `ignore(sample number n, position)` says so."""

    def __init__(self, loader, rule):
        self.loader, self.rule, self.at, self.sources = loader, rule, 0, loader.sources

    def start(self, samples):
        self.at = samples

    def next(self):
        samples, batches = self.at, self.loader.step(self.at)
        self.at += self.loader.global_batch
        out = []
        for b in batches:
            targets = b.targets.clone()
            for row, sample in enumerate(b.sample.tolist()):
                for t in range(targets.shape[1]):
                    if RULES[self.rule](samples + sample, sample, t):
                        targets[row, t] = -100
            out.append(b._replace(targets=targets, n_valid=int((targets != -100).sum())))
        return samples, out

    def close(self):
        self.loader.close()


RULES = {  # (number since the run began, number in the batch, position) -> ignored
    "none": lambda n, i, t: False,
    "uneven": lambda n, i, t: (n * 7 + t * 3) % 5 == 0 or (i == 4 and t > 0),
    "prefix": lambda n, i, t: i < 6,  # some data ranks and microbatches have no valid token at all
    "one": lambda n, i, t: (i, t) != (7, 3),
}


def logical(blocks, buffers):
    """name -> the logical tensor (padding removed), from all ranks' flat shards and tp parts: one
    collective for each, as those of many ranks on two cores take long."""
    out, mesh = {}, dataclasses.replace(blocks.mesh, ledger={})
    if blocks.zero:
        sizes = [len(b) for b in buffers]
        ranks = parallel.all_gather(mesh, torch.cat(buffers), "shard").view(-1, sum(sizes))
        buffers = [part.flatten() for part in ranks.split(sizes, 1)]
    parts = [blocks.view(buffers, p) for p in blocks.params]
    sizes = [x.numel() for x in parts]
    ranks = parallel.all_gather(mesh, torch.cat([x.flatten() for x in parts]), "tp")
    for p, x in zip(blocks.params, ranks.view(-1, sum(sizes)).split(sizes, 1)):
        x = x[0].view(p.shape) if p.cut is None else torch.cat(
            [part.view(p.shape) for part in x], p.cut)
        out[p.name] = x[tuple(slice(0, n) for n in p.full_shape)].clone()
    if mesh.size["pp"] > 1:
        stages = [None] * mesh.size["pp"]
        torch.distributed.all_gather_object(stages, out, group=mesh.group["pp"])
        for name in set(stages[0]) & set(stages[-1]):  # a tied weight: the same on both
            assert torch.equal(stages[0][name], stages[-1][name]), name
        out = {name: x for stage in stages for name, x in stage.items()}
    return out


def mesh_of(sizes):
    """A mesh of these sizes with an empty ledger. Its groups are made once a process: each gloo
    group has threads, and thousands of cases would drown the machine in them."""
    key = str(sizes)
    if key not in MESHES:
        MESHES[key] = parallel.build_mesh(sizes, "cpu")
    return dataclasses.replace(MESHES[key], ledger={})


MESHES = {}


def prepare(case, folder):
    """A Run of the case on this process' world, data in `folder`."""
    config = config_of(case | {"data.path": str(folder)})
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sizes = train.check_config(config, world)
    run = train.build(config, mesh_of(sizes))
    run.loader = Ignoring(run.loader, case.get("ignore", "none"))
    return run


def run_case(case, folder, steps=3, return_init=False):
    """Train `steps` steps; the result is the same on every rank."""
    run = prepare(case, folder)
    init = logical(run.blocks, run.blocks.master) if return_init else None
    out = go(run, steps)
    if return_init:
        out["init"] = init
    parallel.check_replicas(run.blocks)
    out["val_loss"] = train.evaluate(run)[0]
    run.loader.close()
    return out


def go(run, steps, after=None):
    """`steps` steps from where the run is; losses, norms, logical gradients and parameters. After
    each, after()."""
    out = first(run)
    for _ in range(steps):
        skipped = one_step(run, out)
        assert not skipped
        if after:
            after()
    out["params"] = logical(run.blocks, run.blocks.master)
    return out


def first(run):
    """The run is about to begin: an empty result."""
    run.loader.start(run.samples)
    run.mesh.ledger.clear()
    return {"loss": [], "norm": [], "grads": [], "count": [], "pairs": [],
            "sizes": run.blocks.sizes}


def one_step(run, out):
    """A step, entered into `out`. Was the update skipped?"""
    _, batches, pending = train.next_batch(run, False)
    count, _, pairs, *_ = pending.wait()
    loss, norm, skipped, _ = train.train_step(run, batches, count).tolist()
    out.setdefault("ledger", {k: list(v) for k, v in run.mesh.ledger.items()})
    out["loss"].append(loss)
    out["norm"].append(norm)
    out["count"].append(count)
    out["pairs"].append(pairs)
    out["grads"].append(logical(run.blocks, run.blocks.grad))
    return bool(skipped)


def run_compiled(case, folder):
    """Three steps with the layers in graphs, which are run as they are; `graphs`: how many there
    were after each step; `breaks`: what broke one."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, torch.compile = torch.compile, functools.partial(torch.compile, backend="aot_eager")
    try:
        run = prepare(case | {"speed.compile": True}, folder)
    finally:
        torch.compile = plain
    graphs = []
    out = go(run, 3, lambda: graphs.append(counters["stats"]["unique_graphs"]))
    out |= {"graphs": graphs, "breaks": list(counters["graph_break"])}
    out["val_loss"] = train.evaluate(run)[0]
    run.loader.close()
    torch._dynamo.reset()
    return out


def run_and_save(case, folder, root, steps):
    """Train `steps` steps and write a checkpoint into root."""
    run = prepare(case | {"run.dir": root}, folder)
    go(run, steps)
    train.save(run)
    run.loader.close()
    return {"saved": prints(run)}


def prints(run):
    names = [p.name for p in train.model_py.whole_model(run.model.cfg)]
    return parallel.fingerprints(run.blocks, names)


def resume_and_run(case, folder, root, steps):
    """Load the newest checkpoint of root, on this layout, and train `steps` more."""
    run = prepare(case | {"run.dir": root}, folder)
    assert train.resume(run)
    loaded = prints(run)
    out = go(run, steps)
    run.loader.close()
    return out | {"loaded": loaded}


def covering(options):
    """A short list of cases in which every pair of option values occurs. `options`: key -> values.
    Greedy: each case starts with a pair not yet covered, and every other key takes the value that
    covers most pairs with what the case already has."""
    keys = list(options)
    left = {((k, i), (q, j)) for k, q in itertools.combinations(keys, 2)
            for i in range(len(options[k])) for j in range(len(options[q]))}
    order, chosen = {key: n for n, key in enumerate(keys)}, []

    def new(case, at):
        """How many uncovered pairs `at` = (key, index) makes with the case so far."""
        pairs = [tuple(sorted((at, has), key=lambda kv: order[kv[0]])) for has in case.items()]
        return sum(pair in left for pair in pairs)

    while left:
        case = dict(min(left, key=lambda pair: (order[pair[0][0]], order[pair[1][0]], pair[0][1],
                                                pair[1][1])))
        for key in keys:
            if key not in case:
                case[key] = max(range(len(options[key])), key=lambda i: new(case, (key, i)))
        left -= set(itertools.combinations([(k, case[k]) for k in keys], 2))
        chosen.append({k: options[k][case[k]] for k in keys})
    return chosen


def batch_of(run, batches):
    """All microbatches of a single-process step as one batch for the reference."""
    joined = {}
    for name in ("tokens", "targets", "pos"):
        joined[name] = torch.cat([getattr(b, name) for b in batches])
    lo = [torch.zeros_like(b.tokens) if b.lo is None else b.lo.long() for b in batches]
    return joined | {"lo": torch.cat(lo)}
