"""Packs training samples into ``[B, L]`` batches.

``packing.py`` lays rows out; ``batcher.py`` chooses among layouts.
"""
