"""The language-model task: loss and evaluation against logits by hand, a run, and what it refuses."""

import copy
import csv
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnorm import dot_product_attention, get_normalizer
from attnorm.analysis import sources
from attnorm.analysis.extrapolation import read_runs
from attnorm.analysis.sources.trained import _restored
from attnorm.data.text import load_corpus, split_corpus
from attnorm.models.gpt import GPT, GPTConfig
from attnorm.training import loop
from attnorm.training.attention import make_attention
from attnorm.training.config import ConfigError, MeshConfig
from attnorm.training.ensemble import make_groups
from attnorm.training.mesh import make_mesh
from attnorm.training.workdir import WorkdirError
from configs.lm import get_config

LENGTH, EVAL_LENGTH = 16, 64


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Documents of 20 to 147 bytes, so that rows hold parts of several."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(60):
        letters = rng.choice(list("abcdefgh "), 20 + i * 127 // 59, p=[0.3, 0.2] + [0.5 / 7] * 7)
        (folder / f"{i:02}.txt").write_text("".join(letters))
    return folder


@pytest.fixture
def config(corpus):
    config = get_config("runlocal").to_dict()
    config["lm"] |= {"corpus": str(corpus), "held_out": 0.4, "eval_yarn_factors": (1.0, 4.0)}
    return copy.deepcopy(config)


def make_task(config, model=None, **changes):
    changed = config["lm"] | changes | {"model": config["lm"]["model"] | (model or {})}
    return loop.parse_config(config | {"lm": changed})[1]


def attention(normalizer="l2"):
    mesh = make_mesh(MeshConfig(data=-1, fsdp=1, context=1, tensor=1))
    return make_attention(get_normalizer(normalizer), mesh)


def large(params):
    """Weights at which attention matters, and predictions are no guesses."""
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 2 else x, params)
    params["token_embedding"]["embedding"] *= 20
    return params


@jax.jit
def _log_probabilities(model, tokens):
    logits = model(
        tokens, lambda *qkv, **o: dot_product_attention(*qkv, normalizer="l2", is_causal=True, **o)
    )
    return jax.nn.log_softmax(logits)


def losses_alone(task, params, texts, targets, **model):
    """The loss of each target (M, T) of texts (M, T), each alone and from position 0."""
    fields = GPTConfig(**{**vars(task.config.model), **model})
    graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(fields, rngs=nnx.Rngs(0))))
    model = nnx.merge(graph, nnx.State(params))
    found = np.asarray(_log_probabilities(model, jnp.asarray(texts)), np.float64)
    return -np.take_along_axis(found, np.asarray(targets)[..., None], -1)[..., 0]


def documents_of(batch):
    """Each part of a document in packed rows, at the start of a row of its own, and where its targets end."""
    texts, targets, sizes = [], [], []
    for row in range(len(batch["inputs"])):
        segments = batch["segment_ids"][row]
        for segment in range(1, segments.max() + 1):
            place = segments == segment
            size = place.sum()
            pad = (0, len(segments) - size)
            texts.append(np.pad(batch["inputs"][row][place], pad))
            targets.append(np.pad(batch["targets"][row][place], pad))
            sizes.append(size)
    return np.stack(texts), np.stack(targets), np.array(sizes)


def test_loss_is_the_sum_over_documents_alone_and_in_parts_too(config):
    task, in_parts = make_task(config), make_task(config, logits_parts=4)
    params = large(task.init(jax.random.key(0))[0])
    rows = task.host_batches(task.stages[0], 0, 1)
    batch = next(rows[i] for i in range(50) if np.any(rows[i]["segment_ids"] == 0))
    texts, targets, sizes = documents_of(batch)
    assert len(sizes) > len(batch["inputs"])

    losses = losses_alone(task, params, texts, targets)
    expected = sum(row[:size].sum() for row, size in zip(losses, sizes, strict=True))

    def value_and_grad(task):
        def loss(params):
            return task.loss(params, {}, batch, attention())

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    (total, (count, model_state)), gradient = value_and_grad(task)
    assert count == sizes.sum() == np.sum(batch["segment_ids"] > 0) and model_state == {}
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    (total, _), gradient_in_parts = value_and_grad(in_parts)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient_in_parts, gradient
    )
    # 0 is the loss of nothing: empty places do not train the model to continue with what fills them.
    assert total > 0 and jax.tree.all(jax.tree.map(lambda x: bool(np.any(x)), gradient))


def test_evaluation_is_by_position_on_long_pieces(config):
    task = make_task(config)
    params = large(task.init(jax.random.key(1))[0])
    batch = task.eval_batch(jax.random.key(0), jnp.int32(1))
    means = jax.jit(lambda params: task.evaluate(params, {}, batch, attention()))(params)
    summary = {name: float(x) for name, x in task.summarize(means).items()}

    inputs, targets = (np.asarray(batch["pieces"]) for _ in range(2))
    inputs, targets = inputs[:, :-1], targets[:, 1:]
    assert inputs.shape == (2, EVAL_LENGTH) and np.all(inputs[:, 0] == 256) and np.all(targets < 256)
    yarn = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": LENGTH}
    for name, model in (("loss", {}), ("loss_yarn4", yarn)):
        losses = losses_alone(task, params, inputs, targets, **model)
        for bucket in (1, 2, 4, 8, 16, 32, 64):
            expected = losses[:, bucket // 2 : bucket].mean()
            assert summary[f"{name}/{bucket}"] == pytest.approx(expected, rel=1e-5)
    assert summary["loss/64"] != pytest.approx(summary["loss_yarn4/64"], rel=1e-4)

    rows = {name: np.asarray(x) for name, x in batch["rows"].items()}
    texts, targets, sizes = documents_of(rows)
    losses = losses_alone(task, params, texts, targets)
    expected = np.concatenate([row[:size] for row, size in zip(losses, sizes, strict=True)]).mean()
    assert sizes.sum() == rows["inputs"].size  # they are full
    assert summary["held_out_loss"] == pytest.approx(expected, rel=1e-5)
    assert {f"weight_norm/layer{i}" for i in range(2)} <= summary.keys()
    assert summary["weight_norm/layer1"] == pytest.approx(1, rel=1e-5)  # L2


def test_pieces_may_be_shorter_than_the_rows_of_training(config):
    task = make_task(
        config,
        {"max_length": 32, "num_layers": 1},
        length=32,
        eval_length=8,
        logits_parts=16,
        eval_yarn_factors=(1.0,),
    )
    assert task.buckets == (1, 2, 4, 8)
    params = large(task.init(jax.random.key(1))[0])
    batch = task.eval_batch(None, jnp.int32(0))
    assert batch["pieces"].shape == (2, 9) and batch["rows"]["inputs"].shape == (4, 32)
    means = jax.jit(lambda params: task.evaluate(params, {}, batch, attention()))(params)
    summary = task.summarize(means)
    pieces = np.asarray(batch["pieces"])
    losses = losses_alone(task, params, pieces[:, :-1], pieces[:, 1:])
    for bucket in task.buckets:
        expected = losses[:, bucket // 2 : bucket].mean()
        assert float(summary[f"loss/{bucket}"]) == pytest.approx(expected, rel=1e-5)


def test_what_is_evaluated_is_held_out(config, corpus):
    task = make_task(config)
    train, held_out = ("\n".join(side.values()) for side in split_corpus(load_corpus(corpus), 0.4))
    for index in range(2):
        for piece in np.asarray(task.eval_batch(None, jnp.int32(index))["pieces"]):
            text = bytes(piece[1:].astype(np.uint8)).decode()
            assert text in held_out and text not in train
    for text, size in zip(*documents_of(task.host_batches(task.stages[0], 0, 1)[0])[::2], strict=True):
        assert bytes(text[:size][text[:size] < 256].astype(np.uint8)).decode() in train
    facts = task.prepare([])
    assert "held out" in facts and "unigram entropy" in facts and f"4 pieces of {EVAL_LENGTH}" in facts


def test_learned_normaliser_gives_each_head_its_own(config):
    task = make_task(config, learned_normalizer="sink(b=1)")
    params = task.init(jax.random.key(0))[0]
    np.testing.assert_array_equal(params["blocks"]["attention"]["learned"]["b"], np.ones((2, 2)))
    batch = task.host_batches(task.stages[0], 0, 1)[0]
    gradient, _ = jax.jit(jax.grad(lambda p: task.loss(p, {}, batch, attention("softmax")), has_aux=True))(
        params
    )
    assert np.all(np.asarray(gradient["blocks"]["attention"]["learned"]["b"]) != 0)
    task.prepare(make_groups(("sink(b=1)",), (0,))[0].members)
    with pytest.raises(ConfigError, match="normalizers must be the one that is learned, 'sink.*', got 'l2'"):
        task.prepare(make_groups(("l2",), (0,))[0].members)


def test_rescale_by_the_root_of_the_number_of_keys(config):
    task = make_task(config, output_rescale="sqrt_position")
    positions = np.array([[0, 1, 2, 0]])
    attention_fn = task._attention_fn(
        lambda query, key, value, **_: value, {"segment_ids": None, "positions": positions}
    )
    ones = jnp.ones((1, 4, 2, 3))
    np.testing.assert_allclose(attention_fn(ones, ones, ones)[0, :, 1, 2], np.sqrt([1, 2, 3, 1]), rtol=1e-6)


@pytest.mark.parametrize(
    "model",
    [{}, {"mlp": "swiglu", "num_key_value_heads": 1, "head_gate": True, "tie_embeddings": False}],
    ids=["plain", "all"],
)
def test_flops_are_six_for_each_weight_and_token_and_those_of_attention(config, model):
    task = make_task(config, model)
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    if "head" in params:
        del params["token_embedding"]  # a look-up
    num_params = sum(x.size for x in jax.tree.leaves(params))
    gains = 2 * 2 * 16 + 16
    # Each of T queries sees (T + 1)/2 keys: two products of 16 features, forward and twice backward.
    attended = 4 * LENGTH * 2 * 16 * (LENGTH + 1) / 2 * 2 * 2 * 3
    assert task.flops_per_step(task.stages[0]) == 6 * (num_params - gains) * 4 * LENGTH + attended


# A run.


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A finished run of two models."""
    config = get_config("runlocal,normalizer=l2").to_dict()
    config["ensemble"]["seeds"] = (3, 4)
    config["ema_decay"] = 0.9
    config["lm"] |= {"corpus": str(corpus), "held_out": 0.4}
    workdir = tmp_path_factory.mktemp("lm") / "run"
    assert loop.run(config, workdir)
    return workdir


def test_run_learns_and_reports_by_position(run):
    evaluation = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    with open(run / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 7 and {row["step"] for row in rows} == {"8"}
    for row in rows:
        assert float(row["loss"]) == evaluation[f"loss/{row['bucket']}/l2/seed{row['seed']}"]
    assert float(rows[0]["unigram_entropy"]) < math.log(10)
    losses = [json.loads(line)["loss/l2/seed3"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(math.log(257), rel=0.02) and losses[-1] < losses[0] - 0.3
    assert (run / "loss_by_position.png").read_bytes().startswith(b"\x89PNG")
    curves, training = read_runs([run])
    assert curves.trained_length == LENGTH and {row["seed"] for row in training} == {3, 4}


def test_a_text_that_has_changed_is_noticed_before_anything_is_written(run, corpus, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run, workdir)
    shutil.rmtree(workdir / "checkpoints" / "8")
    config = json.loads((workdir / "config.json").read_text())
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    text = (corpus / "07.txt").read_text()
    try:
        (corpus / "07.txt").write_text(text + " more")
        with pytest.raises(WorkdirError, match="was started with other data: .*now .*Restore the data"):
            loop.run(config, workdir)
    finally:
        (corpus / "07.txt").write_text(text)
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before
    assert loop.run(config, workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss/l2/seed3"] for row in rows] == [row["loss/l2/seed3"] for row in whole]


def test_model_of_a_run_is_measured_as_it_was_trained(run):
    """From the logits, values and input of a layer follows the input of the next."""
    source = sources.load(f"{run}@l2/seed4")
    assert (source.max_length, source.vocab_size) == (EVAL_LENGTH, 257)
    tokens = source.example_tokens(40, 2)[1]
    assert tokens[0] == 256 and set(bytes(tokens[1:].astype(np.uint8))) <= set(b"abcdefgh ")
    np.testing.assert_array_equal(source.tokenize("abc"), [97, 98, 99])
    table = _restored(run, ("ema",))[0][0]["token_embedding"]["embedding"][1]  # what the run evaluated
    first, second = sources.attentions(source, tokens)
    np.testing.assert_array_equal(first.inputs["embedding"], table[tokens])
    logits = np.where(np.tri(40, dtype=bool), np.asarray(first.logits, np.float64), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= np.linalg.norm(weights, axis=-1, keepdims=True)
    heads = np.moveaxis(weights @ np.asarray(first.values, np.float64), 0, 1).reshape(40, -1)
    block = jax.tree.map(lambda x: x[0], source.blocks)
    x = first.inputs["layer_input"] + block.attention.project(jnp.asarray(heads, jnp.float32))
    np.testing.assert_allclose(second.inputs["layer_input"], x + block.mlp(block.mlp_norm(x)), atol=1e-5)


# Bad input.


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"corpus": "nowhere"}, {}, "config.lm: corpus must be one of .*, or a file or folder, got nowhere"),
        ({"corpus": "tfds:lm1b"}, {}, "config.lm: corpus must name a split, such as tfds:lm1b:train"),
        ({"tokenizer": "nowhere"}, {}, "config.lm: nowhere has no tokenizer"),
        (
            {},
            {"vocab_size": 256},
            "config.lm: model.vocab_size must be at least that of the tokenizer, 257, got",
        ),
        (
            {"eval_length": 2048},
            {},
            "config.lm: 4 pieces of 2,048 tokens are needed, but .* have 0; the longest document has",
        ),
        ({"batch_size": 200}, {}, "config.lm: held_out must leave at least 400 full rows"),
    ],
)
def test_data_that_does_not_do_is_named_before_anything_is_written(config, tmp_path, changes, model, message):
    config["lm"] |= changes
    config["lm"]["model"] |= model
    if changes.get("tokenizer"):
        pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match=message):
        loop.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"x", "the document 'a.txt' must have at least 2 tokens, got 1"),
        (b"caf\xe9 au lait", "a.txt is not UTF-8"),
    ],
)
def test_texts_that_do_not_do_are_named_before_anything_is_written(config, tmp_path, text, message):
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (tmp_path / name).write_bytes(text if name == "a.txt" else b"text " * 100)
    config["lm"]["corpus"] = str(tmp_path)
    with pytest.raises(ConfigError, match=message):
        loop.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"batch_size": 0}, {}, "lm.batch_size must be a whole number > 0, less than 2.31, got 0"),
        (
            {"eval_length": 96},
            {},
            "lm.eval_length must be a power of two, and a multiple or a divisor of length = 16, got 96",
        ),
        (
            {"length": 48, "eval_length": 32},
            {},
            "lm.eval_length must be a power of two, and a multiple or a divisor of length = 48, got 32",
        ),
        (
            {"length": 128, "eval_yarn_factors": (1.0,)},
            {"position": "learned", "max_length": 64},
            "lm.model.max_length must be at least 128 tokens, got 64",
        ),
        ({"logits_parts": 3}, {}, "lm.logits_parts must be a divisor of length = 16, got 3"),
        ({"held_out": 1.0}, {}, r"lm.held_out must be a number in \(0, 1\), got 1.0"),
        ({"output_rescale": "sqrt"}, {}, "lm.output_rescale must be one of none, sqrt_position, got 'sqrt'"),
        ({"eval_yarn_factors": (1.0, 0.5)}, {}, "lm.eval_yarn_factors must be different numbers >= 1"),
        ({"eval_yarn_factors": (4.0,)}, {"position": "none"}, "lm.eval_yarn_factors must be .1.0,. unless"),
        (
            {"learned_normalizer": "l2"},
            {},
            "lm.learned_normalizer must be one with parameters to learn, got 'l2'",
        ),
        ({"learned_normalizer": "l3"}, {}, "lm.learned_normalizer: 'l3': normalizer must be one of"),
        ({}, {"max_length": 8}, "lm.model.max_length must be at least 16 tokens, got 8"),
        ({}, {"position": "learned"}, r"lm.eval_yarn_factors must be .1.0,. unless"),
        ({}, {"features": 17}, "lm.model.features must be a multiple of num_heads = 2"),
        ({}, {"norm": "batch"}, "lm.model.norm must be one of layer, rms, got 'batch'"),
        ({}, {"colour": 1}, "lm.model: unknown key 'colour'"),
    ],
)
def test_configs_that_contradict_themselves(config, changes, model, message):
    with pytest.raises(ConfigError, match=f"config.{message}"):
        make_task(config, model, **changes)


@pytest.mark.slow
def test_memory_of_a_long_evaluation_is_not_that_of_its_logits(config, tmp_path):
    """Neither T x T of attention, nor T x V of predictions with a large vocabulary."""
    length, vocab_size = 4096, 20_000
    (tmp_path / "a.txt").write_text("words and words " * 5000)
    task = make_task(
        config,
        {"vocab_size": vocab_size, "max_length": 64},
        corpus=str(tmp_path),
        length=64,
        eval_length=length,
        eval_batch_size=1,
        logits_parts=4,
        eval_yarn_factors=(1.0,),
    )
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    batch = task.eval_batch(None, jnp.int32(0))
    compiled = jax.jit(lambda params: task.evaluate(params, {}, batch, attention())).lower(params).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * length * vocab_size / 8
    assert temporary < 4 * length * length
