"""Shards of one plan become one folder, and nothing is made one that is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_zoo.errors import ConfigError, FolderError
from attn_zoo.folder import pack_cells, read_info, read_run
from attn_zoo.matrix.store.merge import merge
from attn_zoo.matrix.store.store import Store
from attn_zoo.packed_run import share
from tests.report.synthetic import MACHINE, roof, scaling, write_run

OTHER = replace(MACHINE, cpu="Other CPU")


def shard(path, lengths, *, environment=MACHINE, **more):
    records = [replace(scaling("full", length), environment=environment.digest) for length in lengths]
    more = {"planned": pack_cells(record.cell for record in records), **more}
    folder = write_run(path, records, environment=environment, ceilings=[roof(environment=environment.digest)], **more)
    for record in records:
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / f"{record.cell.key}.log").write_text(path.name)
    return folder


def test_shards_become_the_run_that_one_machine_would_have_made(tmp_path):
    shards = [
        shard(tmp_path / "1", [512, 1024]),
        shard(tmp_path / "2", [2048], environment=OTHER, stopped="time limit"),
    ]
    merged = merge(shards, tmp_path / "all")
    run = read_run(merged)
    assert sorted(record.cell.seq_len or 0 for record in run.records) == [512, 1024, 2048]
    assert set(run.environments) == {MACHINE.digest, OTHER.digest}
    assert {one.environment for one in run.ceilings} == {MACHINE.digest, OTHER.digest}
    assert (run.planned, run.left, run.stopped) == (3, (), "time limit")
    assert len(list((merged / "logs").iterdir())) == 3
    assert Store(merged).scan().problems == {}


def test_a_merged_folder_knows_which_shards_it_lacks(tmp_path):
    shards = [shard(tmp_path / str(n), [512 * n], shards=[["quick", n, 3]]) for n in (1, 2)]
    missing = "shard 3 of 3 has not run here"
    assert read_info(merge(shards, tmp_path / "two")).missing_shards == missing
    older = shard(tmp_path / "3", [2048])
    assert read_info(merge([*shards, older], tmp_path / "all")).missing_shards == "", "the older one does not say"


def test_packed_runs_merge_and_what_both_have_is_kept_once(tmp_path):
    first, second = shard(tmp_path / "1", [512, 1024]), shard(tmp_path / "2", [1024, 2048])
    merged = merge([share(first, tmp_path / "1.zip"), second], tmp_path / "all")
    assert len(read_run(merged).records) == 3
    assert len(read_info(merged).planned or ()) == 3


def test_a_cell_that_was_measured_twice_is_refused(tmp_path):
    first, second = shard(tmp_path / "1", [512]), tmp_path / "2"
    write_run(second, [scaling("full", 512, 99.0)])
    with pytest.raises(ConfigError, match=r"full/scaling/.* was measured in .*1 and in .*2: compare them"):
        merge([first, second], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_repeats_that_were_begun_are_taken_over_each_once(tmp_path):
    first, second = shard(tmp_path / "1", [512]), shard(tmp_path / "2", [1024])
    parts = [scaling("full", 2048, 10.0 + number) for number in range(3)]
    for folder, kept in ((first, parts[:1]), (second, parts[:2])):
        for number, record in enumerate(kept, 1):
            Store(folder).repeats.write(record, number)
    Store(second).repeats.write(scaling("full", 512), 1)  # complete in the first
    merged = Store(merge([first, second], tmp_path / "all"))
    assert merged.repeats.count() == {parts[0].cell.key: 2}
    assert merged.repeats.read(parts[0].cell.key) == parts[:2]
    Store(first).repeats.write(parts[2], 2)
    with pytest.raises(ConfigError, match=r"L2048.* was measured in .*1 and in .*2"):
        merge([first, second], tmp_path / "other")


def test_trainings_that_were_begun_go_on(tmp_path):
    shards = [shard(tmp_path / "1", [512]), shard(tmp_path / "2", [1024])]
    for folder in shards:
        saved = Store(folder).checkpoints / f"key{folder.name}" / "train.safetensors"
        saved.parent.mkdir(parents=True)
        saved.write_text(folder.name)
    merged = Store(merge(shards, tmp_path / "all"))
    assert [path.read_text() for path in sorted(merged.checkpoints.glob("*/train.safetensors"))] == ["1", "2"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"name": "other"}, "one has the matrix quick, the other other"),
        ({"matrices": [{"name": "quick", "seeds": 2}]}, "their matrices differ in seeds"),
    ],
)
def test_other_plans_are_refused(tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        merge([shard(tmp_path / "1", [512]), shard(tmp_path / "2", [1024], **more)], tmp_path / "all")


def test_other_sources_are_refused(tmp_path):
    first = write_run(tmp_path / "1", [scaling("full", 512, variant_digest="a")])
    second = write_run(tmp_path / "2", [scaling("full", 1024, variant_digest="b")])
    with pytest.raises(ConfigError, match="full has one source in"):
        merge([first, second], tmp_path / "all")


def test_what_cannot_be_merged_leaves_nothing_behind(tmp_path):
    first, second = shard(tmp_path / "1", [512]), shard(tmp_path / "2", [1024])
    with pytest.raises(ConfigError, match="expected two results folders or more; got 1"):
        merge([first], tmp_path / "all")
    with pytest.raises(ConfigError, match=r"expected each folder once; got .*1 twice"):
        merge([first, second, tmp_path / "2" / ".." / "1"], tmp_path / "all")
    with pytest.raises(FolderError, match="not a results folder"):
        merge([first, tmp_path], tmp_path / "all")
    with pytest.raises(FolderError, match="exists already"):
        merge([first, second], first)
    (second / "cells" / "half.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cells/half.json is no record"):
        merge([first, second], tmp_path / "all")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2"]


def test_links_are_not_followed(tmp_path):
    first, second = shard(tmp_path / "1", [512]), shard(tmp_path / "2", [1024])
    (tmp_path / "outside").write_text("secret")
    (first / "logs" / "x.log").symlink_to(tmp_path / "outside")
    assert not (merge([first, second], tmp_path / "all") / "logs" / "x.log").exists()
