"""A memory over several processes gives what one process gives, in float64; so does a training window."""

from typing import Any

import pytest
import torch

from landmark.attention import Window, landmark_attention
from landmark.attention.keys import Keys
from landmark.extensions.ranks import MemoryOverRanks, attention_over_ranks
from landmark.memory import Memory
from landmark.memory.positions import TruePositions
from landmark.memory.select import Best
from landmark.memory.settings import GRANULARITIES
from landmark.memory.store import Store
from landmark.models import Decoder, DecoderConfig
from landmark.models.config import Landmarks
from landmark.utils.errors import UserError
from landmark.utils.ranks import Ranks
from tests.together import together

EXACT = {"rtol": 0, "atol": 1e-12}
CASES: tuple[dict[str, Any], ...] = (
    *({"granularity": granularity} for granularity in GRANULARITIES),
    {"positions": TruePositions()},
    {"keys": Keys(landmark="mean"), "tied": ()},
)


def join() -> Ranks:
    torch.distributed.init_process_group("gloo")
    return Ranks()


def check_memory() -> None:
    ranks = join()
    for case in CASES:
        one = Memory(
            3, 2, select=Best(case.get("granularity", "per_token_and_head"), case.get("tied", (0,))), **of(case)
        )
        shared = MemoryOverRanks(3, ranks, 2, granularity=case.get("granularity", "per_token_and_head"), **of(case))
        generator = torch.Generator().manual_seed(0)
        for length in (6, 1, 9, 30, 1, 1, 17):  # the first chunks have fewer blocks than there are processes
            for layer in range(2):
                q, k, v = (torch.randn(2, h, length, 4, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
                torch.testing.assert_close(shared.attend(layer, q, k, v), one.attend(layer, q, k, v), **EXACT)
            one.commit()
            shared.commit()
        assert shared.stats["blocks_kept"] == one.stats["blocks_kept"] == 16
        assert len(shared.layers[0].store.own) == 16 // ranks.size
    with pytest.raises(UserError, match="memory.blocks=9: a memory over several processes drops none"):
        MemoryOverRanks(3, ranks, store=Store(9))
    check_model(ranks)
    check_window(ranks)


def of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("keys", "positions") if name in case}


def check_model(ranks: Ranks) -> None:
    """A decoder with a context miss token, some of whose lookups are dropped."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(40, 2, 2, 8, 32, landmarks=Landmarks(39, 3, cmt=True))).double()
    one = model.new_memory(k=2, cutoff=0.25)
    shared = MemoryOverRanks(3, ranks, 2, cutoff=0.25, keys=model.keys)
    for chunk in torch.randint(39, (1, 60)).split(12, 1):
        torch.testing.assert_close(model(chunk, memory=shared), model(chunk, memory=one), **EXACT)
    assert shared.stats["drop_rate"] == one.stats["drop_rate"]


def check_window(ranks: Ranks) -> None:
    """Outputs and gradients, with windows of several phases, and the bytes that are sent."""
    length = 24
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, length, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
    q, k, v, wanted = (x.requires_grad_() for x in whole)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return landmark_attention(q, k, v, Window(5, torch.tensor([0, 3])))[0]

    expected = attend(q, k, v)
    gradients = torch.autograd.grad((expected * wanted).sum(), (q, k, v))
    part = slice(ranks.rank * length // ranks.size, (ranks.rank + 1) * length // ranks.size)
    own = [x[:, :, part].detach().requires_grad_() for x in (q, k, v)]
    sent = ranks.sent
    out = attention_over_ranks(attend, *own, ranks)
    torch.testing.assert_close(out, expected[:, :, part], **EXACT)
    assert ranks.sent - sent == (ranks.size - 1) / ranks.size * 4 * out.nbytes
    (out * wanted[:, :, part]).sum().backward()
    for x, gradient in zip(own, gradients, strict=True):
        torch.testing.assert_close(x.grad, gradient[:, :, part], **EXACT)
    if ranks.size > 2:
        with pytest.raises(ValueError, match="2 heads cannot be shared evenly by 4 processes"):
            attention_over_ranks(attend, *(x[:, :2] for x in own), ranks)


def check_many_blocks() -> None:
    """The last two chunks retrieve from all 4096 blocks, a quarter of them in each process."""
    ranks, size, chunks = join(), 1 << 10, 1 << 6
    one, shared = Memory(15, 2), MemoryOverRanks(15, ranks, 2)
    generator = torch.Generator().manual_seed(0)
    retrieved: list[torch.Tensor] = []
    one.observer = lambda seen: retrieved.append(seen.ages)
    for number in range(chunks):
        one.k = shared.k = 2 if number >= chunks - 2 else 0
        q, k, v = (torch.randn(1, 1, size, 4, dtype=torch.float64, generator=generator) for _ in range(3))
        out = shared.attend(1, q, k, v)
        if ranks.rank == 0:
            torch.testing.assert_close(out, one.attend(1, q, k, v), **EXACT)
            one.commit()
        shared.commit()
    assert shared.position == 1 << 16
    assert len(shared.layers[1].store.own) == 1 << 10
    if ranks.rank == 0:
        assert sum(int((ages > 2048).sum()) for ages in retrieved) > 1000, "few queries retrieve what is far"


def test_four_thousand_blocks_over_four_processes():
    together(4, check_many_blocks)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_are_as_one(processes):
    together(processes, check_memory)
