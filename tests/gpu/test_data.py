"""Batches that data workers read, on their way to a GPU."""

from contextlib import ExitStack

import pytest

from tests.gpu.device import DEVICE, sync_debug_mode
from tests.reading import Reading
from tests.trainer.conftest import assert_same_bits


@pytest.mark.parametrize("pin", [True, False])
def test_workers_change_no_bit_on_a_gpu(run_loop, pin):
    """A batch's asynchronous copy is complete before its use, and its memory is not reused
    earlier.
    """
    training = {"steps": 300, "batch_size": 8}
    alone = run_loop(Reading, {"training": training, "data": {"workers": 0}}, device=DEVICE)
    data = {"workers": 2, "pin": pin}
    read = run_loop(Reading, {"training": training, "data": data}, device=DEVICE)
    assert read.records["loss"].tolist() == alone.records["loss"].tolist()
    assert_same_bits(read.weights(), alone.weights())


def test_taking_a_batch_waits_for_nothing(run_loop):
    """Taking a batch waits neither for its copy nor for the previous step."""

    class Watched(Reading):
        def training_step(self, batch):
            modes.enter_context(sync_debug_mode("error"))
            yield from super().training_step(batch)

    values = {"training": {"steps": 20, "batch_size": 8}, "diagnosis": {"replay_skips": 0}}
    with ExitStack() as modes:
        run = run_loop(Watched, values | {"data": {"workers": 2}}, device=DEVICE)
    assert len(run.records) == 20
