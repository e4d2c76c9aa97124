"""Two evaluators of ListOps that share nothing with the package, nor with each other."""

from __future__ import annotations

import statistics
from typing import Any


def recursive(words: list[str]) -> tuple[int, list[str]]:
    """Value of the first expression and what follows it; the median by the definition of the standard library."""
    head, rest = words[0], words[1:]
    if not head.startswith("["):
        return int(head), rest
    arguments = []
    while rest[0] != "]":
        value, rest = recursive(rest)
        arguments.append(value)
    results = {
        "[MIN": min(arguments),
        "[MAX": max(arguments),
        "[MED": int(statistics.median(arguments)),
        "[SM": sum(arguments) % 10,
    }
    return results[head], rest[1:]


def by_stack(source: str) -> int:
    """Value of a published text by a stack machine: each ( a b ) applies a to b, at last to the bracket."""
    stack: list[Any] = []
    for word in source.split():
        if word == ")":
            argument, function = stack.pop(), stack.pop()
            assert stack.pop() == "("
            if argument != "]":
                stack.append((function[0], [*function[1], argument]))
                continue
            name, arguments = function
            ordered = sorted(arguments)
            middle = len(ordered) // 2
            if name == "[MIN":
                stack.append(ordered[0])
            elif name == "[MAX":
                stack.append(ordered[-1])
            elif name == "[SM":
                stack.append(sum(ordered) % 10)
            else:
                stack.append(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2)
        elif word.startswith("["):
            stack.append((word, []))
        else:
            stack.append(int(word) if word.isdigit() else word)
    (value,) = stack
    return int(value)
