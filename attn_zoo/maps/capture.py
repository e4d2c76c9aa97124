"""Watch a model read one input: what each of its mixers was given, and what its positions are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_zoo.attention import AbstractMixer
from attn_zoo.errors import ConfigError
from attn_zoo.maps.example import MapInput
from attn_zoo.training.weights import Trained

__all__ = ["MixerCall", "watch"]

CLS = "CLS"


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerCall:
    """One call of one mixer.

    Args:
        mixer: the module.
        name: such as `layer 1` or `decoder layer 2, across`.
        layer: counted from 1.
        hidden: `[1, L, E]`.
        context: `[1, S, E]`, in cross-attention.
        key_padding_mask: bool `[1, S]`, or None.
        rows: names of the queries that are not padding.
        columns: names of the keys that are not padding.
    """

    mixer: AbstractMixer
    name: str
    layer: int
    hidden: Tensor
    context: Tensor | None
    key_padding_mask: Tensor | None
    rows: tuple[str, ...]
    columns: tuple[str, ...]


@contextmanager
def _hooked(model: nn.Module, note: Callable[[str, AbstractMixer, Any, Any], None]) -> Iterator[None]:
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, AbstractMixer):

            def hook(mixer: Any, args: Any, kwargs: Any, path: str = path) -> None:
                note(path, mixer, args, kwargs)

            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch(trained: Trained, given: MapInput, *, of_other: bool = False) -> list[MixerCall]:
    """Run the model on one input and return the calls of its mixers, in their order.

    Args:
        trained: the model.
        given: what it reads.
        of_other: where a model reads two inputs one after the other, the calls for the second one.

    Raises:
        ConfigError: the second input of a task that has one only.
    """
    calls: list[tuple[str, MixerCall]] = []
    batch, is_pair = given.batch, trained.task.spec.kind == "pair"
    if of_other and not is_pair:
        raise ConfigError("--other", [("", f"{trained.task.name} has no second input that is read like the first")])

    def note(path: str, mixer: AbstractMixer, args: Any, kwargs: Any) -> None:
        is_other = trained.task.spec.kind == "seq2seq" and "decoder" in path.split(".")
        if is_pair and path in [seen for seen, _ in calls]:
            is_other = True
        tokens = batch.other_tokens if is_other and batch.other_tokens is not None else batch.tokens
        extra = (CLS,) * (args[0].shape[1] - tokens.shape[1])  # a vector in front of all tokens
        rows = (*extra, *(given.other_symbols if is_other else given.symbols))
        context = kwargs.get("context")
        layer = mixer.build.layer_index + 1
        name = f"layer {layer}"
        if trained.task.spec.kind == "seq2seq":
            name = f"{'decoder' if is_other else 'encoder'} {name}" + (", across" if context is not None else "")
        call = MixerCall(
            mixer=mixer,
            name=name,
            layer=layer,
            hidden=args[0],
            context=context,
            key_padding_mask=kwargs.get("key_padding_mask"),
            rows=rows,
            columns=rows if context is None else given.symbols,
        )
        calls.append((path, call))

    model = trained.model.eval()
    with torch.no_grad(), _hooked(model, note):
        trained.objective.outputs(model, batch)
    if is_pair:
        half = len(calls) // 2  # the towers read one after the other
        calls = calls[half:] if of_other else calls[:half]
    return [call for _, call in calls]
