"""Exchanged mechanisms: what a matrix may say, models before and after, errors of heads beside a dense calculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_zoo.attention import BuildContext
from attn_zoo.attention.multihead import MultiHeadMixer
from attn_zoo.attention.oracle import attention_weights
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.drive.engines.local import LocalEngine
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.kinds import replacement
from attn_zoo.matrix.kinds.replacement import EqualWeights, give_weights, with_equal_weights
from attn_zoo.matrix.plan.estimate import START_S
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import REPLACEMENT_VERSION, Cell, Record
from attn_zoo.registry import make_config, variants
from attn_zoo.training.batches import Batcher
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import SCHEDULES, learning_rate, protocol_of, resolve_protocol
from attn_zoo.training.weights import load_trained
from tests.matrix.conftest import TINY_TRAINING, run_cell
from tests.training.toy_task import TINY, toy_task

WINDOW = {"name": "local_window", "options": {"window_size": 2}}
KINDS = ("plain", "tokens", "language", "pair", "seq2seq")


@pytest.fixture(autouse=True)
def toy() -> Iterator[Any]:
    with toy_task() as task:
        yield task


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests share, so that each model is trained once."""
    return tmp_path_factory.mktemp("weights")


def plan(names: list[Any], **changes: Any) -> Plan:
    group = {"of": "full", "variants": names, "task": "toy", "level": "plain", "overrides": TINY, "device": "cpu"}
    return make_plan(parse_matrix({"name": "test", "replacement": [{**group, **changes}]}, "test.toml"))


def cells(names: list[Any], **changes: Any) -> list[Cell]:
    return [item.cell for item in plan(names, **changes).cells]


def exchanged(weights: Path, name: Any, **changes: Any) -> Any:
    """Return the record of a cell that was run, with its score and its replacement."""
    (cell,) = cells([name], **changes)
    record = run_cell(cell, weights_dir=str(weights))
    assert record.status == "ok", record.reason + record.trace
    assert record.score is not None
    assert record.replacement is not None
    return record


def trained_model(weights: Path, level: str = "plain") -> Any:
    exchanged(weights, "full", level=level)
    return next(trained for path in weights.glob("*") if (trained := load_trained(path)).cell.level == level)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"of": "fulll"}, "replacement[0].of: unknown variant 'fulll'; did you mean 'full'?"),
        ({"of": ["full"]}, "replacement[0].of: "),
        ({"adapt_steps": -1}, "replacement[0].adapt_steps[0]: "),
        ({"keep_weights": True}, "replacement[0].keep_weights: unknown key"),
        ({"grid": {"base_lr": [0.1]}}, "replacement[0].grid: unknown key"),
        ({"overrides": {"num_step": 3}}, "replacement[0].overrides.num_step: unknown field of a protocol"),
        ({"task": "toyy"}, "replacement[0].task: unknown task 'toyy'"),
    ],
    ids=["of", "several", "adapt_steps", "weights", "grid", "overrides", "task"],
)
def test_what_a_group_may_say(changes, sentence):
    with pytest.raises(ConfigError) as caught:
        plan(["full"], **changes)
    assert sentence in str(caught.value)


def test_a_group_must_say_whose_place_is_taken():
    group = {"variants": ["linformer"], "task": "toy", "level": "plain"}
    with pytest.raises(ConfigError, match=r"replacement\[0\]\.of"):
        parse_matrix({"name": "test", "replacement": [group]}, "test.toml")


def test_a_cell_says_all_that_decides_a_score():
    (cell, later) = cells(["linformer"], adapt_steps=[0, 5])
    assert (cell.kind, cell.replaces, cell.adapt_steps, later.adapt_steps) == ("replacement", "full", 0, 5)
    assert cell.protocol_version == REPLACEMENT_VERSION
    assert cell.id == "linformer/replacement/toy/plain/cpu-small/for-full/seed0"
    assert later.id == "linformer/replacement/toy/plain/cpu-small/for-full/adapt5/seed0"
    assert len({cell.key, later.key, replace(cell, replaces="bigbird").key}) == 3
    assert Cell.from_dict(json.loads(cell.to_json())) == cell


def test_equal_overrides_give_equal_cells_whatever_their_type():
    assert cells(["full"], overrides={"clip_norm": 1}) == cells(["full"], overrides={"clip_norm": 1.0})
    (cell,) = cells(["full"], overrides={"clip_norm": 1})
    assert json.dumps(cell.overrides) == '{"clip_norm": 1.0}'


def test_either_mechanism_edited_makes_a_record_stale():
    own, other = (cells([name], of=of)[0].variant_digest for name, of in (("bigbird", "full"), ("full", "full")))
    both = cells(["bigbird"], of="performer")[0].variant_digest
    assert len({own, other, both}) == 3
    assert own[:8] == both[:8]


def test_the_cells_of_one_model_follow_each_other_in_one_process():
    found = plan(["full", WINDOW], adapt_steps=[0, 2], seeds=[0, 1]).cells
    assert {item.isolation for item in found} == {"lane"}
    assert len({item.lane for item in found}) == 2
    assert {item.cell.seed for item in found if item.lane == found[0].lane} == {found[0].cell.seed}


def test_a_plan_counts_the_training_once_and_the_updates_afterwards_for_each_cell():
    def seconds(adapt_steps: list[int]) -> list[float]:
        overrides = {**TINY, "num_steps": 8000, "eval_every": 8000}
        return [item.estimate_s or 0.0 for item in plan(["full"], adapt_steps=adapt_steps, overrides=overrides).cells]

    [alone] = seconds([0])
    training_s = alone - START_S
    assert training_s > 1.0
    assert seconds([0, 8000]) == pytest.approx([alone / 2, alone / 2 + training_s])


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("lstm", {}, "lstm makes its queries, keys and values itself: it has no heads to be exchanged"),
        ("full", {"of": "lstm"}, "lstm makes its queries, keys and values itself: it has no heads to be exchanged"),
        ("linformer", {"level": "language"}, "causal"),
    ],
    ids=["no heads", "none to give", "causal"],
)
def test_what_cannot_be_exchanged_is_refused_before_anything_trains(name, changes, reason):
    (item,) = plan([name], **changes).cells
    assert item.refusal is not None
    assert reason in " ".join(item.refusal)


@pytest.mark.parametrize("level", KINDS)
def test_the_mechanism_itself_changes_nothing(weights, level):
    record = exchanged(weights, "full", level=level)
    found, score = record.replacement, record.score
    assert score.value == pytest.approx(found.trained_value, abs=1e-6)
    assert score.references["as_trained"] == found.trained_value
    assert found.num_new_params == 0
    assert len(found.layers) == (3 if level == "seq2seq" else 1)  # of an encoder and a decoder that attends across
    assert all(layer.error == layer.rounding_error < 1e-5 for layer in found.layers)
    assert all(layer.mean_error > 1e-3 for layer in found.layers)
    assert record.kernels
    assert record.gate
    assert Record.from_dict(json.loads(record.to_json())) == record


def test_the_score_as_trained_is_that_of_the_training(weights, tmp_path):
    record = exchanged(weights, "full")
    group = {"variants": ["full"], "task": "toy", "level": "plain", "overrides": TINY, "device": "cpu"}
    (item,) = make_plan(parse_matrix({"name": "test", "accuracy": [{**group, "keep_weights": True}]}, "")).cells
    trained = run_cell(item.cell, weights_dir=str(tmp_path)).score
    assert trained is not None
    assert trained.value == record.replacement.trained_value
    assert (weights / f"{item.cell.key}.safetensors").is_file(), "a training of the same folder is used"
    assert trained.floors == {name: record.score.floors[name] for name in trained.floors}


def test_a_model_is_trained_once(weights, monkeypatch):
    exchanged(weights, "full")
    monkeypatch.setattr(replacement, "train", lambda *_: pytest.fail("it is trained again"))
    assert exchanged(weights, WINDOW).replacement.trained_value == exchanged(weights, "full").replacement.trained_value


def test_errors_of_heads_are_those_of_a_dense_calculation(weights):
    trained = trained_model(weights, "tokens")
    record = exchanged(weights, WINDOW, level="tokens")
    (found,) = record.replacement.layers
    protocol = resolve_protocol("cpu-small", overrides=TINY)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    batcher = Batcher(trained.task.spec, protocol, variants["full"].capabilities, "cpu")
    batch = batcher.batch(batcher.feed(trained.task.split("test")), order[: replacement.NUM_EXAMPLES])
    assert batch.key_padding_mask is not None
    hidden: list[Any] = []
    (mixer,) = (part for part in trained.model.modules() if isinstance(part, MultiHeadMixer))
    hook = mixer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    with torch.no_grad():
        trained.objective.outputs(trained.model, batch)
    hook.remove()
    heads = [
        projection(hidden[0]).double().unflatten(-1, (2, 8)).transpose(1, 2)
        for projection in (mixer.query_proj, mixer.key_proj, mixer.value_proj)
    ]
    sums = torch.zeros(3, dtype=torch.float64)
    spread: list[float] = []
    for index, length in enumerate((~batch.key_padding_mask).sum(1).tolist()):
        query, key, value = (x[index, :, :length] for x in heads)
        scores = query @ key.mT * 8**-0.5
        places = torch.arange(length)
        far = (places[:, None] - places).abs() > 2
        own = scores.softmax(-1)
        near = scores.masked_fill(far, -torch.inf).softmax(-1)
        outputs = own @ value, near @ value, value.mean(1, keepdim=True).expand_as(value)
        sums += torch.stack([(output - outputs[0]).square().sum() for output in (0 * value, *outputs[1:])])
        spread += (1 / own.square().sum(-1)).flatten().tolist() if index < replacement.NUM_WEIGHED else []
    error, mean_error = (sums[1:] / sums[0]).sqrt().tolist()
    assert found.error == pytest.approx(error, rel=1e-4)
    assert found.mean_error == pytest.approx(mean_error, rel=1e-4)
    assert found.num_effective_keys == pytest.approx(float(torch.tensor(spread).median()), rel=1e-4)
    assert found.num_rows == 2 * int((~batch.key_padding_mask).sum())
    assert 0.05 < found.error < 2


def test_a_layer_of_a_pair_is_judged_by_both_inputs(weights):
    one, pair = (exchanged(weights, WINDOW, level=level).replacement for level in ("plain", "pair"))
    assert len(pair.layers) == 1
    assert pair.layers[0].num_rows > 1.5 * one.layers[0].num_rows


def test_another_mechanism_scores_what_a_model_made_by_hand_scores(weights):
    trained = trained_model(weights)
    record = exchanged(weights, WINDOW)

    def attend(query, key, value, *, key_padding_mask=None):
        places = torch.arange(query.shape[2])
        far = (places[:, None] - places).abs() > 2
        bias = torch.zeros(far.shape).masked_fill(far, -torch.inf)
        weights = attention_weights(query, key, key_padding_mask=key_padding_mask, bias=bias)
        return weights.nan_to_num() @ value.masked_fill(key_padding_mask[:, None, :, None], 0)

    for part in trained.model.modules():
        if isinstance(part, MultiHeadMixer):
            part.attention.forward = attend  # type: ignore[method-assign]
    batch = trained.batcher.batch(trained.batcher.feed(trained.task.split("test")), torch.arange(120))
    with torch.no_grad():
        right = trained.objective.outputs(trained.model, batch).argmax(-1) == batch.labels
    assert record.score.value == pytest.approx(float(right.double().mean()), abs=1.5 / 120)
    assert record.score.value < record.replacement.trained_value


def test_equal_weights_are_a_floor_and_need_no_queries(weights):
    record = exchanged(weights, WINDOW)
    trained = trained_model(weights)
    equal = with_equal_weights(trained.model)
    for part in trained.model.modules():
        if isinstance(part, MultiHeadMixer):
            part.query_proj.weight.data.zero_()
            part.query_proj.bias.data.zero_()
    batch = trained.batcher.batch(trained.batcher.feed(trained.task.split("test")), torch.arange(120))
    with torch.no_grad():
        one, two = (trained.objective.outputs(model, batch) for model in (trained.model, equal))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert record.score.floors["equal_weights"] == float((two.argmax(-1) == batch.labels).double().mean())


@pytest.mark.parametrize("is_causal", [False, True])
def test_equal_weights_by_hand(is_causal):
    build = BuildContext(embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, max_seq_len=6, is_causal=is_causal)
    attention = EqualWeights(make_config(variants["full"].config, {}, "full"), build)
    value = torch.randn(2, 1, 6, 4)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    value[1, :, 4:] = torch.nan
    query = torch.randn(2, 2, 6, 4)
    output = attention(query, value, value, key_padding_mask=mask)
    seen = [1, 2, 3, 4, 5, 6] if is_causal else [6] * 6
    for row, count in enumerate(seen):
        for example, most in ((0, 6), (1, 4)):
            expected = value[example, 0, : min(count, most)].mean(0)
            torch.testing.assert_close(output[example, 0, row], expected)
            torch.testing.assert_close(output[example, 1, row], expected)


def test_what_a_mechanism_has_to_learn_besides_is_as_drawn(weights):
    record = exchanged(weights, {"name": "linformer", "options": {"proj_len": 4}})
    assert record.replacement.num_new_params > 0
    assert record.num_params == exchanged(weights, "full").num_params + record.replacement.num_new_params


def test_the_same_mechanism_keeps_what_it_has_learned(weights):
    own = exchanged(weights, "linformer", of="linformer")
    assert own.replacement.num_new_params == 0
    assert own.score.value == own.replacement.trained_value
    other = exchanged(weights, {"name": "linformer", "options": {"proj_len": 5}}, of="linformer")
    assert other.replacement.num_new_params > 0


def test_models_that_do_not_fit_are_refused(weights):
    trained = trained_model(weights)
    config = replace(trained.config, max_seq_len=2 * trained.config.max_seq_len, variant="local_window")
    model = objective_for(trained.task.spec).build_model(config)
    with pytest.raises(
        UnsupportedError, match=r"expected a trained model with .*learned.weight of \[64, 16\]; it has \[32, 16\]"
    ):
        give_weights(trained.model, model, is_same=False)


def test_updates_afterwards_bring_some_of_the_score_back(weights):
    at_once = exchanged(weights, WINDOW, level="tokens")
    before = set(weights.glob("*"))
    later = exchanged(weights, WINDOW, level="tokens", adapt_steps=40)
    assert set(weights.glob("*")) == before, "models of others are kept, not each that was adapted"
    assert later.score.value > at_once.score.value
    assert later.replacement == at_once.replacement, "errors are of the model before"
    assert (at_once.score.num_steps, later.score.num_steps) == (0, 40)
    assert later.score.settings["warmup_steps"] == 5
    assert later.score.floors == at_once.score.floors
    assert later.cell.adapt_steps == 40
    assert at_once.score.tokens_per_s is None


def test_a_shorter_adaptation_warms_up_for_a_shorter_time(weights):
    assert exchanged(weights, WINDOW, adapt_steps=8).score.settings["warmup_steps"] == 1


def rates_of(cell: Cell) -> list[float]:
    """Return the learning rate of every update of a training."""
    protocol = protocol_of(cell)
    schedule = {name: getattr(protocol, name) for name in ("base_lr", "warmup_steps", "num_steps", "embed_dim")}
    return [learning_rate(protocol.schedule, step, **schedule) for step in range(1, protocol.num_steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(500, 100), (40, 1), (40, 40), (40, 0), (50, 80), (50, 300)])
def test_an_adaptation_is_at_its_highest_at_the_rate_of_the_training(schedule, num_steps, warmup_steps):
    overrides = {**TINY, "schedule": schedule, "num_steps": num_steps, "warmup_steps": warmup_steps}
    for cell in cells([WINDOW], overrides=overrides, adapt_steps=[1, 2, 7, 10, 45, 600]):
        adapting = replacement._adapting(cell)
        assert max(rates_of(adapting)) == pytest.approx(max(rates_of(cell)), rel=1e-12), cell.id
        if schedule not in ("rsqrt", "noam") and 0 < warmup_steps <= num_steps:
            assert adapting.overrides["base_lr"] == TINY["base_lr"], "where the peak is the base rate, every bit stays"


def test_a_single_update_is_at_a_rate_that_is_not_zero(weights):
    settings = exchanged(weights, WINDOW, adapt_steps=1).score.settings
    schedule = {name: settings[name] for name in ("base_lr", "warmup_steps", "num_steps", "embed_dim")}
    assert learning_rate(settings["schedule"], 1, **schedule) > 0


def test_a_model_that_cannot_be_trained_is_told(tmp_path):
    (cell,) = cells(["full"], overrides={**TINY, "base_lr": 1e30, "clip_norm": 0.0})
    record = run_cell(cell, weights_dir=str(tmp_path))
    assert record.status == "error"
    assert (
        "the model to exchange the mechanism of, full/accuracy/toy/plain/cpu-small/seed0, is diverged" in record.reason
    )


def test_a_damaged_model_is_told_and_trained_anew_once_it_is_gone(tmp_path):
    trained = exchanged(tmp_path, "full").replacement.trained_value
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    replacement._before.cache_clear()
    (cell,) = cells(["full"])
    record = run_cell(cell, weights_dir=str(tmp_path))
    assert record.status == "cancelled"
    assert record.reason.startswith(f"{path}: cannot be read")
    assert record.reason.endswith("remove the file, and the same command trains its model anew")
    path.unlink()
    assert exchanged(tmp_path, "full").replacement.trained_value == trained


def test_a_mechanism_that_breaks_fails_its_gate(weights):
    (cell,) = cells(["fake_nan"])
    record = run_cell(cell, weights_dir=str(weights))
    assert record.status == "gate_failed", record.reason
    assert record.score is None
    assert record.replacement is None


@pytest.mark.slow
def test_a_run_keeps_each_model_and_goes_on_from_it(tmp_path):
    """In processes of their own, two at once; a variant that is added later meets the models that are there."""
    store = Store(tmp_path / "run")
    common = {"of": "full", "task": "fake_task", "overrides": TINY_TRAINING, "device": "cpu"}

    def ran(names: list[Any], seeds: list[int]) -> dict[str, int]:
        group = {**common, "variants": names, "seeds": seeds}
        matrix = parse_matrix({"name": "test", "replacement": [group]}, "test.toml")
        return run(make_plan(matrix), store, engine=LocalEngine(2)).counts

    assert ran(["full", WINDOW], [0, 1]) == {"ok": 4}
    models = {path: path.stat().st_mtime_ns for path in store.weights.glob("*.safetensors")}
    assert len(models) == 2
    assert ran(["full", WINDOW, "linear_attention"], [0]) == {"ok": 3}
    assert {path: path.stat().st_mtime_ns for path in store.weights.glob("*.safetensors")} == models
    values = {record.cell.seed: set[float]() for record in store.records()}
    for record in store.records():
        assert record.replacement is not None
        values[record.cell.seed].add(record.replacement.trained_value)
    assert [len(own) for own in values.values()] == [1, 1]


def test_bfloat16_scores_under_autocast(weights):
    record = exchanged(weights, WINDOW, dtypes="bfloat16")
    assert record.score.value == pytest.approx(exchanged(weights, WINDOW).score.value, abs=0.15)
    assert record.cell.id.endswith("/bf16/for-full/seed0")


@pytest.mark.parametrize(
    ("of", "dtype", "least", "most"),
    [
        ("full", "float32", 1e-9, 1e-6),
        ("full", "bfloat16", 1e-4, 2e-2),
        ("linformer", "bfloat16", 1e-4, 2e-2),  # whose mixer compresses before it projects
    ],
)
def test_rounding_is_that_of_the_dtype_of_the_cell(weights, of, dtype, least, most):
    (layer,) = exchanged(weights, of, of=of, dtypes=dtype).replacement.layers
    assert least < layer.rounding_error < most
    assert layer.error == layer.rounding_error


@pytest.mark.gpu
@pytest.mark.parametrize("adapt_steps", [0, 4])
def test_models_on_a_gpu(weights, adapt_steps):
    for name in ("full", WINDOW):
        record = exchanged(weights, name, device="cuda", adapt_steps=adapt_steps)
        (layer,) = record.replacement.layers
        (on_host,) = exchanged(weights, name).replacement.layers
        if name == "full":
            assert layer.error == layer.rounding_error < 1e-5
        assert 0.2 < layer.mean_error / on_host.mean_error < 5, "trained apart, so alike and not equal"
