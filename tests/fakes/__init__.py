"""Fakes that the tests share, in modules named after what they stand in for."""
