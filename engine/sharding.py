"""Share a decoder's weights and gradients out among its replicas, a layer at a time, with torch's FSDP2.

What each rank then does with its shares is `engine.shares`' business. With weights shared out (ZeRO-3, Rajbhandari et
al. 2020) a layer is gathered when it runs and let go afterwards; without (ZeRO-2), once a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from engine.comm import all_gather_flat
from engine.mesh import Mesh
from engine.model import Decoder
from engine.placement import Placement, place, placement_of


def share_out(decoder: Decoder, *, weights: bool) -> None:
    """Leave each replica its rows of every parameter: fp32 masters of those that train, frozen ones as they are.

    The decoder was made on the host; its device never holds more than the shares and one layer.

    Layers are gathered in the decoder's dtype as they are needed; gradients are summed in fp32 as they arise. What is
    at both ends of the decoder is whole from a step's first use to its last. Without `weights` everything is.
    """
    group = decoder.mesh.group("replicas")
    assert group is not None
    replicas = DeviceMesh.from_group(group, decoder.device.type)
    policy = MixedPrecisionPolicy(decoder.dtype, torch.float32, cast_forward_inputs=False)
    placements = {name: placement_of(parameter) for name, parameter in decoder.named_parameters()}
    for prefix, unit in _units(decoder):
        _put(unit, decoder.device)
        fully_shard(unit, mesh=replicas, mp_policy=policy, reshard_after_forward=weights and unit is not decoder)
        assert isinstance(unit, FSDPModule)
        # Loss and gradients are of the global batch already: sums, not means. Gloo knows no scaled sum.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reshard_after_backward(weights, recurse=False)
        # The gathered parameters are other objects than the shared ones, and the same ones each time.
        unit.unshard()
        _place(unit, prefix, placements)
        unit.reshard()
        _place(unit, prefix, placements)
    for method in ("run", "logits"):
        register_fsdp_forward_method(decoder, method)
    decoder.piece_of = partial(_gathered, mesh=decoder.mesh, dtype=decoder.dtype)


def _units(decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """What is gathered together, and where it stands: each layer, then all that is no layer's."""
    for number, layer in decoder.model.layers.items():
        yield f"model.layers.{number}.", layer
    yield "", decoder


def _put(unit: nn.Module, device: torch.device) -> None:
    """On the device what is not shared out yet, and what trains in fp32."""
    for parameter in unit.parameters():
        if not isinstance(parameter, DTensor):
            dtype = torch.float32 if parameter.requires_grad else parameter.dtype
            parameter.data = parameter.data.to(device, dtype)


def _place(unit: nn.Module, prefix: str, placements: dict[str, Placement]) -> None:
    for name, parameter in unit.named_parameters():
        place(parameter, placements[prefix + name])


@torch.no_grad()
def _gathered(parameter: nn.Parameter, *, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """A rank's piece of a parameter in `dtype`, from the rows that the replicas have; they call it together."""
    if not isinstance(parameter, DTensor):
        # In use, and whole on each of them.
        return parameter.detach()
    replicas = mesh.size("replicas")
    each = -(-parameter.shape[0] // replicas)
    mine = parameter.to_local()
    padded = mine.new_zeros(each, *parameter.shape[1:], dtype=dtype)
    padded[: len(mine)] = mine
    rows = padded.new_empty(replicas * each, *parameter.shape[1:])
    with mesh.exchange():
        all_gather_flat(rows, padded, group=mesh.group("replicas"))
    return rows[: parameter.shape[0]]
