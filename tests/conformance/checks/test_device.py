"""What a GPU would refuse is found without one, by file and line; what it would wait for is named."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import attn_zoo
from attn_zoo.conformance import CheckResult, run_checks
from attn_zoo.conformance.checks.device import ELSEWHERE, ON_CPU
from tests.conformance import broken_device
from tests.conformance.broken import Broken, registered

BY_NAME = {each.cls.__name__: each for each in (*broken_device.DEVICE, *broken_device.SOUND_DEVICE)}


def result_of(broken: Broken) -> CheckResult:
    with registered(broken) as name:
        (result,) = run_checks(name, checks=["device"])
    return result


def line_of(cls: type, text: str) -> str:
    """Return the place of the first line of a class that holds `text`, as findings name it."""
    lines, first = inspect.getsourcelines(cls)
    return f"broken_device.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    ("name", "operation", "text"),
    [
        ("MakesATableOnTheCpu", "add", "torch.arange"),
        ("KeepsATableUnregistered", "mul", "query * self.table"),
    ],
)
def test_a_tensor_on_the_cpu_is_found_where_it_is_used(name: str, operation: str, text: str) -> None:
    result = result_of(BY_NAME[name])
    assert (result.outcome, result.message) == ("failed", f"{operation} {ON_CPU}")
    assert result.example == line_of(BY_NAME[name].cls, text)


def test_an_output_that_leaves_the_device_is_found() -> None:
    result = result_of(BY_NAME["ReturnsToTheCpu"])
    assert (result.outcome, result.message) == ("failed", "the output is on the CPU, wherever the input is")


def test_what_a_repeated_call_waits_for_is_named() -> None:
    cls = broken_device.SoundDevice
    result = result_of(BY_NAME["SoundDevice"])
    waits = f"to ({line_of(cls, 'torch.zeros')}), bool ({line_of(cls, 'if bool')})"
    assert (result.outcome, result.message) == ("passed", f"makes Python wait for the GPU: {waits}")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("RunsOnACpuOnly", "runs on no GPU"),
        ("AsksForAGenerator", "its calls cannot be followed: RuntimeError: "),
        ("IsScripted", "its calls cannot be followed: matmul is given a tensor of unknown origin (broken.py:"),
        ("IsMapped", "its calls cannot be followed: matmul is given a tensor of unknown origin (broken.py:"),
        ("EndsScripted", "its calls cannot be followed: the output is of unknown origin"),
    ],
)
def test_what_is_not_checked_says_why(name: str, reason: str) -> None:
    result = result_of(BY_NAME[name])
    assert result.outcome == "not_applicable"
    assert reason in result.message


@pytest.mark.parametrize("name", attn_zoo.list_variants())
def test_our_mechanisms_can_be_followed_and_wait_for_nothing(name: str) -> None:
    (result,) = run_checks(name, checks=["device"])
    assert (result.outcome, result.message) == ("passed", "")


def test_nothing_of_the_other_device_is_left() -> None:
    result_of(BY_NAME["SoundDevice"])
    made: Any = torch.ones(2) + 1
    assert type(made) is torch.Tensor
    assert made.device != ELSEWHERE
