"""
Responses of a model to one prompt, and the probability of a given one.

Axis letters: L tokens of the prompt, T of the target, N samples, V vocabulary.
"""

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..._texts import completion_texts
from ...generation._cache import growing_cache, with_cache
from ...generation._defaults import end_tokens
from ...generation._probe import repeats_cache


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    num_samples: int,
    max_new_tokens: int,
    seed: int,
    prompt: str | None = None,
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
        prompt (`str`, *optional*):
            The prompt as text if no chat template made it; responses are then as they read behind it.

    Returns:
        `list[str]`: N responses, without special tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = end_tokens(model, tokenizer)
    if not prompt_ids:
        raise ValueError("The prompt has no tokens; begin it with one.")
    read = torch.tensor([prompt_ids], device=model.device)
    logits, cache = _read_prompt(model, read, num_samples)
    options = with_cache(model, cache)
    logits, ids = logits.expand(num_samples, -1), read.expand(num_samples, -1)  # (N, V) and (N, L)
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
        drawn = drawn.to(model.device)
        ids = torch.cat([ids, drawn], dim=1) if cache is None else drawn
        logits = model(input_ids=ids, **options).logits[:, -1]
    prompts, read_ids = [prompt] * num_samples, [prompt_ids] * num_samples
    return completion_texts(tokenizer, prompts, read_ids, rows, clean_up_tokenization_spaces=False)


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


def _read_prompt(
    model: PreTrainedModel, prompt: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, DynamicCache | None]:
    """
    Logits behind the prompt, (1, V), and its cache for all samples; without one where it cannot be repeated.

    Recurrent models keep states in place of keys and values, under other names or in a form that has no rows to repeat; of
    layers with both (Falcon-H1), transformers (5.23) repeats keys and values alone.
    """
    if not repeats_cache(model):
        return model(input_ids=prompt, use_cache=False).logits[:, -1], None
    cache = growing_cache(model)
    logits = model(input_ids=prompt, **with_cache(model, cache)).logits[:, -1]
    cache.batch_repeat_interleave(num_samples)
    return logits, cache
