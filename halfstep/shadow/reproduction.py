"""A script that shows with torch alone how an operator loses values. This module imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.shadow.arguments import map_tensors
from halfstep.shadow.operators import tensors_in

LARGEST_BYTES = 64 * 2**20  # of an operator's inputs, in both precisions
SCRIPT = '''\
"""{title}: {where}.

Written by `halfstep check --reproduce`. It needs torch and the file of inputs next to it.
"""

from pathlib import Path

import torch

inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
operator = torch.ops.{operator}
for name, of in (("as it is", "actual"), ("in fp32", "exact")):
    result = operator(*inputs[of]["args"], **inputs[of]["kwargs"])
    result = result[0] if isinstance(result, tuple | list) else result
    finite = result.isfinite()
    largest = float(result[finite].abs().max()) if finite.any() else float("nan")
    lost = int((~finite).sum())
    print(f"{{name}}: {{lost:,}} of {{result.numel():,}} elements are not finite; the largest "
          f"other one is {{largest:.6g}}")
'''


@dataclass(frozen=True)
class Reproduction:
    """An operator with its inputs, as they were and in fp32.

    operator: its name in torch.ops, as "aten.div.Tensor".
    """

    operator: str
    inputs: Mapping[str, Mapping[str, object]]

    def write(self, folder: Path, name: str, title: str, where: str) -> Path:
        """Write NAME.py and NAME.pt into a folder, and return the script's path."""
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.inputs, folder / f"{name}.pt")
        path = folder / f"{name}.py"
        text = {"title": _plain(title), "where": _plain(where), "operator": self.operator}
        path.write_text(SCRIPT.format(**text), encoding="utf-8")
        return path


def reproduction(func: Any, actual: tuple[Any, Any], exact: tuple[Any, Any]) -> Reproduction | None:
    """Return an operator with copies of its inputs; None if they are too large.

    actual, exact: arguments and keyword arguments.
    """
    tensors = tensors_in([*actual[0], *actual[1].values(), *exact[0], *exact[1].values()])
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > LARGEST_BYTES:
        return None
    inputs = {
        name: {"args": list(map_tensors(args, _copy, {})), "kwargs": map_tensors(kwargs, _copy, {})}
        for name, (args, kwargs) in (("actual", actual), ("exact", exact))
    }
    return Reproduction(str(func), inputs)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, without the rest of its storage."""
    return tensor.clone().cpu()


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace('"""', "'''")
