"""What our tensors are called in a family's files and how they lie there, as data; and the ways there and back.

Inside, every family has llama's names. Which file holds what is `engine.weights`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.config import ModelShape


@dataclass(frozen=True)
class Naming:
    """How a family's files name what is ours."""

    outer: Mapping[str, str] = field(default_factory=dict)
    """Our modules around the layers and theirs; what is not here has the name it has with us."""
    layers: str = "model.layers"
    inner: Mapping[str, str] = field(default_factory=dict)
    """Our modules within a layer and theirs."""
    fused: str | None = None
    """The module that holds query, key and value in one."""
    by_head: bool = False
    """In it each head's three lie side by side; otherwise all queries come first, then all keys, then all values."""
    inputs_first: bool = False
    """The matrices of a layer are stored transposed."""
    prefix: str = ""
    """What every name but the output layer's begins with; some files leave it out."""
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Ends of names that old files carry and that follow from the config."""


NAMINGS = {
    "gpt2": Naming(
        outer={"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f"},
        layers="h",
        inner={
            "input_layernorm": "ln_1",
            "self_attn.o_proj": "attn.c_proj",
            "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
        },
        fused="attn.c_attn",
        inputs_first=True,
        prefix="transformer.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "bloom": Naming(
        outer={
            "model.embed_tokens": "word_embeddings",
            "model.embed_norm": "word_embeddings_layernorm",
            "model.norm": "ln_f",
        },
        layers="h",
        inner={
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fused="self_attention.query_key_value",
        by_head=True,
        prefix="transformer.",
    ),
}
"""By architecture; the others' files have our names."""
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""What a fused module holds, in its order."""
OUTPUT = "lm_head"


@dataclass(frozen=True)
class Stored:
    """Where one of our tensors, or a module's, lies in a family's files."""

    name: str
    transposed: bool = False
    """Inputs come first, where it is a matrix."""
    part: int = 0
    parts: int = 1
    """It is one of so many that share the tensor, along the outputs."""
    block: int = 0
    """Outputs of a part that lie side by side before the next part has its turn; with one part of no meaning."""

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Of the file's tensor, where ours, as a whole, has this one."""
        outputs, *inputs = ours
        theirs = (outputs * self.parts, *inputs)
        return theirs[::-1] if self.transposed else theirs

    def read(
        self, window: Callable[[int, int, int], Tensor], ours: tuple[int, ...], dim: int, start: int, length: int
    ) -> Tensor:
        """Our indices `start` to `start + length` of `dim`, of a tensor of shape `ours` as a whole.

        `window(dim, start, length)` is a part of the file's tensor; no more is read than what holds ours.
        """
        at = len(ours) - 1 - dim if self.transposed else dim
        if self.parts == 1:
            return self._turned(window(at, start, length))
        assert dim == 0, "parts lie along the outputs"
        first, last = start // self.block, -(-(start + length) // self.block)
        within = start - first * self.block
        if last - first == 1:
            return self._turned(window(at, (first * self.parts + self.part) * self.block + within, length))
        group = self.parts * self.block
        several = self._turned(window(at, first * group, (last - first) * group))
        return parted(several, self)[self.part][within : within + length]

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.t() if self.transposed else tensor


def naming_of(shape: ModelShape) -> Naming:
    """How the files of this shape's family name what is ours."""
    return NAMINGS.get(shape.architecture, Naming())


def module_stored(shape: ModelShape, module: str) -> Stored:
    """Where the parameters of one of our modules lie; the name is a module's."""
    naming = naming_of(shape)
    if module == OUTPUT or not naming.outer:
        return Stored(module)
    if module in naming.outer:
        return Stored(naming.prefix + naming.outer[module])
    number, _, inner = module.removeprefix("model.layers.").partition(".")
    layer = f"{naming.prefix}{naming.layers}.{number}."
    if naming.fused is not None and inner in PROJECTIONS:
        block = shape.head_dim if naming.by_head else shape.num_heads * shape.head_dim
        part = PROJECTIONS.index(inner)
        return Stored(f"{layer}{naming.fused}", naming.inputs_first, part, len(PROJECTIONS), block)
    return Stored(layer + naming.inner.get(inner, inner), naming.inputs_first)


def stored(shape: ModelShape, name: str) -> Stored:
    """Where the parameter that we call `name` lies."""
    module, _, end = name.rpartition(".")
    there = module_stored(shape, module)
    return replace(there, name=f"{there.name}.{end}")


def with_prefix(shape: ModelShape, name: str) -> str:
    """The full name of a tensor that a file may call by a shorter one."""
    prefix = naming_of(shape).prefix
    return name if name.startswith((prefix, f"{OUTPUT}.")) else prefix + name


def to_files(shape: ModelShape, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Our global tensors as those of the family's files; what shares a file's tensor is held until all parts came."""
    waiting: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        there = stored(shape, name)
        if there.parts > 1:
            parts = waiting.setdefault(there.name, {})
            parts[there.part] = tensor
            if len(parts) < there.parts:
                continue
            del waiting[there.name]
            tensor = joined([parts[number] for number in range(there.parts)], there)
        yield there.name, tensor.t() if there.transposed and tensor.dim() == 2 else tensor
    assert not waiting, "a part of a tensor never came"


def joined(parts: list[Tensor], there: Stored) -> Tensor:
    """Tensors whose first dim are outputs, as they lie together."""
    blocks = [part.reshape(-1, there.block, *part.shape[1:]) for part in parts]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def parted(tensor: Tensor, there: Stored) -> list[Tensor]:
    """The parts of what `joined` put together."""
    blocks = tensor.reshape(-1, there.parts, there.block, *tensor.shape[1:])
    return [part.flatten(0, 1) for part in blocks.unbind(1)]
