"""Kernels and programs of the cuda targets, interpreted and compiled without a GPU."""
