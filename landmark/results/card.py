"""A model card: what a trained run is, and what was measured of it, from its records alone."""

from collections.abc import Mapping, Sequence

from landmark.results import render, tables
from landmark.results.reducers import Record, provenance_of
from landmark.utils.nested import flat

_USE = {
    "transformers": """model, tokenizer = landmark.huggingface.load("{name}")  # a folder, or its name on the hub
ids = tokenizer("A long text …", return_tensors="pt").input_ids
answer = model.generate(ids, max_new_tokens=20)
print(tokenizer.decode(answer[0, ids.shape[1] :]))""",
    "landmark": """model, tokenizer = landmark.load("{name}")  # the folder that holds this file""",
}


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
