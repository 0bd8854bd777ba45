"""Fields are described as pydantic itself would, had it read each class when it was made."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from core.described import Described


class Part(Described):
    size: int = 1
    """How large
    it is."""


class Whole(Part):
    """A whole."""

    part: Part
    """What it has."""
    parts: list[Part] = Field([], alias="pieces")
    """By another name."""
    own: int = Field(1, description="Of its own.")
    """Not told."""
    bare: int = 1
    size: int = 2


class TheirPart(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, title="Part")

    size: int = 1
    """How large
    it is."""


class TheirWhole(TheirPart):
    """A whole."""

    model_config = ConfigDict(title="Whole")

    part: TheirPart
    """What it has."""
    parts: list[TheirPart] = Field([], alias="pieces")
    """By another name."""
    own: int = Field(1, description="Of its own.")
    """Not told."""
    bare: int = 1
    size: int = 2


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize(("ours", "theirs"), [(Part, TheirPart), (Whole, TheirWhole)])
def test_the_text_beneath_a_field_describes_it_as_pydantic_says(
    ours: type[BaseModel], theirs: type[BaseModel], mode: Any
) -> None:
    said = str(ours.model_json_schema(mode=mode))
    assert said == str(theirs.model_json_schema(mode=mode)).replace("TheirPart", "Part")
    assert "How large\\nit is." in said
