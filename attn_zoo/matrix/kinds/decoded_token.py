"""`[[decode]]`: one token that is decoded from a state, over the number of tokens read before, and reading those.

The state is made by one prefill. Then the same token is decoded again and again, each time from the state that the step
before left, as a model that writes does; when the state has grown by a 64th it begins again from where it was. So
buffers that have room are written in place, and neither prefill nor the growth of a buffer is in any sample: a buffer
that doubles has room from three tokens on. Prefill is a pass of its own, timed as other calls are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, final

import torch
from torch import Tensor

from attn_zoo.attention import AbstractAttention, AbstractMixer
from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.checks.decoding import state_tensors
from attn_zoo.conformance.subject import has_routing
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import GateError
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call, settle_calls
from attn_zoo.matrix.claimed_costs import DTYPE_BYTES, Claims, call_shape, claims, config_of, forward_flops
from attn_zoo.matrix.kinds.kind import Forecast
from attn_zoo.matrix.kinds.one_call import CallKind, gate_call, make_module
from attn_zoo.matrix.kinds.scaling import draw_inputs
from attn_zoo.matrix.kinds.timed import TimedCallGroup, TimedForecast, TimedKind, seconds_of_calls
from attn_zoo.matrix.plan.estimate import Estimate, call_seconds, rough_seconds
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.memory import memory_of_pass, memory_of_update
from attn_zoo.metadata import Capabilities, Request
from attn_zoo.records import Cell, Memory, Record
from attn_zoo.registry import variants

MOVED_FRAC = 1 / 64
"""A state begins again when it has grown by this share of its tokens, or by one token where that is more."""

CAPTURED_STEPS = 64
"""Steps at most that a CUDA graph holds, within which a state cannot begin again."""

NUM_ROWS = 64
"""Rows of a prefill that are compared."""


class DecodeGroup(TimedCallGroup):
    """Time and memory of one decoded token, or of reading those before it, over their number.

    Args:
        seq_len: tokens before the decoded one.
        batch_size: B sequences, of each of which one token is decoded.
        has_prefill: also time the prefill of these tokens, in cells of its own: what the first token waits for.
    """

    has_prefill: bool = False

    def axes(self) -> dict[str, Sequence[Any]]:
        return {**super().axes(), "pass_": ("decode", "prefill") if self.has_prefill else ("decode",)}


class Decode(CallKind, TimedKind):
    """One decoded token, or the prefill before it."""

    name = "decode"
    group = DecodeGroup
    fixed = {"is_causal": True}  # noqa: RUF012 - as the base class has it

    def counts_all_lengths(self, cell: Cell) -> bool:
        """Tell whether it is a step: no formula says its FLOPs, and it is cheap once the counter is loaded."""
        return cell.pass_ == "decode"

    def request(self, cell: Cell) -> Request:
        # A state is of any length: it is whole calls that have a multiple.
        return replace(super().request(cell), needs_decode=True, seq_len=None)

    def estimate(self, item: PlannedCell) -> Estimate:
        """Return the cost of a prefill, or of reading the tokens before a step and, in one repeat, comparing it."""
        cell = item.cell
        shape = call_shape(cell)
        flops = forward_flops(cell, shape)
        tensors = 12 * shape.batch_size * shape.num_heads * shape.key_len * shape.head_dim
        if cell.pass_ == "prefill":
            seconds = rough_seconds(flops, item)
        else:
            seconds = item.budget_s + (1 + 1 / item.repeats) * call_seconds(flops, cell)
        return Estimate(seconds, tensors * DTYPE_BYTES[cell.dtype])

    def forecast(self) -> Forecast:
        return TimedForecast(_growing)

    def build_on_meta(self, cell: Cell) -> None:
        super().build_on_meta(with_room(cell))

    def workload(self, cell: Cell, inputs: Sequence[Tensor] | None) -> AbstractWorkload:
        return (PrefillWorkload if cell.pass_ == "prefill" else DecodeWorkload)(cell, inputs)


def _growing(known: Record) -> float:
    """Return the seconds that grow: of a token those of the prefill, and of the forward that it is compared with.

    A GPU reads in less time than it takes to compile the kernels meanwhile, which is done once for all lengths.
    """
    if known.cell.pass_ == "prefill":
        return seconds_of_calls(known)
    if known.cell.device == "cuda":
        return 0.0
    return known.phases.get("build", 0.0) + known.phases.get("probe", 0.0)


def _usual(counts: Sequence[int | None]) -> int | None:
    """Return the median, as times of steps are medians; None where something cannot be counted."""
    known = [count for count in counts if count is not None]
    return median_low(known) if len(known) == len(counts) else None


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
    """A module that reads `seq_len` of its inputs, which have `num_after` more, and the causal forward over one more.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """

    module: AbstractAttention | AbstractMixer

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None, *, num_after: int) -> None:
        assert cell.seq_len is not None  # every cell of this kind has one
        dtype: torch.dtype = getattr(torch, cell.dtype)
        seed_generators(cell.seed)
        module, self._build = make_module(with_room(cell))
        self._cell, self._seq_len = cell, cell.seq_len
        is_free = _capabilities(cell).variable_seq_len
        self._whole_len = _fitting(cell, cell.seq_len + 1) if is_free else self._build.max_seq_len
        self.module = module.to(device=cell.device, dtype=dtype).eval()
        self.inputs = draw_inputs(cell.at(cell.seq_len + num_after), dtype) if inputs is None else inputs

    def gate(self) -> tuple[str, ...]:
        return gate_call(self._cell, self._build, seq_len=self._whole_len, needs_decode=True)

    def _empty(self) -> Any:
        """Return the state before the first token."""
        first = self.inputs[0]
        return self.module.init_state(first.shape[0], device=first.device, dtype=first.dtype)

    def _read(self, part: range, state: Any, *, at_once: bool) -> tuple[Tensor, Any]:
        """Read the tokens at some positions: all by prefill, or one by a step."""
        read: Callable[..., tuple[Tensor, Any]] = self.module.prefill if at_once else self.module.step
        return read(*(tensor[..., part.start : part.stop, :] for tensor in self.inputs), state)

    def _forward(self) -> Tensor:
        """Return the causal forward over all tokens, the last of them repeated until a whole call takes their number.

        The row after `seq_len` tokens is that of the first repetition or of a token of its own.
        """
        num_more, inputs = self._whole_len - self.inputs[0].shape[-2], self.inputs
        if num_more:
            inputs = [torch.cat([each, *[each[..., -1:, :]] * num_more], dim=-2) for each in inputs]
        output: Tensor = self.module(*inputs)
        return output

    def _row_after(self, whole: Tensor) -> Tensor:
        """Return the row of the token after `seq_len` others, of the causal forward."""
        return whole[..., self._seq_len : self._seq_len + 1, :]

    def _is_comparable(self, output: Tensor) -> bool:
        """Return whether the forward says what the output is: rounding may flip what is chosen by the data."""
        return output.dtype == torch.float64 or not has_routing(self.module)

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


@final
class PrefillWorkload(AbstractReadWorkload):
    """A prompt of `seq_len` tokens, read at once into an empty state: what the first token waits for."""

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None) -> None:
        super().__init__(cell, inputs, num_after=0)
        self._first: Tensor | None = None
        self._state_bytes = 0

    @torch.no_grad()
    def _prefill(self) -> tuple[Tensor, Any]:
        return self._read(range(self._seq_len), self._empty(), at_once=True)

    def make_call(self) -> tuple[Call, Call | None]:
        return self._prefill, None

    def settle(self) -> None:
        settle_calls(self)

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
        leaves = [*self.inputs, *self.module.parameters()]
        found = memory_of_pass(lambda: self._prefill()[0], leaves, "infer", device=self._cell.device)
        return replace(found, state_bytes=self._state_bytes, saved_bytes=None)

    def claims(self) -> Claims:
        return claims(self._cell)

    def counted_flops(self) -> int | None:
        from attn_zoo.measure.flop_count import count_flops  # loads a fifth of a second's worth of torch

        return count_flops(self._prefill)

    def release(self) -> None:
        """Nothing is left behind."""


@dataclass(slots=True)
class _Steps:
    """Steps one after another, as a model writes.

    Args:
        step: makes one, of a state; returns its output and the next state.
        begin: makes the state that they begin from, of `seq_len` tokens.
        most: steps until they begin again.
        captured: the states that captured steps read, which every replay reads again.
    """

    step: Callable[[Any], tuple[Tensor, Any]]
    begin: Callable[[], Any]
    most: int
    state: Any = None
    num_left: int = 0
    captured: list[Any] = field(default_factory=list)
    _is_captured: bool = False

    def settle(self) -> None:
        """Begin again where it is time to: before a step and outside its timing; what is captured may not."""
        self._is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self.num_left <= 0 and not self._is_captured:
            self.state = None  # two large ones need not be there at once
            self.state, self.num_left = self.begin(), self.most

    def __call__(self) -> Tensor:
        if self._is_captured:
            self.captured.append(self.state)
        with torch.no_grad():
            output, self.state = self.step(self.state)
        self.num_left -= 1
        return output


@final
class DecodeWorkload(AbstractReadWorkload):
    """One token, decoded after `seq_len` others."""

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None) -> None:
        super().__init__(cell, inputs, num_after=1)
        with torch.no_grad():
            # Of one token less: a cache that is continued a second time is copied, which `_begin` does beforehand.
            self._start = self._empty()
            if before := range(self._seq_len - 1):
                _, self._start = self._read(before, self._start, at_once=len(before) > 1)
        self._first: Tensor | None = None

    @torch.no_grad()
    def _begin(self) -> Any:
        return self._read(range(self._seq_len - 1, self._seq_len), self._start, at_once=False)[1]

    def _steps(self) -> _Steps:
        last = range(self._seq_len, self._seq_len + 1)
        return _Steps(lambda state: self._read(last, state, at_once=False), self._begin, most_steps(self._seq_len))

    def make_call(self) -> tuple[Call, Call | None]:
        steps = self._steps()
        return steps, steps.settle

    def begin_again(self) -> tuple[Call, int]:
        return self._begin, most_steps(self._seq_len)

    @torch.no_grad()
    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:
        """Compare with the row of the causal forward over all tokens: that is what a step has to give."""
        assert isinstance(output, Tensor)
        self._expect_shape(output, 1, "a step")
        self._first = output.clone()
        if is_repeat or not self._is_comparable(output):
            return ("own_shape",)
        words = "a step is off by {} from the causal forward"
        self._compare("own_step", output, self._row_after(self._forward()), words)
        return ("own_shape", "own_step")

    def check_again(self) -> tuple[str, ...]:
        """Compare with another step from the same state, which all the steps between must have left as it was."""
        assert self._first is not None  # the first call was checked
        steps = self._steps()
        steps.settle()
        self._compare("own_last", steps(), self._first, "after the samples a step is off by {} from the first one")
        return ("own_last",)

    def memory(self) -> Memory:
        """Measure one step beside its state and weights, which are there before; buffers count with all their room."""
        steps = self._steps()
        steps.settle()
        size = state_bytes(steps.state)
        found = memory_of_update(
            steps,
            lambda: [*self.module.parameters(), *state_tensors(steps.state)],
            settle=steps.settle,
            device=self._cell.device,
        )
        return replace(found, state_bytes=size, saved_bytes=None)

    def claims(self) -> Claims:
        """Return the bytes that a step must move at least; the other formulas are of whole sequences."""
        cell = self._cell
        try:
            shape, variant, itemsize = call_shape(cell), variants[cell.variant], DTYPE_BYTES[cell.dtype]
            later = [replace(shape, key_len=shape.key_len + num_more) for num_more in range(self._num_looked_at)]
            return Claims(min_bytes=_usual([variant.step_bytes(each, itemsize) for each in later]))
        except Exception:  # somebody else's formula must not spoil a measurement that is done
            return Claims()

    def counted_flops(self) -> int | None:
        from attn_zoo.measure.flop_count import count_flops  # loads a fifth of a second's worth of torch

        steps = self._steps()
        steps.settle()
        return _usual([count_flops(steps) for _ in range(self._num_looked_at)])

    @property
    def _num_looked_at(self) -> int:
        """How many steps in a row say what a usual one does: some begin a block, and do the work of many."""
        return min(3, most_steps(self._seq_len))

    def release(self) -> None:
        """Keep the state that steps begin from."""
