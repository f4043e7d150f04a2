"""What is compared: a normaliser, or a normaliser under a control, as the command line spells it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm import output_norms
from attnorm.normalizers import Normalizer, get_normalizer
from attnorm.normalizers.learned import Learned
from attnorm.normalizers.registry import learned_parameters
from attnorm.normalizers.spec import parse_normalizer, with_array_parameters
from attnorm.training.task import Attention

Output = Float[Array, "B T N H"]


def _rescale_sqrt_position(output: Output) -> Output:
    return output_norms.rescale_sqrt_position(output, 1 + jnp.arange(output.shape[1])[:, None, None])


# What is done to the output of causal attention. With the eps of the source, a head_rms of L_p is one of softmax.
_OUTPUTS: Mapping[str, Callable[[Output], Output]] = {
    "sqrt_position": _rescale_sqrt_position,
    "head_rms": functools.partial(output_norms.head_rms, eps=1e-6),
    "head_layer": functools.partial(output_norms.head_layer, eps=1e-5),
    "global_layer": functools.partial(output_norms.global_layer, eps=1e-5),
}
CONTROLS = (*_OUTPUTS, "temperature", "learned")
# How far a parameter goes while a weight goes by 1. With Adam, a number moves by about its learning rate at each
# update, in a whole run by the rate's sum, about 1: too little for p, or a bias, to leave where it started.
_LEARNED_SPEED = 10.0
# Names of L_p softmaxes. As such they share programs, and can be given a temperature.
_P_OF = {"softmax": "1", "l2": "2"}


@dataclasses.dataclass(frozen=True)
class Contender:
    """Normalisers of one structure, of which the best at the training length stands for the contender.

    Args:
      name: as the command line spells it.
      specs: the normalisers.
      output: what is done to the output of attention, a control; "" for nothing.
      learned: parameters that each head of each layer learns, and where they start.
    """

    name: str
    specs: tuple[str, ...]
    output: str = ""
    learned: tuple[tuple[str, Learned], ...] = ()

    def normalizers(self) -> list[Normalizer]:
        return [with_array_parameters(*parse_normalizer(_as_lp(spec))) for spec in self.specs]

    @property
    def structure(self) -> Hashable:
        """Contenders of one structure can share all programs of a task."""
        return (
            self.output,
            self.learned,
            self.learned and self.specs,
            jax.tree.structure(self.normalizers()[0]),
        )

    def initial_parameters(self, num_layers: int, num_heads: int) -> dict[str, Float[Array, "layers N"]]:
        """How far each learned parameter is from where it starts, which is what is trained: not at all."""
        return {name: jnp.zeros((num_layers, num_heads), jnp.float32) for name, _ in self.learned}

    def learned_values(self, parameters: Mapping[str, Float[Array, "..."]]) -> dict[str, Float[Array, "..."]]:
        """The learned parameters themselves.

        >>> from attnorm.lengthbench.contenders import parse_contender
        >>> contender = parse_contender("lp(p=3)@learned", ())
        >>> print(contender.learned_values(contender.initial_parameters(1, 2))["p"])
        [[3. 3.]]
        """
        return {
            name: learned.value(learned.start() + _LEARNED_SPEED * parameters[name])
            for name, learned in self.learned
        }

    def attend(
        self,
        attention: Attention,
        parameters: Mapping[str, Float[Array, "layers N"]],
        tap: Callable[[Output], None] | None = None,
    ) -> Attention:
        """What the model calls, once a layer and in their order; ``tap`` is shown every output."""
        layers = itertools.count()
        act = _OUTPUTS.get(self.output, lambda output: output)

        def attend(query, key, value, *, is_causal=True, **options):
            layer = next(layers)
            if self.learned:
                options["normalizer"] = self._learned_normalizer({k: x[layer] for k, x in parameters.items()})
            output = act(attention(query, key, value, is_causal=is_causal, **options))
            if tap is not None:
                tap(output)
            return output

        return attend

    def _learned_normalizer(self, parameters):
        name, fixed = parse_normalizer(self.specs[0])
        return get_normalizer(name, **(fixed | self.learned_values(parameters)))


def parse_contender(name: str, temperatures: tuple[float, ...]) -> Contender:
    """The contender of ``"l2"``, ``"lp(p=4)"``, ``"softmax@sqrt_position"``, ``"lp@learned"`` and so on.

    Args:
      name: a normaliser, with its parameters, and after an @ one of :data:`CONTROLS`: ``sqrt_position``,
        ``head_rms``, ``head_layer`` and ``global_layer`` act on the output of attention; ``temperature`` divides
        the logits of softmax, l2 or lp by the best of the temperatures; ``learned`` learns all parameters that can
        be.
      temperatures: to choose from.

    Raises:
      ValueError, TypeError: another form, or what :func:`attnorm.get_normalizer` refuses.

    >>> from attnorm.lengthbench.contenders import parse_contender
    >>> parse_contender("softmax@temperature", (0.5, 2.0)).specs
    ('general(F=exp, p=1, T=0.5)', 'general(F=exp, p=1, T=2)')
    """
    spec, has_control, control = name.partition("@")
    normalizer, params = parse_normalizer(spec)
    if not has_control:
        return Contender(name, (spec,))
    if control in _OUTPUTS:
        return Contender(name, (spec,), output=control)
    if control == "temperature":
        p = f"{params.get('p', 2):g}" if normalizer == "lp" else _P_OF.get(normalizer)
        if p is None:
            raise ValueError(f"temperature is for softmax, l2 and lp, got {spec!r}")
        return Contender(name, tuple(f"general(F=exp, p={p}, T={T:g})" for T in temperatures))
    if control == "learned":
        return Contender(name, (spec,), learned=_learned(normalizer, params))
    raise ValueError(f"after the @ must stand one of {', '.join(CONTROLS)}, got {name!r}")


def _as_lp(spec):
    return f"lp(p={_P_OF[spec]})" if spec in _P_OF else spec


def _learned(normalizer, params):
    learned = learned_parameters(normalizer, **params)
    if not learned:
        raise ValueError(f"{normalizer} has no parameter that can be learned")
    return tuple(
        (name, dataclasses.replace(start, init=params[name]) if name in params else start)
        for name, start in learned.items()
    )
