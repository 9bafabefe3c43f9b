import pytest

from landmark.config.checks import beyond_training, check_task, resolve
from landmark.experiment.checks import check
from landmark.utils.errors import UserError

BAD = {
    "retrieval.k=-1": "retrieval.k=-1: the number of retrieved blocks cannot be negative",
    "eval.local=0": "eval.local=0: must be at least 1",
    "memory.blocks=3": "memory.blocks=3 is less than retrieval.k=4",
    "eval.local=513": "eval.local=513 is longer than eval.length=512",
    "eval.length=8192": "raise eval.span to at least 8192",
    "eval.split=train": "eval.split=train: must be one of validation, test",
    "retrieval.scorer=best": "retrieval.scorer=best: must be one of landmark, recent",
    "retrieval.granularity=none": "must be one of per_token_and_head",
    "trainer.matmul=low": "trainer.matmul=low: must be one of auto, highest, medium",
    "memory.tier=tape": "memory.tier=tape: must be one of device, cpu, disk",
    "memory.index=faiss memory.blocks=40": "memory.blocks=40 must be null",
    "retrieval.recent=5": "retrieval.recent=5: must be 0 to retrieval.k=4, of which they are a part",
    "retrieval.recent=2 retrieval.scorer=recent": "retrieval.scorer=recent: retrieval.recent=2 keeps the newest blocks",
    "retrieval.query_window=60": "retrieval.query_window=60: must be 1 to model.block_size=50",
    "retrieval.query_window=6 cmt=on": "retrieval.query_window=6: goes without a context miss token, set cmt=off",
    "retrieval.query_window=6 retrieval.scorer=recent": "retrieval.scorer=recent: with retrieval.query_window=6",
    "retrieval.recent=2 memory.index=faiss": "memory.index=faiss: retrieval.recent=2 keeps the newest blocks",
    "memory.index=faiss retrieval.scorer=recent": "retrieval.scorer=recent must be landmark",
    "memory.index=faiss memory.candidates=3": "memory.candidates=3 is less than retrieval.k=4: raise it to at least 4",
    "train.length=50": "model.block_size=50: a window of train.length=50 has no room for a block and its landmark",
    "memory.index_type=hnsw": "memory.index_type=hnsw: must be one of flat, ivf",
    "memory.cache=0": "memory.cache=0: must be at least 1",
    "memory.folder=x": "memory.folder=x: memory.tier=device keeps no files there",
    "generate.top_p=0": "generate.top_p=0.0: must be above 0",
    "generate.top_k=0": "generate.top_k=0: must be at least 1",
    "generate.temperature=-1": "generate.temperature=-1.0: must be at least 0",
    "task=tabel": "task=tabel: must be one of auto, table",
    "train.precision=8": "train.precision=8: must be one of",
    "train.steps=0": "train.steps=0: must be at least 1",
    "train.warmup=2": "train.warmup=2.0: must be a fraction",
    "train.max_lr=0": "train.max_lr=0.0: must be above 0",
    "model.head_dim=3": "model.head_dim=3: must be even",
    "model.block_size=null": "model.block_size=null: a landmark model needs it",
    "model.block_size=0": "model.block_size=0: must be at least 1",
    "seeds=[1,1]": "must be a list of different seeds",
    "logger.mode=loud": "logger.mode=loud: must be one of",
    "data.bad_lines=mend": "data.bad_lines=mend: must be one of stop, skip",
    "data.configs=[arxiv]": "data.configs=['arxiv']: data=pg19 has no configs",
    "train.k=[]": "train.k=[]: must be numbers of blocks from 1 on, like [4] or [2,4,8], or null",
    "train.k=[4,0]": "train.k=[4, 0]: must be numbers of blocks from 1 on",
    "model=transformer train.k=[4]": "train.k=[4]: only our landmark model (model=landmark) chooses blocks in training",
    "train.local=250": "train.local=250: a memory needs the number of blocks it retrieves, like train.k=[4]",
    "train.k=[4] train.local=512 train.length=512": "train.local=512: must be less than train.length=512",
    "train.k=[4] train.local=250 cmt=on": "train.local=250: training with a memory goes without cmt=on",
    "model.backend=triton train.k=[4]": "train.k=[4]: the fused kernels attend to all blocks",
    "data.repeats=[]": "data.repeats=[]: must be shares from 0 to 1, like [0.5] or [1,0.2], or null",
    "data.repeats=[0.5,1.1]": "data.repeats=[0.5, 1.1]: must be shares from 0 to 1",
    "data.repeats=[-0.1]": "data.repeats=[-0.1]: must be shares from 0 to 1",
    "data.repeats=[nan]": "data.repeats=[nan]: must be shares from 0 to 1",
    "data=passkey data.repeats=[0.5]": "data.repeats=[0.5]: data=passkey is no text, set data.repeats=null",
    "data=key_value data.repeats=[0]": "data.repeats=[0.0]: data=key_value is no text, set data.repeats=null",
    "data.repeats=[0.5] train.length=15": "data.repeats=[0.5]: train.length=15 has no room for a repeat, raise it",
    "trainer.profiler=fast": "trainer.profiler=fast: must be one of null, simple, advanced, pytorch",
    "train.optimizer=sgd": "train.optimizer=sgd: must be one of null, adamw, muon",
    "train.optimizer=adamw": "train.muon_lr=0.02: is for train.optimizer=muon",
    "train.muon_lr=0": "train.muon_lr=0.0: must be above 0",
    "model=llama model.num_kv_heads=2": "model.num_kv_heads=2: is for our decoder, not models of transformers",
    "model=landmark_mlm eval.local=250": "model.masked=true: reads a text at once, leave out eval.local=250",
    "model=transformer_mlm data=passkey": "model.masked=true: data=passkey",
    "model=transformer model.local_blocks=1": "model.local_blocks=1: model=transformer has no landmarks",
    "model=transformer model.block_ends=sentences": "model.block_ends=sentences: model=transformer has no landmarks",
    "model.block_ends=words": "model.block_ends=words: must be one of fixed, sentences, lines",
    "model.least_block_size=9": "model.least_block_size=9: is for model.block_ends=sentences or lines",
    "model.block_ends=lines model.least_block_size=51": "model.least_block_size=51: must be from 1 to",
    "model.block_ends=lines cmt=on": "model.block_ends=lines: goes without cmt=on, set cmt=off",
    "model.block_ends=lines model.local_blocks=1": "model.block_ends=lines: goes without model.local_blocks=1",
    "model.block_ends=lines model.landmark_key=pooled": "goes without model.landmark_key=pooled",
    "model.block_ends=lines memory.tier=disk": "memory.tier=disk: blocks that end early (model.block_ends) go without",
    "model.block_ends=lines memory.index=faiss": "memory.index=faiss: blocks that end early (model.block_ends) go",
    "model.block_ends=lines data=passkey": "data=passkey, data.tasks=None, data.passkeys=None: blocks end in text",
    "model.landmark_values=true": "model.landmark_values=true: landmarks learn their values where blocks are left out",
    "model.landmark_values=true train.k=[4] train.local=100": "set train.k=[2,4,8] and train.local=null",
    "model.landmark_values=true train.k=[4] memory.index=faiss": "model.landmark_values=true: every block is scored",
    "model.landmark_values=true train.k=[4] cmt=on": "model.landmark_values=true: is for model=landmark without cmt",
    "model.block_ends=lines data.tasks=0.5": "data=pg19, data.tasks=0.5, data.passkeys=None: blocks end in text",
    "model.block_ends=lines data.passkeys=0.5": "data.passkeys=0.5: blocks end in text",
    "model.block_ends=lines train.k=[4] train.local=100": "model.block_ends=lines: goes without train.local=100",
    "model.block_ends=lines eval.probe=copy": "model.block_ends=lines: goes without eval.probe=copy",
    "model.block_ends=lines eval.retriever=bm25": "model.block_ends=lines: goes without eval.retriever=bm25",
    "model.block_ends=lines eval.batch_size=2": "model.block_ends=lines: goes without eval.batch_size=2",
    "model.block_ends=lines task=inspect prompt=a": "model.block_ends=lines: task=inspect shows blocks of one size",
    "model=llama_landmark model.block_ends=lines": "model.block_ends=lines: is for our decoder, not models of",
    "model=transformer_xl trainer=fsdp": "model=transformer_xl: its windows are trained one by one, which fsdp cannot",
    "trainer.num_nodes=0": "trainer.num_nodes=0: must be at least 1",
    "model=llama model.qk_norm=true": "model.qk_norm=True: is for our decoder, not models of transformers",
    "memory.sinks=-1": "memory.sinks=-1: must be at least 0",
    "eval.probe=repeat": "eval.probe=repeat: must be one of null, copy, recall",
    "eval.task=vt data=passkey": "eval.task=vt: data=passkey has prompts of its own",
    "eval.task=vt eval.probe=copy": "eval.task=vt and eval.probe=copy: a row measures one of them",
    "eval.task=qa": "eval.task=qa: must be one of null, niah_single_1",
    "eval.task=fwe retrieval.scorer=given": "retrieval.scorer=given: the right blocks are known for eval.task=niah_",
    "retrieval.scorer=given": "retrieval.scorer=given: the right blocks are known for eval.task=niah_",
    "data.passkeys=1.5": "data.passkeys=1.5: must be a share of the training windows",
    "data=passkey data.passkeys=0.5": "data.passkeys=0.5: data=passkey is a task itself",
    "data.tasks=0.5 data.passkeys=0.5": "data.tasks=0.5 data.passkeys=0.5: choose one of them",
    "retrieval.scorer=given eval.task=passkey": "the right blocks are known for",
    "data.tasks=1.5": "data.tasks=1.5: must be a share of the training windows",
    "data=mqar tokenizer=symbols data.tasks=0.5": "data.tasks=0.5: data=mqar is a task itself",
    "eval.probe=copy data=passkey": "eval.probe=copy: data=passkey has prompts of its own",
    "eval.probe=recall data=key_value": "eval.probe=recall: data=key_value has prompts of its own",
    "eval.probe=copy eval.retriever=bm25": "eval.probe=copy and eval.retriever=bm25: a row measures one of them",
    "eval.probe=copy eval.retrieval_statistics=true eval.length=2048": "a row measures one of them, leave out one",
    "eval.query=sentence": "eval.query=sentence: is asked of eval.retriever, which is null",
    "eval.retriever=bm25 eval.query=word": "eval.query=word: must be one of second_half, sentence, altered",
    "eval.probe=copy eval.length=511": "eval.length=511: must be a multiple of 2, at least 4, as eval.probe=copy",
    "eval.probe=copy eval.length=2": "eval.length=2: must be a multiple of 2, at least 4, as eval.probe=copy",
    "eval.probe=recall eval.length=510": "eval.length=510: must be a multiple of 4, at least 4, as eval.probe=recall",
    "eval.probe=copy eval.length=8192 cmt=on cmt.per_layer=true": "raise eval.span to at least 8192",
    "cmt.cutoff=0.3": "cmt.cutoff=0.3: without a context miss token there is no cutoff, set cmt=on",
    "cmt.per_layer=true": "cmt.per_layer=True: without a context miss token",
    "cmt=on cmt.cutoff=1.1": "cmt.cutoff=1.1: must be from 0 to 1",
    "cmt=on cmt.cutoff=-0.1": "cmt.cutoff=-0.1: must be from 0 to 1",
    "cmt=on cmt.cutoffs=[0.1,0.2,0.3]": "cmt.cutoffs=[0.1, 0.2, 0.3]: must be 4 numbers, one for each layer",
    "cmt=on cmt.cutoffs=[0,0,0,2]": "cmt.cutoffs=[0.0, 0.0, 0.0, 2.0]: must be from 0 to 1",
    "cmt=on cmt.cutoffs=[0,0,0,1] cmt.cutoff=0.1": "cmt.cutoffs: takes the place of cmt.cutoff",
    "cmt=on cmt.per_layer=true data=passkey": "data=passkey has no validation text",
    "cmt=on cmt.per_layer=true retrieval.k=0": "nothing is ever looked up",
    "cmt=on cmt.per_layer=true eval.local=512": "nothing is ever looked up",
    "cmt=on model=transformer": "cmt=on: model=transformer has no landmarks",
    "positions=jumps positions.p_jump=0": "positions.p_jump=0: must be at least 1",
    "positions.p_jump=5": "positions.p_jump=5: there are no jumps, set positions=jumps",
    "positions=jumps model=transformer": "positions=jumps: positions jump after landmarks, and model=transformer",
    "positions.mapping=true model=transformer": "positions.mapping=true: model=transformer has no memory",
    "positions.mapping=lavish": "positions.mapping=lavish: must be one of stingy, true",
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


@pytest.mark.parametrize("probe", ["copy", "recall"])
def test_a_probe_reads_no_spans_and_may_be_longer(configure, probe):
    check(configure("size=nano", f"eval.probe={probe}", "eval.length=8192"))


def test_plain_transformer_reads_whole_segments(configure):
    with pytest.raises(UserError, match="keeps no memory between chunks"):
        check(configure("model=transformer", "eval.local=360"))
    check(configure("model=transformer", "eval.local=360", "eval.length=360"))


def test_plain_transformer_with_a_window_reads_in_chunks(configure):
    check(configure("model=transformer", "eval.local=360", "memory.window=148"))


def test_statistics_of_a_retrieval_that_is_not_there_are_refused(configure):
    long = ["eval.length=2048", "eval.retrieval_statistics=true"]
    check(configure(*long))
    for change in ("retrieval.k=0", "model=transformer", "eval.local=2048"):
        with pytest.raises(UserError, match="eval.retrieval_statistics=true: "):
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
        (["task=generate", "prompt=x", "memory.save=y"], "memory.save=y: the memory of prompt_file is saved"),
        (["prompt=x"], "prompt=x: is for task=generate and task=inspect"),
        (["task=evaluate", "memory.load=x"], "memory.load=x: is for task=generate"),
        (["task=inspect"], "task=inspect: set prompt="),
        (["task=generate", "prompt=x", "output_file=a.html"], "output_file=a.html: is for task=inspect"),
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
        (("model=landmark", "model.as_is=true"), r"model\.as_is=true"),
        (("model=landmark", "model.lora_rank=4"), r"model\.lora_rank=4: is for models of transformers"),
        (("model=llama_landmark", "model.lora_rank=4"), "adapters need a trained model"),
        (("model=llama", "model.name=x"), "leave out model.family and start"),
        (("model=llama", "model.architecture=x"), "leave out model.name and model.family"),
        (("model=llama_landmark", "cmt=on"), "cmt: is not supported"),
        (("model=llama_landmark", "positions=jumps"), "positions: is not supported"),
        (("model=llama", "memory.window=9"), r"memory\.window"),
        (("model=pretrained_landmark", "model.name=x", "model.lora_rank=0"), r"model\.lora_rank=0"),
        (("model=pretrained_landmark", "model.name=x", "model.lora_rank=2", "trainer=fsdp"), "adapters are not merged"),
        (("model=transformer", "eval.retriever=bm25"), r"eval\.retriever=bm25: needs a landmark model"),
        (("model=llama", "model.family=gpt5"), r"model\.family=gpt5"),
    ],
)
def test_what_models_of_transformers_cannot_do_is_refused(configure, overrides, said):
    with pytest.raises(UserError, match=said):
        check(configure(*overrides))


def test_a_pretrained_model_must_be_named(configure):
    with pytest.raises(UserError, match=r"model\.name"):
        check(configure("model=pretrained_landmark"))
