"""What tests of training share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_is_frozen() -> None:
    """Keep the collections of each training from looking through what was loaded since the tests began.

    Optimisers load torch's compiler. To look through that, and what it kept of tests that compile, took more than half
    of the time of a training as small as those of tests.
    """
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()
