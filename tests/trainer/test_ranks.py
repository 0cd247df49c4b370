import pytest
import torch.distributed as dist

from trainer import ranks
from trainer.ranks import Control, ProcessGroup, Request


@pytest.fixture
def group():
    """A process group of one rank, which agrees with itself as many would."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroup()
    dist.destroy_process_group()


def test_ranks_agree_by_time_and_not_in_every_step(group, monkeypatch):
    """Steps of a millisecond: they agree in every 200th; of a second: in each."""
    now = [0.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    asked = []

    def control():
        asked.append(now[0])
        return Control()

    for _ in range(1000):
        now[0] += 0.001
        group.agree(control)
    assert len(asked) <= 7
    asked.clear()
    for _ in range(400):
        now[0] += 1.0
        group.agree(control)
    assert len(asked) > 200


def test_what_is_wanted_waits_until_the_ranks_agree(group):
    """A request is taken from the outside only when all of them can obey it."""
    waiting = [Control("pause", Request(7, "scale", 2.0))]
    taken = [
        each
        for _ in range(3000)
        if (each := group.agree(waiting.pop if waiting else Control)) != Control()
    ]
    assert taken == [Control("pause", Request(7, "scale", 2.0))]
