"""How long a step takes in a layout, as a sum of seconds that each say what for. Bytes are `engine.plan.memory`'s.

After Narayanan et al. 2021, section 2.2 and 3, and Korthikanti et al. 2022, section 4. docs/planner.md derives it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from engine.config import Lora, ModelShape, Operation, Parallel
from engine.plan.cluster import Cluster, Host, Link, rate_at
from engine.plan.flops import MULTIPLY_ADD, layer_matrices
from engine.plan.holdings import COLUMNS, keys_per_rank
from engine.plan.passing import CHUNK_LOGITS
from engine.plan.recompute import ELEMENTS, FP32, Layer, Setting, cost
from engine.plan.stages import stages

FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 2, 3
"""Times that a tensor which is kept goes to or from memory: it is written and read; on the way back it is read, and its
gradient written and read."""
ACCUMULATION_TRAFFIC = 2 * FP32
"""Bytes of a weight whose gradient is added to the step's sum: read and written in fp32."""
OPTIMIZER_TRAFFIC = 12 * FP32
"""Bytes of a weight in the optimizer's step: the gradient is read for the norm, read and written to be clipped, set to
zero in the end; master, two moments and gradient are read, all but the last written, and the weight made of them."""
LOGIT_TRAFFIC = 8 * FP32
"""Bytes of a logit in the loss: written, read for the largest, for the sum and for the loss; its gradient is made in
the same way and read by two products."""
FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 40, 80
"""Operations of a layer, about: what each takes however small it is counts on small models only."""
LOSS_MESSAGES = 3
"""Sums over tensor ranks for each chunk of logits: the largest, the total, and the label's own."""


@dataclass(frozen=True)
class Step:
    """What an optimizer step trains on."""

    shape: ModelShape
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    lora: Lora | None = None
    packed: bool = False
    """Rows hold several documents."""
    compares: bool = False
    """Answers in pairs, under DPO."""

    @property
    def tokens(self) -> int:
        return self.global_batch * self.seq_len


@dataclass(frozen=True)
class Layout:
    """How a step is done."""

    parallel: Parallel
    micro_batch: int
    replayed: frozenset[Operation] = frozenset()

    def micro_batches(self, step: Step) -> int:
        """Passes that each replica makes."""
        return step.global_batch // (self.micro_batch * self.parallel.data)


@dataclass(frozen=True)
class Terms:
    """Seconds of a step, by what for. They add up: what is hidden behind another is not in them."""

    products: float
    """Matrix products, each once forward and twice backward, of the average pipeline rank."""
    elementwise: float
    """Everything else that a layer and the loss compute, which goes by the memory's speed."""
    replay: float
    """What is computed again, exchanges among it."""
    bubble: float
    """A pipeline fills and drains, and waits for its busiest rank."""
    tensor: float
    """Exchanges between the ranks that share a matrix, as far as nothing hides them."""
    context: float
    """Those between the ranks that share a row."""
    pipeline: float
    """Those between stages."""
    data: float
    """Those between replicas."""
    optimizer: float

    @cached_property
    def total(self) -> float:
        return float(sum(getattr(self, each.name) for each in fields(self)))

    def itemised(self) -> dict[str, float]:
        """Each term and the total, for a plan that is stored."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"total": self.total}


def all_reduced(size: float, ranks: int, link: Link) -> float:
    """Seconds in which `ranks` add up `size` bytes: a ring scatters the sum, then gathers it."""
    return 2 * gathered(size, ranks, link)


def gathered(size: float, ranks: int, link: Link) -> float:
    """Seconds in which each of `ranks` has all of `size` bytes, of which each had a share; or, summed, the reverse."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) * (size / ranks / link.bytes_per_second + link.latency)


@dataclass(frozen=True)
class Pace:
    """Seconds of one layer and one micro-batch on one rank, whatever the pipeline."""

    forward: float
    """Matrix products."""
    backward: float
    elementwise: float
    replay: float
    tensor: float
    context: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.elementwise + self.replay + self.tensor + self.context


@dataclass(frozen=True)
class Timer:
    """The times of one step's layouts; what several layouts share is worked out once."""

    step: Step
    cluster: Cluster

    @cached_property
    def rate(self) -> float:
        """FLOP/s of matrix products. Raises ValueError where the device's rate at this precision is not known."""
        device = self.cluster.device
        if self.step.precision not in device.flops:
            raise ValueError(f"the rate of {device.name} in {self.step.precision} is not known")
        return device.flops[self.step.precision] * device.efficiency

    @property
    def host(self) -> Host | None:
        """What is known of cores, where ranks compute on those and the step's precision was measured."""
        host = self.cluster.device.host
        return host if host is not None and self.step.precision in host.traffic else None

    @property
    def traffic(self) -> float:
        """Bytes a second between the products of layers."""
        return self.cluster.device.bandwidth if self.host is None else self.host.traffic[self.step.precision]

    @cached_property
    def _paces(self) -> dict[tuple[int, bool, int, int, frozenset[Operation]], Pace]:
        return {}

    @cached_property
    def _stages(self) -> dict[tuple[int, int, tuple[int, ...] | None], tuple[float, float]]:
        return {}

    @cached_property
    def _terms(self) -> dict[Layout, Terms]:
        return {}

    def terms(self, layout: Layout) -> Terms:
        """Of a step in this layout. Raises ValueError as `Parallel.check_stages` does."""
        if layout not in self._terms:
            self._terms[layout] = self._timed(layout)
        return self._terms[layout]

    def _timed(self, layout: Layout) -> Terms:
        step, parallel = self.step, layout.parallel
        count = layout.micro_batches(step)
        pace = self.pace(layout)
        output = self._output(layout)
        # Layers of the average rank and of the busiest one, the output among them.
        average, busiest = self._loads(parallel, output / pace.total)
        ranks, chunks = parallel.pipeline, parallel.virtual
        layers = step.shape.num_layers / ranks
        of_all = count * layers
        # A pass of one stage is the unit in which a pipeline fills and drains. With fewer micro-batches than ranks each
        # round through the chunks takes as long as a micro-batch needs to come around.
        idle = chunks * (max(count, ranks) - count) + min(count, ranks) - 1
        bubble = idle * average * pace.total / chunks + count * (busiest - average) * pace.total
        of_output = count * output / ranks
        output_products = min(of_output, count * self._output_products(layout) / ranks)
        return Terms(
            products=of_all * (pace.forward + pace.backward) + output_products,
            elementwise=of_all * pace.elementwise + (of_output - output_products) + self._accumulation(layout, count),
            replay=of_all * pace.replay,
            bubble=bubble if ranks > 1 else 0.0,
            tensor=of_all * pace.tensor,
            context=of_all * pace.context,
            pipeline=self._between_stages(layout, idle + chunks * count),
            data=self._between_replicas(layout, count, pace),
            optimizer=self._optimizer(layout),
        )

    def pace(self, layout: Layout) -> Pace:
        """Of one layer."""
        parallel = layout.parallel
        known = parallel.tensor, parallel.sequence, parallel.context, layout.micro_batch, layout.replayed
        if known not in self._paces:
            self._paces[known] = self._pace(layout)
        return self._paces[known]

    def _setting(self, layout: Layout) -> Setting:
        step = self.step
        element = ELEMENTS[step.precision]
        return Setting(step.shape, step.seq_len, layout.micro_batch, element, layout.parallel, step.lora)

    def _pace(self, layout: Layout) -> Pace:
        setting, step, device = self._setting(layout), self.step, self.cluster.device
        parallel = layout.parallel
        layer = Layer(setting)
        products = layer.products
        back = 2 * products - self._frozen(setting)
        seconds = self._multiplied(layer)
        kept = cost(setting, ())
        again = cost(setting, layout.replayed) if layout.replayed else kept
        dropped = max(0, kept.saved - again.saved)
        forward, backward = seconds, seconds * back / products
        launches = (FORWARD_OPERATIONS + BACKWARD_OPERATIONS) * device.launch
        elementwise = kept.saved * (FORWARD_TRAFFIC + BACKWARD_TRAFFIC) / self.traffic
        exchange = self._of_a_layer(setting)
        # Backward, what comes out of a matrix is exchanged while the gradient of its weights is made. Under sequence
        # parallelism what goes into the next one is gathered too, and nothing hides that.
        hidden = backward / 2 if step.lora is None and self.host is None else 0.0
        returning = max(0.0, exchange - hidden) + (exchange / 2 if parallel.sequence else 0.0)
        replay = (
            self._multiplied_again(layer, again.products, layout.replayed) + FORWARD_TRAFFIC * dropped / self.traffic
        )
        if "layer" in layout.replayed:
            replay += exchange + FORWARD_OPERATIONS * device.launch
        return Pace(
            forward=forward,
            backward=backward,
            elementwise=elementwise + launches,
            replay=replay,
            tensor=exchange + returning,
            context=self._keys(setting),
        )

    def _multiplied(self, layer: Layer) -> float:
        """Seconds of a layer's products, forward."""
        if self.host is None:
            return layer.products / self.rate
        return (layer.products - layer.core_products) / self._of_matrices(layer.setting) + self._core(layer)

    def _multiplied_again(self, layer: Layer, products: int, replayed: frozenset[Operation]) -> float:
        """Seconds of `products` that are done once more."""
        if self.host is None or not products:
            return products / self.rate
        cores = not replayed.isdisjoint({"attention_core", "layer"})
        matrices = (products - cores * layer.core_products) / self._of_matrices(layer.setting)
        return matrices + cores * self._core(layer)

    def _core(self, layer: Layer) -> float:
        """Seconds of an attention core on a host."""
        assert self.host is not None
        return layer.core_products / rate_at(self.host.attention[self.step.precision], self.step.seq_len)

    def _of_matrices(self, setting: Setting) -> float:
        """FLOP/s of a layer's matrices on a host, each of which goes by the narrower of its rank's sides."""
        assert self.host is not None
        shape, tensor = setting.shape, setting.parallel.tensor
        seconds = weights = 0.0
        for name, matrix in layer_matrices(shape).items():
            shared = matrix.outputs if name in COLUMNS else matrix.inputs
            whole = matrix.inputs if name in COLUMNS else matrix.outputs
            part = max(shared // tensor, keys_per_rank(shape, tensor=tensor) if name in ("k", "v") else 1)
            seconds += part * whole / rate_at(self.host.products[self.step.precision], min(part, whole))
            weights += part * whole
        return weights / seconds

    def _frozen(self, setting: Setting) -> float:
        """FLOPs of weights' gradients that a layer with frozen weights leaves out."""
        if setting.lora is None:
            return 0.0
        weights = sum(matrix.weights for matrix in layer_matrices(setting.shape).values())
        return MULTIPLY_ADD * weights * setting.tokens / setting.parallel.tensor

    def _of_a_layer(self, setting: Setting) -> float:
        """Seconds of a layer's exchanges over the tensor axis, forward: one for attention, one for what follows."""
        ranks = setting.parallel.tensor
        size = setting.element * setting.tokens * setting.shape.hidden_size
        return 2 * all_reduced(size, ranks, self.cluster.link(ranks))

    def _keys(self, setting: Setting) -> float:
        """Seconds until keys and values reach all context ranks, forward and again backward, and gradients return."""
        parallel = setting.parallel
        if parallel.context == 1:
            return 0.0
        width = 2 * keys_per_rank(setting.shape, tensor=parallel.tensor)
        size = setting.element * setting.micro_batch * setting.seq_len * width
        return 3 * gathered(size, parallel.context, self.cluster.link(parallel.tensor * parallel.context))

    # The pipeline

    def _output(self, layout: Layout) -> float:
        """Seconds of the output and the loss of one micro-batch."""
        setting, parallel = self._setting(layout), layout.parallel
        logits = setting.tokens * self.step.shape.vocab_size / parallel.tensor
        rate = self.traffic if self.host is None else self.host.logits[self.step.precision]
        return self._output_products(layout) + LOGIT_TRAFFIC * logits / rate + self._ends(setting, logits)

    def _ends(self, setting: Setting, logits: float) -> float:
        """Seconds that a host takes before and behind the layers of a micro-batch, however small: its tensor ranks look
        up and add, gather what the output reads, and add up what the loss needs of all logits.
        """
        if self.host is None:
            return 0.0
        ranks, link = setting.parallel.tensor, self.cluster.link(setting.parallel.tensor)
        size = setting.element * setting.tokens * setting.shape.hidden_size
        chunks = -(-int(logits) // CHUNK_LOGITS)
        lost = LOSS_MESSAGES * chunks * all_reduced(FP32 * setting.tokens / chunks, ranks, link)
        return self.host.ends + 2 * all_reduced(size, ranks, link) + lost

    def _output_products(self, layout: Layout) -> float:
        setting = self._setting(layout)
        logits = setting.tokens * self.step.shape.vocab_size / layout.parallel.tensor
        times = 3 if self.step.lora is None else 2
        width = self.step.shape.hidden_size
        rate = self.rate if self.host is None else rate_at(self.host.products[self.step.precision], width)
        return times * MULTIPLY_ADD * logits * width / rate

    def _loads(self, parallel: Parallel, output: float) -> tuple[float, float]:
        """Layers of the average rank and of the busiest, the output being worth `output` layers."""
        ranks = parallel.pipeline
        known = ranks, parallel.virtual, parallel.stages
        if known not in self._stages:
            each = stages(self.step.shape, parallel)
            layers = [sum(len(stage.layers) for stage in each[rank::ranks]) for rank in range(ranks)]
            self._stages[known] = max(layers), layers[-1]
        most, last = self._stages[known]
        return (self.step.shape.num_layers + output) / ranks, max(most, last + output)

    def _between_stages(self, layout: Layout, passes: float) -> float:
        """Seconds of what one stage waits for from the next: each pass each way, for a neighbour works in step."""
        parallel, setting = layout.parallel, self._setting(layout)
        if parallel.pipeline == 1:
            return 0.0
        # Pipeline is the outermost axis: neighbours are a whole replica's ranks of one stage apart.
        link = self.cluster.link(2 * parallel.ranks // parallel.pipeline)
        size = setting.element * setting.own_tokens * self.step.shape.hidden_size
        seconds = 2 * passes * (size / link.bytes_per_second + link.latency)
        if self.step.shape.tie_embeddings and self.step.lora is None:
            both = FP32 * self.step.shape.vocab_size * self.step.shape.hidden_size / parallel.tensor
            seconds += all_reduced(both, 2, self.cluster.link(parallel.ranks))
        return seconds

    # Replicas and the optimizer

    def _trained(self, layout: Layout) -> float:
        """Weights of a rank that train, about."""
        return self._trainable / (layout.parallel.tensor * layout.parallel.pipeline)

    @cached_property
    def _trainable(self) -> float:
        shape, lora = self.step.shape, self.step.lora
        if lora is None:
            return self._weights
        return shape.num_layers * sum(matrix.adapter_weights for matrix in layer_matrices(shape, lora).values())

    @cached_property
    def _weights(self) -> float:
        """Of all matrices."""
        shape = self.step.shape
        each = layer_matrices(shape).values()
        ends = 1 if shape.tie_embeddings else 2
        return shape.num_layers * sum(matrix.weights for matrix in each) + ends * shape.vocab_size * shape.hidden_size

    def _accumulation(self, layout: Layout, count: int) -> float:
        return count * ACCUMULATION_TRAFFIC * self._trained(layout) / self._updates

    def _optimizer(self, layout: Layout) -> float:
        parallel = layout.parallel
        shards = parallel.data * parallel.context if parallel.shard_optimizer else 1
        return OPTIMIZER_TRAFFIC * self._trained(layout) / shards / self._updates

    @property
    def _updates(self) -> float:
        return self.cluster.device.bandwidth if self.host is None else self.host.updates

    def _between_replicas(self, layout: Layout, count: int, pace: Pace) -> float:
        """Seconds of gradients on their way to be summed, and of weights on their way back."""
        parallel = layout.parallel
        replicas = parallel.data * parallel.context
        if replicas == 1:
            return 0.0
        link = self.cluster.link(parallel.tensor * replicas)
        trained, element = self._trained(layout), ELEMENTS[self.step.precision]
        if not parallel.is_shared_out:
            # In fp32, once a step; a replica that has its share of the optimizer sends its weights to the others.
            if not parallel.shard_optimizer:
                return all_reduced(FP32 * trained, replicas, link)
            return gathered((FP32 + element) * trained, replicas, link)
        # With every micro-batch, layer after layer, behind the compute of the one before.
        each = gathered(FP32 * trained, replicas, link)
        if parallel.shard_weights:
            weights = self._weights / parallel.tensor
            each += 2 * gathered(element * weights, replicas, link)
        else:
            each += gathered(element * trained, replicas, link) / count
        computing = self.step.shape.num_layers * pace.total
        return count * max(each - computing, each / max(1, self.step.shape.num_layers))


def fitted(step: Step, layout: Layout, cluster: Cluster, *, seconds: float) -> Cluster:
    """The cluster with the efficiency at which this step takes so long. Raises ValueError where none would do."""
    low, high = 0.01, 1.5

    def at(efficiency: float) -> Cluster:
        return replace(cluster, device=replace(cluster.device, efficiency=efficiency))

    def takes(efficiency: float) -> float:
        return Timer(step, at(efficiency)).terms(layout).total

    if not takes(high) <= seconds <= takes(low):
        raise ValueError(
            f"no efficiency makes this step take {seconds:.3g} s: with most it takes {takes(high):.3g} s; check what "
            "was measured, and the cluster's links"
        )
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if takes(middle) > seconds else (low, middle)
    return at(high)
