"""The Ray engine on two real nodes: the same records as here, whatever is lost; and a clear word where Ray is not."""

from __future__ import annotations

import builtins
import json
import os
import signal
import socket
import sys
import threading
import types
from pathlib import Path

import psutil
import pytest
import torch

from attn_zoo import api
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.matrix.drive.engines import ray as engine_module
from attn_zoo.matrix.drive.engines.dispatch import Place
from attn_zoo.matrix.drive.engines.ray import RayEngine, _RayCluster
from attn_zoo.matrix.drive.progress import Progress
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.drive.worker_pool import Control, Settings
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import Record
from attn_zoo.training.checkpoint import read_tensors
from tests.matrix.conftest import RAY_VARIABLES, TINY_TRAINING, prepare_process, run_cell, tiny_plan, training_plan
from tests.processes import is_gone, start_process, wait_for

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


TRACKER = """
import json, pathlib

class Run:
    def __init__(self, path):
        self.path = path

    def log(self, values, step):
        with self.path.open("a") as file:
            file.write(json.dumps([step, values]) + "\\n")

    def finish(self):
        pass

def init(project, id, **_):
    return Run(pathlib.Path(project) / id)
"""
"""Stands in for wandb: writes into a folder."""


@pytest.fixture(scope="module")
def tracker(tmp_path_factory):
    """What nodes of the cluster have installed."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "wandb.py").write_text(TRACKER)
    return folder


@pytest.fixture(scope="module")
def cluster(tracker):
    """Two nodes on this machine; nobody without the token may join."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tracker}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        for name, value in RAY_VARIABLES.items():
            patch.setenv(name, value)
        patch.setenv("FAKE_MARK", str(tracker / "go on"))
        patch.delenv("OMP_NUM_THREADS", raising=False)
        # Imported now: it reads these once.
        pytest.importorskip("ray", reason="the ray engine is optional: pip install 'attn-zoo[ray]'")
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args=NODE)
        yield nodes
        nodes.shutdown()


@pytest.fixture
def second(cluster):
    """The node beside the head, new for each test; what waits for it waits again."""
    Path(os.environ["FAKE_MARK"]).unlink(missing_ok=True)
    node = cluster.add_node(**NODE)
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


def workers_of(node) -> list[psutil.Process]:
    """Return the processes that measure on a node."""
    found = []
    for info in node.all_processes["raylet"]:
        try:
            children = psutil.Process(info.process.pid).children(recursive=True)
            found += [child for child in children if "attn_zoo.matrix.cell.worker" in child.cmdline()]
        except psutil.Error:
            continue
    return found


class Killer:
    """Ends a node that measures, with all its processes, as soon as `condition` holds; then who waits goes on."""

    def __init__(self, cluster, node, condition=lambda: True):
        self.left: list[psutil.Process] = []

        def is_time():
            self.left = workers_of(node)
            return self.left and condition()

        def work():
            try:
                wait_for(is_time)
                self.folders = {Path(f"/proc/{worker.pid}/fd/2").readlink().parents[1] for worker in self.left}
                cluster.remove_node(node, allow_graceful=False)
                # They may outlive their node by a moment, in which they would finish and answer.
                wait_for(lambda: all(is_gone(worker) for worker in self.left))
            finally:
                Path(os.environ["FAKE_MARK"]).touch()

        self.thread = threading.Thread(target=work)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join()
        assert self.left, "nothing ran there"
        assert all(is_gone(worker) for worker in self.left)
        wait_for(lambda: not any(folder.exists() for folder in self.folders))


class Lines(Progress):
    def __init__(self):
        self.said: list[str] = []

    def say(self, text):
        self.said.append(text)


def outcomes(store):
    return {(item.cell.key, item.status, item.reason, item.exit_code) for item in store.records()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # from Ray's own threads and sockets
def test_a_node_that_is_lost_in_the_middle_of_a_lane_changes_no_record(tmp_path, cluster, second):
    plan = tiny_plan(["fake_segfault", "fake_waits"], seq_len=[900, 1000, 1100], isolation="lane", timeout_s=600)
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    lines = Lines()
    with Killer(cluster, second):
        summary = run(plan, there, engine=RayEngine(cluster.address), progress=lines)
    assert summary.left == ()
    run(plan, here)
    assert outcomes(there) == outcomes(here)
    records = there.records()
    assert any("lost" in text and "under way" in text for text in lines.said)
    assert all((there.logs / f"{item.cell.key}.log").is_file() for item in records)
    environments = there.info().environments
    assert {item.environment for item in records} == set(environments), "not the driver's"
    for digest in environments:
        assert "OMP_NUM_THREADS" not in environments[digest].variables, "Ray's own, which changes times"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_training_goes_on_elsewhere_when_its_node_is_lost(tmp_path, cluster, second):
    overrides = {**TINY_TRAINING, "num_steps": 40, "eval_every": 3}
    more = {"threads": 1, "timeout_s": 600}  # the first decide rounding
    plan = training_plan(["fake_train_told"], seeds=[0, 1], overrides=overrides, **more)
    there = Store(tmp_path / "there")
    keys = [item.cell.key for item in plan.cells]

    def is_well_under_way():
        return all(steps_of(there, key) >= 12 for key in keys)

    with Killer(cluster, second, is_well_under_way):
        summary = run(plan, there, engine=RayEngine(cluster.address))
    assert summary.left == ()
    (again,) = [item for item in there.records() if item.attempt == 2]
    assert (there.logs / f"{again.cell.key}.log").read_text().count("step") <= 40 - 12, "it did not begin anew"
    whole = run_cell(again.cell)
    assert again.score is not None
    assert whole.score is not None
    assert (again.score.value, again.score.curve) == (whole.score.value, whole.score.curve)
    assert not list(there.checkpoints.glob("*/*")), "they end with their training"


def steps_of(store, key) -> int:
    """Return after which step the driver has a checkpoint."""
    for path in (store.checkpoints / key).glob("[!.]*.safetensors"):
        return int(json.loads(read_tensors(path)[0]["numbers"])["step"])
    return 0


def run_on(address: str, folder: Path) -> int:
    """What a driver does that is killed; its threads make it another environment, in which nothing is measured."""
    prepare_process()
    torch.set_num_threads(torch.get_num_threads() + 1)
    return run(slow_plan(), Store(folder), engine=RayEngine(address)).exit_code


def slow_plan():
    return tiny_plan(["fake_slow"], seq_len=[16, 24, 32, 900, 1000], isolation="lane")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_after_its_driver_was_killed_or_interrupted(tmp_path, cluster):
    store = Store(tmp_path / "run")
    cells = tmp_path / "run" / "cells"
    driver = start_process(run_on, cluster.address, store.folder, errors=tmp_path / "errors")
    wait_for(lambda: list(cells.glob("*.json")))
    left = workers_of(cluster.head_node)
    driver.kill()
    driver.join()
    wait_for(lambda: all(is_gone(worker) for worker in left))
    known = {path.name: path.read_bytes() for path in cells.glob("*.json")}

    class Impatient(Progress):
        def finished(self, record, step="", num_done=1):
            os.kill(os.getpid(), signal.SIGINT)

    summary = run(slow_plan(), store, engine=RayEngine(cluster.address), progress=Impatient())
    assert (summary.stopped, summary.exit_code) == ("interrupted", 130)
    assert 1 <= summary.new <= 2
    assert summary.left
    wait_for(lambda: not workers_of(cluster.head_node))
    summary = run(slow_plan(), store, engine=RayEngine(cluster.address))
    assert summary.left == ()
    found = {path.name: path.read_bytes() for path in cells.glob("*.json")}
    assert {name: found[name] for name in known} == known, "a stored record was changed"
    assert {record.status for record in store.records()} == {"ok"}
    assert {one.environment for one in store.ceilings()} == {record.environment for record in store.records()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_cells_run_again_on_a_cluster_and_its_nodes_send_curves(tmp_path, cluster, tracker, monkeypatch):
    plan, store, sent = training_plan(["fake_train_ok"]), Store(tmp_path / "run"), tmp_path / "sent"
    cell = plan.cells[0].cell
    with store.writing(plan.matrix.model_dump(mode="json"), None, planned=[cell]):
        store.write(Record(cell=cell, status="timeout"))
    sent.mkdir()
    monkeypatch.syspath_prepend(str(tracker))
    done = api.run_again(store.folder, engine="ray", address=cluster.address, track=f"wandb:{sent}", progress=False)
    assert done.summary is not None
    assert (done.summary.new, done.summary.exit_code) == (1, 0)
    (record,) = store.records()
    assert record.score is not None
    curve = [json.loads(line)[0] for line in (sent / cell.key).read_text().splitlines()]
    assert curve == [entry["step"] for entry in record.score.curve]
    assert len(list((store.folder / "replaced").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_timings_have_a_gpu_to_themselves_and_trainings_share_one(cluster, monkeypatch):
    """Of a node that says that it has two GPUs: Ray hands out their numbers, whatever is there."""

    class Agent:
        def __init__(self, *_):
            pass

        def hello(self):
            return {"event": "ready", "devices": os.environ["CUDA_VISIBLE_DEVICES"]}

        def close(self):
            pass

    monkeypatch.setattr(engine_module, "_actor", lambda: Agent)
    node = cluster.add_node(**{**NODE, "num_cpus": 4, "num_gpus": 2})
    engine = RayEngine(cluster.address)
    engine._connect()
    try:
        nodes = _RayCluster(engine._ray, Settings(logs=Path()))
        (machine,) = [each for each in nodes.machines() if each.num_gpus]

        def devices_of(place, count):
            agents = [nodes.start(machine, place) for _ in range(count)]
            devices: dict[object, str] = {}
            while len(devices) < count:
                devices.update((agent, event["devices"]) for agent, event in nodes.events(1))
            for agent in agents:
                nodes.end(agent)
            return sorted(devices.values())

        assert devices_of(Place("cuda", is_timed=True), 2) == ["0", "1"]
        assert devices_of(Place("cuda", is_timed=False, jobs=2), 4) == ["0", "0", "1", "1"]
        assert not nodes.can_grow()
    finally:
        engine._ray.shutdown()
        cluster.remove_node(node)


@pytest.mark.parametrize(("given", "used"), [("", "0"), ("5", "5")], ids=["not said", "said"])
def test_what_ray_starts_does_not_wait_for_others_unless_that_is_said(given, used, monkeypatch):
    pytest.importorskip("ray", reason="the ray engine is optional: pip install 'attn-zoo[ray]'")
    monkeypatch.setenv("RAY_worker_niceness", given)
    if not given:
        monkeypatch.delenv("RAY_worker_niceness")
    RayEngine()
    assert os.environ.get("RAY_worker_niceness") == used  # noqa: SIM112  as Ray spells it


def test_a_cluster_that_wants_a_token_says_so(monkeypatch):
    pytest.importorskip("ray", reason="the ray engine is optional: pip install 'attn-zoo[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        engine = RayEngine(f"127.0.0.1:{server.getsockname()[1]}")

        def init(**_):
            refused = RuntimeError("ray.exceptions.AuthenticationError: Authentication token is missing")
            raise ConnectionError("Failed to connect") from refused

        monkeypatch.setattr(engine._ray, "init", init)
        with pytest.raises(UnsupportedError, match=r"Failed to connect; it wants its token: set RAY_AUTH_MODE=token"):
            engine.run([(slow_plan().cells, [])], Settings(logs=Path()), Control())


def test_an_address_that_does_not_answer_is_said_soon(tmp_path):
    pytest.importorskip("ray", reason="the ray engine is optional: pip install 'attn-zoo[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        silent = start_process(silent_address, address, errors=tmp_path / "silent")
        silent.join(60)
        assert "did not answer within 4 s: is it a Ray cluster" in (tmp_path / "silent").read_text()
    with pytest.raises(UnsupportedError, match=f"nothing answers at {address}"):
        RayEngine(address)  # before anything is written
    with pytest.raises(ConfigError, match="expected HOST:PORT of a head node"):
        RayEngine("ray://somewhere:10001")


def silent_address(address: str) -> None:
    prepare_process()
    engine_module.CONNECT_S = 4
    try:
        RayEngine(address).run([(slow_plan().cells, [])], Settings(logs=Path()), Control())
    except UnsupportedError as error:
        os.write(2, error.reason.encode())
        os._exit(1)  # Ray's thread is still trying


def test_without_ray_the_message_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *arguments, **keywords):
        if name == "ray":
            raise ModuleNotFoundError(name, name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(UnsupportedError, match=r"pip install 'attn-zoo\[ray\]'"):
        RayEngine()


def test_a_ray_that_is_half_broken_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    with pytest.raises(UnsupportedError, match=r"Ray is installed but cannot be loaded.*no attribute 'init'"):
        RayEngine()
