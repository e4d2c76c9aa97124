"""Run checks over a variant and collect what they find. Nothing that is raised inside a check is lost."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext, build_mixer
from attn_zoo.conformance.check import Check, CheckResult, Outcome, Violation
from attn_zoo.conformance.checks.all_checks import CHECKS
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.lengths import FEW_LENGTHS, LENGTHS, LONGEST, SPANS, across_blocks, fitting
from attn_zoo.conformance.subject import Module, Subject, gradients
from attn_zoo.conformance.tolerance import allowing, strain
from attn_zoo.discovery.global_state import all_digits, restored
from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError, first_line, memory_lacked_by
from attn_zoo.metadata import FLOAT_DTYPES, Form
from attn_zoo.registry import Variant, make_config, variants

FEWEST_TOKENS = 64
"""That `run_checks` may be limited to: among fewer, hardly anything is a block, a window or a long sequence."""
_WIDEST_FIRST = ("float64", "float32", "bfloat16", "float16")
# The strongest statement about any form decides: one broken form breaks the variant, one kept promise is a promise.
_PRECEDENCE: tuple[Outcome, ...] = ("failed", "error", "passed", "refused", "not_applicable")


def find_checks(names: Iterable[str] | None) -> tuple[Check, ...]:
    """Return the checks with these names, in the order of `CHECKS`; all of them for None.

    Raises:
        UnknownNameError: a name is none of theirs.
    """
    if names is None:
        return CHECKS
    wanted, known = list(names), [check.name for check in CHECKS]
    for name in wanted:
        if name not in known:
            raise UnknownNameError("check", name, known, f"attn-zoo list checks shows all {len(known)}")
    return tuple(check for check in CHECKS if check.name in wanted)


def run_checks(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    checks: Iterable[str] | None = None,
    embed_dim: int = 32,
    num_heads: int = 2,
    max_seq_len: int = 128,
    seed: int = 0,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
    tell: Callable[[CheckResult], None] = lambda _: None,
) -> list[CheckResult]:
    """Check the promises of a variant, in every direction, form and dtype that it declares.

    Args:
        name: a registered variant.
        options: of the variant; None means the sets its config names in `check_options`, each one layer deeper than
            the one before: patterns may differ by layer. The shared mixer is tried around an attention of the first.
        device: to run on.
        checks: names of checks; None means all.
        embed_dim: E of the builds.
        num_heads: H of the builds.
        max_seq_len: longest sequence that is checked in full, 64 at least; more where that is less than two multiples
            of the variant. Probes of single promises use up to 1100 tokens.
        seed: of the builds.
        around: makes a context for each check, given its place and name, such as `"[3/45] modes"`, to show progress.
        tell: takes each result as soon as it is found.

    Returns:
        One result per check, in the order of `CHECKS`.

    Raises:
        UnknownNameError: no such variant or check.
        ConfigError: an option is unknown, or impossible with these sizes.
        UnsupportedError: it does not run on this kind of device.
        ValueError: max_seq_len is below 64.

    >>> [result.outcome for result in run_checks("full", checks=["shape_and_dtype", "causality"])]
    ['passed', 'passed']
    """
    if max_seq_len < FEWEST_TOKENS:
        raise ValueError(f"max_seq_len: expected at least {FEWEST_TOKENS}; got {max_seq_len}")
    variant = variants[name]
    selected = find_checks(checks)
    sets = variant.option_sets if options is None else (dict(options),)
    build = BuildContext(
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_layers=len(sets),
        max_seq_len=max_seq_len,
        is_causal=not variant.capabilities.bidirectional,
        seed=seed,
    )
    variant.capabilities.require(name, replace(build.request(), device=torch.device(device).type))
    for index, option_set in enumerate(sets):
        multiple = variant.capabilities_of(make_config(variant.config, option_set, name)).seq_len_multiple
        build = replace(build, max_seq_len=max(build.max_seq_len, 2 * multiple))
        if options is not None:
            _require_possible(name, option_set, build.at_layer(index))
    results, strains = [], dict[tuple[Form, BuildContext], float]()
    for place, check in enumerate(selected, start=1):
        found: list[CheckResult] = []
        subjects = (
            subject
            for index, option_set in enumerate(sets)
            for subject in _subjects(
                variant, option_set, build.at_layer(index), device, check, index, options is not None
            )
        )
        with around(f"[{place}/{len(selected)}] {check.name}"):
            for subject in subjects:
                found.append(run_one(check, subject, strains))
                if found[-1].outcome == "failed":  # nothing is stronger, and of equal ones the first decides
                    break
        results.append(_strongest(check, found))
        tell(results[-1])
    return results


def _require_possible(name: str, options: Mapping[str, Any], build: BuildContext) -> None:
    """Raise `ConfigError` if options do not fit the sizes; other errors of a constructor are for checks to report."""
    with torch.random.fork_rng(devices=[]), restored():
        try:
            build_mixer(name, build, **options)
        except ConfigError:
            raise
        except Exception:
            return


def _subjects(
    variant: Variant,
    options: Mapping[str, Any],
    build: BuildContext,
    device: str,
    check: Check,
    index: int,
    is_given: bool,
) -> list[Subject]:
    config = make_config(variant.config, options, variant.name)
    capabilities = variant.capabilities_of(config)
    multiple = capabilities.seq_len_multiple
    own: tuple[Form, ...] = ("mixer",) if variant.attention is None else ("attention", "mixer")
    forms = [form for form in own if form in check.forms]
    if index and variant.mixer is None:  # the shared mixer knows no options of an attention: one set is enough for it
        forms = forms[:1]
    names = [name for name in _WIDEST_FIRST if name in capabilities.dtypes and name in FLOAT_DTYPES]
    few = {"mixer"} if variant.mixer is None else set()
    lengths = FEW_LENGTHS if index else LENGTHS
    spans = fitting((*across_blocks(config), *(SPANS[:1] if index else SPANS)), multiple, LONGEST)
    return [
        Subject(
            variant=variant,
            form=form,
            options=options,
            build=build,
            dtypes=tuple(getattr(torch, dtype) for dtype in names),
            lengths=fitting(FEW_LENGTHS if form in few else lengths, multiple, build.max_seq_len),
            spans=() if form in few else tuple(length for length in spans if length not in lengths),
            device=device,
            may_refuse=is_given or index > 0,
        )
        for form in forms
    ]


def run_one(
    check: Check, subject: Subject, strains: dict[tuple[Form, BuildContext], float] | None = None
) -> CheckResult:
    """Run one check over one subject; whatever is raised becomes part of the result.

    A failure of a subject whose results move more than others with its inputs is no failure where tolerances in
    proportion to that find none. What was raised has nothing to do with tolerances. Pass `strains` on from check to
    check of a variant, so that this is measured once for each form and context.
    """
    result = _run_once(check, subject)
    if result.outcome == "failed" and not result.has_raised:
        strains, place = {} if strains is None else strains, (subject.form, subject.build)
        if place not in strains:
            strains[place] = _strain(subject)
        if (factor := strains[place]) == 1:
            return result
        with allowing(factor):
            again = _run_once(check, subject)
        return result if again.is_bad else again
    return result


def _strain(subject: Subject) -> float:
    """Return the largest `strain` of outputs and gradients over the contexts and lengths of a subject."""
    worst = 1.0
    with suppress(Exception, SystemExit), torch.random.fork_rng(devices=[]), restored():  # of what cannot be called, 1
        for build in subject.contexts():
            for length in subject.lengths:
                module = subject.make(replace(build, dropout_p=0.0), seq_len=length, dtype=torch.float64)
                for batch_size in (1, 2):  # one sequence may cancel where two do not
                    for inputs in subject.calls(build, length, batch_size=batch_size, dtype=torch.float64):
                        found = _nudged(module, inputs, 0, 0.0)
                        worst = max(
                            worst, *(strain(found, partial(_nudged, module, inputs, seed)) for seed in range(3))
                        )
    return worst


def _nudged(module: Module, inputs: Inputs, seed: int, share: float) -> list[Tensor]:
    """Return the output and all gradients of a call, inputs and parameters being changed by a share of themselves."""
    generator = torch.Generator().manual_seed(seed)

    def nudge(tensor: Tensor) -> Tensor:
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2.0 - 1.0
        return tensor * (1.0 + share * signs.to(tensor))

    module = deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(nudge(parameter))
    found = gradients(module, inputs.map(nudge))
    by_name = [gradient.flatten() for gradient in found.by_name.values() if gradient is not None]
    return [found.output, *([torch.cat(by_name)] if by_name else [])]


def _run_once(check: Check, subject: Subject) -> CheckResult:
    devices: list[int] | None = None if subject.device != "cpu" else []
    result = partial(CheckResult, check=check.name)
    try:
        with torch.random.fork_rng(devices=devices), restored(), all_digits():
            finding = check.run(subject)
    except Violation as violation:
        return result(outcome="failed", message=violation.message, example=violation.example)
    except UnsupportedError as error:
        if subject.may_refuse or error.capability in {"requires", "devices"}:  # of this machine, not of the variant
            return result(outcome="refused", message=error.reason)
        message = f"refuses what its capabilities declare ({error.capability}): {error.reason}"
        return result(outcome="failed", message=message, example=_words(subject))
    except ConfigError as error:  # sizes or options that do not fit each other, which a cell would be told too
        outcome: Outcome = "refused" if subject.may_refuse else "failed"
        return result(outcome=outcome, message=str(error), example=_words(subject))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a variant may raise anything: the finding; no memory says nothing of it
        outcome = "error" if memory_lacked_by(error) else "failed"
        return result(outcome=outcome, message=_describe(error), example=_words(subject, error), has_raised=True)
    return result(outcome=finding.outcome, message=finding.message)


def _words(subject: Subject, error: BaseException | None = None) -> str:
    """Return the call that raised, where there was one, or the form; and the options."""
    call = getattr(error, "__notes__", [f"{subject.form} form"])[0]
    return ", ".join([call, *(f"{key}={value!r}" for key, value in subject.options.items())])


def _describe(error: BaseException) -> str:
    """Return type, message and the innermost place outside the checks, what they count with, and torch."""
    text = f"{type(error).__name__}: {first_line(error)}"
    checks = Path(__file__).parent
    ours = str(checks), str(checks.parent / "measure")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(ours) and "/torch/" not in frame.filename
    ]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def _strongest(check: Check, found: list[CheckResult]) -> CheckResult:
    """Return the result that decides; of equal ones the first."""
    if not found:
        return CheckResult(
            check=check.name, outcome="not_applicable", message=f"is about the {check.forms[0]} form only"
        )
    return min(found, key=lambda result: _PRECEDENCE.index(result.outcome))
