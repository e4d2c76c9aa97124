"""What passes between layers may hold more than an output does, as long as no output reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.attention import Mixed
from attn_zoo.attention.masks import blank_padding, finite_padding
from attn_zoo.conformance import run_checks
from tests.conformance.broken import Broken, registered
from tests.conformance.broken_contract import CARRY, SoundCarry

MASKED = {**CARRY, "causal": True, "key_padding_mask": True}


class PassesTokens(SoundCarry):
    """Adds to each token what the layer before had there, whose padded tokens it passes on as they are. Sound."""

    def init_carry(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> None:  # type: ignore[override]
        return None

    def read(self, carry: Tensor) -> Tensor:
        return carry

    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None, carry: Any = None) -> Mixed:
        hidden = finite_padding(hidden, key_padding_mask)
        return Mixed((hidden if carry is None else hidden + self.read(carry)) * self.scale, hidden)

    def reference(self, *args: Any, **keywords: Any) -> Mixed:
        return PassesTokens.forward(self, *args, **keywords)


class StopsGradients(PassesTokens):
    """As a memory of earlier segments, through which nothing is learned. Sound."""

    def read(self, carry: Tensor) -> Tensor:
        return carry.detach()


class ReadsTheNextSequence(PassesTokens):
    def read(self, carry: Tensor) -> Tensor:
        return carry + 1e-6 * carry.roll(1, 0)


class ReadsTheNextToken(PassesTokens):
    def read(self, carry: Tensor) -> Tensor:
        return carry + 1e-6 * carry.roll(-1, 1).detach()


class LearnsFromAllTokens(PassesTokens):
    """Right in value."""

    def read(self, carry: Tensor) -> Tensor:
        return carry + (carry - carry.detach()).mean((0, 1))


class PassesTheSum(PassesTokens):
    """Its first layer is right, and its carry finite: what it makes of padded tokens, all others read."""

    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None, carry: Any = None) -> Mixed:
        mixed = super().forward(hidden, key_padding_mask=key_padding_mask, carry=carry)
        assert mixed.carry is not None
        return Mixed(mixed.hidden, mixed.carry + 1e-6 * mixed.carry.sum(1, keepdim=True))

    def reference(self, *args: Any, **keywords: Any) -> Mixed:
        return self.forward(*args, **keywords)


class ReadsDifferently(PassesTokens):
    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None, carry: Any = None) -> Mixed:
        carry = carry if carry is None else carry * (1 + 1e-6)
        return super().forward(blank_padding(hidden, key_padding_mask), carry=carry)

    def reference(self, hidden: Tensor, *, key_padding_mask: Any = None, **keywords: Any) -> Mixed:
        return super().reference(blank_padding(hidden, key_padding_mask), **keywords)


def carried(cls: type[Any], **capabilities: Any) -> tuple[str, str]:
    with registered(Broken(cls=cls, check="", capabilities={**MASKED, **capabilities})) as name:
        (result,) = run_checks(name, checks=["carry"])
    return result.outcome, result.message


@pytest.mark.parametrize("cls", [PassesTokens, StopsGradients])
def test_sound_ones_pass(cls):
    assert carried(cls) == ("passed", "[70, 32] for each sequence")


@pytest.mark.parametrize(
    ("cls", "capabilities", "fault"),
    [
        (ReadsTheNextSequence, {}, "other entries of the batch"),
        (ReadsTheNextToken, {"key_padding_mask": False}, "future"),
        (PassesTheSum, {"causal": False}, "values under key_padding_mask"),
        (LearnsFromAllTokens, {}, "gradient to another sequence"),
    ],
)
def test_an_output_that_sees_more_through_the_carry_is_caught(cls, capabilities, fault):
    outcome, message = carried(cls, **capabilities)
    assert outcome == "failed"
    assert fault in message
    assert message.endswith("through the carry")


def test_the_fast_path_and_the_reference_read_it_alike():
    expected = "the second layer's output differs from that of the readable reference"
    assert carried(ReadsDifferently) == ("failed", expected)
