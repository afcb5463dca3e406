"""A tiny Qwen3 in a folder, to stand in for a model that was downloaded."""

import sys

import transformers


def save(folder: str) -> None:
    config = transformers.Qwen3Config(
        vocab_size=256,  # a token is a byte
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.set_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python huggingface.py FOLDER, where the model shall be")
    save(sys.argv[1])
