"""Our mechanisms beside the code of their authors, or of others, with the same weights: outputs and all gradients.

    python benchmarks/authors_code.py                fetch each file at its commit, once, and compare all
    python benchmarks/authors_code.py moba luna      these
    python benchmarks/authors_code.py --from FOLDER  with files that lie there, as FOLDER/OWNER/NAME/PATH

Of each file the definitions named here are run as they stand, but in float64 where they say float32: what is left is
rounding, and exit code 1 says that a difference is more. What a definition needs from elsewhere is given to it here:
kernels of a GPU are written out, packages around it left away. Most need einops: `pip install 'attn-zoo[peers]'`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import conv1d, layer_norm, pad, silu, softplus

from attn_zoo import AttnZooError, BuildContext, UnknownNameError, build_attention, build_mixer
from attn_zoo.console import print_table
from attn_zoo.tasks.sources.fetch import fetch
from attn_zoo.tasks.sources.source import Source

TOLERANCE = 1e-12
"""Of the largest value, in float64."""

NUM_HEADS, HEAD_DIM = 4, 16
EMBED_DIM = NUM_HEADS * HEAD_DIM
BATCH_SIZE = 2
MAX_SEQ_LEN = 512

FAIRSEQ: dict[str, Any] = {  # what its modules use of the rest of it
    "with_incremental_state": lambda cls: cls,
    "quant_noise": lambda module, *_: module,
    "utils": SimpleNamespace(softmax=lambda x, dim, onnx_trace: x.softmax(dim)),  # noqa: ARG005
    "FairseqDropout": lambda p, module_name: nn.Dropout(p),  # noqa: ARG005
}


class File(NamedTuple):
    """One file of a repository on GitHub, as it was at a commit."""

    repository: str
    commit: str
    path: str
    sha256: str


FLA = "fla-org/flash-linear-attention", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89"
FAST_TRANSFORMERS = "idiap/fast-transformers", "2ad36b97e64cb93862937bd21fcc9568d989561f"
FILES = {
    "delta rule": File(
        *FLA,
        "fla/ops/gated_delta_rule/naive.py",
        "d1cf17992349fd3e94af999b22e3d3a81be4a2d1881ce5b70a3457257166e0cb",
    ),
    "slots": File(
        *FLA,
        "fla/ops/abc/naive.py",
        "019deecfd783bf2716de04f066ebfd27893ce8a9dd7d031988b045c8f9b3b0bc",
    ),
    "slots layer": File(
        *FLA,
        "fla/layers/abc.py",
        "8f87970c65bfef7e6c6ed1e63053728bae8b799cb45f6a942fe8c4bd80cefa13",
    ),
    "gated sums": File(
        *FLA,
        "fla/ops/gla/naive.py",
        "ac4b87e5b10089ec9ad424efb596de6d5168d89e4b74e5f5ced2f55a20e4641d",
    ),
    "gated sums layer": File(
        *FLA,
        "fla/layers/gla.py",
        "e9fee93b18aaf9d72320633323cd3900598ea4ed0699d22c476c374b6d1f56c7",
    ),
    "sparse": File(
        *FLA,
        "fla/ops/nsa/naive.py",
        "d19091f990a863bd50179b15a8ab689a788e7f8ba875e910939bd18c33f8f736",
    ),
    "retention": File(
        *FLA,
        "fla/ops/retention/naive.py",
        "306d74ed298e89128b4d9f338aa69637ce676e020f8ff1aa34927b28cb794da8",
    ),
    "retention layer": File(
        "microsoft/torchscale",
        "4d1e0e82e5adf86dd424f1463192635b73fc8efc",
        "torchscale/component/multiscale_retention.py",
        "bf775683b402f5f806637fca3823ffa80ff1755f92459644123d93b42982be6d",
    ),
    **{
        name: File(
            "HKUNLP/efficient-attention",
            "531ff5169b56fcec9d0a361125cffb62ab5e8781",
            f"efficient-attention/efficient_attention/{file}.py",
            sha256,
        )
        for name, file, sha256 in (
            ("randomized", "lara", "1764cd0310bf35d394b6e7e0aa115b14e7e24ea08a4ff8a55bf855ccdf78da4b"),
            (
                "randomized layer",
                "abstract_attention",
                "1cc463a26e11d4284b115ef059385b32ff6619c3e23ef73cee062e0c562f8610",
            ),
            ("randomized features", "attn_utils", "2d7320cfd7c89ab565530213278d462db99c3de6d62af3180bd7f66094821e39"),
        )
    },
    "linformer": File(
        "facebookresearch/fairseq",
        "3d262bb25690e4eb2e7d3c1309b1e9c406ca4b99",
        "examples/linformer/linformer_src/modules/multihead_linear_attention.py",
        "43d2eb49707c3a1f420776eff02a8e39bb371fa1bfbf5a7f67b8cc7ce1227bd0",
    ),
    "linear": File(
        *FAST_TRANSFORMERS,
        "fast_transformers/attention/linear_attention.py",
        "d17c1f92b1a2becfbcf4a560184ea956cc6fe66933c450392bdbde215a2befa8",
    ),
    "causal linear": File(
        *FAST_TRANSFORMERS,
        "fast_transformers/attention/causal_linear_attention.py",
        "2d20c2f629824eb8273e66356d7496bee77444071dd5ab71d3352fb953e1aabe",
    ),
    "feature map": File(
        *FAST_TRANSFORMERS,
        "fast_transformers/feature_maps/base.py",
        "7e2f1fb7432bdb9afd9413f835c21ef9c7de94d1fd07bb56351acf5f20b6d816",
    ),
    "long short": File(
        "NVIDIA/transformer-ls",
        "1527c5cc760daf1432a5c5c1fdc2ffb2f074c969",
        "lra/attention_transformer_ls.py",
        "504eb4163d607c7b32f61e95c3507122f8149885093cacf4d76f3e8299bf4d97",
    ),
    "luna": File(
        "XuezheMax/fairseq-apollo",
        "3644d2064b1a1751db45654cc1d01a08ab3a860f",
        "fairseq/modules/luna_attention.py",
        "45cc216adc94a8e65ca22325e3ca65c47658d5c13df25320d011bd4dcc676044",
    ),
    "dual": File(
        "state-spaces/mamba",
        "e9594ce1c732d97440f0332fdc43170a2294dbfa",
        "mamba_ssm/modules/ssd_minimal.py",
        "6442a9fe25a6792258df657392ab1fab4dd873ee777d9dd5783cc76030218e07",
    ),
    **{
        name: File(
            "facebookresearch/mega", "aeaa4b44592cd1d60a9a34554e359eda2a62b03b", f"fairseq/modules/{file}.py", sha256
        )
        for name, file, sha256 in (
            (
                "gated",
                "moving_average_gated_attention",
                "90d331dbbac12817fe7b22371badedfc4d8ff24b6860336c0bc476cd9ab9ba90",
            ),
            (
                "average",
                "exponential_moving_average",
                "223ee827cffa474c4b2f4759af1999c69b4c2de868174260c3f789a86df8c225",
            ),
            (
                "distance bias",
                "relative_positional_bias",
                "c0b41ae90a621f9710e185649fc284d324bb289921308b7ae81029e47265e762",
            ),
        )
    },
    "moba": File(
        "MoonshotAI/MoBA",
        "61e456bc956c5a25fd9c84e5496b661329cb1b72",
        "moba/moba_naive.py",
        "508a71e961b82e970e9e9039bee8eb37b8f9b455f98b18d852d27ab69ddd88a1",
    ),
    "nystrom": File(
        "mlpen/Nystromformer",
        "56893131bf3fa99b5a2d3ab452a591dca722529a",
        "LRA/code/attention_nystrom.py",
        "79fe421bd2c620fb3bf36fb7f3d39ba4bbf6c7595988b7d3cc86ca6aea9a1f96",
    ),
    "performer": File(
        "lucidrains/performer-pytorch",
        "fc8b78441b1e27eb5d9b01fc738a8772cee07127",
        "performer_pytorch/performer_pytorch.py",
        "dd7b741c03c9ddb8289041c759963d12e11df55e4b0cb7a827baef6261da5a0e",
    ),
    "reformer": File(
        "lucidrains/reformer-pytorch",
        "66a19b6caf481a880c97d331306aba55d2ae4b9c",
        "reformer_pytorch/reformer_pytorch.py",
        "c373e09abaa15bfc0967aabf3f2a8777f8badf8362bc9013627c5cc41c3ca39f",
    ),
    "s4d": File(
        "state-spaces/s4",
        "e757cef57d89e448c413de7325ed5601aceaac13",
        "models/s4/s4d.py",
        "4aab484e96dba85b2eba14f54c42df103a314a087ca184bfcca30e77d0faea2c",
    ),
    "cosine": File(
        "OpenNLPLab/cosFormer",
        "8e12da111e2a683ea875711e0bf5810c6b4e8f9f",
        "cosformer.py",
        "ebda49b42f994c75a009a3d7b63abd297d701b2004e6bb9037a38296d3d42e19",
    ),
    "difference": File(
        "microsoft/unilm",
        "768a3c873f598bb9b4d4dfb9267b099e35f8fe56",
        "Diff-Transformer/multihead_diffattn.py",
        "a49056a3227df0730d61c3ee547198a887539ca99e7aacb59585a3ca5ecece5d",
    ),
    "sampled": File(
        "zhouhaoyi/Informer2020",
        "29f2a739226a509202a092b464163da81fa74960",
        "models/attn.py",
        "d9a294d829371759f1984f9f8fee12408774dda1a3de662313151d86e8513528",
    ),
    "latent": File(
        "deepseek-ai/DeepSeek-V3",
        "9b4e9788e4a3a731f7567338ed15d3ec549ce03b",
        "inference/model.py",
        "fdb7995bc234badbf0011b5af8cf391be94343abc51305428cb9a04452116f02",
    ),
    "factorised": File(
        "openai/sparse_attention",
        "c53f3bdbf6225be0582f0357072e82b13c69be7d",
        "attention.py",
        "eef8bb1fbdb33f8358078d1206e9201b7d4d5c2739526a818a32c7b74177eba9",
    ),
}


class Pair(NamedTuple):
    """What both give for the same inputs.

    Args:
        case: what was asked, in a few words.
        ours: our output.
        theirs: of the same shape.
        leaves: inputs and weights by name, which both were computed from.
    """

    case: str
    ours: Tensor
    theirs: Tensor
    leaves: dict[str, Tensor]


class Theirs:
    """Definitions of other people's files.

    Args:
        folder: where the files lie, or None to fetch them.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used: list[File] = []

    def path(self, file: File) -> Path:
        """Return where a file lies, fetched and checked.

        Raises:
            AttnZooError: it is not there, cannot be fetched, or has other bytes than at its commit.
        """
        if self.folder is None:
            path = self._fetched(file)
        elif not (path := self.folder / file.repository / file.path).is_file():
            raise AttnZooError(f"{path}: no such file; {file.repository} has it at {file.commit}")
        if hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
            raise AttnZooError(f"{path}: other bytes than at {file.commit} of {file.repository}")
        return path

    def _fetched(self, file: File) -> Path:
        source = Source(
            name=f"{file.repository} {file.path}",
            folder=f"authors_code/{file.repository}/{file.commit[:8]}",
            files={"file": file.path},
            hint="",
            urls={"file": f"https://raw.githubusercontent.com/{file.repository}/{file.commit}/{file.path}"},
            sha256={"file": file.sha256},
        )
        if source.found(None) is not None:
            return source.locate(None)["file"]
        return fetch(source, say=lambda line: print(line, file=sys.stderr))["file"]

    def definitions(self, name: str, *wanted: str, **given: Any) -> SimpleNamespace:
        """Run functions, classes and assignments of a file, with what they need from elsewhere.

        Args:
            name: of the file in `FILES`.
            wanted: names that they define.
            given: other names that they use, beside torch's usual ones and einops'.
        """
        file = FILES[name]
        path = self.path(file)
        wide = re.sub(r"torch\.float(32)?\b", "torch.float64", path.read_text(encoding="utf-8")).replace(
            ".float()", ".double()"
        )
        body = [node for node in ast.parse(wide).body if set(_defined(node)) & set(wanted)]
        einops = _einops() if "einops" in wide else {}
        found = {"torch": torch, "nn": nn, "F": nn.functional, "math": math, "Tensor": Tensor, **einops, **given}
        exec(compile(ast.Module(body, []), str(path), "exec"), found)  # annotations, as in this file, are not looked at
        if missing := [each for each in wanted if each not in found]:
            raise AttnZooError(f"{path}: defines no {', '.join(missing)}")
        self.used.append(file)
        return SimpleNamespace(**found)


def _defined(node: ast.stmt) -> Iterable[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return (target.id for target in targets if isinstance(target, ast.Name))


def _einops() -> dict[str, Any]:
    try:
        from einops import rearrange, repeat
    except ImportError:
        raise AttnZooError("their code needs einops: pip install 'attn-zoo[peers]'") from None
    return {"rearrange": rearrange, "repeat": repeat}


def build(
    make: Callable[..., Any],
    name: str,
    *,
    is_causal: bool,
    sizes: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """Return a module in float64 whose weights have left where they start: a scale of 1 hides that it is missing."""
    context = BuildContext(
        embed_dim=EMBED_DIM,
        is_causal=is_causal,
        max_seq_len=MAX_SEQ_LEN,
        num_layers=2,
        **{"num_heads": NUM_HEADS, "head_dim": HEAD_DIM} | dict(sizes),
    )
    module = make(name, context, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


def hidden_states(length: int) -> Tensor:
    return torch.randn(BATCH_SIZE, length, EMBED_DIM, requires_grad=True)


def heads(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values `[B, H, L, D]`."""
    shape = BATCH_SIZE, NUM_HEADS, length, HEAD_DIM
    query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
    return query, key, value


def padding(length: int) -> Tensor:
    """Return a mask whose second sequence has padding."""
    mask = torch.zeros(BATCH_SIZE, length, dtype=torch.bool)
    mask[1, -length // 3 :] = True
    return mask


def rms_norm(rows: Tensor, scale: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * scale


# --- each mechanism: what surrounds a core is written after the layer in the same repository, which needs a GPU ---


def cosformer(theirs: Theirs) -> Iterator[Pair]:
    """Compare at our longest length, as their angles end at that of the batch, and with normalisers as they are."""
    attention = theirs.definitions("cosine", "CosformerAttention", np=np).CosformerAttention
    names = {"q": "query", "k": "key", "v": "value", "out": "out"}
    for is_causal in (False, True):
        module = build(build_mixer, "cosformer", is_causal=is_causal, eps=1e-300)
        hidden = hidden_states(MAX_SEQ_LEN)
        weights = {
            f"{their}_proj.{kind}": getattr(getattr(module, f"{our}_proj"), kind)
            for their, our in names.items()
            for kind in ("weight", "bias")
        }
        whole = attention(EMBED_DIM, NUM_HEADS, causal=is_causal)
        output = functional_call(whole, weights, (hidden.transpose(0, 1),), {"eps": 1e-300}).transpose(0, 1)
        leaves = {"x": hidden, **dict(module.named_parameters())}
        yield Pair("causal" if is_causal else "bidirectional", module(hidden), output, leaves)


def differential(theirs: Theirs) -> Iterator[Pair]:
    """Compare without biases and turns, which theirs has not and has of pairs in another order; it is always causal."""

    class Norm(nn.Module):
        def __init__(self, dim: int, eps: float, elementwise_affine: bool) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps
            assert elementwise_affine

        def forward(self, rows: Tensor) -> Tensor:
            return rms_norm(rows, self.weight, self.eps)

    attention = theirs.definitions(
        "difference",
        *("MultiheadDiffAttn", "lambda_init_fn", "repeat_kv"),
        RMSNorm=Norm,
        apply_rotary_emb=lambda heads, *_, interleaved: heads if interleaved else None,
    ).MultiheadDiffAttn
    for layer_index in (0, 1):
        module = build(build_mixer, "differential", is_causal=True, sizes={"layer_index": layer_index})
        ours, projections = module.attention, ("query_proj", "key_proj", "value_proj", "out_proj")
        with torch.no_grad():
            for name in projections:
                getattr(module, name).bias.zero_()
        in_turn = torch.cat([own.nonzero()[:, 0] for own in ours.features])  # theirs has the first map's features first
        rows = torch.cat([head * HEAD_DIM + in_turn for head in range(NUM_HEADS)])
        weights = {f"{name[0]}_proj.weight": getattr(module, name).weight[rows] for name in projections[:2]}
        weights |= {"v_proj.weight": module.value_proj.weight, "out_proj.weight": module.out_proj.weight}
        weights |= {"subln.weight": ours.gain}
        for index in (0, 1):
            weights |= {
                f"lambda_q{index + 1}": ours.lambda_query[index],
                f"lambda_k{index + 1}": ours.lambda_key[index],
            }
        hidden = hidden_states(70)
        output = functional_call(attention(EMBED_DIM, layer_index, NUM_HEADS), weights, (hidden, (None, None)))
        parameters = {name: value for name, value in module.named_parameters() if not name.endswith("bias")}
        yield Pair(f"layer {layer_index}", module(hidden), output, {"x": hidden, **parameters})


def gated_deltanet(theirs: Theirs) -> Iterator[Pair]:
    rule = theirs.definitions("delta rule", "naive_recurrent_gated_delta_rule").naive_recurrent_gated_delta_rule
    for factor, length in ((1, 100), (2, 77)):
        module = build(build_mixer, "gated_deltanet", is_causal=True, value_factor=factor, chunk_len=16)
        hidden = hidden_states(length)
        projections, width = (module.query_proj, module.key_proj, module.value_proj), EMBED_DIM
        query, key, value = (
            silu(_convolved(projection(hidden), taps)).unflatten(-1, (NUM_HEADS, -1))
            for projection, taps in zip(projections, module.conv.split([width, width, width * factor], 1), strict=True)
        )
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        log_decay = -module.log_rate.exp() * softplus(module.decay_proj(hidden) + module.step_bias)
        read, _ = rule(query, key, value, module.strength_proj(hidden).sigmoid(), log_decay)
        gate = silu(module.gate_proj(hidden)).unflatten(-1, (NUM_HEADS, -1))
        output = module.out_proj((rms_norm(read, module.norm_scale, 1e-5) * gate).flatten(2))
        yield Pair(f"values {factor} x", module(hidden), output, {"x": hidden, **dict(module.named_parameters())})


def bounded_memory(theirs: Theirs) -> Iterator[Pair]:
    """Compare their layer, without what the paper's has not, around both forms that they check their kernels with."""
    naive = theirs.definitions("slots", "naive_recurrent_abc", "naive_cumsum_abc")
    names = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj", "s_proj": "control_proj"}
    names |= {"o_proj": "out_proj"}
    for form, num_slots, length in (("recurrent", 5, 50), ("cumsum", 64, 130)):
        function = getattr(naive, f"naive_{form}_abc")

        def chunked(q: Tensor, k: Tensor, v: Tensor, s: Tensor, function: Any = function, **_: Any) -> Any:
            output, state = function(*(x.transpose(1, 2) for x in (q, k, v, s)))
            return output.transpose(1, 2), state

        layer = theirs.definitions(
            "slots layer",
            "ABCAttention",
            chunk_abc=chunked,
            get_layer_cache=lambda *_: None,
            update_layer_cache=lambda *_, **__: None,
        ).ABCAttention
        module = build(build_mixer, "bounded_memory", is_causal=True, num_slots=num_slots, chunk_len=16)
        plain = {"use_rope": False, "use_output_gate": False, "use_norm": False, "layer_idx": 0}
        whole = layer(EMBED_DIM, 1.0, 1.0, NUM_HEADS, num_slots=num_slots, **plain)
        weights = {f"{their}.weight": getattr(module, our).weight for their, our in names.items()}
        hidden = hidden_states(length)
        output, _, _ = functional_call(whole, weights, (hidden,))
        yield Pair(
            f"{form}, {num_slots} slots", module(hidden), output, {"x": hidden, **dict(module.named_parameters())}
        )


def gated_linear_attention(theirs: Theirs) -> Iterator[Pair]:
    """Compare their layer around the recurrence that they check their kernels with."""
    naive = theirs.definitions("gated sums", "naive_recurrent_gla").naive_recurrent_gla

    def recurrent(q: Tensor, k: Tensor, v: Tensor, gk: Tensor, **_: Any) -> tuple[Tensor, None]:
        return naive(q, k, v, gk)[0], None

    def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **_: Any) -> tuple[Tensor, None]:
        return recurrent(q, k, v, g)

    class NormGated(nn.Module):
        def __init__(self, hidden_size: int, elementwise_affine: bool, eps: float) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps
            assert elementwise_affine

        def forward(self, rows: Tensor, gate: Tensor) -> Tensor:
            return rms_norm(rows, self.weight, self.eps) * silu(gate)

    layer = theirs.definitions(
        "gated sums layer",
        "GatedLinearAttention",
        FusedRMSNormGated=NormGated,
        fused_recurrent_gla=recurrent,
        chunk_gla=chunked,
        get_layer_cache=lambda *_: None,
        update_layer_cache=lambda *_, **__: None,
        unpad_hidden_states=lambda hidden, *_: (hidden, None, None),
        repad_hidden_states=_given,
    ).GatedLinearAttention
    names = {"q_proj": "query_proj", "k_proj": "key_proj", "v_proj": "value_proj", "g_proj": "gate_proj"}
    names |= {"o_proj": "out_proj", "gk_proj.0": "rank_proj", "gk_proj.1": "decay_proj"}
    for share, factor, rank, length in ((1.0, 1, 5, 50), (0.5, 2, 16, 130)):  # the second is the paper's layer
        options: dict[str, Any] = {"value_factor": factor, "gate_rank": rank, "chunk_len": 16}
        sizes = {"head_dim": int(HEAD_DIM * share)}
        module = build(build_mixer, "gated_linear_attention", is_causal=True, sizes=sizes, **options)
        hidden = hidden_states(length)
        weights = {f"{their}.weight": getattr(module, our).weight for their, our in names.items()}
        weights |= {"gk_proj.1.bias": module.decay_proj.bias, "g_norm_swish_gate.weight": module.norm_scale}
        whole = layer("chunk", EMBED_DIM, share, share * factor, NUM_HEADS, gate_low_rank_dim=rank)
        output, _, _ = functional_call(whole, weights, (hidden,))
        case = f"keys of {share} of the width, values {factor} x"
        yield Pair(case, module(hidden), output, {"x": hidden, **dict(module.named_parameters())})


def _convolved(rows: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve each feature of `[B, L, features]` with its column of `[K, features]`, causally."""
    size, count = taps.shape
    return conv1d(pad(rows.mT, (size - 1, 0)), taps.mT[:, None], bias, groups=count).mT


def lara(theirs: Theirs) -> Iterator[Pair]:
    """Compare between their projections and without padding, which is in their landmarks.

    In training theirs are drawn anew: ours are given to them, which are of variance 1 beside a query over D^(1/4).
    """
    base = "AbstractAttention", "MultiheadAttention"
    given: dict[str, Any] = {"np": np, "trunc_normal_": nn.init.trunc_normal_}
    given["MultiheadAttention"] = theirs.definitions("randomized layer", *base, **given).MultiheadAttention
    given |= vars(theirs.definitions("randomized features", "FlattenTranspose", "prm_projection"))
    for proposals, count, length, samples, beta in (
        ("adaptive-1d", 32, 256, "mean", 1.0),
        ("adaptive-1d", 32, 203, "mean", 2.0),
        ("adaptive-1d", 32, 203, "drawn", 1.0),
        ("adaptive-1d", 32, 20, "mean", 0.0),
        ("no-param-pool", 16, 200, "mean", 1.0),
        ("no-param-pool", 64, 200, "drawn", 0.0),
    ):
        options: dict[str, Any] = {"num_landmarks": count, "samples": samples, "query_weight": beta}
        options["landmarks"] = "projected" if proposals == "adaptive-1d" else "pooled"
        module = build(build_attention, "lara", is_causal=False, **options)
        query, key, value = heads(length)
        noise = torch.empty(0) if module.noise is None else module.noise[:, :length] * HEAD_DIM**0.25
        drawn = {"randn_like": lambda centres, noise=noise: noise.expand_as(centres)}
        their_torch = SimpleNamespace(**vars(torch) | drawn)
        code = theirs.definitions("randomized", "LinearRA", **given | {"torch": their_torch})
        attention = code.LinearRA(
            num_landmarks=count,
            proposal_gen=proposals,
            mis_type="mis-opt" if beta else "mis-bh",
            alpha_coeff=beta,
            dim=EMBED_DIM,
            num_heads=NUM_HEADS,
        ).train(samples == "drawn")
        attention.proj = nn.Identity()
        attention.proj_and_split_heads = partial(_given, (query, key, value))
        weights = {
            f"{of[0]}_bar_gen.{at}.{kind}": getattr(getattr(getattr(module, f"{of}_mark"), part), kind)
            for of in ("query", "key")
            for at, part in enumerate(("linear", "norm"))
            for kind in ("weight", "bias")
            if proposals == "adaptive-1d"
        }
        output = functional_call(attention, weights, torch.empty(BATCH_SIZE, length, EMBED_DIM))
        case = f"{proposals}, {count} landmarks of {length}, {samples}, {beta}"
        leaves = {"q": query, "k": key, "v": value, **dict(module.named_parameters())}
        yield Pair(case, module(query, key, value).transpose(1, 2).flatten(2), output, leaves)


def linear_attention(theirs: Theirs) -> Iterator[Pair]:
    base = theirs.definitions(
        "feature map", "FeatureMap", "ActivationFunctionFeatureMap", "elu_feature_map", Module=nn.Module
    )
    given = {"Module": nn.Module, "EventDispatcher": SimpleNamespace(get=str), "elu_feature_map": base.elu_feature_map}

    def causal_linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # their kernel, written out
        return torch.einsum("nlhd,nlhdm->nlhm", query, torch.einsum("nlhd,nlhm->nlhdm", key, value).cumsum(1))

    plain = theirs.definitions("linear", "LinearAttention", **given).LinearAttention
    causal = theirs.definitions("causal linear", "CausalLinearAttention", **given, causal_linear=causal_linear)
    for is_causal, length in ((False, 150), (True, 150)):
        query, key, value = heads(length)
        mask = padding(length)
        lengths = SimpleNamespace(float_matrix=(~mask).double())
        attend = (causal.CausalLinearAttention if is_causal else plain)(HEAD_DIM)
        rows = (x.transpose(1, 2) for x in (query, key, value))
        output = attend(*rows, SimpleNamespace(all_ones=True, lower_triangular=True), lengths, lengths)
        ours = build(build_attention, "linear_attention", is_causal=is_causal)(query, key, value, key_padding_mask=mask)
        case = "causal" if is_causal else "bidirectional"
        yield Pair(f"{case}, padding", ours, output.transpose(1, 2), {"q": query, "k": key, "v": value})


def linformer(theirs: Theirs) -> Iterator[Pair]:
    """Compare without biases of keys and values: theirs are added to compressed rows, ours are compressed."""
    attention = theirs.definitions("linformer", "MultiheadLinearAttention", **FAIRSEQ).MultiheadLinearAttention
    names = {"q": "query", "k": "key", "v": "value", "out": "out"}
    proj_len = 32
    for sharing, layout, length in (
        ("headwise", "project_first", MAX_SEQ_LEN),
        ("headwise", "compress_first", 300),
        ("key_value", "project_first", 300),
        ("key_value", "compress_first", MAX_SEQ_LEN),
    ):
        options: dict[str, Any] = {"proj_len": proj_len, "sharing": sharing, "layout": layout}
        module = build(build_mixer, "linformer", is_causal=False, **options)
        with torch.no_grad():
            module.key_proj.bias.zero_()
            module.value_proj.bias.zero_()
        hidden = hidden_states(length)
        weights = {f"{their}_proj.weight": getattr(module, f"{our}_proj").weight for their, our in names.items()}
        weights |= {f"{their}_proj.bias": getattr(module, f"{our}_proj").bias for their, our in names.items()}
        is_shared = sharing == "key_value"
        for kind, matrix in zip(("k", "v")[: 2 - is_shared], module.attention.weights, strict=False):
            weights[f"compress_{kind}.weight"] = matrix[0].mT
        whole = attention(
            EMBED_DIM,
            NUM_HEADS,
            self_attention=True,
            max_seq_len=MAX_SEQ_LEN,
            compressed=MAX_SEQ_LEN // proj_len,
            shared_kv_compressed=int(is_shared),
        )
        rows = hidden.transpose(0, 1)
        output, _ = functional_call(whole, weights, (rows, rows, rows))
        leaves = {
            "x": hidden,
            **{n: p for n, p in module.named_parameters() if n not in ("key_proj.bias", "value_proj.bias")},
        }
        yield Pair(
            f"{sharing}, {layout}, {length} of {MAX_SEQ_LEN} tokens", module(hidden), output.transpose(0, 1), leaves
        )


def long_short(theirs: Theirs) -> Iterator[Pair]:
    """Compare whole segments, as theirs takes no other."""
    attention = theirs.definitions("long short", "AttentionLS", F=nn.functional).AttentionLS
    names = {"W_q": "query_proj", "W_k": "key_proj", "W_v": "value_proj", "W_o": "out_proj"}
    names |= {"dual_ln_l": "local_norm", "dual_ln_s": "global_norm"}
    for window_size, proj_len, length in ((16, 8, 96), (6, 5, 90)):
        module = build(build_mixer, "long_short", is_causal=False, window_size=window_size, proj_len=proj_len)
        config = SimpleNamespace(
            num_head=NUM_HEADS,
            head_dim=HEAD_DIM,
            transformer_dim=EMBED_DIM,
            max_seq_len=MAX_SEQ_LEN,
            num_landmarks=proj_len,
            window_size=window_size,
            attention_dropout=0.0,
            fp32_attn=False,
            pooling_mode="mean",
            cls_token=False,
        )
        weights = {
            f"{their}.{kind}": getattr(getattr(module, our), kind)
            for their, our in names.items()
            for kind in ("weight", "bias")
        }
        weights["dconv_fc.weight"] = module.share_proj.weight
        weights["dconv_fc.bias"] = torch.zeros(NUM_HEADS * proj_len)
        hidden, mask = hidden_states(length), padding(length)
        keep = ~mask[..., None]
        output = functional_call(attention(config), weights, (hidden, ~mask))
        leaves = {"x": hidden, **dict(module.named_parameters())}
        case = f"window {window_size}, {proj_len} summaries of {length}, padding"
        yield Pair(case, module(hidden, key_padding_mask=mask) * keep, output * keep, leaves)


def luna(theirs: Theirs) -> Iterator[Pair]:
    attention = theirs.definitions("luna", "LunarMultiheadAttention", **FAIRSEQ).LunarMultiheadAttention(
        EMBED_DIM, NUM_HEADS, NUM_HEADS, self_attention=True
    )
    names = {"pq": "pack_query", "pc": "pack_context", "q": "query", "c": "context", "out": "out"}
    first, second = (
        build(build_mixer, "luna", is_causal=False, packed_len=8, sizes={"layer_index": i}) for i in (0, 1)
    )

    def attend(module: Any, hidden: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = {
            f"{theirs}_proj.{kind}": getattr(getattr(module, f"{ours}_proj"), kind)
            for theirs, ours in names.items()
            for kind in ("weight", "bias")
        }
        given = hidden.transpose(0, 1), memory.transpose(0, 1), None
        mixed, packed, _ = functional_call(attention, weights, given, {"context_padding_mask": mask})
        return mixed.transpose(0, 1), packed.transpose(0, 1)

    length = 90
    hidden, mask = hidden_states(length), padding(length)
    ours = first.mix(hidden, key_padding_mask=mask)
    ours = second.mix(hidden + ours.hidden, key_padding_mask=mask, carry=ours.carry)
    memory = first.memory.expand(BATCH_SIZE, -1, -1)
    mixed, packed = attend(first, hidden, memory, mask)
    norm = second.memory_norm
    memory = layer_norm(packed + memory, (EMBED_DIM,), norm.weight, norm.bias)
    mixed, packed = attend(second, hidden + mixed, memory, mask)
    leaves = {"x": hidden, **dict(first.named_parameters()), **dict(second.named_parameters(prefix="second"))}
    keep = ~mask[..., None]
    yield Pair("two layers, padding", ours.hidden * keep, mixed * keep, leaves)
    yield Pair("memory after them", ours.carry, packed + memory, leaves)


def mamba2(theirs: Theirs) -> Iterator[Pair]:
    dual = theirs.definitions("dual", "segsum", "ssd_minimal_discrete").ssd_minimal_discrete
    for expand, size, length in ((2, 8, 96), (1, 24, 64)):
        module = build(build_mixer, "mamba2", is_causal=True, expand=expand, state_dim=size, chunk_len=32)
        hidden = hidden_states(length)
        step = softplus(module.step_proj(hidden) + module.step_bias)
        mixed = silu(_convolved(module.conv_proj(hidden), module.conv, module.conv_bias))
        value, key, query = mixed.split([EMBED_DIM * expand, size, size], -1)
        value = value.unflatten(-1, (NUM_HEADS, -1))
        key, query = (x[:, :, None].expand(-1, -1, NUM_HEADS, -1) for x in (key, query))
        read, _ = dual(value * step[..., None], -module.log_rate.exp() * step, key, query, 16)
        gated = (read + module.skip[:, None] * value).flatten(2) * silu(module.gate_proj(hidden))
        output = module.out_proj(rms_norm(gated, module.norm_scale, 1e-5))
        yield Pair(f"N = {size}", module(hidden), output, {"x": hidden, **dict(module.named_parameters())})


def mega(theirs: Theirs) -> Iterator[Pair]:
    """Compare with their layer without its norm. Its Laplace function, of another file, is written out in all digits.

    Causal and under padding, that function divides by other counts than ours.
    """

    def laplace(scores: Tensor) -> Tensor:
        return (1 + torch.erf((scores - 0.5**0.5) * math.pi**0.5 * 2**0.5)) / 2

    given = {
        **FAIRSEQ,
        "Parameter": nn.Parameter,
        "SequenceNorm": lambda *_, **__: nn.Identity(),
        "FairseqDropout": lambda *_, **__: _given,
        "utils": SimpleNamespace(
            softmax=FAIRSEQ["utils"].softmax,
            laplace=laplace,
            get_activation_fn=lambda activation: getattr(nn.functional, activation),
        ),
        **dict.fromkeys(("Dict", "Optional", "Tuple"), dict),
    }
    average = theirs.definitions("average", "MultiHeadEMA", **given).MultiHeadEMA
    bias = theirs.definitions("distance bias", "SimpleRelativePositionalBias", **given).SimpleRelativePositionalBias
    layer = theirs.definitions(
        "gated", "MovingAverageGatedAttention", **given, MultiHeadEMA=average, SimpleRelativePositionalBias=bias
    ).MovingAverageGatedAttention
    for function, chunk_len, length, is_causal in (
        ("softmax", 32, 128, False),
        ("softmax", 32, 96, True),
        ("laplace", 32, 96, False),
        ("laplace", 24, 96, True),
        ("softmax", 0, 75, False),
        ("laplace", 0, 75, True),
    ):
        options: dict[str, Any] = {
            "chunk_len": chunk_len,
            "ema_dim": 6,
            "query_dim": 24,
            "attention_function": function,
        }
        module = build(build_mixer, "mega", is_causal=is_causal, **options)
        whole = layer(
            EMBED_DIM,
            24,
            2 * EMBED_DIM,
            6,
            attention_activation=function,
            bidirectional=not is_causal,
            chunk_size=chunk_len or -1,
            max_positions=MAX_SEQ_LEN,
        )
        averages = {"delta": "alpha", "alpha": "delta", "beta": "beta"}  # their code calls the first two the other way
        weights = {
            "v_proj.weight": module.value_proj.weight,
            "v_proj.bias": module.value_proj.bias,
            "mx_proj.weight": module.mean_proj.weight,
            "mx_proj.bias": module.mean_proj.bias,
            "h_proj.weight": module.out_proj.weight,
            "h_proj.bias": module.out_proj.bias,
            "gamma": module.kappa,
            "beta": pad(module.mu, (0, 0, 0, 2 - len(module.mu))),
            "move.omega": module.omega,
            "rel_pos_bias.rel_pos_bias": pad(module.distance_bias, (0, ((chunk_len or MAX_SEQ_LEN) - 1) * is_causal)),
            **{f"move.{name}": getattr(module, ours).flatten(0, 1)[..., None] for name, ours in averages.items()},
            "move.gamma": module.eta.flatten(0, 1),
        }
        hidden, mask = hidden_states(length), None if is_causal and function == "laplace" else padding(length)
        keep = torch.ones(BATCH_SIZE, length, 1) if mask is None else ~mask[..., None]
        seen = None
        if is_causal:
            seen = torch.ones(chunk_len or length, chunk_len or length).tril()
            seen = seen if function == "laplace" else seen.log()
        output, _ = functional_call(
            whole, weights, (hidden.transpose(0, 1),), {"padding_mask": mask, "attn_mask": seen}
        )
        case = f"{function}, chunks of {chunk_len or length} of {length}"
        case += ", causal" * is_causal + ", padding" * (mask is not None)
        leaves = {"x": hidden, **dict(module.named_parameters())}
        ours = module(hidden, key_padding_mask=mask)
        yield Pair(case, ours * keep, output.transpose(0, 1) * keep, leaves)


def mla(theirs: Theirs) -> Iterator[Pair]:
    """Compare with both ways of theirs, with values made and with latents read; its pairs are in another order."""

    class Linear(nn.Linear):
        scale = None  # of quantised weights

        def __init__(self, in_features: int, out_features: int) -> None:
            super().__init__(in_features, out_features, bias=False)

    projections = dict.fromkeys(("Linear", "ColumnParallelLinear", "RowParallelLinear"), Linear)
    for way, factor, query_factor, is_causal in (("naive", 4, 0, True), ("absorb", 2, 3, False)):
        given = {"attn_impl": way, "world_size": 1, "ModelArgs": None, "Optional": Optional}
        code = theirs.definitions(
            "latent", "MLA", "RMSNorm", "apply_rotary_emb", "precompute_freqs_cis", **projections, **given
        )
        options = {"latent_factor": factor, "query_latent_factor": query_factor}
        module = build(build_mixer, "mla", is_causal=is_causal, sizes={"position": "rotary"}, **options)
        turned, length = module.num_turned, 70
        sizes = SimpleNamespace(
            dim=EMBED_DIM,
            n_heads=NUM_HEADS,
            q_lora_rank=query_factor * HEAD_DIM,
            kv_lora_rank=factor * HEAD_DIM,
            qk_nope_head_dim=HEAD_DIM - turned,
            qk_rope_head_dim=turned,
            v_head_dim=HEAD_DIM,
            max_batch_size=BATCH_SIZE,
            max_seq_len=length,
            original_seq_len=length,
            rope_theta=10_000.0,
            **dict.fromkeys(("rope_factor", "beta_fast", "beta_slow"), 1),
        )
        pairs = torch.arange(turned).view(2, -1).mT.flatten()  # ours are (i, i + R/2), theirs neighbours
        of_latent = torch.cat([torch.arange(module.latent_dim), module.latent_dim + pairs])
        of_head = torch.cat([torch.arange(HEAD_DIM - turned), HEAD_DIM - turned + pairs])
        of_heads = torch.cat([head * HEAD_DIM + of_head for head in range(NUM_HEADS)])
        weights = {
            "wkv_a.weight": module.down_proj.weight[of_latent],
            "kv_norm.weight": module.latent_norm.weight,
            "wkv_b.weight": module.up_proj.weight,
            "wo.weight": module.out_proj.weight,
        }
        if query_factor:
            down, norm, up = module.query_proj
            weights |= {"wq_a.weight": down.weight, "q_norm.weight": norm.weight, "wq_b.weight": up.weight[of_heads]}
        else:
            weights |= {"wq.weight": module.query_proj.weight[of_heads]}
        hidden = hidden_states(length)
        mask = torch.full((length, length), float("-inf")).triu(1) if is_causal else None
        output = functional_call(code.MLA(sizes), weights, (hidden, 0, code.precompute_freqs_cis(sizes), mask))
        leaves = {"x": hidden, **dict(module.named_parameters())}
        yield Pair(way, module(hidden), output, leaves)


def moba(theirs: Theirs) -> Iterator[Pair]:
    attend = theirs.definitions("moba", "moba_attn_varlen_naive").moba_attn_varlen_naive
    for length, size, count in ((100, 16, 3), (128, 16, 2), (64, 8, 100)):
        query, key, value = heads(length)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        starts = torch.arange(0, (BATCH_SIZE + 1) * length, length)
        output = attend(*rows, starts, length, size, count).unflatten(0, (BATCH_SIZE, -1)).transpose(1, 2)
        module = build(build_attention, "moba", is_causal=True, block_size=size, top_k=count)
        case = f"{count} blocks of {size} of {length}"
        yield Pair(case, module(query, key, value), output, {"q": query, "k": key, "v": value})


class BlockMeans(nn.Module):
    """Means of whole blocks of keys or values `[B, G, L, D]`, in place of a learned phi.

    Args:
        size: of a block.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, rows: Tensor) -> Tensor:
        """Return `[B, G, blocks, D]`."""
        count = rows.shape[2] // self.size
        means: Tensor = rows[:, :, : count * self.size].unflatten(2, (count, self.size)).mean(3)
        return means


def nsa(theirs: Theirs) -> Iterator[Pair]:
    """Compare where theirs is what ours can be: means for phi, and one key and value for all three branches."""

    def mean_pooling(rows: Tensor, size: int, _: None) -> Tensor:  # theirs, written out: the last block may be shorter
        return torch.stack([block.mean(1) for block in rows.split(size, 1)], 1)

    def flash_attn_func(
        query: Tensor, key: Tensor, value: Tensor, *, causal: bool, window_size: Sequence[int]
    ) -> Tensor:
        del causal
        at = torch.arange(query.shape[1])
        distance = at[:, None] - at
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        scores = torch.einsum("blhd,bshd->bhls", query, key) * query.shape[-1] ** -0.5
        scores = scores.masked_fill((distance < 0) | (distance > window_size[0]), -math.inf)
        return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), value)

    names = "naive_nsa", "naive_nsa_selection", "naive_nsa_compression", "naive_nsa_topk"
    given = {"mean_pooling": mean_pooling, "flash_attn_func": flash_attn_func}
    attend = theirs.definitions("sparse", *names, **given).naive_nsa
    num_heads, groups, dim = 32, 2, 8  # they need 16 heads in a group
    for length, size, count, window in ((96, 8, 5, 12), (100, 16, 4, 20), (203, 8, 6, 16)):
        module = build(
            build_mixer,
            "nsa",
            is_causal=True,
            sizes={"num_heads": num_heads, "num_kv_heads": groups, "head_dim": dim},
            compress_len=size,
            compress_stride=size,
            block_size=size,
            num_blocks=count,
            window_size=window,
        )
        module.compress_keys = module.compress_values = BlockMeans(size)
        with torch.no_grad():
            for projection in (module.key_proj, module.value_proj):
                projection.weight.copy_(projection.weight[: groups * dim].repeat(3, 1))
        hidden = hidden_states(length)
        query = module.query_proj(hidden).unflatten(-1, (num_heads, dim))
        key, value = (
            projection(hidden)[..., : groups * dim].unflatten(-1, (groups, dim))
            for projection in (module.key_proj, module.value_proj)
        )
        gates = module.gate_proj(hidden).sigmoid().unflatten(-1, (3, num_heads)).unbind(-2)
        output = attend(query, key, value, *gates, block_counts=count, block_size=size, window_size=window)
        leaves = {"x": hidden, **{name: getattr(module, f"{name}_proj").weight for name in ("query", "gate", "out")}}
        case = f"{count} blocks of {size} of {length}"
        yield Pair(case, module(hidden), module.out_proj(output.flatten(2)), leaves)


def nystrom(theirs: Theirs) -> Iterator[Pair]:
    attention = theirs.definitions("nystrom", "NystromAttention").NystromAttention
    length, count = 256, 32
    for num_taps in (0, 35):
        query, key, value = heads(length)
        config: dict[str, Any] = {
            "head_dim": HEAD_DIM,
            "num_head": NUM_HEADS,
            "num_landmarks": count,
            "seq_len": length,
        }
        # Each matrix has norms of its own, as ours; their file asks for one name and reads another.
        config |= {"inv_coeff_init_option": 1, "inv_init_coeff_option": "own"}
        module = build(build_attention, "nystrom", is_causal=False, num_landmarks=count, conv_len=num_taps)
        leaves = {"q": query, "k": key, "v": value, **dict(module.named_parameters())}
        weights = {}
        if num_taps:
            config["conv_kernel_size"] = num_taps
            weights["conv.weight"] = module.filter[:, None, :, None]
        given = query, key, value, torch.ones(BATCH_SIZE, length)
        output = functional_call(attention(config), weights, given)
        yield Pair(f"filter of {num_taps}", module(query, key, value), output, leaves)


def performer(theirs: Theirs) -> Iterator[Pair]:
    """Compare without the 0.0001 that theirs adds to features of the softmax kernel."""
    names = "softmax_kernel", "generalized_kernel", "linear_attention", "causal_linear_attention_noncuda"
    code = theirs.definitions("performer", *names)
    for is_causal in (False, True):
        for kernel in ("softmax", "relu"):
            query, key, value = heads(200)
            module = build(build_attention, "performer", is_causal=is_causal, num_features=48, kernel=kernel)
            if kernel == "softmax":
                features = partial(code.softmax_kernel, projection_matrix=module.rows, eps=0.0)
                of_query, of_key = features(query, is_query=True), features(key, is_query=False)
            else:
                features = partial(code.generalized_kernel, projection_matrix=module.rows)
                of_query, of_key = features(query), features(key)
            attend = partial(code.causal_linear_attention_noncuda, eps=0.0) if is_causal else code.linear_attention
            case = f"{kernel}, {'causal' if is_causal else 'bidirectional'}"
            output = attend(of_query, of_key, value)
            yield Pair(case, module(query, key, value), output, {"q": query, "k": key, "v": value})


def _given(result: Any, *_: Any, **__: Any) -> Any:
    return result


def prob_sparse(theirs: Theirs) -> Iterator[Pair]:
    """Compare where every key could be drawn: of longer sequences theirs divides the sum of a sample by all keys."""
    attention = theirs.definitions("sampled", "ProbAttention", np=np, sqrt=math.sqrt).ProbAttention
    module = build(build_attention, "prob_sparse", is_causal=False, sizes={"is_cross": True})
    query, key, value = heads(200)[0], *heads(15)[1:]
    with patch("torch.randint", lambda *_: module.sample(200, 15)):
        rows = (x.transpose(1, 2) for x in (query, key, value))
        output, _ = attention(mask_flag=False)(*rows, None)
    leaves = {"q": query, "k": key, "v": value}
    yield Pair("30 of 200 queries, 15 keys", module(query, key, value), output.transpose(1, 2), leaves)


def reformer(theirs: Theirs) -> Iterator[Pair]:
    """Compare with the paper's sets: other buckets hidden, pairs counted once. Theirs divides scores by sqrt(D).

    Without what keeps numbers finite: ours adds 10^-6 under the root of a key, theirs 10^-9 to a count of pairs, and
    hides a token from itself by 50 000, which rounds the logarithm of a sum.
    """
    helpers = "sort_key_val", "batched_index_select", "default", "exists", "max_neg_value", "chunked_sum"
    cached = "cache_method_decorator"
    for is_causal, num_rounds in itertools.product((False, True), (1, 4)):
        options: dict[str, Any] = {"chunk_len": 16, "num_rounds": num_rounds, "num_buckets": 16}  # theirs has L / C
        module = build(build_mixer, "reformer", is_causal=is_causal, **options)
        hidden = hidden_states(256)
        rotations = module.rotations.movedim(0, 1)[None]  # [1, D, R, b / 2]
        drawn = {"randn": partial(_given, rotations), "log": lambda counts: (counts - 1e-9).clamp(1e-9).log()}
        their_torch = SimpleNamespace(**vars(torch) | drawn)
        given = {"torch": their_torch, "wraps": wraps, "TOKEN_SELF_ATTN_VALUE": -1e3}
        code = theirs.definitions("reformer", "LSHAttention", *helpers, cached, **given)
        attend = code.LSHAttention(
            bucket_size=16,
            n_hashes=num_rounds,
            causal=is_causal,
            allow_duplicate_attention=False,
            attend_across_buckets=False,
        )
        query, value = (
            projection(hidden).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2).flatten(0, 1)
            for projection in (module.query_proj, module.value_proj)
        )
        output, _, _ = attend(query * HEAD_DIM**0.5, value)
        merged = output.unflatten(0, (BATCH_SIZE, NUM_HEADS)).transpose(1, 2).flatten(2)
        with patch("attn_zoo.variants.reformer.EPS", 0.0):
            ours = module(hidden)
        case = f"{'causal' if is_causal else 'bidirectional'}, {num_rounds} rounds"
        yield Pair(case, ours, module.out_proj(merged), {"x": hidden, **dict(module.named_parameters())})


def retention(theirs: Theirs) -> Iterator[Pair]:
    """Compare the layer of one repository around the retention of another.

    The layer's own divides each row of weights by its sum, which the norm undoes but for its epsilon. Its pairs of
    features are neighbours, its angles others, and its norm subtracts no mean: ours are given to it.
    """
    naive = theirs.definitions("retention", "naive_retention").naive_retention
    layer = theirs.definitions(
        "retention layer",
        *("MultiScaleRetention", "theta_shift", "rotate_every_two", "get_activation_fn"),
        MultiwayWrapper=lambda _, module: module,
        RMSNorm=nn.LayerNorm,
    )

    class Layer(layer.MultiScaleRetention):  # type: ignore[name-defined, misc]
        def parallel_forward(self, query: Tensor, key: Tensor, value: Tensor, _: None) -> Tensor:
            value = value.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            retained: Tensor = naive(query, key * HEAD_DIM**0.5, value)  # which scales, as the layer has
            return retained.transpose(1, 2)

    half = torch.arange(HEAD_DIM // 2)
    neighbours = torch.stack([half, half + len(half)], 1).flatten()
    rows = (HEAD_DIM * torch.arange(NUM_HEADS)[:, None] + neighbours).flatten()
    for factor, length in ((1, 90), (2, 128)):
        module = build(build_mixer, "retention", is_causal=True, value_factor=factor, chunk_len=16)
        hidden = hidden_states(length)
        weights = {
            "q_proj.weight": module.query_proj.weight[rows],
            "k_proj.weight": module.key_proj.weight[rows],
            "v_proj.weight": module.value_proj.weight,
            "g_proj.weight": module.gate_proj.weight,
            "out_proj.weight": module.out_proj.weight,
        }
        angle = torch.arange(length)[:, None] * (10_000.0 ** (-half / len(half))).repeat_interleave(2)
        whole = Layer(SimpleNamespace(layernorm_eps=1e-6), EMBED_DIM, EMBED_DIM * factor, NUM_HEADS)
        output = functional_call(whole, weights, (hidden, ((angle.sin(), angle.cos()), None)))
        yield Pair(f"values {factor} x", module(hidden), output, {"x": hidden, **dict(module.named_parameters())})


def s4d(theirs: Theirs) -> Iterator[Pair]:
    block = theirs.definitions("s4d", "S4DKernel", "S4D", DropoutNd=nn.Dropout).S4D
    for length, size in ((1, 8), (300, 64)):
        module = build(build_mixer, "s4d", is_causal=True, state_dim=size)
        hidden = hidden_states(length)
        weights = {
            "D": module.skip,
            "kernel.C": module.readout[0],
            "kernel.log_dt": module.log_step,
            "kernel.log_A_real": module.log_rate.view(EMBED_DIM, -1),
            "kernel.A_imag": module.frequency.view(EMBED_DIM, -1),
            "output_linear.0.weight": module.out_proj.weight[..., None],
            "output_linear.0.bias": module.out_proj.bias,
        }
        output, _ = functional_call(block(EMBED_DIM, size, transposed=False), weights, hidden)
        leaves = {"x": hidden, **dict(module.named_parameters())}
        yield Pair(f"N = {size}, {length} tokens", module(hidden), output, leaves)


def sparse_transformer(theirs: Theirs) -> Iterator[Pair]:
    """Compare with attention under their masks: of blocks for fixed stretches, of tokens for strides.

    Their code is made for TensorFlow and a package of kernels. Of these, what draws the masks is written out here.
    """

    def band(ones: Tensor, below: int, above: int) -> Tensor:
        return ones.triu(-below).tril(above)

    tensorflow = SimpleNamespace(
        matrix_band_part=band,
        minimum=min,
        ones=torch.ones,
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        range=lambda length, dtype: torch.arange(length, dtype=dtype),
        reshape=torch.reshape,
        transpose=torch.t,
        floormod=torch.remainder,
        equal=torch.eq,
        logical_and=torch.logical_and,
        cast=lambda mask, dtype: mask.to(dtype),
        int32=torch.int32,
        float32=torch.float64,
    )

    def tokens(layout: Any, block_size: int, mask_callback: Callable[..., Any], heads: int) -> Tensor:
        """Return `[H, L, L]`: the tokens that each block shows, as their kernels ask for them."""
        count = layout.shape[-1]
        keep = torch.zeros(heads, count, block_size, count, block_size, dtype=torch.bool)
        for head, row, column in zip(*layout.nonzero(), strict=True):
            shown = mask_callback((block_size, block_size), head, row, column, None)
            keep[head, row, :, column] = torch.from_numpy(shown)
        return keep.flatten(3, 4).flatten(1, 2)

    drawn = {"tf": tensorflow, "np": np, "BlocksparseTransformer": tokens}
    code = theirs.definitions("factorised", "get_attn_mask", "get_blocksparse_obj", "get_callback", **drawn)
    for pattern, size, stride, length in (("fixed", 8, 4, 128), ("fixed", 4, 8, 160), ("strided", 1, 7, 90)):
        query, key, value = heads(length)
        if pattern == "fixed":
            keep = code.get_blocksparse_obj(length, NUM_HEADS, "fixed", size, size * stride, num_verts=NUM_HEADS)
        else:  # one head that sees both sets, as the paper's merged head
            keep = sum(code.get_attn_mask(length, name, stride) for name in ("local", "strided")) > 0
        scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(~keep, -math.inf)
        options: dict[str, Any] = {"pattern": pattern, "block_size": size, "stride_blocks": stride}
        module = build(build_attention, "sparse_transformer", is_causal=True, **options)
        case = f"{pattern}, {stride} blocks of {size} of {length}"
        yield Pair(case, module(query, key, value), scores.softmax(-1) @ value, {"q": query, "k": key, "v": value})


MECHANISMS: dict[str, Callable[[Theirs], Iterator[Pair]]] = {
    compared.__name__: compared
    for compared in (
        bounded_memory,
        cosformer,
        differential,
        gated_deltanet,
        gated_linear_attention,
        lara,
        linear_attention,
        linformer,
        long_short,
        luna,
        mamba2,
        mega,
        mla,
        moba,
        nsa,
        nystrom,
        performer,
        prob_sparse,
        reformer,
        retention,
        s4d,
        sparse_transformer,
    )
}


def differences(pair: Pair) -> tuple[float, float, str]:
    """Return how far outputs and the worst gradient are apart, of the largest value each, and whose gradient it is."""
    upstream = torch.randn_like(pair.theirs)
    gradients = [
        torch.autograd.grad(output, list(pair.leaves.values()), upstream, retain_graph=True, materialize_grads=True)
        for output in (pair.ours, pair.theirs)
    ]
    found = zip(pair.leaves, *gradients, strict=True)
    worst, leaf = max((_apart(mine, other), name) for name, mine, other in found)
    return _apart(pair.ours, pair.theirs), worst, leaf


def _apart(mine: Tensor, other: Tensor) -> float:
    largest = other.abs().max().item()
    return (mine - other).abs().max().item() / largest if largest else mine.abs().max().item()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="mechanism", help=f"by default all: {', '.join(MECHANISMS)}")
    parser.add_argument("--from", dest="folder", type=Path, help="where the files lie, as FOLDER/OWNER/NAME/PATH")
    asked = parser.parse_args(arguments)
    for name in asked.names:
        if name not in MECHANISMS:
            parser.error(str(UnknownNameError("mechanism", name, list(MECHANISMS))))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    rows, unlike = [], []
    for name in asked.names or MECHANISMS:
        theirs, worst = Theirs(asked.folder), []
        try:
            for pair in MECHANISMS[name](theirs):
                output, gradient, leaf = differences(pair)
                worst.append((output, gradient))
                if max(output, gradient) > TOLERANCE:
                    unlike.append(f"{name}, {pair.case}: output {output:.0e}, gradient of {leaf} {gradient:.0e}")
        except AttnZooError as error:
            parser.error(str(error))
        code = dict.fromkeys(file.repository for file in theirs.used)
        rows.append([name, len(worst), *(f"{max(each):.0e}" for each in zip(*worst, strict=True)), ", ".join(code)])
    columns = ["", "cases", "output", "gradient", "code"]
    print_table("Largest differences from other people's code, of the largest value, in float64", columns, rows)
    print(*unlike or [f"All are within {TOLERANCE:.0e}."], sep="\n")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
