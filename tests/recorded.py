"""One update on recorded completions: trainers that draw these, the models, and the gradients of the update.

A test compares them with formulas that it writes out from plain forward passes, one unpadded row at a time (`rows_log_p`).
"""

import math

import torch
from datasets import Dataset
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    set_seed,
)

from trl_repulse import PPOTrainer

from .conftest import QUIET, build_model, word_reward


N = 4
PROMPTS = ["the cat", "the dog ran the cat ate"]
# Token ids of recorded completions; 1 is eos. Lengths differ, one is empty but for eos.
POLICY = [[[12, 13, 14], [18, 1], [1], [17, 17, 11]], [[11, 15, 1], [17, 12, 13], [18, 18, 18], [14, 1]]]
PROPOSAL = [[[18, 13, 1], [18, 17], [13, 14, 15], [18, 18, 1]], [[11, 1], [18, 1], [12, 18, 13], [16, 16, 16]]]


class Recorded:
    """Mixin that replaces sampling by the recorded completion of each row of the batch over all processes."""

    def _generate(self, prompts):
        table = PROPOSAL if self._draws_others() else POLICY
        first = self.accelerator.process_index * len(prompts)
        completions = [table[PROMPTS.index(prompt)][(first + i) % N] for i, prompt in enumerate(prompts)]
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        prompt_ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
        return prompt_ids, completions, None, texts, None, {}, None, []

    def _draws_others(self):
        """Whether a proposal is sampled, or the policy at another temperature."""
        proposal = vars(self).get("proposal")
        sampled = proposal is not None and self.model_wrapped is proposal.engine
        return sampled or self.generation_config.temperature != 1.0


def recorded(trainer_cls):
    """A trainer of this class that draws the recorded completions."""
    return type(f"Recorded{trainer_cls.__name__}", (Recorded, trainer_cls), {})


def build_reward_model(architecture, vocab_size, seed):
    """A random sequence classifier with one label, which a value model starts from: values far from 0."""
    set_seed(seed)
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "num_labels": 1}
    if architecture == "gpt2":
        shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
        config = GPT2Config(vocab_size=vocab_size, initializer_range=0.3, **shape, **special)
        return GPT2ForSequenceClassification(config)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.3, **shape, **special)
    return LlamaForSequenceClassification(config)


def prepare(
    folder,
    tokenizer,
    trainer_cls,
    architecture="gpt2",
    batch_size=8,
    accumulation=1,
    reward_funcs=word_reward,
    prompts=PROMPTS,
    extra=None,
    **kwargs,
):
    """
    A trainer for one update, the modules that it trains by name, and the reference.

    `extra` are arguments of the trainer, `kwargs` of its configuration. The models are of different seeds.
    """
    settings = {
        "output_dir": str(folder / "run"),
        **QUIET,
        "max_steps": 1,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "num_generations": N,
        "max_completion_length": 3,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-9,
        "shuffle_dataset": False,
    }
    args = trainer_cls._config_cls(**(settings | kwargs))
    policy = build_model(architecture, len(tokenizer), seed=0)
    policy.name_or_path = policy.config._name_or_path = str(folder / "policy")
    reference = build_model(architecture, len(tokenizer), seed=2)
    reference.eval().save_pretrained(folder / "policy")  # what TRL loads as the reference
    extra = dict(extra or {})
    if issubclass(trainer_cls, PPOTrainer):
        extra["value_model"] = build_reward_model(architecture, len(tokenizer), seed=1)
    if vars(args).get("proposal") == "learned" and args.alpha and "peft_config" not in extra:
        extra["proposal_model"] = build_model(architecture, len(tokenizer), seed=1)
    trainer = trainer_cls(
        model=policy,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        **extra,
    )
    second = {name: vars(trainer)[name].module for name in ("proposal", "value") if vars(trainer).get(name)}
    return trainer, {"policy": policy} | second, reference.to(policy.device)


def gradients(trainer, modules):
    """Trains; the gradients of the last update, for each of the modules, which are named as `prepare` names them."""
    grads = {}

    def kept_before(name, step):
        def kept(*args, **kwargs):
            parameters = modules[name].parameters()
            grads[name] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
            return step(*args, **kwargs)

        return kept

    for name in modules.keys() - {"policy"}:
        second = getattr(trainer, name)
        second.step = kept_before(name, second.step)
    trainer._get_grad_norm = kept_before("policy", trainer._get_grad_norm)
    trainer.train()
    return grads


def written(model, tokenizer, prompt, completion, temperature=1.0, tool=None):
    """Log-probabilities of a completion's tokens from one unpadded forward, 0 at the token of a `tool`; a mask of the others."""
    ids = torch.tensor([tokenizer(prompt)["input_ids"] + completion], device=model.device)
    logits = model(input_ids=ids).logits[0, :-1] / temperature
    log_p = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)[-len(completion) :]
    own = torch.tensor([token != tool for token in completion], device=model.device)
    return torch.where(own, log_p, 0.0), own


def rows_log_p(model, tokenizer, prompt, completion):
    """Log-probabilities of one completion's tokens, from one unpadded forward."""
    return written(model, tokenizer, prompt, completion)[0]


def reduced(log_p, own, args):
    return log_p.sum() / own.sum() if args.logprob_reduction == "mean" else log_p.sum()


def pushed(policy, tokenizer, reward, args, drawn, groups=POLICY, begun=None, tool=None):
    """
    The negative term of the policy's own samples, `groups`, or of these and hot ones, `drawn` of each prompt, written out. `begun` is what
    environments add to the prompts of the hot ones.
    """
    loss = 0.0
    for i, (prompt, group, others) in enumerate(zip(PROMPTS, groups, drawn, strict=True)):
        prompts = [prompt] * N + [prompt + (begun[i][k % N] if begun else "") for k in range(len(others))]
        completions = group + others
        rewards = reward([tokenizer.decode(c, skip_special_tokens=True) for c in completions])
        scores = [written(policy, tokenizer, *pair, tool=tool) for pair in zip(prompts, completions, strict=True)]
        w = []
        for p, c, (log_p, _), r in zip(prompts, completions, scores, rewards, strict=True):
            ratio, bad = 1.0, True
            if others:
                at_1, bad = math.exp(log_p.sum().item()), r < args.bad_reward_threshold
                hot = math.exp(written(policy, tokenizer, p, c, args.proposal_temperature, tool)[0].sum().item())
                ratio = at_1 * len(completions) / (N * at_1 + len(others) * hot)
            w.append(ratio * math.exp(args.target_dist_beta * r) if bad else 0.0)
        assert sum(w) > 0
        alpha = args.alpha / (len(others) or N) if args.alpha_normalization == "samples" else args.alpha
        for weight, score in zip(w, scores, strict=True):
            loss = loss + alpha * weight / sum(w) * reduced(*score, args) / len(PROMPTS)
    return loss


def assert_gradients(loss, module, actual):
    expected = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, retain_graph=True)
    for e, a in zip(expected, actual, strict=True):
        e = torch.zeros_like(a) if e is None else e
        torch.testing.assert_close(a, e, atol=2e-6, rtol=2e-4)
