"""A JobSpec as people write it, YAML or JSON in a file, judged before anything is sent; errors name their line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from api.cli.outcomes import Exit, fail
from api.client import Json

STDIN = Path("-")


class SpecLoader(yaml.SafeLoader):
    """YAML as its version 1.2 reads numbers: `3e-4` is one. PyYAML follows 1.1, which wants `3.0e-4`."""


SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+"),
    list("-+.0123456789"),
)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a field of a spec."""

    param: str | None
    """Path of the field, such as `training.lr`; None blames all of it."""
    message: str


@dataclass(frozen=True)
class Spec:
    """What a file asks for, and where in it each field stands."""

    file: Path
    asked: Json
    root: yaml.Node | None
    """The file's text as nodes with marks; None where only JSON's own reader could follow it."""

    @property
    def folder(self) -> Path:
        """What paths in the spec are relative to."""
        return Path() if self.file == STDIN else self.file.parent

    def place(self, param: str | None) -> str:
        """Where the field stands, as compilers say it; of one that is missing, where it would."""
        if self.root is None:
            return _name(self.file)
        node, mark = self.root, self.root.start_mark
        for part in (param or "").split("."):
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == part), None)
                if found is None:
                    break
                mark, node = found[0].start_mark, found[1]
            elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
                node = node.value[int(part)]
                mark = node.start_mark
            else:
                break
        return f"{_name(self.file)}:{mark.line + 1}:{mark.column + 1}"

    def refuse(self, problems: Sequence[Problem], code: Exit = Exit.USAGE) -> None:
        """End the command where there are any."""
        if not problems:
            return
        lines = [
            f"{self.place(problem.param)}: " + (f"{problem.param}: " if problem.param else "") + problem.message
            for problem in problems
        ]
        findings = [
            {"place": self.place(problem.param), "param": problem.param, "message": problem.message}
            for problem in problems
        ]
        fail("\n".join(lines), code, {"code": "invalid_spec", "param": problems[0].param, "errors": findings})


def read_spec(file: Path) -> Spec:
    """Read YAML (which JSON from a pipe is, too) or JSON. What it says is `judge`'s to look at."""
    try:
        text = sys.stdin.read() if file == STDIN else file.read_text(encoding="utf-8")
        asked, root = _json(text) if file.suffix == ".json" else _yaml(text)
    except json.JSONDecodeError as error:
        fail(f"{_name(file)}:{error.lineno}:{error.colno}: this is no JSON: {error.msg}", Exit.USAGE)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        fail(f"{_name(file)}{place}: this is no YAML: {error.problem or error.context}", Exit.USAGE)
    except FileNotFoundError:
        fail(f"{file} does not exist.", Exit.USAGE)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        fail(f"{_name(file)} can't be read: {error}", Exit.USAGE)
    if not isinstance(asked, dict):
        fail(f"{_name(file)} must hold one mapping: a JobSpec.", Exit.USAGE)
    spec = Spec(file, asked, root)
    spec.refuse([Problem(path, "this stands here twice") for path in _doubles(root)])
    return spec


def _json(text: str) -> tuple[object, yaml.Node | None]:
    asked = json.loads(text)
    try:
        # JSON is YAML but for tabs between tokens; inside of strings it has none.
        root = yaml.compose(text.replace("\t", " "), SpecLoader)
    except yaml.YAMLError:
        root = None
    return asked, root


def _yaml(text: str) -> tuple[object, yaml.Node | None]:
    return yaml.load(text, SpecLoader), yaml.compose(text, SpecLoader)


def _name(file: Path) -> str:
    return "<standard input>" if file == STDIN else str(file)


def _doubles(node: yaml.Node | None, path: str = "", looked_at: set[int] | None = None) -> Iterator[str]:
    """Paths of keys that stand twice in a mapping, of which a reader would take but the last."""
    # Once each: an anchor may stand within itself, and a few that hold one another stand for very many.
    looked_at = set() if looked_at is None else looked_at
    if node is None or id(node) in looked_at:
        return
    looked_at.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield from _doubles(inner, f"{path}{index}.", looked_at)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen and name != "<<":
                yield f"{path}{name}"
            seen.add(name)
            yield from _doubles(value, f"{path}{name}.", looked_at)


def judge(asked: Json) -> list[Problem]:
    """What is wrong with it as a JobSpec, in the server's words. Files it names are the server's to look at."""
    # Here and not above: what only talks to a server need not load what a server is made of.
    from pydantic import ValidationError

    from api.errors import validation_detail
    from core.spec import JobSpec

    try:
        JobSpec.model_validate(asked)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        detail = validation_detail(found, asked)
        findings = detail.errors or [{"param": detail.param, "message": _bare(detail.message, detail.param)}]
        return list(dict.fromkeys(Problem(each["param"], each["message"]) for each in _nearest(findings)))
    return []


def _bare(message: str, param: str | None) -> str:
    return message.removeprefix(f"{param}: ")


def _nearest(findings: Sequence[Json]) -> Iterator[Json]:
    """Those nearest the mistake: of a field that may be one of several things, each that it isn't is told, too."""
    params = [each["param"] or "" for each in findings]
    for each, param in zip(findings, params, strict=True):
        if not any(other.startswith(f"{param}.") for other in params):
            yield each
