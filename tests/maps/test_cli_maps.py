"""`attn-zoo maps`: files are written, mistakes end with one message and nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attn_zoo.cli import app
from attn_zoo.errors import AttnZooError
from attn_zoo.matrix.store.kept_sources import keep_sources
from attn_zoo.registry import variants
from attn_zoo.scaffold import new_variant


def run(*arguments: object) -> str:
    """Run the command; its error is raised as the command line's own `main` receives it."""
    result = CliRunner().invoke(app, ["maps", *map(str, arguments)])
    if isinstance(result.exception, AttnZooError):
        assert result.exception.exit_code == 2
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_attention(zoo: Path, tmp_path: Path):
    out = tmp_path / "heads.png"
    printed = run("attention", zoo, "--cell", "full/*/plain/*", "--example", 3, "--layer", 1, "--head", 2, "--out", out)
    assert printed.strip() == f"wrote {out}"
    assert out.read_bytes().startswith(b"\x89PNG")
    run("attention", zoo, "--cell", "full/*/pair/*", "--other", "--pool", "mean", "--out", tmp_path / "pair.svg")
    run("attention", zoo, "--cell", "linformer/*", "--text", "1 2 3", "--out", tmp_path / "text.svg")
    assert len(list(tmp_path.iterdir())) == 3


def test_positions_and_schedule(zoo: Path, tmp_path: Path):
    run("positions", "--kind", "learned", "--len", 20, "--dim", 8, "--out", tmp_path / "a.svg")
    run("positions", zoo, "--cell", "full/*/plain/*", "--out", tmp_path / "b.png")
    run("schedule", "lra-small", "--task", "toy", "--out", tmp_path / "c.svg")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("registry_kept")
def test_sources_that_the_folder_keeps_are_loaded_where_they_were_measured(zoo: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(zoo, tmp_path / "zoo"))
    keep_sources(folder, {str(new_variant("my_map", tmp_path)): ["my_map"]})
    drawing = ("attention", folder, "--cell", "full/*/plain/*", "--out", tmp_path / "a.svg")
    run(*drawing)
    assert "my_map" in variants
    variants.remove("my_map")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "another user's"))
    said = []
    monkeypatch.setattr("attn_zoo.console.err.print", lambda text, **_: said.append(text))
    run(*drawing)
    assert "my_map" not in variants
    path = folder / "sources" / "my_map" / "my_map.py"
    assert said == [
        f"not loaded: {path} was not measured by you; if it is needed, read it and say --variant-file {path}"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "ZOO", "--out", "a.pdf"), "ends in .png or .svg"),
        (("attention", "EMPTY", "--out", "a.png"), "EMPTY: not a results folder: it has no run.json; it contains run"),
        (("attention", "RUN", "--out", "a.png"), "keep_weights = true"),
        (("attention", "ZOO", "--cell", "ful/*", "--out", "a.png"), "did you mean 'full/*'?"),
        (("attention", "ZOO", "--cell", "linformer/*", "--pool", "maxx", "--out", "a.png"), "did you mean 'max'?"),
        (("attention", "ZOO", "--text", "1", "--example", "1", "--out", "a.png"), "either --text or --example"),
        (("attention", "ZOO", "--cell", "global_pooling/*", "--out", "a.png"), "without heads that attend"),
        (("positions", "ZOO", "--dim", "8", "--out", "a.png"), "a trained model has its own"),
        (("positions", "--cell", "full/*", "--out", "a.png"), "expected a results folder"),
        (("positions", "--kind", "rotary", "--out", "a.png"), "unknown kind of positions 'rotary'"),
        (("positions", "--len", "0", "--out", "a.png"), "--len: expected 1 to 8192; got 0"),
        (("positions", "--len", "1000000", "--out", "a.png"), "--len: expected 1 to 8192; got 1000000"),
        (("schedule", "lra-smal", "--out", "a.png"), "did you mean 'lra-small'?"),
    ],
)
def test_mistakes_write_nothing(zoo: Path, tmp_path: Path, arguments: tuple[str, ...], message: str):
    empty = tmp_path / "empty"
    (empty / "run").mkdir(parents=True)
    (empty / "run" / "run.json").touch()
    names = {"EMPTY": "empty", "RUN": "empty/run", "a.png": "a.png", "a.pdf": "a.pdf"}
    places = {"ZOO": str(zoo), **{name: str(tmp_path / path) for name, path in names.items()}}
    with pytest.raises(AttnZooError) as caught:
        run(*(places.get(argument, argument) for argument in arguments))
    assert message.replace("EMPTY", str(empty)) in str(caught.value).replace("\n  ", " ")
    assert list(tmp_path.iterdir()) == [empty]
