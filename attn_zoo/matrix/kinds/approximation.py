"""`[[approximation]]`: how far a variant is from exact softmax attention, over lengths and kinds of inputs.

The same random queries, keys and values go through the variant and, in float64, through softmax attention:
    error = |out - exact| / |exact|,   Frobenius norms over `NUM_ROWS` rows of every head of every sequence
The rows are drawn at random, so that the oracle costs O(NUM_ROWS S) and no length is too long for it. What an error
means is said by two others of the same rows: that of the mean of the values, which needs no attention at all, and that
of exact attention in the dtype of the cell, scores and softmax in float32 at least as in any fused kernel. Weights are
as they are drawn: a matrix that a model would learn is random.

Which structure a mechanism relies on shows where the inputs have it, and where they have not. Scores are
s_ij = q_i k_j / sqrt(D), values have unit variance:
    diffuse: everything is normal, so s ~ N(0, 1): about S / e keys share the weight of a row.
    peaked:  likewise with s ~ N(0, 4^2): few keys, at random places, have most of it.
    local:   keys and queries follow one smooth path: s_ii = 12, and s_ij is about 12 (1 - |i - j| / 32) within 32
             positions, beyond them about N(0, 12^2 / D): many, which weigh more the longer the sequence.
    topics:  runs of 64 tokens have one of 16 topics, which their keys, queries and values share: s_ij is about 8 within
             a topic, which lies in runs all over the sequence, and about N(0, 10^2 / D) across topics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_zoo.attention import build_attention
from attn_zoo.attention.generators import seed_generators
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.conformance import FirstCall, check_output
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.discovery.global_state import settings_kept
from attn_zoo.errors import UnsupportedError
from attn_zoo.kernels.trace import recording
from attn_zoo.matrix.cell.outcomes import run_one
from attn_zoo.matrix.cell.trial import in_phase
from attn_zoo.matrix.claimed_costs import (
    DTYPE_BYTES,
    build_context,
    call_shape,
    claims,
    config_of,
    form_of,
    forward_flops,
)
from attn_zoo.matrix.kinds.kind import NO_CUDA, Axis, Forecast, Member, Seed
from attn_zoo.matrix.kinds.one_call import CallGroup, CallKind, gate_call
from attn_zoo.matrix.kinds.scaling import draw_inputs, normal
from attn_zoo.matrix.kinds.timed import TimedForecast
from attn_zoo.matrix.plan.estimate import Estimate, call_seconds
from attn_zoo.matrix.plan.planned_cell import PlannedCell, Refusal
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import APPROXIMATION_VERSION, Approximation, Cell, InputKind, Record
from attn_zoo.registry import capabilities_of, variants

NUM_ROWS = 256
"""Of each head that are compared, or all there are."""

PEAK = 4.0
"""Standard deviation of the scores of peaked inputs."""
LOCAL_LEN, LOCAL_SCORE = 32, 12.0
"""Positions within which keys resemble each other, and the score of a query with its own key."""
RUN_LEN, NUM_TOPICS, TOPIC_SCORE, TOPIC_FRAC = 64, 16, 8.0, 0.8
"""Tokens of a run, topics, the score within one, and the share of a key's variance that is its topic's."""
TOPIC_VALUE_FRAC = 0.5
"""Likewise of a value's variance."""

CHUNK_SCORES = 2**25
"""Scores that the oracle makes at a time, 256 MiB of float64."""


class ApproximationGroup(CallGroup):
    """Distance from exact softmax attention over lengths. Where several values are given, every combination is a cell.

    Args:
        inputs: kinds of queries, keys and values, which `docs/method.md` describes.
        is_causal: later keys hidden.
        seeds: of inputs, and of what a variant draws; errors are means over them.
    """

    inputs: Axis[InputKind] = ("diffuse", "peaked", "local", "topics")
    is_causal: Axis[bool] = (False,)
    seeds: Axis[Seed] = (0, 1, 2)

    def axes(self) -> dict[str, Sequence[Any]]:
        return {**super().axes(), "is_causal": self.is_causal, "inputs": self.inputs}


class Approximate(CallKind):
    """The distance of one call from exact attention."""

    name = "approximation"
    group = ApproximationGroup
    is_timed = False
    fixed = {"scope": "attention"}  # noqa: RUF012 - as the base class has it
    version = APPROXIMATION_VERSION
    needs_heads: ClassVar[Refusal] = (
        "attention",
        "it makes its queries, keys and values itself, so there are none to compare exact attention on",
    )

    def expand(
        self,
        group: ApproximationGroup,
        members: Sequence[Member],
        data_dir: Path | None,  # noqa: ARG002
    ) -> Iterator[PlannedCell]:
        for member, point in product(members, self.points(group)):
            first = Cell(device=group.device, threads=group.threads, **point, **member)
            cells = [first.at(seq_len) for seq_len in sorted(group.seq_len)]
            for cell, refusal in zip(cells, self.refusals(cells), strict=True):
                yield PlannedCell(cell=cell, refusal=refusal, isolation="lane", timeout_s=group.timeout_s)

    def estimate(self, item: PlannedCell) -> Estimate:
        """Return the cost of the call and of the oracle's rows."""
        cell = item.cell
        shape = call_shape(cell)
        flops = forward_flops(cell, shape)
        heads, num_rows = shape.batch_size * shape.num_heads, min(NUM_ROWS, shape.query_len)
        oracle = 8.0 * heads * num_rows * shape.key_len * shape.head_dim  # at half the rate of float32
        tensors = heads * shape.key_len * shape.head_dim * (4 * DTYPE_BYTES[cell.dtype] + 3 * 8)
        scores = 3 * 8 * min(heads * num_rows * shape.key_len, max(CHUNK_SCORES, heads * shape.key_len))
        return Estimate(call_seconds(flops + oracle, cell), int(tensors + scores))

    def forecast(self) -> Forecast:
        return TimedForecast(lambda record: record.phases.get("comparing", 0.0))

    def run(
        self,
        order: WorkOrder,  # noqa: ARG002 - all it says of the cell is in its record
        records: Sequence[Record],
        tell: Callable[[int], object],  # noqa: ARG002 - there is one cell
        room_bytes: int | None,
    ) -> list[Record]:
        return run_one(records, _measure, room_bytes)


@settings_kept()
def _measure(record: Record, phases: dict[str, float]) -> Record:
    cell = record.cell
    if cell.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(*NO_CUDA)
    with in_phase(phases, "build"):
        seed_generators(cell.seed)
        build = build_context(cell)
        module = build_attention(cell.variant, build, **cell.options)
        module = module.to(device=cell.device, dtype=getattr(torch, cell.dtype)).eval()
        inputs = draw(cell)
        before = [tensor.clone() for tensor in inputs]
    with in_phase(phases, "gate"):
        held = gate_call(cell, build)
    with in_phase(phases, "comparing"), torch.no_grad(), recording() as kernels:
        output: Tensor = module(*inputs)
    with in_phase(phases, "probe"):
        given = Inputs(form=form_of(cell), tensors=inputs, is_causal=cell.is_causal)
        first = FirstCall(module=module, inputs=given, output=output, has_graph=False)
        for name, tensor, old in zip(given.names, inputs, before, strict=True):
            if not torch.equal(tensor, old):  # else the oracle would be asked another question
                raise first.fault("own_inputs", f"changes its argument {name} in place")
        del before
        held += ("own_inputs", *check_output(first))
    with in_phase(phases, "comparing"), torch.no_grad():
        order = torch.randperm(build.max_seq_len, generator=torch.Generator().manual_seed(cell.seed))
        rows = order[:NUM_ROWS].sort()[0].to(cell.device)
        found = compare_rows(output, *inputs, rows, is_causal=cell.is_causal)
    return replace(
        record,
        gate=held,
        kernels=tuple(kernels),
        is_simulated=capabilities_of(cell.variant, cell.options).is_simulated,
        num_params=sum(item.numel() for item in module.parameters()),
        approximation=replace(found, has_budget=variants[cell.variant].has_budget(config_of(cell), build.max_seq_len)),
        **asdict(claims(cell)),
    )


def compare_rows(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, is_causal: bool = False
) -> Approximation:
    """Return how far some rows of an output are from exact attention, as if of no variant.

    Args:
        output: `[B, H, L, D]`.
        query: `[B, H, L, D]`.
        key: `[B, G, L, D]`.
        value: `[B, G, L, D]`.
        rows: int64 `[R]`, ascending positions.
        is_causal: hide keys j > i.
    """
    length, num_heads = key.shape[2], query.shape[1]
    key, value = (expand_kv_heads(x, num_heads) for x in (key, value))
    wide_key, wide_value = key.double(), value.double()
    fused = torch.promote_types(key.dtype, torch.float32)  # of scores and softmax, which a fused kernel never rounds
    fused_key = key.to(fused)
    means = wide_value.cumsum(2) / torch.arange(1, length + 1, device=rows.device)[:, None]  # of the first values
    sums = dict.fromkeys(("exact", "error", "mean_error", "rounding_error"), 0.0)
    spread: list[Tensor] = []
    step = max(1, CHUNK_SCORES // (query.shape[0] * num_heads * length))
    for own in torch.split(rows, step):
        hidden = torch.arange(length, device=rows.device) > own[:, None] if is_causal else None  # [R, L]
        part = query[:, :, own]
        weights = _weights(part.double(), wide_key, hidden)  # [B, H, R, L]
        exact = weights @ wide_value
        spread.append(1 / weights.square().sum(-1).flatten())
        last = own if is_causal else own.new_full((1,), length - 1)
        plain = _weights(part.to(fused), fused_key, hidden).to(value.dtype) @ value
        for name, other in (
            ("exact", torch.zeros_like(exact)),
            ("error", output[:, :, own].double()),
            ("mean_error", means[:, :, last]),
            ("rounding_error", plain.double()),
        ):
            sums[name] += float((other - exact).square().sum())
    whole = sums.pop("exact")
    errors = {name: math.sqrt(each / whole) for name, each in sums.items()}
    return Approximation(
        **errors,
        num_effective_keys=float(torch.cat(spread).median()),
        num_rows=query.shape[0] * num_heads * len(rows),
        has_budget=False,
    )


def _weights(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    """Return softmax weights, all in the dtype of `query` and `key`."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -math.inf), dim=-1)


# --- inputs ---


def draw(cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of a cell, in its dtype: the same for the same kind, sizes and seed."""
    query, key, value = _KINDS[cell.inputs or "diffuse"](cell, *draw_inputs(cell, torch.float32))
    dtype: torch.dtype = getattr(torch, cell.dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype)


_Drawn = tuple[Tensor, Tensor, Tensor]


def _diffuse(_: Cell, query: Tensor, key: Tensor, value: Tensor) -> _Drawn:
    return query, key, value


def _peaked(_: Cell, query: Tensor, key: Tensor, value: Tensor) -> _Drawn:
    return PEAK * query, key, value


def _local(cell: Cell, query: Tensor, key: Tensor, value: Tensor) -> _Drawn:
    """Queries are keys, made longer; keys are moving sums of normal numbers, all of one norm, sqrt(D)."""
    batch_size, groups, _, dim = key.shape
    before = normal((batch_size, groups, LOCAL_LEN, dim), (cell.seed, 3), key.dtype).to(key.device)
    sums = torch.cat([before, key], dim=2).double().cumsum(2)
    path = sums[:, :, LOCAL_LEN:] - sums[:, :, :-LOCAL_LEN]
    path = (path / path.square().mean(-1, keepdim=True).sqrt()).to(key.dtype)
    gain = LOCAL_SCORE / math.sqrt(dim)
    return gain * expand_kv_heads(path, query.shape[1]), path, value


def _topics(cell: Cell, query: Tensor, key: Tensor, value: Tensor) -> _Drawn:
    """Keys, queries and values are what their topic has in common, and numbers of their own."""
    batch_size, groups, length, dim = key.shape
    generator = torch.Generator().manual_seed(cell.seed)
    of_run = torch.randint(NUM_TOPICS, (-(-length // RUN_LEN),), generator=generator)
    topic = of_run.repeat_interleave(RUN_LEN)[:length].to(key.device)
    shape = (batch_size, groups, NUM_TOPICS, dim)
    of_keys, of_values = (normal(shape, (cell.seed, 3 + index), key.dtype).to(key.device) for index in range(2))

    def mixed(own: Tensor, common: Tensor, frac: float) -> Tensor:
        return math.sqrt(frac) * common[:, :, topic] + math.sqrt(1 - frac) * own

    gain = TOPIC_SCORE / (TOPIC_FRAC * math.sqrt(dim))
    common = expand_kv_heads(of_keys, query.shape[1])
    return (
        gain * mixed(query, common, TOPIC_FRAC),
        mixed(key, of_keys, TOPIC_FRAC),
        mixed(value, of_values, TOPIC_VALUE_FRAC),
    )


_KINDS: dict[InputKind, Callable[[Cell, Tensor, Tensor, Tensor], _Drawn]] = {
    "diffuse": _diffuse,
    "peaked": _peaked,
    "local": _local,
    "topics": _topics,
}
