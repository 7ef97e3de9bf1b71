"""Real text models through the engine give the tokens that transformers gives on the same GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sensorium.engine.config import EngineConfig
from sensorium.engine.engine import Engine
from sensorium.models import store
from sensorium.models.base import GenerationRequest, SamplingParams
from sensorium.models.text import GenerationProgram
from sensorium.processors.inputs import MultiModalInputs

NARROW = 1e-3  # where the reference's two best logits are closer, either is right
STEPS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion are:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at 100 degrees Celsius because",
    "Q: What is the largest planet?\nA:",
    "Il était une fois",
    "Monday, Tuesday, Wednesday,",
    "In 1969, the first human beings walked on the Moon. The mission",
)


def load_reference(path: Path) -> Any:
    """The reference model with the weights that its own reader makes of the file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    left = model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    assert set(left.missing_keys) <= {"lm_head.weight"}
    assert not left.unexpected_keys
    model.tie_weights()
    return model


@torch.no_grad()
def first_difference(model: Any, prompt: list[int], output: list[int]) -> tuple[int, float] | None:
    """Where the reference, given the output so far, would have chosen another token: (index, its lead).

    None if it never would: then the output is what it generates greedily itself.
    """
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.topk(2, dim=-1)
    for index, token in enumerate(output):
        if int(best.indices[index, 0]) != token:
            return index, float(best.values[index, 0] - best.values[index, 1])
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_greedy_tokens_equal_the_reference(name: str) -> None:
    (path,) = store.resolve(name).glob("*.gguf")
    engine = Engine(EngineConfig(kv_cache_mb=512))
    try:
        tokenizer = engine.load(name, path).processor.tokenizer
        assert tokenizer is not None
        engine.start()
        prompts = [tokenizer.encode_prompt(text) for text in PROMPTS]
        params = SamplingParams(max_tokens=STEPS)
        requests = [
            GenerationRequest(number, MultiModalInputs(tuple(ids)), params)
            for number, ids in enumerate(prompts)
        ]
        outputs = engine.run(name, GenerationProgram(requests)).wait(600)
    finally:
        engine.shutdown()
    reference = load_reference(path)
    assert all(len(output.completions[0].token_ids) == STEPS for output in outputs)
    ties = 0
    for ids, output in zip(prompts, outputs, strict=True):
        difference = first_difference(reference, ids, list(output.completions[0].token_ids))
        if difference is not None:
            index, lead = difference
            assert lead < NARROW, f"parts at token {index}, where the reference leads by {lead:.4f}"
            ties += 1
    assert ties <= 2
