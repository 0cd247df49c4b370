"""One of several ranks that train with DeepSpeed by torchrun, unwatched and watched."""

import sys
from pathlib import Path

import pytest
import torch

from tests.frameworks.deepspeed_made import have_it_train_on_a_cpu, train


def main() -> None:
    """Train twice in a stage of ZeRO; write the engine's reports next to the run's folder."""
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    with pytest.MonkeyPatch.context() as patch:
        have_it_train_on_a_cpu(patch)
        torch.distributed.init_process_group("gloo")
        settings = {"stage": stage, "clip": 0.0, "accumulation": 1, "epochs": 4}
        bare, without = train(None, **settings)
        watched, with_us = train(folder / "run", **settings)
        found = {"bare": bare, "without": without, "watched": watched, "with_us": with_us}
        torch.save(found, folder / f"rank-{torch.distributed.get_rank()}.pt")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
