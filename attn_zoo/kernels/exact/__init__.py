"""Exact softmax attention: which kernels exist, which one serves a call, and how it is called."""
