"""Perplexity of everything one checkpoint can be cut to."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from salaad.config import DataConfig
from salaad.data import Text, fingerprint, open_text, validation_batches
from salaad.deployment import Deployment, deployed
from salaad.metrics import read_lines
from salaad.models import SummedLoss, load_model
from salaad.perplexity import evaluate
from salaad.variants import Variant


class VariantEvaluation:
    """Perplexities of what one model can be cut to, over one text; what was measured once is kept in its cache.

    Args:
        deployment: the model and its L + S.
        data: where the validation text is.
        tokens: validation tokens to read at the most.
        dtype: name of the dtype of weights and activations.
        batch: rows taken through the model at once.
    """

    def __init__(self, deployment: Deployment, data: DataConfig, *, tokens: int, dtype: str, batch: int) -> None:
        self.deployment, self.dtype, self.tokens, self.batch = deployment, dtype, tokens, batch
        source = deployment.source
        self.data = replace(data, tokenizer=data.tokenizer or str(source.model))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.path = source.cache / "perplexity.jsonl"
        self.kept = {json.dumps(row["of"]): row for row in read_lines(self.path)}

    @cached_property
    def text(self) -> Text:
        """The validation text and the model's own tokenizer."""
        return open_text(self.data, vocab_size=self.deployment.vocab_size, training=False)

    @cached_property
    def model(self) -> PreTrainedModel:
        """X, in the dtype asked for."""
        return load_model(self.deployment.source.model, getattr(torch, self.dtype), self.device)

    def __call__(self, variant: Variant) -> dict[str, Any]:
        """Perplexity, parameters and what they are of; one pass over the text unless it is known already."""
        deployment = self.deployment
        of = {
            "parts": deployment.kind if variant.name != "X" else None,
            "variant": variant.name if variant.budget is None else [variant.budget, variant.kappa],
            "text": fingerprint(self.text.validation_files),
            "rows": [self.data.sequence_length, self.data.packing, self.tokens],
            "tokenizer": self.data.tokenizer if self.data.tokenizer != str(deployment.source.model) else None,
            "dtype": self.dtype,
        }
        key = json.dumps(of)
        if key not in self.kept:
            parts = deployment.cut(variant)
            with deployed(self.model, parts):
                result = evaluate(SummedLoss(self.model), self._batches(variant.name), self.device)
            row = {
                "perplexity": result.perplexity,
                "loss": result.loss,
                "tokens": result.tokens,
                "parameters": deployment.parameters(parts),
            }
            self.kept[key] = {"of": of, **row}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(self.kept[key]) + "\n")
        measured = {name: value for name, value in self.kept[key].items() if name != "of"}
        return {
            "model": deployment.source.name,
            "variant": variant.name,
            "budget": variant.budget,
            "kappa": variant.kappa,
            **measured,
            "dtype": self.dtype,
        }

    def _batches(self, name: str) -> Iterable[dict[str, Tensor]]:
        batches = list(validation_batches(self.text, self.data, rows=self.batch, max_tokens=self.tokens))
        return tqdm(batches, desc=name, unit="batch", leave=False, disable=None)
