"""Two runs side by side: a verdict only where the intervals separate."""

from dataclasses import replace
from typing import Any

import pytest

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.folder import pack_cells
from attn_zoo.report.compare import compare
from tests.report.synthetic import MACHINE, accuracy, approximation, scaling, write_run


def repeated(record, sizes=(5, 5, 5)):
    assert record.timing is not None
    return replace(record, timing=replace(record.timing, process_sizes=sizes))


def timed(*arguments, **more):
    """Return a record of three processes, between which nothing differs but the samples."""
    record = repeated(scaling(*arguments, **more))
    assert record.timing is not None
    mixed = tuple(sample for start in range(3) for sample in record.timing.samples_ms[start::3])
    return replace(record, timing=replace(record.timing, samples_ms=mixed))


def compare_table(a, b):
    (table,) = compare(a, b).tables()
    return table


def verdicts(tmp_path, records_a, records_b, **more):
    a, b = write_run(tmp_path / "a", records_a), write_run(tmp_path / "b", records_b)
    return compare(a, b, **more).times.set_index(["label", "seq_len"])


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


def test_a_limit_below_nothing_is_refused(tmp_path):
    """It would find everything slower, a run beside itself too."""
    with pytest.raises(ValueError, match=r"limit: expected at least 0, a share; got -0\.5"):
        compare(tmp_path, tmp_path, limit=-0.5)


def test_touching_intervals_are_the_same(tmp_path):
    found = verdicts(tmp_path, [scaling("v", 512, 10.0, spread=0.08)], [scaling("v", 512, 10.1, spread=0.08)])
    assert found.iloc[0]["verdict"] == "same"
    assert found.iloc[0]["ratio_low"] < 1 < found.iloc[0]["ratio_high"]


def test_wide_intervals_that_touch_say_nothing(tmp_path):
    found = verdicts(tmp_path, [scaling("v", 512, 10.0, spread=0.3)], [scaling("v", 512, 10.3, spread=0.3)])
    assert (found.iloc[0]["verdict"], found.iloc[0]["why"]) == ("cannot say", "too uncertain to say")
    assert found.iloc[0]["ratio_low"] < 1 < found.iloc[0]["ratio_high"]


def test_a_run_beside_itself_is_the_same_in_every_cell(tmp_path):
    """However few processes, wide intervals or doubtful flags it has: it is one measurement."""
    flagged = timed("v", 1024, 10.0)
    flagged = replace(flagged, timing=replace(flagged.timing, flags=("loaded_host",)))
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0, spread=0.5), flagged, *trained({"full": [0.5, 0.6, 0.7]})])
    found = compare(a, a)
    assert set(found.times["verdict"]) == {"same"}
    assert {row["verdict"] for row in found.scores} == {"same"}
    assert found.worse == []


@pytest.mark.parametrize("flag", ["loaded_host", "waiting", "throttled", "clock_changed", "other_gpu_process"])
def test_what_was_disturbed_gives_no_verdict_unless_that_is_allowed(tmp_path, flag):
    disturbed = timed("v", 512, 20.0)
    disturbed = replace(disturbed, timing=replace(disturbed.timing, flags=(flag, "outliers")))
    a, b = write_run(tmp_path / "a", [timed("v", 512, 10.0)]), write_run(tmp_path / "b", [disturbed])
    row = compare(a, b).times.iloc[0]
    assert (row["verdict"], row["why"]) == ("cannot say", f"disturbed ({flag.replace('_', ' ')})")
    assert compare(a, b).worse == []
    allowed = compare(a, b, allow=["flagged"])
    assert (allowed.times.iloc[0]["verdict"], len(allowed.worse)) == ("slower", 1)


def test_what_makes_a_time_doubtful_stands_beside_it(tmp_path):
    throttled = timed("v", 1024, 20.0)
    throttled = replace(throttled, timing=replace(throttled.timing, flags=("throttled",)))
    a = write_run(tmp_path / "a", [timed("v", 512, 10.0), timed("v", 1024, 10.0)])
    b = write_run(tmp_path / "b", [scaling("v", 512, 10.0), throttled])
    (table,) = compare(a, b, allow=["flagged"]).tables()
    times = {row[2]: row[3:5] for row in table.texts()}
    assert [text.rpartition("]")[2] for text in times["512"]] == ["", " \u00b9"]
    assert [text.rpartition("]")[2] for text in times["1k"]] == ["", " \u2020"]
    assert all(f"{mark}: " in table.note for mark in "\u2020\u00b9")
    c = write_run(tmp_path / "c", [scaling("v", 512, 10.0)])
    (table,) = compare(c, c).tables()
    assert "\u00b9" not in str(table.texts()) + table.note, "what is true of all times is said once"
    assert "within one process only" in table.note


def test_other_options_of_a_variant_do_not_pair_up_whatever_the_label(tmp_path):
    a = write_run(tmp_path / "a", [timed("v", 512, 10.0, options={"proj_len": 128})])
    b = write_run(tmp_path / "b", [timed("v", 512, 20.0, options={"proj_len": 256})])
    with pytest.raises(ConfigError, match=r'they differ in options \({"proj_len": 128} against {"proj_len": 256}\)'):
        compare(a, b).tables()
    c = write_run(tmp_path / "c", [timed("v", 512, 20.0, options={"proj_len": 128}, label="mine")])
    assert compare(a, c).times.iloc[0]["verdict"] == "slower"


def test_of_a_variant_whose_source_changed_within_a_run_the_latest_counts(tmp_path):
    old, new = (
        replace(timed("v", 512, ms, variant_digest=digest), started=started)
        for ms, digest, started in ((10.0, "old", "2026-01-01T00:00:00"), (30.0, "new", "2026-01-02T00:00:00"))
    )
    a, b = write_run(tmp_path / "a", [old]), write_run(tmp_path / "b", [new, old])
    assert compare(a, b).times.iloc[0]["ratio"] == pytest.approx(3.0)


def test_other_protocols_pair_up_only_where_that_is_allowed(tmp_path):
    a = write_run(tmp_path / "a", [timed("v", 512, 10.0), *trained({"full": [0.5, 0.52, 0.54]})])
    other = trained({"full": [0.5, 0.52, 0.54]}, protocol_version=2)
    b = write_run(tmp_path / "b", [timed("v", 512, 20.0, protocol_version=2), *other])
    assert set(compare(a, b).times["verdict"]) == {"only in a", "only in b"}
    found = compare(a, b, allow=["protocol"])
    assert (list(found.times["verdict"]), [row["verdict"] for row in found.scores]) == (["slower"], ["same"])
    with pytest.raises(UnknownNameError, match="did you mean 'protocol'"):
        compare(a, b, allow=["protocols"])


# --- what fails a build ---


def heavier(record, factor):
    return replace(record, memory=replace(record.memory, peak_bytes=round(factor * record.memory.peak_bytes)))


def test_only_what_is_worse_whatever_the_noise_was_counts(tmp_path):
    before = [timed("v", length, 10.0) for length in (512, 1024, 2048, 4096, 8192)]
    after = [
        timed("v", 512, 10.4),  # less than the limit
        timed("v", 1024, 12.0),
        scaling("v", 2048, 12.0),  # one process knows nothing
        heavier(timed("v", 4096, 10.0), 1.2),
        scaling("v", 8192, status="crashed", reason="signal 11"),
    ]
    a, b = write_run(tmp_path / "a", before), write_run(tmp_path / "b", after)
    found = compare(a, b, limit=0.05)
    said = sorted(found.worse)
    assert [text.partition(":")[0] for text in said] == ["v fwd L1024", "v fwd L4096", "v fwd L8192"]
    assert said[0].endswith("times the time")
    assert said[1:] == ["v fwd L4096: 1.2 times the memory", "v fwd L8192: crashed: signal 11"]
    assert compare(b, a).worse == [], "what becomes better fails nothing"
    assert compare(a, b, limit=0.3).worse == ["v fwd L8192: crashed: signal 11"]


def test_scores_count_only_where_all_of_the_interval_is_worse(tmp_path):
    before = {"full": [0.5, 0.51, 0.52], "luna": [0.5, 0.51, 0.52], "linformer": [0.5, 0.51, 0.52], "gone": [0.5]}
    after = {"full": [0.4, 0.41, 0.42], "luna": [0.49, 0.5, 0.51], "linformer": [0.3, 0.45, 0.6]}
    failed = [accuracy("gone", 0, None, status="diverged")]
    a, b = write_run(tmp_path / "a", trained(before)), write_run(tmp_path / "b", [*trained(after), *failed])
    assert compare(a, b, limit=0.05).worse == [
        "full on listops: 41.0 % after 51.0 %",
        "gone on listops: no score any more",
    ]


def test_the_comment_for_a_pull_request_names_the_worst_first_and_folds_the_rest(tmp_path):
    lengths = [2**power for power in range(5, 17)]
    slow = {512: 2.0, 1024: 1.5}
    hostile = "<script>|`x`"
    before = [timed(hostile, length, 10.0) for length in lengths]
    after = [timed(hostile, length, 10.0 * slow.get(length, 1.0001)) for length in lengths]
    a, b = write_run(tmp_path / "a", before), write_run(tmp_path / "b", after)
    text = compare(a, b, limit=0.05).markdown()
    assert text.startswith("## 2 worse by more than 5 %\n")
    shown, folded = text.split("<details>")
    open_rows = [line for line in shown.splitlines() if line.startswith("| &lt;script&gt;\\|\\`x")]
    assert [line.rsplit("|", 2)[1].strip() for line in open_rows] == ["slower", "slower"]
    assert " 512 " in open_rows[0]
    assert "<summary>All 12 cells</summary>" in folded
    assert folded.count("| &lt;") == 12
    assert "<script>" not in text


def test_a_comment_shows_a_table_of_few_cells_that_all_differ_once(tmp_path):
    before, after = ([timed("v", length, time) for length in (512, 1024)] for time in (10.0, 20.0))
    text = compare(write_run(tmp_path / "a", before), write_run(tmp_path / "b", after)).markdown()
    assert text.count("| v |") == 2
    assert "Ratio: " in text
    assert "\n\n0 of 2 timed cells agree" in text, "a paragraph, not the end of the last item above it"


def test_of_very_many_cells_people_see_those_that_differ_most(tmp_path):
    lengths = [2**power for power in range(5, 17)]
    slow = {4096: 1.5, 65536: 2.0, 512: 0.5, 1024: 0.6}
    before = [timed("v", length, 10.0) for length in lengths]
    after = [timed("v", length, 10.0 * slow.get(length, 1.0001)) for length in lengths]
    found = compare(write_run(tmp_path / "a", before), write_run(tmp_path / "b", after))
    (all_of_them,), (few,) = found.tables(most=12), found.tables(most=3)
    assert [row["seq_len"] for row in all_of_them.rows] == lengths
    assert [row["seq_len"] for row in few.rows] == [65536, 4096, 512]
    assert few.note.startswith("The 3 that differ most of 12 cells; --json has all.")
    assert len(found.rows) == 12


def test_a_comment_is_never_longer_than_a_pull_request_takes(tmp_path):
    records = [scaling(f"{index:04}_{'name' * 120}", 512, 10.0) for index in range(150)]
    text = compare(*(write_run(tmp_path / side, records) for side in "ab")).markdown()
    assert 40_000 < len(text) < 65_536
    assert "All 150 cells (" in text


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
    assert compare(a, b, allow=["environment"]).times.iloc[0]["verdict"] == "faster"


def test_a_machine_in_common_is_enough_whichever_else_there_is(tmp_path):
    """Their digests have no order that means anything."""
    others = [replace(MACHINE, cpu=f"CPU {index}") for index in range(8)]
    assert {other.digest < MACHINE.digest for other in others} == {True, False}
    b = write_run(tmp_path / "b", [timed("v", 512, 10.0)])
    for index, other in enumerate(others):
        records = [timed("v", 512, 10.0), replace(timed("v", 1024, 10.0), environment=other.digest)]
        machines = {one.digest: one.to_dict() for one in (MACHINE, other)}
        a = write_run(tmp_path / f"a{index}", records, environments=machines)
        assert compare(a, b).times.set_index("seq_len")["verdict"].to_dict() == {512: "same", 1024: "only in a"}


def test_another_commit_on_the_same_machine_is_fine(tmp_path):
    newer = replace(MACHINE, commit="ffff", is_dirty=True)
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0)])
    b = write_run(tmp_path / "b", [scaling("v", 512, 10.0)], environment=newer)
    assert compare(a, b).times.iloc[0]["verdict"] == "same"


def test_empty_runs_and_no_results_folder(tmp_path):
    a, b = write_run(tmp_path / "a", []), write_run(tmp_path / "b", [])
    assert len(compare(a, b).times) == 0
    measured = write_run(tmp_path / "c", [scaling("v", 512, 10.0)])
    with pytest.raises(ConfigError, match="the first has none that was measured, the second 1, such as v fwd L512"):
        compare(a, measured).tables()
    with pytest.raises(ConfigError, match="not a results folder"):
        compare(a, tmp_path)


def test_people_see_both_times_the_ratio_and_whether_the_runs_agree(tmp_path):
    a = write_run(tmp_path / "a", [timed("v", 512, 10.0), timed("v", 1024, 10.0), timed("v", 2048, 10.0)])
    b = write_run(tmp_path / "b", [timed("v", 512, 10.001), timed("v", 1024, 20.0), timed("w", 512, 1.0)])
    table = compare_table(a, b)
    rows = {row[2]: row for row in table.texts()}
    assert set(rows) == {"512", "1k"}, "what only one side has is no comparison"
    assert (rows["512"][-1], rows["1k"][-1]) == ("agree", "slower")
    assert rows["1k"][3] == "10.1 ms [9.98, 10.1]"
    assert rows["1k"][4].startswith("20")
    assert rows["1k"][5].startswith("2 [")
    ends = [table.rows[1][f"ratio_{end}"] for end in ("low", "high")]
    assert 1.98 < ends[0] < 2 < ends[1] < 2.02
    assert "covers what differs between the 3 processes" in table.note
    said = compare(a, b).agreement
    assert said.startswith("1 of 2 timed cells agree, with ratios known to a factor of 1.0")
    assert said.endswith("either way (median); 1 slower in the second; 1 only in the first; 1 only in the second")


def test_the_note_tells_several_processes_from_one(tmp_path):
    many = [repeated(scaling("v", length, 10.0)) for length in (512, 1024)]
    a, b = write_run(tmp_path / "a", many), write_run(tmp_path / "b", many)
    found = compare_table(a, b)
    assert "covers what differs between the 3 processes that took the samples." in found.note
    assert [row["num_processes_a"] for row in found.rows] == [3, 3]
    c = write_run(tmp_path / "c", [scaling("v", 512, 10.0)])
    assert "of a single one it is the uncertainty within one process only" in compare_table(a, c).note


def test_runs_without_a_common_cell_are_an_error_that_shows_one_of_each(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0), scaling("v", 1024, 10.0)])
    b = write_run(tmp_path / "b", [scaling("w", 512, 10.0, pass_="bwd")])
    with pytest.raises(
        ConfigError, match=r"first has 2, such as v fwd L512 float32 on cpu, the second 1, such as w bwd"
    ):
        compare_table(a, b)
    failed = write_run(tmp_path / "c", [scaling("w", 512, status="timeout", reason="60 s")])
    with pytest.raises(ConfigError, match="the second none that was measured"):
        compare_table(a, failed)
    nameless = [write_run(tmp_path / name, [scaling(name, 512, 10.0, pass_=None)]) for name in ("x", "y")]
    with pytest.raises(ConfigError, match=r"first has 1, such as x L512 float32 on cpu, the second 1, such as y L512"):
        compare_table(*nameless)


def test_unchanged_code_is_not_faster_in_runs_of_one_process(tmp_path):
    """Between processes it varies by more than any interval of one of them knows."""
    found = verdicts(tmp_path, [scaling("v", 512, 10.0)], [scaling("v", 512, 9.5)])
    assert found.iloc[0]["verdict"] == "cannot say"
    mixed = verdicts(tmp_path / "mixed", [timed("v", 512, 10.0)], [scaling("v", 512, 5.0)])
    assert mixed.iloc[0]["verdict"] == "cannot say"
    said = compare(tmp_path / "a", tmp_path / "b").agreement
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
        compare_table(a, b)


def test_cells_of_another_protocol_beside_common_ones_say_which(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0), scaling("v", 1024, 10.0, protocol_version=3)])
    b = write_run(tmp_path / "b", [scaling("v", 512, 10.0), scaling("v", 1024, 10.0, protocol_version=2)])
    assert compare(a, b).agreement.endswith("only in the second: they differ in protocol_version (3 against 2)")


def test_where_no_field_differs_as_a_whole_the_nearest_pair_tells(tmp_path):
    a = write_run(tmp_path / "a", [scaling("v", 512, 10.0), scaling("w", 1024, 10.0)])
    b = write_run(tmp_path / "b", [scaling("v", 1024, 10.0), scaling("w", 512, 10.0)])
    with pytest.raises(ConfigError, match=r"they differ in (label|seq_len) \("):
        compare_table(a, b)


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
    rows = compare(a, b).scores
    found = {row["label"]: row["verdict"] for row in rows}
    assert found == {"full": "better", "linformer": "worse", "bigbird": "same", "luna": "cannot say"}
    (table,) = compare(a, b).tables()
    texts = {row[0]: row for row in table.texts()}
    assert texts["full"][2:4] == ["52.0 %", "62.0 %"]
    assert texts["full"][4].startswith("+10.0 [+9.")
    assert texts["bigbird"][-1] == "agree"


def test_scores_from_scratch_and_after_self_pretraining_have_sentences_apart(tmp_path):
    more = {"pretrain": "masked"}
    a, b = (
        write_run(
            tmp_path / name,
            [
                *trained({"full": [first, first + 0.01, first + 0.02]}),
                *(
                    accuracy("full", seed, first + 0.3 + 0.01 * seed, score=more | {"correct": ""}, overrides=more)
                    for seed in range(3)
                ),
            ],
        )
        for name, first in (("a", 0.5), ("b", 0.2))
    )
    said = compare(a, b).worse
    assert [text.partition(":")[0] for text in sorted(said)] == [
        "full on listops (masked)",
        "full on listops (scratch)",
    ]


def test_trainings_beside_themselves_are_the_same_whatever_their_seeds_and_failures(tmp_path):
    failed = [accuracy("luna", seed, None, status="diverged") for seed in (0, 1)]
    left = accuracy("bigbird", 0, 0.4).cell
    records = [*trained({"full": [0.5, 0.52, 0.54], "linformer": [0.3]}), *failed]
    planned = pack_cells([*(record.cell for record in records), left])
    a = write_run(tmp_path / "a", records, planned=planned)
    assert {row["label"]: row["verdict"] for row in compare(a, a).scores} == {"full": "same", "linformer": "same"}
    more = trained({"luna": [0.4], "bigbird": [0.4]})
    b = write_run(tmp_path / "b", [*trained({"full": [0.5, 0.52, 0.54]}), *more])
    expected = {"full": "same", "linformer": "only in a", "luna": "failed in a", "bigbird": "only in b"}
    assert {row["label"]: row["verdict"] for row in compare(a, b).scores} == expected
    assert compare(b, a).worse == ["luna on listops: no score any more"], "bigbird was never tried"


def test_scores_pair_up_by_options_whatever_the_labels(tmp_path):
    """That the second run has a further choice of options, and so longer labels, is no reason not to compare."""
    a = write_run(tmp_path / "a", trained({"linformer": [0.5, 0.52, 0.54]}))
    more = trained({"linformer": [0.1, 0.12, 0.14]}, options={"proj_len": 32})
    b = write_run(tmp_path / "b", [*trained({"linformer": [0.6, 0.62, 0.641]}), *more])
    found = {row["label"]: (row["verdict"], row["score_a"]) for row in compare(a, b).scores}
    assert found == {"linformer (defaults)": ("better", 0.52), "linformer (proj_len=32)": ("only in b", None)}
    c = write_run(tmp_path / "c", more)
    assert {row["verdict"] for row in compare(a, c).scores} == {"only in a", "only in b"}, "one label, other options"


def test_of_a_training_whose_source_changed_within_a_run_the_latest_counts(tmp_path):
    versions = [
        replace(one, started=f"2026-01-0{day}T00:00:00", cell=replace(one.cell, variant_digest=f"digest{day}"))
        for day, values in ((1, [0.9, 0.92, 0.94]), (2, [0.4, 0.42, 0.441]))
        for one in trained({"full": values})
    ]
    a, b = write_run(tmp_path / "a", trained({"full": [0.5, 0.52, 0.54]})), write_run(tmp_path / "b", versions)
    assert [(row["verdict"], row["score_a"]) for row in compare(a, b).scores] == [("worse", 0.52)]


def test_scores_agree_only_where_a_large_difference_is_excluded(tmp_path):
    before = {"full": [0.5, 0.52, 0.54], "linformer": [0.5, 0.51, 0.52]}
    after = {"full": [0.2, 0.55, 0.35], "linformer": [0.51, 0.5, 0.52]}
    a, b = write_run(tmp_path / "a", trained(before)), write_run(tmp_path / "b", trained(after))
    found = {row["label"]: row["verdict"] for row in compare(a, b).scores}
    assert found == {"full": "cannot say", "linformer": "same"}


def test_rows_of_other_settings_and_options_are_told_apart_by_people(tmp_path):
    settings: list[dict[str, Any]] = [
        {},
        {"has_padding": True},
        {"head_dim": 128},
        {"device": "cuda"},
        {"options": {"proj_len": 32}},
    ]
    sides = [
        [timed("v", 512, ms, **setting) for setting in settings]
        + [one for level in ("short", "long") for one in trained({"full": [score] * 3}, level=level)]
        for ms, score in ((10.0, 0.9), (20.0, 0.1))
    ]
    a, b = (write_run(tmp_path / name, side) for name, side in zip("ab", sides, strict=True))
    found = compare(a, b)
    assert len(set(found.worse)) == len(found.worse) == 7
    assert any(text.startswith("full on listops (long): ") for text in found.worse)
    for table in found.tables():
        assert len({tuple(text[:4]) for text in table.texts()}) == len(table.rows), table.name


def test_scores_of_other_protocols_say_which(tmp_path):
    values = {"full": [0.5, 0.52, 0.54]}
    a = write_run(tmp_path / "a", trained(values))
    b = write_run(tmp_path / "b", trained(values, protocol="lra-small"))
    with pytest.raises(ConfigError, match=r"they differ in protocol \(cpu-small against lra-small\)"):
        compare(a, b).tables()


def test_seeds_that_failed_are_worse_whatever_the_others_scored(tmp_path):
    """Or a run of which most trainings diverged would pass."""
    before, after = trained({"full": [0.5, 0.52, 0.54]}), trained({"full": [0.5]})
    lost = [accuracy("full", seed, None, status="diverged") for seed in (1, 2)]
    a, b = write_run(tmp_path / "a", before), write_run(tmp_path / "b", [*after, *lost])
    found = compare(a, b)
    assert found.worse == ["full on listops: 2 seeds failed that had a score"]
    assert "## 1 worse by more than 10 %" in found.markdown()
    (table,) = found.tables()
    assert table.texts()[0][-1] == "cannot say, 2 seeds failed"
    other = write_run(tmp_path / "o", [accuracy("full", 7, None, status="diverged")])
    assert compare(a, other).worse == ["full on listops: no score any more"]
    unrun = write_run(tmp_path / "c", [*after, *(replace(one, status="cancelled") for one in lost)])
    assert compare(a, unrun).worse == [], "what was not run has not failed"
    errors = [approximation("bigbird", 512, 0.1 + seed / 1e3, seed=seed) for seed in range(3)]
    timeouts = [approximation("bigbird", 512, 0.0, seed=seed, status="timeout") for seed in (1, 2)]
    a, b = write_run(tmp_path / "d", errors), write_run(tmp_path / "e", [errors[0], *timeouts])
    assert compare(a, b).worse == ["bigbird on peaked inputs L512: 2 seeds failed that had an error"]


def test_means_are_over_common_seeds_as_the_difference_is(tmp_path):
    a = write_run(tmp_path / "a", trained({"full": [0.5, 0.6, 0.7, 0.2]}))
    b = write_run(tmp_path / "b", trained({"full": [0.5, 0.6, 0.7]}))
    (row,) = compare(a, b).scores
    assert (row["score_a"], row["score_b"]) == pytest.approx((0.6, 0.6))
    assert row["difference"] == 0.0


def test_a_run_of_trainings_beside_one_of_times_is_told_by_all_that_each_has(tmp_path):
    a = write_run(tmp_path / "a", trained({"full": [0.5, 0.6]}))
    b = write_run(tmp_path / "b", [timed("full", 512, 1.0)])
    with pytest.raises(ConfigError, match="the first has 1, such as full on listops by cpu-small, the second 1, such"):
        compare(a, b).tables()
