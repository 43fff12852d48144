"""Runs a config's loops in virtual time, with simulated engines, trainer, hosts and envs."""
