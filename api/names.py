"""What people call their projects, keys and endpoints: one line of any letters, some of which can be seen."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_CONTROL = r"\x00-\x1f\x7f-\x9f"
Name = Annotated[
    str,
    Field(min_length=1, max_length=255, pattern=rf"^[^{_CONTROL}]*[^{_CONTROL}\s][^{_CONTROL}]*$"),
]
