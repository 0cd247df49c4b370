"""The ranks of a run: one process per device on one or several machines, or a single one.

Gradients are exchanged between devices by the device's backend (NCCL, or gloo on the CPU).
Decisions common to all ranks, such as a request to stop, are exchanged between hosts by gloo, so
that agreeing does not wait for a device.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from halfstep.config_groups import Training
from halfstep.recipe import RecipeError
from halfstep.run_config import RunConfig
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.attempt_messages import (
    Rendezvous,
    RequestKind,
    Stop,
    read_message,
    write_message,
)
from trainer.checkpoints.files import PIECE_BYTES, write_whole
from trainer.distributed.shards import Calls, shard

# The last ones take precedence.
STOPS: tuple[Stop | None, ...] = (None, "preempt", "pause", "cancel")
KINDS: tuple[RequestKind, ...] = ("checkpoint", "scale", "replay", "precision_diff")

AGREE_SECONDS = 0.2  # between two polls of control requests
MOST_STEPS_ALONE = 1000  # maximum number of steps between two polls
LONGEST_SAVE = timedelta(days=1)
POLL_SECONDS = 0.05  # between two polls for the rendezvous file


@dataclass(frozen=True)
class Request:
    """A one-time request."""

    id: int
    kind: RequestKind
    value: float = 0.0  # the new scale, or the step to replay


@dataclass(frozen=True)
class Control:
    """Control input at a step boundary: a stop, a request, or both."""

    stop: Stop | None = None
    request: Request | None = None


class Ranks:
    """A single process: all collective operations are trivial."""

    rank, world_size = 0, 1

    def wrap(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        config: RunConfig,
        device: torch.device,
    ) -> dict[str, nn.Module]:
        """Return the modules for training, with gradients averaged over the ranks."""
        return dict(modules)

    def mean_(self, value: Tensor) -> Tensor:
        """Average a device tensor over the ranks, in place, without waiting for the device."""
        return value

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Skip averaging of gradients, for all but the last pass of an accumulation."""
        yield

    def agree(self, control: Callable[[], Control]) -> Control:
        """Return the same control for all ranks: the strongest stop, and any rank's request.

        control: returns this rank's control input; called when the ranks are due to agree.
        """
        return control()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of rank."""
        return [value]

    def hand_out(self, path: Path) -> bool:
        """Copy rank 0's file to every machine; return whether this rank wrote it.

        path: of the file on this rank, which may be the same as on rank 0.
        """
        return False

    def another_group(self) -> object:
        """Return a gloo process group for a thread of each rank; all ranks call it."""
        return None


class ProcessGroup(Ranks):
    """The ranks of a process group, after `init_process_group`."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # Ranks wait here while one of them saves, for as long as its disk takes.
        self._hosts = self.another_group()
        self._steps_until_agreed = self._steps_between = 1
        self._agreed_at = time.monotonic()
        # Stored here, because the recipe may call them through a wrapper of torch.compile.
        self._averaged: list[DistributedDataParallel] = []
        self._calls = Calls()

    def wrap(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        config: RunConfig,
        device: torch.device,
    ) -> dict[str, nn.Module]:
        """Return the modules in DistributedDataParallel, or sharded in place."""
        if config.training.parallel == "fsdp":
            self._calls = shard(modules, optimizers, config, device)
            return dict(modules)
        return {name: self._averaging(m, config.training) for name, m in modules.items()}

    def _averaging(self, module: nn.Module, training: Training) -> nn.Module:
        """Return the module in DistributedDataParallel.

        Unchanged if it has no trainable parameters.
        """
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        averaged = DistributedDataParallel(
            module,
            find_unused_parameters=training.unused_parameters,
            static_graph=training.static_graph,
            gradient_as_bucket_view=True,  # gradients are views of the buckets, without copies
        )
        self._averaged.append(averaged)
        return averaged

    def mean_(self, value: Tensor) -> Tensor:
        """Average a device tensor over the ranks; NCCL queues it behind earlier work."""
        dist.all_reduce(value.div_(self.world_size))
        return value

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Skip averaging of gradients; forward and backward must both be inside.

        Not for shards, whose gradients would be whole on each rank until the last pass.
        """
        with ExitStack() as stack:
            for module in self._averaged:
                stack.enter_context(module.no_sync())
            yield

    def agree(self, control: Callable[[], Control]) -> Control:
        """Return the same control for all ranks: the strongest stop, and any rank's request.

        The ranks communicate once in as many steps as take AGREE_SECONDS, the same on all ranks.
        Raises RecipeError if their shards no longer belong together.
        """
        self._steps_until_agreed -= 1
        if self._steps_until_agreed > 0:
            return Control()
        own = control()
        request = own.request
        numbers = [0.0, 0.0, 0.0]
        if request:
            numbers = [request.id, KINDS.index(request.kind), request.value]
        seconds = (time.monotonic() - self._agreed_at) / self._steps_between
        calls = self._calls.checksum
        values = [STOPS.index(own.stop), *numbers, seconds, calls, -calls]
        strongest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(strongest, op=dist.ReduceOp.MAX, group=self._hosts)
        # On hosts: no wait for a device.
        stop, id_, kind, value, seconds, most, least = strongest.tolist()
        if most != -least:
            raise RecipeError(
                "training.parallel is fsdp, but the ranks called modules in different orders, "
                "which mixes up weights; call the same modules on all ranks, or "
                "name modules that contain them in modules.sharded"
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
        """Copy rank 0's file to every machine; return whether this rank wrote it."""
        place = socket.gethostname(), str(path)
        places = self.gather(place)
        if all(gathered == places[0] for gathered in places):
            return False
        # The first rank of its machine writes for all.
        writes = places.index(place) == self.rank > 0
        [size_bytes, *_] = self.gather(path.stat().st_size if self.rank == 0 else 0)
        pieces = self._read_by_first(path, size_bytes)

        def take(file: BinaryIO) -> None:
            for piece in pieces:
                file.write(piece)

        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, take)
        else:
            deque(pieces, maxlen=0)  # every rank takes part
        self.gather(None)  # then the other ranks of the machine can read it
        return writes

    def _read_by_first(self, path: Path, left: int) -> Iterator[memoryview]:
        """Yield on all ranks the pieces of a file that rank 0 reads. left: its size."""
        with path.open("rb") if self.rank == 0 else nullcontext() as file:
            while left:
                piece = torch.empty(min(left, PIECE_BYTES), dtype=torch.uint8)
                if file is not None:
                    file.readinto(piece.numpy().data)
                dist.broadcast(piece, 0, group=self._hosts)
                yield piece.numpy().data
                left -= len(piece)

    def another_group(self) -> Any:
        """Return a gloo process group for a thread of each rank; all ranks call it."""
        return dist.new_group(backend="gloo", timeout=LONGEST_SAVE)


def is_desertion(error: BaseException) -> bool:
    """Return whether an error only means that another rank does not respond."""
    # Gloo has no exception class.
    is_gloo = isinstance(error, RuntimeError) and "gloo/" in str(error)
    return is_gloo or isinstance(error, dist.DistError)


def rendezvous(files: AttemptFiles, host: str) -> Store:
    """Return the rendezvous store of an attempt's ranks.

    Rank 0 opens it on a free port, and writes its address to a file; other ranks wait for that
    file, which supervisors copy to the other nodes.  host: address of rank 0's machine for these.
    """
    if os.environ["RANK"] == "0":
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        write_message(files.rendezvous, Rendezvous(host=host, port=store.port))
    else:
        while not files.rendezvous.exists():
            time.sleep(POLL_SECONDS)
        place = read_message(files.rendezvous, Rendezvous)
        store = TCPStore(place.host, place.port, wait_for_workers=False)
    return PrefixStore(f"attempt-{files.attempt}", store)


@contextmanager
def join(
    device: torch.device,
    store: Callable[[], Store] | None = None,
    timeout_seconds: float | None = None,
) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the ranks given by the environment; yield them and this rank's device.

    store: rendezvous; by default MASTER_ADDR and MASTER_PORT of the environment, as set by
    torchrun.
    timeout_seconds: of collective operations.
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
