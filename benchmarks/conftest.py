"""Fixtures of the pytest-benchmark suite: the machine's settings, and cases that passed their gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import (
    AbstractAttention,
    AbstractMixer,
    BuildContext,
    UnsupportedError,
    build_attention,
    build_mixer,
    list_variants,
    load_file,
)
from attn_zoo.conformance import gate
from attn_zoo.matrix.kinds.scaling import padding_of
from attn_zoo.registry import variants

NUM_THREADS = 2
"""Fixed, so that runs on one machine can be compared; torch's own default depends on who asks."""

BATCH_SIZE, NUM_HEADS, HEAD_DIM = 1, 8, 64

OURS = tuple(list_variants())
"""What is registered without the peers, which come next."""

for _path in sorted((Path(__file__).parent / "peers").glob("*.py")):
    if _path.stem not in variants:
        load_file(_path, None)  # our own: no need to try each in another process first


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seq-lens", help="lengths instead of those in the files, such as 1024,4096")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a benchmark the lengths asked for, or those of its file."""
    if "seq_len" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--seq-lens")
        lengths = [int(length) for length in asked.split(",")] if asked else metafunc.module.SEQ_LENS
        metafunc.parametrize("seq_len", lengths)


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
def _why_not(name: str, options: str, dropout_p: float, device: str, dtype: str) -> str:
    """Check a variant once; return why it cannot take part, or nothing. A wrong result raises `GateError`."""
    # Long enough for a sparse pattern to be sparse.
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=1024, dropout_p=dropout_p)
    try:
        gate(name, json.loads(options), build, device=device, dtype=dtype, seq_len=build.max_seq_len)
    except UnsupportedError as error:
        return error.reason
    return ""


@pytest.fixture
def make_case(device: str) -> Callable[..., Case]:
    """Return a function that builds a variant for a length, checked at shorter ones before anything is timed."""

    def make(
        name: str,
        seq_len: int,
        *,
        is_mixer: bool = False,
        options: dict[str, Any] | None = None,
        dtype: str = "float32",
        dropout_p: float = 0.0,
        has_padding: bool = False,
    ) -> Case:
        options = options or {}
        if reason := _why_not(name, json.dumps(options), dropout_p, device, dtype):
            pytest.skip(reason)
        build = BuildContext(
            embed_dim=NUM_HEADS * HEAD_DIM, num_heads=NUM_HEADS, max_seq_len=seq_len, dropout_p=dropout_p
        )
        torch.manual_seed(0)
        generator = torch.Generator(device).manual_seed(0)
        module: AbstractAttention | AbstractMixer
        shapes: list[tuple[int, ...]]
        if is_mixer or variants[name].attention is None:
            module, shapes = build_mixer(name, build, **options), [(BATCH_SIZE, seq_len, build.embed_dim)]
        else:
            shapes = [(BATCH_SIZE, NUM_HEADS, seq_len, HEAD_DIM)] * 3
            module = build_attention(name, build, **options)
        numbers = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
        module.to(device, numbers["dtype"])
        inputs = tuple(torch.randn(shape, requires_grad=True, **numbers) for shape in shapes)
        upstream = torch.randn(shapes[0], **numbers)
        mask = padding_of(BATCH_SIZE, seq_len, device) if has_padding else None
        forward = partial(module, *inputs, key_padding_mask=mask)
        return Case(forward, (*inputs, *module.parameters()), upstream)

    return make
