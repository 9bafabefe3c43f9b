"""What is made and what is read from records, with stand-ins for the training and the evaluation themselves."""

import json
import re
import shutil
import sys

import pytest

from landmark.cli import main, tasks
from landmark.experiment.config import schema, to_config
from landmark.experiment.config.rows import quoted
from landmark.experiment.runs import runner
from landmark.experiment.runs.jobs import Inputs
from landmark.utils.errors import Diverged, UserError
from tests.configurations import compose_conf

TEXTS = [
    "Who is Kim, and why?",
    "What's up (now)?",
    "Où? {a: 1}",
    "[1]",
    "1e3",
    "TRUE",
    "range(1,3)",
    " a ",
    '\'tis, "so"',
]
TEXTS += [r"C:\new, end\ ", r"a\b\\", r"\"x\" ${seed}, \${seed}", "a = b", "${seed}", r"x\,y", "'a','b'"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_the_text_that_was_typed_and_what_is_quoted_for_hydra_is_read_as_it_stands(text):
    typed = [main._as_typed(word) for word in (f"prompt={text}", quoted(f"data.path={text}"), "prompt_file=a")]
    config = to_config(compose_conf(typed))
    assert (config.prompt, config.data.path) == (text, text)


def test_table_trains_each_run_once_and_evaluates_each_row_and_a_second_start_only_renders(work, capsys):
    work("+experiment=table1_pg19")
    assert work.trained == ["transformer", "landmark", "transformer_xl"]
    assert len(work.evaluated) == 13
    first = capsys.readouterr().out
    assert "16.32" in first
    assert {path.suffix for path in (work.output / "tables" / "table1_pg19").iterdir()} == {".csv", ".md", ".png"}
    work("+experiment=table1_pg19")
    assert (work.trained, work.evaluated) == ([], [])
    second = capsys.readouterr().out
    assert first[first.index("table1_pg19:") : first.index("written")] in second
    assert "0 of 13 rows evaluated now" in second
    work("+experiment=table2_granularity")  # which shares its run and three rows with Table 1
    assert work.trained == []
    assert [name for name in work.evaluated if name.startswith("per_token_and_head")] == []
    assert len(work.evaluated) == 6


@pytest.mark.parametrize("error", [OverflowError("math range error"), Diverged("diverged: the loss became nan")])
def test_a_row_that_diverges_does_not_end_the_table(work, capsys, error):
    work.fail_at, work.error = "plain_360", error
    with pytest.raises(UserError, match="1 row diverged and left no record: plain_360; the lines above say where"):
        work("+experiment=table1_pg19")
    assert len(work.evaluated) == 12
    said = capsys.readouterr().out
    assert "[2/13] plain_360: diverged: " in said
    assert "written: " in said


def test_a_training_that_diverges_is_tried_once(work, monkeypatch, capsys):
    trained = work.train

    def train(config, folder, *more):
        results = trained(config, folder, *more)
        if config.model.kind == "landmark":
            for path in folder.glob("model*"):
                path.unlink()
            raise Diverged("diverged: the loss became nan at step 3")
        return results

    monkeypatch.setattr("landmark.experiment.runs.runner.train_here", train)
    with pytest.raises(UserError, match=r"\d rows diverged and left no record: landmark_512"):
        work("+experiment=table1_pg19")
    assert work.trained == ["transformer", "landmark", "transformer_xl"]
    assert "landmark_2048_k2: its run diverged" in capsys.readouterr().out


def test_one_row_trains_and_evaluates_only_what_it_needs_and_says_where_it_comes_from(work):
    work("+experiment=table1_pg19", "row=plain_360")
    assert (work.trained, work.evaluated) == (["transformer"], ["plain_360"])
    assert not (work.output / "tables").exists()
    (path,) = (work.output / "records" / "rows").iterdir()
    record = json.loads(path.read_text())
    assert record["labels"]["overrides"][-3:] == ["model=transformer", "eval.length=360", "eval.local=360"]
    assert {"commit", "versions", "hardware", "command", "time"} <= record["provenance"].keys()
    assert record["results"]["segments"]


def test_rows_with_the_same_settings_are_one_and_a_configuration_alone_is_a_row(work, capsys):
    work("+experiment=table1_pg19", "row=plain_512", "train.steps=5")
    work("+experiment=ablation_retrieval", "row=full_512", "train.steps=5")
    assert (work.trained, work.evaluated) == ([], [])
    work("model=landmark", "retrieval.k=2", "eval.length=1024")
    work("model=landmark", "retrieval.k=3", "eval.length=1024", "name=other")
    assert (work.trained, work.evaluated) == ([], ["other"])
    for _ in range(2):
        work("model=landmark", "eval.task=copy", "eval.length=96", "eval.tokens=null")
    said = capsys.readouterr().out
    assert re.search(r"single: first copy \d\.\d{4} ± \S+, second copy \d\.\d{4} ± \S+, from its record", said)


def test_seeds_train_a_run_each(work, capsys):
    work("+experiment=quickstart", "data=pg19", "seeds=[0,1]")
    assert work.trained == ["landmark", "landmark", "transformer", "transformer"]
    assert len(work.evaluated) == 12
    assert "± is a standard error: over 2 seeds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model=landmark eval.length=100000 eval.span=100000", "longer than the split"),
        (
            "model=landmark eval.task=copy eval.length=8000 eval.tokens=null",
            r"eval\.prompts=50: the test split has [\d,]+ tokens, that is \d+ stretches of 4,000 for eval.task",
        ),
        (
            "model=transformer trainer=ddp trainer.accelerator=cpu trainer.devices=3",
            r"batch_size=4 cannot be shared evenly by 3 devices: set trainer\.devices",
        ),
        ("+experiment=quickstart data=pg19 task=generate prompt=a", "task=generate: 6 rows, choose one with row="),
        ("model=landmark run=.", "run.json does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_trained(work, words, said):
    with pytest.raises(UserError, match=said):
        work(*words.split())
    assert (work.trained, (work.output / "runs").exists(), (work.output / "tables").exists()) == ([], False, False)


def test_a_task_does_its_own_part_and_run_names_the_one_to_train(work, capsys):
    given = ("+experiment=quickstart", "data=pg19")
    work(*given, "task=prepare")
    assert work.trained == []
    assert "train 1" in capsys.readouterr().out
    said = r"run=nothing: no run of quickstart \(one of landmark-.*, transformer-"
    with pytest.raises(UserError, match=said) as error:
        work(*given, "task=train", "run=nothing")
    name = str(error.value).rpartition(", ")[2].rstrip(")")
    work(*given, "task=train", f"run=outputs/runs/{name}")
    assert (work.trained, [path.name for path in (work.output / "runs").iterdir()]) == (["transformer"], [name])
    work(*given, "task=train")
    assert (work.trained, work.evaluated) == (["landmark"], [])
    assert set(tasks.TASKS) == set(schema.TASKS)


def test_plan_makes_nothing_and_says_what_is_missing(work, capsys):
    work("+experiment=quickstart", "data=pg19", "task=plan")
    assert "missing: 2 runs, 6 rows" in capsys.readouterr().out
    assert not work.output.exists()
    work("+experiment=quickstart", "data=pg19", "row=landmark_2048")
    work("+experiment=quickstart", "data=pg19", "task=plan")
    assert (work.trained, work.evaluated) == ([], [])
    planned = capsys.readouterr().out
    assert "missing: 1 run, 5 rows" in planned
    assert re.search(r"^row landmark_2048 +done", planned, re.MULTILINE)
    assert re.search(r"on a cluster: python .* -m .*task=train run=transformer-\S+ hydra/launcher=slurm", planned)
    assert "measured, 1 run" in planned


def test_a_plan_needs_no_ranks_and_a_wrong_folder_is_named(work, capsys, monkeypatch):
    from tiktoken_ext import openai_public

    def unreachable():
        raise ConnectionError("no route to host")

    monkeypatch.setattr(openai_public, "r50k_base", unreachable)
    given = ("+experiment=table1_pg19", "size=nano", f"output={work.output}")
    work.task(*given, "task=plan")
    assert "missing: 3 runs, 13 rows" in capsys.readouterr().out
    work.task(*given, "task=status")
    assert "16 missing" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"data\.path: nowhere is not a folder"):
        work.task(*given, "data.path=nowhere")
    with pytest.raises(UserError, match=r"or choose tokenizer=bytes, which needs no file"):
        work.task(*given, *work.common[:1])
    assert not work.output.exists()


def test_run_whose_weights_are_gone_is_trained_again(work):
    work("model=transformer")
    (weights,) = work.output.rglob("model.safetensors")
    weights.unlink()
    work("model=transformer", "eval.length=300")
    assert (work.trained, len(work.evaluated)) == (["transformer"], 1)


def test_trained_folder_can_be_evaluated_anywhere(work, tmp_path):
    work("model=landmark", "task=train")
    (folder,) = (work.output / "runs").iterdir()
    shutil.move(folder, tmp_path / "given")
    work("model=landmark", f"run={tmp_path / 'given'}", f"output={tmp_path / 'new'}")
    assert (work.trained, len(work.evaluated)) == ([], 1)
    with pytest.raises(UserError, match=r"another configuration: model\.block_size: 32 here, 50 there"):
        work("model=landmark", "model.block_size=32", f"run={tmp_path / 'given'}")


@pytest.mark.parametrize(("code", "raised"), [(1, KeyboardInterrupt), (144, SystemExit)])
def test_a_launchers_exit_is_no_interrupt(books, tmp_path, monkeypatch, code, raised):
    """Lightning makes an exit with code 1 of an interrupt; submitit exits once it has queued a job again."""

    def train(*_):
        raise SystemExit(code)

    monkeypatch.setattr("landmark.experiment.training.train", train)
    overrides = [f"data.path={books}", f"output={tmp_path}", "tokenizer=bytes", "size=nano", "logger=csv"]
    config = to_config(compose_conf([*overrides, "model=transformer"]))
    with pytest.raises(raised):
        runner.train_here(config, tmp_path, "run", None, {}, inputs=Inputs())


def test_task_table_reads_records_only_and_names_the_first_rows_that_are_missing(work, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py"])  # which the message repeats
    with pytest.raises(UserError, match=r"rows have no record yet") as raised:
        work("+experiment=sweep_k_local", "task=table")
    assert str(raised.value).endswith(", …")
    for row in ("plain_512", "landmark_2048_k4"):
        work("+experiment=table1_pg19", f"row={row}")
    capsys.readouterr()
    work("+experiment=table1_pg19", "task=table")
    assert (work.trained, work.evaluated) == ([], [])
    said = capsys.readouterr().out
    assert "table1_pg19, 2 of 13 rows: size nano" in said
    assert "11 of 13 rows have no record yet" in said
    assert "landmark_2048_k4 is better than plain_512" in said
    assert (work.output / "tables" / "table1_pg19" / "nano-pg19-bytes.png").exists()
