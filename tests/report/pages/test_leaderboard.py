"""The front page of results: numbers of the records beside a link to each, nothing unsaid, safe against names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from attn_zoo.folder import pack_cells
from attn_zoo.report.pages.leaderboard import Entry, leaderboard_page, leaderboard_readme, read_machines
from attn_zoo.units import human_ms
from tests.report.pages.browser import ask
from tests.report.pages.test_html import EVIL, elements, needs_chromium
from tests.report.synthetic import accuracy, scaling, write_run, zoo

LENGTHS = [512, 1024, 2048, 4096]


def row(board, label: str) -> dict[str, Entry]:
    (entries,) = [entries for entries in board.rows if entries[0].text == label]
    return dict(zip(board.headings, entries, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root: Path = tmp_path_factory.mktemp("results")
    records = [*zoo(lengths=LENGTHS), scaling("moba", 512), scaling("moba", 1024, status="oom_host", reason="no room")]
    write_run(root / "box" / "first", records)
    (root / "box" / "first" / "README.md").touch()
    scores = [accuracy(variant, seed, mean + 0.01 * seed) for seed in range(3) for variant, mean in SCORES.items()]
    write_run(root / "box" / "second", scores)
    return root


SCORES = {"full": 0.60, "linformer": 0.20}


@pytest.fixture(scope="module")
def machines(folder):
    return read_machines(folder)


def test_a_time_is_that_of_the_record_it_leads_to(machines, folder):
    (machine,) = machines
    board = machine.runs[0].boards[0]
    timed = [record for record in zoo(lengths=LENGTHS) if record.timing is not None]
    assert len(timed) > 8
    for record in timed:
        heading = {512: "512", 1024: "1k", 2048: "2k", 4096: "4k"}[record.cell.seq_len or 0]
        entry = row(board, record.cell.variant)[heading]
        timing = record.timing
        assert timing is not None  # for the checker of types
        assert entry.text.startswith(human_ms.interval(timing.median_ms, timing.low_ms, timing.high_ms))
        assert entry.href == f"box/first/cells/{record.cell.key}.json"
        assert (folder / entry.href).is_file()


def test_a_time_of_several_records_leads_to_none_of_them(tmp_path):
    write_run(tmp_path / "box" / "seeds", [scaling("full", 512, seed=seed) for seed in (0, 1)])
    (machine,) = read_machines(tmp_path)
    assert row(machine.runs[0].boards[0], "full")["512"].href == "box/seeds/report.html"


def test_the_fastest_is_bold_and_what_failed_is_named(machines):
    board = machines[0].runs[0].boards[0]
    assert [label for label in ("full", "linformer", "bigbird") if row(board, label)["4k"].is_best] == ["linformer"]
    assert row(board, "moba")["1k"].text == "OOM"
    assert row(board, "moba")["4k"].text == "no record"
    assert row(board, "full")["cheaper than full"].text == "exact"
    assert row(board, "linformer")["cheaper than full"].text.startswith("from ")
    assert row(board, "full")["peak memory"].text.endswith(" at 2k")  # it ran out of memory beyond


def test_a_score_says_how_far_it_is_above_the_floor(machines):
    board = machines[0].runs[1].boards[0]
    (heading,) = board.headings[1:]
    full, linformer = row(board, "full")[heading], row(board, "linformer")[heading]
    assert re.fullmatch(r"61\.0 % \[[\d.]+, [\d.]+\], \+[\d.]+", full.text)
    assert linformer.text.endswith(", not beaten")
    assert full.is_best
    assert not linformer.is_best
    assert board.variants == ("full", "linformer")
    assert " listops (short): accuracy; best floor" in board.note


@pytest.mark.parametrize(("wide", "bold"), [((0.80, 0.90, 0.97), True), ((0.79, 0.86, 0.93), False)])
def test_an_interval_that_reaches_the_best_does_not_hide_a_settled_difference(tmp_path, wide, bold):
    """Where seeds move both alike they are worse by the same amount in all of them."""
    best = (0.84, 0.91, 0.98)
    assert wide[1] < best[1]
    scores = {"full": best, "linformer": wide}
    records = [
        accuracy(name, seed, value, score={"correct": ""})
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    write_run(tmp_path / "box" / "run", records)
    (machine,) = read_machines(tmp_path)
    board = machine.runs[0].boards[0]
    (heading,) = board.headings[1:]
    assert row(board, "full")[heading].is_best
    assert row(board, "linformer")[heading].is_best is bold


def test_an_unfinished_run_is_said_to_be(tmp_path):
    records = zoo(lengths=LENGTHS)
    left = scaling("full", 8192).cell
    write_run(tmp_path / "box" / "run", records, planned=pack_cells([*(one.cell for one in records), left]))
    machines = read_machines(tmp_path)
    said = f"{len(records)} of {len(records) + 1} cells; left: {left.id}."
    assert machines[0].runs[0].unfinished == said
    assert said in leaderboard_page(machines)
    assert said in leaderboard_readme(machines)


def test_the_readme_answers_each_question_with_the_run_it_comes_from(machines):
    text = leaderboard_readme(machines)
    assert "**Which is the fastest?** Forward on Example CPU" in text
    assert "([box/first](box/first/README.md))" in text
    assert "([box/second](box/second/report.html))" in text, "which has no README"
    assert "**What does it buy in accuracy?** Accuracy on listops" in text


def test_the_same_records_give_the_same_bytes(folder, machines):
    assert leaderboard_page(read_machines(folder)) == leaderboard_page(machines)


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory) -> Path:
    root: Path = tmp_path_factory.mktemp("evil")
    records = [
        scaling(EVIL, 512),
        scaling(EVIL, 1024),
        scaling("full", 512),
        scaling("full", 1024),
        accuracy(EVIL, 0, 0.3),
    ]
    records[0] = replace(records[0], environment="")
    write_run(root / "a 'b' <i>" / "run", records, name=EVIL)
    path: Path = root / "index.html"
    path.write_text(leaderboard_page(read_machines(root)), encoding="utf-8")
    return path


def test_names_are_text(evil_page):
    text = evil_page.read_text(encoding="utf-8")
    assert "&lt;script&gt;document.title" in text
    found = elements(text)
    assert [tag for tag, _ in found if tag in {"script", "style", "img", "i"}] == ["style", "script"]
    links = [attributes["href"] or "" for tag, attributes in found if tag == "a"]
    assert all(link.startswith(("#", "a%20%27b%27%20%3Ci%3E/run/")) for link in links)


@needs_chromium
def test_a_click_sorts_by_the_number(folder, machines, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(leaderboard_page(machines), encoding="utf-8")
    script = """
        document.querySelectorAll("thead button")[4].click();
        const names = [...document.querySelector("table").tBodies[0].rows].map((row) => row.cells[0].textContent);
        return {names, width: document.documentElement.scrollWidth};
    """
    answer = ask(path, script, width=400)
    assert answer["names"] == ["linformer", "bigbird", "moba", "full"]  # what is no number last
    assert answer["width"] <= 400


def test_boards_are_in_the_order_of_what_they_measure(machines, tmp_path):
    assert [entries[0].text for entries in machines[0].runs[0].boards[0].rows] == [
        "linformer",
        "bigbird",
        "full",
        "moba",
    ]
    means = {"a_last": 0.2, "b_first": 0.7, "c_middle": 0.4}
    scores = [accuracy(name, seed, mean + 0.01 * seed) for name, mean in means.items() for seed in range(3)]
    write_run(tmp_path / "box" / "run", scores)
    (board,) = read_machines(tmp_path)[0].runs[0].boards
    assert [entries[0].text for entries in board.rows] == ["b_first", "c_middle", "a_last"]


def test_an_answer_points_at_nothing_that_is_not_there(tmp_path):
    scores = [accuracy(f"v{number}", seed, 0.5 + number / 50) for number in range(9) for seed in range(2)]
    write_run(tmp_path / "box" / "run", scores)
    ((run,),) = (machine.runs for machine in read_machines(tmp_path))
    assert " 3 more; to beat: " in " ".join(run.said)
    assert "below" not in leaderboard_readme(read_machines(tmp_path))


def test_a_run_without_a_number_has_its_name_and_page_too(tmp_path):
    write_run(tmp_path / "box" / "a", [accuracy("full", 0, 0.6)])
    write_run(tmp_path / "box" / "b", [accuracy("full", seed, None, status="diverged") for seed in range(3)])
    text = leaderboard_readme(read_machines(tmp_path))
    assert "**What came out?** No cell gave a measurement. ([box/b](box/b/report.html))" in text
