"""A memory over several processes gives what one process gives, in float64; so does a training window."""

import functools

import pytest
import torch
from landmark.attention.context_parallel import attention_over_ranks
from landmark.memory.over_ranks import MemoryOverRanks

from landmark.attention import landmark_attention
from landmark.memory import Memory
from landmark.models import Decoder, DecoderConfig
from landmark.utils.errors import UserError
from landmark.utils.ranks import Ranks
from tests.together import together

EXACT = {"rtol": 0, "atol": 1e-12}
CASES = (
    {"granularity": "per_token_and_head"},
    {"granularity": "per_head"},
    {"granularity": "per_token"},
    {"granularity": "per_token_and_group"},
    {"granularity": "per_token_and_head", "mapping": "true"},
    {"granularity": "per_token_and_head", "landmark_key": "mean", "tie_layers": ()},
)


def join() -> Ranks:
    torch.distributed.init_process_group("gloo")
    return Ranks()


def check_memory() -> None:
    ranks = join()
    for settings in CASES:
        one = Memory(3, k=2, **settings)
        shared = MemoryOverRanks(3, ranks, k=2, **settings)
        generator = torch.Generator().manual_seed(0)
        for length in (6, 1, 9, 30, 1, 1, 17):  # the first chunks have fewer blocks than there are processes
            for layer in range(2):
                q, k, v = (torch.randn(2, h, length, 4, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
                torch.testing.assert_close(shared.attend(layer, q, k, v), one.attend(layer, q, k, v), **EXACT)
            one.commit()
            shared.commit()
        assert shared.stats["blocks_kept"] == one.stats["blocks_kept"] == 16
        assert len(shared.layers[0].store.own) == 16 // ranks.size
    with pytest.raises(UserError, match=r"scorer=recent: a memory over several processes has only scorer=landmark"):
        MemoryOverRanks(3, ranks, scorer="recent")
    check_model(ranks)


def check_model(ranks: Ranks) -> None:
    """A decoder with a context miss token, some of whose lookups are dropped."""
    torch.manual_seed(0)
    shape = DecoderConfig("landmark", 40, 2, 2, 8, 32, landmark_id=39, block_size=3, cmt=True)
    model = Decoder(shape).double()
    one = model.new_memory(k=2, cutoff=0.25)
    shared = MemoryOverRanks(3, ranks, k=2, cutoff=0.25, **model.key_settings())
    for chunk in torch.randint(39, (1, 60)).split(12, 1):
        torch.testing.assert_close(model(chunk, memory=shared), model(chunk, memory=one), **EXACT)
    assert shared.stats["drop_rate"] == one.stats["drop_rate"]


def check_window() -> None:
    """Outputs and gradients, with windows of several phases, and the bytes that are sent."""
    ranks, length = join(), 24
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, length, 4, dtype=torch.float64, generator=generator) for _ in range(4)]
    q, k, v, wanted = (x.requires_grad_() for x in whole)
    attend = functools.partial(landmark_attention, block_size=5, phase=torch.tensor([0, 3]))
    expected = attend(q, k, v)
    gradients = torch.autograd.grad((expected * wanted).sum(), (q, k, v))
    part = slice(ranks.rank * length // ranks.size, (ranks.rank + 1) * length // ranks.size)
    own = [x[:, :, part].detach().requires_grad_() for x in (q, k, v)]
    out = attention_over_ranks(attend, *own, ranks)
    torch.testing.assert_close(out, expected[:, :, part], **EXACT)
    assert ranks.sent == (ranks.size - 1) / ranks.size * 4 * out.nbytes
    (out * wanted[:, :, part]).sum().backward()
    for x, gradient in zip(own, gradients, strict=True):
        torch.testing.assert_close(x.grad, gradient[:, :, part], **EXACT)
    if ranks.size > 2:
        with pytest.raises(ValueError, match="2 heads cannot be shared evenly by 4 processes"):
            attention_over_ranks(attend, *(x[:, :2] for x in own), ranks)


def check_a_million_tokens() -> None:
    """The last two chunks retrieve from all 4096 blocks, a quarter of them in each process."""
    ranks, size, chunks = join(), 1 << 10, 1 << 10
    one, shared = Memory(255, k=2), MemoryOverRanks(255, ranks, k=2)
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
    assert shared.position == 1 << 20
    assert len(shared.layers[1].store.own) == 1 << 10
    if ranks.rank == 0:
        assert sum(int((ages > 2048).sum()) for ages in retrieved) > 1000, "few queries retrieve what is far"


def test_a_million_tokens_over_four_processes():
    together(4, check_a_million_tokens)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("check", [check_memory, check_window])
def test_processes_together_are_as_one(processes, check):
    together(processes, check)
