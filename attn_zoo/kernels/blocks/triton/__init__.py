"""The Triton path: our own kernels on a GPU, forward and backward."""
