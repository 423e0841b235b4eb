"""Train a sentencepiece tokenizer on files of text, for models too small for the 32 000 pieces of T5's.

python scripts/train_tokenizer.py 'runs/wikipedia/train-*' --vocab-size 6400 --output runs/wikipedia-6400.model
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.errors import UserError, run_command
from salaad.common.validation import at_least
from salaad.data.documents import expand, read_documents, require_document
from salaad.data.tokenizer import train_tokenizer

LONGEST_LINE = 4192  # bytes; sentencepiece leaves out a longer line without a word
# A longer line is cut at spaces, or anywhere if it has none, into so many characters, of up to four bytes each. The
# tokenizer of python-docs was trained without the one such line there, and recorded results depend on it.
CUT = {"width": 1000, "expand_tabs": False, "replace_whitespace": False, "break_on_hyphens": False}


def main() -> None:
    """Train the tokenizer and write its model."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="paths or globs of what data.files takes")
    parser.add_argument("--vocab-size", type=int, required=True, help="pieces, as model.vocab_size")
    parser.add_argument("--output", type=Path, required=True, help="file to write, ending in .model")
    parser.add_argument("--characters", type=int, default=12_000_000, help="of text, evenly from all files")
    # These two also by their names in train.py, which the errors of a file give.
    parser.add_argument("--text-field", "--data.text_field", default="text", help="column of the text in the files")
    parser.add_argument("--max-bad-documents", "--data.max_bad_documents", type=int, default=100, help="in one file")
    options = parser.parse_args()
    at_least(options, 1, "vocab_size", "characters")
    at_least(options, 0, "max_bad_documents")
    if options.output.suffix != ".model":
        raise UserError(f"--output is {options.output}, but a tokenizer is opened by its ending; end it in .model")
    if options.output.exists():
        raise UserError(f"{options.output} is there already; give another --output, or remove it")
    files = expand(options.files)
    readable = {"field": options.text_field, "max_bad": options.max_bad_documents}
    for file in files:
        require_document(file, **readable)
    model = train_tokenizer(sentences(files, options.characters // len(files), **readable), options.vocab_size)
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_bytes(model)
    except OSError as error:
        raise UserError(f"--output {options.output} cannot be written ({error}); give a file you can write") from None
    print(f"Use it with --data.tokenizer {options.output} --model.vocab_size {options.vocab_size}")


def sentences(files: Sequence[str], share: int, **readable: Any) -> Iterator[str]:
    """Lines of text or parts of them, about `share` characters of every file; `readable` goes to `read_documents`."""
    for file in files:
        left = share
        for _, text in read_documents(file, **readable):
            if left <= 0:
                break
            if isinstance(text, str):
                left -= len(text)
                for line in text.split("\n"):
                    yield from [line] if len(line.encode()) <= LONGEST_LINE else wrap(line, **CUT)


if __name__ == "__main__":
    run_command(main)
