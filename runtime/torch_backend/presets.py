"""Models by name, with random weights: what a machine without a model hub can be profiled on.

The time of a step does not depend on the values of the weights, so the shape of a model is all that measuring needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from runtime.torch_backend.tokenizer import BOS, END_OF_TURN, EOS, FIRST_SPECIAL, PAD, SPECIALS

WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's shape. ``fields`` are those of its transformers config; ``parameters`` what they amount to."""

    name: str
    model_type: str
    parameters: int
    doc: str
    fields: Mapping[str, Any]


_QWEN3: dict[str, Any] = {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
_QWEN3 |= {"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "nano",
            "qwen3",
            7_244_544,
            "Qwen3-style, small enough for two slow cores to serve hundreds of requests in a minute",
            _QWEN3
            | {
                "vocab_size": 8000,
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": False,
            },
        ),
        Preset(
            "tiny",
            "qwen3",
            56_894_976,
            "Qwen3-style, small enough for any machine",
            _QWEN3
            | {
                "vocab_size": 32000,
                "hidden_size": 512,
                "intermediate_size": 1536,
                "num_hidden_layers": 8,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "max_position_embeddings": 8192,
                "tie_word_embeddings": False,
            },
        ),
        Preset(
            "qwen3-0.6b",
            "qwen3",
            596_049_920,
            "the shape of Qwen/Qwen3-0.6B",
            _QWEN3
            | {
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "tie_word_embeddings": True,
            },
        ),
        Preset(
            "llama-3.1-8b",
            "llama",
            8_030_261_248,
            "the shape of meta-llama/Llama-3.1-8B",
            {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
                "tie_word_embeddings": False,
            },
        ),
        Preset(
            "qwen3-8b",
            "qwen3",
            8_190_735_360,
            "the shape of Qwen/Qwen3-8B",
            _QWEN3
            | {
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "tie_word_embeddings": False,
            },
        ),
    )
}


def build_preset(preset: Preset, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """The preset's model with random weights, made where and as it will run: no float32 copy, none on another device.

    Matrices are normal with standard deviation 0.02, norms one, biases zero. The same seed gives the same weights on the
    same kind of device; torch's global random state is left alone.
    """
    special = {token: FIRST_SPECIAL + at for at, token in enumerate(SPECIALS)}
    config = AutoConfig.for_model(
        preset.model_type,
        **preset.fields,
        bos_token_id=special[BOS],
        eos_token_id=[special[EOS], special[END_OF_TURN]],
        pad_token_id=special[PAD],
        initializer_range=WEIGHT_STD,
    )
    with no_init_weights(), torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, WEIGHT_STD, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
