"""Other projects' implementations, wrapped as plain variant files: refused where absent, right where installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = sorted((Path(__file__).parents[1] / "benchmarks" / "peers").glob("*.py"))

# In a process of its own: a registered name would stay for all other tests.
PROGRAM = """
import json, sys
import torch
from attn_zoo import BuildContext, UnsupportedError, build_attention, build_mixer, load_file
from attn_zoo.registry import variants

path, seq_len = sys.argv[1], int(sys.argv[2])
load_file(path)
name = path.rpartition("/")[2].removesuffix(".py")
build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=seq_len)
torch.manual_seed(0)
answer = {"name": name}
try:
    if variants[name].attention is None:
        module, inputs = build_mixer(name, build, proj_len=16), [torch.randn(2, seq_len, 32)]
    else:
        module, inputs = build_attention(name, build), [torch.randn(2, 2, seq_len, 16) for _ in range(3)]
    module.eval()
    with torch.no_grad():
        output = module(*inputs)
        answer["difference"] = float((output - module.reference(*inputs)).abs().max())
        if hasattr(module, "_run"):
            lean = build_attention(name, build, stores_probs=False).eval()
            answer["lean"] = float((output - lean(*inputs)).abs().max())
            answer["explained"] = float((output - module._run(*inputs)[1] @ inputs[2]).abs().max())
except UnsupportedError as error:
    answer["refused"] = error.reason
print(json.dumps(answer))
"""


def ask(path: Path, seq_len: int) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(seq_len)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


PACKAGES = {"linformer_package": "linformer", "huggingface_bigbird": "transformers"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_peer_whose_package_is_absent_says_how_to_get_it(name):
    if importlib.util.find_spec(PACKAGES[name]) is not None:
        pytest.skip(f"{PACKAGES[name]} is installed")
    [path] = [path for path in PEERS if path.stem == name]
    assert "attn-zoo[peers]" in str(ask(path, 64)["refused"])


def test_every_peer_registers_one_variant_named_after_its_file():
    for path in PEERS:
        assert f'"{path.stem}",' in path.read_text()
    assert {path.stem for path in PEERS} >= set(PACKAGES)


def test_the_linformer_package_computes_equation_7():
    pytest.importorskip("linformer")
    [path] = [path for path in PEERS if path.stem == "linformer_package"]
    assert ask(path, 64)["difference"] < 1e-5


def test_taking_the_dense_matrix_from_bigbird_changes_nothing_else():
    pytest.importorskip("transformers")
    [path] = [path for path in PEERS if path.stem == "huggingface_bigbird"]
    assert ask(path, 64 * 12)["lean"] == 0.0
