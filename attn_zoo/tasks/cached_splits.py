"""Splits in the cache of tensors: made once, whatever the kind of task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import get_args

from torch import Tensor

from attn_zoo.tasks.abstract_task import Split, SplitName
from attn_zoo.tasks.sources.tensor_cache import cached_tensors

__all__ = ["cached_splits"]


def cached_splits(name: str, make: Callable[[], Mapping[SplitName, Split]]) -> dict[SplitName, Split]:
    """Return `make()`, or what it returned the last time.

    Args:
        name: of the file below the cache folder; must change whenever `make` would return something else.
        make: returns splits by name.
    """
    names = [field.name for field in fields(Split)]

    def flat() -> dict[str, Tensor]:
        all_of = {f"{split}.{field}": getattr(rows, field) for split, rows in make().items() for field in names}
        return {key: tensor for key, tensor in all_of.items() if tensor is not None}

    tensors = cached_tensors(name, flat)
    return {
        split: Split(**{field: tensors.get(f"{split}.{field}") for field in names})  # type: ignore[arg-type]
        for split in get_args(SplitName)
        if f"{split}.tokens" in tensors
    }
