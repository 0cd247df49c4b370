"""Numbers logged by child processes reach their parent's run."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep
from halfstep.session.stderr import MOST_OF_A_KIND
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.relay import RelayReader, RelayWriter
from tests import preloaded
from tests.halfstep.watching.watch_made import Written
from tests.marks import extended

pytestmark = pytest.mark.slow

WORKERS, ITEMS = 2, 12
SCRIPT = """
import os, sys
import numpy, torch, halfstep
FOLDER, HOW, METHOD = sys.argv[1:]

class Items(torch.utils.data.Dataset):
    def __init__(self, run=None):
        self.run = run
    def __len__(self):
        return 12
    def __getitem__(self, index):
        log = self.run.log if self.run else halfstep.log
        log({"index": index, "half": torch.tensor([index / 2]), "other": numpy.float32(index)})
        log({"text": "a text", f"named.{index}": 1}, step=index)
        return index

def main():
    if HOW == "init":
        run = halfstep.init(dir=FOLDER, name="it")
    else:
        run = halfstep.watch(folder=FOLDER + "/halfstep-runs", name="it")
    run.log({"before": 1}, step=7)
    items = Items(run if HOW == "object" else None)
    loader = torch.utils.data.DataLoader(items, num_workers=2, multiprocessing_context=METHOD)
    for epoch in range(2):
        for _ in loader:
            pass
    run.log({"after": 1}, step=8)
    run.finish()

if __name__ == "__main__":
    main()
"""


def _fresh(args: list[str], env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(args, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("method", "how"),
    [
        *itertools.product(["fork"], ["object", "module", "init"]),
        *extended(itertools.product(["spawn"], ["object", "module", "init"])),
    ],
)
def test_values_logged_by_data_workers_are_in_the_run(
    tmp_path: Path, how: str, method: str
) -> None:
    """Values that data workers log by the object or the module are recorded; a text is refused
    in one line.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    start = preloaded.run if method == "fork" else _fresh
    done = start(
        [sys.executable, str(script), str(tmp_path), how, method],
        env={**os.environ, "PYTHONPATH": str(Path(halfstep.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    [_, line] = done.stderr.splitlines()
    assert line.startswith("halfstep: text is not logged: from a child process only numbers")
    folder = tmp_path / "halfstep-runs" / "it"
    logged: dict[str, list[tuple[int, float]]] = {}
    for event in Written(folder).of("metric"):
        logged.setdefault(event["name"], []).append((event["step"], event["value"]))
    every = sorted([*range(ITEMS), *range(ITEMS)])
    assert sorted(value for _, value in logged["index"]) == every
    assert sorted(value for _, value in logged["half"]) == [index / 2 for index in every]
    assert sorted(value for _, value in logged["other"]) == every
    steps = [step for step, _ in logged["index"]]
    if how == "init":  # each call is a step, as in one process
        assert len({*steps}) == 2 * ITEMS
        assert min(steps) >= 7
    else:
        assert {*steps} <= {7, 8}
    for index in range(ITEMS):
        assert logged[f"named.{index}"] == [(index, 1.0)] * 2
    assert not list(folder.glob("relay-*"))


@pytest.fixture
def files(tmp_path: Path) -> AttemptFiles:
    (tmp_path / "it").mkdir()
    return AttemptFiles(tmp_path / "it", 1)


def test_a_line_that_is_being_written_waits(files: AttemptFiles) -> None:
    """An incomplete relayed line waits, and a damaged one costs no other."""
    writer, reader = RelayWriter(files), RelayReader(files)
    writer.log({"a": 1}, None)
    [path] = (files.folder / "relay-1").glob("*.jsonl")
    with path.open("a") as file:
        file.write('[{"b": 2.0}')
    assert list(reader.receive()) == [({"a": 1.0}, None)]
    with path.open("a") as file:
        file.write(', 3]\ndamaged\n[1, 2]\n[{"d": "x"}, 1]\n[{"e": [1]}, 1]\n[]\n5\n')
    writer.log({"c": float("nan")}, 4)
    [b, c] = reader.receive()
    assert b == ({"b": 2.0}, 3)
    assert (str(c.numbers), c.step) == ("{'c': nan}", 4)


def test_after_the_end_of_the_run_nothing_is_relayed(
    files: AttemptFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `finish` values of child processes are ignored, and no folder is created."""
    files.outcome.write_text(json.dumps({"status": "finished"}))
    RelayWriter(files).log({"a": 1, "b": "text"}, None)
    assert not (files.folder / "relay-1").exists()
    assert capsys.readouterr().err == ""


def test_values_that_a_child_cannot_relay_are_reported_once(
    files: AttemptFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the first child process that cannot relay a value reports it."""
    for writer in (RelayWriter(files), RelayWriter(files)):
        writer.log("text", None)
        writer.log({"number": 10**400}, None)
        writer.log({"number": 1}, "two")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "it received 'text'" in said[0]
    assert "number is not logged: OverflowError" in said[1]
    assert "values of a child process are not logged: its step is 'two'" in said[2]
    for number in range(2 * MOST_OF_A_KIND):
        RelayWriter(files).log({f"text {number}": "text"}, None)
    assert len(capsys.readouterr().err.splitlines()) == MOST_OF_A_KIND


def test_a_relay_that_cannot_be_written_ends_no_child(
    files: AttemptFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that raises on every access does not end the child process."""

    class Wrong:
        @property
        def item(self) -> None:
            raise RuntimeError("wrong")

    RelayWriter(files).log({"wrong": Wrong(), "right": 1}, None)
    assert "wrong is not logged: RuntimeError: wrong" in capsys.readouterr().err
    [relayed] = RelayReader(files).receive()
    assert relayed.numbers == {"right": 1.0}
    RelayReader(files).close()
    (files.folder / "relay-1").write_text("a file where a folder would be")
    RelayWriter(files).log({"a": 1, "b": "text"}, None)
    assert list(RelayReader(files).receive()) == []
