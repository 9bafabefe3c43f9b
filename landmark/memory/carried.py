"""What short convolutions need of a text between its chunks: the hidden states of its last places."""

from __future__ import annotations

from torch import Tensor


class CarriedStates:
    """Hidden states (B, n, channels) by the name of a convolution, landmarks included.

    What a chunk leaves is used from the next `commit` on.
    """

    def __init__(self, states: dict[str, Tensor] | None = None):
        self.states, self._next = states or {}, {}

    def take(self, name: str) -> Tensor | None:
        """The states before the present chunk; None: it begins a text."""
        return self.states.get(name)

    def keep(self, name: str, states: Tensor) -> None:
        """The last states of the present chunk."""
        self._next[name] = states

    def commit(self) -> None:
        """The chunk is part of the text."""
        self.states |= self._next
        self._next = {}

    def discard(self) -> None:
        """Forget the chunk."""
        self._next = {}

    def select(self, samples: Tensor) -> CarriedStates:
        """Those of samples (n,) of the batch."""
        return CarriedStates({name: x.index_select(0, samples.to(x.device)) for name, x in self.states.items()})
