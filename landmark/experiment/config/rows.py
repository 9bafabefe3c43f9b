"""An experiment's rows, each a name with command-line overrides; Hydra composes them, its errors become one line."""

import copy
import difflib
import functools
import itertools
import logging
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from landmark.experiment.config import Config, to_config
from landmark.experiment.config.checks import check as check_settings
from landmark.experiment.config.checks import resolve, unused
from landmark.experiment.config.command_line import is_of_hydra, started
from landmark.experiment.config.saved import to_saved
from landmark.experiment.config.schema import GROUPS, TASKS, elsewhere
from landmark.utils.errors import UserError, in_one_line
from landmark.utils.source_tree import CONF

# Keys of the whole experiment, which no row may set.
_OF_THE_EXPERIMENT = {
    *("experiment", "about", "rows", "parts", "row", "compare", "figure", "panels"),
    *("run", "task", "seeds", "name", "output", "logger", "prompt", "prompt_file", "generate"),
}

MOST = 10_000  # rows of a name with braces, jobs of a sweep
_NOISE = ("Config search path:", "provider=", "See https://", "object_type=", "full_key:", "reference_type=")

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
Compose = Callable[[list[str]], DictConfig]
Check = Callable[[Config], None]


@dataclass(frozen=True)
class Row:
    """A named row. overrides: the command line's, then its own. configs: one per seed."""

    name: str
    overrides: list[str]
    configs: list[Config]


def compose_job(overrides: list[str]) -> DictConfig:
    """Compose the settings of this command with these overrides. Raises UserError for a setting of Hydra."""
    for override in parse(overrides):
        if is_of_hydra(override.key_or_group):
            raise UserError(f"{override.input_line}: settings of Hydra are for its command line alone")
    return compose(config_name=started().config_name, overrides=overrides)


@contextmanager
def composed_again() -> Iterator[None]:
    """Have Hydra find settings where it has begun a job without them (`--experimental-rerun`)."""
    is_ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_ready else initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def select(
    config: Config, overrides: list[str], composer: Compose = compose_job, check: Check = check_settings
) -> list[Row]:
    """The rows of a command, all composed and checked: the experiment's, one of them, or the configuration itself.
    Raises UserError for an unknown row, for a key that both a row and the command line set, and for a key that has no
    effect.
    """
    composer, texts = Composer(composer), named(config)
    _check_experiment(config, overrides, texts)
    if not texts:
        job = started()
        if job.number is None:  # a sweep has checked all jobs together
            _check_own(config, overrides)
        return [_row(cell_names([job.values])[0] or config.name, config, overrides, composer, check)]
    names = [config.row] if config.row is not None else list(texts)
    own_alone = ("row", "rows", "task")
    shared = [each.input_line or "" for each in parse(overrides) if each.key_or_group not in own_alone]
    clashes = [clash for name in names if (clash := _clash(name, _split(name, texts[name]), shared))]
    if clashes:
        raise UserError(clashes[0])
    rows = [_composed(name, texts, shared, composer, check) for name in names]
    _check_shared(config, rows, texts, shared, composer)
    return rows


def _check_experiment(config: Config, overrides: list[str], texts: Mapping[str, str]) -> None:
    """Raise UserError for settings of an experiment that name no row of it. texts: overrides of its rows."""
    if config.row is not None and config.row not in texts:
        known = f"one of {', '.join(texts)}" if texts else "there are none: name an +experiment"
        raise UserError(f"row={config.row}: no such row ({known})")
    if config.seeds is not None and any(override.key_or_group == "seed" for override in parse(overrides)):
        raise UserError("seed: set on the command line, but seeds is set too; use one of them (seeds=null)")
    for title, pair in config.compare.items():
        if len(pair) != 2 or any(name not in texts for name in pair):
            raise UserError(f"compare: {title}: [{', '.join(pair)}] must be the names of two rows")
    if not texts and config.start is not None:
        raise UserError(f"start={config.start}: names a row of an experiment, and there is none")


def _composed(name: str, texts: dict[str, str], shared: list[str], composer: Compose, check: Check) -> Row:
    """A row of an experiment. shared: overrides of all rows. Raises UserError, which names it."""
    own = _split(name, texts[name])
    try:
        row = _row(name, to_config(composer([*shared, *own])), [*shared, *own], composer, check)
        row = replace(row, configs=[_with_start(one, texts, shared, composer) for one in row.configs])
        _check_own(row.configs[0], own)
    except (HydraException, OmegaConfBaseException, UserError) as error:
        raise UserError(f"row {name}: {one_line(error)}") from error
    return row


def _check_shared(
    config: Config, rows: Sequence[Row], texts: Mapping[str, str], shared: list[str], composer: Compose
) -> None:
    """Raise UserError for a shared override that has an effect on no row; of one row alone, warn."""
    given = [override.key_or_group for override in parse(shared)]
    if fault := unused(given, [replace(row.configs[0], task=config.task) for row in rows]):
        composed = (to_config(composer([*shared, *_split(name, text)])) for name, text in texts.items())
        every = [replace(each, task=config.task) for each in composed]
        if config.row is None or unused(given, every):
            raise fault
        _log.warning("row %s: %s, as another row is", config.row, fault)


def named(config: Config) -> dict[str, str]:
    """The overrides of every row by its name."""
    rows = {row: text for name, given in config.rows.items() for row, text in spread(name, given, config.parts).items()}
    if unfit := [name for name in rows if not re.match(r"\w", name) or not name.isprintable()]:
        raise UserError(f"rows: {unfit[0]!r}: must be of plain text, and begin with a letter, a digit or '_'")
    return rows


def spread(name: str, text: str, parts: Mapping[str, str]) -> dict[str, str]:
    """The rows that a name with braces stands for: all combinations of their choices, the last one fastest.

    `{eval.length=512,2048}` sets this key, and the value is part of the name; `{plain,landmark}` adds the overrides of
    these parts, an empty choice none. Raises UserError for a choice that `parts` does not have, and for a row without
    overrides of its own that begins with a part's name without braces.
    """
    literal = re.split(r"{[^}]*}", name)
    if not text and (part := re.split("[_-]", literal[0])[0]) in parts:
        raise UserError(f"rows: {name}: {part} names a part: to add its overrides write {{{part}}}{name[len(part) :]}")
    choices: list[list[tuple[str, str]]] = []
    for braces in re.findall(r"{([^}]*)}", name):
        key, _, values = braces.rpartition("=")
        names = values.split(",")
        if unknown := [each for each in names if each and not key and each not in parts]:
            raise UserError(f"rows: {name}: {unknown[0]} is not among the parts ({', '.join(parts)})")
        choices.append([(each, f"{key}={each}" if key else parts.get(each, "")) for each in names])
    made = {}
    for chosen in combinations(choices, f"rows: {name}"):
        row = literal[0] + "".join(each + after for (each, _), after in zip(chosen, literal[1:], strict=True))
        made[row] = " ".join(filter(None, [text, *(more for _, more in chosen)]))
    return made


def combinations(choices: Iterable[Sequence[_T]], what: str) -> Iterator[tuple[_T, ...]]:
    """All of them, the last choice fastest. Raises UserError where there are more than anybody would make."""
    choices = list(choices)
    if math.prod(map(len, choices)) > MOST:
        raise UserError(f"{what}: has more than {MOST:,} combinations")
    return itertools.product(*choices)


def cell_names(cells: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for the values of some keys in each cell: `landmark_k4_local250`. A choice of a group is its own name."""
    names: dict[str, None] = {}
    for values in cells:
        parts = ("" if _is_group(key) else key.lstrip("+").rpartition(".")[2] for key in values)
        plain = (re.sub(r"[^\w.=+-]+", "-", value).strip("-") for value in values.values())
        name = made = "_".join(f"{part}{value}" for part, value in zip(parts, plain))
        while made in names:
            made = f"{name}-{len(names)}"
        names[made] = None
    return list(names)


def _check_own(config: Config, overrides: Sequence[str]) -> None:
    """Raise UserError where a row sets a key that has no effect on it. overrides: those that it has itself."""
    if fault := unused([override.key_or_group for override in parse(overrides)], [config]):
        raise fault


def _row(name: str, config: Config, overrides: list[str], composer: Compose, check: Check) -> Row:
    if config.start_run is not None:
        raise UserError("start_run: is filled in, name the row to start from by start=")
    check(config)
    configs = [config]
    if config.seeds is not None and config.run is not None:  # which has its own settings
        configs = [replace(config, seed=seed) for seed in config.seeds]
    elif config.seeds is not None:  # anew, because a setting may be of ${seed}
        configs = [to_config(composer([*overrides, f"seed={seed}"])) for seed in config.seeds]
    return Row(name, overrides, [replace(resolve(each), seeds=None) for each in configs])


def _with_start(config: Config, texts: dict[str, str], shared: list[str], composer: Compose) -> Config:
    """The configuration with `start_run` filled in, for the same seed."""
    if config.start is None:
        return config
    if config.start not in texts:
        raise UserError(f"start={config.start}: no such row (one of {', '.join(texts)})")
    base = to_config(composer([*shared, *_split(config.start, texts[config.start]), f"seed={config.seed}"]))
    if base.start is not None:
        raise UserError(f"start={config.start}: that row starts from another, {base.start}")
    if base.model.as_is:
        raise UserError(f"start={config.start}: that row trains nothing")
    check_settings(base)
    gets_landmarks = (base.model.kind, config.model.kind) == ("transformer", "landmark")
    landmark_fields = [item.name for item in fields(config.model) if item.metadata.get("kind") == "landmark"]
    free = ("backend", *(("kind", "block_size", *landmark_fields) if gets_landmarks else ()))
    shapes = [(replace(one.model, **dict.fromkeys(free)), one.cmt.enabled) for one in (base, config)]
    if config.model.name is None and shapes[0] != shapes[1]:
        raise UserError(f"start={config.start}: that row's model has another shape: give both the same model settings")
    return replace(config, start_run=to_saved(replace(resolve(base), seeds=None)))


def _split(name: str, text: str) -> list[str]:
    try:
        own = shlex.split(text)
        parsed = parse(own)
    except (ValueError, HydraException) as error:
        raise UserError(f"row {name}: {one_line(error)}") from error
    for override in parsed:
        if override.key_or_group.partition(".")[0] in _OF_THE_EXPERIMENT:
            raise UserError(f"row {name} sets {override.key_or_group}, which belongs to the whole experiment")
        if override.is_sweep_override():
            raise UserError(f"row {name} gives {override.key_or_group} several values: make a row of each")
    return own


def _clash(name: str, own: list[str], shared: list[str]) -> str | None:
    """A message where a row and the command line set the same key: the row's value would win silently."""
    for ours in parse(own):
        for theirs in parse(shared):
            if _overlap(ours, theirs):
                return (
                    f"{theirs.input_line} on the command line, but row {name} sets {ours.input_line}: "
                    f"leave {theirs.key_or_group} to the rows, or change the row in conf/experiment"
                )
    return None


def _overlap(a: Override, b: Override) -> bool:
    """Whether two overrides set the same key, one of them perhaps as part of a mapping."""
    if a.key_or_group == b.key_or_group:
        return True
    outer, inner = sorted((a, b), key=lambda override: len(override.key_or_group))
    return isinstance(outer.value(), dict) and inner.key_or_group.startswith(f"{outer.key_or_group}.")


class Composer:
    """Composes as `compose` does, but calls it once for each choice of groups, and sets values on a copy."""

    def __init__(self, compose: Callable[[list[str]], DictConfig]) -> None:
        self._compose = compose
        self._made: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: list[str]) -> DictConfig:
        """Raises what `compose` raises."""
        parsed = parse(overrides)
        values = [_sets_a_value(override) for override in parsed]
        choices = tuple(line for line, is_value in zip(overrides, values) if not is_value)
        if choices not in self._made:
            self._made[choices] = self._compose(list(choices))
        config = copy.deepcopy(self._made[choices])
        try:
            for override in itertools.compress(parsed, values):
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self._compose(overrides)  # raises it with more to say
        return config


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them."""
    return [_parse(override) for override in overrides]


@functools.cache
def _parse(override: str) -> Override:
    return OverridesParser.create().parse_overrides([override])[0]


def _sets_a_value(override: Override) -> bool:
    """Whether an override changes a value, and no choice of a group."""
    is_group = override.package is not None or _is_group(override.key_or_group)
    return override.type is OverrideType.CHANGE and not is_group


def _is_group(key: str) -> bool:
    return key in GROUPS or (CONF / key.lstrip("+")).is_dir()


def one_line(error: BaseException) -> str:
    """The message of an error and its cause in one line, without search paths; it suggests the nearest known key."""
    if isinstance(error, UserError):
        return in_one_line(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    parts = []
    for line in [*str(error).splitlines(), *str(error.__cause__ or "").splitlines()]:
        text = " ".join(line.split())
        if text and not text.startswith(_NOISE) and not any(part.endswith(text) for part in parts):
            parts.append(text)
    text = re.sub(r":; ", ": ", "; ".join(parts))
    text = re.sub(r"(Available options in '[^']*': )(.*)", lambda m: m[1] + m[2].replace("; ", ", "), text)
    if missing := re.search(r"Key '(\w+)' (?:not in '\w+'|is not in struct)", text):
        given = re.search(rf"'([\w.]*\b{missing[1]})'", text)
        key, known = given[1] if given else missing[1], _keys()
        if told := elsewhere(key):
            return told
        same = [each for each in known if each.endswith(f".{missing[1]}")]
        if near := same or difflib.get_close_matches(key, known, 1):
            return f"{key}: there is no such setting; did you mean {' or '.join(near)}?"
    if found := re.search(r"Ambiguous value for argument '(.*)'; 1\.", text):
        return _unreadable(found[1], " as one value: with -m it is a job of each; else")
    if found := re.search(r"Error merging override (.*); Cannot convert '\w+' to string", text):
        return _unreadable(found[1], " as one text;")
    if kind := re.search(r"Error merging override (.*); Cannot assign \w+ to (Dict|List)", text):
        return f"{kind[1]}: must be {'a mapping, as {name: value}' if kind[2] == 'Dict' else 'a list, as [value]'}"
    absent = re.search(r"Could not find '(\S+)/([^'/]+)'; Available options in '[^']*': (.*)", text)
    if absent and (near := difflib.get_close_matches(absent[2], absent[3].split(", "), 3)):
        return f"{absent[1]}={absent[2]}: there is none; did you mean {' or '.join(near)}?"
    return text


def quoted(override: str) -> str:
    """KEY=TEXT with the quotes and backslashes by which Hydra's grammar reads the text as it stands."""
    key, _, text = override.partition("=")
    text = re.sub(r"(\\*)(\"|\$\{|$)", lambda found: found[1] * 2 + ("\\" + found[2] if found[2] else ""), text)
    return f'{key}="{text}"'


def _unreadable(override: str, so: str = "") -> str:
    """A message for words that Hydra's grammar cannot read, or not `so`: how to write them."""
    key, sign, value = override.partition("=")
    if not sign:
        kinds = {"task=": TASKS, "+experiment=": [file.stem for file in (CONF / "experiment").glob("*.yaml")]}
        meant = [f"{kind}{override}" for kind, names in kinds.items() if override in names]
        return f"{override}: is no setting, write {meant[0] if meant else 'KEY=VALUE'}"
    said = f"{key}: Hydra's grammar cannot read the value {value}{so or ';'}"
    return f"{said} if it is a text, quote it twice: {shlex.quote(quoted(override))}"


@functools.cache
def _keys(schema: type = Config, prefix: str = "") -> list[str]:
    """All settings and groups of settings."""
    found = []
    for name, hint in get_type_hints(schema).items():
        found.append(f"{prefix}{name}")
        if is_dataclass(hint) and isinstance(hint, type):
            found += _keys(hint, f"{prefix}{name}.")
    return found
