"""Training and validation windows for Lightning."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import lightning
from torch.utils.data import DataLoader, IterableDataset

from landmark.experiment.data.masked import masked_tokens
from landmark.experiment.data.passkey import Passkey
from landmark.experiment.data.ruler.material import Essays
from landmark.experiment.data.ruler.samples import RulerSamples
from landmark.experiment.data.synthetic import SyntheticCorpus
from landmark.experiment.data.synthetic_windows import MixedWindows, SyntheticWindows
from landmark.experiment.data.windows import ControlledLandmarks, PositionalJumps, Repeats, TrainingWindows
from landmark.utils.constants import NO_LOSS
from landmark.utils.errors import UserError
from landmark.utils.window_batch import WindowBatch, most_blocks

if TYPE_CHECKING:
    from landmark.experiment.config import Config
    from landmark.experiment.data.stream import Corpus
    from landmark.experiment.data.tokenizers import Tokenizer

Windows = TrainingWindows | SyntheticWindows | MixedWindows


class WindowDataModule(lightning.LightningDataModule):
    """Batches of windows from a corpus, as `config.train`, `config.model.block_size` and `config.seed` say.

    Training: endless, for each optimizer step this device's share of the batch of B windows (device r of n: windows
    r·B/n … (r+1)·B/n − 1), or with `micro_batch` its parts of so many. `start_step` is read when iteration begins: **to
    resume, set it before the loop**. Validation: `validate_batches` batches, spread evenly over the split, the same
    each time, without repeats and positional jumps.
    """

    def __init__(self, corpus: "Corpus | SyntheticCorpus", tokenizer: "Tokenizer", config: "Config"):
        """Raises UserError when a split is too short for a window."""
        super().__init__()
        self.start_step = 0
        self.micro_batch: int | None = None
        self._batch_size = config.train.batch_size
        self._validate_batches = config.train.validate_batches
        self._seed = config.seed
        length = config.train.length
        block_size = config.model.block_size if config.model.kind == "landmark" else None

        settings: dict[str, Any] = {
            "length": length,
            "batch_size": config.train.batch_size,
            "seed": config.seed,
            "block_size": block_size,
        }

        def windows(split: str, **options: Any) -> TrainingWindows | SyntheticWindows:
            if isinstance(corpus, SyntheticCorpus):
                return SyntheticWindows(corpus, split, **settings)
            special = {"landmark": tokenizer.landmark, "eot": tokenizer.eot, "beginning": tokenizer.beginning}
            return TrainingWindows(corpus.split(split), **settings, **special, **options)

        shares = config.data.repeats
        repeats = None if shares is None else Repeats(shares, config.train.steps)
        self.training: Windows = windows("train", repeats=repeats, cut_as=config.train.cut_as)
        share = config.data.tasks or config.data.passkeys
        if share is not None and isinstance(self.training, TrainingWindows):
            task = Passkey()
            if config.data.passkeys is None:
                task = RulerSamples(Essays(cast("Corpus", corpus).split("train").tokens, tokenizer))
            tasks = SyntheticWindows(SyntheticCorpus(task, tokenizer), "train", **settings)
            self.training = MixedWindows(self.training, tasks, share)
        self.validation = windows("validation")
        self._controlled = self._jumps = None
        if block_size is not None and config.cmt.enabled:
            self._controlled = ControlledLandmarks(config.model.num_layers, most_blocks(length, block_size))
        if block_size is not None and config.positions.p_jump > 1:
            self._jumps = PositionalJumps(length, block_size, config.positions.p_jump)
        self._masked = masked_tokens(tokenizer) if config.model.masked else None

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_Batches(self._train_batches), batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(_Batches(self._validation_batches), batch_size=None)

    def _train_batches(self) -> Iterator[WindowBatch]:
        indices = self._share()
        for step in itertools.count(self.start_step):
            batch = self.training.batch(step, indices)
            if self._controlled is not None:
                batch = replace(batch, controlled=self._controlled.for_step(self._seed, step, indices))
            if self._jumps is not None and batch.phase is not None:
                batch = replace(batch, positions=self._jumps.positions(batch.phase, self._seed, step, indices))
            if self._masked is not None:
                batch = self._masked.for_step(batch, self._seed, step, indices)
            if self.micro_batch is None:
                yield batch
            else:
                targets = int((batch.targets != NO_LOSS).sum())
                yield from (replace(part, batch_targets=targets) for part in batch.cut(self.micro_batch))

    def _validation_batches(self) -> Iterator[WindowBatch]:
        indices = self._share()
        starts = self.validation.evenly_spaced(self._validate_batches * self._batch_size)
        for first in range(0, len(starts), self._batch_size):
            numbers = starts[first + indices.start : first + indices.stop]
            batch = self.validation.at(numbers)
            if self._controlled is not None:
                batch = replace(batch, controlled=self._controlled.for_validation(numbers))
            if self._masked is not None:
                batch = self._masked.for_validation(batch, numbers)
            yield batch

    def _share(self) -> range:
        rank, devices = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        if self._batch_size % devices:
            raise UserError(f"train.batch_size={self._batch_size} cannot be shared evenly by {devices} devices")
        size = self._batch_size // devices
        return range(rank * size, (rank + 1) * size)


class _Batches(IterableDataset):
    def __init__(self, make: Callable[[], Iterator[WindowBatch]]):
        self._make = make

    def __iter__(self) -> Iterator[WindowBatch]:
        return self._make()
