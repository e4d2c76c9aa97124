"""Time callables: warm up until they are steady, take samples within a budget, say what is doubtful about them."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from attn_zoo.measure.stopwatch import AbstractStopwatch, Call, Sample
from attn_zoo.records import Timing
from attn_zoo.statistics.medians import quartiles, time_summary

MIN_WARMUP_CALLS = 3
MIN_WARMUP_S = 0.025
MAX_WARMUP_CALLS = 10_000
STEADY_RATIO = 1.25
"""Warm-up is over when neither of the last two calls takes more than this times the fastest."""

LONG_SAMPLES = 2
"""Samples of a call that alone exceeds the budget: two, so that there is a spread at all."""

MAX_LOOPS = 100_000
UNSTABLE_FRAC = 0.10
OUTLIER_FRAC = 0.50
WAITING_FRAC = 0.90


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep the garbage collector out of the samples.

    Everything that exists is frozen, so that collecting by hand between samples is cheap: reference cycles in a
    callable must not pile up tensors while the collector is off. All of it is thawed in the end, also what was frozen
    before, as in a worker: what is timed must be freed when it is no longer used, and cannot be thawed by itself.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class Sampling:
    """One callable on its way to a `Timing`: `run`, or its parts in turn with others (`sample_in_turns`).

    The first call is reported apart (`first_ms`: compilation, autotuning, page faults). Warm-up goes on for at least
    three calls and 25 ms, until two calls in a row are about as fast as the fastest, and at most for `budget_s`. On CPU
    a sample holds as many calls as fill `min_sample_ms`; on GPU it is one call between two events after the cache was
    emptied, and a short call is made untimed before some are timed. The garbage collector is off while a sample runs;
    what was frozen before (`gc.freeze`) is thawed in the end.

    A call that alone exceeds the budget is called three times in all: the first, and two samples. In turns with others
    it is called four times: what was before the first round is no sample.

    Flags, in `Timing.flags`:

    * `few_samples`: fewer than `min_samples`, because one call exceeds the budget;
    * `unsteady_warmup`: warm-up used its budget and the last calls still differed much from the fastest;
    * `unstable`: the quartiles are more than 10 % of the median apart;
    * `outliers`: a sample is more than 50 % off the median;
    * `too_short`: a sample is below a hundred times the timer's resolution, or (on CPU) half of `min_sample_ms`;
    * `waiting`: on CPU, the process computed for less than 90 % of the time: something else had the processor.

    Args:
        call: what to time; its result is dropped.
        stopwatch: measures; see `stopwatch_for`.
        setup: runs before every call, outside the timing.
        budget_s: how long the samples may take together.
        min_samples: taken even where the budget is exceeded, as long as one call is not.
        max_samples: never more.
        min_sample_ms: shortest sample on CPU.

    Raises:
        ValueError: a number makes no sense.
    """

    def __init__(
        self,
        call: Call,
        *,
        stopwatch: AbstractStopwatch,
        setup: Call | None = None,
        budget_s: float = 1.0,
        min_samples: int = 5,
        max_samples: int = 50,
        min_sample_ms: float = 2.0,
    ) -> None:
        if not (budget_s > 0 and min_sample_ms >= 0 and 1 <= min_samples <= max_samples):
            raise ValueError(
                "expected budget_s > 0, min_sample_ms >= 0 and 1 <= min_samples <= max_samples; "
                f"got {budget_s}, {min_sample_ms}, {min_samples}, {max_samples}"
            )
        self._call, self._setup, self._watch = call, setup, stopwatch
        self._budget_s, self._min_sample_ms = budget_s, min_sample_ms
        self._min_samples, self._range = min_samples, (min_samples, max_samples)
        self._flags: list[str] = []
        self._samples: list[Sample] = []
        self._num_discarded = 0
        self._first_s, self._num_warmup, self._loops = 0.0, 0, 1
        self._expected_s = math.inf

    def begin(self) -> object:
        """Make the first call, which may compile, and return what it returned."""
        results: list[object] = []
        self._first_s = self._watch.once(lambda: results.append(self._call()), self._setup)
        return results[0]

    def warm_up(self) -> None:
        """Call until the calls are steady, and choose how many of them fill a sample."""
        warm_s: list[float] = []
        if self._first_s >= self._budget_s:
            # Slow, or slow once because it compiled? The next call tells, and is kept if it is slow too.
            probe = self._watch.take(self._call, self._setup, count=1, loops=1)
            if probe[0].wall_s >= self._budget_s:
                self._samples += probe
            else:
                warm_s.append(probe[0].wall_s)
        if self._samples:
            call_s, num_calibrating = max(self._samples[0].wall_s, 1e-9), 0
            self._range = (min(LONG_SAMPLES, self._range[1]),) * 2
        else:
            if not self._until_steady(warm_s):
                self._flags.append("unsteady_warmup")
            call_s = max(min(warm_s), 1e-9)
            num_calibrating = self._choose_loops(call_s)
        self._num_warmup = 1 + len(warm_s) + num_calibrating
        self._expected_s = call_s * self._loops

    def _until_steady(self, warm_s: list[float]) -> bool:
        """Append calls to `warm_s` until they are steady or the budget is spent; return whether they are."""
        spent, fastest = sum(warm_s), min(warm_s, default=math.inf)
        while True:
            last_two = warm_s[-2:]
            is_steady = len(last_two) == 2 and max(last_two) <= STEADY_RATIO * min(last_two[0], fastest)
            if is_steady and len(warm_s) >= MIN_WARMUP_CALLS - 1 and spent >= MIN_WARMUP_S:
                return True
            if spent >= self._budget_s or len(warm_s) >= MAX_WARMUP_CALLS:
                return is_steady
            warm_s.append(self._watch.once(self._call, self._setup))
            spent += warm_s[-1]
            fastest = min(fastest, warm_s[-1])

    def _choose_loops(self, call_s: float) -> int:
        """Choose how many calls fill a sample; return how many calls it took to find out.

        One call timed alone costs more than one in a loop, so the first guess is tried and corrected once.
        """
        min_sample_s = 1e-3 * self._min_sample_ms
        loops = min(math.ceil(min_sample_s / call_s), MAX_LOOPS)
        if not self._watch.has_loops or loops <= 1:
            return 0
        tried_s = max(self._watch.take(self._call, self._setup, count=1, loops=loops)[0].wall_s, 1e-9)
        self._loops = min(max(loops, math.ceil(loops * min_sample_s / tried_s)), MAX_LOOPS)
        return loops

    @property
    def spent_s(self) -> float:
        """Seconds that the samples took together."""
        return sum(sample.wall_s for sample in self._samples)

    def _num_next(self) -> int:
        """Return how many samples may be taken next: none once the budget is spent and there are enough."""
        minimum, maximum = self._range
        num_affordable = math.floor(
            (self._budget_s - self.spent_s) / self._expected_s + 1e-6
        )  # sums of times are rounded
        taken = len(self._samples)
        return min(self._watch.batch_size, maximum - taken, max(num_affordable, minimum - taken))

    @property
    def is_done(self) -> bool:
        """Whether the budget is spent."""
        return self._num_next() < 1

    def take(self, most: int | None = None) -> None:
        """Take the next samples, at most `most`; nothing where the budget is spent. Needs a `quiet_collector`."""
        count = self._num_next() if most is None else min(most, self._num_next())
        if count < 1:
            return
        expected_s, loops = self._expected_s, self._loops
        self._samples += self._watch.take(self._call, self._setup, count=count, loops=loops, expected_s=expected_s)
        self._expected_s = max(self.spent_s / len(self._samples), 1e-9)
        gc.collect()

    @property
    def _processor_s(self) -> float | None:
        """Seconds that a sample computed, over all threads; None where the stopwatch does not tell."""
        seconds = [sample.cpu_s for sample in self._samples if sample.cpu_s is not None]
        return quartiles(seconds)[1] if seconds else None

    @property
    def is_waiting(self) -> bool:
        """Whether the samples so far have the flag `waiting`; on GPU never, where the host may well wait."""
        processor_s = self._processor_s
        return processor_s is not None and processor_s < WAITING_FRAC * quartiles([s.wall_s for s in self._samples])[1]

    def forget_warm_up(self) -> None:
        """Let a slow call that warm-up kept as a sample be warm-up, and take another sample in its place."""
        self._num_warmup += len(self._samples)
        self._samples.clear()

    def discard(self) -> None:
        """Throw the samples away, because something else disturbed them: the next ones take their place."""
        self._num_discarded += len(self._samples)
        self._samples.clear()

    def run(self) -> Timing:
        """Take all samples by themselves, from the first call on."""
        self.begin()
        self.warm_up()
        with quiet_collector():
            while not self.is_done:
                self.take()
        return self.timing()

    def timing(self) -> Timing:
        """Return the samples and what they say."""
        flags = list(self._flags)
        if len(self._samples) < self._min_samples:
            flags.append("few_samples")
        floor_s = max(100 * self._watch.resolution_s, 0.5e-3 * self._min_sample_ms if self._watch.has_loops else 0.0)
        if min(sample.wall_s for sample in self._samples) < floor_s:
            flags.append("too_short")
        values = [1e3 * sample.wall_s / self._loops for sample in self._samples]
        summary = time_summary(values)
        median = summary["median_ms"]
        if summary["q3_ms"] - summary["q1_ms"] > UNSTABLE_FRAC * median:
            flags.append("unstable")
        if max(abs(value - median) for value in values) > OUTLIER_FRAC * median:
            flags.append("outliers")
        if self.is_waiting:
            flags.append("waiting")
        processor_s = self._processor_s
        return Timing(
            samples_ms=tuple(values),
            **summary,
            first_ms=1e3 * self._first_s,
            num_warmup=self._num_warmup,
            inner_loops=self._loops,
            timer=self._watch.name,
            process_cpu_ms=None if processor_s is None else 1e3 * processor_s / self._loops,
            num_discarded=self._num_discarded,
            flags=tuple(flags),
        )


def sample_in_turns(
    members: Sequence[Sampling],
    *,
    seed: int = 0,
    at: Callable[[int], object],
    failed: Callable[[int, BaseException], object],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Take samples in rounds, so that whatever slows the machine for a while slows all members alike.

    Each round takes one of every member, in a new random order.

    A member takes part in every round from the first on, until its own budget is spent, and then leaves: sample k of
    each member is that of round k. One that raises leaves too, but for Ctrl-C; the others go on. A single member
    takes as many at once as its stopwatch does.
    """
    order, living = random.Random(seed), list(range(len(members)))
    if len(members) > 1:
        for member in members:
            member.forget_warm_up()
    with quiet_collector():
        while living := [index for index in living if not members[index].is_done]:
            for index in order.sample(living, len(living)):
                at(index)
                try:
                    with around():
                        members[index].take(1 if len(members) > 1 else None)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # a callable may even call sys.exit
                    living.remove(index)
                    failed(index, error)
