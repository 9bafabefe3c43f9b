"""Our models in EleutherAI's lm-evaluation-harness (extra `eval`), read with their memory.

    python -m landmark.experiment.evaluation.harness run --model landmark --model_args path=FOLDER,k=4 \
        --tasks lambada_openai

`python -m lm_eval` does not know the model `landmark`; this command makes it known and then is the harness's own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]
from torch import Tensor

from landmark.experiment.data.tokenizers import PretrainedTokenizer, open_pretrained
from landmark.experiment.evaluation.measurement import alike
from landmark.experiment.runs.loading import tokenizer_of
from landmark.models import LanguageModel, load
from landmark.models.sampling import Sampling
from landmark.reading.answer import Answer
from landmark.reading.answering import Answering
from landmark.utils.constants import DEFAULT_CHUNK
from landmark.utils.errors import UserError

Request = tuple[Any, list[int], list[int]]  # the texts, ids of the context, ids of the continuation
OPTIONS = {"do_sample", "temperature", "top_k", "top_p", "until", "max_gen_toks"}  # of a generation
# Values of transformers' options with which they change nothing.
NO_CHANGE = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1, "no_repeat_ngram_size": 0}
NO_CHANGE |= {"min_p": 0, "typical_p": 1, "use_cache": True}
Score = tuple[float, bool]  # log-probability in nats, whether each id is the most probable


@register_model("landmark")
class LandmarkLM(TemplateLM):
    """A trained run, a model that `landmark.models.huggingface` saved, or a plain model of transformers. With a memory
    it reads a text of any length, `local` tokens at a time; a plain one at most `max_length` tokens.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        local: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        enable_thinking: bool | None = None,
        **memory: Any,
    ):
        """tokenizer: folder, of a model of transformers (None: `path`). local: tokens read at a time (None: 250, or the
        window of Transformer-XL). max_length: of a text (None: any with a memory, else what the model was made for).
        max_gen_toks: where a task does not say. max_batch_size: not used; the harness gives it. enable_thinking: of the
        template for chats (None: as usual). memory: settings, such as k=4, tier, max_blocks. Raises UserError for a
        path without a model, numbers out of range, batch_size="auto", and memory settings without landmarks.
        """
        super().__init__()
        for name, value in {"local": local, "max_length": max_length, "max_gen_toks": max_gen_toks}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{name}={value}: must be a whole number, at least 1")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size={batch_size}: must be a number, at least 1")
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model: LanguageModel = load(Path(path), device=self._device)
        bare = getattr(self.model, "bare", None)
        if bare is None and tokenizer is not None:
            raise UserError(f"tokenizer={tokenizer}: a run has its own, leave it out")
        self._text = tokenizer_of(Path(path)) if bare is None else open_pretrained(tokenizer or path)
        self._settings = memory
        self._answering = None if bare is None else Answering(bare, self.tokenizer, local=local)
        self._template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        if memory and self.model.config.kind != "landmark":
            raise UserError(f"{', '.join(memory)}: {path} holds a {self.model.config.kind} model, without landmarks")
        has_memory = self.model.new_memory(**memory) is not None
        self._local = local or self.model.config.window or DEFAULT_CHUNK
        finds_blocks = has_memory and self.model.config.kind == "landmark" and self.model.config.landmark_id is None
        self._most = local if finds_blocks else self._local  # a text without landmarks may be cut anywhere
        limit = None if has_memory or bare is None else getattr(bare.config, "max_position_embeddings", None)
        self.max_length: int | None = max_length or limit

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._device

    @property
    def eot_token_id(self) -> int:
        return self._text.eot

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that has no context: beginning of text where the tokenizer has one."""
        inner = getattr(self._text, "inner", None)
        return self._text.eot if inner is None or inner.bos_token_id is None else inner.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self._text.name

    @property
    def tokenizer(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizer of transformers, which may have a template for chats; None: it is one of ours."""
        return self._text.inner if isinstance(self._text, PretrainedTokenizer) else None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text. add_special_tokens: for a tokenizer of transformers (None: as it usually does, but where the
        text begins with the beginning of text, as a template writes it, no second one)."""
        if self.tokenizer is None:
            return self._text.encode(string).tolist()
        if add_special_tokens is None and (begin := self.tokenizer.bos_token) and string.startswith(begin):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat. add_generation_prompt: whether an answer begins at its end, else the last message goes
        on. Raises UserError where the tokenizer has no template, or it refuses the messages.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"apply_chat_template: the tokenizer {self.tokenizer_name} has no template for chats; leave it out"
            )
        assert self._answering is not None
        return self._answering.chats.text(chat_history, not add_generation_prompt, self._template)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text in nats: read once with a memory, else in windows of max_length."""
        found = []
        for request in requests:
            ids, prefix = self.tok_encode(request.args[0]), self.prefix_token_id
            most = self.max_length or max(1, len(ids))
            windows = get_rolling_token_windows(ids, prefix_token=prefix, max_seq_len=most, context_len=1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Score]:
        """Each continuation's log-probability, and whether it is greedy. Raises UserError for one empty or too long."""
        for _, _, continuation in requests:
            if not 1 <= len(continuation) <= (self.max_length or len(continuation)):
                raise UserError(
                    f"max_length={self.max_length}: a continuation has {len(continuation)} tokens; it must fit, and "
                    "have at least one"
                )
        texts = [[*context, *continuation] for _, context, continuation in requests]
        if self.max_length is not None:
            texts = [text[-(self.max_length + 1) :] for text in texts]
        answers: list[Score] = [(0.0, True)] * len(requests)
        # Of one length too where the continuations begin: from there on each token chooses its blocks alone.
        kinds = [(len(text), len(each)) for text, (_, _, each) in zip(texts, requests, strict=True)]
        for numbers in alike(kinds, self.batch_size):
            inputs = torch.tensor([texts[number][:-1] for number in numbers], device=self.device)
            continuations = [requests[number][2] for number in numbers]
            for number, answer in zip(numbers, self._scores(inputs, continuations), strict=True):
                answers[number] = answer
                if requests[number][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to the first of its `until`, end of text, or max_gen_toks. Raises
        UserError where that leaves no room for a context, and for options (gen_kwargs) that have no meaning here.
        """
        answers, contexts, options = [""] * len(requests), [], []
        for request in requests:
            text, given = cast("tuple[str, dict[str, Any]]", request.args)
            options.append({**normalize_gen_kwargs(given, self.max_gen_toks)})
            contexts.append(self.tok_encode(text))
            if self.max_length is not None:
                if (tokens := options[-1]["max_gen_toks"]) >= self.max_length:
                    raise UserError(
                        f"max_gen_toks={tokens}: leaves no room for a prompt within max_length={self.max_length}"
                    )
                contexts[-1] = contexts[-1][-(self.max_length - tokens) :]
        kinds = [(len(ids), str(sorted(each.items(), key=str))) for ids, each in zip(contexts, options, strict=True)]
        for numbers in alike(kinds, self.batch_size):
            texts = self._continue([contexts[number] for number in numbers], options[numbers[0]])
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _continue(self, contexts: list[list[int]], options: dict[str, Any]) -> list[str]:
        """Texts that follow contexts of one length; generation ends when each has one of `until`."""
        until, most, sampling = options.get("until") or [], options["max_gen_toks"], _sampling(options)
        memory = self.model.new_memory(**self._settings)
        if self._answering is None:
            decode = lambda ids: self._text.written(ids).decode("utf-8", "replace")  # noqa: E731
            settings = {"local": self._local, "memory": memory, "stop": [self._text.eot]}
            steps = self.model.stream(contexts, most, sampling=sampling, **settings)
        else:
            decode = self._answering.chats.decode
            memory = self.model.unlimited_memory(len(contexts[0]) + most) if memory is None else memory
            events = self._answering.steps(contexts, memory, sampling, most)
            steps = (event for event in events if isinstance(event, list))
        answers = [Answer(decode, until) for _ in contexts]
        for step in steps:
            for answer, token in zip(answers, step, strict=True):
                if answer.finish is None:
                    answer.add(token, is_last=len(answer.tokens) + 1 >= most)
            if all(answer.finish is not None for answer in answers):
                break
        for answer in answers:
            if answer.finish is None:
                answer.add(None)
        return [postprocess_generated_text(answer.text, until, None) for answer in answers]

    @torch.no_grad()
    def _scores(self, inputs: Tensor, continuations: list[list[int]]) -> list[Score]:
        """The answer for each continuation, a chunk's logits at a time. inputs: (B, T), all ids but the last one."""
        memory, length = self.model.new_memory(**self._settings), inputs.shape[1]
        if memory is None:
            memory = self.model.unlimited_memory(length)
        targets = torch.zeros_like(inputs)
        for row, continuation in zip(targets, continuations, strict=True):
            row[-len(continuation) :] = torch.tensor(continuation)
        found: list[tuple[Tensor, Tensor]] = []
        kept = max(map(len, continuations))
        for read, logits in self.model.read_text(inputs, memory, kept, self._most):
            if logits is None:
                continue
            wanted = targets[:, read - logits.shape[1] : read]
            found.append((F.log_softmax(logits, -1).gather(2, wanted[..., None])[..., 0], logits.argmax(-1) == wanted))
        scores, are_best = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return [
            (float(scores[row, -len(each) :].sum()), bool(are_best[row, -len(each) :].all()))
            for row, each in enumerate(continuations)
        ]


def _sampling(settings: dict[str, Any]) -> Sampling:
    """How tokens are drawn: greedy, unless a task asks for samples. Raises UserError for an unknown option."""
    for name, value in settings.items():
        if name not in OPTIONS and value is not None and (name not in NO_CHANGE or value != NO_CHANGE[name]):
            raise UserError(f"gen_kwargs {name}={value}: is not known here, only {', '.join(sorted(OPTIONS))} are")
    if not settings.get("do_sample"):
        return Sampling()
    given = {"temperature": 1.0, **{name: settings.get(name) for name in ("temperature", "top_k", "top_p")}}
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def main() -> None:
    """The harness's own command. Ends with exit code 2 and one line for what the user can mend."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    try:
        cli_evaluate()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
