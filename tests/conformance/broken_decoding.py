"""Broken variants that decode: states that are shared, overwritten, mapped to the wrong heads, or cut off late."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from attn_zoo.attention import BuildContext
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Shape
from tests.conformance.broken import Broken, Softmax
from tests.conformance.broken_claims import DECODE, MIXER, MIXER_COST, ProjectedSoftmax


class Decodes(Softmax):
    """Softmax attention with a cache, in two steps that a broken variant may replace. Itself sound."""

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        return KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)

    def expand(self, heads: Tensor) -> Tensor:
        return expand_kv_heads(heads, self.build.num_heads)

    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores: Tensor = query @ self.expand(keys).mT * query.shape[-1] ** -0.5
        return scores.softmax(-1) @ self.expand(values)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        state = state.append(key, value)
        return self.read(query, state.keys, state.values), state


class InterleavesGroupsInSteps(Decodes):
    def expand(self, heads: Tensor) -> Tensor:
        return heads.repeat(1, self.build.num_heads // heads.shape[1], 1, 1)


class DropsInSteps(Decodes):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return dropout(super().weights(scores, keep), self.build.dropout_p, self.training)

    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.weights(query @ self.expand(keys).mT * query.shape[-1] ** -0.5, None) @ self.expand(values)


class StepsWithAnotherScaleInFloat32(Decodes):
    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().read(1.01 * query if query.dtype == torch.float32 else query, keys, values)


class CannotBeginByPrefill(Decodes):
    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        assert state.length >= 0
        return super().prefill(query, key, value, state)


class SoundStepsBesideDropout(DropsInSteps):
    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return Decodes.read(self, query, keys, values)


class KeepsThePromptAlive(Decodes):
    """Its state is a view of something larger."""

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        output, state = super().prefill(query, key, value, state)
        key, value = (torch.cat([x] * 4, dim=2)[:, :, : x.shape[2]] for x in (state.key, state.value))
        return output, KVCache(key, value, state.length)


class Plain:
    """A state that nobody can look into."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache


class KeepsItsStateInAPlainObject(Decodes):
    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        return Plain(super().init_state(batch_size, device=device, dtype=dtype))

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, cache = super().step(query, key, value, state.cache)
        return output, Plain(cache)


class ReadsMoreThanItKeeps(Decodes):
    """Sound but for its claim."""


def cache_bytes(shape: Shape, itemsize: int) -> int:
    return 2 * shape.batch_size * shape.num_kv_heads * shape.key_len * shape.head_dim * itemsize


class ForgetsAfter128Steps(Decodes):
    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().read(query, keys[:, :, -128:], values[:, :, -128:])


class LosesWhatABufferOf256CannotHold(Decodes):
    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().read(query, keys[:, :, :256], values[:, :, :256])


class ForgetsTheStateBeforeLongPrompts(Decodes):
    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        if query.shape[2] >= 128:  # as if nothing came before
            state = None
        return super().prefill(query, key, value, state)


class ThirdEntryReadsTheSecond(Decodes):
    def read(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        entry = torch.arange(len(keys)).clamp(max=1)
        return super().read(query, keys[entry], values[entry])


class KeepsTheStateInTheModule(Decodes):
    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        self.cache = super().init_state(batch_size, device=device, dtype=dtype)
        return self.cache

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, self.cache = super().step(query, key, value, self.cache)
        return output, self.cache


@dataclass
class Buffers:
    """Keys and values of as many positions as can come, filled in place."""

    keys: Tensor
    values: Tensor
    length: int = 0


class WritesBehindEveryState(Decodes):
    """Two continuations of one state write to the same place."""

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        sizes = (batch_size, self.build.num_kv_heads, self.build.max_seq_len, self.build.head_dim)
        return Buffers(*torch.zeros(2, *sizes, device=device, dtype=dtype))

    def followed(self, state: Buffers) -> Buffers:
        return replace(state, length=state.length + 1)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        here = slice(state.length, state.length + 1)
        state.keys[:, :, here], state.values[:, :, here] = key, value
        state = self.followed(state)
        return self.read(query, state.keys[:, :, : state.length], state.values[:, :, : state.length]), state


class ChangesItsState(WritesBehindEveryState):
    """The state that was given is the one that is returned."""

    def followed(self, state: Buffers) -> Buffers:
        state.length += 1
        return state


class KeepsOneEmptyState(ChangesItsState):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.empty: dict[int, Any] = {}

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        if batch_size not in self.empty:
            self.empty[batch_size] = super().init_state(batch_size, device=device, dtype=dtype)
        return self.empty[batch_size]


@dataclass
class Once(Buffers):
    """What can be continued once."""

    is_used: bool = False


class RefusesAStateThatWasUsed(WritesBehindEveryState):
    """Consumes its state and says so. Itself sound."""

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> Any:
        state = super().init_state(batch_size, device=device, dtype=dtype)
        return Once(state.keys, state.values)

    def followed(self, state: Any) -> Any:
        state.is_used = True
        return replace(state, length=state.length + 1, is_used=False)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        if state.is_used:
            raise UnsupportedError("decode", "this state was continued already")
        return super().step(query, key, value, state)


class RemembersItsWeight(ProjectedSoftmax):
    def step(self, hidden: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        if "_weight" not in self.__dict__:
            self._weight = self.proj.weight.detach().clone()
        state = torch.cat([state, hidden @ self._weight.T], dim=1)
        weights = (hidden @ state.mT * hidden.shape[-1] ** -0.5).softmax(-1)
        return weights @ state, state


GROUPED = {**DECODE, "grouped_query": True}
STATES = frozenset({"decode_states"})

DECODING = (
    Broken(cls=InterleavesGroupsInSteps, check="decode", capabilities=GROUPED),
    Broken(cls=DropsInSteps, check="decode", capabilities={**DECODE, "attention_dropout": True}),
    Broken(cls=StepsWithAnotherScaleInFloat32, check="decode", capabilities=DECODE),
    Broken(cls=CannotBeginByPrefill, check="decode", capabilities=DECODE),
    Broken(cls=ForgetsAfter128Steps, check="decode", capabilities=DECODE),
    Broken(cls=LosesWhatABufferOf256CannotHold, check="decode", capabilities=DECODE),
    Broken(cls=ForgetsTheStateBeforeLongPrompts, check="decode", capabilities=DECODE),
    Broken(cls=ThirdEntryReadsTheSecond, check="decode", capabilities=DECODE),
    Broken(cls=KeepsTheStateInTheModule, check="decode_states", capabilities=DECODE),
    Broken(cls=WritesBehindEveryState, check="decode_states", capabilities=DECODE),
    Broken(cls=ChangesItsState, check="decode_states", capabilities=DECODE),
    Broken(cls=KeepsThePromptAlive, check="decode_state_bytes", capabilities=DECODE),
    Broken(cls=KeepsItsStateInAPlainObject, check="decode_state_bytes", capabilities=DECODE),
    Broken(
        cls=ReadsMoreThanItKeeps,
        check="decode_state_bytes",
        capabilities=DECODE,
        complexity={"state_bytes": cache_bytes, "step_bytes": lambda shape, itemsize: cache_bytes(shape, itemsize) + 1},
    ),
    Broken(cls=KeepsOneEmptyState, check="decode", also=STATES, capabilities=DECODE),
)
DECODING_MIXERS = (Broken(cls=RemembersItsWeight, check="decode_states", capabilities=MIXER, complexity=MIXER_COST),)
SOUND_DECODING = (
    Broken(cls=Decodes, check="", capabilities=GROUPED),
    Broken(
        cls=Decodes,
        check="",
        capabilities=GROUPED,
        complexity={"state_bytes": cache_bytes, "step_bytes": lambda shape, _: cache_bytes(shape, 1)},
    ),
    Broken(cls=SoundStepsBesideDropout, check="", capabilities={**DECODE, "attention_dropout": True}),
    Broken(cls=RefusesAStateThatWasUsed, check="", capabilities=DECODE),
)
