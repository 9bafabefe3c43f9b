"""A configuration that is composed from what others share is the one that Hydra composes; errors are one line."""

import pytest

from landmark.config import to_config
from landmark.config.composer import Composer
from landmark.config.rows import named
from tests.configurations import compose_conf


@pytest.mark.parametrize("experiment", ["figure6_positional_jumps", "finetune_llama"])
def test_rows_are_those_that_hydra_composes(experiment):
    shared = [f"+experiment={experiment}", "size=nano", "tokenizer=gpt2_1024", "train.steps=7"]
    composer = Composer(compose_conf)
    texts = named(to_config(composer(shared)))
    for text in list(texts.values())[:: len(texts) - 1]:
        overrides = [*shared, *text.split()]
        assert composer(overrides) == compose_conf(overrides)


def test_hydra_is_asked_once_for_each_choice_of_groups():
    asked = []

    def compose(overrides):
        asked.append(overrides)
        return compose_conf(overrides)

    composer = Composer(compose)
    made = [
        composer(["size=nano", f"retrieval.k={k}", f"model={model}"])
        for k in (1, 2)
        for model in ("landmark", "transformer")
    ]
    assert asked == [["size=nano", "model=landmark"], ["size=nano", "model=transformer"]]
    assert [config.retrieval.k for config in made] == [1, 1, 2, 2]
