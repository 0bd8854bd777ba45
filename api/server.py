"""`python -m api.server`: the API as one process. `--fd` takes over a listening socket: a restart refuses nobody."""

from __future__ import annotations

import argparse
import asyncio
import socket
from datetime import timedelta
from types import FrameType

import uvicorn
from fastapi import FastAPI

from api.app import create_app
from api.protocol import Protocol
from core import log
from core.services import Services
from core.settings import Settings

GRACE_SECONDS = 2
"""How long requests that are under way may take to end when the process is told to stop."""


STORAGE_PATIENCE = timedelta(seconds=15)
"""How long a storage server that refuses is asked again while somebody waits for the answer."""


class Server(uvicorn.Server):
    """Uvicorn, which sends the listeners of streams home when it is told to stop: by themselves they would never go."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.app = app
        self.loop: asyncio.AbstractEventLoop | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.send_listeners_home()
        super().handle_exit(sig, frame)

    def send_listeners_home(self) -> None:
        if self.started and self.loop is not None:
            self.loop.call_soon_threadsafe(self.app.state.streams.close)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, help="a listening socket, inherited; default: listen where the settings say")
    arguments = parser.parse_args()
    settings = Settings()
    log.begin(settings)
    services = Services(settings, storage_patience=STORAGE_PATIENCE)
    app = create_app(services)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    try:
        Server(app, config).run([socket.socket(fileno=arguments.fd)] if arguments.fd is not None else None)
    finally:
        services.close()


if __name__ == "__main__":
    main()
