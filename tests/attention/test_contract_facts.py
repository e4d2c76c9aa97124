"""What the contract says once for all variants: calls checked once, prefill, a carry, narrowed capabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from attn_zoo.attention import AbstractMixer, BuildContext, Mixed, build_attention, build_mixer
from attn_zoo.errors import ConfigError, UnsupportedError
from attn_zoo.metadata import Capabilities
from attn_zoo.model import Classifier, Encoder, LanguageModel, ModelConfig
from attn_zoo.registry import VariantConfig, variants
from tests.conformance.broken import Broken, Softmax, registered
from tests.conformance.broken_contract import CARRY, SortsByTheFuture, SoundCarry

BUILD = BuildContext(embed_dim=8, num_heads=2, max_seq_len=16)


def heads(length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, batch, 2, length, 4)
    return query, key, value


def test_a_signature_is_checked_once(monkeypatch):
    module = build_attention("full", BUILD)
    checked: list[torch.Size] = []
    check = module._check

    def count(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
        checked.append(query.shape)
        check(query, key, value, mask)

    monkeypatch.setattr(module, "_check", count)
    for length in (5, 7, 5, 5, 7):
        module(*heads(length))
    assert [shape[2] for shape in checked] == [5, 7]
    for _ in range(2):  # what is refused is not remembered
        with pytest.raises(ValueError, match="max_seq_len = 16"):
            module(*heads(17))
    query, key, value = heads(5)
    with pytest.raises(ValueError, match="value: expected dtype"):
        module(query, key, value.double())
    with pytest.raises(ValueError, match="key_padding_mask: expected bool"):
        module(query, key, value, key_padding_mask=torch.zeros(2, 5))


def test_remembered_signatures_are_bounded(monkeypatch):
    monkeypatch.setattr("attn_zoo.attention.contract.MAX_SIGNATURES", 3)
    module = build_attention("full", BUILD)
    for length in range(1, 9):
        module(*heads(length))
    assert len(module._checked) <= 3


def test_a_fixed_length_is_enforced():
    class Fixed(Softmax):
        pass

    fixed = Broken(cls=Fixed, check="", capabilities={"variable_seq_len": False})
    with registered(fixed) as name:
        module = build_attention(name, BUILD)
        assert module(*heads(16)).shape == (2, 2, 16, 4)
        with pytest.raises(UnsupportedError, match="length 15 is not the max_seq_len = 16") as refusal:
            module(*heads(15))
        assert refusal.value.capability == "variable_seq_len"


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowing(VariantConfig):
    how: Literal["not", "less", "more"] = "not"

    def narrow(self, capabilities: Capabilities) -> Capabilities:
        if self.how == "less":
            return capabilities.without(causal="too short").without(cross_attention="no second sequence")
        return replace(capabilities, key_padding_mask=True) if self.how == "more" else capabilities


class Narrowed(Softmax):
    pass


def test_options_narrow_what_a_variant_can_do():
    broken = Broken(cls=Narrowed, check="", capabilities={"causal": True, "cross_attention": True}, config=Narrowing)
    causal = replace(BUILD, is_causal=True)
    with registered(broken) as name:
        build_attention(name, causal)
        with pytest.raises(UnsupportedError, match="no causal form: too short"):
            build_attention(name, causal, how="less")
        module = build_mixer(name, BUILD, how="less")
        assert module.capabilities is not None
        assert not module.capabilities.cross_attention
        with pytest.raises(ConfigError, match="may only take away; it adds key_padding_mask"):
            build_attention(name, BUILD, how="more")


@pytest.mark.parametrize("name", ["full", "linear_attention", "local_window", "global_pooling"])
def test_prefill_starts_from_a_state(name):
    mixer = build_mixer(name, replace(BUILD, is_causal=True)).double().eval()
    hidden = torch.randn(2, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = mixer(hidden)
        first, state = mixer.prefill(hidden[:, :5])
        second, state = mixer.step(hidden[:, 5:6], state)
        third, _ = mixer.prefill(hidden[:, 6:], state)
    torch.testing.assert_close(torch.cat([first, second, third], dim=1), expected)


def test_prefill_refuses_what_step_refuses():
    with pytest.raises(UnsupportedError, match="no step-by-step decoding"):
        build_mixer("linformer", BUILD).prefill(torch.randn(1, 3, 8))
    with pytest.raises(UnsupportedError, match="decoding needs is_causal=True"):
        build_mixer("full", BUILD).prefill(torch.randn(1, 3, 8))


DECODING = [name for name in variants if variants[name].capabilities.decode != "none"]


def forms(name: str, max_seq_len: int = 16) -> Iterator[tuple[Any, Callable[[int, int], tuple[Tensor, ...]]]]:
    """Yield the causal module in each form that the variant has, and what draws its tokens, by batch and length."""
    build = replace(BUILD, is_causal=True, max_seq_len=max_seq_len)
    if variants[name].attention is not None:
        yield build_attention(name, build).eval(), lambda batch, length: heads(length, batch)
    yield build_mixer(name, build).eval(), lambda batch, length: (torch.randn(batch, length, 8),)


@pytest.mark.parametrize("name", DECODING)
def test_a_prefill_of_nothing_is_refused(name):
    for module, draw in forms(name):
        _, state = module.prefill(*draw(2, 3))
        for before in (state, module.init_state(2), None):
            with pytest.raises(ValueError, match=r"expected at least one token; got \[2, "):
                module.prefill(*draw(2, 0), before)


def test_a_variant_that_only_steps_refuses_a_prefill_of_nothing():
    class Steps(AbstractMixer):
        def forward(
            self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
        ) -> Tensor:
            return hidden

        def step(self, hidden: Tensor, state: None) -> tuple[Tensor, None]:
            return hidden, state

        def init_state(self, batch_size: int, **options: Any) -> None:
            """Return nothing."""

    mixer, hidden = Steps(None, BUILD), torch.randn(2, 3, 8)
    assert torch.equal(mixer.prefill(hidden=hidden)[0], hidden)
    with pytest.raises(ValueError, match=r"hidden: expected at least one token; got \[2, 0, 8\]"):
        mixer.prefill(hidden=hidden[:, :0])


@pytest.mark.parametrize("name", DECODING)
def test_tokens_are_of_as_many_sequences_as_the_state(name):
    for module, draw in forms(name):
        for of_state, of_tokens in ((3, 1), (1, 3)):
            _, state = module.prefill(*draw(of_state, 3))
            for read, length in ((module.step, 1), (module.prefill, 2)):
                with pytest.raises((ValueError, RuntimeError), match=r"expected|Expected"):
                    read(*draw(of_tokens, length), state)


ENDING = ("cosformer",)
"""Weights of these are zero between tokens that are as far apart as the longest length: beyond it they refuse."""


@pytest.mark.parametrize(
    "name", [name for name in DECODING if variants[name].capabilities.decode == "recurrent" and name not in ENDING]
)
def test_a_state_of_constant_size_goes_on_beyond_the_length_it_was_built_for(name):
    (short, draw), (long, _) = list(forms(name, 4))[-1], list(forms(name, 12))[-1]
    short.load_state_dict(long.state_dict())
    (hidden,) = draw(2, 12)
    output, state = short.prefill(hidden[:, :5])
    rows = [output]
    for i in range(5, 8):
        row, state = short.step(hidden[:, i : i + 1], state)
        rows.append(row)
    rows.append(short.prefill(hidden[:, 8:], state)[0])
    torch.testing.assert_close(torch.cat(rows, dim=1), long(hidden))


def test_a_carry_moves_from_layer_to_layer():
    with registered(Broken(cls=SoundCarry, check="", capabilities=CARRY)) as name:
        first, second = (build_mixer(name, replace(BUILD, num_layers=2, layer_index=layer)) for layer in (0, 1))
        hidden = torch.randn(2, 3, 8)
        assert isinstance(first(hidden), Tensor)
        output = first.mix(hidden)
        assert output.carry is not None
        alone, after = second.mix(output.hidden), second.mix(output.hidden, carry=output.carry)
        assert not torch.equal(alone.hidden, after.hidden)
        with pytest.raises(ValueError, match="carry: expected"):
            second.mix(hidden, carry=output.carry[:1])
        config = ModelConfig(variant=name, vocab_size=5, max_seq_len=6, embed_dim=8, num_layers=2, position="learned")
        encoder, tokens = Encoder(config).eval(), torch.randint(5, (2, 6))
        with torch.no_grad():
            whole = encoder(tokens)[0]
            for block in encoder.blocks:  # the same without what passes
                block.register_forward_pre_hook(
                    lambda _, args, named: (args, {**named, "carry": None}), with_kwargs=True
                )
            assert not torch.allclose(encoder(tokens)[0], whole)


def test_a_carry_is_declared_or_refused():
    hidden = torch.randn(2, 3, 8)
    with pytest.raises(UnsupportedError, match="passes nothing between layers"):
        build_mixer("full", BUILD).mix(hidden, carry=torch.zeros(2, 8))

    class Secretive(AbstractMixer):
        def forward(
            self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
        ) -> Tensor | Mixed:
            return Mixed(hidden, hidden)

    with (
        registered(Broken(cls=Secretive, check="", capabilities={"positions": ("none",)})) as name,
        pytest.raises(TypeError, match="without declaring has_carry"),
    ):
        build_mixer(name, BUILD)(hidden)

    class Forgetful(AbstractMixer):
        def forward(
            self,
            hidden: Tensor,
            *,
            context: Tensor | None = None,
            key_padding_mask: Tensor | None = None,
            carry: Tensor | None = None,
        ) -> Tensor | Mixed:
            return hidden

    with (
        registered(Broken(cls=Forgetful, check="", capabilities=CARRY)) as name,
        pytest.raises(TypeError, match="must return Mixed"),
    ):
        build_mixer(name, BUILD)(hidden)
    with pytest.raises(ValueError, match="a carry between layers cannot be decoded"):
        replace(variants["full"].capabilities, has_carry=True)


def test_routing_that_sees_the_future_times_and_trains_but_models_no_language():
    masked = Broken(cls=SortsByTheFuture, check="", capabilities={"causal": "masked"})
    with registered(masked) as name:
        build_attention(name, replace(BUILD, is_causal=True))(*heads(5))
        config = ModelConfig(variant=name, vocab_size=5, max_seq_len=6, embed_dim=8)
        Classifier(config, 2)
        for make in (LanguageModel, lambda config: Encoder(config, is_causal=True)):
            with pytest.raises(UnsupportedError, match="masked, but its routing sees the future"):
                make(config)


def test_claims_know_the_form():
    full = variants["full"]
    shape = BUILD.shape(2, 16, config=full.config())
    mixer = replace(shape, form="mixer")
    flops, ratio = full.flops(shape), full.backward_ratio(mixer)
    assert flops == 4 * 2 * 2 * 16 * 16 * 4
    assert full.projection_flops(shape) == 0
    projections = 4 * 2 * 2 * 16 * 8 * 8
    assert full.flops(mixer) == flops + projections
    assert ratio == pytest.approx((2.5 * flops + 2 * projections) / (flops + projections))
    assert full.min_bytes(mixer, 4) == 4 * (2 * 2 * 16 * 8 + 4 * 8 * 8 + 4 * 8)
    parameters = sum(item.numel() for item in nn.ModuleList([build_mixer("full", BUILD)]).parameters())
    assert 4 * parameters == full.min_bytes(mixer, 4) - mixer.io_bytes(4)


@pytest.mark.parametrize("name", [name for name in DECODING if variants[name].attention is not None])
def test_new_heads_that_do_not_fit_are_refused(name):
    module = build_attention(name, replace(BUILD, is_causal=True)).eval()
    _, state = module.prefill(*heads(3))
    query, key, value = heads(2)
    one = slice(0, 1)
    for read in (module.step, module.prefill):
        with pytest.raises(ValueError, match=r"key: expected .* = \[3, 2, 1, 4\]; got \[2, 2, 1, 4\]"):
            read(torch.randn(3, 2, 1, 4), key[:, :, one], value[:, :, one], state)
        with pytest.raises(ValueError, match=r"query: expected \[B, heads, length, D\] = \[2, 2, 1, 4\]"):
            read(torch.randn(2, 3, 1, 4), key[:, :, one], value[:, :, one], state)
        with pytest.raises(ValueError, match="key: expected one for each new position, S == L; got L = 1, S = 2"):
            read(query[:, :, one], key, value, state)
    module.prefill(query, key, value, state)  # several tokens that were read once are still no step
    with pytest.raises(ValueError, match=r"query: expected one new position \[B, H, 1, D\]; got \[2, 2, 2, 4\]"):
        module.step(query, key, value, state)
    with pytest.raises(ValueError, match="query: expected at least one token"):  # in any order of the arguments
        module.prefill(state=state, value=value[:, :, :0], key=key[:, :, :0], query=query[:, :, :0])


@pytest.mark.parametrize("name", DECODING)
def test_new_hidden_states_that_do_not_fit_are_refused(name):
    mixer = build_mixer(name, replace(BUILD, is_causal=True)).eval()
    state = mixer.init_state(2)
    for read in (mixer.step, mixer.prefill):
        for given in (torch.randn(2, 1, 7), torch.randn(2, 8)):
            with pytest.raises(ValueError, match=r"hidden: expected \[B, L, E\] with E = 8; got \[2, "):
                read(given, state)
