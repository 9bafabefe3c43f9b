"""An experiment's rows: each is a name and the command-line overrides that give it."""

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from landmark.config import Config, to_config, to_dict
from landmark.config.checks import check, check_grid, check_own, resolve
from landmark.config.composer import Composer, parse
from landmark.config.messages import one_line
from landmark.utils.errors import UserError

# What an experiment decides for all of its rows.
_NOT_A_ROWS = {
    *("experiment", "rows", "grid", "row", "compare", "figure"),
    *("run", "task", "seeds", "name", "output", "logger", "prompt", "prompt_file", "output_file", "generate"),
}

Compose = Callable[[list[str]], DictConfig]


@dataclass(frozen=True)
class Row:
    """A named row: its overrides (the command line's first), its configuration, one per seed, and where it stands in
    the experiment's grid, if it does."""

    name: str
    overrides: list[str]
    configs: list[Config]
    cell: dict[str, str] | None = None


def compose_job(overrides: list[str]) -> DictConfig:
    """Compose conf/config.yaml with these overrides, inside a Hydra job."""
    return compose(config_name="config", overrides=overrides)


def select(config: Config, overrides: list[str], composer: Compose = compose_job) -> list[Row]:
    """The rows of a job, all composed and validated: the experiment's, one of them, or the config itself.

    overrides: those of the command line; one of a grid's keys takes the place of that axis. Raises UserError: no such
    row; a row that sets what the command line sets too; settings that make no sense.
    """
    check_grid(config)
    composer, texts = Composer(composer), named(config, overrides)
    if config.row is not None and config.row not in texts:
        known = f"one of {', '.join(texts)}" if texts else "there are none: name an +experiment"
        raise UserError(f"row={config.row}: no such row ({known})")
    if config.seeds is not None and any(override.key_or_group == "seed" for override in parse(overrides)):
        raise UserError("seed: set on the command line, but seeds is set too; use one of them (seeds=null)")
    for title, pair in config.compare.items():
        if len(pair) != 2 or any(name not in named(config) for name in pair):
            raise UserError(f"compare: {title}: [{', '.join(pair)}] must be the names of two rows")
    if not texts and config.start is not None:
        raise UserError(f"start={config.start}: names a row of an experiment, and there is none")
    if not texts:
        return [_row(config.name, config, overrides)]
    names = [config.row] if config.row is not None else list(texts)
    shared = [
        override.input_line or ""
        for override in parse(overrides)
        if override.key_or_group not in ("row", "rows", "task", *config.grid.axes)
    ]
    clashes = [clash for name in names if (clash := _clash(name, _split(name, texts[name]), shared))]
    if clashes:
        raise UserError(clashes[0])
    rows, grid = [], cells(config, overrides)
    for name in names:
        own = _split(name, texts[name])
        try:
            row = _row(name, to_config(composer([*shared, *own])), [*shared, *own], grid.get(name))
            row = replace(row, configs=[_started(one, texts, shared, composer) for one in row.configs])
            check_own(row.configs[0], [override.key_or_group for override in parse(own)])
            rows.append(row)
        except (HydraException, OmegaConfBaseException, UserError) as error:
            raise UserError(f"row {name}: {one_line(error)}") from error
    return rows


def named(config: Config, overrides: Sequence[str] = ()) -> dict[str, str]:
    """The overrides of every row by its name: those listed, then those of the grid. overrides: as for `select`."""
    grid = {
        name: " ".join([config.grid.row, *(f"{key}={value}" for key, value in cell.items())])
        for name, cell in cells(config, overrides).items()
    }
    if both := sorted(grid.keys() & config.rows.keys()):
        raise UserError(f"rows: {both[0]} is the name of a row and of a cell of the grid")
    return config.rows | grid


def cells(config: Config, overrides: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """The value on each axis of every row of the grid, by the row's name, as `k4_local250`."""
    axes = {key: [str(value) for value in values] for key, values in config.grid.axes.items()}
    for override in parse(overrides):
        if override.key_or_group in axes:
            swept = override.is_sweep_override()
            values = list(override.sweep_string_iterator()) if swept else [override.get_value_element_as_str()]
            axes[override.key_or_group] = values
    found = {}
    for values in itertools.product(*axes.values()) if axes else ():
        name = "_".join(f"{key.rpartition('.')[2]}{value}" for key, value in zip(axes, values))
        found[name] = dict(zip(axes, values))
    return found


def is_part(config: Config, overrides: Sequence[str]) -> bool:
    """Whether the command line asks for less than the experiment: one row, or some values of an axis."""
    return config.row is not None or any(override.key_or_group in config.grid.axes for override in parse(overrides))


def _row(name: str, config: Config, overrides: list[str], cell: dict[str, str] | None = None) -> Row:
    check(config)
    seeds = [config.seed] if config.seeds is None else config.seeds
    return Row(name, overrides, [replace(resolve(config), seed=seed, seeds=None) for seed in seeds], cell)


def _started(config: Config, texts: dict[str, str], shared: list[str], composer: Compose) -> Config:
    """The config with that of the run it starts from, of the same seed, filled in."""
    if config.start is None:
        return config
    if config.start not in texts:
        raise UserError(f"start={config.start}: no such row (one of {', '.join(texts)})")
    base = to_config(composer([*shared, *_split(config.start, texts[config.start])]))
    if base.start is not None:
        raise UserError(f"start={config.start}: that row starts from another, {base.start}")
    check(base)
    base = replace(resolve(base), seed=config.seed, seeds=None, rows={}, compare={})
    return replace(config, start_run=to_dict(base))


def _split(name: str, text: str) -> list[str]:
    try:
        own = shlex.split(text)
        parsed = parse(own)
    except (ValueError, HydraException) as error:
        raise UserError(f"row {name}: {one_line(error)}") from error
    for override in parsed:
        if override.key_or_group.partition(".")[0] in _NOT_A_ROWS:
            raise UserError(f"row {name} sets {override.key_or_group}, which belongs to the whole experiment")
        if override.is_sweep_override():
            raise UserError(f"row {name} gives {override.key_or_group} several values: make a row of each")
    return own


def _clash(name: str, own: list[str], shared: list[str]) -> str | None:
    """Why a row and the command line do not go together, if so: the row's value would win silently."""
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
