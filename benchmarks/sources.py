"""How often the passage that answers a question is found, by attention and by words.

    python -m benchmarks.sources MODEL --data ../shared/data

MODEL: a folder of transformers, or a .gguf file. Each book of `--questions` is read once: ten stretches around its ten
passages (`--tokens`, in all), or the whole book (`--tokens 0`). Then each question is asked,
and answered in 24 tokens, of its book or (`--together`) of all `--books` in one memory, read one after the other or
apart. What was read and recorded stays in `--work`, so that the command goes on where it stopped.
`--needles TASK --books 1015`: passkey, or a task of RULER with essays of these books, in place of questions.
The CSV has the rank of the passage's best block for each question and method; for `passages`, what a user sees, and for
the same made of BM25 alone, the number of the passage that has a part of it.
"""

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch

from landmark.experiment.data.passkey import Passkey
from landmark.experiment.data.ruler import Ruler
from landmark.experiment.data.ruler.material import Essays
from landmark.experiment.data.tokenizers import PretrainedTokenizer, Tokenizer
from landmark.memory.blocks.shares import AttentionProbe
from landmark.models.huggingface import load
from landmark.models.sampling import Sampling
from landmark.reading.answering import Answering, finished
from landmark.reading.sources import NULL, combined, differing, passages, text_of, words
from landmark.utils.files import write_atomic
from landmark.utils.source_tree import ROOT

QUESTIONS = ROOT / "experiments" / "sources"
ANSWER = 24  # tokens
PARTS = ("prompt", "question", "answer")  # tokens whose attention is recorded
AT = (1, 3, 10)


class Book:
    """A text that is read once, with all its questions, and its folder."""

    def __init__(self, answering: Answering, text: str, questions: dict[int, Any], tokens: int, folder: Path):
        self._answering, self._folder, self._cache = answering, folder, None
        self._tokenizer = answering.tokenizer
        self.text = text if not tokens else self._stretches(text, questions, tokens // len(questions))
        self.ids = answering.chats.text_ids(self.text)
        self.questions, self.starts, self.books = questions, [0], [self]

    def _stretches(self, text: str, questions: dict[int, Any], tokens: int) -> str:
        """So many tokens around each passage, at a place that is drawn, in the order of the book."""
        found = []
        for number, each in sorted(questions.items(), key=lambda item: text.index(item[1]["gold"])):
            begins, draw = text.index(each["gold"]), random.Random(number)
            near = slice(max(0, begins - 6 * tokens), begins + 6 * tokens)
            places = self._tokenizer(text[near], add_special_tokens=False, return_offsets_mapping=True)[
                "offset_mapping"
            ]
            at = next(place for place, (_, end) in enumerate(places) if end > begins - near.start)
            length = len(self._tokenizer(each["gold"], add_special_tokens=False)["input_ids"])
            first = min(max(0, at - draw.randrange(8, tokens - 8 - length)), max(0, len(places) - tokens))
            part = places[first : first + tokens - 2]
            found.append(text[near][part[0][0] : part[-1][1]])
        return "\n\n".join(found)

    def prompt(self, question: str) -> list[int]:
        return [*self.ids, *self._answering.chats.ids([{"role": "user", "content": question}], False)]

    def recorded(self, name: str, question: str, other: str) -> dict[str, Any]:
        """The answer, and the shares (3, layers, H, blocks) of the attention of PARTS."""
        if not (file := self._folder / f"{name}.npz").is_file():
            ids, cache = self.prompt(question), self._read()
            begun, chats = cache.fork(cache.mark_before(len(self.ids))), self._answering.chats
            answer = self._answering.new_answer(ids, True, chats.ends)
            for _ in self._answering.answer(ids, begun, answer, Sampling(), ANSWER):
                pass
            whole, begun = [*ids, *answer.tokens], cache.fork(cache.mark_before(len(self.ids)))
            asking = range(len(self.ids), len(ids)), differing(ids, self.prompt(other)), range(len(ids), len(whole))
            watched, blocks = list[Any](), len(self.ids) // cache.memory.block_size
            for tokens in asking:
                watched.append(AttentionProbe(cast(Any, begun.memory), blocks, tokens))
                begun.memory = watched[-1]
            finished(self._answering.read(torch.tensor([whole[begun.get_seq_length() :]]), begun))
            shares = np.stack([each.shares().numpy() for each in watched]).astype(np.float16)
            partial = file.with_suffix(".part.npz")
            np.savez_compressed(partial, shares=shares, answer=answer.text)
            partial.rename(file)
        return dict(np.load(file, allow_pickle=False))

    def saved(self) -> Path:
        """The folder of the memory that has read it."""
        if not (saved := self._folder / "memory").is_dir():
            cache = self._answering.model.new_memory()
            finished(self._answering.read(torch.tensor([self.ids]), cache))
            cache.save(saved)
        return saved

    def _read(self) -> Any:
        if self._cache is None:
            self._cache = cache = self._answering.model.new_memory()
            cache.load([book.saved() for book in self.books][: len(self.starts)])
            if rest := self.ids[cache.get_seq_length() :]:
                finished(self._answering.read(torch.tensor([rest]), cache))
            cache.marks = []
            cache.settle()
            cache.add_mark()
        return self._cache


class Together(Book):
    """Several books in one memory, each read alone ("apart") or behind the others, and the questions of all."""

    def __init__(self, books: Sequence[Book], way: str, folder: Path):
        self._answering, self._folder, self._cache, self.books = books[0]._answering, folder, None, books
        *starts, _ = accumulate((len(book.ids) for book in books), initial=0)
        self.starts, self.ids = starts if way == "apart" else [0], [id for book in books for id in book.ids]
        self.questions = {number: each for book in books for number, each in book.questions.items()}


def ranks_of(book: Book, size: int) -> list[dict[str, Any]]:
    """A row for each question."""
    text, bounds = text_of(book._answering.chats.decode, book.ids, size)
    texts, rows = [text[a:b] for a, b in pairwise(bounds)], []
    not_first = ~np.isin(np.arange(len(texts)), [start // size for start in book.starts])
    null = book.recorded("null", NULL, "Who?")["shares"].astype(np.float32)
    for number, each in book.questions.items():
        found, begins = book.recorded(str(number), each["question"], NULL), text.index(each["gold"])
        shares = found["shares"].astype(np.float32)
        ends = begins + len(each["gold"])
        gold = [block for block, (a, b) in enumerate(pairwise(bounds)) if a < ends and begins < b]
        more, bm25 = (shares - null).mean((1, 2)), words(texts, each["question"])
        score = combined(shares[1], null[1], bm25)
        scores = {"attention": shares[1].mean((0, 1)), "attention_less_null": more[1], "answer_less_null": more[2]}
        scores |= {"prompt_less_null": more[0], "bm25": bm25, "combined": score}
        row = {"question": number, **{name: each[name] for name in ("book", "words", "held_out")}}
        row |= {"blocks": len(texts), "gold_blocks": len(gold)} | {name: rank(x, gold) for name, x in scores.items()}
        for name, score_of_block in (("passages_bm25", bm25), ("passages", score)):
            shown = enumerate(passages(text, bounds, np.where(not_first, score_of_block, 0), 10), 1)
            row[name] = next((place for place, (a, b, _) in shown if a < ends and begins < b), math.inf)
        rows.append(row | {"answer": " ".join(str(found["answer"]).split())})
    book._cache = None  # one at a time
    return rows


def needle(task: str, tokens: int, number: int, essay: str, tokenizer: Tokenizer) -> tuple[str, dict[str, Any]]:
    """A text of so many tokens, and the question behind it with the needle that answers it."""
    if task == "passkey":
        text = tokenizer.decode(Passkey().prompt(np.random.default_rng(number), tokens, tokenizer).tokens)
        at, found = text.rindex(" What is the pass key"), re.search(r"The pass key is \d+\. Remember it", text)
        gold = found[0] if found else ""
    else:
        made = Ruler(task, 0, Essays(tokenizer.encode(essay), tokenizer))
        sample = made.make(random.Random(number), made.size(tokens, tokenizer), tokens)
        text, at, gold = sample.text, sample.text.rindex("\n"), sample.evidence[0]
    question = {"question": text[at:].strip(), "gold": gold, "book": task, "words": "text", "held_out": False}
    return text[:at], question


def rank(score: np.ndarray, gold: Sequence[int]) -> float:
    """From 1, of the best block that has a part of the passage; among equal ones a mean. The first block is none."""
    score = score.astype(np.float64)
    score[0] = -np.inf
    best = score[list(gold)].max()
    return 1 + float((score > best).sum()) + (float((score == best).sum()) - 1) / 2


def table(found: Any) -> str:
    """The share of questions whose passage is first, among three, among ten, by method: held out, and all."""
    names, kinds = [*found.columns[6:-1]], (found[found["held_out"]], found, found[found["words"] == "own"])
    of_kinds = zip(("held out", "all", "own words"), kinds, strict=True)
    heads = [f"{len(each)} {name}: {at}" for name, each in of_kinds for at in AT]
    lines = [f"| ranked by | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in names:
        counts = [str(int((each[name] <= at).sum())) for each in kinds for at in AT]
        lines.append(f"| {name} | {' | '.join(counts)} |")
    chances = [
        sum(
            1 - math.comb(n - g, at) / math.comb(n, at)
            for n, g in zip(each["blocks"], each["gold_blocks"], strict=True)
        )
        for each in kinds
        for at in AT
    ]
    return "\n".join([*lines, f"| chance | {' | '.join(f'{each:.1f}' for each in chances)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sources", description=__doc__)
    parser.add_argument("model", help="folder of a model of transformers, or a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of pg19-mini")
    parser.add_argument("--tokens", type=int, default=8192, help="of the stretches of a book; 0: whole books")
    parser.add_argument("--questions", type=Path, default=QUESTIONS / "questions.json", help="file of questions")
    parser.add_argument("--books", type=lambda text: text.split(","), help="numbers of some books")
    parser.add_argument("--together", choices=("apart", "in_order"), help="how all books are read into one memory")
    parser.add_argument("--needles", metavar="TASK", help="passkey, or a task of RULER, in place of questions")
    parser.add_argument("--prompts", type=int, default=20, help="texts with needles")
    parser.add_argument("--work", type=Path, required=True, help="folder of what was read and recorded")
    parser.add_argument("--out", type=Path, default=QUESTIONS / "results", help="folder of the CSV")
    given = parser.parse_args()
    content, books = json.loads(given.questions.read_text("utf-8")), list[Book]()
    model, tokenizer = load(given.model)
    answering, known = Answering(model, tokenizer, most_bytes=1), PretrainedTokenizer(tokenizer)
    place, names = given.work / f"{Path(given.model).stem}-{given.tokens}", given.books or [*content["books"]]
    for name in names:
        text = (given.data / content["books"][name]["file"]).read_text("utf-8")
        texts = {name: (text, {n: each for n, each in enumerate(content["questions"]) if each["book"] == name})}
        if given.needles:
            made = {n: needle(given.needles, given.tokens, n, text, known) for n in range(given.prompts)}
            texts = {f"{given.needles}-{n}": (text, {n: question}) for n, (text, question) in made.items()}
        for part, (text, questions) in texts.items():
            (folder := place / part).mkdir(parents=True, exist_ok=True)
            books.append(Book(answering, text, questions, 0 if given.needles else given.tokens, folder))
    if given.together is not None:
        place /= "-".join([given.together, *names])
        place.mkdir(exist_ok=True)
        books = [Together(books, given.together, place)]
    frame: Any = pd.DataFrame([row for book in books for row in ranks_of(book, model.landmarks.block_size)])
    given.out.mkdir(parents=True, exist_ok=True)
    others = "" if given.questions.name == "questions.json" else given.questions.stem
    parts = Path(given.model).stem, others, given.needles, str(given.tokens or "books"), given.together and place.name
    file = given.out / f"{'-'.join(filter(None, parts))}.csv"
    write_atomic(file, frame.to_csv(index=False).encode())
    print(f"{table(frame)}\n\nwritten: {file}")


if __name__ == "__main__":
    main()
