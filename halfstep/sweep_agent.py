"""Agents: take points of a sweep, and run a function or a command for each.

    halfstep.agent(3, train)                                    in a script
    halfstep agent 3 -- python train.py --lr {lr}               in a shell

Any number of agents, on any machines, may work on a sweep; no point is taken twice. An agent that
dies loses its point after a minute, to the next one. SIGTERM and Ctrl-C end the script of its point
and give the point back. While the server is away, an agent retries for five minutes, and a
request to give a point back for about ten seconds.
"""

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halfstep.api_client.errors import ApiError
from halfstep.clock import clock
from halfstep.process import script_problem
from halfstep.session.stderr import say

if TYPE_CHECKING:
    from halfstep.api_client.response_types import Claim
    from halfstep.client import Client

T = TypeVar("T")

POLL_SECONDS = 2.0  # between two requests for a point that may be given back
CHECK_SECONDS = 0.2  # between two checks whether the script is to end, or has ended
GRACE_SECONDS = 10.0  # for a command to end after SIGTERM, and for a point to be given back
#: Consecutive failures after which an agent ends: the next point would fail, too.
MOST_FAILURES = 5

#: Runs the script of a point and returns whether it succeeded. Its second argument is set when the
#: point is lost, or its run is ended by a user.
Work = Callable[["Claim", threading.Event], bool]


class Agent:
    """One agent of a sweep."""

    def __init__(self, client: "Client", sweep_id: int) -> None:
        self._client, self._sweep_id, self._id = client, sweep_id, uuid.uuid4().hex

    def run(self, work: Work, count: int | None = None) -> tuple[int, int]:
        """Run points until there is none, or `count` of them; return (succeeded, failed)."""
        with _terminable():
            return self._run(work, count)

    def _run(self, work: Work, count: int | None) -> tuple[int, int]:
        succeeded = failed = in_a_row = 0
        while count is None or succeeded + failed < count:
            claim = self._patiently(lambda: self._client.claim_point(self._sweep_id, self._id))
            if claim["state"] == "over":
                break
            if claim["state"] == "wait":
                time.sleep(POLL_SECONDS)
                continue
            say(f"sweep {self._sweep_id}: run {claim['run']}, {claim['name']}")
            if self._run_one(claim, work):
                succeeded, in_a_row = succeeded + 1, 0
            else:
                failed, in_a_row = failed + 1, in_a_row + 1
            if in_a_row >= MOST_FAILURES:
                say(
                    f"sweep {self._sweep_id}: {in_a_row} consecutive runs have failed; the agent "
                    "stops"
                )
                break
        return succeeded, failed

    def _run_one(self, claim: "Claim", work: Work) -> bool:
        from halfstep.session.sweep_point import FILE, SweepPoint, was_taken

        point = self._sweep_id, int(claim["number"] or 0), self._id
        is_lost = threading.Event()
        with tempfile.TemporaryDirectory(prefix="halfstep-agent-") as folder:
            path = Path(folder, "point.json")
            fields = {name: claim[name] for name in SweepPoint._fields}  # type: ignore[literal-required]
            SweepPoint(**fields).write(path)
            with _variable(FILE, str(path)), self._heartbeats(claim, path, is_lost) as is_over:
                try:
                    is_good = work(claim, is_lost)
                except BaseException:  # Ctrl-C, SIGTERM, or an error of the agent
                    is_over.set()
                    self._report(lambda: self._client.return_claim(*point), GRACE_SECONDS)
                    raise
                is_over.set()
                watched = was_taken(path)
                self._report(lambda: self._client.end_claim(*point, was_watched=watched))
        return is_good

    def _report(self, call: Callable[[], None], patience: float | None = None) -> None:
        """Report the end of a point; the server detects it itself if that fails."""
        try:
            self._patiently(call, patience)
        except ApiError as error:
            say(f"sweep {self._sweep_id}: {error}")

    def _patiently(self, request: Callable[[], T], patience: float | None = None) -> T:
        """Return a request's result; retry while the server is away.

        patience: in seconds; default: `polling.AWAY_SECONDS`.
        """
        from halfstep.api_client import polling

        patience = polling.AWAY_SECONDS if patience is None else patience
        return polling.patiently(
            request, patience, lambda text: say(f"sweep {self._sweep_id}: {text}")
        )

    @contextmanager
    def _heartbeats(
        self, claim: "Claim", path: Path, is_lost: threading.Event
    ) -> Iterator[threading.Event]:
        """Renew the lease of a point in a thread; set `is_lost` if its run is to end.

        path: of the point's file.  Yields an event to be set once the script has ended: its end
        may be recorded from then on.
        """
        from halfstep.session.sweep_point import was_ended

        has_ended, is_over = threading.Event(), threading.Event()

        def renew() -> None:
            renewed_at = clock()
            while not has_ended.wait(CHECK_SECONDS):
                text = f"run {claim['run']} was ended by its sweep or a user"
                if not was_ended(path):
                    if clock() - renewed_at < claim["lease_seconds"] / 4:
                        continue
                    renewed_at = clock()
                    try:
                        number = int(claim["number"] or 0)
                        if self._client.renew_claim(self._sweep_id, number, self._id):
                            continue
                    except ApiError as error:
                        if error.status != 409:
                            continue  # an outage; the lease may survive it
                        text = str(error)
                if not is_over.is_set():
                    say(text)
                is_lost.set()
                return

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield is_over
        finally:
            has_ended.set()
            thread.join()


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit for SIGTERM temporarily, unless the program has a handler of its own."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(*_signal: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_signal: None)  # a second one leaves no process
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def agent(
    sweep_id: int | str,
    function: Callable[[], Any] | None = None,
    entity: str | None = None,
    project: str | None = None,
    count: int | None = None,
    *,
    url: str | None = None,
    token: str | None = None,
    **further: object,
) -> tuple[int, int]:
    """Run a function for points of a sweep until there is none; return (succeeded, failed).

    The function calls `halfstep.watch` (or `wandb.init` of the drop-in), whose run is that of the
    point, and reads the settings from its `config`. An exception fails that run only.  count: most
    points.  url, token: as in `watch`.  entity, project and further: W&B has them; they are
    ignored. Raises ApiError.
    """
    if further:
        from halfstep.wandb_compat.unsupported import report_ignored

        report_ignored("agent", further)
    if function is None:
        raise ApiError(
            0, "agent() needs a function; for a command: `halfstep agent SWEEP -- COMMAND`"
        )
    return with_client(
        lambda client: Agent(client, _number(sweep_id)).run(_calling(function), count), url, token
    )


def _calling(function: Callable[[], object]) -> Work:
    def work(claim: "Claim", is_lost: threading.Event) -> bool:
        _end_active_run()  # one that began before the point's is another
        try:
            with _interruptible(is_lost):
                function()
        except PointEnded:
            _end_active_run()
            return True  # by its sweep, or a user: no failure of the script
        except Exception as error:
            traceback.print_exc()
            _end_active_run(error)
            return False
        _end_active_run()
        return True

    return work


class PointEnded(BaseException):
    """Raised in a function whose point is lost, or whose run is ended: pruned, for example."""


@contextmanager
def _interruptible(is_lost: threading.Event) -> Iterator[None]:
    """Raise PointEnded in this thread, at its next line of Python, once the event is set."""
    this, has_ended = ctypes.c_ulong(threading.get_ident()), threading.Event()

    def interrupt() -> None:
        while not has_ended.wait(CHECK_SECONDS):
            if is_lost.is_set():
                raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raise_in(this, ctypes.py_object(PointEnded))
                return

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _end_active_run(error: Exception | None = None) -> None:
    """End this process's run, also one of the drop-in that records nothing."""
    from halfstep.session import active_run

    if (watch := active_run.active) is not None:
        if error is not None:
            watch.__exit__(type(error), error, error.__traceback__)
        watch.finish()
    if (calls := sys.modules.get("halfstep.wandb_compat.calls")) is not None:
        calls.finish()


def run_command(
    client: "Client", sweep_id: int, words: Sequence[str], count: int | None = None
) -> tuple[int, int]:
    """Run a command for points of a sweep; `{name}` is the value of that setting.

    Raises ValueError for a command that cannot be split, or whose placeholder is no setting.
    """
    from halfstep.cli import command_line

    line = shlex.join(words)
    command_line.placeholders(line)

    def work(claim: "Claim", is_lost: threading.Event) -> bool:
        values = claim["config"] | claim["params"]
        unknown = [name for name in command_line.placeholders(line) if name not in values]
        if unknown:
            raise ValueError(
                f"{{{unknown[0]}}} is no setting of sweep {sweep_id}; allowed: {', '.join(values)}"
            )
        return _run_process(command_line.fill_placeholders(line, values), is_lost)

    return Agent(client, sweep_id).run(work, count)


def _run_process(arguments: Sequence[str], is_lost: threading.Event) -> bool:
    """Run a process; end it if the point is lost, and if this process is interrupted.

    Returns whether it succeeded; the end of a point is no failure of the script.  Raises
    ValueError for a script whose first line names no interpreter.
    """
    path = shutil.which(arguments[0])
    if path and (problem := script_problem(path, Path())):
        raise ValueError(problem)
    process = subprocess.Popen(arguments)
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(CHECK_SECONDS)
            if is_lost.is_set():
                _end(process)
    except BaseException:
        _end(process)
        raise
    return is_lost.is_set() or process.returncode == 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def with_client(work: Callable[["Client"], T], url: str | None, token: str | None) -> T:
    """Call a function with a client of the server that watched runs are sent to."""
    from halfstep.client import Client
    from halfstep.session.run_upload import server_of

    server = server_of(url, token)
    if server is None:
        raise ApiError(
            0,
            "no server is configured: run `halfstep up` or `halfstep login`, or set "
            "HALFSTEP_URL and HALFSTEP_TOKEN",
        )
    with (
        Client(server.url, server.token) as client,
        _variable("HALFSTEP_URL", server.url),
        _variable("HALFSTEP_TOKEN", server.token),
    ):
        return work(client)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable temporarily."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _number(sweep: int | str) -> int:
    """Return the number of a sweep, also of W&B's form entity/project/number."""
    text = str(sweep).rpartition("/")[2]
    if not text.isdecimal():
        raise ApiError(0, f"the sweep is {text[:100]!r}; allowed: the number of a sweep")
    return int(text)
