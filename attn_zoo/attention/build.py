"""Build registered variants by name, and list or describe them without building anything."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_type_hints

from attn_zoo.attention.context import BuildContext
from attn_zoo.attention.contract import AbstractAttention, AbstractMixer
from attn_zoo.attention.multihead import MultiHeadMixer
from attn_zoo.errors import ConfigError, UnsupportedError, suggestion
from attn_zoo.metadata import Capabilities, Complexity, Reference
from attn_zoo.registry import Variant, make_config, option_fields, variants
from attn_zoo.typed_code import is_typed


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a variant: its name, type, default, and what the config's docstring says of it."""

    name: str
    type: str
    default: Any
    summary: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantInfo:
    """What `describe` returns: everything known about a variant without building it."""

    name: str
    summary: str
    capabilities: Capabilities
    complexity: Complexity
    reference: Reference
    options: tuple[Option, ...]
    provider: str
    source: str


def _configured(name: str, build: BuildContext, options: dict[str, Any]) -> tuple[Variant, Any]:
    variant = variants[name]
    config = make_config(variant.config, options, name)
    variant.capabilities_of(config).require(name, build.request())
    return variant, config


def build_attention(name: str, build: BuildContext, **options: Any) -> AbstractAttention:
    """Build the attention `name` over projected heads: `attention(query, key, value, *, key_padding_mask=None)`.

    Args:
        name: a registered variant; `list_variants` names them.
        build: sizes and direction.
        options: the variant's own options; `describe` lists them.

    Raises:
        UnknownNameError: no such variant; the message names near matches.
        ConfigError: an option is unknown or impossible.
        UnsupportedError: the variant refuses what the context asks.

    >>> import torch
    >>> build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=64)
    >>> attention = build_attention("full", build)
    >>> heads = torch.randn(1, 2, 10, 16)
    >>> attention(heads, heads, heads).shape
    torch.Size([1, 2, 10, 16])
    """
    variant, config = _configured(name, build, options)
    if variant.attention is None:
        raise UnsupportedError("attention", f"{name} needs hidden states [B, L, E]: use build_mixer")
    attention = variant.attention(config, build)
    attention.variant = variant  # a class may be registered under several names
    return attention


def build_mixer(name: str, build: BuildContext, **options: Any) -> AbstractMixer:
    """Build the mixer `name` over hidden states: `mixer(hidden, *, context=None, key_padding_mask=None)`.

    Arguments and errors as in `build_attention`.

    >>> import torch
    >>> build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=64, is_causal=True)
    >>> build_mixer("full", build)(torch.randn(1, 10, 32)).shape
    torch.Size([1, 10, 32])
    """
    variant, config = _configured(name, build, options)
    if variant.mixer is not None:
        mixer = variant.mixer(config, build)
    else:
        mixer = MultiHeadMixer(build_attention(name, build, **options))
    mixer.variant = variant
    return mixer


def list_variants(**wanted: Any) -> list[str]:
    """Return the names of registered variants, sorted, that have the wanted capabilities.

    Args:
        wanted: fields of `Capabilities` and the value each must have; for a tuple field, a value it must contain; for
            `decode`, True means any form of decoding.

    Raises:
        ConfigError: no such capability.

    >>> "full" in list_variants(causal=True, dtypes="bfloat16")
    True
    """
    known = [item.name for item in fields(Capabilities)]
    for name in wanted:
        if name not in known:
            raise ConfigError("list_variants", [("", f"unknown capability {name!r}{suggestion(name, known)}")])

    def has(capabilities: Capabilities, name: str, value: Any) -> bool:
        actual = getattr(capabilities, name)
        if isinstance(actual, tuple) and not isinstance(value, tuple):
            return value in actual
        if name == "decode" and isinstance(value, bool):
            actual = actual != "none"
        return bool(actual == value)

    return [
        name for name in variants if all(has(variants[name].capabilities, key, want) for key, want in wanted.items())
    ]


def describe(name: str) -> VariantInfo:
    """Return everything known about a variant: capabilities, claimed cost, source and options.

    Raises:
        UnknownNameError: no such variant.
    """
    variant = variants[name]
    owner = variant.attention or variant.mixer
    module = None if is_typed(variant.source) else inspect.getmodule(owner)
    documentation = (module.__doc__ if module else None) or (owner.__doc__ if owner else None) or ""
    explained, hints = documented_arguments(inspect.getdoc(variant.config) or ""), get_type_hints(variant.config)
    options = tuple(
        Option(
            item.name,
            inspect.formatannotation(hints[item.name]).replace("typing.", ""),
            _default(item),
            explained.get(item.name, ""),
        )
        for item in option_fields(variant.config)
    )
    return VariantInfo(
        name=name,
        summary=documentation.strip().partition("\n")[0],
        capabilities=variant.capabilities,
        complexity=variant.complexity,
        reference=variant.reference,
        options=options,
        provider=variant.provider,
        source=variant.source,
    )


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def documented_arguments(documentation: str) -> dict[str, str]:
    """Return what the section `Args` of a docstring says of each name."""
    section = re.search(r"^Args:\n((?:[ \t].*\n?|\n)*)", documentation, re.MULTILINE)
    entries = re.split(r"^ {4}(\w+):", section[1], flags=re.MULTILINE)[1:] if section else []
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}
