"""Rooflines by arithmetic, and the guard against measurements faster than the hardware."""

from __future__ import annotations

import pytest
import torch

from attn_zoo.measure import ceilings
from attn_zoo.measure.ceilings import exceeds_physical, measure_ceilings, peak_of
from attn_zoo.records import Ceilings

ROOF = Ceilings(device="cpu", dtype="float32", matmul_flops_per_s=100.0, copy_bytes_per_s=10.0)


def test_the_larger_of_the_two_floors_is_the_roof():
    assert ROOF.floor_s(200.0, 1.0) == 2.0  # compute bound
    assert ROOF.floor_s(1.0, 30.0) == 3.0  # memory bound


def test_ceilings_survive_json_and_know_their_subject():
    roof = Ceilings(
        device="cuda", dtype="bfloat16", matmul_flops_per_s=1.0, copy_bytes_per_s=2.0, clocks_mhz=(1.0, 2.0)
    )
    assert Ceilings.from_dict(roof.to_dict()) == roof
    assert roof.subject == ("", "cuda", "bfloat16", None)


def test_known_devices_have_a_peak_and_others_none():
    h200 = peak_of("NVIDIA H200")
    h100 = peak_of("NVIDIA H100 80GB HBM3")
    assert h200 is not None
    assert h100 is not None
    assert h200.bytes_per_s > h100.bytes_per_s
    assert h200.flops_per_s["bfloat16"] == pytest.approx(989.5e12)
    assert h100.flops_per_s["float32"] < h100.flops_per_s["tf32"] / 5
    pcie = peak_of("NVIDIA H100 PCIe")
    assert pcie is not None
    assert pcie.flops_per_s["bfloat16"] < h100.flops_per_s["bfloat16"]
    assert peak_of("NVIDIA A100-SXM4-80GB") is not None
    for other, sxm in (("NVIDIA H200 NVL", "NVIDIA H200"), ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB")):
        assert peak_of(other) not in (None, peak_of(sxm))
    assert peak_of("NVIDIA GH200 480GB") is None, "not the sheet of another GPU whose name is part of its own"
    assert peak_of("NVIDIA GeForce RTX 2070") is None
    assert peak_of(None) is None


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA H200 MIG 1g.18gb+me",
        "NVIDIA H100-20C",
        "GRID A100-4-20C",
        "NVIDIA A100-1-5CME",
    ],
)
def test_a_part_of_a_card_has_not_its_sheet(name):
    assert peak_of(name) is None
    assert exceeds_physical(name, "bfloat16", 1e-3, flops=1100e9) is None


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL"]
)
def test_a_dash_alone_makes_no_part(name):
    assert peak_of(name) is not None


def test_the_guard_accuses_only_the_impossible():
    name = "NVIDIA H200"
    assert exceeds_physical(name, "bfloat16", 1e-3, flops=900e9) is None
    message = exceeds_physical(name, "bfloat16", 1e-3, flops=1100e9)
    assert message == "1100 TFLOP/s is above the peak of NVIDIA H200 (990 in bfloat16)"
    assert exceeds_physical(name, "float32", 1e-3, flops=600e9) is not None
    assert exceeds_physical(name, "float8", 1e-3, flops=1e15) is None  # no figure, no verdict
    assert exceeds_physical(name, "bfloat16", 1e-3, num_bytes=4.7e9) is None
    assert exceeds_physical(name, "bfloat16", 1e-3, num_bytes=5.0e9) == (
        "5.0 TB/s is above the memory bandwidth of NVIDIA H200 (4.80)"
    )
    assert exceeds_physical(name, "bfloat16", 1e-6, num_bytes=6.0e6) is None  # may come from a cache
    assert exceeds_physical("some CPU", "float32", 1e-9, flops=1e15, num_bytes=1e15) is None


def test_measured_ceilings_are_within_what_computers_do(monkeypatch):
    monkeypatch.setitem(ceilings._MATMUL_DIM, "cpu", 256)
    monkeypatch.setitem(ceilings._COPY_BYTES, "cpu", 4 * 2**20)
    measured = measure_ceilings("cpu", ["float32", "float64"], budget_s=0.02)
    assert [(one.device, one.dtype) for one in measured] == [("cpu", "float32"), ("cpu", "float64")]
    for one in measured:
        assert 1e8 < one.matmul_flops_per_s < 1e15
        assert 1e8 < one.copy_bytes_per_s < 1e13
        assert one.peak_flops_per_s is None
    assert measured[0].copy_bytes_per_s == measured[1].copy_bytes_per_s, "one copy for all dtypes"


@pytest.mark.parametrize(
    ("precision", "override", "is_tf32"),
    [("highest", "", False), ("high", "", True), ("medium", "", True), ("high", "0", False)],
)
def test_whether_float32_rounds_to_tf32_is_what_torch_and_the_environment_allow(
    monkeypatch, precision, override, is_tf32
):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert ceilings._rounds_to_tf32() is is_tf32


def test_a_dtype_without_a_fast_product_is_measured_on_a_smaller_one(monkeypatch):
    """The time of a product is invented: 10 ms at 256, so that 1024 would take longer than the budget allows."""
    sizes = []

    def best_s(call, _device, _budget_s):
        dim = call.args[0].shape[0]
        sizes.append(dim)
        return 0.010 * (dim / 256) ** 3

    monkeypatch.setattr(ceilings, "_best_s", best_s)
    rate = ceilings._matmul_rate(torch.device("cpu"), torch.float32, 0.3)
    assert sizes == [256, 512, 512]
    assert rate == pytest.approx(2 * 256**3 / 0.010)


@pytest.mark.gpu
def test_gpu_ceilings_stay_below_the_data_sheet():
    (measured,) = measure_ceilings("cuda", ["bfloat16"])
    peak = peak_of(torch.cuda.get_device_name())
    if peak is None:
        pytest.skip("no data sheet of this GPU")
    assert measured.peak_flops_per_s == peak.flops_per_s["bfloat16"]
    assert 0.3 < measured.matmul_flops_per_s / peak.flops_per_s["bfloat16"] < 1
    assert 0.3 < measured.copy_bytes_per_s / peak.bytes_per_s < 1
