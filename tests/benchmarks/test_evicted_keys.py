"""The prompts that are read after keys were evicted, and the answers where none is: kvpress is not there."""

import json

import torch

from benchmarks import evicted_keys
from tests.huggingface.conftest import make_model, make_tokenizer


def test_prompts_know_where_their_question_begins(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    evicted_keys.write_prompts(str(tmp_path), tmp_path / "prompts.json", 700, 2)
    for prompt in json.loads((tmp_path / "prompts.json").read_text()):
        assert len(prompt["ids"]) <= 700
        assert tokenizer.decode(prompt["ids"][prompt["question"] :]).lstrip().startswith(evicted_keys.QUESTION)
        assert prompt["answer"] in tokenizer.decode(prompt["ids"])


def test_with_all_keys_the_answer_is_that_of_generate():
    model, tokenizer = make_model("gemma3"), make_tokenizer()
    ids = torch.arange(1, 91)[None] * 7 % 200
    found = model.generate(ids, max_new_tokens=evicted_keys.GENERATED, do_sample=False, eos_token_id=None)
    expected = tokenizer.decode(found[0, 90:].tolist())
    prompt = {"ids": ids[0].tolist(), "question": 80, "answer": expected}
    for within in (False, True):
        assert evicted_keys.answers(model, tokenizer, prompt, None, within) == (expected, True)
