"""Reading results folders: the flat table, and what is wrong with a folder or a record said in words."""

import shutil
from dataclasses import replace

import pytest

from attn_zoo.api import load
from attn_zoo.errors import ConfigError
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.analysis.observations import read_results
from attn_zoo.report.pages.findings import headline
from attn_zoo.statistics.medians import time_summary
from tests.report.synthetic import MACHINE, accuracy, analysed, scaling, write_run

ASKED_FOR = {
    *(
        "variant",
        "kind",
        "seq_len",
        "batch_size",
        "num_heads",
        "head_dim",
        "dtype",
        "device",
        "pass",
        "status",
        "reason",
    ),
    *("median_ms", "q1_ms", "q3_ms", "peak_bytes", "saved_bytes", "flops", "kernel", "task", "metric", "value", "seed"),
    "protocol",
}


def test_has_the_promised_columns_and_one_row_per_record(run_dir):
    frame = load([run_dir]).frame
    assert set(frame.columns) >= ASKED_FOR
    assert len(frame) == len(list((run_dir / "cells").glob("*.json")))


def test_numbers_are_those_of_the_record(tmp_path):
    record = scaling("full", 512)
    row = load([write_run(tmp_path / "run", [record])]).frame.iloc[0]
    assert record.timing is not None
    assert record.memory is not None
    assert row["median_ms"] == record.timing.median_ms
    assert row["peak_bytes"] == record.memory.peak_bytes
    assert row["samples_ms"] == list(record.timing.samples_ms)
    assert (row["pass"], row["kernel"], row["seq_len"]) == ("fwd", "math", 512)


def test_what_was_not_measured_is_missing_not_zero(tmp_path):
    run = write_run(tmp_path / "run", [scaling("full", 512, status="timeout", reason="60 s"), accuracy("full", 0, 0.4)])
    frame = load([run]).frame.set_index("kind")
    assert frame.loc["scaling", ["median_ms", "peak_bytes", "value"]].isna().all()
    assert frame.loc["accuracy", ["median_ms", "seq_len"]].isna().all()


def test_a_refused_cell_belongs_to_the_machine_of_its_run(tmp_path):
    run = write_run(tmp_path / "run", [scaling("full", 512), scaling("x", 512, status="unsupported", reason="no")])
    assert set(load([run]).frame["environment"]) == {MACHINE.digest}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.mkdir(), "no run.json"),
        (lambda path: path.write_text("x"), "got a file"),
        (lambda path: write_run(path / "inner", []), "it contains inner"),
    ],
)
def test_a_directory_that_is_no_results_folder(tmp_path, make, words):
    path = tmp_path / "given"
    make(path)
    with pytest.raises(ConfigError, match=words) as caught:
        read_results([path])
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)


def test_no_directory_at_all():
    with pytest.raises(ConfigError, match="at least one results folder"):
        read_results([])


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"a": NaN'])
def test_a_damaged_run_json_is_one_message(tmp_path, text):
    run = write_run(tmp_path / "run", [])
    (run / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_results([run])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not readable as JSON"),
        ('{"cell": 1', "not readable as JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "Field required"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"schema": 99}', "update attn_zoo"),
    ],
)
def test_a_damaged_record_is_skipped_with_a_warning(tmp_path, text, words):
    run = write_run(tmp_path / "run", [scaling("full", 512)])
    (run / "cells" / "bad.json").write_text(text)
    results = read_results([run])
    assert len(results.observations) == 1
    assert len(results.warnings) == 1
    assert words in results.warnings[0]
    assert "cells/bad.json" in results.warnings[0]


def test_bytes_that_are_no_text(tmp_path):
    run = write_run(tmp_path / "run", [scaling("full", 512)])
    (run / "cells" / "bad.json").write_bytes(b"\xff\xfe\x00")
    assert len(read_results([run]).warnings) == 1


def test_one_label_for_two_option_sets_becomes_two_labels(tmp_path):
    records = [scaling("v", 512, options={"k": 1}), scaling("v", 512, options={"k": 2}), scaling("v", 1024)]
    assert set(load([write_run(tmp_path / "run", records)]).frame["label"]) == {"v (k=1)", "v (k=2)", "v (defaults)"}


def test_two_versions_of_a_source_are_told_apart(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, variant_digest="aaaaaaaa")])
    b = write_run(tmp_path / "b", [scaling("v", 512, variant_digest="bbbbbbbb")])
    assert set(load([a, b]).frame["label"]) == {"v (source aaaaaa)", "v (source bbbbbb)"}


def test_a_digest_of_another_kind_of_cell_is_no_other_version(tmp_path):
    """Of a training it covers the loop and the tasks too."""
    records = [scaling("v", 512, variant_digest="aaaaaaaa"), accuracy("v", 0, 0.5, variant_digest="bbbbbbbb")]
    run = write_run(tmp_path / "run", records)
    assert {observation.label for observation in read_results([run]).observations} == {"v"}


def test_the_same_folder_twice_counts_once(run_dir):
    assert len(load([run_dir, run_dir / "."]).frame) == len(load([run_dir]).frame)


def test_the_same_cells_in_two_folders_are_pooled_with_a_warning(tmp_path):
    runs = [write_run(tmp_path / name, [scaling("full", 512, ms)]) for name, ms in (("a", 1.0), ("b", 1.1))]
    assert read_results(runs).warnings == ("in more than one folder: 1 cell; their samples are pooled",)


def test_a_copy_of_a_record_is_no_further_process(tmp_path):
    """Of a folder and its backup, or of files that a program which keeps folders in step wrote a second time."""
    records = [scaling("full", 512), accuracy("full", 0, 0.4)]
    run = write_run(tmp_path / "run", records)
    backup = shutil.copytree(run, tmp_path / "backup")
    found = read_results([run, backup])
    assert [one.record for one in found.observations] == [one.record for one in read_results(run).observations]
    assert found.warnings == ("the same record in more than one folder: 2 cells; it counts once",)
    for path in list((backup / "cells").glob("*.json")):
        shutil.copy(path, path.with_name(f"{path.stem} (1).json"))
    found = read_results(backup)
    assert len(found.observations) == 2
    assert len(found.warnings) == 2
    assert all(" (1).json was skipped: a second record of the cell of " in warning for warning in found.warnings)


def test_times_of_two_machines_are_not_pooled_and_of_a_training_the_last_counts(tmp_path):
    other = replace(MACHINE, host="999999999999", cpu="Other CPU")
    here = [scaling("full", 512, 1.0), accuracy("full", 0, 0.4)]
    there = [replace(record, environment=other.digest) for record in (scaling("full", 512, 3.0), here[1])]
    runs = [write_run(tmp_path / "a", here), write_run(tmp_path / "b", there, environment=other)]
    found = analyse(runs)
    assert found.results.warnings == ("in more than one folder: 1 cell; of these the last counts",)
    assert {round(panel.points[0].median_ms) for panel in found.panels} == {1, 3}
    assert {panel.title for panel in found.panels} == {"forward, Example CPU @ 2.0 GHz", "forward, Other CPU"}
    assert headline(found).startswith("Forward, Example CPU @ 2.0 GHz: full alone was measured")
    same = replace(MACHINE, memory_bytes=2**34)
    again = [write_run(tmp_path / "c", [replace(scaling("full", 512), environment=same.digest)], environment=same)]
    titles = [panel.title for panel in analyse([*runs[:1], *again]).panels]
    assert len(set(titles)) == 2
    assert all(title.startswith("forward, Example CPU @ 2.0 GHz [") for title in titles)


def test_times_by_two_protocols_are_told_apart(tmp_path):
    records = [scaling("full", 512, protocol_version=version) for version in (3, 4)]
    panels = analysed(tmp_path, records).panels
    assert [panel.title for panel in panels] == ["forward, protocol version 3", "forward, protocol version 4"]
    assert len({panel.name for panel in panels}) == 2


def test_a_summary_is_made_anew_only_where_it_is_not_the_one_of_today(tmp_path, monkeypatch):
    """Older versions noted the median of all samples, which leans to the process that took most."""
    samples, sizes = (857.0, 859.0, 815.0, 817.0, 503.0, 504.0, 505.0, 547.0, 548.0), (2, 2, 5)
    today = time_summary(samples, sizes)
    records = []
    for length, summary in ((512, today), (1024, today), (2048, today | {"median_ms": 548.0, "low_ms": 503.0})):
        record = scaling("full", length)
        assert record.timing is not None
        timing = replace(record.timing, samples_ms=samples, process_sizes=sizes, **summary)
        records.append(replace(record, timing=timing))
    made = []

    def noting(*args):
        made.append(args)
        return time_summary(*args)

    monkeypatch.setattr("attn_zoo.report.analysis.observations.time_summary", noting)
    found = read_results([write_run(tmp_path / "run", records)])
    assert made == [(samples, sizes)]
    for one in found.observations:
        assert one.record.timing is not None
        assert one.record.timing.median_ms == today["median_ms"]
        assert one.record.timing.low_ms == today["low_ms"]
