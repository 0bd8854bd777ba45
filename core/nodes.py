"""Hosts that run jobs: what they offer, and whether the database has heard of them lately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, delete, or_, select, true, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core import hints
from core.db import directly
from core.errors import InUse, NotFound
from core.models import Node, Slot, database_now
from core.placing import Resting
from core.resolve import ClusterFacts

HEARTBEAT = timedelta(seconds=5)
"""How often a node says that it lives."""
DEAD_AFTER = 3 * HEARTBEAT
"""Silence after which it gets nothing new. What it runs comes back when the leases end."""
BOUNCES_BORNE = 1
"""Jobs in a row that a host may fail to start, as any may have a bad moment, before it rests."""
FIRST_REST, LONGEST_REST = timedelta(minutes=1), timedelta(minutes=10)
"""How long, twice as long with each job more."""
FORGOTTEN_AFTER = timedelta(days=1)
"""Silence after which nobody counts on it any more."""


@dataclass(frozen=True)
class NodeStatus:
    """A node as a reader sees it."""

    node: Node
    is_alive: bool
    slots: Sequence[Slot]
    """By index; `job_id` tells who holds each."""


def register(
    session: Session,
    name: str,
    *,
    device: str,
    num_slots: int,
    slot_memory_bytes: int | None = None,
    slot_peak_flops: float | None = None,
    rates: Mapping[str, Any] | None = None,
    starts_at_once: int | None = None,
    holder: str | None = None,
) -> Node:
    """A host is up and offers its slots. What its name ran before keeps its slots until it ends.

    Raises InUse where another holder has the name and was heard lately.
    """
    offer = {
        "device": device,
        "num_slots": num_slots,
        "slot_memory_bytes": slot_memory_bytes,
        "slot_peak_flops": slot_peak_flops,
        "rates": None if rates is None else dict(rates),
        "starts_at_once": starts_at_once,
        "heartbeat_at": database_now(),
        "draining": False,
        "bounces": 0,
        "rests_until": None,
        "holder": holder,
    }
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    registered = session.scalars(
        insert(Node)
        .values(name=name, **offer)
        .on_conflict_do_update(index_elements=[Node.name], set_=offer, where=~_is_anothers(holder))
        .returning(Node.name)
    ).one_or_none()
    if registered is None:
        raise _taken(name)
    session.execute(
        insert(Slot)
        .values([{"node": name, "index": index, "job_id": None} for index in range(num_slots)])
        .on_conflict_do_nothing()
    )
    session.execute(delete(Slot).where(Slot.node == name, Slot.index >= num_slots, Slot.job_id.is_(None)))
    hints.nudge(session)
    return session.scalars(select(Node).where(Node.name == name).execution_options(populate_existing=True)).one()


def assert_free(session: Session, name: str, *, holder: str) -> None:
    """Raise InUse where `register` would."""
    if session.scalars(select(Node.name).where(Node.name == name, _is_anothers(holder))).first():
        raise _taken(name)


def heartbeat(session: Session, name: str, *, holder: str | None = None) -> None:
    """The host lives. NotFound if it was never registered, or forgotten, or another has its name: register it again."""
    _change(session, name, holder, heartbeat_at=database_now())


def rate(session: Session, name: str, rates: Mapping[str, Any], *, holder: str | None = None) -> None:
    """The host measured how fast its slots are. NotFound as `heartbeat` raises it."""
    _change(session, name, holder, rates=dict(rates))


def drain(session: Session, name: str, *, holder: str | None = None) -> None:
    """Give this host nothing new; registering it again ends that. NotFound as `heartbeat` raises it."""
    _change(session, name, holder, draining=True)


def bounced(session: Session, name: str) -> None:
    """The host did not start a job that it was given, though it was told to: after some of them it rests."""
    node = session.scalars(
        update(Node)
        .where(Node.name == name)
        .values(bounces=Node.bounces + 1)
        .returning(Node)
        .execution_options(synchronize_session=False, populate_existing=True)
    ).one_or_none()
    if node is not None and (seconds := rest_after(node.bounces)):
        session.execute(update(Node).where(Node.name == name).values(rests_until=database_now() + seconds))


def rest_after(bounces: int) -> float:
    """Seconds that a host rests after so many jobs in a row that it did not start."""
    over = bounces - BOUNCES_BORNE
    return min(FIRST_REST.total_seconds() * 2.0 ** (over - 1), LONGEST_REST.total_seconds()) if over > 0 else 0.0


def started_one(session: Session, name: str) -> None:
    """The host starts what it is given."""
    bounced = or_(Node.bounces > 0, Node.rests_until.is_not(None))
    session.execute(update(Node).where(Node.name == name, bounced).values(bounces=0, rests_until=None))


def forget(session: Session) -> Sequence[str]:
    """Remove hosts that were silent for so long that they won't come back, unless a job is still said to run there.

    Containers get a new name with each start, and jobs are made for what the cluster is thought to have.
    """
    silent = Node.heartbeat_at < database_now() - FORGOTTEN_AFTER.total_seconds()
    holds = select(Slot.node).where(Slot.node == Node.name, Slot.job_id.is_not(None)).exists()
    return session.scalars(
        delete(Node).where(silent, ~holds).returning(Node.name).execution_options(synchronize_session=False)
    ).all()


def alive(session: Session) -> Sequence[Node]:
    """Hosts heard lately that aren't going down and don't rest, by name."""
    takes = (_lives(), Node.draining.is_(False), ~_rests())
    return session.scalars(select(Node).where(*takes).order_by(Node.name)).all()


def is_free(session: Session, name: str) -> bool:
    """Whether no job has a slot of the host."""
    held = select(Slot.job_id).where(Slot.node == name, Slot.job_id.is_not(None))
    return session.scalars(held.limit(1)).first() is None


def resting(session: Session) -> list[Resting]:
    """Hosts that would be given jobs if they had started those before, by name."""
    rest = (_lives(), Node.draining.is_(False), _rests())
    found = select(Node.name, Node.device, Node.num_slots, Node.rests_until).where(*rest).order_by(Node.name)
    return [Resting(name, device, slots, until or 0.0) for name, device, slots, until in session.execute(found)]


def listing(session: Session) -> list[NodeStatus]:
    """Every host that ever registered, by name, and who holds its slots."""
    living = {node.name for node in session.scalars(select(Node).where(_lives()))}
    slots: dict[str, list[Slot]] = {}
    for slot in session.scalars(select(Slot).order_by(Slot.node, Slot.index)):
        slots.setdefault(slot.node, []).append(slot)
    return [
        NodeStatus(node, is_alive=node.name in living, slots=slots.get(node.name, []))
        for node in session.scalars(select(Node).order_by(Node.name))
    ]


def cluster(session: Session, *, device: Literal["cpu", "cuda"] | None = None) -> ClusterFacts:
    """What a job may count on, of this `device` if one is said. Hosts that are down for the moment count too.

    Otherwise those that offer GPUs come first.
    """
    known = directly(session, _OFFERS).all()
    if device is None:
        device = "cuda" if any(node.device == "cuda" for node in known) else "cpu"
    usable = [node for node in known if node.device == device]
    memories = [node.slot_memory_bytes for node in usable]
    return ClusterFacts(
        device=device,
        largest_node=max((node.num_slots for node in usable), default=None),
        slot_memory_bytes=max((memory for memory in memories if memory is not None), default=None)
        if None not in memories
        else None,
        slot_peak_flops=min((node.slot_peak_flops for node in usable if node.slot_peak_flops), default=None),
        rates=min((node.rates for node in usable if node.rates), key=_speed, default=None),
    )


def _speed(rates: Mapping[str, Any]) -> tuple[bool, float]:
    """What is measured comes before what a table says; of several nodes, a plan goes by the slowest."""
    return not rates["measured"], min(rates["flops"].values(), default=0.0)


_OFFERS = select(Node.device, Node.num_slots, Node.slot_memory_bytes, Node.slot_peak_flops, Node.rates)


def _lives() -> ColumnElement[bool]:
    # Nor is one alive whose last word was spoken before a clock was set back.
    silence = DEAD_AFTER.total_seconds()
    return Node.heartbeat_at.between(database_now() - silence, database_now() + silence)


def _rests() -> ColumnElement[bool]:
    latest = database_now() + LONGEST_REST.total_seconds()
    return and_(Node.rests_until.is_not(None), Node.rests_until > database_now(), Node.rests_until <= latest)


def _is_anothers(holder: str | None) -> ColumnElement[bool]:
    return and_(Node.holder.is_not(None), Node.holder != (holder or ""), _lives())


def _taken(name: str) -> InUse:
    return InUse(
        f"Another node of the name {name!r} was heard within the last {DEAD_AFTER.total_seconds():g} s: give this one"
        " another TRAINSHED_NODE_NAME. If that one is no more, the name is free once it has been silent for as long."
    )


def _change(session: Session, name: str, holder: str | None, **values: object) -> None:
    ours = or_(Node.holder.is_(None), Node.holder == holder) if holder else true()
    changed = session.scalars(
        update(Node).where(Node.name == name, ours).values(values).returning(Node.name)
    ).one_or_none()
    if changed is None:
        raise NotFound(f"There is no node {name!r}.")
