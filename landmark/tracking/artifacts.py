"""W&B artifacts, from text to table: a run uses a stream, a row uses the run's model, a table uses its rows.

An artifact's name is an identity, and its version is a hash of its content. A run that uses an artifact describes it
again, and W&B recognizes the version. So no server is asked, and offline runs record the same for `wandb sync`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.utils.files import HASHES, read_hashes, read_json

if TYPE_CHECKING:
    from wandb import Artifact

    from landmark.data import Corpus, SyntheticCorpus


def of_corpus(corpus: "Corpus | SyntheticCorpus", name: str) -> "Artifact":
    """The streams of a corpus: paths and checksums of the files, which are not uploaded."""
    stream = corpus.split("train")
    folder = getattr(corpus, "folder", None)
    manifest = {} if folder is None else corpus.manifest  # pyright: ignore[reportAttributeAccessIssue]
    metadata = {"data": name, "train_sha256": stream.sha256, "tokenizer": manifest.get("tokenizer")}
    artifact = _with_metadata(f"stream-{stream.sha256[:10]}", "dataset", metadata, "stream.json")
    for split in manifest.get("splits", {}).values():
        _add(artifact, folder / split["file"], upload=False)
    return artifact


def of_run(identity: str, folder: Path, weights: bool) -> "Artifact":
    """The model in the folder of a run. weights: upload them; else only their path and checksum are recorded."""
    trained = (folder / "run.json").is_file()  # else an untrained model of transformers
    settings = read_json(folder / "run.json") if trained else {}
    artifact = _with_metadata(f"run-{identity}", "model", {"identity": identity, **settings}, "identity.json")
    if trained:
        for path in sorted(folder / name for name in (HASHES, *read_hashes(folder, ()))):
            _add(artifact, path, upload=weights or path.suffix != ".safetensors")
    return artifact


def of_files(name: str, kind: str, files: Sequence[Path]) -> "Artifact":
    """Files that are uploaded: the record of a row, or a table's text and pictures."""
    import wandb

    artifact = wandb.Artifact(name, kind)
    for path in files:
        _add(artifact, path, upload=True)
    return artifact


def _with_metadata(name: str, kind: str, metadata: dict[str, Any], file: str) -> "Artifact":
    """An artifact with its metadata in a file too, which gives it a version even if it holds no other file."""
    import wandb

    artifact = wandb.Artifact(name, kind, metadata=metadata)
    with artifact.new_file(file, encoding="utf-8") as opened:
        json.dump(metadata, opened, indent=1, sort_keys=True)
    return artifact


def _add(artifact: "Artifact", path: Path, upload: bool) -> None:
    path = path.resolve()
    if upload:  # from its place: a copy for W&B would take the space of a large model twice
        artifact.add_file(str(path), name=path.name, policy="immutable", skip_cache=True)
    else:
        artifact.add_reference(path.as_uri(), name=path.name)
