"""What a run asks of its variant, known before any data is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Position, Request
from attn_zoo.records import Cell
from attn_zoo.registry import capabilities_of
from attn_zoo.tasks import TaskSpec
from attn_zoo.training.protocol import Protocol

_WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def weight_dtype(dtype: str) -> torch.dtype:
    """Return the type of the weights for a cell's dtype: bfloat16 trains under autocast with float32 weights.

    Raises:
        UnsupportedError: training does not run in it.
    """
    if dtype not in _WEIGHT_DTYPES:
        raise UnsupportedError("dtypes", f"training runs in {', '.join(_WEIGHT_DTYPES)}; {dtype} needs loss scaling")
    return _WEIGHT_DTYPES[dtype]


def _directions(cell: Cell, spec: TaskSpec, protocol: Protocol) -> Iterator[bool]:
    """Yield for each kind of self-attention that will be built whether it is causal."""
    if spec.kind in ("classification", "pair", "seq2seq"):
        yield False
    if spec.kind in ("causal_lm", "seq2seq"):
        yield True
    if spec.kind == "token_classification":
        yield cell.is_causal
    if protocol.pretrain:
        yield protocol.pretrain == "causal"


def requests(cell: Cell, spec: TaskSpec, protocol: Protocol, *, has_mask: bool) -> Iterator[tuple[str, Request]]:
    """Yield (variant, request) for everything that will be built."""
    position: Position = "none"
    if protocol.position == "rotary" or protocol.position == "alibi":
        position = protocol.position
    request = Request(has_key_padding_mask=has_mask, dropout_p=protocol.dropout_p, dtype=cell.dtype, device=cell.device)
    for is_causal in _directions(cell, spec, protocol):
        yield (cell.variant, replace(request, is_causal=is_causal, is_autoregressive=is_causal, position=position))
    if spec.kind == "seq2seq":
        yield protocol.cross_variant or cell.variant, replace(request, is_cross=True)


def require(cell: Cell, spec: TaskSpec, protocol: Protocol, *, has_mask: bool) -> None:
    """Raise `UnsupportedError` for what the variant, or training itself, refuses; arguments as in `requests`."""
    if cell.is_causal and spec.kind not in ("token_classification", "causal_lm"):
        raise UnsupportedError("causal", f"is_causal: a task of kind {spec.kind} does not leave the direction open")
    if protocol.pretrain and spec.kind in ("causal_lm", "seq2seq"):
        raise UnsupportedError("pretrain", f"pretrain: a model for {spec.kind} has no encoder over one input")
    for variant, request in requests(cell, spec, protocol, has_mask=has_mask):
        options = cell.options if variant == cell.variant else {}
        capabilities_of(variant, options).require(variant, request)
    weight_dtype(cell.dtype)
