"""Distillation: a student of several ranks learns from a teacher as in one process, and as a command."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.parity import SETTINGS, compare, full_tensor, logits_of, packed_batches, share
from tests.lab.plans import resolved, resolved_job
from tests.lab.pool import run_ranks
from tests.lab.runs import plain_held_out_loss, train_in_the_pool
from weft.adapters.model import build_model
from weft.checkpoint.huggingface import gather_weights
from weft.checkpoint.loading import materialize
from weft.data import MicroBatch
from weft.device.detect import detect
from weft.errors import JobError, WeftError
from weft.job import Job, Model
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import reorder_packed, runtime
from weft.planner.dryrun.trace import trace_rank
from weft.precision.dtypes import DTYPES
from weft.topology.mesh import build_mesh, data_rank
from weft.training.forward_backward import forward_backward
from weft.training.functions import use_loss
from weft.training.job_checks import check_model
from weft.training.metrics import read_evaluations, read_metrics
from weft.training.optimizer import build_optimizer, learning_rate
from weft.training.step import evaluate, train_step

TEMPERATURE, WEIGHT, HIDDEN, VOCABULARY = 2.0, 0.75, 0.5, 301
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"parallel": {"zero": 0}}),
    "zero 3": (2, {"parallel": {"zero": 3}}),
    "tp2": (2, {"parallel": {"tp": 2}}),
    "tp2, no sp": (2, {"parallel": {"tp": 2, "sp": False}}),
    "cp2 ring": (2, {"parallel": {"cp": 2}}),
    "cp2 Ulysses": (2, {"parallel": {"cp": 2, "cp_ulysses": 2}}),
    "pp2": (2, {"parallel": {"pp": 2}, "pipeline": {"stage_blocks": [1, 3]}}),
    "pp2 dualpipev": (2, {"parallel": {"pp": 2}, "pipeline": {"schedule": "dualpipev"}}),
    "pp2 x tp2": (4, {"parallel": {"pp": 2, "tp": 2}}),
    "unequal rows": (2, {"parallel": {"rows_per_rank": [3, 1]}}),
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of teachers: with fewer channels than the student, with as many, and with experts."""
    folders = {}
    for name, config in {
        "dense": {**family("llama"), "hidden_size": 48, "num_hidden_layers": 4},
        "wide": {**family("llama"), "num_hidden_layers": 4},
        "experts": {**family("qwen3_moe"), "num_hidden_layers": 4},
    }.items():
        torch.manual_seed(5)
        table = {**config, "vocab_size": VOCABULARY, "initializer_range": 0.2}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table), dtype=torch.float64)
        folders[name] = tmp_path_factory.mktemp("teacher") / name
        model.save_pretrained(folders[name])
    return folders


def job_for(teacher: Path, plan: dict[str, Any], dtype: str = "fp64", **distillation: Any) -> Job:
    config = {**family("llama"), "vocab_size": VOCABULARY, "num_hidden_layers": 4}
    precision = {"param_dtype": dtype, "update": dtype, "reduce_dtype": dtype}
    return Job.model_validate(
        {
            "model": {"config": config},
            "train": {"loss": "weft:distillation", "global_batch_size": 4},
            "distillation": {"teacher": str(teacher), "temperature": TEMPERATURE, "weight": WEIGHT, **distillation},
            "plan": {"precision": precision, **plan},
        }
    )


def run_job(rank: int, world_size: int, job: Job, batches: list[MicroBatch]) -> dict[str, Any]:
    """Losses, gradients and weights of some steps on one rank."""
    device, plan = detect(), resolved(job.plan, world_size)
    job = job.model_copy(update={"plan": plan})
    mesh = build_mesh(plan, device.type, world_size)
    model = parallelize(build_model(job, DTYPES[plan.precision.update]), plan, mesh)
    use_loss(model, job)
    materialize(model, job.model, device.torch_device(0))
    teacher = runtime(model).teacher
    assert teacher is not None
    materialize(teacher.model, Model(path=job.distillation.teacher), device.torch_device(0))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, device)
    own, rows = data_rank(mesh), plan.parallel.rows_per_rank
    shares = [share(batch, own, plan.parallel.data_ranks, 1) for batch in batches]
    if rows:
        shares = [share(batch, 0, 1, 1)[sum(rows[:own]) : sum(rows[: own + 1])] for batch in batches]
        shares = [[MicroBatch(*(torch.cat(parts) for parts in zip(*fields(share), strict=True)))] for share in shares]
    tokens = int((batches[0].targets != -100).sum())
    forward_backward(model, shares[0], plan.parallel.gradient_ranks / tokens)
    gradients = {name: full_tensor(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.zero_grad()
    losses = []
    for step, micro_batches in enumerate(shares, 1):
        for group in optimizer.inner.param_groups:
            group["lr"] = learning_rate(step, len(shares), SETTINGS)
        result = train_step(model, optimizer, micro_batches, SETTINGS.clip_norm)
        assert result.problem is None
        losses.append(result.loss)
    return {
        "losses": losses,
        "gradients": reorder_packed(model, gradients, by_rank=False),
        "weights": gather_weights(model),
        "held out": evaluate(model, shares[0]),
    }


def fields(batches: list[MicroBatch]) -> list[list[torch.Tensor]]:
    return [[batch.input_ids, batch.position_ids, batch.targets] for batch in batches]


def reference(job: Job, batches: list[MicroBatch]) -> dict[str, Any]:
    """The same steps in one process, by PyTorch and Transformers alone."""
    torch.manual_seed(job.model.init_seed)
    dtype = DTYPES[job.plan.precision.update]
    student = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job.model.config), dtype=dtype)
    teacher = AutoModelForCausalLM.from_pretrained(job.distillation.teacher, dtype=dtype).eval()
    decay = [p for name, p in student.named_parameters() if p.ndim >= 2]
    others = [p for name, p in student.named_parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": SETTINGS.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    losses, gradients = [], {}
    inputs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # of the heads of both, for each document
    student.lm_head.register_forward_pre_hook(lambda module, args: inputs[0].append(args[0].flatten(0, 1)))
    teacher.lm_head.register_forward_pre_hook(lambda module, args: inputs[1].append(args[0].flatten(0, 1)))
    for step, batch in enumerate(batches, 1):
        inputs[0].clear()
        inputs[1].clear()
        counted = batch.targets != -100
        logits = logits_of(student, batch)
        with torch.no_grad():
            taught = logits_of(teacher, batch)
        both = min(logits.shape[-1], taught.shape[-1])
        divergence = F.kl_div(
            F.log_softmax(logits[counted][:, :both] / TEMPERATURE, -1),
            F.log_softmax(taught[counted][:, :both] / TEMPERATURE, -1),
            reduction="batchmean",
            log_target=True,
        )
        entropy = F.cross_entropy(logits[counted], batch.targets[counted])
        loss = WEIGHT * TEMPERATURE**2 * divergence + (1 - WEIGHT) * entropy
        if job.distillation.hidden_states:
            own, known = (torch.cat(each)[counted.flatten()] for each in inputs)
            errors = (own - known).square().sum(-1) / known.square().sum(-1)
            loss = loss + job.distillation.hidden_states * errors.mean()
        loss.backward()
        if step == 1:
            gradients = {name: p.grad.clone() for name, p in student.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), SETTINGS)
        torch.nn.utils.clip_grad_norm_(student.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    counted = batches[0].targets != -100
    with torch.no_grad():
        held_out = F.cross_entropy(logits_of(student, batches[0])[counted], batches[0].targets[counted]).item()
    weights = {name: p.detach() for name, p in student.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights, "held out": held_out}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["held out"] == pytest.approx(expected["held out"], rel=tolerance)
    for kind in ("gradients", "weights"):
        for name, value in found[kind].items():
            if name in expected[kind]:  # a pipeline's copy of a tied weight has another name
                compare(
                    f"{kind}: {name}", value, expected[kind][name], tolerance, SETTINGS.lr if kind == "weights" else 0
                )


@pytest.mark.must("parity: distillation", case="zero 0")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_of_several_ranks_learns_as_in_one_process(layout: str, teachers: dict[str, Path]) -> None:
    ranks, plan = LAYOUTS[layout]
    job, batches = job_for(teachers["dense"], plan), packed_batches(VOCABULARY)
    expected = reference(job, batches)
    results = run_ranks(ranks, run_job, job, batches, timeout=120)
    assert {name for found in results for name in found["gradients"]} >= set(expected["gradients"])
    for found in results:
        assert_equal(found, expected)


def padded(folder: Path, teacher: Path, size: int) -> Path:
    """Copy of a teacher whose tables of tokens have more or fewer rows."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    torch.manual_seed(3)
    model.resize_token_embeddings(size, mean_resizing=False)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [VOCABULARY + 11, VOCABULARY - 150], ids=["longer", "shorter"])
@pytest.mark.parametrize("layout", ["zero 3", "tp2"])
def test_the_divergence_is_over_the_tokens_of_both_tables(
    layout: str, size: int, teachers: dict[str, Path], tmp_path: Path
) -> None:
    """Of a teacher with another number of rows, as sizes of one family are padded differently."""
    ranks, plan = LAYOUTS[layout]
    job = job_for(padded(tmp_path / "padded", teachers["dense"], size), plan)
    batches = packed_batches(min(size, VOCABULARY))
    expected = reference(job, batches)
    for found in run_ranks(ranks, run_job, job, batches, timeout=120):
        assert_equal(found, expected)


@pytest.mark.must("composition: distillation", case="unequal rows")
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zero 0"])
def test_hidden_states_of_several_ranks_are_those_of_one_process(layout: str, teachers: dict[str, Path]) -> None:
    ranks, plan = LAYOUTS[layout]
    job, batches = job_for(teachers["wide"], plan, hidden_states=HIDDEN), packed_batches(VOCABULARY)
    expected = reference(job, batches)
    for found in run_ranks(ranks, run_job, job, batches, timeout=120):
        assert_equal(found, expected)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_teacher_with_experts(sharded: bool, teachers: dict[str, Path]) -> None:
    """Weights of the teacher are sharded where those of the student are whole, and the other way round."""
    job = job_for(teachers["experts"], {"parallel": {"zero": 0 if sharded else 3}}, "fp32", shard_teacher=sharded)
    batches = packed_batches(VOCABULARY)
    expected = reference(job, batches)
    for found in run_ranks(2, run_job, job, batches, timeout=120):
        assert_equal(found, expected, 1e-5)


def test_a_run_with_a_teacher_resumes_bit_equal(tmp_path: Path, teachers: dict[str, Path]) -> None:
    """Checkpoints and the export have the student alone; evaluations are cross entropies."""
    job = run_of(tmp_path, teachers["dense"], {"tp": 2}, "whole")
    whole, _ = train_in_the_pool(job, 2)
    rest, _ = train_in_the_pool(
        run_of(tmp_path, teachers["dense"], {"tp": 2}, "rest"), 2, resume=str(whole / "step-00000002")
    )
    expected = {step.step: step.loss for step in read_metrics(whole / "metrics.jsonl")}
    found = {step.step: step.loss for step in read_metrics(rest / "metrics.jsonl")}
    assert found == {step: expected[step] for step in (3, 4)}
    assert expected[4] < expected[1]
    config = json.loads((whole / "export" / "config.json").read_text())
    assert config["hidden_size"] == job.model.config["hidden_size"]
    (evaluation,) = read_evaluations(whole / "evaluations.jsonl")
    assert evaluation.held_out_loss == pytest.approx(plain_held_out_loss(whole, whole / "export"), rel=1e-4)


def test_another_teacher_is_another_update(tmp_path: Path, teachers: dict[str, Path]) -> None:
    whole, _ = train_in_the_pool(run_of(tmp_path, teachers["dense"], {}, "whole"), 1)
    with pytest.raises(JobError, match=r"distillation\.temperature = 3\.0, it was 1\.0"):
        train_in_the_pool(
            run_of(tmp_path, teachers["dense"], {}, "rest", temperature=3.0), 1, resume=str(whole / "step-00000002")
        )


def test_a_dry_run_counts_the_teacher(teachers: dict[str, Path]) -> None:
    """Memory and matmuls of a rank grow by those of a forward of the teacher."""
    job = job_for(teachers["dense"], {"parallel": {"zero": 0}}, "fp32")
    alone = job.model_copy(update={"train": job.train.model_copy(update={"loss": "cross_entropy"})})
    found, without = (trace_rank(each, 1, 0).count for each in (job, alone))
    teacher = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(teachers["dense"]).parameters())
    assert found.peak - without.peak >= 4 * teacher
    assert found.flops > 1.2 * without.flops


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"loss": "weft:distillation"}}, ["teacher = ''", "belong together", "set distillation.teacher"]),
        ({"distillation": {"teacher": "/nowhere"}}, ["'/nowhere' with train.loss = 'cross_entropy'", "set train.loss"]),
        ({"distillation": {"weight": 0.0}}, ["distillation.weight"]),
    ],
)
def test_a_job_that_is_half_a_distillation_is_refused(
    settings: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(JobError) as found:
        Job.load(write_job(tmp_path, **settings))
    assert all(word in str(found.value) for word in words), found.value


@pytest.mark.must("refusal: distillation")
def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, teachers: dict[str, Path]) -> None:
    tables = {"train": {"loss": "weft:distillation"}, "distillation": {"teacher": str(teachers["dense"])}}
    with pytest.raises(WeftError, match=rf"has {VOCABULARY} tokens, and the model has 300"):
        check_model(resolved_job(Job.load(write_job(tmp_path, **tables)), 1))


def word_tokenizer(folder: Path, words: list[str]) -> Path:
    """Tokenizer of words, whose ids are their places."""
    own = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<end>", *words])}, unk_token="<end>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>").save_pretrained(folder)
    return folder


WORDS = [f"w{index}" for index in range(40)]
TOKENIZERS: dict[str, tuple[list[str], int, str]] = {  # words and table of the teacher, and what is said
    "same": (WORDS, VOCABULARY, ""),
    "more words": ([*WORDS, "more"], VOCABULARY, ""),
    "longer table": (WORDS, VOCABULARY + 5, ""),
    "shorter table": (WORDS, 64, ""),
    "table shorter than the text's tokens": (WORDS, 40, "has 40 tokens, and the model has 301"),
    "two words exchanged": ([*WORDS[:7], "w8", "w7", *WORDS[9:]], VOCABULARY, "2 tokens of .*'w7': 8 and 9"),
    "a word less": (WORDS[:-1], VOCABULARY, "1 tokens of .*'w39': 40 and none"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_the_words_of_a_teacher_are_compared(case: str, tmp_path: Path, teachers: dict[str, Path]) -> None:
    words, size, said = TOKENIZERS[case]
    teacher = padded(tmp_path / "padded", teachers["dense"], size)
    word_tokenizer(teacher, words)
    job = run_of(tmp_path, teacher, {}, "out")
    job = job.model_copy(
        update={"data": job.data.model_copy(update={"tokenizer": str(word_tokenizer(tmp_path / "own", WORDS))})}
    )
    if not said:
        check_model(resolved_job(job, 1))
        return
    with pytest.raises(WeftError, match=said):
        check_model(resolved_job(job, 1))


def test_a_tokenizer_trained_on_the_text_is_none_of_a_teacher(tmp_path: Path, teachers: dict[str, Path]) -> None:
    teacher = padded(tmp_path / "teacher", teachers["dense"], VOCABULARY)
    word_tokenizer(teacher, WORDS)
    job = run_of(tmp_path, teacher, {}, "out")
    with pytest.raises(JobError, match=r'data\.tokenizer = "train" with the tokenizer of'):
        check_model(resolved_job(job, 1))


def test_a_teacher_of_another_width_has_no_hidden_states_to_compare(tmp_path: Path, teachers: dict[str, Path]) -> None:
    job = run_of(tmp_path, teachers["dense"], {}, "out", hidden_states=HIDDEN)
    width = family("llama")["hidden_size"]
    with pytest.raises(WeftError, match=rf"has hidden states of 48 channels, and the model of {width}"):
        check_model(resolved_job(job, 1))


def run_of(folder: Path, teacher: Path, parallel: dict[str, Any], out: str, **distillation: Any) -> Job:
    """Job with four steps on a small text."""
    path = write_job(
        folder,
        model={"config": {**family("llama"), "vocab_size": VOCABULARY}},
        train={"steps": 4, "loss": "weft:distillation"},
        optimizer={"lr": 0.01},
        distillation={"teacher": str(teacher), **distillation},
        checkpoint={"every": 2},
        plan={"parallel": parallel},
    )
    return Job.load(path, [f"out={folder / out}"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*WORDS[:7], "w8", "w7", *WORDS[9:]], "2 tokens of .*'w8': 8 and 9"),
        ([*WORDS, "added"], ""),
        (WORDS, ""),
    ],
    ids=["exchanged", "one more", "same"],
)
def test_a_tokenizer_gives_the_ids_that_the_model_has_learned(
    words: list[str], said: str, teachers: dict[str, Path], tmp_path: Path
) -> None:
    """`data.tokenizer` beside the tokenizer of `model.path`, with the vocabulary of the same size."""
    model = padded(tmp_path / "model", teachers["dense"], VOCABULARY)
    word_tokenizer(model, WORDS)
    (tmp_path / "text.txt").write_text(" ".join(WORDS) * 40)
    tokenizer = word_tokenizer(tmp_path / "own", words)
    data = {"source": "text", "path": str(tmp_path / "text.txt"), "tokenizer": str(tokenizer), "seq_len": 16}
    job = Job.load(write_job(tmp_path, data=data, train={"steps": 1}))
    job = job.model_copy(update={"model": Model(path=str(model))})
    if said:
        with pytest.raises(WeftError, match=said):
            train_in_the_pool(job, 1)
    else:
        train_in_the_pool(job, 1)
