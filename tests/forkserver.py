"""Processes of test functions, forked from one with loaded modules."""

import multiprocessing

import pytest

#: Mark of tests that take processes, so that one server is started for all of them.
IN_ONE_PROCESS = pytest.mark.xdist_group("forkserver")
FORKSERVER = multiprocessing.get_context("forkserver")
# A pytest process has one server: what it preloads is that of all tests.
FORKSERVER.set_forkserver_preload(
    [
        "torch",
        "halfstep.session.watched_run",
        "tests.halfstep.session.test_idle_writer",
        *(
            f"tests.db.telemetry.test_{rows}_{subject}"
            for rows in ("step", "metric")
            for subject in ("blocks", "conversion")
        ),
    ]
)
