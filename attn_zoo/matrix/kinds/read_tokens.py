"""Tokens that a module reads into a state: what both passes of `[[decode]]` share; and one of them, prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.subject import has_routing
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import GateError
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call
from attn_zoo.matrix.claimed_costs import Claims, claims, config_of
from attn_zoo.matrix.kinds.one_call import gate_call, make_module
from attn_zoo.matrix.kinds.scaling import draw_inputs
from attn_zoo.measure.memory import memory_of_pass
from attn_zoo.metadata import Capabilities
from attn_zoo.records import Cell, Memory
from attn_zoo.registry import variants

MOVED_FRAC = 1 / 64
"""A state begins again when it has grown by this share of its tokens, or by one token where that is more."""

CAPTURED_STEPS = 64
"""Steps at most that a CUDA graph holds, within which a state cannot begin again."""

NUM_ROWS = 64
"""Rows of a prefill that are compared."""


def most_steps(seq_len: int) -> int:
    """Return how many steps are made from one state before it begins again."""
    return max(1, int(seq_len * MOVED_FRAC))


def with_room(cell: Cell) -> Cell:
    """Return the cell of the longest sequence that its module may come to, of a length that it takes as a whole."""
    assert cell.seq_len is not None  # every cell of this kind has one
    return cell.at(_fitting(cell, cell.seq_len + most_steps(cell.seq_len) + CAPTURED_STEPS))


def _fitting(cell: Cell, seq_len: int) -> int:
    """Return the least length of a whole call that is no shorter."""
    multiple = _capabilities(cell).seq_len_multiple
    return -(-seq_len // multiple) * multiple


def _capabilities(cell: Cell) -> Capabilities:
    return variants[cell.variant].capabilities_of(config_of(cell))


class AbstractReadWorkload(AbstractWorkload):
    """A module that reads `seq_len` tokens, and the causal forward over these and one more.

    Args:
        cell: of the kind `decode`.
        inputs: tokens, as queries, keys and values or as hidden states; drawn if absent.
        num_tokens: how many of them.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None, num_tokens: int) -> None:
        assert cell.seq_len is not None  # every cell of this kind has one
        dtype: torch.dtype = getattr(torch, cell.dtype)
        seed_generators(cell.seed)
        module, self._build = make_module(with_room(cell))
        self._cell, self._seq_len = cell, cell.seq_len
        is_free = _capabilities(cell).variable_seq_len
        self._whole_len = _fitting(cell, cell.seq_len + 1) if is_free else self._build.max_seq_len
        self._module = module.to(device=cell.device, dtype=dtype).eval()
        self.inputs = draw_inputs(cell.at(num_tokens), dtype) if inputs is None else inputs

    def gate(self) -> tuple[str, ...]:
        return gate_call(self._cell, self._build, seq_len=self._whole_len, needs_decode=True)

    def _empty(self) -> Any:
        """Return the state before the first token."""
        first = self.inputs[0]
        return self._module.init_state(first.shape[0], device=first.device, dtype=first.dtype)

    def _read(self, part: range, state: Any, *, at_once: bool) -> tuple[Tensor, Any]:
        """Read the tokens at some positions: all by prefill, or one by a step."""
        read: Callable[..., tuple[Tensor, Any]] = self._module.prefill if at_once else self._module.step
        return read(*(tensor[..., part.start : part.stop, :] for tensor in self.inputs), state)

    def _forward(self) -> Tensor:
        """Return the causal forward over all tokens, the last of them repeated until a whole call takes their number.

        The row after `seq_len` tokens is that of the first repetition or of a token of its own.
        """
        num_more, inputs = self._whole_len - self.inputs[0].shape[-2], self.inputs
        if num_more:
            inputs = [torch.cat([each, *[each[..., -1:, :]] * num_more], dim=-2) for each in inputs]
        output: Tensor = self._module(*inputs)
        return output

    def _row_after(self, whole: Tensor) -> Tensor:
        """Return the row of the token after `seq_len` others, of the causal forward."""
        return whole[..., self._seq_len : self._seq_len + 1, :]

    def _is_comparable(self, output: Tensor) -> bool:
        """Return whether the forward says what the output is: rounding may flip what is chosen by the data."""
        return output.dtype == torch.float64 or not has_routing(self._module)

    def _expect_shape(self, output: Tensor, num_tokens: int, what: str) -> None:
        first = self.inputs[0]
        shape = (*first.shape[:-2], num_tokens, first.shape[-1])
        if output.shape != shape or output.dtype != first.dtype or not bool(torch.isfinite(output).all()):
            found = f"{tuple(output.shape)} {output.dtype}, expected {shape} {first.dtype}, all finite"
            raise GateError("own_shape", f"{self._cell.variant}: the output of {what} is {found}")

    def _compare(self, check: str, output: Tensor, other: Tensor, words: str) -> None:
        """Raise `GateError` where outputs differ by more than rounding; `words` name both, with {} for by how much."""
        error = largest_error(output, other)
        allowed = rounding(other, self._seq_len + self.inputs[0].shape[-1])
        if error > allowed:
            text = f"{words.format(f'{error:.2g}')}, allowed {allowed:.2g}"
            raise GateError(check, f"{self._cell.variant}, after {self._seq_len} tokens: {text}")

    @property
    def num_params(self) -> int:
        return sum(item.numel() for item in self._module.parameters())


@final
class PrefillWorkload(AbstractReadWorkload):
    """A prompt of `seq_len` tokens, read at once into an empty state: what the first token waits for.

    Args:
        cell: of the pass `"prefill"`.
        inputs: the prompt; drawn if absent.
    """

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None) -> None:
        assert cell.seq_len is not None  # every cell of this kind has one
        super().__init__(cell, inputs, cell.seq_len)
        self._first: Tensor | None = None
        self._state_bytes = 0

    @torch.no_grad()
    def _prefill(self) -> tuple[Tensor, Any]:
        return self._read(range(self._seq_len), self._empty(), at_once=True)

    def make_call(self) -> tuple[Call, Call | None]:
        return self._prefill, None

    @torch.no_grad()
    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:
        """Compare rows with those of the causal forward, and a step from the state with the row after them."""
        assert isinstance(output, tuple)
        rows, state = output
        self._expect_shape(rows, self._seq_len, "prefill")
        self._first, self._state_bytes = self._some(rows).clone(), state_bytes(state)
        if is_repeat or not self._is_comparable(rows):
            return ("own_shape",)
        whole = self._forward()
        words = "prefill is off by {} from the causal forward"
        self._compare("own_prefill", self._first, self._some(whole[..., : self._seq_len, :]), words)
        last = range(self._seq_len - 1, self._seq_len)
        step, _ = self._read(last, state, at_once=False)
        self._compare("own_step", step, self._row_after(whole), "a step is off by {} from the causal forward")
        return ("own_shape", "own_prefill", "own_step")

    def _some(self, rows: Tensor) -> Tensor:
        """Return rows of the first sequence from all over it, the last one among them."""
        stride = -(-self._seq_len // NUM_ROWS)
        return rows[:1, ..., (self._seq_len - 1) % stride :: stride, :]

    def check_again(self) -> tuple[str, ...]:
        assert self._first is not None  # the first call was checked
        words = "after the samples prefill is off by {} from the first one"
        self._compare("own_last", self._some(self._prefill()[0]), self._first, words)
        return ("own_last",)

    def memory(self) -> Memory:
        """Measure one prefill beside its tokens and weights; the state that it makes is part of the extra."""
        leaves = [*self.inputs, *self._module.parameters()]
        found = memory_of_pass(lambda: self._prefill()[0], leaves, "infer", device=self._cell.device)
        return replace(found, state_bytes=self._state_bytes, saved_bytes=None)

    def claims(self) -> Claims:
        return claims(self._cell)

    def counted_flops(self) -> int | None:
        from attn_zoo.measure.flop_count import count_flops  # loads a fifth of a second's worth of torch

        return count_flops(self._prefill)

    def release(self) -> None:
        """Nothing is left behind."""
