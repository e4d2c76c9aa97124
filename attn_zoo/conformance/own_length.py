"""The first call of a cell, at its own length, and what can be checked of it from its output alone.

The gate compares whole outputs and gradients at short lengths. A kernel may still go wrong at a long one: an index that
overflows, a last block that is never written. Checking all of a long output would cost more than the cell; some rows
of exact attention cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import GateError
from attn_zoo.metadata import Capabilities

NUM_ROWS, NUM_HEADS = 8, 2
CHUNK_LEN = 65_536
"""Keys that are converted to float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """The first call of a cell.

    Args:
        module: in the mode of the cell.
        inputs: of the call.
        output: of the call, detached.
        has_graph: the call kept a graph.
        gradients: by name of an input or `"parameter NAME"`, from the gradient `grad_like(output)`; None without a
            backward.
    """

    module: Module
    inputs: Inputs
    output: Tensor
    has_graph: bool = False
    gradients: Mapping[str, Tensor | None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What the variant can do under the options of the cell."""
        capabilities = self.module.capabilities
        assert capabilities is not None  # every cell has a variant
        return capabilities

    @property
    def is_random(self) -> bool:
        """Whether dropout acted."""
        return self.module.training and self.module.build.dropout_p > 0

    def fault(self, check: str, message: str) -> GateError:
        """Return the error that names the variant and the call."""
        name = self.module.variant.name if self.module.variant else type(self.module).__name__
        return GateError(check, f"{name}: {message} ({self.inputs.words()})")


@torch.no_grad()
def check_output(first: FirstCall) -> tuple[str, ...]:
    """Check the output of the first call; return the names of what was checked.

    * `own_shape`: shape and dtype are those of the first input, and every number is finite;
    * `own_rows`, for exact attention that draws nothing at random: some rows equal float64 softmax attention, up to
      rounding. Of an approximation no row is known without its reference, which would be dense: there the equality
      rests on the gate's lengths.

    Raises:
        GateError: the output is wrong.
    """
    output, inputs, build = first.output, first.inputs, first.module.build
    like = inputs.tensors[0]
    if output.shape != like.shape or output.dtype != like.dtype:
        found = f"{tuple(output.shape)} {output.dtype}, expected {tuple(like.shape)} {like.dtype}"
        raise first.fault("own_shape", f"the output is {found}")
    # A finite sum has finite summands only, and takes no second tensor; a sum that overflows says nothing. In float64
    # it took ten times as long: every number is converted.
    if not bool(torch.isfinite(output.sum())) and not bool(torch.isfinite(output).all()):
        raise first.fault("own_shape", "the output is not finite")
    is_known = first.capabilities.is_exact and build.position == "none" and not first.is_random
    if inputs.form != "attention" or not is_known:
        return ("own_shape",)
    query, key, value = inputs.tensors
    last = query.shape[-2] - 1
    rows = torch.tensor(sorted({last * step // (NUM_ROWS - 1) for step in range(NUM_ROWS)}), device=query.device)
    for index in range(min(NUM_HEADS, query.shape[1])):
        entry, head = index % query.shape[0], query.shape[1] - 1 if index else 0
        group = head * key.shape[1] // query.shape[1]
        mask = None if inputs.key_padding_mask is None else inputs.key_padding_mask[entry]
        expected = _rows(query[entry, head, rows], key[entry, group], value[entry, group], rows, build.is_causal, mask)
        error, allowed = (
            largest_error(output[entry, head, rows], expected),
            rounding(expected, inputs.num_terms, query.dtype),
        )
        if error > allowed:
            detail = f"rows of head {head} are off by {error:.2g}, allowed {allowed:.2g}"
            raise first.fault("own_rows", f"differs from float64 softmax attention: {detail}")
    return ("own_shape", "own_rows")


def _rows(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, is_causal: bool, key_padding_mask: Tensor | None
) -> Tensor:
    """Return softmax(q K^T / sqrt(D)) V in float64 for some queries `[R, D]` at positions `rows` `[R]`."""
    scaled = query.double() * query.shape[-1] ** -0.5
    parts = [slice(start, start + CHUNK_LEN) for start in range(0, key.shape[0], CHUNK_LEN)]
    scores = torch.cat([scaled @ key[part].double().T for part in parts], dim=-1)  # [R, S]
    if is_causal:
        positions = torch.arange(key.shape[0], device=key.device)
        scores = scores.masked_fill(positions > rows[:, None], float("-inf"))
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.stack([weights[:, part] @ value[part].double() for part in parts]).sum(0)
