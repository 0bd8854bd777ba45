"""Take messages to webhook endpoints, several at once, each for so long and no longer."""

from __future__ import annotations

from threading import Lock, Thread

import structlog

from core import outbox, posting, webhooks
from core.outbox import Errand
from core.reach import UnreachableError
from core.services import Services
from workers.orders import Orders

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
AT_ONCE = 16
"""Messages under way; endpoints that do not answer each take a place for as long as a request may take."""
GONE = 410
"""What an endpoint answers that wants to hear nothing more of it."""


class Courier:
    """Looks for messages every so often, and as soon as one has been taken."""

    def __init__(self, services: Services, *, seconds: float = posting.SECONDS) -> None:
        self.services = services
        self.seconds = seconds
        self._busy: set[str] = set()
        """Endpoints that a message is under way to."""
        self._guard = Lock()

    def run(self, orders: Orders) -> None:
        while orders.wait(LOOK_SECONDS) is None:
            try:
                self.look(orders)
            except Exception:  # the loop's edge: the database may be away, and comes back
                log.warning("webhooks not looked for", exc_info=True)

    def look(self, orders: Orders) -> None:
        with self._guard:
            busy = set(self._busy)
        if len(busy) >= AT_ONCE:
            return
        with self.services.db.session() as session:
            errands = outbox.take(session, busy=busy, most=AT_ONCE - len(busy))
        for errand in errands:
            with self._guard:
                self._busy.add(errand.endpoint.id)
            Thread(target=self._go, args=(errand, orders), name=f"webhook {errand.id}", daemon=True).start()

    def _go(self, errand: Errand, orders: Orders) -> None:
        try:
            self.deliver(errand)
        except Exception:  # the thread's edge: the message is sent again once its time is over
            log.warning("webhook not settled", message=errand.id, exc_info=True)
        finally:
            with self._guard:
                self._busy.discard(errand.endpoint.id)
            orders.wake()

    def deliver(self, errand: Errand) -> None:
        """Send it, and write down what came of it. URLs stay out of the log: they may hold a token."""
        endpoint, status = errand.endpoint, None
        try:
            status = posting.post(
                endpoint.url,
                body=errand.body,
                headers=webhooks.signed(endpoint, errand.id, errand.body),
                networks=self.services.settings.reachable,
                seconds=self.seconds,
            )
            reason = f"it answered {status}"
        except UnreachableError as error:
            reason = str(error)
        told = {"message": errand.id, "endpoint": endpoint.id, "attempt": errand.attempt}
        with self.services.db.session() as session:
            if status is not None and 200 <= status < 300:
                outbox.delivered(session, errand)
                log.info("webhook delivered", **told)
            else:
                again = outbox.failed(session, errand, reason, for_good=status == GONE)
                log.info("webhook not delivered", reason=reason, again=again, **told)
