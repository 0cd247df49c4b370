"""Layer sizes that are unsuitable for tensor cores, reported before the first step.

Tensor cores process fp16 and bf16 numbers in units of 16 bytes, eight at a time. A matrix product
with a size that is not a multiple of 8 is padded, or uses slower kernels. Only the sizes that
modules declare are checked, nothing during training.
Source: NVIDIA, "Train With Mixed Precision", on shapes for tensor cores.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torch import nn

from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, Shapes

MULTIPLE = 8
#: Up to this size the ends of a network are determined by the data: colours, classes.
LARGEST_OF_DATA = 256
SHARE = 0.1  # of the weights: below it, no time can be gained
LISTED = 4

Convolution: TypeAlias = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)


def misfits(modules: Mapping[str, nn.Module], config: RunConfig) -> Event | None:
    """Return an event with the layers whose sizes are not multiples of 8, if it matters.

    It does in half precision if they have a tenth of the weights. Grouped convolutions are ignored,
    and so are the first inputs and the last outputs of a network, which the data determine.
    """
    if config.precision == "fp32":
        return None
    batch_size = config.training.batch_size
    misfitting: list[tuple[int, str]] = []  # weights, and the layer as text
    all_weights, odd_batch = 0, False
    for name, network in modules.items():
        # Without convolutions and embeddings each row is one example.
        is_flat = not any(isinstance(m, Convolution | nn.Embedding) for m in network.modules())
        odd_rows = is_flat and batch_size % MULTIPLE != 0
        layers = list(_layers(network))
        for index, (path, weights, inputs, outputs) in enumerate(layers):
            all_weights += weights
            sizes = [inputs] if index or inputs > LARGEST_OF_DATA else []
            if index < len(layers) - 1 or outputs > LARGEST_OF_DATA:
                sizes.append(outputs)
            if odd_rows or any(size % MULTIPLE for size in sizes):
                odd_batch |= odd_rows
                text = f"{name}.{path}".rstrip(".") + f" ({inputs} to {outputs})"
                misfitting.append((weights, text))
    concerned = sum(weights for weights, _ in misfitting)
    if not misfitting or concerned < SHARE * all_weights:
        return None
    misfitting.sort(key=lambda item: -item[0])
    return Shapes(
        step=0,
        share=concerned / all_weights,
        count=len(misfitting),
        layers=[text for _, text in misfitting[:LISTED]],
        batch_size=batch_size if odd_batch else None,
    )


def _layers(network: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """Yield path, number of weights, inputs and outputs of each layer with a matrix product."""
    for path, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            # (Not from layer.weight: reading a parametrized one computes it, and may change it.)
            inputs, outputs = layer.in_features, layer.out_features
            yield path, inputs * outputs, inputs, outputs
        elif isinstance(layer, Convolution) and layer.groups == 1:
            inputs, outputs = layer.in_channels, layer.out_channels
            yield path, inputs * outputs * math.prod(layer.kernel_size), inputs, outputs
