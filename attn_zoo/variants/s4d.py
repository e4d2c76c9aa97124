"""S4D: a state space for each feature, its matrix diagonal, so that a whole sequence is one long convolution.

Gu, Gupta, Goel and Re 2022, "On the Parameterization and Initialization of Diagonal State Space Models", arXiv
2206.11893, sections 3 and 4. Each feature u has N / 2 complex memories x and a step dt of its own:
    continuous  x' = A x + u,   y = 2 Re(C^T x) + D u,   A_n = -rate_n + i frequency_n
    discrete    x_t = exp(dt A) x_{t-1} + u_t,   y_t = 2 Re(W^T x_t) + D u_t,   W_n = C_n (exp(dt A_n) - 1) / A_n
    convolved   y = K * u + D u,   K_l = 2 Re sum_n W_n exp(l dt A_n)
The discrete form holds u still within a step (zero-order hold). Without a causal mask a second kernel, with a C of its
own, reads the later positions, the next one first. After it, for all features together:
    out = P sigmoid(Q),   [P Q] = W_O gelu(y) + b
The kernel of all L positions in two levels, l = a c + b with c about sqrt(L): exp(l dt A) = exp(a c dt A) exp(b dt A)
is one product of two small tables for each feature, and the convolution a product of Fourier transforms.
Symbols: the paper's H features are our E, its B is 1 and stands in C, its step Delta our dt; N is the `state_dim`.
Cost: time O(E L (B log L + N)); memory O(E (B L + N sqrt(L))); decode state O(B E N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, glu, pad

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.masks import blank_padding
from attn_zoo.kernels.long_convolution import convolve, convolve_flops, remember, two_levels
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class S4dConfig(VariantConfig):
    """The authors' choices.

    Args:
        state_dim: N, real numbers that a feature keeps: half as many complex ones, which stand for their conjugates
            too.
        min_step: smallest dt of a new model.
        max_step: largest dt of a new model.
    """

    state_dim: int = 64
    min_step: float = 0.001
    max_step: float = 0.1

    def __post_init__(self) -> None:
        if self.state_dim < 2 or self.state_dim % 2:
            raise ValueError(f"state_dim: expected an even number, at least 2; got {self.state_dim}")
        if not 0 < self.min_step <= self.max_step < math.inf:
            expected = "expected 0 < min_step <= max_step"
            raise ValueError(f"min_step, max_step: {expected}; got {self.min_step}, {self.max_step}")

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return few memories with the paper's steps, and one memory with large steps."""
        return {"state_dim": 8}, {"state_dim": 2, "min_step": 0.05, "max_step": 1.0}


@dataclass(frozen=True, slots=True)
class Tables:
    """Two tables, the products of whose rows are exp(l dt A) for l = 0 .. L - 1.

    Args:
        blocks: exp(a c dt A) of each block a, complex, `[E, L / c, N / 2]`.
        places: exp(b dt A) of each place b in a block, complex, `[E, c, N / 2]`.
    """

    blocks: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class StateSpace:
    """What the parameters say of the discrete form, in float64: it is little, and its powers are many.

    Args:
        log_decay: real part of dt A, `[E, N / 2]`, below 0.
        turns: imaginary part of dt A in whole turns, `[E, N / 2]`.
        weight: W of each direction, complex, `[1 or 2, E, N / 2]`.
    """

    log_decay: Tensor
    turns: Tensor
    weight: Tensor

    def powers(self, exponents: Tensor, dtype: torch.dtype) -> Tensor:
        """Return exp(m dt A) for each m in `exponents` `[M]`, complex of `dtype`, `[E, M, N / 2]`.

        The angle of a large m has few digits left behind the point. So whole turns are dropped in float64, which costs
        a product and a rounding, and only what they leave is rounded to `dtype`, where sine and cosine are dear.
        """
        exponents = exponents.double()[:, None]
        turns = exponents * self.turns[:, None]
        angle = (turns - turns.detach().round()).to(dtype) * (2 * math.pi)
        size = (exponents * self.log_decay[:, None]).to(dtype).exp()
        return torch.complex(size * angle.cos(), size * angle.sin())  # exp of complex numbers takes ten times as long

    def decay(self, num_steps: int, dtype: torch.dtype) -> Tensor:
        """Return what is left of a memory after some steps, complex, `[E, N / 2]`."""
        return self.powers(torch.full((1,), num_steps, device=self.turns.device), dtype)[:, 0]

    def tables(self, length: int, dtype: torch.dtype) -> Tables:
        """Return the powers for a sequence in two levels, complex of `dtype`."""
        count, size = two_levels(length)
        blocks, places = (torch.arange(each, device=self.turns.device) for each in (count, size))
        return Tables(self.powers(size * blocks, dtype), self.powers(places, dtype))


def _as_real(table: Tensor) -> Tensor:
    """Return complex `[..., N / 2]` as `[..., N]`, real and imaginary parts in turns."""
    return torch.view_as_real(table.resolve_conj()).flatten(-2)


@in_own_dtype
def respond(weight: Tensor, tables: Tables, length: int) -> Tensor:
    """Compute 2 Re sum_n weight_n exp(l dt A_n) for l = 0 .. L - 1.

    Re(x y) = Re x Re y - Im x Im y, so that one real product sums over both parts.

    Args:
        weight: complex, `[M, E, N / 2]`: W for kernels, memories times W for what is read of them.
        tables: for L positions.
        length: L.

    Returns:
        Real, `[M, E, L]`.
    """
    doubled = (2 * weight).to(tables.blocks.dtype).transpose(0, 1)[:, :, None]  # [E, M, 1, N / 2]
    rows = _as_real(doubled * tables.blocks[:, None]).flatten(1, 2)  # [E, M L/c, N]
    found = rows @ _as_real(tables.places.conj()).mT  # [E, M L/c, c]
    num_places = tables.blocks.shape[1] * tables.places.shape[1]
    return found.view(len(found), len(weight), num_places)[..., :length].transpose(0, 1)


@in_own_dtype
def gather(tokens: Tensor, tables: Tables) -> Tensor:
    """Compute the memories after the last of n tokens, before which there was nothing.

    Args:
        tokens: u, `[B, E, n]`.
        tables: for n positions.

    Returns:
        Complex, `[B, E, N / 2]`: sum_l exp(l dt A) u_{n-1-l}.
    """
    (batch_size, embed_dim, length), (count, size) = tokens.shape, two_levels(tokens.shape[-1])
    latest_first = pad(tokens.flip(-1).transpose(0, 1), (0, count * size - length))
    of_blocks = latest_first.reshape(embed_dim, batch_size * count, size) @ _as_real(tables.places)  # [E, B n/c, N]
    of_blocks = torch.view_as_complex(of_blocks.view(embed_dim, batch_size, *tables.blocks.shape[1:], 2))
    return (of_blocks * tables.blocks[:, None]).sum(2).transpose(0, 1)


def _options(shape: Shape) -> S4dConfig:
    return shape.config or S4dConfig()


def _num_directions(is_causal: bool) -> int:
    return 1 if is_causal else 2


def _kernel_flops(shape: Shape) -> int:
    """Count the products of the two tables, for each direction."""
    count, size = two_levels(shape.query_len)
    return 2 * _num_directions(shape.is_causal) * shape.embed_dim * count * size * _options(shape).state_dim


def s4d_flops(shape: Shape) -> int:
    """Count the products that make the kernel, which all entries of a batch share, and the transforms."""
    transforms = convolve_flops(shape.batch_size, shape.embed_dim, shape.query_len)
    return _kernel_flops(shape) + round(transforms)


def s4d_backward_ratio(shape: Shape) -> float:
    """Return 2 for the products, and 1 for the transforms: waves are kept."""
    return 1 + _kernel_flops(shape) / s4d_flops(shape)


def s4d_projection_flops(shape: Shape) -> int:
    """Count the gated linear layer."""
    return 4 * shape.batch_size * shape.query_len * shape.embed_dim**2


def s4d_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights and biases of the gated linear layer."""
    return 2 * shape.embed_dim * (shape.embed_dim + 1) * itemsize


def s4d_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, dt and D of each feature, rates and frequencies, and C of each direction."""
    of_feature = 2 + _options(shape).state_dim * (1 + _num_directions(shape.is_causal))
    return shape.io_bytes(itemsize) + shape.embed_dim * of_feature * itemsize


def s4d_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count N numbers for each feature, in 4 bytes at least, whatever the length."""
    return shape.batch_size * shape.embed_dim * _options(shape).state_dim * max(4, itemsize)


@register_mixer(
    "s4d",
    config=S4dConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        attention_dropout=False,
        is_padding_invariant=True,
        positions=("none",),
        why={
            "cross_attention": "a convolution needs positions that both sequences share",
            "grouped_query": "every feature is read by itself, and heads do not matter",
            "attention_dropout": "its weights are one function of distance, of which the paper drops none",
            "positions": "it has no queries and keys to rotate, and no scores to bias",
        },
    ),
    complexity=Complexity(
        time="E L (B log L + N)",
        memory="E (B L + N sqrt(L))",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="log L",
        max_path="1",
        flops=s4d_flops,
        projection_flops=s4d_projection_flops,
        backward_ratio=s4d_backward_ratio,
        bytes=s4d_bytes,
        projection_bytes=s4d_projection_bytes,
        state_bytes=s4d_state_bytes,
    ),
    reference=Reference(
        title="On the Parameterization and Initialization of Diagonal State Space Models",
        authors="Gu et al.",
        year=2022,
        url="https://arxiv.org/abs/2206.11893",
        equation="sections 3 and 4 (S4D-Lin, zero-order hold)",
        code="https://github.com/state-spaces/s4",
        deviations=(
            "It is no approximation of softmax attention: no budget makes the two equal.",
            "It stands where attention stands, with a feed-forward network after it; the authors' blocks have none.",
            "All weights learn at one rate; the authors give A and dt a smaller one. As with them, neither is decayed.",
            "Nothing is dropped between GELU and the linear layer, where the authors' models may drop features.",
            "The linear layer is initialised as in all models; A, dt, C and D as in the authors' code.",
            "The kernel is made in two levels; the authors raise the decay of every memory to every power by itself.",
            "Angles lose whole turns in float64 before they are rounded; the authors' are rounded as they are.",
            "Transforms, powers and memories are in float32 at least, whatever the dtype of the hidden states.",
            "Padded positions write nothing and give zeros; the authors' code has no mask.",
        ),
    ),
)
class S4d(AbstractMixer):
    """State spaces of all features, and a gated linear layer.

    Args:
        config: the variant's options.
        build: sizes and direction.
    """

    config: S4dConfig

    def __init__(self, config: S4dConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        embed_dim, num_pairs = build.embed_dim, config.state_dim // 2
        ends = math.log(config.min_step), math.log(config.max_step)
        self.log_step = nn.Parameter(torch.empty(embed_dim).uniform_(*ends))  # log dt
        # A = -1 / 2 + i pi n for every feature. Rates and frequencies are lists, `[E N / 2]`: what decays matrices in a
        # training would pull them to zero.
        self.log_rate = nn.Parameter(torch.full((embed_dim * num_pairs,), 0.5).log())
        order = torch.arange(num_pairs, dtype=self.log_step.dtype)
        self.frequency = nn.Parameter(math.pi * order.repeat(embed_dim))
        # C: real and imaginary parts of variance 1 / 2, `[1 or 2, E, N / 2, 2]`.
        shape = _num_directions(build.is_causal), embed_dim, num_pairs, 2
        self.readout = nn.Parameter(torch.empty(shape).normal_(std=0.5**0.5))
        self.skip = nn.Parameter(torch.empty(embed_dim).normal_())  # D
        self.out_proj = nn.Linear(embed_dim, 2 * embed_dim)

    def _space(self) -> StateSpace:
        """Discretise: hold the tokens still within a step."""
        step = self.log_step.double().exp()[:, None]
        log_rate, frequency = (x.double().view(len(step), -1) for x in (self.log_rate, self.frequency))
        rate = log_rate.exp()
        matrix = torch.complex(-rate, frequency)  # A, [E, N / 2]
        weight = torch.view_as_complex(self.readout.double()) * ((step * matrix).exp() - 1) / matrix
        return StateSpace(-step * rate, step * frequency / (2 * math.pi), weight)

    def _merge(self, read: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Add what skips the memories to what is read of them, both `[B, L, E]`, and project."""
        output = gelu(torch.addcmul(read, tokens, self.skip.to(read.dtype)))
        merged: Tensor = glu(self.out_proj(output.to(dtype)), dim=-1)
        return merged

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Convolve; shapes as in `AbstractMixer.forward`. Padded positions write nothing and give zeros."""
        del context  # the contract refuses one
        note_path("s4d.one_way" if self.build.is_causal else "s4d.two_way")
        tokens = _wide(blank_padding(hidden, key_padding_mask))
        space = self._space()
        read = _convolved(tokens, space.weight, space.tables(tokens.shape[1], tokens.dtype))
        return blank_padding(self._merge(read, tokens, hidden.dtype), key_padding_mask)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the recurrence, in float32 at least: there are no complex numbers of 16 bits."""
        del context
        tokens, space = _wide(blank_padding(hidden, key_padding_mask)), self._space()
        decay = space.decay(1, tokens.dtype)
        weight = space.weight.to(decay.dtype)
        read = 2 * (remember(tokens, decay) * weight[0]).sum(-1).real
        if not self.build.is_causal:  # from the end to the start, and one position behind
            later = remember(tokens.flip(1), decay)[:, :-1]
            read = read + pad(2 * (later * weight[1]).sum(-1).real, (0, 0, 1, 0)).flip(1)
        return blank_padding(self._merge(read, tokens, hidden.dtype), key_padding_mask)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return memories of nothing: real and imaginary parts, `[B, E, N / 2, 2]`, in float32 at least."""
        self._require_state(key_padding_mask, context)
        wide = torch.promote_types(dtype or self.skip.dtype, torch.float32)
        return torch.zeros(batch_size, *self.readout.shape[1:], device=device, dtype=wide)

    def step(self, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the discrete form for one position `[B, 1, E]`: O(B E N)."""
        self._require_batch(hidden, state)
        tokens, space = hidden.to(state.dtype), self._space()
        decay = space.decay(1, state.dtype)
        memory = decay * torch.view_as_complex(state) + tokens.mT  # [B, E, N / 2]
        read = 2 * (memory * space.weight[0].to(decay.dtype)).sum(-1).real[:, None]  # [B, 1, E]
        return self._merge(read, tokens, hidden.dtype), torch.view_as_real(memory)

    def prefill(self, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve positions `[B, n, E]`, and add what is read of the memories of those before."""
        self._require_state()
        note_path("s4d.one_way")
        tokens, space, length = _wide(hidden), self._space(), hidden.shape[1]
        tables = space.tables(length, tokens.dtype)
        read, memory = _convolved(tokens, space.weight, tables), gather(tokens.mT, tables)
        if state is not None:
            self._require_batch(hidden, state)
            before = torch.view_as_complex(state)
            by_first, by_last = (space.decay(count, state.dtype) for count in (1, length))
            read = read + respond(space.weight[0] * by_first * before, tables, length).mT
            memory = memory + by_last * before
        return self._merge(read, tokens, hidden.dtype), torch.view_as_real(memory.contiguous())


def _wide(hidden: Tensor) -> Tensor:
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def _convolved(tokens: Tensor, weight: Tensor, tables: Tables) -> Tensor:
    """Return what is read of tokens `[B, L, E]` in all directions, `[B, L, E]`."""
    return convolve(tokens.mT, respond(weight, tables, tokens.shape[1])).mT
