"""What others printed: accuracies and costs from `published.toml`, each with its source. Nothing here is ours."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from attn_zoo.errors import StoreError
from attn_zoo.report.analysis.scores import AccuracyGroup, LabelScore
from attn_zoo.report.tables.table import Column, Note, Row, Table, text_column

FILE = "published.toml"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(_Strict):
    """One row of a published table; see the head of `published.toml`."""

    name: str = Field(min_length=1)
    variant: str = ""
    is_exact: bool = False
    accuracy: dict[str, float | Literal["fail"]] = Field(min_length=1)
    hours: dict[str, float] = {}
    gigabytes: dict[str, float] = {}


class Source(_Strict):
    """One published table."""

    name: str = Field(min_length=1)
    title: str = Field(min_length=1)
    url: str = Field(pattern=r"^https://")
    repository: str = Field(pattern=r"^[^/\s]+/[^/\s]+$")
    setup: str = Field(min_length=1)
    levels: dict[str, tuple[str, ...]]
    model: tuple[Model, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _tasks_have_levels(self) -> Source:
        for model in self.model:
            for values in (model.accuracy, model.hours, model.gigabytes):
                if unknown := sorted(set(values) - set(self.levels)):
                    raise ValueError(f"{model.name}: no level is given for {', '.join(unknown)}")
            if any(not isinstance(value, str) and not 1 < value <= 100 for value in model.accuracy.values()):
                raise ValueError(f"{model.name}: accuracies are in percent")
        return self


def parse_published(text: str) -> tuple[Source, ...]:
    """Return the sources of a TOML text.

    Raises:
        StoreError: it is not TOML, or a field is missing, unknown or out of range.
    """
    try:
        data = tomllib.loads(text)
        return tuple(TypeAdapter(list[Source]).validate_python(data.get("source", [])))
    except tomllib.TOMLDecodeError as error:
        raise StoreError(f"{FILE}: not readable as TOML ({error})") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{FILE}: source.{place}: {first['msg']} ({error.error_count()} problems)") from None


@lru_cache(maxsize=1)
def load_published() -> tuple[Source, ...]:
    """Return the packaged sources."""
    return parse_published((files("attn_zoo.report.tables") / FILE).read_text(encoding="utf-8"))


def published_table(group: AccuracyGroup, variants: Mapping[str, str]) -> Table | None:
    """Return what others printed for the task of `group` beside our scores, or None where nothing is known.

    Every level of the task gets the table, and its note says which one the others used.
    """
    task = group.setting.task
    sources = [source for source in load_published() if task in source.levels]
    same = [source for source in sources if group.setting.level in source.levels[task]]
    sources = same or [source for source in sources if source.levels[task] == sources[0].levels[task]]
    if not sources or group.metric.is_lower_better:
        return None
    rows = _rows(group, sources, variants)
    return Table(
        name=f"published-{group.name}",
        title=f"Published values, not ours: {task}",
        notes=_note(group, sources, has_ours=any(row["ours"] for row in rows)),
        columns=(
            replace(text_column("model", priority=0), brief=lambda text: text.partition(" / ")[0]),
            *(_value_column(source.name) for source in sources),
            text_column("hours, GB (printed)", "cost", priority=3),
            text_column(f"ours ({group.setting.level})", "ours", priority=0.5),
        ),
        rows=tuple(rows),
    )


def _rows(group: AccuracyGroup, sources: Sequence[Source], variants: Mapping[str, str]) -> list[Row]:
    task = group.setting.task
    rows: dict[str, dict[str, Any]] = {}
    for source in sources:
        for model in source.model:
            if task not in model.accuracy:
                continue
            key = model.variant or model.name
            empty = {"model": model.name, "variant": model.variant, "is_exact": model.is_exact}
            row = rows.setdefault(key, empty | {"ours": "", "cost": "", **{one.name: None for one in sources}})
            value = model.accuracy[task]
            row[source.name] = value if isinstance(value, str) else value / 100
            if model.name not in str(row["model"]).split(" / "):
                row["model"] = f"{row['model']} / {model.name}"
            if task in model.hours and task in model.gigabytes:
                row["cost"] = f"{model.hours[task]:g} h, {model.gigabytes[task]:g} GB ({source.name})"
    for key, row in rows.items():
        own = [score for score in group.scores if variants.get(score.label) == key and score.mean is not None]
        row["ours"] = "; ".join(_ours(score, group, is_only=len(own) == 1) for score in own)
    first = sources[0].name
    return sorted(rows.values(), key=lambda row: (not row["is_exact"], not row["variant"], _order(row[first])))


def _order(value: float | str | None) -> float:
    return -value if isinstance(value, float) else 1.0


def _ours(score: LabelScore, group: AccuracyGroup, *, is_only: bool) -> str:
    assert score.mean is not None
    said = group.metric.show(score.mean)
    return said if is_only and not score.start else f"{score.name} {said}"


def _value_column(name: str) -> Column:
    def show(row: Row) -> str:
        value = row[name]
        return f"{100 * value:.1f} %" if isinstance(value, float) else str(value or "")

    return Column(heading=name, show=show, sort=lambda row: row[name] if isinstance(row[name], float) else None)


def _note(group: AccuracyGroup, sources: Sequence[Source], *, has_ours: bool) -> Note:
    task, level = group.setting.task, group.setting.level
    exact = [
        value
        for source in sources
        for model in source.model
        if model.is_exact and isinstance(value := model.accuracy.get(task), float)
    ]
    said = [f"Printed by others and copied by hand; nothing here was run by us{', except the column ours' * has_ours}."]
    theirs = sorted({other for source in sources for other in source.levels[task]})
    if has_ours and level not in theirs:
        said.append(f"Ours is at level {level!r}; theirs correspond to {', '.join(map(repr, theirs))}: do not compare.")
    if len(exact) > 1:
        said.append(
            f"Exact attention alone spreads from {min(exact):.1f} to {max(exact):.1f} % over {len(exact)} "
            f"repositories ({max(exact) - min(exact):.1f} points): a smaller difference between columns says nothing."
        )
    said.append(f"Sources: {', '.join(source.name for source in sources)}, see the table of sources.")
    return said


def sources_table(groups: Sequence[AccuracyGroup]) -> Table | None:
    """Return where the published values of these tasks come from and what to know about them, or None."""
    tasks = {group.setting.task for group in groups}
    rows = [
        {name: getattr(source, name) for name in ("name", "repository", "title", "setup", "url")}
        for source in load_published()
        if tasks & set(source.levels)
    ]
    if not rows:
        return None
    address = text_column("address", "url", priority=0)
    return Table(
        name="published-sources",
        title="Published values: sources",
        notes=(),
        columns=(
            text_column("source", "name", priority=0),
            text_column("what", "title", priority=1),
            text_column("set-up", "setup", priority=4),
            replace(address, brief=lambda url: url.removeprefix("https://"), is_address=True),
        ),
        rows=tuple(rows),
    )
