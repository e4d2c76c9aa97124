"""The backbone: heads, positions, norms, padding, decoding, and the same start for every variant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_zoo import describe, list_variants
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.model import Classifier, LanguageModel, ModelConfig, Retriever, Seq2Seq
from attn_zoo.model.heads import pool_mean
from attn_zoo.model.positions import sinusoidal_positions
from attn_zoo.model.stacks import PositionBatchNorm
from attn_zoo.registry import variants

CONFIG = ModelConfig(variant="full", vocab_size=20, max_seq_len=24, embed_dim=32, ffn_dim=48)
SHORT = {"nsa": {"compress_len": 8, "compress_stride": 8}}  # by default it compresses 32 tokens into one


def some_tokens(batch_size: int = 3, seq_len: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(1, 20, (batch_size, seq_len), generator=torch.Generator().manual_seed(seed))


def make_model(name: str, like: str = "", **options: Any) -> Classifier | LanguageModel:
    """Return a classifier around a variant; a language model where it, or the variant `like`, is causal only."""
    config = replace(CONFIG, variant=name, **options)
    return Classifier(config, 5) if variants[like or name].capabilities.bidirectional else LanguageModel(config)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "none"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm", "batch_norm"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_never_reaches_the_logits(position, norm, norm_order, pooling):
    config = replace(CONFIG, position=position, norm=norm, norm_order=norm_order, pooling=pooling)
    model = Classifier(config, 5)
    tokens, padding = some_tokens(), torch.zeros(3, 16, dtype=torch.bool)
    padding[1, 5:] = True
    changed = tokens.masked_fill(padding, 7)
    torch.testing.assert_close(model(tokens, padding), model(changed, padding))
    model.eval()
    torch.testing.assert_close(model(tokens, padding)[1], model(tokens[1:2, :5])[0])


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "alibi", "none"])
def test_only_a_model_without_positions_is_blind_to_order(position):
    model = Classifier(replace(CONFIG, position=position), 5).double().eval()
    tokens = some_tokens()
    shuffled = tokens[:, torch.randperm(16, generator=torch.Generator().manual_seed(1))]
    is_same = torch.allclose(model(tokens), model(shuffled), atol=1e-9)
    assert is_same == (position == "none")


@pytest.mark.parametrize("name", list_variants())
def test_every_parameter_learns(name):
    capabilities = variants[name].capabilities
    seq_len = 16 if capabilities.variable_seq_len else CONFIG.max_seq_len
    model = make_model(name, pooling="cls", options=SHORT.get(name, {}))
    model(some_tokens(seq_len=seq_len)).square().sum().backward()
    without = [
        key for key, weight in model.named_parameters() if weight.grad is None or not weight.grad.isfinite().all()
    ]
    # A length below max_seq_len may leave rows of a table unused, but never a whole parameter.
    assert without == []


@pytest.mark.parametrize("name", list_variants())
def test_backbones_of_all_variants_start_equal(name):
    one, two = make_model("full", like=name), make_model(name)
    first, second = one.state_dict(), two.state_dict()
    shared = [key for key in first if key in second]
    # Projections too, where the variant consumes heads; a mixer of its own has what it has.
    own = "attention" if variants[name].attention is not None else ".mixer."
    assert {key for key in first if own not in key} <= set(shared)
    for key in shared:
        if own not in key or first[key].shape == second[key].shape:  # one of its own may be wider
            torch.testing.assert_close(first[key], second[key], rtol=0, atol=0)


def test_building_is_seeded_and_leaves_the_global_random_state_alone():
    before = torch.random.get_rng_state()
    one = Classifier(CONFIG, 5)
    assert torch.equal(before, torch.random.get_rng_state())
    same, other = Classifier(CONFIG, 5), Classifier(replace(CONFIG, seed=1), 5)
    weights = [model.state_dict()["head.0.weight"] for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_layers_do_not_share_weights_by_accident():
    state = Classifier(CONFIG, 5).state_dict()
    first, second = (state[f"tower.encoder.blocks.{layer}.ffn.up.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "alibi"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
@pytest.mark.parametrize("name", list_variants(causal=True))
def test_greedy_decoding_equals_running_everything_again(name, position, norm_order):
    config = replace(CONFIG, variant=name, position=position, norm_order=norm_order)
    if position in ("rotary", "alibi") and position not in describe(name).capabilities.positions:
        with pytest.raises(UnsupportedError, match=f"position '{position}'"):
            LanguageModel(config)
        return
    model = LanguageModel(config).double().eval()
    prompt = some_tokens(2, 4)
    slow = prompt
    with torch.no_grad():
        for _ in range(8):
            slow = torch.cat([slow, model(slow)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(prompt, 8), slow)


@pytest.mark.parametrize(
    "name", [name for name in list_variants(causal=True) if variants[name].capabilities.decode != "none"]
)
def test_decoding_under_autocast_is_as_near_as_running_everything(name):
    """What is kept has the type that autocast gives projections; the weights are in float32."""
    model, tokens = LanguageModel(replace(CONFIG, variant=name)).eval(), some_tokens(2, 12)
    with torch.no_grad():
        exact = model(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            whole = model(tokens)
            hidden, state = model.decoder.prefill(tokens[:, :5], model.decoder.init_state(2))
            steps = [model.head(hidden)]
            for position in range(5, 12):
                hidden, state = model.decoder.prefill(tokens[:, position : position + 1], state)
                steps.append(model.head(hidden))
    assert whole.dtype == torch.bfloat16
    assert (torch.cat(steps, 1) - exact).norm() <= 1.5 * (whole - exact).norm()


def test_language_model_sees_no_future():
    model = LanguageModel(CONFIG).eval()
    tokens = some_tokens(1)
    changed = tokens.clone()
    changed[0, 10] = 1 + tokens[0, 10] % 19
    one, two = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :10], two[:, :10])
    assert not torch.allclose(one[:, 10:], two[:, 10:])


def test_batch_norm_is_refused_in_a_decoder():
    with pytest.raises(UnsupportedError, match="leak"):
        LanguageModel(replace(CONFIG, norm="batch_norm"))


def test_seq2seq_decodes_what_it_predicts_and_ignores_source_padding():
    model = Seq2Seq(replace(CONFIG, target_vocab_size=11)).double().eval()
    source, padding = some_tokens(2, 9), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    output = model.generate(source, 5, start_token=1, source_padding_mask=padding)
    start = torch.ones(2, 1, dtype=torch.long)
    logits = model(source, torch.cat([start, output[:, :-1]], dim=1), padding)
    assert logits.shape == (2, 5, 11)
    assert torch.equal(logits.argmax(-1), output)
    changed = source.masked_fill(padding, 3)
    assert torch.equal(model.generate(changed, 5, start_token=1, source_padding_mask=padding), output)


def test_seq2seq_uses_the_source():
    model = Seq2Seq(CONFIG).eval()
    target = some_tokens(1, 4)
    assert not torch.allclose(model(some_tokens(1, 9, 1), target), model(some_tokens(1, 9, 2), target))


def test_cross_attention_may_use_another_variant():
    model = Seq2Seq(replace(CONFIG, cross_variant="full"))
    assert model.decoder.blocks[0].cross is not None


def test_retriever_compares_two_texts():
    model = Retriever(CONFIG).eval()
    one, two = some_tokens(2, 9, 1), some_tokens(2, 12, 2)
    assert model(one, two).shape == (2, 2)
    assert not torch.allclose(model(one, two), model(two, one))


def test_tied_embeddings_are_one_parameter():
    model = LanguageModel(replace(CONFIG, has_tied_embeddings=True))
    assert model.head.weight is model.decoder.embedding.token.weight


def test_too_long_input_says_what_fits():
    with pytest.raises(ValueError, match="at most max_seq_len = 24 tokens; got 25"):
        Classifier(replace(CONFIG, pooling="cls"), 5)(some_tokens(1, 25))


def test_impossible_sizes_are_all_reported():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(variant="full", vocab_size=0, max_seq_len=4, dropout_p=1.0)
    assert [path for path, _ in caught.value.problems] == ["vocab_size", "dropout_p"]


def test_pool_mean_divides_by_the_true_length():
    hidden = torch.tensor([[[1.0], [3.0], [float("nan")]], [[1.0], [2.0], [3.0]]])
    padding = torch.tensor([[False, False, True], [True, True, True]])
    assert pool_mean(hidden, padding).tolist() == [[2.0], [0.0]]


def test_sums_over_a_long_sequence_are_not_kept_in_float16():
    hidden, nothing = torch.full((2, 16_384, 1), 5.0).half(), torch.zeros(2, 16_384, dtype=torch.bool)
    assert pool_mean(hidden, nothing).tolist() == [[5.0], [5.0]]
    norm = PositionBatchNorm(1).half()
    given = torch.randn(8, 16_384, 1, generator=torch.Generator().manual_seed(0)).half()
    normalised = norm(given, None)
    assert normalised.dtype == torch.float16
    assert normalised.float().mean().item() == pytest.approx(0.0, abs=1e-3)
    assert normalised.float().std().item() == pytest.approx(1.0, abs=1e-2)
    assert bool(norm.running_var.isfinite().all())


def test_positions_have_the_default_dtype():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert sinusoidal_positions(4, 8).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert sinusoidal_positions(4, 8).dtype == torch.float32


def test_batch_norm_equals_torch_on_the_unpadded_positions():
    ours, theirs = PositionBatchNorm(8), torch.nn.BatchNorm1d(8)
    hidden, padding = torch.randn(4, 6, 8), torch.zeros(4, 6, dtype=torch.bool)
    padding[0, 2:] = padding[3, 1:] = True
    expected = theirs(hidden[~padding])
    torch.testing.assert_close(ours(hidden, padding)[~padding], expected)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(hidden, padding)[~padding], theirs(hidden[~padding]))


def test_sinusoidal_positions_follow_the_paper():
    table = sinusoidal_positions(50, 6)
    expected = torch.tensor(7.0 / 10_000 ** (4 / 6))
    torch.testing.assert_close(table[7, 4], expected.sin())
    torch.testing.assert_close(table[7, 5], expected.cos())
