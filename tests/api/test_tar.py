"""The streamed archive against Python's own `tarfile`."""

import io
import tarfile

from api import tar


def test_an_archive_reads_back_as_what_went_in_and_has_the_length_it_announced():
    contents = {"model/config.json": b"{}", "empty": b"", "model/" + "deep/" * 40 + "é.bin": b"x" * 1025}
    entries = [
        tar.Entry(path, len(content), 1_700_000_000, lambda content=content: iter([content[:1], content[1:]]))
        for path, content in contents.items()
    ]
    made = b"".join(tar.stream(entries))
    assert len(made) == tar.length(entries)
    with tarfile.open(fileobj=io.BytesIO(made)) as archive:
        assert {member.name: archive.extractfile(member).read() for member in archive} == contents
        assert {member.mtime for member in archive.getmembers()} == {1_700_000_000}
