"""Output of a process, cut into a bounded number of whole lines."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.sidecar import progress_bars
from halfstep.sidecar.lines import FIRST_WAITING, LAST_WAITING, LINE_BYTES, Output
from halfstep.telemetry.events import Line

SECRET = "sesame"


def texts(lines: list[Line]) -> list[str]:
    """Return the texts of lines that were not skipped."""
    return [line.text for line in lines if isinstance(line.text, str)]


def test_waiting_lines_are_bounded() -> None:
    """Of too many waiting lines the first and last are kept, with a gap's count."""
    output = Output()
    for start in range(0, 5000, 500):
        output.feed("stdout", b"".join(b"%d\n" % i for i in range(start, start + 500)))
    lines = output.take()
    [gap] = [line for line in lines if line.lines]
    assert len(texts(lines)) == FIRST_WAITING + LAST_WAITING
    assert gap.lines == 5000 - FIRST_WAITING - LAST_WAITING
    assert (lines[0].text, lines[-1].text) == ("0", "4999")
    assert output.take() == []


@given(
    st.lists(st.sampled_from(["a", "é", "日", "😀", "\n", "\r", SECRET, "x" * 9000]), max_size=60),
    st.lists(st.integers(1, 12_000), min_size=1, max_size=30),
)
def test_output_is_complete_however_it_is_cut(parts: list[str], sizes: list[int]) -> None:
    """The log has every byte but secrets, and no line is too long or cut within a character."""
    text = "".join(parts)
    data, logged = text.encode(), bytearray()
    output = Output([SECRET], logged.extend)
    for size in sizes:
        output.feed("stdout", data[:size])
        data = data[size:]
    output.feed("stdout", data)
    output.close("stdout")
    assert logged.decode() == text.replace(SECRET, "***")
    shown = texts(output.take())
    assert all(len(each.encode()) <= LINE_BYTES for each in shown)
    if "\r" not in text:
        assert "".join(shown) == text.replace(SECRET, "***").replace("\n", "")


def test_a_progress_bar_keeps_its_last_state() -> None:
    """The log has all states of a progress bar, and the line has the last one."""
    logged = bytearray()
    output = Output((), logged.extend)
    for percent in range(0, 101, 10):
        output.feed("stderr", f"\r{percent:3}%|".encode())
    output.feed("stderr", b"\n")
    [line] = output.take() + output.take()
    assert (line.stream, line.text) == ("stderr", "100%|")
    assert logged.count(b"%") == 11
    assert output.last_lines["stderr"][-1] == "100%|"


def list_printed(script: str, cut: int) -> list[str]:
    """Return the recorded lines of output that arrives in pieces."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    logged, kept = bytearray(), list[str]()
    output = Output((), logged.extend)
    for at in range(0, len(done.stderr), cut):
        output.feed("stderr", done.stderr[at : at + cut])
        kept += texts(output.take()) if at % 3 == 0 else []
    output.close("stderr")
    assert bytes(logged) == done.stderr
    return kept + texts(output.take())


NESTED = """
import sys
from tqdm import tqdm
print("begin", file=sys.stderr)
for epoch in tqdm(range(3), desc="epoch", mininterval=0):
    for _ in tqdm(range(50), desc="batch", leave={leave}, mininterval=0):
        pass
    tqdm.write(f"accuracy {{epoch}}", file=sys.stderr)
print("end", file=sys.stderr)
"""


@pytest.mark.parametrize("cut", [1000, 10**6])
def test_nested_bars_are_a_line_each(cut: int) -> None:
    """Nested tqdm bars are one line each, with the text between them; the log has everything."""
    lines = list_printed(NESTED.format(leave=False), cut)
    assert [line.split("%")[0] for line in lines if "0%|" not in line or "100%" in line] == [
        "begin",
        *(f"accuracy {epoch}" for epoch in range(3)),
        "epoch: 100",
        "end",
    ]
    assert len(lines) <= 7
    lines = list_printed(NESTED.format(leave=True), cut)
    assert sum("batch: 100%" in line for line in lines) == 3
    assert lines[-1] == "end"
    assert len(lines) <= 10


def test_bars_of_rich_are_a_line_each() -> None:
    """Two rich bars that are redrawn together are one line each, with a line printed above them."""
    script = """
import sys
from rich.console import Console
from rich.progress import Progress
console = Console(file=sys.stderr, force_terminal=True, width=100)
with Progress(console=console, auto_refresh=False) as progress:
    bars = [progress.add_task(name, total=40) for name in ("train", "test")]
    for step in range(40):
        for bar in bars:
            progress.advance(bar)
        progress.refresh()
        if step == 20:
            progress.console.print("half")
print("end", file=sys.stderr)
"""
    lines = list_printed(script, 700)
    assert [line.split()[0] for line in lines] == ["half", "train", "test", "end"]
    assert "100%" in lines[1]


def test_a_finished_bar_is_held_for_a_moment() -> None:
    """A finished bar is held briefly, since another bar may be drawn below it and move up again."""
    output = Output()
    output.feed("stderr", b"\repoch: 100%|\n")
    output.feed("stderr", b"\repoch: 0%|")
    assert texts(output.take() + output.take()) == ["epoch: 100%|"]
    for part in (b"\n", b"\rbatch: 0%|", b"\x1b[A", b"\repoch: 50%|", b"\n\n"):
        output.feed("stderr", part)
        kept = texts(output.take())
    output.close("stderr")
    assert kept + texts(output.take()) == ["epoch: 50%|", "batch: 0%|"]
    output.feed("stdout", b"\repoch: 0%|\n\rbatch: 0%|")
    assert texts(output.take() + output.take()) == ["epoch: 0%|"]
    output.feed("stdout", b"\x1b[A\repoch: 9%|\n\n")
    output.close("stdout")
    assert texts(output.take()) == ["epoch: 9%|", "batch: 0%|"]


def test_lines_after_bars_are_not_held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are held until they are below the bars, or the cursor has not moved up for a while."""
    moments = [0.0]
    monkeypatch.setattr(progress_bars, "clock", lambda: moments[0])
    output = Output()
    output.feed("stderr", b"\repoch: 0%|\n\rbatch: 0%|\x1b[A")
    output.feed("stderr", b"\n\r          \x1b[A\r          \r")
    output.feed("stderr", b"one\ntwo\nthree\nfour\n")
    assert texts(output.take()) == ["one", "two", "three"]
    output.feed("stderr", b"five\n")
    assert texts(output.take()) == ["four"]
    moments[0] = progress_bars.MOVING_SECONDS + 1
    assert texts(output.take()) == ["five"]
    output.feed("stderr", b"six\n")
    assert texts(output.take()) == ["six"]


CODES = [b"\x1b[A", b"\x1b[2K", b"\x1b[?25l", b"\x1b[38;2;1;2m", b"\x1b[99A", b"\x1b[?1;2x"]
CODES += [b"a", "日".encode(), b"\xff", b"\n", b"\r", b"\x1b[H", b"\x1b[5;1r", b"\x1b[M"]


@given(st.lists(st.sampled_from(CODES), max_size=80))
def test_no_sequence_ends_the_recording(parts: list[bytes]) -> None:
    """No escape sequence that a program prints stops the recording."""
    output = Output()
    for part in parts:
        output.feed("stdout", part)
    output.feed("stdout", b"\nlast\n")
    output.close("stdout")
    output.take()
