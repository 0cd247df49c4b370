"""Runs of notebook cells, in a real IPython shell in its own process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import halfstep
from halfstep.telemetry.run_folder import read_run
from tests import preloaded
from tests.halfstep.watching.watch_made import Written

pytestmark = pytest.mark.slow

#: Runs the cells of its argument, as JSON, each as the cell of a notebook.
SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.loads(sys.argv[1]):
    shell.run_cell(cell, store_history=True)
"""
BEGIN = """
import halfstep, torch
def steps(count):
    for _ in range(count):
        optimizer.zero_grad(); net(torch.ones(2, 4)).square().mean().backward(); optimizer.step()
"""
TRAIN = """
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
watch = halfstep.watch(net, name="try", config={{"lr": {lr}}}, folder="runs")
steps(3)
"""


def run(folder: Path, *cells: str) -> str:
    """Run cells in one shell; return its stderr."""
    done = preloaded.run(
        [sys.executable, "-c", SHELL, json.dumps([BEGIN, *cells])],
        cwd=folder,
        env={
            **os.environ,
            "IPYTHONDIR": str(folder / "ipython"),
            "PYTHONPATH": str(Path(halfstep.__file__).parents[1]),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def outcomes(folder: Path) -> dict[str, tuple[str, int, str]]:
    """Return each run's status, step and last error line, by its folder."""
    found = {}
    for path in sorted((folder / "runs").glob("*/outcome-1.json")):
        outcome: dict[str, Any] = json.loads(path.read_text())
        error = (outcome["error"] or "").strip().splitlines()[-1:]
        found[path.parent.name] = (outcome["status"], outcome["step"], "".join(error))
    return found


def test_a_cell_that_is_run_again_begins_a_new_run(tmp_path: Path) -> None:
    """A cell that is run again begins a new run with its own configuration and steps; the
    earlier run ends as interrupted by it.
    """
    said = run(tmp_path, *(TRAIN.format(lr=lr) for lr in (0.1, 0.2, 0.3)))
    assert outcomes(tmp_path) == {
        "try": ("interrupted", 3, ""),
        "try-2": ("interrupted", 3, ""),
        "try-3": ("finished", 3, ""),
    }
    for name, lr in (("try", 0.1), ("try-2", 0.2), ("try-3", 0.3)):
        folder = tmp_path / "runs" / name
        assert read_run(folder).config == {"lr": lr}
        assert Written(folder).steps["step"].tolist() == [1, 2, 3]
    assert said.count("watching; ") == 3


def test_later_cells_continue_with_the_run(tmp_path: Path) -> None:
    """Later cells continue a run until `finish`, or until a cell watches again."""
    run(tmp_path, TRAIN.format(lr=1), "steps(2)", "watch.log({'accuracy': 0.5})", "watch.finish()")
    assert outcomes(tmp_path) == {"try": ("finished", 5, "")}
    assert [event["step"] for event in Written(tmp_path / "runs" / "try").of("metric")] == [5]


RAISE = "steps(1)\nraise ValueError('the loss is odd')"


@pytest.mark.parametrize(
    ("after", "status", "step", "error"),
    [
        ([], "failed", 4, "ValueError: the loss is odd"),
        (["print('looked at it')"], "failed", 4, "ValueError: the loss is odd"),
        (["steps(2)"], "finished", 6, ""),
        (["steps(1)\nimport sys; sys.exit()"], "finished", 5, ""),
        (["nothing_of_this_name"], "failed", 4, "NameError: name 'nothing_of_this_name' is not"),
    ],
)
def test_the_exception_of_a_cell_is_recorded(
    tmp_path: Path, after: list[str], status: str, step: int, error: str
) -> None:
    """An exception in a cell ends the run as failed, unless a later cell continues training."""
    run(tmp_path, TRAIN.format(lr=1), RAISE, *after)
    [(name, found)] = outcomes(tmp_path).items()
    assert (name, found[:2]) == ("try", (status, step))
    assert found[2].startswith(error)
    assert bool(found[2]) == bool(error)


@pytest.mark.parametrize(
    ("cells", "status"),
    [
        ([RAISE, "watch.finish()"], "failed"),
        ([RAISE, "steps(1)", "watch.finish()"], "finished"),
        (["raise KeyboardInterrupt", "watch.finish()"], "finished"),
    ],
)
def test_finish_after_a_cell_that_raised_ends_a_failed_run(
    tmp_path: Path, cells: list[str], status: str
) -> None:
    """`finish` after a cell that raised ends a failed run, unless training continued or the user
    interrupted the cell.
    """
    run(tmp_path, TRAIN.format(lr=1), *cells)
    assert outcomes(tmp_path)["try"][0] == status


def test_finish_of_the_drop_in_ends_a_failed_run_too(tmp_path: Path) -> None:
    """After a failed cell `finish` of the drop-in keeps summary and collected values."""
    begin = "import halfstep as wandb\nwandb.init(name='try', dir='.')\nwandb.log({'acc': 1})"
    failing = "wandb.log({'acc': 2}, commit=False)\nraise ValueError('the loss is odd')"
    run(tmp_path, begin, failing, "wandb.finish()")
    folder = tmp_path / "halfstep-runs" / "try"
    outcome = json.loads((folder / "outcome-1.json").read_text())
    assert outcome["status"] == "failed"
    assert "the loss is odd" in outcome["error"]
    assert [event["value"] for event in Written(folder).of("metric")] == [1, 2]


def test_a_run_with_a_failed_cell_has_failed_when_another_begins(tmp_path: Path) -> None:
    """A run whose cell raised or was interrupted has failed once another run begins."""
    first = TRAIN.format(lr=1) + "raise ValueError('first')"
    second = TRAIN.format(lr=2) + "raise KeyboardInterrupt"
    run(tmp_path, first, second, TRAIN.format(lr=3))
    assert outcomes(tmp_path) == {
        "try": ("failed", 3, "ValueError: first"),
        "try-2": ("terminated", 3, "KeyboardInterrupt"),
        "try-3": ("finished", 3, ""),
    }


@pytest.mark.extended
def test_a_terminal_of_ipython_is_watched_to_its_end(tmp_path: Path) -> None:
    """A terminal IPython is watched with `%run`, an exception in it, and the end of its input."""
    (tmp_path / "train.py").write_text(f"{BEGIN}\n{TRAIN.format(lr=1)}\nraise ValueError('odd')\n")
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit"],
        input="%run train.py\n%run train.py\n",
        cwd=tmp_path,
        env={
            **os.environ,
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "PYTHONPATH": str(Path(halfstep.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert outcomes(tmp_path) == {
        "try": ("failed", 3, "ValueError: odd"),
        "try-2": ("failed", 3, "ValueError: odd"),
    }


SHOW = """
from IPython.core.displaypub import CapturingDisplayPublisher
shown = get_ipython().display_pub = CapturingDisplayPublisher(parent=get_ipython())
watch
"""
REPORT = """
import json
with open("shown.json", "w") as file:
    json.dump([each["data"]["text/html"] for each in shown.outputs], file)
"""


def test_a_watch_is_a_card_that_is_updated(tmp_path: Path) -> None:
    """A cell's last line shows a card of the run, which later cells and the end update."""
    scaled = "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
    scaled += "def scaled(value):\n    optimizer.zero_grad()\n"
    scaled += "    scaler.scale(net(torch.full((2, 4), value)).square().mean()).backward()\n"
    scaled += "    scaler.step(optimizer); scaler.update()\n"
    more = "for value in (1.0, 1e30, 1.0, 1.0): scaled(value)"
    run(tmp_path, TRAIN.format(lr=0.1), SHOW, scaled, more, "watch.finish()", REPORT)
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert len(shown) >= 3
    assert "<b>try</b> · watching" in shown[0]
    assert "No GradScaler detected" in shown[0]
    assert "<b>try</b> · ended" in shown[-1]
    assert "2^9" in shown[-1]
    assert "Skipped" in shown[-1]
    assert "<polyline" in shown[-1]


def test_what_cells_print_is_kept(tmp_path: Path) -> None:
    """Both output streams of cells are recorded without secrets, and shown as before."""
    print_more = "import sys\nprint('again', os.environ['MY_TOKEN'])\n"
    print_more += "print('odd', file=sys.stderr)"
    said = run(
        tmp_path,
        "import os; os.environ |= {'HALFSTEP_CONSOLE': 'yes', 'MY_TOKEN': 'secret-of-mine'}",
        TRAIN.format(lr=0.1) + "print('begun', end='')",
        print_more,
        "watch.finish()\nprint('after')",
    )
    lines = [
        (event["stream"], event["text"])
        for event in Written(tmp_path / "runs" / "try").of("line")
        if not event["text"].startswith("halfstep: ")
    ]
    assert lines == [("stdout", "begunagain ***"), ("stderr", "odd")]
    assert "odd" in said
