"""Selectors: which blocks a query reads."""

from landmark.memory.select.controls import Given, Newest, Random
from landmark.memory.select.faiss import Faiss
from landmark.memory.select.selector import Best, Selector
from landmark.memory.select.training_free import MeanKeys, SecondLook

__all__ = ["Best", "Faiss", "Given", "MeanKeys", "Newest", "Random", "SecondLook", "Selector"]
