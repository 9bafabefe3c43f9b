"""run.py's tasks on short books, with stand-ins for the training and the evaluation themselves."""

import json
import math
import random
from pathlib import Path

import pytest

from landmark.cli import main as app
from landmark.experiment.config import to_config
from landmark.utils.files import sealed
from tests.configurations import compose_conf


def write_books(folder: Path) -> Path:
    """Three splits of one short book each."""
    draw = random.Random(0)
    for number, split in enumerate(("train", "validation", "test"), 1):
        (folder / split).mkdir()
        text = " ".join(draw.choice(["landmark", "block", "memory"]) for _ in range(2000))
        (folder / split / f"{number}.txt").write_text(text)
    return folder


def run_task(*words):
    app.run(to_config(compose_conf(list(words))), list(words), compose_conf)


class Workplace:
    """Runs tasks below a folder, and notes what was trained and evaluated. The row `fail_at` ends in an error."""

    def __init__(self, books: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = output
        self.common = [f"data.path={books}", f"output={output}", "tokenizer=bytes", "size=nano", "logger=csv"]
        self.common += ["trainer=cpu", "eval.tokens=8192"]
        self.trained, self.evaluated = [], []
        self.fail_at, self.error = None, KeyboardInterrupt()
        monkeypatch.setattr("landmark.experiment.runs.runner.train_here", self.train)
        monkeypatch.setattr("landmark.experiment.runs.runner.evaluate_row", self.evaluate)

    def __call__(self, *overrides):
        self.task(*self.common, *overrides)

    def task(self, *overrides):
        """Without the settings that all have in common."""
        self.trained.clear()
        self.evaluated.clear()
        run_task(*overrides)

    def train(self, config, folder, *_):
        self.trained.append(config.model.kind)
        for name in ("model.safetensors", "config.json"):
            (folder / name).write_text("{}")
        lines = [f"{step},{3 + 4 / step},{3.1 if step % 50 == 0 else ''}\n" for step in range(10, 200, 10)]
        (folder / "metrics.csv").write_text("step,train/loss,validation/loss\n" + "".join(lines) + "200,3")
        measured = {"tokens_per_second": 1e4, "flops_per_token": 1e6, "validation_perplexity": 9.0}
        return {"steps": config.train.steps, **measured}

    def evaluate(self, job, _):
        config, name = job.config, job.name
        if name == self.fail_at:
            raise self.error
        self.evaluated.append(name)
        far = config.eval.length / 1e5 + config.retrieval.k / 1e3
        nll = 1.0 + (config.model.kind == "transformer") - far
        spans = [[4096 * i, 1024, 1024 * nll + (i + far) / 4] for i in range(8)]
        results = {"tokens": 8192, "nll": nll, "perplexity": math.exp(nll), "bits_per_byte": nll}
        results["keys_attended"] = 100.0 * config.retrieval.k + (config.eval.local or 0)
        results |= {"tokens_per_second": 8192.0, "seconds": 1.0, "segments": spans, "position_nll": []}
        if config.eval.probe == "copy":
            del results["bits_per_byte"]
            copies = {"first_copy": nll, "second_copy": 0.1, "first_segments": spans}
            results |= copies | {
                "perplexity": math.exp(0.1),
                "prompts": 2,
                "segments": [[4096 * i, 8, 0.8] for i in range(8)],
            }
        return results

    def edit(self, path, **parts):
        """Change parts of a record, as another version of this program might have."""
        record = json.loads(path.read_text())
        for name, values in parts.items():
            record[name] |= values
        path.write_text(json.dumps(sealed(record)))
