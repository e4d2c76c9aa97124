"""What a scaling cell measures: the variant, built as a worker builds it, with inputs and one call of it.

`AbstractWorkload` is what a cell needs of it; a training step is another one (`steps.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext, build_attention, build_mixer
from attn_zoo.conformance import check_output, gate
from attn_zoo.conformance.subject import Form
from attn_zoo.errors import UnsupportedError
from attn_zoo.matrix.cell.random_inputs import normal, padding_of
from attn_zoo.measure.memory import memory_of_pass
from attn_zoo.measure.passes import clear_grads, make_pass
from attn_zoo.metadata import Shape
from attn_zoo.records import PASSES, CallPass, Cell, Memory
from attn_zoo.registry import make_config, variants

__all__ = [
    "AbstractWorkload",
    "Call",
    "CallWorkload",
    "make_call_workload",
    "make_module",
    "make_workload",
]

Call = Callable[[], object]
"""What is timed, or runs before it."""

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
    pass_: CallPass

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
            pass_=cast(CallPass, _given(cell.pass_, "pass_")),
        )


class AbstractWorkload(ABC):
    """What a cell measures.

    Attributes:
        inputs: what a cell that differs in the variant only may be given too.
    """

    inputs: Sequence[Tensor]

    @abstractmethod
    def gate(self) -> tuple[str, ...]:
        """Check it before anything is timed; return the names of the checks. Raises as `conformance.gate`."""

    @abstractmethod
    def make_call(self) -> tuple[Call, Call | None]:
        """Return what to time, and what to run before each call of it."""

    @abstractmethod
    def check(self, output: object) -> tuple[str, ...]:
        """Check what the first call returned or did; return the names of the checks.

        Raises:
            GateError: it is wrong.
        """

    def settle(self) -> None:  # noqa: B027 - most have nothing to settle
        """Make the calls that run otherwise than all that follow: before warm-up, whose end the clock decides."""

    @abstractmethod
    def memory(self) -> Memory:
        """Measure the memory of one call."""

    @property
    @abstractmethod
    def num_params(self) -> int:
        """Of what runs."""

    @property
    @abstractmethod
    def flops(self) -> int | None:
        """FLOPs of one forward by formula, after the first call; None where there is no formula."""

    @property
    @abstractmethod
    def pass_flops(self) -> float | None:
        """FLOPs of what is timed, its backward included; otherwise as `flops`."""

    @abstractmethod
    def counted_flops(self) -> int | None:
        """Count the FLOPs of one forward; None where the counter does not see what runs."""

    @abstractmethod
    def release(self) -> None:
        """Let go of what a call leaves behind."""


@dataclass(frozen=True, kw_only=True)
class CallWorkload(AbstractWorkload):
    """One call of the variant.

    Args:
        cell: of which this is the work.
        module: the variant.
        forward: one call, without arguments.
        inputs: of that call.
        key_padding_mask: of that call, or None.
        leaves: inputs and parameters that take gradients.
        pass_: what is timed.
        build: what the module was built for.
        shape: for cost formulas.
    """

    cell: Cell
    module: nn.Module
    forward: Callable[[], Tensor]
    inputs: Sequence[Tensor]
    key_padding_mask: Tensor | None
    leaves: list[Tensor]
    pass_: CallPass
    build: BuildContext
    shape: Shape

    def gate(self) -> tuple[str, ...]:
        cell = self.cell
        return gate(
            cell.variant,
            cell.options,
            self.build,
            dtype=cell.dtype,
            device=cell.device,
            seq_len=self.shape.seq_len,
            form=_form(cell),
        )

    def make_call(self) -> tuple[Call, Call | None]:
        clear_grads(self.leaves)
        return make_pass(self.forward, self.leaves, self.pass_)

    def check(self, output: object) -> tuple[str, ...]:
        assert isinstance(output, Tensor)
        return check_output(
            output,
            self.inputs,
            variant=variants[self.cell.variant],
            form=_form(self.cell),
            build=self.build,
            key_padding_mask=self.key_padding_mask,
            is_random=self.module.training and self.cell.dropout_p > 0,
        )

    def memory(self) -> Memory:
        return memory_of_pass(self.forward, self.leaves, self.pass_, device=self.cell.device)

    @property
    def num_params(self) -> int:
        return sum(item.numel() for item in self.module.parameters())

    @property
    def flops(self) -> int | None:
        return variants[self.cell.variant].flops(self.shape)

    @property
    def pass_flops(self) -> float | None:
        ratio = variants[self.cell.variant].backward_ratio(self.shape)
        return None if self.flops is None else self.flops * PASSES[self.pass_].num_forwards(ratio or 0.0)

    def counted_flops(self) -> int | None:
        """Count one forward without a graph, so that the count needs no more memory than the timing did."""
        from attn_zoo.measure.flop_count import count_flops  # loads a fifth of a second's worth of torch

        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        try:
            for leaf in leaves:
                leaf.requires_grad_(False)
            with torch.no_grad():
                return count_flops(self.forward)
        finally:
            for leaf in leaves:
                leaf.requires_grad_(True)

    def release(self) -> None:
        clear_grads(self.leaves)


def _form(cell: Cell) -> Form:
    return "attention" if cell.scope == "attention" else "mixer"


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


def make_module(cell: Cell) -> tuple[nn.Module, BuildContext]:
    """Build the cell's variant where torch's default device is, and return it with what it was built for.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """
    build = _build(cell, _Sizes.of(cell))
    make = build_attention if cell.scope == "attention" else build_mixer
    return make(cell.variant, build, **cell.options), build


def make_workload(cell: Cell, inputs: Sequence[Tensor] | None = None) -> AbstractWorkload:
    """Build the variant and random inputs; the same for the same seed.

    Args:
        cell: what to build.
        inputs: of another cell that differs in the variant only, to share instead of drawing the same ones again.

    Raises:
        UnsupportedError: the variant, or this machine, cannot do what the cell asks.
    """
    if cell.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("cuda", "no CUDA device here")
    if cell.scope == "model":
        from attn_zoo.matrix.cell.step_workload import StepWorkload  # loads the backbone and what trains it

        return StepWorkload(cell)
    return make_call_workload(cell, inputs)


def make_call_workload(cell: Cell, inputs: Sequence[Tensor] | None = None) -> CallWorkload:
    """Build one call of the variant; arguments as in `make_workload`."""
    sizes = _Sizes.of(cell)
    dtype: torch.dtype = getattr(torch, cell.dtype)
    torch.manual_seed(cell.seed)
    module, build = make_module(cell)
    module = module.to(device=cell.device, dtype=dtype)
    has_graph = PASSES[sizes.pass_].has_graph
    module.train(has_graph)
    if inputs is None:
        inputs = _draw(cell, sizes, dtype, has_graph)
    mask = padding_of(sizes.batch_size, sizes.seq_len, cell.device) if cell.has_padding else None

    def forward() -> Tensor:
        output: Tensor = module(*inputs, key_padding_mask=mask)
        return output

    config = make_config(variants[cell.variant].config, cell.options, cell.variant)
    shape = build.shape(sizes.batch_size, sizes.seq_len, config=config, form=_form(cell))
    parameters = [item for item in module.parameters() if item.requires_grad]
    leaves = [*inputs, *parameters]
    return CallWorkload(
        cell=cell,
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
