"""Exact attention by the kernel that was asked for, or by the fastest one that serves the call.

Dao et al. 2022, "FlashAttention", arXiv 2205.14135: softmax can be computed block by block, so that the scores are
never stored. Every path here is exact; they differ in time, memory and what they accept. `backends.py` has the rule.
The kernel is chosen once for each signature of a call, called so that torch cannot take another, and noted
(`kernels.trace`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.exact import few_keys, flex_attention, varlen, xformers
from attn_zoo.kernels.exact.backends import (
    DENSE_DROPOUT,
    PINS,
    Backend,
    ExactCall,
    ScoreBias,
    choose_without_mask,
    sdpa_arguments,
    select,
    select_while_compiling,
    why_not,
)
from attn_zoo.kernels.exact.operators import OPERATORS
from attn_zoo.kernels.exact.row_chunks import attend_rows, guard_empty_rows, weights_with_dropout
from attn_zoo.kernels.trace import note_path

_Attend = Callable[[ExactCall], Tensor]
_Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, bool], Tensor]
"""(query, key, value, additive bias, dropout_p, is_causal) -> output."""

MAX_SIGNATURES = 1024  # remembered; decoding has a new one at every length
_remembered: dict[tuple[object, ...], _Attend] = {}


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_bias: ScoreBias,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """Return softmax(Q K^T / sqrt(D) + bias) V, `[B, H, L, D]`; rows that see no key are zero.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`; at padded positions anything, NaN and infinities too.
        value: `[B, G, S, D]`, likewise.
        score_bias: `attention.masks.score_bias`; called only where a kernel's own flags do not say it all.
        is_causal: hide keys j > i + S - L; needs L <= S.
        key_padding_mask: bool `[B, S]`, True = padding.
        slopes: `[H]` of ALiBi.
        dropout_p: probability of dropping a weight; pass 0 outside training.
        backend: `"auto"`, or the kernel that must run.

    Raises:
        UnsupportedError: the named backend cannot serve this call. Another one is never taken in its place.
    """
    if is_causal and query.shape[2] == 1:  # the last query sees everything
        is_causal = False
    if torch.compiler.is_compiling():
        call = ExactCall(query, key, value, is_causal, key_padding_mask, slopes, dropout_p, score_bias)
        return _attend_by(*select_while_compiling(backend, call), call)(call)
    signature: tuple[object, ...] = (
        backend,
        query.shape,
        key.shape,
        query.dtype,
        query.device,
        is_causal,
        key_padding_mask is None,
        slopes is None,
        dropout_p,
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
    )
    if query.is_cuda:
        signature += (query.stride(), key.stride(), value.stride(), *cuda_switches())
    attend = _remembered.get(signature)
    if type(attend) is partial and attend.func is _unbiased:  # short calls wait for what is made beside the kernel's
        kernel: _Kernel = attend.args[0]
        return kernel(query, key, value, None, dropout_p, is_causal)
    call = ExactCall(query, key, value, is_causal, key_padding_mask, slopes, dropout_p, score_bias)
    if attend is None:
        attend = _attend_by(*select(backend, call), call)
        if len(_remembered) >= MAX_SIGNATURES:
            _remembered.clear()
        _remembered[signature] = attend
    return attend(call)


# What `torch.backends` and `torch.are_deterministic_algorithms_enabled` return, without their wrappers.
_CUDA_SWITCHES: tuple[Callable[[], object], ...] = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_deterministic,
    torch._C._get_deterministic_algorithms,
)


def cuda_switches() -> tuple[object, ...]:
    """Return the global settings that torch's own checks look at."""
    return *[switch() for switch in _CUDA_SWITCHES], *torch._C._get_sdp_priority_order()


def _attend_by(name: str, reason: str | None, call: ExactCall) -> _Attend:
    """Return what computes calls with the signature of `call` by the kernel `name`.

    Raises:
        UnsupportedError: there is a reason why it cannot.
    """
    if reason:
        raise UnsupportedError("backend", f"backend {name!r} cannot serve this call: {reason}")
    if name == "unmasked":
        name = choose_without_mask(call)
        if call.key_padding_mask is not None and call.query.shape[0]:
            return partial(_unmasked, name)
    if name == "varlen" and call.query.shape[0]:
        return _varlen
    attend = _attend_at_every_key(name, call)
    return attend if call.key_padding_mask is None else partial(_harmless, attend)


def _attend_at_every_key(name: str, call: ExactCall) -> _Attend:
    """Return what computes calls with the signature of `call` by a kernel that reads padded keys and values too."""
    if call.query.shape[0] == 0:  # fused kernels of a GPU refuse an empty batch, and there is nothing to compute
        return _with_kernel(_math, call)
    if name == DENSE_DROPOUT:
        return _dropout
    if name == "flex":
        return _flex
    if name == "xformers":
        return _xformers
    can_split = name in OPERATORS and call.query.device.type != "cpu" and call.needs_grad
    if can_split and not call.has_bias and not call.is_causal:
        parts = few_keys.num_parts(call.query, call.key)
        if parts > 1:
            return _in_parts(name, call, parts)
    return _with_kernel(_kernel_of(name, call), call)


def _kernel_of(name: str, call: ExactCall) -> _Kernel:
    """Return what runs torch's kernel `name` for calls like this one."""
    if name == "math":
        return _math
    if call.query.device.type == "cpu":
        return _cpu_flash
    if _is_torchs_choice(name, call):
        return partial(_torch_choice, f"sdpa.{name}", call.is_grouped)
    return partial(_operator if _has_operator(name, call) else _pinned, name)


def _has_operator(name: str, call: ExactCall) -> bool:
    """Tell whether calls like this one can go to an operator itself; the compiler chooses for itself."""
    is_plain = not call.has_bias and not call.is_grouped and call.query.shape[-1] % 8 == 0
    return name in OPERATORS and is_plain and not torch.compiler.is_compiling()


def _in_parts(name: str, call: ExactCall, parts: int) -> _Attend:
    """Return what attends to few keys in so many parts by the kernel `name`, as one node of autograd where it can."""
    short = call
    if not torch.compiler.is_compiling():  # which has no tensors to ask about
        with torch.no_grad():
            query, key, value = few_keys.split(call.query, call.key, call.value, parts)
        short = call._replace(query=query, key=key, value=value)
        if why_not(name, short) is not None:
            return _with_kernel(_kernel_of(name, call), call)
    kernel = _kernel_of(name, short)

    def by_function(call: ExactCall) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return kernel(query, key, value, None, call.dropout_p, False)

        return few_keys.attend_in_parts(call.query, call.key, call.value, attend, parts)

    def by_operator(call: ExactCall) -> Tensor:
        if torch.is_autocast_enabled(call.query.device.type):  # which knows the public function only
            return by_function(call)
        inputs = call.query, call.key, call.value
        output = few_keys.attend_by_operator(*inputs, OPERATORS[name], dropout_p=call.dropout_p, parts=parts)
        note_path(f"sdpa.{name}")
        return output

    return by_operator if _has_operator(name, short) else by_function


def _with_kernel(kernel: _Kernel, call: ExactCall) -> _Attend:
    """Return what gives the kernel the bias that calls like this one need."""
    if not call.has_bias:
        return partial(_unbiased, kernel)
    if call.has_alibi_or_offset or (call.is_causal and kernel is not _cpu_flash):
        return partial(_with_row_bias, kernel)
    return partial(_padded, kernel)


# --- kernels of torch, each called so that no other can take its place ---


def _cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Run the operator itself, which unlike the public function takes a mask together with its causal flag."""
    note_path("sdpa.flash")
    query, key, value = _contiguous_rows(query, key, value)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = _as_autocast_would(query, key, value)
    operator = torch._scaled_dot_product_flash_attention_for_cpu
    if bias is None:  # a tenth of the host's time at small sizes
        return operator(query, key, value, dropout_p, is_causal)[0]
    return operator(query, key, value, dropout_p, is_causal, attn_mask=bias)[0]


def _math(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool) -> Tensor:
    note_path("sdpa.math")
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = _as_autocast_would(query, key, value)
    return torch._scaled_dot_product_attention_math(
        query, key, value, bias, dropout_p, is_causal, enable_gqa=_is_grouped(query, key)
    )[0]


def _torch_choice(
    path: str,
    is_grouped: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Tensor:
    """Run the public function, which for this signature takes the kernel that `path` names by itself."""
    note_path(path)
    if is_grouped:
        return scaled_dot_product_attention(query, key, value, bias, dropout_p, is_causal, enable_gqa=True)
    return scaled_dot_product_attention(query, key, value, bias, dropout_p, is_causal)


def _pinned(
    name: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Run the public function with exactly one kernel allowed."""
    is_grouped = _is_grouped(query, key)
    if is_grouped and name == "efficient":  # the only one that cannot group
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        is_grouped = False
    note_path(f"sdpa.{name}")
    query, key, value = _contiguous_rows(query, key, value)
    with sdpa_kernel(PINS[name]):
        return scaled_dot_product_attention(query, key, value, bias, dropout_p, is_causal, enable_gqa=is_grouped)


def _operator(
    name: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Run a kernel's own operator: to allow the public function only this one takes the host longer than to call it."""
    if bias is not None or torch.is_autocast_enabled(query.device.type):  # which knows the public function only
        return _pinned(name, query, key, value, bias, dropout_p, is_causal)
    note_path(f"sdpa.{name}")
    query, key, value = _contiguous_rows(query, key, value)
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return OPERATORS[name].forward(query, key, value, dropout_p, is_causal, needs_grad)[0]


def _is_torchs_choice(name: str, call: ExactCall) -> bool:
    """Tell whether torch would take the kernel `name` for calls like this one, so that it need not be forced."""
    is_called_so = not call.has_row_bias and all(x.stride(-1) == 1 for x in (call.query, call.key, call.value))
    if torch.compiler.is_compiling() or not is_called_so:
        return False
    arguments = sdpa_arguments(call, is_grouped=call.is_grouped)
    return int(torch._fused_sdp_choice(*arguments, enable_gqa=call.is_grouped)) == PINS[name].value


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    # Written as a branch: to the compiler, a comparison of sizes may be a symbol, which torch's functions refuse.
    return True if key.shape[1] != query.shape[1] else False  # noqa: SIM210


def _contiguous_rows(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors whose rows are D consecutive numbers, which fused kernels read."""
    if query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        return query, key, value
    # `contiguous` returns a single number as it is, whatever its stride, and the kernels then refuse that stride.
    packed = [x.clone(memory_format=torch.contiguous_format) for x in (query, key, value)]
    return packed[0], packed[1], packed[2]


def _as_autocast_would(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast casts the arguments of torch's public function; it does not know the operators behind it."""
    if query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return query.to(dtype), key.to(dtype), value.to(dtype)


# --- what a kernel's own flags do not say ---


def _harmless(attend: _Attend, call: ExactCall) -> Tensor:
    """Attend with keys and values that do no harm at padded positions once those get scores of minus infinity.

    A weight of zero does not hide a NaN or an infinity (0 * inf = NaN), in the output or in the gradients; a zero in
    its place does, for two copies. On a CPU three norms, which only read, mostly show that there is no need: no score
    exceeds |Q| |K| (Cauchy and Schwarz, Frobenius norms), so where that is finite, minus infinity hides every padded
    key, and a weight of zero every padded value. On a GPU the answer would have to be waited for.
    """
    query, key, value, padding = call.query, call.key, call.value, call.key_padding_mask
    assert padding is not None
    if key.device.type == "cpu" and not torch.compiler.is_compiling():
        with torch.no_grad():
            wide = torch.promote_types(key.dtype, torch.float32)
            norms = [float(torch.linalg.vector_norm(x, dtype=wide)) for x in (query, key, value)]
        largest = torch.finfo(wide).max
        # Of what kernels are given: autocast may narrow it, where scores are summed up in float32 all the same.
        narrow = torch.is_autocast_enabled("cpu") and key.dtype != torch.float64
        most = torch.finfo(torch.get_autocast_dtype("cpu")).max if narrow else largest
        if norms[0] * norms[1] <= largest and norms[1] <= most and norms[2] <= most:  # none is so where a NaN is
            return attend(call)
    hidden = padding[:, None, :, None]
    blank = key.masked_fill(hidden, 0.0)
    return attend(call._replace(key=blank, value=blank if value is key else value.masked_fill(hidden, 0.0)))


def _unbiased(kernel: _Kernel, call: ExactCall) -> Tensor:
    """Run a kernel whose own flags say all of a call."""
    return kernel(call.query, call.key, call.value, None, call.dropout_p, call.is_causal)


def _bias_dtype(kernel: _Kernel, query: Tensor) -> torch.dtype:
    """Return the type a kernel takes a bias in.

    The CPU kernel also takes a float32 bias with a 16-bit query, which keeps large biases exact; with a float64 query
    it would read it as float64 and give wrong results without an error.
    """
    return torch.promote_types(query.dtype, torch.float32) if kernel is _cpu_flash else query.dtype


def _padded(kernel: _Kernel, call: ExactCall) -> Tensor:
    """Run a kernel with padding alone, or with its own causal flag: one row of bias for all rows of a sequence."""
    padding, query = call.key_padding_mask, call.query
    assert padding is not None
    bias = padding.to(_bias_dtype(kernel, query)).masked_fill_(padding, float("-inf"))
    bias = bias[:, None, None, :]
    if kernel is _cpu_flash:  # it reads a broadcast bias in place, and gives zeros for rows that see nothing
        return kernel(query, call.key, call.value, bias, call.dropout_p, call.is_causal)
    bias, is_empty = guard_empty_rows(bias)
    output = kernel(query, call.key, call.value, bias, call.dropout_p, False)
    return output if is_empty is None else output.masked_fill(is_empty, 0.0)


def _with_row_bias(kernel: _Kernel, call: ExactCall) -> Tensor:
    """Run a kernel with a bias that differs between rows, made for as many of them at a time as fit."""
    dtype = _bias_dtype(kernel, call.query)

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: range) -> Tensor:
        bias, is_empty = _bias_of(call, rows, key.shape[2], dtype), None
        # Without padding every row sees its own position. The CPU kernel itself gives zeros for rows that see nothing;
        # opened up they would see padding, whose scores may be so large that its backward overflows.
        if call.key_padding_mask is not None and kernel is not _cpu_flash:
            bias, is_empty = guard_empty_rows(bias)
        output = kernel(query, key, value, bias, call.dropout_p, False)
        return output if is_empty is None else output.masked_fill(is_empty, 0.0)

    if kernel is _math or call.dropout_p > 0:  # dense is what it says; and one call must draw all of the dropout
        return attend(call.query, call.key, call.value, range(call.query.shape[2]))
    batch_size = 1 if call.key_padding_mask is None else call.query.shape[0]
    num_heads = 1 if call.slopes is None else call.query.shape[1]
    entries_per_row = batch_size * num_heads * call.key.shape[2]
    return attend_rows(
        call.query, call.key, call.value, attend, scores_per_row=entries_per_row, is_causal=call.is_causal
    )


def _bias_of(call: ExactCall, rows: range, num_keys: int, dtype: torch.dtype) -> Tensor:
    return call.score_bias(
        rows,
        call.query.shape[2],
        call.key.shape[2],
        is_causal=call.is_causal,
        key_padding_mask=call.key_padding_mask,
        slopes=call.slopes,
        num_keys=num_keys,
        dtype=dtype,
        device=call.query.device,
    )


def _dropout(call: ExactCall) -> Tensor:
    """Dropout where no fused kernel has it: dense, a chunk of rows at a time."""
    note_path("dropout.dense")
    # One number from torch's global stream decides the call: `torch.manual_seed` governs it as any other dropout.
    seed = torch.randint(1 << 62, ())
    wide = torch.promote_types(call.query.dtype, torch.float32)
    has_bias = call.has_bias or call.is_causal
    query, key, value = call.expanded()

    def attend(query: Tensor, key: Tensor, value: Tensor, rows: range) -> Tensor:
        bias = _bias_of(call, rows, key.shape[2], wide) if has_bias else None
        return weights_with_dropout(query, key, value, rows, bias=bias, dropout_p=call.dropout_p, seed=seed)

    scores_per_row = query.shape[0] * query.shape[1] * key.shape[2]
    return attend_rows(query, key, value, attend, scores_per_row=scores_per_row, is_causal=call.is_causal)


# --- kernels of others ---


def _unmasked(name: str, call: ExactCall) -> Tensor:
    """Attend without a mask by torch's kernel `name`."""
    from attn_zoo.kernels.exact import unmasked  # needs Triton

    assert call.key_padding_mask is not None
    note_path(f"unmasked.{name}")
    inputs = _contiguous_rows(call.query, call.key, call.value)
    if torch.is_autocast_enabled(call.query.device.type):
        inputs = _as_autocast_would(*inputs)
    padding = call.key_padding_mask
    return unmasked.attend(*inputs, key_padding_mask=padding, operator=OPERATORS[name], dropout_p=call.dropout_p)


def _varlen(call: ExactCall) -> Tensor:
    return varlen.attend(
        call.query,
        call.key,
        call.value,
        is_causal=call.is_causal,
        key_padding_mask=call.key_padding_mask,
        dropout_p=call.dropout_p,
    )


def _flex(call: ExactCall) -> Tensor:
    return flex_attention.attend(
        *call.expanded(), is_causal=call.is_causal, key_padding_mask=call.key_padding_mask, slopes=call.slopes
    )


def _xformers(call: ExactCall) -> Tensor:
    return xformers.attend(*call.expanded(), is_causal=call.is_causal, dropout_p=call.dropout_p)
