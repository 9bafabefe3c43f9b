import pytest

from landmark.config.checks import beyond_training, resolve
from landmark.experiment.jobs import check
from landmark.utils.errors import UserError


@pytest.mark.parametrize("model", ["transformer", "landmark", "transformer_xl"])
def test_every_model_of_text_can_have_repeats(configure, model):
    for shares in ("[0]", "[1]", "[0.5]", "[1,1,0.5,0.5,0.2]", "null"):
        check(configure(f"model={model}", f"data.repeats={shares}"))


def test_a_window_has_room_for_a_repeat_at_any_start(configure):
    check(configure("model=transformer", "data.repeats=[1]", "train.length=15"))
    check(configure("model=landmark", "model.block_size=3", "data.repeats=[1]", "train.length=20"))
    for length in (19, 17):  # beginning with a landmark: 14 and 12 normal tokens, and one that is predicted
        with pytest.raises(UserError, match="has no room for a repeat"):
            check(configure("model=landmark", "model.block_size=3", "data.repeats=[1]", f"train.length={length}"))


def test_a_probe_reads_no_spans_and_may_be_longer(configure):
    check(configure("size=nano", "eval.task=copy", "eval.length=8192"))


def test_plain_transformer_reads_whole_segments(configure):
    with pytest.raises(UserError, match="keeps no memory between chunks"):
        check(configure("model=transformer", "eval.local=360"))
    check(configure("model=transformer", "eval.local=360", "eval.length=360"))


def test_plain_transformer_with_a_window_reads_in_chunks(configure):
    check(configure("model=transformer", "eval.local=360", "memory.window=148"))


def test_statistics_of_a_retrieval_that_is_not_there_are_refused(configure):
    long = ["eval.length=2048", "eval.task=unique_blocks"]
    check(configure(*long))
    for change in ("retrieval.k=0", "model=transformer", "eval.local=2048"):
        with pytest.raises(UserError, match="eval.task=unique_blocks: "):
            check(configure(*long, change))


def test_memory_settings_of_another_model_do_not_matter(configure):
    check(configure("model=transformer", "memory.blocks=3"))


def test_long_evaluation_of_the_whole_split_needs_no_span(configure):
    check(configure("size=paper", "eval.length=8192"))


@pytest.mark.parametrize(
    ("model", "length", "local"),
    [("transformer", 512, 512), ("landmark", 2048, 250), ("landmark", 100, 100), ("transformer_xl", 2048, 256)],
)
def test_what_is_fed_at_a_time_if_left_open(configure, model, length, local):
    assert resolve(configure(f"model={model}", f"eval.length={length}")).eval.local == local


def test_true_positions_beyond_training_are_warned_of(configure):
    jumps = ["positions=jumps", "positions.mapping=true", "eval.local=250"]
    warning = beyond_training(configure(*jumps, "eval.length=2048"))
    assert warning is not None
    assert "eval.length=2048 reaches position 2,088, training at most 1,601" in warning
    assert beyond_training(configure(*jumps, "eval.length=1500")) is None
    assert beyond_training(configure("positions.mapping=true", "eval.length=600")) is not None
    assert beyond_training(configure("eval.length=2048")) is None


def test_no_memory_at_all_is_allowed(configure):
    check(configure("retrieval.k=0"))


def test_a_window_is_read_at_a_time(configure):
    assert resolve(configure("model=transformer", "eval.length=2048", "memory.window=256")).eval.local == 256
