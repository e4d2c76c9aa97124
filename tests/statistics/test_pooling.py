"""Records of the same measurement give one: repeats of a run and further folders of a report by the same rule."""

from dataclasses import replace

import pytest

from attn_zoo.records import Memory, Record, Timing
from attn_zoo.statistics.pooling import pool_records
from tests.report.synthetic import scaling


def test_pooled_records_pool_again_and_keep_every_process():
    first, second, third = (scaling("full", 512, ms) for ms in (1.0, 2.0, 8.0))
    one = pool_records([pool_records([first, second]), third])
    assert one.timing is not None
    assert one.timing.process_sizes == (15, 15, 15)
    assert one.timing.median_ms == pytest.approx(16 ** (1 / 3), rel=0.02), "the geometric mean of three"
    assert one.timing == pool_records([first, second, third]).timing


def test_the_most_memory_counts_whichever_process_measured_it():
    first, second = scaling("full", 512), scaling("full", 512, num_heads=4)
    sizes = [Memory(peak_bytes=3, saved_bytes=7), None, Memory(peak_bytes=5)]
    one = pool_records(
        [replace(record, memory=memory) for record, memory in zip([first, second, second], sizes, strict=True)]
    )
    assert one.memory == Memory(peak_bytes=5, saved_bytes=7)
    assert one.cell == first.cell


def replayed(graph_ms: float | None, reason: str = "") -> Record:
    """Return a record of one process with such a time of the device alone, or with a reason."""
    record = scaling("full", 512)
    assert record.timing is not None
    return replace(record, timing=replace(record.timing, graph_ms=graph_ms, graph_reason=reason))


def pooled_timing(*records: Record) -> Timing:
    timing = pool_records(records).timing
    assert timing is not None
    return timing


def test_times_of_the_device_alone_are_of_all_processes_that_have_one():
    failed, *others = replayed(None, "a reason"), replayed(1.0), replayed(2.0), replayed(8.0)
    timing = pooled_timing(failed, *others)
    assert timing.graph_by_process_ms == (1.0, 2.0, 8.0)
    assert timing.graph_ms == pytest.approx(16 ** (1 / 3))
    assert timing.graph_reason == ""
    assert pooled_timing(pool_records([failed, *others[:2]]), others[2]) == timing
    assert Timing.from_dict(timing.to_dict()) == timing


def test_a_record_of_before_has_such_a_time_of_one_process():
    before, now = replayed(0.3).timing, pooled_timing(replayed(0.3), replayed(None, "a reason"))
    assert before is not None
    assert (now.graph_ms, now.graph_by_process_ms) == (0.3, (0.3,))
    data = before.to_dict()
    del data["graph_by_process_ms"]
    assert Timing.from_dict(data) == before


def test_what_disturbed_the_replays_of_any_process_is_kept():
    flags = [("throttled",), (), ("throttled", "other_gpu_process")]
    records = [replace(replayed(1.0), timing=replace(pooled_timing(replayed(1.0)), graph_flags=own)) for own in flags]
    timing = pooled_timing(*records)
    assert timing.graph_flags == ("throttled", "other_gpu_process")
    assert timing.flags == ()


def test_the_reason_stays_where_no_process_has_such_a_time():
    timing = pooled_timing(replayed(None, "a reason"), replayed(None, "another"))
    assert (timing.graph_ms, timing.graph_by_process_ms, timing.graph_reason) == (None, (), "a reason")


def test_kernels_that_differ_are_said():
    records = [replace(scaling("full", 512), kernels=kernels, environment="") for kernels in (("a",), ("b",))]
    one = pool_records(records)
    assert one.timing is not None
    assert (one.kernels, one.timing.flags) == (("a", "b"), ("kernels_differ",))


def test_records_of_several_bundles_are_pairs_of_none_of_them():
    """Rounds of one bundle say nothing of those of another, though both variants have as many of them."""
    here, there, elsewhere = (replace(scaling("full", 512), bundle=name) for name in ("a", "b", "c"))
    assert pool_records([here, here]).bundle == "a"
    assert pool_records([here, there]).bundle != pool_records([here, elsewhere]).bundle
    assert pool_records([here, there]).bundle not in {"a", "b"}
    assert not pool_records([replace(here, bundle=""), here]).bundle
