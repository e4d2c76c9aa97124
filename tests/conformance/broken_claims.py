"""Broken variants that say something about themselves which is not so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attn_zoo.attention import BuildContext
from attn_zoo.attention.decode import KVCache
from attn_zoo.attention.masks import alibi_bias
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Shape
from attn_zoo.registry import VariantConfig
from tests.conformance.broken import Broken, Softmax, SoftmaxMixer, constant_flops, quadratic_flops


class WrongScaleInFloat32(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(1.001 * query if query.dtype == torch.float32 else query, key, value, mask)

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return Softmax.attend(self, query, key, value, key_padding_mask)


class WrongScale(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return super().attend(1.001 * query, key, value, mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowConfig(VariantConfig):
    window_size: int = 4

    @classmethod
    def budgets(cls, seq_len: int) -> tuple[dict[str, Any], ...]:
        return ({"window_size": seq_len // 2}, {"window_size": seq_len})


class MissesOneKeyForEver(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        queries, keys = (torch.arange(x.shape[-2], device=x.device) for x in (query, key))
        distance = queries[:, None] - keys
        window_size: int = min(self.config.window_size, max(key.shape[-2] - 1, 1))
        return distance.abs() < window_size


class ForgetsOldTokens(Softmax):
    window_size = 4

    def init_state(
        self, batch_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> KVCache:
        return KVCache.empty(batch_size, self.build.num_kv_heads, self.build.head_dim, device=device, dtype=dtype)

    def step(self, query: Tensor, key: Tensor, value: Tensor, state: Any) -> tuple[Tensor, KVCache]:
        state = state.append(key, value)
        keys, values = state.keys[:, :, -self.window_size :], state.values[:, :, -self.window_size :]
        return (query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ values, state


class SoundDecode(ForgetsOldTokens):
    window_size = 10**6


class DecodesUndeclared(SoundDecode):
    pass


class ClaimsHalfTheState(SoundDecode):
    pass


class RecurrentStateGrows(SoundDecode):
    pass


class DeclaresDecodeOnly(Softmax):
    pass


def half_state_bytes(shape: Shape, itemsize: int) -> int:
    return shape.batch_size * shape.num_kv_heads * shape.key_len * shape.head_dim * itemsize


class IgnoresAlibi(Softmax):
    pass


class ReversesAlibi(Softmax):
    """Gives the slope of each head to the one at the other end."""

    def biased(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores + bias if self.build.position == "alibi" else scores
        output: Tensor = scores.softmax(-1) @ value
        return output

    def bias(self, query: Tensor) -> Tensor:
        return alibi_bias(self.build.num_heads, query.shape[-2], query.shape[-2], dtype=query.dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.biased(query, key, value, self.bias(query).flip(1))

    def reference(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.biased(query, key, value, self.bias(query))


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig(VariantConfig):
    backend: Literal["auto", "math", "flash"] = "auto"


class RunsAnotherBackend(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        note_path("sdpa.math")
        return super().attend(query, key, value, mask)


class HidesItsBackend(Softmax):
    pass


class AlternatesPaths(Softmax):
    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.num_calls = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        self.num_calls += 1
        note_path(f"path_{self.num_calls % 2}")
        return super().attend(query, key, value, mask)


class ConstantFlops(Softmax):
    pass


class QuadraticButClaimsLinear(Softmax):
    pass


class TwoPercentTooMany(Softmax):
    pass


class CountsHiddenPairsHalf(Softmax):
    pass


class BackwardCostsSeven(Softmax):
    pass


class CountsLessBeyond400(Softmax):
    pass


class ClaimsLessThanItsInputs(Softmax):
    pass


class PrefillForgetsTheState(SoundDecode):
    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
        output = self.forward(query, key, value)
        return output, (state or self.init_state(query.shape[0], dtype=query.dtype)).append(key, value)


class PrefillOnlyFromTheStart(SoundDecode):
    def prefill(self, query: Tensor, key: Tensor, value: Tensor, state: Any = None) -> tuple[Tensor, KVCache]:
        if state is not None and state.length % 2:  # as a kernel that aligns blocks at the start
            key = key.flip(2)
        return super().prefill(query, key, value, state)


class ProjectedSoftmax(SoftmaxMixer):
    """A mixer with a state, a projection and a formula for each. Itself sound."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.proj = nn.Linear(build.embed_dim, build.embed_dim, bias=False)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        keys = self.proj(hidden)
        scores = hidden @ keys.transpose(-1, -2) * hidden.shape[-1] ** -0.5
        if self.build.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        output: Tensor = scores.softmax(-1) @ keys
        return output

    def init_state(self, batch_size: int, **keywords: Any) -> Tensor:
        return torch.zeros(batch_size, 0, self.build.embed_dim, **keywords)

    def step(self, hidden: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        state = torch.cat([state, self.proj(hidden)], dim=1)
        weights = (hidden @ state.transpose(-1, -2) * hidden.shape[-1] ** -0.5).softmax(-1)
        return weights @ state, state


class SevenBytesOfState(ProjectedSoftmax):
    pass


class MixerClaimsLessThanItsInputs(ProjectedSoftmax):
    pass


class CountsNoProjections(ProjectedSoftmax):
    pass


class CountsHalfOfWhatIsSeen(ProjectedSoftmax):
    pass


class MixerStateGrows(ProjectedSoftmax):
    pass


def softmax_flops(shape: Shape) -> int:
    return 4 * shape.batch_size * shape.num_heads * shape.query_len * shape.key_len * shape.head_dim


def fewer_flops_beyond_400(shape: Shape) -> int:
    return softmax_flops(shape) * (10 if shape.query_len <= 400 else 9) // 10


def mixer_softmax_flops(shape: Shape) -> int:
    return 4 * shape.batch_size * shape.query_len**2 * shape.embed_dim


def projection_flops(shape: Shape) -> int:
    return 2 * shape.batch_size * shape.query_len * shape.embed_dim**2


def projection_bytes(shape: Shape, itemsize: int) -> int:
    return shape.embed_dim**2 * itemsize


def mixer_state_bytes(shape: Shape, itemsize: int) -> int:
    return shape.batch_size * shape.key_len * shape.embed_dim * itemsize


class SumsKeysInTurn(Softmax):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        weights = self.weights(scores, self.keep(query, key, mask))
        output = torch.zeros_like(query)
        for position in range(key.shape[-2]):  # each sum waits for the one before
            one = slice(position, position + 1)
            output = output + weights[..., one] * value[..., one, :]
        return output


class SeesNeighboursOnly(Softmax):
    def keep(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        queries, keys = (torch.arange(x.shape[-2], device=x.device) for x in (query, key))
        return (queries[:, None] - keys).abs() <= 2


class ClaimsLinearWithoutAFormula(Softmax):
    pass


class ClaimsLinearByAFormulaThatEnds(Softmax):
    pass


class ClaimsLinearMemory(Softmax):
    pass


class MixerClaimsLinear(ProjectedSoftmax):
    pass


class ClaimsInWords(Softmax):
    pass


class HidesBehindProjections(SoftmaxMixer):
    """Counts 3 % too few of a mechanism that costs less than its projections."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.wide_proj = nn.Linear(build.embed_dim, 64 * build.embed_dim, bias=False)
        self.out_proj = nn.Linear(64 * build.embed_dim, build.embed_dim, bias=False)

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        return super().forward(self.out_proj(self.wide_proj(hidden)))


DECODE = {"causal": True, "decode": "kv_cache"}
MIXER = {**DECODE, "positions": ("none",)}
MIXER_COST = {
    "flops": mixer_softmax_flops,
    "projection_flops": projection_flops,
    "projection_bytes": projection_bytes,
    "state_bytes": mixer_state_bytes,
}

CLAIMS = (
    Broken(cls=WrongScaleInFloat32, check="matches_reference", also=frozenset({"modes"})),
    Broken(cls=WrongScale, check="matches_oracle", capabilities={"is_exact": True}),
    Broken(cls=MissesOneKeyForEver, check="converges", config=WindowConfig, complexity={"max_path": "L / W"}),
    Broken(cls=ForgetsOldTokens, check="decode", capabilities=DECODE),
    Broken(
        cls=DeclaresDecodeOnly, check="decode", also=frozenset({"decode_state_bytes", "device"}), capabilities=DECODE
    ),
    Broken(
        cls=ClaimsHalfTheState,
        check="decode_state_bytes",
        capabilities=DECODE,
        complexity={"state_bytes": half_state_bytes},
    ),
    Broken(cls=RecurrentStateGrows, check="decode_state_bytes", capabilities={**DECODE, "decode": "recurrent"}),
    Broken(cls=DecodesUndeclared, check="refusals", also=frozenset({"decode"})),
    Broken(cls=IgnoresAlibi, check="positions", capabilities={"positions": ("none", "alibi")}),
    Broken(cls=ReversesAlibi, check="matches_reference", capabilities={"positions": ("none", "alibi")}),
    Broken(cls=RunsAnotherBackend, check="path_ran", config=BackendConfig),
    Broken(cls=HidesItsBackend, check="path_ran", config=BackendConfig),
    Broken(cls=AlternatesPaths, check="path_ran"),
    Broken(cls=PrefillForgetsTheState, check="decode", capabilities=DECODE),
    Broken(cls=PrefillOnlyFromTheStart, check="decode", capabilities=DECODE),
    Broken(
        cls=TwoPercentTooMany,
        check="flops_count",
        complexity={"flops": lambda shape: softmax_flops(shape) * 102 // 100},
    ),
    Broken(
        cls=CountsHiddenPairsHalf,
        check="flops_count",
        complexity={"flops": lambda shape: softmax_flops(shape) // 2},
    ),
    Broken(cls=CountsLessBeyond400, check="flops_count", complexity={"flops": fewer_flops_beyond_400}),
    Broken(
        cls=CountsNoProjections,
        check="flops_count",
        also=frozenset({"backward_ratio"}),
        capabilities=MIXER,
        complexity={**MIXER_COST, "projection_flops": None},
    ),
    Broken(
        cls=CountsHalfOfWhatIsSeen,
        check="flops_count",
        capabilities=MIXER,
        complexity={**MIXER_COST, "flops": lambda shape: mixer_softmax_flops(shape) // (4 if shape.is_causal else 1)},
    ),
    Broken(cls=BackwardCostsSeven, check="backward_ratio", complexity={"flops": softmax_flops, "backward_ratio": 7.0}),
    Broken(
        cls=ClaimsLessThanItsInputs,
        check="least_bytes",
        complexity={"bytes": lambda shape, itemsize: shape.io_bytes(itemsize) // 3},
    ),
    Broken(
        cls=MixerClaimsLessThanItsInputs,
        check="least_bytes",
        capabilities=MIXER,
        complexity={**MIXER_COST, "bytes": lambda shape, itemsize: shape.io_bytes(itemsize) // 3},
    ),
    Broken(
        cls=HidesBehindProjections,
        check="flops_count",
        capabilities={"positions": ("none",)},
        complexity={
            "flops": lambda shape: mixer_softmax_flops(shape) * 97 // 100,
            "projection_flops": lambda shape: 128 * projection_flops(shape),
            "projection_bytes": lambda shape, itemsize: 128 * projection_bytes(shape, itemsize),
        },
    ),
    Broken(
        cls=SevenBytesOfState,
        check="decode_state_bytes",
        capabilities=MIXER,
        complexity={**MIXER_COST, "state_bytes": lambda shape, itemsize: 7},
    ),
    Broken(
        cls=MixerStateGrows,
        check="decode_state_bytes",
        capabilities={**MIXER, "decode": "recurrent"},
        complexity=MIXER_COST,
    ),
    Broken(
        cls=ConstantFlops, check="flops_formula", also=frozenset({"flops_count"}), complexity={"flops": constant_flops}
    ),
    Broken(
        cls=QuadraticButClaimsLinear,
        check="flops_formula",
        complexity={"flops": quadratic_flops, "time_exponent": 1},
    ),
    Broken(cls=ClaimsLinearWithoutAFormula, check="claimed_growth", complexity={"time_exponent": 1}),
    Broken(
        cls=ClaimsLinearByAFormulaThatEnds,
        check="claimed_growth",
        also=frozenset({"flops_count"}),
        complexity={"time_exponent": 1, "flops": lambda shape: softmax_flops(shape) * 512 // max(shape.key_len, 512)},
    ),
    Broken(cls=ClaimsLinearMemory, check="claimed_growth", complexity={"memory_exponent": 1}),
    Broken(
        cls=MixerClaimsLinear,
        check="claimed_growth",
        capabilities=MIXER,
        complexity={**MIXER_COST, "flops": None, "projection_flops": None, "time_exponent": 1},
    ),
    Broken(cls=SumsKeysInTurn, check="complexity_claims"),
    Broken(cls=SeesNeighboursOnly, check="complexity_claims"),
    Broken(cls=ClaimsInWords, check="complexity_claims", complexity={"sequential_ops": "a few"}),
)
