"""Step times beside the papers' tables, and layouts that are chosen for reasons that are told."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from core import layouts
from core.files import FileFacts
from core.presets import PRESETS
from core.resolve import ClusterFacts, resolve
from core.spec import JobSpec
from engine.config import ModelShape, Parallel, RunConfig
from engine.plan import search, time
from engine.plan.cluster import Cluster, Device, Host, Link, as_facts, described, from_facts, rate_at
from engine.plan.recompute import Setting, cost
from engine.plan.search import Found, Wishes
from engine.plan.time import Layout, Step, Timer
from tests import make

SELENE = described("A100", node_size=8)
"""Eight A100s a node (Korthikanti et al. 2022, section 6)."""
CORE = frozenset({"attention_core"})


def preset(name: str) -> ModelShape:
    fields = PRESETS[name]
    return ModelShape.model_validate(fields | {"head_dim": fields["hidden_size"] // fields["num_heads"]})


@dataclass(frozen=True)
class Row:
    """Of Korthikanti et al. 2022, table 3 and 5: selective recomputation and sequence parallelism."""

    preset: str
    pipeline: int
    virtual: int
    global_batch: int
    micro_batch: int
    seconds: float
    data: int = 1

    @property
    def step(self) -> Step:
        return Step(preset(self.preset), 2048, self.global_batch)

    @property
    def layout(self) -> Layout:
        count = self.pipeline * self.virtual
        parallel = Parallel(
            tensor=8,
            sequence=True,
            pipeline=self.pipeline,
            virtual=self.virtual,
            data=self.data,
            stages=(self.step.shape.num_layers // count,) * count,
        )
        return Layout(parallel, self.micro_batch, CORE)

    def seconds_on(self, cluster: Cluster) -> float:
        return Timer(self.step, cluster).terms(self.layout).total


ROWS = [
    Row("gpt-22b", 1, 1, 4, 4, 1.10),
    Row("gpt-175b", 8, 3, 64, 1, 13.75),
    Row("gpt-530b", 35, 3, 280, 1, 37.83),
    # Its interleaving is not stated; without any, its bubble is the 12 % that the batch gives.
    Row("gpt-1t", 64, 1, 512, 1, 71.49),
    # Section 6.3: the 530B model on eight times as many GPUs.
    Row("gpt-530b", 35, 3, 2240, 1, 39.15, data=8),
]


def test_calibrated_on_the_papers_175b_row_the_other_rows_come_out_within_a_tenth() -> None:
    base = ROWS[1]
    cluster = time.fitted(base.step, base.layout, SELENE, seconds=base.seconds)
    assert base.seconds_on(cluster) == pytest.approx(base.seconds, rel=1e-4)
    for row in ROWS:
        assert row.seconds_on(cluster) == pytest.approx(row.seconds, rel=0.10), row
    # What comes out today, so that a change shows.
    predicted = [round(row.seconds_on(cluster), 2) for row in ROWS]
    assert predicted == [1.03, 13.75, 38.88, 76.56, 39.33]


def test_the_tables_efficiency_is_that_of_the_175b_row() -> None:
    base = ROWS[1]
    assert time.fitted(base.step, base.layout, SELENE, seconds=base.seconds).device.efficiency == pytest.approx(
        SELENE.device.efficiency, abs=0.01
    )


def test_one_factor_for_products_memory_and_links_found_on_one_row_predicts_the_others_within_a_tenth() -> None:
    # NVIDIA's data sheet of the A100 and 200 Gbit/s a GPU (Narayanan et al. 2021, section 5), all times the same share,
    # which the 175B row decides; the table's latencies, and no time of a launch.
    def seconds(row: Row, share: float) -> float:
        device = Device("A100", {"bf16": 312e12 * share}, bandwidth=2.04e12 * share, efficiency=1.0)
        return row.seconds_on(Cluster(device, 8, Link(300e9 * share, 6e-6), Link(25e9 * share, 10e-6)))

    low, high = 0.3, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(ROWS[1], middle) > ROWS[1].seconds else (low, middle)
    assert high == pytest.approx(0.74, abs=0.005)
    for row in ROWS:
        assert seconds(row, high) == pytest.approx(row.seconds, rel=0.10), row


def test_a_time_that_no_efficiency_reaches_is_refused() -> None:
    base = ROWS[1]
    with pytest.raises(ValueError, match=r"no efficiency makes this step take 0\.001 s"):
        time.fitted(base.step, base.layout, SELENE, seconds=0.001)


def test_terms_add_up_and_a_device_alone_only_computes() -> None:
    device = Device("plain", {"fp32": 1e9}, bandwidth=1e30, efficiency=0.5)
    step = Step(make.shape(tie_embeddings=False), 32, 4, precision="fp32")
    terms = Timer(step, Cluster(device, 1, Link(1e9))).terms(Layout(Parallel(), 2))
    # Six operations a weight and token, twelve a pair of 32 x 32 and feature; 2304 weights a layer, see test_memory.
    tokens = 4 * 32
    flops = 6 * tokens * (2 * 2304 + 260 * 16) + 12 * 2 * tokens * 32 * 16
    assert terms.products == pytest.approx(flops / 0.5e9)
    assert terms.total == pytest.approx(sum(seconds for name, seconds in terms.itemised().items() if name != "total"))
    assert terms.total == pytest.approx(terms.products)


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_the_bubble_is_the_papers_share_of_the_rest(virtual: int) -> None:
    # Narayanan et al. 2021, section 2.2: (p - 1) / (v m) of the ideal time, on links that take none.
    shape = make.shape(num_layers=24, vocab_size=2)
    step = Step(shape, 32, 16, precision="fp32")
    free = Cluster(Device("plain", {"fp32": 1e9}, bandwidth=1e30, efficiency=1.0), 8, Link(1e30), Link(1e30))
    even = (24 // (4 * virtual),) * (4 * virtual)
    terms = Timer(step, free).terms(Layout(Parallel(pipeline=4, virtual=virtual, stages=even), 1))
    # The output of two entries weighs a little, on the last rank.
    assert terms.bubble / (terms.total - terms.bubble) == pytest.approx(3 / (virtual * 16), rel=0.05)


def test_a_ring_moves_what_the_paper_says() -> None:
    # Narayanan et al. 2021, section 3.2: 8 b s h (t - 1) / t elements a layer and micro-batch, forward and backward.
    link = Link(1e6)
    step = Step(make.shape(), 32, 2, precision="fp32", lora=None)
    slow = Cluster(Device("plain", {"fp32": 1e30}, bandwidth=1e30, efficiency=1.0), 2, link)
    terms = Timer(step, slow).terms(Layout(Parallel(tensor=2), 2))
    assert terms.tensor == pytest.approx(2 * 8 * 2 * 32 * 16 * (1 / 2) * 4 / 1e6)


def host_of(**more: object) -> Host:
    """Cores whose every rate is another power of ten."""
    given: dict[str, Any] = {
        "products": {"fp32": [(16, 1e7), (64, 1e9)]},
        "attention": {"fp32": [(32, 1e6)]},
        "traffic": {"fp32": 1e5},
        "logits": {"fp32": 1e4},
        "updates": 1e3,
        "ends": 0.5,
    }
    return Host(**given | more)


def test_rates_lie_between_those_that_were_measured() -> None:
    curve = [(16, 100.0), (64, 300.0)]
    # 32 is halfway between 16 and 64 on a line of powers of two.
    assert [rate_at(curve, size) for size in (4, 16, 32, 64, 900)] == pytest.approx([100, 100, 200, 300, 300])


def test_cores_go_by_rates_of_the_sizes_at_hand() -> None:
    step = Step(make.shape(tie_embeddings=False), 32, 4, precision="fp32")
    device = Device("cpu", {"fp32": 1e30}, bandwidth=1e30, efficiency=1.0, host=host_of())
    terms = Timer(step, Cluster(device, 1, Link(1e9))).terms(Layout(Parallel(), 2))
    # As above. Each matrix of 16 has no side below 16 but those of keys and values; a core has a rate of its own.
    tokens = 4 * 32
    assert terms.products == pytest.approx(6 * tokens * (2 * 2304 + 260 * 16) / 1e7 + 12 * 2 * tokens * 32 * 16 / 1e6)
    saved = cost(Setting(step.shape, 32, 2, 4), ()).saved
    trained = 2 * 2304 + 2 * 260 * 16
    # Two micro-batches: five times what two layers keep, eight fp32 numbers a logit, half a second at the ends, and
    # gradients that are read and written.
    elementwise = 2 * (2 * 5 * saved / 1e5 + 32 * 2 * 32 * 260 / 1e4 + 0.5 + 8 * trained / 1e3)
    assert terms.elementwise == pytest.approx(elementwise)
    assert terms.optimizer == pytest.approx(48 * trained / 1e3)


def test_nothing_hides_what_ranks_of_a_host_exchange() -> None:
    step = Step(make.shape(), 32, 2, precision="fp32")
    slow = host_of(products={"fp32": [(16, 1.0)]}, ends=0.0)
    device = Device("cpu", {"fp32": 1.0}, bandwidth=1e30, efficiency=1.0, host=slow)
    cores = Timer(step, Cluster(device, 2, Link(1e6))).terms(Layout(Parallel(tensor=2), 2))
    alone = Timer(step, Cluster(replace(device, host=None), 2, Link(1e6))).terms(Layout(Parallel(tensor=2), 2))
    # Narayanan et al. 2021, section 3.2, as above: half of it forward, and hidden going back where products take long.
    assert cores.tensor == pytest.approx(2 * alone.tensor) == pytest.approx(2 * 8 * 2 * 32 * 16 * (1 / 2) * 4 / 1e6)


def test_what_was_measured_of_a_host_outlives_a_row_of_the_database() -> None:
    device = Device("cpu", {"fp32": 1e9}, bandwidth=1e9, measured=True, host=host_of())
    facts = json.loads(json.dumps(as_facts(device, Link(1e9, 1e-4))))
    read = from_facts(facts, memory_bytes=None, node_size=2)
    assert read.device.host is not None
    assert rate_at(read.device.host.products["fp32"], 16) == 1e7
    assert as_facts(read.device, read.inside) == facts
    # What an earlier version kept says nothing of these.
    assert from_facts({**facts, "host": None}, memory_bytes=None, node_size=2).device.host is None


# The search


def searched(name: str, ranks: int, global_batch: int, **fixed: int | bool) -> Found:
    step = Step(preset(name), 2048, global_batch)
    return search.search(step, SELENE, ranks=ranks, wishes=Wishes(fixed=fixed))


@pytest.mark.parametrize(
    ("name", "ranks", "global_batch"),
    [("gpt-175b", 64, 32), ("gpt-175b", 64, 128), ("gpt-530b", 280, 280), ("gpt-1t", 512, 512)],
)
def test_tensor_ranks_fill_a_node_and_the_pipeline_goes_across_as_the_paper_says(
    name: str, ranks: int, global_batch: int
) -> None:
    # Narayanan et al. 2021, takeaway 1 and figure 13 (its schedule does not interleave), and table 3 of Korthikanti et
    # al. 2022: of the axes that the papers have.
    best = searched(name, ranks, global_batch, context=1, virtual=1, shard_gradients=False).best[0]
    assert best.layout.parallel.tensor == SELENE.node_size
    assert best.layout.parallel.sequence


def test_the_papers_layout_of_a_trillion_weights_is_found_and_the_others_are_told_off() -> None:
    found = searched("gpt-1t", 512, 512)
    parallel = found.best[0].layout.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data) == (8, 64, 1)
    assert len(found.best) == search.BEST
    times = [candidate.terms.total for candidate in found.best]
    assert times == sorted(times)
    why = {loser.why.split(":")[0].split(" refused")[0]: loser.why for loser in found.losers}
    assert "replicas alone" in why
    assert "of it gradients; 72 GiB are free" in why["replicas alone"]
    assert "tensor takes" in why["tensor=16"]
    assert "s more than the best" in why["tensor=16"]
    assert "refused: stage 0 needs" in why["pipeline=8"]


def test_none_of_the_best_five_needs_more_than_there_is_and_less_is_replayed_where_there_is_room() -> None:
    step = Step(preset("gpt-22b"), 2048, 4)
    tight = search.search(step, SELENE, ranks=8)
    assert all(candidate.memory.total <= 0.9 * 80 * 2**30 for candidate in tight.best)
    roomy = replace(SELENE, device=replace(SELENE.device, memory_bytes=2**40))
    assert [candidate.layout.replayed for candidate in search.search(step, roomy, ranks=8).best] == [frozenset()] * 5


def test_what_fits_nowhere_has_no_best_and_says_why() -> None:
    found = searched("gpt-1t", 8, 8)
    assert found.best == ()
    assert all("refused" in loser.why for loser in found.losers)
    assert found.losers


def test_a_count_that_nothing_divides_into_is_refused() -> None:
    with pytest.raises(ValueError, match="no layout of 7 ranks is valid"):
        search.search(Step(make.shape(), 32, 4, precision="fp32"), SELENE, ranks=7)


def test_each_of_the_best_five_of_a_random_grid_is_a_job_that_resolves() -> None:
    chance = random.Random(7)
    tried = 0
    while tried < 40:
        heads = chance.choice([2, 4, 6, 8, 12])
        architecture = chance.choice(["llama", "qwen3", "gpt2"])
        model = {
            "architecture": architecture,
            "num_layers": chance.choice([2, 3, 4, 6, 8]),
            "num_heads": heads,
            "num_kv_heads": heads if architecture == "gpt2" else chance.choice([1, heads // 2, heads]),
            "hidden_size": 8 * heads,
            "max_seq_len": 128,
            "vocab_size": 300,
        }
        seq_len, ranks = chance.choice([24, 32, 64, 96]), chance.choice([1, 2, 3, 4, 6, 8, 16])
        batch = chance.choice([4, 8, 12, 16, 24])
        ask = {"kind": "pretrain", "model": model, "data": {"train": ["file-text"], "seq_len": seq_len}}
        run = resolved(ask | {"training": {"steps": 1, "global_batch": batch}})
        assert run.model is not None
        step = Step(run.model, seq_len, batch, precision="fp32")
        try:
            found = search.search(step, SELENE, ranks=ranks)
        except ValueError:
            continue
        tried += 1
        for candidate in found.best:
            layout = candidate.layout
            training = {"steps": 1, "global_batch": batch, "micro_batch": layout.micro_batch}
            said = layout.parallel.model_dump(mode="json", exclude_defaults=True)
            recompute = search.as_recompute(layout.replayed).model_dump(mode="json", exclude_none=True)
            again = resolved(ask | {"training": training, "parallel": said, "recompute": recompute})
            assert again.parallel == layout.parallel
            assert again.training.micro_batch == layout.micro_batch
    assert tried == 40


def resolved(ask: dict[str, object]) -> RunConfig:
    text = FileFacts(
        id="file-text", bytes=9, sha256="", storage_key="", format="text", examples=1, characters=4000,
        is_plain_text=True,
    )  # fmt: skip
    spec = JobSpec.model_validate(ask)
    return resolve(spec, base=None, files={text.id: text}, cluster=ClusterFacts(largest_node=512)).run


def test_what_is_replayed_grows_in_bytes_freed_and_in_work() -> None:
    for name in ("gpt-22b", "llama-7b"):
        shape = preset(name)
        costs = [cost(Setting(shape, 2048, 1, 2), some) for some in search.levels(shape)]
        for less, more in pairwise(costs):
            assert (more.saved, -more.products) <= (less.saved, -less.products)
            assert more.saved < less.saved


def test_a_rank_that_has_a_host_alone_has_all_cores_and_no_more_memory_bandwidth_than_was_measured() -> None:
    slot = Device("cpu", {"fp32": 1e11}, bandwidth=1e10, efficiency=1.0, measured=True)
    facts = ClusterFacts(largest_node=4, rates=as_facts(slot, Link(1e9)))
    seen = [layouts.described(facts, ranks=ranks) for ranks in (1, 2, 4)]
    devices = [cluster.device for cluster in seen if cluster is not None]
    assert [device.flops["fp32"] for device in devices] == [4e11, 2e11, 1e11]
    assert [device.bandwidth for device in devices] == [1e10] * 3


def test_a_device_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="no figures of the device 'Abacus'; there are those of V100"):
        described("Abacus")
    assert described("NVIDIA H200 141GB").device.name == "H200"
