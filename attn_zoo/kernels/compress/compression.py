"""Compression of a sequence to fewer positions, linear in memory: by a learned matrix, or pooled over windows.

    matrix:    out[m] = sum_j matrix[j, m] tokens[j]          (Linformer's E^T K and F^T V)
    mean:      out[w] = sum_{unpadded j in window w} tokens[j] / their number
    weighted:  out[w] = sum_{unpadded j in window w} weight[j mod width] tokens[j]

The weighted one is a convolution whose stride is its kernel. The first is a matrix product with a small result (k rows)
and a very long sum (S terms). Sums are kept in float32 at least, and in a fixed order, so results repeat bit for bit.
Nothing but the inputs is kept for the backward pass, where there is much of them.

Three paths compute that one. `"triton"`: our own kernels (`triton_kernels`), which read tokens where they lie; taken on
a GPU for 16-bit numbers at any size, where triton is installed. `"split_k"`: one batch of torch's products over chunks
of positions, on a GPU otherwise. `"chunked"`: chunk by chunk on a CPU; of a pair with little to cut one product each.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.cached_launch import kind_of, places_of, remembered
from attn_zoo.kernels.compress import products
from attn_zoo.kernels.compress.products import CompressCall
from attn_zoo.kernels.once_differentiable import once_differentiable
from attn_zoo.kernels.trace import note_path

Path = Literal["auto", "triton", "split_k", "chunked"]
Short = Literal["slice", "slice_renormalise", "interpolate"]

HAS_TRITON = find_spec("triton") is not None
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compress(tokens: Tensor, matrix: Tensor, *, key_padding_mask: Tensor | None = None, path: Path = "auto") -> Tensor:
    """Sum `tokens` over positions, weighted by the columns of `matrix`.

    Args:
        tokens: `[B, G, S, D]`, of any strides.
        matrix: `[B or 1, G or 1, S, k]`; a 1 is shared along that dimension. Or a learned one that all sequences share,
            `[G or 1, N, k]`, of which the first S rows serve.
        key_padding_mask: bool `[B, S]`, True = left out, whatever is stored there (NaN and infinity too).
        path: `"auto"`, or the one that must run.

    Returns:
        `[B, G, k, D]` in the dtype of `tokens`; sums are kept in float32 at least. Differentiable once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        UnsupportedError: the named path cannot serve this call. Another one is never taken in its place.

    >>> tokens = torch.tensor([[[[1.0], [2.0], [4.0]]]])
    >>> compress(tokens, torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])).flatten().tolist()
    [3.0, 4.0]
    """
    return _run(CompressCall((tokens,), (matrix,), key_padding_mask), path)[0]


def compress_pair(
    tokens: tuple[Tensor, Tensor],
    matrices: tuple[Tensor, Tensor],
    *,
    key_padding_mask: Tensor | None = None,
    path: Path = "auto",
) -> tuple[Tensor, Tensor]:
    """Compress keys and values, each with its own matrix or both with one, in one launch on a GPU.

    The same tensor given twice, as tokens or as matrix, gets one gradient, summed where it is computed.

    Args:
        tokens: two as in `compress`, of equal shape.
        matrices: two as in `compress`, of equal shape.
        key_padding_mask: as in `compress`.
        path: as in `compress`.

    Returns:
        Two `[B, G, k, D]`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        UnsupportedError: the named path cannot serve this call.
    """
    (one, other), (e, f) = tokens, matrices
    is_transformed = torch._C._are_functorch_transforms_active()  # by torch.func, which goes through operators only
    if path == "auto" and (is_transformed or _is_small(one, e)) and one.shape == other.shape and e.shape == f.shape:
        # Small calls take about as long as all that is decided below.
        note_path("compress.chunked")
        _check(one, e, key_padding_mask)
        first = products.multiply(one, e, key_padding_mask)
        if one is other and e is f:
            return first, first
        _check(other, f, key_padding_mask)
        return first, products.multiply(other, f, key_padding_mask)
    if torch.compiler.is_compiling():
        name, kind = path_of_pair(tokens, matrices, key_padding_mask, path), None
    else:  # decided once for calls of a kind: below some ten thousand tokens a GPU waits for the host
        signature = path, one is other, e is f, kind_of(one, other, e, f, key_padding_mask)
        name, kind = remembered(
            _kinds, signature, lambda: (path_of_pair(tokens, matrices, key_padding_mask, path), object())
        )
    if name is None:
        first, second = (
            compress(*pair, key_padding_mask=key_padding_mask, path=path) for pair in zip(tokens, matrices, strict=True)
        )
        return first, second
    call = CompressCall((one,) if one is other else tokens, (e,) if e is f else matrices, key_padding_mask, kind)
    results = _compute(name, call)
    return results[0], results[-1]


_kinds: dict[Hashable, tuple[str | None, Hashable]] = {}


def path_of_pair(
    tokens: tuple[Tensor, Tensor], matrices: tuple[Tensor, Tensor], mask: Tensor | None, path: Path
) -> str | None:
    """Return the path of a pair, or None where the two are too unlike for one launch; sizes are checked."""
    if not (_are_alike(*tokens) and _are_alike(*matrices)):
        return None
    _check(tokens[0], matrices[0], mask)
    return _choose(path, tokens[0])


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )


def fit_rows(
    weight: Tensor, key_len: int, rule: Short, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a learned matrix for sequences shorter than the length it was learned for.

    Lengths n are those without padding, so that padding a sequence further changes nothing.

    Args:
        weight: `[G or 1, N, k]`.
        key_len: S <= N.
        rule: `"slice"`, row j for position j; `"slice_renormalise"`, the same times sqrt(N / n); `"interpolate"`, the
            two rows nearest to (r + 1/2) N / n - 1/2 mixed linearly, r counting unpadded positions, times N / n.
        key_padding_mask: bool `[B, S]`, True = padding.

    Returns:
        Rows as `compress` takes them, `[G or 1, N, k]` or `[B or 1, G or 1, S, k]`, and the factor `[B or 1, 1, 1, 1]`
        (float64) to apply after it, or None.
        Only interpolation with padding needs rows of its own for each sequence: O(B S k) memory.
    """
    max_len = weight.shape[1]
    if rule == "slice":
        return weight, None
    if key_padding_mask is None:
        valid = torch.ones(1, key_len, dtype=torch.bool, device=weight.device)
    else:
        valid = ~key_padding_mask
    # Positions in float64: beyond 2^24 / k they are not exact in float32, and the factor is part of the mathematics.
    stretch = max_len / valid.sum(-1, keepdim=True).clamp(min=1).double()  # [B or 1, 1]
    if rule == "slice_renormalise":
        return weight, stretch.sqrt()[..., None, None]
    rank = valid.cumsum(-1) - 1
    source = ((rank + 0.5) * stretch - 0.5).clamp(0, max_len - 1)  # [B or 1, S]
    low = source.long()
    high = (low + 1).clamp(max=max_len - 1)
    rows = torch.lerp(weight[:, low], weight[:, high], (source - low)[..., None].to(weight.dtype))
    return rows.transpose(0, 1), stretch[..., None, None]


def _run(call: CompressCall, path: Path) -> tuple[Tensor, ...]:
    """Return one result for each pair.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        UnsupportedError: the named path cannot serve this call.
    """
    _check(call.tokens[0], call.matrices[0], call.mask)
    return _compute(_choose(path, call.tokens[0]), call)


def _compute(name: str, call: CompressCall) -> tuple[Tensor, ...]:
    """Return one result for each pair by the path `name`."""
    tokens = call.tokens[0]
    if tokens.shape[0] == 0:
        return tuple([products.multiply(*pair, call.mask) for pair in call.pairs])
    if name != "triton" and call.matrices[0].dim() == 3:  # our kernels take them as they are, which saves some views
        call = call._replace(matrices=tuple([matrix[None, :, : tokens.shape[2]] for matrix in call.matrices]))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*call.tokens, *call.matrices))
    if needs_grad or (name == "triton" and forward_ad._current_level >= 0):  # autograd refuses forward derivatives
        tensors = *call.tokens, *call.matrices
        results: tuple[Tensor, ...] = _Compress.apply(name, len(call.tokens), call.kind, call.mask, *tensors)
        return results
    return _forward(name, call)


def _check(tokens: Tensor, matrix: Tensor, mask: Tensor | None) -> None:
    batch_size, groups, key_len, _ = tokens.shape
    sizes = matrix.shape
    if len(sizes) == 3:
        fits = sizes[0] in (1, groups) and sizes[1] >= key_len
    else:
        fits = len(sizes) == 4 and sizes[0] in (1, batch_size) and sizes[1] in (1, groups) and sizes[2] == key_len
    if not fits:
        raise ValueError(
            f"matrix: expected [B or 1, G or 1, S, k] = [{batch_size} or 1, {groups} or 1, {key_len}, k], "
            f"or [G or 1, N, k] with N >= {key_len}; got {list(matrix.shape)}"
        )
    if matrix.dtype != tokens.dtype or matrix.device != tokens.device:
        raise ValueError(
            f"matrix: expected dtype and device of tokens ({tokens.dtype}, {tokens.device}); "
            f"got {matrix.dtype}, {matrix.device}"
        )
    expected = (tokens.shape[0], tokens.shape[2])
    if mask is not None and (mask.dtype != torch.bool or mask.shape != expected):
        raise ValueError(
            f"key_padding_mask: expected bool [B, S] = {list(expected)}; got {mask.dtype} {list(mask.shape)}"
        )


def _is_small(tokens: Tensor, matrix: Tensor) -> bool:
    """Tell whether so little is multiplied that calling takes longer, by operators that sum wide by themselves."""
    if torch.compiler.is_compiling() or not tokens.is_cpu:
        return False
    batch_size, groups, length, _ = tokens.shape
    is_few = batch_size * groups * length * matrix.shape[-1] <= products.SMALL
    return is_few and tokens.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")


def _choose(path: Path, tokens: Tensor) -> str:
    """Return the path to run: the one named, if it can, or by device and dtype alone, at any size."""
    if path == "auto":
        if not tokens.is_cuda:
            return "chunked"
        is_narrow = tokens.dtype in (torch.bfloat16, torch.float16)  # float32 has plain multiply-adds only
        return "triton" if is_narrow and not _why_not_triton(tokens) else "split_k"
    reason = None
    if path == "triton":
        reason = _why_not_triton(tokens)
    elif tokens.is_cuda != (path == "split_k"):
        reason = f"tokens are on {tokens.device}"
    if reason:
        raise UnsupportedError("path", f"compression by {path!r} cannot serve this call: {reason}")
    return path


def _why_not_triton(tokens: Tensor) -> str | None:
    if not HAS_TRITON:
        return "the package triton is not installed"
    if tokens.dtype not in TRITON_DTYPES:
        return f"no kernel for {tokens.dtype}"
    if tokens.numel() == 0:
        return "there is nothing to sum"
    if tokens.is_cuda:
        return None if torch.cuda.get_device_properties(tokens.device).major >= 8 else "needs compute capability 8.0"
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "not on a GPU, and TRITON_INTERPRET=1 is not set"


def _module(path: str) -> Any:
    """Return what computes a path: two functions of a call."""
    if path != "triton":
        return products
    from attn_zoo.kernels.compress import triton_launch

    return triton_launch


def _forward(path: str, call: CompressCall) -> tuple[Tensor, ...]:
    note_path(f"compress.{path}")
    return tuple(_module(path).compress(call))


class _Compress(torch.autograd.Function):
    """The learned compression. Keeps its inputs for the backward pass and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, path: str, num_tokens: int, kind: Hashable, mask: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.path, ctx.num_tokens, ctx.kind, ctx.places = path, num_tokens, kind, _places_of(mask, *tensors)
        ctx.save_for_backward(mask, *tensors)
        return _forward(path, CompressCall(tensors[:num_tokens], tensors[num_tokens:], mask, kind))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask, *tensors = saved = ctx.saved_tensors
        num_tokens = ctx.num_tokens
        kind = ctx.kind if _places_of(*saved) == ctx.places else None  # hooks on saved tensors may move them
        call = CompressCall(tuple(tensors[:num_tokens]), tuple(tensors[num_tokens:]), mask, kind)
        _, _, _, _, *needed = ctx.needs_input_grad
        of_tokens, of_matrices = True in needed[:num_tokens], True in needed[num_tokens:]
        found = _module(ctx.path).gradients(call, grads, of_tokens=of_tokens, of_matrices=of_matrices)
        before = () if of_tokens else (None,) * num_tokens
        after = () if of_matrices else (None,) * len(call.matrices)
        return None, None, None, None, *before, *found, *after


def _places_of(*tensors: Tensor | None) -> tuple[Hashable, ...] | None:
    return None if torch.compiler.is_compiling() else places_of(*tensors)


def pool_windows(
    tokens: Tensor, width: int, weight: Tensor | None = None, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Pool `tokens` over windows of `width` positions, the last of which may be shorter.

    Args:
        tokens: `[B, G, S, D]`.
        width: positions in a window.
        weight: `[G or 1, width]` for weighted sums, in the dtype of `tokens`; None for means.
        key_padding_mask: bool `[B, S]`, True = left out, whatever is stored there (NaN and infinity too).

    Returns:
        `[B, G, ceil(S / width), D]`; zero for a window that holds only padding.

    >>> pool_windows(torch.tensor([1.0, 3.0, 5.0]).reshape(1, 1, 3, 1), 2).flatten().tolist()
    [2.0, 5.0]
    """
    note_path("pool.mean" if weight is None else "pool.weighted")
    length = tokens.shape[2]
    if key_padding_mask is not None:
        tokens = tokens.masked_fill(key_padding_mask[:, None, :, None], 0.0)
    whole = length // width * width
    parts = []
    if whole:
        parts.append(_sum(tokens[:, :, :whole].unflatten(2, (-1, width)), weight))
    if whole < length:  # taken apart, so that nothing long is copied to make it fit
        parts.append(_sum(tokens[:, :, None, whole:], weight))
    sums = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    if weight is not None:
        return sums
    counts = window_counts(length, width, key_padding_mask=key_padding_mask, device=tokens.device)
    return (sums / counts.clamp(min=1)[:, None, :, None]).to(tokens.dtype)


def _sum(windows: Tensor, weight: Tensor | None) -> Tensor:
    """Return `[B, G, n, D]` from windows `[B, G, n, width, D]`."""
    if weight is None:
        return windows.sum(dim=3, dtype=torch.promote_types(windows.dtype, torch.float32))
    row = weight[:, None, None, : windows.shape[3]]  # [G or 1, 1, 1, width]
    return (row @ windows).squeeze(3)


def window_counts(key_len: int, width: int, *, key_padding_mask: Tensor | None, device: torch.device) -> Tensor:
    """Return how many unpadded positions each window holds, int64 `[B or 1, ceil(S / width)]`."""
    window = torch.arange(key_len, device=device) // width
    valid = torch.ones(1, key_len, device=device) if key_padding_mask is None else ~key_padding_mask
    counts = torch.zeros(valid.shape[0], -(-key_len // width), dtype=torch.long, device=device)
    return counts.scatter_add_(1, window.expand(valid.shape), valid.long())


def window_matrix(
    key_len: int, width: int, weight: Tensor | None, *, key_padding_mask: Tensor | None, like: Tensor
) -> Tensor:
    """Return the dense `[B or 1, G or 1, S, ceil(S / width)]` that `pool_windows` amounts to, for the reference.

    Dtype and device are those of `like`. O(S^2 / width) memory.
    """
    position = torch.arange(key_len, device=like.device)
    window = torch.arange(-(-key_len // width), device=like.device)
    inside = (position[:, None] // width == window)[None, None]  # [1, 1, S, windows]
    if key_padding_mask is not None:
        inside = inside & ~key_padding_mask[:, None, :, None]
    if weight is not None:
        return inside.to(like.dtype) * weight[None, :, position % width, None]
    return (inside.double() / inside.sum(-2, keepdim=True).clamp(min=1)).to(like.dtype)
