"""Greedy continuation with a memory equals starting over for every token."""

import pytest
import torch

from landmark.memory import RecurrentMemory
from landmark.models import Decoder, DecoderConfig
from landmark.models.generation import continue_greedily


def decoder(kind):
    torch.manual_seed(0)
    config = DecoderConfig(kind, 32, num_layers=2, num_heads=2, head_dim=8, mlp_dim=16, landmark_id=30, block_size=5)
    model = Decoder(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # so that the most probable token depends on the text
    return model


def test_plain_transformer_equals_reading_all_at_once():
    model, prompts = decoder("transformer"), torch.randint(0, 30, (3, 23))
    ours = continue_greedily(model, prompts, 8, 23, RecurrentMemory(31))
    tokens = prompts
    for _ in range(8):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert (ours == tokens[:, 23:]).all()
    assert len(ours.unique()) > 2


@pytest.mark.parametrize("granularity", ["per_token_and_head", "per_head", "per_token"])
def test_landmark_equals_starting_over_with_the_same_chunks(granularity):
    model, prompts = decoder("landmark"), torch.randint(0, 30, (2, 38))
    settings = {"k": 2, "granularity": granularity}
    ours = continue_greedily(model, prompts, 9, 12, model.new_memory(**settings))
    generated = prompts[:, :0]
    for _ in range(9):
        memory = model.new_memory(**settings)
        chunks = [*prompts.split(12, 1), *generated.split(1, 1)]
        *_, logits = (model(chunk, memory=memory) for chunk in chunks if chunk.shape[1])
        generated = torch.cat([generated, logits[:, -1:].argmax(-1)], 1)
    assert (ours == generated).all()
    assert len(ours.unique()) > 2


def test_logits_after_the_last_token_alone():
    model, tokens = decoder("landmark"), torch.randint(0, 30, (2, 13))
    torch.testing.assert_close(model(tokens, last=True), model(tokens)[:, -1:])
