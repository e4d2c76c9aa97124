"""Reading in pieces of every small size, and states whose type is not that of the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.attention.decode import KVCache
from attn_zoo.conformance import run_checks
from tests.conformance.broken import Broken, registered
from tests.conformance.broken_claims import MIXER, MIXER_COST, ProjectedSoftmax, SoundDecode


class ForgetsAfterPrefillsOfTwo(SoundDecode):
    """As a short convolution whose last inputs are kept from the new ones alone."""

    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
        is_after = state is not None and state.length > 0
        output, state = super().prefill(query, key, value, state)
        if is_after and query.shape[2] == 2:
            state = KVCache(state.key.clone(), state.value.clone(), state.length)
            state.value[:, :, state.length - 3] = 0.0
        return output, state


class KeepsFloat32(ProjectedSoftmax):
    def init_state(self, batch_size: int, **keywords: Any) -> Tensor:
        dtype = torch.promote_types(keywords["dtype"], torch.float32)
        return super().init_state(batch_size, **{**keywords, "dtype": dtype})

    def step(self, hidden: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        output, new = super().step(hidden, state.to(hidden.dtype))
        return output, new.to(state.dtype)


def test_prefills_of_two_tokens_are_tried():
    with registered(Broken(cls=ForgetsAfterPrefillsOfTwo, check="", capabilities=MIXER)) as name:
        (result,) = run_checks(name, checks=["decode"])
    assert result.outcome == "failed"
    assert "short prefills" in result.example


@pytest.mark.parametrize(("least", "outcome"), [(4, "passed"), (1, "failed")])
def test_a_state_in_a_wider_type_is_claimed_as_such(least, outcome):
    def state_bytes(shape: Any, itemsize: int) -> int:
        return int(shape.batch_size * shape.key_len * shape.embed_dim * max(least, itemsize))

    complexity = {**MIXER_COST, "state_bytes": state_bytes}
    capabilities = {**MIXER, "dtypes": ("float64", "float32", "bfloat16")}
    with registered(Broken(cls=KeepsFloat32, check="", capabilities=capabilities, complexity=complexity)) as name:
        (result,) = run_checks(name, checks=["decode_state_bytes"])
    assert result.outcome == outcome
    assert ("bfloat16" in result.example) == (outcome == "failed")
