"""Makes the tiny checkpoints beside this file, and what transformers computes with them.

    pip install torch transformers tokenizers
    python tests/models/pretrained/make_fixtures.py

Weights are random, and larger than at initialisation, so that every part of a model matters to its output.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
TEXT = (
    "the cat sat on the mat, and the other cat sat on the other mat: that is that. Ünïcödé, too; 3.14159!\n"
    * 4
)


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            is_gain = "ln_" in name or "LayerNorm" in name
            param.copy_(1 + 0.1 * noise if is_gain and name.endswith("weight") else 0.25 * noise)
    return model.eval()


def save(model: torch.nn.Module, name: str, tokens: np.ndarray, output: torch.Tensor) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(
        folder / "expected.npz",
        tokens=tokens.astype(np.int32),
        output=output.numpy(),
        transformers=transformers.__version__,
        torch=torch.__version__,
    )


def main() -> None:
    generator = np.random.default_rng(0)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TEXT], vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False
    )

    gpt2 = randomize(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=tokenizer.get_vocab_size(), n_positions=40, n_embd=24, n_layer=2, n_head=4,
                bos_token_id=0, eos_token_id=0,
            )
        )
    )  # fmt: skip
    tokens = generator.integers(0, gpt2.config.vocab_size, (2, 17))
    with torch.no_grad():
        save(gpt2, "tiny_gpt2", tokens, gpt2(torch.from_numpy(tokens)).logits)
    tokenizer.save(str(HERE / "tiny_gpt2" / "tokenizer.json"))

    bert = randomize(
        BertModel(
            BertConfig(
                vocab_size=60, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
                max_position_embeddings=32,
            )
        )
    )  # fmt: skip
    tokens = generator.integers(0, 60, (2, 13))
    with torch.no_grad():
        save(bert, "tiny_bert", tokens, bert(torch.from_numpy(tokens)).last_hidden_state)


if __name__ == "__main__":
    main()
