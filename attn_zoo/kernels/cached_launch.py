"""Launches of Triton kernels from a cache: what Triton decides at every launch is decided once for each kind of call.

Triton binds some forty arguments, specialises each and looks for the compiled kernel whenever it is launched: 20 to
60 us of the host, longer than the GPU needs for a short sequence. All of it follows from types, sizes, strides and from
whether addresses are multiples of 16. So who launches makes a key of these (`kind_of`), and keeps what it found.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

MAX_KINDS = 1024  # of calls that are remembered; a loop over ever new lengths must not keep them all


class CachedLaunch:
    """A kernel with its grid and everything it takes but tensors. The first call compiles it, later ones only launch.

    They call what Triton itself calls when it has bound the arguments, without the hooks that it calls around a launch,
    which take longer. Where somebody is called before launches, a profiler or a counter of FLOPs, Triton itself does.

    Args:
        kernel: under `triton.jit`.
        grid: of one to three dimensions.
        rest: all arguments but the tensors by name, and options such as `num_warps`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], rest: dict[str, Any]) -> None:
        self._kernel, self._grid, self._rest = kernel, grid, rest
        names = kernel.arg_names
        fixed = [name for name in names if name in rest]
        self._tensor_names = [name for name in names if name not in rest]
        self._fixed = tuple([rest[name] for name in fixed])
        self._in_order = itemgetter(*[[*self._tensor_names, *fixed].index(name) for name in names])
        self._run: Callable[..., Any] | None = None
        self._watchers: Sequence[Any] = ()  # of launches, while there are any

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch it on the current stream.

        Args:
            tensors: in the kernel's order, of the kind that the first call was given.
        """
        if self._run is not None and not self._watchers:
            first = tensors[0]
            assert first is not None
            self._run(first.get_device(), *self._in_order(tensors + self._fixed))
            return
        compiled = self._kernel[self._grid](**dict(zip(self._tensor_names, tensors, strict=True)), **self._rest)
        if compiled is not None:  # the interpreter compiles nothing
            self._run, self._watchers = _straight_to(compiled, self._grid), _watchers()


def _straight_to(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return what launches a compiled kernel on the current stream of a device: its number, then all arguments."""
    from triton.runtime import driver

    run, stream_of, blocks = compiled.run, driver.active.get_current_stream, (*grid, 1, 1)[:3]
    what = compiled.function, compiled.packed_metadata, None, None, None  # data for hooks, those before and after

    def launch(device: int, *arguments: Any, _keeps: Any = compiled) -> None:  # whose end would unload the function
        run(*blocks, stream_of(device), *what, *arguments)

    return launch


def _watchers() -> Sequence[Any]:
    """Return Triton's own list of what is called before a launch, which changes as hooks come and go."""
    from triton import knobs

    calls: Sequence[Any] = getattr(knobs.runtime.launch_enter_hook, "calls", ())
    return calls


def kind_of(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return what a launch can depend on: shapes, strides, types, device and how addresses are aligned."""
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) for x in tensors])


def remembered(kept: dict[Hashable, _T], kind: Hashable | None, make: Callable[[], _T]) -> _T:
    """Return what was made for calls of this kind, at most `MAX_KINDS` of them; of the kind None nothing is kept."""
    if kind is None:
        return make()
    found = kept.get(kind)
    if found is None:
        if len(kept) >= MAX_KINDS:
            kept.clear()
        found = kept[kind] = make()
    return found


_NOTHING: AbstractContextManager[Any] = nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's GPU the current one, on which Triton launches."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)
