"""Values and files that ended in tracebacks far from their cause are one line that names them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from landmark.cli import main as app
from landmark.cli.exit_codes import said
from landmark.data.documents import make_source
from landmark.evaluation.generation import prompt_texts
from landmark.utils.errors import Diverged, UserError

ROOT = Path(__file__).parents[2]
VALUES = {
    "task=nope": "task=nope: must be one of auto, ",
    "trainer.threads=100000": "trainer.threads=100000: must be at most 1024",
    "trainer.devices=-1": "trainer.devices=-1: must be auto, a number from 1 on",
    "trainer.devices=two": "trainer.devices=two: must be auto",
    "train.max_lr=nan": "train.max_lr=nan: must be",
    "train.final_lr=inf": "train.final_lr=inf: must be a finite number",
    "train.weight_decay=-1": "train.weight_decay=-1.0: must be at least 0",
    "train.beta1=1": "train.beta1=1.0: must be at least 0 and less than 1",
    "train.beta2=-0.1": "train.beta2=-0.1: must be at least 0 and less than 1",
    "train.warmup=nan": "train.warmup=nan: must be",
    "generate.temperature=nan": "generate.temperature=nan: must be a finite number",
    "model.rope_base=0": "model.rope_base=0.0: must be above 0",
    "seeds=[0,-1]": r"seeds=\[0, -1\]: must be at least 0",
    "seed=99999999999999999999": "seed=99999999999999999999: must be a number of at most 64 bits",
    "data.cache='\udcff'": "data.cache='.udcff': must be text in UTF-8",
}


@pytest.mark.parametrize("override", VALUES)
def test_a_value_that_no_setting_can_have(work, override):
    with pytest.raises(UserError, match=rf"(?s)^{VALUES[override]}"):
        work("model=landmark", override)
    assert work.trained == []


def test_a_page_has_the_name_of_one(work):
    """A page may hold a line that Python would run in a file *.pth."""
    with pytest.raises(UserError, match=r"output_file=mine\.pth: is a page, name it \*\.html"):
        work("model=landmark", "task=inspect", "prompt=text", "output_file=mine.pth")


@pytest.mark.parametrize("flags", [["--resolve"], ["-m", "--info"]])
def test_flags_that_do_not_go_together(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", *flags])
    with pytest.raises(SystemExit) as stop:
        app.main()
    assert stop.value.code == 2
    assert re.fullmatch(r"error: .*--(resolve|info).*\n", capsys.readouterr().err)


class TestDivergence:
    @pytest.mark.parametrize("error", [OverflowError("math range error"), Diverged("diverged: the loss became nan")])
    def test_of_a_row_does_not_end_the_table(self, work, capsys, error):
        work.fail_at, work.error = "plain_360", error
        with pytest.raises(UserError, match="1 row diverged and left no record: plain_360; the lines above say where"):
            work("+experiment=table1_pg19")
        assert len(work.evaluated) == 12
        said = capsys.readouterr().out
        assert "[2/13] plain_360: diverged: " in said
        assert "written: " in said

    def test_of_a_training_is_tried_once(self, work, monkeypatch, capsys):
        trained = work.train

        def train(config, folder, *more):
            results = trained(config, folder, *more)
            if config.model.kind == "landmark":
                for path in folder.glob("model*"):
                    path.unlink()
                raise Diverged("diverged: the loss became nan at step 3")
            return results

        monkeypatch.setattr("landmark.experiment.training.train_here", train)
        with pytest.raises(UserError, match=r"\d rows diverged and left no record: landmark_512"):
            work("+experiment=table1_pg19")
        assert work.trained == ["transformer", "landmark", "transformer_xl"]
        assert "landmark_2048_k2: its run diverged" in capsys.readouterr().out


@pytest.mark.parametrize("line", ['{"text": "\\ud800"}', "[" * 100_000])
def test_a_line_of_json(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "whole"}) + f"\n{line}\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: no JSON object with a \"text\""):
        read(make_source(path))


def read(source):
    return [document for split in ("train", "validation", "test") for document in source.documents(split)]


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"a book " * 100)
    texts = [document.text for document in read(make_source(tmp_path / "a.txt"))]
    assert texts[0].startswith("a book")
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfa prompt")
    assert prompt_texts(settings(prompt_file=str(tmp_path / "prompt.txt"))) == ["a prompt"]


def settings(**changes):
    from dataclasses import replace

    from landmark.config import to_config
    from tests.configurations import compose_conf

    return replace(to_config(compose_conf([])), **changes)


def test_a_file_without_an_end_is_not_read():
    with pytest.raises(UserError, match=r"prompt_file=/dev/zero: is a device, name a file \(- for standard input\)"):
        prompt_texts(settings(prompt_file="/dev/zero"))


def test_cleaning_keeps_the_results():
    (rule,) = re.findall(r"^clean:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "outputs" not in rule


def test_a_following_process_says_nothing_where_the_first_refuses(tmp_path):
    """The first has said what is wrong."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "run.py"), "+experiment=quickstart", "train.steps=-1", "trainer=ddp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode != 0
    assert "error: row twice_last_blocks: train.steps=-1: must be at least 1" in done.stderr
    assert "Connection closed by peer" not in done.stderr
    assert "first_says" not in done.stderr


def test_a_missing_extra_is_named():
    error = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    assert said(error) == "this needs the package transformers: pip install 'landmark[hf]'"
    assert said(ModuleNotFoundError("No module named 'nowhere'", name="nowhere")) is None  # a bug
