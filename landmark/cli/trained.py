"""A run of the experiments reads a text in the terminal: it goes on from it, talks of it, or shows its blocks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from landmark.cli import chat as chats
from landmark.cli.command import Command
from landmark.cli.question import (
    NO_MEMORY,
    GenerationStatistics,
    Progress,
    opened,
    print_answer,
    print_text,
    sampling_of,
    session_of,
    with_document,
    with_dtype,
)
from landmark.documents import beside_memory
from landmark.experiment.config import Config
from landmark.experiment.runs.jobs import folder_of
from landmark.experiment.runs.runner import load_trained
from landmark.utils.errors import UserError
from landmark.utils.progress import progress_bar

if TYPE_CHECKING:
    from landmark.experiment.data import Tokenizer
    from landmark.models import LanguageModel
    from landmark.reading.session import Session


def generate(command: Command) -> None:
    """Print what follows `prompt_file` and `prompt`, or the answer of a model of transformers."""
    config = with_document(command.only_config())
    if config.model.name is not None:
        print_answer(_session(command, config), config)
        return
    model, tokenizer = load_trained(config, folder_of(config, command.runner.inputs), command.runner.inputs)
    statistics = GenerationStatistics()
    print_text(lambda progress: _continued(model, tokenizer, config, statistics, progress), config, statistics)


def chat(command: Command) -> None:
    """Answer each line of standard input."""
    config = with_document(command.only_config())
    chats.check_model(config)
    chats.converse(_session(command, config), config)


def inspect(command: Command) -> None:
    """Write the page and print its path."""
    from landmark.experiment.inspector.page import inspect_text

    config, inputs = with_document(command.only_config()), command.runner.inputs
    folder = folder_of(config, inputs)
    model, tokenizer = load_trained(config, folder, inputs)
    with progress_bar("reading") as progress:
        print(inspect_text(model, tokenizer, config, folder.name, command.runner.output, progress))


def _session(command: Command, config: Config) -> "Session":
    """A session with a model of transformers: that of a row which trains nothing, or one that was trained."""
    folder = folder_of(config, inputs := command.runner.inputs)
    if config.model.as_is:
        return opened(config, folder)
    model, tokenizer = load_trained(config := with_dtype(config, folder), folder, inputs)
    return session_of(cast(Any, model).bare, cast(Any, tokenizer).inner, config)


def _continued(
    model: "LanguageModel", tokenizer: "Tokenizer", config: Config, statistics: GenerationStatistics, progress: Progress
) -> Iterator[tuple[str, str]]:
    """The text that follows `prompt_file`, as a Document, and `prompt`, piece by piece, each with no reasoning.

    Where a memory can be saved, both are read in separate parts, so a saved memory of the file gives the same text.
    Raises UserError as `Memory.load`, `Memory.save` and `LanguageModel.stream`.
    """
    from landmark.experiment.evaluation.measurement import new_memory
    from landmark.experiment.inspector.page import prompt_texts
    from landmark.reading.answer import Answer

    memory, given, most = new_memory(model, config), config.generate, config.generate.tokens
    has_blocks, loaded, saved = model.config.kind == "landmark", config.memory.loaded, config.memory.save
    if not has_blocks and (config.memory.load is not None or saved is not None):
        raise UserError(NO_MEMORY)
    if len(loaded) > 1:
        raise UserError("memory.load: only memories of a model of transformers are asked together, name one folder")
    if loaded:
        memory.load(loaded[0], next(model.parameters()).device)
    parts = [tokenizer.encode(text).tolist() for text in prompt_texts(config)]
    statistics.tokens_read = sum(map(len, parts))
    reading = {"local": config.eval.local, "memory": memory, "progress": progress}
    if has_blocks and config.prompt_file is not None and (len(parts) > 1 or saved):
        model.generate([parts.pop(0)], 0, **reading)
        if saved is not None:
            memory.save(saved, beside_memory(config.prompt_file, next(iter(loaded), None)))
    if parts:
        ids = [token for part in parts for token in part]
        answer = Answer(lambda tokens: tokenizer.written(tokens).decode("utf-8", "replace"), given.stop)
        drawing = {"sampling": sampling_of(config), "stop": [tokenizer.eot]}
        for (token,) in model.stream([ids], most, **drawing, **reading):
            piece = answer.add(token, is_last=len(answer.tokens) + 1 >= most)
            statistics.count(len(answer.tokens))
            yield "", piece.text
            if answer.finish is not None:
                break
        else:
            yield "", answer.add(None).text
    statistics.memory = memory.stats if has_blocks else {}
