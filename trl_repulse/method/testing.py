"""Tests that a negative term has to pass, also one of your own.

Subclass [`NegativeTermTests`] in a test file of yours, say how a trainer with your term is made, and run pytest.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ..engine.scoring import SetScores
from ..engine.units import EXTRA, OWN, Shape, Units
from .negative_term import NegativeTerm, Weights


def record_weights(term: NegativeTerm) -> list[tuple[Units, Weights, Shape]]:
    """A list to which each later call of [`NegativeTerm.weigh`] adds its units, what it returned, and the shape of the batch."""
    seen: list[tuple[Units, Weights, Shape]] = []
    weigh = term.weigh

    def recorded(units: Units, scores: SetScores, shape: Shape) -> Weights:
        before = {name: x.clone() for name, x in units.to_batch().items()}
        weights = weigh(units, scores, shape)
        after = units.to_batch()
        assert before.keys() == after.keys(), "`weigh` adds to the units that it is given"
        changed = [name for name, x in before.items() if not torch.equal(x.nan_to_num(), after[name].nan_to_num())]
        assert not changed, f"`weigh` changes {changed} of the units that it is given"
        seen.append((units, weights, shape))
        return weights

    term.weigh = recorded  # type: ignore[method-assign]
    return seen


def coefficients(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The coefficients of each set that has some, by its name."""
    yield from ((name, x) for name, x in ((OWN, weights.own), (EXTRA, weights.extra)) if x is not None)


class NegativeTermTests:
    """
    What every negative term keeps: its weights, what they do to the policy, resumed runs, and prompts that are cut apart.

    Override [`make_trainer`].
    """

    def make_trainer(self, output_dir: str, **settings: Any) -> Any:
        """
        A trainer with the term, of a tiny model on a CPU, that draws the same samples each time.

        Args:
            output_dir (`str`): Folder of the run.
            settings: Fields of the configuration to be set, such as `max_steps` and `alpha`.
        """
        raise NotImplementedError("Say how a trainer with your term is made.")

    # A whole prompt in each micro-batch, and a half of one
    whole: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    cut: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}

    @pytest.mark.parametrize("batches", ["whole", "cut"])
    def test_weights(self, tmp_path: Path, batches: str) -> None:
        """Coefficients carry no gradient, are finite and at most 0, and fit their samples; `weigh` changes nothing, and gives the same twice."""
        trainer = self.make_trainer(str(tmp_path), max_steps=2, **getattr(self, batches))
        seen = record_weights(trainer._negative)
        trainer.train()
        assert seen, "`weigh` is never called"
        for units, weights, _ in seen:
            made = dict(coefficients(weights))
            assert made, "`weigh` gives no coefficients"
            for name, x in made.items():
                assert x.shape == units.sets()[name].rewards.shape, f"coefficients of {name} samples have shape {tuple(x.shape)}"
                assert not x.requires_grad and bool(x.isfinite().all()) and bool((x <= 0).all())

    def test_gradient(self, tmp_path: Path) -> None:
        """A step with the term leaves the samples that it weighs less probable than a step without it."""
        ends, scores = [], []
        step = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.01, "warmup_steps": 0, "max_grad_norm": 1e9}
        for alpha in (1.0, 1e-9):
            trainer = self.make_trainer(str(tmp_path / str(alpha)), alpha=alpha, **step, **self.whole)
            seen = record_weights(trainer._negative)
            trainer.train()
            ends.append((trainer, seen[0]))
        units, weights, shape = ends[0][1]
        plain = replace(units, own=copy.copy(units.own))
        for trainer, _ in ends:
            wanted = trainer._negative.wanted(plain)
            with torch.no_grad():
                found = trainer._scoring.score(trainer.model, plain, shape, replace(wanted, needed={}, sampler=None))
            scores.append(found.log_p)
        change = sum(
            ((scores[0][name] - scores[1][name]).mul(units.sets()[name].mask).sum(-1) * x).sum()
            for name, x in coefficients(weights)
        )
        assert change > 0, "samples with a weight did not become less probable"

    def test_resume(self, tmp_path: Path) -> None:
        """A run that was stopped ends with the weights of one that was not, and the state is JSON."""
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, **self.whole}
        whole = self.make_trainer(str(tmp_path), **options)
        whole.train()
        state = whole._negative.state()
        assert json.loads(json.dumps(state)) == state, "`state` is not JSON"
        resumed = self.make_trainer(str(tmp_path), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(one, other), f"{name} differs in the resumed run: does `state` hold all that the term remembers?"

    def test_processes(self, tmp_path: Path) -> None:
        """Coefficients of a prompt are the same where it is cut apart, as between processes, and where it is whole."""
        totals = []
        for batches in (self.whole, self.cut):
            trainer = self.make_trainer(str(tmp_path / str(len(totals))), max_steps=1, learning_rate=0.0, **batches)
            seen = record_weights(trainer._negative)
            trainer.train()
            by_name: dict[str, list[torch.Tensor]] = {}
            for _, weights, _ in seen:
                for name, x in coefficients(weights):
                    by_name.setdefault(name, []).append(x.flatten())
            totals.append({name: torch.cat(x).sort().values for name, x in by_name.items()})
        for name, x in totals[0].items():
            torch.testing.assert_close(totals[1][name], x, msg=f"coefficients of {name} samples differ")
