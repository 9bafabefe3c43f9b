"""What blocks cost when only their choice differs: each rule reads the last tokens of the same texts.

    python -m benchmarks.equal_keys MODEL --data ../shared/data/pg19-mini/test --work DIR

MODEL: a folder of transformers, or a .gguf file. Of each text of `--tokens` tokens all but the last `--last` are read
with all keys, once, and saved. Then each rule reads the last ones, which choose blocks: so all rules have the same keys
and values. Texts are taken from the books in turn. What was measured stays in `--work`, so that the command goes on
where it stopped; rows that say most come first, for all texts. A CSV, a table and a picture follow each text.
"""

import argparse
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks.settings import use_threads
from landmark.experiment.evaluation.measurement import token_losses
from landmark.experiment.results.charts import (
    BEYOND_PALETTE,
    PALETTE,
    SHAPES,
    Look,
    Panel,
    around,
    curves,
    png,
    point,
    reference,
)
from landmark.models.huggingface import load
from landmark.utils.files import write_atomic
from landmark.utils.significance import LEAST
from landmark.utils.source_tree import EXPERIMENTS

ALL = "all keys"
RULES: dict[str, Any] = {  # in the order of the picture's legend
    "mean key": "mean_key",
    "exact share": "exact",
    "best token": "best_token",
    "smallest and largest keys": "quest",
    "means of 8 tokens": "parts",
    "4 directions": "low_rank",
    "4 tokens": "representatives",
    "last blocks": "recent",
    "chance": "random",
}
HEADS = {"group": "per_token_and_group", "head": "per_token_and_head"}
KEYS, LAYERS = ("rule", "heads", "blocks"), ", layers "
STRETCH = 64  # tokens of a unit, where texts are few
FIRST = ("mean key", "exact share", "smallest and largest keys", "last blocks")


@dataclass(frozen=True)
class Row:
    """A rule with so many blocks, chosen by a group of heads that share keys, or by each head alone."""

    rule: str
    heads: str = "group"
    blocks: int = 8

    @property
    def settings(self) -> dict[str, Any]:
        if self.rule == ALL:
            return {"k": 1 << 20}
        name, _, layers = self.rule.partition(LAYERS)
        scorer = RULES[name]
        if layers:
            first, last = map(int, layers.split(" to "))
            scorer = {"name": "in_layers", "rule": scorer, "first": first, "last": last}
        return {"k": self.blocks, "scorer": scorer, "granularity": HEADS[self.heads]}


def stages(layers: int) -> list[list[Row]]:
    """The rows, in the order in which they are measured. layers: of the model."""
    first = [Row(ALL), *map(Row, FIRST), *(Row(rule, "head") for rule in FIRST[:3])]
    second = [Row(rule, blocks=32) for rule in FIRST]
    others = [Row(rule) for rule in RULES if rule not in FIRST]
    four = [Row(f"exact share, layers {n * layers // 4} to {(n + 1) * layers // 4 - 1}") for n in range(4)]
    last = [Row(rule, heads, k) for k in (4, 16, 64) for rule in FIRST for heads in HEADS]
    last += [Row(rule, "head", 32) for rule in FIRST] + [Row(row.rule, "head") for row in others]
    return [first, second, four, others, [row for row in last if (row.rule, row.heads) != ("last blocks", "head")]]


def texts(folder: Path, tokenizer: Any, tokens: int, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """So many texts (1, tokens + 1), with the ids that begin a text: of the books in turn, with their percents."""
    books = sorted(folder.glob("*.txt"))
    each = -(-count // len(books))
    beginning = tokenizer("").input_ids if tokenizer.bos_token_id is not None else []
    for number in range(count):
        book, place = books[number % len(books)], number // len(books)
        text = book.read_text("utf-8")
        ids = tokenizer(text[int(len(text) * (place + 0.5) / each) :][: 12 * tokens]).input_ids
        ids = ids if ids[: len(beginning)] == beginning else beginning + ids
        yield f"{book.stem}-{100 * (place + 0.5) / each:.0f}", torch.tensor([ids[: tokens + 1]])


class Reading:
    """A model that reads texts by rules, and what was measured. tokens, last: of a text, and those that choose."""

    def __init__(self, model: Any, tokens: int, last: int, work: Path):
        self.model, self.tokens, self.last, self.work = model, tokens, last, work

    def memory(self, **settings: Any) -> Any:
        return self.model.new_memory(dense=self.tokens - self.last, **settings)

    def saved(self, name: str, ids: torch.Tensor) -> Path:
        """The folder of a text that was read up to its last tokens with all keys."""
        folder = self.work / f"text-{name}"
        if not folder.is_dir():
            memory = self.memory()
            for _ in self.model.read_text(ids[:, : self.tokens - self.last], memory):
                pass
            memory.save(folder)
        return folder

    def losses(self, name: str, ids: torch.Tensor, row: Row) -> tuple[np.ndarray, float]:
        """Of the last tokens, in nats; and the seconds that reading them took."""
        memory = self.memory(**row.settings)
        memory.load(self.saved(name, ids))
        started, read, found = time.perf_counter(), ids[:, self.tokens - self.last : -1], []
        for stop, logits in self.model.read_text(read, memory, kept=self.last):
            found.append(token_losses(logits, ids[:, 1 + self.tokens - self.last :][:, stop - logits.shape[1] : stop]))
        return torch.cat(found, 1)[0].numpy(), time.perf_counter() - started


def summary(measured: list[dict[str, Any]]) -> Any:
    """A line a row: over the texts that it read its loss and its difference from all keys, and each text's loss.

    measured: of each row and text also the losses (tokens,).
    """
    cells = {(each["text"], *(each[key] for key in KEYS)): each for each in measured}
    order, lines = list(dict.fromkeys(cell[1:] for cell in cells)), list[dict[str, Any]]()
    texts = list(dict.fromkeys(cell[0] for cell in cells))
    for key in order:
        own = {text: cells[text, *key] for text in texts if (text, *key) in cells}
        above = [each["losses"] - cells[text, *order[0]]["losses"] for text, each in own.items()]
        usual = ("mean key", key[1] if key[0] != "mean key" else "group", key[2])
        beside = [
            each["losses"] - cells[text, *usual]["losses"] for text, each in own.items() if (text, *usual) in cells
        ]
        values = {"texts": len(own), "nats": np.mean([each["losses"].mean() for each in own.values()])}
        values |= dict(zip(("difference", "difference_error", "units"), paired(above), strict=True))
        found = paired(beside) if key not in (usual, order[0]) and beside else (None, None, None)
        values |= dict(zip(("beside", "beside_error", "beside_units"), found, strict=True))
        values["seconds"] = np.median([each["seconds"] for each in own.values()])
        nats = {text: each["losses"].mean() for text, each in own.items()}
        lines.append(dict(zip(KEYS, key, strict=True)) | values | nats)
    return pd.DataFrame(lines)


def paired(differences: list[np.ndarray]) -> tuple[float, float, str]:
    """The mean of differences of losses (tokens,) of texts; its standard error over texts, or where they are too few
    over stretches of texts, which are less independent; and the words for these.
    """
    means, words = [each.mean() for each in differences], f"{len(differences)} texts"
    if len(means) < LEAST:
        means = [part.mean() for each in differences for part in np.split(each, len(each) // STRETCH)]
        words = f"{len(means)} stretches of {STRETCH} tokens, of {words}"
    return float(np.mean(means)), float(np.std(means, ddof=1) / np.sqrt(len(means))), words


def compared(made: Any) -> list[str]:
    """A sentence for each row beside mean keys, and for mean keys beside those that a group of heads chooses."""
    lines = list[str]()
    for row in made.dropna(subset="beside").itertuples():
        usual = f"mean key, {'group' if row.rule == 'mean key' else row.heads}"
        error = f"± {row.beside_error:.4f} over {row.beside_units}"
        lines.append(
            f"- {row.blocks} blocks, {row.rule}, {row.heads} against {usual}: ({row.beside:+.4f} nats a token; {error})"
        )
    return lines


def table(made: Any) -> str:
    """Markdown: a line a rule, a column each number of blocks and who chooses, nats above all keys."""
    columns = sorted({(row.blocks, row.heads) for row in made.iloc[1:].itertuples()})
    lines = ["| rule | " + " | ".join(f"{blocks}, {heads}" for blocks, heads in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for rule in dict.fromkeys(made["rule"][1:]):
        cells = []
        for blocks, heads in columns:
            one = made[(made["rule"] == rule) & (made["blocks"] == blocks) & (made["heads"] == heads)]
            cells += [f"{row.difference:.4f} ± {row.difference_error:.4f}" for row in one.itertuples()] or [""]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(tables: Mapping[str, Any]) -> bytes:
    """A PNG: nats above all keys against blocks, a panel for who chooses. tables: of `summary`, by model."""
    panels = []
    for model, made in tables.items():
        for heads, words in (("group", "heads that share keys choose together"), ("head", "each head chooses alone")):
            own = made[(made["heads"] == heads) & made["rule"].isin(list(RULES))]
            if len(own):
                panels.append(_panel(f"{model}: {words}", own))
    return png(
        "Loss above all keys, by what blocks are chosen by", [panels[n : n + 2] for n in range(0, len(panels), 2)]
    )


def _panel(title: str, made: Any) -> Panel:
    rules = [rule for rule in RULES if rule in set(made["rule"])]
    looks = {
        rule: Look(colour, shape)
        for rule, colour, shape in zip(RULES, PALETTE + BEYOND_PALETTE, cycle(SHAPES))
        if rule in rules
    }
    shift = {rule: 1 + 0.02 * (n - len(rules) / 2) for n, rule in enumerate(rules)}  # so that bars stand side by side
    points = [
        point(row.rule, row.blocks * shift[row.rule], row.difference, around(row.difference, row.difference_error))
        for row in made.sort_values("blocks").itertuples()
    ]
    blocks = sorted(set(made["blocks"]))
    x = {
        "title": "blocks of 32 keys, beside the window",
        "scale": {"type": "log", "base": 2, "domain": [blocks[0] / 1.25, blocks[-1] * 1.25]},
        "axis": {"values": blocks},
    }
    return curves(
        title, points, looks, x, {"title": "nats a token above all keys (± paired error)"}, below=[reference(y=0)]
    )


def new_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Of what reads texts by rules. name: of the benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of books, as .txt files")
    parser.add_argument("--work", type=Path, required=True, help="folder of what was read and measured")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=4096, help="of a text")
    parser.add_argument("--last", type=int, default=512, help="tokens that choose blocks")
    parser.add_argument("--out", type=Path, default=EXPERIMENTS / "equal_keys" / "results", help="folder of the CSV")
    return parser


def main() -> None:
    parser = new_parser("equal_keys", __doc__)
    parser.add_argument(
        "--rules", nargs="+", help="these alone, with 8 blocks, as 'mean key' 'exact share, layers 0 to 5'"
    )
    given = parser.parse_args()
    if unknown := [rule for rule in given.rules or () if rule.partition(LAYERS)[0] not in RULES]:
        parser.error(f"--rules: {unknown[0]} must be one of {', '.join(RULES)}, perhaps with '{LAYERS}FIRST to LAST'")
    use_threads()
    stem = Path(given.model).stem
    work, out = given.work / stem, given.out / f"{stem}.csv"
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(given.model, dtype=torch.bfloat16)
    reading, measured = Reading(model, given.tokens, given.last, work), []
    chosen = list(texts(given.data, tokenizer, given.tokens, given.texts))
    rows = [[Row(ALL), *map(Row, given.rules)]] if given.rules else stages(len(model.model.layers))
    for stage in rows:
        for name, ids in chosen:
            for row in stage:
                file = work / f"{name}-{row.rule}-{row.heads}-{row.blocks}.npz".replace(" ", "_")
                if not file.is_file():
                    losses, seconds = reading.losses(name, ids, row)
                    with file.with_suffix(".tmp").open("wb") as opened:
                        np.savez(opened, losses=losses, seconds=seconds)
                    file.with_suffix(".tmp").rename(file)
                found = np.load(file, allow_pickle=False)
                losses, seconds = found["losses"], float(found["seconds"])
                measured.append({"text": name, **vars(row), "losses": losses, "seconds": seconds})
                print(name, *vars(row).values(), losses.mean(), flush=True)
            made = summary(measured)
            write_atomic(out, made.to_csv(index=False, float_format="%.6f").encode())
            said = "\n".join([table(made), "", *compared(made), ""])
            write_atomic(out.with_suffix(".md"), said.encode())
            frames = {file.stem: pd.read_csv(file) for file in sorted(given.out.glob("*.csv"))}
            tables = {name: each for name, each in frames.items() if "difference" in each}
            write_atomic(given.out / "equal_keys.png", draw(tables))
    for name, _ in chosen:
        shutil.rmtree(work / f"text-{name}", ignore_errors=True)


if __name__ == "__main__":
    main()
