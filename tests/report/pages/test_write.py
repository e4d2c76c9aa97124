"""The whole report on disk and on the terminal."""

import csv
import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from attn_zoo.api import load
from attn_zoo.displays import Run
from attn_zoo.errors import ConfigError, FolderError, StoreError
from attn_zoo.folder import pack_cells
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.export import export
from attn_zoo.report.pages.findings import findings, headline
from attn_zoo.report.pages.write import print_report
from attn_zoo.units import clean, human_bytes, human_ms, human_number, slug
from tests.report.synthetic import accuracy, scaling, write_run


def test_writes_page_tables_and_figures(written):
    out, paths = written
    assert paths[0] == out / "report.html"
    assert all(path.is_file() and path.stat().st_size for path in paths)
    names = {str(path.relative_to(out)) for path in paths}
    for name in ("scaling", "exponents", "crossovers", "status", "accuracy-listops-short-cpu-small"):
        assert {f"tables/{name}.csv", f"tables/{name}.md"} <= names
    figures = {name for name in names if name.startswith("figures/")}
    assert {name.removesuffix(".svg") for name in figures if name.endswith(".svg")} == {
        name.removesuffix(".png") for name in figures if name.endswith(".png")
    }
    assert len(figures) >= 10
    assert files_in(out) == sorted(paths)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_run_of_failures_and_an_empty_run_give_a_page(tmp_path):
    failures = [scaling("full", 512, status="crashed", reason="signal 11")]
    for name, records, words in (("failures", failures, "signal 11"), ("empty", [], "No cell has been run yet")):
        page = load(write_run(tmp_path / name, records)).report(tmp_path / f"{name}-out")
        assert words in page.read_text(encoding="utf-8")
        assert not list(page.parent.rglob("*.svg"))


def test_a_run_of_damaged_records_is_not_called_empty(tmp_path):
    records = [scaling("full", n) for n in (512, 1024)]
    for num_records, words in ((1, "1 record could not be read"), (2, "2 records could not be read")):
        folder = write_run(tmp_path / str(num_records), records[:num_records])
        for path in (folder / "cells").iterdir():
            path.write_text("{damaged")
        assert headline(analyse([folder])).startswith(words)


def test_a_report_takes_away_what_only_an_earlier_one_had_and_nothing_else(tmp_path):
    lengths = (512, 1024)
    some = write_run(tmp_path / "some", [scaling("full", n) for n in lengths])
    more = write_run(tmp_path / "more", [scaling("full", n, pass_=p) for n in lengths for p in ("fwd", "bwd")])
    out = tmp_path / "out"
    page = load(more).report(out)
    earlier = set(files_in(out))
    own, changed = out / "figures" / "mine-bwd.svg", out / "tables" / "time-bwd.md"
    own.write_text("drawn by hand")
    changed.write_text("with a note of mine")
    outside = tmp_path / "kept.svg"
    outside.write_text("kept")
    (out / "figures" / "linked.svg").symlink_to(outside)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<!-- files: {", '<!-- files: {"../kept.svg": "", "figures/linked.svg": "", '))
    load(some).report(out)
    gone = {path.name for path in earlier if not path.exists()}
    assert {"time-bwd.svg", "time-bwd.png", "memory-bwd.md"} <= gone
    load(some).report(tmp_path / "alone")
    alone = {out / path.relative_to(tmp_path / "alone") for path in files_in(tmp_path / "alone")}
    there = files_in(out)
    assert set(there) - alone == {own, changed, out / "figures" / "linked.svg"}
    assert outside.read_text() == "kept"
    load(some).report(out)
    assert files_in(out) == there, "nothing to take away"


def test_no_results_folder_writes_nothing(tmp_path):
    with pytest.raises(ConfigError):
        load([tmp_path]).report(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_message(tmp_path):
    run = write_run(tmp_path / "run", [])
    (tmp_path / "out").write_text("a file")
    with pytest.raises(FolderError, match="expected a folder for the report; there is a file of this name"):
        load([run]).report(tmp_path / "out")
    with pytest.raises(StoreError, match="cannot be written"):
        load([run]).report(tmp_path / "out" / "below")


def test_readme_shows_machine_findings_figures_and_tables(tmp_path):
    run = write_run(
        tmp_path / "run",
        [scaling("full", n) for n in (512, 1024)] + [replace(scaling("<b>", 512), packages={"strange": "1.0"})],
    )
    Run([run]).report(has_readme=True)
    text = (run / "README.md").read_text(encoding="utf-8")
    for words in (
        "# quick",
        "3 cells",
        "Example CPU",
        "torch 2.13.0",
        "| variant | 512 | 1k |",
        "the fastest is",
        "import strange 1.0",
    ):
        assert words in text
    assert "<b>" not in text
    figures = re.findall(r"\]\((figures/[^)]+\.svg)\)", text)
    assert len(figures) == 1
    assert all((run / figure).is_file() for figure in figures)
    assert str(tmp_path) not in text
    Run([run]).report(has_readme=True)  # a second time reads the same run, its own output aside
    assert (run / "README.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize("width", [80, 140])
def test_terminal_report_fits_and_says_the_main_things(analysis, width):
    out = io.StringIO()
    print_report(analysis, Console(file=out, width=width, color_system=None))
    text = out.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    for words in ("Time, forward", "Growth with", "Cheaper than", "Accuracy", "no causal form", "OOM"):
        assert words in text


def test_findings_name_the_fastest_and_count_what_is_missing(analysis):
    assert "the fastest is linformer at 512 to 4k tokens" in headline(analysis)
    said = findings(analysis)
    assert len(said) <= 7
    assert any(text.startswith("Cheaper than full: linformer from 512 or less; bigbird from 1,2") for text in said)
    assert re.search(r"5 of \d+ cells gave no measurement", said[-1])


def test_no_machine_path_gets_into_a_report(written, run_dir):
    for path in written[1]:
        if path.suffix in {".html", ".md", ".csv", ".svg"}:
            assert str(run_dir) not in path.read_text(encoding="utf-8")


def test_report_runs_without_torch_and_pyplot(tmp_path):
    run = write_run(tmp_path / "run", [scaling("full", 512)])
    code = (
        "import sys; sys.modules['torch'] = sys.modules['matplotlib.pyplot'] = None\n"
        f"from attn_zoo.api import load; load({str(run)!r}).report({str(tmp_path / 'out')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0004, "400 ns"),
        (0.9999, "1 ms"),
        (999.9, "1 s"),
        (1000, "1 s"),
        (59_990, "1 min"),
        (7.2e6, "2 h"),
        (0, "0 ns"),
    ],
)
def test_durations(value, text):
    assert human_ms(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (2**20 - 1, "1 MiB")])
def test_bytes(value, text):
    assert human_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(-0.5, "\u22120.5"), (100, "100"), (1e-9, "1.00e-09"), (float("inf"), "inf")]
)
def test_numbers(value, text):
    assert human_number(value) == text


def test_names_become_harmless():
    assert clean("a\x1b[31m\u202eb\n c") == "a[31mb c"
    assert slug("../../etc", "Pass wd") == "etc-pass-wd"
    assert slug("注意") == "unnamed"


def test_a_large_run_shows_the_panels_that_say_most_and_its_files_have_all(tmp_path, monkeypatch):
    monkeypatch.setattr("attn_zoo.report.analysis.analyse.MOST_PANELS", 2)
    monkeypatch.setattr("attn_zoo.report.analysis.analyse.FEW_PANELS", 1)
    monkeypatch.setattr("attn_zoo.report.tables.all_tables.MOST_ROWS", 3)
    monkeypatch.setattr("attn_zoo.report.pages.write.MOST_ROWS", 3)
    large = [scaling(name, length, pass_="bwd") for name in ("full", "linformer") for length in (512, 1024, 2048)]
    small = [scaling("full", length, pass_=pass_) for pass_ in ("infer", "fwd") for length in (512, 1024)]
    page_file = load(write_run(tmp_path / "run", [*large, *small])).report(tmp_path / "out")
    names = {path.name for path in files_in(tmp_path / "out")}
    assert {name for name in names if name.startswith("time-")} == {
        "time-bwd.svg",
        "time-bwd.png",
        "time-bwd.md",
        "time-fwd.md",
        "time-infer.md",
    }
    page = page_file.read_text(encoding="utf-8")
    assert 'id="table-time-bwd"' in page
    assert 'id="table-time-fwd"' not in page
    assert "1 of 3 panels are shown" in page
    assert "The first 3 of 10 rows; tables/scaling.csv has all." in page
    rows = (tmp_path / "out" / "tables" / "scaling.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + len(large) + len(small)


def test_of_very_many_records_a_report_reads_those_of_the_panels_it_shows(tmp_path, monkeypatch):
    monkeypatch.setattr("attn_zoo.report.analysis.analyse.FEW_PANELS", 1)
    monkeypatch.setattr("attn_zoo.folder.MOST_READ", 9)
    monkeypatch.setattr("attn_zoo.report.pages.write.MOST_LINES", 1)
    large = [scaling(name, length, pass_="bwd") for name in ("full", "linformer") for length in (512, 1024, 2048)]
    small = [scaling("full", length) for length in (512, 1024, 2048)] + [scaling("full", 4096, status="timeout")]
    score, lost = accuracy("full", 0, 0.4), scaling("linformer", 512)
    planned = [record.cell for record in (*large, *small, score, lost)]
    run = write_run(tmp_path / "run", [*large, *small, score], planned=pack_cells(planned))
    page = load([run]).report(tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    assert "7 of 11 records were read, those of the 1 panels with most curves; attn-zoo status says what failed" in text
    assert "11 of 12 cells; left" in text
    assert "Every planned cell" not in text
    assert "Every record that was read is a measurement; attn-zoo status says what failed elsewhere." in text

    def panels(table: str) -> set[str]:
        return {row["panel"] for row in csv.DictReader(io.StringIO(table))}

    name = "exponents.csv"
    assert len(panels((tmp_path / "out" / "tables" / name).read_text(encoding="utf-8"))) == 1
    assert (tmp_path / "out" / "tables" / "accuracy-listops-short-cpu-small.csv").is_file(), "trainings are few"
    assert len(panels(export([run], "csv", tmp_path / name, "exponents").read_text(encoding="utf-8"))) == 2
    assert len(set(Run([run]).exponents()["panel"])) == 2
    said = io.StringIO()
    print_report(Run([run]).brief, Console(file=said, width=120))
    assert "The first 1 of 4 rows; tables/exponents.csv has all." in said.getvalue()
