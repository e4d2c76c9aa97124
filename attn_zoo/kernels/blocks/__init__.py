"""Block-sparse attention: patterns of blocks, and the paths that compute softmax attention under them."""
