"""What tests of variants share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> None:
    """Let a test that compiles begin anew: the compiler remembers which sizes varied in calls of other variants."""
    if "graph" in request.node.name:
        torch.compiler.reset()
