"""Fast computations that several variants share. Tensors in, tensors out."""
