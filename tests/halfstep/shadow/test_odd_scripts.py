"""Unusual scripts under `halfstep check`: how they end, and what they print.

A script marked as an expected failure is one that the check does not support yet.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from tests import warm
from tests.halfstep.shadow.checked import bits
from tests.site import free_port

pytestmark = pytest.mark.slow

HALFSTEP = [sys.executable, "-m", "halfstep.cli.main", "check"]
NET = """
import os, sys, torch
import torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
def net():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
def train(steps=3, model=None):
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()
"""


def start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    own = {**os.environ, **environment}
    return warm.Popen(command, cwd=folder, env=own, stdout=pipe, stderr=pipe, text=True)


def check(folder: Path, source: str, *options: str) -> tuple[int, str, str]:
    """Check a script; return its exit code, stdout and stderr."""
    (folder / "script.py").write_text(NET + dedent(source))
    # A spawned child finds the script by the folder that its parent was started in.
    how = {"HALFSTEP_COLD": "yes"} if "spawn" in source else {}
    process = start([*HALFSTEP, *options, "script.py"], folder, **how)
    printed, errors = process.communicate(timeout=120)
    return process.returncode, printed, errors


COMPLETE = [
    pytest.param('if __name__ == "__main__":\n    sys.exit(train() < 0)', id="exits_with_zero"),
    pytest.param("train(steps=40)\nraise ValueError", id="ends_after_the_last_step"),
    pytest.param(
        """
        for _ in range(3):
            torch.func.jvp(net(), (torch.randn(8),), (torch.randn(8),))
        train()
        """,
        id="forward_mode",
    ),
    pytest.param(
        """
        weights = torch.zeros(128, dtype=torch.float16)
        model = net()
        for _ in range(3):
            weights.untyped_storage().resize_(256)
            weights.copy_(torch.randn(128))
            F.linear(torch.randn(4, 8).half(), weights.view(16, 8))
            weights.untyped_storage().resize_(0)
            train(1, model)
        """,
        id="freed_weights",
    ),
    pytest.param(
        """
        weights = torch.randn(1000, 1000)
        weights.untyped_storage().resize_(0)
        train()
        torch.empty_like(weights)
        train()
        """,
        id="like_freed_weights",
        marks=pytest.mark.extended,
    ),
    pytest.param(
        """
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        precision = MixedPrecision(param_dtype=torch.bfloat16)
        cpu = torch.device("cpu")
        train(model=FullyShardedDataParallel(net(), device_id=cpu, mixed_precision=precision))
        dist.destroy_process_group()
        """,
        id="fully_sharded",
    ),
    pytest.param(
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        train(model=fully_shard(net(), mesh=init_device_mesh("cpu", (1,))))
        dist.destroy_process_group()
        """,
        id="fully_sharded_by_dtensors",
    ),
    pytest.param(
        """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=lambda: results.put(train(30)))
        child.start()
        results.get(timeout=10)
        train()
        """,
        id="forked",
    ),
    pytest.param(
        """
        import threading
        results = []
        thread = threading.Thread(target=lambda: results.append(train(30)))
        thread.start()
        thread.join()
        print(results[0])
        """,
        id="thread",
    ),
    pytest.param(
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(1) as pool:
            print(pool.submit(train, 30).result())
        """,
        id="thread_pool",
        marks=pytest.mark.extended,
    ),
    pytest.param(
        """
        import multiprocessing
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            child = context.Process(target=train)
            child.start()
            child.join()
            assert child.exitcode == 0 and sys.argv[0] == "script.py"
            train()
        """,
        id="spawned",
        marks=pytest.mark.extended,
    ),
    pytest.param(
        """
        import atexit, pickle
        class Own(nn.Linear): pass
        model = pickle.loads(pickle.dumps(Own(8, 8)))
        train(model=model)
        atexit.register(lambda: sys.stderr.write(model.weight.dtype and ""))
        """,
        id="pickled_classes",
    ),
]


@pytest.mark.parametrize("source", COMPLETE)
def test_a_script_is_checked_to_its_end(source: str, tmp_path: Path) -> None:
    code, printed, errors = check(tmp_path, source)
    assert (code, "no mistake in" in printed) == (0, True), errors


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("print('own')\ntrain()", id="print"),
        pytest.param(
            "import subprocess\nsubprocess.run(['echo', 'own'])\ntrain()", id="subprocess"
        ),
        pytest.param("sys.__stdout__.write('own')\ntrain()", id="original_stdout"),
        pytest.param(
            "import builtins\nbuiltins.print = lambda *values, **options: None\ntrain()",
            id="print_switched_off",
        ),
    ],
)
def test_stdout_holds_only_the_json(source: str, tmp_path: Path) -> None:
    code, printed, _errors = check(tmp_path, source, "--json")
    assert code == 0
    assert json.loads(printed)["steps"] == 3


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("sys.stdout = open('log.txt', 'w')\ntrain()", id="log_file"),
        pytest.param("train()\nraise KeyboardInterrupt", id="interrupted"),
    ],
)
def test_the_report_is_printed(source: str, tmp_path: Path) -> None:
    _code, printed, _errors = check(tmp_path, source)
    assert "no mistake in 3 steps" in printed


def test_the_message_of_an_exit_is_printed(tmp_path: Path) -> None:
    _code, _printed, errors = check(tmp_path, "sys.exit('no data in ./data')")
    assert "no data in ./data" in errors


def test_a_module_with_relative_imports_is_checked(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text(NET)
    (package / "__main__.py").write_text("from .net import sys, train\ntrain(len(sys.argv))\n")
    process = start([*HALFSTEP, "-m", "package", "an", "--option"], tmp_path)
    printed, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert "package: no mistake in 3 steps" in printed


DATA_PARALLEL = """
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
wrapped, own = DistributedDataParallel(net()), net()
scaler = GradScaler("cpu", init_scale=256.0)
optimizers = [torch.optim.AdamW(each.parameters()) for each in (wrapped, own)]
torch.manual_seed(rank)
for step in range(4):
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.float16):
        losses = [model(x).square().mean() for model in (wrapped, own)]
    for loss in losses:
        scaler.scale(loss).backward()
    for parameter in own.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    for optimizer in optimizers:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
states = [wrapped.state_dict(), own.state_dict(), scaler.state_dict(), torch.get_rng_state()]
torch.save(states, f"{sys.argv[1]}-{rank}.pt")
dist.destroy_process_group()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> list[tuple[int, str]]:
    """Train on two processes, unchecked and checked; return exit codes and stdout of the latter."""
    (tmp_path / "script.py").write_text(NET + DATA_PARALLEL)
    commands = {"bare": [sys.executable], "checked": [*HALFSTEP, "--steps", "0"]}
    for name, command in commands.items():
        port = str(free_port())
        processes = [
            start(
                [*command, "script.py", name],
                tmp_path,
                **{"RANK": rank, "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            )
            for rank in "01"
        ]
        printed = [each.communicate(timeout=120)[0] for each in processes]
    return list(zip((each.returncode for each in processes), printed, strict=True))


def test_two_data_parallel_processes_are_healthy_and_equal_to_the_bit(
    ranks: list[tuple[int, str]], tmp_path: Path
) -> None:
    for rank in range(2):
        states = [bits(torch.load(tmp_path / f"{name}-{rank}.pt")) for name in ("bare", "checked")]
        assert states[0] == states[1]
    assert all("in 4 steps" in printed for _code, printed in ranks)
    assert [code for code, _printed in ranks] == [0, 0]
