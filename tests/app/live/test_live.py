"""Live streams: no viewer misses a change, and viewers with the same cursor share a query."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Event

import pytest
from fastapi.sse import ServerSentEvent
from sqlalchemy.exc import OperationalError

from app.live.live import MESSAGES_WAITING, Live, Update


class Story:
    """A subject that sends the numbers from 1 to `last` to each client, and records cursors."""

    def __init__(self) -> None:
        self.last = 0
        self.looks: list[str] = []
        self.reported: list[str] = []

    def look(self, cursor: str) -> Update | None:
        self.looks.append(cursor)
        seen = int(cursor or 0)
        if seen >= self.last:
            return None
        self.reported.append(cursor)
        return Update(",".join(map(str, range(seen + 1, self.last + 1))), str(self.last))


Stream = AsyncIterator[ServerSentEvent]


async def _open(live: Live, story: Story, cursor: str = "") -> Stream:
    stream = live.stream("story", cursor, story.look, seconds=0.001)
    await anext(stream)
    return stream


def _run(play: Callable[[Live, Story], Awaitable[None]]) -> None:
    async def run_limited() -> None:
        async with asyncio.timeout(20):
            await play(Live(), Story())

    asyncio.run(run_limited())


def test_a_viewer_gets_new_rows_and_a_cursor() -> None:
    """Updates arrive as they happen, and the id of each is a cursor."""

    async def play(live: Live, story: Story) -> None:
        stream = await _open(live, story, "3")
        story.last = 5
        event = await anext(stream)
        assert (event.raw_data, event.id) == ("4,5", "5")
        story.last = 6
        assert (await anext(stream)).raw_data == "6"

    _run(play)


def test_viewers_at_the_same_cursor_share_one_look() -> None:
    """Viewers at the same cursor share a poll; one that is behind catches up separately first."""

    async def play(live: Live, story: Story) -> None:
        story.last = 4
        ahead, behind = await _open(live, story, "4"), await _open(live, story, "1")
        first = asyncio.ensure_future(anext(ahead))
        assert (await anext(behind)).raw_data == "2,3,4"
        story.looks.clear()
        while len(story.looks) < 3:  # from here on both are at the same cursor
            await asyncio.sleep(0)
        story.reported.clear()
        story.last = 5
        assert (await first).raw_data == (await anext(behind)).raw_data == "5"
        assert story.reported == ["4"]

    _run(play)


def test_slow_viewer_is_sent_away_and_comes_back_by_its_cursor() -> None:
    """A slow viewer is disconnected at a backlog limit, and loses nothing when it reconnects."""

    async def play(live: Live, story: Story) -> None:
        slow, quick = await _open(live, story), await _open(live, story)
        waiting = asyncio.ensure_future(anext(slow))
        got = []
        story.last = 1
        while len(got) <= MESSAGES_WAITING + 1:
            got.append((await anext(quick)).raw_data)
            story.last += 1
        seen = (await waiting).id
        rest = [event async for event in slow]
        assert rest == []
        back = await _open(live, story, seen or "")
        assert str((await anext(back)).raw_data).startswith("2,3,")

    _run(play)


def test_the_last_update_ends_the_stream_and_the_task() -> None:
    """An ended subject is no longer polled, for any number of open pages."""

    async def play(live: Live, story: Story) -> None:
        story.last = 1
        stream = live.stream(
            "story", "", lambda _cursor: Update("the end", "1", is_last=True), seconds=0.001
        )
        assert [event.raw_data for event in await _all(stream)] == [None, "the end"]
        while live.subjects:
            await asyncio.sleep(0)

    _run(play)


def test_a_run_without_viewers_costs_nothing() -> None:
    """A run's polling task ends with its last viewer, and starts again for the next."""

    async def play(live: Live, story: Story) -> None:
        story.last = 1
        stream = await _open(live, story)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        while live.subjects:
            await asyncio.sleep(0)
        again = await _open(live, story)
        assert (await anext(again)).raw_data == "1"

    _run(play)


class Watched:
    """A subject that is polled when it is woken."""

    def __init__(self) -> None:
        self.cursors: list[set[str]] = []  # of each watch
        self.wake: Callable[[], object] | None = None  # while it is watched

    @contextmanager
    def watching(self, cursors: Collection[str], wake: Callable[[], object]) -> Iterator[None]:
        self.cursors.append(set(cursors))
        self.wake = wake
        yield
        self.wake = None

    async def open(self, live: Live, story: Story, cursor: str) -> Stream:
        stream = live.stream("story", cursor, story.look, watching=self.watching)
        await anext(stream)
        return stream


def test_a_watched_subject_is_polled_when_it_is_woken() -> None:
    """A watched subject is polled when woken and for a new viewer, until the last viewer leaves."""

    async def play(live: Live, story: Story) -> None:
        watched = Watched()
        story.last = 1
        ahead = await watched.open(live, story, "1")
        first = asyncio.ensure_future(anext(ahead))
        while watched.wake is None:
            await asyncio.sleep(0)
        story.last = 2
        assert (watched.cursors, story.looks) == ([{"1"}], ["1"])
        watched.wake()
        assert (await first).raw_data == "2"
        behind = await watched.open(live, story, "0")
        assert (await anext(behind)).raw_data == "1,2"
        while watched.wake is None:
            await asyncio.sleep(0)
        assert watched.cursors[-1] == {"2"}
        await ahead.aclose()  # type: ignore[attr-defined]
        assert live.subjects
        await behind.aclose()  # type: ignore[attr-defined]
        while live.subjects:
            await asyncio.sleep(0)
        assert watched.wake is None

    _run(play)


def test_a_viewer_that_has_been_sent_away_is_not_watched_for() -> None:
    """A subject is not polled for a viewer that was disconnected and has not read its last
    update.
    """

    async def play(live: Live, story: Story) -> None:
        watched, end = Watched(), Update("the end", "1", is_last=True)
        stream = live.stream("story", "", lambda _cursor: end, watching=watched.watching)
        await anext(stream)
        assert (await anext(stream)).raw_data == "the end"
        for _ in range(100):
            await asyncio.sleep(0)
        assert (watched.cursors, live.subjects) == ([], ["story"])
        await stream.aclose()  # type: ignore[attr-defined]
        while live.subjects:
            await asyncio.sleep(0)

    _run(play)


def test_a_viewer_that_comes_during_a_poll_of_a_watched_subject_is_not_forgotten() -> None:
    """A watched subject is polled again for a viewer that connects during a poll."""

    async def play(live: Live, story: Story) -> None:
        watched, is_polling, has_come = Watched(), Event(), Event()

        class Slow(Story):
            def look(self, cursor: str) -> Update | None:
                is_polling.set()
                assert has_come.wait(20)
                return super().look(cursor)

        slow = Slow()
        slow.last = 1
        ahead = await watched.open(live, slow, "1")
        waiting = asyncio.ensure_future(anext(ahead))
        while not is_polling.is_set():
            await asyncio.sleep(0)
        behind = await watched.open(live, slow, "0")
        received = asyncio.ensure_future(anext(behind))
        await asyncio.sleep(0)
        has_come.set()
        assert (await received).raw_data == "1"
        live.close()
        with pytest.raises(StopAsyncIteration):
            await waiting

    _run(play)


def test_closing_ends_every_stream() -> None:
    """A server that stops ends open streams and accepts no new ones."""

    async def play(live: Live, story: Story) -> None:
        stream = await _open(live, story)
        rest = asyncio.ensure_future(_all(stream))
        while not story.looks:
            await asyncio.sleep(0)
        live.close()
        assert await rest == []
        assert await _all(await _open(live, story)) == []

    _run(play)


def test_streams_outlive_an_outage_of_the_database() -> None:
    """A stream sends nothing while the database is down, and everything afterwards."""

    async def play(live: Live, story: Story) -> None:
        failures = iter([True, True])

        def look(cursor: str) -> Update | None:
            if next(failures, False):
                raise OperationalError("SELECT", {}, Exception("away"))
            return story.look(cursor)

        story.last = 2
        stream = live.stream("story", "", look, seconds=0.001)
        await anext(stream)
        assert (await anext(stream)).raw_data == "1,2"

    _run(play)


async def _all(stream: Stream) -> list[ServerSentEvent]:
    return [event async for event in stream]


def test_one_viewers_error_ends_its_own_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    """An error in one viewer's poll ends only that stream."""

    async def play(live: Live, story: Story) -> None:
        story.last = 1
        good = await _open(live, story)
        assert (await anext(good)).raw_data == "1"
        bad = await _open(live, story, "not a number")
        assert await _all(bad) == []
        story.last = 2
        assert (await anext(good)).raw_data == "2"

    _run(play)
    assert "polling from cursor 'not a number' failed" in caplog.text
