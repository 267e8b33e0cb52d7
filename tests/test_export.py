"""Checkpoints as others have them: Hugging Face folders both ways against transformers, one file of
many, and what differs between two."""

import dataclasses
import functools
import json
import math
import shutil
import sys
import unittest.mock

import parity
import pytest
import torch
import torch.nn.functional as F
from test_checkpoint import bits, flat_pieces, save_all, simple
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import model
import parallel

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

# No two sizes are equal, and a wrong norm_eps or rotary scaling is seen in the logits.
LLAMA = {"n_layer": 2, "d_model": 24, "n_head": 4, "n_kv_head": 2, "d_head": 10, "d_ff": 36,
         "window": None, "vocab_size": 261, "max_len": 64, "norm": "rmsnorm", "norm_eps": 0.02,
         "positions": "rotary", "rope_theta": 100.0, "rope_scaling": None, "activation": "swiglu",
         "bias": False, "tied": True, "qk_norm": False, "dropout": 0.0, "logit_softcap": None,
         "z_loss": 0.0, "init_std": 0.02, "depth_init": True}
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 32}
GPT2 = LLAMA | {"n_head": 3, "n_kv_head": 3, "d_head": None, "d_ff": 40, "norm": "layernorm",
                "positions": "learned", "rope_theta": 1e4, "activation": "gelu", "bias": True}
MODELS = {"gpt2": GPT2, "gpt2 untied": GPT2 | {"tied": False},
          "llama": LLAMA, "llama scaled": LLAMA | {"rope_scaling": ROPE, "tied": False},
          "qwen3": LLAMA | {"qk_norm": True, "d_model": 22},
          "qwen3 scaled": LLAMA | {"qk_norm": True, "rope_scaling": ROPE, "tied": False}}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
IDS = torch.arange(2 * 60).view(2, 60) * 7 % 261


def write(folder, section, layout=(), **sharding):
    """A checkpoint of this rank's share of a model whose every weight is random, as train.py
    writes it. Returns its folder."""
    cfg = model.ModelConfig(**section)
    mesh = parity.mesh_of(parallel.layout_of(math.prod(dict(layout).values()), **dict(layout)))
    net, blocks = model.build(cfg, mesh, torch.float32, pad_vocab=64, **sharding)
    with unittest.mock.patch.object(model, "init_of", lambda name, cfg: (0.0, 0.4)):
        model.init_weights(blocks, cfg, seed=3)
    meta = {"step": 7, "samples": 0, "config": {"model": section}, "tokenizer": "byte", "eot": 256}
    return checkpoint.save(folder, 7, model.pieces(blocks, shared=True), meta, mesh.rank,
                           mesh.world, functools.partial(parallel.agree, mesh))


@torch.no_grad()
def our_logits(path):
    """At every position, from a checkpoint."""
    net, _, _ = model.load_for_sampling(path, "byte")
    x, micro = None, net.micro(IDS)
    for name, block in net.named_blocks():
        x = block.norm(x) if name == "head" else block(x, micro)
    return F.linear(x, net.head.weight)[..., : net.cfg.vocab_size]


@torch.no_grad()
def their_logits(folder):
    net, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    given = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert net.config.eos_token_id == given  # and no number of their default tokenizer's
    return net.eval()(IDS).logits


def assert_close(a, b):
    assert a.shape == b.shape and b.abs().max() > 1  # or the bound would say nothing
    assert (a - b).abs().max() <= 1e-5 * b.abs().max(), (a - b).abs().max()


def their_config(kind, **changes):
    m = MODELS[kind]
    tied, common = m["tied"], {"bos_token_id": None, "eos_token_id": None}
    if kind[:4] == "gpt2":
        return transformers.GPT2Config(
            vocab_size=261, n_positions=64, n_embd=24, n_layer=2, n_head=3, n_inner=40,
            layer_norm_epsilon=0.02, tie_word_embeddings=tied, **common | changes)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    rope |= LLAMA3 if m["rope_scaling"] else {}
    make = transformers.LlamaConfig if kind[:5] == "llama" else transformers.Qwen3Config
    return make(**dict(
        vocab_size=261, max_position_embeddings=64, hidden_size=m["d_model"], num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, intermediate_size=36,
        rms_norm_eps=0.02, tie_word_embeddings=tied, rope_parameters=rope) | common | changes)


def their_model(folder, kind, dtype=torch.float32, limit="5GB", **changes):
    """A folder of a model of theirs whose every weight is random."""
    net = transformers.AutoModelForCausalLM.from_config(their_config(kind, **changes))
    generator = torch.Generator().manual_seed(5)
    for p in net.parameters():
        p.data.normal_(std=0.4, generator=generator)
    net.to(dtype).save_pretrained(folder, max_shard_size=limit)
    return folder


def tensors_of(folder):
    """{name: tensor} of all files there, which hold each tensor once."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        held = checkpoint.read_safetensors(file)
        assert not set(out) & set(held)
        out |= held
    return out


def edit(file, **changes):
    """Change keys of a JSON file; ... removes one."""
    spec = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in spec.items() if v is not ...}))


# ---------------------------------------------------------------------------------------------
# To Hugging Face


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_computes_what_we_do(kind, tmp_path):
    path = write(tmp_path, MODELS[kind])
    said = checkpoint.export(path, tmp_path / "hf")
    assert said == "no tokenizer: byte is no tokenizer.json"
    assert {p.name for p in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}
    assert_close(their_logits(tmp_path / "hf"), our_logits(path))


def test_a_model_cut_over_ranks_gives_the_same_bytes(tmp_path, world):
    """Slices of a flat buffer; rows and columns of tp, the vocabulary padded."""
    for kind in ("gpt2", "llama scaled"):
        section = MODELS[kind] | {"n_head": 4, "n_kv_head": 4 if kind == "gpt2" else 2}
        checkpoint.export(write(tmp_path / kind, section), tmp_path / f"{kind} 1", limit=9000)
        want = {p.name: p.read_bytes() for p in (tmp_path / f"{kind} 1").iterdir()}
        for name, layout, zero in (("tp", {"tp": 2}, 0), ("fsdp", {"fsdp": 2}, 3)):
            paths = world(2).run(functools.partial(write, layout=tuple(layout.items()), zero=zero),
                                 str(tmp_path / f"{kind} {name} in"), section)
            boxes = [t["boxes"] for t in checkpoint.read_index(paths[0])["tensors"].values()]
            assert {box[0] for several in boxes for box in several} == {0, 1}  # both files
            assert any(len(several) > 1 for several in boxes)
            checkpoint.export(paths[0], tmp_path / f"{kind} {name}", limit=9000)
            got = {p.name: p.read_bytes() for p in (tmp_path / f"{kind} {name}").iterdir()}
            assert got == want


@pytest.mark.parametrize("limit, files", [(10**9, 1), (30_000, None), (1, 20)])
def test_shards_have_an_index_and_a_largest_size(limit, files, tmp_path):
    path, out = write(tmp_path, MODELS["llama"]), tmp_path / "hf"
    checkpoint.export(path, out, limit=limit)
    shards = sorted(out.glob("*.safetensors"))
    n = len(shards)
    assert n == (files or n) and (files or n > 2)
    sizes = {name: t.nbytes for name, t in tensors_of(out).items()}
    if n == 1:
        assert [p.name for p in shards] == ["model.safetensors"]
        assert not (out / "model.safetensors.index.json").exists()
    else:
        names = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        assert [p.name for p in shards] == names
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(sizes.values())}
        assert set(index["weight_map"]) == set(sizes)
        for p in shards:
            held = checkpoint.read_safetensors(p)
            assert {index["weight_map"][name] for name in held} == {p.name}
            assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= limit
    assert_close(their_logits(out), our_logits(path))


def test_the_dtype_can_be_chosen(tmp_path):
    path = write(tmp_path, MODELS["llama scaled"])
    checkpoint.export(path, tmp_path / "wide")
    checkpoint.export(path, tmp_path / "bf16", torch.bfloat16)
    wide, narrow = tensors_of(tmp_path / "wide"), tensors_of(tmp_path / "bf16")
    assert {t.dtype for t in wide.values()} == {torch.float32}
    assert set(wide) == set(narrow)
    for name, t in narrow.items():
        assert t.dtype == torch.bfloat16 and bits(t) == bits(wide[name].bfloat16())
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert net.dtype == torch.bfloat16


def test_only_parameters_are_exported(tmp_path):
    """The moments of the optimizer are in the checkpoint and not in the folder."""
    path = write(tmp_path, MODELS["gpt2"])
    names = checkpoint.read_index(path)["tensors"]
    assert any(name.startswith("exp_avg/") for name in names)
    checkpoint.export(path, tmp_path / "hf")
    stored = sum(math.prod(t["shape"]) for k, t in names.items() if k.startswith("param/"))
    assert sum(t.numel() for t in tensors_of(tmp_path / "hf").values()) == stored


def test_the_tokenizer_goes_along(tmp_path):
    path, home = write(tmp_path, MODELS["llama"]), tmp_path / "tokenizer"
    home.mkdir()
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "else.json": "{}"}
    for name, text in files.items():
        (home / name).write_text(text)
    index = json.loads((path / "index.json").read_text())
    for i, source in enumerate((home, home / "tokenizer.json", home / "else.json")):
        index["meta"]["tokenizer"] = str(source)
        (path / "index.json").write_text(json.dumps(index))
        out = tmp_path / f"hf {i}"
        said = checkpoint.export(path, out)
        used = home / "tokenizer.json" if source == home else source
        assert said == f"tokenizer: {used}"
        assert (out / "tokenizer.json").read_text() == "{}"
        assert json.loads((out / "tokenizer_config.json").read_text()) == {"a": 1}
        assert not (out / "else.json").exists()
    index["meta"]["tokenizer"] = str(home / "gone.json")
    (path / "index.json").write_text(json.dumps(index))
    assert "no tokenizer.json" in checkpoint.export(path, tmp_path / "hf 3")


@pytest.mark.quick
@pytest.mark.parametrize("kind, change", [
    ("llama", {"window": 16}), ("llama", {"window": [8, None]}), ("qwen3", {"window": 16}),
    ("llama", {"logit_softcap": 30.0}), ("llama", {"bias": True}),
    ("llama", {"positions": "learned"}), ("llama", {"activation": "gelu"}),
    ("llama", {"d_model": 22}), ("gpt2", {"bias": False}),
    ("gpt2", {"positions": "rotary"}), ("gpt2", {"activation": "swiglu"}),
    ("gpt2", {"n_kv_head": 1}), ("gpt2", {"d_head": 6}), ("gpt2", {"qk_norm": True}),
    ("gpt2", {"window": 8}), ("gpt2", {"logit_softcap": 5.0})], ids=str)
def test_a_model_that_they_do_not_have_is_refused(kind, change, tmp_path):
    path = write(tmp_path, MODELS[kind] | change)
    [(key, value)] = change.items()
    with pytest.raises(ValueError) as caught:
        checkpoint.export(path, tmp_path / "hf")
    assert f"model.{key} = {value!r}: " in str(caught.value) and kind in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.quick
def test_what_only_training_needs_is_no_hindrance(tmp_path):
    path = write(tmp_path, LLAMA | {"dropout": 0.3, "z_loss": 0.1, "init_std": 0.1})
    checkpoint.export(path, tmp_path / "hf")


@pytest.mark.quick
def test_a_checkpoint_that_is_not_what_its_meta_says_is_refused(tmp_path):
    path = write(tmp_path, LLAMA)
    index = json.loads((path / "index.json").read_text())
    for section, message in (
            (LLAMA | {"tied": False}, "1 tensors do not fit: head.weight is missing"),
            (LLAMA | {"n_layer": 1}, "layers.1.attn_norm.weight is unknown"),
            (LLAMA | {"d_ff": 37}, r"mlp.gate.weight is \[36, 24\] instead of \[37, 24\]"),
            (None, "its meta has no config.model")):
        index["meta"]["config"] = {"model": section} if section else {}
        (path / "index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            checkpoint.export(path, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


# ---------------------------------------------------------------------------------------------
# From Hugging Face


@pytest.mark.parametrize("limit", ["5GB", "20KB"])
@pytest.mark.parametrize("kind", MODELS)
def test_we_compute_what_transformers_does(kind, limit, tmp_path):
    """And what comes back is bit-equal, tensors and config."""
    folder = their_model(tmp_path / "hf", kind, limit=limit, eos_token_id=9)
    out = tmp_path / "ours"
    assert ((folder / "model.safetensors.index.json").exists()) == (limit == "20KB")
    checkpoint.import_folder(folder, out)
    assert_close(our_logits(out), their_logits(folder))
    meta = checkpoint.read_meta(out)
    section = meta["config"]["model"]
    assert list(sorted(section)) == sorted(f.name for f in dataclasses.fields(model.ModelConfig))
    known = MODELS[kind] | {"d_head": MODELS[kind]["d_head"] or 8}
    assert section == known and meta["step"] == 0 and meta["tokenizer"] is None
    assert all(k.startswith("param/") for k in checkpoint.read_index(out)["tensors"])
    checkpoint.export(out, tmp_path / "back")
    theirs, back = tensors_of(folder), tensors_of(tmp_path / "back")
    assert set(theirs) == set(back)
    for name, t in back.items():
        assert t.shape == theirs[name].shape and bits(t) == bits(theirs[name]), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert checkpoint.from_config(config) == (kind.split()[0], section)
    assert config["eos_token_id"] == meta["eot"] == 9


@pytest.mark.parametrize("kind", ["llama", "llama scaled", "qwen3 scaled"])
def test_the_words_of_transformers_4_are_read(kind, tmp_path):
    folder = their_model(tmp_path / "hf", kind)
    checkpoint.import_folder(folder, tmp_path / "five")
    want = checkpoint.read_meta(tmp_path / "five")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta, scaling = rope.pop("rope_theta"), rope if "factor" in rope else None
    for i, key in enumerate(("rope_type", "type")):
        if scaling:
            scaling = {(key if k.endswith("type") else k): v for k, v in scaling.items()}
        edit(folder / "config.json", rope_parameters=..., rope_theta=theta, rope_scaling=scaling)
        checkpoint.import_folder(folder, tmp_path / f"four {i}")
        assert checkpoint.read_meta(tmp_path / f"four {i}") == want
    edit(folder / "config.json", rope_theta=...)
    checkpoint.import_folder(folder, tmp_path / "no base")
    section = checkpoint.read_meta(tmp_path / "no base")["config"]["model"]
    assert section == want["config"]["model"] | {"rope_theta": 10000.0}


@pytest.mark.quick
def test_what_a_config_leaves_out_is_their_default(tmp_path):
    for kind, keys, section in (
            ("gpt2", ("n_inner", "tie_word_embeddings", "activation_function"), {"d_ff": 96}),
            ("llama scaled", ("num_key_value_heads", "head_dim", "tie_word_embeddings",
                              "attention_bias"), {"n_kv_head": 4, "d_head": 6})):
        their_config(kind).save_pretrained(tmp_path)
        for value in (..., None):
            edit(tmp_path / "config.json", **{key: value for key in keys[:2]})
            got = checkpoint.from_config(json.loads((tmp_path / "config.json").read_text()))[1]
            assert got == MODELS[kind] | {"d_head": 8} | section
            edit(tmp_path / "config.json", **{key: ... for key in keys[2:]})


@pytest.mark.quick
def test_bfloat16_stays_and_sampling_runs(tmp_path):
    folder = their_model(tmp_path / "hf", "qwen3", torch.bfloat16)
    checkpoint.import_folder(folder, tmp_path / "ours", tokenizer="byte")
    dtypes = {t["dtype"] for t in checkpoint.read_index(tmp_path / "ours")["tensors"].values()}
    assert dtypes == {"BF16"}
    text = model.sample(*model.load_for_sampling(tmp_path / "ours"), "ab", 5, temperature=0)
    assert text.startswith("ab")
    checkpoint.verify(tmp_path / "ours")
    checkpoint.export(tmp_path / "ours", tmp_path / "back")
    assert all(bits(t) == bits(tensors_of(folder)[k])
               for k, t in tensors_of(tmp_path / "back").items())


@pytest.mark.quick
def test_its_tokenizer_is_found(tmp_path):
    folder = their_model(tmp_path / "hf", "llama")
    (folder / "tokenizer.json").write_text("{}")
    checkpoint.import_folder(folder, tmp_path / "a")
    assert checkpoint.read_meta(tmp_path / "a")["tokenizer"] == str(folder / "tokenizer.json")
    checkpoint.import_folder(folder, tmp_path / "b", tokenizer="gpt2")
    assert checkpoint.read_meta(tmp_path / "b")["tokenizer"] == "gpt2"


def rewrite(folder, change):
    """Pass the tensors of a one-file folder through `change`."""
    tensors = {k: t.clone() for k, t in tensors_of(folder).items()}
    change(tensors)
    (folder / "model.safetensors").unlink()
    checkpoint.write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})


@pytest.mark.quick
def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    folder = their_model(tmp_path / "hf", "llama")
    name, embed = "lm_head.weight", "model.embed_tokens.weight"
    rewrite(folder, lambda t: t.update({name: t[embed].clone()}))
    checkpoint.import_folder(folder, tmp_path / "ours")
    assert "param/head.weight" not in checkpoint.read_index(tmp_path / "ours")["tensors"]
    assert_close(our_logits(tmp_path / "ours"), their_logits(folder))
    rewrite(folder, lambda t: t[name][-1, -1].add_(1))
    with pytest.raises(ValueError, match=f"{name} differs from {embed}, but tie_word_embeddings"):
        checkpoint.import_folder(folder, tmp_path / "other")
    rewrite(folder, lambda t: t.update({name: t[name][:-1]}))
    with pytest.raises(ValueError, match=rf"{name} is \[260, 24\] instead of \[261, 24\]"):
        checkpoint.import_folder(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("n_head, n_kv_head", [(4, 4), (8, 2), (6, 2), (6, 1)])
def test_every_ratio_of_heads_goes_both_ways(n_head, n_kv_head, tmp_path):
    """Rotary halves and groups of heads: logits at all positions, and the same bits back."""
    for kind in ("llama scaled", "qwen3"):
        root = tmp_path / kind
        path = write(root, MODELS[kind] | {"n_head": n_head, "n_kv_head": n_kv_head, "d_head": 6})
        checkpoint.export(path, root / "hf")
        assert_close(their_logits(root / "hf"), our_logits(path))
        checkpoint.import_folder(root / "hf", root / "back")
        ours, back = (tensors_of(folder) for folder in (path, root / "back"))
        weights = [name for name in ours if name.startswith("param/")]
        assert len(weights) > 20 and all(torch.equal(ours[n], back[n]) for n in weights)


@pytest.mark.parametrize("kind, gone", [("llama", "model.embed_tokens.weight"),
                                        ("llama scaled", "model.embed_tokens.weight"),
                                        ("llama scaled", "lm_head.weight")])
def test_a_table_that_is_missing_is_named(kind, gone, tmp_path):
    """Tied: a file that has only the head. Untied: one of the two is not there. Never a model with
    a table that nobody filled."""
    folder = their_model(tmp_path / "hf", kind)
    name, embed = "lm_head.weight", "model.embed_tokens.weight"
    rewrite(folder, lambda t: (t.setdefault(name, t[embed].clone()), t.pop(gone)))
    with pytest.raises(ValueError, match=gone):
        checkpoint.import_folder(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.quick
def test_the_names_of_the_published_gpt2_are_read(tmp_path):
    """No prefix, and causal masks among the tensors; in files of old Llamas rotary frequencies."""
    for kind, constants in (("gpt2", {"h.0.attn.bias": torch.ones(1, 1, 4, 4),
                                      "h.0.attn.masked_bias": torch.tensor(-1e4)}),
                            ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq":
                                       torch.ones(5)})):
        folder = their_model(tmp_path / kind, kind)
        checkpoint.import_folder(folder, tmp_path / f"{kind} plain")

        def change(tensors, constants=constants):
            for name in list(tensors):
                tensors[name.removeprefix("transformer.")] = tensors.pop(name)
            tensors |= constants
        rewrite(folder, change)
        checkpoint.import_folder(folder, tmp_path / f"{kind} published")
        assert not checkpoint.diff(tmp_path / f"{kind} plain", tmp_path / f"{kind} published")


@pytest.mark.quick
def test_a_folder_that_is_none_of_theirs_is_refused(tmp_path):
    config, index = (tmp_path / "hf" / name for name in (
        "config.json", "model.safetensors.index.json"))
    for file, text, message in ((config, "[]", "config.json: must be an object"),
                                (config, "{", "config.json: Expecting"),
                                (index, "[]", "index.json: must be an object"),
                                (index, "{}", "hf: its index has no weight_map")):
        folder = their_model(tmp_path / "hf", "llama", limit="20KB")
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            checkpoint.import_folder(folder, tmp_path / "ours")
        shutil.rmtree(folder)


@pytest.mark.quick
@pytest.mark.parametrize("kind, change, message", [
    ("llama", {"model_type": "mistral"}, "model_type = 'mistral': known are gpt2, llama, qwen3"),
    ("llama", {"model_type": ...}, "model_type = None"),
    ("llama", {"architectures": ["LlamaModel"]}, r"architectures = \['LlamaModel'\]"),
    ("llama", {"attention_bias": True}, "attention_bias = True"),
    ("llama", {"mlp_bias": True}, "mlp_bias = True"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
    ("llama", {"hidden_size": ...}, "no hidden_size"),
    ("llama", {"rms_norm_eps": None, "vocab_size": None}, "no vocab_size, rms_norm_eps"),
    ("gpt2", {"n_positions": ...}, "no n_positions"),
    ("llama", {"rope_parameters": LINEAR}, "rope {'linear'}"),
    ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "dynamic"}}, "rope {'dynamic'}"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope {'llama3'}"),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "rope {'yarn'}"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "'partial_rotary_factor': 0.5"),
    ("llama", {"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ("llama", {"vocab_size": 262}, r"embed_tokens.weight is \[261, 24\] instead of \[262, 24\]"),
    ("llama", {"head_dim": 8}, r"q_proj.weight is \[40, 24\] instead of \[32, 24\]"),
    ("gpt2", {"n_inner": None}, r"c_fc.weight is \[24, 40\] instead of \[24, 96\]"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0: must be an integer above 0"),
    ("gpt2", {"n_embd": "24"}, "n_embd = '24': must be an integer above 0"),
    ("llama", {"num_hidden_layers": 3}, "9 tensors do not fit: .*layers.2.* is missing"),
    ("llama", {"num_hidden_layers": 1}, "9 tensors do not fit: .*layers.1.* is unknown"),
    ("qwen3", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
     "q_norm.weight is unknown")], ids=str)
def test_what_we_cannot_be_is_refused(kind, change, message, tmp_path):
    folder = their_model(tmp_path / "hf", kind)
    edit(folder / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        checkpoint.import_folder(folder, tmp_path / "ours")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


# ---------------------------------------------------------------------------------------------
# All or nothing, one tensor at a time


@pytest.mark.quick
def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write(tmp_path, LLAMA)
    folder = their_model(tmp_path / "hf", "llama")
    (tmp_path / "there").mkdir()
    before = sorted(p.name for p in tmp_path.iterdir())
    for command, source in ((checkpoint.export, path), (checkpoint.merge, path),
                            (checkpoint.import_folder, folder)):
        with pytest.raises(ValueError, match="there exists already"):
            command(source, tmp_path / "there")
        for bad in (OSError("disk full"), KeyboardInterrupt()):
            with monkeypatch.context() as patch:
                patch.setattr(checkpoint.os, "fsync", unittest.mock.Mock(side_effect=[None, bad]))
                with pytest.raises(type(bad)):
                    command(source, tmp_path / "new")
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    out, seen = tmp_path / "new", []
    for command, source in ((checkpoint.export, path), (checkpoint.merge, path),
                            (checkpoint.import_folder, folder)):
        with monkeypatch.context() as patch:  # whoever dies while it writes leaves no `out`
            patch.setattr(checkpoint.os, "fsync", lambda fd: seen.append(out.exists()))
            command(source, out)
        assert len(seen) > 2 and seen == [False] * (len(seen) - 1) + [True]
        shutil.rmtree(out)
        seen.clear()


class Alive(TorchDispatchMode):
    """The most bytes that tensors made in this mode held at once."""

    def __init__(self):
        super().__init__()
        self.held, self.most = {}, 0

    def __torch_dispatch__(self, fn, types, args=(), kwargs=None):
        known = {id(t.untyped_storage()) for t in args if isinstance(t, torch.Tensor)}
        out = fn(*args, **kwargs or {})
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor) and t.device.type == "cpu":
                storage = t.untyped_storage()
                if id(storage) not in known and storage.data_ptr() not in self.held:
                    self.held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.held = {at: (ref, n) for at, (ref, n) in self.held.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self.held.values()))
        return out


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["gpt2", "llama scaled"])
def test_one_tensor_is_held_at_a_time(kind, tmp_path):
    """The largest, as the embedding is; and a transpose beside what it is made from."""
    section = MODELS[kind]
    path = write(tmp_path, section)
    largest = 261 * 24 * 4
    d_ff = section["d_ff"]
    assert largest > 2 * 24 * d_ff * 4
    for command in (checkpoint.export, checkpoint.merge):
        with Alive() as alive:
            command(path, tmp_path / command.__name__)
        assert alive.most == largest
    with Alive() as alive:
        checkpoint.import_folder(tmp_path / "export", tmp_path / "back")
    parts = max(24 * d_ff, 24 * 3 * 24)  # views of the file, but for a transpose
    assert alive.most <= (parts * 4 if kind == "gpt2" else 0)
    with Alive() as alive:
        assert not checkpoint.diff(tmp_path / "merge", path)
    assert alive.most <= 2 * largest + 5 * 261 * 24  # one of each, and a few bytes an element


# ---------------------------------------------------------------------------------------------
# One file of many, and what differs


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 3])
def test_merge_gives_one_box_a_tensor(ranks, tmp_path):
    tensors = {f"param/{i}": torch.randn(s, dtype=d) for i, (s, d) in enumerate(
        [((7, 5), torch.float32), ((3,), torch.float64), ((), torch.float32),
         ((2, 3, 4), torch.bfloat16), ((11, 3), torch.float32)])}
    path = save_all(tmp_path / "in", 12, lambda r: flat_pieces(tensors, r, ranks), ranks, {"a": 1})
    out = tmp_path / "step_000000012"
    checkpoint.merge(path, out)
    index = checkpoint.read_index(out, whole=True)
    assert list(index["files"]) == ["rank_00000.safetensors"] and index["step"] == 12
    assert index["meta"] == {"a": 1} and index["world"] == 1
    assert all(len(t["boxes"]) == 1 for t in index["tensors"].values())
    held = checkpoint.read_safetensors(out / "rank_00000.safetensors")
    assert {k.split("[")[0]: bits(t) for k, t in held.items()} == {
        k: bits(t) for k, t in tensors.items()}
    assert checkpoint.latest(tmp_path, pytest.fail) == out
    checkpoint.verify(out)
    assert not checkpoint.diff(path, out)


def test_train_resumes_from_a_merged_checkpoint(tmp_path):
    """Parameters and moments are where they were: loaded by another layout's pieces."""
    section = MODELS["qwen3"]
    path = write(tmp_path, section)
    checkpoint.merge(path, tmp_path / "merged")
    cfg, mesh = model.ModelConfig(**section), parity.mesh_of(parallel.layout_of(1))
    _, blocks = model.build(cfg, mesh, torch.float32, zero=3)
    checkpoint.load(tmp_path / "merged", model.pieces(blocks))
    assert not checkpoint.diff(tmp_path / "merged", path)
    for p in model.pieces(blocks):
        assert p.data.any() == p.name.startswith("param/")


@pytest.mark.quick
def test_diff_finds_the_first_and_the_largest(tmp_path, capsys):
    a = {"param/x": torch.arange(35.0).view(5, 7), "param/y": torch.zeros(3),
         "param/s": torch.ones(()), "param/big": torch.zeros(1500, 1000)}
    b = {k: t.clone() for k, t in a.items()}
    b["param/x"][2, 3] += 0.5
    b["param/x"][4, 0] -= 2.0
    b["param/big"][1400, 7] = torch.nan  # in the second part
    b["param/s"] += 1
    one = save_all(tmp_path, 1, lambda r: flat_pieces(a, r, 2), 2)
    two = save_all(tmp_path, 2, lambda r: flat_pieces(b, r, 3), 3)
    assert checkpoint.diff(one, two)
    x, s, big, end = capsys.readouterr().out.splitlines()
    assert x.split() == "param/x up to 2, first at [2, 3]".split()
    assert s.split() == "param/s up to 1, first at []".split()
    assert big.split() == "param/big up to nan, first at [1400, 7]".split()
    assert end == "3 of 4 tensors differ, first param/x"
    assert not checkpoint.diff(two, save_all(tmp_path, 3, lambda r: flat_pieces(b, r, 1), 1))
    assert capsys.readouterr().out == "0 of 4 tensors differ\n"  # NaN is what it is
    b["param/big"][3, 1] = 2.0  # in the first part too
    b["param/big"][1400, 7] = -3.0
    assert checkpoint.difference(a["param/big"], b["param/big"]) == (3.0, (3, 1))


@pytest.mark.quick
def test_diff_tells_of_other_tensors_shapes_and_dtypes(tmp_path, capsys):
    a = {"param/x": torch.ones(4, 3), "param/y": torch.ones(2), "param/z": torch.ones(2)}
    b = {"param/x": torch.ones(3, 4), "param/z": torch.ones(2).double(), "param/w": torch.ones(1)}
    one = save_all(tmp_path, 1, lambda r: flat_pieces(a, r, 1), 1)
    two = save_all(tmp_path, 2, lambda r: flat_pieces(b, r, 1), 1)
    assert checkpoint.diff(one, two)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["param/x F32 [4, 3] and F32 [3, 4]", "param/y F32 [2] and absent",
                     "param/z F32 [2] and F64 [2]", "param/w absent and F32 [1]",
                     "4 of 4 tensors differ, first param/x"]


def metrics(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.quick
def test_diff_of_metrics_finds_where_two_runs_part(tmp_path, capsys):
    def run(name, *steps):
        rows = [{"step": n, "loss": 1.0, "fingerprints": {"a": a, "b": b}} for n, a, b in steps]
        return metrics(tmp_path / name, [{"step": 0, "loss": 2.0}, *rows])

    one = run("one", (5, "00", "11"), (10, "22", "33"), (20, "44", "55"), (30, "66", "77"))
    same = run("same", (10, "??", "33"), (10, "22", "33"), (20, "44", "55"), (40, "0", "0"))
    other = run("other", (10, "22", "33"), (20, "44", "5f"), (30, "00", "00"))
    assert not checkpoint.diff_metrics(one, same)
    assert capsys.readouterr().out == "equal at 2 common steps, 10 to 20\n"
    assert checkpoint.diff_metrics(one, other)
    assert capsys.readouterr().out == "step 20: 1 of 2 tensors differ, first b\n"
    short = metrics(tmp_path / "short", [{"step": 20, "fingerprints": {"b": "55"}}])
    assert checkpoint.diff_metrics(short, one)
    assert capsys.readouterr().out == "step 20: 1 of 2 tensors differ, first a\n"
    with pytest.raises(ValueError, match="of no common step"):
        checkpoint.diff_metrics(one, metrics(tmp_path / "none", [{"step": 10, "loss": 1.0}]))


# ---------------------------------------------------------------------------------------------
# From the shell


def test_the_shell_commands(tmp_path, capsys, monkeypatch):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, args)])
        try:
            checkpoint.main()
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        return code, *capsys.readouterr()

    path = write(tmp_path, LLAMA)
    assert run("export", path, tmp_path / "hf", "--dtype", "bfloat16") == (
        0, "no tokenizer: byte is no tokenizer.json\n", "")
    assert run("import", tmp_path / "hf", tmp_path / "ours", "--tokenizer", "gpt2") == (0, "", "")
    assert checkpoint.read_meta(tmp_path / "ours")["tokenizer"] == "gpt2"
    assert run("merge", path, tmp_path / "one") == (0, "", "")
    code, out, err = run("diff", path, tmp_path / "one")
    assert (code, err) == (0, "") and out.startswith("0 of ")
    code, out, err = run("diff", path, tmp_path / "ours")
    assert (code, err) == (1, "") and "F32 [261, 24] and BF16 [261, 24]" in out
    a, _ = simple(tmp_path / "runs", 1)
    one = metrics(tmp_path / "one.jsonl", [{"step": 1, "fingerprints": {"a": "0"}}])
    two = metrics(tmp_path / "two.jsonl", [{"step": 1, "fingerprints": {"a": "1"}}])
    assert run("diff", one, one)[0] == 0 and run("diff", one, two)[0] == 1
    for args in (("export", a, tmp_path / "x"), ("import", a, tmp_path / "x"),
                 ("import", tmp_path / "nowhere", tmp_path / "x"), ("merge", path, a),
                 ("merge", path, tmp_path / "no" / "x"), ("diff", path, tmp_path / "nowhere")):
        code, out, err = run(*args)
        assert (code, out, len(err.splitlines())) == (2, "", 1), args
        assert not (tmp_path / "x").exists()
    code, out, err = run("merge", path)
    assert code == 2 and "merge needs two paths" in err
