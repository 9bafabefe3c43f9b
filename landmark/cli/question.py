"""A question to a pretrained model, in the terminal (`task=generate`). No row, corpus or record of an experiment has a
part in it.
"""

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from landmark.documents import Document, concatenated, document_of, read_document, saved_lacks
from landmark.experiment.config import Config
from landmark.experiment.config.checks import check_settings, check_task, unused
from landmark.experiment.config.command_line import started
from landmark.experiment.config.rows import parse
from landmark.experiment.config.schema import memory_settings
from landmark.models.config import decoder_config
from landmark.utils.collection import without_collection
from landmark.utils.errors import UserError
from landmark.utils.files import check_named, read_json
from landmark.utils.hardware import device_of, has_units, leave_busy_cores, set_up_cpu
from landmark.utils.progress import progress_bar

if TYPE_CHECKING:
    from landmark.models.huggingface.model import LandmarkSettings
    from landmark.models.sampling import Sampling
    from landmark.reading.session import Session
    from landmark.reading.sources import Source
    from landmark.reading.support import Support

Progress = Callable[[int, int], None]
NO_MEMORY = "memory.load, memory.save: only a landmark model has a memory to save"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as files of safetensors name them


@dataclass(frozen=True)
class Question:
    """What a command line asks of a pretrained model."""

    config: Config
    overrides: list[str]
    is_experiment: ClassVar[bool] = False
    objective: ClassVar[None] = None
    records: ClassVar[tuple[dict[str, Any], ...]] = ()

    @staticmethod
    def is_asked_by(config: Config) -> bool:
        """Whether a configuration asks one: not a run that was trained here, nor a row of an experiment."""
        of_rows = config.rows, config.row, config.seeds, config.start, config.start_run, config.compare, config.run
        is_named = bool(config.model.as_is) and config.model.name is not None
        return config.task in ("chat", "generate") and is_named and not any(each not in (None, {}) for each in of_rows)

    @classmethod
    def of(cls, config: Config, overrides: list[str]) -> "Question":
        """Raises UserError where a setting makes no sense, or one that was typed has no effect."""
        check_task(config)
        check_settings(config)
        decoder_config(config.model, cmt=config.cmt.enabled)
        if config.model.kind == "landmark":
            memory_settings(config)
        question = cls(config, overrides)
        if started().number is None and question.unused:  # a sweep has checked all jobs together
            raise question.unused
        return question

    @property
    def first_config(self) -> Config:
        """As of a command with rows."""
        return self.config

    @property
    def unused(self) -> UserError | None:
        """An error that names an override without an effect; None where each has one."""
        keys = [each.key_or_group for each in parse(self.overrides)]
        of_rows = [key for key in keys if key.startswith(("train.", "data.", "eval.")) and key != "eval.local"]
        if of_rows:
            return UserError(f"{of_rows[0]} has no effect here: a question trains nothing, and reads no corpus")
        return unused(keys, [self.config])


@dataclass
class GenerationStatistics:
    """Time and memory of a generation. seconds_reading: until the first token. memory: its counters at the end. found:
    passages, and how far the answer is in them.
    """

    tokens_read: int = 0
    seconds_reading: float = 0.0
    tokens_generated: int = 0
    seconds_generating: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)
    found: "list[Source | Support]" = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def count(self, tokens: int) -> None:
        """So many tokens are generated now; 0: the prompt is read."""
        now = time.perf_counter() - self.started
        if self.tokens_generated == 0:
            self.seconds_reading = now
        self.seconds_generating, self.tokens_generated = now - self.seconds_reading, tokens


def generate(config: Config) -> None:
    """Print the answer of the model that `model.name` names."""
    config = with_document(config)
    print_answer(opened(config, folder_of_model(config)), config)


def print_answer(session: "Session", config: Config) -> None:
    """Read, save and answer as the settings say. config: of `with_document`."""
    statistics = GenerationStatistics()
    print_text(lambda progress: answered(session, config, statistics, progress), config, statistics)


def print_text(
    read: Callable[[Progress], Iterator[tuple[str, str]]], config: Config, statistics: GenerationStatistics
) -> None:
    """Print the text on standard output; its reasoning, and then what was found and a line of statistics, on standard
    error. read: gives pieces of reasoning and text, and fills the statistics.
    """
    with progress_bar("reading") as progress:
        pieces = read(progress)
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
        print_sources(statistics.found)
    print_lacks(config)
    print(_summary(statistics), file=sys.stderr)


@without_collection()
def folder_of_model(config: Config) -> Path:
    """The folder, or the .gguf file, of the model that `model.name` names, which may be on the hub."""
    check_named(name := str(config.model.name))
    from landmark.models.huggingface.folders import folder_of

    return folder_of(name)


@without_collection()
def opened(config: Config, folder: Path) -> "Session":
    """A session with the model in a folder. Raises UserError where there is none, or one that does not read as the
    settings say.
    """
    config = with_dtype(config, folder)
    import torch
    from transformers.utils import logging

    from landmark.models.huggingface.model import LandmarkModel
    from landmark.models.huggingface.safe_loading import check_folder, open_tokenizer
    from landmark.models.huggingface.wrapping import attach, open_as_saved, without_landmarks
    from landmark.utils.weights import check_finite

    logging.disable_progress_bar()  # the program has its own
    check_folder(folder)
    given, file, device = config.model, config.tokenizer.file, _ready_device(config)
    tokenizer = open_tokenizer(folder if file in (None, given.name) else file)
    model: Any = open_as_saved(folder, given.bits, dtype=getattr(torch, given.reading_dtype), local_files_only=True)
    if given.kind == "landmark" and not isinstance(model, LandmarkModel):
        model = attach(model, without_landmarks(given.block_size or 0))
    elif isinstance(model, LandmarkModel):
        _check_blocks(model.landmarks, config, folder)
    check_finite(model, folder)
    return session_of(model.to(device), tokenizer, config)


def _check_blocks(saved: "LandmarkSettings", config: Config, folder: Path) -> None:
    """Raise UserError where a model was saved to read otherwise than the settings say."""
    if saved.token is not None:
        raise UserError(
            f"{folder} was trained with landmarks, and model=pretrained reads models without: name its run="
        )
    if config.model.kind != "landmark":
        raise UserError(f"{folder} reads blocks: name it with model=pretrained")
    if saved.block_size != config.model.block_size:
        raise UserError(
            f"model.block_size={config.model.block_size}: {folder} reads blocks of {saved.block_size} tokens"
        )


def _ready_device(config: Config) -> str:
    """The device that reads, made ready."""
    import torch

    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    elif said := leave_busy_cores():
        print(said, file=sys.stderr)
    if (device := device_of(config.trainer.accelerator)) == "cpu":
        set_up_cpu()
    return device


def session_of(model: Any, tokenizer: Any, config: Config) -> "Session":
    """A session with a model of transformers, which has read the memories that `memory.load` names."""
    from landmark.reading.answering import Answering
    from landmark.reading.session import Session

    answering = Answering(model, tokenizer, local=config.eval.local)
    if config.model.kind == "landmark":
        answering.prefixes.settings = vars(memory_settings(config))
    elif config.memory.load is not None or config.memory.save is not None:
        raise UserError(NO_MEMORY)
    session = Session(answering)
    return session.load(config.memory.loaded) if config.memory.loaded else session


def answered(
    session: "Session",
    config: Config,
    statistics: GenerationStatistics,
    progress: Progress,
) -> Iterator[tuple[str, str]]:
    """Read `prompt_file`, save, and answer `prompt`: pieces of reasoning and text."""
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
                statistics.found += event.found
            elif isinstance(event, Support):
                statistics.found.append(event)
            elif isinstance(event, Delta):
                statistics.count(len(exchange.answer.tokens))
                yield event.reasoning, event.text
    if not statistics.tokens_generated:
        statistics.count(0)
    statistics.memory = session.stats


def sampling_of(config: Config, model: Any = None) -> "Sampling":
    """How tokens are chosen. model: of transformers, whose recommendations count where `generate.defaults=model`."""
    from landmark.models.sampling import Sampling

    given = config.generate
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
    recommended = model.generation_config if model is not None and given.defaults == "model" else None
    return Sampling.from_config(recommended, **{name: getattr(given, name) for name in names}, seed=config.seed)


def print_lacks(config: Config) -> None:
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
    return replace(config, prompt_file=concatenated(documents))


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
    is_open = given is None and read is None and config.model.reading_dtype == "float32"
    if is_open and _is_half(folder) and has_units(device_of(config.trainer.accelerator)):
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


def print_sources(found: "Sequence[Source | Support]") -> None:
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


def _summary(statistics: GenerationStatistics) -> str:
    parts = [f"{statistics.tokens_read:,} tokens read in {statistics.seconds_reading:.1f} s"]
    if statistics.tokens_generated > 1:
        each = statistics.seconds_generating / (statistics.tokens_generated - 1)
        parts.append(f"{statistics.tokens_generated:,} generated, {1e3 * each:.1f} ms each")
    if "blocks_kept" in statistics.memory:
        blocks, kept = statistics.memory["blocks_kept"], statistics.memory["bytes_kept"] / 1e6
        parts.append(f"memory of {blocks:,} blocks, {kept:,.1f} MB")
    return "; ".join(parts)
