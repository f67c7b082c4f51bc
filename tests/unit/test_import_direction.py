"""Dagster objects and CLI -> services -> domain; adapters implement the ports."""

import ast
import sys
from pathlib import Path

import pytest

import budget_recovery_dagster

PACKAGE = "budget_recovery_dagster"
ROOT = Path(budget_recovery_dagster.__file__).parent

# Each room may import itself and these; a module at the top is its own room.
MAY_IMPORT = {
    "__init__": set(),
    "domain": {"errors"},
    "errors": set(),
    "ports": {"domain"},
    "table_ports": {"domain"},
    "recovery_ports": {"domain", "ports"},
    "restore_ports": {"domain"},
    "audit_ports": {"domain"},
    "examination_ports": {"domain", "errors"},
    "preview_ports": {"domain"},
    "reset_ports": {"domain"},
    "snapshot_ports": {"domain"},
    "settings": {"domain", "errors"},
    "services": {
        "audit_ports",
        "domain",
        "errors",
        "examination_ports",
        "ports",
        "preview_ports",
        "recovery_ports",
        "reset_ports",
        "restore_ports",
        "snapshot_ports",
        "table_ports",
    },
    "adapters": {
        "audit_ports",
        "domain",
        "errors",
        "examination_ports",
        "ports",
        "preview_ports",
        "recovery_ports",
        "reset_ports",
        "restore_ports",
        "snapshot_ports",
        "table_ports",
    },
    "bootstrap": {
        "audit_ports",
        "adapters",
        "ports",
        "preview_ports",
        "recovery_ports",
        "reset_ports",
        "restore_ports",
        "services",
        "settings",
        "snapshot_ports",
        "table_ports",
    },
    "doctor_bootstrap": {"adapters", "errors", "services", "settings"},
    "resources": {"bootstrap", "settings"},
    "failures": {"errors"},
    "partitions": {"settings"},
    "assets": {
        "audit_ports",
        "bootstrap",
        "domain",
        "errors",
        "failures",
        "partitions",
        "ports",
        "resources",
        "restore_ports",
        "services",
        "settings",
        "snapshot_ports",
    },
    "jobs": {"assets", "ops"},
    "ops": {
        "assets",
        "bootstrap",
        "domain",
        "errors",
        "failures",
        "recovery_ports",
        "resources",
        "services",
    },
    "schedules": {"domain", "jobs", "resources"},
    "sensors": {
        "assets",
        "bootstrap",
        "domain",
        "errors",
        "jobs",
        "resources",
        "services",
        "settings",
    },
    "definitions": {"assets", "jobs", "resources", "schedules", "sensors"},
    "sandbox": {"adapters", "domain", "errors", "settings"},
    "cli": {
        "audit_ports",
        "adapters",
        "bootstrap",
        "doctor_bootstrap",
        "domain",
        "errors",
        "recovery_ports",
        "restore_ports",
        "sandbox",
        "services",
        "settings",
        "snapshot_ports",
    },
}

MODULES = sorted(ROOT.rglob("*.py"))


def room(module: Path) -> str:
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


def ids(module: Path) -> str:
    return str(module.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES, ids=ids)
def test_imports_go_one_way(module: Path) -> None:
    ours = {name.split(".")[1] for name in imports(module) if name.startswith(PACKAGE + ".")}
    assert ours <= MAY_IMPORT[room(module)] | {room(module)}


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in ("domain", "errors")], ids=ids)
def test_domain_and_errors_use_the_standard_library_and_no_clock_io_or_log(module: Path) -> None:
    outside = {name.split(".")[0] for name in imports(module)} - {PACKAGE}
    assert outside <= sys.stdlib_module_names
    assert not outside & {"asyncio", "io", "logging", "os", "pathlib", "socket", "time"}
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & {"now", "utcnow", "today"}


@pytest.mark.parametrize("room_name", ["services", "domain", "ports", "table_ports", "errors"])
def test_the_core_knows_no_driver(room_name: str) -> None:
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
        if room(module) == room_name:
            assert not {name.split(".")[0] for name in imports(module)} & drivers
