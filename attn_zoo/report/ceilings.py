"""Read `ceilings.json` of a results folder: what the machine could do before the run. Older folders have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attn_zoo.errors import StoreError
from attn_zoo.records import Ceilings
from attn_zoo.report.units import human_bandwidth, human_flops

__all__ = ["ceilings_words", "read_ceilings"]


def read_ceilings(folder: Path, warnings: list[str]) -> tuple[Ceilings, ...]:
    """Return the ceilings of a folder; what cannot be read becomes a warning.

    Args:
        folder: a results folder.
        warnings: appended to.
    """
    file = folder / "ceilings.json"
    if not file.is_file():
        return ()
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        entries = data["ceilings"]
        return tuple(Ceilings.from_dict(entry, "ceilings") for entry in entries)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, StoreError) as error:
        warnings.append(f"{folder.name}/ceilings.json was skipped: {type(error).__name__}: {error}")
        return ()


def ceilings_words(ceilings: Ceilings) -> str:
    """Return the figures as half a sentence, with what makes them doubtful."""
    said = (
        f"matrix products {human_flops(ceilings.matmul_flops_per_s)}/s in {ceilings.dtype}, "
        f"copies {human_bandwidth(ceilings.copy_bytes_per_s)}"
    )
    if ceilings.peak_flops_per_s is not None and ceilings.peak_bytes_per_s is not None:
        sheet = f"{human_flops(ceilings.peak_flops_per_s)}/s, {human_bandwidth(ceilings.peak_bytes_per_s)}"
        said += f" (data sheet {sheet})"
    doubts = ", ".join(flag.replace("_", " ") for flag in ceilings.flags)
    return f"{said}, doubtful: {doubts}" if doubts else said
