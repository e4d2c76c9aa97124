"""Every check catches its broken variants by name, and nothing else is blamed."""

from __future__ import annotations

import pytest

from attn_zoo.conformance import CHECKS, run_checks
from tests.conformance.broken import SHAPES, Broken, Softmax, SoftmaxMixer, registered
from tests.conformance.broken_claims import CLAIMS, DECODE, MIXER, MIXER_COST, ProjectedSoftmax, SoundDecode
from tests.conformance.broken_contract import CARRY, CONTRACT, SortsByTheFuture, SoundCarry, SoundRouting
from tests.conformance.broken_decoding import DECODING, DECODING_MIXERS, SOUND_DECODING
from tests.conformance.broken_dependence import DEPENDENCE, DROPOUT, SoundDropout
from tests.conformance.broken_device import DEVICE, SOUND_DEVICE
from tests.conformance.broken_dropout import RATES, SOUND_DROPOUT
from tests.conformance.broken_effects import EFFECTS, KeepsForBackward, SoundEffects
from tests.conformance.broken_lengths import LENGTHS, SOUND_LENGTHS
from tests.conformance.broken_modes import GRADIENTS, MODES
from tests.conformance.broken_padding import PADDING, SOUND_PADDING
from tests.conformance.broken_sizes import SIZES, SOUND_SIZES

DRESSED = (*LENGTHS, *SIZES)
BROKEN = (
    *SHAPES,
    *DEPENDENCE,
    *PADDING,
    *DECODING,
    *DECODING_MIXERS,
    *CLAIMS,
    *CONTRACT,
    *MODES,
    *GRADIENTS,
    *EFFECTS,
    *DEVICE,
    *(dresses[0] for dresses in DRESSED),
    *RATES,
)
OTHER_DRESSES = tuple(broken for dresses in DRESSED for broken in dresses[1:])
INVARIANT = {"is_exact": True, "is_permutation_invariant": True, "is_padding_invariant": True}
EVERY_YES = {"causal": True, "cross_attention": True, "key_padding_mask": True, "grouped_query": True, **INVARIANT}


class OnlyCausal(Softmax):
    pass


class OnlyMultiples(Softmax):
    pass


class OnlyOneLength(Softmax):  # the contract enforces it
    pass


class OnlyHalf(Softmax):
    pass


SOUND = (
    *SOUND_PADDING,
    *SOUND_DECODING,
    Broken(cls=Softmax, check="", capabilities={"cross_attention": True, "key_padding_mask": True, "is_exact": True}),
    Broken(cls=SoftmaxMixer, check="", capabilities={"positions": ("none",)}),
    Broken(cls=SoundDecode, check="", capabilities=DECODE),
    Broken(cls=ProjectedSoftmax, check="", capabilities=MIXER, complexity=MIXER_COST),
    Broken(cls=SoundCarry, check="", capabilities=CARRY),
    Broken(cls=SoundRouting, check="", capabilities={"causal": True, "dtypes": ("float64", "float32", "bfloat16")}),
    Broken(cls=SortsByTheFuture, check="", capabilities={"causal": "masked"}),
    *SOUND_DROPOUT,
    *SOUND_DEVICE,
    Broken(cls=SoundEffects, check="", capabilities={"causal": True, "key_padding_mask": True}),
    Broken(cls=KeepsForBackward, check=""),
    Broken(cls=SoundDropout, check="", capabilities=DROPOUT),
    Broken(cls=OnlyCausal, check="", capabilities={"bidirectional": False, "causal": True, "key_padding_mask": True}),
    Broken(cls=OnlyMultiples, check="", capabilities={**EVERY_YES, "seq_len_multiple": 24}),
    Broken(cls=OnlyOneLength, check="", capabilities={"key_padding_mask": True, "variable_seq_len": False}),
    Broken(cls=OnlyHalf, check="", capabilities={**EVERY_YES, "dtypes": ("bfloat16", "float16")}),
    *SOUND_LENGTHS,
    *SOUND_SIZES,
)


def asked(broken: Broken) -> list[str]:
    """Return the checks that a broken variant is asked: its own, and a sixth of the others in turns."""
    if "*" in broken.also:  # whichever else fails, it may
        return [broken.check]
    sixth = {check.name for check in CHECKS[BROKEN.index(broken) % 6 :: 6]}
    return [check.name for check in CHECKS if check.name in {broken.check, *broken.also, *sixth}]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_is_caught_by_name(broken: Broken) -> None:
    with registered(broken) as name:
        failed = {result.check: result for result in run_checks(name, checks=asked(broken)) if result.is_bad}
    assert broken.check in failed, f"{name} was not caught; failed: {sorted(failed)}"
    assert not {check: result for check, result in failed.items() if check not in {broken.check, *broken.also}}


@pytest.mark.parametrize("broken", OTHER_DRESSES, ids=lambda broken: broken.name)
def test_is_caught_in_another_dress(broken: Broken) -> None:
    with registered(broken) as name:
        (result,) = run_checks(name, checks=[broken.check])
    assert result.outcome == "failed"


@pytest.mark.parametrize("sound", SOUND, ids=lambda sound: sound.name)
def test_the_same_variant_without_the_twist_passes(sound: Broken) -> None:
    with registered(sound) as name:
        assert [result for result in run_checks(name) if result.is_bad] == []


def test_every_check_has_a_broken_variant() -> None:
    assert {broken.check for broken in BROKEN} == {check.name for check in CHECKS}


def test_names_are_unique() -> None:
    assert len({broken.name for broken in BROKEN}) == len(BROKEN)
    assert len({check.name for check in CHECKS}) == len(CHECKS)
