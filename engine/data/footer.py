"""What a Parquet file says of its size, before any of it is unpacked: a kilobyte may hold a billion equal ids."""

from __future__ import annotations

from typing import BinaryIO

from engine.data.format import PARQUET, Finding, InvalidData


def check_size(file: BinaryIO, *, most_ids: int | None) -> None:
    """Raises InvalidData for more than `most_ids` entries in any one column; what can't be read, others tell."""
    file.seek(0)
    if most_ids is None or file.read(len(PARQUET)) != PARQUET:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.seek(0)
    try:
        said = pq.ParquetFile(file, pre_buffer=False).metadata
    except (pa.ArrowException, OSError):
        return
    groups = [said.row_group(number) for number in range(said.num_row_groups)]
    entries = max(
        (sum(group.column(column).num_values for group in groups) for column in range(said.num_columns)), default=0
    )
    if entries > most_ids:
        raise InvalidData(
            [
                Finding(
                    0, f"the Parquet file has a column of {entries:,} ids, and at most {most_ids:,} are taken; split it"
                )
            ]
        )
