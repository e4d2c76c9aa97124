"""Calls that are known down to the last launch are replayed by C++, without Python.

Below some ten thousand tokens a GPU waits for the host, which needs longer for a node of autograd in Python than for
all that the node launches.

A call whose kernels are compiled is recorded as it runs: which memory it allocates, which kernels it launches, with
what, and which fused operator of torch it calls. That is a program over tensors, which depends on nothing but how the
given ones lie, so it serves every later call that is alike. Forward and backward are programs of their own; there is
one backward for each way in which the gradient of the output lies. Before it is used a program runs once beside what it
was recorded from; unless all results are the same to the last bit, it is given up.

What else a call might do is not replayed but done as before: other operators, numbers drawn, tensors that nobody gave.
Nor is anything while somebody watches: a mode of torch, a profiler's hooks on launches.

The C++ (`replay.cpp`) is compiled once on a machine, in half a minute: by `prepare_run` before anything is measured, or
when a call is to be recorded first. Where there is no compiler calls go through Python, with the same results.
`ATTN_ZOO_REPLAY=0` has all calls do so.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Self, TypeVar

import torch
import triton  # noqa: F401  # without it there are no kernels to replay, and this counts as a source for GPUs only
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from attn_zoo.errors import first_line
from attn_zoo.kernels import trace
from attn_zoo.kernels.cached_launch import MAX_KINDS, CachedLaunch, launch_hooks, launch_recorders

_T = TypeVar("_T")

_SOURCE = Path(__file__).with_name("replay.cpp")
_MODULE = "attn_zoo_replay"
_VARIABLE = "ATTN_ZOO_REPLAY"
_SLOWER = "calls are not replayed, so the host takes longer for each: {}"

REPLAYED = "replayed"
"""Noted among the paths of a call that is."""

MOST_NUMBERS = 2**26
"""Of the first tensor of a call that is replayed: where it is long, the host does not count and memory does."""

_MOST_CALLS = 8192  # that are known, for good: one for each layer, length, and gradients wanted or not
_MOST_TRIES = 4  # to record a kind of call; then it stays in Python
_MOST_TRIED = 8 * MAX_KINDS
_MOST_LAYOUTS = 16  # of gradients that one call is learnt for: slices of ever longer ones all lie otherwise

_loading = Lock()  # threads come to their second call at once
_native: Any = None
_why_not: str | None = ""  # empty before it was tried
_tries: dict[Hashable, int] = {}
_calls: dict[int, _Call] = {}  # by number


# --- the compiled module ---


def _place() -> Path:
    """Return where the compiled module lies: apart for each source, torch, Python and folder of torch."""
    of_machine = f"{torch.__version__} {torch.__file__} {sys.version} {sysconfig.get_platform()}"
    digest = hashlib.sha256(_SOURCE.read_bytes() + of_machine.encode()).hexdigest()[:16]
    # Where data are kept too (`tasks.sources.tensor_cache`). Without a home, which pathlib refuses, nothing is kept.
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(os.environ.get("ATTN_ZOO_CACHE") or Path(caches, "attn_zoo"), f"{_MODULE}-{digest}.so")


def _compile(target: Path, say: Callable[[str], object]) -> str | None:
    """Compile the module, which is said; return why that cannot be done, or None."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    reason = "no C++ compiler (g++, or what CXX names)" if compiler is None else _compile_by(compiler, target, say)
    if reason is not None:
        say(_SLOWER.format(reason))
    return reason


def _compile_by(compiler: str, target: Path, say: Callable[[str], object]) -> str | None:
    say("compiling what replays a GPU's calls, once on this machine: half a minute ...")
    root = Path(torch.__file__).parent
    folders = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # of its own, on whichever machine or thread
            whole = Path(folder, target.name)
            command = [compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS", str(_SOURCE)]
            command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
            command += [f"-I{folder}" for folder in folders]
            command += ["-o", str(whole), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                return f"{compiler} failed: {errors[0] if errors else f'exit code {done.returncode}'}"
            if not target.is_file():  # else another process was first, and may have loaded it from a shared home
                whole.replace(target)
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
        library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
        stream = ctypes.CDLL(str(library)).aoti_torch_get_current_cuda_stream
    except (OSError, AttributeError) as error:
        return f"not a CUDA build of torch with a driver ({error})"
    first, second = (ctypes.cast(each, ctypes.c_void_p).value for each in (launch, stream))
    assert first is not None
    assert second is not None
    return first, second


def _warn(line: str) -> None:
    logging.getLogger("attn_zoo").warning("attn_zoo: %s", line)  # on standard error, unless the program says otherwise


def prepare(
    *, addresses: tuple[int, int] | None = None, compiles: bool = True, say: Callable[[str], object] = _warn
) -> str | None:
    """Load the compiled module, and compile it first, which takes half a minute once on a machine and is said.

    Args:
        addresses: of functions like `cuLaunchKernel` and `aoti_torch_get_current_cuda_stream`; None finds these two.
        compiles: it, where it is not compiled; otherwise it is not used now.
        say: told what takes long, and why what could be expected to work does not.

    Returns:
        Why calls are not replayed, or None where they are.
    """
    global _why_not  # noqa: PLW0603
    with _loading:
        if _native is not None:
            return None
        reason = _load(addresses, compiles=compiles, say=say)
        if reason is None or compiles:
            _why_not = reason
    return reason


def prepare_run(say: Callable[[str], object]) -> None:
    """Compile and load the module before processes are started that measure; else let none of them replay.

    Their environment says so then (`ATTN_ZOO_REPLAY`), and it is part of what is recorded.

    Args:
        say: told what takes long, and why calls are not replayed.
    """
    found = _found(None)
    if isinstance(found, str):
        say(_SLOWER.format(found))
    if isinstance(found, str) or prepare(say=say) is not None:
        os.environ[_VARIABLE] = "0"


def _load(addresses: tuple[int, int] | None, *, compiles: bool, say: Callable[[str], object]) -> str | None:
    global _native  # noqa: PLW0603
    found = _found(addresses)
    if isinstance(found, str):
        return found
    path = _place()
    if not path.is_file():
        if not compiles:
            return "not compiled on this machine yet; the first run on its GPU does it"
        if (reason := _compile(path, say)) is not None:
            return reason
    spec = spec_from_file_location(_MODULE, path, loader=ExtensionFileLoader(_MODULE, str(path)))
    assert spec is not None
    assert spec.loader is not None
    try:
        module: Any = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:  # of another machine, in a home that nodes of a cluster share
        say(_SLOWER.format(reason := f"what is compiled cannot be loaded: {error}"))
        return reason
    module.use(*found, launch_hooks(), _differentiate)
    _native = module
    return None


def _is_watched() -> bool:
    """Tell whether anybody looks at what a call does, or makes more of it than numbers."""
    return bool(
        launch_hooks()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None  # of torch.jit, which would see an empty tensor
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
        for name in (*_calls[_native.last()].paths, REPLAYED):
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


Saved = Sequence[Tensor | None]
Forward = Callable[[], tuple[Tensor, Saved]]
"""Returns the output, and what the backward pass reads."""
Backward = Callable[[Saved, Tensor], tuple[Tensor | None, ...]]
"""Takes what the forward pass saved and the gradient of the output; returns the gradients of the tensors given."""


class _Recording:
    """What a computation does with the tensors that it is given; slots are numbered as they come."""

    def __init__(self, given: Saved, constants: Sequence[Tensor]) -> None:
        self.is_sound = True
        self.steps: list[_Step] = []
        self.launches: list[CachedLaunch] = []
        self.paths: list[str] = []
        self.num_slots = 0
        self._slots: dict[int, int] = {}  # by address
        self._kept: list[Tensor | None] = []  # by slot, so that no address is used twice
        for tensor in given:
            self.add(tensor)
        self.constants = [(self.add(table), table) for table in constants]

    def add(self, tensor: Tensor | None) -> int:
        """Return the slot of a tensor that is new, which may share its address with no other."""
        self.num_slots += 1
        self._kept.append(tensor)
        if tensor is not None:
            address = tensor.data_ptr()
            self.is_sound &= address != 0 and address not in self._slots
            self._slots[address] = self.num_slots - 1
        return self.num_slots - 1

    def slot_of(self, tensor: Tensor | None, *, is_whole: bool = False) -> int:
        """Return the slot of a tensor, -1 for None; a tensor that nobody gave ends the recording.

        Args:
            tensor: whose address is looked up.
            is_whole: more of it counts than the address, so a view that begins where another tensor does is unknown.
        """
        if tensor is None:
            return -1
        slot = self._slots.get(tensor.data_ptr(), -2)
        self.is_sound &= slot >= 0 and (not is_whole or _lies_as(tensor, self._kept[slot]))
        return slot

    def run(self, compute: Callable[[], _T]) -> _T:
        """Return what is computed, and record it."""
        with torch.no_grad(), _Watch(self), trace.recording() as self.paths:
            return compute()


class _Call:
    """A call that is replayed, and how Python computes its gradients, which a later one may have otherwise."""

    def __init__(self, token: object, backward: Backward, constants: Sequence[Tensor], recording: _Recording) -> None:
        self.paths = recording.paths
        # As long as the process: the token, which is known by its address, and launches, whose end unloads kernels.
        self._kept = [token, recording.launches]
        self._backward, self._constants = backward, constants
        self._tries, self._num_learnt = 0, 0

    def differentiate(self, number: int, saved: list[Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by Python, and learn how they are computed where the gradient of the output lies so."""
        may_learn = self._tries < _MOST_TRIES and self._num_learnt < _MOST_LAYOUTS
        if may_learn and not _is_watched() and not _is_capturing(grad):
            self._tries += 1
            with _told_unless_memory():
                return self._learn(number, saved, grad)
        return self._backward(saved, grad)

    def _learn(self, number: int, saved: list[Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
        recording = _Recording([*saved, grad], self._constants)
        grads = recording.run(lambda: self._backward(saved, grad))
        results = [recording.slot_of(x) for x in grads]
        if recording.is_sound and _native.learn_backward(
            number,
            saved,
            grad,
            recording.num_slots,
            recording.constants,
            _released(recording.steps, {*results}),
            results,
            lambda found: all(map(_are_same, found, (x for x in grads if x is not None))),
        ):
            self.paths = list(dict.fromkeys([*self.paths, *recording.paths]))
            self._kept.append(recording.launches)
            self._tries = 0
            self._num_learnt += 1
        return grads


def _differentiate(number: int, saved: list[Tensor | None], grad: Tensor) -> tuple[Tensor | None, ...]:
    return _calls[number].differentiate(number, saved, grad)


@contextmanager
def _told_unless_memory() -> Iterator[None]:
    """Go on after an error of what is learnt, which takes memory that Python does not; it meets all others again."""
    try:
        yield
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        _warn(f"a call was not learnt, so it is made by Python: {first_line(error)}")


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def learn(
    token: object,
    kind: Hashable,
    given: Saved,
    forward: Forward,
    backward: Backward,
    constants: Sequence[Tensor] = (),
) -> Tensor | None:
    """Record a call that `replay` did not know, and return its output by a replay; None where it is not replayed.

    Args:
        token: as `replay` takes it.
        kind: the same for calls that are alike.
        given: the tensors that `replay` takes.
        forward: computes it.
        backward: computes its gradients; it is kept, so it may hold none of these tensors.
        constants: tables that every such call reads.
    """
    first = given[0]
    assert first is not None
    if _why_not or first.numel() > MOST_NUMBERS or _is_watched() or _is_capturing(first):
        return None
    # In inference mode a watch sees torch's attention whole, not its kernel. What is known is replayed there too.
    if torch.is_inference_mode_enabled():
        return None
    if len(_calls) >= _MOST_CALLS:
        _warn_of_many()
        return None
    if len(_tries) >= _MOST_TRIED:
        _tries.clear()
    kind = id(token), kind, *[x is not None and torch.is_grad_enabled() and x.requires_grad for x in given]
    tries = _tries[kind] = _tries.get(kind, -1) + 1
    if not 0 < tries <= _MOST_TRIES:  # the first call of a kind compiles
        return None
    if prepare() is not None or not _native.are_plain((*given,)):
        return None
    has_learnt = False
    with _told_unless_memory():
        has_learnt = _has_learnt(token, given, forward, backward, constants)
    return replay(token, *given) if has_learnt else None


@cache
def _warn_of_many() -> None:
    _warn(f"{_MOST_CALLS:,} kinds of calls are replayed; those of other kinds stay slower, through Python")


def _has_learnt(token: object, given: Saved, forward: Forward, backward: Backward, constants: Sequence[Tensor]) -> bool:
    recording = _Recording(given, constants)
    output, saved = recording.run(forward)
    slot, slots = recording.slot_of(output), [recording.slot_of(x) for x in saved]
    if not recording.is_sound:
        return False

    def is_right(number: int, found: Tensor, found_saved: list[Tensor | None]) -> bool:
        if not all(map(_are_same, (found, *found_saved), (output, *saved))):
            return False
        _calls[number] = _Call(token, backward, constants, recording)  # before anybody can replay it
        return True

    steps, sizes = _released(recording.steps, {slot, *slots}), (recording.num_slots, recording.constants)
    learnt: bool = _native.learn(id(token), (*given,), *sizes, steps, output, slot, [*saved], slots, is_right)
    return learnt


def _lies_as(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Tell whether two results are the same, bit for bit, and lie alike."""
    if one is None or other is None or one is other:
        return one is other
    if not _lies_as(one, other):
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

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording, self._thread = recording, get_ident()

    def __enter__(self) -> Self:
        launch_recorders.append(self._launched)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        launch_recorders.remove(self._launched)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first dispatch loads the compiler, to keep it out: seconds, within a call

    def _launched(self, launch: CachedLaunch, tensors: tuple[Tensor | None, ...]) -> None:
        if get_ident() != self._thread:
            return
        known, native = self._recording, launch.by_driver
        if native is None:
            known.is_sound = False
            return
        slots = [known.slot_of(x) for x in tensors]
        known.launches.append(launch)
        known.steps.append(("launch", native.function, native.shape, slots, native.numbers, native.places))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, schema, known = func.overloadpacket.__name__, func._schema, self._recording
        if name in _ALLOCATIONS:
            if not result.is_meta:  # which is no memory, and asked for its strides
                known.steps.append(("allocate", known.add(result), result))
        elif name in _OPERATORS:
            self._called(schema, args, kwargs or {}, result)
        elif not (schema.returns and all(each.alias_info and not each.alias_info.is_write for each in schema.returns)):
            known.is_sound = False  # neither a view nor anything that is replayed
        return result

    def _called(self, schema: Any, args: tuple[Any, ...], named: dict[str, Any], results: tuple[Any, ...]) -> None:
        known = self._recording
        values = [*args, *(named.get(each.name, each.default_value) for each in schema.arguments[len(args) :])]
        given = [(place, known.slot_of(x, is_whole=True)) for place, x in enumerate(values) if isinstance(x, Tensor)]
        dropout = next(place for place, each in enumerate(schema.arguments) if each.name == "dropout_p")
        known.is_sound &= not values[dropout]
        rest = [None if isinstance(x, Tensor) else x for x in values]
        device = results[0].device
        made = [known.add(x) if isinstance(x, Tensor) and x.numel() and x.device == device else -1 for x in results]
        known.steps.append(("operator", schema.name, schema.overload_name, rest, given, made))


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
        _tries.clear()
        _calls.clear()
