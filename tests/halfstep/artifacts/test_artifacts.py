"""Artifacts as scripts save and use them: on the local disk, and with a real server."""

import hashlib
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

import halfstep
from db.access import projects
from db.database import Database
from db.tables import (
    ArtifactCollection,
    ArtifactLink,
    ArtifactVersion,
    Blob,
    Project,
    Run,
    Status,
)
from halfstep import ApiError, Client
from halfstep.api_client.credentials import Credentials
from halfstep.artifacts import cache
from halfstep.artifacts.manifest import Entry, digest_of, files_in
from halfstep.artifacts.names import ArtifactError, Reference, Version, parse_reference
from halfstep.cli import main as cli
from halfstep.session import active_run, artifacts
from halfstep.session.sweep_point import FILE, SweepPoint
from tests.marks import looped
from tests.site import until


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache of the test's own, and a folder for runs."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """End the run of a failed test."""
    yield
    if active_run.active:
        active_run.active.finish()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "samples"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.csv").write_text("one")
    (folder / "sub" / "b.csv").write_text("two")
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


@looped(
    "text, reference",
    [
        ("data", Reference(None, "data", Version(alias="latest"))),
        ("data:v3", Reference(None, "data", Version(number=3))),
        ("data:best", Reference(None, "data", Version(alias="best"))),
        ("a b/data@3fa9c1", Reference("a b", "data", Version(digest="3fa9c1"))),
        ("/data:v0", Reference("", "data", Version(number=0))),
    ],
)
def test_a_reference_names_project_artifact_and_version(text: str, reference: Reference) -> None:
    """A reference has a number, an alias or a digest; without any it is the latest version."""
    assert parse_reference(text) == reference


WRONG = ["", "../", "data:", "data@xyz", "da ta", "data:a b", "data:v3:v4", "data:best/"]


@looped("text", WRONG)
def test_a_bad_reference_is_an_error_that_says_what_is_allowed(text: str) -> None:
    """An invalid reference of an artifact is rejected with the allowed forms."""
    with pytest.raises(ArtifactError, match="allowed"):
        parse_reference(text)


def test_links_within_a_folder_are_followed_and_all_else_is_refused(
    tmp_path: Path, data: Path
) -> None:
    """Links out of a folder, to nothing or in a circle, and FIFOs are named in the error."""
    (data / "c.csv").symlink_to("a.csv")
    (data / "linked").symlink_to("sub")
    names = ["a.csv", "c.csv", "linked/b.csv", "sub/b.csv"]
    assert [name for name, _ in files_in(data)] == names
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    (data / "file").symlink_to(tmp_path / "elsewhere" / "secret")
    (data / "folder").symlink_to(tmp_path / "elsewhere")
    (data / "sub" / "nothing").symlink_to("nowhere")
    (data / "sub" / "circle").symlink_to("..")
    os.mkfifo(data / "sub" / "pipe")
    with pytest.raises(ArtifactError) as refused:
        files_in(data)
    for problem in (
        "file is a link out of the folder",
        "folder is a link out of the folder",
        "sub/nothing is a link to nothing",
        "sub/circle is a link to a folder that contains it",
        "sub/pipe is no file",
    ):
        assert problem in str(refused.value)
    for path in ("file", "folder", "sub/nothing", "sub/circle", "sub/pipe"):
        (data / path).unlink()
    assert [name for name, _ in files_in(data)] == names


@pytest.mark.parametrize("name", ["pipe", "nothing", "folder"])
def test_a_path_that_is_no_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """A path that is no file is refused, also in a mapping; reading a FIFO would wait forever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / name, {"within": tmp_path / name}):
        with pytest.raises(ArtifactError, match=name):
            files_in(path)


def test_the_drop_in_logs_no_incomplete_artifact(
    data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The W&B drop-in skips an artifact whose folder it cannot add, and raises nothing."""
    wandb: Any = halfstep
    (data / "dead").symlink_to("nowhere")
    with wandb.init(name="maker", mode="offline") as run:
        artifact = wandb.Artifact("data", type="dataset")
        artifact.add_dir(data)
        artifact.add_file(data / "a.csv")
        run.log_artifact(artifact)
        folder = run._watch.folder
    assert not (folder / "blobs").exists()
    assert "log_artifact('data') is ignored" in (said := capfd.readouterr().err)
    assert "dead is a link to nothing" in said


def test_without_a_server_a_version_is_used_from_disk(data: Path) -> None:
    """Without a server a version is found by name, alias or digest in the cache."""
    watch = halfstep.watch(name="maker", mode="offline")
    saved = watch.save_artifact(data, name="digits", type="dataset", aliases=["good"])
    assert saved is not None
    assert (saved.files, saved.size_bytes) == (2, 6)
    for reference in ("digits", "digits:good", str(saved)):
        path = watch.use(reference)
        assert contents(path) == {"a.csv": "one", "sub/b.csv": "two"}
    (path / "a.csv").chmod(0o644)
    (path / "a.csv").write_text("spoilt")
    assert contents(watch.use("digits"))["a.csv"] == "one"
    with pytest.raises(ArtifactError, match="there is no 'digits:v0' on this machine"):
        watch.use("digits:v0")
    blobs = watch.files.folder / "blobs" if watch.files else data
    before = sorted(blobs.iterdir())
    assert watch.save_artifact(data, name="digits", type="dataset") == saved
    assert sorted(blobs.iterdir()) == before
    watch.finish()


def test_a_bad_artifact_costs_itself_only(data: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An invalid artifact prints one line with the reason, and the run continues."""
    watch = halfstep.watch(mode="offline")
    assert watch.save_artifact("nowhere", name="digits") is None
    assert watch.save_artifact(data, name="no such name") is None
    assert watch.save_artifact(data, name="digits", aliases=["v1"]) is None
    assert watch.save_artifact(data, name="digits") is not None
    watch.finish()
    said = capfd.readouterr().err
    assert "save_artifact is ignored: ArtifactError: nowhere does not exist" in said
    assert "name is 'no such name'; allowed: 1 to 128 letters" in said
    assert "not v and a number" in said


def test_a_disabled_watch_uses_artifacts_too(data: Path) -> None:
    """A script can use artifacts also if its watch is disabled."""
    watch = halfstep.watch(mode="offline")
    watch.save_artifact(data, name="digits")
    watch.finish()
    disabled = halfstep.watch(mode="disabled")
    assert disabled.save_artifact(data, name="digits") is None
    assert contents(disabled.use("digits")) == contents(data)


def test_a_damaged_download_is_fetched_again_and_then_refused(tmp_path: Path) -> None:
    """A download with a wrong digest is repeated once and then refused."""
    entry = Entry("a.txt", 3, "ab" * 32)
    manifest = cache.Manifest("", "a", digest_of([entry]), True, [entry])
    fetched: list[str] = []

    def fetch(entry: Entry, path: Path) -> None:
        fetched.append(entry.path)
        path.write_text("xyz")

    with pytest.raises(ArtifactError, match=r"a\.txt is damaged"):
        cache.local_path(manifest, fetch)
    assert fetched == ["a.txt", "a.txt"]
    with pytest.raises(ArtifactError, match="does not match its digest"):
        cache.local_path(manifest._replace(digest="cd" * 32), fetch)


def test_two_versions_with_one_file_are_fetched_at_once(tmp_path: Path) -> None:
    """Two processes that fetch the same file have a partial file each, and wait for no other."""
    shared = Entry("a.txt", 6, hashlib.sha256(b"onetwo").hexdigest())
    other = Entry("b.txt", 6, shared.sha256)
    versions = [
        cache.Manifest("", "a", digest_of([each]), True, [each]) for each in (shared, other)
    ]
    fetched: list[str] = []

    def fetch(entry: Entry, path: Path) -> None:
        fetched.append(entry.path)
        with path.open("wb") as file:
            file.write(b"one")
            file.flush()
            if entry == shared:
                assert cache.local_path(versions[1], fetch).read_bytes() == b"onetwo"
            file.write(b"two")

    assert cache.local_path(versions[0], fetch).read_bytes() == b"onetwo"
    assert fetched == ["a.txt", "b.txt"]


def complete(database: Database) -> list[int]:
    with database.reading() as session:
        query = select(ArtifactVersion).order_by(ArtifactVersion.id)
        return [row.number for row in session.scalars(query) if row.completed_at]


def test_a_run_makes_a_version_that_another_uses(
    data: Path, database: Database, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that only uploads can save an artifact for another run; the lineage has both runs,
    and each content is stored once.
    """
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    with halfstep.watch(name="maker") as watch:
        watch.save_artifact(data, name="digits", type="dataset")
        (data / "a.csv").write_text("changed")
        saved = watch.save_artifact(data, name="digits", type="dataset")
        assert contents(watch.use(str(saved)))["a.csv"] == "changed"  # before the server has it
    until(lambda: complete(database) == [0, 1])
    with halfstep.watch(name="user") as watch:
        path = watch.use("digits:v0")
        assert contents(path) == {"a.csv": "one", "sub/b.csv": "two"}
    until(lambda: len(links(database)) == 3)
    assert links(database) == [(1, 1, "made"), (1, 2, "made"), (2, 1, "used")]
    with database.reading() as session:
        assert len(session.scalars(select(Blob)).all()) == 3


def test_a_number_is_that_of_the_server_that_is_there_now(
    data: Path,
    client: Client,
    database: Database,
    server: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A version number belongs to the server at a URL; the known one serves during an outage."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    client.save_artifact(data, name="digits")
    watch = halfstep.watch(mode="disabled")
    assert contents(watch.use("digits:v0"))["a.csv"] == "one"
    with database.writing() as session:  # as a new server has it
        session.execute(update(ArtifactCollection).values(name="of-the-former-server"))
    (data / "a.csv").write_text("other")
    client.save_artifact(data, name="digits")
    assert contents(watch.use("digits:v0"))["a.csv"] == "other"
    unreachable = "http://127.0.0.1:9"
    manifest = cache.recall(server["HALFSTEP_URL"], "", "digits", "v0")
    assert manifest is not None
    cache.remember(unreachable, "v0", manifest)
    monkeypatch.setenv("HALFSTEP_URL", unreachable)
    assert contents(watch.use("digits:v0"))["a.csv"] == "other"
    assert "using digits:v0 as it was used here last" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("variables", "options"),
    [({}, {"mode": "disabled"}), ({"RANK": "1"}, {}), ({}, {"run": 3})],
    ids=["disabled", "rank", "rejected"],
)
def test_an_unwatched_script_has_the_project_and_server_that_it_names(
    variables: dict[str, str],
    options: dict[str, Any],
    data: Path,
    database: Database,
    client: Client,
    server: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Disabled watches, further ranks and watches with invalid arguments use the named project."""
    with database.writing() as session:
        projects.make(session, "vision")
    client.save_artifact(data, name="digits", project="vision")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a rank's records its exception
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = {"console": False, "system": False, "project": "vision", **options}
    url, token = server["HALFSTEP_URL"], server["HALFSTEP_TOKEN"]
    watch = halfstep.watch(url=url, token=token, **options)
    assert watch.folder is None
    assert contents(watch.use("digits:v0")) == contents(data)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_further_rank_of_a_sweeps_point_has_its_project(
    is_taken: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further rank has the sweep's project before and after the first rank claims a point."""
    options: dict[str, Any] = {"console": False, "system": False, "mode": "offline"}
    with halfstep.watch(project="vision", **options) as watch:
        watch.save_artifact(data, name="digits")
    point = SweepPoint("0" * 32, "lr=0.1", "vision", {})
    point.write(tmp_path / ("point.taken" if is_taken else "point.json"))
    monkeypatch.setenv(FILE, str(tmp_path / "point.json"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a rank's records its exception
    assert contents(halfstep.watch(**options).use("digits")) == contents(data)


def read_digits(watch: halfstep.Watch) -> dict[str, str]:
    return contents(watch.use("digits"))


@pytest.mark.slow
def test_a_child_process_uses_artifacts_of_its_parents_project(data: Path) -> None:
    """A spawned process gets its parent's run handle, and with it the project."""
    spawn = multiprocessing.get_context("spawn")
    with halfstep.watch(project="vision", console=False, system=False, mode="offline") as watch:
        watch.save_artifact(data, name="digits")
        with ProcessPoolExecutor(1, spawn) as pool:
            assert pool.submit(read_digits, watch).result() == contents(data)


def test_a_version_outlives_the_run_that_saved_it(
    data: Path, database: Database, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version can be used after its run's folder is deleted, because it was uploaded."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    with halfstep.watch(name="maker") as watch:
        saved = watch.save_artifact(data, name="digits")
    assert saved is not None
    until(lambda: complete(database) == [0])
    until(lambda: delete(Path("halfstep-runs/maker")))
    disabled = halfstep.watch(mode="disabled")
    assert contents(disabled.use(f"digits@{saved.digest}")) == contents(data)


def delete(folder: Path) -> bool:
    """Delete a folder, in which an uploader that ends may still write."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_a_deleted_run_without_a_server_is_an_error_that_names_its_folder(data: Path) -> None:
    """Without a server the error for an artifact of a deleted run names the run's folder."""
    with halfstep.watch(name="maker", mode="offline") as watch:
        watch.save_artifact(data, name="digits")
    shutil.rmtree("halfstep-runs/maker")
    with pytest.raises(ArtifactError, match=r"no longer in .*maker/blobs, and no server"):
        halfstep.watch(mode="disabled").use("digits")


def links(database: Database) -> list[tuple[int, int, str]]:
    with database.reading() as session:
        rows = session.scalars(select(ArtifactLink).order_by(ArtifactLink.run_id))
        return sorted(
            (row.run_id, row.version_id, row.role)
            for row in rows
            if (row.run_id, row.role) != (1, "used")
        )


def test_an_offline_run_is_uploaded_with_its_artifacts(
    data: Path, database: Database, server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`halfstep upload` sends an offline run's artifact versions and files."""
    with halfstep.watch(name="maker", mode="offline") as watch:
        watch.save_artifact(data, name="digits", aliases=["best"])
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    cli.main(["upload", "halfstep-runs"])
    until(lambda: complete(database) == [0])


def test_content_that_has_no_room_in_its_project_is_sent_later(
    data: Path,
    database: Database,
    server: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If the project is full, all but the content is sent, and one line names the command for
    it.
    """
    with halfstep.watch(name="maker", mode="offline") as watch:
        watch.save_artifact(data, name="digits")
        watch.log({"score": 1.0}, step=1)
    for name, value in server.items():
        monkeypatch.setenv(name, value)

    def limit(gib: float | None) -> None:
        with database.writing() as session:
            session.get_one(Project, "").stored_gib = gib

    limit(0.0)
    cli.main(["upload", "halfstep-runs"])
    with database.reading() as session:
        assert session.get_one(Run, 1).status == Status.FINISHED
    assert complete(database) == []
    printed = capfd.readouterr()
    assert "more than its limit of 0 B" in printed.err + printed.out
    assert "halfstep-runs/maker --checkpoints` sends it later" in printed.err + printed.out
    limit(None)
    cli.main(["upload", "halfstep-runs", "--checkpoints"])
    until(lambda: complete(database) == [0])


def test_the_client_puts_gets_and_deletes(client: Client, data: Path, tmp_path: Path) -> None:
    """The client saves no new version for unchanged content; differences are those of the pages."""
    first = client.save_artifact(data, name="digits", type="dataset", aliases=["good"])
    again = client.save_artifact(data, name="digits", type="dataset")
    assert (first["version"], again["version"]) == ("v0", "v0")
    (data / "new.csv").write_text("3")
    assert client.save_artifact(data, name="digits", type="dataset")["version"] == "v1"
    assert [each["version"] for each in client.artifact_versions("digits")["items"]] == ["v1", "v0"]
    diff = client.artifact_diff("digits:good", "digits")
    assert [(each["path"], each["kind"]) for each in diff["changes"]] == [("new.csv", "added")]
    assert contents(client.download_artifact("digits:v0")) == {"a.csv": "one", "sub/b.csv": "two"}
    assert client.set_alias("digits:v1", "good")["aliases"] == ["latest", "good"]
    client.remove_alias("digits", "good")
    client.delete_artifact("digits:v1")
    assert client.artifact_version("digits")["version"] == "v0"
    with pytest.raises(ApiError, match="digits:v1 in Default project is deleted"):
        client.artifact_version("digits:v1")
    assert [each["name"] for each in client.named_artifacts()] == ["digits"]


def test_a_version_that_is_not_uploaded_completely_is_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch, server: dict[str, str]
) -> None:
    """A version that is not completely uploaded is refused by client and script."""
    files = [{"path": "a.csv", "size_bytes": 3, "sha256": "a" * 64}]
    client._post("/api/v1/artifacts", {"name": "digits", "files": files})
    text = "digits:v0 is not uploaded completely yet"
    with pytest.raises(ArtifactError, match=text):
        client.download_artifact("digits:v0")
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    with halfstep.watch(name="user") as watch, pytest.raises(ArtifactError, match=text):
        watch.use("digits:v0")


def test_a_version_that_is_still_uploaded_is_used_where_it_was_saved(
    client: Client,
    data: Path,
    tmp_path: Path,
    server: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A version that is still being uploaded is found locally by the start of its digest."""
    event = artifacts.save(tmp_path / "run", data, "digits", "dataset", [])
    credentials = Credentials(server["HALFSTEP_URL"], server["HALFSTEP_TOKEN"])
    artifacts.remember_saved(tmp_path / "run", event, "", credentials)
    files = [{"path": f.name, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in event.files]
    client._post("/api/v1/artifacts", {"name": "digits", "type": "dataset", "files": files})
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    watch = halfstep.watch(mode="disabled")
    assert contents(watch.use(str(artifacts.version_of(event)))) == contents(data)


def test_the_command_does_the_same(
    client: Client,
    data: Path,
    address: str,
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command can put, list, show, diff, alias, get and delete artifacts."""
    monkeypatch.setenv("HALFSTEP_URL", address)
    monkeypatch.setenv("HALFSTEP_TOKEN", token)

    def run_command(*words: str) -> str:
        cli.main(["artifact", *words])
        return capsys.readouterr().out

    assert run_command("put", "samples", "--name", "data", "--type", "dataset").strip() == "data:v0"
    (data / "a.csv").write_text("3")
    assert (
        run_command(
            "put", "samples", "--name", "data", "--type", "dataset", "--alias", "best"
        ).strip()
        == "data:v1"
    )
    assert "dataset" in run_command("list")
    assert "sub/b.csv" in run_command("show", "data:v0")
    assert "changed" in run_command("diff", "data:v0", "data:v1")
    assert "good" in run_command("alias", "data:v0", "good")
    assert run_command("get", "data:good", "copy").strip() == "copy"
    assert contents(tmp_path / "copy")["a.csv"] == "one"
    assert "deleted" in run_command("delete", "data:v0")
    with pytest.raises(SystemExit, match="is deleted"):
        run_command("show", "data:v0")
