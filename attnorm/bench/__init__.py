"""Speed and memory of attention, measured side by side: ``python -m attnorm.bench --help``."""
