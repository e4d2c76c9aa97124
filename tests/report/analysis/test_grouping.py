"""Groups keep the order in which things come, and say what tells them apart."""

from attn_zoo.report.analysis.grouping import grouped, varying
from attn_zoo.units import unique_name


def test_keys_and_items_stay_in_their_order():
    found = grouped([5, 2, 3, 8, 1], lambda number: number % 2)
    assert list(found.items()) == [(1, [5, 3, 1]), (0, [2, 8])]


def test_names_with_several_values_vary():
    rows: list[dict[str, int | None]] = [{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}]
    assert varying(("a", "b", "c"), rows) == {"b"}, "what one row has not is None"
    assert varying(("a", "b"), rows[:1]) == varying(("a", "b"), []) == set()


def test_a_number_that_is_taken_already_is_passed_over():
    taken: set[str] = set()
    assert [unique_name(name, taken) for name in ("a", "a-2", "a", "a")] == ["a", "a-2", "a-3", "a-4"]
