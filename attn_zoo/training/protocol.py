"""Protocols: everything besides variant, task and seed that decides a score, as frozen data with a name.

Scores are comparable only under one protocol. What a task sets differently (published settings differ by task) stands
in the task's `settings`; what a matrix sets differently in the cell's `overrides`. The precision is the cell's `dtype`.
`attn_zoo.records.TRAINING_VERSION` enters every cell's key: raise it when a protocol here changes.
`require` says what a run under a protocol asks of its variant, before any data is made.

Learning rates are pure functions of the step, so that a run can start again anywhere. Steps count from 1: the rate of
step t is the one that the t-th update uses. With T steps, W of them warm-up, and the model's width E, the base rate is
multiplied by

    constant: min(1, t / W)
    linear: min(1, t / W), then straight to 0 at T (one cycle)
    cosine: min(1, t / W), then (1 + cos(pi (t - W) / (T - W))) / 2
    rsqrt: min(1, t / W) / sqrt(max(t, W)), of Long Range Arena; the peak is base / sqrt(W)
    noam: E^-0.5 min(t^-0.5, t W^-1.5), of Vaswani et al. 2017, section 5.3; the base rate there is 1
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from attn_zoo.errors import ConfigError, UnknownNameError, UnsupportedError
from attn_zoo.metadata import Capabilities, Position, Request
from attn_zoo.model import ModelConfig
from attn_zoo.model.config import LEAKY_NORM, Activation, NormKind, PoolingKind, PositionKind
from attn_zoo.records import Cell
from attn_zoo.registry import capabilities_of, make_config, tasks
from attn_zoo.tasks import TaskSpec

ScheduleKind = Literal["constant", "linear", "cosine", "rsqrt", "noam"]
SCHEDULES: tuple[ScheduleKind, ...] = get_args(ScheduleKind)


def learning_rate(
    kind: ScheduleKind, step: int, *, base_lr: float, warmup_steps: int, num_steps: int, embed_dim: int
) -> float:
    """Return the learning rate of update `step` (1 is the first).

    Args:
        kind: one of `SCHEDULES`.
        step: t.
        base_lr: what the factor multiplies; for all kinds but rsqrt and noam also the peak.
        warmup_steps: W.
        num_steps: T.
        embed_dim: E, for noam.

    >>> learning_rate("linear", 5, base_lr=1.0, warmup_steps=10, num_steps=100, embed_dim=64)
    0.5
    """
    if step < 1:
        raise ValueError(f"expected step >= 1; got {step}")
    warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
    left = float(step <= warmup_steps)  # of the decay: 1 at the end of warm-up, 0 at the last step
    if warmup_steps < step < num_steps:
        left = (num_steps - step) / (num_steps - warmup_steps)
    if kind == "linear":
        return base_lr * (warmup * left)
    if kind == "cosine":
        return base_lr * (warmup * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left))))
    if kind == "rsqrt":
        return base_lr * (warmup / math.sqrt(max(step, warmup_steps)))
    if kind == "noam":
        rising = step / warmup_steps / math.sqrt(warmup_steps) if warmup_steps else math.inf
        return base_lr * (min(1.0 / math.sqrt(step), rising) / math.sqrt(embed_dim))
    return base_lr * warmup


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """Model, optimiser, schedule and evaluation of a training run.

    Args:
        name: what matrices call it.
        deviations: how it differs from the published set-up it follows, one sentence each.
        num_layers: blocks.
        embed_dim: E.
        num_heads: H.
        head_dim: D; 0 means E / H.
        ffn_dim: width inside the feed-forward network.
        position: how positions are represented.
        norm: normalisation.
        norm_order: before or after each sublayer.
        activation: of the feed-forward network.
        pooling: mean over unpadded positions, or CLS, where a task wants one vector of a sequence.
        cross_variant: variant that attends to the encoder in an encoder-decoder; None means the cell's.
        dropout_p: on attention weights.
        resid_dropout_p: on embeddings and on what each sublayer adds.
        betas: of Adam.
        eps: of Adam, which divides by it alone where a weight has had no gradient yet.
        weight_decay: decoupled (AdamW), on matrices, tables of learned vectors in a mechanism among them; biases, norms
            and embeddings of tokens and positions have none.
        base_lr: multiplied by the schedule.
        schedule: see the module's docstring.
        warmup_steps: W.
        num_steps: updates.
        batch_size: examples per update.
        clip_norm: largest global norm of the gradient; 0 does not clip.
        eval_every: updates between validations; the last update is followed by one too.
        eval_batch_size: examples per evaluation batch.
        pad_multiple: a batch is padded to its longest example, rounded up to a multiple of this.
        is_full_length: pad every batch as one with the task's longest example would be.
        bucket_batches: train on batches of similar lengths, formed among this many batches of the shuffled order, and
            evaluate on such; 0 takes the order as it is.
        pretrain: what the model learns first, on the task's own training inputs without their labels (Amos et al. 2024,
            "Never Train from Scratch", arXiv 2310.02980): `"masked"`, to tell tokens that are hidden from it;
            `"causal"`, to tell the next token, with attention that sees the past only; empty for nothing. The same
            optimiser and schedule as for training; only the weights are kept.
        pretrain_steps: updates of it.
        pretrain_mask_prob: share of the tokens that are hidden. The paper: 0.5 for images, 0.15 for text, 0.1 for
            nested expressions.
        compile: train and validate through `torch.compile`, on a GPU as CUDA graphs too; None does so on a GPU only.
            The same numbers up to rounding, dropout excepted. Timed training steps are as written where it is None.

    Raises:
        ConfigError: a number is out of range.
    """

    name: str
    deviations: tuple[str, ...] = ()
    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 2
    head_dim: int = 0
    ffn_dim: int = 128
    position: PositionKind = "learned"
    norm: NormKind = "layer_norm"
    norm_order: Literal["pre", "post"] = "pre"
    activation: Activation = "gelu"
    pooling: PoolingKind = "mean"
    cross_variant: str | None = None
    dropout_p: float = 0.0
    resid_dropout_p: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    base_lr: float
    schedule: ScheduleKind
    warmup_steps: int
    num_steps: int
    batch_size: int = 32
    clip_norm: float = 0.0
    eval_every: int
    eval_batch_size: int = 64
    pad_multiple: int = 16
    is_full_length: bool = False
    bucket_batches: int = 0
    pretrain: Literal["", "masked", "causal"] = ""
    pretrain_steps: int = 0
    pretrain_mask_prob: float = 0.15
    compile: bool | None = False

    def __post_init__(self) -> None:
        positive = ("num_steps", "batch_size", "eval_every", "eval_batch_size", "pad_multiple", "base_lr", "eps")
        problems = [(n, f"expected more than 0; got {getattr(self, n)}") for n in positive if getattr(self, n) <= 0]
        not_negative = ("warmup_steps", "clip_norm", "weight_decay", "bucket_batches", "pretrain_steps")
        problems += [(n, f"expected 0 or more; got {getattr(self, n)}") for n in not_negative if getattr(self, n) < 0]
        floats = [item.name for item in fields(self) if isinstance(getattr(self, item.name), float)]
        infinite = [n for n in floats if not math.isfinite(getattr(self, n))]
        problems += [(n, f"expected a finite number; got {getattr(self, n)}") for n in infinite]
        if not self.warmup_steps and self.schedule in ("linear", "cosine"):
            counts = ("num_steps", "pretrain_steps") if self.pretrain else ("num_steps",)
            why = "it ends at 0, the rate of the only update"
            problems += [
                ("schedule", f"expected another with {name} = 1 than {self.schedule}: {why}")
                for name in counts
                if getattr(self, name) == 1
            ]
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            problems.append(("betas", f"expected two numbers from 0 to less than 1; got {list(self.betas)}"))
        problems += self._size_problems()
        if not 0.0 < self.pretrain_mask_prob < 1.0:
            got = self.pretrain_mask_prob
            problems.append(("pretrain_mask_prob", f"expected more than 0 and less than 1; got {got}"))
        if self.pretrain and not self.pretrain_steps:
            problems.append(("pretrain_steps", f"expected more than 0 with pretrain = {self.pretrain!r}; got 0"))
        if problems:
            raise ConfigError(f"protocol {self.name}", problems)

    def _size_problems(self) -> Sequence[tuple[str, str]]:
        """Return what makes a model of this protocol impossible, whatever the variant in it."""
        try:
            model = self.model_config(variant="", options={}, vocab_size=1, max_seq_len=1, seed=0)
            build = model.build_context(is_causal=False, is_cross=False, num_positions=1)
        except ConfigError as error:
            return error.problems
        if build.position == "rotary" and build.head_dim % 2:
            return [("position", f"rotary positions turn pairs of features; got head_dim = {build.head_dim}")]
        return []

    @property
    def peak_lr(self) -> float:
        """The highest learning rate of all updates: every schedule rises until warm-up ends, and never after."""
        return learning_rate(
            self.schedule,
            min(max(1, self.warmup_steps), self.num_steps),
            base_lr=self.base_lr,
            warmup_steps=self.warmup_steps,
            num_steps=self.num_steps,
            embed_dim=self.embed_dim,
        )

    @property
    def summary(self) -> str:
        """What a training of it is, in one line."""
        return (
            f"{self.num_layers} layers, width {self.embed_dim}, {self.num_heads} heads; {self.num_steps:,} updates of "
            f"{self.batch_size} examples, {self.schedule} schedule from {self.base_lr:g}"
        )

    def model_config(
        self,
        *,
        variant: str,
        options: dict[str, Any],
        vocab_size: int,
        max_seq_len: int,
        seed: int,
        target_vocab_size: int = 0,
    ) -> ModelConfig:
        """Return the model of this protocol around a variant."""
        shared = {item.name for item in fields(ModelConfig)} & {item.name for item in fields(Protocol)}
        return ModelConfig(
            variant=variant,
            options=options,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            target_vocab_size=target_vocab_size,
            seed=seed,
            **{name: getattr(self, name) for name in sorted(shared)},
        )


PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        protocol.name: protocol
        for protocol in (
            Protocol(
                name="cpu-small",
                base_lr=1e-3,
                schedule="cosine",
                warmup_steps=100,
                num_steps=4_000,
                batch_size=32,
                weight_decay=0.01,
                clip_norm=1.0,
                eval_every=500,
                eval_batch_size=250,
                bucket_batches=50,
            ),
            Protocol(
                name="lra-small",
                deviations=(
                    "mean pooling runs over unpadded positions; the published code divides by the padded length",
                    "batches are padded to a multiple of 128; the published code pads to the next power of two",
                    "the cell's dtype decides the precision; the published code uses float16 autocast",
                    "the last partial batch of an evaluation counts; the published code drops it",
                    "padding is what lies beyond a length; the published mask hides every token 0, also black pixels",
                    "the rate starts at 0 and betas stay; published: at 1/25 of the peak, beta 1 goes 0.95, 0.85, 0.95",
                    "initialisation is the one shared by all our models",
                    "no dropout inside the feed-forward network; the published code has one there too",
                ),
                dropout_p=0.1,
                resid_dropout_p=0.1,
                eps=1e-6,
                base_lr=1e-4,
                schedule="linear",
                warmup_steps=1_000,
                num_steps=5_000,
                eval_every=50,
                pad_multiple=128,  # a handful of lengths: each is a CUDA graph of its own
                compile=None,
            ),
            Protocol(
                name="lra-original",
                deviations=(
                    "embeddings, biases and norms are not decayed; the published optimiser decays every weight",
                    "initialisation is the one shared by all our models",
                    "no dropout inside the feed-forward network; the published code has one there too",
                    "projections of the attention have biases; the published ones have none",
                    "the last partial batch of an evaluation counts; the published code drops it",
                    "padding is what lies beyond a length; the published mask hides every token 0, also black pixels",
                    "mean pooling runs over unpadded positions; the published code averages over all",
                    "a pair is judged by both vectors, their product and difference; published: by the vectors alone",
                    "the head has one hidden layer; the published one for pairs has two",
                ),
                num_layers=4,
                embed_dim=512,
                num_heads=8,
                ffn_dim=1_024,
                position="sinusoidal",
                pooling="cls",
                dropout_p=0.1,
                resid_dropout_p=0.1,
                betas=(0.9, 0.98),
                eps=1e-9,
                weight_decay=0.1,
                base_lr=0.05,
                schedule="rsqrt",
                warmup_steps=1_000,
                num_steps=5_000,
                eval_every=200,
                is_full_length=True,
                compile=None,
            ),
        )
    }
)
"""`cpu-small` ends within minutes on two cores; it trains on batches of similar lengths, the other two do not, as the
published codes do not. `lra-small` is the set-up of most later work (mlpen/Nystromformer, LRA/code/lra_config.py).
`lra-original` is the release of Long Range Arena (lra_benchmarks/*/configs)."""


def resolve_protocol(
    name: str, *, task_settings: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> Protocol:
    """Return the protocol `name` with what a task and then a matrix set differently.

    Args:
        name: one of `PROTOCOLS`.
        task_settings: the task's `settings` for this protocol.
        overrides: the cell's.

    Raises:
        UnknownNameError: no such protocol.
        ConfigError: an override is unknown or has an impossible value; all problems at once.
    """
    if name not in PROTOCOLS:
        raise UnknownNameError("protocol", name, list(PROTOCOLS), f"there are {', '.join(PROTOCOLS)}")
    overrides = dict(overrides or {})
    fixed = [(key, "is not a setting: it names the protocol") for key in ("name", "deviations") if key in overrides]
    if fixed:
        raise ConfigError(f"overrides of {name}", fixed)
    settings = {**asdict(PROTOCOLS[name]), **(task_settings or {}), **overrides}
    return make_config(Protocol, settings, f"overrides of {name}")


def protocol_of(cell: Cell) -> Protocol:
    """Return the protocol that a training cell trains under; errors as of `resolve_protocol`."""
    assert cell.task is not None and cell.protocol is not None  # noqa: PT018  as every training has
    settings = tasks[cell.task].settings.get(cell.protocol)
    return resolve_protocol(cell.protocol, task_settings=settings, overrides=cell.overrides)


_WEIGHT_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def weight_dtype(dtype: str) -> torch.dtype:
    """Return the type of the weights for a cell's dtype: bfloat16 trains under autocast with float32 weights.

    Raises:
        UnsupportedError: training does not run in it.
    """
    if dtype not in _WEIGHT_DTYPES:
        raise UnsupportedError("dtypes", f"training runs in {', '.join(_WEIGHT_DTYPES)}; {dtype} needs loss scaling")
    return _WEIGHT_DTYPES[dtype]


def _directions(cell: Cell, spec: TaskSpec, protocol: Protocol) -> Iterator[bool]:
    """Yield for each kind of self-attention that will be built whether it is causal."""
    if spec.kind in ("classification", "pair", "seq2seq"):
        yield False
    if spec.kind in ("causal_lm", "seq2seq"):
        yield True
    if spec.kind == "token_classification":
        yield cell.is_causal
    if protocol.pretrain:
        yield protocol.pretrain == "causal"


def requests(cell: Cell, spec: TaskSpec, protocol: Protocol, *, has_mask: bool) -> Iterator[tuple[str, Request]]:
    """Yield (variant, request) for everything that will be built."""
    position: Position = "none"
    if protocol.position == "rotary" or protocol.position == "alibi":
        position = protocol.position
    request = Request(has_key_padding_mask=has_mask, dropout_p=protocol.dropout_p, dtype=cell.dtype, device=cell.device)
    for is_causal in _directions(cell, spec, protocol):
        yield (cell.variant, replace(request, is_causal=is_causal, is_autoregressive=is_causal, position=position))
    if spec.kind == "seq2seq":
        yield protocol.cross_variant or cell.variant, replace(request, is_cross=True)


def capabilities_of_both(cell: Cell, protocol: Protocol) -> Capabilities:
    """Return what the cell's variant can do, of lengths that suit the one that attends across in its place too."""
    own, cross = capabilities_of(cell.variant, cell.options), protocol.cross_variant
    if cross is None or cross == cell.variant:
        return own
    other = capabilities_of(cross, {})
    return replace(
        own,
        variable_seq_len=own.variable_seq_len and other.variable_seq_len,
        seq_len_multiple=math.lcm(own.seq_len_multiple, other.seq_len_multiple),
    )


def require(cell: Cell, spec: TaskSpec, protocol: Protocol, *, has_mask: bool) -> None:
    """Raise `UnsupportedError` for what the variant, or training itself, refuses; arguments as in `requests`."""
    if cell.is_causal and spec.kind not in ("token_classification", "causal_lm"):
        raise UnsupportedError("causal", f"is_causal: a task of kind {spec.kind} does not leave the direction open")
    if protocol.pretrain and spec.kind in ("causal_lm", "seq2seq"):
        raise UnsupportedError("pretrain", f"pretrain: a model for {spec.kind} has no encoder over one input")
    if protocol.cross_variant is not None and spec.kind != "seq2seq":
        raise UnsupportedError("cross_variant", f"cross_variant: a model for {spec.kind} has no cross-attention")
    if protocol.norm == "batch_norm" and any(_directions(cell, spec, protocol)):
        raise UnsupportedError("causal", LEAKY_NORM)
    if protocol.norm == "batch_norm" and cell.data_parallel > 1:
        reason = "data_parallel: batch_norm needs the whole batch, of which each process sees a part"
        raise UnsupportedError("data_parallel", reason)
    for variant, request in requests(cell, spec, protocol, has_mask=has_mask):
        options = cell.options if variant == cell.variant else {}
        capabilities_of(variant, options).require(variant, request)
    weight_dtype(cell.dtype)
