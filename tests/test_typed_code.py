"""Classes that were typed: their source is what they need of all that was typed, and another process can load it."""

from __future__ import annotations

import itertools
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attn_zoo import ConfigError, build_attention, describe
from attn_zoo.attention import BuildContext
from attn_zoo.matrix.drive.run_plan import run
from attn_zoo.matrix.plan.expand import make_plan
from attn_zoo.matrix.plan.schema import parse_matrix
from attn_zoo.matrix.store.store import Store
from attn_zoo.registry import load_file, tasks, variants
from attn_zoo.typed_code import _written, require_same_values
from tests.conftest import keep_only

ROOT = Path(__file__).parents[1]

Prompt = Callable[..., dict[str, Any]]

IMPORTS = """
import torch
from attn_zoo import AbstractAttention, Capabilities, Complexity, Reference, VariantConfig, register_attention
"""
CARD = """
CARD = dict(
    capabilities=Capabilities(bidirectional=True, causal=False, cross_attention=True, key_padding_mask=False),
    complexity=Complexity(time="1", memory="1", time_exponent=2, memory_exponent=2, sequential_ops="1", max_path="1"),
    reference=Reference(title="t", authors="a", year=2020, url="https://example.org"),
)
"""
MINE = """
@register_attention("typed_mine", **CARD)
class Mine(AbstractAttention):
    '''Softmax, typed.'''

    def forward(self, query, key, value, *, key_padding_mask=None):
        return torch.softmax(scored(query, key) * self.build.head_dim**-0.5, -1) @ value
"""
TASK = """
from attn_zoo.registry import register_task

class AbstractTask:
    pass

@register_task("typed_task")
class Mine(AbstractTask):
    gain = 1.0

    def needed(self):
        return len([TABLE])
"""
"""Is loaded in another process without torch, which takes most of such a test."""
SCORED = "def scored(query, key):\n    return query @ key.transpose(-1, -2) * FACTOR"


@pytest.fixture(autouse=True)
def _forget(registry_kept: None) -> Iterator[None]:
    cached = set(linecache.cache)
    yield
    for name in set(linecache.cache) - cached:
        del linecache.cache[name]


_numbers = itertools.count()


@pytest.fixture
def prompt(monkeypatch) -> Prompt:
    """Run cells one after another as an interactive Python does, whose tracebacks know what was typed."""
    module = ModuleType("a_prompt")
    monkeypatch.setitem(sys.modules, "a_prompt", module)
    namespace = vars(module)

    def enter(*cells: str) -> dict[str, Any]:
        for cell in cells:
            name = f"<python-input-{next(_numbers)}>"
            linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
            exec(compile(cell, name, "exec"), namespace)
        return namespace

    return enter


def source() -> str:
    return Path(variants["typed_mine"].source).read_text()


def test_the_source_is_what_the_class_needs_and_no_more(prompt):
    prompt(IMPORTS, "FACTOR = 1.0", "unused = torch.zeros(3)", "run = 1 / 1", CARD, SCORED, MINE)
    text = source()
    for needed in ("import torch", "FACTOR = 1.0", "CARD = dict(", "def scored", '@register_attention("typed_mine"'):
        assert needed in text
    assert "unused" not in text
    assert "run = " not in text
    assert describe("typed_mine").summary == "Softmax, typed."


def test_a_form_feed_ends_no_line(prompt):
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, f"\x0c{MINE}")
    assert MINE.strip() in source()


def test_a_name_that_is_local_to_a_function_needs_nothing(prompt):
    body = MINE.replace("        return", "        table = key\n        return")
    prompt(IMPORTS, "FACTOR = 1.0\ntable = 1 / 1", CARD, SCORED, body)
    assert "FACTOR = 1.0" in source()
    assert "table = 1 / 1" not in source()


def test_another_process_loads_it(prompt, tmp_path):
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE)
    path = variants["typed_mine"].source
    code = f"from attn_zoo import load_file, describe; load_file({path!r}, None); print(describe('typed_mine').summary)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "Softmax, typed."


def test_an_equal_cell_has_an_equal_digest_whatever_else_was_typed(prompt):
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE)
    first = variants["typed_mine"].digest
    prompt("more = 3", MINE)
    assert variants["typed_mine"].digest == first


def test_a_cell_may_be_run_again_and_the_new_class_counts(prompt):
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE)
    namespace = prompt(MINE.replace("Softmax, typed.", "Softmax, typed anew."))
    assert variants["typed_mine"].attention is namespace["Mine"]
    assert "typed anew" in source()
    assert "Softmax, typed." not in source(), "an earlier version must not register a second time"


def test_a_cell_that_is_changed_and_run_again_is_measured_as_it_is_now(prompt):
    """While a class is being registered, its name still stands for the one before."""
    prompt("TABLE = []", TASK, TASK.replace("gain = 1.0", "gain = 2.0"))
    path = tasks.plain_file("typed_task")
    require_same_values(path)
    assert _written[path].values["Mine.gain"] == "2.0"


@pytest.mark.parametrize("guarded", ["class", "call"])
def test_what_only_the_main_module_runs_is_not_measured(prompt, tmp_path, guarded):
    mine = MINE.replace("\n", "\n    ")
    guard = "if __name__ == '__main__':"
    cells = [f"{guard}\n{mine}"] if guarded == "class" else [f"def main():\n{mine}", f"{guard}\n    main()"]
    prompt("__name__ = '__main__'", IMPORTS, "FACTOR = 1.0", CARD, SCORED, *cells)
    with pytest.raises(ConfigError, match=r"stands under `if __name__ == \.\.\.`, which no other process runs"):
        run(plan_of("typed_mine"), Store(tmp_path / "out"))


def test_a_name_of_somebody_else_is_not_replaced(prompt):
    with pytest.raises(ConfigError, match="'full' is already registered by attn_zoo"):
        prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE.replace("typed_mine", "full"))


def test_what_a_class_body_needs_is_what_it_had_then(prompt):
    """A default is read when the class is made, a global name when the function runs."""
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE, "CARD = None")
    text = source()
    assert "CARD = None" not in text
    assert "CARD = dict(" in text


def test_a_helper_typed_anew_is_said_before_anything_is_measured(prompt):
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE)
    assert plan_of("typed_mine").variant_files == (variants["typed_mine"].source,)
    prompt("FACTOR = 2.0")
    with pytest.raises(ConfigError, match=r"typed_mine: it, or something it needs, was .* since: run the cell"):
        plan_of("typed_mine")
    prompt(MINE)
    assert "FACTOR = 2.0" in source()
    plan_of("typed_mine")


def test_a_variant_that_builds_on_another_registers_itself_only(prompt):
    other = MINE.replace("typed_mine", "typed_other").replace("Mine(AbstractAttention)", "Other(Mine)")
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE, other)
    text = Path(variants["typed_other"].source).read_text()
    assert "class Mine(" in text
    assert "typed_mine" not in text
    both = plan_of("typed_mine", "typed_other").variant_files
    keep_only(variants, tuple(name for name in variants if not name.startswith("typed_")))
    for path in both:
        load_file(path, None)
    assert {"typed_mine", "typed_other"} <= set(variants)


@pytest.mark.parametrize(
    "cells",
    [
        ["FACTOR = 4.0", "FACTOR *= 0.5"],
        ["FACTOR = 1.0", "if torch.__version__:\n    FACTOR = 2.0"],
        ["FACTOR = 1.0", "try:\n    FACTOR = 2.0\nexcept ImportError:\n    pass"],
        ["FACTOR = 1.0", "for _ in range(1):\n    FACTOR = 2.0"],
        ["FACTOR = 0.0; FACTOR += 1.0", "FACTOR += 0.5; FACTOR += 0.5; unused = FACTOR"],
        ["TABLE = {}", "TABLE['a'] = 2.0"],
        ["TABLE = {'b': {}}", "TABLE['b']['c'] = 2.0", "TABLE['a'] = TABLE['b']['c']"],
        ["TABLE = {}", "TABLE.update(a=2.0)"],
        ["TABLE = {}", "for key in 'ab':\n    TABLE[key] = 1.0", "with torch.no_grad():\n    TABLE['a'] += 1.0"],
        ["class Options:\n    a = 1.0", "Options.a = 2.0"],
        ["class Options:\n    a = 1.0\n    b = 1.0", "del Options.b", "setattr(Options, 'c', 1.0)", "Options.a = 2.0"],
    ],
    ids=lambda cells: cells[-1],
)
def test_what_is_changed_after_it_was_bound_travels_with_its_change(prompt, cells):
    value = {"T": "TABLE['a']", "c": "Options.a"}.get(cells[0][0], "FACTOR")
    scored = SCORED.replace("FACTOR", value)
    prompt(IMPORTS, "torch.backends.cudnn.benchmark = False", *cells, CARD, scored, MINE)
    text, namespace = source(), dict[str, Any]()
    exec(text.partition("@register_attention")[0], namespace)
    assert eval(value, namespace) == 2.0
    assert "benchmark" not in text, "a setting of the process"


def test_a_class_that_is_changed_after_it_was_registered_is_not_measured_as_it_was(prompt):
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE)
    plan_of("typed_mine")
    prompt("Mine.reference = lambda self, query, key, value, *, key_padding_mask=None: value")
    with pytest.raises(ConfigError, match="typed_mine: it, or something it needs, was changed"):
        plan_of("typed_mine")
    prompt(MINE)
    assert "Mine.reference" not in source()
    prompt(MINE.replace("typed_mine", "typed_other").replace("value\n", "key\n"), "Mine.extra = 1.0")
    plan_of("typed_mine")  # of two classes of one name, the other one is changed
    registers = MINE.replace('@register_attention("typed_mine", **CARD)\n', "")
    prompt(registers, "Mine.extra = 2.0", 'register_attention("typed_mine", **CARD)(Mine)')
    assert "Mine.extra = 2.0" in source()
    plan_of("typed_mine")


def test_what_is_called_after_a_class_was_registered_is_not_its_source(prompt):
    prompt(IMPORTS, "FACTOR = 1.0\nlog = []", CARD, SCORED + " + len(log)", MINE, "log.append(1.0)")
    plan_of("typed_mine")
    assert "append" not in source()


def test_what_is_bound_whatever_happens_needs_no_value_before(prompt):
    prompt(
        IMPORTS, "FACTOR = 3.0", "if torch.__version__:\n    FACTOR = 1.0\nelse:\n    FACTOR = 2.0", CARD, SCORED, MINE
    )
    first = source()
    assert "FACTOR = 3.0" not in first
    prompt("try:\n    import torch\n    FACTOR = 1.0\nexcept ImportError:\n    FACTOR = 2.0", SCORED, MINE)
    assert "else:" not in source()


def test_annotations_and_future_statements_travel(prompt):
    config = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
@dataclass(frozen=True, kw_only=True, slots=True)
class Config(VariantConfig):
    kind: Literal["a", "b"] = "a"
"""
    body = MINE.replace('"typed_mine",', '"typed_mine", config=Config,')
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, config, body)
    path, text = variants["typed_mine"].source, source()
    assert text.startswith("from __future__ import annotations")
    assert "from typing import Literal" in text
    variants.remove("typed_mine")
    load_file(path, None)
    assert describe("typed_mine").options[0].type == "Literal['a', 'b']"


def test_star_imports_bind_what_their_module_has(prompt):
    prompt("import torch\nfrom attn_zoo import *", "FACTOR = 1.0", CARD, SCORED, MINE)
    assert "from attn_zoo import *" in source()


def test_a_call_instead_of_a_decorator_registers_too(prompt):
    plain = MINE.replace('@register_attention("typed_mine", **CARD)\n', "")
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, plain, 'register_attention("typed_mine", **CARD)(Mine)')
    assert source().rstrip().endswith('register_attention("typed_mine", **CARD)(Mine)')
    assert "class Mine(" in source()


def test_a_cell_that_fails_to_parse_is_passed_over(prompt):
    name = f"<python-input-{next(_numbers)}>"
    linecache.cache[name] = (8, None, ["def ("], name)
    prompt(IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE)
    assert source()


# --- where there is no source ---


def test_what_came_through_exec_registers_and_builds_but_is_not_measured(tmp_path):
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("\n".join([IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE]), namespace)
    assert variants["typed_mine"].source == ""
    build = BuildContext(embed_dim=8, num_heads=2, max_seq_len=8)
    heads = namespace["torch"].randn(1, 2, 5, 4)
    assert build_attention("typed_mine", build)(heads, heads, heads).shape == (1, 2, 5, 4)
    with pytest.raises(ConfigError) as refusal:
        run(plan_of("typed_mine"), Store(tmp_path / "out"))
    assert "the text that defines it is not known" in str(refusal.value)
    assert "write it to typed_mine.py and load that (attn_zoo.load_file)" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_name_that_nothing_typed_binds_is_named(prompt, tmp_path):
    namespace = prompt(IMPORTS, CARD, SCORED)
    namespace["FACTOR"] = 1.0
    prompt(MINE)
    assert variants["typed_mine"].no_source.startswith("it needs 'FACTOR', which nothing that was typed binds; write")
    with pytest.raises(ConfigError, match="it needs 'FACTOR'"):
        run(plan_of("typed_mine"), Store(tmp_path / "out"))


@pytest.mark.parametrize(
    ("cells", "name", "here", "there"),
    [
        (["TABLE = [1.0]", "def grow():\n    TABLE.append(3)", "grow()"], "TABLE", "[1.0, 3]", "[1.0]"),
        (["TABLE = [1.0]", "other = TABLE", "other.append(3)"], "TABLE", "[1.0, 3]", "[1.0]"),
        (["TABLE = [1.0, 2.0]", "last = TABLE.pop()"], "TABLE", "[1.0]", "[1.0, 2.0]"),
        (["import heapq", "TABLE = [1.0]", "heapq.heappush(TABLE, 2.0)"], "TABLE", "[1.0, 2.0]", "[1.0]"),
        (["class TABLE:\n    a = 1.0", "setattr(TABLE, 'a', 2.0)"], "TABLE.a", "2.0", "1.0"),
        (["TABLE = {}", "def name():\n    TABLE['a'] = {2, 1}", "name()"], "TABLE", "{'a': {1, 2}}", "{}"),
    ],
    ids=lambda cells: cells[-1] if isinstance(cells, list) else "",
)
def test_what_another_process_cannot_know_is_said(prompt, cells, name, here, there):
    prompt(*cells, TASK)
    with pytest.raises(ConfigError) as refusal:
        require_same_values(tasks.plain_file("typed_task"))
    said = f"typed_task: {name} was {here} where it was typed, and is {there} in another process, which sees only"
    assert str(refusal.value).startswith(f"{said} statements")


def test_what_another_process_draws_anew_is_said_before_anything_is_measured(prompt, tmp_path):
    prompt(IMPORTS, "TABLE = torch.rand(3)", CARD, SCORED.replace("FACTOR", "len([TABLE])"), MINE)
    drawn = r"torch.float32\[3\] \w{12}"
    said = f"typed_mine: TABLE was {drawn} where it was typed, and is {drawn} in another process"
    with pytest.raises(ConfigError, match=said):
        run(plan_of("typed_mine"), Store(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_was_changed_unseen_since_is_told(prompt):
    """No error, as it may be a memory of calls that the class made."""
    cells = ["TABLE = [1.0]", "def grow():\n    TABLE.append(3)"]
    prompt(IMPORTS, *cells, CARD, SCORED.replace("FACTOR", "len(TABLE)"), MINE)
    require_same_values(variants["typed_mine"].source)
    prompt("grow()")
    plan_of("typed_mine")
    with pytest.warns(
        UserWarning, match=r"typed_mine: TABLE was \[1\.0\] when .*; it is \[1\.0, 3\] now: run the cell"
    ):
        require_same_values(variants["typed_mine"].source)


def test_values_that_are_the_same_in_another_process_are_measured(prompt):
    """Of every kind that is compared, and objects that are not."""
    cells = ["import numpy", "VALUES = {'b': 1, 'a': [True, None, 2j, b'x', ('y', 1e-9)], 'set': {'p', 'q', 'r'}}"]
    cells += ["ARRAYS = [torch.ones(2, dtype=torch.bfloat16), numpy.arange(3), torch.tensor(1.0), torch.empty(0)]"]
    cells += ["class Options:\n    a = 1.0", "OBJECTS = [object(), Options(), lambda: 1, torch.ones(1, device='meta')]"]
    prompt(IMPORTS, *cells, CARD, SCORED.replace("FACTOR", "len([VALUES, ARRAYS, Options, OBJECTS])"), MINE)
    path = variants["typed_mine"].source
    assert set(_written[path].values) == {"VALUES", "ARRAYS", "Options.a", "OBJECTS", "CARD"}
    require_same_values(path)
    prompt("def change():\n    VALUES['b'] = 2", "change()", MINE)
    with pytest.raises(ConfigError, match="VALUES was"):
        require_same_values(path)


def plan_of(*names: str):
    group = {
        "variants": list(names),
        "seq_len": [16],
        "passes": ["fwd"],
        "num_heads": 2,
        "head_dim": 8,
        "dtypes": ["float32"],
        "device": "cpu",
        "budget_s": 0.02,
    }
    return make_plan(parse_matrix({"name": "typed", "scaling": [group]}, "typed"))


# --- real interpreters ---

MEASURE = """
import attn_zoo
from attn_zoo.matrix.drive import run_plan
run_plan.note_ceilings = lambda *_, **__: None  # seconds, of the machine
run = attn_zoo.run(
    {"name": "typed", "scaling": [dict(variants=["full"], seq_len=[16], passes=["fwd"], num_heads=2, head_dim=8,
     dtypes=["float32"], device="cpu", budget_s=0.02, isolation="interleaved")]},
    variants=Mine, progress=False,
)
print("STATUSES", sorted(run.frame["status"]), sorted(run.frame["variant"]))
"""


def test_a_script_without_a_guard_measures_its_own_class_and_what_it_imports_from_beside_it(tmp_path):
    """A worker that ran the whole script would start to measure again. What is beside it is kept with it and counts."""
    for folder in ("scripts", "elsewhere"):
        (tmp_path / folder).mkdir()
    helper = tmp_path / "scripts" / "typed_parts.py"
    helper.write_text("UNIT = 1.0\n")
    edit = f"""
open({str(helper)!r}, "a").write("# edited")
try:
    attn_zoo.run({{"name": "typed", "scaling": [dict(variants="typed_mine", seq_len=[16])]}})
except attn_zoo.ConfigError as error:
    print(error)
"""
    path = tmp_path / "scripts" / "mine.py"
    scored = SCORED.replace("FACTOR", "FACTOR * UNIT")
    path.write_text(
        "\n".join([IMPORTS, "from typed_parts import UNIT", "FACTOR = 1.0", CARD, scored, MINE, MEASURE, edit])
    )
    place, environment = tmp_path / "elsewhere", _environment()
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, cwd=place, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "STATUSES ['ok', 'ok'] ['full', 'typed_mine']" in done.stdout
    kept = place / "runs" / "typed" / "sources" / "typed_mine"
    assert {file.name for file in kept.iterdir()} == {"typed_mine.py", "typed_parts.py"}
    assert "typed_mine: it, or something it needs, was changed or typed anew since" in done.stdout


def test_a_script_that_executes_a_text_measures_what_it_defines(tmp_path):
    """The statement that executes is the source: of a text that is at hand, in a namespace of its own."""
    path = tmp_path / "mine.py"
    text = "\n".join([IMPORTS, "FACTOR = 1.0", CARD, SCORED, MINE])
    show = "print(open(variants['typed_mine'].source).read().count('exec('), variants['typed_mine'].no_source)"
    lines = ["from attn_zoo.registry import variants", f"TEXT = {text!r}", "space = {}", "exec(TEXT, space)", show]
    path.write_text("\n".join(["def main():", "    pass", *lines]))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, cwd=tmp_path, env=_environment()
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr[-2000:]


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="tracebacks know what is typed at the prompt from 3.13 on")
def test_at_python_s_own_prompt_the_line_editor_knows_what_was_typed(tmp_path):
    pexpect = pytest.importorskip("pexpect")
    prompt = pexpect.spawn(sys.executable, ["-q"], cwd=str(tmp_path), env=_environment(), encoding="utf-8", timeout=60)
    show = "print('SOURCE', open(__import__('attn_zoo.registry').registry.variants['typed_mine'].source).read(), 'END')"
    for cell in (IMPORTS, "FACTOR = 1.0", "def ():", CARD, SCORED, MINE, show):
        for line in [*filter(str.strip, cell.splitlines()), ""]:
            prompt.sendline(line)
    prompt.expect(r"SOURCE (.*) END\r")
    text = prompt.match[1].replace("\r\n", "\n")
    assert "class Mine(" in text
    assert "FACTOR = 1.0" in text
    prompt.sendline("exit()")
    prompt.wait()


def test_in_ipython_the_order_is_that_of_running(tmp_path):
    """A cell that is run again counts where it was run last; magics in other cells do no harm."""
    cells = [IMPORTS, "FACTOR = 1.0", "FACTOR = 3.0", "%time 1 + 1", CARD, SCORED, "FACTOR = 1.0", MINE]
    check = "from attn_zoo.registry import variants; print(open(variants['typed_mine'].source).read())"
    program = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        f"for cell in {[*cells, check, MINE]!r}:\n"
        "    shell.run_cell(cell, store_history=True).raise_error()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=_environment()
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.rindex("FACTOR = 1.0") > done.stdout.rindex("FACTOR = 3.0")
    assert done.stdout.rindex("FACTOR = 1.0") < done.stdout.rindex("class Mine")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent", "IPYTHONDIR": "/nonexistent"}
