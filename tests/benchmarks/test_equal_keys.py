"""Rules that choose blocks are compared on the same texts, and what choosing costs is counted."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")

from benchmarks.equal_keys import ALL, RULES, Reading, Row, compared, summary, table
from benchmarks.equal_keys_costs import costs
from landmark.memory.blocks.scorer import scorer_of
from tests.models.huggingface.conftest import FREE, wrapped_model

TRAINING_FREE = {rule: said for rule, said in RULES.items() if said != "landmarks"}


def test_each_rule_that_may_choose_all_blocks_reads_all_keys(tmp_path):
    model = wrapped_model("llama", **FREE, block_size=8)
    reading, ids = Reading(model, 80, 16, tmp_path), torch.arange(81)[None] % 50
    every = reading.losses("text", ids, Row(ALL))[0]
    for rule in TRAINING_FREE:
        np.testing.assert_allclose(reading.losses("text", ids, Row(rule, "head", 10))[0], every, atol=1e-5)
    assert abs(reading.losses("text", ids, Row("chance", blocks=1))[0] - every).max() > 1e-4
    assert reading.keys(Row("chance", blocks=2)) == 8 + 2 * 8  # of a window of 7, in whole blocks


def test_a_table_has_what_any_command_measured_on_its_texts(tmp_path):
    reading = Reading(wrapped_model("llama", **FREE), 80, 16, tmp_path)
    layered = "exact share, layers 2 to 3"
    for text, above in (("1-25", 0.1), ("1-75", 0.3), ("2-25", 9.0)):
        for rule, more in ((ALL, 0.0), ("mean key", 0.5), (layered, 0.5 - above)):
            np.savez(reading.file(text, Row(rule)), losses=np.full(128, 2 + more), seconds=1.0)
    made = summary(reading.measured(["1-25", "1-75"]))
    assert list(made["rule"]) == [ALL, "mean key", layered]
    np.testing.assert_allclose(made["difference"], [0.0, 0.5, 0.3])
    np.testing.assert_allclose(made["beside"][2], -0.2)
    assert "| exact share, layers 2 to 3 | 0.3000 ± " in table(made)
    assert compared(made)[0].startswith(f"- 8 blocks, {layered}, group against mean key, group: (-0.2000 nats")


def test_costs_count_what_stands_for_a_block():
    scorers = {rule: scorer_of(said).in_layer(0) for rule, said in TRAINING_FREE.items()}
    made = costs(scorers, torch.randn(2, 40, 32, 16), 3, rounds=1)
    assert made["bytes"]["mean key"] == 16 * 4
    assert made["bytes"]["smallest and largest keys"] == 2 * 16 * 4
    assert made["bytes"]["exact share"] == 32 * 16 * 4
    assert (made.loc["mean key", ["token_times", "chunk_times", "summaries_times"]] == 1).all()
