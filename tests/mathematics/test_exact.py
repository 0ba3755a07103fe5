"""Gradients against finite differences on a tabular language model whose every sequence is enumerated.

Axis letters: P prompts, S sequences (all V^T strings, cut after the first end token), T tokens, V vocabulary.

The proposal draws each token with probability 1/4 or 2/4, so a finite *population* of 4^T strings per prompt has exactly its distribution:
taken as the N samples, self-normalised weights are exact, and an estimator must give its expectation.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from trl_repulse import ReinforceTrainer
from trl_repulse.engine.scoring import SetScores
from trl_repulse.engine.units import OWN, CompletionSet, Units
from trl_repulse.math.importance import (
    distinct_share,
    log_importance_weights,
    log_mixture_weights,
    log_z_estimate,
    normalize_weights,
)
from trl_repulse.math.objective import policy_gradient_loss, prefix_values, tilted_log_potential
from trl_repulse.math.proposal_losses import dpg_loss, sixo_loss, sixo_negative_weights

from ..whole_losses import ctl_loss, negative_loss, reinforce_loss


pytestmark = pytest.mark.exact

P, V, T = 2, 3, 3
END = 0
BETA, ALPHA = -1.3, 0.7
TOLERANCE = 1e-5
QUARTERS = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64) / 4
CONTEXTS = sum(V**t for t in range(T))


def enumerate_strings():
    """All V^T strings (S, T), the index of each prefix in a table of contexts (S, T), and masks cut after END."""
    tokens = torch.tensor(list(itertools.product(range(V), repeat=T)))
    contexts = torch.zeros_like(tokens)
    for t in range(1, T):
        place = sum(tokens[:, u] * V ** (t - 1 - u) for u in range(t))
        contexts[:, t] = sum(V**u for u in range(t)) + place
    ended = (tokens == END).cumsum(-1) - (tokens == END).long()
    return tokens, contexts, (ended == 0).double()


TOKENS, CONTEXT_OF, ENDING_MASK = enumerate_strings()


class World:
    """A policy, a proposal to draw from, a proposal to train, rewards, and the population the proposal draws."""

    def __init__(self, ending):
        generator = torch.Generator().manual_seed(0)

        def table():
            return torch.randn(P, CONTEXTS, V, generator=generator, dtype=torch.float64)

        self.policy, self.proposal = table(), table()
        order = torch.rand(P, CONTEXTS, V, generator=generator, dtype=torch.float64).argsort(-1)
        self.drawn_from = QUARTERS.log()[order]  # (P, contexts, V), normalised
        self.mask = (ENDING_MASK if ending else torch.ones(V**T, T).double()).expand(P, -1, -1)
        self.reward = 2 * torch.randn(P, V**T, generator=generator, dtype=torch.float64)
        if ending:  # strings that are equal once cut must have one reward
            cut = [tuple(row[keep].tolist()) for row, keep in zip(TOKENS, ENDING_MASK.bool(), strict=True)]
            self.reward = self.reward[:, [cut.index(c) for c in cut]]
        counts = (self.raw_log_prob(self.drawn_from).sum(-1).exp() * 4**T).round().long()  # (P, S)
        assert (counts.sum(-1) == 4**T).all()
        self.rows = torch.stack([torch.arange(V**T).repeat_interleave(row) for row in counts])  # (P, N)

    def raw_log_prob(self, table):
        """(P, S, T) from logits (P, contexts, V), not cut."""
        return table.log_softmax(-1)[:, CONTEXT_OF, TOKENS]

    def draw(self, values):
        """From all strings (P, S, ...) to the population (P, N, ...)."""
        return torch.stack([row[index] for row, index in zip(values, self.rows, strict=True)])

    def sample(self, table):
        return self.draw(self.raw_log_prob(table))

    def string_prob(self, table):
        """Probability of each string (P, S) under the cut model, counted once: later copies of a cut string get 0."""
        prob = (self.raw_log_prob(table) * self.mask).sum(-1).exp()
        rows = TOKENS.masked_fill(self.mask[0] == 0, -1).tolist()
        first = torch.tensor([rows.index(row) == n for n, row in enumerate(rows)]).double()
        return prob * first

    def log_w(self, beta=BETA, with_q=True):
        log_q = self.sample(self.drawn_from)
        potential = tilted_log_potential(self.draw(self.reward), beta)
        return log_importance_weights(
            self.sample(self.policy), log_q if with_q else torch.zeros_like(log_q), potential, self.draw(self.mask)
        )

    def target(self):
        sigma = self.string_prob(self.policy) * (BETA * self.reward).exp()
        return sigma / sigma.sum(-1, keepdim=True)


@pytest.fixture(params=[False, True], ids=["fixed_length", "ending"])
def world(request):
    return World(request.param)


def gradient(loss_of, table):
    table = table.clone().requires_grad_()
    return torch.autograd.grad(loss_of(table), table)[0]


def finite_differences(objective, table, step=1e-5):
    result = torch.zeros_like(table)
    for index in itertools.product(*map(range, table.shape)):
        up, down = table.clone(), table.clone()
        up[index] += step
        down[index] -= step
        result[index] = (objective(up) - objective(down)) / (2 * step)
    return result


def relative_error(actual, expected):
    assert expected.norm() > 1e-3
    return ((actual - expected).norm() / expected.norm()).item()


def eq4_objective(world):
    """-E_p[r] + α·log E_p[φ], mean over prompts; the target moves with the policy."""

    def objective(table):
        prob = world.string_prob(table)
        log_z = (prob * (BETA * world.reward).exp()).sum(-1).log()
        return (-(prob * world.reward).sum(-1) + ALPHA * log_z).mean()

    return objective


def eq4_gradient(world, normalized_w):
    """Expected gradient: REINFORCE with each string weighing p, and the negative term on the population."""
    prob = world.string_prob(world.policy)

    def loss(table):
        log_p = world.raw_log_prob(table)
        reinforce = policy_gradient_loss(log_p, world.mask, prob * world.reward, "sum", denominator=P)
        negative = negative_loss(world.sample(table), world.draw(world.mask), normalized_w, "none", "sum")
        return reinforce + ALPHA * negative

    return gradient(loss, world.policy)


def test_population_gives_exact_weights(world):
    log_w = world.log_w()
    z = (world.string_prob(world.policy) * (BETA * world.reward).exp()).sum(-1)
    torch.testing.assert_close(log_z_estimate(log_w), z.log(), rtol=1e-10, atol=1e-10)
    by_string = torch.zeros(P, V**T, dtype=torch.float64)
    by_string.scatter_add_(1, world.rows, normalize_weights(log_w))
    cut = TOKENS.masked_fill(world.mask[0] == 0, -1).tolist()
    merged = torch.zeros_like(by_string)
    merged.scatter_add_(1, torch.tensor([cut.index(row) for row in cut]).expand(P, -1), by_string)
    torch.testing.assert_close(merged, world.target(), rtol=1e-10, atol=1e-12)


def test_eq4_gradient(world):
    expected = finite_differences(eq4_objective(world), world.policy)
    assert relative_error(eq4_gradient(world, normalize_weights(world.log_w())), expected) <= TOLERANCE


def _wrong_sign(world):
    return normalize_weights(world.log_w(beta=-BETA))


def _no_log_q(world):
    return normalize_weights(world.log_w(with_q=False))


def _across_prompts(world):
    log_w = world.log_w()
    return normalize_weights(log_w.reshape(1, -1)).reshape_as(log_w) * P


@pytest.mark.parametrize("wrong", [_wrong_sign, _no_log_q, _across_prompts])
def test_eq4_gradient_notices(world, wrong):
    expected = finite_differences(eq4_objective(world), world.policy)
    assert relative_error(eq4_gradient(world, wrong(world)), expected) > 1e-2


def test_leave_one_out_is_unbiased():
    # Every ordered triple of strings is one prompt with N = 3; its probability weighs its gradient.
    world = World(ending=True)
    prob = world.string_prob(world.policy)[0]
    kept = prob.nonzero().squeeze(-1)
    triples = torch.cartesian_prod(kept, kept, kept)  # (triples, 3)
    triple_prob = prob[triples].prod(-1)
    table = world.policy[:1].clone().requires_grad_()
    log_p = world.raw_log_prob(table)[0][triples]  # (triples, 3, T)
    mask, reward = world.mask[0][triples], world.reward[0][triples]

    rows = zip(log_p[:, None], mask[:, None], reward[:, None], strict=True)
    losses = torch.stack([reinforce_loss(*row, reduction="sum") for row in rows])
    actual = torch.autograd.grad((triple_prob * losses).sum(), table)[0]

    def objective(table):
        full = torch.cat([table, world.policy[1:]])
        return -(world.string_prob(full)[0] * world.reward[0]).sum()

    assert relative_error(actual, finite_differences(objective, world.policy[:1])) <= TOLERANCE


CONTROLS = [
    pytest.param(*each, marks=pytest.mark.xfail(strict=True)) for each in (("own reward", 1.0), ("prefix", 0.5))
]


@pytest.mark.parametrize(("seen", "gae_lambda"), [("prefix", 1.0), *CONTROLS])
@pytest.mark.parametrize("steps", [1, 2])
def test_token_advantages_are_unbiased(seen, gae_lambda, steps):
    """Of the reward less a KL penalty; not if values see the completion's own reward or λ is below 1, the controls."""
    world, beta = World(ending=True), 0.7
    prob = world.string_prob(world.policy)[0]
    kept = prob.nonzero().squeeze(-1)
    triples = torch.cartesian_prod(kept, kept, kept)  # each is a batch of one prompt, N = 3
    table, reference = world.policy[:1].clone().requires_grad_(), world.raw_log_prob(world.proposal)[0]
    log_p, mask, reward = world.raw_log_prob(table)[0][triples], world.mask[0][triples], world.reward[0][triples]
    prefixes = (TOKENS[triples] * mask).cumsum(-1)[..., :-1][..., steps - 1 :: steps]
    prefixes = torch.cat([0 * prefixes[..., :1], prefixes], dim=-1)
    prefixes = prefixes + reward.unsqueeze(-1) if seen == "own reward" else prefixes
    values = torch.stack([prefix_values(*each) for each in zip(reward, prefixes, strict=True)])
    values = values.repeat_interleave(steps, dim=-1)[..., :T]
    own = CompletionSet(TOKENS[triples], mask, reward, ref_log_p=reference[triples], values=values)
    settings = SimpleNamespace(prefix_reward_steps=steps, gae_lambda=gae_lambda)
    trainer = SimpleNamespace(args=settings, beta=beta, accelerator=None, _transform=lambda rewards: rewards)
    scores = SetScores(log_p={OWN: log_p})
    advantages, _ = ReinforceTrainer._token_advantages(trainer, Units(None, None, own), scores, 3)
    weighed = advantages * prob[triples].prod(-1)[:, None, None]
    actual = torch.autograd.grad(policy_gradient_loss(log_p, mask, weighed, "sum", denominator=3), table)[0]

    def objective(table):
        prob = world.string_prob(torch.cat([table, world.policy[1:]]))[0]
        kl = ((world.raw_log_prob(table)[0] - reference) * world.mask[0]).sum(-1)
        return -(prob * (world.reward[0] - beta * kl)).sum()

    assert relative_error(actual, finite_differences(objective, world.policy[:1])) <= TOLERANCE


def test_the_only_completion_with_a_reward_pays_its_kl_penalty():
    own = CompletionSet(torch.ones(1, 2, 2), torch.ones(1, 2, 2), torch.tensor([[3.0, torch.nan]]))
    own.ref_log_p, own.values = -torch.ones(1, 2, 2), torch.full((1, 2, 2), 3.0)
    trainer = SimpleNamespace(beta=0.5, accelerator=None, _transform=lambda rewards: rewards)
    trainer.args = SimpleNamespace(prefix_reward_steps=1, gae_lambda=1.0)
    scores = SetScores(log_p={OWN: torch.zeros(1, 2, 2)})
    advantages, _ = ReinforceTrainer._token_advantages(trainer, Units(None, None, own), scores, 2)
    assert advantages.tolist() == [[[-1.0, -0.5], [0.0, 0.0]]]


@pytest.mark.parametrize("copies", [2, 5])
def test_alpha_normalization_and_number_of_samples(world, copies):
    log_w = world.log_w()

    def term(normalization, copies):
        def loss(table):
            log_p, mask = (x.repeat(1, copies, 1) for x in (world.sample(table), world.draw(world.mask)))
            return negative_loss(log_p, mask, normalize_weights(log_w.repeat(1, copies)), normalization)

        return gradient(loss, world.policy)

    torch.testing.assert_close(term("none", copies), term("none", 1), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(copies * term("samples", copies), term("samples", 1), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(term("samples", 1) * log_w.shape[1], term("none", 1), rtol=1e-10, atol=1e-14)


def kl_to_target(world):
    sigma = world.target()

    def objective(table):
        log_q = (world.raw_log_prob(table) * world.mask).sum(-1)
        return (sigma * (sigma.clamp(min=1e-300).log() - log_q)).sum(-1).mean()

    return objective


def ctl_gradient(world, normalized_w, second_term=True, log_q=None, parameterization="token"):
    log_q = world.sample(world.drawn_from) if log_q is None else log_q

    def loss(table):
        inputs = world.sample(table), log_q, world.sample(world.policy), normalized_w, world.draw(world.mask)
        samples = inputs[0].shape[1]
        return samples * ctl_loss(*inputs, second_term, parameterization=parameterization, reduction="sum")

    return gradient(loss, world.proposal)


@pytest.mark.parametrize("second_term", [True, False])
def test_ctl_gradient_is_that_of_the_kl(world, second_term):
    expected = finite_differences(kl_to_target(world), world.proposal)
    actual = ctl_gradient(world, normalize_weights(world.log_w()), second_term)
    assert relative_error(actual, expected) <= TOLERANCE


@pytest.mark.parametrize("wrong", [_wrong_sign, _no_log_q, _across_prompts])
def test_ctl_gradient_notices(world, wrong):
    expected = finite_differences(kl_to_target(world), world.proposal)
    assert relative_error(ctl_gradient(world, wrong(world)), expected) > 1e-2


def test_ctl_second_term_needs_log_q(world):
    expected = finite_differences(kl_to_target(world), world.proposal)
    without_q = torch.zeros_like(world.sample(world.drawn_from))
    assert relative_error(ctl_gradient(world, normalize_weights(world.log_w()), log_q=without_q), expected) > 1e-2


@pytest.mark.parametrize("ending", [False, True])
def test_prefix_ctl_gradient_is_that_of_all_prefix_kls_for_equal_lengths(ending):
    world = World(ending)
    sigma = world.target()

    def objective(table):
        log_q = (world.raw_log_prob(table) * world.mask).cumsum(-1) * world.mask  # (P, S, T)
        return -(sigma.unsqueeze(-1) * log_q).sum((-1, -2)).mean()

    expected = finite_differences(objective, world.proposal)
    error = relative_error(ctl_gradient(world, normalize_weights(world.log_w()), parameterization="prefix"), expected)
    # As in the docstring of ctl_coefficients, the gradient is another one with unequal lengths
    assert error > 1e-2 if ending else error <= TOLERANCE


def dpg_gradient(world, normalized_w):
    context, tokens = world.draw(CONTEXT_OF.expand(P, -1, -1)), world.draw(TOKENS.expand(P, -1, -1))
    prompt = torch.arange(P)[:, None, None]

    def loss(table):
        log_q_all = table.log_softmax(-1)[prompt, context]  # (P, N, T, V)
        log_p_all = world.policy.log_softmax(-1)[prompt, context]
        loss = dpg_loss(log_q_all, log_p_all, tokens, normalized_w, world.draw(world.mask), reduction="sum")
        return normalized_w.shape[1] * loss

    return gradient(loss, world.proposal)


def test_dpg_gradient_is_that_of_the_kl(world):
    expected = finite_differences(kl_to_target(world), world.proposal)
    assert relative_error(dpg_gradient(world, normalize_weights(world.log_w())), expected) <= TOLERANCE


def test_sixo_gradient_is_that_of_the_classifier(world):
    w, log_q, log_p = normalize_weights(world.log_w()), world.sample(world.drawn_from), world.sample(world.policy)
    mask = world.draw(world.mask)
    negative_w = sixo_negative_weights(log_q, log_p, w, mask)

    def loss(table):
        return w.shape[1] * sixo_loss(world.sample(table), log_p, w, negative_w, mask, reduction="sum")

    def objective(table):
        logit = world.raw_log_prob(table) - world.raw_log_prob(world.policy)
        log_sigmoid = torch.nn.functional.logsigmoid
        positive = world.target().unsqueeze(-1) * log_sigmoid(logit)
        negative = world.string_prob(world.policy).unsqueeze(-1) * log_sigmoid(-logit)
        return -((positive + negative) * world.mask).sum((-1, -2)).mean()

    expected = finite_differences(objective, world.proposal)
    assert relative_error(gradient(loss, world.proposal), expected) <= TOLERANCE


@pytest.mark.parametrize("parameterization", ["token", "prefix"])
def test_identical_samples_do_not_move_ctl_but_dpg(world, parameterization):
    world.rows = world.rows[:, :1].expand(-1, 4)
    w = normalize_weights(world.log_w())
    assert torch.equal(ctl_gradient(world, w, parameterization=parameterization), torch.zeros_like(world.proposal))
    assert dpg_gradient(world, w).norm() > 0.1
    assert ctl_gradient(world, w, second_term=False).norm() > 0.1


# Where an environment writes


class ActingWorld(World):
    """
    Of a trajectory's three tokens the model writes the first and the last, and a random environment the second, whatever came before it:
    `drawn_from` gives its probabilities. Both models have an opinion of the environment's token as well, which is wrong and must not count.
    """

    def __init__(self):
        super().__init__(ending=False)
        self.environment = self.raw_log_prob(self.drawn_from)[..., 1]  # (P, S), nats
        self.everything, self.mask = self.mask, self.mask.clone()
        self.mask[..., 1] = 0
        self.opinion = torch.randn(P, V**T, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def string_prob(self, table):
        return ((self.raw_log_prob(table) * self.mask).sum(-1) + self.environment).exp()

    def log_weights(self, mask):
        """As a trainer has them: of a model's log-probabilities at all tokens, those under the mask."""
        log_q = self.sample(self.drawn_from) + self.draw(self.opinion * (1 - self.mask))  # not the environment's
        potential = tilted_log_potential(self.draw(self.reward), BETA)
        return log_importance_weights(self.sample(self.policy), log_q, potential, self.draw(mask))


@pytest.fixture
def acting():
    return ActingWorld()


def by_trajectory(acting, weights):
    merged = torch.zeros(P, V**T, dtype=torch.float64)
    return merged.scatter_add_(1, acting.rows, weights)


def test_the_environments_factors_cancel(acting):
    """p/q over the model's tokens alone weighs every trajectory as the target does, environment and all."""
    weights = by_trajectory(acting, normalize_weights(acting.log_weights(acting.mask)))
    torch.testing.assert_close(weights, acting.target(), rtol=1e-10, atol=1e-12)
    function = torch.randn(V**T, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(weights @ function, acting.target() @ function, rtol=1e-10, atol=1e-12)


def test_counting_the_environments_tokens_would_be_noticed(acting):
    weights = by_trajectory(acting, normalize_weights(acting.log_weights(acting.everything)))
    assert (weights - acting.target()).abs().max() > 0.02


def test_eq4_gradient_of_trajectories(acting):
    expected = finite_differences(eq4_objective(acting), acting.policy)
    w = normalize_weights(acting.log_weights(acting.mask))
    assert relative_error(eq4_gradient(acting, w), expected) <= TOLERANCE
    assert (
        relative_error(eq4_gradient(acting, normalize_weights(acting.log_weights(acting.everything))), expected) > 1e-2
    )


def test_ctl_gradient_of_trajectories_is_that_of_the_kl(acting):
    expected = finite_differences(kl_to_target(acting), acting.proposal)
    w = normalize_weights(acting.log_weights(acting.mask))
    assert relative_error(ctl_gradient(acting, w), expected) <= TOLERANCE
    acting.mask = acting.everything
    assert relative_error(ctl_gradient(acting, w), expected) > 1e-2


def test_mixture_weights_estimate_the_probability_without_bias(acting):
    """The hot policy's: over 4^3 trajectories of a policy and 4^3 of another sampler, their mean is P(bad)."""
    order = torch.rand(V, generator=torch.Generator().manual_seed(3)).argsort()
    policy, environment = acting.drawn_from[..., order].clone(), acting.environment
    first = slice(1, 1 + V)  # contexts of the second token
    policy[:, first] = acting.drawn_from[:, first]
    prob = (acting.raw_log_prob(policy) * acting.mask).sum(-1) + environment
    counts = (prob.exp() * 4**T).round().long()
    own = torch.stack([torch.arange(V**T).repeat_interleave(row) for row in counts])  # (P, N)
    rows = torch.cat([own, acting.rows], dim=1)

    def scores(table, mask):
        log_p = acting.raw_log_prob(table).clone()
        log_p[..., 1] = acting.opinion[..., 0 if table is policy else 1]
        return (log_p * mask).sum(-1).gather(1, rows)

    log_potential = torch.where(acting.reward < -1, 0.0, -torch.inf)
    expected = (prob.exp() * (acting.reward < -1)).sum(-1)
    estimates = [
        log_mixture_weights(
            scores(policy, mask), scores(acting.drawn_from, mask), log_potential.gather(1, rows), 4**T, 4**T
        )
        .exp()
        .mean(-1)
        for mask in (acting.mask, acting.everything)
    ]
    assert (expected > 0.01).all()
    torch.testing.assert_close(estimates[0], expected, rtol=1e-10, atol=1e-12)
    assert (estimates[1] - expected).abs().max() > 1e-3


def test_trajectories_are_distinct_by_what_the_model_wrote():
    """However long the environment's answers are."""
    ids = torch.tensor([[[5, 7, 8, 6], [5, 9, 6, 0], [5, 7, 6, 6], [5, 6, 0, 0]]])
    mask = torch.tensor([[[1, 0, 0, 1], [1, 0, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]]])
    assert distinct_share(ids, mask).item() == 0.5  # (5, 6) thrice, (5, 6, 6)
    assert distinct_share(TOKENS[None], torch.ones_like(TOKENS[None])).item() == 1.0
