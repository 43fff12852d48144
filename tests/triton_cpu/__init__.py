"""Backend by which Triton has a driver for CPUs, in processes whose kernels it interprets.

Triton finds it by the entry point in metadata/, where that folder is on the module path. It compiles nothing.
"""
