"""`[[scaling]]`: time and memory of one call of a variant, alone or with its projections, over lengths."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, cast, final, get_args

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from attn_zoo.attention import AbstractAttention, AbstractMixer
from attn_zoo.attention.generators import seed_generators
from attn_zoo.conformance import FirstCall, check_output
from attn_zoo.conformance.inputs import Inputs
from attn_zoo.conformance.probes import probe, probe_dropout
from attn_zoo.conformance.tolerance import largest_error, rounding
from attn_zoo.errors import GateError
from attn_zoo.matrix.cell.workload import AbstractWorkload, Call, settle_calls
from attn_zoo.matrix.claimed_costs import Claims, call_shape, claims, form_of
from attn_zoo.matrix.kinds.kind import Axis
from attn_zoo.matrix.kinds.one_call import CallKind, gate_call, make_module
from attn_zoo.matrix.kinds.timed import TimedCallGroup, TimedKind
from attn_zoo.matrix.plan.estimate import Estimate, call_estimate
from attn_zoo.matrix.plan.planned_cell import PlannedCell
from attn_zoo.measure.memory import memory_of_pass
from attn_zoo.measure.passes import clear_grads, make_pass
from attn_zoo.records import PASSES, CallPass, Cell, Memory


class ScalingGroup(TimedCallGroup):
    """Time and memory of one call over lengths. Where several values are given, every combination is a cell.

    Args:
        passes: what is timed; see `attn_zoo.records.PASSES`.
        is_causal: later keys hidden.
        has_padding: the last quarter of every second sequence is padding, of the first one too.
        dropout_p: on attention weights; none in the pass `"infer"`, which is evaluation.
    """

    passes: Axis[CallPass] = ("fwd",)
    is_causal: Axis[bool] = (False,)
    has_padding: Axis[bool] = (False,)
    dropout_p: Axis[Annotated[float, Field(ge=0, lt=1)]] = (0.0,)

    def axes(self) -> dict[str, Sequence[Any]]:
        return {
            **super().axes(),
            "is_causal": self.is_causal,
            "has_padding": self.has_padding,
            "dropout_p": self.dropout_p,
            "pass_": self.passes,
        }


class Scaling(CallKind, TimedKind):
    """One call of a variant."""

    name = "scaling"
    group = ScalingGroup

    def owns(self, cell: Cell) -> bool:
        return cell.kind == self.name and cell.scope != "model"  # training steps are stored under the same name

    def estimate(self, item: PlannedCell) -> Estimate:
        return call_estimate(item)

    def workload(self, cell: Cell, inputs: Sequence[Tensor] | None) -> AbstractWorkload:
        return CallWorkload(cell, inputs)


@final
class CallWorkload(AbstractWorkload):
    """One call of the variant.

    Raises:
        UnsupportedError: the variant refuses what the cell asks.
    """

    module: AbstractAttention | AbstractMixer

    def __init__(self, cell: Cell, inputs: Sequence[Tensor] | None = None) -> None:
        if cell.pass_ not in get_args(CallPass):
            raise ValueError("a scaling cell needs pass_")
        self._cell, self._pass = cell, cast(CallPass, cell.pass_)
        dtype: torch.dtype = getattr(torch, cell.dtype)
        has_graph = PASSES[self._pass].has_graph
        seed_generators(cell.seed)
        module, self._build = make_module(cell)
        module = module.to(device=cell.device, dtype=dtype)
        module.train(has_graph)
        shape = call_shape(cell)
        if inputs is None:
            inputs = [tensor.requires_grad_(has_graph) for tensor in draw_inputs(cell, dtype)]
        mask = padding_of(shape.batch_size, shape.query_len, cell.device) if cell.has_padding else None

        def forward() -> Tensor:
            output: Tensor = module(*inputs, key_padding_mask=mask)
            return output

        self.module, self.inputs, self.forward = module, inputs, forward
        self.leaves = [*inputs, *(item for item in module.parameters() if item.requires_grad)]
        self._mask = mask
        self._kept: Tensor | None = None  # some rows of what the first call gave, where none draws anything at random

    def gate(self) -> tuple[str, ...]:
        return gate_call(self._cell, self._build, is_training=self.module.training)

    def make_call(self) -> tuple[Call, Call | None]:
        clear_grads(self.leaves)
        return make_pass(self.forward, self.leaves, self._pass)

    def settle(self) -> None:
        settle_calls(self)

    def check(self, output: object, *, is_repeat: bool) -> tuple[str, ...]:
        assert isinstance(output, Tensor)
        cell, kind = self._cell, PASSES[self._pass]
        inputs = Inputs(
            form=form_of(cell),
            tensors=tuple(self.inputs),
            key_padding_mask=self._mask,
            is_causal=cell.is_causal,
        )
        named = dict(zip(inputs.names, self.inputs, strict=True)) | {
            f"parameter {name}": parameter for name, parameter in self.module.named_parameters()
        }
        first = FirstCall(
            module=self.module,
            inputs=inputs,
            output=output.detach(),
            has_graph=kind.has_graph,
            gradients={name: leaf.grad for name, leaf in named.items()} if kind.backwards else None,
        )
        held = check_output(first)
        if not first.is_random and first.capabilities.is_deterministic:
            self._kept = _some_rows(output)
        if is_repeat:
            return held
        return (*held, *(probe_dropout(first) if first.is_random else probe(first, is_known="own_rows" in held)))

    def check_again(self) -> tuple[str, ...]:
        if self._kept is None:
            return ()
        with torch.set_grad_enabled(PASSES[self._pass].has_graph):
            rows = _some_rows(self.forward())
        change = largest_error(rows, self._kept)
        if change > rounding(self._kept, self._build.max_seq_len + self.inputs[0].shape[-1]):
            raise GateError(
                "own_last", f"{self._cell.variant}: after the samples an output is off by {change:.2g} from the first"
            )
        return ("own_last",)

    def memory(self) -> Memory:
        return memory_of_pass(self.forward, self.leaves, self._pass, device=self._cell.device)

    def claims(self) -> Claims:
        return claims(self._cell)

    def counted_flops(self) -> int | None:
        """Count one forward without a graph, so that the count needs no more memory than the timing did."""
        from attn_zoo.measure.flop_count import count_flops  # loads a fifth of a second's worth of torch

        leaves = [leaf for leaf in self.leaves if leaf.requires_grad]
        try:
            for leaf in leaves:
                leaf.requires_grad_(False)
            return count_flops(self.forward)
        finally:
            for leaf in leaves:
                leaf.requires_grad_(True)

    def release(self) -> None:
        clear_grads(self.leaves)


def _some_rows(output: Tensor) -> Tensor:
    """Return a copy of at most 64 rows of the first sequence, from all over it."""
    step = -(-output.shape[-2] // 64)
    return output.detach()[:1, ..., ::step, :].clone()


def draw_inputs(cell: Cell, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value of a call, or hidden states: the same for the same seed."""
    sizes = call_shape(cell)
    query = (sizes.batch_size, sizes.num_heads, sizes.query_len, sizes.head_dim)
    key = (sizes.batch_size, sizes.num_kv_heads, sizes.key_len, sizes.head_dim)
    hidden = (sizes.batch_size, sizes.query_len, sizes.num_heads * sizes.head_dim)
    shapes = [query, key, key] if form_of(cell) == "attention" else [hidden]
    if cell.device == "cpu":
        return [normal(shape, (cell.seed, index), dtype) for index, shape in enumerate(shapes)]
    # A GPU draws fast, and all blocks of a tensor from one generator.
    generator = torch.Generator(cell.device).manual_seed(cell.seed)
    return [torch.randn(shape, generator=generator, device=cell.device, dtype=dtype) for shape in shapes]


BLOCK_LEN = 2**20
"""Numbers of one tensor that are drawn from one generator: a change of it changes all inputs."""


def padding_of(batch_size: int, seq_len: int, device: str) -> Tensor:
    """Return the mask `[B, L]` of a padded cell: the last quarter of every second sequence, the first one included."""
    mask = torch.zeros(batch_size, seq_len, dtype=torch.bool, device=device)
    mask[::2, seq_len - seq_len // 4 :] = True
    return mask


def normal(shape: tuple[int, ...], seed: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random normal numbers, drawn on all threads of torch and the same for any number of them.

    `torch.randn` draws on one thread: 3 s for the inputs of 262144 tokens with 8 heads of 64.
    """
    tensor = torch.empty(shape, dtype=dtype)
    blocks = torch.split(tensor.view(-1), BLOCK_LEN)
    seeds = np.random.SeedSequence(seed).generate_state(len(blocks)).tolist()

    def fill(block: Tensor, block_seed: int) -> None:
        block.normal_(generator=torch.Generator().manual_seed(block_seed))

    with ThreadPoolExecutor(min(torch.get_num_threads(), len(blocks))) as pool:
        list(pool.map(fill, blocks, seeds))
    return tensor
