"""The files of real offline W&B runs, of a model too small to learn anything, and their dashboard."""

import json
from types import SimpleNamespace

import pytest

from landmark.experiment.runs.records import Records
from landmark.experiment.tracking.tracker import run_artifact
from landmark.utils.source_tree import commit
from tests.experiment.tracking.wandb_server import read_offline
from tests.workplace import run_task

TINY = [
    *("size=nano", "tokenizer=bytes", "trainer=cpu", "trainer.threads=1"),
    *("model.num_layers=2", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=4", "train.batch_size=2", "train.length=102", "train.log_every=2"),
    *("train.validate_every=4", "train.validate_batches=1"),
]
FIGURE5 = ["+experiment=figure5_unique_blocks", "cmt=on", "cmt.cutoff=0.01", "eval.tokens=4096"]


@pytest.fixture(scope="module")
def offline(books, tmp_path_factory):
    """The W&B runs of an experiment of three rows, and of a row of every other kind of measurement."""
    output = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        run_task(*FIGURE5, *TINY, f"data.path={books}", f"output={output}", "logger.weights=true")
        prompts = ("data=passkey", "eval.length=300", "eval.local=300", "eval.prompts=1", "eval.generated=1")
        run_task("model=landmark", *prompts, *TINY, f"output={output}")
        text = ("model=landmark", f"data.path={books}", *TINY, f"output={output}", "eval.prompts=2")
        run_task(*text, "eval.task=copy", "eval.length=128", "eval.local=64")
        run_task(*text, "model.masked=true", "eval.tokens=1024", "eval.length=128", "eval.local=128")
    runs = read_offline(output)
    kinds = {kind: [run for run in runs if run.job_type == kind] for kind in ("train", "evaluate", "table")}
    return SimpleNamespace(output=output, records=Records(output), runs=runs, **kinds)


def test_there_is_a_run_for_each_training_row_and_table_and_training_is_followed(offline):
    assert [len(runs) for runs in (offline.train, offline.evaluate, offline.table)] == [4, 6, 1]
    assert {run.identity for run in offline.train} == set(offline.records.read_all().runs)
    assert {run.identity for run in offline.evaluate} == set(offline.records.read_all().rows)
    assert [run.group for run in offline.train] == ["figure5_unique_blocks", *["single"] * 3]
    for run in offline.runs:
        assert (run.exit_code, run.config["commit"]) == (0, commit())
        assert (run.config["train.steps"], run.config["tokenizer.name"]) == (4, "bytes")
    granularities = {run.config["retrieval.granularity"] for run in offline.evaluate}
    assert granularities == {"per_token_and_head", "per_token", "per_head"}
    run = offline.train[0]
    for key in ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "peak_memory_bytes", "seconds"):
        assert len(run.series(f"train/{key}")) == 2, key
        assert all(value > 0 for value in run.series(f"train/{key}"))
    (perplexity,) = run.series("validation/perplexity")
    record = offline.records.read_all().runs[run.identity]
    assert perplexity == pytest.approx(record["results"]["validation_perplexity"])
    assert run.series("trainer/global_step") == [2, 4]


def test_a_row_has_its_perplexity_by_position_and_its_retrieval_by_layer(offline):
    for run in offline.evaluate[:3]:
        results = offline.records.find("rows", run.identity)["results"]
        weights = [tokens for tokens, _ in results["position_nll"]]
        mean = sum(w * nll for w, nll in zip(weights, run.series("segment/nll"))) / sum(weights)
        assert mean == pytest.approx(results["nll"])
        assert run.summary["perplexity"] == results["perplexity"]
        assert run.summary["memory/drop_rate"] == results["memory"]["drop_rate"]
        blocks, moved = (run.series(f"layer/{key}") for key in ("distinct_blocks", "bytes_moved"))
        assert sum(blocks) / 2 == pytest.approx(results["retrieval"]["distinct_blocks"])
        assert sum(moved) == pytest.approx(results["retrieval"]["bytes_moved"])
        assert len(run.series("layer/drop_rate")) == 2


def test_artifacts_lead_from_the_text_to_the_table_streams_are_referred_to_and_weights_uploaded(offline):
    training, rows, (table,) = offline.train[0], offline.evaluate[:3], offline.table
    model = f"run-{training.identity}"
    stream = offline.records.find("runs", training.identity)["settings"]["stream"]
    assert list(training.used) == [f"stream-{stream[:10]}"]
    assert list(training.logged) == [model]
    for row in rows:
        assert list(row.used) == [model]
        assert row.used[model].digest == training.logged[model].digest  # of the same version
        assert list(row.logged) == [f"row-{row.identity}"]
        assert table.used[f"row-{row.identity}"].digest == row.logged[f"row-{row.identity}"].digest
    assert len(table.used) == 3
    (name,) = (name for name in table.logged if name.startswith("table-"))
    assert name == "table-figure5_unique_blocks-nano-pg19-bytes"
    assert {entry.path.rpartition(".")[2] for entry in table.logged[name].manifest.contents} == {"csv", "md", "png"}
    (stream,), (model,) = training.used.values(), training.logged.values()
    streams = {entry.path: entry for entry in stream.manifest.contents if entry.path.endswith(".bin")}
    assert set(streams) == {"train.bin", "validation.bin", "test.bin"}
    assert all(entry.ref.startswith("file:///") and not entry.local_path for entry in streams.values())
    files = {entry.path: entry for entry in model.manifest.contents}
    names = "identity.json run.json launch.json config.json model.safetensors weights.sha256"
    assert set(files) == set(names.split())
    (folder,) = offline.output.glob(f"runs/*{training.identity}")
    assert files["model.safetensors"].local_path == str(folder / "model.safetensors")
    kept = run_artifact(training.identity, folder, weights=False)  # weights that stay are the same version
    assert kept.digest == model.digest
    assert kept.manifest.entries["model.safetensors"].ref == (folder / "model.safetensors").as_uri()


def panel_keys(spec) -> tuple[set[str], set[str]]:
    """Every metric and every setting in a workspace's panels."""
    metrics, settings = set(), set()

    def visit(value, key=""):
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(inner, name)
        elif isinstance(value, list):
            for inner in value:
                visit(inner, key)
        elif key == "groupBy" or (isinstance(value, str) and value.startswith("config:")):
            settings.add(value.removeprefix("config:").replace(".value.", ".", 1))
        elif key in ("metrics", "xAxis", "yAxis", "zAxis", "accessor"):
            metrics.add(value.removeprefix("summary:"))

    for section in spec["section"]["panelBankConfig"]["sections"]:
        visit([panel["config"] for panel in section["panels"]])
    return metrics, settings


@pytest.fixture(scope="module")
def dashboards(offline, books):
    """Specifications that task=dashboard writes: of the project and of an experiment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        run_task("task=dashboard", f"output={offline.output}")
        run_task("task=dashboard", *FIGURE5, *TINY, f"data.path={books}", f"output={offline.output}")
    folder = offline.output / "dashboards"
    return [json.loads((folder / f"{name}.json").read_text()) for name in ("project", "figure5_unique_blocks")]


def test_everything_the_dashboard_shows_was_logged_and_that_of_an_experiment_shows_its_runs_alone(offline, dashboards):
    for written in dashboards:
        metrics, settings = panel_keys(written["spec"])
        assert {"perplexity", "segment/perplexity", "layer/drop_rate", "train/gradient_norm"} <= metrics
        assert {"retrieval.k", "eval.local", "eval.length", "retrieval.granularity", "cmt.cutoff"} <= settings
        for run in [*offline.train, *offline.evaluate]:
            assert settings - set(run.config) == set()
    for section in dashboards[0]["spec"]["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:  # some run has all its metrics
            metrics, _ = panel_keys({"section": {"panelBankConfig": {"sections": [{"panels": [panel]}]}}})
            assert metrics
            assert any(metrics <= run.metrics for run in offline.runs), panel["config"]
    everything, filtered = (written["spec"]["section"]["runSets"][0]["filters"]["filters"] for written in dashboards)
    assert everything == []
    (condition,) = filtered
    assert (condition["key"], condition["op"]) == ({"section": "run", "name": "name"}, "IN")
    assert set(condition["value"]) == {run.identity for run in [offline.train[0], *offline.evaluate[:3]]}
