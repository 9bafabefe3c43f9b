import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from lightning.pytorch.loggers.logger import DummyLogger

from landmark.config.schema import LoggerConfig
from landmark.data.synthetic_corpus import SyntheticSplit
from landmark.experiment.records import Records
from landmark.tracking import beside, wandb_run
from landmark.tracking.tracker import Tracker
from landmark.tracking.wandb_run import has_key, mode
from landmark.utils.errors import UserError
from landmark.utils.files import write_json
from landmark.utils.metrics_csv import read_metrics
from tests.tracking.wandb_server import Server
from tests.training.training_case import make_config, run


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_SWEEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_offline_without_a_key():
    assert mode(LoggerConfig()) == "offline"


def test_online_with_a_key_in_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert mode(LoggerConfig()) == "online"


def test_online_with_a_key_for_the_host_in_netrc(tmp_path):
    (tmp_path / "netrc").write_text("machine example.org login user password x\n")
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert mode(LoggerConfig()) == "online"


def test_an_explicit_mode_holds(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert mode(LoggerConfig(mode="offline")) == "offline"
    assert mode(LoggerConfig(wandb=False, mode="online")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mode(LoggerConfig()) == "offline"


class FakeRun:
    dir = "nowhere/files"
    offline = True

    def __init__(self):
        self.logged, self.artifacts, self.code = [], [], None

    def log(self, values, step=None):
        self.logged.append(values)

    def define_metric(self, *args, **kwargs):
        pass

    def log_artifact(self, artifact, **_):
        self.artifacts.append(artifact.name)

    _log_artifact = log_artifact

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def opened_runs(monkeypatch):
    """Replaces wandb.init; its calls, as settings and the run returned."""
    opened = []

    def init(**settings):
        opened.append((settings, FakeRun()))
        return opened[-1][1]

    monkeypatch.setattr(wandb, "init", init)
    return opened


def test_row_is_logged_under_its_identity(configure, make_record, opened_runs, tmp_path):
    config = configure(f"output={tmp_path}")
    record = make_record(config, "a", 12.0)
    record["results"]["memory"] = {"drop_rate": 0.25, "drop_rates": [[0.25]]}
    Tracker().row(config, record, Records(tmp_path).path("rows", record["id"]))
    settings, fake = opened_runs[0]
    assert (settings["id"], settings["group"], settings["job_type"]) == (record["id"], "single", "evaluate")
    assert (settings["mode"], settings["resume"], fake.code) == ("offline", "allow", 0)
    assert fake.logged[0]["perplexity"] == 12.0
    assert fake.logged[0]["memory/drop_rate"] == 0.25
    assert {"segments", "memory/drop_rates"}.isdisjoint(fake.logged[0])


def test_row_of_a_sweep_is_logged_to_the_agents_run(configure, make_record, opened_runs, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    config = configure(f"output={tmp_path}")
    Tracker().row(config, make_record(config, "a", 12.0), Path("row.json"))
    settings, fake = opened_runs[0]
    assert {"id", "project", "entity"}.isdisjoint(settings)
    assert fake.logged[0]["perplexity"] == 12.0


class Corpus:
    def split(self, name):
        return SyntheticSplit("0123456789abcdef")


def test_crashed_training_is_marked_as_failed_and_leaves_no_model(configure, opened_runs, tmp_path, monkeypatch):
    config = configure(f"output={tmp_path}")

    def crash():
        with Tracker().training(config, "run", corpus=Corpus(), folder=tmp_path) as loggers:
            return len(loggers) / 0

    with pytest.raises(ZeroDivisionError):
        crash()
    assert opened_runs[0][1].code == 1
    assert (opened_runs[0][0]["job_type"], opened_runs[0][0]["name"]) == ("train", tmp_path.name)
    assert opened_runs[0][1].artifacts == ["stream-0123456789"]


def test_an_artifact_that_fails_stops_nothing(configure, make_record, opened_runs, tmp_path, caplog):
    config = configure(f"output={tmp_path}")
    record = make_record(config, "a", 12.0)
    Tracker().row(config, record, Records(tmp_path).path("rows", record["id"]))
    assert opened_runs[0][1].code == 0
    assert "an artifact was not recorded" in caplog.text
    assert f"{record['id']}.json" in caplog.text


def test_tensorboard_gets_what_the_csv_gets(configure, tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    config = configure(f"output={tmp_path}", "logger=tensorboard")
    folder = tmp_path / "run"
    with Tracker().training(config, "run", corpus=Corpus(), folder=folder) as loggers:
        run(make_config("transformer"), folder, loggers)
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    written = read_metrics(next(folder.rglob("metrics.csv")))
    for key in ("train/loss", "validation/loss"):
        expected = {line["step"]: line[key] for line in written if line.get(key) is not None}
        found = {each.step: each.value for each in events.Scalars(key)}
        assert found == pytest.approx(expected, rel=1e-6)
        assert len(found) > 2


def in_mlflow(output):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output}/mlflow.db")
    experiment = client.get_experiment_by_name("landmark").experiment_id
    (kept,) = client.search_runs([experiment])
    assert kept.info.run_name == "run"
    assert kept.data.params["retrieval.k"] == "4"
    points = client.get_metric_history(kept.info.run_id, "train/loss")
    return {point.step: point.value for point in points}


def in_trackio(_):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (kept,) = trackio.Api().runs("landmark")
    assert (kept.name, kept.config["retrieval"]["k"]) == ("run", 4)
    points = SQLiteStorage.get_logs("landmark", "run")
    return {point["step"]: point["train/loss"] for point in points if "train/loss" in point}


@pytest.mark.parametrize(("service", "read"), [("mlflow", in_mlflow), ("trackio", in_trackio)])
def test_other_services_get_what_the_csv_gets_in_one_run(configure, tmp_path, monkeypatch, service, read):
    """A training that goes on continues its run."""
    pytest.importorskip(service, reason=f"{service} is not installed")
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    config, folder = configure(f"output={tmp_path}", f"logger={service}"), tmp_path / "run"
    for _ in range(2):
        with Tracker().training(config, "run", corpus=Corpus(), folder=folder) as loggers:
            run(make_config("transformer"), folder, loggers)
    written = read_metrics(next(folder.rglob("metrics.csv")))
    expected = {line["step"]: line["train/loss"] for line in written if line.get("train/loss") is not None}
    assert read(tmp_path) == pytest.approx(expected, rel=1e-6)
    assert len(expected) > 2


def test_a_service_that_fails_stops_no_training(caplog):
    def fails(*_):
        raise OSError("no route to host")

    beside.Beside("mlflow", fails, fails).log_metrics({"train/loss": 1.0}, 3)
    assert "mlflow: no route to host; metrics.csv has the metrics" in caplog.text


def test_a_service_that_cannot_begin_is_one_line(configure, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("no route\nto host")

    monkeypatch.setattr(beside, "TensorBoardLogger", fails)
    opened = Tracker().training(configure("logger=tensorboard"), "run", corpus=Corpus(), folder=tmp_path)
    with pytest.raises(UserError, match=r"logger\.beside=tensorboard: no route to host"):
        opened.__enter__()


@pytest.mark.parametrize("service", ["tensorboard", "mlflow", "trackio"])
def test_without_its_package_a_logger_is_refused(configure, tmp_path, monkeypatch, service):
    def missing(*_, **__):
        raise ModuleNotFoundError(f"No module named {service!r}")

    monkeypatch.setattr(beside, "TensorBoardLogger", missing)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "trackio", None)
    opened = Tracker().training(configure(f"logger={service}"), "run", corpus=Corpus(), folder=tmp_path)
    with pytest.raises(UserError, match=rf"logger\.beside={service}: is not installed, pip install {service}"):
        opened.__enter__()


def test_only_the_first_process_logs(configure, opened_runs, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with Tracker().training(configure(), "run", corpus=Corpus(), folder=tmp_path) as loggers:
        assert loggers == []
    assert opened_runs == []


def test_nothing_is_opened_when_switched_off(configure, make_record, opened_runs):
    config = configure("logger=csv")
    Tracker().row(config, make_record(config, "a", 12.0), Path("row.json"))
    Tracker().table(config, "id", ["a"], [[1]], [], [])
    assert opened_runs == []


@pytest.fixture
def server(monkeypatch):
    """A W&B on this machine with a key for it; its timeouts are short."""
    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(wandb_run, "INIT_TIMEOUT", 2.0)
    monkeypatch.setattr(wandb_run, "FINISH_TIMEOUT", 2.0)
    monkeypatch.setattr(wandb_run, "_unreachable", False)
    wandb.teardown()
    yield server
    wandb.teardown()
    server.server_close()


def train(configure, folder, trouble=lambda: None):
    """A training logged to W&B, with `trouble` at step 15. Returns the number of steps trained."""

    class Trouble(DummyLogger):
        def log_metrics(self, metrics, step=None, **_):
            if step == 15:
                trouble()

    config = configure(f"output={folder}", "name=survival")
    with Tracker().training(config, "run", corpus=Corpus(), folder=folder / "run") as loggers:
        _, summary = run(make_config("transformer"), folder, [*loggers, Trouble()])
    return summary["steps"]


def uploaded(server):
    return [line["trainer/global_step"] for line in server.history]


def synced(folder, monkeypatch):
    """The steps that arrive at another W&B after `wandb sync`."""
    server = Server()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)  # it writes its own log there
    return uploaded(server)


EVERY_STEP = sorted({*range(3, 41, 3), *range(10, 41, 10)})


def test_what_is_logged_arrives(server, configure, make_record, tmp_path, caplog):
    config = configure(f"output={tmp_path}")
    record = make_record(config, "a", 12.0)
    write_json(Records(tmp_path).path("rows", record["id"]), record)
    Tracker().row(config, record, Records(tmp_path).path("rows", record["id"]))
    assert [line["perplexity"] for line in server.history] == [12.0]
    assert server.artifacts_used == 1
    assert "W&B" not in caplog.text


def test_key_refused_in_mid_training(server, configure, tmp_path, caplog, monkeypatch):
    """The training continues, and its metrics can be uploaded later."""

    def refuse():
        server.refuses_the_key = True

    assert train(configure, tmp_path, refuse) == 40
    assert set(uploaded(server)) < set(EVERY_STEP)
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert f"all is kept, `wandb sync --include-online {folder}` uploads it" in caplog.text
    assert synced(folder, monkeypatch) == EVERY_STEP


def test_unreachable_in_mid_training(server, configure, tmp_path, caplog, monkeypatch):
    assert train(configure, tmp_path, server.go_away) == 40
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert f"all is kept, `wandb sync --include-online {folder}` uploads it" in caplog.text
    assert synced(folder, monkeypatch) == EVERY_STEP


@pytest.mark.parametrize("trouble", ["refused", "gone"])
def test_no_wandb_at_the_start_is_offline(server, configure, make_record, tmp_path, caplog, trouble):
    server.refuses_the_key = True
    if trouble == "gone":
        server.go_away()
    config = configure(f"output={tmp_path}")
    for row in "ab":
        Tracker().row(config, make_record(config, row, 12.0), Path("row.json"))
    assert caplog.text.count("kept offline, `wandb sync") == 1
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


def test_nowhere_to_log_to_is_no_error(configure, make_record, tmp_path, monkeypatch, caplog):
    def full(**settings):
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", full)
    config = configure(f"output={tmp_path}")
    Tracker().row(config, make_record(config, "a", 12.0), Path("row.json"))
    assert "W&B is left out: No space left on device" in caplog.text
