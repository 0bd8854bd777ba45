"""What a host measures of itself when it starts: kept beside its data, and in its row, where plans find it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from math import inf
from threading import Event
from typing import Any

import pytest

from core import jobs, nodes
from core.services import Services
from engine.calibrate import layer_of, link_of
from engine.plan.cluster import Device, Link, as_facts, from_facts
from tests import make
from tests.workers.conftest import new_node
from workers import calibration as module
from workers.calibration import FILE, Calibration
from workers.hardware import Hardware, parse

SLOTS = Hardware("cpu", 2, slot_memory_bytes=2**30)


def test_a_host_measures_once_and_plans_go_by_what_it_found(services: Services) -> None:
    calibration = Calibration(services.settings, SLOTS)
    facts = calibration.facts(lambda: True)
    assert facts is not None
    cluster = from_facts(facts, memory_bytes=2**30, node_size=2)
    device = cluster.device
    assert device.measured
    # However busy this machine is: all of them are numbers that a plan can divide by.
    assert all(0 < rate < inf for rate in device.flops.values())
    assert 0 < device.bandwidth < inf
    assert 0 < device.launch < inf
    host = device.host
    assert host is not None
    for curves in (host.products, host.attention):
        assert set(curves) == {"bf16", "fp32"}
        assert all(0 < rate < inf for curve in curves.values() for _, rate in curve)
    assert all(0 < rate < inf for rate in (*host.traffic.values(), *host.logits.values(), host.updates))
    assert 0 < cluster.inside.bytes_per_second < inf
    assert 0 < cluster.inside.latency < inf
    kept = services.settings.data_dir / FILE
    said = json.loads(kept.read_text())
    kept.write_text(json.dumps(said | {"facts": said["facts"] | {"bandwidth": 1.0}}))
    again = calibration.facts(lambda: False)
    assert again is not None
    assert again["bandwidth"] == 1.0
    other = Calibration(services.settings, replace(SLOTS, num_slots=1))
    assert other.of != calibration.of
    with services.db.session() as session:
        nodes.rate(session, "here", facts)
    with services.db.reading() as session:
        known = nodes.cluster(session).rates
    assert known == facts


def test_what_a_trembling_clock_says_is_not_believed() -> None:
    # 4 MiB in a second more than next to nothing takes, which is two messages.
    assert link_of(1.0, 2.0) == Link(4 * 2**20, 0.5)
    assert link_of(1.0, 1.0) is None
    assert link_of(2.0, 1.0) is None
    # No more than twenty times what the whole message tells.
    assert link_of(1.0, 1.0 + 1e-9) == Link(pytest.approx(20 * 4 * 2**20, rel=1e-6), 0.5)
    assert layer_of(1.0, 2.0) == 0.5
    assert layer_of(1.0, 1.0) == layer_of(1.0, 0.5) == 0.05


def test_a_host_is_offered_once_it_is_measured_so_that_the_first_plan_has_a_time(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring, answer = Event(), Event()
    found = as_facts(Device("toy", {"fp32": 1e9}, bandwidth=1e9, measured=True), Link(1e9))

    def measured(_: Calibration) -> dict[str, Any]:
        measuring.set()
        assert answer.wait(60)
        return found

    monkeypatch.setattr(Calibration, "_measured", measured)
    node = new_node(services)
    node.calibrate()
    assert measuring.wait(60)
    assert not node.may_be_offered
    answer.set()
    assert node.measuring is not None
    node.measuring.join(60)
    assert node.may_be_offered
    node.beat()
    with services.db.reading() as session:
        assert nodes.cluster(session).rates == found
    # What is kept keeps no later start from being offered at once.
    again = new_node(services)
    answer.clear()
    again.calibrate()
    assert again.may_be_offered


def test_a_host_is_measured_while_no_job_is_there(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with services.db.session() as session:
        nodes.register(session, "here", device="cpu", num_slots=2)
        assert nodes.is_free(session, "here")
        job_id = make.job(session).id
        jobs.place(session, job_id, "here", (1,), claim_within=timedelta(seconds=60))
        assert not nodes.is_free(session, "here")
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    host = Calibration(services.settings, SLOTS)
    found = iter([{"bandwidth": 1.0}, {"bandwidth": 2.0}])
    monkeypatch.setattr(host, "_measured", lambda: next(found))
    # In use at first; then a job comes in the midst; then not.
    free = iter([False, True, False, True, True])
    assert host.facts(lambda: next(free)) == {"bandwidth": 2.0}
    assert json.loads(host.cache.read_text())["facts"] == {"bandwidth": 2.0}
    in_use = Calibration(services.settings, replace(SLOTS, num_slots=1))

    def ask() -> bool:
        in_use.stop()
        return False

    assert in_use.facts(ask) is None


def test_a_damaged_cache_is_not_believed(services: Services) -> None:
    calibration = Calibration(services.settings, SLOTS)
    calibration.cache.write_text('{"of": 3')
    assert calibration._kept() is None
    calibration.cache.write_text(json.dumps({"of": calibration.of, "facts": {"name": "cpu"}}))
    assert calibration._kept() is None


def test_a_gpu_is_known_by_its_data_sheet_until_it_is_measured(services: Services) -> None:
    hardware = parse("0, GPU-1, NVIDIA A100-SXM4-80GB, 81920\n", None)
    assert hardware is not None
    assert hardware.rates is not None
    assert (hardware.rates["name"], hardware.rates["measured"]) == ("A100", False)
    with services.db.session() as session:
        nodes.register(session, "gpus", device="cuda", num_slots=1, rates=hardware.rates)
        measured = hardware.rates | {"measured": True, "flops": {"bf16": 1e12}}
        nodes.register(session, "faster", device="cuda", num_slots=1, rates=measured)
        # What was measured comes before what a table says.
        assert nodes.cluster(session).rates == measured
    strange = parse("0, GPU-1, Abacus 3000, 81920\n", None)
    assert strange is not None
    assert strange.rates is None
