"""Fixtures of the pytest-benchmark suite: the machine's settings, and cases that passed their gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from attn_zoo import AbstractAttention, AbstractMixer, BuildContext, UnsupportedError, build_attention, build_mixer
from attn_zoo.conformance import gate
from attn_zoo.registry import variants

NUM_THREADS = 2
"""Fixed, so that runs on one machine can be compared; torch's own default depends on who asks."""

BATCH_SIZE, NUM_HEADS, HEAD_DIM = 1, 8, 64


@dataclass(frozen=True)
class Case:
    """One variant with random inputs, ready to run.

    Args:
        forward: computes the output.
        leaves: inputs and parameters that get gradients.
        upstream: gradient of the output.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    upstream: Tensor


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


@cache
def _why_not(name: str, device: str) -> str:
    """Check a variant once; return why it cannot take part, or nothing. A wrong result raises `GateError`."""
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=256)
    try:
        gate(name, {}, build, device=device, seq_len=build.max_seq_len)
    except UnsupportedError as error:
        return error.reason
    return ""


@pytest.fixture
def make_case(device: str) -> Callable[..., Case]:
    """Return a function that builds a variant for a length, checked at a short one before anything is timed."""

    def make(name: str, seq_len: int, *, is_mixer: bool = False) -> Case:
        if reason := _why_not(name, device):
            pytest.skip(reason)
        build = BuildContext(embed_dim=NUM_HEADS * HEAD_DIM, num_heads=NUM_HEADS, max_seq_len=seq_len)
        torch.manual_seed(0)
        generator = torch.Generator(device).manual_seed(0)
        module: AbstractAttention | AbstractMixer
        shapes: list[tuple[int, ...]]
        if is_mixer or variants[name].attention is None:
            module, shapes = build_mixer(name, build), [(BATCH_SIZE, seq_len, build.embed_dim)]
        else:
            module, shapes = build_attention(name, build), [(BATCH_SIZE, NUM_HEADS, seq_len, HEAD_DIM)] * 3
        module.to(device)
        inputs = tuple(torch.randn(shape, generator=generator, device=device, requires_grad=True) for shape in shapes)
        upstream = torch.randn(shapes[0], generator=generator, device=device)
        return Case(partial(module, *inputs), (*inputs, *module.parameters()), upstream)

    return make
