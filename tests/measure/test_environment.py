"""What is recorded of the machine, and above all what is not."""

from __future__ import annotations

import getpass
import itertools
import platform
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attn_zoo.measure import energy, environment
from attn_zoo.measure.environment import capture_environment
from attn_zoo.records import Environment


def test_a_capture_is_complete_and_storable():
    captured = capture_environment()
    assert captured.cpu
    assert captured.num_cores >= 1
    assert captured.memory_bytes > 2**28
    assert captured.threads >= 1
    assert captured.versions["python"] == platform.python_version()
    assert {"torch", "numpy", "scipy"} <= set(captured.versions)
    assert Environment.from_dict(captured.to_dict()) == captured
    assert capture_environment().digest == captured.digest


def test_nothing_leads_to_a_person_or_a_place(monkeypatch):
    monkeypatch.setenv("ATTN_ZOO_DATA", str(Path.home() / "data"))
    monkeypatch.setenv("PYTORCH_KERNEL_CACHE_PATH", "/somewhere")
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    text = capture_environment().to_json()
    assert platform.node() not in text.replace(platform.release(), "")
    assert getpass.getuser() not in text
    assert str(Path.home()) not in text
    assert "somewhere" not in text
    assert "SECRET" not in text


def test_a_cudnn_that_torch_refuses_is_told_and_ends_nothing(monkeypatch):
    def refuse():
        raise RuntimeError(
            "cuDNN version incompatibility: compiled against (9, 19, 0). One option to resolve this is ..."
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert environment._versions()["cudnn"] == "cuDNN version incompatibility: compiled against (9, 19, 0)"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert environment._versions()["cudnn"] == "91900"


def test_the_power_that_a_gpu_is_held_to_is_recorded(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H100", total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)  # that of a CUDA build would ask the card
    monkeypatch.setattr(energy, "power_limit_w", lambda device: 700.0 if str(device) == "cuda:0" else None)
    assert capture_environment().gpu_power_limit_w == 700.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert capture_environment().gpu_power_limit_w is None


def test_variables_come_from_an_allow_list_without_paths():
    environ = {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TRITON_CACHE_DIR": "/tmp/cache",
        "ATTN_ZOO_FILE": "C:\\data",
        "ATTN_ZOO_HOME": "~",
        "MKL_LONG": "x" * 1000,
        "HOME": "here",
        "PATH": "there",
    }
    assert environment._variables(environ) == {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "350000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "9900000 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "200000"}, 64),
    ],
)
def test_threads_are_no_more_than_the_share_of_a_container(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(environment, "_CGROUPS", tmp_path)
    monkeypatch.setattr(environment, "_bound_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert environment.num_cores() == cores
    started_with = environment.measuring_variables({"HOME": "here"})
    assert started_with.get("OMP_NUM_THREADS") == started_with.get("MKL_NUM_THREADS")
    assert started_with.get("OMP_NUM_THREADS") == (str(cores) if cores < 64 else None)
    captured = capture_environment()
    assert (captured.num_cores, captured.threads) == (cores, min(cores, 32))
    for name, other in itertools.permutations(("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        own = environment.measuring_variables({name: "9"})
        assert (own[name], other in own) == ("9", False), "whoever says so knows"
        with monkeypatch.context() as patch:
            patch.setenv(name, "32")
            assert capture_environment().threads == 32


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def git(*command: str) -> None:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.com"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git("init")
    git("add", "package")
    git("commit", "-m", "first", "--no-verify")
    return package


def test_commit_and_changes_of_tracked_sources(checkout):
    commit, is_dirty = environment._commit(checkout)
    assert len(commit) == 40
    assert not is_dirty
    (checkout.parent / "elsewhere.txt").write_text("x")  # outside the package: does not change what runs
    assert environment._commit(checkout) == (commit, False)
    (checkout / "__init__.py").write_text("changed")
    assert environment._commit(checkout) == (commit, True)


def test_an_installed_copy_inside_a_checkout_has_no_commit(checkout):
    installed = checkout.parent / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert environment._commit(installed) == ("", False)


def test_no_git_no_commit(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment._commit(tmp_path) == ("", False)
    monkeypatch.setenv("PATH", "")
    assert environment._commit(tmp_path) == ("", False)
