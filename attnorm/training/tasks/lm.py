"""Language models as a training task: packed texts, and the loss by position beyond the trained length."""

import contextlib
import csv
import dataclasses
import functools
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from attnorm import output_norms
from attnorm.analysis import extrapolation
from attnorm.data.corpus import Corpus, open_corpus, pieces, unigram_entropy
from attnorm.data.packing import PackedRows
from attnorm.data.pipeline import batches
from attnorm.data.tokenizers import Tokenizer, open_tokenizer
from attnorm.models.diagnostics import attention_diagnostics
from attnorm.models.gpt import GPT, GPTConfig
from attnorm.modules import NormalizerFamily
from attnorm.normalizers.spec import parse_normalizer
from attnorm.training.config import INT32_END, ConfigError, require
from attnorm.training.ensemble import Member
from attnorm.training.task import Stage
from attnorm.training.workdir import write_atomically

RESULTS = extrapolation.RESULTS
FIGURE = "loss_by_position.png"
OUTPUT_RESCALES = ("none", "sqrt_position")

# Attention's weights are looked at on texts of at most this length: they take O(T^2) memory.
_DIAGNOSED_LENGTH = 256


@dataclasses.dataclass(frozen=True)
class LMConfig:
    corpus: str  # as attnorm.data.corpus.open_corpus knows them
    tokenizer: str  # "bytes", or a folder with a tokenizer.json
    held_out: float  # part of the documents
    data_seed: int  # of the order of rows, which all members see alike
    length: int  # of a row
    batch_size: int  # rows, of all devices together
    num_steps: int
    eval_length: int  # of pieces of held-out documents; a power of two
    eval_batch_size: int  # pieces
    num_eval_batches: int
    eval_yarn_factors: tuple[float, ...]  # each is evaluated; 1 is the model as trained
    output_rescale: str  # "sqrt_position": attention's output times the root of the number of keys; or "none"
    learned_normalizer: str  # the members', if every head learns its parameters; "" if not
    logits_parts: int  # of a row: the logits of one part at a time are in memory
    model: GPTConfig

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type is int and field.name != "data_seed":
                value = getattr(self, field.name)
                require(0 < value < INT32_END, field.name, value, "a whole number > 0, less than 2^31")
        require(0 <= self.data_seed < INT32_END, "data_seed", self.data_seed, "a number from 0 to 2^31 - 1")
        require(0 < self.held_out < 1, "held_out", self.held_out, "a number in (0, 1)")
        require(
            self.eval_length.bit_count() == 1
            and 0 in (self.eval_length % self.length, self.length % self.eval_length),
            "eval_length",
            self.eval_length,
            f"a power of two, and a multiple or a divisor of length = {self.length}",
        )
        require(
            self.length % self.logits_parts == 0,
            "logits_parts",
            self.logits_parts,
            f"a divisor of length = {self.length}",
        )
        require(
            self.output_rescale in OUTPUT_RESCALES,
            "output_rescale",
            self.output_rescale,
            f"one of {', '.join(OUTPUT_RESCALES)}",
        )
        model, factors = self.model, self.eval_yarn_factors
        require(
            len(factors) > 0
            and len(set(factors)) == len(factors)
            and all(1 <= factor < math.inf for factor in factors),
            "eval_yarn_factors",
            factors,
            "different numbers >= 1, at least one",
        )
        require(
            factors == (1.0,) or (model.position == "rope" and model.rope_scaling == "none"),
            "eval_yarn_factors",
            factors,
            "(1.0,) unless model.position is rope and model.rope_scaling none",
        )
        longest = max(self.length, self.eval_length if model.position == "learned" else 0)
        require(
            model.max_length >= longest, "model.max_length", model.max_length, f"at least {longest} tokens"
        )
        self.family  # noqa: B018  raises where the normaliser has nothing to learn

    @functools.cached_property
    def family(self) -> NormalizerFamily | None:
        """The normaliser whose parameters are learned."""
        if not self.learned_normalizer:
            return None
        try:
            family = NormalizerFamily.of(*parse_normalizer(self.learned_normalizer), None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"learned_normalizer: {self.learned_normalizer!r}: {error}") from None
        require(
            len(family.learned) > 0,
            "learned_normalizer",
            self.learned_normalizer,
            "one with parameters to learn",
        )
        return family


@dataclasses.dataclass(frozen=True)
class _HeldOut:
    """What is evaluated on; the leading axis is that of evaluation batches."""

    rows: Mapping[str, np.ndarray]  # (M, B, T), packed, of the trained length
    pieces: np.ndarray  # (M, B', T' + 1), each of one document
    unigram_entropy: float


class LMTask:
    """See :class:`attnorm.training.task.Task`."""

    Config = LMConfig
    outputs = (RESULTS, FIGURE)

    def __init__(self, config: LMConfig):
        self.config = config
        self.num_eval_batches = config.num_eval_batches
        self.stages = (Stage(0, 0, config.num_steps, config.length),)
        # Bucket b is the positions [b/2, b); the first is position 0.
        self.buckets = tuple(2**k for k in range(config.eval_length.bit_length()))
        self._graph = self._graph_of(config.model)
        # What differs is no array: every factor takes the same parameters.
        self._eval_graphs = {
            factor: self._graph_of(_with_yarn(config, factor)) for factor in config.eval_yarn_factors
        }

    def _model(self, model: GPTConfig, rngs: nnx.Rngs) -> GPT:
        family = self.config.family
        starts = {} if family is None else {name: learned.start() for name, learned in family.learned}
        return GPT(model, learned=starts, rngs=rngs)

    def _graph_of(self, model):
        return nnx.split(nnx.eval_shape(lambda: self._model(model, nnx.Rngs(0))))[0]

    # The corpus is read when it is asked for first: the shapes of a model need none.

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        config = self.config
        with _explained():
            tokenizer = open_tokenizer(config.tokenizer)
            require(
                config.model.vocab_size >= tokenizer.vocab_size,
                "model.vocab_size",
                config.model.vocab_size,
                f"at least that of the tokenizer, {tokenizer.vocab_size}",
            )
        return tokenizer

    @functools.cached_property
    def _corpus(self) -> Corpus:
        with _explained():
            return open_corpus(self.config.corpus, self._tokenizer, self.config.held_out)

    @functools.cached_property
    def _held_out(self) -> _HeldOut:
        config, stream, end = self.config, self._corpus.held_out, self._tokenizer.end_of_document
        M = config.num_eval_batches
        with _explained():
            long = pieces(stream, config.eval_length, M * config.eval_batch_size, end)
            rows = _spread_rows(PackedRows(stream, config.length, end), M * config.batch_size)
        return _HeldOut(
            rows={name: x.reshape(M, config.batch_size, config.length) for name, x in rows.items()},
            pieces=long.reshape(M, config.eval_batch_size, config.eval_length + 1),
            unigram_entropy=unigram_entropy(stream),
        )

    def prepare(self, members: Sequence[Member]) -> str:
        learned = self.config.learned_normalizer
        others = [member.spec for member in members if learned and member.spec != learned]
        if others:
            raise ConfigError(
                f"config.ensemble.normalizers must be the one that is learned, {learned!r}, got {others[0]!r}"
            )
        held_out = self._held_out
        num_pieces = self.config.num_eval_batches * self.config.eval_batch_size
        return (
            f"{self._corpus.facts}, of unigram entropy {held_out.unigram_entropy:.4f} nats per token; "
            f"evaluated on {num_pieces} pieces of {self.config.eval_length:,} of these tokens"
        )

    @property
    def fingerprint(self) -> str:
        return self._corpus.fingerprint

    def init(self, key):
        model = self._model(self.config.model, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), {}

    def host_batches(self, stage, process_index, process_count):
        return batches(
            PackedRows(self._corpus.train, self.config.length, self._tokenizer.end_of_document),
            self.config.batch_size,
            seed=self.config.data_seed,
            process_index=process_index,
            process_count=process_count,
        )

    def batch(self, key, stage):
        raise NotImplementedError("all batches come from the host")

    def loss(self, params, model_state, batch, attention):
        losses = self._losses(self._graph, params, batch, attention)
        is_filled = batch["segment_ids"] > 0
        total = jnp.sum(jnp.where(is_filled, losses, 0))
        return total, (jnp.sum(is_filled, dtype=jnp.float32), model_state)

    def eval_batch(self, key, index):
        return {
            "rows": {name: jnp.asarray(x)[index] for name, x in self._held_out.rows.items()},
            "pieces": jnp.asarray(self._held_out.pieces)[index],
        }

    def evaluate(self, params, model_state, batch, attention):
        """The loss on packed rows, what attention does there, and the loss by position on long pieces.

        All are means over the batches; so ``max_logit`` is that of the batches' maxima.
        """
        rows = batch["rows"]
        inputs, targets = batch["pieces"][:, :-1], batch["pieces"][:, 1:]
        long = {
            "inputs": inputs,
            "targets": targets,
            "segment_ids": None,
            "positions": jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape),
        }
        by_position = {
            factor: jnp.mean(self._losses(graph, params, long, attention), axis=0)
            for factor, graph in self._eval_graphs.items()
        }
        return {
            "held_out_loss": jnp.mean(self._losses(self._graph, params, rows, attention)),
            "by_position": by_position,
            "attention": self._diagnostics(params, rows, attention),
        }

    def _diagnostics(self, params, rows, attention):
        short = {name: x[:, :_DIAGNOSED_LENGTH] for name, x in rows.items()}
        return attention_diagnostics(
            nnx.merge(self._graph, nnx.State(params)),
            short["inputs"],
            self._attention_fn(attention, short),
            short["positions"],
            short["segment_ids"],
        )

    def summarize(self, means):
        summary = {"held_out_loss": means["held_out_loss"]}
        for factor, losses in means["by_position"].items():
            for bucket in self.buckets:
                summary[_name(factor, bucket)] = jnp.mean(losses[bucket // 2 : bucket])
        for name, by_layer in means["attention"].items():
            for layer in range(self.config.model.num_layers):
                summary[f"{name}/layer{layer}"] = by_layer[layer]
        return summary

    def tokens_per_step(self, stage):
        return self.config.batch_size * self.config.length

    def flops_per_step(self, stage):
        """Operations of matrix products, forward and twice that backward; of attention the causal half.

        Each row counts as one document, recomputation as none.
        """
        model = self.config.model
        width, kv_width = model.num_heads * model.head_size, model.kv_heads * model.head_size
        maps = 2 * width + 2 * kv_width + (3 if model.mlp == "swiglu" else 2) * model.hidden_features
        maps += model.num_heads if model.head_gate else 0
        attention = width * (stage.length + 1)
        per_token = model.num_layers * (model.features * maps + attention) + model.features * model.vocab_size
        return 3 * 2 * per_token * self.tokens_per_step(stage)

    def report(self, workdir: Path, members: Sequence[Member], rows: Sequence[Mapping[str, Any]]) -> str:
        results = [
            {
                **self._variant(member, factor),
                "seed": member.seed,
                "trained_length": row["length"],
                "step": row["step"],
                "bucket": bucket,
                "loss": row[f"{_name(factor, bucket)}/{member.label}"],
                "unigram_entropy": self._held_out.unigram_entropy,
            }
            for row in rows
            for member in members
            for factor in self.config.eval_yarn_factors
            for bucket in self.buckets
        ]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, extrapolation.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)
        write_atomically(workdir / RESULTS, text.getvalue())
        curves = extrapolation.read_results(workdir / RESULTS)
        extrapolation.draw(curves, workdir / FIGURE)
        losses = [row[f"held_out_loss/{member.label}"] for row in rows[-1:] for member in members]
        return (
            f"{extrapolation.table(curves)}\nheld-out loss at the trained length: {min(losses):.4f} to "
            f"{max(losses):.4f} nats per token; unigram entropy: {self._held_out.unigram_entropy:.4f}"
        )

    def _variant(self, member, factor):
        model, config = self.config.model, self.config
        scaling = f"{model.rope_scaling}({model.rope_factor:g})" if model.rope_scaling != "none" else "none"
        eps = f"(eps={model.output_norm_eps:g})" if model.output_norm_eps else ""
        return {
            "normalizer": f"learned {member.spec}" if config.learned_normalizer else member.spec,
            "output_norm": model.output_norm + eps,
            "output_rescale": config.output_rescale,
            "position": model.position,
            "rope_scaling": scaling,
            "eval_rope_scaling": scaling if factor == 1 else f"yarn({factor:g})",
        }

    def _losses(self, graph, params, batch, attention):
        """The loss of each target (B, T)."""
        model = nnx.merge(graph, nnx.State(params))
        hidden = model.hidden(batch["inputs"], self._attention_fn(attention, batch), batch["positions"])
        parts, length, T = self.config.logits_parts, self.config.length, batch["inputs"].shape[1]
        # Of what is longer than a row, parts as large as those of a row; of what is shorter, no larger ones.
        parts = parts * T // length if T >= length else math.gcd(parts, T)
        return _token_losses(model, hidden, batch["targets"], parts)

    def _attention_fn(self, attention, batch):
        family = self.config.family

        def attention_fn(query, key, value, *, learned=None, **options):
            if learned is not None:
                assert family is not None  # else there is nothing to learn
                options["normalizer"] = family.normalizer(learned)
            segment_ids = batch["segment_ids"]
            output = attention(
                query,
                key,
                value,
                is_causal=True,
                query_segment_ids=segment_ids,
                key_value_segment_ids=segment_ids,
                **options,
            )
            if self.config.output_rescale == "sqrt_position":
                num_keys = batch["positions"] + 1
                output = output_norms.rescale_sqrt_position(output, num_keys[..., None, None])
            return output

        return attention_fn


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Errors of texts and tokenisers as errors of the config that names them."""
    try:
        yield
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(f"config.lm: {error}") from error


def _token_losses(model, hidden_BxTxD, targets_BxT, parts):
    """The loss of each target (B, T), with the logits of one part of the positions at a time in memory."""

    def losses_of(part):
        hidden, targets = part
        return optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)

    if parts == 1:
        return losses_of((hidden_BxTxD, targets_BxT))
    # A part is every parts-th position, so that a length that is split over devices stays split.
    split = [
        jnp.moveaxis(x.reshape(x.shape[0], -1, parts, *x.shape[2:]), 2, 0)
        for x in (hidden_BxTxD, targets_BxT)
    ]
    losses_PxBxt = jax.lax.map(jax.checkpoint(losses_of), tuple(split))
    return jnp.moveaxis(losses_PxBxt, 0, 2).reshape(targets_BxT.shape)


def _spread_rows(rows: PackedRows, count: int) -> Mapping[str, np.ndarray]:
    """So many rows, from all over the stream; all of them full."""
    num_full = len(rows) - 1  # the last may be short
    if num_full < count:
        raise ValueError(
            f"held_out must leave at least {count} full rows to evaluate on, got {max(num_full, 0)}"
        )
    chosen = [rows[i * num_full // count] for i in range(count)]
    return jax.tree.map(lambda *of_rows: np.stack(of_rows), *chosen)


def _with_yarn(config: LMConfig, factor: float) -> GPTConfig:
    if factor == 1:
        return config.model
    return dataclasses.replace(
        config.model, rope_scaling="yarn", rope_factor=factor, rope_original_length=config.length
    )


def _name(factor: float, bucket: int) -> str:
    return f"loss/{bucket}" if factor == 1 else f"loss_yarn{factor:g}/{bucket}"
