"""task=card: write a model card beside a trained run, as README.md: what it is, and what was measured of it."""

from collections.abc import Mapping, Sequence

from landmark.cli.command import Command
from landmark.experiment.identity import digest
from landmark.experiment.jobs import folder_of, read_run
from landmark.experiment.records import Record
from landmark.results import render, tables
from landmark.results.columns import provenance_of
from landmark.utils.errors import UserError
from landmark.utils.files import write_atomic
from landmark.utils.nested import flat

_USE = {
    "transformers": """model, tokenizer = landmark.huggingface.load("{name}")  # a folder, or its name on the hub
ids = tokenizer("A long text …", return_tensors="pt").input_ids
answer = model.generate(ids, max_new_tokens=20)
print(tokenizer.decode(answer[0, ids.shape[1] :]))""",
    "landmark": """model, tokenizer = landmark.load("{name}")  # the folder that holds this file""",
}


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
    for row in (each for each in records.read_all().rows.values() if each["settings"]["run"] == identity):
        name = row["labels"]["row"]
        rows[name if name not in rows else f"{name} ({row['id']})"] = [row]
    library = "transformers" if (folder / "tokenizer_config.json").is_file() else "landmark"  # which opens the folder
    write_atomic(path, model_card(folder.name, library, record, rows))
    print(f"written: {path}, with {len(rows)} rows; its license is yours to fill in")


def model_card(name: str, library: str, run: Record, rows: Mapping[str, Sequence[Record]]) -> str:
    """The text of README.md beside a model.

    Args:
        name: of the run.
        library: that opens it, `transformers` or `landmark`.
        run: its record.
        rows: records of what was evaluated, by the name of a row.
    """
    labels, results, made = run["labels"], run["results"], provenance_of(run)
    size = f" of {results['parameters']:,} parameters" if "parameters" in results else ""
    module = "landmark.huggingface" if library == "transformers" else "landmark"
    measured = render.as_markdown(tables.build("evaluated", rows)) if rows else "Nothing was evaluated yet.\n"
    settings = "\n".join(f"| {key} | {value} |" for key, value in flat(run["settings"]).items() if value is not None)
    return f"""---
# license: of the text it was trained on, and of the model it started from, decide it
library_name: {library}
pipeline_tag: text-generation
tags: [landmark-attention, long-context]
---

# {name}

A model{size}, trained on {labels["data"]} (tokenizer {labels["tokenizer"]}, seed {labels["seed"]}) by the package
landmark, after [Landmark Attention](https://arxiv.org/abs/2305.16300).

```python
import {module}

{_USE[library].format(name=name)}
```

## Measured

Validation perplexity at the end of the training: {results["validation_perplexity"]:.2f}.

{measured}
## Training

{results["steps"]:,} steps at commit {made["commit"]} on {made["hardware"]} ({made["versions"]}), by
`{made["command"]}`.

| setting | value |
|---|---|
{settings}
"""
