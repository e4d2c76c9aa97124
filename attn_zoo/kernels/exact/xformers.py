"""Exact attention by xformers, an optional peer: whether it works is tried by running it, not by importing it.

Lefaudeux et al. 2022, https://github.com/facebookresearch/xformers. Its wheels import on machines where none of their
operators can run.
"""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from types import ModuleType

import torch
from torch import Tensor

from attn_zoo.kernels.trace import note_path


def _quiet_import(name: str) -> ModuleType:
    """Import without the package's warnings on standard error: what matters comes back as a reason."""
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    finally:
        logger.setLevel(level)


def why_not(query: Tensor, *, needs_grad: bool) -> str | None:
    """Return why xformers cannot attend with queries of this device, dtype and head size, or None; tried only once."""
    return _probe(query.device, query.dtype, query.shape[-1], needs_grad)


@functools.cache
def _probe(device: torch.device, dtype: torch.dtype, head_dim: int, needs_grad: bool) -> str | None:
    try:
        ops = _quiet_import("xformers.ops")
    except ImportError as error:
        return f"xformers cannot be imported ({error}); pip install 'attn-zoo[xformers]'"
    except Exception as error:  # half installed, or made for another torch
        return f"xformers cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    probe = torch.zeros(1, 16, 1, head_dim, device=device, dtype=dtype, requires_grad=needs_grad)
    try:
        with torch.set_grad_enabled(needs_grad):
            output = ops.memory_efficient_attention(probe, probe, probe)
            if needs_grad:
                output.sum().backward()
    except torch.OutOfMemoryError:  # which passes: no reason to be remembered
        raise
    except AttributeError:
        return "this release of xformers has no memory_efficient_attention (its kernels moved to another package)"
    except Exception as error:  # each operator has its own way to refuse
        return _summary(str(error), device, dtype)
    return None


def _summary(message: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return one line for xformers' list of refusals, one for each of its operators."""
    if not message.startswith("No operator found"):
        return f"xformers failed on {device.type} with {dtype}: {message.partition(chr(10))[0]}"
    lines = [line.strip() for line in message.splitlines()]
    reasons = dict.fromkeys(line for line in lines if line.startswith(("device=", "dtype=", "requires device")))
    return f"xformers has no operator for {device.type} and {dtype}: {'; '.join(list(reasons)[:2]) or 'all refuse'}"


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, dropout_p: float) -> Tensor:
    """Return exact attention `[B, H, L, D]` by `xformers.ops.memory_efficient_attention`.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        is_causal: hide keys j > i + S - L.
        dropout_p: probability of dropping a weight.
    """
    note_path("xformers")
    ops = _quiet_import("xformers.ops")
    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if is_causal else None
    # xformers wants [B, L, H, D].
    output: Tensor = ops.memory_efficient_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_bias=bias, p=dropout_p
    )
    return output.transpose(1, 2)
