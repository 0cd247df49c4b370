"""DeepSpeed's ZeRO in fp16 with `halfstep.deepspeed.watch`, compared with the unwatched loop."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.telemetry.flags import SKIPPED
from tests.frameworks.deepspeed_made import have_it_train_on_a_cpu, train
from tests.frameworks.reference import read_written


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Train in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        have_it_train_on_a_cpu(patch)
        store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("meet") / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("stage", "clip", "accumulation"), [(1, 0.0, 1), (2, 0.0, 1), (1, 1.0, 1), (1, 0.0, 2)]
)
def test_deepspeed_is_recorded_exactly(
    tmp_path: Path, stage: int, clip: float, accumulation: int
) -> None:
    """Scales, skips and culprits equal the engine's, and weights those of an unwatched loop."""
    bare, without = train(None, stage=stage, clip=clip, accumulation=accumulation)
    watched, with_us = train(tmp_path, stage=stage, clip=clip, accumulation=accumulation)
    assert watched == bare
    assert all(map(torch.equal, with_us, without))
    check(tmp_path, watched)


@pytest.mark.parametrize("stage", [1, 2])
def test_two_ranks_of_deepspeed_are_recorded_exactly(tmp_path: Path, stage: int) -> None:
    """The first of two ranks records the scales and skips of both, and its partition's culprits."""
    ranks = Path(__file__).with_name("deepspeed_ranks.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ranks.parents[2]), "OMP_NUM_THREADS": "1"}
    environment.pop("LOCAL_RANK", None)
    command = [*torchrun, str(ranks), str(tmp_path), str(stage)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    found = torch.load(tmp_path / "rank-0.pt")
    assert found["watched"] == found["bare"]
    assert all(map(torch.equal, found["with_us"], found["without"]))
    other = torch.load(tmp_path / "rank-1.pt")["watched"]
    assert [step[:2] for step in found["watched"]] == [step[:2] for step in other]
    assert [names for *_, names in found["watched"]] != [names for *_, names in other]
    check(tmp_path / "run", found["watched"])


def check(folder: Path, watched: list[Any]) -> None:
    """Compare the recorded steps with the engine's reports."""
    steps, events = read_written(folder)
    skipped = [overflow for _, overflow, _ in watched]
    assert 2 <= sum(skipped) < len(skipped)
    assert steps["scale"].tolist() == [scale for scale, _, _ in watched]
    assert ((steps["flags"] & SKIPPED) != 0).tolist() == skipped
    assert (steps["loss"] > 0).all()
    result = {
        e["step"]: [c["name"] for c in e["culprits"]] for e in events if e.get("kind") == "skip"
    }
    assert result == {step: names for step, (_, skip, names) in enumerate(watched, 1) if skip}
