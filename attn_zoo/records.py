"""What a matrix is made of and what it leaves behind: cells, measurements, records, environments; to and from JSON.

A `Cell` says everything that decides a result; its key is a hash of that. A `Record` is what became of one cell.
Numbers that were not measured are absent (None), never NaN and never zero. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from attn_zoo.errors import StoreError, counted

SCHEMA_VERSION = 1
"""Of the JSON form. History: 1, first."""

PROTOCOL_VERSION = 4
"""Of the way we measure. Part of every scaling cell's key, so that results never mix. History: 1, first; 2, other
random inputs on a CPU, drawn on all threads; one gate per run for cells equal in all that a gate depends on; 3,
freed memory stays in the process that measures; 4, the digest of a variant covers all of this package that a call
runs; on a GPU, of which no result of version 4 was published before, a short call is made untimed before some are
timed, and graphs of short calls hold several of them."""

TRAINING_VERSION = 4
"""Of the way we train; likewise for accuracy cells. History: 1, first; 2, every kind of task, bucketing by length,
self-pretraining; 3, the digest of a variant covers all of this package that trains it; 4, batches of similar lengths
in evaluations too, where training has them, and stronger floors."""

STEP_VERSION = 100 * PROTOCOL_VERSION + TRAINING_VERSION
"""Of training steps that are timed, which depend on both."""

APPROXIMATION_VERSION = 1
"""Of the way distances from exact attention are measured, the kinds of inputs included. History: 1, first."""

REPLACEMENT_VERSION = 100 + TRAINING_VERSION
"""Of the way trained models are given another mechanism, which depends on how they were trained. History: 1, first."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Of bytes, operations, parameters, steps: what no table or file of 64-bit numbers could hold is no count."""

Size = Annotated[int, Field(ge=1, lt=2**63)]
Positive = Annotated[float, Field(gt=0)]

MEASURED_PHASES = frozenset({"timing", "memory", "energy", "training", "comparing"})
"""Of `Record.phases`, those in which the harness measures; the others are what it adds."""

Status = Literal[
    "ok",
    "unsupported",
    "gate_failed",
    "oom_device",
    "oom_host",
    "skipped_after_oom",
    "timeout",
    "crashed",
    "diverged",
    "error",
    "cancelled",
]
"""What became of a cell. `cancelled` is never stored: a cell that is stopped, or ended by a disk that is full, has no
record, and the next run takes it up."""
STATUSES: tuple[str, ...] = get_args(Status)

ANSWERS = frozenset({"ok", "unsupported"})
"""The run did what was asked; every other status makes its exit code 1."""

CLEAN = frozenset({"ok", "unsupported", "gate_failed", "diverged"})
"""A process is as good after these as before. After any other it is replaced."""

STOPPERS = frozenset({"oom_device", "oom_host", "skipped_after_oom", "timeout"})
"""After these, longer lengths of the same curve are not tried: they need more of the same."""

CallPass = Literal["infer", "fwd", "bwd", "fwd_bwd"]
"""Passes of one call; see `PASSES`."""

InputKind = Literal["diffuse", "peaked", "local", "topics"]
"""Kinds of random queries, keys and values that a distance from exact attention is measured on."""

PassName = CallPass | Literal["prefill", "decode", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one timing covers.

    Args:
        name: as in a matrix.
        title: for people.
        has_graph: the forward keeps what a backward needs.
        forwards: in one call.
        backwards: in one call.
        is_one_token: it is about one token after many others, so that what is true of a whole sequence (its formulas,
            its claimed growth) is not true of it.
    """

    name: PassName
    title: str
    has_graph: bool
    forwards: int
    backwards: int
    is_one_token: bool = False

    def num_forwards(self, backward_ratio: float) -> float:
        """Return how many forwards the pass is worth; the ratio is of FLOPs or of bytes."""
        return self.forwards + backward_ratio * self.backwards


PASSES: dict[str, Pass] = {
    pass_.name: pass_
    for pass_ in (
        Pass(name="infer", title="forward, no graph kept", has_graph=False, forwards=1, backwards=0),
        Pass(name="fwd", title="forward", has_graph=True, forwards=1, backwards=0),
        Pass(name="bwd", title="backward", has_graph=True, forwards=0, backwards=1),
        Pass(name="fwd_bwd", title="forward + backward", has_graph=True, forwards=1, backwards=1),
        Pass(name="prefill", title="prefill to the first token", has_graph=False, forwards=1, backwards=0),
        Pass(name="decode", title="one decoded token", has_graph=False, forwards=1, backwards=0, is_one_token=True),
        Pass(name="step", title="training step", has_graph=True, forwards=1, backwards=1),
    )
}
"""All passes by name: the one place that knows how much work each is."""


def is_one_token(pass_: str | None) -> bool:
    """Return whether a pass is about one token; see `Pass`. One of a newer version is taken for a whole sequence."""
    return pass_ in PASSES and PASSES[pass_].is_one_token


LOWER_IS_BETTER = frozenset({"bits_per_byte"})
"""Metrics of which a smaller value is the better one; all others are fractions of what was right."""


@cache
def _validator(cls: type) -> TypeAdapter[Any]:
    """Return the validator of a class: making it takes a hundred times as long as using it."""
    return TypeAdapter(cls)


def checksum(data: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that change with any value of plain data."""
    return _hashed(_COMPACT.encode(data))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_COMPACT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


class Json:
    """To and from JSON, strictly: unknown or missing fields, other types and non-finite numbers are refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def values(self) -> dict[str, Any]:
        """Return the fields by name, not copied: nine times as fast as `to_dict`."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]

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
    def from_dict(cls, data: Mapping[str, Any], source: str = "", *, is_of_table: bool = False) -> Self:
        """Return the validated object; where `data` also has their `checksum`, it must fit.

        Args:
            data: fields by name, as JSON has them: arrays stand for tuples, and whole numbers for floats.
            source: of the data, for messages.
            is_of_table: numbers may be texts or of numpy, and whole ones floats, as a table has them; no checksum.

        Raises:
            StoreError: `data` does not have the fields and types of this class, or was changed.
        """
        if not isinstance(data, Mapping):
            raise StoreError(f"{source or cls.__name__}: expected an object with its fields; got {data!r:.60}")
        values = dict(data)
        noted = values.pop("checksum", None)
        validator = _validator(cls)  # type: ignore[arg-type] # mypy mistakes the class for one of its objects
        try:
            if is_of_table:
                return cast(Self, validator.validate_python(values))
            # Validated as a text: only of JSON do strict rules take arrays and objects for tuples and dataclasses.
            text = json.dumps(values) if noted is None else _COMPACT.encode(values)
            if noted is not None and noted != _hashed(text):
                raise StoreError(f"{source or cls.__name__}: its checksum does not fit: a value was changed")
            return cast(Self, validator.validate_json(text, strict=True))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            path = ".".join(str(part) for part in first["loc"])
            raise StoreError(
                f"{source or cls.__name__}: {path}: {first['msg']} ({counted(error.error_count(), 'problem')})"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:  # what JSON cannot hold
            raise StoreError(f"{source or cls.__name__}: {error}") from None


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
        host_ms: on a GPU, until a call has launched its work and returned to the host: median. None in older records.
        graph_ms: on a GPU, of the same call replayed from a CUDA graph, cache warm: median over samples of many
            replays; of several processes the geometric mean of their medians. Older records have it of the first
            process only, and the oldest only where a single call took less than 0.1 ms.
        graph_by_process_ms: these medians, where several processes took samples: of each that could replay the call,
            in their order. Empty for one process, and in older records.
        graph_reason: why there is no such time, of any process, although there should be one.
        graph_flags: what makes it doubtful, as `flags` do the samples: it is taken after them. Empty in older records.
        num_discarded: samples that were taken again, because something else disturbed the machine meanwhile.
        flags: what makes the numbers doubtful, such as `"unstable"`.
    """

    samples_ms: tuple[Positive, ...]
    median_ms: float
    q1_ms: float
    q3_ms: float
    low_ms: float
    high_ms: float
    first_ms: float
    num_warmup: Count
    inner_loops: Size
    timer: str
    process_cpu_ms: float | None = None
    process_sizes: tuple[Size, ...] = ()
    host_ms: float | None = None
    graph_ms: Positive | None = None
    graph_by_process_ms: tuple[Positive, ...] = ()
    graph_reason: str = ""
    graph_flags: tuple[str, ...] = ()
    num_discarded: Count = 0
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.process_sizes and sum(self.process_sizes) != len(self.samples_ms):
            sizes = " + ".join(map(str, self.process_sizes))
            raise ValueError(f"expected {sizes} samples, those of all processes; got {len(self.samples_ms)}")

    @property
    def by_process(self) -> tuple[tuple[float, ...], ...]:
        """The samples of each process."""
        sizes = self.process_sizes or (len(self.samples_ms),)
        return tuple(self.samples_ms[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Json):
    """Bytes one call needs. None where a method does not apply to the device.

    Args:
        peak_bytes: most that tensors occupied during the call, inputs included: allocator peak on GPU, exact tensor
            peak on CPU.
        extra_bytes: `peak_bytes` without inputs, output and gradients of the inputs: what the mechanism itself needs.
            Of a training step and of a decoded token without `input_bytes` alone.
        saved_bytes: kept for backward after forward, inputs included, each storage once.
        input_bytes: inputs and parameters.
        output_bytes: output.
        reserved_bytes: held by the GPU allocator at the peak.
        process_bytes: high water of the process above its state before the call, on CPU.
        state_bytes: of the state that a decoded token starts from, without what its buffers have to spare.
    """

    peak_bytes: Count | None = None
    extra_bytes: Count | None = None
    saved_bytes: Count | None = None
    input_bytes: Count | None = None
    output_bytes: Count | None = None
    reserved_bytes: Count | None = None
    process_bytes: Count | None = None
    state_bytes: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Approximation(Json):
    """How far an output is from that of exact softmax attention on the same queries, keys and values, in float64.

    Args:
        error: norm of the difference over the norm of the exact output, over all rows that were compared. Zeros have 1.
        mean_error: likewise of the mean of the values that a row sees: what equal weights give.
        rounding_error: likewise of exact attention computed in the dtype of the cell, scores and softmax in float32 at
            least; 0 in float64, which is what it is compared with.
        num_effective_keys: over how many keys a row's exact weights spread, 1 / sum of their squares: median over rows.
        num_rows: that were compared.
        has_budget: the variant declares options that become exact where their budget grows, or that it is exact; else
            it is no approximation, or one that converges without an end.
    """

    error: float
    mean_error: float
    rounding_error: float
    num_effective_keys: float
    num_rows: Count
    has_budget: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement(Json):
    """What became of a trained model when another mechanism took the place of its own, before any further training.

    Args:
        trained_value: what the model scores on the same test set with its own mechanism.
        layers: how far the heads of each mixer are from what its own mechanism gives them, in the order in which the
            mixers are called; `rounding_error` is that of the mechanism itself in the dtype of the cell.
        num_new_params: parameters of the mechanism that the trained model has not, as they are drawn.
    """

    trained_value: float
    layers: tuple[Approximation, ...]
    num_new_params: Count

    @property
    def error(self) -> float:
        """The root of the mean square over layers."""
        return math.sqrt(fmean(layer.error**2 for layer in self.layers))

    @property
    def mean_error(self) -> float:
        """Likewise of the mean of the values."""
        return math.sqrt(fmean(layer.mean_error**2 for layer in self.layers))


EQUAL_WEIGHTS = "equal_weights"
"""Name of a floor: what a trained model scores where every row of a head is the mean of the values that it sees."""

AS_TRAINED = "as_trained"
"""Name of a reference: what it scores with its own mechanism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score(Json):
    """Result of one training run, or of a trained model with another mechanism.

    Args:
        metric: name, such as `"accuracy"`.
        value: on test, as a fraction for accuracies.
        validation: best on validation: the selection.
        num_examples: in test.
        num_effective: test examples of equally many items that would settle the score as well: of n_i items each
            (sum n_i)^2 / sum n_i^2 (Kish 1965); None in older records.
        chance: what guessing scores.
        floors: what trivial models score on the same test set, by name.
        references: what models score that are not trivial but need no attention either, or read what a trained one has
            to find; by name.
        best_step: step of the selected weights.
        num_steps: steps trained.
        num_params: trainable parameters.
        train_flops: total training FLOPs from formulas, or None where the variant has none.
        train_s: seconds of training, evaluation excluded.
        compile_s: seconds of those updates that compiled the model or captured a CUDA graph, and of the check of what
            is compiled; part of `train_s`.
        eval_s: seconds of all evaluations, the test included; in addition to `train_s`.
        eval_compile_s: seconds of those batches in them that compiled the model or captured a CUDA graph; part of
            `eval_s`.
        tokens_per_s: training throughput of all devices together, padding excluded, and so are the updates that
            compiled where others followed; None where nothing was trained.
        curve: evaluations in order: step, train_loss, validation_loss, validation value.
        correct: per scored test item, 1 or 0, as a string of digits: paired comparisons need it. Empty where items are
            too many to keep.
        breakdown: the test score for each combination of the task's `group_axes`: their values by name, then `value`,
            `num_items`, and `floor`, the best of the floors on these items, where the task says; none in older records.
        settings: the whole protocol as it was in force, task settings and overrides applied.
        peak_bytes: most memory in use while training: the allocator's peak on GPU, the process's high water on CPU; of
            several processes that train together, of the one with most.
        padding_frac: share of the positions trained on that were padding.
        pretrain: what the model learned before on the task's own inputs, such as `"masked"`; empty for none.
        pretrain_s: seconds of it, in addition to `train_s`.
        pretrain_flops: its FLOPs, in addition to `train_flops`.
    """

    metric: str
    value: float
    validation: float
    num_examples: Count
    num_effective: float | None = None
    chance: float
    floors: dict[str, float] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)
    best_step: Count
    num_steps: Count
    num_params: Count
    train_flops: float | None = None
    train_s: float
    compile_s: float | None = None
    eval_s: float | None = None
    eval_compile_s: float | None = None
    tokens_per_s: float | None = None
    curve: tuple[dict[str, float], ...] = ()
    correct: str = ""
    breakdown: tuple[dict[str, float], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    peak_bytes: Count | None = None
    padding_frac: float | None = None
    pretrain: str = ""
    pretrain_s: float | None = None
    pretrain_flops: float | None = None

    @property
    def num_settling(self) -> float:
        """Test examples that the value's standard error counts: as many as would settle it, where that is known."""
        return self.num_examples if self.num_effective is None else self.num_effective

    @property
    def is_lower_better(self) -> bool:
        """Whether a smaller value is the better one."""
        return self.metric in LOWER_IS_BETTER


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings(Json):
    """What a machine could do beside a run, on random data, and what its maker promises: the roof of a roofline.

    Args:
        device: `"cpu"` or `"cuda"`.
        dtype: of the matrix product.
        threads: CPU threads, as the cells ask for them; None leaves torch's default.
        matmul_flops_per_s: of a large matrix product, a multiply-add being two; the fastest of a few.
        copy_bytes_per_s: of a copy too large for a cache, read and written bytes both counted; the fastest of a few.
        peak_flops_per_s: on the maker's data sheet, dense, or None where we know of none.
        peak_bytes_per_s: of the memory, likewise.
        is_tf32: float32 products on a GPU might round their inputs to TF32, and the data sheet's figure is TF32's. None
            for everything else, and in older records, whose figure is TF32's although products did not round.
        environment: digest of the environment, described in `run.json`.
        measured: UTC time of the product, ISO 8601; what follows is of then too.
        idle_watts: drawn by the GPU just before, where it tells.
        temperature_c: of the GPU just before.
        clocks_mhz: of the GPU before and after.
        flags: what makes the figures doubtful, such as `"loaded_host"`.
    """

    device: str
    dtype: str
    threads: int | None = None
    matmul_flops_per_s: Positive
    copy_bytes_per_s: Positive
    peak_flops_per_s: Positive | None = None
    peak_bytes_per_s: Positive | None = None
    is_tf32: bool | None = None
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

    @property
    def sheet_flops_per_s(self) -> float | None:
        """What the maker promises for the products that were measured; None where we do not know."""
        is_of_tf32 = self.device == "cuda" and self.dtype == "float32" and self.is_tf32 is None
        return None if is_of_tf32 else self.peak_flops_per_s

    def or_faster(self, other: Ceilings) -> Ceilings:
        """Return the faster product and the faster copy of two measurements: a busy moment hides what a machine can do.

        >>> first = Ceilings(device="cpu", dtype="float32", matmul_flops_per_s=1e11, copy_bytes_per_s=2e10)
        >>> best = first.or_faster(replace(first, matmul_flops_per_s=2e11, copy_bytes_per_s=1e10))
        >>> best.matmul_flops_per_s, best.copy_bytes_per_s
        (200000000000.0, 20000000000.0)
        """
        faster = max(self, other, key=lambda one: one.matmul_flops_per_s)
        return replace(faster, copy_bytes_per_s=max(self.copy_bytes_per_s, other.copy_bytes_per_s))

    def floor_s(self, flops: float, num_bytes: float) -> float:
        """Return the shortest time that so much work can take: arithmetic and traffic overlap, the longer one counts.

        >>> roof = Ceilings(device="cpu", dtype="float32", matmul_flops_per_s=1e11, copy_bytes_per_s=1e10)
        >>> roof.floor_s(2e9, 1e6), roof.floor_s(2e9, 1e9)
        (0.02, 0.1)
        """
        return max(flops / self.matmul_flops_per_s, num_bytes / self.copy_bytes_per_s)


def _short(value: Any) -> str:
    """Return a value of a grid as ids write it: numbers as they are, anything else after a dash."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    parts = value if isinstance(value, list | tuple) else [value]
    return "".join(f"-{part:g}" if isinstance(part, float) else f"-{str(part).lower() or 'none'}" for part in parts)


class _Curve:
    """What is worked out once for all cells that differ in length only.

    Attributes:
        head: hash of the text of a key, up to the length.
        tail: the text after it.
        digest: see `Cell.curve`; empty until somebody asks.
    """

    __slots__ = ("digest", "head", "tail")

    def __init__(self, head: str, tail: str) -> None:
        self.head, self.tail, self.digest = hashlib.sha256(head.encode()), tail, ""


class _OfCurve:
    __slots__ = ("_shared",)
    _shared: _Curve


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell(Json, _OfCurve):
    """One point of a matrix. Fields that do not apply to its kind are None.

    Args:
        kind: `"scaling"` (time and memory of one call or training step), `"decode"` (of one decoded token, or of the
            prefill before it), `"accuracy"` (a training run), or another of `attn_zoo.matrix.kinds`.
        variant: registered name.
        label: what plots call it; the variant's name unless the matrix gives option sets names of their own.
        options: the variant's options as given.
        variant_digest: of the variant's source file, of what the measured code imports, and of `Record.packages`.
        dtype: name of the floating-point type.
        device: `"cpu"` or `"cuda"`.
        batch_size: B.
        seed: of inputs, initialisation and everything random.
        threads: CPU threads; None leaves torch's default.
        data_parallel: processes that train the model together, each a part of every batch, on a device of its own (on
            CPU: a share of the cores). Part of the key: sums are rounded otherwise, dropout is drawn otherwise, and
            times are of as many devices.
        scope: `"attention"` (heads in, heads out), `"mixer"` (hidden states, projections included) or `"model"` (all of
            the backbone).
        pass_: what is timed; of a model `"step"`: a training step.
        seq_len: tokens; of a decoded one those before it, which prefill reads.
        num_heads: H.
        num_kv_heads: G.
        head_dim: D.
        is_causal: later keys hidden.
        has_padding: the last quarter of every second sequence is padding, of the first one too; see `least_pairs_frac`.
        dropout_p: on attention weights.
        inputs: kind of the queries, keys and values that an approximation is measured on; empty for normal numbers.
        task: registered task.
        level: difficulty of the task.
        protocol: named training protocol.
        overrides: fields of the protocol that the matrix changes.
        grid: the names among `overrides` that the matrix tunes: the same trials for every variant, of which the report
            takes the one that is best on validation.
        data_digest: of the task's data.
        replaces: mechanism of the trained model in whose place the variant is put; empty for none.
        adapt_steps: updates that the model makes afterwards.
        together: digest of all that are timed in turns with this cell, itself included, and of the number of
            repeats; empty where it is timed alone. The same for all lengths.
        protocol_version: `PROTOCOL_VERSION` or, for accuracy, `TRAINING_VERSION`; `STEP_VERSION` for training steps,
            `APPROXIMATION_VERSION` for approximations, `REPLACEMENT_VERSION` for replacements.
    """

    kind: str
    variant: str
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    variant_digest: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: Size | None = None
    seed: int = 0
    threads: Size | None = None
    data_parallel: Size = 1
    scope: Literal["attention", "mixer", "model"] | None = None
    pass_: PassName | None = None
    seq_len: Size | None = None
    num_heads: Size | None = None
    num_kv_heads: Size | None = None
    head_dim: Size | None = None
    is_causal: bool = False
    has_padding: bool = False
    dropout_p: float = 0.0
    inputs: InputKind | Literal[""] = ""
    task: str | None = None
    level: str | None = None
    protocol: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    grid: tuple[str, ...] = ()
    data_digest: str = ""
    replaces: str = ""
    adapt_steps: Count = 0
    together: str = ""
    protocol_version: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        # Equal cells must have equal keys, and 0 == 0.0 while their JSON differs.
        object.__setattr__(self, "dropout_p", float(self.dropout_p))

    @property
    def key(self) -> str:
        """First 20 hexadecimal digits of the SHA-256 of all fields: the name of the cell's record."""
        shared = self._in_common()
        digest = shared.head.copy()
        length = "null" if self.seq_len is None else f"{self.seq_len:d}"
        digest.update(f"{length}{shared.tail}".encode())
        return digest.hexdigest()[:20]

    def _in_common(self) -> _Curve:
        if (shared := getattr(self, "_shared", None)) is not None:
            return cast(_Curve, shared)
        data = self.values()
        # Newer than the first results, whose keys must stay what they are.
        absent = {"grid": (), "together": "", "data_parallel": 1, "inputs": "", "replaces": "", "adapt_steps": 0}
        for name, default in absent.items():
            if data[name] == default:
                del data[name]
        head, tail = ({name: data[name] for name in data if (name < "seq_len") is first} for first in (True, False))
        del tail["seq_len"]
        try:
            head_text, tail_text = (json.dumps(part, sort_keys=True, allow_nan=False) for part in (head, tail))
        except ValueError as error:
            raise StoreError(f"Cell: only finite numbers can be stored ({error})") from error
        shared = _Curve(f'{head_text[:-1]}, "seq_len": ', f", {tail_text[1:]}")
        object.__setattr__(self, "_shared", shared)
        return shared

    def at(self, seq_len: int | None) -> Cell:
        """Return the cell of the same curve at another length; what the two share is not worked out again."""
        other = replace(self, seq_len=seq_len)
        object.__setattr__(other, "_shared", self._in_common())
        return other

    @property
    def id(self) -> str:
        """Readable name, such as `linformer/scaling/fwd/L4096/bf16/seed0`. Not unique across option sets.

        What a training protocol decides is not repeated, nor are sizes that a matrix has by default.
        """
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(
            self.dtype, self.dtype
        )
        is_training, has_own_sizes = self.task is not None, self.protocol is None
        parts = (
            (str(self.task), is_training),
            (str(self.level), is_training),
            (str(self.protocol), is_training),
            (str(self.pass_), self.pass_ not in (None, self.kind)),
            (self.inputs, self.inputs != ""),
            (f"L{self.seq_len}", self.seq_len is not None),
            (short, not is_training or self.dtype != "float32"),
            ("mixer", self.scope == "mixer"),
            (str(self.protocol), not is_training and not has_own_sizes),
            (f"B{self.batch_size}", not is_training and (not has_own_sizes or self.batch_size not in (None, 1))),
            ("causal", self.is_causal),
            ("padded", self.has_padding),
            (f"dropout{self.dropout_p:g}", has_own_sizes and self.dropout_p > 0),
            (f"H{self.num_heads}", has_own_sizes and self.num_heads not in (None, 8)),
            (f"G{self.num_kv_heads}", has_own_sizes and self.num_kv_heads not in (None, self.num_heads)),
            (f"D{self.head_dim}", has_own_sizes and self.head_dim not in (None, 64)),
            ("pretrain", bool(self.overrides.get("pretrain")) and "pretrain" not in self.grid),
            (f"{self.data_parallel}ranks", self.data_parallel > 1),
            (f"for-{self.replaces}", self.replaces != ""),
            (f"adapt{self.adapt_steps}", self.adapt_steps > 0),
        )
        tried = [f"{name}{_short(self.overrides.get(name))}" for name in self.grid]
        named = [text for text, is_said in parts if is_said]
        return "/".join([self.label or self.variant, self.kind, *named, *tried, f"seed{self.seed}"])

    @property
    def num_tokens(self) -> float | None:
        """Tokens that one timing is about; None where a call is one of whole sequences, or the batch is not known.

        Of a training step those that it learns from, padding excluded, as a mean over batches; of a decoded token one
        for each sequence, of a prefill all.
        """
        if is_one_token(self.pass_):
            return self.batch_size
        if self.pass_ == "prefill" and self.batch_size is not None and self.seq_len is not None:
            return self.batch_size * self.seq_len
        if self.scope != "model" or self.batch_size is None or self.seq_len is None:
            return None
        padded = self.seq_len // 4 / 2 if self.has_padding else 0.0  # a quarter of every second sequence
        return self.batch_size * (self.seq_len - padded)

    @property
    def least_pairs_frac(self) -> float:
        """Share of the pairs of positions that is computed at least: formulas count padding, which may be left out.

        With padding those within the quarters that are there, of a padded sequence; other sequences have more.
        """
        return (3 / 4) ** 2 if self.has_padding else 1.0

    @property
    def curve(self) -> str:
        """Equal for cells that differ in length only."""
        shared = self._in_common()
        if not shared.digest:
            shared.digest = hashlib.sha256(self.all_but("seq_len").encode()).hexdigest()[:20]
        return shared.digest

    def all_but(self, *names: str) -> str:
        """Return JSON of all fields but these."""
        data = self.values()
        for name in names:
            del data[name]
        return json.dumps(data, sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment(Json):
    """The machine and software of a run. Nothing here identifies a person: the host name is hashed.

    Args:
        host: first 12 hexadecimal digits of the SHA-256 of the host name; of several alike, the one that ran last.
        platform: operating system, release and machine.
        cpu: model name.
        num_cores: usable by this process.
        memory_bytes: of the host.
        threads: torch's intra-op threads.
        gpu: name of the GPU, or None.
        gpu_memory_bytes: of the GPU.
        gpu_power_limit_w: watts that the GPU is held to; None where NVML does not tell, and in older records.
        driver: of the GPU.
        versions: of Python and the packages that matter, by name; CUDA and cuDNN too.
        commit: git commit of this package's sources, or empty.
        is_dirty: uncommitted changes, at any of the commits.
        earlier_commits: at which results of the same folder were measured before, oldest first.
        variables: environment variables from an allow-list.
    """

    host: str
    platform: str
    cpu: str
    num_cores: int
    memory_bytes: int
    threads: int
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_power_limit_w: float | None = None
    driver: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    is_dirty: bool = False
    earlier_commits: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def deciding(self) -> dict[str, Any]:
        """Return what decides how long anything takes here: all but the host, the commits and which of its GPUs it is.

        Sources are in the keys of cells. Alike hosts report memory that differs by what their firmware keeps.
        """
        data = asdict(self)
        for name in ("host", "commit", "is_dirty", "earlier_commits"):
            del data[name]
        data["memory_bytes"] = round(self.memory_bytes, -9)
        data["variables"].pop("CUDA_VISIBLE_DEVICES", None)
        return data

    @property
    def digest(self) -> str:
        """12 hexadecimal digits, equal for environments whose results may be compared."""
        data = self.deciding()
        if self.gpu_power_limit_w is None:  # newer than the first results, whose digests must stay what they are
            del data["gpu_power_limit_w"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]

    def following(self, before: Environment) -> Environment:
        """Return this environment with the commits of `before`, of the same digest, so that none is forgotten."""
        commits = [each for each in (*before.earlier_commits, before.commit) if each not in ("", self.commit)]
        return replace(self, earlier_commits=tuple(dict.fromkeys(commits)), is_dirty=self.is_dirty or before.is_dirty)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Json):
    """What became of one cell.

    Args:
        cell: the cell.
        status: named outcome.
        reason: one sentence for every status but `ok`.
        environment: digest of the environment, described in `run.json`.
        host: that ran it, hashed as in `Environment`; empty for cells that never started, and in older records.
        started: UTC time, ISO 8601.
        duration_s: of the whole cell, set-up included.
        isolation: `"cell"`: a process of its own; `"lane"`: one that may have run other cells of this variant before;
            `"interleaved"`: one in which several variants are timed in turns.
        bundle: id shared by the cells that were timed in turns: sample k of each process was taken in the same round.
            Empty for a cell that was timed alone, which one of an interleaved group may be: its reason says why.
        phases: seconds by name, over the time from the end of the cell before to the end of this one: see
            `overhead_s`.
        attempt: 1 for the first.
        exit_code: of the worker process, where it ended abnormally; negative for a signal.
        kernels: paths that really ran, in order of first use.
        num_jobs: cells that shared the device, this one included: with more than one, times mean little.
        is_simulated: the variant computes dense scores underneath, so its cost says nothing about the mechanism.
        gate: checks passed before timing, by this process or, but for those of its own output (`own_...`), by an
            earlier one of the same run on the same subject: see `attn_zoo.conformance.verdicts`.
        flops: forward FLOPs from the variant's formula: of one forward, whatever the pass.
        projection_flops: those of `flops` that are linear maps between hidden states and what the mechanism acts on.
        min_bytes: bytes that one forward must move at least: from the variant's formula, or its inputs read once and
            its output written once; of a decoded token, with what it must read of its state.
        backward_ratio: FLOPs of the backward over those of the forward, as the variant counts them.
        time_exponent: of the length, that the variant claims under the options of the cell; None in older records.
        memory_exponent: likewise.
        counted_flops: forward FLOPs as counted while running, or None where the counter does not see the kernel.
        energy_joules: per call, where NVML is readable.
        energy_reason: why there is none although the matrix asks for it; empty in older records.
        clocks_mhz: GPU clock before and after.
        num_params: of the module under test.
        packages: versions of what the variant's own files import, beyond what the environment records.
        timing, memory, score, approximation, replacement: measurements.
        trace: end of the traceback, for failures.
        schema: see `SCHEMA_VERSION`.
    """

    cell: Cell
    status: Status
    reason: str = ""
    environment: str = ""
    host: str = ""
    started: str = ""
    duration_s: float = 0.0
    isolation: Literal["cell", "lane", "interleaved"] = "cell"
    bundle: str = ""
    attempt: Size = 1
    exit_code: int | None = None
    kernels: tuple[str, ...] = ()
    is_simulated: bool = False
    gate: tuple[str, ...] = ()
    flops: Count | None = None
    projection_flops: Count | None = None
    min_bytes: Count | None = None
    backward_ratio: float | None = None
    time_exponent: float | None = None
    memory_exponent: float | None = None
    counted_flops: Count | None = None
    energy_joules: float | None = None
    energy_reason: str = ""
    clocks_mhz: tuple[float, ...] = ()
    num_params: Count | None = None
    packages: dict[str, str] = field(default_factory=dict)
    num_jobs: Size = 1
    timing: Timing | None = None
    memory: Memory | None = None
    score: Score | None = None
    approximation: Approximation | None = None
    replacement: Replacement | None = None
    trace: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION

    @property
    def overhead_s(self) -> float | None:
        """Seconds that the harness took around what it measured, or None where nothing is known.

        All phases but `"timing"` (first call, warm-up, samples), `"memory"`, `"energy"`, `"training"` and `"comparing"`
        (of an output with the exact one): what is left is `"driver"` (storing the record before, choosing this cell),
        `"start"` (waiting for a process that has loaded torch), `"build"`, `"gate"`, `"probe"` (of calls at the cell's
        own length; part of the gate in older records), `"count"` and `"exchange"` (requests, answers, ending the
        process). Where several processes start at once, their cells share that time equally.
        """
        if not self.phases:
            return None
        return sum(seconds for name, seconds in self.phases.items() if name not in MEASURED_PHASES)
