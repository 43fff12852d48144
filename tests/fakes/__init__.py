"""Fakes that the tests share: stand-ins for the policy, envs, tasks, engines, trainers, devices and terminals of a run."""
