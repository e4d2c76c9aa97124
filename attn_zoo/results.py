"""What was measured: times, bytes, scores; and how such records become JSON and come back. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from attn_zoo.errors import StoreError

__all__ = ["LOWER_IS_BETTER", "Ceilings", "Json", "Memory", "Score", "Timing"]

LOWER_IS_BETTER = frozenset({"bits_per_byte"})
"""Metrics of which a smaller value is the better one; all others are fractions of what was right."""


@cache
def _validator(cls: type) -> TypeAdapter[Any]:
    """Return the validator of a class: making it takes a hundred times as long as using it."""
    return TypeAdapter(cls)


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
            return _validator(cls).validate_python(dict(data))  # type: ignore[arg-type, no-any-return]
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
        median_ms: of the samples; of several processes the geometric mean of their medians, so that all count alike.
        q1_ms: lower quartile, likewise.
        q3_ms: upper quartile.
        low_ms: lower end of the 95 % interval of the median: of one process only what differs within it, of several
            what differs between them too.
        high_ms: upper end.
        first_ms: the first call, compilation included.
        num_warmup: calls before the first sample.
        inner_loops: calls per sample.
        timer: `"perf_counter"` or `"cuda_event"`.
        process_cpu_ms: processor time per call over all threads, on CPU.
        process_sizes: how many samples each process took, where several did, in the order of `samples_ms`; what is not
            about samples is then of the first process. Empty for one process.
        graph_ms: of the same call replayed from a CUDA graph, cache warm: median over samples of many replays. Only
            where a single call is bound by its launches.
        graph_reason: why there is no such time although there should be one.
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
    process_sizes: tuple[int, ...] = ()
    graph_ms: float | None = None
    graph_reason: str = ""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings(Json):
    """What a machine could do just before a run, on random data, and what its maker promises: the roof of a roofline.

    Args:
        device: `"cpu"` or `"cuda"`.
        dtype: of the matrix product.
        threads: CPU threads, as the cells ask for them; None leaves torch's default.
        matmul_flops_per_s: of a large matrix product, a multiply-add being two; the fastest of a few.
        copy_bytes_per_s: of a copy too large for a cache, read and written bytes both counted; the fastest of a few.
        peak_flops_per_s: on the maker's data sheet, dense, or None where we know of none.
        peak_bytes_per_s: of the memory, likewise.
        environment: digest of the environment, described in `run.json`.
        measured: UTC time, ISO 8601.
        idle_watts: drawn by the GPU just before, where it tells.
        temperature_c: of the GPU just before.
        clocks_mhz: of the GPU before and after.
        flags: what makes the figures doubtful, such as `"loaded_host"`.
    """

    device: str
    dtype: str
    threads: int | None = None
    matmul_flops_per_s: float
    copy_bytes_per_s: float
    peak_flops_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    environment: str = ""
    measured: str = ""
    idle_watts: float | None = None
    temperature_c: float | None = None
    clocks_mhz: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def subject(self) -> tuple[str, str, str, int | None]:
        """What was measured: environment, device, dtype and threads. One run keeps one entry for each."""
        return self.environment, self.device, self.dtype, self.threads

    def floor_s(self, flops: float, num_bytes: float) -> float:
        """Return the shortest time that so much work can take: arithmetic and traffic overlap, the longer one counts.

        Args:
            flops: useful operations.
            num_bytes: that must move: inputs read once, outputs written once.

        >>> roof = Ceilings(device="cpu", dtype="float32", matmul_flops_per_s=1e11, copy_bytes_per_s=1e10)
        >>> roof.floor_s(2e9, 1e6), roof.floor_s(2e9, 1e9)
        (0.02, 0.1)
        """
        return max(flops / self.matmul_flops_per_s, num_bytes / self.copy_bytes_per_s)
