"""Small models and a tokenizer for the tests of the attack, and the published algorithm in its plainest form."""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    set_seed,
)


SPECIAL = ["<pad>", "<s>", "<eos>", "<|user|>", "<|bot|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ 'user' if message['role'] == 'user' else 'bot' }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
CORPUS = [
    "tell me the secret of the old house and sure here is the secret of the house",
    "I cannot help with that but the others said that they would be there with the rest",
    "how to write a short letter to another brother, then read the letter there",
    "x x x x x ! ! ? , . : ; ( ) [ ] { } caf\u00e9 na\u00efve",
] * 3


def build_tokenizer(chat_template=CHAT_TEMPLATE, vocab_size=400):
    """Byte-level BPE whose merges make many token sequences unstable under decoding and encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
        extra_special_tokens=["<|user|>", "<|bot|>", "<|end|>"],
    )


LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[INST] {{ message['content'] | trim }} [/INST]{% endfor %}"
)
ZEPHYR_TEMPLATE = (
    "{% for message in messages %}<|user|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build_sentencepiece_tokenizer(legacy, chat_template=LLAMA_TEMPLATE):
    """
    BPE as SentencePiece has it for Llama 2 and its kin: a space is put before a text, and dropped when it is decoded.

    A `legacy` one puts it before each part between special tokens, and before one that is there already.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=list("[]/INST<>|abcdefghijklmnopqrstuvwxyz\u2581.?!"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if legacy:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\ue001", "isolated")  # none
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=chat_template
    )


INITIAL = {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"max_position_embeddings": 128, **INITIAL}


def build_model(architecture, vocab_size, seed=0):
    """A random model, wide awake, in evaluation mode."""
    set_seed(seed)
    sizes = SIZES | {"vocab_size": vocab_size}
    heads = sizes | {"num_key_value_heads": 1, "head_dim": 16}
    config = {
        "gpt2": lambda: GPT2Config(**INITIAL, vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=128),
        "llama": lambda: LlamaConfig(**sizes, num_key_value_heads=1),
        # Multiplies the embedding by the root of its width, in the model
        "gemma": lambda: GemmaConfig(**heads, hidden_activation="gelu_pytorch_tanh"),
        # Does so in the embedding, and slides a window of 8 in its first layer
        "gemma3": lambda: Gemma3TextConfig(
            **heads, layer_types=["sliding_attention", "full_attention"], sliding_window=8
        ),
        "mistral": lambda: MistralConfig(**heads, sliding_window=8),
    }[architecture]()
    return AutoModelForCausalLM.from_config(config).eval()


def reference_loss(model, ids, target_ids):
    """Mean negative log-probability of the target's tokens after the others: one plain pass over everything."""
    logits = model(input_ids=torch.tensor([ids + target_ids]), use_cache=False).logits[0]
    return F.cross_entropy(logits[len(ids) - 1 : -1], torch.tensor(target_ids))


def reference_gradient(model, before, suffix, rest, target_ids):
    """Gradient with respect to one-hot rows times what the embedding gives for each token."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        table = embedding(torch.arange(len(embedding.weight)))
    one_hot = F.one_hot(torch.tensor(suffix), len(table)).float().requires_grad_()
    around = [table[torch.tensor(ids, dtype=torch.long)] for ids in (before, rest + target_ids)]
    embeds = torch.cat([around[0], one_hot @ table, around[1]])[None]
    logits = model(inputs_embeds=embeds, use_cache=False).logits[0]
    loss = F.cross_entropy(logits[-len(target_ids) - 1 : -1], torch.tensor(target_ids))
    return torch.autograd.grad(loss, one_hot)[0]


def reference_gcg(model, tokenizer, before, after, target, allowed, init, *, steps, width, topk, n_replace=1, seed=0):
    """
    Algorithm 1 of Zou et al. with one candidate after the other and no cache: strings and losses, step by step.

    Candidates that change when they are decoded and encoded alone are left out.
    """
    target_ids = tokenizer(target, add_special_tokens=False)["input_ids"]
    suffix = tokenizer(init, add_special_tokens=False)["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    strings, losses = [], []
    for _ in range(steps):
        gradient = reference_gradient(model, before, suffix, after, target_ids)
        gradient[:, ~allowed] = torch.inf
        tokens = gradient.argsort(dim=1)[:, :topk]
        order = torch.rand((width, len(suffix)), generator=generator).argsort(dim=1)
        ranks = torch.randint(0, topk, (width, n_replace, 1), generator=generator)
        best = None
        for i in range(width):
            candidate = list(suffix)
            for j in range(n_replace):
                position = int(order[i, j])
                candidate[position] = int(tokens[position, ranks[i, j, 0]])
            text = tokenizer.decode(candidate, clean_up_tokenization_spaces=False)
            if tokenizer(text, add_special_tokens=False)["input_ids"] != candidate:
                continue
            with torch.no_grad():
                loss = reference_loss(model, before + candidate + after, target_ids).item()
            if best is None or loss < best[0]:
                best = (loss, candidate)
        losses.append(best[0])
        suffix = best[1]
        strings.append(tokenizer.decode(suffix, clean_up_tokenization_spaces=False))
    return strings, losses
