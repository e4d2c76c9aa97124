"""Compiled training gives the numbers of plain training; FLOPs are counted all the same."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit

from attn_zoo.kernels import compiled_code
from attn_zoo.records import Score
from attn_zoo.training import batches, run_training, updates
from attn_zoo.training.graphed import GRAPH_PATH
from attn_zoo.training.objective import ClassificationObjective
from tests.training.toy_task import cell, toy_task


@pytest.fixture(autouse=True)
def toy():
    with toy_task() as task:
        yield task
    torch.compiler.reset()


def scores(level: str, device: str = "cpu", **overrides: Any) -> tuple[Score, Score]:
    found = []
    for is_compiled in (False, True):
        run = cell(level, **{"num_steps": 10, "eval_every": 5, "compile": is_compiled, **overrides})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about itself
            result = run_training(dataclasses.replace(run, device=device))
        assert result.score is not None, result.reason
        found.append(result.score)
    return found[0], found[1]


def expect_equal(plain: Score, compiled: Score, rel: float = 1e-4) -> None:
    assert compiled.settings["compile"]
    for one, two in zip(plain.curve, compiled.curve, strict=True):
        assert two == pytest.approx(one, rel=rel)
    assert compiled.train_flops == plain.train_flops
    assert compiled.pretrain_flops == plain.pretrain_flops


@pytest.mark.parametrize(
    ("level", "overrides"),
    [
        ("plain", {"norm": "batch_norm"}),  # its running statistics must not see the forward that counts
        ("pair", {"pretrain": "masked", "pretrain_steps": 10, "is_full_length": True}),
        ("language", {"is_full_length": True}),
    ],
    ids=["plain", "pair", "language"],
)
def test_a_traced_model_learns_the_same(monkeypatch, level, overrides):
    """Through torch's tracing and differentiation, without its code generator, which takes a minute."""
    used, modes = [], []
    original = torch.compile

    def traced(model, **options):
        used.append(options)
        compiled = original(model, backend="aot_eager", dynamic=options["dynamic"])

        def called(*inputs):
            modes.append(model.training)
            return compiled(*inputs)

        return called

    monkeypatch.setattr(torch, "compile", traced)
    plain, compiled = scores(level, **overrides)
    expect_equal(plain, compiled)
    assert set(modes) == {True, False}, "training and validation"
    assert plain.compile_s == 0.0 < (compiled.compile_s or 0.0) < compiled.train_s
    assert (compiled.eval_s or 0.0) > 0.0
    assert len(used) == (2 if "pretrain" in overrides else 1)
    assert all(options.keys() == {"dynamic"} for options in used), "CUDA graphs hold whole updates: training/graphed.py"


@pytest.mark.parametrize("is_full_length", [False, True], ids=["lengths-of-batches", "full-length"])
def test_a_model_is_compiled_once_to_train_and_once_to_validate(monkeypatch, is_full_length):
    """Lengths vary from the first batch on: else it would be compiled for the first of them alone, then anew."""
    graphs, original, seen = [], torch.compile, set()

    def backend(graph, inputs):
        given = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        graphs.append([value.shape for value in given if isinstance(value, torch.Tensor)])
        return graph.forward

    def traced(model, dynamic):
        compiled = original(model, backend=backend, dynamic=dynamic)

        def called(*inputs):
            seen.add(inputs[0].shape[1])
            return compiled(*inputs)

        return called

    monkeypatch.setattr(torch, "compile", traced)
    run = cell(
        "plain", num_steps=10, eval_every=5, compile=True, is_full_length=is_full_length, pad_multiple=1, batch_size=2
    )
    result = run_training(run)
    assert result.score is not None
    assert len(seen) == 1 if is_full_length else len(seen) > 1
    assert len(graphs) == 2
    for shapes in graphs:
        assert all(isinstance(shape[0], int) for shape in shapes), "of any batch size: 2 in training, 50 in validation"
        assert is_full_length == all(isinstance(size, int) for shape in shapes for size in shape)
    assert 0.0 < (result.score.eval_compile_s or 0.0) < (result.score.eval_s or 0.0)


class Compiled(nn.Sequential):
    """Stands in for what torch compiles."""

    def forward(self, *inputs: Any) -> Any:
        return self[0](*inputs)


def test_memory_of_the_forward_that_counts_flops_is_no_part_of_training(monkeypatch):
    """As written it may hold what compiled is never in memory."""
    most, outputs = [0], ClassificationObjective.outputs

    def run(self, model, batch):
        most[0] = max(most[0], 20 if isinstance(model, nn.Sequential) else 700)
        return outputs(self, model, batch)

    monkeypatch.setattr(torch, "compile", lambda model, dynamic: Compiled(model))
    monkeypatch.setattr(ClassificationObjective, "outputs", run)
    monkeypatch.setattr(updates, "_reset_peak", lambda device: most.__setitem__(0, 10))
    monkeypatch.setattr(updates, "_peak_bytes", lambda device: most[0])
    score = run_training(cell("plain", num_steps=10, eval_every=5, compile=True)).score
    assert score is not None
    assert score.peak_bytes == 20


def test_what_torch_would_run_as_written_after_too_many_forms_is_an_error(monkeypatch):
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: original(model, backend="eager", dynamic=dynamic))
    monkeypatch.setattr(compiled_code, "MAX_COMPILED", 1)  # the second form is that which validates
    run = cell("plain", num_steps=2, eval_every=2, compile=True)
    limit = config.patch(recompile_limit=1, fail_on_recompile_limit_hit=False)
    with limit, pytest.raises(FailOnRecompileLimitHit, match="recompile_limit"):
        run_training(run)


@pytest.mark.slow
def test_a_compiled_model_learns_the_same():
    expect_equal(*scores("plain"))


def test_advice_of_the_compiler_about_a_gpu_is_no_error(monkeypatch):
    """As an error it would end the compilation: on an H100 it did."""
    from torch._inductor import compile_fx

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()


@pytest.mark.gpu
def test_long_range_arena_trains_compiled_on_a_gpu():
    run = dataclasses.replace(cell("plain", num_steps=10, eval_every=5), device="cuda", protocol="lra-small")
    result = run_training(run)
    assert result.score is not None
    assert result.score.settings["compile"] is True
    assert f"{GRAPH_PATH}.training" in result.kernels


@pytest.mark.gpu
@pytest.mark.parametrize("is_full_length", [False, True], ids=["lengths-of-batches", "full-length"])
def test_on_a_gpu(is_full_length):
    plain, compiled = scores("plain", "cuda", is_full_length=is_full_length)
    expect_equal(plain, compiled, rel=1e-2)
    assert plain.peak_bytes is not None
    assert plain.peak_bytes < 2**30, "of the allocator, not of the process"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_update_waits_for_the_gpu(monkeypatch):
    """Between two looks at the loss the host only sends work: anything else would raise here."""
    original = updates.Updater._update

    def watched(self, step, batch):
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(self, step, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    original_batch = batches.Batcher.batch

    def watched_batch(self, feed, rows):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original_batch(self, feed, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(updates.Updater, "_update", watched)
    monkeypatch.setattr(batches.Batcher, "batch", watched_batch)
    for level in ("plain", "tokens", "seq2seq"):
        run = dataclasses.replace(cell(level, num_steps=10), device="cuda")
        assert run_training(run).status == "ok"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["full", "linformer", "bigbird"])
def test_updates_of_one_shape_are_one_graph(variant, capfd):
    """And whoever reads the record sees it. With dropout: the numbers drawn must be new at every replay."""
    overrides: dict[str, Any] = {
        "embed_dim": 64,  # smaller heads are gathered, and dropout there asks the device for its seed
        "num_steps": 10,
        "eval_every": 5,
        "compile": True,
        "is_full_length": True,
        "dropout_p": 0.1,
    }
    run = dataclasses.replace(cell("plain", variant=variant, **overrides), device="cuda")
    one, two = run_training(run), run_training(run)
    graphs = {f"{GRAPH_PATH}.training", f"{GRAPH_PATH}.scoring"}
    assert graphs <= set(one.kernels), capfd.readouterr().err
    assert one.score is not None
    assert two.score is not None
    for here, there in zip(one.score.curve, two.score.curve, strict=True):
        assert here == pytest.approx(there, rel=1e-2), "sums of embeddings' gradients are atomic: in no fixed order"
