"""A LLaMA from its sizes, or any Hugging Face causal LM from its folder, and the training loss on top of it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from salaad.common.errors import UserError
from salaad.common.files import is_file, read_object
from salaad.config.run import ModelConfig
from salaad.model.weight_headers import check_counts, check_room, few_parameters, read_headers, weight_files

_LARGEST_CONFIG = 2**20  # bytes; transformers copies every list in it many times


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
    folder = Path(config.path)
    if not is_file(folder / "config.json"):
        raise UserError(f"model.path {config.path} holds no config.json; give the folder of a Hugging Face causal LM")
    return _checked(folder)


def _checked(folder: Path) -> PretrainedConfig:
    """The architecture in `folder`, of which the weights lie there: found out from headers alone."""
    place = folder / "config.json"
    said = read_object(place, _LARGEST_CONFIG)
    headers = read_headers(weight_files(folder))
    check_counts(said, len(headers), place)
    for key in ("transformers_weights", "fusion_config"):
        if said.get(key) is not None:
            raise UserError(f"{place} has {key}, which names other files or code; take it out, or give another folder")
    if "/" in str(said.get("attn_implementation") or said.get("_attn_implementation")):
        raise UserError(f"{place} asks for attention from the hub; take attn_implementation out of it")
    with _in_a_sentence(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with few_parameters(len(headers)):
            model = outline(config)
    entry = getattr(config, "quantization_config", None)
    # Our own quantizers see to what is stored in parts. Those of others pack up to eight numbers into a byte.
    if entry is None:
        check_room(model, headers)
    elif not (isinstance(entry, dict) and str(entry.get("quant_method")).startswith("salaad")):
        check_room(model, headers, per_element=64)
    return config


@contextmanager
def _in_a_sentence(folder: Path) -> Iterator[None]:
    """Turn whatever transformers makes of a folder into one sentence.

    It promises no classes: the files of a folder reach the code of hundreds of architectures, where a wrong value ends
    in whatever the first line that meets it raises. What the machine or the user has to say passes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a folder that is refused, the sentence says enough
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{folder} cannot be opened ({why}); give a whole Hugging Face causal-LM folder") from None


def build_model(
    config: ModelConfig, description: PretrainedConfig, seed: int, pad_id: int | None = None, eos_id: int | None = None
) -> PreTrainedModel:
    """The model in float32 on the CPU, with random weights that `seed` fixes, or with those of `model.path`.

    Raises:
        UserError: as `load_model`.
    """
    torch.manual_seed(seed)
    if config.path is not None:
        return _open(Path(config.path), torch.float32)
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
    model = _open(folder, dtype, {} if budget is None else {"budget": budget})
    model = model.to(device or "cpu").eval().requires_grad_(False)
    with _in_a_sentence(folder), torch.no_grad():
        # Numbers of heads may fit the shapes of all weights and still not the computation.
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    return model


def _open(folder: Path, dtype: torch.dtype, extra: dict[str, Any] | None = None) -> PreTrainedModel:
    """A causal LM from its folder, every weight of it, by no code but ours and transformers'."""
    if not is_file(folder / "config.json"):
        raise UserError(f"{folder} holds no config.json; give a whole Hugging Face causal-LM folder")
    _checked(folder)
    with _in_a_sentence(folder):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,  # the other format is a pickle
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, by name
            **(extra or {}),
        )
    for what, names in report.items():
        if names:
            first = min(name if isinstance(name, str) else name[0] for name in names)
            raise UserError(
                f"{folder} does not fit its config.json ({what}: {first}, {len(names)} in all); give a whole folder"
            )
    return model


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, a tied weight once."""
    return sum(p.numel() for p in model.parameters())


def training_flops(model: PreTrainedModel, sequence_length: int) -> float:
    """Floating-point operations to train on one token: 6·N for the weights, plus attention's products."""
    config = model.config
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6 * count_parameters(model) + attention
