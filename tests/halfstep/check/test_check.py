"""The command `halfstep check`, on scripts in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

SECONDS = 120
SMALL_EPS = """\
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Linear(8, 8, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
for step in range(1, 31):
    x = torch.randn(4, 8)
    if step == 7:
        x[0] = 0.0
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (1 - F.normalize(net(x), dim=-1)[:, 0].float()).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print("step", step, *sys.argv[1:])
"""
LINE = 17  # of F.normalize
HEALTHY = SMALL_EPS.replace("    if step == 7:\n        x[0] = 0.0\n", "")
CLIPPED = HEALTHY.replace(
    "    scaler.step(",
    "    nn.utils.clip_grad_norm_(net.parameters(), 0.1)\n    scaler.step(",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an overflowing script, one with a wrong call, and a healthy one."""
    (tmp_path / "train.py").write_text(SMALL_EPS)
    (tmp_path / "healthy.py").write_text(HEALTHY)
    (tmp_path / "clipped.py").write_text(CLIPPED)
    return tmp_path


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `halfstep check` in a folder."""
    command = [sys.executable, "-m", "halfstep.cli.main", "check", *words]
    return warm.run(command, cwd=folder, timeout=SECONDS)


def report_of(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the JSON that a check has printed."""
    return dict(json.loads(ended.stdout))


def faults(report: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return kind, file and line of each mistake."""
    return [(row["kind"], row["file"], row["line"]) for row in report["rows"] if row["is_fault"]]


def test_a_mistake_has_its_line_its_values_and_exit_code_1(folder: Path) -> None:
    """A mistake is reported with its line, below the output of the script."""
    ended = check(folder, "train.py", "--lr", "1")
    assert ended.returncode == 1
    assert "step 19 --lr 1\n" in ended.stdout
    assert "step 20" not in ended.stdout  # the script ends with the last call of step 20
    assert f"train.py:{LINE}  A value is rounded away in fp16" in ended.stdout
    assert "1e-12 in fp32 becomes 0 by rounding" in ended.stdout


def test_json_is_all_of_stdout(folder: Path) -> None:
    """With --json stdout has only the report, and the script's output goes to stderr."""
    ended = check(folder, "--json", "train.py")
    report = report_of(ended)
    assert faults(report) == [("rounding", "train.py", LINE)]
    assert report["steps"] == 20
    [row] = [row for row in report["rows"] if row["is_fault"]]
    assert row["steps"] == [7]
    assert row["loss_fp32"] < 2
    assert row["source"] == "F.normalize(net(x), dim=-1)"
    assert "step 19" in ended.stderr


def test_a_healthy_script_ends_with_0(folder: Path) -> None:
    """A healthy script ends with exit code 0; --steps 0 checks all of its steps."""
    ended = check(folder, "--json", "--steps", "0", "healthy.py")
    assert ended.returncode == 0
    assert (faults(report_of(ended)), report_of(ended)["steps"]) == ([], 30)


def test_every_nth_step_is_checked(folder: Path) -> None:
    """With --every N only every Nth step is checked."""
    third, fourth = (check(folder, "--json", "--every", n, "train.py") for n in ("3", "4"))
    assert (third.returncode, report_of(third)["steps"]) == (1, 10)
    assert (fourth.returncode, report_of(fourth)["steps"]) == (0, 8)


def test_until_skip_ends_with_the_first_nonfinite_step(folder: Path) -> None:
    ended = check(folder, "--json", "--steps", "0", "--until-skip", "train.py")
    assert report_of(ended)["steps"] == 7


def test_a_mistake_of_the_calls_has_the_line_of_the_call(folder: Path) -> None:
    ended = check(folder, "--json", "clipped.py")
    line = CLIPPED.splitlines().index("    nn.utils.clip_grad_norm_(net.parameters(), 0.1)") + 1
    assert ended.returncode == 1
    assert faults(report_of(ended))[0] == ("scaled_gradients_clipped", "clipped.py", line)


def test_github_has_an_annotation_per_finding(folder: Path) -> None:
    ended = check(folder, "--format", "github", "train.py")
    [first, *_] = ended.stdout.splitlines()
    assert first.startswith(f"::error file=train.py,line={LINE},title=A value is rounded away")
    assert ended.returncode == 1


def test_a_baseline_leaves_out_what_is_known(folder: Path) -> None:
    """A finding in the baseline is left out even if its line has moved."""
    before = check(folder, "--json", "train.py")
    (folder / "known.json").write_text(before.stdout)
    (folder / "train.py").write_text("# moved\n" + SMALL_EPS)
    after = check(folder, "--json", "--baseline", "known.json", "train.py")
    assert (after.returncode, faults(report_of(after))) == (0, [])
    assert report_of(after)["known"] == len(report_of(before)["rows"])


@pytest.mark.parametrize("text", ["{", "[]", '{"script": 1}'])
def test_a_baseline_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "known.json").write_text(text)
    ended = check(folder, "--baseline", "known.json", "train.py")
    assert ended.returncode == 2
    assert "it is no report of `halfstep check --json`" in ended.stderr


def test_a_baseline_that_is_missing_is_named(folder: Path) -> None:
    ended = check(folder, "--baseline", "absent.json", "train.py")
    assert ended.returncode == 2
    assert "absent.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_module_runs_with_m(folder: Path) -> None:
    """With -m a module is run, and its relative imports work."""
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("")
    (folder / "pkg" / "size.py").write_text("LR = 0.1\n")
    source = HEALTHY.replace("lr=0.1", "lr=LR").replace(
        "import sys", "from .size import LR\nimport sys"
    )
    (folder / "pkg" / "train.py").write_text(source)
    ended = check(folder, "--json", "-m", "pkg.train")
    assert (ended.returncode, report_of(ended)["steps"]) == (0, 20)


@pytest.mark.parametrize(
    ("end", "result"),
    [
        ("raise ValueError('broken')", "ValueError: broken"),
        ("sys.exit(3)", "its script ended with an error"),
        ("sys.exit('no data')", "its script ended with an error"),
    ],
)
def test_a_script_that_fails_is_reported_and_the_check_incomplete(
    folder: Path, end: str, result: str
) -> None:
    """If the script raises, the check prints its findings until then, and is incomplete."""
    (folder / "train.py").write_text(SMALL_EPS + f"    if step == 9:\n        {end}\n")
    ended = check(folder, "--json", "train.py")
    assert ended.returncode == 1
    assert result in ended.stderr
    assert faults(report_of(ended)) == [("rounding", "train.py", LINE)]
    assert report_of(ended)["steps"] == 9


def test_a_script_without_a_step_is_no_success(folder: Path) -> None:
    (folder / "train.py").write_text("print('nothing')\n")
    ended = check(folder, "train.py")
    assert ended.returncode == 1
    assert "no optimizer stepped" in ended.stderr


def test_a_missing_script_is_named(folder: Path) -> None:
    ended = check(folder, "absent.py")
    assert ended.returncode == 2
    assert "absent.py is no file" in ended.stderr


def test_a_reproduction_shows_the_mistake_with_torch_alone(folder: Path) -> None:
    """The printed reproduction runs the operator unchanged and in fp32, from its step's inputs."""
    ended = check(folder, "--reproduce", "bug", "train.py")
    path = folder / "bug" / f"train-{LINE}-div.py"
    assert f"Reproduction: {path.relative_to(folder)}" in ended.stdout
    assert "halfstep" not in path.read_text().replace("`halfstep check --reproduce`", "")
    shown = warm.run([sys.executable, str(path)], timeout=SECONDS).stdout
    assert "as it is: 8 of 32 elements are not finite" in shown
    assert "in fp32: 0 of 32 elements are not finite" in shown
