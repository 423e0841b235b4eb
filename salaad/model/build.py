"""A LLaMA built from its sizes, or any Hugging Face causal LM opened from its folder."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from salaad.common.errors import UserError, is_lack_of_memory
from salaad.common.files import is_file, read_object
from salaad.config.run import ModelConfig
from salaad.model.folder_formats import is_any_size, is_fixed_size
from salaad.model.folders import local_folder, terms_of
from salaad.model.parameters import count_parameters
from salaad.model.weight_headers import check_counts, check_room, few_parameters, read_headers, weight_files

_LARGEST_CONFIG = 2**20  # bytes of config.json; transformers copies every list in it many times


class NewModel:
    """An untied LLaMA with RMSNorm, SwiGLU and SDPA attention, of the sizes in a configuration.

    Attributes:
        config: the architecture as transformers describes it.
    """

    path = None  # it lies in no folder

    def __init__(self, sizes: ModelConfig, sequence_length: int) -> None:
        self.config = LlamaConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_hidden_layers,
            num_attention_heads=sizes.num_attention_heads,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sequence_length,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )

    def build(self, seed: int, pad_id: int | None = None, eos_id: int | None = None) -> PreTrainedModel:
        """Return the model in float32 on the CPU, with random weights determined by `seed`."""
        torch.manual_seed(seed)
        return self.without_weights(pad_id, eos_id)

    def without_weights(self, pad_id: int | None, eos_id: int | None) -> PreTrainedModel:
        """Return the model of `build` with unseeded random weights, for a caller that loads weights into it."""
        # The row of the padding id in the embedding is zero and gets no gradient. A tokenizer without a padding token
        # pads with its end token, which is text where documents are packed into rows, and has to be learned.
        self.config.pad_token_id = None if pad_id == eos_id else pad_id
        self.config.eos_token_id, self.config.bos_token_id = eos_id, None
        return without_weights(self.config)

    def terms(self) -> dict[str, bytes]:
        """Return no files: a new model has no licence of others."""
        return {}


class ModelFolder:
    """A Hugging Face causal-LM folder whose config.json has been compared with the headers of its weight files.

    Args:
        path: the folder, which is opened and checked once, here.

    Attributes:
        config: the architecture as transformers describes it.
        outline: the model on the meta device: names and shapes without values.

    Raises:
        UserError: a file is missing or broken, or config.json and the weight files do not fit each other.
    """

    def __init__(self, path: Path) -> None:
        if not is_file(path / "config.json"):
            raise UserError(f"{path} holds no config.json; give a whole Hugging Face causal-LM folder")
        self.path = path
        self.config, self.outline = _checked(path)

    def build(self, seed: int, pad_id: int | None = None, eos_id: int | None = None) -> PreTrainedModel:
        """Return the model in float32 on the CPU for training; weights and special tokens are the folder's."""
        torch.manual_seed(seed)
        return self.read(torch.float32)

    def without_weights(self, pad_id: int | None, eos_id: int | None) -> PreTrainedModel:
        """Return the model of `build` with unseeded random weights, for a caller that loads weights into it."""
        model = without_weights(self.config)
        if is_file(self.path / "generation_config.json"):
            with _in_a_sentence(self.path):
                model.generation_config = GenerationConfig.from_pretrained(self.path, local_files_only=True)
        return model

    def terms(self) -> dict[str, bytes]:
        """Return name → content of licence, notices and card, which go with every model made of this one."""
        return terms_of(self.path)

    def load(
        self, dtype: torch.dtype, device: torch.device | None = None, budget: int | None = None
    ) -> PreTrainedModel:
        """Return the model for inference; of an elastic folder, `budget` selects the size in parameters.

        Raises:
            UserError: a weight is missing, broken or does not fit config.json.
        """
        model = self.read(dtype, {} if budget is None else {"budget": budget})
        model = model.to(device or "cpu").eval().requires_grad_(False)
        with _in_a_sentence(self.path), torch.no_grad():
            # A trial run, as numbers of heads may fit the shapes of all weights and still break the forward pass.
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
        return model

    def read(self, dtype: torch.dtype, extra: Mapping[str, Any] | None = None) -> PreTrainedModel:
        """Return the model on the CPU; only our code and transformers' reads its weights, never code of the folder."""
        with _in_a_sentence(self.path):
            model, report = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,  # the other format is a pickle
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # the report lists them by name
                **(extra or {}),
            )
        for what, names in report.items():
            if names:
                first = min(name if isinstance(name, str) else name[0] for name in names)
                raise UserError(
                    f"{self.path} does not fit its config.json ({what}: {first}, {len(names)} in all); give a whole "
                    "folder"
                )
        return model


def _checked(folder: Path) -> tuple[PretrainedConfig, PreTrainedModel]:
    """Return a folder's architecture and its model on the meta device, checked against the headers of its weights."""
    place = folder / "config.json"
    content = read_object(place, _LARGEST_CONFIG)
    headers = read_headers(weight_files(folder))
    check_counts(content, len(headers), place)
    for key in ("transformers_weights", "fusion_config"):
        if content.get(key) is not None:
            raise UserError(f"{place} has {key}, which names other files or code; take it out, or give another folder")
    if "/" in str(content.get("attn_implementation") or content.get("_attn_implementation")):
        raise UserError(f"{place} asks for attention from the hub; take attn_implementation out of it")
    with _in_a_sentence(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if config.get_text_config() is not config:
            raise UserError(
                f"{folder} is a {config.model_type} model of more than text; give the folder of a language model alone"
            )
        with few_parameters(len(headers)):
            model = outline(config)
    entry = getattr(config, "quantization_config", None)
    # Our own quantizers check blocks stored as U·V + S. Other quantizers pack up to eight numbers into a byte.
    if entry is None:
        check_room(model, headers)
    elif not (is_fixed_size(entry) or is_any_size(entry)):
        check_room(model, headers, per_element=64)
    return config, model


@contextmanager
def _in_a_sentence(folder: Path) -> Iterator[None]:
    """Context manager that turns any error that transformers raises about `folder` into a UserError of one sentence.

    The class of the error cannot be predicted, as a wrong value in a file may fail anywhere in the code of hundreds of
    architectures. UserError and lack of memory pass through unchanged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an error is reported by the one sentence alone
            yield
    except Exception as error:
        if isinstance(error, UserError) or is_lack_of_memory(error, of_a_file=True):
            raise
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{folder} cannot be opened ({why}); give a whole Hugging Face causal-LM folder") from None


def model_source(config: ModelConfig, sequence_length: int) -> "NewModel | ModelFolder":
    """Return the source of a run's model: a new model of the configured sizes, or the folder `model.path`.

    Raises:
        UserError: `model.path` is no Hugging Face causal-LM folder.
    """
    if config.path is None:
        return NewModel(config, sequence_length)
    folder = local_folder(config.path, "model.path")
    if not is_file(folder / "config.json"):
        raise UserError(f"model.path {config.path} holds no config.json; give the folder of a Hugging Face causal LM")
    return ModelFolder(folder)


def is_rotary(description: PretrainedConfig) -> bool:
    """Return whether a model's positions are rotations, which rows of any length have, and not rows of a table."""
    return getattr(description, "rope_parameters", None) is not None


def learned_positions(description: PretrainedConfig) -> int | None:
    """Return the positions of a model that has a table of them, which no row may exceed; None if any length is read."""
    return None if is_rotary(description) else getattr(description, "max_position_embeddings", None)


def extend_positions(description: PretrainedConfig, length: int) -> None:
    """Let a model that trains on rows of `length` tokens say so, where no weight and no frequency depends on it."""
    if is_rotary(description) and description.rope_parameters.get("rope_type") == "default":
        description.max_position_embeddings = max(length, description.max_position_embeddings)


def require_positions(description: PretrainedConfig, length: int, name: str) -> None:
    """Raise a UserError if the model called `name` has fewer positions than a row of `length` tokens.

    A table of positions would be read beyond its end, for which a GPU aborts the process without a reason.
    """
    positions = getattr(description, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise UserError(
            f"data.sequence_length is {length}, but {name} has {positions} positions; give --data.sequence_length "
            f"{positions} or less"
        )


def describe_model(config: ModelConfig, sequence_length: int) -> PretrainedConfig:
    """Return only the architecture, as a configuration of transformers; raises the errors of `model_source`."""
    return model_source(config, sequence_length).config


def without_weights(description: PretrainedConfig) -> PreTrainedModel:
    """A model of this architecture in float32 on the CPU, with random weights."""
    return AutoModelForCausalLM.from_config(description, dtype=torch.float32)


def outline(description: PretrainedConfig) -> PreTrainedModel:
    """Return a model of this architecture on the meta device: names and shapes without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(description)


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM from its folder, on the CPU for inference: `ModelFolder(folder).load(dtype)`."""
    return ModelFolder(folder).load(dtype)


def training_flops(model: PreTrainedModel, sequence_length: int) -> float:
    """Floating-point operations per trained token: 6 per parameter, plus the products of attention."""
    config = model.config
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6 * count_parameters(model) + attention
