"""What is kept between the chunks of a long input."""

from landmark.memory.memory import Memory
from landmark.memory.recurrent import RecurrentMemory
from landmark.memory.sinks import SinkMemory

__all__ = ["Memory", "RecurrentMemory", "SinkMemory"]
