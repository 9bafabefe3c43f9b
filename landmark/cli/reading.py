"""A trained model reads a text: `generate` goes on from it, `chat` talks of it, `inspect` shows its blocks."""

import json
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.cli.command import Command
from landmark.documents import (
    Document,
    beside_memory,
    document_of,
    documents_read,
    joined,
    read_document,
    saved_document,
    saved_lacks,
)
from landmark.experiment.config import Config
from landmark.experiment.config.schema import MOST_SOURCES
from landmark.experiment.runs.jobs import folder_of
from landmark.experiment.runs.runner import evaluation_device, load_trained
from landmark.utils.errors import UserError
from landmark.utils.files import read_json
from landmark.utils.progress import progress_bar
from landmark.utils.setting import check_value

if TYPE_CHECKING:
    from landmark.experiment.evaluation.generation import GenerationStatistics
    from landmark.reading.sources import Found, Source
    from landmark.reading.support import Support

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as files of safetensors name them
HELP = """\
/sources    the three passages behind the last answer; /sources 5: five
/quit       ends the chat, as Ctrl-D does; with memory.save it is kept
/help       these lines
Ctrl-C      stops an answer; other lines are asked"""
SHOWN, LONGEST = 2, 300  # last turns of a chat that goes on, and characters of each message
CHAT = "chat.json"  # beside a saved memory: how many of its tokens come before the chat, and the messages


def generate(command: Command) -> None:
    """Print the text on standard output; its reasoning, and then a line of statistics, on standard error."""
    config, inputs = with_document(command.only_config()), command.runner.inputs
    folder = folder_of(config, inputs)
    config = with_dtype(config, folder)
    from landmark.experiment.evaluation.generation import GenerationStatistics, generate_text

    model, tokenizer = load_trained(config, folder, inputs)
    statistics = GenerationStatistics()
    with progress_bar("reading") as progress:
        pieces = generate_text(model, tokenizer, config, statistics, progress)
        first = next(pieces, ("", ""))
    reasons = False
    for reasoning, text in chain([first], pieces):
        if reasons and not reasoning:
            print(file=sys.stderr)
        reasons = bool(reasoning)
        print(reasoning, end="", file=sys.stderr, flush=True)
        print(text, end="", flush=True)
    saved = config.memory.save
    if config.generate.tokens and (saved is None or config.prompt is not None):
        print()
    if saved is not None:
        asked = "" if config.prompt else f"; nothing was asked: memory.load={saved} prompt='…' asks"
        print(f"saved in {saved}{asked}", file=sys.stderr)
    if config.generate.finds:
        _print_sources(statistics.sources, statistics.support)
    _print_lacks(config)
    print(_summary(statistics), file=sys.stderr)


def _print_lacks(config: Config) -> None:
    """What the files of an answer did not give."""
    given = () if config.prompt_file is None else config.prompt_file.lacks
    for line in (*(each for folder in config.memory.loaded for each in saved_lacks(folder)), *given):
        print(f"not in the text: {line}", file=sys.stderr)


def with_document(config: Config) -> Config:
    """The configuration with the Document of the files that `prompt_file` names in their place. Raises UserError for
    files that cannot be read, and folders that are missing, or in the way, before anything is loaded.
    """
    loaded = config.memory.loaded
    if any(isinstance(each, (dict, list)) for each in loaded) or config.memory.load == []:
        raise UserError(
            f"memory.load={config.memory.load}: must be a folder, or a list of folders, as [a.memory,b.memory]"
        )
    for folder in loaded:
        if not Path(str(folder)).is_dir():
            raise UserError(f"memory.load={folder}: there is no such folder")
    if len(loaded) > 1 and config.memory.save is not None:
        raise UserError(
            f"memory.save={config.memory.save}: each of the {len(loaded)} memories is saved already, leave it out"
        )
    if config.memory.save is not None and Path(config.memory.save).exists():
        raise UserError(f"memory.save={config.memory.save}: exists already, delete it or name another folder")
    if config.memory.save is not None:
        place = next(each for each in Path(config.memory.save).absolute().parents if each.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise UserError(f"memory.save={config.memory.save}: no folder can be made in {place}, name another one")
    if (given := config.prompt_file) is None:
        return config
    names = given if isinstance(given, list) else [given]
    if not names or any(isinstance(name, (dict, list)) for name in names):
        raise UserError(f"prompt_file={given}: must be a file, or a list of files, as [a.pdf,b.epub]")
    try:
        documents = [_typed() if name == "-" else read_document(str(name)) for name in names]
    except UserError as error:
        raise UserError(f"prompt_file={error}") from error
    return replace(config, prompt_file=joined(documents))


def _typed() -> Document:
    """That of standard input."""
    return document_of(sys.stdin.buffer.read(), "-")._replace(name="prompt")


def with_dtype(config: Config, folder: Path) -> Config:
    """The configuration with `model.dtype` where it is null and the weights are those of a model of transformers.

    Of a saved memory the type in which its text was read; else bfloat16, said in a line, for weights that are saved in
    half precision where the processor multiplies in bfloat16. folder: of the model. Raises UserError where the memory
    was read in another type than the one that is given, before the model is loaded.
    """
    if config.model.name is None:
        return config
    given, types = config.model.dtype, {name: _dtype_of_memory(Path(name)) for name in config.memory.loaded}
    read = next((each for each in types.values() if each is not None), None)
    if len(set(types.values()) - {None}) > 1:
        said = ", ".join(f"{name} in {each}" for name, each in types.items())
        raise UserError(f"memory.load: {said}: memories that are asked together must be read in one type")
    if given is not None and read not in (None, given):
        raise UserError(
            f"memory.load={config.memory.load}: was read in {read}, the model is {given}: leave out model.dtype"
        )
    if given is None and read is None and config.model.reading_dtype == "float32" and _is_half(folder):
        from landmark.utils.hardware import has_units

        if has_units(evaluation_device(config)):
            print("reading in bfloat16, the weights' own type; model.dtype=float32 is exact, slower", file=sys.stderr)
            read = "bfloat16"
    return replace(config, model=replace(config.model, dtype=given or read))


def _is_half(folder: Path) -> bool:
    """Whether a folder's config.json says that its weights are saved in half precision."""
    config: Any = None
    with suppress(UserError):  # it is missing or damaged, which loading it says
        config = read_json(folder / "config.json")
    return isinstance(config, dict) and (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")


def _dtype_of_memory(folder: Path) -> str | None:
    """The type of a saved memory's keys. None: it is damaged, which loading it says."""
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError, StopIteration):
        file = next(path for path in sorted(folder.glob("*.safetensors")) if path.name != "windows.safetensors")
        with safe_open(file, "np") as tensors:
            found = {DTYPES.get(tensors.get_slice(name).get_dtype()) for name in tensors.keys()} - {None}  # noqa: SIM118
        return next(iter(found - {"float32"} or {"float32"}))  # means of blocks are float32 beside other keys
    return None


def _print_sources(found: "Sequence[Source]", support: "Support | None" = None) -> None:
    """On standard error, as the answer alone is on standard output. support: how far the answer is in them."""
    for number, each in enumerate(found, 1):
        if each.kind == "whole":
            print(f"no passage was found: the answer is made from the whole text {each.document}", file=sys.stderr)
            continue
        place = ", ".join(filter(None, (each.document, each.place)))
        said = "the beginning of the text" if each.kind == "head" else f"{each.share:.0%}"
        print(f"[{number}] {place}, characters {each.start} to {each.end} ({said})", file=sys.stderr)
        print(textwrap.indent(each.text, "    "), file=sys.stderr)
    if not found:
        print("no passage of the text was found", file=sys.stderr)
    if support is not None:
        print(f"is the answer there? {support.said} ({support.score:.2f})", file=sys.stderr)


def _summary(statistics: "GenerationStatistics") -> str:
    parts = [f"{statistics.tokens_read:,} tokens read in {statistics.seconds_reading:.1f} s"]
    if statistics.tokens_generated > 1:
        each = statistics.seconds_generating / (statistics.tokens_generated - 1)
        parts.append(f"{statistics.tokens_generated:,} generated, {1e3 * each:.1f} ms each")
    if "blocks_kept" in statistics.memory:
        blocks, kept = statistics.memory["blocks_kept"], statistics.memory["bytes_kept"] / 1e6
        parts.append(f"memory of {blocks:,} blocks, {kept:,.1f} MB")
    return "; ".join(parts)


def chat(command: Command) -> None:
    """Answer each line of standard input. Ctrl-C ends an answer, `/quit` or the input's end the chat, whose memory is
    saved. Lines that begin with a word behind a slash are commands (HELP), and no part of the chat.
    """
    config, inputs = with_document(command.only_config()), command.runner.inputs
    folder = folder_of(config, inputs)
    config = with_dtype(config, folder)
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no UTF-8 are found in each question, whatever the locale is
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]
    chat = Conversation(*load_trained(config, folder, inputs), config)
    chat.print_beginning()
    _print_lacks(config)
    while (question := _asked()) is not None:
        asked = re.fullmatch(r"/([a-z]+)(?: +(.*?))? *", question, re.IGNORECASE)
        name, given = asked.groups() if asked else ("", None)
        if name == "quit":
            break
        try:
            check_value("question", question, {})
            if name == "sources" and (given is None or given.isdecimal()):
                chat.print_sources(int(given or config.generate.sources or 3))
            elif name == "help":
                print(HELP, file=sys.stderr)
            elif name:
                said = "is no command, /help lists them; with a space before it, it is asked"
                raise UserError(f"{question.strip()}: {said}")
            elif question.strip():
                chat.answer(question.strip())
        except UserError as error:  # the chat goes on, and is saved
            print(error, file=sys.stderr)
    if config.memory.save is not None:
        chat.save(config.memory.save)


class Conversation:
    """The messages of a chat, and the memories that have read them and the text before them."""

    def __init__(self, model: Any, tokenizer: Any, config: Any):
        from landmark.experiment.config.schema import memory_settings
        from landmark.experiment.evaluation.generation import prompt_texts, sampling_of
        from landmark.models.huggingface import LandmarkModel
        from landmark.reading.answering import Answering

        bare = getattr(model, "bare", None)
        if not isinstance(bare, LandmarkModel):
            raise UserError(
                "task=chat: is for a model of transformers that reads blocks: model=pretrained model.name=DIR"
            )
        self._answering, self._settings = Answering(bare, tokenizer.inner, local=config.eval.local), config.generate
        self._answering.prefixes.settings = vars(memory_settings(config))
        self._sampling = sampling_of(config, bare)
        ends = () if tokenizer.inner.chat_template else ("\nuser:",)  # else the model asks itself
        self._stop = *self._settings.stop, *ends
        self._about = config.model.name, config.memory.save
        self._before: list[int] = []
        self._messages: list[dict[str, str]] = []
        self._cache: Any = None
        self._loaded, self._given, self._starts = config.memory.loaded, config.prompt_file, (0,)
        if self._loaded:
            self._load()
        self._known = len(self._before)
        if config.prompt_file is not None:
            import torch

            for text in prompt_texts(config):
                self._before += self._answering.chats.text_ids(text, not self._before)
            with self._answering.prefixes.using(self._before) as self._cache, progress_bar("reading") as progress:
                rest = torch.tensor([self._before[self._cache.get_seq_length() :]])
                self._answering.read(rest, self._cache, progress=progress)
            self._given = config.prompt_file.as_read(self._answering.chats.decode(self._before[self._known :]))
        self._places = beside_memory(self._given, next(iter(self._loaded), None))

    def print_beginning(self) -> None:
        """Print the model, the text and how to leave, and the last turns of a chat that goes on, on standard error."""
        (model, saved), chats = self._about, self._answering.chats
        names = [self._given.name] if self._given is not None else []
        for folder in reversed(self._loaded):
            document = saved_document(folder, "")
            names.insert(0, Path(folder).name if document is None else document.name)
        text = f"{', '.join(filter(None, names))}, {len(self._before):,} tokens" if self._before else "none"
        print(f"model: {Path(str(model)).name}\ntext: {text}", file=sys.stderr)
        kept = f", and saves it in {saved}" if saved is not None else ""
        print(f"Ask a question. /help lists the commands; /quit or Ctrl-D ends the chat{kept}.", file=sys.stderr)
        if not chats.template:
            print("The model has no template for chats: it may go on with the text and not answer.", file=sys.stderr)
        for message in self._messages[-2 * SHOWN :]:
            said = " ".join(message["content"].split())
            said = f"{said[: LONGEST - 1]}…" if len(said) > LONGEST else said
            print(f"> {said}" if message["role"] == "user" else said, file=sys.stderr)

    def _load(self) -> None:
        prefixes, file = self._answering.prefixes, Path(self._loaded[0]) / CHAT
        self._cache = prefixes.model.new_memory(**prefixes.settings)
        self._cache.load(self._loaded)
        prefixes.add(self._cache)
        self._before = self._cache.ids[0].tolist()
        if len(self._loaded) > 1:  # chats among them are texts
            self._starts = self._cache.starts
        elif file.is_file():
            saved = read_json(file, {"before": int, "messages": list})
            self._before, self._messages = self._before[: saved["before"]], saved["messages"]

    def answer(self, question: str) -> None:
        """Print the answer as it is made. Raises UserError, and forgets the question, where there is none."""
        from landmark.reading.answering import Gone
        from landmark.reading.support import support

        answering, messages = self._answering, [*self._messages, {"role": "user", "content": question}]
        found, before = None, self._before
        with _interruptible() as gone, suppress(Gone):
            if self._settings.from_sources and before:
                found = self._found(messages, gone)
        if found is not None and found.text:  # it is made from them alone
            before = answering.chats.text_ids(found.text)
        if gone.is_set():
            print("[stopped]", file=sys.stderr)
            return
        ids = [*before, *answering.chats.ids(messages, not before, settings=self._settings.template)]
        answer = answering.new_answer(ids, True, self._stop)
        answer.nats = [] if found is not None else None
        with _interruptible() as gone, answering.prefixes.using(ids) as cache:
            self._cache = cache if before is self._before else self._cache
            try:
                for delta in answering.answer(ids, cache, answer, self._sampling, max(1, self._settings.tokens), gone):
                    print(delta.reasoning, end="", file=sys.stderr, flush=True)
                    print(delta.text, end="", flush=True)
            except Gone:
                print(" [stopped]", end="", file=sys.stderr)
        print()
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if found is not None:
            alone, measured = answering.chats.ids(messages, settings=self._settings.template), None
            with _interruptible() as gone, suppress(Gone):
                measured = support(answering, found, alone, answer, gone)
            _print_sources(found.sources, measured)
        elif self._settings.sources:
            self.print_sources(self._settings.sources)

    def _found(self, messages: list[dict[str, str]], gone: threading.Event) -> "Found":
        """The passages for an answer, in a memory that has read the text and nothing but a part of these messages."""
        import torch

        answering = self._answering
        ids = [*self._before, *answering.chats.ids(messages, begins=False, settings=self._settings.template)]
        with answering.prefixes.using(ids) as self._cache:
            if rest := self._before[self._cache.get_seq_length() :]:
                answering.read(torch.tensor([rest]), self._cache, gone)
            return self._sources(messages, self._settings.sources, gone, alone=True)

    def print_sources(self, most: int) -> None:
        """Print the passages behind the last answer. Raises UserError where there is none, or no text before it."""
        from landmark.reading.answering import Gone

        check_value("/sources", most, {"least": 1, "most": MOST_SOURCES})
        if not self._messages or not self._before:
            raise UserError("/sources: the passages behind an answer are of prompt_file or memory.load: ask first")
        with _interruptible() as gone, suppress(Gone):
            _print_sources(self._sources(self._messages[:-1], most, gone).sources)

    def _sources(
        self, messages: list[dict[str, str]], most: int, gone: threading.Event, alone: bool = False
    ) -> "Found":
        """The passages behind the answer to these messages. alone: as of `find`. Raises Gone."""
        from landmark.reading.sources import NULL, find

        chats, before = self._answering.chats, self._before
        both = ([*messages[:-1], each] for each in (messages[-1], {**messages[-1], "content": NULL}))
        ids, null = (chats.ids(each, begins=False, settings=self._settings.template) for each in both)
        documents = documents_read(chats.decode, before, self._given, self._loaded, self._starts, self._known)
        return find(self._answering, self._cache, documents, before, ids, null, most, alone, gone)

    def save(self, folder: str) -> None:
        """Write the memory and the messages, for `memory.load`."""
        if self._cache is not None:
            content = {"before": len(self._before), "messages": self._messages}
            self._cache.save(folder, {CHAT: json.dumps(content).encode(), **self._places})
            print(f"saved in {folder}", file=sys.stderr)


def _asked() -> str | None:
    """The next line of the input; None: it has ended. On a terminal Ctrl-C drops the line that was begun."""
    is_terminal = sys.stdin.isatty()
    print("> " if is_terminal else "", end="", file=sys.stderr, flush=True)
    try:
        return input()
    except (EOFError, KeyboardInterrupt) as end:
        print(file=sys.stderr)
        if is_terminal and isinstance(end, KeyboardInterrupt):
            print("/quit or Ctrl-D ends the chat", file=sys.stderr)
            return ""
        return None


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, in place of ending the program."""
    gone = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: gone.set())
    try:
        yield gone
    finally:
        signal.signal(signal.SIGINT, before)


def inspect(command: Command) -> None:
    """Write the page and print its path."""
    from landmark.experiment.inspector.page import inspect_text

    config, inputs = with_document(command.only_config()), command.runner.inputs
    folder = folder_of(config, inputs)
    model, tokenizer = load_trained(config, folder, inputs)
    with progress_bar("reading") as progress:
        print(inspect_text(model, tokenizer, config, folder.name, command.runner.output, progress))
