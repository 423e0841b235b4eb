"""Tokenizers from a hub name, a folder or a sentencepiece model, as transformers' fast tokenizers."""

import hashlib
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as spm
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from salaad.common.errors import UserError
from salaad.common.files import at_home, is_file, read_object
from salaad.model.folders import has_tokenizer

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # piece types of the sentencepiece format
SPACE = "▁"
# Names that tokenizer_config.json gives the class of a tokenizer that is all in its tokenizer.json.
_ALL_IN_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")
_HIDDEN = "\0no part of a text\0"  # before the names of special tokens, so that no text has them
_LARGEST_CONFIG = 2**22  # bytes of a file other than the vocabulary; reading it takes a hundred times as much memory


def load_tokenizer(spec: str) -> PreTrainedTokenizerFast:
    """Open a tokenizer; its end-of-sequence and padding tokens are defined, and `save_pretrained` saves it completely.

    A folder's tokenizer.json is used as it is. transformers' own `AutoTokenizer` replaces parts of it beside a model of
    some types, such as qwen2 and qwen3_5, so it may give other ids there.

    Args:
        spec: a hub name, a folder with a tokenizer, its tokenizer.json, or a sentencepiece `.model` file.

    Raises:
        UserError: there is none, it needs code of its own, or it has no fast version or no end-of-sequence token.
    """
    path = at_home(spec)
    if path.name == "tokenizer.json":
        path = path.parent  # whose other files say which tokens end and pad
    if spec.endswith(".model"):
        if not path.is_file():
            raise UserError(f"tokenizer {spec} does not exist; give an existing .model file, a folder or a hub name")
        tokenizer = from_sentencepiece(path)
    else:
        tokenizer = _from_transformers(str(path) if path.exists() else spec, local=path.exists())
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {spec} has no fast version; give one with a tokenizer.json")
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {spec} has no end-of-sequence token; give one that defines eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_to_copy(folder: Path) -> PreTrainedTokenizerBase:
    """Open a folder's tokenizer as its author saved it: what reading text would need is neither required nor added.

    Raises:
        UserError: there is none, or it needs code of its own.
    """
    return _from_transformers(str(folder), local=True)


def can_read_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `load_tokenizer` takes a tokenizer that `tokenizer_to_copy` has opened."""
    return tokenizer.is_fast and tokenizer.eos_token_id is not None


def _from_transformers(spec: str, local: bool) -> PreTrainedTokenizerBase:
    if local:
        if Path(spec).is_dir() and not has_tokenizer(Path(spec)):
            raise UserError(f"{spec} holds no tokenizer; put its files there, or name another folder by data.tokenizer")
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
            if is_file(Path(spec) / name):
                read_object(Path(spec) / name, _LARGEST_CONFIG)
    opener = PreTrainedTokenizerFast if local and _is_all_in_file(Path(spec)) else AutoTokenizer
    try:
        try:  # the cache first: without a network the hub's client retries for most of a minute
            tokenizer = opener.from_pretrained(spec, trust_remote_code=False, local_files_only=True)
        except OSError:
            if local:
                raise
            tokenizer = opener.from_pretrained(spec, trust_remote_code=False)
    except Exception as error:
        # Errors of any class: no network, no such name, a damaged JSON file, missing code.
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        cure = (
            "check the files in this folder"
            if local
            else "connect to the hub, fetch it once with scripts/fetch_c4.py, or give data.tokenizer a folder or "
            ".model file, such as scripts/train_tokenizer.py makes of your own text"
        )
        raise UserError(f"tokenizer {spec} cannot be opened ({reason}); {cure}") from error
    return tokenizer


def _is_all_in_file(folder: Path) -> bool:
    """Whether a folder says that its tokenizer is its tokenizer.json, which `AutoTokenizer` does not always believe."""
    config = folder / "tokenizer_config.json"
    if not (is_file(folder / "tokenizer.json") and is_file(config)):
        return False
    return read_object(config, _LARGEST_CONFIG).get("tokenizer_class") in _ALL_IN_FILE


def from_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """Convert a sentencepiece model, unigram or BPE, to a fast tokenizer with the same ids.

    Raises:
        UserError: the file is no sentencepiece model, or of a type without a fast counterpart (word, char).
    """
    proto = spm.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise UserError(f"tokenizer {path} is no sentencepiece model ({error}); give another file") from error
    if proto.trainer_spec.model_type not in (spm.TrainerSpec.UNIGRAM, spm.TrainerSpec.BPE):
        raise UserError(f"tokenizer {path} is neither unigram nor BPE; give a sentencepiece model of these types")
    _require_same_ids(path, proto)
    backend = Tokenizer(_model(proto))
    steps = _normalizers(proto)
    backend.normalizer = normalizers.Sequence(steps) if steps else None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=_splits_at_spaces(proto))
    fallback = [decoders.ByteFallback(), decoders.Fuse()] if proto.trainer_spec.byte_fallback else [decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *fallback, *strip])
    backend.add_tokens(
        [
            AddedToken(piece.piece, normalized=False, special=piece.type == CONTROL)
            for piece in proto.pieces
            if piece.type in (CONTROL, USER_DEFINED)
        ]
    )
    trainer = proto.trainer_spec
    ids = {"bos": trainer.bos_id, "eos": trainer.eos_id, "unk": trainer.unk_id, "pad": trainer.pad_id}
    special = {f"{name}_token": proto.pieces[index].piece for name, index in ids.items() if index >= 0}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _require_same_ids(path: Path, proto: spm.ModelProto) -> None:
    """Raise a UserError for settings with which a fast tokenizer would give other ids than the sentencepiece model."""
    cure = "give a folder with its tokenizer.json instead"
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(f"tokenizer {path} has spaces at the ends of its pieces, which no fast tokenizer has; {cure}")
    spec, own = proto.normalizer_spec, [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    if own and (spec.add_dummy_prefix or spec.remove_extra_whitespaces):
        raise UserError(
            f"tokenizer {path} has user-defined pieces such as {own[0]!r}, and adds or removes spaces once in a text, "
            f"which a fast tokenizer would do around each of these pieces; {cure}"
        )


def train_tokenizer(sentences: Iterable[str], vocab_size: int) -> bytes:
    """Train a sentencepiece model of `vocab_size` unigram pieces, with all bytes so no text is lost; return its file.

    Pieces 0, 1, 2 are padding, end and unknown, as in T5; there is no beginning-of-sequence token.

    Raises:
        UserError: the sentences are too few for so many pieces, or the number is too small.
    """
    model = BytesIO()  # not a file, as the model would contain its name
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            character_coverage=0.9995,
            # Otherwise "<0x41>" in a text would become the byte A if "<" is no piece.
            required_chars=string.printable.strip(),
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=4,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0][-200:]
        raise UserError(
            f"no tokenizer of a vocab_size of {vocab_size} can be trained on this text ({reason}); give another "
            f"number, usually 512 to 32000, or more text"
        ) from error
    return model.getvalue()


def _model(proto: spm.ModelProto) -> models.Model:
    trainer = proto.trainer_spec
    if trainer.model_type == spm.TrainerSpec.BPE:
        ids = {piece.piece: index for index, piece in enumerate(proto.pieces)}
        return models.BPE(
            ids, _merges(proto), unk_token=trainer.unk_piece, fuse_unk=True, byte_fallback=trainer.byte_fallback
        )
    # In a text, "</s>" must not become the control token nor "<0x41>" a byte, so any other split has to score better.
    worst = 10 * min(piece.score for piece in proto.pieces)
    scores = [(piece.piece, worst if piece.type in (UNKNOWN, CONTROL, BYTE) else piece.score) for piece in proto.pieces]
    return models.Unigram(scores, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)


def _merges(proto: spm.ModelProto) -> list[tuple[str, str]]:
    """BPE merges in the order of sentencepiece: the pair whose joined piece has the best score is merged first."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type not in (CONTROL, BYTE)}
    joined = sorted((piece for piece in scores if len(piece) > 1), key=lambda piece: -scores[piece])
    return [
        (piece[:cut], piece[cut:])
        for piece in joined
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]


def _normalizers(proto: spm.ModelProto) -> list[normalizers.Normalizer]:
    spec = proto.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))  # Metaspace adds no prefix to a text that begins with a space
    return steps


def _splits_at_spaces(proto: spm.ModelProto) -> bool:
    """Whether no piece has a space after its first character, so that text can be split at spaces, much faster."""
    return not any(SPACE in piece.piece.lstrip(SPACE) or piece.piece.startswith(SPACE * 2) for piece in proto.pieces)


def text_pieces(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return 1 + the largest id that reading text gives: sentinels as T5's, and a BOS put before none, do not count."""
    sentinels = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    sentinels -= {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, beginning_id(tokenizer)}
    return 1 + max(index for index in tokenizer.get_vocab().values() if index not in sentinels)


def beginning_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the id that a tokenizer puts before every text (BOS); None if it puts none there, as T5's and GPT-2's."""
    ids = tokenizer("a").input_ids
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """A digest of how a tokenizer turns text into ids, whatever its name and its place are."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts.update(truncation=None, padding=None)  # calls of the tokenizer set them
    # `Encoder` once gave some added tokens other ids than the tokenizer; no run may go over from those to these.
    remark = ["own ids of added tokens"] if _has_text_after_special(parts) else []
    return hashlib.sha256(json.dumps([parts, tokenizer.eos_token_id, *remark]).encode()).hexdigest()[:16]


def _pieces(model: Mapping[str, Any]) -> set[str]:
    """Return the vocabulary of a tokenizer's model: pieces with scores if it is a unigram model, otherwise with ids."""
    return {entry[0] if isinstance(entry, list) else entry for entry in model["vocab"]}


def _has_text_after_special(parts: Mapping[str, Any]) -> bool:
    """Whether the id of a token of text is counted from special tokens: both are added behind the vocabulary."""
    pieces = _pieces(parts["model"])
    special = [token["special"] for token in parts["added_tokens"] if token["content"] not in pieces]
    return special != sorted(special)


class Encoder:
    """An encoder of many texts to ids at once, which tokenises the name of a special token in a text as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        special = {token["content"] for token in parts["added_tokens"] if token["special"]}
        # Special tokens behind the vocabulary stay, as the ids of later tokens are counted from them. Under their own
        # names they would match text in a process that has this object by pickling, which loses the flag set in calls.
        # Those of the vocabulary would be looked up there, and are left out.
        kept = special - _pieces(parts["model"])
        parts["added_tokens"] = [
            token | {"content": _HIDDEN + token["content"]} if token["special"] else token
            for token in parts["added_tokens"]
            if not token["special"] or token["content"] in kept
        ]
        parts.update(post_processor=None, truncation=None, padding=None)
        if parts["model"]["type"] == "Unigram":
            # A unigram model may list special tokens among its pieces (T5 lists all), so they would match text.
            parts["model"]["vocab"] = [
                [_HIDDEN + piece if piece in special else piece, score] for piece, score in parts["model"]["vocab"]
            ]
        self.backend = Tokenizer.from_str(json.dumps(parts))

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of every text, int32 [tokens]."""
        self.backend.encode_special_tokens = True  # that a text with "\0" is text as well
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]
