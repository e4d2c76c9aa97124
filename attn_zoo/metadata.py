"""What a variant can do, what it claims to cost and where it comes from: frozen records, readable without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from attn_zoo.errors import UnsupportedError

__all__ = ["Capabilities", "Complexity", "CostFormula", "Decode", "Position", "Reference", "Request", "Shape"]

Decode = Literal["none", "kv_cache", "recurrent"]
Position = Literal["none", "rotary", "alibi"]

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
_NO_REASONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a caller wants from a variant. A field left at None (or False) asks for nothing.

    Args:
        is_causal: query i may see keys j <= i + S - L only.
        is_cross: keys and values come from another sequence, of another length.
        has_key_padding_mask: some keys are padding.
        needs_decode: step-by-step decoding with explicit state.
        is_grouped_query: fewer key/value heads than query heads.
        dropout_p: probability of dropping an attention weight.
        position: scheme that acts inside the attention (rotary rotates queries and keys, ALiBi biases scores).
        seq_len: longest sequence, in tokens.
        dtype: name of a floating-point type, such as `"bfloat16"`.
        device: `"cpu"` or `"cuda"`.
    """

    is_causal: bool = False
    is_cross: bool = False
    has_key_padding_mask: bool = False
    needs_decode: bool = False
    is_grouped_query: bool = False
    dropout_p: float = 0.0
    position: Position = "none"
    seq_len: int | None = None
    dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a variant can do. The first four have no default: whoever writes a variant must decide.

    Every yes is tested by behaviour and every no by refusal (`attn-zoo check`).

    Args:
        bidirectional: attends to past and future.
        causal: offers a form in which query i sees only keys j <= i + S - L.
        cross_attention: key length may differ from query length.
        key_padding_mask: honours a boolean mask of padded keys.
        decode: `"none"`, `"kv_cache"` (state grows) or `"recurrent"` (constant state).
        variable_seq_len: any length up to `max_seq_len` may be passed to one module.
        seq_len_multiple: lengths must be a multiple of this; 1 means any.
        grouped_query: accepts fewer key/value heads than query heads.
        attention_dropout: honours `dropout_p`.
        positions: schemes it admits inside the attention.
        is_exact: equals softmax attention up to rounding.
        is_deterministic: same input and seed, same output, bit for bit on one machine.
        is_simulated: computes dense scores and masks them, so its timings say nothing about the mechanism.
        dtypes: floating-point types it runs in.
        devices: device types it runs on.
        requires: packages it needs beyond the core dependencies.
        why: for a field that says no, half a sentence that explains it ("each compressed key mixes all positions").
    """

    bidirectional: bool
    causal: bool
    cross_attention: bool
    key_padding_mask: bool
    decode: Decode = "none"
    variable_seq_len: bool = True
    seq_len_multiple: int = 1
    grouped_query: bool = False
    attention_dropout: bool = True
    positions: tuple[Position, ...] = ("none", "rotary")
    is_exact: bool = False
    is_deterministic: bool = True
    is_simulated: bool = False
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    devices: tuple[str, ...] = ("cpu", "cuda")
    requires: tuple[str, ...] = ()
    why: Mapping[str, str] = field(default_factory=lambda: _NO_REASONS)

    def missing(self, request: Request) -> tuple[str, str] | None:
        """Return (capability, sentence) for the first thing in `request` that is not offered, or None."""
        needs: list[tuple[bool, str, str]] = [
            (request.is_causal and not self.causal, "causal", "no causal form"),
            (not request.is_causal and not self.bidirectional, "bidirectional", "no bidirectional form"),
            (request.is_cross and not self.cross_attention, "cross_attention", "no cross-attention"),
            (request.has_key_padding_mask and not self.key_padding_mask, "key_padding_mask", "no key_padding_mask"),
            (request.needs_decode and self.decode == "none", "decode", "no step-by-step decoding"),
            (request.is_grouped_query and not self.grouped_query, "grouped_query", "num_kv_heads must equal num_heads"),
            (request.dropout_p > 0 and not self.attention_dropout, "attention_dropout", "no attention dropout"),
            (
                request.position not in self.positions,
                "positions",
                f"position {request.position!r} is not one of {', '.join(self.positions)}",
            ),
            (
                request.dtype is not None and request.dtype not in self.dtypes,
                "dtypes",
                f"dtype {request.dtype} is not one of {', '.join(self.dtypes)}",
            ),
            (
                request.device is not None and request.device not in self.devices,
                "devices",
                f"device {request.device} is not one of {', '.join(self.devices)}",
            ),
            (
                request.seq_len is not None and request.seq_len % self.seq_len_multiple != 0,
                "seq_len_multiple",
                f"length {request.seq_len} is not a multiple of {self.seq_len_multiple}",
            ),
        ]
        for is_missing, capability, sentence in needs:
            if is_missing:
                explanation = self.why.get(capability)
                return capability, f"{sentence}: {explanation}" if explanation else sentence
        return None

    def why_not(self, request: Request) -> str | None:
        """Return the one sentence that says why `request` is refused, or None when it can be served.

        >>> linformer = Capabilities(
        ...     bidirectional=True, causal=False, cross_attention=True, key_padding_mask=True,
        ...     why={"causal": "each compressed key mixes all positions"},
        ... )
        >>> linformer.why_not(Request(is_causal=True))
        'no causal form: each compressed key mixes all positions'
        """
        found = self.missing(request)
        return found[1] if found else None

    def require(self, name: str, request: Request) -> None:
        """Raise `UnsupportedError` if `name`, a variant with these capabilities, cannot serve `request`."""
        found = self.missing(request)
        if found:
            raise UnsupportedError(found[0], f"{name}: {found[1]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes a cost formula may use.

    Args:
        batch_size: B.
        num_heads: H, query heads.
        num_kv_heads: G, key/value heads.
        query_len: L, tokens.
        key_len: S, tokens.
        head_dim: D.
        is_causal: whether the upper triangle is skipped.
        config: the variant's own options, an instance of its config class.
    """

    batch_size: int
    num_heads: int
    query_len: int
    key_len: int
    head_dim: int
    num_kv_heads: int
    is_causal: bool = False
    config: Any = None

    @property
    def seq_len(self) -> int:
        """Query length L in tokens."""
        return self.query_len

    def io_bytes(self, itemsize: int) -> int:
        """Return the bytes of queries, keys and values read once and the output written once: no mechanism needs less.

        >>> Shape(batch_size=1, num_heads=2, num_kv_heads=1, query_len=8, key_len=8, head_dim=4).io_bytes(4)
        768
        """
        heads = 2 * self.num_heads * self.query_len + 2 * self.num_kv_heads * self.key_len
        return self.batch_size * self.head_dim * itemsize * heads


CostFormula = Callable[[Shape], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Complexity:
    """What a variant claims to cost. Reports print the claim beside the fit.

    Args:
        time: display string in the symbols of the design, such as `"B H L S D"`.
        memory: likewise, beyond inputs and outputs.
        time_exponent: exponent of the sequence length that time grows with.
        memory_exponent: likewise for memory, inputs and outputs included.
        sequential_ops: operations that cannot be parallelised ("Attention Is All You Need", table 1).
        max_path: longest path a signal travels between two positions (same table).
        flops: forward floating-point operations (a multiply-add counts 2), or None where no formula is known.
        backward_ratio: floating-point operations of the backward over those of the forward. Each matrix product has two
            in the backward; a kernel that recomputes the scores instead of storing them has one more of those.
        bytes: forward bytes that must move for the given dtype size in bytes, at least, weights of the mechanism
            included; None stands for `Shape.io_bytes`. Padding masks and tables of a pattern are not counted.
        state_bytes: bytes of decode state after `key_len` tokens, for a dtype size in bytes.
    """

    time: str
    memory: str
    time_exponent: float
    memory_exponent: float
    sequential_ops: str
    max_path: str
    flops: CostFormula | None = None
    backward_ratio: float = 2.0
    bytes: Callable[[Shape, int], int] | None = None
    state_bytes: Callable[[Shape, int], int] | None = None

    def min_bytes(self, shape: Shape, itemsize: int) -> int:
        """Return the bytes that one forward must move at least, in a dtype of `itemsize` bytes."""
        return shape.io_bytes(itemsize) if self.bytes is None else self.bytes(shape, itemsize)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Where a mechanism comes from and how ours differs.

    Args:
        title: of the paper.
        authors: first author "et al.".
        year: of publication.
        url: of the paper.
        equation: number(s) in the paper.
        code: the authors' own implementation, if any.
        deviations: one sentence for each difference. Empty claims that there is none.
    """

    title: str
    authors: str
    year: int
    url: str
    equation: str = ""
    code: str = ""
    deviations: tuple[str, ...] = ()
