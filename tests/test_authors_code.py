"""What `benchmarks/authors_code.py` says of files that agree with ours, that do not, and that are not there."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest
import torch

from attn_zoo.tasks.sources import fetch
from benchmarks import authors_code

# As a paper's reader might write it: the definitions that the comparison asks for, with a name from elsewhere.
PLAIN = """
import no_such_package

class FeatureMap(Module):
    def __init__(self, dim):
        super().__init__()

    def forward_queries(self, x):
        return self(x)

    forward_keys = forward_queries

class ActivationFunctionFeatureMap(FeatureMap):
    def forward(self, x):
        return F.elu(x.float()) + 1

elu_feature_map = ActivationFunctionFeatureMap

class {name}(Module):
    def __init__(self, dim: NoSuchType):
        super().__init__()
        self.map = elu_feature_map(dim)

    def forward(self, queries, keys, values, attn_mask, query_lengths, key_lengths):
        keys = self.map.forward_keys(keys) * key_lengths.float_matrix[:, :, None, None]
        weights = torch.einsum("nlhd,nshd->nhls", self.map.forward_queries(queries), keys){mask}
        return torch.einsum("nhls,nshd->nlhd", weights / (weights.sum(-1, keepdim=True) + 1e-6), values)
"""


@pytest.fixture(autouse=True)
def _restored():
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes the files of linear attention, with one thing other, and says where they are."""

    def write(right="", wrong=""):
        for name, known, mask in (
            ("feature map", "Unused", ""),
            ("linear", "LinearAttention", ""),
            ("causal linear", "CausalLinearAttention", ".tril()"),
        ):
            file = authors_code.FILES[name]
            path = tmp_path / file.repository / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(PLAIN.replace("{name}", known).replace("{mask}", mask).replace(right, wrong))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            monkeypatch.setitem(authors_code.FILES, name, file._replace(sha256=digest))
        return ["--from", str(tmp_path), "linear_attention"]

    return write


def test_code_that_agrees(written, capsys):
    assert authors_code.main(written()) == 0
    said = capsys.readouterr().out
    assert "linear_attention  2 " in said
    assert "idiap/fast-transformers" in said
    assert "All are within 1e-12." in said


@pytest.mark.parametrize(
    ("right", "wrong", "cases"),
    [
        (".tril()", ".tril(-1)", ["causal"]),
        ("1e-6", "1e-5", ["bidirectional", "causal"]),
        (" * key_lengths.float_matrix[:, :, None, None]", "", ["bidirectional"]),
        ("values)", "values.detach())", ["bidirectional", "causal"]),  # a gradient alone
    ],
)
def test_code_that_does_not(written, capsys, right, wrong, cases):
    assert authors_code.main(written(right, wrong)) == 1
    said = capsys.readouterr().out
    assert "All are within" not in said
    for case in cases:
        assert f"linear_attention, {case}, padding: output" in said


def refusal(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        authors_code.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_other_bytes_are_not_run(written, capsys):
    arguments = written()
    file = authors_code.FILES["linear"]
    authors_code.FILES["linear"] = file._replace(sha256="0" * 64)
    assert f"other bytes than at {file.commit}" in refusal(arguments, capsys)


def test_a_definition_that_is_gone(written, capsys):
    assert "defines no LinearAttention" in refusal(written("class LinearAttention", "class Linear"), capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["moab"], "unknown mechanism 'moab'; did you mean 'moba'?"),
        (["--from", "no-such-folder", "moba"], "no such file; MoonshotAI/MoBA has it at 61e456b"),
    ],
)
def test_what_is_not_there(capsys, arguments, message):
    assert message in refusal(arguments, capsys)


def test_files_are_fetched_once_and_not_run_when_they_were_edited(written, tmp_path, monkeypatch, capsys):
    written()

    def download(url, path, **_):
        owner, name, _, *place = url.removeprefix("https://raw.githubusercontent.com/").split("/")
        shutil.copy(tmp_path.joinpath(owner, name, *place), path)

    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setenv("ATTN_ZOO_CACHE", str(tmp_path / "cache"))
    for num_fetched in (3, 0):
        assert authors_code.main(["linear_attention"]) == 0
        assert capsys.readouterr().err.count("fetching https://raw.githubusercontent.com/idiap/") == num_fetched
    (edited,) = tmp_path.glob("cache/**/causal_linear_attention.py")
    edited.write_text("raise SystemExit('ran')")
    assert "other bytes than at" in refusal(["linear_attention"], capsys)


def test_documents_name_all_that_are_compared():
    root = Path(__file__).parents[1]
    section = (root / "docs/method.md").read_text(encoding="utf-8").partition("## The code of the authors")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(authors_code.MECHANISMS)
    for name in ("README.md", "CHANGELOG.md"):
        assert f"{len(authors_code.MECHANISMS)} mechanisms" in (root / name).read_text(encoding="utf-8")
