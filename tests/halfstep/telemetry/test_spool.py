from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.telemetry.spool import (
    FILE_HEADER,
    MAGIC,
    STEP_DTYPE,
    STEPS,
    UNKNOWN_US,
    VERSION,
    Position,
    SpoolPart,
    SpoolReader,
    SpoolWriter,
    Unrecordable,
    frame,
    lost_bytes,
)
from tests.db.telemetry.telemetry_made import make_metric
from tests.spool_made import event_of, fields_of


@pytest.fixture
def write(tmp_path):
    """A function that makes writers, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(SpoolWriter(tmp_path, *args, **kwargs))


def steps(first, count):
    records = np.zeros(count, STEP_DTYPE)
    records["step"] = np.arange(first, first + count)
    records["loss"] = records["step"] / 7
    return records


def numbers(items):
    return [int(step) for item in items if isinstance(item, np.ndarray) for step in item["step"]]


def test_a_reader_returns_what_was_written_in_order(tmp_path, write):
    """A spool's reader returns equal arrays and events in order."""
    writer = write(1)
    writer.steps(steps(1, 3))
    writer.event(event_of(make_metric(3, 0.5)))
    writer.steps(steps(4, 1))
    first, event, last = SpoolReader(tmp_path).poll()
    assert first.tobytes() == steps(1, 3).tobytes()
    assert fields_of(event) == make_metric(3, 0.5)
    assert last.tobytes() == steps(4, 1).tobytes()


def test_a_poll_returns_only_what_is_new(tmp_path, write):
    """A poll returns only items that no earlier poll has returned."""
    writer, reader = write(1), SpoolReader(tmp_path)
    assert reader.poll() == []
    writer.steps(steps(1, 2))
    assert numbers(reader.poll()) == [1, 2]
    assert reader.poll() == []
    writer.steps(steps(3, 1))
    assert numbers(reader.poll()) == [3]


def test_non_finite_numbers_survive_json(tmp_path, write):
    """Non-finite numbers are stored in JSON as strings that float() understands."""
    config = {"a": [float("nan"), float("inf")], "b": {"c": float("-inf")}}
    writer = write(1)
    writer.event(event_of(make_metric(1, float("nan"))))
    writer.event(event_of({"event": "configured", "config": config}))
    metric, configured = map(fields_of, SpoolReader(tmp_path).poll())
    assert metric == make_metric(1, 0.5) | {"value": "NaN"}
    assert configured["config"] == {"a": ["NaN", "Infinity"], "b": {"c": "-Infinity"}}


def test_a_step_record_is_packed(tmp_path, write):
    """A step record takes 52 bytes, and a frame 12 more, without padding."""
    writer = write(1)
    writer.steps(steps(1, 10))
    assert STEP_DTYPE.itemsize == 52
    assert (tmp_path / "1-0.spool").stat().st_size == 16 + 12 + 10 * 52


def test_files_rotate_and_are_read_in_order_over_attempts(tmp_path, write):
    """Spool files and attempts are read in numeric order, and nothing is lost between files."""
    for attempt in (9, 10):
        writer = write(attempt, rotate_bytes=17)
        for step in range(1, 13):
            writer.steps(steps(step, 1))
    assert len(list(tmp_path.iterdir())) == 24
    reader = SpoolReader(tmp_path)
    for attempt in (9, 10):
        assert numbers(reader.poll()) == [*range(1, 13)]
        assert reader.position().attempt == attempt
    assert reader.poll() == []


def test_an_attempt_cannot_write_twice(tmp_path, write):
    """A second process of the same attempt may not append to the first one's spool."""
    write(1)
    with pytest.raises(FileExistsError):
        write(1)


def test_a_reader_continues_from_a_stored_position(tmp_path, write):
    """A reader's position survives JSON, and another reader continues from it."""
    writer, reader = write(2), SpoolReader(tmp_path)
    assert reader.position() is None
    writer.steps(steps(1, 2))
    reader.poll()
    stored = reader.position()._asdict()
    writer.steps(steps(3, 2))
    assert stored == {"attempt": 2, "sequence": 0, "offset": 16 + 12 + 2 * 52}
    assert numbers(SpoolReader(tmp_path, Position(**stored)).poll()) == [3, 4]


def test_a_backlog_comes_in_pieces(tmp_path, write):
    """A reader with a limit returns a backlog completely over several polls."""
    writer = write(1, rotate_bytes=200)
    for step in range(1, 21):
        writer.steps(steps(step, 1))
    reader, seen, polls = SpoolReader(tmp_path), [], 0
    while items := reader.poll(limit_bytes=100):
        seen += numbers(items)
        polls += 1
    assert seen == list(range(1, 21))
    assert polls > 5
    assert reader.torn == 0


def test_consumed_files_can_be_released(tmp_path, write):
    """A consumed file is released only if it was read to its end and has a successor."""
    writer, reader = write(1, rotate_bytes=17), SpoolReader(tmp_path)
    assert reader.release(delete=True) == []
    for step in (1, 2, 3):
        writer.steps(steps(step, 1))
    reader.poll()
    names = [path.name for path in reader.release()]
    assert names == ["1-0.spool", "1-1.spool"]
    reader.release(delete=True)
    assert [path.name for path in tmp_path.iterdir()] == ["1-2.spool"]
    writer.steps(steps(4, 1))
    assert numbers(reader.poll()) == [4]


def test_a_frame_that_is_still_growing_is_not_read(tmp_path, write):
    """Half a frame at the end of the newest file is read once it is complete."""
    writer = write(1)
    writer.steps(steps(1, 1))
    writer.steps(steps(2, 1))
    path = tmp_path / "1-0.spool"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    reader = SpoolReader(tmp_path)
    assert numbers(reader.poll()) == [1]
    assert (reader.poll(), reader.torn) == ([], 0)
    path.write_bytes(whole)
    assert numbers(reader.poll()) == [2]


def test_a_torn_tail_is_cut_once_a_newer_file_exists(tmp_path, write):
    """A killed attempt's half frame is skipped and counted; the next attempt is read."""
    write(1).steps(steps(1, 1))
    path = tmp_path / "1-0.spool"
    path.write_bytes(path.read_bytes() + b"\x30\x00")
    reader = SpoolReader(tmp_path)
    assert numbers(reader.poll()) == [1]
    write(2).steps(steps(2, 1))
    assert numbers(reader.poll()) == [2]
    assert (reader.poll(), reader.torn) == ([], 1)
    assert [path.name for path in reader.release()] == ["1-0.spool"]


def test_a_file_without_its_whole_header_is_torn_too(tmp_path, write):
    """A file whose header is incomplete, after a kill, does not stop the reader."""
    (tmp_path / "1-0.spool").write_bytes(b"HSSP")
    reader = SpoolReader(tmp_path)
    assert reader.poll() == []
    write(2).steps(steps(1, 1))
    assert numbers(reader.poll()) == [1]
    assert reader.torn == 1


def test_a_foreign_file_is_rejected(tmp_path):
    """A file with another magic number or version is reported by an error."""
    (tmp_path / "1-0.spool").write_bytes(b"HSSPOOL\x00\x63" + bytes(7))
    with pytest.raises(ValueError, match=r"1-0\.spool is a spool file of version 99; .* reads 1"):
        SpoolReader(tmp_path).poll()


def test_a_torn_tail_counts_once_though_its_attempt_takes_a_poll_of_its_own(tmp_path, write):
    """A torn tail is counted once, when the reader moves to the next attempt."""
    write(1).steps(steps(1, 1))
    path = tmp_path / "1-0.spool"
    path.write_bytes(path.read_bytes() + b"\x30\x00")
    write(2).steps(steps(2, 1))
    reader = SpoolReader(tmp_path)
    assert [numbers(reader.poll()) for _ in range(3)] == [[1], [2], []]
    assert reader.torn == 1


@pytest.mark.slow
@given(cut=st.integers(16, 16 + 3 * 64), flip=st.integers(0, 7))
def test_damage_never_yields_wrong_records(tmp_path_factory, cut, flip):
    """A file that is cut anywhere, or has a flipped bit, yields only correct records."""
    folder = tmp_path_factory.mktemp("spool")
    with SpoolWriter(folder, 1) as writer:
        for step in (1, 2, 3):
            writer.steps(steps(step, 1))
    path = folder / "1-0.spool"
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[:cut])
    assert numbers(SpoolReader(folder).poll()) == list(range(1, 1 + (cut - 16) // 64))
    if cut < len(whole) and (cut - 16) % 64 not in (5, 6, 7):  # the three zero bytes say nothing
        whole[cut] ^= 1 << flip
        path.write_bytes(whole)
        reader, harmed = SpoolReader(folder), 1 + (cut - 16) // 64
        items = [*iter_polls(reader)]
        items = [item for item in items if not isinstance(item, Unrecordable)]
        assert numbers(items) == [step for step in (1, 2, 3) if step != harmed]


def iter_polls(reader):
    """Yield all available items."""
    return chain.from_iterable(iter(reader.poll, []))


@pytest.mark.parametrize("place", ["header", "first", "length", "checksum", "last"])
def test_damaged_bytes_cost_their_frame_only(tmp_path, write, place):
    """Damaged bytes are reported once with their number; later frames are read while the file
    still grows.
    """
    writer = write(1)
    for step in (1, 2, 3):
        writer.steps(steps(step, 1))
    path = tmp_path / "1-0.spool"
    content = bytearray(path.read_bytes())
    size = (len(content) - 16) // 3
    at = {"header": 2, "first": 16 + 20, "length": 16 + size, "checksum": 16 + size + 9}
    content[at.get(place, len(content) - 1)] ^= 0x40
    path.write_bytes(content)
    reader = SpoolReader(tmp_path)
    items = [*iter_polls(reader)]
    if place == "last":  # which might be on its way
        assert numbers(items) == [1, 2]
        damaged = reader.end()
    else:
        [damaged] = [item for item in items if isinstance(item, Unrecordable)]
        lost = {"header": 0, "first": 1}.get(place, 2)
        read = [item for item in items if not isinstance(item, Unrecordable)]
        assert numbers(read) == [step for step in (1, 2, 3) if step != lost]
    expected = 16 if place == "header" else size
    assert (damaged.damaged_bytes, reader.end(), reader.poll()) == (expected, None, [])
    writer.steps(steps(4, 1))
    if place != "last":
        assert numbers(reader.poll()) == [4]


def test_frames_without_a_header_are_read_and_are_not_read_for_ever(tmp_path, write):
    """Data that begins with a frame instead of a header is read once, to its end."""
    writer = write(1)
    for step in (1, 2):
        writer.steps(steps(step, 1))
    path = tmp_path / "1-0.spool"
    content = path.read_bytes()[16:]
    part = SpoolPart(content, 0)
    assert numbers([part.poll(limit_items=1)[0], part.poll(limit_items=1)[0]]) == [1, 2]
    assert (part.poll(), part.offset) == ([], len(content))
    path.write_bytes(content)
    reader = SpoolReader(tmp_path)
    assert numbers(iter_polls(reader)) == [1, 2]
    assert (reader.end(), lost_bytes(path)) == (None, 0)


def test_damage_at_the_end_of_a_file_is_reported_with_the_next_file(tmp_path, write):
    """A complete but wrong last frame is reported as damage, once there is a next file."""
    write(1).steps(steps(1, 1))
    path = tmp_path / "1-0.spool"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    write(2).steps(steps(2, 1))
    reader = SpoolReader(tmp_path)
    damaged, *others = iter_polls(reader)
    assert damaged.damaged_bytes == path.stat().st_size - 16
    assert numbers(others) == [2]
    assert reader.torn == 0


def test_a_part_of_a_file_is_read_as_the_file_is(tmp_path: Path) -> None:
    """A part of a file, cut anywhere after any frame, returns the next frame's position."""
    with SpoolWriter(tmp_path, 1) as spool:
        for step in (1, 2, 3):
            spool.event(event_of({"event": "length", "step": 0, "steps": step}))
    content = (tmp_path / "1-0.spool").read_bytes()
    starts = [0]
    for end in range(len(content) + 1):
        part = SpoolPart(content[starts[-1] : end], starts[-1])
        while part.poll(1):
            pass
        if part.offset > starts[-1]:
            starts.append(part.offset)
    frame_bytes = (len(content) - 16) // 3
    assert starts == [0, *(16 + frame_bytes * number for number in range(4))]


def test_steps_with_unknown_wait_are_unchanged(tmp_path, write):
    """A server of the earlier version reads a watched loop's spool, with its unknown waits."""
    made = steps(1, 3)
    made["data_us"] = UNKNOWN_US
    writer = write(1)
    writer.steps(made)
    content = (tmp_path / "1-0.spool").read_bytes()
    assert content[16:] == frame(STEPS, b"".join(each.tobytes()[:48] for each in made))
    writer.steps(steps(4, 1))
    first, last = SpoolReader(tmp_path).poll()
    assert first.tobytes() == made.tobytes()
    assert last["data_us"].tolist() == [0]


@given(
    begun=st.booleans(),
    pieces=st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.builds(frame, st.integers(0, 4), st.sampled_from([b"", b"{}", b"null", bytes(52)])),
        ),
        max_size=5,
    ),
)
def test_reading_any_bytes_comes_to_an_end(begun, pieces):
    """Reading arbitrary bytes ends, because each poll that returns something advances."""
    header = FILE_HEADER.pack(MAGIC, VERSION) if begun else b""
    try:
        part = SpoolPart(header + b"".join(pieces), 0)
    except ValueError:
        return
    before = part.offset
    while part.poll(1):
        assert part.offset > before
        before = part.offset
