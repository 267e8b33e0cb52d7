"""data.py against values that can be worked out without it."""

import collections
import gzip
import json
import os
import pathlib
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import data

quick = pytest.mark.quick
DATA = str(pathlib.Path(data.__file__))
ODD = [
    "",
    "\n" * 5000,
    " " * 5000,
    "a<|endoftext|>b",
    "<s> </s>",
    "nul \0 nul",
    "caf\u00e9 \U0001f642 \u4e2d\u6587",
    "tabs\t\tand  spaces \r\n crlf\r\n\r\nend ",
    "I'LL don't 12345 x_y != z",
    "\u3000\u00a0wide\u2028line",
    "e\u0301 combining",
    "A" * 3000,
    "\u0660\u0661 digits \u00b2",
    "def f(x):\n\n    return x\n\n\n",
]


def write(folder, docs, shard_tokens=10**9, vocab=257, split="train", name="byte"):
    """A token folder of the given documents (lists of ids, without the eot, which is vocab - 1)."""
    os.makedirs(folder, exist_ok=True)
    writer = data.ShardWriter(
        str(folder), split, data.Tokenizer(name, vocab, vocab - 1), shard_tokens
    )
    for i, ids in enumerate(docs):
        writer.add(np.array([*ids, vocab - 1]), len(ids), f"doc{i}")
    writer.close()
    return data.Tokens(str(folder), split)


def stream(docs, vocab=257):
    return np.array([i for ids in docs for i in [*ids, vocab - 1]])


def some_docs(n=20, seed=0, vocab=257):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab - 1, rng.integers(0, 30)).tolist() for _ in range(n)]


def rows_of(loaders, samples):
    """{sample: its tokens} of a step, from all ranks; each sample once."""
    found = {}
    for loader in loaders:
        for b in loader.step(samples):
            for i, row, target in zip(b.sample.tolist(), b.tokens, b.targets):
                assert i not in found
                found[i] = (*row.tolist(), int(target[-1]))
    return [found[i] for i in sorted(found)]


# ---- the file ----


@quick
@pytest.mark.parametrize("vocab, code", [(300, "H"), (65536, "H"), (65537, "I"), (200019, "I")])
def test_file_is_what_the_docstring_draws(tmp_path, vocab, code):
    docs = [[1, 2], [], [vocab - 2]]
    write(tmp_path, docs, vocab=vocab)
    raw = (tmp_path / "train-00000.tokens").read_bytes()
    size = struct.calcsize(code)
    assert raw[:8] == b"minimesh"
    assert struct.unpack("<II6Q", raw[8:64]) == (1, size, vocab, vocab - 1, 6, 3, 3, 14)
    assert raw[64:128] == b"byte" + bytes(60)
    assert struct.unpack(f"<6{code}", raw[128 : 128 + 6 * size]) == (
        1,
        2,
        vocab - 1,
        vocab - 1,
        vocab - 2,
        vocab - 1,
    )
    starts = 128 + (6 * size + 7) // 8 * 8
    assert struct.unpack("<3q", raw[starts : starts + 24]) == (0, 3, 4)
    assert raw[starts + 24 :] == b"doc0\ndoc1\ndoc2"


@quick
@pytest.mark.parametrize("shard_tokens", [1, 7, 40, 10**9])
def test_shards_read_as_one_stream(tmp_path, shard_tokens):
    docs = some_docs()
    tokens, whole = write(tmp_path, docs, shard_tokens), stream(docs)
    assert (
        tokens.n_tokens == len(whole) and tokens.n_docs == 20 and tokens.n_bytes == len(whole) - 20
    )
    begins = np.cumsum([0, *(len(d) + 1 for d in docs)])
    for start, n in [(0, len(whole)), (3, 50), (len(whole) - 1, 1), (17, 0), (39, 41), (100, 5)]:
        assert tokens.read(start, n).tolist() == whole[start : start + n].tolist()
        assert tokens.read(start, n).dtype == np.int64
    for pos in range(len(whole)):
        d = int(np.searchsorted(begins, pos, "right")) - 1
        name, offset, file = tokens.where(pos)
        assert (name, offset) == (f"doc{d}", pos - begins[d]) and os.path.exists(file)
    tokens.check()


@quick
def test_empty_and_tiny_shards(tmp_path):
    """A shard without tokens, and shards shorter than a sequence, anywhere in the split."""
    docs = some_docs(6)
    for k in range(9):
        w = data.ShardWriter(str(tmp_path), "train", data.Tokenizer("byte", 257, 256))
        w.count = k
        w.add(np.zeros(0, np.int64), 0, None)
        if k % 3 == 1:
            w.add(np.array([*docs[k // 3], 256]), 0, "x")
        w.close()
    tokens, whole = data.Tokens(str(tmp_path)), stream(docs[:3])
    tokens.check()
    assert tokens.read(0, len(whole)).tolist() == whole.tolist()
    starts = [0, len(docs[0]) + 1, len(docs[0] + docs[1]) + 2]
    assert [tokens.where(at)[1] for at in starts] == [0, 0, 0]
    assert [tokens.where(at - 1)[1] for at in starts[1:]] == [len(docs[0]), len(docs[1])]
    assert tokens.where(len(whole) - 1)[2].endswith("train-00007.tokens")


@pytest.mark.parametrize("vocab", [300, 70000])
def test_offsets_past_4_gb(tmp_path, vocab):
    """A sparse shard of 6 GB, marks just past 2^31 and 2^32 bytes and at the end."""
    size = data.dtype_of(vocab).itemsize
    n = 6 * 2**30 // size
    marks = [2**31 // size + 3, 2**32 // size + 5, n - 3]
    head = np.array((b"minimesh", 1, size, vocab, vocab - 1, n, 1, 0, 1, b"synth"), data.HEAD)
    with open(tmp_path / "train-00000.tokens", "wb") as f:
        f.write(head.tobytes())
        for k, pos in enumerate(marks):
            f.seek(128 + pos * size)
            f.write(np.array([200 + k, 250], data.dtype_of(vocab)).tobytes())
        f.seek(128 + n * size)
        f.write(bytes(8) + b"x")
    tokens = data.Tokens(str(tmp_path))
    for k, pos in enumerate(marks):
        assert tokens.read(pos, 2).tolist() == [200 + k, 250]
        assert tokens.read(0, 3).tolist() == [0, 0, 0]
        assert tokens.read(pos - 1, 3).tolist() == [0, 200 + k, 250]
        assert tokens.where(pos) == ("x", pos, tokens.files[0])
    batch = data.make_batch(
        [tokens], np.zeros(1, int), np.array([marks[1] // 64]), np.arange(1), 64
    )
    assert batch.tokens[0, marks[1] % 64] == 201
    with pytest.raises(ValueError, match="no token"):
        data.Tokens(str(tmp_path)).where(n)


def damage(path, at, raw):
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(raw)


@quick
@pytest.mark.parametrize(
    "at, raw, words",
    [
        (0, b"x", "not a token file"),
        (8, b"\2", "format version 2"),
        (12, b"\4", "4 bytes per token"),
        (16, (70000).to_bytes(8, "little"), "2 bytes per token"),
        (32, b"\1", "truncated"),
        (40, b"\1", "truncated"),
    ],
)
def test_damaged_header(tmp_path, at, raw, words):
    """Each names the file."""
    write(tmp_path, some_docs())
    path = tmp_path / "train-00000.tokens"
    damage(path, at, raw)
    with pytest.raises(ValueError, match=words) as e:
        data.Tokens(str(tmp_path))
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@quick
@pytest.mark.parametrize("cut", [0, 5, 127, 128, 200, -1])
def test_truncated(tmp_path, cut):
    write(tmp_path, some_docs())
    path = tmp_path / "train-00000.tokens"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="truncated|not a token file"):
        data.Tokens(str(tmp_path))
    assert data.main(["peek", "--check", str(tmp_path)]) == 2


@quick
def test_missing_shard_and_folder(tmp_path):
    write(tmp_path, some_docs(), 40)
    (tmp_path / "train-00001.tokens").unlink()
    with pytest.raises(ValueError, match="shard 1"):
        data.Tokens(str(tmp_path))
    (tmp_path / "train-00000.tokens").unlink()
    with pytest.raises(ValueError, match="shard 0"):
        data.Tokens(str(tmp_path))
    with pytest.raises(ValueError, match="data.path .* no val"):
        data.Tokens(str(tmp_path), "val")
    with pytest.raises(ValueError, match="data.path /nowhere"):
        data.Tokens("/nowhere")


@quick
@pytest.mark.parametrize("shard_tokens", [10**9, 30])
def test_id_beyond_vocabulary(tmp_path, shard_tokens):
    """Named with file and offset by check, read, and the loader before a batch is used."""
    tokens = write(tmp_path, [[7] * 9] * 6, shard_tokens)
    path = tokens.files[-1]
    damage(path, 128 + 12 * 2, (300).to_bytes(2, "little"))
    tokens = data.Tokens(str(tmp_path))
    loader = data.Loader([tokens], None, 9, 0, 6, 6)
    loader.start(0)
    for run in (
        tokens.check,
        lambda: tokens.read(0, tokens.n_tokens),
        lambda: loader.step(0),
        loader.next,
        loader.next,
    ):
        with pytest.raises(ValueError, match=r"token 12 \(byte 152\) is 300.* 257") as e:
            run()
        assert path in str(e.value)
    loader.close()


@quick
def test_check_documents(tmp_path, capsys):
    write(tmp_path, [[1, 2], [3]])
    path = tmp_path / "train-00000.tokens"
    assert data.main(["peek", "--check", str(tmp_path)]) == 0
    damage(path, 128 + 4, b"\0\0")  # the eot of document 0
    assert data.main(["peek", "--check", str(tmp_path)]) == 2
    assert "train-00000.tokens: its table of documents" in capsys.readouterr().err
    write(tmp_path, [[1, 2], [3]])
    damage(path, 128 + 16 + 8, (9).to_bytes(8, "little"))  # where document 1 starts
    assert data.main(["peek", "--check", str(tmp_path)]) == 2
    assert "table of documents" in capsys.readouterr().err


# ---- windows and order ----


@quick
@pytest.mark.parametrize("n, seq_len", [(100, 8), (97, 8), (98, 8), (9, 8), (1000, 1), (17, 16)])
def test_windows_cover_each_target_once(tmp_path, n, seq_len):
    """Every token but the first and a tail shorter than a sequence is a target once."""
    tokens = write(tmp_path, [list(range(100)) * 10])
    tokens.n_tokens = n
    w = tokens.windows(seq_len)
    targets = [t for k in range(w) for t in range(k * seq_len + 1, k * seq_len + seq_len + 1)]
    assert targets == list(range(1, w * seq_len + 1)) and n - seq_len <= w * seq_len < n
    for bad in (0, n, n + 5):
        with pytest.raises(ValueError, match=f"data.seq_len {bad}.*{n} tokens"):
            tokens.windows(bad)


@quick
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10, 16, 17, 255, 256, 257, 1000, 4097])
def test_permute_is_a_permutation(n):
    seen = set()
    for key in range(5):
        p = data.permute(np.arange(n), n, np.array([key * 977], np.uint64)).tolist()
        assert sorted(p) == list(range(n))
        assert [
            int(data.permute(np.array([i]), n, np.array([key * 977], np.uint64))[0])
            for i in range(0, n, 1 + n // 9)
        ] == p[:: 1 + n // 9]  # one at a time, without the others
        seen.add(tuple(p))
    assert len(seen) == 5 or n < 5


@quick
def test_permute_is_even():
    """Over many keys every element goes everywhere about equally often (chi square, 81 cells)."""
    counts = np.zeros((10, 10))
    keys = data._mix(np.arange(5000, dtype=np.uint64))
    for x in range(10):
        np.add.at(counts[x], data.permute(np.full(5000, x), 10, keys), 1)
    assert ((counts - 500) ** 2 / 500).sum() < 81 + 5 * (2 * 81) ** 0.5


@quick
def test_order_is_a_pure_function():
    windows, weights = (7, 1000, 64), (1.0, 2.0, 0.5)
    n = np.arange(20000)
    together = np.array(data.sample_at(3, n, windows, weights)).T.tolist()
    for i in (0, 1, 4095, 4096, 12345, 19999):
        assert list(data.sample_at(3, i, windows, weights)) == together[i]
    assert np.array(data.sample_at(3, n[::-1], windows, weights)).T.tolist() == together[::-1]
    assert np.array(data.sample_at(4, n, windows, weights)).T.tolist() != together
    assert data.sample_at(-1, 10**15, (10**13,))[2] < 10**13  # any seed, far along, large data
    for s, size in enumerate(windows):  # each source: whole epochs in turn, each a permutation
        mine = [(e, w) for source, e, w in together if source == s]
        for a in range(0, len(mine) - size, size):
            epoch, order = zip(*mine[a : a + size])
            assert set(epoch) == {a // size} and sorted(order) == list(range(size))


@quick
@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.2, 0.1), (3, 1, 1, 1, 1), (1, 4095), (1.0,)])
def test_weights(weights):
    counts = collections.Counter(
        data.sample_at(0, np.arange(3 * 4096), [50] * len(weights), weights)[0].tolist()
    )
    for s, w in enumerate(weights):
        assert abs(counts[s] / (3 * 4096) - w / sum(weights)) <= 1 / 4096
    first = np.array(data.sample_at(0, np.arange(512), [50] * len(weights), weights)[0])
    for s, w in enumerate(weights):  # mixed well, not one source after the other
        assert abs(np.mean(first == s) - w / sum(weights)) < 0.1


@quick
def test_epochs_after_resume(tmp_path):
    """10 sequences, stop after 9; every later epoch visits all once. A batch of 25."""
    tokens = write(tmp_path, [list(range(100))[:80]])
    assert tokens.windows(8) == 10
    loader, seen = data.Loader([tokens], None, 8, 5, 1, 1), []
    for samples in range(9):
        seen += rows_of([loader], samples)
    loader = data.Loader([tokens], None, 8, 5, 3, 2)  # resumed at 9 with another global batch
    for samples in range(9, 39, 3):
        seen += rows_of([loader], samples)
    every = sorted(set(seen))
    assert len(every) == 10
    epochs = [seen[a : a + 10] for a in range(0, 30, 10)]
    assert all(sorted(e) == every for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    big = data.Loader([tokens], None, 8, 5, 25, 4)
    assert collections.Counter(rows_of([big], 0)) == dict.fromkeys(every, 2) | {
        r: 3 for r in rows_of([big], 0)[20:]
    }


# ---- batches ----


@quick
@pytest.mark.parametrize("microbatch", [1, 2, 3, 5, 12, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_any_ranks_read_the_same_batch(tmp_path, ranks, microbatch):
    """The global batch does not depend on who reads it."""
    docs = some_docs(60)
    tokens, whole = write(tmp_path, docs, 100), stream(docs)
    loaders = [data.Loader([tokens], None, 7, 1, 12, microbatch, r, ranks) for r in range(ranks)]
    order = np.array([data.sample_at(1, n, [tokens.windows(7)])[2] for n in range(36, 48)])
    assert rows_of(loaders, 36) == [tuple(whole[w * 7 : w * 7 + 8]) for w in order.tolist()]
    for rounds in zip(
        *(loader.step(36) for loader in loaders)
    ):  # all ranks in step, ranks consecutive
        assert len({b.tokens.shape for b in rounds}) == 1
        numbers = [i for b in rounds for i in b.sample.tolist()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for b in rounds:
            assert b.n_valid == b.targets.numel() and b.lo is None
            assert b.tokens.is_contiguous() and b.targets.is_contiguous()
            assert b.pos.tolist() == [list(range(7))] * len(b.pos)


@quick
def test_global_batch_can_change(tmp_path):
    tokens = write(tmp_path, some_docs(60), 100)
    one = [
        r for n in range(0, 24, 12) for r in rows_of([data.Loader([tokens], None, 7, 1, 12, 5)], n)
    ]
    other = [
        r for n in range(0, 24, 4) for r in rows_of([data.Loader([tokens], None, 7, 1, 4, 3)], n)
    ]
    assert one == other


@quick
def test_sources_blend(tmp_path):
    a = write(tmp_path / "a", [[1] * 500])
    b = write(tmp_path / "b", [[2] * 9] * 30, shard_tokens=25)
    loader = data.Loader([a, b], [3, 1], 8, 0, 400, 32)
    tokens = np.concatenate([m.tokens.numpy() for m in loader.step(4000)])
    source = np.array(data.sample_at(0, np.arange(4000, 4400), [62, 37], (3.0, 1.0))[0])
    assert ((tokens == 1).any(1) == (source == 0)).all() and (
        (tokens == 2).any(1) == (source == 1)
    ).all()
    assert abs(np.mean(source == 1) - 0.25) < 0.1


@quick
@pytest.mark.parametrize("shard_tokens", [10**9, 50])
def test_documents_masked(tmp_path, shard_tokens):
    """lo, pos and targets by brute force. The eot itself is a target that counts."""
    docs = some_docs(40)
    tokens, whole = write(tmp_path, docs, shard_tokens), stream(docs)
    doc_of = np.repeat(np.arange(40), [len(d) + 1 for d in docs])
    loader = data.Loader([tokens], None, 16, 0, 12, 5, mask_documents=True)
    for b in loader.step(12):
        valid = 0
        for row, n in enumerate(b.sample.tolist()):
            at = data.sample_at(0, 12 + n, [tokens.windows(16)])[2] * 16
            for i in range(16):
                same = [j for j in range(i + 1) if doc_of[at + j] == doc_of[at + i]]
                assert (0 if b.lo is None else b.lo[row, i]) == same[0]
                assert b.pos[row, i] == i - same[0]
                counts = doc_of[at + i + 1] == doc_of[at + i]
                assert b.targets[row, i] == (whole[at + i + 1] if counts else data.IGNORE)
                valid += int(counts)
        assert b.n_valid == valid and b.lo is not None


@quick
def test_masked_without_a_boundary_is_causal(tmp_path):
    tokens = write(tmp_path, [[1] * 100])
    (b,) = data.Loader([tokens], None, 10, 0, 4, 4, mask_documents=True).step(0)
    assert (b.lo, b.n_valid) == (None, 40)


@quick
def test_eot_counts(tmp_path):
    """Two documents of 4 tokens and an eot each: masked, one target does not count."""
    tokens = write(tmp_path, [[1, 2, 3, 4], [5, 6, 7, 8]])
    for mask, n in ((False, 9), (True, 8)):
        (b,) = data.Loader([tokens], None, 9, 0, 1, 1, mask_documents=mask).step(0)
        assert b.n_valid == n and (b.targets == 256).sum() == 2


@quick
@pytest.mark.parametrize("mask", [False, True])
def test_reading_ahead_is_the_pure_step(tmp_path, mask):
    """Also from a new start of a loader that has run."""
    tokens = write(tmp_path, some_docs(60))
    loader = data.Loader([tokens], None, 7, 1, 12, 5, 1, 2, mask)
    with pytest.raises(RuntimeError, match="start"):
        loader.next()
    for start in (0, 24, 36):
        loader.start(start)
        for k in range(5):
            samples, batches = loader.next()
            assert samples == start + 12 * k
            for got, want in zip(batches, loader.step(samples)):
                assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    loader.close()
    loader.close()


@quick
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("n", [1, 5, 17, 18, None])
def test_evaluation_reads_each_sequence_once(tmp_path, n, ranks):
    """17 sequences on 4 ranks, masks as in training."""
    docs = some_docs(20)
    tokens, whole = write(tmp_path, docs, 100), stream(docs)
    total = tokens.windows(16)
    batches = [list(data.eval_batches(tokens, 16, n, 3, r, ranks, True)) for r in range(ranks)]
    assert len({len(b) for b in batches}) == 1
    assert {tuple(b.tokens.shape) for rank in batches for b in rank} == {(3, 16)}
    count = min(n or total, total)
    want = [i * total // count for i in range(count)]
    got = collections.Counter()
    for b in (b for rank in batches for b in rank):
        for i, row, target in zip(b.sample.tolist(), b.tokens, b.targets):
            if i < count:
                assert row.tolist() == whole[want[i] * 16 :][:16].tolist()
                got[i] += 1
            else:
                assert (target == data.IGNORE).all()
    assert got == dict.fromkeys(range(count), 1)
    single = list(data.eval_batches(tokens, 16, n, 3, 0, 1, True))
    assert sum(b.n_valid for rank in batches for b in rank) == sum(b.n_valid for b in single)
    trained = data.Loader([tokens], None, 16, 0, total, total, mask_documents=True).step(0)[0]
    order = data.sample_at(0, np.arange(total), [total])[2].tolist()
    for row, w in enumerate(order):
        for b in single:
            for i in range(3):
                if b.sample[i] < count and want[b.sample[i]] == w:
                    assert b.targets[i].equal(trained.targets[row]) and b.pos[i].equal(
                        trained.pos[row]
                    )


# ---- bad input ----


@quick
@pytest.mark.parametrize(
    "change, words",
    [
        ({"global_batch": 10, "ranks": 4}, r"train.global_batch 10.* 4 data ranks.* 8$"),
        ({"global_batch": 3, "ranks": 4}, r"train.global_batch 3.* 4 data ranks.* 4$"),
        ({"global_batch": 0}, "train.global_batch 0"),
        ({"microbatch": 0}, "train.microbatch 0"),
        ({"seq_len": 1000}, "data.seq_len 1000.*82 tokens"),
        ({"weights": [1, 2]}, "data.path: weights"),
        ({"weights": [0]}, "data.path: weights"),
        ({"weights": [-1]}, "data.path: weights"),
        ({"weights": ["x"]}, "data.path: weights"),
    ],
)
def test_loader_bad_input(tmp_path, change, words):
    tokens = write(tmp_path, [[1] * 81])
    args = {"weights": None, "seq_len": 8, "seed": 0, "global_batch": 4, "microbatch": 2} | change
    with pytest.raises(ValueError, match=words):
        data.Loader([tokens], **args)


@quick
def test_sources_must_agree(tmp_path):
    a = write(tmp_path / "a", [[1] * 81])
    b = write(tmp_path / "b", [[1] * 81], name="other")
    with pytest.raises(ValueError, match="tokenizer other.*byte"):
        data.Loader([a, b], None, 8, 0, 4, 2)
    with pytest.raises(ValueError, match="data.path: weights"):
        data.Loader([a, a], [1, 1e-5], 8, 0, 4, 2)


@quick
@pytest.mark.parametrize(
    "args, words",
    [
        (["nowhere.txt"], "no text at nowhere.txt"),
        (["*.nothing"], r"no text at \*.nothing"),
        (["empty"], "no text at empty"),
        (["empty.txt"], "no text for split train"),
        (["a.txt", "--val", "0.00001"], "no text for split val"),
        (["a.txt", "--val", "1"], "val 1"),
        (["a.txt", "--val", "-0.5"], "val -0.5"),
        (["a.txt", "--procs", "0"], "procs 0"),
        (["a.txt", "--shard-tokens", "0"], "shard_tokens 0"),
        (["a.txt", "--split", "a-b"], "split 'a-b'"),
        (["a.txt", "--split", "val", "--val", "0.5"], "split 'val'"),
        (["a.txt", "--tokenizer", "gtp2"], "gtp2"),
        (["a.txt", "--tokenizer", "a.txt"], "a.txt.*tiktoken ranks file"),
        (["bad.jsonl"], r"bad.jsonl:2"),
        (["a.txt", "--tokenizer", "a.json"], "a.json"),
        (["bad.gz"], "bad.gz.*cannot be read"),
        (["half.txt.gz"], "half.txt.gz.*cannot be read"),
        (["key.jsonl"], r"key.jsonl:3.*`text`"),
    ],
)
def test_prepare_bad_input(tmp_path, monkeypatch, capsys, args, words):
    """Each is one clear line, exit code 2, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("empty")
    for name, text in {
        "a.txt": "hello",
        "empty.txt": "",
        "bad.jsonl": '{"text": "x"}\n{"text": ',
        "bad.gz": "x",
        "a.json": "{}",
        "key.jsonl": '{"text": "x"}\n\n{"txt": 3}\n',
    }.items():
        pathlib.Path(name).write_text(text)
    pathlib.Path("half.txt.gz").write_bytes(gzip.compress(os.urandom(1000))[:500])
    assert data.main(["prepare", *args, "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("data.py: error: ") and err.count("\n") == 1
    assert pytest.importorskip("re").search(words, err)
    assert not os.path.exists("out")


@quick
def test_prepare_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.txt").write_text("hello")
    pathlib.Path("b.txt").write_text("other text")
    data.prepare(["a.txt", "b.txt"], "out", shard_tokens=1, quiet=True)  # 2 shards
    before = {p: p.read_bytes() for p in pathlib.Path("out").iterdir()}
    with pytest.raises(ValueError, match="out/train-00000.tokens exists.*--force"):
        data.prepare(["b.txt"], "out", quiet=True)
    with pytest.raises(ValueError, match="no text"):  # a failure with --force leaves the old split
        open("c.txt", "w").close()
        data.prepare(["c.txt"], "out", force=True, quiet=True)
    assert {p: p.read_bytes() for p in pathlib.Path("out").iterdir()} == before
    data.prepare(["b.txt"], "out", force=True, quiet=True)
    assert data.Tokens("out").n_tokens == 11
    assert bytes(data.Tokens("out").read(0, 10).tolist()) == b"other text"
    data.prepare(["a.txt"], "out", split="val", quiet=True)
    assert data.Tokens("out", "val").n_bytes == 5 and os.listdir("out") != []
    write("other", [[1]], name="x")
    with pytest.raises(ValueError, match="has tokenizer x, not byte"):
        data.prepare(["a.txt"], "other", split="val", quiet=True)


@quick
def test_half_written_files_are_not_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("a.txt").write_text("hello " * 100)
    os.makedirs("out/.prepare-dead")
    pathlib.Path("out/.prepare-dead/train-00000.tokens").write_bytes(b"half")
    data.prepare(["a.txt"], "out", quiet=True)
    data.Tokens("out").check()
    for name in ("fsync", "replace"):  # the disk is full, or worse
        with monkeypatch.context() as m, pytest.raises(ZeroDivisionError):
            m.setattr(os, name, lambda *a: 1 / 0)
            data.prepare(["a.txt"], tmp_path / "new", quiet=True)
        assert not (tmp_path / "new").exists()


# ---- text ----


@quick
def test_documents_of_files(tmp_path):
    """Every document once, in order, invalid UTF-8 replaced, one eot each."""
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/.hidden").mkdir()
    texts = dict(zip(["a.txt", "b.md", "sub/c.py", "sub/d.txt"], ODD[3:7]))
    for name, text in texts.items():
        (tmp_path / "in" / name).write_bytes(text.encode())
    (tmp_path / "in/sub/e.txt").write_bytes(b"bad \xff\xfe utf-8")
    (tmp_path / "in/sub/f.txt").write_bytes(b"")
    (tmp_path / "in/skip.bin").write_bytes(b"\0")
    (tmp_path / "in/.hidden/x.txt").write_bytes(b"\0")
    rows = ["surrogate \ud800 alone", "<|endoftext|>", "", "\u2028 is no end of line"]
    (tmp_path / "in/sub/g.jsonl").write_text(
        "\n".join(json.dumps({"text": t, "id": 1}) for t in rows) + "\n\n"
    )
    with gzip.open(tmp_path / "in/z.txt.gz", "wb") as f:
        f.write(b"zipped")
    data.prepare(str(tmp_path / "in"), tmp_path / "out", quiet=True)
    t = data.Tokens(tmp_path / "out")
    t.check()
    names = [
        "a.txt",
        "b.md",
        "z.txt.gz",
        *(f"sub/{n}" for n in ["c.py", "d.txt", "e.txt", "f.txt"]),
        *(f"sub/g.jsonl:{k}" for k in (1, 2, 3, 4)),
    ]
    starts = [0, *np.flatnonzero(t.read(0, t.n_tokens) == 256) + 1]
    assert [t.where(a)[0] for a in starts[:-1]] == names
    got = [t.read(a, b - a).tolist() for a, b in zip(starts, starts[1:])]
    assert sum(g.count(256) for g in got) == t.n_docs == 11 and all(g[-1] == 256 for g in got)
    want = [
        *ODD[3:5],
        "zipped",
        *ODD[5:7],
        "bad \ufffd\ufffd utf-8",
        "",
        rows[0].replace("\ud800", "\ufffd"),
        *rows[1:],
    ]
    assert [bytes(g[:-1]).decode() for g in got] == want
    sizes = [len(w.encode()) for w in want]
    sizes[5] = 12  # two invalid bytes, not two replacement characters of three
    assert t.n_bytes == sum(sizes)


@quick
def test_globs_and_repeated_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x[1].txt", "y.txt"):
        pathlib.Path(name).write_text(name)
    assert [n for _, n in data.find_text(["x[1].txt", "*.txt", str(tmp_path)])] == [
        "x[1].txt",
        "y.txt",
    ]


@quick
def test_validation_split_by_document(tmp_path):
    rows = [{"text": f"text {i}"} for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data.prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", val=0.25, quiet=True)
    found = []
    for split in ("train", "val"):
        t = data.Tokens(tmp_path / "out", split)
        found.append(
            bytes(x if x < 256 else 10 for x in t.read(0, t.n_tokens).tolist())
            .decode()
            .split("\n")[:-1]
        )
    assert sorted(found[0] + found[1]) == sorted(r["text"] for r in rows)
    assert abs(len(found[1]) - 500) < 100


def long_text(size):
    words = np.random.default_rng(0).integers(0, 100, size // 5)
    return "".join(
        "end\n"[w * 4 :] or ("Zeile ", "caf\u00e9 ", "don't ", "12 ", "x\n\n", "  ")[w % 6]
        for w in words.tolist()
    )


@quick
@pytest.mark.parametrize("kind", ["words", "wide", "no line end", "crlf"])
def test_huge_files_are_cut(tmp_path, monkeypatch, kind):
    """Pieces put together are the text, and no piece is much longer than PIECE."""
    text = {"words": long_text(2**18), "wide": "\u4e2d" * 2**17, "no line end": "x" * 2**18,
            "crlf": "\r\n" * 2**17}[kind]
    monkeypatch.setattr(data, "PIECE", 2**14)
    (tmp_path / "a.txt").write_bytes(text.encode())
    pieces = list(data._pieces([(str(tmp_path / "a.txt"), "a.txt")]))
    assert b"".join(p[2] for p in pieces).decode() == text
    assert all(p[2].decode() is not None and len(p[2]) <= 2**15 for p in pieces)
    assert [p[3] for p in pieces] == [False] * (len(pieces) - 1) + [True]
    data.prepare([str(tmp_path / "a.txt")], tmp_path / "out", quiet=True)
    t = data.Tokens(tmp_path / "out")
    assert (t.n_docs, t.n_bytes, t.n_tokens) == (1, len(text.encode()), len(text.encode()) + 1)


@quick
def test_jsonl_lines_and_memory(tmp_path, monkeypatch):
    """Names give the line, also past the first piece; a line longer than a piece is whole."""
    monkeypatch.setattr(data, "PIECE", 256)
    rows = ["x" * (i * 37 % 700) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": r}) for r in rows))
    data.prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", shard_tokens=1000, quiet=True)
    t = data.Tokens(tmp_path / "out")
    starts = [0, *np.flatnonzero(t.read(0, t.n_tokens) == 256) + 1]
    assert [b - a - 1 for a, b in zip(starts, starts[1:])] == [len(r) for r in rows]
    assert [t.where(a)[0] for a in starts[:-1]] == [f"a.jsonl:{k}" for k in range(1, 101)]


# ---- tokenizers ----


def toy_ranks(
    tmp_path, merges=("th", "the", " t", " the", "in", "ing", "\n\n", "00", "\u00e9", "don", "'t")
):
    """A tiktoken ranks file: the bytes, in an order that is not theirs, then some merges."""
    import base64

    tokens = [bytes([b ^ 0x55]) for b in range(256)] + [m.encode() for m in merges]
    path = tmp_path / "toy.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return str(path)


@quick
def test_round_trips(tmp_path):
    """Every odd text comes back, and none of it becomes a special token."""
    for tok in (data.load_tokenizer("byte"), data.load_tokenizer(toy_ranks(tmp_path))):
        for text in ODD:
            ids = tok.encode(text)
            assert tok.decode(ids) == text and tok.eot not in ids.tolist()
            assert not len(ids) or ids.max() < tok.vocab_size
        assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb"
        assert tok.decode([*tok.encode("x").tolist(), tok.eot]) == "x<|endoftext|>"


@quick
def test_ranks_file(tmp_path):
    tok = data.load_tokenizer(toy_ranks(tmp_path))
    assert (tok.eot, tok.vocab_size) == (267, 268)
    assert tok.encode("the thing").tolist() == [257, ord(" ") ^ 0x55, 256, 261]
    data.prepare([toy_ranks(tmp_path)], tmp_path / "out", toy_ranks(tmp_path), quiet=True)
    t = data.Tokens(str(tmp_path / "out"))  # the folder carries its tokenizer
    os.remove(tmp_path / "toy.tiktoken")
    again = data.load_tokenizer(t.tokenizer_path)
    (tmp_path / "v.txt").write_text("the thing")
    own = t.tokenizer_path
    data.prepare([str(tmp_path / "v.txt")], tmp_path / "out", own, split="val", quiet=True)
    val = data.Tokens(str(tmp_path / "out"), "val")
    assert val.read(0, 5).tolist() == [257, 117, 256, 261, 267]
    assert again.name == t.tokenizer_name == tok.name and again.encode("the thing").tolist() == [
        257,
        117,
        256,
        261,
    ]


@quick
@pytest.mark.parametrize(
    "change", [lambda r: r[1:], lambda r: [*r, "eHl6 3"], lambda r: [*r, "x"], lambda r: []]
)
def test_damaged_ranks_file(tmp_path, change):
    path = pathlib.Path(toy_ranks(tmp_path))
    path.write_text("\n".join(change(path.read_text().splitlines())))
    with pytest.raises(ValueError, match="toy.tiktoken.*tiktoken ranks file"):
        data.load_tokenizer(str(path))


def test_named_tokenizer_offline(monkeypatch):
    import tiktoken

    def offline(name):
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match="gpt2.*offline, give the path"):
        data.load_tokenizer("gpt2")


@quick
def test_patterns_are_tiktokens(monkeypatch):
    """The patterns written out in data.py against those of the installed tiktoken."""
    public = pytest.importorskip("tiktoken_ext.openai_public")
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *a, **k: {})
    assert public.r50k_base()["pat_str"] == data.GPT2
    assert public.cl100k_base()["pat_str"] == data.CL100K
    assert public.o200k_base()["pat_str"] == data.O200K
    for n, (make, eot) in {
        50256: ("r50k_base", 50256),
        100256: ("cl100k_base", 100257),
        199998: ("o200k_base", 199999),
    }.items():
        spec = getattr(public, make)()
        assert (
            data.RANKS[n]
            == (spec["pat_str"], spec["special_tokens"]["<|endoftext|>"])
            == (spec["pat_str"], eot)
        )


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained_json(tmp_path, style):
    """A tokenizer.json that the tokenizers library trains on this file, in a known style."""
    tk = pytest.importorskip("tokenizers")
    tok = tk.Tokenizer(tk.models.BPE())
    tok.decoder = tk.decoders.ByteLevel()
    tok.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if style != "gpt2":
        tok.pre_tokenizer = tk.pre_tokenizers.Sequence(
            [
                tk.pre_tokenizers.Split(tk.Regex(LLAMA3), "isolated"),
                tk.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if style == "qwen":
        tok.normalizer = tk.normalizers.NFC()
    trainer = tk.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=tk.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [pathlib.Path(__file__).read_text(), *ODD, "\u4e2d\u6587 caf\u00e9 " * 50]
    tok.train_from_iterator(texts, trainer)
    tok.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json"), tok, texts


@pytest.mark.parametrize("style", ["gpt2", "llama3", "qwen"])
def test_tokenizer_json(tmp_path, style):
    """The same ids as the tokenizers library gives, but for special tokens in a text."""
    path, ref, texts = trained_json(tmp_path, style)
    tok = data.load_tokenizer(path)
    assert tok.eot == ref.token_to_id("<|endoftext|>") and tok.vocab_size == ref.get_vocab_size()
    rng = np.random.default_rng(0)
    letters = np.array(list("ab'tsl \n\t\r019_.\u00e9\u4e2d\u0301\U0001f642\u3000"))
    texts += ["".join(rng.choice(letters, 200)) for _ in range(50)]
    for text in texts:
        if "<|" not in text:
            assert tok.encode(text).tolist() == ref.encode(text, add_special_tokens=False).ids, (
                repr(text[:60])
            )
            assert style == "qwen" or tok.decode(tok.encode(text)) == text
    assert tok.eot not in tok.encode("<|endoftext|>").tolist()


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s["model"].update(type="Unigram"), "Unigram"),
        (lambda s: s["model"].pop("merges"), "merges"),
        (lambda s: s["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda s: s["pre_tokenizer"].update(type="Metaspace"), "Metaspace"),
        (lambda s: s["pre_tokenizer"].update(add_prefix_space=True), "add_prefix_space"),
        (lambda s: s.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda s: s["model"]["merges"].reverse(), "order"),
        (lambda s: s.update(added_tokens=[]), "end a text"),
        (lambda s: s["model"]["vocab"].pop("a"), "'a'"),
        (lambda s: s.update(pre_tokenizer=None), "tokenizer.json"),
    ],
)
def test_tokenizer_json_refused(tmp_path, change, words):
    path, _, _ = trained_json(tmp_path, "gpt2")
    spec = json.loads(pathlib.Path(path).read_text())
    change(spec)
    pathlib.Path(path).write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=words) as e:
        data.load_tokenizer(path)
    assert path in str(e.value) and "byte-level BPE" in str(e.value)


def test_processes_do_not_change_the_result(tmp_path, monkeypatch):
    """Of preparation: the same shards bit for bit, and the same as without pieces."""
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(data, "PIECE", 2**14)
    text = long_text(2**18)
    (tmp_path / "in/a.txt").write_text(text)
    for i in range(20):
        (tmp_path / f"in/b{i}.txt").write_text(text[i * 1000 : i * 3000])
    (tmp_path / "in/c.jsonl").write_text(
        "\n".join(json.dumps({"text": text[i * 500 :][:500]}) for i in range(400))
    )
    ranks, found = toy_ranks(tmp_path), []
    for procs in (1, 2, 3):
        out = tmp_path / str(procs)
        data.prepare(
            [str(tmp_path / "in")],
            out,
            ranks,
            val=0.2,
            procs=procs,
            shard_tokens=30_000,
            quiet=True,
        )
        found.append({p.name: p.read_bytes() for p in sorted(out.iterdir())})
    assert found[0] == found[1] == found[2] and len(found[0]) > 4
    t = next(
        t
        for s in ("train", "val")
        if (t := data.Tokens(str(tmp_path / "1"), s)).where(0)[0] == "a.txt"
    )
    want = data.load_tokenizer(ranks).encode(text)
    assert t.read(0, len(want) + 1).tolist() == [*want.tolist(), t.eot]


@quick
def test_errors_cross_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 2**14)
    (tmp_path / "a.jsonl").write_text('{"text": "' + "x" * 2**17 + '"}\n{}\n')
    with pytest.raises(ValueError, match="a.jsonl:2"):
        data.prepare(
            [str(tmp_path / "a.jsonl")], tmp_path / "out", toy_ranks(tmp_path), procs=2, quiet=True
        )
    assert not (tmp_path / "out").exists()


# ---- commands ----


@quick
def test_commands(tmp_path, capsys):
    out = str(tmp_path / "s")
    assert (
        data.main(["synth", "--out", out, "--tokens", "1000", "--vocab", "70000", "--docs", "7"])
        == 0
    )
    t = data.Tokens(out)
    t.check()
    assert (t.n_tokens, t.n_docs, t.dtype, t.eot) == (1000, 7, np.uint32, 69999)
    assert data.main(["synth", "--out", out]) == 2  # in use
    (tmp_path / "a.txt").write_text("hello world, " * 20)
    assert data.main(["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t")]) == 0
    capsys.readouterr()
    assert data.main(["peek", str(tmp_path / "t"), "--at", "7"]) == 0
    shown = capsys.readouterr().out
    assert "261 tokens" in shown and "world, hello" in shown
    assert (
        data.main(
            ["trace", "1", str(tmp_path / "t") + ":1", "--seq-len", "50", "--global-batch", "2"]
        )
        == 0
    )
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("sample")]
    assert len(lines) == 2 and lines[0].startswith("sample 2: ")
    (b,) = data.Loader([data.Tokens(str(tmp_path / "t"))], None, 50, 0, 2, 2).step(2)
    at = int(lines[0].split("tokens ")[1].split(" to")[0])
    assert b.tokens[0].tolist() == data.Tokens(str(tmp_path / "t")).read(at, 50).tolist()
    assert data.main(["trace", "x", out, "--seq-len", "50", "--global-batch", "2"]) == 2
    assert data.main(["peek", out, "--at", "5000"]) == 2


def test_default_text(tmp_path):
    data.prepare_default(tmp_path / "out")
    train, val = (data.Tokens(tmp_path / "out", s) for s in ("train", "val"))
    assert 8e6 < train.n_bytes < 16e6 and 0.02 < val.n_bytes / train.n_bytes < 0.12
    assert not set(train.names(0)) & set(val.names(0))
    val.check()


def test_shows_its_idea_and_imports_alone(tmp_path):
    (tmp_path / "data.py").write_bytes(pathlib.Path(DATA).read_bytes())
    run = SimpleNamespace(cwd=tmp_path, capture_output=True, text=True, timeout=60)
    shown = subprocess.run([sys.executable, "-W", "error", "data.py"], **vars(run))
    assert shown.returncode == 0 and "rank 1" in shown.stdout, shown.stderr
    bad = subprocess.run([sys.executable, "data.py", "peek", "/nowhere"], **vars(run))
    assert (
        bad.returncode == 2
        and bad.stderr.startswith("data.py: error: ")
        and bad.stderr.count("\n") == 1
    )
    quiet = subprocess.run(
        [sys.executable, "-c", "import data, sys; assert 'torch' not in sys.modules"], **vars(run)
    )
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
