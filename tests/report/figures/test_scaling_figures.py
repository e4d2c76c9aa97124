"""Figures: nothing overlaps, nothing is dropped, the same records give the same bytes."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from attn_zoo.records import Memory
from attn_zoo.registry import variants
from attn_zoo.report.figures import style
from attn_zoo.report.figures.axes import log_axis
from attn_zoo.report.figures.labels import EndLabel, label_room, spread, wrap_detail
from attn_zoo.report.figures.style import DARK, DOTTED, EXACT_COLOURS, MUTED, make_looks, plain
from attn_zoo.report.figures.svg import render
from tests.report.figures.legible import LONG, MANY, assert_legible, one_picture, pictures, texts, words
from tests.report.synthetic import CLAIMS, DOUBLINGS, accuracy, scaling, trained, zoo


def test_the_description_says_of_each_length_why_it_has_no_time(tmp_path):
    records = [scaling("full", 512), scaling("full", 1024), scaling("bigbird", 512)]
    records += [scaling("full", n, status="oom_host", reason="too large") for n in (2048, 4096)]
    records += [scaling("full", 8192, status="timeout", reason="60 s"), scaling("full", 16384, status="oom_host")]
    alt = pictures(tmp_path, records, start="time")[0].alt
    assert "; full: out of memory at 2k, 4k, 16k and timeout at 8k." in alt


def test_twelve_variants_over_twelve_lengths_stay_legible(tmp_path):
    lengths = [512 * 2**power for power in range(12)]
    records = [
        scaling(name, n, (0.2 + 2e-3 * n) * (1 + 0.02 * i)) for i, name in enumerate(MANY[1:-2]) for n in lengths
    ]
    records += [scaling("full", n) for n in lengths[:7]]
    records += [scaling("full", n, status="oom_device", reason="CUDA out of memory") for n in lengths[7:]]
    records += [scaling(MANY[-2], n, status="unsupported", reason="no causal form") for n in lengths]
    records += [scaling(MANY[-1], n, status="timeout", reason="60 s") for n in lengths[2:]]
    records += trained(MANY)
    found = pictures(tmp_path, records)
    assert [picture.name.split("-")[0] for picture in found] == [*("time", "speedup", "memory", "accuracy", "bubbles")]
    for picture in found:
        assert_legible(picture.figure)


@pytest.mark.parametrize(
    ("records", "names"),
    [
        ([], []),
        ([scaling("full", n, status="error", reason="x") for n in DOUBLINGS], []),
        ([scaling("bigbird", 512)], ["time", "memory"]),
        ([scaling("full", 512), scaling("bigbird", 512)], ["time", "speedup", "memory"]),
        ([scaling("full", n) for n in DOUBLINGS], ["time", "memory"]),
        (
            [scaling(v, n, 1.0, spread=0.0) for v in ("full", "v") for n in (512, 700)],
            ["time", "speedup", "memory"],
        ),
        ([accuracy("full", 0, 0.5)], ["accuracy"]),
        ([accuracy("full", seed, 1.0) for seed in (0, 1)], ["accuracy"]),
        ([accuracy("full", 0, None, status="diverged")], []),
    ],
    ids=["empty", "failures", "one-point", "one-length", "one-variant", "identical", "one-seed", "perfect", "diverged"],
)
def test_odd_data_gives_sane_figures(tmp_path, records, names):
    found = pictures(tmp_path, records)
    assert [picture.name.split("-")[0] for picture in found] == names
    for picture in found:
        assert_legible(picture.figure)


def test_figures_of_training_steps_are_legible(tmp_path):
    """What counts towards their memory takes more words than a call's, and extreme factors wider ticks."""
    steps = zoo(lengths=DOUBLINGS[:3], pass_="step", scope="model", protocol="p")
    for picture in pictures(tmp_path / "lengths", steps):
        assert_legible(picture.figure)
    for number, slow_ms in enumerate((35.4, 1e4)):
        costs = {"full": 1.0, "linformer": 1e-3 if number else 0.284, "bigbird": slow_ms, LONG: 1.0}
        for picture in pictures(tmp_path / str(number), [scaling(name, 512, ms) for name, ms in costs.items()]):
            assert_legible(picture.figure)


def test_labels_carry_fitted_and_claimed_slopes_and_the_crossing(tmp_path):
    found = pictures(tmp_path, zoo())
    shown = words(found[0].figure)
    assert "N^0.99 (claimed 1)" in shown
    assert "cheaper: from 1,2" in shown
    assert "N^1.98 (claimed 2)" in shown
    assert "crossover with full" in shown
    assert "full out of memory" in shown
    slopes = {text.get_text() for text in found[0].figure.findobj(Text)}
    assert {"slope 1 (linear)", "slope 2 (quadratic)"} <= slopes
    assert [text for text in ("512", "1k", "2k", "4k", "8k", "16k", "32k") if text not in slopes] == []


def test_speed_up_is_over_the_fastest_exact_kernel(tmp_path):
    records = [scaling("full", n, 10.0, spread=0.0) for n in (512, 1024)]
    records += [scaling("bigbird", n, 2.5, spread=0.0) for n in (512, 1024)]
    picture = one_picture("speedup", tmp_path, records)
    assert "4\u00d7 at 1k" in words(picture.figure)


def test_scores_have_floors_and_seeds(tmp_path):
    picture = pictures(tmp_path, trained())[0]
    shown = words(picture.figure)
    for text in ("chance 10.0 %", "most frequent 17.0 %", "length only 21.0 %", "37.8 % (n=3)"):
        assert text in shown


def test_the_same_records_give_the_same_bytes(tmp_path):
    records = zoo(lengths=[512, 1024])
    first, second = (pictures(tmp_path / name, records, start="time")[0] for name in "ab")
    for kind in ("svg", "png"):
        assert render(first.figure, kind) == render(second.figure, kind)
    svg = render(first.figure, "svg")
    assert b"<dc:date>" not in svg
    assert b"<script" not in svg


def test_a_label_looks_the_same_whatever_else_is_drawn():
    every = [f"v{index}" for index in range(40)]
    found = make_looks(every, ["v3"])
    assert len(set(found.values())) == 40
    assert found["v3"].colour in EXACT_COLOURS
    assert not {found[label].colour for label in every if label != "v3"} & set(EXACT_COLOURS)
    for index, label in enumerate(every):
        alone = make_looks([label], ["v3"])[label]
        if found[label] != alone:  # only quite equal looks give way, by the marker
            assert alone in [found[earlier] for earlier in every[:index]]
            assert (found[label].colour, found[label].line) == (alone.colour, alone.line)


def test_variants_of_the_zoo_have_colours_of_their_own():
    """There are twenty-four: two that are never drawn together, one causal only and the other never, may share one."""
    ours = [variants[name] for name in variants if variants[name].provider == "attn_zoo"]  # none of another test
    others = [each for each in ours if not each.capabilities.is_exact]
    controls = {each.name for each in ours if each.capabilities.is_control}
    assert controls
    for direction in ("causal", "bidirectional"):
        able = [each.name for each in others if getattr(each.capabilities, direction) is not False]
        assert len(able) > 8
        looks = make_looks(able, [], controls)
        assert len({look.colour for look in looks.values()}) == len(able)
        assert all(look.colour in DARK for look in looks.values())


def test_a_later_colour_takes_one_label_of_as_many_as_there_are_colours_and_the_others_keep_theirs(monkeypatch):
    labels = [f"variant {number}" for number in range(4000)]

    def colours():
        return [make_looks([label], [])[label].colour for label in labels]

    now = colours()
    assert set(now) == set(style.COLOURS)
    monkeypatch.setattr(style, "COLOURS", (*style.COLOURS, "#123456"))
    monkeypatch.setattr(style, "_LATER_SALTS", (*style._LATER_SALTS, 7))
    later = colours()
    moved = [after for before, after in zip(now, later, strict=True) if after != before]
    assert set(moved) == {"#123456"}
    assert len(moved) == pytest.approx(len(labels) / len(style.COLOURS), rel=0.2)


def test_exact_kernels_have_strokes_of_their_own():
    kernels = ["full", "torch SDPA", "sdpa cudnn", "sdpa flash", "sdpa efficient", "flex", "only math", "nn.MHA"]
    looks = make_looks(kernels, kernels)
    assert len({(look.colour, look.line) for look in looks.values()}) == len(kernels)
    many = [f"v{index}" for index in range(24)]
    assert len(set(make_looks(many, many).values())) == len(many)


@given(st.text(max_size=60))
def test_any_name_can_be_drawn(name):
    assert len(plain(name).replace("\\$", "$")) <= 24


@given(
    st.lists(st.tuples(st.floats(0, 4), st.floats(0.1, 0.5)), min_size=1, max_size=12),
)
def test_labels_keep_their_order_and_never_overlap(labels):
    labels.sort()
    wanted, heights = [centre for centre, _ in labels], [height for _, height in labels]
    placed = spread(wanted, heights, 0.0, 10.0)
    for index in range(1, len(placed)):
        assert placed[index] - placed[index - 1] >= (heights[index] + heights[index - 1]) / 2 - 1e-9
    assert placed[0] >= heights[0] / 2 - 1e-9
    assert placed[-1] <= 10.0 - heights[-1] / 2 + 1e-9


def test_labels_that_fit_stay_where_they_are():
    assert spread([1.0, 2.0, 3.5], [0.5, 0.5, 0.5], 0.0, 10.0) == [1.0, 2.0, 3.5]
    assert spread([], [], 0.0, 1.0) == []


def test_slopes_are_stated_as_far_as_they_are_known(tmp_path):
    """Two lengths could settle none, bytes have no spread: nothing is said of either."""
    two, *_ = pictures(tmp_path / "two", [scaling(name, n) for name in ("full", "bigbird") for n in (512, 1024)])
    assert "slope not" not in words(two.figure)
    assert "exponent" not in two.alt
    records = [replace(scaling("bigbird", n), memory=Memory(peak_bytes=int(n**1.5))) for n in DOUBLINGS]
    _, memory = pictures(tmp_path / "more", records)
    assert "slope 1.50" in words(memory.figure)
    assert "slope 1.50: no whole power" in memory.alt
    assert "[" not in memory.alt + words(memory.figure)


def test_long_words_beside_curves_are_wrapped_and_not_cut(tmp_path):
    records = [scaling("full", n, ms, spread=0.0) for n, ms in ((2048, 1.0), (8192, 16.0))]
    records += [scaling("bigbird", n, ms, spread=spread) for n, ms, spread in ((2048, 2.0, 0.0), (8192, 16.0, 0.4))]
    for picture in pictures(tmp_path, records)[:2]:
        lines = [text for text, _ in texts(picture.figure)]
        assert "cheaper: not below 5,550, then not settled" in " ".join(lines)
        assert not any("cheaper" in line and "settled" in line for line in lines)
        assert_legible(picture.figure)


@given(st.text(alphabet="ab  W", max_size=80), st.floats(0.4, 3.0))
def test_wrapped_details_keep_their_words_and_their_room(words, most):
    lines = wrap_detail(words, most)
    assert " ".join(lines) == " ".join(words.split())
    for line in lines:
        label = EndLabel("", (line,), "", 0.0, 0.0)
        assert label_room([label]) <= most or " " not in line


def test_lines_to_names_across_a_panel_do_not_look_like_curves(tmp_path):
    records = zoo(["bigbird", "linformer"]) + [scaling("full", n) for n in DOUBLINGS[:-2]] + [scaling("v", 512)]
    (axes,) = pictures(tmp_path, records, start="time")[0].figure.axes
    lines = [text.arrow_patch for text in axes.texts if isinstance(text, Annotation) and text.arrow_patch]
    found = [(line.get_linestyle() == DOTTED, to_hex(line.get_edgecolor()) == MUTED) for line in lines]
    assert sorted(found) == [(False, False)] * 2 + [(True, True)] * 2


def test_claims_are_what_the_run_says(tmp_path):
    claims = {**CLAIMS, "full": {**CLAIMS["full"], "time_exponent": 3}}
    assert "claimed 3" in words(pictures(tmp_path, zoo(["full"]), claims=claims, start="time")[0].figure)


def tips(figure):
    """Return what the marks of a figure say."""
    return re.findall(r"<title>([^<]*)</title>", render(figure, "svg").decode())


def test_one_length_is_rows_of_dots_with_intervals(tmp_path):
    records = [scaling("full", 1024, 10.0), scaling("bigbird", 1024, 2.5)]
    records.append(scaling("linformer", 1024, status="timeout", reason="60 s"))
    time, speed_up, memory = pictures(tmp_path, records)
    for picture in (time, speed_up, memory):
        (axes,) = picture.figure.axes
        assert axes.get_xscale() == "log"
        assert "sequence length" not in words(picture.figure)
        names = [text for text, _ in texts(picture.figure)]
        assert "linformer" in names
        assert_legible(picture.figure)
    assert "timeout" in words(time.figure)
    assert "at 1k tokens; bars: 95 % intervals" in words(time.figure)
    assert [tip.split(":")[0] for tip in tips(time.figure)] == ["bigbird, 1k tokens", "full, 1k tokens"]
    assert time.figure.axes[0].get_xlabel() == "time (logarithmic)"
    rows = [line for line in time.figure.axes[0].get_lines() if len(line.get_xdata()) == 2]
    ends = [(one.timing.low_ms, one.timing.high_ms) for one in records[1::-1] if one.timing]
    assert [tuple(row.get_xdata()) for row in rows] == ends


def on_gpu(variant, seq_len, call_ms, device_ms=None):
    record = scaling(variant, seq_len, call_ms, spread=0.001, device="cuda")
    assert record.timing is not None
    return replace(record, timing=replace(record.timing, graph_ms=device_ms))


def test_the_curve_is_the_device_s_and_calls_are_faint_beside_it(tmp_path):
    costs = {"full": lambda n: 1e-8 * n * n, "bigbird": lambda n: 1e-4 * n}
    records = [
        on_gpu(variant, n, max(0.5, cost(n)) + 0.1, cost(n)) for variant, cost in costs.items() for n in DOUBLINGS
    ]
    time, speed_up = pictures(tmp_path, records)[:2]
    shown = words(time.figure)
    assert "shaded: calls wait for the host" in shown
    assert "inferred" not in shown
    assert "cheaper: from 10,000 (GPU)" in shown
    assert "calls: from 9,890" in shown
    assert "N^2.00 (claimed 2)" in shown
    lines = [(tuple(line.get_ydata()), line.get_alpha()) for line in time.figure.axes[0].get_lines()]
    for cost in costs.values():
        assert (tuple(cost(n) for n in DOUBLINGS), None) in lines
    assert sum(alpha == 0.45 and len(points) == len(DOUBLINGS) for points, alpha in lines) == 2
    assert [tip for tip in tips(time.figure) if "512 tokens: 51.2 µs on the GPU alone; single call 600" in tip]
    assert any("on the GPU alone; as single calls" in tip for tip in tips(speed_up.figure))
    assert_keys_differ(time.figure)


def test_at_one_length_the_interval_of_a_call_has_the_call_beside_it(tmp_path):
    """Alone it would stand apart from the dot, which is of the GPU."""
    time = pictures(tmp_path, [on_gpu("full", 1024, 0.6, 0.1), on_gpu("bigbird", 1024, 0.8)], start="time")[0]
    assert_legible(time.figure)
    shown = words(time.figure)
    assert "100 µs (GPU), call 600 µs" in shown
    assert "faint: calls, where the GPU alone is drawn strong" in shown
    faint = [line for line in time.figure.axes[0].get_lines() if line.get_alpha() == 0.55]
    ends, (call,) = sorted((tuple(line.get_xdata()) for line in faint), key=len, reverse=True)
    assert call == pytest.approx(0.6, rel=0.01)
    assert ends[0] <= call <= ends[1]


def assert_keys_differ(figure):
    (legend,) = figure.legends
    looks = [(one.get_marker(), one.get_linewidth(), one.get_alpha(), one.get_mfc()) for one in legend.legend_handles]
    assert len({*looks}) == len(looks) > 3, looks


@pytest.mark.parametrize("factor", [0.97, 1.4])
def test_an_axis_of_factors_has_more_than_one_tick(tmp_path, factor):
    records = [scaling(name, 512, ms, spread=0.0) for name, ms in (("full", 1.0), ("bigbird", 1.0 / factor))]
    (picture,) = pictures(tmp_path, records, start="speedup")
    shown = [text for text, box in texts(picture.figure) if text.endswith("\u00d7")]
    assert len(shown) > 3, shown


def test_calls_are_hollow_only_where_tables_say_that_they_wait_for_the_host(tmp_path):
    calls = {512: 0.7, 1024: 0.14, 2048: 0.24, 4096: 0.44}
    records = [on_gpu("full", n, call_ms, 1e-4 * n) for n, call_ms in calls.items()]
    records += [on_gpu("bigbird", n, 2 * call_ms, 2e-4 * n) for n, call_ms in calls.items()]
    time, speed_up = pictures(tmp_path, records)[:2]
    marks = [line for line in time.figure.axes[0].get_lines() if line.get_alpha() == 0.7]
    faces = [(int(n), line.get_markerfacecolor() == "white") for line in marks for n in line.get_xdata()]
    assert sorted(faces) == sorted((n, n == 512) for n in calls for _ in range(2))
    for picture in (time, speed_up):
        assert "faint, hollow: calls that wait for the host" in words(picture.figure)
    assert_keys_differ(time.figure)
    busy = pictures(tmp_path / "busy", records[1:4], start="time")[0]
    assert "wait for the host" not in words(busy.figure)


def test_without_device_times_nothing_but_calls_is_drawn_where_the_host_is_waited_for(tmp_path):
    records = [on_gpu("full", n, max(0.5, 1e-6 * n * n)) for n in DOUBLINGS]
    records += [on_gpu("bigbird", n, 0.5) for n in DOUBLINGS]
    shown = words(pictures(tmp_path, records, start="time")[0].figure)
    assert "where the GPU alone was not timed, waiting for the host is inferred" in " ".join(shown.split())
    assert "faint, hollow: calls that wait for the host" in shown


def test_no_line_crosses_a_length_of_which_only_a_call_is_known(tmp_path):
    lengths = DOUBLINGS[:4]
    records = [on_gpu("full", n, 0.5, 0.01 if n == 512 else None) for n in lengths]
    figure = pictures(tmp_path, [*records, on_gpu("full", 2 * lengths[-1], 9.0)], start="time")[0].figure
    curve = next(line for line in figure.axes[0].get_lines() if line.get_linewidth() == 1.9)
    assert [math.isnan(value) for value in curve.get_ydata()] == [False, True, True, True, False]


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("factor", [2.5, 3.0, 8.0, 200.0, 1e5])
def test_a_logarithmic_axis_says_its_scale_wherever_it_begins(base, factor):
    axes = Figure().add_subplot()
    for step in range(100):
        low = 10 ** (-2 + 4 * step / 100)
        log_axis(axes, "y", low, factor * low, str, base)
        assert sum(low <= tick <= factor * low for tick in axes.get_yticks()) >= 3, low
