"""Rotary positions: a rotation, which makes scores depend on distance alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_zoo.attention.rotary import rotate


def test_it_is_the_papers_rotation_of_pairs():
    vector = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rotated = rotate(vector.expand(1, 1, 8, 4))[0, 0]
    for position in range(8):
        for pair, frequency in enumerate((1.0, 10_000.0**-0.5)):
            angle = torch.tensor(position * frequency, dtype=torch.float64)
            turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
            torch.testing.assert_close(rotated[position, pair::2], turn @ vector[pair::2])


@given(st.integers(0, 500), st.integers(0, 50))
def test_scores_depend_on_distance_alone(start, distance):
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(first):
        return (rotate(query, first + distance) * rotate(key, first)).sum()

    torch.testing.assert_close(score(start), score(0))


@given(st.integers(0, 20), st.integers(1, 10))
def test_rows_can_be_rotated_one_by_one(first, length):
    heads = torch.randn(1, 2, length, 6, dtype=torch.float64)
    singly = [rotate(heads[:, :, at : at + 1], first + at) for at in range(length)]
    torch.testing.assert_close(torch.cat(singly, dim=2), rotate(heads, first))


def test_it_keeps_length_dtype_and_the_first_position():
    heads = torch.randn(2, 3, 7, 8)
    torch.testing.assert_close(rotate(heads).norm(dim=-1), heads.norm(dim=-1))
    torch.testing.assert_close(rotate(heads)[:, :, 0], heads[:, :, 0])
    assert rotate(heads.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("position", [2049, 30_001])
def test_angles_are_exact_far_away_in_half_precision(position):
    ones = torch.ones(1, 1, 1, 4)
    far = rotate(ones.bfloat16(), position).float()
    torch.testing.assert_close(far, rotate(ones.double(), position).float(), rtol=0, atol=0.02)
