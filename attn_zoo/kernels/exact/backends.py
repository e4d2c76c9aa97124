"""Which kernels of exact attention exist, what each refuses, and which one is preferred where. Nothing is computed."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attn_zoo.kernels.exact import flex_attention, varlen, xformers

Backend = Literal["auto", "math", "flash", "efficient", "cudnn", "unmasked", "varlen", "flex", "xformers"]

DENSE_DROPOUT = "dropout"
"""What `select` calls dropout computed densely, a chunk of rows at a time, where no fused kernel has it."""

PACKED_SCORES = 1 << 26
"""Of an eager call: with fewer, packing keys without their padding takes the host longer than it saves the GPU.

It costs the host 0.10 ms more than a mask, forward and backward; so many are 60 GFLOP at D = 64, by estimate 0.4 ms
under a mask.
"""

UNMASKED_SCORES = 1 << 24
"""Of an eager call under a mask: with fewer, to make its padding countable takes the host longer than it saves the GPU.

So many are 1024 tokens of 16 heads, where cuDNN with a mask takes 0.15 ms less than the efficient kernel (see below).
"""

PLANNED_SCORES = 1 << 28
"""Of an eager call under a mask: with fewer, cuDNN takes longer to plan for a new shape than it soon saves.

On an H100 a plan for forward and backward takes 0.15 s (torch 2.11, 16 heads of 64, bfloat16). A call saves 0.15 ms of
what the efficient kernel takes at 1024 tokens, 1.8 ms at 4096, so a plan is repaid by 900 calls or by 80.
"""

CUDNN_RATES = tuple(number / 16 for number in range(16))
"""Dropout rates that cuDNN has: some of its kernels round others, and newer torch refuses it at those.

github.com/pytorch/pytorch/pull/174245; torch 2.11 takes it at any rate. They are listed because the remainder of a
rate that the compiler lets vary is always 0 to it.
"""

EAGER_ONLY = frozenset({"unmasked"})
"""Backends whose launches torch's compiler cannot trace."""

_HAS_TRITON = find_spec("triton") is not None

PINS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class ScoreBias(Protocol):
    """Makes what is added to the scaled scores of some rows; `attention.masks.score_bias` has the details."""

    def __call__(
        self,
        rows: range,
        query_len: int,
        key_len: int,
        *,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        slopes: Tensor | None,
        num_keys: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return `[B or 1, H or 1, len(rows) or 1, num_keys]`, minus infinity where a key is hidden."""


class ExactCall(NamedTuple):
    """One call of exact attention; a tuple, because one is made for every call.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, D]`.
        is_causal: hide keys j > i + S - L; needs L <= S.
        key_padding_mask: bool `[B, S]`, True = padding.
        slopes: `[H]` of ALiBi, or None.
        dropout_p: probability of dropping a weight; 0 outside training.
        score_bias: makes all of the above that hides or biases an additive bias, for a few rows at a time.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    key_padding_mask: Tensor | None
    slopes: Tensor | None
    dropout_p: float
    score_bias: ScoreBias

    @property
    def is_grouped(self) -> bool:
        """Whether several query heads share a key/value head."""
        return self.key.shape[1] != self.query.shape[1]

    @property
    def has_alibi_or_offset(self) -> bool:
        """Whether ALiBi or a causal mask with L != S is wanted: kernels' own causal flag is aligned top left."""
        return self.slopes is not None or (self.is_causal and self.query.shape[2] != self.key.shape[2])

    @property
    def has_bias(self) -> bool:
        """Whether anything beyond a kernel's causal flag is added to the scores."""
        return self.has_alibi_or_offset or self.key_padding_mask is not None

    @property
    def has_row_bias(self) -> bool:
        """Whether that bias differs between query rows, so that it cannot be broadcast over them."""
        return self.has_bias and (self.is_causal or self.slopes is not None)

    @property
    def needs_grad(self) -> bool:
        """Whether backward can follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))

    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value with as many key/value heads as query heads, for kernels that cannot group."""
        repeats = self.query.shape[1] // self.key.shape[1]
        if repeats == 1:
            return self.query, self.key, self.value
        return self.query, self.key.repeat_interleave(repeats, dim=1), self.value.repeat_interleave(repeats, dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """One row of the table that `auto` follows: the first row that matches, its first backend that can serve.

    Args:
        device: `"cpu"` or `"cuda"`.
        capability: CUDA major version, or None for any.
        has_bias: for calls with padding, ALiBi or a causal mask with L != S; None for both.
        has_row_bias: for calls whose bias differs between queries, which get it a few at a time; None for both.
        is_step: for calls of one query, as decoding makes them; None for both.
        order: backends, best first.
        source: where the order comes from.
    """

    device: str
    capability: int | None = None
    has_bias: bool | None = None
    has_row_bias: bool | None = None
    is_step: bool | None = None
    order: tuple[Backend, ...]
    source: str


PREFERENCES: tuple[Preference, ...] = (
    Preference(
        device="cpu",
        order=("flash", "math"),
        source="torch 2.13 on CPU: flash serves four dtypes, bool and float masks, forward and backward, in linear "
        "memory. Measured on one core, lengths 32 to 2048: forward level with math to 6 times faster, forward and "
        "backward 1.1 to 4 times faster; only the bfloat16 backward is slower below length 512",
    ),
    Preference(
        device="cuda",
        capability=9,
        has_bias=True,
        has_row_bias=False,  # cuDNN would make a plan for each stretch of queries
        order=("unmasked", "varlen", "cudnn", "efficient", "math"),
        source="H200, torch 2.11, bfloat16, forward and backward, 16 heads of 64: with a mask of 16 384 keys torch's "
        "choice takes 1.5 times what cuDNN takes without, and the efficient kernel at 4096 keys without one 4.4 times; "
        "packed keys are level with it where an eighth is padding. To make padding countable takes seven readings or "
        "writings of a tensor and one without a mask, by arithmetic 1.04 times as long at 4096 keys "
        "(benchmarks/NOTES.md), not measured yet. Packing pays where two fifths of 16 384 keys are padding, which "
        "the host cannot know",
    ),
    Preference(
        device="cuda",
        has_bias=True,
        order=("varlen", "efficient", "math"),
        source="flash takes no mask, but keys packed without their padding, which are fewer: the other kernels compute "
        "what a mask hides, and it makes cuDNN 2 to 9 times slower (github.com/unslothai/unsloth/pull/11102)",
    ),
    Preference(
        device="cuda",
        capability=9,
        is_step=True,
        order=("flash", "efficient", "cudnn", "math"),
        source="cuDNN makes a plan for every number of keys, and each token has one more: some 30 ms for a token on an "
        "H100, torch 2.11 (benchmarks/NOTES.md)",
    ),
    Preference(
        device="cuda",
        capability=9,
        order=("cudnn", "flash", "efficient", "math"),
        source="H100, H200: cuDNN 1.7 to 2.3 times faster than flash (github.com/huggingface/transformers/pull/48163)",
    ),
    Preference(
        device="cuda",
        order=("flash", "efficient", "cudnn", "math"),
        source="A100: cuDNN at 0.82 of flash (same); newer than Hopper: wrong results for few key/value heads "
        "(github.com/pytorch/pytorch/issues/193893)",
    ),
)


def _outside_cuda(call: ExactCall) -> str | None:
    device = call.query.device.type
    return None if device == "cuda" else f"it runs on CUDA devices only, and these tensors are on {device}"


def sdpa_arguments(call: ExactCall, *, is_grouped: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:
    """Return query, key, value, mask, dropout and causal flag as torch's own checks look at them.

    One row of the mask stands for all: they look at its type, its last dimension and what is broadcast.
    """
    query, key, value = call.query, call.key, call.value
    mask = None
    if call.has_bias:
        batch_size = 1 if call.key_padding_mask is None else query.shape[0]
        num_heads = 1 if call.slopes is None else query.shape[1]
        mask = query.new_zeros(batch_size, num_heads, 1, key.shape[2])
        if call.has_row_bias:
            mask = mask.expand(-1, -1, query.shape[2], -1)
    if not is_grouped and call.is_grouped:
        key, value = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return query, key, value, mask, call.dropout_p, call.is_causal and not call.has_bias


def _gate(call: ExactCall, name: str, can_use: Callable[[cuda.SDPAParams, bool], bool]) -> str | None:
    """Ask torch's own check, silently, so that our rule cannot drift from it."""
    is_grouped = call.is_grouped and name != "efficient"
    arguments = sdpa_arguments(call, is_grouped=is_grouped)
    if can_use(cuda.SDPAParams(*arguments, is_grouped), False):
        return None
    return f"torch's own check refuses this call for {name}"


def torch_reason(call: ExactCall, name: str) -> str | None:
    """Return why torch refuses to run `name`: the warnings of a call that is allowed no other kernel, or None.

    The checks themselves would print them on standard error.
    """
    is_grouped = call.is_grouped and name != "efficient"
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(PINS[name]):
        warnings.simplefilter("always")
        try:
            scaled_dot_product_attention(*sdpa_arguments(call, is_grouped=is_grouped), enable_gqa=is_grouped)
        except RuntimeError:
            return "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in caught) or None
    return None


def _why_not_flash(call: ExactCall) -> str | None:
    if call.query.device.type == "cpu":
        return "the CPU kernel has no dropout" if call.dropout_p > 0 else None
    if reason := _outside_cuda(call):
        return reason
    if call.has_bias:
        return "the CUDA kernel takes no mask, and padding, ALiBi and a causal mask with L != S need one"
    return _gate(call, "flash", cuda.can_use_flash_attention)


def _why_not_cudnn(call: ExactCall) -> str | None:
    if reason := _outside_cuda(call):
        return reason
    if call.dropout_p not in CUDNN_RATES:
        return f"its dropout rates are multiples of 1/16, and this one is {call.dropout_p:g}"
    return _gate(call, "cudnn", cuda.can_use_cudnn_attention)


def _why_not_unmasked(call: ExactCall) -> str | None:
    if call.is_causal or call.slopes is not None or call.is_grouped:
        return "it is offered for calls without a causal mask and ALiBi, with as many heads of keys as of queries"
    # The kernel writes the output divided by Z', padding included: where few of many keys are there, that is below the
    # smallest normal float16, and digits are lost. bfloat16 has the exponents of float32.
    if call.query.dtype != torch.bfloat16:
        return f"it is for bfloat16, where a mask takes a slower kernel, not for {call.query.dtype}"
    if reason := _outside_cuda(call):
        return reason
    if not _HAS_TRITON:
        return "the package triton is not installed"
    name = choose_without_mask(call)
    if name not in ("cudnn", "flash") or call.query.shape[-1] % 8 or call.key.numel() == 0:
        return f"it needs cuDNN's or the flash kernel and heads of a multiple of 8; without a mask it would be {name!r}"
    return None


def _why_not_varlen(call: ExactCall) -> str | None:
    if call.query.is_cuda and not cuda.flash_sdp_enabled():
        return "flash attention is switched off (torch.backends.cuda.enable_flash_sdp)"
    if call.slopes is not None or (call.is_causal and call.key_padding_mask is not None):
        return "it is offered for calls without ALiBi, and without a causal mask beside padding"
    return varlen.why_not(call.query, needs_grad=call.needs_grad)


def _why_not_xformers(call: ExactCall) -> str | None:
    if call.key_padding_mask is not None or call.slopes is not None:
        return "it is offered for calls without key_padding_mask and ALiBi only"
    return xformers.why_not(call.query, needs_grad=call.needs_grad)


_WHY_NOT: dict[str, Callable[[ExactCall], str | None]] = {
    "math": lambda call: None,  # noqa: ARG005 - dense torch operations run everywhere
    "flash": _why_not_flash,
    "efficient": lambda call: _outside_cuda(call) or _gate(call, "efficient", cuda.can_use_efficient_attention),
    "cudnn": _why_not_cudnn,
    "unmasked": _why_not_unmasked,
    "varlen": _why_not_varlen,
    "flex": lambda call: flex_attention.why_not(call.query, needs_grad=call.needs_grad, dropout_p=call.dropout_p),
    "xformers": _why_not_xformers,
}


def why_not(backend: str, call: ExactCall) -> str | None:
    """Return the reason why `backend` cannot serve `call`, or None when it can."""
    return _WHY_NOT[backend](call)


def choose(call: ExactCall, *, is_compiled: bool = False) -> str:
    """Return the backend that `PREFERENCES` names for `call`; `"math"` on devices without a row."""
    query_len, key_len = call.query.shape[2], call.key.shape[2]
    num_scores = call.query.shape[0] * call.query.shape[1] * query_len * key_len
    least = {"unmasked": UNMASKED_SCORES, "varlen": PACKED_SCORES, "cudnn": PLANNED_SCORES if call.has_bias else 0}
    device = call.query.device
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None
    for row in PREFERENCES:
        is_alike = row.has_bias in (None, call.has_bias) and row.has_row_bias in (None, call.has_row_bias)
        fits = row.capability in (None, capability) and is_alike and row.is_step in (None, query_len == 1)
        if row.device == device.type and fits:
            if is_compiled:  # packing costs few launches, and a shape comes again
                order = [backend for backend in row.order if backend not in EAGER_ONLY]
            else:
                order = [backend for backend in row.order if num_scores >= least.get(backend, 0)]
            return next(backend for backend in order if why_not(backend, call) is None)
    return "math"


def choose_without_mask(call: ExactCall) -> str:
    """Return the kernel that `"unmasked"` runs."""
    return choose(call._replace(key_padding_mask=None))


def select(backend: str, call: ExactCall, *, is_compiled: bool = False) -> tuple[str, str | None]:
    """Return the kernel that must run for `call`, and why it cannot, or None.

    It depends on nothing but sizes, strides, types, device and switches: the answer may be remembered.

    Args:
        backend: `"auto"`, or the kernel that must run.
        call: to be served.
        is_compiled: by torch's compiler, for which `call` is a small one of the same kind.
    """
    if is_compiled and backend in EAGER_ONLY:
        return backend, "torch's compiler cannot trace its launches"
    if backend != "auto":
        reason = why_not(backend, call)
        if reason and backend in PINS and call.query.is_cuda and not torch.compiler.is_compiling():
            reason = torch_reason(call, backend) or reason
        return backend, reason
    if call.dropout_p > 0 and (call.query.device.type == "cpu" or call.has_row_bias):
        return DENSE_DROPOUT, None
    return choose(call, is_compiled=is_compiled), None


def select_while_compiling(backend: str, call: ExactCall) -> tuple[str, str | None]:
    """Return what `select` does, as a constant of the graph: the compiler cannot trace torch's checks.

    They are asked about small tensors of the same kind, so that sizes which do not matter stay free, and about one of
    two dropout rates, which stand for all.
    """
    rate = 0.5 if call.dropout_p in CUDNN_RATES else 0.1
    head_dim = operator.index(call.query.shape[-1])
    query_len = 128 if call.query.shape[2] > 1 else 1
    key_len = query_len if call.query.shape[2] == call.key.shape[2] else query_len + 128
    return _select_for_probe(
        backend,
        query_shape=(1, 2, query_len, head_dim),
        key_shape=(1, 1 if call.is_grouped else 2, key_len, head_dim),
        device=call.query.device,
        dtype=call.query.dtype,
        is_causal=call.is_causal,
        has_padding=call.key_padding_mask is not None,
        has_slopes=call.slopes is not None,
        dropout_p=rate if call.dropout_p > 0 else 0.0,
        needs_grad=call.needs_grad,
    )


def _select_for_probe(
    backend: str,
    *,
    query_shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    is_causal: bool,
    has_padding: bool,
    has_slopes: bool,
    dropout_p: float,
    needs_grad: bool,
) -> tuple[str, str | None]:
    def probe(shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, device=device, dtype=dtype, requires_grad=needs_grad)

    def no_bias(*_: object, **__: object) -> Tensor:
        raise AssertionError("a probe is never computed")

    call = ExactCall(
        query=probe(query_shape),
        key=probe(key_shape),
        value=probe(key_shape),
        is_causal=is_causal,
        key_padding_mask=torch.zeros(1, key_shape[2], device=device, dtype=torch.bool) if has_padding else None,
        slopes=torch.zeros(query_shape[1], device=device) if has_slopes else None,
        dropout_p=dropout_p,
        score_bias=no_bias,
    )
    with torch.set_grad_enabled(needs_grad):
        return select(backend, call, is_compiled=True)


# The compiler calls it while it traces, and takes its answer for a constant.
_select_for_probe._dynamo_marked_constant = True  # type: ignore[attr-defined]
