"""The contract of a variant: `AbstractAttention` over projected heads, `AbstractMixer` over hidden states.

Calls are checked here, once for all variants: shapes, dtypes, and that nothing is asked which the capabilities refuse.
What a variant writes is `forward`, the mathematics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo.attention.context import BuildContext
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Request
from attn_zoo.registry import Variant

__all__ = ["AbstractAttention", "AbstractMixer", "BuildContext"]


class _Bound(nn.Module):
    """What both forms share: their config, their context, and the variant they belong to."""

    variant: Variant | None = None  # set when the class is registered, or by the builder on the mixer it makes

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.build = build

    def _refuse(self, request: Request) -> None:
        """Raise `UnsupportedError` where the variant's capabilities refuse `request`."""
        if self.variant is not None:
            self.variant.capabilities.require(self.variant.name, request)


def _expect(is_fine: bool, message: str) -> None:
    if not is_fine:
        raise ValueError(message)


def _check_padding(mask: Tensor | None, batch_size: int, key_len: int, device: torch.device) -> None:
    if mask is None:
        return
    _expect(mask.device == device, f"key_padding_mask: expected on {device}, as the keys; got {mask.device}")
    _expect(mask.dtype == torch.bool, f"key_padding_mask: expected bool, True = padding; got {mask.dtype}")
    _expect(
        tuple(mask.shape) == (batch_size, key_len),
        f"key_padding_mask: expected [B, S] = [{batch_size}, {key_len}]; got {list(mask.shape)}",
    )


class AbstractAttention(_Bound, ABC):
    """Attention over projected heads. Subclasses are final and override `forward` (and, where they decode, the state).

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the attention.

        Args:
            query: `[B, H, L, D]`.
            key: `[B, G, S, D]`.
            value: `[B, G, S, D]`.
            key_padding_mask: bool `[B, S]`, True = padding, must not influence the output.

        Returns:
            `[B, H, L, D]`; zeros where every key of a row is padding.
        """

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the same as `forward`, dense and obviously the paper's equation, with the same parameters.

        A variant whose `forward` is already that keeps this default.
        """
        return self.forward(query, key, value, key_padding_mask=key_padding_mask)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        """Return the empty decode state for `batch_size` sequences.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse(Request(is_causal=self.build.is_causal, needs_decode=True))
        raise UnsupportedError("decode", f"{type(self).__name__} cannot decode step by step")

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Attend from one new position to all so far.

        Args:
            query: `[B, H, 1, D]`.
            key: `[B, G, 1, D]`.
            value: `[B, G, 1, D]`.
            state: from `init_state` or the previous step.

        Returns:
            Output `[B, H, 1, D]` and the new state.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse(Request(is_causal=self.build.is_causal, needs_decode=True))
        raise UnsupportedError("decode", f"{type(self).__name__} cannot decode step by step")

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Check the call and compute the attention; arguments and result as in `forward`.

        Raises:
            ValueError: shapes or dtypes do not fit the context this module was built for.
            UnsupportedError: the variant refuses the mask, the lengths or the dtype.
        """
        build = self.build
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            _expect(tensor.dim() == 4, f"{name}: expected [B, heads, length, D]; got {list(tensor.shape)}")
            _expect(tensor.shape[2] > 0, f"{name}: expected at least one token; got {list(tensor.shape)}")
        batch_size, query_len, key_len = query.shape[0], query.shape[-2], key.shape[-2]
        for name, tensor, heads, length in (
            ("query", query, build.num_heads, query_len),
            ("key", key, build.num_kv_heads, key_len),
            ("value", value, build.num_kv_heads, key_len),
        ):
            expected = (batch_size, heads, length, build.head_dim)
            _expect(
                tuple(tensor.shape) == expected,
                f"{name}: expected [B, heads, length, D] = {list(expected)}; got {list(tensor.shape)}",
            )
            _expect(
                tensor.dtype == query.dtype and tensor.device == query.device,
                f"{name}: expected dtype and device of query ({query.dtype}, {query.device}); "
                f"got {tensor.dtype}, {tensor.device}",
            )
        _check_padding(key_padding_mask, batch_size, key_len, key.device)
        _expect(
            max(query_len, key_len) <= build.max_seq_len,
            f"expected at most max_seq_len = {build.max_seq_len} tokens; got {max(query_len, key_len)}",
        )
        _expect(
            query_len == key_len or build.is_cross or build.is_causal,
            f"self-attention needs L == S; got L = {query_len}, S = {key_len}: build with is_cross=True",
        )
        self._refuse(
            Request(
                is_causal=build.is_causal,
                is_cross=build.is_cross or query_len != key_len,
                has_key_padding_mask=key_padding_mask is not None,
                seq_len=key_len,
                dtype=str(query.dtype).removeprefix("torch."),
                device=query.device.type,
                position=build.position,
            )
        )
        output: Tensor = super().__call__(query, key, value, key_padding_mask=key_padding_mask)
        return output


class AbstractMixer(_Bound, ABC):
    """Token mixing over hidden states: what the backbone calls. Subclasses are final and override `forward`.

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    @abstractmethod
    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Mix positions.

        Args:
            hidden: `[B, L, E]`.
            context: `[B, S, E]` to attend to, for cross-attention; None means `hidden` itself.
            key_padding_mask: bool `[B, S]`, True = padding, must not influence the output.

        Returns:
            `[B, L, E]`.
        """

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the same as `forward`, dense and obviously the paper's equation, with the same parameters."""
        return self.forward(hidden, context=context, key_padding_mask=key_padding_mask)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return the empty decode state; in cross-attention it holds what was computed from `context`.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse(Request(is_causal=self.build.is_causal, is_cross=self.build.is_cross, needs_decode=True))
        raise UnsupportedError("decode", f"{type(self).__name__} cannot decode step by step")

    def step(self, hidden: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Mix one new position `[B, 1, E]` with all so far; return its output `[B, 1, E]` and the new state.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse(Request(is_causal=self.build.is_causal, is_cross=self.build.is_cross, needs_decode=True))
        raise UnsupportedError("decode", f"{type(self).__name__} cannot decode step by step")

    def __call__(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Check the call and mix; arguments and result as in `forward`.

        Raises:
            ValueError: shapes or dtypes do not fit the context this module was built for.
            UnsupportedError: the variant refuses the mask, the lengths or the dtype.
        """
        build = self.build
        _expect(
            hidden.dim() == 3 and hidden.shape[-1] == build.embed_dim,
            f"hidden: expected [B, L, E] with E = {build.embed_dim}; got {list(hidden.shape)}",
        )
        _expect(
            (context is not None) == build.is_cross,
            "context: expected one exactly when the mixer is built with is_cross=True; "
            f"got {'one' if context is not None else 'none'} and is_cross={build.is_cross}",
        )
        keys = hidden if context is None else context
        _expect(
            keys.dim() == 3 and keys.shape[0] == hidden.shape[0] and keys.shape[2] == build.embed_dim,
            f"context: expected [B, S, E] = [{hidden.shape[0]}, S, {build.embed_dim}]; got {list(keys.shape)}",
        )
        _check_padding(key_padding_mask, hidden.shape[0], keys.shape[1], keys.device)
        longest = max(hidden.shape[1], keys.shape[1])
        _expect(
            longest <= build.max_seq_len, f"expected at most max_seq_len = {build.max_seq_len} tokens; got {longest}"
        )
        self._refuse(
            Request(
                is_causal=build.is_causal,
                is_cross=build.is_cross,
                has_key_padding_mask=key_padding_mask is not None,
                seq_len=keys.shape[1],
                dtype=str(hidden.dtype).removeprefix("torch."),
                device=hidden.device.type,
                position=build.position,
            )
        )
        output: Tensor = super().__call__(hidden, context=context, key_padding_mask=key_padding_mask)
        return output
