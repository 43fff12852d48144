"""Training samples to packed ``[B, L]`` batches. ``packing.py`` lays rows out; ``batcher.py`` chooses among layouts."""
