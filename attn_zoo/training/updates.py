"""Updates of a model's weights: one step after another, and nothing else. Training and pretraining share them.

Every random draw is a function of seed and step, so that an interrupted run continues with the same results on the same
machine. The host never waits for the device inside a step.

A small model's update is hundreds of kernels of microseconds, and the host takes longer to launch them than the GPU to
run them: `GraphedUpdate` makes forward, loss, backward and optimiser one CUDA graph. The first updates of every batch
shape run as they are (so kernels are compiled and chosen, and nothing is done twice); then one is captured, and
replayed from there on. Random numbers of the device follow its generator at every replay, so that dropout is what it
would be without. What a graph would freeze is not captured: a model that draws on the host. What cannot be captured,
such as a model that asks the device for a number, goes on as before.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from attn_zoo.kernels.trace import note_path
from attn_zoo.training.batches import Batch, Batcher, DataOrder, Feed
from attn_zoo.training.checkpoint import Numbers, load_checkpoint, save_checkpoint
from attn_zoo.training.evaluation import precision
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.protocol import Protocol, learning_rate
from attn_zoo.training.seeding import derive_seed, seed_everything
from attn_zoo.training.training_flops import CompiledFlopCounter, FlopCounter

_LOOK_EVERY = 20  # steps between checks for non-finite values, which wait for the device; the step is known exactly


class DivergedError(Exception):
    """Loss or gradient became infinite or not a number.

    Attributes:
        step: the update at which it happened.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"{what} is not finite at step {step}")
        self.step = step


def make_optimizer(model: nn.Module, protocol: Protocol) -> torch.optim.Optimizer:
    """Return AdamW; matrices outside embeddings are decayed, all else is not."""
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_decayed = [parameter.ndim >= 2 and id(parameter) not in embeddings for parameter in trained]
    groups = [
        {"params": [p for p, is_in in zip(trained, is_decayed, strict=True) if is_in is decays], "weight_decay": decay}
        for decays, decay in ((True, protocol.weight_decay), (False, 0.0))
    ]
    # On a GPU the rate is a number on the device: it can change without the host launching the update again.
    is_cuda = any(parameter.is_cuda for parameter in trained)
    rate = torch.zeros((), device=trained[0].device) if is_cuda else 0.0
    return torch.optim.AdamW(groups, lr=rate, betas=protocol.betas, eps=protocol.eps, fused=True, capturable=is_cuda)


class Updater:
    """A model on its device, its optimiser, and their progress.

    With dtype `"bfloat16"` it trains under autocast; other types are the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: AbstractObjective,
        batcher: Batcher,
        protocol: Protocol,
        *,
        num_steps: int,
        seed: int,
        dtype: str,
    ) -> None:
        self.model, self.objective, self.batcher, self.protocol = model, objective, batcher, protocol
        self.num_steps, self.seed, self.dtype = num_steps, seed, dtype
        self.optimizer = make_optimizer(model, protocol)
        self.flops = CompiledFlopCounter(model) if protocol.compile else FlopCounter(model)
        self._compiled, self._run = model, self._learn
        if protocol.compile:
            dynamic = False if batcher.is_full_length else None
            self._compiled = cast(nn.Module, torch.compile(model, dynamic=dynamic))
            if batcher.is_full_length and batcher.device.type == "cuda":
                self._run = GraphedUpdate(self._learn)
        self.numbers = Numbers()
        self.best_weights: dict[str, Tensor] = {}
        self._step = torch.zeros((), dtype=torch.int64, device=batcher.device)
        self._first_bad = torch.zeros_like(self._step)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=batcher.device)

    def order(self, feed: Feed) -> DataOrder:
        """Return the order in which the examples are visited."""
        protocol = self.protocol
        return DataOrder(
            feed.costs, batch_size=protocol.batch_size, seed=self.seed, bucket_batches=protocol.bucket_batches
        )

    def resume(self, path: Path, identity: str) -> bool:
        """Continue from the checkpoint at `path`; return whether there is one for this run."""
        checkpoint = load_checkpoint(path, identity)
        if checkpoint is None:
            return False
        self.model.load_state_dict(checkpoint.weights)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": checkpoint.optimizer, "param_groups": groups})
        self.best_weights = {name: tensor.to(self.batcher.device) for name, tensor in checkpoint.best_weights.items()}
        self.numbers = checkpoint.numbers
        self.flops.restore(checkpoint.numbers.train_flops)
        return True

    def save(self, path: Path, identity: str) -> None:
        """Write a checkpoint."""
        save_checkpoint(path, identity, self.numbers, self.model, self.best_weights, self.optimizer)

    def _advance(self, feed: Feed, order: DataOrder, after_step: Callable[[int], None] | None) -> float:
        """Make the updates up to the next evaluation; return their mean loss."""
        every, first = self.protocol.eval_every, self.numbers.step + 1
        stop = min(self.num_steps, (self.numbers.step // every + 1) * every)
        self._loss_sum.zero_()
        self.model.train()
        _reset_peak(self.batcher.device)
        start = self._now()
        for step in range(first, stop + 1):
            self.step(feed, order)
            if after_step is not None:
                after_step(step)
        self._look()
        mean_loss = float(self._loss_sum) / (stop - first + 1)
        self.numbers.train_s += self._now() - start
        self.numbers.train_flops = self.flops.training_flops
        if (peak := _peak_bytes(self.batcher.device)) is not None:
            self.numbers.peak_bytes = max(peak, self.numbers.peak_bytes or 0)
        return mean_loss

    def make_updates(
        self,
        feed: Feed,
        record: Callable[[float], None],
        after_evaluation: Callable[[Numbers], None] | None,
        after_step: Callable[[int], None] | None,
    ) -> None:
        """Make the updates that are left.

        Args:
            feed: examples to learn from.
            record: told the mean loss up to each evaluation; evaluates.
            after_evaluation: called when the state is worth saving.
            after_step: called with the number of updates done.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        order = self.order(feed)
        while self.numbers.step < self.num_steps:
            record(self._advance(feed, order, after_step))
            if after_evaluation is not None:
                after_evaluation(self.numbers)

    def step(self, feed: Feed, order: DataOrder) -> None:
        """Make the next update, of a model in training mode, and go on without waiting for the device.

        Raises:
            DivergedError: loss or gradient was not finite in one of the latest updates.
        """
        step = self.numbers.step + 1
        self._update(step, self.batcher.batch(feed, order.rows(step)))
        if step % _LOOK_EVERY == 0:
            self._look()
        self.numbers.step = step

    @property
    def num_unlike(self) -> int:
        """First updates of a batch shape that run otherwise than all that follow: until a CUDA graph is captured."""
        return NUM_EAGER + 1 if isinstance(self._run, GraphedUpdate) else 0

    def launch_singly(self) -> None:
        """Use no CUDA graph from here on: what happens inside one is hidden from the allocator's statistics."""
        self._run = self._learn

    def _update(self, step: int, batch: Batch) -> None:
        """Set learning rate and seed of the update, then run it."""
        protocol = self.protocol
        batch = self.objective.prepare(batch, step)
        if isinstance(self.flops, CompiledFlopCounter):
            with precision(self.dtype, self.batcher.device):
                self.flops.add(batch.shapes, partial(self.objective.outputs, self.model, batch))
        rate = learning_rate(
            protocol.schedule,
            step,
            base_lr=protocol.base_lr,
            warmup_steps=protocol.warmup_steps,
            num_steps=self.num_steps,
            embed_dim=protocol.embed_dim,
        )
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._step.fill_(step)
        seed_everything(derive_seed(self.seed, "dropout", step))
        self._run(batch)
        self.numbers.num_tokens += batch.num_tokens
        self.numbers.num_positions += batch.num_positions

    def _learn(self, batch: Batch) -> None:
        """Make an update on the device; nothing here depends on the host."""
        with precision(self.dtype, self.batcher.device):
            outputs = self.objective.outputs(self._compiled, batch)
        loss = self.objective.loss(outputs, batch)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.protocol.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.protocol.clip_norm, norm)
        self.optimizer.step()
        is_bad = ~(torch.isfinite(loss.detach()) & torch.isfinite(norm)) & (self._first_bad == 0)
        self._first_bad += is_bad * self._step
        self._loss_sum += loss.detach()

    def _look(self) -> None:
        if (step := int(self._first_bad)) > 0:
            raise DivergedError(step, "loss or gradient norm")

    def _now(self) -> float:
        if self.batcher.device.type == "cuda":
            torch.cuda.synchronize(self.batcher.device)
        return time.perf_counter()


def _reset_peak(device: torch.device) -> None:
    """Reset the peak of memory in use.

    That is the allocator's peak on GPU and the high water of the process on CPU, which holds everything: interpreter
    and libraries (some 300 MB), data, weights. On Linux the kernel resets it here, so that what the process did before
    does not count; elsewhere it is that of the whole process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int | None:
    """Return the most memory in use since `_reset_peak`, or None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else 1024 * highest


GRAPH_PATH = "cuda_graph"
"""Noted among the kernels of a run when its first update is captured."""

NUM_EAGER = 3
"""Updates of a shape before it is captured."""

MAX_SHAPES = 16
"""Shapes captured at most: each keeps the memory of an update."""


class GraphedUpdate:
    """Calls `update(batch)`, from its third time on as a graph.

    Args:
        update: reads the batch, and beside it only tensors that stay where they are. It must leave nothing to the host.
        cuda: what to use as `torch.cuda`.

    Attributes:
        reason: why nothing is captured any more, or empty.
    """

    def __init__(self, update: Callable[[Batch], None], cuda: Any = torch.cuda) -> None:
        self.reason = ""
        self._update, self._cuda = update, cuda
        self._num_seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, tuple[Any, Batch]] = {}
        self._stream: Any = None

    def __call__(self, batch: Batch) -> None:
        """Make one update."""
        shape = (*batch.shapes, batch.labels.shape, batch.key_padding_mask is None, batch.other_padding_mask is None)
        if shape not in self._captured:
            seen = self._num_seen[shape] = self._num_seen.get(shape, 0) + 1
            may_capture = seen > NUM_EAGER and not self.reason and len(self._captured) < MAX_SHAPES
            if not (may_capture and self._capture(shape, batch)):
                self._plain(batch)
                return
        graph, held = self._captured[shape]
        for name, tensor in _tensors(held).items():
            tensor.copy_(getattr(batch, name))
        graph.replay()

    def _plain(self, batch: Batch) -> None:
        """Run as it is, on the stream that will be captured: what torch keeps for a stream is then there."""
        cuda, before = self._cuda, _host_states()
        self._stream = self._stream or cuda.Stream()
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            self._update(batch)
        cuda.current_stream().wait_stream(self._stream)
        if _host_states() != before:
            self.reason = "the model draws random numbers on the host"

    def _capture(self, shape: Hashable, batch: Batch) -> bool:
        """Capture an update without running it; return whether that was possible."""
        cuda = self._cuda
        kept: dict[str, Any] = {name: tensor.clone() for name, tensor in _tensors(batch).items()}
        held = replace(batch, **kept)
        graph = cuda.CUDAGraph()
        # A capture that fails leaves the generator believing that it goes on.
        generator = cuda.default_generators[cuda.current_device()]
        before = generator.clone_state()
        try:
            with cuda.graph(graph, stream=self._stream):
                self._update(held)
        except RuntimeError as error:
            generator.graphsafe_set_state(before)
            self.reason = f"it cannot be captured: {str(error).partition(chr(10))[0]}"
            return False
        note_path(GRAPH_PATH)
        self._captured[shape] = graph, held
        return True


def _tensors(batch: Batch) -> dict[str, Tensor]:
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _host_states() -> tuple[object, ...]:
    """Return the states of the host's generators, comparable."""
    numbers = np.random.get_state(legacy=False)["state"]  # noqa: NPY002 - the global one is what a variant may use
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), numbers["key"].tobytes(), numbers["pos"]
