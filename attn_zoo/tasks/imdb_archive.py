"""From the archive of the reviews to the layout that pairs of films need: tables in the order of the reviews' numbers.

    python -m attn_zoo.tasks.imdb_archive aclImdb_v1.tar.gz data/imdb

The archive (Maas et al. 2011, ai.stanford.edu/~amaas/data/sentiment) holds one file for each review, named by number
and rating and in no order of numbers, and for each class a list of URLs in that order. It is read once, front to back;
nothing is unpacked to disk.
"""

from __future__ import annotations

import gzip
import lzma
import re
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

from attn_zoo.errors import AttnZooError, ConfigError, UnsupportedError
from attn_zoo.tasks.imdb_pairs import FILMS
from attn_zoo.tasks.text import CLASSES, COLUMN
from attn_zoo.whole_files import whole_file

_MEMBER = re.compile(r"(?:.*/)?(train|test)/(?:(neg|pos)/(\d{1,9})_\d+|urls_(neg|pos))\.txt")
_PARTS = ("train", "test")
_MAX_BYTES = 2**24  # of a member; the longest review has 14 thousand


def convert_archive(archive: Path, folder: Path) -> list[Path]:
    """Write the files of `FILMS` below `folder` from the published archive, and return their paths.

    Raises:
        ConfigError: the archive cannot be read, or lacks a review or a list.
        FolderError: a file exists already or cannot be written.
        UnsupportedError: `datasets` is not installed.
    """
    reviews, urls = _read(archive)
    problems = []
    for part in _PARTS:
        for label in CLASSES:
            have, lines = reviews[part, label], urls.get((part, label), b"").splitlines()
            if sorted(have) != list(range(len(lines))) or not lines:
                expected = f"expected reviews 0 to {len(lines) - 1}, one for each line of urls_{label}.txt"
                problems.append((f"{part}/{label}", f"{expected}; got {len(have)} reviews"))
    if problems:
        raise ConfigError(str(archive), problems)
    written = []
    for part in _PARTS:
        written.append(folder / FILMS.files[part])
        in_order = [[text for _, text in sorted(reviews[part, label].items())] for label in CLASSES]
        _write_table(written[-1], in_order)
        for label in CLASSES:
            written.append(folder / FILMS.files[f"{part}_{label}"])
            with whole_file(written[-1]) as temporary:
                temporary.write_bytes(gzip.compress(urls[part, label], mtime=0))
    return written


def _read(archive: Path) -> tuple[dict[tuple[str, str], dict[int, str]], dict[tuple[str, str], bytes]]:
    """Return texts by number, and lists of URLs, both by part and class."""
    reviews: dict[tuple[str, str], dict[int, str]] = {(part, label): {} for part in _PARTS for label in CLASSES}
    urls: dict[tuple[str, str], bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name)
                if match is None or not member.isreg() or member.size > _MAX_BYTES:
                    continue
                file = tar.extractfile(member)
                assert file is not None
                part, label, number, list_label = match.groups()
                if list_label:
                    urls[part, list_label] = file.read()
                elif int(number) in reviews[part, label]:
                    raise ConfigError(
                        str(archive), [(f"{part}/{label}", f"there are two reviews with number {number}")]
                    )
                else:
                    reviews[part, label][int(number)] = file.read().decode()
    except (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, UnicodeDecodeError) as error:
        raise ConfigError(str(archive), [("", f"cannot be read: {error}")]) from None
    return reviews, urls


def _write_table(path: Path, texts: list[list[str]]) -> None:
    try:
        import datasets
    except ImportError:
        raise UnsupportedError("datasets", "writing Parquet needs pip install 'attn-zoo[lra]'") from None
    features = datasets.Features({COLUMN: datasets.Value("string"), "label": datasets.ClassLabel(names=list(CLASSES))})
    rows: dict[str, list[Any]] = {
        COLUMN: [text for of_class in texts for text in of_class],
        "label": [label for label, of_class in enumerate(texts) for _ in of_class],
    }
    datasets.disable_progress_bars()
    with whole_file(path) as temporary, temporary.open("wb") as file:
        datasets.Dataset.from_dict(rows, features=features).to_parquet(file)


def main(arguments: list[str]) -> int:
    """Convert the archive named first into the folder named second; return the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m attn_zoo.tasks.imdb_archive aclImdb_v1.tar.gz data/imdb\n")
        return 2
    try:
        written = convert_archive(Path(arguments[0]), Path(arguments[1]))
    except AttnZooError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
