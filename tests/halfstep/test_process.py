"""Identification of processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep import process
from tests.site import until


def test_a_process_lives_until_it_has_died() -> None:
    """A process is alive until it dies, even before its exit code is read; a reused PID does not
    count.
    """
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = process.read_start_ticks(child.pid)
    assert process.lives(child.pid, since)
    assert not process.lives(os.getpid(), since)
    child.kill()
    until(lambda: not process.lives(child.pid, since))
    child.communicate()
    assert process.read_start_ticks(child.pid) is None
    assert not process.lives(child.pid, None)


@pytest.mark.parametrize(
    ("first_line", "problem"),
    [
        (b"#!/bin/sh\r\n", "carriage return; convert the file to Unix line ends"),
        (b"#!/usr/bin/env python3\r\n", "carriage return"),
        (b"#!/no/such/python -u\n", "there is no /no/such/python, which its first line names"),
        (b"#!/bin/sh\n", None),
        (b"#! /bin/sh -e\n", None),
        (b"echo\r\n", None),
        (b"\x7fELF", None),
        (b"", None),
    ],
)
def test_the_first_line_of_a_script_names_its_interpreter(
    tmp_path: Path, first_line: bytes, problem: str | None
) -> None:
    """A script with a missing interpreter is reported by it; Linux would report a missing file."""
    (tmp_path / "train.sh").write_bytes(first_line + b"true\n")
    found = process.script_problem("./train.sh", tmp_path)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)
    assert process.script_problem("no-such-file", tmp_path) is None
