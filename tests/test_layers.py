"""Imports point one way: what each folder of the package may import."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "landmark"

# The rooms of the house, from the ground up, and what each may import besides itself and `utils`. A room inside another
# room is named with a dot; a module belongs to the innermost room that has it.
ALLOWED = {
    "utils": set(),
    "attention": set(),
    "memory": {"attention", "memory.landmarks"},
    "memory.landmarks": {"attention", "memory"},
    "memory.blocks": {"attention", "memory"},
    "documents": set(),
    "models": {"attention", "memory", "memory.landmarks", "models.gguf", "models.huggingface"},
    "models.gguf": {"models"},
    "models.huggingface": {"attention", "memory", "memory.landmarks", "memory.blocks", "models", "models.gguf"},
    "reading": {"documents", "memory.blocks", "models", "models.huggingface"},
    "reading.serving": {"documents", "models", "models.huggingface", "reading"},
    "experiment": set(),
    "experiment.config": {"memory.blocks", "memory.landmarks", "models"},
    "experiment.data": {"documents", "models.gguf", "experiment.config"},
    "experiment.training": {"models", "experiment.config", "experiment.data"},
    "experiment.evaluation": {
        *("attention", "documents", "memory", "memory.blocks", "memory.landmarks", "models", "reading"),
        *("experiment.config", "experiment.data", "experiment.runs"),
    },
    "experiment.inspector": {"memory", "models", "experiment.config", "experiment.data", "experiment.evaluation"},
    "experiment.tracking": {"experiment.config", "experiment.data"},
    "experiment.runs": {
        *("memory.blocks", "memory.landmarks", "models", "experiment.config", "experiment.data"),
        *("experiment.training", "experiment.evaluation", "experiment.tracking"),
    },
    "experiment.results": {"experiment.config"},
    "cli": {
        *("documents", "models", "models.huggingface", "reading", "experiment.config", "experiment.data"),
        *("experiment.evaluation", "experiment.inspector", "experiment.results", "experiment.runs"),
        "experiment.tracking",
    },
    "__main__": {"cli"},
    "__init__": {"attention", "memory", "experiment.runs"},
}
FLOORS = ("utils", "attention", "memory", "documents", "models", "reading", "experiment", "cli")


@functools.cache
def imported(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too, and those that only the type checker sees."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(module: str) -> str:
    """The innermost room of a module such as landmark.memory.blocks.cache."""
    parts = [*module.split("."), "__init__"][1:]
    return next(room for n in (2, 1) if (room := ".".join(parts[:n])) in ALLOWED)


def files(room: str) -> list[Path]:
    """All files of a room that are in no room inside it."""
    path = PACKAGE.joinpath(*room.split("."))
    found = [path.with_suffix(".py")] if path.with_suffix(".py").exists() else sorted(path.rglob("*.py"))
    return [file for file in found if room_of(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)) == room]


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room):
    """Types count too: a name that only the type checker sees still ties two rooms together."""
    allowed = ALLOWED[room] | {room, "utils"}
    for path in files(room):
        for name in imported(path):
            if name != "landmark.__version__" and (name == "landmark" or name.startswith("landmark.")):
                assert room_of(name) in allowed, f"{path.relative_to(PACKAGE.parent)} imports {name}"


def test_floors_lie_on_each_other_and_every_import_is_written_as_one():
    """`import_module` would be an arrow that no test sees: only `utils.trust` and lazy exports may use it."""
    lazy = {f"{folder}__init__.py" for folder in ("", "experiment/evaluation/", "memory/", "models/")}
    allowed = {"utils/trust.py", "utils/old_names.py", "memory/landmarks/select/faiss.py", *lazy}
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imported(path)} & {"experiments", "benchmarks", "tests", "run"}, path
        if "import_module" in path.read_text(encoding="utf-8"):
            assert str(path.relative_to(PACKAGE)) in allowed
    for room, below in ALLOWED.items():
        floors = {other.split(".")[0] for other in below} - {room.split(".")[0]}
        if room in FLOORS or "." in room:
            assert all(FLOORS.index(floor) < FLOORS.index(room.split(".")[0]) for floor in floors), room
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found == {room.split(".")[0] for room in ALLOWED}


@pytest.mark.parametrize("floor", sorted({room.split(".")[0] for room in ALLOWED}))
def test_no_modules_of_a_floor_import_each_other(floor):
    found = [path for room in ALLOWED if room.split(".")[0] == floor for path in files(room)]
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in found}

    def used(path: Path) -> set[str]:
        found = [f"{name}." for name in imported(path)]
        return {module for module in modules if any(name.startswith(f"{module}.") for name in found)}

    TopologicalSorter({module: used(path) for module, path in modules.items()}).prepare()  # raises CycleError


def loaded(*statements: str) -> list[set[str]]:
    """Top-level packages that are loaded after each statement, in a process of its own."""
    show = "; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    code = "\n".join(["import sys", *(statement + show for statement in statements)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_the_program_starts_without_torch_and_attention_and_models_load_nothing_heavier():
    start, program, check = loaded(
        "import landmark.cli.main",
        "from landmark.experiment import data, results; from landmark.experiment.results import render; "
        "from landmark.experiment.tracking import tracker; from landmark.utils import significance",
        "import landmark.models; landmark.models.DecoderConfig; from landmark.experiment.runs import jobs; jobs.check",
    )
    assert "numpy" not in start
    assert not program & {*["torch", "lightning", "datasets", "tiktoken", "wandb", "pandas", "altair", "vl_convert"]}
    assert "torch" not in check
    names = ", ".join(f"landmark.models.{name}" for name in ("checkpoint", "config", "language_model"))
    attention, models = loaded("import landmark.attention", f"import {names}")
    assert "torch" in attention
    assert not attention & {"lightning", "hydra", "datasets", "wandb", "matplotlib"}
    assert not models & {"hydra", "omegaconf"}


def test_a_command_that_asks_a_book_loads_nothing_of_the_experiments(tmp_path):
    pytest.importorskip("transformers")
    from tests.models.huggingface.conftest import make_model, make_tokenizer

    make_model("llama").save_pretrained(tmp_path), make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "book.txt").write_text("A heron stands in the water and waits. " * 30)
    words = ["task=generate", "model=pretrained", f"model.name={tmp_path}", f"prompt_file={tmp_path}/book.txt"]
    words += ["prompt=What waits?", "generate.tokens=2", "trainer=cpu", f"output={tmp_path}"]
    code = f"sys.argv[1:] = {words}; from landmark.cli.main import main; main()"
    wing = "landmark.experiment."
    rooms = f"; print(*{{name.split('.')[2] for name in sys.modules if name.startswith({wing!r})}})"
    *_, own, asked = loaded(code + rooms)
    assert own == {"config"}
    assert {"torch", "transformers"} <= asked
    assert not asked & {"lightning", "wandb", "datasets", "altair", "pandas", "tiktoken"}


# They stand in for functions of others, which may be called with more; or raise an error whatever they are given.
STAND_INS = {
    "cli/sweeps.py": {"on_run_start", "on_run_end", "on_multirun_start", "on_multirun_end"},  # Hydra
    "experiment/evaluation/harness.py": {"tok_encode", "_loglikelihood_tokens"},  # lm-evaluation-harness
    "models/huggingface/attention.py": {"_in_window"},  # transformers
    "models/huggingface/cache_layers.py": {"update"},
    "models/huggingface/model.py": {"init_continuous_batching"},
    "models/huggingface/tiny.py": {"record"},
    "models/language_model.py": {"new_memory"},
    "models/masked.py": {"new_memory"},
}


def test_no_function_swallows_an_argument_that_it_does_not_know():
    """What a function takes with ** it hands on to one that knows the names. A renamed argument had been swallowed."""
    swallow: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg is not None:
                read = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
                if node.args.kwarg.arg not in read:
                    swallow.setdefault(str(file.relative_to(PACKAGE)), set()).add(node.name)
    assert swallow == STAND_INS
