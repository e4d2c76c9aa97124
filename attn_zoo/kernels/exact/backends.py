"""Which kernels of exact attention exist, what each refuses, and which one is preferred where. Nothing runs here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from attn_zoo.kernels.exact import flex_attention, xformers

__all__ = ["PREFERENCES", "Backend", "BiasRows", "Preference", "Problem", "choose", "why_not"]

Backend = Literal["auto", "math", "flash", "efficient", "cudnn", "flex", "xformers"]


class BiasRows(Protocol):
    """Makes what is added to the scaled scores of some rows: `attention.masks.score_bias` with its sizes bound."""

    def __call__(self, rows: range, *, num_keys: int, dtype: torch.dtype) -> Tensor:
        """Return `[B or 1, H or 1, len(rows) or 1, num_keys]`, minus infinity where a key is hidden."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One call of exact attention.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        is_causal: hide keys j > i + S - L; needs L <= S.
        key_padding_mask: bool `[B, S]`, True = padding.
        slopes: `[H]` of ALiBi, or None.
        bias_rows: all of the above that hides or biases, as an additive bias for a few rows at a time.
        dropout_p: probability of dropping a weight; 0 outside training.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    key_padding_mask: Tensor | None
    slopes: Tensor | None
    bias_rows: BiasRows
    dropout_p: float

    @property
    def has_alibi_or_offset(self) -> bool:
        """Whether ALiBi or a causal mask with L != S is wanted: kernels' own causal flag is aligned top left."""
        return self.slopes is not None or (self.is_causal and self.query.shape[2] != self.key.shape[2])

    @property
    def has_bias(self) -> bool:
        """Whether anything beyond a kernel's causal flag is added to the scores."""
        return self.has_alibi_or_offset or self.key_padding_mask is not None

    @property
    def has_row_bias(self) -> bool:
        """Whether that bias differs between query rows, so that it cannot be broadcast over them."""
        return self.has_bias and (self.is_causal or self.slopes is not None)

    @property
    def needs_grad(self) -> bool:
        """Whether backward can follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """One row of the table that `auto` follows: the first row that matches, its first backend that can serve.

    Args:
        device: `"cpu"` or `"cuda"`.
        capability: CUDA major version, or None for any.
        has_bias: for calls with padding, ALiBi or a causal mask with L != S; None for both.
        order: backends, best first.
        source: where the order comes from.
    """

    device: str
    capability: int | None = None
    has_bias: bool | None = None
    order: tuple[Backend, ...]
    source: str


PREFERENCES: tuple[Preference, ...] = (
    Preference(
        device="cpu",
        order=("flash", "math"),
        source="torch 2.13 on CPU: flash serves four dtypes, bool and float masks, forward and backward, in linear "
        "memory. Measured on one core, lengths 32 to 2048: forward level with math to 6 times faster, forward and "
        "backward 1.1 to 4 times faster; only the bfloat16 backward is slower below length 512",
    ),
    Preference(
        device="cuda",
        has_bias=True,
        order=("efficient", "math"),
        source="flash takes no mask; a mask makes cuDNN 2 to 9 times slower (github.com/unslothai/unsloth/pull/11102)",
    ),
    Preference(
        device="cuda",
        capability=9,
        order=("cudnn", "flash", "efficient", "math"),
        source="H100, H200: cuDNN 1.7 to 2.3 times faster than flash (github.com/huggingface/transformers/pull/48163)",
    ),
    Preference(
        device="cuda",
        order=("flash", "efficient", "cudnn", "math"),
        source="A100: cuDNN at 0.82 of flash (same); newer than Hopper: wrong results for few key/value heads "
        "(github.com/pytorch/pytorch/issues/193893)",
    ),
)


def _device_type(problem: Problem) -> str:
    return problem.query.device.type


def _outside_cuda(problem: Problem) -> str | None:
    device = _device_type(problem)
    return None if device == "cuda" else f"it runs on CUDA devices only, and these tensors are on {device}"


def _gate(
    problem: Problem, can_use: Callable[[torch.backends.cuda.SDPAParams, bool], bool], *, is_grouped: bool
) -> str | None:
    """Ask torch's own gate, so that our rule cannot drift from it; its warnings are the reason."""
    num_rows, num_keys = problem.query.shape[2], problem.key.shape[2]
    mask = None
    if problem.has_bias:  # one row stands for all: gates look at type, strides and last dimension
        mask = problem.bias_rows(range(1), num_keys=num_keys, dtype=problem.query.dtype).expand(-1, -1, num_rows, -1)
    key, value = problem.key, problem.value
    if not is_grouped and key.shape[1] != problem.query.shape[1]:
        key, value = (x[:, :1].expand(-1, problem.query.shape[1], -1, -1) for x in (key, value))
    is_causal = problem.is_causal and not problem.has_bias
    params = torch.backends.cuda.SDPAParams(problem.query, key, value, mask, problem.dropout_p, is_causal, is_grouped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if can_use(params, True):
            return None
    reasons = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
    return "; ".join(reasons) or "torch's own check refuses this call"


def _why_not_flash(problem: Problem) -> str | None:
    if _device_type(problem) == "cpu":
        return "the CPU kernel has no dropout" if problem.dropout_p > 0 else None
    if reason := _outside_cuda(problem):
        return reason
    if problem.has_bias:
        return "the CUDA kernel takes no mask, and padding, ALiBi and a causal mask with L != S need one"
    is_grouped = problem.key.shape[1] != problem.query.shape[1]
    return _gate(problem, torch.backends.cuda.can_use_flash_attention, is_grouped=is_grouped)


def _why_not_efficient(problem: Problem) -> str | None:
    return _outside_cuda(problem) or _gate(problem, torch.backends.cuda.can_use_efficient_attention, is_grouped=False)


def _why_not_cudnn(problem: Problem) -> str | None:
    is_grouped = problem.key.shape[1] != problem.query.shape[1]
    return _outside_cuda(problem) or _gate(problem, torch.backends.cuda.can_use_cudnn_attention, is_grouped=is_grouped)


def _why_not_flex(problem: Problem) -> str | None:
    return flex_attention.why_not(problem.query, needs_grad=problem.needs_grad, dropout_p=problem.dropout_p)


def _why_not_xformers(problem: Problem) -> str | None:
    if problem.key_padding_mask is not None or problem.slopes is not None:
        return "it is offered for calls without key_padding_mask and ALiBi only"
    return xformers.why_not(problem.query, needs_grad=problem.needs_grad)


_WHY_NOT: dict[str, Callable[[Problem], str | None]] = {
    "math": lambda problem: None,  # noqa: ARG005 - dense torch operations run everywhere
    "flash": _why_not_flash,
    "efficient": _why_not_efficient,
    "cudnn": _why_not_cudnn,
    "flex": _why_not_flex,
    "xformers": _why_not_xformers,
}


def why_not(backend: str, problem: Problem) -> str | None:
    """Return the reason why `backend` cannot serve `problem`, or None when it can."""
    return _WHY_NOT[backend](problem)


def choose(problem: Problem) -> str:
    """Return the backend that `PREFERENCES` names for `problem`; `"math"` on devices without a row."""
    device = problem.query.device
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    for row in PREFERENCES:
        if (
            row.device == device.type
            and row.capability in (None, capability)
            and row.has_bias in (None, problem.has_bias)
        ):
            return next(backend for backend in row.order if why_not(backend, problem) is None)
    return "math"
