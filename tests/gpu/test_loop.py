"""The loop on a real GPU: no waits, the same bits, every row and every culprit."""

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.clock import clock
from halfstep.recipe import Loss
from halfstep.recording.ring import RING_ROWS
from halfstep.run_config import parse_config
from tests.gpu.device import DEVICE, needs_cuda, sync_debug_mode
from tests.spool_made import fields_of
from tests.trainer.conftest import Pair, Regression, assert_same_bits, bare_loop
from trainer.distributed.ranks import Ranks
from trainer.precision.scale_policies import CALIBRATED_AFTER
from trainer.prepared_recipe import PreparedRecipe
from trainer.recipes.digits import Digits
from trainer.recipes.gpt import GPT
from trainer.setup import make_context
from trainer.step import train_step

EXACT = ["step", "loss", "scale", "grad_norm", "grad_norm_clipped", "lr", "flags"]
SMALL_GPT = {"recipe": {"layers": 2, "width": 64, "context": 64, "max_bytes": 2**16}}


def test_pytorch_itself_reports_no_wait():
    """torch's debug mode reports no wait with telemetry, histogram, stop rules and replay."""
    values = {
        "training": {"max_grad_norm": 1.0, "accumulation_steps": 2},
        "diagnosis": {
            "histogram_every_steps": 1,
            "headroom_every_steps": 1,
            "layer_norms_every_steps": 1,
        },
        "scaler": {"init_scale": 1.0, "growth_interval": 10**6},  # nothing to replay
    }
    config = parse_config(Pair, values)
    recipe = Pair(config, DEVICE)
    records, events = [], []
    context, followers = make_context(
        PreparedRecipe(recipe, recipe.modules, config, DEVICE, Ranks()),
        on_steps=records.append,
        on_event=lambda event: events.append(fields_of(event)),
        at=clock(),
    )

    def step(number):
        context.observers.before_step(number)
        train_step(context, context.batches.step())
        followers.telemetry.tick()

    step(1)  # libraries start, which may wait
    with sync_debug_mode("error"):
        for number in range(2, 300):
            step(number)
    context.observers.drain()
    assert np.concatenate(records)["step"].tolist() == list(range(1, 300))
    assert not [event for event in events if event["event"] == "failed_diagnosis"]
    assert sum(event["event"] == "histogram" for event in events) == 299


@pytest.mark.parametrize(("recipe", "values"), [(Digits, {}), (GPT, SMALL_GPT)])
def test_a_resumed_run_is_bit_exact(run_loop, tmp_path, recipe, values):
    """A run of 40 steps, and one of 20 + 20 from a checkpoint, have equal weights and records."""
    values = values | {
        "precision": "fp16",
        "training": {"steps": 40},
        "checkpoints": {"every_steps": 20},
        "scaler": {"init_scale": 2.0**24, "growth_interval": 5},
    }
    straight = run_loop(recipe, values, tmp_path / "a", device=DEVICE)
    torch.rand(100, device=DEVICE)  # the process that resumes has another past
    resumed = run_loop(
        recipe, values, tmp_path / "b", device=DEVICE, resume=tmp_path / "a/step-00000020.pt"
    )
    assert resumed.of("resumed")[0]["notes"] == []
    for name in EXACT:
        assert resumed.records[name].tobytes() == straight.records[name][20:].tobytes(), name
    ends = [torch.load(tmp_path / side / "step-00000040.pt", weights_only=True) for side in "ab"]
    for end in ends:  # it polls for flags, which arrive sooner or later
        del end["parts"]["replay"]
    assert_same_bits(*ends)


def test_the_loop_trains_to_the_bits_of_pytorchs_own(run_loop):
    """On a GPU telemetry, histogram and replay change no bit of PyTorch's own loop."""
    values = {
        "precision": "fp16",
        "training": {"steps": 60, "max_grad_norm": 1.0},
        "scaler": {"init_scale": 2.0**24, "growth_interval": 10},
        "diagnosis": {"histogram_every_steps": 3},
    }
    torch.use_deterministic_algorithms(True)
    try:
        bare = bare_loop(Digits, values, DEVICE)
        run = run_loop(Digits, values, device=DEVICE)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(run.weights(), bare.weights())
    assert run.list_skipped()


def test_every_row_arrives_whole_over_many_rounds_of_the_ring(run_loop):
    """Each step's row arrives once and in order, with the device's loss."""
    losses = []

    class Kept(Regression):
        def training_step(self, batch):
            for loss in super().training_step(batch):
                losses.append(loss.value.detach().clone())
                yield loss

    steps = 3 * RING_ROWS + 11
    run = run_loop(Kept, {"training": {"steps": steps}}, device=DEVICE)
    assert run.records["step"].tolist() == list(range(1, steps + 1))
    assert run.records["loss"].tolist() == torch.stack(losses).tolist()


class FarOut(Regression):
    """A recipe with an occasional example whose gradient is beyond fp16, after calibration."""

    name: ClassVar = "far-out"
    defaults: ClassVar = {
        "precision": "fp16",
        "training": {"steps": 150, "batch_size": 8},
        "scaler": {"init_scale": 1024.0},
    }

    def __init__(self, config, device):
        self.device, self.train_size = device, 512
        inputs = torch.randn(512, 8)
        inputs[7] = 60000.0
        self.inputs = inputs.to(device)
        self.targets = torch.zeros(512, 1, device=device)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        self.modules = {"model": model}
        self.optimizers = {"sgd": torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)}

    def training_step(self, batch):
        inputs, targets = batch
        # A gradient that is exact in fp32 weights and beyond fp16's largest number in between.
        output = self.modules["model"](inputs) * inputs.abs().amax(dim=1, keepdim=True).clamp(min=1)
        yield Loss(F.mse_loss(output.float(), targets), "sgd")


@needs_cuda
def test_culprits_are_named_by_the_step_and_counted_by_the_replay(run_loop):
    """On a GPU a skip has only names; its replay counts the elements of each.

    An unexpected skip is replayed with changed weights, as its event says.
    """
    run = run_loop(FarOut, device=DEVICE)
    skips = {event["step"]: event["culprits"] for event in run.of("scaler", kind="skip")}
    assert any(step > CALIBRATED_AFTER for step in skips)
    assert all("inf" not in each for culprits in skips.values() for each in culprits)
    replays = run.of("replay")
    assert replays
    assert all(replay["exact"] or "the weights and" in replay["notes"][0] for replay in replays)
    for replay in replays:
        counted = [each["name"] for each in replay["culprits"]]
        if replay["exact"]:
            assert counted == [each["name"] for each in skips[replay["step"]]]
        assert counted
        assert all(each["inf"] + each["nan"] > 0 for each in replay["culprits"])


@needs_cuda
@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_layers_in_fp8_train_nearly_as_in_bf16(run_loop, scales):
    """Layers in fp8 differ from bf16 by fp8's rounding, and report their scaling."""
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("the device has no fp8: compute capability 8.9")
    values = SMALL_GPT | {"diagnosis": {"headroom_every_steps": 10}}
    values["training"] = {"steps": 20, "fp8": scales}
    runs = {
        precision: run_loop(GPT, values | {"precision": precision}, device=DEVICE)
        for precision in ("bf16", "fp8")
    }
    fp8, bf16 = (runs[precision].records["loss"] for precision in ("fp8", "bf16"))
    assert not np.array_equal(fp8, bf16)
    np.testing.assert_allclose(fp8, bf16, rtol=0.05)
    assert len(runs["fp8"].of("fp8")) == 2


def test_tf32_is_a_setting_of_products_and_convolutions(run_loop):
    """With the TF32 setting off, products and convolutions are in fp32, with it on in TF32."""
    for wanted in (True, False):
        run_loop(Regression, {"training": {"steps": 1, "tf32": wanted}}, device=DEVICE)
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert torch.backends.cudnn.allow_tf32 is wanted


@pytest.mark.two_devices
def test_a_run_on_the_second_device_records_there(run_loop):
    """A run on the second device records events on that device's stream."""
    run = run_loop(Pair, {"training": {"steps": 2000}}, device=torch.device("cuda", 1))
    assert run.records["step"].tolist() == list(range(1, 2001))


RANK = """
import sys, torch
from halfstep.run_config import parse_config
from trainer.distributed.ranks import join
from trainer.recipes.digits import Digits
from trainer.loop import train
from trainer.setup import prepare_run

steps = []
with join(torch.device("cuda")) as (ranks, device):
    class Kept(Digits):
        def __init__(self, config, device):
            super().__init__(config, device)
            kept.append(self)
    kept = []
    config = parse_config(Digits, {"training": {"steps": 100}, "scaler": {"init_scale": 2.0**24}})
    train(prepare_run(Kept, config, device=device, on_event=lambda event: None, ranks=ranks,
          on_steps=lambda records: steps.extend(records["step"].tolist())))
    state = kept[0].modules["model"].module.state_dict()
    torch.save({"weights": {k: v.cpu() for k, v in state.items()}, "steps": steps},
               f"{sys.argv[1]}/rank-{ranks.rank}.pt")
"""


@pytest.mark.two_devices
def test_two_ranks_on_nccl_train_one_model(tmp_path):
    """Two NCCL ranks have equal weights on both cards, and only rank 0 records."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(script), str(tmp_path)], check=True, timeout=300)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert_same_bits(first["weights"], second["weights"])
    assert (len(first["steps"]), second["steps"]) == (100, [])
