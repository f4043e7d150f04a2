"""Models that train.py trained as sources, from their workdir."""

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from attnorm.analysis.sources.model import ModelSource
from attnorm.data.corpus import open_corpus, pieces
from attnorm.data.counting import counting_batch
from attnorm.data.tokenizers import open_tokenizer
from attnorm.models.counting import CountingTransformer
from attnorm.models.gpt import GPT, GPTConfig
from attnorm.modules import NormalizerFamily
from attnorm.normalizers import get_normalizer
from attnorm.normalizers.spec import parse_normalizer, with_array_parameters
from attnorm.output_norms import rescale_sqrt_position

_CONFIG, _CHECKPOINTS = "config.json", "checkpoints"


class WorkdirError(ValueError):
    """A folder that is not the workdir of a run, or holds no model of that name."""


def is_workdir(path: Path) -> bool:
    return (path / _CONFIG).is_file() and (path / _CHECKPOINTS).is_dir()


def trained_source(workdir: Path, member: str = "") -> ModelSource:
    """A model of a run of train.py, at its newest checkpoint.

    Args:
      workdir: of the run.
      member: which one of the models of the run, such as ``"lp(p=2)/seed0"``; may be left out where there is one.

    Raises:
      WorkdirError: no workdir, no complete checkpoint, no such member, or a task without attention to measure.
    """
    if not is_workdir(workdir):
        raise WorkdirError(f"{workdir} is no workdir of train.py: {_CONFIG} or {_CHECKPOINTS} is missing")
    try:
        config = json.loads((workdir / _CONFIG).read_text(encoding="utf-8"))
        task, ensemble = config["task"], config["ensemble"]
        specs, seeds = ensemble["normalizers"], ensemble["seeds"]
        is_known = task in _SOURCES
    except (KeyError, TypeError, ValueError) as error:
        raise WorkdirError(f"{workdir / _CONFIG} is not the config of a run: {error!r}") from error
    if not is_known:
        raise WorkdirError(f"{workdir} holds a run of the task {task!r}; known are {', '.join(_SOURCES)}")
    places = _places(specs, seeds)
    if member not in places and (member or len(places) > 1):
        raise WorkdirError(
            f"{workdir} holds the models {', '.join(places)}; choose one as {workdir}@{next(iter(places))}, "
            f"got {member!r}"
        )
    member = member or next(iter(places))
    group, index = places[member]
    # Where parameters are averaged, the average is what the run evaluates.
    names = ("ema" if config.get("ema_decay") else "params", "model_state")
    params, model_state = (
        jax.tree.map(lambda x: jnp.asarray(x[index]), tree[group]) for tree in _restored(workdir, names)
    )
    name, normalizer_params = parse_normalizer(member.rpartition("/seed")[0])
    return _SOURCES[task](
        f"{workdir.name}@{member}",
        config[task],
        get_normalizer(name, **normalizer_params),
        params,
        model_state,
    )


def _places(specs: list[str], seeds: list[int]) -> Mapping[str, tuple[int, int]]:
    """The group of each member and its index there: normalisers of one structure are trained as one group."""
    groups: dict[Hashable, list[str]] = {}
    for spec in specs:
        structure = jax.tree.structure(with_array_parameters(*parse_normalizer(spec)))
        groups.setdefault(structure, []).extend(f"{spec}/seed{seed}" for seed in seeds)
    return {
        label: (group, index)
        for group, labels in enumerate(groups.values())
        for index, label in enumerate(labels)
    }


def _restored(workdir: Path, names: tuple[str, ...]) -> tuple[list[Any], ...]:
    """These parts of a run's state, of all groups, on this machine wherever they were trained."""
    manager = ocp.CheckpointManager(
        (workdir / _CHECKPOINTS).absolute(),
        options=ocp.CheckpointManagerOptions(read_only=True),
        item_handlers=ocp.PyTreeCheckpointHandler(),
    )
    step = manager.latest_step()
    if step is None:
        raise WorkdirError(f"{workdir} holds no complete checkpoint")
    saved = manager.item_metadata(step).tree
    wanted = {name: saved[name] for name in names}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
    restored = manager.restore(
        step, args=ocp.args.PyTreeRestore(item=wanted, restore_args=as_numpy, partial_restore=True)
    )
    return tuple(restored[name] for name in names)


def _counting(name, config, normalizer, params, model_state):
    vocab_size = config["vocab_size"]

    def make():
        return CountingTransformer(vocab_size, **config["model"], rngs=nnx.Rngs(0))

    graph, *states = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    filled = (_filled(nnx.to_pure_dict(s), t) for s, t in zip(states, (params, model_state), strict=True))
    model = nnx.merge(graph, *(nnx.State(state) for state in filled))
    model.eval()
    block_graph, first = nnx.split(model.blocks[0])
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), first, *(nnx.state(block) for block in model.blocks[1:])
    )

    def tokenize(text):
        raise ValueError(f"{name} counts symbols and reads no text: leave the text out")

    return ModelSource(
        name=name,
        max_length=config["eval_length"],
        vocab_size=vocab_size,
        is_causal=True,
        normalizer=normalizer,
        tokenize=tokenize,
        example_tokens=lambda length, count: np.asarray(
            counting_batch(jax.random.key(0), count, length, vocab_size)[0]
        ),
        blocks=nnx.merge(block_graph, stacked),
        num_layers=len(model.blocks),
        embed=lambda tokens: (model.token_embedding(tokens), model.embed(tokens)),
        apply=lambda block, x, attention_fn: block(x, attention_fn),
    )


def _lm(name, config, normalizer, params, model_state):
    tokenizer = open_tokenizer(config["tokenizer"])
    end_of_document = tokenizer.end_of_document
    spec = config["learned_normalizer"]
    family = NormalizerFamily.of(*parse_normalizer(spec), None) if spec else None
    starts = {} if family is None else {key: learned.start() for key, learned in family.learned}
    graph, state = nnx.split(
        nnx.eval_shape(lambda: GPT(GPTConfig(**config["model"]), learned=starts, rngs=nnx.Rngs(0)))
    )
    model = nnx.merge(graph, nnx.State(_filled(nnx.to_pure_dict(state), params)))

    def positions_of(x):
        return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])

    def embed(tokens):
        return model.token_embedding(tokens), model.embed(tokens, positions_of(tokens))

    def apply(block, x, attention_fn):
        def as_trained(query, key, value, *, learned=None, **options):
            if learned is not None:
                assert family is not None  # else there is nothing to learn
                options["normalizer"] = family.normalizer(learned)
            output = attention_fn(query, key, value, **options)
            if config["output_rescale"] == "sqrt_position":
                output = rescale_sqrt_position(output, positions_of(x)[..., None, None] + 1)
            return output

        return block(x, as_trained, positions_of(x))

    def example_tokens(length, count):
        held_out = open_corpus(config["corpus"], tokenizer, config["held_out"]).held_out
        return pieces(held_out, length, count, end_of_document)[:, :-1]

    return ModelSource(
        name=name,
        max_length=config["eval_length"],
        vocab_size=model.config.vocab_size,
        is_causal=True,
        normalizer=normalizer,
        tokenize=tokenizer.encode,
        example_tokens=example_tokens,
        blocks=model.blocks,
        num_layers=model.config.num_layers,
        embed=embed,
        apply=apply,
    )


def _filled(wanted: Any, saved: Any) -> Any:
    """The saved arrays in the nesting that the model has: checkpoints spell the numbers of layers as text."""
    if not isinstance(wanted, Mapping):
        return saved
    return {key: _filled(wanted[key], saved[str(key)]) for key in wanted}


_SOURCES = {"counting": _counting, "lm": _lm}
