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
store: one put). A step that is saved again gets files of other names (rank_00000.1.safetensors):
a crash leaves the old index and its files or the new ones. What it does not name is removed later.

    python checkpoint.py ls DIR | verify CHECKPOINT | show CHECKPOINT [NAME]
    python checkpoint.py        saves a small tensor in 3 slices and loads it in 2
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import mmap
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
import zlib
from typing import NamedTuple

import torch

VERSION = 1
INDEX = "index.json"
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


# ---- Boxes ----------------------------------------------------------------------------------
def boxes(start, stop, shape):
    """Elements [start, stop) of a flattened tensor, in order, as at most 2n-1 boxes:
    [(where in the slice it begins, Box)]."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is not a slice of a tensor of shape {tuple(shape)}")
    if not shape:
        return [(0, Box((), ()))] * (stop - start)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    out, at = [], start
    while at < stop:  # the largest box that begins here
        d = next(d for d, s in enumerate(strides) if at % s == 0 and at + s <= stop)
        offset = tuple(at // s % n for s, n in zip(strides, shape))
        count = min((stop - at) // strides[d], shape[d] - offset[d])
        out.append((at - start, Box(offset, (1,) * d + (count, *shape[d + 1 :]))))
        at += count * strides[d]
    return out


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
    """Every element must lie in exactly one box: the sizes add up and every element lies in an odd
    number of boxes, which is so if, corner by corner, boxes and tensor together cancel in pairs."""
    shape, odd, total = entry["shape"], set(), 0
    for offset, size in [([0] * len(shape), shape), *(b[1:3] for b in entry["boxes"])]:
        odd ^= set(itertools.product(*((o, o + s) for o, s in zip(offset, size))))
        total += math.prod(size)
    if odd or total != 2 * math.prod(shape):
        raise ValueError(f"{where}: {name}: boxes of {total - math.prod(shape):,} elements do not "
                         f"cover the {math.prod(shape):,} of {shape} exactly once")


def meet(a, b):
    """What two boxes share, as an index into the one and into the other, or None."""
    begin = [max(o, p) for o, p in zip(a.offset, b.offset)]
    end = [min(o + m, p + n) for o, m, p, n in zip(*a, *b)]
    if any(i >= j for i, j in zip(begin, end)):
        return None
    return [tuple(slice(i - o, j - o) for i, j, o in zip(begin, end, box.offset)) for box in (a, b)]


# ---- The safetensors container --------------------------------------------------------------
def raw(tensor):  # its bytes; no copy is made of what is contiguous and on the host
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def sync_folder(path):  # what was created, renamed or removed in it is durable then
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_file(path, head, tensors=()):
    """Bytes and then tensors, one at a time, durable on return. Never over an existing file."""
    with open(path, "xb") as f:
        f.write(head)
        for tensor in tensors:
            f.write(raw(tensor))
        f.flush()
        os.fsync(f.fileno())
    sync_folder(pathlib.Path(path).parent)


def write_safetensors(path, tensors, metadata):
    header, at = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda k: -tensors[k].element_size())  # aligned without gaps
    for name in order:
        t, begin = tensors[name], at
        at += t.numel() * t.element_size()
        header[name] = {"dtype": CODES[t.dtype], "shape": [*t.shape], "data_offsets": [begin, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_file(path, len(text).to_bytes(8, "little") + text, (tensors[name] for name in order))


def read_header(path):
    """({name: dtype, shape, data_offsets}, metadata, the file as a memory map: only what is used
    is read). The offsets are from the beginning of the file."""
    try:
        with open(path, "rb") as f:  # private pages: writable for torch, never written back
            file = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        n = int.from_bytes(file[:8], "little")
        entries, at = json.loads(file[8 : 8 + n]), 8 + n
        metadata = entries.pop("__metadata__", {})
        for e in sorted(entries.values(), key=lambda e: e["data_offsets"]):
            begin, at = at, at + math.prod(e["shape"]) * DTYPES[e["dtype"]].itemsize
            if e["data_offsets"] != [begin - 8 - n, at - 8 - n]:
                raise ValueError("a gap or an overlap")
            e["data_offsets"] = begin, at
        if at != len(file):
            raise ValueError(f"{len(file)} bytes instead of {at}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: not a whole safetensors file ({e!r})") from None
    return entries, metadata, file


def read_safetensors(path):
    """{name: tensor}, views of the memory map."""
    (entries, _, file), out = read_header(path), {}
    for name, e in entries.items():
        flat = torch.empty(0, dtype=DTYPES[e["dtype"]])
        if n := math.prod(e["shape"]):
            flat = torch.frombuffer(file, dtype=flat.dtype, count=n, offset=e["data_offsets"][0])
        out[name] = flat.view(e["shape"])
    return out


# ---- Save -----------------------------------------------------------------------------------
class Save:
    """One rank's part in a save of `pieces`, its share of all tensors, and `meta`, a dict that JSON
    can hold. Every rank writes; when all have, rank 0 commits; if one could not, it drops."""

    def __init__(self, root, step, pieces, meta, rank, world, keep=None, every=None):
        if json.loads(json.dumps(meta, allow_nan=False)) != meta:
            raise ValueError("meta must survive JSON: no tuples, only strings as keys")
        self.root, self.step, self.pieces, self.meta = root, step, pieces, meta
        self.rank, self.world, self.kept = rank, world, (keep, every)
        self.folder = pathlib.Path(root) / f"step_{step:09d}"

    def write(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)
        sync_folder(self.folder)  # the index that is seen must be the one that stays
        turn = ".1" if "rank_00000.safetensors" in named(self.folder) else ""  # names take turns
        self.files = [f"rank_{r:05d}{turn}.safetensors" for r in range(self.world)]
        mine = self.folder / self.files[self.rank]
        mine.unlink(missing_ok=True)  # left by a save that was interrupted
        write_rank(mine, self.step, self.pieces)

    def commit(self):
        if self.rank == 0:
            commit(self.folder, self.step, self.meta, self.files)
            prune(self.root, *self.kept)

    def drop(self):
        if self.rank == 0:
            with contextlib.suppress(OSError):
                tidy(self.folder)


def save(root, step, pieces, meta, rank, world, agree, keep=None, every=None):
    """Write a checkpoint; with `keep`, prune. Every rank calls this. `agree(error)` is a barrier of
    all ranks that raises on each of them if any error was not None. Returns the folder."""
    with together(agree):
        this = Save(root, step, pieces, meta, rank, world, keep, every)
    try:
        for part in (this.write, this.commit):
            with together(agree):
                part()
    except BaseException:
        this.drop()
        raise
    return this.folder


class Saver:
    """Saves by a thread while training goes on, one at a time, from a copy of the pieces. No thread
    calls a collective: the caller sums `counts` over all ranks when it sums something anyway, and
    tells the sums to `settle` on every rank. A part that all have ended is followed by the next.
    Counts only grow: sums that are out of date are too small and change nothing."""

    def __init__(self, world):
        self.world, self.memory = world, torch.empty(0, dtype=torch.uint8)
        self.save, self.done = None, None  # under way; the step of the last that was completed
        self.counts = 0, 0  # parts that ended on this rank since the run began; that failed
        self.begun, self.failures = 0, 0  # on every rank; of all ranks

    def stage(self, pieces):
        """`pieces` with their data in host memory that is kept from one save to the next."""
        starts = [0, *itertools.accumulate(-(-p.data.nbytes // 64) * 64 for p in pieces)]
        on_gpu = any(p.data.is_cuda for p in pieces)
        if self.memory.nbytes < starts[-1]:
            self.memory = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=on_gpu)
        out = [p._replace(data=self.memory[at : at + p.data.nbytes].view(p.data.dtype))
               for p, at in zip(pieces, starts)]
        for host, p in zip(out, pieces):
            host.data.copy_(p.data.detach(), non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if on_gpu else None
        return out

    def start(self, save):
        """Begin a Save of staged pieces."""
        self.save, self.left = save, [save.write, save.commit]
        self.begin()

    def begin(self):
        def body(part):
            if sys.platform == "linux":
                os.nice(10)  # of this thread: training comes first
            self.error = None
            try:
                if self.copied:
                    self.copied.synchronize()
                part()
            except BaseException as e:
                self.error = e
            ended, failed = self.counts
            self.counts = ended + 1, failed + (self.error is not None)

        self.begun += 1  # a daemon: a run that fails does not wait for it
        self.thread = threading.Thread(target=body, args=[self.left.pop(0)], daemon=True)
        self.thread.start()

    def settle(self, ended, failed, agree):
        """Told the sums of `counts`: go on if all ranks have ended the part under way. If it failed
        on any, the save is dropped and `agree` raises its error on all."""
        if self.save is None or ended < self.begun * self.world:
            return
        save = self.save
        if failed > self.failures:
            self.failures, self.save = failed, None
            save.drop()
            agree(self.error)
        elif self.left:
            self.begin()
        else:
            self.save, self.done = None, save.step


@contextlib.contextmanager
def together(agree):
    """All ranks come through this block or all raise."""
    try:
        yield
    except Exception as e:
        agree(e)
        raise
    agree(None)


def named(folder):
    """The files of the checkpoint that is there, if one is."""
    with contextlib.suppress(ValueError):
        return read_index(folder)["files"]
    return ()


def tidy(folder):
    """Remove what the index does not name: interrupted, failed and replaced saves leave it."""
    sync_folder(folder)  # first: the index that is seen must be the one that stays
    keep = named(folder)
    for path in (*folder.glob("rank_*.safetensors"), *folder.glob("*.tmp")):
        if path.name not in keep:
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
    write_safetensors(path, tensors, {"format": f"minimesh {VERSION}", "step": str(step),
                                      "boxes": json.dumps(about)})


def commit(folder, step, meta, files):
    """See that all is there, then write the index: from its rename on the checkpoint exists."""
    tensors = {}
    for number, file in enumerate(files):
        entries, metadata, _ = read_header(folder / file)
        for key, (name, full, offset, crc) in json.loads(metadata["boxes"]).items():
            dtype, shape, (begin, end) = entries[key].values()
            t = tensors.setdefault(name, {"shape": full, "dtype": dtype, "boxes": []})
            if (t["shape"], t["dtype"]) != (full, dtype):
                raise ValueError(f"{folder / file}: {name} is {dtype} {full}, in another file "
                                 f"{t['dtype']} {t['shape']}")
            t["boxes"].append([number, offset, shape, begin, end - begin, crc])
    for name, t in tensors.items():
        check_cover(name, t, folder)
    index = {"format": "minimesh", "version": VERSION, "step": step, "world": len(files),
             "written": time.time(), "meta": meta,
             "files": {name: os.path.getsize(folder / name) for name in files},
             "box": ["file", "offset", "shape", "start", "bytes", "crc32"], "tensors": tensors}
    new = folder / f"{INDEX}.tmp"
    new.unlink(missing_ok=True)
    write_file(new, json.dumps(index, separators=(",", ":")).encode())
    os.replace(new, folder / INDEX)
    tidy(folder)


# ---- Find, load and keep --------------------------------------------------------------------
def read_index(path, whole=False):
    """The index of a checkpoint, or a ValueError that says why it is none. With `whole` every file
    must be there in its full size."""
    path = pathlib.Path(path)
    try:
        index = json.loads((path / INDEX).read_bytes())
        kind = f"{index['format']} {index['version']}"
        if kind != f"minimesh {VERSION}":
            raise ValueError(f"it is of {kind}, not minimesh {VERSION}")
        if lost := {"written", "meta", "files", "tensors"} - set(index):
            raise ValueError(f"no {lost}")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no {INDEX}, so no complete checkpoint") from None
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{path / INDEX}: not readable ({e})") from None
    for name, size in index["files"].items() if whole else ():
        if not (path / name).is_file():
            raise ValueError(f"{path / name} is missing")
        if (found := os.path.getsize(path / name)) != size:
            raise ValueError(f"{path / name} has {found:,} bytes instead of {size:,}")
    return index


def read_meta(path):
    return read_index(path)["meta"]


def survey(root):
    """(step, folder, index, None) or (step, folder, None, what is wrong), highest step first."""
    found = [(int(path.name[5:]), path) for path in pathlib.Path(root).glob("step_*")
             if path.name[5:].isdecimal() and path.is_dir()]
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
    lost = []
    for _, path, index, reason in survey(root):
        if index:
            return path
        warn(f"passed over: {reason}")
        if (path / INDEX).exists():
            lost.append(reason)
    if lost:
        raise ValueError(f"{root}: no good checkpoint left, move it to start afresh: {lost[0]}")


def load(path, pieces, verify=True):
    """Fill the data of `pieces` from a checkpoint of any layout; padding is left as it is. With
    verify=False a box that is needed in part is not checked, so that only that part is read."""
    index, path = read_index(path), pathlib.Path(path)
    tensors, files = index["tensors"], [path / name for name in index["files"]]
    wanted = {p.name: list(p.full_shape) for p in pieces if 0 not in p.full_shape}
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(f"{path} does not hold {len(missing)} of {len(wanted)} tensors: "
                         f"{', '.join(missing)}")
    for name, shape in wanted.items():
        if tensors[name]["shape"] != shape:
            raise ValueError(f"{path}: {name} is {tensors[name]['shape']}, but {shape} is wanted")
        check_cover(name, tensors[name], path / INDEX)
    read, good = functools.cache(read_safetensors), set()  # map a file, check a box only once
    for piece in pieces:
        for want, view in logical(piece):
            for file, offset, shape, _, _, crc in tensors[piece.name]["boxes"]:
                box = Box(offset, shape)
                if both := meet(want, box):
                    held, key = read(files[file]), f"{piece.name}{box}"
                    whole = [s.stop - s.start for s in both[1]] == shape
                    if key not in good and (verify or whole):
                        if key not in held or zlib.crc32(raw(held[key])) != crc:
                            raise ValueError(f"{files[file]} is damaged: another crc32 of {key}")
                        good.add(key)
                    view[both[0]].copy_(held[key][both[1]])


def prune(root, keep, every=None):
    """Remove the complete checkpoints but for the `keep` of highest step, the `keep` written last
    (the same, unless another run's are there), and those of every `every`-th step; also saves that
    never ended and are older than the newest complete one. keep None: none. Returns what went."""
    for value in (keep, every):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"prune: {value!r} is not a number from 1, or null")
    if keep is None:
        return []
    found = list(survey(root))[::-1]
    good = [(step, path, index["written"]) for step, path, index, _ in found if index]
    kept = {path for _, path, _ in good[-keep:] + sorted(good, key=lambda c: c[2])[-keep:]}
    kept |= {path for step, path, _ in good if every and step % every == 0}
    newest = max(((path / INDEX).stat().st_mtime for path in kept), default=0)
    gone = [path for _, path, index, _ in found if path not in kept
            and (index or not (path / INDEX).exists()
                 and max(p.stat().st_mtime for p in (path, *path.iterdir())) < newest)]
    for path in gone:
        (path / INDEX).unlink(missing_ok=True)  # first: half a checkpoint is none
        sync_folder(path)
        shutil.rmtree(path)
    return gone


# ---- From the shell -------------------------------------------------------------------------
def verify(path):
    index, wanted = read_index(path, whole=True), []
    for name, t in index["tensors"].items():  # load everything to nowhere
        shape, dtype = t["shape"], DTYPES[t["dtype"]]
        data = torch.empty(math.prod(shape), dtype=dtype, device="meta")
        wanted.append(Piece(name, data, 0, shape, [0] * len(shape), shape))
    load(path, wanted)
    print(f"{path}: {len(wanted)} tensors in {len(index['files'])} files are good")


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


def demo():
    def part(a, b, data):
        return Piece("param/w", data[a:b], a, (4, 5), (0, 0), (4, 5))

    with tempfile.TemporaryDirectory() as root:
        slices = [part(a, b, torch.arange(20.0)) for a, b in ((0, 7), (7, 14), (14, 20))]
        path = save(root, 1, slices, {}, rank=0, world=1, agree=lambda error: None)
        print("Saved in slices of 7, 7 and 6 elements:")
        show(path, "param/w")
        for mine in (part(0, 10, torch.zeros(20)), part(10, 20, torch.zeros(20))):
            load(path, [mine])
            print(f"Loaded: {[str(box) for box, _ in logical(mine)]} {mine.data.tolist()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["ls", "verify", "show"])
    parser.add_argument("path", nargs="?", type=pathlib.Path, default=".",
                        help="ls: a run folder or the one with its checkpoints; else a checkpoint")
    parser.add_argument("name", nargs="?", help="show: the tensor whose boxes to list")
    args = parser.parse_args()
    try:
        if args.what == "show":
            show(args.path, args.name)
        else:
            {None: lambda path: demo(), "ls": ls, "verify": verify}[args.what](args.path)
    except (ValueError, OSError) as e:
        print(f"checkpoint.py: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
