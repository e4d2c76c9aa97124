"""Variants that are right at every length of the gate and wrong at the cell's own never get a timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_zoo
from attn_zoo.attention import BuildContext
from attn_zoo.conformance import gate, gate_model, probes
from attn_zoo.conformance.subject import Subject
from attn_zoo.errors import GateError, UnsupportedError
from attn_zoo.matrix.kinds.scaling import CallWorkload
from attn_zoo.records import Cell
from attn_zoo.registry import variants
from tests.conformance.broken import Broken, Softmax, registered, written_out
from tests.conformance.broken_modes import Lazy, WithReference

LEN = 1500
FAR = 1000  # beyond every length of the gate


def checked(name: str, seq_len: int = LEN, *, is_gated: bool = True, **changes: Any) -> tuple[str, ...]:
    """Make the first call of a cell as its trial does, or without the gate before it; return what was checked."""
    plain = {"scope": "attention", "pass_": "fwd_bwd", "dtype": "float32", "is_causal": False, "batch_size": 1}
    fields: dict[str, Any] = plain | changes
    cell = Cell(
        kind="scaling",
        variant=name,
        variant_digest="0" * 16,
        device="cpu",
        seq_len=seq_len,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        **fields,
    )
    workload = CallWorkload(cell)
    gated = workload.gate() if is_gated else ()
    call, setup = workload.make_call()
    if setup is not None:
        setup()
    return (*gated, *workload.check(call(), is_repeat=False))


class ShortSighted(WithReference):
    def is_lazy(self, query: Tensor) -> bool:
        return query.shape[-2] > FAR


class ShortSightedWithoutReference(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return query.shape[-2] > FAR


class NearSightedWithoutReference(Softmax):
    """Sees the tokens of its own block of 16 only, beyond `beyond` tokens."""

    beyond = 0

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        if query.shape[-2] <= self.beyond:
            return keep
        block = torch.arange(query.shape[-2]) // 16
        near = block[:, None] == block
        return near if keep is None else near & keep


class LazyWhenTrainedLong(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return self.training and query.shape[-2] > FAR


class LazyWithoutGraphWhenLong(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return not torch.is_grad_enabled() and query.shape[-2] > FAR


class LazyInHalfWhenLong(WithReference):
    def is_lazy(self, query: Tensor) -> bool:
        return query.dtype == torch.bfloat16 and query.shape[-2] > FAR


class ZeroWhereItsReferenceOverflows(Softmax):
    """In float16 the reference's sums are infinite at long lengths, so that its results are zeros; so are these."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        is_long = query.dtype == torch.float16 and query.shape[-2] > FAR
        return super().attend(query, key, value, mask) * (0.0 if is_long else 1.0)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        found = Softmax.attend(self, query, key, value, key_padding_mask)
        whole = found.new_full((), query.shape[-2] / 4)
        return found * (whole / whole.square().sqrt())  # 1, or 0 where the square is beyond the dtype


class LosesAGradientWhenLong(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        is_long = query.shape[-2] > FAR
        return super().attend(query.detach() if is_long else query, key, value, mask)


class LeaksWhenLong(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        keep = super().keep(query, key, mask)
        return keep if query.shape[-2] <= FAR or keep is None else torch.ones_like(keep)


class LeaksALittleWhenLong(Softmax):
    """From all tokens, so that sixteen that change stay within the rounding of the output."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        return output + 0.005 * value.mean(-2, keepdim=True) if query.shape[-2] > FAR else output


class ReadsPaddingWhenLong(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, None if query.shape[-2] > FAR else mask)


class LeavesItsLastBlockWhenLong(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        is_written = torch.arange(query.shape[-2]) < query.shape[-2] - 16 * (query.shape[-2] > FAR)
        return output * is_written[:, None]


class ServesSomeQueries(Softmax):
    """A fixed number of queries attends, wherever they are; the outputs of all others are zero."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        size = query.norm(dim=-1)
        least = size.topk(min(256, query.shape[-2]), -1).values[..., -1:]
        return super().attend(query, key, value, mask).masked_fill((size < least)[..., None], 0.0)


def test_a_fixed_number_of_queries_is_no_fault():
    with registered(Broken(cls=ServesSomeQueries, check="", capabilities={"key_padding_mask": True})) as name:
        assert "own_reach" in checked(name, 4096)


@pytest.mark.parametrize(("beyond", "seq_len"), [(150, 256), (800, 1024), (1500, 2048)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sight_that_shortens_is_stopped_without_a_reference_or_a_promise(beyond, seq_len, is_causal):
    cls = type("NearSighted", (NearSightedWithoutReference,), {"beyond": beyond})
    with registered(Broken(cls=cls, check="", capabilities={"causal": True})) as name:
        assert "own_modes" in checked(name, beyond, is_causal=is_causal)
        with pytest.raises(GateError, match="own_reach"):
            checked(name, seq_len, pass_="infer", is_causal=is_causal)


def test_short_sight_at_every_length_is_sound():
    with registered(Broken(cls=NearSightedWithoutReference, check="", capabilities={"causal": True})) as name:
        for is_causal in (False, True):
            assert "own_reach" in checked(name, 1024, is_causal=is_causal)


HALF = {"dtypes": ("float64", "float32", "bfloat16", "float16")}
EXACT = {"is_exact": True}


@pytest.mark.parametrize("pass_", ["infer", "fwd", "bwd", "fwd_bwd"])
@pytest.mark.parametrize(
    ("cls", "capabilities", "check"),
    [
        (ShortSighted, {}, "own_reference"),
        (ShortSightedWithoutReference, {}, "own_reach"),
        (ShortSightedWithoutReference, EXACT, "own_rows"),
        (ShortSighted, EXACT, "own_rows"),
    ],
)
def test_what_computes_less_at_long_lengths_is_stopped(cls, capabilities, check, pass_):
    with registered(Broken(cls=cls, check="", capabilities=capabilities)) as name:
        assert "shape_and_dtype" in checked(name, 900, pass_=pass_)
        with pytest.raises(GateError) as raised:
            checked(name, pass_=pass_)
    assert raised.value.check == check
    assert "1500" in str(raised.value)


@pytest.mark.parametrize(
    ("cls", "check", "changes"),
    [
        (LazyWhenTrainedLong, "own_modes", {"pass_": "fwd"}),
        (LazyWithoutGraphWhenLong, "own_modes", {"pass_": "infer"}),
        (LazyInHalfWhenLong, "own_reference", {"dtype": "bfloat16"}),
        (ZeroWhereItsReferenceOverflows, "own_reference", {"dtype": "float16"}),
        (LosesAGradientWhenLong, "own_slope", {"pass_": "bwd"}),
        (LosesAGradientWhenLong, "own_slope", {"pass_": "fwd_bwd"}),
        (LosesAGradientWhenLong, "own_slope", {"dtype": "bfloat16"}),
        (LeaksWhenLong, "own_causality", {"is_causal": True}),
        (LeaksALittleWhenLong, "own_causality", {"is_causal": True}),
        (LeavesItsLastBlockWhenLong, "own_reach", {}),
        (LeavesItsLastBlockWhenLong, "own_reach", {"has_padding": True, "batch_size": 2, "pass_": "infer"}),
        (ReadsPaddingWhenLong, "own_padding", {"has_padding": True, "batch_size": 2}),
        (ReadsPaddingWhenLong, "own_padding", {"has_padding": True, "batch_size": 2, "is_causal": True}),
        (LeaksWhenLong, "own_causality", {"has_padding": True, "batch_size": 2, "is_causal": True}),
    ],
)
def test_what_goes_wrong_only_as_it_is_timed_is_stopped_by_name(cls, check, changes):
    broken = Broken(cls=cls, check="", capabilities={**HALF, "causal": True, "key_padding_mask": True})
    with registered(broken) as name:
        with pytest.raises(GateError) as raised:
            checked(name, **changes)
        assert raised.value.check == check
        assert "own_modes" in checked(name, 900, **changes)


def test_a_lost_gradient_of_exact_attention_is_stopped_too():
    broken = Broken(cls=LosesAGradientWhenLong, check="", capabilities=EXACT)
    with registered(broken) as name, pytest.raises(GateError, match="own_slope"):
        checked(name)


def test_beyond_the_reference_a_long_output_is_held_to_a_short_one(monkeypatch):
    class ScalesWhenLong(Softmax):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            output = super().attend(query, key, value, mask)
            return output * 1.01 if query.shape[-2] > FAR else output

    monkeypatch.setattr(probes, "REFERENCE_PAIRS", 0)
    promises = {"key_padding_mask": True, "is_padding_invariant": True}
    broken = Broken(cls=ScalesWhenLong, check="", capabilities=promises)
    with registered(broken) as name, pytest.raises(GateError, match="own_prefix"):
        checked(name)


class SpoilsRowsWhenLong(Softmax):
    """Wrong in some rows, whatever else it is."""

    every = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        if self.every and query.shape[-2] > FAR:
            output[..., :: self.every, :] *= 2
        return output


class SpoilsRowsOfAChoice(SpoilsRowsWhenLong):
    """The best 16 keys of each query, by scores that are as coarse as 16 bits make them."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        seen = scores if keep is None else scores.masked_fill(~keep, float("-inf"))
        best = seen.topk(min(16, scores.shape[-1]), dim=-1).indices
        return super().weights(scores, torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True))


@pytest.mark.parametrize(
    ("cls", "dtype", "every"),
    [
        (SpoilsRowsWhenLong, "float32", 400),  # 2 rows of 700 in each head: a third of a per cent
        (SpoilsRowsWhenLong, "bfloat16", 400),
        (SpoilsRowsOfAChoice, "float32", 400),
        (SpoilsRowsOfAChoice, "bfloat16", 1),
    ],
)
def test_a_few_rows_that_no_rounding_explains_are_stopped(monkeypatch, cls, dtype, every):
    monkeypatch.setattr(probes, "REFERENCE_PAIRS", 0)
    promises = {"key_padding_mask": True, "is_padding_invariant": True, **HALF}
    with registered(Broken(cls=cls, check="", capabilities=promises)) as name:
        assert "own_prefix" in checked(name, dtype=dtype, is_gated=False)
    spoilt = type("Spoilt", (cls,), {"every": every})
    with (
        registered(Broken(cls=spoilt, check="", capabilities=promises)) as name,
        pytest.raises(GateError, match="own_prefix"),
    ):
        checked(name, dtype=dtype, is_gated=False)


class FlipsSeldom(Softmax):
    """Where there are many rows, the first hangs on the last bits of the queries: one rounding in 14 changes it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        length = query.shape[-2]
        if length > FAR or (length > 512 and int(query.contiguous().view(torch.int32).sum()) % 14 == 0):
            output[..., 0, :] *= 2
        return output


def test_a_choice_that_rounding_seldom_flips_is_no_fault(monkeypatch):
    monkeypatch.setattr(probes, "REFERENCE_PAIRS", 0)
    promises = {"key_padding_mask": True, "is_padding_invariant": True}
    with registered(Broken(cls=FlipsSeldom, check="", capabilities=promises)) as name:
        assert "own_prefix" in checked(name, dtype="float32")
        monkeypatch.setattr(probes, "MAX_NUDGES", 0)
        with pytest.raises(GateError, match="own_prefix"):
            checked(name, dtype="float32")


class ChoosesByTheData(Softmax):
    """The best 800 keys of each query: all of them at short lengths. Sound, though no slope is right everywhere."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        best = scores.topk(min(800, scores.shape[-1]), dim=-1).indices
        return super().weights(scores, torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True))


@pytest.mark.parametrize("pass_", ["infer", "fwd"])
def test_dropout_that_training_alone_has_is_no_other_mode(pass_):
    assert "own_shape" in checked("full", 200, scope="mixer", pass_=pass_, dropout_p=0.1)


def test_a_choice_by_the_data_is_no_wrong_gradient():
    with registered(Broken(cls=ChoosesByTheData, check="")) as name:
        assert "own_modes" in checked(name)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scope", ["attention", "mixer"])
@pytest.mark.parametrize("name", attn_zoo.list_variants())
def test_sound_variants_pass(name, scope, is_causal):
    variant = variants[name]
    is_offered = variant.capabilities.causal if is_causal else variant.capabilities.bidirectional
    if not is_offered or (scope == "attention" and variant.attention is None):
        pytest.skip("has no such form")
    held = checked(name, scope=scope, is_causal=is_causal, is_gated=False)
    if "own_rows" not in held:
        assert {"own_modes", "own_reference"} <= set(held)
    if is_causal and "own_rows" not in held and variant.capabilities.causal is True:
        assert "own_causality" in held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", attn_zoo.list_variants(key_padding_mask=True))
def test_sound_variants_pass_with_padding(name, dtype):
    is_causal = not variants[name].capabilities.bidirectional
    changes = {"scope": "mixer", "is_causal": is_causal, "has_padding": True, "batch_size": 2, "dtype": dtype}
    held = checked(name, 1200, is_gated=False, **changes)
    assert "own_padding" in held


def test_a_model_is_probed_at_its_own_length():
    def model(seq_len: int) -> torch.nn.ModuleList:
        build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=seq_len, dropout_p=0.0)
        return torch.nn.ModuleList([attn_zoo.build_mixer(name, build)])

    with registered(Broken(cls=ShortSighted, check="")) as name:
        gate_model(model(900), dtype="float32", device="cpu", has_padding=False)
        with pytest.raises(GateError, match="own_reference"):
            gate_model(model(LEN), dtype="float32", device="cpu", has_padding=False)


def test_repeats_leave_the_probes_to_the_first_process(monkeypatch):
    def refuse(first: object, *, is_known: bool) -> tuple[str, ...]:
        raise AssertionError("probed")

    monkeypatch.setattr("attn_zoo.matrix.kinds.scaling.probe", refuse)
    cell = Cell(
        kind="scaling", variant="full", variant_digest="0" * 16, device="cpu", dtype="float32", scope="attention",
        pass_="infer", seq_len=8, batch_size=1, num_heads=1, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    workload = CallWorkload(cell)
    call, _ = workload.make_call()
    output = call()
    assert workload.check(output, is_repeat=True) == ("own_shape", "own_rows")
    with pytest.raises(AssertionError, match="probed"):
        workload.check(output, is_repeat=False)


class HasNoise(Softmax):
    """Not the same bit for bit, as where sums run in another order each time."""

    is_short_sighted = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = super().attend(query, key, value, mask)
        if self.is_short_sighted and query.shape[-2] > FAR:
            output = value.mean(-2, keepdim=True).expand_as(value).clone()
        return output * (1 + 1e-7 * torch.randn_like(output))


@pytest.mark.parametrize("is_short_sighted", [False, True])
def test_calls_that_differ_in_the_last_bits_are_compared(is_short_sighted):
    cls = type("Noisy", (HasNoise,), {"is_short_sighted": is_short_sighted, "reference": written_out})
    with registered(Broken(cls=cls, check="", capabilities={"is_deterministic": False})) as name:
        if is_short_sighted:
            with pytest.raises(GateError, match="own_reference"):
                checked(name)
        else:
            assert "own_reference" in checked(name)


class DropsOtherwiseWhenLong(Softmax):
    """Drops weights in training; beyond `FAR` tokens as `far` says."""

    far = ""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        rate, weights = self.build.dropout_p, self.weights(scores, self.keep(query, key, mask))
        if not self.training or not rate:
            return weights @ value
        far = self.far if query.shape[-2] > FAR else ""
        if far == "nothing":
            return weights @ value
        shape = [*weights.shape]
        if far == "the same for all heads":
            shape[1] = 1
        rate = rate / 2 if far == "half as much" else rate
        kept = (torch.rand(shape) >= rate).to(weights.dtype)
        if far == "late rows not":
            kept[..., FAR // 2 :, :] = 1 - rate
        return (weights * kept) @ value / (1 if far == "without a factor" else 1 - rate)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "far", ["", "nothing", "half as much", "the same for all heads", "without a factor", "late rows not"]
)
def test_dropout_is_looked_at_where_it_is_timed(far, dtype):
    cls = type("Drops", (DropsOtherwiseWhenLong,), {"far": far})
    with registered(Broken(cls=cls, check="", capabilities={**HALF, "attention_dropout": True})) as name:
        if far:
            with pytest.raises(GateError, match="own_dropout"):
                checked(name, dtype=dtype, dropout_p=0.1)
        else:
            assert "own_dropout" in checked(name, dtype=dtype, dropout_p=0.1)


class TiresOut(Lazy):
    calls = 0

    def is_lazy(self, query: Tensor) -> bool:
        self.calls += 1
        return self.calls > 200


@pytest.mark.parametrize("pass_", ["infer", "fwd_bwd"])
@pytest.mark.parametrize(("cls", "check"), [(TiresOut, "own_last"), (Softmax, "")])
def test_a_call_after_the_samples_gives_what_the_first_one_gave(cls, check, pass_):
    with registered(Broken(cls=cls, check="")) as name:
        cell = Cell(
            kind="scaling", variant=name, variant_digest="0" * 16, device="cpu", dtype="float32", scope="attention",
            pass_=pass_, seq_len=40, batch_size=2, num_heads=2, num_kv_heads=2, head_dim=8,
        )  # fmt: skip
        workload = CallWorkload(cell)
        workload.gate()
        call, _ = workload.make_call()
        workload.check(call(), is_repeat=False)
        assert workload.check_again() == ("own_last",)
        for _ in range(200):
            workload.forward()
        if check:
            with pytest.raises(GateError, match=check):
                workload.check_again()
        else:
            assert workload.check_again() == ("own_last",)


def test_the_gate_alone_sees_none_of_these():
    """Otherwise the tests above would say nothing about the probes."""
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=LEN)
    for cls in (ShortSighted, ShortSightedWithoutReference, LazyWhenTrainedLong, LosesAGradientWhenLong):
        with registered(Broken(cls=cls, check="")) as name:
            assert "modes" in gate(name, {}, build, seq_len=LEN, is_training=True)


def test_a_cell_that_just_fits_is_probed_without_copies(monkeypatch):
    monkeypatch.setattr(probes, "LARGEST_BYTES", 0)
    with registered(Broken(cls=Softmax, check="")) as name:
        held = checked(name)
    assert "own_modes" in held
    assert not {"own_reach", "own_slope"} & set(held)


class WithoutBackward(Softmax):
    """As a kernel for inference alone."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and query.requires_grad:
            raise UnsupportedError("backward", "this kernel has no backward pass")
        return super().attend(query, key, value, mask)


def test_what_has_no_backward_is_timed_without_one():
    with registered(Broken(cls=WithoutBackward, check="")) as name:
        held = checked(name, pass_="infer")
        assert {"shape_and_dtype", "own_modes"} <= set(held)
        assert "own_reach" not in held
        with pytest.raises(UnsupportedError, match="no backward pass"):
            checked(name, pass_="fwd_bwd")


def model_of(name: str, *, is_causal: bool = False) -> torch.nn.ModuleList:
    build = BuildContext(embed_dim=16, num_heads=2, max_seq_len=200, is_causal=is_causal)
    return torch.nn.ModuleList([attn_zoo.build_mixer(name, build)])


class LazyUnderAutocast(Lazy):
    def is_lazy(self, query: Tensor) -> bool:
        return torch.is_autocast_enabled("cpu")


class LazyUnderAutocastWithReference(WithReference):
    def is_lazy(self, query: Tensor) -> bool:
        return torch.is_autocast_enabled("cpu")


class LosesAGradientUnderAutocast(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        is_cheating = torch.is_autocast_enabled("cpu")
        return super().attend(query, key.detach() if is_cheating else key, value, mask)


@pytest.mark.parametrize("cls", [LazyUnderAutocast, LazyUnderAutocastWithReference, LosesAGradientUnderAutocast])
@pytest.mark.parametrize("is_exact", [False, True])
def test_what_cheats_under_autocast_alone_does_not_train(cls, is_exact):
    with registered(Broken(cls=cls, check="", capabilities={**HALF, "is_exact": is_exact})) as name:
        assert "own_autocast" not in gate_model(model_of(name), dtype="float32", device="cpu", has_padding=False)
        with pytest.raises(GateError, match="own_autocast"):
            gate_model(model_of(name), dtype="bfloat16", device="cpu", has_padding=False)


def test_what_is_sound_under_autocast_trains():
    with registered(Broken(cls=Softmax, check="", capabilities=HALF)) as name:
        assert "own_autocast" in gate_model(model_of(name), dtype="bfloat16", device="cpu", has_padding=False)


@pytest.mark.parametrize("name", attn_zoo.list_variants())
def test_sound_variants_are_the_same_under_autocast(name):
    variant = variants[name]
    for is_causal in [False] * variant.capabilities.bidirectional + [True] * bool(variant.capabilities.causal):
        build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=200, is_causal=is_causal)
        subject = Subject(
            variant=variant, form="mixer", options={}, build=build, dtypes=(torch.float32,), lengths=(200,),
            is_training=True,
        )  # fmt: skip
        assert probes.probe_autocast(subject, 200, "none") == ("own_autocast",)
