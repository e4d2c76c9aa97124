"""torch's compiler takes every variant whole: one graph, forward and backward, with the numbers of the plain call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_zoo import BuildContext, build_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.metadata import Position

LENGTH = 256
# What is traced as often as it is repeated: twice is enough.
REPEATED: dict[str, dict[str, Any]] = {"nystrom": {"pinv_iterations": 2}, "sinkhorn": {"num_iterations": 2}}


@pytest.fixture(autouse=True)
def forget():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("is_training", "is_padded", "dropout_p"),
    [(False, False, 0.0), (True, False, 0.25), (True, True, 0.0)],
    ids=["infer", "dropout", "padded"],
)
@pytest.mark.parametrize(
    ("name", "is_causal", "position"),
    [
        ("full", False, "none"),
        ("full", True, "none"),
        ("full", True, "alibi"),
        ("linformer", False, "none"),
        ("bigbird", False, "none"),
        ("bigbird", True, "alibi"),
        ("local_window", True, "none"),
        ("linear_attention", False, "none"),
        ("linear_attention", True, "none"),
        ("cosformer", True, "none"),
        ("performer", True, "none"),
        ("nystrom", False, "none"),
        ("sinkhorn", False, "none"),
        ("sinkhorn", True, "none"),
    ],
)
def test_one_graph_with_the_same_numbers(name, is_causal, position: Position, is_training, is_padded, dropout_p):
    build = BuildContext(
        embed_dim=32, num_heads=2, max_seq_len=LENGTH, is_causal=is_causal, dropout_p=dropout_p, position=position
    )
    torch.manual_seed(0)
    attention = build_attention(name, build, **REPEATED.get(name, {})).train(is_training)
    inputs = [torch.randn(2, 2, LENGTH, 16, requires_grad=is_training) for _ in range(3)]
    mask = None
    if is_padded:
        mask = torch.zeros(2, LENGTH, dtype=torch.bool)
        mask[1, 200:] = True
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    found = []
    with torch.set_grad_enabled(is_training):
        for call in (attention, compiled):
            torch.manual_seed(1)
            output = call(*inputs, key_padding_mask=mask)
            grads = torch.autograd.grad(output.square().sum(), inputs) if is_training else ()
            found.append((output, *grads))
    for plain, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, plain)


@pytest.mark.parametrize(
    ("name", "lengths", "num_graphs"),
    [
        *((name, (128, 200, 256), 1) for name in ("full", "bigbird", "local_window")),
        ("linformer", (200, 256), 2),  # its projections are cut to the length
        # Whole blocks, or segments, are a graph of their own: seconds.
        *((name, (200, 240), 1) for name in ("lara", "nystrom", "sinkhorn")),
    ],
)
def test_lengths_may_vary(name, lengths, num_graphs):
    """As batches of a training do: one graph then serves several lengths, or each has its own.

    That is up to the first of the compiler's parts; the second, which takes most of the time, is tested above.
    """
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=LENGTH)
    attention = build_attention(name, build, **REPEATED.get(name, {}))
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
    for length in lengths:
        inputs = [torch.randn(2, 2, length, 16) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), attention(*inputs))
    assert len(graphs) == num_graphs


@pytest.mark.parametrize("name", ["full", "linformer", "bigbird", "linear_attention"])
def test_a_graph_notes_its_path_and_is_the_same_whoever_records(name):
    """Else a timing, which begins when the recording is over, would begin by compiling anew."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    small: dict[str, Any] = {"block_size": 8, "num_random_blocks": 1} if name == "bigbird" else {}  # so it hides some
    attention = build_attention(name, BuildContext(embed_dim=32, num_heads=2, max_seq_len=LENGTH), **small)
    inputs = [torch.randn(2, 2, LENGTH, 16) for _ in range(3)]
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    with recording() as paths, torch.no_grad():
        compiled(*inputs)
        compiled(*inputs)
        with recording():
            compiled(*inputs)
    with torch.no_grad():
        compiled(*inputs)
        with recording() as plain:
            attention(*inputs)
    assert paths == plain != []
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("name", ["full", "linformer", "bigbird", "local_window"])
def test_one_graph_on_a_gpu(name, dropout_p):
    build = BuildContext(embed_dim=128, num_heads=2, max_seq_len=1024, dropout_p=dropout_p)
    attention = build_attention(name, build).cuda().bfloat16()
    inputs = [torch.randn(2, 2, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found = []
    with recording() as paths:
        for call in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(1)
            output = call(*inputs)
            found.append([x.detach() for x in (output, *torch.autograd.grad(output.square().sum(), inputs))])
    for plain, traced in zip(*found, strict=True):
        if "few_keys.triton" in paths:  # no graph of the compiler has it; another kernel rounds in other places
            assert float((traced - plain).norm()) <= 1e-2 * float(plain.norm())
        else:
            torch.testing.assert_close(traced, plain)
