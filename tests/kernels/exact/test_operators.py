"""Operators take what they are given: torch's own shapes and argument types. What they compute is tested on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_zoo.kernels.exact.operators import OPERATORS

LIKE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_forward_and_backward(name: str, dropout_p: float):
    operator = OPERATORS[name]
    with FakeTensorMode():
        query, key, value = (torch.empty(4, n, 2, 64, **LIKE).transpose(1, 2) for n in (1024, 256, 256))
        output, *rest = operator.forward(query, key, value, dropout_p, False, True)
        assert output.shape == query.shape
        gradients = operator.backward(torch.empty_like(output), query, key, value, dropout_p, output, *rest)
    assert [x.shape for x in gradients] == [x.shape for x in (query, key, value)]


@pytest.mark.parametrize("name", OPERATORS)
def test_forward_alone(name: str):
    with FakeTensorMode():
        tensors = [torch.empty(2, 3, 128, 64, **LIKE) for _ in range(3)]
        assert OPERATORS[name].forward(*tensors, 0.0, True, False)[0].shape == (2, 3, 128, 64)
