"""The site of the documents builds without a warning, says what the registry says, and asks other hosts nothing."""

from __future__ import annotations

import doctest
import html
import importlib.util
import logging
import re
from pathlib import Path
from types import ModuleType

import pytest

from attn_zoo.attention import describe
from attn_zoo.registry import variants
from tests.report.pages.test_html import elements

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("material", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")

ROOT = Path(__file__).parents[1]
OWN = [name for name in variants if variants[name].provider == "attn_zoo"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build it, strictly: a broken link or an anchor that is not there ends the build."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder: Path = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    assert config.strict
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    config.plugins.run_event("startup", command="build", dirty=False)
    build(config)
    return folder


def text_of(page: Path) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))).split())


@pytest.mark.parametrize("name", OWN)
def test_every_variant_has_a_page(site, name):
    text, info = text_of(site / "variants" / f"{name}.html"), describe(name)
    for said in (info.reference.title, *info.reference.deviations, *info.capabilities.why.values()):
        assert " ".join(said.replace("`", "").split()) in text
    for option in info.options:
        assert option.name in text
    assert 'class="equation"' in (site / "variants" / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.slow  # to build the site, which two workers would do twice
def test_measurements_stand_on_the_pages_and_lead_to_records(site):
    page = site / "variants" / "linformer.html"
    records = re.findall(r'href="(\.\./results/[^"]+/cells/[0-9a-f]+\.json)"', page.read_text(encoding="utf-8"))
    assert len(records) > 10
    assert all((page.parent / record).is_file() for record in records)


def test_equations_are_set(site):
    assert doctest.testmod(hooks()) == (0, 2)
    assert "softmax(Q K<sup>T</sup> / √(D)) V" in (site / "variants" / "full.html").read_text(encoding="utf-8")


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_references_are_made_from_the_code(site):
    commands, keys, words = (text_of(site / f"{name}.html") for name in ("cli", "matrix", "glossary"))
    assert "attn-zoo data fetch" in commands
    assert "--time-limit" in commands
    for key in ("budget_s", "keep_weights", "has_energy", "description", "num_kv_heads"):
        assert key in keys
    assert "a process on a node of a cluster" in words
    api = text_of(site / "api.html")
    assert "results folder; by default runs/NAME" in api
    assert "Return the fastest variant at each length of each panel" in api


def test_no_page_asks_another_host_for_anything(site):
    pages = [page for page in site.rglob("*.html") if "results" not in page.relative_to(site).parts]
    assert len(pages) > len(OWN) + len(list((ROOT / "docs").glob("*.md")))
    for page in pages:
        for tag, attributes in elements(page.read_text(encoding="utf-8")):
            asked = [attributes.get("src"), attributes.get("href") if tag == "link" else None]
            for target in filter(None, asked):
                is_own = not re.match(r"(https?:)?//", target) or attributes.get("rel") == "canonical"
                assert is_own, f"{page.name}: {tag} {target}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name
