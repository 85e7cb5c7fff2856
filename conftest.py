"""Tests and doctests of an extra are skipped where its packages are not installed.

Only what the table names may be skipped: a core module that begins to need an extra fails. With CPSGD_REQUIRE_EXTRAS=1,
as `make test` sets it, a missing package is an error and nothing is skipped for want of it.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

# Several workers run tests at once. Were each to start as many threads as there are processors, tests of a second would
# take thirty: the threads wait for each other, and are not all running.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

ROOT = Path(__file__).parent

# What may need which package: folders and files below src/cpsgd and tests, and pages below the root.
MAY_NEED = {
    "apache_beam": ("engines/beam.py", "engines/test_beam.py", "docs"),
    "griffe": ("docs",),
    "flwr": ("engines/flower", "docs"),
    "httpx": (
        "benchmarks/test_pair_benchmark.py",
        "cli/test_dashboard_command.py",
        "cli/test_pair_commands.py",
        "dashboard",
        "engines/pair",
        "examples",
        "docs",
    ),
    "jinja2": ("cli/test_train_command.py", "cli/test_dashboard_command.py", "cli/test_train_own.py", "dashboard"),
    "matplotlib": ("docs", "reports", "reproduction"),
    "mkdocs": ("docs",),
    "nbformat": ("docs",),
    "nvflare": ("engines/nvflare", "docs"),
    "pandas": ("learning/datasets/test_from_tables.py", "statistics"),
    "polars": ("learning/datasets/test_from_tables.py", "statistics"),
    "pyarrow": ("docs", "cli/test_statistics_commands.py", "learning/datasets/test_from_tables.py", "statistics"),
    "pyspark": ("engines/spark.py", "engines/test_spark.py", "docs"),
    "sklearn": (
        "cli/test_train_command.py",
        "compatibility",
        "engines",
        "learning",
        "reproduction",
        "statistics",
        "docs",
    ),
    "selenium": ("dashboard",),
    "psycopg": ("engines/pair",),
    "starlette": (
        "benchmarks/test_pair_benchmark.py",
        "cli/test_dashboard_command.py",
        "cli/test_pair_commands.py",
        "dashboard",
        "engines/pair",
        "examples",
        "docs",
    ),
    "torch": (
        *("_torch.py", "cli/test_train_command.py", "compatibility", "engines", "fuzz", "learning", "reproduction"),
        *(
            "simulation/device",
            "simulation/device.py",
            "simulation/device_cuda.py",
            "simulation/device_plain.py",
            "simulation/device_kernels.py",
            "simulation/device_long.py",
            "docs",
        ),
    ),
    "uvicorn": (
        "benchmarks/test_pair_benchmark.py",
        "cli/test_dashboard_command.py",
        "cli/test_pair_commands.py",
        "dashboard",
        "engines/pair",
        "examples",
        "docs",
    ),
}

BASES = (ROOT, ROOT / "src" / "cpsgd", ROOT / "tests")


def pytest_configure(config: pytest.Config) -> None:
    """Stops at once if a package is missing that must be there."""
    if os.environ.get("CPSGD_REQUIRE_EXTRAS") == "1":
        missing = [name for name in MAY_NEED if importlib.util.find_spec(name) is None]
        if missing:
            raise pytest.UsageError(
                f"CPSGD_REQUIRE_EXTRAS=1, but {', '.join(missing)} cannot be imported: pip install -e '.[dev]'."
            )
    # As a plugin, since pytest does not ask a conftest about the folder below it whose own conftest fails.
    config.pluginmanager.register(Extras())


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Looks for examples in the source and on pages alone: what only processes of tests import stays unloaded."""
    found = yield
    tests = file_path.is_relative_to(ROOT / "tests")
    return [each for each in found if not (tests and isinstance(each, DoctestModule))]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that led to it, those that a doctest caught among them."""
    while error is not None:
        yield error
        for failure in (error, *getattr(error, "failures", ())):
            if isinstance(failure, doctest.UnexpectedException):
                yield from causes(failure.exc_info[1])
        error = error.__cause__ or error.__context__


class Extras:
    """Turns failures for want of an extra into skips, where the table allows it."""

    def __init__(self) -> None:
        # A module that failed to import stays half loaded, and whoever imports it next fails with another error.
        self.half_loaded: dict[str, str] = {}

    def missing(self, error: BaseException, path: Path) -> str | None:
        """The package for want of which this file fails, if it may need it."""
        for cause in causes(error):
            package = None
            if isinstance(cause, ModuleNotFoundError) and cause.name:
                package = cause.name.partition(".")[0]
            elif isinstance(cause, ImportError) and cause.path:
                package = self.half_loaded.get(cause.path)
            if package in MAY_NEED and importlib.util.find_spec(package) is None:
                self.half_loaded[str(path)] = package
                places = [base / place for place in MAY_NEED[package] for base in BASES]
                return package if any(path.is_relative_to(place) for place in places) else None
        return None

    def skip(self, report: pytest.CollectReport | pytest.TestReport, error: BaseException, path: Path) -> None:
        """Turns one report, if a package is missing that the file may need."""
        package = self.missing(error, path)
        if package:
            report.outcome = "skipped"
            report.longrepr = (str(path), 0, f"Skipped: needs {package}")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A module, or the conftest of a folder, that cannot be imported."""
        report = yield
        call: pytest.CallInfo[object] | None = getattr(report, "call", None)
        if report.failed and call and call.excinfo and isinstance(collector, pytest.File | pytest.Directory):
            self.skip(report, call.excinfo.value, collector.path)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A test or an example that imports the package itself."""
        report = yield
        if report.failed and call.excinfo:
            self.skip(report, call.excinfo.value, item.path)
        return report
