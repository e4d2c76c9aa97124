"""Checks in a process of their own: a variant that ends it, or prints much, is found out and takes nothing along."""

from __future__ import annotations

import re

import pytest

import attn_zoo
from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.registry import variants
from tests.test_discovery import VARIANT

CHECKS = ["shape_and_dtype", "non_contiguous", "batch_invariance"]


@pytest.fixture
def misbehaving(tmp_path, capfd):
    """Return a function that registers a variant which does something in each call."""
    before = set(variants)

    def register(statement: str) -> str:
        path = tmp_path / "misbehaves.py"
        text = VARIANT.format(name="misbehaves").replace("return value", f"{statement}\n        return value")
        path.write_text("import os, signal\nprint('loaded')\n" + text)
        attn_zoo.load_file(path, None)  # it misbehaves in calls only
        assert "loaded" in "".join(capfd.readouterr())
        return "misbehaves"

    yield register
    for name in set(variants) - before:
        variants.remove(name)


@pytest.mark.parametrize(
    ("end", "outcome", "message"),
    [
        ("os._exit(0)", "failed", "ends the process, with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "ends the process, by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "error", "the process was killed from outside"),
    ],
)
def test_what_ends_the_process_is_the_finding(misbehaving, capfd, end, outcome, message):
    name = misbehaving(f"query.stride(-1) == 1 or {end}")
    first, second, third = attn_zoo.check(name, only=CHECKS, apart=True)
    assert [first.check, second.check, third.check] == CHECKS
    assert first.outcome == "passed"
    assert (second.outcome, second.message) == (outcome, message)
    assert (third.outcome, third.message) == ("error", "not made: the process had ended in non_contiguous")
    out, err = capfd.readouterr()
    has_stack = re.search(r'Segmentation fault\n(.*\n)*.*misbehaves\.py", line \d+ in forward', err) is not None
    assert (out, has_stack) == ("", "SIGSEGV" in message)


def test_of_what_is_printed_the_last_lines_are_shown(misbehaving, capfd):
    results = attn_zoo.check(misbehaving("print('[')"), only=CHECKS, apart=True)
    assert results.is_ok
    out, err = capfd.readouterr()
    told, _, printed = err.partition("last lines that misbehaves printed:\n")
    assert (out, printed) == ("", "[\n" * 14)
    assert "loaded" not in told  # which is seen where the variant is loaded here


def test_what_is_refused_before_a_check_is_the_same_error(misbehaving):
    name = misbehaving("pass")
    with pytest.raises(ConfigError, match="misbehaves: unknown option 'size'  "):
        attn_zoo.check(name, {"size": 3}, only=CHECKS, apart=True)
    with pytest.raises(ConfigError, match=r"options\.size: expected a string, number, .*; got "):
        attn_zoo.check(name, {"size": {3}}, only=CHECKS, apart=True)
    with pytest.raises(UnknownNameError, match="unknown variant 'misbehave'"):
        attn_zoo.check("misbehave", only=CHECKS, apart=True)
