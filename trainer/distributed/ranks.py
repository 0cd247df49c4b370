"""The ranks of one run: one process a device, on one machine or several, or a single one alone.

Gradients travel between devices by the device's own backend (NCCL, or gloo on the CPU). What ranks
have to agree on, such as a request to stop, travels between hosts by gloo, so that agreeing does
not make anybody wait for a device.
"""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.config_groups import Training
from halfstep.recipe import RecipeError
from halfstep.run_config import RunConfig
from halfstep.telemetry.attempt_files import AttemptFiles, write_file
from trainer.checkpoints.files import PIECE_BYTES, write_whole
from trainer.distributed.shards import Calls, shard

Stop: TypeAlias = Literal["cancel", "pause", "preempt"]
STOPS: tuple[Stop | None, ...] = (None, "preempt", "pause", "cancel")  # the last ones prevail
Kind: TypeAlias = Literal["checkpoint", "scale", "replay"]
KINDS: tuple[Kind, ...] = ("checkpoint", "scale", "replay")

AGREE_SECONDS = 0.2  # between two looks at what the outside wants
MOST_STEPS_ALONE = 1000  # however quick they are
LONGEST_SAVE = timedelta(days=1)
LOOK_SECONDS = 0.05  # between two looks for where to meet


@dataclass(frozen=True)
class Request:
    """Something to do once. value: the scale to go on with, or the step to replay."""

    id: int
    kind: Kind
    value: float = 0.0


@dataclass(frozen=True)
class Control:
    """What the outside wants at a step boundary: that training stops, or one request, or both."""

    stop: Stop | None = None
    request: Request | None = None


class Ranks:
    """A single process. Everything that ranks do together is nothing here."""

    rank, world_size = 0, 1

    def wrap(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        config: RunConfig[Any],
        device: torch.device,
    ) -> dict[str, nn.Module]:
        """Return the modules as they are trained: with their gradients averaged over the ranks."""
        return dict(modules)

    def mean_(self, value: Tensor) -> Tensor:
        """Average a device tensor over the ranks, in place, without waiting for it."""
        return value

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Leave gradients on their rank: all but the last pass of an accumulation need no more."""
        yield

    def agree(self, control: Callable[[], Control]) -> Control:
        """Return what all ranks will obey: the strongest stop, and the request one of them has.

        control: what this rank has heard of, asked when the ranks are due to agree.
        """
        return control()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of rank."""
        return [value]

    def hand_out(self, path: Path) -> bool:
        """Have a file that rank 0 has on every machine's disk; tell whether this rank brought it.

        path: where this rank looks for it, which may be where rank 0 does.
        """
        return False

    def another_group(self) -> Any:
        """Return a process group on hosts for a thread of each rank; all ranks ask at once."""
        return None


class ProcessGroup(Ranks):
    """The ranks that were started together, after `init_process_group`."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Ranks wait here while one of them saves, for as long as its disk takes.
        self._hosts = self.another_group()
        self._steps_until_agreed = self._steps_between = 1
        self._agreed_at = time.monotonic()
        # Kept here, because the recipe may call them through a wrapper of torch.compile.
        self._averaged: list[DistributedDataParallel] = []
        self._calls = Calls()

    def wrap(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        config: RunConfig[Any],
        device: torch.device,
    ) -> dict[str, nn.Module]:
        """Return the modules in DistributedDataParallel, or themselves in shards."""
        if config.training.parallel == "fsdp":
            self._calls = shard(modules, optimizers, config, device)
            return dict(modules)
        return {name: self._averaging(m, config.training) for name, m in modules.items()}

    def _averaging(self, module: nn.Module, training: Training) -> nn.Module:
        """Return the module in DistributedDataParallel; one without parameters as it is."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        averaged = DistributedDataParallel(
            module,
            find_unused_parameters=training.unused_parameters,
            static_graph=training.static_graph,
            gradient_as_bucket_view=True,  # gradients lie where they are averaged, once
        )
        self._averaged.append(averaged)
        return averaged

    def mean_(self, value: Tensor) -> Tensor:
        """Average a device tensor over the ranks; NCCL queues it behind the work before."""
        dist.all_reduce(value.div_(self.world_size))
        return value

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Leave gradients on their rank. Forward and backward have both to be inside.

        Not those of shards: they would be whole on each rank until the last pass.
        """
        with ExitStack() as stack:
            for module in self._averaged:
                stack.enter_context(module.no_sync())
            yield

    def agree(self, control: Callable[[], Control]) -> Control:
        """Return what all ranks will obey: the strongest stop, and the request one of them has.

        Every so many steps, the same on all ranks: as many as make AGREE_SECONDS.  Raises
        RecipeError if their shards do not belong together any more.
        """
        self._steps_until_agreed -= 1
        if self._steps_until_agreed > 0:
            return Control()
        heard = control()
        request = heard.request
        numbers = [0.0, 0.0, 0.0]
        if request:
            numbers = [request.id, KINDS.index(request.kind), request.value]
        seconds = (time.monotonic() - self._agreed_at) / self._steps_between
        calls = self._calls.checksum
        own = [STOPS.index(heard.stop), *numbers, seconds, calls, -calls]
        wanted = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self._hosts)
        # On hosts: nobody waits for a device.
        stop, id_, kind, value, seconds, most, least = wanted.tolist()
        if most != -least:
            raise RecipeError(
                "training.parallel is fsdp, and the ranks have called modules in unlike orders, so "
                "that weights of one were taken for another's; call the same ones on all ranks, or "
                "name what holds them in modules.sharded"
            )
        self._agreed_at = time.monotonic()
        self._steps_between = max(1, min(int(AGREE_SECONDS / max(seconds, 1e-6)), MOST_STEPS_ALONE))
        self._steps_until_agreed = self._steps_between
        agreed = Request(int(id_), KINDS[int(kind)], value) if id_ else None
        return Control(STOPS[int(stop)], agreed)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of rank."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def hand_out(self, path: Path) -> bool:
        """Have rank 0's file on every machine's disk; tell whether this rank brought it there."""
        place = socket.gethostname(), str(path)
        places = self.gather(place)
        if all(each == places[0] for each in places):
            return False
        brings = places.index(place) == self.rank > 0  # the first of its machine does, for all
        [size_bytes, *_] = self.gather(path.stat().st_size if self.rank == 0 else 0)
        pieces = self._read_by_first(path, size_bytes)

        def take(file: Any) -> None:
            for piece in pieces:
                file.write(piece)

        if brings:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, take)
        else:
            deque(pieces, maxlen=0)  # each takes part
        self.gather(None)  # the others of its machine read what it brought
        return brings

    def _read_by_first(self, path: Path, left: int) -> Iterator[memoryview]:
        """Yield on all ranks what rank 0 reads of a file of so many bytes."""
        with path.open("rb") if self.rank == 0 else nullcontext() as file:
            while left:
                piece = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
                if file is not None:
                    file.readinto(piece.numpy().data)
                dist.broadcast(piece, 0, group=self._hosts)
                yield piece.numpy().data
                left -= len(piece)

    def another_group(self) -> Any:
        """Return a process group on hosts for a thread of each rank; all ranks ask at once."""
        return dist.new_group(backend="gloo", timeout=LONGEST_SAVE)


def is_desertion(error: BaseException) -> bool:
    """Tell whether an error says no more than that another rank does not answer."""
    is_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)  # which has no class for it
    return is_gloo or isinstance(error, dist.DistError)


def rendezvous(files: AttemptFiles, host: str) -> Store:
    """Return the store by which the ranks of an attempt find each other.

    Rank 0 opens it, on a free port, and says where in a file; the others wait for that file, which
    supervisors bring to the other nodes.  host: by which these reach rank 0's machine.
    """
    if os.environ["RANK"] == "0":
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        write_file(files.meeting, {"host": host, "port": store.port})
    else:
        while not files.meeting.exists():
            time.sleep(LOOK_SECONDS)
        place = json.loads(files.meeting.read_text())
        store = TCPStore(place["host"], place["port"], wait_for_workers=False)
    return PrefixStore(f"attempt-{files.attempt}", store)


@contextmanager
def joined(
    device: torch.device,
    store: Callable[[], Store] | None = None,
    timeout_seconds: float | None = None,
) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the ranks that the environment names; yield them and this rank's device.

    store: where they meet; by the environment's MASTER_ADDR and MASTER_PORT, as torchrun sets them,
    if there is none.  timeout_seconds: how long they wait for each other at most.
    """
    if "RANK" not in os.environ:
        yield Ranks(), device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store() if store else None,
        timeout=timedelta(seconds=timeout_seconds) if timeout_seconds else None,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    try:
        yield ProcessGroup(), device
    finally:
        dist.destroy_process_group()
