"""Modules that the warm process loads, and its reasons to refuse."""

import json
import os
import subprocess
import sys
import threading

import pytest

from trainer import warm_process
from worker.warm_start import READ_LATE

#: Read by imports, without an effect on a run that has another value: paths of caches of
#: torch.compile, which starts as a program, and the default of tempfile, which is reset.
HARMLESS = {"HOME", "LOGNAME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "USER"}
#: Prints the variables that the imports read by name, and what they started.
READ = """
import json, os, sys, threading
names = set()
kind = type(os.environ)
read = kind.__getitem__
def noted(self, name):
    if sys._getframe(1).f_code.co_name != "__iter__":
        names.add(name)
    return read(self, name)
kind.__getitem__ = noted
from trainer import warm_process
warm_process.load_probe()
warm_process.load_training()
modules = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([sorted(names), sorted(modules), warm_process.obstacle()]))
"""


@pytest.mark.extended
def test_imports_read_no_variable_that_a_run_sets() -> None:
    """No preloaded module reads a variable of READ_LATE at import, also in newer versions."""
    own = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ]
    printed = subprocess.run(
        command, env=own, check=True, capture_output=True, text=True, timeout=240
    ).stdout
    names, modules, obstacle = json.loads(printed.splitlines()[-1])
    assert "TMPDIR" in names  # reads are noted
    assert set(names) & READ_LATE <= HARMLESS
    assert not [name for name in names if name.startswith("HALFSTEP_")]
    assert not {"app", "db", "worker", "sqlalchemy", "matplotlib", "numba"} & set(modules)
    assert obstacle == ""


def test_a_process_with_threads_or_cuda_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with threads, which a fork would lack, or with CUDA is not forked."""
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    try:
        assert "threads run after the imports" in warm_process.obstacle()
    finally:
        ending.set()
        thread.join()
