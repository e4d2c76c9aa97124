"""Accuracy groups: what they may say, the cells they become, and what is refused before anything is trained."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attn_zoo import api
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.kinds.accuracy import TrainingForecast
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.plan.estimate import COMPILE_S, START_S
from attn_zoo.matrix.plan.expand import estimated, make_plan, require_devices
from attn_zoo.matrix.plan.schema import load_matrix, parse_matrix, restore_matrix
from attn_zoo.model.config import LEAKY_NORM
from attn_zoo.records import Record, Score
from tests.matrix.conftest import TINY_TRAINING, run_cell, training_plan

RANKS = {"data_parallel": 2}


def problems_of(**group) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_matrix({"name": "x", "accuracy": [{"variants": ["full"], "task": "fake_task", **group}]}, "x")
    assert caught.value.exit_code == 2
    return [f"{path}: {text}" for path, text in caught.value.problems]


def test_every_combination_of_the_grid_is_a_cell_and_the_same_for_every_variant():
    grid = {"weight_decay": [0.0, 0.1], "base_lr": [3e-4, 1e-3, 3e-3]}
    plan = training_plan(["fake_train_ok", "fake_train_slow"], grid=grid, seeds=[0, 1])
    assert plan.matrix.num_cells == len(plan.cells) == 2 * 6 * 2
    trials: dict[str, set[tuple[int, float, float]]] = {name: set() for name in ("fake_train_ok", "fake_train_slow")}
    for item in plan.cells:
        cell = item.cell
        assert cell.grid == ("base_lr", "weight_decay")
        assert {**cell.overrides, "base_lr": 0, "weight_decay": 0} == {**TINY_TRAINING, "base_lr": 0, "weight_decay": 0}
        trials[cell.variant].add((cell.seed, cell.overrides["base_lr"], cell.overrides["weight_decay"]))
    assert trials["fake_train_ok"] == trials["fake_train_slow"]
    assert len(trials["fake_train_ok"]) == 12
    assert len({item.cell.id for item in plan.cells}) == len({item.cell.key for item in plan.cells}) == 24
    ids = {item.cell.id for item in plan.cells}
    assert "fake_train_ok/accuracy/fake_task/short/cpu-small/base_lr0.0003/weight_decay0.1/seed1" in ids
    assert not any(item.refusal for item in plan.cells)


def test_a_grid_may_hold_any_field_of_the_protocol_and_ids_stay_readable():
    plan = training_plan(["fake_train_ok"], grid={"betas": [[0.9, 0.98], [0.9, 0.999]], "position": ["none", "rotary"]})
    ids = [item.cell.id for item in plan.cells]
    assert "fake_train_ok/accuracy/fake_task/short/cpu-small/betas-0.9-0.98/position-rotary/seed0" in ids
    assert len(set(ids)) == 4


def test_ids_tell_precision_and_pretraining_apart():
    common = {**TINY_TRAINING, "pretrain": "masked", "pretrain_steps": 2}
    plan = training_plan(["fake_train_ok"], dtypes=["float32", "bfloat16"], overrides=common)
    place = "fake_train_ok/accuracy/fake_task/short/cpu-small"
    assert [item.cell.id for item in plan.cells] == [f"{place}/pretrain/seed0", f"{place}/bf16/pretrain/seed0"]
    steps = {**TINY_TRAINING, "pretrain_steps": 2}
    plan = training_plan(["fake_train_ok"], overrides=steps, grid={"pretrain": ["", "masked"]})
    assert [item.cell.id for item in plan.cells] == [f"{place}/pretrain-none/seed0", f"{place}/pretrain-masked/seed0"]


def test_trials_that_differ_only_in_what_no_pretraining_reads_are_one():
    grid = {"pretrain": ["", "masked", "causal"], "pretrain_steps": [2, 3], "pretrain_mask_prob": [0.1, 0.2]}
    plan = training_plan(["fake_train_ok"], overrides=TINY_TRAINING, grid=grid)
    tried = [[item.cell.overrides[name] for name in grid] for item in plan.cells]
    masked = [["masked", steps, prob] for steps in (2, 3) for prob in (0.1, 0.2)]
    assert tried == [["", 2, 0.1], *masked, ["causal", 2, 0.1], ["causal", 3, 0.1]]


def test_tasks_and_levels_may_be_lists_and_weights_may_be_kept():
    plan = training_plan(["fake_train_ok"], task=["fake_task", "fake_other_task"], level=["short", "recall"])
    found = [(item.cell.task, item.cell.level) for item in plan.cells]
    names = ("fake_task", "fake_other_task")
    assert found == [(task, level) for task in names for level in ("short", "recall")]
    assert len({item.cell.data_digest for item in plan.cells}) == 4
    assert not any(item.keep_weights for item in plan.cells)
    assert all(item.keep_weights for item in training_plan(["fake_train_ok"], keep_weights=True).cells)


def test_direction_is_the_tasks_own_unless_it_leaves_the_choice():
    def directions(**changes):
        return [(item.cell.is_causal, item.refusal) for item in training_plan(["fake_train_one_way"], **changes).cells]

    refused = ("causal", "fake_train_one_way: no causal form")
    assert directions(level="recall") == [(False, None)]
    assert directions(level="recall", is_causal=[False, True]) == [(False, None), (True, refused)]
    assert directions(level="text") == [(True, refused)]
    assert directions(level="short") == [(False, None)]
    ids = [item.cell.id for item in training_plan(["fake_train_ok"], level="recall", is_causal=True).cells]
    assert ids == ["fake_train_ok/accuracy/fake_task/recall/cpu-small/causal/seed0"]
    assert problems_of(level="short", is_causal=[False, True]) == [
        "accuracy[0].is_causal: expected false or nothing, for fake_task is of kind classification; got true"
    ]
    assert problems_of(level="text", is_causal=False) == [
        "accuracy[0].is_causal: expected true or nothing, for fake_task is of kind causal_lm; got false"
    ]


def test_padding_that_only_the_variant_needs_is_refused_in_the_plan():
    """A task of 8 tokens without padding is one of 9 with padding to a variant that works by threes."""
    (item,) = training_plan(["fake_train_by_threes"]).cells
    assert item.refusal is not None
    assert item.refusal[0] == "key_padding_mask"


def test_an_encoder_decoder_needs_a_causal_form_and_cross_attention():
    (item,) = training_plan(["fake_train_one_way"], level="copy").cells
    assert item.refusal == ("causal", "fake_train_one_way: no causal form")
    (item,) = training_plan(["fake_train_no_cross"], level="copy").cells
    assert item.refusal == ("cross_attention", "fake_train_no_cross: no cross-attention")
    (item,) = training_plan(["fake_train_ok"], level="copy").cells
    assert item.refusal is None


def test_a_plan_can_see_that_weights_pretrained_in_one_direction_do_not_fit_the_other():
    """In two directions an LSTM has two sets of weights; scratch needs no look."""
    for pretrain, is_refused in (("causal", True), ("masked", False)):
        overrides = {**TINY_TRAINING, "pretrain": pretrain, "pretrain_steps": 1}
        (item,) = training_plan(["lstm"], overrides=overrides).cells
        assert item.refusal is None
        assert kind_of(item.cell).is_probed(item.cell)
        with pytest.raises(UnsupportedError, match="has other weights") if is_refused else nullcontext():
            kind_of(item.cell).build_on_meta(item.cell)
    (scratch,) = training_plan(["lstm"]).cells
    assert not kind_of(scratch.cell).is_probed(scratch.cell)


def test_processes_that_train_together_are_part_of_the_key_and_need_enough_of_everything(monkeypatch):
    one, same, two = (training_plan(["fake_train_ok"], **more).cells[0] for more in ({}, {"data_parallel": 1}, RANKS))
    assert one == same
    assert two.cell.key != one.cell.key
    assert two.cell.id == "fake_train_ok/accuracy/fake_task/short/cpu-small/2ranks/seed0"
    assert "data_parallel" not in TINY_TRAINING, "two processes have the batch of one"
    forecast = TrainingForecast()
    forecast.add(TestForecast().record(one, 8.0))
    assert (forecast.seconds(one), forecast.seconds(two)) == (8.0, two.estimate_s)

    (item,) = training_plan(["fake_train_ok"], overrides={**TINY_TRAINING, "norm": "batch_norm"}, **RANKS).cells
    assert item.refusal is not None
    assert item.refusal[0] == "data_parallel"
    pretrained = {"norm": "batch_norm", "pretrain": "causal", "pretrain_steps": 1}
    (item,) = training_plan(["fake_train_ok"], overrides={**TINY_TRAINING, **pretrained}).cells
    assert item.refusal == ("causal", LEAKY_NORM)
    few = {"data_parallel": 9, "overrides": TINY_TRAINING}
    wanted = "accuracy[0].data_parallel: expected at most batch_size, 8, so that every process has an example; got 9"
    assert problems_of(**few) == [wanted]
    few = {"data_parallel": 9, "overrides": {}, "grid": {"batch_size": [16, 8]}}
    assert problems_of(**few) == [wanted]

    monkeypatch.setattr("attn_zoo.matrix.plan.expand.num_cores", lambda: 1)
    with pytest.raises(ConfigError, match="expected at most 1, the CPU cores of this machine; got 2"):
        require_devices([one, two])
    require_devices([one])
    gpus = [replace(two, cell=replace(two.cell, device="cuda"))]
    monkeypatch.setattr("attn_zoo.matrix.plan.expand._has_cuda", lambda: False)
    require_devices(gpus)  # refused for another reason already
    monkeypatch.setattr("attn_zoo.matrix.plan.expand._has_cuda", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="expected at most 1, the GPUs of this machine; got 2"):
        require_devices(gpus)


def test_too_few_devices_end_a_run_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("attn_zoo.matrix.plan.expand.num_cores", lambda: 1)
    group = {"variants": ["fake_train_ok"], "task": "fake_task", "device": "cpu", "overrides": TINY_TRAINING, **RANKS}
    for call in (api.plan, partial(api.run, out=tmp_path / "run", progress=False)):
        with pytest.raises(ConfigError, match="expected at most 1, the CPU cores") as caught:
            call({"name": "x", "accuracy": [group]})
        assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()
    assert api.plan({"name": "x", "accuracy": [group]}, is_remote=True).cells


def test_missing_data_are_refused_with_the_way_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    group = {"variants": ["fake_train_ok"], "task": "fake_task", "level": "filed", "overrides": TINY_TRAINING}
    matrix = parse_matrix({"name": "x", "accuracy": [{**group, "device": "cpu"}]}, "x")
    (item,) = make_plan(matrix, data_dir=tmp_path).cells
    assert item.refusal is not None
    assert item.refusal[0] == "data"
    assert "missing fake.txt" in item.refusal[1]
    assert "Write fake.txt by hand." in item.refusal[1]
    (tmp_path / "fake.txt").write_text("1")
    (here,) = make_plan(matrix, data_dir=tmp_path).cells
    assert here.refusal is None
    (tmp_path / "fake.txt").write_text("2")
    (changed,) = make_plan(matrix, data_dir=tmp_path).cells
    assert len({item.cell.key, here.cell.key, changed.cell.key}) == 3


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (
            {"grid": {"base_lrs": [1e-3]}},
            "accuracy[0].grid.base_lrs: unknown field of a protocol; did you mean 'base_lr'?",
        ),
        ({"grid": {"base_lr": []}}, "accuracy[0].grid.base_lr: expected at least one value; got none"),
        ({"grid": {"base_lr": [1e-3, -1.0]}}, "accuracy[0].grid.base_lr: expected more than 0; got -1.0"),
        ({"grid": {"base_lr": [1e-3, 1e-3]}}, "accuracy[0].grid.base_lr: expected each value once; 0.001 occurs"),
        ({"grid": {"num_steps": ["many"]}}, "accuracy[0].grid.num_steps: expected an integer"),
        ({"grid": {"name": ["a"]}}, "accuracy[0].grid.name: is not a setting"),
        ({"grid": 3}, "accuracy[0].grid: expected a table; got 3"),
        (
            {"grid": {"base_lr": [1e-3]}, "overrides": {"base_lr": 1e-3}},
            "accuracy[0].grid.base_lr: is in overrides too; a field is either set or tried",
        ),
        (
            {"grid": {"num_steps": list(range(1, 20)), "batch_size": list(range(1, 20))}},
            "accuracy[0].grid: expected at most 256 combinations; got 361",
        ),
        ({"grid": {"pretrain": ["", "masked"]}}, "accuracy[0].grid: pretrain_steps: expected more than 0"),
        ({"overrides": {"num_head": 8}}, "accuracy[0].overrides.num_head: unknown field of a protocol; did you mean"),
        ({"overrides": {"num_heads": 7}}, "accuracy[0].overrides.embed_dim: expected a multiple of num_heads=7"),
        ({"grid": {"num_heads": [2, 7]}}, "accuracy[0].grid: embed_dim: expected a multiple of num_heads=7"),
        (
            {"overrides": {"clip_norm": -1.0}, "grid": {"base_lr": [-1.0, 1e-3]}},
            "accuracy[0].overrides.clip_norm: expected 0 or more; got -1.0",
        ),
        (
            {"overrides": {"num_steps": "9", "weight_decay": -1.0}},  # where a type is wrong, values are looked at too
            "accuracy[0].overrides.weight_decay: expected 0 or more; got -1.0",
        ),
        ({"overrides": {"warmup_steps": 2**63}}, "accuracy[0].overrides.warmup_steps: expected an integer of 64 bits"),
        (
            {"overrides": {"cross_variant": "ful"}},
            "accuracy[0].overrides.cross_variant: unknown variant 'ful'; did you mean 'full'?",
        ),
        (
            {"grid": {"cross_variant": ["full", "ful"]}},
            "accuracy[0].grid.cross_variant: unknown variant 'ful'; did you mean 'full'?",
        ),
        (
            {"overrides": {"pretrain_steps": 9}},
            "accuracy[0].overrides.pretrain_steps: expected pretrain = 'masked' or 'causal' beside it; got ''",
        ),
        (
            {"grid": {"pretrain_steps": [9, 10], "base_lr": [1e-3, 1e-2]}},
            "accuracy[0].grid.pretrain_steps: expected pretrain = 'masked' or 'causal' beside it; got ''",
        ),
        (
            {"overrides": {"num_heads": 3, "pretrain_steps": 9}, "grid": {"embed_dim": [48, 96]}},
            "accuracy[0].overrides.pretrain_steps: expected pretrain = 'masked' or 'causal' beside it; got ''",
        ),
        (
            {"overrides": {"pretrain_steps": 9, "pretrain_mask_prob": 0.5}, "grid": {"pretrain": ["", "causal"]}},
            "accuracy[0].overrides.pretrain_mask_prob: expected pretrain = 'masked' beside it; got '', 'causal'",
        ),
        (
            {"level": ["short", "recall"], "overrides": {"pooling": "cls"}},
            "accuracy[0].overrides.pooling: expected nothing, for fake_task is of kind token_classification, whose mod",
        ),
        (
            {"level": "copy", "grid": {"pooling": ["mean", "cls"]}},
            "accuracy[0].grid.pooling: expected nothing, for fake_task is of kind seq2seq, whose models pool nothing",
        ),
        ({"level": ["short", "shrt"]}, "accuracy[0].level: unknown level of fake_task 'shrt'; did you mean 'short'?"),
        (
            {"task": ["fake_task", "fake_tsk"]},
            "accuracy[0].task[1]: unknown task 'fake_tsk'; did you mean 'fake_task'?",
        ),
        ({"task": "fake_tsk", "overrides": {"num_head": 8}}, "accuracy[0].overrides.num_head: unknown field"),
        ({"protocol": "cpu", "overrides": {"num_head": 8}}, "accuracy[0].overrides.num_head: unknown field"),
        ({"task": ["fake_task", "fake_task"]}, "accuracy[0].task: expected each value once"),
        ({"task": 3}, "accuracy[0].task[0]: expected a string; got 3"),
        ({"task": []}, "accuracy[0].task: expected at least one value; got none"),
        ({"keep_weights": 1}, "accuracy[0].keep_weights: expected true or false; got 1"),
        ({"is_causal": "yes"}, "accuracy[0].is_causal"),
    ],
)
def test_mistakes_are_named_at_their_place(group, expected):
    assert any(problem.startswith(expected) for problem in problems_of(**group)), problems_of(**group)


def test_overrides_may_be_wrong_but_for_what_the_grid_sets():
    cells = training_plan(["fake_train_ok"], overrides={"num_heads": 3}, grid={"embed_dim": [48, 96]}).cells
    assert [item.cell.overrides for item in cells] == [{"num_heads": 3, "embed_dim": size} for size in (48, 96)]


@pytest.mark.parametrize(
    "group",
    [
        {"overrides": {"pretrain_steps": 9}, "grid": {"pretrain": ["", "causal"]}},
        {"overrides": {"pretrain_steps": 9, "pretrain_mask_prob": 0.5}, "grid": {"pretrain": ["", "masked"]}},
        {"overrides": {"pretrain": "masked"}, "grid": {"pretrain_steps": [9], "pretrain_mask_prob": [0.1, 0.2]}},
        {"grid": {"pooling": ["mean", "cls"]}},
    ],
)
def test_what_one_combination_needs_may_be_said_for_all(group):
    assert training_plan(["fake_train_ok"], **group).cells


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"overrides": {"weight_decay": 0}}, {"overrides": {"weight_decay": 0.0}}),
        ({"grid": {"weight_decay": [0, 1]}}, {"grid": {"weight_decay": [0.0, 1.0]}}),
        ({"grid": {"betas": [[0, 0.9], [0.5, 0]]}}, {"grid": {"betas": [[0.0, 0.9], [0.5, 0.0]]}}),
    ],
)
def test_equal_values_give_equal_cells_whatever_their_type(one, other):
    keys = [[item.cell.key for item in training_plan(["fake_train_ok"], **group).cells] for group in (one, other)]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(keys[0])


def test_what_a_folder_stores_gives_the_same_cells():
    plan = training_plan(
        ["fake_train_ok"], level=["short", "recall"], grid={"betas": [[0.9, 0.98]], "base_lr": [1e-3, 1e-2]}
    )
    stored = json.loads(json.dumps(plan.matrix.model_dump(mode="json")))
    again = make_plan(restore_matrix(stored))
    assert [item.cell.key for item in again.cells] == [item.cell.key for item in plan.cells]


def test_a_file_may_say_it_all(tmp_path: Path):
    path = tmp_path / "all.toml"
    path.write_text(
        'name = "all"\n[[accuracy]]\nvariants = ["full"]\ntask = ["listops"]\nlevel = ["short", "lra"]\n'
        "seeds = [0]\nkeep_weights = true\n"
        "grid = { base_lr = [3e-4, 1e-3, 3e-3], weight_decay = [0.0, 0.1] }\n"
    )
    matrix = load_matrix(path)
    assert matrix.num_cells == len(make_plan(matrix).cells) == 12


class TestForecast:
    def record(self, item, seconds: float) -> Record:
        score = Score(
            metric="accuracy",
            value=0.5,
            validation=0.5,
            num_examples=2,
            chance=0.1,
            best_step=1,
            num_steps=1,
            num_params=1,
            train_s=1.0,
            tokens_per_s=1.0,
        )
        return replace(Record(cell=item.cell, status="ok"), duration_s=seconds, score=score)

    def test_the_most_similar_trainings_decide(self):
        names = ["fake_train_ok", "fake_train_slow"]
        plan = training_plan(names, seeds=[0, 1], grid={"base_lr": [1e-3, 1e-2]}, level=["short", "recall"])
        (first, same_trial, other_trial, *_) = plan.cells
        other_variant = next(item for item in plan.cells if item.cell.variant == "fake_train_slow")
        elsewhere = next(item for item in plan.cells if item.cell.level == "recall")
        times = TrainingForecast()
        assert times.seconds(first) == first.estimate_s
        times.add(self.record(first, 10.0))
        assert [times.seconds(item) for item in (same_trial, other_trial, other_variant)] == [10.0, 10.0, 10.0]
        assert times.seconds(elsewhere) == elsewhere.estimate_s
        times.add(self.record(other_variant, 100.0))
        assert times.seconds(other_variant) == 100.0
        assert times.seconds(same_trial) == 10.0
        times.add(replace(self.record(same_trial, 1e6), status="timeout"))
        assert times.seconds(same_trial) == 10.0, "only finished trainings count"


def test_a_plan_foretells_trainings():
    """A plan of hours must not look like one of seconds: time grows with all that an update computes, and with them."""

    def estimate(task: str = "needle", level: str = "2k", **overrides: Any) -> tuple[float, int]:
        overrides = {"num_steps": 100, "batch_size": 32, **overrides}
        (item,) = training_plan(["full"], task=task, level=level, overrides=overrides, threads=1).cells
        assert item.estimate_s is not None
        assert item.estimate_bytes is not None
        return item.estimate_s - START_S, item.estimate_bytes

    seconds, num_bytes = estimate()
    twice = pytest.approx(2 * seconds)
    assert estimate(num_steps=200)[0] == twice
    assert estimate(num_layers=4)[0] == twice
    assert estimate(batch_size=64)[0] == twice
    assert estimate(pretrain="masked", pretrain_steps=100)[0] == twice
    assert estimate(compile=True)[0] == pytest.approx(seconds + COMPILE_S)
    longer_s, longer_bytes = estimate(level="8k")
    assert 12 * seconds < longer_s < 16 * seconds
    assert longer_bytes > 2 * num_bytes
    one = estimate("selective_copying", "lengths")[0]
    assert estimate("rewriting", "long")[0] == pytest.approx(2 * one, rel=0.01), "what is read and what is written"


@pytest.mark.parametrize(("device", "threads", "gain"), [("cpu", None, 1), ("cpu", 1, 2), ("cuda", None, 2)])
def test_processes_that_train_together_take_less_where_each_has_a_device(device, threads, gain):
    def seconds(**changes: Any) -> float:
        overrides = {**TINY_TRAINING, "num_layers": 8192, "embed_dim": 4096, "compile": False}
        (item,) = training_plan(["fake_train_ok"], overrides=overrides, threads=threads, **changes).cells
        [one] = estimated([replace(item, cell=replace(item.cell, device=device), refusal=None, estimate_s=None)])
        assert one.estimate_s is not None
        return one.estimate_s - START_S

    assert seconds() == pytest.approx(gain * seconds(data_parallel=2))


def test_the_variant_of_the_cross_attention_counts_in_the_digest():
    def digests(**overrides):
        plan = training_plan(["fake_train_ok"], overrides={**TINY_TRAINING, **overrides})
        return {item.cell.variant_digest for item in plan.cells}

    own = digests()
    assert digests(cross_variant="fake_train_ok") == own
    assert digests(cross_variant="full") != own
    assert digests(cross_variant="full") != digests(cross_variant="linformer")


@pytest.mark.parametrize(("name", "status"), [("fake_train_ok", "ok"), ("fake_train_lazy", "gate_failed")])
def test_nothing_trains_before_its_mixers_pass_the_gate(name, status):
    """A training runs in training mode, so that is what is checked."""
    record = run_cell(training_plan([name]).cells[0].cell)
    assert record.status == status, record.reason + record.trace
    if status == "ok":
        assert {"shape_and_dtype", "matches_oracle", "modes"} <= set(record.gate)
    else:
        assert "matches_oracle" in record.reason
        assert record.score is None
