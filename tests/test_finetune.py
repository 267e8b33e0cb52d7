"""A new run with the weights of another; prompts that do not count in the loss."""

import json
import pathlib
import shutil
import struct

import numpy as np
import parity
import pytest
import torch
from pool import Script

import checkpoint
import data
import train

ROOT = pathlib.Path(__file__).parent.parent
ROWS = [{"prompt": "ab", "completion": "c"}, {"prompt": "", "completion": "de"},
        {"prompt": "fgh", "completion": ""}, {"text": "ij"}]
#      a  b  c  |  d  e  |  f  g  h  |  i  j  |      (| ends a document)
IDS = [*b"abc", 256, *b"de", 256, *b"fgh", 256, *b"ij", 256]
COUNTS = [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]


def prepare(folder, rows=ROWS, **how):
    """A token folder of these JSON lines."""
    file = pathlib.Path(folder) / "in.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data.prepare([str(file)], folder, quiet=True, **how)
    return data.Tokens(str(folder), how.get("split", "train"))


def all_batches(sources, seq_len, mask=False):
    """Every window of the sources once, two at a time."""
    places = [(s, w) for s, t in enumerate(sources) for w in range(t.windows(seq_len))]
    for i in range(0, len(places), 2):
        source, window = np.array(places[i : i + 2]).T
        yield data.make_batch(sources, source, window, np.arange(len(source)), seq_len, mask)


# ---- Prompts ----


@pytest.mark.quick
@pytest.mark.parametrize("shard_tokens", [1, 5, 10**9])
def test_the_loss_counts_on_completions(tmp_path, shard_tokens):
    """Whatever the shards: targets that count are those of completions, texts and their ends."""
    tokens = prepare(tmp_path, shard_tokens=shard_tokens)
    tokens.check()
    assert tokens.masked and tokens.read(0, len(IDS)).tolist() == IDS
    assert np.concatenate(tokens.parts(0, len(IDS), "counts")).tolist() == COUNTS
    for seq_len in (1, 3, 4, 13):
        targets, n = [], 0
        for b in all_batches([tokens], seq_len):
            assert b.n_valid == (b.targets != -100).sum()
            assert b.lo is None and b.tokens.min() >= 0
            targets += b.targets.flatten().tolist()
            n += b.n_valid
        want = [i if c else -100 for i, c in zip(IDS, COUNTS)][1 : len(targets) + 1]
        assert targets == want and n == sum(COUNTS[1 : len(targets) + 1])


@pytest.mark.quick
def test_prompts_and_document_masks(tmp_path):
    """With mask_documents what follows an end counts in no case; here e, i and the lone | of ""."""
    [b] = all_batches([prepare(tmp_path)], 13, mask=True)
    want = [i if c and before != 256 else -100
            for before, i, c in zip(IDS, IDS[1:], COUNTS[1:])]
    assert b.targets.tolist() == [want] and b.n_valid == 7
    assert b.pos.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0, 1]]


@pytest.mark.quick
def test_a_source_without_prompts_counts_everything(tmp_path):
    both = [prepare(tmp_path / "a"), prepare(tmp_path / "b", [{"text": "xyzxyzxyz"}])]
    assert [t.masked for t in both] == [True, False]
    assert not list((tmp_path / "b").glob("*.loss"))
    n = [b.n_valid for b in all_batches(both, 3)]
    assert sum(n) == sum(COUNTS[1:13]) + 9
    loader = data.Loader(both, None, 3, 0, 8, 4)
    for b in loader.step(0):
        assert b.n_valid == (b.targets != -100).sum()
    loader.close()


@pytest.mark.quick
def test_the_file_is_what_the_docstring_draws(tmp_path):
    prepare(tmp_path)
    tokens = (tmp_path / "train-00000.tokens").read_bytes()
    assert (tmp_path / "train-00000.tokens.loss").read_bytes() == tokens[:128] + bytes(COUNTS)
    assert struct.unpack("<I", tokens[8:12]) == (2,)


@pytest.mark.quick
def test_long_files_and_processes(tmp_path, monkeypatch):
    """Lines in many pieces, plain and masked ones in turn, split off for validation."""
    monkeypatch.setattr(data, "PIECE", 300)
    rows = [{"prompt": "p" * (k % 7), "completion": "c" * (k % 5)} if k % 3 else {"text": "t" * k}
            for k in range(120)]
    prepare(tmp_path, rows, shard_tokens=700, val=0.2)
    n = 0
    for split in ("train", "val"):
        tokens = data.Tokens(str(tmp_path), split)
        tokens.check()
        ids = tokens.read(0, tokens.n_tokens)
        counts = np.concatenate(tokens.parts(0, tokens.n_tokens, "counts"))
        assert np.array_equal(counts == 0, ids == ord("p"))
        n += tokens.n_docs
    assert n == 120 and len(data.Tokens(str(tmp_path)).shards) > 2


@pytest.mark.quick
@pytest.mark.parametrize("change, words", [
    (lambda f: f.write_bytes(f.read_bytes()[:-1]), "141 bytes; should be 142"),
    (lambda f: f.write_bytes(b""), "0 bytes; should be 142"),
    (lambda f: f.write_bytes(bytes(142)), "beginning as"),
    (lambda f: f.unlink(), "format version 2.*version 1.*without"),
    (lambda f: f.with_suffix("").write_bytes(
        f.with_suffix("").read_bytes().replace(b"minimesh\2", b"minimesh\1")),
     "format version 1.*version 2.*with "),
])
def test_a_mask_that_does_not_fit_names_both_files(tmp_path, change, words):
    prepare(tmp_path)
    file = tmp_path / "train-00000.tokens.loss"
    change(file)
    with pytest.raises(ValueError, match=words) as e:
        data.Tokens(str(tmp_path))
    assert f"{file}" in str(e.value).replace(",", " ").split() or f"{file}:" in str(e.value)
    assert str(e.value).count(f"{file.with_suffix('')}") == 2 and "\n" not in str(e.value)


@pytest.mark.quick
def test_damage_that_checking_finds(tmp_path, capsys):
    prepare(tmp_path)
    file = tmp_path / "train-00000.tokens.loss"
    file.write_bytes(file.read_bytes()[:-1] + b"\2")
    assert data.main(["peek", str(tmp_path)]) == 0
    assert "not all count in the loss" in capsys.readouterr().out
    assert data.main(["peek", str(tmp_path), "--check"]) == 2
    assert f"{file}: holds bytes other than 0 and 1" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("line", ['{"prompt": "a"}', '{"completion": "a"}', '["prompt"]', '"text"',
                                  '{"prompt": "a", "completion": 3}', "null", "{"])
def test_a_line_that_is_neither_names_file_and_line(tmp_path, line):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"^x.jsonl:3: .*`text`.*`prompt` and `completion`"):
        data.prepare([str(file)], tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.quick
def test_prepared_again_without_prompts(tmp_path):
    """The old mask goes with the old tokens; after an error both are as they were."""
    prepare(tmp_path, shard_tokens=3)
    with pytest.raises(ValueError, match="jsonl:1"):
        prepare(tmp_path, [{}], force=True)
    assert data.Tokens(str(tmp_path)).masked
    tokens = prepare(tmp_path, [{"text": "plain"}], force=True)
    assert not tokens.masked and not list(tmp_path.glob("*.loss"))
    assert prepare(tmp_path, force=True).masked


def learn(folder, steps):
    """A small model after `steps` steps on it: (loss of the last step, held-out loss)."""
    case = {"model.vocab_size": 257, "model.d_model": 32, "data.mask_documents": True,
            "speed.dtype": "float32", "optim.lr": 0.01, "train.microbatch": 24,
            "model.init_std": 0.02, "train.steps": steps}
    run = parity.prepare(case, folder)
    out, held_out = parity.go(run, steps), train.evaluate(run)[0]
    run.loader.close()
    return out["loss"][-1], held_out


def test_what_does_not_count_is_not_learnt(tmp_path):
    """Prompts are noise, completions always the same: next to nothing is left to learn, in training
    and evaluation; without the mask the noise is, log(26) for each of its letters."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        rows = [{"prompt": "".join(map(chr, rng.integers(97, 123, 5))) + "=", "completion": "yes"}
                for _ in range(400)]
        prepare(tmp_path / "masked", rows, split=split)
        texts = [{"text": row["prompt"] + row["completion"]} for row in rows]
        prepare(tmp_path / "plain", texts, split=split)
    masked, plain = (learn(tmp_path / name, 40) for name in ("masked", "plain"))
    assert max(masked) < 0.3 and min(plain) > 1.0, (masked, plain)


# ---- init.from ----


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    """A run of three steps: its folder, and what its parameters are."""
    root = tmp_path_factory.mktemp("trained") / "run"
    parity.run_and_save({}, tokens, str(root), 3)
    run = parity.prepare({"run.dir": str(root)}, tokens)
    assert train.resume(run)
    params = parity.logical(run.blocks, run.blocks.master)
    run.loader.close()
    return root, params


def start(case, folder):
    """What main does before the first step; parameters, moments, place."""
    run = parity.prepare(case, folder)
    resumed = train.resume(run) or train.begin(run)
    run.loader.close()
    moments = [b.abs().max().item() for b in (*run.blocks.exp_avg, *run.blocks.exp_avg_sq)
               if b.numel()]
    return {"params": parity.logical(run.blocks, run.blocks.master), "origin": run.origin,
            "moment": max(moments), "at": (run.step, run.samples), "resumed": resumed,
            "counter": max(c.item() for pair in run.blocks.steps for c in pair)}


def one_more(case, folder):
    """The loss of the first step after `start`."""
    run = parity.prepare(case, folder)
    train.begin(run)
    out = parity.go(run, 1)
    run.loader.close()
    return out["loss"][0]


LAYOUTS = {"one": {}, "zero1": {"parallel.dp": 1, "parallel.fsdp": 2, "parallel.zero": 1},
           "zero3": {"parallel.dp": 1, "parallel.fsdp": 2, "parallel.zero": 3},
           "tp2": {"parallel.tp": 2}, "pp2": {"parallel.pp": 2}}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_are_those_of_the_checkpoint(world, tokens, trained, tmp_path, layout):
    """Bit by bit, of a run folder and of a checkpoint, on any layout; all else is new."""
    root, params = trained
    for source in (root, root / "checkpoints" / "step_000000003"):
        case = layout | {"init.from": str(source), "run.dir": str(tmp_path / "new")}
        results = world(2).run(start, case, tokens) if layout else [start(case, tokens)]
        for out in results:
            assert set(out["params"]) == set(params)
            assert all(torch.equal(out["params"][name], p) for name, p in params.items())
            assert (out["moment"], out["counter"], out["at"]) == (0, 0, (0, 0))
            assert out["origin"] == f"{root}/checkpoints/step_000000003 (step 3)"
            assert not out["resumed"]
    losses = world(2).run(one_more, case, tokens) if layout else [one_more(case, tokens)]
    plain = one_more({"init.from": str(root), "run.dir": str(tmp_path / "new")}, tokens)
    fresh = one_more({"run.dir": str(tmp_path / "new")}, tokens)
    for loss in losses:  # the compute copies are filled too
        assert parity.agree("loss", loss, plain) is None and abs(loss - fresh) > 1e-3


def test_a_run_with_a_checkpoint_does_not_read_it(tokens, trained, tmp_path):
    root, params = trained
    shutil.copytree(root, tmp_path / "run")
    out = start({"init.from": "/nowhere", "run.dir": str(tmp_path / "run")}, tokens)
    assert out["resumed"] and out["at"] == (3, 72) and out["moment"] > 0 and out["origin"] == ""
    assert torch.equal(out["params"]["embed.tokens.weight"], params["embed.tokens.weight"])


@pytest.mark.parametrize("case", [
    {"speed.dtype": "bfloat16"}, {"model.dropout": 0.1, "model.z_loss": 1e-4},
    {"model.init_std": 0.1, "model.depth_init": False, "speed.pad_vocab": 64},
    {"model.max_len": 100, "model.d_head": 4}])
def test_what_may_differ(tokens, trained, tmp_path, case):
    root, params = trained
    case = case | {"init.from": str(root), "run.dir": str(tmp_path / "new")}
    for name, p in start(case, tokens)["params"].items():
        assert torch.equal(p, params[name].to(p.dtype)), name


def damage(root):
    file = root / "checkpoints" / "step_000000003" / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1  # the last tensor in the file is a parameter or a moment: damage all of them
    for at in range(len(raw) // 2, len(raw), 64):
        raw[at] ^= 1
    for at in range(8 + int.from_bytes(raw[:8], "little"), len(raw) // 2, 64):
        raw[at] ^= 1
    file.write_bytes(raw)


def retokenize(root, name):
    file = root / "checkpoints" / "step_000000003" / "index.json"
    index = json.loads(file.read_text())
    index["meta"]["tokenizer"] = name
    file.write_text(json.dumps(index))


@pytest.mark.parametrize("case, change, words", [
    ({"init.from": "/nowhere"}, None, ["/nowhere", "no complete checkpoint"]),
    ({"model.d_ff": 32, "model.n_layer": 3, "model.dropout": 0.1}, None,
     ["model.n_layer (checkpoint 2, config 3), model.d_ff (checkpoint 24, config 32);"]),
    ({"model.positions": "learned", "model.max_len": 40}, None,
     ["model.max_len (checkpoint 12, config 40), model.positions"]),
    ({}, damage, ["rank_00000.safetensors", "damaged"]),
    ({}, lambda root: (root / "checkpoints/step_000000003/index.json").write_text("{"),
     ["no good checkpoint left"]),
    ({}, lambda root: (root / "checkpoints/step_000000003/rank_00000.safetensors").unlink(),
     ["rank_00000.safetensors is missing"]),
    ({}, lambda root: retokenize(root, "byte"), ["tokenizer is byte", "the data synth"]),
    ({}, lambda root: retokenize(root, None), ["tokenizer is None", "the data synth"]),
])
def test_weights_that_cannot_be_had_are_an_error(world, tokens, trained, tmp_path, case, change,
                                                 words):
    """The same on one rank and on two: never a silent new start."""
    root = tmp_path / "copy"
    shutil.copytree(trained[0], root)
    if change:
        change(root)
    case = {"init.from": str(root), "run.dir": str(tmp_path / "new")} | case
    with pytest.raises(ValueError) as e:
        start(case, tokens)
    for told in (str(e.value), *world(2).run(refusal, case, tokens)):
        for word in words:
            assert word in told, told
        assert "\n" not in told and "model.dropout" not in told


def refusal(case, folder):
    try:
        start(case, folder)
    except ValueError as e:
        return str(e)


def test_damage_that_one_rank_meets_is_told_by_all(world, tokens, trained, tmp_path):
    case = {"init.from": str(trained[0]), "run.dir": str(tmp_path / "new")}
    told = world(2).run(refusal_of_one, case, tokens)
    assert told == ["rank 1: only here"] * 2


def refusal_of_one(case, folder):
    plain = checkpoint.load

    def load(*args):
        if torch.distributed.get_rank() == 1:
            raise OSError("only here")
        plain(*args)

    checkpoint.load = load
    try:
        return refusal(case, folder)
    finally:
        checkpoint.load = plain


def test_the_same_vocabulary_elsewhere(tmp_path, tokens, trained):
    """A file of the same content is the same tokenizer."""
    root, folder = tmp_path / "copy", tmp_path / "tokens"
    shutil.copytree(trained[0], root)
    case = {"init.from": str(root), "run.dir": str(tmp_path / "new")}
    run = parity.prepare(case, tokens)
    folder.mkdir()
    for name, text in (("a.json", "1"), ("b.json", "1"), ("c.json", "2")):
        (folder / name).write_text(text)
    run.tokenizer = str(folder / "a.json")
    retokenize(root, str(folder / "b.json"))
    train.begin(run)
    assert run.origin
    for other in ("c.json", "gone.json"):
        retokenize(root, str(folder / other))
        with pytest.raises(ValueError, match=f"{other}.*a.json"):
            train.begin(run)
    run.loader.close()


def test_learned_positions_have_their_length(tokens, tmp_path):
    case = {"model.positions": "learned", "model.max_len": 20}
    parity.run_and_save(case, tokens, str(tmp_path / "run"), 1)
    new = case | {"init.from": str(tmp_path / "run"), "run.dir": str(tmp_path / "new")}
    assert start(new, tokens)["origin"]
    for n in (19, 21):
        with pytest.raises(ValueError, match=rf"model.max_len \(checkpoint 20, config {n}\)"):
            start(new | {"model.max_len": n}, tokens)


# ---- From the shell ----


def shell(*args):
    small = ["model.n_layer=2", "model.d_model=32", "model.n_head=4", "model.n_kv_head=2",
             "model.d_ff=48", "data.seq_len=32", "optim.warmup=2", "log.every=1",
             "train.eval_sequences=8", "train.eval_every=null", "speed.threads=1"]
    return Script("train.py", *small, *args).wait()


def test_from_the_shell(tmp_path):
    """Text, then sums from JSON lines, starting with what the text has taught."""
    first, second = tmp_path / "first", tmp_path / "second"
    data.prepare([str(ROOT / "README.md")], tmp_path / "text", quiet=True)
    data.prepare([str(ROOT / "tests" / "sums.jsonl")], tmp_path / "sums", val=0.2, quiet=True)
    done = shell(f"data.path={tmp_path / 'text'}", f"run.dir={first}", "train.steps=10",
                 "log.sample=null")
    assert done.returncode == 0, done.stderr
    tune = [f"init.from={first}", f"data.path={tmp_path / 'sums'}", f"run.dir={second}",
            "train.steps=40", "data.mask_documents=true", "optim.lr=0.01", "log.sample=5"]
    done = shell(*tune)
    assert done.returncode == 0, done.stderr
    assert f"weights from {first}/checkpoints/step_000000010 (step 10)\n" in done.stdout
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    loss = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["val_loss"] for row in rows if "val_loss" in row]
    assert len(loss) == 40 and loss[-1] < loss[0] - 2.5 and held_out[-1] < 2.5
    bad = shell(*tune, "init.from=/nowhere", f"run.dir={tmp_path / 'third'}")
    assert bad.returncode == 2 and "/nowhere" in bad.stderr
    assert len(bad.stderr.strip().splitlines()) == 1 and not (tmp_path / "third").exists()
