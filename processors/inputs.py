"""What a processor hands to the engine: token ids, media features and where they belong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class PlaceholderRange:
    """The span of prompt positions that a media item's embeddings take.

    `is_embed` (bool, shape [length]) marks the positions that really receive an embedding when the span
    also holds ordinary tokens; None means all of them do.
    """

    offset: int
    length: int
    is_embed: Tensor | None = None

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else int(self.is_embed.sum())


@dataclass(frozen=True)
class MultiModalFeature:
    """One media item, ready for its encoder.

    Attributes
    ----------
    modality: "audio", "image" or "video".
    mm_hash: identity of the content together with everything that shaped the features (see `media_hash`).
    data: zero-argument callable that returns the encoder's input tensor (Whisper: log-mel, float32,
        [n_mels, 3000]). It is called only when the item really has to be encoded, so a cached item costs
        no feature memory. It must be pure and callable from any thread.
    num_embeds: rows of the encoder's output.
    mm_position: where the embeddings are merged into the prompt; None when the item is the encoder input
        of an encoder-decoder model.
    """

    modality: str
    mm_hash: str
    data: Callable[[], Tensor]
    num_embeds: int
    mm_position: PlaceholderRange | None = None


@dataclass(frozen=True)
class MultiModalInputs:
    """A prompt in token ids and the media that belongs to it."""

    prompt_token_ids: tuple[int, ...]
    mm_features: tuple[MultiModalFeature, ...] = field(default=())


def media_hash(array: np.ndarray, *context: object) -> str:
    """SHA-256 over an array's dtype, shape and bytes and over the context (mode, arguments, model), as hex.

    The shape is part of the identity: a reshaped array is another picture.
    """
    digest = hashlib.sha256()
    digest.update(repr((array.dtype.str, array.shape, context)).encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
