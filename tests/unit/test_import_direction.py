"""Dagster objects and CLI -> presentation -> services -> domain; adapters implement the ports."""

import ast
import sys
from pathlib import Path

import pytest

import budget_recovery_dagster

PACKAGE = "budget_recovery_dagster"
ROOT = Path(budget_recovery_dagster.__file__).parent

DAGSTER = {
    "domain",
    "errors",
    "ports",
    "presentation",
    "resources",
    "restore_runs",
    "services",
    "settings",
    "silent_runs",
    "wiring",
}

# Each layer may import itself and these. A top-level module is its own layer.
MAY_IMPORT = {
    "__init__": set(),
    "errors": set(),
    "domain": {"errors"},
    "settings": {"domain", "errors"},
    "ports": {"domain"},
    "stopwatch": set(),
    "adapters": {"domain", "errors", "ports", "stopwatch"},
    "services": {"domain", "errors", "ports", "stopwatch"},
    "presentation": {"domain", "errors", "services"},
    "wiring": {"adapters", "ports", "settings"},
    "doctor": {"adapters", "domain", "errors", "settings"},
    "restore_runs": {"domain"},
    "silent_runs": {"domain", "ports", "restore_runs"},
    "resources": {"errors", "ports", "services", "settings", "wiring"},
    "assets": DAGSTER,
    "jobs": DAGSTER | {"assets"},
    "sensors": DAGSTER | {"assets", "jobs"},
    "definitions": {"assets", "jobs", "resources", "sensors", "settings"},
    "embedded": {"errors"},
    "sandbox": {
        "adapters",
        "domain",
        "embedded",
        "errors",
        "ports",
        "presentation",
        "services",
        "settings",
        "wiring",
    },
    "cli": {
        "doctor",
        "domain",
        "embedded",
        "errors",
        "ports",
        "presentation",
        "sandbox",
        "services",
        "settings",
        "wiring",
    },
}

MODULES = sorted(ROOT.rglob("*.py"))


def layer(module: Path) -> str:
    return module.relative_to(ROOT).with_suffix("").parts[0]


def imports(module: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found.add(node.module or "")
    return found


def ours(module: Path) -> set[str]:
    """Return the layers that a module imports."""
    return {name.split(".")[1] for name in imports(module) if name.startswith(PACKAGE + ".")}


def ids(module: Path) -> str:
    return str(module.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES, ids=ids)
def test_imports_follow_the_layers(module: Path) -> None:
    assert ours(module) <= MAY_IMPORT[layer(module)] | {layer(module)}


# The exceptions of decision 1.
@pytest.mark.parametrize(
    ("imported", "importers"),
    [
        ("adapters", {"doctor", "sandbox", "wiring"}),
        ("doctor", {"cli"}),
        ("embedded", {"cli", "sandbox"}),
        ("sandbox", {"cli"}),
    ],
)
def test_few_layers_import_the_parts_outside_the_order(imported: str, importers: set[str]) -> None:
    assert {layer(module) for module in MODULES if imported in ours(module)} - {
        imported
    } == importers


@pytest.mark.parametrize(
    "module", [m for m in MODULES if layer(m) in ("domain", "errors")], ids=ids
)
def test_domain_and_errors_use_only_the_standard_library_without_clock_io_and_logging(
    module: Path,
) -> None:
    outside = {name.split(".")[0] for name in imports(module)} - {PACKAGE}
    assert outside <= sys.stdlib_module_names
    assert not outside & {"asyncio", "io", "logging", "os", "pathlib", "socket", "time"}
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & {"now", "utcnow", "today"}


@pytest.mark.parametrize("layer_name", ["services", "domain", "ports", "errors"])
def test_the_core_imports_no_driver(layer_name: str) -> None:
    drivers = {
        "nats",
        "psycopg",
        "psycopg_pool",
        "dagster",
        "alembic",
        "sqlalchemy",
        "click",
        "pyarrow",
    }
    for module in MODULES:
        if layer(module) == layer_name:
            assert not {name.split(".")[0] for name in imports(module)} & drivers
