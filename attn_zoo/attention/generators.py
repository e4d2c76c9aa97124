"""Torch's global random generators, of the CPU and of CUDA devices."""

from __future__ import annotations

import torch


def seed_generators(seed: int) -> None:
    """Do what `torch.manual_seed` does for these devices, without the rest of it.

    For each kind of accelerator that is not in use it writes down the stack of its caller, every time, and keeps it:
    that takes longer than the call of a small model.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
