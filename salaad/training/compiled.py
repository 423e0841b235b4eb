"""The Transformer compiled by torch.compile, so that its trainings repeat as uncompiled ones do."""

import torch
from transformers import PreTrainedModel


def compile_transformer(model: PreTrainedModel) -> None:
    """Compile the layers of a model in place, from the next call on.

    Masks of dropout are those of an uncompiled model: the compiler's own generator draws others, on CPUs more slowly.
    On a CPU the embedding is not compiled, since the compiler adds up its gradient in several threads at once, in an
    order that no two runs share.
    """
    if model.device.type == "cpu":
        embedding = model.get_input_embeddings()
        embedding.forward = torch.compiler.disable(embedding.forward)
    model.base_model.compile(options={"fallback_random": True})
