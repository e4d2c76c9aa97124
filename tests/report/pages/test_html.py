"""The page: self-contained, safe against names, readable in every window, and still working with a keyboard."""

import base64
import hashlib
import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from attn_zoo.records import PROTOCOL_VERSION
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.pages.html import build_page
from attn_zoo.report.pages.write import write_analysis
from attn_zoo.report.tables.all_tables import tables_by_question
from tests.report.pages.browser import CHROMIUM, ask
from tests.report.synthetic import MACHINE, accuracy, analysed, scaling, write_run

EVIL = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
HOSTILE = f'"]}}</title></svg></script>\u2028\u2029{EVIL}'

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to show the page in")


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def elements(text):
    parser = Elements()
    parser.feed(text)
    return parser.found


@pytest.fixture(scope="module")
def page(written):
    return written[0] / "report.html"


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evil")
    reason = f"{EVIL} & 'quotes\" </style> {{{{ 7*7 }}}}"
    records = [scaling(name, n) for name in (EVIL, HOSTILE, "full") for n in (512, 1024)]
    records[0] = replace(records[0], kernels=(HOSTILE,))
    records += [scaling("v", 512, status="error", reason=reason), accuracy(EVIL, 0, 0.3)]
    return write_analysis(analysed(folder, records, name=EVIL), folder)[0]


def test_versions_tasks_and_environments_are_those_of_the_records(tmp_path):
    old = replace(MACHINE, host="abcdefabcdef")
    records = [replace(scaling("full", 512, protocol_version=3), environment="0123456789ab")]
    records += [
        replace(scaling("full", 1024), environment="0123456789ab"),
        replace(accuracy("full", 0, 0.3, protocol_version=2), packages={"strange": "1.0"}),
    ]
    matrices = [{"name": "quick", "description": "Lists, texts."}]
    run = write_run(tmp_path / "run", records, environments={"0123456789ab": old.to_dict()}, matrices=matrices)
    text = build_page(found := analyse([run]), tables_by_question(found), [])
    assert f"record schema 1, accuracy protocol 2, scaling protocol 3 and {PROTOCOL_VERSION}</p>" in text
    assert "<h3>Environment 0123456789ab</h3>" in text
    assert "<p>Variants import strange 1.0.</p>" in text
    assert old.digest not in text
    assert "<li>quick: 3 cells of listops. Its matrix: Lists, texts.</li>" in text
    assert old.host not in text, "a hash of a name that many machines share tells none of them apart"


def test_the_policy_allows_exactly_our_style_and_script(page):
    text = page.read_text(encoding="utf-8")
    policies = [
        attributes["content"]
        for tag, attributes in elements(text)
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    policy = policies[0]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_nothing_outside_is_asked_for(page):
    for tag, attributes in elements(page.read_text(encoding="utf-8")):
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "action", "srcset", "data", "poster"}:
                assert value is not None
                links = ("https://",) if tag == "a" else ()  # nobody is asked before a reader follows one
                assert value.startswith(("#", "data:image/png;base64,", *links)), (tag, name)
    styles = re.findall(r"<style>(.*?)</style>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert "url(" not in styles[0]
    assert "@import" not in styles[0]


def test_every_figure_says_in_words_what_it_shows(page, written):
    found = elements(page.read_text(encoding="utf-8"))
    images = [attributes for tag, attributes in found if tag == "svg" and attributes.get("role") == "img"]
    assert len(images) == len([path for path in written[1] if path.suffix == ".svg"])
    for attributes in images:
        assert attributes["aria-label"]
        assert len(attributes["aria-label"]) > 60
    assert "exponent" in str(images[0]["aria-label"])


def test_names_and_reasons_are_text_not_markup(evil_page):
    text = evil_page.read_text(encoding="utf-8")
    assert [tag for tag, _ in elements(text)].count("script") == 1
    assert "<img src=x" not in text
    assert "49" not in re.sub(r"[^{}4-9]", "", text.split("quotes")[1][:60])
    assert html.escape("<script>document") in text


def test_it_says_what_linear_means_and_shows_machine_and_warnings(tmp_path):
    run = write_run(tmp_path / "run", [scaling("full", 512)])
    (run / "cells" / "bad.json").write_text("{")
    analysis = analyse([run])
    text = build_page(analysis, tables_by_question(analysis), [])
    for words in ("quadratic", "Example CPU", "torch 2.13.0", "cells/bad.json was skipped", "0123456789ab"):
        assert words in text


def test_headings_are_nested_and_tables_have_header_cells(page):
    found = elements(page.read_text(encoding="utf-8"))
    levels = [int(tag[1]) for tag, _ in found if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(attributes.get("scope") in {"col", "row"} for tag, attributes in found if tag == "th")


@needs_chromium
def test_a_few_words_stand_on_one_line_in_a_wide_table(page):
    script = """
      document.querySelector('details#time').open = true;
      const table = document.querySelector('#table-scaling').nextElementSibling.querySelector('table');
      const text = table.tBodies[0].rows[0].cells[1].firstChild, range = document.createRange();
      range.selectNodeContents(text);
      return {text: text.textContent, lines: range.getClientRects().length};
    """
    answer = ask(page, script, width=700)
    assert " " in answer["text"]
    assert answer["lines"] == 1


@needs_chromium
def test_no_sideways_scrolling_at_four_hundred_percent(page):
    answer = ask(page, "return {scroll: document.documentElement.scrollWidth, width: innerWidth};", width=320)
    assert answer["width"] == 320
    assert answer["scroll"] <= 320


@needs_chromium
@pytest.mark.parametrize(("width", "is_print"), [(1120, False), (700, True)])
def test_no_table_is_cut(page, width, is_print):
    """On paper, which cannot be scrolled, no table is; on a usual screen that on top is not."""
    script = """
      for (const part of document.querySelectorAll('details')) part.open = true;
      const rules = [...document.styleSheets[0].cssRules];
      if (IS_PRINT) for (const rule of rules) if (rule.media?.mediaText === 'print') rule.media.mediaText = 'all';
      return {ends: [...document.querySelectorAll(IS_PRINT ? 'table' : '.front table')].map((table) => [
        table.getBoundingClientRect().right, table.parentElement.getBoundingClientRect().right])};
    """
    answer = ask(page, script.replace("IS_PRINT", str(is_print).lower()), width=width)["ends"]
    assert len(answer) >= (8 if is_print else 1)
    for right, end in answer:
        assert right <= end + 1


@needs_chromium
@pytest.mark.parametrize("width", [390, 1280])
def test_figures_are_drawn_in_the_page(page, width):
    """Its policy lets them: colours are there, every reference has a target, and words are as large as on paper."""
    script = """
      for (const part of document.querySelectorAll('details')) part.open = true;
      const figures = [...document.querySelectorAll('.card svg')];
      const uses = [...document.querySelectorAll('use')];
      const paths = [...document.querySelectorAll('.card path')];
      const isBlank = (use) => document.querySelector(use.getAttribute('href'))?.outerHTML.startsWith('<path') &&
        !document.querySelector(use.getAttribute('href')).getAttribute('d'); // a space
      return {
        count: figures.length,
        sizes: figures.map((figure) => [figure.getBoundingClientRect().width, figure.getBoundingClientRect().height]),
        boxes: figures.map((figure) => [figure.viewBox.baseVal.width, figure.viewBox.baseVal.height]),
        lost: uses.filter((use) => !document.querySelector(use.getAttribute('href'))).length,
        empty: uses.filter((use) => !isBlank(use) && !(use.getBBox().width + use.getBBox().height)).length,
        coloured: paths.filter((path) => getComputedStyle(path).stroke !== 'none').length,
        cut: [...document.querySelectorAll('.card text')].filter(
          (text) => text.getBoundingClientRect().right > innerWidth).length,
        shared: document.querySelector('.shared').getBoundingClientRect().height,
      };
    """
    answer = ask(page, script, width=width)
    assert answer["count"] == 5
    for (width_px, height_px), (box_width, box_height) in zip(answer["sizes"], answer["boxes"], strict=True):
        assert width_px >= min(width - 40, 400)
        assert width_px / height_px == pytest.approx(box_width / box_height, rel=0.01)
    assert (answer["lost"], answer["empty"], answer["cut"], answer["shared"]) == (0, 0, 0, 0)
    assert answer["coloured"] > 100


@needs_chromium
def test_headings_sort_by_value_with_missing_last(page):
    script = """
      document.querySelector('details#time').open = true;
      const table = document.querySelector('#table-scaling').nextElementSibling.querySelector('table');
      const index = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === 'time');
      const button = table.tHead.rows[0].cells[index].querySelector('button');
      const read = () => [...table.tBodies[0].rows].map((row) => row.cells[index].dataset.sort ?? null);
      button.focus();
      const hasFocus = document.activeElement === button;
      button.click(); const up = read(); const mark = button.closest('th').getAttribute('aria-sort');
      button.click(); const down = read();
      return {hasFocus, up, down, mark};
    """
    answer = ask(page, script)
    assert answer["hasFocus"]
    assert answer["mark"] == "ascending"
    numbers = [float(value) for value in answer["up"] if value is not None]
    assert numbers == sorted(numbers)
    assert answer["up"][-1] is None
    assert [float(value) for value in answer["down"] if value is not None] == numbers[::-1]
    assert answer["down"][-1] is None


@needs_chromium
@pytest.mark.parametrize(("scheme", "is_dark"), [("0", True), ("1", False)])
def test_follows_the_colour_scheme_and_keeps_contrast(page, scheme, is_dark):
    script = """
      const colours = (element) => getComputedStyle(element);
      return {page: colours(document.body).backgroundColor, ink: colours(document.body).color,
              muted: colours(document.querySelector('.note')).color,
              card: colours(document.querySelector('.card')).backgroundColor,
              paper: colours(document.querySelector('.card path')).fill,
              figure: colours(document.querySelector('.card text')).fill};
    """
    answer = ask(page, script, f"--blink-settings=preferredColorScheme={scheme}")

    def light(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert (light(answer["page"]) < 0.1) == is_dark
    assert answer["card"] == answer["paper"] == answer["page"]
    for text in ("ink", "muted", "figure"):
        pair = sorted((light(answer["page"]), light(answer[text])))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


@needs_chromium
def test_marks_keys_and_scale_of_a_figure(page):
    """Arrow keys walk along the marks, a name hides its curve, linear axes have values where they belong."""
    script = """
      const card = document.querySelector('.card'), tip = document.querySelector('.tip');
      const type = (target, key) => target.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
      const places = (label) => [...card.querySelectorAll(`[data-of="${label}"] use[data-tip]`)].map(
        (mark) => [Number(mark.getAttribute('x')), Number(mark.getAttribute('y')), mark.dataset.tip]).slice(-3);
      const isShown = (label) => [...card.querySelectorAll(`[data-of="${label}"]`)].some(
        (part) => getComputedStyle(part).display !== 'none');
      const hints = document.querySelectorAll('.card use > title').length;
      type(card, 'ArrowRight'); const failed = tip.textContent;
      type(card, 'ArrowRight'); const first = tip.textContent;
      type(card, 'ArrowRight'); type(card, 'ArrowLeft'); const again = tip.textContent;
      const box = card.querySelectorAll('use[data-tip]')[1].getBoundingClientRect();
      type(card, 'Escape'); const isGone = tip.hidden;
      card.dispatchEvent(new PointerEvent('pointermove', {clientX: box.x + 2, clientY: box.y + 2, bubbles: true}));
      const pointed = tip.textContent;
      const key = card.querySelector('[data-key="bigbird"]'); key.focus();
      const hasFocus = document.activeElement === key;
      type(key, 'Enter'); const hidden = [isShown('bigbird'), isShown('full'), key.getAttribute('aria-pressed')];
      const before = places('full'), curve = card.querySelector('svg');
      const button = card.nextElementSibling.querySelector('.scale'); button.click();
      const linear = places('full'), still = isShown('bigbird');
      const axes = [...card.querySelectorAll('[data-axes]')].at(-1).dataset.axes.split(' ');
      const numbers = [...card.querySelectorAll('[data-axes] text')].filter(
        (text) => text.getClientRects().length).map((text) => text.textContent);
      button.click();
      card.querySelector('[data-key="bigbird"]').dispatchEvent(new MouseEvent('click', {bubbles: true}));
      return {hints, failed, first, again, isGone, pointed, hasFocus, hidden, before, linear, still, axes, numbers,
              restored: JSON.stringify(places('full')) === JSON.stringify(before), shown: isShown('bigbird')};
    """
    answer = ask(page, script)
    assert answer["hints"] == 0  # the browser's own would stand over ours
    assert answer["first"] == answer["again"] == answer["pointed"]
    assert re.fullmatch(r"bigbird, 512 tokens: [\d.]+ ms \[[\d.]+, [\d.]+\]; math", answer["first"])
    assert answer["failed"] == "full, 4k tokens: needed 34.4 GB, 8.6 GB present"
    assert answer["isGone"]
    assert answer["hasFocus"]
    assert answer["hidden"] == [False, True, "false"]
    assert not answer["still"]
    assert answer["restored"]
    assert answer["shown"]
    left, _, right, bottom, _, low, high, *_ = (float(part) if part != "log" else 0 for part in answer["axes"])
    assert [tip for *_, tip in answer["linear"]] == [tip for *_, tip in answer["before"]]
    for (x, y, tip), length in zip(answer["linear"], (512, 1024, 2048), strict=True):
        assert x == pytest.approx(left + (right - left) * (length - low) / (high - low), abs=0.3), tip
        assert y <= bottom
    assert any(re.fullmatch(r"[\d.]+ ms", number) for number in answer["numbers"])
    assert "slope 1 (linear)" not in answer["numbers"]


@needs_chromium
def test_rows_are_filtered_by_words_in_any_column_or_in_one(page):
    script = """
      document.querySelector('details#time').open = true;
      const table = document.querySelector('#table-scaling').nextElementSibling.querySelector('table');
      const [words, column] = table.previousElementSibling.querySelectorAll('input, select');
      const count = () => [...table.tBodies[0].rows].filter((row) => row.getClientRects().length).length;
      const ask = (text, index) => {
        words.value = text; column.value = index; words.dispatchEvent(new Event('input')); return count(); };
      const said = words.parentElement.querySelector('output');
      return {all: ask('', -1), bigbird: ask('BigBird', -1), said: said.textContent, column: ask('bigbird', 0),
              other: ask('bigbird', 2), none: ask('<b>', -1), back: ask('', 2), rows: table.tBodies[0].rows.length};
    """
    answer = ask(page, script)
    assert answer["all"] == answer["back"] == answer["rows"]
    assert answer["bigbird"] == answer["column"] == 4
    assert answer["said"] == f"4 of {answer['rows']}"
    assert answer["other"] == answer["none"] == 0


@needs_chromium
def test_hostile_names_in_figures_are_words(evil_page):
    script = """
      const card = document.querySelector('.card'), tip = document.querySelector('.tip');
      const press = () => [...card.querySelectorAll('[data-key]')].map(
        (key) => key.dispatchEvent(new MouseEvent('click', {bubbles: true})));
      press(); document.querySelector('.scale').click(); press();
      const tips = [...card.querySelectorAll('use[data-tip]')].map(() => {
        card.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
        return tip.textContent; });
      return {title: document.title, images: document.querySelectorAll('img').length, tips,
              scripts: document.querySelectorAll('script').length, children: tip.children.length,
              of: [...new Set([...card.querySelectorAll('[data-of]')].map((part) => part.dataset.of))]};
    """
    answer = ask(evil_page, script)
    assert answer["title"] != "owned"
    assert (answer["images"], answer["children"], answer["scripts"]) == (0, 0, 2)  # ours and the probe
    assert any(words.startswith('"]}</title></svg></script> <script>document.title') for words in answer["tips"])
    assert any(f"; {HOSTILE[:6]}" in words for words in answer["tips"])
    assert {EVIL, HOSTILE.replace("\u2028\u2029", " ")} <= set(answer["of"])


@needs_chromium
def test_an_injected_script_does_not_run(evil_page):
    injected = evil_page.read_text(encoding="utf-8").replace("</main>", f"{EVIL}</main>")
    path = evil_page.with_name("injected.html")
    path.write_text(injected, encoding="utf-8")
    for page in (evil_page, path):
        answer = ask(page, "return {title: document.title};")
        assert answer["title"] != "owned"


def test_addresses_of_published_values_are_links(page):
    """The words of a record are none, whatever they look like: only a whole address of ours is one."""
    links = [attributes for tag, attributes in elements(page.read_text(encoding="utf-8")) if tag == "a"]
    addresses = [str(attributes["href"]) for attributes in links if str(attributes["href"]).startswith("https:")]
    assert len(addresses) == len({*addresses}) > 2
    assert all(re.fullmatch(r"https://[\w.-]+/[\w./-]+", address) for address in addresses)


def test_a_question_is_no_heading_twice(page):
    headings = re.findall(r"<h[23][^>]*>([^<]*)</h[23]>", page.read_text(encoding="utf-8"))
    assert len(headings) > 8
    assert len({text.rstrip("?") for text in headings}) == len(headings)


def test_paper_has_room_for_whole_numbers(page):
    """Columns that it has none for are said; an interval is broken between its ends, a number never is."""
    text = page.read_text(encoding="utf-8")
    (table,) = re.findall(r'<h3 id="table-scaling">.*?<p class="note paper">[^<]*</p>', text, re.DOTALL)
    headings = re.findall(r'<th scope="col" class="([^"]*)"><button type="button">([^<]*)</button>', table)
    unprinted = [heading for classes, heading in headings if "extra" in classes.split()]
    assert "kernel" in unprinted
    assert {"variant", "time", "speed-up"}.isdisjoint(unprinted)
    assert f'<p class="note paper">Not printed: {", ".join(unprinted)}.</p>' in table
    (row,) = re.findall(r"<tr><th [^>]*>full</th>.*?</tr>", table)[:1]
    assert len(re.findall(r'class="[^"]*\bextra"', row)) == len(unprinted)
    assert re.search(r'ms <span class="ends">\[[\d.]+, [\d.]+\]', row)


def test_a_number_stays_with_its_unit(written):
    text = written[1][0].read_text(encoding="utf-8")
    assert len(re.findall(r"\d\u00a0(?:%|ms|MiB)", text)) > 20
    shown = re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style|svg)\b.*?</\1>", "", text, flags=re.DOTALL))
    assert re.findall(r"\d (?:%|ms|MiB)", shown) == []
