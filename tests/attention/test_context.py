"""BuildContext: defaults, and every impossible size refused before anything is built."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from attn_zoo import BuildContext, ConfigError
from attn_zoo.metadata import Request


def make(**changes):
    return BuildContext(**{"embed_dim": 32, "num_heads": 4, "max_seq_len": 64, **changes})


def test_defaults_follow_from_the_sizes():
    build = make()
    assert (build.head_dim, build.num_kv_heads) == (8, 4)
    assert make(head_dim=5).head_dim == 5
    assert make(num_kv_heads=2).num_kv_heads == 2
    assert make(embed_dim=33, head_dim=8).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 0}, "embed_dim: expected at least 1; got 0"),
        ({"num_heads": -1}, "num_heads: expected at least 1"),
        ({"max_seq_len": 0}, "max_seq_len: expected at least 1"),
        ({"seed": -1}, "seed: expected at least 0"),
        ({"embed_dim": 30}, "expected a multiple of num_heads=4, or give head_dim; got 30"),
        ({"num_kv_heads": 3}, "expected a divisor of num_heads=4; got 3"),
        ({"dropout_p": 1.0}, "expected 0 <= dropout_p < 1; got 1.0"),
        ({"dropout_p": float("nan")}, "dropout_p"),
        ({"is_causal": True, "is_cross": True}, "is_causal must be off"),
        ({"embed_dim": "32"}, "embed_dim: expected an integer; got '32'"),
        ({"num_heads": 4.0}, r"num_heads: expected an integer; got 4\.0"),
        ({"seed": True}, "seed: expected an integer; got True"),
        ({"is_causal": "no"}, "is_causal: expected True or False; got 'no'"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError, match="3 problems"):
        make(embed_dim=0, num_heads=0, dropout_p=2.0)


def test_it_is_frozen_comparable_and_hashable():
    with pytest.raises(FrozenInstanceError):
        make().embed_dim = 1
    assert make() == make(shared={"a": 1})
    assert hash(make()) == hash(make(shared={"a": 1}))
    assert make(seed=1) != make()


def test_layers_share_what_they_share():
    build = make(shared={"a": 1})
    deeper = build.at_layer(3)
    assert deeper.layer_index == 3
    assert deeper.shared is build.shared
    assert deeper.at_layer(0) == build


def test_requests_and_shapes_say_the_same_as_the_context():
    build = make(is_causal=True, num_kv_heads=2, dropout_p=0.1, position="alibi")
    assert build.request() == Request(is_causal=True, is_grouped_query=True, dropout_p=0.1, position="alibi")
    shape = build.shape(3, 10, config="c")
    assert (shape.batch_size, shape.query_len, shape.key_len, shape.config) == (3, 10, 10, "c")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.is_causal) == (4, 2, 8, True)
    assert build.shape(3, 10, 7).key_len == 7
    assert shape.max_seq_len == build.max_seq_len > 10
