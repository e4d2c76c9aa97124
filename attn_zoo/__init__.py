"""attn_zoo: is an attention mechanism right, what does it cost as sequences grow, and what does it buy?

The public surface is small and loaded on first use, so that `import attn_zoo` stays fast and free of optional packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_zoo.api import check, compare, history, load, merge, run, share, verify
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
    from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
    from attn_zoo.registry import VariantConfig, load_file, register_attention, register_mixer, register_task

__version__ = "0.1.0"

_HOME = {
    "AbstractAttention": "attention",
    "AbstractMixer": "attention",
    "AttnZooError": "errors",
    "BuildContext": "attention",
    "Capabilities": "metadata",
    "Checks": "displays",
    "Complexity": "metadata",
    "ConfigError": "errors",
    "Mixed": "attention",
    "Reference": "metadata",
    "Run": "displays",
    "Shape": "metadata",
    "StoreError": "errors",
    "UnknownNameError": "errors",
    "UnsupportedError": "errors",
    "VariantConfig": "registry",
    "build_attention": "attention",
    "build_mixer": "attention",
    "check": "api",
    "compare": "api",
    "describe": "attention",
    "history": "api",
    "list_variants": "attention",
    "load": "api",
    "load_file": "registry",
    "merge": "api",
    "register_attention": "registry",
    "register_mixer": "registry",
    "register_task": "registry",
    "run": "api",
    "share": "api",
    "verify": "api",
}

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
    if name not in _HOME:
        raise AttributeError(f"module 'attn_zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"attn_zoo.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
