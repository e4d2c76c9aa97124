"""What a variant can do, what it claims to cost and where it comes from: frozen records, readable without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

from attn_zoo.errors import UnknownNameError, UnsupportedError

Form = Literal["attention", "mixer"]
"""How a variant is called: over projected heads, or over hidden states."""

Causality = bool | Literal["masked"]
"""Whether there is a causal form. `"masked"`: every query is masked, but which keys it may choose from is decided with
knowledge of the future (hash buckets, sorting, a top-k over the sequence): right for timing and for bidirectional
tasks, refused where a model must not see what it predicts."""

ROUTING_SEES_FUTURE = "masked, but its routing sees the future"
"""What is said of causality `"masked"`."""

DropoutUnit = Literal["weights", "summaries", "tokens", "outputs"]
"""What one draw of dropout decides on: a weight of a query and a key; one of a query and a summary of keys; a token for
all queries of a head; a number of the output. Of summaries made of summaries the draws may multiply."""

Decode = Literal["none", "kv_cache", "recurrent"]
Position = Literal["none", "rotary", "alibi"]

LINEAR_BACKWARD_RATIO = 2.0
"""FLOPs of the backward of a matrix product over those of its forward: one product for each of its two factors."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")

DEVICES = ("cpu", "cuda")
_PROMISES = (
    *("bidirectional", "cross_attention", "key_padding_mask", "variable_seq_len", "grouped_query", "attention_dropout"),
    *("is_exact", "is_permutation_invariant", "is_padding_invariant", "is_deterministic"),
)
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
        seq_len: length of the keys, in tokens.
        max_seq_len: length that the module is built for; asked only where `seq_len` is given too.
        is_autoregressive: nothing of the future may be seen in any way, as in language modelling.
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
    max_seq_len: int | None = None
    is_autoregressive: bool = False
    dtype: str | None = None
    device: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a variant can do. The first four have no default: whoever writes a variant must decide.

    Every yes is tested by behaviour and every no by refusal (`attn-zoo check`).

    Args:
        bidirectional: attends to past and future.
        causal: offers a form in which query i sees only keys j <= i + S - L; `"masked"`: it does, but its routing sees
            the future (see `Causality`).
        cross_attention: key length may differ from query length.
        key_padding_mask: honours a boolean mask of padded keys.
        decode: `"none"`, `"kv_cache"` (state grows) or `"recurrent"` (constant state).
        variable_seq_len: any length up to `max_seq_len` may be passed to one module; else only `max_seq_len` itself.
        seq_len_multiple: lengths must be a multiple of this; 1 means any.
        grouped_query: accepts fewer key/value heads than query heads.
        attention_dropout: honours `dropout_p`. Without dropout nothing is drawn in a call, in training neither.
        dropout_unit: what one draw of it decides on, independent of all others; see `DropoutUnit`.
        positions: schemes it admits inside the attention.
        is_exact: equals softmax attention up to rounding: compared with the oracle, and a baseline of speed-ups.
        is_permutation_invariant: without positions, the order of the keys does not matter.
        is_padding_invariant: appended padding does not matter, however long.
        has_carry: passes a value from layer to layer beside the hidden states (a mixer's `Mixed.carry`).
        is_deterministic: same input and seed, same output, bit for bit on one machine. False says that equal calls may
            differ in the last bits, as where sums run in another order each time; checks then allow for rounding. It is
            no licence to draw anew at each call: of what differs by more, nothing at a cell's own length is compared.
        is_simulated: computes dense scores and masks them, so its timings say nothing about the mechanism.
        is_control: shows what a model does without attention; no report names it as the one to choose.
        dtypes: floating-point types it runs in.
        devices: device types it runs on.
        requires: packages it needs beyond the core dependencies, as they are imported.
        why: for a field that says no, half a sentence that explains it ("each compressed key mixes all positions").
    """

    bidirectional: bool
    causal: Causality
    cross_attention: bool
    key_padding_mask: bool
    decode: Decode = "none"
    variable_seq_len: bool = True
    seq_len_multiple: int = 1
    grouped_query: bool = False
    attention_dropout: bool = True
    dropout_unit: DropoutUnit = "weights"
    positions: tuple[Position, ...] = ("none", "rotary")
    is_exact: bool = False
    is_permutation_invariant: bool = False
    is_padding_invariant: bool = False
    has_carry: bool = False
    is_deterministic: bool = True
    is_simulated: bool = False
    is_control: bool = False
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    devices: tuple[str, ...] = DEVICES
    requires: tuple[str, ...] = ()
    why: Mapping[str, str] = field(default_factory=lambda: _NO_REASONS)

    def __post_init__(self) -> None:
        for name in self.why:
            if name not in (known := list(self.__dataclass_fields__)):
                raise UnknownNameError("capability in why", name, known)
        for kind, all_names in (("dtype", FLOAT_DTYPES), ("device", DEVICES)):
            given = getattr(self, f"{kind}s")
            if not given:
                raise ValueError(f"{kind}s: expected at least one; got nothing")
            for name in given if isinstance(given, tuple) else ():
                if name not in all_names:
                    raise UnknownNameError(kind, str(name), all_names, f"{kind}s are {', '.join(all_names)}")
        if type(self.seq_len_multiple) is int and self.seq_len_multiple < 1:
            raise ValueError(f"seq_len_multiple: expected at least 1; got {self.seq_len_multiple}")
        if "none" not in self.positions:
            got = ", ".join(self.positions) or "nothing"
            raise ValueError(f"positions: expected 'none', which cells and checks ask for, among them; got {got}")
        if self.decode != "none" and (self.causal == "masked" or self.has_carry):
            what = "routing that sees the future" if self.causal == "masked" else "a carry between layers"
            raise ValueError(f"decode: {what} cannot be decoded step by step; expected 'none', got {self.decode!r}")

    def missing(self, request: Request) -> tuple[str, str] | None:
        """Return (capability, sentence) for the first thing in `request` that is not offered, or None."""
        if (lack := self._lack(request)) is None:
            return None
        capability, sentence = lack
        explanation = self.why.get(capability)
        return capability, f"{sentence}: {explanation}" if explanation else sentence

    def _lack(self, request: Request) -> tuple[str, str] | None:
        if request.is_causal and not self.causal:
            return "causal", "no causal form"
        if request.is_causal and request.is_autoregressive and self.causal == "masked":
            return "causal", ROUTING_SEES_FUTURE
        if not request.is_causal and not self.bidirectional:
            return "bidirectional", "no bidirectional form"
        if request.is_cross and not self.cross_attention:
            return "cross_attention", "no cross-attention"
        if request.has_key_padding_mask and not self.key_padding_mask:
            return "key_padding_mask", "no key_padding_mask"
        if request.needs_decode and self.decode == "none":
            return "decode", "no step-by-step decoding"
        if request.is_grouped_query and not self.grouped_query:
            return "grouped_query", "num_kv_heads must equal num_heads"
        if request.dropout_p > 0 and not self.attention_dropout:
            return "attention_dropout", "no attention dropout"
        if request.position not in self.positions:
            return "positions", f"position {request.position!r} is not one of {', '.join(self.positions)}"
        if request.dtype is not None and request.dtype not in self.dtypes:
            return "dtypes", f"dtype {request.dtype} is not one of {', '.join(self.dtypes)}"
        if request.device is not None and request.device not in self.devices:
            return "devices", f"device {request.device} is not one of {', '.join(self.devices)}"
        for package in self.requires:
            if not _is_installed(package):
                return "requires", f"the package {package} is not installed, or cannot be imported"
        if request.seq_len is None:
            return None
        if request.seq_len % self.seq_len_multiple != 0:
            return "seq_len_multiple", f"length {request.seq_len} is not a multiple of {self.seq_len_multiple}"
        if not self.variable_seq_len and request.max_seq_len not in (None, request.seq_len):
            built = f"max_seq_len = {request.max_seq_len} that it is built for"
            return "variable_seq_len", f"length {request.seq_len} is not the {built}"
        return None

    def without(self, **reasons: str) -> Capabilities:
        """Return less: each named capability becomes a no, for the reason given (half a sentence).

        >>> linear = Capabilities(bidirectional=True, causal=True, cross_attention=True, key_padding_mask=True)
        >>> linear.without(causal="this kernel has no mask").why_not(Request(is_causal=True))
        'no causal form: this kernel has no mask'

        Raises:
            UnknownNameError: no capability of this name can be taken away.
        """
        for name in reasons:
            if name not in (known := (*_PROMISES, "causal", "decode")):
                raise UnknownNameError("capability", name, known)
        nos: dict[str, Any] = dict.fromkeys(reasons, False)
        if "decode" in nos:
            nos["decode"] = "none"
        return replace(self, **nos, why=MappingProxyType({**self.why, **reasons}))

    def widened(self, before: Capabilities) -> list[str]:
        """Return the capabilities that are offered here and not in `before`: narrowing must leave this empty."""
        order = {False: 0, "masked": 1, True: 2}
        wider = [name for name in _PROMISES if getattr(self, name) and not getattr(before, name)]
        wider += ["causal"] * (order[self.causal] > order[before.causal])
        wider += ["decode"] * (self.decode not in ("none", before.decode))
        wider += ["seq_len_multiple"] * bool(self.seq_len_multiple % before.seq_len_multiple)
        wider += ["has_carry"] * (self.has_carry != before.has_carry)
        wider += ["is_simulated"] * (before.is_simulated and not self.is_simulated)
        wider += [
            name for name in ("positions", "dtypes", "devices") if set(getattr(self, name)) - set(getattr(before, name))
        ]
        return wider + ["requires"] * bool(set(before.requires) - set(self.requires))

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
        embed_dim: E, width of the hidden states. Default: H D.
        is_causal: whether the upper triangle is skipped.
        is_cross: keys and values come from another sequence.
        position: scheme inside the attention.
        form: how the variant is called.
        layer_index: 0-based depth, for mechanisms that differ by layer.
        config: the variant's own options, an instance of its config class.
        max_seq_len: N, tokens that the module is built for; at least, and by default, S.
    """

    batch_size: int
    num_heads: int
    query_len: int
    key_len: int
    head_dim: int
    num_kv_heads: int
    embed_dim: int = 0
    is_causal: bool = False
    is_cross: bool = False
    position: Position = "none"
    form: Form = "attention"
    layer_index: int = 0
    config: Any = None
    max_seq_len: int = 0

    def __post_init__(self) -> None:
        if self.max_seq_len < self.key_len:
            object.__setattr__(self, "max_seq_len", self.key_len)
        if not self.embed_dim:
            object.__setattr__(self, "embed_dim", self.num_heads * self.head_dim)

    @property
    def seq_len(self) -> int:
        """Query length L in tokens."""
        return self.query_len

    def io_bytes(self, itemsize: int) -> int:
        """Return the bytes of the inputs read once and the output written once: no mechanism needs less.

        Inputs are queries, keys and values in the form `"attention"`, hidden states and the context in `"mixer"`.

        >>> shape = Shape(batch_size=1, num_heads=2, num_kv_heads=1, query_len=8, key_len=8, head_dim=4, embed_dim=16)
        >>> shape.io_bytes(4), replace(shape, form="mixer").io_bytes(4)
        (768, 1024)
        """
        if self.form == "attention":
            rows = 2 * self.num_heads * self.query_len + 2 * self.num_kv_heads * self.key_len
            return self.batch_size * self.head_dim * itemsize * rows
        num_tokens = 2 * self.query_len + (self.key_len if self.is_cross else 0)
        return self.batch_size * self.embed_dim * itemsize * num_tokens

    @property
    def multi_head_params(self) -> tuple[int, int]:
        """Weights and biases of the four projections of multi-head attention, E to H D, twice E to G D, H D to E."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 2 * self.embed_dim * (width + kv_width), width + 2 * kv_width + self.embed_dim

    @property
    def multi_head_flops(self) -> int:
        """Floating-point operations of those projections, a multiply-add being two."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 4 * self.batch_size * self.embed_dim * (self.query_len * width + self.key_len * kv_width)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except Exception:  # the package of a part is imported, and one that is broken raises anything
        return False


CostFormula = Callable[[Shape], int]

DEPENDS_ON_DATA = "depends on the data"
"""Claim of a mechanism whose path length is no function of the sequence length, as it chooses what it sees."""


NEVER = "never"
"""Claim of a maximum path length where some tokens do not see each other through any number of layers (dilation)."""


def big_o(claim: str) -> str:
    """Return a display string of `Complexity` as it is printed.

    >>> big_o("L / W"), big_o(DEPENDS_ON_DATA)
    ('O(L / W)', 'depends on the data')
    """
    return claim if claim in {DEPENDS_ON_DATA, NEVER} else f"O({claim})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Complexity:
    """What a variant claims to cost. Reports print the claim beside the fit.

    Args:
        time: display string in the symbols of the design, such as `"B H L S D"`.
        memory: likewise, beyond inputs and outputs.
        time_exponent: exponent of the sequence length that time grows with.
        memory_exponent: likewise for memory, inputs and outputs included.
        sequential_ops: operations that cannot be parallelised ("Attention Is All You Need", table 1): a sum of products
            such as `"L / W"`, `"1 (causal: log L)"`, or `DEPENDS_ON_DATA`. `attn-zoo check` compares its growth with
            what it measures (`attn_zoo.conformance.checks.complexity`).
        max_path: longest path a signal travels between two positions (same table), likewise; or `NEVER`.
        flops: forward floating-point operations of the mechanism (a multiply-add counts 2), the linear maps between
            hidden states and what it acts on left out; None where no formula is known. Counted are matrix products,
            convolutions and Fourier transforms (5 N log2 N for N complex points, half for real ones); where a mechanism
            has none of these, the additions of its sums over tokens.
        projection_flops: likewise of the linear maps between hidden states and what the mechanism acts on, where the
            variant brings a mixer of its own. None: a mixer has none, an attention those of the shared mixer.
        backward_ratio: floating-point operations of the mechanism's backward over those of its forward, or a formula.
            Each matrix product has two in the backward; a kernel that recomputes the scores has one more of those.
        bytes: forward bytes that must move at least for a dtype size in bytes, in the form the variant is written in:
            input, output, and the weights of the mechanism. None: input and output alone (`Shape.io_bytes`), for a
            mixer with `projection_bytes`. Padding masks and tables of a pattern are not counted.
        projection_bytes: bytes of the weights of those projections, for a dtype size in bytes; None as above.
        state_bytes: bytes of decode state after `key_len` tokens, for a dtype size in bytes.
        step_bytes: those of them that the next token must read. None: all.
    """

    time: str
    memory: str
    time_exponent: float
    memory_exponent: float
    sequential_ops: str
    max_path: str
    flops: CostFormula | None = None
    projection_flops: CostFormula | None = None
    backward_ratio: float | Callable[[Shape], float] = LINEAR_BACKWARD_RATIO
    bytes: Callable[[Shape, int], int] | None = None
    projection_bytes: Callable[[Shape, int], int] | None = None
    state_bytes: Callable[[Shape, int], int] | None = None
    step_bytes: Callable[[Shape, int], int] | None = None

    def ratio(self, shape: Shape) -> float:
        """Return `backward_ratio` for one call."""
        return self.backward_ratio(shape) if callable(self.backward_ratio) else self.backward_ratio


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
