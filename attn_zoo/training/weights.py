"""Trained weights: one safetensors file with the model's tensors, and what built the model as JSON in its header.

Never pickled. A file is complete or absent: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from attn_zoo.errors import StoreError
from attn_zoo.model import ModelConfig
from attn_zoo.records import TRAINING_VERSION, Cell
from attn_zoo.registry import make_config, tasks
from attn_zoo.tasks import AbstractTask
from attn_zoo.training.batches import Batcher
from attn_zoo.training.checkpoint import read_tensors, write_tensors
from attn_zoo.training.objective import AbstractObjective, objective_for
from attn_zoo.training.protocol import capabilities_of_both, protocol_of, weight_dtype

_KIND = "attn_zoo weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A trained model and what it was trained on.

    Args:
        cell: the run that trained it.
        task: at the level of the cell; makes its data when asked.
        config: of the model.
        model: in evaluation mode.
        objective: gives its outputs for a batch.
        batcher: makes batches of the task's splits.
    """

    cell: Cell
    task: AbstractTask
    config: ModelConfig
    model: nn.Module
    objective: AbstractObjective
    batcher: Batcher


def save_weights(path: Path, cell: Cell, model_config: ModelConfig, model: nn.Module) -> None:
    """Write the weights of a trained model.

    Raises:
        StoreError: the folder cannot be written.
    """
    header = {
        "kind": _KIND,
        "training_version": str(TRAINING_VERSION),
        "cell": cell.to_json(),
        "model_config": json.dumps(asdict(model_config)),
    }
    write_tensors(path, dict(model.state_dict()), header)


def load_trained(path: Path, data_dir: Path | None = None, *, device: str = "cpu") -> Trained:
    """Return the model as it was selected, with its task.

    Args:
        path: of the file.
        data_dir: where tasks find local data.
        device: where the model goes; not necessarily where it was trained.

    Raises:
        StoreError: the file is not there, is not one of ours, or does not fit the model that this version builds.
        UnknownNameError: its variant or task is not registered here.
    """
    header, tensors = _read(path)
    cell = Cell.from_dict(json.loads(header["cell"]), f"{path}: cell")
    assert cell.task is not None
    assert cell.level is not None
    task: AbstractTask = tasks[cell.task](cell.level, data_dir=data_dir)
    config = make_config(ModelConfig, json.loads(header["model_config"]), str(path))
    protocol = protocol_of(cell)
    objective = objective_for(task.spec, is_causal=cell.is_causal)
    batcher = Batcher(task.spec, protocol, capabilities_of_both(cell, protocol), device)
    model = objective.build_model(config).to(device, weight_dtype(cell.dtype))  # before weights that may be wider
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise StoreError(
            f"{path}: does not fit the model that this version of {cell.variant} builds: {error}"
        ) from None
    return Trained(cell=cell, task=task, config=config, model=model.eval(), objective=objective, batcher=batcher)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    if not path.is_file():
        raise StoreError(f"{path}: no such file; weights are kept where the matrix says keep_weights = true")
    try:
        header, tensors = read_tensors(path)
    except SafetensorError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    if header.get("kind") != _KIND:
        raise StoreError(f"{path}: not weights of attn_zoo")
    return header, tensors
