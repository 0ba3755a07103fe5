"""
Responses of a model to one prompt, and the probability of a given one.

Axis letters: L tokens of the prompt, T of the target, N samples, V vocabulary.
"""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    num_samples: int,
    max_new_tokens: int,
    seed: int,
) -> list[str]:
    """
    Draws responses from the model's own distribution: temperature 1, no top-k or top-p, and none of the settings that a
    model's `generation_config` brings along. The prompt is read once for all samples.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompt_ids (`list[int]`):
            Tokens of the prompt, L.
        num_samples (`int`):
            N.
        max_new_tokens (`int`):
            Tokens of a response; fewer if it ends.
        seed (`int`):
            Seed of the draws. The global random state is neither read nor changed.

    Returns:
        `list[str]`: N responses, without special tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = _end_ids(model, tokenizer)
    outputs = model(input_ids=torch.tensor([prompt_ids], device=model.device), use_cache=True)
    cache = outputs.past_key_values
    cache.batch_repeat_interleave(num_samples)
    logits = outputs.logits[:, -1].expand(num_samples, -1)  # (N, V)
    rows: list[list[int]] = [[] for _ in range(num_samples)]
    done = [False] * num_samples
    for _ in range(max_new_tokens):
        drawn = logits.float().softmax(dim=-1).cpu().multinomial(1, generator=generator)  # (N, 1)
        for i, token in enumerate(drawn[:, 0].tolist()):
            done[i] = done[i] or token in ends
            if not done[i]:
                rows[i].append(token)
        if all(done):
            break
        logits = model(input_ids=drawn.to(model.device), past_key_values=cache, use_cache=True).logits[:, -1]
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@torch.no_grad()
def target_log_probs(model: PreTrainedModel, prompt_ids: list[int], target_ids: list[int]) -> torch.Tensor:
    """
    Log-probabilities of a target's tokens, each given the prompt and the target's tokens before it.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model.
        prompt_ids (`list[int]`):
            Tokens of the prompt, L.
        target_ids (`list[int]`):
            Tokens of the target, T.

    Returns:
        `torch.Tensor` of shape `(T,)`: log-probabilities in nats, float32, on the CPU.
    """
    ids = torch.tensor([prompt_ids + target_ids[:-1]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].float()  # (T, V)
    return logits.log_softmax(dim=-1).cpu().gather(1, torch.tensor(target_ids)[:, None])[:, 0]


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a response: the model's, and the tokenizer's."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = ends if isinstance(ends, list) else [ends]
    return {end for end in (*ends, tokenizer.eos_token_id) if end is not None}
