"""Values and files that ended in tracebacks far from their cause are one line that names them."""

import json
from pathlib import Path

import pytest

from landmark.data.documents import make_source
from landmark.evaluation.generation import prompt_texts
from landmark.utils.errors import Diverged, UserError
from tests.forked import TORCHRUN, python

ROOT = Path(__file__).parents[2]


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

        monkeypatch.setattr("landmark.experiment.runner.train_here", train)
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


def test_a_following_process_says_nothing_where_the_first_refuses(tmp_path):
    """The first has said what is wrong."""
    words = [str(ROOT / "run.py"), "+experiment=quickstart", "train.steps=-1", "trainer=ddp"]
    done = python(*TORCHRUN, "--standalone", "--nproc-per-node=2", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert "error: row twice_last_blocks: train.steps=-1: must be at least 1" in done.stderr
    assert "Connection closed by peer" not in done.stderr
    assert "first_says" not in done.stderr
