"""A model's own template: what it may be told, that it ends, and the special tokens and channels of known families."""

import threading
import time
from datetime import datetime
from functools import partial

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from landmark.memory.saving import HASHES
from landmark.models.huggingface import wrap
from landmark.models.huggingface.landmark_cache import saved_windows
from landmark.reading import templates
from landmark.reading.answer import Answer
from landmark.reading.answering import Answering
from landmark.reading.chats import Chats
from landmark.reading.session import Prompt, Session
from landmark.utils.errors import UserError
from tests.models.huggingface.conftest import make_model, make_tokenizer
from tests.reading.test_chats import CHATML, chat_tokenizer, said, user
from tests.saved import hash_again

HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.role == 'assistant' %}<|channel|>final"
    "{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{#- earlier analysis is dropped: <|channel|>analysis<|message|> -#}<|start|>assistant"
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chat_template": "{{ 1 }}"}, "has no setting chat_template, only: enable_thinking"),
        ({"messages": []}, "has no setting messages"),
        ({"tokenize": True}, "has no setting tokenize"),
        ({"bos_token": "x"}, "has no setting bos_token"),
        ({"enable_thinking": ["x"]}, "enable_thinking must be a text, a number, true or false"),
        ({"enable_thinking": float("nan")}, "enable_thinking must be a text, a number, true or false"),
    ],
)
def test_only_settings_that_the_template_reads_reach_it(given, said):
    with pytest.raises(UserError, match=said):
        Chats(chat_tokenizer(CHATML)).ids([user("Who?")], settings=given)
    with pytest.raises(UserError, match="has no setting"):
        Chats(make_tokenizer()).ids([user("Who?")], settings=dict.fromkeys(given, "x"))


LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% set c = a %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("template", [LOOPS, CALLS])
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    before = set(threading.enumerate())
    with pytest.raises(UserError, match="was not done with them in 0.3 s"):
        Chats(chat_tokenizer(template)).ids([user("Who?")])
    until = time.monotonic() + 60
    while set(threading.enumerate()) - before:
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.05)


def test_a_template_that_fails_or_gives_too_much_is_refused(monkeypatch):
    with pytest.raises(UserError, match="refuses them .division by zero"):
        Chats(chat_tokenizer("{{ 1 / 0 }}")).ids([user("Who?")])
    monkeypatch.setattr(templates, "CHARACTERS", 100)
    with pytest.raises(UserError, match="makes more than 100 characters"):
        Chats(chat_tokenizer(CHATML)).ids([user("Who? " * 30)])


@pytest.mark.parametrize("template", [CHATML, None, CHATML.replace("message.content", "(message.content | trim)")])
def test_the_last_message_goes_on(template):
    chats, chat = Chats(chat_tokenizer(template)), [user("Who?"), said("A heron")]
    begun = chats.tokenizer.decode(chats.ids(chat, goes_on=True))
    assert begun.endswith("A heron")
    assert begun.startswith(chats.tokenizer.decode(chats.ids(chat[:1])).removesuffix("assistant:"))
    with pytest.raises(UserError, match="leaves the end of the last message out"):
        Chats(chat_tokenizer("{{ messages[0].content }}")).ids(chat, goes_on=True)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_special_tokens_name_changes_no_other_ids_of_its_message(pieces):
    """Phi-3's tokens take the line end behind them; a tokenizer of pieces puts ▁ before a text, and nowhere else."""
    tokenizer = chat_tokenizer("{% for m in messages %}<|user|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n")
    tokenizer.add_tokens([AddedToken(f"<|{x}|>", rstrip=True, special=True) for x in ("user", "end", "assistant")])
    if pieces:
        letters = tokenizer.backend_tokenizer
        letters.pre_tokenizer = Metaspace(prepend_scheme="first")
    plain, chats = "A heron\nwaits. ", Chats(tokenizer)
    ids, end = chats.ids([user(plain)]), tokenizer.convert_tokens_to_ids("<|end|>")
    both = chats.ids([user(f"{plain}<|end|> Who?")])
    first = ids[: ids.index(end)]
    assert both[: len(first)] == first
    assert both.count(end) == 1
    assert tokenizer.convert_tokens_to_ids("<|assistant|>") == both[-1] == ids[-1]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_behind_a_special_token_is_the_tokenizers_own_whatever_later_messages_name(scheme):
    letters = Tokenizer(BPE(vocab={letter: at for at, letter in enumerate("▁:?ABWadehnorstuw\n")}, merges=[]))
    letters.pre_tokenizer = Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}<s>"
    chats, chat = Chats(tokenizer), [user("Who?"), said("A heron."), user("Wait.")]
    own = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
    assert chats.ids(chat) == own
    assert chats.ids([*chat, user("</s>Who?")])[: len(own) - 1] == own[:-1]


def test_a_chat_keeps_the_day_on_which_it_began(tmp_path):
    """Which the template writes: so a saved one begins with the tokens that its memory has read."""
    tokenizer = chat_tokenizer("{{ strftime_now('%d %B %Y') }}\n" + CHATML)
    model, began = make_model("llama"), datetime(2024, 2, 29, 12)
    model.resize_token_embeddings(260, mean_resizing=False)
    answering = Answering(wrap(model, tokenizer, landmarks="none", block_size=8), tokenizer)
    session, asked = Session(answering, began=began), Prompt.question("Who waits?", {})
    list(session.ask(session.exchange(asked), tokens=2))
    session.messages = [user("Who waits?"), said("A heron.")]
    session.save(tmp_path / "memory")
    again = Session(answering).load(tmp_path / "memory")
    assert again.began == began
    read = answering.chats.decode(saved_windows(tmp_path / "memory")["ids"][0].tolist())
    assert read.startswith("29 February 2024")
    chat = tmp_path / "memory" / "chat.json"
    chat.write_text(chat.read_text().replace(began.isoformat(), "yesterday"))
    hash_again(tmp_path / "memory", HASHES)
    with pytest.raises(UserError, match="began is 'yesterday', which is no time"):
        Session(answering).load(tmp_path / "memory")


def test_many_names_of_special_tokens_cost_no_more_than_other_text(monkeypatch):
    tokenizer, calls = chat_tokenizer(CHATML), []
    chats, encode = Chats(tokenizer), type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *given, **named: calls.append(1) or encode(*given, **named))
    assert len(chats.ids([user("a<|im_end|>" * 5000)])) > 5000 * len("a<|im_end|>")
    assert len(calls) < 20


def channels():
    tokenizer = make_tokenizer()
    names = "start", "end", "message", "channel", "return"
    tokenizer.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    tokenizer.chat_template = HARMONY
    return Chats(tokenizer)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        (
            "<|channel|>analysis<|message|>2+2 is 4.<|end|><|start|>assistant<|channel|>final<|message|>4 <|",
            "2+2 is 4.",
            "4 <|",
        ),
        ("<|channel|>final<|message|>4", "", "4"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=x<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>c",
            "a\nb",
            "c",
        ),
        ("4 it is", "", "4 it is"),
    ],
)
def test_gpt_oss_channels_are_reasoning_but_the_final_one(text, reasoning, answer):
    """While the tokens come, nothing is shown that goes away again."""
    chats = channels()
    made = Answer(partial(chats.decode, with_marks=True), parts=chats.parts)
    deltas = [made.add(token) for token in chats.tokenizer(text)["input_ids"]]
    deltas.append(made.add(None))
    assert "".join(each.reasoning for each in deltas) == made.reasoning == reasoning
    assert "".join(each.text for each in deltas) == made.text == answer


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("[THINK]", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought\n", "<channel|>"),
    ],
)
def test_other_ways_to_open_reasoning_are_known(opening, closing):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([opening.partition("thought")[0], closing, "<|hidden|>"], special_tokens=True)
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content.split('{closing}')[-1] }}}}{{% endfor %}}"
    chats = Chats(tokenizer)
    ids = tokenizer(f"{opening}Birds.{closing}<|hidden|>A heron.")["input_ids"]
    made = Answer(partial(chats.decode, with_marks=True), parts=chats.parts)
    deltas = [made.add(token) for token in [*ids, None]]
    assert "".join(each.reasoning for each in deltas) == "Birds."
    assert "".join(each.text for each in deltas) == "A heron."
    assert chats.decode(ids).endswith("Birds.A heron.")
    assert chats.opens_reasoning(tokenizer(f"user: Who? {opening}")["input_ids"])
