"""Few cases that hold every pair of values of any two options, where hypothesis would draw hundreds."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def all_pairs(
    options: Mapping[str, Iterable[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda case: True, times: int = 1
) -> list[dict[str, Any]]:
    """Cases such that each pair of values of two options is in one of them, if an allowed case can have it. The same
    every time: each case is the one of a hundred random ones around a pair not seen yet with most of them. times: in
    how many cases each pair is."""
    values = {name: list(of_option) for name, of_option in options.items()}
    drawn = random.Random(0)

    def pairs(case: dict[str, Any]) -> set[tuple[Any, ...]]:
        places = [(name, values[name].index(case[name])) for name in values]
        return set(itertools.combinations(places, 2))

    def around(pair: tuple[Any, ...]) -> Iterable[dict[str, Any]]:
        for _ in range(100):
            case = {name: drawn.choice(of_option) for name, of_option in values.items()}
            case |= {name: values[name][place] for name, place in pair}
            if allowed(case):
                yield case

    places = [[(name, place) for place in range(len(values[name]))] for name in values]
    cases: list[dict[str, Any]] = []
    for _ in range(times):
        missing = {pair for two in itertools.combinations(places, 2) for pair in itertools.product(*two)}
        while missing:
            pair = min(missing, key=repr)
            found = max(around(pair), key=lambda case: len(pairs(case) & missing), default=None)
            missing.discard(pair)
            if found is not None:
                cases.append(found)
                missing -= pairs(found)
    return cases


def name_of(case: Mapping[str, Any]) -> str:
    """A readable id of a case for pytest."""
    return "-".join(str(getattr(value, "__name__", value)).replace(" ", "") for value in case.values())
