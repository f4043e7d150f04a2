"""Max retrieval: the class of the item with the largest priority."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from attnorm.data.questions import Questions, sizes


def max_retrieval_batch(
    key: PRNGKeyArray,
    batch_size: int,
    length: int,
    *,
    num_classes: int = 10,
    shortest: int | None = None,
) -> Questions:
    """Items of a uniform class and a priority uniform in [0, 1], then a query: which class has the largest priority?

    Args:
      key: the same key gives the same batch.
      batch_size, length: B, and the largest number of items; T = length + 1.
      num_classes: C. Inputs are mixtures of C + 2 tokens: the classes, one whose amount is the priority, the query.
      shortest: where given, the number of items is uniform in ``shortest..length``. What follows the query is more
        of the same, which a causal model does not see.

    Raises:
      ValueError: numbers of items that are not in order, or below 1.

    Source: "softmax is not enough", arXiv 2410.01104; there items and query are two inputs, here one sequence.

    >>> import jax
    >>> from attnorm.data.max_retrieval import max_retrieval_batch
    >>> questions = max_retrieval_batch(jax.random.key(0), batch_size=2, length=4)
    >>> questions.inputs.shape, questions.is_asked[0].tolist()
    ((2, 5, 12), [False, False, False, False, True])
    """
    size_key, class_key, priority_key = jax.random.split(key, 3)
    size = sizes(size_key, batch_size, length, shortest)
    shape = (batch_size, length + 1)
    classes = jax.random.randint(class_key, shape, 0, num_classes)
    priorities = jax.random.uniform(priority_key, shape)

    position = jnp.arange(length + 1)
    is_asked = position == size[:, None]
    largest = jnp.argmax(jnp.where(position < size[:, None], priorities, -1), axis=1)[:, None]
    answers = jnp.take_along_axis(classes, largest, axis=1)
    items = jnp.concatenate([jax.nn.one_hot(classes, num_classes), priorities[..., None]], axis=-1)
    items = jnp.pad(jnp.where(is_asked[..., None], 0, items), ((0, 0), (0, 0), (0, 1)))
    return Questions(
        inputs=items.at[..., -1].set(is_asked.astype(items.dtype)),
        answers=jnp.where(is_asked, answers, 0),
        is_asked=is_asked,
        source=jnp.where(is_asked, largest, -1),
    )


def max_retrieval_chance(num_classes: int = 10) -> float:
    """The accuracy of a guess that does not look at the items."""
    return 1 / num_classes
