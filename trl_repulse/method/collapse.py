"""Signs that a proposal no longer draws the policy's low-reward outputs.

Axis letters: U units of n policy samples and m proposal samples, P prompts, N policy samples and K proposal samples of a
prompt, T completion tokens.
"""

from collections import deque

import torch
from accelerate.logging import get_logger

from ..engine.diagnosis import DISTINCT, LOG_Z_GAP, SAMPLES, UPDATES
from ..engine.logs import Moments, mean
from ..engine.scoring import SetScores
from ..engine.units import EXTRA, OWN, Shape, Units
from ..math.importance import distinct_share, log_z_estimate, rank_among, sequence_log_prob
from .negative_term import NegativeTerm


logger = get_logger(__name__)


class CollapseWatch:
    """
    Logs how a proposal's samples compare with the policy's, and warns once if a learned proposal's are the worse ones.

    The effective sample size does not show a collapse: if all samples of a prompt are the same, or equally improbable under the
    policy, their weights are equal. But the policy's own samples bound log Z from below too, and a proposal whose samples put it
    lower finds less of the target than no proposal.

    Args:
        term ([`NegativeTerm`]):
            The negative term that draws the samples.
    """

    def __init__(self, term: NegativeTerm):
        self._term, self._services, self._logs = term, term.services, term.logs
        self._gaps: deque[float] = deque(maxlen=UPDATES)
        self._distinct: deque[float] = deque(maxlen=UPDATES)
        self._of_update: list[tuple[float | None, float]] = []  # gap and distinct samples of each of its micro-batches
        self._warned = False

    def look(self, units: Units, scores: SetScores, shape: Shape, counted: torch.Tensor | None = None) -> torch.Tensor:
        """
        Logs `distinct` and `log_p_rank`, and returns the first of each prompt that counts.

        Args:
            units ([`Units`]): Samples of both kinds.
            scores ([`SetScores`]): Their log-probabilities under the policy.
            shape ([`Shape`]): How the batch is cut.
            counted (`torch.Tensor` of shape `(U, m)`, *optional*): Which extra samples have their rank logged, by default all.
        """
        by_prompt, extra, size = self._services.by_prompt, units.extra_samples, shape.extra
        mask = by_prompt(extra.mask, size)
        known = (~by_prompt(extra.rewards, size).isnan()).any(dim=1)  # other prompts may only fill up a batch
        shares = distinct_share(by_prompt(extra.ids, size), mask)
        self._logs.mean("proposal/distinct", shares[known])
        own = by_prompt(sequence_log_prob(scores.of(OWN, units.own), units.own.mask), shape.generations)
        counted = None if counted is None else by_prompt(counted, size)
        log_p = sequence_log_prob(by_prompt(scores.of(EXTRA, extra), size), mask)
        self._logs.mean("proposal/log_p_rank", rank_among(log_p, own, counted)[known])
        return shares[known]

    def compare(self, units: Units, log_w: torch.Tensor, shares: torch.Tensor, shape: Shape) -> None:
        """
        Logs `log_z_gap`, and warns once if it stays large, or samples stay alike. A collective call.

        `log_w` (P, K) are the log-weights of the proposal's samples, −inf for those without a reward; `shares` are what [`look`] returned.
        """
        by_prompt, size = self._services.by_prompt, shape.extra
        scored = ~by_prompt(units.extra_samples.rewards, size).isnan()  # (P, K)
        log_potential = by_prompt(self._term.log_potential(units.own.rewards), shape.generations)  # (P, N)
        bound = torch.where(log_potential.isnan(), -torch.inf, log_potential)
        gaps = log_z_estimate(bound, ~log_potential.isnan()) - log_z_estimate(log_w, scored)  # (P,)
        gap = self._logs.gathered(Moments.of(torch.where(gaps.isinf(), torch.nan, gaps)))
        self._logs.record({"proposal/log_z_gap": mean}, gap)
        distinct = self._logs.gathered(Moments.of(shares))
        if not shape.training or not distinct.count:
            return
        self._of_update.append((gap.mean if gap.count else None, distinct.mean * size))
        if not self._services.accelerator.sync_gradients:
            return
        known = [
            value for value, _ in self._of_update if value is not None
        ]  # with an indicator many batches have none
        latest = sum(value for _, value in self._of_update) / len(self._of_update)
        self._of_update.clear()
        self._distinct.append(latest)
        if known:
            self._gaps.append(sum(known) / len(known))
        if not self._warned:
            self._warn(latest, size)

    def _warn(self, distinct: float, size: int) -> None:
        gap, alike = (sum(each) / UPDATES if len(each) == UPDATES else None for each in (self._gaps, self._distinct))
        if gap is not None and gap > LOG_Z_GAP:
            seen = f"do not find the policy's bad outputs: they put log Z {gap:.1f} nats lower than the policy's own samples do"
            seen += f" (`proposal/log_z_gap`), and {distinct:.1f} of {size} for a prompt were distinct"
        elif size >= SAMPLES and alike is not None and alike < DISTINCT:
            seen = f"are nearly all alike: {alike:.1f} of {size} for a prompt were distinct (`proposal/distinct`)"
        else:
            return
        self._warned = True
        weaker = "" if self._term.args.potential == "indicator" else ", bring `target_dist_beta` nearer to 0"
        logger.warning(
            f"The proposal has collapsed. Over the last {UPDATES} updates its samples {seen}. `proposal/ess` does not show this. "
            f"Lower `proposal_learning_rate`{weaker}, or go back to an earlier checkpoint."
        )
