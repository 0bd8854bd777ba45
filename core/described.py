"""Models whose fields are described, in JSON schemas, by the text beneath each; it is read when a schema is asked for.

Pydantic's `use_attribute_docstrings` says the same, but reads the source of each class as it is made: a twelfth of the
time that the API takes to start.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Described(BaseModel):
    """What has a description of its own keeps it."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, field in cls.model_fields.items():
            said = properties.get(field.alias or name)
            if said is not None and "description" not in said and (text := _beneath(cls, name)) is not None:
                said["description"] = text
        return schema


def _beneath(model: type[BaseModel], name: str) -> str | None:
    """The text under a field, where the class stands that says what the field is."""
    owner = next(each for each in model.__mro__ if name in inspect.get_annotations(each))
    return _texts(owner.__module__).get(owner.__qualname__, {}).get(name)


@cache
def _texts(module: str) -> Mapping[str, Mapping[str, str]]:
    """By class at the top of a module, the text under each of its fields."""
    return {
        node.name: {
            field.target.id: inspect.cleandoc(under.value.value)
            for field, under in pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            and isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
            and isinstance(under.value.value, str)
        }
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }  # fmt: skip
