"""Decoded tokens as cells: what a matrix may say of them, what one step is, and what its own checks catch."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from attn_zoo import VariantConfig, build_attention, build_mixer, register_attention
from attn_zoo.attention.decode import KVCache
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.cell import trial
from attn_zoo.matrix.claimed_costs import build_context, claims, form_of
from attn_zoo.matrix.kinds import decoded_token
from attn_zoo.matrix.kinds.all_kinds import kind_of
from attn_zoo.matrix.kinds.decoded_token import DecodeWorkload, _Steps
from attn_zoo.matrix.kinds.one_call import make_module
from attn_zoo.matrix.plan.estimate import START_S
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.measure import capture
from attn_zoo.metadata import Capabilities, Complexity, Reference
from attn_zoo.records import PROTOCOL_VERSION, Cell, Record
from attn_zoo.registry import variants
from tests.matrix.conftest import run_cell, run_cells_in_turns

CHOOSING = {"moba", "nsa"}  # blocks, by the data
TINY = {"seq_len": [100], "num_heads": 2, "head_dim": 8, "device": "cpu", "threads": 1, "budget_s": 0.02}


def plan(names: list[Any], **changes: Any) -> Plan:
    return make_plan(parse_matrix({"name": "test", "decode": [{"variants": names, **TINY, **changes}]}, "test.toml"))


def cells(names: list[Any], **changes: Any) -> list[Cell]:
    return [item.cell for item in plan(names, **changes).cells]


def prefills(names: list[Any], **changes: Any) -> list[Cell]:
    return [cell for cell in cells(names, has_prefill=True, **changes) if cell.pass_ == "prefill"]


def decoding(form: str) -> list[str]:
    every = [variants[name] for name in variants if variants[name].provider == "attn_zoo"]
    return [
        each.name
        for each in every
        if each.capabilities.decode != "none" and (form == "mixer" or each.attention is not None)
    ]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"passes": ["fwd"]}, "decode[0].passes: unknown key"),
        ({"has_padding": True}, "decode[0].has_padding: unknown key"),
        ({"num_kv_heads": 3}, "decode[0].num_kv_heads: expected a divisor of num_heads = 2; got 3"),
    ],
    ids=["passes", "padding", "heads"],
)
def test_what_a_decode_group_may_say(changes, sentence):
    with pytest.raises(ConfigError) as caught:
        plan(["full"], **changes)
    assert sentence in str(caught.value)


def test_a_cell_says_all_that_decides_a_token():
    [cell] = cells(["full"], num_kv_heads=1, batch_size=[3])
    assert (cell.kind, cell.pass_, cell.is_causal, cell.num_kv_heads) == ("decode", "decode", True, 1)
    assert (cell.protocol_version, cell.num_tokens) == (PROTOCOL_VERSION, 3)
    assert cell.id == "full/decode/L100/fp32/B3/causal/H2/G1/D8/seed0"


def test_who_cannot_decode_is_refused_with_the_reason():
    refusals = {item.cell.variant: item.refusal for item in plan(["full", "bigbird", "lstm"]).cells}
    assert refusals["full"] is None
    assert refusals["bigbird"] is not None
    assert refusals["bigbird"][0] == "decode"
    assert "no step-by-step decoding: random blocks" in refusals["bigbird"][1]
    assert refusals["lstm"] == ("attention", 'needs hidden states [B, L, E]: scope = "mixer"')
    [item] = plan([{"name": "full", "options": {"backend": "flex"}}]).cells
    assert item.refusal is not None
    assert "compiles for every length" in item.refusal[1]


@pytest.mark.parametrize(
    ("name", "scope"), [(name, scope) for scope in ("attention", "mixer") for name in decoding(scope)]
)
def test_a_token_becomes_a_record(name, scope):
    [cell] = cells([name], scope=scope, batch_size=2)
    record = run_cell(cell)
    assert record.status == "ok", record.reason + record.trace
    assert record.timing is not None
    assert record.memory is not None
    assert {"decode", "decode_states", "decode_state_bytes", "own_shape", "own_last"} <= set(record.gate)
    assert ("own_step" in record.gate) == (name not in CHOOSING), "its choices may be flipped by rounding"
    complexity = variants[name].complexity
    assert complexity.state_bytes is not None
    shape = build_context(cell).shape(2, 1, 100, variants[name].config(), form_of(cell))
    assert record.memory.state_bytes == complexity.state_bytes(shape, 4)
    assert record.memory.input_bytes is not None
    weights = 4 * (record.num_params or 0)
    assert weights + record.memory.state_bytes <= record.memory.input_bytes
    assert record.memory.input_bytes <= weights + 2 * record.memory.state_bytes
    inputs = 4 * 2 * 16 * (4 if scope == "attention" else 2)
    drawn = sum(buffer.nbytes for buffer in make_module(cell)[0].buffers())  # the features of performer
    # Of weights by position a token reads no more than what there is for one position.
    make: Callable[..., nn.Module] = build_attention if scope == "attention" else build_mixer
    module = make(name, replace(build_context(cell), max_seq_len=1))
    weights_read: dict[str, Tensor] = {
        key: weight
        for key, weight in module.named_parameters()
        if "compress" not in key  # by few tokens
    }
    if "distance_bias" in weights_read:  # of as many positions as a chunk has, however long the model
        weights_read["distance_bias"] = weights_read["distance_bias"][:1]
    read = 4 * sum(weight.numel() for weight in weights_read.values()) + drawn
    assert read <= weights + drawn
    state_read = (complexity.step_bytes or complexity.state_bytes)(shape, 4)
    assert record.min_bytes == inputs + read + state_read
    assert (record.flops, record.time_exponent, record.memory.saved_bytes) == (None, None, None)
    assert Record.from_dict(record.to_dict()) == record


def test_flops_of_one_step_are_counted():
    [cell] = cells(["full"])
    assert run_cell(cell).counted_flops == 4 * 2 * 8 * 101


def test_costs_are_those_of_a_usual_token_as_times_are_medians():
    """Every 64th token of sinkhorn sorts a block, which reads everything; it comes right after 256 others."""
    [cell] = cells(["sinkhorn"], seq_len=[256])
    record, num_seen = run_cell(cell), 64 + 3  # the sorted block, and what the middle of three costs sees of its own
    assert record.counted_flops == 4 * 2 * 8 * num_seen
    variant = variants["sinkhorn"]
    dear, usual = (
        variant.step_bytes(build_context(cell).shape(1, 1, num_tokens, variant.config(), form_of(cell)), 4)
        for num_tokens in (256, 258)
    )
    assert record.min_bytes == usual != dear


def test_kernels_are_those_of_the_steps_not_of_what_they_are_compared_with():
    """Else repeats, which compare nothing, would seem to run others."""
    [cell] = cells(["linear_attention"])
    found = [run_cell(cell, is_repeat=is_repeat) for is_repeat in (False, True)]
    assert [record.kernels for record in found] == [(), ()]


@pytest.mark.parametrize("name", decoding("mixer"))
def test_a_prefill_becomes_a_record(name):
    """Its formulas are those of the causal forward; what it keeps is the state that a token is decoded from."""
    scope = "mixer" if variants[name].attention is None else "attention"
    [cell] = prefills([name], scope=scope, batch_size=2)
    assert (cell.id.split("/")[1:4], cell.num_tokens) == (["decode", "prefill", "L100"], 200)
    record = run_cell(cell)
    assert record.status == "ok", record.reason + record.trace
    assert record.timing is not None
    assert {"decode", "decode_states", "own_shape", "own_last"} <= set(record.gate)
    assert ({"own_prefill", "own_step"} <= set(record.gate)) == (name not in CHOOSING), "its choices may be flipped"
    [token] = cells([name], scope=scope, batch_size=2)
    whole = replace(cell, kind="scaling", pass_="infer")
    assert record.flops == claims(whole).flops
    assert record.min_bytes == claims(whole).min_bytes
    assert record.time_exponent == claims(whole).time_exponent
    assert record.memory is not None
    size = DecodeWorkload(token, None).memory().state_bytes
    assert size is not None
    assert record.memory.state_bytes == size
    assert record.memory.extra_bytes is not None
    assert record.memory.extra_bytes >= size
    assert record.memory.saved_bytes is None
    assert Record.from_dict(record.to_dict()) == record


def test_memory_is_that_of_the_token_after_those_of_the_cell():
    """Of 5 tokens the buffer has room for 8: more than one step after them would make it grow."""
    five, six = (DecodeWorkload(cell, None).memory() for cell in cells(["full"], seq_len=[5, 6]))
    assert five.extra_bytes is not None
    assert six.extra_bytes is not None
    assert five.extra_bytes <= six.extra_bytes


@pytest.mark.parametrize("seq_len", [1, 2, 3, 65, 130])
def test_a_prompt_of_any_length_is_read_and_checked_to_its_last_row(broken, seq_len):
    class WrongAtTheEnd(Exact):
        def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
            output, state = super().prefill(query, key, value, state)
            if query.shape[2] == seq_len and query.shape[0] == 7:  # of the cell, not in the gate
                output[:, :, -1] += 1
            return output, state

    [right] = prefills(["full"], seq_len=[seq_len])
    assert run_cell(right).status == "ok", run_cell(right).reason
    [wrong] = prefills([broken(WrongAtTheEnd)], seq_len=[seq_len], batch_size=7)
    record = run_cell(wrong)
    assert (record.status, "own_prefill" in record.reason) == ("gate_failed", True), record


def test_a_state_that_prefill_leaves_wrong_is_never_timed(broken):
    class Forgets(Exact):
        def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
            output, state = super().prefill(query, key, value, state)
            return output, replace(state, length=state.length - 600) if state.length > 600 else state

    record = run_cell(*prefills([broken(Forgets)], seq_len=[701]))
    assert (record.status, "own_step" in record.reason) == ("gate_failed", True), record


def test_both_passes_of_one_group_are_cells_of_their_own_and_old_cells_keep_their_keys():
    both = plan(["full"], has_prefill=True, seq_len=[100, 200]).cells
    assert [(item.cell.pass_, item.has_count) for item in both] == [
        ("decode", True),
        ("decode", True),
        ("prefill", True),
        ("prefill", False),
    ], "a run that time ends has tokens, which prefills take longer than"
    alone = plan(["full"], seq_len=[100, 200]).cells
    assert [item.cell for item in both[:2]] == [item.cell for item in alone]
    [turns] = plan(["full"], isolation="interleaved").cells
    point = {"kind": "decode", "protocol_version": PROTOCOL_VERSION, "pass_": "decode", "is_causal": True}
    point |= {"scope": "attention", "dtype": "float32", "batch_size": 1, "num_heads": 2, "num_kv_heads": 2}
    point |= {"head_dim": 8, "seed": 0, "device": "cpu", "threads": 1}
    member = {"variant": "full", "label": "full", "options": {}, "variant_digest": turns.cell.variant_digest}
    text = json.dumps([[member], 1, point], sort_keys=True)
    assert turns.cell.together == hashlib.sha256(text.encode()).hexdigest()[:20], "as those that are published"


@pytest.mark.parametrize("seq_len", [1, 2])
def test_the_first_tokens_have_next_to_nothing_before_them(seq_len):
    [cell] = cells(["full"], seq_len=[seq_len])
    record = run_cell(cell)
    assert record.status == "ok", record.reason + record.trace
    assert record.memory is not None
    assert record.memory.state_bytes == 2 * 2 * 8 * 4 * seq_len


def test_a_longer_cell_is_foretold_by_its_prefill():
    """A token of exact attention costs twice as much after twice as many others, its prefill four times."""
    kind = kind_of(cells(["full"])[0])
    short, long = plan(["full"], seq_len=[1000, 4000]).cells
    phases = {"build": 1.0, "gate": 2.5, "probe": 1.5, "timing": 0.5}
    forecast = kind.forecast()
    forecast.add(Record(cell=short.cell, status="ok", duration_s=5.5, phases=phases))
    foretold = pytest.approx(0.5 + 16 * 2.5)
    assert forecast.seconds(long) == foretold, "the gate has lengths of its own, and its verdict is known"
    forecast.add(Record(cell=plan(["full"], seq_len=[2000]).cells[0].cell, status="unsupported"))
    assert forecast.seconds(long) == foretold, "a refusal took no time and says nothing"
    below, above = plan(["full"], seq_len=[100, 400]).cells
    forecast.add(Record(cell=below.cell, status="ok", duration_s=5.5, phases=phases))
    assert forecast.seconds(above) == pytest.approx(0.5 + 2.5 + 16 * 2.5), "such a gate asks longer calls too"


def test_what_compiles_on_a_gpu_is_not_expected_again_and_again():
    """Seconds of compilers are in the first length's phases: grown with it they would end a run with a time limit."""
    short, long = plan(["moba"], device="cuda", threads=None, dtypes=["bfloat16"], seq_len=[1024, 4096]).cells
    forecast = kind_of(short.cell).forecast()
    phases = {"build": 3.0, "gate": 20.0, "probe": 3.0, "timing": 0.5}
    forecast.add(Record(cell=short.cell, status="ok", duration_s=26.5, phases=phases))
    assert forecast.seconds(long) == pytest.approx(6.5)


def test_repeats_are_not_expected_to_compare_themselves_again():
    """Each reads the tokens before, and one of them the whole forward besides."""
    times = {"seq_len": [2**16], "num_heads": 8, "head_dim": 64, "threads": 1, "isolation": "interleaved"}

    def estimate_s(names: list[Any], repeats: int = 1, **changes: Any) -> float:
        first = plan(names, repeats=repeats, budget_s=0.1 * repeats, **times, **changes).cells[0].estimate_s
        assert first is not None
        return first

    one = estimate_s(["full", "linear_attention"])
    assert one == pytest.approx(estimate_s(["full"]) - START_S / 2), "two share a process"
    reading_s = (one - 0.1 - START_S / 2) / 2
    five = estimate_s(["full", "linear_attention"], 5)
    assert five == pytest.approx(5 * (START_S / 2 + 0.1) + 6 * reading_s)
    assert estimate_s(["full"], dtypes=["bfloat16"]) > estimate_s(["full"]), "on many CPUs such types are emulated"


@pytest.mark.parametrize("is_repeat", [False, True])
def test_what_is_compared_at_its_own_length_is_no_part_of_the_gate(is_repeat):
    [cell] = cells(["full"], seq_len=[4000])
    phases = run_cell(cell, is_repeat=is_repeat).phases
    assert ("gate" in phases) == (not is_repeat)
    assert phases["probe"] > 0


def test_tokens_are_decoded_in_turns_from_the_same_ones_before():
    names = ["full", "linear_attention", "local_window"]
    found = run_cells_in_turns(cells(names, isolation="interleaved"))
    assert [record.status for record in found] == ["ok"] * 3, [record.reason for record in found]
    assert len({record.bundle for record in found}) == 1


def test_steps_begin_again_outside_the_timing_before_they_have_moved_far():
    begun = 0

    def begin() -> int:
        nonlocal begun
        begun += 1
        return 0

    seen = []

    def step(state: int) -> tuple[Tensor, int]:
        seen.append(state)
        return torch.zeros(()), state + 1

    steps = _Steps(step, begin, most=3)
    for _ in range(7):
        steps.settle()
        steps()
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert begun == 3


def test_steps_that_are_captured_go_on_and_what_they_read_stays(monkeypatch):
    """What runs before a captured call must leave the device alone. What it read is read again by every replay."""
    steps = _Steps(lambda state: (torch.zeros(()), state + 1), lambda: torch.zeros(3), most=2)
    steps.settle()
    steps()  # of a warm-up: no graph reads what this one read
    steps.settle()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    read = []
    for is_capturing in [True] * 5 + [False] + [True] * 2:  # two graphs
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=is_capturing: now)
        steps.settle()
        read += [weakref.ref(steps.state)] * is_capturing
        steps()
    gc.collect()
    assert [None if (state := each()) is None else float(state[0]) for each in read] == [1, 2, 3, 4, 5, 1, 2]


@pytest.mark.parametrize("seq_len", [3, 4, 16, 100, 200])
def test_a_timed_step_copies_no_cache_and_comes_soon_after_the_tokens_of_its_cell(seq_len):
    """Buffers that must grow, or that another continuation is in, are copied before."""
    [cell] = cells(["full"], seq_len=[seq_len])
    steps = DecodeWorkload(cell, None)._steps()
    lengths = []
    for _ in range(24):
        steps.settle()
        lengths.append(steps.state.length)
        with mock.patch("torch.cat") as copy:
            steps()
        copy.assert_not_called()
    assert min(lengths) == seq_len
    assert max(lengths) < seq_len + max(1, seq_len / 64)


ANY = Capabilities(bidirectional=True, causal=True, cross_attention=False, key_padding_mask=False, decode="kv_cache")
COSTS = Complexity(time="", memory="", time_exponent=2, memory_exponent=1, sequential_ops="1", max_path="1")
NOWHERE = Reference(title="", authors="", year=2026, url="")


@pytest.fixture
def broken():
    """Register variants for one test."""
    names = []

    def add(cls: type, **changes: Any) -> str:
        name, can = f"broken_{cls.__name__.lower()}", replace(ANY, **changes)
        register_attention(name, config=VariantConfig, capabilities=can, complexity=COSTS, reference=NOWHERE)(cls)
        names.append(name)
        return name

    yield add
    for name in names:
        variants.remove(name)


class Exact(variants["full"].attention):  # type: ignore[misc]
    def __init__(self, config: VariantConfig, build: Any) -> None:
        super().__init__(variants["full"].config(), build)


@pytest.mark.parametrize(
    ("changes", "scope"),
    [
        ({"seq_len_multiple": 4}, "attention"),
        ({"seq_len_multiple": 4}, "mixer"),
        ({"variable_seq_len": False}, "mixer"),
    ],
    ids=["multiple", "multiple-mixer", "fixed"],
)
def test_a_state_is_of_any_length_where_whole_calls_are_not(broken, changes, scope):
    """A step is then compared with a forward that has more tokens after it."""
    name = broken(type("Whole", (Exact,), {}), **changes)
    shapes = {"num_heads": 1, "scope": scope}
    for cell in (*cells([name], seq_len=[1, 11], **shapes), *prefills([name], seq_len=[9], **shapes)):
        record = run_cell(cell)
        assert record.status == "ok", record.reason + record.trace
        assert {"decode", "own_step", "own_last"} <= set(record.gate)
    [item] = plan([name], seq_len=[9]).cells
    assert item.refusal is None


def test_a_step_is_compared_with_its_own_row_where_others_come_after_it(broken):
    name = broken(ForgetsAfter512, seq_len_multiple=4)
    record = run_cell(*cells([name], seq_len=[701]))
    assert (record.status, "own_step" in record.reason) == ("gate_failed", True), record


class ForgetsAfter512(Exact):
    """Right as far as the gate looks."""

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        state = state.append(key, value)
        return self._attend(query, state.keys[:, :, -512:], state.values[:, :, -512:], is_causal=False), state


class WritesIntoLongStates(Exact):
    """Its state is no value once it is long."""

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        output, after = super().step(query, key, value, state)
        if state.length > 512:
            state.value[:, :, : state.length] *= 0.99
        return output, after


@pytest.mark.parametrize(("cls", "check"), [(ForgetsAfter512, "own_step"), (WritesIntoLongStates, "own_last")])
def test_what_goes_wrong_after_many_tokens_is_caught_at_the_length_of_the_cell(broken, cls, check):
    name = broken(cls)
    [short], [long] = cells([name]), cells([name], seq_len=[700])
    assert run_cell(short).status == "ok", run_cell(short).reason
    record = run_cell(long)
    assert record.status == "gate_failed", record
    assert check in record.reason
    assert "after 700 tokens" in record.reason


def test_a_step_that_is_wrong_from_the_start_is_never_timed(broken):
    class Doubles(Exact):
        def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
            output, state = super().step(query, key, value, state)
            return 2 * output, state

    record = run_cell(*cells([broken(Doubles)]))
    assert record.status == "gate_failed"
    assert record.timing is None
    assert "decode" in record.reason


@pytest.mark.parametrize("scope", ["attention", "mixer"])
def test_a_state_that_is_no_value_is_never_timed(broken, scope):
    """A shared mixer keeps the state of its heads, which is asked about all the same."""

    class WritesIntoItsState(Exact):
        def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
            output, after = super().step(query, key, value, state)
            after = KVCache(after.key.clone(), after.value.clone(), after.length)
            state.value[:, :, : state.length] *= 0.5
            return output, after

    record = run_cell(*cells([broken(WritesIntoItsState)], scope=scope))
    assert record.status == "gate_failed"
    assert record.timing is None
    assert "decode_states" in record.reason


def test_a_state_that_can_be_used_once_is_refused(broken):
    """It could not be begun again."""

    class Once(Exact):
        used: ClassVar[list[KVCache]] = []

        def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
            if any(state is one for one in self.used):
                raise UnsupportedError("decode", "once: a state can be continued once")
            self.used.append(state)
            output, after = super().step(query, key, value, state)
            return output, after

    record = run_cell(*cells([broken(Once)]))
    assert record.status == "unsupported"
    assert "can be continued once" in record.reason


def test_the_energy_of_a_token_is_without_that_of_beginning_again(monkeypatch):
    spent = {"joules": 0.0}

    def costing(joules: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any) -> Any:
            spent["joules"] += joules
            return call(self)

        return counted

    def energy(call: Callable[[], object], *, device: str) -> float:
        assert device == "cpu"
        before, num_calls = spent["joules"], 12
        for _ in range(num_calls):
            call()
        return (spent["joules"] - before) / num_calls

    monkeypatch.setattr(_Steps, "__call__", costing(1.0, _Steps.__call__))
    monkeypatch.setattr(DecodeWorkload, "_begin", costing(10.0, DecodeWorkload._begin))
    monkeypatch.setattr(trial, "why_no_energy", lambda _: "")
    monkeypatch.setattr(trial, "energy_of_call", energy)
    [cell] = cells(["full"], seq_len=[256])  # four steps from each beginning
    record = run_cell(cell, has_energy=True)
    assert record.status == "ok", record.reason + record.trace
    assert record.energy_joules == pytest.approx(1.0)
    assert record.energy_reason == ""


@pytest.mark.parametrize(
    ("begin", "whole", "joules", "reason"),
    [
        (8.0, 5.0, 3.0, ""),
        (None, 5.0, None, "the counter stood still"),
        (8.0, None, None, "the counter stood still"),
        (20.0, 5.0, None, "what comes between two calls took all that was counted"),
    ],
)
def test_a_token_without_energy_says_why(monkeypatch, begin, whole, joules, reason):
    answers = [begin, whole]
    monkeypatch.setattr(trial, "why_no_energy", lambda _: "")
    monkeypatch.setattr(trial, "energy_of_call", lambda call, device: answers.pop(0))
    [cell] = cells(["full"], seq_len=[256])
    record = run_cell(cell, has_energy=True)
    assert (record.energy_joules, record.energy_reason) == (joules, reason)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", ["prefill", "decode"])
@pytest.mark.parametrize("name", decoding("mixer"))
def test_tokens_on_a_gpu_are_timed_on_the_gpu_alone(monkeypatch, name, pass_):
    monkeypatch.setattr(capture, "_num_failed", 0)  # other tests may have failed to capture in this process
    whole = {"scope": "mixer", "device": "cuda", "threads": None, "dtypes": ["bfloat16"], "seq_len": [512]}
    [cell] = [cell for cell in cells([name], has_prefill=True, **whole) if cell.pass_ == pass_]
    record = run_cell(cell, budget_s=0.1)
    assert record.status == "ok", record.reason + record.trace
    assert record.timing is not None
    assert record.timing.timer == "cuda_event"
    if pass_ == "decode":  # a prefill may wait for the GPU
        assert record.timing.graph_reason == ""
        assert record.timing.graph_ms is not None


def test_capture_has_room_for_the_steps_of_its_graphs():
    from attn_zoo.measure.stopwatch import NUM_WARMUP, SEVERAL

    assert decoded_token.CAPTURED_STEPS >= 2 * (NUM_WARMUP + SEVERAL)
