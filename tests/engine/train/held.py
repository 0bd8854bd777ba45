"""What a rank really holds in a step: its states, what autograd has saved when it has most, and what was allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import lora
from engine.attention import Frame
from engine.batch import Batch
from engine.config import ModelShape, RunConfig
from engine.makings import ready_optimizer
from engine.mesh import build
from engine.model import DTYPES, Decoder
from engine.optimizer import AnyOptimizer, Optimizer
from engine.passes import Passes
from engine.plan import budget
from engine.preference import preference_loss


@dataclass(frozen=True)
class Held:
    """Bytes of one rank."""

    parameters: int
    adapters: int
    gradients: int
    optimizer: int
    saved: int
    batches: int
    peak: int | None
    """What came and went besides, saved or not, when most was there; None: nobody looked."""


def held(run: RunConfig, shape: ModelShape, *, looks: bool = True) -> Held:
    """Of this rank; where it `looks`, also what comes and goes. All ranks call it together."""
    mesh = build(run.parallel, run.device)
    operations = budget.replayed(run, shape, rank=mesh.rank("pipeline"))
    decoder = Decoder(shape, mesh, recompute=operations, dtype=DTYPES[run.training.precision], seed=1)
    if run.lora is not None:
        lora.adapt(decoder, run.lora, seed=1)
    if run.objective == "dpo":
        decoder.criterion = partial(preference_loss, context=decoder.context, dpo=run.dpo)
    optimizer = ready_optimizer(decoder.train(), run.training)
    passes, given = Passes(decoder), batches(run, shape)
    states = of_optimizer(optimizer)
    adapters = sum(bytes_of(p for name, p in decoder.named_parameters() if ".adapter." in name))
    parameters = sum(bytes_of(decoder.parameters()))
    with Saved(decoder) as saved:
        passes.train(given, labels=1)
    optimizer.drop_gradients()
    optimizer.publish()
    peak = None
    if looks:
        with Living() as living:
            passes.train(given, labels=1)
            optimizer.update(lr=1e-3, norm=optimizer.sum_gradients())
        peak = living.most
    mesh.close()
    # Shared-out weights that train are masters, in the optimizer's hands.
    mine = run.parallel.is_shared_out
    trained = bytes_of(p for p in decoder.parameters() if p.requires_grad)
    return Held(
        parameters=parameters - (sum(trained) if mine else adapters),
        adapters=0 if mine else adapters,
        gradients=states[0],
        optimizer=states[1] + (sum(trained) if mine else 0),
        saved=saved.most,
        batches=sum(bytes_of(t for batch in given for t in vars(batch).values() if isinstance(t, Tensor))),
        peak=peak,
    )


def batches(run: RunConfig, shape: ModelShape) -> list[Batch]:
    """Of one replica's step."""
    training = run.training
    rows, tokens = training.micro_batch, run.data.seq_len
    count = training.global_batch // (rows * run.parallel.data)
    documents, positions, reference = None, torch.arange(tokens).repeat(rows, 1), None
    if run.data.packing and run.data.format != "text":
        documents = (torch.arange(tokens) >= tokens // 2).long().repeat(rows, 1)
        positions = positions - documents * (tokens // 2)
    if run.objective == "dpo":
        reference = torch.full((rows, 1, 2), -3.0, dtype=torch.float64)
    return [
        Batch(
            torch.randint(0, shape.vocab_size, (rows, tokens)),
            torch.randint(0, shape.vocab_size, (rows, tokens)),
            positions.clone(),
            None if documents is None else documents.clone(),
            reference_BP2=None if reference is None else reference.clone(),
            rows_B=torch.arange(rows),
        ).to(torch.device(run.device))
        for _ in range(count)
    ]


def of_optimizer(optimizer: AnyOptimizer) -> tuple[int, int]:
    """Bytes of gradients and of the optimizer's own state."""
    if isinstance(optimizer, Optimizer):
        weights = bytes_of([optimizer.weights_N])
        own = bytes_of([optimizer.weights_N, optimizer.masters_S, optimizer.averages_S, optimizer.squares_S])
        return sum(bytes_of([optimizer.gradients_N, optimizer.gradients_S])), sum(own) - sum(weights)
    states = [state for share in optimizer.slots for state in (share.average, share.square)]  # type: ignore[attr-defined]
    return 0, sum(bytes_of(states))


def bytes_of(tensors: Iterable[Any]) -> list[int]:
    """Of each storage once."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return list(storages.values())


class Saved:
    """What waits for backward behind each forward pass: what autograd has saved, and frames that replays hold.

    Storages of parameters are left out; each other storage counts once.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.most = self._now = 0
        self._holders: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, _Hold.tensor)
        self._frame, self._run = decoder._frame, decoder.run
        self._left_out: set[int] = set()

    def _framed(self, *given: Any) -> Frame:
        frame = self._frame(*given)
        tensors = [view.mask_BHQK for view in frame.views if view.mask_BHQK is not None]
        # They go with the frame.
        object.__setattr__(frame, "holds", [self._pack(tensor) for tensor in (*tensors, *(frame.angles or ()))])
        return frame

    def _ran(self, *given: Any, **named: Any) -> Any:
        output = self._run(*given, **named)
        self.most = max(self.most, self._now)
        return output

    def _pack(self, tensor: Tensor) -> _Hold:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if self.decoder.mesh.parallel.is_shared_out and address not in self._holders:
            # What is gathered lies somewhere else each time.
            self._left_out = set(map(_address, self.decoder.parameters()))
        if address not in self._holders and address in self._left_out:
            return _Hold(tensor, None)
        if not self._holders.get(address):
            self._now += storage.nbytes()
        self._holders[address] = self._holders.get(address, 0) + 1
        return _Hold(tensor, self)

    def let_go(self, tensor: Tensor) -> None:
        address = _address(tensor)
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self._now -= tensor.untyped_storage().nbytes()

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        self._left_out = set(map(_address, self.decoder.parameters()))
        self.decoder._frame = self._framed  # type: ignore[method-assign]
        self.decoder.run = self._ran  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self.decoder._frame, self.decoder.run = self._frame, self._run  # type: ignore[method-assign]


class _Hold:
    """Stands for a saved tensor in the graph, and says when the graph lets go of it."""

    def __init__(self, held: Tensor, by: Saved | None) -> None:
        self.held, self.by = held, by

    def tensor(self) -> Tensor:
        return self.held

    def __del__(self) -> None:
        if self.by is not None:
            self.by.let_go(self.held)


def _address(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().data_ptr())


class Living(TorchDispatchMode):
    """What operators have made and is still there: storages that none of their inputs had."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(output):
            if storage._cdata in given or (
                storage._cdata in self._made and not self._made[storage._cdata][0].expired()
            ):
                continue
            self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
            self._now += storage.nbytes()
        if self._now > self.most:
            # Only now does it matter what is gone.
            self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
            self._now = sum(size for _, size in self._made.values())
            self.most = max(self.most, self._now)
        return output


def _storages(of: Any) -> list[Any]:
    return [
        leaf.untyped_storage() for leaf in tree_leaves(of) if isinstance(leaf, Tensor) and type(leaf) is not DTensor
    ]
