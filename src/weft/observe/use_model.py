"""Report sections about the trained model: a picture of its samples, and code that loads its export."""

import base64
from pathlib import Path
from typing import Any

from weft.observe import page
from weft.training.run_folder import PICTURE

LOADERS = {
    "masked": (
        "from transformers import pipeline",
        "",
        "find = pipeline('fill-mask', {folder!r})",
        "print(find('def ' + find.tokenizer.mask_token + '(self):'))",
    ),
    "seq2seq": (
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "",
        "folder = {folder!r}",
        "model = AutoModelForSeq2SeqLM.from_pretrained(folder)",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "inputs = tokenizer('...', return_tensors='pt')",
        "written = model.generate(**inputs, max_new_tokens=40)",
        "print(tokenizer.decode(written[0], skip_special_tokens=True))",
    ),
    "classification": (
        "from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification",
        "",
        "folder = {folder!r}",
        "config = AutoConfig.from_pretrained(folder)",
        "has_images = type(config) in AutoModelForImageClassification._model_mapping",
        "kind = AutoModelForImageClassification if has_images else AutoModelForSequenceClassification",
        "model = kind.from_pretrained(folder)  # model(pixel_values=...) or model(input_ids=...).logits",
    ),
    "seq2seq of audio": (
        "from transformers import pipeline",
        "",
        "write = pipeline('automatic-speech-recognition', {folder!r})",
        "print(write('sound.wav')['text'])",
    ),
    "classification of audio": (
        "from transformers import pipeline",
        "",
        "classify = pipeline('audio-classification', {folder!r})",
        "print(classify('sound.wav'))",
    ),
    "vlm": (
        "from transformers import AutoModelForImageTextToText, AutoProcessor",
        "",
        "folder = {folder!r}",
        "model = AutoModelForImageTextToText.from_pretrained(folder)",
        "processor = AutoProcessor.from_pretrained(folder)",
    ),
    "diffusion": (
        "import diffusers",
        "",
        "folder = {folder!r}",
        "name = diffusers.ModelMixin.load_config(folder)['_class_name']",
        "model = getattr(diffusers, name).from_pretrained(folder)",
        "velocity = model(hidden_states=noise, timestep=timestep, class_labels=labels).sample",
    ),
    "diffusion by a scheduler": (
        "import diffusers",
        "",
        "folder = {folder!r}",
        "name = diffusers.ModelMixin.load_config(folder)['_class_name']",
        "model = getattr(diffusers, name).from_pretrained(folder)",
        "scheduler = diffusers.DDPMScheduler.from_pretrained(folder)",
        "predicted = model(hidden_states=image, timestep=timestep, class_labels=labels).sample",
        "image = scheduler.step(predicted, timestep, image).prev_sample",
    ),
}
"""Code that loads the export of each task."""


def picture(run: Path, facts: dict[str, Any]) -> list[str]:
    """Picture with the samples of a model of diffusion, if the run has one."""
    file = run / PICTURE
    if facts.get("task") != "diffusion" or not file.is_file():
        return []
    return [page.picture(base64.b64encode(file.read_bytes()).decode(), str(facts.get("sample")))]


def _reads_audio(export: Path) -> bool:
    files = [export / name for name in ("preprocessor_config.json", "processor_config.json")]
    return any(file.exists() and "feature_extractor_type" in file.read_text(encoding="utf-8") for file in files)


def usage(run: Path, facts: dict[str, Any]) -> str:
    """Code example that loads the export; of a causal model it generates text, from the first words of the sample.

    Args:
        run: run folder.
        facts: entries of run.json.
    """
    export = (run / "export").resolve()
    if not any((export / name).exists() for name in ("config.json", "adapter_config.json")):
        return page.absent(f"This run has no export. Create one from a checkpoint: weft export {run} TO --step STEP")
    if task := facts.get("task"):
        if f"{task} of audio" in LOADERS and _reads_audio(export):
            task = f"{task} of audio"
        if task == "diffusion" and (export / "scheduler_config.json").exists():
            task = "diffusion by a scheduler"
        return page.preformatted("\n".join(LOADERS[task]).format(folder=str(export)))
    sample = facts.get("sample")
    prompt = " ".join((sample or "The").split(" ")[:4])[:40]
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"folder = {str(export)!r}",
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f'inputs = tokenizer({prompt!r}, return_tensors="pt")',
        "written = model.generate(**inputs, max_new_tokens=40, do_sample=True)",
        "print(tokenizer.decode(written[0], skip_special_tokens=True))",
    ]
    if not (export / "tokenizer_config.json").exists():  # the run was trained on token ids
        lines[0] = "import torch\nfrom transformers import AutoModelForCausalLM"
        lines[4:] = [
            "ids = torch.tensor([[1, 2, 3]])  # this run was trained on token ids, without a tokenizer",
            "print(model.generate(ids, max_new_tokens=40, do_sample=True))",
        ]
    return page.preformatted("\n".join(lines))
