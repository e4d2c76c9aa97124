"""A compiled training whose gradients are wrong is stopped before its first update; dropout alone stops none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from attn_zoo.errors import GateError
from attn_zoo.training import run as training_run
from attn_zoo.training import run_training
from attn_zoo.training.compiled_gate import CHECK, MAX_PAIRS, Gradients, check_gradients
from attn_zoo.training.loop import Trainer
from attn_zoo.training.ranks import Ranks
from attn_zoo.training.updates import Updater
from tests.training.toy_task import cell, toy_task

SIZES = {"weight": (24, 16), "bias": (24,), "temperature": (1,), "key_bias": (24,)}


def drawing(seed: int, noise: float) -> Callable[[int], Gradients]:
    """Return what draws gradients around means: each number by `noise` of itself, as dropout does.

    The bias of the keys has a mean of zero, and what rounding leaves.
    """
    generator = torch.Generator().manual_seed(seed)
    means = {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}
    means["key_bias"].zero_()

    def draw(_: int) -> Gradients:
        noises = {name: noise * torch.randn(mean.shape, generator=generator) for name, mean in means.items()}
        found = {name: mean * (1 + noises[name]) for name, mean in means.items()}
        found["key_bias"] = 1e-3 * torch.randn(SIZES["key_bias"], generator=generator)
        return found

    return draw


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
def test_no_draw_is_blamed(noise):
    for seed in range(300):
        draw = drawing(seed, noise)
        assert check_gradients(draw(0), draw) == (CHECK,), seed


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("spoil", "how"),
    [
        (lambda x: 2 * x, r"is off by \d"),
        (torch.zeros_like, r"is off by \d"),
        (lambda x: x.flip(0), r"is off by \d"),
        (lambda x: torch.full_like(x, torch.nan), "is not finite"),
        (lambda x: torch.full_like(x, torch.inf), "is not finite"),
    ],
    ids=["twice", "none", "rows in another order", "nan", "inf"],
)
def test_a_wrong_gradient_of_one_parameter_is_named(name, spoil, how):
    for noise in (0.0, 0.05):
        draw = drawing(0, noise)
        wrong = dict(draw(0))
        wrong[name] = spoil(wrong[name])
        with pytest.raises(GateError, match=f"compiled, the gradient of {name} {how}.*compile = false") as caught:
            check_gradients(wrong, draw)
        assert caught.value.check == CHECK


def test_more_is_drawn_before_it_is_blamed():
    draw, numbers = drawing(0, 0.05), []

    def counted(number: int) -> Gradients:
        numbers.append(number)
        return draw(number)

    check_gradients(draw(0), counted)
    assert numbers == [0, 1]
    with pytest.raises(GateError):
        check_gradients({name: 3 * gradient for name, gradient in draw(0).items()}, counted)
    assert numbers[2:] == list(range(2 * MAX_PAIRS))


def test_a_model_that_is_not_finite_as_written_is_not_blamed_on_the_compiler():
    right, wrong = {"weight": torch.ones(3)}, {"weight": torch.full((3,), torch.nan)}
    assert check_gradients(wrong, lambda _: wrong) == ()
    assert check_gradients(wrong, lambda draw: wrong if draw == 0 else right) == ()
    assert check_gradients(wrong, lambda draw: wrong if draw == 1 else right) == ()


@pytest.fixture
def toy() -> Iterator[None]:
    with toy_task():
        yield
    torch.compiler.reset()


class Compiled(nn.Module):
    """Stands in for what torch compiles: its outputs are right, its gradients times `factor`."""

    factor = 1.0

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor | None) -> Tensor:
        outputs: Tensor = self.model(*inputs)
        return outputs.detach() + self.factor * (outputs - outputs.detach())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("level", "overrides"),
    [("plain", {}), ("tokens", {"pretrain": "masked", "pretrain_steps": 4}), ("seq2seq", {})],
    ids=["plain", "pretrained", "seq2seq"],
)
def test_a_training_says_what_was_checked_and_ends_where_that_is_wrong(toy, monkeypatch, level, overrides, dtype):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    run = cell(level, num_steps=4, eval_every=2, compile=True, dropout_p=0.1, **overrides)
    run = dataclasses.replace(run, dtype=dtype)
    result = run_training(run)
    assert result.score is not None
    assert result.checks == (CHECK,)
    plain = dataclasses.replace(run, overrides={**run.overrides, "compile": False})
    as_written = run_training(plain)
    assert as_written.checks == ()
    assert as_written.score is not None
    assert as_written.score.curve == result.score.curve, "what was drawn and kept to check is not left behind"
    monkeypatch.setattr(Compiled, "factor", 2.0)
    with pytest.raises(GateError, match=r"compiled, the gradient of .* is off by"):
        run_training(run)
    assert run_training(plain).score is not None


def test_its_seconds_are_of_compiling(toy, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    times = iter([10.0, 17.0])
    original = Updater._now
    checked = Updater.check_compiled

    def check(self, feed, order):
        monkeypatch.setattr(Updater, "_now", lambda _: next(times))
        found = checked(self, feed, order)
        monkeypatch.setattr(Updater, "_now", original)
        return found

    monkeypatch.setattr(Updater, "check_compiled", check)
    score = run_training(cell(num_steps=2, eval_every=2, compile=True)).score
    assert score is not None
    assert score.compile_s is not None
    assert 7.0 < score.compile_s < score.train_s < 14.0


def test_a_training_that_goes_on_with_its_test_keeps_what_was_checked(toy, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    run, score = cell(num_steps=2, eval_every=2, compile=True), training_run._score_on_test

    def interrupted(task, trainer):
        raise KeyboardInterrupt

    monkeypatch.setattr(training_run, "_score_on_test", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_training(run, checkpoint_dir=tmp_path)
    monkeypatch.setattr(training_run, "_score_on_test", score)
    assert run_training(run, checkpoint_dir=tmp_path).checks == (CHECK,)


def test_running_statistics_do_not_see_it(toy, monkeypatch):
    kept = []
    original = Trainer._advance

    def advance(self, *arguments):
        kept.append([buffer.clone() for buffer in self.model.buffers()])
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "_advance", advance)
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    for is_compiled in (True, False):
        run_training(cell(num_steps=1, eval_every=1, compile=is_compiled, norm="batch_norm"))
    assert kept[0], "there are some"
    assert all(torch.equal(one, two) for one, two in zip(kept[0], kept[1], strict=True))


def test_what_does_not_fit_as_written_is_not_checked(toy, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    original = Updater._gradients

    def gradients(self, model, batch, draw):
        if model is self.model:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, model, batch, draw)

    monkeypatch.setattr(Updater, "_gradients", gradients)
    result = run_training(cell(num_steps=2, eval_every=2, compile=True))
    assert result.score is not None
    assert result.checks == ()
    assert "not checked" in capsys.readouterr().err


def test_no_rank_goes_on_where_another_is_wrong(toy, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    monkeypatch.setattr(Ranks, "largest", lambda self, number: 1.0)
    with pytest.raises(GateError, match="of another rank are wrong"):
        run_training(cell(num_steps=2, eval_every=2, compile=True))
