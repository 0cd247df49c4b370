"""A snapshot equals the state byte for byte, whatever happens to the state afterwards."""

import io
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.marks import looped
from tests.trainer.conftest import CPU, assert_same_bits
from trainer.checkpoints.snapshot import ALIGNMENT, Staging, room


def make_state():
    """Return a state with all that a checkpoint may hold: ties, strides, views, empty tensors."""
    whole = torch.randn(6, 4)
    weights = OrderedDict(weight=torch.randn(3, 5), bias=whole[1:3], last=whole[5, 3])
    weights["tied"] = weights["weight"].t()
    weights._metadata = {"": {"version": 1}}
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return {
        "modules": {"model": weights},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0), "image": image}}, "rate": 1e-3},
        "random": [(3, [1, 2]), torch.arange(9, dtype=torch.uint8)],
        "none": [torch.empty(0, 3), torch.empty(0), None],
        "types": [torch.ones(3, dtype=torch.bfloat16), torch.tensor([True, False])],
        "own": [torch.nn.Parameter(torch.ones(2)), torch.eye(3).to_sparse()],
    }


def file_of(state):
    """Return the bytes of the state's checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_snapshot_makes_the_same_file_as_its_state():
    """A snapshot and its state make the same file byte for byte, with shared memory and extra
    state.
    """
    state = make_state()
    assert file_of(Staging(CPU).take(state).state) == file_of(state)


def test_what_changes_later_does_not_reach_it():
    """Later changes of tensors, lists and dicts do not reach the snapshot."""
    state = make_state()
    before = file_of(state)
    snapshot = Staging(CPU).take(state)
    for tensor in (state["modules"]["model"]["weight"], state["own"][0].data, state["own"][1]):
        tensor.mul_(2)
    state["optimizer"]["state"][0]["step"] += 1
    state["random"][0][1].append(3)
    state["modules"]["model"]["new"] = torch.ones(1)
    assert file_of(snapshot.state) == before


def test_a_conjugate_keeps_its_values():
    """A snapshot of a conjugate tensor, a flag on shared memory, has its own values."""
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    copied = Staging(CPU).take([conjugate]).state[0]
    assert torch.equal(copied, torch.tensor([1 - 2j, 3 + 1j]))


def test_it_takes_the_state_once_and_the_next_takes_the_same_memory():
    """A snapshot copies the state once, and the next one of equal size reuses its memory."""
    state = {"large": torch.randn(1000), "tied": None, "small": torch.randn(3)}
    state["tied"] = state["large"][:10]
    assert room(state) <= 4 * 1003 + 2 * ALIGNMENT
    staging = Staging(CPU)
    staging.make_room(room(state))
    first = staging.take(state).state
    kept, place = first["large"].clone(), first["large"].data_ptr()
    state["large"] += 1
    second = staging.take(state).state
    assert second["large"].data_ptr() == second["tied"].data_ptr() == place
    assert_same_bits(second["large"], kept + 1)


class Asked(TorchDispatchMode):
    """A mode that records a snapshot's calls to the state's device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


#: Make a tensor of memory, and queue a copy. Neither reads a value.
QUEUED = {"empty", "empty_strided", "set_", "copy_"}


@looped("spoil", [None, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu])
def test_nothing_in_it_waits_for_a_device(spoil):
    """A snapshot only queues asynchronous copies for a checkpoint's tensors, and waits for none."""
    state = {name: make_state()[name] for name in ("modules", "optimizer", "types")}
    with Asked() as asked:
        Staging(CPU).take(state)
        if spoil:
            spoil(state["modules"]["model"]["last"] + 0)
    names = {name for name, _arguments in asked.operations}
    # zero_ and lift_fresh are of the memory on the host.
    assert (names <= QUEUED | {"zero_", "detach"}) == (spoil is None), names
    copies = [arguments for name, arguments in asked.operations if name == "copy_"]
    assert len(copies) == 6
    assert all(non_blocking is True for _to, _source, non_blocking in copies)


def test_on_cuda_the_memory_is_pinned_and_an_event_follows_the_copies(monkeypatch):
    """On CUDA memory is pinned once for all saves and released at the end; the writer waits for the
    copies' event.

    tests/gpu shows on a device that nothing delays it.
    """
    asked = []

    class Runtime:
        def cudaHostRegister(self, place, size_bytes, flags):  # noqa: N802 - CUDA's name
            asked.append(("pinned", place, size_bytes))
            return 0

        def cudaHostUnregister(self, place):  # noqa: N802 - likewise
            asked.append(("unpinned", place))
            return 0

    class Arrival:
        def __init__(self, *, blocking):
            assert blocking

        def record(self, stream):
            asked.append(("recorded", stream))

        def synchronize(self):
            asked.append(("waited", None))

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(torch.cuda, "Event", Arrival)
    state = {"weights": torch.randn(100)}
    staging = Staging(torch.device("cuda", 0))
    for _ in range(2):
        snapshot = staging.take(state)
    snapshot.wait()
    place = snapshot.state["weights"].data_ptr()
    staging.close()
    assert asked == [
        ("pinned", place, room(state)),
        ("recorded", "of cuda:0"),
        ("recorded", "of cuda:0"),
        ("waited", None),
        ("unpinned", place),
    ]
