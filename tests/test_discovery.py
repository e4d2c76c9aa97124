"""Discovery: other packages' entry points and plain files. Whatever one of them does, the others still work."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import attn_zoo
from attn_zoo import build_attention, load_file
from attn_zoo.attention import BuildContext
from attn_zoo.discovery import plain_files, providers
from attn_zoo.discovery.global_state import read_state
from attn_zoo.discovery.import_trial import ask_python, importable
from attn_zoo.discovery.providers import discover, tried_imports
from attn_zoo.errors import ConfigError
from attn_zoo.registry import all_or_nothing, tasks, variants

VARIANT = """
import attn_zoo
from attn_zoo import AbstractAttention, Capabilities, Complexity, Reference, register_attention

@register_attention(
    "{name}",
    capabilities=Capabilities(bidirectional=True, causal=False, cross_attention=False, key_padding_mask=False),
    complexity=Complexity(time="L", memory="L", time_exponent=1, memory_exponent=1, sequential_ops="1", max_path="1"),
    reference=Reference(title="t", authors="a", year=2020, url="https://example.org"),
)
class Values(AbstractAttention):
    def forward(self, query, key, value, *, key_padding_mask=None):
        return value
"""


# Imports no torch, so that a trial takes less than a second: of the base only the name is asked for.
TASK = """
from attn_zoo.registry import register_task

class AbstractTask:
    pass

@register_task("{name}")
class Task(AbstractTask):
    pass
"""

HANGS = "import time\nwhile True: time.sleep(60)"
"""Without taking a core from other tests."""


@pytest.fixture(autouse=True)
def forget(registry_kept: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave modules as they were too, and know of no import that another test tried."""
    monkeypatch.setattr(providers, "_tried", {})
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith(("zoo_plugin", "attn_zoo_file_")):
            del sys.modules[name]


def install(folder: Path, **sources: str) -> None:
    """Install packages of one module, each with its entry point, into a site directory."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[attn_zoo.variants]\n{name} = {name}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a function that installs packages into a site directory of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return partial(install, tmp_path)


def reasons_by_package(failures):
    return {failure.provider.partition(" ")[0]: failure.reason for failure in failures}


def test_a_bad_package_is_listed_with_its_reason_and_the_others_work(site):
    site(
        zoo_plugin_good=VARIANT.format(name="plugin_good"),
        zoo_plugin_raises="raise ValueError('first line\\nsecond line')",
        zoo_plugin_exits="import sys; sys.exit('no licence')",
        zoo_plugin_ends="import os; os._exit(3)",
        zoo_plugin_crashes="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        zoo_plugin_halfway=TASK.format(name="plugin_half") + "\nraise ImportError('something is missing')",
        zoo_plugin_taken=TASK.format(name="listops"),
        zoo_plugin_asks="import attn_zoo; attn_zoo.list_variants()\n" + VARIANT.format(name="plugin_asks"),
    )
    list(variants)
    failures = discover("attn_zoo.variants", all_or_nothing)
    assert reasons_by_package(failures) == {
        "zoo_plugin_raises": "ValueError: first line",
        "zoo_plugin_exits": "called sys.exit('no licence') at import",
        "zoo_plugin_ends": "ended the process at import, with exit code 3",
        "zoo_plugin_crashes": "import killed by signal 11",
        "zoo_plugin_halfway": "ImportError: something is missing",
        "zoo_plugin_taken": "ConfigError: zoo_plugin_taken: task 'listops' is already registered by attn_zoo; "
        "choose another name",
    }
    assert {"full", "plugin_good", "plugin_asks"} <= set(variants)
    assert "plugin_half" not in tasks, "half a provider is none"
    assert variants["plugin_good"].provider == "zoo_plugin_good"
    attention = build_attention("plugin_good", BuildContext(embed_dim=4, num_heads=1, max_seq_len=4))
    assert type(attention).__name__ == "Values"


def test_folders_of_a_room_hold_what_its_modules_share_and_are_not_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "zoo_plugin_room" / "shared").mkdir(parents=True)
    (tmp_path / "zoo_plugin_room" / "__init__.py").write_text("")
    (tmp_path / "zoo_plugin_room" / "task.py").write_text("")
    (tmp_path / "zoo_plugin_room" / "shared" / "__init__.py").write_text("raise AssertionError")
    assert discover("zoo_plugin_room", all_or_nothing) == []
    assert "zoo_plugin_room.task" in sys.modules
    assert "zoo_plugin_room.shared" not in sys.modules


def test_a_package_that_hangs_is_given_up(site):
    site(zoo_plugin_hangs=HANGS)
    (failure,) = discover("attn_zoo.variants", all_or_nothing, timeout_s=1)
    assert failure.provider == "zoo_plugin_hangs (zoo_plugin_hangs)"
    assert failure.reason == "did not finish importing within 1 s"
    assert "full" in variants


def test_a_module_with_several_entry_points_is_tried_once(site, tmp_path, monkeypatch):
    site(zoo_plugin_tried="")
    entries = tmp_path / "zoo_plugin_tried-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[attn_zoo.variants]\none = zoo_plugin_tried\ntwo = zoo_plugin_tried\n")
    tried: list[str] = []

    def why_not_import(module: str, *_: object) -> str:
        tried.append(module)
        return "did not finish"

    monkeypatch.setattr(providers, "why_not_import", why_not_import)
    assert len(discover("attn_zoo.variants", all_or_nothing)) == 2
    assert tried == ["zoo_plugin_tried"]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_a_failing_entry_point_had_imported_is_found_by_the_next(site, tmp_path, monkeypatch, is_loaded):
    site(zoo_plugin_parts="")
    entries = tmp_path / "zoo_plugin_parts-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[attn_zoo.variants]\nfast = zoo_plugin_parts.fast\ngood = zoo_plugin_parts.entry\n")
    package = tmp_path / "zoo_plugin_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")  # hides the module of this name
    (package / "good.py").write_text(TASK.format(name="plugin_good"))
    (package / "fast.py").write_text("import zoo_plugin_parts.good, no_such_package")
    (package / "entry.py").write_text("from zoo_plugin_parts import good")
    monkeypatch.setattr(providers, "why_not_import", lambda *_: None)
    if is_loaded:
        importlib.import_module("zoo_plugin_parts")
    (failure,) = discover("attn_zoo.variants", all_or_nothing)
    assert failure.provider == "zoo_plugin_parts (zoo_plugin_parts.fast)"
    assert "plugin_good" in tasks


def test_a_package_that_hangs_does_so_once_for_all_processes(site, monkeypatch):
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    site(zoo_plugin_hangs=f"{child}\n{HANGS}", zoo_plugin_good=TASK.format(name="plugin_good"))
    (first,) = discover("attn_zoo.variants", all_or_nothing, timeout_s=4)
    for name, value in tried_imports().items():
        monkeypatch.setenv(name, value)
    tasks.remove("plugin_good")
    del sys.modules["zoo_plugin_good"]
    began = time.monotonic()
    (again,) = discover("attn_zoo.variants", all_or_nothing, timeout_s=60)
    assert time.monotonic() - began < 30, "nothing is tried again"
    assert again == first
    assert "plugin_good" in tasks


def test_what_a_package_prints_is_not_what_was_asked_for(site, tmp_path, capsys):
    site(zoo_plugin_prints="print('{')\n" + TASK.format(name="plugin_good"))
    assert discover("attn_zoo.variants", all_or_nothing) == []
    (tmp_path / "mine.py").write_text("print('[')\n" + TASK.format(name="from_file"))
    load_file(tmp_path / "mine.py")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "{\n[\n")


def test_a_package_that_waits_for_input_does_not_wait(site):
    site(zoo_plugin_reads="input()")
    (failure,) = discover("attn_zoo.variants", all_or_nothing, timeout_s=30)
    assert failure.reason.startswith(("EOFError", "OSError"))


# --- plain files ---


def test_a_child_searches_the_current_folder_only_where_we_do(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise ImportError('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    elsewhere = [path for path in sys.path if path not in ("", str(Path.cwd()))]
    for path, exit_code in ((elsewhere, 0), (["", *elsewhere], 1), ([str(tmp_path), *elsewhere], 1)):
        monkeypatch.setattr(sys, "path", path)
        environment = importable({key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"})
        assert ask_python(["-c", "import random"], environment, 60.0).returncode == exit_code


def test_a_file_registers_its_variant_once(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(VARIANT.format(name="from_file"))
    load_file(path, None)
    load_file(str(path), None)
    assert variants["from_file"].provider == "mine.py"
    assert variants["from_file"].source == str(path)


def test_an_edit_within_the_same_second_counts_and_no_bytecode_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "task.py"
    for name in ("first", "other"):
        path.write_text(TASK.format(name=f"zoo_{name}"))
        os.utime(path, (1e9, 1e9))
        load_file(path)
        assert f"zoo_{name}" in tasks
        for module in [module for module in sys.modules if module.startswith("attn_zoo_file_task_")]:
            del sys.modules[module]  # as in a process of its own
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_one_name_do_not_shadow_each_other(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(TASK.format(name=f"from_{folder}"))
        load_file(tmp_path / folder / "mine.py")
    assert {"from_a", "from_b"} <= set(tasks)


@pytest.mark.parametrize("name", ["none.py", "folder.py", "notes.txt"])
def test_what_is_no_python_file_is_refused(tmp_path, name):
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match="expected a Python file"):
        load_file(tmp_path / name)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def (:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit()", "called sys.exit"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(0)", "ended the process at import, with exit code 0"),
    ],
)
def test_a_bad_file_is_one_clear_error_and_can_be_mended(tmp_path, source, reason):
    path = tmp_path / "mine.py"
    path.write_text(TASK.format(name="mended") + f"\n{source}")
    with pytest.raises(ConfigError) as refusal:
        load_file(path)
    assert str(refusal.value).startswith(str(path))
    assert reason in str(refusal.value)
    assert "mended" not in tasks
    path.write_text(TASK.format(name="mended"))
    load_file(path)
    assert "mended" in tasks


def test_a_file_that_hangs_is_given_up(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(HANGS)
    with pytest.raises(ConfigError, match="did not finish importing within 1 s"):
        load_file(path, timeout_s=1)


def test_a_taken_name_in_a_file_names_both(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(VARIANT.format(name="full"))
    message = r"mine\.py: variant 'full' is already registered by attn_zoo; choose another name \(line 5\)$"
    with pytest.raises(ConfigError, match=message):
        load_file(path, None)


def test_a_name_that_is_taken_by_a_file_names_that_file(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(TASK.format(name="from_file"))
    load_file(tmp_path / "a" / "mine.py", None)
    with pytest.raises(ConfigError, match=f"already registered by {tmp_path}/a/mine.py; choose another name"):
        load_file(tmp_path / "b" / "mine.py", None)
    (tmp_path / "twice.py").write_text(2 * TASK.format(name="twice"))
    with pytest.raises(ConfigError, match=r"'twice' is already registered by another class of twice\.py; choose"):
        load_file(tmp_path / "twice.py", None)


def test_a_file_that_is_loaded_before_anything_is_looked_up_takes_no_name_and_no_other(tmp_path):
    """Its own registration discovers the others: it is refused, not they, and they stay when it fails."""
    path = tmp_path / "mine.py"
    path.write_text(VARIANT.format(name="full"))
    program = f"""
from attn_zoo import ConfigError, list_variants, load_file
try:
    load_file({str(path)!r}, None)
except ConfigError as error:
    print(error)
print("linformer" in list_variants())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said, others = done.stdout.splitlines()
    assert said.startswith(f"{path}: variant 'full' is already registered by attn_zoo")
    assert others == "True"


def test_a_file_that_registers_nothing_is_refused_and_can_be_mended(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match=r"mine\.py: registers no variant and no task: decorate a class with"):
        load_file(path, None)
    path.write_text(TASK.format(name="mended"))
    load_file(path, None)
    assert "mended" in tasks


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.set_num_threads(7)", r"the number of threads: \d+ to 7"),
        ("torch.set_grad_enabled(False)", "the mode of gradients: True to False"),
        ("torch.set_default_dtype(torch.float64)", "the default dtype: float32 to float64"),
        ("import os; os.environ['OMP_X'] = '1'", "the environment's variables of libraries: .*OMP_X=1"),
        pytest.param(
            "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
            r"the processors to run on: \{.*, .*\} to \{\d+\}",
            marks=pytest.mark.skipif(
                not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one processor"
            ),
        ),
        ("import os; os.chdir('/')", "the working directory: .* to /"),
        ("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", "handlers of signals: .* to SIGINT=1, .*"),
    ],
)
def test_a_plain_file_whose_import_changes_what_others_are_measured_with_is_refused(tmp_path, line, words):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\n\n{line}\ntorch.manual_seed(0)\n{TASK.format(name='mine')}")
    before = read_state(has_generators=False)
    with (
        torch.random.fork_rng(),
        pytest.raises(ConfigError, match=rf"mine\.py: its import changes {words}; others share the process"),
    ):
        load_file(path, None)
    assert read_state(has_generators=False) == before
    assert "mine" not in tasks


def test_a_plain_file_that_raises_is_named_with_its_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import math\n\nmath.sqrt(-1)\n")
    with pytest.raises(ConfigError, match=r"mine\.py: cannot be imported: ValueError: .* \(line 3\)$"):
        load_file(path)


# --- what lies beside a plain file ---


@pytest.fixture
def beside(tmp_path) -> Iterator[Path]:
    """A plain file in a folder that Python does not search, and what it imports from beside it."""
    folder = tmp_path / "theirs"
    (folder / "zoo_parts" / "deep").mkdir(parents=True)
    lines = ["from zoo_scale import SCALE", "from zoo_parts.deep import factors", "import random"]
    (folder / "mine.py").write_text("\n".join([*lines, TASK.format(name="from_beside"), "Task.scale = SCALE"]))
    (folder / "zoo_scale.py").write_text("SCALE = 1.0\n")
    (folder / "zoo_parts" / "deep" / "__init__.py").write_text("")
    (folder / "zoo_parts" / "deep" / "factors.py").write_text("from . import more\nimport zoo_scale\n")
    (folder / "zoo_parts" / "deep" / "more.py").write_text("")
    for unrelated in ("random", "zoo_unrelated", "pytest"):
        (folder / f"{unrelated}.py").write_text("raise ImportError('nobody asked for it')")
    yield folder
    plain_files._forget([name for name in plain_files._beside.places if name.startswith("zoo_")])


def test_a_file_imports_what_lies_beside_it_wherever_that_is(beside, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    load_file(beside / "mine.py")
    assert "from_beside" in tasks
    assert not list(beside.rglob("__pycache__")), "of the trial neither"
    assert str(beside) not in sys.path
    with pytest.raises(ImportError, match="zoo_unrelated"):
        __import__("zoo_unrelated")


def test_an_edit_of_the_file_or_of_what_lies_beside_it_counts_when_it_is_loaded_again(beside):
    for scale in (1.0, 2.0, 2.0):
        (beside / "zoo_scale.py").write_text(f"SCALE = {scale}\n")
        load_file(beside / "mine.py", None)
        assert tasks["from_beside"].scale == scale
    loaded = tasks["from_beside"]
    load_file(beside / "mine.py", None)
    assert tasks["from_beside"] is loaded, "nothing was changed"
    (beside / "mine.py").write_text(TASK.format(name="renamed"))
    with pytest.raises(ConfigError, match=r"from_beside: .*mine\.py, or what it imports from beside it, was changed"):
        tasks.plain_file("from_beside")
    load_file(beside / "mine.py", None)
    assert "renamed" in tasks
    assert "from_beside" not in tasks
    (beside / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"renamed: .*mine\.py, which registers it, is gone"):
        tasks.plain_file("renamed")


def test_an_edit_of_what_two_files_import_counts_whichever_is_loaded_again_first(beside):
    for scale in (1.0, 2.0):
        (beside / "zoo_both.py").write_text(f"{TASK.format(name='of_both')}Task.scale = {scale}\n")
        for name in ("second", "first") if scale == 2.0 else ("first", "second"):
            (beside / f"{name}.py").write_text(f"import zoo_both\n{TASK.format(name=f'own_{name}')}")
            load_file(beside / f"{name}.py", None)
            assert tasks["of_both"].scale == scale
    assert tasks.plain_file("of_both") == str(beside / "first.py")


def test_an_edit_of_a_task_in_a_file_makes_other_data(beside):
    """They are kept by their digest, which of other tasks only the version changes."""
    path = beside / "own_task.py"
    lines = ["from attn_zoo.tasks.mqar import MultiQueryRecall", "import zoo_scale", "@register_task('own_task')"]
    digests = []
    for edit in ("", "# edited", "# edited"):
        path.write_text(
            "\n".join(["from attn_zoo.registry import register_task", *lines, "class Own(MultiQueryRecall):"])
        )
        path.write_text(path.read_text() + f"\n    version = 3  {edit}\n")
        load_file(path, None)
        digests.append(tasks["own_task"].digest("short"))
    assert digests[0] != digests[1] == digests[2]
    (beside / "zoo_scale.py").write_text("SCALE = 2.0\n")
    load_file(path, None)
    assert tasks["own_task"].digest("short") != digests[2]


def test_what_was_changed_since_it_was_loaded_is_not_checked_as_it_was(beside):
    path = beside / "own_variant.py"
    path.write_text(VARIANT.format(name="own_variant"))
    load_file(path, None)
    check = partial(attn_zoo.check, "own_variant", only="modes", progress=False)
    assert check().is_ok
    path.write_text(path.read_text().replace("return value", "return value + self.training"))
    with pytest.raises(ConfigError, match="changed since it was loaded: load it again"):
        check()
    load_file(path, None)
    assert not check().is_ok


def test_a_module_of_a_notebook_may_be_changed_and_reloaded(beside, monkeypatch):
    monkeypatch.syspath_prepend(str(beside))
    path = beside / "zoo_plugin_module.py"
    path.write_text(TASK.format(name="from_module"))
    module = importlib.import_module("zoo_plugin_module")
    assert tasks.plain_file("from_module") == str(path)
    path.write_text(TASK.format(name="from_module") + "# changed\n")
    importlib.reload(module)
    assert tasks["from_module"] is module.Task
    with pytest.raises(ConfigError, match="already registered by another class of zoo_plugin_module"):
        importlib.reload(module)


def test_two_files_cannot_import_two_modules_of_one_name(beside, tmp_path):
    load_file(beside / "mine.py", None)
    (tmp_path / "other").mkdir()
    other, scale = tmp_path / "other" / "other.py", tmp_path / "other" / "zoo_scale.py"
    other.write_text("from zoo_scale import SCALE\n" + TASK.format(name="from_other"))
    scale.write_text("SCALE = 2.0\n")
    with pytest.raises(ConfigError) as refusal:
        load_file(other, None)
    loaded = f"another one is loaded here, {beside / 'zoo_scale.py'}"
    assert str(refusal.value) == f"{other}: imports 'zoo_scale' from beside it, and {loaded}: rename one"
    scale.write_text("SCALE = 1.0\n")
    load_file(other, None)
    assert "from_other" in tasks, "a copy is the same"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("\n1 / 0", "cannot be imported: ZeroDivisionError: division by zero (zoo_scale.py, line 2)"),
        ("\n\nSCALE = (", "cannot be imported: SyntaxError: '(' was never closed (zoo_scale.py, line 3)"),
        ("from .absent import x", "a plain file belongs to no package: name what lies beside it without a dot"),
    ],
)
def test_a_fault_beside_a_file_is_named_there_and_can_be_mended(beside, source, reason):
    (beside / "zoo_scale.py").write_text(source)
    with pytest.raises(ConfigError) as refusal:
        load_file(beside / "mine.py", None)
    assert str(refusal.value).startswith(f"{beside / 'mine.py'}: cannot be imported: ")
    assert str(refusal.value).endswith(reason)
    (beside / "zoo_scale.py").write_text("SCALE = 1.0\n")
    load_file(beside / "mine.py", None)
    assert "from_beside" in tasks


def test_a_file_of_a_package_is_loaded_by_one_beside_the_package(beside):
    module = beside / "zoo_parts" / "deep" / "mine.py"
    module.write_text("from .more import __name__\n" + TASK.format(name="from_package"))
    (beside / "zoo_parts" / "__init__.py").write_text("")
    with pytest.raises(ConfigError) as refusal:
        load_file(module, None)
    assert str(refusal.value).endswith("load a file beside zoo_parts that says `import zoo_parts.deep.mine`")
    (beside / "entry.py").write_text("import zoo_parts.deep.mine")
    load_file(beside / "entry.py", None)
    assert tasks.plain_file("from_package") == str(beside / "entry.py")


def test_what_a_module_beside_a_file_registers_is_known_by_that_file(beside):
    """Another process loads the file; loading the module too would register it twice."""
    (beside / "zoo_scale.py").write_text("SCALE = 1.0\n" + TASK.format(name="zoo_scaled"))
    (beside / "zoo_parts" / "deep" / "factors.py").write_text(VARIANT.format(name="zoo_factored"))
    load_file(beside / "mine.py", None)
    assert {tasks.plain_file("zoo_scaled"), tasks.plain_file("from_beside")} == {str(beside / "mine.py")}
    assert variants.plain_file("zoo_factored") == str(beside / "mine.py")
    assert (variants["zoo_factored"].provider, variants["zoo_factored"].source) == ("mine.py", str(beside / "mine.py"))
    digest = variants["zoo_factored"].digest
    (beside / "zoo_scale.py").write_text("SCALE = 2.0\n")
    load_file(beside / "mine.py", None)
    assert variants["zoo_factored"].digest != digest


@pytest.mark.parametrize(("first", "second"), [("mine", "zoo_scale"), ("zoo_scale", "mine")])
def test_of_two_files_of_which_one_imports_the_other_that_one_is_enough(beside, first, second):
    (beside / "zoo_scale.py").write_text("SCALE = 1.0\n" + TASK.format(name="zoo_scaled"))
    load_file(beside / f"{first}.py", None)
    how = r"mine\.py imports zoo_scale\.py and so registers it too: load mine\.py alone"
    with pytest.raises(ConfigError, match=f"'zoo_scaled' is already registered by {beside}/{first}.py; {how}"):
        load_file(beside / f"{second}.py", None)
