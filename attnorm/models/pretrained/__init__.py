"""Models that others trained, read from Hugging Face checkpoints into our own modules."""

from attnorm.models.pretrained.bert import load_bert
from attnorm.models.pretrained.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from attnorm.models.pretrained.gpt2 import load_gpt2

__all__ = ["Checkpoint", "CheckpointError", "load_bert", "load_gpt2", "open_checkpoint"]
