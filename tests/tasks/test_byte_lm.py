"""Byte language modelling: every byte predicted once, from files as published or packed."""

from __future__ import annotations

import dataclasses
import gzip
import os
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.tasks import SplitName
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.tasks.byte_lm import TEXT, ByteLanguageModelling, ByteLevel
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.sources.manifest import describe, write_manifest
from attn_zoo.tasks.sources.source import fetched_dir

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
CONTENT = bytes(np.random.default_rng(3).choice(np.frombuffer(b"abcdefg \n\xc3", np.uint8), 3_001))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a data folder with a small text; nothing fetched is in reach."""
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        ByteLanguageModelling,
        "levels",
        MappingProxyType(
            {"short": ByteLevel(seq_len=32), "even": ByteLevel(seq_len=30), "huge": ByteLevel(seq_len=500)}
        ),
    )
    (tmp_path / "data" / "tinyshakespeare").mkdir(parents=True)
    (tmp_path / "data" / "tinyshakespeare" / "input.txt").write_bytes(CONTENT)
    return tmp_path / "data"


@pytest.mark.parametrize("level", ["short", "even"])
def test_every_byte_is_predicted_exactly_once_from_the_one_before(folder, level):
    task = ByteLanguageModelling(level, data_dir=folder)
    predicted = []
    for name in SPLITS:
        checked_split(task, name)
        split = task.split(name)
        assert (split.lengths == task.spec.max_seq_len).all()
        for tokens, labels in zip(split.tokens.tolist(), split.labels.tolist(), strict=True):
            known = [label for label in labels if label != IGNORED_LABEL]
            assert known == (tokens[1:] + labels[-1:])[len(labels) - len(known) :]
            assert IGNORED_LABEL not in labels[len(labels) - len(known) :]
            predicted += known
    assert bytes(predicted) == CONTENT[1:]


def test_splits_are_contiguous_shares(folder):
    task = ByteLanguageModelling("short", data_dir=folder)
    scored = {name: int((task.split(name).labels != IGNORED_LABEL).sum()) for name in SPLITS}
    assert scored == {"train": 2_700 - 1, "validation": 150, "test": 151}


def test_a_packed_text_is_the_same_data(folder):
    plain = ByteLanguageModelling("short", data_dir=folder)
    digest = ByteLanguageModelling.digest("short", data_dir=folder)
    test = plain.split("test")
    path = folder / "tinyshakespeare" / "input.txt"
    path.with_name("input.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert TEXT.missing(folder) == []
    assert TEXT.found(folder) == path.parent
    assert ByteLanguageModelling.digest("short", data_dir=folder) == digest
    assert ByteLanguageModelling("short", data_dir=folder).split("test").tokens.tolist() == test.tokens.tolist()


def test_digest_follows_the_text(folder):
    before = ByteLanguageModelling.digest("short", data_dir=folder)
    path = folder / "tinyshakespeare" / "input.txt"
    path.write_bytes(CONTENT[:-1] + b"Z")
    assert ByteLanguageModelling.digest("short", data_dir=folder) != before


def test_a_missing_text_says_where_it_was_looked_for_and_how_to_get_it(folder):
    (folder / "tinyshakespeare" / "input.txt").unlink()
    assert TEXT.missing(folder) == ["input.txt"]
    assert TEXT.found(folder) is None
    with pytest.raises(ConfigError, match=r"data_dir: missing input\.txt; looked in .*karpathy/char-rnn"):
        ByteLanguageModelling("short", data_dir=folder).split("train")
    with pytest.raises(ConfigError, match="missing input"):
        ByteLanguageModelling.digest("short", data_dir=folder)


def damaged() -> bytes:
    packed = bytearray(gzip.compress(CONTENT, mtime=0))
    packed[20:60] = b"\xff" * 40  # no code of any symbol
    return bytes(packed)


@pytest.mark.parametrize(
    "content",
    [b"this is no gzip", gzip.compress(CONTENT, mtime=0)[:-20], damaged(), gzip.compress(bytes(2**25), mtime=0)],
    ids=["no gzip", "cut short", "damaged", "bomb"],
)
def test_a_damaged_packed_text_is_named(folder, content):
    path = folder / "tinyshakespeare" / "input.txt"
    path.unlink()
    path.with_name("input.txt.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"input\.txt\.gz: cannot be read"):
        ByteLanguageModelling("short", data_dir=folder).split("train")


def test_a_text_that_is_too_short_is_an_error(folder):
    with pytest.raises(ConfigError, match="leaves 151 for validation; level huge needs more than 500"):
        ByteLanguageModelling("huge", data_dir=folder).split("validation")


def test_floors_are_bits_per_byte_of_n_grams(folder):
    task = ByteLanguageModelling("short", data_dir=folder)
    assert (task.spec.metric, task.spec.chance) == ("bits_per_byte", 8.0)
    floors = task.floors()
    assert list(floors) == ["unigram", "bigram", "trigram", "5-gram"]
    counts = np.bincount(np.frombuffer(CONTENT[:2_700], np.uint8), minlength=256)
    share = counts / counts.sum()
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert floors["unigram"] == pytest.approx(entropy, abs=0.15)  # test has the same distribution
    assert all(entropy - 0.15 < value < 8.0 for value in floors.values())  # and no order that could be learned


def test_levels_have_the_sizes_that_are_documented():
    assert {name: level.seq_len for name, level in ByteLanguageModelling.levels.items()} == {
        "short": 128,
        "512": 512,
        "2048": 2_048,
    }
    assert {dataclasses.astuple(level)[1:] for level in ByteLanguageModelling.levels.values()} == {(90, 5)}


def test_show_and_symbols(folder):
    task = ByteLanguageModelling("short", data_dir=folder)
    example = task.split("test").example(0)
    text = task.show(example)
    assert "|" in text
    names = task.symbols(example.tokens)
    assert len(names) == 32
    assert set(names) <= set("abcdefg␣↵") | {"c3"}


def _real() -> Path | None:
    given = os.environ.get("ATTN_ZOO_DATA")
    return Path(given) if given and not TEXT.missing(Path(given)) else None


@pytest.mark.skipif(_real() is None, reason="tiny Shakespeare is not in ATTN_ZOO_DATA")
def test_the_real_text():
    task = ByteLanguageModelling("short", data_dir=_real())
    scored = {name: int((task.split(name).labels != IGNORED_LABEL).sum()) for name in SPLITS}
    assert sum(scored.values()) == 1_115_394 - 1
    floors = task.floors()
    assert floors["unigram"] > floors["bigram"] > floors["trigram"] > floors["5-gram"] > 2.0
    assert 4.7 < floors["unigram"] < 4.9


def test_a_packed_text_that_is_given_goes_before_a_plain_one_that_was_fetched(folder):
    given = folder / "tinyshakespeare" / "input.txt"
    fetched = fetched_dir() / "tinyshakespeare" / "input.txt"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(CONTENT[::-1])
    given.with_name("input.txt.gz").write_bytes(gzip.compress(CONTENT))
    given.unlink()
    assert TEXT.locate(folder)["input"] == given.with_name("input.txt.gz")
    assert TEXT.locate(None)["input"] == fetched


@pytest.mark.parametrize("name", ["input.txt", "input.txt.gz"])
def test_a_text_that_is_not_what_its_manifest_says_is_refused(folder, name):
    at = folder / "tinyshakespeare"
    (at / "input.txt").unlink()
    content = CONTENT if name == "input.txt" else gzip.compress(CONTENT)
    (at / name).write_bytes(content)
    write_manifest(at, {name: describe(at / name, "local")})
    digest = ByteLanguageModelling.digest("short", data_dir=folder)
    other = CONTENT[:-1] if name == "input.txt" else gzip.compress(CONTENT[:-1])
    (at / name).write_bytes(other)
    with pytest.raises(ConfigError, match=r"was changed since manifest\.json beside it was written"):
        ByteLanguageModelling.digest("short", data_dir=folder)
    (at / name).write_bytes(content)
    assert ByteLanguageModelling.digest("short", data_dir=folder) == digest
