import hashlib
import weakref
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils._pytree import tree_leaves

from tests.trainer.conftest import Pair, Regression, assert_same_bits
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.checkpoints.weights import write_weights
from trainer.distributed.ranks import Ranks
from trainer.recipes.digits import Digits

# Dropout, augmentation, a schedule, accumulation over epochs' ends, and a scale that moves.
VALUES = {
    "training": {
        "steps": 40,
        "batch_size": 48,
        "accumulation_steps": 2,
        "schedule": "cosine",
        "warmup_steps": 5,
    },
    "scaler": {"growth_interval": 7},
    "checkpoints": {"every_steps": 20},
    "recipe": {"dropout": 0.2, "shift_pixels": 1},
}
EXACT = ["step", "loss", "scale", "grad_norm", "grad_norm_clipped", "lr", "flags"]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_a_resumed_run_is_bit_exact(run_loop, tmp_path, fused):
    """A run of 40 steps, and one of 20 + 20 from a checkpoint, have the same bits and events."""
    values = VALUES | {"training": VALUES["training"] | {"fused": fused}}
    straight = run_loop(Digits, values, folder=tmp_path / "a")
    first = straight.of("checkpoint", step=20)[0]["files"][0]
    torch.rand(100)  # the process that resumes has another past
    np.random.rand(7)
    resumed = run_loop(
        Digits, values, folder=tmp_path / "b", resume=tmp_path / "a" / first["path"].split("/")[1]
    )
    assert resumed.of("resumed") == [{"event": "resumed", "step": 20, "exact": True, "notes": []}]
    assert resumed.records["step"].tolist() == list(range(21, 41))
    for name in EXACT:
        assert resumed.records[name].tobytes() == straight.records[name][20:].tobytes(), name
    ends = [checkpoint.load(tmp_path / side / "step-00000040.pt") for side in "ab"]
    assert_same_bits(*ends)
    assert ends[0]["progress"]["skipped"] == len(straight.list_skipped()) > 0
    later = [event for event in straight.of("scaler") if event["step"] > 20]
    assert resumed.of("scaler") == later


def test_a_checkpoint_holds_what_the_next_step_needs(run_loop, tmp_path):
    """A checkpoint loads without running code, and names its parts."""
    run = run_loop(Pair, {"training": {"steps": 3}}, folder=tmp_path)
    state = torch.load(tmp_path / "step-00000003.pt", weights_only=True)
    assert state["progress"] == {
        "step": 3,
        "position": 24,
        "skipped": len(run.list_skipped()),
        "applied": 3 - len(run.list_skipped()),
        "retried": 0,
    }
    assert state["scaler"]["_growth_tracker"] >= 0
    assert state["modules"].keys() == {"model", "second"}
    assert state["optimizers"].keys() == {"sgd", "adam"}
    assert state["config"]["training"]["steps"] == 3
    assert {"python version", "torch version", "thread count"} <= state["environment"].keys()


@pytest.mark.slow
def test_a_moving_average_among_the_modules_is_kept(run_loop, tmp_path):
    """The average is resumed to the last bit and has a file of its own. Its `state_dict()` is
    empty, so no step that replay watches copies it.
    """

    class Averaged(Pair):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.modules["average"] = deepcopy(self.modules["model"]).requires_grad_(False)

        def after_step(self):
            average, model = self.modules["average"], self.modules["model"]
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)

    values = {"training": {"steps": 60}, "checkpoints": {"every_steps": 30}}
    straight = run_loop(Averaged, values, folder=tmp_path / "a")
    half = tmp_path / "a/step-00000030.pt"
    resumed = run_loop(Averaged, values, folder=tmp_path / "b", resume=half)
    assert_same_bits(resumed.weights(), straight.weights())
    assert not torch.equal(
        straight.weights()["average.0.weight"], straight.weights()["model.0.weight"]
    )
    assert (tmp_path / "b/step-00000060.average.safetensors").is_file()
    assert straight.recipe.state_dict() == {}


def test_files_are_described_as_they_are(run_loop, tmp_path):
    """A checkpoint's event has size and SHA-256 of its files, and no partial file is left."""
    run = run_loop(Regression, {"training": {"steps": 2}}, folder=tmp_path)
    [event] = run.of("checkpoint")
    assert [file["kind"] for file in event["files"]] == ["checkpoint", "weights"]
    for file in event["files"]:
        data = (tmp_path / file["path"].split("/")[1]).read_bytes()
        assert file["size_bytes"] == len(data)
        assert file["sha256"] == hashlib.sha256(data).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000002.pt",
        "step-00000002.safetensors",
    ]


def test_weights_are_saved_as_safetensors_too(run_loop, tmp_path):
    """A .safetensors file loads strictly into the module, and its `format` names the framework."""
    run = run_loop(Regression, {"training": {"steps": 2}}, folder=tmp_path)
    path = tmp_path / "step-00000002.safetensors"
    model = run.recipe.modules["model"]
    assert_same_bits(safetensors.torch.load_file(path), dict(model.state_dict()))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_of_several_modules_are_files_of_their_own(run_loop, tmp_path):
    """Weights of several modules are separate files, with the names that their module uses."""
    run = run_loop(Pair, {"training": {"steps": 2}}, folder=tmp_path)
    [event] = run.of("checkpoint")
    kinds = [file["kind"] for file in event["files"]]
    assert kinds == ["checkpoint", "weights.model", "weights.second"]
    for name, module in run.recipe.modules.items():
        weights = safetensors.torch.load_file(tmp_path / f"step-00000002.{name}.safetensors")
        module.load_state_dict(weights, strict=True)


def test_tied_and_strided_weights_load_strictly(run_loop, tmp_path):
    """Tied weights are saved under both names, channels-last ones as well, and load strictly."""

    class Tied(Regression):
        def __init__(self, config, device):
            super().__init__(config, device)
            model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
            model.append(torch.nn.Linear(6, 1))
            model[1].weight = model[0].weight
            self.modules["model"] = model
            self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=0.01)}

    run = run_loop(Tied, {"training": {"steps": 2, "fused": False}}, folder=tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "step-00000002.safetensors")
    assert weights.keys() == run.recipe.modules["model"].state_dict().keys()
    convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    with (tmp_path / "x.safetensors").open("wb") as file:
        write_weights(convolution.state_dict(), file)
    assert_same_bits(
        safetensors.torch.load_file(tmp_path / "x.safetensors"), dict(convolution.state_dict())
    )


@pytest.fixture
def saved(run_loop, tmp_path):
    """A checkpoint of three steps."""
    run_loop(Regression, {"training": {"steps": 3}}, folder=tmp_path)
    return tmp_path / "step-00000003.pt"


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_checkpoint_that_was_cut_short_is_rejected(saved, keep):
    """The error for a truncated checkpoint names the file and the damage."""
    data = saved.read_bytes()
    saved.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises(CheckpointError, match=r"step-00000003\.pt is cut short"):
        checkpoint.load(saved)


def test_a_checkpoint_with_a_flipped_bit_is_rejected(saved):
    """A flipped bit in a checkpoint is rejected, although torch.load would read altered weights."""
    weight = checkpoint.load(saved)["modules"]["model"]["0.weight"].numpy().tobytes()
    data = bytearray(saved.read_bytes())
    data[data.index(weight) + 5] ^= 1
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match="is altered: the checksum of its part"):
        checkpoint.load(saved)


def test_a_checkpoint_with_another_checksum_is_rejected(saved):
    """A checkpoint that does not match the database's checksum is rejected."""
    checkpoint.load(saved, hashlib.sha256(saved.read_bytes()).hexdigest())
    with pytest.raises(CheckpointError, match="its SHA-256 is"):
        checkpoint.load(saved, "0" * 64)


def test_files_that_are_no_checkpoints_are_rejected(tmp_path):
    """A missing file and one that is no checkpoint are rejected with separate messages."""
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(tmp_path / "none.pt")
    torch.save({"weights": torch.ones(2)}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match="not a Halfstep checkpoint"):
        checkpoint.load(tmp_path / "foreign.pt")


def test_a_resume_under_other_circumstances_says_so(run_loop, saved, monkeypatch):
    """A resumed run continues, and names each difference that may change the bits."""
    monkeypatch.setattr("trainer.machine.device_name", lambda device: "another processor")
    values = {"training": {"steps": 4}, "recipe": {"learning_rate": 0.5}}
    run = run_loop(Regression, values, resume=saved)
    [event] = run.of("resumed")
    assert not event["exact"]
    assert any(note.endswith(", is another processor") for note in event["notes"])
    assert "training.steps was 3, is 4" in event["notes"]
    assert "recipe.learning_rate was 0.001, is 0.5" in event["notes"]
    assert run.records["step"].tolist() == [4]
    assert run.records["lr"].tolist() == [0.5]


def test_without_determinism_no_resume_is_exact(run_loop, tmp_path):
    """Without determinism no resume is exact, even with equal settings on the same device."""
    values = {"training": {"steps": 3, "deterministic": False}, "checkpoints": {"every_steps": 2}}
    run_loop(Regression, values, folder=tmp_path)
    run = run_loop(Regression, values, resume=tmp_path / "step-00000002.pt")
    [event] = run.of("resumed")
    assert not event["exact"]
    assert event["notes"] == [
        "training.deterministic is off, so results may differ in the last bits"
    ]


def test_a_checkpoint_of_another_model_is_rejected(run_loop, saved):
    """The message about a checkpoint of another recipe names both recipes."""
    with pytest.raises(CheckpointError, match=r"recipe regression, does not fit recipe digits"):
        run_loop(Digits, resume=saved)


def test_fused_and_unfused_states_do_not_mix(run_loop, saved):
    """Fused and unfused optimizer states do not mix: PyTorch would raise later or silently wait."""
    with pytest.raises(CheckpointError, match=r"saved with training\.fused True"):
        run_loop(Regression, {"training": {"fused": False}}, resume=saved)


@pytest.mark.slow
def test_a_shorter_growth_interval_still_grows(run_loop, tmp_path):
    """A resumed scale grows at a shorter interval even if the growth tracker is beyond it."""
    values = {"scaler": {"init_scale": 2.0, "growth_interval": 100}, "training": {"steps": 30}}
    run_loop(Digits, values, folder=tmp_path)
    values = {"scaler": {"init_scale": 2.0, "growth_interval": 10}, "training": {"steps": 45}}
    run = run_loop(Digits, values, resume=tmp_path / "step-00000030.pt")
    assert run.of("scaler", kind="growth")[0]["step"] == 31


def test_a_folder_without_write_permission_is_named(run_loop, tmp_path):
    """The error for a checkpoint folder without write permission names the folder."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        run_loop(Regression, folder=tmp_path / "file")


def test_a_checkpoint_of_a_version_with_fewer_settings_resumes_exactly(run_loop, saved, tmp_path):
    """A checkpoint without newer settings resumes with their defaults; changed ones are named."""
    state = torch.load(saved, weights_only=True)
    del state["config"]["spike"], state["parts"]["spikes"]
    old = tmp_path / "old" / saved.name
    old.parent.mkdir()
    torch.save(state, old)
    values = {"training": {"steps": 3}}
    [result] = run_loop(Regression, values, resume=old).of("resumed")
    assert result["exact"], result["notes"]
    [result] = run_loop(Regression, values | {"spike": {"threshold": 5.0}}, resume=old).of(
        "resumed"
    )
    assert result["notes"] == ["spike.threshold was 10.0, is 5.0"]


@pytest.mark.slow
def test_a_resumed_state_is_mapped_and_released(run_loop, tmp_path, monkeypatch):
    """A checkpoint is memory-mapped while it is loaded, and after the first step nothing of it
    is left. The bits are those of an uninterrupted run.
    """
    states, seen = [], []
    load = checkpoint.load

    def note_load(path, **options):
        state = load(path, **options)
        states.extend(weakref.ref(leaf) for leaf in tree_leaves(state) if torch.is_tensor(leaf))
        return state

    class Keeping(Pair):
        def __init__(self, config, device):
            super().__init__(config, device)
            self.kept = torch.zeros(1)

        def state_dict(self):
            return {"kept": self.kept}

        def load_state_dict(self, state):
            seen.append(private_bytes(half))
            self.kept = state["kept"]

        def training_step(self, batch):
            if len(seen) == 1:
                seen.append(private_bytes(half))
                seen.append(sum(each() is not None for each in states))
            self.kept = self.kept + 1
            yield from super().training_step(batch)

    values = {"training": {"steps": 20, "ema_decay": 0.9}, "checkpoints": {"every_steps": 10}}
    half = tmp_path / "a/step-00000010.pt"
    straight = run_loop(Keeping, values, folder=tmp_path / "a")
    seen.clear()
    monkeypatch.setattr(checkpoint, "load", note_load)
    resumed = run_loop(Keeping, values, folder=tmp_path / "b", resume=half)
    assert len(states) > 20
    assert seen[:3] == [0, None, 0]
    assert_same_bits(resumed.weights(), straight.weights())
    ends = [load(tmp_path / side / "step-00000020.pt") for side in "ab"]
    assert_same_bits(*ends)


def private_bytes(path):
    """Return a mapped file's bytes in private memory of this process; None if it is not mapped."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_it = rest[-1:] == [str(path)]
            found = found or 0 if is_it else found
        elif is_it and first in ("Private_Dirty:", "Anonymous:"):
            found += 1024 * int(rest[0])
    return found


@pytest.mark.parametrize(
    ("rank", "is_checked", "times"), [(0, False, 1), (1, False, 0), (0, True, 0)]
)
def test_a_resumed_file_is_checked_once(run_loop, saved, monkeypatch, rank, is_checked, times):
    """A resumed checkpoint is checked once, by the supervisor or the first rank."""
    ranks = Ranks()
    ranks.rank, ranks.world_size = rank, rank + 1
    checks = []
    monkeypatch.setattr(checkpoint, "_check", lambda *arguments: checks.append(arguments))
    run_loop(
        Regression, {"training": {"steps": 4}}, resume=saved, is_checked=is_checked, ranks=ranks
    )
    assert len(checks) == times
