"""task=card: write a model card beside a trained run, as README.md, from its records."""

from landmark.cli.command import Command
from landmark.experiment.identity import digest
from landmark.experiment.jobs import folder_of, read_run
from landmark.results.card import model_card
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic


def run(command: Command) -> None:
    """Raises UserError where `run` names none, it has no record, or its folder has a README.md."""
    if command.config.run is None:
        raise UserError("task=card: name a trained run, run=latest, its name or its folder")
    folder, records = folder_of(command.config, command.runner.inputs), command.runner.records
    identity, path = digest(read_run(folder)), folder / "README.md"
    if path.exists():
        raise UserError(f"{path} is there already, perhaps with your changes: delete it to write it anew")
    if (record := records.find("runs", identity)) is None:
        raise UserError(f"{folder}: {records.output} has no record of this run; name the output= that has it")
    rows = {}
    for row in (each for each in records.all("rows") if each["settings"]["run"] == identity):
        name = row["labels"]["row"]
        rows[name if name not in rows else f"{name} ({row['id']})"] = [row]
    library = "transformers" if (folder / "tokenizer_config.json").is_file() else "landmark"  # which opens the folder
    write_atomic(path, model_card(folder.name, library, record, rows))
    print(f"written: {path}, with {len(rows)} rows; its license is yours to fill in")
