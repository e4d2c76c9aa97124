"""Distances from exact attention as cells: the numbers against the oracle, the inputs, what a matrix may say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_zoo.attention import build_attention
from attn_zoo.attention.oracle import attention_weights, softmax_attention
from attn_zoo.errors import ConfigError, GateError
from attn_zoo.matrix.drive.progress import describe
from attn_zoo.matrix.kinds import approximation, one_call
from attn_zoo.matrix.kinds.approximation import RUN_LEN, compare_rows, draw
from attn_zoo.matrix.plan.expand import Plan, make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.records import APPROXIMATION_VERSION, Cell, Record
from tests.matrix.conftest import run_cell

SMALL = {"seq_len": [96], "num_heads": 2, "head_dim": 16, "seeds": [0], "device": "cpu", "threads": 1}


def plan(names: list[Any], **changes: Any) -> Plan:
    matrix = parse_matrix({"name": "test", "approximation": [{"variants": names, **SMALL, **changes}]}, "test.toml")
    return make_plan(matrix)


def cells(names: list[Any], **changes: Any) -> list[Cell]:
    return [item.cell for item in plan(names, **changes).cells]


def measured(name: Any, **changes: Any) -> Record:
    (cell,) = cells([name], **{"inputs": "diffuse", **changes})
    record = run_cell(cell)
    assert record.status == "ok", record.reason
    assert record.approximation is not None
    return record


def error(name: Any, **changes: Any) -> float:
    found = measured(name, **changes).approximation
    assert found is not None
    return found.error


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"inputs": "peeked"}, "approximation[0].inputs[0]: expected one of diffuse, peaked, local, topics; got"),
        ({"passes": ["fwd"]}, "approximation[0].passes: unknown key"),
        ({"repeats": 3}, "approximation[0].repeats: unknown key"),
        ({"scope": "mixer"}, "approximation[0].scope: unknown key"),
        ({"num_heads": 4, "num_kv_heads": 3}, "approximation[0].num_kv_heads: expected a divisor of num_heads = 4"),
    ],
    ids=["inputs", "passes", "repeats", "scope", "kv heads"],
)
def test_what_a_group_may_say(changes, sentence):
    with pytest.raises(ConfigError) as caught:
        plan(["full"], **changes)
    assert sentence in str(caught.value)


def test_a_cell_says_all_that_decides_an_error():
    (cell,) = cells(["full"], inputs="local", is_causal=True)
    assert (cell.kind, cell.scope, cell.pass_, cell.inputs) == ("approximation", "attention", None, "local")
    assert cell.protocol_version == APPROXIMATION_VERSION
    assert cell.id == "full/approximation/local/L96/fp32/causal/H2/D16/seed0"
    assert cell.key != replace(cell, inputs="topics").key


def test_every_kind_of_inputs_and_three_seeds_unless_it_says_otherwise():
    group = {"variants": ["full"], "seq_len": 64, "device": "cpu"}
    found = make_plan(parse_matrix({"name": "t", "approximation": [group]}, "")).cells
    assert {item.cell.inputs for item in found} == {"diffuse", "peaked", "local", "topics"}
    assert {item.cell.seed for item in found} == {0, 1, 2}
    assert len(found) == 12


def test_one_process_may_run_all_that_one_mechanism_is_asked():
    found = plan(["full", "linformer"], inputs=["diffuse", "local"], seeds=[0, 1], seq_len=[32, 64]).cells
    assert len({item.process for item in found}) == 2


def test_what_makes_its_own_queries_is_refused():
    found = plan(["reformer", "lstm", "retention"]).cells
    assert {item.refusal for item in found} == {
        ("attention", "it makes its queries, keys and values itself, so there are none to compare exact attention on")
    }


def test_a_causal_cell_of_a_mechanism_that_has_no_such_form_is_refused():
    (item,) = plan(["linformer"], inputs="diffuse", is_causal=True).cells
    assert item.refusal is not None
    assert item.refusal[0] == "causal"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_attention_leaves_rounding_only(dtype, is_causal):
    found = measured("full", dtypes=dtype, is_causal=is_causal, num_heads=4, num_kv_heads=2).approximation
    assert found is not None
    assert found.error <= max(2 * found.rounding_error, 1e-14)
    assert found.rounding_error <= {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-2}[dtype]
    assert found.rounding_error >= {"float32": 1e-8, "float64": 0.0, "bfloat16": 1e-4}[dtype]
    assert found.has_budget
    assert found.num_rows == 4 * 96


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_scores", [1, 2**25], ids=["a row at a time", "all at once"])
def test_rows_are_compared_with_the_oracle(is_causal, num_scores, monkeypatch):
    monkeypatch.setattr(approximation, "CHUNK_SCORES", num_scores)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 40, 8), (2, 2, 40, 8), (2, 2, 40, 8)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    rows = torch.tensor([0, 7, 8, 39])
    output = torch.randn(2, 4, 40, 8, generator=generator)
    exact = softmax_attention(query, key, value, is_causal=is_causal)
    weights = attention_weights(query.double(), key.double(), is_causal=is_causal)
    equal = torch.ones(40, 40).tril() if is_causal else torch.ones(40, 40)
    mean = (equal / equal.sum(-1, keepdim=True)).double() @ value.repeat_interleave(2, dim=1).double()

    def distance(other):
        return float((other - exact)[:, :, rows].norm() / exact[:, :, rows].norm())

    found = compare_rows(output, query, key, value, rows, is_causal=is_causal)
    assert found.error == pytest.approx(distance(output.double()))
    assert found.mean_error == pytest.approx(distance(mean))
    assert found.num_effective_keys == pytest.approx(
        float((1 / weights.square().sum(-1))[:, :, rows].flatten().median())
    )
    assert found.num_rows == 2 * 4 * 4
    assert compare_rows(torch.zeros_like(output), query, key, value, rows, is_causal=is_causal).error == 1.0
    assert compare_rows(exact, query, key, value, rows, is_causal=is_causal).error < 1e-15


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_rounding_is_that_of_a_fused_kernel(dtype, fused):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 64, 16, generator=generator).to(getattr(torch, dtype)) for _ in range(3))
    query *= 4  # whose weights make much of the rounding of a score
    wide_query, wide_key = (x.to(getattr(torch, fused)) for x in (query, key))
    output = torch.softmax(wide_query @ wide_key.mT * 16**-0.5, dim=-1).to(value.dtype) @ value
    found = compare_rows(output, query, key, value, torch.arange(64))
    assert found.rounding_error == found.error


@pytest.mark.parametrize("kind", ["diffuse", "peaked", "local", "topics"])
def test_inputs_are_what_their_kind_says(kind):
    (cell,) = cells(["full"], inputs=kind, seq_len=2048, head_dim=64)
    query, key, value = draw(cell)
    assert float(value.var()) == pytest.approx(1.0, abs=0.05)
    assert float(key.var()) == pytest.approx(1.0, abs=0.1)
    scores = query.double() @ key.double().mT / 8
    weights = torch.softmax(scores, dim=-1)
    distance = (torch.arange(2048)[:, None] - torch.arange(2048)).abs()
    spread = float((1 / weights.square().sum(-1)).median())
    if kind == "diffuse":
        assert float(scores.std()) == pytest.approx(1.0, abs=0.02)
        assert spread == pytest.approx(2048 / 2.718, rel=0.1)
    if kind == "peaked":
        assert float(scores.std()) == pytest.approx(4.0, abs=0.1)
        assert spread < 10
    if kind == "local":
        assert float((weights * (distance <= 32)).sum(-1).mean()) > 0.99
        own = scores.diagonal(dim1=-2, dim2=-1)
        assert torch.allclose(own, torch.full_like(own, 12.0), atol=1e-4)
    if kind == "topics":
        generator = torch.Generator().manual_seed(0)
        topic = torch.randint(16, (2048 // RUN_LEN,), generator=generator).repeat_interleave(RUN_LEN)
        same = topic[:, None] == topic
        assert float(scores[:, :, same].mean()) == pytest.approx(8.0, abs=1.5)
        assert float((weights * same).sum(-1).mean()) > 0.97
        assert float((weights * same * (distance > RUN_LEN)).sum(-1).mean()) > 0.1, "a topic lies in several runs"


def test_inputs_follow_from_kind_and_seed_alone():
    first, other = cells(["full"], inputs="topics", seeds=[0, 1])
    (linformer,) = cells(["linformer"], inputs="topics")
    for ours, theirs, again in zip(draw(first), draw(linformer), draw(first), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, again)
    assert not torch.equal(draw(first)[0], draw(other)[0])


def test_a_larger_budget_is_nearer_where_the_weight_is_near():
    windows = [
        error({"name": "local_window", "options": {"window_size": size}}, inputs="local", seq_len=256, head_dim=64)
        for size in (4, 16, 64)
    ]
    assert windows[0] > 0.1 > windows[2]
    assert windows == sorted(windows, reverse=True)


def test_what_no_budget_makes_exact_says_so():
    found = measured("linear_attention").approximation
    assert found is not None
    assert not found.has_budget
    assert found.error == pytest.approx(found.mean_error, abs=0.1), "its weights are nearly equal on normal inputs"


def test_a_record_has_what_was_checked_and_what_ran():
    record = measured("linformer")
    assert "matches_reference" in record.gate
    assert "own_output" in record.gate
    assert "own_inputs" in record.gate
    assert record.kernels
    assert record.flops
    assert record.num_params
    assert record.timing is None
    assert set(record.phases) == {"build", "gate", "comparing", "probe"}
    assert Record.from_dict(record.to_dict()) == record
    assert describe(record).startswith("error ")
    assert "(mean of the values: " in describe(record)


def test_what_fails_its_gate_has_no_error(monkeypatch):
    def gate(*_: Any, **__: Any) -> tuple[str, ...]:
        raise GateError("matches_reference", "full: off by 1")

    monkeypatch.setattr(one_call, "gate", gate)
    (cell,) = cells(["full"], inputs="diffuse")
    record = run_cell(cell)
    assert record.status == "gate_failed"
    assert "off by 1" in record.reason
    assert record.approximation is None


def test_an_output_that_is_not_finite_is_no_error_but_a_failure(monkeypatch):
    original = build_attention

    def spoiled(*given: Any, **options: Any) -> Any:
        module = original(*given, **options)
        module.register_forward_hook(lambda *_: torch.full_like(_[2], float("nan")))
        return module

    monkeypatch.setattr(approximation, "build_attention", spoiled)
    (cell,) = cells(["full"], inputs="diffuse")
    record = run_cell(cell)
    assert record.status == "gate_failed"
    assert record.approximation is None


def test_what_changes_its_inputs_at_its_own_length_has_no_error(monkeypatch):
    original = build_attention

    def spoiling(*given: Any, **options: Any) -> Any:
        module = original(*given, **options)
        module.register_forward_pre_hook(lambda _, inputs: (*inputs[:2], inputs[2].mul_(2.0)))
        return module

    monkeypatch.setattr(approximation, "build_attention", spoiling)
    (cell,) = cells(["linformer"], inputs="diffuse")
    record = run_cell(cell)
    assert record.status == "gate_failed"
    assert "own_inputs: linformer: changes its argument value in place" in record.reason
    assert record.approximation is None


def test_results_from_before_keep_their_keys():
    folder = Path(__file__).parents[3] / "results" / "xeon-avx512-2cores" / "quick" / "cells"
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        fields = json.loads(file.read_text())
        del fields["checksum"]
        for name in ("inputs", "replaces", "adapt_steps"):  # of kinds that came later
            assert not fields["cell"].pop(name)
        assert Record.from_dict(fields).cell.key == file.stem


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "linformer", "bigbird"])
def test_a_gpu_measures_the_same_but_for_rounding(name):
    sizes = {"seq_len": 1024, "head_dim": 64, "inputs": "topics", "dtypes": "bfloat16"}
    here, there = (measured(name, **sizes, device=device).approximation for device in ("cpu", "cuda"))
    assert here is not None
    assert there is not None
    assert there.rounding_error < 1e-2
    assert there.error == pytest.approx(here.error, rel=0.3, abs=1e-2), "other random numbers of the same kind"
