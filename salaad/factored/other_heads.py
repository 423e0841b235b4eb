"""A compressed folder that is opened by another class than the one that saved it: a base model, or one with a new head.

transformers finds dense weights under names with or without the base model's prefix, and draws the weights of a head
that no file holds at random. Here blocks are found in the same way.
"""

from collections.abc import Iterable

from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.model.roles import role_of
from salaad.model.weight_headers import Headers


def names_inside(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Name in this model → name in the folder of the named modules, without those of a head that its class lacks.

    A name gains or loses the base model's prefix where the folder was saved by a class with another head, or with none.
    """
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    inside = {}
    for name in names:
        own = name.removeprefix(prefix) if base is model else name
        found = hasattr(model, own.partition(".")[0])
        if not found and hasattr(base, own.partition(".")[0]):
            own, found = f"{prefix}{name}", True
        # A causal model has all blocks, so one that it lacks is passed on, and refused with its name.
        if found or (base is not model and model.get_output_embeddings() is not None):
            inside[own] = name
    return inside


def places_to_fill(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Name in this model → name in the folder of the named blocks; a tied head is filled where its embedding is.

    What is tied to the embedding gets no memory of its own on loading, and a class without a head has no other module.
    """
    source = {target.rpartition(".")[0]: key.rpartition(".")[0] for target, key in model.all_tied_weights_keys.items()}
    inside = {source.get(own, own): name for own, name in names_inside(model, names).items()}
    head = next((name for name in names if role_of(name) == "lm_head" and name not in inside.values()), None)
    if head is not None and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        embedding = model.get_input_embeddings()
        inside |= {own: head for own, module in model.named_modules() if module is embedding}
    return inside


def new_head(model: PreTrainedModel, headers: Headers) -> int:
    """The number of parameters of a head that no file holds, before blocks are replaced.

    Raises:
        UserError: the files hold nothing of the base model under the name that the class has for it.
    """
    base, prefix = model.base_model, model.base_model_prefix
    if base is model:
        return 0
    if not {prefix, *(name for name, _ in base.named_children())} & {name.partition(".")[0] for name in headers}:
        raise UserError(
            f"{type(model).__name__} calls the base model {prefix}, and the folder has nothing of this name, so all "
            "weights would be random; open it with AutoModel, save that, and give the new folder"
        )
    known = {*headers, *model.all_tied_weights_keys}
    own = {name: p for name, p in model.named_parameters() if name not in known}
    return sum(p.numel() for name, p in own.items() if not name.startswith(f"{prefix}."))
