"""A Hydra program with two added lines, for test_hydra.py."""

import os
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

import halfstep
from tests.frameworks.reference import Training, weights


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(config: DictConfig) -> None:
    """Train one epoch; write the scaler's decisions to a file."""
    training = Training(config.rate)
    if os.environ["HALFSTEP_MODE"] == "offline":
        halfstep.watch(training.net)
    training.epoch()
    if config.rate > 0.5:
        raise KeyError("broken")
    rest = (training.scaler.scales, training.scaler.skipped, training.scaler.culprits)
    folder = Path(hydra.core.hydra_config.HydraConfig.get().runtime.output_dir)
    torch.save([*rest, weights(training.net)], folder / "trained.pt")


if __name__ == "__main__":
    main()
