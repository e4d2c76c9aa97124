"""Tables, figures and pages from results folders. Reads records only: no torch, no variant is ever loaded.

Names are imported on first use, because pandas and matplotlib take a second to start. The functions `export.export` and
`compare.compare` are named like their modules, so they are reached through them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_zoo.report.analysis.analyse import analyse
    from attn_zoo.report.export import load_runs
    from attn_zoo.report.pages.write import print_report, write_report, write_results_readme

__all__ = ["analyse", "load_runs", "print_report", "write_report", "write_results_readme"]

_HOME = {
    "analyse": "analysis.analyse",
    "load_runs": "export",
    "print_report": "pages.write",
    "write_report": "pages.write",
    "write_results_readme": "pages.write",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
