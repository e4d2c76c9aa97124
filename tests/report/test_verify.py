"""Every check finds what it is for, says where, and accuses nothing that is sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.folder import pack_cells
from attn_zoo.packed_run import share
from attn_zoo.records import SCHEMA_VERSION, Record
from attn_zoo.report.verify import CHECKS, Fault, verify
from tests.report.synthetic import accuracy, approximation, costed, roof, scaling, tuned, write_run

GATED = ("causality", "finite")
RESULTS = sorted(Path(__file__).parents[2].glob("results/*/*/run.json"))


def sound():
    timed = [replace(costed(scaling(name, 512), 2 * 10**7, 10**6), gate=GATED) for name in ("full", "linformer")]
    return [*timed, *answered([accuracy(name, seed, 0.3) for name in ("full", "linformer") for seed in (0, 1)])]


def answered(records):
    """Return the runs with as many right answers as their score says, of ten."""
    numbers = [(one, one.score, round(10 * one.score.value)) for one in records]
    return [replace(one, score=replace(own, correct="1" * right + "0" * (10 - right))) for one, own, right in numbers]


def changed(index: int, **changes):
    """Return a function that changes one of the sound records."""
    return lambda records: [replace(one, **changes) if at == index else one for at, one in enumerate(records)]


def with_timing(**changes):
    return lambda records: [replace(records[0], timing=replace(records[0].timing, **changes)), *records[1:]]


def with_score(**changes):
    return lambda records: [*records[:-1], replace(records[-1], score=replace(records[-1].score, **changes))]


def without_last(records):
    return records[:-1]


def bigger(records):
    return [replace(one, score=replace(one.score, num_params=90_000)) if is_lin(one) else one for one in records]


def is_lin(one):
    return one.cell.variant == "linformer" and one.score is not None


def unequal(records):
    return [*records, *answered([*tuned("full", {0.1: [0.3], 0.2: [0.4]}), *tuned("linformer", {0.1: [0.3]})])]


def repeated(records):
    return [*records, *answered([accuracy("full", 0, 0.3, overrides={"pretrain": ""})])]


PLANTED: list[tuple[str, Callable[[list[Record]], list[Record]], str, str]] = [
    ("digests", changed(0, environment="0123456789ab"), "full/scaling", "is not described in run.json"),
    ("numbers", with_timing(median_ms=2.0, low_ms=2.0), "full/scaling", "is not that of its samples"),
    ("numbers", with_timing(median_ms=2.0, low_ms=2.0, process_sizes=(4, 5, 6)), "full/scaling", "is not that of"),
    ("numbers", with_timing(low_ms=1e6), "full/scaling", "leaves out its median"),
    ("numbers", with_timing(samples_ms=()), "full/scaling", "expected positive samples"),
    ("numbers", with_score(value=1.2), "linformer/accuracy", "no share of what was right"),
    ("numbers", with_score(value=0.4), "linformer/accuracy", "its score, 0.4, is not that of its answers, 0.3"),
    ("limits", changed(0, flops=10**14), "full/scaling", "is above what a matrix product reached"),
    ("gate", changed(1, gate=()), "linformer/scaling", "without a correctness gate"),
    ("floors", with_score(floors={}), "linformer/accuracy", "has no floor"),
    ("budgets", bigger, "linformer on listops (short)", "38.46 % more parameters than full"),
    ("trials", without_last, "linformer on listops (short)", "1 seed; others have 2"),
    ("trials", unequal, "listops (short, tuned: base_lr)", "tuned with unequal numbers of trials"),
    ("trials", repeated, "listops (short)", "more than one cell of one seed"),
]


@pytest.mark.parametrize(("check", "spoil", "where", "text"), PLANTED)
def test_what_is_planted_is_found_by_the_check_that_promises_it(tmp_path, check, spoil, where, text):
    faults = verify(write_run(tmp_path / "run", spoil(sound()), ceilings=[roof()]))
    assert {fault.check for fault in faults} == {check}
    assert faults[0].where.startswith(where)
    assert text in faults[0].text


def test_errors_are_gated_and_of_the_same_inputs(tmp_path):
    def of(name: str, mean_error: float, gate: tuple[str, ...] = GATED) -> Record:
        record = approximation(name, 512, 0.5)
        assert record.approximation is not None
        return replace(record, gate=gate, approximation=replace(record.approximation, mean_error=mean_error))

    sound = [of("full", 0.9), of("bigbird", 0.9 * (1 + 1e-12)), replace(of("moba", 0.8), environment="0123456789ab")]
    assert {fault.check for fault in verify(write_run(tmp_path / "sound", sound))} == {"digests"}, "another machine"
    (fault,) = verify(write_run(tmp_path / "inputs", [of("full", 0.9), of("bigbird", 0.7)]))
    assert (fault.check, fault.text.partition(":")[0]) == ("numbers", "had other inputs")
    (fault,) = verify(write_run(tmp_path / "gate", [of("full", 0.9), of("bigbird", 0.9, ())]))
    assert (fault.check, fault.where.partition("/")[0]) == ("gate", "bigbird")


def test_sound_results_are_not_accused(tmp_path):
    folder = write_run(tmp_path / "run", sound(), ceilings=[roof()])
    assert verify(folder) == []
    assert verify(share(folder, tmp_path / "run.zip")) == []


def test_the_sheet_counts_where_there_is_one_and_the_device_time(tmp_path):
    record = replace(costed(scaling("full", 512, 10.0, device="cuda", dtype="bfloat16"), 10**12, 10**6), gate=GATED)
    folder = write_run(
        tmp_path / "a", [record], ceilings=[roof(device="cuda", dtype="bfloat16", peak_flops_per_s=1.1e14)]
    )
    assert verify(folder) == [], "above what a product reached, below the sheet"
    assert record.timing is not None
    faster = replace(record, timing=replace(record.timing, graph_ms=5.0))
    folder = write_run(
        tmp_path / "b", [faster], ceilings=[roof(device="cuda", dtype="bfloat16", peak_flops_per_s=1.1e14)]
    )
    (fault,) = verify(folder)
    assert fault.check == "limits"
    assert fault.text == "200 TFLOP/s is above the data sheet (110 TFLOP/s)"


def test_files_that_are_no_records_or_of_another_cell(tmp_path):
    folder = write_run(tmp_path / "run", sound())
    cells = folder / "cells"
    (cells / "half.json").write_text('{"cell":')
    (cells / f"{sound()[0].cell.key}.json").rename(cells / f"{'0' * 20}.json")
    (folder / "ceilings.json").write_text("[]")
    (folder / "parts").mkdir()
    (folder / "parts" / f"{'1' * 20}-0.json").write_text("{")
    newer = cells / f"{sound()[1].cell.key}.json"
    newer.write_text(newer.read_text().replace('"schema": 1', '"schema": 99'))
    faults = verify(folder)
    assert [(fault.check, fault.where) for fault in faults] == [
        ("schema", "ceilings.json"),
        ("schema", f"cells/{newer.name}"),
        ("schema", "cells/half.json"),
        ("schema", f"parts/{'1' * 20}-0.json"),
        ("digests", f"cells/{'0' * 20}.json"),
    ]


def test_the_plan_is_what_records_are_held_against(tmp_path):
    records = sound()
    planned = pack_cells([records[0].cell, scaling("bigbird", 512).cell])
    faults = verify(write_run(tmp_path / "run", records[:2], planned=planned, stopped="time limit"))
    assert faults == [
        Fault(
            check="digests",
            where=records[1].cell.id,
            text="no cell of the plan: its source or data changed, or it belongs to another run",
        ),
        Fault(
            check="complete",
            where="bigbird/scaling/fwd/L512/fp32/seed0",
            text="planned, and has no record (time limit)",
        ),
    ]


def test_a_shard_that_has_not_run_is_missing(tmp_path):
    records = sound()
    planned = pack_cells(record.cell for record in records)
    folder = write_run(tmp_path / "run", records, planned=planned, shards=[["quick", 1, 3], ["quick", 2, 3]])
    (fault,) = verify(folder)
    assert (fault.check, fault.text) == ("complete", "shard 3 of 3 has not run here")


def test_results_of_a_newer_version_are_an_error(tmp_path):
    folder = write_run(tmp_path / "run", sound(), schema=SCHEMA_VERSION + 1)
    with pytest.raises(ConfigError, match="written by a newer attn_zoo"):
        verify(folder)
    with pytest.raises(ConfigError, match="not a results folder"):
        verify(tmp_path / "nowhere")
    (tmp_path / "run.csv").write_text("run,kind\n")
    with pytest.raises(ConfigError, match="an export has neither a plan nor machines"):
        verify(tmp_path / "run.csv")


@pytest.mark.parametrize("head", RESULTS, ids=lambda path: path.parent.name)
def test_what_is_published_holds_but_for_sizes_that_are_said(head):
    """Some mechanisms have weights of their own: the report says so beside their scores."""
    assert {fault.check for fault in verify(head.parent)} <= {"budgets"}


def test_every_check_is_planted():
    found = {check for check, *_ in PLANTED}
    assert set(CHECKS) - found == {"schema", "complete"}, "which have tests of their own"
