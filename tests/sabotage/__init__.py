"""Spoils deliveries of weights: `kinds.py` has the ways, `world.py` an engine with the checks, `__main__.py` runs them."""
