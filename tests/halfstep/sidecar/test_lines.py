"""Output of a process, as whole lines and as a bounded number of them."""

from hypothesis import given
from hypothesis import strategies as st

from halfstep.sidecar.lines import FIRST_WAITING, LAST_WAITING, LINE_BYTES, Output
from halfstep.telemetry.events import Line

SECRET = "sesame"


def texts(lines: list[Line]) -> list[str]:
    """Return the texts of lines that were not skipped."""
    return [line.text for line in lines if isinstance(line.text, str)]


def test_waiting_lines_are_bounded() -> None:
    """The first and the last are taken; a gap has the number between."""
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
    """The log has every byte but the secret; no line is too long or torn within a character."""
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
    """The log has all states, the line the one that a terminal would show."""
    logged = bytearray()
    output = Output((), logged.extend)
    for percent in range(0, 101, 10):
        output.feed("stderr", f"\r{percent:3}%|".encode())
    output.feed("stderr", b"\n")
    [line] = output.take()
    assert (line.stream, line.text) == ("stderr", "100%|")
    assert logged.count(b"%") == 11
    assert output.last_lines["stderr"][-1] == "100%|"
