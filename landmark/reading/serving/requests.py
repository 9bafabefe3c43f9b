"""The bodies of requests: OpenAI's fields, and those that other servers of models have."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from landmark.models.sampling import Sampling
from landmark.reading.session import Prompt

LOG = logging.getLogger(__name__)
# What becomes of a field: those of the classes below are used; a test reads the page of the server against these two.
# They would change an answer, and are not supported. With these values they change nothing, nor with null.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs"), (0, 0.0)),
    **dict.fromkeys(("logprobs", "echo", "ignore_eos", "use_beam_search"), (False,)),
    **dict.fromkeys(("tools", "functions", "bad_words", "stop_token_ids"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("auto", "none")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("reasoning_effort", "audio", "web_search_options"), ()),
    **{"n": (1,), "best_of": (1,), "suffix": ("",), "logit_bias": ({},), "reasoning": ({},), "verbosity": ("medium",)},
    **{"response_format": ({"type": "text"},), "modalities": (["text"],)},
}
# They change no answer here: an answer says so in its `warnings`, as of fields with names that are not known.
IGNORED = {"user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier", "include"}
IGNORED |= {"prompt_cache_key", "prompt_cache_retention", "prediction"}
_warned: set[str] = set()  # fields that the log was told of


def check_supported(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a field that would change the answer. neutral: such fields, with values without effect."""
    for name, values in neutral.items():
        if (value := given.get(name)) is None:
            continue
        value = {key: x for key, x in value.items() if x is not None} if isinstance(value, dict) else value
        if not any(type(value) is type(each) and value == each for each in values):  # as false is 0
            raise ValueError(f"{name}: is not supported here, and would change the answer; leave it out")


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character (a lone surrogate) at {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Body(BaseModel):
    """A field that is null has its default. One that is not known is ignored, with a warning."""

    model_config = ConfigDict(strict=True)  # true is no number, and 1e9 no whole one
    _unused: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _notes_what_is_unused(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(given)
        if isinstance(given, dict):
            known = cls.known()
            made._unused = tuple(sorted(ascii(x)[1:-1] for x, y in given.items() if x not in known and y is not None))
            for name in sorted({*made._unused} - IGNORED - _warned):
                _warned.add(name)
                LOG.warning("the field %s of a request is not known here and is ignored", name)
        return made

    @classmethod
    def known(cls) -> set[str]:
        """The names of fields that are used, or would be refused with a value that changes the answer."""
        return {each.alias or name for name, each in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        return {name: x for name, x in given.items() if x is not None} if isinstance(given, dict) else given

    @property
    def warnings(self) -> list[str]:
        """A line for each field that has no effect."""
        return [f"{name}: has no effect here" for name in self._unused]


def _drawing(name: str, about: str, **bounds: Any) -> Any:
    """A field of `Sampling`, with its range. about: what 0 or another value means."""
    said = Sampling.__dataclass_fields__[name].metadata
    words = {"least": "ge", "above": "gt", "most": "le", "below": "lt"}
    within = {word: said[bound] for bound, word in words.items() if bound in said}
    return Field(None, **within | bounds, description=f"{about}; left out: as the model recommends")


class Asked(_Body):
    """What both kinds of completions have. document, documents: are read before the prompt."""

    model: Text | None = None
    max_tokens: int | None = Field(None, description="-1: as many as the server allows")
    max_completion_tokens: int | None = None
    temperature: float | None = _drawing("temperature", "0: the most probable token", le=2)
    top_p: float | None = _drawing("top_p", "share of probability")
    top_k: int | None = _drawing("top_k", "0, -1: all tokens", ge=-1, lt=2**63)
    min_p: float | None = _drawing("min_p", "share of the best token's probability")
    repetition_penalty: float | None = _drawing("repetition_penalty", "1: none")
    stop: Text | list[Text] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, strict=True)
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(None, description="include_usage: a last chunk with the counts")
    document: Text | None = None
    documents: list[Text] = Field([], max_length=16, description="several, in place of document")
    documents_read: Literal["in_order", "apart"] = Field(
        "in_order", description="in_order: as one text; apart: as each was read alone when it was put"
    )
    sources: int = Field(0, ge=0, le=20, description="most passages of the documents that come with the answer")
    from_sources: bool = Field(
        False, description="find these (three, if sources is 0) before the answer, which is made from them alone"
    )

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            check_supported(given, REFUSED)
        return given

    @classmethod
    def known(cls) -> set[str]:
        return super().known() | REFUSED.keys()

    @model_validator(mode="after")
    def _fits_together(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for a streamed answer: set stream")
        if self.document is not None and self.documents:
            raise ValueError("document and documents: name one, or several")
        if (self.sources or self.from_sources) and not self.named:
            raise ValueError("sources are passages of a document: name one")
        if (most := self.most) is not None and most < 1:
            raise ValueError(f"max_tokens: {most} is less than 1; -1 means as many as the server allows")
        return self

    @property
    def named(self) -> list[str]:
        """The documents that are read before the prompt."""
        return self.documents if self.document is None else [self.document]

    @property
    def finds(self) -> bool:
        """Whether passages are found."""
        return self.sources > 0 or self.from_sources

    def sampling(self, generation_config: Any) -> Sampling:
        """How tokens are chosen. generation_config: what the model recommends; None: nothing."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        top_k = None if self.top_k is None else max(0, self.top_k)
        names = "temperature", "top_p", "min_p", "repetition_penalty"
        given = {name: getattr(self, name) for name in names}
        return Sampling.from_config(generation_config, **given, top_k=top_k, seed=seed)

    def prompt_of(self) -> Prompt:
        """What is asked."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """Most tokens of the answer; None: as many as the server allows."""
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return None if given == -1 else given


class Completion(Asked):
    """The body of /v1/completions. prompt: a text or ids; several prompts are several requests."""

    prompt: Text | list[int]

    def prompt_of(self) -> Prompt:
        return Prompt(text=self.prompt)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    cache_control: Any = None


class Message(_Body):
    """One message of a chat: a text, whole or in parts. Answers, and results of tools, may be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[TextPart] = ""
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[dict[str, Any]] = []
    # Fields of an answer that is sent back.
    reasoning_content: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] = []
    cache_control: Any = None

    @model_validator(mode="after")
    def _has_text(self) -> Message:
        has_none = not self._text.strip() and not self.refusal
        may_have_none = self.role not in ("system", "developer", "user")
        if has_none and not (may_have_none and (self.tool_calls or "content" in self.model_fields_set)):
            raise ValueError("content: the message has no text")
        if self.refusal and self._text:
            raise ValueError("refusal: a message has a content or a refusal, not both")
        return self

    @property
    def _text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    def as_dict(self) -> dict[str, Any]:
        """For the template of a tokenizer. OpenAI's role of developers is what the templates of models call system."""
        others = {name: getattr(self, name) for name in ("name", "tool_call_id", "tool_calls", "reasoning_content")}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self._text or self.refusal or ""} | {n: x for n, x in others.items() if x}

    @property
    def warnings(self) -> list[str]:
        parts = self.content if isinstance(self.content, list) else []
        return [*super().warnings, *(f"content.{each}" for part in parts for each in part.warnings)]


class Chat(Asked):
    """The body of /v1/chat/completions. chat_template_kwargs: settings of the template, as `enable_thinking`.
    continue_final_message: the last message is the beginning of the answer.
    """

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool | None = Field(None, description="the contrary of continue_final_message")

    @model_validator(mode="after")
    def _ends_well(self) -> Chat:
        if self.add_generation_prompt not in (None, not self.continue_final_message):
            raise ValueError("add_generation_prompt: must be true, or false with continue_final_message")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the last message is no assistant's")
        return self

    @property
    def warnings(self) -> list[str]:
        of_messages = enumerate(message.warnings for message in self.messages)
        return [*super().warnings, *(f"messages.{n}.{each}" for n, own in of_messages for each in own)]

    def prompt_of(self) -> Prompt:
        messages = [message.as_dict() for message in self.messages]
        return Prompt(messages, goes_on=self.continue_final_message, settings=self.chat_template_kwargs)
