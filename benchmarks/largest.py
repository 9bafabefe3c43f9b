"""Whether answers are better from the three passages with the largest share of ten than from the three best.

    python -m benchmarks.largest MODEL --data ../shared/data --work DIR

The shares of attention are those that benchmarks.heads has recorded in `--work`. Each question of `--questions` is
answered from the passages of both ways alone, with the head of the text, as `generate.from_sources` does, in ANSWER
tokens. Answers stay in `--work`, a line a question, so that the command goes on where it stopped.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from benchmarks.answers import ANSWER, is_right
from benchmarks.heads import record
from benchmarks.settings import use_threads
from benchmarks.sources import QUESTIONS
from landmark.documents import Document
from landmark.models.huggingface import load
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering
from landmark.reading.sources import FOUND, _head, _source, combined, ends_of, passages
from landmark.utils.files import write_atomic

TEN = 10


def texts(each: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """What an answer is made from in each way, and whether a part of the right passage is in it."""
    text, bounds = each["text"], each["bounds"]
    score = combined(each["asked"].astype(np.float32), each["null"].astype(np.float32), each["bm25"])
    files, ends, found = [(0, Document(each["book"], text))], ends_of(text), dict[str, tuple[str, bool]]()
    for way, most in (("best", FOUND), ("largest", TEN)):
        spans = passages(text, bounds, score, most, ends)
        sources = [own for span in spans if (own := _source(text, files, *span)[1]).text]
        sources = sorted(sources, key=lambda own: -own.share)[:FOUND]
        if (head := _head(text, ends, *files[0], [own.start for own in sources])).text:
            sources.append(head)
        begins, stop = each["span"]
        has = any(own.start < stop and begins < own.end for own in sources)
        found[way] = "".join(f"{own.text}\n\n" for own in sorted(sources, key=lambda own: own.start)), has
    return found


def answer(answering: Answering, text: str, question: str) -> str:
    """The answer to a question about a text."""
    chats = answering.chats
    ids = [*chats.text_ids(text), *chats.ids([{"role": "user", "content": question}], False)]
    said = answering.new_answer(ids, True, chats.ends)
    for _ in answering.answer(ids, answering.new_memory(), said, Sampling(), ANSWER):
        pass
    return " ".join(said.text.split())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.largest", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of pg19-mini")
    parser.add_argument("--work", type=Path, required=True, help="folder of what was recorded and answered")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stretches of a book")
    parser.add_argument("--questions", type=Path, default=QUESTIONS / "other_books.json", help="of which file")
    parser.add_argument("--out", type=Path, default=QUESTIONS / "results", help="folder of the CSV")
    given = parser.parse_args()
    use_threads()
    answering, stem = Answering(*load(given.model), most_bytes=1), Path(given.model).stem
    found = record(answering, given.questions, given.data, given.tokens, given.work / f"{stem}-{given.tokens}")
    lines = given.work / f"largest-{stem}-{given.questions.stem}.jsonl"
    rows = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.is_file() else []
    for each in islice(found, len(rows), None):
        row, made = {name: each[name] for name in ("book", "question", "words")}, dict[str, str]()
        row["right_answer"] = each["answer"]
        for way, (text, has) in texts(each).items():
            made[text] = said = made.get(text) or answer(answering, text, each["question"])
            row |= {f"{way}_has_passage": has, f"{way}_characters": len(text), f"{way}_answer": said}
            row[f"{way}_right"] = is_right(said, row["right_answer"])
        rows.append(row)
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(len(rows), flush=True)
    frame: Any = pd.DataFrame(rows)
    write_atomic(given.out / f"largest-{stem}-{given.tokens}.csv", frame.to_csv(index=False).encode())
    for what in ("right", "has_passage"):
        best, largest = frame[f"best_{what}"], frame[f"largest_{what}"]
        more, fewer = int((largest & ~best).sum()), int((best & ~largest).sum())
        p = binomtest(more, more + fewer).pvalue if more + fewer else 1.0
        print(f"{what}: best {best.sum()}, largest {largest.sum()} of {len(frame)}; {more} : {fewer}, p = {p:.2g}")
    print(frame[["best_characters", "largest_characters"]].mean())


if __name__ == "__main__":
    main()
