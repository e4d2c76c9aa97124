"""Errors teach: expected, got, near matches; they survive a trip between processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_zoo.errors import (
    AttnZooError,
    ConfigError,
    GateError,
    StoreError,
    UnknownNameError,
    UnsupportedError,
    first_line,
    memory_lacked_by,
    message_of,
    near_matches,
    suggestion,
)


def test_unknown_names_name_their_nearest_match_and_where_all_are():
    error = UnknownNameError("variant", "linfromer", ["full", "linformer", "bigbird"], "attn-zoo list shows all 3")
    assert str(error) == "unknown variant 'linfromer'; did you mean 'linformer'?  (attn-zoo list shows all 3)"
    assert error.matches == ["linformer"]
    assert str(UnknownNameError("task", "zzz", ["listops"])) == "unknown task 'zzz'"


def test_near_matches_ignore_case_and_keep_the_spelling():
    assert near_matches("LINFORMER", ["Linformer", "full"]) == ["Linformer"]
    assert suggestion("bigbrid", ["full", "bigbird"]) == "; did you mean 'bigbird'?"
    assert suggestion("zzzz", ["full"]) == ""


@pytest.mark.parametrize("sizes", [(2**62, 2), (2**62,), (2**33, 2**33)])
def test_a_tensor_whose_size_cannot_be_counted_lacks_memory(sizes):
    """As torch says it today: in its storage, or already in the number of elements."""
    one = torch.empty(1)
    for make in (lambda: torch.empty(sizes), lambda: one.expand(sizes).contiguous()):
        with pytest.raises(RuntimeError) as raised:
            make()
        assert memory_lacked_by(raised.value) == "host"


@given(st.text(), st.lists(st.text(), max_size=8))
def test_near_matches_come_from_what_is_known(name, known):
    assert set(near_matches(name, known)) <= set(known)


def test_config_errors_tell_all_problems_at_once():
    error = ConfigError("quick.toml", [("scaling[0].dtypes[0]", "got 'fp32'"), ("", "no tasks")])
    assert str(error) == "quick.toml: 2 problems\n  scaling[0].dtypes[0]: got 'fp32'\n  no tasks"
    assert str(ConfigError("a.toml", [("name", "is missing")])) == "a.toml: name: is missing"
    assert str(ConfigError("a.toml", [("", "is empty")])) == "a.toml: is empty"


def test_exit_codes_and_families():
    codes = {AttnZooError: 2, ConfigError: 2, UnsupportedError: 2, UnknownNameError: 2, GateError: 1, StoreError: 4}
    for kind, code in codes.items():
        assert issubclass(kind, AttnZooError)
        assert kind.exit_code == code


@pytest.mark.parametrize(
    "error",
    [
        AttnZooError("a"),
        UnsupportedError("causal", "no causal form"),
        UnknownNameError("variant", "ful", ["full"], "see the list"),
        ConfigError("a.toml", [("x", "is wrong"), ("y", "too")]),
        GateError("future", "output 3 depends on key 4"),
        StoreError("disk is full"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_a_trip_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_the_message_of_any_exception_can_be_told_in_a_line():
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert first_line(Silent()) == "(its message cannot be had: RuntimeError)"
    assert first_line(ValueError()) == "(no message)"
    assert first_line(ValueError("one\ntwo")) == "one"
    assert message_of(OSError("a\udc80")) == "a\\udc80", "what no file can hold is written out"
    assert len(message_of(ValueError("x" * 5_000_000))) < 3_000
