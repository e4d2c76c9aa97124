"""Training steps as cells: what a matrix may say of them, that a training makes the same, what the gate catches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config

from attn_zoo import AbstractMixer, VariantConfig, register_mixer
from attn_zoo.errors import ConfigError
from attn_zoo.kernels import compiled_code
from attn_zoo.kernels.trace import note_path
from attn_zoo.matrix.cell import trial
from attn_zoo.matrix.drive.progress import Progress
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.kinds import step as step_kind
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.store.store import Store
from attn_zoo.measure.timing import Sampling
from attn_zoo.records import STEP_VERSION, Cell, Record
from attn_zoo.registry import variants
from attn_zoo.training import updates
from attn_zoo.training.batches import Batch
from attn_zoo.training.graphed import NUM_PLAIN, Graphed
from attn_zoo.training.learner import AbstractLearner, Learner, step_protocol
from tests.matrix.conftest import run_cell, run_cells_in_turns, training_plan

TINY = {"seq_len": [16], "batch_size": 2, "device": "cpu", "threads": 1, "budget_s": 0.02, "timeout_s": 60}


def plan(names: list[Any], **changes: Any) -> Plan:
    matrix = parse_matrix({"name": "test", "step": [{"variants": names, **TINY, **changes}]}, "test.toml")
    return make_plan(matrix)


def cells(names: list[Any], **changes: Any) -> list[Cell]:
    return [item.cell for item in plan(names, **changes).cells]


def problems(**group: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_matrix({"name": "test", **group}, "test.toml")
    assert caught.value.exit_code == 2
    return str(caught.value)


GROUP = {"variants": ["full"], "seq_len": 16}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"passes": ["fwd"]}, "step[0].passes: unknown key"),
        ({"num_heads": 4}, "step[0].num_heads: unknown key"),
        ({"protocol": "lra-smal"}, "step[0].protocol: unknown protocol 'lra-smal'; did you mean 'lra-small'?"),
        (
            {"variants": [{"name": "full", "compiled": True}]},
            "step[0].variants[0].compiled: unknown key; did you mean 'compile'?  (keys of a variant's table are name, ",
        ),
        (
            {"variants": ["full", {"name": "full", "compile": True}]},
            "step[0].variants[1]: label 'full' already means full with other options; give this one a label",
        ),
    ],
    ids=["passes", "sizes", "protocol", "entry", "label"],
)
def test_what_a_step_group_may_say(changes, sentence):
    assert sentence in problems(step=[{**GROUP, **changes}])


def test_to_compile_is_no_choice_of_a_call():
    message = problems(scaling=[{**GROUP, "variants": [{"name": "full", "compile": True}]}])
    assert (
        "scaling[0].variants[0].compile: unknown key  (keys of a variant's table are name, label, options)" in message
    )


def test_a_matrix_without_groups_hears_of_every_kind():
    kinds = "[[scaling]], [[decode]], [[step]], [[approximation]], [[accuracy]], [[replacement]]"
    assert f"expected at least one group ({kinds}); got none" in problems()


def test_a_cell_says_all_that_decides_a_step():
    plain, compiled = cells(["full", {"name": "full", "label": "fast", "compile": True}], batch_size=[2])
    assert (plain.scope, plain.pass_, plain.protocol, plain.overrides) == ("model", "step", "lra-small", {})
    assert (plain.num_heads, plain.head_dim, plain.dropout_p, plain.batch_size) == (2, 32, 0.1, 2)
    assert plain.protocol_version == STEP_VERSION
    assert plain.id == "full/scaling/step/L16/fp32/lra-small/B2/seed0"
    assert compiled.overrides == {"compile": True}
    assert compiled.key != plain.key
    assert step_protocol(compiled).compile
    [own] = [item.cell for item in make_plan(parse_matrix({"name": "t", "step": [GROUP]}, "")).cells]
    assert own.batch_size == 32, "of the protocol"


def test_steps_are_refused_where_a_training_would_be():
    items = {item.cell.label: item for item in plan(["full", "fake_modest"], has_padding=True, dtypes="float64").cells}
    assert items["full"].refusal is None
    assert items["full"].estimate_s is not None
    assert items["full"].estimate_bytes is not None
    refusal = items["fake_modest"].refusal
    assert refusal is not None
    assert refusal[0] == "key_padding_mask"
    [half] = plan(["full"], dtypes="float16").cells
    assert half.refusal is not None
    assert "float16 needs loss scaling" in half.refusal[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_padding", [False, True])
def test_a_step_becomes_a_record(dtype, has_padding):
    [cell] = cells(["full"], dtypes=dtype, has_padding=has_padding)
    record = run_cell(cell)
    assert record.status == "ok", record.reason + record.trace
    assert record.timing is not None
    assert record.memory is not None
    assert record.memory.peak_bytes is not None
    assert record.num_params is not None
    assert {"matches_reference", "step_is_finite", "step_learns"} <= set(record.gate)
    held = 4 * 4 * record.num_params  # weights, gradients, two averages
    assert record.memory.input_bytes == pytest.approx(held, rel=0.02)
    assert record.memory.peak_bytes > held
    assert record.memory.saved_bytes is not None
    assert 0 < record.memory.saved_bytes < record.memory.peak_bytes
    products, maps, head = 4 * 2 * 2 * 16 * 16 * 32, 2 * 2 * 16 * (4 * 64 * 64 + 2 * 64 * 128), 2 * 2 * (64 + 10) * 128
    assert record.flops == 2 * (products + maps) + head, "of one forward"
    assert record.kernels != ()
    assert Record.from_dict(record.to_dict()) == record


def test_what_is_timed_is_the_step_that_trainings_repeat(monkeypatch, tmp_path):
    seen = []
    real = updates.Updater.step

    def noting(self, feed, order):
        before = self.numbers.step
        real(self, feed, order)
        seen.append((type(self).__name__, before, self.numbers.step))

    monkeypatch.setattr(updates.Updater, "step", noting)
    [training] = [item.cell for item in training_plan(["full"]).cells]
    assert run_cell(training).status == "ok"
    assert seen == [("Trainer", step, step + 1) for step in range(4)]
    seen.clear()
    [cell] = cells(["full"])
    record = run_cell(cell)
    assert record.timing is not None
    assert len(seen) > len(record.timing.samples_ms)
    assert seen == [("Trainer", step, step + 1) for step in range(len(seen))]


@pytest.fixture
def graphs(monkeypatch):
    """Compile without the code generator, which takes half a minute; return what was compiled, in order."""
    found: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, *, dynamic: original(model, backend=backend, dynamic=dynamic, fullgraph=True)
    )
    torch.compiler.reset()
    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=False):
        yield found
    torch.compiler.reset()


def test_a_compiled_step_is_compiled_once_and_weighed_as_it_runs(graphs):
    """In its first call, and not again while it is warmed up, timed in turns and weighed."""
    fast = {"name": "full", "label": "fast", "compile": True}
    found = run_cells_in_turns(cells(["full", fast], isolation="interleaved"))
    assert [record.status for record in found] == ["ok", "ok"], [record.reason + record.trace for record in found]
    assert len(graphs) == 1
    plain, compiled = found
    assert compiled.kernels == plain.kernels != ()
    assert (compiled.flops, compiled.num_params) == (plain.flops, plain.num_params)
    assert compiled.gate == (*plain.gate, "compiled_gradients")
    for record in found:
        assert record.memory is not None
        assert record.memory.saved_bytes is not None
        assert record.memory.saved_bytes > 0


def test_every_cell_of_a_process_is_compiled_or_fails(graphs, monkeypatch):
    """torch goes on uncompiled, without an error, when one source has been compiled for too many models."""
    config.recompile_limit = 1
    three = cells([{"name": "full", "compile": True}], seq_len=[16, 17, 18])
    assert [run_cell(cell).status for cell in three[:2]] == ["ok", "ok"]
    assert len(graphs) == 2
    config.recompile_limit = 1
    monkeypatch.setattr(compiled_code, "MAX_COMPILED", 2)
    record = run_cell(three[2])
    assert record.status == "error", record
    assert "recompile_limit" in record.reason


@pytest.mark.parametrize("num_unlike", [0, 5])
@pytest.mark.parametrize("num_recorded", [0, 3])
def test_steps_that_run_otherwise_come_before_warm_up(monkeypatch, num_unlike, num_recorded):
    """What is captured as a CUDA graph must not be captured in a sample, nor a mixer's call be recorded in one."""
    counts = {"steps": 0}
    step, warm_up = updates.Updater.step, Sampling.warm_up

    def stepping(self, feed, order):
        counts["steps"] += 1
        step(self, feed, order)

    def warming(self):
        counts.setdefault("before", counts["steps"])
        warm_up(self)

    monkeypatch.setattr(updates.Updater, "step", stepping)
    monkeypatch.setattr(Sampling, "warm_up", warming)
    monkeypatch.setattr(updates.Updater, "num_unlike", num_unlike)
    monkeypatch.setattr(step_kind, "num_unlike", lambda _: num_recorded)
    [cell] = cells(["full"])
    assert run_cell(cell).status == "ok"
    assert counts["before"] == max(1, num_unlike) + num_recorded


def test_energy_is_of_the_steps_that_were_timed(monkeypatch):
    """To weigh a step, its CUDA graphs are given up for good: what runs afterwards is another step."""
    done = []
    monkeypatch.setattr(trial, "why_no_energy", lambda _: "")
    monkeypatch.setattr(trial, "energy_of_call", lambda call, device: done.append("energy"))
    monkeypatch.setattr(updates.Updater, "launch_singly", lambda self: done.append("singly"))
    [cell] = cells(["full"])
    assert run_cell(cell, has_energy=True).status == "ok"
    assert done == ["energy", "singly"]


def test_updates_are_unlike_until_one_is_captured():
    trainer = Learner(cells(["full"])[0]).trainer
    assert trainer.num_unlike == 0
    trainer._run = Graphed(trainer._learn, "training")
    assert trainer.num_unlike == NUM_PLAIN + 1
    trainer.launch_singly()
    assert trainer.num_unlike == 0


class Listening(Progress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_who_waits_is_told_of_the_silence(tmp_path: Path):
    fast = {"name": "full", "label": "fast", "compile": True}
    for number, is_told in enumerate((False, True)):
        listening, names = Listening(), ["fake_modest", fast] if is_told else ["fake_modest"]
        # No time for any cell: what is said comes before.
        run(plan(names), Store(tmp_path / str(number)), progress=listening, time_limit_min=0)
        expected = ["cells that are compiled first, in silence and up to a minute each: 1"] if is_told else []
        assert [text for text in listening.said if "compiled" in text] == expected


class Twin(AbstractLearner):
    """Ours once more, with an update of its own: what a peer is, and what can go wrong with one."""

    spoils_logits = spoils_step = is_partial = False

    def __init__(self, ours: Learner) -> None:
        self._inner = ours
        self.model, self.protocol, self.data = ours.model, ours.protocol, ours.data
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(weights[:3] if self.is_partial else weights, 1e-3, eps=self.protocol.eps)

    def logits(self, batch: Batch) -> Tensor:
        note_path("twin")
        logits: Tensor = self.model(batch.tokens, batch.key_padding_mask)
        return logits + 1e-3 if self.spoils_logits else logits

    def step(self) -> None:
        batch = self._inner.batch(1)
        loss = torch.nn.functional.cross_entropy(self.logits(batch), batch.labels)
        self.optimizer.zero_grad()
        (loss * float("nan") if self.spoils_step else loss).backward()
        self.optimizer.step()


class Mean(AbstractMixer):
    """Every position gets the mean of all."""

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        dropped = torch.nn.functional.dropout(hidden, self.build.dropout_p, self.training)
        return dropped.mean(1, keepdim=True).expand_as(hidden).contiguous()


@pytest.fixture
def twin():
    """Return a function that registers a twin with something wrong about it."""
    full = variants["full"]
    names: list[str] = []

    def register(**wrong: bool) -> str:
        learner = type("Wrong", (Twin,), wrong)
        name = f"fake_twin_{len(names)}"
        card: dict[str, Any] = {"capabilities": variants["fake_modest"].capabilities, "reference": full.reference}
        register_mixer(name, config=VariantConfig, complexity=full.complexity, learner=learner, **card)(
            type("Mixed", (Mean,), {})
        )
        names.append(name)
        return name

    yield register
    for name in names:
        variants.remove(name)


def test_a_model_of_its_own_is_held_to_ours(twin):
    found = {}
    for wrong in ({}, {"spoils_logits": True}, {"spoils_step": True}, {"is_partial": True}):
        [cell] = cells([twin(**wrong)])
        found[next(iter(wrong), "nothing")] = run_cell(cell)
    fine = found["nothing"]
    assert fine.status == "ok", fine.reason + fine.trace
    assert {"own_logits", "step_learns"} <= set(fine.gate)
    assert fine.flops is None, "what somebody else runs has no formula of ours"
    for name, words in {
        "spoils_logits": "logits are off by 0.001 from those of our model with the same weights",
        "spoils_step": "is not finite after one step",
        "is_partial": "has a gradient and did not change in one step",
    }.items():
        assert found[name].status == "gate_failed", found[name].reason + found[name].trace
        assert words in found[name].reason
        assert found[name].timing is None


def test_steps_are_timed_in_turns_and_resumed(tmp_path: Path):
    in_turns = plan(["full", "linformer"], isolation="interleaved")
    store = Store(tmp_path / "run")
    first = run(in_turns, store)
    records = list(store.records())
    assert [record.status for record in records] == ["ok", "ok"], [record.reason for record in records]
    assert len({record.bundle for record in records}) == 1
    assert all(record.timing is not None for record in records)
    assert first.new == 2
    assert run(in_turns, store).new == 0


def test_members_of_a_bundle_do_not_share_weights():
    both = cells(["full", {"name": "full", "label": "again", "options": {"backend": "math"}}], isolation="interleaved")
    assert both[0].together == both[1].together != ""
    for is_repeat in (False, True):
        found = run_cells_in_turns(both, is_repeat=is_repeat)
        assert [record.status for record in found] == ["ok", "ok"], [record.reason + record.trace for record in found]
        assert all(record.timing is not None for record in found)
        assert all((record.memory is None) == is_repeat for record in found), "weighed once"
