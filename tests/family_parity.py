"""Tiny random checkpoints of the reference implementation, and what every family has to equal on them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sensorium.models.base import ModelError
from sensorium.models.decoder import DecoderModel
from sensorium.models.families import decoder_config
from sensorium.models.weights import read_config, safetensors_weights
from torch import Tensor

from .paged_harness import PagedHarness

TOLERANCE = 1e-4
VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@cache
def reference() -> ModuleType:
    """The reference package; imported when first needed, because that takes seconds."""
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def make_checkpoint(
    directory: Path,
    config_class: str,
    model_class: str,
    std: float = 0.2,
    embedding_std: float = 0.2,
    seed: int = 0,
    **sizes: Any,
) -> Any:
    """Writes a random checkpoint; returns the reference model. Norms and biases are random as well.

    Tied embeddings that are large beside the layers' output make a model repeat its last token for ever.
    """
    package = reference()
    config = getattr(package, config_class)(**(SIZES | sizes))
    config._attn_implementation = "eager"
    model = getattr(package, model_class)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.copy_(torch.randn(weight.shape, generator=generator))
            weight *= embedding_std if "embed_tokens" in name else std
            if "norm" in name and not config_class.startswith("Gemma3"):
                weight += 1
    model.save_pretrained(directory)
    return model


def load(directory: Path) -> DecoderModel:
    model = DecoderModel(decoder_config(read_config(directory)), torch.float32)
    model.load_weights(safetensors_weights(directory))
    return model


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


@torch.no_grad()
def reference_logits(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], steps: int) -> list[int]:
    """The whole sequence is run for every token: nothing depends on the reference's cache."""
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    difference = (ours - theirs).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference:.2e}"  # NaN fails as well


def check_parity(reference_model: Any, model: DecoderModel, length: int = 75) -> None:
    """Prefill whole, in chunks, token by token, and in a batch of several sequences; greedy tokens."""
    ids = tokens(length)
    expected = reference_logits(reference_model, ids)
    assert expected.std() > 0.1, "logits too alike to tell anything"
    harness = PagedHarness(model)
    assert_close(harness.run([("whole", ids)])[0], expected)

    chunks = [harness.run([("chunks", ids[at : at + 20])])[0] for at in range(0, length, 20)]
    assert_close(torch.cat(chunks), expected)
    single = [harness.run([("single", [token])])[0] for token in ids]
    assert_close(torch.cat(single), expected)

    check_mixed_batch(reference_model, model)
    prompt = ids[:40]
    wanted = reference_greedy(reference_model, prompt, 24)
    assert len(set(wanted)) >= 4, "the checkpoint repeats itself: greedy tokens would tell nothing"
    for (token, margin), expected_token in zip(
        harness.greedy_margins("greedy", prompt, 24), wanted, strict=True
    ):
        if token != expected_token:
            assert margin < 1e-3, "greedy tokens differ where the reference is sure"
            break


def check_mixed_batch(reference_model: Any, model: DecoderModel) -> None:
    """Sequences of different ages in one step: a long prefill, a chunk and decoding side by side."""
    ids = {
        name: tokens(length, seed) for seed, (name, length) in enumerate([("a", 30), ("b", 61), ("c", 47)], 1)
    }
    harness = PagedHarness(model, seed=7)
    parts: dict[str, list[Tensor]] = {name: [] for name in ids}
    plan = [{"a": 29}, {"a": 1, "b": 33}, {"b": 1, "c": 20}, {"c": 26, "b": 26}, {"b": 1, "c": 1}]
    for step in plan:
        done = {name: harness.lengths.get(name, 0) for name in step}
        batch = [(name, ids[name][done[name] : done[name] + count]) for name, count in step.items()]
        for (name, _), logits in zip(batch, harness.run(batch), strict=True):
            parts[name].append(logits)
    for name in ids:
        assert harness.lengths[name] == len(ids[name])
        assert_close(torch.cat(parts[name]), reference_logits(reference_model, ids[name]))


def unsupported(config: dict[str, Any]) -> str:
    """The message with which a configuration is refused."""
    try:
        decoder_config(config)
    except ModelError as error:
        return str(error)
    raise AssertionError("the configuration was accepted")
