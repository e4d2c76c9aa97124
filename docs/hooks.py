"""What mkdocs adds to the pages of this folder: others of the repository, one a variant, tables made from the code."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from attn_zoo.attention import describe
from attn_zoo.console import capability_rows, cost_rows, option_rows
from attn_zoo.docs import markdown_table, markdown_text
from attn_zoo.registry import Variant, variants
from attn_zoo.report.pages.leaderboard import Entry, Machine, read_machines

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

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
        *([f"- {markdown_text(deviation)}" for deviation in paper.deviations] or ["Nothing that we know of."]),
        "",
        "## Claimed cost",
        "",
        *markdown_table(("of a layer", "claim"), cost_rows(info)),
        "",
        (
            "Symbols: B batch size, H heads, L queries, S keys, D head size, E width; others as above. "
            "[Measured beside the claim](../variants.md#claimed-and-measured)."
        ),
        "",
        "## What it can do",
        "",
        *markdown_table(("capability", "answer"), capability_rows(info)),
        "",
        "## Options",
        "",
        *(markdown_table(("option", "default", "what it does"), option_rows(info)) if info.options else ["None."]),
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
                yield from markdown_table(board.headings, ([_entry(entry) for entry in row] for row in rows))
                yield from (
                    "",
                    '??? note "What was measured, and how to read it"',
                    "",
                    f"    {markdown_text(board.note)}",
                    "",
                )
    yield from ("[All machines and mechanisms](../results/index.html).", "")


def _entry(entry: Entry) -> str:
    text = f"**{markdown_text(entry.text)}**" if entry.is_best else markdown_text(entry.text)
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
        yield markdown_text(line)


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


def variant_list() -> str:
    """Return all variants with what each does."""
    infos = [describe(variant.name) for variant in own_variants()]
    return "\n".join(
        markdown_table(("variant", "what it does"), [(f"[{i.name}](variants/{i.name}.md)", i.summary) for i in infos])
    )


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
    """Return the words of DESIGN.md, from its table on: the sentence above leads here."""
    section = (ROOT / "DESIGN.md").read_text(encoding="utf-8").partition("## Words\n")[2]
    return section[section.index("| word |") :]


FILLED: dict[str, Callable[[], str]] = {
    "variants": variant_list,
    "commands": commands,
    "words": words,
}
"""What pages may ask to be filled in with."""
