"""Local Parquet files as `datasets` reads them: class names and pictures restored, the network never touched."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.tasks.sources.file_hash import file_sha256
from attn_zoo.tasks.sources.tensor_cache import cache_dir

if TYPE_CHECKING:
    import datasets

__all__ = ["read_parquet"]

_MAGIC = b"PAR1"  # first and last bytes of every Parquet file


def _library(name: str) -> Any:
    """Return `datasets`, switched off the network: otherwise it counts every load at the hub, 23 s where it cannot."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import datasets
    except ImportError:
        raise UnsupportedError("datasets", f"{name}: reading Parquet needs pip install 'attn-zoo[lra]'") from None
    datasets.config.HF_HUB_OFFLINE = True  # somebody may have imported it before us
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    datasets.disable_progress_bars()
    return datasets


def _check(name: str, path: Path) -> None:
    """Raise `ConfigError` unless the file starts and ends as Parquet does."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
            file.seek(-4, os.SEEK_END)
            tail = file.read(4)
    except OSError as error:
        head = tail = b""
        if not path.is_file():
            raise ConfigError(name, [(str(path), f"cannot be read: {error.strerror}")]) from None
    if head != _MAGIC:
        raise ConfigError(name, [(str(path), "expected a Parquet file; it does not begin as one")])
    if tail != _MAGIC:
        raise ConfigError(name, [(str(path), "cut short: it begins but does not end as a Parquet file")])


def read_parquet(name: str, paths: Mapping[str, Path]) -> Mapping[str, datasets.Dataset]:
    """Return each file as a table, in the order of its rows.

    Tables are kept as Arrow files below the cache folder, so that a second call is quick; where that cannot be written,
    in memory. A changed file is read anew.

    Args:
        name: of the data, for messages.
        paths: of local Parquet files by what the task calls them.

    Raises:
        UnsupportedError: `datasets` is not installed.
        ConfigError: a file is missing, cut short, or not Parquet; names it.
    """
    library = _library(name)
    for path in paths.values():
        _check(name, path)
    return {key: _read(library, name, path) for key, path in paths.items()}


def _read(library: Any, name: str, path: Path) -> datasets.Dataset:
    """Return one file as a table."""
    # `datasets` knows a file by path and time of change; the folder's name adds the content.
    kept = cache_dir() / "parquet" / file_sha256(path)[:16]
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    try:
        if os.access(kept, os.W_OK):
            try:
                return _load(library, path, kept, in_memory=False)
            except OSError as error:
                if error.errno is None:  # damaged data; the others are troubles of the cache, such as a full disk
                    raise
        with tempfile.TemporaryDirectory() as folder:
            return _load(library, path, Path(folder), in_memory=True)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ConfigError(name, [(str(path), f"cannot be read as Parquet: {reason}")]) from None


def _load(library: Any, path: Path, cache: Path, *, in_memory: bool) -> datasets.Dataset:
    try:
        return library.load_dataset(
            "parquet",
            data_files={"train": [glob.escape(str(path.resolve()))]},
            cache_dir=str(cache),
            split="train",
            keep_in_memory=in_memory,
        )
    except library.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
