"""Engines, and the ways to reach them.

The replicas that sample with the policy, their client, and other models that a run asks.
"""
