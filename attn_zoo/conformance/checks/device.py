"""A check that a variant can run on a GPU, made without one: where its tensors lie is followed in Python.

A table made with `torch.arange(n)`, or kept in a plain attribute, is on the CPU whatever the input is on. There nobody
sees it; on a GPU the call raises. So here inputs and weights are tensors of the CPU that name another device. What is
made on that device, or from what lies there, lies there as well. What comes out of code that Python does not see, such
as a scripted function, may lie anywhere: there the check ends, and blames nobody.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from attn_zoo.attention import AbstractAttention, AbstractMixer, BuildContext
from attn_zoo.conformance.check import Finding, Violation, check, not_applicable, passed
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.subject import Module, Subject, call, read_positions
from attn_zoo.errors import UnsupportedError, first_line

ELSEWHERE = torch.device("xpu", 0)
"""Torch knows it by name without its software, and autocast knows it; "cuda" would start kernels of a GPU."""

_MAKES = frozenset({"as_tensor", "new_tensor", "tensor"})
"""What makes a tensor of numbers of Python."""
_MOVES = _MAKES | {"__setitem__", "copy_", "to", "type_as"}
_INDEXES = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_"})
"""What takes indices that lie on the CPU, and moves them."""
_READS = frozenset(
    {
        *("__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere", "bincount", "equal"),
        *("is_nonzero", "item", "masked_select", "nonzero", "tolist", "unique", "unique_consecutive"),
    }
)
"""What gives Python a number, or a tensor whose size the numbers decide."""

ON_CPU = "is given a tensor on the CPU beside one on the input's device: make it with device=, or register it"


class _There(Tensor):
    """A tensor of the CPU that is taken for one of `ELSEWHERE`."""


class _LostTrack(Exception):  # noqa: N818 - a finding
    """Nobody knows where a tensor lies."""


class _Followed(TorchFunctionMode):
    """Calls torch with what lies on the CPU, and says of its results where they would lie.

    Args:
        on_cpu: tensors that were seen to be made on the CPU; those that are made so in calls are added.

    Attributes:
        waits: places at which Python waits for the device, each with what it does there.
    """

    def __init__(self, on_cpu: WeakIdKeyDictionary) -> None:
        super().__init__()
        self.on_cpu = on_cpu
        self.waits: dict[str, None] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        tensors = [leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if not isinstance(tensor, _There)]
        is_any_there = len(here) < len(tensors)
        if name == "__get__" and is_any_there and func.__self__ in (Tensor.device, Tensor.is_cpu):
            return ELSEWHERE if func.__self__ is Tensor.device else False
        if is_any_there and name not in _MOVES | _INDEXES and any(tensor.dim() for tensor in here):
            if not all(tensor in self.on_cpu for tensor in here if tensor.dim()):
                raise _LostTrack(f"{name.strip('_')} is given a tensor of unknown origin ({_place()})")
            raise Violation(f"{name.strip('_')} {ON_CPU}", _place())
        goes_to = _goes_to(name, args, kwargs)
        is_there = is_any_there if goes_to is None else goes_to == ELSEWHERE
        if (
            (is_any_there and (name in _READS or not is_there))
            or (is_there and name in _MAKES and not (tensors and name == "as_tensor"))
            or (is_there and name in _MOVES and any(tensor.numel() for tensor in here))
            or (is_any_there and name in _INDEXES and (here or _is_by_mask(name, args)))
        ):
            self.waits[f"{name.strip('_')} ({_place()})"] = None
        if goes_to == ELSEWHERE:
            args, kwargs = _on_cpu((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        is_known = all(tensor in self.on_cpu for tensor in here)

        def placed(tensor: Tensor) -> Tensor:
            tensor = _lies(tensor, is_there=is_there)
            if not is_there and is_known:
                self.on_cpu[tensor] = None
            return tensor

        return placed(found) if isinstance(found, Tensor) else tree_map_only(Tensor, placed, found)


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    for each in arguments:
        if isinstance(each, tuple | list):
            yield from _leaves(each)
        else:
            yield each


def _goes_to(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device | None:
    """Return the device that a call of torch names for its result, or None."""
    if name in {"cpu", "numpy"}:
        return torch.device("cpu")
    if name == "copy_":
        return _device_of(args[0])
    words = (kwargs.get("device"), *args[1:2]) if name == "to" else (kwargs.get("device"),)
    if name in {"to", "type_as"} and isinstance(args[1:2] and args[1], Tensor):
        return _device_of(args[1])
    named = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device)]
    named += [torch.device(each) for each in words if isinstance(each, str)]
    return named[0] if named else None


def _device_of(tensor: Tensor) -> torch.device:
    return ELSEWHERE if isinstance(tensor, _There) else torch.device("cpu")


def _on_cpu(arguments: Any) -> Any:
    """Return the arguments with the CPU in the place of the other device."""
    arguments = tree_map_only(str, lambda each: "cpu" if each == str(ELSEWHERE) else each, arguments)
    return tree_map_only(torch.device, lambda each: torch.device("cpu") if each == ELSEWHERE else each, arguments)


def _lies(tensor: Tensor, *, is_there: bool) -> Tensor:
    if isinstance(tensor, _There) == is_there:
        return tensor
    return tensor.as_subclass(_There if is_there else Tensor)


def _is_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an index holds a mask, whose true entries decide a size; to set a number needs none."""
    if name == "__setitem__" and not isinstance(args[2], Tensor):
        return False
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in _leaves(args[1:2]))


def _place() -> str:
    """Return file and line of the innermost call outside torch and this check."""
    frame: Any = sys._getframe(1)
    torch_files = str(Path(torch.__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((__file__, torch_files)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _moved(module: Module) -> Module:
    """Move what a module has registered, as `to` would, and have it take inputs from there."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(weight.as_subclass(_There), weight.requires_grad)
        for name, table in part._buffers.items():
            if table is not None:
                part._buffers[name] = table.as_subclass(_There)
        if isinstance(part, AbstractAttention | AbstractMixer):
            vars(part)["_refuse"] = lambda request: None  # noqa: ARG005 - no capabilities name the device
    return module


@check("a call makes all its tensors where its input lies, as a GPU needs; seen without one")
def _device(subject: Subject) -> Finding:
    if "cuda" not in subject.capabilities.devices:
        return not_applicable("runs on no GPU")
    if subject.is_shared_mixer:
        return not_applicable("is a check of the attention, and of the mixers that a variant writes")
    if subject.device != "cpu":
        return not_applicable(f"every other check has run on {subject.device}")
    waits: dict[str, None] = {}
    for build in subject.contexts():
        try:
            waits |= _waits(subject, build)
        except (Violation, UnsupportedError):
            raise
        except Exception as error:
            words = "" if isinstance(error, _LostTrack) else f"{type(error).__name__}: "
            return not_applicable(f"its calls cannot be followed: {words}{first_line(error)}")
    return passed(f"makes Python wait for the GPU: {', '.join(waits)}" if waits else "")


def _waits(subject: Subject, build: BuildContext) -> dict[str, None]:
    """Return where calls and steps of one direction wait for the device, but for what the first of a kind prepares."""
    length, found = subject.lengths[-1], dict[str, None]()
    module = _moved(subject.make(build, seq_len=length))
    on_cpu = WeakIdKeyDictionary()
    for part in module.modules():
        on_cpu.update({leaf: None for leaf in _leaves(vars(part).values()) if isinstance(leaf, Tensor)})
    for inputs in subject.calls(build, length):
        there = inputs.map(_there).under(None if inputs.key_padding_mask is None else _there(inputs.key_padding_mask))
        for is_training in (False, True):
            module.train(is_training)
            for _ in range(2):
                with _Followed(on_cpu) as mode:
                    output = call(module, there)
                if not isinstance(output, _There):
                    if output not in on_cpu:
                        raise _LostTrack("the output is of unknown origin")
                    raise Violation("the output is on the CPU, wherever the input is", inputs.words())
            found |= mode.waits
    if build.is_causal and subject.capabilities.decode != "none":
        found |= _waits_of_steps(module.eval(), there, on_cpu)
    return found


@torch.no_grad()
def _waits_of_steps(module: Module, inputs: Inputs, on_cpu: WeakIdKeyDictionary) -> dict[str, None]:
    """Return where a step waits for the device, the first excepted, and read the rest at once."""
    with _Followed(on_cpu) as mode:
        state = module.init_state(inputs.batch_size, device=ELSEWHERE, dtype=inputs.tensors[0].dtype)
        for position in range(2):
            mode.waits.clear()
            state = read_positions(module, inputs, range(position, position + 1), state, at_once=False)[1]
        waits = dict(mode.waits)
        read_positions(module, inputs, range(2, inputs.query_len), state, at_once=True)
    return waits


def _there(tensor: Tensor) -> Tensor:
    return _lies(tensor, is_there=True)


CHECKS = (_device,)
