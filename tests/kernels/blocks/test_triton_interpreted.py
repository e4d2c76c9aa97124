"""Our Triton kernels in Triton's interpreter, against dense attention in float64, forward and gradients.

The interpreter takes milliseconds for each tile, so everything is as small as it can be. `test_triton.py` runs
this file in a process with TRITON_INTERPRET=1; by itself it skips.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, build_attention, build_mixer
from attn_zoo.kernels.blocks.block_attention import block_sparse_attention, block_sparse_attention_with_lse
from attn_zoo.kernels.blocks.layout import TokenLayout
from attn_zoo.kernels.blocks.pattern import BlockPattern, make_pattern
from attn_zoo.kernels.trace import recording
from tests.kernels.blocks.tables import cross_table, random_table
from tests.kernels.blocks.test_gather import band_pattern, drawn_pattern, make_layout, value_and_gradients
from tests.kernels.blocks.test_triton import check_against_dense, dense_attention, make_inputs, make_padding
from tests.kernels.blocks.test_triton_dropout import kept_factor
from tests.kernels.interpreter import IS_INTERPRETING, mend_interpreter

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not IS_INTERPRETING, reason="run by test_triton.py, on its own"),
]
SLOPES = torch.tensor([0.5, 0.02])
# The fewest blocks of which some are hidden, with a dense row, listed rows and a global column.
SMALLEST = make_layout(48, num_window_blocks=1, num_global_blocks=1, num_random_blocks=0)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut dense lines into several stretches although they are short."""
    from attn_zoo.kernels.blocks.triton import launch as block_triton_launch

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(block_triton_launch, "_SPLIT_BLOCKS", 2)
    for kept in ("_forwards", "_backwards"):  # cut otherwise
        monkeypatch.setattr(block_triton_launch, kept, {})
    # Weights of padding overflow on the way to their own gradients, which are zeroed.
    np.seterr(over="ignore", invalid="ignore")
    # Fill what is allocated with NaN: nothing may depend on memory that was not written.
    torch.use_deterministic_algorithms(True)


def engine(
    pattern: BlockPattern, padding: Tensor | None = None, slopes: Tensor | None = None, **options: Any
) -> Callable[[list[Tensor]], Tensor]:
    def run(tensors: list[Tensor]) -> Tensor:
        query, key, value = tensors
        return block_sparse_attention(
            query, key, value, pattern, key_padding_mask=padding, slopes=slopes, backend="triton", **options
        )

    return run


def test_saved_tensors_may_come_back_with_other_strides():
    """As from the hooks of torch that offload them: contiguous, where heads of a projection are not."""
    pattern = SMALLEST.pattern()
    base = [torch.randn(1, 48, 2, 16) for _ in range(3)]
    grad = torch.randn(1, 48, 2, 16).transpose(1, 2)

    def gradients(pack: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in base]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = engine(pattern)([x.transpose(1, 2) for x in leaves])
        return torch.autograd.grad(output, leaves, grad)

    wanted = gradients(lambda x: x)
    for pack in (lambda x: x.contiguous(), lambda x: x):
        torch.testing.assert_close(gradients(pack), wanted)


@pytest.mark.parametrize("learn", [lambda x: x.sum(), lambda x: x.square().sum()], ids=["sum", "square"])
def test_an_empty_batch_has_empty_gradients(learn: Callable[[Tensor], Tensor]):
    pattern = drawn_pattern(make_layout(96, num_random_blocks=1), 2, (1, 0))
    leaves = [torch.randn(0, 2, 96, 16, requires_grad=True) for _ in range(3)]
    learn(engine(pattern)(leaves)).backward()
    assert [x.grad.shape for x in leaves if x.grad is not None] == [(0, 2, 96, 16)] * 3


def test_slopes_may_lie_apart():
    pattern = make_layout(40, is_causal=True, num_global_blocks=1, num_random_blocks=0).pattern()
    apart = torch.stack([SLOPES, torch.full((2,), 7.0)], dim=1)[:, 0]
    assert not apart.is_contiguous()
    check_against_dense(engine(pattern, None, apart), make_inputs(pattern, (1, 2, 16)), pattern, None, SLOPES)


@pytest.mark.parametrize(
    ("length", "options", "has_padding", "has_slopes"),
    [
        (96, {}, False, False),
        (83, {"is_causal": True}, False, False),
        (83, {"num_extra_tokens": 32}, True, False),
        (64, {"num_extra_tokens": 32, "is_causal": True}, True, True),
        (83, {"num_global_blocks": 0}, False, True),
        (1, {}, False, False),
        (20, {"is_causal": True}, False, False),  # dense rows alone
    ],
)
def test_layouts(length: int, options: dict[str, Any], has_padding: bool, has_slopes: bool):
    pattern = drawn_pattern(make_layout(length, **{"num_random_blocks": 1, **options}), 2, (1, 0))
    padding = make_padding(1, pattern.key_len) if has_padding else None
    slopes = SLOPES if has_slopes else None
    check_against_dense(engine(pattern, padding, slopes), make_inputs(pattern, (1, 2, 16)), pattern, padding, slopes)


@pytest.mark.parametrize("is_causal", [False, True])
def test_bands(is_causal: bool):
    pattern = band_pattern(70, 20, 16, is_causal=is_causal)
    check_against_dense(engine(pattern), make_inputs(pattern, (1, 2, 16)), pattern)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_pattern(seed: int):
    """Rows of any number of blocks, columns that nobody sees, more or fewer dense rows than global columns."""
    draw = np.random.default_rng(seed)
    num_global, num_dense, is_causal = int(draw.integers(3)), int(draw.integers(3)), bool(seed % 2)
    extra, length = int(draw.integers(2)), int(draw.integers(70, 90))
    num_blocks = -(-length // 16)
    own = np.arange(num_dense, num_blocks) + extra
    num_global = min(num_global, own[0]) if is_causal else num_global
    is_entry = draw.random((len(own), num_blocks + extra)) < 0.3
    is_entry[:, :num_global] = False
    if is_causal:
        is_entry &= np.arange(num_blocks + extra) < own[:, None]
        is_entry[np.arange(len(own)), own] = True
    pattern = make_pattern(
        torch.arange(num_blocks + extra).expand(1, *is_entry.shape),
        torch.from_numpy(is_entry),
        query_len=length,
        key_len=length + extra * 16,
        block_size=16,
        num_global=num_global,
        num_dense_rows=num_dense,
        is_causal=is_causal,
    )
    check_against_dense(engine(pattern), make_inputs(pattern, (1, 2, 16)), pattern)


@pytest.mark.parametrize(
    ("length", "options", "has_padding", "dropout_p"),
    [(83, {"is_causal": True}, False, 0.25), (50, {"num_extra_tokens": 32}, True, 0.1), (48, {}, False, 1 - 2.0**-40)],
)
def test_dropout(length: int, options: dict[str, Any], has_padding: bool, dropout_p: float):
    """The same weights are dropped forward and backward, in listed and in dense rows and in global columns."""
    pattern = drawn_pattern(make_layout(length, **{"num_random_blocks": 1, **options}), 2, (1, 0))
    padding = make_padding(2, pattern.key_len) if has_padding else None
    torch.manual_seed(7)
    seed = int(torch.randint(1 << 62, (1,)))
    sizes = (2 if has_padding else 1, 2)
    plain = engine(pattern, padding, dropout_p=dropout_p)

    def run(tensors: list[Tensor]) -> Tensor:
        torch.manual_seed(7)
        return plain(tensors)

    inputs = make_inputs(pattern, (*sizes, 16))
    if dropout_p > 0.5:  # next to nothing is kept, and what is would be multiplied by four billion
        assert all(float(x.abs().max()) == 0.0 for x in value_and_gradients(run, inputs))
        return
    factor = kept_factor(seed, (*sizes, length, pattern.key_len), dropout_p)
    check_against_dense(run, inputs, pattern, padding, None, factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype):
    pattern = drawn_pattern(make_layout(83, num_random_blocks=1), 1, (1, 0))
    check_against_dense(engine(pattern), make_inputs(pattern, (1, 1, 32), dtype), pattern)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 32), (32, 16), (16, 16)])
def test_tiles_smaller_than_blocks(block_m: int, block_n: int, monkeypatch: pytest.MonkeyPatch):
    from attn_zoo.kernels.blocks.triton import launch as block_triton_launch

    tiles = block_triton_launch.Tiles(block_m, block_n, 4, 3)
    monkeypatch.setattr(block_triton_launch, "tiles_of", lambda *_: tiles)
    layout = make_layout(110, block_size=32, num_global_blocks=1, num_random_blocks=1, is_causal=True)
    pattern = drawn_pattern(layout, 1, (1, 0))
    check_against_dense(engine(pattern), make_inputs(pattern, (1, 1, 16)), pattern)


@pytest.mark.parametrize("order", ["heads last", "expanded"])
def test_strides_do_not_matter(order: str):
    pattern = SMALLEST.pattern()
    inputs = make_inputs(pattern, (2, 2, 16))
    if order == "heads last":
        strange = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    else:
        strange = [x[:1, :1].expand(2, 2, -1, -1) for x in inputs]
    given = [x.requires_grad_() for x in strange]
    found = torch.autograd.grad(engine(pattern)(given).sum(), given)  # a gradient of stride 0, too
    plain = [x.detach().contiguous().requires_grad_() for x in strange]
    wanted = torch.autograd.grad((engine(pattern)(plain) * torch.ones(2, 2, 48, 16)).sum(), plain)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_content_of_padding_does_not_matter(garbage: float):
    pattern = SMALLEST.pattern()
    inputs, padding = make_inputs(pattern, (2, 1, 16)), make_padding(2, 48)
    spoiled = [inputs[0], *(x.masked_fill(padding[:, None, :, None], garbage) for x in inputs[1:])]
    clean, found = (value_and_gradients(engine(pattern, padding), given) for given in (inputs, spoiled))
    assert all(torch.equal(a, b) for a, b in zip(clean, found, strict=True))
    output, _, grad_key, grad_value = found
    assert output[1].abs().max() == 0
    for gradient in (grad_key, grad_value):
        assert gradient.masked_select(padding[:, None, :, None]).abs().max() == 0


def test_low_scores_do_not_overflow():
    # A score of zero, as keys beyond the end would have, would weigh exp(324) here.
    pattern = drawn_pattern(make_layout(40, num_global_blocks=1, num_random_blocks=0), 1, (1, 0))
    query, key, value = make_inputs(pattern, (1, 1, 16))
    inputs = [9 + query / 9, -9 + key / 9, value]
    found = value_and_gradients(engine(pattern), inputs)
    exact = value_and_gradients(lambda x: dense_attention(x, pattern), [x.double() for x in inputs])
    for actual, wanted in zip(found, exact, strict=True):
        # Scores and log-sum-exp are rounded at their own size, 324 / ln 2, and weights change by as much.
        bound = 4 * torch.finfo(torch.float32).eps * 324 / 0.69 * max(1.0, float(wanted.abs().max()))
        assert float((actual - wanted).abs().max()) <= bound


def test_saved_tensors_are_linear_in_the_length():
    for length in (32, 64):
        pattern = drawn_pattern(make_layout(length, num_global_blocks=1, num_random_blocks=0), 1, (1, 0))
        inputs = [x.requires_grad_() for x in make_inputs(pattern, (1, 1, 16))]
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            if tensor.is_floating_point():
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine(pattern)(inputs)
        assert sum(sizes.values()) == length * 4 * (4 * 16 + 1)  # query, key, value, output and log-sum-exp


def test_a_model_around_it_compiles_in_one_graph():
    pattern = drawn_pattern(make_layout(48, num_global_blocks=1, num_random_blocks=0), 1, (1, 0))
    inputs = make_inputs(pattern, (1, 1, 16))

    def model(tensors: list[Tensor]) -> Tensor:
        return engine(pattern)([2 * x for x in tensors]) + 1

    wanted = value_and_gradients(model, inputs)  # the first call transposes the table, which depends on its content
    found = value_and_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("batch_size", "tables", "is_causal", "has_padding", "has_global"),
    [(2, 2, False, True, False), (1, 2, True, False, False), (2, 1, True, True, True)],
)
def test_tables_made_of_the_data(batch_size: int, tables: int, is_causal: bool, has_padding: bool, has_global: bool):
    """Rows of any number of blocks, and of none, for every batch entry and pair of heads."""
    pattern = random_table(batch_size, tables, 70, is_causal=is_causal, has_global=has_global)
    padding = make_padding(batch_size + 1, 70)[:-1] if has_padding else None  # of an entry without keys no table shows
    heads = pattern.per_head(2 * tables)  # what the reference broadcasts
    run, inputs = engine(pattern, padding), make_inputs(pattern, (batch_size, 2 * tables, 16))
    check_against_dense(run, inputs, heads, padding)


def test_dropout_under_a_table_of_the_data():
    pattern = random_table(2, 1, 50, is_causal=True)
    torch.manual_seed(7)
    seed = int(torch.randint(1 << 62, (1,)))
    plain = engine(pattern, dropout_p=0.25)

    def run(tensors: list[Tensor]) -> Tensor:
        torch.manual_seed(7)
        return plain(tensors)

    factor = kept_factor(seed, (2, 2, 50, 50), 0.25)
    check_against_dense(run, make_inputs(pattern, (2, 2, 16)), pattern, factor=factor)


@pytest.mark.parametrize(
    "options",
    [
        {"reach": 12, "dilation": 4, "is_causal": True},
        {"reach": 10, "num_global_tokens": 3},
        {"reach": 3, "stride": 24, "is_causal": True, "num_global_tokens": 18},
        {"reach": 40, "dilation": 20, "stride": 33},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_padding", [False, True])
def test_rules_for_tokens(options: dict[str, Any], has_padding: bool):
    pattern = TokenLayout(query_len=70, block_size=16, **options).pattern()
    padding = make_padding(1, 70) if has_padding else None
    check_against_dense(engine(pattern, padding), make_inputs(pattern, (1, 1, 16)), pattern, padding)


def test_the_log_sum_exp_and_its_gradient():
    pattern, padding = random_table(2, 1, 50, is_causal=True), make_padding(2, 50)
    inputs = make_inputs(pattern, (2, 2, 16))
    keep = pattern.to_dense() & ~padding[:, None, None]

    def run(x: list[Tensor]) -> Tensor:
        query, key, value = x
        output, lse = block_sparse_attention_with_lse(
            query, key, value, pattern, key_padding_mask=padding, backend="triton"
        )
        assert torch.equal(lse.isneginf(), ~keep.any(-1).expand_as(lse))
        return output.square().sum(-1) + lse.masked_fill(lse.isneginf(), 0.0)

    def dense(x: list[Tensor]) -> Tensor:
        scores = (x[0] @ x[1].mT / 4).masked_fill(~keep, float("-inf"))
        is_dead = scores.isneginf().all(-1)
        lse = scores.masked_fill(is_dead[..., None], 0.0).logsumexp(-1)
        return dense_attention(x, pattern, padding).square().sum(-1) + lse.masked_fill(is_dead, 0.0)

    actual, exact = value_and_gradients(run, inputs), value_and_gradients(dense, [x.double() for x in inputs])
    for one, wanted in zip(actual, exact, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("query_len", "key_len"), [(48, 70), (50, 32)])
def test_any_two_lengths(query_len: int, key_len: int):
    pattern = cross_table(query_len, key_len)
    check_against_dense(engine(pattern), make_inputs(pattern, (1, 2, 16)), pattern)


@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_sorted_by_the_block_they_chose(is_causal: bool):
    """MoBA: two calls of the kernels, one of them under a table of the data, merged by their log-sum-exp."""
    build = BuildContext(embed_dim=32, num_heads=2, max_seq_len=64, is_causal=is_causal)
    module = build_attention("moba", build, block_size=16, top_k=2, backend="triton")
    query, key, value = (torch.randn(1, 2, 55, 16) for _ in range(3))
    with recording() as paths:
        actual = value_and_gradients(lambda x: module(x[0], x[1], x[2]), [query, key, value])
    assert paths == ["block_sparse.triton"]
    routing = module.route(query, key)

    def reference(x: list[Tensor]) -> Tensor:
        output: Tensor = module.reference(x[0], x[1], x[2], routing=routing)  # type: ignore[call-arg]
        return output

    expected = value_and_gradients(reference, [x.double() for x in (query, key, value)])
    for one, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=0, atol=1e-5)


def test_blocks_that_are_always_seen_blocks_that_are_chosen_and_a_window():
    """NSA: three calls of the kernels, two of them merged by their log-sum-exp."""
    build = BuildContext(embed_dim=32, num_heads=2, num_kv_heads=1, max_seq_len=128, is_causal=True)
    sizes = {"compress_len": 8, "compress_stride": 4, "block_size": 16, "num_blocks": 3, "window_size": 20}
    module = build_mixer("nsa", build, backend="triton", **sizes)
    hidden = torch.randn(1, 75, 32)
    with recording() as paths:
        actual = value_and_gradients(lambda x: module(x[0]), [hidden])
    assert set(paths) == {"block_sparse.triton", "sdpa.flash"}
    exact, routing = copy.deepcopy(module).double(), module.route(hidden)

    def reference(x: list[Tensor]) -> Tensor:
        output = exact.reference(x[0], routing=routing)  # type: ignore[call-arg]
        assert isinstance(output, Tensor)
        return output

    expected = value_and_gradients(reference, [hidden.double()])
    for one, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=0, atol=1e-5)
