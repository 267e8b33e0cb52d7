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
Writing can be left to a thread, which has a copy of the tensors, while training goes on (Saver).
A path can be the URL of an object store (s3://bucket/run): fsspec reads and writes it.

A Hugging Face folder is the same writer with one box a tensor: what differs is names, layout and
the words of the config, and stands in two tables.

    python checkpoint.py ls DIR | verify CHECKPOINT | show CHECKPOINT [NAME] | diff A B
    python checkpoint.py merge CHECKPOINT OUT | export CHECKPOINT OUT | import HF_FOLDER OUT
    python checkpoint.py        saves a small tensor in 3 slices and loads it in 2
"""

import argparse
import contextlib
import fnmatch
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
import types
import zlib
from typing import NamedTuple

import torch

VERSION = 1
INDEX = "index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def require(ok, message):
    if not ok:
        raise ValueError(message)


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


# ---- Folders and object stores --------------------------------------------------------------
class Url(str):
    """A path on an object store: what is used here of pathlib.Path, through fsspec. A folder there
    is but the beginning of names; a file appears when it has been closed."""

    fs = property(lambda self: file_system(self))
    name = property(lambda self: self.rpartition("/")[2])
    parent = property(lambda self: Url(self.rpartition("/")[0]))

    def __truediv__(self, name):
        return Url(f"{self}/{name}")

    def iterdir(self):
        self.fs.invalidate_cache()  # other ranks write too
        return [self / path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self, False)]

    def glob(self, pattern):
        paths = self.iterdir() if self.is_dir() else []
        return [path for path in paths if fnmatch.fnmatchcase(path.name, pattern)]

    def stat(self):
        written = self.fs.modified(self).timestamp() if self.fs.isfile(self) else 0.0
        return types.SimpleNamespace(st_size=self.fs.size(self), st_mtime=written)

    def exists(self):
        return self.fs.exists(self)

    def is_dir(self):
        self.fs.invalidate_cache()
        return self.fs.isdir(self)

    def mkdir(self, **how):
        self.fs.makedirs(self, exist_ok=True)

    def open(self, mode):
        return self.fs.open(self, mode)

    def read_bytes(self):
        return self.fs.cat_file(self)

    def unlink(self, missing_ok=False):
        if not missing_ok or self.exists():
            self.fs.rm_file(self)


class Remote:
    """A file on an object store as a sequence of bytes, of which each slice is one request."""

    def __init__(self, url):
        self.url, self.size = url, url.stat().st_size

    def __len__(self):
        return self.size

    def __getitem__(self, part):
        return self.url.fs.cat_file(self.url, part.start or 0, part.stop)


def file_system(url):
    """fsspec's for a URL; ValueError where it knows none or a package is missing."""
    try:
        import fsspec
        return fsspec.core.url_to_fs(str(url))[0]
    except (ImportError, ValueError) as e:
        raise ValueError(f"{url}: {e}") from None


def place(path):
    """A pathlib.Path, or a Url if it is written as one."""
    if "://" not in str(path):
        return pathlib.Path(path)
    file_system(path)
    return Url(str(path).rstrip("/"))


# ---- The safetensors container --------------------------------------------------------------
def raw(tensor):  # its bytes; no copy is made of what is contiguous and on the host
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def sync_folder(path):  # what was created, renamed or removed in it is durable then
    if isinstance(path, Url):
        return
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_file(path, head, tensors=()):
    """Bytes and then tensors, one at a time, durable on return. Never over an existing file (on an
    object store the caller sees to that: names take turns)."""
    on_disk = not isinstance(path, Url)
    with open(path, "xb") if on_disk else path.open("wb") as f:
        f.write(head)
        for tensor in tensors:
            f.write(raw(tensor))
            del tensor  # before the next is made
        if on_disk:
            f.flush()
            os.fsync(f.fileno())
    sync_folder(path.parent)


def write_safetensors(path, tensors, metadata, make=None):
    """`make(name)` gives a tensor when its turn comes; then `tensors` tells only its shape."""
    header, at = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda k: -tensors[k].element_size())  # aligned without gaps
    for name in order:
        t, begin = tensors[name], at
        at += t.numel() * t.element_size()
        header[name] = {"dtype": CODES[t.dtype], "shape": [*t.shape], "data_offsets": [begin, at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_file(path, len(text).to_bytes(8, "little") + text, map(make or tensors.get, order))


def read_header(path):
    """({name: dtype, shape, data_offsets}, metadata, the file as a memory map, or as a Remote: only
    what is used is read). The offsets are from the beginning of the file."""
    try:
        if isinstance(path, Url):
            file = Remote(path)
        else:
            with open(path, "rb") as f:  # private pages: writable for torch, never written back
                file = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        n = int.from_bytes(file[:8], "little")
        entries, at = json.loads(file[8 : 8 + n]), 8 + n
        metadata = entries.pop("__metadata__", {})
        for e in sorted(entries.values(), key=lambda e: e["data_offsets"]):
            begin, at = at, at + math.prod(e["shape"]) * DTYPES[e["dtype"]].itemsize
            require(e["data_offsets"] == [begin - 8 - n, at - 8 - n], "a gap or an overlap")
            e["data_offsets"] = begin, at
        require(at == len(file), f"{len(file)} bytes instead of {at}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}: not a whole safetensors file ({e!r})") from None
    return entries, metadata, file


def stored(entry, file):
    """A tensor of a file: a view of the memory map."""
    shape, dtype, (begin, end) = entry["shape"], DTYPES[entry["dtype"]], entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    if isinstance(file, Remote):
        file, begin = bytearray(file[begin:end]), 0
    return torch.frombuffer(file, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)


def read_safetensors(path):
    """{name: tensor}, views of the memory map."""
    entries, _, file = read_header(path)
    return {name: stored(entry, file) for name, entry in entries.items()}


# ---- Save -----------------------------------------------------------------------------------
class Save:
    """One rank's part in a save of `pieces`, its share of all tensors, and `meta`, a dict that JSON
    can hold. Every rank writes; when all have, rank 0 commits; if one could not, it drops."""

    def __init__(self, root, step, pieces, meta, rank, world, keep=None, every=None):
        if json.loads(json.dumps(meta, allow_nan=False)) != meta:
            raise ValueError("meta must survive JSON: no tuples, only strings as keys")
        self.root, self.step, self.pieces, self.meta = root, step, pieces, meta
        self.rank, self.world, self.kept = rank, world, (keep, every)
        self.folder = place(root) / f"step_{step:09d}"

    def write(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)
        sync_folder(self.folder)  # the index that is seen must be the one that stays
        turn = ".1" if "rank_00000.safetensors" in named(self.folder) else ""  # names take turns
        self.files = [f"rank_{r:05d}{turn}.safetensors" for r in range(self.world)]
        mine = self.folder / self.files[self.rank]
        mine.unlink(missing_ok=True)  # left by a save that was interrupted
        write_rank(mine, self.pieces)

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


def write_rank(path, pieces, make=None):
    """`make(name)`, called twice, gives the tensor of which a piece is the outline."""
    tensors, about = {}, {}
    for piece in pieces:
        for box, view in logical(piece):
            key = f"{piece.name}{box}"
            require(key not in tensors, f"{key} is given twice")
            tensors[key] = view
            crc = zlib.crc32(raw(make(piece.name) if make else view))
            about[key] = [piece.name, list(piece.full_shape), box.offset, crc]
    write_safetensors(path, tensors, {"format": f"minimesh {VERSION}", "boxes": json.dumps(about)},
                      make and (lambda key: make(about[key][0])))


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
             "files": {name: (folder / name).stat().st_size for name in files},
             "box": ["file", "offset", "shape", "start", "bytes", "crc32"], "tensors": tensors}
    text = json.dumps(index, separators=(",", ":")).encode()
    if isinstance(folder, Url):
        folder.fs.pipe_file(folder / INDEX, text)
    else:
        new = folder / f"{INDEX}.tmp"
        new.unlink(missing_ok=True)
        write_file(new, text)
        os.replace(new, folder / INDEX)
    tidy(folder)


# ---- Find, load and keep --------------------------------------------------------------------
def read_index(path, whole=False):
    """The index of a checkpoint, or a ValueError that says why it is none. With `whole` every file
    must be there in its full size."""
    path = place(path)
    try:
        index = json.loads((path / INDEX).read_bytes())
        kind = f"{index['format']} {index['version']}"
        require(kind == f"minimesh {VERSION}", f"it is of {kind}, not minimesh {VERSION}")
        if lost := {"written", "meta", "files", "tensors"} - set(index):
            raise ValueError(f"no {lost}")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no {INDEX}, so no complete checkpoint") from None
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{path / INDEX}: not readable ({e})") from None
    for name, size in index["files"].items() if whole else ():
        require((path / name).exists(), f"{path / name} is missing")
        if (found := (path / name).stat().st_size) != size:
            raise ValueError(f"{path / name} has {found:,} bytes instead of {size:,}")
    return index


def read_meta(path):
    return read_index(path)["meta"]


def survey(root):
    """(step, folder, index, None) or (step, folder, None, what is wrong), highest step first."""
    found = [(int(path.name[5:]), path) for path in place(root).glob("step_*")
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


def find(path):
    """The checkpoint that `path` is, or the newest complete one of a run folder. ValueError."""
    path = place(path)
    path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if (path / INDEX).exists():
        return path
    newest = latest(path, lambda line: print(line, file=sys.stderr))
    require(newest, f"{path}: no complete checkpoint there")
    return newest


def open_boxes(path):
    """What several calls of `load` share: the index, files mapped once, boxes found good."""
    return read_index(path), functools.cache(read_header), set()


def load(path, pieces, verify=True, opened=None):
    """Fill the data of `pieces` from a checkpoint of any layout; padding is left as it is. With
    verify=False a box that is needed in part is not checked, so that only that part is read."""
    path, (index, read, good) = place(path), opened or open_boxes(path)
    tensors, files = index["tensors"], [path / name for name in index["files"]]
    wanted = {p.name: list(p.full_shape) for p in pieces if 0 not in p.full_shape}
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(f"{path} does not hold {len(missing)} of {len(wanted)} tensors: "
                         f"{', '.join(missing)}")
    for name, shape in wanted.items():
        if tensors[name]["shape"] != shape:
            raise ValueError(f"{path}: {name} is {tensors[name]['shape']}, but {shape} is wanted")
        check_cover(name, tensors[name], path / INDEX)
    for piece in pieces:
        for want, view in logical(piece):
            for file, offset, shape, _, _, crc in tensors[piece.name]["boxes"]:
                box = Box(offset, shape)
                if both := meet(want, box):
                    (entries, _, data), key = read(files[file]), f"{piece.name}{box}"
                    whole = [s.stop - s.start for s in both[1]] == shape
                    held = stored(entries[key], data) if key in entries else None
                    test = key not in good and (verify or whole)
                    if held is None or test and zlib.crc32(raw(held)) != crc:
                        raise ValueError(f"{files[file]} is damaged: another crc32 of {key}")
                    good |= {key} if test else set()
                    view[both[0]].copy_(held[both[1]])


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
        if isinstance(path, Url):
            path.fs.rm(path, recursive=True)
        else:
            shutil.rmtree(path)
    return gone


# ---- Whole tensors, one at a time -----------------------------------------------------------
def whole(name, shape, data):  # the piece of who holds all of a tensor
    return Piece(name, data, 0, tuple(shape), (0,) * len(shape), tuple(shape))


def outlines(tensors):
    """A piece that holds no data for each tensor of an index."""
    return [whole(name, t["shape"], torch.empty(math.prod(t["shape"]), dtype=DTYPES[t["dtype"]],
                                                device="meta")) for name, t in tensors.items()]


def whole_tensors(path):
    """(index, read) of a checkpoint of any layout. read(name) makes the tensor in one piece;
    read(name, out) fills `out`, flat and of any dtype."""
    opened = open_boxes(path)

    def read(name, out=None):
        shape, dtype = opened[0]["tensors"][name]["shape"], opened[0]["tensors"][name]["dtype"]
        out = torch.empty(math.prod(shape), dtype=DTYPES[dtype]) if out is None else out
        load(path, [whole(name, shape, out)], opened=opened)
        return out.view(shape)

    return opened[0], read


@contextlib.contextmanager
def appear(out):
    """A new folder, which stands at `out` when the block has ended well, and nowhere before."""
    require(not isinstance(out, Url), f"{out}: must be a folder on a disk")
    require(not out.exists(), f"{out} exists already")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temp:
        new = pathlib.Path(temp, out.name)
        new.mkdir()
        yield new
        new.rename(out)
    sync_folder(out.parent)


def write_whole(out, step, meta, tensors, make):
    """A checkpoint of one file with one box a tensor. `tensors` is as in an index, of which only
    shape and dtype count; make(name) gives a tensor when its turn comes."""
    with appear(out) as new:
        write_rank(new / "rank_00000.safetensors", outlines(tensors), make)
        commit(new, step, meta, ["rank_00000.safetensors"])


def merge(path, out):
    """Rewrite a checkpoint of any layout as one file with one box a tensor."""
    index, read = whole_tensors(path)
    write_whole(out, index["step"], index["meta"], index["tensors"], read)


# ---- What differs ---------------------------------------------------------------------------
def difference(x, y):
    """Of two tensors of one shape, NaN being equal to NaN: None, or (the largest absolute
    difference, the index of the first)."""
    first, most, n = None, torch.zeros((), dtype=torch.float64), 1 << 20
    for i, (a, b) in enumerate(zip(x.view(-1).split(n), y.view(-1).split(n))):
        odd = (a != b) & ((a == a) | (b == b))
        if odd.any():
            most = torch.maximum(most, (a[odd].double() - b[odd].double()).abs().max())
            first = i * n + odd.int().argmax().item() if first is None else first
    return None if first is None else (most.item(), boxes(first, first + 1, x.shape)[0][1].offset)


def diff(a, b):
    """Compare two checkpoints of any layouts tensor by tensor, in the order of the first. Prints
    what differs, returns whether anything does."""
    (ours, read_a), (theirs, read_b) = whole_tensors(a), whole_tensors(b)
    ours, theirs, odd = ours["tensors"], theirs["tensors"], []
    for name in ours | theirs:
        x, y = (f"{t[name]['dtype']} {t[name]['shape']}" if name in t else "absent"
                for t in (ours, theirs))
        line = "" if x == y else f"{x} and {y}  "
        if name in ours and name in theirs and ours[name]["shape"] == theirs[name]["shape"]:
            if found := difference(read_a(name), read_b(name)):
                line += f"up to {found[0]:.3g}, first at {[*found[1]]}"
        if line:
            odd.append(name)
            print(f"{name:<44} {line}")
    print(f"{len(odd)} of {len(ours | theirs)} tensors differ", *odd[:1], sep=", first ")
    return bool(odd)


def diff_metrics(a, b):
    """Print the first step and tensor at which the fingerprints of two metrics.jsonl part; returns
    whether they do. Of a step that was repeated the last counts."""
    lines = ([json.loads(line) for line in path.read_bytes().splitlines()] for path in (a, b))
    ours, theirs = ({e["step"]: e["fingerprints"] for e in run if "fingerprints" in e}
                    for run in lines)
    if not (steps := sorted(ours.keys() & theirs.keys())):
        raise ValueError(f"{a} and {b} have fingerprints of no common step")
    for step in steps:
        x, y = ours[step], theirs[step]
        if odd := [name for name in x | y if x.get(name) != y.get(name)]:
            print(f"step {step}: {len(odd)} of {len(x | y)} tensors differ, first {odd[0]}")
            return True
    print(f"equal at {len(steps)} common steps, {steps[0]} to {steps[-1]}")
    return False


# ---- Hugging Face ---------------------------------------------------------------------------
# Their name, ours, our shape: V vocab_size, P max_len, D d_model, F d_ff, Q and K n_head and
# n_kv_head times d_head, H d_head; t: theirs is the transpose, b: a bias goes with the weight.
# Rows of one name of theirs are its parts, in order. lm_head is there if not tied.
TENSORS = {"gpt2": """
    transformer.wte                          embed.tokens          VD
    transformer.wpe                          embed.positions       PD
    transformer.h.*.ln_1                     layers.*.attn_norm    Db
    transformer.h.*.attn.c_attn              layers.*.attn.q       QDtb
    transformer.h.*.attn.c_attn              layers.*.attn.k       KDtb
    transformer.h.*.attn.c_attn              layers.*.attn.v       KDtb
    transformer.h.*.attn.c_proj              layers.*.attn.o       DQtb
    transformer.h.*.ln_2                     layers.*.mlp_norm     Db
    transformer.h.*.mlp.c_fc                 layers.*.mlp.up       FDtb
    transformer.h.*.mlp.c_proj               layers.*.mlp.down     DFtb
    transformer.ln_f                         head.norm             Db
    lm_head                                  head                  VD""", "llama": """
    model.embed_tokens                       embed.tokens          VD
    model.layers.*.input_layernorm           layers.*.attn_norm    D
    model.layers.*.self_attn.q_proj          layers.*.attn.q       QD
    model.layers.*.self_attn.k_proj          layers.*.attn.k       KD
    model.layers.*.self_attn.v_proj          layers.*.attn.v       KD
    model.layers.*.self_attn.o_proj          layers.*.attn.o       DQ
    model.layers.*.post_attention_layernorm  layers.*.mlp_norm     D
    model.layers.*.mlp.gate_proj             layers.*.mlp.gate     FD
    model.layers.*.mlp.up_proj               layers.*.mlp.up       FD
    model.layers.*.mlp.down_proj             layers.*.mlp.down     DF
    model.norm                               head.norm             D
    lm_head                                  head                  VD"""}
TENSORS["qwen3"] = TENSORS["llama"] + """
    model.layers.*.self_attn.q_norm          layers.*.attn.q_norm  H
    model.layers.*.self_attn.k_norm          layers.*.attn.k_norm  H"""
# Keys that translate, ours:theirs. Of each kind, what must be so in our section and in theirs.
LLAMA, GPT2, ROPE = (dict(pair.split(":") for pair in pairs.split()) for pairs in (
    "n_layer:num_hidden_layers d_model:hidden_size n_head:num_attention_heads d_head:head_dim "
    "n_kv_head:num_key_value_heads d_ff:intermediate_size vocab_size:vocab_size "
    "max_len:max_position_embeddings norm_eps:rms_norm_eps tied:tie_word_embeddings",
    "n_layer:n_layer d_model:n_embd n_head:n_head d_ff:n_inner vocab_size:vocab_size "
    "max_len:n_positions norm_eps:layer_norm_epsilon tied:tie_word_embeddings",
    "factor:factor low_freq_factor:low_freq_factor high_freq_factor:high_freq_factor "
    "original_max_len:original_max_position_embeddings"))
BASE = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": False,
        "qk_norm": False, "window": None, "logit_softcap": None}
KINDS = {
    "gpt2": (GPT2, BASE | {"norm": "layernorm", "positions": "learned", "activation": "gelu",
                           "bias": True},
             {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
              "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
              "add_cross_attention": False}),
    "llama": (LLAMA, BASE, {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
                            "attention_bias": False, "mlp_bias": False}),
    "qwen3": (LLAMA, BASE | {"qk_norm": True},
              {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu",
               "attention_bias": False, "use_sliding_window": False})}


def check_fixed(where, kind, config, fixed):
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise ValueError(f"{where}{key} = {config[key]!r}: a {kind} of Hugging Face that can "
                             f"be converted has {value!r}")


def to_config(m, eot=None):
    """(kind, config.json) of our section `model`, `eot` being the token that ends a text. In the
    words of transformers 4: 5 reads both."""
    kind = "gpt2" if m["norm"] == "layernorm" else "qwen3" if m["qk_norm"] else "llama"
    keys, ours, theirs = KINDS[kind]
    width = m["d_model"] // m["n_head"]  # two of their classes insist on it
    check_fixed("model.", kind, m, ours | {
        "gpt2": {"n_kv_head": m["n_head"], "d_head": width, "d_model": m["n_head"] * width},
        "llama": {"d_model": m["n_head"] * width}, "qwen3": {}}[kind])
    config = {"model_type": kind, "bos_token_id": None, "eos_token_id": eot} | theirs
    config |= {their: m[our] for our, their in keys.items()}
    if kind != "gpt2":
        config |= {"rope_theta": m["rope_theta"], "rope_scaling": m["rope_scaling"] and {
            "rope_type": "llama3", **{ROPE[key]: x for key, x in m["rope_scaling"].items()}}}
    return kind, config


def from_config(config):
    """(kind, our section `model`) of a config.json of transformers 4 or 5."""
    kind = config.get("model_type")
    require(kind in KINDS, f"config.json: model_type = {kind!r}: known are {', '.join(KINDS)}")
    keys, ours, theirs = KINDS[kind]
    check_fixed("config.json: ", kind, config, theirs)
    given = {our: config[their] for our, their in keys.items() if config.get(their) is not None}
    for our, value in given.items():
        require(our in ("norm_eps", "tied") or type(value) is int and value > 0,
                f"config.json: {keys[our]} = {value!r}: must be an integer above 0")
    width, heads = given.get("d_model", 0), given.get("n_head", 1)
    m = {"d_ff": 4 * width, "d_head": width // heads, "n_kv_head": heads, "tied": kind == "gpt2"}
    m |= given  # over their defaults
    if lost := [their for our, their in keys.items() if our not in m]:
        raise ValueError(f"config.json: no {', '.join(lost)}")
    rope = {"rope_theta": config.get("rope_theta") or 10000.0}
    rope |= config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta, types = rope.pop("rope_theta"), {rope.pop(key, None) for key in ("rope_type", "type")}
    types -= {None, "default"}
    if types - {"llama3"} or set(rope) != set(ROPE.values() if types else ()):
        raise ValueError(f"config.json: rope {types or ''} {rope}: known is only llama3 with "
                         f"{', '.join(ROPE.values())}")
    scaling = {our: rope[their] for our, their in ROPE.items()} if rope else None
    return kind, m | ours | {"rope_theta": float(theta), "rope_scaling": scaling, "dropout": 0.0,
                             "z_loss": 0.0, "init_std": 0.02, "depth_init": True}


def table(kind, m):
    """{their name: (whether it is a transpose, {our name: our shape} of its parts)}, by layers."""
    out, rows = {}, [line.split() for line in TENSORS[kind].strip().splitlines()]
    size = {"V": m["vocab_size"], "P": m["max_len"], "D": m["d_model"], "F": m["d_ff"],
            "Q": m["n_head"] * m["d_head"], "K": m["n_kv_head"] * m["d_head"], "H": m["d_head"]}
    for i in map(str, range(m["n_layer"])):
        for theirs, ours, code in rows:
            if i != "0" and "*" not in theirs or theirs == "lm_head" and m["tied"]:
                continue
            shape = tuple(size[c] for c in code if c in size)
            for leaf, of in (("weight", shape), ("bias", shape[:1]))[: 1 + ("b" in code)]:
                name = f"{theirs}.{leaf}".replace("*", i)
                parts = out.setdefault(name, ("t" in code, {}))[1]
                parts[f"{ours}.{leaf}".replace("*", i)] = of
    return out


def stacked(parts):  # the shape of the parts one below the other
    return sum(s[0] for s in parts.values()), *list(parts.values())[0][1:]


def check_tensors(where, held, wanted):
    """Of {name: shape}: what is there, what must be."""
    wrong = [f"{name} is missing" if name not in held else f"{name} is unknown"
             if name not in wanted else f"{name} is {[*held[name]]} instead of {[*wanted[name]]}"
             for name in wanted | held if held.get(name) != wanted.get(name)]
    require(not wrong, f"{where}: {len(wrong)} tensors do not fit: {', '.join(wrong[:9])}")


def export(path, out, dtype=None, limit=5 * 10**9):
    """Write the parameters of a checkpoint as a Hugging Face folder, in files of at most `limit`
    bytes or one tensor. dtype None: as they are stored. Returns what became of the tokenizer."""
    index, read = whole_tensors(path)
    if (model := index["meta"].get("config", {}).get("model")) is None:
        raise ValueError(f"{path}: its meta has no config.model")
    model = model | {"d_head": model["d_head"] or model["d_model"] // model["n_head"]}
    kind, config = to_config(model, index["meta"].get("eot"))
    rows = table(kind, model)
    stored = {name[6:]: t for name, t in index["tensors"].items() if name[:6] == "param/"}
    check_tensors(path, {name: tuple(t["shape"]) for name, t in stored.items()},
                  {name: shape for _, parts in rows.values() for name, shape in parts.items()})
    dtype = dtype or DTYPES[stored["embed.tokens.weight"]["dtype"]]

    def make(name, device=None):
        transposed, parts = rows[name]
        full = torch.empty(stacked(parts), dtype=dtype, device=device)
        for part, view in zip(parts, full.split([s[0] for s in parts.values()])):
            if device is None:
                read(f"param/{part}", view.view(-1))
        return full.t() if transposed else full

    files, room = [], 0
    for name in rows:
        t = make(name, "meta")
        if room < t.nbytes:
            files, room = [*files, {}], limit
        files[-1][name], room = t, room - t.nbytes
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    texts = {"config.json": config | {"torch_dtype": str(dtype)[6:]},
             "model.safetensors.index.json": {
                 "metadata": {"total_size": sum(t.nbytes for f in files for t in f.values())},
                 "weight_map": {key: name for name, f in zip(names, files) for key in f}}}
    if len(files) == 1:
        names = ["model.safetensors"]
        del texts["model.safetensors.index.json"]
    with appear(out) as new:
        for name, tensors in zip(names, files):
            write_safetensors(new / name, tensors, {"format": "pt"}, make)
        for name, text in texts.items():
            write_file(new / name, json.dumps(text, indent=2).encode())
        return copy_tokenizer(index["meta"].get("tokenizer"), new)


def copy_tokenizer(name, out):
    """The tokenizer.json that `name` is or has in it, and what lies beside it."""
    source = pathlib.Path(str(name))
    source = source / "tokenizer.json" if source.is_dir() else source
    if source.suffix != ".json" or not source.is_file():
        return f"no tokenizer: {name} is no tokenizer.json"
    write_file(out / "tokenizer.json", source.read_bytes())
    for beside in ("tokenizer_config.json", "special_tokens_map.json"):
        if source.with_name(beside).is_file():
            write_file(out / beside, source.with_name(beside).read_bytes())
    return f"tokenizer: {source}"


def read_object(file):
    """The object of a JSON file, or a ValueError with its name."""
    try:
        read = json.loads(file.read_bytes())
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    require(isinstance(read, dict), f"{file}: must be an object of JSON")
    return read


def import_folder(folder, out, tokenizer=None):
    """Make a checkpoint, of parameters only, of a Hugging Face folder; dtypes as they are there."""
    require(not isinstance(folder, Url), f"{folder}: must be a folder on a disk")
    config = read_object(folder / "config.json")
    kind, model = from_config(config)
    rows, held, files = table(kind, model), {}, ["model.safetensors"]
    if not (folder / files[0]).exists():
        index = read_object(folder / "model.safetensors.index.json")
        require(isinstance(index.get("weight_map"), dict), f"{folder}: its index has no weight_map")
        files = sorted(set(index["weight_map"].values()))
    for file in files:
        for name, t in read_safetensors(folder / file).items():
            if name.startswith(("h.", "wte.", "wpe.", "ln_f.")):  # as GPT-2 was published
                name = f"transformer.{name}"
            if not name.endswith((".attn.bias", ".attn.masked_bias", ".inv_freq")):  # constants
                held[name] = t
    shapes = {name: stacked(parts)[:: -1 if t else 1] for name, (t, parts) in rows.items()}
    embed, head = next(iter(rows)), "lm_head.weight"
    if model["tied"] and head in held:
        shapes[head] = shapes[embed]
    check_tensors(folder, {name: t.shape for name, t in held.items()}, shapes)
    if model["tied"] and not torch.equal(held.get(head, held[embed]), held[embed]):
        raise ValueError(f"{folder}: {head} differs from {embed}, but tie_word_embeddings is true")
    views = {}
    for name, (transposed, parts) in rows.items():
        t = held[name].t() if transposed else held[name]
        names = [f"param/{part}" for part in parts]
        views |= zip(names, t.split([s[0] for s in parts.values()]))
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = str((folder / "tokenizer.json").resolve())
    meta = {"step": 0, "samples": 0, "config": {"model": model}, "tokenizer": tokenizer,
            "eot": config.get("eos_token_id")}
    tensors = {name: {"shape": t.shape, "dtype": CODES[t.dtype]} for name, t in views.items()}
    write_whole(out, 0, meta, tensors, views.get)


# ---- From the shell -------------------------------------------------------------------------
def verify(path):
    index = read_index(path, whole=True)
    wanted = outlines(index["tensors"])
    load(path, wanted)  # everything, to nowhere
    print(f"{path}: {len(wanted)} tensors in {len(index['files'])} files are good")


def ls(root):
    root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    require(root.is_dir(), f"{root}: no such folder")
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
    require(name is None or name in index["tensors"], f"{path} holds no tensor {name}")
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
    parser.add_argument("what", nargs="?", choices=["ls", "verify", "show", "diff", "merge",
                                                    "export", "import"])
    parser.add_argument("path", nargs="?", default=".",
                        help="ls: a run folder or the one with its checkpoints; import: a Hugging "
                        "Face folder; diff: a checkpoint or a metrics.jsonl; else a checkpoint")
    parser.add_argument("name", nargs="?", help="show: the tensor whose boxes to list; diff: what "
                        "to compare with; merge, export, import: the folder to make")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                        help="export: other than it is stored")
    parser.add_argument("--tokenizer", help="import: a name or file, if not its tokenizer.json")
    args = parser.parse_args()
    if args.what in ("diff", "merge", "export", "import") and args.name is None:
        parser.error(f"{args.what} needs two paths")
    try:
        path, other = place(args.path), place(args.name or "")
        if args.what == "diff":
            sys.exit((diff_metrics if path.name.endswith(".jsonl") else diff)(path, other))
        {None: demo, "ls": lambda: ls(path), "verify": lambda: verify(path),
         "show": lambda: show(path, args.name), "merge": lambda: merge(path, other),
         "export": lambda: print(export(path, other, args.dtype and getattr(torch, args.dtype))),
         "import": lambda: import_folder(path, other, args.tokenizer)}[args.what]()
    except (ValueError, OSError) as e:
        print(f"checkpoint.py: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
