"""Text -> tokens on disk -> batches.

A token folder holds train-00000.tokens, train-00001.tokens, ..., val-00000.tokens. One shard:

  byte  0  "minimesh"                       byte 40  number of documents
        8  version, bytes per token (4 + 4)      48  bytes of text that it was made from
       16  vocabulary size                       56  bytes of the documents' names
       24  id of the end-of-text token           64  name of the tokenizer (64 bytes, zero padded)
       32  number of tokens                     128  the tokens, 2 or 4 bytes each; zeros up to 8 n
                                                ...  where each document starts; names, a line each

Integers are little-endian, of 8 bytes. In version 2 a byte a token says where the loss counts, in
train-00000.tokens.loss: the first 128 bytes as above, then 1 for a target that counts, 0 for one
that does not, as those of a prompt. A document lies in one shard and ends in the end-of-text
token; the shards of a split are one stream. Window w of length T is the T + 1 tokens from wT on, so
every token but the first is a target exactly once. Two documents (| ends one) and T = 3:

  a b | c d e |     window 0: tokens a b | targets b | c     window 1: tokens c d e targets d e |

Which window is sample number n of a run is a function of (seed, n): any number of ranks reads the
same batches, and to resume is to set n. `python data.py` shows it, `-h` lists the commands.
"""
import argparse
import base64
import bisect
import contextlib
import functools
import glob
import gzip
import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import unicodedata
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

HEAD = np.dtype([("magic", "S8"), ("version", "<u4"), ("itemsize", "<u4"), ("vocab_size", "<u8"),
                 ("eot", "<u8"), ("n_tokens", "<u8"), ("n_docs", "<u8"), ("n_bytes", "<u8"),
                 ("names_bytes", "<u8"), ("tokenizer", "S64")])
MAGIC, VERSION = b"minimesh", 1  # 2 with a .loss file: neither is taken without the other
PIECE = 1 << 20  # text goes to the tokenizing processes in pieces of about this many bytes
BLOCK = 4096  # samples are ordered in blocks of this many: weights are exact in steps of 1/BLOCK
IGNORE = -100  # a target that does not count
TEXT = tuple(".txt .md .rst .py .c .h .cc .cpp .cu .js .ts .java .go .rs .sh .html .tex .jsonl"
             .split())  # taken from folders, as .gz too


def require(ok, message):
    if not ok:
        raise ValueError(message)


# ---- Shards ---------------------------------------------------------------------------------
def dtype_of(vocab_size):
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def shards(folder, split="*", more=""):
    return sorted(glob.glob(os.path.join(glob.escape(folder), f"{split}-[0-9]*.tokens{more}")))


def open_shard(path):
    """Its header, and mapped: data (the tokens), counts (of each, 0 where it does not count as a
    target), starts, names. ValueError if it is damaged."""
    head = np.fromfile(path, HEAD, 1).tolist()  # [] of a shorter file
    require(head and head[0][0] == MAGIC, f"{path}: not a token file, as data.py prepare makes it")
    h = SimpleNamespace(**dict(zip(HEAD.names, head[0])))
    raw = np.memmap(path, np.uint8, "r").view(np.ndarray)
    h.path, h.dtype = path, dtype_of(h.vocab_size)
    h.kind = h.vocab_size, h.eot, h.dtype, h.tokenizer.decode()
    starts = HEAD.itemsize + -(-h.n_tokens * h.itemsize // 8) * 8  # Python integers: no overflow
    names = starts + 8 * h.n_docs
    says = "format version {}, {} bytes per token, {} bytes in all".format
    found = says(h.version, h.itemsize, len(raw))
    loss, masked = path + ".loss", os.path.exists(path + ".loss")
    right = says(VERSION + masked, h.dtype.itemsize, names + h.names_bytes)
    require(found == right, f"{path}: {found}; should be {right}, with{'out' * (not masked)} "
            f"{loss}: truncated? Prepare it again")
    h.data = raw[HEAD.itemsize : starts].view(h.dtype)[: h.n_tokens]
    h.starts, h.names = raw[starts:names].view("<i8"), raw[names:]
    h.counts = np.broadcast_to(np.uint8(1), h.n_tokens)
    if masked:
        size, right = os.path.getsize(loss), HEAD.itemsize + h.n_tokens
        both = np.memmap(loss, np.uint8, "r").view(np.ndarray) if size else raw[:0]
        head, h.counts = np.split(both, [HEAD.itemsize])
        require(size == right and np.array_equal(head, raw[: HEAD.itemsize]),
                f"{loss}: {size} bytes; should be {right}, beginning as {path}; prepare it again")
    return h


class ShardWriter:
    """Streams the documents of a split into shards in a folder."""

    def __init__(self, folder, split, tok, shard_tokens=100_000_000):
        self.folder, self.split, self.tok, self.limit = folder, split, tok, shard_tokens
        self.dtype, self.file, self.count, self.total = dtype_of(tok.vocab_size), None, 0, 0
        self.loss = None

    def add(self, tokens, n_bytes, name, counts=b""):
        """A document with its eot; with `name` None only a part, more of it follows. `counts`: a
        byte for each token, 1 where it counts in the loss, 0 where not; empty: all count."""
        if self.file is None:
            path = os.path.join(self.folder, f"{self.split}-{self.count:05d}.tokens")
            self.file, self.count = open(path, "wb"), self.count + 1
            self.file.seek(HEAD.itemsize)
            self.starts, self.names, self.n_tokens, self.n_bytes = [0], [], 0, 0
        if counts and self.loss is None:
            self.loss = open(self.file.name + ".loss", "wb")
            self.loss.write(bytes(HEAD.itemsize) + b"\1" * self.n_tokens)
        if self.loss is not None:
            self.loss.write(counts or b"\1" * len(tokens))
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
            names, f, loss = b"\n".join(self.names), self.file, self.loss
            self.file = self.loss = None
            head = (MAGIC, VERSION + (loss is not None), self.dtype.itemsize, self.tok.vocab_size,
                    self.tok.eot, self.n_tokens, len(self.names), self.n_bytes, len(names),
                    self.tok.name)
            with f, loss or contextlib.nullcontext():
                f.write(bytes(-self.n_tokens * self.dtype.itemsize % 8))
                f.write(np.array(self.starts[:-1], "<i8").tobytes() + names)
                for file in (f, loss) if loss else (f,):
                    file.seek(0)
                    file.write(np.array(head, HEAD).tobytes())
                    file.flush()
                    os.fsync(file.fileno())


@contextlib.contextmanager
def new_splits(folder, splits, tok, shard_tokens=100_000_000, force=False):
    """{split: ShardWriter}. What they wrote appears in the folder at the end; after an error of
    writing, the folder is as it was."""
    for path in shards(folder):
        split = os.path.basename(path).split("-")[0]
        has = tok.name if split in splits else open_shard(path).kind[-1]
        require(force or split not in splits, f"{path} exists; --force replaces the split")
        require(has == tok.name, f"{path} has tokenizer {has}, not {tok.name}; use another folder")
    os.makedirs(folder, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".prepare-") as temp:
            with contextlib.ExitStack() as stack:
                yield {s: stack.enter_context(contextlib.closing(
                    ShardWriter(temp, s, tok, shard_tokens))) for s in splits}
            if tok.file:  # goes with the tokens
                shutil.copyfile(tok.file, os.path.join(temp, tok.name.split()[0]))
            for old in (path for s in splits for path in shards(folder, s, "*")):
                os.remove(old)
            # shard 0 comes last: without it nothing is read
            for new in sorted(os.listdir(temp), key=lambda name: "-00000.tokens" in name):
                os.replace(os.path.join(temp, new), os.path.join(folder, new))
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # only if an error left it empty


# ---- Tokenizers -----------------------------------------------------------------------------
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
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # \ud800 alone
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        if self.bpe is None:
            return np.frombuffer(text.encode(), np.uint8)
        return self.bpe.encode_to_numpy(text, disallowed_special=())  # 1.2x encode_ordinary's speed

    def decode(self, ids):
        """Text; an id that the vocabulary does not use is nothing."""
        out = []
        for i in map(int, ids):
            with contextlib.suppress(KeyError):
                out.append(self.bpe.decode_single_token_bytes(i) if self.bpe
                           else bytes([i]) if i < 256 else EOT[0].encode())
        return b"".join(out).decode("utf-8", "replace")


@functools.lru_cache(maxsize=2)  # each tokenizing process loads it once
def load_tokenizer(name):
    """byte, one that tiktoken knows by name, a tiktoken ranks file or an HF tokenizer.json."""
    if name == "byte":
        return Tokenizer("byte", 257, 256)
    import tiktoken
    try:
        if name in tiktoken.list_encoding_names():
            bpe = tiktoken.get_encoding(name)
            return Tokenizer(name, bpe.n_vocab, bpe.eot_token, bpe)
        with open(name, "rb") as f:
            raw = f.read()
        kind, read = ("json", _from_json) if name.endswith(".json") else ("tiktoken", _from_ranks)
        pattern, ranks, special, nfc = read(raw)
        require(all(bytes([b]) in ranks for b in range(256)), "a byte is missing")
        eot = next((special[t] for t in EOT if t in special), None)
        require(eot is not None, f"none of {' '.join(EOT)} to end a text")
        full = f"tokenizer.{kind} sha256:{hashlib.sha256(raw).hexdigest()[:12]}"
        bpe = tiktoken.Encoding(full, pat_str=pattern, mergeable_ranks=ranks,
                                special_tokens=special)
        return Tokenizer(full, bpe.max_token_value + 1, eot, bpe, nfc, name)
    except Exception as e:  # being offline has a dozen kinds, and so have files of other things
        raise ValueError(
            f"tokenizer {name}: {e!s:.120} ({type(e).__name__}); it may be byte, gpt2 or another "
            "name in tiktoken; offline, give the path of a tiktoken ranks file or of a "
            "tokenizer.json of byte-level BPE, as of GPT-2, Llama 3, Qwen") from None


def _from_ranks(raw):
    pairs = [line.split() for line in raw.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    require({*ranks.values()} == {*range(len(ranks))}, "ranks are not 0, 1, 2, ...")
    pattern, eot = RANKS.get(len(ranks), (GPT2, len(ranks)))
    return pattern, ranks, {EOT[0]: eot}, False


def _from_json(raw):
    """HF merges the pair that is first in a list, tiktoken the pair whose result has the lowest id:
    the same when ids grow along the list."""
    spec = json.loads(raw)
    model, norm, steps = spec["model"], spec.get("normalizer"), spec["pre_tokenizer"]
    steps, vocab = steps.get("pretokenizers", [steps]), model["vocab"]
    parts = [*([norm] if norm else []), *steps, model]
    kinds = " ".join(part["type"] for part in parts)
    odd = [k for k in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "invert",
                       "dropout", "add_prefix_space") if any(part.get(k) for part in parts)]
    require(re.fullmatch("(NFC )?(Split )?ByteLevel BPE", kinds) and not odd
            and steps[0].get("behavior", "Isolated") == "Isolated"
            and steps[-1].get("use_regex", True) == (len(steps) == 1),
            f"{kinds} {odd or ''} cannot be reproduced")
    pattern = steps[0]["pattern"]["Regex"] + "|(?s:.)" if len(steps) == 2 else GPT2  # loses no text
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that stand for themselves
    spare = iter(range(256, 512))
    byte = {chr(b if b in plain else next(spare)): b for b in range(256)}
    merged = ["".join(m) if isinstance(m, list) else m.replace(" ", "") for m in model["merges"]]
    made = [vocab[t] for t in merged]
    require(made == sorted(made), "ids are not in the order of the merges")
    ranks = {bytes(byte[c] for c in t): vocab[t] for t in [*byte, *merged]}
    return pattern, ranks, {t["content"]: t["id"] for t in spec["added_tokens"]}, norm is not None


# ---- Text -> tokens -------------------------------------------------------------------------
def _walk(folder):
    for root, dirs, files in os.walk(folder):
        dirs[:] = sorted(d for d in dirs if d[0] != ".")
        yield from (os.path.join(root, f) for f in sorted(files)
                    if f[0] != "." and f.removesuffix(".gz").endswith(TEXT))


def find_text(inputs):
    """[(path, name)] of files behind paths, folders, globs; a name is relative to them all."""
    paths = []
    for item in [inputs] if isinstance(inputs, str) else inputs:
        hits = [item] if os.path.exists(item) else sorted(glob.glob(item, recursive=True))
        found = [p for hit in hits for p in (_walk(hit) if os.path.isdir(hit) else [hit])]
        require(found, f"no text at {item}: no file, or none of {' '.join(TEXT)}, also .gz")
        paths += map(os.path.abspath, found)
    base = os.path.commonpath([os.path.dirname(p) for p in paths])
    return [(p, os.path.relpath(p, base)) for p in dict.fromkeys(paths)]


# Where a long text is cut: at a line end between a visible character and a letter or digit, where
# every pattern above cuts too, so that the tokens are those of the whole; failing that at a line
# end, or before a character's first byte. JSON lines stay whole.
CUT_TEXT = re.compile(rb"(?s).*[!-~]\n(?=[0-9A-Za-z])|.*\n|.+(?=[^\x80-\xbf])|.*")
JSONL, CUT_JSONL = (".jsonl", ".jsonl.gz"), re.compile(rb"(?s)(?:.*\n)?")


def _pieces(files):
    """(name, first line number, bytes, whether the file ends), about PIECE bytes each."""
    for path, name in files:
        rest, line, cut = b"", 1, CUT_JSONL if name.endswith(JSONL) else CUT_TEXT
        try:
            with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
                while new := f.read(PIECE):
                    rest += new
                    if len(rest) >= PIECE and (end := cut.match(rest).end()):
                        yield name, line, rest[:end], False
                        line, rest = line + rest.count(b"\n", 0, end), rest[end:]
        except (EOFError, OSError, zlib.error) as e:
            raise ValueError(f"{path}: cannot be read ({e})") from None
        yield name, line, rest, True


def _encode(tokenizer, split, val, piece):
    """[(split, tokens, bytes, name or None as it goes on, what counts)]: a piece's documents."""
    tok, out, (file, line, raw, last) = load_tokenizer(tokenizer), [], piece
    jsonl, documents = file.endswith(JSONL), [(file, raw, last)]
    if jsonl:
        rows = enumerate(raw.split(b"\n"), line)
        documents = [(f"{file}:{k}", row, True) for k, row in rows if row.strip()]
    for name, row, ends in documents:
        try:
            keys = json.loads(row) if jsonl else {"text": row.decode("utf-8", "replace")}
            texts = [keys[k] for k in (["text"] if "text" in keys else ["prompt", "completion"])]
            size = len("".join(texts).encode("utf-8", "surrogatepass") if jsonl else row)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{name}: not a JSON object with a string `text`, or with strings "
                             "`prompt` and `completion`") from None
        parts = [*map(tok.encode, texts), np.array([tok.eot] * ends, np.uint32)]
        ids, n = np.concatenate(parts), len(parts[0])  # of the prompt: its tokens when it is asked
        counts = bytes(n) + b"\1" * (len(ids) - n) if len(texts) == 2 else b""
        hashed = int.from_bytes(hashlib.blake2b(os.fsencode(name)).digest()[:8], "big")
        to = "val" if hashed < val * 2**64 else split
        out.append((to, ids, size, name if ends else None, counts))
    return out


def prepare(inputs, out="tokens/text", tokenizer="byte", split="train", val=0.0,
            shard_tokens=100_000_000, procs=None, force=False, quiet=False):
    """Text files, folders and globs -> token shards. A file is a document, or a line of a .jsonl:
    {"text": ...}, or {"prompt": ..., "completion": ...} of which only the completion is learnt; a
    fraction `val` of them, by a hash of the name, goes to the split val. A shard ends with the
    document that fills it. The number of processors used does not change the result."""
    files, tok = find_text(inputs), load_tokenizer(tokenizer)
    procs = os.cpu_count() if procs is None else procs
    require(0 <= val < 1, f"val {val}: must be from 0 to below 1")
    require(min(shard_tokens, procs) > 0, f"shard_tokens {shard_tokens}, procs {procs}: at least 1")
    require(split.isalnum() and not (val and split == "val"),
            f"split {split!r}: must be letters and digits, and not val if val is set")
    if tok.bpe is None or sum(os.path.getsize(path) for path, _ in files) < 4 * PIECE:
        procs = 1  # starting processes would take longer than the work
    pieces, begun = _pieces(files), time.perf_counter()
    encode = functools.partial(_encode, tokenizer, split, val)
    with (new_splits(out, {split, "val"} if val else {split}, tok, shard_tokens, force) as writers,
          ProcessPoolExecutor(procs, get_context("spawn")) as pool):  # starts them when used
        spread = map if procs == 1 else pool.map
        while some := list(itertools.islice(pieces, 64)):  # so much is in memory at a time
            for to, *document in itertools.chain.from_iterable(spread(encode, some)):
                writers[to].add(*document)
            size = sum(w.total for w in writers.values()) / 1e6
            line = f"\rprepare: {size:.1f} MB, {size / (time.perf_counter() - begun):.1f} MB/s "
            if sys.stderr.isatty() and not quiet:
                print(line, end="", file=sys.stderr, flush=True)
        for s, w in writers.items():
            require(w.total, f"no text for split {s} in {inputs}; add some, or change val")
    if not quiet:
        print(line, file=sys.stderr)


def prepare_default(out):
    """What every machine has: Python's own library, as bytes, 5% of the files for validation."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
    files = [p for p in _walk(os.path.dirname(os.__file__)) if not skip & {*p.split(os.sep)}]
    prepare([p for p in files if p.endswith(".py")], out, val=0.05)


# ---- Reading --------------------------------------------------------------------------------
class Tokens:
    """A split of a token folder: memory-mapped shards that read as one stream of tokens."""

    def __init__(self, folder, split="train"):
        self.folder, self.split, self.files = folder, split, shards(folder, split)
        require(self.files, f"data.path {folder}: no {split}-*.tokens; see data.py prepare -h")
        self.shards = [open_shard(path) for path in self.files]
        self.vocab_size, self.eot, self.dtype, self.tokenizer_name = kind = self.shards[0].kind
        for k, h in enumerate(self.shards):
            require(h.path.endswith(f"{split}-{k:05d}.tokens") and h.kind == kind,
                    f"{h.path}: found where shard {k} of tokenizer {kind[-1]} should be")
        name, *sha = self.tokenizer_name.split()
        self.tokenizer_path = os.path.join(folder, name) if sha else name  # for load_tokenizer
        self.first = [0, *itertools.accumulate(h.n_tokens for h in self.shards)]  # token of each
        self.n_tokens, self.n_docs = self.first[-1], sum(h.n_docs for h in self.shards)
        self.n_bytes = sum(h.n_bytes for h in self.shards)
        self.masked = any(h.version > VERSION for h in self.shards)  # not all tokens are targets

    def windows(self, seq_len):
        """How many sequences there are; at least one, or ValueError."""
        require(0 < seq_len < self.n_tokens, f"data.seq_len {seq_len}: must be less than the "
                f"{self.n_tokens} tokens of {self.folder} {self.split}, and at least 1")
        return (self.n_tokens - 1) // seq_len

    def _at(self, pos):
        """(shard, token within the shard) of a place in the stream."""
        if not 0 <= pos < self.n_tokens:
            raise ValueError(f"{self.folder} {self.split}: no token {pos} among {self.n_tokens}")
        k = bisect.bisect(self.first, pos) - 1
        return k, pos - self.first[k]

    def parts(self, start, n, of="data"):
        """The tokens [start, start + n), or their `counts`: views of the shards, unchecked."""
        k, a = self._at(start)
        out = [getattr(self.shards[k], of)[a : a + n]]
        while n := n - len(out[-1]):
            k += 1
            out.append(getattr(self.shards[k], of)[:n])
        return out

    def read(self, start, n):
        """Tokens [start, start + n) as int64. ValueError for one that the vocabulary has not."""
        out = np.concatenate(self.parts(start, n)).astype(np.int64)
        for c in np.flatnonzero(out >= self.vocab_size)[:1]:
            k, a = self._at(start + c)
            byte = HEAD.itemsize + a * self.dtype.itemsize
            raise ValueError(f"{self.files[k]}: token {a} (byte {byte}) is {out[c]}, not below the "
                             f"vocabulary size {self.vocab_size}; prepare it again")
        return out

    def names(self, k):
        return bytes(self.shards[k].names).decode("utf-8", "replace").split("\n")

    def where(self, pos):
        """(name of the document, offset in it, shard file) of a token."""
        k, a = self._at(pos)
        d = bisect.bisect(self.shards[k].starts, a) - 1
        return self.names(k)[d], a - int(self.shards[k].starts[d]), self.files[k]

    def check(self):
        """Reads every token: ids are in the vocabulary, documents end in the eot and only there."""
        for a in range(0, self.n_tokens, PIECE):
            self.read(a, min(PIECE, self.n_tokens - a))
        for h in self.shards:
            ends = np.flatnonzero(h.data == self.eot) + 1
            require([0, *ends] == [*h.starts, h.n_tokens], f"{h.path}: its table of documents does "
                    f"not fit its end-of-text tokens {self.eot}; prepare it again")
            require(h.counts.max(initial=0) < 2, f"{h.path}.loss: holds bytes other than 0 and 1")


class Blank:
    """In place of Tokens where there are none (a dry run): one document without end."""

    tokenizer_name, tokenizer_path, masked, eot = "none", "none", False, -1

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def windows(self, seq_len):
        return BLOCK

    def parts(self, start, n, of="data"):
        return [np.zeros(n, np.int64)]


# ---- The order of samples -------------------------------------------------------------------
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
    """How many of every BLOCK samples each source gives: its share, to within one."""
    return np.diff(np.rint(np.cumsum([0, *weights]) / sum(weights) * BLOCK).astype(np.int64))


@functools.lru_cache(maxsize=8)
def _block(seed, block, n_windows, weights):
    """[3, BLOCK]: source, epoch, window of the samples block * BLOCK and on."""
    slots, out = slots_of(weights), np.empty((3, BLOCK), np.int64)
    key = _mix(np.array([seed % 2**64], np.uint64))
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
    low, high = np.min(n) // BLOCK, np.max(n) // BLOCK
    blocks = [_block(seed, b, tuple(n_windows), tuple(weights)) for b in range(low, high + 1)]
    return (np.hstack(blocks) if len(blocks) > 1 else blocks[0])[:, n - low * BLOCK]


# ---- Batches --------------------------------------------------------------------------------
class Batch(NamedTuple):
    """One microbatch, of torch tensors. Query i of a row sees the keys lo[i] .. i of its row."""

    tokens: object  # [b, T] int64
    targets: object  # [b, T] int64, IGNORE where none counts
    pos: object  # [b, T] int64, restarts with each document if documents are masked
    lo: object  # [b, T] int32; None when all are 0, plain causal
    seen: object  # [2, T], numpy: of each position the lowest and highest lo; None with lo
    sample: object  # [b] int64, number within the global batch
    n_valid: int  # targets that count


def make_batch(sources, source, window, sample, seq_len, mask_documents=False, pin=False,
               real=None):
    """The one place where targets and masks are made, to train and to evaluate. `source`, `window`,
    `sample` are [b] arrays; the rows from `real` on are padding, of which nothing counts."""
    from torch import from_numpy
    real = len(window) if real is None else real
    n, span, lo = seq_len + 1, np.arange(seq_len), None
    places = [(sources[s], at) for s, at in zip(source.tolist(), (window * seq_len).tolist())]
    rows = np.concatenate([part for t, at in places for part in t.parts(at, n)]).reshape(-1, n)
    if rows.max() >= sources[0].vocab_size:
        for t, at in places:
            t.read(at, n)  # says where
    tokens, targets = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    targets[real:] = IGNORE
    if any(t.masked for t in sources):
        counts = [part for t, at in places for part in t.parts(at + 1, seq_len, "counts")]
        targets[np.concatenate(counts).reshape(targets.shape) == 0] = IGNORE
    pos = np.tile(span, (len(tokens), 1))
    if mask_documents:
        ends = tokens == sources[0].eot
        targets[ends] = IGNORE  # the eot itself is a target, what comes after it is not
        lo = np.zeros_like(tokens)
        lo[:, 1:] = np.maximum.accumulate(np.where(ends, span + 1, 0), axis=1)[:, :-1]
        pos, lo = pos - lo, lo.astype(np.int32) if lo.any() else None
    seen = None if lo is None else np.stack((lo.min(0), lo.max(0)))
    put = (lambda a: from_numpy(a).pin_memory()) if pin else from_numpy
    return Batch(put(tokens), put(targets), put(pos), None if lo is None else put(lo), seen,
                 put(sample.astype(np.int64)), int((targets != IGNORE).sum()))


class Loader:
    """The microbatches of a data rank. `step` is pure; `start` and `next` run it ahead."""

    def __init__(self, sources, weights, seq_len, seed, global_batch, microbatch, rank=0, ranks=1,
                 mask_documents=False, pin=False):
        weights = tuple(weights or [1.0] * len(sources))
        require(len(weights) == len(sources)
                and all(type(w) in (int, float) and w > 0 for w in weights)
                and min(slots_of(weights)) > 0, f"data.path: weights {weights}: a number for each "
                f"source, above 1/{BLOCK} of their sum")
        local = global_batch // ranks
        require(min(microbatch, local) > 0 and global_batch % ranks == 0,
                f"train.microbatch {microbatch}: from 1; train.global_batch {global_batch}: a "
                f"multiple of the {ranks} data ranks, such as {max(1, local) * ranks}")
        for a, b in itertools.pairwise(sources):
            require((a.tokenizer_name, a.vocab_size) == (b.tokenizer_name, b.vocab_size),
                    f"data.path {b.folder}: tokenizer {b.tokenizer_name} of {b.vocab_size} ids, "
                    f"not {a.tokenizer_name} of {a.vocab_size}")
        windows = tuple(s.windows(seq_len) for s in sources)
        self.sample_at = functools.partial(sample_at, seed, n_windows=windows, weights=weights)
        self.sources, self.global_batch = sources, global_batch
        self.how = seq_len, mask_documents, pin
        sizes = [min(microbatch, local - done) for done in range(0, local, microbatch)]
        self.mine = [k * microbatch * ranks + rank * m + np.arange(m) for k, m in enumerate(sizes)]
        self.ahead, self.thread = None, ThreadPoolExecutor(1)

    def step(self, samples):
        """This rank's microbatches of the step that starts when `samples` samples are consumed."""
        return [make_batch(self.sources, *self.sample_at(samples + mine)[::2], mine, *self.how)
                for mine in self.mine]

    def start(self, samples):
        """From here on, a thread makes the batches of one step ahead."""
        self.at, self.ahead = samples, self.thread.submit(self.step, samples)

    def next(self):
        """(samples consumed before this step, its microbatches). Raises the thread's errors."""
        if self.ahead is None:
            raise RuntimeError("Loader.next before Loader.start")
        samples, batches = self.at, self.ahead.result()  # if it failed, so does the next call
        self.start(samples + self.global_batch)
        return samples, batches

    def close(self):
        self.thread.shutdown(cancel_futures=True)


def eval_batches(tokens, seq_len, n_sequences, microbatch, rank=0, ranks=1, mask_documents=False):
    """`n_sequences` windows (None: all) evenly over the split, dealt out to the ranks. Each rank
    yields equally many batches of equal size: the rows past the end of its share are padding."""
    total = tokens.windows(seq_len)
    n = total if n_sequences is None else min(n_sequences, total)
    for done in range(0, -(-n // ranks), microbatch):
        i = (done + np.arange(microbatch)) * ranks + rank
        yield make_batch([tokens], i * 0, np.where(i < n, i * total // n, 0), i, seq_len,
                         mask_documents, real=int(np.count_nonzero(i < n)))


# ---- Commands -------------------------------------------------------------------------------
def peek(folder, split="train", at=0, check=False):
    """What a split holds, and the text around token AT; with --check after reading every token."""
    t = Tokens(folder, split)
    if check:
        t.check()
    print(f"{folder} {split}: {t.n_tokens} tokens ({t.dtype}), {t.n_docs} documents, "
          f"{t.n_bytes} bytes of text, {len(t.files)} shards, tokenizer {t.tokenizer_name}, "
          f"vocabulary {t.vocab_size}, eot {t.eot}" + ", not all count in the loss" * t.masked)
    where, ids = t.where(at), t.read(at, min(128, t.n_tokens - at))
    print(*where, ids[:16].tolist())
    if t.tokenizer_name != "synth":
        print(load_tokenizer(t.tokenizer_path).decode(ids))


def synth(out="tokens/synth", tokens=1_000_000, vocab=257, docs=1000, seed=0, split="train"):
    """Random tokens in DOCS equal documents, for tests and measurements."""
    require(0 < docs <= tokens and vocab > 1, f"out of range: {tokens=} {docs=} {vocab=}")
    rng, cuts = np.random.default_rng(seed), np.linspace(0, tokens, docs + 1).astype(np.int64)
    with new_splits(out, [split], Tokenizer("synth", vocab, vocab - 1)) as writers:
        for d, n in enumerate(np.diff(cuts).tolist()):
            ids = np.append(rng.integers(0, vocab - 1, n - 1), vocab - 1)
            writers[split].add(ids, n, f"document {d}")


def trace(step, folders, seq_len=256, global_batch=16, seed=0, split="train"):
    """Which documents the samples of a STEP came from. Folders are DIR or DIR:WEIGHT."""
    pairs = [(*f.rsplit(":", 1), 1)[:2] for f in folders]
    sources, weights = [Tokens(f, split) for f, _ in pairs], [float(w) for _, w in pairs]
    loader = Loader(sources, weights, seq_len, seed, global_batch, 1)
    for n in range(int(step) * global_batch, (int(step) + 1) * global_batch):
        s, epoch, w = loader.sample_at(n)
        t, at = sources[s], w * seq_len
        print(f"sample {n}: {t.folder} epoch {epoch} window {w}, tokens {at} to {at + seq_len}")
        for p in [0, *np.flatnonzero(t.read(at, seq_len - 1) == t.eot) + 1]:
            print(f"   +{p}:", *t.where(at + p))


def demo():
    """What `python data.py` shows."""
    print(__doc__)
    with tempfile.TemporaryDirectory() as out:
        synth(out, tokens=65, vocab=100, docs=7)
        peek(out)
        for rank, ranks in ((0, 1), (0, 2), (1, 2)):
            print(f"step 0, 4 sequences of 8, rank {rank} of {ranks}, as (sample, first token):")
            for b in Loader([Tokens(out)], None, 8, 0, 4, 2, rank, ranks).step(0):
                print("  ", *zip(b.sample.tolist(), b.tokens[:, 0].tolist()))


def main(argv=None):
    """The commands are the functions above: parameters are arguments, keywords are options."""
    ap = argparse.ArgumentParser(prog="data.py", description=__doc__.split("\n")[0])
    commands = ap.add_subparsers(metavar="COMMAND")
    for f in (prepare, peek, synth, trace):
        p = commands.add_parser(f.__name__, help=f.__doc__.split(".")[0], description=f.__doc__)
        p.set_defaults(run=f)
        for name, q in inspect.signature(f).parameters.items():
            flag, default = "--" + name.replace("_", "-"), q.default
            if default is q.empty:
                p.add_argument(name, nargs="+" if name.endswith("s") else None)
            elif default is False:
                p.add_argument(flag, action="store_true")
            else:
                kind = int if default is None else type(default)
                p.add_argument(flag, type=kind, default=default, help=f"default {default}")
    args = vars(ap.parse_args(argv))
    try:
        args.pop("run", demo)(**args)
    except (ValueError, OSError) as e:
        print(f"data.py: error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
