"""The ceilings of a machine in words."""

from __future__ import annotations

from attn_zoo.records import Ceilings
from attn_zoo.report.units import human_bandwidth, human_flops

__all__ = ["ceilings_words"]


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
