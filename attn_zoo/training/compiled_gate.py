"""The gate of a compiled training: its gradients are those of the model as written.

A mechanism is checked as written (`conformance.gate_model`). What torch's compiler makes of it is other code, and has
been wrong: NaN in bfloat16 on a CPU with AVX-512 (seen in torch 2.13). Unchecked, the mechanism would be called
diverged, or be trained by wrong gradients.

Compiled, dropout draws other numbers, so gradients cannot be compared digit by digit. They may differ by as much as two
draws of the model as written do, and by what rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from attn_zoo.errors import GateError

CHECK = "compiled_gradients"
"""The name of the check in records."""

Gradients = Mapping[str, Tensor]
"""By parameter."""

DEVIATIONS = 3.0
"""Standard deviations that one draw may be from the mean of others; most are 1.2 from the mean of two."""

OWN_SHARE, SHARE_OF_ALL = 0.15, 0.02
"""What rounding may do: of the norm of a parameter's gradient, and of the norm of all gradients.

In bfloat16 compiled gradients of seven mechanisms were off by 1.5 % at most, on a CPU, and a choice by the data may
fall otherwise. The second is for gradients that would be zero but for rounding, such as that of a bias of the keys,
which softmax does not see.
"""

MAX_PAIRS = 6
"""Pairs of draws of the model as written, before the compiled one is called wrong."""


def check_gradients(compiled: Gradients, draw: Callable[[int], Gradients]) -> tuple[str, ...]:
    """Compare the gradients of one batch; return the name of the check, or nothing where nothing can be compared.

    Args:
        compiled: those of the compiled model.
        draw: returns those of the model as written, with the dropout of this number.

    Raises:
        GateError: they differ by more than draws and rounding explain.
    """
    draws: list[Gradients] = []
    ratio, name = math.inf, ""
    for pair in range(MAX_PAIRS):
        draws += [draw(2 * pair), draw(2 * pair + 1)]
        if not all(bool(gradient.isfinite().all()) for drawn in draws[-2:] for gradient in drawn.values()):
            return ()  # the model itself diverges, and training will say so
        ratio, name = largest_ratio(compiled, draws)
        if ratio <= 1:
            return (CHECK,)
        if math.isinf(ratio):
            break
    how = "is not finite" if math.isinf(ratio) else f"is off by {ratio:.2g} times what dropout and rounding explain"
    text = f"compiled, the gradient of {name} {how}; as written it is right: train with compile = false"
    raise GateError(CHECK, f"{text} (torch {torch.__version__})")


def largest_ratio(found: Gradients, draws: Sequence[Gradients]) -> tuple[float, str]:
    """Return the largest distance between a parameter's gradient and the mean of `draws`, and the parameter.

    It is in units of what is allowed, and infinite where a number is not finite.
    """
    means = {name: torch.stack([draw[name].float() for draw in draws]).mean(0) for name in found}
    norm_of_all = math.hypot(*(float(mean.norm()) for mean in means.values()))

    def ratio(name: str) -> float:
        mean = means[name]
        variance = sum(float((draw[name].float() - mean).norm()) ** 2 for draw in draws) / (len(draws) - 1)
        allowed = DEVIATIONS * math.sqrt(variance) + OWN_SHARE * float(mean.norm()) + SHARE_OF_ALL * norm_of_all
        distance = float((found[name].float() - mean).norm())
        return math.inf if math.isnan(distance) else distance / max(allowed, torch.finfo(torch.float32).tiny)

    return max((ratio(name), name) for name in found)
