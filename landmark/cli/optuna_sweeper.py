"""`hydra/sweeper=optuna`: Optuna proposes what each job sets, from the numbers of the jobs before it.

It takes the name of Hydra's plugin, whose releases need an Optuna of 2021 or a Hydra to come. Its sampler has a seed:
the same command proposes the same settings again, reads those that are done from their records, and goes on.
"""

import math
import shlex
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins

from landmark.cli.command import Command
from landmark.cli.whole_sweeps import WholeSweeper
from landmark.config.messages import one_line
from landmark.utils.errors import UserError

NAME = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
SETTINGS = {"n_trials": 20, "n_jobs": 1, "seed": 0}


def register() -> None:
    """Have Hydra take `OptunaSweeper` for its plugin, whether that is installed or not."""
    Plugins.instance().class_name_to_class[NAME] = OptunaSweeper
    node = {"_target_": NAME, **SETTINGS, "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=node, provider="landmark")


class OptunaSweeper(WholeSweeper):
    """Jobs, one after the other or `n_jobs` at a time, that look for the smallest number which a job returns."""

    def __init__(self, n_trials: int, n_jobs: int, seed: int, params: dict[str, str] | None = None) -> None:
        """Start with nothing proposed.

        Args:
            n_trials: proposals, of which some may be the same; where all possible settings are done, it ends earlier.
            n_jobs: proposals that are made at a time, and launched together.
            seed: of the sampler.
            params: values of settings, by key, as on the command line.
        """
        super().__init__(None, params)
        self._trials, self._at_once, self._seed = n_trials, n_jobs, seed

    def sweep(self, arguments: list[str]) -> None:
        """Raises UserError where a number makes no sense, nothing is swept, or a job cannot start."""
        import optuna

        for key, value in {"n_trials": self._trials, "n_jobs": self._at_once, "seed": self._seed}.items():
            if type(value) is not int or value < (key != "seed"):
                raise UserError(f"hydra.sweeper.{key}={value}: must be a whole number, at least {int(key != 'seed')}")
        assert self.hydra_context is not None
        assert self.launcher is not None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        swept = {each.get_key_element(): _values(each) for each in overrides if each.is_sweep_override()}
        if not swept:
            raise UserError("hydra/sweeper=optuna: nothing is swept, write KEY=choice(…) or KEY=interval(…)")
        fixed = [
            f"{each.get_key_element()}={each.get_value_element_as_str()}"
            for each in overrides
            if not each.is_sweep_override()
        ]
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed))
        possible = math.prod(len(getattr(each, "choices", range(self._trials))) for each in swept.values())
        numbers: dict[tuple[str, ...], float | None] = {}  # of the jobs that are done; None of one that failed
        for start in range(0, self._trials, self._at_once):
            trials = [study.ask(swept) for _ in range(min(self._at_once, self._trials - start))]
            jobs = [self._proposed(fixed, trial.params) for trial in trials]
            new = [list(job) for job in dict.fromkeys(jobs) if job not in numbers]
            self.overrides = [[fixed, *new]]  # by what all share, a job that fails is named
            named = [self.named(job, swept) for job in new]
            returned = self.launcher.launch(named, initial_job_idx=len(numbers)) if new else []
            numbers |= {tuple(job): each.return_value for job, each in zip(new, returned, strict=True)}
            for trial, job in zip(trials, jobs):
                state = optuna.trial.TrialState.FAIL if numbers[job] is None else None
                study.tell(trial, numbers[job], state)
            if len(numbers) >= possible:
                break
        found = {job: number for job, number in numbers.items() if number is not None}
        if found:
            best = min(found, key=lambda job: found[job])
            print(f"best of {len(found)} settings: {shlex.join(best[len(fixed) :])}, with {found[best]:.4f}")

    def _proposed(self, fixed: list[str], values: dict[str, Any]) -> tuple[str, ...]:
        words = [
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
        ]
        job, fault, _ = self.applying([*fixed, *words], list(values))
        if fault is not None:
            raise UserError(f"{shlex.join(words)}: {one_line(fault)}") from None
        return tuple(job)

    def check(self, command: Command) -> None:
        """Raise UserError where a job would return no number."""
        if command.only_row is None or command.config.task != "auto":
            raise UserError("hydra/sweeper=optuna: a job must evaluate one row, name it with row=NAME, and no task")


def _values(override: Override) -> Any:
    """What a setting is drawn from, for Optuna. Raises UserError for an interval that is none."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if override.is_discrete_sweep():
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    value = override.value()
    assert isinstance(value, IntervalSweep)
    assert value.start is not None
    assert value.end is not None
    start, end, log = value.start, value.end, "log" in value.tags
    try:
        if isinstance(start, int) and isinstance(end, int):
            return IntDistribution(start, end, log=log)
        return FloatDistribution(start, end, log=log)
    except ValueError as error:
        raise UserError(f"{override.input_line}: {error}") from None
