"""`Prepared`: what the launcher has prepared for the ranks, written to prepared.json of a run."""

import json
from dataclasses import asdict, dataclass, field

from blake3 import blake3

from weft.data.labels import Labels
from weft.data.shards import TokenSpan


@dataclass(frozen=True)
class Prepared:
    """Prepared tokens, ready to be memory-mapped by every rank."""

    train: tuple[TokenSpan, ...]
    """Token ranges of the train split; of records, their folder and the range of their indices."""
    held_out: tuple[TokenSpan, ...]
    """Token ranges of the held-out split; empty if data.held_out is 0."""
    tokenizer: str | None
    """Hugging Face folder of the tokenizer, processor or scheduler; None for source "tokens"."""
    vocab_size: int
    """Minimum vocabulary size of the model: largest token id + 1; 0 for records without text."""
    end_of_text: int | None
    """Id that ends each document; None for source "tokens"."""
    digest: str = ""
    """Digest of the input of the splits: the file of rows, or the source, the tokenizer and their settings."""
    labels: Labels | None = None
    """Labels of the records; None for records without labels."""
    generation: dict[str, int] = field(default_factory=dict)
    """Settings of generation of an encoder-decoder that its tokenizer decides; empty for other tasks."""
    fields: tuple[str, ...] = ()
    """Fields of the records; empty for tokens."""
    accepted: tuple[str, ...] = ()
    """Identities of other tokens; checkpoints trained on them may also be resumed."""

    @property
    def train_tokens(self) -> int:
        """Number of tokens of the train split."""
        return sum(span.last - span.first for span in self.train)

    @property
    def held_out_tokens(self) -> int:
        """Number of tokens of the held-out split."""
        return sum(span.last - span.first for span in self.held_out)

    @property
    def identity(self) -> str:
        """Digest of the tokens and their split, independent of file paths."""
        splits = [[(span.first, span.last) for span in spans] for spans in (self.train, self.held_out)]
        return blake3(json.dumps([self.digest, splits]).encode()).hexdigest()

    def to_json(self) -> str:
        """JSON text from which `from_json` restores an equal object."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Prepared":
        """Restore an object from the text of `to_json`."""
        fields = json.loads(text)
        if fields.get("labels") is not None:
            fields["labels"] = Labels.from_table(fields["labels"])
        splits = {name: tuple(TokenSpan(**span) for span in fields[name]) for name in ("train", "held_out")}
        names = {name: tuple(fields.get(name, ())) for name in ("fields", "accepted")}
        return cls(**{**fields, **splits, **names})
