"""The published text form: round trip, examples written by hand, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.expressions import CLOSE, DIGIT, OPERATORS, Grammar, draw_trees
from attn_zoo.tasks.generated.draws import Draws
from attn_zoo.tasks.listops import read_tsv, show_tokens, source_text, tokens_of, write_tsv
from tests.tasks.evaluators import by_stack, recursive

MAX, SM = OPERATORS["[MAX"], OPERATORS["[SM"]
NESTED = [MAX, DIGIT + 2, SM, DIGIT + 9, DIGIT + 3, CLOSE, DIGIT, CLOSE]
NESTED_SOURCE = "( ( ( ( [MAX 2 ) ( ( ( [SM 9 ) 3 ) ] ) ) 0 ) ] )"


# Rows of a file in the published format that others generated (BalloutAI/Fine-tuning-with-Explanation, basic_test.tsv).
PUBLISHED = (
    (
        "( ( ( ( ( ( ( ( ( [MAX ( ( ( [MED 7 ) 6 ) ] ) ) 0 ) 6 ) 4 ) 7 ) 1 ) 2 ) "
        "( ( ( ( ( ( ( ( [MED 8 ) 6 ) 4 ) 2 ) 0 ) 4 ) 4 ) ] ) ) ] )\t7"
    ),
    (
        "( ( ( ( [MED ( ( ( ( ( ( ( [SM ( ( ( [MED 6 ) 6 ) ] ) ) 7 ) 6 ) 0 ) "
        "( ( ( [MIN 0 ) ( ( ( ( [MIN 8 ) 0 ) 7 ) ] ) ) ] ) ) 4 ) ] ) ) 5 ) 2 ) ] )\t3"
    ),
)


@pytest.mark.parametrize("row", PUBLISHED)
def test_rows_of_others_are_read_written_and_evaluated_alike(row):
    source, target = row.split("\t")
    tokens = tokens_of(source.encode())
    assert source_text(tokens) == source
    assert recursive(show_tokens(tokens).split()) == (int(target), [])
    assert by_stack(source) == int(target)


def test_nested_expression_in_all_three_forms():
    assert show_tokens(NESTED) == "[MAX 2 [SM 9 3 ] 0 ]"
    assert source_text(NESTED) == NESTED_SOURCE
    assert tokens_of(NESTED_SOURCE.encode()).tolist() == NESTED


def test_reading_matches_the_published_preprocessing():
    """Delete parentheses, split at blanks."""
    trees = draw_trees(Draws(0), 1_024, Grammar())
    for row in np.split(trees.tokens, np.cumsum(trees.lengths)[:-1])[:20]:
        source = source_text(row)
        words = source.replace("(", "").replace(")", "").split()
        assert " ".join(words) == show_tokens(row)
        assert tokens_of(source.encode()).tolist() == row.tolist()


def test_files_round_trip_in_the_published_format(tmp_path):
    path = tmp_path / "basic_val.tsv"
    write_tsv(path, [NESTED, [SM, DIGIT + 7, DIGIT + 8, CLOSE]], [2, 5])
    assert path.read_bytes().startswith(b"Source\tTarget\r\n( ( ( ( [MAX")
    assert path.read_bytes().count(b"\r\n") == 3
    rows, values = read_tsv(path)
    assert [row.tolist() for row in rows] == [NESTED, [SM, DIGIT + 7, DIGIT + 8, CLOSE]]
    assert values.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("( ( [FIRST 2 ) ] )\t2", "line 3: unexpected symbol"),
        ("( ( [MAX 2 ) a ) ] )\t2", "line 3: unexpected symbol 'a'"),
        ("( ( [MAX 2 )\t2", "line 3: expected one expression whose brackets match"),
        ("( ( [MAX 12 ) ] )\t2", "line 3: expected a space between two symbols; there is none after symbol 2"),
        ("1 2\t2", "line 3: expected one expression"),
        ("\t2", "line 3: expected one expression"),
        ("( ( [MAX 2 ) ] )", "line 3: expected a digit as target"),
        ("( ( [MAX 2 ) ] )\t12", "line 3: expected a digit as target"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t2", "line 3: expected the target 9, the value of the expression; got 2"),
        ("( [MAX ] )\t2", "line 3: expected an argument after each operator"),
        ("( ( ( [MAX 2 ) ( [SM ] ) ) ] )\t2", "line 3: expected an argument after each operator"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "basic_train.tsv"
    path.write_text(f"Source\tTarget\n{NESTED_SOURCE}\t2\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_tsv(path)


def test_missing_file_and_wrong_header_are_named(tmp_path):
    with pytest.raises(ConfigError, match="there is none"):
        read_tsv(tmp_path / "basic_test.tsv")
    (tmp_path / "x.tsv").write_text("a\tb\n")
    with pytest.raises(ConfigError, match="line 1: expected the header"):
        read_tsv(tmp_path / "x.tsv")


def test_a_file_that_ends_after_its_header_is_no_empty_split(tmp_path):
    (tmp_path / "basic_test.tsv").write_bytes(b"Source\tTarget\r\n")
    with pytest.raises(ConfigError, match="line 2: expected an expression; the file ends after its header"):
        read_tsv(tmp_path / "basic_test.tsv")


def test_values_are_compared_beyond_one_chunk(tmp_path):
    write_tsv(tmp_path / "x.tsv", [NESTED] * 3_000, [2] * 2_999 + [3])
    with pytest.raises(ConfigError, match=r"line 3001: expected the target 2, .* got 3"):
        read_tsv(tmp_path / "x.tsv")
