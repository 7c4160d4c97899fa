"""Job: the complete configuration of a training run, read from and written to TOML. Imports no torch."""

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, ValidationError

from weft.errors import JobError
from weft.object_store import is_url
from weft.plan import DType, Function, Plan, ResolvedPlan, Table, resolve_plan
from weft.refusal import Origin, explain, keys_of, refuse_invalid_numbers

BF16_STEP = 2**-8  # relative rounding unit of bf16: smaller relative changes may be rounded away

DISTILLATION = "weft:distillation"
"""Value of `train.loss`, in place of a function of the user, for a loss with a teacher."""
AUTO = "auto"
"""Value of `plan`, in place of a file or a table, for a plan that the planner chooses on the ranks: jobs with a trainer."""
LARGEST_TOML = 2**20  # bytes
Count = Annotated[int, Field(ge=1, lt=2**63)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
BatchSize = Annotated[int, Field(ge=1, le=10**7)]  # each micro-batch of a step is planned on each rank
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Package = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*)?$"), 'the name of a Python module, such as "my_models"']
Steps = Annotated[
    str,
    Field(pattern=r"^([1-9]\d{0,17}-[1-9]\d{0,17})?$"),
    'empty, or the first and the last step, such as "10-12"',
]
ChatSets = Annotated[
    dict[str, Annotated[float, Field(gt=0, le=1000)]],
    "a table of paths, each with a number above 0 and of at most 1000",
]
Role = Literal[
    "attention",
    "recurrence",
    "mlp",
    "router",
    "experts",
    "shared_experts",
    "norm",
    "query",
    "key",
    "value",
    "output",
    "query_norm",
    "key_norm",
    "gate",
    "up",
    "down",
]
"""Role of a module: a part of a block, a linear layer or a norm of attention, or a linear layer of the MLP."""


def _is_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text} is not a pattern: {error}") from None
    return text


def _is_local(text: str) -> str:
    if is_url(text):
        raise ValueError(f"{text} is a URL")
    return text


NamePattern = Annotated[str, AfterValidator(_is_pattern)]
OutFolder = Annotated[
    str,
    AfterValidator(_is_local),
    "a path on a disk; checkpoint.remote, data.remote_cache and `weft export RUN URL` copy to object stores",
]


class Model(Table):
    """Model: exactly one of a folder with pretrained weights and a configuration for random initialization."""

    path: str | None = None
    """Hugging Face folder with config.json and safetensors weights to start from."""
    config: str | dict[str, Any] | None = None
    """Path of a Hugging Face config.json, or its contents as a table with a model_type; weights are randomly initialized."""
    init_seed: Seed = 0
    """Seed of weight initialization; weights are equal to plain Transformers after torch.manual_seed(init_seed)."""
    package: Package = ""
    """Module with model classes of yours, imported before the model is read: it registers them with Transformers' AutoConfig
    and AutoModelForCausalLM. Empty: none."""
    roles: dict[NamePattern, Role] | None = None
    """Roles of modules with names that Weft does not know: pattern of the last part of a module's name -> role."""


class Adapter(Table):
    """Adapters of PEFT: small trained matrices beside linear layers, whose own weights are frozen."""

    kind: Literal["none", "lora", "dora", "qlora"] = "none"
    """Kind of adapter. lora: low-rank matrices A and B beside a layer (Hu et al., 2021); dora: also a trained norm for each row
    of its weight (Liu et al., 2024); qlora: lora beside weights in 4 bits, plan.precision.frozen_weights = "nf4"
    (Dettmers et al., 2023); none: train all weights."""
    r: Count = 8
    """Rank of the matrices: columns of B and rows of A."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The output of an adapter is scaled by alpha / r."""
    targets: str | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Linear layers with an adapter, by the end of their names, such as ["q_proj", "v_proj"]; "all-linear": all in blocks.
    "experts.NAME", such as "experts.down_proj", is the weight of all experts of a layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the input of an adapter."""
    path: str | None = None
    """Folder with an adapter of PEFT to start from; default: A is random from model.init_seed, and B is zero."""
    base: str = ""
    """Digest of the weights of the model, which a run writes into its job.toml; a model with another digest is refused."""


class Data(Table):
    """Training data: source, tokenizer, and packing of tokens into rows."""

    source: Literal["python", "text", "jsonl", "parquet", "datasets", "tokens"] | Function = "python"
    """Type of source. python: the standard library of this interpreter without its tests; text: files by glob; jsonl or
    parquet: records with a "text" field, by glob or a Hugging Face dataset folder; datasets: a folder of
    Dataset.save_to_disk; tokens: an .npy file of integers [rows, seq_len + 1]. A function of yours,
    "package.module:function", yields the documents as strings from (this table)."""
    format: Literal["text", "chat"] = "text"
    """Format of the records. text: documents, and a loss on every token; chat: conversations for supervised fine-tuning,
    rendered by the tokenizer's chat template, and a loss on what the assistant says."""
    path: str | None = None
    """File, folder or glob of the source, which is not "python"; a function of yours interprets it."""
    sets: ChatSets = {}  # noqa: RUF012  (pydantic copies it)
    """Several sets of chats instead of data.path: path -> times that an epoch has each chat, such as {"a.jsonl" = 2.5}; below
    1, a part of the chats, whose number is rounded. Each set gives its own share of held-out chats."""
    chat_template_args: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    """Arguments of the chat template for every chat, such as {enable_thinking = false}; those in `chat_template_kwargs` of a
    record come first."""
    too_long: Literal["truncate", "drop", "refuse"] = "truncate"
    """Chats of more than seq_len + 1 tokens. truncate: keep the first tokens; drop: leave them out; refuse: raise an error."""
    tokenizer: str = "train"
    """Folder with a tokenizer; "train": the tokenizer in model.path if present, else a byte-level BPE trained on the text."""
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Vocabulary size of a tokenizer trained on the text: 256 bytes, the end-of-text token and merges."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Sequence length: input tokens per row."""
    packing: bool = True
    """Pack several documents into a row, with positions and attention restricted to each document; false: one piece of one
    document per row. Of causal and masked tasks; rows of other tasks are one record each."""
    shuffle: bool = True
    """Shuffle rows with train.seed; false: keep the order of the source."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the tokens held out for evaluation."""
    bad_files: Literal["refuse", "skip"] = "refuse"
    """Records whose image or audio is missing, empty, damaged or too large. refuse: raise an error; skip: leave them out, with
    their number and the first of them in a line at start."""
    cache: str = "~/.cache/weft"
    """Token cache: folder for tokenized text, addressed by content and shared by all jobs."""
    remote_cache: str = ""
    """URL of an object store, such as s3://bucket/cache, for copies of the token cache: a machine without the tokens of a job
    copies them from there, and one that has made them copies them to there. A store that fails is not used; empty: none."""


class Task(Table):
    """Task: class of the model, records, and loss."""

    kind: Literal["causal", "masked", "seq2seq", "classification", "vlm", "diffusion"] = "causal"
    """Kind of task. causal: predict the next token; masked: predict hidden tokens, as BERT; seq2seq: write "target" after
    reading "source", as T5, or "audio", as Whisper; classification: "label" of "text", "image" or "audio"; vlm: write "answer"
    after reading "image" and "prompt"; diffusion: denoise "image", with a model of Diffusers. Quoted: fields of a record."""
    fields: dict[str, str] = {}  # noqa: RUF012  (pydantic copies it)
    """Names of the fields in your records, where they differ: {source = "article", target = "summary"}."""
    classes: Count | None = None
    """classification: number of outputs: classes, or values of a regression; with model.path the classifier on top is newly
    initialized if it has another number. Default: that of the model's configuration."""
    source_lang: str | None = None
    """seq2seq: language of the sources, a code of the tokenizer, such as "eng_Latn" of NLLB or "en_XX" of mBART. Default: that
    of the tokenizer."""
    target_lang: str | None = None
    """seq2seq: language of the targets, and of what the export writes. Default: that of the tokenizer."""
    max_new_tokens: Count | None = None
    """seq2seq and vlm: maximum tokens of an answer to a held-out record. Default: those of the longest right answer."""
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """masked: fraction of the tokens to predict, of which 80 % are hidden and 10 % are replaced (Devlin et al., 2018)."""
    noise: Literal["flow", "ddpm"] = "flow"
    """diffusion: flow: straight lines between image and noise, of which the model predicts the velocity (Lipman et al., 2022);
    ddpm: the DDPMScheduler of Diffusers, of which it predicts the noise (Ho et al., 2020)."""
    scheduler: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    """diffusion with noise = "ddpm": arguments of the DDPMScheduler, such as {prediction_type = "v_prediction"}."""
    timesteps: Literal["uniform", "logit_normal"] | None = None
    """diffusion: distribution of the noise levels (Esser et al., 2024). Default: logit_normal of flow, uniform of ddpm."""


class Optimizer(Table):
    """Optimizer, gradient clipping and learning-rate schedule."""

    name: Literal["adamw", "muon", "adafactor", "lion", "onebit-adam"] | Function = "adamw"
    """Optimizer: fused AdamW (Loshchilov and Hutter, 2019); Muon for matrices of blocks (Jordan et al., 2024), AdamW for the
    rest; Adafactor (Shazeer and Stern, 2018); Lion (Chen et al., 2023), which needs `pip install "weft-train[optimizers]"`; or
    1-bit Adam (Tang et al., 2021), which is AdamW until its second moment is frozen, and then sends momentum changes as signs,
    with plan.comm.compression = "1-bit". Any other optimizer by its class, such as "torch.optim:NAdam", or by a function of
    yours, "package.module:function", which makes it from (parameter groups, this table)."""
    options: dict[str, Any] = {}  # noqa: RUF012  (pydantic copies it)
    """Further arguments of the optimizer, such as {momentum = 0.95}."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate, reached at the end of warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay rates of the first and the second moment, for optimizers that have them."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Term added to the root of the second moment for numerical stability, for optimizers that have it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices, decoupled with the optimizers above; vectors (norms, biases) do not decay."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum global gradient norm; a larger gradient is scaled down to it. 0: no clipping."""
    schedule: Literal["cosine", "linear", "polynomial", "wsd", "constant"] | Function = "cosine"
    """Learning-rate schedule after warm-up. cosine, linear and polynomial (optimizer.power): decay to optimizer.floor of the
    peak; wsd: constant, then linear decay to zero over the last fifth of the steps; constant: the peak. A function of yours,
    "package.module:function", returns the rate from (step, steps, this table), without warm-up of ours."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final learning rate of cosine, linear and polynomial, as a fraction of the peak."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Exponent of the polynomial schedule; 1 is linear."""
    warmup_steps: Number = 10
    """Steps of linear warm-up from zero to the peak learning rate."""
    freeze_steps: Count = 1000
    """Updates after which onebit-adam freezes its second moment: 15 to 25 % of all steps, and not before the end of warm-up."""
    keep_zeros: bool = False
    """Elements of matrices that are zero stay zero, for models that `weft compress --recipe 2:4` has pruned."""


def states_of(name: str) -> int:
    """Elements of optimizer state per element of a matrix; of an optimizer that Weft does not know, those of Adam.

    Args:
        name: `optimizer.name`, or the name of a class.
    """
    known = {"muon": 1, "adafactor": 0, "lion": 1, "onebitadam": 3}
    return known.get(name.rpartition(":")[2].replace("-", "").lower(), 2)


class Train(Table):
    """Training steps, batch sizes and evaluation."""

    steps: Count = 100
    """Number of optimizer steps."""
    global_batch_size: BatchSize = 8
    """Rows per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: BatchSize = 8
    """Maximum rows per forward and backward pass of a rank."""
    seed: Seed = 0
    """Seed of data order and dropout."""
    evaluate_every: Number = 0
    """Steps between evaluations on held-out rows, the first before training; 0: one evaluation at the end."""
    evaluate_rows: Count = 256
    """Maximum held-out rows per evaluation."""
    loss: Literal["cross_entropy"] | Function = "cross_entropy"
    """Loss: cross entropy; "weft:distillation", see the table distillation; or a function of yours, "package.module:function":
    the sum of the loss over the targets, from (logits [rows, tokens, vocabulary], targets [rows, tokens], where -100 is none).
    tp and cp ranks get the full logits."""
    router_bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """Change of the correction biases of routers after each step, which keeps the load of experts even without an auxiliary
    loss; 0.001 for DeepSeek-V3; 0: biases stay as they are. Only for families with such biases."""
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the z-loss of routers, the mean of logsumexp(logits)^2 over tokens and layers, which keeps logits small; 0.001
    for ST-MoE; 0: none. Only for families whose routers return their logits."""
    callbacks: tuple[Function, ...] = ()
    """Functions of yours, "package.module:function", called with the job on rank 0. Each returns an object with any of
    on_step(metrics), on_evaluation(evaluation), on_tasks(evaluation), on_checkpoint(folder) and on_end(folder)."""
    profile_steps: Steps = ""
    """Steps to profile, first and last, such as "10-12"; trace and page are in profile/ of the run folder. The first two steps
    of a process are never profiled, because they are slower: a profile that would begin there begins later. Empty: none."""
    profile_ranks: tuple[Number, ...] = ()
    """Ranks to profile, such as [0, 1]; empty: the first eight."""
    profile_only: bool = False
    """End the run two steps after the profile, without evaluation, checkpoint and export, as `weft profile` does."""

    def profiled(self) -> range:
        """Steps of `profile_steps`; empty without a profile."""
        first, _, last = self.profile_steps.partition("-")
        return range(int(first), int(last) + 1) if last else range(0)


class Distillation(Table):
    """Teacher of `train.loss = "weft:distillation"` (Hinton et al., 2015). It has the tokens and the axes of the model."""

    teacher: str = ""
    """Hugging Face folder of a causal language model; empty: no distillation."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divisor of the logits of both models; above 1, unlikely tokens matter more."""
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the divergence from the teacher in the loss; the rest is cross entropy."""
    hidden_states: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Factor of the squared error of the hidden states before the output layer, relative to those of the teacher, which must
    have as many channels (TinyBERT: Jiao et al., 2020); it is added to the loss."""
    shard_teacher: bool = True
    """Weights of the teacher are sharded over dp_shard, as with zero = 3; false: each data rank has them whole."""
    param_dtype: DType | Literal["student"] = "student"
    """Dtype in which the teacher is stored and computes; student: plan.precision.param_dtype."""


class Checkpoint(Table):
    """Checkpoints of the full training state."""

    every: Number = 0
    """Steps between checkpoints (step-00000100/), with another after the last step; 0: only if a signal ends the run."""
    folder: OutFolder = ""
    """Folder for checkpoints; empty: the run folder."""
    per_host: bool = False
    """Each host keeps the files of its ranks in this folder on its own disk, and its own run folder: hosts need no shared file
    system. A run resumes on hosts that have all files of a checkpoint together."""
    remote: str = ""
    """URL of an object store, such as s3://bucket/runs/first, to which checkpoints are copied in the background, and from which
    a run resumes if its folder has none or older ones. Needs `pip install "weft-train[s3]"`, or [gs] or [az]; empty: none."""
    keep: Number = 2
    """Number of newest checkpoints to keep; 0: keep all."""
    keep_hours: Annotated[float, Field(ge=0)] = 0.0
    """Interval of long-term checkpoints in hours: besides the newest, keep the first checkpoint of each interval; 0: none."""
    when_busy: Literal["wait", "skip"] = "wait"
    """Action if the previous checkpoint is still being written: wait for it, or skip the new checkpoint."""
    key_file: str = ""
    """File with the signing key of checkpoint manifests: 64 hexadecimal digits, mode 600. Checkpoints that are not signed with
    the key do not load; empty: no signatures."""
    memory_every: Number = 0
    """Steps between in-memory checkpoints, which each host and a neighbour host hold so that a restart needs no disk (Linux);
    0: none."""
    signals: tuple[Literal["USR1", "USR2"], ...] = ("USR1",)
    """Signals besides INT, TERM and HUP after which the run saves and ends. Slurm sends such a signal before a time limit."""


class Guard(Table):
    """Fault handling: loss spikes, silent data corruption, skipped updates, hangs and lost hosts."""

    spikes: Literal["off", "warn", "skip", "rollback"] = "warn"
    """Action after a spike of loss or gradient norm: none (off), print it (warn), skip the update (skip), or return to an
    earlier checkpoint and skip the batches since then (rollback)."""
    rollback_steps: Number = 100
    """Minimum steps between a spike and the checkpoint of its rollback; the newest such checkpoint is used."""
    sdc_check_interval: Number = 0
    """Steps between checks for silent data corruption, which compare weights held by several ranks; another check precedes each
    checkpoint. If replicas differ, training returns to a checkpoint and repeats the steps; 0: no checks."""
    max_skipped: Annotated[int, Field(ge=1)] = 20
    """Maximum consecutive skipped updates before training fails. The loss scale of fp16 may need 16 to settle."""
    hang_timeout_seconds: Annotated[float, Field(gt=0, lt=1800)] = 600.0
    """Seconds without progress on any rank after which a job is stopped or restarted. The limit is 1800 s because collectives
    then time out themselves, without naming the rank at fault."""
    node_rejoin_seconds: Annotated[float, Field(ge=0)] = 60.0
    """Seconds to wait for a lost host to rejoin or be replaced; then the job continues without it, or ends without host 0."""


class Eval(Table):
    """Evaluation on tasks during training, with lm-eval: `pip install "weft-train[eval]"`."""

    tasks: tuple[str, ...] = ()
    """Tasks: names of lm-eval, .yaml files, folders with .yaml files, or .jsonl files of yours. Tasks for which the model
    generates text need `weft eval` after training. Empty: none."""
    every: Number = 0
    """Steps between evaluations on tasks, the first before training; 0: one evaluation at the end."""
    limit: Number = 0
    """Maximum records per task; 0: all."""
    num_fewshot: Number | None = None
    """Worked examples in each prompt; unset: as each task says."""
    batch_size: Count = 8
    """Rows per forward pass of a rank."""


class Cluster(Table):
    """Hosts of a job: encryption between them, their power and their price."""

    encrypt: bool = False
    """TLS 1.3 for connections between the launchers of several hosts, and for gloo connections between ranks if this PyTorch's
    gloo supports TLS; NCCL does not. Must be the same on all hosts. Needs `pip install "weft-train[encrypt]"`."""
    watts: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Power of a device with its share of the host, for energy where no counter can be read; on cpu of a host. Default: the
    published power of the accelerator, if it is known."""
    dollars_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Price of a device, on cpu of a host. Metrics, progress and report then show the cost of the run."""
    grams_co2_per_kwh: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Emission of the electricity. Metrics and report then show that of the run."""


class Job(Table):
    """Complete configuration of a run. The same job gives bit-equal results on the same layout and machine."""

    model: Model = Model()
    adapter: Adapter = Adapter()
    task: Task = Task()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    distillation: Distillation = Distillation()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    eval: Eval = Eval()
    cluster: Cluster = Cluster()
    plan: Plan = Plan()
    out: OutFolder = "runs/first"
    """Run folder, for all output of the run; an earlier run in it is moved aside."""

    @classmethod
    def load(cls, path: str | os.PathLike[str], assignments: Iterable[str] = ()) -> "Job":
        """Read a job from TOML and apply `key=value` assignments with dotted keys.

        Raises:
            JobError: the file is missing or not TOML, a key is unknown, or a value breaks its rule.
        """
        return cls.parse(read_toml(path), assignments, where=str(path))

    @classmethod
    def parse(cls, tables: dict[str, Any], assignments: Iterable[str] = (), *, where: str = "job") -> "Job":
        """Create a job from nested tables and apply `key=value` assignments. `plan` may be the path of a TOML file.

        Raises:
            JobError: a key is unknown, or a value breaks its rule.
        """
        if "trainer" in tables:
            raise JobError(
                "this job has a trainer of TRL",
                where=where,
                rule="weft train takes jobs with a table trainer, and weft report, weft export and weft eval their runs; other "
                "commands do not",
                fix="see docs/fine-tuning.md; its logs are in trainer_state.json of the run folder",
            )
        tables, origin = assign_all(tables, assignments, where)
        job = _validate(tables, origin)
        if (job.model.path is None) == (job.model.config is None):
            raise JobError(
                "model names both a path and a config" if job.model.path else "model names neither a path nor a config",
                where=where,
                rule="exactly one of model.path (folder with weights) and model.config (random initialization) is set",
                fix='set one of the two keys, for example --set model.config="config.json"',
            )
        if job.plan.precision.optimizer_state_dtype == "bf16" and 1 - job.optimizer.betas[1] < BF16_STEP:
            raise JobError(
                f"optimizer.betas[1] = {job.optimizer.betas[1]} with plan.precision.optimizer_state_dtype = bf16",
                where=where,
                rule="the second moment changes by a fraction 1 - betas[1] per step, and bfloat16 may round away changes "
                f"below {BF16_STEP:.4f}: the second moment would never decrease",
                fix='set optimizer.betas[1] to 0.99 at most, or plan.precision.optimizer_state_dtype to "int8"',
            )
        if job.plan.precision.optimizer_state_dtype == "bf16" and job.optimizer.name == "adafactor":
            raise JobError(
                "optimizer.name = adafactor with plan.precision.optimizer_state_dtype = bf16",
                where=where,
                rule="the second moment of Adafactor changes by a fraction of step ** -0.8, and bfloat16 rounds away changes "
                f"below {BF16_STEP:.4f}: after a thousand steps it would never decrease",
                fix='set plan.precision.optimizer_state_dtype to "update" or "int8"',
            )
        _check_one_bit(job, where)
        _check_distillation(job, where)
        is_split, has_adapter = job.plan.precision.weights != "whole", job.adapter.kind != "none"
        if job.optimizer.keep_zeros and (is_split or has_adapter):
            what = f"adapter.kind = {job.adapter.kind!r}" if has_adapter else "plan.precision.weights that are split"
            raise JobError(
                f"optimizer.keep_zeros with {what}",
                where=where,
                rule="adapters start with zeros, which train; and split weights are not compared with zero",
                fix='set adapter.kind = "none" and plan.precision.weights = "whole", or optimizer.keep_zeros = false',
            )
        if job.plan.precision.quantize != "none" and job.adapter.kind != "none":
            raise JobError(
                f"plan.precision.quantize = {job.plan.precision.quantize!r} with adapter.kind = {job.adapter.kind!r}",
                where=where,
                rule="quantization-aware training moves the weights that are rounded; adapters leave them as they are",
                fix='set adapter.kind = "qlora" for a quantized base, and plan.precision.quantize = "none"',
            )
        _check_profile(job.train, where)
        if job.data.source == "python" and job.data.path is not None:
            raise JobError(
                f'data.path = {job.data.path!r} with data.source = "python"',
                where=where,
                rule='the source "python" is the standard library of this interpreter, and reads no other files',
                fix='set data.source, such as "text" or "jsonl", or remove data.path',
            )
        return job

    def check_causal(self, command: str) -> None:
        """Refuse a job with another task than causal.

        Args:
            command: command that applies to causal language models.

        Raises:
            JobError: the job has another task.
        """
        if self.task.kind != "causal":
            raise JobError(
                f"{command} for a job with task.kind = {self.task.kind!r}",
                where="task.kind",
                rule="this command applies to causal language models",
                fix="use `weft train`, which takes every task",
            )

    def to_toml(self) -> str:
        """TOML text of the full job, which `Job.load` reads back to an equal job."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


class ResolvedJob(Job):
    """Job for a known number of ranks on known devices; made by `resolve_job` and `with_plan` alone."""

    plan: ResolvedPlan


def resolve_job(job: Job, ranks: int, *, native_bf16: bool) -> ResolvedJob:
    """Resolve the plan of a job; see `weft.plan.resolve_plan`.

    Raises:
        PlanError: the plan breaks a rule, or does not fit the number of ranks.
    """
    plan = job.plan
    if job.adapter.kind == "qlora":
        precision = plan.precision.model_copy(update={"frozen_weights": "nf4"})
        plan = plan.model_copy(update={"precision": precision})
    return with_plan(job, resolve_plan(plan, ranks, native_bf16=native_bf16))


def packs_base(job: Job) -> bool:
    """True if the frozen weights of a job are in 4 bits."""
    return job.adapter.kind == "qlora" or job.plan.precision.frozen_weights == "nf4"


def with_plan(job: Job, plan: ResolvedPlan) -> ResolvedJob:
    """Copy of a job with a resolved plan."""
    return ResolvedJob.model_construct(**dict(job) | {"plan": plan})


def _check_distillation(job: Job, where: str) -> None:
    """Check that a job has a teacher if and only if its loss uses one."""
    has_teacher, uses_teacher = bool(job.distillation.teacher), job.train.loss == DISTILLATION
    if has_teacher != uses_teacher:
        raise JobError(
            f"distillation.teacher = {job.distillation.teacher!r} with train.loss = {job.train.loss!r}",
            where=where,
            rule=f'a teacher and train.loss = "{DISTILLATION}" belong together',
            fix="set distillation.teacher to a Hugging Face folder"
            if uses_teacher
            else f'set train.loss = "{DISTILLATION}", or remove the table distillation',
        )


def _check_profile(train: Train, where: str) -> None:
    """Check that the steps to profile are steps of the run."""
    if train.profile_steps and not train.profiled():
        raise JobError(
            f"train.profile_steps = {train.profile_steps}",
            where=where,
            rule="the last step to profile is not before the first one",
            fix='name the first and the last step, such as "10-12"',
        )
    if train.profile_steps and train.profiled()[-1] > train.steps:
        raise JobError(
            f"train.profile_steps = {train.profile_steps} with train.steps = {train.steps}",
            where=where,
            rule="the steps to profile are steps of the run",
            fix=f"name steps up to {train.steps}, or increase train.steps",
        )
    if (train.profile_only or train.profile_ranks) and not train.profile_steps:
        raise JobError(
            "train.profile_only or train.profile_ranks without train.profile_steps",
            where=where,
            rule="both describe the profile of train.profile_steps",
            fix='set train.profile_steps, such as "10-12", or remove the other keys',
        )


def _check_one_bit(job: Job, where: str) -> None:
    """Check that 1-bit compression and 1-bit Adam are used together, and that freeze_steps lies within training."""
    optimizer, compression = job.optimizer, job.plan.comm.compression
    if (optimizer.name == "onebit-adam") != (compression == "1-bit"):
        raise JobError(
            f"optimizer.name = {optimizer.name} with plan.comm.compression = {compression}",
            where=where,
            rule="signs carry no magnitudes for Adam's second moment: only onebit-adam, which freezes it, can use them",
            fix='set both optimizer.name = "onebit-adam" and plan.comm.compression = "1-bit", or neither; "2:4" and "int8" '
            "work with every optimizer",
        )
    if optimizer.name == "onebit-adam" and not optimizer.warmup_steps <= optimizer.freeze_steps < job.train.steps:
        raise JobError(
            f"optimizer.freeze_steps = {optimizer.freeze_steps} with {optimizer.warmup_steps} steps of warm-up and "
            f"{job.train.steps} steps of training",
            where=where,
            rule="the second moment is frozen after warm-up and before the last step",
            fix=_freeze_steps(job),
        )


def _freeze_steps(job: Job) -> str:
    """Fix with 20 % of all steps, or the end of warm-up if that is later."""
    warmup, steps = job.optimizer.warmup_steps, job.train.steps
    if steps < 2:
        return 'set optimizer.name to "adamw" and plan.comm.compression to "none"'
    if warmup < steps:
        return f"set optimizer.freeze_steps to {max(1, steps // 5, warmup)}"
    return f"set optimizer.warmup_steps to {steps // 10} and optimizer.freeze_steps to {max(1, steps // 5)}"


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from its own TOML file.

    Raises:
        JobError: the file is missing or not TOML, a key is unknown, or a value breaks its rule.
    """
    return _validate({"plan": read_toml(path)}, Origin(str(path), plan=str(path))).plan


def assign_all(tables: dict[str, Any], assignments: Iterable[str], where: str) -> tuple[dict[str, Any], Origin]:
    """Apply assignments to the tables of a job, and read its plan if that is the path of a TOML file.

    Args:
        tables: nested tables.
        assignments: settings `key=value` with dotted keys.
        where: file of the tables, or a text that stands for one.

    Returns:
        The tables, and where their keys were written.

    Raises:
        JobError: an assignment is invalid, or the file of the plan is missing or is not TOML.
    """
    assignments, plan = tuple(assignments), ""
    for assignment in ("", *assignments):
        tables = assign(tables, assignment) if assignment else tables
        plan = tables["plan"] if isinstance(tables.get("plan"), str) else plan
    if isinstance(tables.get("plan"), str) and plan != AUTO:
        tables = {**tables, "plan": read_toml(plan)}
    return tables, Origin(where, assignments, plan)


def _validate(tables: dict[str, Any], origin: Origin) -> Job:
    """Create a job from nested tables, and refuse keys and values one by one."""
    try:
        job = Job.model_validate(tables)
    except ValidationError as error:
        raise explain(error, Job, tables, origin) from None
    refuse_invalid_numbers(tables, job, origin)
    return job


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file into nested tables.

    Raises:
        JobError: the file is missing or is not TOML.
    """
    rule = "jobs, plans, topologies and clusters are TOML files"
    try:
        with Path(path).open("rb") as file:
            raw = file.read(LARGEST_TOML + 1)
        if len(raw) > LARGEST_TOML:
            raise JobError(
                f"{path} has more than {LARGEST_TOML} bytes",
                rule=rule,
                fix="name a TOML file; text to train on goes to data.path",
            )
        return tomllib.loads(raw.decode())
    except IsADirectoryError:
        inside = Path(path) / "job.toml"
        fix = f"name the file in it: {inside}" if inside.is_file() else "name a TOML file"
        raise JobError(f"{path} is a folder", rule=rule, fix=fix) from None
    except (FileNotFoundError, NotADirectoryError):
        raise JobError(
            f"there is no file {path}", rule=rule, fix="check the path; it is relative to the current folder"
        ) from None
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}", rule=rule, fix="check its permissions") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or a path with a null character
        raise JobError(
            f"{path} is not a TOML file: {error}", rule=rule, fix="see https://toml.io for the format"
        ) from None


def has_trainer(path: str | os.PathLike[str]) -> bool:
    """True if a TOML file is a job with a trainer of TRL, see `weft.posttraining.job`; False if it is missing or not TOML."""
    try:
        return "trainer" in read_toml(path)
    except JobError:
        return False


def assign(tables: dict[str, Any], assignment: str) -> dict[str, Any]:
    """Copy of the tables with one `dotted.key=value` set. A value that is not TOML is taken as a string.

    Raises:
        JobError: the assignment has no key or no value, or its key is below a value.
    """
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise JobError(
            f"cannot read --set {assignment!r}",
            where="command line",
            rule="a setting is written key=value, with dots in the key",
            fix="for example --set train.steps=100; `weft schema` lists the keys",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number with thousands of digits
        value = text

    def put(table: dict[str, Any], path: list[str]) -> dict[str, Any]:
        head, *rest = path
        if not rest:
            return {**table, head: value}
        inner = table.get(head, {})
        if isinstance(inner, str) and head == "plan":  # plan = "plan.toml", with one of its keys changed
            inner = read_toml(inner)
        if not isinstance(inner, dict):
            raise JobError(
                f"--set {assignment}: {head} is a value, not a table",
                where="command line",
                rule="only a table has keys",
                fix=f"remove the part after {head}, or see `weft schema` for the keys of the job",
            )
        return {**table, head: put(inner, rest)}

    return put(tables, key.strip().split("."))


def keys() -> list[str]:
    """All dotted keys of the job, in order."""
    return keys_of(Job)
