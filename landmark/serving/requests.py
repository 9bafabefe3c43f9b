"""The bodies of requests: OpenAI's fields, and those of sessions and documents."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class StreamOptions(BaseModel):
    """What a streamed answer has besides. include_usage: a last chunk with the numbers of tokens."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Asked(BaseModel):
    """What both kinds of completions have. session: goes on with this memory. document: starts from this one."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    session: str | None = None
    document: str | None = None
    # Fields of OpenAI's clients that change no answer here, with the values for which this is right.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _options_are_of_a_stream(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for a streamed answer: set stream")
        return self


class Completion(Asked):
    """The body of /v1/completions."""

    prompt: str


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat: a text, whole or in parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_dict(self) -> dict[str, str]:
        """For the template of a tokenizer."""
        whole = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": whole}


class Chat(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


class Document(BaseModel):
    """The body of /v1/documents."""

    model_config = ConfigDict(extra="forbid")

    text: str
