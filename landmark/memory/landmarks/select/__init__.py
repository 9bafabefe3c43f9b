"""Selectors: which blocks a query reads."""

from landmark.memory.landmarks.select.faiss import Faiss
from landmark.memory.landmarks.select.selector import Best, Given, MeanKeys, Newest, Random, SecondLook, Selector

__all__ = ["Best", "Faiss", "Given", "MeanKeys", "Newest", "Random", "SecondLook", "Selector"]
