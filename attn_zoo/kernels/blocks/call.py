"""One call of block-sparse attention, as every path takes it, which path can serve it, and how results are merged."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks.pattern import BlockPattern

Backend = Literal["auto", "gather", "flex", "triton"]


class BlockCall(NamedTuple):
    """What forward and backward are computed from; a tuple, because one is made for every call.

    Args:
        query: `[B, H, L, D]`, features side by side in memory.
        key: `[B, H, S, D]`, likewise.
        value: `[B, H, S, D]`, likewise.
        padding: bool `[B, S]`, True = padding, or None.
        pattern: which pairs are seen, on the device of the query.
        slopes: ALiBi's `[H]`, or None.
        dropout_p: probability of dropping a weight.
        seed: int64 `[1]`, of the draws of dropout, or None.
        has_lse: the log-sum-exp of the scores is a result too, with a gradient.
        kind: the same for calls that are cut alike by the same kernels; None, and nothing is remembered of it.
        num_threads: that pieces on a CPU are cut for, in backward as in forward, which may run on another thread.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    pattern: BlockPattern
    slopes: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    has_lse: bool = False
    kind: Hashable = None
    num_threads: int = 1

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.query.shape[-1] ** -0.5)


# What `auto` tries, in order. Of the two on a GPU, FlexAttention compiles for every length and computes the global
# columns in a second pass whose result it merges; neither has been timed against the other yet.
_ORDER: tuple[Backend, ...] = ("triton", "flex", "gather")

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLEX_MIN_HEAD_DIM = 16
_FLEX_MIN_BLOCK_SIZE = 16
_TRITON_SIZES = (16, 32, 64, 128)  # a matrix product has 16 rows at least, and tiles have to fit into shared memory
_MOST_PROGRAMS = 65_535  # of a grid's second and third dimension
_TRITON_CAPABILITY = (8, 0)  # Ampere, for bfloat16 and asynchronous copies


@cache
def _backward_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Return the tile of FlexAttention's backward, which torch takes from a table, whatever tiles a call names.

    Blocks that it does not divide have no kernel at all ("NoValidChoicesError"). 1 where torch does not say.
    """
    from torch._inductor.virtualized import V

    try:
        configs = V.choices.get_flex_attention_bwd_configs(head_dim, dtype, "cuda")
        sizes = [max(each.block_m1, each.block_n1, each.block_m2, each.block_n2) for each in configs]
    except (AttributeError, TypeError):  # another version of torch
        return 1
    return min(sizes, default=1)


def why_not_flex(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    dropout_p: float = 0.0,
    *,
    needs_grad: bool = False,
) -> str | None:
    """Return the sentence that says why FlexAttention cannot serve a call, or None when it can."""
    if device.type != "cuda":
        return f"FlexAttention needs a CUDA device, as it has no backward elsewhere; got {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "FlexAttention needs the package triton, which is not installed"
    if dropout_p:
        return f"FlexAttention has no dropout; got dropout_p = {dropout_p}"
    if dtype not in _GPU_DTYPES:
        return f"FlexAttention runs in float32, bfloat16 and float16; got {dtype}"
    if head_dim < _FLEX_MIN_HEAD_DIM:
        return f"FlexAttention needs head_dim >= {_FLEX_MIN_HEAD_DIM}; got {head_dim}"
    if block_size < _FLEX_MIN_BLOCK_SIZE or block_size & (block_size - 1):
        return f"FlexAttention needs block_size a power of two >= {_FLEX_MIN_BLOCK_SIZE}; got {block_size}"
    if needs_grad and block_size % (tile := _backward_tile(head_dim, dtype)):
        return f"FlexAttention's backward needs block_size a multiple of {tile} on this device; got {block_size}"
    return None


def why_not_triton(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Return the sentence that says why our Triton kernels cannot serve a call, or None when they can."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not is_interpreted:
        return f"backend 'triton' needs a CUDA device; got {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "backend 'triton' needs the package triton, which is not installed"
    if not is_interpreted and torch.cuda.get_device_capability(device) < _TRITON_CAPABILITY:
        least, actual = _TRITON_CAPABILITY, torch.cuda.get_device_capability(device)
        return f"backend 'triton' needs a GPU of compute capability {least[0]}.{least[1]}; got {actual[0]}.{actual[1]}"
    if dtype not in _GPU_DTYPES:
        return f"backend 'triton' runs in float32, bfloat16 and float16; got {dtype}"
    if head_dim not in _TRITON_SIZES:
        return f"backend 'triton' needs head_dim in {_TRITON_SIZES}; got {head_dim}"
    if block_size not in _TRITON_SIZES:
        return f"backend 'triton' needs block_size in {_TRITON_SIZES}; got {block_size}"
    return None


_NOT_COMPILED = "FlexAttention brings a compiled kernel and a gradient of its own, which no compiled graph can hold"


def choose_path(
    query: Tensor, block_size: int, dropout_p: float, backend: Backend, needs_grad: bool, is_compiled: bool
) -> Backend:
    """Return the path that serves a call, inside a graph of torch's compiler or not; see `block_sparse_attention`."""
    sizes = query.device, query.dtype, query.shape[-1], block_size
    most = max(query.shape[0], query.shape[1])
    too_many = f"backend 'triton' takes at most {_MOST_PROGRAMS} sequences and heads; got {most}"
    reasons: dict[str, Callable[[], str | None]] = {
        "triton": lambda: too_many if most > _MOST_PROGRAMS else why_not_triton(*sizes),
        "flex": lambda: _NOT_COMPILED if is_compiled else why_not_flex(*sizes, dropout_p, needs_grad=needs_grad),
        "gather": lambda: None,
    }
    if backend == "auto":
        return next(path for path in _ORDER if reasons[path]() is None)
    if (reason := reasons[backend]()) is not None:
        raise UnsupportedError("backend", reason)
    return backend


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that sums of `dtype` are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Merge the outputs of softmax attention over disjoint keys into that over all of them.

    Args:
        outputs: `[..., D]` each.
        lses: log-sum-exp of the scores `[...]`, natural; minus infinity where a query sees none of those keys.

    Returns:
        `[..., D]` in the dtype of the outputs; zeros where a query sees no key at all.
    """
    if len(outputs) == 1:
        return outputs[0]
    highest = torch.stack([lse.detach() for lse in lses]).amax(0)
    highest = highest.masked_fill(highest.isneginf(), 0.0)
    shares = [(lse - highest).exp()[..., None] for lse in lses]
    total = torch.stack(shares).sum(0).clamp_min(torch.finfo(highest.dtype).tiny)
    merged = sum(share / total * output.to(share.dtype) for share, output in zip(shares, outputs, strict=True))
    return torch.as_tensor(merged).to(outputs[0].dtype)
