"""Block-sparse attention: the engine behind every variant whose pattern is made of blocks.

A variant names a `PatternLayout`, or makes a `BlockPattern` of its data, and calls `block_sparse_attention`. Three
paths compute it:

* `gather`: any device and dtype, linear in time and memory, dropout and ALiBi included (`gather.py`);
* `flex`: PyTorch's FlexAttention on a GPU, with a block mask built directly from the table (`flex.py`);
* `triton`: our own kernels on a GPU, dropout and ALiBi included, compiled once for all lengths (`triton/`).

To torch's compiler a call is one operator, forward and backward: a compiler that looked inside would draw a layout's
pattern anew at every call, because it ignores caches of Python, and would stop at every decision that reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.blocks.call import Backend, BlockCall, choose_path, wide_dtype
from attn_zoo.kernels.blocks.gather import gather_backward, gather_forward
from attn_zoo.kernels.blocks.layout import PatternLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, TokenRule
from attn_zoo.kernels.cached_launch import kind_of, places_of, remembered
from attn_zoo.kernels.exact.sdpa import exact_attention
from attn_zoo.kernels.gpu_replays import replays_on
from attn_zoo.kernels.once_differentiable import once_differentiable


@cache
def _triton() -> Any:
    """Return the module of the launches, which needs triton; to import it at every call takes the host longer."""
    from attn_zoo.kernels.blocks.triton import launch

    return launch


def _forward(path: Backend, call: BlockCall) -> tuple[Tensor, Tensor | None]:
    """Return the output and the log-sum-exp of the scores where the call wants it or backward needs it."""
    if path == "triton":
        result: tuple[Tensor, Tensor] = _triton().triton_forward(call)
        return result
    if path == "flex":
        from attn_zoo.kernels.blocks.flex import flex_forward

        return flex_forward(call)
    return gather_forward(call)


def _backward(
    path: Backend,
    call: BlockCall,
    grad_output: Tensor | None,
    grad_lse: Tensor | None,
    output: Tensor | None,
    lse: Tensor | None,
    *,
    is_moved: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; inputs and results may lie elsewhere than in the forward pass."""
    if grad_output is None or grad_output.numel() == 0:  # an empty one counts as contiguous, so it would stay expanded
        grad_output = torch.zeros_like(call.query)
    if grad_output.stride(-1) != 1:  # the gradient of a sum, for instance, is one number expanded
        grad_output = grad_output.contiguous()
    if path == "triton":
        gradients: tuple[Tensor, Tensor, Tensor] = _triton().triton_backward(
            call, grad_output, output, lse, grad_lse, is_moved=is_moved
        )
        return gradients
    if path == "flex":
        from attn_zoo.kernels.blocks.flex import flex_backward

        return flex_backward(call, grad_output, grad_lse)
    return gather_backward(call, grad_output, output, lse, grad_lse)


class _BlockAttention(torch.autograd.Function):
    """The paths whose backward is driven by hand; FlexAttention brings its own."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        path: Backend,
        rest: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor | None]:
        call = BlockCall(query, key, value, padding, *rest)
        output, lse = _forward(path, call)
        is_read = lse is not None and not (path == "gather" and call.has_lse)
        saved = query, key, value, padding, output if is_read else None, lse if is_read else None
        ctx.save_for_backward(*saved)
        ctx.path, ctx.rest, ctx.places = path, rest, places_of(*saved)
        ctx.set_materialize_grads(False)
        return output, lse if call.has_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        is_moved = places_of(*saved) != ctx.places
        if is_moved:  # hooks on saved tensors, such as those that offload them, may change how they lie in memory
            saved = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in saved]
        *inputs, output, lse = saved
        call = BlockCall(*inputs, *ctx.rest)
        gradients = _backward(ctx.path, call, grad_output, grad_lse, output, lse, is_moved=is_moved)
        return *gradients, None, None, None


def _differentiate_replayed(
    rest: tuple[Any, ...], saved: Sequence[Any], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and padding, from what a call by our kernels saved, unmoved."""
    *inputs, output, lse = saved
    return *_backward("triton", BlockCall(*inputs, *rest), grad_output, None, output, lse, is_moved=False), None


# The operator. A pattern is its two tables and some numbers, or the name of a layout's class and its fields.
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? padding, Tensor? slopes, Tensor? seed, Tensor? indices, "
    "Tensor? counts, str layout, SymInt[] numbers, float dropout_p, str backend, "
    "bool has_lse, bool needs_grad, int num_threads"
)
_NUM_TENSORS = 8  # of these


def _as_numbers(pattern: BlockPattern | PatternLayout) -> tuple[Tensor | None, Tensor | None, str, list[int]]:
    """Return a pattern as arguments of the operator."""
    if isinstance(pattern, PatternLayout):
        return None, None, pattern.name, [int(getattr(pattern, name)) for name in pattern.field_names()]
    rule = pattern.rule
    numbers = [pattern.block_size, pattern.num_global, pattern.num_dense_rows]
    numbers += [int(pattern.is_causal), int(pattern.is_dynamic)]
    if rule is not None:
        numbers += [rule.reach, rule.dilation, rule.stride, rule.num_global_tokens]
    return pattern.indices, pattern.counts, "", numbers


def _as_pattern(
    query: Tensor, key: Tensor, indices: Tensor | None, counts: Tensor | None, layout: str, numbers: Sequence[int]
) -> BlockPattern:
    """Return the pattern that the operator was given."""
    if indices is None or counts is None:
        kind = PatternLayout.classes[layout]
        fields = zip(kind.__dataclass_fields__.values(), numbers, strict=True)
        given = {field.name: bool(number) if field.type in (bool, "bool") else number for field, number in fields}
        return kind(**given).pattern(str(query.device))
    block_size, num_global, num_dense_rows, is_causal, is_dynamic, *rule = numbers
    return BlockPattern(
        query.shape[2],
        key.shape[2],
        block_size,
        num_global,
        num_dense_rows,
        indices,
        counts,
        is_causal=bool(is_causal),
        rule=TokenRule(*rule) if rule else None,
        is_dynamic=bool(is_dynamic),
    )


def _as_call(*given: Any) -> tuple[Backend, BlockCall]:
    """Return the path and the call that the operator's arguments stand for."""
    query, key, value, padding, slopes, seed, *table, dropout_p, backend, has_lse, needs_grad, num_threads = given
    pattern = _as_pattern(query, key, *table)
    tensors = query, key, value, padding, slopes
    path, kind = _path_and_kind(*tensors, pattern, dropout_p, backend, needs_grad=needs_grad, is_compiled=True)
    return path, BlockCall(query, key, value, padding, pattern, slopes, dropout_p, seed, has_lse, kind, num_threads)


@torch.library.custom_op(
    "attn_zoo::block_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor output, Tensor lse)"
)
def _operator(*given: Any) -> tuple[Tensor, Tensor]:
    output, lse = _forward(*_as_call(*given))
    return output, _operator_fake(*given)[1] if lse is None else lse


@_operator.register_fake
def _operator_fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))


@torch.library.custom_op(
    "attn_zoo::block_attention_backward",
    mutates_args=(),
    schema="(Tensor? grad_output, Tensor? grad_lse, Tensor output, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _operator_backward(
    grad_output: Tensor | None, grad_lse: Tensor | None, output: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(*_as_call(*given), grad_output, grad_lse, output, lse)


@_operator_backward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given[4:7]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rest = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (None,) * (_NUM_TENSORS - 3 + len(ctx.rest))
    if grad_output is None and grad_lse is None:
        return None, None, None, *others
    return *_operator_backward(grad_output, grad_lse, *ctx.saved_tensors, *ctx.rest), *others


_operator.register_autograd(_differentiate, setup_context=_save)


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern | PatternLayout,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    slopes: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute softmax attention over the pairs that `pattern` shows; scores are scaled by D ** -0.5.

    Cost: time O(pairs D); memory beyond inputs, outputs and gradients O(B H L) and buffers of about one head.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, H, S, D]`.
        value: `[B, H, S, D]`.
        pattern: a layout, whose pattern is made once and kept; or a pattern for L and S, on the device of `query`, with
            1 or B batch entries and 1 head or a divisor of H.
        key_padding_mask: bool `[B, S]`, True = padding.
        dropout_p: probability of dropping an attention weight.
        slopes: ALiBi's `[H]`; the bias of a pair is minus the slope times the distance of the positions.
        backend: a path; `"auto"` takes the first of `"triton"`, `"flex"` and `"gather"` that can serve the call, or
            exact attention's kernel where a layout hides nothing, nor do padding, dropout or slopes change a weight.
            Under torch's compiler, which does not look at a pattern, that is not asked, and there is no `"flex"`.

    Returns:
        `[B, H, L, D]`; zeros where a query sees no key that is not padding.

    Raises:
        ValueError: sizes do not fit: of the pattern, keys, values or mask.
        UnsupportedError: `backend` names a path that cannot serve the call; it is never replaced by the other. Or
            `torch.func` transforms the call.
    """
    return _attend(query, key, value, pattern, key_padding_mask, slopes, dropout_p, backend, has_lse=False)[0]


def block_sparse_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern | PatternLayout,
    *,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute `block_sparse_attention`, and the log-sum-exp of each query's scores, for `merge_attention`.

    Returns:
        The output `[B, H, L, D]`, and the natural logarithm `[B, H, L]` in float32 (float64 for such inputs), minus
        infinity where a query sees no key. Both have gradients.
    """
    output, lse = _attend(query, key, value, pattern, key_padding_mask, None, dropout_p, backend, has_lse=True)
    assert lse is not None
    return output, lse


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BlockPattern | PatternLayout,
    padding: Tensor | None,
    slopes: Tensor | None,
    dropout_p: float,
    backend: Backend,
    *,
    has_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if torch.compiler.is_compiling():
        # Where the inputs are, so that nothing waits for it; the gather path alone reads it on the host.
        seed = torch.randint(1 << 62, (1,), device=query.device) if dropout_p else None
        given = (*_as_numbers(pattern), dropout_p, backend, has_lse, needs_grad, _num_threads())
        compiled: tuple[Tensor, Tensor] = _operator(query, key, value, padding, slopes, seed, *given)
        return compiled
    if torch._C._are_functorch_transforms_active():
        reason = (
            "block-sparse attention reads memory, and its backward is written by hand: torch.func (vmap, grad, jvp) "
        )
        reason += "cannot go through; use torch.autograd.grad, or the `reference` of the variant"
        raise UnsupportedError("torch.func", reason)
    replays = None
    if isinstance(pattern, PatternLayout):
        is_plain = slopes is None and not dropout_p and not has_lse
        if is_plain and backend in ("auto", "triton") and (replays := replays_on(query.device.type)):
            token = remembered(_tokens, (pattern, backend), object)
            if (known := replays.replay(token, query, key, value, padding)) is not None:
                return known, None
        pattern = pattern.pattern(str(query.device))
        if is_plain and padding is None and backend == "auto" and pattern.shows_all:  # too short to hide anything
            return exact_attention(query, key, value, score_bias=_no_bias, is_causal=pattern.is_causal), None
    tensors = query, key, value, padding, slopes
    path, kind = _path_and_kind(*tensors, pattern, dropout_p, backend, needs_grad=needs_grad)
    # The seed comes from PyTorch's generator, as dropout does; the draws that follow are repeatable from it.
    seed = torch.randint(1 << 62, (1,), device=query.device if path == "triton" else "cpu") if dropout_p else None
    rest = pattern, slopes, dropout_p, seed, has_lse, kind, torch.get_num_threads()
    call = BlockCall(query, key, value, padding, *rest)
    if replays and path == "triton":

        def forward() -> tuple[Tensor, tuple[Tensor | None, ...]]:
            output, lse = _forward(path, call)
            return output, (query, key, value, padding, output, lse)

        tables = pattern.indices, pattern.counts, *(pattern.transposed if needs_grad else ())
        backward = partial(_differentiate_replayed, rest)
        learned = replays.learn(token, kind, (query, key, value, padding), forward, backward, tables)
        if learned is not None:
            return learned, None
    if path == "flex" or not (needs_grad or forward_ad._current_level >= 0):  # forward derivatives are refused below
        output, lse = _forward(path, call)
        return output, lse if has_lse else None
    attended: tuple[Tensor, Tensor | None] = _BlockAttention.apply(query, key, value, padding, path, rest)
    return attended


def _num_threads() -> int:
    return torch.get_num_threads()


# The compiler, which cannot trace it, takes for a constant what it returns while tracing.
_num_threads._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _no_bias(*_: object, **__: object) -> Tensor:
    raise AssertionError("nothing is hidden but by the kernel's own causal flag")


_paths: dict[Hashable, tuple[Backend, Hashable]] = {}
_tokens: dict[Hashable, object] = {}  # by layout, whose pattern may have been given up and be made anew, and backend


def _path_and_kind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    slopes: Tensor | None,
    pattern: BlockPattern,
    dropout_p: float,
    backend: Backend,
    *,
    needs_grad: bool,
    is_compiled: bool = False,
) -> tuple[Backend, Hashable]:
    """Return the path that serves a call, and the call's kind, an object; sizes are checked when it is met first."""
    wanted = dropout_p, backend, needs_grad, is_compiled

    def choose() -> tuple[Backend, Hashable]:
        _check_sizes(query, key, value, padding, pattern, slopes)
        return choose_path(query, pattern.block_size, *wanted), object()

    return remembered(_paths, (pattern.sizes, wanted, kind_of(query, key, value, padding, slopes)), choose)


def _check_sizes(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, pattern: BlockPattern, slopes: Tensor | None
) -> None:
    (batch_size, num_heads, query_len, _), key_len = query.shape, key.shape[2]
    if key.shape[:2] != query.shape[:2]:
        expected = f"[B, H, S, D] with B = {batch_size}, H = {num_heads}; got {list(key.shape)}"
        raise ValueError(f"key: expected {expected}: repeat those of grouped queries for each head (expand_kv_heads)")
    sizes = [batch_size, num_heads, key_len, query.shape[3]]
    for name, tensor in (("key", key), ("value", value)):
        if list(tensor.shape) != sizes:
            raise ValueError(f"{name}: expected [B, H, S, D] = {sizes}; got {list(tensor.shape)}")
    if padding is not None and (padding.shape != (batch_size, key_len) or padding.device != key.device):
        expected = f"[B, S] = {[batch_size, key_len]} on {key.device}"
        raise ValueError(f"key_padding_mask: expected {expected}; got {list(padding.shape)} on {padding.device}")
    (batch_entries, tables), lengths = pattern.counts.shape[:2], (pattern.query_len, pattern.key_len)
    if lengths != (query_len, key_len) or batch_entries not in (1, batch_size) or num_heads % tables:
        raise ValueError(
            f"pattern: expected one for L = {query_len}, S = {key_len}, H = {num_heads}, B = {batch_size}; "
            f"got L = {lengths[0]}, S = {lengths[1]}, H = {tables}, B = {batch_entries}"
        )
    if slopes is not None and (key_len - query_len) % pattern.block_size:
        raise ValueError(f"slopes: expected key_len - query_len to be a multiple of {pattern.block_size}")
