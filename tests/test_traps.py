"""The faults found in the sources of earlier benchmarks, and where each is kept out of this one.

Traps that one file owns are tested there (`ELSEWHERE` names the tests, and they must exist); the others here.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

import attn_zoo
from attn_zoo import BuildContext, build_mixer
from attn_zoo.errors import ConfigError
from attn_zoo.model import Classifier, ModelConfig
from attn_zoo.registry import make_config, tasks, variants
from attn_zoo.training.protocol import resolve_protocol
from attn_zoo.training.seeding import batch_rows
from attn_zoo.variants.bigbird import BigBirdConfig
from attn_zoo.variants.linformer import LinformerConfig

ELSEWHERE = {
    "4 schedule and warm-up are ignored": "tests.training.test_traps:test_every_setting_is_really_used",
    "5 black pixels count as padding": "tests.training.test_traps:test_token_0_is_a_token_where_nothing_is_padding",
    "5 in Image": "tests.tasks.test_image:test_black_is_not_padding",
    "5 in Pathfinder": "tests.tasks.test_pathfinder:test_no_position_is_masked",
    "6 padding is dropped": "tests.training.test_traps:test_what_stands_in_padding_changes_nothing",
    "6 in a variant": "tests.conformance.test_variants:test_keeps_its_promises",
    "8 weights are selected on test": "tests.training.test_traps:test_selection_never_sees_test",
    "8 in Text": "tests.tasks.test_text:test_a_tenth_of_each_class_is_held_out_and_no_row_is_in_two_splits",
    "9 every user has other splits": "tests.tasks.test_pathfinder:test_splits_are_apart_and_the_same_on_every_call",
    "10 the generator has no seed, and medians round": "tests.tasks.test_listops:TestTraps",
    "11 pooling divides by the padded length": "tests.training.test_traps:test_pooling_divides_by_the_true_length",
    "13 GPU work is timed without waiting for it": "tests.measure.test_stopwatch:test_gpu_time_grows_with_the_work",
    "14 misplaced settings are ignored": "tests.matrix.plan.test_schema:test_each_mistake_is_named_at_its_place",
    "15 gaps count as 0": "tests.report.analysis.test_task_means:test_a_missing_score_leaves_the_task_out_of_the_mean",
    "16 the bytes of a decode state are claimed and not measured": (
        "tests.conformance.test_variants:test_keeps_its_promises"
    ),
    "18 noisy labels": "tests.tasks.contours.test_pictures:test_label_1_means_that_both_markers_lie_on_one_contour",
}


@pytest.mark.parametrize("place", ELSEWHERE.values(), ids=ELSEWHERE)
def test_the_trap_is_tested_where_it_belongs(place):
    module, _, name = place.partition(":")
    assert hasattr(importlib.import_module(module), name)


def test_1_the_rank_of_an_option_reaches_the_model():
    protocol = resolve_protocol("lra-small")
    for rank in (16, 32):
        config = protocol.model_config(
            variant="linformer", options={"proj_len": rank}, vocab_size=20, max_seq_len=64, seed=0
        )
        shapes = {
            tuple(parameter.shape) for name, parameter in Classifier(config, 2).named_parameters() if "mixer" in name
        }
        assert any(rank in shape for shape in shapes)
        assert not any(48 - rank in shape for shape in shapes)  # 16 and 32 swapped: nothing else has these sizes


def test_2_defaults_are_what_the_papers_use():
    assert LinformerConfig().proj_len == 256
    bigbird = BigBirdConfig()
    blocks = (bigbird.num_window_blocks, bigbird.num_global_blocks, bigbird.num_random_blocks)
    assert (bigbird.block_size, *blocks) == (64, 3, 2, 3)


def test_3_a_misspelt_option_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="block_size"):
        make_config(variants["bigbird"].config, {"blok_size": 32}, "bigbird")


def test_7_random_blocks_reach_beyond_1024_tokens_and_whole_lengths_get_no_extra_block():
    config = BigBirdConfig()
    layout = config.layout(8192, num_heads=2)
    drawn, _ = layout.draw()
    assert drawn.max() > 8000 // config.block_size
    assert (drawn >= 1024 // config.block_size).float().mean() > 0.8
    assert layout.num_key_blocks == 8192 // config.block_size


def test_12_no_variant_is_charged_for_activation_checkpointing():
    sources = [path.read_text() for path in Path(attn_zoo.__file__).parent.rglob("*.py")]
    assert not [text for text in sources if re.search(r"torch\.utils\.checkpoint|checkpoint_sequential", text)]


def test_13_inputs_are_random_numbers():
    from attn_zoo.matrix.kinds.scaling import CallWorkload
    from attn_zoo.records import Cell

    cell = Cell(
        kind="scaling", variant="full", batch_size=1, scope="attention", pass_="fwd", seq_len=64, num_heads=2,
        num_kv_heads=2, head_dim=16,
    )  # fmt: skip
    leaves = CallWorkload(cell).leaves
    assert len(leaves) == 3
    assert all(0.9 < float(tensor.detach().std()) < 1.1 for tensor in leaves)


def test_17_a_pass_over_the_data_ends():
    seen = torch.cat([batch_rows(step, 4, 10, seed=0) for step in range(1, 6)])
    assert sorted(seen[:10].tolist()) == list(range(10))
    assert sorted(seen[10:].tolist()) == list(range(10))
    assert all(len(tasks[name].levels) for name in tasks)


def test_mixers_are_the_same_in_all_models_of_a_protocol():
    """Heads, widths and projections come from the protocol: published tables differed by variant."""
    build = BuildContext(embed_dim=64, num_heads=2, max_seq_len=64)
    names = {name for name, _ in build_mixer("full", build).named_parameters()}
    for name in ("bigbird", "local_window", "linear_attention"):
        assert {parameter for parameter, _ in build_mixer(name, build).named_parameters()} == names
    assert ModelConfig(variant="full", vocab_size=4, max_seq_len=8).num_heads == 2


def test_a_test_in_a_folder_named_gpu_needs_none(request, monkeypatch):
    """The names of all folders and functions around a test are keywords of it; in such a checkout all were skipped."""
    from tests.conftest import pytest_collection_modifyitems

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain, marked = (
        pytest.Function.from_parent(request.node.parent, name="gpu", callobj=lambda: None) for _ in range(2)
    )
    marked.add_marker(pytest.mark.gpu)
    pytest_collection_modifyitems([plain, marked])
    assert [len(list(item.iter_markers("skip"))) for item in (plain, marked)] == [0, 1]
