"""Identities of runs and rows do not change, whatever is rearranged: a changed one would orphan every record."""

import pytest

from landmark.experiment.config.rows import select
from landmark.experiment.runs.identity import digest, row_settings, run_settings

TOKENIZER, TEXT = "0" * 64, "1" * 64  # SHA-256 of a tokenizer and of a text, made up

RECIPE = {  # of the recipe
    ("table1_pg19", "plain_512", "nano"): ("c7c88f4efa", "1dc1d100b5"),
    ("table1_pg19", "landmark_2048_k4", "nano"): ("087bbaf657", "6e52a41474"),
    ("table1_pg19", "xl_2048", "nano"): ("e5d55ad4c5", "c15279c281"),
    ("quickstart", "twice_last_blocks", "nano"): ("213ce15ae4", "f0077dc14a"),
    ("learning_to_look_back", "recipe_copy_memory", "nano"): ("5407c3b0b4", "fa6dd938e5"),
    ("masked_lm", "landmark-k4_500", "nano"): ("a30eea7e31", "faf25ca7bb"),
    ("window_or_retrieval", "half50_4096", "nano"): ("67e0b31454", "2d5eaed9fa"),
}
PAPERS = {  # of the sizes and experiments as they were when these identities were frozen
    ("table1_pg19", "plain_512", "paper"): ("53a549fc11", "1565ab4a5d"),
    ("table1_pg19", "landmark_4096_k4", "paper"): ("cc0442de0b", "ed000f59de"),
    ("table1_pg19", "xl_2048", "paper"): ("c3d3577cae", "c8f6aaf19a"),
    ("table1_pg19", "landmark_2048_k4", "nano"): ("43fa399889", "c7cb991889"),
    ("table1_arxiv", "landmark_2048_k4", "small"): ("d8cc86f187", "0b13e29f73"),
    ("table2_granularity", "per_token_4096_k4", "nano"): ("43fa399889", "5b6d2b9690"),
    ("table3_cmt", "cmt_0.5", "nano"): ("b1b138cee2", "8002d57681"),
    ("figure3_passkey", "landmark-disk_1048576", "nano"): ("46a7834741", "ea54de5cb9"),
    ("figure5_unique_blocks", "per_head", "nano"): ("43fa399889", "2d895bcbc4"),
    ("figure6_positional_jumps", "standard-true_2048", "nano"): ("43fa399889", "fde3b2ee6e"),
    ("ablation_retrieval", "full_4096", "nano"): ("3c06348a4f", "9ad314046b"),
    ("sweep_k_local", "k8_local350", "paper"): ("cc0442de0b", "4a5c0c3bfe"),
}
SIZES = {
    "paper": [],
    "nano": ["recipe=paper", "model.num_heads=4", "model.head_dim=32", "train.steps=3000"],
    "small": ["recipe=paper", "model.num_heads=8", "model.head_dim=64"],
}
OF_PASSKEYS = [
    *("data=passkey", "data.passkeys=null", "eval.task=null"),
    *("train.steps=5000", "train.batch_size=8", "train.length=510"),
]
CHANGED = ("learning_to_look_back", "recipe_copy_memory", "nano")  # had no induction heads
CASES = [
    *((*key, [], found) for key, found in RECIPE.items()),
    *((*key, SIZES[key[2]] + OF_PASSKEYS * ("passkey" in key[0]), found) for key, found in PAPERS.items()),
    (*CHANGED, ["model.landmark_bias=false"], ("8854d169a1", "898f56bb13")),
]


@pytest.mark.parametrize(("experiment", "row", "size", "given", "found"), CASES)
def test_identities_are_those_of_earlier_records(configure, composer, experiment, row, size, given, found):
    overrides = [f"+experiment={experiment}", f"size={size}", f"row={row}", "tokenizer=bytes", *given]
    config = select(configure(*overrides), overrides, composer)[0].configs[0]
    run = digest(run_settings(config, TOKENIZER, TEXT))
    assert (run, digest(row_settings(config, run, TEXT))) == found


def test_a_seed_a_start_and_ids_that_begin_a_text_are_part_of_an_identity(configure):
    config = configure("size=nano", *SIZES["nano"], "seed=3", "model=pretrained_landmark", "model.name=some-folder")
    found = digest(run_settings(config, TOKENIZER, TEXT, "2" * 10))
    assert found == "06de153f6c"  # it was another while landmarks took positions
    config = configure("size=nano", "model=pretrained_landmark", "model.name=some-folder")
    alone, begun, others = (run_settings(config, TOKENIZER, TEXT, "2" * 10, ids) for ids in ([], [2], [2, 3]))
    assert "beginning" not in alone
    assert len({digest(each) for each in (alone, begun, others)}) == 3
