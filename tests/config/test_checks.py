import pytest

from landmark.config.checks import beyond_training, check_task, resolve
from landmark.experiment.jobs import check
from landmark.utils.errors import UserError

BAD = {
    # Out of range, or not one of few.
    "retrieval.k=-1": "retrieval.k=-1: must be at least 0",
    "memory.blocks=3": "memory.blocks=3: is less than retrieval.k=4",
    "memory.index=faiss memory.candidates=3": "memory.candidates=3: must be at least 4",
    "memory.sinks=-1": "memory.sinks=-1: must be at least 0",
    "retrieval.scorer=best": "retrieval.scorer=best: must be one of landmark, recent",
    "eval.local=0": "eval.local=0: must be at least 1",
    "eval.local=513": "eval.local=513 is longer than eval.length=512",
    "eval.length=8192": "raise eval.span to at least 8192",
    "eval.split=train": "eval.split=train: must be one of validation, test",
    "eval.task=qa": "eval.task=qa: must be one of niah_single_1",
    "eval.task=copy eval.length=511": "eval.length=511: must be a multiple of 2, at least 4, as eval.task=copy",
    "generate.top_p=0": "generate.top_p=0.0: must be above 0",
    "generate.temperature=-1": "generate.temperature=-1.0: must be at least 0",
    "task=tabel": "task=tabel: must be one of auto, table",
    "train.precision=8": "train.precision=8: must be one of",
    "train.steps=0": "train.steps=0: must be at least 1",
    "train.warmup=2": "train.warmup=2.0: must be above 0 and below 1",
    "train.max_lr=0": "train.max_lr=0.0: must be above 0",
    "train.k=[]": "train.k=[]: must have one number or more, at least 1",
    "train.k=[4,0]": "train.k=[4, 0]: must be at least 1",
    "train.k=[4] train.local=512 train.length=512": "train.local=512: must be less than train.length=512",
    "train.length=50": "model.block_size=50: a window of train.length=50 has no room for a block and its landmark",
    "model=transformer data.repeats=[0.5] train.length=14": "train.length=14 has no room for a repeat, raise it",
    "model.head_dim=3": "model.head_dim=3: must be even",
    "model.block_size=null": "model.block_size=null: a landmark model needs it",
    "model.fan_out=1": "model.fan_out=1: must be at least 2",
    "seeds=[1,1]": "must be a list of different seeds",
    "logger.service=loud": "logger.service=loud: must be one of",
    "data.passkeys=1.5": "data.passkeys=1.5: must be above 0 and at most 1",
    "data.repeats=[]": "data.repeats=[]: must have one number or more, at least 0 and at most 1",
    "data.repeats=[0.5,1.1]": "data.repeats=[0.5, 1.1]: must be at least 0 and at most 1",
    "data.repeats=[nan]": "data.repeats=nan: must be a finite number",
    "cmt=on cmt.cutoff=1.1": "cmt.cutoff=1.1: must be at least 0 and at most 1",
    "cmt=on cmt.cutoff=[0.1,0.2,0.3]": "cmt.cutoff=[0.1, 0.2, 0.3]: must be one number, or 4, one for each layer",
    "positions=jumps positions.p_jump=0": "positions.p_jump=0: must be at least 1",
    # Without effect.
    "retrieval.recent=2 retrieval.scorer=recent": "retrieval.recent=2: does not go with retrieval.scorer=recent",
    "data.configs=[arxiv]": "data.configs=['arxiv']: is for data=arxiv_math",
    "model=transformer train.k=[4]": "train.k=[4]: is for model=landmark",
    "model=transformer model.fan_out=4": "model.fan_out=4: is for model=landmark",
    "train.local=250": "train.local=250: is for train.k, numbers of blocks like [4]",
    "train.k=[4] train.local=250 cmt=on": "train.local=250: is for cmt=off and positions=standard",
    "model.backend=triton train.k=[4]": "train.k=[4]: is for attention without fused kernels",
    "data=passkey data.repeats=[0.5]": "data.repeats=[0.5]: is for the text of a corpus",
    "data=mqar tokenizer=symbols data.tasks=0.5": "data.tasks=0.5: is for the text of a corpus",
    "eval.task=copy data=passkey": "eval.task=copy: is for the text of a corpus",
    "eval.task=fwe retrieval.scorer=given": "retrieval.scorer=given: is for eval.task=niah_",
    "model=llama model.num_kv_heads=2": "model.num_kv_heads=2: is for our decoder, not models of transformers",
    "model=transformer_xl trainer=fsdp": "trainer.strategy=fsdp: is for whole windows",
    "cmt.cutoff=0.3": "cmt.cutoff=0.3: is for cmt=on",
    "cmt=on model=transformer": "cmt=on: model=transformer has no landmarks",
    "positions.mapping=true model=transformer": "positions.mapping=true: is for model=landmark",
    # One of two.
    "data.tasks=0.5 data.passkeys=0.5": "data.tasks=0.5 and data.passkeys=0.5: choose one of them",
}


@pytest.mark.parametrize("override", BAD)
def test_nonsense_is_refused_naming_the_key(configure, override):
    with pytest.raises(UserError) as error:
        check(configure("size=nano", *override.split(" ")))
    assert BAD[override] in str(error.value)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task=generate"], "task=generate: set prompt="),
        (["task=generate", "prompt=x", "memory.save=y"], "memory.save=y: is for the memory of prompt_file"),
        (["prompt=x"], "prompt=x: is for task=generate or inspect"),
        (["task=evaluate", "memory.load=x"], "memory.load=x: is for task=generate"),
        (["task=inspect"], "task=inspect: set prompt="),
    ],
)
def test_a_prompt_and_a_memory_belong_to_a_task(configure, overrides, said):
    with pytest.raises(UserError, match=said):
        check_task(configure(*overrides))
    check_task(configure("task=generate", "prompt=x", "memory.load=y"))
    check_task(configure())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model=landmark", "model.as_is=true"), r"model\.as_is=True: is for a model that model.name gives"),
        (("model=landmark", "model.lora_rank=4"), r"model\.lora_rank=4: is for a trained model of transformers"),
        (("model=llama_landmark", "model.lora_rank=4"), r"model\.lora_rank=4: is for a trained model of transformers"),
        (("model=llama", "model.name=x"), "model.name=x and model.family=llama: choose one of them"),
        (("model=llama", "model.architecture=x"), "model.family=llama and model.architecture=x: choose one of them"),
        (("model=llama_landmark", "cmt=on"), "cmt.enabled=True: is for our decoder"),
        (("model=llama_landmark", "positions=jumps"), "positions.p_jump=100: is for our decoder"),
        (("model=llama", "memory.window=9"), r"memory\.window"),
        (("model=pretrained_landmark", "model.name=x", "model.lora_rank=0"), r"model\.lora_rank=0"),
        (
            ("model=pretrained_landmark", "model.name=x", "model.lora_rank=2", "trainer=fsdp"),
            "trainer.strategy=fsdp: is for whole windows, and all weights of a model",
        ),
        (("model=transformer", "eval.task=rank_by_bm25"), r"eval\.task=rank_by_bm25: is for model=landmark"),
        (("model=llama", "model.family=gpt5"), r"model\.family=gpt5"),
    ],
)
def test_what_models_of_transformers_cannot_do_is_refused(configure, overrides, said):
    with pytest.raises(UserError, match=said):
        check(configure(*overrides))


def test_a_pretrained_model_must_be_named(configure):
    with pytest.raises(UserError, match=r"model\.name"):
        check(configure("model=pretrained_landmark"))
