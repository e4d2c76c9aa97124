"""A function of a batch as CUDA graphs, one for each shape of a batch.

A small model's update is hundreds of kernels of microseconds, and the host takes longer to launch them than the GPU to
run them. The first batches of every shape run as they are (so kernels are compiled and chosen, and nothing is done
twice); then one is captured, and replayed from there on. Random numbers of the device follow its generator at every
replay, so that dropout is what it would be without. What a graph would freeze is not captured: a model that draws on
the host. What cannot be captured, such as a model that asks the device for a number, goes on as before. The record says
whether graphs served all shapes.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_zoo.kernels.held import holding
from attn_zoo.kernels.trace import note_path
from attn_zoo.measure.capture import capturing, num_failed
from attn_zoo.training.batches import Batch

GRAPH_PATH = "cuda_graph"
"""Noted among the kernels of a run, with the name of what is captured, when its first graph is.

With `.partly` where some shapes have none, and `.given_up` where there were graphs until a capture failed.
"""

NUM_PLAIN = 3
"""Batches of a shape before it is captured."""

MAX_SHAPES = 128
"""Shapes captured at most: each keeps a copy of a batch, and what it returns. Pairs of inputs come in hundreds."""


class Graphed:
    """Calls `function(batch)`, from the fourth batch of a shape on as a graph.

    Args:
        function: reads the batch, and beside it only tensors that stay where they are, or that are `held`. It must
            leave nothing to the host. What it returns is copied out of the graph.
        name: of what is captured.
        cuda: what to use as `torch.cuda`.

    Attributes:
        reason: why nothing is captured any more, or empty.
    """

    def __init__(self, function: Callable[[Batch], tuple[Tensor, ...]], name: str, cuda: Any = torch.cuda) -> None:
        self.reason = ""
        self._function, self._name, self._cuda = function, name, cuda
        self._num_seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, tuple[Any, Batch, tuple[Tensor, ...], list[object]]] = {}
        self._num_failed = num_failed()
        self._too_large = math.inf  # positions of the smallest batch for whose graph memory did not suffice
        self._stream: Any = None
        self._pool: Any = None  # one memory for all graphs: they run one after another, and keep nothing in it

    def __call__(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the function returns."""
        if self._num_failed != num_failed():  # of whatever was captured in this process
            self._captured.clear()
            self._pool = None  # which ends with its graphs, though what they left may live on in it
            self._num_failed = num_failed()
        shape = (*batch.shapes, batch.labels.shape, batch.key_padding_mask is None, batch.other_padding_mask is None)
        if shape not in self._captured:
            seen = self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
            if seen <= NUM_PLAIN or self.reason or not self._capture(shape, batch):
                return self._plain(batch)
        graph, held, outputs, _ = self._captured[shape]
        for name, tensor in _tensors(held).items():
            tensor.copy_(getattr(batch, name))
        graph.replay()
        return tuple(output.clone() for output in outputs)

    def _plain(self, batch: Batch) -> tuple[Tensor, ...]:
        """Run as it is, on the stream that will be captured: what torch keeps for a stream is then there."""
        cuda, before = self._cuda, _host_states()
        self._stream = self._stream or cuda.Stream()
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            outputs = self._function(batch)
        cuda.current_stream().wait_stream(self._stream)
        if _host_states() != before:
            self._refuse("the model draws random numbers on the host")
        return outputs

    def _capture(self, shape: Hashable, batch: Batch) -> bool:
        """Capture a call without running it; return whether that was possible."""
        cuda = self._cuda
        if len(self._captured) == MAX_SHAPES or batch.num_positions >= self._too_large:
            note_path(f"{GRAPH_PATH}.{self._name}.partly")
            return False
        kept: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        held = replace(batch, **kept)
        graph = cuda.CUDAGraph()
        try:
            with holding() as tables, capturing(graph, self._stream, pool=self._pool, cuda=cuda):
                outputs = self._function(held)
        except torch.OutOfMemoryError:  # of this shape: smaller ones may well have a graph
            self._too_large = batch.num_positions
            note_path(f"{GRAPH_PATH}.{self._name}.partly")
            return False
        except Exception as error:  # whatever a model or a compiler raises: without a graph it may well run
            self._refuse(f"it cannot be captured: {str(error).partition(chr(10))[0]}")
            return False
        note_path(f"{GRAPH_PATH}.{self._name}")
        self._pool = graph.pool()
        self._captured[shape] = graph, held, outputs, tables
        return True

    def _refuse(self, reason: str) -> None:
        """Capture nothing any more, and say so in the cell's log and, where there are graphs, in its record."""
        if not self.reason:
            sys.stderr.write(f"{self._name} goes on without CUDA graphs: {reason}\n")
            if self._captured:  # which serve their shapes still, unless it was a capture that failed
                how = "partly" if self._num_failed == num_failed() else "given_up"
                note_path(f"{GRAPH_PATH}.{self._name}.{how}")
        self.reason = reason


def _tensors(batch: Batch) -> dict[str, Tensor]:
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _host_states() -> tuple[object, ...]:
    """Return the states of the host's generators, comparable."""
    numbers = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - the global one is what a variant may use
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), numbers["key"].tobytes(), numbers["pos"]
