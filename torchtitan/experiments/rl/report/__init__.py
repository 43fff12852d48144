"""Serves pages about runs, from their folders: ``python -m torchtitan.experiments.rl.report RUN...``."""
