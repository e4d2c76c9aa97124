"""The `data` commands: what a user types, what comes back, and which exit code."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attn_zoo.cli_data import table_rows
from attn_zoo.registry import tasks
from attn_zoo.tasks.sources.manifest import MANIFEST
from attn_zoo.tasks.sources.source import Source
from tests.conftest import Call
from tests.tasks.sources.local_server import serve


@pytest.fixture
def call(call: Call, monkeypatch, tmp_path) -> Call:
    """Run `attn-zoo data ARGUMENTS` in this process, in an empty folder, without local data."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    for name in ("ATTN_ZOO_DATA", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return partial(call, "data")


ROWS = {"/a.tsv": b"first\n", "/b.tsv": b"second\n"}
LISTOPS = tasks["listops"]


@pytest.fixture
def needy(monkeypatch):
    """Return a function that lets the short level of ListOps need files (the commands know tasks by name alone)."""
    sources: dict[str, Source] = {}
    monkeypatch.setattr(LISTOPS, "source", classmethod(lambda _, level: sources.get(level)))

    def need(**changes: Any) -> Source:
        plain: dict[str, Any] = {
            "name": "toy data",
            "folder": "toy/plain",
            "files": {"train": "a.tsv", "test": "b.tsv"},
            "hint": "Ask somebody.",
            "terms": "do what you like",
        }
        sources["short"] = Source(**{**plain, **changes})
        return sources["short"]

    return need


@pytest.fixture
def site():
    with serve(dict(ROWS)) as running:
        yield running


def addresses(site) -> dict[str, str]:
    return {"train": site.address("/a.tsv"), "test": site.address("/b.tsv")}


def fill(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in ROWS.items():
        (folder / name[1:]).write_bytes(data)
    return folder


# list


def test_list_names_every_task_and_level_within_eighty_columns(call):
    answer = call("list")
    assert answer.code == 0
    for name in tasks:
        assert name in answer.out
        for level in tasks[name].levels:
            assert level in answer.out
    assert max(len(line.rstrip()) for line in answer.out.splitlines()) <= 80
    assert "…" not in answer.out


def test_list_says_what_is_generated_here_or_missing(call, needy, tmp_path):
    needy()
    missing = call("list")
    assert "listops: toy data, missing" in missing.out
    for text in ("missing a.tsv, b.tsv", "Ask somebody.", "terms: do what you like"):
        assert text in missing.out
    assert "data fetch listops" not in missing.out, "nobody can fetch it"
    folder = fill(tmp_path / "data" / "toy" / "plain")
    here = call("list", "--data-dir", str(tmp_path / "data"))
    assert f"listops: toy data, here\n  in {folder}\n" in here.out


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_folder_of_data_that_is_not_there_is_refused(call, tmp_path, command):
    answer = call(command, "--data-dir", str(tmp_path / "typo"))
    assert answer.code == 2
    assert answer.err.startswith(
        f"--data-dir: expected a folder, as this or ATTN_ZOO_DATA names it; there is none at {tmp_path}"
    )


def test_list_offers_the_command_where_files_can_be_fetched(call, needy):
    needy(urls={"train": "https://x/1", "test": "https://x/2"}, num_bytes=41_000_000)
    assert "attn-zoo data fetch listops  (41 MB)" in call("list").out


def test_list_as_json_has_exact_sizes(call):
    rows = {(row["task"], row["level"]): row for row in json.loads(call("list", "--json").out)}
    assert set(rows) == {(name, level) for name in tasks for level in tasks[name].levels}
    short = rows["listops", "short"]
    assert short["sizes"] == {"train": 40_000, "validation": 1_000, "test": 2_000}
    assert (short["kind"], short["data"]) == ("classification", "generated")
    for (name, level), row in rows.items():
        assert (row["data"] == "generated") == (tasks[name].source(level) is None)
        assert not (row["sizes"] and row["data"] != "generated"), "sizes of files are known when they are read"


@pytest.mark.parametrize(
    ("count", "text"),
    [(7, "7"), (999, "999"), (1000, "1k"), (2500, "2.5k"), (9949, "9.9k"), (9951, "10k"), (147_086, "147k")],
)
def test_sizes_are_rounded_for_people(count, text):
    row = {"task": "t", "level": "l", "kind": "pair", "data": "here", "sizes": {"train": count, "test": 1}}
    assert table_rows([row]) == [("t", "l", "pair", f"{text}/-/1", "here")]


# show


def test_examples_that_take_long_to_make_are_told_of_meanwhile(call, tmp_path, monkeypatch):
    monkeypatch.setattr("attn_zoo.console.SILENCE_S", 0.0)
    told = "making all test examples of listops, level short\n"
    assert call("show", "listops").err == told
    assert call("export", "listops", "--out", str(tmp_path / "test.jsonl")).err == told


def test_show_prints_what_a_person_reads(call):
    answer = call("show", "listops", "--count", "2", "--split", "validation")
    assert answer.code == 0
    assert "listops, level short, validation: 1,000 examples of at most 64 tokens, 10 classes" in answer.out
    assert answer.out.count(" = ") == 2


def test_show_prints_the_properties_of_each_example(call):
    task = next(name for name in tasks if tasks[name](next(iter(tasks[name].levels))).spec.group_axes)
    axes = tasks[task](next(iter(tasks[task].levels))).spec.group_axes
    answer = call("show", task, "--count", "1")
    assert answer.code == 0
    for axis in axes:
        assert f", {axis} " in answer.out


def test_show_does_not_let_data_steer_the_terminal(call, monkeypatch):
    monkeypatch.setattr(LISTOPS, "show", lambda *_: "a\x1b[2Jb\x9bc\r\nd\u202ee")
    answer = call("show", "listops", "--count", "1")
    assert "a\\x1b[2Jb\\x9bc\\r\nd\\u202ee" in answer.out


# fetch and verify


def test_fetch_then_list_then_verify(call, needy, site):
    needy(urls=addresses(site))
    fetched = call("fetch", "listops")
    assert fetched.code == 0
    assert "terms: do what you like" in fetched.out
    assert "toy data: 2 files in " in fetched.out
    assert "listops: toy data, here" in call("list").out
    verified = call("verify", "listops")
    assert verified.code == 0
    assert "2 files in" in verified.out
    assert "as recorded: " in verified.out
    assert "already in" in call("fetch", "listops", "--level", "short").out


def test_fetch_of_a_generated_task_has_nothing_to_do(call):
    name = next(name for name in tasks if not any(tasks[name].source(level) for level in tasks[name].levels))
    answer = call("fetch", name)
    assert answer.code == 0
    assert "there is nothing to fetch" in answer.out


@pytest.mark.parametrize("harm", ["missing", "truncated", "changed"])
def test_verify_finds_harm_with_exit_code_one(call, needy, site, tmp_path, harm):
    needy(urls=addresses(site))
    call("fetch", "listops", "--data-dir", str(tmp_path / "data"))
    path = tmp_path / "data" / "toy" / "plain" / "a.tsv"
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(b"f" if harm == "truncated" else b"FIRST\n")
    answer = call("verify", "--data-dir", str(tmp_path / "data"))
    assert answer.code == 1
    assert f"  {harm}: a.tsv" in answer.out
    assert "data fetch --force" in answer.out
    as_json = json.loads(call("verify", "listops", "--data-dir", str(tmp_path / "data"), "--json").out)
    assert as_json["listops"]["is_bad"] is True
    assert call("fetch", "listops", "--force", "--data-dir", str(tmp_path / "data")).code == 0
    assert call("verify", "listops", "--data-dir", str(tmp_path / "data")).code == 0


def test_verify_can_record_a_user_s_own_files(call, needy, tmp_path):
    needy()
    folder = fill(tmp_path / "data")
    unknown = call("verify", "listops", "--data-dir", str(folder))
    assert unknown.code == 0
    assert "--record writes one" in unknown.out
    assert not (folder / MANIFEST).exists()
    assert "recorded a.tsv, b.tsv" in call("verify", "listops", "--data-dir", str(folder), "--record").out
    assert "as recorded: " in call("verify", "listops", "--data-dir", str(folder)).out
    (folder / "b.tsv").write_bytes(b"other")
    assert call("verify", "listops", "--data-dir", str(folder)).code == 1


def test_missing_data_are_not_bad_data(call, needy):
    needy()
    answer = call("verify", "listops")
    assert answer.code == 0
    assert "toy data is not here" in answer.out


def test_fetch_that_fails_is_one_sentence_and_leaves_nothing(call, needy, site, tmp_path):
    needy(urls={"train": site.address("/a.tsv"), "test": site.address("/absent.tsv")})
    answer = call("fetch", "listops", "--data-dir", str(tmp_path / "data"))
    assert answer.code == 2
    assert "the server answers 404" in answer.err
    assert len(answer.err.strip().splitlines()) == 1
    assert not (tmp_path / "data").exists()


def test_fetch_of_what_nobody_offers_says_what_to_do(call, needy):
    needy()
    answer = call("fetch", "listops")
    assert answer.code == 2
    assert "toy data cannot be fetched. Ask somebody." in answer.err


# export


def test_export_writes_a_split_once(call, tmp_path):
    name = next(name for name in tasks if tasks[name](next(iter(tasks[name].levels))).spec.group_axes)
    out = tmp_path / "split.jsonl"
    answer = call("export", name, "--split", "validation", "--out", str(out))
    assert answer.code == 0
    assert f"wrote {out}" in answer.out
    before = out.read_bytes()
    assert {"tokens", "length", "label", "groups"} <= set(json.loads(before.splitlines()[0]))
    again = call("export", name, "--split", "validation", "--out", str(out))
    assert again.code == 2
    assert "exists already and is not overwritten" in again.err
    assert out.read_bytes() == before


# Mistakes and help


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "listop"), "did you mean 'listops'?"),
        (("show", "listops", "--level", "shrt"), "did you mean 'short'?"),
        (("show", "listops", "--split", "tset"), "did you mean 'test'?"),
        (("fetch", "listop"), "did you mean 'listops'?"),
        (("fetch", "listops", "--level", "shrt"), "did you mean 'short'?"),
        (("verify", "listop"), "did you mean 'listops'?"),
        (("verify", "--level", "short"), "expected a task before it"),
        (("export", "listop", "--out", "x"), "did you mean 'listops'?"),
        (("export", "listops", "--split", "trian", "--out", "x"), "did you mean 'train'?"),
        (("export", "listops", "--level", "shrt", "--out", "x"), "did you mean 'short'?"),
    ],
)
def test_typos_teach_with_exit_code_two(call, arguments, text):
    answer = call(*arguments)
    assert answer.code == 2
    assert text in answer.err
    assert answer.out == ""
    assert len(answer.err.strip().splitlines()) == 1
    assert not any(Path().iterdir())


@pytest.mark.parametrize("command", ["list", "show", "fetch", "verify", "export"])
def test_every_command_explains_itself(call, command):
    answer = call(command, "--help")
    assert answer.code == 0
    assert "Usage" in answer.out
    assert "--data-dir" in answer.out
    assert "--help" in answer.out
