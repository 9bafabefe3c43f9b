"""What decides a run's weights or a row's numbers makes another identity; nothing else does."""

import importlib

import pytest

from landmark.experiment.config.checks import resolve
from landmark.experiment.runs.identity import digest, row_settings, run_name, run_settings
from landmark.utils.setting import difference
from landmark.utils.trust import name_modules

NAMED, AS_IS = (f"model={model} model.name=some-folder" for model in ("pretrained_landmark", "pretrained_base"))
FILE = "model=pretrained_base model.name=some.gguf"


def run_id(config, tokenizer="t", stream="s", start=None):
    return digest(run_settings(config, tokenizer, stream, start))


def row_id(config):
    return digest(row_settings(resolve(config), "r", "s"))


# Overrides that all have, and those of which each decides: all of them make different identities.
OTHER_RUNS = {
    "": """
        model.block_size=51 model.num_layers=3 seed=1 train.steps=7 train.batch_size=7 train.length=300
        train.max_lr=1e-3 train.start_lr=1e-3 train.final_lr=1e-3 train.warmup=0.5 train.weight_decay=0.5
        train.precision=32-true cmt=on positions=jumps positions=jumps+positions.p_jump=9 model.architecture=mine
        model.key_offset=0.5 model.masked=true model.rotary_fraction=0.5 model.landmark_key=mean
        model.landmark_bias=true model.qk_norm=true train.muon_lr=1e-2 model.initialisation=fan_in
        model.induction_heads=1 model.alpha=0.5 data.repeats=[0] data.repeats=[0.5]
        data.repeats=[1,0.5] data.repeats=[0.5,1] data.tasks=0.5 data.tasks=0.1 data.passkeys=0.5 data.passkeys=0.1""",
    NAMED: "model.block_size=51 model.lora_rank=4 train.steps=7 seed=1",
    AS_IS: "model.dtype=bfloat16 model.dtype=float16 model.bits=4 model.bits=8",
    FILE: "model.dtype=float32 model.dtype=float16",
}
OTHER_ROWS = {
    "model=landmark": """
        eval.length=300 eval.local=100 eval.tokens=8192 eval.split=test retrieval.k=1 retrieval=per_head memory.blocks=9
        retrieval.scorer=recent eval.task=unique_blocks positions.mapping=true memory.index=faiss
        eval.task=copy eval.task=vt
        eval.task=copy+eval.prompts=9 eval.task=fwe eval.task=vt+eval.prompts=9 eval.task=vt+eval.generated=5
        eval.task=passkey eval.task=passkey+data.needles=4 model.masked=true""",
    "size=nano": "eval.span=2048 cmt=on cmt=on+cmt.cutoff=0.3",
    "model=transformer eval.local=256": """
        memory.window=256 memory.window=200 memory.window=256+memory.sinks=2""",
}
# Those that decide nothing: all have the identity of what all have.
SAME_RUN = {
    "": """
        train.micro_batch=2 train.checkpoint_every=9 train.validate_every=9 train.log_every=9 trainer=cpu logger=csv
        data.path=/elsewhere output=elsewhere model.backend=reference eval.length=300 retrieval.k=1 memory.blocks=9
        trainer.devices=2
        cmt.cutoff=0.5 positions.mapping=true model.alpha=0 tokenizer.file=x name=y train.validate_batches=3""",
    "data.passkeys=0.5": "data.needles=4",
    NAMED: "model.num_layers=3 model.name=elsewhere",  # its shape and its place
    AS_IS: "data.repeats=[0.5] train.steps=7 seed=1 model.lora_rank=4 model.dtype=float32",  # which has no training
    FILE: "model.dtype=bfloat16",
}
SAME_ROW = {
    "model=landmark": "data.repeats=[0.5] eval.prompts=9 eval.generated=5",
    "model=transformer": "retrieval.k=1 retrieval=per_head memory.blocks=9 eval.local=512",  # left open it is all
    "model=transformer eval.local=256": "memory.sinks=2",
    # The span is that of a budget, which prompts have not.
    "eval.tokens=null": "eval.batch_size=2 memory.tier=cpu memory.cache=9 eval.span=9999 name=y",
    "eval.task=copy": "eval.tokens=8192 eval.span=9999",
    "eval.task=vt": "eval.tokens=8192",
}


def by_change(configure, identity, given, changes):
    """Identities: of what all have, and with each change, which comes in place of the same setting."""
    found = {}
    for change in ["", *changes.split()]:
        new = [word for word in change.split("+") if word]
        keys = {word.partition("=")[0] for word in new}
        found[change] = identity(configure(*(w for w in given.split() if w.partition("=")[0] not in keys), *new))
    return found


def cases(runs, rows):
    return [(run_id, *case) for case in runs.items()] + [(row_id, *case) for case in rows.items()]


@pytest.mark.parametrize(("identity", "given", "changes"), cases(OTHER_RUNS, OTHER_ROWS))
def test_what_decides_makes_another_identity(configure, identity, given, changes):
    found = by_change(configure, identity, given, changes)
    same = [change for change, each in found.items() if list(found.values()).count(each) > 1]
    assert same == []


@pytest.mark.parametrize(("identity", "given", "changes"), cases(SAME_RUN, SAME_ROW))
def test_what_decides_nothing_does_not(configure, identity, given, changes):
    found = by_change(configure, identity, given, changes)
    assert {change for change, each in found.items() if each != found[""]} == set()


def test_tokenizer_text_and_start_make_another_run_and_settings_that_are_not_used_leave_no_key(configure):
    config = configure(*NAMED.split())
    others = run_id(config, "u"), run_id(config, "t", "u"), *(run_id(config, start=start) for start in ("w", "x"))
    assert len({run_id(config), *others}) == 5
    # So that one that comes changes no earlier identity.
    assert "repeats" not in run_settings(configure(), "t", "s")
    row = row_settings(configure("eval.length=2048"), "r", "s")
    assert row.keys().isdisjoint({"probe", "window", "retrieval_statistics"})


def test_what_is_drawn_by_chance_has_a_record_for_each_seed(configure):
    """A run that is named has one identity for all seeds; that of a training has its seed."""
    drawn = "model=landmark", "retrieval.scorer=random"
    seeds = [row_id(configure(*drawn, "run=latest", f"seed={seed}")) for seed in (0, 1, 2)]
    assert len(set(seeds)) == 3
    assert seeds[0] == row_id(configure(*drawn)) == row_id(configure(*drawn, "seed=1"))  # as recorded before
    named = [row_id(configure("model=landmark", "run=latest", f"seed={seed}")) for seed in (0, 1)]
    assert named[0] == named[1]


def test_a_model_of_ones_own_is_its_code(configure, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name_modules(["own_models.gated"])
    (tmp_path / "own_models").mkdir()
    file = tmp_path / "own_models" / "gated.py"
    found = []
    for code in ("silu", "relu", "silu"):
        file.write_text(f"Model = '{code}'")
        importlib.invalidate_caches()
        found.append(run_id(configure("model=landmark", "model.architecture=own_models.gated")))
    assert found[0] == found[2] != found[1]


def test_identities_have_no_order_a_difference_names_both_values_and_a_folder_what_it_holds(configure):
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    here, there = (run_settings(configure(f"model.block_size={size}"), "t", "s") for size in (50, 64))
    assert difference(here, there) == "model.block_size: 50 here, 64 there"
    assert difference(here, here) == ""
    assert run_name(configure("size=nano"), "0123456789") == "landmark-pg19-nano-0123456789"
