"""Corpora as streams of raw token ids, with landmarks inserted when a window is read. Loads no torch."""

from landmark.experiment.data.evaluation_texts import Segment, TextSize, segments, text_size
from landmark.experiment.data.preparation import find, prepare
from landmark.experiment.data.sources import SPLITS
from landmark.experiment.data.stream import Corpus, Stream, open_corpus
from landmark.experiment.data.synthetic import SyntheticCorpus
from landmark.experiment.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "SPLITS",
    "Corpus",
    "Segment",
    "Stream",
    "SyntheticCorpus",
    "TextSize",
    "Tokenizer",
    "find",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "segments",
    "text_size",
]
