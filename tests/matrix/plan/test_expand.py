"""From a matrix to cells: all of them, each once, in order, refused with a reason where a variant says no."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_zoo.console import print_plan
from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.matrix.plan.estimate import CALLS, ENERGY_S, REPEATED_CALLS, START_S, assumed_rate
from attn_zoo.matrix.plan.expand import estimated, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix, restore_matrix
from attn_zoo.matrix.plan.source_digest import CALL_ROOMS, source_digest
from attn_zoo.registry import Variant, variants
from tests.matrix.conftest import make_matrix, tiny_plan


def axis(values):
    return st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)


GROUP = st.fixed_dictionaries(
    {
        "variants": axis(["full", "fake_ok", "fake_modest"]),
        "seq_len": axis([1, 16, 512, 100_000]),
        "passes": axis(["fwd", "fwd_bwd"]),
        "dtypes": axis(["float32", "bfloat16"]),
        "batch_size": axis([1, 2]),
        "head_dim": axis([8, 64]),
        "scope": axis(["attention", "mixer"]),
        "is_causal": axis([False, True]),
        "has_padding": axis([False, True]),
        "dropout_p": axis([0.0, 0.1]),
        "seeds": axis([0, 1]),
        "device": st.just("cpu"),
    }
)


@settings(deadline=None, max_examples=12)
@given(groups=st.lists(GROUP, min_size=1, max_size=2), count=st.integers(1, 4))
def test_expansion_is_complete_unique_deterministic_and_sharded_without_loss(groups, count):
    matrix = parse_matrix({"name": "x", "scaling": groups}, "x")
    plan = make_plan(matrix)
    keys = [item.cell.key for item in plan.cells]
    assert len(keys) == len(set(keys)) <= matrix.num_cells
    if len(groups) == 1:
        assert len(keys) == matrix.num_cells
    assert keys == [item.cell.key for item in make_plan(parse_matrix({"name": "x", "scaling": groups}, "y")).cells]
    curves = [curve for curve, _ in itertools.groupby(item.cell.curve for item in plan.cells)]
    assert len(curves) == len(set(curves)), "a curve is torn apart"
    for _, curve in itertools.groupby(plan.cells, key=lambda item: item.cell.curve):
        lengths = [item.cell.seq_len or 0 for item in curve]
        assert lengths == sorted(lengths)
    shards = [make_plan(matrix, shard=(index, count)).cells for index in range(1, count + 1)]
    assert sorted(keys) == sorted(item.cell.key for shard in shards for item in shard)


def test_every_field_of_the_matrix_reaches_the_cell():
    plan = tiny_plan(
        [{"name": "full", "label": "my full", "options": {}}],
        seq_len=[32],
        batch_size=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dtypes=["float64"],
        passes=["bwd"],
        is_causal=True,
        has_padding=True,
        dropout_p=0.25,
        seeds=[5],
        scope="mixer",
        isolation="lane",
        timeout_s=7,
        budget_s=0.5,
    )
    (item,) = plan.cells
    cell = item.cell
    assert (cell.label, cell.batch_size, cell.num_heads, cell.num_kv_heads) == ("my full", 3, 4, 2)
    assert (cell.head_dim, cell.dtype, cell.pass_, cell.seed, cell.scope) == (16, "float64", "bwd", 5, "mixer")
    assert (cell.is_causal, cell.has_padding, cell.dropout_p, cell.threads) == (True, True, 0.25, 1)
    assert (item.isolation, item.timeout_s, item.budget_s) == ("lane", 7.0, 0.5)
    assert cell.id == "my full/scaling/bwd/L32/fp64/mixer/B3/causal/padded/dropout0.25/H4/G2/D16/seed5"
    assert item.estimate_s is not None
    assert item.estimate_bytes is not None
    assert plan.estimate_s == pytest.approx(item.estimate_s)


def test_estimates_are_added_once_and_to_nothing_that_is_refused():
    matrix = make_matrix(["fake_ok", "fake_modest"], seq_len=[16, 32], is_causal=[False, True], repeats=3)
    plain, plan = make_plan(matrix, has_estimates=False), make_plan(matrix)
    assert tuple(estimated(plain.cells)) == plan.cells
    assert {item.estimate_s is None for item in plan.cells if item.refusal} == {True}
    assert {item.estimate_s is None for item in plan.cells if not item.refusal} == {False}
    known = replace(plan.cells[0], estimate_s=7.0)
    assert estimated([known]) == [known]


def test_twice_the_threads_are_assumed_to_take_half_the_time_and_a_plan_says_at_which_rate(monkeypatch, capsys):
    calls = {"seq_len": [2**17], "budget_s": 0.01}
    one, two = (tiny_plan(["fake_ok"], threads=threads, **calls) for threads in (1, 2))
    start_s = tiny_plan(["fake_ok"], seq_len=[16], budget_s=0.01).estimate_s
    assert two.estimate_s - start_s == pytest.approx((one.estimate_s - start_s) / 2, rel=0.01)
    monkeypatch.setattr("attn_zoo.matrix.plan.estimate.num_cores", lambda: 3)
    all_three = tiny_plan(["fake_ok"], threads=None, **calls)
    assert all_three.estimate_s - start_s == pytest.approx((one.estimate_s - start_s) / 3, rel=0.01)
    print_plan(all_three)
    assert f"at an assumed {assumed_rate('cpu', 3) / 1e9:g} GFLOP/s in float32 on cpu" in capsys.readouterr().out


def test_of_long_calls_a_repeat_takes_the_first_and_two_samples_and_one_repeat_checks_and_weighs_besides():
    def calls_s(repeats: int) -> float:
        plan = tiny_plan(["fake_ok"], seq_len=[2**17], budget_s=0.01, repeats=repeats)
        return plan.estimate_s - repeats * START_S

    assert calls_s(3) == pytest.approx(calls_s(1) * (CALLS + 2 * REPEATED_CALLS) / CALLS)


@pytest.mark.parametrize(("device", "takes_s"), [("cuda", ENERGY_S), ("cpu", 0.0)])
def test_energy_takes_seconds_once_where_it_can_be_counted(device, takes_s):
    """A run with a time limit began such cells when it had no time for them."""
    plan = make_plan(make_matrix(["full"], device=device, threads=None, repeats=3))
    items = [replace(item, refusal=None, estimate_s=None) for item in plan.cells]  # where there is no GPU too
    pairs = zip(estimated(items), estimated(replace(item, has_energy=True) for item in items), strict=True)
    for without, counted in pairs:
        assert without.estimate_s is not None
        assert counted.estimate_s == pytest.approx(without.estimate_s + takes_s)


def test_no_more_scores_are_forecast_than_there_are_flops_to_use_them():
    """The first sorts blocks by scores of pairs of them: as L^2 in the end, and far below it before."""
    sizes = {"num_heads": 1, "head_dim": 64, "seq_len": [2**10, 2**13]}
    plan = tiny_plan(["sinkhorn", {"name": "full", "options": {"backend": "math"}}], **sizes)
    [sorted_short, sorted_long, dense_short, dense_long] = [item.estimate_bytes or 0 for item in plan.cells]
    assert dense_long > 50 * dense_short, "all pairs"
    assert sorted_long < 16 * sorted_short
    assert dense_long == 4 * (4 * 2**13 * 64 + 2 * 2**26)


def test_refusals_say_why_and_need_no_worker():
    plan = tiny_plan(["fake_modest"], seq_len=[16], is_causal=[False, True], has_padding=[False, True])
    refusals = {(item.cell.is_causal, item.cell.has_padding): item.refusal for item in plan.cells}
    assert refusals[False, False] is None
    assert refusals[True, False] == ("causal", "no causal form")
    assert refusals[False, True] == ("key_padding_mask", "no key_padding_mask")
    grouped = tiny_plan(["fake_ok"], num_heads=4, num_kv_heads=2, seq_len=[16]).cells[0]
    assert grouped.refusal is not None
    assert grouped.refusal[0] == "grouped_query"


def test_device_and_additions():
    matrix = make_matrix(["full"], device="auto")
    assert {item.cell.device for item in make_plan(matrix, device="cpu").cells} == {"cpu"}
    added = make_plan(matrix, add_variants=["fake_ok", "full"])
    assert [item.cell.variant for item in added.cells] == ["full", "full", "fake_ok", "fake_ok"]
    with pytest.raises(UnknownNameError, match="did you mean 'fake_ok'"):
        make_plan(matrix, add_variants=["fake_okk"])


def test_what_a_folder_stores_gives_the_same_cells_without_the_command_line():
    plan = make_plan(make_matrix(["full"], device="auto"), device="cuda", add_variants=["fake_ok"], is_remote=True)
    stored = make_plan(restore_matrix(plan.matrix.model_dump(mode="json")), is_remote=True)
    assert [item.cell.key for item in stored.cells] == [item.cell.key for item in plan.cells]
    assert {item.cell.device for item in stored.cells} == {"cuda"}


def test_without_a_gpu_cuda_cells_are_refused_but_not_for_a_cluster(monkeypatch):
    monkeypatch.setattr("attn_zoo.matrix.plan.expand._has_cuda", lambda: False)
    matrix = make_matrix(["full"], device="cuda")
    assert {item.refusal for item in make_plan(matrix).cells} == {("cuda", "no CUDA device here")}
    assert {item.refusal for item in make_plan(matrix, is_remote=True).cells} == {None}


def test_every_cell_of_a_group_has_an_id_of_its_own():
    sizes = {"batch_size": [1, 4], "num_heads": [4, 8], "head_dim": [8, 64], "dtypes": ["float32", "bfloat16"]}
    cells = make_plan(make_matrix(["full"], seq_len=[16], num_kv_heads=4, **sizes)).cells
    assert len({item.cell.id for item in cells}) == len(cells) == 16


def test_only_keeps_matching_cells():
    matrix = make_matrix(["full", "fake_ok"])
    assert {item.cell.id for item in make_plan(matrix, only=["fake_*L16/*"]).cells} == {
        "fake_ok/scaling/fwd/L16/fp32/H1/D8/seed0"
    }
    with pytest.raises(ConfigError, match=r"no cell matches nothing  \(a cell's id looks like full/scaling/"):
        make_plan(matrix, only=["nothing"])
    with pytest.raises(ConfigError, match=r"expected I/N with 1 <= I <= N; got 3/2"):
        make_plan(matrix, shard=(3, 2))


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("ful/*", "full"),
        ("FULL/*", "full"),
        ("*/scalling/*", "scaling"),
        ("*/fp23/*", "fp32"),
        ("fake_okk*", "fake_ok"),
    ],
)
def test_where_only_keeps_nothing_the_nearest_part_of_an_id_is_named(pattern, meant):
    with pytest.raises(ConfigError, match=f"; did you mean '{meant}'\\?  \\(a cell's id looks like full/scaling/"):
        make_plan(make_matrix(["full", "fake_ok"]), only=["fp32", pattern])


def test_the_digest_is_in_the_cell():
    (cell, *_) = (item.cell for item in tiny_plan(["fake_ok"]).cells)
    assert cell.variant_digest == source_digest(variants["fake_ok"], CALL_ROOMS, "cpu") != ""


def test_probe_asks_constructors_and_survives_what_they_do():
    matrix = make_matrix(["fake_picky", "full", "fake_bad_constructor"])
    blind = make_plan(matrix)
    assert [item.refusal for item in blind.cells] == [None] * 6, "the plan itself builds nothing"
    asked = make_plan(matrix, should_probe=True)
    refused = {item.cell.id.partition("/fp32")[0]: item.refusal for item in asked.cells if item.refusal}
    assert refused == {"fake_picky/scaling/fwd/L1024": ("max_seq_len", "at most 800 tokens")}


def test_what_is_timed_in_turns_is_one_lane_and_each_length_one_bundle():
    plan = tiny_plan(["full", "fake_ok"], isolation="interleaved", passes=["fwd", "bwd"], seq_len=[64, 16], repeats=3)
    lanes = [list(items) for _, items in itertools.groupby(plan.cells, key=lambda item: item.lane)]
    assert len(lanes) == 2, "one for each pass"
    for lane in lanes:
        bundles = [list(items) for _, items in itertools.groupby(lane, key=lambda item: item.bundle)]
        assert [[(item.cell.label, item.cell.seq_len) for item in bundle] for bundle in bundles] == [
            [("full", 16), ("fake_ok", 16)],
            [("full", 64), ("fake_ok", 64)],
        ]
        assert {item.cell.together for item in lane} == {lane[0].lane}
        assert {item.repeats for item in lane} == {3}
    for shard in (1, 2):
        part = make_plan(plan.matrix, shard=(shard, 2)).cells
        bundles = [list(items) for _, items in itertools.groupby(part, key=lambda item: item.bundle)]
        assert sorted(bundle[0].cell.seq_len or 0 for bundle in bundles) == [16, 64], "shards have alike work"
        assert [len(bundle) for bundle in bundles] == [2, 2], "and tear apart nothing that is timed in turns"


def test_a_shard_without_a_cell_that_another_has_is_no_typing_error():
    matrix = make_matrix(["full", "fake_ok"])
    shards = [make_plan(matrix, shard=(index, 3), only=["fake_ok/*"]).cells for index in (1, 2, 3)]
    assert min(map(len, shards)) == 0 < sum(map(len, shards))
    with pytest.raises(ConfigError, match="no cell matches fake_k"):
        make_plan(matrix, shard=(3, 3), only=["fake_k/*"])


def test_shards_weigh_what_cells_take_and_not_their_number_or_length():
    group = {"device": "cpu", "batch_size": 1, "num_heads": 8, "head_dim": 64}
    long = {**group, "variants": ["full"], "seq_len": [16384]}
    short = {**group, "variants": ["full", "linformer"], "seq_len": [128, 256, 512], "repeats": 3}
    matrix = parse_matrix({"name": "x", "scaling": [long, short]}, "x")
    alone, rest = (make_plan(matrix, shard=(index, 2)).cells for index in (1, 2))
    assert [item.cell.seq_len for item in alone] == [16384], "seconds where the others are milliseconds"
    assert len(rest) == 6
    training = {"task": "copying", "level": "short", "protocol": "cpu-small", "variants": ["full"], "device": "cpu"}
    matrix = parse_matrix({"name": "x", "scaling": [short], "accuracy": [{**training, "seeds": [0, 1, 2]}]}, "x")
    shards = [make_plan(matrix, shard=(index, 3)).cells for index in (1, 2, 3)]
    assert [sum(item.cell.task == "copying" for item in shard) for shard in shards] == [1, 1, 1]


def test_a_cell_of_two_groups_is_measured_as_the_more_demanding_wants_it():
    less = {"variants": ["full"], "seq_len": [16], "device": "cpu", "timeout_s": 77.0, "isolation": "lane"}
    more = {"variants": ["full"], "seq_len": [16, 32], "device": "cpu", "repeats": 3, "budget_s": 2.0}
    for groups in ([less, more], [more, less]):
        plan = make_plan(parse_matrix({"name": "x", "scaling": groups}, "x"))
        assert [item.cell.seq_len for item in plan.cells] == [16, 32]
        assert {(one.repeats, one.budget_s, one.isolation) for one in plan.cells} == {(3, 2.0 / 3, "cell")}
        assert {one.timeout_s for one in plan.cells} == {600.0}


def test_shards_have_alike_work():
    matrix = make_matrix(
        ["full", "fake_ok", "linformer"], seq_len=[16, 32, 64, 128], passes=["fwd", "bwd"], isolation="lane"
    )
    shards = [make_plan(matrix, shard=(index, 4)).cells for index in range(1, 5)]
    longest = [sum(item.cell.seq_len == 128 for item in shard) for shard in shards]
    assert max(longest) - min(longest) <= 1
    seconds = [sum(item.estimate_s or 0.0 for item in shard) for shard in shards]
    assert max(seconds) < 1.1 * min(seconds)
    for shard in shards:
        for _, items in itertools.groupby(shard, key=lambda item: item.cell.curve):
            lengths = [item.cell.seq_len or 0 for item in items]
            assert lengths == sorted(lengths)


def test_another_peer_or_number_of_processes_is_another_cell_and_alone_is_the_old_one():
    def keys(names, **changes):
        return {item.cell.label: item.cell.key for item in tiny_plan(names, seq_len=[16], **changes).cells}

    pair = keys(["full", "fake_ok"], isolation="interleaved")
    assert keys(["full", "fake_ok"], isolation="interleaved") == pair
    assert keys(["full", "linformer"], isolation="interleaved")["full"] != pair["full"]
    assert keys(["full", "fake_ok"], isolation="interleaved", repeats=2)["full"] != pair["full"]
    alone = keys(["full", "fake_ok"])
    assert alone["full"] != pair["full"]
    assert keys(["full"])["full"] == alone["full"] == keys(["full"], isolation="lane")["full"]


def test_a_lane_shares_its_process_with_the_other_passes_of_its_variant_only():
    lanes = tiny_plan(["full", "fake_ok"], isolation="lane", passes=["fwd", "bwd"]).cells
    assert len({item.cell.curve for item in lanes}) == 4
    assert len({item.lane for item in lanes}) == 2
    isolated = tiny_plan(["full", "fake_ok"], passes=["fwd", "bwd"]).cells
    assert {item.lane for item in isolated} == {item.cell.curve for item in isolated}


def test_flops_are_counted_once_for_cells_that_differ_in_length_and_pass():
    def counted(**changes):
        plan = tiny_plan(["full"], passes=["fwd", "bwd"], seq_len=[16, 64], **changes)
        return [(item.cell.pass_, item.cell.seq_len) for item in plan.cells if item.has_count]

    assert counted() == [("fwd", 16)]
    assert counted(isolation="lane") == [("fwd", 16), ("fwd", 64)]
    assert counted(isolation="interleaved") == [("fwd", 16)]
    group = {"variants": ["full"], "seq_len": [16, 64], "device": "cpu"}
    tokens = make_plan(parse_matrix({"name": "x", "decode": [group]}, "x"))
    assert [item.has_count for item in tokens.cells] == [True, True], "no formula says them, and a step is cheap"


@pytest.mark.parametrize("kind", ["scaling", "decode", "step", "approximation", "accuracy", "replacement"])
def test_a_formula_that_fails_stops_no_plan_whatever_the_kind(monkeypatch, kind):
    def flops(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Variant, "flops", flops)
    own: dict[str, Any] = {"accuracy": {"task": "listops"}, "replacement": {"task": "listops", "of": "full"}}
    group = {"variants": ["full"], "device": "cpu", **own.get(kind, {"seq_len": 64})}
    items = make_plan(parse_matrix({"name": "x", kind: [group]}, "x")).cells
    assert {(item.refusal, item.estimate_s, item.estimate_bytes) for item in items} == {(None, None, None)}
