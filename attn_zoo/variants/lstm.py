"""LSTM: one state that reads the sequence token by token. The recurrent layer that attention replaced.

Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers, Schmidhuber and Cummins 2000,
"Learning to Forget", equations 3 to 5 and 9 there, without peepholes:
    (i, f, g, o) = W x_t + U h_(t-1) + b
    c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g),   h_t = sigmoid(o) tanh(c_t)
Causal: one LSTM of E cells. Bidirectional (Graves and Schmidhuber 2005): one of E / 2 cells in each direction, their
states side by side. So hidden states of width E become hidden states of width E without a projection.
Symbols: the papers' memory cells are our features, E of them.
Cost: time O(B L E^2), in L steps of which each waits for the one before; memory O(B L E); decode state O(B E).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout, pad

from attn_zoo.attention import AbstractMixer, BuildContext
from attn_zoo.errors import ConfigError
from attn_zoo.kernels.trace import note_path
from attn_zoo.metadata import Capabilities, Complexity, Reference, Shape
from attn_zoo.registry import VariantConfig, register_mixer


@dataclass(frozen=True, kw_only=True, slots=True)
class LstmConfig(VariantConfig):
    """The number of cells follows from the width of the model.

    Args:
        forget_bias: initial bias of the forget gates; above zero, so that a fresh LSTM remembers (Gers et al. 2000,
            section 4; the value of Jozefowicz et al. 2015).
    """

    forget_bias: float = 1.0


@dataclass(frozen=True, slots=True)
class LstmState:
    """What decoding keeps.

    Args:
        output: h, `[B, E]`.
        cell: c, `[B, E]`.
    """

    output: Tensor
    cell: Tensor


def _widths(embed_dim: int, is_causal: bool) -> tuple[int, ...]:
    """Return the number of cells of each direction."""
    return (embed_dim,) if is_causal else (embed_dim - embed_dim // 2, embed_dim // 2)


def lstm_flops(shape: Shape) -> int:
    """Count the products of four gates with the token and with the state before it."""
    widths = _widths(shape.embed_dim, shape.is_causal)
    return sum(8 * shape.batch_size * shape.query_len * width * (shape.embed_dim + width) for width in widths)


def lstm_bytes(shape: Shape, itemsize: int) -> int:
    """Count input, output, and weights with the two biases that fused kernels take."""
    widths = _widths(shape.embed_dim, shape.is_causal)
    return shape.io_bytes(itemsize) + sum(4 * width * (shape.embed_dim + width + 2) for width in widths) * itemsize


def lstm_state_bytes(shape: Shape, itemsize: int) -> int:
    """Count h and c, whatever the length."""
    return 2 * shape.batch_size * shape.embed_dim * itemsize


@register_mixer(
    "lstm",
    config=LstmConfig,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=False,
        key_padding_mask=True,
        decode="recurrent",
        is_padding_invariant=True,
        positions=("none",),
        dropout_unit="outputs",
        why={
            "cross_attention": "a state reads one sequence",
            "grouped_query": "it has no heads to group",
            "positions": "it has no queries and keys to rotate, and no scores to bias",
        },
    ),
    complexity=Complexity(
        time="B L E^2",
        memory="B L E",
        time_exponent=1,
        memory_exponent=1,
        sequential_ops="L",
        max_path="L",
        flops=lstm_flops,
        bytes=lstm_bytes,
        state_bytes=lstm_state_bytes,
    ),
    reference=Reference(
        title="Long Short-Term Memory",
        authors="Hochreiter and Schmidhuber",
        year=1997,
        url="https://doi.org/10.1162/neco.1997.9.8.1735",
        equation="Gers et al. 2000: 3-5, 9",
        deviations=(
            "It is no approximation of softmax attention: no budget makes the two equal.",
            "It has the forget gate of Gers et al. 2000, tanh for both squashing functions, and no peepholes.",
            "Gradients flow through all of time; the paper cuts them at the gates.",
            "Without a causal mask two LSTMs of half the width read in opposite ways (Graves and Schmidhuber 2005).",
            "There are no attention weights: dropout acts on what goes up, not along time (Zaremba et al. 2014).",
        ),
    ),
)
class Lstm(AbstractMixer):
    """One LSTM layer, in one direction or in both.

    Args:
        config: the variant's options.
        build: sizes and direction.

    Raises:
        ConfigError: there is no cell for each direction.
    """

    config: LstmConfig

    def __init__(self, config: LstmConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        widths = _widths(build.embed_dim, build.is_causal)
        if 0 in widths:
            raise ConfigError("lstm", [("embed_dim", "expected at least 2, a cell for each direction; got 1")])
        layers = [nn.LSTM(build.embed_dim, width, batch_first=True) for width in widths]
        self.directions = nn.ModuleList(layers)
        with torch.no_grad():
            for layer in layers:
                _, _, bias, second_bias = layer.all_weights[0]
                forget = slice(layer.hidden_size, 2 * layer.hidden_size)
                bias[forget], second_bias[forget] = config.forget_bias, 0.0

    def forward(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Read the tokens that are not padding; a padded position gets the state as it is there.

        Shapes as in `AbstractMixer.forward`; an entry of padding only gives zeros.
        """
        del context  # the contract refuses one
        note_path("lstm.one_way" if self.build.is_causal else "lstm.two_way")
        return dropout(self._read(hidden, key_padding_mask, _read_at_once), self.build.dropout_p, self.training)

    def reference(
        self, hidden: Tensor, *, context: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the equations in a loop over time, without dropout."""
        del context
        return self._read(hidden, key_padding_mask, _read_by_the_equations)

    def _read(self, hidden: Tensor, mask: Tensor | None, read: Any) -> Tensor:
        """Return h of every direction side by side, each by `read(lstm, hidden, mask)`."""
        if mask is not None:
            hidden = hidden.masked_fill(mask[..., None], 0.0)
        outputs = [read(self.directions[0], hidden, mask)]
        if not self.build.is_causal:
            backwards = read(self.directions[1], hidden.flip(1), None if mask is None else mask.flip(1))
            outputs.append(backwards.flip(1))
        return torch.cat(outputs, dim=-1)  # [B, L, E]

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> LstmState:
        """Return the state before the first token: zeros."""
        self._require_state(key_padding_mask, context)
        dtype = dtype or next(self.parameters()).dtype
        zeros = torch.zeros(batch_size, self.build.embed_dim, device=device, dtype=dtype)
        return LstmState(zeros, zeros.clone())

    def step(self, hidden: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """Read one token `[B, 1, E]`, O(B E^2)."""
        return self.prefill(hidden, state)

    def prefill(self, hidden: Tensor, state: LstmState | None = None) -> tuple[Tensor, LstmState]:
        """Read n tokens `[B, n, E]` from a state in one call, O(B n E^2)."""
        if state is None:
            state = self.init_state(hidden.shape[0], device=hidden.device, dtype=hidden.dtype)
        outputs, (output, cell) = _run(self.directions[0], hidden, (state.output[None], state.cell[None]))
        return outputs, LstmState(output[0], cell[0])


def _run(lstm: nn.Module, hidden: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Any:
    """Call the fused kernel; return h after every position, and the pair of the last h and c.

    Autocast on a CPU hands a 16-bit LSTM to oneDNN, which ends where the processor has no instructions for it. Tensors
    that are 16-bit already go to whichever kernel the processor can run.
    """
    if hidden.is_cuda and not torch.compiler.is_compiling():  # to which the operator is a loop over time
        return _run_for_backward(lstm, hidden, state)
    if hidden.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return lstm(hidden, state)
    dtype = torch.get_autocast_dtype("cpu")
    weights = {name: weight.to(dtype) for name, weight in lstm.named_parameters()}
    lowered = None if state is None else (state[0].to(dtype), state[1].to(dtype))
    return functional_call(lstm, weights, (hidden.to(dtype), lowered))


def _run_for_backward(lstm: nn.Module, hidden: Tensor, state: tuple[Tensor, Tensor] | None) -> Any:
    """Call the kernel as the module does, but so that a backward may follow in evaluation mode too.

    cuDNN keeps what that needs in training mode alone (github.com/pytorch/pytorch/issues/5878); without dropout inside
    the layer that is all the mode decides.
    """
    assert isinstance(lstm, nn.LSTM)
    zeros = hidden.new_zeros(1, hidden.shape[0], lstm.hidden_size)
    weights: list[Tensor] = [*lstm.all_weights[0]]
    keeps = torch.is_grad_enabled()
    is_alone = weights[0].untyped_storage().nbytes() == weights[0].nbytes
    if hidden.dtype == torch.bfloat16 == weights[0].dtype and is_alone:
        # cuDNN wants all weights in one block, or copies them in each call. The module sees to it, but not in bfloat16.
        with torch.no_grad():
            torch._cudnn_rnn_flatten_weight(weights, 4, lstm.input_size, 2, lstm.hidden_size, 0, 1, True, False)
    outputs, *ends = torch.lstm(hidden, state or (zeros, zeros), weights, True, 1, 0.0, keeps, False, True)
    return outputs, tuple(ends)


def _read_at_once(lstm: nn.LSTM, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return h after every position by the fused kernel: padding is moved behind all that is read."""
    if mask is None:
        outputs: Tensor = _run(lstm, hidden)[0]
        return outputs
    order = mask.byte().argsort(dim=1, stable=True)
    outputs, _ = _run(lstm, hidden.gather(1, order[..., None].expand_as(hidden)))
    outputs = pad(outputs, (0, 0, 1, 0))  # [B, 1 + L, width], from the state before the first token on
    num_read = (~mask).cumsum(1)[..., None]
    return outputs.gather(1, num_read.expand(-1, -1, outputs.shape[-1]))


def _read_by_the_equations(lstm: nn.LSTM, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return h after every position; a padded one leaves the state as it is."""
    of_token, of_state, bias, second_bias = lstm.all_weights[0]
    output = cell = hidden.new_zeros(hidden.shape[0], lstm.hidden_size)
    outputs, from_tokens = [], hidden @ of_token.T + bias + second_bias
    for position in range(hidden.shape[1]):
        gates = from_tokens[:, position] + output @ of_state.T
        write, forget, new, read = gates.chunk(4, dim=-1)
        next_cell = forget.sigmoid() * cell + write.sigmoid() * new.tanh()
        next_output = read.sigmoid() * next_cell.tanh()
        if mask is not None:
            is_padding = mask[:, position, None]
            next_cell = torch.where(is_padding, cell, next_cell)
            next_output = torch.where(is_padding, output, next_output)
        output, cell = next_output, next_cell
        outputs.append(output)
    return torch.stack(outputs, dim=1)
