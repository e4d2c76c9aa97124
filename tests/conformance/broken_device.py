"""Broken variants that run on a CPU only, although they declare a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from tests.conformance.broken import Broken, Softmax
from tests.conformance.broken_claims import DECODE, SoundDecode


class MakesATableOnTheCpu(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, mask) + 0 * torch.arange(query.shape[-2])[:, None]


class KeepsATableUnregistered(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.table = torch.ones(build.max_seq_len)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[-2]
        return super().attend(query * self.table[:length, None].to(query.dtype), key, value, mask)


class ReturnsToTheCpu(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, mask).cpu()


class StartsToDecodeOnTheCpu(SoundDecode):
    def init_state(self, batch_size: int, **keywords: Any) -> Any:
        self.share = torch.ones(batch_size, 1, 1, 1)
        return super().init_state(batch_size, **keywords)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = super().step(query, key, value, state)
        return output * self.share.to(output.dtype), state


class SoundDevice(Softmax):
    """Makes and registers tables as it should, moves one to the device at each call, and reads a number back."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.register_buffer("table", torch.ones(build.max_seq_len))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[-2]
        table: Any = self.table
        ramp = torch.arange(length, device=query.device) + torch.zeros(length).to(query.device)
        if bool((query.detach() > 1e30).any()):
            query = query * 0
        order = ramp.long().clamp(max=0) + torch.arange(length, device=query.device)
        scaled = (query * table[:length, None].to(query))[..., order, :]
        return super().attend(scaled, key, value, mask) * query.new_ones(()) * torch.ones(())


class RunsOnACpuOnly(MakesATableOnTheCpu):
    pass


class AsksForAGenerator(Softmax):
    """What it asks for needs the device itself, so that its calls cannot be followed."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        torch.Generator(query.device)
        return super().attend(query, key, value, mask)


@torch.jit.script
def doubled(tensor: Tensor) -> Tensor:
    return tensor + tensor


class IsScripted(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, doubled(value) / 2, mask)


class IsMapped(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        halved: Tensor = torch.func.vmap(lambda rows: rows / 2)(value)
        return 2 * super().attend(query, key, halved, mask)


class EndsScripted(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = doubled(super().attend(query, key, value / 2, mask))
        return output


DEVICE = (
    Broken(cls=MakesATableOnTheCpu, check="device"),
    Broken(cls=KeepsATableUnregistered, check="device"),
    Broken(cls=ReturnsToTheCpu, check="device"),
    Broken(cls=StartsToDecodeOnTheCpu, check="device", capabilities=DECODE),
)
SOUND_DEVICE = (
    Broken(cls=SoundDevice, check="", capabilities={"causal": True, "key_padding_mask": True}),
    Broken(cls=RunsOnACpuOnly, check="", capabilities={"devices": ("cpu",)}),
    Broken(cls=AsksForAGenerator, check=""),
    Broken(cls=IsScripted, check=""),
    Broken(cls=IsMapped, check=""),
    Broken(cls=EndsScripted, check=""),
)
