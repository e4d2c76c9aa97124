"""Broken variants that leave something behind: in the process, in their arguments, in themselves."""

from __future__ import annotations

import gc
import random
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext
from tests.conformance.broken import EVERYTHING, Broken, Softmax


class SetsTheDefaultDtype(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.set_default_dtype(torch.bfloat16)
        return super().attend(query, key, value, mask)


class TakesMoreThreads(Softmax):
    """Once in a process, so that only the first call shows it."""

    has_taken: ClassVar[bool] = False

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        if not TakesMoreThreads.has_taken:
            TakesMoreThreads.has_taken = True
            torch.set_num_threads(torch.get_num_threads() + 1)


class SwitchesGradientsOff(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        torch.set_grad_enabled(False)
        return output


class SwitchesKernelsOff(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.backends.cuda.enable_flash_sdp(False)
        return super().attend(query, key, value, mask)


class LowersThePrecision(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        return super().attend(query, key, value, mask)


class DemandsDeterminism(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return super().attend(query, key, value, mask)


class FlushesDenormals(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            torch.set_flush_denormal(True)
        return super().attend(query, key, value, mask)


class SwitchesTheCollectorOff(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        gc.disable()
        return super().attend(query, key, value, mask)


class SeedsTorch(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.manual_seed(0)
        return super().attend(query, key, value, mask)


class SeedsTorchWhenBuilt(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        torch.manual_seed(0)  # what checks use, too


class DrawsInEvaluation(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.rand(())
        return super().attend(query, key, value, mask)


class DrawsFromNumpy(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        np.random.rand()  # noqa: NPY002


class DrawsFromPython(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        random.random()
        return super().attend(query, key, value, mask)


class ReturnsItsValueWhereThereIsOne(Softmax):
    """Right: the softmax over one key is 1. But the output is the value itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return value if key.shape[-2] == 1 else super().attend(query, key, value, mask)


class ReturnsItsWorkspace(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        if torch.is_grad_enabled():
            return output
        if getattr(self, "workspace", output).shape != output.shape or not hasattr(self, "workspace"):
            self.workspace = torch.empty_like(output)
        return self.workspace.copy_(output)


class ReturnsItsBuffer(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.register_buffer("output", torch.zeros(0), persistent=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.output = super().attend(query, key, value, mask).detach()
        return super().attend(query, key, value, mask) if torch.is_grad_enabled() else self.output.view_as(query)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return 0.5 * tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous().mul_(0.5)


class WritesToTheGradientItIsGiven(Softmax):
    """Which the residual path around it was given, too."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = _Halved.apply(super().attend(query, key, value, mask))
        return output


class _Scores(torch.autograd.Function):
    """A product that keeps what its backward needs in a dictionary, and spoils it there if asked to."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, kept: dict[str, Tensor], is_workspace: bool) -> Tensor:
        ctx.kept, ctx.is_workspace = kept, is_workspace
        kept["query"], kept["key"] = query, key
        return query @ key.mT

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, key = ctx.kept["query"], ctx.kept["key"]
        of_query, of_key = gradient @ key, gradient.mT @ query
        if ctx.is_workspace:
            query.data.copy_(of_query)
        return of_query, of_key, None, None


class KeepsForBackward(Softmax):
    """Itself sound: what a backward needs belongs to its call."""

    is_workspace = False

    def kept(self) -> dict[str, Tensor]:
        return {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores: Tensor = _Scores.apply(query, key, self.kept(), self.is_workspace) * query.shape[-1] ** -0.5
        return scores.softmax(-1) @ value


class UsesItsQueryAsWorkspace(KeepsForBackward):
    is_workspace = True


class KeepsForBackwardInTheModule(KeepsForBackward):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.saved: dict[str, Tensor] = {}

    def kept(self) -> dict[str, Tensor]:
        return self.saved


class KeepsForBackwardInTheClass(KeepsForBackward):
    saved: ClassVar[dict[str, Tensor]] = {}

    def kept(self) -> dict[str, Tensor]:
        return self.saved


class KeepsATableInItsFirstDtype(Softmax):
    table: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.0, query.shape[-1]).to(query)
        return super().attend(query, key, value * self.table, mask)


class CachesByShape(Softmax):
    """Computes the scores again where the shapes are others only."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        known = getattr(self, "known", None)
        if known is None or known[0].shape != query.shape or torch.is_grad_enabled():
            self.known = (query.detach(), super().attend(query, key, value, mask))
        return self.known[1].clone()


class CachesForTheWholeClass(Softmax):
    known: ClassVar[dict[Any, Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        if torch.is_grad_enabled():
            return output
        return CachesForTheWholeClass.known.setdefault((query.shape, key.shape, query.dtype), output).clone()


class CachesByAddress(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        known = getattr(self, "known", None)
        if known is None or known[0] is not query or torch.is_grad_enabled():
            self.known = (query, super().attend(query, key, value, mask))
        return self.known[1].clone()


class LooksUpTheLastCall(Softmax):
    """Right, as it compares all it was given, but two equal calls in a row are one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        known = getattr(self, "known", None)
        given = (query, key, value)
        if torch.is_grad_enabled() or mask is not None:
            return super().attend(query, key, value, mask)
        if known is None or not all(map(torch.equal, known[0], given)) or known[0][0].dtype != query.dtype:
            output = super().attend(query, key, value, mask)
            self.known = tuple(tensor.clone() for tensor in given), output.clone()
        return self.known[1].clone()


class CachesItsMask(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return super().keep(query, key, None)
        if getattr(self, "mask", mask).shape != mask.shape or not hasattr(self, "mask"):
            self.mask = mask
        return super().keep(query, key, self.mask)


class CachesMasksForTheWholeClass(Softmax):
    masks: ClassVar[dict[Any, Tensor]] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        known = None if mask is None else CachesMasksForTheWholeClass.masks.setdefault(mask.shape, mask)
        return super().attend(query, key, value, known)


class RemembersWhatItSaw(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask) + 1e-6 * getattr(self, "seen", 0.0)
        self.seen = float(value.detach().mean())
        return output


class ComputesLessAfterSevenCalls(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        if self.num_calls <= 7:
            return super().attend(query, key, value, mask)
        half = (key.shape[-2] + 1) // 2
        return super().attend(query, key[:, :, :half], value[:, :, :half], None if mask is None else mask[:, :half])


class LearnsInTraining(Softmax):
    """Batch statistics, kept from training for evaluation as batch normalisation does, but not as a buffer."""

    mean = 0.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.training:
            self.mean = float(value.detach().mean())
        return super().attend(query, key, value, mask) + 1e-3 * self.mean


class SoundEffects(Softmax):
    """Draws from its own generator, switches inside the call and back, and keeps what depends on lengths only."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.generator = torch.Generator().manual_seed(build.seed)
        self.pattern = torch.rand(4, generator=self.generator)
        self.scale = nn.Parameter(torch.ones(()))
        self.kept: dict[Any, Tensor | None] = {}

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        lengths = (query.shape[-2], key.shape[-2])
        if mask is not None:
            return super().keep(query, key, mask)
        if lengths not in self.kept:
            self.kept[lengths] = super().keep(query, key, None)
        return self.kept[lengths]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            torch.rand(())
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return self.scale * super().attend(query, key, value, mask)

    def __deepcopy__(self, memo: Any) -> SoundEffects:
        copied = SoundEffects(self.config, self.build).to(self.scale.dtype)
        copied.load_state_dict(self.state_dict())
        return copied


STATE = "global_state"
EFFECTS = (
    Broken(cls=SetsTheDefaultDtype, check=STATE, also=EVERYTHING),
    Broken(cls=TakesMoreThreads, check=STATE),
    Broken(cls=SwitchesGradientsOff, check=STATE, also=EVERYTHING),
    Broken(cls=SwitchesKernelsOff, check=STATE),
    Broken(cls=LowersThePrecision, check=STATE, also=frozenset({"modes"})),  # seen where a CPU multiplies in bfloat16
    Broken(cls=DemandsDeterminism, check=STATE),
    Broken(cls=FlushesDenormals, check=STATE),
    Broken(cls=SwitchesTheCollectorOff, check=STATE),
    Broken(cls=SeedsTorch, check=STATE),
    Broken(cls=SeedsTorchWhenBuilt, check=STATE),
    Broken(cls=DrawsInEvaluation, check=STATE),
    Broken(cls=DrawsFromNumpy, check=STATE),
    Broken(cls=DrawsFromPython, check=STATE),
    Broken(cls=WritesToTheGradientItIsGiven, check="inputs_unchanged"),
    Broken(cls=UsesItsQueryAsWorkspace, check="inputs_unchanged"),
    Broken(cls=ReturnsItsValueWhereThereIsOne, check="own_output"),
    Broken(cls=ReturnsItsWorkspace, check="own_output", also=EVERYTHING),
    Broken(cls=ReturnsItsBuffer, check="own_output", also=EVERYTHING),
    Broken(cls=CachesByShape, check="no_memory", also=EVERYTHING),
    Broken(cls=CachesForTheWholeClass, check="no_memory", also=EVERYTHING),
    Broken(cls=KeepsATableInItsFirstDtype, check="no_memory"),
    Broken(cls=KeepsForBackwardInTheModule, check="no_memory", also=EVERYTHING),
    Broken(cls=KeepsForBackwardInTheClass, check="no_memory", also=EVERYTHING),
    Broken(cls=CachesByAddress, check="no_memory", also=EVERYTHING),
    Broken(cls=LooksUpTheLastCall, check="no_memory"),
    Broken(cls=CachesItsMask, check="no_memory", also=EVERYTHING, capabilities={"key_padding_mask": True}),
    Broken(
        cls=CachesMasksForTheWholeClass, check="no_memory", also=EVERYTHING, capabilities={"key_padding_mask": True}
    ),
    Broken(cls=RemembersWhatItSaw, check="no_memory", also=EVERYTHING),
    Broken(cls=ComputesLessAfterSevenCalls, check="no_memory", also=EVERYTHING),
    Broken(cls=LearnsInTraining, check="no_memory", also=EVERYTHING),
)
