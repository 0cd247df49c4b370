"""TRL's trainers with `halfstep.transformers.Watch`, compared with unwatched training."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks.reference import read_written, weights

os.environ.setdefault("HF_HUB_OFFLINE", "1")
trl = pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed  # noqa: E402

import halfstep.transformers  # noqa: E402
from tests.frameworks.tiny_model import write_model  # noqa: E402

PAIRS = {
    "prompt": [f"{n} and {n} make " for n in range(16)],
    "chosen": [f"{2 * n}." for n in range(16)],
    "rejected": [f"{n}." for n in range(16)],
}
TEXTS = {"text": [f"{n} and {n} make {2 * n}." for n in range(16)]}
PROMPTS = {"prompt": PAIRS["prompt"]}


def reward(completions: list[str], **rest: Any) -> list[float]:
    """Return a reward for digits."""
    return [float(sum(map(str.isdigit, each))) for each in completions]


def train(kind: str, folder: Path, callbacks: list[Any]) -> Any:
    """Train four steps."""
    set_seed(0)
    write_model(folder / "model")
    trainer, arguments, data, more = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, TEXTS, {}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, {"reward_funcs": reward}),
    }[kind]
    own = {"num_generations": 2, "max_completion_length": 8} if kind == "grpo" else {}
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=arguments(
            output_dir=str(folder / "out"),
            max_steps=4,
            per_device_train_batch_size=4,
            logging_steps=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **own,
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=callbacks,
        **more,
    )
    made.train()
    return made


@pytest.mark.parametrize(
    ("kind", "metric"),
    [("sft", "mean_token_accuracy"), ("dpo", "rewards/margins"), ("grpo", "reward")],
)
def test_trl_is_recorded_exactly(tmp_path: Path, kind: str, metric: str) -> None:
    """Losses, rates, norms and TRL's own metrics equal its log, and the weights are unchanged."""
    bare = train(kind, tmp_path, [])
    watch = halfstep.transformers.Watch(folder=tmp_path / "runs")
    watched = train(kind, tmp_path, [watch])
    assert all(map(torch.equal, weights(watched.model), weights(bare.model)))
    steps, events = read_written(tmp_path / "runs")
    logs = [each for each in watched.state.log_history if "loss" in each]
    assert steps["step"].tolist() == [each["step"] for each in logs] == [1, 2, 3, 4]
    assert steps["lr"] == pytest.approx([each["learning_rate"] for each in logs])
    norms = [each["grad_norm"] for each in logs]
    assert steps["grad_norm"] == pytest.approx(norms, rel=1e-3)
    assert np.isfinite(steps["loss"]).all()
    if kind != "grpo":
        assert steps["loss"] == pytest.approx([each["loss"] for each in logs], abs=2e-4)
    recorded = [e["value"] for e in events if e.get("name") == metric]
    assert recorded == [each[metric] for each in logs]
    names = {e["name"] for e in events if e["event"] == "metric"}
    assert not names & {"loss", "learning_rate", "grad_norm", "train_runtime", "total_flos"}
