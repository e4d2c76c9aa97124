"""A results folder, read: whole ones without a word, damaged ones with a warning, foreign ones not at all."""

import json
from pathlib import Path

import pytest

from attn_zoo.errors import FolderError, StoreError
from attn_zoo.folder import pack_cells, read_info, read_record, read_run, scan_cells, unpack_cells
from attn_zoo.records import Cell
from tests.report.synthetic import MACHINE, scaling, write_run

RESULTS = Path(__file__).parents[1] / "results"


@pytest.mark.parametrize("head", sorted(RESULTS.glob("*/*/run.json")), ids=lambda head: "-".join(head.parts[-3:-1]))
def test_every_run_of_this_repository_is_read(head):
    run = read_run(head.parent)
    assert run.warnings == ()
    assert len(run.records) == len(list((head.parent / "cells").glob("*.json"))) > 0
    assert {record.environment for record in run.records} - {""} <= set(run.environments)


def test_a_record_under_another_name_is_read_but_not_taken_up_by_a_run(tmp_path):
    """What decides a key may change between versions: old results are reported all the same."""
    folder = write_run(tmp_path / "run", [scaling("full", 512)])
    (path,) = (folder / "cells").glob("*.json")
    path.rename(path.with_name(f"{'0' * 20}.json"))
    assert len(read_run(folder).records) == 1
    scan = scan_cells(folder)
    assert scan.records == {}
    assert "foreign" in scan.problems[f"{'0' * 20}.json"]


def test_files_that_are_being_written_are_passed_over(tmp_path):
    folder = write_run(tmp_path / "run", [scaling("full", 512)])
    (folder / "cells" / ".half.json-x.tmp").write_text("{")
    assert len(scan_cells(folder).records) == 1
    assert read_run(folder).warnings == ()


def test_what_a_newer_version_wrote_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", [scaling("full", 512)], schema=99)
    with pytest.raises(FolderError, match=r"schema 99.*update attn_zoo"):
        read_info(folder)
    (path,) = (folder / "cells").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(StoreError, match="newer attn_zoo"):
        read_record(path)


def test_extra_keys_and_damaged_parts_of_run_json_are_tolerated(tmp_path):
    run = write_run(tmp_path / "run", [scaling("full", 512)], future={"x": 1}, claims={"full": 3, "y": {"is_exact": 1}})
    head = json.loads((run / "run.json").read_text())
    head["environments"]["broken"] = {"cpu": 1}
    (run / "run.json").write_text(json.dumps(head))
    read = read_run(run)
    assert list(read.environments) == [MACHINE.digest]
    assert len(read.warnings) == 2
    assert not read.claims["y"].is_exact


def test_planned_cells_come_back_as_they_were():
    cells = [
        scaling(variant, n, seed=seed).cell for variant in ("full", "bigbird") for n in (512, 1024) for seed in (0, 1)
    ]
    cells.append(Cell(kind="accuracy", variant="full", task="listops", overrides={"base_lr": 0.1}, protocol_version=3))
    packed = json.loads(json.dumps(pack_cells(cells)))
    assert len(packed) == 3
    assert sorted(cell.key for cell in unpack_cells(packed)) == sorted(cell.key for cell in cells)


def test_what_was_planned_and_left_is_read_and_unknown_in_older_folders(tmp_path):
    done, left = scaling("full", 512), scaling("full", 1024)
    planned = pack_cells([done.cell, left.cell])
    run = read_run(write_run(tmp_path / "new", [done], planned=planned, stopped="time limit"))
    assert (run.planned, run.left, run.stopped) == (2, (left.cell,), "time limit")
    old = read_run(write_run(tmp_path / "old", [done]))
    assert (old.planned, old.left, old.stopped) == (None, (), "")
    damaged = read_run(write_run(tmp_path / "damaged", [done], planned=[{"cell": {"nonsense": 1}, "at": [[1, 2]]}]))
    assert damaged.planned is None
    assert "the planned cells were skipped" in damaged.warnings[0]
