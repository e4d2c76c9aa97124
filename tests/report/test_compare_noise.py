"""What `compare` says of runs with realistic noise, by simulation: rarely something false, and nothing of a noisy host.

The log time of a sample is the cell's, plus what differs between processes, plus noise within one of half as much.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from attn_zoo.report.compare import BY_CHANCE, compare
from attn_zoo.statistics.medians import process_spread, ratio_of_runs, time_summary
from tests.report.synthetic import scaling, write_run

NUM_CELLS, NUM_SAMPLES = 40, 5


def noisy_run(path, rng, *, spread, num_processes=3, factor=1.0):
    records = []
    for index in range(NUM_CELLS):
        process = spread * rng.standard_normal((num_processes, 1))
        sample = 0.5 * spread * rng.standard_normal((num_processes, NUM_SAMPLES))
        samples = tuple((factor * (1 + index) * np.exp(process + sample)).ravel().tolist())
        sizes = (NUM_SAMPLES,) * num_processes
        record = scaling(f"v{index:02}", 512, 1.0)
        assert record.timing is not None
        timing = replace(record.timing, samples_ms=samples, process_sizes=sizes, **time_summary(samples, sizes))
        records.append(replace(record, timing=timing))
    return write_run(path, records)


def verdicts(tmp_path, *, spread, factor=1.0, num_processes=3):
    """Return the share of each verdict, and the comparison."""
    rng = np.random.default_rng(0)
    a = noisy_run(tmp_path / "a", rng, spread=spread, num_processes=num_processes)
    b = noisy_run(tmp_path / "b", rng, spread=spread, num_processes=num_processes, factor=factor)
    found = compare(a, b, limit=0.05)
    usual = compare(a, b)
    return {name: count / NUM_CELLS for name, count in Counter(usual.times["verdict"]).items()}, found


def test_unchanged_code_measured_again_agrees(tmp_path):
    found, strict = verdicts(tmp_path, spread=0.02)
    assert found["same"] >= 0.85
    assert found.get("slower", 0) + found.get("faster", 0) <= 0.05
    assert strict.worse == []


@pytest.mark.parametrize("num_processes", [3, 5])
def test_a_run_slowed_by_a_tenth_is_slower_in_nearly_all_cells(tmp_path, num_processes):
    found, strict = verdicts(tmp_path, spread=0.02, factor=1.1, num_processes=num_processes)
    assert found["slower"] >= 0.95
    assert "faster" not in found
    is_sure = {3: 0.3, 5: 0.8}  # share of cells that are slower by more than 5 % beyond doubt
    assert len(strict.worse) >= is_sure[num_processes] * NUM_CELLS


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_noisy_host_gives_no_verdict(tmp_path, factor):
    found, strict = verdicts(tmp_path, spread=0.15, factor=factor)
    assert found["cannot say"] >= 0.93
    assert len(strict.worse) <= 0.05 * NUM_CELLS


def test_a_single_process_gives_no_verdict(tmp_path):
    found, strict = verdicts(tmp_path, spread=0.02, factor=1.1, num_processes=1)
    assert set(found) <= {"same", "cannot say"}
    assert strict.worse == []


def drawn(rng, factor=1.0, spread=0.03, count=3):
    return (factor * np.exp(spread * rng.standard_normal(count))).tolist()


def test_the_interval_of_two_runs_covers_their_ratio():
    rng, hits, runs = np.random.default_rng(1), 0, 400
    for _ in range(runs):
        ratio = ratio_of_runs(drawn(rng, 1.2), drawn(rng), sizes_a=(1, 1, 1), sizes_b=(1, 1, 1))
        hits += ratio.low <= 1.2 <= ratio.high
    assert 0.93 <= hits / runs <= 0.99


def test_of_very_many_cells_it_is_said_how_many_verdicts_are_chance(tmp_path):
    rng, num_processes, num_cells = np.random.default_rng(3), 5, 1000
    sizes, false = (1,) * num_processes, 0
    for _ in range(num_cells):
        sides = drawn(rng, count=num_processes), drawn(rng, count=num_processes)
        ratio = ratio_of_runs(*sides, sizes_a=sizes, sizes_b=sizes, least_spread=(0.03, 0.03))
        false += not ratio.low <= 1 <= ratio.high
    assert BY_CHANCE / 2 <= false / num_cells <= 1.5 * BY_CHANCE
    slow, usual = (
        write_run(tmp_path / name, [replaced(f"v{index:02}", factor) for index in range(100)])
        for name, factor in (("slow", 1.2), ("usual", 1.0))
    )
    assert "; 100 slower in the second; 2 of these at most by chance" in compare(usual, slow).agreement


def replaced(label, factor):
    """Return a record of three steady processes."""
    samples = tuple(factor * (1 + 1e-3 * step) for step in (0, 1, 2))
    record = scaling(label, 512, 1.0)
    assert record.timing is not None
    summary = time_summary(samples, (1, 1, 1))
    return replace(record, timing=replace(record.timing, samples_ms=samples, process_sizes=(1, 1, 1), **summary))


def test_agreement_by_chance_is_not_precision():
    lucky = [1.0, 1.0001, 0.9999]
    slower, sizes = [1.05 * one for one in lucky], (1, 1, 1)
    alone = ratio_of_runs(slower, lucky, sizes_a=sizes, sizes_b=sizes)
    assert alone.low > 1.04
    careful = ratio_of_runs(slower, lucky, sizes_a=sizes, sizes_b=sizes, least_spread=(0.03, 0.03))
    assert careful.low < 1 < careful.high
    assert process_spread(lucky, (3,)) is None
    assert process_spread(lucky, (1, 1, 1)) == pytest.approx(1e-4, rel=1e-3)
