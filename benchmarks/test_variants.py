"""Every registered variant against every other, for pytest-benchmark: `pytest benchmarks --benchmark-only`.

One group for each pass and length, so that the table compares variants. For scaling exponents, memory, intervals and
figures use `attn-zoo run benchmarks/quick.toml`; this is the quick look, and a guard with `--benchmark-compare-fail`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import BATCH_SIZE, HEAD_DIM, NUM_HEADS, OURS, Case

from attn_zoo.kernels.trace import recording

SEQ_LENS = (1024, 4096)
PASSES = ("forward", "forward+backward")
SAMPLING_S = 1.0
MIN_ROUNDS, MAX_ROUNDS = 3, 30


def work(case: Case, pass_: str, device: str) -> Callable[[], None]:
    """Return what is timed: it ends when the device has finished."""

    def forward() -> None:
        with torch.no_grad():
            case.forward()

    def forward_backward() -> None:
        torch.autograd.grad(case.forward(), case.leaves, case.upstream)

    run = forward if pass_ == "forward" else forward_backward

    def synchronised() -> None:
        run()
        torch.cuda.synchronize()

    return synchronised if device == "cuda" else run


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("pass_", PASSES)
def test_variant(
    benchmark: Any, make_case: Callable[[str, int], Case], device: str, name: str, seq_len: int, pass_: str
) -> None:
    run = work(make_case(name, seq_len), pass_, device)
    with recording() as kernels:
        run()
    started = time.perf_counter()  # of a second run: the first may have compiled or allocated
    run()
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(SAMPLING_S / (time.perf_counter() - started))))
    benchmark.group = f"{pass_}, {seq_len} tokens"
    benchmark.extra_info.update(
        variant=name,
        seq_len=seq_len,
        batch_size=BATCH_SIZE,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        device=device,
        num_threads=torch.get_num_threads(),
        kernels=kernels,
    )
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=1)
