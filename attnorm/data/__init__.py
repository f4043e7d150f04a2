"""Data: generated tasks, texts, tokenisers, and packed batches of them."""
