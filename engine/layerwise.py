"""A model's logits from its files with one layer in memory at a time, in fp32 on the host; any model fits so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import lora
from engine.config import Lora, ModelShape
from engine.mesh import alone
from engine.model import Decoder
from engine.placement import empty_local, place, placement_of
from engine.weights import Folder

HOST = torch.device("cpu")


@contextmanager
def opened(
    directory: Path, shape: ModelShape, *, adapter: tuple[Lora, Path] | None = None, went_on: Callable[[], object]
) -> Iterator[Decoder]:
    """A decoder of the weights in `directory`, under an adapter in `peft`'s files where one is given, for `logits`.

    `went_on` is called before each layer.
    """
    # The ends are real, and so is what all layers share; the layers have no memory of their own.
    decoder = Decoder(shape.model_copy(update={"num_layers": 1}), alone(HOST))
    absent = Decoder(shape, alone(torch.device("meta")))
    decoder.shape, decoder.stages, decoder.model.layers = shape, absent.stages, absent.model.layers
    if adapter is not None:
        lora.adapt(decoder, adapter[0], seed=0)
        for module in decoder.modules():
            if isinstance(module, lora.Adapter):
                _make(module)
        lora.load_adapter(decoder, adapter[1])
    decoder.eval()
    with Folder(directory, shape) as folder, torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.startswith("model.layers."):
                _fill(parameter, folder, name)
        for number, layer in decoder.model.layers.items():
            prefix = f"model.layers.{number}."
            held = [module for module in layer.modules() if not isinstance(module, lora.Adapter | lora.Matrix)]
            layer.register_forward_pre_hook(partial(_come, held, prefix, folder, went_on))
            layer.register_forward_hook(partial(_go, held))
        yield decoder


def _come(
    held: list[nn.Module], prefix: str, folder: Folder, went_on: Callable[[], object], layer: nn.Module, _: Any
) -> None:
    went_on()
    for module in held:
        _make(module, recurse=False)
    for name, parameter in layer.named_parameters():
        if ".adapter." not in name:
            _fill(parameter, folder, prefix + name)


def _go(held: list[nn.Module], _: nn.Module, __: Any, hidden_BTD: Tensor) -> None:
    for module in held:
        _make(module, recurse=False, device=torch.device("meta"))


def _make(module: nn.Module, *, recurse: bool = True, device: torch.device = HOST) -> None:
    """Put new parameters in the place of the module's, on `device`."""
    for owner in module.modules() if recurse else (module,):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            placement = placement_of(parameter)
            made = nn.Parameter(empty_local(placement, dtype=torch.float32, device=device), requires_grad=False)
            setattr(owner, name, place(made, placement))


def _fill(parameter: Tensor, folder: Folder, name: str) -> None:
    placement = placement_of(parameter)
    placement.true_part(parameter).copy_(folder.piece(name, placement))
