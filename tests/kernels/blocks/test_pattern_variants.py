"""A new pattern is one variant file: three of them here, each with every path, a count of operations and all checks.

Each is what such a file needs: its options, its pattern, its registration and a dense reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, build_attention, registry
from attn_zoo.attention import AbstractAttention
from attn_zoo.attention.masks import blank_padding, masked_softmax
from attn_zoo.conformance import run_checks
from attn_zoo.kernels.blocks.block_attention import _as_numbers, _as_pattern, block_sparse_attention
from attn_zoo.kernels.blocks.call import BlockCall
from attn_zoo.kernels.blocks.flex import flex_forward
from attn_zoo.kernels.blocks.layout import PatternLayout, TokenLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from attn_zoo.kernels.exact import flex_attention
from attn_zoo.kernels.trace import recording
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention
from tests.kernels.blocks.test_flex import plain_kernel

CAPABILITIES = Capabilities(
    bidirectional=True,
    causal=True,
    cross_attention=False,
    key_padding_mask=True,
    why={"cross_attention": "distances between two sequences mean nothing"},
)
PAPER = Reference(title="A pattern", authors="Somebody et al.", year=2020, url="https://example.org")


class StaticPattern(AbstractAttention):
    """What the three share: attention under a layout, and densely under the mask of its definition."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        layout = self.config.layout(query.shape[2], is_causal=self.build.is_causal)
        dropout_p = self.build.dropout_p if self.training else 0.0
        return block_sparse_attention(query, key, value, layout, key_padding_mask=key_padding_mask, dropout_p=dropout_p)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        at = torch.arange(query.shape[2])
        keep = self.config.sees(at[:, None], at)
        if self.build.is_causal:
            keep = keep.tril()
        keep = keep if key_padding_mask is None else keep & ~key_padding_mask[:, None, None]
        key, value = blank_padding(key, key_padding_mask), blank_padding(value, key_padding_mask)
        return masked_softmax(query @ key.mT * query.shape[-1] ** -0.5, keep) @ value


def flops(shape: Shape) -> int:
    pairs: float = shape.config.layout(shape.query_len, is_causal=shape.is_causal).mean_pairs
    return round(4 * shape.batch_size * shape.num_heads * shape.head_dim * pairs)


def costs(time_exponent: float) -> Complexity:
    return Complexity(
        time="B H L W D",
        memory="B H L D",
        time_exponent=time_exponent,
        memory_exponent=1,
        sequential_ops="1",
        max_path="L / W",
        flops=flops,
        backward_ratio=2.5,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LongformerConfig(VariantConfig):
    window_size: int = 10
    num_global_tokens: int = 3

    def layout(self, query_len: int, *, is_causal: bool) -> PatternLayout:
        return TokenLayout(
            query_len=query_len,
            block_size=16,
            reach=self.window_size,
            num_global_tokens=self.num_global_tokens,
            is_causal=is_causal,
        )

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        is_global = (i < self.num_global_tokens) | (j < self.num_global_tokens)
        return ((i - j).abs() <= self.window_size) | is_global


class Longformer(StaticPattern):
    """Window and global tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DilatedConfig(VariantConfig):
    window_size: int = 12
    dilation: int = 4

    def layout(self, query_len: int, *, is_causal: bool) -> PatternLayout:
        return TokenLayout(
            query_len=query_len,
            block_size=16,
            reach=self.window_size * self.dilation,
            dilation=self.dilation,
            is_causal=is_causal,
        )

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        return ((i - j).abs() <= self.window_size * self.dilation) & ((i - j) % self.dilation == 0)


class Dilated(StaticPattern):
    """Every fourth token of a window."""


@dataclass(frozen=True, kw_only=True)
class StridedLayout(PatternLayout):
    """The own block, those next to it, and every `stride`-th block as far away as one likes."""

    query_len: int
    block_size: int
    stride: int
    is_causal: bool

    def make(self, device: str) -> BlockPattern:
        block = torch.arange(-(-self.query_len // self.block_size), device=device)
        distance = block[:, None] - block
        is_seen = (distance.abs() <= 1) | (distance % self.stride == 0)
        return make_pattern(
            block.expand(1, *is_seen.shape),
            is_seen.tril() if self.is_causal else is_seen,
            query_len=self.query_len,
            key_len=self.query_len,
            block_size=self.block_size,
            is_causal=self.is_causal,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StridedConfig(VariantConfig):
    stride: int = 3

    def layout(self, query_len: int, *, is_causal: bool) -> PatternLayout:
        return StridedLayout(query_len=query_len, block_size=8, stride=self.stride, is_causal=is_causal)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        distance = i // 8 - j // 8
        return (distance.abs() <= 1) | (distance % self.stride == 0)


class Strided(StaticPattern):
    """Blocks at regular distances."""


VARIANTS: dict[str, tuple[type[StaticPattern], type[VariantConfig], float]] = {
    "test_longformer": (Longformer, LongformerConfig, 1),
    "test_dilated": (Dilated, DilatedConfig, 1),
    "test_strided": (Strided, StridedConfig, 2),
}


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.param
    cls, config, exponent = VARIANTS[name]
    decorate = register_attention(
        name, config=config, capabilities=CAPABILITIES, complexity=costs(exponent), reference=PAPER
    )
    decorate(type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": __name__}))
    yield name
    registry.variants.remove(name)


# All that concern a pattern; the growth of the formula needs lengths of millions, at which blocks of 8 are too many.
CHECKS = (
    "shape_and_dtype",
    "batch_invariance",
    "causality",
    "padding_content",
    "fully_padded_row",
    "gradients_reach_every_parameter",
    "uninitialised_memory",
    "matches_reference",
    "dropout",
    "path_ran",
    "flops_count",
    "backward_ratio",
)


@pytest.mark.parametrize("registered", VARIANTS, indirect=True)
def test_it_keeps_every_promise(registered: str):
    results = run_checks(registered, checks=CHECKS)
    assert [result for result in results if result.outcome != "passed"] == []


@pytest.mark.parametrize("registered", VARIANTS, indirect=True)
@pytest.mark.parametrize("is_causal", [False, True])
def test_other_paths_and_the_compiler_agree(registered: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        flex_attention, "_compiled", lambda: lambda *given, **options: plain_kernel(*given, **as_tested(options))
    )
    module = build_attention(registered, BuildContext(embed_dim=32, num_heads=2, max_seq_len=128, is_causal=is_causal))
    query, key, value = torch.randn(3, 2, 2, 100, 16, dtype=torch.float64).unbind()
    expected = module.reference(query, key, value)
    pattern = module.config.layout(100, is_causal=is_causal).pattern()
    output, _ = flex_forward(BlockCall(query, key, value, None, pattern))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(query, key, value), expected, rtol=0, atol=1e-12)
    torch.compiler.reset()


def as_tested(options: dict[str, Any]) -> dict[str, Any]:
    """Give the plain kernel the tiles it expects; blocks of 8 have others."""
    return {**options, "kernel_options": {"fwd_BLOCK_M": 16}}


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_operator_gives_a_layout_its_booleans_back(is_causal: bool):
    """Numbers that equal them would make an equal layout, whose pattern is then kept for calls without the operator."""
    layout, tokens = TokenLayout(query_len=33, block_size=16, reach=5, is_causal=is_causal), torch.empty(1, 1, 33, 16)
    pattern = _as_pattern(tokens, tokens, *_as_numbers(layout))
    assert pattern.is_causal is is_causal
    assert pattern is layout.pattern()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["bigbird", "local_window"])
def test_a_layout_that_hides_nothing_is_exact_attention(name: str, is_causal: bool):
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=512, is_causal=is_causal)
    attention, full = build_attention(name, build), build_attention("full", build)
    for length, hides in ((100, False), (512, True)):
        inputs = [torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(3)]
        with recording() as paths:
            output = attention(*inputs)
        assert paths == ["block_sparse.gather" if hides else "sdpa.flash"]
        wanted = full(*inputs)
        assert hides != torch.equal(output, wanted)
        gathered = build_attention(name, build, backend="gather")(*inputs)
        torch.testing.assert_close(gathered, output, rtol=1e-5, atol=1e-5)
        for found, sought in zip(
            *(torch.autograd.grad(x.square().sum(), inputs) for x in (output, gathered)), strict=True
        ):
            torch.testing.assert_close(found, sought, rtol=1e-4, atol=1e-4)
    padding = torch.zeros(2, 100, dtype=torch.bool)
    with recording() as paths:  # its kernel would need keys that are finite there
        attention(*(x[:, :, :100] for x in inputs), key_padding_mask=padding)
    assert paths == ["block_sparse.gather"]
