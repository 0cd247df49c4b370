"""An idle script has its data on disk, so a kill loses little."""

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import halfstep
from halfstep.recording import ring
from halfstep.session import active_run, idle_writer
from halfstep.telemetry.events import Metric, Scaler
from halfstep.telemetry.spool import Position, SpoolReader, lost_bytes, spool_of
from tests.forkserver import FORKSERVER
from tests.marks import extended
from tests.site import until

MOST_STEPS = 10_000


def train(folder: Path, kind: str, steps: int, report: Callable[[Any], Any]) -> None:
    """Take steps, and report their losses and scales."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    options: dict[str, Any] = {"console": False, "system": False, "mode": "offline"}
    watch = halfstep.watch(net, folder=folder, name="run", **options)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = net(torch.full((4, 3), step / steps)).square().mean()
        if kind == "scaled":
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        watch.log({"logged": step}, step=step)
        report((loss.item(), scaler.get_scale()))


def train_and_idle(folder: Path, kind: str, steps: int, ours: Connection) -> None:
    """Take steps, and idle until the kill."""
    torch.set_num_threads(1)
    train(folder, kind, steps, ours.send)
    threading.Event().wait()


def read(folder: Path) -> tuple[list[int], list[float], list[Any]]:
    """Return the steps, losses and events of a run's spool."""
    items = []
    reader = SpoolReader(folder / "run" / "spool", Position(1, 0, 0))
    while found := reader.poll():
        items += found
    rows = [item for item in items if isinstance(item, np.ndarray)]
    steps = [int(step) for row in rows for step in row["step"]]
    losses = [float(loss) for row in rows for loss in row["loss"]]
    return steps, losses, [item for item in items if not isinstance(item, np.ndarray)]


@pytest.fixture
def killed() -> Callable[[Path, str, int, int], list[tuple[float, float]]]:
    """Return a function that kills a script once enough rows are written.

    The function returns the losses and scales that the script has reported.
    """

    def kill(folder: Path, kind: str, steps: int, enough: int) -> list[tuple[float, float]]:
        ours, theirs = FORKSERVER.Pipe()
        process = FORKSERVER.Process(target=train_and_idle, args=(folder, kind, steps, theirs))
        process.start()
        theirs.close()
        said: list[tuple[float, float]] = []

        def is_written() -> bool:
            while ours.poll():
                said.append(ours.recv())
            if not (folder / "run" / "spool").is_dir():
                return False
            written, _, events = read(folder)
            logged = [event.step for event in events if isinstance(event, Metric)]
            return len(written) >= enough and len(logged) >= enough

        until(is_written)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        with suppress(EOFError):
            while ours.poll():
                said.append(ours.recv())
        return said

    return kill


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kills"),
    [("scaled", 2), *extended([("unscaled", 2), ("scaled", 10), ("unscaled", 10)])],
)
def test_kills_lose_no_row_that_was_written_and_tear_none(
    killed: Callable[[Path, str, int, int], list[tuple[float, float]]],
    tmp_path: Path,
    kind: str,
    kills: int,
) -> None:
    """A kill loses no written row and tears none; half of the kills hit an idle script."""
    chance = random.Random(63)
    for number in range(kills):
        is_idle = number % 2 == 0
        steps = chance.randint(10, 150)
        folder = tmp_path / str(number)
        said = killed(folder, kind, steps if is_idle else MOST_STEPS, steps)
        written, losses, events = read(folder)
        assert written == list(range(1, len(written) + 1))
        assert len(written) == steps if is_idle else len(written) >= steps
        reported = [loss for loss, _ in said]  # a row may be written before its report
        assert len(losses) <= len(reported) + 1
        common = min(len(losses), len(reported))
        assert losses[:common] == pytest.approx(reported[:common], abs=0)
        scales = [event.scale_after for event in events if isinstance(event, Scaler)]
        if kind == "scaled" and is_idle:
            known = [8.0, *(scale for _, scale in said)]
            assert scales == [b for a, b in itertools.pairwise(known) if a != b]
        assert not sum(lost_bytes(path) for _, path in spool_of(folder / "run" / "spool", 1))


@pytest.mark.parametrize("kind", ["scaled", "unscaled"])
def test_rows_that_are_written_early_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows written early have the same events, evidence and values as rows written at the end."""
    contents = {}
    for name, seconds in (("late", 1e6), ("early", 0.0)):
        monkeypatch.setattr(idle_writer, "POLL_SECONDS", max(seconds, 0.0005))
        monkeypatch.setattr(ring, "EARLY_SECONDS", seconds)
        train(tmp_path / name, kind, 300, lambda _: None)
        assert active_run.active
        active_run.active.finish()
        steps, losses, events = read(tmp_path / name)
        told = [msgspec.to_builtins(event) | {"elapsed_ms": 0} for event in events]
        contents[name] = steps, losses, sorted(told, key=repr)
    assert contents["early"][0] == list(range(1, 301))
    assert contents["early"] == contents["late"]


def test_a_fork_finds_no_thread_and_the_parent_goes_on(tmp_path: Path) -> None:
    """The writer thread is not running during a fork, since a child would inherit its locks."""

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    with halfstep.watch(folder=tmp_path, name="run", console=False, system=False, mode="offline"):
        assert names().count("halfstep-idle") == 1
        child = os.fork()
        if not child:
            os._exit(names().count("halfstep-idle"))
        assert os.waitpid(child, 0)[1] == 0
        assert names().count("halfstep-idle") == 1
    assert "halfstep-idle" not in names()


def test_an_error_ends_the_thread_only() -> None:
    """An error of the writer thread is reported once and ends only the thread."""
    said: list[str] = []
    calls: list[None] = []

    def fail() -> None:
        calls.append(None)
        raise ValueError("damaged")

    writer = idle_writer.IdleWriter(fail, said.append)
    writer.start()
    until(lambda: bool(said))
    writer.stop()
    assert len(calls) == len(said) == 1
    assert "ValueError: damaged" in said[0]


def test_rows_of_a_device_are_written_once_their_copy_is_complete() -> None:
    """Rows whose copy from the device is not complete, or not sent yet, are written later."""
    rows = ring.Ring(1, torch.device("cpu"), 0.0, lambda *_: None)
    rows.readable = None
    for step in range(3):
        rows.close(step, 0.0, 0.0)
    rows.sent = 2
    rows._known[0] = (0, -1e9, *rows._known[0][2:])  # closed long ago
    assert rows.read_early(3, has_arrived=False) is None
    early = rows.read_early(3, has_arrived=True)
    assert early is not None
    assert early[2]["step"].tolist() == [0, 1]
    assert rows.read_early(3, has_arrived=True) is None
