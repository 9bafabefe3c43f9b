"""The benchmark suite runs, writes the rows it prints, and times only exact implementations."""

import csv
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import attention, exactness, parts
from benchmarks.report import Target, compare
from benchmarks.settings import Options
from benchmarks.timing import Spread, interleave, ratios

ROOT = Path(__file__).parents[2]
RANKS = ROOT.parent / "shared" / "data" / "tokenizer" / "gpt2.tiktoken"


@pytest.fixture(scope="module")
def quick(books, tmp_path_factory) -> tuple[str, Path]:
    """The output of a quick run, and the folder of its results."""
    out = tmp_path_factory.mktemp("results")
    words = ["--quick", "--out", str(out), "--text", str(books)]
    words += ["--ranks", str(RANKS)] if RANKS.exists() else []
    command = [sys.executable, "-m", "benchmarks", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, out


def read_rows(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.glob("*.csv")
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_rows_are_finite_ratios_that_say_where_they_come_from_in_a_table_beside_picture_and_markdown(quick):
    """Tokenising is left out only where there are no ranks."""
    table, rows = quick[0].partition("\npart ")[2].splitlines()[2:], read_rows(quick[1])
    for line, row in zip(table, rows):
        assert all(row[column] in line for column in ("part", "setting", "measured", "unit", "target", "verdict"))
    assert table[len(rows)] == ""
    (written,) = quick[1].glob("*.md")
    (growth,) = quick[1].glob("*.png")
    assert all(path.stat().st_size > 1000 for path in (written, growth))
    assert ("Tokenising was left out" in quick[0]) != RANKS.exists()
    assert {row["part"] for row in rows} == set(benchmarks.PARTS)
    for row in rows:
        for column in ("value", "value_low", "value_high", "ratio", "ratio_low", "ratio_high"):
            assert 0 < float(row[column]) < math.inf, row
        assert all(row[column] for column in ("hardware", "versions", "commit", "command", "time")), row
        assert (row["verdict"] in ("met", "missed")) == bool(row["target"])


def test_competitors_take_turns_and_the_warmup_does_not_count():
    passed, order, left = [0.0], [], {"a": iter((100, 1, 2, 3)), "b": iter((100, 2, 8, 9))}

    def work(name):
        order.append(name)
        passed.append(next(left[name]))

    functions = {name: partial(work, name) for name in left}
    seconds = interleave(functions, rounds=3, warmup=1, clock=lambda: sum(passed))
    assert seconds == {"a": [1, 2, 3], "b": [2, 8, 9]}
    assert order == ["a", "b"] * 4


def test_medians_quartiles_ratios_and_targets():
    """The machine slows down tenfold in the second round: a ratio, taken round by round, does not notice."""
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert ratios([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.0, 3)
    targets = {"slow": Target("≤", 1.15), "fast": Target("≥", 0.9)}
    values = {"base": [1.0, 1.0], "slow": [1.2, 1.2], "fast": [0.95, 0.95]}
    assert [row.verdict for row in compare("part", "setting", "ms", values, "base", targets)] == ["", "missed", "met"]


def test_what_is_not_exact_is_not_timed(monkeypatch, tmp_path, capsys):
    def wrong(q, k, v, layout, *, backend="auto", **settings):
        out, lse = attention_function(q, k, v, layout, backend=backend, **settings)
        return out if backend == "reference" else out * (1 + 1e-8), lse

    def timed(*_, **__):
        raise AssertionError("timed")

    attention_function = attention.landmark_attention
    monkeypatch.setattr(attention, "landmark_attention", wrong)
    monkeypatch.setattr(attention, "interleave", timed)
    monkeypatch.setattr(parts, "use_threads", lambda: None)
    status = benchmarks.main(["--quick", "--only", "attention", "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert status == 1
    assert error.startswith("error: attention T=130, d=8: tensor 0 is off by 1.0e-08 in float64")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
    exact = torch.ones(4, dtype=torch.float64)
    exactness.check_float32("x", [exact * 1.0019], [exact * 1.001], [exact])
    with pytest.raises(exactness.Inexact, match="float32"):
        exactness.check_float32("x", [exact * 1.0021], [exact * 1.001], [exact])
    with pytest.raises(exactness.Inexact, match="float64"):
        exactness.check_float64("x", [exact * math.nan], [exact])


def test_a_part_in_its_own_process_reports_as_here(quick):
    report = parts.in_own_process("generation", Options(quick=True), 0.0)
    measured = [row["measured"] for row in read_rows(quick[1]) if row["part"] == "generation"]
    assert {row.measured for row in report.rows} == set(measured)


def test_unreadable_files_and_unknown_parts_are_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmarks, "measure", None)
    assert benchmarks.main(["--quick", "--ranks", str(tmp_path / "none"), "--out", str(tmp_path)]) == 1
    assert "does not exist: name another tokenizer.file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmarks.parse(["--only", "attention,speed"])
    assert "unknown part speed" in capsys.readouterr().err


def test_a_wrapped_model_is_measured_beside_the_plain_one(tmp_path):
    pytest.importorskip("transformers", reason="the optional extra `hf` is not installed")
    from benchmarks import wrapped

    assert wrapped.main(["--quick", "--longest", "100", "--out", str(tmp_path), "--note", "A busy machine."]) == 0
    rows = read_rows(tmp_path)
    measured = {(row["part"], row["setting"]) for row in rows}
    assert measured == {
        ("prefill", "96 tokens"),
        ("decode", "after 96 tokens"),
        ("memory", "keys and values of 96 tokens"),
        ("memory", "peak of a process, 96 tokens"),
    }
    assert [row["measured"] for row in rows] == [wrapped.PLAIN, wrapped.OURS] * 4
    assert all(0 < float(row["value"]) < math.inf and 0 < float(row["ratio"]) < math.inf for row in rows)
    (table,) = tmp_path.glob("*-wrapped.md")
    assert "A busy machine." in table.read_text(encoding="utf-8")


def test_a_pretrained_model_is_measured_beside_its_own_cache(tmp_path):
    pytest.importorskip("transformers")
    from benchmarks import pretrained_cost
    from tests.models.huggingface.conftest import save_model

    save_model(tmp_path / "model")
    words = ["--lengths", "700", "--tokens", "2", "--rounds", "1", "--out", str(tmp_path)]
    assert pretrained_cost.main([str(tmp_path / "model"), *words]) == 0
    rows = read_rows(tmp_path)
    assert [row["measured"] for row in rows] == [pretrained_cost.PLAIN, pretrained_cost.BLOCKS] * 3
    assert {row["part"] for row in rows} == {"reading", "generating", "memory"}
    assert all(float(row["value"]) > 0 for row in rows)
    assert str(tmp_path) not in rows[0]["command"].partition("--out")[0]


def test_a_file_beside_another_engine(tmp_path, monkeypatch):
    """llama.cpp is another process of ours here, since it takes an hour to build."""
    pytest.importorskip("gguf")
    from benchmarks import engines, pretrained_cost
    from tests.models.gguf.writing import make_model, write

    write(file := tmp_path / "small.gguf", "llama", make_model("llama"))
    monkeypatch.setattr(engines, "TOKENS", 2)
    found = engines.measure(engines.BLOCKS, str(file), [20, 40], [3] * 60)
    assert [*found] == ["first token", "reading 20", "generating 20", "reading 40", "generating 40", "peak"]
    assert all(value > 0 for value in found.values())
    monkeypatch.setattr(pretrained_cost.engines, "LLAMA", "another")
    with pytest.raises(pretrained_cost.UserError, match="another ended with exit status 2"):
        list(pretrained_cost.beside_llama(str(file), [20], [3] * 40, 1, print))
