"""The flat, sharded AdamW against `torch.optim.AdamW` and `torch.nn.utils.clip_grad_norm_` on whole tensors."""

import weakref

import pytest
import torch
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

from engine.config import Parallel
from engine.landing import landing_of
from engine.mesh import alone, build
from engine.optimizer import NORM_CHUNK, WORTH, Optimizer, square_sum
from engine.placement import Placement, place, placement_of
from tests.engine.train.toy import SHAPES, TRAINING, backward, gradients, ours, train, weights


def theirs(steps, *, dtype=torch.float32, training=TRAINING):
    """The whole tensors and norms after `steps` of torch's own optimizer in fp32."""
    parameters = {name: Parameter(whole.float()) for name, whole in weights(dtype).items()}
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=training.lr, betas=training.betas, eps=training.eps, weight_decay=training.weight_decay,
    )  # fmt: skip
    norms = []
    for step in range(steps):
        first, second = (gradients(step, part) for part in range(2))
        for name, parameter in parameters.items():
            parameter.grad = first[name].to(dtype).float() + second[name].to(dtype).float()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), training.clip or float("inf")).item())
        optimizer.step()
    return parameters, norms


def assert_equals_torch(mesh, **options):
    expected, expected_norms = theirs(5)
    parameters, norms, optimizer = train(mesh, 5, **options)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, parameter in parameters.items():
        placement = placement_of(parameter)
        torch.testing.assert_close(
            placement.true_part(parameter), placement.piece(expected[name]), rtol=1e-6, atol=1e-6
        )
    return optimizer


def test_one_rank_equals_torch():
    assert_equals_torch(alone(torch.device("cpu")))


def equals_torch(parallel):
    mesh = build(parallel)
    optimizer = assert_equals_torch(mesh, shard_optimizer=parallel.shard_optimizer)
    mesh.close()
    return optimizer.masters_S.numel(), optimizer.weights_N.numel()


@pytest.mark.parametrize(
    ("parallel", "share"),
    [
        pytest.param(Parallel(tensor=2), 1, id="tensor"),
        pytest.param(Parallel(data=2), 2, id="data-sharded"),
        pytest.param(Parallel(data=2, shard_optimizer=False), 1, id="data-not-sharded"),
    ],
)
def test_two_ranks_equal_torch_and_share_the_state(world2, parallel, share):
    for mine, all_of_it in world2.run(equals_torch, parallel):
        assert mine == all_of_it // share


def norm_of_ones(parallel):
    mesh = build(parallel)
    parameters, optimizer = ours(mesh)
    ones = {name: torch.ones(shape) / mesh.size("data") for name, shape in SHAPES.items()}
    backward(parameters, ones)
    norm = optimizer.sum_gradients()
    mesh.close()
    return norm


@pytest.mark.parametrize(
    "parallel", [Parallel(tensor=2), Parallel(data=2), Parallel(data=2, shard_optimizer=False)], ids=str
)
def test_all_ones_have_the_root_of_the_number_of_parameters_as_norm(world2, parallel):
    unique = 7 * 6 + 8 * 6 + 4 * 6 + 6 * 8 + 8 + 6
    assert world2.run(norm_of_ones, parallel) == pytest.approx([unique**0.5] * 2, rel=1e-7)


def test_bf16_weights_are_rounded_fp32_masters_and_gradients_add_up_in_fp32():
    expected, norms = theirs(5, dtype=torch.bfloat16)
    parameters, our_norms, optimizer = train(alone(torch.device("cpu")), 5, dtype=torch.bfloat16)
    assert our_norms == pytest.approx(norms, rel=1e-6)
    masters = {piece.parameter: piece.tensors["weight"] for piece in optimizer.pieces()}
    for name, parameter in parameters.items():
        torch.testing.assert_close(masters[name], expected[name].detach(), rtol=1e-6, atol=1e-6)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16())


def test_a_parameter_without_a_gradient_counts_as_zero_not_as_the_last_step():
    parameters, optimizer = ours(alone(torch.device("cpu")))
    backward(parameters, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    optimizer.sum_gradients()
    assert optimizer.sum_gradients() == 0.0


def test_without_a_limit_nothing_is_clipped():
    training = TRAINING.model_copy(update={"clip": None})
    expected, _ = theirs(2, training=training)
    parameters, _, _ = train(alone(torch.device("cpu")), 2, training=training)
    torch.testing.assert_close(parameters["q"], expected["q"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_gradient_takes_no_place_in_the_buffer_until_a_second_one_is_added(dtype):
    shapes = {"small": (8, 6), "large": (WORTH // 501 + 1, 501), "behind": (5, 3), "norm": (6,)}
    # Behind the first is a gap, for a slot begins on a cache line; the other two lie side by side.
    shapes |= {"larger": (WORTH // 64, 65), "largest": (WORTH // 64, 66)}
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    mine = {name: place(Parameter(whole.clone()), Placement(shapes[name])) for name, whole in drawn.items()}
    theirs = {name: Parameter(whole.float()) for name, whole in drawn.items()}
    optimizer = Optimizer(mine.items(), alone(torch.device("cpu")), training=TRAINING, shard=True)
    torchs = torch.optim.AdamW(
        [
            {"params": [each for each in theirs.values() if each.ndim > 1]},
            {"params": [theirs["norm"]], "weight_decay": 0.0},
        ],
        lr=TRAINING.lr, betas=TRAINING.betas, eps=TRAINING.eps, weight_decay=TRAINING.weight_decay,
    )  # fmt: skip
    (large,) = (slot for slot in optimizer.slots if slot.name == "large")
    for step, parts in enumerate((1, 2, 1)):
        optimizer.gradients_N[large.start : large.stop] = torch.nan
        for each in theirs.values():
            each.grad = torch.zeros_like(each)
        for _ in range(parts):
            gradients = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
            sum((mine[name] * gradient).sum() for name, gradient in gradients.items()).backward()
            for name, gradient in gradients.items():
                theirs[name].grad += gradient.float()
        norm = optimizer.sum_gradients()
        # Torch's own sum of so many squares is off by more.
        assert norm == pytest.approx(sum(each.grad.double().square().sum() for each in theirs.values()).item() ** 0.5)
        torch.nn.utils.clip_grads_with_norm_(theirs.values(), TRAINING.clip, torch.tensor(norm))
        assert bool(optimizer.gradients_N[large.start : large.stop].isnan().all()) is (step == 0)
        optimizer.update(lr=TRAINING.lr, norm=norm)
        torchs.step()
    for piece in optimizer.pieces():
        torch.testing.assert_close(piece.tensors["weight"], theirs[piece.parameter].detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(mine[piece.parameter], piece.tensors["weight"].to(dtype))


@pytest.mark.parametrize("worth", [1.0, torch.inf], ids=["dropped", "not finite"])
def test_a_large_gradient_that_is_of_no_use_is_let_go(worth):
    kept = place(Parameter(torch.zeros(WORTH)), Placement((WORTH,)))
    optimizer = Optimizer([("large", kept)], alone(torch.device("cpu")), training=TRAINING, shard=True)
    gradient = torch.full((WORTH,), worth)
    came = weakref.ref(gradient)
    landing_of(kept).add(gradient)
    del gradient
    # The square root of the sum of so many ones.
    norm = WORTH**0.5 if worth == 1 else torch.inf
    assert (optimizer.drop_gradients() if worth == 1 else optimizer.sum_gradients()) == norm
    assert came() is None


def test_a_rank_with_nothing_to_train_takes_its_steps():
    optimizer = Optimizer([], alone(torch.device("cpu")), training=TRAINING, shard=True)
    assert optimizer.sum_gradients() == 0
    optimizer.update(lr=TRAINING.lr, norm=0.0)
    assert (optimizer.steps, list(optimizer.pieces())) == (1, [])


def test_squares_are_summed_without_a_whole_copy_in_fp32(monkeypatch):
    monkeypatch.setattr("engine.optimizer.WIDENED", 2 * NORM_CHUNK)
    x = torch.randn(5 * NORM_CHUNK + 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        total = square_sum(x)
    assert float(total) == pytest.approx(float(x.double().square().sum()), rel=3e-6)
    assert 0 < max(event.cpu_memory_usage for event in seen.events()) <= 4 * 2 * NORM_CHUNK
