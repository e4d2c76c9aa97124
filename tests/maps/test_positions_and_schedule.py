"""Maps of positions and of learning rates: tables and rates are those that models and training use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.maps.find import find_weights
from attn_zoo.maps.position_table import _table_of, cosine_similarity, position_map, position_table
from attn_zoo.maps.rate_curve import protocol_rates, schedule_map
from attn_zoo.model.positions import sinusoidal_positions
from attn_zoo.training.protocol import PROTOCOLS, learning_rate
from attn_zoo.training.weights import load_trained
from attn_zoo.units import human_number
from tests.maps.test_attention_map import words_of


def test_tables_are_those_of_the_model():
    np.testing.assert_array_equal(position_table("sinusoidal", 9, 6), sinusoidal_positions(9, 6).numpy())
    learned = position_table("learned", 500, 64)
    assert learned.std() == pytest.approx(64**-0.5, rel=0.05)
    np.testing.assert_array_equal(learned, position_table("learned", 500, 64))
    for length, dim, name in ((0, 6, "--len"), (9, 0, "--dim")):
        with pytest.raises(ConfigError, match=f"{name}: expected 1 to 8192; got 0"):
            position_table("learned", length, dim)


def test_similarity_is_the_cosine():
    table = np.array([[3.0, 0.0], [1.0, 1.0], [-2.0, 0.0], [0.0, 0.0]], dtype=np.float32)
    half = 0.5**0.5
    expected = [[1, half, -1, 0], [half, 1, -half, 0], [-1, -half, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(cosine_similarity(table), expected, atol=1e-6)


def test_positions_of_a_trained_model(zoo: Path):
    words = words_of(position_map(zoo, "full/*/plain/*"))
    assert "Learned positions after training" in words
    trained = load_trained(find_weights(zoo, "full/*/plain/*"))
    table = _table_of(trained.model)
    assert table is not None
    np.testing.assert_array_equal(
        table, dict(trained.model.named_parameters())["tower.encoder.embedding.learned.weight"].detach().numpy()
    )
    with pytest.raises(UnsupportedError, match="position = 'none' adds nothing"):
        position_map(zoo, "full/*/other/*")


@pytest.mark.parametrize(
    ("length", "dim", "words"),
    [(1, 1, "1 position, 1 feature."), (2, 7, "2 positions, 7 features."), (128, 64, "128 positions, 64 features.")],
)
def test_any_size_can_be_drawn(length: int, dim: int, words: str):
    figure = position_map(kind="sinusoidal", length=length, dim=dim)
    assert words in words_of(figure)
    values, similarity = (axes for axes in figure.axes if axes.images)
    assert values.images[0].get_array().shape == (length, dim)  # type: ignore[union-attr]
    assert similarity.images[0].get_array().shape == (length, length)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_rates_are_those_that_training_uses(name: str):
    protocol = PROTOCOLS[name]
    found = protocol_rates(protocol)
    for step, rate in list(found.items())[::97]:
        expected = learning_rate(
            protocol.schedule,
            step,
            base_lr=protocol.base_lr,
            warmup_steps=protocol.warmup_steps,
            num_steps=protocol.num_steps,
            embed_dim=protocol.embed_dim,
        )
        assert rate == expected
    assert (min(found), max(found)) == (1, protocol.num_steps)
    assert protocol.warmup_steps in (0, *found)
    figure = schedule_map(name)
    line = figure.axes[0].lines[0]
    np.testing.assert_array_equal(np.asarray(line.get_data()), [list(found), list(found.values())])
    assert "warm-up" in words_of(figure)
    assert f"highest: {human_number(max(found.values()))} at update " in words_of(figure)


def test_a_task_changes_the_protocol(zoo: Path):
    assert zoo.is_dir()  # the toy task is registered while it lives
    drawn = schedule_map("lra-small", "toy").axes[0].lines[0]
    assert list(np.asarray(drawn.get_xdata())) == [*range(1, 8)]
    assert "toy sets nothing of its own" in words_of(schedule_map("cpu-small", "toy"))


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'cpu-small'"):
        schedule_map("cpu-smal")
    with pytest.raises(UnknownNameError, match="unknown task 'lisstops'; did you mean 'listops'"):
        schedule_map("cpu-small", "lisstops")
