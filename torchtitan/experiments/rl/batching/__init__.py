"""Training samples to packed ``[B, L]`` batches. ``packing.py`` is pure arithmetic on lengths; ``batcher.py`` fills tensors."""
