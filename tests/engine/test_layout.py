"""Completions that share a row with their prompt are scored as in rows of their own."""

import pytest
import torch
from transformers import GPT2Config, GPTNeoConfig, GPTNeoForCausalLM, set_seed
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from benchmarks.architectures import build
from trl_repulse._trl import add_fused_lm_head
from trl_repulse.engine.scoring import Layout, longest_row, prepare_scoring, token_log_probs
from trl_repulse.engine.trl_bridge import disable_dropout
from trl_repulse.generation.drawing import Sampler

from ..conftest import DEVICE, USE_CPU, build_accelerator


VOCABULARY = 40
L, T, UNITS, N = 14, 6, 2, 4  # longer than the windows of the small models, which are 8 tokens


def batch():
    """Prompts with padding before one, completions that end early, are empty, or are not."""
    torch.manual_seed(0)
    prompts, completions = torch.randint(3, VOCABULARY, (UNITS, L)), torch.randint(3, VOCABULARY, (UNITS, N, T))
    prompt_mask, mask = torch.ones_like(prompts), torch.ones_like(completions)
    prompt_mask[0, :5] = 0
    mask[0, 1, 3:] = mask[1, 2, 1:] = mask[1, 3] = 0
    return tuple(x.to(DEVICE) for x in (prompts, prompt_mask, completions, mask))


def scores(model, count, gradient=True, temperature=None):
    """Log-probabilities (UNITS, N, T) with `count` completions in a row."""
    prompts, prompt_mask, completions, mask = batch()
    layout = Layout(L, T, count)
    rows = layout.rows(prompts, completions), layout.rows(prompt_mask, mask)
    with torch.set_grad_enabled(gradient):
        if temperature is not None:
            found = token_log_probs(model, build_accelerator(), *rows, layout, sampler=Sampler(temperature)).by_sampler
            return found.view(UNITS, N, T)
        return token_log_probs(model, build_accelerator(), *rows, layout).log_p.view(UNITS, N, T)


def scored(name, reverse=False):
    model = build(name, VOCABULARY, reverse=reverse).train().to(DEVICE)
    disable_dropout(model)
    add_fused_lm_head(model)
    prepare_scoring(model)
    return model


@torch.no_grad()
def alone(model, temperature=1.0):
    """The same, of each completion with its prompt by itself, without padding."""
    prompts, prompt_mask, completions, mask = batch()
    found = torch.zeros(UNITS, N, T, device=DEVICE)
    for unit in range(UNITS):
        for place in range(N):
            length = int(mask[unit, place].sum())
            prompt, completion = prompts[unit][prompt_mask[unit] == 1], completions[unit, place, :length]
            logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
            log_p = (logits[len(prompt) - 1 : len(prompt) + length - 1] / temperature).log_softmax(dim=-1)
            found[unit, place, :length] = log_p.gather(1, completion[:, None])[:, 0]
    return found


def gradients(model, count):
    model.zero_grad()
    torch.manual_seed(1)
    (scores(model, count) * torch.randn(UNITS, N, T).to(DEVICE)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Learned, rotary and no positions; windows in all layers, in some, before and after the others; caps on scores and logits;
# several queries to a key; tied and untied heads; experts; norms of queries and keys; attention without a registry
ARCHITECTURES = [
    *("gpt2", "opt", "gptj", "codegen", "gpt_neox", "falcon", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    *("gemma3_text", "phi", "cohere", "cohere2", "olmo2", "stablelm", "starcoder2", "mixtral", "qwen3_moe", "smollm3"),
]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_gradients_are_those_of_separate_rows(name, implementation):
    model = scored(name)
    if implementation == "eager":
        model.set_attn_implementation("eager")
    elif model.config._attn_implementation != "sdpa":
        pytest.skip("has no other implementation")
    expected, hot, each = alone(model), alone(model, 1.7), gradients(model, 1)
    close = {"atol": 1e-5 if USE_CPU else 2e-5, "rtol": 0}
    for count in (1, 2, 4):
        torch.testing.assert_close(scores(model, count, False), expected, **close)
        torch.testing.assert_close(scores(model, count, True, 1.7), hot, **close)
        if count == 1:
            continue
        found = gradients(model, count)
        assert found.keys() == each.keys()
        largest = max(gradient.abs().max() for gradient in each.values())
        for key, gradient in each.items():
            torch.testing.assert_close(found[key], gradient, atol=2e-5 * largest.item(), rtol=0)


def test_windows_come_before_and_after_the_other_layers():
    for reverse in (False, True):
        model = scored("gemma2", reverse)
        torch.testing.assert_close(scores(model, 4, False), alone(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("what", "query", "key"),
    [
        ("another completion", L + T, L + T - 1),
        ("a later token", L + 2, L + 3),
        ("padding of the prompt", L, 0),
        ("padding of a completion", L + 2 * T - 1, L + 2 * T - 1 - 1),
    ],
)
def test_one_wrong_entry_of_a_mask_shows(monkeypatch, what, query, key):
    spread = Layout._spread

    def wrong(self, mask, attention_mask):
        found = spread(self, mask, attention_mask)
        assert not found[0, 0, query, key]
        found[0, 0, query, key] = True
        return found

    model = scored("llama")
    expected = scores(model, 4, False)
    monkeypatch.setattr(Layout, "_spread", wrong)
    different = (scores(model, 4, False) - expected).abs() > 1e-5
    assert different.any() == ("padding of a completion" != what)  # whose own predictions count for nothing


def test_masks_by_hand():
    layout = Layout(2, 2, 2)
    attention_mask = torch.tensor([[0, 1, 1, 1, 1, 0]])  # the second completion has one token
    config = build("llama", VOCABULARY).config
    expected = ["......", ".#....", ".##...", ".###..", ".#..#.", ".#..#."]
    found = layout.masks(config, torch.float32, attention_mask)[0, 0].tolist()
    assert ["".join(".#"[read] for read in row) for row in found] == expected
    assert layout.positions(attention_mask).tolist() == [[0, 0, 1, 2, 1, 1]]
    assert layout.predicting(torch.arange(6.0).view(1, 6, 1)).squeeze(-1).tolist() == [[1, 2, 3], [1, 4, 5]]
    rows = layout.rows(torch.tensor([[7, 8]]), torch.tensor([[[1, 2], [3, 4], [5, 6], [9, 9]]]))
    assert rows.tolist() == [[7, 8, 1, 2, 3, 4], [7, 8, 5, 6, 9, 9]]


@pytest.mark.parametrize(
    ("prompt", "width", "completions", "hidden_size", "count"),
    [
        (128, 20, 10, 64, 10),  # measured: it takes 0.26 of the time of separate rows, 5 in a row 0.38
        (512, 20, 20, 256, 20),  # 0.10
        (16, 100, 10, 64, 1),  # 3.3 with all in a row
        (16, 100, 10, 576, 1),  # 0.94 with 2 in a row, 1.14 with all: not worth it
        (32, 20, 7, 256, 7),
        (128, 20, 1, 64, 1),
    ],
)
def test_as_many_share_a_row_as_makes_it_cheapest(prompt, width, completions, hidden_size, count):
    assert Layout.cheapest(prompt, width, completions, hidden_size).count == count


def test_routers_count_a_prompt_once():
    """The balancing loss is over the tokens that are read, of which a prompt in separate rows has several copies."""
    prompts, prompt_mask, completions, mask = batch()
    model = scored("mixtral")

    def aux_loss(count):
        layout = Layout(L, T, count)
        rows = layout.rows(prompts, completions), layout.rows(prompt_mask, mask)
        return token_log_probs(model, build_accelerator(), *rows, layout, compute_aux_loss=True).aux_loss.item()

    def by_hand(copies):
        """Over the routers' logits of all completions' tokens, and of the prompts' as often as they are read."""
        layout = Layout(L, T, 1)
        ids, real = layout.rows(prompts, completions), layout.rows(prompt_mask, mask)
        with torch.no_grad():
            logits = model.model(
                input_ids=ids, attention_mask=real, position_ids=layout.positions(real), output_router_logits=True
            ).router_logits
        counted = real.bool().view(UNITS, N, L + T).clone()
        counted[:, copies:, :L] = False
        chosen = tuple(layer.view(UNITS, N, L + T, -1)[counted] for layer in logits)
        return load_balancing_loss_func(chosen, model.num_experts, model.num_experts_per_tok).item()

    assert aux_loss(4) == pytest.approx(by_hand(1), rel=1e-5) != pytest.approx(by_hand(4), rel=1e-4)
    assert aux_loss(1) == pytest.approx(by_hand(4), rel=1e-5)


def test_windows_inside_layers_limit_rows():
    """GPT-Neo's local layers go by places in a row, and their window is longer than the texts of the check."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    windows = {"attention_types": [[["local", "global"], 1]], "window_size": 40, "max_position_embeddings": 64}
    config = GPTNeoConfig(initializer_range=0.3, **sizes, **windows)
    set_seed(0)
    model = GPTNeoForCausalLM(config).train().to(DEVICE)
    disable_dropout(model)
    add_fused_lm_head(model)
    prepare_scoring(model)
    longest = longest_row(config)
    assert longest == 40 and longest_row(GPT2Config(n_positions=32)) == 32
    assert Layout.cheapest(L, T, 4, 16, longest).count == 4 and Layout.cheapest(L, T, 5, 16, longest).count == 1
    torch.testing.assert_close(scores(model, 4, False), alone(model), atol=1e-5, rtol=0)
    # One completion more is beyond the window: the limit is needed
    wide = Layout(L, T, 5)
    prompts, prompt_mask, completions, mask = batch()
    completions = torch.cat([completions, completions[:, :1]], dim=1)
    mask = torch.cat([mask, mask[:, :1]], dim=1)
    rows = wide.rows(prompts, completions), wide.rows(prompt_mask, mask)
    with torch.no_grad():
        found = token_log_probs(model, build_accelerator(), *rows, wide).log_p.view(UNITS, 5, T)
    assert (found[:, 4] - alone(model)[:, 0]).abs().max() > 1e-2


def test_attention_that_takes_no_masks_is_refused_whatever_the_batch():
    model = build("llama", VOCABULARY)
    model.config._attn_implementation = "flash_attention_2"  # which takes no mask at all where nothing is padded
    with pytest.raises(ValueError, match="'flash_attention_2' takes no masks of pairs"):
        Layout(2, 2, 2).masks(model.config, torch.float32, torch.ones(1, 6, dtype=torch.long))
