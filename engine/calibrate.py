"""What a device of this host really does, in a few seconds: `python -m engine calibrate`. Plans go by it.

Of a GPU, products and copies are timed at sizes that fill it. Cores are slower the smaller the work is, so that theirs
are timed at the sizes of small models, and the engine's own layers and optimizer beside them. With one thread the clock
is that of the processor: it stands still while somebody else has the core.

N tokens, D features of the input, E outputs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from engine.attention import View, core
from engine.batch import Batch
from engine.comm import all_gather_flat, reduce_scatter_flat
from engine.config import ModelShape, Parallel, Training
from engine.launch import die_with
from engine.mesh import alone, device_named
from engine.model import DTYPES, Decoder
from engine.optimizer import Optimizer
from engine.outer import outer_sums
from engine.passes import Passes
from engine.placement import Placement, place
from engine.plan.cluster import Cluster, Curve, Device, Host, Link, as_facts, known
from engine.plan.time import BACKWARD_OPERATIONS, FORWARD_OPERATIONS, OPTIMIZER_TRAFFIC, Layout, Step, Timer

SECONDS = {"cpu": 0.05, "cuda": 0.25}
"""Of each measurement, about."""
WIDTH = 8192
"""Of the square matrices that a GPU multiplies: large enough to be as fast as any, small enough to be done soon."""
COPIED = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes of the tensor that is copied: more than caches hold."""
SMALL = 64
"""Elements of a tensor whose sum takes as long as any operation must."""
WIDTHS = (16, 64, 128, 256, 512, 1024)
"""Of the matrices that cores multiply with `TOKENS` tokens."""
TOKENS = 1024
SLOW = 0.2
"""Seconds of three products from which wider ones are not tried: they are no faster."""
ROWS = (128, 256, 1024)
"""Tokens of a row in which heads of `HEAD` features attend."""
HEAD = 64
UPDATED = 2**22
"""Weights that the optimizer updates: more than caches hold."""
MESSAGES = (2**12, 2**22)
"""Bytes that two ranks exchange: next to nothing, and about what a micro-batch's tokens are."""
TRIES = (30, 8)
"""Exchanges of either."""
LEAST_TRIES = 2
LEAST_SHARE = 0.05
"""Of a step's time, what goes between products takes at least, however the clock trembled."""
MEETING = timedelta(seconds=20)
ASSUMED_SHARE, ASSUMED_LATENCY = 0.03, 100e-6
"""Of a copy's bytes a second, and seconds of a message, where two processes of a host can't meet to try."""

HERE = torch.device("cpu")
LITTLE = ModelShape(
    num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_hidden_size=64, max_seq_len=16,
    vocab_size=256,
)  # fmt: skip
"""So small that only the number of its operations tells."""
MIDDLING = ModelShape(
    num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_hidden_size=704, max_seq_len=512,
    vocab_size=256,
)  # fmt: skip
WORDY = MIDDLING.model_copy(update={"num_layers": 1, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 2,
                                    "ffn_hidden_size": 128, "vocab_size": 8192})  # fmt: skip
"""Most of whose step is the loss."""
Between = Literal["traffic", "logits"]
BETWEEN: dict[Between, ModelShape] = {"traffic": MIDDLING, "logits": WORDY}
"""Which step tells how fast that goes which is between products."""
PLAIN = Training(steps=1, global_batch=1, micro_batch=1, lr=1e-4)


def main(device: str = "cpu", *, threads: int | None = None) -> int:
    """Write the figures of a slot to stdout, as one JSON object; of the slowest, where there are several GPUs.

    Raises ValueError where there is no such device.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    where = device_named(device)
    if where.type == "cpu":
        found = measured_host()
    else:
        devices = [where] if where.index is not None else [device_named(f"cuda:{n}") for n in range(count_devices())]
        found = min(map(measured, devices), key=lambda one: one[0].flops["bf16"])
    sys.stdout.write(f"{json.dumps(as_facts(*found))}\n")
    return 0


def count_devices() -> int:
    return torch.cuda.device_count()


# A GPU


def measured(where: torch.device) -> tuple[Device, Link]:
    """A GPU of this host, and what links it with the next."""
    device = Device(
        name=torch.cuda.get_device_name(where),
        flops={name: multiplied(where, dtype) for name, dtype in DTYPES.items()},
        bandwidth=copied(where),
        efficiency=1.0,
        launch=launched(where),
        measured=True,
    )
    return device, linked(device)


def multiplied(where: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product."""
    one = torch.ones(WIDTH, WIDTH, dtype=dtype, device=where)
    two, into = torch.ones_like(one), torch.empty_like(one)
    return 2 * WIDTH**3 / _seconds(lambda: torch.mm(one, two, out=into), where)


def copied(where: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(COPIED[where.type] // 4, device=where)
    into = torch.empty_like(source)
    return 2 * COPIED[where.type] / _seconds(lambda: into.copy_(source), where)


def launched(where: torch.device) -> float:
    """Seconds of an operation on next to nothing, with what autograd does for it."""
    small = torch.ones(SMALL, device=where, requires_grad=True)

    def chain() -> Tensor:
        x = small
        for _ in range(10):
            x = x + 1
        return x

    return _seconds(chain, where) / 10


def linked(device: Device) -> Link:
    """Between two GPUs of this host: a copy's speed where there are two, else what the maker says."""
    if torch.cuda.device_count() > 1:
        source = torch.ones(COPIED["cuda"] // 16, device="cuda:0")
        into = torch.empty_like(source, device="cuda:1")
        size = source.numel() * source.element_size()
        return Link(size / _seconds(lambda: into.copy_(source), source.device), 10e-6)
    entry = known(device.name)
    return entry[1] if entry is not None else Link(25e9, 10e-6)


# Cores


def measured_host() -> tuple[Device, Link]:
    """A slot of this host's cores, and two of its processes."""
    # First, for a process with threads can't be doubled.
    link = exchanged()
    bandwidth = copied(HERE)
    products = {name: widths(dtype) for name, dtype in DTYPES.items()}
    attention = {name: [(tokens, attended(tokens, dtype)) for tokens in ROWS] for name, dtype in DTYPES.items()}
    small = LITTLE.model_copy(update={"num_layers": 3})
    one, three = trained(LITTLE, 16, "fp32"), trained(small, 16, "fp32")
    layer = layer_of(one, three)
    none = dict.fromkeys(DTYPES, float("inf"))
    host = Host(products, attention, none, none, updates=updated(), ends=max(0.0, one - layer))
    device = Device(
        name="cpu",
        flops={name: max(rate for _, rate in curve) for name, curve in products.items()},
        bandwidth=bandwidth,
        efficiency=1.0,
        launch=layer / (FORWARD_OPERATIONS + BACKWARD_OPERATIONS),
        measured=True,
        host=host,
    )
    for what, shape in BETWEEN.items():
        host = at_rate(host, what, {name: passed(device, host, what, shape, name) for name in DTYPES})
        device = replace(device, host=host)
    return device, link or Link(ASSUMED_SHARE * bandwidth, ASSUMED_LATENCY)


def layer_of(one: float, three: float) -> float:
    """Seconds of a layer, by those of a step of one layer and of three."""
    return max(LEAST_SHARE * one, (three - one) / 2)


def widths(dtype: torch.dtype) -> Curve:
    """FLOP/s of the three products of a square matrix, by its width."""
    found: list[tuple[int, float]] = []
    for width in WIDTHS:
        x_ND, weight_ED = torch.ones(TOKENS, width, dtype=dtype), torch.ones(width, width, dtype=dtype)

        def products(x_ND: Tensor = x_ND, weight_ED: Tensor = weight_ED) -> None:
            grad_NE = x_ND @ weight_ED.t()
            grad_NE @ weight_ED
            outer_sums([grad_NE], x_ND)

        seconds = _seconds(products, HERE)
        found.append((width, 3 * 2 * TOKENS * width**2 / seconds))
        if seconds > SLOW:
            break
    return found


def attended(tokens: int, dtype: torch.dtype) -> float:
    """FLOP/s of an attention core over some rows of `tokens`, forward and backward, as plans count them."""
    rows, heads = max(1, TOKENS // tokens), 2
    q, k, v = (torch.randn(rows, tokens, heads, HEAD, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.ones(rows, tokens, heads * HEAD, dtype=dtype)
    view = View(range(tokens), range(tokens))
    seconds = _seconds(lambda: torch.autograd.backward(core(q, k, v, view), grad), HERE)
    return 3 * 2 * 2 * rows * heads * tokens**2 * HEAD / seconds


def updated() -> float:
    """Bytes a second of the optimizer's step, as plans count them."""
    side = int(UPDATED**0.5)
    weight = place(Parameter(torch.zeros(side, side)), Placement((side, side)))
    optimizer = Optimizer([("weight", weight)], alone(HERE), training=PLAIN, shard=False)
    seconds = _seconds(lambda: optimizer.update(lr=1e-4, norm=optimizer.sum_gradients()), HERE)
    return OPTIMIZER_TRAFFIC * side**2 / seconds


def trained(shape: ModelShape, tokens: int, precision: str) -> float:
    """Seconds of a step of one row."""
    decoder = Decoder(shape, alone(HERE), seed=1, dtype=DTYPES[precision])
    optimizer = Optimizer(decoder.named_parameters(), decoder.mesh, training=PLAIN, shard=False)
    passes = Passes(decoder)
    ids_BT = torch.arange(tokens)[None] % shape.vocab_size
    batch = Batch(ids_BT, ids_BT, positions_BT=torch.arange(tokens)[None], num_labels=tokens)

    def step() -> None:
        passes.train([batch], labels=tokens)
        optimizer.update(lr=1e-4, norm=optimizer.sum_gradients())

    return _seconds(step, HERE)


def passed(device: Device, host: Host, what: Between, shape: ModelShape, precision: str) -> float:
    """Bytes a second of this kind, such that a plan of a step of `shape` says what that takes."""

    def planned(rate: float) -> float:
        cluster = Cluster(replace(device, host=at_rate(host, what, {precision: rate})), 1, Link(1.0))
        return Timer(Step(shape, shape.max_seq_len, 1, precision), cluster).terms(Layout(Parallel(), 1)).total

    without = planned(float("inf"))
    takes = trained(shape, shape.max_seq_len, precision)
    return (planned(1.0) - without) / max(takes - without, LEAST_SHARE * takes)


def at_rate(host: Host, what: Between, rates: dict[str, float]) -> Host:
    """The host at which that which is between products goes so fast."""
    return replace(host, traffic=rates) if what == "traffic" else replace(host, logits=rates)


# Two processes


def exchanged() -> Link | None:
    """Between two ranks of a host; None where they could not meet."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        own, other = os.getpid(), os.fork()
        if other == 0:
            # Whatever becomes of it, it is no second caller of whoever called this, nor outlives the first.
            try:
                die_with(own)()
                _messages(meeting, 1)
            finally:
                os._exit(0)
        try:
            small, large = _messages(meeting, 0)
        except RuntimeError:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
    return link_of(small, large)


def link_of(small: float, large: float) -> Link | None:
    """By the seconds of a message of each size; None where the clock trembled more than the bytes took."""
    if large <= small:
        return None
    # Each gathers, then scatters: of two ranks each sends half of the bytes, twice.
    return Link(MESSAGES[1] / max(large - small, LEAST_SHARE * large), small / 2)


def _messages(meeting: str, rank: int) -> list[float]:
    """Seconds in which both have gathered a message of each size and summed it up again."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=MEETING)
    try:
        return [_both_ways(size // 4, tries) for size, tries in zip(MESSAGES, TRIES, strict=True)]
    finally:
        dist.destroy_process_group()


def _both_ways(elements: int, tries: int) -> float:
    whole = torch.ones(elements)
    part, took = torch.ones(elements // 2), []
    for _ in range(tries):
        began = perf_counter()
        all_gather_flat(whole, part)
        reduce_scatter_flat(part, whole)
        took.append(perf_counter() - began)
    # The best would be luck: both have to be at it at once.
    return sorted(took)[tries // 4]


def _seconds(work: Callable[[], object], where: torch.device) -> float:
    """Of doing `work` once, the best of some: what else the host does only makes it slower."""
    clock = process_time if where.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    work()
    best = float("inf")
    until = perf_counter() + SECONDS[where.type]
    tries = 0
    while tries < LEAST_TRIES or perf_counter() < until:
        _finish(where)
        began = clock()
        work()
        _finish(where)
        best = min(best, clock() - began)
        tries += 1
    return best


def _finish(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
