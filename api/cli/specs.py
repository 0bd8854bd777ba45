"""A JobSpec as people write it: YAML or JSON in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from api.cli.outcomes import Exit, fail
from api.client import Json


class SpecLoader(yaml.SafeLoader):
    """YAML as its version 1.2 reads numbers: `3e-4` is one. PyYAML follows 1.1, which wants `3.0e-4`."""


SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+"),
    list("-+.0123456789"),
)


def read_spec(file: Path) -> Json:
    try:
        spec = (
            yaml.load(file.read_text(), SpecLoader)
            if file.suffix in {".yaml", ".yml"}
            else json.loads(file.read_text())
        )
    except (yaml.YAMLError, ValueError) as error:
        fail(f"{file} can't be read: {error}", Exit.USAGE)
    if not isinstance(spec, dict):
        fail(f"{file} must hold one mapping: a JobSpec.", Exit.USAGE)
    found: Json = spec
    return found
