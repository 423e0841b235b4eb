"""Perplexity of every variant that one checkpoint can be cut to, cached beside the checkpoint's run."""

import json
from contextlib import AbstractContextManager, suppress
from copy import copy
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from salaad.common import native
from salaad.common.files import read_json_lines
from salaad.compression.deployment import Deployment, OpenedVariant, own_text
from salaad.compression.variants import ALGORITHMS, Variant
from salaad.config.run import DataConfig
from salaad.data.text import Text, content_digest, open_text, validation_batches
from salaad.data.tokenizer import beginning_id, tokenizer_digest
from salaad.model.loss import SummedLoss
from salaad.model.perplexity import evaluate


class VariantEvaluation:
    """The perplexity of any variant of one model on one text; results are cached in the run's folder `cache`.

    Args:
        deployment: the model and its L + S.
        data: where the validation text is.
        tokens: validation tokens after which to stop reading.
        dtype: name of the dtype of weights and activations.
        batch: rows per forward pass.
        half: which half of the rows that hold `tokens` tokens to read; all rows unless given.
    """

    def __init__(
        self,
        deployment: Deployment,
        data: DataConfig,
        *,
        tokens: int,
        dtype: str,
        batch: int,
        half: Literal["first", "second"] | None = None,
    ) -> None:
        self.deployment, self.dtype, self.tokens, self.batch, self.half = deployment, dtype, tokens, batch, half
        self.data = own_text(deployment.source, data)
        self.path = deployment.source.cache / "perplexity.jsonl"
        self.cached = {json.dumps(row["of"]): row for row in read_json_lines(self.path)}

    def on_half(self, half: Literal["first", "second"]) -> "VariantEvaluation":
        """Return this evaluation on one half of the text."""
        other = copy(self)
        other.half = half
        return other

    @cached_property
    def text(self) -> Text:
        """The validation text and the model's own tokenizer."""
        return open_text(self.data, vocab_size=self.deployment.source.folder.config.vocab_size, training=False)

    @cached_property
    def text_digest(self) -> str:
        """A digest of the text: of the contents of local files, or of the names of files on the hub."""
        return content_digest(self.text.validation_files)

    @cached_property
    def tokenizer_digest(self) -> str:
        """A digest of what the tokenizer does; folders of one name or path may get another tokenizer."""
        return tokenizer_digest(self.text.tokenizer)

    @cached_property
    def bos(self) -> int | None:
        """The id that begins every document, if any."""
        return beginning_id(self.text.tokenizer)

    def __call__(self, variant: Variant) -> dict[str, Any]:
        """Return the row of results of a variant: perplexity, parameters and the settings they belong to.

        A result that is not cached takes one pass over the text. `device` and `triton` tell which device computed it,
        and whether our kernels for GPUs could be used there; rows cached by older versions have neither.
        """
        deployment = self.deployment.of(variant)
        of = {
            "algorithms": ALGORITHMS,
            "parts": deployment.kind if variant.name != "X" else None,
            "variant": variant.name if variant.budget is None else [variant.budget, variant.kappa, variant.refine],
            "calibration": deployment.calibration.digest if variant.calibrated else None,
            "text": self.text_digest,
            "rows": [self.data.text_field, self.data.sequence_length, self.data.packing, self.tokens],
            "tokenizer": self.tokenizer_digest,
            "dtype": self.dtype,
            "batch": self.batch,  # on which the legacy figure depends
            **({"half": self.half} if self.half else {}),
            **({} if self.bos is None else {"bos": self.bos}),  # which an older version left out
        }
        key = json.dumps(of)
        if key not in self.cached:
            with self.opened(variant) as (model, parameters, kappa):
                batches = tqdm(self.batches(), desc=variant.name, unit="batch", leave=False, disable=None)
                result = evaluate(SummedLoss(model), batches, model.device)
                device = model.device
            row = {
                "perplexity": result.perplexity,
                "loss": result.loss,
                "legacy_perplexity": result.legacy_perplexity,
                "tokens": result.tokens,
                "parameters": parameters,
                "implied_kappa": kappa,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "triton": native.uses_triton(device),
            }
            self.cached[key] = {"of": of, **row}
            with suppress(OSError):  # without a writable cache the next call only takes longer
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write("\n" + json.dumps(self.cached[key]))
        measured = {name: value for name, value in self.cached[key].items() if name != "of"}
        return {
            "model": deployment.source.name,
            "digest": deployment.source.digest[:16],
            "text": f"{self.data.source} {self.text_digest[:8]}",
            "variant": variant.name,
            "budget": variant.budget,
            "kappa": variant.kappa,
            "refine": variant.refine,
            "calibrate": deployment.calibration.sequences if variant.calibrated else 0,
            "head": variant.head,
            **measured,
            "dtype": self.dtype,
            "tokenizer": self.tokenizer_digest,
            "sequence_length": self.data.sequence_length,
            "packing": self.data.packing,
            "text_field": self.data.text_field,
            "most_tokens": self.tokens,  # of which `tokens` were predicted
            **({"half": self.half} if self.half else {}),
            # Only where it says something, as rows of older versions lack it.
            **({"calibration": of["calibration"]} if variant.calibrated else {}),
        }

    def opened(self, variant: Variant) -> AbstractContextManager[OpenedVariant]:
        """Return a context with the model of a variant, its number of parameters and the κ that its cut implies."""
        return self.deployment.of(variant).opened(variant, getattr(torch, self.dtype))

    def batches(self) -> list[dict[str, Tensor]]:
        """Return the batches of the text that every variant is evaluated on."""
        which = {"rows": self.batch, "max_tokens": self.tokens, "half": self.half}
        return list(validation_batches(self.text, self.data, **which))
