"""Claims that the records contradict are said, with what was measured; sound ones are left alone."""

from dataclasses import replace

import pytest

from attn_zoo.api import load
from attn_zoo.report.analysis.analyse import analyse
from attn_zoo.report.analysis.contradictions import contradicted_exponents, flops_ratios
from attn_zoo.report.analysis.fits import slope_words
from attn_zoo.report.pages.findings import findings
from attn_zoo.report.tables.all_tables import make_tables
from tests.report.synthetic import CLAIMS, DOUBLINGS, scaling, write_run


def run_of(path, records):
    return write_run(path / "run", records)


def curve(variant, cost, **changes):
    return [scaling(variant, n, cost(n), spread=0.01, **changes) for n in DOUBLINGS]


def formula(records, power):
    return [replace(record, flops=1000 * record.cell.seq_len**power) for record in records]


@pytest.mark.parametrize("power", [1.5, 2])
def test_a_claim_of_one_beside_another_power(tmp_path, power):
    analysis = analyse([run_of(tmp_path, formula(curve("linformer", lambda n: 1e-5 * n**power), 1))])
    (said,) = contradicted_exponents(analysis.panels)
    fit = analysis.panels[0].time["linformer"].exponent
    assert fit is not None
    assert f"claims 1, measured {slope_words(fit)} from 4k to 32k tokens" in said
    assert "formula" not in said
    assert sum("claims 1, measured" in text for text in findings(analysis)) == 1
    (exponents,) = [table for table in make_tables(analysis) if table.name == "exponents"]
    (row,) = [row for row in exponents.rows if row["quantity"] == "time"]
    assert row["is_contradicted"]
    assert row["formula_exponent"] == pytest.approx(1)
    assert any("1 (!)" in texts for texts in exponents.texts())


def test_what_the_formula_explains_is_said_with_it(tmp_path):
    analysis = analyse([run_of(tmp_path, formula(curve("linformer", lambda n: 1e-5 * n**2), 2))])
    (said,) = contradicted_exponents(analysis.panels)
    assert said.endswith("; its own formula grows with 2.00 there")


def test_memory_is_compared_too(tmp_path):
    records = [scaling("linformer", n, quadratic_memory=True) for n in DOUBLINGS]
    (said,) = contradicted_exponents(analyse([run_of(tmp_path, records)]).panels)
    assert "exponent of memory claims 1, measured 2.0" in said or "exponent of memory claims 1, measured 1.9" in said
    assert "[" not in said  # bytes do not vary


@pytest.mark.parametrize(
    "cost",
    [
        lambda n: 1e-3 * n,
        lambda n: 2.0 + 1e-4 * n,  # an overhead
        lambda n: 1e-4 * n + 1e-8 * n**2,  # still bending: no power over all lengths
        lambda n: 1e-4 * n * (1 + 0.03 * n.bit_length()),  # a logarithm
        lambda n: 1e-3 * n ** (1.2 if n > 8192 else 1.0),  # a cache that overflows
    ],
)
def test_no_claim_of_one_is_contradicted_by(tmp_path, cost):
    analysis = analyse([run_of(tmp_path, curve("linformer", cost))])
    assert contradicted_exponents(analysis.panels) == []
    assert not any("contradict" in text for text in findings(analysis))


def test_slower_than_claimed_is_no_contradiction(tmp_path):
    """Exact attention on a device that is not busy yet, or beside its projections."""
    for index, power in enumerate((0, 1)):
        records = curve("full", lambda n, power=power: 1e-3 * n**power)
        assert contradicted_exponents(analyse([run_of(tmp_path / str(index), records)]).panels) == []


@pytest.mark.parametrize("lengths", [DOUBLINGS[:1], DOUBLINGS[:2]])
def test_nothing_is_said_of_one_or_two_lengths(tmp_path, lengths):
    records = [scaling("linformer", n, 1e-5 * n**2) for n in lengths]
    assert contradicted_exponents(analyse([run_of(tmp_path, records)]).panels) == []


def test_simulated_variants_and_those_without_a_claim_contradict_nothing(tmp_path):
    quadratic = curve("linformer", lambda n: 1e-5 * n**2)
    assert "odd" not in CLAIMS
    records = [*(replace(record, is_simulated=True) for record in quadratic), *curve("odd", lambda n: 1e-5 * n**2)]
    assert contradicted_exponents(analyse([run_of(tmp_path, records)]).panels) == []


def counted(variant, flops, count, *, length=1024, projections=None, **cell):
    record = scaling(variant, length, 1.0, **cell)
    return replace(record, flops=flops, counted_flops=count, projection_flops=projections)


def test_flops_that_were_claimed_and_did_not_run(tmp_path):
    records = [counted("linformer", 2000, 1000), counted("bigbird", 1009, 1000), counted("full", 1000, None)]
    run = run_of(tmp_path, records)
    analysis = analyse([run])
    (found,) = flops_ratios(analysis.results.observations)
    assert (found.variant, found.least, found.is_too_many) == ("linformer", 2.0, True)
    said = "More FLOPs are claimed than ran: linformer (bidirectional, attention) 2 times at 1k tokens."
    assert said in findings(analysis)
    page = load([run]).report(tmp_path / "out")
    assert said in page.read_text(encoding="utf-8")


def test_each_pass_of_a_length_counts(tmp_path):
    records = [counted("linformer", flops, 1000, pass_=name) for name, flops in (("fwd", 2000), ("fwd_bwd", 1500))]
    (found,) = flops_ratios(analyse([run_of(tmp_path, records)]).results.observations)
    assert (found.least, found.most, found.lengths) == (1.5, 2.0, "1k")


def test_what_a_mask_hides_is_in_the_table_and_no_finding(tmp_path):
    records = [
        counted("full", 520, 1000, length=length, is_causal=True, scope="mixer", projections=100)
        for length in (512, 1024)
    ]
    analysis = analyse([run_of(tmp_path, records)])
    (table,) = [table for table in make_tables(analysis) if table.name == "flops"]
    assert table.texts() == [["full", "causal, mixer", "0.52", "512 to 1k"]]
    assert not any("FLOPs" in text for text in findings(analysis))


def test_what_the_counter_does_not_see_is_left_out(tmp_path):
    records = [
        counted("bigbird", 3000, 1000, projections=1000, scope="mixer"),  # sums, which are no products
        counted("full", 500, 1000, scope="mixer"),  # older records: the mechanism's formula alone
        replace(counted("linformer", 500, 1000), is_simulated=True),
    ]
    assert flops_ratios(analyse([run_of(tmp_path, records)]).results.observations) == []


@pytest.mark.parametrize(("count", "is_told"), [(875, False), (563, False), (550, True), (1011, True)])
def test_padding_that_is_left_out_is_no_claim_too_many(tmp_path, count, is_told):
    records = [counted("full", 1000, count, has_padding=True)]
    assert bool(flops_ratios(analyse([run_of(tmp_path, records)]).results.observations)) == is_told


def test_what_was_claimed_under_the_options_of_the_cell_counts(tmp_path):
    """The run's claim is that of the defaults: linear memory, which a kernel with dense scores does not promise."""
    records = [scaling("linformer", n, quadratic_memory=True) for n in DOUBLINGS]
    own = [replace(record, time_exponent=1.0, memory_exponent=2.0) for record in records]
    panel = analyse([run_of(tmp_path, own)]).panels[0]
    assert panel.memory["linformer"].claimed == 2
    assert contradicted_exponents([panel]) == []
