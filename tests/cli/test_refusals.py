"""Commands that cannot be carried out: one line on stderr, exit code 2, and nothing is left."""

import pytest

TINY = ("data=stdlib", "tokenizer=bytes", "size=nano", "model=landmark")
SWEEP = ("-m", *TINY, "task=plan", "retrieval.k=1,2")
SLURM = (*SWEEP, "hydra/launcher=submitit_slurm")
ONLY = "of Hydra's own settings only hydra/launcher and hydra.launcher.… are read"
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    # of the grammar, and of names
    "misspelt key": (("model.blok_size=3",), "did you mean model.block_size?"),
    "misspelt key with a plus": (("+eval.tokns=3",), "unknown key eval.tokns"),
    "near a setting": (("train.step=200",), "train.step: there is no such setting; did you mean train.steps?"),
    "near an experiment": (("+experiment=tabel1_pg19",), "experiment=tabel1_pg19: there is none; did you mean table1"),
    "wrong type": (("train.steps=many",), "could not be converted to Integer"),
    "no such group member": (("size=huge",), "Available options in 'size': nano, paper, small"),
    "signs of the grammar": (
        ("task=generate", "prompt=Where? (there)"),
        "prompt: Hydra's grammar cannot read the value Where? (there); if it is a text, quote it twice: "
        "'prompt=\"Where? (there)\"'",
    ),
    # flags
    "a setting as a flag": (("--experiment=x",), "--experiment=x: settings have no dashes, write +experiment=x"),
    "an unknown flag": (("--info",), "--info: there is no such flag, only --config-dir, --cfg job, -m, "),
    "settings of Hydra's own": (("--cfg", "hydra"), "--cfg hydra: shows the settings of a job"),
    "a part of a flag": (("--config-d=.", "task=status"), "--config-d=.: there is no such flag"),
    "a pickle": (("--experimental-rerun=mine.pickle",), "there is no such flag"),
    "another configuration": (("--config-name", "mine"), "--config-name: there is no such flag"),
    "no folder of settings": (("--config-dir", "nowhere", "task=status"), "--config-dir nowhere: is not a folder"),
    "completion of no shell": (("-sc", "query=cmd"), "-sc query=cmd: write install=SHELL, a SHELL of bash, "),
    # tasks
    "no such task": (("task=nope",), "task=nope: must be one of auto, "),
    "no prompt": (("task=generate",), "task=generate: set prompt="),
    "prompt of another task": (("prompt=hello",), "prompt=hello: is for task=generate or inspect"),
    "generate from no run": (
        ("task=generate", "run=nowhere", "tokenizer=bytes", "prompt=hello"),
        "run=nowhere: no such run, outputs/runs has no run",
    ),
    "run without a name": (("task=generate", "run=''", "prompt=hello"), "run=: names no run, write latest, a name or"),
    "report of nothing": (("task=report",), "outputs: there are no records to report"),
    # folders
    "output below a file": (("output=a.txt/x", "task=status"), "a.txt is a file, no folder can be made there"),
    "output is a file": (("output=a.txt", "task=prepare"), "a.txt is a file, no folder can be made there"),
    "output in no file system": (
        (*TINY, "output=/proc/x"),
        "/proc/x: No such file or directory: no folder",
    ),
    "cache below a file": (
        (*TINY, "data.cache=a.txt/x", "task=prepare"),
        "a.txt/x: Not a directory: no folder can be made there",
    ),
    "missing corpus": (("tokenizer=bytes", "data.path=nowhere", "task=prepare"), "nowhere"),
    # rows and values
    "row and command line": (("+experiment=quickstart", "model=landmark"), "but row twice_last_blocks sets model="),
    "out of range": (("retrieval.k=-1",), "retrieval.k=-1: must be at least 0"),
    "many threads": (("trainer.threads=100000",), "trainer.threads=100000: must be at least 1 and at most 1024"),
    "less than a device": (("trainer.devices=-1",), "trainer.devices=-1: must be auto, a number from 1 on"),
    "devices in words": (("trainer.devices=two",), "trainer.devices=two: must be auto"),
    "not a number": (("train.max_lr=nan",), "train.max_lr=nan: must be"),
    "infinite": (("train.final_lr=inf",), "train.final_lr=inf: must be a finite number"),
    "negative": (("train.weight_decay=-1",), "train.weight_decay=-1.0: must be at least 0"),
    "one": (("train.warmup=1",), "train.warmup=1.0: must be above 0 and below 1"),
    "a share that is no number": (("train.warmup=nan",), "train.warmup=nan: must be"),
    "a temperature that is no number": (("generate.temperature=nan",), "generate.temperature=nan: must be a finite"),
    "zero": (("train.max_lr=0",), "train.max_lr=0.0: must be above 0"),
    "one of the seeds": (("seeds=[0,-1]",), "seeds=[0, -1]: must be at least 0"),
    "beyond 64 bits": (
        ("seed=99999999999999999999",),
        "seed=99999999999999999999: must be a number of at most",
    ),
    "no text": (("data.cache='\udcff'",), "must be text in UTF-8"),
    # sweeps
    "a pattern without a match": (
        ("-m", *TINY, "model=glob(lstm*)"),
        "glob(lstm*): matches nothing in conf/model",
    ),
    "no list of values": (("-m", *TINY, "train.max_lr=interval(0,1)"), "train.max_lr=interval(0,1): has no list of"),
    "several values without -m": ((*TINY, "retrieval.k=1,2"), "retrieval.k=1,2"),
    "a launcher without -m": ((*TINY, "hydra/launcher=joblib"), "hydra/launcher=joblib: is for sweeps, write -m"),
    "no such launcher": ((*SWEEP, "hydra/launcher=ray"), "hydra/launcher=ray: must be one of basic, joblib, "),
    "no process": ((*SWEEP, "hydra/launcher=joblib", "hydra.launcher.n_jobs=0"), "n_jobs=0: must be at least 1"),
    "no nodes": ((*SLURM, "hydra.launcher.nodes=0"), "hydra.launcher.nodes=0: must be at least 1"),
    "time in words": ((*SLURM, "hydra.launcher.timeout_min=long"), "hydra.launcher.timeout_min=long: Value 'long'"),
    "a launcher for code": ((*SWEEP, "hydra.launcher._target_=subprocess.run"), "Key '_target_' not in 'Basic'"),
    "several launchers": ((*SWEEP, "hydra/launcher=basic,joblib"), "hydra/launcher="),
    # Hydra's own settings, which may run code, tell a secret, or write where Python reads
    "the environment": (
        ("+hydra.job.env_set.LD_PRELOAD=evil.so",),
        ONLY,
    ),
    "a copy of the environment": (("hydra.job.env_copy=[PATH]",), ONLY),
    "the environment, by interpolation": (
        ("hydra.job.env_set=${next_commands}", "+next_commands.GIT_CONFIG_COUNT='1'"),
        ONLY,
    ),
    "a handler, by interpolation": (
        ("hydra.job_logging.handlers.console=${next_commands}", "+next_commands.class=subprocess.Popen"),
        ONLY,
    ),
    "a log file that Python runs": (
        (
            "+hydra.job_logging.handlers.mine={class: logging.FileHandler, filename: outputs/mine.pth}",
            "hydra.job_logging.formatters.simple.format='import os; os.system(\"touch ran\")'",
        ),
        ONLY,
    ),
    "a callback": (("hydra.callbacks.table._target_=os.system",), ONLY),
    "a sweeper": (("-m", "hydra.sweeper._target_=os.system"), ONLY),
    "a handler": (
        ("hydra.job_logging.handlers.console.class=os.system",),
        ONLY,
    ),
    "a search path": (("hydra.searchpath=[pkg://proof]",), ONLY),
    "lines of a script": ((*SLURM, "hydra.launcher.setup=['touch ran']"), "Key 'setup' not in 'SubmititSlurm'"),
    "another Python": ((*SLURM, "+hydra.launcher.python=evil"), "Key 'python' not in 'SubmititSlurm'"),
    "an expression": (
        (*SWEEP, "hydra/launcher=joblib", "hydra.launcher.pre_dispatch='1+1'"),
        "Key 'pre_dispatch' not in 'Joblib'",
    ),
    "code in a setting": (("+model.mine={_target_: os.system}",), "unknown key model.mine"),
    "a secret in a name": (("name=${oc.env:SECRET}",), "Unsupported interpolation type oc.env"),
    "a secret in a folder": (("data.path='\\\\\\\\${oc.env:SECRET}'",), "Unsupported interpolation type oc.env"),
    "a secret of a launcher": ((*SLURM, "hydra.launcher.comment=${oc.env:SECRET}"), "Unsupported interpolation type"),
    "a text that becomes settings": (("name=${oc.decode:single}",), "Unsupported interpolation type oc.decode"),
    "a search path in a row": (
        ("+rows.a='hydra.searchpath=[pkg://proof]'",),
        "hydra.searchpath=[pkg://proof]: settings of Hydra are for its command line alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_one_line_and_nothing_is_left(here, case, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    words, said = REFUSED[case]
    (here.folder / "a.txt").touch()
    (here.folder / "proof.py").write_text("open('ran', 'w')")
    monkeypatch.syspath_prepend(here.folder)
    ended = here(*words)
    assert ended.code == 2, ended
    assert ended.err.startswith("error: ")
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert "hunter2" not in ended.out + ended.err
    left = {str(path.relative_to(here.folder)) for path in here.folder.rglob("*") if path.is_file()}
    assert left == {"a.txt", "proof.py"}
