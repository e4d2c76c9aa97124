"""Processes that train one model together (data-parallel): each has the model and its part of every batch.

`torchrun` starts them; each is a rank. All ranks draw the same batch, in the order and with the padding that one
process would see, and take every N-th example of it. A rank's gradient counts as much as the items it is of, so the sum
over ranks is the gradient of the whole batch, up to rounding: parts are summed first, then the ranks' sums, in the
order of the backend's all-reduce. Every rank then makes the same update. What a model draws in training (dropout) is
drawn by each rank for itself; evaluations are dealt out by whole batches, and every item is scored once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attn_zoo.errors import ConfigError
from attn_zoo.records import Cell
from attn_zoo.training.batches import Batch
from attn_zoo.training.seeding import derive_seed

_PATIENCE = timedelta(days=30)
"""Of a rank that waits for another: `torchrun` ends all when one dies, and a cell that hangs has a time limit."""


class LostRankError(Exception):
    """Another rank ended: the fault is its, not of the one that noticed."""


class Ranks:
    """One of the processes that train a model, as it sees the others; one process alone, as it stands.

    Args:
        rank: of this process, from 0.
        size: how many there are.
        device: of this process.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def part(self, batch: Batch) -> Batch:
        """Return the examples of a batch that are this rank's; its `weight` says which share of the items these are."""
        return batch if self.size == 1 else batch.part(self.rank, self.size)

    def seed(self, seed: int) -> int:
        """Return a seed of this rank's own; that of the first is the one given."""
        return derive_seed(seed, "rank", self.rank) if self.rank else seed

    def sum_gradients(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """Give every parameter the sum of the ranks' gradients, in one message; return the sum of their losses.

        A parameter that no rank has used has a gradient of zero then.
        """
        if self.size == 1:
            return loss
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in trained]
        flat = self._summed(torch.cat([*(gradient.flatten() for gradient in gradients), loss.reshape(1)]))
        *parts, total = torch.split(flat, [*(one.numel() for one in trained), 1])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return total.view(()).to(loss.dtype)

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the first rank."""
        for tensor in tensors if self.size > 1 else ():
            there = tensor.detach().contiguous()
            with _blaming_others():
                dist.broadcast(there, src=0)
            if not torch.equal(there, tensor):
                tensor.detach().copy_(there)

    def total(self, number: float) -> float:
        """Return the sum of every rank's number."""
        return number if self.size == 1 else self._number(number, dist.ReduceOp.SUM)

    def largest(self, number: float) -> float:
        """Return the largest of every rank's number."""
        return number if self.size == 1 else self._number(number, dist.ReduceOp.MAX)

    def require_equal(self, number: int, what: str) -> None:
        """Raise `RuntimeError` unless all ranks have the same number."""
        if self.total(number) != self.size * number:
            raise RuntimeError(f"rank {self.rank} has another {what} ({number}) than the others")

    def joined(self, pieces: Sequence[Tensor], num_pieces: int, dtype: torch.dtype) -> Tensor:
        """Return all pieces one after another, on the host, where each rank has every N-th of them.

        Args:
            pieces: of this rank, each `[n]`.
            num_pieces: of all ranks.
            dtype: of the pieces.
        """
        if self.size == 1:
            return torch.cat([piece.cpu() for piece in pieces])
        mine = slice(self.rank, None, self.size)
        sizes = torch.zeros(num_pieces, dtype=torch.int64)
        sizes[mine] = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64)
        sizes = self._summed(sizes)
        number = torch.uint8 if dtype == torch.bool else dtype
        whole = torch.zeros(int(sizes.sum()), dtype=number)
        for place, piece in zip(torch.split(whole, sizes.tolist())[mine], pieces, strict=True):
            place.copy_(piece)
        return self._summed(whole).to("cpu", dtype)  # nothing but zeros is added: the values are exact

    def _number(self, number: float, how: dist.ReduceOp.RedOpType) -> float:
        return float(self._reduced(torch.tensor(float(number), dtype=torch.float64), how))

    def _summed(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def _reduced(self, tensor: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        there = tensor.to(self.device)
        with _blaming_others():
            dist.all_reduce(there, op=how)
        return there.cpu() if tensor.device.type == "cpu" else there


ALONE = Ranks()
"""One process."""


@contextmanager
def _blaming_others() -> Iterator[None]:
    """Raise `LostRankError` where the messages between ranks fail."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # which raises plain ones
            raise LostRankError(str(error)) from error
        raise


@contextmanager
def joined_ranks(cell: Cell) -> Iterator[Ranks]:
    """Join the processes that train a cell together, for the length of the block.

    Raises:
        ConfigError: this process is not one of as many as the cell asks for.
    """
    size = cell.data_parallel
    if size == 1:
        yield ALONE
        return
    if os.environ.get("WORLD_SIZE") != str(size) or "RANK" not in os.environ:
        text = f"data_parallel = {size}: expected to be one of {size} processes that torchrun started together"
        raise ConfigError(cell.id, [("", text)])
    rank, device = int(os.environ["RANK"]), torch.device(cell.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # "cuda" means this one from here on
    is_new = not dist.is_initialized()
    if is_new:
        backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        with _blaming_others():
            dist.init_process_group(backend, timeout=_PATIENCE, device_id=own)
    yield Ranks(rank, size, device)
    if is_new:  # not after an error: NCCL would wait for the others, and torchrun for this one
        dist.destroy_process_group()
