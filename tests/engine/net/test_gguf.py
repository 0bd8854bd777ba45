"""GGUF files as `transformers` loads them and as the `gguf` package reads them."""

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine import __main__ as cli
from engine import families, gguf_file, weights
from engine.config import Export, ModelShape
from engine.mesh import alone
from engine.model import Decoder
from engine.tokenizer import Tokenizer

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_hidden_size": 48,
    "max_seq_len": 64, "vocab_size": 284,
}  # fmt: skip


def model(folder, dtype=torch.float32, tokenizer=None, **shape):
    """A folder with a model of random weights, and four rows more than its tokenizer has."""
    decoder = Decoder(ModelShape(**SIZES | shape), alone(torch.device("cpu")), dtype=dtype, seed=1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    tokenizer = tokenizer or Tokenizer.train(["The signal's down, and the signals down there too."] * 9, 280)
    weights.save(decoder, folder, dtype)
    name = str(dtype).removeprefix("torch.")
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    (folder / "config.json").write_text(json.dumps(families.config_of(decoder.shape, **ids, dtype=name)))
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"architecture": "llama"}, id="llama, which turns neighbours"),
        pytest.param({"architecture": "qwen2", "tie_embeddings": False}, id="qwen2, with biases and an output"),
    ],
)
def test_transformers_loads_the_file_and_gives_the_folders_logits_and_ids(shape, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model(tmp_path / "model", **shape)
    gguf_file.write(folder, tmp_path / "gguf" / "model.gguf")
    ids_BT = torch.arange(40).view(2, 20)
    there, here = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **file)
        for path, file in ((tmp_path / "gguf", {"gguf_file": "model.gguf"}), (folder, {}))
    )
    with torch.no_grad():
        torch.testing.assert_close(there(ids_BT).logits, here(ids_BT).logits, rtol=1e-5, atol=1e-5)
    text = "The signal's down, 12 times."
    said = AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf")
    assert said(text, add_special_tokens=False)["input_ids"] == Tokenizer.load(folder).encode(text)
    assert said.eos_token == "<|endoftext|>"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"architecture": "llama", "attention_bias": "all", "mlp_bias": True}, id="llama with biases"),
        pytest.param({"architecture": "qwen3", "head_dim": 16}, id="qwen3"),
        pytest.param(
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            id="llama 3.1's positions",
        ),
    ],
)
def test_what_was_written_is_read_back_bit_for_bit_and_what_is_spoiled_is_named(shape, dtype, tmp_path):
    folder = model(tmp_path / "model", dtype, **shape)
    path = tmp_path / "model.gguf"
    assert cli.main(["gguf", str(folder), str(path)]) == 0
    count, wrong = gguf_file.differences(path, folder)
    assert (count, wrong) == (len(load_file(folder / "model.safetensors")), [])
    reader = gguf.GGUFReader(path, "r+")
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_q.weight")
    tensor.data.reshape(-1).view("uint8")[0] ^= 1
    reader.data.flush()
    assert gguf_file.differences(path, folder)[1] == ["model.layers.1.self_attn.q_proj.weight"]


def test_a_vocabulary_of_characters_keeps_the_order_of_its_merges(tmp_path):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab |= {text: 259 + place for place, text in enumerate(("\u2581", "a", "b", "ab", "\u2581ab"))}
    merges = [("a", "b"), ("\u2581", "ab")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    told = gguf_file.vocabulary_of(Tokenizer(backend, roles=roles, templates={}), 265)
    assert (told.model, told.space_prefix, told.tokens[264]) == ("llama", True, "[PAD264]")
    # The first merge is best; types are llama.cpp's: 2 unknown, 3 control, 6 byte, 1 normal, 5 unused.
    assert told.scores[262] > told.scores[263] > told.scores[260]
    assert (told.types[0], told.types[1], told.types[3], told.types[263], told.types[264]) == (2, 3, 6, 1, 5)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        pytest.param(
            {"architecture": "bloom", "num_kv_heads": 4, "ffn_hidden_size": 128}, "not available for bloom", id="bloom"
        ),
        pytest.param({"architecture": "mistral", "sliding_window": 16}, "sliding_window=16", id="a window"),
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn'", id="yarn"),
    ],
)
def test_a_shape_that_the_format_has_no_words_for_is_refused_by_name(shape, says):
    with pytest.raises(ValueError, match=says):
        Export(gguf=True).check(ModelShape(**SIZES | shape))


def test_a_vocabulary_that_cuts_text_in_a_way_of_its_own_is_refused(tmp_path, capsys):
    folder, out = model(tmp_path / "model"), str(tmp_path / "model.gguf")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    assert cli.main(["gguf", str(folder), out]) == 1
    assert "gpt-2, smollm, llama-bpe, qwen2" in capsys.readouterr().err
    Tokenizer.bytes().save(folder)
    assert cli.main(["gguf", str(folder), out]) == 1
    assert "bytes alone" in capsys.readouterr().err
