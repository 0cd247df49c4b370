"""A tiny GPT-2 by Transformers' Trainer, watched by one callback. Needs transformers, accelerate.

    python examples/transformers_lm.py --epochs 1 --lr 1e-3

Nothing is downloaded: model and data are made here. On a GPU it trains in fp16; on a CPU, where
Transformers has no scaler, in fp32.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import halfstep.transformers

CONTEXT = 32  # characters


def examples(text: str) -> list[dict[str, torch.Tensor]]:
    """Cut a text into pieces; a character is a token."""
    codes = torch.tensor([min(ord(each), 127) for each in text])
    pieces = codes[: len(codes) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", default="transformers-out")
    args = parser.parse_args()

    config = GPT2Config(vocab_size=128, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        per_device_train_batch_size=8,
        fp16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
    )
    data = examples(Path(argparse.__file__).read_text()[:10_000])
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    trainer.add_callback(halfstep.transformers.Watch())
    trainer.train()


if __name__ == "__main__":
    main()
