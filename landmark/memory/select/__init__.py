"""Selectors: which blocks a query reads."""

from landmark.memory.select.faiss import Faiss
from landmark.memory.select.selector import Best, Given, MeanKeys, Newest, Random, SecondLook, Selector

__all__ = ["Best", "Faiss", "Given", "MeanKeys", "Newest", "Random", "SecondLook", "Selector"]
