"""Precomputed log-probabilities of a reference model, which TRL keeps in the cache of `datasets`.

The key of TRL has the rows and the weights. Their values depend on more: options such as `max_length`, `truncation_mode` and
`ld_alpha`, dtypes and layout of the plan, the configuration of the model, and versions.
"""

import json
from importlib.metadata import version
from typing import Any

from blake3 import blake3

from weft.checkpoint.manifest import library_versions

WITHOUT_EFFECT = (
    *("output_dir", "run_name", "logging_", "log_", "save_", "eval_", "do_", "push_to_hub", "hub_", "report_to"),
    *(
        "max_steps",
        "num_train_epochs",
        "learning_rate",
        "lr_",
        "warmup_",
        "adam_",
        "optim",
        "weight_decay",
        "max_grad_norm",
    ),
)
"""Beginnings of the names of options that do not change the values."""


class ReferenceCacheMixin:
    """Part of a trainer of TRL that precomputes log-probabilities; see `trainer.TrainerMixin`."""

    args: Any
    accelerator: Any
    model: Any

    @property
    def _precompute_model_hash(self) -> str | None:
        """Hash of all that the values depend on besides the rows; None for a trainer that precomputes nothing."""
        own = vars(self).get("_precompute_model_hash")
        if own is None:
            return None
        options = {name: value for name, value in self.args.to_dict().items() if not name.startswith(WITHOUT_EFFECT)}
        plan, config = self.accelerator.plan.model_dump(mode="json"), self.model.config.to_json_string()
        versions = {**library_versions(), "trl": version("trl")}
        text = json.dumps([own, options, plan, config, versions], sort_keys=True, default=str)
        return blake3(text.encode()).hexdigest()

    @_precompute_model_hash.setter
    def _precompute_model_hash(self, own: str | None) -> None:
        vars(self)["_precompute_model_hash"] = own
