"""Compiled code of one kind of processor is not taken by another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from attn_zoo.kernels import compiled_code
from attn_zoo.kernels.compiled_code import keep_compiled_code_apart, keep_vectors_short, short_vectors_for

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def own_variables(monkeypatch, tmp_path_factory):
    monkeypatch.setenv(VARIABLE, str(tmp_path_factory.mktemp("cache")))  # set, so that it is put back
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)


def chosen(where: Path | None) -> Path:
    if where is None:
        del os.environ[VARIABLE]
    else:
        os.environ[VARIABLE] = str(where)
    keep_compiled_code_apart()
    return Path(os.environ[VARIABLE])


def test_a_folder_inside_the_users_that_stays(tmp_path: Path):
    folder = chosen(tmp_path)
    assert folder.parent == tmp_path
    assert chosen(folder) == folder, "a child, or a second call, takes the same"
    assert chosen(None).name == folder.name


def test_each_kind_of_processor_has_its_own(tmp_path: Path, monkeypatch):
    wide = chosen(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    narrow = chosen(tmp_path)
    monkeypatch.setattr(compiled_code, "_instructions", lambda: "flags: sse2")
    assert len({wide, narrow, chosen(tmp_path)}) == 3
    assert chosen(wide).parent == wide, "a variable that came from another node"


def test_what_changes_from_boot_to_boot_does_not_count(monkeypatch):
    def describe(mhz: str, flags: str) -> str:
        text = f"processor\t: 0\nvendor_id\t: A\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n\nprocessor\t: 1\n"
        monkeypatch.setattr(Path, "read_text", lambda _: text)
        return compiled_code._instructions()

    assert describe("1000", "fma avx2") == describe("2000", "fma avx2") != describe("1000", "fma")
    assert "1000" not in describe("1000", "fma")


def test_no_cpuinfo_is_no_error(monkeypatch):
    def fail(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    assert compiled_code._instructions()


# --- vectors ---


@pytest.fixture
def config(tmp_path: Path):
    from torch._inductor import config

    os.environ[VARIABLE] = str(tmp_path)
    with config.patch({"cpp.simdlen": None, "cpp_cache_precompile_headers": False}):
        yield config


def test_products_of_16_bit_keys_are_right_and_compiled_in_that_folder_alone(config, tmp_path: Path):
    """On a processor with AVX-512 they were NaN. In torch's own folder AVX2 would find that code, and take it."""
    folder = chosen(tmp_path)
    keep_vectors_short()
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, n, 2, 32, generator=generator).bfloat16().transpose(1, 2) for n in (24, 256))

    def scores(query: torch.Tensor, key: torch.Tensor) -> list[torch.Tensor]:
        return [(rows.float() * 0.5) @ key.float().mT for rows in query.split(12, 2)]

    try:
        found = torch.compile(scores)(query, key)
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(found, scores(query, key))
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.rglob("*.so"))


@pytest.mark.parametrize(
    ("capability", "given", "wanted"), [("AVX512", None, 256), ("AVX512", 512, 512), ("AVX2", None, None)]
)
def test_only_what_is_wrong_is_changed(config, monkeypatch, capability, given, wanted):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    config.cpp.simdlen = given
    keep_vectors_short()
    assert config.cpp.simdlen == wanted


@pytest.mark.parametrize(
    ("dtype", "given", "wanted"),
    [
        (torch.bfloat16, None, 256),
        (torch.float16, None, 256),
        (torch.float16, 512, 512),
        (torch.float32, None, None),
        (torch.float32, 512, 512),
    ],
)
def test_for_a_type_it_is_changed_inside_only(config, monkeypatch, dtype, given, wanted):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    config.cpp.simdlen = given
    with short_vectors_for(dtype):
        assert config.cpp.simdlen == wanted
    assert config.cpp.simdlen == given
