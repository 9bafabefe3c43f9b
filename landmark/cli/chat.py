"""A chat with a pretrained model in the terminal (`task=chat`)."""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from landmark.cli.question import folder_of_model, opened, print_lacks, print_sources, sampling_of, with_document
from landmark.documents import saved_document
from landmark.experiment.config import Config
from landmark.experiment.config.schema import MOST_SOURCES
from landmark.utils.errors import UserError
from landmark.utils.progress import progress_bar
from landmark.utils.setting import check_value

if TYPE_CHECKING:
    from landmark.reading.session import Session
    from landmark.reading.sources import Source
    from landmark.reading.support import Support

HELP = """\
/sources    the three passages behind the last answer; /sources 5: five
/quit       ends the chat, as Ctrl-D does; with memory.save it is kept
/help       these lines
Ctrl-C      stops an answer; other lines are asked"""
SHOWN, LONGEST = 2, 300  # last turns of a chat that goes on, and characters of each message


def chat(config: Config) -> None:
    """A chat with the model that `model.name` names."""
    config = with_document(config)
    check_model(config)
    converse(opened(config, folder_of_model(config)), config)


def check_model(config: Config) -> None:
    """Raise UserError where a model is no reader of blocks."""
    if config.model.name is None or config.model.kind != "landmark":
        raise UserError("task=chat: is for a model of transformers that reads blocks: model=pretrained model.name=DIR")


def converse(session: "Session", config: Config) -> None:
    """Answer each line of standard input. Ctrl-C ends an answer, `/quit` or the input's end the chat, whose memory is
    saved. Lines that begin with a word behind a slash are commands (HELP), and no part of the chat.
    """
    if hasattr(sys.stdin, "reconfigure"):  # bytes that are no UTF-8 are found in each question, whatever the locale is
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # pyright: ignore[reportAttributeAccessIssue]
    chat = Conversation(session, config)
    chat.print_beginning()
    print_lacks(config)
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
            print_sources(found)

    def print_sources(self, most: int) -> None:
        """Print the passages behind the last answer. Raises UserError where there is none, or no text before it."""
        from landmark.reading.answering import Gone
        from landmark.reading.session import Prompt

        check_value("/sources", most, {"least": 1, "most": MOST_SOURCES})
        if not self.session.messages or not self.session.ids:
            raise UserError("/sources: the passages behind an answer are of prompt_file or memory.load: ask first")
        prompt = Prompt(self.session.messages[:-1], settings=self._settings.template)
        with _interruptible() as gone, suppress(Gone):
            print_sources(self.session.passages(prompt, most, gone))


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
