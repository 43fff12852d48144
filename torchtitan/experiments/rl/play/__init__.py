"""A person as the policy of a task: ``python -m torchtitan.experiments.rl.play --config NAME --task T``."""
