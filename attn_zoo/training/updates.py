"""Updates of a model's weights: one step after another, and nothing else. Training and pretraining share them.

Every random draw is a function of seed and step, so that an interrupted run continues with the same results: on the
same CPU to the last digit, on a GPU but for sums in no fixed order. The host never waits for the device inside a step.

A compiled model's forward, loss, backward and optimiser are one CUDA graph on a GPU (`training.graphed`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from attn_zoo.errors import GateError
from attn_zoo.kernels.compiled_code import allow_compilations, keep_compiled_code_apart, keep_vectors_short
from attn_zoo.training.batches import Batch, Batcher, DataOrder, Feed
from attn_zoo.training.checkpoint import Numbers, load_checkpoint, save_checkpoint
from attn_zoo.training.compiled_gate import CHECK, Gradients, check_gradients
from attn_zoo.training.evaluation import precision
from attn_zoo.training.graphed import NUM_PLAIN, Graphed
from attn_zoo.training.objective import AbstractObjective
from attn_zoo.training.protocol import Protocol, learning_rate
from attn_zoo.training.ranks import ALONE, Ranks
from attn_zoo.training.seeding import derive_seed, seed_everything
from attn_zoo.training.training_flops import CompiledFlopCounter, FlopCounter, buffers_kept

LARGE_BYTES, LARGE_EVERY_S = 2 * 2**20, 10.0
"""A checkpoint of more bytes is written at most so often: it takes as long as many updates of milliseconds."""

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
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    # A bias of each head is a matrix.
    is_decayed = [p.ndim >= 2 and id(p) not in embeddings and not name.endswith("bias") for name, p in named.items()]
    groups = [
        {"params": [p for p, is_in in zip(trained, is_decayed, strict=True) if is_in is decays], "weight_decay": decay}
        for decays, decay in ((True, protocol.weight_decay), (False, 0.0))
    ]
    # On a GPU the rate is a number on the device: it can change without the host launching the update again.
    is_cuda = any(parameter.is_cuda for parameter in trained)
    rate = torch.zeros((), device=trained[0].device) if is_cuda else 0.0
    return torch.optim.AdamW(groups, lr=rate, betas=protocol.betas, eps=protocol.eps, fused=True, capturable=is_cuda)


def start_compilers() -> None:
    """Start the processes that compile kernels for a GPU, which take seconds: while the data are made, not later."""
    with contextlib.suppress(ImportError):  # torch's own; without it they start when they are needed
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


class Updater:
    """A model on its device, its optimiser, and their progress.

    With dtype `"bfloat16"` it trains under autocast; other types are the model's own. Of several `ranks` each makes the
    same updates, from its part of every batch.
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
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.objective, self.batcher, self.protocol = model, objective, batcher, protocol
        self.num_steps, self.seed, self.dtype, self.ranks = num_steps, seed, dtype, ranks
        self.optimizer = make_optimizer(model, protocol)
        self.flops = CompiledFlopCounter(model) if protocol.compile else FlopCounter(model)
        self.compiled: nn.Module = model
        self._run: Callable[[Batch], object] = self._learn
        if protocol.compile:
            keep_compiled_code_apart()
            keep_vectors_short()
            allow_compilations()
            dynamic = False if batcher.is_fixed_length else None
            self.compiled = cast(nn.Module, torch.compile(model, dynamic=dynamic))
            if batcher.device.type == "cuda":
                start_compilers()
                # Not with several ranks: a graph would hold their messages, and one might capture while another runs.
                if ranks.size == 1:
                    self._run = Graphed(self._learn, "training")
        self._num_seen: Counter[Hashable] = Counter()  # compiled calls by mode and shape
        self.numbers = Numbers()
        self._save_again = 0.0
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
        self.ranks.require_equal(-1 if checkpoint is None else checkpoint.numbers.step, "checkpoint")
        if checkpoint is None:
            return False
        self.model.load_state_dict(checkpoint.weights)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": checkpoint.optimizer, "param_groups": groups})
        self.best_weights = {name: tensor.to(self.batcher.device) for name, tensor in checkpoint.best_weights.items()}
        self.numbers = checkpoint.numbers
        self.flops.restore(checkpoint.numbers.train_flops if self.ranks.is_first else 0.0)
        return True

    def save(self, path: Path, identity: str) -> None:
        """Write a checkpoint, of several ranks the first; a large one only some seconds after the one before."""
        if not self.ranks.is_first or time.monotonic() < self._save_again:
            return
        save_checkpoint(path, identity, self.numbers, self.model, self.best_weights, self.optimizer)
        if path.stat().st_size > LARGE_BYTES:
            self._save_again = time.monotonic() + LARGE_EVERY_S

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
        flops = self.flops.training_flops
        self.numbers.train_flops = None if flops is None else self.ranks.total(flops)
        self._note_peak()
        if (peak := self.numbers.peak_bytes) is not None:
            self.numbers.peak_bytes = int(self.ranks.largest(peak))
        self.ranks.follow_first(self.model.buffers())  # what a mixer keeps of the batches that it saw
        return mean_loss

    def _note_peak(self) -> None:
        if (peak := _peak_bytes(self.batcher.device)) is not None:
            self.numbers.peak_bytes = max(peak, self.numbers.peak_bytes or 0)

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
            GateError: the compiled model has other gradients than the model as written.
        """
        order = self.order(feed)
        self.ranks.follow_first([*self.model.parameters(), *self.model.buffers()])
        if self.protocol.compile and self.numbers.step < self.num_steps:
            self.numbers.checks = list(self.check_compiled(feed, order))
        while self.numbers.step < self.num_steps:
            record(self._advance(feed, order, after_step))
            if after_evaluation is not None:
                after_evaluation(self.numbers)

    def check_compiled(self, feed: Feed, order: DataOrder) -> tuple[str, ...]:
        """Compare the gradients of the next update with those of the model as written; return the name of the check.

        Nothing is changed, and the seconds are of compiling. Where memory is too small for the model as written, the
        check is left out, and the cell's log says so.

        Raises:
            GateError: the compiled gradients are wrong, on any rank.
        """
        start, step = self._now(), self.numbers.step + 1
        self.model.train()
        batch = self.ranks.part(self.objective.prepare(self.batcher.batch(feed, order.rows(step)), step))
        error: GateError | None = None
        checks: tuple[str, ...] = ()
        with buffers_kept(self.model):
            compiled = self._gradients(self.compiled, self.tell_compiler(batch), 0)
            try:
                checks = check_gradients(compiled, lambda number: self._gradients(self.model, batch, 1 + number))
            except torch.OutOfMemoryError:
                sys.stderr.write("compiled gradients were not checked: the model as written does not fit in memory\n")
            except GateError as found:
                error = found
        if self.ranks.largest(float(error is not None)):  # all of them end
            raise error or GateError(CHECK, "compiled, the gradients of another rank are wrong")
        took = self._now() - start
        self.numbers.train_s += took
        self.numbers.compile_s += took
        return checks

    def _gradients(self, model: nn.Module, batch: Batch, draw: int) -> Gradients:
        """Return the gradients of the loss, zero where a parameter has no part in it."""
        seed_everything(self.ranks.seed(derive_seed(self.seed, "gate", draw)))
        with precision(self.dtype, self.batcher.device):
            outputs = self.objective.outputs(model, batch)
        loss = self.objective.loss(outputs, batch)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        return dict(zip(trained, found, strict=True))

    def step(self, feed: Feed, order: DataOrder) -> None:
        """Make the next update, of a model in training mode, and go on without waiting for the device.

        Raises:
            DivergedError: loss or gradient was not finite in one of the latest updates.
        """
        step = self.numbers.step + 1
        batch = self.batcher.batch(feed, order.rows(step))
        if self.is_unlike(batch, self._run):
            start = self._now()
            self._update(step, batch)
            self.numbers.compile_s += self._now() - start
            self.numbers.compile_tokens += batch.num_tokens
        else:
            self._update(step, batch)
        if step % _LOOK_EVERY == 0:
            self._look()
        self.numbers.step = step

    @property
    def num_unlike(self) -> int:
        """First updates of a batch shape that run otherwise than all that follow: they compile, or capture a graph."""
        return self._num_unlike(self._run)

    def _num_unlike(self, run: Callable[[Batch], object]) -> int:
        return NUM_PLAIN + 1 if isinstance(run, Graphed) else int(self.protocol.compile is True)

    def is_unlike(self, batch: Batch, run: Callable[[Batch], object]) -> bool:
        """Tell whether this call of `run` compiles or captures, and count it."""
        shape = (self.model.training, *batch.shapes)
        if self._num_seen[shape] >= self._num_unlike(run):
            return False
        self._num_seen[shape] += 1
        return True

    def tell_compiler(self, batch: Batch) -> Batch:
        """Return the batch that a compiled model is given: its lengths vary where those of the task do."""
        if self.protocol.compile and not self.batcher.is_fixed_length:
            batch.tell_compiler()
        return batch

    def launch_singly(self) -> None:
        """Use no CUDA graph from here on: what happens inside one is hidden from the allocator's statistics."""
        self._run = self._learn

    def _update(self, step: int, batch: Batch) -> None:
        """Set learning rate and seed of the update, then run it."""
        protocol = self.protocol
        whole = self.objective.prepare(batch, step)
        batch = self.ranks.part(whole)
        if isinstance(self.flops, CompiledFlopCounter):
            self.flops.add(batch.shapes, partial(self._run_as_written, batch))
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
        seed_everything(self.ranks.seed(derive_seed(self.seed, "dropout", step)))
        self._run(batch)
        self.numbers.num_tokens += batch.num_tokens
        self.numbers.num_positions += batch.num_positions

    def _run_as_written(self, batch: Batch) -> None:
        """Run a forward that is counted and no part of training, nor is the memory that it takes."""
        self._note_peak()
        with precision(self.dtype, self.batcher.device):
            self.objective.outputs(self.model, batch)
        _reset_peak(self.batcher.device)

    def _learn(self, batch: Batch) -> tuple[()]:
        """Make an update on the device; nothing here depends on the host."""
        with precision(self.dtype, self.batcher.device):
            outputs = self.objective.outputs(self.compiled, self.tell_compiler(batch))
        loss = self.objective.loss(outputs, batch)
        if batch.weight is not None:
            loss = loss * batch.weight.to(loss.dtype)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        loss = self.ranks.sum_gradients(self.model.parameters(), loss.detach())
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if self.protocol.clip_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.protocol.clip_norm, norm)
        self.optimizer.step()
        is_bad = ~(torch.isfinite(loss) & torch.isfinite(norm)) & (self._first_bad == 0)
        self._first_bad += is_bad * self._step
        self._loss_sum += loss
        return ()

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
