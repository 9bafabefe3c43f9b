"""What the harness asks and the model cannot answer is refused in one line; chats are written by the template."""

import os
import subprocess
import sys

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest

pytest.importorskip("lm_eval", reason="the optional extra `eval` is not installed")
pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from landmark.evaluation.harness import LandmarkLM
from landmark.utils.errors import UserError
from tests.evaluation.test_harness import LINE, Colours, own, plain, requests  # noqa: F401 (fixtures)
from tests.huggingface.conftest import make_model, make_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A tiny Llama with a template for chats, and a tokenizer that puts the beginning of text before each text."""
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("chatting")
    model, tokenizer = make_model("llama"), make_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "<eot>", TEMPLATE
    processor = TemplateProcessing(single="<eot> $A", special_tokens=[("<eot>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = processor
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "option", [{"num_beams": 4}, {"repetition_penalty": 1.3}, {"min_p": 0.1}, {"tempereture": 1}, {"stop": ["a"]}]
)
def test_an_option_that_would_be_ignored_is_refused(plain, option):  # noqa: F811
    model = LandmarkLM(str(plain), device="cpu")
    ((name, value),) = option.items()
    with pytest.raises(UserError) as error:
        model.generate_until(requests("generate_until", (LINE, {"until": [], "max_gen_toks": 3, **option})))
    assert f"gen_kwargs {name}={value}: is not known here, only do_sample, max_gen_toks" in str(error.value)


def test_options_that_change_nothing_are_accepted(plain):  # noqa: F811
    model = LandmarkLM(str(plain), device="cpu")
    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    more = {"num_beams": 1, "repetition_penalty": 1.0, "top_k": 0, "temperature": 0.0, "min_p": None}
    asked = [requests("generate_until", (LINE, given)) for given in (options, options | more)]
    first, second = (model.generate_until(each) for each in asked)
    assert first == second


def test_a_continuation_that_does_not_fit_is_refused(plain):  # noqa: F811
    model = LandmarkLM(str(plain), device="cpu", max_length=10)
    with pytest.raises(UserError, match="max_length=10: a continuation has 14 tokens"):
        model.loglikelihood(requests("loglikelihood", ("the boat", " sees the crow")))
    with pytest.raises(UserError, match="a continuation has 0 tokens"):
        model.loglikelihood(requests("loglikelihood", ("the boat", "")))
    assert len(model.loglikelihood(requests("loglikelihood", ("the boat", " sees the")))) == 1


@pytest.mark.parametrize("setting", [{"local": 0}, {"max_length": -1}, {"max_gen_toks": 0}, {"local": "many"}])
def test_numbers_out_of_range_are_refused(plain, setting):  # noqa: F811
    ((name, value),) = setting.items()
    with pytest.raises(UserError, match=f"{name}={value}: must be a whole number"):
        LandmarkLM(str(plain), device="cpu", **setting)


def test_chats_are_those_of_hf(chatting):
    """Their texts, their ids with one beginning of text, and a task's results."""
    ours, theirs = (
        LandmarkLM(str(chatting), device="cpu"),
        HFLM(pretrained=str(chatting), device="cpu", dtype="float32"),
    )
    chat = [{"role": "user", "content": "the crow"}, {"role": "assistant", "content": "sees"}]
    for prompt in (True, False):
        text = ours.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text).count(ours.eot_token_id) == 1
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    found, expected = (
        simple_evaluate(model=model, tasks=[Colours()], bootstrap_iters=0, log_samples=True, apply_chat_template=True)[
            "samples"
        ]["colours"]
        for model in (ours, theirs)
    )
    assert [each["arguments"] for each in found] == [each["arguments"] for each in expected]
    assert [each["filtered_resps"] for each in found] == [each["filtered_resps"] for each in expected]


def test_a_tokenizer_without_a_template_writes_no_chats(plain, own):  # noqa: F811
    for model in (LandmarkLM(str(plain), device="cpu"), LandmarkLM(str(own), tokenizer="bytes", device="cpu")):
        with pytest.raises(UserError, match="has no template for chats"):
            model.apply_chat_template([{"role": "user", "content": "Who?"}])


def test_a_wrong_path_is_one_line(tmp_path):
    arguments = ["run", "--model", "landmark", "--tasks", "lambada_openai", "--model_args", f"path={tmp_path}/nothing"]
    command = [sys.executable, "-m", "landmark.evaluation.harness", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("nothing/config.json is missing: name the folder of a finished run")
