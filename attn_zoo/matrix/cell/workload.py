"""What a timed cell measures, as far as a trial has to know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from attn_zoo.matrix.claimed_costs import Claims
from attn_zoo.measure.passes import num_unlike
from attn_zoo.records import Memory

Call = Callable[[], object]
"""What is timed, or runs before it."""


class AbstractWorkload(ABC):
    """What a cell measures.

    Attributes:
        module: what runs, with all its parameters.
        inputs: what a cell that differs in the variant only may be given too.
        why_not_captured: why a call is not tried as a CUDA graph; empty where it is.
    """

    module: nn.Module
    inputs: Sequence[Tensor]
    why_not_captured = ""

    @abstractmethod
    def gate(self) -> tuple[str, ...]:
        """Check it before anything is timed; return the names of the checks. Raises as `conformance.gate`."""

    @abstractmethod
    def make_call(self) -> tuple[Call, Call | None]:
        """Return what to time, and what to run before each call of it."""

    def begin_again(self) -> tuple[Call, int] | None:
        """Return what the setup does now and then that costs, and how many calls come between; None for nothing."""
        return None

    @abstractmethod
    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:
        """Check what the first call returned or did; return the names of the checks.

        Of a repeat, what takes further calls was checked by another process of this run.

        Raises:
            GateError: it is wrong.
        """

    def check_again(self) -> tuple[str, ...]:
        """Check after the samples that a call still gives what the first one gave; as `check`."""
        return ()

    def settle(self) -> None:  # noqa: B027 - there may be nothing to settle
        """Make the calls that run otherwise than all that follow: before warm-up, whose end the clock decides."""

    @abstractmethod
    def memory(self) -> Memory:
        """Measure the memory of one call."""

    @abstractmethod
    def claims(self) -> Claims:
        """Return what formulas say of one forward, after the first call."""

    @abstractmethod
    def counted_flops(self) -> int | None:
        """Count the FLOPs of one forward; None where the counter does not see what runs."""

    @abstractmethod
    def release(self) -> None:
        """Let go of what a call leaves behind."""


def settle_calls(work: AbstractWorkload) -> None:
    """Make the first calls of a kind, the one among them that is recorded (`num_unlike`), which takes longer."""
    if count := num_unlike(work.inputs[0]):
        call, setup = work.make_call()
        for _ in range(count):
            if setup is not None:
                setup()
            call()
