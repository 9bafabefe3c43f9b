"""Trainings that processes do together."""

from contextlib import nullcontext, suppress

from landmark.training import train as train_model
from tests.training.training_case import TOKENIZER, fails, identity_of, make_config, make_corpus, make_model


def train(folder, kind, stop=None, strategy="auto", **changes):
    """In float64, so that sums in another order differ in the fifteenth digit and not the sixth."""
    config = make_config(kind, **{"steps": 24, "precision": "64-true"} | changes)
    config.trainer.strategy = strategy
    model = make_model(config)
    if config.train.precision != "bf16-mixed":
        model.double()  # a checkpoint's weights are read before Lightning makes them float64
    (folder / "run").mkdir(parents=True, exist_ok=True)
    loggers = [] if stop is None else [fails(stop)]
    with nullcontext() if stop is None else suppress(KeyError):
        corpus = make_corpus(folder / "data")
        train_model(model, corpus, TOKENIZER, config, folder / "run", loggers, identity_of(config, corpus))


def train_all(root, plan):
    """One after the other: {"ddp/landmark": {"kind": "landmark", "stop": None}, …}.

    `stop`: the step at which an error stops it; what stands beside it changes the settings of the training.
    """
    for name, case in plan.items():
        train(root / name, **case)
