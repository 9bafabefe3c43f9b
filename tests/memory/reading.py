"""What tests of memories share: texts of random numbers, and reading them in chunks."""

import torch

from landmark.memory.landmarks.memory import memory_of
from landmark.memory.landmarks.settings import MemorySettings


def new_memory(block_size=3, **given):
    """A memory by flat settings, and objects beside them."""
    settings = {name: given.pop(name) for name in list(given) if name in MemorySettings.__dataclass_fields__}
    return memory_of(block_size, MemorySettings(**settings), **given)


def feed(memory, q, k, v, chunks, layer=1, extra=None):
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        given = () if extra is None else (extra,)
        outs.append(memory.attend(layer, q[:, :, part], k[:, :, part], v[:, :, part], *given))
        memory.commit()
        start += size
    return torch.cat(outs, 2)


def texts(length, heads=(4, 2), batch=2, dim=4, dtype=torch.float32, seed=0):
    """Queries, keys, values and the key of a context miss token."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads[0], length, dim, generator=generator)
    k, v = torch.randn(2, batch, heads[1], length, dim, generator=generator)
    return *(x.to(dtype) for x in (q, k, v)), torch.randn(heads[1], dim, generator=generator).to(dtype)
