"""Trainings of two ranks, ddp and fsdp, for test_shards.py: `python sharded.py <folder>`.

The ranks start once for all trainings, because the start takes longer than training. Results are
saved as rank-<rank>.pt.
"""

import errno
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, empty

import trainer.distributed.ranks
import trainer.recipes.gpt
from halfstep.recipe import Loss, RecipeError, place
from halfstep.run_config import parse_config
from halfstep.telemetry.spool import STEP_DTYPE
from tests.spool_made import fields_of
from tests.trainer.conftest import Pair, Regression, drawn
from tests.trainer.diagnosis.spikes_made import VALUES, Poisoned
from trainer.checkpoints.checkpoint import load
from trainer.checkpoints.files import HashingFile
from trainer.checkpoints.snapshot import Staging, room
from trainer.data.sampler import Sampler
from trainer.distributed.ranks import Control, Request, join
from trainer.distributed.shards import is_shard
from trainer.loop import train
from trainer.recipes.digits import Digits
from trainer.recipes.gpt import GPT
from trainer.setup import prepare_run
from trainer.step import make_scaler

OVERFLOWS_AT = 4  # of forward passes in training
DIGITS = {
    "recipe": {"width": 16, "dropout": 0.1},
    "training": {"steps": 6, "batch_size": 16, "max_grad_norm": 0.2, "ema_decay": 0.9},
    "evaluation": {"every_steps": 3},
}
TEXT = bytes(range(32, 127)) * 20
FUSED = ("Adam", "AdamW")
UNFUSED = (
    *FUSED, "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD",
)  # fmt: skip


class Shift(nn.Module):
    """A recipe with a bias whose last gradient overflows once, on rank 0 only."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, logits):
        bias = self.bias * 1.0
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            if self.passes == OVERFLOWS_AT and torch.distributed.get_rank() == 0:
                bias.register_hook(lambda g: g.index_fill(0, torch.tensor([9]), torch.inf))
        return logits + bias


class Overflowing(Digits):
    """Digits with a batch norm, where rank 1's shard gets an inf from rank 0's examples."""

    def __init__(self, config, device):
        super().__init__(config, device)
        model = self.modules["model"]
        model.insert(1, nn.BatchNorm1d(16))
        model.append(Shift())
        self.optimizers = {"adamw": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)}


class Chosen(Regression):
    """The regression with one of torch's optimizers."""

    kind = "SGD"

    def __init__(self, config, device):
        super().__init__(config, device)
        fused = config.training.fused if self.kind in (*FUSED, "SGD", "Adagrad") else None
        options = {} if fused is None else {"fused": fused}
        parameters = self.modules["model"].parameters()
        if self.kind == "Muon":
            parameters = [each for each in parameters if each.dim() == 2]
        self.optimizers = {"sgd": getattr(torch.optim, self.kind)(parameters, lr=0.01, **options)}


class Tied(Regression):
    """Two blocks that share a weight."""

    def __init__(self, config, device):
        super().__init__(config, device)
        blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
        blocks[1].weight = blocks[0].weight
        self.modules = {"model": blocks}
        self.optimizers = {"sgd": torch.optim.SGD(blocks.parameters(), lr=0.1, fused=False)}


class Sparse(Regression):
    """A network with an embedding that has sparse gradients."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"].append(nn.Embedding(2, 2, sparse=True))


class Routed(Regression):
    """A network that uses another of its two blocks on each rank."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules = {"model": Router()}
        parameters = self.modules["model"].parameters()
        self.optimizers = {"sgd": torch.optim.SGD(parameters, lr=0.01, fused=False)}


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])

    def forward(self, inputs):
        return self.experts[torch.distributed.get_rank()](inputs)


class Placed(Regression):
    """A network with a mask and a tied weight that only rank 0 initializes, and data drawn after
    it.
    """

    def __init__(self, config, device):
        self.made_on = []
        self.modules = {"model": place(self.network, config, device)}
        networks = self.modules
        super().__init__(config, device)
        self.modules = networks
        parameters = networks["model"].parameters()
        self.optimizers = {"sgd": torch.optim.AdamW(parameters, lr=0.01, fused=True)}

    def network(self):
        network = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), Masked(), nn.Linear(6, 1))
        network.append(nn.Linear(1, 1)).append(nn.Linear(1, 1))
        network[5].weight = network[4].weight
        network[0].bias.data += torch.rand(6) + float(np.random.rand())
        self.made_on.append(network[0].weight.device.type)
        return nn.Sequential(network, nn.Identity())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False] * 3))
        self.register_buffer("factor", torch.full((6,), 3.0), persistent=False)

    def forward(self, inputs):
        return inputs * self.mask * self.factor


class Mixed(Regression):
    """A network with weights of two dtypes."""

    def __init__(self, config, device):
        super().__init__(config, device)
        self.modules["model"][0].to(torch.bfloat16)


class Penalty(Regression):
    """A recipe whose loss contains the gradient of a gradient."""

    def training_step(self, batch):
        inputs = batch[0].requires_grad_()
        output = self.modules["model"](inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        yield Loss(F.mse_loss(output, batch[1]) + slope.square().mean(), "sgd")


def number_alone(tensor, full_tensor=DTensor.full_tensor):
    """Gather a tensor of a single number, and reject any larger one."""
    assert tensor.numel() == 1
    return full_tensor(tensor)


def story(recipe_class, values, *, parallel, folder=None, resume=None, control=Control):
    """Train, and return the result."""
    kept, records, events = [], [np.zeros(0, STEP_DTYPE)], []

    class Kept(recipe_class):
        def __init__(self, config, device):
            super().__init__(config, device)
            kept.append(self)

    values = values | {"training": values.get("training", {}) | {"parallel": parallel}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", number_alone)
        train(
            prepare_run(
                Kept,
                parse_config(recipe_class, values),
                device=device,
                on_steps=records.append,
                on_event=lambda event: events.append(fields_of(event)),
                checkpoint_folder=folder,
                resume=resume,
                ranks=ranks,
            ),
            control=control,
        )
    [recipe] = kept
    modules = {name: getattr(m, "module", m) for name, m in recipe.modules.items()}
    steps = np.concatenate(records)
    found = {name: steps[name].tolist() for name in ("step", "loss", "grad_norm", "scale", "flags")}
    return found | {
        "events": events,
        "weights": whole({n: dict(m.state_dict()) for n, m in modules.items()}),
        "scaler": recipe.scaler.state_dict(),
        "made_on": getattr(recipe, "made_on", None),
        "units": [
            name
            for name, module in modules["model"].named_modules()
            if isinstance(module, FSDPModule)
        ],
    }


def whole(state):
    """Return a copy of a state gathered from all shards, in which tied weights are one."""
    found = {}
    for weights in state.values():
        for name, weight in weights.items():
            full = weight.full_tensor() if is_shard(weight) else weight.clone()
            storage = getattr(weight, "_local_tensor", weight).untyped_storage()._cdata
            weights[name] = found.setdefault(storage, full)
    return state


def measure_staged_bytes(saving):
    """Save in shards; return the size of each copy of the state."""
    sizes, take = [], Staging.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Staging, "take", lambda own, state: sizes.append(room(state)) or take(own, state)
        )
        return saving(), sizes


def on_a_full_disk(folder):
    """Return each rank's error if the second rank has no disk space."""

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(HashingFile, "write", write)
        try:
            story(Digits, DIGITS, parallel="fsdp", folder=folder)
        except CheckpointException as error:
            return str(error)


def cut_otherwise(path):
    """Return the weights of a checkpoint, read in columns instead of rows and concatenated."""
    mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")

    def columns(size, dtype):
        return empty(size, dtype=dtype, device_mesh=mesh, placements=[Shard(len(size) - 1)])

    return whole({"model": dict(load(path, make=columns)["modules"]["model"])})


def bare_loop_by_policy(values):
    """PyTorch's documented loop over shards that are cast when gathered."""
    config = parse_config(Digits, values)
    torch.manual_seed(0)
    recipe = Digits(config, device)
    torch.manual_seed(ranks.rank)
    [model], [optimizer] = recipe.modules.values(), recipe.optimizers.values()
    policy = MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32)
    fully_shard(model, mp_policy=policy)
    [group] = optimizer.param_groups
    group["params"] = list(model.parameters())
    scaler = make_scaler(config, device)
    sampler = Sampler(recipe.train_size, config.training, rank=ranks.rank, world_size=2)
    for _ in range(config.training.steps):
        [batch] = [recipe.batch(*each) for each in drawn(sampler)]
        optimizer.zero_grad()
        [loss] = recipe.training_step(batch)
        scaler.scale(loss.value).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"weights": whole({"model": dict(model.state_dict())}), "scaler": scaler.state_dict()}


def rejection(recipe_class, values):
    """Return the message with which a recipe is refused."""
    try:
        story(recipe_class, values, parallel="fsdp")
    except (RecipeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def trainings(folder):
    """Yield the name and the result of each training."""
    observed = DIGITS | {
        "precision": "fp32",
        "diagnosis": {"histogram_every_steps": 2, "headroom_every_steps": 3},
    }
    for name, parallel in (("ddp", "ddp"), ("fsdp", "fsdp"), ("again", "fsdp")):
        yield f"digits {name}", story(Digits, observed, parallel=parallel)

    text = folder / f"text-{ranks.rank}"
    text.write_bytes(TEXT)
    gpt = {
        "precision": "fp32",
        "recipe": {"text": str(text), "layers": 2, "width": 16, "heads": 2, "context": 8},
        "training": {"steps": 3, "batch_size": 4, "accumulation_steps": 2, "warmup_steps": 1},
        "modules": {"checkpointed": ["model.blocks.1"]},
    }
    for parallel in ("ddp", "fsdp"):
        yield f"gpt {parallel}", story(GPT, gpt, parallel=parallel)

    asked = iter([Control(), Control(request=Request(7, "replay", 1.0))])
    scaled = DIGITS | {"scaler": {"init_scale": 256.0}}
    for parallel in ("ddp", "fsdp"):
        control = (lambda: next(asked, Control())) if parallel == "fsdp" else Control
        yield (
            f"overflow {parallel}",
            story(Overflowing, scaled, parallel=parallel, control=control),
        )
    retried = scaled | {
        "scaler": {"init_scale": 2.0**40, "retry_in_fp32": True, "restore_buffers": True}
    }
    for parallel in ("ddp", "fsdp"):
        yield f"retry {parallel}", story(Digits, retried, parallel=parallel)

    plain = {"batch_size": 16, "max_grad_norm": None, "schedule": "constant", "warmup_steps": 0}
    cast = {
        "precision": "fp16",
        "scaler": {"init_scale": 2.0**24},
        "training": {"steps": 8, "parallel": "fsdp", "shard_casts": "policy"} | plain,
    }
    yield "policy", story(Digits, cast, parallel="fsdp")
    yield "policy bare", bare_loop_by_policy(cast)

    saved = scaled | {"checkpoints": {"every_steps": 3}}
    saving = partial(story, Overflowing, saved, parallel="fsdp", folder=folder / "checkpoints")
    found, sizes = measure_staged_bytes(saving)
    yield "saved", found | {"staged": sizes}
    middle, end = (folder / f"checkpoints/step-{step:08d}.pt" for step in (3, 6))
    if ranks.rank == 0:
        end.rename(folder / "uninterrupted.pt")
    ranks.gather(None)
    again = story(Overflowing, saved, parallel="fsdp", folder=end.parent, resume=middle)
    yield "resumed", again
    yield "resumed ddp", story(Overflowing, saved, parallel="ddp", resume=middle)

    yield "cut otherwise", cut_otherwise(middle)
    yield "full disk", on_a_full_disk(folder / "full")

    spiking = VALUES | {"training": VALUES["training"] | {"fused": False, "steps": 30}}
    for parallel in ("ddp", "fsdp"):
        name = f"spiking {parallel}"
        yield name, story(Poisoned, spiking, parallel=parallel, folder=folder / name)
        own = folder / f"{name} of rank {ranks.rank}"  # as machines have a disk each
        yield f"apart {parallel}", story(Poisoned, spiking, parallel=parallel, folder=own)

    bf16 = {
        "precision": "bf16",
        "training": {"steps": 4, "weights": "bf16", "fused": False},
        "diagnosis": {"updates_every_steps": 2},
    }
    for parallel in ("ddp", "fsdp"):
        yield f"bf16 {parallel}", story(Regression, bf16, parallel=parallel)

    for parallel in ("ddp", "fsdp"):
        yield f"placed {parallel}", story(Placed, {}, parallel=parallel)

    for kind, fused in [(kind, False) for kind in UNFUSED] + [(kind, True) for kind in FUSED]:
        Chosen.kind, values = kind, {"training": {"steps": 3, "fused": fused}}
        for parallel in ("ddp", "fsdp"):
            yield f"{kind} {fused} {parallel}", story(Chosen, values, parallel=parallel)

    unfused = {"training": {"fused": False}}
    for kind, values in (("SGD", {}), ("Muon", unfused)):
        Chosen.kind = kind
        yield f"refused {kind}", rejection(Chosen, values)
    for recipe in (Tied, Sparse, Penalty, Pair, Mixed, Routed):
        yield f"refused {recipe.__name__}", rejection(recipe, unfused)


if __name__ == "__main__":
    trainer.distributed.ranks.AGREE_SECONDS = 0  # in every step
    trainer.recipes.gpt.SAMPLE_BYTES = 8  # each of them is a forward pass
    with join(torch.device("cpu")) as (ranks, device):
        found = dict(trainings(Path(sys.argv[1])))
        torch.save(found, f"{sys.argv[1]}/rank-{ranks.rank}.pt")
