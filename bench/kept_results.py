# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes each result down when it is there, for runs that may be cut.

Each line of the file that KEPT_RESULTS names is a JSON object: `test`, `outcome` (started, passed,
failed or skipped) and `message`.
"""

from __future__ import annotations

import json
import os

import pytest

_workers: list[bool] = []


def pytest_configure(config: pytest.Config) -> None:
    # Not by an environment variable: whatever a worker starts inherits those.
    _workers.append(hasattr(config, "workerinput"))


def _write(test: str, outcome: str, message: str = "") -> None:
    if not any(_workers):  # a worker's results come to the process that started it
        with open(os.environ["KEPT_RESULTS"], "a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "message": message}) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or ""
        message = str(crash.message if crash else reason).removeprefix("Skipped: ")
        _write(report.nodeid, report.outcome, message)
