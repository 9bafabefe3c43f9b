"""Folders, records and launches that name code: none of it runs unless the command line names it too."""

import json

import pytest

import landmark
from landmark.config import to_config
from landmark.models import load
from landmark.utils.errors import UserError
from landmark.utils.trust import name_modules
from tests.configurations import compose_conf
from tests.saved import edit, hash_again, saved_run

PAYLOAD = "open('ran', 'w')\nModel = make_source = lambda *a, **k: None\n"


@pytest.fixture
def run(here, monkeypatch):
    """A downloaded run below outputs/, with a module in its folder that leaves the file `ran`."""
    folder = here.folder / "outputs" / "runs" / "nice"
    settings = ["data=stdlib", "tokenizer=bytes", "size=nano", "model=landmark", "model.block_size=20"]
    saved_run(folder, config=to_config(compose_conf(settings)))
    (folder / "payload.py").write_text(PAYLOAD)
    (here.folder / "apart.py").write_text("")
    monkeypatch.syspath_prepend(here.folder)
    return folder


def name_code(folder, place, module):
    if place == "config.json":
        edit(folder / place, architecture=module)
    else:
        launch = json.loads((folder / "launch.json").read_text())
        launch["config"].setdefault(place, {})["architecture" if place == "model" else "name"] = module
        (folder / "launch.json").write_text(json.dumps(launch))
        hash_again(folder)


@pytest.mark.parametrize("place", ["config.json", "model", "data"])
@pytest.mark.parametrize("task", [("generate", "prompt=hello"), ("plan",), ("evaluate",)])
def test_code_in_a_run_does_not_run(here, run, place, task):
    name_code(run, place, "outputs.runs.nice.payload")
    here(f"task={task[0]}", *task[1:], "run=outputs/runs/nice", "trainer=cpu", "generate.tokens=2")
    assert not (here.folder / "ran").exists()
    with pytest.raises(UserError):
        landmark.load(run, modules=["outputs.runs.nice.payload"])
    assert not (here.folder / "ran").exists()


def test_python_names_modules_of_its_own(run):
    edit(run / "config.json", architecture="mine.gated")
    with pytest.raises(UserError, match="only a folder that was read names this module"):
        load(run)
    with pytest.raises(UserError, match=r"there is no module mine\.gated on Python's path"):
        landmark.load(run, modules=["mine.gated"])


def test_a_command_line_names_no_module_in_a_folder_of_results(here, run):
    done = here("model.architecture=outputs.runs.nice.payload", "data=stdlib", "tokenizer=bytes", "task=plan")
    assert done.code == 2
    assert "from which no code is run: copy it to a folder of your own" in done.err
    assert not (here.folder / "ran").exists()
    name_modules(["apart.module"], outside=(run,))


@pytest.mark.parametrize(
    "content", [b"\tname: x\n", b"name: [\n", b"name: x\nname: y\n", b"name: \xff\n", b"x: " + b"[" * 3000]
)
def test_a_fault_of_a_file_of_settings_is_one_line(here, content):
    (here.folder / "mine" / "experiment").mkdir(parents=True)
    (here.folder / "mine" / "experiment" / "bad.yaml").write_bytes(b"# @package _global_\n" + content)
    done = here("--config-dir", "mine", "+experiment=bad", "task=plan")
    assert done.code == 2
    assert done.err.count("\n") == 1
