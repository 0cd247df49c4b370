"""The op recorder: observes every torch function that a recipe calls in its steps.

Only `check` uses it: it is far too slow for training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainer.diagnosis.source_locations import place

HALF = (torch.float16, torch.bfloat16)
PRODUCTS = {
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A problem of a recipe, as text, with its location."""

    severity: Literal["error", "warning"]
    text: str
    place: str = ""  # "mine.py:31"


class OpRecorder(TorchFunctionMode):
    """Observes a recipe's calls in one precision, and reports mistakes.

    file: the recipe's own; locations are lines in it.
    """

    def __init__(self, precision: str, device_type: str, file: str) -> None:
        super().__init__()
        self.precision, self.device_type, self.file = precision, device_type, file
        self.in_batch = False
        self.is_looking = False  # the recipe runs, not the loop
        self.has_stepped_itself = False
        self.findings: dict[Finding, None] = {}  # an ordered set
        self._products = {True: 0, False: 0}  # by whether autocast was on

    def found(self, severity: Literal["error", "warning"], text: str, place: str = "") -> None:
        """Add a finding, once."""
        self.findings.setdefault(Finding(severity, text, place))

    def __enter__(self) -> Self:
        """Start observing."""
        super().__enter__()  # type: ignore[no-untyped-call]
        self.is_looking = True
        return self

    def __exit__(self, *error: object) -> None:
        """Stop observing."""
        self.is_looking = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def see_own_step(self, place: str = "") -> None:
        """Report, once, that the recipe does the loop's work."""
        if not self.has_stepped_itself:
            self.has_stepped_itself = True
            self.found(
                "error",
                "training_step calls backward() or changes weights or gradients itself: yield the "
                "loss, and leave backward() and optimizer.step() to the loop",
                place,
            )

    def see_nondeterminism(self, operation: str) -> None:
        """Report an operation that raises on CUDA."""
        self.found(
            "error",
            f"{operation} has no deterministic implementation on CUDA and raises with "
            "training.deterministic: set that to False, or use another operation",
            self.place(),
        )

    def summarise(self) -> None:
        """Report findings that depend on all steps."""
        if self.precision != "fp32" and self._products[False] and not self._products[True]:
            self.found(
                "error",
                f"every matrix product ran with autocast off: {self.precision} has no effect. "
                "Compute in training_step, which runs under autocast, without "
                "autocast(enabled=False) and without own threads",
            )

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call the function, then check it.

        Calls inside of it, by torch itself, are not observed.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        # An adversarial attack on inputs is allowed.
        if name == "backward" and not kwargs.get("inputs"):
            self.see_own_step(self.place())
        elif name in PRODUCTS:
            self._see_product(result)
        elif name == "binary_cross_entropy":
            self._see_binary_cross_entropy()
        elif name.endswith(("_loss", "cross_entropy")):
            self._see_loss_function(name, args)
        return result

    @property
    def _autocast_on(self) -> bool:
        return torch.is_autocast_enabled(self.device_type)

    def _see_product(self, result: object) -> None:
        if self.in_batch:
            if isinstance(result, Tensor) and result.requires_grad:
                self.found(
                    "error",
                    "batch() computes with weights, but runs outside autocast: move this to "
                    "training_step",
                    self.place(),
                )
            return
        self._products[self._autocast_on] += 1
        if self.precision == "fp32" and self._autocast_on:
            self.found(
                "error",
                "the recipe enables autocast in an fp32 run: pass torch.autocast(…, "
                "enabled=torch.is_autocast_enabled(device_type)), or leave autocast to the loop",
                self.place(),
            )

    def _see_binary_cross_entropy(self) -> None:
        if self._autocast_on:
            self.found(
                "error",
                "binary_cross_entropy raises under autocast on CUDA, though not on a CPU: where "
                "fp16 rounds the sigmoid to 0, it takes the logarithm of 0. Use "
                "binary_cross_entropy_with_logits on the values before the sigmoid",
                self.place(),
            )

    def _see_loss_function(self, name: str, args: tuple[object, ...]) -> None:
        halves = [a for a in args if isinstance(a, Tensor) and a.dtype in HALF]
        if halves and not self._autocast_on:
            self.found(
                "error",
                f"{name} is computed outside autocast, in {_dtype(halves[0])}: move it inside "
                "autocast, which computes it in float32, or pass .float() inputs",
                self.place(),
            )

    def place(self) -> str:
        """Return the line of the recipe's file that is being executed."""
        return place(self.file)


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
