"""Side effects are found whatever the variant says of itself, and none outlives the checks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.conformance import run_checks
from attn_zoo.discovery.global_state import changes, read_state, restored
from tests.conformance.broken import Broken, Softmax, registered
from tests.conformance.broken_effects import EFFECTS, STATE, TakesMoreThreads


def plain(self: Softmax, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Any:
    return Softmax.attend(self, query, key, value, key_padding_mask)


@pytest.mark.parametrize("dress", ["exact", "approximate"])
@pytest.mark.parametrize("broken", EFFECTS, ids=lambda broken: broken.name)
def test_is_caught_in_another_dress(broken: Broken, dress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reference of its own it is caught in `test_broken`."""
    monkeypatch.setattr(TakesMoreThreads, "has_taken", False)
    cls: Any = type(broken.cls.__name__, (broken.cls,), {"reference": plain} if dress == "approximate" else {})
    capabilities = {**broken.capabilities, "is_exact": dress == "exact", "causal": True}
    with registered(replace(broken, cls=cls, capabilities=capabilities)) as name:
        before = read_state()
        (result,) = run_checks(name, checks=[broken.check])
    assert result.outcome == "failed", result
    assert changes(before) == {}


class DrawsAnewInTraining(Softmax):
    """As random features that are drawn again after every third step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.num_calls += self.training
        return super().attend(query, key, value * (1 + self.num_calls // 3), mask)


def test_a_module_that_changes_by_calls_in_training_is_blamed_for_that_alone() -> None:
    with registered(Broken(cls=DrawsAnewInTraining, check="")) as name:
        results = run_checks(name, checks=["no_memory", "batch_invariance"])
    assert {result.check: result.outcome for result in results} == {"no_memory": "failed", "batch_invariance": "passed"}


@pytest.mark.parametrize("broken", [each for each in EFFECTS if each.check == STATE], ids=lambda broken: broken.name)
def test_no_fault_spreads_to_other_checks_or_to_the_caller(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TakesMoreThreads, "has_taken", False)
    before = read_state()
    with registered(broken) as name:
        run_checks(name, checks=["shape_and_dtype", "same_seed_same_output"])
    assert changes(before) == {}


def test_what_is_left_behind_is_named_with_both_values() -> None:
    (broken,) = [each for each in EFFECTS if each.name == "broken_sets_the_default_dtype"]
    with registered(broken) as name:
        (result,) = run_checks(name, checks=[STATE])
    assert result.message == "a call changes the default dtype"
    assert result.example.endswith(": float32 to bfloat16")


def test_everything_that_is_watched_is_put_back() -> None:
    before = read_state()
    backends: Any = torch.backends
    deterministic: Any = torch.utils.deterministic
    with restored():
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.autograd.set_detect_anomaly(True)
        deterministic.fill_uninitialized_memory = False
        backends.cudnn.benchmark = True
        backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.rand(1, device="cpu")
        found = set(changes(before))
        assert found >= {
            "the default device",
            "autocast on cpu",
            "anomaly detection",
            "filling of uninitialised memory",
            "cuDNN's benchmark",
            "the precision of matrix products of oneDNN",
            "torch's random generator",
        }
    assert changes(before) == {}


def test_another_kernel_in_the_place_of_torchs_flash_attention_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records name kernels as torch does: that of another in its place would say what did not run."""
    attention: Any = pytest.importorskip("torch.nn.attention._registry", reason="this torch knows no other")
    handle = SimpleNamespace(remove=lambda: None)
    monkeypatch.setitem(attention._FLASH_ATTENTION_IMPLS, "another", lambda: handle)
    before = read_state()
    with restored():
        attention.activate_flash_attention_impl("another")
        assert changes(before) == {"torch's flash attention": "None to another"}
    assert attention.current_flash_attention_impl() is None
