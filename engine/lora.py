"""Low-rank adapters beside frozen matrices (Hu et al. 2021, equation 3), cut as their hosts are, in `peft`'s files.

y = W x + (alpha / rank) B A dropout(x). Beside a column layer A is replicated and B shares W's outputs; beside a row
layer A shares W's inputs and B is replicated. Only the rank-wide product between A and B travels.

B rows, T tokens, S tokens of this rank, D features, E outputs of this rank, F inputs of this rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from engine import tensorfile
from engine.comm import gather_tokens, sum_parts
from engine.config import Lora
from engine.dropout import Draw, dropout
from engine.ledger import Ledger
from engine.linear import ColumnLinear, RowLinear
from engine.model import Decoder, generator_of
from engine.placement import Placement, empty_local, place, placement_of
from engine.weights import Folder, InvalidWeights, whole

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
        self.host_name, self.rate, self.scale = name, lora.dropout, lora.alpha / lora.rank
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
        self.lora_A, self.lora_B = _Matrix(down, host), _Matrix(up, host)

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


class _Matrix(nn.Module):
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
        for target in lora.targets:
            host = layer.get_submodule(TARGETS[target])
            assert isinstance(host, ColumnLinear | RowLinear)
            name = f"model.layers.{number}.{TARGETS[target]}"
            host.adapter = Adapter(host, name, lora, decoder.ledger)
            _draw(host.adapter.lora_A.weight, f"{name}.lora_A.weight", seed)


def merged_state(decoder: Decoder, base: Path) -> Iterator[tuple[str, Tensor]]:
    """Each weight of the folder `base` on the host, with (alpha / rank) B A added to the adapted ones, in fp32.

    From the base as it is stored, not as the decoder holds it, which may be rounded to another type. All ranks of a
    tensor axis go through it together, for the adapters are gathered from them.
    """
    adapters = {f"{adapter.host_name}.weight": adapter for adapter in _adapters(decoder)}
    with Folder(base) as folder:
        for name, _ in decoder.named_parameters():
            if ".adapter." in name:
                continue
            stored, adapter = folder.whole(name), adapters.get(name)
            if adapter is not None:
                down, up = (whole(m.weight, m.weight, decoder.axis).float() for m in (adapter.lora_A, adapter.lora_B))
                stored = stored.float() + (up @ down * adapter.scale).cpu()
            yield name, stored


def save_adapter(decoder: Decoder, lora: Lora, directory: Path, *, base_name: str) -> None:
    """Write the adapters as `peft` reads them; `base_name` is the base's name or path.

    Every rank calls it, world rank 0 writes.
    """
    tensors = [(name, whole(parameter, parameter, decoder.axis).cpu()) for name, parameter in _exported(decoder)]
    if decoder.mesh.world_rank != 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    tensorfile.write(directory / WEIGHTS, tensors)
    (directory / CONFIG).write_text(json.dumps(_peft_config(lora, base_name), indent=2) + "\n", encoding="utf-8")


def load_adapter(decoder: Decoder, directory: Path) -> None:
    """Fill the adapters of an adapted decoder from `peft`'s file, each rank its piece.

    Raises InvalidWeights naming the tensor that is missing, unknown or of another shape.
    """
    with safe_open(directory / WEIGHTS, framework="pt") as file, torch.no_grad():
        stored = set(file.keys())
        wanted = dict(_exported(decoder))
        if stored != wanted.keys():
            odd = min(stored ^ wanted.keys())
            raise InvalidWeights(
                f"{directory}: {odd} is {'not part of' if odd in stored else 'missing for'} this adapter"
            )
        for name, parameter in wanted.items():
            placement = placement_of(parameter)
            tensor = file.get_tensor(name)
            if tuple(tensor.shape) != placement.shape:
                raise InvalidWeights(f"{directory}: {name} has shape {list(tensor.shape)}, not {list(placement.shape)}")
            placement.true_part(parameter).copy_(placement.piece(tensor))


def _adapters(decoder: Decoder) -> list[Adapter]:
    return [module for module in decoder.modules() if isinstance(module, Adapter)]


def _exported(decoder: Decoder) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in decoder.named_parameters():
        if ".adapter." in name:
            yield PREFIX + name.replace(".adapter.", "."), parameter


@torch.no_grad()
def _draw(parameter: nn.Parameter, name: str, seed: int) -> None:
    placement = placement_of(parameter)
    bound = placement.shape[1] ** -0.5
    drawn = torch.empty(placement.shape).uniform_(-bound, bound, generator=generator_of(seed, name))
    placement.true_part(parameter).copy_(placement.piece(drawn))


def _peft_config(lora: Lora, base_name: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [TARGETS[target].split(".")[1] for target in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
