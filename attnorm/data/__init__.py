"""Data: generated tasks, texts and tokenisers."""
