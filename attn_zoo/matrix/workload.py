"""What a scaling cell measures: the variant, built as a worker builds it, with inputs and one call of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext, build_attention, build_mixer
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Shape
from attn_zoo.records import Cell, Pass
from attn_zoo.registry import make_config, variants

__all__ = ["Workload", "make_module", "make_workload", "normal", "padding_of"]

BLOCK_LEN = 2**20
"""Numbers of one tensor that are drawn from one generator: a change of it changes all inputs."""

GRAPH_FREE = ("infer",)
"""Passes that run the module in evaluation mode, without gradients."""

_Value = TypeVar("_Value")


def _given(value: _Value | None, name: str) -> _Value:
    if value is None:
        raise ValueError(f"a scaling cell needs {name}")
    return value


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a scaling cell, none of them missing."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int
    pass_: Pass

    @classmethod
    def of(cls, cell: Cell) -> _Sizes:
        """Return the sizes; `ValueError` names the one that the cell leaves out."""
        num_heads = _given(cell.num_heads, "num_heads")
        return cls(
            batch_size=_given(cell.batch_size, "batch_size"),
            num_heads=num_heads,
            num_kv_heads=cell.num_kv_heads or num_heads,
            seq_len=_given(cell.seq_len, "seq_len"),
            head_dim=_given(cell.head_dim, "head_dim"),
            pass_=_given(cell.pass_, "pass_"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is measured.

    Args:
        module: the variant.
        forward: one call, without arguments.
        inputs: of that call.
        key_padding_mask: of that call, or None.
        leaves: inputs and parameters that take gradients.
        pass_: what is timed.
        build: what the module was built for.
        shape: for cost formulas.
    """

    module: nn.Module
    forward: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    key_padding_mask: Tensor | None
    leaves: list[Tensor]
    pass_: Pass
    build: BuildContext
    shape: Shape


def _build(cell: Cell, sizes: _Sizes) -> BuildContext:
    return BuildContext(
        embed_dim=sizes.num_heads * sizes.head_dim,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_seq_len=sizes.seq_len,
        is_causal=cell.is_causal,
        dropout_p=cell.dropout_p,
        seed=cell.seed,
    )


def padding_of(batch_size: int, seq_len: int, device: str) -> Tensor:
    """Return the mask `[B, L]` of a padded cell: the last quarter of every second sequence, the first one included."""
    mask = torch.zeros(batch_size, seq_len, dtype=torch.bool, device=device)
    mask[::2, seq_len - seq_len // 4 :] = True
    return mask


def make_module(cell: Cell) -> tuple[nn.Module, BuildContext]:
    """Build the cell's variant where torch's default device is, and return it with what it was built for.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """
    build = _build(cell, _Sizes.of(cell))
    make = build_attention if cell.scope == "attention" else build_mixer
    return make(cell.variant, build, **cell.options), build


def make_workload(cell: Cell, inputs: Sequence[Tensor] | None = None) -> Workload:
    """Build the variant and random normal inputs; the same for the same seed.

    Args:
        cell: what to build.
        inputs: of another cell that differs in the variant only, to share instead of drawing the same ones again.

    Raises:
        UnsupportedError: the variant, or this machine, cannot do what the cell asks.
    """
    if cell.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("cuda", "no CUDA device here")
    sizes = _Sizes.of(cell)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    torch.manual_seed(cell.seed)
    module, build = make_module(cell)
    module = module.to(device=cell.device, dtype=dtype)
    has_graph = sizes.pass_ not in GRAPH_FREE
    module.train(has_graph)
    if inputs is None:
        inputs = _draw(cell, sizes, dtype, has_graph)
    mask = padding_of(sizes.batch_size, sizes.seq_len, cell.device) if cell.has_padding else None

    def forward() -> Tensor:
        output: Tensor = module(*inputs, key_padding_mask=mask)
        return output

    config = make_config(variants[cell.variant].config, cell.options, cell.variant)
    shape = build.shape(sizes.batch_size, sizes.seq_len, config=config)
    parameters = [item for item in module.parameters() if item.requires_grad]
    leaves = [*inputs, *parameters]
    return Workload(
        module=module,
        forward=forward,
        inputs=inputs,
        key_padding_mask=mask,
        leaves=leaves,
        pass_=sizes.pass_,
        build=build,
        shape=shape,
    )


def _draw(cell: Cell, sizes: _Sizes, dtype: torch.dtype, has_graph: bool) -> list[Tensor]:
    """Return query, key and value, or hidden states."""
    rows = (sizes.batch_size, sizes.num_heads, sizes.seq_len, sizes.head_dim)
    kv_rows = (sizes.batch_size, sizes.num_kv_heads, sizes.seq_len, sizes.head_dim)
    hidden = (sizes.batch_size, sizes.seq_len, sizes.num_heads * sizes.head_dim)
    shapes = [rows, kv_rows, kv_rows] if cell.scope == "attention" else [hidden]
    if cell.device == "cpu":
        drawn = [normal(shape, (cell.seed, index), dtype) for index, shape in enumerate(shapes)]
    else:  # a GPU draws fast, and all blocks of a tensor from one generator
        generator = torch.Generator(cell.device).manual_seed(cell.seed)
        drawn = [torch.randn(shape, generator=generator, device=cell.device, dtype=dtype) for shape in shapes]
    return [tensor.requires_grad_(has_graph) for tensor in drawn]


def normal(shape: tuple[int, ...], seed: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random normal numbers, drawn on all threads of torch and the same for any number of them.

    `torch.randn` draws on one thread: 3 s for the inputs of 262144 tokens with 8 heads of 64.

    Args:
        shape: of the result.
        seed: equal seeds, equal numbers.
        dtype: of the result.
    """
    tensor = torch.empty(shape, dtype=dtype)
    blocks = torch.split(tensor.view(-1), BLOCK_LEN)
    seeds = np.random.SeedSequence(seed).generate_state(len(blocks)).tolist()

    def fill(block: Tensor, block_seed: int) -> None:
        block.normal_(generator=torch.Generator().manual_seed(block_seed))

    with ThreadPoolExecutor(min(torch.get_num_threads(), len(blocks))) as pool:
        list(pool.map(fill, blocks, seeds))
    return tensor
