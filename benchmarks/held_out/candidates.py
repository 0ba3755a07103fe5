"""
Changes to the hot policy that were tried and are not part of the package; docs/held_out.md has what they brought.

A plan names one with `candidate`, for a trainer with a hot policy. They hold for one process and the indicator potential with
`alpha_normalization: none`, and those with a learned proposal for whole prompts in a micro-batch and one update a batch.

Axis letters: P prompts, N of the policy's own samples and K others of a prompt, T completion tokens.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from trl_repulse.generation import _ahead
from trl_repulse.generation._ahead import RowTemperatures
from trl_repulse.importance import normalize_weights, sequence_log_prob
from trl_repulse.trainers._beside import PROPOSAL_FOLDER
from trl_repulse.trainers._hot_policy import HotPolicy
from trl_repulse.trainers._negative_term import COEFFICIENTS, NEGATIVE, OWN
from trl_repulse.trainers._records import record_samples
from trl_repulse.trainers._trl_bridge import sampling_from


def log_sum(*parts: tuple[int, torch.Tensor]) -> torch.Tensor:
    """log m of the mixture of samplers, each with its number of samples of a prompt and its log-probabilities (nats)."""
    total = sum(number for number, _ in parts)
    return torch.stack([x + math.log(number / total) for number, x in parts if number]).logsumexp(dim=0)


class Candidate(HotPolicy):
    """The hot policy, its weights in steps that can be replaced one at a time."""

    def weigh(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_hot: torch.Tensor):
        size, n = batch["rewards"].size(1), self.trainer._num_generations(self.mode)
        units, cut = len(batch["rewards"]), n // size  # into how many units a prompt's samples are cut

        def whole(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(units // cut, -1, *x.shape[2:])

        batch = {
            name: x[::cut] if name.startswith("prompt_") else whole(x) for name, x in batch.items() if x.dim() > 1
        }
        log_p, log_p_hot = whole(log_p), whole(log_p_hot)
        rewards = torch.cat([batch["rewards"], batch["proposal_rewards"]], dim=1)  # (P, N + K)
        scores = (log_p, OWN), (log_p_hot, NEGATIVE)
        now = torch.cat([sequence_log_prob(x, batch[f"{name}_mask"]) for x, name in scores], dim=1)
        hot = [sequence_log_prob(batch[f"{name}_tempered"], batch[f"{name}_mask"]) for name in (OWN, NEGATIVE)]
        bad = rewards < self._threshold
        log_w = self.log_weights(batch, now, torch.cat(hot, dim=1), bad)
        self.trainer._log_mean("negative/bad", bad[:, n:].float().flatten())
        weights = self.pushed(self.trainer.args.alpha * normalize_weights(log_w), log_w, bad, n)
        # The policy loss divides by the number of each kind
        own, others = (-w * w.size(1) for w in weights.split([n, weights.size(1) - n], dim=1))
        return {COEFFICIENTS[OWN]: own.reshape(units, -1), COEFFICIENTS[NEGATIVE]: others.reshape(units, -1)}

    def log_weights(self, batch: dict[str, torch.Tensor], now: torch.Tensor, hot: torch.Tensor, bad: torch.Tensor):
        """log p / m of the bad among samples (P, N + K), −inf of others, from their log-probabilities at both temperatures."""
        n = batch["rewards"].size(1)
        log_w = now - log_sum((n, now), (now.size(1) - n, hot))
        return log_w.masked_fill(~bad, -torch.inf)

    def pushed(self, weights: torch.Tensor, log_w: torch.Tensor, bad: torch.Tensor, n: int) -> torch.Tensor:
        """By how much each sample (P, N + K) is pushed down: α in all for a prompt with something bad."""
        return weights


class OtherSamples(Candidate):
    """A control: as many samples that are not bad, drawn by the same sampler, take the place of the bad ones, with their weights."""

    hot = True

    def needed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All: what is not bad may be pushed down too."""
        return {}

    def pushed(self, weights: torch.Tensor, log_w: torch.Tensor, bad: torch.Tensor, n: int) -> torch.Tensor:
        other = torch.zeros_like(weights)
        for prompt in torch.where(bad.any(dim=1))[0].tolist():
            candidates = ~bad[prompt]
            candidates[slice(n) if self.hot else slice(n, None)] = False
            places, given = torch.where(candidates)[0], weights[prompt][bad[prompt]]
            places = places[torch.randperm(len(places))][: len(given)]
            if len(places):
                other[prompt, places] = given[: len(places)] * given.sum() / given[: len(places)].sum()
        return other


class OwnOtherSamples(OtherSamples):
    """A control: samples of the policy itself that are not bad, which are merely likely."""

    hot = False


class Ending(Candidate):
    """A push that ends: α · P / (P + P₀) with P the estimate of the prompt's P(bad)."""

    p_0 = 1e-4

    def pushed(self, weights: torch.Tensor, log_w: torch.Tensor, bad: torch.Tensor, n: int) -> torch.Tensor:
        p_bad = log_w.exp().mean(dim=1, keepdim=True)
        return weights * p_bad / (p_bad + self.p_0)


class Centered(Candidate):
    """A control variate: the mean score of the prompt's own samples is taken off what is pushed down."""

    def pushed(self, weights: torch.Tensor, log_w: torch.Tensor, bad: torch.Tensor, n: int) -> torch.Tensor:
        weights = weights.clone()
        weights[:, :n] -= weights.sum(dim=1, keepdim=True) / n
        return weights


@dataclass
class Found:
    """A bad output that was found: its tokens, Σ 1/m over the times it was, and log p (nats) as it was found last."""

    ids: torch.Tensor
    reward: float
    log_inverse_m: float
    log_p_then: float
    log_p_now: float


class Memory(Candidate):
    """
    A memory of the bad outputs found, by prompt, in both kinds of samples.

    They are pushed down again when the prompt comes back, with the weight p / m, p of the policy as it is now and m of the mixture
    as it was then, until the policy makes one a thousand times more rarely than when it was found.
    """

    slots, forgotten = 8, math.log(1000)

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.found: dict[tuple[int, ...], dict[tuple[int, ...], Found]] = {}

    @staticmethod
    def key(ids: torch.Tensor, mask: torch.Tensor) -> tuple[int, ...]:
        return tuple(ids[mask == 1].tolist())

    def draw(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drawn = super().draw(rows, batch)
        if self.mode != "train":
            return drawn
        cut = self.trainer._num_generations(self.mode) // batch["rewards"].size(1)
        keys = [self.key(*prompt) for prompt in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)][::cut]
        recalled = [list(self.found.get(key, {}).values()) for key in keys]
        slots = -(-max(map(len, recalled)) // cut)  # of a unit
        if not slots:
            return drawn
        width = max([drawn[f"{NEGATIVE}_ids"].size(2), *(len(x.ids) for known in recalled for x in known)])
        shape = (len(keys), cut * slots)
        ids = drawn[f"{NEGATIVE}_ids"].new_full((*shape, width), self.trainer._tokenizer.pad_token_id)
        mask = drawn[f"{NEGATIVE}_mask"].new_zeros(ids.shape)
        rewards = drawn["proposal_rewards"].new_full(shape, torch.nan)
        log_inverse_m = rewards.new_full(shape, -torch.inf)
        for row, known in enumerate(recalled):
            for place, entry in enumerate(known):
                ids[row, place, : len(entry.ids)], mask[row, place, : len(entry.ids)] = entry.ids, 1
                rewards[row, place], log_inverse_m[row, place] = entry.reward, entry.log_inverse_m
        now_drawn = torch.full_like(drawn["proposal_rewards"], torch.nan)
        more = {
            f"{NEGATIVE}_ids": ids,
            f"{NEGATIVE}_mask": mask,
            "proposal_rewards": rewards,
            "recalled": log_inverse_m,
        }
        for name, values in more.items():
            before = drawn.get(name, now_drawn)
            if before.dim() == 3:
                value = self.trainer._tokenizer.pad_token_id if name.endswith("ids") else 0
                before = F.pad(before, (0, width - before.size(2)), value=value)
            drawn[name] = torch.cat([before, values.view(-1, slots, *values.shape[2:])], dim=1)
        return drawn

    def log_weights(self, batch: dict[str, torch.Tensor], now: torch.Tensor, hot: torch.Tensor, bad: torch.Tensor):
        own = torch.full_like(batch["rewards"], torch.nan)
        recalled = torch.cat(
            [own, batch.get("recalled", torch.full_like(batch["proposal_rewards"], torch.nan))], dim=1
        )
        drawn, n = recalled.isnan(), own.size(1)
        log_m = log_sum((n, now), (int(drawn[0].sum()) - n, hot))
        log_inverse_m = torch.where(drawn, -log_m, recalled)  # (P, N + K), K with those recalled
        log_w = (now + log_inverse_m).masked_fill(~bad, -torch.inf)
        if self.mode == "train":
            self.remember(batch, now, log_inverse_m, bad, drawn)
        return log_w

    def remember(
        self,
        batch: dict[str, torch.Tensor],
        now: torch.Tensor,
        log_inverse_m: torch.Tensor,
        bad: torch.Tensor,
        drawn: torch.Tensor,
    ) -> None:
        """Takes note of what was found, and of how probable all of it is now; forgets."""
        n = batch["rewards"].size(1)
        rewards = torch.cat([batch["rewards"], batch["proposal_rewards"]], dim=1)
        kept, dropped = [], 0
        for row, prompt in enumerate(zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)):
            known = self.found.setdefault(self.key(*prompt), {})
            for place in torch.where(bad[row])[0].tolist():
                name, index = (OWN, place) if place < n else (NEGATIVE, place - n)
                ids, mask = batch[f"{name}_ids"][row, index], batch[f"{name}_mask"][row, index]
                tokens, log_p = self.key(ids, mask), now[row, place].item()
                entry = known.get(tokens)
                if not drawn[row, place]:
                    if entry is not None:
                        known[tokens] = replace(entry, log_p_now=log_p)
                    continue
                inverse = log_inverse_m[row, place].item()
                if entry is not None:
                    inverse = float(torch.logaddexp(torch.tensor(entry.log_inverse_m), torch.tensor(inverse)))
                known[tokens] = Found(ids[mask == 1], rewards[row, place].item(), inverse, log_p, log_p)
            live = {k: x for k, x in known.items() if x.log_p_now > x.log_p_then - self.forgotten}
            dropped += len(known) - len(live)
            best = sorted(live, key=lambda k: live[k].log_p_now + live[k].log_inverse_m, reverse=True)[: self.slots]
            known = {k: live[k] for k in best}
            self.found[self.key(*prompt)] = known
            kept.append(float(len(known)))
        self.trainer._log_mean("memory/kept", torch.tensor(kept))
        self.trainer._log_mean("memory/dropped", torch.tensor([dropped / len(kept)]))


class Beside(Candidate):
    """
    A learned proposal in the place of some of the hot samples; the three samplers' mixture weighs all samples.

    The proposal lowers KL(σ ‖ q), σ being what is bad among all samples, weighed: log-likelihood, a mean over tokens.
    """

    hot_samples, learned_samples = 3, 2

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.temperature, self.proposal = 1.6, trainer.proposal

    def size(self, mode: str) -> int:
        return self.hot_samples

    def draw(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hot = super().draw(rows, batch) if self.hot_samples else {}
        trainer, n, m = self.trainer, self.trainer._unit_size(self.mode), self.learned_samples
        rows = [row for row in rows[::n] for _ in range(m)]
        with sampling_from(trainer, self.proposal.engine, PROPOSAL_FOLDER, m):
            samples = trainer._draw(rows)
        record_samples(trainer, samples, self.logs, "learned")
        trainer._log_mean("learned/bad", (samples.rewards < self._threshold).float())
        learned = samples.in_units(m, "proposal_")
        if not hot:
            return {name: batch[name] for name in ("prompt_ids", "prompt_mask")} | learned
        width = max(x[f"{NEGATIVE}_ids"].size(2) for x in (hot, learned))
        for name, x in learned.items():
            parts, value = [hot[name], x], trainer._tokenizer.pad_token_id if name.endswith("ids") else 0
            if x.dim() == 3:
                parts = [F.pad(part, (0, width - part.size(2)), value=value) for part in parts]
            hot[name] = torch.cat(parts, dim=1)
        return hot

    def drawing(self):
        return super().drawing() if self.hot_samples else torch.no_grad()

    def log_weights(self, batch: dict[str, torch.Tensor], now: torch.Tensor, hot: torch.Tensor, bad: torch.Tensor):
        trainer, n = self.trainer, batch["rewards"].size(1)
        learns = self.mode == "train"
        model = self.proposal.engine if learns else self.proposal.module
        with torch.set_grad_enabled(learns):
            log_q = trainer._score(model, batch, (OWN, NEGATIVE), gradient=learns).log_p
        masks = [batch[f"{name}_mask"] for name in (OWN, NEGATIVE)]
        total = torch.cat([sequence_log_prob(x, mask) for x, mask in zip(log_q, masks, strict=True)], dim=1)
        log_m = log_sum((n, now), (self.hot_samples, hot), (self.learned_samples, total.detach()))
        log_w = (now - log_m).masked_fill(~bad, -torch.inf)
        if learns:
            lengths = torch.cat([mask.sum(dim=-1) for mask in masks], dim=1).clamp(min=1)
            self.proposal.backward(-(normalize_weights(log_w) * total / lengths).sum() / len(total))
        return log_w

    def end_of_micro_batch(self) -> None:
        self.trainer._update_second(PROPOSAL_FOLDER)


class Learned(Beside):
    """The learned proposal alone, in the place of all hot samples; the policy's own samples stay in the mixture."""

    hot_samples, learned_samples = 0, 5


class EndingMemory(Memory):
    """A memory, and a push that ends."""

    p_0, pushed = Ending.p_0, Ending.pushed


class EndingBeside(Beside):
    """A learned proposal beside, and a push that ends."""

    p_0, pushed = Ending.p_0, Ending.pushed


class Cut(Candidate):
    """Hot samples of tokens alone that are at least `min_p` times as probable as the most probable one, at the higher temperature."""

    min_p = 1e-3

    @contextlib.contextmanager
    def drawing(self):
        with super().drawing(), mock.patch.object(_ahead, "RowTemperatures", self._processor):
            yield

    def _processor(self, temperatures: list[float]):
        hot = torch.tensor(temperatures).unsqueeze(1) != 1.0
        at_temperatures = RowTemperatures(temperatures)

        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores = at_temperatures(input_ids, scores)
            return torch.where(hot, self.cut(scores), scores)

        return process

    def cut(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(self.min_p), -torch.inf)

    def weigh(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_hot: torch.Tensor):
        for name, bad in self.tempered(batch)[1].items():
            found = torch.zeros_like(batch[f"{name}_tempered"])
            prompts = [
                batch[x].repeat_interleave(bad.size(1), 0)[bad.flatten()] for x in ("prompt_ids", "prompt_mask")
            ]
            ids, mask = (batch[f"{name}_{kind}"][bad] for kind in ("ids", "mask"))
            if len(ids):
                attended = torch.cat([prompts[1], mask], dim=1)
                with torch.no_grad():
                    logits = self.trainer.model(
                        input_ids=torch.cat([prompts[0], ids], dim=1),
                        attention_mask=attended,
                        position_ids=(attended.cumsum(dim=1) - 1).clamp(min=0),
                    ).logits[:, -ids.size(1) - 1 : -1]
                log_q = (
                    self.cut(logits / self.temperature).log_softmax(dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
                )
                found[bad] = torch.where(mask == 1, log_q, 0.0)
            batch = batch | {f"{name}_tempered": found}
        # Own samples may hold tokens that are never drawn hot
        return super().weigh(
            {k: x.clamp(min=-1e4) if k.endswith("tempered") else x for k, x in batch.items()}, log_p, log_p_hot
        )


class CutMore(Cut):
    """As `Cut`, of fewer tokens."""

    min_p = 1e-2


CANDIDATES = {
    "cut at 1e-3": Cut,
    "cut at 1e-2": CutMore,
    "weights as in the package": Candidate,
    "other hot samples": OtherSamples,
    "other own samples": OwnOtherSamples,
    "ending": Ending,
    "centered": Centered,
    "memory": Memory,
    "beside": Beside,
    "learned": Learned,
    "memory, ending": EndingMemory,
    "beside, ending": EndingBeside,
}


def with_candidate(trainer: type, name: str) -> type:
    """A trainer class whose negative term is a candidate."""

    class WithCandidate(trainer):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self._negative = CANDIDATES[name](self)

    return WithCandidate
