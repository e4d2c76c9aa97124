"""Decode state: what a variant keeps between steps, explicit, a value, and measurable in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values so far, in buffers that double when they are full, so that a step costs O(1) copies on average.

    A cache is a value: `append` leaves it as it is, so it may be continued in several ways, as beam search does. The
    first continuation writes behind it in the same buffers, any other one copies them first.

    Args:
        key: buffer `[B, G, capacity, D]`.
        value: buffer `[B, G, capacity, D]`.
        length: how many positions are filled.
    """

    key: Tensor
    value: Tensor
    length: int = 0
    # All caches in the same buffers share it: the length at which they may be continued there. Whoever takes it out may
    # do so; of two threads one does.
    _free_from: dict[int, bool] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def empty(
        cls,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """Return a cache that holds nothing yet."""
        buffer = torch.empty(batch_size, num_kv_heads, 0, head_dim, device=device, dtype=dtype)
        return cls(buffer, buffer.clone())

    def append(self, key: Tensor, value: Tensor) -> KVCache:
        """Return the cache with `[B, G, n, D]` more positions; this one stays as it is.

        Raises:
            ValueError: shape, dtype or device is not that of the cache.
        """
        self.require_fitting(key, value)
        length, capacity = self.length + key.shape[2], self.key.shape[2]
        key_buffer, value_buffer, free_from = self.key, self.value, self._free_from
        if length > capacity or self._must_not_change(key, value) or not free_from.pop(self.length, False):
            capacity = capacity if length <= capacity else max(length, 2 * capacity)
            room = [*self.key.shape[:2], capacity - length, self.key.shape[3]]
            key_buffer, value_buffer = (
                torch.cat([old[:, :, : self.length], new, old.new_zeros(room)], dim=2)
                for old, new in ((self.key, key), (self.value, value))
            )
            free_from = {}
        else:
            # A backward of queries may still read what stands in front, and that stays as it is: through `.data` torch
            # does not count the writing as a change.
            key_buffer.data[:, :, self.length : length] = key
            value_buffer.data[:, :, self.length : length] = value
        free_from[length] = True
        return KVCache(key_buffer, value_buffer, length, free_from)

    def require_fitting(self, key: Tensor, value: Tensor) -> None:
        """Raise `ValueError` unless `[B, G, n, D]` more positions have shape, dtype and device of the cache."""
        batch_size, num_kv_heads, _, head_dim = self.key.shape
        dtype, device = self.key.dtype, self.key.device
        expected = (batch_size, num_kv_heads, key.shape[2], head_dim)
        for name, new in (("key", key), ("value", value)):
            if new.shape != expected:
                raise ValueError(f"{name}: expected [B, G, n, D] = {list(expected)}; got {list(new.shape)}")
            if new.dtype != dtype or new.device != device:
                raise ValueError(
                    f"{name}: expected dtype and device of the cache ({dtype}, {device}); "
                    f"got {new.dtype}, {new.device}: give them to init_state"
                )

    def _must_not_change(self, key: Tensor, value: Tensor) -> bool:
        """Whether derivatives pass through the buffers, or inference mode, which is over, has made them."""
        if self.key.requires_grad or self.value.requires_grad:
            return True
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            return True
        if torch._C._are_functorch_transforms_active():
            return True
        if torch.compiler.is_compiling():  # it knows of no inference mode
            return False
        if torch.is_inference_mode_enabled():
            return False
        if self.key.is_inference():
            return True
        return unpack_dual(key).tangent is not None or unpack_dual(value).tangent is not None

    @property
    def keys(self) -> Tensor:
        """Filled keys `[B, G, length, D]`."""
        return self.key[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """Filled values `[B, G, length, D]`."""
        return self.value[:, :, : self.length]

    @property
    def num_bytes(self) -> int:
        """Bytes of the filled part; the buffers may be up to twice as large."""
        return self.keys.numel() * self.key.element_size() * 2


def state_bytes(state: object) -> int:
    """Return the bytes of all tensors in a decode state (a tensor, KVCache, dataclass, tuple, list or dict of them)."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, KVCache):
        return state.num_bytes
    if isinstance(state, dict):
        return sum(state_bytes(item) for item in state.values())
    if isinstance(state, (tuple, list)):
        return sum(state_bytes(item) for item in state)
    if is_dataclass(state):
        return sum(state_bytes(getattr(state, item.name)) for item in fields(state))
    return 0
