"""`attn-zoo new`: a file with all that a variant or a matrix needs, that runs before you change it."""

from __future__ import annotations

import keyword
import re
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

from attn_zoo.errors import ConfigError, UnknownNameError
from attn_zoo.whole_files import whole_file

_TEMPLATE = Template('''\
"""$title attention: one line that says what it does.

Authors YEAR, "Title", arXiv NUMBER, equation.
    out = softmax(Q K^T / sqrt(D)) V          <- the mathematics, in the paper's form
Cost: time O(B H L S D), memory O(B H L S).

Check it:    attn-zoo check $name --variant-file $file
Measure it:  attn-zoo run quick --variant-file $file --add $name --out runs/$name
"""

from dataclasses import dataclass

from torch import Tensor

from attn_zoo import AbstractAttention, Capabilities, Complexity, Reference, Shape, VariantConfig, register_attention
from attn_zoo.attention.masks import blank_padding, keep_mask, masked_softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class ${cls}Config(VariantConfig):
    \"""The paper's own knobs, with the paper's defaults; `attn-zoo show $name` prints what is said of each.

    Args:
        temperature: divides the scores; 1 is the paper's.
    \"""

    temperature: float = 1.0


def ${name}_flops(shape: Shape) -> int:
    return 4 * shape.batch_size * shape.num_heads * shape.query_len * shape.key_len * shape.head_dim


@register_attention(
    "$name",
    config=${cls}Config,
    capabilities=Capabilities(
        bidirectional=True,
        causal=True,
        cross_attention=True,
        key_padding_mask=True,
        attention_dropout=False,
        is_permutation_invariant=True,  # the order of the keys does not matter; leave it out where it does
        is_padding_invariant=True,  # nor does how much padding follows them
        why={"attention_dropout": "not written yet", "decode": "not written yet", "grouped_query": "not written yet"},
    ),
    complexity=Complexity(
        time="B H L S D",
        memory="B H L S",
        time_exponent=2,
        memory_exponent=2,
        sequential_ops="1",
        max_path="1",
        flops=${name}_flops,
    ),
    reference=Reference(
        title="Title",
        authors="Author et al.",
        year=2026,
        url="https://arxiv.org/abs/0000.00000",
        deviations=(),  # how this differs from the paper, a sentence each; none claims that it does not
    ),
)
class ${cls}Attention(AbstractAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        key, value = (blank_padding(x, key_padding_mask) for x in (key, value))  # may hold anything there, NaN too
        scale = self.build.head_dim**-0.5 / self.config.temperature
        scores = query @ key.transpose(-1, -2) * scale  # [B, H, L, S]
        keep = keep_mask(
            query.shape[-2],
            key.shape[-2],
            is_causal=self.build.is_causal,
            key_padding_mask=key_padding_mask,
            device=query.device,
        )
        return masked_softmax(scores, keep) @ value  # [B, H, L, D]
''')


def new_variant(name: str, folder: Path) -> Path:
    """Write `NAME.py` with a working variant to start from, and return it.

    Raises:
        ConfigError: the name cannot be used, as it is taken or that of a module.
        FolderError: the file exists or cannot be written.
    """
    from attn_zoo.registry import variants

    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or not name.isascii():
        able = re.sub(r"\W+", "_", name.casefold(), flags=re.ASCII).strip("_")
        is_free = able.isidentifier() and not keyword.iskeyword(able) and able not in variants
        hint = f"; did you mean {able!r}?" if is_free else ""
        rule = "lower-case letters, digits and '_', beginning with a letter"
        why = ", a keyword of Python" if keyword.iskeyword(name) else ""
        raise ConfigError("new", [("", f"expected a name of {rule}; got {name!r}{why}{hint}")])
    if name in variants:
        raise ConfigError("new", [("", f"variant {name!r} is already registered by {variants[name].provider}")])
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, [sysconfig.get_path("purelib")]):
        hides = f"{name}.py would hide the module {name!r} from Python where it starts beside it"
        raise ConfigError("new", [("", f"{hides}; choose another name, such as '{name}_attention'")])
    words = name.removesuffix("_attention").split("_")
    cls = "".join(word.capitalize() for word in words)
    text = _TEMPLATE.substitute(name=name, cls=cls, title=" ".join(words).capitalize(), file=f"{name}.py")
    return _write(folder / f"{name}.py", text)


def new_matrix(name: str, folder: Path, like: str) -> Path:
    """Write `NAME.toml`, a copy of a shipped matrix under another name, and return it.

    Raises:
        ConfigError: the name cannot be used.
        FolderError: the file exists or cannot be written.
        UnknownNameError: no such matrix is shipped.
    """
    from attn_zoo.matrix.plan.schema import MATRIX_NAME, shipped_matrices

    shipped = shipped_matrices()
    if like not in shipped:
        raise UnknownNameError("matrix", like, list(shipped), f"there are {', '.join(shipped)}")
    if not re.fullmatch(MATRIX_NAME, name):
        raise ConfigError("new", [("", f"expected a name of letters, digits and . _ -; got {name!r}")])
    text = shipped[like].read_text(encoding="utf-8")
    return _write(
        folder / f"{name}.toml", re.sub(r'^name = ".*"', f'name = "{name}"', text, count=1, flags=re.MULTILINE)
    )


def _write(path: Path, text: str) -> Path:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path
