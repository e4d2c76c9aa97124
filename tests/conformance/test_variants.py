"""Every registered variant passes every check: new variants are covered by being registered."""

from __future__ import annotations

import pytest

import attn_zoo
from attn_zoo.conformance import CHECKS, run_checks


# `device` is asked more sharply in its own tests.
@pytest.mark.parametrize("check", [check.name for check in CHECKS if check.name != "device"])
@pytest.mark.parametrize("name", attn_zoo.list_variants())
def test_keeps_its_promises(name: str, check: str) -> None:
    (result,) = run_checks(name, checks=[check])
    assert not result.is_bad, f"{result.outcome}: {result.message} ({result.example})"
    assert result.outcome == "passed" or result.message, "an outcome other than passed says why"
