"""Conformance: public, named promises that every registered variant must keep, and the gate before a timing.

`run_checks(name)` runs them all and says, for a broken one, the smallest call that shows it. `gate(...)` is the quick
subset that runs before anything is timed. `measure_complexity(name)` measures how cost, sequential operations and path
length grow. None of them knows any variant by name.
"""

from attn_zoo.conformance.check import CheckResult
from attn_zoo.conformance.checks.all_checks import CHECKS
from attn_zoo.conformance.checks.complexity import Growth, MeasuredComplexity, measure_complexity
from attn_zoo.conformance.gate import GATE_CHECKS, gate, gate_model
from attn_zoo.conformance.own_length import FirstCall, check_output
from attn_zoo.conformance.runner import run_checks

__all__ = [
    "CHECKS",
    "GATE_CHECKS",
    "CheckResult",
    "FirstCall",
    "Growth",
    "MeasuredComplexity",
    "check_output",
    "gate",
    "gate_model",
    "measure_complexity",
    "run_checks",
]
