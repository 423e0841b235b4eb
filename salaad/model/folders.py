"""Hugging Face folders made by others: where a model of the hub lies on disk, and files besides config and weights.

Tokenizers are opened in `salaad.data.tokenizer`; this module only tells whether a folder has one.
"""

import re
from contextlib import suppress
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from salaad.common.errors import UserError
from salaad.common.files import at_home, inside, is_file
from salaad.model.weight_headers import weight_files

# Files to download: configuration, weights, tokenizers, licence and model card; not the same weights in other formats,
# nor subfolders, except the one that L and S may be in. The hub's patterns know no exceptions, so there is one pattern
# for every letter in which another name may begin to differ, and one for every name that ends before it.
_SUBFOLDER = "surrogate"
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.md", "LICENSE*", "LICENCE*", "NOTICE*"]
_UNWANTED = [
    "consolidated*",
    *(f"{_SUBFOLDER[:i]}[!{letter}]*/*" for i, letter in enumerate(f"{_SUBFOLDER}/")),
    *(f"{_SUBFOLDER[:i]}/*" for i in range(1, len(_SUBFOLDER))),
    f"{_SUBFOLDER}/*/*",
]
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt")
_TERMS = re.compile(r"(licen[sc]e|notice|copying)([._-].*)?", re.IGNORECASE)
CARD, SOURCE_CARD = "README.md", "README.source.md"


def local_folder(name: str, option: str) -> Path:
    """Return the folder of a model: `name` itself if it is a path, else the hub cache's folder of the model `name`.

    A model that is not in the cache, or only in part, is downloaded. Where that fails, weights in the cache are enough,
    since a model may have no tokenizer.

    Args:
        name: a path, or the name of a model on the hub, such as `openai-community/gpt2`.
        option: the option by which the user gave `name`, for error messages.

    Raises:
        UserError: there is no such folder, and neither the cache nor the hub has a model of this name.
    """
    if not is_hub_name(name):
        return at_home(name)
    cached = None
    with suppress(OSError):
        cached = Path(_snapshot(name, local=True))
    weights_are_cached = cached is not None and _has_weights(cached)
    if weights_are_cached and has_tokenizer(cached):
        return cached
    try:
        folder = Path(_snapshot(name, local=False))
    except Exception as error:  # no network, no such name, no access, a full disk
        if weights_are_cached:
            return cached
        raise UserError(
            f"{option} {name} is no folder, and no model of this name is in the hub's cache or can be had from the hub "
            f"({type(error).__name__}); give an existing folder, or fetch the model with: hf download {name}"
        ) from None
    if not _has_weights(folder):
        raise UserError(
            f"{option} {name} lies in the hub's cache without its weights, or they are no safetensors ({folder}); give "
            f"another folder, or fetch the model with: hf download {name}"
        )
    return folder


def is_hub_name(name: str) -> bool:
    """Whether `name` can only be a hub model: `org/name` or `name`, with no such path and no folder `org` here."""
    try:
        validate_repo_id(name)
        return not Path(name).exists() and ("/" not in name or not Path(name).parent.exists())
    except (HFValidationError, OSError):
        return False


def is_cached(name: str) -> bool:
    """Whether `name` is the name of a model that is in the hub's cache."""
    return is_hub_name(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except UserError:
        return False


def _snapshot(name: str, local: bool) -> str:
    return snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=local)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any(is_file(folder / name) for name in _TOKENIZERS) or any(folder.glob("*.model"))


def terms_of(source: Path) -> dict[str, bytes]:
    """Return name → content of a folder's licence and notices, and of its model card under `README.source.md`.

    A link that leads out of `source` is not followed: what lies there may not be meant to be published.
    """
    names = {path.name: path.name for path in sorted(source.iterdir()) if _TERMS.fullmatch(path.name)}
    card = next((name for name in (SOURCE_CARD, CARD) if is_file(source / name)), None)
    contents = {}
    for name, own in {**names, **({card: SOURCE_CARD} if card else {})}.items():
        with suppress(UserError):
            if is_file(file := inside(source, name)):
                contents[own] = file.read_bytes()
    return contents


def carry_over(source: Path, target: Path) -> None:
    """Copy from one folder to another what `terms_of` finds."""
    for name, content in terms_of(source).items():
        (target / name).write_bytes(content)
