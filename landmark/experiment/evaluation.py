"""Evaluating a row: perplexity or a probe on text, answers to prompts, or documents found, as its settings say."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from landmark.config import Config
from landmark.experiment.inputs import Inputs
from landmark.experiment.jobs import Job, read_run
from landmark.experiment.named_runs import has_weights
from landmark.experiment.processor import set_up_processor
from landmark.utils.errors import UserError
from landmark.utils.extensions import hook
from landmark.utils.progress import ProgressBar

if TYPE_CHECKING:
    from landmark.data import Tokenizer
    from landmark.data.stream import Stream
    from landmark.models import LanguageModel


def evaluate_row(job: Job, inputs: Inputs) -> dict[str, Any]:
    """The results of a row whose run is trained."""
    from landmark.data import SyntheticCorpus, task_corpus
    from landmark.data.mqar import Mqar
    from landmark.evaluation import evaluate, evaluate_mqar, evaluate_probe, evaluate_recall
    from landmark.models import decoder_config, load

    config, tokenizer, corpus = job.config, inputs.tokenizer(job.config), inputs.corpus(job.config)
    set_up_processor(config)
    shape = decoder_config(config.model, tokenizer, config.cmt.enabled)
    model = load(job.run.folder, shape, evaluation_device(config), config.model.dtype or "float32")
    recalls_pairs = isinstance(corpus, SyntheticCorpus) and isinstance(corpus.data, Mqar)
    with ProgressBar(job.name, "tok" if config.eval.retriever is None else " texts") as progress:
        if config.eval.task is not None:
            corpus = task_corpus(config, cast("Stream", corpus.split(config.eval.split)), tokenizer)
        if isinstance(corpus, SyntheticCorpus):
            return (evaluate_mqar if recalls_pairs else evaluate_recall)(model, corpus, tokenizer, config, progress)
        if config.eval.retriever is not None:
            from landmark.evaluation.sentences import evaluate_sentences

            streams = {split: corpus.split(split) for split in ("validation", config.eval.split)}
            return evaluate_sentences(model, streams, tokenizer, config, progress)
        measure = hook(config, "evaluate", evaluate if config.eval.probe is None else evaluate_probe)
        results = measure(model, corpus.split(config.eval.split), tokenizer, config, progress)
    # One segment has no standard error.
    undefined = {key: None for key, value in results.items() if key.endswith("_se") and not math.isfinite(value)}
    return results | undefined


def evaluation_device(config: Config) -> str:
    """Device of an evaluation. Raises UserError where a GPU is asked for and there is none."""
    import torch

    if config.trainer.accelerator == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if config.trainer.accelerator in ("gpu", "cuda"):
        raise UserError(f"trainer={config.trainer.name}: no GPU was found, use trainer=cpu")
    return "cpu"


def load_trained(config: Config, folder: Path, inputs: Inputs) -> "tuple[LanguageModel, Tokenizer]":
    """The model in a run's folder, or in that which `model.as_is` names, and its tokenizer, to read or generate with.

    Raises UserError where the run is not trained yet, or has another tokenizer.
    """
    from landmark.models import decoder_config, load

    tokenizer = inputs.tokenizer(config)
    if not has_weights(folder):
        raise UserError(f"{folder} has no trained model: train it with task=train, or name another run=NAME")
    set_up_processor(config)
    shape = decoder_config(config.model, tokenizer, config.cmt.enabled) if config.model.as_is else None
    if shape is None and (stored := read_run(folder)["tokenizer"]) != tokenizer.hash:
        raise UserError(
            f"{folder} was trained with another tokenizer ({stored[:10]}…) than tokenizer={tokenizer.name}: "
            "set tokenizer= to the one it was trained with"
        )
    return load(folder, shape, evaluation_device(config), config.model.dtype or "float32"), tokenizer
