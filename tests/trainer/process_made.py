"""Shared helpers of the tests of process."""

import json
import os
import subprocess
import sys
from itertools import chain

import numpy as np
import torch.distributed as dist

from halfstep.telemetry.spool import SpoolReader
from tests import warm
from tests.spool_made import events_of


def write_job(folder, **changes):
    """Write the job of a first attempt, as the supervisor does."""
    job = {
        "run": 1,
        "attempt": 1,
        "recipe": "digits",
        "config": {"training": {"steps": 30}},
        "started_at": -1e6,
        "resume": None,
        "device": "cpu",
        "threads": 1,
    } | changes
    (folder / f"job-{job['attempt']}.json").write_text(json.dumps(job))


def start(folder, attempt=1, devices=1):
    """Start the training process of an attempt."""
    return warm.Popen(
        [sys.executable, "-m", "trainer.process", str(folder), str(attempt)]
        + (["--devices", str(devices)] if devices > 1 else []),
        env=os.environ | {"HALFSTEP_PARENT_PID": str(os.getpid())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Wait for a process; return its exit code and stderr."""
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def read(folder, attempt=1):
    """Return the outcome, the records and the events of an attempt."""
    items = list(chain.from_iterable(iter(SpoolReader(folder / "spool").poll, [])))
    records = np.concatenate([item for item in items if isinstance(item, np.ndarray)])
    outcome = json.loads((folder / f"outcome-{attempt}.json").read_text())
    return outcome, records, events_of(items)


RANK = """
import sys, torch
from msgspec import to_builtins
import trainer.distributed.ranks
from tests.trainer.conftest import Pair
from halfstep.run_config import parse_config
from trainer.distributed.ranks import Control, Request, join
from trainer.recipes.digits import Digits
from trainer.loop import train
from trainer.setup import prepare_run

trainer.distributed.ranks.AGREE_SECONDS = 0  # in every step, which control() counts by its calls

with join(torch.device("cpu")) as (ranks, device):
    class Kept(Digits):
        def __init__(self, config, device):
            super().__init__(config, device)
            kept.append(self)

        def batch(self, indices, generator):
            images, labels = super().batch(indices, generator)
            overflows = ranks.rank == 1 and len(calls) == 9  # in step 10, and on this rank alone
            return images * 1e5 if overflows else images, labels

    kept, calls, scales, steps, events = [], [], [], [], []

    def control():
        calls.append(1)
        scales.append(kept[0].scaler.get_scale())
        if ranks.rank == 0 and len(calls) in (5, 6):
            requests = [Request(7, "scale", 64.0), Request(8, "replay", 8.0)]
            return Control(request=requests[len(calls) - 5])
        return Control("pause") if ranks.rank == 1 and len(calls) == 12 else Control()

    config = parse_config(Digits, {"scaler": {"init_scale": 256.0}})
    prepared = prepare_run(Kept, config, device=device, ranks=ranks,
                           on_steps=lambda records: steps.extend(records["step"].tolist()),
                           on_event=lambda event: events.append(to_builtins(event)))
    outcome = train(prepared, control=control)
    torch.save({"weights": kept[0].modules["model"].module.state_dict(), "steps": steps,
                "outcome": [outcome.status, outcome.step],
                "scaler": kept[0].scaler.state_dict(), "events": events, "scales": scales},
               f"{sys.argv[1]}/rank-{ranks.rank}.pt")
"""


def run_ranks(folder, script):
    """Run a script in two ranks, with the folder as argument and torchrun's environment.

    Our own start of ranks is tested by `--devices 2`.
    """
    path = folder / "rank.py"
    path.write_text(script)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": "2",
    }
    ranks = [
        warm.Popen(
            [sys.executable, str(path), str(folder)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        code, errors = finish(rank)
        assert code == 0, errors
