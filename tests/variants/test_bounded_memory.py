"""Slots of bounded memory: the paper's sums token by token, prefixes as the causal form, and control of any size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, build_mixer
from attn_zoo.metadata import Shape
from attn_zoo.variants.bounded_memory import NO_CONTROL, Tokens, bounded_memory_flops, causal_slots, recur

BATCH, HEADS, DIM, EMBED, SLOTS = 2, 3, 4, 12, 5


def make(**build: Any) -> Any:
    torch.manual_seed(0)
    context = BuildContext(embed_dim=EMBED, num_heads=HEADS, max_seq_len=64, **build)
    return build_mixer("bounded_memory", context, num_slots=SLOTS, chunk_len=4).double().eval()


def draw(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return torch.randn(BATCH, length, EMBED, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2]] = True
    return mask


@torch.no_grad()
def by_the_definition(mixer: Any, query_token: Tensor, tokens: Tensor) -> Tensor:
    """Return the output `[E]` of one token that attends to the slots of others, all of them real."""
    heads = []
    for head in range(HEADS):
        mine = slice(head * DIM, (head + 1) * DIM)
        keys, values = torch.zeros(2, SLOTS, DIM, dtype=torch.float64)
        total = torch.zeros(SLOTS, dtype=torch.float64)
        for token in tokens:
            control = (mixer.control_proj.weight @ token).view(HEADS, SLOTS)[head].exp()
            keys += torch.outer(control, (mixer.key_proj.weight @ token)[mine])
            values += torch.outer(control, (mixer.value_proj.weight @ token)[mine])
            total += control
        scores = (keys / total[:, None]) @ (mixer.query_proj.weight @ query_token)[mine] / math.sqrt(DIM)
        heads.append(scores.softmax(0) @ (values / total[:, None]))
    output: Tensor = mixer.out_proj.weight @ torch.cat(heads)
    return output


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("form", ["bidirectional", "causal", "cross"])
def test_both_paths_are_the_definition(form: str, has_padding: bool):
    mixer = make(is_causal=form == "causal", is_cross=form == "cross")
    hidden, context = draw(11), draw(7, seed=1) if form == "cross" else None
    keys = hidden if context is None else context
    mask = padding_for(keys.shape[1]) if has_padding else None
    outputs = [run(hidden, context=context, key_padding_mask=mask) for run in (mixer, mixer.reference)]
    for entry in range(BATCH):
        for t, token in enumerate(hidden[entry]):
            is_real = torch.ones(keys.shape[1], dtype=torch.bool) if mask is None else ~mask[entry]
            if form != "cross" and not is_real[t]:
                continue
            seen = is_real & (torch.arange(len(is_real)) <= t) if form == "causal" else is_real
            expected = by_the_definition(mixer, token, keys[entry, seen])
            for output in outputs:
                torch.testing.assert_close(output[entry, t], expected, rtol=0, atol=1e-12)


def test_tokens_before_which_all_is_padding_read_nothing():
    mixer, hidden = make(is_causal=True), draw(9)
    mask = torch.arange(9)[None].expand(BATCH, 9) < 6
    output = mixer(hidden, key_padding_mask=mask)
    assert output[:, :6].eq(0).all()
    torch.testing.assert_close(output[:, 6:], mixer(hidden[:, 6:]), rtol=0, atol=1e-13)


def some_tokens(length: int, scale: float, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, rows, control = (
        torch.randn(1, 2, length, width, generator=generator, dtype=torch.float64) for width in (DIM, 2 * DIM, SLOTS)
    )
    return [x.to(dtype).requires_grad_() for x in (query, rows, scale * control)]


def results(function: Any, leaves: list[Tensor], *, is_first: bool, **options: Any) -> list[Tensor]:
    """Return the output, the slots and z, and the gradients of all that goes in."""
    slots = torch.linspace(-1, 1, 2 * 2 * DIM * SLOTS).view(1, 2, 2 * DIM, SLOTS).to(leaves[0].dtype)
    before = slots.new_full((1, 2, SLOTS), -torch.inf if is_first else 0.3)
    slots = (slots * (not is_first)).requires_grad_()
    output, state = function(Tokens(*leaves), slots, before, **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output)
    scalar = (output * upstream).sum() + state.slots.square().sum()
    gradients = torch.autograd.grad(scalar, [*leaves, slots])
    return [x.detach().double() for x in (output, state.slots, state.log_control, *gradients)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("chunk_len", [1, 2, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 70])
def test_chunks_are_the_recurrence_with_gradients(length: int, chunk_len: int, is_first: bool):
    leaves = some_tokens(length, 1.0, torch.float64)
    fast = results(causal_slots, leaves, is_first=is_first, chunk_len=chunk_len)
    for found, expected in zip(fast, results(recur, leaves, is_first=is_first), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_control_of_hundreds_keeps_its_digits_in_float32(scale: float):
    """One token may outweigh all others, or count for nothing; the recurrence rounds z and its ratios as well."""
    exact = [x.detach().float().double().requires_grad_() for x in some_tokens(70, scale, torch.float64)]
    narrow = [x.detach().float().requires_grad_() for x in exact]
    expected = results(recur, exact, is_first=True)
    plain = results(recur, narrow, is_first=True)
    largest_z = float(exact[2].detach().abs().max()) + math.log(70)
    for found, rounded, right in zip(
        results(causal_slots, narrow, is_first=True, chunk_len=16), plain, expected, strict=True
    ):
        rounding = torch.finfo(torch.float32).eps * largest_z * float(right.abs().max())
        allowed = 2 * float((rounded - right).abs().max()) + rounding
        torch.testing.assert_close(found, right, rtol=0, atol=allowed)


def test_what_writes_nothing_changes_no_digit():
    query, rows, control = some_tokens(20, 1.0, torch.float64)
    is_mute = torch.arange(20)[:, None] % 3 == 0
    mute = control.masked_fill(is_mute, NO_CONTROL)
    slots, before = torch.zeros(1, 2, 2 * DIM, SLOTS).double(), torch.full((1, 2, SLOTS), -torch.inf).double()
    rows = rows.masked_fill(is_mute, 0.0)  # as of blanked tokens
    output, state = causal_slots(Tokens(query, rows, mute), slots, before, chunk_len=8)
    heard = [x[:, :, ~is_mute[:, 0]] for x in (query, rows, mute)]
    alone, same = causal_slots(Tokens(*heard), slots, before, chunk_len=8)
    torch.testing.assert_close(output[:, :, ~is_mute[:, 0]], alone, rtol=0, atol=1e-14)
    torch.testing.assert_close(state.slots, same.slots, rtol=0, atol=1e-14)


def test_a_state_is_as_large_after_a_thousand_tokens_as_after_one():
    mixer = make(is_causal=True)
    _, one = mixer.prefill(draw(1))
    _, many = mixer.prefill(draw(64))
    sizes = [[x.untyped_storage().nbytes() for x in (state.slots, state.log_control)] for state in (one, many)]
    assert sizes[0] == sizes[1] == [8 * BATCH * HEADS * 2 * DIM * SLOTS, 8 * BATCH * HEADS * SLOTS]


def test_operations_are_linear_in_the_length():
    counts = [
        [
            bounded_memory_flops(
                Shape(
                    batch_size=1,
                    num_heads=1,
                    num_kv_heads=1,
                    query_len=length,
                    key_len=length,
                    head_dim=16,
                    is_causal=is_causal,
                )
            )
            for length in (4096, 8192)
        ]
        for is_causal in (False, True)
    ]
    for short, long in counts:
        assert long == 2 * short
    assert counts[0][0] == 8 * 64 * 16 * 4096  # two products with tokens, two with queries


@pytest.mark.parametrize("name", ["num_slots", "chunk_len"])
def test_sizes_are_positive(name: str):
    with pytest.raises(ConfigError, match=f"{name}: expected at least 1; got 0"):
        build_mixer("bounded_memory", BuildContext(embed_dim=8, num_heads=2, max_seq_len=8), **{name: 0})


def test_decoding_across_needs_the_context():
    with pytest.raises(ValueError, match=r"context: expected \[B, S, E\] with B = 2 to decode across; got none"):
        make(is_cross=True).init_state(2)
