"""What is kept between the chunks of a long input."""

from landmark.memory.memory import Memory
from landmark.memory.recurrent import RecurrentMemory

__all__ = ["Memory", "RecurrentMemory"]
