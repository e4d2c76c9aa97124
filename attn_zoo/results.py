"""What was measured: times, bytes, scores; and how such records become JSON and come back. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from attn_zoo.errors import StoreError

__all__ = ["LOWER_IS_BETTER", "Json", "Memory", "Score", "Timing"]

LOWER_IS_BETTER = frozenset({"bits_per_byte"})
"""Metrics of which a smaller value is the better one; all others are fractions of what was right."""


class Json:
    """To and from JSON, strictly: unknown or missing fields and non-finite numbers are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self) -> str:
        """Return one JSON text with sorted keys.

        Raises:
            StoreError: a number is not finite.
        """
        try:
            return json.dumps(self.to_dict(), sort_keys=True, indent=1, allow_nan=False)
        except ValueError as error:
            raise StoreError(f"{type(self).__name__}: only finite numbers can be stored ({error})") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "") -> Self:
        """Return the validated object.

        Raises:
            StoreError: `data` does not have the fields and types of this class.
        """
        try:
            return TypeAdapter(cls).validate_python(dict(data))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"])
            raise StoreError(
                f"{source or cls.__name__}: {path}: {first['msg']} ({error.error_count()} problems)"
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing(Json):
    """Wall-clock samples of one callable, in milliseconds.

    Args:
        samples_ms: raw, in order; each already divided by `inner_loops`.
        median_ms: of the samples.
        q1_ms: lower quartile.
        q3_ms: upper quartile.
        low_ms: lower end of the 95 % bootstrap interval of the median.
        high_ms: upper end.
        first_ms: the first call, compilation included.
        num_warmup: calls before the first sample.
        inner_loops: calls per sample.
        timer: `"perf_counter"` or `"cuda_event"`.
        process_cpu_ms: processor time per call over all threads, on CPU.
        flags: what makes the numbers doubtful, such as `"unstable"`.
    """

    samples_ms: tuple[float, ...]
    median_ms: float
    q1_ms: float
    q3_ms: float
    low_ms: float
    high_ms: float
    first_ms: float
    num_warmup: int
    inner_loops: int
    timer: str
    process_cpu_ms: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Json):
    """Bytes one call needs. None where a method does not apply to the device.

    Args:
        peak_bytes: most that tensors occupied during the call, inputs included: allocator peak on GPU, exact tensor
            peak on CPU.
        extra_bytes: `peak_bytes` without inputs, output and gradients of the inputs: what the mechanism itself needs.
        saved_bytes: kept for backward after forward, inputs included, each storage once.
        input_bytes: inputs and parameters.
        output_bytes: output.
        reserved_bytes: held by the GPU allocator at the peak.
        process_bytes: high water of the process above its state before the call, on CPU.
    """

    peak_bytes: int | None = None
    extra_bytes: int | None = None
    saved_bytes: int | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score(Json):
    """Result of one training run.

    Args:
        metric: name, such as `"accuracy"`.
        value: on test, as a fraction for accuracies.
        validation: best on validation: the selection.
        num_examples: in test.
        chance: what guessing scores.
        floors: what trivial models score on the same test set, by name.
        references: what models score that are not trivial but need no attention either, or read what a trained one has
            to find; by name.
        best_step: step of the selected weights.
        num_steps: steps trained.
        num_params: trainable parameters.
        train_flops: total training FLOPs from formulas, or None where the variant has none.
        train_s: seconds of training, evaluation excluded.
        tokens_per_s: training throughput, padding excluded.
        curve: evaluations in order: step, train_loss, validation_loss, validation value.
        correct: per scored test item, 1 or 0, as a string of digits: paired comparisons need it. Empty where items are
            too many to keep.
        breakdown: the test score for each combination of the task's `group_axes`: their values by name, then `value`
            and `num_items`.
        settings: the whole protocol as it was in force, task settings and overrides applied.
        peak_bytes: most memory in use while training: the allocator's peak on GPU, the process's high water on CPU.
        padding_frac: share of the positions trained on that were padding.
        pretrain: what the model learned before on the task's own inputs, such as `"masked"`; empty for none.
        pretrain_s: seconds of it, in addition to `train_s`.
        pretrain_flops: its FLOPs, in addition to `train_flops`.
    """

    metric: str
    value: float
    validation: float
    num_examples: int
    chance: float
    floors: dict[str, float] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)
    best_step: int
    num_steps: int
    num_params: int
    train_flops: float | None = None
    train_s: float
    tokens_per_s: float
    curve: tuple[dict[str, float], ...] = ()
    correct: str = ""
    breakdown: tuple[dict[str, float], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    padding_frac: float | None = None
    pretrain: str = ""
    pretrain_s: float | None = None
    pretrain_flops: float | None = None

    @property
    def is_lower_better(self) -> bool:
        """Whether a smaller value is the better one."""
        return self.metric in LOWER_IS_BETTER
