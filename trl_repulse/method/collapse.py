"""Signs that a proposal no longer draws the policy's low-reward outputs.

Axis letters: U units of n policy samples and m proposal samples, P prompts, N policy samples and K proposal samples of a
prompt, T completion tokens.
"""

from collections import deque

import torch
from accelerate.logging import get_logger

from ..engine.diagnosis import DISTINCT, LOG_Z_GAP, SAMPLES, UPDATES
from ..engine.metrics import Moments, mean
from ..math.importance import distinct_share, log_z_estimate, rank_among, sequence_log_prob
from .negative_term import NEGATIVE, OWN, NegativeTerm


logger = get_logger(__name__)


class CollapseWatch:
    """
    Logs how a proposal's samples compare with the policy's, and warns once if a learned proposal's are the worse ones.

    The effective sample size does not show a collapse: if all samples of a prompt are the same, or equally improbable under the
    policy, their weights are equal. But the policy's own samples bound log Z from below too, and a proposal whose samples put it
    lower finds less of the target than no proposal.

    Args:
        part ([`NegativeTerm`]):
            The negative term that draws the samples.
    """

    def __init__(self, part: NegativeTerm):
        self._part = part
        self._gaps: deque[float] = deque(maxlen=UPDATES)
        self._distinct: deque[float] = deque(maxlen=UPDATES)
        self._of_update: list[tuple[float | None, float]] = []  # gap and distinct samples of each of its micro-batches
        self._warned = False

    def look(
        self,
        batch: dict[str, torch.Tensor],
        own_log_p: torch.Tensor,
        log_p: torch.Tensor,
        counted: torch.Tensor | None = None,
    ) -> Moments:
        """
        Logs `distinct` and `log_p_rank`, and returns the moments of the first. A collective call.

        Args:
            batch (`dict[str, torch.Tensor]`):
                Units with `proposal_rewards` of shape `(U, m)`, `proposal_completion_ids` of shape `(U, m, T)`, and the masks of both
                sets of samples.
            own_log_p (`torch.Tensor` of shape `(U, n, T)`), log_p (`torch.Tensor` of shape `(U, m, T)`):
                Log-probabilities (nats) under the policy of its own samples and of the others.
            counted (`torch.Tensor` of shape `(U, m)`, *optional*):
                Which of the others have their rank logged, by default all.
        """
        scorer, size = self._part.scorer, self._part.size
        mask = scorer.by_prompt(batch[f"{NEGATIVE}_mask"], size)
        scored = ~scorer.by_prompt(batch["proposal_rewards"], size).isnan()
        known = scored.any(dim=1)  # other prompts may only fill up a batch
        shares = distinct_share(scorer.by_prompt(batch[f"{NEGATIVE}_ids"], size), mask)
        distinct = scorer.log_statistics({"proposal/distinct": mean}, shares[known])
        own = scorer.by_prompt(sequence_log_prob(own_log_p, batch[f"{OWN}_mask"]), scorer.num_generations)
        counted = None if counted is None else scorer.by_prompt(counted, size)
        rank = rank_among(sequence_log_prob(scorer.by_prompt(log_p, size), mask), own, counted)
        scorer.log("proposal/log_p_rank", rank[known])
        return distinct

    def compare(self, batch: dict[str, torch.Tensor], log_w: torch.Tensor, distinct: Moments) -> None:
        """
        Logs `log_z_gap`, and warns once if it stays large, or samples stay alike. A collective call.

        `log_w` (P, K) are the log-weights of the proposal's samples, −inf for those without a reward; `distinct` is what [`look`] returned.
        """
        scorer, size = self._part.scorer, self._part.size
        scored = ~scorer.by_prompt(batch["proposal_rewards"], size).isnan()  # (P, K)
        log_potential = self._part.log_potential(batch["rewards"])
        log_potential = scorer.by_prompt(log_potential, scorer.num_generations)  # (P, N)
        bound = torch.where(log_potential.isnan(), -torch.inf, log_potential)
        gaps = log_z_estimate(bound, ~log_potential.isnan()) - log_z_estimate(log_w, scored)  # (P,)
        gap = scorer.log_statistics({"proposal/log_z_gap": mean}, torch.where(gaps.isinf(), torch.nan, gaps))
        if self._part.mode != "train" or not distinct.count:
            return
        self._of_update.append((gap.mean if gap.count else None, distinct.mean * size))
        if not self._part.trainer.accelerator.sync_gradients:
            return
        known = [each for each, _ in self._of_update if each is not None]  # with an indicator many batches have none
        latest = sum(each for _, each in self._of_update) / len(self._of_update)
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
        weaker = "" if self._part.trainer.args.potential == "indicator" else ", bring `target_dist_beta` nearer to 0"
        logger.warning(
            f"The proposal has collapsed. Over the last {UPDATES} updates its samples {seen}. `proposal/ess` does not show this. "
            f"Lower `proposal_learning_rate`{weaker}, or go back to an earlier checkpoint."
        )
