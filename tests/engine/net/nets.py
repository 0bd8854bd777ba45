"""Small models, batches and ways to look at gradients, for the tests of the net."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import gather, lora, mesh, weights
from engine.batch import IGNORE, Batch
from engine.config import Lora, ModelShape, Operation, Parallel, Recompute
from engine.meter import Meter
from engine.model import Decoder, generator_of
from engine.placement import placement_of

CPU = torch.device("cpu")
LORA = Lora(rank=4, alpha=6.0)


def shape(**changes: Any) -> ModelShape:
    """Two layers, four heads of 8, two key-value heads."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 48,
        "max_seq_len": 64,
        "vocab_size": 96,
        "init_std": 0.2,
    }
    return ModelShape(**{**sizes, **changes})


def batch(vocab: int = 96, *, rows: int = 2, tokens: int = 16, seed: int = 0, packed: bool = False) -> Batch:
    """Random ids; a few positions without a label. Packed rows hold documents of 5, 1 and the other tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, tokens + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORE
    positions = torch.arange(tokens).expand(rows, -1)
    documents = None
    if packed:
        lengths = (5, 1, tokens - 6)
        positions = torch.cat([torch.arange(n) for n in lengths]).expand(rows, -1)
        documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(rows, -1)
    return Batch(ids[:, :-1], labels, positions, documents)


def decoder(
    of: ModelShape,
    *,
    recompute: str | Collection[Operation] = "none",
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Decoder:
    """A model on one rank, drawn from seed 7. `recompute` is a mode, or the operations that are replayed."""
    replayed = Recompute(mode=recompute).replayed if isinstance(recompute, str) else recompute
    return Decoder(of, more.pop("grid", mesh.alone(CPU)), recompute=replayed, dtype=dtype, seed=7, **more)


def uneven(model: Decoder) -> Decoder:
    """With norms and biases that are not what they start as, the same in every layout."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                placement = placement_of(parameter)
                drawn = torch.empty(placement.shape).normal_(0, 0.3, generator=generator_of(11, name))
                placement.true_part(parameter).add_(placement.piece(drawn))
    return model


def grid(*, sequence: bool) -> mesh.Mesh:
    """The whole world along the tensor axis."""
    return mesh.build(Parallel(tensor=torch.distributed.get_world_size(), sequence=sequence))


def gradients(model: Decoder) -> dict[str, Tensor]:
    """The gradient of each trainable parameter as a global tensor, partial ones summed over their group."""
    whole = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grad, partial = parameter.grad.clone(), placement_of(parameter).partial
            if partial and (group := model.mesh.group(partial)) is not None:
                torch.distributed.all_reduce(grad, group=group)
            whole[name] = gather.whole(grad, parameter, model.axis)
    return whole


def distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def apart(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest `distance` of one gradient from the one that was expected.

    What a key's bias adds to a query's scores is the same for all keys, but for the turns of rotary positions, and
    softmax does not see it: its gradient is nothing, or a small rest of large parts, such as the weight's gradient has.
    """
    assert got.keys() == expected.keys()
    scales = {name: expected[name.replace("k_proj.bias", "k_proj.weight")] for name in expected}
    return max(((got[name] - expected[name]).norm() / scales[name].norm()).item() for name in expected)


def trained(model: Decoder, on: Batch) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and the gradients that it leaves."""
    parts = model.loss(on)
    mean = parts.loss_sum / parts.label_count
    mean.backward()
    return mean.item(), gradients(model)


def saved_by_a_layer(
    grid: mesh.Mesh, recompute: str | Collection[Operation], by: Lora | None = None, **changes: Any
) -> int:
    """Bytes that the last layer in bf16 keeps for backward on this rank, parameters left out."""
    return saved_by_layers(grid, recompute, by, **changes)[-1]


def saved_by_layers(
    grid: mesh.Mesh, recompute: str | Collection[Operation], by: Lora | None = None, **changes: Any
) -> list[int]:
    """The same of each layer."""
    model = decoder(shape(**changes), grid=grid, recompute=recompute, dtype=torch.bfloat16)
    if by is not None:
        adapted(model, by)
    with Meter(model.parameters(), dict(model.model.layers.items())) as meter:
        loss = model.loss(batch(packed=True)).loss_sum
    assert loss.requires_grad
    return [meter.bytes[name] for name in model.model.layers]


def loaded(folder: Path, *, grid: mesh.Mesh | None = None) -> Decoder:
    """The model in `folder`, in its own dtype."""
    model = Decoder(weights.read_shape(folder), grid or mesh.alone(CPU), dtype=weights.read_dtype(folder))
    weights.load(model, folder)
    return model


def adapted(model: Decoder, by: Lora = LORA) -> Decoder:
    """With adapters whose B is not zero, so that they have an effect."""
    lora.adapt(model, by, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):
                placement = placement_of(parameter)
                drawn = torch.empty(placement.shape).normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
                placement.true_part(parameter).copy_(placement.piece(drawn))
    return model
