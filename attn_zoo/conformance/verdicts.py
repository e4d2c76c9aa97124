"""What gates have said, so that cells which differ only in what no gate depends on are gated once in a run.

A process remembers by itself; `known` and `learn` carry what it found to other processes of the same run. Nothing is
stored: another run asks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attn_zoo.errors import GateError


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a gate said.

    Args:
        held: names of the checks that passed.
        failed: name of the one that did not, or empty.
        message: of that failure, with the smallest example.
    """

    held: tuple[str, ...] = ()
    failed: str = ""
    message: str = ""

    def checked(self) -> tuple[str, ...]:
        """Return the names of the checks that passed; raise `GateError` if one did not."""
        if self.failed:
            raise GateError(self.failed, self.message)
        return self.held


_verdicts: dict[str, Verdict] = {}


def subject_key(*parts: object) -> str:
    """Return a name for what was checked: a digest of the representations of the parts, the same in every process."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def find(key: str) -> Verdict | None:
    """Return the verdict on what has this key, or None."""
    return _verdicts.get(key)


def keep(key: str, verdict: Verdict) -> Verdict:
    """Remember a verdict and return it."""
    _verdicts[key] = verdict
    return verdict


def known() -> dict[str, dict[str, Any]]:
    """Return all verdicts as plain data for `learn` in another process."""
    return {key: asdict(verdict) for key, verdict in _verdicts.items()}


def learn(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Remember what `known` said in other processes of the same run, on the same machine and the same sources."""
    for key, data in found.items():
        _verdicts[key] = Verdict(held=tuple(data["held"]), failed=data["failed"], message=data["message"])
