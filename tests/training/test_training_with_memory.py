"""Training with a memory: the losses of reading, and gradients by finite differences."""

import pytest
import torch

from landmark.attention import Grouped, Scoring, Sinks
from landmark.attention.keys import Keys
from landmark.models.language_model import summed_loss
from landmark.utils.window_batch import WindowBatch
from tests.configurations import changed
from tests.memory.reading import new_memory
from tests.models.test_decoder import LANDMARK, LOOKING_BACK, tiny
from tests.pairs import all_pairs, name_of

CASES = all_pairs(
    {
        "pending": [0, 1, 4],  # tokens before the chunk in its block
        "length": [1, 2, 4, 5, 9],  # of the chunk: one normal token, with its landmark, a landmark alone, blocks
        "block_size": [1, 4],
        "k": [0, 2],
        "granularity": ["per_token_and_head", "per_token"],
        "backend": ["reference", "blockwise"],
        "keys": [(0.0, "token"), (0.5, "mean")],
        "alpha": [0.0, 0.5],
        "softcap": [None, 1.5],
        "sinks": [False, True],
        "second look": [None, 4],
    },
    lambda case: case["second look"] is None or case["granularity"] == "per_token_and_head",
)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_of_a_chunk_are_those_of_finite_differences(case):
    """Of its queries, keys and values, whatever its length; blocks in memory are constants."""
    before = 5 * (case["block_size"] + 1) + case["pending"] % (case["block_size"] + 1)
    texts = torch.randn(3, 1, 2, before + case["length"], 4, dtype=torch.float64)
    names = "k", "granularity", "backend"
    settings = {name: case[name] for name in names} | {"rerank": case["second look"], "keys": Keys(*case["keys"])}
    settings |= {"gate": Grouped(case["alpha"]), "scoring": Scoring(None, case["softcap"])}
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def read(q, k, v, sinks):
        memory, extra = new_memory(case["block_size"], **settings), Sinks(sinks) if case["sinks"] else None
        memory.has_gradient = True
        memory.attend(1, *texts[:, :, :, :before], extra)
        memory.commit()
        return memory.attend(1, q, k, v, extra)

    leaves = [x.clone().requires_grad_() for x in texts[:, :, :, before:]]
    assert torch.autograd.gradcheck(read, [*leaves, sinks], fast_mode=True)


def batch_of_chunks(length=37, chunk=11, k=2):
    tokens = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(4))
    return WindowBatch(tokens, tokens.roll(-1, 1), top_k=k, local=chunk)


MEAN = {"landmark_key": "mean", "landmark_bias": True, **LOOKING_BACK}


@pytest.mark.parametrize("options", [{}, MEAN], ids=["paper", "recipe"])
def test_the_losses_are_those_of_reading(options):
    """The memory has tensors without gradient only, so that each loss can go backward before the next one."""
    model, batch = tiny(changed(LANDMARK, **options)), batch_of_chunks()
    found, memory, read = [], model.new_memory(k=2), []
    for loss, _ in model.window_losses(batch):
        loss.backward()
        found.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        for chunk, targets in zip(batch.tokens.split(11, 1), batch.targets.split(11, 1), strict=True):
            read.append(summed_loss(model(chunk, memory=memory), targets, None)[0].item())
    assert found == pytest.approx(read, rel=1e-12)


@pytest.mark.parametrize("options", [{}, MEAN], ids=["paper", "recipe"])
def test_gradients_of_parameters(options):
    """Of the last chunk's loss, by finite differences: what earlier chunks left in the memory is a constant."""
    model, batch = tiny(changed(LANDMARK, **options)), batch_of_chunks()
    *earlier, last = batch.tokens.split(11, 1)
    read = model.new_memory(k=2)
    with torch.no_grad():
        for chunk in earlier:
            model(chunk, memory=read)

    def last_loss():
        memory = read.select_samples(torch.arange(2))
        memory.has_gradient = True
        return model.head(model.read(last, memory)).logsumexp(-1).sum()

    last_loss().backward()
    step = 1e-5
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        found = []
        for sign in (1, -2, 1):
            parameter.data += sign * step * direction
            found.append(last_loss().item())
        expected = (parameter.grad * direction).sum().item() if parameter.grad is not None else 0.0
        assert expected == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-5, abs=1e-6), name
