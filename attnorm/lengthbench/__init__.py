"""Which normaliser, for what, how far: ``python -m attnorm.lengthbench`` trains and evaluates a grid of cells."""
