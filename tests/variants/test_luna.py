"""Luna: pack and unpack by the definition, the memory that passes between layers, padding, cost, a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import BuildContext, ConfigError, UnsupportedError, build_attention, build_mixer
from attn_zoo.attention.contract import AbstractMixer, Mixed
from attn_zoo.kernels.trace import recording
from attn_zoo.measure.flop_count import count_operations
from attn_zoo.model import Classifier, ModelConfig
from attn_zoo.registry import variants
from attn_zoo.training import run_training
from attn_zoo.training.weights import load_trained
from tests.training.toy_task import cell, toy_task

BATCH, HEADS, DIM, EMBED, PACKED = 2, 2, 3, 6, 4


def make(layer_index: int = 0, *, packed_len: int = PACKED, **build: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": EMBED, "num_heads": HEADS, "max_seq_len": 64, "num_layers": 2, **build}
    torch.manual_seed(layer_index)
    context = BuildContext(**sizes).at_layer(layer_index)
    return build_mixer("luna", context, packed_len=packed_len).double().eval()


def draw(length: int, embed_dim: int = EMBED) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(BATCH, length, embed_dim, generator=generator, dtype=torch.float64)


def padding_for(length: int) -> Tensor:
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[0, [0, length // 2, length - 1]] = True
    mask[1] = True
    return mask


def attend(query: Tensor, context: Tensor, hidden_keys: list[bool]) -> Tensor:
    """Write the attention of all heads out, `[n, W]` over `[m, W]`, row by row."""
    rows = []
    for q in query:
        heads = []
        for head in range(HEADS):
            part = slice(head * DIM, (head + 1) * DIM)
            seen = [c[part] for c, is_hidden in zip(context, hidden_keys, strict=True) if not is_hidden]
            if not seen:
                heads.append(torch.zeros(DIM, dtype=torch.float64))
                continue
            weights = torch.softmax(torch.stack([q[part] @ c / DIM**0.5 for c in seen]), 0)
            heads.append(sum(w * c for w, c in zip(weights, seen, strict=True)))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def by_the_definition(mixer: Any, hidden: Tensor, mask: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and Y_P + P for a memory that was normalised already."""
    outputs, carries = [], []
    for entry, rows in enumerate(hidden):
        padded = [False] * len(rows) if mask is None else mask[entry].tolist()
        packed = attend(mixer.pack_query_proj(memory[entry]), mixer.pack_context_proj(rows), padded)
        unpacked = attend(mixer.query_proj(rows), mixer.context_proj(packed), [False] * len(packed))
        outputs.append(mixer.out_proj(unpacked))
        carries.append(packed + memory[entry])
    return torch.stack(outputs), torch.stack(carries)


@pytest.mark.parametrize("length", [3, 11])
@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("embed_dim", [EMBED, 10])
def test_two_layers_are_the_definition(length: int, has_padding: bool, embed_dim: int):
    sizes = {"embed_dim": embed_dim, "head_dim": DIM}
    first, second, hidden = make(0, **sizes), make(1, **sizes), draw(length, embed_dim)
    mask = padding_for(length) if has_padding else None
    memory = torch.nn.functional.layer_norm(first.memory, (HEADS * DIM,)).expand(BATCH, -1, -1)
    output, carry = by_the_definition(first, hidden, mask, memory)
    memory = torch.nn.functional.layer_norm(carry, (HEADS * DIM,))
    expected = (output, carry, *by_the_definition(second, output, mask, memory))
    for run in ("mix", "reference"):
        one = getattr(first, run)(hidden, key_padding_mask=mask)
        two = getattr(second, run)(one.hidden, key_padding_mask=mask, carry=one.carry)
        for actual, wanted in zip((*one, *two), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_every_layer_reads_the_memory_of_the_one_below():
    first, second, hidden = make(0), make(1), draw(9)
    carry = first.mix(hidden).carry
    assert carry is not None
    expected = second.mix(hidden, carry=carry).hidden
    assert (second.mix(hidden, carry=carry + draw(PACKED)).hidden - expected).abs().max() > 1e-3


def test_the_model_carries_the_memory_and_all_parameters_learn():
    model = Classifier(
        ModelConfig(variant="luna", options={"packed_len": 4}, vocab_size=9, max_seq_len=20, num_layers=3), 3
    )
    tokens = torch.randint(1, 9, (2, 20), generator=torch.Generator().manual_seed(0))
    seen: list[Mixed] = []
    mixers: list[Any] = [block.mixer for block in model.encoder.blocks]
    for mixer in mixers:
        mixer.register_forward_hook(lambda _m, _i, output: seen.append(output))
    model(tokens).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    assert len([name for name, _ in model.named_parameters() if name.endswith(".memory")]) == 1
    (first,) = torch.autograd.grad(model(tokens).sum(), mixers[0].memory)
    assert first.abs().max() > 0
    # Without what the first layer passed on, the others see another memory.
    expected = model(tokens)
    mixers[0].register_forward_hook(lambda _m, _i, output: Mixed(output.hidden, -output.carry))
    assert (model(tokens) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("has_padding", [False, True])
def test_gradients_agree_with_finite_differences(has_padding: bool):
    mixer, mask = make(1), padding_for(5) if has_padding else None

    def run(hidden: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
        return tuple(mixer.mix(hidden, key_padding_mask=mask, carry=carry))

    assert torch.autograd.gradcheck(run, (draw(5).requires_grad_(), draw(PACKED).requires_grad_()))


def test_padding_reaches_neither_output_nor_memory():
    mixer, hidden = make(), draw(7)
    longer = torch.cat([hidden, torch.full((BATCH, 4, EMBED), 1e6, dtype=torch.float64)], 1)
    mask = torch.zeros(BATCH, 11, dtype=torch.bool)
    mask[:, 7:] = True
    plain, padded = mixer.mix(hidden), mixer.mix(longer, key_padding_mask=mask)
    torch.testing.assert_close(padded.hidden[:, :7], plain.hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(padded.carry, plain.carry, rtol=0, atol=1e-12)


def test_dropout_acts_on_both_attentions():
    mixer, hidden = make(dropout_p=0.5).train(), draw(9)
    torch.manual_seed(0)
    one, two = mixer.mix(hidden), mixer.mix(hidden)
    assert not torch.equal(one.hidden, two.hidden)
    assert not torch.equal(one.carry, two.carry)
    assert torch.equal(mixer.eval()(hidden), make()(hidden))


@pytest.mark.parametrize("length", [64, 256])
def test_cost_is_what_runs_in_both_directions(length: int):
    mixer, variant = make(embed_dim=8, head_dim=DIM, max_seq_len=length), variants["luna"]
    hidden = draw(length, 8).requires_grad_()
    shape = mixer.build.shape(BATCH, length, config=mixer.config, form="mixer")
    forward = count_operations(lambda: mixer(hidden))
    both = count_operations(lambda: mixer(hidden).sum().backward())
    assert forward is not None
    assert both is not None
    assert forward.products == variant.flops(shape)
    ratio = variant.backward_ratio(shape)
    assert ratio is not None
    assert both.products == pytest.approx((1 + ratio) * forward.products, rel=0.01)
    for layer in (mixer, make(1, embed_dim=8, head_dim=DIM)):
        shape = layer.build.shape(BATCH, length, config=layer.config, form="mixer")
        # A later layer reads the norm of the memory that it is given, and not the first memory.
        read = [x.numel() for name, x in layer.named_parameters() if name != "memory" or layer is mixer]
        assert sum(read) * 4 == variant.min_bytes(shape, 4) - shape.io_bytes(4)
    with recording() as paths:
        mixer(hidden)
    assert paths == ["sdpa.flash"]


@pytest.mark.parametrize(
    ("build", "capability"),
    [
        ({"is_causal": True}, "causal"),
        ({"is_cross": True}, "cross_attention"),
        ({"num_kv_heads": 1}, "grouped_query"),
        ({"position": "rotary"}, "positions"),
    ],
)
def test_refusals(build: dict[str, Any], capability: str):
    with pytest.raises(UnsupportedError) as caught:
        make(**build)
    assert caught.value.capability == capability


def test_impossible_options():
    with pytest.raises(ConfigError, match="packed_len: expected at least 1"):
        make(packed_len=0)
    with pytest.raises(UnsupportedError, match="build_mixer"):
        build_attention("luna", BuildContext(embed_dim=EMBED, num_heads=2, max_seq_len=64))


def test_one_graph_for_the_compiler():
    mixer, hidden = make(), draw(16)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), mixer(hidden))


def test_it_trains_with_two_layers_and_is_stored(tmp_path: Path):
    """The first memory is one parameter of two layers, which files hold under both names."""
    path = tmp_path / "weights.safetensors"
    with toy_task():
        result = run_training(
            cell(variant="luna", num_layers=2, dropout_p=0.1), checkpoint_dir=tmp_path, weights_path=path
        )
        mixers: list[Any] = [part for part in load_trained(path).model.modules() if isinstance(part, AbstractMixer)]
    assert mixers[0].memory is mixers[1].memory
    assert (result.status, result.reason) == ("ok", "")
    score = result.score
    assert score is not None
    assert score.train_flops
    assert score.curve[-1]["train_loss"] < score.curve[0]["train_loss"]
