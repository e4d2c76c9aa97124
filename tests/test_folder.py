"""A results folder, read: whole ones without a word, damaged ones with a warning, foreign ones not at all."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from attn_zoo.api import load
from attn_zoo.errors import FolderError, StoreError
from attn_zoo.folder import (
    pack_cells,
    read_ceilings,
    read_info,
    read_record,
    read_run,
    record_text,
    scan_cells,
    unpack_cells,
)
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Cell, Record
from attn_zoo.report.compare import compare
from attn_zoo.report.export import export
from tests.report.synthetic import MACHINE, roof, scaling, write_run

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


@pytest.mark.parametrize("length", ["512 tokens", 0, 1.5, 2**63, [16]])
def test_planned_cells_of_no_possible_length_are_refused(length):
    (packed,) = pack_cells([scaling("full", 512).cell])
    with pytest.raises(StoreError, match="seq_len"):
        unpack_cells([{**packed, "at": [[512, 0], [length, 0]]}])


def test_what_was_planned_and_left_is_read_and_unknown_in_older_folders(tmp_path):
    done, left = scaling("full", 512), scaling("full", 1024)
    planned = pack_cells([done.cell, left.cell])
    run = read_run(write_run(tmp_path / "new", [done], planned=planned, stopped="time limit"))
    assert (run.planned, run.left, run.stopped) == (2, (left.cell,), "time limit")
    old = read_run(write_run(tmp_path / "old", [done]))
    assert (old.planned, old.left, old.stopped) == (None, (), "")
    damaged = read_run(write_run(tmp_path / "damaged", [done], planned=[{"cell": {"nonsense": 1}, "at": [[1, 2]]}]))
    assert damaged.planned is None
    assert "the planned cells cannot be read" in damaged.warnings[0]


def test_folders_that_name_each_host_apart_are_one_environment(tmp_path):
    """As they were written before alike hosts counted as one."""
    folder = write_run(tmp_path / "run", [])
    names = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    head = json.loads((folder / "run.json").read_text())
    head["environments"] = {name: replace(MACHINE, host=name).to_dict() for name in names}
    (folder / "run.json").write_text(json.dumps(head))
    for name, length in zip(names, (512, 1024), strict=True):
        one = replace(scaling("full", length), environment=name)
        (folder / "cells" / f"{one.cell.key}.json").write_text(one.to_json())
    one_roof = {"ceilings": [roof(environment=names[1]).to_dict()]}
    (folder / "ceilings.json").write_text(json.dumps(one_roof))
    run = read_run(folder)
    assert list(run.environments) == [MACHINE.digest]
    assert {record.environment for record in run.records} == {MACHINE.digest}
    assert [one.environment for one in run.ceilings] == [MACHINE.digest]
    with Store(folder).writing({"name": "test"}, replace(MACHINE, host="cccccccccccc")) as scan:
        assert len(scan.records) == 2
    assert len(read_run(folder).environments) == 1
    assert read_info(folder).names_of(MACHINE.digest) == {*names, MACHINE.digest}


GOOD = scaling("full", 512)


def spoiled(**changes):
    """Return a record as JSON with values by dotted path, without a checksum, as older versions wrote them."""
    data = json.loads(GOOD.to_json())
    for path, value in changes.items():
        place = data
        *way, last = path.split(".")
        for name in way:
            place = place[name]
        place[last] = value
    return json.dumps(data)


HOSTILE = {
    "a large integer": spoiled(num_params=2**63),
    "a huge integer": spoiled(**{"cell.options": {"x": 10**400}}),
    "an option of 64 bits": spoiled(**{"cell.options": {"x": -(2**64)}}),
    "half a character": spoiled(reason="\udcff"),
    "half a character in a name": spoiled(**{"cell.label": "x\ud800"}),
    "sizes unlike samples": spoiled(**{"timing.process_sizes": [3, 4]}),
    "a time below zero": spoiled(**{"timing.samples_ms": [-1.0, 1.0]}),
    "a time of zero in one of two processes": spoiled(
        **{"timing.samples_ms": [0.0, 1.0], "timing.process_sizes": [1, 1]}
    ),
    "negative FLOPs": spoiled(flops=-5),
    "no tokens": spoiled(**{"cell.seq_len": 0}),
    "not a number": spoiled(duration_s=float("nan")),
    "nested deeply": "[" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_set_aside_by_every_reader(name, tmp_path):
    assert HOSTILE[name] != spoiled()
    folder = write_run(tmp_path / "run", [scaling("full", length) for length in (1024, 2048)])
    (folder / "cells" / f"{GOOD.cell.key}.json").write_text(HOSTILE[name])
    run = load(folder)
    assert len(run.frame) == 2
    (warning,) = run.analysis.results.warnings
    assert f"{GOOD.cell.key}.json was skipped" in warning
    export([folder], "csv", tmp_path / "out.csv")
    assert len(compare(folder, folder).times) == 2
    with Store(folder).writing({"name": "test"}, MACHINE) as scan:
        assert len(scan.records) == 2
        assert len(scan.problems) == 1
    assert len(list((folder / "quarantine").glob("*.reason"))) == 1
    assert load(folder).analysis.results.warnings == ()


def test_ceilings_of_nothing_are_set_aside(tmp_path):
    folder = write_run(tmp_path / "run", [GOOD])
    (folder / "ceilings.json").write_text(json.dumps({"ceilings": [roof(copy_bytes_per_s=0.0).to_dict()]}))
    with pytest.raises(StoreError, match="copy_bytes_per_s"):
        read_ceilings(folder)
    assert "ceilings.json was skipped" in load(folder).analysis.results.warnings[0]


def test_a_flipped_bit_is_noticed_and_records_without_a_checksum_are_read(tmp_path):
    path = tmp_path / f"{GOOD.cell.key}.json"
    path.write_text(GOOD.to_json())
    assert read_record(path) == GOOD
    whole = record_text(GOOD).encode()
    path.write_bytes(whole)
    assert read_record(path) == GOOD
    rng, unnoticed = random.Random(0), 0
    for _ in range(400):
        place, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        try:
            assert read_record(path) == GOOD, "a value changed in silence"
            unnoticed += 1
        except StoreError:
            pass
    assert unnoticed < 100, "white space only"


def test_text_that_no_file_can_hold_is_not_stored():
    with pytest.raises(StoreError, match="cannot be stored"):
        record_text(Record(cell=GOOD.cell, status="error", reason="\udcff"))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(kind, tmp_path):
    folder = write_run(tmp_path / "run", [GOOD])
    path = folder / "cells" / f"{'0' * 20}.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert len(read_run(folder).records) == 1
    with Store(folder).writing({"name": "test"}, MACHINE) as scan:
        assert "expected a regular file" in scan.problems[path.name]
    assert not path.is_symlink()
    assert not path.exists()
