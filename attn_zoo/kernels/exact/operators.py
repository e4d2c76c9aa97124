"""Fused kernels of torch by their operators, which the public function chooses between, and by their gradients.

To allow the public function one kernel only takes the host longer than calling it. The operators take no mask, as many
heads of keys as of queries, and a head size that is a multiple of 8; they do not know autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
_output_lse_seed_offset = itemgetter(0, 1, 6, 7)


class Operator(NamedTuple):
    """A fused kernel.

    Args:
        forward: (query, key, value, dropout_p, is_causal, whether a gradient is wanted) -> the output, and what else
            the gradient needs.
        backward: (gradient, query, key, value, dropout_p, output, and what else the forward returned) -> the
            gradients of query, key and value, without a causal mask.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


# As torch's own formulas call them (derivatives.yaml). There None is a tensor that is not there: the mask, and where
# packed sequences begin.
OPERATORS = {
    "cudnn": Operator(
        lambda q, k, v, p, is_causal, needs_grad: _output_lse_seed_offset(
            torch._scaled_dot_product_cudnn_attention(q, k, v, None, needs_grad, p, is_causal)
        ),
        lambda grad, q, k, v, p, out, lse, seed, offset: _aten._scaled_dot_product_cudnn_attention_backward.default(
            grad, q, k, v, out, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], p, False
        ),
    ),
    "flash": Operator(
        lambda q, k, v, p, is_causal, _: _output_lse_seed_offset(
            torch._scaled_dot_product_flash_attention(q, k, v, p, is_causal)
        ),
        lambda grad, q, k, v, p, out, lse, seed, offset: _aten._scaled_dot_product_flash_attention_backward.default(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], p, False, seed, offset
        ),
    ),
    "efficient": Operator(
        lambda q, k, v, p, is_causal, needs_grad: torch._scaled_dot_product_efficient_attention(
            q, k, v, None, needs_grad, p, is_causal
        ),
        lambda grad, q, k, v, p, out, lse, seed, offset: _aten._scaled_dot_product_efficient_attention_backward.default(
            grad, q, k, v, None, out, lse, seed, offset, p, [True, True, True, False]
        )[:3],
    ),
}
