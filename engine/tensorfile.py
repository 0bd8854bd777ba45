"""Write a safetensors file one tensor at a time and hash it on the way: nothing is held twice or read again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
"""Names in the format's header."""

SYNC_EVERY = 2**30
"""Bytes after which a file is synced on the way: all of it at once would be one long call, in which nothing goes on."""


def write(path: Path, tensors: Sequence[tuple[str, Tensor]], *, wrote: Callable[[], object] = lambda: None) -> str:
    """Write `tensors` durably under their names, and return the file's sha256. Views of one storage are fine.

    `wrote` is called after each of them.
    """
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    described = json.dumps(header, separators=(",", ":")).encode()
    # The data begins at a multiple of eight, so that a reader can map it.
    described += b" " * (-len(described) % 8)
    digest, unsynced = hashlib.sha256(), 0
    with path.open("wb") as file:
        head = len(described).to_bytes(8, "little") + described
        for part in chain([head], (_bytes_of(tensor) for _, tensor in tensors)):
            digest.update(part)
            file.write(part)
            unsynced += len(part)
            if unsynced >= SYNC_EVERY:
                _sync(file)
                unsynced = 0
            wrote()
        _sync(file)
    return digest.hexdigest()


def _sync(file: BinaryIO) -> None:
    """Make what is written durable."""
    file.flush()
    os.fsync(file.fileno())


def _bytes_of(tensor: Tensor) -> Any:
    """The tensor's content as a buffer, without a copy where it is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
