"""Compression of a sequence to a few rows, by a learned matrix or over windows."""
