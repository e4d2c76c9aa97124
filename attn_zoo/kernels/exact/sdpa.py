"""Exact attention by the kernel that was asked for, or by the fastest one that serves the call.

Dao et al. 2022, "FlashAttention", arXiv 2205.14135: softmax can be computed block by block, so that the scores are
never stored. Every path here is exact; they differ in time, memory and what they accept. `backends.py` has the rule.
The chosen kernel is pinned, so that torch cannot take another, and noted (`kernels.trace`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.exact import flex_attention, xformers
from attn_zoo.kernels.exact.backends import Backend, BiasRows, Problem, choose, why_not
from attn_zoo.kernels.exact.row_chunks import attend_rows, guard_empty_rows, weights_with_dropout
from attn_zoo.kernels.trace import note_path

__all__ = ["Backend", "BiasRows", "exact_attention"]

_PINS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_rows: BiasRows,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Return softmax(Q K^T / sqrt(D) + bias) V, `[B, H, L, D]`; rows that see no key are zero.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`, finite at padded positions too (`attention.masks.blank_padding`).
        value: `[B, G, S, D]`, likewise.
        bias_rows: `attention.masks.score_bias` with the sizes and the next three arguments bound; called only where a
            kernel's own flags do not say it all.
        is_causal: hide keys j > i + S - L; needs L <= S.
        key_padding_mask: bool `[B, S]`, True = padding.
        slopes: `[H]` of ALiBi.
        dropout_p: probability of dropping a weight; pass 0 outside training.
        backend: `"auto"`, or the kernel that must run.

    Raises:
        UnsupportedError: the named backend cannot serve this call. Another one is never taken in its place.
    """
    problem = Problem(
        query=query,
        key=key,
        value=value,
        is_causal=is_causal and query.shape[2] > 1,  # the last query sees everything
        key_padding_mask=key_padding_mask,
        slopes=slopes,
        bias_rows=bias_rows,
        dropout_p=dropout_p,
    )
    if backend != "auto":
        if reason := why_not(backend, problem):
            raise UnsupportedError("backend", f"backend {backend!r} cannot serve this call: {reason}")
        return _run(backend, problem)
    if dropout_p > 0 and (query.device.type == "cpu" or problem.has_row_bias):
        return _dropout(problem)
    return _run(choose(problem), problem)


def _run(backend: str, problem: Problem) -> Tensor:
    if backend == "flex":
        return flex_attention.attend(
            *_expanded(problem),
            is_causal=problem.is_causal,
            key_padding_mask=problem.key_padding_mask,
            slopes=problem.slopes,
        )
    if backend == "xformers":
        return xformers.attend(*_expanded(problem), is_causal=problem.is_causal, dropout_p=problem.dropout_p)
    if backend == "flash" and problem.query.device.type == "cpu":
        return _flash_cpu(problem)
    if not problem.has_bias:
        return _pinned(backend, problem.query, problem.key, problem.value, problem.dropout_p, problem.is_causal)
    return _rows(backend, problem)


def _expanded(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with as many key/value heads as query heads: a copy where a kernel cannot group."""
    repeats = problem.query.shape[1] // problem.key.shape[1]
    if repeats == 1:
        return problem.query, problem.key, problem.value
    return problem.query, *(x.repeat_interleave(repeats, dim=1) for x in (problem.key, problem.value))  # type: ignore[return-value]


def _pinned(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Run torch's attention with exactly one kernel allowed."""
    is_grouped = key.shape[1] != query.shape[1]
    if is_grouped and backend == "efficient":  # the only one that cannot group
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        is_grouped = False
    note_path(f"sdpa.{backend}")
    query, key, value = _contiguous_rows(query, key, value)
    with sdpa_kernel(_PINS[backend]):
        return scaled_dot_product_attention(query, key, value, bias, dropout_p, is_causal, enable_gqa=is_grouped)


def _flash_cpu(problem: Problem) -> Tensor:
    """Run the CPU kernel, which reads a broadcast mask in place and gives zeros for rows that see nothing."""
    padding = problem.key_padding_mask
    if padding is None or problem.has_alibi_or_offset or not problem.is_causal:
        if problem.has_bias:
            return _rows("flash", problem)
        return _pinned("flash", problem.query, problem.key, problem.value, is_causal=problem.is_causal)
    # Causal and padded: the public function refuses a mask together with its causal flag, and would need an [L, S]
    # mask; the operator behind it takes both.
    note_path("sdpa.flash")
    bias = torch.zeros(padding.shape, dtype=_bias_dtype("flash", problem.query)).masked_fill(padding, float("-inf"))
    query, key, value = _contiguous_rows(problem.query, problem.key, problem.value)
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, attn_mask=bias[:, None, None]
    )[0]
    return output


def _contiguous_rows(*heads: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose rows are D consecutive numbers, which fused kernels read."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in heads)


def _bias_dtype(backend: str, query: Tensor) -> torch.dtype:
    """Return the type a kernel takes a bias in.

    The CPU kernel also takes a float32 bias with a 16-bit query, which keeps large biases exact; with a float64 query
    it would read it as float64 and give wrong results without an error.
    """
    is_cpu_flash = backend == "flash" and query.device.type == "cpu"
    return torch.promote_types(query.dtype, torch.float32) if is_cpu_flash else query.dtype


def _rows(backend: str, problem: Problem) -> Tensor:
    """Run a kernel with an additive bias, made for as many rows at a time as fit."""
    query, key, value = problem.query, problem.key, problem.value
    dtype = _bias_dtype(backend, query)

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: range) -> Tensor:
        bias = problem.bias_rows(rows, num_keys=key.shape[2], dtype=dtype)
        is_empty = None
        if problem.key_padding_mask is not None:  # without padding every row sees its own position
            bias, is_empty = guard_empty_rows(bias)
        output = _pinned(backend, query, key, value, problem.dropout_p, bias=bias)
        return output if is_empty is None else output.masked_fill(is_empty, 0.0)

    # The dense path is what it says; with dropout one call must draw all of it. A broadcast bias is one row.
    if backend == "math" or problem.dropout_p > 0 or not problem.has_row_bias:
        return attend(query, key, value, range(query.shape[2]))
    return attend_rows(
        query, key, value, attend, scores_per_row=_bias_entries_per_row(problem), is_causal=problem.is_causal
    )


def _bias_entries_per_row(problem: Problem) -> int:
    batch_size = 1 if problem.key_padding_mask is None else problem.query.shape[0]
    num_heads = 1 if problem.slopes is None else problem.query.shape[1]
    return batch_size * num_heads * problem.key.shape[2]


def _dropout(problem: Problem) -> Tensor:
    """Dropout where no fused kernel has it: dense, a chunk of rows at a time."""
    note_path("dropout.dense")
    # One number from torch's global stream decides the call: `torch.manual_seed` governs it as any other dropout.
    seed = torch.randint(1 << 62, ())
    wide = torch.promote_types(problem.query.dtype, torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: range) -> Tensor:
        bias = None
        if problem.has_bias or problem.is_causal:
            bias = problem.bias_rows(rows, num_keys=key.shape[2], dtype=wide)
        return dropout(query, key, value, rows, bias=bias)

    dropout = partial(weights_with_dropout, dropout_p=problem.dropout_p, seed=seed)
    query, key, value = _expanded(problem)
    return attend_rows(
        query,
        key,
        value,
        attend,
        scores_per_row=query.shape[0] * query.shape[1] * key.shape[2],
        is_causal=problem.is_causal,
    )
