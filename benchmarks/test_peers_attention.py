"""Ours beside what people use, for pytest-benchmark: one group for each mechanism, pass and length.

The quick look; records with intervals, memory and figures come from `make peers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import BATCH_SIZE, HEAD_DIM, NUM_HEADS, Case
from test_variants import PASSES, work

from attn_zoo import UnsupportedError
from attn_zoo.registry import variants

GROUPS = {
    "block-sparse": ("bigbird", "huggingface_bigbird", "flex_bigbird"),
    "low-rank, with projections": ("linformer", "linformer_package"),
}
SEQ_LENS = (4096,)


@pytest.mark.parametrize(("mechanism", "name"), [(group, name) for group, names in GROUPS.items() for name in names])
@pytest.mark.parametrize("pass_", PASSES)
def test_peer(
    benchmark: Any,
    make_case: Callable[..., Case],
    device: str,
    mechanism: str,
    name: str,
    seq_len: int,
    pass_: str,
) -> None:
    is_mixer = any(variants[other].attention is None for other in GROUPS[mechanism])
    try:
        case = make_case(name, seq_len, is_mixer=is_mixer)
        run = work(case, pass_, device)
        run()
    except UnsupportedError as error:
        pytest.skip(error.reason)
    benchmark.group = f"{mechanism}: {pass_}, {seq_len} tokens"
    benchmark.extra_info.update(
        variant=name, seq_len=seq_len, batch_size=BATCH_SIZE, num_heads=NUM_HEADS, head_dim=HEAD_DIM, device=device
    )
    benchmark.pedantic(run, rounds=7, warmup_rounds=1)
