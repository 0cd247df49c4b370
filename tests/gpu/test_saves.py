"""Saves on a GPU: the loop does not wait for copies; the state is the step boundary's."""

import torch

from tests.gpu.device import DEVICE, needs_cuda
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.checkpoints.snapshot import Staging, room

LARGE = 2**28  # bytes: of copies that take milliseconds


@needs_cuda
def test_a_snapshot_is_asynchronous_and_consistent():
    """A snapshot returns before the device has finished, without a synchronization; later
    kernels that change the weights do not affect it.
    """
    weights = torch.randn(LARGE // 4, device=DEVICE)
    state = {"weights": weights, "tied": weights[:4], "step": torch.ones((), device=DEVICE)}
    staging = Staging(DEVICE)
    staging.make_room(room(state))
    before = weights.cpu()
    torch.cuda._sleep(10**9)  # cycles: half a second of queued work
    work_done = torch.cuda.Event()
    work_done.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        snapshot = staging.take(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not work_done.query()  # the host has waited neither for it nor for the copies
    weights.add_(1.0)
    snapshot.wait()
    assert work_done.query()
    assert torch.equal(snapshot.state["weights"], before)
    assert snapshot.state["tied"].data_ptr() == snapshot.state["weights"].data_ptr()
    assert snapshot.state["weights"].is_pinned()
    staging.close()


def test_a_run_resumes_bit_exactly_from_a_background_save(run_loop, tmp_path):
    """Training continues during the write, and the resumed run ends with the same bits."""
    values = {"precision": "fp16", "training": {"steps": 60}, "checkpoints": {"every_steps": 20}}
    straight = run_loop(Regression, values, folder=tmp_path / "a", device=DEVICE)
    half = tmp_path / "a/step-00000020.pt"
    resumed = run_loop(Regression, values, folder=tmp_path / "b", device=DEVICE, resume=half)
    assert resumed.of("resumed")[0]["exact"]
    assert_same_bits(resumed.weights(), straight.weights())
