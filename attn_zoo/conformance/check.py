"""What a check is and what it finds: small frozen records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from attn_zoo.conformance.subject import Subject
    from attn_zoo.metadata import Form

Outcome = Literal["passed", "refused", "failed", "error", "not_applicable"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found about one form of a variant; the message may be empty."""

    outcome: Outcome
    message: str = ""


def passed(message: str = "") -> Finding:
    """Return the finding that the promise is kept."""
    return Finding("passed", message)


def refused(message: str) -> Finding:
    """Return the finding that the variant declares a no and was seen to refuse."""
    return Finding("refused", message)


def not_applicable(message: str) -> Finding:
    """Return the finding that there is nothing to check, and why."""
    return Finding("not_applicable", message)


class Violation(Exception):  # noqa: N818 - a finding, caught by the runner; never shown as an error
    """A variant breaks a promise. Raised inside a check.

    Attributes:
        message: which promise.
        example: the smallest call found that shows it, in words.
    """

    def __init__(self, message: str, example: str = "") -> None:
        super().__init__(f"{message} ({example})" if example else message)
        self.message = message
        self.example = example


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One named promise: `run` raises `Violation` with a minimal example, or says what it found."""

    name: str
    summary: str
    run: Callable[[Subject], Finding]
    forms: tuple[Form, ...]


def check(
    summary: str, *, forms: tuple[Form, ...] = ("attention", "mixer")
) -> Callable[[Callable[[Subject], Finding]], Check]:
    """Make the decorated function `_NAME` the check NAME; arguments as in `Check`."""
    return lambda run: Check(name=run.__name__.removeprefix("_"), summary=summary, run=run, forms=forms)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What one check found about a variant.

    Args:
        check: its name.
        outcome: `"passed"`; `"refused"`: the capability is declared missing and the refusal was seen to happen;
            `"failed"`: a promise is broken; `"error"`: the machine ran out of something, which says nothing about the
            variant; `"not_applicable"`: there is nothing to check, the message says why.
        message: what was found.
        example: for a failure, the smallest call that shows it, in words.
        has_raised: the variant raised something: most checks that call it meet the same fault.
    """

    check: str
    outcome: Outcome
    message: str = ""
    example: str = ""
    has_raised: bool = False

    @property
    def is_bad(self) -> bool:
        """Whether this result must fail a run."""
        return self.outcome in {"failed", "error"}
