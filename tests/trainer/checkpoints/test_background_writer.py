"""One write at a time runs in the background, and every failure is raised."""

from threading import Event, Thread, current_thread

import pytest

from trainer.checkpoints.background_writer import Writer


@pytest.fixture
def writer():
    """A writer; its thread ends with the test."""
    writer = Writer()
    yield writer
    writer.close()


def test_a_write_runs_in_the_background_and_the_next_waits_for_it(writer):
    """The first `begin` returns during its write, and the second waits until that has ended."""
    result, go_on = [], Event()

    def first():
        result.append(current_thread())
        go_on.wait()
        result.append("first is over")

    writer.begin(first)
    result.append("training")
    Thread(target=go_on.set).start()
    writer.begin(lambda: result.append("second"))
    result.append("training")
    writer.wait()
    [thread] = [each for each in result if isinstance(each, Thread)]
    assert thread is not current_thread()
    said = [each for each in result if each is not thread]
    assert said[:2] == ["training", "first is over"]
    assert sorted(said[2:]) == ["second", "training"]


@pytest.mark.parametrize("hear", [Writer.wait, lambda writer: writer.begin(print)])
def test_an_exception_is_raised_once(writer, hear):
    """An exception of a background write is raised by the next call, once."""
    writer.begin(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hear(writer)
    writer.check()
    writer.wait()


def test_a_poll_does_not_block_and_reports_failures(writer):
    """A poll of a running write returns at once; after a failure it raises."""
    go_on = Event()

    def fail():
        go_on.wait()
        raise OSError("full")

    def look():
        while True:
            writer.check()

    writer.begin(fail)
    writer.check()
    go_on.set()
    with pytest.raises(OSError, match="full"):
        look()
