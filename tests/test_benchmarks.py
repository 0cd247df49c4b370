"""Shared parts of benchmarks, and the measurements of the most important ones."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_loops, gpu_performance, many_names, peers, synthetic, telemetry_cost
from db.database import Database
from db.runs import runs
from halfstep.telemetry.spool import SpoolReader
from tests.marks import looped
from tests.spool_made import events_of

pytestmark = pytest.mark.slow

TOLD = {"headroom": "headroom", "layer norms": "layer_norms", "histogram": "histogram"}


def test_the_run_that_benchmarks_record_takes_steps(database: Database) -> None:
    """The benchmarks' run takes steps: claims and records succeed, for several at once."""
    run_id, _ = synthetic.start_run(database), synthetic.start_run(database)
    for flush in synthetic.flushes(1000, 500):
        synthetic.record(database, run_id, flush)
    with database.reading() as session:
        run = runs.get(session, run_id)
    assert (run.step, run.skipped) == (1000, 2)


@pytest.mark.extended
def test_environment_is_made_again_for_other_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment with another pin of a requirement is made again."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    installed = tmp_path / "tool" / "installed"
    installed.parent.mkdir()
    installed.write_text(str(("tool==1",)))
    assert peers.python_with("tool", "tool==1") == tmp_path / "tool" / "bin" / "python"
    assert peers.python_with("tool", str(tmp_path / "missing")) is None
    assert not installed.exists()


@pytest.mark.extended
def test_many_names_are_sent_and_every_address_answers(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark of many metric names runs with a few names, and every URL responds."""
    monkeypatch.setattr(many_names, "NAMES", 20)
    _seconds, _wait, edits, answers = many_names.measure(database)
    assert edits > 0
    assert answers.keys() == many_names.ASKED.keys()


@pytest.mark.usefixtures("nothing_compiled")
def test_telemetrys_cost_is_that_of_each_diagnosis_and_no_bit_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of the telemetry benchmark measures its diagnosis, and all end with the same
    weights.
    """
    turns = 2
    monkeypatch.setattr(telemetry_cost, "WARM_UP_TURNS", 1)
    _, measured, costs = telemetry_cost.measure(
        "fp32", torch.device("cpu"), tmp_path, turns=turns, seconds=1000
    )
    assert measured == turns
    assert list(costs) == ["telemetry", *TOLD, "all"]
    assert all(cost.is_same for cost in costs.values())
    all_turns = turns + telemetry_cost.WARM_UP_TURNS
    for name in costs:
        result = [each["event"] for each in events_of(SpoolReader(tmp_path / name).poll())]
        looks = TOLD.values() if name == "all" else [TOLD[name]] if name in TOLD else []
        per_turn = {"layer_norms": telemetry_cost.TURN_STEPS}
        assert {kind: result.count(kind) for kind in set(result)} == {
            kind: all_turns * per_turn.get(kind, 1) for kind in looks
        }


def read_printed_rows(module: str, *options: str) -> list[list[str]]:
    """Run a GPU benchmark on a CPU at small sizes; return its table rows' cells."""
    command = [sys.executable, "-m", f"benchmarks.{module}", "--device", "cpu", "--small", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("|")]
    return [line.strip("| ").replace(" |  |", " | – |").split(" | ") for line in lines]


@pytest.mark.extended
def test_gpu_performance_measures_each_precision_loop_and_mode() -> None:
    """On a CPU all loops and modes are measured except CUDA graphs, with the reason."""
    rows = read_printed_rows("gpu_performance", "--modes", "eager,graph", "--seconds", "1200")
    names = [precision.name for precision in gpu_loops.PRECISIONS]
    times = {tuple(row[:3]): row[3] for row in rows}
    for loop, name in product(gpu_loops.LOOPS, names):
        assert float(times[name, loop, "eager"]) > 0
    for name in names:
        assert times[name, "bare", "graph"].endswith("a CUDA graph needs a CUDA device, not cpu")
    overhead = [row for row in rows if "batch" in row[0]]
    eager = [row for row in overhead if row[2] == "eager"]
    assert [row[1] for row in eager] == [*gpu_loops.LOOPS] * 2
    assert all(float(row[3]) > 0 for row in eager)
    assert all("≤ 1.03" in row[-1] for row in eager if row[1] != "bare")
    graphed = [row for row in overhead if row[2] == "graph"]
    assert [(row[1], row[3][:12]) for row in graphed] == [("product", "not measured")] * 2


def test_gpu_performance_reports_what_its_budget_leaves_out() -> None:
    """The GPU benchmark has a row for every configuration even without any time."""
    settings = gpu_performance.Settings(
        torch.device("cpu"), 0.0, gpu_loops.Size(8, 8), gpu_loops.Size(8, 8)
    )
    case = gpu_loops.Case(gpu_loops.FP32, "bare", settings.size)
    assert gpu_performance.measure([case], settings) == {
        case: gpu_performance.Result(left_out="the time was over")
    }


@pytest.mark.extended
def test_gpu_launches_counts_those_of_each_loop() -> None:
    """A step of each loop has at least the bare loop's operators."""
    _header, _line, *rows = read_printed_rows("gpu_launches")
    counts = {tuple(row[:3]): float(row[3]) for row in rows}
    assert len(counts) == len(gpu_loops.LOOPS) * 4
    assert all(
        count >= counts["bare", name, clip] > 0 for (_loop, name, clip), count in counts.items()
    )


@looped(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("AMD EPYC", None),
    ],
)
def test_peaks_are_found_by_the_devices_name(name: str, peak: float | None) -> None:
    assert gpu_performance.peak_of(name, gpu_loops.BF16) == peak
