"""Texts, memories and caches that `generate` is given: what is read is the user's text, or the call is refused."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import GenerationConfig

from landmark.huggingface import wrap
from landmark.utils.errors import UserError
from tests.huggingface.conftest import make_tokenizer, read

GREEDY = {"max_new_tokens": 5, "do_sample": False}


def test_prompts_that_end_with_padding_are_refused_by_name(wrapped, ids):
    """Their last column has no logits: token 0 would follow."""
    tokens = {"pad_token_id": 255, "eos_token_id": 254}
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with pytest.raises(UserError, match=r"attention_mask: text 1 ends with padding.*padding_side='left'"):
        wrapped.generate(ids, attention_mask=mask, max_new_tokens=1)
    padded = ids.masked_fill(mask == 0, 255)
    padded[mask == 1] %= 255
    with pytest.raises(UserError, match="text 1 ends with padding"):
        wrapped.generate(padded, max_new_tokens=2, **tokens)
    with pytest.raises(UserError, match="text 1 ends with padding"):
        wrapped(ids, attention_mask=mask, past_key_values=wrapped.new_memory(), logits_to_keep=2)


def test_a_text_that_goes_on_repeats_what_a_memory_has_read(wrapped, ids):
    """As in a conversation; only the new part is read. Anything else is refused, saying what to give."""
    memory = wrapped.new_memory()
    wrapped(ids, past_key_values=memory)
    assert torch.equal(memory.ids, ids)
    new = torch.full((2, 7), 9)
    for given in (new, ids[:, 7:], torch.cat([new, ids], 1)):
        with pytest.raises(UserError, match=r"the memory has read 30 tokens.*torch.cat\(\[memory.ids, new_ids\], 1\)"):
            wrapped.generate(given, past_key_values=memory, **GREEDY)
    with pytest.raises(UserError, match=r"nothing behind them: .*torch.cat\(\[memory.ids, new_ids\], 1\)"):
        wrapped.generate(ids, past_key_values=memory, **GREEDY)
    whole = torch.cat([memory.ids, new], 1)
    found = wrapped.generate(whole, past_key_values=memory, **GREEDY)
    assert torch.equal(found[:, :37], whole)
    assert torch.equal(memory.ids, found[:, :-1])
    assert memory.get_seq_length() == 30 + 7 + 5 - 1
    memory.reset()
    assert memory.get_seq_length() == 0
    assert torch.equal(wrapped.generate(ids, past_key_values=memory, **GREEDY), wrapped.generate(ids, **GREEDY))


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_chat_whose_answer_has_other_ids_is_not_read_on(wrapped, ids, is_padded):
    mask = torch.ones_like(ids)
    mask[0, :2] = 1 - is_padded
    memory = wrapped.new_memory()
    first = wrapped.generate(ids, attention_mask=mask, past_key_values=memory, **GREEDY)
    longer = torch.cat([first, ids[:, :6]], 1)
    mask = torch.cat([mask, torch.ones(2, 11, dtype=torch.int64)], 1)
    other = longer.clone()
    other[1, 31] = (other[1, 31] + 1) % 256
    with pytest.raises(UserError, match="text 1 differs from them at token 31"):
        wrapped.generate(other, attention_mask=mask, past_key_values=memory, **GREEDY)
    wrapped.generate(longer, attention_mask=mask, past_key_values=memory, **GREEDY)


@pytest.mark.parametrize("size", [7, 100])
def test_a_prompt_is_read_in_the_same_pieces_whatever_the_prefill(wrapped, ids, size):
    """Where k does not cover all, other pieces would give other tokens. The cache that a model names is replaced."""
    expected = wrapped.generate(ids, return_dict_in_generate=True, output_logits=True, **GREEDY)
    wrapped.generation_config.cache_implementation = "static"
    found = wrapped.generate(ids, prefill_chunk_size=size, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    memory = wrapped.new_memory()
    read(wrapped, ids[:, :18], memory)
    found = wrapped.generate(ids, past_key_values=memory, prefill_chunk_size=size, **GREEDY)
    assert torch.equal(found, expected.sequences)
    assert memory.get_seq_length() == 30 + 5 - 1


def test_another_autocast_between_chunks_is_refused(wrapped, ids):
    memory = wrapped.new_memory()
    with torch.no_grad():
        wrapped(ids[:, :11], past_key_values=memory)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(UserError, match=r"keys of torch.float32, this chunk of torch.bfloat16"),
        ):
            wrapped(ids[:, 11:], past_key_values=memory)
        same = wrapped.new_memory()
        wrapped(ids[:, :11], past_key_values=same)
        found, expected = (wrapped(ids[:, 11:], past_key_values=each).logits for each in (memory, same))
    assert torch.equal(found, expected)


def test_reading_in_training_mode_is_refused(wrapped, ids):
    """A loss on its logits would have no gradient of many parameters, and wrong ones of others. With gradient
    checkpointing transformers takes the cache away from layers with a sliding window."""
    expected = wrapped.generate(ids, **GREEDY)
    wrapped.train()
    with pytest.raises(UserError, match=r"training mode.*LandmarkCollator.*model.eval\(\)"):
        wrapped(ids, past_key_values=wrapped.new_memory())
    assert wrapped.generate(ids, max_new_tokens=2).shape == (2, 32)
    wrapped.gradient_checkpointing_enable()
    with pytest.raises(UserError, match="gradient checkpointing in training mode"):
        wrapped.generate(ids, **GREEDY)
    assert torch.equal(wrapped.eval().generate(ids, **GREEDY), expected)
    assert not wrapped(ids, past_key_values=wrapped.new_memory()).logits.requires_grad


QUANTIZED = GenerationConfig(cache_implementation="quantized", max_new_tokens=3)
PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


def mask_of(*shape):
    return torch.ones(*shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, ids: model.generate(ids, prompt_lookup_num_tokens=3), "assisted generation.*cannot go back"),
        (lambda model, ids: model.generate(ids, penalty_alpha=0.6, top_k=4), "contrastive search: .*or beam search$"),
        (lambda model, ids: model.generate(ids, use_cache=False), "use_cache"),
        (lambda model, ids: model.generate(ids, guidance_scale=2.0), "guidance_scale"),
        (lambda model, ids: model.generate(ids[:, :0]), "the prompt has no text"),
        (lambda model, ids: model.generate(ids.clamp(max=0) + 257), "hold landmarks .* leave them out"),
        (lambda model, ids: model.generate(ids, cache_implementation="static"), "static: the cache is a landmark"),
        (lambda model, ids: model.generate(ids, QUANTIZED), "cache_implementation=quantized: the cache is a landmark"),
        (lambda model, ids: model.generate_batch([[1, 2, 3]]), "paged cache holds no landmark memory"),
        (lambda model, ids: model.init_continuous_batching(), "paged cache holds no landmark memory"),
        (lambda model, ids: model.continuous_batching_context_manager(), "paged cache holds no landmark memory"),
        (lambda model, ids: model(ids, cu_seqlens=torch.tensor([0, 10, 30])), "cu_seqlens"),
        (lambda model, ids: wrap(get_peft_model(model, LoraConfig()), make_tokenizer()), r"wrap\(model.get_base_model"),
        (lambda model, ids: get_peft_model(model, PREFIX).generate(input_ids=ids), "prefix tuning puts keys before"),
    ],
)
def test_calls_that_lose_the_memory_are_refused(llama, ids, call, said):
    with pytest.raises(UserError, match=said):
        call(llama, ids)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": mask_of(2, 0)}, "there is no text to read"),
        ({"labels": mask_of(2, 30)}, "labels"),
        ({"logits_to_keep": torch.tensor([0])}, "logits_to_keep"),
        ({"logits_to_keep": -1}, "logits_to_keep"),
        ({"position_ids": mask_of(2, 30)}, "position_ids"),
        ({"output_attentions": True}, "output_attentions"),
        ({"inputs_embeds": torch.zeros(2, 30, 32)}, "inputs_embeds"),
        ({"attention_mask": mask_of(2, 7)}, "attention_mask"),
        ({"attention_mask": 0 * mask_of(2, 30)}, "nothing but padding"),
        ({"cu_seqlens": torch.tensor([0, 10, 30])}, "cu_seqlens"),
        ({"local": 0}, "local=0"),
    ],
)
def test_arguments_that_a_memory_does_not_have_are_refused(llama, ids, given, said):
    memory = llama.new_memory()
    with pytest.raises(UserError, match=said):
        llama(**{"input_ids": ids, **given}, past_key_values=memory)
    assert memory.get_seq_length() == 0
