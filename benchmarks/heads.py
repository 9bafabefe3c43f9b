"""Which heads of a model find the passage that answers a question, and whether they show better passages than all do.

    python -m benchmarks.heads MODEL --data ../shared/data --work DIR

MODEL: a folder of transformers, or a .gguf file. About `--tokens` tokens of each book of `--questions` are read once,
and each question is asked. A head's score is the share of its attention, less the null question's, that falls on the
passage which answers: a mean over the questions that are not held out (QRHead, Zhang et al. 2025). How many of the best
heads count is chosen by leaving one book out. Then the passages of these heads stand beside those of all heads, on the
held-out questions and on those of `--others`. What was recorded stays in `--work`, so that the command goes on where it
stopped.
"""

import argparse
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest

from benchmarks.settings import use_threads
from benchmarks.sources import QUESTIONS, Book
from landmark.documents import Document
from landmark.models.huggingface import load
from landmark.reading.answering import Answering
from landmark.reading.sources import NULL, combined, passages, scores_of

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # of heads
SHOWN = 3


def record(answering: Answering, file: Path, data: Path, tokens: int, work: Path) -> Iterator[dict[str, Any]]:
    """What is known of each question: its shares of attention, text and passage."""
    content = json.loads(file.read_text("utf-8"))
    for name, about in content["books"].items():
        (folder := work / name).mkdir(parents=True, exist_ok=True)
        questions = {number: each for number, each in enumerate(content["questions"]) if each["book"] == name}
        files = {number: folder / f"{number}.npz" for number in questions}
        book: Any = None
        for number, each in questions.items():
            if not files[number].is_file():
                book = book or Book(answering, (data / about["file"]).read_text("utf-8"), questions, tokens, folder)
                chats, cache = answering.chats, book._read()
                said = ([{"role": "user", "content": text}] for text in (each["question"], NULL))
                asked, null = (chats.ids(messages, False) for messages in said)
                text = Document(name, chats.decode(book.ids))
                scores = scores_of(answering, cache, [(0, text)], book.ids, asked, null)
                assert scores is not None
                kept = {"asked": scores.asked.astype(np.float16), "null": scores.null.astype(np.float16)}
                partial = files[number].with_suffix(".part.npz")
                np.savez_compressed(partial, words=scores.words, bounds=scores.bounds, text=scores.text, **kept)
                partial.rename(files[number])
                print(name, number, flush=True)
            kept = dict(np.load(files[number], allow_pickle=False))
            text, begins = str(kept["text"]), str(kept["text"]).index(each["gold"])
            span, bounds = (begins, begins + len(each["gold"])), kept["bounds"].tolist()
            gold = [n for n, (a, b) in enumerate(pairwise(bounds)) if a < span[1] and begins < b]
            kept |= {"text": text, "bounds": bounds, "span": span, "gold": gold}
            kept["bm25"] = kept.pop("words")
            yield kept | {name: each[name] for name in ("book", "question", "held_out", "words", "answer")}


def rank(each: dict[str, Any], heads: np.ndarray | None) -> float:
    """The number of the shown passage that has a part of the right one. heads: (layers, H), bool; None: all."""
    asked, null = each["asked"].astype(np.float32), each["null"].astype(np.float32)
    if heads is not None:
        asked, null = asked[heads][None], null[heads][None]
    score = combined(asked, null, each["bm25"])
    shown = enumerate(passages(each["text"], each["bounds"], score, 10), 1)
    begins, ends = each["span"]
    return next((place for place, (a, b, _) in shown if a < ends and begins < b), math.inf)


def best(found: list[dict[str, Any]], count: int) -> np.ndarray:
    """The heads (layers, H), bool, that give most attention to the right passages."""
    on_gold = [(each["asked"].astype(np.float32) - each["null"])[..., each["gold"]].sum(-1) for each in found]
    score = np.mean(on_gold, 0)
    return score >= np.sort(score, axis=None)[-count]


def chosen(found: list[dict[str, Any]]) -> int:
    """How many heads count: the number with most passages among those shown, each book by the heads of the others."""
    right = dict[int, int]()
    for count in COUNTS:
        right[count] = 0
        for book in {each["book"] for each in found}:
            heads = best([each for each in found if each["book"] != book], count)
            right[count] += sum(rank(each, heads) <= SHOWN for each in found if each["book"] == book)
    print(f"passages among {SHOWN} of {len(found)}, by heads of the other books: {right}")
    return max(COUNTS, key=lambda count: right[count])


def compared(name: str, found: list[dict[str, Any]], heads: np.ndarray) -> str:
    """A line of the table: passages first, among three and ten, of all heads and of the best, and the sign test."""
    ranks = [(rank(each, None), rank(each, heads)) for each in found]
    counts = [
        ", ".join(str(sum(of <= at for of in which)) for at in (1, SHOWN, 10)) for which in zip(*ranks, strict=True)
    ]
    shown = [(before <= SHOWN, after <= SHOWN) for before, after in ranks]
    cells = [signs(sum(b < a for a, b in ranks), sum(b > a for a, b in ranks))]
    cells.append(signs(sum(b and not a for a, b in shown), sum(a and not b for a, b in shown)))
    return f"| {len(found)} {name} | {' | '.join([*counts, *cells])} |"


def signs(more: int, fewer: int) -> str:
    """The sign test."""
    return f"{more} : {fewer}, p = {binomtest(more, more + fewer).pvalue if more + fewer else 1.0:.2g}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of pg19-mini")
    parser.add_argument("--work", type=Path, required=True, help="folder of what was recorded")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stretches of a book")
    parser.add_argument("--questions", type=Path, default=QUESTIONS / "questions.json", help="to choose heads on")
    parser.add_argument("--others", type=Path, help="questions of other books, to compare them on")
    given = parser.parse_args()
    use_threads()
    answering = Answering(*load(given.model), most_bytes=1)
    place = given.work / f"{Path(given.model).stem}-{given.tokens}"
    found = [*record(answering, given.questions, given.data, given.tokens, place)]
    groups = {"held out": [each for each in found if each["held_out"]]}
    known = [each for each in found if not each["held_out"]]
    if given.others:
        groups["others"] = [*record(answering, given.others, given.data, given.tokens, place)]
    heads = best(known, chosen(known))
    print("heads (layer, head):", [(int(layer), int(head)) for layer, head in zip(*heads.nonzero(), strict=True)])
    columns = "questions", "all heads: first, 3, 10", "best heads", "better : worse ranks", "gained : lost among 3"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    groups["own words"] = [each for group in groups.values() for each in group if each["words"] == "own"]
    for name, group in {"chosen on": known, **groups}.items():
        print(compared(name, group, heads))


if __name__ == "__main__":
    main()
