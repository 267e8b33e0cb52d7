"""Mutants: the trainer with one thing broken, and what notices it.

All traffic passes one door (parallel.py, section 1), and every call of it says in the ledger over
which axis it goes and what it is. So each can be broken where it passes, without a change in the
trainer: `Door` stands in the place of torch.distributed, and knows of each call its Site,

    axis   operation               where                            broken
    tp     all_reduce max (loss)   _LinearCrossEntropy.forward #2   skipped | doubled | over fsdp

    skipped     nothing is sent: what arrives is this rank's own part, or zeros
    doubled     what arrives is twice what it should be
    over AXIS   sent to the ranks of another axis of the same size

on all ranks and in every step. Every site that a layout's first steps show is broken in each way,
so a new collective joins by itself. What has no collective of its own (one term of a norm, a
position, the split of the vocabulary) is broken by hand: FAULTS.

A mutant is noticed if the result is not that of one process, in the order in which `notice` looks.
The table of all of them is tests/MUTANTS.md:

    python tests/mutants.py                    writes it (in minutes)
    python tests/mutants.py "cp 2, tp 2, ring" ...    makes these sections anew
"""

import ast
import contextlib
import dataclasses
import functools
import io
import itertools
import pathlib
import re
import sys
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import parity  # noqa: E402
import test_parity  # noqa: E402
from pool import Pool  # noqa: E402

import model  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402

TABLE = ROOT / "tests" / "MUTANTS.md"
STEPS = 2

# ---- Layouts. Together they have every site: test_mutation.py holds them against the source.


def on(name, layout, **options):
    """A case of the parity matrix, as small as shows what the options say: a layer and a microbatch
    where tp or cp cut them, else two, that take turns on buffers and add up."""
    n = 1 if {"tp", "cp"} & set(layout) and "pp" not in layout else 2
    case = test_parity.MODELS[name] | {"model.n_layer": n, "rounds": n, "optim.grad_clip": 0.5,
                                       "speed.loss_chunk": 1000}
    options = {key.replace("__", "."): value for key, value in options.items()}
    return test_parity.on_layout(case | options, layout)


def exact(case):
    """With sums of the same bits everywhere: microbatches must be a power of two."""
    return case | {"train.deterministic": True, "train.global_batch": 16, "train.microbatch": 2}


TWO = {"dp": 2, "fsdp": 2}
LAYOUTS = {
    "dp 2, fsdp 2, zero 0": on("capped", TWO, parallel__zero=0, ignore="prefix"),
    "dp 2, fsdp 2, zero 1": on("gpt2", TWO, parallel__zero=1, ignore="uneven"),
    "dp 2, fsdp 2, zero 2": on("llama3", TWO, parallel__zero=2),
    "dp 2, fsdp 2, zero 3": on("llama", TWO, parallel__zero=3, data__mask_documents=True),
    "dp 2, tp 2, zero 0": on("llama", {"dp": 2, "tp": 2}, parallel__zero=0,
                             speed__recompute="full"),
    "fsdp 2, tp 2, zero 0": on("gpt2", {"fsdp": 2, "tp": 2}, parallel__zero=0, ignore="uneven",
                               rounds=2, speed__loss_chunk=50),
    "fsdp 2, tp 2, zero 3": on("qwen3", {"fsdp": 2, "tp": 2}, parallel__zero=3,
                               speed__keep_gathered=True),
    "fsdp 2, tp 2, in graphs": on("llama3", {"fsdp": 2, "tp": 2}, parallel__zero=1),
    "cp 2, tp 2, ring": on("capped", {"cp": 2, "tp": 2}, parallel__zero=1),
    "cp 2, tp 2, ulysses": on("llama", {"cp": 2, "tp": 2}, parallel__zero=1,
                              parallel__cp_mode="ulysses"),
    "fsdp 2, cp 2, ring": on("qwen3", {"fsdp": 2, "cp": 2}, parallel__zero=3, ignore="uneven"),
    "dp 2, cp 2, ulysses": on("gpt2", {"dp": 2, "cp": 2}, parallel__zero=2,
                              parallel__cp_mode="ulysses"),
    "pp 2, dp 2, 1f1b, tied": on("llama3", {"pp": 2, "dp": 2}, parallel__zero=0),
    "pp 2, fsdp 2, zero-bubble, tied, zero 3": on(
        "qwen3", {"pp": 2, "fsdp": 2}, parallel__zero=3, parallel__schedule="zero-bubble"),
    "pp 2, fsdp 2, interleaved, zero 2": on(
        "llama", {"pp": 2, "fsdp": 2}, parallel__zero=2, parallel__schedule="interleaved",
        parallel__chunks=2, parallel__zero_pp="regather", model__n_layer=4),
    "pp 2, tp 2, gpipe, tied": on("gpt2", {"pp": 2, "tp": 2}, parallel__zero=1,
                                  parallel__schedule="gpipe"),
    "pp 2, cp 2, zero-bubble": on("llama", {"pp": 2, "cp": 2}, parallel__zero=1,
                                  parallel__schedule="zero-bubble"),
    "dp 2, fsdp 2, zero 0, deterministic": exact(on("llama3", TWO, parallel__zero=0)),
    "dp 2, fsdp 2, zero 2, deterministic": exact(on("gpt2", TWO, parallel__zero=2)),
    "pp 2, dp 2, deterministic, tied": exact(on("llama3", {"pp": 2, "dp": 2}, parallel__zero=1)),
}


def alone(case):
    return {key: value for key, value in case.items() if not key.startswith("parallel")}


MESHES = {}  # axis sizes -> mesh: apart from those of other tests, as ranks wait 20 s only


def prepare(name, folder):
    case = LAYOUTS[name]
    sizes = {axis: case[f"parallel.{axis}"] for axis in parallel.AXES}
    if str(sizes) not in MESHES:
        MESHES[str(sizes)] = parallel.build_mesh(sizes, "cpu", timeout=20)
    with patched((parity, "MESHES", MESHES)):
        run = parity.prepare(case, folder)
    if name.endswith("in graphs"):  # the operators that a compiled layer calls, called as they are
        put_in, put_out = parallel.enter_in_graph(run.mesh), parallel.leave_in_graph(run.mesh)
        for layer in run.model.layers.values():
            layer.attn.enter = layer.mlp.enter = put_in
            layer.attn.leave = layer.mlp.leave = put_out
        run.fns = [lambda x, micro, later, block=block: block(
            x, micro, None if isinstance(block, model.Layer) else later)
            for _, block in run.model.named_blocks()]
    return run


def draw(run):
    """Text of random letters, drawn by all ranks alike."""
    start = torch.tensor([[1, 2], [3, 4], [5, 6]])
    return model.generate(run.model, run.blocks, start, 12, temperature=1.0)


@functools.cache
def truth(name, folder):
    """What one process computes, as bytes for the workers."""
    case = alone(LAYOUTS[name])
    want = parity.run_case(case, folder, STEPS)
    want["text"] = draw(parity.prepare(case, folder))
    out = io.BytesIO()
    torch.save(want, out)
    return out.getvalue()


# ---- Where a call stands


class Site(NamedTuple):
    axis: str
    op: str  # with its label, as in the ledger
    where: str  # the function that calls the door; #n: its n-th call in it


def functions_of(path):
    """(first line, last line, name with those around it) of each function of a file."""
    out = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}"
                if isinstance(child, ast.FunctionDef):
                    out.append((child.lineno, child.end_lineno, name))
            visit(child, name)

    visit(ast.parse(path.read_text()), path.stem)
    return out


def door_ends():
    """The line of parallel.py where its section 1 ends."""
    lines = (ROOT / "parallel.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.startswith("# ---- 2. "))


@functools.cache
def door_names():
    """The functions and classes of section 1 by which something moves: those that enter the ledger
    or talk about Python objects, and those that call one of them."""
    tree = ast.parse((ROOT / "parallel.py").read_text())
    called = {node.name: {ast.unparse(c.func) for c in ast.walk(node) if isinstance(c, ast.Call)}
              for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
              and node.lineno < door_ends()}
    found = {"count", "dist.all_gather_object", "dist.broadcast_object_list", "dist.irecv"}
    while more := {name for name, calls in called.items() if calls & found} - found:
        found |= more
    return {name for name in found if name in called} - {"count"}


@functools.cache
def calls_of_the_door():
    """{(file, line): where} of every call of the door in the trainer. Lines are of the call."""
    out = {}
    for path in (ROOT / f"{name}.py" for name in ("parallel", "model", "train")):
        functions = functions_of(path)
        within = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix(
                    "parallel.") in door_names():
                if path.stem == "parallel" and node.lineno < door_ends():
                    continue
                around = [f for f in functions if f[0] <= node.lineno <= f[1]]
                within.setdefault(max(around)[2], []).append((node.lineno, node.end_lineno))
        for name, lines in within.items():
            for n, (begin, end) in enumerate(sorted(lines), 1):
                label = f"{name} #{n}" if len(lines) > 1 else name
                out |= {(path.name, line): label for line in range(begin, end + 1)}
    return out


def caller():
    """Where the door was called: the nearest frame that is not of the door itself; and whether the
    executor of schedules is among those around it."""
    frame, where, last = sys._getframe(2), None, door_ends()
    while frame is not None:
        path = pathlib.Path(frame.f_code.co_filename)
        if where is None and (path.name, frame.f_lineno) in calls_of_the_door():
            if path.name != "parallel.py" or frame.f_code.co_firstlineno >= last:
                where = calls_of_the_door()[path.name, frame.f_lineno]
        if path.name == "parallel.py" and frame.f_code.co_name == "run":
            return where, True
        frame = frame.f_back
    return where, False


# ---- The door


class Later:
    """In the place of torch's Work: something that happens when the work is done."""

    def __init__(self, work, finish):
        self.work, self.finish = work, finish

    def wait(self, *patience):
        if self.work is not None:
            self.work.wait(*patience)
        self.finish()


class Door:
    """torch.distributed as parallel.py sees it, with the calls of one site broken. Those of the
    harness itself, whose ledger is another, pass untouched. `seen`: Site -> [calls, bytes, whether
    the executor makes them]."""

    def __init__(self, mesh, site=None, how=None):
        self.mesh, self.site, self.how = mesh, site, how
        self.seen, self.now, self.axis = {}, False, None
        self.other = how[5:] if how and how.startswith("over ") else None

    def count(self, mesh, axis, op, nbytes, what=""):
        name = COUNT(mesh, axis, op, nbytes, what)
        self.now, self.axis, self.op = False, axis, op
        if mesh.ledger is self.mesh.ledger:
            where, inside = caller()
            site = Site(axis, f"{op} ({what})" if what else op, where)
            entry = self.seen.setdefault(site, [0, 0, inside])
            entry[0], entry[1] = entry[0] + 1, entry[1] + nbytes
            self.now = site == self.site
        return name

    def __getattr__(self, name):
        real = getattr(dist, name)
        if name in ("all_gather_single", "all_gather_into_tensor"):
            return functools.partial(self.gather, real)
        return real

    def group(self, group):
        return self.mesh.group[self.other] if self.other else group

    def peer(self, stage):
        """The rank as far ahead on the other axis as `stage` is on this one."""
        if not self.other:
            return stage
        ahead = stage - self.mesh.coord[self.axis]
        return (self.mesh.coord[self.other] + ahead) % self.mesh.size[self.other]

    def end(self, work, out, asynchronous):
        def finish():
            if self.how == "doubled":
                with torch.no_grad():
                    out.mul_(2)

        if asynchronous:
            return Later(work, finish)
        finish()

    def all_reduce(self, x, how=dist.ReduceOp.SUM, group=None, async_op=False):
        if not self.now:
            return dist.all_reduce(x, how, group=group, async_op=async_op)
        work = None
        if self.how != "skipped":
            work = dist.all_reduce(x, how, group=self.group(group), async_op=async_op)
        return self.end(work, x, async_op)

    def gather(self, real, out, x, group=None, async_op=False):
        if not self.now:
            return real(out, x, group=group, async_op=async_op)
        if self.how == "skipped":
            out.view(-1, x.numel()).copy_(x.flatten().clone())
            return self.end(None, out, async_op)
        return self.end(real(out, x, group=self.group(group), async_op=async_op), out, async_op)

    def all_to_all_single(self, out, x, group=None, async_op=False):
        if not self.now:
            return dist.all_to_all_single(out, x, group=group, async_op=async_op)
        if self.how != "skipped":
            work = dist.all_to_all_single(out, x, group=self.group(group), async_op=async_op)
            return self.end(work, out, async_op)
        out.copy_(x)
        if self.op.startswith("reduce_scatter"):  # whose sum is then this rank's own part
            mine = self.mesh.coord[self.axis]
            for rank, part in enumerate(out.chunk(self.mesh.size[self.axis])):
                part.mul_(rank == mine)
        return self.end(None, out, async_op)

    def P2POp(self, op, x, group=None, group_peer=None):
        real = dist.isend if op == self.isend else dist.irecv
        if self.now:
            group, group_peer = self.group(group), self.peer(group_peer)
        return dist.P2POp(real, x, group=group, group_peer=group_peer)

    def batch_isend_irecv(self, both):
        if not self.now:
            return dist.batch_isend_irecv(both)
        sent, received = (op.tensor for op in both)
        if self.how == "skipped":
            received.copy_(sent)
            return [self.end(None, received, True)]
        *works, last = dist.batch_isend_irecv(both)
        return [*works, self.end(last, received, True)]

    def isend(self, x, group=None, group_dst=None):
        if not self.now:
            return dist.isend(x, group=group, group_dst=group_dst)
        if self.how == "skipped":
            return self.end(None, torch.empty(0), True)
        return dist.isend(x, group=self.group(group), group_dst=self.peer(group_dst))

    def irecv(self, out, group=None, group_src=None):
        """The other half of a send, which alone is in the ledger."""
        self.axis = "pp"
        if self.site is None or self.site[:2] != ("pp", "send"):
            return dist.irecv(out, group=group, group_src=group_src)
        if self.how == "skipped":
            return self.end(None, out.zero_(), True)
        work = dist.irecv(out, group=self.group(group), group_src=self.peer(group_src))
        return self.end(work, out, True)


COUNT = parallel.count


@contextlib.contextmanager
def patched(*changes):
    """(object, attribute, value): set for a while."""
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    try:
        for thing, name, value in changes:
            setattr(thing, name, value)
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


@contextlib.contextmanager
def door(run, site=None, how=None):
    it = Door(run.mesh, site, how)
    with patched((parallel, "dist", it), (parallel, "count", it.count)):
        yield it


# ---- Faults by hand. Each: a context manager of (run, argument), and the layouts it concerns.


def coordinate(mesh, axis, value):
    return dataclasses.replace(mesh, coord=mesh.coord | {axis: value})


def around_norm(run, *changes):
    """grad_norm, with these attributes set while it runs."""
    real = run.blocks.grad_norm

    def norm():
        with patched(*changes):
            return real()

    return patched((run.blocks, "grad_norm", norm))


def norm_counts_replicated(run, _):
    return around_norm(run, (run.blocks, "mesh", coordinate(run.mesh, "tp", 0)))


def norm_counts_tied_twice(run, _):
    return around_norm(run, (run.blocks, "is_second_twin", lambda: False))


def norm_without_a_rank(run, axis):
    real = run.blocks.grad_norm

    def norm():
        off = run.mesh.coord[axis] == 1
        grads = [torch.zeros_like(g) for g in run.blocks.grad] if off else run.blocks.grad
        with patched((run.blocks, "grad", grads)):
            return real()

    return patched((run.blocks, "grad_norm", norm))


def count_without_a_rank(run, _):
    real = parallel.sum_integers

    def summing(mesh, count, *others):
        return real(mesh, 0 if mesh.coord["data"] == 1 else count, *others)

    return patched((parallel, "sum_integers", summing))


def count_of_every(run, axis):
    """Ranks along the axis, which have the same samples, all count them."""
    real = train.next_batch

    def next_batch(run, stop):
        with patched((run, "mesh", coordinate(run.mesh, axis, 0))):
            return real(run, stop)

    return patched((train, "next_batch", next_batch))


def count_per_rank(run, _):
    real = train.train_step
    return patched((train, "train_step", lambda run, batches, count: real(
        run, batches, count // run.mesh.size["data"])))


def micro(change):
    """A fault in what the blocks get to know of a microbatch: change(run, the right one, sample)
    -> the fields that are wrong."""
    def fault(run, argument):
        real = run.model.micro

        def wrong(*args):
            right = real(*args)
            return right._replace(**change(run, right, args[-1], argument))

        return patched((run.model, "micro", wrong))

    return fault


@micro
def rope_from_zero(run, right, sample, _):
    n = right.tokens.shape[1]
    return {"cos": run.model.tables[0][:n], "sin": run.model.tables[1][:n]}


@micro
def positions_from_zero(run, right, sample, axis):
    if axis == "tp":
        return {"pos": torch.arange(right.pos.shape[1]).unsqueeze(0)}
    mine = torch.arange(right.tokens.shape[1]).unsqueeze(0)
    return {"pos": parallel.positions_of(mine, run.mesh)}


@micro
def labels_shifted_late(run, right, sample, _):
    end = torch.full_like(right.targets[:, :1], parallel.IGNORE)
    return {"targets": torch.cat([right.tokens[:, 1:], end], 1)}


@micro
def dropout_by_local(run, right, sample, what):
    """Masks by the number that a token has on its rank, not in the global batch."""
    T, n = run.config["data"]["seq_len"], right.tokens.shape[1]
    if what == "samples":
        sample = torch.arange(len(sample))
        at = torch.arange(T).unsqueeze(0)
        at = parallel.cut_sequence(at, run.mesh, run.model.cp_mode)
    else:
        at = torch.arange(n).unsqueeze(0)
    return {"drop_index": parallel.positions_of(sample.unsqueeze(1) * T + at, run.mesh)}


def vocabulary_off_by_one(run, _):
    real, off = model.kernels.ce_forward, int(run.mesh.coord["tp"] == 1)
    return patched((model.kernels, "ce_forward", lambda xs, w, t, *args, **options: real(
        xs, w, t - off, *args, **options)))


class OffByOne:
    """In the place of parallel._Lookup: tp rank 1 looks up the row after."""

    apply = staticmethod(lambda index, weight, main_grad, owner, later: LOOKUP(
        index + int(owner == 1), weight, main_grad, owner, later))


LOOKUP = parallel._Lookup.apply


def rows_off_by_one(run, _):
    return patched((parallel, "_Lookup", OffByOne))


def loss_row_left_local(run, row):
    """Of (sum of exponentials, target's logit) one is not summed over tp."""
    real = parallel.all_reduce

    def all_reduce(mesh, x, axis, op="sum", wait=True, what=""):
        own = x[row].clone() if what == "loss" and op == "sum" else None
        out = real(mesh, x, axis, op, wait, what)
        if own is not None:
            x[row] = own
        return out

    return patched((parallel, "all_reduce", all_reduce))


def one_is_not_summed(run, name):
    """A parameter that tp replicates keeps this rank's part of its gradient."""
    real = run.blocks.sum_replicated
    mine = [run.blocks.local(run.blocks.grad, p)[0] for p in run.blocks.params if p.name == name]

    def sum_replicated():
        own = [data.clone() for data in mine]
        real()
        for data, before in zip(mine, own):
            data.copy_(before)

    return patched((run.blocks, "sum_replicated", sum_replicated))


def tied_gradient_dropped(run, stage):
    real, blocks = run.blocks.sum_twins, run.blocks

    def sum_twins():
        if blocks.twin is not None and run.mesh.coord["pp"] == stage:
            blocks.grad[-1].zero_()
        real()

    return patched((blocks, "sum_twins", sum_twins))


def gradient_between_stages_doubled(run, _):
    real = parallel.backward

    def backward(flow, kind, j, c):
        action = parallel.Action(kind, j, c)
        if action in flow.inbox:
            handle = flow.inbox[action]
            flow.inbox[action] = parallel.Handle(lambda: 2 * handle.wait())
        return real(flow, kind, j, c)

    return patched((parallel, "backward", backward))


def first_microbatch_for_all(run, _):
    """A stage that goes on with the buffer of the microbatch before."""
    real, first = parallel.forward, {}

    def forward(flow, j, c, backward_follows):
        action = parallel.Action("forward", j, c)
        if action in flow.inbox:
            x = flow.inbox[action].wait()
            old = first.setdefault((id(flow), c), x.clone())
            flow.inbox[action] = parallel.Handle(lambda: old if old.shape == x.shape else x)
        return real(flow, j, c, backward_follows)

    return patched((parallel, "forward", forward))


def having(*words):
    return [name for name in LAYOUTS if all(word in name for word in words)]


GPT2_CP, CAPPED_CP = "dp 2, cp 2, ulysses", "cp 2, tp 2, ring"
ROTARY_CP = [name for name in having("cp 2") if name != GPT2_CP]
FAULTS = {  # what is wrong -> (the change, its argument, layouts)
    "norm: what tp replicates counts on every tp rank": (norm_counts_replicated, None,
                                                         having("tp 2")),
    "norm: a tied weight counts on both stages": (norm_counts_tied_twice, None, having("tied")),
    "norm: one stage is left out": (norm_without_a_rank, "pp", having("pp 2")),
    "norm: one tp rank is left out": (norm_without_a_rank, "tp", having("tp 2")),
    "norm: one fsdp rank is left out": (norm_without_a_rank, "fsdp", having("fsdp 2", "zero 3")),
    "token count: that of data rank 1 is dropped": (
        count_without_a_rank, None, having("dp 2") + having("fsdp 2, tp 2")),
    "token count: every cp rank counts": (count_of_every, "cp", having("cp 2")),
    "token count: every tp rank counts": (count_of_every, "tp", having("tp 2")),
    "token count: every stage counts": (count_of_every, "pp", having("pp 2")),
    "token count: of the mean data rank": (count_per_rank, None,
                                           having("dp 2") + having("fsdp 2, tp 2")),
    "rotary positions: from 0 on each cp rank": (rope_from_zero, None, ROTARY_CP),
    "learned positions: from 0 on each cp rank": (positions_from_zero, "cp", [GPT2_CP]),
    "learned positions: from 0 on each tp rank": (
        positions_from_zero, "tp", ["fsdp 2, tp 2, zero 0", "pp 2, tp 2, gpipe, tied"]),
    "targets: shifted after the split over cp": (labels_shifted_late, None, having("cp 2")),
    "dropout: masks by the place on the cp rank": (dropout_by_local, "places", [CAPPED_CP]),
    "dropout: masks by the sample's number on its data rank": (
        dropout_by_local, "samples", ["dp 2, fsdp 2, zero 0"]),
    "vocabulary: the loss on tp rank 1 begins one later": (vocabulary_off_by_one, None,
                                                           having("tp 2")),
    "vocabulary: the embedding on tp rank 1 begins one earlier": (rows_off_by_one, None,
                                                                  having("tp 2")),
    "loss: sums of exponentials are not summed over tp": (loss_row_left_local, 0, having("tp 2")),
    "loss: logits of targets are not summed over tp": (loss_row_left_local, 1, having("tp 2")),
    "tied weight: the first stage's gradient is dropped": (tied_gradient_dropped, 0,
                                                           having("tied")),
    "tied weight: the last stage's gradient is dropped": (tied_gradient_dropped, 1, having("tied")),
    "stages: the gradient between them is doubled": (gradient_between_stages_doubled, None,
                                                     having("pp 2")),
    "stages: every microbatch goes on with the first": (first_microbatch_for_all, None,
                                                        having("pp 2")),
}
NOT_SUMMED = "gradient not summed over tp: "


def fault(run, what):
    if what.startswith(NOT_SUMMED):
        return one_is_not_summed(run, what.removeprefix(NOT_SUMMED))
    change, argument, _ = FAULTS[what]
    return change(run, argument)


# ---- What notices


class Mutant(NamedTuple):
    layout: str
    during: str  # steps, evaluation, text
    site: Site | None  # None: a fault by hand
    how: str


EQUIVALENT = {  # (operation, where, how) that changes nothing -> the proof, and what stands for it
    ("all_reduce max (loss)", "parallel._LinearCrossEntropy.forward #2", "doubled"):
        "log(sum exp(x - m)) + m is the same for every m; a maximum left local (skipped) differs "
        "from rank to rank, and is noticed",
    ("all_reduce sum", "train.evaluate", "doubled"):
        "the loss and the number of targets are doubled together, and their quotient is what "
        "counts; skipped is noticed",
    ("all_reduce max", "parallel.Blocks.norm_of_integers #2", "doubled"):
        "gradients are divided by it, and their norm is multiplied by it again: any number that is "
        "not below the largest will do; left local (skipped) is noticed",
    ("all_reduce sum", "parallel.Blocks.norm_of_integers #1", "doubled"):
        "only the width of the integers follows from the number of parameters, and one of 62 bits "
        "less is far below the tolerance; left local (skipped) stages choose other widths, and it "
        "is noticed",
}


def is_equivalent(mutant):
    return mutant.site is not None and (*mutant.site[1:], mutant.how) in EQUIVALENT


TIED = "copies of a tied weight"


def order(want):
    """All that can differ, in the order in which it is looked at."""
    out = []
    for step in range(STEPS):
        where = f"step {step + 1}: "
        out += [where + "token count", where + "pairs", where + "loss", where + "norm"]
        out += [where + f"grad {name}" for name in want["grads"][step]] + [where + TIED]
    return out + [f"weight {name}" for name in want["params"]] + ["replicas", "held-out loss",
                                                                  "text"]


def of_step(out, want, step):
    """What a step has that one process has not."""
    where, norm = f"step {step + 1}: ", want["norm"][step]
    named = {"token count": "count", "pairs": "pairs", "loss": "loss", "norm": "norm"}
    apart = [where + name for name, key in named.items()
             if parity.agree("", out[key][step], want[key][step])]
    if len(out["grads"]) == step:  # not one tensor, but two
        return apart + [where + TIED]
    return apart + [where + f"grad {name}" for name, g in want["grads"][step].items()
                    if parity.agree("", out["grads"][step][name], g, norm)]


def together(run, apart, labels):
    """What any rank has seen, as text: of gradients and of weights the first."""
    every = [apart] * run.mesh.world
    dist.all_gather_object(every, apart, group=run.mesh.control)
    seen, told = set(itertools.chain(*every)), {}
    for label in labels:
        if label in seen:
            told.setdefault(re.sub(r"\b(grad|weight) .*", r"\1", label), label)
    first, *others = told.values() or [""]
    return ", ".join([first, *(label.split(": ")[-1] for label in others)])


def differences(run, name, folder, want, around):
    """Of a run that goes on, one after the other, lists of what it has that one process has not.
    around(what, run): a context manager for each step, the evaluation, the text."""
    out = parity.first(run)
    for step in range(STEPS):
        try:
            with around("steps", run):
                parity.one_step(run, out)
        except AssertionError as error:  # of parity.logical
            if "embed.tokens.weight" not in str(error):
                raise
        yield of_step(out, want, step)
    now = parity.logical(run.blocks, run.blocks.master)
    yield [f"weight {key}" for key, p in want["params"].items() if parity.agree("", now[key], p)]
    try:
        parallel.check_replicas(run.blocks)
    except RuntimeError:
        yield ["replicas"]
    with around("evaluation", run):
        loss = train.evaluate(run)[0]
    yield ["held-out loss"] * bool(parity.agree("", loss, want["val_loss"]))
    run = prepare(name, folder)
    with around("text", run):
        yield ["text"] * (not torch.equal(draw(run), want["text"]))


def notice(name, folder, want, change, during="steps"):
    """What shows that the run on this layout is not that of one process: "" if nothing does.
    `change(run)`: a context manager around what is broken; that is where the looking ends."""
    def around(what, run):
        return change(run) if what == during else contextlib.nullcontext()

    run, labels = prepare(name, folder), order(want)
    try:
        for apart in differences(run, name, folder, want, around):
            if seen := together(run, apart, labels):
                return seen
        return ""
    finally:
        run.loader.close()


def record(name, folder, truth):
    """On a worker: {(during, Site): [calls, bytes, in the executor]} of this rank, what tp
    replicates, and what `notice` says of a trainer that nobody broke."""
    want = torch.load(io.BytesIO(truth), weights_only=False)
    seen, doors = {}, {}

    @contextlib.contextmanager
    def listen(during, run):
        with door(run) as it:
            yield
        doors.setdefault(during, []).append(it)

    notes = [notice(name, folder, want, functools.partial(listen, during), during)
             for during in ("steps", "evaluation", "text")]
    for during, those in doors.items():
        for site, entry in itertools.chain(*(it.seen.items() for it in those[:1])):
            if during == "steps" or ("steps", site) not in seen:
                seen[during, site] = entry
    run = prepare(name, folder)
    whole = [p.name for p in run.blocks.params if p.cut is None and run.mesh.size["tp"] > 1]
    groups = {axis: dist.get_process_group_ranks(group)
              for axis, group in run.mesh.group.items() if group is not None}
    return seen, whole, groups, notes


def attempt(mutants, folder, truths, notes):
    """On a worker: what notices each of the mutants. The file `notes`.rank says which is tried, and
    with what error it ended."""
    out, file = [], pathlib.Path(f"{notes}.{dist.get_rank()}")
    for n, mutant in enumerate(mutants):
        file.write_text(f"{n}")
        want = torch.load(io.BytesIO(truths[mutant.layout]), weights_only=False)
        change = functools.partial(door, site=mutant.site, how=mutant.how) if mutant.site else \
            functools.partial(fault, what=mutant.how)
        try:
            out.append(notice(mutant.layout, folder, want, change, mutant.during))
        except Exception as error:
            file.write_text(f"{n} {type(error).__name__}")
            raise
    return out


STUCK = "ranks that do not meet: no answer, or a broken connection"


def what_ended(notes):
    """(number of the mutant that ended the workers, what is said of it). Between ranks that do not
    meet it is chance whether one waits in vain, gets an answer of another size, or is cut off."""
    said = [p.read_text().partition(" ") for p in pathlib.Path(notes).iterdir()]
    n = min(int(at) for at, *_ in said)
    kinds = {kind for at, _, kind in said if int(at) == n}
    kinds -= {"", "RuntimeError", "DistBackendError"}
    return n, f"an exception ({min(kinds)})" if kinds else STUCK


# ---- All of them, in the process that has the workers


def others(site, groups, inside, same):
    """Axes of the same size, whose ranks make the same calls: those of other stages do so only
    outside of the executor, and only where the ledger says so."""
    mine = groups.get(site.axis, [])
    for axis in parallel.AXES:
        apart = axis in groups and len(groups[axis]) == len(mine) and groups[axis] != mine
        if apart and (axis != "pp" or same and not inside):
            return [f"over {axis}"]
    return []


def mutants_of(name, recorded):
    """Every site in every way, and the faults by hand."""
    out, sites = [], {}
    for rank, (seen, *_) in enumerate(recorded):
        for key, entry in seen.items():
            sites.setdefault(key, {})[rank] = entry
    groups = recorded[0][2]
    for (during, site), entries in sites.items():
        same = len(entries) == len(recorded) and len({tuple(e) for e in entries.values()}) == 1
        inside = any(inside for _, _, inside in entries.values())
        ways = ["skipped", "doubled", *others(site, groups, inside, same)]
        out += [Mutant(name, during, site, how) for how in ways]
    out += [Mutant(name, "steps", None, how) for how, (*_, layouts) in FAULTS.items()
            if name in layouts]
    replicated = {p for _, whole, *_ in recorded for p in whole}
    return sorted(out, key=text_of) + [
        Mutant(name, "steps", None, NOT_SUMMED + p) for p in sorted(replicated)]


def text_of(mutant):
    return tuple(map(str, (mutant.site or ("",) * 3))) + (mutant.during, mutant.how)


def look(world, name, folder):
    """What the ranks of a layout record. Nothing may be noticed of a trainer that is right."""
    recorded = world(4).run(record, name, str(folder), truth(name, str(folder)), timeout=240)
    for *_, notes in recorded:
        assert notes == [""] * 3, (name, notes)
    return recorded


def try_all(world, mutants, folder):
    """{mutant: what notices it}. Where ranks fail or hang, others take their place."""
    found, left = {}, list(mutants)
    while left:
        some = left[:12]
        truths = {m.layout: truth(m.layout, str(folder)) for m in some}
        with tempfile.TemporaryDirectory() as notes:
            try:
                results = world(4).run(attempt, some, str(folder), truths, f"{notes}/rank",
                                       timeout=300)[0]
            except AssertionError as error:
                n, found_out = what_ended(notes)
                print(some[n], found_out, str(error).splitlines()[-1][:200], file=sys.stderr)
                found[some[n]] = found_out
                left = some[:n] + left[n + 1 :]
                continue
        found |= dict(zip(some, results))
        left = left[len(some) :]
    return found


# ---- The table

HEAD = """Made by `python tests/mutants.py`, which takes minutes; do not edit.

# What notices when something is broken

Each mutant is the trainer with one thing broken, on all four ranks of a layout: a collective at one
place (skipped; its result doubled; sent over another axis of the same size), or something by hand.
It is held against one process for two steps: number of target tokens, pairs of query and key, loss,
gradient norm, every gradient, every weight, that replicas are equal, the loss of held-out text;
text drawn from the model where only that uses a collective. Told is the first of these steps in
which something differs: what, of gradients and of weights only the first.

{total} mutants on {layouts} layouts. {noticed} are noticed, {first} of them in the first step.
{lost} are not: these change nothing.

"""


def cell(note):
    return note or "nothing (equivalent)"


def table(found):
    """MUTANTS.md: a section for each layout, a row for each place, a cell for each mutant."""
    notes = list(found.values())
    lines = [HEAD.format(total=len(notes), layouts=len({m.layout for m in found}),
                         noticed=sum(map(bool, notes)), lost=notes.count(""),
                         first=sum(note.startswith("step 1") for note in notes))]
    for (op, where, how), proof in EQUIVALENT.items():
        lines.append(f"- {op} in {where}, {how}: {proof}\n")
    for name in sorted({m.layout for m in found}):
        rows, by_hand = {}, []
        for mutant, note in sorted(found.items(), key=lambda item: text_of(item[0])):
            if mutant.layout == name and mutant.site:
                rows.setdefault((mutant.during, *mutant.site), {})[mutant.how] = note
            elif mutant.layout == name:
                by_hand.append(f"| {mutant.how} | {cell(note)} |\n")
        lines.append(f"\n## {name}\n\n| in | axis | operation | where | skipped | doubled | "
                     "over another axis |\n|---|---|---|---|---|---|---|\n")
        for key, ways in sorted(rows.items()):
            cells = [*key, cell(ways["skipped"]), cell(ways["doubled"])]
            cells.append(", ".join(f"{how}: {cell(note)}" for how, note in ways.items()
                                   if how.startswith("over ")))
            lines.append(f"| {' | '.join(cells)} |\n")
        lines.append("\n| by hand | |\n|---|---|\n" + "".join(by_hand))
    return "".join(lines)


def read_table(text):
    """{Mutant: note} of a table."""
    out, name = {}, None
    for line in text.splitlines():
        if line.startswith("## "):
            name = line[3:]
        cells = [c.strip() for c in line.strip("|").split("|")] if line.startswith("| ") else []
        if len(cells) == 2 and cells[1]:
            out[Mutant(name, "steps", None, cells[0])] = cells[1]
        elif len(cells) == 7 and cells[0] != "in":
            ways = {"skipped": cells[4], "doubled": cells[5]}
            if cells[6]:
                ways[cells[6].split(": ")[0]] = cells[6].split(": ", 1)[1]
            out |= {Mutant(name, cells[0], Site(*cells[1:4]), how): note
                    for how, note in ways.items()}
    return {mutant: "" if note == cell("") else note for mutant, note in out.items()}


def survey(world, folder, names=LAYOUTS):
    """{Mutant: note} of these layouts."""
    found = {}
    for name in names:
        found |= try_all(world, mutants_of(name, look(world, name, folder)), folder)
    return found


def main():
    import data

    pools = {}

    def world(n):
        if n not in pools or not pools[n].processes:
            pools[n] = Pool(n)
        return pools[n]

    torch.set_num_threads(1)
    found = read_table(TABLE.read_text()) if sys.argv[1:] and TABLE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        data.synth(folder, tokens=3000, vocab=51, docs=400, seed=1)
        data.synth(folder, tokens=300, vocab=51, docs=40, seed=2, split="val")
        for name in sys.argv[1:] or LAYOUTS:
            begin = time.time()
            new = survey(world, folder, [name])
            found = {m: note for m, note in found.items() if m.layout != name} | new
            print(f"{name}: {len(new)} mutants, {time.time() - begin:.0f} s", flush=True)
            for mutant in [m for m, note in new.items() if not note and not is_equivalent(m)]:
                print("nothing notices", mutant, flush=True)
            TABLE.write_text(table(found))
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
