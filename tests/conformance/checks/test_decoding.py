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
from tests.conformance.broken_decoding import GROUPED, Decodes


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


def test_a_state_is_claimed_for_the_heads_of_keys_and_values():
    def state_bytes(shape: Any, itemsize: int) -> int:
        return int(2 * shape.batch_size * shape.num_heads * shape.key_len * shape.head_dim * itemsize)

    broken = Broken(cls=Decodes, check="", capabilities=GROUPED, complexity={"state_bytes": state_bytes})
    with registered(broken) as name:
        (result,) = run_checks(name, checks=["decode_state_bytes"])
    assert result.outcome == "failed"
    assert "H=4 G=2" in result.example


class NeedNotGuardItsSteps(SoundDecode):
    """No state can be had where it cannot decode, so that none can be passed to a step."""

    def init_state(self, *args: Any, **keywords: Any) -> KVCache:
        self._require_state()
        return super().init_state(*args, **keywords)


def test_a_step_is_not_asked_for_where_no_state_is_given():
    with registered(Broken(cls=NeedNotGuardItsSteps, check="", capabilities={"causal": True})) as name:
        (result,) = run_checks(name, checks=["decode"])
    assert result.outcome == "refused"
