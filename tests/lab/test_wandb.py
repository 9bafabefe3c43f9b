import pytest

from landmark.config import LoggerConfig
from landmark.data.synthetic import SyntheticSplit
from landmark.lab import wandb
from landmark.lab.wandb import has_key, log_row, mode, training_loggers


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
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


def test_what_is_said_explicitly_holds(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert mode(LoggerConfig(mode="offline")) == "offline"
    assert mode(LoggerConfig(wandb=False, mode="online")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mode(LoggerConfig()) == "offline"


class Session:
    def __init__(self):
        self.logged, self.artifacts, self.code = [], [], None

    def log(self, values):
        self.logged.append(values)

    def define_metric(self, *args, **kwargs):
        pass

    def log_artifact(self, artifact, **_):
        self.artifacts.append(artifact.name)

    _log_artifact = log_artifact

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def sessions(monkeypatch):
    """Stands in for wandb.init; what it was called with, and the session it gave."""
    import wandb as package

    opened = []

    def init(**settings):
        opened.append((settings, Session()))
        return opened[-1][1]

    monkeypatch.setattr(package, "init", init)
    return opened


def test_row_is_logged_under_its_identity(configure, make_record, sessions, tmp_path):
    config = configure(f"output={tmp_path}")
    record = make_record(config, "a", 12.0)
    record["results"]["memory"] = {"drop_rate": 0.25, "drop_rates": [[0.25]]}
    log_row(config, record, group="table1")
    settings, session = sessions[0]
    assert (settings["id"], settings["group"], settings["job_type"]) == (record["id"], "table1", "evaluate")
    assert (settings["mode"], settings["resume"], session.code) == ("offline", "allow", 0)
    assert session.logged[0]["perplexity"] == 12.0
    assert session.logged[0]["memory/drop_rate"] == 0.25
    assert {"segments", "memory/drop_rates"}.isdisjoint(session.logged[0])


class Corpus:
    def split(self, name):
        return SyntheticSplit("0123456789abcdef")


def test_crashed_training_is_marked_as_failed_and_leaves_no_model(configure, sessions, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", lambda experiment: experiment)
    config = configure(f"output={tmp_path}")

    def crash():
        with training_loggers(config, "run", group="g", corpus=Corpus(), folder=tmp_path) as loggers:
            return len(loggers) / 0

    with pytest.raises(ZeroDivisionError):
        crash()
    assert sessions[0][1].code == 1
    assert sessions[0][0]["job_type"] == "train"
    assert sessions[0][1].artifacts == ["stream-0123456789"]


def test_an_artifact_that_fails_stops_nothing(configure, make_record, sessions, tmp_path, caplog):
    config = configure(f"output={tmp_path}")
    record = make_record(config, "a", 12.0)
    log_row(config, record, group="g")
    assert sessions[0][1].code == 0
    assert "an artifact was not noted" in caplog.text
    assert f"{record['id']}.json" in caplog.text


def test_only_the_first_process_logs(configure, sessions, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with training_loggers(configure(), "run", group="g", corpus=Corpus(), folder=tmp_path) as loggers:
        assert loggers == []
    assert sessions == []


def test_nothing_is_opened_when_switched_off(configure, make_record, sessions):
    config = configure("logger=csv")
    log_row(config, make_record(config, "a", 12.0), group="g")
    wandb.log_table(config, "id", ["a"], [[1]], [], [])
    assert sessions == []
