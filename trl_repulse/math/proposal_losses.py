"""Losses that teach the proposal q to follow the target σ(s) ∝ p(s) φ(s).

Axis letters: P prompts, N completions per prompt, T completion tokens, V vocabulary. Log-probabilities are in nats. A mask is
0 at the positions that do not count.

All but VarGrad are written in the twist log ψ = log q − log p, with p detached (the proposal-centric parameterisation of
[RePULSe](https://huggingface.co/papers/2510.21184), Eq. 7): per token, or of the whole prefix. Functions that need whole groups
of N return detached coefficients or weights. Losses take these, also for split groups of shape (B, 1, T) with the whole batch's
denominator. A prompt whose weights are all 0 has no gradient.
"""

from typing import Literal

import torch

from .importance import Reduction, normalize_weights, reduce_log_probs, require_shape, sequence_log_prob, zero_masked


Parameterization = Literal["token", "prefix"]


def _log_twist(
    log_q_now: torch.Tensor, log_p: torch.Tensor, mask: torch.Tensor, parameterization: Parameterization
) -> torch.Tensor:
    """log ψ_t of shape (P, N, T), nats, 0 where masked; gradient flows to `log_q_now` alone."""
    require_shape("log_p", log_p, tuple(log_q_now.shape))
    log_psi = zero_masked(log_q_now, mask) - zero_masked(log_p.detach(), mask)
    if parameterization == "token":
        return log_psi
    if parameterization == "prefix":
        return zero_masked(log_psi.cumsum(dim=-1), mask)
    raise ValueError(f"`parameterization` must be 'token' or 'prefix', got {parameterization!r}.")


def _mean_over_samples(
    values: torch.Tensor, mask: torch.Tensor, reduction: Reduction, denominator: float | torch.Tensor | None
) -> torch.Tensor:
    """Sum over samples of values (P, N, T), reduced over the tokens of each, divided by `denominator`, by default P·N."""
    per_sample = reduce_log_probs(values, mask, reduction)  # (P, N)
    return per_sample.sum() / (per_sample.numel() if denominator is None else denominator)


def ctl_coefficients(
    log_q_now: torch.Tensor,
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    normalized_w: torch.Tensor,
    mask: torch.Tensor,
    second_term: bool = True,
    parameterization: Parameterization = "token",
    scored: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Coefficients w − w⁻_t of contrastive twist learning (CTL, Eq. 6), from whole groups.

    w⁻_t is the softmax over the prompt's N samples of Σ_{u≤t} log p + log ψ_t − Σ_{u≤t} log q, log ψ being 0 after a
    sample's end:

    - `"token"`, log ψ_t = log q_now(s_t|s_<t) − log p(s_t|s_<t). The exponent is Σ_{u<t} (log p − log q) + log q_now,t
      − log q_t up to a sample's end, and the whole Σ (log p − log q) after it.
    - `"prefix"`, log ψ_t = Σ_{u≤t} of the same. The exponent is Σ_{u≤t} (log q_now − log q) up to a sample's end and
      the whole Σ (log p − log q) after it, as in the research code. With completions of different lengths the gradient
      is then not that of a KL.

    Args:
        log_q_now, log_q, log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) under the proposal now, under the proposal that drew the completions, and under the policy,
            and mask, all of shape (P, N, T). At the first update after sampling `log_q_now` is `log_q`.
        normalized_w (`torch.Tensor`):
            Weights w of the completions, of shape (P, N), which sum to 1 (or 0) within each prompt.
        second_term (`bool`, *optional*, defaults to `True`):
            Whether w⁻_t is subtracted. Without it the coefficients are w.
        parameterization (`str`, *optional*, defaults to `"token"`):
            `"token"` or `"prefix"`.
        scored (`torch.Tensor`, *optional*):
            Of shape (P, N), bool: which samples have a reward, by default all. The others are in no w⁻.

    Returns:
        `torch.Tensor`: Coefficients of shape (P, N, T), detached; 0 where masked, for samples without a reward, and in prompts
        whose weights are all 0.

    Raises:
        `ValueError`: If N is 1 with the second term (w and w⁻ would cancel), shapes do not fit together, or a
            log-probability that counts is NaN.
    """
    require_shape("log_q", log_q, tuple(log_q_now.shape))
    require_shape("log_p", log_p, tuple(log_q_now.shape))
    require_shape("normalized_w", normalized_w, tuple(log_q_now.shape[:-1]))
    if parameterization not in ("token", "prefix"):
        raise ValueError(f"`parameterization` must be 'token' or 'prefix', got {parameterization!r}.")
    counts = mask != 0
    now, then, p = (zero_masked(x, mask).detach() for x in (log_q_now, log_q, log_p))
    w = normalized_w.detach().unsqueeze(-1).to(now.dtype)  # (P, N, 1)
    if not second_term:
        return w * counts
    prompts, samples, tokens = now.shape
    if samples < 2:
        raise ValueError("CTL's second term needs N >= 2 completions per prompt: draw more, or drop the second term.")
    drift = (p - then).cumsum(dim=-1)  # Σ_{u≤t} (log p − log q)
    if parameterization == "token":
        drift_before = torch.cat([torch.zeros_like(drift[..., :1]), drift[..., :-1]], dim=-1)[..., :tokens]
        log_w_negative = drift_before + (now - then)
    else:
        log_w_negative = torch.where(counts, (now - then).cumsum(dim=-1), drift)
    if scored is not None:
        log_w_negative = log_w_negative.masked_fill(~scored.unsqueeze(-1), -torch.inf)
    by_position = log_w_negative.transpose(1, 2).reshape(prompts * tokens, samples)
    w_negative = normalize_weights(by_position).reshape(prompts, tokens, samples).transpose(1, 2)
    alive = (w > 0).any(dim=1, keepdim=True)  # (P, 1, 1)
    return torch.where(counts & alive, w - w_negative, 0.0)


def log_ratio_loss(
    log_q_now: torch.Tensor,
    log_p: torch.Tensor,
    coefficients: torch.Tensor,
    mask: torch.Tensor,
    parameterization: Parameterization = "token",
    reduction: Reduction = "mean",
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Loss of given token coefficients c: Σ over samples of the token mean of −c_t·log ψ_t, divided by a denominator.

    Args:
        log_q_now, log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) under proposal and policy, the latter detached here, and mask, all of shape (P, N, T).
        coefficients (`torch.Tensor`):
            From [`ctl_coefficients`], of shape (P, N, T); detached here. Where 0 they add exactly 0.
        parameterization (`str`, *optional*, defaults to `"token"`):
            `"token"` or `"prefix"`, as for the coefficients.
        reduction (`str`, *optional*, defaults to `"mean"`):
            `"mean"` or `"sum"` over a completion's tokens; the published losses have the mean.
        denominator (`float` or `torch.Tensor`, *optional*):
            P·N by default. To add up micro-batches, give the whole batch's.

    Returns:
        `torch.Tensor`: Scalar. Gradient flows to `log_q_now`.
    """
    require_shape("coefficients", coefficients, tuple(log_q_now.shape))
    c = coefficients.detach()
    log_psi = _log_twist(log_q_now, log_p, mask, parameterization)
    return _mean_over_samples(torch.where(c != 0, -c * log_psi, 0.0), mask, reduction, denominator)


def sixo_negative_weights(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    normalized_w: torch.Tensor,
    mask: torch.Tensor,
    scored: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Weights that turn proposal samples into approximate policy samples, softmax_N(Σ_t log p − Σ_t log q).

    Args:
        log_q, log_p, normalized_w, mask, scored:
            As for [`ctl_coefficients`]; whole groups, at sampling time.

    Returns:
        `torch.Tensor`: Weights of shape (P, N), detached; 0 for samples without a reward, and in prompts whose `normalized_w` are all 0.
    """
    require_shape("log_q", log_q, tuple(log_p.shape))
    require_shape("normalized_w", normalized_w, tuple(log_p.shape[:-1]))
    log_w = (sequence_log_prob(log_p, mask) - sequence_log_prob(log_q, mask)).detach()
    if scored is not None:
        log_w = log_w.masked_fill(~scored, -torch.inf)
    return normalize_weights(log_w) * (normalized_w > 0).any(dim=1, keepdim=True)


def sixo_loss(
    log_q_now: torch.Tensor,
    log_p: torch.Tensor,
    normalized_w: torch.Tensor,
    normalized_w_negative: torch.Tensor,
    mask: torch.Tensor,
    reduction: Reduction = "mean",
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """
    SIXO: classify samples of σ against (approximate) samples of p at each token, with the logit log ψ_t = log q_now − log p.

    The token mean of −w·log sigmoid(log ψ_t) − w⁰·log sigmoid(−log ψ_t).

    Args:
        log_q_now, log_p, mask, reduction, denominator:
            As for [`log_ratio_loss`].
        normalized_w (`torch.Tensor`):
            Weights w of shape (P, N), for σ; detached here.
        normalized_w_negative (`torch.Tensor`):
            Weights w⁰ of shape (P, N) from [`sixo_negative_weights`], for p; detached here.

    Returns:
        `torch.Tensor`: Scalar. Gradient flows to `log_q_now`.
    """
    require_shape("normalized_w", normalized_w, tuple(log_q_now.shape[:-1]))
    require_shape("normalized_w_negative", normalized_w_negative, tuple(log_q_now.shape[:-1]))
    log_psi = _log_twist(log_q_now, log_p, mask, "token")
    positive, negative = (w.detach().unsqueeze(-1) for w in (normalized_w, normalized_w_negative))
    log_sigmoid = torch.nn.functional.logsigmoid
    losses = -positive * log_sigmoid(log_psi) - negative * log_sigmoid(-log_psi)
    return _mean_over_samples(losses, mask, reduction, denominator)


def dpg_loss(
    log_q_all: torch.Tensor,
    log_p_all: torch.Tensor,
    tokens: torch.Tensor,
    normalized_w: torch.Tensor,
    mask: torch.Tensor,
    reduction: Reduction = "mean",
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Distributional policy gradient: the token mean of −w·(log ψ_t(s_t) − Σ_v q_now(v)·log ψ_t(v)), q_now detached.

    The gradient of the sum over the vocabulary is 0 if `log_q_all` is normalised, so that of the loss is the gradient of
    −w·log q: unlike with CTL, identical samples are reinforced.

    Args:
        log_q_all, log_p_all (`torch.Tensor`):
            Log-probabilities of the whole vocabulary under the proposal now and under the policy, of shape (P, N, T, V), in
            nats; the latter is detached here.
        tokens (`torch.Tensor`):
            Token ids of shape (P, N, T); any value where masked.
        normalized_w, mask, reduction, denominator:
            As for [`sixo_loss`].

    Returns:
        `torch.Tensor`: Scalar. Gradient flows to `log_q_all`.
    """
    require_shape("mask", mask, tuple(log_q_all.shape[:-1]))
    require_shape("log_p_all", log_p_all, (*mask.shape, log_q_all.shape[-1]))
    require_shape("tokens", tokens, tuple(mask.shape))
    require_shape("normalized_w", normalized_w, tuple(mask.shape[:-1]))
    masked = mask == 0
    log_q_all = log_q_all.masked_fill(masked.unsqueeze(-1), 0.0)
    log_psi = log_q_all - log_p_all.detach().masked_fill(masked.unsqueeze(-1), 0.0)  # (P, N, T, V)
    log_psi = log_psi.masked_fill(log_q_all == -torch.inf, 0.0)  # tokens that cannot be drawn weigh 0 in the sum
    expected = (log_q_all.detach().softmax(dim=-1) * log_psi).sum(dim=-1)
    taken = log_psi.gather(-1, tokens.masked_fill(masked, 0).unsqueeze(-1)).squeeze(-1)
    return _mean_over_samples(-normalized_w.detach().unsqueeze(-1) * (taken - expected), mask, reduction, denominator)


def vargrad_targets(
    log_q_now: torch.Tensor, log_p: torch.Tensor, log_potential: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """
    Log-probability of each sample under the target, Σ_t log p + log φ − log Z, from whole groups.

    The estimate of log Z is the mean of Σ_t log p + log φ − Σ_t log q over the *other* samples of the prompt.

    Args:
        log_q_now, log_p, mask (`torch.Tensor`):
            Log-probabilities (nats) under proposal and policy, and mask, all of shape (P, N, T).
        log_potential (`torch.Tensor`):
            log φ of each sample, of shape (P, N), in nats; finite, or NaN for a sample without a reward, which is in no
            other sample's estimate.

    Returns:
        `torch.Tensor`: Of shape (P, N), in nats, detached; NaN for samples without a reward, and for a prompt's only sample with one.

    Raises:
        `ValueError`: If N is 1, shapes do not fit together, or a potential is infinite: no proposal could follow it.
    """
    require_shape("log_p", log_p, tuple(log_q_now.shape))
    require_shape("log_potential", log_potential, tuple(log_p.shape[:-1]))
    if log_potential.shape[1] < 2:
        raise ValueError("VarGrad compares a prompt's samples and needs N >= 2 completions per prompt: draw more.")
    if bool(log_potential.isinf().any()):
        raise ValueError("A potential is infinite, and VarGrad needs its logarithm; give it a lowest value above 0.")
    log_weighted = (sequence_log_prob(log_p, mask) + log_potential).detach()  # (P, N), NaN without a reward
    log_w = log_weighted - sequence_log_prob(log_q_now, mask).detach()
    known = ~log_w.isnan()
    num_others = known.sum(dim=1, keepdim=True) - 1
    log_w = log_w.masked_fill(~known, 0.0)
    log_z = (log_w.sum(dim=1, keepdim=True) - log_w) / num_others.clamp(min=1)
    return torch.where(num_others > 0, log_weighted - log_z, torch.nan)


def vargrad_loss(
    log_q_now: torch.Tensor,
    log_target: torch.Tensor,
    mask: torch.Tensor,
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Trajectory balance in its variance form: ½·(Σ_t log q − log σ)² of each sample, with log σ from [`vargrad_targets`].

    [VarGrad](https://huggingface.co/papers/2010.10436), the log-variance loss. Over a prompt's samples, from whatever
    distribution, its gradient is that of half the unbiased variance of Σ_t log q − Σ_t log p − log φ, which is 0 only for q = σ;
    the value is N / (N − 1) times that. For samples of q it is on average the gradient of KL(q ‖ σ), where CTL's is that of
    KL(σ ‖ q): q more easily misses outputs of σ. There are no importance weights. Identical samples have no gradient.

    Unlike the other losses it has the *sum* over tokens, since that is the log-probability of a completion.

    Args:
        log_q_now, mask (`torch.Tensor`):
            Log-probabilities under the proposal (nats) and mask, both of shape (P, N, T).
        log_target (`torch.Tensor`):
            From [`vargrad_targets`], of shape (P, N), in nats; detached here. NaN adds exactly 0.
        denominator (`float` or `torch.Tensor`, *optional*):
            P·N by default. To add up micro-batches, give the whole batch's.

    Returns:
        `torch.Tensor`: Scalar, in nats². Gradient flows to `log_q_now`.
    """
    require_shape("log_target", log_target, tuple(log_q_now.shape[:-1]))
    left_out = log_target.isnan()
    residual = sequence_log_prob(log_q_now, mask) - log_target.detach().masked_fill(left_out, 0.0)
    total = 0.5 * residual.masked_fill(left_out, 0.0).square().sum()
    return total / (left_out.numel() if denominator is None else denominator)
