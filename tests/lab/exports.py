"""Model folders as others publish them, and what an export of one has changed."""

import json
from pathlib import Path

GENERATION = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [2, 0], "pad_token_id": 3}
"""As others publish them: save_pretrained refuses a temperature without sampling once a value has changed."""
PUBLISHED = {
    "generation_config.json": json.dumps(GENERATION),
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "preprocessor_config.json": '{"size":  3}',
    "LICENSE.txt": "free",
    "configuration_own.py": "from .helper import x\n",
    "helper.py": "x = 1\n",
}
NOT_COPIED = {"README.md": "of other weights", ".env": "secret", "another.py": "", "training_args.bin": "pickle"}


def publish(folder: Path) -> None:
    """Put files around the weights of a saved model, and let its config.json be that of an older version."""
    for name, text in {**PUBLISHED, **NOT_COPIED}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    older = {"torch_dtype": config.pop("dtype"), "transformers_version": "4.44.0", "author's note": "é"}
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "them/elsewhere--modeling.Own"}
    (folder / "config.json").write_text(json.dumps({**config, **older, "auto_map": code}, ensure_ascii=False))


def differences(source: Path, export: Path) -> tuple[set[str], set[str]]:
    """Names of files that differ or that only one folder has, and keys of config.json that differ."""
    own, other = (
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (source, export)
    )
    tables = json.loads(own["config.json"]), json.loads(other["config.json"])
    keys = {key for key in tables[0].keys() | tables[1].keys() if tables[0].get(key) != tables[1].get(key)}
    return {name for name in own.keys() | other.keys() if own.get(name) != other.get(name)} - NOT_COPIED.keys(), keys
