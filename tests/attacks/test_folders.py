"""What is read names no code and stays in its folder (a saved memory: tests/memory/test_saving.py), nor does the source
unpickle or run a text."""

import ast
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import landmark
from landmark.experiment.config import to_config
from landmark.experiment.config.saved import trained_with
from landmark.experiment.data.stream import open_corpus
from landmark.models import load
from landmark.utils.errors import UserError
from landmark.utils.files import sealed, sha256_file
from landmark.utils.trust import name_modules
from tests.configurations import compose_conf
from tests.saved import edit, hash_again, saved_run

KERNELS = "names the kernels 'org/kernel': they are not fetched or run"
PAYLOAD = "open('ran', 'w')\nModel = make_source = lambda *a, **k: None\n"


@pytest.fixture
def ran(here, monkeypatch):
    """Whether the module `apart.payload`, which lies on Python's path, was imported."""
    (here.folder / "apart").mkdir()
    (here.folder / "apart" / "payload.py").write_text(PAYLOAD)
    monkeypatch.syspath_prepend(here.folder)
    monkeypatch.delitem(sys.modules, "apart.payload", raising=False)
    return (here.folder / "ran").exists


@pytest.fixture
def run(here, ran):
    """A downloaded run below outputs/, with a module in its folder."""
    folder = here.folder / "outputs" / "runs" / "nice"
    settings = ["data=stdlib", "tokenizer=bytes", "size=nano", "model=landmark", "model.block_size=20"]
    saved_run(folder, config=to_config(compose_conf(settings)))
    (folder / "payload.py").write_text(PAYLOAD)
    return folder


class TestRun:
    @pytest.mark.parametrize("module", ["outputs.runs.nice.payload", "apart.payload"])
    @pytest.mark.parametrize("place", ["config.json", "model", "data"])
    def test_its_code_does_not_run(self, here, run, ran, place, module):
        if place == "config.json":
            edit(run / place, architecture=module)
        else:
            launch = json.loads((run / "launch.json").read_text())
            launch["config"].setdefault(place, {})["architecture" if place == "model" else "name"] = module
            (run / "launch.json").write_text(json.dumps(launch))
            hash_again(run)
        for task in (("generate", "prompt=hello", "generate.tokens=2"), ("plan",), ("evaluate",)):
            here(f"task={task[0]}", *task[1:], "run=outputs/runs/nice", "trainer=cpu")
            assert not ran()
        if place == "config.json":
            with pytest.raises(UserError, match="only a folder that was read names this module"):
                load(run)
        with pytest.raises(UserError, match="no code is run: copy it"):
            landmark.load(run, modules=["outputs.runs.nice.payload"])
        assert not ran()

    def test_its_settings_are_texts_that_ask_for_no_variable(self, run, monkeypatch):
        monkeypatch.setenv("SECRET", "hunter2")
        launch = json.loads((run / "launch.json").read_text())
        launch["config"]["data"] |= {"name": "stdlib", "path": r"${oc.env:SECRET} \\${oc.env:SECRET}"}
        (run / "launch.json").write_text(json.dumps(launch))
        config = trained_with(run)
        assert config is not None
        assert config.data.path == r"${oc.env:SECRET} \\${oc.env:SECRET}"

    def test_a_command_line_names_no_module_in_a_folder_of_results(self, here, run, ran):
        done = here("model.architecture=outputs.runs.nice.payload", "data=stdlib", "tokenizer=bytes", "task=plan")
        assert done.code == 2
        assert "from which no code is run: copy it to a folder of your own" in done.err
        assert not ran()
        name_modules(["apart.module"], outside=(run,))


class TestTransformers:
    """A model, an adapter."""

    @pytest.fixture
    def folder(self, tmp_path):
        pytest.importorskip("transformers")
        from tests.models.huggingface.conftest import save_model

        return save_model(tmp_path)

    def test_its_code_does_not_run(self, folder, monkeypatch):
        from landmark.experiment.data.tokenizers import open_pretrained
        from landmark.models.pretrained import load_pretrained

        monkeypatch.chdir(folder)
        for name in ("mine", "modeling_mine", "tokenization_mine"):
            (folder / f"{name}.py").write_text(PAYLOAD)
        own = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "modeling_mine.M"}
        change(folder / "config.json", model_type="mine", auto_map=own)
        own = {"AutoTokenizer": ["tokenization_mine.T", None]}
        change(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="T")
        with pytest.raises(UserError, match="holds no causal language model that transformers can read"):
            load_pretrained(folder)
        with pytest.raises(UserError, match="holds no tokenizer that can be used here"):
            open_pretrained(folder)
        assert not Path("ran").exists()

    @pytest.mark.parametrize(
        ("file", "values", "said"),
        [
            ("adapter_config.json", {"base_model_name_or_path": "x"}, "is an adapter, which names another model"),
            ("config.json", {"text_config": {"attn_implementation": "org/kernel"}}, KERNELS),
            ("model.safetensors.index.json", {"weight_map": {"a": "../a.safetensors"}}, "which is not in its folder"),
            ("config.json", None, r"config\.json cannot be read: make it readable"),
            ("model.safetensors", None, r"1 weight missing, lm_head\.weight is the first"),
            ("pytorch_model.bin", None, "holds no causal language model that transformers can read"),
        ],
    )
    def test_it_is_refused_here_and_by_the_server(self, folder, file, values, said, monkeypatch, capsys):
        from landmark.models.huggingface import load
        from landmark.models.pretrained import size_of
        from landmark.reading.serving.__main__ import main

        shutil.copy(folder / "model.safetensors", folder.parent / "a.safetensors")
        if values is not None:
            change(folder / file, **values)
        elif file == "config.json":  # without the right to read it; an administrator has all
            monkeypatch.setattr(os, "access", lambda path, mode: False)
        elif file == "model.safetensors":
            tensors = load_file(folder / file)
            del tensors["lm_head.weight"]
            save_file(tensors, folder / file, {"format": "pt"})
        else:
            (folder / "model.safetensors").unlink()
            torch.save({}, folder / file)
        with pytest.raises(UserError, match=said):
            load(folder)
        if said == KERNELS:
            with pytest.raises(UserError, match=said):
                size_of(str(folder))
        monkeypatch.setenv("LANDMARK_API_KEY", "key")
        monkeypatch.setattr(sys, "argv", ["serving", str(folder), "--memories", str(folder / "memories")])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr().err
        assert (end.value.code, "Traceback" in printed) == (2, False)


def change(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


class TestRecord:
    @pytest.mark.parametrize("word", ["data.name=apart.payload", "model.architecture=apart.payload"])
    def test_its_code_does_not_run(self, work, here, ran, word):
        (path,) = self.made(work)
        words = json.loads(path.read_text())["labels"]["overrides"]
        work.edit(path, labels={"overrides": [words[0], word, *words[1:]]})
        assert here(f"output={work.output}", "task=status").code == 0
        assert not ran()

    @pytest.mark.parametrize("row", ["a\x1b[2Jb", 3])
    def test_its_name_is_text(self, work, here, row):
        (path,) = self.made(work)
        work.edit(path, labels={"row": row})
        done = here(f"output={work.output}", "task=status")
        assert f"{path.name}: labels: row is {row!r}, no line of plain text" in done.out

    def made(self, work):
        work("+experiment=quickstart", "data=pg19", "row=plain_512")
        return work.output.glob("records/rows/*.json")


def settings(folder, group, name, text):
    """A folder of settings with a file."""
    (folder / "mine" / group).mkdir(parents=True, exist_ok=True)
    (folder / "mine" / group / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / "mine"


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "said"),
        {
            b"\tname: x\n": "cannot start any token",
            b"name: x\nname: y\n": "found duplicate key name",
            b"rows:\n  x" + b"{eval.length=1,2}" * 30 + b": model=landmark\n": "has more than 10,000 combinations",
            b"name: !!python/name:os.system\n": "could not determine a constructor",
            b"rows: {'=1': model=landmark}\n": "rows: '=1': must be of plain text, and begin with a letter",
            b'rows: {"a\\x1b[2Jb": model=landmark}\n': r"rows: 'a\x1b[2Jb': must be of plain text",
        }.items(),
    )
    def test_a_fault_of_a_file_is_one_line(self, here, text, said):
        settings(here.folder, "experiment", "bad", b"# @package _global_\n" + text)
        done = here("--config-dir", "mine", "+experiment=bad", "task=plan")
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert said in done.err


@pytest.mark.parametrize(
    ("how", "said"),
    {
        "up": "which is not in it",
        "absolute": "which is not in it",
        "link": "which is not in it",
        "loop": "cannot be read .Too many levels of symbolic links.*and prepare it again",
        "objects": "must be one of <u2, <u4",
        "ids": "has the id 9, which its tokenizer does not have.*and prepare it again",
        "empty": "splits.test has no token.*and prepare it again",
        "by hand": "was altered: its sha256 is another.*and prepare it again",
    }.items(),
)
def test_a_manifest_stays_in_its_folder_and_fits(tmp_path, how, said):
    """Even where a file outside has the size and the hash that are told."""
    folder, outside = tmp_path / "corpus", tmp_path / "outside.bin"
    folder.mkdir()
    outside.write_bytes({"ids": b"\x09\0" * 4, "empty": b""}.get(how, bytes(8)))
    name = {"up": "../outside.bin", "absolute": str(outside)}.get(how, "test.bin")
    if how == "link":
        (folder / name).symlink_to(outside)
    elif how == "loop":
        (folder / name).symlink_to(name)
    elif name == "test.bin":
        shutil.copy(outside, folder / name)
    entry = {"file": name, "tokens": outside.stat().st_size // 2, "sha256": sha256_file(outside)}
    entry |= {"documents": 1, "bytes": 8, "words": 1}
    manifest = {"format": 1, "dtype": "O" if how == "objects" else "<u2", "splits": {"test": entry}}
    manifest = sealed(manifest | {"tokenizer": {"vocab_size": 4}}) | ({"dtype": "<u4"} if how == "by hand" else {})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=said):
        open_corpus(folder)


# ---- the source itself

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "run.py", *sorted(ROOT.glob("landmark/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
# Calls that may run what they read, and the argument that forbids it.
FORBIDDEN_BY = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
UNPICKLING = ("pickle.load", "pickle.Unpickler", "dill", "cloudpickle", "joblib.load", "shelve", "marshal")
RUNNING = ("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load")
FROM_PRETRAINED = {
    *("landmark/models/huggingface/safe_loading.py", "landmark/experiment/data/tokenizers.py"),
    "benchmarks/equal_keys_kvpress.py",  # a folder that it has written, where this package is not installed
}


def calls() -> list:
    """(file, name, call) of every call in the source."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.append((str(path.relative_to(ROOT)), ast.unparse(node.func), node))
    return found


def test_nothing_is_unpickled():
    seen = set()
    for file, name, call in calls():
        assert not name.startswith(UNPICKLING), f"{file}:{call.lineno} {name}"
        assert name not in RUNNING, f"{file}:{call.lineno} {name}"
        given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
        if name in FORBIDDEN_BY:
            seen.add(name)
            argument, safe = FORBIDDEN_BY[name]
            assert given.get(argument) is safe, f"{file}:{call.lineno} {name} without {argument}={safe}"
        for argument, unsafe in (("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False)):
            assert given.get(argument) is not unsafe, f"{file}:{call.lineno} {name}"
        if name.endswith("from_pretrained"):
            assert file in FROM_PRETRAINED, (
                f"{file}:{call.lineno}: open it as landmark.models.huggingface.safe_loading does"
            )
    assert "torch.load" in seen
