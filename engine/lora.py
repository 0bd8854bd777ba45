"""Low-rank adapters beside frozen matrices (Hu et al. 2021, equation 3), cut as their hosts are, in `peft`'s files.

y = W x + scale B A dropout(x), where the scale is alpha / rank, or alpha / sqrt(rank) under rslora. Beside a column
layer A is replicated and B shares W's outputs; beside a row layer A shares W's inputs and B is replicated. Only the
rank-wide product between A and B travels.

Where a family's files hold query, key and value in one matrix, their adapters are one there too, of the summed rank:
with A on top of one another and B block-diagonal it is the same function.

B rows, T tokens, S tokens of this rank, D features, E outputs of this rank, F inputs of this rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from engine import tensorfile
from engine.comm import gather_tokens, sum_parts
from engine.config import Lora, ModelShape
from engine.dropout import Draw, dropout
from engine.fused import joined, parted
from engine.gather import merged, wholes
from engine.inventory import InvalidWeights
from engine.ledger import Ledger
from engine.linear import ColumnLinear, RowLinear
from engine.model import Decoder, generator_of, whole_shapes
from engine.naming import Stored, module_stored, naming_of
from engine.placement import Placement, empty_local, place, placement_of
from engine.together import together
from engine.weights import Folder

TARGETS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Where each target of `Lora.targets` stands in a layer."""

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class Adapter(nn.Module):
    """A and B beside one matrix."""

    def __init__(self, host: ColumnLinear | RowLinear, name: str, lora: Lora, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.host_name, self.rate, self.scale = name, lora.dropout, lora.scale
        self.axis, self.shares_outputs = host.axis, isinstance(host, ColumnLinear)
        outputs, inputs = placement_of(host.weight).shape
        axis = host.axis
        # What is replicated sees this rank's tokens only, and so has a part of the gradient, as a norm's weight has.
        partial = "tensor" if axis.sequence else None
        down = Placement((lora.rank, inputs), copy=axis.rank, partial=partial)
        up = Placement((outputs, lora.rank), copy=axis.rank, partial=partial)
        if self.shares_outputs:
            up = replace(placement_of(host.weight), shape=up.shape)
        else:
            down = replace(placement_of(host.weight), shape=down.shape)
        self.lora_A, self.lora_B = Matrix(down, host), Matrix(up, host)

    def forward(self, x: Tensor, draw: Draw | None) -> Tensor:
        """What is added to the host's output: B S D to B T E beside a column layer, B T F to B S D beside a row one."""
        if self.rate and draw is not None:
            masked = partial(
                dropout,
                stream=self.host_name,
                tokens_N=draw.tokens_S if self.shares_outputs else draw.tokens_T,
                first_feature=placement_of(self.lora_A.weight).start,
            )
            x = self.ledger.output("dropout", masked, x, self.rate, draw)
        inner = linear(x, self.lora_A.weight)
        inner = gather_tokens(inner, self.axis) if self.shares_outputs else sum_parts(inner, self.axis)
        return linear(inner, self.lora_B.weight) * self.scale


class Matrix(nn.Module):
    """A placed weight under the name that `peft` gives it."""

    def __init__(self, placement: Placement, host: ColumnLinear | RowLinear) -> None:
        super().__init__()
        like = host.weight
        local = empty_local(placement, dtype=like.dtype, device=like.device)
        self.weight = place(nn.Parameter(local), placement)


def adapt(decoder: Decoder, lora: Lora, *, seed: int) -> None:
    """Freeze the decoder and put adapters beside `lora.targets` of each layer, the only parameters that then train.

    As in `peft`, A is uniform within 1/sqrt(inputs) (Kaiming with a = sqrt 5) and B zero, so that nothing changes at
    first. A is drawn from (seed, name), the same in every layout; dropout masks are drawn from `seed` too.
    """
    decoder.requires_grad_(False)
    decoder.dropout_seed = seed
    for number, layer in decoder.model.layers.items():
        for target in lora.targets_in(decoder.shape):
            host = layer.get_submodule(TARGETS[target])
            assert isinstance(host, ColumnLinear | RowLinear)
            name = f"model.layers.{number}.{TARGETS[target]}"
            host.adapter = Adapter(host, name, lora, decoder.ledger)
            _draw(host.adapter.lora_A.weight, f"{name}.lora_A.weight", seed)


def merged_state(decoder: Decoder, base: Path) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the folder `base` on the host, with scale B A added to the adapted ones, in fp32.

    From the base as it is stored, not as the decoder holds it, which may be rounded to another type. All ranks that
    hold a model between them go through it together, for the adapters are gathered from them.
    """
    scales = merged(decoder.mesh, {adapter.host_name: adapter.scale for adapter in _adapters(decoder)})
    adapters = dict(wholes(decoder, _parameters(decoder)))
    with Folder(base, decoder.shape) as folder:
        for name in decoder.mesh.stopwatch.whereabouts.through(whole_shapes(decoder.shape)):
            stored, host = folder.whole(name), name.removesuffix(".weight")
            if host in scales and host != name:
                down, up = (adapters[f"{host}.adapter.lora_{side}.weight"].float() for side in "AB")
                stored = stored.float() + up @ down * scales[host]
            yield name, stored


def save_adapter(decoder: Decoder, lora: Lora, directory: Path, *, base_name: str) -> None:
    """Write the adapters as `peft` reads them; `base_name` is the base's name or path.

    Every rank calls it, world rank 0 writes.
    """
    whole = dict(wholes(decoder, _parameters(decoder)))
    tensors: list[tuple[str, Tensor]] = []
    for host in _hosts(decoder):
        pairs = [(whole[f"{name}.adapter.lora_A.weight"], whole[f"{name}.adapter.lora_B.weight"]) for name in host.ours]
        down, up = host.in_file(pairs)
        tensors += [(f"{host.name}.lora_A.weight", down), (f"{host.name}.lora_B.weight", up)]
    if decoder.mesh.world_rank != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    tensorfile.write(directory / WEIGHTS, tensors)
    config = _peft_config(decoder.shape, lora, base_name)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(decoder: Decoder, directory: Path) -> None:
    """Fill the adapters of an adapted decoder from `peft`'s file, each rank its piece. Every rank calls it together.

    Raises InvalidWeights naming the tensor that is missing, unknown, of another shape, or no adapter of ours; where one
    rank can't read it, the others raise LostContact.
    """
    hosts = list(_hosts(decoder))
    with together(decoder.mesh), safe_open(directory / WEIGHTS, framework="pt") as file, torch.no_grad():
        known = {f"{host.name}.lora_{side}.weight" for host in hosts for side in "AB"}
        if odd := set(file.keys()) ^ known:
            name = min(odd)
            raise InvalidWeights(
                f"{directory}: {name} is {'missing for' if name in known else 'not part of'} this adapter"
            )
        mine = {adapter.host_name: adapter for adapter in _adapters(decoder)}
        for host in hosts:
            down, up = (file.get_tensor(f"{host.name}.lora_{side}.weight") for side in "AB")
            for ours, pair in zip(host.ours, host.from_file(down, up, directory), strict=True):
                if (adapter := mine.get(ours)) is None:
                    continue
                for matrix, tensor in zip((adapter.lora_A, adapter.lora_B), pair, strict=True):
                    placement = placement_of(matrix.weight)
                    placement.true_part(matrix.weight).copy_(placement.piece(tensor))


@dataclass(frozen=True)
class _Host:
    """A matrix of the family's files, and the adapters that are one adapter beside it there."""

    there: Stored
    ours: list[str]
    """What we call the matrices that the adapters stand beside."""
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]
    """Of A and B of each adapter, as a whole."""
    parts: list[int]
    """Which part of the matrix each adapter belongs to."""

    @property
    def name(self) -> str:
        return PREFIX + self.there.name

    def in_file(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One A and one B of whole ones."""
        if self.there.parts == 1:
            return pairs[0]
        down = torch.cat([down for down, _ in pairs])
        ups = [pairs[0][1].new_zeros(len(pairs[0][1]), len(down)) for _ in range(self.there.parts)]
        for number, (part, (_, up)) in enumerate(zip(self.parts, pairs, strict=True)):
            ups[part][:, self._columns(number, up.shape[1])] = up
        return down, joined(ups, self.there)

    def from_file(self, down: Tensor, up: Tensor, directory: Path) -> list[tuple[Tensor, Tensor]]:
        """A and B of each adapter. Raises InvalidWeights where the file's are not of such a kind."""
        (rank, inputs), (outputs, _) = self.shapes[0]
        ranks = len(self.shapes) * rank
        shapes = {"A": (ranks, inputs), "B": (self.there.parts * outputs, ranks)}
        for (side, shape), tensor in zip(shapes.items(), (down, up), strict=True):
            if tuple(tensor.shape) != shape:
                raise InvalidWeights(
                    f"{directory}: {self.name}.lora_{side}.weight has shape {list(tensor.shape)}, not {list(shape)}"
                )
        if self.there.parts == 1:
            return [(down, up)]
        ups, pairs = parted(up, self.there), []
        for number, part in enumerate(self.parts):
            own = self._columns(number, rank)
            pairs.append((down[own], ups[part][:, own].clone()))
            ups[part][:, own] = 0
        if any(rest.any() for rest in ups):
            raise InvalidWeights(
                f"{directory}: {self.name}.lora_B.weight mixes queries, keys and values; only adapters that keep them "
                "apart, as exported ones do, can be read"
            )
        return pairs

    @staticmethod
    def _columns(number: int, rank: int) -> slice:
        return slice(number * rank, (number + 1) * rank)


def _hosts(decoder: Decoder) -> Iterator[_Host]:
    """The adapted matrices of all stages as the family's files have them, in the order of the model."""
    shapes = {
        adapter.host_name: (placement_of(adapter.lora_A.weight).shape, placement_of(adapter.lora_B.weight).shape)
        for adapter in _adapters(decoder)
    }
    shapes = merged(decoder.mesh, shapes)
    found: dict[str, _Host] = {}
    for name in whole_shapes(decoder.shape):
        ours = name.removesuffix(".weight")
        if ours in shapes:
            there = module_stored(decoder.shape, ours)
            host = found.setdefault(there.name, _Host(there, [], [], []))
            host.ours.append(ours)
            host.shapes.append(shapes[ours])
            host.parts.append(there.part)
    yield from found.values()


def _adapters(decoder: Decoder) -> list[Adapter]:
    return [module for module in decoder.modules() if isinstance(module, Adapter)]


def _parameters(decoder: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of this rank's adapters."""
    return ((name, parameter) for name, parameter in decoder.named_parameters() if ".adapter." in name)


@torch.no_grad()
def _draw(parameter: nn.Parameter, name: str, seed: int) -> None:
    placement = placement_of(parameter)
    bound = placement.shape[1] ** -0.5
    drawn = torch.empty(placement.shape).uniform_(-bound, bound, generator=generator_of(seed, name))
    placement.true_part(parameter).copy_(placement.piece(drawn))


def _peft_config(shape: ModelShape, lora: Lora, base_name: str) -> dict[str, Any]:
    modules = Counter(_in_layer(shape, target) for target in lora.targets_in(shape))
    fused = {module: count for module, count in modules.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # Several in one: both grow, so that the scale stays.
        "rank_pattern": {module: count * lora.rank for module, count in fused.items()},
        "alpha_pattern": {
            module: (sqrt(count) if lora.rslora else count) * lora.alpha for module, count in fused.items()
        },
        "lora_dropout": lora.dropout,
        "target_modules": list(modules),
        "bias": "none",
        "fan_in_fan_out": naming_of(shape).inputs_first,
        "init_lora_weights": True,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _in_layer(shape: ModelShape, target: str) -> str:
    """What tells a target from the other matrices of a layer, in the family's files."""
    *_, block, name = module_stored(shape, f"model.layers.0.{TARGETS[target]}").name.split(".")
    return name if naming_of(shape).fused is None else f"{block}.{name}"
