"""Tiny folders with random weights and a tokenizer, of families that vLLM serves; and of a quantised one, its twin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

VOCABULARY = 320
TOKENS = {"vocab_size": VOCABULARY, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
POSITIONS = {"max_position_embeddings": 512}
HEADS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **POSITIONS, **TOKENS}
DENSE = {**HEADS, "intermediate_size": 128, "num_key_value_heads": 1}
PLAIN = {**HEADS, "intermediate_size": 128}
HEAD = {"head_dim": 32}
WINDOW = {"sliding_window": 16}  # shorter than the prompts of the tests
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, **TOKENS}
MULTIPLIED = {"embedding_multiplier": 2.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5}

FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {  # the class of its configuration, and what that is made of
    "gemma3": ("Gemma3TextConfig", {**DENSE, **HEAD, **WINDOW, "query_pre_attn_scalar": 32}),
    "gemma2": ("Gemma2Config", {**DENSE, **HEAD, **WINDOW, "query_pre_attn_scalar": 32}),
    "gemma": ("GemmaConfig", {**DENSE, **HEAD}),
    "phi": ("PhiConfig", DENSE),
    "phi3": ("Phi3Config", DENSE),
    "mixtral": ("MixtralConfig", {**DENSE, **EXPERTS}),
    "olmo": ("OlmoConfig", DENSE),
    "olmo2": ("Olmo2Config", DENSE),
    "olmoe": ("OlmoeConfig", {**DENSE, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("GraniteConfig", {**DENSE, **MULTIPLIED, "logits_scaling": 2.0}),
    "granitemoe": ("GraniteMoeConfig", {**DENSE, **EXPERTS}),
    "qwen2_moe": ("Qwen2MoeConfig", {**DENSE, **SMALL_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", {**DENSE, **SMALL_EXPERTS, **HEAD}),
    "gpt_neox": ("GPTNeoXConfig", PLAIN),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 16}),
    "stablelm": ("StableLmConfig", DENSE),
    "falcon": ("FalconConfig", {**HEADS, "multi_query": True, "alibi": False}),
    "bloom": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 2, **TOKENS}),
    "opt": ("OPTConfig", {**HEADS, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "cohere": ("CohereConfig", DENSE),
    "cohere2": ("Cohere2Config", {**DENSE, **HEAD, "sliding_window": 128}),  # shorter ones end elsewhere in vLLM
    "starcoder2": ("Starcoder2Config", DENSE),
    "nemotron": ("NemotronConfig", {**DENSE, **HEAD}),
    "glm": ("GlmConfig", {**DENSE, **HEAD}),
    "glm4": ("Glm4Config", {**DENSE, **HEAD}),
    "exaone4": ("Exaone4Config", {**DENSE, **WINDOW, "sliding_window_pattern": 2}),
    "smollm3": ("SmolLM3Config", DENSE),
    "ernie4_5": ("Ernie4_5Config", {**DENSE, **HEAD}),
    "seed_oss": ("SeedOssConfig", {**DENSE, **HEAD}),
    "apertus": ("ApertusConfig", DENSE),
    "gpt_oss": ("GptOssConfig", {**DENSE, **EXPERTS, **HEAD, **WINDOW}),
}
CHAT = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"


def write_tokenizer(folder: Path) -> None:
    """Bytes and a few merges, as byte-level BPE; a template of chats; the folder's end token is 2."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    found.chat_template = CHAT
    found.save_pretrained(folder)


def write_family(folder: Path, family: str) -> Path:
    import torch
    import transformers

    kind, values = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "norm" not in name:
                weight.mul_(4.0)  # logits that differ: transformers draws them small
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


GROUP = 32


def write_gptq(folder: Path, twin: Path) -> None:
    """A Qwen2 in 4 bits as GPTQ packs them, and into `twin` the same model in float32."""
    import json
    import shutil

    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DENSE, tie_word_embeddings=False)).float()
    model.save_pretrained(twin)
    write_tokenizer(twin)
    shutil.copytree(twin, folder)
    plain = load_file(twin / "model.safetensors")
    packed = dict(plain)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for name, weight in list(plain.items()):
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        groups = weight.mul(4.0).T.reshape(columns // GROUP, GROUP, rows)
        scales = (groups.abs().amax(1) / 7).half()  # [groups, out]
        numbers = (groups / scales[:, None]).round().clamp(-8, 7)
        plain[name] = (numbers * scales[:, None]).reshape(columns, rows).T.contiguous().float()
        codes = (numbers.reshape(columns, rows) + 8).int()
        words = (codes.reshape(columns // 8, 8, rows) << shifts[None, :, None]).sum(1, dtype=torch.int32)
        stem = name.removesuffix("weight")
        del packed[name]
        packed[f"{stem}qweight"], packed[f"{stem}scales"] = words.contiguous(), scales.contiguous()
        packed[f"{stem}qzeros"] = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
        packed[f"{stem}g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
    for where, tensors in ((twin, plain), (folder, packed)):
        save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    (folder / "config.json").write_text(json.dumps(config))
