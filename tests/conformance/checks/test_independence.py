"""What cancels leaves rounding, which is no leak; and a call that raises is named."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import gate, run_checks
from attn_zoo.errors import GateError
from tests.conformance.broken import Broken, SoftmaxMixer, registered

CAUSAL = {"bidirectional": False, "causal": True, "positions": ("none",)}


class LongConvolution(SoftmaxMixer):
    """A causal convolution as long as the sequence, by Fourier transforms of `reach` times its length. Sound."""

    reach = 2.0

    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None) -> Tensor:
        length = hidden.shape[1]
        size = max(1, int(self.reach * length))
        filters = torch.arange(1, length + 1, dtype=hidden.dtype).rsqrt()[:, None]
        product = torch.fft.rfft(hidden, n=size, dim=1) * torch.fft.rfft(filters, n=size, dim=0)
        output: Tensor = torch.fft.irfft(product, n=size, dim=1)
        return output[:, :length]


class WrapsAround(LongConvolution):
    reach = 1.9


@pytest.mark.parametrize(("cls", "outcome"), [(LongConvolution, "passed"), (WrapsAround, "failed")])
def test_a_fourier_transform_leaves_rounding_in_the_future(cls, outcome):
    with registered(Broken(cls=cls, check="", capabilities=CAUSAL)) as name:
        (result,) = run_checks(name, checks=["causality"])
        assert result.outcome == outcome
        with nullcontext() if outcome == "passed" else pytest.raises(GateError, match="causality"):
            gate(name, {}, BuildContext(embed_dim=32, num_heads=2, max_seq_len=64, is_causal=True), seq_len=64)


class NotFinite(SoftmaxMixer):
    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None) -> Tensor:
        return hidden / 0.0


def test_what_is_not_finite_is_no_leak():
    with registered(Broken(cls=NotFinite, check="", capabilities=CAUSAL)) as name:
        (result,) = run_checks(name, checks=["causality"])
    assert result.message == "the output is not finite for ordinary inputs"


class RaisesInBatchesOfThree(SoftmaxMixer):
    def forward(self, hidden: Tensor, *, context: Any = None, key_padding_mask: Any = None) -> Tensor:
        if len(hidden) == 3:
            raise RuntimeError("three")
        return super().forward(hidden)


def test_the_call_that_raised_is_the_example():
    with registered(Broken(cls=RaisesInBatchesOfThree, check="")) as name:
        (result,) = run_checks(name, checks=["batch_invariance"])
    assert result.message.startswith("RuntimeError: three")
    assert "B=3 L=70" in result.example
