"""The tasks that make their samples, by name."""

from typing import TYPE_CHECKING

from landmark.data.key_value import KeyValue
from landmark.data.passkey import Passkey
from landmark.data.synthetic import SyntheticCorpus
from landmark.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from landmark.config.schema import DataConfig


def synthetic_corpus(data: "DataConfig", tokenizer: Tokenizer) -> SyntheticCorpus | None:
    """The task that `data.name` names; None where that is a corpus."""
    if data.name == "passkey":
        return SyntheticCorpus(Passkey(data.needles, data.dense, data.answer_weight), tokenizer)
    if data.name == "key_value":
        return SyntheticCorpus(KeyValue(data.answer_weight), tokenizer)
    return None
