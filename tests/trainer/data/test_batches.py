import torch

from halfstep.config_groups import Training
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.data.batches import Batches, fingerprint
from trainer.data.sampler import Sampler
from trainer.data.sources import Drawn

VALUES = {"training": {"steps": 6, "batch_size": 8}, "checkpoints": {"every_steps": 3}}


class Shuffled(Regression):
    """A loader with an order of its own, which ignores the indices and cannot be repeated."""

    def batch(self, indices, generator):
        rows = torch.randint(64, (len(indices),), generator=self.order)
        return self.inputs[rows], self.targets[rows]

    def __init__(self, config, device):
        super().__init__(config, device)
        self.order = torch.Generator().manual_seed(5)


class Remembered(Shuffled):
    """The same loader with its order's state in the checkpoint."""

    def state_dict(self):
        return {"order": self.order.get_state()}

    def load_state_dict(self, state):
        self.order.set_state(state["order"])


def resume(run_loop, tmp_path, recipe):
    """Return a run of six steps, and one that resumes from its third."""
    whole = run_loop(recipe, VALUES, tmp_path / "a")
    return whole, run_loop(
        recipe, VALUES, tmp_path / "b", resume=tmp_path / "a" / "step-00000003.pt"
    )


def test_a_recipe_that_ignores_its_indices_is_not_called_exact(run_loop, tmp_path):
    """If a recipe ignores its indices, a run resumes with other data, and a note says so."""
    whole, resumed = resume(run_loop, tmp_path, Shuffled)
    [result] = resumed.of("resumed")
    assert not result["exact"]
    assert result["notes"] == [
        "the next batch differs: Recipe.batch does not depend only on its indices"
    ]
    assert resumed.records["loss"].tolist() != whole.records["loss"][3:].tolist()


def test_a_loader_with_saved_state_is_exact(run_loop, tmp_path):
    """Batches are the same if the loader's state is in the checkpoint."""
    whole, resumed = resume(run_loop, tmp_path, Remembered)
    assert resumed.of("resumed")[0]["exact"]
    assert resumed.records["loss"].tolist() == whole.records["loss"][3:].tolist()
    assert_same_bits(resumed.weights(), whole.weights())


def test_a_checkpoint_draws_no_batch_twice(run_loop, tmp_path):
    """A checkpoint's fingerprint uses the next step's batch, without drawing one twice."""
    often = VALUES | {"checkpoints": {"every_steps": 1}}
    saved = run_loop(Shuffled, often, tmp_path / "a")
    assert saved.records["loss"].tolist() == run_loop(Shuffled, VALUES).records["loss"].tolist()


def test_a_fork_of_an_old_checkpoint_names_unknown_values(run_loop, tmp_path):
    """For a checkpoint without a batch fingerprint no statement on the data is made."""
    run_loop(Regression, VALUES, tmp_path)
    path = tmp_path / "step-00000003.pt"
    state = torch.load(path, weights_only=True)
    del state["next_batch"]
    torch.save(state, path)
    [result] = run_loop(Regression, VALUES, resume=path).of("resumed")
    assert result["notes"] == ["the next batch is unknown"]


def test_drawing_ahead_changes_neither_order_nor_position():
    """Computing fingerprints ahead changes neither order nor position, at any point."""
    training = Training(batch_size=5, accumulation_steps=3)

    def drawn(asks):
        class Indices:
            def batch(self, indices, generator):
                return indices.clone(), generator.initial_seed()

        sampler = Sampler(16, training)
        drawn = Drawn(Indices(), sampler)
        batches = Batches(sampler, drawn, drawn)
        found = []
        for _ in range(4):
            position = batches.position
            for _ in range(asks):
                batches.fingerprint()
            assert batches.position == position
            found += [(rows.tolist(), seed) for rows, seed in batches.step()]
            assert batches.position == position + 15
        return found

    assert drawn(0) == drawn(1) == drawn(2)


def test_a_fingerprint_sees_every_value_type_and_shape():
    """Equal batches have equal fingerprints; another bit, type, shape or value changes it."""
    batch = {"x": torch.arange(6.0).view(2, 3), "y": [torch.tensor(True), "text", 3]}
    same = {"x": torch.arange(6.0).view(2, 3), "y": [torch.tensor(True), "text", 3]}
    assert fingerprint(batch) == fingerprint(same)
    others = [
        batch | {"x": batch["x"].view(3, 2)},
        batch | {"x": batch["x"].double()},
        batch | {"x": batch["x"] + torch.eye(2, 3) * 1e-7},
        batch | {"y": [torch.tensor(True), "text", 4]},
        batch | {"y": [torch.tensor(False), "text", 3]},
    ]
    assert len({fingerprint(each) for each in [batch, *others]}) == 6
    assert fingerprint(torch.zeros(0)) != fingerprint(torch.zeros(0, 1))


class Slow(Regression):
    """A slow loader with a fake clock."""

    def batch(self, indices, generator):
        clock[0] += 0.25
        return super().batch(indices, generator)


clock = [0.0]


def test_the_data_wait_of_a_step_is_in_its_row(run_loop, monkeypatch):
    """A step's data wait is the sum over its micro-batches, and at most its time."""
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    training = {"steps": 3, "batch_size": 8, "accumulation_steps": 2}
    run = run_loop(Slow, {"training": training})
    assert run.records["data_us"].tolist() == [500_000] * 3
    assert run.records["step_us"].tolist() == [500_000] * 3


def test_a_checkpoint_from_before_orders_were_computed_says_that_it_is(run_loop, tmp_path):
    """If a checkpoint's position is in an older order, that is named, and not the recipe."""
    run_loop(Regression, VALUES, tmp_path / "a")
    path = tmp_path / "a" / "step-00000003.pt"
    state = torch.load(path, weights_only=True)
    del state["data"]
    state["next_batch"] = ["0" * 16]
    torch.save(state, path)
    [result] = run_loop(Regression, VALUES, tmp_path / "b", resume=path).of("resumed")
    assert result["notes"] == [
        "the next batch differs: the version that saved the checkpoint used another order "
        "of examples"
    ]
