"""What runs and rows are made from: tokenizers, corpora, weights to start from. Each is opened once."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from landmark.config import Config
from landmark.config.schema import DataConfig

if TYPE_CHECKING:
    from landmark.data import Corpus, SyntheticCorpus, Tokenizer


class Inputs:
    """Opens the tokenizer and the corpus that a configuration names, and keeps them open for the next one."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[Any, ...], Tokenizer] = {}
        self._corpora: dict[tuple[Any, ...], Corpus | SyntheticCorpus] = {}
        self._weights: dict[str, str] = {}

    def tokenizer(self, config: Config) -> "Tokenizer":
        """Raises UserError where the ranks file is missing or has the wrong hash."""
        key = (config.tokenizer.name, config.tokenizer.file, config.tokenizer.vocab_size)
        if key not in self._tokenizers:
            from landmark.data import load_tokenizer

            name, file, vocab_size = key
            if name == "pretrained" and str(file).endswith(".gguf"):
                from landmark.models import pretrained

                file = str(pretrained.folder_of(str(file)))
            self._tokenizers[key] = load_tokenizer(name, file, vocab_size)
        return self._tokenizers[key]

    def corpus(self, config: Config) -> "Corpus | SyntheticCorpus":
        """The corpus, prepared first where it is not. Raises UserError where it is missing, empty or damaged."""
        if (corpus := self.prepared_corpus(config)) is None:
            from landmark.data import prepare

            corpus = prepare(*self._source(config), **_options(config.data), workers=config.data.workers)
            self._corpora[self._key(config)] = corpus
        return corpus

    def prepared_corpus(self, config: Config) -> "Corpus | SyntheticCorpus | None":
        """The corpus where it is prepared, else None. Raises UserError where it is damaged."""
        key = self._key(config)
        if key not in self._corpora:
            from landmark.data import find, synthetic_corpus

            corpus = synthetic_corpus(config.data, self.tokenizer(config))
            if corpus is None:
                corpus = find(*self._source(config), **_options(config.data))
            if corpus is None:
                return None
            self._corpora[key] = corpus
        return self._corpora[key]

    def weights_sha256(self, name: str) -> str:
        """SHA-256 of the weights of a model of transformers, by its folder or its name on the hub."""
        if name not in self._weights:
            from landmark.models.pretrained import weights_sha256

            self._weights[name] = weights_sha256(name)
        return self._weights[name]

    def _source(self, config: Config) -> "tuple[str, Tokenizer, str]":
        return config.data.name, self.tokenizer(config), config.data.cache

    def _key(self, config: Config) -> tuple[Any, ...]:
        data, tokenizer = config.data, config.tokenizer
        settings = tuple((item.name, str(getattr(data, item.name))) for item in fields(data))
        return *settings, tokenizer.name, tokenizer.file, tokenizer.vocab_size


def _options(data: DataConfig) -> dict[str, Any]:
    own = {"configs": data.configs, "bad_lines": data.bad_lines} if data.name == "arxiv_math" else {}
    return {"path": data.path, "options": own, "max_documents": data.max_documents}
