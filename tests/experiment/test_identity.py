import pytest

from landmark.config.checks import resolve
from landmark.experiment.identity import digest, row_settings, run_name, run_settings
from landmark.utils.nested import difference


def run_id(config, tokenizer="t", stream="s"):
    return digest(run_settings(config, tokenizer, stream))


def row_id(config, run="r", stream="s"):
    return digest(row_settings(resolve(config), run, stream))


@pytest.mark.parametrize(
    "override",
    [
        *("model.block_size=51", "model.num_layers=3", "seed=1"),
        *("train.steps=7", "train.batch_size=7", "train.length=300", "train.precision=32-true"),
        *("train.max_lr=1e-3", "train.start_lr=1e-3", "train.final_lr=1e-3", "train.warmup=0.5"),
        "train.weight_decay=0.5",
        *("cmt=on", "positions=jumps", "model.architecture=mine", "data.repeats=[0.5]"),
        *("model.key_offset=0.5", "model.rotary_fraction=0.5", "model.landmark_key=mean", "model.landmark_bias=true"),
        *("model.qk_norm=true", "model.initialisation=fan_in", "train.muon_lr=1e-2"),
        *("train.k=[2,4]", "model.induction_heads=1", "model.alpha=0.5"),
        *("model.fan_out=4", "model.masked=true"),
    ],
)
def test_what_decides_the_weights_makes_another_run(configure, override):
    assert run_id(configure(override)) != run_id(configure())


@pytest.mark.parametrize(
    "override",
    [
        *("train.micro_batch=2", "train.checkpoint_every=9", "train.validate_every=9", "train.log_every=9"),
        *("trainer=cpu", "logger=csv", "data.path=/elsewhere", "output=elsewhere"),
        *("model.backend=reference", "eval.length=300", "retrieval.k=1", "memory.blocks=9", "cmt.cutoff=0.5"),
        *("positions.mapping=true", "model.alpha=0"),
        *("tokenizer.file=x", "name=y", "train.validate_batches=3"),
    ],
)
def test_what_does_not_decide_the_weights_is_the_same_run(configure, override):
    assert run_id(configure(override)) == run_id(configure())


def test_the_largest_jump_makes_another_run(configure):
    assert run_id(configure("positions=jumps", "positions.p_jump=9")) != run_id(configure("positions=jumps"))


def test_the_schedule_of_repeats_makes_another_run(configure):
    schedules = ("null", "[0]", "[0.5]", "[1,0.5]", "[0.5,1]")
    assert len({run_id(configure(f"data.repeats={shares}")) for shares in schedules}) == len(schedules)
    assert "repeats" not in run_settings(configure(), "t", "s")


def test_repeats_are_no_part_of_a_run_that_trains_nothing_nor_of_a_row(configure):
    untrained = ("model=pretrained_base", "model.name=some-folder")
    assert run_id(configure(*untrained, "data.repeats=[0.5]")) == run_id(configure(*untrained))
    assert row_id(configure("data.repeats=[0.5]")) == row_id(configure())


def test_each_cutoff_makes_another_row(configure):
    changes = ([], ["cmt.cutoff=0.3"], ["cmt.cutoff=[0,0,0.3,1]"])
    rows = {row_id(configure("size=nano", "cmt=on", *change)) for change in changes}
    assert len(rows) == 3
    assert row_id(configure("size=nano")) not in rows


def test_tokenizer_and_text_make_another_run(configure):
    config = configure()
    assert len({run_id(config), run_id(config, tokenizer="u"), run_id(config, stream="u")}) == 3


@pytest.mark.parametrize(
    "override",
    [
        *("eval.length=300", "eval.local=100", "eval.tokens=8192", "eval.split=test"),
        *("retrieval.k=1", "retrieval=per_head", "retrieval.scorer=recent", "memory.blocks=9"),
        *("eval.task=unique_blocks", "positions.mapping=true", "retrieval.recent=1"),
    ],
)
def test_how_a_landmark_model_is_read_makes_another_row(configure, override):
    assert row_id(configure("model=landmark", override)) != row_id(configure("model=landmark"))


@pytest.mark.parametrize("override", ["retrieval.k=1", "retrieval=per_head", "memory.blocks=9"])
def test_retrieval_is_no_part_of_a_plain_row(configure, override):
    assert row_id(configure("model=transformer", override)) == row_id(configure("model=transformer"))


def test_a_probe_is_part_of_a_row_that_has_one(configure):
    changes = ["eval.task=copy"], ["eval.task=recall"], ["eval.task=copy", "eval.prompts=9"], []
    assert len({row_id(configure(*change)) for change in changes}) == 4
    assert row_id(configure("eval.prompts=9")) == row_id(configure())
    for budget in ("eval.tokens=8192", "eval.span=9999"):  # it reads `prompts` segments whatever the budget
        assert row_id(configure("eval.task=copy", budget)) == row_id(configure("eval.task=copy"))
    assert "probe" not in row_settings(configure(), "r", "s")


def test_window_and_sinks_are_part_of_a_plain_row_that_has_them(configure):
    plain = ["model=transformer", "eval.local=256"]
    rows = {row_id(configure(*plain, *more)) for more in ([], ["memory.sinks=2"])}
    assert len(rows) == 1
    windows = (["memory.window=256"], ["memory.window=200"], ["memory.window=256", "memory.sinks=2"])
    assert len(rows | {row_id(configure(*plain, *more)) for more in windows}) == 4
    assert row_settings(configure("eval.length=2048"), "r", "s").keys().isdisjoint({"window", "retrieval_statistics"})


@pytest.mark.parametrize(
    "override", ["eval.batch_size=2", "memory.tier=cpu", "memory.cache=9", "eval.span=9999", "name=y"]
)
def test_where_and_in_what_pieces_is_no_part_of_a_row(configure, override):
    whole = "eval.tokens=null"  # the span is that of a budget
    assert row_id(configure(whole, override)) == row_id(configure(whole))


def test_an_index_is_part_of_a_row_where_there_is_one(configure):
    few = (["memory.index=faiss"], ["memory.index=faiss_flat"])
    few = (*few, ["memory.index=faiss", "memory.candidates=8"], [])
    assert len({row_id(configure(*overrides)) for overrides in few}) == 4
    assert row_id(configure("memory.candidates=8")) == row_id(configure())


def test_span_of_a_budget_is_part_of_a_row(configure):
    assert row_id(configure("size=nano", "eval.span=2048")) != row_id(configure("size=nano"))


def test_local_left_open_is_what_it_stands_for(configure):
    open_, stated = configure("model=transformer"), configure("model=transformer", "eval.local=512")
    assert row_id(open_) == row_id(stated)


def test_identity_does_not_depend_on_order():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})


def test_folder_says_what_it_holds(configure):
    assert run_name(configure("size=nano"), "0123456789") == "landmark-pg19-nano-0123456789"


def test_difference_names_both_values(configure):
    here, there = (run_settings(configure(f"model.block_size={size}"), "t", "s") for size in (50, 64))
    assert difference(here, there) == "model.block_size: 50 here, 64 there"
    assert difference(here, here) == ""


PRETRAINED = ("model=pretrained_landmark", "model.name=some-folder")


def named(configure, *overrides, start="weights"):
    return digest(run_settings(configure(*PRETRAINED, *overrides), "t", "s", start))


@pytest.mark.parametrize("override", ["model.block_size=51", "model.lora_rank=4", "train.steps=7", "seed=1"])
def test_what_decides_a_fine_tuning_makes_another_run(configure, override):
    assert named(configure, override) != named(configure)
    assert named(configure, start="other weights") != named(configure)


@pytest.mark.parametrize("override", ["model.num_layers=3", "model.name=elsewhere"])
def test_the_shape_and_place_of_a_named_model_do_not_decide(configure, override):
    config = configure(
        *[word for word in PRETRAINED if not override.startswith(word.partition("=")[0] + "=")], override
    )
    assert digest(run_settings(config, "t", "s", "weights")) == named(configure)


@pytest.mark.parametrize("override", ["train.steps=7", "seed=1", "model.lora_rank=4"])
def test_a_model_as_it_is_has_no_training(configure, override):
    base = ("model=pretrained_base", "model.name=some-folder")
    found = [run_settings(configure(*base, *more), "t", "s", "weights") for more in ((), (override,))]
    assert found[0] == found[1]


def test_a_task_is_part_of_a_row_that_asks_it(configure):
    changes = (
        ["eval.task=vt"],
        ["eval.task=fwe"],
        ["eval.task=vt", "eval.prompts=9"],
        ["eval.task=vt", "eval.generated=5"],
        ["eval.task=passkey"],
        ["eval.task=passkey", "data.needles=4"],
    )
    assert len({row_id(configure(*change)) for change in [*changes, []]}) == 7
    assert row_id(configure("eval.generated=5")) == row_id(configure())
    assert row_id(configure("eval.task=vt", "eval.tokens=8192")) == row_id(configure("eval.task=vt"))


def test_a_share_of_tasks_makes_another_run(configure):
    changes = [], ["data.tasks=0.5"], ["data.tasks=0.1"], ["data.passkeys=0.5"], ["data.passkeys=0.1"]
    assert len({run_id(configure(*change)) for change in changes}) == 5
    assert run_id(configure("data.passkeys=0.5", "data.needles=4")) == run_id(configure("data.passkeys=0.5"))
