"""Sort things into groups, and say what tells groups apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items of each key; keys and items stay in the order in which they first occur."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def varying(names: Iterable[str], rows: Collection[Mapping[str, Any]]) -> set[str]:
    """Return those of the names that have several values in these rows; of a name that a row has not, None is one."""
    return {name for name in names if len({row.get(name) for row in rows}) > 1}
