"""What a kind of cell is: the model of its groups in a matrix, and how these become cells, forecasts and records.

Behaviour of a kind stands in its own module beside this one and nowhere else. `all_kinds.py` lists them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from attn_zoo.matrix.plan.estimate import Estimate
from attn_zoo.matrix.plan.planned_cell import PlannedCell, Refusal
from attn_zoo.matrix.plan.source_digest import source_digest
from attn_zoo.matrix.plan.work_order import WorkOrder
from attn_zoo.records import Cell, Record
from attn_zoo.registry import variants

Problem = tuple[str, str]
"""Path of a key, such as `scaling[0].dtypes[1]`, and a sentence."""

Member = dict[str, Any]
"""Fields of a cell that an entry of a group decides: variant, label, options, variant_digest and what else it says."""

NO_CUDA: Refusal = ("cuda", "no CUDA device here")

MAX_LEN = 2**26
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_Value = TypeVar("_Value")


def as_axis(value: Any) -> Any:
    """Return a tuple: TOML has no tuples, and one value is an axis of one."""
    return tuple(value) if isinstance(value, list) else (value,)


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of one value of each axis; the last axis moves fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return repr(value) if isinstance(value, dict) else value


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    counts = Counter(map(_hashable, values))
    repeated = sorted({repr(value) for value in values if counts[_hashable(value)] > 1})
    if repeated:
        raise ValueError(f"expected each value once; {', '.join(repeated)} occurs more than once")
    return values


def _as_entry(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict | Entry):
        raise ValueError(f"expected a variant's name or a table {{name, label, options}}; got {value!r}")  # noqa: TRY004
    return value


Axis = Annotated[tuple[_Value, ...], BeforeValidator(as_axis), AfterValidator(_distinct), Field(min_length=1)]
_AnyEntry = TypeVar("_AnyEntry", bound="Entry")
Variants = Annotated[
    tuple[Annotated[_AnyEntry, BeforeValidator(_as_entry)], ...], BeforeValidator(as_axis), Field(min_length=1)
]
Length = Annotated[int, Field(ge=1, le=MAX_LEN)]
Size = Annotated[int, Field(ge=1, le=65_536)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class StrictModel(BaseModel):
    """Unknown keys are errors, nothing is coerced, nothing changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Entry(StrictModel):
    """A variant in a group.

    Args:
        name: registered name.
        label: what plots and ids call it; needed where one variant occurs with several sets of options.
        options: over those of `[options.<variant>]`.
    """

    name: str
    label: str = Field(default="", max_length=40, pattern=r"^[\w.+=() -]*$")
    options: dict[str, Any] = Field(default_factory=dict)

    def overrides(self) -> dict[str, Any]:
        """Return the fields of the training protocol that this entry changes."""
        return {}


class Group(StrictModel):
    """What groups of every kind may say. Where several values are given, every combination is a cell.

    Args:
        variants: names, or tables `{name, label, options}`.
        dtypes: floating-point types.
        seeds: one cell for each.
        device: `"auto"` takes the GPU if there is one.
        threads: CPU threads of a cell; torch decides if absent.
    """

    entry: ClassVar[type[Entry]] = Entry

    variants: Variants[Entry]
    dtypes: Axis[Dtype] = ("float32",)
    seeds: Axis[Seed] = (0,)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None

    @property
    def num_cells(self) -> int:
        """How many cells the group expands to."""
        return len(self.variants) * len(self.seeds) * len(self.dtypes)


class Forecast(Protocol):
    """Foretells how long cells of one kind take, better the more of them have run."""

    def add(self, record: Record) -> None:
        """Take note of a record."""

    def seconds(self, item: PlannedCell) -> float:
        """Return the seconds that one repeat of a cell will take; 0 where nothing is known."""


class AbstractKind(ABC):
    """A kind of cell.

    Attributes:
        name: key of its groups in a matrix.
        group: model of these groups.
        is_timed: what it measures is a time, so that nothing else may run on the machine meanwhile, and its ceilings
            are worth knowing. Cells of other kinds may run several at once, and go on from a checkpoint.
        rooms: of this package whose code runs while a cell is measured; see `source_digest`.
    """

    name: ClassVar[str]
    group: ClassVar[type[Group]]
    is_timed: ClassVar[bool]
    rooms: ClassVar[tuple[str, ...]]

    def owns(self, cell: Cell) -> bool:
        """Tell whether a cell is of this kind."""
        return cell.kind == self.name

    def counts_all_lengths(self, cell: Cell) -> bool:  # noqa: ARG002
        """Tell whether FLOPs are counted at every length of a cell's curve, and not at one to check a formula by."""
        return False

    def source_digest(self, cell: Cell) -> str:
        """Return the digest of all sources that decide what a cell measures."""
        return source_digest(variants[cell.variant], self.rooms, cell.device)

    def problems(self, group: Mapping[str, Any], where: str) -> list[Problem]:  # noqa: ARG002
        """Return what is wrong with names in a group, and with values that depend on them.

        Args:
            group: as read, with defaults; not validated yet.
            where: path of the group, such as `"accuracy[0]"`.
        """
        return []

    @abstractmethod
    def expand(self, group: Any, members: Sequence[Member], data_dir: Path | None) -> Iterator[PlannedCell]:
        """Yield all cells of a group, refused where they cannot run; what they will take is not said yet."""

    @abstractmethod
    def estimate(self, item: PlannedCell) -> Estimate:
        """Return the rough cost of one repeat of a cell that is not refused."""

    def is_probed(self, cell: Cell) -> bool:  # noqa: ARG002 - a kind may look at its fields
        """Tell whether `build_on_meta` may refuse a cell that nothing else refuses before it runs."""
        return self.is_timed

    def build_on_meta(self, cell: Cell) -> None:  # noqa: B027 - a kind may have nothing to try
        """Build what a cell would run, where torch's default device has no memory.

        Raises:
            UnsupportedError: a constructor refuses what the cell asks.
        """

    @abstractmethod
    def forecast(self) -> Forecast:
        """Return a forecast that knows of no record yet."""

    @abstractmethod
    def run(
        self, order: WorkOrder, records: Sequence[Record], tell: Callable[[int], object], room_bytes: int | None
    ) -> list[Record]:
        """Run the cells of an order in this process; every exception but Ctrl-C becomes a status of its cell.

        `records` are of the cells, otherwise empty; `tell` is told the index of a cell whenever work on it begins, for
        whoever has to know after a crash; `room_bytes` could be allocated at the start.

        Returns:
            A record of each cell; of failures only, where one of them left the device unusable.
        """
