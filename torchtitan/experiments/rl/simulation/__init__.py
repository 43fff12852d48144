"""The real controller in virtual time, with simulated engines, trainer, hosts and envs. docs/scale.md."""
