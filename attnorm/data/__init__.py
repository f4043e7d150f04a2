"""Data: generated tasks."""
