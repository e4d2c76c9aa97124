"""What a call enqueues on a GPU, counted without one: Triton launches, torch's own kernels, allocations.

Below some thousand tokens a GPU waits for the host, whose time grows with each of these. Triton's interpreter stands in
for the card, and the kernels for themselves: nothing is computed, so this says nothing about results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attn_zoo import BuildContext, build_attention
from attn_zoo.kernels.compress import compression
from attn_zoo.kernels.trace import recording
from tests.kernels.interpreter import IS_INTERPRETING, run_interpreted
from tests.test_host_time import script

# Options of a variant; then, forward and with backward, the Triton launches, torch kernels and allocations of a call
# whose like was made before. More of them cost time below 64k tokens; fewer are welcome here.
MOST: dict[str, tuple[dict[str, Any], tuple[int, int, int], tuple[int, int, int]]] = {
    "bigbird": ({"backend": "triton"}, (2, 0, 3), (5, 0, 7)),
    "linformer": ({"proj_len": 256}, (2, 1, 4), (6, 1, 12)),  # with the kernels of SDPA, of which the forward alone
    "local_window": ({"backend": "triton"}, (1, 0, 2), (3, 0, 6)),
    "moba": ({"backend": "triton"}, (2, 98, 101), (6, 161, 172)),  # eight of them so that equal blocks have an order
}


if not IS_INTERPRETING:

    @pytest.mark.triton
    def test_in_the_interpreter():
        run_interpreted(Path(__file__))


@pytest.mark.triton
@pytest.mark.skipif(not IS_INTERPRETING, reason="run by the test above, in a process of its own")
@pytest.mark.parametrize("has_graph", [False, True], ids=["forward", "with-backward"])
@pytest.mark.parametrize("name", list(MOST))
def test_a_call_enqueues_no_more_than_it_did(monkeypatch, name, has_graph):
    from triton.runtime import interpreter

    launches: list[str] = []
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda self, *given, **named: launches.append(self.fn.__name__)
    )
    monkeypatch.setattr(compression, "_choose", lambda *_: "triton")  # as on a GPU
    options, *most = MOST[name]
    build = BuildContext(embed_dim=512, num_heads=8, max_seq_len=4096)
    module = build_attention(name, build, **options).to(torch.bfloat16).train(has_graph)
    inputs = [torch.randn(1, 8, 4096, 64, dtype=torch.bfloat16, requires_grad=has_graph) for _ in range(3)]
    grad = torch.randn(1, 8, 4096, 64, dtype=torch.bfloat16)
    learned = [*inputs, *module.parameters()]

    def call() -> None:
        output = module(*inputs)
        if has_graph:
            torch.autograd.grad(output, learned, grad)

    with recording() as paths:
        call()
    assert any("triton" in path for path in paths), paths
    launches.clear()
    with script.Enqueued() as enqueued:
        call()
    assert len(launches) == enqueued.launches, "a launch that no cache knows"
    counted = len(launches), len(enqueued.kernels), len(enqueued.allocations)
    what = f"{counted}: {launches}, {enqueued.kernels}, {enqueued.allocations}"
    assert all(here <= known for here, known in zip(counted, most[has_graph], strict=True)), what
