"""Tokenizers against sentencepiece itself, and against themselves after saving to a model folder."""

import hashlib
import json
import pickle
import random
import string

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from salaad.common.errors import UserError
from salaad.data.tokenizer import Encoder, load_tokenizer, text_pieces, tokenizer_digest, tokenizer_to_copy
from scripts.reliability.toy_run import make_documents

SPELT_OUT = "the </s> ends, <pad> fills, <unk> and <0x41> are spelt out"
TEXTS = [
    "the low rank of a matrix", " leading and trailing ", "two  spaces", "a\nnew line\tand a tab", "", " ",
    "日本 é ﬁ ½ 👩‍👩‍👧", "a<sep>b <sep> c", SPELT_OUT, *make_documents(50, seed=3),
]  # fmt: skip


def train(folder, **options):
    standard = {"vocab_size": 600, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "minloglevel": 2}
    # Alphabet and punctuation often enough that every ASCII sign becomes a piece.
    letters = [f"{string.printable.strip()} {word}" for word in make_documents(30, seed=1)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_documents(2000, seed=2) + letters),
        model_prefix=str(folder / "spiece"),
        hard_vocab_limit=False,
        **(standard | options),
    )
    return str(folder / "spiece.model")


PLAIN = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS = {
    "unigram": PLAIN,
    "bpe": PLAIN | {"model_type": "bpe"},
    "t5": {"character_coverage": 1.0},  # folds spaces and compatibility characters, knows no bytes
    "no dummy prefix": PLAIN | {"add_dummy_prefix": False},
    "bos": PLAIN | {"bos_id": 3},
    "user-defined pieces": PLAIN | {"add_dummy_prefix": False, "user_defined_symbols": ["<sep>", "\n"]},
    "pieces with spaces inside": PLAIN | {"split_by_whitespace": False},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return train(tmp_path_factory.mktemp("sp"), **KINDS[request.param])


@pytest.fixture(scope="module")
def lossless(tmp_path_factory):
    return Lossless(train(tmp_path_factory.mktemp("sp"), **PLAIN))


class Lossless:
    """A byte-fallback tokenizer, opened once for many examples."""

    def __init__(self, path):
        self.tokenizer = load_tokenizer(path)
        self.encode = Encoder(self.tokenizer)
        self.reference = sentencepiece.SentencePieceProcessor(model_file=path)


def test_ids_are_those_of_sentencepiece(model):
    reference = sentencepiece.SentencePieceProcessor(model_file=model)
    encoded = Encoder(load_tokenizer(model))(TEXTS)
    assert [ids.tolist() for ids in encoded] == reference.encode(TEXTS)


@pytest.mark.parametrize("architecture", [None, LlamaConfig])
def test_a_model_folder_keeps_ids_and_special_tokens(tmp_path, model, architecture):
    tokenizer = load_tokenizer(model)
    tokenizer.save_pretrained(tmp_path)
    if architecture:
        architecture(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXTS).input_ids == tokenizer(TEXTS).input_ids
    assert (again.eos_token_id, again.pad_token_id, again.unk_token_id) == (1, 0, 2)
    assert [again.decode(ids) for ids in again(TEXTS).input_ids] == [
        tokenizer.decode(ids) for ids in tokenizer(TEXTS).input_ids
    ]


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from(" \n<>/s0xé") | st.characters(codec="utf-8", exclude_characters="▁"), max_size=40))
def test_byte_fallback_loses_no_text(lossless, text):
    """U+2581 is excluded: it is sentencepiece's own sign for a space."""
    ids = lossless.encode([text])[0].tolist()
    if "\0" not in text:  # sentencepiece itself ends a text at NUL
        # Of two segmentations that are equally probable, such as of "00000" into "00 00 0" and "0 00 00", either may be
        # taken; their log-probabilities, sums of some dozen float32 scores around 10, agree to rounding.
        found, expected = (
            sum(map(lossless.reference.get_score, chosen)) for chosen in (ids, lossless.reference.encode(text))
        )
        assert found == pytest.approx(expected, abs=1e-3)
    assert lossless.tokenizer.decode(ids) == text


def test_special_tokens_spelt_out_in_a_text_stay_text(lossless, tiny_tokenizer_dir):
    for tokenizer in (lossless.tokenizer, load_tokenizer(tiny_tokenizer_dir)):
        ids = Encoder(tokenizer)([SPELT_OUT])[0].tolist()
        assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
        assert tokenizer.decode(ids) == SPELT_OUT


def test_a_text_with_nul_and_the_name_of_a_special_token_has_no_special_token(lossless):
    ids = Encoder(lossless.tokenizer)(["a\0</s>b", "\0<pad>"])
    special = {lossless.tokenizer.eos_token_id, lossless.tokenizer.pad_token_id}
    assert not any(special & set(each.tolist()) for each in ids)


def t5_like(folder, sentinels=100):
    """A unigram tokenizer that lists its sentinels as pieces and as added tokens, as t5-base does."""
    letters = [(sign, -5.0) for sign in "▁" + string.printable.strip()]
    names = [f"<extra_id_{k}>" for k in reversed(range(sentinels))]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters, *((name, 0.0) for name in names)]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.enable_truncation(5)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", extra_special_tokens=names
    ).save_pretrained(folder)
    return load_tokenizer(str(folder)), 3 + len(letters)


def test_sentinels_do_not_count_and_text_never_produces_them(tmp_path):
    tokenizer, pieces = t5_like(tmp_path)
    assert (text_pieces(tokenizer), len(tokenizer)) == (pieces, pieces + 100)
    (ids,) = Encoder(tokenizer)(["a <extra_id_0> and </s> and some more"])
    assert ids.max() < pieces
    assert ids.min() > 2
    assert len(ids) > 30  # what the folder says about truncation does not count


def after_special(folder, kind):
    """A tokenizer with tokens of text, `<think>` and `</think>`, behind special ones behind its vocabulary, as Qwen's.

    Its end, `<|im_end|>`, has the largest id of the special ones.
    """
    signs = string.printable + "\0"
    if kind == "unigram":
        backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((sign, -5.0) for sign in signs)], unk_id=0))
    else:
        backend = Tokenizer(models.BPE({sign: k for k, sign in enumerate(signs)}, []))
    backend.decoder = decoders.Fuse()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_tokens_of_text_behind_special_ones_keep_their_ids(tmp_path, kind):
    tokenizer = after_special(tmp_path, kind)
    text = "a<think>b</think> c"
    encoder = Encoder(tokenizer)
    assert encoder([text])[0].tolist() == tokenizer(text, add_special_tokens=False).input_ids
    for encode in (encoder, pickle.loads(pickle.dumps(encoder))):  # a worker may get it so
        for spelt_out in ("x<|im_end|>y<think>", "x\0<|im_end|>y<think>"):
            ids = encode([spelt_out])[0].tolist()
            assert ids[-1] == tokenizer.convert_tokens_to_ids("<think>")
            assert not set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} & set(ids)
            assert len(ids) == len(spelt_out) - len("<think>") + 1  # every sign is a piece


def digest_of_all_but_calls(tokenizer):
    parts = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return hashlib.sha256(json.dumps([parts, tokenizer.eos_token_id]).encode()).hexdigest()[:16]


def test_only_tokenizers_whose_ids_were_others_once_have_another_digest(tmp_path, model, tiny_tokenizer_dir):
    """So a run with wrong ids is not gone on with, and every other run is."""
    same = [load_tokenizer(model), load_tokenizer(tiny_tokenizer_dir), t5_like(tmp_path / "t5")[0]]
    same.append(load_tokenizer(model))
    same[-1].add_tokens(["<think>"])
    same[-1].add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    assert [tokenizer_digest(tokenizer) for tokenizer in same] == [digest_of_all_but_calls(each) for each in same]
    for kind in ("unigram", "bpe"):
        other = after_special(tmp_path / kind, kind)
        assert tokenizer_digest(other) != digest_of_all_but_calls(other)


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_the_type_of_the_model_beside_it_replaces_no_part_of_a_tokenizer(kind, tmp_path, tiny_tokenizer_dir):
    source = train(tmp_path, **PLAIN) if kind == "sentencepiece" else tiny_tokenizer_dir
    saved = load_tokenizer(source)
    saved.save_pretrained(tmp_path / "model")
    Qwen2Config(vocab_size=len(saved)).save_pretrained(tmp_path / "model")
    written = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))  # read without transformers
    for again in (load_tokenizer(str(tmp_path / "model")), tokenizer_to_copy(tmp_path / "model")):
        assert again(TEXTS).input_ids == [written.encode(text).ids for text in TEXTS] == saved(TEXTS).input_ids
        assert tokenizer_digest(again) == tokenizer_digest(saved)
        assert (again.eos_token_id, again.pad_token_id) == (saved.eos_token_id, saved.pad_token_id)


def test_padding_is_defined_where_the_tokenizer_has_none(tmp_path, tiny_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("added", [True, False])
def test_a_beginning_counts_where_it_is_put_before_texts(added):
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.add_special_tokens(["<s>"])
    if added:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    assert text_pieces(tokenizer) == 1 + max([2, *tokenizer("a")["input_ids"]])


def test_unknown_words_count():
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 500}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]")
    assert text_pieces(tokenizer) == 1 + Encoder(tokenizer)(["b"])[0].max() == 501


def test_a_tokenizer_json_is_opened_with_what_lies_beside_it(tiny_tokenizer_dir):
    tokenizers = [load_tokenizer(spec) for spec in (tiny_tokenizer_dir, f"{tiny_tokenizer_dir}/tokenizer.json")]
    assert len({tokenizer_digest(tokenizer) for tokenizer in tokenizers}) == 1
    assert len({(tokenizer.eos_token_id, tokenizer.pad_token_id) for tokenizer in tokenizers}) == 1


def test_a_tokenizer_without_an_end_is_refused(tmp_path, tiny_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


def test_what_is_no_tokenizer_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "some.model").write_bytes(b"no model at all")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"nothing": 1}))
    cases = {
        str(tmp_path / "gone.model"): "does not exist",
        str(tmp_path / "some.model"): "no sentencepiece model",
        str(tmp_path): "check the files in this folder",
        f"nobody/{random.random()}": r"scripts/fetch_c4\.py",
    }
    for spec, sentence in cases.items():
        with pytest.raises(UserError, match=sentence) as error:
            load_tokenizer(spec)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="neither unigram nor BPE"):
        load_tokenizer(train(tmp_path, model_type="char", vocab_size=90))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"user_defined_symbols": ["<sep>"]},
            r"has user-defined pieces such as '<sep>', .*; give a folder with its tok",
        ),
        ({"treat_whitespace_as_suffix": True}, "has spaces at the ends of its pieces, .*; give a folder with its tok"),
    ],
)
def test_a_model_of_which_a_fast_tokenizer_gives_other_ids_is_refused(tmp_path, options, sentence):
    with pytest.raises(UserError, match=sentence):
        load_tokenizer(train(tmp_path, **PLAIN, **options))
