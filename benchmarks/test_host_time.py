"""What a call costs before it computes: every variant at a length where the work is nothing, beside torch's own call.

pytest-benchmark prints each as a multiple of the fastest of its group. On a GPU this is the time the host needs to
enqueue a call, which decides how fast short sequences run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import BATCH_SIZE, HEAD_DIM, OURS
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer
from attn_zoo.registry import variants

SEQ_LENS = (16,)
NUM_HEADS = 2
PASSES = ("no graph", "with graph")
ROUNDS, CALLS = 100, 30
TORCH = "torch"


def make_call(name: str, seq_len: int, device: str, has_graph: bool) -> Callable[[], Tensor]:
    """Return one call on random inputs."""
    generator = torch.Generator(device).manual_seed(0)
    heads, hidden = (BATCH_SIZE, NUM_HEADS, seq_len, HEAD_DIM), (BATCH_SIZE, seq_len, NUM_HEADS * HEAD_DIM)
    is_mixer = name != TORCH and variants[name].attention is None
    shapes = [hidden] if is_mixer else [heads] * 3
    inputs = [torch.randn(x, generator=generator, device=device, requires_grad=has_graph) for x in shapes]
    if name == TORCH:
        return lambda: scaled_dot_product_attention(*inputs)
    build = BuildContext(embed_dim=hidden[-1], num_heads=NUM_HEADS, max_seq_len=seq_len)
    try:
        module = (build_mixer if is_mixer else build_attention)(name, build).to(device).train(has_graph)
    except UnsupportedError as error:
        pytest.skip(error.reason)
    return lambda: module(*inputs)


@pytest.mark.parametrize("name", [TORCH, *OURS])
@pytest.mark.parametrize("pass_", PASSES)
def test_host_time(benchmark: Any, device: str, name: str, seq_len: int, pass_: str) -> None:
    has_graph = pass_ == "with graph"
    call = make_call(name, seq_len, device, has_graph)
    benchmark.group = f"one call, {pass_}, {seq_len} tokens, one thread"
    benchmark.extra_info.update(
        {"peer" if name == TORCH else "variant": name},
        seq_len=seq_len,
        batch_size=BATCH_SIZE,
        num_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        device=device,
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.set_grad_enabled(has_graph):
            benchmark.pedantic(call, rounds=ROUNDS, iterations=CALLS, warmup_rounds=3)
    finally:
        torch.set_num_threads(num_threads)
