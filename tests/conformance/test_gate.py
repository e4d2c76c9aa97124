"""The gate: quick, in the working dtype and the cell's own context, and it stops what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import attn_zoo
from attn_zoo.attention import BuildContext
from attn_zoo.conformance import GATE_CHECKS, gate, gate_model
from attn_zoo.conformance.gate import SPAN_LEN
from attn_zoo.errors import ConfigError, GateError, UnknownNameError, UnsupportedError
from attn_zoo.metadata import Form
from attn_zoo.registry import VariantConfig, variants
from tests.conformance.broken import Broken, RaisesBackwards, Softmax, registered, written_out
from tests.conformance.broken_claims import WrongScaleInFloat32
from tests.conformance.broken_dependence import (
    CAUSAL,
    MASKED,
    DetachesKey,
    LeaksByNormalising,
    LosesHalfAGradient,
    MixesBatch,
    ReadsPadding,
    SoundDropout,
)
from tests.conformance.broken_modes import MODES, WithReference


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RichConfig(VariantConfig):
    size: int = 4
    inner: Inner = Inner()
    half: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "half", self.size // 2)


HALF = {"dtypes": ("float32", "bfloat16")}
HALF_TOO = {"dtypes": ("float64", "float32", "bfloat16")}


def build(*, is_causal: bool = False, max_seq_len: int = 256) -> BuildContext:
    return BuildContext(embed_dim=32, num_heads=2, max_seq_len=max_seq_len, is_causal=is_causal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", attn_zoo.list_variants())
def test_lets_sound_variants_pass(name: str, dtype: str) -> None:
    capabilities = attn_zoo.describe(name).capabilities
    for is_causal in [False] * capabilities.bidirectional + [True] * bool(capabilities.causal):
        held = gate(name, {}, build(is_causal=is_causal), dtype=dtype, seq_len=256)
        assert {"shape_and_dtype", "batch_invariance"} <= set(held) <= set(GATE_CHECKS)
        assert ("causality" in held) == is_causal
        assert ("padding_content" in held) == capabilities.key_padding_mask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("broken", "is_causal"),
    [
        (Broken(cls=LeaksByNormalising, check="causality", capabilities={**CAUSAL, **HALF}), True),
        (Broken(cls=ReadsPadding, check="padding_content", capabilities={**MASKED, **HALF}), False),
        (Broken(cls=MixesBatch, check="batch_invariance", capabilities=HALF), False),
    ],
    ids=lambda value: getattr(value, "check", None),
)
def test_stops_broken_variants_by_name(broken: Broken, is_causal: bool, dtype: str) -> None:
    with registered(broken) as name, pytest.raises(GateError) as raised:
        gate(name, {}, build(is_causal=is_causal), dtype=dtype, seq_len=256)
    assert raised.value.check == broken.check
    assert dtype in str(raised.value)
    assert name in str(raised.value)


class Raises(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        raise ValueError("not written yet")


@pytest.mark.parametrize(
    ("cls", "check"), [(Raises, "shape_and_dtype"), (RaisesBackwards, "gradients_reach_every_parameter")]
)
def test_what_raises_is_stopped_by_a_check_of_what_raised(cls: type[Softmax], check: str) -> None:
    with registered(Broken(cls=cls, check="")) as name:
        for _ in range(2):  # also where the verdict is remembered
            with pytest.raises(GateError, match=f"{check}: {name}: ValueError: not written yet"):
                gate(name, {}, build(), seq_len=256, is_training=True)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("cls", [broken.cls for broken in MODES], ids=lambda cls: cls.__name__)
def test_stops_what_computes_less_as_it_is_timed(cls: type[Softmax], is_training: bool, is_exact: bool) -> None:
    broken = Broken(cls=cls, check="", capabilities={**HALF_TOO, "is_exact": is_exact})
    with registered(broken) as name, pytest.raises(GateError):
        gate(name, {}, build(), dtype="bfloat16", seq_len=256, is_training=is_training)


@pytest.mark.parametrize("cls", [DetachesKey, LosesHalfAGradient])
@pytest.mark.parametrize("form", ["attention", "mixer"])
def test_stops_wrong_gradients_that_no_reference_shows(cls: type[Softmax], form: Form) -> None:
    with registered(Broken(cls=cls, check="", capabilities=HALF_TOO)) as name:
        assert "modes" in gate(name, {}, build(), seq_len=256, form=form)
        for dtype in ("float32", "bfloat16"):
            with pytest.raises(GateError, match="gradients_reach_every_parameter"):
                gate(name, {}, build(), dtype=dtype, seq_len=256, form=form, is_training=True)


class DropsInEveryMode(Softmax):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return nn.functional.dropout(super().weights(scores, keep), self.build.dropout_p, training=True)


class NeverDrops(Softmax):
    pass


@pytest.mark.parametrize("cls", [DropsInEveryMode, NeverDrops])
def test_dropout_of_a_cell_is_checked_where_it_acts(cls: type[Softmax]) -> None:
    context = replace(build(), dropout_p=0.1)
    with registered(Broken(cls=cls, check="", capabilities={"attention_dropout": True})) as name:
        assert "dropout" not in gate(name, {}, build(), seq_len=64, is_training=True)
        with pytest.raises(GateError, match="dropout"):
            gate(name, {}, context, seq_len=64, is_training=True)


class DropsWithAnotherScale(SoundDropout):
    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        is_dropping = self.training and self.build.dropout_p > 0
        return super().weights(scores * 1.1 if is_dropping else scores, keep)


class DropsInAWindow(SoundDropout):
    """The short calls that are compared with the mean of many draws see no difference."""

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep, position = super().keep(query, key, mask), torch.arange(query.shape[-2])
        if not (self.training and self.build.dropout_p):
            return keep
        near = (position[:, None] - position).abs() < 32
        return near if keep is None else near & keep


class DropsWithoutAKeyGradient(SoundDropout):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        is_dropping = self.training and self.build.dropout_p > 0
        return super().attend(query, key.detach() if is_dropping else key, value, mask)


@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cls", [DropsWithAnotherScale, DropsInAWindow, DropsWithoutAKeyGradient])
def test_what_a_path_with_dropout_computes_is_compared(cls: type[Softmax], dtype: str, has_reference: bool) -> None:
    twisted = type(cls.__name__, (cls,), {"reference": written_out} if has_reference else {})
    capabilities = {**HALF_TOO, "attention_dropout": True}
    with registered(Broken(cls=twisted, check="", capabilities=capabilities)) as name:
        gate(name, {}, build(), dtype=dtype, seq_len=256, is_training=True)
        with pytest.raises(GateError, match="in training with dropout_p=9e-19, which should drop nothing") as raised:
            gate(name, {}, replace(build(), dropout_p=0.1), dtype=dtype, seq_len=256, is_training=True)
        assert raised.value.check in {"matches_reference", "gradients_reach_every_parameter", "modes"}


class DropsByDrawsOfItsOwn(SoundDropout):
    """Of bfloat16 numbers one in 256 is zero, and is dropped at any probability."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        weights, dropout_p = Softmax.weights(self, scores, keep), self.build.dropout_p
        if not (self.training and dropout_p):
            return weights
        return weights * (torch.rand_like(weights) >= dropout_p) / (1 - dropout_p)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_that_is_written_out_is_not_blamed_for_draws_of_zero(dtype: str) -> None:
    twisted = type("DropsByDrawsOfItsOwn", (DropsByDrawsOfItsOwn,), {"reference": written_out})
    with registered(Broken(cls=twisted, check="", capabilities={**HALF_TOO, "attention_dropout": True})) as name:
        gate(name, {}, replace(build(), dropout_p=0.1), dtype=dtype, seq_len=256, is_training=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", attn_zoo.list_variants(attention_dropout=True))
def test_sound_dropout_passes(name: str, dtype: str) -> None:
    context = replace(build(is_causal=not variants[name].capabilities.bidirectional), dropout_p=0.1)
    assert "dropout" in gate(name, {}, context, dtype=dtype, seq_len=256, is_training=True)


def test_works_in_the_dtype_of_the_cell() -> None:
    with registered(Broken(cls=WrongScaleInFloat32, check="")) as name:
        gate(name, {}, build(), dtype="float64", seq_len=64)
        with pytest.raises(GateError, match="matches_reference"):
            gate(name, {}, build(), dtype="float32", seq_len=64)


def test_refusals_are_not_failures() -> None:
    with registered(Broken(cls=Softmax, check="")) as name:
        with pytest.raises(UnsupportedError, match="no causal form"):
            gate(name, {}, build(is_causal=True), seq_len=64)
        with pytest.raises(UnsupportedError, match="float16"):
            gate(name, {}, build(), dtype="float16", seq_len=64)
        with pytest.raises(ConfigError, match="unknown option"):
            gate(name, {"window_size": 3}, build(), seq_len=64)
        with pytest.raises(ValueError, match="max_seq_len"):
            gate(name, {}, build(max_seq_len=64), seq_len=65)
    with pytest.raises(UnknownNameError):
        gate(name, {}, build(), seq_len=64)


@pytest.mark.parametrize(
    ("name", "seq_len", "dtype"),
    [
        (name, seq_len, dtype)
        for seq_len, dtype in ((1, "float32"), (1, "float16"), (2, "float16"), (9, "float32"))
        for name in attn_zoo.list_variants(dtypes=dtype)
    ],
)
def test_short_cells_are_gated_too(name: str, seq_len: int, dtype: str) -> None:
    is_causal = bool(attn_zoo.describe(name).capabilities.causal)
    forms: list[Form] = ["mixer"] if variants[name].attention is None else ["attention", "mixer"]
    for form in forms:
        held = gate(name, {}, build(is_causal=is_causal, max_seq_len=9), dtype=dtype, seq_len=seq_len, form=form)
        assert "matches_reference" in held


def test_a_gate_that_held_is_not_repeated_for_a_longer_cell() -> None:
    class Counts(Softmax):
        num_calls: ClassVar[int] = 0

        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            Counts.num_calls += 1
            return super().attend(query, key, value, mask)

    with registered(Broken(cls=Counts, check="")) as name:
        first = gate(name, {}, build(max_seq_len=1024), seq_len=1024)
        calls = Counts.num_calls
        assert calls > 0
        assert gate(name, {}, build(max_seq_len=65536), seq_len=65536) == first
        assert Counts.num_calls == calls
        gate(name, {}, build(max_seq_len=65536), dtype="float64", seq_len=65536)
        assert Counts.num_calls > calls


def test_at_another_short_length_only_what_depends_on_it_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongWhenLong(Softmax):
        lengths: ClassVar[list[int]] = []
        is_wrong: ClassVar[bool] = False

        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            WrongWhenLong.lengths.append(query.shape[-2])
            output = super().attend(query, key, value, mask)
            return output * 2 if WrongWhenLong.is_wrong and query.shape[-2] > 512 else output

        def reference(
            self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
        ) -> Tensor:
            return Softmax.attend(self, query, key, value, key_padding_mask)

    with registered(Broken(cls=WrongWhenLong, check="")) as name:
        first = gate(name, {}, build(max_seq_len=512), seq_len=512)
        calls = len(WrongWhenLong.lengths)
        assert gate(name, {}, build(max_seq_len=1024), seq_len=1024) == first
        again = WrongWhenLong.lengths[calls:]
        assert SPAN_LEN in again
        assert len(again) < calls / 2
    WrongWhenLong.is_wrong = True
    monkeypatch.setattr("attn_zoo.conformance.verdicts._verdicts", {})
    with registered(Broken(cls=WrongWhenLong, check="")) as name:
        gate(name, {}, build(max_seq_len=300), seq_len=300)
        with pytest.raises(GateError, match="matches_reference"):
            gate(name, {}, build(max_seq_len=1024), seq_len=1024)


class NotesLengths(Softmax):
    built: ClassVar[list[int]] = []

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        self.built.append(self.build.max_seq_len)
        return super().keep(query, key, mask)


def test_a_long_cell_is_gated_at_short_lengths() -> None:
    """The cost of a gate must not grow with its cell: no module may be built, nor called, at the cell's own length."""
    context = BuildContext(embed_dim=64, num_heads=2, max_seq_len=1_000_000)
    with registered(Broken(cls=NotesLengths, check="", capabilities=MASKED)) as name:
        gate(name, {}, context, seq_len=1_000_000)
    assert NotesLengths.built
    assert max(NotesLengths.built) == SPAN_LEN


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for dtype in ("float32", "bfloat16", "float16") for name in attn_zoo.list_variants(dtypes=dtype)],
)
def test_on_a_gpu(name: str, dtype: str) -> None:
    is_causal = not attn_zoo.describe(name).capabilities.bidirectional
    context = BuildContext(embed_dim=256, num_heads=4, max_seq_len=512, is_causal=is_causal)
    assert "shape_and_dtype" in gate(name, {}, context, dtype=dtype, device="cuda", seq_len=512)


def test_no_memory_for_a_check_says_nothing_about_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_zoo.conformance import gate as function
    from attn_zoo.conformance.check import CheckResult

    def starved(check: object, subject: object) -> CheckResult:
        return CheckResult(check="shape_and_dtype", outcome="error", message="out of memory")

    monkeypatch.setitem(function.__globals__, "run_one", starved)
    monkeypatch.setattr("attn_zoo.conformance.verdicts._verdicts", {})
    with pytest.raises(MemoryError, match="out of memory"):
        gate("full", {}, build(), seq_len=64)


def test_a_kernel_without_masks_serves_cells_without_padding() -> None:
    class TakesNoMask(Softmax):
        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
        ) -> Tensor:
            if key_padding_mask is not None:
                raise UnsupportedError("backend", "this kernel takes no mask")
            return super().forward(query, key, value)

    with registered(Broken(cls=TakesNoMask, check="", capabilities={"key_padding_mask": True})) as name:
        with pytest.raises(UnsupportedError, match="takes no mask"):
            gate(name, {}, build(), seq_len=64)
        assert "batch_invariance" in gate(name, {}, build(), seq_len=64, has_padding=False)


def test_every_layer_of_a_model_is_checked_in_training_mode() -> None:
    class LazyInTheSecondLayer(WithReference):
        def is_lazy(self, query: Tensor) -> bool:
            return self.training and self.build.layer_index == 1

    def model() -> nn.ModuleList:
        contexts = [replace(build(), num_layers=2).at_layer(layer) for layer in range(2)]
        return nn.ModuleList([attn_zoo.build_mixer(name, context) for context in contexts])

    with registered(Broken(cls=Softmax, check="")) as name:
        held = gate_model(model(), dtype="float32", device="cpu", has_padding=False)
        assert {"modes", "shape_and_dtype"} <= set(held)
    with registered(Broken(cls=LazyInTheSecondLayer, check="")) as name:
        gate_model(model()[:1], dtype="float32", device="cpu", has_padding=False)
        with pytest.raises(GateError, match="matches_reference"):
            gate_model(model(), dtype="float32", device="cpu", has_padding=False)


def test_a_model_is_gated_whatever_types_its_options_have() -> None:
    with registered(Broken(cls=Softmax, check="", config=RichConfig)) as name:
        held = gate_model(attn_zoo.build_mixer(name, build(), size=6), dtype="float32", device="cpu", has_padding=False)
        assert "shape_and_dtype" in held


def test_a_mixer_around_exact_heads_is_compared_with_exact_attention() -> None:
    class NotExact(Softmax):
        def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
            return super().weights(scores * 1.5, keep)

    with registered(Broken(cls=NotExact, check="", capabilities={"is_exact": True})) as name:
        for form in ("attention", "mixer"):
            with pytest.raises(GateError, match="matches_oracle"):
                gate(name, {}, build(), seq_len=64, form=form)
