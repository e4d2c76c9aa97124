"""What kinds share that make one call of a mechanism by itself, over lengths: its sizes, and what it may refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from attn_zoo.attention import AbstractAttention, AbstractMixer, BuildContext, build_attention, build_mixer
from attn_zoo.conformance import gate
from attn_zoo.matrix.claimed_costs import build_context, config_of, form_of
from attn_zoo.matrix.kinds.kind import (
    AbstractKind,
    Axis,
    Group,
    Length,
    Problem,
    Seconds,
    Size,
    as_axis,
    combinations,
)
from attn_zoo.matrix.plan.planned_cell import Refusal
from attn_zoo.matrix.plan.source_digest import CALL_ROOMS
from attn_zoo.metadata import Request
from attn_zoo.records import PROTOCOL_VERSION, Cell
from attn_zoo.registry import variants


class LengthGroup(Group):
    """What groups over lengths may say.

    Args:
        seq_len: tokens.
        timeout_s: seconds one repeat of a cell may take.
    """

    seq_len: Axis[Length]
    timeout_s: Seconds = 600.0

    def axes(self) -> dict[str, Sequence[Any]]:
        """Return the values of each field of a cell that may have several, but for the length and the seed."""
        return {"dtype": self.dtypes}

    @property
    def settings(self) -> Iterator[dict[str, Any]]:
        """Every combination of these, each with all its seeds in a row."""
        return combinations({**self.axes(), "seed": self.seeds})

    @property
    def num_cells(self) -> int:
        own = (self.variants, self.seq_len, self.seeds, *self.axes().values())
        return math.prod(map(len, own))


class CallGroup(LengthGroup):
    """What groups may say that call one mechanism by itself.

    Args:
        batch_size: B; fixed while the length grows, so that exponents mean something.
        num_heads: H.
        num_kv_heads: G; default H.
        head_dim: D.
    """

    batch_size: Axis[Size] = (1,)
    num_heads: Axis[Size] = (8,)
    num_kv_heads: Size | None = None
    head_dim: Axis[Size] = (64,)

    def axes(self) -> dict[str, Sequence[Any]]:
        sizes = {"batch_size": self.batch_size, "num_heads": self.num_heads, "head_dim": self.head_dim}
        return {**super().axes(), **sizes}


class CallKind(AbstractKind):
    """A kind whose cells call one mechanism by itself.

    Attributes:
        fixed: fields that all its cells have in common.
        version: of the protocol.
    """

    rooms = CALL_ROOMS
    fixed: ClassVar[Mapping[str, Any]] = {}
    version: ClassVar[int] = PROTOCOL_VERSION

    def problems(self, group: Mapping[str, Any], where: str) -> list[Problem]:
        num_kv_heads = group.get("num_kv_heads")
        if not isinstance(num_kv_heads, int) or num_kv_heads < 1:
            return []
        heads = as_axis(group.get("num_heads", list(CallGroup.model_fields["num_heads"].default)))
        return [
            (f"{where}.num_kv_heads", f"expected a divisor of num_heads = {num_heads}; got {num_kv_heads}")
            for num_heads in heads
            if isinstance(num_heads, int) and num_heads % num_kv_heads
        ]

    def points(self, group: CallGroup) -> Iterator[dict[str, Any]]:
        """Yield the fields of each curve that the group decides, but for members, device and threads."""
        for point in group.settings:
            yield {
                "kind": self.name,
                "protocol_version": self.version,
                "num_kv_heads": group.num_kv_heads or point["num_heads"],
                **self.fixed,
                **point,
            }

    def refusals(self, cells: Sequence[Cell]) -> list[Refusal | None]:
        """Return for each cell of one curve why it cannot run, or None."""
        first, variant = cells[0], variants[cells[0].variant]
        if form_of(first) == "attention" and variant.attention is None:
            return [self.needs_heads] * len(cells)
        offered = variant.capabilities_of(config_of(first))
        return [offered.missing(self.request(cell)) for cell in cells]

    needs_heads: ClassVar[Refusal] = ("attention", 'needs hidden states [B, L, E]: scope = "mixer"')

    def request(self, cell: Cell) -> Request:
        """Return what a cell asks of its variant."""
        return Request(
            is_causal=cell.is_causal,
            has_key_padding_mask=cell.has_padding,
            is_grouped_query=cell.num_kv_heads != cell.num_heads,
            dropout_p=cell.dropout_p,
            seq_len=cell.seq_len,
            dtype=cell.dtype,
            device=cell.device,
        )


def make_module(cell: Cell) -> tuple[AbstractAttention | AbstractMixer, BuildContext]:
    """Build the cell's variant where torch's default device is, and return it with what it was built for.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """
    build = build_context(cell)
    if form_of(cell) == "attention":
        return build_attention(cell.variant, build, **cell.options), build
    return build_mixer(cell.variant, build, **cell.options), build


def gate_call(
    cell: Cell,
    build: BuildContext,
    *,
    seq_len: int | None = None,
    is_training: bool = False,
    needs_decode: bool = False,
) -> tuple[str, ...]:
    """Check the cell's variant as the cell calls it; arguments, result and errors as in `conformance.gate`."""
    return gate(
        cell.variant,
        cell.options,
        build,
        dtype=cell.dtype,
        device=cell.device,
        seq_len=seq_len or build.max_seq_len,
        form=form_of(cell),
        has_padding=cell.has_padding,
        is_training=is_training,
        needs_decode=needs_decode,
    )
