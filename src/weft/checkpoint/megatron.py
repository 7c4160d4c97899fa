"""Distributed checkpoints of Megatron-Core: names and layout of the weights, reader, and writer.

    metadata.json      names the format, torch_dist: a folder of torch.distributed.checkpoint (DCP)
    .metadata, __R_N.distcp     weights, and where training saved them optimizer states and generators
    common.pt          pickle with the arguments of the run; never read here

Layers are stacked along a new first dimension: decoder.layers.mlp.linear_fc2.weight is [layers, hidden, ffn]. Models whose
layers differ have a tensor for each layer instead: decoder.layers.3.mlp.linear_fc2.weight. Query, key and value projections
are one matrix, ordered by groups of heads: the query heads of a group, its key head, its value head. Gate and up projections
are one matrix. Rows of the vocabulary may be padded. Names are those of megatron-core 0.16: `sharded_state_dict` of GPTModel.
"""

import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from transformers import PretrainedConfig, PreTrainedModel

from weft.checkpoint.dcp import DcpFolder
from weft.checkpoint.dcp_writer import save_lazily
from weft.checkpoint.sources import TensorSource, state_names
from weft.errors import CheckpointError

FORMAT = "metadata.json"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""Families of Transformers whose layers are those of GPTModel."""
IGNORED = ("optimizer.", "chained_")
"""Prefixes of tensors that are no weights: states of the optimizer, or of one of several."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors with a row for each token, which Megatron-LM pads to a multiple of 128."""

MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Weights of the model by names of Megatron-Core, outside of layers."""
QKV = "self_attention.linear_qkv"
LAYER = {
    f"{QKV}.layer_norm_weight": ("input_layernorm.weight",),
    **{f"{QKV}.{kind}": tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias")},
    **{f"self_attention.linear_proj.{kind}": (f"self_attn.o_proj.{kind}",) for kind in ("weight", "bias")},
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    **{f"mlp.linear_fc1.{kind}": (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}") for kind in ("weight", "bias")},
    **{f"mlp.linear_fc2.{kind}": (f"mlp.down_proj.{kind}",) for kind in ("weight", "bias")},
    "mlp.router.weight": ("mlp.gate.weight",),
    "mlp.experts.experts.linear_fc1.weight": ("mlp.experts.gate_up_proj",),
    "mlp.experts.experts.linear_fc2.weight": ("mlp.experts.down_proj",),
}
"""Weights of a layer of the model by names of Megatron-Core inside of a layer."""
NORMS = {
    f"{QKV}.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Name of a norm that is not fused with the linear module after it; that before experts never is."""


class FusedWeight(NamedTuple):
    """Tensor of Megatron-Core, and the weights of the model that it consists of."""

    name: str
    """Name in Megatron-Core; inside of its layer, if it has one."""
    layer: int | None
    parts: tuple[str, ...]
    """Checkpoint names of the weights."""
    rows: tuple[int, ...]
    """Length of the first dimension of each weight."""
    width: tuple[int, ...]
    """Other dimensions, the same for all of them."""
    groups: int = 1
    """Number of blocks of rows: each block has rows of the first weight, then of the second, and so on."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor of one layer."""
        return (sum(self.rows), *self.width)

    def fuse(self, weights: list[Tensor]) -> Tensor:
        """One tensor from the weights."""
        return torch.cat([weight.unflatten(0, (self.groups, -1)) for weight in weights], 1).flatten(0, 1)

    def split(self, fused: Tensor) -> list[Tensor]:
        """Weights from the tensor: the inverse of `fuse`."""
        sizes = [rows // self.groups for rows in self.rows]
        return [part.flatten(0, 1) for part in fused.unflatten(0, (self.groups, -1)).split(sizes, 1)]


def fused_weights(config: PretrainedConfig, meta: PreTrainedModel) -> list[FusedWeight]:
    """Tensors of Megatron-Core for a model.

    Args:
        meta: the model, unmodified.

    Raises:
        CheckpointError: the family, or a weight of the model, has no counterpart in GPTModel.
    """
    if config.model_type not in FAMILIES:
        raise _no_counterpart(f"the model is a {config.model_type}")
    state = meta.state_dict()
    rest = {name: tuple(state[key].shape) for key, name in state_names(meta).items() if name.startswith("weights/")}
    found = []

    def take(name: str, layer: int | None, parts: tuple[str, ...], groups: int = 1) -> None:
        if all(part in rest for part in parts):
            shapes = [rest.pop(part) for part in parts]
            found.append(FusedWeight(name, layer, parts, tuple(s[0] for s in shapes), shapes[0][1:], groups))

    for name, part in MODEL.items():
        take(name, None, (f"weights/{part}",))
    for layer in range(config.num_hidden_layers):
        prefix = f"weights/model.layers.{layer}."
        has_experts = f"{prefix}mlp.gate.weight" in rest
        for name, parts in LAYER.items():
            own = NORMS[name] if has_experts and name.startswith("mlp.") and name in NORMS else name
            groups = config.num_key_value_heads if name.startswith(QKV) and len(parts) > 1 else 1
            take(own, layer, tuple(prefix + part for part in parts), groups)
    if rest:
        raise _no_counterpart(f"the model has the weight {min(rest)}")
    return found


def _no_counterpart(problem: str) -> CheckpointError:
    return CheckpointError(
        f"{problem}, which has no counterpart in Megatron-Core that Weft knows",
        rule=f"Megatron-Core's checkpoints are converted for {', '.join(FAMILIES)}",
        fix="convert a Hugging Face folder with Megatron-Bridge",
    )


def from_megatron(path: Path, weights: list[FusedWeight]) -> TensorSource:
    """Weights of a distributed checkpoint of Megatron-Core, read one layer at a time. Optimizer states are not read.

    Args:
        path: folder with metadata.json and .metadata, such as CHECKPOINTS/iter_0000100.
        weights: result of `fused_weights` for the model.

    Raises:
        CheckpointError: the folder is damaged or has another format, or its tensors are not those of the model.
    """
    _check_format(path)
    folder = DcpFolder(path)
    layers = 1 + max((weight.layer for weight in weights if weight.layer is not None), default=-1)
    places = {weight: _find(folder, weight, layers) for weight in weights}
    used = {key for key, _ in places.values()}
    unknown = [name for name in folder.tensors if name not in used and not name.startswith(IGNORED)]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors are not part of the model: {', '.join(unknown[:8])}",
            where=str(path),
            rule="a checkpoint of Megatron-Core has the weights of the model that the job names",
            fix="name a job with the configuration of this model, such as tie_word_embeddings: --job JOB.toml",
        )
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    parts: dict[str, tuple[FusedWeight, int]] = {}
    for weight in weights:
        for position, (part, rows) in enumerate(zip(weight.parts, weight.rows, strict=True)):
            specs[part] = folder.tensors[places[weight][0]].dtype, (rows, *weight.width)
            parts[part] = weight, position

    def read(name: str) -> Tensor:
        weight, position = parts[name]
        fused = folder.read(*places[weight])[: weight.shape[0]]  # without padded rows of the vocabulary
        return weight.split(fused)[position]

    return TensorSource(path, specs, read)


def _check_format(path: Path) -> None:
    try:
        table = json.loads((path / FORMAT).read_bytes())
        found = table["sharded_backend"], table["sharded_backend_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{FORMAT} cannot be read: {error!r}", where=str(path), fix="copy it again") from None
    if found != ("torch_dist", 1):
        raise CheckpointError(
            f"{FORMAT} names the format {found[0]!r}, version {found[1]!r}",
            where=str(path),
            rule="checkpoints of Megatron-Core are read in the format torch_dist, version 1",
            fix="save it again with --ckpt-format torch_dist",
        )


def _find(folder: DcpFolder, weight: FusedWeight, layers: int) -> tuple[str, tuple[int, ...]]:
    """Name of the stored tensor of a weight, and the index of the weight in it."""
    names = {weight.name, NORMS.get(weight.name, weight.name)}
    names |= {fused for fused, name in NORMS.items() if name == weight.name}
    places: list[tuple[str, tuple[int, ...]]] = [(weight.name, ())]
    if weight.layer is not None:
        places = [(f"decoder.layers.{name}", (weight.layer,)) for name in sorted(names)]
        places += [(f"decoder.layers.{weight.layer}.{name}", ()) for name in sorted(names)]
    expected, problem = weight.shape, f"{places[0][0]} is missing"
    for name, index in places:
        if name in folder.tensors:
            shape, expected = folder.tensors[name].shape, (*(layers,) * len(index), *weight.shape)
            padded = name in VOCABULARY and shape[1:] == expected[1:] and shape[0] >= expected[0]
            if shape == expected or padded:
                return name, index
            problem = f"{name} has the shape {shape}"
            break
    raise CheckpointError(
        problem,
        where=str(folder.path),
        rule=f"in Megatron-Core, {' and '.join(part.removeprefix('weights/') for part in weight.parts)} of the model "
        f"make up a tensor of shape {expected}",
        fix="name a job with the configuration of this model: --job JOB.toml",
    )


# Writing


class _Planner(torch_dcp.DefaultSavePlanner):
    """Plan whose tensors are read when they are written, so that one weight of one layer is in memory at a time."""

    def __init__(self, items: list[WriteItem], weights: dict[MetadataIndex, FusedWeight], tensors: TensorSource):
        super().__init__(flatten_state_dict=False)
        self.items = items
        self.weights = weights
        self.tensors = tensors

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self.items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            data = io.BytesIO()
            torch.save([None], data)  # a list with the state of each shard
            data.seek(0)
            return data
        weight, chunk = self.weights[write_item.index], write_item.tensor_data.chunk
        parts = [self.tensors.read(part).to(write_item.tensor_data.properties.dtype) for part in weight.parts]
        return weight.fuse(parts).reshape(chunk.sizes)


def write_megatron(tensors: TensorSource, weights: list[FusedWeight], folder: Path, dtype: torch.dtype) -> None:
    """Write a distributed checkpoint that `megatron.core.dist_checkpointing.load` reads, under any parallel degrees.

    Args:
        tensors: weights of the model, in the shapes of the model.
        weights: result of `fused_weights` for the model.
        folder: new folder.
        dtype: dtype of the written weights.

    Raises:
        CheckpointError: a weight cannot be read.
        OSError: a file cannot be written, or the disk has too little space.
    """
    inner: dict[int, set[str]] = {}
    for weight in weights:
        if weight.layer is not None:
            inner.setdefault(weight.layer, set()).add(weight.name)
    stacked = len({frozenset(names) for names in inner.values()}) == 1
    items, by_index = [], {}
    for weight in weights:
        key, has_layers = weight.name, weight.layer is not None and stacked
        if weight.layer is not None:
            key = f"decoder.layers.{weight.name}" if stacked else f"decoder.layers.{weight.layer}.{weight.name}"
        lead = (weight.layer or 0,) * has_layers
        full = (len(inner),) * has_layers
        offset = torch.Size((*lead, *(0 for _ in weight.shape)))
        chunk = ChunkStorageMetadata(offset, torch.Size((*(1 for _ in lead), *weight.shape)))
        data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size((*full, *weight.shape)))
        index = MetadataIndex(key, offset)
        by_index[index] = weight
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in _states(weight, key, lead, full)]
    size = sum(math.prod(weight.shape) for weight in weights) * dtype.itemsize
    save_lazily({}, _Planner(items, by_index, tensors), folder, size)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    format: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    format |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / FORMAT).write_text(json.dumps(format), encoding="utf-8")


def _states(weight: FusedWeight, key: str, lead: tuple[int, ...], full: tuple[int, ...]) -> list[str]:
    """Names of the states, all empty, that modules expect beside a weight: they hold scales of FP8 training."""
    module, _, kind = key.rpartition(".")
    if kind != "weight" or weight.name in VOCABULARY:
        return []
    modules = [module]
    if weight.name == f"{QKV}.weight":
        modules.append(module.replace("linear_qkv", "core_attention"))
    experts = [(n,) for n in range(weight.rows[0])] if ".experts." in key else [()]
    counts = full + ((weight.rows[0],) if ".experts." in key else ())
    return [
        f"{module}._extra_state/shard_{'.'.join(map(str, lead + expert)) or 0}_{'.'.join(map(str, counts)) or 1}"
        for module in modules
        for expert in experts
    ]
