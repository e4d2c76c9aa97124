"""Text files that may lie here packed: `input.txt`, or else `input.txt.gz`, with the same digest."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from attn_zoo.errors import ConfigError
from attn_zoo.tasks.sources.source import Source

__all__ = ["PackedSource", "read_packed"]


def read_packed(path: Path, where: str) -> bytes:
    """Return the content of a file, unpacked if its name ends in `.gz`.

    Args:
        path: of the file.
        where: what the message starts with.

    Raises:
        ConfigError: it cannot be read, or is not what its name says.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError) as error:  # gzip raises both, and `BadGzipFile`, which is an OSError
        raise ConfigError(where, [(str(path), f"cannot be read: {error}")]) from None


@dataclass(frozen=True, kw_only=True)  # without slots: super() in a method needs the class that was written down
class PackedSource(Source):
    """Like `Source`, but each folder is also searched for the files under their names with `.gz` added."""

    def _packed(self) -> Source:
        files = {key: f"{file}.gz" for key, file in self.files.items()}
        return Source(name=self.name, folder=self.folder, files=files, hint=self.hint)

    def missing(self, data_dir: Path | None) -> list[str]:
        return [] if self.found(data_dir) is not None else super().missing(data_dir)

    def found(self, data_dir: Path | None) -> Path | None:
        return super().found(data_dir) or self._packed().found(data_dir)

    def locate(self, data_dir: Path | None) -> dict[str, Path]:
        is_packed = super().found(data_dir) is None and self._packed().found(data_dir) is not None
        return self._packed().locate(data_dir) if is_packed else super().locate(data_dir)

    def digest(self, data_dir: Path | None) -> str:
        content = hashlib.sha256()
        for key, path in sorted(self.locate(data_dir).items()):
            content.update(key.encode() + hashlib.sha256(read_packed(path, self.name)).digest())
        return content.hexdigest()
