"""Context parallelism: ring and Ulysses attention against one process' dense softmax, what each
step of the ring computes, and what moves."""

import math
import time

import numpy as np
import parity
import pytest
import torch
import torch.nn.functional as F

import kernels
import parallel
from parallel import attention_steps, chunks_of

quick = pytest.mark.quick
CPU = torch.device("cpu")
MASKS = {"causal": {}, "documents": {"documents": True}, "window": {"window": 5},
         "both": {"documents": True, "window": 7}, "few": {"window": 1}}


def document_starts(B, T, seed=0):
    """lo [B, T] of documents of random lengths, from 1 to about T / 2."""
    rng, lo = np.random.default_rng(seed), np.zeros((B, T), np.int32)
    for row in lo:
        at = 0
        while at < T:
            n = int(rng.integers(1, max(T // 2, 2)))
            row[at : at + n], at = at, at + n
    return lo


def held(c, rank, mode, T):
    """The positions that a rank holds."""
    chunks, n = chunks_of(c, rank, mode)
    return np.concatenate([np.arange(i * (T // n), (i + 1) * (T // n)) for i in chunks])


def mask_of(T, lo, window):
    """[B or 1, T, T]: does query i see key j?"""
    i, j = np.arange(T)[:, None], np.arange(T)
    seen = (j <= i) & (window is None or j > i - window)
    return seen[None] if lo is None else seen & (j >= lo[:, :, None])


def sdpa(q, k, v, mask):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    mask = torch.from_numpy(np.ascontiguousarray(mask))[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


# ---------------------------------------------------------------------------------------------
# The steps: pure functions


def pairs_of(step, mine, theirs, B):
    """[B, T, T] of the (query, key) pairs that a step computes, at their global positions."""
    n = mine.max() + 1, theirs.max() + 1
    out = np.zeros((B, max(n), max(n)), int)
    q, k = mine[step.q], theirs[step.k]
    like = torch.empty(B, len(q), 1, 1), torch.empty(B, len(k), 1, 1)
    lo, hi = (x.expand(B, -1).numpy() for x in kernels.limits(*like, step.lo, step.hi))
    for b in range(B):
        for i, (first, end) in enumerate(zip(lo[b], hi[b])):
            out[b, q[i], k[first:end]] += 1
            if step.bounds and first < end:
                assert step.bounds[0][i] <= first and end <= step.bounds[1][i]
    return out


@quick
@pytest.mark.parametrize("c, mode", [(1, "ring"), (2, "ring"), (3, "ring"), (4, "ring"),
                                     (8, "ring"), (2, "ulysses"), (4, "ulysses")])
@pytest.mark.parametrize("mask", MASKS)
def test_steps_compute_each_pair_once(c, mode, mask):
    """The union over ranks and steps of what is computed is the mask; a step is left out exactly
    if no query sees a key of it; nothing outside the bounds is seen."""
    T, B, window = 48, 3, MASKS[mask].get("window")
    lo = document_starts(B, T) if "documents" in MASKS[mask] else None
    seen = None if lo is None else np.stack((lo.min(0), lo.max(0)))
    whole = np.broadcast_to(mask_of(T, lo, window), (B, T, T))
    total = np.zeros((B, T, T), int)
    for rank in range(c if mode == "ring" else 1):
        own = held(c, rank, mode, T)
        mine = None if lo is None else torch.from_numpy(lo[:, own] if mode == "ring" else lo)
        steps = attention_steps(T, c, rank, mode, CPU, mine, seen, window)
        assert len(steps) == (c if mode == "ring" else 1)
        for other, step in enumerate(steps):
            n = c if mode == "ring" else 1
            where = [held(n, r, "ring" if n > 1 else mode, T) for r in (rank, other)]
            needed = whole[:, where[0]][:, :, where[1]].any()
            assert (step is not None) == needed
            if step is not None:
                part = pairs_of(step, *where, B)
                total[:, : part.shape[1], : part.shape[2]] += part
    assert np.array_equal(total, whole)


@quick
@pytest.mark.parametrize("c", [2, 3, 4, 8])
def test_causal_work_is_equal(c):
    """Pairs that each rank computes in each step: those of its own keys, then always the same."""
    T = 16 * c
    n = T // (2 * c)
    for rank in range(c):
        steps = attention_steps(T, c, rank, "ring", CPU)
        work = [int(pairs_of(s, held(c, rank, "ring", T), held(c, r, "ring", T), 1).sum())
                for r, s in enumerate(steps)]
        assert work.pop(rank) == n * (2 * n + 1)
        assert work == [2 * n * n] * (c - 1)
        total = parallel.attention_work(T, c, "ring", np.zeros((1, T), int))[rank]
        assert total == n * (2 * n + 1) + sum(work)


@quick
def test_work_of_documents_is_counted():
    lo = document_starts(2, 32, 3)
    for window in (None, 4):
        whole = mask_of(32, lo, window)
        want = [whole[:, held(4, rank, "ring", 32)].sum() for rank in range(4)]
        assert parallel.attention_work(32, 4, "ring", lo, window) == want
    assert parallel.attention_work(32, 4, "ulysses", lo) == [mask_of(32, lo, None).sum() / 4] * 4


@quick
@pytest.mark.parametrize("gap", [0, 5, -5, 100, -100, 1000, -1000])
def test_merge_of_far_apart_parts(gap):
    """Scores that differ by much: no overflow, and the same as one softmax; of nothing, nothing."""
    generator = torch.Generator().manual_seed(1)
    s, v = (torch.randn(2, 4, 3, 6, generator=generator, dtype=torch.float64) for _ in "sv")
    s[..., 3:] += gap
    s[0, 0, 0, :3] = s[0, 1, 1, 3:] = s[1, 2, 2, :] = -math.inf  # [B, H, T, keys]
    value = v.permute(0, 2, 1, 3)  # [B, T, H, keys]: one channel

    def part(a, b):
        p = s[..., a:b].softmax(-1).nan_to_num(0)
        o = (p * v[..., a:b]).sum(-1, keepdim=True).transpose(1, 2)
        return o, s[..., a:b].logsumexp(-1)

    (o, lse), want = part(0, 3), part(0, 6)
    parallel.merge_lse(o, lse, *part(3, 6))
    assert value.isfinite().all() and o.isfinite().all()
    torch.testing.assert_close(o, want[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want[1], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------
# The collectives


def tensors(T, heads, n_kv, d, B, dtype):
    generator = torch.Generator().manual_seed(T)
    return [torch.randn(B, T, h, d, generator=generator, dtype=torch.float64).to(dtype)
            for h in (heads, n_kv, n_kv, heads)]


def attend_on(c, mode, T, heads, n_kv, d, B, mask, dtype=torch.float64, times=1):
    """On each rank: output and gradients of its part of the sequence, and the ledger."""
    mesh = parity.mesh_of(parallel.layout_of(c, cp=c))
    lo = document_starts(B, T) if mask.get("documents") else None
    seen = None if lo is None else np.stack((lo.min(0), lo.max(0)))
    whole = tensors(T, heads, n_kv, d, B, dtype)
    q, k, v, do = (parallel.cut_sequence(x, mesh, mode) for x in whole)
    if lo is not None:
        lo = torch.from_numpy(lo)
        lo = parallel.cut_sequence(lo, mesh, mode) if mode == "ring" else lo
    steps = attention_steps(T, c, mesh.coord["cp"], mode, CPU, lo, seen, mask.get("window"))
    functions = kernels.attention_forward, kernels.attention_backward
    results = []
    for _ in range(times):
        mesh.ledger.clear()
        q_, k_, v_ = (x.detach().requires_grad_() for x in (q, k, v))
        if mode == "ring":
            o = parallel.ring_attention(functions, q_, k_, v_, steps, mesh)
        else:
            attention = lambda *x: kernels.attention(*x, *steps[0][2:])[0]  # noqa: E731
            o = parallel.ulysses(attention, q_, k_, v_, mesh)
        forward = {key: list(value) for key, value in mesh.ledger.items()}
        results.append([o.detach(), *torch.autograd.grad(o, (q_, k_, v_), do)])
        assert all(x.dtype == dtype for x in results[-1])
    for again in results[1:]:  # bit-identical
        assert all(torch.equal(a, b) for a, b in zip(again, results[0]))
    return results[0], forward, mesh.ledger


def truth_of(T, heads, n_kv, d, B, mask, dtype=torch.float64):
    q, k, v, do = (x.to(torch.float64) for x in tensors(T, heads, n_kv, d, B, dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    lo = document_starts(B, T) if mask.get("documents") else None
    o = sdpa(*inputs, mask_of(T, lo, mask.get("window")))
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def check_attention(world, c, mode, mask, T, heads, n_kv, d=4, B=2):
    want = truth_of(T, heads, n_kv, d, B, MASKS[mask])
    norm = math.sqrt(sum(float(g.square().sum()) for g in want[1:]))
    results = world(c).run(attend_on, c, mode, T, heads, n_kv, d, B, MASKS[mask], torch.float64, 2)
    for rank, (got, forward, ledger) in enumerate(results):
        where = held(c, rank, mode, T)
        for name, a, b in zip(("o", "dq", "dk", "dv"), got, want):
            note = parity.agree(name, a, b[:, where], None if name == "o" else norm)
            assert note is None, (rank, note)
        check_traffic(forward, ledger, c, mode, B * T // c * d * 8, heads, n_kv)


def check_traffic(forward, ledger, c, mode, head, heads, n_kv):
    """`head`: bytes of a rank's part of one head. Ring, with Kc = Vc = n_kv head: forward (c-1)(Kc
    + Vc), backward that and (c-1)(dK + dV). Ulysses: q, k, v, o of (c-1)/c each, forward and
    backward, key heads counted after they were copied."""
    if mode == "ring":
        once = [c - 1, (c - 1) * 2 * n_kv * head]
        assert forward == {("cp", "shift (keys)"): once}
        assert ledger == {("cp", "shift (keys)"): [2 * x for x in once],
                          ("cp", "shift (gradients of keys)"): once}
    else:
        once = [4, (2 * heads + 2 * max(n_kv, c)) * head * (c - 1) // c]
        assert forward == {("cp", "all_to_all"): once}
        assert ledger == {("cp", "all_to_all"): [2 * x for x in once]}


@pytest.mark.parametrize("c", [2, 3, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_ring_is_one_process(c, mask, world):
    check_attention(world, c, "ring", mask, T=12 * c, heads=4, n_kv=2)


@pytest.mark.parametrize("c, heads, n_kv", [(2, 4, 2), (2, 2, 1), (4, 4, 2), (4, 8, 8), (3, 6, 3)])
@pytest.mark.parametrize("mask", ["causal", "both"])
def test_ulysses_is_one_process(c, heads, n_kv, mask, world):
    check_attention(world, c, "ulysses", mask, T=8 * c, heads=heads, n_kv=n_kv)


@pytest.mark.full
@pytest.mark.parametrize("c", range(2, 9))
def test_ring_of_every_size(c, world):
    """Lengths (2c divides T), heads and masks; long enough to leave the short path on a rank."""
    for mask in MASKS:
        for T in (2 * c, 6 * c, 70 * c):
            for heads, n_kv in ((1, 1), (6, 2), (8, 8), (12, 4)):
                check_attention(world, c, "ring", mask, T, heads, n_kv, B=1 + T % 3)
    check_attention(world, c, "ring", "causal", 2 * c * (kernels.SHORT // 2 + 1), 2, 1, B=1)


def sleepy(layout, times):
    """The ring many times, ranks late at random; a second ring has values twice as large. Returns
    where this rank is, output and gradients."""
    mesh = parity.mesh_of(parallel.layout_of(math.prod(layout.values()), **layout))
    T, c, random = 8, mesh.size["cp"], np.random.default_rng(mesh.rank)
    steps = attention_steps(T, c, mesh.coord["cp"], "ring", CPU)
    q, k, v, do = (parallel.cut_sequence(x, mesh, "ring")
                   for x in tensors(T, 2, 1, 4, 1, torch.float64))
    v = v * (1 + max(mesh.coord[axis] for axis in ("pp", "dp", "tp")))
    found = []
    for _ in range(times):
        time.sleep(random.choice([0, 0, 0.01]))
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        functions = kernels.attention_forward, kernels.attention_backward
        o = parallel.ring_attention(functions, *inputs, steps, mesh)
        found.append([o.detach(), *torch.autograd.grad(o, inputs, do)])
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0]))
    return mesh.coord, found[0]


@pytest.mark.parametrize("layout", [{"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "cp": 2}],
                         ids=str)
def test_rings_within_a_larger_world(layout, world):
    """Neighbours are those of the group: rings side by side do not mix, whoever is late. Twice the
    values: twice the output and gradients, but for that of the values, to the bit."""
    alone = world(2).run(sleepy, {"cp": 2}, 1)
    for coord, got in world(4).run(sleepy, layout, 25):
        twice = 1 + max(coord[axis] for axis in ("pp", "dp", "tp"))
        want = [x * n for x, n in zip(alone[coord["cp"]][1], (twice, twice, twice, 1))]
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_bfloat16_error_does_not_grow_with_the_ring(mask, world):
    """Of outputs and gradients, beside one process in bfloat16: at most 1.25 times its error, for
    every c (parts are rounded once each, and merged and summed in float32)."""
    shape = (64, 4, 2, 16, 2, MASKS[mask])
    want = truth_of(*shape, torch.bfloat16)
    errors = {}
    for c in (1, 2, 4, 8):
        if c == 1:
            parts = [alone(*shape)]
        else:
            results = world(c).run(attend_on, c, "ring", *shape, torch.bfloat16)
            parts = [got for got, _, _ in results]
        errors[c] = [rms(parts, c, n, x) for n, x in enumerate(want)]
    for c in (2, 4, 8):
        for name, e, alone_ in zip(("o", "dq", "dk", "dv"), errors[c], errors[1]):
            assert e <= 1.25 * alone_, (c, name, e / alone_)


def alone(T, heads, n_kv, d, B, mask):
    q, k, v, do = tensors(T, heads, n_kv, d, B, torch.bfloat16)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    lo = torch.from_numpy(document_starts(B, T)) if mask.get("documents") else None
    o = kernels.attention(*inputs, lo)[0]
    return [o.detach(), *torch.autograd.grad(o, inputs, do)]


def rms(parts, c, n, want):
    """Root of the mean squared error of the n-th result, over all ranks."""
    T = want.shape[1]
    square = sum((part[n].double() - want[:, held(c, r, "ring", T)]).square().sum()
                 for r, part in enumerate(parts))
    return float((square / want.numel()).sqrt())


@quick
def test_the_picture_of_a_ring(capsys, monkeypatch):
    """Two ranks by hand. Four: in step i rank r has the keys of chunks r-i and 7-(r-i). Of all
    pairs a chunk of queries meets, in one step, each one before it whole and itself by half."""
    assert parallel.draw_ring(2) == """\
                 step 0 step 1
rank 0  chunk 0  \\..-   .--.
rank 0  chunk 3  #..\\   .##.
rank 1  chunk 1  .\\-.   #..-
rank 1  chunk 2  .#\\.   #..-
pairs, by rank   2 2    2 2"""
    monkeypatch.setattr("sys.argv", ["parallel.py"])
    parallel.main()
    shown = capsys.readouterr().out
    assert "rank 6  rank 7" in shown and "bubble 33.3%" in shown and parallel.draw_ring(4) in shown
    assert len(shown.splitlines()) <= 30 and max(map(len, shown.splitlines())) <= 100
    rows = [line[17:].split() for line in parallel.draw_ring(4).splitlines()[1:-1]]
    queries = [q for rank in range(4) for q in (rank, 7 - rank)]
    met = {}
    for at, (q, steps) in enumerate(zip(queries, rows)):
        for i, marks in enumerate(steps):
            other = (at // 2 - i) % 4
            assert [k for k, mark in enumerate(marks) if mark != "."] == [other, 7 - other]
            for k, mark in enumerate(marks):
                if mark not in ".-":
                    met.setdefault((q, k), []).append(mark)
    assert met == {(q, k): ["\\" if q == k else "#"] for q in range(8) for k in range(q + 1)}
    assert parallel.draw_ring(4).splitlines()[-1].split()[3:] == ["2"] * 16
