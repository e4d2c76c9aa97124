"""An accuracy cell in this process: one training run on one task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from attn_zoo.records import Record
from attn_zoo.registry import variants
from attn_zoo.training import run_training

__all__ = ["measure_accuracy"]


def measure_accuracy(
    record: Record, *, data_dir: Path | None, checkpoint_dir: Path | None, weights_dir: Path | None = None
) -> Record:
    """Return the record with the score, or with the reason why there is none.

    Args:
        record: of the cell, otherwise empty.
        data_dir: where tasks find local data.
        checkpoint_dir: a killed training continues from here.
        weights_dir: where the selected weights are stored, under the cell's key; None stores none.
    """
    cell = record.cell
    if cell.threads is not None:
        torch.set_num_threads(cell.threads)
    weights_path = None if weights_dir is None else weights_dir / f"{cell.key}.safetensors"
    result = run_training(cell, data_dir=data_dir, checkpoint_dir=checkpoint_dir, weights_path=weights_path)
    return replace(
        record,
        status=result.status,
        reason=result.reason,
        score=result.score,
        kernels=tuple(result.kernels),
        num_params=result.num_params,
        is_simulated=variants[cell.variant].capabilities.is_simulated,
    )
