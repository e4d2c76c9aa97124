"""Bytes that one pass of a computation needs, exactly: what tensors occupy at the peak, and what is kept for backward.

GPU numbers come from torch's caching allocator. On CPU the profiler reports every allocation and release of tensor
memory with its size, and their running sum is exact, whatever the operating system does. Work space that a library
takes from `malloc` by itself (a BLAS packing its operands) is no tensor: only the high water of the process shows it.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.graph import saved_tensors_hooks

from attn_zoo.measure.passes import clear_grads, grad_like, require_graph, require_leaves
from attn_zoo.records import PASSES, CallPass, Memory

MIDDLE_MARK = "attn_zoo: second part starts"


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each distinct storage by its address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _own_bytes(tensors: Iterable[Tensor], known: Iterable[int]) -> int:
    """Return the bytes of the elements of `tensors`, of a storage no more than it has, without those in `known`."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if (place := storage.data_ptr()) not in known:  # several gradients may be parts of one storage
            sizes[place] = min(storage.nbytes(), sizes.get(place, 0) + tensor.numel() * tensor.element_size())
    return sum(sizes.values())


class _Kept:
    """One saved tensor; lives as long as the graph holds it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """Watches what autograd saves for backward while active. Use as a context manager around the forward.

    Sees built-in operations, `ctx.save_for_backward` of custom functions, and what a compiled graph saves, which need
    not be recompiled for it; a tensor that a custom function hangs on `ctx` under a name of its own is invisible.
    What activation checkpointing drops is not counted; what it keeps is.

    Attributes:
        most_bytes: most that was held when a backward began; 0 before the first. Of a call that makes forward and
            backward, that is what it saves.
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._hooks: Any = None
        self._has_grown = False
        self.most_bytes = 0

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor.detach())  # a tensor that knows its graph would keep that graph, and itself, alive forever
        self._kept.add(kept)
        self._has_grown = True
        return kept

    def _unpack(self, kept: _Kept) -> Tensor:
        if self._has_grown:  # the first tensor that a backward asks for: none has been released yet
            self._has_grown, self.most_bytes = False, max(self.most_bytes, self.num_bytes)
        return kept.tensor

    def __enter__(self) -> Self:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._hooks.__exit__(*exc)

    @property
    def num_bytes(self) -> int:
        """Bytes held now by graphs built under watch, each storage once."""
        return sum(_storages(kept.tensor for kept in self._kept).values())


Between = Callable[[], object]
_Run = Callable[[Between], tuple[Tensor, int]]


def _run(forward: Callable[[], Tensor], seed: Tensor | None, pass_: CallPass, between: Between) -> tuple[Tensor, int]:
    """Run the pass once, `between` after its forward; return the output, still alive, and the bytes saved."""
    with torch.set_grad_enabled(PASSES[pass_].has_graph):
        with SavedTensors() as saved:
            output = forward()
        saved_bytes = saved.num_bytes
    between()
    if seed is not None:
        output.backward(seed)  # type: ignore[no-untyped-call]
    return output, saved_bytes


def _warm_up(forward: Callable[[], Tensor], pass_: CallPass) -> Tensor | None:
    """Run the pass once and return the gradient that its backward started from, if it has one."""
    kind = PASSES[pass_]
    with torch.set_grad_enabled(kind.has_graph):
        output = forward()
    if kind.has_graph:
        require_graph(output, pass_)
    if not kind.backwards:
        return None
    seed = grad_like(output)
    output.backward(seed)  # type: ignore[no-untyped-call]
    return seed


def _mark() -> None:
    with profiler.record_function(MIDDLE_MARK):
        pass


def _cpu_growth(run: _Run, is_backward_alone: bool) -> tuple[int, Tensor, int]:
    """Return how far tensor memory rose above its start, the output, and the bytes saved."""
    with profiler.profile(use_cpu=True, profile_memory=True) as profile:
        output, saved_bytes = run(_mark)
    peak = 0
    for name, held in _levels(profile):
        peak = held if is_backward_alone and name == MIDDLE_MARK else max(peak, held)
    return peak, output, saved_bytes


def _cpu_rise(update: Callable[[], object], settle: Callable[[], object]) -> int:
    """Return how far tensor memory rises in an update above its state before; `settle` runs between two of them.

    The profiler does not see the release of what was allocated before it began, such as gradients. So it watches two.
    """
    with profiler.profile(use_cpu=True, profile_memory=True) as profile:
        update()
        settle()
        _mark()
        update()
    start = peak = 0
    for name, held in _levels(profile):
        if name == MIDDLE_MARK:
            start = peak = held
        peak = max(peak, held)
    return peak - start


def _levels(profile: Any) -> Iterator[tuple[str, int]]:
    """Yield events in order, each with the bytes that were allocated since the beginning and not released."""
    assert profile.kineto_results is not None  # set when the profile ended
    held = 0
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        held += event.nbytes()
        yield event.name(), held


def _cuda_growth(run: _Run, is_backward_alone: bool, device: torch.device) -> tuple[int, Tensor, int]:
    """Return how far allocated memory rose above its start, the output, and the bytes saved."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # so that what is reserved afterwards was reserved for this pass
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output, saved_bytes = run((lambda: torch.cuda.reset_peak_memory_stats(device)) if is_backward_alone else _mark)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, output, saved_bytes


def _high_water_bytes() -> int | None:
    """Return the most memory this process has occupied since the mark was reset, on Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)


def _reset_high_water() -> bool:
    """Give unused heap back to the system and reset the mark to what is occupied now."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _process_growth(run: _Run, is_backward_alone: bool) -> int | None:
    """Return how far the process's memory rose above its start, or None where the system does not tell."""
    before = _high_water_bytes() if _reset_high_water() else None
    if before is None:
        return None
    run(_reset_high_water if is_backward_alone else _mark)
    after = _high_water_bytes()
    return None if after is None else max(0, after - before)


def memory_of_pass(
    forward: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    pass_: CallPass,
    *,
    device: torch.device | str = "cpu",
) -> Memory:
    """Measure the memory of one pass of `forward`. It runs once before, so that caches and work spaces exist already.

    * `input_bytes`: storages of `leaves`, each once.
    * `output_bytes`: elements of the output; zero where it is a view of an input.
    * `peak_bytes`: `input_bytes` plus the most that tensor memory rose above its state before the pass. For `"bwd"` the
      state is that before the forward too, but only the time after the forward counts: saved tensors and output are
      inside, the forward's own temporaries are not.
    * `extra_bytes`: `peak_bytes` without inputs, output and gradients of the leaves. The output lives to the end of the
      pass, so this is never negative.
    * `saved_bytes`: storages that the graph holds when the forward is over, inputs included; 0 for `"infer"`.
    * `reserved_bytes` (GPU): most that the caching allocator held, everything in the process included.
    * `process_bytes` (CPU, Linux): rise of the process's high water over the pass; pages count when touched.

    The gradient that backward starts from belongs to the caller and is not counted; leaves have none afterwards.

    Raises:
        ValueError: see `passes.make_pass`.
        torch.OutOfMemoryError: the device has too little memory.
    """
    device = torch.device(device)
    require_leaves(leaves, pass_)
    clear_grads(leaves)
    is_backward_alone = not PASSES[pass_].forwards
    try:
        run = partial(_run, forward, _warm_up(forward, pass_), pass_)
        clear_grads(leaves)
        process_bytes = _process_growth(run, is_backward_alone) if device.type == "cpu" else None
        clear_grads(leaves)
        if device.type == "cuda":
            growth, output, saved_bytes = _cuda_growth(run, is_backward_alone, device)
        else:
            growth, output, saved_bytes = _cpu_growth(run, is_backward_alone)
        inputs = _storages(leaves)
        output_bytes = _own_bytes([output], inputs)
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        grad_bytes = _own_bytes(grads, {*inputs, *_storages([output])})
        input_bytes = sum(inputs.values())
        return Memory(
            peak_bytes=input_bytes + growth,
            extra_bytes=growth - output_bytes - grad_bytes,
            saved_bytes=saved_bytes,
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
            process_bytes=process_bytes,
        )
    finally:
        clear_grads(leaves)


def memory_of_update(
    update: Callable[[], object],
    held: Callable[[], Sequence[Tensor]],
    *,
    settle: Callable[[], object] = lambda: None,
    device: torch.device | str = "cpu",
) -> Memory:
    """Measure the memory of a call that changes in place what is `held` between calls, such as a training step.

    It runs once before, so that what it keeps between two calls (gradients, averages) is there already; that run is
    watched for what its graph saves. `settle` runs before every call and is no part of it.

    * `input_bytes`: storages of what is held: weights, gradients, the optimiser's averages, data.
    * `peak_bytes`: `input_bytes` plus the most that tensor memory rose above its state before the call.
    * `extra_bytes`: that rise.
    * `saved_bytes`: storages that its graph holds when its backward begins, weights and data included; the most, where
      it has several backwards.
    * `reserved_bytes`, `process_bytes`: as for `memory_of_pass`. `output_bytes` is not known.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """
    device = torch.device(device)

    def run(between: Between) -> tuple[Tensor, int]:  # noqa: ARG001 - a whole has no middle
        update()
        return torch.empty(0), 0

    settle()
    with SavedTensors() as saved:
        update()
    settle()
    process_bytes = _process_growth(run, False) if device.type == "cpu" else None
    settle()
    growth = _cuda_growth(run, False, device)[0] if device.type == "cuda" else _cpu_rise(update, settle)
    held_bytes = sum(_storages(held()).values())
    return Memory(
        peak_bytes=held_bytes + growth,
        extra_bytes=growth,
        saved_bytes=saved.most_bytes or None,  # no backward was seen
        input_bytes=held_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        process_bytes=process_bytes,
    )
