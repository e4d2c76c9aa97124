"""Words of the report: titles of panels, passes and settings, and what intervals know."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_zoo.errors import counted
from attn_zoo.records import PASSES, Ceilings, Environment, Record
from attn_zoo.units import human_bandwidth, human_flop_rate, slug

PASS_TITLES: Mapping[str, str] = {pass_.name: pass_.title for pass_ in PASSES.values()}

_SCOPES = {"attention": "attention only", "mixer": "mixer with projections", "model": "whole model"}

PANEL_FIELDS = (
    *("environment", "device", "dtype", "pass", "scope", "is_causal", "has_padding", "dropout_p", "batch_size"),
    *("num_heads", "num_kv_heads", "head_dim", "protocol", "threads", "protocol_version"),
)
"""Everything but variant and length that decides a timing: within one panel only those two differ."""


def _direction(is_causal: bool) -> str:
    return "causal" if is_causal else "bidirectional"


_WORDS: tuple[tuple[str, Callable[[Any], str], Callable[[Any], str]], ...] = (
    ("dtype", str, str),
    ("scope", lambda value: _SCOPES.get(value, value), str),
    ("protocol", lambda value: f"protocol {value}" if value else "", str),
    ("is_causal", _direction, _direction),
    ("batch_size", lambda value: f"batch {value}", "b{}".format),
    ("num_heads", lambda value: counted(value, "head"), "h{}".format),
    ("num_kv_heads", lambda value: counted(value, "key/value head"), "g{}".format),
    ("head_dim", lambda value: f"head size {value}", "d{}".format),
    (
        "has_padding",
        lambda value: "a quarter of every second sequence padded" if value else "",
        lambda value: "padded" if value else "",
    ),
    (
        "dropout_p",
        lambda value: f"dropout {value:g}" if value else "",
        lambda value: f"dropout{value:g}" if value else "",
    ),
    ("threads", lambda value: counted(value, "thread"), "t{}".format),
    ("protocol_version", "protocol version {}".format, "v{}".format),
)
"""Settings in words, and in the few letters of a file name."""


def setting_words(setting: Mapping[str, Any], names: Container[str]) -> list[str]:
    """Return those settings of a panel, or of a cell, in words; what is as usual needs none."""
    said = [say(setting[name]) for name, say, _ in _WORDS if name in names and setting[name] is not None]
    return [word for word in said if word]


def panel_subtitle(setting: Mapping[str, Any], environments: Mapping[str, Environment], varying: set[str]) -> str:
    """Return machine and every setting."""
    environment = environments.get(setting["environment"])
    machine = str(setting["device"]).upper()
    if environment is not None:
        machine = environment.gpu or machine if setting["device"] == "cuda" else f"{machine} ({environment.cpu})"
    if "environment" in varying:
        machine += f" [{setting['environment'] or 'unknown environment'}]"
    names = {name for name, _, _ in _WORDS if name != "protocol_version" or name in varying}
    if setting["num_kv_heads"] == setting["num_heads"]:
        names.remove("num_kv_heads")
    return ", ".join([machine, *setting_words(setting, names)])


def machine_words(environment: Environment | None) -> str:
    """Return the processor or card that was timed."""
    return "an unknown machine" if environment is None else environment.gpu or environment.cpu


def panel_title(setting: Mapping[str, Any], environments: Mapping[str, Environment], varying: set[str]) -> str:
    """Return what is timed, with whatever else tells this panel from the others of that pass."""
    title = PASS_TITLES.get(setting["pass"], setting["pass"] or "unknown pass")
    extra = setting_words(setting, varying)
    if "device" in varying:
        extra.append(str(setting["device"]).upper())
    if "environment" in varying:
        machine = machine_words(environments.get(setting["environment"]))
        is_one = _is_only(setting["environment"], environments)
        extra.append(machine if is_one else f"{machine} [{setting['environment'] or 'unknown environment'}]")
    return ", ".join([title, *extra])


def _is_only(digest: str, environments: Mapping[str, Environment]) -> bool:
    """Return whether no other environment has the same processor or card."""
    machine = machine_words(environments.get(digest))
    return Counter(map(machine_words, environments.values()))[machine] < 2


_OF_EVERY_MAKER = re.compile(r"\((?:R|TM)\)|\b(?:Processor|CPU|NVIDIA)\b")


def panel_name(setting: Mapping[str, Any], environments: Mapping[str, Environment], varying: set[str]) -> str:
    """Return the pass and whatever else differs between the panels of that pass, as briefly as can be."""

    def brief_machine(digest: str) -> str:
        machine = machine_words(environments.get(digest))
        return _OF_EVERY_MAKER.sub(" ", machine) if _is_only(digest, environments) else digest

    brief: dict[str, Callable[[Any], str]] = {"pass": str, **{name: brief for name, _, brief in _WORDS}}
    brief |= {"device": str, "environment": brief_machine}
    shown = [name for name in brief if name in varying | {"pass"} and setting[name] is not None]
    return slug(*(brief[name](setting[name]) for name in shown))


_HELD = {"step": "weights, gradients, averages and data", "decode": "weights and buffers of the state"}


def held_words(pass_: str) -> str:
    """Return what is there before a call, and counts towards its peak memory."""
    return _HELD.get(pass_, "inputs")


def doubt_words(process_counts: Iterable[int]) -> str:
    """Return what intervals of times know that were sampled in so many processes each; an empty string for none."""
    counts = sorted(set(process_counts))
    if not counts:
        return ""
    within = "the uncertainty within one process only: another run may lie outside"
    if counts[-1] == 1:
        return f"The interval is {within}."
    few = next(count for count in counts if count > 1)
    many = f"{few} to {counts[-1]}" if counts[-1] > few else str(few)
    covers = (
        "A time of several processes is the geometric mean of their medians, so that all count alike; the interval "
        f"covers what differs between the {many} processes that took the samples"
    )
    return f"{covers}; of a single one it is {within}." if counts[0] == 1 else f"{covers}."


@dataclass(frozen=True, slots=True)
class Outcome:
    """Words and mark of one status.

    Args:
        word: for a table cell.
        legend: for a legend entry, a few words.
        brief: for the margin of a figure, two or three words.
        marker: matplotlib marker, distinct without colour.
    """

    word: str
    legend: str
    brief: str
    marker: str


_OOM = Outcome("OOM", "out of memory", "out of memory", "X")

OUTCOMES: Mapping[str, Outcome] = {
    "ok": Outcome("ok", "measured", "measured", "."),
    "unsupported": Outcome("refused", "refused (unsupported)", "refused", "_"),
    "gate_failed": Outcome("wrong", "failed the correctness gate", "wrong result", "v"),
    "oom_device": _OOM,
    "oom_host": _OOM,
    "skipped_after_oom": Outcome("(OOM)", "skipped: a shorter one was out of memory", "skipped after OOM", "x"),
    "timeout": Outcome("timeout", "timeout", "timeout", "s"),
    "crashed": Outcome("crashed", "crashed", "crashed", "P"),
    "diverged": Outcome("diverged", "diverged", "diverged", "D"),
    "error": Outcome("error", "error", "error", "P"),
    "cancelled": Outcome("not run", "not run", "not run", "|"),
}


MARKS: Mapping[str, tuple[str, str, str]] = {
    "host": ("\u00b0", "waiting for the host", "waits for the host, not for the GPU"),
    "throttled": ("\u2020", "of a throttled GPU", "the GPU was throttled or changed its clock"),
    "shared": ("\u2021", "of a busy machine", "something else used the machine meanwhile"),
    "short": ("\u00b6", "too short for the clock", "the clock is a part of samples this short"),
    "uneven": (
        "\u2016",
        "of a usual token where some are dearer",
        "some tokens take longer: their mean, in every process, by 15 % or more",
    ),
    "alone": ("\u00b9", "of one process", "one process only"),
    "few": ("\u00a7", "of few samples", "fewer than five samples, and the interval is no more than their range"),
}
"""What makes a time doubtful: the mark beside the number, and what it means, of many in a few words and of one."""

DISTURBANCES: Mapping[str, str] = {
    "throttled": "throttled",
    "clock_changed": "throttled",
    "other_gpu_process": "shared",
    "loaded_host": "shared",
    "waiting": "shared",
}
"""The mark of each flag of a timing that was disturbed."""

FLAG_MARKS: Mapping[str, str] = {**DISTURBANCES, "too_short": "short"}
"""The mark of each flag that has one. The others are about the spread, which the interval shows, or are in `flags`."""


def worth_a_mark(every: Iterable[Collection[str]]) -> frozenset[str]:
    """Return which doubts of these times get a mark beside their number: what is true of all is said once instead."""
    known = list(every)
    found = frozenset(doubt for doubts in known for doubt in doubts)
    return found - {"alone"} if all("alone" in doubts for doubts in known) else found


def doubt_counts(every: Sequence[Collection[str]], shown: Container[str], without: str = "") -> str:
    """Return how many times are doubtful and why, with the marks that are shown; empty where all is well.

    One doubt is left out that is told elsewhere.
    """
    counts, total, said = Counter(doubt for doubts in every for doubt in doubts), len(every), list[str]()
    for doubt, (mark, words, _) in MARKS.items():
        if not counts[doubt] or doubt == without:
            continue
        number, is_all = counts[doubt], counts[doubt] == total
        first = "the only time " if total == 1 else f"all {total} times " if is_all else f"{number} of {total} times "
        later = "" if total == 1 else "all " if is_all else f"{number} "
        said.append(f"{later if said else first}{words}" + (f"\u00a0{mark}" if doubt in shown else ""))
    return ", ".join(said)


def marks_of(doubts: Iterable[str], shown: Container[str]) -> str:
    """Return the marks that stand behind a number: of its doubts those that are shown."""
    return "".join(MARKS[doubt][0] for doubt in doubts if doubt in shown)


def doubt_list(doubts: Iterable[str], shown: Container[str]) -> str:
    """Return the marks of doubts that are shown, each with what it means in a few words."""
    return ", ".join(f"{MARKS[doubt][0]} {MARKS[doubt][1]}" for doubt in doubts if doubt in shown)


NO_RECORD = "no record"
"""Of a length that others of the panel have: nothing says whether it was planned."""


def missing_word(record: Record) -> str:
    """Return what a table says instead of a number: of a cell that was not run, why the run ended."""
    if record.status == "cancelled" and record.reason in {"time limit", "interrupted"}:
        return record.reason
    return outcome(record.status).word


def outcome(status: str) -> Outcome:
    """Return words and mark of `status`; a status of a newer version is shown under its own name."""
    return OUTCOMES.get(status) or Outcome(status, status, status, "P")


def ceilings_words(ceilings: Ceilings) -> str:
    """Return the figures as half a sentence, with what makes them doubtful."""
    said = (
        f"matrix products {human_flop_rate(ceilings.matmul_flops_per_s)} in {ceilings.dtype}, "
        f"copies {human_bandwidth(ceilings.copy_bytes_per_s)}"
    )
    sheet = [human_flop_rate(ceilings.sheet_flops_per_s)] if ceilings.sheet_flops_per_s else []
    sheet += [human_bandwidth(ceilings.peak_bytes_per_s)] if ceilings.peak_bytes_per_s else []
    if sheet:
        said += f" (data sheet {', '.join(sheet)})"
    doubts = ", ".join(flag.replace("_", " ") for flag in ceilings.flags)
    return f"{said}, doubtful: {doubts}" if doubts else said


def one_seed(number: int) -> str:
    """Return what stands behind a mean over so many seeds, of which one has no interval; empty for more."""
    return " (one seed)" if number == 1 else ""
