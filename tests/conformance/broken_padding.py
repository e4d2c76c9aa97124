"""Broken variants whose padding mask hides too little, too much, or belongs to another entry or another call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_zoo.attention import BuildContext
from tests.conformance.broken import EVERYTHING, Broken, Softmax


class ZeroTimesNan(Softmax):
    """Weights of zero hide no NaN in the values."""

    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return tokens


class HidesNanButNotInfinity(Softmax):
    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return tokens if mask is None else tokens.masked_fill(tokens.isnan() & mask[:, None, :, None], 0.0)


class GradientOfQueriesReadsPaddedKeys(Softmax):
    """Scores are filled after the product: the output is right, and the gradient of a query is 0 * NaN."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return self.weights(scores, self.keep(query, key, mask)) @ self.hide(value, mask)


class AssumesPaddingAtTheEnd(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = torch.arange(mask.shape[1], device=mask.device) >= (~mask).sum(-1, keepdim=True)
        return super().attend(query, key, value, mask)


class ChangesMasks(Softmax):
    """Attends under another mask than the one it was given."""

    def changed(self, mask: Tensor) -> Tensor:
        return mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, value, None if mask is None else self.changed(mask))


class FirstMaskForAll(ChangesMasks):
    def changed(self, mask: Tensor) -> Tensor:
        return mask[:1].expand_as(mask)


class NextEntrysMask(ChangesMasks):
    def changed(self, mask: Tensor) -> Tensor:
        return mask.roll(1, 0)


class HidesWhatAnyEntryHides(ChangesMasks):
    def changed(self, mask: Tensor) -> Tensor:
        return mask.any(0, keepdim=True).expand_as(mask) | mask


class IgnoresMaskBeyondABlock(ChangesMasks):
    block_size = 64

    def changed(self, mask: Tensor) -> Tensor:
        return mask & (torch.arange(mask.shape[1], device=mask.device) < self.block_size)


class IgnoresMaskBeyond256(IgnoresMaskBeyondABlock):
    block_size = 256


class RemembersMasks(ChangesMasks):
    """Keeps what a mask was made into under a key that another mask may have too."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.known: dict[object, Tensor] = {}

    def key_of(self, mask: Tensor) -> object:
        return mask.shape

    def changed(self, mask: Tensor) -> Tensor:
        return self.known.setdefault(self.key_of(mask), mask.clone())


class RemembersMasksByAddress(RemembersMasks):
    def key_of(self, mask: Tensor) -> object:
        return mask.data_ptr(), mask.shape


class RemembersMasksByCount(RemembersMasks):
    def key_of(self, mask: Tensor) -> object:
        return mask.shape, int(mask.sum())


class RemembersMasksByContent(RemembersMasks):
    """Itself sound."""

    def key_of(self, mask: Tensor) -> object:
        return mask.shape, tuple(mask.flatten().tolist())


class MeanOfTheFutureBehindPadding(Softmax):
    """Fills with a finite number: causal queries whose keys are all padding average over every key, later ones too."""

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        if keep is None:
            return scores.softmax(-1)
        filled = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        return filled.softmax(-1) * keep.any((-1, -2), keepdim=True)


class NoCausalMaskBesidePadding(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        return super().keep(query, key, None) if mask is None else ~mask[:, None, None]


class MasksFourEntries(ChangesMasks):
    def changed(self, mask: Tensor) -> Tensor:
        return mask & (torch.arange(len(mask), device=mask.device) < 4)[:, None]


class HidesByWhere(Softmax):
    """Another way to be right: padded keys and values are replaced, not zeroed. Itself sound."""

    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return tokens if mask is None else torch.where(mask[:, None, :, None], torch.full_like(tokens, 0.5), tokens)


MASKED = {"key_padding_mask": True}
BATCH = frozenset({"batch_invariance"})
ROWS = frozenset({"fully_padded_row"})
KEPT = BATCH | {"padding_content", "no_memory"}

PADDING = (
    Broken(cls=ZeroTimesNan, check="padding_content", capabilities=MASKED),
    Broken(cls=HidesNanButNotInfinity, check="padding_content", capabilities=MASKED),
    Broken(cls=GradientOfQueriesReadsPaddedKeys, check="padding_content", capabilities=MASKED),
    Broken(cls=IgnoresMaskBeyondABlock, check="padding_content", also=ROWS, capabilities=MASKED),
    Broken(cls=IgnoresMaskBeyond256, check="padding_content", capabilities=MASKED),
    Broken(cls=AssumesPaddingAtTheEnd, check="padding_content", capabilities=MASKED),
    Broken(cls=FirstMaskForAll, check="padding_patterns", also=BATCH | ROWS | {"padding_content"}, capabilities=MASKED),
    Broken(cls=NextEntrysMask, check="padding_patterns", also=BATCH | ROWS | {"padding_content"}, capabilities=MASKED),
    Broken(
        cls=HidesWhatAnyEntryHides, check="padding_patterns", also=BATCH | ROWS | {"no_memory"}, capabilities=MASKED
    ),
    Broken(cls=MeanOfTheFutureBehindPadding, check="causality", capabilities={**MASKED, "causal": True}),
    Broken(cls=NoCausalMaskBesidePadding, check="causality", also=KEPT, capabilities={**MASKED, "causal": True}),
    Broken(cls=MasksFourEntries, check="padding_patterns", capabilities=MASKED),
    Broken(cls=RemembersMasks, check="padding_patterns", also=KEPT | ROWS, capabilities=MASKED),
    Broken(cls=RemembersMasksByAddress, check="padding_patterns", also=EVERYTHING, capabilities=MASKED),
    Broken(cls=RemembersMasksByCount, check="padding_patterns", also=KEPT, capabilities=MASKED),
)
SOUND_PADDING = (
    Broken(cls=RemembersMasksByContent, check="", capabilities=MASKED),
    Broken(cls=HidesByWhere, check="", capabilities={**MASKED, "is_exact": True, "is_padding_invariant": True}),
)
