"""A mixture of experts: a router picks for each token a few of many gated MLPs (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import GatedMLP, Linear, parameter
from .ops import ACTIVATIONS


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of the experts and how a token's are chosen and weighed.

    scoring: softmax over all experts, softmax over the chosen ones, or a sigmoid each; normalize: the chosen
    scores are divided by their sum, then multiplied by scale. shared_size: width of an MLP that every token
    takes (0: none), added to the experts' output, or averaged with it.
    grouped_sigmoid (DeepSeek-AI 2024): a sigmoid each; a learned correction of the scores decides, but does not
    weigh: first the top_groups of num_groups by their two best experts, then the top_k experts within these.
    """

    num_experts: int
    top_k: int
    expert_size: int
    activation: str
    scoring: Literal["softmax", "chosen_softmax", "sigmoid", "grouped_sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_size: int = 0
    shared_average: bool = False


def route(logits: Tensor, config: MoEConfig, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Router logits [tokens, num_experts] → the chosen experts and their float32 weights, [tokens, top_k].

    correction: float32 [num_experts], for grouped_sigmoid.
    """
    scores = logits.float()
    if config.scoring == "grouped_sigmoid":
        scores = scores.sigmoid()
        experts = _best_of_groups(scores if correction is None else scores + correction, config)
        chosen = scores.gather(1, experts)
    else:
        if config.scoring == "softmax":
            scores = scores.softmax(dim=-1)
        chosen, experts = scores.topk(config.top_k, dim=-1)
        if config.scoring == "chosen_softmax":
            chosen = chosen.softmax(dim=-1)
        elif config.scoring == "sigmoid":
            chosen = chosen.sigmoid()
    if config.normalize:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, chosen * config.scale if config.scale != 1.0 else chosen


def _best_of_groups(scores: Tensor, config: MoEConfig) -> Tensor:
    """The top_k experts [tokens, top_k] by score, out of the top_groups groups by their two best scores."""
    grouped = scores.view(len(scores), config.num_groups, -1)
    strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = strength.topk(config.top_groups, dim=-1).indices
    closed = torch.ones_like(strength, dtype=torch.bool).scatter(1, kept, False)
    open_scores = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
    return open_scores.topk(config.top_k, dim=-1).indices


class MoE(nn.Module):
    """Experts are stacked: gate_up [experts, 2 * expert_size, size], down [experts, size, expert_size]."""

    def __init__(self, size: int, config: MoEConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.router = Linear(size, config.num_experts, bias=False, dtype=dtype)
        self.correction = (
            parameter(config.num_experts, dtype=torch.float32)
            if config.scoring == "grouped_sigmoid"
            else None
        )
        self.gate_up = parameter(config.num_experts, 2 * config.expert_size, size, dtype=dtype)
        self.down = parameter(config.num_experts, size, config.expert_size, dtype=dtype)
        self.activation = ACTIVATIONS[config.activation]
        self.shared = (
            GatedMLP(size, config.shared_size, config.activation, dtype=dtype) if config.shared_size else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, size] → the same shape; a token's result does not depend on the others in the batch."""
        experts, weights = route(self.router(x), self.config, self.correction)
        out = self._experts(x, experts, weights.to(x.dtype))
        if self.shared is None:
            return out
        out = out + self.shared(x)
        return out / 2 if self.config.shared_average else out

    def _experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Runs each chosen expert once, over all of its tokens."""
        out = torch.zeros_like(x)
        flat = experts.flatten()
        order = flat.argsort(stable=True)  # (token, choice) pairs, those of an expert side by side
        counts = flat.bincount(minlength=self.config.num_experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            pairs = order[start : start + count]
            start += count
            tokens = pairs // self.config.top_k
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            result = F.linear(self.activation(gate) * up, self.down[expert])
            out.index_add_(0, tokens, result * weights.flatten()[pairs, None])
        return out

    def named_weights(self, prefix: str) -> Mapping[str, Tensor]:
        """One tensor an expert and projection, as published checkpoints have them."""
        size = self.config.expert_size
        named: dict[str, Tensor] = {**self.router.named_weights(f"{prefix}.gate")}
        if self.correction is not None:
            named[f"{prefix}.gate.e_score_correction_bias"] = self.correction.data
        for expert in range(self.config.num_experts):
            base = f"{prefix}.experts.{expert}"
            named[f"{base}.gate_proj.weight"] = self.gate_up.data[expert, :size]
            named[f"{base}.up_proj.weight"] = self.gate_up.data[expert, size:]
            named[f"{base}.down_proj.weight"] = self.down.data[expert]
        if self.shared is not None:
            named |= self.shared.named_weights(f"{prefix}.shared_experts")
        return named


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Stacked tensors of all experts ("…experts.gate_up_proj", "…experts.down_proj" and, also with ".weight",
    "…experts.gate_proj", "…experts.up_proj") under the names of single experts; others pass unchanged."""
    base, found, part = name.removesuffix(".weight").rpartition(".experts.")
    if not found or part not in ("gate_up_proj", "gate_proj", "up_proj", "down_proj") or tensor.dim() != 3:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor):
        prefix = f"{base}.experts.{expert}"
        if part == "gate_up_proj":
            gate, up = weight.chunk(2)
            yield f"{prefix}.gate_proj.weight", gate
            yield f"{prefix}.up_proj.weight", up
        else:
            yield f"{prefix}.{part}.weight", weight
