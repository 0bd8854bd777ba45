"""What a host offers, keeps alive and clears away."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from time import monotonic

import psutil
import pytest
from sqlalchemy import delete

from core import joblogs, jobs
from core.errors import NotFound
from core.models import Job
from core.services import Services
from core.settings import Settings
from core.states import JobState
from tests.workers.conftest import new_node, place_job
from workers import tidy
from workers.app import CONFIG, app
from workers.hardware import parse, survey
from workers.node import launcher_allowance

DEADLINE_SECONDS = 20

SMI = """\
0, GPU-aaaa-1111, NVIDIA H200, 143771
1, GPU-bbbb-2222, NVIDIA H200, 143771
"""
"""As `nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits` prints it."""


@pytest.mark.parametrize(
    ("visible", "slots"),
    [(None, 2), (["1"], 1), (["GPU-aaaa"], 1), (["0", "1", "7"], 2)],
    ids=["all", "by index", "by the start of a UUID", "one that isn't there"],
)
def test_a_host_offers_the_gpus_that_it_may_use(visible: list[str] | None, slots: int) -> None:
    hardware = parse(SMI, visible)

    assert hardware is not None
    assert (hardware.device, hardware.num_slots) == ("cuda", slots)
    # NVIDIA H200 data sheet: 141 GB, 989 TFLOPS in bf16 without sparsity.
    assert hardware.slot_memory_bytes == 143771 * 1024**2
    assert hardware.slot_peak_flops == 989e12


@pytest.mark.parametrize(("asked", "at_once"), [(3, 3), (None, len(psutil.Process().cpu_affinity()))])
def test_a_host_starts_as_many_ranks_at_once_as_it_has_cores_unless_it_is_told(
    tmp_path: Path, asked: int | None, at_once: int
) -> None:
    offer = survey(Settings(data_dir=tmp_path, slots=64, starts_at_once=asked))

    assert offer.num_slots <= 64
    assert offer.starts_at_once == at_once


@pytest.mark.parametrize(("listing", "visible"), [("", None), (SMI, []), ("\n", None)])
def test_a_host_without_gpus_of_its_own_offers_none(listing: str, visible: list[str] | None) -> None:
    assert parse(listing, visible) is None


@pytest.mark.parametrize(
    ("leases", "command"),
    [(2.0, ["workers.supervisor", "{job}"]), (0.0, ["engine", "launch", "{runs}/{job}/1/run.json"])],
    ids=["supervisor", "launcher"],
)
def test_who_stands_still_for_too_many_leases_is_killed_and_who_works_is_not(
    services: Services, leases: float, command: list[str]
) -> None:
    """A launcher's lease of two seconds leaves no time to look twice."""
    sleeping = "import time; time.sleep(600)"
    runs = services.settings.runs
    working, frozen = (
        subprocess.Popen([sys.executable, "-c", sleeping, *(word.format(runs=runs, job=job_id) for word in command)])
        for job_id in (place_in_folder(services), place_in_folder(services))
    )
    try:
        psutil.Process(frozen.pid).suspend()
        node = new_node(services)
        deadline, pause = monotonic() + DEADLINE_SECONDS, Event()
        since = monotonic()
        while frozen.poll() is None:
            node.end_frozen()
            assert monotonic() < deadline
            pause.wait(0.1)

        assert monotonic() - since > leases * services.settings.lease_seconds
        assert working.poll() is None
    finally:
        for process in (working, frozen):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("lease", "ends_at"),
    # A renewal is due after a fifth of the lease, and may take 0.15 of it: no lease ends sooner after any moment.
    [(5.0, 5 - 1 - 0.75), (15.0, 15 - 3 - 2.25), (60.0, 60 - 12 - 9.0)],
)
def test_a_launcher_that_stands_still_is_killed_well_before_its_lease_can_be_over(lease: float, ends_at: float) -> None:
    """It does so right after a look at it, and its supervisor is killed; looks are at most 1.5 s apart."""
    looks = [1.5 * number for number in range(1, 100)]
    killed_at = next(at for at in looks if at - looks[0] > launcher_allowance(lease))

    # As early as a gang that hears no beat kills itself, a fifth of the lease before, but for who is seen at once.
    assert killed_at <= max(looks[0], ends_at - 0.2 * lease)
    assert killed_at < ends_at


@pytest.mark.parametrize("url", [None, "postgresql+psycopg://nobody@127.0.0.1:1/away"], ids=["there", "away"])
def test_a_node_that_drains_tells_its_supervisors_itself_that_the_host_goes_down(
    services: Services, url: str | None
) -> None:
    """They are asked to save by SIGTERM, which anybody may send: only with the node's own word is it no loss.

    Whether its database is there or away, and nobody but them: another node of this host may go on.
    """
    told = (
        "import sys; from workers.orders import Orders, obey_signals; orders = Orders(); obey_signals(orders); "
        "print('ready', flush=True); print(orders.wait(60).name, orders.host_goes_down, flush=True)"
    )
    with ExitStack() as stack:
        ours, unnamed, anothers = (
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", told, "workers.supervisor", place_in_folder(services)],
                    stdout=subprocess.PIPE, text=True, env=os.environ | {"TRAINSHED_NODE_NAME": name},
                )
            )
            for name in ("here", "", "there")
        )  # fmt: skip
        said = {process: process.stdout for process in (ours, unnamed, anothers)}
        for output in said.values():
            assert output is not None
            assert output.readline() == "ready\n"
        settings = services.settings.model_copy(update={"database_url": url or services.settings.database_url})
        new_node(stack.enter_context(Services(settings))).drain()
        # That the other one has not ended is known once it ends for us, with nobody's word but ours.
        anothers.terminate()
        heard = [output.readline() for output in said.values() if output is not None]
        assert heard == ["DRAIN True\n", "DRAIN True\n", "DRAIN False\n"]


def test_a_storage_that_does_not_answer_does_not_silence_the_node(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: SimpleQueue[None] = SimpleQueue()
    answers = Event()

    def tidy_host(services: Services) -> None:
        calls.put(None)
        answers.wait(30)

    monkeypatch.setattr(tidy, "tidy_host", tidy_host)
    node = new_node(services)
    node.tidy()
    calls.get(timeout=30)
    node.beat()
    # Its time comes again while the first is still at it.
    node._tidy_at = 0.0
    node.tidy()
    answers.set()
    assert node._tidying is not None
    node._tidying.join(30)
    assert calls.empty()


def place_in_folder(services: Services) -> str:
    """A job that has a supervisor's log here."""
    job_id = place_job(services)
    (services.settings.runs / job_id).mkdir(parents=True)
    return job_id


def run_dir_with_log(services: Services, job_id: str, attempt: int, text: str) -> Path:
    folder = tidy.run_dir(services.settings, job_id, attempt)
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank-0.log").write_text(text)
    return folder


def test_the_run_directory_of_a_living_attempt_stays_and_those_before_it_go(services: Services) -> None:
    job_id = place_job(services, attempt=1)
    with services.db.session() as session:
        assert jobs.claim(session, job_id, "this one", services.settings.lease, node="here") is not None
    over, living = (run_dir_with_log(services, job_id, attempt, f"{attempt}") for attempt in (1, 2))
    coming = run_dir_with_log(services, job_id, 3, "claimed while we look")

    tidy.tidy_host(services)

    assert not over.exists()
    assert living.exists()
    assert coming.exists()


def test_of_a_deleted_job_a_host_keeps_nothing_and_of_others_all_that_they_need(services: Services) -> None:
    deleted, ended, living = (place_in_folder(services) for _ in range(3))
    for job_id in (deleted, ended, living):
        run_dir_with_log(services, job_id, 1, "x")
        (services.settings.runs / job_id / "supervisor.log").write_text("x")
        tidy.starting(services.settings.runs / job_id, 1).touch()
    with services.db.session() as session:
        for job_id in (deleted, ended):
            jobs.move(session, job_id, JobState.FAILED)
        session.get_one(Job, ended).attempt = 1
        session.execute(delete(Job).where(Job.id == deleted))

    tidy.tidy_host(services)

    left = sorted(path.relative_to(services.settings.runs).as_posix() for path in services.settings.runs.rglob("*.log"))
    logs = [f"{ended}/supervisor.log", f"{living}/1/logs/rank-0.log", f"{living}/supervisor.log"]
    assert left == sorted(logs)
    assert not (services.settings.runs / deleted).exists()
    assert not [stored for stored in services.storage.list(f"jobs/{deleted}")]


def test_what_is_called_otherwise_than_a_job_stays_beside_the_runs(services: Services) -> None:
    for name in ("lost+found", "job-0a", "ftjob-0a"):
        (services.settings.runs / name / "notes").mkdir(parents=True)
    tidy.tidy_host(services)
    assert [path.name for path in services.settings.runs.iterdir()] == ["lost+found"]


def test_a_job_that_this_database_does_not_know_and_somebody_works_for_stays(services: Services) -> None:
    folder = services.settings.runs / "job-0a"
    folder.mkdir(parents=True)
    with tidy.starting(folder, 1).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tidy.tidy_host(services)
        assert folder.exists()
    tidy.tidy_host(services)
    assert not folder.exists()


def test_a_folder_that_cannot_be_cleared_away_keeps_no_other(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = [run_dir_with_log(services, place_job(services, attempt=2), 1, "x") for _ in range(3)]
    tidy_job, asked = tidy.tidy_job, list[str]()

    def refused_at_first(services: Services, job_id: str) -> None:
        asked.append(job_id)
        if len(asked) == 1:
            raise PermissionError(13, "Permission denied")
        tidy_job(services, job_id)

    monkeypatch.setattr(tidy, "tidy_job", refused_at_first)
    tidy.tidy_host(services)

    assert [folder.parent.name for folder in over if folder.exists()] == asked[:1]


def test_what_ranks_printed_can_be_read_before_and_after_the_run_directory_went(services: Services) -> None:
    job_id = place_job(services)
    lines = [f"line {number}\n" for number in range(10_000)]
    run_dir_with_log(services, job_id, 1, "".join(lines))

    def tail(count: int, rank: int = 0) -> str:
        return joblogs.tail(services.settings, services.storage, job_id, rank, count)

    before = [tail(3), tail(9_000), tail(20_000), tail(0)]
    with services.db.session() as session:
        jobs.move(session, job_id, JobState.FAILED)
        session.get_one(Job, job_id).attempt = 1
    tidy.tidy_host(services)

    assert not tidy.run_dir(services.settings, job_id, 1).exists()
    assert before == ["".join(lines[-3:]), "".join(lines[-9_000:]), "".join(lines), ""]
    assert [tail(3), tail(9_000), tail(20_000), tail(0)] == before
    with pytest.raises(NotFound, match="Rank 1 of job"):
        tail(3, rank=1)


def test_a_log_without_lines_is_not_read_whole(services: Services) -> None:
    job_id = place_job(services)
    endless = "step 1\r" * (joblogs.MOST_BYTES // 7) + "x" * joblogs.MOST_BYTES
    run_dir_with_log(services, job_id, 1, endless)

    assert joblogs.tail(services.settings, services.storage, job_id, 0, 2) == "x" * joblogs.MOST_BYTES


def test_the_log_of_the_newest_attempt_is_the_one_that_is_read(services: Services) -> None:
    job_id = place_job(services)
    run_dir_with_log(services, job_id, 9, "nine\n")
    run_dir_with_log(services, job_id, 10, "ten\n")

    assert joblogs.tail(services.settings, services.storage, job_id, 0, 5) == "ten\n"


def test_no_message_is_held_for_long_and_no_result_is_kept() -> None:
    """Redis redelivers after an hour what was not acknowledged, so nothing is left unacknowledged while it works."""
    for name, value in CONFIG.items():
        assert app.conf[name] == value
    assert app.conf.task_acks_late is False
    assert app.conf.task_ignore_result is True
    assert app.conf.worker_prefetch_multiplier == 1
    assert app.conf.broker_connection_max_retries is None
