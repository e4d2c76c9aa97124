"""All checks, in the order in which they are run and printed: the simplest promises first.

Side effects are looked for before all others: some happen at the first call of a process only.
"""

from __future__ import annotations

from attn_zoo.conformance.check import Check
from attn_zoo.conformance.checks.backward import CHECKS as BACKWARD
from attn_zoo.conformance.checks.carry import CHECKS as CARRY
from attn_zoo.conformance.checks.claims import CHECKS as CLAIMS
from attn_zoo.conformance.checks.complexity import CHECKS as COMPLEXITY
from attn_zoo.conformance.checks.cost_claims import CHECKS as COSTS
from attn_zoo.conformance.checks.decoding import CHECKS as DECODING
from attn_zoo.conformance.checks.device import CHECKS as DEVICE
from attn_zoo.conformance.checks.dropout_rate import CHECKS as DROPOUT_RATE
from attn_zoo.conformance.checks.independence import CHECKS as INDEPENDENCE
from attn_zoo.conformance.checks.modes import CHECKS as MODES
from attn_zoo.conformance.checks.numerics import CHECKS as NUMERICS
from attn_zoo.conformance.checks.padding import CHECKS as PADDING
from attn_zoo.conformance.checks.randomness import CHECKS as RANDOMNESS
from attn_zoo.conformance.checks.shapes import CHECKS as SHAPES
from attn_zoo.conformance.checks.side_effects import CHECKS as SIDE_EFFECTS

CHECKS: tuple[Check, ...] = (
    *SIDE_EFFECTS,
    *SHAPES,
    *INDEPENDENCE,
    *PADDING,
    *BACKWARD,
    *NUMERICS,
    *MODES,
    *DECODING,
    *CARRY,
    *DEVICE,
    *RANDOMNESS,
    *DROPOUT_RATE,
    *CLAIMS,
    *COSTS,
    *COMPLEXITY,
)
"""Every promise that any variant must keep (`attn-zoo check NAME`)."""
