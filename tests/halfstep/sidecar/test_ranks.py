"""Further ranks of a training on one machine, as a launcher starts them."""

import json
import os
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.session import ranks
from halfstep.sidecar.process import LOCK
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.spool import SpoolReader
from tests import warm
from tests.marks import extended
from tests.site import SECONDS, until
from tests.spool_made import events_of

pytestmark = pytest.mark.slow

#: Starts two ranks of a script and ends the other one if one fails, as torchrun does.
LAUNCHER = """
import os, subprocess, sys
env = os.environ | {"WORLD_SIZE": "2"}
ranks = [
    subprocess.Popen([sys.executable, "train.py"], env={**env, "RANK": rank})
    for rank in "01"
]
codes = [ranks[1].wait()]
if codes[0]:
    ranks[0].terminate()
sys.exit(max(abs(code) for code in [ranks[0].wait(), *codes]))
"""
#: The same with a launcher of its own per machine, which share the folder of runs.
MACHINES = """
import os, subprocess, sys
env = os.environ | {
    "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
    "MASTER_ADDR": "first", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "it",
}
rank = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'train.py']).returncode)"
launchers = [
    subprocess.Popen([sys.executable, "-c", rank], env={**env, "RANK": each, "GROUP_RANK": each})
    for each in "01"
]
sys.exit(max(abs(each.wait()) for each in launchers))
"""
SCRIPT = """
import os, sys, time
import halfstep
watch = halfstep.watch(name="it"OPTIONS)
rank = int(os.environ["RANK"])
def seen(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
open(f"begun-{rank}", "w").close()
seen(f"begun-{1 - rank}")
"""


def launch(
    folder: Path, script: str, options: str = "", launcher: str = LAUNCHER
) -> "subprocess.CompletedProcess[str]":
    """Train on two ranks, and wait until the run's sidecar has ended."""
    (folder / "train.py").write_text(SCRIPT.replace("OPTIONS", options) + script)
    environment = {**os.environ, "HALFSTEP_CONSOLE": "yes", "HALFSTEP_SYSTEM": "yes"}
    done = subprocess.run(
        [sys.executable, "-c", launcher],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    until(lambda: not FolderLock(folder / "halfstep-runs" / "it" / LOCK).is_held())
    return done


def read_recorded(folder: Path, kind: str) -> list[dict[str, Any]]:
    items = SpoolReader(folder / "halfstep-runs" / "it" / "sidecar").poll()
    return [each for each in events_of(items) if each["event"] == kind]


def outcome(folder: Path) -> dict[str, Any]:
    text = (folder / "halfstep-runs" / "it" / "outcome-1.json").read_text()
    content: dict[str, Any] = json.loads(text)
    return content


@pytest.mark.parametrize("is_of_machines", [True, *extended([False])])
def test_each_ranks_output_and_memory_are_recorded(tmp_path: Path, is_of_machines: bool) -> None:
    """Output of a further rank has the rank's number, is in the same run, and reaches its
    destination.
    """
    script = "print('hello of', rank, flush=True)\ntime.sleep(0.5)"
    done = launch(tmp_path, script, launcher=MACHINES if is_of_machines else LAUNCHER)
    assert done.returncode == 0, done.stderr
    texts = [line["text"] for line in read_recorded(tmp_path, "line")]
    assert "hello of 0" in texts
    assert "[rank 1] hello of 1" in texts
    assert {"hello of 0", "hello of 1"} <= set(done.stdout.splitlines())
    samples = read_recorded(tmp_path, "sample")
    assert {sample["device"] for sample in samples} >= {-1, -2}
    [memory] = {bool(s["process_memory_bytes"]) for s in samples if s["device"] == -2}
    assert memory
    runs = [path.name for path in (tmp_path / "halfstep-runs").iterdir()]
    assert runs == ["it"]  # neither another run, nor the file by which the ranks met
    assert outcome(tmp_path)["status"] == "finished"


def test_the_rank_that_raised_is_named(tmp_path: Path) -> None:
    """The cause is the exception of the rank that raised, not the signal that ended another."""
    done = launch(
        tmp_path,
        "if rank == 1:\n    raise ValueError('a bad batch')\ntime.sleep(600)",
    )
    assert done.returncode != 0
    assert "ValueError: a bad batch" in done.stderr
    ended = outcome(tmp_path)
    assert ended["status"] == "failed"
    assert "Rank 1 raised first:\nTraceback" in ended["error"]
    assert ended["error"].strip().endswith("ValueError: a bad batch")
    texts = [line["text"] for line in read_recorded(tmp_path, "line")]
    assert "[rank 1] ValueError: a bad batch" in texts


def test_no_file_of_a_further_rank_contains_the_token(tmp_path: Path) -> None:
    """Output and exception of a further rank never contain the token, which is in no environment
    variable.
    """
    token = "hs_0123456789abcdef"
    done = launch(
        tmp_path,
        f"if rank == 1:\n    print('it is {token}', flush=True)\n"
        f"    raise ValueError('a bad token: {token}')\ntime.sleep(600)",
        options=f", url='http://127.0.0.1:9', token={token!r}",
    )
    assert token in done.stderr
    assert "Rank 1 raised first:" in outcome(tmp_path)["error"]
    texts = [line["text"] for line in read_recorded(tmp_path, "line")]
    assert "[rank 1] it is ***" in texts
    files = [path for path in (tmp_path / "halfstep-runs").rglob("*") if path.is_file()]
    assert [path for path in files if token.encode() in path.read_bytes()] == []


def test_the_manual_lists_all_that_a_runs_folder_has(tmp_path: Path) -> None:
    """The manual lists every file of a training on two ranks that has logged, saved and
    registered files.
    """
    script = """
if rank == 0:
    watch.save_artifact("train.py", name="code")
    watch.checkpoint("train.py")
    watch.log({"note": "a text"}, step=1)
    time.sleep(600)
raise ValueError("a bad batch")
"""
    launch(tmp_path, script)
    entries = {path.name for path in (tmp_path / "halfstep-runs" / "it").iterdir()}
    assert entries > {"artifacts", "blobs", "checkpoints", "ranks", "run.json", "sidecar", "spool"}
    manual = (Path(halfstep.__file__).parents[1] / "docs" / "how-to" / "watch.md").read_text()
    listing = manual.partition("halfstep-runs/baseline/\n")[2].partition("```")[0]
    patterns = [line.split()[0].partition("/")[0].rstrip(",") for line in listing.splitlines()]
    patterns.append("*.owner")
    assert [name for name in entries if not any(fnmatch(name, each) for each in patterns)] == []


@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "2", "RANK": "x"}, *extended([{"WORLD_SIZE": "many"}])]
)
def test_variables_that_are_no_numbers_are_ignored(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """Rank variables that are no numbers are ignored, since they may be another program's."""
    done = warm.run(
        [sys.executable, "-c", "import halfstep\nprint(halfstep.watch(name='it').folder)"],
        SECONDS,
        cwd=tmp_path,
        env={**os.environ, **variables},
    )
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'halfstep-runs' / 'it'}\n")


def test_a_rank_without_a_first_one_trains_on(tmp_path: Path) -> None:
    """A further rank without a first one trains on without recording or waiting."""
    (tmp_path / "train.py").write_text(
        "import halfstep\nwatch = halfstep.watch()\nprint('alone', watch.folder)"
    )
    done = warm.run(
        [sys.executable, "train.py"],
        SECONDS,
        cwd=tmp_path,
        env={**os.environ, "HALFSTEP_CONSOLE": "yes", "RANK": "3", "WORLD_SIZE": "4"},
    )
    assert (done.returncode, done.stdout) == (0, "alone None\n")
    assert not (tmp_path / "halfstep-runs").exists()


def test_ranks_on_several_machines_take_only_the_file_of_their_own_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks ignore a killed training's old file, and a late end deletes no newer one's."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    first, second = (AttemptFiles(tmp_path / name, 1) for name in ("first", "second"))
    path = ranks.announce(first)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the other machine's may still be 0
    assert ranks.announce(second) == path
    ranks.retract(path, first)
    assert ranks.read_announced(path) == second
    before = time.time() - 10 * 365 * 86400
    os.utime(path, (before, before))
    assert ranks.read_announced(path) is None
    ranks.retract(path, second)
    assert not path.exists()
