import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from halfstep.telemetry.spool import SpoolReader
from tests import warm
from tests.marks import extended
from tests.site import until
from tests.trainer.conftest import assert_same_bits
from tests.trainer.process_made import RANK, finish, read, run_ranks, start, write_job
from trainer.checkpoints.checkpoint import load
from trainer.distributed.ranks import Control, Request
from trainer.job import ControlFile

pytestmark = pytest.mark.slow

FAILING = """
import sys

from tests.trainer.conftest import Regression

class Failing(Regression):
    batches_left = 3

    def batch(self, indices, generator):
        self.batches_left -= 1
        if self.batches_left < 0:
            STATEMENT
        return super().batch(indices, generator)
"""


def test_a_job_is_trained_into_spool_checkpoint_and_outcome(tmp_path):
    """A job leaves spool, checkpoint and outcome in its folder, and exits with 0."""
    write_job(tmp_path)
    assert finish(start(tmp_path)) == (0, "")
    outcome, records, events = read(tmp_path)
    assert (outcome["status"], outcome["step"], outcome["error"]) == ("finished", 30, None)
    assert records["step"].tolist() == list(range(1, 31))
    assert (records["elapsed_ms"] > 10**9).all()  # since the run's first start, before this boot
    [saved] = [event for event in events if event["event"] == "checkpoint"]
    assert load(tmp_path / saved["files"][0]["path"], saved["files"][0]["sha256"])


@pytest.mark.parametrize(
    ("statement", "last_line"),
    [
        ('raise ZeroDivisionError("on purpose")', "ZeroDivisionError: on purpose"),
        ("sys.exit(3)", "The recipe called sys.exit(3): raise an exception instead."),
    ],
)
def test_a_recipe_that_raises_leaves_its_traceback(tmp_path, statement, last_line):
    """A recipe that raises leaves its traceback in outcome and stderr, and exits with 1.

    Catches a sys.exit without an outcome, which would be retried as a killed run.
    """
    (tmp_path / "failing.py").write_text(FAILING.replace("STATEMENT", statement))
    write_job(tmp_path, recipe=f"{tmp_path}/failing.py:Failing", config={})
    code, errors = finish(start(tmp_path))
    outcome, records, _ = read(tmp_path)
    assert code == 1
    assert (outcome["status"], outcome["step"], outcome["failure_kind"]) == ("failed", 3, "code")
    assert outcome["error"].startswith("Traceback")
    assert outcome["error"].endswith(f"{last_line}\n")
    assert last_line in errors
    assert records["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules": {"fp32": ["model.nope"]}}, "modules.fp32: "),
        ({"weights": {"path": "/nowhere.pt"}}, "/nowhere.pt does not exist"),
    ],
)
def test_a_setting_that_only_the_worker_finds_wrong_is_no_error_in_the_code(
    tmp_path, config, message
):
    """A setting that only the worker finds invalid has failure kind settings, and no traceback."""
    write_job(tmp_path, config=config, weights={"": "/nowhere.pt"})
    code, _errors = finish(start(tmp_path))
    outcome = json.loads((tmp_path / "outcome-1.json").read_text())
    assert (code, outcome["failure_kind"]) == (1, "settings")
    assert outcome["error"].startswith(message)
    assert "\n" not in outcome["error"]


def test_an_error_of_a_recipe_is_named_without_the_path_of_its_class(tmp_path):
    """A recipe's exception has its short class name and message as the traceback's last line."""
    statement = 'from halfstep.recipe import RecipeError; raise RecipeError("no loss")'
    (tmp_path / "failing.py").write_text(FAILING.replace("STATEMENT", statement))
    write_job(tmp_path, recipe=f"{tmp_path}/failing.py:Failing", config={})
    finish(start(tmp_path))
    outcome, _records, _events = read(tmp_path)
    assert outcome["failure_kind"] == "code"
    assert outcome["error"].endswith("\nRecipeError: no loss\n")


def test_a_signal_preempts_and_another_attempt_continues(tmp_path):
    """SIGTERM leaves a checkpoint, with which attempt 2 ends like an uninterrupted run."""
    config = {"training": {"steps": 3000}, "evaluation": {"every_steps": None}}
    write_job(tmp_path, config=config)
    process, spool = start(tmp_path), SpoolReader(tmp_path / "spool")
    while process.poll() is None and not spool.poll():  # until it trains
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    code, _ = finish(process)
    outcome, records, events = read(tmp_path)
    assert (code, outcome["status"]) == (0, "preempted")
    assert outcome["step"] == records["step"][-1] < 3000
    [saved] = [event for event in events if event["event"] == "checkpoint"]
    assert saved["reason"] == "preempt"

    config["training"]["steps"] = outcome["step"] + 10
    write_job(tmp_path, attempt=2, config=config, resume=saved["files"][0]["path"])
    assert finish(start(tmp_path, attempt=2))[0] == 0
    outcome, records, _ = read(tmp_path, attempt=2)
    assert outcome["status"] == "finished"
    assert records["step"].tolist() == list(range(1, outcome["step"] + 1))


def test_the_control_file_stops_a_run(tmp_path):
    """A cancel from before the start is applied after the first step, with a checkpoint."""
    write_job(tmp_path)
    (tmp_path / "control-1.json").write_text(
        '{"stop": "cancel", "requests": [{"id": 7, "kind": "checkpoint", "value": 0}]}'
    )
    assert finish(start(tmp_path))[0] == 0
    outcome, _, events = read(tmp_path)
    assert (outcome["status"], outcome["step"], outcome["error"]) == ("cancelled", 1, None)
    [saved] = [event for event in events if event["event"] == "checkpoint"]
    assert (saved["reason"], saved["request"]) == ("cancel", 7)


def test_each_request_is_executed_once(tmp_path):
    """A listed request is executed once, whatever its value; a stop stays in effect.

    Catches a scale or replay compared by value, and thus ignored the second time, and a request
    applied again whenever the file changes.
    """
    path = tmp_path / "control-1.json"
    control = ControlFile(path)

    def replace(stop, *requests):
        content = {"stop": stop, "requests": [asdict(each) for each in requests]}
        (tmp_path / "new").write_text(json.dumps(content))
        (tmp_path / "new").replace(path)
        return [control.read() for _ in range(3)]

    checkpoint, scale = Request(4, "checkpoint"), Request(5, "scale", 512.0)
    again, replay = Request(6, "scale", 512.0), Request(7, "replay", 31.0)
    assert control.read() == Control()
    assert replace(None, checkpoint) == [Control(None, checkpoint), Control(), Control()]
    expected = [Control("pause", scale), Control("pause"), Control("pause")]
    assert replace("pause", checkpoint, scale) == expected
    assert replace(None, scale) == [Control()] * 3
    expected = [Control(None, again), Control(None, replay), Control()]
    assert replace(None, scale, again, replay) == expected
    assert replace(None, again, replay, Request(8, "replay", 31.0))[0].request.id == 8


def test_no_training_outlives_its_supervisor(tmp_path):
    """A process without a supervisor ends before it trains."""
    write_job(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = warm.run(
        [sys.executable, "-m", "trainer.process", str(tmp_path), "1"],
        env=os.environ | {"HALFSTEP_PARENT_PID": str(gone.pid)},
    )
    assert process.returncode == 1
    assert "is gone" in process.stderr
    assert not (tmp_path / "spool").exists()


def test_training_dies_with_the_process_that_started_it(tmp_path):
    """When the process that started it is killed, the kernel kills the training at once."""
    write_job(tmp_path, config={"training": {"steps": 10**8}})
    starter = warm.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-m', 'trainer.process', sys.argv[1], '1'],"
            " env=os.environ | {'HALFSTEP_PARENT_PID': str(os.getpid())})\n"
            "print(child.pid, flush=True)\n"
            "child.wait()",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    training = os.pidfd_open(int(starter.stdout.readline()))
    spool = SpoolReader(tmp_path / "spool")
    while starter.poll() is None and not spool.poll():  # until it trains
        os.sched_yield()
    assert starter.poll() is None
    starter.kill()
    starter.communicate()
    assert select.select([training], [], [], 30)[0]  # a pidfd is readable once its process is dead
    os.close(training)
    assert not (tmp_path / "outcome-1.json").exists()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_ranks_train_one_model_and_record_once(tmp_path, precision):
    """Two gloo processes with half the batch each end close to one process with all of it."""
    ends, stories = [], []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        folder.mkdir()
        training = {"steps": 20, "batch_size": 64 // devices}
        write_job(folder, config={"training": training, "precision": precision})
        code, errors = finish(start(folder, devices=devices))
        assert code == 0, errors
        outcome, records, events = read(folder)
        assert (outcome["status"], outcome["step"], outcome["error"]) == ("finished", 20, None)
        assert records["step"].tolist() == list(range(1, 21))
        assert len([event for event in events if event["event"] == "checkpoint"]) == 1
        ends.append(load(folder / "checkpoints/step-00000020.pt"))
        stories.append(records)
    assert [len(end["random"]) for end in ends] == [1, 2]
    if precision == "fp32":
        np.testing.assert_allclose(stories[1]["loss"], stories[0]["loss"], rtol=1e-4)
        for name, weight in ends[0]["modules"]["model"].items():
            torch.testing.assert_close(
                ends[1]["modules"]["model"][name], weight, rtol=1e-2, atol=1e-4
            )


def test_ranks_agree_on_weights_scale_and_a_stop_that_one_of_them_receives(tmp_path):
    """A stop on rank 1, and a scale and a replay requested from rank 0, apply to both at the same
    step; an overflow on rank 1 makes both skip, weights stay equal, and only rank 0 records.
    Catches gradients unscaled before they are averaged: one rank would skip.
    """
    run_ranks(tmp_path, RANK)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert_same_bits(first["weights"], second["weights"])
    assert_same_bits(first["scaler"], second["scaler"])
    assert first["outcome"] == second["outcome"] == ["paused", 12]
    assert (first["steps"], second["steps"]) == (list(range(1, 13)), [])
    # 64 from step 6 on, as asked, and half of it after the skip of step 10.
    assert first["scales"] == second["scales"] == [256.0] * 5 + [64.0] * 4 + [32.0] * 3
    skips = [e for e in first["events"] if e["event"] == "scaler" and e["kind"] == "skip"]
    assert [skip["step"] for skip in skips] == [10]
    [replay] = [event for event in first["events"] if event["event"] == "replay"]
    assert (replay["step"], replay["exact"]) == (8, False)
    result = [event["request"] for event in first["events"] if event["event"] == "obeyed"]
    assert result == [7, 8]
    assert second["events"] == []


COMPILED = """
import functools, sys, torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from tests.trainer.conftest import Regression
from halfstep.run_config import parse_config
from trainer.distributed.ranks import join
from trainer.loop import train
from trainer.setup import prepare_run

torch.compile = functools.partial(torch.compile, backend="eager")  # no code generation
averaged = []

class Counting(Regression):
    def batch(self, indices, generator):
        if not hasattr(self, "compiled"):
            self.compiled = self.modules["model"]
            self.compiled._orig_mod.register_comm_hook(None, self.average)
        return super().batch(indices, generator)

    def average(self, state, bucket):
        averaged.append(1)
        return allreduce_hook(None, bucket)

with join(torch.device("cpu")) as (ranks, device):
    values = {"training": {"steps": 5, "accumulation_steps": 3, "compile": True}}
    train(prepare_run(Counting, parse_config(Counting, values), device=device,
          on_steps=lambda records: None, on_event=lambda event: None, ranks=ranks))
    torch.save(len(averaged), f"{sys.argv[1]}/rank-{ranks.rank}.pt")
"""


def test_compiled_ranks_average_gradients_once_a_step(tmp_path):
    """One all-reduce follows the last accumulated batch. If torch.compile's wrapper hid
    DistributedDataParallel, the gradients would be the same, and be sent three times as often.
    """
    run_ranks(tmp_path, COMPILED)
    assert [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)] == [5, 5]


STATIC = """
import sys, torch
import torch.nn.functional as F
from torch import nn
from tests.trainer.conftest import Regression
from halfstep.run_config import parse_config
from halfstep.recipe import Loss, RecipeError
from trainer.distributed.ranks import join
from trainer.loop import train
from trainer.setup import prepare_run

class Partial(Regression):
    defaults = Regression.defaults | {"training": {"static_graph": True, "batch_size": 8}}

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"][0].never_used = nn.Parameter(torch.ones(3))
        kept.append(self.modules["model"])

class Penalty(Partial):
    def training_step(self, batch):
        inputs, targets = batch
        inputs = inputs.clone().requires_grad_()
        output = self.modules["model"](inputs)
        [gradient] = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        yield Loss(F.mse_loss(output, targets) + gradient.pow(2).sum(), "sgd")

def weights_of(recipe_class, **training):
    values = {"precision": "fp32", "training": {"steps": 4, **training}}
    train(prepare_run(recipe_class, parse_config(recipe_class, values), device=device,
          on_steps=lambda records: None, on_event=lambda event: None, ranks=ranks))
    return kept[-1].state_dict()

def memory(tensors):
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None})

kept = []
with join(torch.device("cpu")) as (ranks, device):
    found = {"static": weights_of(Partial)}
    parameters = list(kept[-1].parameters())
    found["memory"] = memory(parameters), memory(each.grad for each in parameters)
    found["other"] = weights_of(Partial, static_graph=False, unused_parameters=True)
    try:
        weights_of(Penalty)
    except RecipeError as error:
        found["refusal"] = str(error)
    torch.save(found, f"{sys.argv[1]}/rank-{ranks.rank}.pt")
"""


def test_ranks_train_a_static_graph(tmp_path):
    """DDP's static graph trains unused parameters like one process, stores gradients once, and
    rejects a gradient that is differentiated again.
    """
    run_ranks(tmp_path, STATIC)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert_same_bits(first, second)
    assert first["memory"] == (5, 1)  # the gradients of all parameters lie in one bucket
    assert_same_bits(first["static"], first["other"])
    assert "training.static_graph is on, but gradients are not averaged" in first["refusal"]


@pytest.mark.parametrize("recipe", ["wgan-gp", *extended(["gpt", "erfnet"])])
def test_two_ranks_train_every_recipe(tmp_path, recipe):
    """Recipes with transformer, BatchNorm and double gradients train on two DDP ranks in fp16."""
    sizes = {
        "gpt": {"layers": 1, "width": 32, "heads": 2, "context": 16, "max_bytes": 2**16},
        "wgan-gp": {"width": 32},
        "erfnet": {"height": 16, "width": 32, "channels": 4, "blocks": 1, "dilations": 0},
    }[recipe]
    config = {
        "precision": "fp16",
        "training": {"steps": 4, "batch_size": 4},
        "evaluation": {"every_steps": 4},
        "recipe": sizes,
    }
    write_job(tmp_path, recipe=recipe, config=config)
    code, errors = finish(start(tmp_path, devices=2))
    assert code == 0, errors
    outcome, records, _ = read(tmp_path)
    assert outcome["status"] == "finished"
    assert records["step"].tolist() == [1, 2, 3, 4]
    assert np.isfinite(records["loss"]).all()


def test_data_workers_leave_the_end_to_the_training(tmp_path):
    """SIGTERM to all processes, as from systemd, leaves a checkpoint and no process."""
    config = {"training": {"steps": 10**6, "batch_size": 4}, "data": {"workers": 2}}
    write_job(tmp_path, recipe=f"{warm.ROOT}/tests/reading.py:Reading", config=config)
    with start(tmp_path) as training:
        process = psutil.Process(training.pid)
        until(lambda: len(process.children()) == 2 and list((tmp_path / "spool").glob("*.spool")))
        everyone = [*process.children(), process]
        for each in everyone:
            each.terminate()
        assert training.wait() == 0, training.stderr.read()
    assert json.loads((tmp_path / "outcome-1.json").read_text())["status"] == "preempted"
    assert list((tmp_path / "checkpoints").glob("*.pt"))
    assert not any(each.is_running() for each in everyone)


PLACED = """
import sys, torch
from pathlib import Path
from halfstep.run_config import parse_config
from tests.trainer.conftest import Regression
from trainer.distributed.ranks import join
from trainer.loop import train
from trainer.setup import prepare_run

seen = set()

class Placed(Regression):
    def __init__(self, config, device):
        super().__init__(config, device)
        model = self.modules["model"]
        model[2].register_forward_hook(lambda module, args, output: seen.add(output.dtype))

folder = sys.argv[1]
with join(torch.device("cpu")) as (ranks, device):
    values = {"precision": "fp16", "training": {"steps": 5, "ema_decay": 0.9},
              "modules": {"fp32": ["model.2"], "checkpointed": ["model.0", "model.1"]},
              "scaler": {"init_scale": 2.0**8, "restore_buffers": True}}
    train(prepare_run(Placed, parse_config(Placed, values), device=device, ranks=ranks,
          on_steps=lambda records: None, on_event=lambda event: None,
          checkpoint_folder=Path(folder) / "checkpoints"))
    torch.save(sorted(map(str, seen)), f"{folder}/rank-{ranks.rank}.pt")
"""


def test_ranks_have_modules_of_their_own_precision_by_their_plain_names(tmp_path):
    """With DDP modules have plain names without "module.", for precisions and for averages."""
    run_ranks(tmp_path, PLACED)
    for rank in (0, 1):
        assert torch.load(tmp_path / f"rank-{rank}.pt") == ["torch.float32"]
    state = load(tmp_path / "checkpoints" / "step-00000005.pt")
    weights = state["modules"]["model"]
    assert state["parts"]["ema"]["weights"]["model"].keys() == weights.keys()
    assert "2.weight" in weights


def test_data_workers_meet_the_training_however_deep_its_folder_lies(tmp_path, monkeypatch):
    """Data workers connect by short socket paths, since deep ones exceed 107 bytes."""
    deep = tmp_path / "deep" / ("d" * 120)
    deep.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(deep))
    config = {"training": {"steps": 4, "batch_size": 4}, "data": {"workers": 2}}
    recipe = f"{Path(__file__).parents[1]}/reading.py:Reading"
    write_job(tmp_path, recipe=recipe, config=config)
    code, errors = finish(start(tmp_path))
    assert code == 0, errors
    outcome, records, _ = read(tmp_path)
    assert (outcome["status"], len(records)) == ("finished", 4)
