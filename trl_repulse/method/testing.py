"""Tests that a negative term has to pass, also one of your own.

Subclass [`NegativeTermTests`] in a test file of yours, say how a trainer with your term is made, and run pytest.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ..engine.scoring import SetScores
from ..engine.units import EXTRA, OWN, CompletionSet, Shape, Units
from .negative_term import NegativeTerm, Weights


class Weighed(NamedTuple):
    """A call of [`NegativeTerm.weigh`] and what it returned."""

    units: Units
    scores: SetScores
    shape: Shape
    weights: Weights


def record_weights(term: NegativeTerm) -> list[Weighed]:
    """A list to which each later call of [`NegativeTerm.weigh`] is added."""
    seen: list[Weighed] = []
    weigh = term.weigh

    def recorded(units: Units, scores: SetScores, shape: Shape) -> Weights:
        """`weigh`, checked to change nothing of its units; keeps what went in and out."""
        before = {name: x.clone() for name, x in units.to_batch().items()}
        weights = weigh(units, scores, shape)
        after = units.to_batch()
        assert before.keys() == after.keys(), "`weigh` adds to the units that it is given"
        changed = [name for name, x in before.items() if not torch.equal(x.nan_to_num(), after[name].nan_to_num())]
        assert not changed, f"`weigh` changes {changed} of the units that it is given"
        seen.append(Weighed(units, scores, shape, weights))
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
        """Coefficients carry no gradient, are finite and at most 0, and fit their samples; `weigh` changes nothing of its units."""
        trainer = self.make_trainer(str(tmp_path), max_steps=2, **getattr(self, batches))
        seen = record_weights(trainer._negative)
        trainer.train()
        assert seen, "`weigh` is never called"
        for units, _, _, weights in seen:
            made = dict(coefficients(weights))
            assert made, "`weigh` gives no coefficients"
            for name, x in made.items():
                assert x.shape == units.sets()[name].rewards.shape, (
                    f"coefficients of {name} samples have shape {tuple(x.shape)}"
                )
                assert not x.requires_grad, f"coefficients of {name} samples carry a gradient"
                assert bool(x.isfinite().all()), f"coefficients of {name} samples are not finite"
                assert bool((x <= 0).all()), f"coefficients of {name} samples raise their probability"

    def test_gradient(self, tmp_path: Path) -> None:
        """A step with the term leaves the samples that it weighs less probable than a step without it."""
        calls, trainers, scores = [], [], []
        step = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.01, "warmup_steps": 0, "max_grad_norm": 1e9}
        for alpha in (1.0, 1e-9):
            trainer = self.make_trainer(str(tmp_path / str(alpha)), alpha=alpha, **step, **self.whole)
            seen = record_weights(trainer._negative)
            trainer.train()
            trainers.append(trainer)
            calls.append(seen[0])
        units, _, shape, weights = calls[0]
        plain = replace(units, own=copy.copy(units.own))
        for trainer in trainers:
            wanted = trainer._negative.wanted(plain)
            with torch.no_grad():
                passed = trainer._scoring.score(trainer.model, plain, shape, replace(wanted, needed={}, sampler=None))
            scores.append(passed.log_p)
        change = sum(
            ((scores[0][name] - scores[1][name]).mul(units.sets()[name].mask).sum(-1) * x.abs()).sum()
            for name, x in coefficients(weights)
        )
        assert change < 0, "samples with a weight did not become less probable"

    def test_resume(self, tmp_path: Path) -> None:
        """A run that resumes from the first checkpoint ends with the weights of the run that wrote it, and `state` is JSON."""
        options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, **self.whole}
        whole = self.make_trainer(str(tmp_path), **options)
        whole.train()
        state = whole._negative.state()
        assert json.loads(json.dumps(state)) == state, "`state` is not JSON"
        resumed = self.make_trainer(str(tmp_path), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        for (name, first), again in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(first, again), (
                f"{name} differs in the resumed run: does `state` hold all that the term remembers?"
            )

    def test_processes(self, tmp_path: Path) -> None:
        """Coefficients of a prompt are the same where it is cut apart, as between processes, and where it is whole."""
        trainer = self.make_trainer(str(tmp_path), max_steps=1, **self.whole)
        seen = record_weights(trainer._negative)
        trainer.train()
        units, scores, shape, weights = seen[0]
        with torch.no_grad():
            made = dict(coefficients(trainer._negative.weigh(*cut_apart(units, scores, shape))))
        for name, x in coefficients(weights):
            gap = made[name].reshape(x.shape) - x
            assert gap.abs().max() < 1e-5, f"coefficients of {name} samples differ where prompts are cut apart"


def cut_apart(units: Units, scores: SetScores, shape: Shape) -> tuple[Units, SetScores, Shape]:
    """The same samples in units of one policy sample each."""
    n = shape.unit

    def cut(x: Any) -> Any:
        """(U, n·k, ...) as (U·n, k, ...): k is 1 of policy samples, m / n of extra ones. `None` stays `None`."""
        return x.unflatten(1, (n, -1)).flatten(0, 1) if isinstance(x, torch.Tensor) and x.dim() > 1 else x

    def cut_set(samples: CompletionSet) -> CompletionSet:
        return replace(samples, **{key: cut(value) for key, value in vars(samples).items()})

    extra = None if units.extra is None else cut_set(units.extra)
    credit = (cut(x) for x in (units.advantages, units.returns, units.rows))
    prompt_ids, prompt_mask = (x.repeat_interleave(n, 0) for x in (units.prompt_ids, units.prompt_mask))
    log_p, by_sampler = (
        {key: cut(x.detach()) for key, x in of_sets.items()} for of_sets in (scores.log_p, scores.by_sampler)
    )
    cut_scores = SetScores(log_p, None, scores.aux_loss, by_sampler, cut(scores.proposal))
    cut_units = Units(prompt_ids, prompt_mask, cut_set(units.own), extra, *credit)
    return cut_units, cut_scores, replace(shape, unit=1, whole=False, early=True)
