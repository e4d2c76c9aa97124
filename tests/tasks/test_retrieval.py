"""Retrieval: the published table of pairs, read line by line, on small files of the same form."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch

from attn_zoo.errors import ConfigError
from attn_zoo.registry import tasks
from attn_zoo.tasks import SplitName, retrieval
from attn_zoo.tasks.byte_text import text_of
from attn_zoo.tasks.promises import checked_split
from attn_zoo.tasks.retrieval import PAPERS, Retrieval, RetrievalLevel, read_pairs
from attn_zoo.tasks.sources.tensor_cache import cache_dir
from attn_zoo.training.protocol import resolve_protocol

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def _private_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))


def lines_of(part: str, count: int) -> bytes:
    """Return pairs of papers: cited ones share a subject."""
    rows = []
    for index in range(count):
        label = index % 2
        subject, other = ("parsing", "parsing") if label else ("parsing", "speech")
        rows.append(f"{label}.0\tP{index}\tQ{index}\tA {part} paper on {subject} {index}\tOne on {other} {index}\n")
    return "".join(rows).encode()


@pytest.fixture
def folder(tmp_path):
    at = tmp_path / "data" / "tsv_data"
    at.mkdir(parents=True)
    for name, count in zip(SPLITS, (20, 6, 8), strict=True):
        (at / PAPERS.files[name]).write_bytes(lines_of(name, count))
    return tmp_path / "data"


def texts_of(split, row: int) -> tuple[str, str]:
    example = split.example(row)
    return text_of(example.tokens), text_of(example.other_tokens)


def read(path, content: bytes) -> list[tuple[int, bytes, bytes]]:
    path.write_bytes(content)
    return list(read_pairs(path))


def test_it_is_registered_and_keeps_the_contract(folder):
    for level in Retrieval.levels:
        task = tasks["retrieval"](level, data_dir=folder)
        for name, count in zip(SPLITS, (20, 6, 8), strict=True):
            checked_split(task, name)
            assert len(task.split(name)) == count
    assert (task.spec.kind, task.spec.other_max_seq_len, task.spec.max_seq_len) == ("pair", 4_000, 4_000)


def test_rows_keep_their_order_label_and_sides(folder):
    split = Retrieval("4000", data_dir=folder).split("validation")
    assert split.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert texts_of(split, 0) == ("A validation paper on parsing 0", "One on speech 0")
    assert texts_of(split, 5) == ("A validation paper on parsing 5", "One on parsing 5")


def test_quotes_mean_nothing(tmp_path):
    """A reader that heeds quotes would swallow tabs and line ends between them."""
    content = b'1.0\ta\tb\tHe said "so\tand "left\n0.0\tc\td\t"\t\'"\'\n'
    assert read(tmp_path / "x.tsv", content) == [(1, b'He said "so', b'and "left'), (0, b'"', b"'\"'")]


def test_line_ends_of_both_kinds(tmp_path):
    content = b"1.0\ta\tb\tone\ttwo\r\n0\tc\td\tthree\tfour\n1\te\tf\tfive \x0b\x85 \rsix\tseven\n"
    assert read(tmp_path / "x.tsv", content) == [
        (1, b"one", b"two"),
        (0, b"three", b"four"),
        (1, b"five \x0b\x85 \rsix", b"seven"),
    ]


def test_texts_may_be_empty_or_not_utf8(folder):
    path = folder / "tsv_data" / PAPERS.files["test"]
    path.write_bytes(b"1.0\ta\tb\t\t\xe9t\xe9\n")
    task = Retrieval("4000", data_dir=folder)
    checked_split(task, "test")
    assert texts_of(task.split("test"), 0) == (" ", "\ufffdt\ufffd")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\ta\tb\tone", r"line 2: expected 5 columns \(label, id1, id2, text1, text2\) separated by tabs; got 4"),
        (b"1.0\ta\tb\tone\ttwo\tthree", "line 2: expected 5 columns .*; got 6"),
        (b"", "line 2: expected 5 columns .*; got 1"),
        (b"2.0\ta\tb\tone\ttwo", "line 2: expected 0.0 or 1.0 as label; got '2.0'"),
        (b"label\tid1\tid2\ttext1\ttext2", "line 2: expected 0.0 or 1.0 as label; got 'label'"),
        (b"\xe9\ta\tb\tone\ttwo", "line 2: expected 0.0 or 1.0 as label"),
        (b"1.0\ta\tb\tone\ttw\xff", "line 2: expected UTF-8; got the byte 0xff"),
    ],
)
def test_a_wrong_row_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "some.tsv"
    with pytest.raises(ConfigError, match=message) as caught:
        read(path, b"0.0\ta\tb\tone\ttwo\n" + line + b"\n0.0\ta\tb\tone\ttwo\n")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("num_bytes", [1, 3, 12])  # the line end; some of the second text; also the tab before it
def test_a_file_cut_within_a_row_is_refused_and_leaves_no_cache(folder, num_bytes):
    path = folder / "tsv_data" / PAPERS.files["test"]
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises(ConfigError, match=r"line 8: expected a line end; the file was cut short"):
        Retrieval("4000", data_dir=folder).split("train")
    assert not list(cache_dir().glob("retrieval-*"))


def test_a_whole_file_may_lack_its_last_line_end(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "_NUM_ROWS", (2,))
    content = b"1.0\ta\tb\tone\ttwo\n0\tc\td\tthree\tfour"
    assert len(read(tmp_path / "x.tsv", content)) == 2
    with pytest.raises(ConfigError, match="line 1: expected a line end"):
        read(tmp_path / "y.tsv", content[:15])


def test_an_empty_or_missing_file_is_named(folder):
    path = folder / "tsv_data" / PAPERS.files["validation"]
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"new_aan_pairs\.eval\.tsv: expected pairs of papers; the file is empty"):
        Retrieval("4000", data_dir=folder).split("train")
    path.unlink()
    with pytest.raises(ConfigError, match=r"missing new_aan_pairs\.eval\.tsv"):
        Retrieval("4000", data_dir=folder).split("train")


def test_texts_are_cut_and_the_first_rows_taken(folder, monkeypatch):
    level = RetrievalLevel(max_len=5, max_rows={"train": 3})
    monkeypatch.setattr(Retrieval, "levels", MappingProxyType({"tiny": level}))
    task = Retrieval("tiny", data_dir=folder)
    assert [len(task.split(name)) for name in SPLITS] == [3, 6, 8]
    assert texts_of(task.split("train"), 2) == ("A tra", "One o")
    assert task.split("train").tokens.dtype == torch.uint8


def test_rows_beyond_those_wanted_are_not_read(folder, monkeypatch):
    path = folder / "tsv_data" / PAPERS.files["train"]
    path.write_bytes(path.read_bytes() + b"broken\n")
    monkeypatch.setattr(Retrieval, "levels", MappingProxyType({"n": RetrievalLevel(max_len=9, max_rows={"train": 20})}))
    assert len(Retrieval("n", data_dir=folder).split("train")) == 20


def test_tensors_come_from_the_cache_the_next_time_and_follow_the_files(folder, monkeypatch):
    tokens = Retrieval("4000", data_dir=folder).split("train").tokens
    with monkeypatch.context() as patch:
        patch.setattr("attn_zoo.tasks.retrieval.read_pairs", lambda _: pytest.fail("read again"))
        again = Retrieval("4000", data_dir=folder).split("train")
        assert torch.equal(again.tokens, tokens)
        assert texts_of(again, 3) == ("A train paper on parsing 3", "One on parsing 3")
    path = folder / "tsv_data" / PAPERS.files["train"]
    path.write_bytes(lines_of("other", 4))
    assert len(Retrieval("4000", data_dir=folder).split("train")) == 4


def test_floors_find_the_words_in_common(folder):
    (folder / "tsv_data" / PAPERS.files["test"]).write_bytes(lines_of("train", 8))  # no word that train lacks
    task = Retrieval("4000", data_dir=folder)
    floors = task.floors()
    assert set(floors) == {"majority", "length", "either_histogram", "histogram_difference"}
    assert floors["majority"] == 0.5
    assert task.references() == {"bag_of_words": 1.0}


def test_a_pair_is_shown_with_both_texts(folder):
    task = Retrieval("4000", data_dir=folder)
    assert task.show(task.split("test").example(1)) == (
        "A test paper on parsing 1\n---\nOne on parsing 1\n= one cites the other"
    )


def test_settings_are_the_published_ones():
    original = resolve_protocol("lra-original", task_settings=Retrieval.settings["lra-original"])
    assert (original.embed_dim, original.ffn_dim, original.num_steps, original.warmup_steps) == (128, 512, 5_000, 8_000)
    small = resolve_protocol("lra-small", task_settings=Retrieval.settings["lra-small"])
    assert (small.num_steps, small.warmup_steps, small.eval_every) == (30_000, 800, 300)
