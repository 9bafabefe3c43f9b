"""Tables of plain values as CSV, Markdown and aligned text, by pandas, which loads when it is used."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@")  # how a text begins that a spreadsheet takes for a formula


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A CSV with every number in full. A text that would be a formula begins with an apostrophe."""
    import pandas as pd

    def shown(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    plain = [{key: shown(value) for key, value in row.items()} for row in rows]
    return pd.DataFrame(plain, dtype=object).to_csv(index=False, lineterminator="\n")


def aligned(titles: Iterable[str], rows: Sequence[Sequence[str]], words: int, form: str) -> str:
    """A table of texts; after the first `words` columns they are numbers. form: of tabulate, "simple" or "pipe"."""
    import pandas as pd
    import tabulate

    tabulate.MIN_PADDING = 0  # heads need no more room than cells
    frame = pd.DataFrame(rows, columns=list(titles), dtype=object)
    sides = ["left"] * words + ["right"] * (frame.shape[1] - words)
    return frame.to_markdown(index=False, tablefmt=form, disable_numparse=True, colalign=sides)
