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

from attn_zoo.attention.decode import state_bytes
from attn_zoo.conformance.checks.decoding import state_tensors
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call
from attn_zoo.matrix.claimed_costs import DTYPE_BYTES, Claims, call_shape, forward_flops
from attn_zoo.matrix.kinds.kind import Forecast
from attn_zoo.matrix.kinds.read_tokens import AbstractReadWorkload, PrefillWorkload, most_steps, with_room
from attn_zoo.matrix.kinds.timed import TimedCallGroup, TimedCallKind, TimedForecast, seconds_of_calls
from attn_zoo.matrix.plan.estimate import Estimate, call_seconds, rough_seconds
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.memory import memory_of_update
from attn_zoo.metadata import Request
from attn_zoo.records import Cell, Memory, Record
from attn_zoo.registry import variants


class DecodeGroup(TimedCallGroup):
    """Time and memory of one decoded token, or of reading those before it, over their number.

    Args:
        seq_len: tokens before the decoded one.
        batch_size: B sequences, of each of which one token is decoded.
        has_prefill: also time the prefill of these tokens, in cells of its own: what the first token waits for.
    """

    has_prefill: bool = False

    def axes(self) -> dict[str, Sequence[Any]]:
        axes = super().axes()
        seeds = axes.pop("seed")
        return {**axes, "pass_": ("prefill", "decode") if self.has_prefill else ("decode",), "seed": seeds}


class Decode(TimedCallKind):
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
    """Return the seconds that grow: of a token those of the prefill, and of the forward that it is compared with."""
    if known.cell.pass_ == "prefill":
        return seconds_of_calls(known)
    return known.phases.get("build", 0.0) + known.phases.get("probe", 0.0)


def _usual(counts: Sequence[int | None]) -> int | None:
    """Return the median, as times of steps are medians; None where something cannot be counted."""
    known = [count for count in counts if count is not None]
    return median_low(known) if len(known) == len(counts) else None


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
    """One token, decoded after `seq_len` others.

    Args:
        cell: of the pass `"decode"`.
        inputs: `seq_len` tokens and one more; drawn if absent.
    """

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None) -> None:
        assert cell.seq_len is not None  # every cell of this kind has one
        super().__init__(cell, inputs, cell.seq_len + 1)
        with torch.no_grad():
            # Of one token less: a cache that is continued a second time is copied, which `_begin` does beforehand.
            self._start = self._empty()
            if before := range(cell.seq_len - 1):
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
            steps, lambda: [*self._module.parameters(), *state_tensors(steps.state)], device=self._cell.device
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
