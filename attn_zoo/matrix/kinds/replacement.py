"""`[[replacement]]`: another mechanism in the place of the one that a model was trained with.

A model is trained with one mechanism, as `[[accuracy]]` trains it, once for all variants of the group. Then a variant
takes the place of that mechanism in every layer, between the same projections; what it has to learn besides is as
drawn. Two things are measured: what the model scores now on the same test set, as it is or after a few more updates;
and, on `NUM_EXAMPLES` random test examples, how far the heads are from what the model's own mechanism gives them,
    error = |out - own| / |own|,   Frobenius norms over all rows that are no padding
for the queries, keys and values that each layer of the trained model makes: an error is of one layer, not of those
before it too. Own outputs are in float64. Equal weights, the mean of the values that a row sees, are the floor of both:
what a model loses by them is what its attention does at all.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import torch
from pydantic import Field
from torch import Tensor, nn

from attn_zoo.attention.contract import AbstractAttention
from attn_zoo.attention.effective import AttentionCall, attention_call, weight_columns
from attn_zoo.attention.masks import blank_padding
from attn_zoo.attention.multihead import MultiHeadMixer
from attn_zoo.attention.oracle import expand_kv_heads
from attn_zoo.conformance import gate_model
from attn_zoo.errors import AttnZooError, StoreError, UnsupportedError, suggestion
from attn_zoo.kernels.trace import recording
from attn_zoo.matrix.cell.trial import in_phase
from attn_zoo.matrix.kinds.accuracy import Accuracy, AccuracyGroup, TaskGroup, data_dir_of, require_same_data, train
from attn_zoo.matrix.kinds.kind import Axis, Member, Problem
from attn_zoo.matrix.plan.estimate import Estimate
from attn_zoo.matrix.plan.planned_cell import PlannedCell, Refusal
from attn_zoo.matrix.plan.source_digest import source_digest
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import (
    AS_TRAINED,
    EQUAL_WEIGHTS,
    REPLACEMENT_VERSION,
    TRAINING_VERSION,
    Approximation,
    Cell,
    Record,
    Replacement,
)
from attn_zoo.registry import capabilities_of, variants

if TYPE_CHECKING:  # loads the backbone: only where it trains
    from attn_zoo.tasks import AbstractTask
    from attn_zoo.training.batches import Batch, Feed
    from attn_zoo.training.loop import Trainer
    from attn_zoo.training.objective import AbstractObjective

NUM_EXAMPLES = 32
"""Of the test set, on which heads are compared."""

NUM_WEIGHED = 4
"""Of these, whose weights are looked at: that takes as many calls as there are keys to a head's feature."""


class ReplacementGroup(TaskGroup):
    """Variants in the place of a trained model's own mechanism. Every combination of several values is a cell.

    Args:
        of: the mechanism that the model is trained with, with its default options: a registered name.
        adapt_steps: updates that the model makes afterwards, under the same protocol with the warm-up shortened alike
            and the highest learning rate of the training; 0 leaves it as it is.
    """

    of: str
    adapt_steps: Axis[Annotated[int, Field(ge=0, lt=2**31)]] = (0,)

    @property
    def num_cells(self) -> int:
        return super().num_cells * len(self.adapt_steps)


class Replace(Accuracy):
    """A variant in the place of the mechanism that a model was trained with."""

    name = "replacement"
    group = ReplacementGroup

    def source_digest(self, cell: Cell) -> str:
        own = super().source_digest(cell)
        if cell.replaces == cell.variant or cell.replaces not in variants:
            return own
        return own[:8] + source_digest(variants[cell.replaces], self.rooms, cell.device)[:8]

    def estimate(self, item: PlannedCell) -> Estimate:
        """Return the cost of the updates after the exchange; the model is trained once for all that is put into it."""
        cell = item.cell
        before = super().estimate(replace(item, cell=_as_training(cell, **_member(cell.replaces))))
        if not cell.adapt_steps:
            return Estimate(0.0, before.num_bytes, shared_s=before.seconds)
        after = super().estimate(replace(item, cell=_adapting(cell)))
        return Estimate(after.seconds, max(before.num_bytes, after.num_bytes), shared_s=before.seconds)

    def is_probed(self, cell: Cell) -> bool:  # noqa: ARG002
        return False  # what is pretrained is not the variant of the cell

    def problems(self, group: Mapping[str, Any], where: str) -> list[Problem]:
        problems = super().problems(group, where)
        if isinstance(name := group.get("of"), str) and name not in variants:
            problems.append((f"{where}.of", f"unknown variant {name!r}{suggestion(name, variants)}"))
        return problems

    def expand(
        self, group: ReplacementGroup, members: Sequence[Member], data_dir: Path | None
    ) -> Iterator[PlannedCell]:
        shared = {name: getattr(group, name) for name in TaskGroup.model_fields}
        training = AccuracyGroup.model_construct(**shared, keep_weights=True)
        every = list(_TRAINING.expand(training, [_member(group.of)], data_dir))
        for member, adapt_steps in itertools.product(members, group.adapt_steps):
            # What a training with the variant would be refused is refused here: the models are the same.
            for before, own in zip(every, _TRAINING.expand(training, [member], data_dir), strict=True):
                cell = replace(
                    own.cell,
                    kind=self.name,
                    replaces=group.of,
                    adapt_steps=adapt_steps,
                    protocol_version=REPLACEMENT_VERSION,
                )
                cell = replace(cell, variant_digest=self.source_digest(cell))
                refusal = before.refusal or _no_heads(cell) or own.refusal
                yield replace(own, cell=cell, refusal=refusal, isolation="lane")

    def measure(self, order: WorkOrder, record: Record, phases: dict[str, float]) -> Record:
        cell = record.cell
        require_same_data(cell, order)
        with in_phase(phases, "training"):
            before = _before(trained_weights(cell, order), data_dir_of(order), cell.device)
        with in_phase(phases, "build"):
            trainer = _make_trainer(_as_training(cell), before.task)
            num_new_params = give_weights(before.model, trainer.model, is_same=_is_same(cell))
        with in_phase(phases, "gate"):
            has_padding = trainer.batcher.has_mask
            held = gate_model(trainer.model, dtype=cell.dtype, device=cell.device, has_padding=has_padding)
        with in_phase(phases, "comparing"):
            # At random: a test set may be in the order of lengths.
            places = torch.randperm(len(before.test.lengths), generator=torch.Generator().manual_seed(cell.seed))
            batch = trainer.batcher.batch(before.test, places[:NUM_EXAMPLES])
            found = Replacement(
                trained_value=before.value,
                layers=compare_layers(before.model, trainer.model, trainer.objective, batch, cell.dtype),
                num_new_params=num_new_params,
            )
        record = replace(record, gate=held, replacement=found)
        if cell.adapt_steps == 0:
            with in_phase(phases, "comparing"):
                record = _scored(record, before, trainer)
        else:
            with in_phase(phases, "training"):
                record = _adapted(record, before, order)
        return replace(record, score=record.score and replace(record.score, **before.marks))


_TRAINING = Accuracy()


def _member(variant: str) -> Member:
    return {"variant": variant, "label": variant, "options": {}}


def _is_same(cell: Cell) -> bool:
    """Tell whether the mechanism is the one that the model was trained with, so that it keeps what it has learned."""
    return cell.variant == cell.replaces and not cell.options


def _no_heads(cell: Cell) -> Refusal | None:
    for name in (cell.replaces, cell.variant):
        if variants[name].attention is None:
            return "attention", f"{name} makes its queries, keys and values itself: it has no heads to be exchanged"
    return None


def _as_training(cell: Cell, **changes: Any) -> Cell:
    fields = {"kind": _TRAINING.name, "replaces": "", "adapt_steps": 0, "protocol_version": TRAINING_VERSION}
    cell = replace(cell, **{**fields, **changes})
    return replace(cell, variant_digest=_TRAINING.source_digest(cell))


def _adapting(cell: Cell) -> Cell:
    """Return the training that makes the updates after the exchange: the same protocol, so much shorter.

    Its learning rate is at its highest that of the training: rsqrt and noam rise the higher, the shorter they warm up.
    """
    from attn_zoo.training.protocol import protocol_of

    protocol = protocol_of(cell)
    changes: dict[str, Any] = {
        "num_steps": cell.adapt_steps,
        # One at least, or the only update of `adapt_steps = 1` would be the last of the decay, at a rate of zero.
        "warmup_steps": max(1, round(protocol.warmup_steps * cell.adapt_steps / protocol.num_steps)),
        "eval_every": min(protocol.eval_every, cell.adapt_steps),
        "pretrain": "",
    }
    # The quotient first: where it is one, as for the schedules that peak at base_lr, the rates keep every bit.
    changes["base_lr"] = protocol.base_lr * (protocol.peak_lr / replace(protocol, **changes).peak_lr)
    return _as_training(cell, overrides={**cell.overrides, **changes})


def trained_weights(cell: Cell, order: WorkOrder) -> Path:
    """Return the file of the model that a cell exchanges a mechanism in; it is trained where there is none yet.

    Raises:
        AttnZooError: its training gave no model.
    """
    assert order.weights_dir is not None
    base = _as_training(cell, **_member(cell.replaces))
    path = Path(order.weights_dir) / f"{base.key}.safetensors"
    if not path.is_file():
        record = train(Record(cell=base, status="ok"), order)
        if record.status != "ok":
            raise AttnZooError(
                f"the model to exchange the mechanism of, {base.id}, is {record.status}: {record.reason}"
            )
    return path


# --- the model before ---


@dataclass(frozen=True, kw_only=True, slots=True)
class _Before:
    """A trained model and what it scores on test; `marks` are fields of a score: its floors and references."""

    task: AbstractTask
    model: nn.Module
    test: Feed
    validation: Feed
    value: float
    marks: dict[str, Any]
    group_floors: Mapping[int, Mapping[str, float]]


@lru_cache(maxsize=1)  # cells that exchange the mechanism of one model follow each other
def _before(path: Path, data_dir: Path | None, device: str) -> _Before:
    from attn_zoo.tasks.floors.lookup_rules import floors_of, floors_of_groups, references_of
    from attn_zoo.tasks.promises import checked_split
    from attn_zoo.training.weights import load_trained

    try:
        trained = load_trained(path, data_dir, device=device)
    except StoreError as error:
        raise StoreError(f"{error}; remove the file, and the same command trains its model anew") from None
    task, trainer = trained.task, _make_trainer(trained.cell, trained.task)
    test, validation = (trainer.batcher.feed(checked_split(task, name)) for name in ("test", "validation"))
    values = []
    for model in (trained.model, with_equal_weights(trained.model)):
        trainer.model = model
        values.append(trainer.evaluate(test, is_test=True).value)
    floors, references = floors_of(task), references_of(task)
    return _Before(
        task=task,
        model=trained.model,
        test=test,
        validation=validation,
        value=values[0],
        marks={
            "floors": {**floors, EQUAL_WEIGHTS: values[1]},
            "references": {**references, AS_TRAINED: values[0]},
        },
        group_floors=floors_of_groups(task),
    )


def _make_trainer(cell: Cell, task: AbstractTask) -> Trainer:
    """Return what scores a new model with the mechanism of a cell."""
    from attn_zoo.training.loop import make_trainer
    from attn_zoo.training.protocol import protocol_of

    return make_trainer(cell, task.spec, replace(protocol_of(cell), compile=False))[0]


@final
class EqualWeights(AbstractAttention):
    """The mean of the values that a row sees, whatever queries and keys are."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return means `[B, H, L, D]`; arguments as in `AbstractAttention.forward`."""
        del key
        values = expand_kv_heads(blank_padding(value, key_padding_mask), query.shape[1])
        seen = torch.ones_like(values[..., :1])
        if key_padding_mask is not None:
            seen = seen * ~key_padding_mask[:, None, :, None]
        if self.build.is_causal:
            return values.cumsum(2) / seen.cumsum(2).clamp(min=1)
        return (values.sum(2, keepdim=True) / seen.sum(2, keepdim=True).clamp(min=1)).expand_as(query)


_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "out_proj")
"""Parts of a mixer that every mechanism has."""


def _mixers(model: nn.Module) -> dict[str, MultiHeadMixer]:
    return {path: part for path, part in model.named_modules() if isinstance(part, MultiHeadMixer)}


def with_equal_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose heads take the mean of the values."""
    model = copy.deepcopy(model)
    for path, mixer in _mixers(model).items():
        equal = MultiHeadMixer(EqualWeights(mixer.attention.config, mixer.build))
        for name in _PROJECTIONS:
            setattr(equal, name, getattr(mixer, name))
        model.set_submodule(path, equal)
    return model.eval()


# --- the model after ---


def give_weights(trained: nn.Module, model: nn.Module, *, is_same: bool) -> int:
    """Copy what a model was trained to into one with another mechanism, but for what belongs to the mechanism.

    One that `is_same` keeps its own weights too.

    Returns:
        The number of parameters that stay as drawn.

    Raises:
        UnsupportedError: the models do not fit.
    """
    kept = {f"{path}.{name}." for path in _mixers(model) for name in _PROJECTIONS}
    inside = tuple(f"{path}." for path in _mixers(model))
    known = trained.state_dict()

    def is_shared(name: str) -> bool:
        return is_same or not name.startswith(inside) or any(name.startswith(each) for each in kept)

    shared = {name: tensor for name, tensor in model.state_dict().items() if is_shared(name)}
    for name, tensor in shared.items():
        there = known.get(name)
        if there is None or there.shape != tensor.shape:
            size = "none" if there is None else list(there.shape)
            reason = f"expected a trained model with {name} of {list(tensor.shape)}; it has {size}"
            raise UnsupportedError("replacement", reason)
    model.load_state_dict({name: known[name] for name in shared}, strict=False)
    return sum(part.numel() for name, part in model.named_parameters() if name not in shared)


def _scored(record: Record, before: _Before, trainer: Trainer) -> Record:
    """Return the record with what the model scores as it is."""
    from attn_zoo.training.run import score_of

    with recording() as kernels:
        test, validation = trainer.evaluate(before.test, is_test=True), trainer.evaluate(before.validation)
    measured = {"validation": validation.value, "best_step": 0, "num_steps": 0, "train_s": 0.0}
    score = score_of(test, before.test, trainer, before.group_floors, **measured)
    is_simulated = capabilities_of(record.cell.variant, record.cell.options).is_simulated
    return replace(record, kernels=tuple(kernels), num_params=score.num_params, is_simulated=is_simulated, score=score)


def _adapted(record: Record, before: _Before, order: WorkOrder) -> Record:
    """Return the record with what the model scores after the updates that the cell allows."""
    cell = record.cell

    def begin(model: nn.Module) -> None:
        give_weights(before.model, model, is_same=_is_same(cell))

    adapted = train(replace(record, cell=_adapting(cell)), replace(order, weights_dir=None), begin)
    return replace(adapted, cell=cell)


@torch.no_grad()
def compare_layers(
    trained: nn.Module, model: nn.Module, objective: AbstractObjective, batch: Batch, dtype: str
) -> tuple[Approximation, ...]:
    """Return how far the heads of each mixer are from those of a trained model, for what that one makes of a batch.

    Queries, keys and values are made in the dtype of the weights and rounded to `dtype`, in which both attend.
    """
    own, other = _mixers(trained.eval()), _mixers(model.eval())
    noted: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {}

    def note(path: str) -> Any:
        return lambda _, args, given: noted.setdefault(path, []).append((args[0], given))

    handles = [mixer.register_forward_pre_hook(note(path), with_kwargs=True) for path, mixer in own.items()]
    try:
        objective.outputs(trained, batch)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(
        _compare([attention_call(own[path], hidden, **given) for hidden, given in called], other[path].attention, dtype)
        for path, called in noted.items()
    )


def _compare(calls: Sequence[AttentionCall], attention: AbstractAttention, dtype: str) -> Approximation:
    """Compare what an attention gives with what the one gives that was called; a layer reads both inputs of a pair."""
    from attn_zoo.training.evaluation import precision

    variant = attention.variant
    assert variant is not None
    sums = dict.fromkeys(("own", "error", "mean_error", "rounding_error"), 0.0)
    spread: list[Tensor] = []
    num_rows = 0
    for call in (_rounded(call, getattr(torch, dtype)) for call in calls):
        exact = copy.deepcopy(call.attention).double()
        equal = EqualWeights(exact.config, exact.build)
        with precision(dtype, call.query.device):
            found, rounded = replace(call, attention=attention)(call.value), call(call.value)
        for index in range(len(call.query)):
            one = _example(call, exact, index)
            own = one(one.value)
            # Keys of another sequence say nothing of which rows are padding.
            is_row = None if exact.build.is_cross or one.key_padding_mask is None else ~one.key_padding_mask[0]
            for name, other in (
                ("own", torch.zeros_like(own)),
                ("error", found[index : index + 1].double()),
                ("mean_error", replace(one, attention=equal)(one.value)),
                ("rounding_error", rounded[index : index + 1].double()),
            ):
                sums[name] += float(_rows(other - own, is_row).square().sum())
            num_rows += _rows(own, is_row).shape[:-1].numel()
            if index < NUM_WEIGHED:
                spread.append(_rows(_num_effective_keys(one)[..., None], is_row).flatten())
    whole = sums.pop("own")
    return Approximation(
        **{name: math.sqrt(each / whole) for name, each in sums.items()},
        num_effective_keys=float(torch.cat(spread).median()),
        num_rows=num_rows,
        has_budget=variant.has_budget(attention.config, attention.build.max_seq_len),
    )


def _rounded(call: AttentionCall, dtype: torch.dtype) -> AttentionCall:
    query, key, value = (tensor.to(dtype) for tensor in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def _rows(tensor: Tensor, is_row: Tensor | None) -> Tensor:
    return tensor if is_row is None else tensor[:, :, is_row]


def _example(call: AttentionCall, exact: AbstractAttention, index: int) -> AttentionCall:
    """Return one example of a call, in float64."""
    query, key, value = (tensor[index : index + 1].double() for tensor in (call.query, call.key, call.value))
    mask = None if call.key_padding_mask is None else call.key_padding_mask[index : index + 1]
    return AttentionCall(exact, query, key, value, mask)


def _num_effective_keys(call: AttentionCall) -> Tensor:
    """Return over how many keys the weights of each row spread, `[1, H, L]`: (sum of |w|)^2 / sum of w^2."""
    total = squares = torch.zeros_like(call.query[..., 0])
    for columns in weight_columns(call):
        total, squares = total + columns.abs().sum(-1), squares + columns.square().sum(-1)
    return total.square() / squares
