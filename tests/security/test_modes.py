"""Another account of the host reads nothing of ours, though the data directory was there before and is open to all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from api.client import Client
from tests.api.test_serve import serving

SHARED = stat.S_IRWXG | stat.S_IRWXO


@pytest.mark.timeout(200)
def test_what_the_service_writes_is_its_accounts_alone_also_in_a_directory_that_is_open(tmp_path: Path) -> None:
    data_dir, file = tmp_path / "data", tmp_path / "a.txt"
    data_dir.mkdir()
    data_dir.chmod(0o755)
    file.write_text("of one project alone")
    with serving(data_dir, "--port", "0") as service:
        url = service.until(r"Trainshed is at (\S+)")[1]
        key = service.until(r"(?m)^ *(ts_\S+)$")[1]
        service.until("Ready")
        with Client(url, key) as client:
            client.upload(file, purpose="pretrain")
        written = [path for path in data_dir.rglob("*") if not path.is_symlink()]
        assert not [str(path) for path in written if path.stat().st_mode & SHARED]
        assert {"trainshed.db", "api.log", "node.log", "valkey.sock"} <= {path.name for path in written}
        assert b"of one project alone" in [path.read_bytes() for path in written if path.is_file()]
        service.stop()
