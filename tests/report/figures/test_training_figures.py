"""Figures of training: legible with many variants and floors, honest scales, nothing missing drawn as nought."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from attn_zoo.records import Status
from attn_zoo.report.analysis.analyse import analyse
from tests.report.figures.legible import LONG, MANY, assert_legible, one_picture, pictures, texts, words
from tests.report.synthetic import CLAIMS, accuracy, curve, tuned


def training(variant, seed, value, **score):
    numbers = {
        "curve": curve(0.1, value),
        "train_flops": 2e13,
        "peak_bytes": 2**30 // len(variant),
        "floors": {f"trivial_model_{index}": 0.1 + 0.011 * index for index in range(8)},
    }
    return accuracy(variant, seed, value, score=numbers | score)


def by_kind(found):
    return {picture.name.partition("-")[0]: picture for picture in found}


def test_many_floors_many_variants_and_all_figures_stay_legible(tmp_path):
    cells = [{"seq_len": n, "value": min(1.0, 40 / n), "num_items": 9.0} for n in (64.0, 128.0, 256.0, 1024.0, 4096.0)]
    records = [training(name, seed, 0.3 + 0.04 * i + 0.01 * seed, breakdown=tuple(cells))
               for i, name in enumerate(MANY) for seed in range(3)]  # fmt: skip
    found = pictures(tmp_path, records)
    assert list(by_kind(found)) == ["accuracy", "bubbles", "learning", "breakdown"]
    for picture in found:
        assert_legible(picture.figure)
        assert len(picture.alt) > 60


def test_heat_maps_of_many_variants_stay_legible(tmp_path):
    cells = tuple(
        {"seq_len": n, "depth": d, "value": 0.5 + 0.01 * d, "num_items": 9.0}
        for n in (64.0, 128.0, 256.0, 512.0, 1024.0)
        for d in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    records = [training(name, 0, 0.3, breakdown=cells, pretrain="masked") for name in MANY[-4:]]
    assert_legible(one_picture("breakdown", tmp_path, records).figure)


def test_bubbles_in_one_place_keep_their_names_apart(tmp_path):
    records = [training(f"variant_{index}", 0, 0.5 + 1e-4 * index, tokens_per_s=1e4, floors={}) for index in range(9)]
    picture = one_picture("bubbles", tmp_path, records)
    assert_legible(picture.figure)
    assert all(f"variant_{index}" in words(picture.figure) for index in range(9))


def test_floors_are_named_where_no_bar_crosses_them(tmp_path):
    """The bar of one runs from below the floor to above it, wherever its name would stand beside the line."""
    values = {"full": (0.36, 0.35, 0.36), "bigbird": (0.35, 0.35, 0.36), "linformer": (0.25, 0.31, 0.40)}
    speeds = {"full": 7e4, "bigbird": 3e4, "linformer": 5e4}
    floors = {"symbol_histogram": 0.355}
    records = [
        training(name, seed, value, floors=floors, tokens_per_s=speeds[name])
        for name, own in values.items()
        for seed, value in enumerate(own)
    ]
    picture = one_picture("bubbles", tmp_path, records)
    assert "level lines: symbol histogram 35.5 %, chance 10.0 %" in " ".join(words(picture.figure).split())
    assert not any("histogram" in text.get_text() for axes in picture.figure.axes for text in axes.texts)


@pytest.mark.parametrize(
    ("more", "name", "scores"),
    [
        ({}, "a_variant_of_some_length", [0.54] * 3),
        ({"best_of_all_the_floors": 0.422, "root_operator": 0.245}, "linformer-k32", [0.36, 0.3, 0.27]),
    ],
)
def test_the_name_of_a_floor_lies_across_no_line(tmp_path, more, name, scores):
    """Of listops one is as long as the left half of the axes, and stood across their edge; the best has no room."""
    floors = {"symbol_histogram": 0.356, "root_operator": 0.235, "majority": 0.114, **more}
    found = pictures(tmp_path, [training(name, seed, score, floors=floors) for seed, score in enumerate(scores)])
    figure = by_kind(found)["accuracy"]
    (axes,) = figure.figure.axes
    edge = axes.get_window_extent().x0
    names = ("symbol hist", "root op", "majority", "chance 10", "best of all")
    shown = [box for text, box in texts(figure.figure) if text.startswith(names)]
    assert len(shown) == len(floors) + 1
    for box in shown:
        assert box.x0 > edge
        lines = [line for line in axes.get_lines() if line.get_linestyle() != "None" and len(line.get_xdata()) == 2]
        for line in lines:
            (x, top), (_, low) = axes.transData.transform(np.column_stack(line.get_data()))
            is_beside = not box.x0 < x < box.x1 or not min(top, low) < (box.y0 + box.y1) / 2 < max(top, low)
            assert is_beside or top == low, line.get_data()


def test_the_area_of_a_bubble_is_its_memory(tmp_path):
    records = [training("full", 0, 0.5, peak_bytes=400 * 2**20), training("bigbird", 0, 0.4, peak_bytes=100 * 2**20)]
    picture = one_picture("bubbles", tmp_path, records)
    sizes = sorted({round(float(size), 3) for axes in picture.figure.axes[:1] for drawn in axes.collections
                    for size in np.asarray(drawn.get_sizes())})  # fmt: skip
    assert sizes[1] / sizes[0] == pytest.approx(4.0)
    assert "400 MiB" in words(picture.figure)


def test_memory_that_was_not_measured_is_said(tmp_path):
    records = [training("full", 0, 0.5, peak_bytes=None), training("bigbird", 0, 0.4)]
    assert "memory not measured: full" in words(one_picture("bubbles", tmp_path / "a", records).figure)
    records = [training(name, 0, 0.5, peak_bytes=None) for name in ("full", "bigbird")]
    shown = words(one_picture("bubbles", tmp_path / "b", records).figure)
    assert "memory not measured" in shown
    assert "peak memory" not in shown


def test_a_chance_far_away_does_not_flatten_the_picture(tmp_path):
    numbers = {"metric": "bits_per_byte", "chance": 8.0, "floors": {"trigram": 2.5, "last_byte": 7.0}, "correct": ""}
    records = [training(name, seed, 2.0 + 0.1 * i, **numbers) for i, name in enumerate(CLAIMS) for seed in (0, 1)]
    for name in ("accuracy", "bubbles"):
        picture = one_picture(name, tmp_path / name, records)
        assert_legible(picture.figure)
        also = ", last byte 7.000" if name == "accuracy" else ""  # the other floors are in that one
        assert f"off the scale: chance 8.000{also}" in words(picture.figure)
        axes = picture.figure.axes[0]
        assert max(axes.get_ylim() if name == "bubbles" else axes.get_xlim()) < 4.0
        assert "lower is better" in words(picture.figure)


def test_heat_maps_share_one_scale_and_show_their_numbers(tmp_path):
    def cells(top):
        return tuple(
            {"seq_len": n, "depth": d, "value": top - 0.1 * d, "num_items": 5.0}
            for n in (64.0, 128.0, 256.0) for d in (0.0, 0.5, 1.0)
        )  # fmt: skip

    records = [training(name, 0, 0.5, breakdown=cells(0.9 - 0.2 * i)) for i, name in enumerate(CLAIMS)]
    picture = one_picture("breakdown", tmp_path, records)
    assert_legible(picture.figure)
    images = [axes.images[0] for axes in picture.figure.axes if axes.images]
    assert len(images) == 3
    (bar,) = (axes for axes in picture.figure.axes if not axes.images)
    assert {(image.norm.vmin, image.norm.vmax) for image in images} == {bar.get_ylim()}
    assert images[0].get_array().shape == (3, 3)  # depth upwards, length to the right
    assert "90" in words(picture.figure).split()
    shown = words(picture.figure)
    assert "by sequence length and depth: listops" in shown
    assert "sequence length\n(tokens)" in shown
    assert "dashed on the scale: chance 10.0 %" in " ".join(shown.split())
    assert "best floor, of all examples together: trivial model 7 17.7 %" in " ".join(shown.split())


def test_long_names_and_many_outcomes_leave_room_for_the_scores(tmp_path):
    outcomes: tuple[Status, ...] = ("timeout", "skipped_after_oom", "gate_failed")
    records = [accuracy(LONG, seed, None, status=status) for seed, status in enumerate(outcomes)]
    records += [training("full", seed, value) for seed, value in enumerate((0.05, 0.95))]
    picture = one_picture("accuracy", tmp_path, records)
    assert_legible(picture.figure)
    assert picture.figure.axes[0].get_window_extent().width > 100, "pixels for the scores"
    assert "timeout and 2 more" in words(picture.figure)


@pytest.mark.parametrize(
    ("name", "title", "axis"),
    [
        ("num_pairs", "number of pairs", "number of pairs"),
        ("key_len", "key length", "key length (tokens)"),
        ("depth_percent", "depth", "depth (%)"),
        ("distance", "distance", "distance"),
    ],
)
def test_properties_of_examples_are_words_with_units(tmp_path, name, title, axis):
    cells = tuple({name: float(n), "value": 1.0 / n, "num_items": 9.0} for n in (2, 4, 8))
    picture = one_picture("breakdown", tmp_path, [training("full", 0, 0.5, breakdown=cells)])
    assert f"by {title}:" in words(picture.figure)
    assert picture.figure.axes[0].get_xlabel() == axis


def test_curves_at_the_end_of_the_scale_are_drawn_whole(tmp_path):
    cells = tuple({"distance": float(n), "value": 1.0, "num_items": 9.0} for n in (2, 4, 8))
    found = by_kind(pictures(tmp_path, [training("full", 0, 1.0, breakdown=cells)]))
    for name in ("learning", "breakdown"):
        lines = [(axes.get_ylim()[1], line) for axes in found[name].figure.axes for line in axes.get_lines()]
        at_end = [line for end, line in lines if max(line.get_ydata()) == 1.0 == end]
        assert at_end, name
        assert not any(line.get_clip_on() for line in at_end)


def test_an_interval_that_excludes_next_to_nothing_is_said_and_not_drawn(tmp_path):
    # 95 % t-intervals: beyond 0 and 1, from 0.08 to 1, of 0.05.
    scores = {"full": (0.1, 0.5, 0.9), "bigbird": (0.36, 0.55, 0.74), "linformer": (0.5, 0.51, 0.52)}
    records = [
        training(name, seed, value, breakdown=({"pairs": 2.0, "value": value, "num_items": 9.0},))
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    picture = one_picture("breakdown", tmp_path, records)
    note = " ".join(words(picture.figure).split())
    assert "no bar where the interval leaves out less than a tenth of the scale: bigbird, full" in note
    drawn = [line.get_ydata() for line in picture.figure.axes[0].get_lines()]
    heights = [max(ends) - min(ends) for ends in drawn if len(ends) == 2 and ends[0] != ends[1]]
    assert len(heights) == 1, "of linformer"
    assert heights[0] == pytest.approx(0.05, rel=0.01)


def test_a_hole_in_a_heat_map_is_empty_and_not_nought(tmp_path):
    cells = ({"a": 1.0, "b": 1.0, "value": 0.5, "num_items": 1.0}, {"a": 2.0, "b": 2.0, "value": 0.7, "num_items": 1.0})
    picture = one_picture("breakdown", tmp_path, [training("full", 0, 0.5, breakdown=cells)])
    drawn = np.ma.filled(picture.figure.axes[0].images[0].get_array().astype(float), np.nan)
    assert np.isnan(drawn).sum() == 2
    assert "empty: no result" in words(picture.figure)


def test_sensitivity_to_the_learning_rate(tmp_path):
    records = [
        record for name in CLAIMS for record in tuned(name, {1e-4: (0.3, 0.4), 1e-3: (0.5, 0.5), 1e-2: (None, None)})
    ]
    found = by_kind(pictures(tmp_path, records))
    assert_legible(found["tuning"].figure)
    shown = words(found["tuning"].figure)
    for text in ("0.0001", "0.001", "0.01", "3 trials", "no score: diverged"):
        assert text in shown
    crosses = [
        line for line in found["tuning"].figure.axes[0].lines if line.get_marker() == "x" and len(line.get_xdata())
    ]
    assert len({float(line.get_xdata()[0]) for line in crosses}) == 3  # side by side, so that each is seen


def test_who_has_no_curve_is_named(tmp_path):
    lacking: dict[str, dict[str, Any]] = {"full": {}, "linformer": {"train_flops": None}, "luna": {"curve": ()}}
    records = [training(name, seed, 0.5, **changes) for name, changes in lacking.items() for seed in (0, 1)]
    picture = one_picture("learning", tmp_path, records)
    assert "; no curve was kept of luna" in picture.alt
    assert "; training FLOPs: only of those that know them" in picture.alt
    assert_legible(picture.figure)


def test_curves_over_flops_only_where_they_are_known(tmp_path):
    records = [training(name, seed, 0.5) for name in ("full", "bigbird") for seed in (0, 1)]
    assert len(one_picture("learning", tmp_path / "a", records).figure.axes) == 4
    records = [training("full", 0, 0.5, train_flops=None)]
    assert len(one_picture("learning", tmp_path / "b", records).figure.axes) == 3


def test_floors_of_the_test_set_are_said_to_be_so_beside_validation_curves(tmp_path):
    for floors, name in (({"most_frequent": 0.2}, "level line: most frequent, 20.0 % on test"), ({}, "chance, 10.0 %")):
        picture = one_picture("learning", tmp_path / name, [training("full", 0, 0.5, floors=floors)])
        assert " ".join(words(picture.figure).split()).partition(" training loss")[0].endswith(name) or name in (
            picture.alt
        )
        assert_legible(picture.figure)


def test_breakdowns_draw_the_floor_of_each_level_where_records_have_it(tmp_path):
    rules = {2.0: 0.5, 16.0: 0.0625}
    cells = tuple({"num_pairs": n, "value": 0.5, "num_items": 9.0, "floor": floor} for n, floor in rules.items())
    page = one_picture("breakdown", tmp_path / "curve", [training("full", 0, 0.5, breakdown=cells)])
    assert "best floor" in words(page.figure)
    assert "of all examples together" not in words(page.figure).replace("\n", " ")
    lines = [line.get_xydata().tolist() for line in page.figure.axes[0].get_lines()]
    assert [list(each) for each in rules.items()] in lines
    assert_legible(page.figure)
    squares = tuple({"depth": 1.0, **cell} for cell in cells) + tuple({"depth": 2.0, **cell} for cell in cells)
    page = one_picture("breakdown", tmp_path / "map", [training("full", 0, 0.5, breakdown=squares)])
    titles = [axes.get_title(loc="left") for axes in page.figure.axes]
    assert [title.partition("\n")[0] for title in titles if title] == ["full", "best floor"]
    assert_legible(page.figure)
    older = tuple({name: value for name, value in cell.items() if name != "floor"} for cell in cells)
    page = one_picture("breakdown", tmp_path / "older", [training("full", 0, 0.5, breakdown=older)])
    assert "of all examples together" in " ".join(words(page.figure).split())
    assert "full" in words(page.figure)


def test_times_of_a_shared_device_are_said_to_be_such_in_no_unit(tmp_path):
    score = {"curve": curve(0.1, 0.5), "train_s": 900.0}
    shared = [accuracy("full", 0, 0.5, score=score, num_jobs=2)]
    shown = words(one_picture("learning", tmp_path, shared).figure)
    assert "minutes of training" in shown
    assert "times are of runs that shared their device" in " ".join(shown.split())


def test_the_mean_over_tasks_is_drawn_once(tmp_path):
    records = [accuracy(name, 0, 0.4, task=task) for name in ("full", "bigbird") for task in ("a", "b")]
    found = pictures(tmp_path, records)
    assert found[0].name.startswith("bubbles-tasks")
    assert_legible(found[0].figure)
    said = " ".join(words(found[0].figure).split())
    assert "mean over a (short), b (short)" in said
    assert "one seed: 95 % interval from the size of the test set alone" in said
    low, high = found[0].figure.axes[0].get_ylim()
    assert high - low > 2 * 1.96 * (0.4 * 0.6 / 200 / 2) ** 0.5, "of two tasks of 200 examples"


def test_the_mean_over_tasks_has_the_interval_over_its_seeds(tmp_path):
    scores = ((0, 0.4), (1, 0.44), (2, 0.5))
    kinds = [(name, task) for name in ("full", "bigbird") for task in ("a", "b")]
    records = [accuracy(name, seed, value, task=task) for name, task in kinds for seed, value in scores]
    picture = pictures(tmp_path, records)[0]
    assert "bars: 95 % t-interval of the mean over seeds" in " ".join(words(picture.figure).split())
    (overview,) = analyse([tmp_path / "run"]).overviews
    ends = overview.ends("full")
    assert ends == overview.interval("full")
    assert ends is not None
    low, high = picture.figure.axes[0].get_ylim()
    assert low < ends[0]
    assert ends[1] < high


def test_axes_of_accuracy_stay_within_what_can_be_scored(tmp_path):
    records = [accuracy("full", seed, value, score={"curve": curve(0.2, value)}) for seed, value in enumerate((0.9, 1))]
    records += [accuracy("bigbird", seed, value) for seed, value in enumerate((0.0, 0.02))]
    for picture in pictures(tmp_path, records):
        for axes in picture.figure.axes:
            limits = (axes.get_xlim(), axes.get_xlabel()), (axes.get_ylim(), axes.get_ylabel())
            for (low, high), label in limits:
                if "accuracy" in label:
                    assert (low, high) == pytest.approx((max(0.0, low), min(1.0, high))), picture.name
    scores = pictures(tmp_path / "again", records)[0].figure
    assert "arrow: an interval cut where scores end" in " ".join(words(scores).split())
    heads = [line.get_marker() for line in scores.axes[0].get_lines() if line.get_marker() in {"<", ">"}]
    assert {"<", ">"} <= set(heads)


def test_a_single_seed_has_the_interval_of_its_test_set(tmp_path):
    drawn = pictures(tmp_path, [accuracy(variant, 0, 0.36 + place / 1000) for place, variant in enumerate(MANY[:3])])
    for name, limits in (("accuracy", Axes.get_xlim), ("bubbles", Axes.get_ylim)):
        picture = next(one for one in drawn if one.name.startswith(name))
        low, high = limits(picture.figure.axes[0])
        assert high - low > 2 * 1.96 * (0.36 * 0.64 / 200) ** 0.5, "of 200 examples"
        said = " ".join(words(picture.figure).split())
        assert "one seed: 95 % interval from the size of the test set alone" in said
        assert "over seeds" not in said


def test_bubbles_say_what_their_bars_are(tmp_path):
    """A bar without a word may be a standard error, or the range of seeds."""
    records = [training(variant, seed, 0.9 + seed / 20) for variant in MANY[:2] for seed in range(3)]
    said = " ".join(words(one_picture("bubbles", tmp_path, records).figure).split())
    assert "bars: 95 % t-interval of the mean over seeds; arrow: an interval cut where scores end" in said
