"""What is logged where, also when a service is gone, a training crashes, or is killed and goes on."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
import yaml

from landmark.experiment.config import to_config
from landmark.experiment.config.rows import named
from landmark.experiment.config.schema import LoggerConfig
from landmark.experiment.data.synthetic import SyntheticSplit
from landmark.experiment.runs.records import Records
from landmark.experiment.tracking import wandb_files, wandb_run
from landmark.experiment.tracking.sweep_agent import as_hydra
from landmark.experiment.tracking.tracker import Tracker
from landmark.experiment.tracking.wandb_run import mode
from landmark.utils.files import read_json, write_json
from landmark.utils.metrics_csv import read_metrics
from tests.configurations import SMALL, compose_conf
from tests.experiment.tracking.wandb_server import Server, read_offline
from tests.experiment.training.training_case import At, make_config, run
from tests.forked import python

ROOT = Path(__file__).parents[3]
KEY, LOGIN = {"WANDB_API_KEY": "x" * 40}, "machine {} login user password x\n"


@pytest.fixture(autouse=True)
def no_key(monkeypatch, tmp_path):
    own = "WANDB_SERVICE"  # W&B sets it while its process runs, and deletes it
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != own]:
        monkeypatch.delenv(name)
    wandb_run._is_fit.cache_clear()
    monkeypatch.setattr(wandb_run, "_has_told", False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize(
    ("settings", "environment", "login", "expected"),
    [
        ({}, {}, "", "offline"),
        ({}, KEY, "", "online"),
        ({}, {}, LOGIN.format("api.wandb.ai"), "online"),
        ({}, {}, LOGIN.format("example.org"), "offline"),
        ({}, KEY | {"WANDB_MODE": "offline"}, "", "offline"),
        ({"service": "csv"}, KEY, "", "disabled"),
        ({}, KEY | {"WANDB_DISABLED": "true"}, "", "disabled"),
        ({}, KEY | {"WANDB_DISABLED": "false", "WANDB_MODE": "run"}, "", "online"),
        ({}, KEY | {"WANDB_MODE": "bogus"}, "", "offline"),
        ({}, KEY | {"WANDB_BASE_URL": "localhost:8080"}, "", "offline"),
    ],
)
def test_online_only_with_a_key_and_as_the_settings_say(settings, environment, login, expected, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text(login)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert mode(LoggerConfig(**settings)) == expected


CORPUS = SimpleNamespace(split=lambda name: SyntheticSplit("0123456789abcdef"))


def test_crashed_training_is_marked_as_failed_and_leaves_no_model(configure, tmp_path):
    training = Tracker().training(configure(f"output={tmp_path}"), "run", corpus=CORPUS, folder=tmp_path / "mine")
    with pytest.raises(ZeroDivisionError), training as made:
        made.append(1 / 0)
    (found,) = read_offline(tmp_path)
    assert (found.exit_code, found.job_type, found.identity) == (1, "train", "run")
    assert (list(found.used), list(found.logged)) == (["stream-0123456789"], [])


def test_nothing_is_opened_without_need(configure, make_record, tmp_path, monkeypatch):
    config = configure("logger=csv", f"output={tmp_path}")
    Tracker().row(config, make_record(config, "a", 12.0), Path("row.json"))
    Tracker().table(config, "id", ["a"], [[1]], [], [])
    monkeypatch.setenv("RANK", "1")
    config = configure(f"output={tmp_path}")
    with Tracker().training(config, "run", corpus=CORPUS, folder=tmp_path) as made:
        assert made == []
    assert list(tmp_path.iterdir()) == []


VARIABLES = {
    **{"WANDB_PROJECT": "mine", "WANDB_ENTITY": "us", "WANDB_NAME": "first", "WANDB_RUN_GROUP": "many"},
    **{"WANDB_TAGS": "a,b", "WANDB_NOTES": "to try", "WANDB_JOB_TYPE": "trial"},
}


def test_variables_of_wandb_act_and_malformed_ones_are_a_line_each(
    configure, make_record, tmp_path, monkeypatch, caplog, request
):
    malformed = {"WANDB_BASE_URL": "localhost:8080", "WANDB_MODE": "bogus", "WANDB_RUN_ID": "a/b"}
    others = {"WANDB_DIR": str(tmp_path / "elsewhere"), "WANDB_RESUME": "must"}
    for name, value in {**KEY, **VARIABLES, **malformed, **others}.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # W&B reads its variables once in a process
    request.addfinalizer(wandb.teardown)
    config = configure(f"output={tmp_path}", "logger=wandb")
    with caplog.at_level("INFO"):
        for seed in (0, 1):
            Tracker().row(config, make_record(replace(config, seed=seed), "a", 12.0), Path("row.json"))
    for name, value in malformed.items():
        assert caplog.text.count(f"{name}={value} is malformed") == 1
    assert caplog.text.count("WANDB_RESUME has no effect") == 1
    assert "cannot be reached" not in caplog.text  # it is not asked: a malformed address is not W&B's own
    said = (
        f"W&B: offline in {tmp_path}/elsewhere/wandb, `wandb sync {tmp_path}/elsewhere/wandb/offline-run-*` uploads it"
    )
    assert caplog.text.count(said) == 1
    assert os.environ["WANDB_RUN_ID"] == "a/b"
    for path in (tmp_path / "elsewhere").glob("wandb/offline-run-*/*.wandb"):
        (run,) = (record.run for record in wandb_files.records(path) if record.WhichOneof("record_type") == "run")
        found = run.project, run.entity, run.display_name, run.run_group, ",".join(run.tags), run.notes, run.job_type
        assert found == tuple(VARIABLES.values())
    assert len(read_offline(tmp_path / "elsewhere")) == 2


def test_a_row_that_another_logger_or_a_killed_process_made_is_sent_once(configure, make_record, tmp_path):
    """Also where W&B's folder was deleted, and by a version that left no notes."""
    config, tracker = configure(f"output={tmp_path}", "logger=wandb"), Tracker()
    record = make_record(config, "a", 12.0)
    path = Records(tmp_path).path("rows", record["id"])
    write_json(path, record)
    tracker.row(configure(f"output={tmp_path}", "logger=csv"), record, path)
    killed = tmp_path / "wandb" / f"offline-run-1-{record['id']}"
    killed.mkdir(parents=True)
    (killed / "run.wandb").touch()
    for _ in range(2):
        tracker.row(config, record, path, is_new=False)
        (made,) = read_offline(tmp_path)
        assert made.series("perplexity") == [12.0]
    shutil.rmtree(tmp_path / "tracked")
    tracker.row(config, record, path, is_new=False)
    assert len(read_offline(tmp_path)) == 1
    shutil.rmtree(tmp_path / "wandb")
    tracker.row(config, record, path, is_new=False)
    assert not (tmp_path / "wandb").exists()
    tracker.row(config, make_record(config, "a", 13.0), path)  # made anew
    (made,) = read_offline(tmp_path)
    assert made.series("perplexity") == [13.0]


def test_jobs_of_a_sweep_and_their_table_have_one_group(configure, make_record, tmp_path, monkeypatch):
    config = configure(f"output={tmp_path}", "logger=wandb")
    monkeypatch.setattr(wandb_run, "started", lambda: SimpleNamespace(number=1))
    Tracker().row(config, make_record(config, "a", 12.0), Path("row.json"))
    monkeypatch.setattr(wandb_run, "started", lambda: SimpleNamespace(number=None))
    assert Tracker().table(replace(config, name=wandb_run.SWEEP), "id", ["a"], [[1]], [Path("t.csv")], [])
    assert not Tracker().table(replace(config, name=wandb_run.SWEEP), "id", ["a"], [[1]], [Path("t.csv")], [])
    assert [run.group for run in read_offline(tmp_path)] == ["sweep", "sweep"]


# ---- W&B's server in trouble


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


def uploaded(server):
    return [line["trainer/global_step"] for line in server.history]


def test_what_is_logged_arrives(server, configure, make_record, tmp_path, caplog):
    config = configure(f"output={tmp_path}")
    record = make_record(config, "a", 12.0)
    write_json(Records(tmp_path).path("rows", record["id"]), record)
    Tracker().row(config, record, Records(tmp_path).path("rows", record["id"]))
    assert [line["perplexity"] for line in server.history] == [12.0]
    assert server.artifacts_used == 1
    assert not [each.message for each in caplog.records if each.levelname != "INFO" and "W&B" in each.message]


@pytest.mark.parametrize("trouble", ["key refused", "gone"])
def test_trouble_in_mid_training(server, configure, tmp_path, caplog, monkeypatch, trouble):

    def begin():
        server.refuses_the_key = True
        if trouble == "gone":
            server.go_away()

    config = configure(f"output={tmp_path}")
    with Tracker().training(config, "run", corpus=CORPUS, folder=tmp_path / "run") as made:
        _, summary = run(make_config("transformer"), tmp_path, [*made, At(15, begin)])
    every_step = sorted({*range(3, 41, 3), *range(10, 41, 10)})
    assert summary["steps"] == 40
    assert set(uploaded(server)) < set(every_step)
    (folder,) = (tmp_path / "wandb").glob("run-*")
    assert f"what was logged is kept, `wandb sync --include-online {folder}` uploads it" in caplog.text
    other = Server()
    monkeypatch.setenv("WANDB_BASE_URL", other.url)
    command = [sys.executable, "-m", "wandb", "sync", "--include-online", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)  # it writes its own log there
    assert uploaded(other) == every_step


@pytest.mark.parametrize("trouble", ["refused", "gone"])
def test_no_wandb_at_the_start_is_offline_and_rows_are_logged_without_an_artifact(
    server, configure, make_record, tmp_path, caplog, trouble
):
    server.refuses_the_key = True
    if trouble == "gone":
        server.go_away()
    config = configure(f"output={tmp_path}")
    for seed in (0, 1):
        Tracker().row(config, make_record(replace(config, seed=seed), "a", 12.0), Path("row.json"))
    assert caplog.text.count("kept offline, `wandb sync") == 1
    assert [each.summary["perplexity"] for each in read_offline(tmp_path)] == [12.0] * 2
    assert "row.json" in caplog.text  # an artifact that cannot be made


def test_nowhere_to_log_to_is_no_error(configure, make_record, tmp_path, monkeypatch, caplog):
    begin = wandb.init

    def full(**settings):
        if settings["mode"] == "disabled":
            return begin(**settings)
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb, "init", full)
    config = configure(f"output={tmp_path}")
    Tracker().row(config, make_record(config, "a", 12.0), Path("row.json"))
    assert "(No space left on device): it is left out" in caplog.text


# ---- a training that is killed and goes on has each point once: offline in one file, online at W&B

TINY = [
    *("data=stdlib", "data.max_documents=6", "model=transformer", "size=nano", "tokenizer=bytes", "trainer=cpu"),
    *("trainer.threads=1", "model.num_layers=1", "model.num_heads=2", "model.head_dim=4", "model.mlp_dim=8"),
    *("train.steps=8", "train.batch_size=2", "train.length=64", "train.log_every=1", "train.checkpoint_every=3"),
    *("train.validate_every=4", "train.validate_batches=1", "task=train"),
]


def start(output, *program, mode="offline", **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"WANDB_MODE": mode, **variables}
    return python(*program, *TINY, f"output={output}", cwd=ROOT, env=environment)


def start_killed(output, **given):
    killed = start(output, "tests/experiment/runs/processes_case.py", str(output / "mark"), **given)
    assert killed.returncode == -signal.SIGKILL


def go_on(output, **given):
    done = start(output, "run.py", **given)
    assert done.returncode == 0, done.stderr
    assert "going on at step 3" in done.stderr


def test_a_killed_training_has_each_point_once_offline(tmp_path):
    start_killed(tmp_path)
    go_on(tmp_path)
    (made,) = [each for each in read_offline(tmp_path) if each.job_type == "train"]
    assert made.series("trainer/global_step") == list(range(1, 9))
    (file,) = tmp_path.glob("runs/*/metrics.csv")
    expected = read_metrics(file)
    assert [row["train/loss"] for row in expected] == pytest.approx(made.series("train/loss"))
    assert [row["validation/loss"] for row in expected[3::4]] == pytest.approx(made.series("validation/loss"))


def test_a_killed_training_has_each_point_once_at_wandb(tmp_path):
    """To which fewer points had come than the checkpoint at step 3 has seen, or more."""
    lost = Server()
    start_killed(tmp_path / "killed", mode="online", **KEY, WANDB_BASE_URL=lost.url)
    lost.go_away()
    for arrived in (2, 5):
        server, output = Server(), tmp_path / str(arrived)
        shutil.copytree(tmp_path / "killed", output, symlinks=True)
        earlier = [{"_step": step, "trainer/global_step": step} for step in range(1, 1 + arrived)]
        server.history = list(earlier)
        go_on(output, mode="online", **KEY, WANDB_BASE_URL=server.url)
        server.go_away()
        assert uploaded(server) == list(range(1, 9))
        assert server.history[:arrived] == earlier


# Logs as a training does, with what others have left; killed with W&B's service, whose file then has no end.
ATTEMPT = """
import os, sys, time, psutil
from pathlib import Path
from landmark.experiment.tracking import loggers, wandb_files, wandb_run
from tests.configurations import SMALL, compose_conf
from landmark.experiment.config import to_config
first, last, is_killed = map(int, sys.argv[1:])
points = wandb_files.earlier_points(Path("wandb"), "abc")
with wandb_run.open_run(to_config(compose_conf(["output=."])), "abc", job_type="train") as run:
    logger = loggers.WholeHistory(run, Path("run"), points)
    for step in range(first, last):
        logger.log_metrics({"train/loss": 1 / step, **{f"a metric {n}": 0.5 for n in range(9)}}, step)
    if is_killed:
        while sum(file.stat().st_size for file in Path("wandb").rglob("*.wandb")) < 6 * 32768:  # as it is written
            time.sleep(0.1)
        for each in psutil.Process().children(recursive=True):
            each.kill()
        os.kill(os.getpid(), 9)
"""


def test_attempts_of_which_one_was_uploaded_have_each_point_once(tmp_path):
    """By W&B's own client: an attempt that was killed, one that was stopped, and one that goes on after both. In
    whatever order they are uploaded.
    """
    servers = [Server(), Server(), Server()]
    environment = os.environ | KEY | {"WANDB_MODE": "offline"}

    def upload(folder, server, *flags):
        command = [sys.executable, "-m", "wandb", "sync", *flags, str(folder)]
        given = {**environment, "WANDB_BASE_URL": server.url, "WANDB_MODE": "online"}
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=given)

    for number, (first, last, is_killed) in enumerate([(1, 401, 1), (201, 601, 0), (501, 901, 0)]):
        ended = python("-c", ATTEMPT, *map(str, (first, last, is_killed)), cwd=tmp_path, env=environment)
        assert ended.returncode == -signal.SIGKILL * is_killed, ended.stderr
        if number == 0:
            (folder,) = tmp_path.glob("wandb/offline-run-*")
            upload(folder, servers[0])
    assert 200 < len(uploaded(servers[0])) < 400, "its file is cut, behind the checkpoint"
    attempts = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert len(attempts) == 3
    for order, server in zip((1, -1), servers[1:], strict=True):
        for folder in attempts[::order]:
            upload(folder, server, "--include-synced")
    for server in servers:
        server.go_away()
    for server in servers[1:]:
        assert sorted(uploaded(server)) == list(range(1, 901))


@pytest.mark.parametrize(
    "state", ["offline", "of the same second", "uploaded", "uploaded in part", "online", "of another run"]
)
def test_what_was_uploaded_stays(tmp_path, state):
    names = {"online": "run-1-abc", "of another run": "offline-run-1-def", "of the same second": "offline-run-1-abc-1"}
    name = names.get(state, "offline-run-1-abc")
    folder = tmp_path / "wandb" / name
    folder.mkdir(parents=True)
    (folder / "run-abc.wandb").touch()
    if state.startswith("uploaded"):  # the client marks a file that was cut in another way
        (folder / f"run-abc.wandb.{'synced' if state == 'uploaded' else 'syncstate'}").touch()
    assert wandb_files.earlier_points(tmp_path / "wandb", "abc") == set()
    assert folder.exists() is (state not in ("offline", "of the same second"))


# ---- wandb_sweep.yaml, carried out by W&B's own agent, without its server

PATH = ROOT / "experiments" / "sweep_k_local" / "wandb_sweep.yaml"


@pytest.fixture
def sweep():
    return yaml.safe_load(PATH.read_text(encoding="utf-8"))


def test_its_runs_are_the_cells_of_the_grid(sweep):
    """The same overrides, so that the rows of agents fill the experiment's table."""
    config = to_config(compose_conf(["+experiment=sweep_k_local"]))
    swept = [[f"{key}={value}" for value in each["values"]] for key, each in sweep["parameters"].items()]
    assert list(map(" ".join, itertools.product(*swept))) == list(named(config).values())[2:]
    words = [word for word in sweep["command"] if not word.startswith("${")]
    given = {"name": config.name, "eval.length": config.eval.length, "memory.blocks": config.memory.blocks}
    assert words == [f"{key}={value}" for key, value in given.items()]


def test_an_agent_runs_one_of_them(sweep, tmp_path, monkeypatch):
    from wandb.wandb_agent import Agent

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s4f0")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, "")
    agent = Agent(api=None, queue=None)
    chosen = ["data=stdlib", "tokenizer=bytes", "size=nano", f"output={tmp_path}"]
    chosen += ["data.max_documents=6", "eval.tokens=8192", *SMALL, "logger=wandb"]
    agent._sweep_command = [*sweep["command"][:-1], *chosen, sweep["command"][-1]]
    arguments = {"retrieval": {"value": {"k": 4.0}}, "eval.local": {"value": 250.0}}
    arguments |= {"cmt": {"value": False}, "seeds": {"value": None}}
    trained = set()
    for number in ("r4n1", "r4n2"):  # the agent is restarted, and gets the same arguments again
        agent._command_run({"run_id": number, "program": sweep["program"], "args": arguments})
        assert agent._run_processes[number].wait() == 0
        trained.add(*((file, file.stat().st_mtime_ns) for file in tmp_path.glob("runs/*/model.safetensors")))
    assert len(trained) == 1
    (path,) = (tmp_path / "records" / "rows").iterdir()
    record = read_json(path)
    assert (record["settings"]["k"], record["settings"]["local"], record["settings"]["eval_length"]) == (4, 250, 2048)
    assert sweep["metric"]["name"] in record["results"]
    logged = {folder.name.split("-")[3] for folder in (tmp_path / "wandb").glob("offline-run-*")}
    assert logged == {"r4n1", "r4n2"}
    metric, runs = sweep["metric"]["name"], read_offline(tmp_path)  # the sweep waits for the number of each
    assert [run.summary[metric] for run in runs if run.job_type == "evaluate"] == [record["results"][metric]] * 2


AGENTS = {
    "retrieval={'k': 4.0, 'query': {'tile': None}}": ["retrieval.k=4", "retrieval.query.tile=null"],
    "cmt=True": ["cmt=on"],
    "model.masked=True": ["model.masked=true"],
    "train.max_lr=1.0": ["train.max_lr=1.0"],
    "train.micro_batch=2.0": ["train.micro_batch=2"],
    "seeds=[0, None]": ["seeds=[0,null]"],
    "model=landmark": ["model=landmark"],
    "data={'path': 'my books'}": ['data.path="my books"'],
    "name='4.0'": ["name='4.0'"],
    "-m": ["-m"],
}


@pytest.mark.parametrize("word", AGENTS)
def test_what_an_agent_writes_as_python_is_hydras(word):
    assert as_hydra([word]) == AGENTS[word]
