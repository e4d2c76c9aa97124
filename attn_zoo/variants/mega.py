"""Mega: gated attention of one head, whose queries and keys are made of moving averages of each feature.

Ma et al. 2022, "Mega: Moving Average Equipped Gated Attention", arXiv 2209.10655, section 3. The moving
average, damped and in N dimensions, of each feature x by itself; alpha and delta are sigmoids, from 0 to 1:
    u_t = beta x_t,   h_t = alpha u_t + (1 - alpha delta) h_{t-1},   EMA(x)_t = eta^T h_t / sqrt(N) + omega x_t
Without a causal mask a second one, with alpha, delta, beta and eta of its own, reads from the end to the start, and
eta^T h of both are added, so that x_t is in each. With these averages:
    X' = silu(EMA(X)),   Z = silu(X' W_z + b_z),   Q = kappa_q Z + mu_q,   K = kappa_k Z + mu_k
    V = silu(X W_v + b_v),   O = f(Q K^T / tau + b_rel) V,   f = softmax, tau = sqrt(width of Z)
    gamma = silu(X' W_gamma + b_gamma),   phi = sigmoid(X' W_phi + b_phi)
    H = silu(X' W_h + (gamma O) U_h + b_h),   Y = phi H + (1 - phi) X
or f(s) = (1 + erf((s - m) / (sqrt(2) d))) / 2, the Laplace function, with m = sqrt(1 / 2) and d = sqrt(1 / (4 pi)), and
tau = the number of keys seen. b_rel is a learned number for each distance. Mega-chunk: a query sees the keys of its
chunk of C positions; of what lies elsewhere it has what the average brings there.
The average is a convolution, K_l = sum_n eta_n alpha_n beta_n (1 - alpha_n delta_n)^l / sqrt(N), made in two levels.
Symbols: the paper's d is our E, its n our L, its h is N = `ema_dim`, its z and v are `query_dim` and E `value_factor`.
Cost: time O(E L (B log L + N) + B L C (z + v)); memory O(E (B L + N sqrt(L)) + B L (C + z + v)); decode state
O(B (E N + C (z + v))).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, silu

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.attention.contract import product_dtype
from attn_zoo.attention.masks import blank_padding, causal_keep, masked_softmax
from attn_zoo.kernels.chunked_recurrence import chunk_sizes
from attn_zoo.kernels.long_convolution import convolve, convolve_flops, remember, two_levels
from attn_zoo.kernels.own_dtype import in_own_dtype
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer

LAPLACE_MEAN, LAPLACE_STD = 0.5**0.5, (0.25 / math.pi) ** 0.5
"""Of the Laplace function, with which it and its slope are those of the squared ReLU at x = mean."""

INIT_STD = 0.02
"""Of kappa, of the biases by distance and around 1 and -1 of beta, as in the authors' code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaConfig(VariantConfig):
    """The authors' choices for Long Range Arena, in chunks.

    Args:
        chunk_len: C, positions that attend to each other; 0 for the whole sequence, in quadratic time.
        ema_dim: N, memories of each feature.
        query_dim: z, width of queries and keys.
        value_factor: width v of values over that of the model.
        attention_function: f; the authors take `"laplace"` for images.
    """

    chunk_len: int = 128
    ema_dim: int = 16
    query_dim: int = 64
    value_factor: int = 2
    attention_function: Literal["softmax", "laplace"] = "softmax"

    def __post_init__(self) -> None:
        for name, least in (("chunk_len", 0), ("ema_dim", 1), ("query_dim", 1), ("value_factor", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}; got {getattr(self, name)}")

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        """Return less without chunks, which bound what decoding keeps."""
        if self.chunk_len:
            return capabilities
        return capabilities.without(
            decode="without chunks (chunk_len = 0) keys and values of all positions would be kept"
        )

    def claim(self, complexity: Complexity) -> Complexity:
        """Return that without chunks every pair of positions has a weight."""
        if self.chunk_len:
            return complexity
        return replace(
            complexity,
            time="E L (B log L + N) + B L^2 (z + v)",
            memory="E (B L + N sqrt(L)) + B L (L + z + v)",
            time_exponent=2,
            memory_exponent=2,
        )

    @classmethod
    def check_options(cls) -> tuple[dict[str, Any], ...]:
        """Return small chunks, smaller ones under the Laplace function, and no chunks."""
        return (
            {"chunk_len": 16, "ema_dim": 4, "query_dim": 8},
            {"chunk_len": 7, "ema_dim": 3, "query_dim": 8, "value_factor": 1, "attention_function": "laplace"},
            {"chunk_len": 0, "ema_dim": 1, "query_dim": 5},
        )


@dataclass(frozen=True, slots=True)
class MegaState:
    """What decoding keeps.

    Args:
        memory: sums of what a feature was, decayed, `[B, E, N]`, in float32 at least.
        key: of the chunk that is begun, `[B, C, z]`, zeros where nothing was read yet.
        value: likewise, `[B, C, v]`.
        position: of the next token.
    """

    memory: Tensor
    key: Tensor
    value: Tensor
    position: int = 0


@dataclass(frozen=True, slots=True)
class Average:
    """What the parameters say of the moving average of each direction, in float64: it is little, its powers are many.

    Args:
        log_decay: log(1 - alpha delta), `[1 or 2, E, N]`, below 0.
        weight: eta alpha beta / sqrt(N), `[1 or 2, E, N]`.
    """

    log_decay: Tensor
    weight: Tensor

    def powers(self, exponents: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (1 - alpha delta)^m for each m in `exponents` `[M]`, `[1 or 2, E, M, N]`."""
        return (exponents.double()[:, None] * self.log_decay[:, :, None]).to(dtype).exp()

    def decay(self, num_steps: int, dtype: torch.dtype) -> Tensor:
        """Return what is left of a memory after some steps, `[1 or 2, E, N]`."""
        return (num_steps * self.log_decay).to(dtype).exp()

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the powers l = a c + b below L: of blocks a, `[1 or 2, E, L / c, N]`, and places b, `[.., c, N]`."""
        count, size = two_levels(length)
        blocks, places = (torch.arange(each, device=self.weight.device) for each in (count, size))
        return self.powers(size * blocks, dtype), self.powers(places, dtype)


@in_own_dtype
def respond(weight: Tensor, blocks: Tensor, places: Tensor, length: int) -> Tensor:
    """Compute sum_n weight_n (1 - alpha_n delta_n)^l for l = 0 .. L - 1.

    Args:
        weight: `[M, E, N]`: of each direction for kernels, with each memory for what is read of it.
        blocks: powers of blocks, `[M or 1, E, L / c, N]`.
        places: powers of places, `[M or 1, E, c, N]`.
        length: L.

    Returns:
        `[M, E, L]`.
    """
    found = (weight[:, :, None].to(blocks.dtype) * blocks) @ places.mT  # [M, E, L / c, c]
    response: Tensor = found.flatten(2)[..., :length]
    return response


@in_own_dtype
def gather(tokens: Tensor, blocks: Tensor, places: Tensor) -> Tensor:
    """Compute the memories after the last of n tokens, before which there was nothing.

    Args:
        tokens: `[B, E, n]`.
        blocks: powers of blocks, `[E, n / c, N]`.
        places: powers of places, `[E, c, N]`.

    Returns:
        `[B, E, N]`: sum_l (1 - alpha delta)^l x_{n-1-l}.
    """
    (count, size), length = two_levels(tokens.shape[-1]), tokens.shape[-1]
    latest_first = pad(tokens.flip(-1), (0, count * size - length)).unflatten(-1, (count, size))
    of_blocks: Tensor = (latest_first @ places) * blocks  # [B, E, n / c, N]
    return of_blocks.sum(2)


def _options(shape: Shape) -> MegaConfig:
    return shape.config or MegaConfig()


def _num_directions(is_causal: bool) -> int:
    return 1 if is_causal else 2


def _chunks(config: MegaConfig, length: int) -> tuple[int, int]:
    """Return the number of chunks of a sequence, and the positions of each."""
    return chunk_sizes(length, config.chunk_len or length)


def _num_shifts(config: MegaConfig) -> int:
    """Count the rows of mu. That of keys adds the same to all scores of a query, which softmax does not see."""
    return 1 if config.attention_function == "softmax" else 2


def _widths(shape: Shape) -> tuple[int, int]:
    """Return z and v."""
    return _options(shape).query_dim, shape.embed_dim * _options(shape).value_factor


def _transform_flops(shape: Shape) -> float:
    return convolve_flops(shape.batch_size, shape.embed_dim, shape.query_len)


def _product_flops(shape: Shape) -> int:
    """Count the kernels of each direction, and both products over whole chunks, also where a mask hides a part."""
    (num_blocks, places), (count, size) = two_levels(shape.query_len), _chunks(_options(shape), shape.query_len)
    kernels = _num_directions(shape.is_causal) * shape.embed_dim * num_blocks * places * _options(shape).ema_dim
    return 2 * (kernels + shape.batch_size * count * size**2 * sum(_widths(shape)))


def mega_flops(shape: Shape) -> int:
    """Count the moving average, its kernels, which all entries of a batch share, and attention in chunks."""
    return _product_flops(shape) + round(_transform_flops(shape))


def mega_backward_ratio(shape: Shape) -> float:
    """Return 2 for products, and 1 for transforms: waves are kept."""
    return 1 + _product_flops(shape) / mega_flops(shape)


def _projections(shape: Shape) -> tuple[int, int]:
    """Return how many weights and how many biases the three projections have."""
    embed_dim, (query_dim, value_dim) = shape.embed_dim, _widths(shape)
    num_weights = embed_dim * (value_dim + (query_dim + value_dim + 2 * embed_dim) + value_dim)
    return num_weights, value_dim + (query_dim + value_dim + 2 * embed_dim) + embed_dim


def mega_projection_flops(shape: Shape) -> int:
    """Count the projections of every position: of X, of X' and of gated O."""
    return 2 * shape.batch_size * shape.query_len * _projections(shape)[0]


def mega_projection_bytes(shape: Shape, itemsize: int) -> int:
    """Count the weights and biases of the projections."""
    return sum(_projections(shape)) * itemsize


def mega_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, the averages, kappa and mu, and the biases of distances that there are."""
    config, num_directions = _options(shape), _num_directions(shape.is_causal)
    _, size = _chunks(config, shape.query_len)
    averages = shape.embed_dim * (1 + 4 * num_directions * config.ema_dim)
    distances = 1 + num_directions * (size - 1)
    shared = (2 + _num_shifts(config)) * config.query_dim
    return shape.io_bytes(itemsize) + (averages + shared + distances) * itemsize


def mega_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count N numbers for each feature, in 4 bytes at least, and room for keys and values of a chunk."""
    config = _options(shape)
    memory = shape.embed_dim * config.ema_dim * max(4, itemsize)
    return shape.batch_size * (memory + config.chunk_len * sum(_widths(shape)) * itemsize)


def mega_step_bytes(shape: Shape, itemsize: int) -> int:
    """Count the memories, and the keys and values of the chunk that is begun."""
    config = _options(shape)
    memory = shape.embed_dim * config.ema_dim * max(4, itemsize)
    num_begun = shape.key_len % config.chunk_len
    return shape.batch_size * (memory + num_begun * sum(_widths(shape)) * itemsize)


@register_mixer(
    "mega",
    config=MegaConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        is_padding_invariant=True,
        positions=("none",),
        why={
            "cross_attention": "queries and keys are made of one moving average, over one sequence",
            "grouped_query": "it has one head, as wide as it likes, whatever num_heads of the model is",
            "positions": "its moving average tells positions apart, and its scores have a bias by distance",
        },
    ),
    complexity=Complexity(
        time="E L (B log L + N) + B L C (z + v)",
        memory="E (B L + N sqrt(L)) + B L (C + z + v)",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="log L",
        max_path="1",
        flops=mega_flops,
        projection_flops=mega_projection_flops,
        backward_ratio=mega_backward_ratio,
        bytes=mega_bytes,
        projection_bytes=mega_projection_bytes,
        state_bytes=mega_state_bytes,
        step_bytes=mega_step_bytes,
    ),
    reference=Reference(
        title="Mega: Moving Average Equipped Gated Attention",
        authors="Ma et al.",
        year=2022,
        url="https://arxiv.org/abs/2209.10655",
        equation="section 3",
        code="https://github.com/facebookresearch/mega",
        deviations=(
            "Y has the residual (1 - phi) X inside, and the model adds its own around it; the authors add none.",
            "In that residual X is what the layer is given; the authors, who norm first, take it from before the norm.",
            "It is one head, as in the paper: the number of heads of the model does not matter.",
            "Averages are divided by sqrt(N), which only the authors' code does.",
            "Averages are computed in float32 at least, their decays and powers of these in float64.",
            "Under softmax keys have no mu, which would add the same to all scores of a query.",
            "Positional bias is the simple one, the authors' default; their rotary one is left out.",
            "Causal scores have biases of the past alone; the authors' code has unused ones of the future.",
            "The causal Laplace function divides by the keys that a query sees; theirs counts padded ones too.",
            "Mean and deviation of the Laplace function are exact; the authors' code has six digits of them.",
            "A last chunk may be shorter than the others; theirs is filled up with padding.",
            "Only weights are dropped; the authors' code may drop features of averages, values and outputs as well.",
            "Projections are initialised as in all models, averages, kappa, mu and biases as in the authors' code.",
            "Padded positions write nothing into averages, but time passes, and these decay.",
            "It attends in chunks unless chunk_len is 0; the authors' code attends to everything unless told to chunk.",
        ),
    ),
)
class Mega(AbstractMixer):
    """Gated attention of one head over moving averages, in chunks.

    Args:
        config: the variant's options.
        build: sizes and direction; `num_heads` and `head_dim` do not matter.
    """

    config: MegaConfig

    def __init__(self, config: MegaConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        embed_dim, query_dim, value_dim = build.embed_dim, config.query_dim, build.embed_dim * config.value_factor
        shape = _num_directions(build.is_causal), embed_dim, config.ema_dim
        self.alpha = nn.Parameter(torch.empty(shape).normal_(std=0.2))  # before their sigmoids
        self.delta = nn.Parameter(torch.empty(shape).normal_(std=0.2))
        sign = 1.0 - 2.0 * (torch.arange(config.ema_dim) % 2)
        self.beta = nn.Parameter(torch.empty(shape).normal_(std=INIT_STD) + sign)
        self.eta = nn.Parameter(torch.empty(shape).normal_())
        self.omega = nn.Parameter(torch.empty(embed_dim).normal_())
        self.value_proj = nn.Linear(embed_dim, value_dim)
        self.mean_proj = nn.Linear(embed_dim, 2 * embed_dim + query_dim + value_dim)  # phi, z, gamma, h
        self.out_proj = nn.Linear(value_dim, embed_dim, bias=True)  # U_h, b_h
        self.kappa = nn.Parameter(torch.empty(2, query_dim).normal_(std=INIT_STD))  # of queries and keys
        self.mu = nn.Parameter(torch.zeros(_num_shifts(config), query_dim))
        reach = config.chunk_len or build.max_seq_len
        # By key position minus query position, from 1 - C to 0, or to C - 1 where there are later keys.
        num_biases = reach if build.is_causal else 2 * reach - 1
        self.distance_bias = nn.Parameter(torch.empty(num_biases).normal_(std=INIT_STD))

    def _average(self) -> Average:
        alpha, delta = self.alpha.double().sigmoid(), self.delta.double().sigmoid()
        # Where both are 1 nothing is left of a memory, and a logarithm would be infinite.
        lost = (alpha * delta).clamp(max=1 - torch.finfo(torch.float64).eps)
        weight = self.eta.double() * alpha * self.beta.double() * self.config.ema_dim**-0.5
        return Average(torch.log1p(-lost), weight)

    def _mean(self, read: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Return X' of what is read of memories and of what skips them, both `[B, L, E]`."""
        return silu(torch.addcmul(read, tokens, self.omega.to(read.dtype))).to(dtype)

    def _project(self, hidden: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries and keys `[B, L, z]`, values and gamma `[B, L, v]`, X' W_h and phi `[B, L, E]`."""
        embed_dim, query_dim = self.build.embed_dim, self.config.query_dim
        value = silu(self.value_proj(hidden))
        sizes = [embed_dim, query_dim, value.shape[-1], embed_dim]
        update, shared, reset, candidate = self.mean_proj(mean).split(sizes, dim=-1)
        shared, kappa, mu = silu(shared), self.kappa.to(shared.dtype), self.mu.to(shared.dtype)
        query = torch.addcmul(mu[0], shared, kappa[0])
        key = torch.addcmul(mu[1], shared, kappa[1]) if len(mu) == 2 else shared * kappa[1]
        return query, key, value, silu(reset), candidate, update.sigmoid()

    def _merge(self, hidden: Tensor, attended: Tensor, reset: Tensor, candidate: Tensor, update: Tensor) -> Tensor:
        """Return Y of O `[B, L, v]`."""
        new = silu(candidate + self.out_proj(reset * attended))
        return hidden + update * (new - hidden)

    def _toeplitz(self, size: int) -> Tensor:
        """Return the bias of each query and key of a chunk, `[C, C]`: rows of one list, each shifted by one more."""
        reach = self.config.chunk_len or self.build.max_seq_len
        biases = self.distance_bias[reach - size : reach + size - 1]
        biases = pad(biases, (0, 2 * size - biases.shape[0]))  # and one that nothing reads
        return biases.expand(size, -1).flatten()[: size * (2 * size - 1)].view(size, -1)[:, size - 1 :]

    def _weigh(self, query: Tensor, key: Tensor, bias: Tensor, keep: Tensor | None) -> Tensor:
        """Return the weights f(Q K^T / tau + b_rel) in float32 at least.

        Args:
            query: `[..., rows, z]`.
            key: `[..., keys, z]`.
            bias: `[rows, keys]`.
            keep: bool, broadcastable to `[..., rows, keys]`, True = may be seen; None where everything may be.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        if self.config.attention_function == "softmax":
            scores = (query * query.shape[-1] ** -0.5 @ key.mT).to(wide) + bias.to(wide)
            return masked_softmax(scores, keep)
        if keep is None:
            return _laplace((query / key.shape[-2] @ key.mT).to(wide) + bias.to(wide))
        count = keep.sum(-1, keepdim=True).clamp(min=1).to(wide)  # bfloat16 counts to 256
        return _laplace(((query / count).to(query.dtype) @ key.mT).to(wide) + bias.to(wide)) * keep.to(wide)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Return O `[B, L, v]`, chunk by chunk."""
        length = query.shape[1]
        count, size = _chunks(self.config, length)
        missing = count * size - length
        if missing:
            query, key, value = (pad(rows, (0, 0, 0, missing)) for rows in (query, key, value))
            filled = torch.arange(count * size, device=query.device)[None] >= length
            padding = filled if padding is None else pad(padding, (0, missing), value=True)
        query, key, value = (rows.unflatten(1, (count, size)) for rows in (query, key, value))  # [B, n, C, z or v]
        keep = None if padding is None else ~padding.unflatten(1, (count, size))[:, :, None]  # [B or 1, n, 1, C]
        if self.build.is_causal:
            causal = causal_keep(size, size, query.device)
            keep = causal if keep is None else keep & causal
        weights = self._weigh(query, key, self._toeplitz(size), keep)
        weights = dropout(weights, dropout_p, dropout_p > 0).to(value.dtype)
        return (weights @ value).flatten(1, 2)[:, :length]

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Convolve, attend in chunks and gate; shapes as in `AbstractMixer.forward`."""
        del context  # the contract refuses one
        note_path("mega.one_way" if self.build.is_causal else "mega.two_way")
        hidden = blank_padding(hidden, key_padding_mask)
        tokens, average = _wide(hidden), self._average()
        tables = average.tables(hidden.shape[1], tokens.dtype)
        mean = self._mean(_convolved(tokens, average, tables), tokens, hidden.dtype)
        query, key, value, *gates = self._project(hidden, mean)
        dropout_p = self.build.dropout_p if self.training else 0.0
        return self._merge(hidden, self._attend(query, key, value, key_padding_mask, dropout_p), *gates)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the recurrence, in float32 at least, and dense weights, zero between chunks."""
        del context
        hidden = blank_padding(hidden, key_padding_mask)
        tokens, average, length = _wide(hidden), self._average(), hidden.shape[1]
        decay, weight = average.decay(1, tokens.dtype), average.weight.to(tokens.dtype)
        read = (remember(tokens, decay[0]) * weight[0]).sum(-1)
        if not self.build.is_causal:
            read = read + (remember(tokens.flip(1), decay[1]) * weight[1]).sum(-1).flip(1)
        query, key, value, *gates = self._project(hidden, self._mean(read, tokens, hidden.dtype))
        at = torch.arange(length, device=hidden.device)
        distance = at - at[:, None]
        keep = at // (self.config.chunk_len or length) == (at // (self.config.chunk_len or length))[:, None]
        if self.build.is_causal:
            keep = keep & (distance <= 0)
        if key_padding_mask is not None:
            keep = keep & ~key_padding_mask[:, None]
        reach = self.config.chunk_len or self.build.max_seq_len
        bias = self.distance_bias[(distance + reach - 1).clamp(0, self.distance_bias.shape[0] - 1)]
        weights = self._weigh(query, key, bias, keep)
        return self._merge(hidden, weights.to(value.dtype) @ value, *gates)

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> MegaState:
        """Return memories of nothing, and room for one chunk."""
        self._require_state(key_padding_mask, context)
        dtype = dtype or self.omega.dtype
        kept = product_dtype(dtype, self.omega.device)
        wide = torch.promote_types(dtype, torch.float32)
        memory = torch.zeros(batch_size, *self.alpha.shape[1:], device=device, dtype=wide)
        key, value = (
            torch.zeros(batch_size, self.config.chunk_len, width, device=device, dtype=kept)
            for width in (self.config.query_dim, self.value_proj.out_features)
        )
        return MegaState(memory, key, value)

    def step(self, hidden: Tensor, state: MegaState) -> tuple[Tensor, MegaState]:
        """Compute the recurrence for one position `[B, 1, E]`, which attends to its chunk: O(B (E N + C (z + v)))."""
        self._require_batch(hidden, state.memory)
        tokens, average, at = hidden.to(state.memory.dtype), self._average(), state.position % self.config.chunk_len
        memory = average.decay(1, state.memory.dtype)[0] * state.memory + tokens.mT
        read = (memory * average.weight[0].to(memory.dtype)).sum(-1)[:, None]
        query, key, value, *gates = self._project(hidden, self._mean(read, tokens, hidden.dtype))
        keys, values = (torch.cat([old[:, :at], new], 1) for old, new in ((state.key, key), (state.value, value)))
        bias = self.distance_bias[self.config.chunk_len - 1 - at :]
        weights = self._weigh(query, keys, bias[None], None)
        output = self._merge(hidden, weights.to(values.dtype) @ values, *gates)
        return output, self._begun(memory, keys, values, state.position + 1)

    def prefill(self, hidden: Tensor, state: MegaState | None = None) -> tuple[Tensor, MegaState]:
        """Convolve and attend from positions `[B, n, E]`, and from those of their chunk that came before."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        self._require_batch(hidden, state.memory)
        note_path("mega.one_way")
        tokens, average, length = hidden.to(state.memory.dtype), self._average(), hidden.shape[1]
        blocks, places = tables = average.tables(length, tokens.dtype)
        by_first, by_last = (average.decay(count, tokens.dtype)[0] for count in (1, length))
        before = respond(average.weight[0] * by_first * state.memory, *tables, length).mT
        read = _convolved(tokens, average, tables) + before
        memory = by_last * state.memory + gather(tokens.mT, blocks[0], places[0])
        query, key, value, *gates = self._project(hidden, self._mean(read, tokens, hidden.dtype))
        at = state.position % self.config.chunk_len
        keys, values = (torch.cat([old[:, :at], new], 1) for old, new in ((state.key, key), (state.value, value)))
        attended = self._attend(pad(query, (0, 0, at, 0)), keys, values)[:, at:]
        return self._merge(hidden, attended, *gates), self._begun(memory, keys, values, state.position + length)

    def _begun(self, memory: Tensor, keys: Tensor, values: Tensor, position: int) -> MegaState:
        """Return the state that keeps of these keys and values, the last of which is the latest, the chunk begun."""
        count = position % self.config.chunk_len
        key, value = (
            pad(rows[:, rows.shape[1] - count :], (0, 0, 0, self.config.chunk_len - count)) for rows in (keys, values)
        )
        return MegaState(memory, key, value, position)


def _wide(hidden: Tensor) -> Tensor:
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def _laplace(scores: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf((scores - LAPLACE_MEAN) / (LAPLACE_STD * 2**0.5)))


def _convolved(tokens: Tensor, average: Average, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return what is read of tokens `[B, L, E]` in all directions, `[B, L, E]`."""
    length = tokens.shape[1]
    kernels = respond(average.weight, *tables, length)
    if kernels.shape[0] == 2:  # a position is its own in both directions, and a convolution takes one number for it
        so_far, later = kernels
        kernels = torch.stack([so_far + pad(later[:, :1], (0, length - 1)), pad(later[:, 1:], (0, 1))])
    return convolve(tokens.mT, kernels).mT
