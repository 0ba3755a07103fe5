"""Small reward models of real architectures, saved with their tokenizers as users have them."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    LlamaConfig,
    MPNetConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    set_seed,
)


WORDS = ["the", "cat", "dog", "sat", "ran", "ate", "fish", "bad", "user", "assistant", "system", ":", "safe", "un"]
SPECIAL = ["<pad>", "<eos>", "<unk>", "<s>", "[CLS]", "[SEP]"]
# As Llama's: its own BOS, a header before and an end after each message
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<eos>{% endfor %}"
    "{% if extra %} {{ extra }}{% endif %}"
)
QUESTIONS = ["the cat", "the dog ran the cat ate", "fish", "the fish sat bad", "dog"]
ANSWERS = [" ran", " sat the fish", "", " ate the bad fish the dog", " the cat ate the dog sat ran bad"]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def build_tokenizer(kind="plain", chat_template=None, pad="<pad>", more=()):
    """Word-level tokens with their leading space. `kind` says what is put around a text: "pair", "bos" or nothing."""
    tokens = [*SPECIAL, *WORDS, *(f"Ġ{word}" for word in WORDS), *more]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex(r":|\n\n|\n"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "pair":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
        )
    if kind == "bos":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token="<s>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def build_config(architecture, tokenizer, context=64, **options):
    options = {"vocab_size": len(tokenizer), "initializer_range": 0.3, "pad_token_id": 0, "num_labels": 1} | options
    if architecture == "gpt2":
        return GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=context, **options)
    if architecture == "llama":
        return LlamaConfig(**SIZES, num_key_value_heads=1, max_position_embeddings=context, **options)
    if architecture == "bert":
        return BertConfig(**SIZES, max_position_embeddings=context, **options)
    if architecture in ("roberta", "mpnet"):
        config = RobertaConfig if architecture == "roberta" else MPNetConfig
        return config(**SIZES, max_position_embeddings=context, **options)
    return DebertaV2Config(
        **SIZES,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        type_vocab_size=0,
        max_position_embeddings=context,
        **options,
    )


def save_model(folder, architecture, tokenizer, auto_class=AutoModelForSequenceClassification, **options):
    """Saves a random model, wide awake, with its tokenizer; returns the folder and the model in evaluation mode."""
    set_seed(1)
    model = auto_class.from_config(build_config(architecture, tokenizer, **options))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), model.eval()


def save_causal_model(folder, architecture, tokenizer, **options):
    return save_model(folder, architecture, tokenizer, AutoModelForCausalLM, **options)


def messages(question, answer, *before):
    """A conversational prompt and completion."""
    return [*before, {"role": "user", "content": question}], [{"role": "assistant", "content": answer}]


@torch.no_grad()
def logits_of(model, ids, **inputs):
    """Plain forward pass of one text, without padding."""
    return model(input_ids=torch.tensor([ids]), **inputs).logits[0]
