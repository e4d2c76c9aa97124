"""The results folder: whole files or none, foreign things set aside or refused, one writer at a time."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attn_zoo.errors import FolderError, StoreError
from attn_zoo.folder import Scan, cell_files, record_text
from attn_zoo.matrix.store.store import Store
from attn_zoo.records import SCHEMA_VERSION, Cell, Record
from attn_zoo.whole_files import write_whole
from tests.matrix.conftest import environment

MATRIX = {"name": "test"}


def record(seq_len: int = 16, **changes) -> Record:
    cell = Cell(kind="scaling", variant="full", pass_="fwd", seq_len=seq_len)
    return replace(Record(cell=cell, status="ok"), **changes)


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / "run")
    with store.writing(MATRIX, environment()):
        store.write(record(16))
        store.write(record(32))
    return store


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_is_written_is_read_again(store):
    assert sorted(item.cell.seq_len for item in store.records()) == [16, 32]
    info = store.info()
    assert info.matrices == (MATRIX,)
    assert list(info.environments) == [environment().digest]
    assert info.schema == SCHEMA_VERSION
    assert not list(store.folder.rglob("*.tmp"))


def test_names_of_any_length_and_letters_are_no_names_of_files(store):
    cells = [
        Cell(kind="scaling", variant="full", label="\U0001f600" * 5000),
        Cell(kind="scaling", variant="full", label="../../etc/passwd\0\n"),
        *(Cell(kind="scaling", variant="full", label=label, options={"x": "y" * 10_000}) for label in ("a", "A")),
    ]
    with store.writing(MATRIX, environment(), planned=cells):
        for cell in cells:
            store.write(Record(cell=cell, status="ok"))
    assert [one.cell for one in store.records() if one.cell.label] == sorted(cells, key=lambda cell: cell.key)
    names = [path.stem for path in (store.folder / "cells").iterdir()]
    assert all(len(name) == 20 and name.isalnum() and name.islower() for name in names if not name.isdecimal())
    assert len({name.casefold() for name in names}) == len(names) == 6


def test_making_the_object_and_looking_at_nothing_writes_nothing(tmp_path):
    store = Store(tmp_path / "absent")
    store.check()
    assert store.records() == []
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FolderError, match="not a results folder"):
        store.info()


def test_nothing_is_overwritten_and_retry_keeps_the_old_record(store):
    with pytest.raises(StoreError, match="nothing is overwritten"):
        store.write(record(16, status="error"))
    key = record(16).cell.key
    for number in (1, 2):
        before = (store.folder / "cells" / f"{key}.json").read_bytes()
        store.mark_again(["ok"], [record(16).cell], [key])
        store.write(record(16, duration_s=number))
        assert (store.folder / "replaced" / f"{key}-{number}.json").read_bytes() == before
        assert store.marked_again() == set()


def test_a_record_stays_until_the_next_one_is_written(store, monkeypatch):
    (first, key), before = ((one := record(16)), one.cell.key), snapshot(store.folder)
    store.mark_again(["ok"], [first.cell], [key])
    monkeypatch.setattr("attn_zoo.whole_files._sync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(StoreError, match="cannot be written"):
        store.write(first)
    assert before.items() <= snapshot(store.folder).items()
    assert store.marked_again() == {key}


def test_marks_of_sources_that_changed_since_hold_up_no_other_run(store):
    old, today = (replace(record(16).cell, variant_digest=digest) for digest in ("old", "new"))
    store.mark_again(["ok"], [old], [old.key])
    store.mark_again(["ok"], [today], [today.key])
    assert store.marked_again() == {today.key}


def test_foreign_folders_and_files_are_refused_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    before = snapshot(tmp_path)
    with pytest.raises(FolderError, match=r"not a results folder: it has no run.json but holds thesis.tex") as caught:
        Store(tmp_path).writing(MATRIX, environment()).__enter__()
    assert caught.value.exit_code == 2
    with pytest.raises(FolderError, match="there is a file of this name"):
        Store(tmp_path / "thesis.tex").writing(MATRIX, environment()).__enter__()
    with pytest.raises(FolderError, match="cannot be written: Not a directory"):
        Store(tmp_path / "thesis.tex" / "run").writing(MATRIX, environment()).__enter__()
    assert snapshot(tmp_path) == before


def test_a_read_only_disk_is_named(tmp_path, monkeypatch):
    def refuse(self, mode=0o777, parents=False, exist_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(FolderError, match="run: cannot be written: Read-only file system") as caught:
        Store(tmp_path / "run").writing(MATRIX, environment()).__enter__()
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(FolderError, match="cannot be written: Permission denied"):
        Store(tmp_path / "run").writing(MATRIX, environment()).__enter__()


@pytest.mark.parametrize("place", ["cells", "parts"])
def test_a_place_lost_in_the_middle_of_a_run_is_no_mistake_in_the_call(tmp_path, place):
    store = Store(tmp_path / "run")
    expected = pytest.raises(StoreError, match=f"{place}/.*: cannot be written")
    with expected as caught, store.writing(MATRIX, environment()):
        if place == "cells":
            (store.folder / place).rmdir()
        (store.folder / place).write_text("in the way")
        if place == "cells":
            store.write(record())
        else:
            store.repeats.write(record(), 1)
    assert caught.value.exit_code == 4


def test_a_full_disk_is_named_and_leaves_nothing_half_written(store):
    code = f"""
        import resource
        from attn_zoo.errors import StoreError
        from attn_zoo.whole_files import write_whole
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            write_whole(Path({str(store.folder)!r}) / "cells" / "big.json", "x" * 5000)
        except StoreError as error:
            print(error)
    """
    before = snapshot(store.folder)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("big.json: cannot be written: File too large")
    assert snapshot(store.folder) == before


def test_a_disk_that_is_full_at_the_start_is_named_and_the_same_call_goes_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(tmp_path / "run")
    for where, named in (("matrix.store.lock.os.pwrite", r"\.lock"), ("whole_files._sync", r"run\.json")):
        with monkeypatch.context() as patch:
            patch.setattr(f"attn_zoo.{where}", refuse)
            expected = pytest.raises(StoreError, match=f"{named}: cannot be written: No space left on device")
            with expected as caught, store.writing(MATRIX, environment()):
                pass
        assert caught.value.exit_code == 4
    (store.folder / ".run.json-killed.tmp").touch()
    (store.folder / "logs" / "mine.log").touch()
    with pytest.raises(FolderError, match="holds logs; choose another folder"):
        store.check()
    (store.folder / "logs" / "mine.log").unlink()
    with store.writing(MATRIX, environment()):
        store.write(record(16))


def test_left_overs_of_a_killed_write_are_removed_by_the_next_run(store):
    left_overs = [
        store.folder / name for name in ("cells/.abc.json-123.tmp", ".run.json-1.tmp", ".ceilings.json-2.tmp")
    ]
    for path in left_overs:
        path.write_text("{")
    assert len(store.records()) == 2
    with store.writing(MATRIX, environment()) as scan:
        assert scan.problems == {}
    assert not any(path.exists() for path in left_overs)


@pytest.mark.parametrize("name", ["cells", "logs", "quarantine", "parts", "replaced", "checkpoints", "checkpoints/key"])
def test_nothing_is_written_through_a_link(name, tmp_path):
    outside, store = tmp_path / "outside", Store(tmp_path / "run")
    outside.mkdir()
    with store.writing(MATRIX, environment()):
        pass
    link = store.folder / name
    if link.is_dir():
        link.rmdir()
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(FolderError, match=rf"{name}: is a symbolic link"):
        store.writing(MATRIX, environment()).__enter__()
    assert list(outside.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_written(store, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (store.folder / ".lock").unlink()
    (store.folder / ".lock").symlink_to(precious)
    with pytest.raises(FolderError, match=r"\.lock: cannot be written"):
        store.writing(MATRIX, environment()).__enter__()
    assert precious.read_text() == "mine"


def test_a_results_folder_may_itself_be_a_link(store, tmp_path):
    (tmp_path / "link").symlink_to(store.folder)
    with Store(tmp_path / "link").writing(MATRIX, environment()) as scan:
        assert len(scan.records) == 2


def test_shards_of_unlike_counts_do_not_run_at_once(store):
    first, second = (store.writing(MATRIX, environment(), shard=(index, 2)) for index in (1, 2))
    refusal = pytest.raises(FolderError, match="shards of 2 are running here, and of 3 would measure some")
    with first, second, refusal:
        store.writing(MATRIX, environment(), shard=(3, 3)).__enter__()
    with store.writing(MATRIX, environment(), shard=(3, 3)):
        pass


def spoil_truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def spoil_empty(path):
    path.write_bytes(b"")


def spoil_nul(path):
    path.write_bytes(b"\0" * 500)


def spoil_list(path):
    path.write_text("[1, 2]")


def spoil_field(path):
    data = json.loads(path.read_text())
    data["surprise"] = 1
    path.write_text(json.dumps(data))


def spoil_nan(path):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "duration_s": float("nan")}))


def spoil_cell(path):
    data = json.loads(path.read_text())
    data["cell"]["seq_len"] = 99
    path.write_text(json.dumps(data))


def spoil_name(path):
    path.rename(path.with_name("notes.txt"))


@pytest.mark.parametrize(
    "spoil",
    [spoil_truncate, spoil_empty, spoil_nul, spoil_list, spoil_field, spoil_nan, spoil_cell, spoil_name],
    ids=lambda spoil: spoil.__name__,
)
def test_what_is_no_record_goes_to_quarantine_with_its_reason(spoil, store):
    path = store.folder / "cells" / f"{record(16).cell.key}.json"
    spoil(path)
    assert [item.cell.seq_len for item in store.records()] == [32], "reading alone moves nothing and still works"
    with store.writing(MATRIX, environment()) as scan:
        assert len(scan.problems) == 1
        assert [item.cell.seq_len for item in scan.records.values()] == [32]
    reasons = list((store.folder / "quarantine").glob("*.reason"))
    assert len(reasons) == 1
    assert len(reasons[0].read_text()) > 10
    assert reasons[0].with_suffix("").is_file()
    assert not path.exists()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_record_makes_reading_fail_or_lie(data, store):
    path = store.folder / "cells" / f"{record(16).cell.key}.json"
    good = record_text(record(16)).encode()
    position = data.draw(st.integers(0, len(good) - 1))
    path.write_bytes(good[:position] + bytes([data.draw(st.integers(0, 255))]) + good[position + 1 :])
    try:
        found = store.scan().records.get(record(16).cell.key)
    except FolderError as error:
        found, message = None, str(error)
    else:
        message = "newer"
    assert "newer" in message, "only a byte of the schema may do that"
    assert found is None or found == record(16)


def test_newer_schemas_are_refused_with_advice(store):
    path = store.folder / "cells" / f"{record(16).cell.key}.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema": SCHEMA_VERSION + 1, "invention": True}))
    with pytest.raises(StoreError, match=r"written by a newer attn_zoo .* update attn_zoo"):
        store.scan()
    assert path.exists()
    info = store.folder / "run.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "schema": 99}))
    with pytest.raises(StoreError, match="schema 99"):
        store.check()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": "1"}', '{"schema":1,"environments":3}']
)
def test_a_damaged_run_json_is_named(text, store):
    (store.folder / "run.json").write_text(text)
    with pytest.raises(FolderError, match=r"run\.json: "):
        store.writing(MATRIX, environment()).__enter__()


@pytest.mark.parametrize("spoil", [{"environments": 1}, {"environments": {"0": 1}}, {"planned": [1]}])
def test_a_folder_whose_run_json_is_damaged_goes_on_beside_a_new_one(spoil, store, tmp_path):
    store.repeats.write(record(64), 1)
    path = store.folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **spoil}))
    with pytest.raises(FolderError, match="run the same matrix into a new folder with --time-limit 0") as caught:
        store.info()
    assert "skipped" not in str(caught.value)
    new = Store(tmp_path / "new")
    with new.writing(MATRIX, environment()):
        pass
    path.unlink()
    shutil.copytree(store.folder, new.folder, dirs_exist_ok=True)
    with new.writing(MATRIX, environment()) as scan:
        assert (len(scan.records), scan.problems, new.repeats.count()) == (2, {}, {record(64).cell.key: 1})


def test_environments_do_not_mix_unless_asked(store):
    other = environment(threads=1, versions={"torch": "2.14.0"})
    with pytest.raises(FolderError, match=r"threads: then 2, now 1; versions.torch: then 2.13.0, now 2.14.0"):
        store.writing(MATRIX, other).__enter__()
    assert list(store.info().environments) == [environment().digest]
    with store.writing(MATRIX, other, allow_mixed_env=True):
        pass
    assert set(store.info().environments) == {environment().digest, other.digest}
    with store.writing(MATRIX, environment(commit="abc", is_dirty=True)):
        pass  # another commit is not another environment: sources are in the keys


def test_commits_of_earlier_results_are_not_forgotten(store):
    for commit, is_dirty in (("abc", True), ("def", False), ("def", False), ("abc", False)):
        with store.writing(MATRIX, environment(commit=commit, is_dirty=is_dirty)):
            pass
    (found,) = store.info().environments.values()
    assert (*found.earlier_commits, found.commit) == ("def", "abc")
    assert found.is_dirty, "some of it was measured with changes that are in no commit"
    assert found.digest == environment().digest


def test_matrices_are_kept_once_each(store):
    for matrix in (MATRIX, {"name": "second"}, MATRIX):
        with store.writing(matrix, environment()):
            pass
    assert [item["name"] for item in store.info().matrices] == ["test", "second"]


def test_plans_are_noted_together_and_a_changed_source_takes_the_place_of_the_old(tmp_path):
    store, cells = Store(tmp_path / "run"), [record(length).cell for length in (16, 32)]
    for planned in (cells, [record(64).cell], [replace(cells[0], variant_digest="new")]):
        with store.writing(MATRIX, environment(), planned=planned):
            pass
    assert {(cell.seq_len, cell.variant_digest) for cell in store.info().planned or ()} == {
        (16, "new"),
        (32, ""),
        (64, ""),
    }


def test_parts_of_a_matrix_whose_cells_have_one_name_are_all_noted(tmp_path):
    """A name leaves out how many threads there are, and in which turns a cell is timed."""
    cells = [replace(record(16).cell, threads=threads, together=turns) for threads in (1, 2) for turns in ("a", "b")]
    assert len({cell.id for cell in cells}) == 1
    store = Store(tmp_path / "run")
    for index, cell in enumerate(cells, 1):
        with store.writing(MATRIX, environment(), planned=[cell], shard=(index, len(cells))):
            pass
    assert store.info().planned == tuple(cells)


def test_what_was_timed_in_turns_with_a_source_that_changed_is_planned_no_more(tmp_path):
    def turns(digest: str) -> list[Cell]:
        own = replace(record(16).cell, together=f"with {digest}")
        return [own, replace(own, variant="linformer", variant_digest=digest)]

    store, new = Store(tmp_path / "run"), turns("new")
    for planned in (turns("old"), new):
        with store.writing(MATRIX, environment(), planned=planned):
            pass
    assert store.info().planned == tuple(new)


def test_why_a_run_ended_is_noted_until_the_next_one(store):
    with store.writing(MATRIX, environment()):
        store.note_end("time limit")
    assert store.info().stopped == "time limit"
    with store.writing(MATRIX, environment()):
        assert store.info().stopped == ""


def test_a_record_that_another_shard_runs_again_is_no_damaged_file(store, monkeypatch):
    """Each shard of an array reads all records; this one is gone when it comes to be read."""
    files = [*cell_files(store.folder), store.folder / "cells" / f"{record(64).cell.key}.json"]
    monkeypatch.setattr("attn_zoo.folder.cell_files", lambda _: files)
    scan = store.scan()
    assert (len(scan.records), scan.problems) == (2, {})


def test_a_damaged_file_that_another_shard_set_aside_first_ends_no_run(store, monkeypatch):
    monkeypatch.setattr(Store, "scan", lambda *_: Scan(records={}, problems={"bad.json": "not readable"}))
    with store.writing(MATRIX, environment(), shard=(1, 2)):
        pass
    assert list((store.folder / "quarantine").iterdir()) == []


def test_a_folder_that_began_without_a_plan_stays_without(store):
    head = json.loads((store.folder / "run.json").read_text())
    del head["planned"]
    (store.folder / "run.json").write_text(json.dumps(head))
    with store.writing(MATRIX, environment(), planned=[record(64).cell]):
        pass
    assert store.info().planned is None, "what was planned before is not known"


def test_a_second_writer_is_told_who_is_there(store):
    with store.writing(MATRIX, environment()):
        with pytest.raises(FolderError, match=rf"in use by another run: process {os.getpid()} since 20") as caught:
            store.writing(MATRIX, environment()).__enter__()
        assert caught.value.exit_code == 2
        with pytest.raises(FolderError, match="in use"):
            store.writing(MATRIX, environment(), shard=(1, 2)).__enter__()
    with store.writing(MATRIX, environment()):
        pass


def test_shards_share_a_folder_but_not_with_themselves(store):
    with store.writing(MATRIX, environment(), shard=(1, 2)), store.writing(MATRIX, environment(), shard=(2, 2)):
        with pytest.raises(FolderError, match="in use by another run: process"):
            store.writing(MATRIX, environment(), shard=(2, 2)).__enter__()
        with pytest.raises(FolderError, match="in use"):
            store.writing(MATRIX, environment()).__enter__()


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        ([(1, 3), (2, 3)], "shard 3 of 3 has not run here"),
        ([(3, 3), None], "shards 1, 2 of 3 have not run here"),
        ([(1, 1000)], "shards 2, 3, 4, 5, 6 and 994 more of 1000 have not run here"),
        ([(1, 2), (1, 3), (2, 3), (3, 3)], ""),
        ([(1, 2), (1, 1)], ""),
        ([None], ""),
    ],
)
def test_a_folder_knows_which_shards_have_not_run(ran, words, tmp_path):
    store = Store(tmp_path / "run")
    for shard in ran:
        whole = shard == (1, 1)
        with store.writing(MATRIX, environment(), shard=None if whole else shard, is_whole=whole):
            assert store.info().shards is not None
    assert store.info().missing_shards == words


def test_shards_of_two_matrices_are_told_apart_and_an_older_folder_says_nothing_of_them(store):
    for name in ("one", "two"):
        with store.writing({"name": name}, environment(), shard=(1, 2)):
            pass
    one, two = (f"shard 2 of 2 of {name} has not run here" for name in ("one", "two"))
    assert store.info().missing_shards == f"{one}; {two}"
    path = store.folder / "run.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({name: data[name] for name in data if name != "shards"}))
    with store.writing({"name": "one"}, environment(), shard=(1, 2)):
        assert (store.info().shards, store.info().missing_shards) == (None, "")
    path.write_text(json.dumps({**data, "shards": [["one", 3, 2]]}))
    with pytest.raises(FolderError, match="damaged: ValueError there is no shard 3 of 2"):
        store.info()


def test_the_lock_of_a_killed_holder_is_free(store):
    code = f"""
        import os
        from attn_zoo.matrix.store.store import Store
        from tests.matrix.conftest import environment
        held = Store({str(store.folder)!r}).writing({MATRIX!r}, environment())
        held.__enter__()
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=Path(__file__).parents[3], capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr.decode()
    assert str(os.getpid()) not in (store.folder / ".lock").read_text()
    with store.writing(MATRIX, environment()) as scan:
        assert len(scan.records) == 2


def test_write_whole_replaces(tmp_path):
    write_whole(tmp_path / "a", "1")
    write_whole(tmp_path / "a", "2")
    assert (tmp_path / "a").read_text() == "2"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
