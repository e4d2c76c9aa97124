"""The same initialisation for every variant, weight by weight.

Each weight draws from a generator of its own, seeded by the model's seed and the weight's name. So two models that
differ in the variant only start from identical embeddings, projections, feed-forward networks and heads, and a paired
comparison over seeds compares variants, not draws.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from attn_zoo.attention.contract import AbstractAttention
from attn_zoo.attention.generators import seed_generators


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Build a model under its own seed, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        yield


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw the weights of the backbone.

    Linear maps are Xavier-uniform (Glorot and Bengio 2010) with zero bias, embeddings normal with variance 1 / E. What
    a variant has inside its attention keeps the initialisation of its paper; a mixer of its own keeps its bare
    parameters.

    Args:
        model: on CPU.
        seed: of the run.
    """
    inside = {
        id(part) for module in model.modules() if isinstance(module, AbstractAttention) for part in module.modules()
    }
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, nn.Linear):
            bound = math.sqrt(6.0 / (module.in_features + module.out_features))
            module.weight.uniform_(-bound, bound, generator=_generator(seed, name))
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, module.embedding_dim**-0.5, generator=_generator(seed, name))
