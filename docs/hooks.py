"""What mkdocs adds to the pages of this folder: others of the repository, one a variant, tables made from the code."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from attn_zoo.attention import describe
from attn_zoo.attention.build import documented_arguments
from attn_zoo.console import capability_rows, cost_rows, option_rows
from attn_zoo.registry import Variant, variants
from attn_zoo.report.pages.leaderboard import Entry, Machine, read_machines

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from pydantic import BaseModel

ROOT = Path(__file__).parents[1]

PAGES = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md")}
"""Documents of the repository that are pages of the site."""

STATIC = (
    *("benchmarks/*.toml", "benchmarks/*.ipynb", "results/index.html"),
    *("results/*/*/report.html", "results/*/*/figures/*.svg", "results/*/*/cells/*.json"),
)
"""Files that pages link to."""


def own_variants() -> list[Variant]:
    """Return the variants of this package: what else is installed here does not belong into its site."""
    return [variants[name] for name in variants if variants[name].provider == "attn_zoo"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of variants."""
    section = next(entry["Variants"] for entry in config.nav or [] if isinstance(entry, dict) and "Variants" in entry)
    section += [f"variants/{variant.name}.md" for variant in own_variants()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in this folder."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for variant in own_variants():
        files.append(File.generated(config, f"variants/{variant.name}.md", content=variant_page(variant)))
    for pattern in STATIC:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is made from the code, and let links follow: here docs/ and the root of the repository are one."""
    del config, files
    if "/" in page.file.src_uri:
        return markdown  # made here
    markdown = re.sub(
        r"<!-- filled in by docs/hooks.py: (\w+) -->\n\*.*\*\n", lambda match: FILLED[match[1]]() + "\n", markdown
    )
    markdown = re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)
    return re.sub(r"(\]\(results/)((?:[^)/]+/)*)README\.md", _result, markdown)


def _result(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{'report' if match[2] else 'index'}.html"


def variant_page(variant: Variant) -> str:
    """Return everything known about a variant."""
    info = describe(variant.name)
    paper, module = info.reference, inspect.getmodule(variant.attention or variant.mixer)
    assert module is not None
    assert module.__doc__
    source = Path(inspect.getfile(module))
    lines = [
        f"# {info.name}",
        "",
        *_prose(module.__doc__),
        "",
        f'Paper: {paper.authors} {paper.year}, ["{paper.title}"]({paper.url})'
        + (f", equation {paper.equation}" if paper.equation else "")
        + (f"; [authors' code]({paper.code})" if paper.code else "")
        + ".",
        "",
        "## Measured",
        "",
        *measurements(variant.name),
        "## How ours differs",
        "",
        *([f"- {_text(deviation)}" for deviation in paper.deviations] or ["Nothing that we know of."]),
        "",
        "## Claimed cost",
        "",
        *_table(("of a layer", "claim"), cost_rows(info)),
        "",
        (
            "Symbols: B batch size, H heads, L queries, S keys, D head size, E width; others as above. "
            "[Measured beside the claim](../variants.md#claimed-and-measured)."
        ),
        "",
        "## What it can do",
        "",
        *_table(("capability", "answer"), capability_rows(info)),
        "",
        "## Options",
        "",
        *(_table(("option", "default", "what it does"), option_rows(info)) if info.options else ["None."]),
        "",
        f'??? note "Source: attn_zoo/variants/{source.name}"',
        "",
        "    ```python",
        *(f"    {line}" for line in source.read_text(encoding="utf-8").splitlines()),
        "    ```",
    ]
    return "\n".join(lines) + "\n"


@cache
def machines() -> tuple[Machine, ...]:
    """Return what was measured."""
    return read_machines(ROOT / "results")


def measurements(name: str) -> Iterator[str]:
    """Yield a table of the rows of a variant for each run that has some: times that say most, errors, scores."""
    for machine in machines():
        for run in machine.runs:
            shown = set()
            for board in run.boards:
                rows = [row for row, variant in zip(board.rows, board.variants, strict=True) if variant == name]
                if not rows or board.quantity in shown:
                    continue
                shown.add(board.quantity)
                page = f"[{run.name}](../results/{run.where}/report.html)"
                yield from (f"**{machine.words}** ({machine.name}), {page}: {board.title.lower()}", "")
                yield from _table(board.headings, ([_entry(entry) for entry in row] for row in rows))
                yield from ("", '??? note "What was measured, and how to read it"', "", f"    {_text(board.note)}", "")
    yield from ("[All machines and mechanisms](../results/index.html).", "")


def _entry(entry: Entry) -> str:
    text = f"**{_text(entry.text)}**" if entry.is_best else _text(entry.text)
    return f"[{text}](../results/{entry.href})" if entry.href else text


def _prose(documentation: str) -> Iterator[str]:
    """Yield a module's docstring as Markdown: its indented lines are equations."""
    lines = inspect.cleandoc(documentation).splitlines()
    equation: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("    "):
            equation.append(formula(line[4:]))
            continue
        if equation:
            yield from ("", f'<div class="equation">{chr(10).join(equation)}</div>', "")
            equation = []
        yield _text(line)


_LETTERS = {"phi": "φ", "gamma": "\u03b3", "pi": "π", "Theta": "Θ", "sum": "Σ", "sqrt": "√"}
_SIGNS = {"<=": "≤", ">=": "≥", "minus infinity": "\u2212∞"}
_INDEX = r"(?:\{([^{}]*)\}|\(([^()]*)\)|([A-Z]\([a-z]\)|-?\w+))"


def formula(line: str) -> str:
    """Return an equation written in plain text as markup: Greek letters, and what stands below and above the line.

    >>> formula("out_i = sum_j phi(q_i)^T v_j,  j <= i")
    'out<sub>i</sub> = Σ<sub>j</sub> φ(q<sub>i</sub>)<sup>T</sup> v<sub>j</sub>,  j ≤ i'
    >>> formula("S_{n-1} + x_(t - d), 2^(-5-h), W_i^Q, a < b")
    'S<sub>n-1</sub> + x<sub>t - d</sub>, 2<sup>-5-h</sup>, W<sub>i</sub><sup>Q</sup>, a &lt; b'
    """
    for plain, sign in _SIGNS.items():
        line = line.replace(plain, sign)
    line = re.sub(r"(?<![A-Za-z])([A-Za-z]+)(?![A-Za-z])", lambda match: _LETTERS.get(match[1], match[1]), line)
    line = html.escape(line, quote=False)
    for mark, tag in (("_", "sub"), (r"\^", "sup")):
        line = re.sub(mark + _INDEX, rf"<{tag}>\1\2\3</{tag}>", line)
    return line


def _text(text: str) -> str:
    return text.replace("<", "&lt;")


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ("---",) * len(headings), *rows]
    return ["| " + " | ".join(_text(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def variant_list() -> str:
    """Return all variants with what each does."""
    infos = [describe(variant.name) for variant in own_variants()]
    return "\n".join(
        _table(("variant", "what it does"), [(f"[{i.name}](variants/{i.name}.md)", i.summary) for i in infos])
    )


def matrix_keys() -> str:
    """Return the keys of a matrix and of each kind of group, with type, default and meaning."""
    from attn_zoo.matrix.kinds.all_kinds import KINDS
    from attn_zoo.matrix.plan.schema import Matrix

    said = ["### The file", "", *_keys(Matrix, leave_out=("source",))]
    for kind in KINDS:
        entry = kind.group.entry
        said += [
            "",
            f"### `[[{kind.name}]]`",
            "",
            (kind.group.__doc__ or "").partition("\n")[0],
            "",
            *_keys(kind.group),
        ]
        said += ["", f"An entry of `variants`, where it is a table, in `[[{kind.name}]]`:", "", *_keys(entry)]
    return "\n".join(said)


def _keys(model: type[BaseModel], leave_out: tuple[str, ...] = ()) -> list[str]:
    said: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        said |= documented_arguments(inspect.cleandoc(cls.__doc__ or ""))
    schema = model.model_json_schema()
    rows = []
    for name, own in schema["properties"].items():
        if name not in leave_out:
            default = "required" if name in schema.get("required", ()) else f"`{_toml(own.get('default'))}`"
            rows.append((f"`{name}`", _type(own), default.replace("`absent`", "absent"), said.get(name, "")))
    return _table(("key", "type", "default", "means"), rows)


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{_toml(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return (
        {"object": "table", None: "any"}.get(schema.get("type"), str(schema.get("type")))
        if "$ref" not in schema
        else "name or table"
    )


def _toml(value: Any) -> str:
    """Return a value as a matrix writes it; a list of one as its value."""
    if value is None or value == {}:
        return "absent"
    if isinstance(value, list | tuple):
        return _toml(value[0]) if len(value) == 1 else f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"


def commands() -> str:
    """Return the help of every command."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from attn_zoo.cli import app

    group: Any = get_command(app)
    group.commands = {name: command for name, command in group.commands.items() if not command.hidden}
    text = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="attn-zoo"), name="attn-zoo", indent=1)
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", text)  # cut short; the contents beside the page list them
    return text.partition("\n")[2]


def words() -> str:
    """Return the words of DESIGN.md."""
    return (ROOT / "DESIGN.md").read_text(encoding="utf-8").partition("## Words\n")[2]


FILLED: dict[str, Callable[[], str]] = {
    "variants": variant_list,
    "matrix_keys": matrix_keys,
    "commands": commands,
    "words": words,
}
"""What pages may ask to be filled in with."""
