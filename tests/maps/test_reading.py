"""Finding the weights of a cell, and making the input that a map is drawn for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.maps.attention import encode_text, input_of_example, input_of_text
from attn_zoo.maps.find import find_weights, kept_cells
from attn_zoo.tasks.abstract_task import IGNORED_LABEL
from attn_zoo.training.weights import load_trained
from tests.maps.conftest import SMALL, keep
from tests.training.toy_task import ToyTask, cell


def test_cells_are_found_by_pattern_and_by_key(zoo: Path):
    cells = kept_cells(zoo)
    assert len(cells) == 8
    assert kept_cells(zoo / "weights") == cells
    path = find_weights(zoo, "linformer/*")
    assert cells[path].variant == "linformer"
    assert find_weights(zoo, cells[path].key) == path


def test_no_match_names_the_nearest(zoo: Path):
    with pytest.raises(UnknownNameError, match=r"unknown cell 'linfromer/\*'; did you mean 'linformer/\*'\?"):
        find_weights(zoo, "linfromer/*")


def test_several_matches_are_listed(zoo: Path):
    with pytest.raises(ConfigError, match=r"--cell: expected one cell; 'full/\*' matches 6; name one of full/"):
        find_weights(zoo, "full/*")
    with pytest.raises(ConfigError, match="--cell: it keeps 8 cells"):
        find_weights(zoo)


def test_equal_ids_are_told_apart_by_their_keys(zoo: Path, tmp_path: Path):
    first = keep(tmp_path, cell(**SMALL))
    assert find_weights(tmp_path) == first
    second = keep(tmp_path, cell(**SMALL, weight_decay=0.5))
    with pytest.raises(ConfigError, match=first.stem) as caught:
        find_weights(tmp_path)
    assert second.stem in str(caught.value)


def test_folders_without_weights_say_how_to_keep_them(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"it has no run\.json"):
        find_weights(tmp_path)
    (tmp_path / "run.json").touch()
    with pytest.raises(ConfigError, match="keep_weights = true"):
        find_weights(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        find_weights(tmp_path / "nowhere")
    (tmp_path / "weights").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "weights" / "foreign.safetensors")
    with pytest.raises(ConfigError, match="keep_weights = true"):
        find_weights(tmp_path)
    (tmp_path / "weights" / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="not a readable weights file"):
        find_weights(tmp_path)


def test_an_example_has_symbols_without_padding(zoo: Path):
    trained = load_trained(find_weights(zoo, "full/*/plain/*"))
    split = trained.task.split("test")
    given = input_of_example(trained, 4)
    assert given.symbols == tuple(str(token) for token in split.example(4).tokens.tolist())
    assert given.batch.tokens.shape[1] >= len(given.symbols)
    assert given.label == int(split.labels[4])
    with pytest.raises(ConfigError, match="expected 0 to 119, an example of test; got 120"):
        input_of_example(trained, 120)


def test_a_text_is_read_as_the_task_reads(zoo: Path):
    trained = load_trained(find_weights(zoo, "full/*/tokens/*"))
    given = input_of_text(trained, "3 1  2")
    assert given.batch.tokens[0, :3].tolist() == [3, 1, 2]
    assert given.batch.labels.unique().tolist() == [IGNORED_LABEL]
    with pytest.raises(UnknownNameError, match="unknown symbol of toy '9'"):
        input_of_text(trained, "3 9")
    for text in ("", "1 " * 21):
        with pytest.raises(ConfigError, match="expected 1 to 20 tokens"):
            input_of_text(trained, text)


def test_two_sequences_are_no_text(zoo: Path):
    with pytest.raises(UnsupportedError, match="reads two sequences"):
        input_of_text(load_trained(find_weights(zoo, "full/*/pair/*")), "1 2")


class Bytes(ToyTask):  # type: ignore[misc]  # a test may take what is final
    """A toy whose tokens are bytes."""

    escape = "\\x"

    @property
    def spec(self) -> Any:
        from dataclasses import replace

        return replace(super().spec, vocab_size=256)

    def symbols(self, tokens: Tensor) -> list[str]:
        def name(byte: int) -> str:
            return "\u2423" if byte == 32 else chr(byte) if 33 <= byte < 127 else f"{self.escape}{byte:02x}"

        return [name(token) for token in tokens.tolist()]


@pytest.mark.parametrize("escape", ["\\x", ""])
def test_a_text_of_bytes_keeps_spaces_and_other_alphabets(escape: str):
    task = Bytes("plain")
    task.escape = escape
    text = "a b \u00e9\u20ac~"
    assert encode_text(task, text).tolist() == list(text.encode())


def test_line_ends_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch):
    task = Bytes("plain")
    plain = task.symbols
    monkeypatch.setattr(task, "symbols", lambda tokens: ["\u21b5" if s == "\\x0a" else s for s in plain(tokens)])
    assert encode_text(task, "a\nb").tolist() == [97, 10, 98]
