"""Class of Transformers or Diffusers that builds the model of a task."""

from typing import Any

from weft.errors import ModelError
from weft.own_code import import_extra

AUTO_CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "vlm": "AutoModelForImageTextToText",
}
WORDS = {
    "causal": "causal language model",
    "masked": "model for masked words",
    "seq2seq": "encoder-decoder model",
    "vlm": "model for images and text",
    "classification": "classifier",
}


def auto_class(kind: str, config: Any) -> Any:
    """Class with `from_config` and `from_pretrained` for a kind of task.

    Args:
        kind: `task.kind` of a job.
        config: configuration of the model; of Diffusers, its table with _class_name.

    Raises:
        ModelError: Diffusers has no such class.
    """
    if kind == "diffusion":
        return diffusers_class(str(config.get("_class_name")))
    import transformers  # not with this module: ranks of text read their rows without it

    if kind == "classification":
        if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            return transformers.AutoModelForImageClassification
        if type(config) in transformers.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING:
            return transformers.AutoModelForAudioClassification
        return transformers.AutoModelForSequenceClassification
    texts, audio = (
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )
    if kind == "seq2seq" and type(config) in audio and type(config) not in texts:
        return transformers.AutoModelForSpeechSeq2Seq
    return getattr(transformers, AUTO_CLASSES[kind])


def vision_config(config: Any) -> Any:
    """Configuration of the part of a model that reads images: of CLIP and SigLIP a nested one, of ViT the whole."""
    nested = getattr(config, "vision_config", None)
    return config if nested is None else nested


def diffusers_class(name: str) -> Any:
    """Model class of Diffusers by its name.

    Raises:
        ModelError: there is no such model.
        JobError: Diffusers is not installed.
    """
    library = import_extra("diffusers", "tasks", "task.kind", "models of diffusion are those of Diffusers")
    found = getattr(library, name, None)
    if not isinstance(found, type) or not issubclass(found, library.ModelMixin):
        raise ModelError(
            f"_class_name = {name!r}",
            where="model.config",
            rule="it is the name of a model class of Diffusers",
            fix='name one, such as "DiTTransformer2DModel"',
        )
    return found
