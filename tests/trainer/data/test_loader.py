"""Datasets read by data workers: the same bits for any number of workers and after resumes."""

import faulthandler
import mmap
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import threading
import traceback
from multiprocessing.process import BaseProcess

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from halfstep.recipe import Recipe, RecipeError
from halfstep.run_config import ConfigError, parse_config
from tests.marks import extended
from tests.reading import EXAMPLES, Noisy, Reading
from tests.trainer.conftest import CPU, Regression, assert_same_bits
from trainer.data.examples import DataError
from trainer.data.to_device import ToDevice
from trainer.data.worker_pool import WorkerPool
from trainer.setup import make_recipe

STEPS = 11


def settings(workers, **groups):
    """Return settings that train beyond the end of an epoch, with a few saves."""
    training = {"steps": STEPS, "batch_size": 4, "accumulation_steps": 2}
    data = {"workers": workers, "prefetch": 3}
    return {"training": training, "data": data, "checkpoints": {"every_steps": 4}} | groups


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, *extended([1, 4])])
def test_the_number_of_workers_changes_no_bit(run_loop, tmp_path, workers):
    """Losses and weights are the same for any number of data workers, also after a resume."""
    alone = run_loop(Reading, settings(0), tmp_path / "alone")
    read = run_loop(Reading, settings(workers), tmp_path / "read")
    assert read.records["loss"].tolist() == alone.records["loss"].tolist()
    resumed = run_loop(
        Reading,
        settings(workers),
        tmp_path / "resumed",
        resume=tmp_path / "alone" / "step-00000004.pt",
    )
    assert resumed.of("resumed")[0]["exact"]
    assert resumed.records["loss"].tolist() == alone.records["loss"][4:].tolist()
    assert_same_bits(resumed.weights(), alone.weights())


def test_a_recipe_has_one_kind_of_data():
    """A recipe without data, or with both a dataset and a stream, is rejected."""

    class Neither(Regression):
        batch = Recipe.batch

    class Both(Reading):
        batch = Regression.batch

    for wrong, message in ((Neither, "no training data"), (Both, "overrides batch")):
        with pytest.raises(RecipeError, match=message):
            make_recipe(wrong, parse_config(wrong, {}), CPU)
    assert make_recipe(Reading, parse_config(Reading, {}), CPU).train_size == EXAMPLES


class Counting(IterableDataset):
    """A stream of 10 examples that shuffles four at a time, with its position as state."""

    def __init__(self):
        self.gone = 0

    def __iter__(self):
        while self.gone < 10:
            value = self.gone + torch.rand(6)
            self.gone += 1
            yield value, value.sum(dim=0, keepdim=True)
        self.gone = 0

    def state_dict(self):
        return {"gone": self.gone}

    def load_state_dict(self, state):
        self.gone = state["gone"]


class Streaming(Reading):
    """The regression on a stream."""

    made = Counting


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_continues_after_the_batch_that_was_trained_on(run_loop, tmp_path, workers):
    """A stream continues after the last trained batch, for any prefetch, number of workers and
    across its end.
    """
    whole = run_loop(Streaming, settings(workers), tmp_path / "a")
    resumed = run_loop(
        Streaming,
        settings(2 - workers),
        tmp_path / "b",
        resume=tmp_path / "a" / "step-00000004.pt",
    )
    assert resumed.of("resumed")[0]["exact"]
    assert resumed.records["loss"].tolist() == whole.records["loss"][4:].tolist()
    assert_same_bits(resumed.weights(), whole.weights())


def test_a_stream_says_what_it_lacks(run_loop):
    """A stream without a position, a length for epochs or an example is rejected."""

    class Forgetful(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    class Lost(Streaming):
        made = Forgetful

    class Empty(Streaming):
        class made(Counting):  # noqa: N801
            def __iter__(self):
                return iter(())

    with pytest.raises(RecipeError, match=r"Forgetful, an IterableDataset: .* no state_dict"):
        run_loop(Lost)
    with pytest.raises(ConfigError, match=r"epochs is 2.0, but the dataset is a stream"):
        run_loop(Streaming, {"training": {"epochs": 2}})
    with pytest.raises(DataError, match=r"position 0 .*: it ends before its first example"):
        run_loop(Empty, settings(1))


class Broken(Noisy):
    """A dataset with one example that cannot be read."""

    def __getitem__(self, index):
        if index == 20:
            raise OSError("image 20 is truncated")
        return super().__getitem__(index)


class Uneven(Noisy):
    """A dataset with one example that is longer than the others."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return (torch.cat([inputs, inputs]) if index == 20 else inputs), targets


class Leaving(Noisy):
    """A dataset with one example that ends the process reading it."""

    def __getitem__(self, index):
        if index == 20 and get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def reading(dataset):
    """Return the regression with such a dataset."""
    return type("Reading", (Reading,), {"made": dataset})


@pytest.mark.parametrize("workers", [0, 2])
def test_what_reading_raises_names_the_example_with_its_traceback(run_loop, workers):
    """An unreadable example is named in the last line of the traceback, with the original error."""
    with pytest.raises(DataError) as raised:
        run_loop(reading(Broken), settings(workers))
    text = "".join(traceback.format_exception(raised.value))
    assert text.splitlines()[-1] == (
        "trainer.data.examples.DataError: example 20 cannot be read (Broken): "
        "OSError: image 20 is truncated"
    )
    assert 'raise OSError("image 20 is truncated")' in text


@pytest.mark.slow
def test_examples_of_different_shape_are_named(run_loop):
    """The error for examples of different shapes names two of them, and collate's message."""
    with pytest.raises(
        DataError, match=r"example \d+ has the shape .*example 20 \(12,\), \(1,\); coll"
    ):
        run_loop(reading(Uneven), settings(2) | {"training": {"shuffle": False, "batch_size": 32}})


def test_a_collate_that_fails_is_reported(run_loop):
    """If collate fails, the error names the examples of the batch."""

    class Failing(Reading):
        def collate(self, examples):
            raise KeyError("labels")

    with pytest.raises(
        DataError, match=r"examples \d+, .* cannot be collated into a batch: KeyError: 'labels'"
    ):
        run_loop(Failing, settings(1))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_with_its_example(run_loop):
    """A killed worker is named with its example, and not restarted, as if memory was short."""
    with pytest.raises(
        DataError, match=r"data worker \d .*, at example 20\) was killed by SIGKILL"
    ):
        run_loop(reading(Leaving), settings(2))
    assert not multiprocessing.active_children()


def test_a_long_wait_shows_where_the_worker_is(run_loop, monkeypatch, tmp_path):
    """A long wait for data is reported with the worker's stack and example."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Hanging(Noisy):
        def __getitem__(self, index):
            if index == 20:
                gate.read_bytes()
            return super().__getitem__(index)

    result = []

    def hear(sentence):
        if "read_bytes" in sentence and not result:  # not of a worker that is merely slow
            result.append(sentence)
            gate.write_bytes(b"")

    monkeypatch.setattr("trainer.setup.report_wait", hear)
    values = settings(1, data={"workers": 1, "wait_seconds": 0.2})
    values["training"] |= {"steps": 4, "shuffle": False}
    run = run_loop(reading(Hanging), values)
    [sentence] = result
    assert sentence.startswith("training has waited ")
    assert ", at example 20):\nStack (most recent call first):" in sentence
    assert len(run.records) == 4


def test_too_small_a_dataset_is_reported(run_loop):
    """A dataset smaller than a batch is rejected, as other kinds of data are."""
    with pytest.raises(ConfigError, match="has 37 training examples: choose at most 37"):
        run_loop(Reading, {"training": {"batch_size": 38}})


@pytest.mark.slow
def test_workers_end_with_the_training(run_loop):
    """Workers end with the training, also by an exception, and do not change its random state."""

    class Raising(Reading):
        def training_step(self, batch):
            raise RuntimeError("a step")

    with pytest.raises(RuntimeError, match="a step"):
        run_loop(Raising, settings(2))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("base", [Reading, Streaming])
def test_a_batch_that_cannot_be_sent_is_reported(run_loop, base):
    """A batch that cannot be pickled is reported with its examples, and not waited for."""

    class Unsendable(base):
        def collate(self, examples):
            return lambda: examples

    with pytest.raises(DataError, match=r"batch of examples \d+, .* cannot be sent .*lambda"):
        run_loop(Unsendable, settings(1))


def test_a_batch_beyond_shared_memory_is_reported(run_loop):
    """A batch beyond shared memory is reported like one that cannot be pickled."""

    class Vast(Reading):
        def collate(self, examples):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # in the worker
            return torch.zeros(100)

    with pytest.raises(DataError, match=r"cannot be sent to the training: .*too large"):
        run_loop(Vast, settings(1))


def test_workers_that_are_stuck_end_with_the_training(run_loop, monkeypatch, tmp_path):
    """A worker that is stuck is ended at once, without a request that it could not receive."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Stuck(Noisy):
        def __getitem__(self, index):
            if index >= 8:
                gate.read_bytes()
            return super().__getitem__(index)

    asked = []
    monkeypatch.setattr(BaseProcess, "terminate", asked.append)
    values = settings(2) | {"training": {"steps": 1, "batch_size": 4, "shuffle": False}}
    run_loop(reading(Stuck), values)
    assert not multiprocessing.active_children()
    assert not asked


def test_all_workers_print_their_stacks_at_once(monkeypatch):
    """A wait is reported once all workers have sent their stacks, and very deep ones are cut."""
    monkeypatch.setattr("trainer.data.worker_pool.STACK_SECONDS", 600.0)
    fork = multiprocessing.get_context("fork")
    worker_pool, ready = WorkerPool(2), fork.Barrier(3)

    def work(number, frees):
        worker_pool.join(number)

        def hear(*_):
            os.kill(frees, signal.SIGCONT)
            faulthandler.dump_traceback(worker_pool._stacks[number], all_threads=False)

        if frees:
            signal.signal(signal.SIGUSR1, hear)
        deep(150)

    def deep(frames):
        if not frames:
            ready.wait()
        while not frames:
            signal.pause()
        deep(frames - 1)

    first = fork.Process(target=work, args=(0, None))
    first.start()
    second = fork.Process(target=work, args=(1, first.pid))
    second.start()
    ready.wait()
    os.kill(first.pid, signal.SIGSTOP)
    worker_pool.remember([first, second])
    assert worker_pool.stacks().count("in deep") >= 190
    worker_pool.end()


def test_while_a_step_is_made_the_next_batch_is_read_and_brought(run_loop, monkeypatch):
    """The next batch is read and copied to the device while a step runs."""
    read = mmap.mmap(-1, EXAMPLES)  # the worker's examples, counted from 1, in its order
    brought, is_one_more = [], threading.Condition()

    class Noted(Noisy):
        def __getitem__(self, index):
            read.write_byte(index + 1)
            return super().__getitem__(index)

    class Told(ToDevice):
        def begin(self, batch):
            on_the_way = super().begin(batch)
            with is_one_more:
                brought.append(batch)
                is_one_more.notify()
            return on_the_way

    class Held(reading(Noted)):
        step = 0

        def training_step(self, batch):
            self.step += 1
            ahead = min(self.step + 1, 4)  # the last one has none
            with is_one_more:
                assert is_one_more.wait_for(lambda: len(brought) >= ahead, timeout=60)
            assert read[: 4 * ahead] == bytes(range(1, 4 * ahead + 1))
            yield from super().training_step(batch)

    monkeypatch.setattr("trainer.data.loader.ToDevice", Told)
    training = {"steps": 4, "batch_size": 4, "shuffle": False}
    run = run_loop(Held, {"training": training, "data": {"workers": 1, "prefetch": 1}})
    assert len(run.records) == 4


def test_a_worker_that_has_closed_its_files_is_waited_for_until_it_is_dead():
    """A worker that has closed its files is waited for until its exit code is available."""
    fork = multiprocessing.get_context("fork")
    worker_pool, may_die = WorkerPool(1), fork.Event()

    def work():
        worker_pool.join(0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        may_die.wait()
        os.kill(os.getpid(), signal.SIGKILL)

    process = fork.Process(target=work)
    process.start()
    worker_pool.remember([process])
    assert multiprocessing.connection.wait([process.sentinel], 60)
    assert process.exitcode is None
    dying = threading.Timer(0.5, may_die.set)
    dying.start()
    worker_pool.wait(60)
    with pytest.raises(DataError, match="was killed by SIGKILL"):
        worker_pool.check()
    dying.join()
    worker_pool.end()
