"""Launches of Triton kernels from a cache: what Triton decides at every launch is decided once for each kind of call.

Triton binds some forty arguments, specialises each and looks for the compiled kernel whenever it is launched: 20 to
60 us of the host, longer than the GPU needs for a short sequence. All of it follows from types, sizes, strides and from
whether addresses are multiples of 16. So who launches makes a key of these (`kind_of`), and keeps what it found.
Of a launch from the cache only addresses change, so the rest of its arguments lies ready for CUDA's driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

MAX_KINDS = 1024  # of calls that are remembered; a loop over ever new lengths must not keep them all


launch_recorders: list[Callable[[CachedLaunch, tuple[Tensor | None, ...]], None]] = []
"""Who is told of every launch, with its tensors, once it was made."""


class DriverLaunch(NamedTuple):
    """What CUDA's driver needs to launch a compiled kernel, beside addresses of tensors and a stream.

    Args:
        function: of the driver.
        shape: of the grid and of a block, three numbers each, and bytes of shared memory.
        num_tensors: whose addresses come first.
        numbers: 8 bytes each, which follow; the last is zero.
        places: where each argument of the kernel lies among these.
    """

    function: int
    shape: tuple[int, ...]
    num_tensors: int
    numbers: bytes
    places: tuple[int, ...]


class CachedLaunch:
    """A kernel with its grid and everything it takes but tensors. The first call compiles it, later ones only launch.

    They do what Triton itself does when it has bound the arguments, without the hooks that it calls around a launch,
    which take longer. Where somebody is called before launches, a profiler or a counter of FLOPs, Triton itself does.

    Args:
        kernel: under `triton.jit`.
        grid: of one to three dimensions.
        rest: all arguments but the tensors by name, and options such as `num_warps`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], rest: dict[str, Any]) -> None:
        self._kernel, self._grid, self._rest = kernel, grid, rest
        self._tensor_names = [name for name in kernel.arg_names if name not in rest]
        self._straight: Callable[[int, tuple[int, ...]], int] | None = None
        self._watchers: Sequence[Any] = ()  # of launches, while there are any
        self.by_driver: DriverLaunch | None = None  # where it is compiled and the driver can launch it

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch it on the current stream.

        Args:
            tensors: in the kernel's order, of the kind that the first call was given.
        """
        self._launch(*tensors)
        for recorder in tuple(launch_recorders):  # other threads begin and end recordings
            recorder(self, tensors)

    def _launch(self, *tensors: Tensor | None) -> None:
        if self._straight is not None and not self._watchers:
            first = tensors[0]
            assert first is not None
            if self._straight(first.get_device(), addresses_of(*tensors)) == 0:
                return  # else Triton itself says what is wrong, if it meets that too
        compiled = self._kernel[self._grid](**dict(zip(self._tensor_names, tensors, strict=True)), **self._rest)
        if compiled is not None:  # the interpreter compiles nothing
            arguments = {name: self._rest.get(name, _ADDRESS) for name in self._kernel.arg_names}
            blocks = (*self._grid, 1, 1)[:3]
            self.by_driver = _by_driver(compiled, blocks, arguments)
            if self.by_driver is None:
                self._straight = _by_triton(compiled, blocks, arguments)
            else:
                self._straight = _straight(compiled, self.by_driver)
            self._watchers = launch_hooks()


_ADDRESS = object()  # stands for that of a tensor among arguments
_FORMATS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q"}
_FORMATS |= {"u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d", "f64": "d"}
_NUM_SCRATCH = 4  # versions of Triton end with one or two addresses of scratch memory; what a kernel lacks is not read


def _by_driver(compiled: Any, blocks: tuple[int, ...], arguments: dict[str, Any]) -> DriverLaunch | None:
    """Return what CUDA's driver needs to launch a compiled kernel.

    None for kernels that want more of a launch than a grid, and where this is not CUDA.

    Args:
        compiled: what Triton compiled.
        blocks: of the grid, three numbers.
        arguments: of the kernel, in order; `_ADDRESS` for tensors.
    """
    metadata = getattr(compiled, "metadata", None)
    needs = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "tensordesc_meta")
    if _driver() is None or metadata is None or any(getattr(metadata, name, 0) for name in needs):
        return None
    num_warps, num_clustered, shared_bytes = compiled.packed_metadata
    if num_clustered != 1:
        return None
    numbers: list[bytes] = []
    places: list[int] = []
    num_tensors = sum(value is _ADDRESS for value in arguments.values())
    tensors = iter(range(num_tensors))
    for name, value in arguments.items():
        place = next(tensors) if value is _ADDRESS else 0
        for kind, number in _flat(compiled.src.signature[name], value):
            if kind == "constexpr":  # compiled in: None, 1, and what is declared so
                continue
            if kind.startswith("*"):
                places.append(place)
            elif kind in _FORMATS:
                places.append(num_tensors + len(numbers))
                numbers.append(struct.pack(_FORMATS[kind], number).ljust(8, b"\0"))
            else:
                return None
    places += [num_tensors + len(numbers)] * _NUM_SCRATCH
    shape = *blocks, 32 * num_warps, 1, 1, shared_bytes
    return DriverLaunch(compiled.function, shape, num_tensors, b"".join(numbers) + bytes(8), tuple(places))


def _straight(compiled: Any, native: DriverLaunch) -> Callable[[int, tuple[int, ...]], int]:
    """Return what has CUDA's driver launch a compiled kernel, which takes a device and the addresses of its tensors.

    Triton's launcher asks the driver about each address and reads each number anew: 8 to 17 us on an H100's host for
    our kernels, for 5.
    """
    from triton.runtime import driver

    launch, stream_of = _driver(), driver.active.get_current_stream
    assert launch is not None
    function, shape, num_tensors, numbers, places = native
    data = ctypes.create_string_buffer(bytes(8 * num_tensors) + numbers)
    pointers = (ctypes.c_void_p * len(places))(*[ctypes.addressof(data) + 8 * place for place in places])
    fill, lock = struct.Struct(f"{num_tensors}Q").pack_into, Lock()

    # `compiled` is kept, as its end would unload the function.
    def straight(device: int, addresses: tuple[int, ...], _keeps: Any = compiled) -> int:
        stream = stream_of(device)
        with lock:  # the driver has read what lies there when it returns; until then no other thread may write there
            fill(data, 0, *addresses)
            return launch(function, *shape, stream, pointers, None)

    return straight


def _flat(kinds: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Return the parts of an argument, which may be a tuple of arguments, each with its type in Triton's words."""
    if isinstance(kinds, tuple):
        for kind, part in zip(kinds, value, strict=True):
            yield from _flat(kind, part)
    else:
        yield kinds, value


@cache
def _driver() -> Callable[..., int] | None:
    """Return the function of CUDA's driver that launches a kernel, or None where there is no such driver.

    It keeps Python's lock, which to give up and to get back takes longer than a launch.
    """
    try:
        launch: Any = ctypes.PyDLL("libcuda.so.1").cuLaunchKernel
    except (OSError, AttributeError):
        return None
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    launch.restype = ctypes.c_int
    found: Callable[..., int] = launch
    return found


def _by_triton(
    compiled: Any, blocks: tuple[int, ...], arguments: dict[str, Any]
) -> Callable[[int, tuple[int, ...]], int]:
    """Return what has Triton's own launcher launch it; otherwise as `_by_driver`."""
    from triton.runtime import driver

    run, stream_of = compiled.run, driver.active.get_current_stream
    what = compiled.function, compiled.packed_metadata, None, None, None  # data for hooks, those before and after

    def straight(device: int, addresses: tuple[int, ...], _keeps: Any = compiled) -> int:
        tensors = iter(addresses)
        given = [next(tensors) if value is _ADDRESS else value for value in arguments.values()]
        run(*blocks, stream_of(device), *what, *given)
        return 0

    return straight


@cache
def launch_hooks() -> Sequence[Any]:
    """Return Triton's own list of what is called before a launch, which changes as hooks come and go."""
    from triton import knobs

    calls: Sequence[Any] = getattr(knobs.runtime.launch_enter_hook, "calls", ())
    return calls


def addresses_of(*tensors: Tensor | None) -> tuple[int, ...]:
    """Return where tensors begin, 0 for None."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


def places_of(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return where and how tensors lie: the same for tensors that nobody has moved."""
    return tuple([x if x is None else (x.data_ptr(), x.stride()) for x in tensors])


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
