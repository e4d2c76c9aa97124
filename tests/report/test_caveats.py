"""What a reader must know of a variant stands wherever a report shows it: routing that sees the future."""

import json

import pytest

from attn_zoo.api import load
from attn_zoo.folder import read_run
from attn_zoo.matrix.claimed_costs import stored_claims
from attn_zoo.metadata import ROUTING_SEES_FUTURE
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.pages.findings import findings
from attn_zoo.report.tables.all_tables import make_tables
from tests.conformance.broken import Broken, registered
from tests.conformance.broken_contract import SortsByTheFuture
from tests.report.synthetic import costed, pictures_of, roof, scaling, write_run

SORTING = Broken(cls=SortsByTheFuture, check="", capabilities={"causal": "masked"})
NOTE = f"{SORTING.name}: {ROUTING_SEES_FUTURE}"
PANEL_TABLES = {"exponents", "crossovers", "scaling", "efficiency", "efficiency-longest", "turns"}


@pytest.fixture
def run_of(tmp_path):
    """Return a function that writes a run of exact attention and of a variant whose routing sees the future."""

    def write(name, *, is_causal, claims=None):
        with registered(SORTING):
            stored = stored_claims(["full", SORTING.name]) if claims is None else claims
        records = [
            costed(scaling(variant, n, n * unit, is_causal=is_causal), flops=10**6 * n, min_bytes=10**4 * n)
            for variant, unit in (("full", 1e-2), (SORTING.name, 1e-3))
            for n in (512, 1024, 2048)
        ]
        return write_run(tmp_path / name, records, claims=stored, ceilings=[roof()])

    return write


def test_the_claim_is_kept_with_the_run_and_old_runs_read_without_it(run_of):
    claims = read_run(run_of("new", is_causal=True)).claims
    assert {name: claim.routing_sees_future for name, claim in claims.items()} == {"full": False, SORTING.name: True}
    old = read_run(run_of("old", is_causal=True, claims={SORTING.name: {"time_exponent": 2, "is_exact": False}}))
    assert not old.claims[SORTING.name].routing_sees_future


def test_every_table_and_figure_of_a_causal_panel_says_so_once(run_of):
    analysis = analyse([run_of("run", is_causal=True)])
    tables = [table for table in make_tables(analysis) if table.name != "status"]
    assert {table.name for table in tables} >= PANEL_TABLES - {"turns"}
    for table in tables:
        assert table.note.count(NOTE) == 1, table.name
        assert all(row["settings"].count(NOTE) == 1 for row in table.rows if "settings" in row)
    pictures = pictures_of(analysis)
    assert {picture.name.partition("-fwd")[0] for picture in pictures} >= {"time", "speedup", "memory-peak", "roofline"}
    for picture in pictures:
        assert picture.alt.count(NOTE) == 1, picture.name
    assert findings(analysis)[0] == f"Causal {NOTE}."


def test_pages_and_files_say_so(run_of, tmp_path):
    page = load(run_of("run", is_causal=True)).report(tmp_path / "out")
    html = page.read_text(encoding="utf-8")
    for table in ("time", "memory"):
        section = html.partition(f'<h3 id="table-{table}-')[2].partition("<h3")[0]
        assert NOTE in section
    (time,) = page.parent.rglob("time-*.md")
    assert NOTE in time.read_text(encoding="utf-8")


def test_nothing_is_said_where_nothing_is_masked(run_of, tmp_path):
    page = load(run_of("run", is_causal=False)).report(tmp_path / "out")
    for path in page.parent.rglob("*"):
        if path.suffix in {".html", ".md", ".csv"}:
            assert ROUTING_SEES_FUTURE not in path.read_text(encoding="utf-8")


def test_turns_say_so(run_of):
    run = run_of("run", is_causal=True)
    for path in (run / "cells").iterdir():
        record = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(record | {"isolation": "interleaved", "bundle": "b"}), encoding="utf-8")
    tables = {table.name: table for table in make_tables(analyse([run]))}
    assert tables["turns"].note.count(NOTE) == 1
