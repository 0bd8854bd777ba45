"""The flat, sharded AdamW against `torch.optim.AdamW` and `torch.nn.utils.clip_grad_norm_` on whole tensors."""

import pytest
import torch
from torch.nn import Parameter

from engine.config import Parallel, Training
from engine.mesh import alone, build
from engine.optimizer import Optimizer
from engine.placement import Placement, place, placement_of, shard

TRAINING = Training(
    steps=5, global_batch=2, micro_batch=1, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, precision="fp32"
)
SHAPES = {"embed": (7, 6), "q": (8, 6), "o": (6, 8), "norm": (6,)}
"""Global shapes. Seven rows over two ranks leave a row of padding; the norm is what is not a matrix."""
CUT = {"embed": 0, "q": 0, "o": 1}


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(step, part):
    """Of the whole model; two parts make a step's global gradient."""
    generator = torch.Generator().manual_seed(100 * step + part)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def placements(mesh):
    """Matrices are cut over the tensor axis, the norm is whole on each rank with a gradient that is a part."""
    size, rank = mesh.size("tensor"), mesh.rank("tensor")
    return {
        name: shard(shape, dim=CUT[name], rank=rank, size=size)
        if name in CUT and size > 1
        else Placement(shape, gradient_partial=size > 1 and name == "norm")
        for name, shape in SHAPES.items()
    }


def local(whole, placement, mesh):
    """A rank's tensor, padded as the layers pad."""
    size = list(placement.shape)
    if placement.dim is not None:
        size[placement.dim] = -(-size[placement.dim] // mesh.size("tensor"))
    tensor = whole.new_zeros(size)
    placement.true_part(tensor).copy_(placement.piece(whole))
    return tensor


def ours(mesh, *, dtype=torch.float32, training=TRAINING, shard_optimizer=True):
    where = placements(mesh)
    parameters = {
        name: place(Parameter(local(whole, where[name], mesh)), where[name]) for name, whole in weights(dtype).items()
    }
    return parameters, Optimizer(parameters.items(), mesh, training=training, shard=shard_optimizer)


def backward(parameters, whole, mesh):
    """Give each parameter this rank's share of the gradient `whole`, as a backward pass does."""
    share = {
        name: local(whole[name] / (2 if placement_of(parameter).gradient_partial else 1), placement_of(parameter), mesh)
        for name, parameter in parameters.items()
    }
    sum((parameter * share[name].to(parameter.dtype)).sum() for name, parameter in parameters.items()).backward()


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


def train(mesh, steps, **options):
    """Our optimizer on this rank; each data rank has one part of the gradient, a lone one accumulates both."""
    parameters, optimizer = ours(mesh, **options)
    norms = []
    for step in range(steps):
        for part in range(2) if mesh.size("data") == 1 else [mesh.rank("data")]:
            backward(parameters, gradients(step, part), mesh)
        norms.append(optimizer.sum_gradients())
        optimizer.update(lr=TRAINING.lr, norm=norms[-1])
    return parameters, norms, optimizer


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
    for masters, weights in world2.run(equals_torch, parallel):
        assert masters == weights // share


def norm_of_ones(parallel):
    mesh = build(parallel)
    parameters, optimizer = ours(mesh)
    ones = {name: torch.ones(shape) / mesh.size("data") for name, shape in SHAPES.items()}
    backward(parameters, ones, mesh)
    norm = optimizer.sum_gradients()
    mesh.close()
    return norm


@pytest.mark.parametrize(
    "parallel", [Parallel(tensor=2), Parallel(data=2), Parallel(data=2, shard_optimizer=False)], ids=str
)
def test_all_ones_have_the_root_of_the_number_of_parameters_as_norm(world2, parallel):
    unique = 7 * 6 + 8 * 6 + 6 * 8 + 6
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
    backward(parameters, {name: torch.ones(shape) for name, shape in SHAPES.items()}, optimizer.mesh)
    optimizer.sum_gradients()
    assert optimizer.sum_gradients() == 0.0


def test_without_a_limit_nothing_is_clipped():
    training = TRAINING.model_copy(update={"clip": None})
    expected, _ = theirs(2, training=training)
    parameters, _, _ = train(alone(torch.device("cpu")), 2, training=training)
    torch.testing.assert_close(parameters["q"], expected["q"], rtol=1e-6, atol=1e-6)
