"""What a layer need not save: outputs of named operations, made again from their inputs when backward asks for them.

An attention core and a whole layer are dropped as `engine.recompute` does it, with all that they save inside. For the
other operations only the output is dropped: backward of whoever used it finds a recipe in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from engine.config import Operation
from engine.recompute import Kept, recomputed

T = TypeVar("T")


class Ledger:
    """Knows which operations are replayed, and, while a layer runs, which tensors come from them.

    One serves all layers of a decoder, one layer at a time. Gradients are bitwise those of a ledger without operations.
    What is replayed must draw no random numbers from torch's generators; its collectives are repeated on every rank
    alike.
    """

    def __init__(self, operations: Collection[Operation] = ()) -> None:
        # A layer that is replayed makes everything in it again.
        self.operations: frozenset[Operation] = frozenset(("layer",) if "layer" in operations else operations)
        self._page: _Page | None = None
        """Of the layer that is running."""

    def layer(self, part: Callable[..., T], *inputs: object) -> T:
        """`part(*inputs)`, which is one layer: calls of `output` and `region` inside belong to it."""
        if "layer" in self.operations:
            return recomputed(part, *inputs)
        if not torch.is_grad_enabled() or self.operations <= {"attention_core"}:
            return part(*inputs)
        page = self._page = _Page()
        try:
            with saved_tensors_hooks(page.pack, _fetched):
                made = part(*inputs)
        finally:
            self._page = None
        page.close()
        return made

    def region(self, operation: Operation, part: Callable[..., T], *inputs: object) -> T:
        """`part(*inputs)`; where `operation` is replayed, nothing that `part` saves is kept, but its inputs are.

        `part` has no parameters: where no input needs a gradient, it saves nothing, and nothing is kept.
        """
        learns = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        return recomputed(part, *inputs) if learns and operation in self.operations else part(*inputs)

    def output(self, operation: Operation, part: Callable[..., T], *inputs: object) -> T:
        """`part(*inputs)`, a tensor or several; where `operation` is replayed, whoever saves them saves a recipe.

        `part` must give the same bits each time, and must not give back its inputs' memory as its own.
        """
        made = part(*inputs)
        if self._page is not None and operation in self.operations and torch.is_grad_enabled():
            self._page.enter(part, inputs, _several(made))
        return made


class _Page:
    """One run of one layer."""

    def __init__(self) -> None:
        self.sources: dict[int, _Source] = {}
        """By address of the storage, which no other can have while the source refers to it."""
        self.plain: list[tuple[_Plain, Tensor]] = []

    def enter(self, part: Callable[..., object], inputs: tuple[object, ...], outputs: Sequence[Tensor]) -> None:
        given = {_address(x) for x in inputs if isinstance(x, Tensor)}
        recipe = _Recipe(part, list(inputs))
        for number, output in enumerate(outputs):
            if (address := _address(output)) not in given:
                memory = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]
                self.sources[address] = _Source(recipe, number, memory, output._version)

    def pack(self, saved: Tensor) -> _Claim | _Plain:
        """What takes the tensor's place in the graph."""
        source = self.sources.get(_address(saved))
        if source is not None and source.version == saved._version:
            return source.recipe.claim(source.number, saved, self)
        plain = _Plain()
        self.plain.append((plain, saved.detach()))
        return plain

    def close(self) -> None:
        """Save what has no recipe, outside the layer's own hooks: for whoever meters or moves saved tensors."""
        for plain, saved in self.plain:
            plain.kept = Kept(saved)


@dataclass(frozen=True)
class _Source:
    """Where the contents of one storage come from."""

    recipe: _Recipe
    number: int
    """Of the recipe's outputs."""
    memory: StorageWeakRef
    version: int
    """Of the contents: what was overwritten since is not the recipe's any more."""


class _Plain:
    """Stands for a saved tensor that is kept."""

    kept: Kept | None = None

    def tensor(self) -> Tensor:
        assert self.kept is not None
        return self.kept.tensors[0]


class _Claim:
    """Stands for a saved tensor that will be made: an output of a recipe, or a view of one."""

    def __init__(self, recipe: _Recipe, number: int, like: Tensor) -> None:
        self.recipe, self.number = recipe, number
        self.geometry = (like.size(), like.stride(), like.storage_offset())

    def tensor(self) -> Tensor:
        made = self.recipe.give(self)
        if (made.size(), made.stride(), made.storage_offset()) == self.geometry:
            return made
        return made.as_strided(*self.geometry)


class _Recipe:
    """A part and its inputs. Its outputs are made once, and each lives until the last of those who wait for it."""

    def __init__(self, part: Callable[..., object], inputs: list[object]) -> None:
        self.part, self.inputs = part, inputs
        self.waiting: WeakSet[_Claim] = WeakSet()
        self.made: dict[int, Tensor] = {}
        self._is_wanted = False

    def claim(self, number: int, like: Tensor, page: _Page) -> _Claim:
        if not self._is_wanted:
            # Inputs are kept for those recipes only that somebody wants.
            self._is_wanted = True
            self.inputs = [page.pack(x) if isinstance(x, Tensor) else x for x in self.inputs]
        claim = _Claim(self, number, like)
        self.waiting.add(claim)
        return claim

    def give(self, claim: _Claim) -> Tensor:
        if claim.number not in self.made:
            self._make()
        self.waiting.discard(claim)
        made = self.made[claim.number]
        wanted = {other.number for other in self.waiting}
        self.made = {number: tensor for number, tensor in self.made.items() if number in wanted}
        return made

    def _make(self) -> None:
        inputs = [x.tensor() if isinstance(x, _Claim | _Plain) else x for x in self.inputs]
        with torch.no_grad():
            self.made = dict(enumerate(_several(self.part(*inputs))))


def _fetched(packed: _Claim | _Plain) -> Tensor:
    return packed.tensor()


def _address(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _several(made: object) -> Sequence[Tensor]:
    return [made] if isinstance(made, Tensor) else cast(Sequence[Tensor], made)
