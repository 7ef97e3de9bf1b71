"""What every encoder does, and how items are grouped so that it does much at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def encode_by_shape(
    inputs: Sequence[Tensor], encode: Callable[[Tensor], Tensor], max_batch: int
) -> list[Tensor]:
    """Runs `encode` ([batch, *shape] → [batch, …]) over items, batching those of one shape; keeps the order."""
    groups: dict[torch.Size, list[int]] = {}
    for index, item in enumerate(inputs):
        groups.setdefault(item.shape, []).append(index)
    outputs: dict[int, Tensor] = {}
    for indices in groups.values():
        for first in range(0, len(indices), max_batch):
            batch = indices[first : first + max_batch]
            encoded = encode(torch.stack([inputs[i] for i in batch]))
            outputs.update(zip(batch, encoded, strict=True))
    return [outputs[index] for index in range(len(inputs))]
