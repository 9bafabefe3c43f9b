"""Corpora as streams of raw token ids, with landmarks as a view over them. Importing this loads no torch."""

from landmark.data.corpora import SPLITS
from landmark.data.preparation import find, prepare
from landmark.data.segments import Segment, segments
from landmark.data.stream import Corpus, Stream, open_corpus
from landmark.data.synthetic import SyntheticCorpus
from landmark.data.tasks import synthetic_corpus
from landmark.data.text import TextSize, text_size
from landmark.data.tokenizers import Tokenizer, load_tokenizer

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
    "synthetic_corpus",
    "text_size",
]
