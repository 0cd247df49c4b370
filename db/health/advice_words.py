"""What findings call the same remedy in a recipe's loop, which is ours, and in a script's own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdviceWords:
    """in_fp32: how a module is run so.  of_scaler: a setting's name, with a place for it.

    stop_falling, hold_down: what keeps the scale above 1, and from its limit.  restore: what gives
    buffers back, before another way.  keep_in_fp32: how weights are kept.  compare: where to see
    what a precision gives.  load_faster, draw_faster: how batches come sooner.
    """

    in_fp32: str
    of_scaler: str
    stop_falling: str
    hold_down: str
    restore: str
    keep_in_fp32: str
    compare: str
    load_faster: str
    draw_faster: str

    def scaler(self, setting: str) -> str:
        """Return what a setting of the loss scaler is called."""
        return self.of_scaler.format(setting)


RECIPE = AdviceWords(
    in_fp32="by modules.fp32",
    of_scaler="scaler.{}",
    stop_falling="set scaler.floor to 1 and scaler.stop_after_skips",
    hold_down="; scaler.ceiling keeps the scale below it",
    restore="scaler.restore_buffers, or with ",
    keep_in_fp32=", by training.weights",
    compare=" Compare the precisions to see what it gives.",
    load_faster="Of a recipe with a dataset, raise data.workers, up to the machine's cores, then "
    "data.prefetch",
    draw_faster=" A batch() that draws from tensors does so fastest where they lie on the device "
    "(docs/how-to/recipes.md).",
)
SCRIPT = AdviceWords(
    in_fp32="under torch.autocast(device, enabled=False) with float32 inputs",
    of_scaler="{} of GradScaler",
    stop_falling="end the loop where scaler.get_scale() falls below 1",
    hold_down="",
    restore="",
    keep_in_fp32="",
    compare="",
    load_faster="Raise num_workers of the DataLoader, up to the machine's cores, then "
    "prefetch_factor",
    draw_faster="",
)
