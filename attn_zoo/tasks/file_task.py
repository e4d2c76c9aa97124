"""What tasks share that are read from files: splits made at the first use, and cached where making them is slow."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from attn_zoo.tasks.abstract_task import AbstractTask, Split, SplitName
from attn_zoo.tasks.cached_splits import cached_splits
from attn_zoo.tasks.sources.source import Source

__all__ = ["AbstractFileTask"]


class AbstractFileTask(AbstractTask):
    """A task whose splits are read from the files of its `source`.

    Class attributes:
        files: what every level reads.
        is_slow: reading takes longer than a few seconds, so the tensors are kept in the cache.

    Args:
        level: one of `levels`.
        data_dir: folder to look in first; see `Source.folders`.
    """

    files: ClassVar[Source]
    is_slow: ClassVar[bool] = False

    def __init__(self, level: str, *, data_dir: Path | None = None) -> None:
        super().__init__(level, data_dir=data_dir)
        self.config: Any = self.levels[level]
        self._splits: dict[SplitName, Split] = {}

    @classmethod
    def source(cls, level: str) -> Source | None:
        cls.check_level(level)
        return cls.files

    @abstractmethod
    def read(self, paths: dict[str, Path]) -> dict[SplitName, Split]:
        """Return the three splits.

        Args:
            paths: of the files, by what the source calls them.

        Raises:
            ConfigError: a file does not hold what it should.
        """

    def split(self, name: SplitName) -> Split:
        if not self._splits:
            self._splits = self._load()
        return self._splits[name]

    def _load(self) -> dict[SplitName, Split]:
        source = self.source(self.level)
        assert source is not None, f"{self.name} has no source"
        paths = source.locate(self.data_dir)
        if not self.is_slow:
            return self.read(paths)
        kept = f"{self.name}-{self.level}-{self.digest(self.level, data_dir=self.data_dir)}"
        return cached_splits(kept, lambda: self.read(paths))
