"""The gate: a quick subset of the checks with the very options and context of a cell, before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.check import Check, CheckResult
from attn_zoo.conformance.checks.randomness import seeded_call
from attn_zoo.conformance.lengths import across_blocks, fitting
from attn_zoo.conformance.probes import probe_autocast, probe_mixer
from attn_zoo.conformance.runner import find_checks, run_one
from attn_zoo.conformance.subject import MaskKind, Subject
from attn_zoo.conformance.verdicts import Verdict, find, keep, subject_key
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Form
from attn_zoo.registry import config_digest, make_config, option_fields, variants

GATE_CHECKS = (
    "shape_and_dtype",
    "inputs_unchanged",
    "batch_invariance",
    "causality",
    "padding_content",
    "padding_patterns",
    "matches_reference",
    "matches_oracle",
    "gradients_reach_every_parameter",
    "modes",
    "uninitialised_memory",
    "global_state",
    "own_output",
    "no_memory",
    "dropout",
)
"""What is checked before a timing: everything that would make the timing one of something else."""

CHECKS_AGAIN = ("shape_and_dtype", "causality", "padding_content", "matches_reference", "matches_oracle")
"""What is checked again where all of it held at another length or in another layer: parameters and patterns differ."""

TELLING = ("shape_and_dtype", "gradients_reach_every_parameter", "padding_content", "modes")
"""Whose name says what raised: a call, its backward, its mask, its training. Other checks may meet it before."""

CHECKS_OF_DROPOUT = ("matches_reference", "gradients_reach_every_parameter", "modes")
"""What is checked once more of a cell with dropout, at one length: a path with dropout is often another."""

CHECKS_OF_DECODE = ("decode", "decode_states", "decode_state_bytes")
"""What is checked besides of a cell that decodes."""

DROPS_NOTHING = 2.0**-60
"""A probability at which that path is taken and no weight is dropped, so that its results can be compared.

But for torch's flash kernel, which rounds 1 - p to float32 and then takes its path without dropout. The other one could
not be compared at any probability: its draws have 8 bits.
"""

SHORT_LEN, LONG_LEN = 7, 131  # odd, so that no block size divides them; long enough for several blocks
SPAN_LEN = 709  # for one comparison of outputs: eleven blocks of 64 and a ragged one


def gate(
    name: str,
    options: Mapping[str, Any],
    build: BuildContext,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    seq_len: int,
    form: Form | None = None,
    has_padding: bool = True,
    is_training: bool = False,
    needs_decode: bool = False,
) -> tuple[str, ...]:
    """Check a variant as a cell is about to use it; return the names of the checks that had something to check.

    The verdict depends on the arguments, the threads and the machine, and not on a length beyond the gate's own: it is
    remembered, a failure too, and may come from another process of the same run (`attn_zoo.conformance.verdicts`).

    Args:
        name: a registered variant.
        options: of the variant.
        build: context of the cell.
        dtype: working type of the cell.
        device: of the cell.
        seq_len: of the cell; the gate itself uses at most 709 tokens, or one multiple of the variant more.
        form: `"attention"` or `"mixer"`, whichever the cell calls; None means every form the variant wrote itself.
        has_padding: the cell pads. Where it does not, and a named kernel takes no mask, the checks go without.
        is_training: the cell calls the module in training mode. The checks do so too: without dropout, so that outputs
            can be compared, and with it where `build` has it.
        needs_decode: the cell reads from a state.

    Raises:
        GateError: a check failed; the message has the smallest example found.
        MemoryError, torch.OutOfMemoryError: there was no memory for a check.
        UnsupportedError: the variant refuses the request, which is a result of its own.
        UnknownNameError: no such variant.
        ConfigError: an option is unknown or impossible.

    >>> build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=64)
    >>> "batch_invariance" in gate("full", {}, build, seq_len=64)
    True
    """
    variant = variants[name]
    config = make_config(variant.config, options, name)
    capabilities = variant.capabilities_of(config)
    request = replace(build.request(), needs_decode=needs_decode, dtype=dtype, device=torch.device(device).type)
    capabilities.require(name, replace(request, seq_len=seq_len))
    if seq_len > build.max_seq_len:
        raise ValueError(f"seq_len: expected at most max_seq_len = {build.max_seq_len}; got {seq_len}")
    multiple = capabilities.seq_len_multiple
    short, long, span = (min(-(-length // multiple) * multiple, seq_len) for length in (SHORT_LEN, LONG_LEN, SPAN_LEN))
    forms: list[Form] = [] if variant.attention is None else ["attention"]
    if form == "attention":
        forms = [form]
    elif form == "mixer" or variant.mixer is not None:  # the shared mixer around an attention adds nothing of its own
        forms.append("mixer")
    # Parameters may grow with the longest length: a gate must not cost more for a longer cell.
    build = replace(build, max_seq_len=min(build.max_seq_len, span))
    anywhere = replace(build, max_seq_len=1, layer_index=0)
    classes = [f"{cls.__module__}.{cls.__qualname__}" for cls in (variant.attention, variant.mixer) if cls is not None]
    # Code in no file, such as a notebook's, may change under its name: it is asked each time.
    digest = variant.digest or uuid4().hex
    what = (name, digest, classes, capabilities, config_digest(config))
    mode = (has_padding, is_training, needs_decode)
    any_length = (*what, anywhere, dtype, device, torch.get_num_threads(), short, long, form, *mode)
    key = subject_key(*any_length, build.max_seq_len, build.layer_index, span)
    if (verdict := find(key)) is not None:
        return verdict.checked()
    known = find(subject_key(*any_length)) if span > long or build.layer_index else None
    held: dict[str, None] = dict.fromkeys(known.held if known else ())
    raised: list[Verdict] = []
    for each in forms:
        subject = Subject(
            variant=variant,
            form=each,
            options=options,
            build=replace(build, dropout_p=0.0) if is_training else build,
            dtypes=(getattr(torch, dtype),),
            lengths=tuple(sorted({short, long})),
            spans=fitting((*across_blocks(config), span), multiple, span) if span > long else (),
            device=device,
            is_fixed=True,
            may_refuse=True,
            is_training=is_training,
            dropout_p=build.dropout_p if is_training else 0.0,
        )
        # A shared mixer is compared as a mixer, but only its heads can be compared with exact attention.
        names = ("matches_oracle",) if form not in (None, each) else GATE_CHECKS if known is None else CHECKS_AGAIN
        # A shared mixer keeps the state of its heads, whose checks say whether that is a value.
        besides = CHECKS_OF_DECODE if needs_decode and known is None else ()
        for check in find_checks([*names, *besides]):
            if each not in check.forms:
                continue
            result = run_one(check, subject)
            if result.outcome == "refused" and subject.has_masks and not has_padding:
                subject = replace(subject, has_masks=False)
                result = run_one(check, subject)
            if result.outcome == "not_applicable" and check.name in CHECKS_OF_DECODE:
                # It chooses by the data: where no rounding flips a choice, it can be compared.
                result = run_one(check, replace(subject, dtypes=(torch.float64,)))
            beside = ""
            if result.outcome == "passed" and subject.dropout_p and check.name in CHECKS_OF_DROPOUT:
                beside = f", in training with dropout_p={DROPS_NOTHING:.0e}, which should drop nothing"
                result = _run_with_dropout(check, subject)
            if result.outcome == "error":  # no memory for the check: that says nothing about the variant
                raise torch.OutOfMemoryError(result.message) if device != "cpu" else MemoryError(result.message)
            if result.is_bad:
                detail = f"{result.message} ({result.example})" if result.example else result.message
                fault = Verdict(failed=check.name, message=f"{name}: {detail}{beside}")
                if not result.has_raised:
                    return keep(key, fault).checked()
                raised.append(fault)
            if result.outcome == "refused" and form in (None, each) and check.name == "shape_and_dtype":
                raise UnsupportedError("options", result.message)
            if result.outcome == "passed":
                held[check.name] = None
    if raised:
        told = {fault.failed: fault for fault in reversed(raised)}
        return keep(key, next((told[name] for name in TELLING if name in told), raised[0])).checked()
    keep(subject_key(*any_length), Verdict(held=tuple(held)))
    return keep(key, Verdict(held=tuple(held))).checked()


def _run_with_dropout(check: Check, subject: Subject) -> CheckResult:
    """Run a check where the variant would drop, but for the probability.

    Random numbers are zero now and then, in 16 bits one of 256, and a dropout that is written out drops those at any
    probability. So a failure counts if it comes with other numbers too, and if two calls with unlike ones are equal.
    """
    length = subject.lengths[-1]
    build = replace(subject.build, dropout_p=DROPS_NOTHING)
    subject = replace(subject, build=build, lengths=(length,), spans=())
    result = run_one(check, subject)
    if result.outcome != "failed":
        return result
    with torch.random.fork_rng(devices=None if subject.device != "cpu" else []):
        seed_generators(1)
        again = run_one(check, subject)
        module, inputs = subject.make(build, seq_len=length), subject.inputs(build, length)
        first, second = (seeded_call(module, inputs, seed) for seed in (2, 3))
    return again if torch.equal(first, second) else replace(result, outcome="passed")


def gate_model(model: nn.Module, *, dtype: str, device: str, has_padding: bool) -> tuple[str, ...]:
    """Check every mixer of a model that is about to train as the model built it: each layer, each direction.

    Args:
        model: holds the mixers.
        dtype: working type of the training. Where the weights have another, it trains under autocast: the gate asks
            in the type of the weights, and a call under autocast is compared with one without.
        device: of the training.
        has_padding: its batches are padded.

    Returns:
        The names of the checks that had something to check in any mixer.

    Raises:
        GateError, MemoryError, torch.OutOfMemoryError, UnsupportedError: as `gate`.
    """
    held: dict[str, None] = {}
    weights = next((str(weight.dtype).removeprefix("torch.") for weight in model.parameters()), dtype)
    for mixer in model.modules():
        if not isinstance(mixer, AbstractMixer) or mixer.variant is None:
            continue
        name, seq_len = mixer.variant.name, mixer.build.max_seq_len
        options = {item.name: getattr(mixer.config, item.name) for item in option_fields(mixer.config)}
        mask: MaskKind = "end" if has_padding else "none"
        held |= dict.fromkeys(
            gate(
                name,
                options,
                mixer.build,
                dtype=weights,
                device=device,
                seq_len=seq_len,
                form="mixer",
                has_padding=has_padding,
                is_training=True,
            )
        )
        subject = Subject(
            variant=mixer.variant,
            form="mixer",
            options=options,
            build=replace(mixer.build, dropout_p=0.0),
            dtypes=(getattr(torch, weights),),
            lengths=(seq_len,),
            device=device,
            is_training=True,
        )
        held |= dict.fromkeys(probe_mixer(subject, seq_len, mask))
        if weights != dtype:
            held |= dict.fromkeys(probe_autocast(subject, seq_len, mask))
    return tuple(held)
