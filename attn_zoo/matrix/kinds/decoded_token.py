"""`[[decode]]`: time and memory of one token that is decoded from a state, over the number of tokens read before.

The state is made by one prefill. Then the same token is decoded again and again, each time from the state that the step
before left, as a model that writes does; when the state has grown by a 64th it begins again from where it was. So
buffers that have room are written in place, and neither prefill nor the growth of a buffer is in any sample: a buffer
that doubles has room from three tokens on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from attn_zoo.attention.decode import state_bytes
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance import gate
from attn_zoo.conformance.checks.decoding import state_tensors
from attn_zoo.conformance.subject import has_routing
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import GateError
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call
from attn_zoo.matrix.claimed_costs import DTYPE_BYTES, Claims, call_shape, config_of, form_of, forward_flops
from attn_zoo.matrix.kinds.kind import Forecast
from attn_zoo.matrix.kinds.scaling import draw_inputs
from attn_zoo.matrix.kinds.timed import CallGroup, CallKind, TimedForecast, make_module
from attn_zoo.matrix.plan.estimate import Estimate, call_seconds
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.memory import memory_of_update
from attn_zoo.metadata import Capabilities, Request
from attn_zoo.records import Cell, Memory
from attn_zoo.registry import variants

MOVED_FRAC = 1 / 64
"""A state begins again when it has grown by this share of its tokens, or by one token where that is more."""

CAPTURED_STEPS = 64
"""Steps at most that a CUDA graph holds, within which a state cannot begin again."""


class DecodeGroup(CallGroup):
    """Time and memory of one decoded token over the number of tokens before it.

    Args:
        seq_len: tokens before it.
        batch_size: B sequences, of each of which one token is decoded.
    """


class Decode(CallKind):
    """One decoded token."""

    name = "decode"
    group = DecodeGroup
    fixed = {"pass_": "decode", "is_causal": True}  # noqa: RUF012 - as the base class has it

    def request(self, cell: Cell) -> Request:
        # A state is of any length: it is whole calls that have a multiple.
        return replace(super().request(cell), needs_decode=True, seq_len=None)

    def estimate(self, item: PlannedCell) -> Estimate:
        """Return the cost of the prefill of each repeat, and of the forward with which one of them compares a step."""
        cell = item.cell
        try:
            flops = forward_flops(cell, shape := call_shape(cell))
        except Exception:  # somebody else's formula must not stop a plan; the worker will report it
            return Estimate()
        tensors = 12 * shape.batch_size * shape.num_heads * shape.key_len * shape.head_dim
        seconds = item.budget_s + (1 + 1 / item.repeats) * call_seconds(flops, cell)
        return Estimate(seconds, tensors * DTYPE_BYTES[cell.dtype])

    def forecast(self) -> Forecast:
        """Return one by which it is the prefill that grows, and the forward that a step is compared with."""
        return TimedForecast(lambda known: known.phases.get("build", 0.0) + known.phases.get("probe", 0.0))

    def build_on_meta(self, cell: Cell) -> None:
        super().build_on_meta(_with_room(cell))

    def workload(self, cell: Cell, inputs: Sequence[Tensor] | None) -> AbstractWorkload:
        return DecodeWorkload(cell, inputs)


def _most_steps(seq_len: int) -> int:
    return max(1, int(seq_len * MOVED_FRAC))


def _with_room(cell: Cell) -> Cell:
    """Return the cell of the longest sequence that its module may come to, of a length that it takes as a whole."""
    assert cell.seq_len is not None  # every cell of this kind has one
    return cell.at(_fitting(cell, cell.seq_len + _most_steps(cell.seq_len) + CAPTURED_STEPS))


def _fitting(cell: Cell, seq_len: int) -> int:
    """Return the least length of a whole call that is no shorter."""
    multiple = _capabilities(cell).seq_len_multiple
    return -(-seq_len // multiple) * multiple


def _capabilities(cell: Cell) -> Capabilities:
    return variants[cell.variant].capabilities_of(config_of(cell))


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
class DecodeWorkload(AbstractWorkload):
    """One token, decoded after `seq_len` others.

    Args:
        cell: of the kind `decode`.
        inputs: `seq_len` tokens and one more, as queries, keys and values or as hidden states; drawn if absent.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None) -> None:
        assert cell.seq_len is not None  # every cell of this kind has one
        dtype: torch.dtype = getattr(torch, cell.dtype)
        seed_generators(cell.seed)
        module, self._build = make_module(_with_room(cell))
        self._cell, self._seq_len = cell, cell.seq_len
        is_free = _capabilities(cell).variable_seq_len
        self._whole_len = _fitting(cell, cell.seq_len + 1) if is_free else self._build.max_seq_len
        self._module = module.to(device=cell.device, dtype=dtype).eval()
        self.inputs = draw_inputs(cell.at(cell.seq_len + 1), dtype) if inputs is None else inputs
        with torch.no_grad():
            # Of one token less: a cache that is continued a second time is copied, which `_begin` does beforehand.
            self._start = module.init_state(self.inputs[0].shape[0], device=cell.device, dtype=dtype)
            if cell.seq_len > 1:
                _, self._start = self._read(range(cell.seq_len - 1), self._start)
        self._first: Tensor | None = None

    def _read(self, part: range, state: Any) -> tuple[Tensor, Any]:
        """Read the tokens at some positions: one by a step, several by prefill."""
        read: Callable[..., tuple[Tensor, Any]] = self._module.step if len(part) == 1 else self._module.prefill
        return read(*(tensor[..., part.start : part.stop, :] for tensor in self.inputs), state)

    def _begin(self) -> Any:
        with torch.no_grad():
            return self._read(range(self._seq_len - 1, self._seq_len), self._start)[1]

    def _steps(self) -> _Steps:
        last = range(self._seq_len, self._seq_len + 1)
        return _Steps(lambda state: self._read(last, state), self._begin, _most_steps(self._seq_len))

    def gate(self) -> tuple[str, ...]:
        cell = self._cell
        return gate(
            cell.variant,
            cell.options,
            self._build,
            dtype=cell.dtype,
            device=cell.device,
            seq_len=self._whole_len,
            form=form_of(cell),
            has_padding=False,
            needs_decode=True,
        )

    def make_call(self) -> tuple[Call, Call | None]:
        steps = self._steps()
        return steps, steps.settle

    @torch.no_grad()
    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:
        """Compare with the last row of the causal forward over all tokens: that is what a step has to give.

        Of a variant that chooses by the data, rounding may flip a choice in any type but float64.
        """
        assert isinstance(output, Tensor)
        last = self.inputs[0][..., -1:, :]
        if output.shape != last.shape or output.dtype != last.dtype or not bool(torch.isfinite(output).all()):
            found = f"{tuple(output.shape)} {output.dtype}, expected {tuple(last.shape)} {last.dtype}, all finite"
            raise GateError("own_shape", f"{self._cell.variant}: the output of a step is {found}")
        self._first = output.clone()
        if is_repeat or (has_routing(self._module) and output.dtype != torch.float64):
            return ("own_shape",)
        self._compare("own_step", self._row_of_forward(), "a step", "the causal forward")
        return ("own_shape", "own_step")

    def _row_of_forward(self) -> Tensor:
        """Return the row of the decoded token in one causal forward, with as many tokens after it as that needs."""
        num_more, inputs = self._whole_len - self._seq_len - 1, self.inputs
        if num_more:
            inputs = [torch.cat([each, *[each[..., -1:, :]] * num_more], dim=-2) for each in inputs]
        output: Tensor = self._module(*inputs)
        return output[..., self._seq_len : self._seq_len + 1, :]

    def check_again(self) -> tuple[str, ...]:
        """Compare with another step from the same state, which all the steps between must have left as it was."""
        steps = self._steps()
        steps.settle()
        self._compare("own_last", steps(), "after the samples a step", "the first one")
        return ("own_last",)

    def _compare(self, check: str, other: Tensor, what: str, beside: str) -> None:
        assert self._first is not None  # the first call was checked
        error = largest_error(self._first, other)
        allowed = rounding(other, self._seq_len + self.inputs[0].shape[-1])
        if error > allowed:
            text = f"{what} is off by {error:.2g} from {beside}, allowed {allowed:.2g}"
            raise GateError(check, f"{self._cell.variant}, after {self._seq_len} tokens: {text}")

    def memory(self) -> Memory:
        """Measure one step beside its state and weights, which are there before; buffers count with all their room."""
        steps = self._steps()
        steps.settle()
        size = state_bytes(steps.state)
        found = memory_of_update(
            steps, lambda: [*self._module.parameters(), *state_tensors(steps.state)], device=self._cell.device
        )
        return replace(found, state_bytes=size, saved_bytes=None)

    @property
    def num_params(self) -> int:
        return sum(item.numel() for item in self._module.parameters())

    def claims(self) -> Claims:
        """Return the bytes that a step must move at least; the other formulas are of whole sequences."""
        cell = self._cell
        try:
            return Claims(min_bytes=variants[cell.variant].step_bytes(call_shape(cell), DTYPE_BYTES[cell.dtype]))
        except Exception:  # somebody else's formula must not spoil a measurement that is done
            return Claims()

    def counted_flops(self) -> int | None:
        from attn_zoo.measure.flop_count import count_flops  # loads a fifth of a second's worth of torch

        steps = self._steps()
        steps.settle()
        return count_flops(steps)

    def release(self) -> None:
        """Keep the state that steps begin from."""
