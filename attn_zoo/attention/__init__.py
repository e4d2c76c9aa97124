"""The contract of a variant, the multi-head mixer around it, and the oracle it is compared with."""

from attn_zoo.attention.build import build_attention, build_mixer, describe, list_variants
from attn_zoo.attention.context import BuildContext
from attn_zoo.attention.contract import AbstractAttention, AbstractMixer, Mixed
from attn_zoo.attention.multihead import MultiHeadMixer

__all__ = [
    "AbstractAttention",
    "AbstractMixer",
    "BuildContext",
    "Mixed",
    "MultiHeadMixer",
    "build_attention",
    "build_mixer",
    "describe",
    "list_variants",
]
