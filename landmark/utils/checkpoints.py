"""The names of a training's checkpoints. Loads no torch."""

from pathlib import Path


def checkpoint_path(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / f"step-{step:08d}.ckpt"


def hash_path(checkpoint: Path) -> Path:
    """The file beside a checkpoint that holds its SHA-256, as `sha256sum -c` reads it."""
    return checkpoint.with_name(f"{checkpoint.name}.sha256")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the latest step first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def step_of(checkpoint: Path) -> int:
    """The step of a file that `checkpoint_path` names."""
    return int(checkpoint.stem.removeprefix("step-"))


def step_kept(run_dir: Path) -> int:
    """The step at which the training of a run goes on: its newest checkpoint's, else 0."""
    found = [path for path in checkpoints(run_dir / "checkpoints") if hash_path(path).is_file()]
    return step_of(found[0]) if found and found[0].stem[5:].isdigit() else 0
