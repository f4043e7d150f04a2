"""Hugging Face checkpoints: equal to what transformers computes, in every form they come in, or an error that names it."""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from attnorm import dot_product_attention
from attnorm.models.pretrained import CheckpointError, load_bert, load_gpt2, open_checkpoint
from tests.models.pretrained.tensor_files import write_checkpoint, write_tensors

HERE = Path(__file__).parent
GPT2, BERT = HERE / "tiny_gpt2", HERE / "tiny_bert"
ATTENTION = {
    name: functools.partial(dot_product_attention, normalizer="softmax", is_causal=name == "gpt2")
    for name in ("gpt2", "bert")
}


@pytest.fixture(scope="module")
def gpt2():
    """config.json, the tensors, and the parameters that were read from them."""
    checkpoint = open_checkpoint(GPT2)
    return dict(checkpoint.config), dict(checkpoint.tensors), params_of(load_gpt2(checkpoint))


def params_of(model):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(nnx.state(model))}


def load(folder):
    return load_gpt2(open_checkpoint(folder))


@pytest.mark.parametrize("name, load", [("gpt2", load_gpt2), ("bert", load_bert)])
def test_equals_transformers(name, load):
    folder = {"gpt2": GPT2, "bert": BERT}[name]
    expected = np.load(folder / "expected.npz")
    model = load(open_checkpoint(folder))
    output = jax.jit(lambda tokens: model(tokens, ATTENTION[name]))(expected["tokens"])
    assert np.ptp(expected["output"]) > 5  # an agreement within 1e-5 says something
    np.testing.assert_allclose(output, expected["output"], atol=1e-5, rtol=0)


def without_prefix(tensors):
    return {name.removeprefix("transformer."): x for name, x in tensors.items()}


def with_buffers(tensors):
    buffers = {}
    for layer in range(2):
        buffers[f"transformer.h.{layer}.attn.bias"] = np.tri(40, dtype=np.bool_)[None, None]
        buffers[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return tensors | buffers


def with_tied_head(tensors):
    return tensors | {"lm_head.weight": tensors["transformer.wte.weight"]}


FORMS = {
    "without prefix": without_prefix,
    "with buffers": with_buffers,
    "with a tied head": with_tied_head,
    "all of it": lambda tensors: without_prefix(with_buffers(with_tied_head(tensors))),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_one_model(gpt2, tmp_path, form, shards):
    config, tensors, expected = gpt2
    got = params_of(load(write_checkpoint(tmp_path, config, FORMS[form](tensors), shards)))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened(gpt2, tmp_path, dtype):
    config, tensors, expected = gpt2
    halved = {name: x.astype(dtype) for name, x in tensors.items()}
    got = params_of(load(write_checkpoint(tmp_path, config, halved)))
    for name, x in got.items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, np.asarray(expected[name]).astype(dtype).astype(np.float32))


def test_free_head(gpt2, tmp_path):
    config, tensors, _ = gpt2
    head = np.random.default_rng(0).standard_normal((280, 24), np.float32)
    config = config | {"tie_word_embeddings": False}
    model = load(write_checkpoint(tmp_path, config, tensors | {"lm_head.weight": head}))
    hidden = jax.random.normal(jax.random.key(0), (1, 3, 24))
    np.testing.assert_allclose(model.logits(hidden)[0], np.asarray(hidden[0]) @ head.T, atol=1e-5)
    with pytest.raises(CheckpointError, match="no weight 'lm_head.weight'"):
        load(write_checkpoint(tmp_path, config, tensors))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from wte.weight"):
        load(write_checkpoint(tmp_path, gpt2[0], tensors | {"lm_head.weight": head}))


def test_unscaled_attention_and_other_sizes_are_read_from_the_config(gpt2, tmp_path):
    config, tensors, _ = gpt2
    model = load(write_checkpoint(tmp_path, config | {"scale_attn_weights": False, "n_inner": 96}, tensors))
    assert model.config.attention_scale == 1
    with pytest.raises(CheckpointError, match=r"mlp.enter.bias has shape \(2, 96\).*\(2, 90\)"):
        load(write_checkpoint(tmp_path, config | {"n_inner": 90}, tensors))


# Bad input.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "llama"}, "model_type must be 'gpt2', got 'llama'"),
        ({"activation_function": "relu"}, "activation_function must be one of .*, got 'relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be"),
        ({"n_head": 5}, "features must be a multiple of num_heads = 5"),
        ({"n_layer": 3}, "no weight 'transformer.h.2.attn.c_attn.weight'"),
        ({"n_layer": 1}, "weights that this architecture does not: transformer.h.1"),
        ({"n_embd": "24"}, "whole number n_embd, got '24'"),
        ({"model_type": ["gpt2"]}, "model_type must be 'gpt2', got"),
        ({"layer_norm_epsilon": "x"}, "norm_eps must be a number, got 'x'"),
        ({"n_inner": 12.5}, "mlp_features must be a whole number, got 12.5"),
        ({"n_positions": 41}, r"position_embedding.embedding has shape \(40, 24\).*\(41, 24\)"),
    ],
)
def test_config_that_does_not_fit(gpt2, tmp_path, changes, message):
    config, tensors, _ = gpt2
    with pytest.raises(CheckpointError, match=message):
        load(write_checkpoint(tmp_path, config | changes, tensors))


def test_weights_that_are_missing_or_left_over(gpt2, tmp_path):
    config, tensors, _ = gpt2
    fewer = {name: x for name, x in tensors.items() if name != "transformer.h.1.mlp.c_fc.bias"}
    with pytest.raises(CheckpointError, match="no weight 'transformer.h.1.mlp.c_fc.bias'"):
        load(write_checkpoint(tmp_path, config, fewer))
    with pytest.raises(CheckpointError, match="does not: score.weight"):
        load(write_checkpoint(tmp_path, config, tensors | {"score.weight": np.ones((2, 24), np.float32)}))


def test_files_that_are_missing(gpt2, tmp_path):
    config, tensors, _ = gpt2
    with pytest.raises(CheckpointError, match="config.json is missing"):
        open_checkpoint(tmp_path)
    folder = write_checkpoint(tmp_path, config, tensors, shards=2)
    (folder / "model-00002-of-00002.safetensors").rename(folder / "model-00002-of-00002.safetensors.part")
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors is missing"):
        open_checkpoint(folder)
    write_tensors(folder / "model-00002-of-00002.safetensors", {})
    with pytest.raises(CheckpointError, match="no weight '.*', which model.safetensors.index.json lists"):
        open_checkpoint(folder)


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_files_that_are_cut_off(tmp_path, size):
    """Also a file without its header is known by its size to be too short, or to be no such file."""
    whole = (GPT2 / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((GPT2 / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(whole[:size])
    size = len(whole[:size])
    message = f"is cut off: it has {size:,} of" if size >= 8 else "is not a safetensors file"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_files_of_other_kinds(gpt2, tmp_path):
    config, tensors, _ = gpt2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="pytorch_model.bin, a pickle, which can run code"):
        open_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        open_checkpoint(tmp_path)
    entry = b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    for old, new in (
        (b"[1]", b"[-1]"),
        (b"[1]", b'["a"]'),
        (b"4]", b'"4"]'),
        (b"4]", b"4, 5]"),
        (b"[1]", b"1"),
    ):
        header = entry.replace(old, new)
        file.write_bytes(len(header).to_bytes(8, "little") + header + b"0123")
        with pytest.raises(CheckpointError, match="model.safetensors is not a safetensors file"):
            open_checkpoint(tmp_path)
    for header in (b"[1]", b'{"x": 3}', b"{"):
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CheckpointError, match="header cannot be read"):
            open_checkpoint(tmp_path)
    header = b'{"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(CheckpointError, match="x has dtype F8_E4M3"):
        open_checkpoint(tmp_path)
    header = header.replace(b"F8_E4M3", b"F32")
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(CheckpointError, match="cannot have the bytes 0 to 1"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": 5}}')
    with pytest.raises(CheckpointError, match="index.json has no weight_map from names to files"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('["gpt2"]')
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="config.json cannot be read: Is a directory"):
        open_checkpoint(tmp_path)


def test_names_that_are_neither_folder_nor_id():
    for model in ("./no/such/folder", "no/such/folder", "a b"):
        with pytest.raises(CheckpointError, match="neither a folder nor the id"):
            open_checkpoint(model)


def test_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"huggingface_hub is needed; in the checkout: pip install"):
        open_checkpoint("openai-community/gpt2")


def test_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="could not be downloaded(.|\n)*Without a connection, copy"):
        open_checkpoint("openai-community/gpt2")
