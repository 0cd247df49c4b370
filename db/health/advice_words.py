"""Wording of remedies in findings, for a recipe's loop and for a script's own loop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdviceWords:
    """Phrases for remedies."""

    in_fp32: str  # running a module in fp32
    of_scaler: str  # template for the name of a scaler setting
    stop_falling: str  # keeping the scale above 1
    hold_down: str  # keeping the scale below its limit
    restore: str  # restoring buffers
    keep_in_fp32: str  # keeping weights in fp32
    compare: str  # comparing precisions
    load_faster: str  # faster data loading
    draw_faster: str  # faster batches from tensors
    find_operator: str  # finding the operator of a symptom that was not observed

    def scaler(self, setting: str) -> str:
        """Return the name of a setting of the loss scaler."""
        return self.of_scaler.format(setting)


RECIPE = AdviceWords(
    in_fp32="with modules.fp32",
    of_scaler="scaler.{}",
    stop_falling="set scaler.floor to 1 and scaler.stop_after_skips",
    hold_down="; scaler.ceiling limits the scale",
    restore="scaler.restore_buffers, or with ",
    keep_in_fp32=", with training.weights fp32",
    compare=" Compare the precisions to see the difference.",
    load_faster="For a recipe with a dataset, raise data.workers up to the number of cores, then "
    "data.prefetch",
    draw_faster=" A batch() that draws from tensors is fastest if they are on the device "
    "(docs/how-to/recipes.md).",
    find_operator="",
)
SCRIPT = AdviceWords(
    in_fp32="under torch.autocast(device, enabled=False) with float32 inputs",
    of_scaler="{} of GradScaler",
    stop_falling="end the loop where scaler.get_scale() falls below 1",
    hold_down="",
    restore="",
    keep_in_fp32="",
    compare="",
    load_faster="Raise num_workers of the DataLoader up to the number of cores, then "
    "prefetch_factor",
    draw_faster="",
    find_operator=" To find the operator and its line, run the script with `halfstep check --steps "
    "0 --until-skip`.",
)
