"""Pipeline schedules: complete, free of deadlock, as fast and as frugal as published."""

import functools
import itertools
import random
import sys
import time
import types
import unittest.mock

import parity
import pytest
import test_parity
import torch

import parallel
import train

GRID = [(p, m) for p in range(1, 9) for m in range(1, 33)]
CHUNKS = {"1f1b": [1], "zero-bubble": [1]}
CASES = [(name, v) for name in parallel.SCHEDULES for v in CHUNKS.get(name, range(1, 5))]


@functools.cache
def play(name, p, m, v=1, **options):
    """The figures of a schedule; its times and order are dropped."""
    played = parallel.simulate(parallel.SCHEDULES[name](p, m, v), v, **options)
    return played._replace(spans=None, order=None)


def rendezvous(programs, v):
    """Execute programs, where a send and a receive each block their rank until the other has come
    to the same one, and an action must have what it needs. Raises AssertionError if they hang."""
    p = len(programs)
    without = {("forward", 0), ("backward", p * v - 1), ("input", p * v - 1)}
    without |= {("weight", s) for s in range(p * v)}
    at, has, awake = [0] * p, [set() for _ in programs], list(range(p))
    while awake:
        rank = awake.pop()
        while at[rank] < len(programs[rank]):
            entry = programs[rank][at[rank]]
            if isinstance(entry, parallel.Action):
                if (entry.kind, entry.chunk * p + rank) not in without:
                    assert entry in has[rank], f"rank {rank} has nothing for {entry}"
                    has[rank].remove(entry)
            elif entry.op == "keep":
                has[rank].add(entry.action)
            else:
                peer = entry.peer
                facing = programs[peer][at[peer]] if at[peer] < len(programs[peer]) else None
                other = "receive" if entry.op == "send" else "send"
                if not isinstance(facing, parallel.Transfer):
                    break
                if (facing.op, facing.peer) != (other, rank):
                    break
                assert facing.action == entry.action, "the n-th send is not the n-th receive"
                has[peer if entry.op == "send" else rank].add(entry.action)
                at[peer] += 1
                awake.append(peer)
            at[rank] += 1
    stuck = {r: programs[r][i] for r, i in enumerate(at) if i < len(programs[r])}
    assert not stuck and not any(has), (stuck, has)


# ---------------------------------------------------------------------------------------------
# Every schedule, over the whole grid


@pytest.mark.parametrize("name, v", CASES)
def test_every_schedule_is_complete_ends_and_never_hangs(name, v):
    for p, m in GRID:
        schedule = parallel.SCHEDULES[name](p, m, v)
        kinds = 3 if name.startswith("zero") else 2
        assert [len(actions) for actions in schedule] == [kinds * m * v] * p
        programs = parallel.transfers(schedule, v)  # simulates: complete, no deadlock
        rendezvous(programs, v)
        for program, actions in zip(programs, schedule):
            assert [entry for entry in program if isinstance(entry, parallel.Action)] == actions
        if (p, m) in [(1, 3), (3, 2), (4, 7), (5, 10)]:
            forwards = [[a for a in actions if a.kind == "forward"] for actions in schedule]
            parallel.simulate(forwards, v)
            rendezvous(parallel.transfers(forwards, v), v)


@pytest.mark.parametrize("name, v", CASES)
def test_bubble_fraction_is_the_published_one(name, v):
    for p, m in GRID:
        work = {"zero-bubble": 3 * m, "1f1b": m}.get(name, m * v)
        exact = m % p == 0 if name == "interleaved" and v > 1 else m >= p
        if exact:
            played = play(name, p, m, v)
            assert played.bubble == pytest.approx((p - 1) / (work + p - 1), abs=1e-12)
            unit = 1 if name.startswith("zero") else 3
            assert played.makespan == unit * (work + p - 1)


def test_bubble_fraction_with_fewer_microbatches_than_ranks():
    """The first microbatch goes down and up; each other one adds a forward and a backward. With
    the weight parts after that: rank 0 does its last behind the last input part."""
    for p, m in GRID:
        assert play("gpipe", p, m).makespan == play("1f1b", p, m).makespan == 3 * (m + p - 1)
        if m < p:
            assert play("zero-bubble", p, m).makespan == 2 * p + 2 * (m - 1) + 1
        assert play("zero-bubble", p, m).makespan <= play("1f1b", p, m).makespan
        for v in (2, 3, 4) if m <= 12 else ():
            assert play("interleaved", p, m, v).makespan <= v * play("1f1b", p, m).makespan


@pytest.mark.parametrize("ratio", [1, 1.5, 3])
def test_bubble_fraction_does_not_hang_on_the_ratio_of_backward_to_forward(ratio):
    for name, v in [("gpipe", 1), ("1f1b", 1), ("interleaved", 3)]:
        played = play(name, 4, 8, v, cost=lambda kind, stage: ratio if kind == "backward" else 1)
        assert played.bubble == pytest.approx(3 / (8 * v + 3))


def test_activations_kept():
    for p, m in GRID:
        assert play("1f1b", p, m).live == [min(m, p - r) for r in range(p)]
        assert play("gpipe", p, m).live == [m if p > 1 else 1] * p
        zero = play("zero-bubble", p, m)
        assert zero.live == [min(m, p - r) for r in range(p)]
        assert zero.due == [min(m, r + 1) for r in range(p)]
        assert max(zero.live) <= min(m, p) and max(zero.due) <= min(m, p)
        for v in (2, 3, 4) if m <= 12 else ():
            bound = [min(m * v, (v - 1) * p + 2 * (p - r) - 1) for r in range(p)]
            live = play("interleaved", p, m, v).live
            assert live == bound if m % p == 0 else all(a <= b for a, b in zip(live, bound))


# ---------------------------------------------------------------------------------------------
# Orders worked out by hand, and those of torch


def words(actions):
    """F01 is the forward of microbatch 0 with chunk 1."""
    return " ".join(f"{kind[0].upper()}{j}{c}" for kind, j, c in actions)


def test_orders_by_hand():
    assert words(parallel.interleaved(2, 4, 2)[0]) == (
        "F00 F10 F01 F11 F20 B01 F30 B11 F21 B00 F31 B10 B21 B31 B20 B30")
    assert words(parallel.interleaved(2, 4, 2)[1]) == (
        "F00 F10 F01 B01 F11 B11 F20 B00 F30 B10 F21 B21 F31 B31 B20 B30")
    assert words(parallel.interleaved(2, 3, 2)[1]) == (
        "F00 F10 F01 B01 F11 B11 F20 B00 B10 F21 B21 B20")
    assert words(parallel.one_forward_one_backward(3, 3)[1]) == "F00 F10 B00 F20 B10 B20"
    assert words(parallel.zero_bubble(2, 3)[1]) == "F00 I00 F10 I10 W00 F20 I20 W10 W20"
    assert words(parallel.zero_bubble(2, 1)[1]) == "F00 I00 W00"
    for name in ("gpipe", "1f1b", "interleaved"):
        assert words(parallel.SCHEDULES[name](1, 3, 1)[0]) == "F00 B00 F10 B10 F20 B20"
    assert words(parallel.zero_bubble(1, 2)[0]) == "F00 I00 W00 F10 I10 W10"
    for p, m in GRID:
        assert parallel.interleaved(p, m, 1) == parallel.one_forward_one_backward(p, m)


TORCH = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}


@pytest.mark.parametrize("name, p, m, v", [("interleaved", 4, 8, 2), ("interleaved", 3, 12, 3),
                                           ("zero-bubble", 4, 8, 1), ("zero-bubble", 5, 3, 1)])
def test_orders_of_torch(name, p, m, v):
    from torch.distributed.pipelining import schedules

    stub = types.SimpleNamespace(pp_group_size=p, _n_microbatches=m, n_local_stages=v,
                                 num_stages=p * v, microbatches_per_round=min(p, m))
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
    for rank, actions in enumerate(parallel.SCHEDULES[name](p, m, v)):
        theirs = getattr(schedules, TORCH[name])._calculate_single_rank_operations(stub, rank)
        assert words(actions) == " ".join(
            f"{kinds[a.computation_type.name]}{a.microbatch_index}{a.stage_index // p}"
            for a in theirs if a is not None)


@pytest.mark.parametrize("name, v", [("1f1b", 2), ("zero-bubble", 2)])
def test_chunks_that_a_schedule_does_not_have(name, v):
    with pytest.raises(ValueError, match=f"parallel.chunks = {v}: {name} has"):
        parallel.SCHEDULES[name](4, 8, v)


# ---------------------------------------------------------------------------------------------
# The simulator finds what is wrong


def actions(text):
    kinds = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    return [parallel.Action(kinds[w[0]], int(w[1])) for w in text.split()]


@pytest.mark.parametrize("rows, message", [
    (["F0 F1 B0 B1", "F1 F0 B0 B1"], None),  # another order is no mistake
    (["F0 B0 F1 B1", "F0 B0 F1 B1"], None),
    (["F0 F1 B0 B1", "F0 F1 B1"], r"stage 1 does \['forward'\] for microbatch 0"),
    (["F0 F1 B0 B1", "F0 F1 B0 B1 B1"], r"stage 1 does \['forward', 'backward', 'backward'\]"),
    (["F0 I0 W0", "F0 I0"], r"stage 1 does \['forward', 'input'\]"),
    (["F0 I0 W0", "F0 B0 W0"], r"stage 1 does \['forward', 'backward', 'weight'\]"),
    (["F0 F1", "F0"], r"stage 1 does \[\] for microbatch 1"),
    (["F1 B1", "F1 B1"], r"stage 0 does \[\] for microbatch 0"),
    (["F0 B0", "B0 F0"], r"rank 0 at action 1 .'backward', 0, 0. for .'gradient', 0, 1.; "
                         r"rank 1 at action 0 .'backward', 0, 0. for .'activation', 0, 1"),
    (["F0 W0 I0", "F0 I0 W0"], r"rank 0 at action 1 .'weight', 0, 0. for .'gradient', 0, 0"),
    (["F0 B0 F1 B1", "F0 F1 B0 B1"], r"rank 0 at action 1 .* rank 1 at action 1 .'forward', 1, 0"),
    (["F0 B0", "F0 I0 W0"], None),  # a rank may do both parts at once
])
def test_simulator_refuses_what_cannot_be_run(rows, message):
    schedule = [actions(row) for row in rows]
    if message is None:
        parallel.simulate(schedule)
        return rendezvous(parallel.transfers(schedule), 1)
    with pytest.raises(ValueError, match=message):
        parallel.simulate(schedule)


def test_a_chunk_that_no_rank_has():
    with pytest.raises(ValueError, match="does"):
        parallel.simulate([[parallel.Action("forward", 0), parallel.Action("forward", 0, 1)]], v=1)


def test_a_schedule_with_two_actions_swapped_is_right_or_refused():
    """Swapping neighbours of a right schedule gives one that is refused, or that runs."""
    refused = 0
    for rank, i in itertools.product(range(4), range(11)):
        schedule = [list(row) for row in parallel.interleaved(4, 3, 2)]
        row = schedule[rank]
        row[i], row[i + 1] = row[i + 1], row[i]
        try:
            programs = parallel.transfers(schedule, 2)
        except ValueError as error:
            refused += 1
            assert "cannot go on" in str(error)
        else:
            rendezvous(programs, 2)
    assert 0 < refused < 44


def test_times_by_hand():
    """Two ranks, two microbatches, a slow second stage, half a unit for each transfer."""
    played = parallel.simulate(parallel.one_forward_one_backward(2, 2), transfer=0.5,
                         cost=lambda kind, stage: (1 + stage) * (2 if kind == "backward" else 1))
    assert played.spans == [[(0, 1), (1, 2), (8, 10), (14, 16)],
                            [(1.5, 3.5), (3.5, 7.5), (7.5, 9.5), (9.5, 13.5)]]
    assert played.makespan == 16 and played.bubble == 1 - 18 / 32
    assert played.order == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (1, 3), (0, 3)]


@pytest.mark.parametrize("name, v", [("1f1b", 1), ("interleaved", 3)])
def test_no_deadlock_with_any_cost(name, v):
    """The order of transfers depends on the costs; that it never hangs does not. Zero is a cost."""
    for p, m, seed in itertools.product((2, 3, 5), (1, 4, 7), range(6)):
        schedule, draw = parallel.SCHEDULES[name](p, m, v), random.Random(seed)
        kinds = ("forward", "backward", "input", "weight")
        table = {(kind, s): draw.choice([0, 0, 0.1, 1, 7]) for kind in kinds for s in range(p * v)}
        table["forward", 0] = 1
        cost = functools.partial(lambda table, *key: table[key], table)
        rendezvous(parallel.transfers(schedule, v, cost), v)


def test_the_checker_finds_a_hanging_order():
    """What one would write first: receive just before use, send just after. Between two ranks in
    1F1B both then send, and wait for the other to receive."""
    programs = []
    for program in parallel.transfers(parallel.one_forward_one_backward(2, 4)):
        receives = {entry.action: entry for entry in program
                    if isinstance(entry, parallel.Transfer) and entry.op == "receive"}
        rest = [entry for entry in program if entry not in receives.values()]
        programs.append([x for entry in rest for x in ([receives[entry], entry] if
                         entry in receives else [entry])])
    with pytest.raises(AssertionError, match="send.*send"):
        rendezvous(programs, 1)


def short(program):
    """Forward and backward of microbatch 0: f0 b0; >f0 sends what the other rank's f0 needs."""
    return " ".join(words([entry])[:2] if isinstance(entry, parallel.Action) else
                    f"{'>' if entry.op == 'send' else '<'}{words([entry.action])[:2].lower()}"
                    for entry in program)


def test_transfers_by_hand():
    """Results are ready at times F0 1, F1 2, B0 4, B1 and F2 7, B2 10. Rank 1 posts for F1 before
    the action in which it is due, F0; rank 0 for B0 and B1 one action before that, F2."""
    first, second = parallel.transfers(parallel.one_forward_one_backward(2, 3))
    assert short(first) == "F0 >f0 F1 >f1 <b0 <b1 B0 F2 >f2 <b2 B1 B2"
    assert short(second) == "<f0 <f1 F0 B0 >b0 F1 B1 >b1 <f2 F2 B2 >b2"
    alone = parallel.transfers(parallel.interleaved(1, 1, 2), 2)[0]
    assert [entry[:2] for entry in alone if isinstance(entry, parallel.Transfer)] == [
        ("keep", parallel.Action("forward", 0, 1)), ("keep", parallel.Action("backward", 0, 0))]


@pytest.mark.parametrize("name, v, most", [("gpipe", 1, 3), ("1f1b", 1, 2), ("zero-bubble", 1, 2),
                                           ("interleaved", 3, 4)])
def test_few_buffers_are_posted_ahead(name, v, most):
    for p, m in itertools.product((2, 4, 8), (1, 5, 8, 16)):
        for program in parallel.transfers(parallel.SCHEDULES[name](p, m, v), v):
            posted = set()
            for entry in program:
                if isinstance(entry, parallel.Action):
                    posted.discard(entry)
                elif entry.op == "receive":
                    posted.add(entry.action)
                assert len(posted) <= most


# ---------------------------------------------------------------------------------------------
# Drawing, and where to cut the layers


@pytest.mark.parametrize("numbers", [["4"], ["4", "8", "2"], ["4", "x"]])
def test_what_cannot_be_drawn_is_said(numbers, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["parallel.py", "1f1b", *numbers])
    with pytest.raises(ValueError):
        parallel.main()


def test_draw():
    assert parallel.draw(parallel.one_forward_one_backward(2, 2)) == """\
rank 0   0 1 . .A0== .A1==
rank 1   . 0A0== 1A1== . .
time 9, bubble 33.3%; at most, by rank: [2, 1] forwards kept, [0, 0] weight parts due"""
    assert parallel.draw(parallel.interleaved(2, 1, 2), 2).splitlines()[:2] == [
        "rank 0   0 .b0 . . .B0== . .A0==", "rank 1   . 0 .b0B0== . .A0== . ."]
    wide = parallel.draw(parallel.one_forward_one_backward(4, 8)).splitlines()
    assert len(wide) == 5 and max(map(len, wide)) <= 100
    long = parallel.draw(parallel.gpipe(2, 11)).splitlines()[:2]
    assert [len(line) for line in long] == [8 + 3 * 36] * 2
    short = parallel.draw(parallel.zero_bubble(2, 3), 1,
                          lambda kind, stage: 0 if kind == "weight" else 1.4)
    assert {len(line) for line in short.splitlines()[:2]} == {8 + 2 * 11}  # 4 microbatches x 2.8


def test_balance_by_hand():
    assert parallel.balance([1, 1, 1, 1], 2) == [0, 2, 4]
    assert parallel.balance([3, 1, 1, 1, 1, 1, 4], 3) == [0, 2, 6, 7]
    assert parallel.balance([1] * 6 + [10], 4) == [0, 2, 4, 6, 7]  # the last decides
    assert parallel.balance([5], 1) == [0, 1]
    with pytest.raises(ValueError, match="= 3 stages, but only 2 layers"):
        parallel.balance([1, 2], 3)


def test_balance_against_every_cut():
    draw = random.Random(0)
    for _ in range(300):
        costs = [draw.choice([0, 0.1, 0.2, 0.3, 1, 2.5, 7]) for _ in range(draw.randint(1, 9))]
        stages = draw.randint(1, len(costs))
        cuts = [[0, *inner, len(costs)]
                for inner in itertools.combinations(range(1, len(costs)), stages - 1)]

        def parts(cut):
            sums = [0, *itertools.accumulate(costs)]  # noqa: B023
            return [sums[b] - sums[a] for a, b in zip(cut, cut[1:])]

        best = min((max(parts(cut)), sum(x * x for x in parts(cut))) for cut in cuts)
        found = parts(parallel.balance(costs, stages))
        assert len(found) == stages and max(found) == best[0]
        assert sum(x * x for x in found) == pytest.approx(best[1])


# ---------------------------------------------------------------------------------------------
# On real ranks


def traced(case, folder, naps):
    """Two steps, the second traced: what this rank did in what order, with the forwards it kept
    and the weight parts it owed after each action. `naps`: sleep at random in every block."""
    run = parity.prepare(case, folder)
    draw, trace, plain = random.Random(run.mesh.rank), [], parallel.act

    def sleepy(fn):
        def inner(*args):
            time.sleep(draw.random() * 0.01)
            return fn(*args)
        return inner

    def act(flow, action, following):
        result = plain(flow, action, following)
        trace.append((action, len(flow.saved), len(flow.due)))
        return result

    run.fns = [sleepy(fn) for fn in run.fns] if naps else run.fns
    run.loader.start(0)
    losses = []
    with unittest.mock.patch.object(parallel, "act", act):
        for _ in range(2):
            trace.clear()
            _, batches, pending = train.next_batch(run, False)
            losses.append(train.train_step(run, batches, pending.wait()[0])[0].item())
    return trace, losses


@pytest.mark.parametrize("name, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2),
                                     ("zero-bubble", 1)])
def test_ranks_do_what_is_simulated(name, v, world, tokens):
    """The order of actions, the forwards kept and the weight parts due; with random sleeps on all
    ranks it ends, with the same loss."""
    case = test_parity.on_layout(
        test_parity.MODELS["llama"] | {"model.n_layer": 4 * v, "parallel.schedule": name,
                                       "parallel.chunks": v, "rounds": 6}, {"pp": 4})
    schedule = parallel.SCHEDULES[name](4, 6, v)
    played = parallel.simulate(schedule, v)
    losses = []
    for naps in (False, True):
        for rank, (trace, loss) in enumerate(world(4).run(traced, case, str(tokens), naps)):
            assert [action for action, *_ in trace] == schedule[rank]
            assert max(live for _, live, _ in trace) == played.live[rank]
            assert max(due for *_, due in trace) == played.due[rank]
            losses.append(loss)
    assert all(loss == losses[0] for loss in losses)


@pytest.mark.parametrize("name, v", [("interleaved", 2), ("zero-bubble", 1)])
def test_outputs_are_given_back_when_they_are_sent(name, v, world, tokens):
    """Of a stage's output only the graph stays. (Half of them at least: when a send has ended is
    not in our hands.)"""
    case = test_parity.on_layout(
        test_parity.MODELS["llama"] | {"model.n_layer": 2 * v, "parallel.schedule": name,
                                       "parallel.chunks": v, "rounds": 6}, {"pp": 2})
    sizes = world(2).run(output_bytes, case, str(tokens))[0]
    assert len(sizes) == 6 * v and sizes.count(0) >= 3 * v, sizes


def output_bytes(case, folder):
    """Bytes of the last output of each chunk that is not the last stage, at each backward."""
    run, sizes, plain = parity.prepare(case, folder), [], parallel.backward

    def spy(flow, kind, j, c):
        if not flow.chunks[c].last:
            sizes.append(flow.saved[j, c][-1][1].untyped_storage().nbytes())
        return plain(flow, kind, j, c)

    def slow(fn):
        def inner(*args):
            time.sleep(0.01)  # so that what watches the sends has its turn
            return fn(*args)
        return inner

    run.fns = [slow(fn) for fn in run.fns]
    run.loader.start(0)
    with unittest.mock.patch.object(parallel, "backward", spy):
        _, batches, pending = train.next_batch(run, False)
        train.train_step(run, batches, pending.wait()[0])
    return sizes


# What stages exchange says what it is: the value of an activation or gradient is a code of its
# stage, microbatch and direction, and whoever gets it checks it.


def code(stage, j, way):
    return float(way * (1000 * (stage + 1) + j))


class Probe(torch.autograd.Function):
    """A stage without a layer: checks what comes in, forward and backward, and sends the next."""

    @staticmethod
    def forward(ctx, x, weight, size, stage, j, last):
        ctx.about = stage, j, last, size
        assert x is None or (x == code(stage - 1, j, 1)).all(), (stage, j, x)
        return weight.sum() * 0 if last else torch.full((size,), code(stage, j, 1))

    @staticmethod
    def backward(ctx, grad):
        stage, j, last, size = ctx.about
        assert last or (grad == code(stage + 1, j, -1)).all(), (stage, j, grad)
        back = torch.full((size,), code(stage, j, -1)) if stage else None
        return back, torch.ones(1), None, None, None, None


def exchange(name, v, size):
    """Programs of several numbers of microbatches, with messages that really block a sender and a
    random sleep in every action."""
    p = torch.distributed.get_world_size()
    mesh, draw = parity.mesh_of(parallel.layout_of(p, pp=p)), random.Random(7 + p)
    stages = range(mesh.rank, p * v, p)
    with torch.device("meta"):
        modules = [torch.nn.Linear(1, 1, bias=False) for _ in stages]
    blocks = parallel.Blocks([(f"s{s}", m) for s, m in zip(stages, modules)], mesh, torch.float32)

    def stage_fn(s, module):
        def fn(x, j, later):
            time.sleep(draw.random() * 0.004)
            return Probe.apply(x, module.weight.view(1), size, s, j, s == p * v - 1)
        return fn

    fns = [stage_fn(s, m) for s, m in zip(stages, modules)]
    chunks = [parallel.Chunk(range(c, c + 1), s == p * v - 1) for c, s in enumerate(stages)]
    for m in (1, 2, 3, 4, 5, 8):
        blocks.begin()
        program = parallel.program(p, mesh.rank, name, m, v)
        parallel.run(program, fns, blocks, list(range(m)), chunks=chunks,
                     empty=lambda j: torch.empty(size))
        assert all((module.weight.main_grad == m).all() for module in modules)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2),
                                     ("zero-bubble", 1), ("gpipe", 2)])
def test_messages_arrive_where_they_are_expected(name, v, p, world):
    world(p).run(exchange, name, v, 500_000)
