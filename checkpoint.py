"""Checkpoints that any layout can load: a folder of safetensors files and an index.

    runs/default/checkpoints/step_000001000/
        rank_00000.safetensors    8 bytes header length | JSON header | raw little-endian data:
        rank_00001.safetensors    what a rank holds, a few boxes of each tensor
        index.json                each tensor's shape and boxes: file, place, bytes, crc32

A shard is a contiguous slice of a flattened tensor: at most 2n-1 boxes of the tensor in n
dimensions. Elements 3 to 13 of a 4 x 5 matrix are three:

    . . . a a        a = [0:1,3:5]     Boxes do not depend on who wrote them. Whoever loads cuts its
    b b b b b        b = [1:2,0:5]     own slice into boxes, intersects them with the stored ones,
    c c c c .        c = [2:3,0:4]     and reads these bytes through a memory map.
    . . . . .

A checkpoint exists exactly if its index is complete. Rank 0 writes it last, when all files are on
disk and their boxes were seen to cover every tensor once; it appears by one rename (on an object
store: one put). A step that is saved again gets files of other names (rank_00000.1.safetensors)
beside the old ones: a crash at any moment leaves the old index with the old files or the new one
with the new files, and what the index does not name is removed later.

    python checkpoint.py ls DIR | verify CHECKPOINT | show CHECKPOINT [NAME]
    python checkpoint.py        saves a small tensor from 3 ranks and loads it on 2
"""

import argparse
import contextlib
import itertools
import json
import math
import mmap
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from typing import NamedTuple

import torch

VERSION = 1
INDEX = "index.json"
STORED = ["file", "offset", "shape", "start", "bytes", "crc32"]  # a box in the index, in this order
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class Box(NamedTuple):  # a rectangular piece of a tensor
    offset: tuple
    shape: tuple

    def __str__(self):
        return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(*self)) + "]"


class Piece(NamedTuple):
    """What a rank holds of one tensor: elements start, start+1 ... of the flattened local tensor,
    which begins at `cut_offset` in the full one. What lies past `full_shape` is padding."""

    name: str
    data: torch.Tensor  # 1-d
    start: int
    local_shape: tuple
    cut_offset: tuple
    full_shape: tuple


# ---------------------------------------------------------------------------------------------
# Boxes


def boxes(start, stop, shape):
    """Elements [start, stop) of a flattened tensor, in order, as at most 2n-1 boxes:
    [(where in the slice it begins, Box)]."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is not a slice of a tensor of shape {tuple(shape)}")
    if start == stop or not shape:
        return [(0, Box((), ()))] * (stop - start)
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows; first > last: all inside one row
    out = []
    if first < last:
        whole = Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
        out = [(first * row - start, whole)]
    edges = (first - 1, start, min(stop, first * row)), (last, max(first, last) * row, stop)
    for i, a, b in edges:
        if a < b:
            out += [(a - start + at, Box((i, *offset), (1, *inner)))
                    for at, (offset, inner) in boxes(a - i * row, b - i * row, shape[1:])]
    return sorted(out)


def logical(piece):
    """(box in the full tensor, the view of the piece's data that holds it), without padding."""
    name, data, start, local_shape, cut_offset, full_shape = piece
    if not (data.dim() == 1 and data.is_contiguous() and data.dtype in CODES
            and len(local_shape) == len(cut_offset) == len(full_shape)):
        raise ValueError(f"{name}: {data.dtype} {list(data.shape)} is no slice of {local_shape} at "
                         f"{cut_offset} in {full_shape}, or not one of {', '.join(DTYPES)}")
    for at, box in boxes(start, start + data.numel(), local_shape):
        begin = tuple(o + c for o, c in zip(box.offset, cut_offset))
        inside = tuple(max(0, min(s, f - b)) for s, b, f in zip(box.shape, begin, full_shape))
        if math.prod(inside):
            view = data.detach()[at : at + math.prod(box.shape)].view(box.shape)
            yield Box(begin, inside), view[tuple(slice(i) for i in inside)]


def check_cover(name, entry, where):
    """Every element must lie in exactly one box. The indicator functions of the boxes add up to
    that of the tensor exactly if their mixed differences do; the mixed difference of a box is +1
    or -1 at its corners, by parity, and 0 elsewhere."""
    shape, corners = entry["shape"], Counter()
    ends = list(itertools.product((0, 1), repeat=len(shape)))
    whole = [None, [0] * len(shape), shape]
    for sign, (_, offset, size, *_) in [(-1, whole), *((1, b) for b in entry["boxes"])]:
        for end in ends:
            corner = tuple(o + s * e for o, s, e in zip(offset, size, end))
            corners[corner] += sign * (-1) ** sum(end)
    if any(corners.values()):
        have = sum(math.prod(b[2]) for b in entry["boxes"])
        raise ValueError(f"{where}: {name}: boxes of {have:,} elements do not cover the "
                         f"{math.prod(shape):,} of {shape} exactly once")


def meet(a, b):
    """What two boxes share, as an index into the one and into the other, or None."""
    begin = [max(o, p) for o, p in zip(a.offset, b.offset)]
    end = [min(o + m, p + n) for o, m, p, n in zip(*a, *b)]
    if any(i >= j for i, j in zip(begin, end)):
        return None
    return [tuple(slice(i - o, j - o) for i, j, o in zip(begin, end, box.offset)) for box in (a, b)]


# ---------------------------------------------------------------------------------------------
# The safetensors container


def raw(tensor):  # its bytes; no copy is made of what is contiguous and on the host
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def sync_folder(path):  # what was created, renamed or removed in it is durable then
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_safetensors(path, tensors, metadata):
    """Write {name: tensor}, one tensor at a time, durable on return. Never over an existing file; a
    write that fails leaves none."""
    header, at = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda k: -tensors[k].element_size())  # aligned without gaps
    for name in order:
        t, begin = tensors[name], at
        at += t.numel() * t.element_size()
        header[name] = {"dtype": CODES[t.dtype], "shape": [*t.shape], "data_offsets": [begin, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        try:
            f.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                f.write(raw(tensors[name]))
            f.flush()
            os.fsync(f.fileno())
        except BaseException:
            os.unlink(path)
            raise
    sync_folder(pathlib.Path(path).parent)


def read_header(path):
    """({name: dtype, shape, data_offsets}, metadata, where the data begins)."""
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        text = f.read(n) if n <= size - 8 else b""
    try:
        entries, at = json.loads(text), 0
        metadata = entries.pop("__metadata__", {})
        for e in sorted(entries.values(), key=lambda e: e["data_offsets"]):
            begin, at = at, at + math.prod(e["shape"]) * DTYPES[e["dtype"]].itemsize
            if e["data_offsets"] != [begin, at]:
                raise ValueError("a gap or an overlap")
        if 8 + n + at != size:
            raise ValueError(f"{size} bytes instead of {8 + n + at}")
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: not a whole safetensors file ({e!r})") from None
    return entries, metadata, 8 + n


def map_file(path):
    with open(path, "rb") as f:  # private pages: writable for torch, never written back
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)


def tensor_at(mapped, dtype, shape, start):
    if 0 in shape:
        return torch.empty(shape, dtype=DTYPES[dtype])
    flat = torch.frombuffer(mapped, dtype=DTYPES[dtype], count=math.prod(shape), offset=start)
    return flat.view(shape)


def read_safetensors(path):
    """{name: tensor}, views of a memory map."""
    entries, _, base = read_header(path)
    mapped = map_file(path)
    return {name: tensor_at(mapped, e["dtype"], e["shape"], base + e["data_offsets"][0])
            for name, e in entries.items()}


# ---------------------------------------------------------------------------------------------
# Save


def save(root, step, pieces, meta, rank, world, agree):
    """Write a checkpoint of `pieces`, this rank's share of all tensors, and `meta`, a dict that
    JSON can hold. Every rank calls this. `agree(error)` is a barrier of all ranks that raises on
    each of them if any error was not None. Returns the folder."""
    folder, lead = pathlib.Path(root) / f"step_{step:09d}", rank == 0
    together(agree, (lambda: prepare(folder, meta)) if lead else None)
    turn = json.loads((folder / INDEX).read_bytes())["turn"] + 1 if (folder / INDEX).exists() else 0
    files = [f"rank_{r:05d}{f'.{turn}' if turn else ''}.safetensors" for r in range(world)]
    mine = folder / files[rank]
    together(agree, lambda: write_rank(mine, step, pieces), undo=mine.unlink)
    together(agree, (lambda: commit(folder, step, meta, turn, files)) if lead else None)
    return folder


def together(agree, action, undo=None):
    """Do `action` (None: nothing to do here) and hear how the others fared: all ranks go on or all
    raise. What went well only here is undone."""
    error = None
    try:
        if action is not None:
            action()
    except Exception as e:
        error = e
    try:
        agree(error)
    except BaseException as e:
        if error is None and undo is not None:
            undo()
        raise e from error
    if error is not None:
        raise error


def prepare(folder, meta):
    """Leave nothing in the folder but, if it is there, the complete checkpoint to be replaced."""
    if json.loads(json.dumps(meta, allow_nan=False)) != meta:
        raise ValueError("meta of a checkpoint must survive JSON: no tuples, only strings as keys")
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    try:
        keep = read_index(folder, whole=True)["files"]
    except ValueError:
        keep = ()
        (folder / INDEX).unlink(missing_ok=True)
        sync_folder(folder)
    tidy(folder, keep)


def tidy(folder, keep):
    """Remove what an interrupted or replaced save left."""
    for path in folder.iterdir():
        if path.name not in keep and re.fullmatch(r"rank_\d+.*\.safetensors|.*\.tmp", path.name):
            path.unlink()


def write_rank(path, step, pieces):
    tensors, about = {}, {}
    for piece in pieces:
        for box, view in logical(piece):
            key = f"{piece.name}{box}"
            if key in tensors:
                raise ValueError(f"{key} is given twice")
            tensors[key] = view
            about[key] = [piece.name, list(piece.full_shape), box.offset, zlib.crc32(raw(view))]
    write_safetensors(path, tensors, {
        "format": f"minimesh {VERSION}", "step": str(step),
        "box": "name, full shape, offset, crc32", "boxes": json.dumps(about)})


def commit(folder, step, meta, turn, files):
    """See that all is there, then write the index: from its rename on the checkpoint exists."""
    new = folder / f"{INDEX}.tmp"
    try:
        index = {"format": "minimesh", "version": VERSION, "step": step, "turn": turn,
                 "world": len(files), "written": time.time(), "meta": meta,
                 "files": {name: os.path.getsize(folder / name) for name in files},
                 "box": STORED, "tensors": collect(folder, step, files)}
        with open(new, "w") as f:
            f.write(json.dumps(index, separators=(",", ":")))
            f.flush()
            os.fsync(f.fileno())
    except BaseException:
        for name in (new.name, *files):
            (folder / name).unlink(missing_ok=True)
        raise
    os.replace(new, folder / INDEX)
    sync_folder(folder)
    with contextlib.suppress(OSError):  # what cannot be removed now does no harm
        tidy(folder, files)


def collect(folder, step, files):
    """The headers of all files, as the index's table of tensors."""
    tensors = {}
    for number, file in enumerate(files):
        entries, metadata, base = read_header(folder / file)
        if metadata["step"] != str(step):
            raise ValueError(f"{folder / file} is of step {metadata['step']}, not {step}")
        for key, (name, full, offset, crc) in json.loads(metadata["boxes"]).items():
            e, (begin, end) = entries[key], entries[key]["data_offsets"]
            t = tensors.setdefault(name, {"shape": full, "dtype": e["dtype"], "boxes": []})
            if (t["shape"], t["dtype"]) != (full, e["dtype"]):
                raise ValueError(f"{folder / file}: {name} is {e['dtype']} {full}, in another file "
                                 f"{t['dtype']} {t['shape']}")
            t["boxes"].append([number, offset, e["shape"], base + begin, end - begin, crc])
    for name, t in tensors.items():
        check_cover(name, t, folder)
    return tensors


# ---------------------------------------------------------------------------------------------
# Find and keep


def read_index(path, whole=False):
    """The index of a checkpoint, or a ValueError that says why it is none. With `whole` every file
    must be there in its full size."""
    path = pathlib.Path(path)
    if not (path / INDEX).is_file():
        raise ValueError(f"{path}: no {INDEX}, so no complete checkpoint")
    try:
        index = json.loads((path / INDEX).read_bytes())
        kind = f"{index['format']} {index['version']}"
        if kind != f"minimesh {VERSION}":
            raise ValueError(f"it is of {kind}, not minimesh {VERSION}")
        if lost := {"turn", "written", "meta", "files", "tensors"} - set(index):
            raise ValueError(f"no {lost}")
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{path / INDEX}: not readable ({e})") from None
    for name in index["files"] if whole else ():
        check_size(path, index, name)
    return index


def check_size(path, index, name):
    want, file = index["files"][name], path / name
    size = os.path.getsize(file) if file.is_file() else None
    if size != want:
        found = "is missing" if size is None else f"has {size:,} bytes instead of {want:,}"
        raise ValueError(f"{file} {found}")


def survey(root):
    """(step, folder, index, None) or (step, folder, None, what is wrong), highest step first."""
    root = pathlib.Path(root)
    found = [(int(m[1]), path) for path in (root.iterdir() if root.is_dir() else ())
             if (m := re.fullmatch(r"step_(\d+)", path.name))]
    for step, path in sorted(found, reverse=True):
        try:
            yield step, path, read_index(path, whole=True), None
        except (ValueError, OSError) as e:
            yield step, path, None, str(e)


def checkpoints(root):
    """[(step, folder)] of the complete checkpoints, by rising step."""
    return [(step, path) for step, path, index, _ in survey(root) if index][::-1]


def latest(root, warn):
    """The complete checkpoint of the highest step; None if none was ever completed. What is passed
    over is told to `warn`. That all which once were complete are damaged is an error."""
    lost = None
    for _, path, index, reason in survey(root):
        if index:
            return path
        warn(f"passed over: {reason}")
        lost = lost or reason if (path / INDEX).exists() else lost
    if lost:
        raise ValueError(f"{root}: no good checkpoint left; to start afresh, move it away: {lost}")
    return None


def read_meta(path):
    return read_index(path)["meta"]


def prune(root, keep, every=None):
    """Remove the complete checkpoints but for the `keep` of highest step, the `keep` written last
    (the same, unless another run's are there), and those of every `every`-th step; also saves that
    never ended and are older than the newest complete one. keep None: none. Returns what went."""
    for key, value in (("keep", keep), ("every", every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{key} {value!r} checkpoints: a number from 1, or null")
    if keep is None:
        return []
    found = list(survey(root))[::-1]
    good = [(step, index["written"], path) for step, path, index, _ in found if index]
    by_time = sorted(good, key=lambda c: (c[1], c[0]))
    kept = {path for _, _, path in sorted(good)[-keep:] + by_time[-keep:]}
    kept |= {path for step, _, path in good if every and step % every == 0}
    gone = [path for _, _, path in good if path not in kept]
    newest = max(((path / INDEX).stat().st_mtime for path in kept), default=0)
    gone += [path for _, path, _, _ in found if path.is_dir() and not (path / INDEX).exists()
             and max(p.stat().st_mtime for p in (path, *path.iterdir())) < newest]
    for path in gone:
        (path / INDEX).unlink(missing_ok=True)  # first: half a checkpoint is none
        sync_folder(path)
        shutil.rmtree(path)
    return gone


# ---------------------------------------------------------------------------------------------
# Load


def load(path, pieces, verify=True):
    """Fill the data of `pieces` from a checkpoint of any layout; padding is left as it is. With
    verify=False a box that is needed in part is not checked, so that only that part is read."""
    path, pieces = pathlib.Path(path), list(pieces)
    index = read_index(path)
    check_wanted(path, index["tensors"], pieces)
    files = Files(path, index)
    for piece in pieces:
        for want, view in logical(piece):
            for stored in index["tensors"][piece.name]["boxes"]:
                box = Box(*stored[1:3])
                if both := meet(want, box):
                    whole = all(s.stop - s.start == n for s, n in zip(both[1], box.shape))
                    source = files.box(piece.name, stored, verify or whole)
                    view[both[0]].copy_(source[both[1]])


def check_wanted(path, tensors, pieces):
    wanted = {p.name: list(p.full_shape) for p in pieces if 0 not in p.full_shape}
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(f"{path} does not hold {len(missing)} of {len(wanted)} tensors: "
                         f"{', '.join(missing)}")
    for name, shape in wanted.items():
        if tensors[name]["shape"] != shape:
            raise ValueError(f"{path}: {name} is {tensors[name]['shape']}, but {shape} is wanted")
        check_cover(name, tensors[name], path / INDEX)


class Files:
    """The files of a checkpoint, mapped when first touched; each box is checked once."""

    def __init__(self, path, index):
        self.path, self.index, self.maps, self.checked = path, index, {}, set()

    def box(self, name, stored, verify):
        """The tensor in a stored box, a view of the map: what is used of it is read."""
        number, offset, shape, start, nbytes, crc = stored
        file = list(self.index["files"])[number]
        if number not in self.maps:
            check_size(self.path, self.index, file)
            self.maps[number] = map_file(self.path / file)
        if verify and (number, start) not in self.checked:
            if zlib.crc32(memoryview(self.maps[number])[start : start + nbytes]) != crc:
                raise ValueError(f"{self.path / file} is damaged: the crc32 of "
                                 f"{name}{Box(offset, shape)} is another")
            self.checked.add((number, start))
        return tensor_at(self.maps[number], self.index["tensors"][name]["dtype"], shape, start)


# ---------------------------------------------------------------------------------------------
# From the shell


def verify(path):
    index = read_index(path, whole=True)
    files = Files(path, index)
    for name, t in index["tensors"].items():
        check_cover(name, t, path / INDEX)
        for stored in t["boxes"]:
            files.box(name, stored, True)
    print(f"{path}: {len(index['tensors'])} tensors in {len(index['files'])} files are good")


def ls(root):
    root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder")
    print("        step  written                     MB  files  tensors       parameters")
    for step, _, index, state in reversed(list(survey(root))):
        if index:
            n = sum(math.prod(t["shape"]) for k, t in index["tensors"].items() if k[:6] == "param/")
            date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(index["written"]))
            state = (f"{date} {sum(index['files'].values()) / 1e6:>10,.1f} "
                     f"{len(index['files']):>6} {len(index['tensors']):>8} {n:>16,}  complete")
        print(f"{step:>12}  {state}")


def show(path, name=None):
    index = read_index(path)
    if name is not None and name not in index["tensors"]:
        raise ValueError(f"{path} holds no tensor {name}")
    files = list(index["files"])
    for key in index["tensors"] if name is None else [name]:
        t = index["tensors"][key]
        shape = " x ".join(map(str, t["shape"]))
        print(f"{key:<44} {shape:<18} {t['dtype']:<5} {len(t['boxes']):>5} boxes")
        for file, offset, size, _, nbytes, crc in t["boxes"] if name else ():
            print(f"    {Box(offset, size)!s:<26} {files[file]} {nbytes:>12,} bytes  {crc:08x}")


def demo(root):
    barrier = threading.Barrier(3)

    def part(a, b):
        return Piece("param/w", torch.arange(20.0)[a:b], a, (4, 5), (0, 0), (4, 5))

    def rank(r):
        save(root, 1, [part(7 * r, min(7 * r + 7, 20))], {}, r, 3, lambda error: barrier.wait())

    ranks = [threading.Thread(target=rank, args=(r,)) for r in range(3)]
    for do in (threading.Thread.start, threading.Thread.join):
        for thread in ranks:
            do(thread)
    print("Saved by 3 ranks, in slices of 7, 7 and 6 elements:")
    show(latest(root, print), "param/w")
    for r in range(2):
        mine = part(10 * r, 10 * r + 10)
        mine.data.zero_()
        load(latest(root, print), [mine])
        print(f"Loaded by rank {r} of 2: {[str(b) for b, _ in logical(mine)]} {mine.data.tolist()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["ls", "verify", "show"])
    parser.add_argument("path", nargs="?", type=pathlib.Path,
                        help="ls: a run folder or the one with its checkpoints; else a checkpoint")
    parser.add_argument("name", nargs="?", help="show: the tensor whose boxes to list")
    args = parser.parse_args()
    if args.what is None:
        with tempfile.TemporaryDirectory() as root:
            return demo(root)
    if args.path is None:
        parser.error(f"{args.what} needs a path")
    try:
        names = (args.name,) if args.what == "show" else ()
        {"ls": ls, "verify": verify, "show": show}[args.what](args.path, *names)
    except (ValueError, OSError) as e:
        print(f"checkpoint.py: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
