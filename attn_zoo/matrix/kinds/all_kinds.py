"""All kinds of cell, in the order their groups run."""

from __future__ import annotations

from attn_zoo.matrix.kinds.accuracy import Accuracy
from attn_zoo.matrix.kinds.approximation import Approximate
from attn_zoo.matrix.kinds.decoded_token import Decode
from attn_zoo.matrix.kinds.kind import AbstractKind
from attn_zoo.matrix.kinds.replacement import Replace
from attn_zoo.matrix.kinds.scaling import Scaling
from attn_zoo.matrix.kinds.step import Step
from attn_zoo.records import Cell

KINDS: tuple[AbstractKind, ...] = (Scaling(), Decode(), Step(), Approximate(), Accuracy(), Replace())


def kind_of(cell: Cell) -> AbstractKind:
    """Return the kind of a cell."""
    return next(kind for kind in KINDS if kind.owns(cell))
