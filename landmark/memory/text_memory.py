"""What every memory of a text does, whether its blocks have landmarks or not: the seam behind the caches of a model."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from landmark.attention import Scoring, Sinks

Place = str | torch.device | Callable[[int], torch.device]


class Piece(NamedTuple):
    """Tokens start … stop of a text, read together. prefill: whether none of them gets logits."""

    start: int
    stop: int
    prefill: bool


def equal_pieces(length: int, most: Callable[[], int]) -> Iterator[Piece]:
    """As many tokens at a time as are wanted: where a chunk ends decides what its queries see."""
    start = 0
    while start < length:
        stop = min(start + most(), length)
        yield Piece(start, stop, False)
        start = stop


class TokenKernels(Protocol):
    """What reads one token of a text by kernels, which a CUDA graph may hold."""

    def ready_for_token(self) -> tuple[int, ...]:
        """Get ready. Returns what the kernels depend on, of all that is not in the tensors."""
        ...

    def took_token(self) -> None:
        """Count the token that a CUDA graph has read in all layers."""
        ...


class TextMemory(Protocol):
    """Keys and values of a text in all layers with full attention.

    For each piece of a text: `begin`, `attend_in` in each layer, then `commit`, or `discard` after an error.

    is_rotated: whether keys and queries come with the positions that the model gives them; else the memory assigns
    positions. position: places committed, landmarks included; tokens_read: without them. settled: positions at the
    beginning that depend on the text alone, and not on what follows. ends: where texts end that were read alone. model:
    returns a string that identifies the model, without which a saved memory is not loaded.
    """

    is_rotated: bool
    model: Callable[[], str | None] | None
    position: int
    ends: tuple[int, ...]

    @property
    def settled(self) -> int: ...
    @property
    def tokens_read(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def stats(self) -> dict[str, Any]: ...

    def reset(self) -> None: ...

    def expect(self, tokens: int) -> None:
        """Make room for so many tokens more."""
        ...

    def pieces(self, length: int, kept: int, most: Callable[[], int], device: str) -> Iterator[Piece]:
        """Where the next `length` tokens are cut, of which the last `kept` get logits. most: tokens of a piece, asked
        before each; the memory takes fewer where it must.
        """
        ...

    def begin(self, prefill: bool) -> None:
        """The next piece begins. prefill: whether none of its tokens gets logits."""
        ...

    def attend_in(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Sinks | None) -> Tensor:
        """Attention (B, H, T, d) of a piece. q: (B, H, T, d), k, v: (B, H_kv, T, d), of a layer."""
        ...

    def commit(self) -> None: ...
    def discard(self) -> None: ...

    def settle(self, at: int | None = None) -> None:
        """Forget what is not settled, or what is behind an earlier position."""
        ...

    def takes_guesses(self, tokens: int, device: str) -> bool:
        """Whether so many tokens may come of which `forget` takes some back, and cost less than one by one."""
        ...

    def forget(self, tokens: int) -> None:
        """Take back the last tokens, which were guesses."""
        ...

    def token_kernels(self, device: torch.device, layers: int) -> TokenKernels | None:
        """What reads the next token on this device by kernels, once so many layers have read something; None: there are
        no kernels for it.
        """
        ...

    def append(self, other: Self, settled: int | None = None) -> None:
        """Let a text follow that another memory has read alone. settled: tokens of it that are (None: as it says).
        Raises UserError where it cannot follow; then nothing has changed.
        """
        ...

    def is_end(self, tokens: int, local: int) -> bool:
        """Whether the last piece, of so many tokens, ended where another text may go on. local: the usual tokens."""
        ...

    def fork_point(self, tokens: int) -> int:
        """The last place among the first `tokens` where a copy can begin without a mark; 0: none."""
        ...

    def mark(self) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """What `beginning` needs of the place that is reached."""
        ...

    @property
    def has_dropped(self) -> bool:
        """Whether blocks were dropped, so that no copy can begin at a mark."""
        ...

    def beginning(self, position: int, layers: Mapping[int, tuple[int, dict[str, Tensor]]]) -> Self:
        """A copy that has read the text up to this position, where `mark` returned `layers`."""
        ...

    def select_samples(self, samples: Tensor) -> Self:
        """A copy whose samples (n,) are these of the batch."""
        ...

    def save(self, folder: Path | str, others: Mapping[str, bytes] | None = None) -> None: ...
    def load(self, folder: Path | str, device: Place = "cpu") -> None: ...


class Observable(Protocol):
    """A memory that shows what each query chooses.

    position: as of `TextMemory`. width: positions of a block. visible_from: the first position that the next query sees
    without choosing its block. window: tokens before a query that it reads without choosing.
    """

    position: int
    window: int

    @property
    def width(self) -> int: ...
    @property
    def visible_from(self) -> int: ...

    def observe(self, local: int) -> int:
        """Get ready for an observer of every choice. Returns tokens to read at a time; local: those wanted."""
        ...
