"""Saves on a real GPU: the loop waits for no copy; what is saved is the state of the boundary."""

import torch

from tests.trainer.conftest import Regression, assert_same_bits
from trainer.checkpoints.snapshot import Staging, room

CUDA = torch.device("cuda", 0)
LARGE = 2**28  # bytes: of copies that take milliseconds


def test_a_snapshot_waits_for_nothing_and_is_of_its_moment():
    """PyTorch's debug mode sees no wait; the host is back before the device has come so far; and
    what is queued next, which changes the weights, does not reach the copy."""
    weights = torch.randn(LARGE // 4, device=CUDA)
    state = {"weights": weights, "tied": weights[:4], "step": torch.ones((), device=CUDA)}
    staging = Staging(CUDA)
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


def test_a_run_resumes_bit_exactly_from_a_save_beside_training(run_loop, tmp_path):
    """Steps go on while it is written, and the run that goes on from it ends in the same bits."""
    values = {"precision": "fp16", "training": {"steps": 60}, "checkpoints": {"every_steps": 20}}
    straight = run_loop(Regression, values, folder=tmp_path / "a", device=CUDA)
    half = tmp_path / "a/step-00000020.pt"
    resumed = run_loop(Regression, values, folder=tmp_path / "b", device=CUDA, resume=half)
    assert resumed.of("resumed")[0]["exact"]
    assert_same_bits(resumed.weights(), straight.weights())
