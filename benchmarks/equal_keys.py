"""What blocks cost when only their choice differs: each rule reads the last tokens of the same texts.

    python -m benchmarks.equal_keys MODEL --data ../shared/data/pg19-mini/test --work DIR

MODEL: a folder of transformers, or a .gguf file. Of each text of `--tokens` tokens all but the last `--last` are read
with all keys, once, and saved. Then each rule reads the last ones, which choose blocks: so all rules have the same keys
and values. Texts are taken from the books in turn. What was measured stays in `--work`, so that the command goes on
where it stopped; rows that say most come first, for all texts. A CSV and a table follow each text, with all that DIR
has, and a picture each stage of rows.

With `--landmarks` blocks have the size of those that a frozen model taught (`task=teach`). These are then rules too:
they choose blocks that one softmax reads, or also weigh them, as the paper's grouped softmax does.
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
    DASHED,
    PALETTE,
    SHAPES,
    SOLID,
    Look,
    Panel,
    around,
    curves,
    png,
    point,
    reference,
)
from landmark.models.huggingface import load, use_landmarks
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
    "landmarks": "landmarks",
    "landmarks that weigh": "landmarks",
}
WEIGH = "landmarks that weigh"
MEANT = {  # in the picture
    "exact share": "exact share (reads all keys)",
    "best token": "best token (reads all keys)",
    "last blocks": "last blocks (floor)",
    "chance": "chance (floor)",
}
HEADS = {"group": "per_token_and_group", "head": "per_token_and_head"}
KEYS, LAYERS = ("rule", "heads", "blocks"), ", layers "
TOKENS = 4096  # of a text
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
        return {"k": self.blocks, "scorer": scorer, "granularity": HEADS[self.heads], "gates": name == WEIGH}


def stages(layers: int) -> list[list[Row]]:
    """The rows, in the order in which they are measured. layers: of the model."""
    first = [Row(ALL), *map(Row, FIRST), *(Row(rule, "head") for rule in FIRST[:3])]
    second = [Row(rule, blocks=32) for rule in FIRST]
    others = [Row(rule) for rule in RULES if rule not in FIRST and RULES[rule] != "landmarks"]
    four = [Row(f"exact share, layers {n * layers // 4} to {(n + 1) * layers // 4 - 1}") for n in range(4)]
    alone = [Row(rule, "head", 32) for rule in FIRST[:3]] + [Row(row.rule, "head") for row in others]
    counts = [Row(rule, heads, k) for k in (4, 16, 64) for rule in FIRST for heads in HEADS]
    counts = [row for row in counts if (row.rule, row.heads) != ("last blocks", "head")]
    return [first, second, four, others, [row for row in alone if row.rule != "chance"], counts]


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


def open_model(path: str, landmarks: Path | None) -> tuple[Any, Any]:
    """A model, perhaps with learned landmarks, and its tokenizer."""
    model, tokenizer = load(path, dtype=torch.bfloat16)
    return model if landmarks is None else use_landmarks(model, landmarks), tokenizer


def label(given: argparse.Namespace) -> str:
    """The name of what is measured: the model, and where they are not the usual ones the length and the blocks."""
    length = "" if given.tokens == TOKENS else f"-{given.tokens}-tokens"
    return f"{Path(given.model).stem}{length}{'-landmarks' if given.landmarks else ''}"


class Reading:
    """A model that reads texts by rules, and what was measured. tokens, last: of a text, and those that choose."""

    def __init__(self, model: Any, tokens: int, last: int, work: Path):
        self.model, self.tokens, self.last, self.work = model, tokens, last, work
        self.learned = model.landmarks.memory.scorer  # of `--landmarks`
        usual = self.memory().memory
        self.window, self.size = usual.window, usual.block_size

    def memory(self, **settings: Any) -> Any:
        if settings.get("scorer") == "landmarks":
            settings["scorer"] = self.learned
        return self.model.new_memory(dense=self.tokens - self.last, **settings)

    def keys(self, row: Row) -> int:
        """That a query reads at least, of a long text."""
        return self.tokens if row.rule == ALL else self.window + row.blocks * self.size

    def file(self, name: str, row: Row) -> Path:
        """Of a text's losses."""
        return self.work / f"{name}-{row.rule}-{row.heads}-{row.blocks}.npz".replace(" ", "_")

    def measured(self, names: list[str]) -> list[dict[str, Any]]:
        """All that `work` has of these texts, by any command: all keys first, then in the order of `RULES`."""
        found = list[tuple[Any, dict[str, Any]]]()
        for name in names:
            for file in self.work.glob(f"{name}-*.npz"):
                rule, heads, blocks = file.stem.removeprefix(f"{name}-").replace("_", " ").rsplit("-", 2)
                row, cells = Row(rule, heads, int(blocks)), np.load(file, allow_pickle=False)
                each = {"text": name, **vars(row), "keys": self.keys(row)}
                each |= {"losses": cells["losses"], "seconds": float(cells["seconds"])}
                place = [*RULES].index(_base(rule)) if rule != ALL else -1
                found.append(((place, rule, heads, row.blocks), each))
        return [each for _, each in sorted(found, key=lambda pair: pair[0])]

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

    measured: of each row and text also the keys that a query reads, and the losses (tokens,).
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
        values = {"keys": next(iter(own.values()))["keys"], "texts": len(own)}
        values |= {"nats": np.mean([each["losses"].mean() for each in own.values()])}
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
    """A PNG: nats above all keys against the keys that a query reads, where heads choose together; a line of panels for
    each model. tables: of `summary`, by `label`, sorted.
    """
    lines, model = list[list[Panel]](), "-"
    for name, made in tables.items():
        if not name.startswith(model):
            model = name
            lines.append([])
        about = name.removeprefix(model).removeprefix("-") or f"{TOKENS}-tokens"
        own = made[(made["heads"] == "group") & (made["rule"] != ALL)]
        is_line = own["rule"].isin(list(RULES)) | (own.groupby("rule")["keys"].transform("nunique") > 1)
        lines[-1].append(_panel(f"{model}, {about.replace('-', ' ')}", own[is_line]))
    return png("Loss above that of the same model with all keys", lines)


def _base(rule: str) -> str:
    return rule.partition(LAYERS)[0]


def _panel(title: str, made: Any) -> Panel:
    shown: list[str] = sorted(set(made["rule"]), key=lambda rule: (list(RULES).index(_base(rule)), rule))
    base = dict(zip(RULES, map(Look, PALETTE + BEYOND_PALETTE, cycle(SHAPES))))
    looks = {
        MEANT.get(rule, rule): base[_base(rule)]._replace(filled=rule in RULES, dash=SOLID if rule in RULES else DASHED)
        for rule in shown
    }
    shift = {rule: 1 + 0.012 * (n - len(shown) / 2) for n, rule in enumerate(shown)}  # so that bars stand side by side
    points = [
        point(
            MEANT.get(str(row.rule), str(row.rule)),
            row.keys * shift[row.rule],
            row.difference,
            around(row.difference, row.difference_error),
        )
        for row in made.sort_values("keys").itertuples()
    ]
    keys = sorted(set(made["keys"]))
    x = {
        "title": "keys that a query reads: the last ones, and chosen blocks",
        "scale": {"type": "log", "base": 2, "domain": [keys[0] / 1.15, keys[-1] * 1.15]},
        "axis": {"values": keys},
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
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a text")
    parser.add_argument("--last", type=int, default=512, help="tokens that choose blocks")
    parser.add_argument("--landmarks", type=Path, help="file of learned landmarks")
    parser.add_argument("--out", type=Path, default=EXPERIMENTS / "equal_keys" / "results", help="folder of the CSV")
    return parser


def main() -> None:
    parser = new_parser("equal_keys", __doc__)
    parser.add_argument("--rules", nargs="+", help="these alone, as 'mean key' 'exact share, layers 0 to 5'")
    parser.add_argument("--blocks", nargs="+", type=int, default=[8], help="with --rules: how many, in this order")
    given = parser.parse_args()
    if unknown := [rule for rule in given.rules or () if _base(rule) not in RULES]:
        parser.error(f"--rules: {unknown[0]} must be one of {', '.join(RULES)}, perhaps with '{LAYERS}FIRST to LAST'")
    if any(RULES[_base(rule)] == "landmarks" for rule in given.rules or ()) and not given.landmarks:
        parser.error("--rules: learned landmarks need --landmarks FILE")
    use_threads()
    work, out = given.work / label(given), given.out / f"{label(given)}.csv"
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = open_model(given.model, given.landmarks)
    reading = Reading(model, given.tokens, given.last, work)
    chosen = dict(texts(given.data, tokenizer, given.tokens, given.texts))
    rows = stages(len(model.model.layers))
    if given.rules:
        rows = [[Row(ALL), *(Row(rule, blocks=count) for rule in given.rules)] for count in given.blocks]
    for stage in rows:
        for name, ids in chosen.items():
            for row in stage:
                file = reading.file(name, row)
                if not file.is_file():
                    losses, seconds = reading.losses(name, ids, row)
                    with file.with_suffix(".tmp").open("wb") as opened:
                        np.savez(opened, losses=losses, seconds=seconds)
                    file.with_suffix(".tmp").rename(file)
                    print(name, *vars(row).values(), losses.mean(), flush=True)
            made = summary(reading.measured(list(chosen)))
            write_atomic(out, made.to_csv(index=False, float_format="%.6f").encode())
            said = "\n".join([table(made), "", *compared(made), ""])
            write_atomic(out.with_suffix(".md"), said.encode())
        frames = {file.stem: pd.read_csv(file) for file in sorted(given.out.glob("*.csv"), key=lambda file: file.stem)}
        tables = {name: each for name, each in frames.items() if {*KEYS} < {*each}}
        write_atomic(given.out / "equal_keys.png", draw(tables))
    for name in chosen:
        shutil.rmtree(work / f"text-{name}", ignore_errors=True)


if __name__ == "__main__":
    main()
