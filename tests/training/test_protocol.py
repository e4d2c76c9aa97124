"""Protocols are frozen data; overrides are checked and explained."""

from __future__ import annotations

import dataclasses

import pytest

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.registry import tasks
from attn_zoo.training import PROTOCOLS, resolve_protocol
from attn_zoo.training.protocol import SCHEDULES, learning_rate


def test_names_agree_and_nothing_can_be_changed():
    assert set(PROTOCOLS) == {"cpu-small", "lra-small", "lra-original"}
    assert all(protocol.name == name for name, protocol in PROTOCOLS.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROTOCOLS["cpu-small"].num_steps = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        PROTOCOLS["new"] = PROTOCOLS["cpu-small"]  # type: ignore[index]


def test_overrides_beat_the_task_and_the_task_beats_the_protocol():
    resolved = resolve_protocol(
        "cpu-small", task_settings={"batch_size": 3, "num_layers": 5}, overrides={"batch_size": 4, "base_lr": 1}
    )
    assert (resolved.batch_size, resolved.num_layers, resolved.base_lr) == (4, 5, 1.0)
    assert resolved.embed_dim == PROTOCOLS["cpu-small"].embed_dim


def test_all_wrong_overrides_are_reported_with_near_matches():
    with pytest.raises(ConfigError) as caught:
        resolve_protocol("cpu-small", overrides={"num_step": 3, "batch_size": "8", "norm": "layernorm"})
    message = str(caught.value)
    assert "overrides of cpu-small: 3 problems" in message
    assert "unknown option 'num_step'; did you mean 'num_steps'?" in message
    assert "batch_size" in message
    assert "'layer_norm'" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_steps": 0}, "num_steps: expected more than 0; got 0"),
        ({"clip_norm": -1.0}, "clip_norm: expected 0 or more"),
        ({"name": "mine"}, "name: is not a setting"),
        ({"num_heads": 7}, "embed_dim: expected a multiple of num_heads=7, or give head_dim; got 64"),
        ({"num_layers": 0}, "num_layers: expected at least 1; got 0"),
        ({"head_dim": -3}, "head_dim: expected at least 0; got -3"),
        ({"dropout_p": 1.5}, "dropout_p: expected 0 <= dropout_p < 1; got 1.5"),
        ({"position": "rotary", "embed_dim": 6}, "position: rotary positions turn pairs of features; got head_dim = 3"),
        ({"betas": [0.9, 1.5]}, r"betas: expected two numbers from 0 to less than 1; got \[0.9, 1.5\]"),
        ({"eps": -1.0}, "eps: expected more than 0; got -1.0"),
        ({"eps": 0.0}, "eps: expected more than 0; got 0.0"),
    ],
)
def test_impossible_overrides_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolve_protocol("cpu-small", overrides=overrides)


def test_unknown_protocol_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown protocol 'lra-smal'; did you mean 'lra-small'"):
        resolve_protocol("lra-smal")


def test_published_set_ups_of_listops():
    """Facts: mlpen/Nystromformer LRA/code/lra_config.py; google-research/long-range-arena listops configs."""
    settings = tasks["listops"].settings
    small = resolve_protocol("lra-small", task_settings=settings["lra-small"])
    assert (small.num_layers, small.embed_dim, small.num_heads, small.ffn_dim) == (2, 64, 2, 128)
    assert (small.num_steps, small.warmup_steps, small.batch_size, small.eval_every) == (5_000, 1_000, 32, 50)
    assert (small.base_lr, small.schedule, small.eps, small.betas) == (1e-4, "linear", 1e-6, (0.9, 0.999))
    assert (small.pooling, small.position, small.dropout_p, small.weight_decay) == ("mean", "learned", 0.1, 0.0)
    original = resolve_protocol("lra-original", task_settings=settings["lra-original"])
    assert (original.num_layers, original.embed_dim, original.num_heads, original.ffn_dim) == (4, 512, 8, 1_024)
    assert (original.schedule, original.base_lr, original.warmup_steps) == ("rsqrt", 0.05, 1_000)
    assert (original.betas, original.eps, original.weight_decay) == ((0.9, 0.98), 1e-9, 0.1)
    assert (original.pooling, original.position, original.is_full_length) == ("cls", "sinusoidal", True)


def test_the_settings_of_every_task_are_valid():
    for name in tasks:
        for protocol, settings in tasks[name].settings.items():
            resolve_protocol(protocol, task_settings=settings)


def test_model_config_takes_every_shared_field():
    protocol = resolve_protocol("cpu-small", overrides={"embed_dim": 24, "num_heads": 3, "norm": "rms_norm"})
    config = protocol.model_config(variant="full", options={"a": 1}, vocab_size=9, max_seq_len=33, seed=5)
    assert (config.embed_dim, config.num_heads, config.norm, config.max_seq_len) == (24, 3, "rms_norm", 33)
    assert (config.variant, config.options, config.vocab_size, config.seed) == ("full", {"a": 1}, 9, 5)


@pytest.mark.parametrize("name", ["base_lr", "weight_decay", "clip_norm", "eps"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(name: str, value: float):
    with pytest.raises(ConfigError, match=f"{name}: expected a finite number; got {value}"):
        resolve_protocol("cpu-small", overrides={name: value})


@pytest.mark.parametrize("single", [{"num_steps": 1}, {"pretrain": "masked", "pretrain_steps": 1}])
def test_an_only_update_has_a_rate(single: dict[str, object]):
    overrides = {**single, "warmup_steps": 0}
    for schedule in ("linear", "cosine"):
        with pytest.raises(ConfigError, match=f"schedule: expected another with .*_?steps = 1 than {schedule}"):
            resolve_protocol("cpu-small", overrides={**overrides, "schedule": schedule})
    resolve_protocol("cpu-small", overrides={**overrides, "schedule": "constant"})
    resolve_protocol("cpu-small", overrides={**single, "warmup_steps": 1})
    resolve_protocol("cpu-small", overrides={**overrides, "num_steps": 9, "pretrain": ""})  # no update of that kind


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("num_steps", "warmup_steps"), [(50, 10), (50, 1), (50, 0), (50, 50), (50, 51), (50, 300), (2, 0)]
)
def test_the_highest_rate_is_that_of_all_updates(schedule, num_steps, warmup_steps):
    overrides = {"schedule": schedule, "num_steps": num_steps, "warmup_steps": warmup_steps}
    protocol = resolve_protocol("cpu-small", overrides=overrides)
    rates = [
        learning_rate(schedule, step, base_lr=1e-3, warmup_steps=warmup_steps, num_steps=num_steps, embed_dim=64)
        for step in range(1, num_steps + 1)
    ]
    assert protocol.peak_lr == max(rates)
