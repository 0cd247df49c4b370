"""Commands about runs, on any machine that reaches the server."""

import http
import json
import sys
import time
from collections.abc import Sequence
from getpass import getpass
from pathlib import Path

from halfstep.api_client import credentials
from halfstep.api_client.credentials import Credentials
from halfstep.api_client.progress import Progress
from halfstep.api_client.responses import ApiError, is_away
from halfstep.cli.alert_commands import alert
from halfstep.cli.run_commands import (
    compare,
    delete,
    edit,
    events,
    findings,
    fork,
    go_on,
    move,
    restore,
    scale,
    series,
)
from halfstep.cli.saved_commands import note, preset, retention
from halfstep.cli.sweep_commands import sweep
from halfstep.cli.typed import (
    EXITS,
    act,
    add_command,
    add_submission,
    carry_out,
    command_of,
    configuration,
    exit_code,
    folder_of,
    heard,
    parser_of,
    tell,
    tell_queued,
    warn,
)
from halfstep.client import URL, Client
from halfstep.exporting.commands import export
from halfstep.importing.commands import import_
from halfstep.session.nesting import merged
from halfstep.telemetry.ingest import Ingest
from halfstep.telemetry.upload import Sent, run_folders
from halfstep.telemetry.upload import upload as send_run


def runs(words: list[str]) -> None:
    """List runs of a server, newest first."""
    parser = parser_of("runs", runs)
    parser.add_argument(
        "filter",
        nargs="*",
        help="a text, status:failed, since:7d, 'lr>0.01', 'val/accuracy>0.9'; after --, -word: not",
    )
    parser.add_argument("--sort", default="-id", help='a column, setting or metric; "-": downwards')
    parser.add_argument("--limit", type=int, default=20)
    options = parser.parse_args(_with_descending(words))
    with Client() as client:
        wanted = " ".join(options.filter)
        page = client.run_page(wanted, sort=options.sort, limit=options.limit)
    for found in page["runs"]:
        tell(found, options)
    notes = page["notes"]
    if not page["runs"] and not options.json:
        notes = [*notes, "no run matches"]
    _tell_notes(notes, as_json=options.json)


def _with_descending(words: list[str]) -> list[str]:
    """Join `--sort -lr` to `--sort=-lr`: argparse takes a word with a dash for an option."""
    joined: list[str] = []
    for word in words:
        is_value = joined[-1:] == ["--sort"] and word.startswith("-") and word[1:2] != "-"
        joined[-1 if is_value else len(joined) :] = [f"--sort={word}" if is_value else word]
    return joined


def show(words: list[str]) -> None:
    """Show a run as JSON: its state, configuration, history and findings."""
    parser = parser_of("show", show)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        run = client.run(options.run) | {"findings": client.findings(options.run)}
        print(json.dumps(run, indent=None if options.json else 2))


def submit(words: list[str]) -> None:
    """Queue a run: `submit digits --set training.steps=400`, or a command line by `--command`:
    `submit --command 'python train.py --lr {lr}' --param lr=0.1`.
    """
    parser = parser_of("submit", submit)
    parser.add_argument("recipe", nargs="?", default="")
    add_submission(parser)
    parser.add_argument("--preset", metavar="NAME", help="whose settings the others replace")
    parser.add_argument("--nodes", type=int, help="workers that train it together; 1")
    parser.add_argument("--devices", type=int, help="of each node; 1")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="to start from, uploaded: .safetensors or .pt"
    )
    add_command(parser)
    options = parser.parse_args(words)
    if sum(map(bool, (options.recipe, options.command, options.preset))) != 1:
        parser.error("allowed is one of a recipe, --preset and --command")
    if options.weights and (options.command or not options.weights.is_file()):
        parser.error(f"--weights {options.weights}: allowed is a file, for a recipe")
    further = {"name": options.name} | ({"tags": options.tags} if options.tags else {})
    place = {"nodes": options.nodes, "devices_per_node": options.devices}
    place["project"] = options.project
    further |= {name: value for name, value in place.items() if value is not None}
    with Client() as client:
        if options.command:
            queued = client.submit_command(**command_of(parser, options), **further)
        else:
            config = configuration(parser, options)
            if options.weights:
                with Progress(options.weights.name, in_bytes=True) as told:
                    upload = client.upload_weights(options.weights, told=told)["upload"]
                config = merged(config, {"weights": {"upload": upload}})
            queued = (
                client.submit_preset(options.preset, config, **further)
                if options.preset
                else client.submit(options.recipe, config, **further)
            )
        tell_queued(client, queued, options)


def cancel(words: list[str]) -> None:
    """Cancel a run; a training run saves a checkpoint first."""
    act("cancel", cancel, Client.cancel, words)


def pause(words: list[str]) -> None:
    """Pause a run, with a checkpoint; `run resume` queues it again."""
    act("run pause", pause, Client.pause, words)


def resume(words: list[str]) -> None:
    """Resume a paused run from its last checkpoint."""
    act("run resume", resume, Client.resume, words)


def follow(words: list[str]) -> None:
    """Follow a run until it ends; the exit code reports the outcome."""
    parser = parser_of("follow", follow, EXITS)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        for told in client.follow(options.run, told=warn):
            tell(told, options)
    sys.exit(exit_code(told))


def log(words: list[str]) -> None:
    """Print a run's log: once it has ended, the whole log."""
    parser = parser_of("log", log)
    parser.add_argument("run", type=int)
    options = parser.parse_args(words)
    with Client() as client:
        if not options.json and _print_log_file(client, options.run):
            return
        for line in client.log(options.run):
            print(json.dumps(line) if options.json else line["text"])


def _print_log_file(client: Client, run_id: int) -> bool:
    """Print the files of an ended run's log; return whether there are any."""
    if client.run(run_id)["ended_at"] is None:
        return False
    try:
        for piece in client.log_text(run_id):
            sys.stdout.buffer.write(piece)
    except ApiError as error:
        if error.status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.FORBIDDEN):
            return False  # whoever may not download files sees the lines that the page shows
        raise
    return True


def download(words: list[str]) -> None:
    """Download a checkpoint of a run, and compare its SHA-256."""
    parser = parser_of("download", download)
    parser.add_argument("run", type=int)
    parser.add_argument("folder", nargs="?", type=folder_of, default=Path())
    parser.add_argument("--step", type=int, help="the newest if not told")
    parser.add_argument(
        "--kind", default="", help="checkpoint if not told; or weights, ema; weights.<module>"
    )
    options = parser.parse_args(words)
    with Client() as client, Progress(f"run {options.run}", in_bytes=True) as told:
        step, kind = options.step, options.kind
        path = client.download(options.run, options.folder, step=step, kind=kind, told=told)
    print(json.dumps({"path": str(path)}) if options.json else path)


RUN = {
    "submit": submit,
    "list": runs,
    "show": show,
    "follow": follow,
    "log": log,
    "cancel": cancel,
    "pause": pause,
    "resume": resume,
    "download": download,
    "series": series,
    "events": events,
    "findings": findings,
    "compare": compare,
    "scale": scale,
    "fork": fork,
    "go-on": go_on,
    "edit": edit,
    "delete": delete,
    "restore": restore,
    "move": move,
}


def run(words: list[str]) -> None:
    """Submit, list, show, follow, edit, pause, cancel, delete, fork runs; read numbers and logs."""
    carry_out("run", run, RUN, words)


def workers(words: list[str]) -> None:
    """List workers; `workers drain NAME` stops one from claiming runs, `undrain` reverses it."""
    parser = parser_of("workers", workers)
    parser.add_argument("command", nargs="?", choices=["list", "drain", "undrain"], default="list")
    parser.add_argument("name", nargs="?", help="of a worker")
    parser.add_argument("--stop", action="store_true", help="with drain: what runs too")
    options = parser.parse_args(words)
    if (options.command == "list") != (options.name is None):
        parser.error("allowed is a name with drain and undrain, and none with list")
    if options.stop and options.command != "drain":
        parser.error("--stop is allowed with drain alone")
    with Client() as client:
        found = list(client.workers())
        if options.command != "list":
            ids = [each["id"] for each in found if each["name"] == options.name]
            if not ids:
                known = ", ".join(each["name"] for each in found) or "none"
                parser.error(f"name is {options.name!r}; there are: {known}")
            found = [
                client.drain_worker(ids[0], stop=options.stop)
                if options.command == "drain"
                else client.undrain_worker(ids[0])
            ]
    for each in found:
        if options.json:
            print(json.dumps(each))
            continue
        state = "up" if each["alive"] else "not up"
        drained = ", drained" if each["drained_at"] else ""
        print(f"{each['name']}: {len(each['devices'])} devices, {state}{drained}")


def login(words: list[str]) -> None:
    """Store a server's URL and a token, in a file that only you can read."""
    parser = parser_of("login", login)
    parser.add_argument("url", nargs="?", default=URL, help=f"of the server; {URL} if not told")
    options = parser.parse_args(words)
    if not credentials.is_address(options.url):
        parser.error(f"url is {options.url!r}; allowed: http://… or https://…")
    # Never an argument: whoever lists processes, or reads the shell's history, would see it.
    asked = f"Token of {options.url}, from its account page: "
    token = (getpass(asked) if sys.stdin.isatty() else heard(parser, sys.stdin.readline)).strip()
    if not token:
        parser.error("there is no token: type it, or send it as standard input")
    if wrong := credentials.flaw(token):
        parser.error(wrong)
    notes = _doubts(options.url, token)
    path = credentials.store(Credentials(options.url.rstrip("/"), token))
    kept = {"url": options.url, "path": str(path)}
    print(json.dumps(kept) if options.json else f"The token of {options.url} is in {path}")
    _tell_notes(notes, as_json=options.json)


def _doubts(url: str, token: str) -> list[str]:
    """Ask the server for what any token may see; return why it could not be asked.

    Raises ApiError if it knows no such token, or is no server of ours.
    """
    try:
        with Client(url, token) as client:
            client.projects()
    except ApiError as error:
        is_told = is_away(error) or error.status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
        if not is_told and error.status != http.HTTPStatus.FORBIDDEN:  # which knows the token
            raise
        return [f"the token is not tried: {error}"] if is_told else []
    return []


def _tell_notes(notes: Sequence[str], *, as_json: bool) -> None:
    if as_json and notes:
        print(json.dumps({"notes": notes}), file=sys.stderr)
    elif not as_json:
        for text in notes:
            warn(text)


def upload(words: list[str]) -> None:
    """Upload watched runs from their folders; complete, partial or repeated."""
    parser = parser_of("upload", upload)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs, or above")
    parser.add_argument("--checkpoints", action="store_true", help="all of them, not as watched")
    parser.add_argument("--delete", action="store_true", help="the spools of what is over and sent")
    options = parser.parse_args(words)
    if missing := [folder for folder in options.folders if not folder.is_dir()]:
        parser.error(f"{missing[0]} is no folder")
    found = [run for folder in options.folders for run in run_folders(folder.absolute())]
    if not found:
        parser.error(f"there is no run in {', '.join(map(str, options.folders))}")
    server = credentials.known()
    if server is None:
        parser.error("no server is known: `halfstep login`, or set HALFSTEP_URL and HALFSTEP_TOKEN")
    told = Progress("runs")

    def say(text: str) -> None:
        told.wipe()
        print(f"halfstep: {text}", file=sys.stderr)

    is_whole = True
    with Ingest(server) as ingest, told:
        for number, folder in enumerate(found):
            told(number, len(found))
            try:
                sent = send_run(
                    folder,
                    ingest,
                    say,
                    time.sleep,
                    with_checkpoints=options.checkpoints,
                    delete=options.delete,
                )
            except (ApiError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                if isinstance(error, ApiError) and error.status in (0, 401):  # with all folders
                    raise
                sent = Sent(None, is_over=False, problems=(_problem(error),))
            told.wipe()
            is_whole = is_whole and not sent.problems
            if options.json:
                print(json.dumps({"folder": str(folder), **sent._asdict()}), flush=True)
            else:
                print(f"{folder}: {_in_a_line(sent)}", flush=True)
    if not is_whole:
        sys.exit(1)


def _problem(error: Exception) -> str:
    """Return in a line why a folder was not sent."""
    is_spoken = isinstance(error, ApiError | OSError) or type(error) is ValueError
    return " ".join((str(error) if is_spoken else f"{type(error).__name__}: {error}").split())


def _in_a_line(sent: Sent) -> str:
    is_waited_for = not sent.is_over and (sent.page or not sent.problems)
    more = ["it has not ended yet"] if is_waited_for else []
    return "; ".join([sent.page or "not sent", *more, *sent.problems])


def projects(words: list[str]) -> None:
    """List projects; admins: `projects rename NAME NEW_NAME`, and `delete NAME` an empty one."""
    parser = parser_of("projects", projects)
    commands = {"list": 0, "rename": 2, "delete": 1}
    parser.add_argument("command", nargs="?", choices=commands, default="list")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args(words)
    if len(options.names) != commands[options.command]:
        parser.error(
            "allowed are a name and a new one with rename, one with delete, none with list"
        )
    with Client() as client:
        if options.command == "delete":
            client.delete_project(*options.names)
            return
        renames = options.command == "rename"
        found = [client.rename_project(*options.names)] if renames else client.projects()
    for each in found:
        told = f"{each['devices_used']} devices, {each['queued_used']} queued"
        print(json.dumps(each) if options.json else f"{each['name'] or 'Default project'}: {told}")


def mcp(words: list[str]) -> None:
    """Serve a server's runs to agents, by the Model Context Protocol over stdio."""
    try:
        from halfstep.cli import mcp_server
    except ModuleNotFoundError as error:
        sys.exit(f"halfstep: it takes {error.name}: pip install 'halfstep[mcp]'")
    mcp_server.mcp(words)


COMMANDS = {
    "alert": alert,
    "cancel": cancel,
    "download": download,
    "export": export,
    "import": import_,
    "login": login,
    "mcp": mcp,
    "note": note,
    "preset": preset,
    "projects": projects,
    "retention": retention,
    "run": run,
    "runs": runs,
    "show": show,
    "submit": submit,
    "sweep": sweep,
    "upload": upload,
    "workers": workers,
}
