"""A model's folder as one GGUF file, which llama.cpp and what is built on it read, in the types that the weights have.

Names are the `gguf` package's, and so is the format. Nothing is quantised. Which shapes fit, `engine.config.Export`
says.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from engine import weights
from engine.config import Export, ModelShape, kind_of_scaling
from engine.model import whole_shapes
from engine.rope import FREQUENCIES
from engine.tokenizer import InvalidTokenizer, Tokenizer

NAME = "model.gguf"

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""What a family is there."""
TYPES = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
"""Of a tensor, and of a file whose matrices have it."""
TURNED = ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight", "self_attn.k_proj.bias")
"""Under the llama architecture two elements that are turned together lie side by side, and not half a head apart."""

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _WORDS % "{1,3}"}, "behavior": "Isolated"}, _BYTES],
    "qwen2": [{"type": "Split", "pattern": {"Regex": _WORDS % ""}, "behavior": "Isolated"}, _BYTES],
}
"""How text is cut before it is merged, by the name that llama.cpp has for it; keys that are not here do not matter."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the format's terms."""

    model: str
    """gpt2: byte-level BPE; llama: BPE over characters, with bytes for those that it does not know."""
    tokens: list[str]
    types: list[int]
    merges: list[str]
    """Of gpt2."""
    scores: list[float]
    """Of llama: the earlier a merge, the higher the token that it makes."""
    pre: str
    space_prefix: bool = False


def check(shape: ModelShape, tokenizer: Tokenizer) -> None:
    """Raise ValueError, saying what would work, where such a model can't be a GGUF file."""
    Export(gguf=True).check(shape)
    vocabulary_of(tokenizer, shape.vocab_size)


def write(folder: Path, path: Path, *, went_on: Callable[[], object] = lambda: None) -> None:
    """Write the model in `folder` to `path`, a tensor at a time. Raises ValueError where it can't be such a file."""
    shape, tokenizer = weights.read_shape(folder), Tokenizer.load(folder)
    check(shape, tokenizer)
    path.parent.mkdir(parents=True, exist_ok=True)
    with weights.Folder(folder, shape) as source:
        names, dtype = whole_shapes(shape), weights.read_dtype(folder)
        needed = sum(map(prod, names.values())) * dtype.itemsize
        if shutil.disk_usage(path.parent).free < needed:
            # What writes arrays would not say which error it is.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[shape.architecture]])
        _describe(writer, shape, TYPES[dtype][1])
        _speak(writer, tokenizer, vocabulary_of(tokenizer, shape.vocab_size))
        types: dict[str, torch.dtype] = {}
        for name, size in names.items():
            # Vectors are added and multiplied with fp32 by all who read the format.
            types[name] = torch.float32 if len(size) == 1 else dtype
            count = prod(size) * types[name].itemsize
            kind = TYPES[types[name]][0]
            writer.add_tensor_info(_there(shape, name), size, np.dtype(np.float32), count, raw_dtype=kind)
        factors = _slowed(shape)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in names:
            went_on()
            tensor = _paired(source.whole(name).to(types[name]), name, shape)
            writer.write_tensor_data(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        if factors is not None:
            writer.write_tensor_data(factors)
        writer.close()


def differences(path: Path, folder: Path, *, went_on: Callable[[], object] = lambda: None) -> tuple[int, list[str]]:
    """How many tensors were compared with those in `folder`, and what in the file is not what it is there."""
    shape, tokenizer = weights.read_shape(folder), Tokenizer.load(folder)
    reader = gguf.GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    wrong = []
    names = whole_shapes(shape)
    with weights.Folder(folder, shape) as source:
        for name in names:
            went_on()
            there = found.pop(_there(shape, name), None)
            if there is None or not torch.equal(_read(there, name, shape), source.whole(name).float()):
                wrong.append(name)
    wrong += [name for name in found if name != "rope_freqs.weight"]
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    if tokens != vocabulary_of(tokenizer, shape.vocab_size).tokens:
        wrong.append("tokenizer.ggml.tokens")
    return len(names), wrong


def _read(tensor: gguf.ReaderTensor, name: str, shape: ModelShape) -> Tensor:
    """A tensor of the file as ours, in fp32."""
    (dtype,) = (dtype for dtype, (kind, _) in TYPES.items() if kind == tensor.tensor_type)
    # The format lists the fastest dim first.
    size = [int(length) for length in reversed(tensor.shape)]
    raw = torch.from_numpy(np.array(tensor.data).reshape(-1).view(np.uint8))
    ours = raw.view(dtype).reshape(size).float()
    if not _is_turned(name, shape):
        return ours
    pairs = ours.reshape(-1, shape.head_dim // 2, 2, *size[1:])
    return torch.cat((pairs[:, :, 0], pairs[:, :, 1]), dim=1).reshape(size)


def _paired(tensor: Tensor, name: str, shape: ModelShape) -> Tensor:
    if not _is_turned(name, shape):
        return tensor
    halves = tensor.reshape(-1, 2, shape.head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _is_turned(name: str, shape: ModelShape) -> bool:
    return ARCHITECTURES[shape.architecture] is gguf.MODEL_ARCH.LLAMA and name.endswith(TURNED)


def _there(shape: ModelShape, name: str) -> str:
    names = _names(ARCHITECTURES[shape.architecture], shape.num_layers)
    there = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert there is not None, f"{name} has no name in the format"
    return there


@cache
def _names(architecture: gguf.MODEL_ARCH, num_layers: int) -> gguf.TensorNameMap:
    # Made anew for each tensor it took longer than all that is read and written.
    return gguf.get_tensor_name_map(architecture, num_layers)


def _describe(writer: gguf.GGUFWriter, shape: ModelShape, file_type: int) -> None:
    writer.add_file_type(file_type)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_seq_len)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn_hidden_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    scaling = shape.rope_scaling or {}
    if kind_of_scaling(scaling) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))


def _slowed(shape: ModelShape) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """What each frequency is divided by, where that is not the same for all."""
    scaling = shape.rope_scaling or {}
    if kind_of_scaling(scaling) != "llama3":
        return None
    plain_C, _ = FREQUENCIES["default"](shape, {})
    slowed_C, _ = FREQUENCIES["llama3"](shape, scaling)
    factors: np.ndarray[Any, np.dtype[np.float32]] = (plain_C / slowed_C).numpy()
    return factors


def _speak(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "gpt2":
        writer.add_token_merges(vocabulary.merges)
    else:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    ids: Mapping[Callable[[int], None], int | None] = {
        writer.add_bos_token_id: tokenizer.bos_id,
        writer.add_eos_token_id: tokenizer.eos_id,
        writer.add_unk_token_id: tokenizer.unk_id,
        writer.add_pad_token_id: tokenizer.pad_id,
        writer.add_eot_token_id: tokenizer.turn_end_id,
    }
    for add, identity in ids.items():
        if identity is not None:
            add(identity)
    writer.add_add_bos_token(bool(tokenizer.start_ids))
    writer.add_chat_template(tokenizer.chat_template)


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The tokenizer's entries, up to `size`. Raises InvalidTokenizer where the format has no name for what it does."""
    described = json.loads(tokenizer.backend.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise InvalidTokenizer(f"a tokenizer of type {model['type']} can't be put into a GGUF file; only BPE can")
    if not model["merges"]:
        raise InvalidTokenizer("a vocabulary of bytes alone can't be put into a GGUF file; train a tokenizer")
    by_id = {identity: text for text, identity in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    tokens = [by_id.get(identity, f"[PAD{identity}]") for identity in range(size)]
    types = [gguf.TokenType.NORMAL if identity in by_id else gguf.TokenType.UNUSED for identity in range(size)]
    for identity, token in tokenizer.backend.get_added_tokens_decoder().items():
        types[identity] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if not model.get("byte_fallback"):
        return Vocabulary("gpt2", tokens, [*map(int, types)], merges, [], _pre(described))
    rank: dict[str, int] = {}
    for place, pair in enumerate(merges):
        rank.setdefault(pair.replace(" ", "", 1), place)
    for identity, text in enumerate(tokens):
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[identity] = gguf.TokenType.BYTE
    if model.get("unk_token") in by_id.values():
        types[tokens.index(model["unk_token"])] = gguf.TokenType.UNKNOWN
    scores = [
        -float(rank.get(text, len(merges))) if kind == gguf.TokenType.NORMAL else 0.0
        for text, kind in zip(tokens, types, strict=True)
    ]
    return Vocabulary("llama", tokens, [*map(int, types)], [], scores, "default", _space_prefix(described))


def _pre(described: Mapping[str, Any]) -> str:
    steps = list(_steps(described.get("pre_tokenizer"), "pretokenizers"))
    normalized = [step["type"] for step in _steps(described.get("normalizer"), "normalizers")]
    for name, known in PRE_TOKENIZERS.items():
        if len(known) == len(steps) and all(
            want.items() <= step.items() for want, step in zip(known, steps, strict=True)
        ):
            usual = normalized in ([], ["NFC"]) if name == "qwen2" else not normalized
            if usual and bool(described["model"].get("ignore_merges")) == (name == "llama-bpe"):
                return name
    raise InvalidTokenizer(
        "how this tokenizer cuts text before merging has no name in GGUF that is known here; those that have are "
        f"{', '.join(PRE_TOKENIZERS)}, and BPE with bytes for unknown characters"
    )


def _space_prefix(described: Mapping[str, Any]) -> bool:
    """Whether a text begins with a space that nobody wrote."""
    steps = [
        *_steps(described.get("normalizer"), "normalizers"),
        *_steps(described.get("pre_tokenizer"), "pretokenizers"),
    ]
    unknown = {step["type"] for step in steps} - {"Prepend", "Replace", "Metaspace"}
    if unknown:
        raise InvalidTokenizer(f"a tokenizer with {min(unknown)} can't be put into a GGUF file; it has no such step")
    return any(step["type"] == "Prepend" or step.get("prepend_scheme", "never") != "never" for step in steps)


def _steps(part: Mapping[str, Any] | None, several: str) -> Iterator[dict[str, Any]]:
    if part is not None:
        yield from part[several] if part["type"] == "Sequence" else [dict(part)]
