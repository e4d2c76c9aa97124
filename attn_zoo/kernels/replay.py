"""Calls that are known down to the last launch are replayed by C++, without Python.

Below some ten thousand tokens a GPU waits for the host, which needs longer for a node of autograd in Python than for
all that the node launches.

A call whose kernels are compiled is recorded as it runs: which memory it allocates, which kernels it launches, with
what, and which fused operator of torch it calls. That is a program over tensors, which depends on nothing but how the
given ones lie, so it serves every later call that is alike. Forward and backward are programs of their own. Before it
is used a program runs once beside what it was recorded from; unless all results are the same to the last bit, it is
given up.

What else a call might do is not replayed but done as before: other operators, numbers drawn, tensors that nobody gave.
Nor is anything while somebody watches: a mode of torch, a profiler's hooks on launches.

The C++ (`replay.cpp`) is compiled by `prepare`, once on a machine, in half a minute. Where that was not done, and where
there is no compiler, calls go through Python, with the same results. `ATTN_ZOO_REPLAY=0` has all calls do so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import get_ident
from typing import Any, Self

import torch
import triton  # noqa: F401  # without it there are no kernels to replay, and this counts as a source for GPUs only
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from attn_zoo.kernels import trace
from attn_zoo.kernels.cached_launch import MAX_KINDS, CachedLaunch, launch_hooks, launch_recorders

_SOURCE = Path(__file__).with_name("replay.cpp")
_MODULE = "attn_zoo_replay"
_VARIABLE = "ATTN_ZOO_REPLAY"

_MOST_TRIES = 4  # to record a kind of call; then it stays in Python
_MOST_TRIED = 8 * MAX_KINDS
_MOST_NUMBERS = 2**26  # of the first tensor: where a call is long, the host does not count and memory does

_native: Any = None
_why_not: str | None = ""  # empty before it was tried
_tries: dict[Hashable, int] = {}
_paths: dict[int, list[str]] = {}  # that ran as a call was recorded, by its number
_kept: list[object] = []  # as long as the process: tokens, which are known by their addresses, and kernels


# --- the compiled module ---


def _place() -> Path:
    """Return where the compiled module lies: apart for each source, torch, Python and folder of torch."""
    of_machine = f"{torch.__version__} {torch.__file__} {sys.version} {sysconfig.get_platform()}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + of_machine.encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "attn_zoo" / f"{_MODULE}-{digest}.so"


def _compile(target: Path) -> str | None:
    """Compile the module; return why that cannot be done, or None."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return "no C++ compiler (g++, or what CXX names)"
    root = Path(torch.__file__).parent
    folders = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS", str(_SOURCE)]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [f"-I{folder}" for folder in folders]
        command += ["-o", str(temporary), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            return f"{compiler} failed: {errors[0]}"
        temporary.replace(target)  # whole, whoever else compiles it
    except OSError as error:
        return f"{error.strerror}: {error.filename}"
    return None


def _found(addresses: tuple[int, int] | None) -> tuple[int, int] | str:
    """Return where CUDA's driver launches, and where torch says a device's stream; or why calls are not replayed."""
    if os.environ.get(_VARIABLE) == "0":
        return f"{_VARIABLE} is 0"
    if addresses is not None:
        return addresses
    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        stream = ctypes.CDLL(
            str(Path(torch.__file__).parent / "lib/libtorch_cuda.so")
        ).aoti_torch_get_current_cuda_stream
    except (OSError, AttributeError) as error:
        return f"not a CUDA build of torch with a driver ({error})"
    first, second = (ctypes.cast(each, ctypes.c_void_p).value for each in (launch, stream))
    assert first is not None
    assert second is not None
    return first, second


def prepare(*, addresses: tuple[int, int] | None = None, compiles: bool = True) -> str | None:
    """Load the compiled module, and compile it first, which takes half a minute once on a machine.

    Args:
        addresses: of functions like `cuLaunchKernel` and `aoti_torch_get_current_cuda_stream`; None finds these two.
        compiles: it, where it is not compiled; otherwise it is then not used.

    Returns:
        Why calls are not replayed, or None where they are.
    """
    global _why_not  # noqa: PLW0603
    if _native is None:
        _why_not = _load(addresses, compiles=compiles)
    return _why_not


def prepare_run(say: Callable[[str], object]) -> None:
    """Compile the module before processes are started that measure; where that cannot be, let none of them replay.

    Their environment says so then (`ATTN_ZOO_REPLAY`), and it is part of what is recorded.

    Args:
        say: told what takes long, and why calls are not replayed.
    """
    found = _found(None)
    reason = found if isinstance(found, str) else None
    if reason is None and not _place().is_file():
        say("compiling what replays a GPU's calls, once on this machine: half a minute ...")
        reason = _compile(_place())
    if reason is not None:
        say(f"calls are not replayed, so the host takes longer for each: {reason}")
        os.environ[_VARIABLE] = "0"


def _load(addresses: tuple[int, int] | None, *, compiles: bool) -> str | None:
    global _native  # noqa: PLW0603
    found = _found(addresses)
    if isinstance(found, str):
        return found
    path = _place()
    if not path.is_file():
        if not compiles:
            return "not compiled on this machine yet; a run on its GPU does it first"
        if (reason := _compile(path)) is not None:
            return reason
    spec = spec_from_file_location(_MODULE, path, loader=ExtensionFileLoader(_MODULE, str(path)))
    assert spec is not None
    assert spec.loader is not None
    try:
        module: Any = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:  # of another machine, in a home that nodes of a cluster share
        return f"cannot be loaded: {error}"
    module.use(*found)
    _native = module
    return None


def _is_watched() -> bool:
    """Tell whether anybody looks at what a call does, or makes more of it than numbers."""
    return bool(
        launch_hooks()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def replay(token: object, *tensors: Tensor | None) -> Tensor | None:
    """Return the output of a call that is known, with its gradients, or None.

    Args:
        token: an object that stands for all that decides a call beside its tensors.
        tensors: given to the call.
    """
    if _native is None or _is_watched():
        return None
    output: Tensor | None = _native.call(id(token), *tensors)
    if output is not None and trace._recorders:
        for name in _paths[_native.last()]:
            trace.note_path(name)
    return output


# --- recording ---

_Step = tuple[Any, ...]
"""Of a program, as `replay.cpp` takes it: its kind, and what that needs."""

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_OPERATORS = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


class Recording:
    """What one call does: `forward` and `backward` are run inside it, and it is learnt if both could be recorded."""

    def __init__(self, token: object, given: Sequence[Tensor | None], constants: Sequence[Tensor]) -> None:
        self._token, self._given = token, tuple(given)
        self._slots: dict[int, int] = {}  # by address
        self._tensors: dict[int, Tensor] = {}  # by slot; they are kept, so that no address is used twice
        self._num_slots = len(self._given)
        self.is_sound = True
        for slot, tensor in enumerate(self._given):
            if tensor is not None:
                self._add(tensor, slot)
        self._constants = [(self._add(table), table) for table in constants]
        self._launches: list[CachedLaunch] = []  # whose end would unload their kernels
        self._paths: list[str] = []
        self._forward: list[_Step] = []
        self._output: Tensor | None = None

    def _add(self, tensor: Tensor, slot: int | None = None) -> int:
        """Return the slot of a tensor that is new, which no other may share an address with."""
        address = tensor.data_ptr()
        if slot is None:
            slot, self._num_slots = self._num_slots, self._num_slots + 1
        self.is_sound &= address != 0 and address not in self._slots
        # Without its history: what autograd keeps of the call holds this recording.
        self._slots[address], self._tensors[slot] = slot, tensor.detach()
        return slot

    def slot_of(self, tensor: Tensor | None) -> int:
        """Return the slot of a tensor, -1 for None; a tensor that nobody gave ends the recording."""
        if tensor is None:
            return -1
        slot = self._slots.get(tensor.data_ptr(), -2)
        self.is_sound &= slot >= 0
        return slot

    def forward(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Compute a forward pass and record it; the first of its results is the call's output."""
        self._forward, results = self._steps(compute)
        self._output = results[0].detach()
        return results

    def backward(
        self, saved: Sequence[Tensor | None], grad: Tensor, compute: Callable[[], tuple[Tensor | None, ...]]
    ) -> tuple[Tensor | None, ...]:
        """Compute a backward pass, record it, and learn the call.

        Args:
            saved: what the backward pass reads of the forward pass.
            grad: of the output.
            compute: returns the gradients of the tensors given, None where none is wanted.
        """
        before = self._num_slots
        kept = {slot: self._tensors[slot] for slot in map(self.slot_of, saved) if slot >= 0}
        at = self._add(grad)
        steps, grads = self._steps(compute)
        results = [
            self.slot_of(grad) if x is not None and x.requires_grad else -1
            for x, grad in zip(self._given, grads, strict=True)
        ]
        read = {slot for step in steps for slot in _slots_in(step)} & {*range(before)}
        read -= {slot for slot, _ in self._constants}
        self.is_sound &= read <= kept.keys()
        if self.is_sound:
            saved_slots = [(slot, kept[slot]) for slot in sorted(read)]
            self._learn(saved_slots, [(at, grad)], steps, results, grads)
        return grads

    def learn_forward(self) -> None:
        """Learn a call without gradients."""
        if self.is_sound:
            self._learn([], [], [], [], ())

    def _steps(self, compute: Callable[[], tuple[Any, ...]]) -> tuple[list[_Step], tuple[Any, ...]]:
        steps: list[_Step] = []
        with _Watch(self, steps) as watch, trace.recording() as paths:
            results = compute()
        self.is_sound &= watch.is_sound
        self._paths += paths
        return steps, results

    def _learn(
        self,
        saved: list[tuple[int, Tensor]],
        grad: list[tuple[int, Tensor]],
        backward: list[_Step],
        results: list[int],
        grads: tuple[Tensor | None, ...],
    ) -> None:
        """Learn the call, run it once beside, and forget it where anything differs."""
        assert self._output is not None
        output = self.slot_of(self._output)
        needed = {output, *(slot for slot, _ in saved)}
        programs = _released(self._forward, needed), _released(backward, set(results))
        if not self.is_sound:
            return
        # Aliases lie alike, and want gradients alike, but have no history.
        alike = tuple([None if x is None else x.detach().requires_grad_(x.requires_grad) for x in self._given])
        has_grad = bool(grad)
        token = id(self._token)
        with torch.set_grad_enabled(has_grad):
            number = _native.learn(
                token, alike, self._num_slots, self._constants, programs[0], output, saved, grad, programs[1], results
            )
            replayed = _native.call(token, *alike)
            is_same = replayed is not None and _are_same(replayed, self._output)
            if has_grad and is_same:
                wanting = [(x, y) for x, y in zip(alike, grads, strict=True) if x is not None and x.requires_grad]
                found = torch.autograd.grad(replayed, [x for x, _ in wanting], grad[0][1])
                is_same = all(y is not None and _are_same(x, y) for x, (_, y) in zip(found, wanting, strict=True))
            if is_same:
                _paths[number] = self._paths
                _kept.append((self._token, self._launches))
            else:
                _native.forget(token, alike)


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two results are the same, bit for bit, and lie alike."""
    if one.shape != other.shape or one.stride() != other.stride():
        return False
    return torch.equal(one.detach().contiguous().view(torch.uint8), other.detach().contiguous().view(torch.uint8))


def _made_in(step: _Step) -> set[int]:
    """Return the slots whose tensors a step makes."""
    if step[0] == "operator":
        return {slot for slot in step[5] if slot >= 0}
    return {step[1]} if step[0] == "allocate" else set()


def _slots_in(step: _Step) -> set[int]:
    """Return the slots that a step makes, reads or writes."""
    given = {slot for _, slot in step[4]} if step[0] == "operator" else set(step[3]) if step[0] == "launch" else set()
    return (given | _made_in(step)) - {-1}


def _released(steps: list[_Step], needed: set[int]) -> list[_Step]:
    """Return the steps with what they make given up after its last use, unless it is needed later."""
    made = {slot for step in steps for slot in _made_in(step)} - needed
    last = {slot: place for place, step in enumerate(steps) for slot in _slots_in(step) & made}
    found: list[_Step] = []
    for place, step in enumerate(steps):
        found += [step, *(("release", slot) for slot, end in last.items() if end == place)]
    return found


class _Watch(TorchDispatchMode):
    """Writes down what is allocated, launched and called inside, and whether that is all."""

    def __init__(self, recording: Recording, steps: list[_Step]) -> None:
        super().__init__()
        self.is_sound = True
        self._recording, self._steps, self._thread = recording, steps, get_ident()

    def __enter__(self) -> Self:
        launch_recorders.append(self._launched)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        launch_recorders.remove(self._launched)

    def _launched(self, launch: CachedLaunch, tensors: tuple[Tensor | None, ...]) -> None:
        if get_ident() != self._thread:
            return
        native = launch.by_driver
        if native is None:
            self.is_sound = False
            return
        self._recording._launches.append(launch)
        slots = [self._recording.slot_of(x) for x in tensors]
        self._steps.append(("launch", native.function, native.shape, slots, native.numbers, native.places))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, schema = func.overloadpacket.__name__, func._schema
        if name in _ALLOCATIONS:
            self._steps.append(("allocate", self._recording._add(result), result))
        elif name in _OPERATORS and not kwargs:
            self._called(schema, args, result)
        elif not (schema.returns and all(each.alias_info and not each.alias_info.is_write for each in schema.returns)):
            self.is_sound = False  # neither a view nor anything that is replayed
        return result

    def _called(self, schema: Any, args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        values = [*args, *(each.default_value for each in schema.arguments[len(args) :])]
        given = [(place, self._recording.slot_of(x)) for place, x in enumerate(values) if isinstance(x, Tensor)]
        dropout = next(place for place, each in enumerate(schema.arguments) if each.name == "dropout_p")
        self.is_sound &= not values[dropout] and all(slot >= 0 for _, slot in given)
        rest = [None if isinstance(x, Tensor) else x for x in values]
        made = [
            self._recording._add(x) if isinstance(x, Tensor) and x.numel() and x.device == results[0].device else -1
            for x in results
        ]
        self._steps.append(("operator", schema.name, schema.overload_name, rest, given, made))


def recording_of(
    token: object, kind: Hashable, tensors: Sequence[Tensor | None], constants: Sequence[Tensor] = ()
) -> Recording | None:
    """Return a recording for a call that `replay` did not know, or None where it is not the time or not possible.

    Args:
        token: as `replay` takes it.
        kind: the same for calls that are alike.
        tensors: as `replay` takes them.
        constants: tables that every such call reads.
    """
    if _why_not == "":
        prepare(compiles=False)
    if _native is None:
        return None
    first = tensors[0]
    assert first is not None
    is_captured = first.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured or first.numel() > _MOST_NUMBERS or len(_kept) >= MAX_KINDS or _is_watched():
        return None
    kind = id(token), kind, *[x is not None and torch.is_grad_enabled() and x.requires_grad for x in tensors]
    if len(_tries) >= _MOST_TRIED:
        _tries.clear()
    tries = _tries[kind] = _tries.get(kind, -1) + 1
    if not 0 < tries <= _MOST_TRIES:  # the first call of a kind compiles
        return None
    recording = Recording(token, tensors, constants)
    return recording if recording.is_sound else None


@contextmanager
def replaying(*, addresses: tuple[int, int]) -> Iterator[None]:
    """Replay inside, by these functions in the place of CUDA's, for tests; nothing is learnt before or known after."""
    global _native, _why_not  # noqa: PLW0603
    before = _native, _why_not
    _native = None
    reason = prepare(addresses=addresses)
    if reason is not None:
        raise RuntimeError(f"calls cannot be replayed: {reason}")
    try:
        yield
    finally:
        _native.forget_all()
        _native, _why_not = before
        for kept in (_tries, _paths, _kept):
            kept.clear()
