"""The gated delta rule (Yang et al. 2025) and the short causal convolution before it, in plain torch.

A head's state S [key_dim, value_dim] decays by exp(g) at every token and is then corrected towards the
token's value: S ← exp(g) S + k ⊗ (beta (v - kᵀ exp(g) S)); the output is qᵀ S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens that are computed as matrix products; longer chunks cost more than they save


def causal_conv_(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Depthwise convolution over time. x: [tokens, channels]; weight: [channels, width].

    state: [channels, width - 1], the inputs before x, changed in place to the last ones of x.
    Returns [tokens, channels], without an activation.
    """
    padded = torch.cat([state, x.T.to(state.dtype)], dim=1)
    state.copy_(padded[:, padded.shape[1] - state.shape[1] :])
    out = F.conv1d(padded.to(weight.dtype)[None], weight[:, None], groups=weight.shape[0])[0]
    return out.T.to(x.dtype)


def gated_delta_rule_(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """query, key: [tokens, key_heads, key_dim]; value: [tokens, heads, value_dim]; g, beta: [tokens, heads].

    Queries and keys are brought to length 1, queries scaled by key_dim ** -0.5; each key head serves
    heads / key_heads value heads side by side. state: float32 [heads, key_dim, value_dim], changed in place.
    Returns float32 [tokens, heads, value_dim].
    """
    group = value.shape[1] // key.shape[1]
    # [heads, tokens, dim] in float32 from here on
    q, k = (_unit(x.float()).repeat_interleave(group, dim=1).transpose(0, 1) for x in (query, key))
    q = q * query.shape[-1] ** -0.5
    v, decay, rate = value.float().transpose(0, 1), g.float().T, beta.float().T
    if len(query) == 1:
        return _step_(q, k, v, decay, rate, state).transpose(0, 1)
    pieces = []
    for first in range(0, len(query), CHUNK):
        last = first + CHUNK
        chunk = (q[:, first:last], k[:, first:last], v[:, first:last])
        pieces.append(_chunk_(*chunk, decay[:, first:last], rate[:, first:last], state))
    return torch.cat(pieces, dim=1).transpose(0, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _step_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token: q, k [heads, 1, key_dim], v [heads, 1, value_dim], g, beta [heads, 1]."""
    state *= g.exp()[..., None]
    correction = (v - k @ state) * beta[..., None]
    state += k.transpose(1, 2) * correction
    return q @ state


def _chunk_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Many tokens at once: the corrections depend on each other through a triangular system.

    With G the running sum of g, correction i is beta_i (v_i - exp(G_i) k_iᵀ S - Σ_{j<i} exp(G_i - G_j)
    (k_i·k_j) correction_j).
    """
    tokens = q.shape[1]
    total = g.cumsum(dim=1)
    decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    couplings = (beta[..., None] * (k @ k.transpose(1, 2)) * decay).tril(-1)
    eye = torch.eye(tokens, dtype=q.dtype, device=q.device)
    wanted = beta[..., None] * (v - (k * total.exp()[..., None]) @ state)
    corrections = torch.linalg.solve_triangular(eye + couplings, wanted, upper=False, unitriangular=True)
    out = (q * total.exp()[..., None]) @ state + ((q @ k.transpose(1, 2)) * decay) @ corrections
    left = (total[:, -1:] - total).exp()[..., None]
    state *= total[:, -1].exp()[:, None, None]
    state += (k * left).transpose(1, 2) @ corrections
    return out
