"""What comes from outside is data: it names no code, is not unpickled, and stays in its folder."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from landmark.cli import safety as targets
from landmark.config import register, to_config
from landmark.config.checks import check
from landmark.data.stream import open_corpus
from landmark.memory import Memory
from landmark.utils.errors import UserError
from landmark.utils.files import inside, sha256_file
from tests.configurations import CONF, compose_conf

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
FROM_PRETRAINED = {"landmark/huggingface/safe_loading.py", "landmark/data/pretrained_tokenizer.py"}


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


def composed(*overrides: str):
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config_name="config", overrides=list(overrides), return_hydra_config=True)


@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local", "submitit_slurm"])
def test_launchers_may_be_named(launcher):
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    targets.check(composed(f"hydra/launcher={launcher}"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("hydra.callbacks.table._target_=os.system", "hydra.callbacks.table._target_=os.system"),
        (
            "hydra.callbacks.table._target_=landmark.experiment.runner.sys.exit",
            "_target_=landmark.experiment.runner.sys.exit",
        ),
        ("hydra.callbacks.table._target_=${name}", "_target_=single"),
        ("+hydra.callbacks.mine={a: [{_target_: torch.load}]}", "hydra.callbacks.mine.a.0._target_=torch.load"),
        ("hydra.launcher._target_=subprocess.run", "hydra.launcher._target_=subprocess.run"),
        ("hydra.sweeper._target_=subprocess.run", "hydra.sweeper._target_=subprocess.run"),
        ("+model.mine={_target_: os.system}", "model.mine._target_=os.system"),
        ("hydra.job_logging.handlers.console.class=os.system", "handlers.console.class=os.system"),
        ("hydra.job_logging.handlers.console.stream=ext://os.system", "console.stream=ext://os.system"),
        ("+hydra.job.env_set.LD_PRELOAD=evil.so", "hydra.job.env_set.LD_PRELOAD=evil.so"),
    ],
)
def test_a_configuration_names_no_code(override, named):
    with pytest.raises(UserError, match="hydra|model") as error:
        targets.check(composed(override))
    assert named in str(error.value)


def test_logging_calls_nothing_else():
    """A key that no command line can have, but a file."""
    with pytest.raises(UserError, match=r"hydra\.job_logging\.formatters\.x\.\(\)=os\.system"):
        targets.check(OmegaConf.create({"hydra": {"job_logging": {"formatters": {"x": {"()": "os.system"}}}}}))


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
    (folder / "manifest.json").write_text(json.dumps(manifest))
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
    from landmark.data.pretrained_tokenizer import open_pretrained
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
