"""Growth and crossovers on curves whose truth is known."""

import math

import pytest

from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.tables.growth_tables import crossing_text, crossover_table, exponent_table, round_length
from tests.report.synthetic import CLAIMS, DOUBLINGS, analysed, scaling, write_run


def panel(tmp_path, records, claims=CLAIMS):
    return analysed(tmp_path, records, claims=claims).panels[0]


def powers(variant, power, unit=1e-3, spread=0.01, **cell):
    return [scaling(variant, n, unit * n**power, spread=spread, **cell) for n in DOUBLINGS]


def test_recovers_known_powers_and_reads_them(tmp_path):
    one = panel(tmp_path, [*powers("full", 2, 1e-5), *powers("linformer", 1), *powers("odd", 1.5, 1e-4)])
    for label, power, verdict in (("full", 2, "quadratic"), ("linformer", 1, "linear"), ("odd", 1.5, "not settled")):
        found = one.time[label]
        assert found.exponent is not None
        assert found.exponent.low <= power <= found.exponent.high
        assert found.exponent.value == pytest.approx(power, abs=0.03)
        assert found.verdict == verdict
    assert (one.time["full"].claimed, one.time["odd"].claimed) == (2.0, None)


def test_memory_is_fitted_from_bytes(tmp_path):
    records = [scaling("full", n, quadratic_memory=True) for n in DOUBLINGS]
    one = panel(tmp_path, [*records, *powers("linformer", 1)])
    exponent = one.memory["full"].exponent
    assert exponent is not None
    assert exponent.value == pytest.approx(2.0, abs=0.02), "but for its inputs, whose bytes are linear"
    assert one.memory["linformer"].verdict == "linear"


def test_simulated_variants_get_no_verdict_and_no_crossing(tmp_path):
    from dataclasses import replace

    fakes = [replace(record, is_simulated=True) for record in powers("linformer", 1)]
    one = panel(tmp_path, [*powers("full", 2, 1e-5), *fakes])
    assert one.time["linformer"].verdict == "simulated"
    assert one.crossings == []


def test_a_time_that_falls_with_the_length_is_of_the_machine(tmp_path):
    one = panel(tmp_path, [scaling("full", n, 5.0 * (512 / n) ** 0.2) for n in DOUBLINGS])
    assert one.time["full"].verdict == "not settled"
    assert one.time["full"].why.endswith("no cost falls with the length, the machine changed meanwhile")
    assert one.time["full"].words == "less than linear"


def test_one_length_gives_no_exponent(tmp_path):
    one = panel(tmp_path, [scaling("full", 512)])
    assert one.time["full"].exponent is None
    assert one.time["full"].verdict == "too few lengths"


def test_lengths_a_decade_apart_give_slopes_but_no_exponent(tmp_path):
    one = panel(tmp_path, [scaling("full", 512), scaling("full", 16384)])
    assert one.time["full"].exponent is None
    assert len(one.time["full"].slopes) == 1


def test_crossover_is_where_the_curves_meet(tmp_path):
    # 1e-5 N^2 = 4e-2 N at N = 4000
    one = panel(tmp_path, [*powers("full", 2, 1e-5, 0.02), *powers("bigbird", 1, 4e-2, 0.02)])
    found = one.crossing("bigbird")
    assert found is not None
    assert found.result is not None
    assert found.result.length == pytest.approx(4000, rel=0.02)
    assert found.result.low is not None
    assert found.result.high is not None
    assert found.result.low <= 4000 <= found.result.high
    assert crossing_text(found).startswith("from 4,0")


@pytest.mark.parametrize(("unit", "words"), [(1e-6, "from 512 or less"), (10.0, "none up to 32k")])
def test_never_and_always_are_results(tmp_path, unit, words):
    one = panel(tmp_path, [*powers("full", 2, 1e-5), *powers("bigbird", 1, unit)])
    found = one.crossing("bigbird")
    assert found is not None
    assert crossing_text(found) == words


def test_the_baseline_is_the_fastest_exact_kernel_at_each_length(tmp_path):
    slow_start = [scaling("full", n, 5 + 1e-6 * n**2, label="fused", options={"b": "f"}) for n in DOUBLINGS]
    steep = [scaling("full", n, 1e-5 * n**2, label="plain", options={"b": "p"}) for n in DOUBLINGS]
    one = panel(tmp_path, [*slow_start, *steep, *powers("bigbird", 1, 4e-2)])
    baseline = one.baseline
    assert baseline is not None
    assert baseline.label == "plain / fused"
    for point in baseline.points:
        assert point.median_ms == pytest.approx(min(5 + 1e-6 * point.seq_len**2, 1e-5 * point.seq_len**2), rel=0.02)
    assert [(found.against, found.is_main) for found in one.crossings] == [
        ("plain / fused", True),
        ("fused", False),
        ("plain", False),
    ]


def test_without_claims_there_is_no_baseline(tmp_path):
    one = panel(tmp_path, [*powers("full", 2), *powers("bigbird", 1)], claims={})
    assert one.baseline is None
    assert one.crossings == []


def test_repeated_runs_pool_their_samples(tmp_path):
    runs = [write_run(tmp_path / str(seed), [scaling("full", 512, 10.0 + seed, seed=seed)]) for seed in (0, 1)]
    point = analyse(runs).panels[0].series[0].points[0]
    assert len(point.timing.samples_ms) == 30
    assert 10.0 < point.median_ms < 11.0
    assert point.low_ms <= point.median_ms <= point.high_ms


def test_settings_that_differ_make_panels_of_their_own(tmp_path):
    records = [
        scaling("full", 512, pass_=pass_, is_causal=is_causal, dtype=dtype)
        for pass_ in ("fwd_bwd", "fwd")
        for is_causal in (False, True)
        for dtype in ("float32", "bfloat16")
    ]
    panels = analysed(tmp_path, records).panels
    assert len({one.name for one in panels}) == len({one.title for one in panels}) == 8
    assert panels[0].title.startswith("forward,")  # forward before forward + backward


def test_tables_say_what_was_found(tmp_path):
    analysis = analysed(tmp_path, [*powers("full", 2, 1e-5), *powers("bigbird", 1, 4e-2)])
    (row,) = [row for row in crossover_table(analysis).rows if row["quantity"] == "time"]
    assert (row["variant"], row["against"], row["outcome"]) == ("bigbird", "full", "crosses")
    readings = {(row["variant"], row["quantity"]): row["reading"] for row in exponent_table(analysis).rows}
    assert readings[("full", "time")] == "quadratic"
    assert all(math.isfinite(row["exponent"]) for row in exponent_table(analysis).rows)


@pytest.mark.parametrize(("tokens", "text"), [(3.2, "3"), (999.4, "999"), (1236, "1,240"), (123_456, "123,000")])
def test_crossings_are_rounded(tokens, text):
    assert round_length(tokens) == text
