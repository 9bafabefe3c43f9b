"""A trained model reads a text: `generate` goes on from it, `chat` talks of it, `inspect` shows its blocks."""

import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.cli.command import Command
from landmark.documents import Document, document_of, joined, read_document, saved_document, saved_lacks
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
    from landmark.reading.session import Session
    from landmark.reading.sources import Source
    from landmark.reading.support import Support

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as files of safetensors name them
HELP = """\
/sources    the three passages behind the last answer; /sources 5: five
/quit       ends the chat, as Ctrl-D does; with memory.save it is kept
/help       these lines
Ctrl-C      stops an answer; other lines are asked"""
SHOWN, LONGEST = 2, 300  # last turns of a chat that goes on, and characters of each message


def generate(command: Command) -> None:
    """Print the text on standard output; its reasoning, and then a line of statistics, on standard error."""
    config, inputs = with_document(command.only_config()), command.runner.inputs
    folder = folder_of(config, inputs)
    config = with_dtype(config, folder)
    from landmark.experiment.evaluation.generation import GenerationStatistics, generate_text

    model, tokenizer = load_trained(config, folder, inputs)
    statistics, found = GenerationStatistics(), list["Source | Support"]()
    with progress_bar("reading") as progress:
        if hasattr(model, "bare"):
            pieces = _answered(opened(model, tokenizer, config), config, statistics, found, progress)
        else:
            pieces = (("", text) for text in generate_text(model, tokenizer, config, statistics, progress))
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
        _print_sources(found)
    _print_lacks(config)
    print(_summary(statistics), file=sys.stderr)


def opened(model: Any, tokenizer: Any, config: Config) -> "Session":
    """A session with a model of transformers, which has read the memories that `memory.load` names."""
    from landmark.experiment.config.schema import memory_settings
    from landmark.reading.answering import Answering
    from landmark.reading.session import Session

    answering = Answering(model.bare, tokenizer.inner, local=config.eval.local)
    if model.config.kind == "landmark":
        answering.prefixes.settings = vars(memory_settings(config))
    elif config.memory.load is not None or config.memory.save is not None:
        raise UserError("memory.load, memory.save: only a landmark model has a memory to save")
    session = Session(answering)
    return session.load(config.memory.loaded) if config.memory.loaded else session


def _answered(
    session: "Session",
    config: Config,
    statistics: "GenerationStatistics",
    found: "list[Source | Support]",
    progress: Callable[[int, int], None],
) -> Iterator[tuple[str, str]]:
    """Read `prompt_file`, save, and answer `prompt`: pieces of reasoning and text. found: gets the passages, and how
    far the answer is in them.
    """
    from landmark.experiment.evaluation.generation import sampling_of
    from landmark.reading.answer import Delta
    from landmark.reading.answering import Progress, finished
    from landmark.reading.session import Passages, Prompt
    from landmark.reading.support import Support

    given, document, before = config.generate, config.prompt_file, len(session.ids)
    is_asked, template = config.prompt is not None, given.template if session.chats.template else None
    prompt = Prompt(text=config.prompt or "", is_plain=True)
    if config.prompt is not None and template is not None:
        prompt = Prompt.question(config.prompt, template)
    if document is not None and (is_asked or config.memory.save is not None):
        finished(session.reading(document), progress)
        if config.memory.save is not None:
            session.save(config.memory.save)
    elif document is not None:
        is_asked, prompt = True, Prompt(text=document.text, is_plain=True)
    statistics.tokens_read = len(session.ids) - before
    if is_asked:
        exchange, sampling = session.exchange(prompt, given.stop), sampling_of(config, session.answering.model)
        statistics.tokens_read += len(exchange.ids)
        for event in session.ask(exchange, sampling, given.tokens, given.sources, given.from_sources):
            if isinstance(event, Progress):
                progress(*event)
            elif isinstance(event, Passages):
                found += event.found
            elif isinstance(event, Support):
                found.append(event)
            elif isinstance(event, Delta):
                statistics.count(len(exchange.answer.tokens))
                yield event.reasoning, event.text
    if not statistics.tokens_generated:
        statistics.count(0)
    statistics.memory = session.stats


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


def _print_sources(found: "Sequence[Source | Support]") -> None:
    """On standard error, as the answer alone is on standard output: passages, and how far the answer is in them."""
    from landmark.reading.support import Support

    for number, each in enumerate(found, 1):
        if isinstance(each, Support):
            print(f"is the answer there? {each.said} ({each.score:.2f})", file=sys.stderr)
            continue
        if each.kind == "whole":
            print(f"no passage was found: the answer is made from the whole text {each.document}", file=sys.stderr)
            continue
        place = ", ".join(filter(None, (each.document, each.place)))
        said = "the beginning of the text" if each.kind == "head" else f"{each.share:.0%}"
        print(f"[{number}] {place}, characters {each.start} to {each.end} ({said})", file=sys.stderr)
        print(textwrap.indent(each.text, "    "), file=sys.stderr)
    if not found:
        print("no passage of the text was found", file=sys.stderr)


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
    model, tokenizer = load_trained(config, folder, inputs)
    if getattr(model, "bare", None) is None or model.config.kind != "landmark":
        raise UserError("task=chat: is for a model of transformers that reads blocks: model=pretrained model.name=DIR")
    chat = Conversation(opened(model, tokenizer, config), config)
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
    if config.memory.save is not None and chat.session.has_read:
        chat.session.save(config.memory.save)
        print(f"saved in {config.memory.save}", file=sys.stderr)


class Conversation:
    """The messages of a chat, and the session that has read them and the text before them."""

    def __init__(self, session: "Session", config: Config):
        from landmark.experiment.evaluation.generation import sampling_of
        from landmark.reading.answering import finished

        self.session, self._settings = session, config.generate
        self._sampling = sampling_of(config, session.answering.model)
        self._stop = *self._settings.stop, *session.chats.ends
        self._about = config.model.name, config.memory.save, config.prompt_file, config.memory.loaded
        if config.prompt_file is not None:
            with progress_bar("reading") as progress:
                finished(session.reading(config.prompt_file), progress)

    def print_beginning(self) -> None:
        """Print the model, the text and how to leave, and the last turns of a chat that goes on, on standard error."""
        (model, saved, given, loaded), session = self._about, self.session
        names = [given.name] if given is not None else []
        for folder in reversed(loaded):
            document = saved_document(folder, "")
            names.insert(0, Path(folder).name if document is None else document.name)
        text = f"{', '.join(filter(None, names))}, {len(session.ids):,} tokens" if session.ids else "none"
        print(f"model: {Path(str(model)).name}\ntext: {text}", file=sys.stderr)
        kept = f", and saves it in {saved}" if saved is not None else ""
        print(f"Ask a question. /help lists the commands; /quit or Ctrl-D ends the chat{kept}.", file=sys.stderr)
        if not session.chats.template:
            print("The model has no template for chats: it may go on with the text and not answer.", file=sys.stderr)
        for message in session.messages[-2 * SHOWN :]:
            said = " ".join(message["content"].split())
            said = f"{said[: LONGEST - 1]}…" if len(said) > LONGEST else said
            print(f"> {said}" if message["role"] == "user" else said, file=sys.stderr)

    def answer(self, question: str) -> None:
        """Print the answer as it is made. Raises UserError, and forgets the question, where there is none."""
        from landmark.reading.answer import Delta
        from landmark.reading.answering import Gone
        from landmark.reading.session import Began, Passages, Prompt
        from landmark.reading.support import Support

        session, given, found = self.session, self._settings, list["Source | Support"]()
        messages, begun = [*session.messages, {"role": "user", "content": question}], False
        exchange = session.exchange(Prompt(messages, settings=given.template), self._stop)
        most, passages = max(1, given.tokens), given.sources if session.ids else 0
        with _interruptible() as gone:
            try:
                for event in session.ask(exchange, self._sampling, most, passages, given.from_sources, gone):
                    if isinstance(event, Delta):
                        print(event.reasoning, end="", file=sys.stderr, flush=True)
                        print(event.text, end="", flush=True)
                        if event.finish:
                            print()
                    elif isinstance(event, Passages):
                        found += event.found
                    elif isinstance(event, Support):
                        found.append(event)
                    elif isinstance(event, Began):
                        begun = True
            except Gone:
                print(" [stopped]" if begun else "[stopped]", file=sys.stderr, end="" if begun else "\n")
                if not begun:
                    return
                print()
        session.messages = [*messages, {"role": "assistant", "content": exchange.answer.text}]
        if session.ids and given.finds:
            _print_sources(found)

    def print_sources(self, most: int) -> None:
        """Print the passages behind the last answer. Raises UserError where there is none, or no text before it."""
        from landmark.reading.answering import Gone
        from landmark.reading.session import Prompt

        check_value("/sources", most, {"least": 1, "most": MOST_SOURCES})
        if not self.session.messages or not self.session.ids:
            raise UserError("/sources: the passages behind an answer are of prompt_file or memory.load: ask first")
        prompt = Prompt(self.session.messages[:-1], settings=self._settings.template)
        with _interruptible() as gone, suppress(Gone):
            _print_sources(self.session.passages(prompt, most, gone))


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
