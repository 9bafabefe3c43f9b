"""Preparing text, against tiktoken alone; assembling a batch, against the training step that uses it."""

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks.exactness import Inexact
from benchmarks.report import Report, Target, compare, milliseconds, per_second
from benchmarks.settings import Options, Say
from benchmarks.timing import interleave
from benchmarks.training import LANDMARK, MODELS, configuration, training_step, windows
from landmark.experiment.data import SPLITS, load_tokenizer, prepare
from landmark.experiment.data.sources import Source, open_source
from landmark.utils.hardware import cores

TIKTOKEN, PREPARATION = "tiktoken", "landmark.experiment.data.prepare"
STEP, ASSEMBLY = "training step", "batch assembly"


def run(options: Options, say: Say) -> Report:
    assembly = assembling(options, say)
    if options.ranks is None:
        return Report(assembly.rows, ["Tokenising was left out: it needs GPT-2's ranks file, --ranks FILE."])
    return Report([*assembly.rows, *tokenising(options, options.ranks, say).rows])


def check_files(options: Options) -> None:
    """Raise UserError before anything is measured if the ranks or the text cannot be read."""
    if options.ranks is not None:
        load_tokenizer("gpt2", options.ranks)
        open_text(options)


def open_text(options: Options) -> tuple[str, Source]:
    corpus = "pg19" if options.text is not None and (options.text / "train").is_dir() else "stdlib"
    return corpus, open_source(corpus, options.text)


def assembling(options: Options, say: Say) -> Report:
    say("nano: batch assembly")
    config = configuration("nano", MODELS[LANDMARK], options.quick)
    batches = map(windows(config).batch, count())
    functions = {STEP: training_step(config), ASSEMBLY: lambda: next(batches)}
    seconds = interleave(functions, rounds=3 if options.quick else 15)
    setting = f"nano, {config.train.batch_size} × {config.train.length}, {LANDMARK}"
    return Report(compare("data", setting, "ms", milliseconds(seconds), STEP, {ASSEMBLY: Target("≤", 0.02)}))


def tokenising(options: Options, ranks: Path, say: Say) -> Report:
    """Compare both on the same documents and number of threads.

    The time of our preparation includes reading files, counting words, hashing and writing; tiktoken encodes texts that
    are in memory already.
    """
    corpus, source = open_text(options)
    texts = [document.text for split in SPLITS for document in source.documents(split) if document.text]
    say(f"tokenising {sum(map(len, texts)) / 1e6:.1f} M characters of {corpus}")
    encode = encoding(ranks).encode_ordinary_batch
    tokens = sum(map(len, encode(texts, num_threads=cores())))
    with tempfile.TemporaryDirectory() as folder:
        ours = preparing(corpus, options.text, ranks, Path(folder))
        if (found := ours()) != tokens:
            raise Inexact(f"data: {found} tokens, tiktoken has {tokens}")
        functions = {TIKTOKEN: lambda: encode(texts, num_threads=cores()), PREPARATION: ours}
        seconds = interleave(functions, rounds=7, warmup=0)
    speed = per_second(tokens, seconds)
    setting = f"{corpus}, {tokens / 1e6:.1f} M GPT-2 tokens"
    return Report(compare("data", setting, "tokens/s", speed, TIKTOKEN, {PREPARATION: Target("≥", 0.9)}))


def encoding(ranks: Path):
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe
    from tiktoken_ext.openai_public import r50k_pat_str

    pieces = load_tiktoken_bpe(str(ranks))
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=pieces, special_tokens={})


def preparing(corpus: str, text: Path | None, ranks: Path, folder: Path) -> Callable[[], int]:
    """A function that prepares the corpus again at each call and returns its tokens, without ends of text."""
    tokenizer, calls = load_tokenizer("gpt2", ranks), count()

    def prepared() -> int:
        cache = folder / str(next(calls))
        made = prepare(corpus, tokenizer, cache, path=text, progress=False)
        return sum(each["tokens"] - each["documents"] for each in made.manifest["splits"].values())

    return prepared
