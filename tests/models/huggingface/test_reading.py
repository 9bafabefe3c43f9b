"""Texts, memories and caches that `generate` is given: what is read is the user's text, or the call is refused."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import DynamicCache, GenerationConfig

from landmark.attention.layout import insert_landmarks
from landmark.models.huggingface import attention, unwrap, wrap
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import BLOCK, FREE, fail_at, make_tokenizer, read, wrapped_model

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


def test_a_window_of_the_text_alone_is_what_its_mask_says(ids, tokenizer, monkeypatch):
    """Where the text of a layer with a sliding window is read apart from its landmarks, which is faster in bfloat16."""
    wrapped, calls = wrapped_model("gemma3", tokenizer).double(), []
    expected = read(wrapped, ids, parts=13)

    def in_window(q, k, v, *, window, scale):
        calls.append(q.shape[2])
        distance = k.shape[2] - q.shape[2] + torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return ((q @ k.mT * scale).masked_fill((distance < 0) | (distance >= window), -torch.inf)).softmax(-1) @ v

    monkeypatch.setattr(attention, "window_attention", in_window)
    monkeypatch.setattr(attention, "has_products", lambda q, k, v: True)
    torch.testing.assert_close(read(wrapped, ids, parts=13), expected, rtol=0, atol=1e-10)
    assert calls == [9, 4, 9, 4, 4]


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


def test_sampling_gives_several_answers_and_no_landmark_is_returned_streamed_or_counted(llama, ids):
    torch.manual_seed(0)
    found = llama.generate(ids, max_new_tokens=6, do_sample=True, num_return_sequences=3)
    assert torch.equal(found[:, :30], ids.repeat_interleave(3, 0))
    assert len({tuple(row) for row in found.tolist()}) > 2
    first = llama.generate(ids, max_new_tokens=1, do_sample=False)[:, -1].tolist()  # a user's own processor stays
    found = llama.generate(ids, max_new_tokens=1, do_sample=False, suppress_tokens=first)[:, -1].tolist()
    assert not {*first, llama.landmarks.token} & {*found}
    # Even a model that wants to say nothing else.
    with torch.no_grad():
        llama.get_output_embeddings().weight[llama.landmarks.token] *= 100
    ids_streamed = []
    streamer = SimpleNamespace(put=lambda value: ids_streamed.append(value.flatten()), end=lambda: None)
    found = llama.generate(ids[:1], max_new_tokens=13, do_sample=False, streamer=streamer)
    assert found.shape == (1, 43)
    assert torch.equal(torch.cat(ids_streamed), found[0])
    assert not bool((found == llama.landmarks.token).any())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_the_score_of_a_beam_is_that_of_its_text(family, ids, tokenizer):
    """Beams are reordered with their memory: the score of each is that of its text, read token by token."""
    model = wrapped_model(family, tokenizer).double()
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    found = model.generate(ids, return_dict_in_generate=True, output_scores=True, **settings)
    assert found.sequences.shape == (4, 36)
    for text, score in zip(found.sequences, found.sequences_scores, strict=True):
        memory = model.new_memory()
        prompt = model(text[None, :30], past_key_values=memory, logits_to_keep=1).logits
        answer = [model(token.view(1, 1), past_key_values=memory).logits for token in text[30:-1]]
        logits = torch.cat([prompt, *answer], 1)[0]  # transformers takes the softmax before it rules out tokens
        losses = logits.log_softmax(-1).gather(1, text[30:, None])
        torch.testing.assert_close(losses.sum() / 6, score.double(), rtol=0, atol=1e-5)
    assert bool((text != model.landmarks.token).all())


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
@pytest.mark.parametrize("count", [0, 18])
def test_beams_and_several_answers_go_on_from_a_copy_of_a_memory(wrapped, ids, settings, count):
    """Which stays as it was, an empty one too."""
    memory, settings = wrapped.new_memory(), {"max_new_tokens": 6, "do_sample": False, **settings}
    if count:
        read(wrapped, ids[:, :count], memory)
    torch.manual_seed(0)
    found = wrapped.generate(ids, past_key_values=memory, **settings)
    assert memory.get_seq_length() == count
    assert memory.batch_size == (2 if count else 0)
    torch.manual_seed(0)
    assert torch.equal(found, wrapped.generate(ids, **settings))


def test_generates_without_a_memory_on_request(wrapped, ids):
    """With a cache of transformers it is the original model, except that it never says the landmark."""
    plain = unwrap(copy.deepcopy(wrapped))
    settings = {"max_new_tokens": 9, "do_sample": False}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(ids)
        found = wrapped.generate(ids, past_key_values=DynamicCache(), **settings)
    assert torch.equal(found, plain.generate(ids, suppress_tokens=[wrapped.landmarks.token], **settings))
    assert not torch.equal(wrapped(ids).logits, read(wrapped, ids))


@torch.no_grad()
def test_hidden_states_and_tuples_are_those_of_the_text_which_takes_no_more_memory_than_its_blocks(llama, ids):
    memory, places = llama.new_memory(), torch.arange(30).expand(2, -1)
    found = llama(ids, past_key_values=memory, position_ids=places, output_hidden_states=True)
    llama(ids[:, :4], past_key_values=memory, position_ids=places[:, :4] + 30)  # the text's own positions may be given
    assert len(found.hidden_states) == 4
    assert torch.equal(llama.lm_head(found.hidden_states[-1]), found.logits)
    logits, memory, states = llama(
        ids, past_key_values=llama.new_memory(), output_hidden_states=True, return_dict=False
    )
    assert torch.equal(logits, found.logits)
    assert memory.get_seq_length() == 30
    assert all(torch.equal(a, b) for a, b in zip(states, found.hidden_states, strict=True))
    window, _ = insert_landmarks(ids, 0, BLOCK, llama.landmarks.token)
    assert isinstance(llama(window, phase=torch.zeros(2, dtype=torch.int64), return_dict=False), tuple)
    # Beside a plain model's cache, of one key and one value a token, there is a landmark's key for each block.
    per_key = 3 * 2 * 16 * 4  # layers, heads of keys, channels, bytes
    for memory, blocks in ((llama.new_memory(), 60 // BLOCK), (llama.new_memory(max_blocks=3), 3)):
        llama(torch.randint(0, 256, (1, 60)), past_key_values=memory)
        assert memory.stats["blocks_kept"] == blocks
        assert memory.stats["bytes_kept"] == blocks * (2 * BLOCK + 1) * per_key


@torch.no_grad()
def test_reads_under_autocast(wrapped, ids):
    """Rotary positions make queries and keys float32 there, values stay in half precision."""
    phase = torch.zeros(len(ids), dtype=torch.int64)
    exact = wrapped(ids, past_key_values=wrapped.new_memory()).logits
    with torch.autocast("cpu", torch.bfloat16):
        window, _ = insert_landmarks(ids, 0, BLOCK, wrapped.landmarks.token)
        assert wrapped(window, phase=phase).logits.isfinite().all()
        ours = wrapped(ids, past_key_values=wrapped.new_memory()).logits
    assert (ours - exact).abs().median() < 0.05  # some query may choose another block


@pytest.mark.parametrize(
    ("family", "mapping", "tier"),
    [
        *(("gemma3", mapping, tier) for mapping in (None, "auto") for tier in ("device", "cpu", "disk")),
        *(("llama", mapping, "disk") for mapping in (None, "auto", "stingy")),
    ],
)
def test_where_blocks_are_stored_and_what_is_saved_make_no_difference(family, mapping, tier, ids, tokenizer, tmp_path):
    """With landmarks, and without by each mapping; the ids are saved too, and a memory that is reordered."""
    free = FREE | {"memory": FREE["memory"] | {"mapping": mapping}}
    model = wrapped_model(family, tokenizer, **(free if mapping else {}))
    here, there, again = model.new_memory(), model.new_memory(tier=tier), model.new_memory(tier=tier)
    assert torch.equal(read(model, ids, there), read(model, ids, here))
    there.save(tmp_path / "kept")
    again.load(tmp_path / "kept")
    assert torch.equal(again.ids, ids)
    assert torch.equal(read(model, ids, again), read(model, ids, here))
    order, expected = torch.tensor([1, 1, 0]), model.new_memory()
    there.reorder_cache(order)
    read(model, ids[order], expected)
    torch.testing.assert_close(read(model, ids[order, :9], there), read(model, ids[order, :9], expected))


@torch.no_grad()
def test_a_saved_memory_that_is_not_whole_is_refused(wrapped, ids, tmp_path):
    read(wrapped, ids, memory := wrapped.new_memory())
    memory.save(tmp_path / "kept")
    memory.memory.save(tmp_path / "memory")
    with pytest.raises(UserError, match="save the cache, not its memory"):
        wrapped.new_memory().load(tmp_path / "memory")
    (tmp_path / "kept" / "windows.safetensors").unlink()
    with pytest.raises(UserError, match=r"windows\.safetensors does not exist: save the memory again"):
        wrapped.new_memory().load(tmp_path / "kept")


@torch.no_grad()
def test_a_chunk_that_fails_leaves_the_memory_as_it_was(ids, tokenizer):
    model = wrapped_model("gemma3", tokenizer)
    memory, same = model.new_memory(), model.new_memory()
    for each in (memory, same):
        model(ids, past_key_values=each)
    hook = fail_at(model, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, :7], past_key_values=memory)
    hook.remove()
    found, expected = (model(ids[:, :7], past_key_values=each).logits for each in (memory, same))
    assert torch.equal(found, expected)
