"""Process that generates completions for a training job: python -m weft.integrations.generator_process DESCRIPTOR.

Messages of the connection are JSON, in this order: the settings of the model once; then weights, each followed by its bytes,
and prompts, each answered by completions or by a problem. The process ends with the connection.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from weft.adapters.model import add_adapters
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain
from weft.job import Adapter, Model
from weft.launch.parent_death import end_with_launcher


def main() -> None:
    """Serve until the connection is closed."""
    end_with_launcher()
    transformers.logging.set_verbosity_error()
    with suppress(EOFError):
        serve(Connection(int(sys.argv[1])))


def serve(connection: Connection) -> None:
    """Answer the messages of a connection.

    Raises:
        EOFError: it is closed.
    """
    settings, problems = json.loads(connection.recv_bytes()), list[str]()
    model: ServedModel | None = None
    with _noting(problems):
        model = ServedModel(settings["model"], Adapter(**settings["adapter"]), torch.device(settings["device"]))
    while True:
        message = json.loads(connection.recv_bytes())
        if "weight" in message:
            data = connection.recv_bytes()
            with _noting(problems):
                if model is not None:
                    model.set_weight(message["weight"], _tensor(data, message["dtype"], message["shape"]))
            continue
        completions: list[list[int]] = []
        with _noting(problems):
            if model is not None and not problems:
                completions = model.generate(message["prompts"], message["settings"], message["seed"])
        answer = {"problem": problems[0]} if problems else {"completions": completions}
        connection.send_bytes(json.dumps(answer).encode())


@contextmanager
def _noting(problems: list[str]) -> Iterator[None]:
    """Context that notes an exception, which the next answer tells; the full text is in the output of this process."""
    try:
        yield
    except Exception as error:  # of any library; the process goes on, so that rank 0 gets the text
        traceback.print_exc()
        problems.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _tensor(data: bytes, dtype: str, shape: list[int]) -> Tensor:
    own = torch.empty(shape, dtype=getattr(torch, dtype))
    if data:
        own.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return own


class ServedModel:
    """Plain model of Transformers, with adapters, whose weights are replaced one by one."""

    def __init__(self, path: str, adapter: Adapter, device: torch.device):
        """
        Args:
            path: Hugging Face folder.
            adapter: adapters of the model; their weights are random until they are set.
            device: device of the model.
        """
        source = Model(path=str(Path(path)))
        plain: Any = build_plain(source, read_config(source), torch.float32)
        add_adapters(plain, adapter)
        self.model, self.device = plain.to(device).eval(), device
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self.names = {same[0]: same for same in names.values()}
        """Names of each weight, several of a tied one, by its first name."""
        self.buffers = dict(self.model.named_buffers())

    def set_weight(self, name: str, weight: Tensor) -> None:
        """Replace a weight or a buffer."""
        if name in self.buffers:
            self.buffers[name].copy_(weight)
            return
        own = nn.Parameter(weight.to(self.device), requires_grad=False)
        for same in self.names[name]:
            owner, _, last = same.rpartition(".")
            self.model.get_submodule(owner).register_parameter(last, own)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], settings: dict[str, Any], seed: int) -> list[list[int]]:
        """Completions of prompts, which are padded on the left to one length."""
        longest, padding = max(map(len, prompts)), settings.get("pad_token_id") or 0
        rows = [[padding] * (longest - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        torch.manual_seed(seed)
        found = self.model.generate(
            input_ids=torch.tensor(rows, device=self.device),
            attention_mask=torch.tensor(masks, device=self.device),
            generation_config=transformers.GenerationConfig.from_dict(settings),
        )
        completions: list[list[int]] = found[:, longest:].tolist()
        return completions


if __name__ == "__main__":
    main()
