"""DESIGN.md is true: its paths exist, and a new entry of each kind touches the files that its table names."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import attn_zoo
from attn_zoo.registry import tasks, variants

ROOT = Path(attn_zoo.__file__).parent
REPOSITORY = ROOT.parent
TEXT = (REPOSITORY / "DESIGN.md").read_text(encoding="utf-8")
ELSEWHERE = re.compile(r"where it (happens|is measured)")


def rows() -> list[tuple[str, str, str]]:
    table = TEXT.partition("| to add a |")[2].partition("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return [(what.strip(), touch.strip(), example.strip(" `")) for what, touch, example in cells]


@cache
def words_of(path: Path) -> frozenset[str]:
    """Return the names, and the words in strings, of a module's code; documentation does not count."""
    found: set[str] = set()
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING and previous not in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            found |= set(re.findall(r"\w+", token.string))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            previous = token.type
    return frozenset(found)


def files_with(word: str) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in ROOT.rglob("*.py") if word in words_of(path)}


@pytest.mark.parametrize(("what", "touch", "example"), rows(), ids=[row[0] for row in rows()])
def test_an_entry_stands_where_the_table_says(what: str, touch: str, example: str) -> None:
    named = re.findall(r"`(attn_zoo/[^`]+)`", touch)
    patterns = [
        re.compile(re.sub(r"NAME|ROOM", r"\\w+", re.escape(path)) + (".*" if path.endswith("/") else ""))
        for path in named
    ]
    found = files_with(example)
    assert found, f"{example} is nowhere"
    outside = {file for file in found if not any(pattern.fullmatch(file) for pattern in patterns)}
    assert len(outside) <= len(ELSEWHERE.findall(touch)), f"{what}: {example} also stands in {sorted(outside)}"


def test_every_path_it_names_exists() -> None:
    rooms = "attn_zoo|tests|matrix|drive|plan|cell|conformance|attention|kernels|report|variants|tasks"
    paths: list[str] = re.findall(rf"`((?:{rooms})/[\w/.]*)`", TEXT)
    assert len(paths) > 20
    for path in paths:
        if "NAME" in path or "ROOM" in path:
            continue
        places = (REPOSITORY / path, ROOT / path, ROOT / "matrix" / path)
        assert any(place.exists() for place in places), path


def test_every_room_is_drawn() -> None:
    picture = TEXT.partition("```text")[2].partition("```")[0]
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert [room for room in sorted(rooms) if room not in picture] == []


def test_examples_are_registered() -> None:
    examples = {what.partition(" ")[0]: example for what, _, example in rows()}
    assert examples["variant"] in variants
    assert examples["task"] in tasks
