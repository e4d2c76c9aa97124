"""The Python API: run, load, check, and what a run shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import pandas as pd
import pytest
import torch

import attn_zoo
from attn_zoo import api
from attn_zoo.errors import ConfigError, FolderError, StoreError, UnknownNameError, UnsupportedError
from attn_zoo.matrix.plan.schema import shipped_matrices
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from attn_zoo.registry import load_file, variants
from attn_zoo.scaffold import new_variant
from tests.report.synthetic import write_run

ROOT = Path(__file__).parents[1]


def matrix(**changes: Any) -> dict[str, Any]:
    group = {"variants": ["full", "linformer"], "seq_len": [16, 32, 64], "passes": ["fwd"], "is_causal": [False, True]}
    defaults = {"num_heads": 2, "head_dim": 8, "dtypes": ["float32"], "isolation": "lane", "budget_s": 0.02}
    return {"name": "tiny", "defaults": {**defaults, "device": "cpu"}, "scaling": [{**group, **changes}]}


@pytest.fixture(scope="module", autouse=True)
def _no_ceilings() -> Iterator[None]:
    """What the machine can do takes seconds to measure: its tests, and the command line's, do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attn_zoo.matrix.drive.run_plan.note_ceilings", lambda *_, **__: None)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> attn_zoo.Run:
    return attn_zoo.run(matrix(), out=tmp_path_factory.mktemp("runs") / "one", progress=False)


# --- run ---


def test_a_dict_runs_and_says_what_it_did(done, capfd):
    assert done.summary is not None
    assert (done.summary.counts, done.summary.new, done.summary.left) == ({"ok": 9, "unsupported": 3}, 12, ())
    again = attn_zoo.run(matrix(), out=done.folders[0], progress=False)
    assert again.summary is not None
    assert again.summary.new == 0
    assert capfd.readouterr() == ("", "")


def test_progress_goes_to_the_error_stream(done, capfd):
    attn_zoo.run(matrix(), out=str(done.folders[0]))
    out, err = capfd.readouterr()
    assert out == ""
    assert "12 cells, 12 of them done before" in err


def test_the_folder_is_named_after_the_matrix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = attn_zoo.run(matrix(seq_len=[16], is_causal=True), only="linformer/*", progress=False)  # refused: no process
    assert run.folders == (Path("runs/tiny"),)
    assert list(run.frame["label"]) == ["linformer"]


def test_variants_are_added_by_name_or_by_class():
    cls = variants["local_window"].attention
    assert cls is not None
    every: list[Any] = ["local_window", ["local_window"], cls, [cls]]
    for given in every:
        names = {item.cell.variant for item in api.plan(matrix(), variants=given).cells}
        assert names == {"full", "linformer", "local_window"}, given


def test_of_a_part_of_a_matrix_no_more_is_left_or_run_again(tmp_path, monkeypatch):
    """Of a shard, for others run the rest; and of what `only` left out."""
    folder, ran = tmp_path / "run", []
    part = api.plan(matrix(), shard="1/2", only="full/*")
    assert 1 < len(part.cells) < len(api.plan(matrix()).cells)
    first, *others = (item.cell for item in part.cells)
    for cells in ([replace(first, variant_digest="old"), *others], [first]):  # its source was changed between two runs
        with Store(folder).writing(part.matrix.model_dump(mode="json"), None, shard=(1, 2), planned=cells):
            pass
    Store(folder).write(Record(cell=first, status="timeout", reason="slow"))
    now = api.status(folder)
    assert [record.cell for record in now.done] == [first]
    assert [item.cell for item in now.left] == others
    monkeypatch.setattr(api, "_measure", lambda make, *_, **__: ran.append(make()))
    api.run_again(folder)
    assert [item.cell for item in ran[0].cells] == [first, *others]
    with Store(folder).writing(part.matrix.model_dump(mode="json"), None, planned=[replace(first, batch_size=9)]):
        pass
    assert len(api.status(folder).left) == len(api.plan(matrix()).cells) - 1, "no part of what the matrix says today"


@pytest.mark.usefixtures("registry_kept")
def test_files_of_every_matrix_of_a_folder_are_loaded_when_it_goes_on(tmp_path, monkeypatch):
    """A worker knows a variant of a plain file by that file alone."""
    path = new_variant("of_a_file", tmp_path)
    load_file(path, None)
    store, ran = Store(tmp_path / "run"), []
    for name in ("of_a_file", "full"):
        plan = api.plan(matrix(variants=[name]))
        with store.writing(plan.matrix.model_dump(mode="json"), None, planned=[item.cell for item in plan.cells]):
            pass
    monkeypatch.setattr(api, "_measure", lambda make, *_, **__: ran.append(make()))
    api.run_again(store.folder)
    assert {item.cell.variant for item in ran[0].cells} == {"of_a_file", "full"}
    assert ran[0].variant_files == (str(path),)


@pytest.mark.parametrize("ask", [api.status, api.run_again])
def test_a_folder_of_data_that_is_not_there_is_refused(ask, done, tmp_path):
    with pytest.raises(ConfigError, match=r"--data-dir: expected a folder, .*there is none at .*nowhere"):
        ask(done.folders[0], data_dir=tmp_path / "nowhere")


@pytest.mark.parametrize("matrices", [[], "quick"])
def test_a_folder_that_names_no_matrix_says_so_and_what_to_do(matrices, tmp_path):
    folder = write_run(tmp_path / "run", [], matrices=matrices)
    for ask in (api.status, api.run_again):
        with pytest.raises(FolderError, match=r"run\.json: names no matrix; to go on, run the same matrix"):
            ask(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_failures_of_a_gpu_are_not_run_again_without_one(tmp_path):
    """They would become refusals."""
    plan = api.plan(matrix(device="cuda", seq_len=[16]))
    store = Store(tmp_path / "run")
    with store.writing(plan.matrix.model_dump(mode="json"), None, planned=[item.cell for item in plan.cells]):
        store.write(Record(cell=plan.cells[0].cell, status="timeout", reason="slow"))
    with pytest.raises(UnsupportedError, match="tiny is for a GPU, and there is no CUDA device here"):
        api.run_again(store.folder, allow_mixed_env=True, progress=False)
    assert [record.status for record in store.records()] == ["timeout"]


@pytest.mark.parametrize("parent", ["", "linformer"])
def test_a_class_that_is_not_registered_says_so(parent):
    """Of a registered parent too, in whose place it must not be measured."""
    base: Any = variants[parent].attention if parent else attn_zoo.AbstractAttention

    class Plain(base):  # type: ignore[misc]
        def forward(self, query, key, value, *, key_padding_mask=None):
            return query

    for use in (lambda: api.plan(matrix(), variants=Plain), lambda: attn_zoo.check(Plain)):
        with pytest.raises(
            ConfigError, match="Plain: expected a registered variant: decorate it with register_attention"
        ):
            use()


def test_arguments_of_a_wrong_type_are_named(tmp_path):
    wrong: Any = 4
    for use in (
        lambda: attn_zoo.load(wrong),
        lambda: attn_zoo.load([tmp_path, None]),  # type: ignore[list-item]
        lambda: api.plan(matrix(), data_dir=wrong),
        lambda: api.status(tmp_path, data_dir=wrong),
        lambda: attn_zoo.check("full", wrong),
        lambda: attn_zoo.check(wrong),
    ):
        with pytest.raises(ConfigError, match=r"expected .*(; got (4|None)|: decorate)"):
            use()


def test_a_dict_may_say_in_pythons_words_what_a_file_says():
    import torch

    plain = api.plan(matrix(seq_len=[16, 17], passes=["fwd"]), device="cpu")
    pythonic: Any = torch.device("cpu")
    assert api.plan(matrix(seq_len=range(16, 18), passes=("fwd",)), device=pythonic).cells == plain.cells


def test_matrices_run_by_name_and_by_path():
    known = shipped_matrices()
    assert all(name == path.stem for name, path in known.items())
    for name in ("quick", "scaling-cpu"):
        planned = api.plan(name)
        assert planned.matrix.name == name
        assert planned.cells == api.plan(known[name]).cells


def test_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick").mkdir()
    assert api.plan("quick").matrix.name == "quick", "a folder is no matrix"
    (tmp_path / "quick").rmdir()
    (tmp_path / "quick").write_text(shipped_matrices()["zoo-cpu"].read_text())
    assert api.plan("quick").matrix.name == "zoo-cpu"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attn_zoo.run("quik"), ConfigError, r"quik: no such file; did you mean 'quick'\?  \(attn-zoo list mat"),
        (lambda: attn_zoo.run({"scaling": []}), ConfigError, "name: this key is required"),
        (lambda: attn_zoo.run("quick", device="gpu"), ConfigError, "expected cpu or cuda; got 'gpu'; did you mean 'cu"),
        (lambda: attn_zoo.run("quick", device="cpuu"), ConfigError, "got 'cpuu'; did you mean 'cpu'"),
        (lambda: attn_zoo.run("quick", device="cuda"), UnsupportedError, "no CUDA device here"),
        (lambda: attn_zoo.run("scaling-gpu"), UnsupportedError, "scaling-gpu is for a GPU, and there is no CUDA"),
        (lambda: attn_zoo.run("quick", engine="rai"), UnknownNameError, "unknown engine 'rai'; did you mean 'ray'"),
        (
            lambda: attn_zoo.run("quick", address="head:1"),
            ConfigError,
            "--address: is of a cluster: expected --engine ray",
        ),
        (
            lambda: attn_zoo.run("quick", data_dir="nowhere"),
            ConfigError,
            "--data-dir: expected a folder, as this or ATTN_ZOO_DATA names it",
        ),
        (lambda: attn_zoo.run("quick", retry="tiemout"), UnknownNameError, "did you mean 'timeout'"),
        (lambda: attn_zoo.run("quick", shard="3"), ConfigError, "expected I/N"),
        (lambda: attn_zoo.run("quick", variants="ful"), UnknownNameError, "did you mean 'full'"),
        (lambda: attn_zoo.run("quick", only="nothing/*"), ConfigError, r"no cell matches nothing/\*"),
        (lambda: attn_zoo.run("quick", variants=[3]), ConfigError, "variants: expected names or classes; got 3"),  # type: ignore[list-item]
        (lambda: attn_zoo.run("quick", variants=[dict]), ConfigError, "dict: expected a registered variant"),
        (lambda: attn_zoo.run("quick", only=5), ConfigError, "only: expected texts; got 5"),  # type: ignore[arg-type]
        (lambda: attn_zoo.run("quick", retry=["error", 5]), ConfigError, "retry: expected texts; got 5"),  # type: ignore[list-item]
        (lambda: attn_zoo.run("quick", jobs="2"), ConfigError, "jobs: expected a whole number; got '2'"),  # type: ignore[arg-type]
        (lambda: attn_zoo.run("quick", jobs=True), ConfigError, "jobs: expected a whole number; got True"),
        (lambda: attn_zoo.run("quick", engine=5), ConfigError, "engine: expected a text; got 5"),  # type: ignore[arg-type]
        (lambda: attn_zoo.run("quick", shard=5), ConfigError, "shard: expected a text; got 5"),  # type: ignore[arg-type]
        (lambda: attn_zoo.run("quick", out=5), ConfigError, "out: expected a path; got 5"),  # type: ignore[arg-type]
        (lambda: attn_zoo.run("quick", allow_cells="9"), ConfigError, "allow_cells: expected a whole number of"),  # type: ignore[arg-type]
        (lambda: attn_zoo.run("quick", time_limit_min=-1), ConfigError, "expected minutes, 0 or more; got -1"),
        (lambda: attn_zoo.run(None), ConfigError, "expected a TOML file, a shipped name or a dict; got None"),  # type: ignore[arg-type]
        (lambda: attn_zoo.check("linfromer"), UnknownNameError, "did you mean 'linformer'"),
        (
            lambda: attn_zoo.check("full", only="casuality"),
            UnknownNameError,
            r"mean 'causality'\?  \(attn-zoo list checks shows",
        ),
        (lambda: attn_zoo.check("full", device="gpu"), ConfigError, "did you mean 'cuda'"),
        (lambda: attn_zoo.load(), ConfigError, "expected at least one results folder"),
        (lambda: attn_zoo.load("nowhere"), StoreError, "nowhere: not a results folder: no such directory"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(error, match=message):
        call()
    assert list(tmp_path.iterdir()) == []


def test_a_worker_starts_no_run(monkeypatch, tmp_path):
    """A script whose class is made by the function that runs would start itself again and again."""
    spec = SimpleNamespace(name="attn_zoo.matrix.cell.worker")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec, raising=False)
    with pytest.raises(ConfigError, match="define the class outside of the function that calls run"):
        attn_zoo.run(matrix(), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- what a run shows ---


def test_the_frame_has_a_row_a_cell_and_units_in_the_names(done):
    frame = done.frame
    assert len(frame) == 12
    assert list(frame[frame["label"] == "full"]["seq_len"]) == [16, 32, 64, 16, 32, 64]
    assert (frame[frame["status"] == "ok"]["median_ms"] > 0).all()
    assert (frame[frame["status"] == "ok"]["peak_bytes"] > 0).all()
    assert frame[frame["status"] == "unsupported"]["median_ms"].isna().all()


def test_best_is_the_fastest_at_each_length(done):
    best = done.best()
    times = done.frame[done.frame["status"] == "ok"]
    assert len(best) == 6
    for _, row in best.iterrows():
        same = times[(times["seq_len"] == row["seq_len"]) & (times["is_causal"] == ("causal" in row["panel"]))]
        ranked = same.sort_values("median_ms")
        assert (row["variant"], row["median_ms"]) == (ranked["label"].iloc[0], ranked["median_ms"].iloc[0])
        if len(same) == 1:
            assert pd.isna(row["next_variant"])
            assert row["is_settled"]
        else:
            assert row["next_variant"] == ranked["label"].iloc[1]
            assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
            assert row["is_settled"] == (row["ratio_low"] > 1)


def test_exponents_and_crossovers_are_those_of_the_report(done, tmp_path):
    assert set(done.exponents()["variant"]) == {"full", "linformer"}
    assert set(done.crossovers()["variant"]) == {"linformer"}
    done.report(tmp_path)
    assert len((tmp_path / "tables" / "exponents.csv").read_text().splitlines()) == len(done.exponents()) + 1
    with pytest.raises(UnknownNameError, match="unknown table 'exponent'; did you mean 'exponents'"):
        done.table("exponent")


def test_a_figure_is_one_of_matplotlib_and_shows_itself(done):
    for name in ("time", "memory", "speedup", "time-fwd"):
        figure = done.plot(name)
        assert isinstance(figure, matplotlib.figure.Figure)
        assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(UnknownNameError, match=r"unknown figure 'tiem'; did you mean 'time'\?  \(there are time, "):
        done.plot("tiem")


def test_trainings_have_figures_of_their_own_and_no_growth():
    run = attn_zoo.load(ROOT / "results" / "epyc-avx2-2cores" / "accuracy-cpu")
    assert isinstance(run.plot("accuracy"), matplotlib.figure.Figure)
    assert list(run.exponents()[:0])
    assert run.exponents().empty
    assert run.crossovers().empty
    with pytest.raises(ConfigError, match="these results have nothing to draw for 'bubbles'"):
        run.plot("bubbles")


def test_a_report_is_written_where_it_is_asked_for(done, tmp_path):
    assert done.report(tmp_path / "page") == tmp_path / "page" / "report.html"
    copy = attn_zoo.load(shutil.copytree(done.folders[0], tmp_path / "copy"))
    assert copy.report(has_readme=True) == tmp_path / "copy" / "report.html"
    assert (tmp_path / "copy" / "README.md").is_file()
    with pytest.raises(ConfigError, match="it describes that one"):
        copy.report(tmp_path / "elsewhere", has_readme=True)


def test_a_notebook_shows_sentences_and_a_table_without_markup_of_records(done, tmp_path):
    html = done._repr_html_()
    assert "9 ok, 3 unsupported" in html
    assert "<th>variant</th>" in html
    assert repr(done) == f"Run({done.folders[0]}: 9 ok, 3 unsupported)"
    copy = shutil.copytree(done.folders[0], tmp_path / "hostile")
    for path in (copy / "cells").iterdir():
        path.write_text(path.read_text().replace('"linformer"', '"<script>alert(1)</script>"'))
    hostile = attn_zoo.load(copy)._repr_html_()
    assert "<script" not in hostile


def test_an_empty_folder_of_results_shows_that(tmp_path, done):
    copy = shutil.copytree(done.folders[0], tmp_path / "empty")
    for path in (copy / "cells").iterdir():
        path.unlink()
    run = attn_zoo.load(copy)
    assert repr(run).endswith("empty: no cell)")
    assert run.best().empty
    assert run.frame.empty
    assert run._repr_html_()
    with pytest.raises(UnknownNameError, match="there are none"):
        run.plot()


# --- load ---


def test_a_string_is_one_folder_wherever_a_list_is_expected(done, tmp_path):
    from attn_zoo.report.export import export

    name = str(done.folders[0])
    other = shutil.copytree(name, tmp_path / "two")
    assert attn_zoo.load(name).folders == attn_zoo.load([name]).folders == attn_zoo.load(Path(name)).folders
    assert attn_zoo.load(name, other).folders == attn_zoo.load([name, other]).folders == (Path(name), other)
    assert export(name, "csv", tmp_path / "all.csv").is_file()


# --- check ---


def test_checks_display_as_a_table():
    checks = attn_zoo.check("linformer", only=["shape_and_dtype", "causality"])
    assert [result.outcome for result in checks] == ["passed", "refused"]
    assert checks.is_ok
    assert repr(checks).splitlines()[-1] == str(checks)
    assert str(checks).startswith("linformer: 1 passed, 1 refused as declared, 0 not applicable, 0 failed")
    assert "<td>causality</td><td>refused as declared</td>" in checks._repr_html_()


def test_a_broken_promise_stands_out_with_its_example(monkeypatch):
    from attn_zoo.conformance import CheckResult

    found = [CheckResult(check="causality", outcome="failed", message="leaks <b>", example="L=3 & more")]
    monkeypatch.setattr("attn_zoo.conformance.run_checks", lambda *_, **__: found)
    checks = attn_zoo.check("full")
    assert not checks.is_ok
    assert "causality  FAILED  leaks <b>" in repr(checks)
    assert "leaks &lt;b&gt;" in checks._repr_html_()
    assert "smallest example: L=3 &amp; more" in checks._repr_html_()


def test_options_reach_the_checks():
    with pytest.raises(ConfigError, match="did you mean 'proj_len'"):
        attn_zoo.check("linformer", {"projlen": 8})
    assert attn_zoo.check("linformer", {"proj_len": 8}, only="shape_and_dtype").is_ok


@pytest.mark.parametrize("given", [None, {}, {"proj_len": 8}])
def test_no_options_and_all_defaults_are_two_things(given, monkeypatch):
    asked: list[Any] = []

    def run_checks(name, options, **_):
        asked.append(options)
        return []

    monkeypatch.setattr("attn_zoo.conformance.run_checks", run_checks)
    attn_zoo.check("linformer", given)
    assert asked == [given]


# --- imports ---


def test_the_names_are_there_without_torch_or_pandas():
    code = "import attn_zoo, sys; attn_zoo.run, attn_zoo.load, attn_zoo.check, attn_zoo.Run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "pandas", "matplotlib", "IPython"} & set(done.stdout.split())


def test_reading_results_loads_no_torch(done):
    code = (
        "import attn_zoo, sys\n"
        f"run = attn_zoo.load({str(done.folders[0])!r})\n"
        "run.best(); run.exponents(); run.plot(); run._repr_html_()\n"
        "print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.strip() == "False"
