"""The bodies of requests: OpenAI's fields, and those of sessions and documents."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has half a character (a lone surrogate) at {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class _Body(BaseModel):
    """What no field names is refused; a field that is null has its default."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, given: Any) -> Any:
        return {name: x for name, x in given.items() if x is not None} if isinstance(given, dict) else given


class StreamOptions(_Body):
    """What a streamed answer has besides. include_usage: a last chunk with the numbers of tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Asked(_Body):
    """What both kinds of completions have. session: goes on with this memory. document: starts from this one."""

    model: Text | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: Text | list[Text] = []
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    session: Text | None = None
    document: Text | None = None
    # Fields of OpenAI's clients that change no answer here, with the values for which this is right.
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    metadata: dict[str, str] = {}
    store: bool = False
    service_tier: Text | None = None
    presence_penalty: float = Field(0, ge=0, le=0)
    frequency_penalty: float = Field(0, ge=0, le=0)
    logit_bias: dict[str, float] = Field({}, max_length=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for a streamed answer: set stream")
        if self.session is not None and self.n > 1:
            raise ValueError("n: a session goes on with one answer; leave n or session out")
        return self

    @property
    def probable(self) -> int | None:
        """Most probable tokens that are wanted with each token; None: no probabilities are."""
        raise NotImplementedError


class Completion(Asked):
    """The body of /v1/completions. prompt: a text or ids, or several of them."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: Literal[False] | Annotated[int, Field(strict=True, ge=0, le=5)] = False
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _session_has_one_prompt(self) -> Completion:
        if not self.prompts:
            raise ValueError("prompt: there is none")
        if self.session is not None and len(self.prompts) > 1:
            raise ValueError("prompt: a session goes on with one prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt."""
        one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if one else self.prompt  # pyright: ignore[reportReturnType]

    @property
    def probable(self) -> int | None:
        return None if self.logprobs is False else self.logprobs


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class Message(_Body):
    """One message of a chat: a text, whole or in parts. The other fields are those of an answer that is sent back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    tool_calls: Nothing = []
    annotations: Nothing = []

    def as_dict(self) -> dict[str, str]:
        """For the template of a tokenizer."""
        whole = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": whole}


class ResponseFormat(_Body):
    """The form of an answer: a text."""

    type: Literal["text"]


class Chat(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] = ["text"]
    tools: Nothing = []
    functions: Nothing = []
    tool_choice: Literal["none", "auto"] = "none"
    function_call: Literal["none", "auto"] = "none"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _probable_tokens_are_of_logprobs(self) -> Chat:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs")
        return self

    @property
    def probable(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class Document(_Body):
    """The body of /v1/documents."""

    text: Text
