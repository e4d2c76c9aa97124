"""Find the weights of a cell in a results folder."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError, safe_open

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.folder import not_a_results_folder
from attn_zoo.records import Cell
from attn_zoo.units import some

MAX_SHOWN = 8


def kept_cells(folder: Path) -> dict[Path, Cell]:
    """Return the cells whose weights a results folder (or its folder `weights`) keeps, by file, in order of their ids.

    Raises:
        ConfigError: there is no such folder, it is no results folder, or it keeps no weights.
    """
    if not folder.is_dir():
        raise ConfigError(str(folder), [("", "expected the results folder of a run; there is no such folder")])
    place = folder / "weights" if (folder / "weights").is_dir() else folder
    cells = {path: cell for path in sorted(place.glob("*.safetensors")) if (cell := _cell_of(path)) is not None}
    if not cells:
        problem = "it keeps no weights; write keep_weights = true into the accuracy group of the matrix and run it"
        raise ConfigError(
            str(folder), [("", problem if (folder / "run.json").is_file() else not_a_results_folder(folder))]
        )
    return dict(sorted(cells.items(), key=lambda item: (item[1].id, item[1].key)))


def _cell_of(path: Path) -> Cell | None:
    """Return the cell in the header of a weights file, or None for a file of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("cell")
    except SafetensorError as error:
        raise ConfigError(str(path), [("", f"not a readable weights file ({error})")]) from error
    return None if text is None else Cell.from_dict(json.loads(text), f"{path}: cell")


def find_weights(folder: Path, pattern: str | None = None) -> Path:
    """Return the one file of weights that is meant by a pattern of an id, such as `full/*/seed0`, or by a key.

    Raises:
        ConfigError: the folder keeps no weights, or more than one cell is meant; the message lists them.
        UnknownNameError: no cell matches.
    """
    cells = kept_cells(folder)
    wanted = "*" if pattern is None else pattern
    matches = {path: cell for path, cell in cells.items() if wanted == cell.key or fnmatchcase(cell.id, wanted)}
    if not matches:
        names = [cell.id for cell in cells.values()]
        patterns = [f"{name.partition('/')[0]}/*" for name in names]
        raise UnknownNameError("cell", wanted, [*patterns, *names], f"it keeps {some(names, MAX_SHOWN)}")
    if len(matches) > 1:
        # Ids repeat where a matrix tunes overrides: then only keys tell cells apart.
        ids = [cell.id for cell in matches.values()]
        names = [f"{cell.id} ({cell.key})" if ids.count(cell.id) > 1 else cell.id for cell in matches.values()]
        what = f"expected one cell; {pattern!r} matches {len(names)}" if pattern else f"it keeps {len(names)} cells"
        raise ConfigError(str(folder), [("--cell", f"{what}; name one of {some(names, MAX_SHOWN)}")])
    return next(iter(matches))
