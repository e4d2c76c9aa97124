"""softplus and elu of torch and, for its compiler, the same numbers by other operators.

While it traces, torch says that the gradients of these two lie in memory as their inputs do. They lie as the gradient
of the output, so a graph that runs as it was traced (`aot_eager`) fails at the next view of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def softplus(rows: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    return -functional.logsigmoid(-rows) if torch.compiler.is_compiling() else functional.softplus(rows)


def elu(rows: Tensor) -> Tensor:
    """Return x above zero and exp(x) - 1 below."""
    return rows.relu() + rows.clamp(max=0.0).expm1() if torch.compiler.is_compiling() else functional.elu(rows)
