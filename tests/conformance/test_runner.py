"""What `run_checks` gives back: outcomes, messages, minimal examples; and what it never loses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from attn_zoo.conformance import CHECKS, CheckResult, gate, run_checks
from attn_zoo.discovery.global_state import all_digits
from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.matrix.cell.outcomes import outcome_of
from attn_zoo.metadata import Capabilities, Complexity
from attn_zoo.registry import VariantConfig, variants
from tests.conformance.broken import Broken, RaisesBackwards, Softmax, registered
from tests.conformance.broken_dependence import CAUSAL, MASKED, CountsPadding, LeaksOneFutureToken
from tests.conformance.broken_effects import SeedsTorch


class RaisesAtLengthThree(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[-2] == 3:
            raise KeyError("three\nlines\nof text")
        return super().attend(query, key, value, mask)


class EndsTheProcess(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        raise SystemExit(3)


class RefusesWhatItDeclares(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        if build.is_causal:
            raise UnsupportedError("causal", "not today")


class RunsOutOfMemory(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        raise torch.OutOfMemoryError("no room for 3 GiB")


class AsksForTooMuch(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return torch.empty(2**60)


class TwoOptionSets(VariantConfig):
    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        return ({}, {"no_such": 1})


class ThreeOptionSets(VariantConfig):
    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        return ({}, {}, {})


class NoOptionSets(VariantConfig):
    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        return ()


class ForgetsToReturn(VariantConfig):
    def narrow(self, capabilities: Capabilities) -> Any:
        pass

    def claim(self, complexity: Complexity) -> Any:
        pass


class DoublesInTheThirdLayer(Softmax):
    reference = Softmax.forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value)
        return 2.0 * output if self.build.layer_index == 2 else output


def test_fewer_tokens_than_any_block_has_are_refused() -> None:
    with pytest.raises(ValueError, match="max_seq_len: expected at least 64; got 63"):
        run_checks("full", max_seq_len=63)


def only(name: str, check: str) -> CheckResult:
    (result,) = run_checks(name, checks=[check])
    return result


def test_the_example_is_the_smallest_and_says_where() -> None:
    with registered(Broken(cls=LeaksOneFutureToken, check="causality", capabilities=CAUSAL)) as name:
        result = only(name, "causality")
    assert result.outcome == "failed"
    assert "future token" in result.message
    # The leak is from token 4 to output 3, so that five tokens are needed to see it.
    assert result.example.startswith("attention form, causal, B=1 H=2 L=5 ")
    assert "output 3 changed by" in result.example
    assert "token 4 (the future)" in result.example


def test_an_exception_is_a_failure_with_type_message_and_place() -> None:
    with registered(Broken(cls=RaisesAtLengthThree, check="")) as name:
        result = only(name, "batch_invariance")
    assert result.outcome == "failed"
    assert result.message.startswith("KeyError: ")
    assert "three" in result.message
    assert "test_runner.py:" in result.message


def test_a_call_of_sys_exit_is_a_failure_too() -> None:
    with registered(Broken(cls=EndsTheProcess, check="")) as name:
        result = only(name, "shape_and_dtype")
    assert result.outcome == "failed"
    assert result.message.startswith("SystemExit: 3 (test_runner.py:")


def test_of_a_padded_length_that_is_not_promised_to_be_all_the_same_its_share_is_said() -> None:
    for cls, share in ((CountsPadding, r"[1-9][\d.]*"), (Softmax, r"0\.0")):
        with registered(Broken(cls=cls, check="", capabilities=MASKED)) as name:
            result = only(name, "padding_length")
        assert result.outcome == "not_applicable"
        assert re.search(rf"\(is_padding_invariant\): .* changes the output by up to {share}%$", result.message)


def test_what_is_raised_backwards_names_the_call_too() -> None:
    with registered(Broken(cls=RaisesBackwards, check="")) as name:
        result = only(name, "gradients_reach_every_parameter")
    assert result.message.startswith("ValueError: not written yet (broken.py:")
    assert re.fullmatch(r"attention form, B=\d+ H=2 L=\d+ .*, backward", result.example)


def test_running_out_of_memory_is_an_error_not_a_failure() -> None:
    with registered(Broken(cls=RunsOutOfMemory, check="")) as name:
        result = only(name, "shape_and_dtype")
    assert result.outcome == "error"
    assert "no room" in result.message
    assert result.is_bad
    with registered(Broken(cls=AsksForTooMuch, check="")) as name:
        result = only(name, "shape_and_dtype")
        with pytest.raises(MemoryError) as caught:
            gate(name, {}, BuildContext(embed_dim=8, num_heads=2, max_seq_len=64), seq_len=64)
    assert result.outcome == "error"
    assert "you tried to allocate" in result.message
    assert outcome_of(caught.value)[0] == "oom_host"
    assert "an allocation of 4194304 TiB failed" in outcome_of(caught.value)[1]


def test_a_declared_yes_that_is_refused_is_a_failure() -> None:
    with registered(Broken(cls=RefusesWhatItDeclares, check="", capabilities=CAUSAL)) as name:
        result = only(name, "causality")
        assert result.outcome == "failed"
        assert "causal" in result.message
        # Options given by the user may narrow what a variant can do.
        (narrowed,) = run_checks(name, {}, checks=["causality"])
    assert narrowed.outcome == "refused"
    assert narrowed.message == "not today"


def test_a_declared_no_is_refused_with_the_reason() -> None:
    with registered(Broken(cls=Softmax, check="")) as name:
        results = {result.check: result for result in run_checks(name)}
    assert [result.check for result in results.values()] == [check.name for check in CHECKS]
    for check in ("causality", "cross_attention", "grouped_query", "decode", "dropout", "positions", "refusals"):
        assert results[check].outcome == "refused", results[check]
        assert results[check].message
    assert "no causal form" in results["causality"].message
    assert results["converges"].outcome == "not_applicable"
    assert not any(result.is_bad for result in results.values())


def test_unknown_names_say_near_matches() -> None:
    with registered(Broken(cls=Softmax, check="")) as name:
        with pytest.raises(UnknownNameError, match="did you mean 'causality'"):
            run_checks(name, checks=["casuality"])
        with pytest.raises(ConfigError, match="backend"):
            run_checks(name, {"backend": "fast"})
    with pytest.raises(UnknownNameError, match="unknown variant"):
        run_checks(name)


def test_options_that_do_not_fit_the_sizes_are_the_callers_error() -> None:
    with pytest.raises(ConfigError, match="proj_len: expected one rank for each of 1 layers; got 2"):
        run_checks("linformer", {"proj_len": (8, 4)}, checks=["shape_and_dtype"])


def test_no_set_of_options_is_the_set_of_none() -> None:
    with registered(Broken(cls=Softmax, check="", config=NoOptionSets)) as name:
        assert run_checks(name, checks=["shape_and_dtype"])[0].outcome == "passed"


def test_what_forgets_to_return_is_named() -> None:
    with registered(Broken(cls=Softmax, check="", config=ForgetsToReturn)) as name:
        with pytest.raises(ConfigError, match=f"{name}: narrow: expected to return Capabilities; got None"):
            run_checks(name)
        with pytest.raises(ConfigError, match=f"{name}: claim: expected to return Complexity; got None"):
            variants[name].complexity_of(ForgetsToReturn())


@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("multiple", [128, 256])
def test_multiples_as_long_as_the_longest_sequence_are_checked(multiple: int, is_free: bool) -> None:
    capabilities = {"seq_len_multiple": multiple, "variable_seq_len": is_free}
    with registered(Broken(cls=Softmax, check="", capabilities=capabilities)) as name:
        found = run_checks(name, checks=["shape_and_dtype", "odd_lengths", "positions", "refusals", "batch_invariance"])
        assert [result for result in found if result.is_bad] == []


def test_check_options_that_do_not_exist_are_the_authors_error() -> None:
    with registered(Broken(cls=Softmax, check="", config=TwoOptionSets)) as name, pytest.raises(ConfigError):
        run_checks(name, checks=["causality"])


def test_running_checks_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with registered(Broken(cls=Softmax, check="")) as name:
        run_checks(name, checks=["dropout", "batch_invariance", "same_seed_same_output"])
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_that_the_generator_has_already_is_seen_all_the_same() -> None:
    with torch.random.fork_rng(devices=[]), registered(Broken(cls=SeedsTorch, check="")) as name:
        torch.manual_seed(0)  # what it does itself
        assert only(name, "global_state").outcome == "failed"


def test_float32_is_checked_with_all_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for cuDNN, which by torch's default rounds what a convolution multiplies to TF32's ten bits."""
    plain = torch.nn.Conv1d.forward

    def by_cudnn(conv: torch.nn.Conv1d, tokens: Tensor) -> Tensor:
        if tokens.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
            rounded = ((tokens.detach().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
            tokens = tokens + (rounded - tokens.detach())
        return plain(conv, tokens)

    monkeypatch.setattr(torch.nn.Conv1d, "forward", by_cudnn)
    assert torch.backends.cudnn.allow_tf32
    [result] = run_checks("word_convolution", checks=["matches_reference"])
    assert result.outcome == "passed", result.message
    assert torch.backends.cudnn.allow_tf32, "what the process is set to comes back"
    cudnn: Any = torch.backends.cudnn
    cudnn.rnn.fp32_precision = "ieee"  # by somebody who knows why; torch then refuses to name one for both
    try:
        with all_digits():
            assert cudnn.conv.fp32_precision == "tf32"
    finally:
        cudnn.rnn.fp32_precision = "tf32"


def test_every_check_says_what_it_promises() -> None:
    for check in CHECKS:
        assert check.summary
        assert not check.summary.endswith(".")
        assert check.summary[0].islower() or check.summary[0].isdigit() or check.summary.startswith("FLOPs")


def test_each_set_of_options_is_checked_one_layer_deeper() -> None:
    with registered(Broken(cls=DoublesInTheThirdLayer, check="", config=ThreeOptionSets)) as name:
        result = only(name, "matches_reference")
        (at_the_first_layer,) = run_checks(name, {}, checks=["matches_reference"])
    assert result.outcome == "failed"
    assert at_the_first_layer.outcome == "passed"


def test_whoever_waits_is_told_which_check_runs():
    told: list[str] = []

    @contextmanager
    def around(text: str) -> Iterator[None]:
        told.append(text)
        yield
        told.append("done")

    run_checks("full", checks=["causality", "modes"], around=around)
    assert told == ["[1/2] causality", "done", "[2/2] modes", "done"]
