"""Commands that cannot be carried out: one line on stderr, exit code 2, and nothing is left."""

import os
import shlex

import pytest

SHORT = {
    "SWEEP": "-m TINY retrieval.k=1,2",
    "TINY": "data=stdlib tokenizer=bytes size=nano model=landmark",
    "NOTEXT": "\udcff",
    "ESC": "\x1b",
    "BOOK": "task=generate model=pretrained model.name=x",  # which is nowhere: files are looked for before it is loaded
    "FINETUNED": "+experiment=figure3_finetune size=nano tokenizer=bytes",
    "SHAPES": "size=nano tokenizer=bytes",
    "TUNED": "+experiment=pretrained_tuned size=nano model.name=DIR",
    "TABLE1": "+experiment=table1_pg19 size=nano",
}
# What is typed, with task=plan where there is no task, → a part of the line that it ends in.
REFUSED = r"""
model.blok_size=3 → did you mean model.block_size?
+experiment=tabel1_pg19 → experiment=tabel1_pg19: there is none; did you mean table1
train.steps=many → could not be converted to Integer
size=huge → Available options in 'size': nano, paper, small
"prompt_file=Where? (there)" → if it is a text, quote it twice: 'prompt_file="Where? (there)"'
"prompt_file=Kim, and why.txt" → if it is a text, quote it twice: 'prompt_file="Kim, and why.txt"'
"data.path=[a, b]" → data.path: Hydra's grammar cannot read the value [a, b] as one text; if it is a text, quote it
data.path=a${b} → Interpolation key 'b' not found: in a text write \${…}
--experiment=x → --experiment=x: settings have no dashes, write +experiment=x
--config-dir nowhere task=status → nowhere' not found
TINY retrieval.scorer=-inf → retrieval.scorer=-inf: must be the name of a scorer
TINY "retrieval.scorer={name: 3}" → retrieval.scorer={'name': 3}: must be the name of a scorer
task=nope → task=nope: must be one of auto,
task=generate → task=generate: set prompt=
prompt=hello → prompt=hello: is for task=generate or inspect
task=generate run=nowhere tokenizer=bytes prompt=hello → run=nowhere: no such run, outputs/runs has no run
task=generate "run=''" prompt=hello → run=: names no run, write latest, a name or
output=a.txt/x task=status → a.txt is a file, no folder can be made there
TINY output=/proc/x task=prepare → /proc/x: No such file or directory: no folder
TINY data.cache=a.txt/x task=prepare → a.txt/x: Not a directory: no folder can be made there
tokenizer=bytes data.path=nowhere task=prepare → nowhere
trainer.threads=100000 → trainer.threads=100000: must be at least 1 and at most 1024
train.warmup=1 → train.warmup=1.0: must be above 0 and below 1
seed=99999999999999999999 → seed=99999999999999999999: must be a number of at most
"data.cache='NOTEXT'" → must be text in UTF-8
-m TINY model=glob(lstm*) → glob(lstm*): has no value
-m TINY train.max_lr=interval(0,1) → Can only enumerate CHOICE and RANGE sweeps
TINY retrieval.k=1,2 → cannot read the value 1,2 as one value: with -m it is a job of each;
SWEEP hydra/launcher=ray → Could not find 'hydra/launcher/ray'; Available options in 'hydra/launcher': basic
SWEEP hydra.launcher._target_=subprocess.run → Invalid plugin 'subprocess.run': not the hydra_plugins package
"+model.mine={_target_: os.system}" → unknown key model.mine
"+rows.a='hydra.searchpath=[pkg://proof]'" → hydra.searchpath=[pkg://proof]: settings of Hydra are for its command
data.repeats=${seed} → data.repeats=0: must be a list, as [value]
trainer.accelerator=zzz → trainer.accelerator=zzz: must be one of auto, cpu, gpu, cuda
memory.load=[nan] → memory.load=[nan]: is for task=generate or chat
memory.tier=disk memory.folder=noexist/x → memory.folder=noexist/x: there is no such folder, make it before
start_run={a:1} → start_run: is filled in, name the row to start from by start=
~train → train.steps='???': must be a number
~train.nope → 'train.nope' does not exist
--info all --cfg job → Only one of --run, --multirun, --cfg
--resolve task=plan → The --resolve flag can only be used
plan → plan: is no setting, write task=plan
hello → hello: is no setting, write KEY=VALUE
rows=x → rows=x: must be a mapping, as {name: value}
trainer.max_steps=3 → trainer.max_steps: Lightning's max_steps is set by train.steps
+trainer.limit_train_batches=3 → is set by train.steps or data.max_documents: a training takes each of its windows once
accumulate_grad_batches=3 → Lightning's accumulate_grad_batches is set by train.micro_batch
max_time=1 → max_time: there is no such setting; did you mean trainer.max_time?
+trainer.max_time=soon → trainer.max_time=soon: must be DD:HH:MM:SS, or a mapping
trainer.gradient_clip_val=1 model=transformer_xl → trainer.gradient_clip_val=1: is for whole windows
+callbacks.mine=3 → callbacks.mine=3: must be a mapping with _target_
logger.servise=csv → logger.servise: there is no such setting; did you mean logger.service?
k=3 → k: there is no such setting; did you mean retrieval.k?
"name='ESC[2J'" → name=\x1b[2J: must be of letters
eval.local=513 → eval.local=513 is longer than eval.length=512
size=nano eval.length=8192 → raise eval.span to at least 8192
eval.task=copy eval.length=511 → eval.length=511: must be a multiple of 2, at least 4: eval.task=copy
data.repeats=[] → data.repeats=[]: must have one number or more, at least 0 and at most 1
train.length=50 → model.block_size=50: a window of train.length=50 has no room for a block and its landmark
model=transformer data.repeats=[0.5] train.length=14 → train.length=14 has no room for a repeat, raise it
seeds=[1,1] → must be a list of different seeds
data.repeats=[nan] → data.repeats=nan: must be a finite number
train.start_lr=5 train.max_lr=1 → train.start_lr=5.0: is above train.max_lr=1.0, the highest of a training
train.max_lr=1e-4 → train.final_lr=0.0004: is above train.max_lr=0.0001
model=pretrained model.name=x tokenizer=bytes → tokenizer=bytes: x knows the ids of its own alone, leave it
size=nano train.micro_batch=100 → train.micro_batch has no effect here: it is for a larger train.batch_size
data.needles=4 → data.needles has no effect here: it is for data=passkey or eval.task=passkey
model=transformer_xl trainer=fsdp → trainer.strategy=fsdp: is for whole windows
cmt.cutoff=0.3 → cmt.cutoff=0.3: is for cmt=on
cmt=on model=transformer → cmt has no effect on model=transformer: it is for model=landmark
data.tasks=0.5 data.passkeys=0.5 → data.tasks=0.5 and data.passkeys=0.5: choose one of them
model=transformer retrieval.k=2 → retrieval.k has no effect on model=transformer: it is for model=landmark
memory.window=100 → memory.window has no effect on model=landmark: it is for model=transformer
model=landmark model.as_is=true → model.as_is=True: is for a model that model.name gives
model.architecture=x → model.architecture=x: there is no landmark/models/x.py that has a Model
model=pretrained_landmark model.name=x model.architecture=y → model.name=x and model.architecture=y: choose one of
task=generate prompt=x memory.save=y → memory.save=y: is for the memory of prompt_file
size=nanoo → size=nanoo: there is none; did you mean nano?
"+rows.a='model=transformer retrieval.k=2'" → row a: retrieval.k has no effect on model=transformer: it is for
"+rows.b='eval.lenght=3'" → row b: eval.lenght: there is no such setting; did you mean eval.length
"+rows.b='retrieval.k=-1'" → row b: retrieval.k=-1: must be at least 0
'+rows.b='"'"'eval.length=\'"'"'3'"'"'' → row b: No closing quotation
"+rows.b='retrieval.k=1,2'" → row b gives retrieval.k several values
"+rows.b='task=train'" → row b sets task, which belongs to the whole experiment
train.steps=1.5 → could not be converted to Integer
TINY tokenizer=gpt2 tokenizer.file=pipe → pipe is no file, but a pipe: name another tokenizer.file
output=taken task=status → taken/records/rows cannot be read (Not a directory): make it a readable folder
model=pretrained_landmark → model.name
model=transformer eval.local=360 → keeps no memory between chunks
eval.length=2048 eval.task=unique_blocks eval.local=1024 → eval.task=unique_blocks:
model=pretrained model.name=x eval.length=4096 eval.local=240 eval.task=unique_blocks → has no more blocks to choose
task=generate prompt=x generate.top_p=0 → generate.top_p=0.0: must be above 0
task=generate prompt=x generate.temperature=-1 → generate.temperature=-1.0: must be at least 0
model.kind=mamba → model.kind=mamba: must be one of transformer, landmark, transformer_xl
model.block_size=null → model.block_size=null: a landmark model needs it
model.landmark_bias=true model.landmark_key=token model.rotary_fraction=1 → needs a channel that does not turn
model=transformer_xl model.cache=null → model.cache=null: a transformer_xl model needs it
model=transformer model.num_kv_heads=3 → does not divide
BOOK prompt=Who? prompt_file=no.txt → prompt_file=no.txt: cannot be read (No such file or directory)
BOOK prompt=Who? prompt_file=[proof.py,no.txt] → prompt_file=no.txt: cannot be read (No such file or directory)
BOOK prompt=Who? prompt_file=[] → prompt_file=[]: must be a file, or a list of files
BOOK prompt=Who? "prompt_file={a: b}" → must be a file, or a list of files
BOOK prompt=Who? prompt_file=taken → prompt_file=taken: cannot be read (Is a directory)
BOOK prompt=Who? eval.length=512 → eval.length has no effect here: a question trains nothing, and reads no corpus
BOOK prompt=Who? prompt_file=a.txt memory.save=taken → memory.save=taken: exists already
BOOK prompt=Who? prompt_file=a.txt memory.save=a.txt/x → a.txt, name another one
-m TINY retrieval.k=range(1,99999999) → -m: has more than 10,000 combinations
FINETUNED "+rows.odd='model=landmark start=nowhere eval.length=512'" → start=nowhere: no such row
TINY "+rows={a: 'model.block_size=9', b: 'start=a'}" → start=a: that row's model has another shape
SHAPES "+rows={a: 'model=transformer', b: 'model=landmark start=a model.mlp_dim=9'}" → has another shape
SHAPES model=landmark start=base_512 → there is none
TUNED "+rows.odd='model=pretrained start=passkey-dense_4096'" → start=passkey-dense_4096: that row trains nothing
TUNED "+rows.odd='model=pretrained_landmark start=training'" → model.name=DIR and start=training: a training starts
TABLE1 row=landmark_9 → row=landmark_9: no such row (one of plain_512, plain_360
TABLE1 eval.length=512 → on the command line, but row plain_512 sets eval.length
TABLE1 ++retrieval.k=2 → on the command line, but row landmark_512 sets retrieval.k
seeds=[3,4] seed=5 → seed: set on the command line, but seeds is set too
"+rows={a: 'model=transformer'}" "+compare={this: [a,c]}" → this: [a, c] must be the names of two rows
"+rows={a: 'model=landmark memory.blocks=4 retrieval.k=8'}" → row a: memory.blocks=4: is less than retrieval.k
""".strip()


# Values out of the range or the choices of one setting, which the line names with what it must be.
OUT_OF_RANGE = """
train.weight_decay=-1 seeds=[0,-1] train.steps=0
data.passkeys=1.5 data.repeats=[0.5,1.1] model.block_size=0 model.alpha=1.5 trainer.strategy=zzz eval.split=train
eval.task=qa train.precision=8 logger.service=loud model.landmark_key=pooled model.backend=magic trainer.devices=-1
train.final_lr=inf
"""
LINES = [*REFUSED.splitlines(), *(f"{word} → {word.partition('=')[0]}=…: must be " for word in OUT_OF_RANGE.split())]


def spelt(text: str) -> str:
    for name, meant in SHORT.items():
        text = text.replace(name, meant)
    return text


@pytest.mark.parametrize("line", LINES)
def test_it_is_one_line_and_nothing_is_left(here, line, monkeypatch):
    typed, _, said = spelt(line).partition(" → ")
    words = shlex.split(typed)
    (here.folder / "taken" / "records").mkdir(parents=True)
    (here.folder / "taken" / "records" / "rows").touch()
    (here.folder / "a.txt").touch()
    (here.folder / "odd").mkdir()
    (here.folder / "odd" / "runs").touch()
    os.mkfifo(here.folder / "pipe")
    (here.folder / "proof.py").write_text("open('ran', 'w')")
    monkeypatch.syspath_prepend(here.folder)
    ended = here(*words, *["task=plan"] * (not any(word.startswith("task=") for word in words)))
    assert ended.code == 2, ended
    assert ended.err.startswith("error: ")
    assert all(part in ended.err for part in said.split("…"))
    assert ended.err.count("\n") == 1
    left = {str(path.relative_to(here.folder)) for path in here.folder.rglob("*") if path.is_file()}
    if "task=prepare" in words:  # a job has begun
        left -= {path for path in left if ".hydra" in path or path.endswith("landmark.log")}
    assert left == {"a.txt", "odd/runs", "proof.py", "taken/records/rows"}
