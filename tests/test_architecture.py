"""Who may import whom, as data and a little `ast`; what docs/architecture.md draws is what the code does."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("api", "core", "engine", "migrations", "workers")
CONTRACT = (
    "engine.config", "engine.counting", "engine.events", "engine.families", "engine.naming", "engine.inventory",
    "engine.data.format", "engine.plan",
)  # fmt: skip
"""What the service and the engine share. A prefix stands for everything beneath it."""


@dataclass(frozen=True)
class Rule:
    """What the modules beneath `prefix` may import. The longest prefix that fits a module rules it."""

    prefix: str
    ours: tuple[str, ...]
    """Prefixes of our own modules."""
    others: frozenset[str] | None = None
    """Packages of others, the standard library aside; None: any that is not in `never`."""
    never: frozenset[str] = frozenset()


HEAVY = frozenset({"torch", "transformers", "peft", "tokenizers", "safetensors"})
RULES = (
    *(Rule(name, CONTRACT, frozenset({"pydantic"})) for name in CONTRACT),
    Rule(
        "engine",
        ("engine",),
        frozenset({"torch", "numpy", "safetensors", "pydantic", "tokenizers", "jinja2", "pyarrow", "gguf"}),
    ),
    Rule("core", ("core", *CONTRACT), never=HEAVY | {"fastapi", "starlette"}),
    Rule("workers", ("workers", "core", *CONTRACT), never=HEAVY | {"fastapi", "starlette"}),
    Rule("api", ("api", "core", *CONTRACT), never=HEAVY),
    Rule("api.client", (), frozenset({"httpx"})),
    Rule("migrations", ("core.models", "core.settings"), frozenset({"alembic", "sqlalchemy"})),
)
TOP_LEVEL = {
    *PACKAGES, "docker", "docker-compose.yml", "tests", "docs", "benchmarks", "examples", ".ci",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt",
    ".gitignore", ".dockerignore", ".env.example",
}  # fmt: skip
READS_THE_ENVIRONMENT = {"core/settings.py", "engine/standing.py"}
"""Settings are read in the first; which rank a process of the engine is, in the second."""
WRITES_A_JOBS_STATE = {"core/jobs.py"}


def sources() -> Iterator[tuple[str, str, ast.Module]]:
    """Each module of ours: its path, its name, and what it says."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT)
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            yield relative.as_posix(), name, ast.parse(path.read_text(), filename=str(path))


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def imports(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full name of each module that `tree` imports, also in functions and for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # `from engine import config` imports engine.config; `from engine.config import RunConfig` goes no deeper.
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                yield node.lineno, deeper if origin.split(".")[0] in PACKAGES and is_module(deeper) else origin


def broken(rule: Rule, imported: str) -> bool:
    top = imported.split(".")[0]
    if top in PACKAGES:
        return not any(within(imported, prefix) for prefix in rule.ours)
    if top in sys.stdlib_module_names:
        return False
    return top in rule.never or (rule.others is not None and top not in rule.others)


def test_modules_import_only_what_the_table_allows():
    findings = []
    for path, module, tree in sources():
        rule = max((rule for rule in RULES if within(module, rule.prefix)), key=lambda rule: len(rule.prefix))
        for line, imported in imports(module, tree, is_package=path.endswith("__init__.py")):
            if broken(rule, imported):
                findings.append(f"{path}:{line} imports {imported}, which {rule.prefix} may not")
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    ("module", "imported", "refused"),
    [
        pytest.param("engine.config", "torch", True, id="the contract without torch"),
        pytest.param("engine.plan.memory", "engine.model", True, id="a plan without the model"),
        pytest.param("engine.trainer", "core.jobs", True, id="an engine that knows no service"),
        pytest.param("core.jobs", "engine.events", False, id="core reads events"),
        pytest.param("core.jobs", "engine.trainer", True, id="core does not train"),
        pytest.param("workers.supervisor", "engine.trainer", True, id="the engine is launched"),
        pytest.param("api.routes.jobs", "workers.tasks", True, id="the api asks through core"),
        pytest.param("migrations.env", "core.jobs", True, id="migrations know tables only"),
        pytest.param("api.client", "json", False, id="the standard library"),
        pytest.param("api.client", "core.spec", True, id="a client that needs no service"),
    ],
)
def test_the_table_says_what_we_mean(module: str, imported: str, refused: bool):
    rule = max((rule for rule in RULES if within(module, rule.prefix)), key=lambda rule: len(rule.prefix))
    assert broken(rule, imported) is refused


@pytest.mark.parametrize(
    ("prefixes", "absent"),
    [
        pytest.param(CONTRACT, ("torch", "numpy", "sqlalchemy", "core"), id="contract"),
        pytest.param(("core",), ("torch", "transformers", "fastapi", "workers", "api"), id="core"),
        pytest.param(("api",), ("torch", "transformers", "workers"), id="api"),
        pytest.param(("api.client",), ("pydantic", "fastapi", "sqlalchemy", "core", "engine"), id="what users import"),
        pytest.param(("workers",), ("torch", "transformers", "fastapi", "api"), id="workers"),
        pytest.param(("engine.launch",), ("torch",), id="the parent of the ranks"),
    ],
)
def test_importing_it_loads_no_torch(prefixes: tuple[str, ...], absent: tuple[str, ...]):
    """The table sees names; this sees what others load in turn."""
    modules = [
        module for _, module, _ in sources()
        if any(within(module, prefix) for prefix in prefixes) and not module.endswith("__main__")
    ]  # fmt: skip
    assert modules
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"print(*sorted(set({absent!r}) & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def test_the_environment_is_read_in_one_place():
    findings = []
    for path, _, tree in sources():
        reads = (node for node in ast.walk(tree) if reads_environment(node))
        findings += [f"{path}:{node.lineno}" for node in reads if path not in READS_THE_ENVIRONMENT]
    assert not findings, f"ask core.settings instead: {findings}"


def reads_environment(node: ast.AST) -> bool:
    """A variable is read by name. Handing the whole environment on to a child is not that."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "os.environ" and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {"os.getenv", "os.environ.get"}


def test_one_module_writes_a_jobs_state():
    findings = []
    for path, _, tree in sources():
        writes = (node for node in ast.walk(tree) if writes_state(node))
        findings += [f"{path}:{node.lineno}" for node in writes if path not in WRITES_A_JOBS_STATE]
    assert not findings, f"call core.jobs.move instead: {findings}"


def writes_state(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        changes = isinstance(node.func, ast.Attribute) and node.func.attr == "values"
        return changes and any(keyword.arg == "state" for keyword in node.keywords)
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Attribute) and target.attr == "state" for target in node.targets
    )


def test_every_module_says_what_it_is():
    silent = [path for path, _, tree in sources() if tree.body and ast.get_docstring(tree) is None]
    assert not silent


def test_the_top_level_is_the_one_we_agreed_on():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert top - TOP_LEVEL == set()
