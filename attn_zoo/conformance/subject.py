"""The subject of a check: one form of one variant under one set of options, and how to build and call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from attn_zoo.attention import (
    AbstractAttention,
    AbstractMixer,
    BuildContext,
    Mixed,
    MultiHeadMixer,
    build_attention,
    build_mixer,
)
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance.check import Finding, Violation, refused
from attn_zoo.conformance.inputs import Inputs, padding_mask, random_like, random_tensor
from attn_zoo.conformance.tolerance import largest
from attn_zoo.errors import UnsupportedError
from attn_zoo.metadata import Capabilities, Form
from attn_zoo.registry import Variant, make_config

if TYPE_CHECKING:
    from attn_zoo.measure.flop_count import Operations

Module = AbstractAttention | AbstractMixer
MaskKind = Literal["none", "end", "scattered"]


def _arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    mask = {"key_padding_mask": inputs.key_padding_mask}
    if inputs.form == "attention":
        return inputs.tensors, mask
    return inputs.tensors[:1], {"context": inputs.tensors[1] if len(inputs.tensors) > 1 else None, **mask}


def results(module: Module, inputs: Inputs) -> tuple[Tensor, ...]:
    """Call the module; return its output, of the shape of the first input, and its carry where it passes one on."""
    tensors, keywords = _arguments(inputs)
    try:
        if isinstance(module, AbstractAttention):
            return (module(*tensors, **keywords),)
        return _present(module.mix(*tensors, **keywords))
    except Exception as error:
        error.add_note(inputs.words())  # the example, where this becomes a finding
        raise


def reference_results(
    module: Module, inputs: Inputs, routing: Any = None, carry: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Compute the same by the readable reference, under the routing of another call or from a carry where given."""
    if is_own_reference(module):
        return results(module, inputs)  # which gives a carry to those that take one
    tensors, keywords = _arguments(inputs)
    if isinstance(module, AbstractMixer):
        carry = _first_carry(module, inputs) if carry is None else carry
        if carry is not None:
            keywords["carry"] = carry
    if routing is not None:
        keywords["routing"] = routing
    output = module.reference(*tensors, **keywords)
    return _present(output) if isinstance(output, Mixed) else (output,)


def _present(mixed: Mixed) -> tuple[Tensor, ...]:
    return (mixed.hidden,) if mixed.carry is None else (mixed.hidden, mixed.carry)


def _first_carry(module: AbstractMixer, inputs: Inputs) -> Tensor | None:
    hidden = inputs.tensors[0]
    return module.init_carry(inputs.batch_size, device=hidden.device, dtype=hidden.dtype)


def call(module: Module, inputs: Inputs) -> Tensor:
    """Return the output alone."""
    return results(module, inputs)[0]


@torch.no_grad()
def infer(module: Module, inputs: Inputs) -> Tensor:
    """Return the output alone, without a graph."""
    return call(module, inputs)


def call_reference(module: Module, inputs: Inputs, routing: Any = None) -> Tensor:
    """Return the readable reference's output alone."""
    return reference_results(module, inputs, routing)[0]


def is_own_reference(module: Module) -> bool:
    """Return whether `forward` is the readable version itself."""
    inner = module.attention if isinstance(module, MultiHeadMixer) else module
    return type(inner).reference in {AbstractAttention.reference, AbstractMixer.reference}


def routing_of(module: Module, inputs: Inputs) -> Any:
    """Return what the module chooses by the data for these inputs, for its reference to take as given.

    None where it chooses nothing, and in float64, where a choice that differs is no rounding but an error.
    """
    if inputs.tensors[0].dtype == torch.float64:
        return None
    tensors, keywords = _arguments(inputs)
    if inputs.form == "attention":
        tensors = tensors[:2]
    with torch.no_grad():
        return module.route(*tensors, **keywords)


def has_routing(module: Module) -> bool:
    """Return whether something is chosen by the data."""
    inner = module.attention if isinstance(module, MultiHeadMixer) else module
    return type(inner).route not in {AbstractAttention.route, AbstractMixer.route}


def read_positions(module: Module, inputs: Inputs, part: range, state: Any, *, at_once: bool) -> tuple[Tensor, Any]:
    """Read the tokens at some positions from a state, by prefill or (one token) a step.

    In cross-attention the context is in the state already.
    """
    tensors = [tensor[..., part.start : part.stop, :] for tensor in inputs.tensors]
    try:
        if isinstance(module, AbstractAttention):
            query, key, value = tensors
            return module.prefill(query, key, value, state) if at_once else module.step(query, key, value, state)
        return module.prefill(tensors[0], state) if at_once else module.step(tensors[0], state)
    except Exception as error:
        way = "prefill" if at_once else "step"
        error.add_note(f"{inputs.words()}: {way} of {len(part)} from position {part.start}")
        raise


@dataclass(frozen=True, slots=True)
class Gradients:
    """An output and the gradients of its product with a fixed random tensor.

    Args:
        output: of the call, detached.
        by_name: gradient of each input (`"query"`) and parameter (`"parameter query_proj.weight"`); None where none
            arrived.
    """

    output: Tensor
    by_name: dict[str, Tensor | None]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what there is: `"output"`, then `"gradient of query"` and so on."""
        yield "output", self.output
        for name, gradient in self.by_name.items():
            if gradient is not None:
                yield f"gradient of {name}", gradient

    @property
    def not_finite(self) -> str:
        """What there is that is not finite, the first in the words of `named`; or nothing."""
        return next((name for name, value in self.named() if not value.isfinite().all()), "")

    @property
    def size(self) -> Tensor:
        """The largest value of any gradient: one that is zero by symmetry is nothing but rounding of the others."""
        sizes = [largest(value) for value in self.by_name.values() if value is not None]
        return torch.tensor(max(sizes, default=0.0), dtype=torch.float64)


def count_forward(module: Module, inputs: Inputs) -> Operations | None:
    """Count the operations of one call without a graph; None where one of them cannot be counted."""
    from attn_zoo.measure.flop_count import count_operations  # loads Triton: not in every worker

    return count_operations(partial(infer, module, inputs))


def gradients(
    module: Module,
    inputs: Inputs,
    run: Callable[[Module, Inputs], tuple[Tensor, ...]] = results,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Gradients:
    """Return output and gradients of one call; `weigh` makes the scalar, by default `objective` of all results."""
    inputs = inputs.leaves()
    parameters = {f"parameter {name}": value for name, value in module.named_parameters() if value.requires_grad}
    leaves = {**dict(zip(inputs.names, inputs.tensors, strict=True)), **parameters}
    output, *others = run(module, inputs)
    scalar = objective(output, *others) if weigh is None else weigh(output)
    if not scalar.requires_grad:
        return Gradients(output.detach(), dict.fromkeys(leaves))
    try:
        found = torch.autograd.grad(scalar, list(leaves.values()), allow_unused=True)
    except Exception as error:
        error.add_note(f"{inputs.words()}, backward")
        raise
    return Gradients(output.detach(), dict(zip(leaves, found, strict=True)))


def objective(*outputs: Tensor) -> Tensor:
    """Return the scalar whose gradients are checked."""
    return torch.stack([weighted_sum(output) for output in outputs]).sum()


def weighted_sum(output: Tensor) -> Tensor:
    """Return the sum of the output times fixed random values, so that no direction of it is special."""
    return (output * random_like(output, 99)).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One form of one variant under one set of options.

    Args:
        variant: the registry's entry.
        form: which form is called.
        options: the variant's own options.
        build: sizes and defaults of every build of a check.
        dtypes: names of the types to check, widest first.
        lengths: sequence lengths to try, shortest first, so that the first failure is the smallest.
        device: to run on.
        spans: further lengths, sorted, for one probe each: across the blocks that the options name, and long enough for
            a sparse pattern to be sparse.
        has_masks: try padding too, where the variant admits it.
        is_fixed: check only the context in `build` (the gate), not every direction the variant declares.
        may_refuse: an `UnsupportedError` is an answer, because the options may narrow what the variant can do.
        is_training: build in training mode, as a cell with a backward runs it; else in evaluation.
        dropout_p: at which the check of dropout asks; nothing drops in any other.
        reseeds: filled by `make`: what was built by code that seeds torch's generator.
    """

    variant: Variant
    form: Form
    options: Mapping[str, Any]
    build: BuildContext
    dtypes: tuple[torch.dtype, ...]
    lengths: tuple[int, ...]
    device: str = "cpu"
    spans: tuple[int, ...] = ()
    has_masks: bool = True
    is_fixed: bool = False
    may_refuse: bool = False
    is_training: bool = False
    dropout_p: float = 0.4
    reseeds: list[BuildContext] = field(default_factory=list, compare=False)
    _modules: dict[tuple[BuildContext, torch.dtype], Module] = field(default_factory=dict, compare=False)

    @property
    def capabilities(self) -> Capabilities:
        """What the variant declares under these options."""
        return self.variant.capabilities_of(self.config)

    @property
    def is_shared_mixer(self) -> bool:
        """Whether the form is the shared mixer around an attention that is a subject itself."""
        return self.form == "mixer" and self.variant.mixer is None

    @property
    def dtype(self) -> torch.dtype:
        """Type for checks of behaviour: the most precise one, so that a small leak is not lost in rounding."""
        return self.dtypes[0]

    @property
    def ends(self) -> tuple[int, ...]:
        """The shortest and the longest of `lengths`; in the gate the longest, which is nearest to the cell's own."""
        return self.lengths[-1:] if self.is_fixed else tuple(dict.fromkeys((self.lengths[0], self.lengths[-1])))

    @property
    def config(self) -> Any:
        """The options as an instance of the variant's config class."""
        return make_config(self.variant.config, self.options, self.variant.name)

    @property
    def has_causal_offset(self) -> bool:
        """Whether a causal call may have more keys than queries, or fewer: positions are then aligned at the end."""
        can = self.capabilities
        is_offered = bool(can.causal) and can.cross_attention and can.variable_seq_len
        return is_offered and self.form == "attention" and not self.is_fixed

    def fit(self, length: int) -> int:
        """Return `length` rounded up to what the variant accepts."""
        multiple = self.capabilities.seq_len_multiple
        return -(-length // multiple) * multiple

    def contexts(self, *, with_cross: bool = True) -> Iterator[BuildContext]:
        """Yield every direction the variant declares (the gate: the one it was given)."""
        if self.is_fixed:
            yield self.build
            return
        if self.capabilities.bidirectional:
            yield replace(self.build, is_causal=False)
        if self.capabilities.causal:
            yield replace(self.build, is_causal=True)
        if with_cross and self.capabilities.cross_attention and self.capabilities.bidirectional:
            yield replace(self.build, is_causal=False, is_cross=True)

    def probes(self, build: BuildContext) -> Iterator[tuple[BuildContext, int]]:
        """Yield each of `spans` and the context of a module that takes it; nothing where none is built that long."""
        if not self.spans:
            return
        build = replace(build, max_seq_len=max(build.max_seq_len, self.spans[-1]))
        try:
            self.module(build, seq_len=self.spans[-1])
        except UnsupportedError:
            return
        for length in self.spans:
            yield build, length

    def masks(self, key_len: int) -> tuple[MaskKind, ...]:
        """Return the kinds of padding to try with `key_len` keys."""
        if not (self.has_masks and self.capabilities.key_padding_mask) or key_len == 1:
            return ("none",)
        return ("none", "scattered") if self.is_fixed else ("none", "end", "scattered")

    def make(
        self,
        build: BuildContext,
        *,
        seq_len: int = 0,
        dtype: torch.dtype | None = None,
        torch_seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> Module:
        """Return a new module in the subject's mode.

        Args:
            build: its context.
            seq_len: of the calls to come; a variant of fixed length is built for exactly that.
            dtype: of its parameters; by default the most precise one.
            torch_seed: global seed while its parameters are drawn.
            options: instead of the subject's own.
        """
        # Modules shared within a model must not be shared between our builds.
        build = replace(self._sized(build, seq_len), shared={})
        options = self.options if options is None else options
        with torch.random.fork_rng(devices=[] if self.device == "cpu" else None):
            seed_generators(torch_seed)
            make = build_attention if self.form == "attention" else build_mixer
            module: Module = make(self.variant.name, build, **options)
            if torch.initial_seed() != torch_seed:  # the fork hides it from all other checks
                self.reseeds.append(build)
        return module.to(device=self.device, dtype=self.dtype if dtype is None else dtype).train(self.is_training)

    def module(self, build: BuildContext, *, seq_len: int = 0, dtype: torch.dtype | None = None) -> Module:
        """Return the module for `build`, made once per check; callers leave it as it is."""
        dtype = self.dtype if dtype is None else dtype
        build = self._sized(build, seq_len)
        if (build, dtype) not in self._modules:
            self._modules[build, dtype] = self.make(build, dtype=dtype)
        return self._modules[build, dtype]

    def _sized(self, build: BuildContext, seq_len: int) -> BuildContext:
        is_fixed_len = seq_len and not self.capabilities.variable_seq_len
        return replace(build, max_seq_len=seq_len) if is_fixed_len else build

    def in_float64(self, module: Module, build: BuildContext, *, seq_len: int = 0) -> Module:
        """Return the module for `build` in float64, with the values of the parameters of `module`, however rounded."""
        wide = self.module(build, seq_len=seq_len, dtype=torch.float64)
        if wide is not module:
            wide.load_state_dict(module.state_dict())
        return wide

    def inputs(
        self,
        build: BuildContext,
        seq_len: int,
        *,
        key_len: int | None = None,
        batch_size: int = 2,
        mask: MaskKind = "none",
        dtype: torch.dtype | None = None,
        seed: int = 1,
    ) -> Inputs:
        """Return random inputs for a call; `key_len` differs from `seq_len` in cross-attention only."""
        key_len = seq_len if key_len is None else key_len
        if self.form == "attention":
            key = (batch_size, build.num_kv_heads, key_len, build.head_dim)
            shapes: list[tuple[int, ...]] = [(batch_size, build.num_heads, seq_len, build.head_dim), key, key]
        else:
            shapes = [(batch_size, length, build.embed_dim) for length in (seq_len, key_len)[: 1 + build.is_cross]]
        dtype = self.dtype if dtype is None else dtype
        tensors = tuple(random_tensor(shape, seed * 10 + i, dtype, self.device) for i, shape in enumerate(shapes))
        inputs = Inputs(form=self.form, tensors=tensors, is_causal=build.is_causal)
        return inputs if mask == "none" else inputs.under(padding_mask(batch_size, key_len, mask, self.device))

    def calls(
        self, build: BuildContext, seq_len: int, *, batch_size: int = 2, dtype: torch.dtype | None = None
    ) -> list[Inputs]:
        """Return inputs of one length under every kind of padding; cross-attention gets fewer keys than queries."""
        is_free = build.is_cross and self.capabilities.variable_seq_len
        key_len = self.fit(seq_len // 2 + 1) if is_free else seq_len
        return [
            self.inputs(build, seq_len, key_len=key_len, batch_size=batch_size, mask=mask, dtype=dtype)
            for mask in self.masks(key_len)
        ]

    def cases(
        self, lengths: Sequence[int], *, batch_size: int = 2, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[Module, Inputs]]:
        """Yield the `calls` of some lengths in every direction, each with the `module` to call."""
        for build in self.contexts():
            for length in lengths:
                module = self.module(build, seq_len=length, dtype=dtype)
                for inputs in self.calls(build, length, batch_size=batch_size, dtype=dtype):
                    yield module, inputs

    def refuses(self, capability: str, what: str, request: Callable[[], object]) -> Finding:
        """Check that `request` raises `UnsupportedError`, as a declared no must; return that finding."""
        try:
            request()
        except UnsupportedError as error:
            return refused(error.reason)
        raise Violation(f"declares {capability} as missing, but {what} was accepted", f"{self.form} form: {what}")
