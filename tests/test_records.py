"""Records: JSON and back without loss, strict in what is read, keys that stand for everything that decides a result."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from attn_zoo.errors import StoreError
from attn_zoo.folder import differences
from attn_zoo.records import STATUSES, Cell, Environment, Memory, Record, Score, Status, Timing

RESULTS = Path(__file__).parents[1] / "results"

finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
options = st.dictionaries(words, json_values, max_size=3)
counts = st.none() | st.integers(0, 2**62)
sizes = st.none() | st.integers(1, 2**62)

cells = st.builds(
    Cell,
    kind=st.sampled_from(["scaling", "accuracy"]),
    variant=words,
    label=words,
    options=options,
    batch_size=sizes,
    seq_len=sizes,
    pass_=st.sampled_from([None, "infer", "fwd", "bwd", "fwd_bwd"]),
    scope=st.sampled_from([None, "attention", "mixer"]),
    is_causal=st.booleans(),
    dropout_p=st.floats(0, 1),
    overrides=options,
)
timings = st.builds(
    Timing,
    samples_ms=st.lists(st.floats(0, 1e9, exclude_min=True), max_size=4).map(tuple),
    median_ms=finite,
    q1_ms=finite,
    q3_ms=finite,
    low_ms=finite,
    high_ms=finite,
    first_ms=finite,
    num_warmup=st.integers(0, 9),
    inner_loops=st.integers(1, 9),
    timer=words,
    process_cpu_ms=st.none() | finite,
    flags=st.lists(words, max_size=2).map(tuple),
)
scores = st.builds(
    Score,
    metric=words,
    value=finite,
    validation=finite,
    num_examples=st.integers(0, 9),
    chance=finite,
    floors=st.dictionaries(words, finite, max_size=2),
    best_step=st.integers(0, 9),
    num_steps=st.integers(0, 9),
    num_params=st.integers(0, 9),
    train_flops=st.none() | finite,
    train_s=finite,
    compile_s=st.none() | finite,
    eval_s=st.none() | finite,
    eval_compile_s=st.none() | finite,
    tokens_per_s=finite,
    curve=st.lists(st.dictionaries(words, finite, max_size=2), max_size=2).map(tuple),
)
records = st.builds(
    Record,
    cell=cells,
    status=st.sampled_from(STATUSES),
    reason=words,
    kernels=st.lists(words, max_size=2).map(tuple),
    exit_code=st.none() | st.integers(-64, 255),
    flops=counts,
    timing=st.none() | timings,
    memory=st.none() | st.builds(Memory, peak_bytes=counts, saved_bytes=counts),
    score=st.none() | scores,
    trace=words,
)
environments = st.builds(
    Environment,
    host=words,
    platform=words,
    cpu=words,
    num_cores=st.integers(1, 9),
    memory_bytes=st.integers(1, 2**50),
    threads=st.integers(1, 9),
    versions=st.dictionaries(words, words, max_size=3),
    commit=words,
    is_dirty=st.booleans(),
)

CELL = Cell(kind="scaling", variant="full", seq_len=512, batch_size=1, pass_="fwd", options={"a": 1, "b": [1, 2]})
RECORD = Record(cell=CELL, status="ok")


@given(st.one_of(records, environments))
def test_json_and_back_is_the_same(record):
    text = record.to_json()
    assert type(record).from_dict(json.loads(text)) == record
    assert type(record).from_dict(json.loads(text)).to_json() == text


@given(st.sampled_from([math.nan, math.inf, -math.inf]))
def test_numbers_that_are_not_finite_are_refused_in_both_directions(number):
    timing = TypeAdapter(Timing).validate_python(
        dict.fromkeys(("median_ms", "q1_ms", "q3_ms", "low_ms", "high_ms", "first_ms"), 1.0)
        | {"samples_ms": (1.0,), "num_warmup": 1, "inner_loops": 1, "timer": "perf_counter"}
    )
    for wrong in (
        replace(RECORD, timing=replace(timing, median_ms=number)),
        replace(RECORD, timing=replace(timing, samples_ms=(1.0, number))),
        replace(RECORD, cell=replace(CELL, options={"eps": number})),
    ):
        with pytest.raises(StoreError, match="finite"):
            wrong.to_json()
    data = replace(RECORD, timing=replace(timing, median_ms=number)).to_dict()
    with pytest.raises(StoreError, match=r"timing\.median_ms"):
        Record.from_dict(data)


def test_a_cell_that_holds_nan_has_no_key():
    with pytest.raises(StoreError, match="finite"):
        _ = replace(CELL, options={"eps": math.nan}).key


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"speed": 3}, "speed"),
        ({"status": "fine"}, "status"),
        ({"cell": {"kind": "scaling"}}, "cell.variant"),
        ({"flops": "many"}, "flops"),
        ({"kernels": "sdpa"}, "kernels"),
        ({"duration_s": "2.5"}, "duration_s"),
        ({"duration_s": True}, "duration_s"),
        ({"is_simulated": "yes"}, "is_simulated"),
        ({"cell": {**CELL.to_dict(), "is_causal": "off"}}, "cell.is_causal"),
        ({"attempt": 0}, "attempt"),
        ({"num_jobs": -4}, "num_jobs"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(change, where):
    with pytest.raises(StoreError, match=f"cells/1.json: {where}: ") as refusal:
        Record.from_dict({**RECORD.to_dict(), **change}, "cells/1.json")
    assert "problem" in str(refusal.value)


@pytest.mark.parametrize("wrong", [None, [1, 2], "x"])
def test_what_has_no_fields_is_refused(wrong):
    with pytest.raises(StoreError, match=r"^cells/1\.json: expected an object with its fields; got "):
        Record.from_dict(wrong, "cells/1.json")


def test_json_has_arrays_for_tuples_and_whole_numbers_for_floats():
    data = {**RECORD.to_dict(), "kernels": ["sdpa"], "duration_s": 2, "clocks_mhz": [1500, 1600.5]}
    assert Record.from_dict(data) == replace(RECORD, kernels=("sdpa",), duration_s=2.0, clocks_mhz=(1500.0, 1600.5))


def test_a_missing_field_is_refused():
    data = RECORD.to_dict()
    del data["status"]
    with pytest.raises(StoreError, match="Record: status: Field required"):
        Record.from_dict(data)


# --- keys ---


@given(cells)
def test_equal_cells_have_equal_keys_after_a_trip_through_json(cell):
    again = Cell.from_dict(json.loads(cell.to_json()))
    assert again == cell
    assert again.key == cell.key
    assert again.curve == cell.curve
    reordered = replace(cell, options=dict(reversed(cell.options.items())))
    assert reordered.key == cell.key


def test_what_keys_share_is_worked_out_once_and_no_copy_inherits_it(monkeypatch):
    read, values = [], Cell.values

    def noting(self):
        read.append(self)
        return values(self)

    monkeypatch.setattr(Cell, "values", noting)
    cell = replace(CELL, seed=77)
    assert cell.key == cell.key
    assert read == [cell]
    assert replace(cell, seed=78).key != cell.key
    assert copy.deepcopy(cell).key == pickle.loads(pickle.dumps(cell)).key == cell.key


@given(cells, st.integers(1, 10**6) | st.none(), st.booleans())
def test_a_cell_at_another_length_is_as_if_made_anew(cell, seq_len, is_asked_first):
    made, anew = copy.deepcopy(cell), replace(cell, seq_len=seq_len)
    if is_asked_first:
        assert (made.key, made.curve) == (cell.key, cell.curve)
    other = made.at(seq_len)
    assert other == anew
    assert (other.key, other.curve, other.id, other.to_json()) == (anew.key, anew.curve, anew.id, anew.to_json())
    assert made == cell, "the one that was asked stays as it was"
    assert made.key == cell.key
    changed = replace(other, seed=made.seed + 1)
    assert changed.key == replace(anew, seed=made.seed + 1).key != other.key, "a copy shares nothing"


def another(hint: Any, value: object) -> Any:
    """Return a value of the field's type that differs from `value`."""
    candidates: list[Any] = ["x", 7, 0.5, not value, {"x": 1}, "mixer", "bwd", "accuracy", "local", ("x",)]
    for candidate in candidates:
        try:
            TypeAdapter(hint).validate_python(candidate, strict=True)
        except ValueError:
            continue
        if candidate != value:
            return candidate
    raise AssertionError(f"no other value for {hint}")


@pytest.mark.parametrize("name", [item.name for item in fields(Cell)])
def test_any_changed_field_changes_the_key(name):
    changed = replace(CELL, **{name: another(get_type_hints(Cell)[name], getattr(CELL, name))})
    assert changed != CELL
    assert changed.key != CELL.key
    assert (changed.curve == CELL.curve) == (name == "seq_len"), "cells of one curve differ in length only"


def test_equal_numbers_of_another_type_give_the_same_key():
    assert replace(CELL, dropout_p=0) == CELL
    assert replace(CELL, dropout_p=0).key == CELL.key


def test_keys_are_the_same_in_every_process():
    code = (
        "from attn_zoo.records import Cell; print(Cell(kind='scaling', variant='full', seq_len=512, batch_size=1,"
        " pass_='fwd', options={'b': [1, 2], 'a': 1}).key)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == CELL.key
    assert len(CELL.key) == 20


def test_ids_are_readable():
    assert replace(CELL, dtype="bfloat16").id == "full/scaling/fwd/L512/bf16/seed0"
    named = replace(CELL, label="mine", scope="mixer", is_causal=True, has_padding=True, dropout_p=0.1, head_dim=32)
    assert named.id == "mine/scaling/fwd/L512/fp32/mixer/causal/padded/dropout0.1/D32/seed0"
    sized = replace(CELL, batch_size=4, num_heads=4, num_kv_heads=2)
    assert sized.id == "full/scaling/fwd/L512/fp32/B4/H4/G2/seed0"
    assert replace(CELL, num_heads=8, num_kv_heads=8).id == "full/scaling/fwd/L512/fp32/seed0"
    accuracy = Cell(kind="accuracy", variant="full", task="listops", level="short", protocol="cpu-small", seed=2)
    assert accuracy.id == "full/accuracy/listops/short/cpu-small/seed2"


@pytest.mark.parametrize("run", ["h100/scaling-gpu", "xeon-avx512-2cores/quick"])
def test_environments_of_before_keep_their_digests_and_a_known_power_limit_counts(run):
    stored = json.loads((RESULTS / run / "run.json").read_text())["environments"]
    for digest, data in stored.items():
        assert data.pop("gpu_power_limit_w", None) is None  # the field came later
        environment = Environment.from_dict(data)
        assert environment.digest == digest
        limited, other = (replace(environment, gpu_power_limit_w=watts) for watts in (500.0, 700.0))
        assert len({digest, limited.digest, other.digest}) == 3
        assert Environment.from_dict(limited.to_dict()) == limited
        assert differences(limited, other) == ["gpu_power_limit_w: then 500.0, now 700.0"]
        assert differences(environment, other) == ["gpu_power_limit_w: then None, now 700.0"]


def test_an_environments_digest_is_of_what_decides_a_time():
    environment = Environment(
        host="h", platform="p", cpu="c", num_cores=2, memory_bytes=2**34, threads=2, variables={"OMP_NUM_THREADS": "2"}
    )
    another_node = replace(environment, host="g", memory_bytes=2**34 - 300_000, commit="abc", is_dirty=True)
    assert another_node.digest == environment.digest
    second_card = replace(environment, variables={"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "1"})
    assert second_card.digest == environment.digest
    for change in (
        {"threads": 1},
        {"cpu": "d"},
        {"gpu": "g"},
        {"memory_bytes": 2**35},
        {"versions": {"torch": "2"}},
        {"variables": {"OMP_NUM_THREADS": "1"}},
    ):
        assert replace(environment, **change).digest != environment.digest, change


def test_statuses_are_those_of_the_type():
    assert set(STATUSES) == set(Status.__args__)  # type: ignore[attr-defined]
    assert "skipped_after_oom" in STATUSES


def test_phases_say_what_the_harness_adds():
    phases = {"start": 1.5, "gate": 0.25, "timing": 3.0, "memory": 1.0, "energy": 7.0, "exchange": 0.25}
    record = replace(RECORD, phases=phases)
    assert record.overhead_s == 2.0
    assert Record.from_dict(json.loads(record.to_json())) == record
    assert replace(RECORD, phases={}).overhead_s is None


def test_records_of_earlier_versions_are_read_and_keep_their_keys():
    old = RECORD.to_dict()
    for name in ("bundle", "phases"):
        del old[name]
    del old["cell"]["together"]
    assert Record.from_dict(old) == RECORD
    alone = Cell(kind="scaling", variant="full", seq_len=512, batch_size=1, pass_="fwd", options={"b": [1], "a": 1})
    alone = replace(alone, protocol_version=1)
    assert alone.key == "2b8e276a34a79e5e25c8"
    assert replace(alone, together="x").key != alone.key
