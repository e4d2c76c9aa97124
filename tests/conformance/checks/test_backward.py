"""Gradients: a parameter that short sequences do not need has none there, which is no fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import run_checks
from tests.conformance.broken import Broken, Softmax, registered


class ScalesFrom30On(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.scale = nn.Parameter(torch.ones(build.head_dim))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output * self.scale if query.shape[2] >= 30 else output


class LosesItBelow30(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.scale = nn.Parameter(torch.ones(build.head_dim))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output * (self.scale if query.shape[2] >= 30 else self.scale.detach())


@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "float64")])
def test_what_short_sequences_read_gets_one_there_too(dtypes: tuple[str, ...]):
    with registered(Broken(cls=LosesItBelow30, check="", capabilities={"dtypes": dtypes})) as name:
        (result,) = run_checks(name, checks=["gradients_reach_every_parameter"])
    assert (result.outcome, result.message) == ("failed", "no gradient reaches parameter scale")


def test_what_only_long_sequences_need_gets_a_gradient_there():
    with registered(Broken(cls=ScalesFrom30On, check="")) as name:
        results = run_checks(name, checks=["gradients_reach_every_parameter"])
    assert {result.outcome for result in results} == {"passed"}, results
