"""Every setting changes a run or a row, or is refused, or is one of those that decide no number: nothing is ignored."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hydra.errors import HydraException

from landmark.experiment.config import to_config
from landmark.experiment.config.rows import Composer, select
from landmark.experiment.runs.identity import digest, row_settings, run_settings
from landmark.experiment.runs.jobs import check
from landmark.memory.landmarks.settings import MemorySettings
from landmark.utils.errors import UserError
from tests.configurations import compose_conf

BASES = """
model=landmark
model=transformer
model=transformer_xl
model=landmark cmt=on
data=passkey model=landmark eval.length=300
model=landmark eval.task=copy eval.length=300
model=landmark eval.task=vt
model=landmark model.masked=true
model=pretrained model.name=x
model=pretrained_base model.name=x
model=pretrained_landmark model.name=x
"""
# They decide no number, are the text or its tokenizer, whose hashes identities have, name the weights, or are budgets
# that commands give to rows of all kinds.
OTHERS = """
name about task run trial figure output logger trainer prompt prompt_file memory.load memory.save memory.tier data.name
data.path data.cache data.max_documents tokenizer model.name eval.batch_size train.checkpoint_every train.log_every
eval.span eval.tokens eval.prompts eval.generated start train.validate_every train.validate_batches train.micro_batch
generate teach start_run
"""
# Of trainings: a command may have rows of models that are trained and of others.
OF_TRAININGS = "train. trainer. data.repeats data.tasks data.passkeys model.lora_rank"
OF_PASS_KEYS = ("data.needles",)  # of which a corpus has a hash too
ALWAYS = {"model.kind": ["landmark", "transformer", "transformer_xl"], "data.configs": ["[x]"]}
_CHOICES = {item.metadata["key"]: item.metadata.get("choices", ()) for item in fields(MemorySettings)}
_composer = Composer(compose_conf)


def settings(group: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Every setting that could decide a number, with other values than it has."""
    for item in fields(group):
        key, value, kind = f"{prefix}{item.name}", getattr(group, item.name), str(item.type)
        if any(key == each or key.startswith(f"{each}.") for each in OTHERS.split()) or "dict" in kind:
            continue
        if is_dataclass(value):
            yield from settings(value, f"{key}.")
            continue
        number = value if isinstance(value, int | float) else 0
        values = ALWAYS.get(key) or item.metadata.get("choices") or _CHOICES.get(key)
        if "bool" in kind:
            values = values or [str(not value).lower()]
        elif "int" in kind or "float" in kind:
            others = [number + 1, 2 * number + 2] if "int" in kind else [0.5, 0.25]
            values = values or (["[1]"] if "list" in kind else others)
        yield key, [each for each in values or ["[a]" if "list" in kind else "x"] if each != value]


def identity(words: list[str]) -> tuple[str, str]:
    (row, *_) = select(to_config(_composer(words)), words, _composer, check)
    run = run_settings(row.configs[0], "tokenizer", "stream")
    return digest(run), digest(row_settings(row.configs[0], digest(run), "stream"))


@pytest.mark.parametrize("base", BASES.strip().splitlines())
def test_no_setting_is_ignored(base):
    words = ["size=nano", *base.split()]
    before, ignored = identity(words), []
    for key, values in settings(to_config(_composer(words))):
        changed = []
        for value in values:
            try:
                changed.append(identity([*words, f"{key}={value}"]) != before)
            except (UserError, HydraException):
                continue
        of_training = "model.name=x" in base and key.startswith(tuple(OF_TRAININGS.split()))
        if changed and not any(changed) and not of_training and not ("passkey" in base and key in OF_PASS_KEYS):
            ignored.append(key)
    assert ignored == []
