"""What comes from outside is data: it names no code, is not unpickled, and stays in its folder."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from landmark.cli.composing import settings_found
from landmark.config import to_config
from landmark.config.checks import check
from landmark.data.stream import open_corpus
from landmark.memory import Memory
from landmark.memory.saving import HASHES
from landmark.utils.errors import UserError
from landmark.utils.files import sealed, sha256_file, write_hashes
from landmark.utils.trust import inside
from tests.configurations import compose_conf

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "run.py", *sorted(ROOT.glob("landmark/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
# Calls that may run what they read, and the argument that forbids it.
FORBIDDEN_BY = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
UNPICKLING = (
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "dill",
    "cloudpickle",
    "joblib.load",
    "shelve",
    "marshal",
)
RUNNING = ("eval", "exec", "compile", "yaml.load", "yaml.unsafe_load")
FROM_PRETRAINED = {"landmark/huggingface/safe_loading.py", "landmark/data/tokenizers.py"}


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
            assert file in FROM_PRETRAINED, f"{file}:{call.lineno}: open it as landmark.huggingface.safe_loading does"
    assert "torch.load" in seen


def test_a_folder_of_settings_is_data(here):
    """What it says of Hydra's own settings is not read: nothing is instantiated, imported or set."""
    (here.folder / "mine" / "experiment").mkdir(parents=True)
    (here.folder / "mine" / "model").mkdir()
    (here.folder / "mine" / "experiment" / "evil.yaml").write_text(
        """# @package _global_
defaults:
  - override /hydra/job_logging: evil
name: evil
data: {name: stdlib}
hydra:
  callbacks: {mine: {_target_: subprocess.call, args: [touch, ran]}}
  launcher: {_target_: os.abort}
  job: {env_set: {GIT_CONFIG_COUNT: "1"}}
  job_logging: {handlers: {mine: {class: logging.FileHandler, filename: mine.pth}}}
"""
    )
    (here.folder / "mine" / "hydra" / "job_logging").mkdir(parents=True)
    (here.folder / "mine" / "hydra" / "job_logging" / "evil.yaml").write_text("version: 1\nroot: {handlers: [x]}\n")
    done = here("--config-dir", "mine", "+experiment=evil", "tokenizer=bytes", "size=nano", "task=plan")
    assert (done.code, done.err) == (0, "")
    assert "plan of evil" in done.out
    assert not {path.name for path in here.folder.rglob("*")} & {"ran", "mine.pth"}
    assert "GIT_CONFIG_COUNT" not in os.environ
    (here.folder / "mine" / "experiment" / "evil.yaml").write_text(
        "# @package _global_\nhydra: {searchpath: ['pkg://proof']}\n"
    )
    (here.folder / "proof.py").write_text("open('ran', 'w')")
    done = here("--config-dir", "mine", "+experiment=evil", "task=plan")
    assert done.code == 2
    assert "searchpath" in done.err
    assert not (here.folder / "ran").exists()


def test_a_row_reads_no_variable_of_the_environment(monkeypatch):
    """Values of rows are set on a configuration that is composed already."""
    monkeypatch.setenv("SECRET", "hunter2")
    composed = compose_conf([])
    with settings_found():
        OmegaConf.update(composed, "data.path", "${oc.env:SECRET}", merge=True)
        with pytest.raises(UserError, match="Unsupported interpolation type"):
            to_config(composed)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a/../../b", "link", 3, None])
def test_a_name_does_not_lead_out_of_its_folder(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="which is not in it"):
        inside(folder, name)
    assert inside(folder, "train.bin") == folder / "train.bin"


@pytest.mark.parametrize("how", ["up", "absolute", "link", "objects"])
def test_a_manifest_stays_in_its_folder(tmp_path, how):
    """Even where the file outside has the size and the hash that are told."""
    folder, outside = tmp_path / "corpus", tmp_path / "outside.bin"
    folder.mkdir()
    outside.write_bytes(bytes(8))
    name = {"up": "../outside.bin", "absolute": str(outside)}.get(how, "test.bin")
    if how == "link":
        (folder / name).symlink_to(outside)
    if how == "objects":
        shutil.copy(outside, folder / name)
    entry = {"file": name, "tokens": 4, "sha256": sha256_file(outside), "documents": 1, "bytes": 8, "words": 1}
    manifest = {"format": 1, "dtype": "O" if how == "objects" else "<u2", "splits": {"test": entry}}
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest | {"tokenizer": {"vocab_size": 4}})))
    with pytest.raises(UserError, match="which is not in it|must be one of <u2, <u4"):
        open_corpus(folder)


@pytest.mark.parametrize("how", ["name", "link"])
def test_a_saved_memory_stays_in_its_folder(tmp_path, how):
    memory = Memory(block_size=2, k=1)
    memory.attend(0, *(torch.randn(1, 1, 6, 4) for _ in range(3)))
    memory.commit()
    memory.save(tmp_path / "book")
    blocks, content = tmp_path / "book" / "layer-0.blocks", tmp_path / "book" / "memory.json"
    shutil.move(blocks, tmp_path / "outside")
    if how == "link":
        blocks.symlink_to(tmp_path / "outside")
    else:
        told = json.loads(content.read_text())
        told["layers"] = {"0/../../outside": told["layers"]["0"]}
        content.write_text(json.dumps(told))
        write_hashes(content.parent, {path.name for path in content.parent.iterdir()} - {HASHES}, HASHES)
    with pytest.raises(UserError, match="which is not in it|is no layer"):
        Memory(block_size=2, k=1).load(tmp_path / "book")


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden"])
def test_a_table_is_written_below_its_folder(name):
    with pytest.raises(UserError, match=f"name={name}: must be of letters"):
        check(to_config(compose_conf([f"name='{name}'"])))


@pytest.fixture
def folder(tmp_path):
    """A tiny model of transformers."""
    pytest.importorskip("transformers")
    from tests.huggingface.conftest import make_model, make_tokenizer

    make_model("llama").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_code_in_a_models_folder_is_not_run(folder):
    from landmark.data.tokenizers import open_pretrained
    from landmark.models.pretrained import load_pretrained

    proof = folder / "executed"
    for name in ("mine", "modeling_mine", "tokenization_mine"):
        (folder / f"{name}.py").write_text(f"open({str(proof)!r}, 'w')\n")
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "modeling_mine.M"}}
    (folder / "config.json").write_text(json.dumps(settings))
    described = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["tokenization_mine.T", None]}, "tokenizer_class": "T"}
    described.write_text(json.dumps(json.loads(described.read_text()) | own))
    with pytest.raises(UserError, match="holds no causal language model that transformers can read"):
        load_pretrained(folder)
    with pytest.raises(UserError, match="holds no tokenizer that can be used here"):
        open_pretrained(folder)
    assert not proof.exists()


def test_pickled_weights_are_not_read(folder):
    from landmark.models.pretrained import load_pretrained

    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds no causal language model that transformers can read"):
        load_pretrained(folder)


def test_shards_of_a_model_are_in_its_folder(folder):
    from landmark.huggingface import load

    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names the file '\.\./outside\.safetensors', which is not in its folder"):
        load(folder)
