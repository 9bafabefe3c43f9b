"""What trainings, rows and tables log to Weights & Biases, with artifacts that lead from text to table."""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from landmark.experiment.config.command_line import is_sweep_agent
from landmark.experiment.config.saved import RUN
from landmark.experiment.config.schema import POSITION_BIN, Config
from landmark.experiment.tracking.sent import is_sent, note_sent
from landmark.experiment.tracking.wandb_files import earlier_points
from landmark.experiment.tracking.wandb_run import mode, open_run, place
from landmark.utils.files import HASHES, read_hashes, read_json
from landmark.utils.measured import TEXT, kind_of

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger
    from wandb import Artifact

    from landmark.experiment.data import Corpus, SyntheticCorpus


class Tracker:
    """Logs each training, row and table as a W&B run of its own, with the artifacts that it used and made, where
    `logger` and WANDB_MODE let it. A failure of W&B is a warning, no error.
    """

    @contextmanager
    def training(
        self, config: Config, run_id: str, corpus: "Corpus | SyntheticCorpus", folder: Path
    ) -> "Iterator[list[Logger]]":
        """Lightning loggers of a training, in the first process. run_id: W&B's id too. corpus, folder: as artifacts."""
        if os.environ.get("RANK", "0") != "0" or mode(config.logger) == "disabled":
            yield []
            return
        from landmark.experiment.tracking.loggers import WholeHistory  # loads Lightning

        is_offline = mode(config.logger) == "offline" and not is_sweep_agent()
        points = earlier_points(place(config), run_id) if is_offline else ()
        with open_run(config, run_id, job_type="train", name=folder.name) as run:
            # W&B drops repeated steps, which a resumed training logs; with a metric as the axis it keeps them.
            run.define_metric("trainer/global_step")
            run.define_metric("*", step_metric="trainer/global_step")
            run.use_artifact(corpus_artifact, corpus, config.data.name)
            logger = WholeHistory(run, folder, points)
            yield [logger]
            logger.begin()  # where there was no step to train
            run.log_artifact(run_artifact, run_id, folder, config.logger.weights)

    def row(self, config: Config, record: dict[str, Any], path: Path, *, is_new: bool = True) -> None:
        """Log an evaluated row: its numbers, its curves over positions and layers, its record, which lies at `path`.
        is_new: evaluated now; else it is logged if an earlier process has not done it.
        """
        if mode(config.logger) == "disabled":
            return
        identity, content = record["id"], record["sha256"]
        if not is_sweep_agent():  # which waits for the numbers
            if is_sent(config, identity, content, is_new=is_new):
                return
            earlier_points(place(config), identity)  # of a process that was killed
        labels, results = record["labels"], record["results"]
        with open_run(config, identity, job_type="evaluate", name=labels["row"]) as run:
            model = Path(labels["run"])
            run.use_artifact(run_artifact, record["settings"]["run"], model, config.logger.weights)
            kind = kind_of(results)
            numbers = _numbers(results) | _numbers(results, "memory") | _numbers(results, "retrieval")
            logged = [{metric(kind, key): value for key, value in numbers.items()}]
            for axis, points in (("segment/position", by_position(results)), ("layer/number", by_layer(results))):
                run.define_metric(metric(kind, axis))
                group = axis.partition("/")[0]
                run.define_metric(metric(kind, f"{group}/*"), step_metric=metric(kind, axis), summary="none")
                logged += [{metric(kind, key): value for key, value in point.items()} for point in points]
            for step, values in enumerate(logged):  # W&B drops steps that it has, of a process that was killed
                run.log(values, step=None if is_sweep_agent() else step)
            run.log_artifact(files_artifact, f"row-{identity}", "row", [path])
        if run.is_kept:
            note_sent(config, identity, content)

    def table(
        self,
        config: Config,
        identity: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        files: Sequence[Path],
        records: Sequence[Path],
        *,
        is_new: bool = True,
    ) -> bool:
        """Log a rendered table. identity: W&B's id. files: of it; the first gives its name. records: of its rows.
        is_new: it has changed; else it is logged if an earlier process has not done it. Returns whether it was.
        """
        content = hashlib.sha256(json.dumps([columns, rows], default=str).encode()).hexdigest()
        if mode(config.logger) == "disabled" or is_sent(config, identity, content, is_new=is_new):
            return False
        import wandb

        with open_run(config, identity, job_type="table", name=config.name) as run:
            for record in records:
                run.use_artifact(files_artifact, f"row-{record.stem}", "row", [record])
            run.log({"table": wandb.Table(columns=list(columns), data=[list(row) for row in rows])})
            for picture in [path for path in files if path.suffix == ".png"]:
                run.log({"picture": wandb.Image(str(picture))})
            run.log_artifact(files_artifact, f"table-{config.name}-{files[0].stem}", "table", files)
        if run.is_kept:
            note_sent(config, identity, content)
        return True


def metric(kind: str, key: str) -> str:
    """W&B's key of a number of a row: those of text have their own names, others begin with the kind."""
    return key if kind == TEXT else f"{kind}/{key}"


def by_position(results: dict[str, Any]) -> list[dict[str, float]]:
    """Loss and perplexity over the positions of a segment; each point covers the tokens since the point before it."""
    return [
        {
            "segment/position": POSITION_BIN * number,
            "segment/nll": nats / tokens,
            "segment/perplexity": math.exp(nats / tokens),
        }
        for number, (tokens, nats) in enumerate(results.get("position_nll", []), 1)
        if tokens
    ]


def by_layer(results: dict[str, Any]) -> list[dict[str, float]]:
    """For each layer the distinct blocks a chunk retrieves, the bytes moved, and the mean drop rate over its heads."""
    layers: dict[int, dict[str, float]] = {}
    for number, layer in enumerate(results.get("retrieval", {}).get("layers", [])):
        samples = sum(layer["distinct_blocks"])
        blocks = sum(count * many for count, many in enumerate(layer["distinct_blocks"]))
        layers[number] = {"layer/distinct_blocks": blocks / samples, "layer/bytes_moved": layer["bytes_moved"]}
    for number, rates in enumerate(results.get("memory", {}).get("drop_rates", [])):
        layers.setdefault(number, {})["layer/drop_rate"] = sum(rates) / len(rates)
    return [{"layer/number": number, **layer} for number, layer in sorted(layers.items())]


def _numbers(results: dict[str, Any], part: str | None = None) -> dict[str, float]:
    """The single numbers of the results, or of one part of them, prefixed with its name."""
    values, prefix = (results, "") if part is None else (results.get(part, {}), f"{part}/")
    return {f"{prefix}{key}": value for key, value in values.items() if isinstance(value, int | float)}


# ---- artifacts: the name of one is an identity, and its version is a hash of its content. A run that uses an artifact
# describes it again, and W&B recognizes the version. So no server is asked, and offline runs record the same.


def corpus_artifact(corpus: "Corpus | SyntheticCorpus", name: str) -> "Artifact":
    """The streams of a corpus: paths and checksums of the files, which are not uploaded."""
    stream = corpus.split("train")
    folder = getattr(corpus, "folder", None)
    manifest = {} if folder is None else corpus.manifest  # pyright: ignore[reportAttributeAccessIssue]
    metadata = {"data": name, "train_sha256": stream.sha256, "tokenizer": manifest.get("tokenizer")}
    artifact = _with_metadata(f"stream-{stream.sha256[:10]}", "dataset", metadata, "stream.json")
    for split in manifest.get("splits", {}).values():
        _add(artifact, folder / split["file"], upload=False)
    return artifact


def run_artifact(identity: str, folder: Path, weights: bool) -> "Artifact":
    """The model in the folder of a run. weights: upload them; else only their path and checksum are recorded."""
    trained = (folder / RUN).is_file()  # else an untrained model of transformers
    settings = read_json(folder / RUN) if trained else {}
    artifact = _with_metadata(f"run-{identity}", "model", {"identity": identity, **settings}, "identity.json")
    if trained:
        for path in sorted(folder / name for name in (HASHES, *read_hashes(folder, ()))):
            _add(artifact, path, upload=weights or path.suffix != ".safetensors")
    return artifact


def files_artifact(name: str, kind: str, files: Sequence[Path]) -> "Artifact":
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
