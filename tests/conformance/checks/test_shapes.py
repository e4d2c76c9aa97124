"""Heads in groups: what a group chooses as one is compared with the reference, not with heads that choose alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.conformance import run_checks
from tests.conformance.broken import Broken, registered
from tests.conformance.broken_contract import SoundRouting

GROUPED = {"causal": True, "grouped_query": True}


class ChoosesForItsGroup(SoundRouting):
    """The heads of a group see the keys that they like best in sum, as in native sparse attention. Sound."""

    def route(self, query: Tensor, key: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        together = query.unflatten(1, (key.shape[1], -1)).sum(2)
        return expand_kv_heads(super().route(together, key), query.shape[1])


class InterleavesItsGroups(ChoosesForItsGroup):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        repeated = torch.cat([value] * (query.shape[1] // value.shape[1]), dim=1)
        return super().forward(query, key, repeated, key_padding_mask=key_padding_mask)


@pytest.mark.parametrize(("cls", "outcome"), [(ChoosesForItsGroup, "passed"), (InterleavesItsGroups, "failed")])
def test_a_group_may_choose_as_one(cls, outcome):
    with registered(Broken(cls=cls, check="", capabilities=GROUPED)) as name:
        (result,) = run_checks(name, checks=["grouped_query"])
    assert result.outcome == outcome, result
