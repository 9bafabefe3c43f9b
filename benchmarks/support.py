"""How well an answer's support tells those that are right and in the text from others.

    python -m benchmarks.support MODEL --data ../shared/data --work DIR

MODEL: a folder of transformers, or a .gguf file. About `--tokens` tokens of each book of experiments/sources are read
once. Its ten questions, and those of unanswerable.json that were written for it, are answered from three passages alone
(`generate.from_sources`), in TOKENS tokens. What is answered stays in `--work`, a line a question, so that the command
goes on where it stopped. The CSV has a row for each question.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.answers import is_right
from benchmarks.settings import use_threads
from benchmarks.sources import QUESTIONS, Book
from landmark.documents import Document
from landmark.experiment.results.charts import COLOURS, Look, Panel, curves, png, point
from landmark.models.huggingface import load
from landmark.reading.answering import Answering
from landmark.reading.session import Passages, Prompt, Session
from landmark.reading.support import CLEAR, TOKENS, WEAK, Support
from landmark.utils.files import write_atomic


def answered(session: Session, question: str) -> dict[str, Any]:
    """What is recorded of a question."""
    exchange, kept = session.exchange(Prompt.question(question), session.chats.ends), dict[str, Any]()
    for event in session.ask(exchange, None, TOKENS, from_passages=True):
        if isinstance(event, Passages):
            kept["passages"] = [each._asdict() for each in event.found]
        elif isinstance(event, Support):
            kept |= {"least": event.least, "own": event.own, "bm25": event.words, "score": event.score}
    return kept | {"answer": " ".join(exchange.answer.text.split())}


def area(score: Sequence[float], is_good: Sequence[bool]) -> float:
    """Under the curve of hits against false alarms: how often a good one scores more than another."""
    scores, good = np.asarray(score), np.asarray(is_good, bool)
    more, same = scores[good][:, None] > scores[~good], scores[good][:, None] == scores[~good]
    return float((more + 0.5 * same).mean())


def table(rows: Any) -> str:
    """The area, and right answers of all that have a level, on the held-out third and on the others."""
    lines = ["| questions | right | area | clear: right of | weak: right of | none: right of |", f"{'|---' * 6}|"]
    for name, some in (("two thirds", rows[~rows["held_out"]]), ("held out", rows[rows["held_out"]])):
        cells, area_of = list[str](), area(some["score"], some["right"])
        for low, high in ((CLEAR, 2.0), (WEAK, CLEAR), (0.0, WEAK)):
            right = some["right"][(some["score"] >= low) & (some["score"] < high)]
            cells.append(f"{right.sum()} of {len(right)}")
        lines.append(f"| {len(some)} {name} | {some['right'].sum()} | {area_of:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(tables: dict[str, Any]) -> bytes:
    """A PNG: for every least score, the right answers that have it against the others that do. tables: by model."""
    looks = {"chosen on these": Look(COLOURS["transformer"]), "held out": Look(COLOURS["landmark"])}
    others, right = (f"share of {which} answers with at least a score" for which in ("other", "right"))
    x, y = {"title": others}, {"title": right, "scale": {"domain": [0, 1.001]}}
    panels = list[Panel]()
    for model, rows in tables.items():
        points = list[Any]()
        for name, held_out in zip(looks, (False, True), strict=True):
            some = rows[rows["held_out"] == held_out].sort_values("score", ascending=False)
            good, best = np.asarray(some["right"], bool), dict[float, float]()
            for number in range(len(good) + 1):
                false = float((~good[:number]).sum() / max(1, (~good).sum()))
                best[false] = float(good[:number].sum() / max(1, good.sum()))
            points += [point(name, *each) for each in best.items()]
        panels.append(curves(model, points, looks, x, y, step=True))
    return png("Is the answer in the text?", [panels])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of pg19-mini")
    parser.add_argument("--work", type=Path, required=True, help="folder of what was answered")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stretches of a book")
    parser.add_argument("--out", type=Path, default=QUESTIONS / "results", help="folder of the CSV")
    given = parser.parse_args()
    use_threads()
    content, stem = json.loads((QUESTIONS / "questions.json").read_text("utf-8")), Path(given.model).stem
    others = json.loads((QUESTIONS / "unanswerable.json").read_text("utf-8"))["questions"]
    given.work.mkdir(parents=True, exist_ok=True)
    lines = given.work / f"support-{stem}.jsonl"
    rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.is_file() else []
    answering = Answering(*load(given.model))
    for book in content["books"]:
        text = (given.data / content["books"][book]["file"]).read_text("utf-8")
        questions = {number: each for number, each in enumerate(content["questions"]) if each["book"] == book}
        every = [*questions.values(), *(each for each in others if each["book"] == book)]
        known = {each["question"] for each in rows if each["book"] == book}
        if all(each["question"] in known for each in every):
            continue
        session = Session(answering)
        session.read(Document(book, Book(answering, text, questions, given.tokens, Path()).text))
        for each in every:
            if each["question"] not in known:
                row = {name: each.get(name) for name in ("book", "question", "words", "held_out", "answer")}
                row["right_answer"] = row.pop("answer")
                rows.append(row | answered(session, each["question"]))
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1], ensure_ascii=False) + "\n")
    frame: Any = pd.DataFrame(rows).drop(columns="passages")
    right = [row["right_answer"] is not None and is_right(row["answer"], row["right_answer"]) for row in rows]
    frame.insert(4, "right", right)
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out / f"support-{stem}.csv", frame.to_csv(index=False).encode())
    files = sorted(given.out.glob("support-*.csv"), reverse=True)
    tables = {file.stem.removeprefix("support-"): pd.read_csv(file) for file in files}
    write_atomic(given.out / "support.png", draw(tables))
    print(table(frame))


if __name__ == "__main__":
    main()
