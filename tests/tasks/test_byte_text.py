"""Bytes as tokens: the published ids, cut on the right, and symbols that lead back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.tasks.byte_text import VOCAB_SIZE, TextRows, byte_symbols, encode_texts, text_of


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=6), st.integers(1, 40))
def test_ids_are_bytes_plus_one(texts, max_len):
    tokens, lengths = encode_texts((text.encode() for text in texts), max_len)
    assert tokens.dtype == torch.uint8
    for text, row, length in zip(texts, tokens, lengths, strict=True):
        expected = [byte + 1 for byte in (text.encode()[:max_len] or b" ")]
        assert row[: int(length)].tolist() == expected
        assert not row[int(length) :].any()
    assert tokens.shape[1] == int(lengths.max())


def test_a_character_may_be_cut():
    tokens, _ = encode_texts(["aé".encode()], 2)
    assert tokens.tolist() == [[98, 0xC3 + 1]]
    assert text_of(tokens[0]) == "a�"


def test_an_empty_text_is_one_space():
    tokens, lengths = encode_texts([b"", b"ab"], 9)
    assert (text_of(tokens[0, : int(lengths[0])]), lengths.tolist()) == (" ", [1, 2])


def test_the_one_byte_without_an_id_of_8_bits_is_refused():
    with pytest.raises(ValueError, match="text 1: expected UTF-8; got the byte 0xff at 2"):
        encode_texts([b"fine", b"ab\xff"], 9)
    assert encode_texts([b"ab\xff"], 2)[0].tolist() == [[98, 99]]  # cut before it is looked at


def test_other_bytes_that_are_not_utf8_are_bytes_all_the_same():
    tokens, _ = encode_texts([b"\x80\xfe\x00"], 9)
    assert tokens.tolist() == [[129, 255, 1]]


def test_nothing_to_encode_is_an_error():
    with pytest.raises(ValueError, match="at least one text"):
        TextRows(5).tensors()


def test_symbols_are_different_and_of_one_line():
    symbols = byte_symbols(torch.arange(VOCAB_SIZE))
    assert len(set(symbols)) == VOCAB_SIZE
    assert symbols[ord("t") + 1] == "t"
    assert symbols[ord(" ") + 1] == "\u2423"
    assert (symbols[11], symbols[0xE9 + 1], symbols[ord("\\") + 1]) == ("\\x0a", "\\xe9", "\\")
    assert all(symbol.isprintable() and symbol.strip() == symbol for symbol in symbols)
