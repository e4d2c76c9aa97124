"""attn_zoo: is an attention mechanism right, what does it cost as sequences grow, and what does it buy?

The public surface is small and loaded on first use, so that `import attn_zoo` stays fast and free of optional packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_zoo.api import check, load, run
    from attn_zoo.attention import (
        AbstractAttention,
        AbstractMixer,
        BuildContext,
        Mixed,
        build_attention,
        build_mixer,
        describe,
        list_variants,
    )
    from attn_zoo.displays import Checks, Run
    from attn_zoo.errors import AttnZooError, ConfigError, StoreError, UnknownNameError, UnsupportedError
    from attn_zoo.matrix.store.merge import merge
    from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
    from attn_zoo.packed_run import share
    from attn_zoo.registry import VariantConfig, load_file, register_attention, register_mixer, register_task
    from attn_zoo.report.compare import compare
    from attn_zoo.report.history import history
    from attn_zoo.report.verify import verify

__version__ = "0.1.0"

_HOME = {
    "api": ("check", "load", "run"),
    "attention": (
        *("AbstractAttention", "AbstractMixer", "BuildContext", "Mixed"),
        *("build_attention", "build_mixer", "describe", "list_variants"),
    ),
    "displays": ("Checks", "Run"),
    "errors": ("AttnZooError", "ConfigError", "StoreError", "UnknownNameError", "UnsupportedError"),
    "matrix.store.merge": ("merge",),
    "metadata": ("Capabilities", "Complexity", "Reference", "Shape"),
    "packed_run": ("share",),
    "registry": ("VariantConfig", "load_file", "register_attention", "register_mixer", "register_task"),
    "report.compare": ("compare",),
    "report.history": ("history",),
    "report.verify": ("verify",),
}
"""What each module gives."""

__all__ = [
    "AbstractAttention",
    "AbstractMixer",
    "AttnZooError",
    "BuildContext",
    "Capabilities",
    "Checks",
    "Complexity",
    "ConfigError",
    "Mixed",
    "Reference",
    "Run",
    "Shape",
    "StoreError",
    "UnknownNameError",
    "UnsupportedError",
    "VariantConfig",
    "build_attention",
    "build_mixer",
    "check",
    "compare",
    "describe",
    "history",
    "list_variants",
    "load",
    "load_file",
    "merge",
    "register_attention",
    "register_mixer",
    "register_task",
    "run",
    "share",
    "verify",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"attn_zoo.{module}"), name)
    raise AttributeError(f"module 'attn_zoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
