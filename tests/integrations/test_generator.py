"""A process that generates completions: it has the weights that it got last, and its failures are told."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.lab.families import family
from weft.adapters.model import add_adapters
from weft.errors import RankFailure
from weft.integrations.generator import ProcessGenerator
from weft.integrations.generator_process import ServedModel
from weft.job import Adapter

LORA = Adapter(kind="lora", r=4, targets=("q_proj", "v_proj"))
SETTINGS = {"max_new_tokens": 6, "do_sample": True, "pad_token_id": 0, "eos_token_id": [2], "temperature": 0.9}
PROMPTS = [[5, 6, 7], [8], [9, 10]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a small model with tied embeddings."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**family("llama"), "tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def generator(folder: Path, tmp_path: Path) -> Iterator[ProcessGenerator]:
    made = ProcessGenerator(str(folder), LORA, torch.device("cpu"), tmp_path / "logs" / "generator.log")
    with closing(made):
        yield made


def changed(folder: Path) -> Any:
    """Model with adapters, with other weights than those of its folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_adapters(model, LORA)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def expected(model: Any) -> list[list[int]]:
    rows = torch.tensor([[0] * (3 - len(prompt)) + prompt for prompt in PROMPTS])
    torch.manual_seed(7)
    config = GenerationConfig(**SETTINGS)
    found = model.generate(input_ids=rows, attention_mask=(rows > 0).long(), generation_config=config)
    completions: list[list[int]] = found[:, 3:].tolist()
    return completions


def test_a_process_has_the_weights_that_it_got_last_and_tells_failures(
    folder: Path, generator: ProcessGenerator
) -> None:
    """One test, because a process takes seconds to start."""
    model = changed(folder)
    for _ in range(2):  # then again, with the weights of an update
        for name, parameter in model.named_parameters():
            generator.set_weight(name, parameter.detach())
        assert generator.generate(PROMPTS, SETTINGS, 7) == expected(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)  # tied to the embedding
    generator.set_weight("nowhere", torch.ones(()))
    with pytest.raises(RankFailure, match="KeyError: 'nowhere'") as caught:
        generator.generate(PROMPTS, SETTINGS, 7)
    assert str(generator.log) in str(caught.value)
    assert "Traceback" in generator.log.read_text()
    assert generator.process is not None
    assert generator.connection is not None
    generator.connection.close()  # as the system does when rank 0 ends
    assert generator.process.wait(timeout=60) == 0


def test_weights_of_other_dtypes_and_shapes_arrive_as_they_are(folder: Path) -> None:
    served = ServedModel(str(folder), Adapter(), torch.device("cpu"))
    bf16 = torch.randn(64).bfloat16()
    served.set_weight("model.norm.weight", bf16)
    assert torch.equal(served.model.model.norm.weight, bf16)
    with pytest.raises(KeyError):
        served.set_weight("model.nrom.weight", bf16)


def test_the_end_of_the_process_is_told(generator: ProcessGenerator) -> None:
    generator.set_weight("lm_head.weight", torch.ones(()))
    assert generator.process is not None
    os.kill(generator.process.pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="it has ended with code -9"):
        generator.generate(PROMPTS, SETTINGS, 7)
