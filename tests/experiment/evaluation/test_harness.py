"""Our models in lm-evaluation-harness, against its own model `hf` and against sums by hand; its tasks, offline."""

import os
import sys
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest

pytest.importorskip("lm_eval", reason="the optional extra `eval` is not installed")
pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

import datasets
import lm_eval
import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from landmark.experiment.config import to_config
from landmark.experiment.evaluation.harness import LandmarkLM, main
from landmark.utils.errors import UserError
from tests.configurations import compose_conf
from tests.models.huggingface.conftest import make_tokenizer, save_model, wrapped_model
from tests.saved import saved_run

LINE = "the crow sees the boat, and the boat sees the crow; "
PAIRS = [("the boat", " sees the crow"), ("a crow", " hears"), ("", "the crow sees"), (3 * LINE, "the boat")]
RULER = str(Path(lm_eval.__file__).parent / "tasks" / "ruler")
TASKS = TaskManager(include_defaults=False)  # to list all tasks takes most of the time
QUICK = {"bootstrap_iters": 0, "log_samples": True, "task_manager": TASKS}
DOCUMENTS = [LINE, 5 * LINE, "crow"]

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def requests(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama, with landmarks after every 15 tokens, without, for chats that have a beginning; a run of ours."""
    folder, tokenizer, chatting = tmp_path_factory.mktemp("models"), make_tokenizer(), make_tokenizer(beginning=256)
    memory = {"k": 3, "window": 7}
    chatting.bos_token, chatting.chat_template = "<eot>", TEMPLATE
    save_model(folder / "plain")
    save_model(folder / "wrapped", wrapped_model("llama", tokenizer, block_size=15, local=40), tokenizer)
    save_model(folder / "without", wrapped_model("llama", landmarks="none", memory=memory, local=40))
    save_model(folder / "chatting", tokenizer=chatting)
    saved_run(folder / "own", config=to_config(compose_conf(["tokenizer=bytes"])))
    return folder


@pytest.fixture
def opened(folders):
    """Opens a model by its name."""
    return lambda name, **settings: LandmarkLM(str(folders / name), device="cpu", **settings)


@pytest.mark.parametrize("length", [{}, {"max_length": 64}], ids=str)
def test_loglikelihoods_and_generated_texts_are_those_of_hf_to_the_last_bit(folders, opened, length):
    """Also of documents that are longer than the model, which are cut into the same windows."""
    ours, settings = opened("plain", **length), {"batch_size": 1, "dtype": "float32", "add_bos_token": False}
    theirs = HFLM(pretrained=str(folders / "plain"), device="cpu", **settings, **length)
    asked = requests("loglikelihood", *PAIRS)
    assert ours.loglikelihood(asked) == theirs.loglikelihood(asked, disable_tqdm=True)
    asked = requests("loglikelihood_rolling", *((text,) for text in DOCUMENTS))
    assert ours.loglikelihood_rolling(asked) == theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    options = {"until": ["th"], "max_gen_toks": 12, "do_sample": False}
    asked = requests("generate_until", *((text, options) for text in (LINE, 2 * LINE, "crow")))
    generated = ours.generate_until(asked, disable_tqdm=True)
    assert generated == theirs.generate_until(asked, disable_tqdm=True)
    assert any(generated)


@pytest.mark.parametrize("name", ["plain", "wrapped", "without"])
def test_batches_do_not_matter(name, opened):
    asked = requests("loglikelihood", *PAIRS, *((context, " sees the boat") for context, _ in PAIRS))
    one, many = (opened(name, batch_size=size).loglikelihood(asked, disable_tqdm=True) for size in (1, 8))
    assert [score for score, _ in one] == pytest.approx([score for score, _ in many], rel=1e-5)
    assert [greedy for _, greedy in one] == [greedy for _, greedy in many]


def test_texts_of_one_length_are_apart_where_their_continuations_begin_elsewhere(opened):
    """From a continuation on each token chooses its blocks alone."""
    text = 12 * LINE
    asked = requests("loglikelihood", (text[:-8], text[-8:]), (text[:-200], text[-200:]))
    one, many = (opened("without", batch_size=size, dense=0, k=3).loglikelihood(asked) for size in (1, 8))
    assert [score for score, _ in one] == pytest.approx([score for score, _ in many], rel=1e-6)


@pytest.mark.parametrize("k", [1, 100])
def test_a_model_with_landmarks_is_read_with_its_memory(opened, k):
    model = opened("own", local=20, k=k)
    context, continuation = (4 * LINE).rstrip(), " the boat"
    ((score, greedy),) = model.loglikelihood(requests("loglikelihood", (context, continuation)), disable_tqdm=True)
    memory = model.model.new_memory(k=k)
    ids = torch.tensor([model.tok_encode(context + continuation)])
    with torch.no_grad():
        logits = torch.cat([model.model(chunk, memory=memory) for chunk in ids[:, :-1].split(20, 1)], 1)
    losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")
    assert score == pytest.approx(-float(losses[-len(continuation) :].sum()), rel=1e-5)
    assert greedy is False
    whole = model.loglikelihood_rolling(requests("loglikelihood_rolling", (context,)))[0]
    assert whole < score


@pytest.mark.parametrize("name", ["plain", "without"])
def test_logits_are_made_of_a_chunk_and_where_they_are_asked_for(name, opened):
    model, made = opened(name, local=20), []
    model.model.bare.lm_head.register_forward_hook(lambda *given: made.append(given[2].shape[1]))
    model.loglikelihood_rolling(requests("loglikelihood_rolling", (4 * LINE,)), disable_tqdm=True)
    assert max(made) == 20
    made.clear()
    model.loglikelihood(requests("loglikelihood", (4 * LINE, "boat")), disable_tqdm=True)
    assert made == [name == "plain"] * (len(made) - 1) + [5]  # with blocks a piece of a context makes none


class Colours(ConfigurableTask):
    """A task of the harness, of two questions with choices."""

    VERSION = 1

    def __init__(self):
        config = {"task": "colours", "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{text}}"}
        config |= {"doc_to_choice": "choices", "doc_to_target": "label", "metric_list": [{"metric": "acc"}]}
        super().__init__(config=config)

    def download(self, *_, **__):
        questions = {"text": [2 * LINE, LINE], "choices": [[" crow", " boat"], [" sees", " hears"]], "label": [0, 1]}
        self.dataset = {"test": datasets.Dataset.from_dict(questions)}


def test_rulers_own_task_runs_offline(folders):
    """Frequent words, which needs no file of nltk's: made by the harness, answered by a model with a memory."""
    pytest.importorskip("wonderwords")
    folder = folders / "wrapped"
    model = get_model("landmark").create_from_arg_string(f"path={folder},k=2,tokenizer={folder}", {"device": "cpu"})
    settings = {"tokenizer": str(folder), "max_seq_lengths": [1024]}
    tasks = TaskManager(include_path=RULER, include_defaults=False, metadata=settings)
    settings = {"limit": 1, "bootstrap_iters": 0, "gen_kwargs": {"max_gen_toks": 3}, "task_manager": tasks}
    results = simple_evaluate(model=model, tasks=["ruler_fwe"], **settings)
    assert 0 <= results["results"]["ruler_fwe"]["1024,none"] <= 1


UNKNOWN, SHORT = "is not known here, only do_sample, max_gen_toks", "a prompt within max_length=64"
REFUSED = [  # model, its settings, options of a generation, what is said
    ("plain", {"k": 4}, {}, "without landmarks"),
    ("plain", {"batch_size": "auto"}, {}, "batch_size=auto"),
    ("own", {"k": -1}, {}, "retrieval.k=-1"),
    ("plain", {"max_length": -1}, {}, "max_length=-1: must be a whole number"),
    *(
        ("plain", {}, {name: value}, rf"gen_kwargs {name}=.*: {UNKNOWN}")
        for name, value in {"num_beams": 4, "repetition_penalty": 1.3, "min_p": 0.1, "stop": ["a"]}.items()
    ),
    *(("plain", {}, {"max_gen_toks": n}, f"max_gen_toks={n}: leaves no room for {SHORT}") for n in (64, 65)),
]


@pytest.mark.parametrize(("model", "setting", "option", "message"), REFUSED)
def test_what_makes_no_sense_or_cannot_be_followed_is_refused(model, setting, option, message, opened):
    def generate():
        read = opened(model, **{"max_length": 64, **setting})
        read.generate_until(requests("generate_until", (LINE, {"until": [], "max_gen_toks": 3, **option})))

    with pytest.raises(UserError, match=message):
        generate()


def test_options_that_change_nothing_are_accepted_and_a_continuation_that_does_not_fit_refused(opened):
    model = opened("plain")
    options = {"until": [], "max_gen_toks": 5, "do_sample": False}
    more = {"num_beams": 1, "repetition_penalty": 1.0, "top_k": 0, "temperature": 0.0, "min_p": None}
    asked = [requests("generate_until", (LINE, given)) for given in (options, options | more)]
    first, second = (model.generate_until(each) for each in asked)
    assert first == second
    model = opened("plain", max_length=10)
    with pytest.raises(UserError, match="max_length=10: a continuation has 14 tokens"):
        model.loglikelihood(requests("loglikelihood", ("the boat", " sees the crow")))
    with pytest.raises(UserError, match="a continuation has 0 tokens"):
        model.loglikelihood(requests("loglikelihood", ("the boat", "")))
    assert len(model.loglikelihood(requests("loglikelihood", ("the boat", " sees the")))) == 1


def test_chats_are_those_of_hf_and_without_a_template_there_are_none(folders, opened):
    """Their texts, their ids with one beginning of text, and a task's results."""
    ours = opened("chatting")
    theirs = HFLM(pretrained=str(folders / "chatting"), device="cpu", dtype="float32")
    chat = [{"role": "user", "content": "the crow"}, {"role": "assistant", "content": "sees"}]
    for prompt in (True, False):
        text = ours.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt)
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text).count(ours.eot_token_id) == 1
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    found, expected = (
        simple_evaluate(model=model, tasks=[Colours()], apply_chat_template=True, **QUICK)["samples"]["colours"]
        for model in (ours, theirs)
    )
    assert [each["arguments"] for each in found] == [each["arguments"] for each in expected]
    assert [each["filtered_resps"] for each in found] == [each["filtered_resps"] for each in expected]
    for name in ("plain", "own"):
        with pytest.raises(UserError, match="has no template for chats"):
            opened(name).apply_chat_template([{"role": "user", "content": "Who?"}])


def test_a_wrong_path_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    words = ["--tasks", "ruler_fwe", "--include_path", RULER, "--model_args", f"path={tmp_path}/nothing"]
    monkeypatch.setattr(sys, "argv", ["harness", "run", "--model", "landmark", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.splitlines()[-1].endswith("nothing is no folder: name the folder of a finished run")
