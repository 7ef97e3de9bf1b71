"""Text families through the whole engine: batches, preemption, prefixes, streams, grammars, logprobs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine, ProgramFailed
from sensorium.engine.structured import GrammarCompiler
from sensorium.models.base import Completion, GenerationRequest, SamplingParams, TokenDelta
from sensorium.models.text import GenerationProgram
from sensorium.processors.inputs import MultiModalInputs

from .tiny_text import LLAMA, SPECIAL, VOCAB, random_weights, write_tiny_text

TIMEOUT = 120.0
END = 258
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 3},
    "deepseek_v3": LATENT,
    "qwen3_5_text": LINEAR,
}


def prompts(count: int, shared: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of mixed lengths; the first `shared` tokens are the same in all of them."""
    generator = random.Random(7)
    head = tuple(generator.randrange(256) for _ in range(shared))
    return [
        head + tuple(generator.randrange(256) for _ in range(generator.choice((1, 5, 17, 40))))
        for _ in range(count)
    ]


def request(key: object, prompt: tuple[int, ...], stream: bool = False, **params: Any) -> GenerationRequest:
    sampling = SamplingParams(**{"max_tokens": 24, "stop_token_ids": (END,), "detokenize": True, **params})
    return GenerationRequest(key, MultiModalInputs(prompt), sampling, stream=stream)


def make_engine(path: Path, **config: Any) -> Engine:
    engine = Engine(EngineConfig(**{"kv_cache_mb": 64, "slab_mb": 1, "threads": 1, **config}))
    engine.load("tiny", path)
    engine.start()
    return engine


def run(engine: Engine, *requests: GenerationRequest) -> list[Completion]:
    """The first completion of each."""
    outputs = engine.run("tiny", GenerationProgram(requests)).wait(TIMEOUT)
    return [output.completions[0] for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA | {"model_type": request.param} | FAMILIES[request.param]
    return write_tiny_text(tmp_path_factory.mktemp("family") / "tiny", random_weights(config), config)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = make_engine(write_tiny_text(tmp_path_factory.mktemp("llama") / "tiny", random_weights(LLAMA)))
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("shared", [0, 37])
def test_no_batch_limit_or_cache_changes_a_token(family: Path, shared: int) -> None:
    pieces = [request(number, prompt) for number, prompt in enumerate(prompts(14, shared))]
    plain = make_engine(family, prefix_caching=False)
    try:
        solo = [run(plain, piece)[0].token_ids for piece in pieces]
    finally:
        plain.shutdown()
    assert len(set(solo)) > 8
    for config in (
        {},
        {"max_num_batched_tokens": 9},
        {"kv_cache_mb": 5, "slab_mb": 1, "max_num_seqs": 14},
    ):
        crowded = make_engine(family, **config)
        try:
            assert [c.token_ids for c in run(crowded, *pieces)] == solo
            assert [c.token_ids for c in run(crowded, *pieces)] == solo, "after the prefixes were cached"
            crowded.scheduler.check_integrity()
        finally:
            crowded.shutdown()


def test_preempted_sequences_go_on_as_if_nothing_had_happened(family: Path) -> None:
    pieces = [request(number, prompt, max_tokens=60) for number, prompt in enumerate(prompts(10))]
    roomy, tight = make_engine(family), make_engine(family, max_num_seqs=10)
    try:
        want = [c.token_ids for c in run(roomy, *pieces)]
        # Hold most of the arena, so that what is left cannot keep all sequences.
        groups = tight.scheduler.groups["tiny"]
        held = [(g, tight.pool.allocate(g, tight.pool.capacity(g) // 8)) for g in groups.paged.values()]
        while tight.pool.num_slabs - len(groups.all()) > sum(len(g.slabs) for g in groups.all()):
            group = next(iter(groups.paged.values()))
            held.append((group, tight.pool.allocate(group, group.blocks_per_slab)))
        assert [c.token_ids for c in run(tight, *pieces)] == want
        for group, blocks in held:
            tight.pool.release(group, blocks)
        tight.scheduler.check_integrity()
    finally:
        roomy.shutdown()
        tight.shutdown()


def test_a_repeated_prompt_is_found_in_the_cache(engine: Engine) -> None:
    prompt = tuple(range(50))
    first, second = (
        engine.run("tiny", GenerationProgram([request(0, prompt)])).wait(TIMEOUT)[0] for _ in range(2)
    )
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert [c.token_ids for c in first.completions] == [c.token_ids for c in second.completions]
    salted = GenerationRequest(0, MultiModalInputs(prompt), request(0, prompt).params, cache_salt="other")
    assert engine.run("tiny", GenerationProgram([salted])).wait(TIMEOUT)[0].num_cached_tokens == 0


def test_streams_add_up_to_the_result(engine: Engine) -> None:
    pieces = [
        request(0, (1, 2, 3), stream=True, logprobs=2),
        request(1, (4, 5), stream=True, temperature=1.0, seed=5, num_sequences=3),
        request(2, (9,) * 20, stream=True, stop=("e", "th")),
    ]
    program = engine.run("tiny", GenerationProgram(pieces))
    events = [event for event in program.iter_events() if isinstance(event, TokenDelta)]
    for output in program.wait(TIMEOUT):
        for index, completion in enumerate(output.completions):
            mine = [e for e in events if e.key == output.key and e.sequence == index]
            assert "".join(e.text for e in mine) == completion.text
            assert tuple(t for e in mine for t in e.token_ids) == completion.token_ids
            assert [e.finish_reason for e in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish_reason == completion.finish_reason
            if completion.logprobs is not None:
                assert tuple(p for e in mine for p in e.logprobs or ()) == completion.logprobs


def test_logprobs_are_those_of_the_model(engine: Engine) -> None:
    (completion,) = run(engine, request(0, (7, 8, 9), logprobs=3, max_tokens=5))
    assert completion.logprobs is not None
    assert [p.token_id for p in completion.logprobs] == list(completion.token_ids)
    for entry in completion.logprobs:
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob, abs=1e-4))
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
    total = sum(entry.logprob for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_stop_string_ends_its_own_sequence_only(engine: Engine) -> None:
    (free,) = run(engine, request(0, (20, 21), max_tokens=40))
    stop = free.text[5:7]
    stopped, other = run(
        engine, request(1, (20, 21), max_tokens=40, stop=(stop,)), request(2, (20, 21), max_tokens=40)
    )
    assert stopped.text == free.text[: free.text.find(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert other.text == free.text


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Iterator[GrammarCompiler]:
    tokenizer = engine.model("tiny").processor.tokenizer
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, VOCAB, (END,))
    yield compiler
    compiler.close()


def test_grammars_hold_within_a_mixed_batch(engine: Engine, compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    grammars = [
        compiler.compile_json_schema(schema),
        compiler.compile_regex("[a-c]{3,5}"),
        compiler.compile_choice(["yes", "no"]),
        None,
    ]
    pieces = [
        request((i, seed), (40 + i,), grammar=grammar, max_tokens=60, temperature=1.0, seed=seed)
        for i, grammar in enumerate(grammars)
        for seed in range(3)
    ]
    outputs = engine.run("tiny", GenerationProgram(pieces)).wait(TIMEOUT)
    alone = [run(engine, piece)[0].text for piece in pieces]
    assert [o.completions[0].text for o in outputs] == alone
    for (which, _), output in ((o.key, o) for o in outputs):
        text = output.completions[0].text
        if which == 0:
            value = json.loads(text)
            assert set(value) == {"n", "ok"}
            assert 0 <= value["n"] <= 99
        elif which == 1:
            assert 3 <= len(text) <= 5
            assert set(text) <= set("abc")
        elif which == 2:
            assert text in ("yes", "no")


def test_a_request_without_a_token_left_ends_alone(engine: Engine) -> None:
    class Nothing:
        def __call__(self, logits: torch.Tensor, outputs: object) -> None:
            logits.fill_(float("-inf"))

    bad = engine.run("tiny", GenerationProgram([request(0, (1, 2), logits_processors=(Nothing(),))]))
    good = engine.run("tiny", GenerationProgram([request(0, (3, 4))]))
    with pytest.raises(ProgramFailed, match="no token"):
        bad.wait(TIMEOUT)
    assert good.wait(TIMEOUT)[0].completions[0].token_ids
    assert engine.healthy
    assert SPECIAL[2] not in good.wait(TIMEOUT)[0].completions[0].text
