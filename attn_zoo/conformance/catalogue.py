"""All checks, in the order in which they are run and printed: the simplest promises first."""

from __future__ import annotations

from attn_zoo.conformance import (
    backward,
    carry,
    claims,
    complexity,
    costs,
    decoding,
    independence,
    numerics,
    padding,
    randomness,
    shapes,
)
from attn_zoo.conformance.check import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *shapes.CHECKS,
    *independence.CHECKS,
    *padding.CHECKS,
    *backward.CHECKS,
    *numerics.CHECKS,
    *decoding.CHECKS,
    *carry.CHECKS,
    *randomness.CHECKS,
    *claims.CHECKS,
    *costs.CHECKS,
    *complexity.CHECKS,
)
"""Every promise that any variant must keep (`attn-zoo check NAME`)."""
