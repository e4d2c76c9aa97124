"""Reading a matrix: what is wrong is said all at once, at its place, with what was expected."""

import subprocess
import sys
import textwrap
from enum import Enum
from pathlib import Path

import pytest

from attn_zoo.errors import ConfigError
from attn_zoo.matrix.kinds.scaling import ScalingGroup
from attn_zoo.matrix.plan.expand import make_plan
from attn_zoo.matrix.plan.schema import Matrix, load_matrix, parse_matrix

GOOD = """
name = "quick"
[defaults]
batch_size = 2
head_dim = [16, 32]
[[scaling]]
variants = ["full"]
seq_len = [16, 32]
"""


def problems_of(text: str, tmp_path: Path) -> str:
    path = tmp_path / "quick.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_matrix(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def scaling_group(matrix: Matrix) -> ScalingGroup:
    [(_, _, group)] = matrix.groups()
    assert isinstance(group, ScalingGroup)
    return group


def test_defaults_reach_the_groups(tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text(GOOD)
    matrix = load_matrix(path)
    assert scaling_group(matrix).batch_size == (2,)
    assert scaling_group(matrix).head_dim == (16, 32)
    assert matrix.num_cells == 4
    assert matrix.source == "quick.toml"


def test_the_example_of_the_design(tmp_path):
    text = """
name = "quick"
[[scaling]]
variants = ["full", "linfromer"]
seq_len = [16]
dtypes = ["fp32"]
"""
    message = problems_of(text, tmp_path)
    first, *rest = message.splitlines()
    assert first == "quick.toml: 2 problems"
    assert any(
        line.startswith(
            "  scaling[0].variants[1]: unknown variant 'linfromer'; did you mean 'linformer'?  (attn-zoo list"
        )
        for line in rest
    )
    expected = "  scaling[0].dtypes[0]: expected one of float32, bfloat16, float16, float64; got 'fp32'; did you mean"
    assert any(line.startswith(expected.partition("; did")[0]) for line in rest)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("batch_size = 2", "batchsize = 2", "defaults.batchsize: unknown key; did you mean 'batch_size'?"),
        ("batch_size = 2", "batch_size = 0", "defaults.batch_size[0]: expected at least 1; got 0"),
        ("batch_size = 2", "batch_size = 2.0", "defaults.batch_size[0]: expected an integer; got 2.0"),
        ("batch_size = 2", "batch_size = true", "defaults.batch_size[0]: expected an integer; got True"),
        ("batch_size = 2", "timeout_s = nan", "defaults.timeout_s: "),
        ("batch_size = 2", "overrides = {eps = inf}", "defaults.overrides.eps: expected a finite number; got inf"),
        (
            "batch_size = 2",
            f"overrides = {{warmup_steps = {2**63}}}",
            "defaults.overrides.warmup_steps: expected an integ",
        ),
        ("batch_size = 2", "timeout_s = -1", "defaults.timeout_s: expected more than 0; got -1"),
        ("batch_size = 2", "dropout_p = 1.0", "defaults.dropout_p[0]: expected less than 1; got 1.0"),
        ("batch_size = 2", "variants = ['full']", "defaults.variants: unknown key"),
        ("[16, 32]\n", "[16, 16]\n", "defaults.head_dim: expected each value once; 16 occurs more than once"),
        ("seq_len = [16, 32]", "seq_len = []", "scaling[0].seq_len: expected at least one value; got none"),
        ("seq_len = [16, 32]", "seq_len = [16, -1]", "scaling[0].seq_len[1]: expected at least 1; got -1"),
        ("seq_len = [16, 32]", "seq_len = ['16']", "scaling[0].seq_len[0]: expected an integer; got '16'"),
        ("seq_len = [16, 32]", "seq_len = 100000000000000000000", "scaling[0].seq_len[0]: expected at most"),
        ("seq_len = [16, 32]", "", "scaling[0].seq_len: this key is required"),
        ("seq_len = [16, 32]", "seq_len = 16\npass = 'fwd'", "scaling[0].pass: unknown key; did you mean 'passes'?"),
        ("seq_len = [16, 32]", "seq_len = 16\npasses = 'fw'", "expected one of infer, fwd, bwd, fwd_bwd; got 'fw'"),
        ("seq_len = [16, 32]", "seq_len = 16\nnum_kv_heads = 3", "expected a divisor of num_heads = 8; got 3"),
        ('["full"]', '["ful"]', "scaling[0].variants[0]: unknown variant 'ful'; did you mean 'full'?"),
        ('["full"]', '["full", "full"]', "scaling[0].variants[1]: expected each variant once; 'full' is in this group"),
        ('["full"]', "[3]", "scaling[0].variants[0]: expected a variant's name or a table"),
        (
            '["full"]',
            "[{name = 'full', opts = {}}]",
            "scaling[0].variants[0].opts: unknown key; did you mean 'options'?",
        ),
        ("batch_size = 2", "device = 'gpu'", "expected one of auto, cpu, cuda; got 'gpu'; did you mean 'cuda'?"),
        (
            '["full"]',
            "[{name = 'full', options = {nope = 1}}]",
            "scaling[0].variants[0].options: unknown option 'nope'",
        ),
        (
            '["full"]',
            "[{name = 'full', options = {a = 2020-01-01}}]",
            "expected a string, number, true or false, or a list",
        ),
        (
            '["full"]',
            "['full', {name = 'full', label = 'a/b'}]",
            "scaling[0].variants[1].label: expected up to 40 letters",
        ),
        ("[[scaling]]", "[options.fulll]\n[[scaling]]", "options.fulll: unknown variant 'fulll'"),
        ("[[scaling]]", "[scaling]", "scaling: expected a list of groups, written [[scaling]]"),
        ("[[scaling]]", "[[scalings]]", "scalings: unknown key; did you mean 'scaling'?"),
        ('name = "quick"', "", "name: this key is required"),
        ('name = "quick"', 'name = "../x"', "name: expected up to 64 letters"),
        ('name = "quick"', 'name = "quick"\nsource = "x"', "source: unknown key"),
        ('name = "quick"', 'name = "quick"\nname = "again"', "not valid TOML"),
        ('name = "quick"', "name = quick", "not valid TOML"),
        ('name = "quick"', "\tname = [", "not valid TOML"),
    ],
)
def test_each_mistake_is_named_at_its_place(old, new, expected, tmp_path):
    assert old in GOOD
    assert expected in problems_of(GOOD.replace(old, new), tmp_path)


def test_one_group_where_a_list_is_expected_is_one_problem(tmp_path):
    assert "at least one group" not in problems_of(GOOD.replace("[[scaling]]", "[scaling]"), tmp_path)


def test_all_problems_at_once_and_each_once(tmp_path):
    text = GOOD.replace("batch_size = 2", "batch_size = -2").replace('["full"]', '["ful"]').replace("32]\n", "'x']\n")
    message = problems_of(text, tmp_path)
    lines = message.splitlines()[1:]
    assert len(lines) == len({line.partition(": ")[0] for line in lines})
    assert {line.strip().partition(": ")[0] for line in lines} >= {
        "defaults.batch_size[0]",
        "scaling[0].variants[0]",
        "scaling[0].seq_len[1]",
    }


def test_accuracy_groups_are_checked(tmp_path):
    text = 'name="a"\n[[accuracy]]\nvariants=["full"]\ntask="listop"\nseeds=[-1]\nprotocol="cpu-smal"'
    message = problems_of(text, tmp_path)
    assert "accuracy[0].protocol: unknown protocol 'cpu-smal'; did you mean 'cpu-small'?" in message
    assert "accuracy[0].task: unknown task 'listop'; did you mean 'listops'?" in message
    assert "accuracy[0].seeds[0]: expected at least 0; got -1" in message
    text = 'name="a"\n[[accuracy]]\nvariants=["full"]\ntask="listops"\nlevel="shrt"\nprotocol="cpu-smal"\nseq_len=1'
    message = problems_of(text, tmp_path)
    assert "accuracy[0].level: unknown level" in message
    assert "accuracy[0].protocol: unknown protocol 'cpu-smal'; did you mean 'cpu-small'?" in message
    assert "accuracy[0].seq_len: unknown key" in message
    text = 'name="a"\n[[accuracy]]\nvariants=["full"]\ntask="listops"\n[accuracy.overrides]\nnum_step=3'
    message = problems_of(text, tmp_path)
    assert "accuracy[0].overrides.num_step: unknown field of a protocol; did you mean 'num_steps'?" in message


def test_a_variant_that_occurs_twice_is_told_beside_other_mistakes():
    group = {"variants": ["full", "full", {"name": "full", "label": "f"}], "seq_len": [64, 64]}
    with pytest.raises(ConfigError) as raised:
        parse_matrix({"name": "a", "scaling": [group]}, "a.toml")
    assert [path for path, _ in raised.value.problems] == ["scaling[0].seq_len", "scaling[0].variants[1]"]


def test_repeats_are_for_every_isolation(tmp_path):
    text = """
name = "x"
[[scaling]]
variants = ["full"]
seq_len = 16
repeats = 3
"""
    path = tmp_path / "good.toml"
    for isolation in ("cell", "lane", "interleaved"):
        path.write_text(text + f'isolation = "{isolation}"\n')
        assert scaling_group(load_matrix(path)).repeats == 3
    assert "scaling[0].repeats: expected at least 1; got 0" in problems_of(text.replace("3", "0"), tmp_path)


def test_a_thousand_million_cells_are_refused_before_they_are_made(tmp_path):
    lengths = ", ".join(str(number) for number in range(1, 1001))
    seeds = ", ".join(str(number) for number in range(1000))
    text = GOOD.replace("[16, 32]", f"[{lengths}]") + f"seeds = [{seeds}]\n"
    said = problems_of(text, tmp_path)
    assert "scaling[0]: expected at most 20,000 cells in all; this group alone has 1,000,000,000" in said
    assert "--allow-cells 1000000000 takes them" in said


def test_more_cells_are_taken_where_that_is_said(tmp_path):
    (tmp_path / "a.toml").write_text(GOOD)
    count = load_matrix(tmp_path / "a.toml").num_cells
    with pytest.raises(ConfigError, match=rf"at most {count - 1:,} cells in all.*--allow-cells {count} takes them"):
        load_matrix(tmp_path / "a.toml", allow_cells=count - 1)
    assert load_matrix(tmp_path / "a.toml", allow_cells=count).num_cells == count


def test_one_label_means_one_thing(tmp_path):
    text = GOOD.replace('["full"]', '["linformer", {name = "linformer", options = {proj_len = 3}}]')
    assert "scaling[0].variants[1]: label 'linformer' already means linformer with other" in problems_of(text, tmp_path)
    fine = text.replace('{name = "linformer",', '{name = "linformer", label = "linformer k=3",')
    (tmp_path / "fine.toml").write_text(fine)
    group = scaling_group(load_matrix(tmp_path / "fine.toml"))
    assert [entry.label for entry in group.variants] == ["", "linformer k=3"]


def test_files_that_are_no_matrix(tmp_path):
    for path, expected in (
        (tmp_path, "this is a folder"),
        (tmp_path / "absent.toml", "no such file"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_matrix(path)
    (tmp_path / "quick.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"did you mean 'quick\.toml'"):
        load_matrix(tmp_path / "quik.toml")
    (tmp_path / "marked.toml").write_text(GOOD, encoding="utf-8-sig")  # as Notepad does
    assert load_matrix(tmp_path / "marked.toml").name == "quick"
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"name = 'a'\nx = '\xff'\n")
    with pytest.raises(ConfigError, match=r"expected UTF-8 text; byte 16 \(line 2\)"):
        load_matrix(bad)
    bad.write_bytes(b"a = " + b"[" * 100_000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_matrix(bad)
    bad.write_bytes(b"a = " + b"1" * 10_000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_matrix(bad)
    bad.write_bytes(b"#" * 2_000_000)
    with pytest.raises(ConfigError, match="expected at most 1,000,000 bytes"):
        load_matrix(bad)
    with pytest.raises(ConfigError, match="at least one group"):
        parse_matrix({"name": "empty"}, "x")


ROOT = Path(__file__).parents[3]
PEERS = sorted((ROOT / "benchmarks").glob("peers-*.toml"))  # of variants in plain files
MATRICES = sorted(set((ROOT / "benchmarks").glob("*.toml")) - set(PEERS))


@pytest.mark.parametrize("path", MATRICES, ids=lambda path: path.stem)
def test_the_matrices_of_this_repository_can_be_planned(path):
    matrix = load_matrix(path)
    plan = make_plan(matrix)
    assert matrix.name == path.stem
    assert len(plan.cells) == matrix.num_cells
    # A GPU or data that are not here; and rows that show what a mechanism cannot do.
    assert all(item.refusal is None or item.refusal[0] in {"cuda", "data", "causal"} for item in plan.cells)


def test_the_matrices_of_peers_can_be_planned_with_their_files():
    """In a process of its own, for their names would stay for all other tests."""
    code = """
        import sys
        from pathlib import Path
        from attn_zoo.registry import load_file
        from attn_zoo.matrix.plan.expand import make_plan
        from attn_zoo.matrix.plan.schema import load_matrix
        for path in sorted(Path(sys.argv[1]).with_name("peers").glob("*.py")):
            load_file(path, None)
        for matrix in map(load_matrix, sys.argv[1:]):
            print(len(make_plan(matrix, device="cpu").cells) == matrix.num_cells)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, PEERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["True"] * len(PEERS) != [], done.stderr


def test_there_are_matrices():
    assert {"quick", "scaling-cpu", "scaling-gpu"} <= {path.stem for path in MATRICES}


def test_what_python_has_and_a_file_has_not_is_said_as_a_file_would():
    class Mode(Enum):
        FAST = "fast"

    for value, said in ((Mode.FAST, "got <Mode.FAST: 'fast'>, which a file calls 'fast'"), ({1}, "or a list of these")):
        with pytest.raises(ConfigError, match=said):
            parse_matrix(
                {
                    "name": "x",
                    "options": {"full": {"backend": value}},
                    "scaling": [{"variants": "full", "seq_len": 16}],
                },
                "x",
            )
