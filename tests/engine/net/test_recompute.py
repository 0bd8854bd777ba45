"""Recomputation per operation: the same gradients bit for bit, and nothing lives longer than its use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import combinations
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine import mesh
from engine.config import Lora, Operation
from engine.ledger import Ledger
from tests.engine.net import nets
from tests.worlds import World

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SUBSETS = [set(some) for size in range(len(OPERATIONS)) for some in combinations(OPERATIONS[:-1], size)] + [
    {"layer"},
    set(OPERATIONS),
]
PAIRS = [set(some) for some in combinations(OPERATIONS, 2)] + [set(OPERATIONS) - {"layer"}]
NORMED = {"architecture": "qwen3", "num_heads": 4, "head_dim": 8}
GPT = {"architecture": "gpt2", "num_kv_heads": 4, "hidden_dropout": 0.2, "attention_dropout": 0.3}
ADAPTED = Lora(rank=4, alpha=6.0, dropout=0.3, targets=("q", "o", "gate", "down"))


def differing(subsets: list[set[Operation]], by: Lora | None, grid: mesh.Mesh, **changes: Any) -> list[set[Operation]]:
    """The subsets under which the loss or a gradient differs in any bit from that of a net which keeps everything."""
    batch = nets.batch(packed=True)

    def trained(operations: set[Operation]) -> tuple[float, dict[str, Tensor]]:
        model = nets.uneven(nets.decoder(nets.shape(**changes), recompute=operations, grid=grid))
        return nets.trained(model if by is None else nets.adapted(model, by), batch)

    loss, expected = trained(set())
    wrong = []
    for operations in subsets:
        got_loss, got = trained(operations)
        if got_loss != loss or any(not torch.equal(got[name], expected[name]) for name in expected):
            wrong.append(operations)
    return wrong


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        pytest.param({}, None, id="llama"),
        pytest.param(NORMED, ADAPTED, id="qwen3 with adapters and dropout"),
        pytest.param(GPT, None, id="gpt2 with dropout"),
    ],
)
def test_gradients_are_bitwise_equal_whichever_operations_are_replayed(
    changes: dict[str, Any], by: Lora | None
) -> None:
    assert differing(SUBSETS, by, mesh.alone(nets.CPU), **changes) == []


def differing_on_two(sequence: bool, by: Lora | None, **changes: Any) -> list[set[Operation]]:
    grid = nets.grid(sequence=sequence)
    wrong = differing(PAIRS, by, grid, **changes)
    grid.close()
    return wrong


@pytest.mark.parametrize(
    ("sequence", "by"),
    [
        pytest.param(False, None, id="tensor"),
        pytest.param(True, None, id="tensor and sequence"),
        pytest.param(True, ADAPTED, id="tensor and sequence, adapters with dropout"),
    ],
)
def test_gradients_are_bitwise_equal_on_two_ranks_too(world2: World, sequence: bool, by: Lora | None) -> None:
    assert world2.run(differing_on_two, sequence, by, **NORMED) == [[], []]


class Watch:
    """Which tensors of a net still live: those that parts gave, by name."""

    def __init__(self) -> None:
        self.refs: dict[str, list[StorageWeakRef]] = {}

    def part(self, name: str, factor: float) -> Any:
        def scaled(x: Tensor) -> Tensor:
            made = x * factor
            self.refs.setdefault(name, []).append(StorageWeakRef(made.untyped_storage()))  # type: ignore[no-untyped-call]
            return made

        return scaled

    def alive(self, name: str) -> int:
        return sum(not ref.expired() for ref in self.refs[name])  # type: ignore[no-untyped-call]

    def made(self, name: str) -> int:
        return len(self.refs[name])


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Whatever goes must go by itself, for what waits for the collector of cycles holds memory."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Squared(torch.autograd.Function):
    """Saves its input, and says when its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.told = told
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.told()
        return 2 * grad * x, None


@pytest.mark.usefixtures("no_collector")
def test_an_output_is_gone_after_forward_made_once_and_gone_after_its_last_use() -> None:
    watch, ledger = Watch(), Ledger({"norm"})
    seen: list[tuple[int, int]] = []

    def told() -> None:
        seen.append((watch.made("norm"), watch.alive("norm")))

    def layer(x: Tensor) -> Tensor:
        normed = ledger.output("norm", watch.part("norm", 2.0), x)
        first, last = Squared.apply(normed, told), Squared.apply(normed.view(2, 2).t(), told)
        return first.sum() + last.sum() + Squared.apply(x, told).sum()

    x = torch.arange(4.0, requires_grad=True)
    loss = ledger.layer(layer, x)
    assert (watch.made("norm"), watch.alive("norm")) == (1, 0)
    loss.backward()
    # The last of the forward pass is the first of the backward pass, and does not ask for it; the next two share one.
    assert seen == [(1, 0), (2, 1), (2, 1)]
    assert watch.alive("norm") == 0
    assert torch.equal(x.grad, 2 * 8 * x.detach() + 2 * x.detach())  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_collector")
def test_a_recipe_made_from_a_recipe_keeps_only_the_first_input() -> None:
    watch, ledger = Watch(), Ledger({"norm", "activation"})

    def layer(x: Tensor) -> Tensor:
        normed = ledger.output("norm", watch.part("norm", 2.0), x)
        active = ledger.output("activation", watch.part("activation", 3.0), normed)
        return Squared.apply(active, lambda: None).sum()

    x = torch.arange(4.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved := Saved(), lambda tensor: tensor):
        loss = ledger.layer(layer, x)
    assert [address for address in saved.addresses if address != 0] == [x.untyped_storage().data_ptr()]
    loss.backward()
    assert watch.alive("norm") == watch.alive("activation") == 0
    assert watch.made("norm") == watch.made("activation") == 2
    assert torch.equal(x.grad, 2 * 36 * x.detach())  # type: ignore[arg-type]


class Saved:
    """Notes what autograd saves."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.addresses.append(tensor.untyped_storage().data_ptr())
        return tensor


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_is_thrown_away_takes_everything_with_it() -> None:
    kept = weakref.WeakSet[Tensor]()
    ledger = Ledger({"norm"})

    def layer(x: Tensor) -> Tensor:
        inner = x * 2
        kept.add(inner)
        normed = ledger.output("norm", torch.neg, inner)
        return Squared.apply(normed, lambda: None).sum()

    loss = ledger.layer(layer, torch.arange(4.0, requires_grad=True))
    del loss
    assert len(kept) == 0


def test_a_graph_that_is_walked_twice_gives_the_same_gradient_twice() -> None:
    ledger = Ledger({"norm", "activation"})

    def layer(x: Tensor) -> Tensor:
        normed = ledger.output("norm", torch.neg, x)
        return (ledger.output("activation", torch.exp, normed) * normed).sum()

    x = torch.arange(4.0, requires_grad=True)
    loss = ledger.layer(layer, x)
    first, second = (torch.autograd.grad(loss, x, retain_graph=again)[0] for again in (True, False))
    assert torch.equal(first, second)
    plain = x.detach().requires_grad_()
    (torch.exp(-plain) * -plain).sum().backward()
    assert torch.equal(first, plain.grad)  # type: ignore[arg-type]


def test_an_output_that_is_overwritten_is_saved_as_it_then_is() -> None:
    ledger = Ledger({"norm"})

    def layer(x: Tensor) -> Tensor:
        normed = ledger.output("norm", torch.neg, x)
        normed += 1
        return Squared.apply(normed, lambda: None).sum()

    x = torch.arange(4.0, requires_grad=True)
    ledger.layer(layer, x).backward()
    assert torch.equal(x.grad, -2 * (1 - x.detach()))  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("operations", [set(OPERATIONS) - {"layer"}, {"layer"}], ids=["all outputs", "layer"])
def test_a_step_leaves_no_cycle_of_references_behind(operations: set[Operation]) -> None:
    model = nets.decoder(nets.shape(), recompute=operations)
    nets.trained(model, nets.batch(packed=True))
    gc.collect()
    nets.trained(model, nets.batch(packed=True))
    assert gc.collect() == 0
