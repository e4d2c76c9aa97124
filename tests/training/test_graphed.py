"""Functions of a batch as CUDA graphs: when one is captured, what it reads, and what happens where it cannot be.

The graph here is a stand-in that runs on the host: its capture records the call without running it, as a GPU's does.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref

import numpy as np
import pytest
import torch

from attn_zoo.kernels.held import held
from attn_zoo.kernels.trace import recording
from attn_zoo.measure import capture
from attn_zoo.training.batches import Batch
from attn_zoo.training.graphed import GRAPH_PATH, MAX_SHAPES, NUM_PLAIN, Graphed


class Stream:
    def wait_stream(self, other):
        pass


class Generator:
    def __init__(self):
        self.is_capturing = False

    def clone_state(self):
        return self.is_capturing

    def graphsafe_set_state(self, state):
        self.is_capturing = state


class Graph:
    def __init__(self, update):
        self.update = update
        self.held = None
        self.output = torch.zeros(())

    def replay(self):
        assert self.held is not None, "nothing was captured"
        self.output.fill_(self.update.learn(self.held, "replayed"))

    def pool(self):
        return "the memory of the first"


class Update:
    """Learns the sum of the tokens; stands in for torch.cuda as well."""

    def __init__(self, draw=None, refuses=None):
        self.total, self.log = 0, []
        self.draw, self.refuses = draw, refuses
        self.capturing, self.pools = None, []
        self.default_generators = [Generator()]

    def __call__(self, batch):
        if self.capturing is not None:
            if self.refuses is not None:
                raise self.refuses
            self.capturing.held = batch
            self.capturing.output = torch.zeros(())
            return (self.capturing.output,)
        if self.draw is not None:
            self.draw()
        return (torch.tensor(float(self.learn(batch, "plain"))),)

    def learn(self, batch, how):
        learned = int(batch.tokens.sum()) + int(batch.labels.sum())
        self.total += learned
        self.log.append(how)
        return learned

    def current_device(self):
        return 0

    def current_stream(self):
        return Stream()

    def Stream(self):
        return Stream()

    @contextlib.contextmanager
    def stream(self, stream):
        yield

    def CUDAGraph(self):
        return Graph(self)

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        assert stream is not None
        self.pools.append(pool)
        generator = self.default_generators[0]
        self.capturing, generator.is_capturing = graph, True
        try:
            yield
        finally:
            self.capturing = None
        generator.is_capturing = False  # not where something was raised inside: nor does torch


@pytest.fixture(autouse=True)
def _of_this_test(monkeypatch):
    """Captures that fail are counted for the whole process, which goes on with other tests."""
    monkeypatch.setattr(capture, "_num_failed", 0)


def batch_of(value: int, width: int = 4, has_mask: bool = True) -> Batch:
    return Batch(
        tokens=torch.full((2, width), value),
        key_padding_mask=torch.zeros(2, width, dtype=torch.bool) if has_mask else None,
        labels=torch.tensor([value, 0]),
        num_tokens=2 * width,
        num_positions=2 * width,
    )


def test_every_update_happens_once_with_its_own_batch():
    update = Update()
    run = Graphed(update, "training", cuda=update)
    with recording() as paths:
        for value in range(1, NUM_PLAIN + 4):
            run(batch_of(value))
    assert update.log == ["plain"] * NUM_PLAIN + ["replayed"] * 3
    assert update.total == sum(9 * value for value in range(1, NUM_PLAIN + 4))
    assert paths == [f"{GRAPH_PATH}.training"]
    assert run.reason == ""


def test_every_shape_has_a_graph_of_its_own():
    update = Update()
    run = Graphed(update, "training", cuda=update)
    batches = [batch_of(1, 4), batch_of(2, 8), batch_of(3, 4, has_mask=False)]
    for _ in range(NUM_PLAIN):
        for batch in batches:
            run(batch)
    assert set(update.log) == {"plain"}
    update.total = 0
    for batch in batches:
        run(batch)
    assert update.log[-3:] == ["replayed"] * 3
    assert update.total == 9 * 1 + 17 * 2 + 9 * 3


def test_all_graphs_share_their_memory_and_what_they_return_is_kept():
    update = Update()
    run = Graphed(update, "training", cuda=update)
    returned = [(run(batch_of(value, width)), 2 * width * value + value) for value in range(7) for width in (4, 8)]
    assert update.pools == [None, "the memory of the first"]
    for (output,), expected in returned:
        assert output == expected


def test_no_more_shapes_are_captured_than_memory_should_hold():
    update = Update()
    run = Graphed(update, "training", cuda=update)
    with recording() as paths:
        for _ in range(NUM_PLAIN + 1):
            for width in range(1, MAX_SHAPES + 3):
                run(batch_of(1, width))
    assert update.log.count("replayed") == MAX_SHAPES
    assert paths == [f"{GRAPH_PATH}.training", f"{GRAPH_PATH}.training.partly"]


def test_what_memory_cannot_hold_runs_as_before_and_what_is_smaller_has_graphs():
    update = Update()
    run = Graphed(update, "training", cuda=update)
    with recording() as paths:
        for _ in range(NUM_PLAIN + 1):
            run(batch_of(1, 4))
        update.refuses = torch.OutOfMemoryError("CUDA out of memory")
        for _ in range(NUM_PLAIN + 1):
            run(batch_of(1, 8))
        update.refuses, update.log = None, []
        for _ in range(NUM_PLAIN + 1):
            for width in (4, 6, 8, 16):
                run(batch_of(1, width))
    assert run.reason == ""
    assert update.log == ["replayed", *["plain"] * 3] * NUM_PLAIN + ["replayed"] * 2 + ["plain"] * 2
    assert paths == [f"{GRAPH_PATH}.training", f"{GRAPH_PATH}.training.partly"]


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: np.random.random(), lambda: torch.rand(1)],  # noqa: NPY002
    ids=["python", "numpy", "torch"],
)
def test_what_a_model_draws_on_the_host_is_not_frozen(draw):
    update = Update(draw=draw)
    run = Graphed(update, "training", cuda=update)
    for value in range(NUM_PLAIN + 3):
        run(batch_of(value))
    assert set(update.log) == {"plain"}
    assert "on the host" in run.reason


def test_graphs_of_before_serve_on_where_another_shape_draws_on_the_host():
    update = Update()
    run = Graphed(update, "training", cuda=update)
    with recording() as paths:
        for _ in range(NUM_PLAIN + 1):
            run(batch_of(1, 4))
        update.draw = random.random
        run(batch_of(1, 8))
        run(batch_of(1, 4))
    assert update.log == ["plain"] * NUM_PLAIN + ["replayed", "plain", "replayed"]
    assert paths == [f"{GRAPH_PATH}.training", f"{GRAPH_PATH}.training.partly"]


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_what_cannot_be_captured_runs_as_before(error):
    update = Update(refuses=error("operation not permitted when stream is capturing\nmore"))
    run = Graphed(update, "training", cuda=update)
    with recording() as paths:
        for _ in range(NUM_PLAIN + 2):
            run(batch_of(1))
    assert update.log == ["plain"] * (NUM_PLAIN + 2)
    assert run.reason == "it cannot be captured: operation not permitted when stream is capturing"
    assert not update.default_generators[0].is_capturing, "or every later random number would fail"
    assert paths == []


def test_after_a_capture_that_fails_no_graph_is_replayed(capsys):
    """The others follow the random numbers of a state that is not the generator's any more."""
    update = Update()
    run = Graphed(update, "training", cuda=update)
    with recording() as paths:
        for _ in range(NUM_PLAIN + 1):
            run(batch_of(1, 4))
        update.refuses = RuntimeError("not permitted")
        for _ in range(NUM_PLAIN + 1):
            run(batch_of(1, 8))
        run(batch_of(1, 4))
    assert update.log == ["plain"] * NUM_PLAIN + ["replayed"] + ["plain"] * (NUM_PLAIN + 2)
    assert capsys.readouterr().err == "training goes on without CUDA graphs: it cannot be captured: not permitted\n"
    assert paths == [f"{GRAPH_PATH}.training", f"{GRAPH_PATH}.training.given_up"]


def test_after_a_capture_of_others_that_fails_graphs_are_captured_again():
    """Evaluation's fails, say: training must not follow the random numbers of before."""
    update, other = Update(), Update()
    run, others = (Graphed(each, "training", cuda=each) for each in (update, other))
    for _ in range(NUM_PLAIN + 1):
        run(batch_of(1))
    other.refuses = RuntimeError("not permitted")
    for _ in range(NUM_PLAIN + 1):
        others(batch_of(1))
    assert (run.reason, others.reason) == ("", "it cannot be captured: not permitted")
    run(batch_of(1))
    assert update.pools == [None, None], "the memory of graphs that have ended must not be asked for"
    assert update.log == ["plain"] * NUM_PLAIN + ["replayed"] * 2


def test_what_a_cache_had_lives_as_long_as_the_graph_that_reads_it():
    """A replay reads it by its address, and the cache may have given it up."""

    class Table:
        pass

    cache: dict[int, Table] = {}

    def function(batch):
        width = int(batch.tokens.shape[1])
        held(cache.setdefault(width, Table()))
        return update(batch)

    update = Update()
    run = Graphed(function, "training", cuda=update)
    for _ in range(NUM_PLAIN + 1):
        run(batch_of(1, 4))
    run(batch_of(1, 8))  # not captured
    tables = [weakref.ref(table) for table in cache.values()]
    cache.clear()
    gc.collect()
    assert [table() is not None for table in tables] == [True, False]
