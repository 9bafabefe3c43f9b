"""W&B artifacts, from text to table: a run uses a stream, a row the run's model, a table its rows.

They are named by identities, and their versions are hashes of what is in them: whoever uses one describes it anew, and
W&B finds that it has it. So nothing is asked of a server, and the same is recorded offline, for `wandb sync`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.utils.files import read_json

if TYPE_CHECKING:
    from wandb import Artifact

    from landmark.data import Corpus, SyntheticCorpus

_OF_A_RUN = ("run.json", "config.json", "model*.safetensors", "model.safetensors.index.json")


def of_corpus(corpus: "Corpus | SyntheticCorpus", name: str) -> "Artifact":
    """The streams of a corpus: where their files lie, with checksums; the files are not uploaded."""
    stream = corpus.split("train")
    folder = getattr(corpus, "folder", None)
    manifest = {} if folder is None else corpus.manifest  # pyright: ignore[reportAttributeAccessIssue]
    told = {"data": name, "train_sha256": stream.sha256, "tokenizer": manifest.get("tokenizer")}
    artifact = _new(f"stream-{stream.sha256[:10]}", "dataset", told, "stream.json")
    for split in manifest.get("splits", {}).values():
        _add(artifact, folder / split["file"], upload=False)
    return artifact


def of_run(identity: str, folder: Path, weights: bool) -> "Artifact":
    """The model that a run left in its folder. weights: upload them, else only say where they lie."""
    trained = (folder / "run.json").is_file()  # else a model of transformers, as it is
    settings = read_json(folder / "run.json") if trained else {}
    artifact = _new(f"run-{identity}", "model", {"identity": identity, **settings}, "identity.json")
    if trained:
        for path in sorted(path for pattern in _OF_A_RUN for path in folder.glob(pattern)):
            _add(artifact, path, upload=weights or path.suffix == ".json")
    return artifact


def of_row(record: Path) -> "Artifact":
    """A row's record."""
    return _of_files(f"row-{record.stem}", "row", [record])


def of_table(name: str, files: Sequence[Path]) -> "Artifact":
    """A rendered table, as text and pictures."""
    return _of_files(f"table-{name}", "table", files)


def _new(name: str, kind: str, told: dict[str, Any], file: str) -> "Artifact":
    """With a file that says what it is, and so decides its version where nothing else is in it."""
    import wandb

    artifact = wandb.Artifact(name, kind, metadata=told)
    with artifact.new_file(file, encoding="utf-8") as opened:
        json.dump(told, opened, indent=1, sort_keys=True)
    return artifact


def _of_files(name: str, kind: str, files: Sequence[Path]) -> "Artifact":
    import wandb

    artifact = wandb.Artifact(name, kind)
    for path in files:
        _add(artifact, path, upload=True)
    return artifact


def _add(artifact: "Artifact", path: Path, upload: bool) -> None:
    path = path.resolve()
    if upload:  # where it lies: a copy for W&B would double what a large model takes
        artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
    else:
        artifact.add_reference(path.as_uri(), name=path.name)
