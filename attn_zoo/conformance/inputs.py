"""What a call is given: tensors and masks, the same for both forms of a variant.

In every tensor, heads `[B, H, L, D]` or hidden states `[B, L, E]`, the batch is the first dimension and the tokens are
the last but one. That is all most checks need to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attn_zoo.conformance.tolerance import expect_close, rounding
from attn_zoo.metadata import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The arguments of one call.

    Args:
        form: `"attention"` (query, key, value) or `"mixer"` (hidden, and context in cross-attention).
        tensors: in the order of the call.
        key_padding_mask: bool `[B, S]`, True = padding.
        is_causal: for words only.
    """

    form: Form
    tensors: tuple[Tensor, ...]
    key_padding_mask: Tensor | None = None
    is_causal: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the contract."""
        return ("query", "key", "value") if self.form == "attention" else ("hidden", "context")[: len(self.tensors)]

    @property
    def batch_size(self) -> int:
        """B."""
        return self.tensors[0].shape[0]

    @property
    def query_len(self) -> int:
        """L."""
        return self.tensors[0].shape[-2]

    @property
    def key_len(self) -> int:
        """S."""
        return self.tensors[-1].shape[-2]

    @property
    def num_terms(self) -> int:
        """Length of the sums behind one output: over the keys and over the width of a projection."""
        return self.key_len + self.tensors[0].shape[-1]

    @property
    def key_side(self) -> tuple[int, ...]:
        """Which tensors hold keys and values."""
        return (1, 2) if self.form == "attention" else (len(self.tensors) - 1,)

    @property
    def is_shared(self) -> bool:
        """Whether queries and keys are the same tensor, so that a changed key changes its query too."""
        return self.form == "mixer" and len(self.tensors) == 1

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the inputs with every tensor changed."""
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))

    def poisoned(self) -> Inputs:
        """Return the inputs with NaN and infinities of both signs in the padded tokens, in turns."""
        mask = self.key_padding_mask
        if mask is None:
            return self
        at, tensors = torch.arange(mask.numel(), device=mask.device).view(mask.shape), list(self.tensors)
        for index in self.key_side:
            old = tensors[index]
            poison = (at.new_tensor([0, 1, -1]) / 0.0).to(old.dtype)[(at + index) % 3]
            tensors[index] = torch.where(padded_rows(old, mask), padded_rows(old, poison), old)
        return replace(self, tensors=tuple(tensors))

    def leaves(self) -> Inputs:
        """Return copies that ask for gradients."""
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())

    def under(self, mask: Tensor | None) -> Inputs:
        """Return the inputs under another mask, or none."""
        return replace(self, key_padding_mask=mask)

    def unpadded(self) -> Inputs:
        """Return the inputs under a mask that hides nothing."""
        shape, device = (self.batch_size, self.key_len), self.tensors[0].device
        return self.under(torch.zeros(shape, dtype=torch.bool, device=device))

    def entries(self, index: Tensor | slice) -> Inputs:
        """Return some entries of the batch."""
        mask = None if self.key_padding_mask is None else self.key_padding_mask[index]
        return replace(self, tensors=tuple(tensor[index] for tensor in self.tensors), key_padding_mask=mask)

    def entry(self, index: int) -> Inputs:
        """Return one entry as a batch of its own."""
        return self.entries(slice(index, index + 1))

    def repeated(self, count: int) -> Inputs:
        """Return `count` copies of the first entry as one batch."""
        return self.entries(torch.zeros(count, dtype=torch.long, device=self.tensors[0].device))

    def words(self) -> str:
        """Return the sizes in words, such as `"attention form, causal, B=1 H=2 L=5 D=16 float64"`."""
        first = self.tensors[0]
        parts = [f"{self.form} form"]
        if self.is_causal:
            parts.append("causal")
        if self.key_padding_mask is not None:
            parts.append("padded")
        sizes = [f"B={self.batch_size}"]
        if self.form == "attention":
            heads, groups = first.shape[1], self.tensors[1].shape[1]
            sizes += [f"H={heads}"] if heads == groups else [f"H={heads} G={groups}"]
        sizes.append(f"L={self.query_len}")
        if self.key_len != self.query_len:
            sizes.append(f"S={self.key_len}")
        sizes.append(f"{'D' if self.form == 'attention' else 'E'}={first.shape[-1]}")
        return ", ".join([*parts, f"{' '.join(sizes)} {str(first.dtype).removeprefix('torch.')}"])


def expect_same(inputs: Inputs, actual: Tensor, expected: Tensor, message: str, detail: str = "") -> None:
    """Raise `Violation` where two results of a call differ by more than sums in another order do."""
    expect_close(actual, expected, rounding(expected, inputs.num_terms), message, inputs.words() + detail)


def padded_rows(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return what a mask `[B, S]` says of each token in a shape that broadcasts to `[B, H, S, D]` or `[B, S, E]`."""
    return mask[:, None, :, None] if tensor.dim() == 4 else mask[:, :, None]


def without_padding(inputs: Inputs, output: Tensor) -> Tensor:
    """Return the output without the rows whose own query is padding: those may hold anything where queries are keys."""
    mask = inputs.key_padding_mask
    return output if mask is None or not inputs.is_shared else output.masked_fill(padded_rows(output, mask), 0.0)


def random_tensor(shape: Sequence[int], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return standard normal values: the same ones in every dtype and on every device, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype).to(device)


def random_like(tensor: Tensor, seed: int) -> Tensor:
    """Return `random_tensor` of the shape, type and device of another."""
    return random_tensor(tensor.shape, seed, tensor.dtype, str(tensor.device))


def padding_mask(batch_size: int, key_len: int, kind: Literal["end", "scattered"], device: str = "cpu") -> Tensor:
    """Return a mask `[B, S]` that leaves every entry at least one key.

    Args:
        batch_size: B.
        key_len: S, at least 2 for anything to be padded.
        kind: `"end"`: entry b loses its last keys, a different number each; `"scattered"`: keys anywhere, the first
            among them.
        device: of the result.
    """
    mask = torch.zeros(batch_size, key_len, dtype=torch.bool)
    for entry in range(batch_size):
        count = min(key_len - 1, max(1, (entry + 1) * key_len // (2 * batch_size)))
        if kind == "end":
            mask[entry, key_len - count :] = True
        else:
            order = torch.randperm(key_len, generator=torch.Generator().manual_seed(entry))
            order = torch.cat([order[order == 0], order[order != 0]])
            mask[entry, order[:count]] = True
    return mask.to(device)
