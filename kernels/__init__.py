"""Kernels, one op a file, installed as ``zlm.kernels``: Triton, and C for the CPU (``cpu_*.c``).

Flat: no sub-packages.
"""
