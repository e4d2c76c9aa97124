"""What can be checked of a cell at its own length, from the output of its first call alone.

The gate compares whole outputs and gradients at short lengths. A kernel may still go wrong at a long one: an index that
overflows, a last block that is never written. Checking all of a long output would cost more than the cell; some rows
of exact attention cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import GateError
from attn_zoo.metadata import Form
from attn_zoo.registry import Variant, VariantConfig

NUM_ROWS, NUM_HEADS = 8, 2
CHUNK_LEN = 65_536
"""Keys that are converted to float64 at a time."""


@torch.no_grad()
def check_output(
    output: Tensor,
    inputs: Sequence[Tensor],
    *,
    variant: Variant,
    form: Form,
    build: BuildContext,
    config: VariantConfig | None = None,
    key_padding_mask: Tensor | None = None,
    is_random: bool = False,
) -> tuple[str, ...]:
    """Check one output; return the names of what was checked.

    * `own_shape`: shape and dtype are those of the first input, and every number is finite;
    * `own_rows`, for exact attention that draws nothing at random: some rows equal float64 softmax attention, up to
      rounding. Of an approximation no row is known without its reference, which would be dense: there the equality
      rests on the gate's lengths.

    Args:
        output: of one call.
        inputs: of that call: query, key and value, or hidden states.
        variant: the registry's entry.
        form: which form was called.
        build: what the module was built for.
        config: its options, which may narrow what it can do.
        key_padding_mask: of the call, True = padding.
        is_random: dropout acted.

    Raises:
        GateError: the output is wrong.
    """
    first = inputs[0]
    words = f"{form} form, {' '.join(f'{size}' for size in first.shape)} {str(first.dtype).removeprefix('torch.')}"
    if output.shape != first.shape or output.dtype != first.dtype:
        found = f"{tuple(output.shape)} {output.dtype}, expected {tuple(first.shape)} {first.dtype}"
        raise GateError("own_shape", f"{variant.name}: the output is {found} ({words})")
    # A finite sum has finite summands only, and takes no second tensor; a sum that overflows says nothing. In float64
    # it took ten times as long: every number is converted.
    if not bool(torch.isfinite(output.sum())) and not bool(torch.isfinite(output).all()):
        raise GateError("own_shape", f"{variant.name}: the output is not finite ({words})")
    capabilities = variant.capabilities if config is None else variant.capabilities_of(config)
    if form != "attention" or not capabilities.is_exact or is_random or build.position != "none":
        return ("own_shape",)
    query, key, value = inputs
    last = query.shape[-2] - 1
    rows = torch.tensor(sorted({last * step // (NUM_ROWS - 1) for step in range(NUM_ROWS)}), device=query.device)
    for index in range(min(NUM_HEADS, query.shape[1])):
        entry, head = index % query.shape[0], query.shape[1] - 1 if index else 0
        group = head * key.shape[1] // query.shape[1]
        mask = None if key_padding_mask is None else key_padding_mask[entry]
        expected = _rows(query[entry, head, rows], key[entry, group], value[entry, group], rows, build.is_causal, mask)
        actual = output[entry, head, rows]
        error = largest_error(actual, expected)
        allowed = rounding(expected, key.shape[-2] + key.shape[-1], query.dtype)
        if error > allowed:
            detail = f"rows of head {head} are off by {error:.2g}, allowed {allowed:.2g} ({words})"
            raise GateError("own_rows", f"{variant.name}: differs from float64 softmax attention: {detail}")
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
