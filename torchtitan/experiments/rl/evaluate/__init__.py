"""Measures a policy on its tasks, without training: ``python -m torchtitan.experiments.rl.evaluate``."""
