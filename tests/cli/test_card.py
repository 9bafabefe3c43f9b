"""task=card: a README.md beside a trained run, from its records."""

import pytest
import yaml

from landmark.utils.errors import UserError


@pytest.mark.parametrize("library", ["landmark", "transformers"])
def test_a_card_says_what_was_trained_and_measured(work, library):
    settings = ["model=landmark", "eval.length=1024", "eval.local=250"]
    work(*settings, "retrieval.k=4", "name=mine")
    work(*settings, "retrieval.k=2", "name=mine")
    (folder,) = (work.output / "runs").iterdir()
    if library == "transformers":
        (folder / "tokenizer_config.json").write_text("{}")
    work.task(f"output={work.output}", "task=card", "run=latest")
    card = (folder / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == library
    assert "license" not in yaml.safe_load(head)
    assert f'load("{folder.name}")' in text
    assert text.count("± 0.01 |") == 2, "a row for each evaluation, with its error"
    for said in (
        "trained on pg19 (tokenizer bytes, seed 0)",
        "| model.kind | landmark |",
        "Validation perplexity",
        "on ",
    ):
        assert said in text
    with pytest.raises(UserError, match=r"README\.md is there already"):
        work.task(f"output={work.output}", "task=card", "run=latest")


def test_a_card_needs_a_run_with_a_record(work):
    with pytest.raises(UserError, match="task=card: name a trained run"):
        work.task(f"output={work.output}", "task=card")
    work("model=transformer", "eval.length=512")
    (record,) = work.output.glob("records/runs/*.json")
    record.unlink()
    with pytest.raises(UserError, match="has no record of this run"):
        work.task(f"output={work.output}", "task=card", "run=latest")
