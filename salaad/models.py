"""A LLaMA from its sizes, or any Hugging Face causal LM from its folder, and the training loss on top of it."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from salaad.config import ModelConfig
from salaad.cross_entropy import IGNORED, summed_cross_entropy
from salaad.errors import UserError

# Settings by which some architectures change their logits after the head.
_LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


def describe_model(config: ModelConfig, sequence_length: int) -> PretrainedConfig:
    """The architecture as transformers describes it: untied LLaMA with RMSNorm, SwiGLU and SDPA attention.

    Raises:
        UserError: `model.path` is no Hugging Face folder.
    """
    if config.path is None:
        return LlamaConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            vocab_size=config.vocab_size,
            max_position_embeddings=sequence_length,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    if not (Path(config.path) / "config.json").is_file():
        raise UserError(f"model.path {config.path} holds no config.json; give the folder of a Hugging Face causal LM")
    try:
        return AutoConfig.from_pretrained(config.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{config.path}/config.json cannot be read ({why}); give the folder of a causal LM") from None


def build_model(
    config: ModelConfig, description: PretrainedConfig, seed: int, pad_id: int | None = None, eos_id: int | None = None
) -> PreTrainedModel:
    """The model in float32 on the CPU, with random weights that `seed` fixes, or with those of `model.path`."""
    torch.manual_seed(seed)
    if config.path is not None:
        return AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32, local_files_only=True)
    description.pad_token_id, description.eos_token_id, description.bos_token_id = pad_id, eos_id, None
    return AutoModelForCausalLM.from_config(description, dtype=torch.float32)


def outline(description: PretrainedConfig) -> PreTrainedModel:
    """The model without its numbers: names and shapes, on no device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(description)


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device | None = None, budget: int | None = None
) -> PreTrainedModel:
    """A causal LM from its folder, for inference; with a budget, an elastic folder's model of that size.

    Raises:
        UserError: a file is missing, broken or does not fit config.json.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, by name
            **({} if budget is None else {"budget": budget}),
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} cannot be opened ({why}); give a whole Hugging Face causal-LM folder") from None
    for what, names in report.items():
        if names:
            first = min(name if isinstance(name, str) else name[0] for name in names)
            raise UserError(
                f"{folder} does not fit its config.json ({what}: {first}, {len(names)} in all); give a whole folder"
            )
    return model.to(device or "cpu").eval().requires_grad_(False)


class SummedLoss(nn.Module):
    """Next-token negative log-likelihood of a causal LM, summed over the labelled tokens.

    The sum, not the mean: whoever knows the number of tokens of the whole batch divides by it, so the loss does not
    depend on how rows are spread over micro-batches and ranks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        changed = [name for name in _LOGIT_CHANGES if getattr(model.config, name, None) not in (None, 1, 1.0)]
        if head.bias is not None or changed:
            what = ", ".join(changed) or "a bias"
            raise UserError(f"the model's logits have {what}, which this loss does not know; give a model without")
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Loss in nats (no dimensions) of `input_ids` (rows × length); `labels` are equal, −100 where ignored."""
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return summed_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten())


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, a tied weight once."""
    return sum(p.numel() for p in model.parameters())


def training_flops(model: PreTrainedModel, sequence_length: int) -> float:
    """Floating-point operations to train on one token: 6·N for the weights, plus attention's products."""
    config = model.config
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6 * count_parameters(model) + attention
