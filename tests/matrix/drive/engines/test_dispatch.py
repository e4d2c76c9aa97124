"""How a plan is shared out: the real dispatcher over simulated machines, in simulated time."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from attn_zoo.errors import UnsupportedError
from attn_zoo.matrix.drive.engines.dispatch import Dispatcher, Machine, Place
from attn_zoo.matrix.drive.progress import PlainProgress
from attn_zoo.matrix.drive.run_plan import lanes_of, run
from attn_zoo.matrix.drive.worker_pool import Control, Settings
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from benchmarks.simulate_cluster import ENVIRONMENT, SimulatedCluster, many_cells, some_timing
from tests.matrix.conftest import tiny_plan, training_plan

OTHER = replace(ENVIRONMENT, cpu="another")


class Driver(Control):
    """Takes notes; ends the run when it is told to."""

    def __init__(self):
        self.records: list[Record] = []
        self.said: list[str] = []
        self.over_after = self.stop_after = 10**9

    def is_over(self):
        return len(self.records) >= self.over_after

    def should_stop(self):
        return len(self.records) >= self.stop_after

    def finished(self, record):
        self.records.append(record)

    def say(self, text):
        self.said.append(text)


def machines(count: int, num_cpus: float = 8.0, num_gpus: float = 0.0) -> list[Machine]:
    return [Machine(str(number), f"machine {number}", num_cpus, num_gpus) for number in range(count)]


def dispatch(cells, cluster, driver=None, prior=None, **options):
    driver = driver or Driver()
    lanes = lanes_of(cells, prior)
    settings = Settings(logs=Path())
    Dispatcher(cluster, lanes, settings, driver, clock=lambda: cluster.now, **options).run()
    return driver


def keys(records):
    return sorted(record.cell.key for record in records)


def on_gpu(plan):
    return [replace(item, cell=replace(item.cell, device="cuda"), refusal=None) for item in plan.cells]


def test_every_cell_runs_once_and_all_machines_work_to_the_end():
    cells = many_cells(600)
    cluster = SimulatedCluster(machines(10, num_gpus=1))
    driver = dispatch(cells, cluster)
    assert keys(driver.records) == sorted(item.cell.key for item in cells)
    assert len(cluster.began) == len(cells)
    assert cluster.busy_s / cluster.now > 8.5, "of ten machines"


def test_lengths_of_a_lane_run_on_several_machines_where_these_would_be_idle():
    plan = tiny_plan(["fake_ok"], seq_len=[512, 1024, 2048, 4096], isolation="lane")
    cluster = SimulatedCluster(machines(4))
    dispatch(plan.cells, cluster)
    assert len({machine for *_, machine, _ in cluster.began}) == 4


def test_with_lanes_enough_a_longer_sequence_waits_for_the_shorter_ones():
    plan = tiny_plan(["fake_ok", "fake_bug", "fake_slow"], seq_len=[64, 128, 256, 512], isolation="cell")
    cluster = SimulatedCluster(machines(2))
    dispatch(plan.cells, cluster)
    length = {item.cell.key: (item.cell.curve, item.cell.seq_len or 0) for item in plan.cells}
    begun: dict[str, list[int]] = defaultdict(list)
    for key, *_ in cluster.began[:6]:  # towards the end somebody would be idle
        curve, seq_len = length[key]
        begun[curve].append(seq_len)
    assert all(lengths == sorted(lengths) for lengths in begun.values())


def test_what_a_shorter_length_shows_to_be_hopeless_is_passed_on():
    plan = tiny_plan(["fake_ok"], seq_len=[16, 64, 256])
    short = plan.cells[0].cell
    record = Record(cell=short, status="oom_host", reason="planted", environment=ENVIRONMENT.digest)
    turns = []

    class Watched(SimulatedCluster):
        def give(self, agent, turn):
            turns.append(turn)
            super().give(agent, turn)

    dispatch(plan.cells[1:], Watched(machines(1)), prior={short.key: record})
    assert turns
    assert all([data["status"] for data in turn["prior"]] == ["oom_host"] for turn in turns)


def test_one_timing_on_a_gpu_and_none_beside_one_on_the_processors():
    node = Machine("0", "node", 32.0, 8.0)
    gpu, cpu = Place("cuda", is_timed=True), Place("cpu", is_timed=True)
    assert (gpu.room(node), gpu.share(node)) == (8, (4.0, 1.0))
    assert (cpu.room(node), cpu.share(node)) == (1, (32.0, 0.0))
    half = Place("cuda", is_timed=False, jobs=2)
    assert (half.room(node), half.share(node)) == (16, (2.0, 0.5))
    several = Place("cuda", is_timed=False, num_devices=3)
    assert (several.room(node), several.share(node)) == (2, (16.0, 3.0))
    few = Place("cpu", is_timed=False, jobs=64)
    assert few.share(node) == (0.5, 0.0)
    plain = tiny_plan(["fake_ok"], seq_len=[16, 64])
    mixed = [*plain.cells, *on_gpu(plain)]
    cluster = SimulatedCluster([node])
    dispatch(mixed, cluster)
    spans = sorted((at, key) for key, _, _, at in cluster.began)
    on_cpu = {item.cell.key for item in plain.cells}
    groups = [key in on_cpu for _, key in spans]
    assert sum(a != b for a, b in pairwise(groups)) == 1, "first the ones, then the others"


def test_so_many_trainings_share_a_gpu():
    cells = on_gpu(training_plan(["fake_train_ok"], seeds=list(range(12))))
    for jobs, at_once in ((1, 2), (3, 6)):
        cluster = SimulatedCluster(machines(1, num_gpus=2))
        driver = dispatch(cells, cluster, jobs=jobs)
        assert Counter(at for *_, at in cluster.began).most_common(1)[0][1] == at_once
        assert {record.num_jobs for record in driver.records} == {jobs}


def test_a_training_on_several_gpus_has_them_to_itself_on_one_machine():
    cells = on_gpu(training_plan(["fake_train_ok"], seeds=list(range(4)), data_parallel=2))
    cluster = SimulatedCluster(machines(2, num_gpus=3))
    driver = dispatch(cells, cluster, jobs=3)
    assert Counter(at for *_, at in cluster.began).most_common(1)[0][1] == 2, "one on each machine"
    assert {record.num_jobs for record in driver.records} == {1}
    few = SimulatedCluster(machines(2, num_gpus=1))
    with pytest.raises(UnsupportedError, match="no node with 2 GPUs came within"):
        dispatch(cells, few, Driver(), patience_s=100)
    assert few.wishes[0][0] == (1.0, 2.0)


def test_timings_go_to_the_machines_that_are_offered_for_them():
    offered = [machines(1)[0], replace(machines(2)[1], may_time=False)]
    cluster = SimulatedCluster(offered)
    dispatch(tiny_plan(["fake_ok", "fake_bug"], seq_len=[16, 64, 128]).cells, cluster)
    assert {machine for *_, machine, _ in cluster.began} == {"0"}


def test_a_lost_machine_loses_only_what_was_under_way():
    cells = many_cells(300)
    cluster = SimulatedCluster(machines(4, num_gpus=1), losses=[(60.0, "1"), (90.0, "2")])
    driver = dispatch(cells, cluster)
    assert keys(driver.records) == sorted(item.cell.key for item in cells)
    twice = [key for (key, _), count in Counter((key, r) for key, r, *_ in cluster.began).items() if count > 1]
    assert 1 <= len(twice) <= 2
    attempts = {record.cell.key: record.attempt for record in driver.records}
    assert {attempts[key] for key in twice} == {2}
    assert sum(attempts.values()) == len(cells) + len(twice)
    assert [text.split(":")[0] for text in driver.said] == [f"lost machine {n} with 1 cell under way" for n in (1, 2)]


class Treacherous(SimulatedCluster):
    """Whoever begins one of the cells is lost."""

    fatal: frozenset[str] = frozenset()
    was_memory = False

    def _note(self, agent, event):
        super()._note(agent, event)
        if event["event"] == "started" and event["key"] in self.fatal:
            self._events = [other for other in self._events if other[2] != agent]
            self._say(agent, self.now + 1, {"event": "lost", "reason": "planted", "was_memory": self.was_memory})


@pytest.mark.parametrize("was_memory", [False, True])
def test_a_cell_that_is_lost_twice_is_left_for_another_run_but_where_memory_was_the_reason(was_memory):
    plan = tiny_plan(["fake_ok"], seq_len=[16, 32, 64])
    middle = plan.cells[1].cell.key
    cluster = Treacherous(machines(1))
    cluster.fatal, cluster.was_memory = frozenset([middle]), was_memory
    driver = dispatch(plan.cells, cluster)
    assert sum(key == middle for key, *_ in cluster.began) == 2
    status = {record.cell.seq_len: record.status for record in driver.records}
    assert status == {16: "ok", 64: "ok", **({32: "oom_host"} if was_memory else {})}
    last = "lost 2 times with their machine, and without a record: 1 cell; the same command runs them again"
    assert (driver.said[-1] == last) == (not was_memory)


def test_ceilings_are_measured_once_and_by_another_where_who_measures_is_lost():
    told = []

    class Watched(Treacherous):
        def give(self, agent, turn):
            told.append([tuple(subject) for subject in turn["ceilings"]])
            super().give(agent, turn)

    plan = tiny_plan(["fake_ok"], seq_len=[16, 64], threads=2)
    subject = (ENVIRONMENT.digest, "cpu", "float32", 2)
    cluster = Watched(machines(2))
    dispatch(plan.cells, cluster)
    assert told == [[], [subject]]
    told.clear()
    cluster = Watched(machines(1))
    cluster.fatal = frozenset([plan.cells[0].cell.key])
    dispatch(plan.cells, cluster)
    assert told[:2] == [[], []]


def test_interrupted_nothing_new_begins_and_what_runs_ends():
    cells = many_cells(600)
    driver = Driver()
    driver.over_after = 20
    cluster = SimulatedCluster(machines(4, num_gpus=1))
    dispatch(cells, cluster, driver)
    assert 20 <= len(driver.records) <= 24
    assert len(cluster.began) <= len(driver.records) + 4
    driver = Driver()
    driver.stop_after = 20
    dispatch(cells, SimulatedCluster(machines(4, num_gpus=1)), driver)
    assert 20 <= len(driver.records) <= 24


def test_all_repeats_of_a_lane_are_measured_in_one_environment():
    plan = tiny_plan(["fake_ok", "fake_bug"], seq_len=[16, 256], head_dim=[8, 16, 32, 64], repeats=3)
    cluster = SimulatedCluster(machines(4), {"2": OTHER, "3": OTHER})
    driver = dispatch(plan.cells, cluster)
    assert len(driver.records) == 48
    used = defaultdict(set)
    for record in driver.records:
        used[record.cell.curve].add(record.environment)
    assert all(len(environments) == 1 for environments in used.values())
    assert len(set().union(*used.values())) == 2, "both work"


def test_a_repeat_that_is_begun_before_the_first_is_there_is_measured_in_full():
    plan = tiny_plan(["fake_ok"], seq_len=[16], repeats=3)
    told: list[tuple[float, int]] = []

    class Watched(SimulatedCluster):
        def give(self, agent, turn):
            told.extend((self.now, item["repeat"]) for lane in turn["lanes"] for item in lane)
            super().give(agent, turn)

    assert len(dispatch(plan.cells, Watched(machines(3))).records) == 3
    assert [repeat for _, repeat in told] == [0, 0, 0]
    assert len({at for at, _ in told}) == 1, "all at once"
    told.clear()
    assert len(dispatch(plan.cells, Watched(machines(1))).records) == 3
    assert [repeat for _, repeat in told] == [0, 1, 2]


def test_of_what_is_timed_in_turns_only_those_without_a_result_are_repeated():
    plan = tiny_plan(["fake_bug", "fake_ok"], seq_len=[16, 64], repeats=2, isolation="interleaved")
    bad = {item.cell.key for item in plan.cells if item.cell.variant == "fake_bug"}

    class Failed(Driver):
        def is_wanted(self, item):
            return item.cell.key not in bad or not self.records

    cluster = SimulatedCluster(machines(1))
    driver = dispatch(plan.cells, cluster, Failed())
    assert Counter((item.cell.variant, item.cell.seq_len) for item in driver.records) == Counter(
        {("fake_bug", 16): 1, ("fake_bug", 64): 1, ("fake_ok", 16): 2, ("fake_ok", 64): 2}
    )
    assert [repeat for _, repeat, *_ in cluster.began] == [0, 0, 0, 0, 1, 1]


def test_a_lane_goes_on_where_it_was_begun_and_elsewhere_only_if_such_machines_are_gone():
    plan = tiny_plan(["fake_ok"], seq_len=[16, 64])
    first = plan.cells[0].cell
    prior = {first.key: Record(cell=first, status="ok", environment=OTHER.digest)}
    driver = dispatch(plan.cells[1:], SimulatedCluster(machines(3), {"2": OTHER}), prior=prior)
    assert [record.environment for record in driver.records] == [OTHER.digest]
    driver = dispatch(plan.cells[1:], SimulatedCluster(machines(3)), prior=prior)
    assert [record.environment for record in driver.records] == [ENVIRONMENT.digest]


class OnCluster:
    """The dispatcher as an engine of a run."""

    is_remote, jobs = True, 1

    def __init__(self, cluster):
        self.cluster = cluster

    def run(self, lanes, settings, control):
        Dispatcher(self.cluster, lanes, settings, control, clock=lambda: self.cluster.now).run()


@pytest.mark.parametrize("is_gone", [False, True])
def test_repeats_are_taken_up_again_where_such_a_machine_is_left(tmp_path, is_gone):
    plan = tiny_plan(["fake_ok"], seq_len=[16], repeats=3)
    cell, store = plan.cells[0].cell, Store(tmp_path / "run")
    with store.writing({"name": "test"}, ENVIRONMENT):
        store.repeats.write(Record(cell=cell, status="ok", environment=OTHER.digest, timing=some_timing(1.0)), 1)
    here = {} if is_gone else {"0": OTHER, "1": OTHER}
    engine = OnCluster(SimulatedCluster(machines(2), here))
    progress = PlainProgress(StringIO())
    summary = run(plan, store, engine=engine, allow_mixed_env=True, progress=progress)
    assert (progress.done, progress.total) == (2 if is_gone else 3, 3)
    if is_gone:  # what was begun elsewhere does not count; the next run has all that is needed
        assert (len(summary.left), summary.num_repeats, summary.exit_code) == (1, 2, 1)
        summary = run(plan, store, engine=OnCluster(SimulatedCluster(machines(2))), allow_mixed_env=True)
    (record,) = store.records()
    assert record.timing is not None
    assert len(record.timing.process_sizes) == 3
    assert record.environment == (ENVIRONMENT if is_gone else OTHER).digest
    assert summary.exit_code == 0


def test_without_a_machine_for_it_a_cell_is_given_up_in_words():
    cells = on_gpu(tiny_plan(["fake_ok"], seq_len=[16]))
    cluster, driver = SimulatedCluster(machines(2)), Driver()
    with pytest.raises(UnsupportedError, match="no node with a GPU came within 100 s"):
        dispatch(cells, cluster, driver, patience_s=100)
    assert 100 < cluster.now < 130
    assert driver.said == ["waiting for a node with a GPU: there is none; 100 s at most"]
    assert cluster.wishes == [[(1.0, 1.0)], []], "asked for, and not for ever"


class Growing(SimulatedCluster):
    """Has a machine with two GPUs an hour after it was asked."""

    def can_grow(self):
        return True

    def machines(self):
        if self.wishes and self.now > 3600:
            self._all.setdefault("new", Machine("new", "new", 8.0, 2.0))
        return super().machines()


def test_a_cluster_that_grows_by_itself_is_waited_for():
    plan = tiny_plan(["fake_ok"], seq_len=[16, 64])
    cluster, driver = Growing(machines(1)), Driver()
    dispatch([*plan.cells, *on_gpu(plan)], cluster, driver, patience_s=100)
    assert len(driver.records) == 4
    assert driver.said == ["waiting for a node with a GPU: the cluster was asked to grow"]
    assert cluster.wishes[-1] == []


def test_machines_that_cannot_be_used_are_left_out_in_words():
    class Foreign(SimulatedCluster):
        def _say(self, agent, at, event):
            if event["event"] == "ready" and self._agents[agent][0].id in foreign:
                event = {"event": "ready", "problem": "other sources"}
            super()._say(agent, at, event)

    cells, foreign = tiny_plan(["fake_ok"], seq_len=[16, 64]).cells, {"0"}
    driver = dispatch(cells, Foreign(machines(2)))
    assert len(driver.records) == 2
    assert driver.said == ["machine 0 is left out: other sources"]
    foreign = {"0", "1"}
    with pytest.raises(UnsupportedError, match="machine 0: other sources; machine 1: other sources"):
        dispatch(cells, Foreign(machines(2)))


def test_a_folder_takes_no_records_of_another_environment_unless_asked(tmp_path):
    plan, store = tiny_plan(["fake_ok"], seq_len=[16, 64]), Store(tmp_path / "run")
    with store.writing({"name": "test"}, OTHER):
        pass
    there = {"0": OTHER}
    summary = run(plan, store, engine=OnCluster(SimulatedCluster(machines(3), there)))
    assert {record.environment for record in store.records()} == set(store.info().environments) == {OTHER.digest}
    assert (summary.new, summary.exit_code) == (2, 0)
    longer = tiny_plan(["fake_ok"], seq_len=[16, 64, 256])
    with pytest.raises(UnsupportedError, match=r"measured in another environment \(cpu: then another, now .*mixed-env"):
        run(longer, store, engine=OnCluster(SimulatedCluster(machines(1))))
    run(longer, store, engine=OnCluster(SimulatedCluster(machines(1))), allow_mixed_env=True)
    assert set(store.info().environments) == {OTHER.digest, ENVIRONMENT.digest}


def test_an_answer_that_is_none_costs_the_machine_its_agent_not_the_run():
    plan = tiny_plan(["fake_ok"], seq_len=[16, 64])

    class Garbled(SimulatedCluster):
        garbled = 0

        def _say(self, agent, at, event):
            if event["event"] == "record" and self.garbled < 1:
                self.garbled += 1
                event = {**event, "record": {"cell": 3}}
            super()._say(agent, at, event)

    driver = dispatch(plan.cells, Garbled(machines(1)))
    assert keys(driver.records) == sorted(item.cell.key for item in plan.cells)
    assert "lost machine 0" in driver.said[0]


def test_what_is_under_way_does_not_grow_with_the_plan():
    held = []
    for count in (216, 1080):
        cluster = SimulatedCluster(machines(4, num_gpus=1))
        most = 0

        class Watching(Driver):
            def should_stop(self, cluster=cluster):
                nonlocal most
                most = max(most, len(cluster._events))
                return False

        dispatch(many_cells(count), cluster, Watching())
        held.append(most)
    assert held[1] < 1.5 * held[0]
