"""Block-sparse attention as one operator that torch's compiler takes whole, forward and backward.

A compiler that looked inside would draw the pattern anew at every call, because it ignores caches of Python, and would
stop at every decision that reads it. Loaded only where something is compiled; eager calls go straight to a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_zoo.kernels.blocks.call import Backend, block_sparse_attention, choose_path
from attn_zoo.kernels.blocks.gather.walk import GatherPlan, gather_backward, gather_forward
from attn_zoo.kernels.blocks.layout import BlockLayout, layout_pattern
from attn_zoo.kernels.blocks.pattern import BlockPattern

__all__ = ["operator_attention"]

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? padding, Tensor? slopes, Tensor? seed, "
    "SymInt[] layout, int[] draw, float dropout_p, str backend"
)
_NUM_TENSORS = 6  # of these
_NUMBERS = tuple(BlockLayout.__dataclass_fields__)[:-3]  # the last three are two flags and the reach
_NO_REACH = -1


@dataclass(frozen=True)
class _Call:
    """What the operators are given, and what it stands for."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    slopes: Tensor | None
    seed: Tensor | None
    layout: Sequence[int]
    draw: Sequence[int]
    dropout_p: float
    backend: Backend

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    @property
    def pattern(self) -> BlockPattern:
        *numbers, is_permuted, is_causal, reach = self.layout
        layout = BlockLayout(
            **dict(zip(_NUMBERS, numbers, strict=True)),
            is_permuted=bool(is_permuted),
            is_causal=bool(is_causal),
            reach=None if reach == _NO_REACH else reach,
        )
        return layout_pattern(layout, self.draw[0], tuple(self.draw[1:]), str(self.query.device))

    @property
    def path(self) -> Backend:
        return choose_path(self.query, self.pattern, dropout_p=self.dropout_p, backend=self.backend)

    @property
    def plan(self) -> GatherPlan:
        seed = 0 if self.seed is None else int(self.seed)
        return GatherPlan(self.pattern, self.scale, self.slopes, self.dropout_p, seed)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run the call as it would run eagerly."""
        return block_sparse_attention(
            query, key, value, self.pattern, key_padding_mask=self.padding, slopes=self.slopes, backend=self.backend
        )


@torch.library.custom_op(
    "attn_zoo::block_sparse_layout", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor output, Tensor lse)"
)
def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    call = _Call(*given)
    query, key, value = call.query, call.key, call.value
    if call.path == "triton":
        from attn_zoo.kernels.blocks.triton.operands import operands

        found: tuple[Tensor, Tensor] = torch.ops.attn_zoo.block_sparse_forward(
            query, key, value, call.padding, call.slopes, call.seed, *operands(call.pattern), call.scale, call.dropout_p
        )
        return found
    unused = _forward_fake(*given)[1]
    if call.path == "gather":
        output, lse = gather_forward(query, key, value, call.padding, call.plan)
        return output, unused if lse is None else lse
    return call.run(query, key, value), unused


@_forward.register_fake
def _forward_fake(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "attn_zoo::block_sparse_layout_backward",
    mutates_args=(),
    schema=f"(Tensor grad_output, Tensor output, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(grad_output: Tensor, output: Tensor, lse: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call(*given)
    inputs = call.query, call.key, call.value
    if call.path == "triton":
        from attn_zoo.kernels.blocks.triton.operands import operands

        found: tuple[Tensor, Tensor, Tensor] = torch.ops.attn_zoo.block_sparse_backward(
            grad_output,
            output,
            lse,
            *inputs,
            call.padding,
            call.slopes,
            call.seed,
            *operands(call.pattern),
            call.scale,
            call.dropout_p,
        )
        return found
    if call.path == "gather":
        return gather_backward(grad_output, *inputs, call.padding, output, lse, call.plan)
    # FlexAttention has nothing to hand over, so it runs again.
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        again = call.run(*leaves)
    grad_query, grad_key, grad_value = torch.autograd.grad(again, leaves, grad_output)
    return grad_query, grad_key, grad_value


@_backward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = given[3:6]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rest = inputs[_NUM_TENSORS:]
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    others = (None,) * (_NUM_TENSORS - 3 + len(ctx.rest))
    if grad_output is None:
        return None, None, None, *others
    return *_backward(grad_output, *ctx.saved_tensors, *ctx.rest), *others


_forward.register_autograd(_differentiate, setup_context=_save)


def operator_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout,
    draw: Sequence[int],
    *,
    key_padding_mask: Tensor | None,
    dropout_p: float,
    slopes: Tensor | None,
    backend: Backend,
) -> Tensor:
    """Compute what `layout_attention` does, with the same arguments, as one operator."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    # Where the inputs are, so that nothing waits for it; the gather path alone reads it on the host.
    seed = torch.randint(1 << 62, (1,), device=query.device) if dropout_p else None
    numbers = [getattr(layout, name) for name in _NUMBERS]
    reach = _NO_REACH if layout.reach is None else layout.reach
    numbers += [int(layout.is_permuted), int(layout.is_causal), reach]
    output, _ = _forward(query, key, value, key_padding_mask, slopes, seed, numbers, list(draw), dropout_p, backend)
    result: Tensor = output
    return result
