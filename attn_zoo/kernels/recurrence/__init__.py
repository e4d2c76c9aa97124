"""Kernels of linear recurrences: sums over a sequence, taken chunk by chunk."""
