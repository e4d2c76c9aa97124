"""Attention whose weights are products of positive features: keys and values are summed once, for all queries.

    out_i = phi(q_i) (sum_j phi(k_j) v_j^T) / (phi(q_i) sum_j phi(k_j) + eps)
Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, equations 4 to 9 and 18 to 20, whatever phi is.
The causal form sums j <= i, in chunks of positions. A value of 1 beside every value makes its sums those of the
denominator as well; so they are in the last column of a decode state, `[B, G, F, D + 1]` for F features.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from attn_zoo.kernels.chunked_sums import chunked_sums, chunked_sums_flops
from attn_zoo.kernels.own_dtype import in_own_dtype


@in_own_dtype
def attend(query: Tensor, key: Tensor, value: Tensor, *, eps: float, chunk_len: int | None) -> Tensor:
    """Return what the queries read, normalised, `[B, H, L, D]`.

    Args:
        query: phi(Q) `[B, H, L, F]`; the dtype should be float32 at least, as sums run over the whole sequence. Causal
            queries are aligned bottom right with the keys.
        key: phi(K) `[B, H, S, F]`, zero where padded.
        value: `[B, H, S, D]`.
        eps: added to the normaliser.
        chunk_len: positions of a chunk in the causal form; None: every query sees every key.
    """
    if chunk_len is not None:
        return _normalised(_causal_sums(query, key, value, chunk_len)[0], eps)
    total = query @ key.sum(-2)[..., None]  # [B, H, L, 1]
    return (query @ (key.mT @ value)) / (total + eps)


def attend_flops(num_features: int, head_dim: int, query_len: int, key_len: int, chunk_len: int | None) -> int:
    """Count the matrix products of one head."""
    if chunk_len is None:
        return 2 * num_features * (key_len * head_dim + query_len * (head_dim + 1))
    seeing = min(query_len, key_len)
    past = 2 * (key_len - seeing) * num_features * (head_dim + 1)
    return chunked_sums_flops(seeing, chunk_len, num_features, head_dim + 1) + past


@in_own_dtype
def step(query: Tensor, key: Tensor, value: Tensor, state: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Add one position to the sums and read them; `[B, H, 1, D]` and the new state.

    Args:
        query: phi(Q) `[B, H, 1, F]`.
        key: phi(K) `[B, G, 1, F]`.
        value: `[B, G, 1, D]`.
        state: `[B, G, F, D + 1]`.
        eps: added to the normaliser.
    """
    state = state + key.mT @ _with_ones(value)
    return _normalised(query @ _for_each_query_head(state, query), eps), state


@in_own_dtype
def prefill(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, *, eps: float, chunk_len: int
) -> tuple[Tensor, Tensor]:
    """Read n new positions in chunks, from the sums of those before; arguments and results as in `step`."""
    per_group = query.shape[1] // key.shape[1]
    key, value, start = (_for_each_query_head(x, query) for x in (key, value, state))
    sums, last = _causal_sums(query, key, value, chunk_len, start)
    return _normalised(sums, eps), last[:, ::per_group].clone()  # a view would keep the sums of all chunks alive


def _for_each_query_head(tokens: Tensor, query: Tensor) -> Tensor:
    per_group = query.shape[1] // tokens.shape[1]
    return tokens if per_group == 1 else tokens.repeat_interleave(per_group, dim=1)


def _with_ones(value: Tensor) -> Tensor:
    """Return values `[..., D + 1]` that end in 1."""
    return pad(value, (0, 1), value=1.0)


def _normalised(sums: Tensor, eps: float) -> Tensor:
    """Return weighted values over the sum of their weights, which is the last column."""
    return sums[..., :-1] / (sums[..., -1:] + eps)


def _causal_sums(
    query: Tensor, key: Tensor, value: Tensor, chunk_len: int, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what causal queries read, `[B, H, L, D + 1]`, and the sums after the last key `[B, H, F, D + 1]`.

    Args:
        query: phi(Q) `[B, H, L, F]`.
        key: phi(K) `[B, H, S, F]`.
        value: `[B, H, S, D]`.
        chunk_len: positions of a chunk.
        start: sums over positions before all of these.
    """
    past = key.shape[2] - query.shape[2]
    if past < 0:  # the first queries stand before every key
        sums, last = _causal_sums(query[:, :, -past:], key, value, chunk_len, start)
        return pad(sums, (0, 0, -past, 0)), last
    value = _with_ones(value)
    if past:  # keys that every query sees
        seen = key[:, :, :past].mT @ value[:, :, :past]
        start = seen if start is None else start + seen
    return chunked_sums(query, key[:, :, past:], value[:, :, past:], chunk_len=chunk_len, start=start)
