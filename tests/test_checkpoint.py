"""Boxes by brute force, every damage by hand, every crash point by a process that dies there."""

import errno
import itertools
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
import torch
from pool import Script

import checkpoint
from checkpoint import Box, Piece

ROOT = pathlib.Path(__file__).parent.parent
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.uint8, torch.bool]


# Ranks are threads here, `agree` is two barriers around a list of what went wrong.


class Ranks:
    def __init__(self, world):
        self.world, self.notes, self.barrier = world, [None] * world, threading.Barrier(world)

    def run(self, fn):
        """fn(rank, agree) on every rank; [what it returned or raised]."""
        out = [None] * self.world

        def agree(rank, error):
            self.notes[rank] = error
            self.barrier.wait(20)
            bad = [f"rank {r}: {e}" for r, e in enumerate(self.notes) if e is not None]
            self.barrier.wait(20)
            if bad:
                raise RuntimeError(bad[0])

        def body(rank):
            try:
                out[rank] = fn(rank, lambda error: agree(rank, error))
            except Exception as e:
                out[rank] = e

        threads = [threading.Thread(target=body, args=(r,)) for r in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
            assert not t.is_alive()
        return out


def save_all(root, step, pieces_of, world, meta=None):
    """Save from `world` ranks; rank r holds pieces_of(r)."""
    out = Ranks(world).run(lambda r, agree: checkpoint.save(
        root, step, pieces_of(r), {"step": step} if meta is None else meta, r, world, agree))
    for result in out:
        if isinstance(result, Exception):
            raise result
    return out[0]


def random_tensor(shape, dtype, seed):
    """All bit patterns that the dtype has, NaNs and infinities too (bool: 0 and 1)."""
    rng = np.random.default_rng(seed)
    n = math.prod(shape) * dtype.itemsize
    data = rng.integers(0, 2 if dtype == torch.bool else 256, n, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def bits(t):
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state(seed=0):
    shapes = {"a": (7, 5), "b": (3,), "c": (), "d": (2, 3, 4), "e": (1, 6, 1), "f": (11, 3)}
    out = {f"param/{k}": random_tensor(s, torch.float32, seed + i)
           for i, (k, s) in enumerate(shapes.items())}
    for i, dtype in enumerate(DTYPES):
        out[f"typed/{dtype}"] = random_tensor((5, 3), dtype, seed + 50 + i)
    return out


def flat_pieces(tensors, rank, world, empty=False, cuts=None):
    """All tensors of one dtype laid end to end, cut into unequal slices: a slice ends anywhere."""
    pieces = []
    for dtype in sorted({t.dtype for t in tensors.values()}, key=str):
        chosen = {k: t for k, t in tensors.items() if t.dtype == dtype}
        total = sum(t.numel() for t in chosen.values())
        ends = cuts or [total * (r * r + r) // (world * world + world) for r in range(world + 1)]
        flat, at = torch.cat([t.reshape(-1) for t in chosen.values()]), 0
        for name, t in chosen.items():
            a, b = (min(max(e - at, 0), t.numel()) for e in (ends[rank], ends[rank + 1]))
            data = torch.zeros(b - a, dtype=dtype) if empty else flat[at + a : at + b]
            pieces.append(Piece(name, data, a, tuple(t.shape), (0,) * t.dim(), tuple(t.shape)))
            at += t.numel()
    return pieces


def whole(tensors, dtype=None):
    """Pieces for a rank that wants everything."""
    return [Piece(k, torch.zeros(t.numel(), dtype=dtype or t.dtype), 0, tuple(t.shape),
                  (0,) * t.dim(), tuple(t.shape)) for k, t in tensors.items()]


def assert_holds(path, tensors, **options):
    pieces = whole(tensors)
    checkpoint.load(path, pieces, **options)
    for p in pieces:
        assert bits(p.data) == bits(tensors[p.name]), p.name


def simple(root, step, value=None, world=2):
    """A checkpoint of two small tensors whose values tell the step."""
    tensors = {"param/x": torch.full((4, 3), float(step if value is None else value)),
               "param/y": torch.arange(5.0) + step}
    return save_all(root, step, lambda r: flat_pieces(tensors, r, world), world), tensors


# Boxes


SHAPES = [(), (1,), (5,), (0,), (3, 4), (4, 1), (1, 4), (1, 1), (3, 0), (2, 3, 4), (3, 1, 2),
          (1, 3, 2), (2, 2, 1), (2, 3, 2, 2), (1, 2, 1, 3), (2, 1, 3, 2)]


@pytest.mark.quick
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_hold_every_slice_of_every_shape(shape):
    index = np.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(index.size + 1), 2):
        got = checkpoint.boxes(start, stop, shape)
        assert len(got) <= max(2 * len(shape) - 1, 1)
        seen = []
        for at, box in got:
            assert at == len(seen)
            part = index[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape))]
            assert part.shape == box.shape and part.size
            seen += part.reshape(-1).tolist()
        assert seen == list(range(start, stop))


@pytest.mark.quick
def test_boxes_refuse_what_is_no_slice():
    for start, stop, shape in [(-1, 2, (3,)), (2, 1, (3,)), (0, 4, (3,)), (0, 2, ()),
                               (0, 1, (0, 3))]:
        with pytest.raises(ValueError, match="not a slice"):
            checkpoint.boxes(start, stop, shape)


@pytest.mark.quick
def test_a_cover_is_recognized():
    """All sets of up to 3 boxes in a 2 x 3 matrix, against counting elements."""
    sides = [[(o, n) for o in range(d) for n in range(1, d - o + 1)] for d in (2, 3)]
    every = [((a, b), (m, n)) for (a, m), (b, n) in itertools.product(*sides)]
    good = 0
    for k in (0, 1, 2, 3):
        for chosen in itertools.combinations_with_replacement(every, k):
            count = np.zeros((2, 3), int)
            for (a, b), (m, n) in chosen:
                count[a : a + m, b : b + n] += 1
            entry = {"shape": [2, 3], "boxes": [[0, o, s, 0, 0, 0] for o, s in chosen]}
            try:
                checkpoint.check_cover("x", entry, "here")
                ok = True
            except ValueError:
                ok = False
            assert ok == (count == 1).all(), chosen
            good += ok
    assert good > 5
    checkpoint.check_cover("x", {"shape": [], "boxes": [[0, [], [], 0, 4, 0]]}, "here")
    for n in (0, 2):
        with pytest.raises(ValueError, match="exactly once"):
            checkpoint.check_cover("x", {"shape": [], "boxes": [[0, [], [], 0, 4, 0]] * n}, "here")


# Any layout to any other


@pytest.mark.quick
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_every_number_of_ranks_loads_what_any_other_saved(tmp_path, writers):
    tensors = state(writers)
    path = save_all(tmp_path, 12, lambda r: flat_pieces(tensors, r, writers), writers)
    assert path == tmp_path / "step_000000012"
    assert checkpoint.read_meta(path) == {"step": 12}
    assert_holds(path, tensors)
    assert_holds(path, tensors, verify=False)
    for readers in (1, 2, 3, 5):
        for rank in range(readers):
            mine = flat_pieces(tensors, rank, readers, empty=True)
            checkpoint.load(path, mine, verify=rank % 2 == 0)
            for got, want in zip(mine, flat_pieces(tensors, rank, readers)):
                assert bits(got.data) == bits(want.data), (got.name, readers, rank)


def tp_pieces(full, dim, tp, dp, rank, data=None):
    """Rank (d, t) of dp x tp: a slice of dimension `dim` padded to a multiple of tp, of which it
    holds the d-th part of the flattened elements."""
    d, t = divmod(rank, tp)
    each = -(-full.shape[dim] // tp)
    shape = [*full.shape]
    shape[dim] = each * tp
    padded = torch.full(shape, -7.0)
    padded[tuple(slice(n) for n in full.shape)] = full
    local = padded.narrow(dim, t * each, each).contiguous()
    a, b = local.numel() * d // dp, local.numel() * (d + 1) // dp
    offset = [0] * full.dim()
    offset[dim] = t * each
    data = local.view(-1)[a:b] if data is None else torch.full((b - a,), data)
    return Piece("param/w", data, a, tuple(local.shape), tuple(offset), tuple(full.shape))


@pytest.mark.quick
@pytest.mark.parametrize("dim", [0, 1])
def test_a_cut_with_padding(tmp_path, dim):
    full = torch.arange(35.0).view(5, 7) + 1
    layouts = [(1, 1), (2, 1), (4, 1), (2, 3), (3, 2), (1, 3)]
    for step, (tp, dp) in enumerate(layouts):
        path = save_all(tmp_path, step,
                        lambda r, tp=tp, dp=dp: [tp_pieces(full, dim, tp, dp, r)], tp * dp)
        stored = sum(b[4] for b in checkpoint.read_index(path)["tensors"]["param/w"]["boxes"])
        assert stored == 35 * 4  # padding is not saved
        assert_holds(path, {"param/w": full})
        for tp2, dp2 in layouts:
            for rank in range(tp2 * dp2):
                want = tp_pieces(full, dim, tp2, dp2, rank)
                got = tp_pieces(full, dim, tp2, dp2, rank, data=-7.0)
                checkpoint.load(path, [got])  # padding stays as it is
                assert torch.equal(got.data, want.data)


@pytest.mark.quick
def test_load_converts_dtype_and_reads_in_place(tmp_path):
    path, tensors = simple(tmp_path, 3)
    for dtype in (torch.float64, torch.bfloat16):
        pieces = whole(tensors, dtype)
        where = [p.data.data_ptr() for p in pieces]
        checkpoint.load(path, pieces)
        assert [p.data.data_ptr() for p in pieces] == where
        for p in pieces:
            assert torch.equal(p.data, tensors[p.name].view(-1).to(dtype))
    weight = torch.nn.Parameter(torch.zeros(12))
    checkpoint.load(path, [Piece("param/x", weight, 0, (4, 3), (0, 0), (4, 3))])
    assert torch.equal(weight, torch.full((12,), 3.0))


@pytest.mark.quick
def test_load_names_what_does_not_fit(tmp_path):
    path, tensors = simple(tmp_path, 1)
    with pytest.raises(ValueError, match=r"not hold 2 of 4 tensors: param/u, param/v$"):
        checkpoint.load(path, whole(tensors | {"param/u": torch.ones(2), "param/v": torch.ones(1)}))
    pieces = whole({"param/x": torch.zeros(3, 4)})
    with pytest.raises(ValueError, match=r"param/x is \[4, 3\], but \[3, 4\] is wanted"):
        checkpoint.load(path, pieces)
    assert not pieces[0].data.any()
    with pytest.raises(ValueError, match="no slice"):
        checkpoint.load(path, [Piece("param/x", torch.zeros(4, 3), 0, (4, 3), (0, 0), (4, 3))])
    with pytest.raises(ValueError, match="no slice"):
        checkpoint.load(path, [Piece("param/x", torch.zeros(12), 0, (4, 3), (0,), (4, 3))])
    with pytest.raises(ValueError, match="not a slice"):
        checkpoint.load(path, [Piece("param/x", torch.zeros(12), 1, (4, 3), (0, 0), (4, 3))])
    with pytest.raises(ValueError, match="no index.json"):
        checkpoint.load(tmp_path / "nowhere", whole(tensors))


@pytest.mark.quick
def test_an_index_with_a_hole_is_not_loaded(tmp_path):
    path, tensors = simple(tmp_path, 1)
    index = json.loads((path / "index.json").read_text())
    del index["tensors"]["param/x"]["boxes"][0]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"param/x: boxes of .* cover .* \[4, 3\] exactly once"):
        checkpoint.load(path, whole(tensors))


@pytest.mark.quick
def test_only_the_needed_bytes_are_read(tmp_path):
    """Outside of what is asked for the file is spoilt: without verify the load does not notice."""
    full = torch.arange(4096.0 * 8).view(4096, 8)
    path = save_all(tmp_path, 1, lambda r: flat_pieces({"param/w": full}, r, 1), 1)
    file = path / "rank_00000.safetensors"
    start = checkpoint.read_index(path)["tensors"]["param/w"]["boxes"][0][3]
    flip(file, start + 100 * 8 * 4)
    mine = Piece("param/w", torch.zeros(80), 8 * 200, (4096, 8), (0, 0), (4096, 8))
    checkpoint.load(path, [mine], verify=False)
    assert torch.equal(mine.data, torch.arange(80.0) + 1600)
    with pytest.raises(ValueError, match=r"rank_00000.safetensors is damaged.*w\[0:4096,0:8\]"):
        checkpoint.load(path, [mine])
    with pytest.raises(ValueError, match="damaged"):  # whole boxes are always checked
        checkpoint.load(path, whole({"param/w": full}), verify=False)


# What a save refuses


@pytest.mark.quick
def test_meta_that_json_would_change_is_refused(tmp_path):
    meta = {"lr": 0.1, "n": 2**60, "none": None, "list": [1, 2.5], "config": {"a": True}, "s": "ä"}
    tensors = {"param/x": torch.ones(2)}
    path = save_all(tmp_path, 1, lambda r: flat_pieces(tensors, r, 1), 1, meta)
    assert checkpoint.read_meta(path) == meta
    for bad in ({"t": (1, 2)}, {"k": {1: 2}}, {"x": float("nan")}, {"x": float("inf")}):
        with pytest.raises(RuntimeError, match="JSON"):
            save_all(tmp_path, 2, lambda r: flat_pieces(tensors, r, 1), 1, bad)
    assert checkpoint.checkpoints(tmp_path) == [(1, path)]


@pytest.mark.quick
def test_boxes_that_overlap_or_leave_a_hole_are_refused_on_all_ranks(tmp_path):
    full = {"param/w": torch.arange(12.0).view(3, 4)}
    for cuts in ([0, 5, 11], [1, 5, 12]):  # a hole at the end, at the beginning
        def fn(r, agree, cuts=cuts):
            return checkpoint.save(tmp_path, 1, flat_pieces(full, r, 2, cuts=cuts), {}, r, 2, agree)
        out = Ranks(2).run(fn)
        assert ["exactly once" in str(e) for e in out] == [True, True]
    for pieces in ([0, 6], [0, 12]), ([0, 6], [5, 12]), ([0, 6], [0, 6]):
        def fn(r, agree, pieces=pieces):
            a, b = pieces[r]
            mine = [Piece("param/w", full["param/w"].view(-1)[a:b], a, (3, 4), (0, 0), (3, 4))]
            return checkpoint.save(tmp_path, 1, mine, {}, r, 2, agree)
        assert ["exactly once" in str(e) for e in Ranks(2).run(fn)] == [True, True]
    assert checkpoint.latest(tmp_path, lambda line: None) is None
    assert not list(tmp_path.rglob("*.safetensors"))  # a refused save gives the space back


@pytest.mark.quick
def test_ranks_that_disagree_about_a_tensor_are_refused(tmp_path):
    def fn(r, agree):
        data = torch.zeros(4, dtype=[torch.float32, torch.float64][r])
        mine = [Piece("param/w", data, 4 * r, (8,), (0,), (8,))]
        return checkpoint.save(tmp_path, 1, mine, {}, r, 2, agree)
    assert ["param/w is F64" in str(e) for e in Ranks(2).run(fn)] == [True, True]
    twice = Piece("param/w", torch.zeros(4), 0, (4,), (0,), (4,))
    with pytest.raises(RuntimeError, match=r"param/w\[0:4\] is given twice"):
        save_all(tmp_path, 1, lambda r: [twice, twice], 1)
    with pytest.raises(RuntimeError, match="no slice of"):
        save_all(tmp_path, 1, lambda r: [twice._replace(data=torch.zeros(4, dtype=torch.int8))], 1)


# Damage (each found, named and passed over)


def flip(file, at):
    with open(file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 16]))


def truncate(file, part):
    os.truncate(file, int(file.stat().st_size * part))


DAMAGE = {
    "empty": (lambda p: truncate(p / "rank_00001.safetensors", 0), "00001.safetensors has 0 b"),
    "half": (lambda p: truncate(p / "rank_00000.safetensors", 0.5), "rank_00000.safetensors has"),
    "longer": (lambda p: os.truncate(p / "rank_00000.safetensors", 9999), "00000.safetensors has"),
    "no file": (lambda p: (p / "rank_00001.safetensors").unlink(), "00001.safetensors is missing"),
    "no index": (lambda p: (p / "index.json").unlink(), "no index.json"),
    "half index": (lambda p: truncate(p / "index.json", 0.5), "index.json: not readable"),
    "empty index": (lambda p: truncate(p / "index.json", 0), "index.json: not readable"),
    "list": (lambda p: (p / "index.json").write_text("[1]"), "index.json: not readable"),
    "other": (lambda p: (p / "index.json").write_text('{"format": "x", "version": 1}'), "of x 1"),
    "newer": (lambda p: (p / "index.json").write_text('{"format": "minimesh", "version": 9}'),
              "minimesh 9, not minimesh 1"),
    "partial": (lambda p: (p / "index.json").write_text('{"format": "minimesh", "version": 1}'),
                "index.json: not readable"),
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_its_name(tmp_path, kind):
    old, tensors = simple(tmp_path, 5)
    new, _ = simple(tmp_path, 10)
    spoil, reason = DAMAGE[kind]
    spoil(new)
    lines = []
    assert checkpoint.latest(tmp_path, lines.append) == old
    assert len(lines) == 1 and reason in lines[0] and str(new) in lines[0]
    assert checkpoint.checkpoints(tmp_path) == [(5, old)]
    assert_holds(old, tensors)
    mine = whole(tensors)
    with pytest.raises(ValueError, match="step_000000010"):
        checkpoint.load(new, mine)
    if kind == "no index":  # can not be told from a save that never ended
        shutil.rmtree(old)
        assert checkpoint.latest(tmp_path, lines.append) is None
    else:
        shutil.rmtree(old)
        with pytest.raises(ValueError, match="no good checkpoint left"):
            checkpoint.latest(tmp_path, lines.append)
    simple(tmp_path, 10)  # and the step can be saved again
    assert checkpoint.latest(tmp_path, lines.append) == new


@pytest.mark.quick
def test_every_flipped_byte_of_the_data_is_found(tmp_path):
    path, tensors = simple(tmp_path, 7)
    index = checkpoint.read_index(path)
    names = list(index["files"])
    for name, t in index["tensors"].items():
        for file, _, _, start, nbytes, _ in t["boxes"]:
            for at in (start, start + nbytes - 1):
                flip(path / names[file], at)
                with pytest.raises(ValueError, match=rf"{names[file]} is damaged.*{name}\["):
                    checkpoint.load(path, whole(tensors))
                flip(path / names[file], at)
    assert_holds(path, tensors)


@pytest.mark.quick
def test_nothing_there_is_no_checkpoint(tmp_path):
    for root in (tmp_path, tmp_path / "none"):
        assert checkpoint.latest(root, pytest.fail) is None
        assert checkpoint.checkpoints(root) == []
        assert checkpoint.prune(root, 1) == []


# Order and keeping


def numbers(root):
    return [step for step, _ in checkpoint.checkpoints(root)]


@pytest.mark.quick
def test_order_is_by_number_and_strays_are_ignored(tmp_path):
    made, _ = simple(tmp_path / "elsewhere", 1)
    for name in ("step_900", "step_1000", "step_9000", "step_10000", "step_backup", "step_7e9.tmp"):
        shutil.copytree(made, tmp_path / name)
    (tmp_path / "step_99999.txt").write_text("")
    assert numbers(tmp_path) == [900, 1000, 9000, 10000]
    assert checkpoint.latest(tmp_path, pytest.fail) == tmp_path / "step_10000"
    assert checkpoint.prune(tmp_path, 1) == [tmp_path / f"step_{n}" for n in (900, 1000, 9000)]
    assert (tmp_path / "step_backup").exists()


@pytest.mark.quick
@pytest.mark.parametrize("keep, every, left", [
    (1, None, [5]), (3, None, [3, 4, 5]), (5, None, [1, 2, 3, 4, 5]), (99, None, [1, 2, 3, 4, 5]),
    (None, None, [1, 2, 3, 4, 5]), (1, 2, [2, 4, 5]), (2, 3, [3, 4, 5]), (1, 1, [1, 2, 3, 4, 5])])
def test_prune_keeps_what_it_says(tmp_path, keep, every, left):
    for step in range(1, 6):
        simple(tmp_path, step, world=1)
    checkpoint.prune(tmp_path, keep, every)
    assert numbers(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)


@pytest.mark.quick
@pytest.mark.parametrize("keep, every", [(0, None), (-1, None), (1, 0), (1.5, None), (True, None)])
def test_prune_refuses_what_is_no_count(tmp_path, keep, every):
    simple(tmp_path, 1, world=1)
    with pytest.raises(ValueError, match="a number from 1, or null"):
        checkpoint.prune(tmp_path, keep, every)
    assert numbers(tmp_path) == [1]


@pytest.mark.quick
def test_what_was_just_written_stays_beside_an_older_run(tmp_path):
    """Another run's step 600 and 700 were there: the last by number and by time are kept."""
    simple(tmp_path, 600, world=1)
    simple(tmp_path, 700, world=1)
    for step, left in [(100, [100, 600, 700]), (200, [100, 200, 600, 700]),
                       (300, [200, 300, 600, 700])]:
        path, _ = simple(tmp_path, step, world=1)
        assert path not in checkpoint.prune(tmp_path, 2)
        assert numbers(tmp_path) == left


@pytest.mark.quick
def test_prune_leaves_the_unfinished_and_the_damaged_alone_unless_old(tmp_path):
    old, damaged, running = (tmp_path / f"step_{n:09d}" for n in (3, 4, 9))
    for step in (3, 4, 5):
        simple(tmp_path, step, world=1)
    (old / "index.json").unlink()
    truncate(damaged / "rank_00000.safetensors", 0.5)
    for path in (old, *old.iterdir()):
        os.utime(path, (1e9, 1e9))
    running.mkdir()
    (running / "rank_00000.safetensors").write_bytes(b"more to come")
    later = (tmp_path / "step_000000005" / "index.json").stat().st_mtime + 5
    os.utime(running / "rank_00000.safetensors", (later, later))
    os.utime(running, (1e9, 1e9))
    assert checkpoint.prune(tmp_path, 1) == [old]
    assert numbers(tmp_path) == [5] and damaged.exists() and running.exists()


@pytest.mark.quick
def test_prune_that_dies_half_way_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        simple(tmp_path, step, world=1)

    def die(path):
        raise OSError("killed")
    monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
    with pytest.raises(OSError, match="killed"):
        checkpoint.prune(tmp_path, 1)
    assert numbers(tmp_path) == [2] and (tmp_path / "step_000000001").exists()


# Crashes and full disks


@pytest.mark.quick
def test_a_step_is_replaced_by_files_of_other_names(tmp_path):
    path, _ = simple(tmp_path, 4, value=1, world=3)
    for value, world in ((2, 2), (3, 3), (4, 1)):
        (path / "rank_00009.safetensors").write_text("left by a crash")
        (path / "notes.txt").write_text("mine")
        again, tensors = simple(tmp_path, 4, value=value, world=world)
        assert again == path
        assert_holds(path, tensors)
        files = {p.name for p in path.iterdir()}
        assert files == {"index.json", "notes.txt"} | set(checkpoint.read_index(path)["files"])
        assert len(files) == world + 2


@pytest.mark.quick
def test_an_interrupted_save_of_the_step_does_not_hang_the_next(tmp_path):
    left = tmp_path / "step_000000010"
    left.mkdir()
    (left / "rank_00001.safetensors").write_bytes(b"half")
    (left / "index.json.tmp").write_bytes(b"{")
    path, tensors = simple(tmp_path, 10)
    assert_holds(path, tensors)
    assert len(list(path.iterdir())) == 3


class FullDisk:
    """A file on a disk with room for `room` more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        n = memoryview(data.encode() if isinstance(data, str) else data).nbytes
        self.room[0] -= n
        if self.room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


@pytest.mark.quick
@pytest.mark.parametrize("existing", [False, True], ids=["new step", "step again"])
def test_a_full_disk_is_an_error_on_all_ranks_and_nothing_is_lost(tmp_path, monkeypatch, existing):
    old, before = simple(tmp_path, 5)
    if existing:
        old, before = simple(tmp_path, 10, value=1)
    written = []
    used = sum(p.stat().st_size for p in old.iterdir())

    def count(room):
        def opened(path, mode="r", *args):
            file = open(path, mode, *args)
            return FullDisk(file, room) if set(mode) & set("wx") else file
        monkeypatch.setattr(checkpoint, "open", opened, raising=False)

    for room in (0, 300, used // 4, used // 2, used - 400, used - 1):
        count([room])
        tensors = {"param/x": torch.full((4, 3), 2.0), "param/y": torch.arange(5.0)}
        out = Ranks(2).run(lambda r, agree, tensors=tensors: checkpoint.save(
            tmp_path, 10, flat_pieces(tensors, r, 2), {"step": 10}, r, 2, agree))
        written.append(all(isinstance(e, RuntimeError) and "No space left" in str(e) for e in out))
        monkeypatch.undo()
        assert checkpoint.latest(tmp_path, lambda line: None) == old
        assert_holds(old, before)
        names = {*checkpoint.read_index(old)["files"], "index.json"} if existing else set()
        assert {p.name for p in (tmp_path / "step_000000010").iterdir()} == names
    assert all(written)  # and each time the space was given back
    path, tensors = simple(tmp_path, 10, value=3)
    assert_holds(path, tensors)


@pytest.mark.quick
def test_one_rank_that_can_not_write_stops_all(tmp_path, monkeypatch):
    old, before = simple(tmp_path, 5)
    write = checkpoint.write_safetensors

    def refuse(path, *args):
        if "rank_00001" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        write(path, *args)
    monkeypatch.setattr(checkpoint, "write_safetensors", refuse)
    out = Ranks(3).run(lambda r, agree: checkpoint.save(
        tmp_path, 6, flat_pieces(before, r, 3), {}, r, 3, agree))
    assert {str(e) for e in out} == {str(out[0])} and "rank 1: " in str(out[0])
    assert "Permission denied" in str(out[0])
    assert checkpoint.latest(tmp_path, lambda line: None) == old
    assert not list((tmp_path / "step_000000006").iterdir())


@pytest.mark.quick
def test_an_error_is_raised_even_if_agree_does_not(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, 1, [], {"x": (1,)}, 0, 1, lambda error: None)


@pytest.mark.quick
def test_a_file_that_is_there_is_never_written_over(tmp_path):
    checkpoint.write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(2)}, {})
    with pytest.raises(FileExistsError):
        checkpoint.write_safetensors(tmp_path / "x.safetensors", {"a": torch.zeros(2)}, {})
    assert torch.equal(checkpoint.read_safetensors(tmp_path / "x.safetensors")["a"], torch.ones(2))


# A crash is a forked process that dies (os._exit: no handler, no flush) before the n-th thing that
# it does to the file system, for every n. Writes may also end half way.


def crash_child(folder, n, value, prune):
    """Runs in the forked child: dies before event n, exit code 9; 0 if there were fewer."""
    events = [0]

    def tick():
        events[0] += 1
        if events[0] > n:
            os._exit(9)

    class Dying:
        def __init__(self, file):
            self.file = file

        def write(self, data):  # a write may also get half way
            data = memoryview(data.encode() if isinstance(data, str) else data).cast("B")
            tick()
            half = bytes(data[: len(data) // 2])
            os.write(self.file.fileno(), half)
            tick()
            os.write(self.file.fileno(), bytes(data[len(data) // 2 :]))

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    def opened(path, mode="r", *args):
        if not set(mode) & set("wx"):
            return open(path, mode, *args)
        tick()
        return Dying(open(path, mode, *args))

    def wrap(module, name):
        old = getattr(module, name)
        setattr(module, name, lambda *args, **kw: (tick(), old(*args, **kw))[1])

    def never_in_place(event, args):
        if event == "open" and str(args[0]).endswith("index.json") and args[2] & 3:
            os._exit(7)

    sys.addaudithook(never_in_place)
    checkpoint.open = opened
    for module, name in [(os, "replace"), (os, "fsync"), (os, "unlink"), (pathlib.Path, "unlink"),
                         (pathlib.Path, "mkdir"), (os, "rmdir")]:
        wrap(module, name)
    x = torch.full((3, 2), float(value))
    checkpoint.save(folder, 10, [Piece("param/x", x.view(-1), 0, (3, 2), (0, 0), (3, 2))],
                    {"value": value}, 0, 1, lambda error: None)
    if prune:
        checkpoint.prune(folder, 1)
    os._exit(0)


CRASH = """
import os, pathlib, shutil, sys, torch
import checkpoint, test_checkpoint as t

base = pathlib.Path(sys.argv[1])
os.fsync = lambda fd: None  # a process dies here, not the machine; still counted as an event
for before in ("nothing", "earlier", "same"):
    for n in range(200):
        folder = base / f"{before}-{n}"
        folder.mkdir()
        if before == "earlier":
            t.simple(folder, 5, value=1, world=1)
            (folder / "step_000000010").mkdir()
            (folder / "step_000000010" / "rank_00000.safetensors").write_bytes(b"left")
        if before == "same":
            t.simple(folder, 10, value=1, world=1)
        pid = os.fork()
        if pid == 0:
            try:
                t.crash_child(folder, n, 2, prune=before == "earlier")
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9), (before, n, code)
        path = checkpoint.latest(folder, lambda line: None)
        if path is None:
            assert before == "nothing", (before, n)
            value = None
        else:
            value = checkpoint.read_meta(path).get("value", 1)
            shape = (3, 2) if value == 2 else (4, 3)
            x = torch.zeros(shape).view(-1)
            checkpoint.load(path, [t.Piece("param/x", x, 0, shape, (0, 0), shape)])
            assert (x == value).all()
        print(before, n, code, value)
        t.simple(folder, 10, value=3, world=1)
        assert checkpoint.read_meta(checkpoint.latest(folder, print)) == {"step": 10}
        shutil.rmtree(folder)
        if code == 0:
            break
"""


def test_a_crash_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    (tmp_path / "crash.py").write_text(CRASH)
    done = Script(tmp_path / "crash.py", tmp_path).wait()
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    for before, old in (("nothing", "None"), ("earlier", "1"), ("same", "1")):
        values = [value for name, _, _, value in rows if name == before]
        assert len(values) > 12
        change = values.index("2")
        assert values == [old] * change + ["2"] * (len(values) - change) and change > 8


# The container: others read it


@pytest.mark.quick
def test_the_safetensors_package_reads_what_we_write_and_the_reverse(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save_file

    tensors = state() | {"none": torch.zeros(0, 3), "odd": torch.ones(3, dtype=torch.uint8)}
    checkpoint.write_safetensors(tmp_path / "ours.safetensors", tensors, {"format": "pt"})
    for theirs in (load_file(tmp_path / "ours.safetensors"),
                   checkpoint.read_safetensors(tmp_path / "ours.safetensors")):
        assert set(theirs) == set(tensors)
        for name, t in tensors.items():
            assert (theirs[name].dtype, theirs[name].shape) == (t.dtype, t.shape)
            assert bits(theirs[name]) == bits(t)
    for e in checkpoint.read_header(tmp_path / "ours.safetensors")[0].values():
        assert e["data_offsets"][0] % checkpoint.DTYPES[e["dtype"]].itemsize == 0  # aligned
    save_file(tensors, tmp_path / "theirs.safetensors")
    for name, t in checkpoint.read_safetensors(tmp_path / "theirs.safetensors").items():
        assert bits(t) == bits(tensors[name]) and t.shape == tensors[name].shape
    with safetensors.safe_open(tmp_path / "ours.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
    path = save_all(tmp_path, 1, lambda r: flat_pieces(tensors, r, 3), 3)
    for file in sorted(path.glob("*.safetensors")):
        assert load_file(file)


@pytest.mark.quick
def test_numpy_and_json_read_a_checkpoint(tmp_path):
    """In twelve lines, with nothing of ours."""
    tensors = {"param/w": torch.arange(35.0).view(5, 7)}
    path = save_all(tmp_path, 1, lambda r: flat_pieces(tensors, r, 3), 3)
    index = json.loads((path / "index.json").read_text())
    files, entry = list(index["files"]), index["tensors"]["param/w"]
    full = np.zeros(entry["shape"], np.float32)
    for file, offset, shape, start, nbytes, crc in entry["boxes"]:
        data = (path / files[file]).read_bytes()[start : start + nbytes]
        assert zlib.crc32(data) == crc
        where = tuple(slice(o, o + n) for o, n in zip(offset, shape))
        full[where] = np.frombuffer(data, "<f4").reshape(shape)
    assert np.array_equal(full, np.arange(35.0).reshape(5, 7))
    data = (path / "rank_00001.safetensors").read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    about = json.loads(header.pop("__metadata__")["boxes"])
    assert (8 + n) % 8 == 0 and set(about) == set(header)
    for key, e in header.items():
        assert key == f"param/w{Box(about[key][2], e['shape'])}"
        a, b = e["data_offsets"]
        assert zlib.crc32(data[8 + n + a : 8 + n + b]) == about[key][3]


@pytest.mark.quick
@pytest.mark.parametrize("data", [
    b"", b"\x00" * 4, b"\xff" * 16, struct.pack("<Q", 2) + b"{]",
    struct.pack("<Q", 2) + b"{}extra", struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 8) + b'{"a":1} ',
    struct.pack("<Q", 55) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}' + b"0" * 12,
    struct.pack("<Q", 53) + b'{"a":{"dtype":"Q9","shape":[2],"data_offsets":[0,8]}}' + b"0" * 8])
def test_what_is_no_safetensors_file_is_named(tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="x.safetensors: not a whole safetensors file"):
        checkpoint.read_safetensors(tmp_path / "x.safetensors")


def test_a_save_holds_no_copy(tmp_path):
    """What a save of 64 MB in 8 tensors allocates, by the interpreter's and torch's accounts."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
import resource, torch, checkpoint
n = 2 << 20
shape = (2048, n // 2048)
pieces = [checkpoint.Piece(f"w{{i}}", torch.ones(n), 0, shape, (0, 0), shape) for i in range(8)]
checkpoint.save({str(tmp_path)!r}, 1, pieces[:1], {{}}, 0, 1, lambda e: None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint.save({str(tmp_path)!r}, 2, pieces, {{}}, 0, 1, lambda e: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 << 10  # KiB: half of one tensor


# From the shell


def shell(*args):
    return Script("checkpoint.py", *args).wait()


def test_the_shell_commands(tmp_path, capsys, monkeypatch):
    root = tmp_path / "checkpoints"
    simple(root, 900)
    good, _ = simple(root, 1000)
    bad, _ = simple(root, 2000)
    truncate(bad / "rank_00001.safetensors", 0)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, args)])
        try:
            checkpoint.main()
            code = 0
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()

    for where in (root, tmp_path):  # the run folder does too
        code, out, err = run("ls", where)
        rows = [line.split() for line in out.splitlines()[1:]]
        assert (code, err, [row[0] for row in rows]) == (0, "", ["900", "1000", "2000"])
        assert rows[0][-1] == rows[1][-1] == "complete" and rows[1][-2] == "17"
        assert "rank_00001.safetensors has 0 bytes" in out
    code, out, err = run("verify", good)
    assert (code, err) == (0, "") and "2 tensors in 2 files are good" in out
    code, out, err = run("show", good)
    assert code == 0 and "4 x 3" in out and len(out.splitlines()) == 2
    code, out, err = run("show", good, "param/x")
    assert code == 0 and "[2:4,0:3]" in out and "rank_00000" in out
    flip(good / "rank_00000.safetensors", (good / "rank_00000.safetensors").stat().st_size - 1)
    for args in (("verify", good), ("verify", bad), ("show", good, "param/z"),
                 ("ls", tmp_path / "no"), ("show", tmp_path)):
        code, out, err = run(*args)
        assert (code, out, len(err.splitlines())) == (2, "", 1), args
    assert shell("verify", bad).returncode == 2


# Object stores


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    """A root on a store without folders that lives in this process, or on the disk, as a URL."""
    root = checkpoint.place(f"{request.param}://{tmp_path}/run/checkpoints")
    yield root
    if root.parent.is_dir():
        root.parent.fs.rm(root.parent, recursive=True)


def put(path, data):
    with path.open("wb") as f:
        f.write(data)


def test_a_checkpoint_on_an_object_store(store, tmp_path):
    """File by file the same bytes as on a disk; loaded by any number of ranks."""
    tensors = state(3)
    paths = [save_all(root, 12, lambda r: flat_pieces(tensors, r, 3), 3)
             for root in (store, tmp_path)]
    assert isinstance(paths[0], checkpoint.Url)
    assert sorted(p.name for p in paths[0].iterdir()) == sorted(p.name for p in paths[1].iterdir())
    for file in paths[1].glob("*.safetensors"):
        assert (paths[0] / file.name).read_bytes() == file.read_bytes()
    assert_holds(checkpoint.latest(store, pytest.fail), tensors)
    for rank in range(2):
        mine = flat_pieces(tensors, rank, 2, empty=True)
        checkpoint.load(str(paths[0]), mine, verify=False)
        for got, want in zip(mine, flat_pieces(tensors, rank, 2)):
            assert bits(got.data) == bits(want.data), (got.name, rank)


def test_only_the_boxes_that_meet_are_fetched(store, monkeypatch):
    full = torch.arange(4096.0 * 8).view(4096, 8)
    path = save_all(store, 1, lambda r: flat_pieces({"param/w": full}, r, 4), 4)
    fetched, real = [], checkpoint.Remote.__getitem__
    monkeypatch.setattr(checkpoint.Remote, "__getitem__", lambda self, part: [
        out := real(self, part), fetched.append((self.url.name, len(out)))][0])
    mine = Piece("param/w", torch.zeros(80), 0, (4096, 8), (0, 0), (4096, 8))
    checkpoint.load(path, [mine])
    assert torch.equal(mine.data, torch.arange(80.0))
    assert {name for name, _ in fetched} == {"rank_00000.safetensors"}
    assert sum(n for _, n in fetched) < 4096 * 8 * 4 / 10 + 2000  # the first of four has a tenth


def test_what_an_object_store_keeps(store):
    """Steps that are pruned, replaced, never completed, damaged; the command that lists them."""
    for step in range(1, 6):
        simple(store, step, world=1)
    assert len(checkpoint.prune(store, 2, 2)) == 2 and numbers(store) == [2, 4, 5]
    assert sorted(path.name[-1] for path in store.iterdir()) == ["2", "4", "5"]
    for world in (3, 2):
        path, tensors = simple(store, 5, world=world)
    assert_holds(path, tensors)
    assert len([*path.iterdir()]) == 3
    (store / "step_000000009").mkdir()
    put(store / "step_000000009" / "rank_00000.safetensors", b"half")
    file = path / next(iter(checkpoint.read_index(path)["files"]))
    put(file, file.read_bytes()[:-1])
    said = []
    assert checkpoint.latest(store, said.append) == store / "step_000000004"
    assert "no index.json" in said[0] and "bytes instead of" in said[1] and len(said) == 2
    if store.startswith("file"):
        lines = shell("ls", store.parent).stdout.splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["2", "4", "5", "9"]
        assert shell("verify", store / "step_000000004").returncode == 0


def test_a_url_that_nobody_can_open():
    for url in ("what://bucket/run", "s4://x"):
        with pytest.raises(ValueError, match=url):
            checkpoint.place(url)


def test_folders_of_others_are_on_a_disk(tmp_path):
    path, _ = simple(tmp_path / "run", 1)
    there = checkpoint.place(f"memory://{tmp_path}/there")
    for make in (lambda: checkpoint.merge(path, there),
                 lambda: checkpoint.import_folder(there, tmp_path / "new")):
        with pytest.raises(ValueError, match="there: must be a folder on a disk"):
            make()
