"""What variants say about themselves, stored with a run so that a report can print it without loading a variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_zoo.registry import variants

__all__ = ["claims_of"]


def claims_of(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return exponents, formulas and exactness as claimed, by name; names that are not registered are left out."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(set(names) & set(variants)):
        complexity = variants[name].complexity
        found[name] = {
            "time_exponent": complexity.time_exponent,
            "memory_exponent": complexity.memory_exponent,
            "time": complexity.time,
            "memory": complexity.memory,
            "is_exact": variants[name].capabilities.is_exact,
        }
    return found
