"""Count the bytes that autograd saves from the forward pass to the backward pass, by the part of a net that saves them.

What is put off and made again in backward is not saved; what recomputation starts from is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

SHARED = ""
"""What is saved in several parts, or in none."""


class Meter:
    """While it is entered, each storage counts once, with all its bytes, for the part that saves of it.

    `left_out` are not counted: parameters, which are there anyhow. What a part is handed within another object, such as
    a frame, is taken to be shared. What is saved is held until the meter goes, for another tensor could take a freed
    one's place and pass for counted.
    """

    def __init__(self, left_out: Iterable[Tensor], parts: Mapping[str, nn.Module] | None = None) -> None:
        self._parts = dict(parts or {})
        self._left_out = {_address(tensor) for tensor in left_out}
        self._saved: dict[int, Tensor] = {}
        """By address of the storage."""
        self._savers: dict[int, set[str]] = {}
        self._shared: dict[int, Tensor] = {}
        self._inside = [SHARED]
        self._hooks = saved_tensors_hooks(self._count, lambda tensor: tensor)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for name, part in self._parts.items():

            def enter(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                self._inside.append(name)
                self._shared |= {_address(x): x for given in inputs if is_dataclass(given) for x in _tensors(given)}

            def leave(*_: Any) -> None:
                self._inside.pop()

            self._handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    @property
    def bytes(self) -> Counter[str]:
        """By name in `parts`, or `SHARED`."""
        counted: Counter[str] = Counter()
        for address, saved in self._saved.items():
            name, *others = self._savers[address]
            counted[SHARED if others or address in self._shared else name] += saved.untyped_storage().nbytes()
        return counted

    def _count(self, saved: Tensor) -> Tensor:
        if (address := _address(saved)) not in self._left_out:
            self._saved.setdefault(address, saved)
            self._savers.setdefault(address, set()).add(self._inside[-1])
        return saved


def _tensors(value: object) -> Iterator[Tensor]:
    """All that `value` holds, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
