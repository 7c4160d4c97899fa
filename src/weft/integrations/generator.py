"""Generation of completions outside of the training ranks: weights go there tensor by tensor, and token ids come back.

`Generator` is the interface: two methods, which rank 0 calls. `ProcessGenerator` is plain Transformers in a separate process;
a client of vLLM can have the same methods. `RemoteModel` is what TRL's trainers call in place of their model.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.checkpoint.huggingface import full_weights
from weft.comm.objects import all_gather_json, broadcast_json
from weft.errors import RankFailure, WeftError
from weft.integrations.models import core_of
from weft.job import Adapter
from weft.launch.log import open_log
from weft.launch.parent_death import LAUNCHER_VARIABLE
from weft.own_code import shorten
from weft.parallel.data.fsdp import free_gathered_weights
from weft.parallel.runtime import runtime
from weft.precision.dtypes import DTYPES

MODULE = "weft.integrations.generator_process"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Generator(Protocol):
    """Model outside of the training ranks. Every rank has the object; the methods are called on rank 0 alone."""

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Replace a weight or a buffer. All of them are set before the first completions, and after updates.

        Args:
            name: name in the model of Transformers; of a tied weight, its first name.
            weight: full tensor in the dtype of forward. The next update may change its memory.
        """

    def generate(self, prompts: list[list[int]], settings: dict[str, Any], seed: int) -> list[list[int]]:
        """Generate one completion of each prompt.

        Args:
            prompts: token ids.
            settings: values of `transformers.GenerationConfig`, such as max_new_tokens, temperature and eos_token_id.
            seed: seed of the random numbers.

        Returns:
            Token ids of the completions, without the prompts. After the first end-of-text token, all tokens are ignored.
        """


def push_weights(generator: Generator, model: Any) -> None:
    """Send the weights of a model to a generator, tensor by tensor. Collective; no rank holds the full model.

    Args:
        generator: generator, whose methods rank 0 calls.
        model: model of Transformers or of PEFT, parallelized without a pipeline.
    """
    core = core_of(model)
    free_gathered_weights(core)
    dtype = DTYPES[runtime(core).plan.precision.param_dtype]
    buffers = dict(core.named_buffers())
    for name, full in full_weights(core):
        if dist.get_rank() == 0:
            is_cast = full.is_floating_point() and name not in buffers
            generator.set_weight(name, full.detach().to(dtype) if is_cast else full)


class RemoteModel(nn.Module):
    """Model whose completions a generator generates, for `unwrap_model_for_generation` of TRL."""

    is_gradient_checkpointing = False

    def __init__(self, generator: Generator, seed: int):
        """
        Args:
            generator: generator, which has the weights.
            seed: seed of the completions of this rank.
        """
        super().__init__()
        self.generator, self.seed = generator, seed

    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any) -> Tensor:
        """Prompts with their completions, as `generate` of Transformers returns them. Collective.

        Args:
            input_ids: [rows, tokens], padded on the left.
            attention_mask: [rows, tokens], 0 in padding.
            generation_config: `transformers.GenerationConfig`.

        Returns:
            [rows, tokens + new tokens], padded on the right.

        Raises:
            RankFailure: the generator has failed; the same on every rank.
        """
        own = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        settings, problem, found = json.loads(generation_config.to_json_string(use_diff=False)), "", []
        requests = all_gather_json([own, self.seed])
        if dist.get_rank() == 0:
            try:
                for prompts, seed in requests:
                    found.append(_token_rows(self.generator.generate(prompts, settings, seed), len(prompts)))
            except Exception as error:  # also of a generator of the user
                problem = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
        found, problem = broadcast_json([found, problem])
        if problem:
            raise RankFailure(problem, where="generator")
        rows = found[dist.get_rank()]
        longest, padding = max(map(len, rows)), settings.get("pad_token_id") or 0
        completions = [row + [padding] * (longest - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(completions, dtype=torch.int64, device=input_ids.device)], 1)


def _token_rows(rows: Any, count: int) -> list[list[int]]:
    """Completions that a generator has returned, as lists, arrays or tensors of token ids.

    Raises:
        ValueError: they are not one list of integers for each prompt.
    """
    found = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
    if len(found) != count or not all(isinstance(token, int) for row in found for token in row):
        raise ValueError(f"{len(found)} completions of {count} prompts, such as {shorten(found[:1])}, are no token ids")
    return found


class ProcessGenerator:
    """Plain Transformers in a process of its own on the host of rank 0, which starts with the first weight."""

    def __init__(self, model: str, adapter: Adapter, device: torch.device, log: Path):
        """
        Args:
            model: Hugging Face folder of the model.
            adapter: adapters of the model.
            device: device of the process, on which no rank trains.
            log: file of the output of the process.
        """
        self.settings = {"model": model, "adapter": adapter.model_dump(exclude_none=True), "device": str(device)}
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Send a weight; see `Generator`."""
        own = weight.cpu().contiguous()
        self._send({"weight": name, "dtype": str(own.dtype).removeprefix("torch."), "shape": list(own.shape)})
        self._send_bytes(own.view(-1).view(torch.uint8).numpy().data)

    def generate(self, prompts: list[list[int]], settings: dict[str, Any], seed: int) -> list[list[int]]:
        """Generate completions; see `Generator`.

        Raises:
            RankFailure: the process has ended, or its model has failed.
        """
        self._send({"prompts": prompts, "settings": settings, "seed": seed})
        assert self.connection is not None
        try:
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        if "problem" in answer:
            raise self._failure(answer["problem"])
        completions: list[list[int]] = answer["completions"]
        return completions

    def close(self) -> None:
        """End the process."""
        if self.connection is not None and self.process is not None:
            self.connection.close()
            self.process.kill()  # it holds nothing
            self.process.wait()
        self.connection = self.process = None

    def _send(self, message: dict[str, Any]) -> None:
        if self.connection is None:
            self._start()
        self._send_bytes(json.dumps(message).encode())

    def _send_bytes(self, data: Any) -> None:
        assert self.connection is not None
        try:
            self.connection.send_bytes(data)
        except OSError:
            raise self._ended() from None

    def _start(self) -> None:
        with suppress(OSError):
            self.log.parent.mkdir(parents=True, exist_ok=True)
        self.connection, other = Pipe()
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        with other, open(open_log(self.log), "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(other.fileno())],
                env={**environment, LAUNCHER_VARIABLE: str(os.getpid())},
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._send(self.settings)

    def _ended(self) -> RankFailure:
        assert self.process is not None
        return self._failure(f"it has ended with code {self.process.wait()}")

    def _failure(self, problem: str) -> RankFailure:
        return RankFailure(
            f"the process that generates completions has failed: {problem}",
            where=str(self.log),
            rule="it holds the full model and a key-value cache on a device of its own",
            fix='read its output; or set trainer.generator = "copy"',
        )
