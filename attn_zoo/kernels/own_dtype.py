"""Products in the dtype of their operands, whatever autocast would make of them.

Autocast narrows every product inside it. What runs over a whole sequence, or chooses by a comparison, widens its
operands on purpose, and is to stay so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_own_dtype(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function of tensors that autocast does not reach; one of its arguments is a tensor."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run
