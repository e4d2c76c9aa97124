"""From a cell to what trains it: the same for a whole training and for single steps that are timed."""

from __future__ import annotations

from attn_zoo.model import ModelConfig
from attn_zoo.records import Cell
from attn_zoo.tasks import TaskSpec
from attn_zoo.training.batches import Batcher
from attn_zoo.training.loop import Trainer
from attn_zoo.training.objective import objective_for
from attn_zoo.training.protocol import Protocol
from attn_zoo.training.requirements import capabilities_of, require, weight_dtype
from attn_zoo.training.seeding import derive_seed, seed_everything

__all__ = ["make_trainer"]


def make_trainer(cell: Cell, spec: TaskSpec, protocol: Protocol) -> tuple[Trainer, ModelConfig]:
    """Return a trainer of a new model around the cell's variant, and what the model was made of.

    Args:
        cell: gives variant, options, seed, dtype and device.
        spec: of the task.
        protocol: resolved.

    Raises:
        UnsupportedError: the variant, or training itself, refuses what this asks.
    """
    objective = objective_for(spec, is_causal=cell.is_causal)
    batcher = Batcher(spec, protocol, capabilities_of(cell.variant, cell.options), cell.device)
    require(cell, spec, protocol, has_mask=batcher.has_mask)
    config = protocol.model_config(
        variant=cell.variant,
        options=cell.options,
        vocab_size=spec.vocab_size,
        target_vocab_size=max(spec.vocab_size, spec.num_classes) if spec.kind == "seq2seq" else 0,
        max_seq_len=batcher.max_seq_len,
        seed=derive_seed(cell.seed, "init"),
    )
    seed_everything(config.seed)  # for variants that draw at construction without a generator of their own
    model = objective.build_model(config).to(cell.device, weight_dtype(cell.dtype))
    trainer = Trainer(
        model, objective, batcher, protocol, num_steps=protocol.num_steps, seed=cell.seed, dtype=cell.dtype
    )
    return trainer, config
