"""Checkpoints: one safetensors file with the tensors, and the numbers as JSON in its header. Never pickled.

One file, so that weights and numbers cannot belong to different steps; written to a temporary file, synced and renamed,
so that a kill at any moment leaves the old or the new one. Random states are not stored: all draws are functions of
seed and step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from attn_zoo.errors import FolderError, StoreError
from attn_zoo.whole_files import whole_file


@dataclass(kw_only=True, slots=True)
class Numbers:
    """Progress and costs of a run.

    Args:
        step: updates done.
        best: validation value of the selected weights; None before the first evaluation.
        best_loss: their validation loss.
        best_step: after which update they were taken.
        num_tokens: trained on, padding excluded.
        num_positions: likewise, padding included.
        train_s: seconds of training, evaluation excluded.
        compile_s: seconds of those updates that compiled the model or captured a graph, and of its check.
        compile_tokens: trained on in them.
        eval_s: seconds of evaluations.
        eval_compile_s: seconds of those batches in them that compiled the model or captured a graph.
        train_flops: so far.
        peak_bytes: most memory in use while training.
        kernels: paths that ran.
        checks: names of what was checked before the first update.
        curve: evaluations so far.
        pretrain_s: seconds of pretraining; None where there is none.
        pretrain_flops: its FLOPs.
    """

    step: int = 0
    best: float | None = None
    best_loss: float = 0.0
    best_step: int = 0
    num_tokens: int = 0
    num_positions: int = 0
    train_s: float = 0.0
    compile_s: float = 0.0
    compile_tokens: int = 0
    eval_s: float = 0.0
    eval_compile_s: float = 0.0
    train_flops: float | None = 0.0
    peak_bytes: int | None = None
    kernels: list[str] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    pretrain_s: float | None = None
    pretrain_flops: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of training, padding excluded; of updates that compile nothing, where there are some."""
        tokens, seconds = self.num_tokens - self.compile_tokens, self.train_s - self.compile_s
        return tokens / seconds if tokens and seconds > 0 else self.num_tokens / self.train_s

    def take_pretraining(self, before: Numbers) -> None:
        """Record what pretraining cost."""
        self.pretrain_s, self.pretrain_flops = before.train_s, before.train_flops
        self.peak_bytes = before.peak_bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What an interrupted run continues from; all tensors on CPU, the optimiser's by parameter index and name."""

    numbers: Numbers
    weights: dict[str, Tensor]
    best_weights: dict[str, Tensor]
    optimizer: dict[int, dict[str, Tensor]]


def save_checkpoint(
    path: Path,
    identity: str,
    numbers: Numbers,
    model: nn.Module,
    best_weights: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write everything a run needs to continue; `identity` is whatever must be equal for continuing to make sense.

    Raises:
        StoreError: the folder cannot be written.
    """
    tensors = {f"weights/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"best/{name}": tensor for name, tensor in best_weights.items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in state.items()}
    write_tensors(path, tensors, {"identity": identity, "numbers": json.dumps(asdict(numbers))})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> None:
    """Write a safetensors file that is complete or absent, whatever happens meanwhile; tensors may share memory.

    Raises:
        StoreError: the folder cannot be written.
    """
    # Copies: safetensors refuses tensors that share memory, and weights may be tied.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        with whole_file(path, replace=True) as temporary:
            save_file(copies, temporary, metadata=header)
    except (OSError, SafetensorError, FolderError) as error:
        raise StoreError(f"{path}: cannot write ({error})") from error


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return header and tensors of a safetensors file.

    Raises:
        OSError, SafetensorError: the file cannot be read, or is damaged.
    """
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load_checkpoint(path: Path, identity: str) -> Checkpoint | None:
    """Return the checkpoint, or None where there is none for this run.

    A file that is damaged or belongs to another run (an older protocol, other data) is set aside as `*.unusable`: the
    run then starts from its beginning, which costs time but never a wrong result.
    """
    for left in path.parent.glob(f".{path.name}-*.tmp"):  # by a kill in the middle of writing
        with contextlib.suppress(OSError):
            left.unlink()
    if not path.is_file():
        return None
    try:
        header, tensors = read_tensors(path)
        if header.get("identity") == identity:
            return _sorted_out(Numbers(**json.loads(header["numbers"])), tensors)
    except (OSError, SafetensorError, ValueError, TypeError, KeyError):
        pass
    with contextlib.suppress(OSError):
        path.replace(path.with_name(f"{path.name}.unusable"))
    return None


def _sorted_out(numbers: Numbers, tensors: dict[str, Tensor]) -> Checkpoint:
    groups: dict[str, Any] = {"weights": {}, "best": {}}
    optimizer: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, _, rest = name.partition("/")
        if group == "optimizer":
            index, _, field_name = rest.partition("/")
            optimizer.setdefault(int(index), {})[field_name] = tensor
        else:
            groups[group][rest] = tensor
    return Checkpoint(numbers, groups["weights"], groups["best"], optimizer)
