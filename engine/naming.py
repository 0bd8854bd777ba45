"""What a model's tensors are, what they are called in a family's files and how they lie there, as data.

Inside, every family has llama's names. Pure: part of the engine's contract, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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


Sizes = tuple[int, ...]


def shapes_of(shape: ModelShape) -> dict[str, Sizes]:
    """Our name and the shape of each tensor of a whole model, as `engine.model` makes them."""
    vocabulary = (shape.vocab_size, shape.hidden_size)
    found: dict[str, Sizes] = {"model.embed_tokens.weight": vocabulary}
    if shape.family.positions == "learned":
        found["model.embed_positions.weight"] = (shape.max_seq_len, shape.hidden_size)
    if shape.family.embed_norm:
        found |= _norm(shape, "model.embed_norm")
    for layer in range(shape.num_layers):
        found |= {f"model.layers.{layer}.{name}": sizes for name, sizes in _of_layer(shape).items()}
    found |= _norm(shape, "model.norm")
    return found if shape.tie_embeddings else found | {f"{OUTPUT}.weight": vocabulary}


def _of_layer(shape: ModelShape) -> dict[str, Sizes]:
    hidden, inner = shape.hidden_size, shape.ffn_hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inward, outward = shape.attention_bias != "none", shape.attention_bias == "all"
    matrices = {
        "self_attn.q_proj": (queries, hidden, inward),
        "self_attn.k_proj": (keys, hidden, inward),
        "self_attn.v_proj": (keys, hidden, inward),
        "self_attn.o_proj": (hidden, queries, outward),
        "mlp.gate_proj": (inner, hidden, shape.mlp_bias),
        "mlp.up_proj": (inner, hidden, shape.mlp_bias),
        "mlp.down_proj": (hidden, inner, shape.mlp_bias),
    }
    if "gate" not in shape.family.matrices:
        del matrices["mlp.gate_proj"]
    found = _norm(shape, "input_layernorm") | _norm(shape, "post_attention_layernorm")
    for name, (outputs, inputs, has_bias) in matrices.items():
        found[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            found[f"{name}.bias"] = (outputs,)
    if shape.qk_norm:
        found |= {f"self_attn.{name}.weight": (shape.head_dim,) for name in ("q_norm", "k_norm")}
    return found


def _norm(shape: ModelShape, module: str) -> dict[str, Sizes]:
    parts = ("weight", "bias") if shape.family.norm == "layer" else ("weight",)
    return {f"{module}.{part}": (shape.hidden_size,) for part in parts}
