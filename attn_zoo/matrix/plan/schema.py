"""A matrix: read from TOML, every problem at once, each with its key's path, what was expected, and near matches."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model

import attn_zoo
from attn_zoo.errors import AttnZooError, ConfigError, UnknownNameError, suggestion
from attn_zoo.matrix.kinds.all_kinds import KINDS
from attn_zoo.matrix.kinds.kind import AbstractKind, Group, Problem, StrictModel
from attn_zoo.registry import make_config, refusal, variants
from attn_zoo.whole_files import read_regular

MAX_FILE_BYTES = 1_000_000

MAX_CELLS = 20_000
"""More is a typing error, or belongs in several matrices."""

MATRIX_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What a matrix, and with it a results folder, may be called."""

_OWN_KEYS = ("variants", "task")  # what a group is about cannot be a default


class Matrix(StrictModel):
    """A whole matrix; for each kind of group there is a field of the kind's name.

    Args:
        name: letters, digits and `._-`; results folders are named after it.
        description: one sentence.
        options: options of each variant, for all groups.
        source: the file it came from.
    """

    name: str = Field(pattern=f"^{MATRIX_NAME}$")
    description: str = ""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    source: str = ""

    def groups(self) -> Iterator[tuple[str, AbstractKind, Group]]:
        """Yield (path, kind, group), such as `("scaling[0]", ...)`, in the order they run."""
        for kind in KINDS:
            for index, group in enumerate(getattr(self, kind.name)):
                yield f"{kind.name}[{index}]", kind, group

    @property
    def num_cells(self) -> int:
        """How many cells the matrix expands to, before cells that occur twice are merged."""
        return sum(group.num_cells for _, _, group in self.groups())


_fields: dict[str, Any] = {kind.name: (tuple[kind.group, ...], ()) for kind in KINDS}  # type: ignore[name-defined]
_MATRIX: type[Matrix] = create_model("Matrix", __base__=Matrix, **_fields)


def shipped_matrices() -> dict[str, Path]:
    """Return the matrices of this package by name: beside the code where it is installed, else in `benchmarks`."""
    root = Path(attn_zoo.__path__[0])
    places = (root / "matrices", root.parent / "benchmarks")
    return {path.stem: path for place in places for path in sorted(place.glob("*.toml"))}


def load_matrix(path: Path | str, *, allow_cells: int = MAX_CELLS) -> Matrix:
    """Return the matrix that a TOML file describes, checked down to the options of every variant.

    Args:
        path: of the file, or the name of a shipped matrix. Variants of `--variant-file` must be loaded before.
        allow_cells: a matrix of more is refused.

    Raises:
        ConfigError: the file cannot be read or says something impossible; all problems at once.
    """
    path = Path(path)
    shipped = shipped_matrices()
    if path.name == str(path) in shipped and not path.is_file():
        path = shipped[path.name]
    source = path.name
    try:
        if path.is_dir():
            raise ConfigError(str(path), [("", "expected a TOML file; this is a folder")])
        content = read_regular(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        nearby = sorted(item.name for item in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        near = suggestion(path.name, [*nearby, *shipped])
        raise ConfigError(str(path), [("", f"no such file{near}  (attn-zoo list matrices)")]) from None
    except OSError as error:
        raise ConfigError(str(path), [("", f"cannot be read: {error.strerror}")]) from None
    try:
        data = tomllib.loads(content.decode("utf-8").removeprefix("\ufeff"))  # Notepad's byte-order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(source, [("", f"expected UTF-8 text; byte {error.start} (line {line}) is not")]) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is a ValueError too
        raise ConfigError(source, [("", f"not valid TOML: {error or 'nested too deeply'}")]) from None
    return parse_matrix(data, source, allow_cells=allow_cells)


def parse_matrix(data: Mapping[str, Any], source: str, *, allow_cells: int = MAX_CELLS) -> Matrix:
    """Return the matrix that plain data describe; `source` starts the message. The rest is as in `load_matrix`."""
    data = {key: _as_toml(value) for key, value in data.items()}
    defaults, problems = _defaults(data.get("defaults", {}))
    resolved: dict[str, Any] = {key: value for key, value in data.items() if key != "defaults"}
    resolved["source"] = source
    if "source" in data:
        problems.append(("source", unknown_key("source", _MATRIX)))
    for kind in KINDS:
        groups = data.get(kind.name, [])
        if not isinstance(groups, list):
            text = f"expected a list of groups, written [[{kind.name}]]; got {shown(groups)}"
            problems.append((kind.name, text))
            resolved[kind.name] = ()
            continue
        usable = {key: value for key, value in defaults.items() if key in kind.group.model_fields}
        resolved[kind.name] = tuple({**usable, **group} if isinstance(group, dict) else group for group in groups)
    matrix: Matrix | None = None
    try:
        matrix = _MATRIX.model_validate(resolved)
    except ValidationError as error:
        problems += sentences(error, _MATRIX)
    problems += _name_problems(resolved)
    told = {path for path, _ in problems}
    for key in ("defaults", *(kind.name for kind in KINDS)):
        problems += [item for item in plain_problems(data.get(key), key) if item[0] not in told]
    if not any(data.get(kind.name) for kind in KINDS):
        kinds = ", ".join(f"[[{kind.name}]]" for kind in KINDS)
        problems.append(("", f"expected at least one group ({kinds}); got none"))
    if matrix is not None:
        problems += _whole_problems(matrix, allow_cells)
    if problems or matrix is None:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return matrix


def _as_toml(value: Any) -> Any:
    """Return lists and dicts where Python has what amounts to them; all else as it is, for the models to refuse."""
    if isinstance(value, Mapping):
        return {key: _as_toml(each) for key, each in value.items()}
    return [_as_toml(each) for each in value] if isinstance(value, list | tuple | range) else value


def restore_matrix(stored: Mapping[str, Any]) -> Matrix:
    """Return a matrix as `run.json` keeps it: resolved, with the file it came from. Raises as `load_matrix`.

    However many cells it has, somebody allowed them.
    """
    data = {key: value for key, value in stored.items() if key != "source"}
    return parse_matrix(data, str(stored.get("source") or "run.json"), allow_cells=sys.maxsize)


def _defaults(raw: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Return the usable defaults and what is wrong with the others, so that each is reported once and at its place."""
    if not isinstance(raw, dict):
        return {}, [("defaults", f"expected a table, written [defaults]; got {shown(raw)}")]
    known = {key for kind in KINDS for key in kind.group.model_fields} - set(_OWN_KEYS)
    problems: list[Problem] = []
    usable: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            keys = ", ".join(sorted(known))
            problems.append((f"defaults.{key}", f"unknown key{suggestion(key, known)}  (keys are {keys})"))
            continue
        model = next(kind.group for kind in KINDS if key in kind.group.model_fields)
        try:
            # Only this field matters here; the others of the group are not given yet.
            model.model_validate({key: value})
        except ValidationError as error:
            every = sentences(error, model, ("defaults",))
            if own := [problem for problem in every if re.split(r"[.\[]", problem[0])[1] == key]:
                problems += own
                continue
        usable[key] = value
    return usable, problems


def _name_problems(data: Mapping[str, Any]) -> list[Problem]:
    """Check names of variants, their options, and what each kind checks, on raw data: also where the rest is wrong."""
    problems: list[Problem] = []
    shared = data.get("options", {})
    shared = shared if isinstance(shared, dict) else {}
    for name, options in shared.items():
        problems += _option_problems(name, options, f"options.{name}")
    for kind in KINDS:
        for index, group in enumerate(data[kind.name]):
            if isinstance(group, dict):
                where = f"{kind.name}[{index}]"
                problems += _entry_problems(group.get("variants", []), shared, where)
                problems += kind.problems(group, where)
    return problems


def _once(label: str) -> str:
    return f"expected each variant once; {label!r} is in this group already"


def _entry_problems(entries: Any, shared: Mapping[str, Any], where: str) -> Iterator[Problem]:
    entries = entries if isinstance(entries, list) else [entries]
    for index, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else entry
        path = f"{where}.variants[{index}]"
        if not isinstance(name, str):
            continue
        if entry in entries[:index]:  # here too, where something else is wrong
            yield path, _once((isinstance(entry, dict) and entry.get("label")) or name)
        if name not in variants:
            yield from _option_problems(name, {}, path)
        elif isinstance(entry, dict) and isinstance(entry.get("options"), dict):
            base = shared.get(name, {})
            merged = {**base, **entry["options"]} if isinstance(base, dict) else entry["options"]
            yield from _option_problems(name, merged, f"{path}.options")


def _option_problems(name: str, options: Any, path: str) -> list[Problem]:
    try:
        variant = variants[name]
    except UnknownNameError as error:
        return [(path, str(error))]
    if not isinstance(options, dict):
        return []  # the model says so already
    plain = plain_problems(options, path)
    if plain:
        return plain
    try:
        make_config(variant.config, options, name)
    except ConfigError as error:
        return [(f"{path}.{where}" if where else path, text) for where, text in error.problems]
    except AttnZooError as error:
        return [(path, str(error))]
    return []


def _whole_problems(matrix: Matrix, allow_cells: int) -> list[Problem]:
    """Check what no single key can: not too much to do, labels with one meaning."""
    problems: list[Problem] = []
    groups = list(matrix.groups())
    if matrix.num_cells > allow_cells:
        where, _, worst = max(groups, key=lambda item: item[2].num_cells)
        found = f"this group alone has {worst.num_cells:,}"
        text = f"expected at most {allow_cells:,} cells in all; {found}  (--allow-cells {matrix.num_cells} takes them)"
        problems.append((where, text))
    meaning: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for where, _, group in groups:
        labels: set[str] = set()
        for position, entry in enumerate(group.variants):
            label = entry.label or entry.name
            what = (entry.name, {**matrix.options.get(entry.name, {}), **entry.options}, entry.overrides())
            if meaning.setdefault(label, what) != what:
                text = f"label {label!r} already means {meaning[label][0]} with other options; give this one a label"
                problems.append((f"{where}.variants[{position}]", text))
            elif label in labels:
                problems.append((f"{where}.variants[{position}]", _once(label)))
            labels.add(label)
    return problems


_GROUPS = {kind.name: kind.group for kind in KINDS}


def _key_path(parts: tuple[int | str, ...]) -> str:
    """Return the path as users write it: `scaling[0].dtypes[1]`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def shown(value: Any) -> str:
    """Return the value as Python writes it, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_key(key: str, model: type[BaseModel]) -> str:
    """Return the sentence for a key that `model` does not have; `defaults` and `source` of a matrix are special."""
    known = set(model.model_fields)
    if "source" in known:
        known = known - {"source"} | {"defaults"}
    return f"unknown key{suggestion(key, known)}  (keys are {', '.join(sorted(known))})"


def sentences(error: ValidationError, root: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[Problem]:
    """Turn pydantic's findings into our sentences: expected this; got that."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        parts = tuple(detail["loc"])
        match detail["type"]:
            case "extra_forbidden" if len(parts) > 1 and parts[-3:-2] == ("variants",):
                keys = tuple(_GROUPS[str(parts[0])].entry.model_fields)
                hint = suggestion(str(parts[-1]), keys)
                text = f"unknown key{hint}  (keys of a variant's table are {', '.join(keys)})"
            case "extra_forbidden":
                text = unknown_key(str(parts[-1]), _GROUPS.get(str(parts[0]), root) if len(parts) > 1 else root)
            case "missing":
                text = "this key is required"
            case "too_short":
                text = "expected at least one value; got none"
            case "value_error":
                text = str(detail["ctx"]["error"])
            case "string_pattern_mismatch" | "string_too_long":
                signs = "up to 64 letters, digits and . _ -"
                if parts[-1] == "label":
                    signs = "up to 40 letters, digits, spaces and . _ + - = ( )"
                text = f"expected {signs}; got {shown(detail['input'])}"
            case _:
                text = refusal([detail], shown(detail["input"]))
        problems.append((_key_path((*prefix, *parts)), text))
    return problems


def plain_problems(value: Any, path: str) -> list[Problem]:
    """Return what of a part of a matrix JSON cannot hold exactly: dates, NaN, infinities, integers beyond 64 bits."""
    if isinstance(value, dict):
        return [problem for key, item in value.items() for problem in plain_problems(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [problem for index, item in enumerate(value) for problem in plain_problems(item, f"{path}[{index}]")]
    if isinstance(value, float) and not math.isfinite(value):
        return [(path, f"expected a finite number; got {value}")]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return [(path, f"expected an integer of 64 bits; got {value}")]
    if not isinstance(value, str | int | float | None):
        means = f", which a file calls {value.value!r}" if isinstance(value, Enum) else ""
        return [(path, f"expected a string, number, true or false, or a list of these; got {shown(value)}{means}")]
    return []
