"""Runs imported from other loggers have every number once."""

import csv
import hashlib
import io
import json
import shutil
import sqlite3
import sys
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto

from halfstep.importing import media, wandb
from halfstep.importing.columns import columns_of
from halfstep.importing.source import Media
from halfstep.session.logged_values import Histogram, as_file
from halfstep.telemetry.flags import SKIPPED, UNKNOWN_NORM
from halfstep.telemetry.run_folder import read_run
from tests.halfstep.importing.conftest import Import
from tests.halfstep.importing.imports_made import (
    MOMENT,
    RECORDED,
    event_file,
    scalar,
)
from tests.halfstep.watching.watch_made import Written
from tests.marks import looped

PNG = as_file(np.zeros((2, 2), np.uint8))[1]


def metrics(written: Written) -> dict[str, list[tuple[int, Any]]]:
    """Return logged numbers by name."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for event in written.of("metric"):
        found.setdefault(event["name"], []).append((event["step"], event["value"]))
    return found


def test_a_wandb_run(imported: Import) -> None:
    """W&B's loss, learning rate and scale become columns of the steps, counted from 1."""
    [result] = imported("wandb", RECORDED / "wandb")
    assert (result["steps"], result["numbers"]) == (12, 14)
    assert (result["media"], result["left_out"]) == (1, {"text": 1})
    run = read_run(Path(result["folder"]))
    assert (run.name, run.project, run.tags) == ("swift-lynx", "digits", ["fp16", "tried"])
    expected = {"lr": 0.01, "layers": [8, 4], "optimizer": {"name": "adamw"}, "late": 3}
    assert run.config == expected
    assert run.started.startswith("2026-11-22T02:37:4")
    written = Written(Path(result["folder"]))
    assert written.steps["step"].tolist() == list(range(1, 13))
    assert written.steps["loss"] == pytest.approx(1 / np.arange(1, 13), rel=1e-6)
    assert written.steps["scale"].tolist() == [65536.0] * 6 + [32768.0] * 6
    assert set(written.steps["lr"]) == {0.01}
    named = metrics(written)
    assert named["val.accuracy"][11] == (12, 11 / 12)
    assert (named["odd"], named["endless"]) == ([(13, "NaN")], [(13, "Infinity")])
    outcome = json.loads((Path(result["folder"]) / "outcome-1.json").read_text())
    assert (outcome["status"], outcome["step"]) == ("finished", 12)


def test_a_damaged_wandb_log_affects_only_its_run(
    imported: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged W&B log is imported up to the damage, and other runs completely."""
    [log] = (RECORDED / "wandb").rglob("*.wandb")
    both = tmp_path / "wandb"
    for name in ("a", "b"):
        shutil.copytree(log.parent, both / name)
    (both / "b" / log.name).rename(both / "b" / "run-zz.wandb")
    content = bytearray((both / "a" / log.name).read_bytes())
    content[4000] ^= 255
    (both / "a" / log.name).write_bytes(content)
    broken, whole = imported("wandb", both, code=1)
    assert 0 < broken["steps"] < 12
    assert whole["steps"] == 12
    (both / "a" / log.name).write_bytes(b"no log at all")
    assert len(imported("wandb", both, code=1)) == 1
    shutil.copy(log, both / "a" / log.name)
    with (both / "a" / log.name).open("r+b") as file:
        file.truncate(5000)  # as a kill leaves it
    cut, _whole = imported("wandb", both)
    assert 0 < cut["steps"] < 12


@pytest.fixture(params=["mlflow.db", "mlruns"])
def mlflow(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """MLflow's store as a database or as a folder."""
    if request.param == "mlruns":
        return RECORDED / "mlruns"
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.executescript((RECORDED / "mlflow.sql").read_text())
    database.close()
    return tmp_path


def test_mlflows_runs(imported: Import, mlflow: Path) -> None:
    """MLflow's database and folder give the same runs, without those that are deleted in it."""
    result = {Path(each["folder"]).name: each for each in imported("mlflow", mlflow)}
    assert result.keys() == {"first", "bad", "killed"}
    folder = Path(result["first"]["folder"])
    run = read_run(folder)
    assert (run.project, run.tags) == ("digits", ["team=a"])
    assert run.config == {"lr": 0.1, "model": {"width": 8}, "note": "it's: 'b'"}
    written = Written(folder)
    assert written.steps["loss"] == pytest.approx(1 / np.arange(1, 7), rel=1e-6)
    assert set(written.steps["lr"]) == {0.1}
    assert (np.diff(written.steps["elapsed_ms"]) >= 0).all()
    assert metrics(written) == {"val acc": [(6, "NaN")], "val loss": [(6, "Infinity")]}
    outcomes = {
        name: json.loads((Path(each["folder"]) / "outcome-1.json").read_text())["status"]
        for name, each in result.items()
    }
    assert outcomes == {"first": "finished", "bad": "failed", "killed": "terminated"}
    assert metrics(Written(Path(result["killed"]["folder"]))) == {"acc": [(0, 1.0)]}


def test_damaged_stores_of_mlflow_are_named(
    imported: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged files and lines of an MLflow store are reported."""
    (tmp_path / "mlflow.db").write_text("no database")
    assert imported("mlflow", tmp_path, code=1) == []
    copy = tmp_path / "mlruns"
    shutil.copytree(RECORDED / "mlruns", copy)
    [loss] = copy.rglob("train/loss")
    loss.write_text(loss.read_text() + "nonsense\n")
    [meta] = [path for path in copy.rglob("meta.yaml") if "run_name: killed" in path.read_text()]
    meta.write_text("a: [")
    result = imported("mlflow", copy, code=1)
    assert sorted((Path(each["folder"]).name, each["steps"]) for each in result) == [
        ("bad", 1),
        ("first", 6),
    ]


def test_tensorboards_runs(imported: Import, tmp_path: Path) -> None:
    """Each TensorBoard folder is a run with unchanged numbers; unsupported values are counted."""
    image = Event(step=1, summary=Summary(value=[Summary.Value(tag="x", image=Summary.Image())]))
    unserved = "file that is no PNG, JPEG or WAV up to 32 MiB"
    losses = [scalar("Loss/train", step, 1 / step) for step in range(10, 60, 10)]
    losses += [scalar("skipped", step, float(step == 20)) for step in range(10, 60, 10)]
    event_file(tmp_path / "logs" / "a", *losses, scalar("val", 50, 0.5), image)
    counted = [scalar("loss", 1, 1.0), scalar("skipped", 1, 3.0)]  # by somebody, in all
    event_file(tmp_path / "logs" / "b" / "c", scalar("val", 0, 2.0), *counted)
    result = {
        Path(each["folder"]).name: each for each in imported("tensorboard", tmp_path / "logs")
    }
    assert result.keys() == {"a", "b-c"}
    assert result["a"]["left_out"] == {unserved: 1}
    written = Written(Path(result["a"]["folder"]))
    assert written.steps["step"].tolist() == [10, 20, 30, 40, 50]
    assert written.steps["elapsed_ms"].tolist() == [0, 10_000, 20_000, 30_000, 40_000]
    assert written.steps["step_us"].tolist()[1:] == [1_000_000] * 4
    assert metrics(written) == {"val": [(50, 0.5)]}
    assert (written.steps["flags"] & SKIPPED).tolist() == [0, SKIPPED, 0, 0, 0]
    other = Written(Path(result["b-c"]["folder"]))
    assert metrics(other) == {"val": [(0, 2.0)], "skipped": [(1, 3.0)]}
    assert other.steps["flags"].tolist() == [UNKNOWN_NORM]


def test_the_second_writer_of_torch_says_how_it_was_configured(
    imported: Import, tmp_path: Path
) -> None:
    """The configuration of `SummaryWriter.add_hparams` is imported from its second file."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "logs") as writer:  # type: ignore[no-untyped-call]
        writer.add_scalar("loss", 0.5, 1)  # type: ignore[no-untyped-call]
        writer.add_hparams({"lr": 0.1, "kind": "adam"}, {"end": 1.0}, run_name="it")  # type: ignore[no-untyped-call]
    result = {
        Path(each["folder"]).name: each for each in imported("tensorboard", tmp_path / "logs")
    }
    assert read_run(Path(result["it"]["folder"])).config == {"lr": 0.1, "kind": "adam"}
    assert result["logs"]["steps"] == 1


def files(entry: dict[str, Any]) -> dict[str, bytes]:
    """Return the files named in the spool of an imported run."""
    folder = Path(entry["folder"])
    found = {each["path"]: each["sha256"] for each in Written(folder).of("artifact")}
    contents = {path: (folder / path).read_bytes() for path in found}
    assert {path: hashlib.sha256(each).hexdigest() for path, each in contents.items()} == found
    return contents


def test_tensorboards_pictures_and_sounds(imported: Import, tmp_path: Path) -> None:
    """Images and audio of PyTorch and of TensorFlow 2 are imported at their steps."""
    from torch.utils.tensorboard import SummaryWriter

    pixels = np.zeros((3, 4, 5), np.uint8)
    with SummaryWriter(tmp_path / "logs") as writer:  # type: ignore[no-untyped-call]
        writer.add_scalar("loss", 0.5, 0)  # type: ignore[no-untyped-call]
        for step in (0, 0, 7):
            writer.add_image("val/sample", pixels, step)  # type: ignore[no-untyped-call]
        writer.add_audio("speech", np.zeros((1, 100)), 7, 8000)  # type: ignore[no-untyped-call]
    metadata = SummaryMetadata(plugin_data={"plugin_name": "images"})
    tensor = TensorProto(dtype=7, string_val=[b"5", b"4", PNG, PNG])
    value = Summary.Value(tag="new", metadata=metadata, tensor=tensor)
    event_file(tmp_path / "logs", Event(step=3, summary=Summary(value=[value])))
    [result] = imported("tensorboard", tmp_path / "logs")
    assert (result["media"], result["left_out"]) == (6, {})
    kept = files(result)
    assert sorted(kept) == [
        "artifacts/step-00000001/val-sample-2.png",
        "artifacts/step-00000001/val-sample.png",
        "artifacts/step-00000004/new-2.png",
        "artifacts/step-00000004/new.png",
        "artifacts/step-00000008/speech.wav",
        "artifacts/step-00000008/val-sample.png",
    ]
    assert kept["artifacts/step-00000004/new.png"] == PNG


def test_media_are_bounded(
    imported: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Media files above the size limit are counted and reported."""
    monkeypatch.setattr(media, "MOST", 2)
    picture = Summary.Value(tag="x", image=Summary.Image(encoded_image_string=PNG))
    event_file(
        tmp_path / "logs",
        *(Event(step=step, summary=Summary(value=[picture])) for step in range(5)),
    )
    [result] = imported("tensorboard", tmp_path / "logs")
    assert (result["media"], result["left_out"]) == (2, {"png beyond the first 2 files": 3})


def test_wandbs_pictures(tmp_path: Path) -> None:
    """W&B's images are imported singly and in lists, except those outside of the run's folder."""
    inside = tmp_path / "files" / "media" / "images"
    inside.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        (inside / name).write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    (inside / "out.png").symlink_to(tmp_path / "secret.png")

    def history(kind: str, **entry: Any) -> dict[int, list[Any]]:
        items = {"_type": kind} | entry
        packed = [item(("val", "it", name), value) for name, value in items.items()]
        return {1: [item(("_step",), 4), *packed]}

    left_out: Counter[str] = Counter()
    several = ["media/images/a.png", "media/images/b.png", "../secret.png"]
    rows = (
        history("image-file", path="media/images/a.png", size=8),
        history("images/separated", filenames=several, count=3),
        history("image-file", path="media/images/out.png"),
        history("table-file", path="media/images/a.png"),
    )
    entry = [point for row in rows for point in wandb._row(row, tmp_path / "files", left_out)]
    assert entry == [Media("val.it", 4, None, PNG)] * 3
    assert left_out == {"images/separated": 1, "image-file": 1, "table-file": 1}


@pytest.mark.slow
def test_twice_as_many_of_wandbs_pictures_are_twice_the_work(tmp_path: Path) -> None:
    """The work for images grows linearly, because a W&B run may log a thousand names in a step."""

    def work(pictures: int) -> int:
        """Count the Python instructions that are executed."""
        entry = {"_type": "image-file", "path": "none.png"}
        paths = ((f"it {n}", name) for n in range(pictures) for name in entry)
        row = {1: [item(path, entry[path[-1]]) for path in paths]}
        executed = 0

        def count(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal executed
            frame.f_trace_opcodes = frame.f_code.co_filename == wandb.__file__
            executed += event == "opcode"
            return count

        traced_before = sys.gettrace()
        sys.settrace(count)
        try:
            list(wandb._row(row, tmp_path, Counter()))
        finally:
            sys.settrace(traced_before)
        return executed

    assert 0 < work(200) < 2.1 * work(100)


def test_wandbs_histograms_and_tables(imported: Import) -> None:
    """W&B's evenly binned histograms and tables are imported, and others counted as unsupported."""
    [result] = imported("wandb", RECORDED / "wandb-media")
    assert (result["media"], result["left_out"]) == (3, {"histogram": 1})
    kept = files(result)
    assert sorted(kept) == [
        "artifacts/step-00000001/weights.histogram.json",
        "artifacts/step-00000002/weights.histogram.json",
        "artifacts/step-00000003/val.sample.csv",
    ]
    table = kept["artifacts/step-00000003/val.sample.csv"].decode()
    cells = [["id", "text", "score"], ["1", 'a, "b"', "0.5"], ["2", "ü", ""], ["3", "=1+1", "nan"]]
    assert list(csv.reader(io.StringIO(table))) == cells
    histogram = json.loads(kept["artifacts/step-00000001/weights.histogram.json"])
    assert histogram.keys() == json.loads(as_file(Histogram([1.0, 2.0]))[1]).keys()
    assert histogram["counts"] == [2, 8, 11, 21, 22, 14, 12, 10]
    assert histogram["lowest"] == pytest.approx(-2.3250307746)
    assert histogram["highest"] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"[1, 2]", "table-file"),
        (b"{", "table-file"),
        (b'{"columns": ["a"], "data": [[1, 2]]}', "table-file"),
        (b'{"columns": ["a"], "data": [1]}', "table-file"),
        (b"[" * 100_000, "table-file"),
        (b"[]", "joined-table"),
    ],
    ids=["a list", "cut short", "wide row", "no row", "deep", "of another kind"],
)
def test_a_table_that_is_none_is_counted(tmp_path: Path, content: bytes, kind: str) -> None:
    """A table that is invalid, or outside of the folder by path, by link or in a linked folder,
    is counted.
    """
    folder, left_out = tmp_path / "files", Counter[str]()
    (folder / "media").mkdir(parents=True)
    (folder / "media/a.table.json").write_bytes(content)
    whole = b'{"columns": ["a"], "data": [[1]]}'
    (tmp_path / "secret.json").write_bytes(whole)
    (folder / "media/link.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "linked").symlink_to(tmp_path)
    secret = str(tmp_path / "secret.json")
    paths = ["media/a.table.json", "../secret.json", secret, "media/link.json", "a\0b", "x" * 5000]

    def row(path: str) -> dict[int, list[Any]]:
        return {1: [item(("it", name), value) for name, value in (("_type", kind), ("path", path))]}

    for path in paths:
        assert list(wandb._row(row(path), folder, left_out)) == []
    assert list(wandb._row(row("secret.json"), tmp_path / "linked", left_out)) == []
    assert left_out == {kind: len(paths) + 1}


@looped(
    "edges, counts",
    [
        ([0, 1], [1, 2]),
        ([0, 1, 1.5], [1, 2]),
        ([1, 1, 1], [1, 2]),
        ([2, 1, 0], [1, 2]),
        ([0, 1, "NaN"], [1, 2]),
        ([0, 1, 2], [1, -2]),
        ([0, 1, 2], [1, True]),
        ([0, 1, 2], [1, 10**400]),
        ([0], []),
        (list(range(514)), [1] * 513),
        (None, {"a": 1}),
    ],
)
def test_a_histogram_that_is_none_becomes_none(edges: Any, counts: Any) -> None:
    """An invalid histogram in an imported file is ignored."""
    assert media.histogram_of(edges, counts) is None
    assert media.histogram_of([0, 1, 2], [1, 2.5]) is not None


def item(path: tuple[str, ...], value: Any) -> bytes:
    """Return an item of W&B's history."""
    texts = [(2, part.encode()) for part in path] + [(16, json.dumps(value).encode())]
    parts = ((number << 3 | 2, text) for number, text in texts)
    return b"".join(varint(key) + varint(len(text)) + text for key, text in parts)


def varint(number: int) -> bytes:
    more = number >> 7
    return bytes([number & 0x7F | (0x80 if more else 0)]) + (varint(more) if more else b"")


@pytest.mark.parametrize("kind", ["folder", "database"])
def test_mlflows_pictures(imported: Import, tmp_path: Path, kind: str) -> None:
    """MLflow's images have the step of `log_image`, or 0; models and thumbnails are left out."""
    store = tmp_path / "mlruns"
    shutil.copytree(RECORDED / "mlruns", store)
    [meta] = [path for path in store.rglob("meta.yaml") if "run_name: first" in path.read_text()]
    run_id, path = meta.parent.name, store
    artifacts = meta.parent / "artifacts"
    if kind == "database":
        path = tmp_path / "mlflow.db"
        with sqlite3.connect(path) as database:
            database.executescript((RECORDED / "mlflow.sql").read_text())
            found = database.execute("SELECT run_uuid FROM runs WHERE name = 'first'").fetchone()
            run_id, artifacts = found[0], tmp_path / "kept" / found[0] / "artifacts"
            change = "UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?"
            database.execute(change, (artifacts.as_uri(), run_id))
        database.close()
    (artifacts / "images").mkdir(parents=True)
    logged = artifacts / "images" / "val#it%step%3%timestamp%1700000000000%0a.png"
    logged.write_bytes(PNG)
    logged.with_name(f"{logged.stem}%compressed.webp").write_bytes(b"RIFF")
    (artifacts / "curve.png").write_bytes(PNG)
    (artifacts / "model.pkl").write_bytes(b"x")
    [result] = [each for each in imported("mlflow", path) if each["media"]]
    names = ["artifacts/step-00000001/curve.png", "artifacts/step-00000004/val-it.png"]
    assert (sorted(files(result)), result["left_out"]) == (names, {"artifact": 1})


def test_a_damaged_event_file_is_named(imported: Import, tmp_path: Path) -> None:
    """A damaged event file is named and imported up to the damage, a truncated one to its end."""
    path = event_file(tmp_path / "logs", *(scalar("loss", step, 1.0) for step in range(1, 9)))
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-5])
    [result] = imported("tensorboard", tmp_path / "logs")
    assert result["steps"] == 7
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    [result] = imported("tensorboard", tmp_path / "logs", code=1)
    assert 0 < result["steps"] < 7


SCHEMA = pyarrow.schema(
    [
        ("project_id", pyarrow.string()),
        ("run_id", pyarrow.string()),
        ("attribute_path", pyarrow.string()),
        ("attribute_type", pyarrow.string()),
        ("step", pyarrow.decimal128(18, 6)),
        ("timestamp", pyarrow.timestamp("ms", tz="UTC")),
        ("int_value", pyarrow.int64()),
        ("float_value", pyarrow.float64()),
        ("string_value", pyarrow.string()),
        ("bool_value", pyarrow.bool_()),
        ("datetime_value", pyarrow.timestamp("ms", tz="UTC")),
        ("string_set_value", pyarrow.list_(pyarrow.string())),
        ("file_value", pyarrow.struct([("path", pyarrow.string())])),
        (
            "histogram_value",
            pyarrow.struct(
                [
                    ("type", pyarrow.string()),
                    ("edges", pyarrow.list_(pyarrow.float64())),
                    ("values", pyarrow.list_(pyarrow.float64())),
                ]
            ),
        ),
    ]
)


def export_of_neptune(folder: Path, name: str, rows: list[dict[str, Any]], parts: int = 1) -> None:
    """Write a run as Neptune's exporter does."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"project_id": "ada/digits", "run_id": name} | row for row in rows]
    for part in range(parts):
        table = pyarrow.Table.from_pylist(rows[part::parts], schema=SCHEMA)
        parquet.write_table(table, folder / f"{name}_part_{part}.parquet", compression="snappy")


def test_neptunes_runs(imported: Import, tmp_path: Path) -> None:
    """All parts of a Neptune run become one run; the exporter's metadata are imported."""
    began = datetime.fromtimestamp(MOMENT, UTC)
    rows: list[dict[str, Any]] = [
        {"attribute_path": path, "attribute_type": kind, f"{kind}_value": value}
        for path, kind, value in [
            ("sys/name", "string", "baseline"),
            ("sys/creation_time", "datetime", began),
            ("sys/tags", "string_set", ["b", "a"]),
            ("sys/failed", "bool", True),
            ("config/lr", "float", 0.1),
            ("config/layers", "int", 3),
        ]
    ]
    rows += [
        {
            "attribute_path": path,
            "attribute_type": "float_series",
            "step": Decimal(step),
            "timestamp": datetime.fromtimestamp(MOMENT + 2 * step, UTC),
            "float_value": 1 / (step + 1),
        }
        for step in range(4)
        for path in ("metrics/accuracy", "train/loss")
    ]
    rows.append(rows[-1] | {"step": Decimal("3.5")})
    rows.append({"attribute_path": "model", "attribute_type": "file"})
    export_of_neptune(tmp_path / "data" / "digits-1a", "RUN-1", rows, parts=2)
    (tmp_path / "data" / "digits-1a" / "RUN-2_part_0.parquet").write_text("no Parquet")
    [result] = imported("neptune", tmp_path / "data", "--project", "other", code=1)
    assert result["left_out"] == {"file": 1, "value between two steps": 1}
    run = read_run(Path(result["folder"]))
    assert (run.name, run.project, run.tags) == ("baseline", "other", ["a", "b"])
    assert run.config == {"config": {"lr": 0.1, "layers": 3}}
    assert run.started == "2023-11-14T22:13:20.000+00:00"
    written = Written(Path(result["folder"]))
    assert written.steps["step"].tolist() == [1, 2, 3, 4]
    assert written.steps["elapsed_ms"].tolist() == [0, 2000, 4000, 6000]
    named = metrics(written)
    assert sorted(named["metrics/accuracy"]) == [(s, 1 / s) for s in range(1, 5)]
    outcome = json.loads((Path(result["folder"]) / "outcome-1.json").read_text())
    assert outcome["status"] == "failed"


def test_neptunes_files(imported: Import, tmp_path: Path) -> None:
    """Neptune's files are next to the data, by project; a file without a step is at step 0.

    Files outside of the project's folder, and those missing in the export, are left out.
    """
    own = tmp_path / "files" / "digits-1a"
    run = own / "ada/digits/RUN-1"
    (run / "samples").mkdir(parents=True)
    (run / "source_code/deep").mkdir(parents=True)
    (run / "samples/3_000000.png").write_bytes(PNG)
    (run / "model").write_bytes(b"weights")
    (run / "notes.txt").write_text("a note")
    (run / "source_code/deep/train.py").write_text("pass")
    (tmp_path / "secret").write_text("secret")
    (run / "source_code/link").symlink_to(tmp_path / "secret")
    (run / "out").symlink_to(tmp_path)

    def value(kind: str, path: str, file: str, step: Any = None) -> dict[str, Any]:
        named = {"attribute_path": path, "attribute_type": kind, "file_value": {"path": file}}
        return named | {"step": step}

    inside = "ada/digits/RUN-1"
    histogram = {"type": "COUNTING", "edges": [0.0, 0.5, 1.0], "values": [3.0, 4.0]}
    of_series = {"attribute_path": "weights", "attribute_type": "histogram_series"}
    rows = [
        value("file_series", "val/samples", f"{inside}/samples/3_000000.png", Decimal(3)),
        value("file", "model", f"{inside}/model"),
        value("file", "notes.txt", f"{inside}/notes.txt"),
        value("file_set", "source_code", f"{inside}/source_code"),
        of_series | {"step": Decimal(2), "histogram_value": histogram},
        of_series | {"step": Decimal(3), "histogram_value": histogram | {"type": "DENSITY"}},
        *(value("file", "bad", path) for path in ("../../secret", str(tmp_path / "secret"))),
        *(value("file", "bad", path) for path in (f"{inside}/out/secret", f"{inside}/gone", "")),
        value("file_set", "bad", f"{inside}/out"),
        value("file_set", "bad", "../.."),
    ]
    export_of_neptune(tmp_path / "data" / "digits-1a", "RUN-1", rows)
    [result] = imported("neptune", tmp_path / "data")
    assert result["left_out"] == {"file": 5, "file_set": 3, "histogram_series": 1}
    kept = files(result)
    assert {path: each for path, each in kept.items() if not path.endswith("json")} == {
        "artifacts/step-00000000/model.bin": b"weights",
        "artifacts/step-00000000/notes.txt": b"a note",
        "artifacts/step-00000000/source_code-deep-train.py": b"pass",
        "artifacts/step-00000003/val-samples.png": PNG,
    }
    assert json.loads(kept["artifacts/step-00000002/weights.histogram.json"]) == {
        "lowest": 0.0,
        "highest": 1.0,
        "counts": [3, 4],
        "nonfinite": 0,
    }


def test_neptunes_files_behind_a_link_are_left_out(imported: Import, tmp_path: Path) -> None:
    """Files behind a link are left out, since a foreign export must not read this machine."""
    (tmp_path / "private" / "digits-1a").mkdir(parents=True)
    (tmp_path / "private" / "digits-1a" / "key").write_text("secret")
    (tmp_path / "files").symlink_to(tmp_path / "private")
    row = {"attribute_path": "it", "attribute_type": "file", "file_value": {"path": "key"}}
    export_of_neptune(tmp_path / "data" / "digits-1a", "RUN-1", [row])
    [result] = imported("neptune", tmp_path / "data")
    assert (result["media"], result["left_out"]) == (0, {"file": 1})


def test_the_same_twice_is_one_run(imported: Import, tmp_path: Path) -> None:
    """A second import changes nothing that exists; new data become the run's next attempt."""
    logs = tmp_path / "logs"
    event_file(logs, scalar("loss", 1, 0.5))
    [first] = imported("tensorboard", logs)
    [again] = imported("tensorboard", logs)
    assert (first["new"], again["new"]) == (True, False)
    assert first["folder"] == again["folder"]
    path = next(logs.glob("*tfevents*"))
    more = event_file(tmp_path / "more", scalar("loss", 2, 0.25))
    path.write_bytes(path.read_bytes() + more.read_bytes())
    [grown] = imported("tensorboard", logs)
    assert (grown["new"], grown["folder"], grown["steps"]) == (True, first["folder"], 2)
    run = read_run(Path(first["folder"]))
    assert [each.attempt for each in run.attempts] == [1, 2]
    [resumed] = Written(Path(first["folder"])).of("resumed")
    assert resumed["step"] == 0


def test_an_import_that_was_broken_off_is_done_over(imported: Import, tmp_path: Path) -> None:
    """The remains of an interrupted import are no run, and the next import is complete."""
    event_file(tmp_path / "logs", scalar("loss", 1, 0.5))
    left = tmp_path / "halfstep" / "logs" / "spool"
    left.mkdir(parents=True)
    (left / "1-0.spool").write_bytes(b"half")
    [result] = imported("tensorboard", tmp_path / "logs")
    assert result["folder"] == str(left.parent)
    assert Written(left.parent).steps["loss"].tolist() == [0.5]


def test_names_that_are_evident() -> None:
    """Metric names match in any case and with any separator; a training loss has precedence."""
    assert columns_of(["Train/Loss", "loss", "val_loss", "lr", "GRAD NORM"]) == {
        "Train/Loss": "loss",
        "lr": "lr",
        "GRAD NORM": "grad_norm",
    }
    assert columns_of(["scale/loss_scale"]) == {"scale/loss_scale": "scale"}
    assert columns_of(["accuracy", "scale"]) == {}


def test_a_path_without_runs_is_reported(
    imported: Import, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path without runs is reported, and a missing path is a usage error."""
    assert imported("wandb", tmp_path, code=1) == []
    assert imported("wandb", tmp_path / "away", code=2) == []
