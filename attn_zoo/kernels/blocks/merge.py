"""Attention over disjoint sets of keys, put together by the log-sum-exp of their scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
