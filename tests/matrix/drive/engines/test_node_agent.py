"""What runs on a node of a cluster, here in this process: sources and checkpoints that travel, and what is said."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from attn_zoo.matrix.drive.engines.node_agent import NodeAgent, package_digest
from attn_zoo.matrix.drive.engines.ray import _sources
from attn_zoo.records import Record
from tests.matrix.conftest import TRAINING_FILE, VARIANT_FILE, tiny_plan, training_plan
from tests.processes import start_process, wait_for


def turn_of(*lanes, **fields):
    return {"lanes": [[item.to_dict() for item in lane] for lane in lanes], "prior": [], "ceilings": [], **fields}


def wait_on_a_node(note: Path) -> None:
    """What an agent does that is killed."""
    agent = NodeAgent({"mine.py": b""}, ["mine.py"], None, 1, package_digest())
    whole = note.with_suffix(".new")
    whole.write_text(str(agent._settings.logs.parent))
    whole.rename(note)
    time.sleep(600)


def test_a_killed_agent_leaves_nothing_on_its_node(tmp_path):
    process = start_process(wait_on_a_node, note := tmp_path / "note", errors=tmp_path / "errors")
    wait_for(note.exists)
    folder = Path(note.read_text())
    assert (folder / "sources" / "mine.py").exists()
    process.kill()
    process.join()
    wait_for(lambda: not folder.exists())


@pytest.fixture
def agent_with():
    """Start agents, and close them."""
    agents = []

    def start(*files, package=None):
        texts, loaded = _sources(files)
        agents.append(NodeAgent(texts, loaded, None, 1, package or package_digest()))
        return agents[-1]

    yield start
    for agent in agents:
        folder = agent._settings.logs.parent
        agent.close()
        assert not folder.exists()


def test_files_of_one_name_and_what_lies_beside_them_travel(tmp_path, agent_with):
    for folder, text in (("a", "import beside"), ("b", "VALUE = 2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
    (tmp_path / "a" / "beside.py").write_text("VALUE = 1")
    agent = agent_with(tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py")
    first, second = map(Path, agent._settings.variant_files)
    assert (first.name, second.name) == ("mine.py", "mine.py")
    assert (first.read_text(), second.read_text()) == ("import beside", "VALUE = 2")
    assert (first.parent / "beside.py").read_text() == "VALUE = 1"


def test_a_node_with_other_sources_says_so(agent_with):
    answer = agent_with(package="of another version").hello()
    assert answer["problem"].startswith("it has other sources of attn-zoo (version ")


def test_every_record_is_said_as_its_cell_ends(agent_with):
    agent = agent_with(VARIANT_FILE, TRAINING_FILE)
    ready = agent.hello()
    assert ready["problem"] == ""
    cells = tiny_plan(["fake_bug"], seq_len=[16, 1024], isolation="lane").cells
    known = [("", "cpu", "float32", 1)]
    events = list(agent.work({**turn_of(cells), "ceilings": known, "checkpoints": {}}))
    assert [event["event"] for event in events] == ["started", "record", "started", "record", "done"]
    records = [Record.from_dict(event["record"]) for event in events if event["event"] == "record"]
    assert [record.status for record in records] == ["ok", "error"]
    repeat = replace(cells[1], repeat=1, repeats=3)
    prior = [replace(records[0], status="timeout").to_dict()]
    events = list(agent.work({**turn_of([repeat]), "prior": prior, "ceilings": known, "checkpoints": {}}))
    assert [event.get("repeat") for event in events] == [1, 1, None], "started, its record, done"
    assert events[1]["record"]["status"] == "timeout"
    training = training_plan(["fake_train_ok"], keep_weights=True).cells
    events = list(agent.work({**turn_of(training), "checkpoints": {}}))
    names = [event["event"] for event in events]
    assert names[0] == "started"
    assert names[-2:] == ["record", "done"]
    ends = [event["content"] for event in events if event["event"] == "checkpoint"]
    assert ends[-1:] in ([], [None]), "gone with its training"
    (record,) = [event for event in events if event["event"] == "record"]
    assert list(record["weights"]) == [f"{training[0].cell.key}.safetensors"]
    assert b"threads" in record["log"]
    agent.stop()
    assert [event["event"] for event in agent.work({**turn_of(training), "checkpoints": {}})] == ["done"]
