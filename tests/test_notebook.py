"""The example notebook, run cell by cell by IPython: what a user sees is what the text around the cells promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "benchmarks" / "notebook.ipynb"

RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from attn_zoo.matrix.drive import run_plan

run_plan.note_ceilings = lambda *_, **__: None  # seconds, of the machine
shell = InteractiveShell.instance()
shown = []
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        result = shell.run_cell("".join(cell["source"]), store_history=True)
        result.raise_error()
        shown.append(shell.display_formatter.format(result.result)[0])
kinds = [sorted(one) for one in shown]
namespace = shell.user_ns
facts = {
    "kinds": kinds,
    "html": [one.get("text/html", "") for one in shown],
    "is_ok": namespace["checks"].is_ok,
    "columns": list(namespace["run"].frame),
    "statuses": sorted(set(namespace["run"].frame["status"])),
    "variants": sorted(set(namespace["run"].frame["variant"])),
}
json.dump(facts, open("facts.json", "w"))
"""


@pytest.mark.slow
def test_the_notebook_runs_and_shows_tables_and_a_figure(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["is_ok"], done.stdout
    assert facts["statuses"] == ["ok"]
    assert facts["variants"] == ["full", "segments"]
    assert {"median_ms", "low_ms", "high_ms", "peak_bytes"} <= set(facts["columns"])
    assert [any("text/html" in kinds for kinds in facts["kinds"]), any("image/png" in k for k in facts["kinds"])] == [
        True,
        True,
    ]
    assert "<td>causality</td><td>refused as declared</td>" in "".join(facts["html"])
    assert (tmp_path / "runs" / "segments" / "report.html").is_file()
    kept = tmp_path / "runs" / "segments" / "sources" / "segments" / "segments.py"
    assert "class SegmentsAttention" in kept.read_text()
    assert "import attn_zoo\n" in kept.read_text()
    assert "attn_zoo.run(" not in kept.read_text()


def test_the_notebook_holds_no_output():
    """Outputs are numbers of some machine, and a picture each: they belong to `results`."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
