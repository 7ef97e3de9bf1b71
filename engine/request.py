"""Requests and their sequences: tokens whose number of computed tokens must catch up with their number."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..models.base import GenerationRequest, GrammarMatcher, MultiModalFeature, SamplingParams, TokenLogprob
from .beam import BeamState
from .block_pool import BLOCK_SIZE, Block
from .detokenizer import SequenceText

if TYPE_CHECKING:
    from .engine import ProgramRun


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of a prompt and the pages that hold its keys and values.

    index: its place among the request's sequences. pages: per paged layer group one page each 16 tokens, None
    where it was given back behind the window. states: per recurrent group one block a layer. num_computed:
    leading tokens whose keys and values (or state) are there. waiting_logprobs: the row of a beam that waits
    for its siblings (float32 [vocab]), else None.
    """

    request: Request
    index: int
    token_ids: list[int]
    num_prompt: int
    pages: dict[str, list[Block | None]] = field(default_factory=dict)
    states: dict[str, list[Block]] = field(default_factory=dict)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    cumulative_logprob: float = 0.0
    generator: torch.Generator | None = None
    matcher: GrammarMatcher | None = None
    detokenizer: SequenceText | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    waiting_logprobs: Tensor | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def branch(self, index: int) -> Sequence:
        """A sequence of the same request with the same tokens, holding no pages yet."""
        child = Sequence(self.request, index, list(self.token_ids), self.num_prompt)
        child.cumulative_logprob = self.cumulative_logprob
        child.block_hashes = list(self.block_hashes)
        child.matcher = self.matcher.fork() if self.matcher else None
        return child

    def runs(self, group: str, length: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Where a group holds the keys before position `length`: (position of the first one, stretches).

        A stretch is (slab, first row, end row) of the group's view.
        """
        runs: list[tuple[int, int, int]] = []
        first_key = 0
        for position, page in enumerate(self.pages[group]):
            count = min(BLOCK_SIZE, length - position * BLOCK_SIZE)
            if count <= 0:
                break
            if page is None:
                first_key = (position + 1) * BLOCK_SIZE
                continue
            start = page.index * BLOCK_SIZE
            if runs and runs[-1][0] == page.slab and runs[-1][2] == start:
                runs[-1] = (page.slab, runs[-1][1], start + count)
            else:
                runs.append((page.slab, start, start + count))
        return first_key, runs

    def hash_blocks(self, seed: bytes) -> None:
        """Extends `block_hashes` to every full block of known tokens: a chain over ids, from the seed."""
        for index in range(len(self.block_hashes), len(self.token_ids) // BLOCK_SIZE):
            previous = self.block_hashes[-1] if self.block_hashes else seed
            ids = self.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            self.block_hashes.append(hashlib.sha256(previous + repr(ids).encode()).digest())


@dataclass(eq=False)
class Request:
    """A GenerationRequest under way.

    cross_blocks: one block a decoder layer that holds keys and values over the encoder output, or empty.
    probe_rows: prompt position → reduced probe row, alignment: pieces of [heads, tokens, encoder_len].
    """

    id: int
    model: str
    work: GenerationRequest
    owner: ProgramRun
    arrival: int
    priority: int = 0
    status: RequestStatus = RequestStatus.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    cross_blocks: list[Block] = field(default_factory=list)
    probe_rows: dict[int, Tensor] = field(default_factory=dict)
    alignment: list[Tensor] = field(default_factory=list)
    pooled: Tensor | None = None  # float32 [hidden]
    beam: BeamState | None = None
    expanded: bool = False  # whether the prompt's last logits have been branched into all sequences
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at the first admission

    @property
    def params(self) -> SamplingParams:
        return self.work.params

    @property
    def encoder_item(self) -> MultiModalFeature | None:
        """The encoder input of an encoder-decoder model: a feature without a place in the prompt."""
        return next((f for f in self.work.inputs.mm_features if f.mm_position is None), None)

    @property
    def width(self) -> int:
        """Sequences that the request may run at a time."""
        return max(self.params.num_sequences, self.params.beam_size)

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: lower goes first."""
        return (self.priority, self.arrival)

    @property
    def hash_seed(self) -> bytes:
        """Start of the page hash chain: model and encoder input, so that two recordings share no page."""
        item = self.encoder_item
        return repr((self.model, item.mm_hash if item else None, self.work.cache_salt)).encode()

    def first_sequence(self) -> Sequence:
        ids = list(self.work.inputs.prompt_token_ids)
        grammar = self.params.grammar
        return Sequence(
            self,
            0,
            ids,
            len(ids),
            generator=self.make_generator(0),
            matcher=grammar.matcher() if grammar else None,
        )

    def make_generator(self, index: int) -> torch.Generator | None:
        """A generator of the sequence's own: the same seed gives the same tokens in any batch."""
        if self.params.temperature == 0:
            return None
        seed = self.params.seed if self.params.seed is not None else torch.seed()
        return torch.Generator().manual_seed((seed + index) % 2**63)
