"""flax.nnx models. They take an attention function and know nothing of how it computes."""
