"""Measure, check and read results from Python; the command line is a shell over this module.

    run = attn_zoo.run("quick")        # a shipped matrix, a file, or a dict
    run.frame                          # one row a cell, units in the names
    run.plot("time")                   # a matplotlib figure
    attn_zoo.check("linformer")        # every promise it makes

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_zoo.displays import Checks, Run
from attn_zoo.errors import ConfigError, FolderError, UnknownNameError, UnsupportedError, suggestion
from attn_zoo.metadata import DEVICES

if TYPE_CHECKING:
    from attn_zoo.matrix.drive.run_plan import Engine, Standing
    from attn_zoo.matrix.plan.expand import Plan

MatrixLike = str | Path | Mapping[str, Any]
"""A TOML file, the name of a shipped matrix, or what such a file would say."""


def load(*folders: str | Path | Iterable[str | Path]) -> Run:
    """Return the results of one or more folders, compared with each other.

    Args:
        folders: results folders, packed runs, exports, or lists of them.

    Raises:
        ConfigError: there is none, or one holds no results.
        StoreError: there is no such folder.
    """
    from attn_zoo.folder import read_info
    from attn_zoo.report.sources import read_source

    given = [
        path
        for entry in folders
        for path in ([entry] if isinstance(entry, str) or not isinstance(entry, Iterable) else entry)
    ]
    if strange := [path for path in given if not isinstance(path, str | PathLike)]:
        raise ConfigError("load", [("", f"expected results folders; got {strange[0]!r}")])
    paths = [Path(path) for path in given]
    if not paths:
        raise ConfigError("load", [("", "expected at least one results folder; got none")])
    for path in paths:
        # What holds no results is a mistake of this call, not of a later one.
        if (path / "run.json").is_file() or not (path.exists() or ":" in str(path)):  # REV:FOLDER is one of git's
            read_info(path)
        else:
            read_source(path)
    return Run(paths)


def run(
    matrix: MatrixLike,
    *,
    out: str | Path | None = None,
    variants: str | type | Iterable[str | type] = (),
    only: Iterable[str] | str = (),
    device: str | None = None,
    shard: str | None = None,
    time_limit_min: float | None = None,
    retry: Iterable[str] | str = (),
    jobs: int = 1,
    engine: str = "local",
    address: str = "local",
    data_dir: str | Path | None = None,
    allow_mixed_env: bool = False,
    allow_cells: int | None = None,
    track: str | None = None,
    progress: bool = True,
) -> Run:
    """Measure a matrix into a results folder; of a folder that has some of it already, what is left.

    Cells run in other processes, each after its correctness gate. Ctrl-C is safe: what was measured is kept, and the
    same call goes on from there.

    Args:
        matrix: a TOML file, the name of a shipped one (`attn-zoo list matrices`), or a dict of what a file would say.
        out: results folder; by default `runs/NAME`.
        variants: to measure beside those of the matrix, in every group: names, or classes that were registered.
        only: patterns over ids of cells (`"full/*"`); others are left out.
        device: `"cpu"` or `"cuda"` instead of what the matrix says.
        shard: `"I/N"`: the I-th of N parts only.
        time_limit_min: minutes after which no further cell starts.
        retry: statuses of records that are run again; each stays until the next one is there.
        jobs: trainings at once, or other cells without a timing, on Ray for each GPU or node; timings run alone.
        engine: `"local"` or `"ray"`.
        address: of the Ray cluster.
        data_dir: where tasks find local data.
        allow_mixed_env: go on in a folder measured in another environment.
        allow_cells: a matrix of more is refused; by default of more than 20 000.
        track: where the curves of trainings go while they train: `"tensorboard:FOLDER"`, `"wandb:PROJECT"` or
            `"trackio:PROJECT"`; on Ray, nodes send them themselves. The records have them in any case.
        progress: say on the standard error stream what happens.

    Returns:
        What the folder has now; `summary` says what this call added, and why it ended early if it did.

    Raises:
        ConfigError: the matrix says something impossible, or a variant's source is not known.
        UnknownNameError: no such matrix, variant, engine, status or tracker.
        UnsupportedError: no such device here, or the tracker is not installed.
        StoreError: the folder cannot be used or written.
    """
    return _measure(
        lambda: plan(
            matrix,
            variants=variants,
            only=only,
            device=device,
            shard=shard,
            data_dir=data_dir,
            is_remote=engine != "local",
            allow_cells=allow_cells,
            has_estimates=False,
        ),
        out,
        engine=engine,
        address=address,
        jobs=jobs,
        retry=retry,
        time_limit_min=time_limit_min,
        allow_mixed_env=allow_mixed_env,
        data_dir=data_dir,
        track=track,
        progress=progress,
    )


@contextmanager
def _tracking(track: str | None) -> Iterator[None]:
    """Let the processes that start within the block know where curves go."""
    if track is None:
        yield
        return
    from attn_zoo.matrix.cell.tracking import VARIABLE, check_tracker

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = check_tracker(track)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def run_again(
    folder: str | Path,
    statuses: Iterable[str] | str = (),
    *,
    jobs: int = 1,
    engine: str = "local",
    address: str = "local",
    time_limit_min: float | None = None,
    data_dir: str | Path | None = None,
    allow_mixed_env: bool = False,
    track: str | None = None,
    progress: bool = True,
) -> Run:
    """Run the cells of a results folder again that failed; the old records are kept in its folder `replaced`.

    What runs into the folder were to make and did not is made too; not what they left out of a matrix.

    `statuses` are those of the records to run again, by default every one that is no answer; other arguments are as in
    `run`.

    Raises:
        StoreError: no results folder, or one that cannot be written.
        ConfigError: no folder at `data_dir`.
        UnknownNameError: no such status, engine or tracker.
        UnsupportedError: the engine or the tracker is not installed.
    """
    from attn_zoo.records import ANSWERS, STATUSES

    def make() -> Plan:
        from attn_zoo.matrix.plan.expand import require_devices

        is_remote = engine != "local"
        planned = _stored_plan(Path(folder), data_folder(data_dir, must_exist=not is_remote), is_remote=is_remote)
        if engine == "local":
            require_devices(planned.cells)
        return planned

    return _measure(
        make,
        folder,
        engine=engine,
        address=address,
        jobs=jobs,
        retry=_listed("statuses", statuses) or [status for status in STATUSES if status not in ANSWERS],
        time_limit_min=time_limit_min,
        allow_mixed_env=allow_mixed_env,
        data_dir=data_dir,
        track=track,
        progress=progress,
    )


def _measure(
    make: Callable[[], Plan],
    folder: str | Path | None,
    *,
    engine: str,
    address: str,
    jobs: int,
    retry: Iterable[str] | str,
    time_limit_min: float | None,
    data_dir: str | Path | None,
    allow_mixed_env: bool,
    track: str | None,
    progress: bool,
) -> Run:
    """Run what `make` plans, which takes seconds: what is wrong with other arguments is said before."""
    from attn_zoo.records import STATUSES

    if getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "").startswith("attn_zoo.matrix.cell."):
        text = "loading a variant's source starts a run: define the class outside of the function that calls run"
        raise ConfigError("run", [("", text)])
    if time_limit_min is not None and not (isinstance(time_limit_min, int | float) and time_limit_min >= 0):
        raise ConfigError("time_limit_min", [("", f"expected minutes, 0 or more; got {time_limit_min!r}")])
    statuses = _listed("retry", retry)
    for status in statuses:
        if status not in STATUSES:
            raise UnknownNameError("status", status, STATUSES, f"there are {', '.join(STATUSES)}")
    _require_kinds(str, "a text", engine=engine, address=address, track=track)
    _require_kinds((str, PathLike), "a path", out=folder)
    data_folder(data_dir)
    _require_kinds(int, "a whole number", jobs=jobs)
    if jobs < 1:
        raise ConfigError("--jobs", [("", f"expected 1 or more; got {jobs}")])
    with _tracking(track):
        supervisor = _engine(engine, address, jobs)
        planned = make()
        if planned.cells and all(item.refusal and item.refusal[0] == "cuda" for item in planned.cells):
            raise UnsupportedError("cuda", f"{planned.matrix.name} is for a GPU, and {_NO_CUDA}")
        from attn_zoo.matrix.drive import run_plan
        from attn_zoo.matrix.drive.progress import Progress, make_progress
        from attn_zoo.matrix.store.store import Store

        place = Path(folder or Path("runs") / planned.matrix.name)
        summary = run_plan.run(
            planned,
            Store(place),
            engine=supervisor,
            retry_statuses=statuses,
            time_limit_min=time_limit_min,
            progress=make_progress() if progress else Progress(),
            allow_mixed_env=allow_mixed_env,
            data_dir=data_folder(data_dir),
        )
    return Run([place], summary)


def _engine(name: str, address: str, jobs: int) -> Engine:
    if name == "ray":
        from attn_zoo.matrix.drive.engines.ray import RayEngine

        return RayEngine(address, jobs)
    if name != "local":
        raise UnknownNameError("engine", name, ["local", "ray"], "there are local, ray")
    if address != "local":
        raise ConfigError("--address", [("", f"is of a cluster: expected --engine ray with it; got {address!r} alone")])
    from attn_zoo.matrix.drive.engines.local import LocalEngine

    return LocalEngine(jobs)


def plan(
    matrix: MatrixLike,
    *,
    variants: str | type | Iterable[str | type] = (),
    only: Iterable[str] | str = (),
    device: str | None = None,
    shard: str | None = None,
    data_dir: str | Path | None = None,
    is_remote: bool = False,
    should_probe: bool = False,
    allow_cells: int | None = None,
    has_estimates: bool = True,
) -> Plan:
    """Return the cells of a matrix, each with its refusal or a rough estimate; arguments and errors are as in `run`.

    Beside these: `is_remote` says that the cells will run on other machines; `should_probe` asks constructors too what
    they refuse, in a process of its own; without `has_estimates` a plan of very many cells is ready sooner.
    """
    from attn_zoo.matrix.plan.expand import make_plan, require_devices
    from attn_zoo.matrix.plan.schema import MAX_CELLS, load_matrix, parse_matrix

    _require_kinds(int, "a whole number of cells", allow_cells=allow_cells)
    _require_kinds(str, "a text", shard=shard)
    names = [each if isinstance(each, str) else _name_of(each) for each in _listed("variants", variants)]
    most = MAX_CELLS if allow_cells is None else allow_cells
    if isinstance(matrix, Mapping):
        read = parse_matrix(matrix, "matrix", allow_cells=most)
    elif not isinstance(matrix, str | os.PathLike):
        raise ConfigError("matrix", [("", f"expected a TOML file, a shipped name or a dict; got {matrix!r}")])
    else:
        read = load_matrix(matrix, allow_cells=most)
    planned = make_plan(
        read,
        device=None if device is None else _device(device, is_remote),
        only=_listed("only", only),
        shard=_shard(shard),
        add_variants=names,
        data_dir=data_folder(data_dir, must_exist=not is_remote),
        is_remote=is_remote,
        should_probe=should_probe,
        has_estimates=has_estimates,
    )
    if not is_remote:
        require_devices(planned.cells)
    return planned


def _listed(name: str, given: Any) -> list[Any]:
    """Return a list of texts, and of classes where they are allowed; a single one is one entry.

    Raises:
        ConfigError: the argument `name` is something else.
    """
    kinds, words = ((str, type), "names or classes") if name == "variants" else ((str,), "texts")
    if not isinstance(given, Iterable):
        given = [given] if given is not None else []
    listed = [given] if isinstance(given, kinds) else list(given)
    if strange := [each for each in listed if not isinstance(each, kinds)]:
        raise ConfigError(name, [("", f"expected {words}; got {strange[0]!r}")])
    return listed


def _require_kinds(kinds: type | tuple[type, ...], words: str, **arguments: object) -> None:
    """Refuse arguments that are given and of another type; a truth value is no number."""
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ConfigError(name, [("", f"expected {words}; got {value!r}")])


def _name_of(cls: type) -> str:
    variant = vars(cls).get("variant") if isinstance(cls, type) else None  # that of a parent is the parent's
    if variant is None:
        raise ConfigError(
            getattr(cls, "__name__", repr(cls)),
            [("", "expected a registered variant: decorate it with register_attention")],
        )
    return str(variant.name)


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ConfigError("shard", [("", f"expected I/N, such as 1/4; got {text!r}")])
    return int(index), int(count)


_NO_CUDA = "there is no CUDA device here; attn-zoo doctor says what is"


def _device(name: str, is_remote: bool = False) -> str:
    """Return the name of a device that is there.

    Raises:
        ConfigError: there is no device of this name.
        UnsupportedError: it is not here.
    """
    name = str(name)  # of a torch.device too
    if name not in DEVICES:
        raise ConfigError("device", [("", f"expected {' or '.join(DEVICES)}; got {name!r}{suggestion(name, DEVICES)}")])
    if name == "cuda" and not is_remote:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError("cuda", _NO_CUDA)
    return name


def data_folder(given: str | Path | None, *, must_exist: bool = False) -> Path | None:
    """Return where data are to be looked for first; raise `ConfigError` where that `must_exist` and does not."""
    _require_kinds((str, PathLike), "a path", data_dir=given)
    if given and must_exist and not Path(given).is_dir():
        raise ConfigError(
            "--data-dir", [("", f"expected a folder, as this or ATTN_ZOO_DATA names it; there is none at {given}")]
        )
    return Path(given) if given else None


def _stored_plan(folder: Path, data_dir: Path | None, *, is_remote: bool = False) -> Plan:
    """Return what the runs into a folder were to make, shards and other parts of a matrix too, by today's sources."""
    from attn_zoo.folder import WITHOUT_INFO, cell_files, read_info
    from attn_zoo.matrix.plan.expand import make_plan, plain_files
    from attn_zoo.matrix.plan.schema import restore_matrix
    from attn_zoo.matrix.store.kept_sources import load_kept
    from attn_zoo.matrix.store.store import asked_before, with_known_data

    info = read_info(folder)
    if not info.matrices:
        raise FolderError(f"{folder / 'run.json'}: names no matrix; {WITHOUT_INFO}")
    foreign = load_kept(folder)
    try:
        plans = [
            make_plan(restore_matrix(matrix), data_dir=data_dir, is_remote=is_remote, has_estimates=False)
            for matrix in info.matrices
        ]
    except ConfigError as error:
        hints = [("", f"{path} was not measured by you: read it, then load it (--variant-file)") for path in foreign]
        raise ConfigError(error.source, [*error.problems, *hints]) from None
    cells = list({item.cell.key: item for one in plans for item in one.cells}.values())
    if info.planned is not None:
        cells = with_known_data(cells, info.planned)
        cells = asked_before(cells, info.planned, {path.stem for path in cell_files(folder)})
    return replace(plans[-1], cells=tuple(cells), variant_files=tuple(plain_files(cells)), is_whole=False)


def status(folder: str | Path, data_dir: str | Path | None = None) -> Standing:
    """Return what a results folder has, what is left, and which records are of sources or data that changed since.

    Where a variant is not registered here, the folder speaks for itself, and `doubt` says what is not seen then.

    Args:
        folder: results folder.
        data_dir: where tasks find local data.

    Raises:
        StoreError: no results folder.
        ConfigError: no folder at `data_dir`.
    """
    from attn_zoo.matrix.drive.run_plan import standing, time_left
    from attn_zoo.matrix.plan.planned_cell import PlannedCell
    from attn_zoo.matrix.store.store import Store

    store, data = Store(folder), data_folder(data_dir, must_exist=True)
    try:
        cells, doubt, has_plan = _stored_plan(store.folder, data).cells, "", True
    except ConfigError as error:
        known = store.info().planned
        has_plan = known is not None
        unseen = "what changed since" if has_plan else "what is left, and what changed since,"
        doubt = f"{unseen} is not known: {error.problems[0][1]}; files of variants are named by --variant-file"
        cells = tuple(PlannedCell(cell=cell) for cell in known or (record.cell for record in store.records()))
    scan = store.scan()
    records = list(scan.records.values())
    found = standing(cells, records, store.repeats.count(), store.marked_again())
    repeats = {key: store.repeats.read(key) for key in found.begun}
    return replace(
        found,
        left_s=time_left(found.left, records, repeats) if has_plan else 0.0,
        has_plan=has_plan,
        doubt=doubt,
        missing_shards=store.info(has_plan=False).missing_shards,
        problems=scan.problems,
    )


def check(
    variant: str | type,
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    only: Iterable[str] | str = (),
    progress: bool = True,
    apart: bool = False,
) -> Checks:
    """Check a variant against every promise it makes, in this process.

    Args:
        variant: name, or class that was registered.
        options: of the variant, `{}` for its defaults; without, the small sets that its config names.
        device: `"cpu"` or `"cuda"`.
        only: names of checks; by default all (`attn-zoo list checks`).
        progress: say on the standard error stream which check it is that takes long.
        apart: in a process of its own, which takes two seconds more: there it may crash or end the process, which is
            then what was found, and of what it prints only the last lines are shown.

    Raises:
        UnknownNameError: no such variant or check.
        ConfigError: an option is unknown or impossible; or its file was changed since it was loaded.
        UnsupportedError: no such device here, or it does not run there.
    """
    from attn_zoo.conformance import run_checks
    from attn_zoo.console import tell, told_if_slow
    from attn_zoo.registry import variants

    _require_kinds(Mapping, "options by name", options=options)
    name = variant if isinstance(variant, str) else _name_of(variant)
    variants.plain_file(name)  # or what is checked is no more what its file says
    around = told_if_slow if progress else nullcontext
    settings: dict[str, Any] = {"device": _device(device), "checks": _listed("only", only) or None, "around": around}
    if apart:
        from attn_zoo.matrix.checks_apart import run_checks_apart

        found, printed = run_checks_apart(name, options, **settings)
        if printed and progress:
            tell(f"last lines that {name} printed:\n{printed}")
    else:
        found = run_checks(name, options, **settings)
    results = Checks(found)
    results.variant = name
    return results
