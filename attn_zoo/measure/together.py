"""Several callables timed in turns, so that whatever slows the machine for a while slows all of them alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from attn_zoo.measure.timing import Sampling, quiet_collector

__all__ = ["sample_in_turns"]


def sample_in_turns(
    members: Sequence[Sampling],
    *,
    seed: int = 0,
    at: Callable[[int], object],
    failed: Callable[[int, BaseException], object],
) -> None:
    """Take samples in rounds: in each round one of every member, in an order drawn anew.

    A member takes part in every round from the first on, until its own budget is spent, and then leaves: sample k of
    each member is that of round k. One that raises leaves too; the others go on. A single member takes as many samples
    at once as its stopwatch does.

    Args:
        members: warmed up.
        seed: of the orders.
        at: told which member is about to be sampled.
        failed: told which member raised what. `KeyboardInterrupt` is passed on instead.
    """
    order, living = random.Random(seed), list(range(len(members)))
    with quiet_collector():
        while living := [index for index in living if not members[index].is_done]:
            for index in order.sample(living, len(living)):
                at(index)
                try:
                    members[index].take(1 if len(members) > 1 else None)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # a callable may even call sys.exit
                    living.remove(index)
                    failed(index, error)
