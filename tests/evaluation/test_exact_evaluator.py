import itertools
import math

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl.trainer.utils import add_fused_lm_head

from examples.worlds.exact import ExactEvaluator


pytestmark = pytest.mark.exact

PROMPTS = ["ab", "c", "dda"]  # three lengths
BAD = [4, 5]


def make_tokenizer():
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "a", "b", "c", "d", "<unk>"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_config(vocab_size=7, **kwargs):
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2Config(vocab_size=vocab_size, **sizes, **special, **kwargs)


def make_policy(seed, **kwargs):
    torch.manual_seed(seed)
    return GPT2LMHeadModel(make_config(**kwargs)).eval()


def letter_reward(texts):
    """Depends on the prompt and on the order of the letters."""
    return torch.tensor([sum((i + 1) * (ord(letter) - 98.5) for i, letter in enumerate(text)) for text in texts])


def make_evaluator(length=2, **kwargs):
    return ExactEvaluator(make_tokenizer(), PROMPTS, letter_reward, BAD, length, **kwargs)


def naive_completions(length, ends=(1,)):
    """Every completion, from the definition: nothing follows an eos."""
    return [
        sequence
        for size in range(1, length + 1)
        for sequence in itertools.product(range(7), repeat=size)
        if not {*ends} & {*sequence[:-1]} and (size == length or sequence[-1] in ends)
    ]


@torch.no_grad()
def naive_log_probs(model, prompt, completions):
    """Of each completion, from a pass without padding or a cache over those of its length."""
    prompt_ids, found = make_tokenizer()(prompt)["input_ids"], {}
    for size in {*map(len, completions)}:
        rows = [row for row in completions if len(row) == size]
        logits = model(torch.tensor([[*prompt_ids, *row] for row in rows])).logits[:, len(prompt_ids) - 1 : -1]
        log_p = logits.double().log_softmax(dim=-1).gather(2, torch.tensor(rows).unsqueeze(2))
        found |= zip(rows, log_p.sum(dim=(1, 2)).tolist(), strict=True)
    return [found[row] for row in completions]


class TestEnumeration:
    @pytest.mark.parametrize("length", [1, 2, 3])
    @pytest.mark.parametrize("options", [{"batch_size": 5}, {}, {"eos_token_ids": [3, 1]}], ids=str)
    def test_log_probs_equal_naive_scoring_and_sum_to_one(self, length, options):
        evaluator, policy = make_evaluator(length, **options), make_policy(0)
        rows = [tuple(token for token in row if token >= 0) for row in evaluator.completion_ids.tolist()]
        assert sorted(rows) == sorted(naive_completions(length, options.get("eos_token_ids", [1])))
        log_probs = evaluator.log_probs(policy)
        assert log_probs.dtype == torch.float64
        torch.testing.assert_close(log_probs.exp().sum(dim=1), torch.ones(3).double(), atol=1e-6, rtol=0)
        for found, prompt in zip(log_probs.tolist(), PROMPTS, strict=True):
            assert found == pytest.approx(naive_log_probs(policy, prompt, rows), abs=1e-4)

    def test_rewards_are_of_text_without_special_tokens(self):
        evaluator = make_evaluator(2)
        for column, completion in enumerate(evaluator.completion_ids.tolist()):
            text = "".join(" abcd "[token - 1] for token in completion if 2 <= token <= 5)
            expected = letter_reward([prompt + text for prompt in PROMPTS])
            torch.testing.assert_close(evaluator.rewards[:, column], expected.double())

    def test_reward_model_is_scored_as_in_trl(self):
        tokenizer = make_tokenizer()
        torch.manual_seed(3)
        model = GPT2ForSequenceClassification(make_config(num_labels=1)).train()
        evaluator = ExactEvaluator(tokenizer, PROMPTS, model, BAD, 2, reward_tokenizer=tokenizer, batch_size=10)
        assert model.training
        model.eval()
        for column in range(0, evaluator.completion_ids.shape[0], 5):
            completion = [token for token in evaluator.completion_ids[column].tolist() if token >= 0]
            for row, prompt in enumerate(PROMPTS):
                text = prompt + tokenizer.decode(completion, skip_special_tokens=True)
                with torch.no_grad():
                    expected = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0].item()
                assert evaluator.rewards[row, column].item() == pytest.approx(expected, abs=1e-5)


class TestEvaluate:
    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_report_equals_naive_sums(self, length):
        policy, reference = make_policy(0), make_policy(1)
        report = make_evaluator(length, reference_model=reference).evaluate(policy)
        rewards, bad, entropy, kl = [], [], [], []
        for prompt in PROMPTS:
            completions = naive_completions(length)
            log_p, log_0 = (naive_log_probs(model, prompt, completions) for model in (policy, reference))
            prob = [math.exp(value) for value in log_p]
            texts = [prompt + "".join(" abcd "[t - 1] for t in c if 2 <= t <= 5) for c in completions]
            rewards.append(sum(p * r for p, r in zip(prob, letter_reward(texts).tolist(), strict=True)))
            bad.append(sum(p for p, c in zip(prob, completions, strict=True) if {*c} & {*BAD}))
            entropy.append(-sum(p * lp for p, lp in zip(prob, log_p, strict=True)))
            kl.append(sum(p * (lp - l0) for p, lp, l0 in zip(prob, log_p, log_0, strict=True)))
        assert report.expected_reward == pytest.approx(sum(rewards) / 3, abs=1e-4)
        assert report.expected_reward_per_prompt == pytest.approx(rewards, abs=1e-4)
        assert report.log_prob_bad == pytest.approx(math.log(sum(bad) / 3), abs=1e-4)
        assert report.log_prob_bad_per_prompt == pytest.approx([math.log(value) for value in bad], abs=1e-4)
        assert report.entropy == pytest.approx(sum(entropy) / 3, abs=1e-4)
        assert report.kl == pytest.approx(sum(kl) / 3, abs=1e-4)
        assert report.max_reward >= report.expected_reward

    def test_kl_to_itself_is_zero_and_absent_without_reference(self):
        policy = make_policy(0)
        assert make_evaluator(2, reference_model=policy).evaluate(policy).kl == 0.0
        assert make_evaluator(2).evaluate(policy).kl is None

    def test_tiny_probabilities_keep_their_logarithm(self):
        policy = make_policy(0)
        policy.lm_head = torch.nn.Linear(16, 7)
        with torch.no_grad():
            policy.lm_head.bias[torch.tensor(BAD)] = -1000.0
        assert -1050 < make_evaluator(2).evaluate(policy).log_prob_bad < -900

    def test_no_bad_tokens(self):
        evaluator = ExactEvaluator(make_tokenizer(), PROMPTS, letter_reward, [], 1)
        assert evaluator.evaluate(make_policy(0)).log_prob_bad == -math.inf

    def test_modes_of_submodules_are_restored_and_dropout_is_off(self):
        policy = make_policy(0, resid_pdrop=0.5)
        evaluator = make_evaluator(2)
        expected = evaluator.log_probs(policy)
        policy.train()
        policy.transformer.h[0].eval()  # a part frozen by its owner
        torch.testing.assert_close(evaluator.log_probs(policy), expected)
        assert policy.training and policy.transformer.h[1].training and not policy.transformer.h[0].training
        assert not evaluator.log_probs(policy).requires_grad

    def test_fused_head_of_trl(self):
        policy, evaluator = make_policy(0), make_evaluator(2)
        expected = evaluator.log_probs(policy)
        add_fused_lm_head(policy, temperature=1.0)
        torch.testing.assert_close(evaluator.log_probs(policy), expected)


class TestEvaluateProposal:
    @pytest.mark.parametrize("reward_cap", [math.inf, -2.0])
    def test_equals_direct_sums(self, reward_cap):
        evaluator, policy, proposal = make_evaluator(2), make_policy(0), make_policy(1)
        report = evaluator.evaluate_proposal(proposal, policy, beta=-0.5, reward_cap=reward_cap)
        p, q, r = evaluator.log_probs(policy).exp(), evaluator.log_probs(proposal).exp(), evaluator.rewards
        weight = p * (-0.5 * r.clamp(max=reward_cap)).exp()
        z = weight.sum(dim=1, keepdim=True)
        sigma = weight / z
        assert report.log_z == pytest.approx(z.log().mean().item())
        assert report.kl_proposal_target == pytest.approx((q * (q / sigma).log()).sum(dim=1).mean().item())
        assert report.kl_target_proposal == pytest.approx((sigma * (sigma / q).log()).sum(dim=1).mean().item())
        assert report.ess_fraction == pytest.approx((1 / (sigma**2 / q).sum(dim=1)).mean().item())
        assert report.expected_reward == pytest.approx((q * r).sum(dim=1).mean().item())
        assert report.target_expected_reward == pytest.approx((sigma * r).sum(dim=1).mean().item())
        assert report.log_prob_bad == pytest.approx(q[:, evaluator.bad].sum(dim=1).mean().log().item())
        assert report.target_log_prob_bad == pytest.approx(sigma[:, evaluator.bad].sum(dim=1).mean().log().item())


def without_eos():
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_completion_length": 0}, "set 1, 2 or 3"),
        ({"max_completion_length": 4}, "set 1, 2 or 3"),
        ({"prompts": PROMPTS * 10_000, "max_completion_length": 3}, "pass fewer prompts"),
        ({"reward": make_policy(0)}, "reward_tokenizer"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": ["a", ""]}, "at least one token"),
        ({"tokenizer": without_eos()}, "eos"),
        ({"eos_token_ids": [1, 7]}, "eos_token_ids has 7, but the tokenizer's ids are 0 to 6"),
        ({"reward": lambda texts: torch.zeros(len(texts), 2)}, "one finite number a text"),
        ({"reward": lambda texts: torch.full((len(texts),), math.nan)}, "one finite number a text"),
    ],
)
def test_what_is_refused(changes, message):
    arguments = {"tokenizer": make_tokenizer(), "prompts": PROMPTS, "reward": letter_reward, "bad_token_ids": BAD}
    with pytest.raises(ValueError, match=message):
        ExactEvaluator(**{**arguments, "max_completion_length": 1, **changes})


def test_a_vocabulary_of_another_size_is_refused():
    with pytest.raises(ValueError, match="resize"):
        make_evaluator(1).log_probs(make_policy(0, vocab_size=9))
