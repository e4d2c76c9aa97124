"""Our Triton kernels compile for Hopper without a card: products on tensor cores, hardly spills, within its memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest

triton = pytest.importorskip("triton", reason="the package triton is not installed")

pytestmark = pytest.mark.triton

SHARED_BYTES = 227 * 1024  # of a multiprocessor of sm_90, for one program
FLAGS = ("is_causal", "is_ragged", "has_batch_tables", "has_padding", "has_slopes", "has_dropout", "has_grad_lse")
NO_RULE = {"reach": -1, "dilation": 1, "stride": 0, "num_global_tokens": 0}
RULE = {"reach": 40, "dilation": 3, "stride": 64, "num_global_tokens": 5}
TOKENS = {"query", "key", "value", "output", "grad_output", "grad_query", "grad_key", "grad_value", "centred", "kept"}
FLOATS = {"lse", "grad_lse", "part", "workspace", "sums", "weights"}
TABLES = {"indices", "counts", "rows", "row_starts"}
OTHERS = {"padding": "*u8", "slopes": "*fp32", "seed": "*i64", "keep_scale": "fp32", "scale": "fp32"}
OPTIONAL = {"padding": "has_padding", "slopes": "has_slopes", "seed": "has_dropout", "grad_lse": "has_grad_lse"}
ALIGNED = [["tt.divisibility", 16]]


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], options: dict[str, int]) -> Any:
    """Compile a kernel for sm_90 as a launch would: tensors and strides aligned, sizes of any kind."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attn_zoo.kernels.blocks.triton.addressing import Strides

    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[place,] = "constexpr", constants[name]
        elif name in TOKENS:
            signature[name], attributes[place,] = f"*{dtype}", ALIGNED
        elif name.endswith("_strides"):
            signature[name] = Strides("i32", "i32", "constexpr")  # type: ignore[arg-type]
            attributes |= {(place, part): ALIGNED for part in range(2)}
            fixed[place, 2] = constants["head_dim"]  # heads one after another
        elif name in FLOATS | TABLES:
            signature[name] = "*fp32" if name in FLOATS else "*i32"
            attributes[place,] = ALIGNED
        else:
            signature[name] = OTHERS.get(name, "i32")
            if name.endswith("_at"):  # where something begins in the workspace
                attributes[place,] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(built: Any, tmp_path: Path) -> int:
    """Ask the assembler that comes with triton."""
    source = tmp_path / "kernel.ptx"
    source.write_text(built.asm["ptx"])
    from triton.backends.nvidia.compiler import get_ptxas  # there are several, and not all read this PTX

    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    stores = re.search(r"(\d+) bytes spill stores", said)
    assert stores is not None, said
    return int(stores[1])


def build(
    name: Literal["forward", "query_gradient", "key_gradient"],
    head_dim: int,
    flags: tuple[str, ...],
    *,
    dtype: str = "bf16",
    block_size: int = 64,
) -> Any:
    from attn_zoo.kernels.blocks.triton.forward import forward_kernel
    from attn_zoo.kernels.blocks.triton.key_gradient import key_gradient_kernel
    from attn_zoo.kernels.blocks.triton.launch import tiles_of
    from attn_zoo.kernels.blocks.triton.query_gradient import query_gradient_kernel

    kernels = {"forward": forward_kernel, "query_gradient": query_gradient_kernel, "key_gradient": key_gradient_kernel}
    tiles = tiles_of(name, block_size, head_dim, 4 if dtype == "fp32" else 2)
    constants: dict[str, Any] = {
        "block_size": block_size,
        "block_m": tiles.block_m,
        "block_n": tiles.block_n,
        "head_dim": head_dim,
        **(RULE if "rule" in flags else NO_RULE),
        **{flag: flag in flags for flag in FLAGS},
    }
    constants |= {name: None for name, flag in OPTIONAL.items() if flag not in flags}
    constants = {key: value for key, value in constants.items() if key in kernels[name].arg_names}
    options = tiles.options(takes_registers=bool(flags))
    return compiled(kernels[name], dtype, constants, options)


@pytest.mark.parametrize("name", ["forward", "query_gradient", "key_gradient"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("flags", [(), ("is_causal",), ("has_dropout",)], ids=lambda f: "+".join(f) or "plain")
def test_it_compiles_for_hopper(name: Any, head_dim: int, flags: tuple[str, ...], tmp_path: Path):
    built = build(name, head_dim, flags)
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert "mma.sync" not in built.asm["ptx"]
    assert "cp.async" in built.asm["ptx"]  # keys and values are loaded ahead
    assert built.metadata.shared <= SHARED_BYTES
    if not (head_dim == 128 and flags):  # two loops of one kernel, one of them a step long, share the registers
        # Where a limit lets one more program stay, a few spills cost less than it gains (benchmarks/NOTES.md).
        assert spilled_bytes(built, tmp_path) <= (96 if head_dim == 64 and not flags else 0)


@pytest.mark.parametrize("name", ["forward", "query_gradient", "key_gradient"])
@pytest.mark.parametrize("flags", [("has_padding",), ("rule",)], ids=["padding", "rule"])
def test_two_programs_share_a_multiprocessor_where_every_tile_is_masked(name: Any, flags: tuple[str, ...]):
    assert build(name, 128, flags).metadata.shared <= SHARED_BYTES // 2 - 1024  # which each program reserves


@pytest.mark.parametrize("name", ["forward", "query_gradient", "key_gradient"])
@pytest.mark.parametrize(("dtype", "block_size", "head_dim"), [("fp32", 64, 32), ("fp16", 128, 64)])
def test_other_kinds_compile(name: Any, dtype: str, block_size: int, head_dim: int, tmp_path: Path):
    flags = (*FLAGS, "rule") if dtype == "fp16" else ()
    built = build(name, head_dim, flags, dtype=dtype, block_size=block_size)
    assert built.metadata.shared <= SHARED_BYTES


def test_small_kernels_compile(tmp_path: Path):
    from attn_zoo.kernels.blocks.triton.stretches import add_up_kernel, merge_kernel

    for kernel in (merge_kernel, add_up_kernel):
        built = compiled(kernel, "bf16", {"block_m": 16, "head_dim": 64}, {"num_warps": 4})
        assert spilled_bytes(built, tmp_path) == 0
