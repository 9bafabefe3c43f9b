"""The bodies of requests: OpenAI's fields, and those that other servers of models have."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

LOG = logging.getLogger(__name__)
# Fields of OpenAI's that would change an answer, and are not supported, with their values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "logit_bias", "logprobs"), ()),
    **{
        "n": (1,),
        "best_of": (1,),
        "echo": (),
        "suffix": (),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
    },
    **{"tools": (), "functions": (), "tool_choice": ("auto", "none"), "function_call": ("auto", "none")},
}
_ignored: set[str] = set()  # fields that were warned of


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character (a lone surrogate) at {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Body(BaseModel):
    """A field that is null has its default. One that is not known is ignored, with a warning at the first time."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in sorted(map(str, given.keys() - cls.model_fields.keys() - NEUTRAL.keys() - _ignored)):
            _ignored.add(name)
            LOG.warning("the field %s of a request is not known here and is ignored", ascii(name)[1:-1])
        return {name: x for name, x in given.items() if x is not None}


class Asked(_Body):
    """What both kinds of completions have. document: is read before the prompt."""

    model: Text | None = None
    max_tokens: int | None = Field(None, strict=True, description="-1: as many as the server allows")
    max_completion_tokens: int | None = Field(None, strict=True)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, strict=True)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop: Text | list[Text] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, strict=True)
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(None, description="include_usage: a last chunk with the counts")
    document: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, given: Any) -> Any:
        for name, neutral in NEUTRAL.items() if isinstance(given, dict) else ():
            if given.get(name) and given[name] not in neutral:
                raise ValueError(f"{name}: is not supported here, and would change the answer; leave it out")
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for a streamed answer: set stream")
        if (most := self.most) is not None and most < 1:
            raise ValueError(f"max_tokens: {most} is less than 1; -1 means as many as the server allows")
        return self

    @property
    def most(self) -> int | None:
        """Most tokens of the answer; None: as many as the server allows."""
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return None if given == -1 else given


class Completion(Asked):
    """The body of /v1/completions. prompt: a text or ids; several prompts are several requests."""

    prompt: Text | list[int]


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    cache_control: Any = None


class Message(_Body):
    """One message of a chat: a text, whole or in parts, or none beside calls of tools."""

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

    def as_dict(self) -> dict[str, Any]:
        """For the template of a tokenizer."""
        whole = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        others = {name: getattr(self, name) for name in ("name", "tool_call_id", "tool_calls")}
        return {"role": self.role, "content": whole, **{name: x for name, x in others.items() if x}}


class Chat(Asked):
    """The body of /v1/chat/completions. chat_template_kwargs: settings of the template, as `enable_thinking`."""

    messages: list[Message] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = {}
