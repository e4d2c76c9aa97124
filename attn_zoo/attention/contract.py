"""The contract of a variant: `AbstractAttention` over projected heads, `AbstractMixer` over hidden states.

Calls are checked here, once for all variants: shapes, dtypes, and that nothing is asked which the capabilities refuse.
A signature (shapes, dtypes, devices) that was checked before is remembered, so that a call costs a look-up. What a
variant writes is `forward`, the mathematics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isfunction
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from attn_zoo.attention.context import BuildContext
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Capabilities, Request
from attn_zoo.registry import Variant

MAX_SIGNATURES = 4096
"""Remembered by one module; a loop over ever new lengths must not keep them all."""


class Mixed(NamedTuple):
    """What a mixer gives.

    Args:
        hidden: `[B, L, E]`.
        carry: what the next layer is given beside the hidden states, batch first, or None where nothing passes.
    """

    hidden: Tensor
    carry: Tensor | None = None


_Decode = Callable[..., tuple[Tensor, Any]]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block; then each part of the module is again in the mode it was in."""
    was_training = [part for part in module.modules() if part.training]
    for part in was_training:
        part.training = False
    try:
        yield
    finally:
        for part in was_training:
            part.training = True


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of projections of `dtype`, which a state keeps: autocast's where it is on, but for float64.

    Args:
        dtype: of hidden states and weights.
        device: of the weights.
    """
    if dtype == torch.float64 or not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.get_autocast_dtype(device.type)


class _Bound(nn.Module):
    """What both forms share: their config, their context, and the variant they belong to."""

    variant: Variant | None = None  # set when the class is registered, and by the builder on what it makes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("step", "prefill"):
            if isfunction(decode := vars(cls).get(name)):
                setattr(cls, name, cls._of_checked_tokens(decode))

    @staticmethod
    def _of_checked_tokens(decode: _Decode) -> _Decode:
        """Make a `step` or `prefill` that first checks its tokens.

        Torch's fused attention reads beyond what does not fit, and divides by the number of tokens.
        """
        raise NotImplementedError

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.build = build
        self._checked: set[Hashable] = set()

    @property
    def capabilities(self) -> Capabilities | None:
        """What the variant can do under this module's options; None for a class that no variant was registered for."""
        return None if self.variant is None else self.variant.capabilities_of(self.config)

    def _refuse(self, request: Request) -> None:
        """Raise `UnsupportedError` where the variant's capabilities refuse `request`."""
        if self.variant is not None:
            self.variant.capabilities_of(self.config).require(self.variant.name, request)

    def _refuse_output(self, output: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__}.forward: expected to return a tensor; got {type(output).__name__}")

    def _refuse_decode(self) -> NoReturn:
        """Raise `UnsupportedError`: for the variant's reason, or because the class has no state."""
        self._refuse(Request(is_causal=self.build.is_causal, is_cross=self.build.is_cross, needs_decode=True))
        raise UnsupportedError("decode", f"{type(self).__name__} cannot decode step by step")

    def _require_state(self, key_padding_mask: Tensor | None = None, context: Tensor | None = None) -> None:
        """Raise `UnsupportedError` unless this module keeps a state: the variant decodes, and it was built causal.

        A mask is refused: all entries of a state stand at one position. So is a context: there is one sequence.
        """
        self._refuse(Request(is_causal=self.build.is_causal, needs_decode=True))
        name = type(self).__name__ if self.variant is None else self.variant.name
        if not self.build.is_causal:
            reason = "decoding needs is_causal=True; later tokens would change the past"
            raise UnsupportedError("decode", f"{name}: {reason}")
        if key_padding_mask is not None:
            reason = "the entries of a state are all at one position; decode prompts of unlike length in batches apart"
            raise UnsupportedError("key_padding_mask", f"{name}: {reason}")
        if context is not None:
            reason = f"expected no context, as the module is built with is_cross=False; got {list(context.shape)}"
            raise UnsupportedError("cross_attention", f"{name}: {reason}")

    def _require_batch(self, tokens: Tensor, kept: Tensor) -> None:
        """Raise `ValueError` unless the tokens are of as many sequences as the state: torch would broadcast."""
        if tokens.shape[0] != kept.shape[0]:
            expected, got = kept.shape[0], tokens.shape[0]
            raise ValueError(f"expected tokens of as many sequences as the state has, {expected}; got {got}")

    def _remember(self, signature: Hashable) -> None:
        if len(self._checked) >= MAX_SIGNATURES:
            self._checked.clear()
        self._checked.add(signature)

    def _check_sizes(self, query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
        """Check what both forms are given: lengths, mask, dtype and device. Tokens are the last dimension but one."""
        build, query_len, key_len = self.build, query.shape[-2], keys.shape[-2]
        if mask is not None:
            if mask.device != keys.device:
                raise ValueError(f"key_padding_mask: expected on {keys.device}, as the keys; got {mask.device}")
            if mask.dtype != torch.bool:
                raise ValueError(f"key_padding_mask: expected bool, True = padding; got {mask.dtype}")
            if tuple(mask.shape) != (query.shape[0], key_len):
                expected = f"[B, S] = [{query.shape[0]}, {key_len}]"
                raise ValueError(f"key_padding_mask: expected {expected}; got {list(mask.shape)}")
        if max(query_len, key_len) > build.max_seq_len:
            longest = max(query_len, key_len)
            raise ValueError(f"expected at most max_seq_len = {build.max_seq_len} tokens; got {longest}")
        self._refuse(
            Request(
                is_causal=build.is_causal,
                is_cross=build.is_cross or query_len != key_len,
                has_key_padding_mask=mask is not None,
                seq_len=key_len,
                max_seq_len=build.max_seq_len,
                dtype=str(query.dtype).removeprefix("torch."),
                device=query.device.type,
                position=build.position,
            )
        )


def _signature(*tensors: Tensor | None) -> Hashable:
    """Return all that a check of a call can depend on."""
    return tuple([None if each is None else (each.shape, each.dtype, each.device) for each in tensors])


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
            key_padding_mask: bool `[B, S]`, True = padding: keys and values there may hold anything, NaN and infinities
                too, and influence neither the output nor any gradient (`attention.masks.blank_padding`). It is read
                at every call; entries of a batch may differ in any way.

        Returns:
            `[B, H, L, D]`; zeros where every key of a row is padding.
        """

    def route(self, query: Tensor, key: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
        """Return what `forward` chooses by the data (blocks, buckets, an order), or None where nothing is chosen.

        A choice is not differentiable, and rounding may flip it. So a `reference` whose variant routes takes the
        routing as one more keyword, `routing`, and computes the dense equation under it; None means its own.
        """
        del query, key, key_padding_mask

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute the same as `forward`, dense and obviously the paper's equation, with the same parameters.

        A variant whose `forward` is already that keeps this default.
        """
        return self.forward(query, key, value, key_padding_mask=key_padding_mask)

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        """Return the empty decode state for `batch_size` sequences, which are all at the same position.

        A state is a value. `step` and `prefill` leave the one they are given as it is: it may be continued in several
        ways, and states of other sequences, at other positions, in turns with it. So nothing that belongs to a
        sequence is kept in the module. A variant whose states can be used only once raises `UnsupportedError` when
        one is used again. Both drop nothing, in training mode neither. A state that keeps every position takes no more
        than `max_seq_len`; one of constant size goes on beyond, unless its weights end there.

        Raises:
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse_decode()

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Attend from one new position to all so far.

        Args:
            query: `[B, H, 1, D]`.
            key: `[B, G, 1, D]`.
            value: `[B, G, 1, D]`.
            state: from `init_state`, `prefill` or the previous step.

        Returns:
            Output `[B, H, 1, D]` and the new state.

        Raises:
            ValueError: the tokens do not fit the context this module was built for, or each other, or are several.
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse_decode()

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Attend from n new positions, each to all before it: the causal forward that starts from a state.

        By default the positions are stepped through; a variant that can read them at once overrides this. There is no
        padding: prompts of unlike length are read in batches of one length each.

        Args:
            query: `[B, H, n, D]`, n at least 1.
            key: `[B, G, n, D]`.
            value: `[B, G, n, D]`.
            state: as for `step`; None means that nothing came before.

        Returns:
            Output `[B, H, n, D]` and the new state.

        Raises:
            ValueError: there are no positions, or they do not fit, as for `step`.
            UnsupportedError: the variant cannot decode step by step.
        """
        if state is None:
            state = self.init_state(query.shape[0], device=query.device, dtype=query.dtype)
        outputs = []
        for position in range(query.shape[2]):
            one = slice(position, position + 1)
            output, state = self.step(query[:, :, one], key[:, :, one], value[:, :, one], state)
            outputs.append(output)
        return torch.cat(outputs, dim=2), state

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Check the call and compute the attention; arguments and result as in `forward`.

        Raises:
            ValueError: shapes or dtypes do not fit the context this module was built for.
            UnsupportedError: the variant refuses the mask, the lengths or the dtype.
        """
        mask = key_padding_mask
        if torch.compiler.is_compiling():  # traced once; a set that grows would be a side effect of the graph
            self._check(query, key, value, mask)
        else:
            signature = (  # of `_signature`, written out: every call pays for it
                *(query.shape, query.dtype, query.device),
                *(key.shape, key.dtype, key.device),
                *(value.shape, value.dtype, value.device),
                None if mask is None else (mask.shape, mask.dtype, mask.device),
            )
            if signature not in self._checked:
                self._check(query, key, value, mask)
                self._remember(signature)
        output: Tensor = super().__call__(query, key, value, key_padding_mask=key_padding_mask)
        if not isinstance(output, Tensor):
            self._refuse_output(output)
        return output

    @staticmethod
    def _of_checked_tokens(decode: _Decode) -> _Decode:
        name = decode.__name__

        @wraps(decode)
        def run(self: Any, query: Tensor, key: Tensor, value: Tensor, *state: Any, **named: Any) -> tuple[Tensor, Any]:
            signature = name, query.shape, query.dtype, key.shape, key.dtype, value.shape, value.dtype
            if torch.compiler.is_compiling() or signature not in self._checked:
                self._check_heads(query, key, value)
                if name == "step" and query.shape[2] != 1:
                    raise ValueError(f"query: expected one new position [B, H, 1, D]; got {list(query.shape)}")
                if query.shape[2] != key.shape[2]:
                    got = f"L = {query.shape[2]}, S = {key.shape[2]}"
                    raise ValueError(f"key: expected one for each new position, S == L; got {got}")
                if not torch.compiler.is_compiling():
                    self._remember(signature)
            return decode(self, query, key, value, *state, **named)

        return run

    def _check(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        self._check_heads(query, key, value)
        build, query_len, key_len = self.build, query.shape[-2], key.shape[-2]
        if query_len != key_len and not (build.is_cross or build.is_causal):
            raise ValueError(
                f"self-attention needs L == S; got L = {query_len}, S = {key_len}: build with is_cross=True"
            )
        self._check_sizes(query, key, mask)

    def _check_heads(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        build = self.build
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4:
                raise ValueError(f"{name}: expected [B, heads, length, D]; got {list(tensor.shape)}")
            if tensor.shape[2] == 0:
                raise ValueError(f"{name}: expected at least one token; got {list(tensor.shape)}")
        batch_size, query_len, key_len = query.shape[0], query.shape[-2], key.shape[-2]
        for name, tensor, heads, length in (
            ("query", query, build.num_heads, query_len),
            ("key", key, build.num_kv_heads, key_len),
            ("value", value, build.num_kv_heads, key_len),
        ):
            expected = (batch_size, heads, length, build.head_dim)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name}: expected [B, heads, length, D] = {list(expected)}; got {list(tensor.shape)}")
            if tensor.dtype != query.dtype or tensor.device != query.device:
                raise ValueError(
                    f"{name}: expected dtype and device of query ({query.dtype}, {query.device}); "
                    f"got {tensor.dtype}, {tensor.device}"
                )


class AbstractMixer(_Bound, ABC):
    """Token mixing over hidden states: what the backbone calls. Subclasses are final and override `forward`.

    A mixer that passes something from layer to layer beside the hidden states declares `has_carry`, overrides
    `init_carry`, takes one more keyword `carry` in `forward` and `reference`, and returns `Mixed`.

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    @abstractmethod
    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor | Mixed:
        """Mix positions.

        Args:
            hidden: `[B, L, E]`.
            context: `[B, S, E]` to attend to, for cross-attention; None means `hidden` itself.
            key_padding_mask: bool `[B, S]`, True = padding: tokens there may hold anything, NaN and infinities too, and
                influence neither the output at other positions nor any gradient. Blank them before they are
                projected (`attention.masks.blank_padding`): the gradient of a weight sums over all tokens, and
                0 * NaN = NaN.

        Returns:
            `[B, L, E]`, of no use at padded positions; `Mixed` exactly where the variant declares `has_carry`.
        """

    def init_carry(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return what a layer is given that has none before it, `[B, ...]`; None where nothing passes between layers.

        That is the first layer of a model, and any layer that is called alone.
        """
        del batch_size, device, dtype
        return None

    def route(self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Any:
        """Return what `forward` chooses by the data, or None; as `AbstractAttention.route`."""
        del hidden, context, key_padding_mask

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor | Mixed:
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

        A state is a value, and all its entries are at one position; as `AbstractAttention.init_state`.

        Args:
            batch_size: number of sequences.
            context: `[B, S, E]`, in cross-attention.
            key_padding_mask: bool `[B, S]` of the context; refused where there is none.
            device: of the state.
            dtype: of the hidden states to come; None means that of the parameters. Keys and values are kept in the type
                that their projections have: under autocast its own.

        Raises:
            UnsupportedError: the variant cannot decode step by step, or not with padding; a context was given to a
                module that is built with is_cross=False.
        """
        self._refuse_decode()

    def step(self, hidden: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Mix one new position `[B, 1, E]` with all so far; return its output `[B, 1, E]` and the new state.

        Raises:
            ValueError: the tokens have another width, or are several.
            UnsupportedError: the variant cannot decode step by step.
        """
        self._refuse_decode()

    def prefill(self, hidden: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Mix n new positions, each with all before it: the causal forward that starts from a state.

        By default the positions are stepped through; a variant that can read them at once overrides this. There is no
        padding: prompts of unlike length are read in batches of one length each.

        Args:
            hidden: `[B, n, E]`, n at least 1.
            state: from `init_state`, `prefill` or `step`; None means that nothing came before.

        Returns:
            Output `[B, n, E]` and the new state.

        Raises:
            ValueError: there are no positions, or they have another width.
            UnsupportedError: the variant cannot decode step by step.
        """
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        outputs = []
        for position in range(hidden.shape[1]):
            output, state = self.step(hidden[:, position : position + 1], state)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state

    def mix(
        self,
        hidden: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        carry: Tensor | None = None,
    ) -> Mixed:
        """Check the call and mix; arguments as in `forward`.

        Args:
            hidden: `[B, L, E]`.
            context: in cross-attention.
            key_padding_mask: bool `[B, S]`, True = padding.
            carry: from the layer before; None starts from `init_carry`.

        Raises:
            ValueError: shapes or dtypes do not fit the context this module was built for.
            UnsupportedError: the variant refuses the mask, the lengths, the dtype or a carry.
        """
        if torch.compiler.is_compiling():
            self._check(hidden, context, key_padding_mask, carry)
        elif (signature := _signature(hidden, context, key_padding_mask, carry)) not in self._checked:
            self._check(hidden, context, key_padding_mask, carry)
            self._remember(signature)
        if self.variant is None or not self.variant.capabilities.has_carry:
            output = super().__call__(hidden, context=context, key_padding_mask=key_padding_mask)
            if isinstance(output, Mixed):
                raise TypeError(f"{type(self).__name__}: returns Mixed without declaring has_carry")
            if not isinstance(output, Tensor):
                self._refuse_output(output)
            return Mixed(output)
        if carry is None:
            carry = self.init_carry(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        output = super().__call__(hidden, context=context, key_padding_mask=key_padding_mask, carry=carry)
        if not isinstance(output, Mixed):
            raise TypeError(f"{self.variant.name}: declares has_carry, so forward must return Mixed(hidden, carry)")
        return output

    def __call__(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states of `mix`, from an empty carry."""
        return self.mix(hidden, context=context, key_padding_mask=key_padding_mask).hidden

    @staticmethod
    def _of_checked_tokens(decode: _Decode) -> _Decode:
        is_step = decode.__name__ == "step"

        @wraps(decode)
        def run(self: Any, hidden: Tensor, *state: Any, **named: Any) -> tuple[Tensor, Any]:
            self._check_hidden(hidden)
            if is_step and hidden.shape[1] != 1:
                raise ValueError(f"hidden: expected one new position [B, 1, E]; got {list(hidden.shape)}")
            return decode(self, hidden, *state, **named)

        return run

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.dim() != 3 or hidden.shape[-1] != self.build.embed_dim:
            raise ValueError(f"hidden: expected [B, L, E] with E = {self.build.embed_dim}; got {list(hidden.shape)}")
        if hidden.shape[1] == 0:
            raise ValueError(f"hidden: expected at least one token; got {list(hidden.shape)}")

    def _check(self, hidden: Tensor, context: Tensor | None, mask: Tensor | None, carry: Tensor | None) -> None:
        build = self.build
        self._check_hidden(hidden)
        if (context is not None) != build.is_cross:
            raise ValueError(
                "context: expected one exactly when the mixer is built with is_cross=True; "
                f"got {'one' if context is not None else 'none'} and is_cross={build.is_cross}"
            )
        keys = hidden if context is None else context
        if keys.dim() != 3 or keys.shape[0] != hidden.shape[0] or keys.shape[2] != build.embed_dim:
            expected = f"[B, S, E] = [{hidden.shape[0]}, S, {build.embed_dim}]"
            raise ValueError(f"context: expected {expected}; got {list(keys.shape)}")
        if keys.shape[1] == 0:
            raise ValueError(f"context: expected at least one token; got {list(keys.shape)}")
        if carry is not None:
            if self.variant is None or not self.variant.capabilities.has_carry:
                raise UnsupportedError("has_carry", f"{type(self).__name__} passes nothing between layers")
            if carry.shape[:1] != hidden.shape[:1]:
                raise ValueError(f"carry: expected [B, ...] with B = {hidden.shape[0]}; got {list(carry.shape)}")
        self._check_sizes(hidden, keys, mask)
