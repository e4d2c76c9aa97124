"""Deliberately broken variants, each named after what is wrong with it, and the check that must catch it.

All are softmax attention with one twist. They declare only what their twist needs, so that nothing else can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo import registry
from attn_zoo.attention import AbstractAttention, AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding, keep_mask, masked_softmax
from attn_zoo.attention.oracle import attention_weights, expand_kv_heads
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_attention, register_mixer

PLAIN = Capabilities(
    bidirectional=True,
    causal=False,
    cross_attention=False,
    key_padding_mask=False,
    attention_dropout=False,
    positions=("none", "rotary"),
    dtypes=("float64", "float32"),
)
COST = Complexity(
    time="B H L S D", memory="B H L S", time_exponent=2, memory_exponent=2, sequential_ops="1", max_path="1"
)
PAPER = Reference(title="None", authors="Nobody", year=2026, url="https://example.org")


class Softmax(AbstractAttention):
    """Plain softmax attention in three steps, each of which a broken variant may replace. Itself sound."""

    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        return keep_mask(
            query.shape[-2],
            key.shape[-2],
            is_causal=self.build.is_causal,
            key_padding_mask=mask,
            device=query.device,
        )

    def weights(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return masked_softmax(scores, keep)

    def hide(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return blank_padding(tokens, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        key, value = (expand_kv_heads(self.hide(x, mask), query.shape[1]) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return self.weights(scores, self.keep(query, key, mask)) @ value

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.attend(query, key, value, key_padding_mask)


class SoftmaxMixer(AbstractMixer):
    """Softmax over hidden states without projections. Itself sound."""

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        keys = hidden if context is None else context
        scores: Tensor = hidden @ keys.transpose(-1, -2) * hidden.shape[-1] ** -0.5
        return scores.softmax(-1) @ keys


@dataclass(frozen=True, kw_only=True)
class Broken:
    """One broken variant.

    Args:
        cls: the class; its name, in words, is the name under which it is registered.
        check: the check that must catch it.
        also: checks that cannot help failing with it.
        capabilities: changes to `PLAIN`.
        complexity: changes to `COST`.
        config: of its options.
    """

    cls: type[AbstractAttention | AbstractMixer]
    check: str
    also: frozenset[str] = frozenset()
    capabilities: dict[str, Any] = field(default_factory=dict)
    complexity: dict[str, Any] = field(default_factory=dict)
    config: type[VariantConfig] = VariantConfig

    @property
    def name(self) -> str:
        letters = ("_" + letter.lower() if letter.isupper() else letter for letter in self.cls.__name__)
        return "broken" + "".join(letters)


def written_out(
    self: AbstractAttention, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None
) -> Tensor:
    """Compute softmax attention in the dtype of the query: a reference that no twist reaches."""
    weights = attention_weights(query, key, is_causal=self.build.is_causal, key_padding_mask=key_padding_mask)
    return weights @ expand_kv_heads(blank_padding(value, key_padding_mask), query.shape[1])


def dressed(
    cls: type[AbstractAttention],
    check: str,
    *,
    exact: str = "",
    is_known_bare: bool = True,
    also: frozenset[str] = frozenset(),
    capabilities: dict[str, Any] | None = None,
    config: type[VariantConfig] = VariantConfig,
) -> tuple[Broken, ...]:
    """Return one fault in up to three dresses.

    Args:
        cls: has the fault and no reference of its own.
        check: the check that catches it as an approximation with a reference of its own.
        exact: the check that catches it where it claims to be exact; by default the same.
        is_known_bare: it is caught too where all that is known is itself.
        also: as in `Broken`, for the first dress.
        capabilities: as in `Broken`.
        config: as in `Broken`.
    """
    capabilities = capabilities or {}
    place = {"__module__": cls.__module__}
    with_reference = type(f"{cls.__name__}WithReference", (cls,), {"reference": written_out, **place})
    claiming = type(f"{cls.__name__}ClaimsExact", (cls,), place)
    exactly = {**capabilities, "is_exact": True}
    dresses = [
        Broken(cls=with_reference, check=check, also=also, capabilities=capabilities, config=config),
        Broken(cls=claiming, check=exact or check, capabilities=exactly, config=config),
    ]
    if is_known_bare:
        dresses.append(Broken(cls=cls, check=check, capabilities=capabilities, config=config))
    return tuple(dresses)


@contextmanager
def registered(broken: Broken) -> Iterator[str]:
    """Register a variant for the time of the block; give its name."""
    register = register_attention if issubclass(broken.cls, AbstractAttention) else register_mixer
    register(
        broken.name,
        config=broken.config,
        capabilities=replace(PLAIN, **broken.capabilities),
        complexity=replace(COST, **broken.complexity),
        reference=PAPER,
    )(broken.cls)
    try:
        yield broken.name
    finally:
        registry.variants.remove(broken.name)


def last_row_zeroed(output: Tensor) -> Tensor:
    """Return the output as a block loop leaves it that forgets the ragged end."""
    return torch.cat([output[..., :-1, :], torch.zeros_like(output[..., -1:, :])], dim=-2)


class Float32GivesFloat64(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(query, key, value).double()


class HeadsLast(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return super().forward(query, key, value).transpose(1, 2)


class ForgetsRaggedEnd(Softmax):
    reference = Softmax.forward

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value)
        return last_row_zeroed(output) if query.shape[-2] > 50 and query.shape[-2] % 2 else output


class SqueezesHeads(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value).squeeze(1)
        return output if output.dim() == 4 else output.unsqueeze(2)


class TruncatesContext(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[-2]
        return super().attend(query, key[:, :, :length], value[:, :, :length], mask)


class AlignsAtTheStart(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        if not self.build.is_causal:
            return None
        return query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()


class InterleavesGroups(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        repeats = (1, query.shape[1] // key.shape[1], 1, 1)
        return super().attend(query, key.repeat(repeats), value.repeat(repeats), mask)


class AlwaysTwoHeadsToAGroup(Softmax):
    reference = written_out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if query.shape[1] != key.shape[1]:
            group = (torch.arange(query.shape[1]) // 2).clamp(max=key.shape[1] - 1)
            key, value = key[:, group], value[:, group]
        return super().attend(query, key, value, mask)


class _Repeated(torch.autograd.Function):
    """Heads repeated for their group, whose gradients are averaged, not summed."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, num_heads: int) -> Tensor:
        ctx.num_groups = heads.shape[1]
        return expand_kv_heads(heads, num_heads).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.unflatten(1, (ctx.num_groups, -1)).mean(2), None


class AveragesGradientsOfAGroup(Softmax):
    reference = written_out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, _Repeated.apply(key, query.shape[1]), value, mask)


class ForgetsHeadsBeyondEight(Softmax):
    reference = written_out

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query, key, value)
        return torch.cat([output[:, :8], torch.zeros_like(output[:, 8:])], dim=1)


class DoublesASingleKey(Softmax):
    reference = written_out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(query, key, 2 * value if key.shape[-2] == 1 < query.shape[-2] else value, mask)


class ReadsStorage(SoftmaxMixer):
    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        _, length, width = hidden.shape
        return super().forward(hidden.as_strided(hidden.shape, (length * width, width, 1)))


class WritesSameValues(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query.clone(), key, value)
        query.detach().mul_(1.0)
        return output


class ScalesQueryInPlace(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = super().forward(query.clone(), key, value)
        query.detach().mul_(0.5)
        return output


class UpcastsUndeclared(Softmax):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        if query.dtype == torch.float16:
            return super().__call__(query.float(), key.float(), value.float()).half()
        return super().__call__(query, key, value, key_padding_mask=key_padding_mask)


class UnusedParameter(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.temperature = nn.Parameter(torch.ones(()))


class RaisesBackwards(Softmax):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        output = self.attend(query, key, value, key_padding_mask)
        if output.requires_grad:
            output.register_hook(self.refuse)
        return output

    def refuse(self, gradient: Tensor) -> Tensor:
        raise ValueError("not written yet")


def quadratic_flops(shape: Shape) -> int:
    return 4 * shape.batch_size * shape.num_heads * shape.head_dim * shape.query_len * shape.key_len


def constant_flops(shape: Shape) -> int:
    return 1000 * shape.batch_size


DTYPES = frozenset({"modes", "dtype_support", "finite_on_large_inputs"})
EVERYTHING = frozenset({"*"})  # the twist spoils whatever calls the variant twice

SHAPES = (
    Broken(cls=Float32GivesFloat64, check="shape_and_dtype", also=DTYPES | {"modes"}),
    Broken(cls=HeadsLast, check="shape_and_dtype", also=EVERYTHING),
    Broken(cls=ForgetsRaggedEnd, check="odd_lengths", also=frozenset({"matches_reference"})),
    Broken(cls=SqueezesHeads, check="batch_and_head_sizes"),
    Broken(cls=TruncatesContext, check="cross_attention", capabilities={"cross_attention": True, "is_exact": True}),
    Broken(cls=InterleavesGroups, check="grouped_query", capabilities={"grouped_query": True}),
    Broken(cls=AlwaysTwoHeadsToAGroup, check="grouped_query", capabilities={"grouped_query": True}),
    Broken(cls=AveragesGradientsOfAGroup, check="grouped_query", capabilities={"grouped_query": True}),
    Broken(cls=ForgetsHeadsBeyondEight, check="batch_and_head_sizes", also=frozenset({"grouped_query"})),
    Broken(cls=DoublesASingleKey, check="cross_attention", capabilities={"cross_attention": True}),
    Broken(cls=ReadsStorage, check="non_contiguous", capabilities={"positions": ("none",)}),
    # Writing to an expanded view raises.
    Broken(cls=WritesSameValues, check="inputs_unchanged", also=frozenset({"non_contiguous"})),
    Broken(cls=ScalesQueryInPlace, check="inputs_unchanged", also=EVERYTHING),
    Broken(cls=UpcastsUndeclared, check="dtype_support"),
    Broken(cls=UnusedParameter, check="gradients_reach_every_parameter"),
    Broken(cls=AlignsAtTheStart, check="cross_attention", capabilities={"causal": True, "cross_attention": True}),
)
