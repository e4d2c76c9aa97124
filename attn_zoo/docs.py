"""Generated documents: tables of variants, the keys of a matrix, the front page of results."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_zoo.console import in_toml
from attn_zoo.errors import ConfigError
from attn_zoo.metadata import big_o

if TYPE_CHECKING:
    from pydantic import BaseModel

    from attn_zoo.registry import Variant

_ANSWERS: dict[object, str] = {True: "yes", False: "no", "masked": "masked, routing sees the future"}


def variant_table() -> str:
    """Return the Markdown table of all registered variants of this package."""
    rows = []
    for name, variant in _own_variants():
        can, cost, paper = variant.capabilities, variant.complexity, variant.reference
        rows.append(
            (
                f"`{name}`",
                big_o(cost.time),
                big_o(cost.memory),
                _ANSWERS[can.causal] if can.bidirectional else "only",
                _ANSWERS[can.cross_attention],
                _ANSWERS[can.key_padding_mask],
                can.decode.replace("_", " ").replace("none", "no"),
                _ANSWERS[can.is_exact],
                f"[{paper.authors} {paper.year}]({paper.url})",
            )
        )
    headings = ("variant", "claimed time", "memory", "causal", "cross", "padding", "decode", "exact", "paper")
    return "\n".join(markdown_table(headings, rows))


def _own_variants() -> list[tuple[str, Variant]]:
    from attn_zoo.registry import variants

    return [(name, variants[name]) for name in variants if variants[name].provider == "attn_zoo"]


def complexity_table() -> str:
    """Return the Markdown table of "Attention Is All You Need", table 1: claims and measured exponents."""
    from attn_zoo.conformance import Growth, measure_complexity

    def exponents(growths: list[Growth]) -> str:
        """Return the exponent, that of the causal form too where it is another."""
        words = list(dict.fromkeys(growth.in_words() for growth in growths))
        return " (causal: ".join(words) + ")" * (len(words) - 1)

    rows = []
    for name, variant in _own_variants():
        cost, found = variant.complexity, measure_complexity(name)
        rows.append(
            (
                f"`{name}`",
                big_o(cost.time),
                exponents([row.cost for row in found]),
                big_o(cost.sequential_ops),
                exponents([row.sequential_ops for row in found]),
                big_o(cost.max_path),
                exponents([row.max_path for row in found]),
            )
        )
    headings = ("cost of a layer", "counted", "sequential operations", "measured", "maximum path", "measured")
    return "\n".join(markdown_table(("variant", *headings), rows))


def matrix_keys() -> str:
    """Return the keys of a matrix and of each kind of group, with type, default and meaning; shared ones once."""
    from attn_zoo.matrix.kinds.all_kinds import KINDS
    from attn_zoo.matrix.plan.schema import Matrix

    said = ["### The file", "", *_key_table([row for row in _keys(Matrix) if row[0] != "`source`"])]
    groups = {kind.name: _keys(kind.group) for kind in KINDS}
    entries = {kind.name: _keys(kind.group.entry) for kind in KINDS}
    everywhere, in_entries = (
        [row for row in next(iter(rows.values())) if all(row in others for others in rows.values())]
        for rows in (groups, entries)
    )
    said += ["", "### Every group", "", *_key_table(everywhere)]
    said += ["", "An entry of `variants`, where it is a table:", "", *_key_table(in_entries)]
    for kind in KINDS:
        own, beside = (
            [row for row in rows[kind.name] if row not in shared]
            for rows, shared in ((groups, everywhere), (entries, in_entries))
        )
        summary = (kind.group.__doc__ or "").partition("\n")[0]
        said += ["", f"### `[[{kind.name}]]`", "", summary, "", *_key_table(own)]
        if beside:
            said += ["", "An entry of `variants`, where it is a table, besides:", "", *_key_table(beside)]
    return "\n".join(said)


def _keys(model: type[BaseModel]) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each field."""
    from attn_zoo.attention.build import documented_arguments

    said: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        said |= documented_arguments(inspect.cleandoc(cls.__doc__ or ""))
    schema = model.model_json_schema()
    rows = []
    for name, own in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else f"`{_toml(own.get('default'))}`"
        rows.append((f"`{name}`", _type(own), default.replace("`absent`", "absent"), said.get(name, "")))
    return rows


def _key_table(rows: Iterable[Sequence[str]]) -> list[str]:
    return markdown_table(("key", "type", "default", "means"), rows)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{_toml(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "$ref" in schema:
        return "name or table"
    return {"object": "table", None: "any"}.get(schema.get("type"), str(schema.get("type")))


def _toml(value: Any) -> str:
    """Return a value as a matrix writes it; a list of one as its value."""
    if value is None or value == {}:
        return "absent"
    return in_toml(value[0] if isinstance(value, list) and len(value) == 1 else value)


def markdown_text(text: str) -> str:
    """Return text of which no part is taken for a tag.

    >>> markdown_text("a < b in `<c>`")
    'a &lt; b in `<c>`'
    """
    return re.sub("(`[^`]*`)|<", lambda match: match[1] or "&lt;", text)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [headings, ("---",) * len(headings), *rows]
    return ["| " + " | ".join(markdown_text(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


DOCUMENTS = ("README.md", "docs/variants.md", "docs/matrix.md")
"""What has generated tables, below the root of the repository."""

_TABLES: dict[str, Callable[[], str]] = {
    "variants": variant_table,
    "complexity": complexity_table,
    "matrix_keys": matrix_keys,
}


def update_tables(path: Path, *, check_only: bool = False) -> bool:
    """Write the generated tables of a document anew; return whether they were current already.

    Raises:
        ConfigError: there is no table between markers.
    """
    text = new = path.read_text(encoding="utf-8")
    found = re.findall(r"<!-- (\w+): generated by make docs -->\n", text)
    for title in found:
        start, end = f"<!-- {title}: generated by make docs -->\n", f"<!-- /{title} -->"
        if title not in _TABLES or end not in new.partition(start)[2]:
            raise ConfigError(path.name, [("", f"expected one of {', '.join(_TABLES)} and the marker {end}")])
        head, _, rest = new.partition(start)
        new = f"{head}{start}{_TABLES[title]()}\n{end}{rest.partition(end)[2]}"
    if not found:
        raise ConfigError(path.name, [("", f"expected markers around a table: {', '.join(_TABLES)}")])
    if new != text and not check_only:
        path.write_text(new, encoding="utf-8")
    return new == text


def update_results_index(folder: Path, *, check_only: bool = False) -> bool:
    """Write `README.md` and `index.html` of the results folder anew; return whether both said the same already.

    A page that only looks otherwise is as true as before: reports of runs are not written anew for a colour either.
    """
    from attn_zoo.report.pages.leaderboard import front_pages

    is_current = True
    for path, text in front_pages(folder).items():
        is_current &= path.is_file() and _body(path.read_text(encoding="utf-8")) == _body(text)
        if not check_only:
            path.write_text(text, encoding="utf-8")
    return is_current


def _body(page: str) -> str:
    """Return a page without its style and script."""
    return re.sub(r"^.*<body>|<script>.*$", "", page, flags=re.DOTALL)
