"""Where calls may be replayed: on a GPU. What replays them (`replay.py`) needs triton, and is nothing to a CPU."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def replays_on(device_type: str) -> Any:
    """Return the module that replays calls where kernels of ours are launched, in the interpreter too, or None."""
    if find_spec("triton") is None or not (device_type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    from attn_zoo.kernels import replay

    return replay
