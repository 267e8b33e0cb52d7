"""Text -> tokens on disk -> batches.

A token folder holds train-00000.tokens, train-00001.tokens, ..., val-00000.tokens. One shard:

  byte  0  "minimesh"                       byte 40  number of documents
        8  version, bytes per token (4 + 4)      48  bytes of text that it was made from
       16  vocabulary size                       56  bytes of the documents' names
       24  id of the end-of-text token           64  name of the tokenizer (64 bytes, zero padded)
       32  number of tokens                     128  the tokens, 2 or 4 bytes each; zeros up to 8 n
                                                ...  where each document starts; names, a line each

Integers are little-endian, of 8 bytes. A document lies in one shard and ends in the end-of-text
token; the shards of a split are one stream. Window w of length T is the T + 1 tokens from wT on, so
every token but the first is a target exactly once. Two documents (| ends one) and T = 3:

  a b | c d e |     window 0: tokens a b | targets b | c     window 1: tokens c d e targets d e |

Which window is sample number n of a run is a function of (seed, n): any number of ranks reads the
same batches, and to resume is to set n. `python data.py` shows it, `-h` lists the commands.
"""
from __future__ import annotations

import argparse
import base64
import functools
import glob
import gzip
import hashlib
import inspect
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import unicodedata
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # imported where batches are made: a tokenizing process starts without it
    import torch

HEAD = np.dtype([("magic", "S8"), ("version", "<u4"), ("itemsize", "<u4"), ("vocab_size", "<u8"),
                 ("eot", "<u8"), ("n_tokens", "<u8"), ("n_docs", "<u8"), ("n_bytes", "<u8"),
                 ("names_bytes", "<u8"), ("tokenizer", "S64")])
MAGIC, VERSION = b"minimesh", 1
PIECE = 1 << 20  # text goes to the tokenizing processes in pieces of about this many bytes
BLOCK = 4096  # samples are ordered in blocks of this many: weights are exact in steps of 1/BLOCK
IGNORE = -100  # a target that does not count
TEXT = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".js", ".ts", ".java",
        ".go", ".rs", ".sh", ".html", ".tex", ".jsonl")  # taken from folders, as .gz too


# ---- shards -------------------------------------------------------------------------------------

def dtype_of(vocab_size):
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def shards(folder, split="*"):
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{split}-[0-9]*.tokens")))


def read_header(path):
    """The header of a shard; ValueError if the file is not what it says it is."""
    with open(path, "rb") as f:
        raw, size = f.read(HEAD.itemsize), os.fstat(f.fileno()).st_size
    if len(raw) < HEAD.itemsize or raw[:8] != MAGIC:
        raise ValueError(f"{path}: not a token file; make it with `python data.py prepare`")
    h = SimpleNamespace(**dict(zip(HEAD.names, np.frombuffer(raw, HEAD)[0].item())))
    h.tokenizer = h.tokenizer.decode("utf-8", "replace")
    h.starts = HEAD.itemsize + -(-h.n_tokens * h.itemsize // 8) * 8  # Python integers: no overflow
    h.names = h.starts + 8 * h.n_docs
    for bad, why in ((h.version != VERSION, f"format version {h.version}, not {VERSION}"),
                     (h.itemsize != dtype_of(h.vocab_size).itemsize,
                      f"{h.itemsize} bytes per token do not go with vocabulary {h.vocab_size}"),
                     (size != h.names + h.names_bytes,
                      f"{size} bytes, its header says {h.names + h.names_bytes}: truncated?")):
        if bad:
            raise ValueError(f"{path}: {why}; prepare it again")
    return h


class ShardWriter:
    """Streams documents into shards in the folder `temp`, from where `finish` moves them."""

    def __init__(self, temp, split, tok, shard_tokens=100_000_000):
        self.temp, self.split, self.tok, self.limit = temp, split, tok, shard_tokens
        self.dtype, self.file, self.count, self.total = dtype_of(tok.vocab_size), None, 0, 0

    def name(self, k):
        return f"{self.split}-{k:05d}.tokens"

    def add(self, tokens, n_bytes, name):
        """A document with its eot; with `name` None only a part, more of it follows."""
        if self.file is None:
            self.file = open(os.path.join(self.temp, self.name(self.count)), "wb")
            self.file.seek(HEAD.itemsize)
            self.starts, self.names, self.n_tokens, self.n_bytes = [0], [], 0, 0
        self.file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.n_tokens += len(tokens)
        self.n_bytes, self.total = self.n_bytes + n_bytes, self.total + n_bytes
        if name is not None:
            self.starts.append(self.n_tokens)
            self.names.append(name.replace("\n", " ").encode("utf-8", "backslashreplace"))
            if self.n_tokens >= self.limit:
                self.close()

    def close(self):
        if self.file is not None:
            names, file, self.file = b"\n".join(self.names), self.file, None
            head = (MAGIC, VERSION, self.dtype.itemsize, self.tok.vocab_size, self.tok.eot,
                    self.n_tokens, len(self.names), self.n_bytes, len(names),
                    self.tok.name.encode())
            with file:
                file.write(b"\0" * (-self.n_tokens * self.dtype.itemsize % 8))
                file.write(np.array(self.starts[:-1], "<i8").tobytes() + names)
                file.seek(0)
                file.write(np.array(head, HEAD).tobytes())
                file.flush()
                os.fsync(file.fileno())
            self.count += 1

    def finish(self, folder):
        """Old shards go first and shard 0 comes last: without it there is nothing to read."""
        self.close()
        for old in shards(folder, self.split):
            os.remove(old)
        for name in map(self.name, reversed(range(self.count))):
            os.replace(os.path.join(self.temp, name), os.path.join(folder, name))


# ---- tokenizers ---------------------------------------------------------------------------------

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
          r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (f"{BEFORE}{UPPER}*{LOWER}+{AFTER}|{BEFORE}{UPPER}+{LOWER}*{AFTER}"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
RANKS = {50256: (GPT2, 50256), 100256: (CL100K, 100257), 199998: (O200K, 199999),
         128000: (CL100K, 128001)}  # ranks in a tiktoken file -> pattern, eot; the last is Llama 3
EOT = "<|endoftext|> <|end_of_text|> </s> <eos> <|im_end|> <|eot_id|> [EOS]".split()


class Tokenizer(NamedTuple):
    name: str
    vocab_size: int
    eot: int
    bpe: object = None  # a tiktoken.Encoding; None: the 256 bytes
    nfc: bool = False  # text is normalised first
    file: str | None = None

    def encode(self, text):
        """Ids of ordinary text: "<|endoftext|>" within a document is just these characters."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        try:
            raw = text.encode()
        except UnicodeEncodeError:  # a lone surrogate, which JSON can hold, becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            raw = text.encode()
        if self.bpe is None:
            return np.frombuffer(raw, np.uint8)
        return self.bpe.encode_to_numpy(text, disallowed_special=())  # 1.2x encode_ordinary's speed

    def decode(self, ids):
        """Text; an id that the vocabulary does not use is nothing."""
        out = []
        for i in map(int, ids):
            try:
                out.append(self.bpe.decode_single_token_bytes(i) if self.bpe
                           else bytes([i]) if i < 256 else EOT[0].encode())
            except KeyError:
                continue
        return b"".join(out).decode("utf-8", "replace")


def load_tokenizer(name):
    """byte, gpt2, cl100k_base, o200k_base, a tiktoken ranks file or an HF tokenizer.json."""
    if name == "byte":
        return Tokenizer("byte", 257, 256)
    import tiktoken
    if name in ("gpt2", "cl100k_base", "o200k_base"):
        try:
            bpe = tiktoken.get_encoding(name)
        except Exception as e:  # being offline has a dozen kinds
            raise ValueError(f"tokenizer {name}: tiktoken cannot get it ({type(e).__name__}); "
                             "offline, give the path of a tiktoken ranks file or a tokenizer.json "
                             "in place of the name, or use byte") from None
        return Tokenizer(name, bpe.n_vocab, bpe.eot_token, bpe)
    if not os.path.isfile(name):
        raise ValueError(f"tokenizer {name}: no file, nor byte, gpt2, cl100k_base, o200k_base")
    with open(name, "rb") as f:
        raw = f.read()
    kind, read = ("json", _from_json) if name.endswith(".json") else ("tiktoken", _from_ranks)
    try:
        pattern, ranks, special, eot, nfc = read(raw)
        full = f"tokenizer.{kind} sha256:{hashlib.sha256(raw).hexdigest()[:12]}"
        if any(bytes([b]) not in ranks for b in range(256)):
            raise ValueError("a byte is missing")
        bpe = tiktoken.Encoding(full, pat_str=pattern, mergeable_ranks=ranks,
                                special_tokens=special)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise ValueError(f"tokenizer {name}: {e} ({type(e).__name__}); use a tiktoken ranks file "
                         "or a tokenizer.json of byte-level BPE, as GPT-2, Llama 3, Qwen") from None
    return Tokenizer(full, bpe.max_token_value + 1, eot, bpe, nfc, name)


def _from_ranks(raw):
    pairs = [line.split() for line in raw.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if {*ranks.values()} != {*range(len(ranks))}:
        raise ValueError("ranks are not 0, 1, 2, ...")
    pattern, eot = RANKS.get(len(ranks), (GPT2, len(ranks)))
    return pattern, ranks, {EOT[0]: eot}, eot, False


def _from_json(raw):
    """HF merges the pair that is first in a list, tiktoken the pair whose result has the lowest id:
    the same when ids grow along the list and every token is made of lower ones."""
    spec = json.loads(raw)
    model, norm, steps = spec["model"], spec.get("normalizer"), spec["pre_tokenizer"]
    steps, vocab = steps.get("pretokenizers", [steps]), model["vocab"]
    kinds = [s["type"] for s in steps]
    odd = [k for k in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "invert",
                       "dropout", "add_prefix_space") if any(s.get(k) for s in [model, *steps])]
    if (model["type"] != "BPE" or kinds not in (["ByteLevel"], ["Split", "ByteLevel"]) or odd
            or steps[0].get("behavior", "Isolated") != "Isolated"
            or steps[-1].get("use_regex", True) != (len(steps) == 1)
            or (norm and norm["type"] != "NFC")):
        raise ValueError(f"{model['type']} {odd or ''} with normalizer {norm and norm['type']}, "
                         f"pre-tokenizer {kinds} cannot be reproduced")
    pattern = steps[0]["pattern"]["Regex"] + "|(?s:.)" if len(steps) == 2 else GPT2  # loses no text
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that stand for themselves
    spare = iter(range(256, 512))
    byte = {chr(b if b in plain else next(spare)): b for b in range(256)}
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    made = [vocab[a + b] for a, b in merges]
    if made != sorted(made) or any(max(vocab[a], vocab[b]) > i for (a, b), i in zip(merges, made)
                                   if len(a + b) > 2):
        raise ValueError("ids are not in the order of the merges")
    ranks = {bytes(byte[c] for c in t): vocab[t] for t in [*byte, *(a + b for a, b in merges)]}
    special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    eot = next((special[t] for t in EOT if t in special), None)
    if eot is None:
        raise ValueError(f"none of {' '.join(EOT)} to end a text")
    return pattern, ranks, special, eot, norm is not None


# ---- text -> tokens -----------------------------------------------------------------------------

def _walk(folder):
    for root, dirs, files in os.walk(folder):
        dirs[:] = sorted(d for d in dirs if d[0] != "." and d != "__pycache__")
        yield from (os.path.join(root, f) for f in sorted(files)
                    if f[0] != "." and f.removesuffix(".gz").endswith(TEXT))


def find_text(inputs):
    """[(path, name)] of files behind paths, folders, globs; a name is relative to them all."""
    paths = []
    for item in [inputs] if isinstance(inputs, str) else inputs:
        hits = [item] if os.path.exists(item) else sorted(glob.glob(item, recursive=True))
        found = [p for hit in hits for p in (_walk(hit) if os.path.isdir(hit) else [hit])]
        if not found:
            raise ValueError(f"no text at {item}: " + ("no such file or folder" if not hits else
                                                       f"none of {' '.join(TEXT)}, also .gz"))
        paths += map(os.path.abspath, found)
    base = os.path.commonpath([os.path.dirname(p) for p in paths])
    return [(p, os.path.relpath(p, base)) for p in dict.fromkeys(paths)]


def _cut(text, jsonl):
    """Where to cut the first piece off a long text: at a line end between a visible character and a
    letter or digit, where every pattern above cuts too, so that the tokens are those of the whole;
    failing that at a line end of the last half, or the last character. JSON lines stay whole."""
    if jsonl or len(text) < PIECE:
        return text.rfind(b"\n") + 1 if jsonl else 0
    at = len(text)
    while (at := text.rfind(b"\n", len(text) // 2, at)) > 0:
        if 32 < text[at - 1] < 127 and text[at + 1 : at + 2].isalnum():
            return at + 1
    lead = next((i for i in (1, 2, 3) if text[-i] & 0xC0 != 0x80), 4)  # a character's first byte
    return text.rfind(b"\n", len(text) // 2) + 1 or len(text) - lead


def _blocks(files):
    """Lists, about PIECE bytes each, of (name, first line number, bytes, whether the file ends)."""
    block, size = [], 0
    for path, name in files:
        jsonl, rest, line, new = name.removesuffix(".gz").endswith(".jsonl"), b"", 1, True
        try:
            with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
                while new:
                    new = f.read(PIECE)
                    rest += new
                    if (cut := _cut(rest, jsonl) if new else len(rest)) or not new:
                        block.append((name, line, rest[:cut], not new))
                    size, line, rest = size + cut, line + rest.count(b"\n", 0, cut), rest[cut:]
                    if size >= PIECE:
                        yield block
                        block, size = [], 0
        except (EOFError, OSError, zlib.error) as e:
            raise ValueError(f"{path}: cannot be read ({e})") from None
    yield block


def _documents(name, line, raw, last):
    """(name, text, bytes, whether it ends) of the documents, or the part of one, in a piece."""
    if not name.removesuffix(".gz").endswith(".jsonl"):
        yield name, raw.decode("utf-8", "replace"), len(raw), last
        return
    for k, row in enumerate(raw.split(b"\n"), line):
        if row.strip():
            try:
                text = json.loads(row)["text"]
                yield f"{name}:{k}", text, len(text.encode("utf-8", "surrogatepass")), True
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(f"{name}:{k}: not a JSON object with a string `text`") from None


_own_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)  # once per process


def _encode(tokenizer, split, val, block):
    """[(split, tokens, bytes, name, or None when the document goes on)] of a block."""
    tok, out = _own_tokenizer(tokenizer), []
    for name, text, size, ends in (d for piece in block for d in _documents(*piece)):
        ids = tok.encode(text)
        full = np.full(len(ids) + ends, tok.eot, dtype_of(tok.vocab_size))
        full[: len(ids)] = ids
        hashed = int.from_bytes(hashlib.blake2b(os.fsencode(name)).digest()[:8], "big")
        out.append(("val" if hashed < val * 2**64 else split, full, size, name if ends else None))
    return out


def _map(work, items, procs):
    """map(work, items) by so many processes, in order, with few items under way."""
    if procs == 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(procs, get_context("spawn")) as pool:
        waiting = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * procs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def prepare(inputs, out, tokenizer="byte", split="train", val=0.0, shard_tokens=100_000_000,
            procs=None, force=False, quiet=False):
    """Text files, folders and globs -> token shards. A file is a document, or a line of a .jsonl;
    a fraction `val` of them, by a hash of the name, goes to the split val. A shard ends with the
    document that fills it. The number of processes does not change the result."""
    files, tok = find_text(inputs), load_tokenizer(tokenizer)
    splits = [split, "val"] if val else [split]
    if not (0 <= val < 1 and shard_tokens > 0 and (procs is None or procs > 0)):
        raise ValueError(f"val {val} must be from 0 to below 1, shard_tokens {shard_tokens} and "
                         f"procs {procs} at least 1")
    if not split.isalnum() or splits == ["val", "val"]:
        raise ValueError(f"split {split!r}: must be letters and digits, and not val if val is set")
    for path in shards(out):
        if (old := os.path.basename(path).split("-")[0]) in splits and not force:
            raise ValueError(f"{path} exists; choose another folder, or --force replaces the split")
        if old not in splits and (has := read_header(path).tokenizer) != tok.name:
            raise ValueError(f"{path} has tokenizer {has}, not {tok.name}; choose another folder")
    if tok.bpe is None or sum(os.path.getsize(path) for path, _ in files) < 4 * PIECE:
        procs = 1  # starting processes takes longer than the work
    fresh, line = not os.path.isdir(out), ""
    os.makedirs(out, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=".prepare-") as temp:
            writers = {s: ShardWriter(temp, s, tok, shard_tokens) for s in splits}
            try:
                work = functools.partial(_encode, tokenizer, split, val)
                line = _fill(writers, _map(work, _blocks(files), procs or os.cpu_count()), quiet)
            finally:
                for w in writers.values():
                    w.close()
            for s, w in writers.items():
                if not w.total:
                    raise ValueError(f"no text for split {s} in {inputs}; add some" +
                                     (", or change val (documents stay whole)" if val else ""))
            if tok.file:
                shutil.copyfile(tok.file, os.path.join(out, tok.name.split()[0]))
            for w in writers.values():
                w.finish(out)
    except BaseException:
        if fresh:
            os.rmdir(out)
        raise
    if not quiet:
        print(line, file=sys.stderr)


def _fill(writers, parts, quiet):
    begun, line = time.perf_counter(), ""
    for part in parts:
        for split, *document in part:
            writers[split].add(*document)
        size = sum(w.total for w in writers.values()) / 1e6
        line = f"\rprepare: {size:.1f} MB, {size / (time.perf_counter() - begun):.1f} MB/s "
        if sys.stderr.isatty() and not quiet:
            print(line, end="", file=sys.stderr, flush=True)
    return line


def prepare_default(out):
    """What every machine has: Python's own library, as bytes, 5% of the files for validation."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    files = [p for p in _walk(sysconfig.get_path("stdlib")) if not skip & {*p.split(os.sep)}]
    prepare([p for p in files if p.endswith(".py")], out, val=0.05)


# ---- reading ------------------------------------------------------------------------------------

class Tokens:
    """A split of a token folder: memory-mapped shards that read as one stream of tokens."""

    def __init__(self, folder, split="train"):
        self.folder, self.split, self.files = folder, split, shards(folder, split)
        if not self.files:
            raise ValueError(f"data.path {folder}: holds no {split}-*.tokens; make them with "
                             f"`python data.py prepare TEXT --out {folder} --split {split}`")
        self.heads = [read_header(path) for path in self.files]
        h = self.heads[0]
        self.vocab_size, self.eot, self.tokenizer_name = h.vocab_size, h.eot, h.tokenizer
        self.dtype, (name, *sha) = np.dtype(f"<u{h.itemsize}"), h.tokenizer.split()
        self.tokenizer_path = os.path.join(folder, name) if sha else name  # for load_tokenizer
        for k, (path, g) in enumerate(zip(self.files, self.heads)):
            if int(os.path.basename(path).split("-")[1].split(".")[0]) != k:
                raise ValueError(f"{path}: found where shard {k} should be; one is missing")
            if (g.vocab_size, g.eot, g.tokenizer) != (h.vocab_size, h.eot, h.tokenizer):
                raise ValueError(f"{path}: of another tokenizer than {self.files[0]}")
        self.raw = [np.memmap(path, np.uint8, "r").view(np.ndarray) for path in self.files]
        self.data = [r[HEAD.itemsize :][: g.n_tokens * g.itemsize].view(self.dtype)
                     for r, g in zip(self.raw, self.heads)]
        self.starts = [r[g.starts : g.names].view("<i8") for r, g in zip(self.raw, self.heads)]
        self.first = np.cumsum([0, *(g.n_tokens for g in self.heads)], dtype=np.int64)  # per shard
        self.n_tokens, self.n_docs = int(self.first[-1]), sum(g.n_docs for g in self.heads)
        self.n_bytes = sum(g.n_bytes for g in self.heads)

    def windows(self, seq_len):
        """How many sequences there are; at least one, or ValueError."""
        if not 0 < seq_len < self.n_tokens:
            raise ValueError(f"data.seq_len {seq_len}: {self.folder} split {self.split} has "
                             f"{self.n_tokens} tokens; it must be from 1 to {self.n_tokens - 1}")
        return (self.n_tokens - 1) // seq_len

    def _at(self, pos):
        """(shard, token within the shard) of a place in the stream."""
        if not 0 <= pos < self.n_tokens:
            raise ValueError(f"{self.folder} {self.split}: no token {pos} among {self.n_tokens}")
        k = int(np.searchsorted(self.first, pos, "right")) - 1
        return k, int(pos) - int(self.first[k])

    def rows(self, starts, n):
        """[len(starts), n] in the file's dtype: the n tokens from each of `starts` (int64) on."""
        if len(self.data) == 1:  # one gather from the overlapping windows, within numpy's bounds
            size, step = max(0, self.n_tokens - n + 1), self.dtype.itemsize
            out = np.ndarray((size, n), self.dtype, self.data[0], 0, (step, step))[starts]
        else:
            out = np.empty((len(starts), n), self.dtype)
            for row, start in zip(out, starts):
                k, a = self._at(start)
                part = self.data[k][a : a + n]
                while len(part) < n:  # goes on in the next shard
                    k += 1
                    part = np.concatenate([part, self.data[k][: n - len(part)]])
                row[:] = part
        self._check_ids(out, starts)
        return out

    def _check_ids(self, rows, starts):
        if rows.size and rows.max() >= self.vocab_size:
            r, c = np.argwhere(rows >= self.vocab_size)[0]
            k, a = self._at(starts[r] + c)
            byte = HEAD.itemsize + a * self.dtype.itemsize
            raise ValueError(f"{self.files[k]}: token {a} (byte {byte}) is {rows[r, c]}, not below "
                             f"the vocabulary size {self.vocab_size}; prepare it again")

    def read(self, start, n):
        """Tokens [start, start + n) as int64."""
        return self.rows(np.array([start], np.int64), n)[0].astype(np.int64)

    def doc_starts(self, start, n):
        """Where in the tokens [start, start + n) a document begins: offsets from `start`."""
        out, (k, _) = [], self._at(start)
        while k < len(self.data) and self.first[k] < start + n:
            base = int(self.first[k]) - start
            lo, hi = np.searchsorted(self.starts[k], [-base, n - base])
            out.append(self.starts[k][lo:hi] + base)
            k += 1
        return np.concatenate(out)

    def names(self, k):
        return bytes(self.raw[k][self.heads[k].names :]).decode("utf-8", "replace").split("\n")

    def where(self, pos):
        """(name of the document, offset in it, shard file) of a token."""
        k, a = self._at(pos)
        d = int(np.searchsorted(self.starts[k], a, "right")) - 1
        return self.names(k)[d], a - int(self.starts[k][d]), self.files[k]

    def check(self):
        """Reads every token: ids in the vocabulary, documents that end in the end-of-text token."""
        for k, (path, data, starts) in enumerate(zip(self.files, self.data, self.starts)):
            for a in range(0, len(data), PIECE):
                self._check_ids(data[None, a : a + PIECE], self.first[k : k + 1] + a)
            ends = np.append(starts[1:], len(data))[: len(starts)]
            if (ends <= starts).any() or starts[:1].any() or bool(len(starts)) != bool(len(data)):
                raise ValueError(f"{path}: its table of documents is damaged; prepare it again")
            for d in np.flatnonzero(data[ends - 1] != self.eot)[:1]:
                raise ValueError(f"{path}: document {self.names(k)[d]} does not end in the end-of-"
                                 f"text token {self.eot} at token {ends[d] - 1}; prepare it again")


# ---- the order of samples -----------------------------------------------------------------------

def _mix(z, salt=0):
    """splitmix64 of a uint64 array, xor `salt` (an integer from 0 on or a uint64 array)."""
    z = (z ^ salt) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


def permute(x, n, key):
    """Where a random permutation of 0..n-1 puts each of x; `key` (uint64) chooses which.
    A Feistel network permutes the next power of 4; what lands at n or above goes through again."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask, key = (1 << half) - 1, np.broadcast_to(key, x.shape)
    y, todo = x.astype(np.uint64), np.arange(len(x))
    while len(todo):
        left, right = y[todo] >> half, y[todo] & mask
        for i in range(6):
            left, right = right, left ^ (_mix(_mix(key[todo], i), right) & mask)
        y[todo] = left << half | right
        todo = todo[y[todo] >= n]
    return y.astype(np.int64)


def slots_of(weights):
    """How many of every BLOCK samples each source gives: its share, by largest remainder."""
    share = np.array(weights, float) / np.sum(weights) * BLOCK
    slots = np.floor(share).astype(np.int64)
    slots[np.argsort(slots - share, kind="stable")[: BLOCK - slots.sum()]] += 1
    return slots


@functools.lru_cache(maxsize=8)
def _block(seed, block, n_windows, weights):
    """[3, BLOCK]: source, epoch, window of the samples block * BLOCK and on."""
    slots, out = slots_of(weights), np.zeros((3, BLOCK), np.int64)
    key = _mix(np.array([seed % 2**64], np.uint64))
    if len(slots) > 1:
        owner = np.repeat(np.arange(len(slots)), slots)
        out[0] = owner[permute(np.arange(BLOCK), BLOCK, _mix(key, block))]
    for s, n in enumerate(n_windows):
        epoch, k = np.divmod(block * slots[s] + np.arange(slots[s]), n)  # after the blocks before
        key_s = _mix(_mix(_mix(key), s), epoch.astype(np.uint64))
        out[1:, out[0] == s] = epoch, permute(k, n, key_s)
    return out


def sample_at(seed, n, n_windows, weights=(1.0,)):
    """(source, epoch, window) of sample number n since the run began, an integer or an array. A
    source goes through its windows in a new random order each epoch, without replacement."""
    n_windows, weights = tuple(n_windows), tuple(weights)
    if np.ndim(n) == 0:
        return tuple(_block(seed, n // BLOCK, n_windows, weights)[:, n % BLOCK].tolist())
    block, slot = n // BLOCK, n % BLOCK
    out = np.empty((3, len(n)), np.int64)
    for b in {*block.tolist()}:
        here = block == b
        out[:, here] = _block(seed, b, n_windows, weights)[:, slot[here]]
    return out


# ---- batches ------------------------------------------------------------------------------------

class Batch(NamedTuple):
    """One microbatch. Query i of a row sees the keys lo[i] .. i of its row."""

    tokens: torch.Tensor  # [b, T] int64
    targets: torch.Tensor  # [b, T] int64, IGNORE where none counts
    pos: torch.Tensor  # [b, T] int64, restarts with each document if documents are masked
    lo: torch.Tensor | None  # [b, T] int32; None when all are 0, plain causal
    sample: torch.Tensor  # [b] int64, number within the global batch
    n_valid: int  # targets that count
    kind: str  # what lo says: "causal" | "other"


def make_batch(sources, source, window, sample, seq_len, mask_documents=False, pin=False,
               real=None):
    """The one place where targets and masks are made, to train and to evaluate. `source`, `window`,
    `sample` are [b] arrays; the rows from `real` on are padding, of which nothing counts."""
    from torch import from_numpy
    b, span, at = len(window), np.arange(seq_len), window * seq_len
    if len(sources) == 1:
        rows = sources[0].rows(at, seq_len + 1)
    else:
        rows = np.empty((b, seq_len + 1), np.int64)
        for s in {*source.tolist()}:
            rows[source == s] = sources[s].rows(at[source == s], seq_len + 1)
    tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    pos, lo, n_valid = np.empty_like(tokens), None, tokens.size
    pos[:] = span
    if mask_documents:
        begins = np.zeros(rows.shape, bool)
        for i in range(b):
            begins[i, sources[source[i]].doc_starts(int(at[i]), seq_len + 1)] = True
        targets[begins[:, 1:]] = IGNORE  # by place: an eot is a target, what comes after it is not
        lo = np.maximum.accumulate(np.where(begins[:, :-1], span, 0), axis=1)
        pos, lo = pos - lo, lo.astype(np.int32) if lo.any() else None
    if real is not None:
        targets[real:] = IGNORE
    if mask_documents or real is not None:
        n_valid = int(np.count_nonzero(targets != IGNORE))
    put = (lambda a: from_numpy(a).pin_memory()) if pin else from_numpy
    return Batch(put(tokens), put(targets), put(pos), None if lo is None else put(lo),
                 put(sample.astype(np.int64)), n_valid, "causal" if lo is None else "other")


class Loader:
    """The microbatches of a data rank. `step` is pure; `start` and `next` run it ahead."""

    def __init__(self, sources, weights, seq_len, seed, global_batch, microbatch, rank=0, ranks=1,
                 mask_documents=False, pin=False):
        weights = tuple(weights or [1.0] * len(sources))
        if len(weights) != len(sources) or min(weights) <= 0 or min(slots_of(weights)) == 0:
            raise ValueError(f"data.weights {weights}: must be one per source ({len(sources)}), "
                             f"each above 1/{BLOCK} of their sum")
        if microbatch < 1 or global_batch < 1 or global_batch % ranks:
            raise ValueError(f"train.global_batch {global_batch}, train.microbatch {microbatch}: "
                             f"must be 1 or more, the first a multiple of the {ranks} data ranks, "
                             f"such as {max(1, global_batch // ranks) * ranks}")
        for s, first in zip(sources, sources[:1] * len(sources)):
            if (s.tokenizer_name, s.vocab_size) != (first.tokenizer_name, first.vocab_size):
                raise ValueError(f"data.path {s.folder}: tokenizer {s.tokenizer_name}, but "
                                 f"{first.folder} has {first.tokenizer_name}; prepare both alike")
        self.order = seed, tuple(s.windows(seq_len) for s in sources), weights
        self.sources, self.seq_len, self.global_batch = sources, seq_len, global_batch
        self.mask_documents, self.pin, self.pool = mask_documents, pin, None
        self.mine, local = [], global_batch // ranks  # per microbatch: which of the batch
        for done in range(0, local, microbatch):
            m = min(microbatch, local - done)
            self.mine.append(done * ranks + rank * m + np.arange(m))

    def step(self, samples):
        """This rank's microbatches of the step that starts when `samples` samples are consumed."""
        seed, n_windows, weights = self.order
        out = []
        for mine in self.mine:
            source, _, window = sample_at(seed, samples + mine, n_windows, weights)
            out.append(make_batch(self.sources, source, window, mine, self.seq_len,
                                  self.mask_documents, self.pin))
        return out

    def start(self, samples):
        """Reads ahead from here on, two steps deep, in a thread."""
        self.close()
        self.pool, self.ahead, self.at = ThreadPoolExecutor(1), deque(), samples
        self._fill()

    def _fill(self):
        while len(self.ahead) < 2:
            self.ahead.append((self.at, self.pool.submit(self.step, self.at)))
            self.at += self.global_batch

    def next(self):
        """(samples consumed before this step, its microbatches). Raises the thread's errors."""
        if self.pool is None:
            raise RuntimeError("Loader.next before Loader.start")
        samples, future = self.ahead.popleft()
        batches = future.result()
        self._fill()
        return samples, batches

    def close(self):
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None


def eval_batches(tokens, seq_len, n_sequences, microbatch, rank=0, ranks=1, mask_documents=False,
                 pin=False):
    """`n_sequences` windows (None: all) evenly over the split, dealt out to the ranks. Each rank
    yields equally many batches of equal size: the rows past the end of its share are padding."""
    total = tokens.windows(seq_len)
    n = min(n_sequences or total, total)
    for done in range(0, -(-n // ranks), microbatch):
        i = (done + np.arange(microbatch)) * ranks + rank
        yield make_batch([tokens], i * 0, np.where(i < n, i * total // n, 0), i, seq_len,
                         mask_documents, pin, int(np.count_nonzero(i < n)))


# ---- commands -----------------------------------------------------------------------------------

def peek(folder, split="train", at=0):
    """The header of a split, and the text around token AT."""
    t = Tokens(folder, split)
    print(f"{folder} {split}: {t.n_tokens} tokens ({t.dtype}), {t.n_docs} documents, "
          f"{t.n_bytes} bytes of text, {len(t.files)} shards, tokenizer {t.tokenizer_name}, "
          f"vocabulary {t.vocab_size}, eot {t.eot}")
    ids = t.read(at, min(128, t.n_tokens - at))
    print(*t.where(at), ids[:16].tolist(), "..." if len(ids) > 16 else "")
    if t.tokenizer_name != "synth":
        print(load_tokenizer(t.tokenizer_path).decode(ids))


def check(folder):
    """Reads all tokens of a folder; exit code 2 names the first fault."""
    for split in sorted({os.path.basename(p).split("-")[0] for p in shards(folder)}) or ["train"]:
        t = Tokens(folder, split)
        t.check()
        print(f"{folder} {split}: {t.n_tokens} tokens, {t.n_docs} documents: good")


def synth(out, tokens=1_000_000, vocab=257, docs=1000, seed=0, split="train"):
    """Random tokens in DOCS equal documents, for tests and measurements."""
    if not 0 < docs <= tokens or vocab < 2 or shards(out, split):
        raise ValueError(f"{out} holds {split}, or out of range: {tokens=} {docs=} {vocab=}")
    os.makedirs(out, exist_ok=True)
    rng, cuts = np.random.default_rng(seed), np.linspace(0, tokens, docs + 1).astype(np.int64)
    with tempfile.TemporaryDirectory(dir=out, prefix=".prepare-") as temp:
        writer = ShardWriter(temp, split, Tokenizer("synth", vocab, vocab - 1))
        for d, n in enumerate(np.diff(cuts).tolist()):
            ids = np.append(rng.integers(0, vocab - 1, n - 1), vocab - 1)
            writer.add(ids, n, f"document {d}")
        writer.finish(out)


def trace(step, folders, seq_len, global_batch, seed=0, split="train"):
    """Which documents the samples of a STEP came from. Folders are DIR or DIR:WEIGHT."""
    pairs = [re.fullmatch(r"(.*?)(?::([0-9.]+))?", f).groups() for f in folders]
    sources, weights = [Tokens(f, split) for f, _ in pairs], [float(w or 1) for _, w in pairs]
    seed, n_windows, weights = Loader(sources, weights, seq_len, seed, global_batch, 1).order
    for n in range(int(step) * global_batch, (int(step) + 1) * global_batch):
        s, epoch, w = sample_at(seed, n, n_windows, weights)
        t, at = sources[s], w * seq_len
        print(f"sample {n}: {t.folder} epoch {epoch} window {w}, tokens {at} to {at + seq_len}")
        for p in sorted({0, *t.doc_starts(at, seq_len).tolist()}):
            print("   +{}: {} token {} ({})".format(p, *t.where(at + p)))


def demo():
    """What `python data.py` shows."""
    print(__doc__)
    with tempfile.TemporaryDirectory() as out:
        synth(out, tokens=65, vocab=100, docs=7)
        peek(out)
        t = Tokens(out)
        print("documents start at", *t.doc_starts(0, t.n_tokens))
        for ranks in (1, 2):
            print(f"\nstep 0, 4 sequences of 8, {ranks} data ranks, as (sample, first token):")
            for r in range(ranks):
                for b in Loader([t], None, 8, 0, 4, 2, r, ranks).step(0):
                    print(f"  rank {r}:", *zip(b.sample.tolist(), b.tokens[:, 0].tolist()))


def main(argv=None):
    """The commands are the functions above: parameters are arguments, keywords are options."""
    ap = argparse.ArgumentParser(prog="data.py", description=demo.__doc__)
    commands = ap.add_subparsers(metavar="COMMAND")
    for f in (prepare, peek, check, synth, trace):
        p = commands.add_parser(f.__name__, help=f.__doc__.split(".")[0], description=f.__doc__)
        p.set_defaults(run=f)
        for name, q in inspect.signature(f).parameters.items():
            flag, kind = "--" + name.replace("_", "-"), type(q.default)
            if q.default is False:
                p.add_argument(flag, action="store_true")
            elif q.default is not q.empty:
                p.add_argument(flag, type=int if q.default is None else kind, default=q.default,
                               help=f"default {q.default}")
            elif name in ("out", "seq_len", "global_batch"):
                p.add_argument(flag, required=True, type=str if name == "out" else int)
            else:
                p.add_argument(name, nargs="+" if name.endswith("s") else None)
    args = vars(ap.parse_args(argv))
    try:
        args.pop("run", demo)(**args)
    except (ValueError, OSError) as e:
        print(f"data.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
