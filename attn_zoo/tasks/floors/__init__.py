"""Trivial models, whose scores every result is read beside."""
