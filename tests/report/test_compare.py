"""Two runs side by side: a verdict only where the intervals separate."""

from dataclasses import replace

import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.report.compare import agreement, compare, compare_scores, compare_tables
from tests.report.synthetic import MACHINE, accuracy, scaling, write_run


def repeated(record, sizes=(5, 5, 5)):
    assert record.timing is not None
    return replace(record, timing=replace(record.timing, process_sizes=sizes))


def timed(*arguments, **more):
    """Return a record of three processes, between which nothing differs but the samples."""
    record = repeated(scaling(*arguments, **more))
    assert record.timing is not None
    mixed = tuple(sample for start in range(3) for sample in record.timing.samples_ms[start::3])
    return replace(record, timing=replace(record.timing, samples_ms=mixed))


def compare_table(frame):
    (table,) = compare_tables(frame, [])
    return table


def verdicts(tmp_path, records_a, records_b, **more):
    a, b = write_run(tmp_path / "a", records_a), write_run(tmp_path / "b", records_b)
    return compare(a, b, **more).set_index(["label", "seq_len"])


def test_faster_slower_same_and_missing(tmp_path):
    found = verdicts(
        tmp_path,
        [timed("v", 512, 10.0), timed("v", 1024, 10.0), timed("v", 2048, 10.0), timed("v", 4096, 10.0)],
        [timed("v", 512, 8.0), timed("v", 1024, 12.0), timed("v", 2048, 10.001), timed("w", 512, 1.0)],
    )
    expected = {512: "faster", 1024: "slower", 2048: "same", 4096: "only in a"}
    assert {length: found.loc[("v", length), "verdict"] for length in expected} == expected
    assert found.loc[("w", 512), "verdict"] == "only in b"
    row = found.loc[("v", 512)]
    assert row["ratio"] == pytest.approx(0.8, rel=0.01)
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"] < 1


def test_touching_intervals_are_the_same(tmp_path):
    found = verdicts(tmp_path, [scaling("v", 512, 10.0, spread=0.3)], [scaling("v", 512, 10.3, spread=0.3)])
    assert found.iloc[0]["verdict"] == "same"
    assert found.iloc[0]["ratio_low"] < 1 < found.iloc[0]["ratio_high"]


def test_a_new_version_of_the_source_is_compared_with_the_old(tmp_path):
    old, new = timed("v", 512, 10.0, variant_digest="old"), timed("v", 512, 5.0, variant_digest="new")
    assert verdicts(tmp_path, [old], [new]).iloc[0]["verdict"] == "faster"


def test_failed_cells_and_other_settings_do_not_pair_up(tmp_path):
    found = verdicts(
        tmp_path,
        [scaling("v", 512, 10.0, pass_="fwd")],
        [scaling("v", 512, 10.0, pass_="fwd_bwd"), scaling("v", 1024, status="timeout", reason="60 s")],
    )
    assert sorted(found["verdict"]) == ["only in a", "only in b"]


def test_another_environment_is_refused_unless_allowed(tmp_path):
    other = replace(MACHINE, cpu="Other CPU", commit="ffff")
    a = write_run(tmp_path / "a", [timed("v", 512, 10.0)])
    b = write_run(tmp_path / "b", [replace(timed("v", 512, 5.0), environment=other.digest)], environment=other)
    with pytest.raises(ConfigError, match=r"differ in environment \(cpu\)"):
        compare(a, b)
    assert compare(a, b, allow_other_environment=True).iloc[0]["verdict"] == "faster"


def test_another_commit_on_the_same_machine_is_fine(tmp_path):
    newer = replace(MACHINE, commit="ffff", is_dirty=True)
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0)])
    b = write_run(tmp_path / "b", [scaling("v", 512, 10.0)], environment=newer)
    assert compare(a, b).iloc[0]["verdict"] == "same"


def test_empty_runs_and_no_results_folder(tmp_path):
    a, b = write_run(tmp_path / "a", []), write_run(tmp_path / "b", [])
    assert len(compare(a, b)) == 0
    with pytest.raises(ConfigError, match="not a results folder"):
        compare(a, tmp_path)


def test_people_see_both_times_the_ratio_and_whether_the_runs_agree(tmp_path):
    a = write_run(tmp_path / "a", [timed("v", 512, 10.0), timed("v", 1024, 10.0), timed("v", 2048, 10.0)])
    b = write_run(tmp_path / "b", [timed("v", 512, 10.001), timed("v", 1024, 20.0), timed("w", 512, 1.0)])
    frame = compare(a, b)
    table = compare_table(frame)
    rows = {row[2]: row for row in table.texts()}
    assert set(rows) == {"512", "1k"}, "what only one side has is no comparison"
    assert (rows["512"][-1], rows["1k"][-1]) == ("agree", "slower")
    assert rows["1k"][3] == "10.1 ms [9.98, 10.1]"
    assert rows["1k"][4].startswith("20")
    assert rows["1k"][5].startswith("2 [1.9")
    assert "covers what differs between the 3 processes" in table.note
    said = agreement(frame)
    assert said.startswith("1 of 2 cells agree, with ratios known to a factor of 1.0")
    assert said.endswith("either way (median); 1 slower in the second; 1 only in the first; 1 only in the second")


def test_the_note_tells_several_processes_from_one(tmp_path):
    many = [repeated(scaling("v", length, 10.0)) for length in (512, 1024)]
    a, b = write_run(tmp_path / "a", many), write_run(tmp_path / "b", many)
    found = compare_table(compare(a, b))
    assert "covers what differs between the 3 processes that took the samples." in found.note
    assert [row["num_processes_a"] for row in found.rows] == [3, 3]
    c = write_run(tmp_path / "c", [scaling("v", 512, 10.0)])
    assert "of a single one it is the doubt within one process only" in compare_table(compare(a, c)).note


def test_runs_without_a_common_cell_are_an_error_that_shows_one_of_each(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0), scaling("v", 1024, 10.0)])
    b = write_run(tmp_path / "b", [scaling("w", 512, 10.0, pass_="bwd")])
    with pytest.raises(
        ConfigError, match=r"first has 2, such as v fwd L512 float32 on cpu, the second 1, such as w bwd"
    ):
        compare_table(compare(a, b))
    failed = write_run(tmp_path / "c", [scaling("v", 512, status="timeout", reason="60 s")])
    with pytest.raises(ConfigError, match="the second none that was measured"):
        compare_table(compare(a, failed))


def test_unchanged_code_is_not_faster_in_runs_of_one_process(tmp_path):
    """Between processes it varies by more than any interval of one of them knows."""
    found = verdicts(tmp_path, [scaling("v", 512, 10.0)], [scaling("v", 512, 9.5)])
    assert found.iloc[0]["verdict"] == "cannot say"
    mixed = verdicts(tmp_path / "mixed", [timed("v", 512, 10.0)], [scaling("v", 512, 5.0)])
    assert mixed.iloc[0]["verdict"] == "cannot say"
    said = agreement(found.reset_index())
    assert "1 apart, but of one process, so that nobody can say" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 1}, r"they differ in protocol_version \(\d+ against 1\)"),
        ({"dtype": "bfloat16"}, r"they differ in dtype \(float32 against bfloat16\)"),
        ({"num_heads": 4, "head_dim": 32}, r"num_heads \(8 against 4\), head_dim \(64 against 32\)"),
    ],
)
def test_no_cell_in_common_names_the_field_that_differs(tmp_path, changes, words):
    a = write_run(tmp_path / "a", [scaling("v", n, 10.0) for n in (512, 1024)])
    b = write_run(tmp_path / "b", [scaling("v", n, 10.0, **changes) for n in (512, 1024)])
    with pytest.raises(ConfigError, match=words):
        compare_table(compare(a, b))


def test_cells_of_another_protocol_beside_common_ones_say_which(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0), scaling("v", 1024, 10.0, protocol_version=3)])
    b = write_run(tmp_path / "b", [scaling("v", 512, 10.0), scaling("v", 1024, 10.0, protocol_version=2)])
    assert agreement(compare(a, b)).endswith("only in the second: they differ in protocol_version (3 against 2)")


def test_where_no_field_differs_as_a_whole_the_nearest_pair_tells(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0), scaling("w", 1024, 10.0)])
    b = write_run(tmp_path / "b", [scaling("v", 1024, 10.0), scaling("w", 512, 10.0)])
    with pytest.raises(ConfigError, match=r"they differ in (label|seq_len) \("):
        compare_table(compare(a, b))


def trained(values, **cell):
    return [
        accuracy(variant, seed, value, score={"correct": ""}, **cell)
        for variant, scores in values.items()
        for seed, value in enumerate(scores)
    ]


def test_scores_are_compared_by_seed(tmp_path):
    before = {"full": [0.5, 0.52, 0.54], "linformer": [0.3, 0.31, 0.32], "bigbird": [0.4, 0.4, 0.41], "luna": [0.4]}
    after = {"full": [0.6, 0.62, 0.641], "linformer": [0.2, 0.21, 0.221], "bigbird": [0.41, 0.39, 0.41], "luna": [0.5]}
    a, b = write_run(tmp_path / "a", trained(before)), write_run(tmp_path / "b", trained(after))
    rows = compare_scores(a, b)
    found = {row["label"]: row["verdict"] for row in rows}
    assert found == {"full": "better", "linformer": "worse", "bigbird": "same", "luna": "cannot say"}
    (table,) = compare_tables(compare(a, b), rows)
    texts = {row[0]: row for row in table.texts()}
    assert texts["full"][3:5] == ["52.0 %", "62.0 %"]
    assert texts["full"][5].startswith("+10.0 [+9.")
    assert texts["bigbird"][-1] == "agree"


def test_scores_of_other_protocols_say_which(tmp_path):
    values = {"full": [0.5, 0.52, 0.54]}
    a = write_run(tmp_path / "a", trained(values))
    b = write_run(tmp_path / "b", trained(values, protocol="lra-small"))
    with pytest.raises(ConfigError, match=r"they differ in protocol \(cpu-small against lra-small\)"):
        compare_tables(compare(a, b), compare_scores(a, b))
