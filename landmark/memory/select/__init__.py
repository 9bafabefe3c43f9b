"""Selectors: which blocks a query reads, a file each. Some change what another one is asked, and so nest."""

from landmark.memory.select.best import Best
from landmark.memory.select.cutoff import Cutoff
from landmark.memory.select.faiss import Faiss
from landmark.memory.select.given import Given
from landmark.memory.select.mean_keys import MeanKeys
from landmark.memory.select.newest import Newest
from landmark.memory.select.random import Random
from landmark.memory.select.second_look import SecondLook
from landmark.memory.select.selector import Around, Choice, Selector
from landmark.memory.select.with_first import WithFirst
from landmark.memory.select.with_newest import WithNewest

__all__ = [
    "Around",
    "Best",
    "Choice",
    "Cutoff",
    "Faiss",
    "Given",
    "MeanKeys",
    "Newest",
    "Random",
    "SecondLook",
    "Selector",
    "WithFirst",
    "WithNewest",
]
