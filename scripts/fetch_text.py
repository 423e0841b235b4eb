"""Download a sample of long English Wikipedia articles once, so that training needs no network.

    python scripts/fetch_text.py --output runs/wikipedia --documents 25000

The articles come evenly from all parts of the encyclopedia. A hash of each text decides whether it is for validation,
so no article is in both.
"""

import hashlib
import json
import lzma
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from salaad.common.errors import UserError, run_command
from salaad.common.files import new_folder
from salaad.common.validation import at_least
from salaad.data.documents import expand, is_remote, read_documents

PARTS = 41
WIKIPEDIA = tuple(
    f"hf://datasets/wikimedia/wikipedia/20231101.en/train-{part:05d}-of-{PARTS:05d}.parquet" for part in range(PARTS)
)
TRAIN_FILES = 10
VALIDATION_ONE_IN = 25
RETRIES = 6


def main() -> None:
    """Fetch what the command line asks for and print the commands that train tokenizers on it."""
    options = read_options()
    sources = [one for given in options.files for one in ([given] if is_remote(given) else expand([given]))]
    with new_folder(options.output) as folder:
        write(folder, sample(sources or WIKIPEDIA, options.documents, options.least))
    print("Everything is there. Train tokenizers of the sizes of micro and of nano-20 on it with:")
    for size in (6400, 4096):
        model = f"{options.output}-{size}.model"
        print(f"python scripts/train_tokenizer.py '{options.output}/train-*' --vocab-size {size} --output {model}")


def read_options() -> Namespace:
    """The command line, checked.

    Raises:
        UserError: a number below one.
    """
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/wikipedia"), help="folder to make")
    parser.add_argument("--documents", type=int, default=25_000, help="articles, validation included")
    parser.add_argument("--least", type=int, default=4_000, help="characters of the shortest article")
    parser.add_argument("--files", nargs="+", default=[], help="other sources than English Wikipedia: files or globs")
    options = parser.parse_args()
    at_least(options, 1, "documents", "least")
    return options


def sample(sources: Sequence[str], count: int, least: int) -> Iterator[str]:
    """Yield `count` texts of at least `least` characters, the first of every source, evenly; later sources fill gaps.

    Raises:
        UserError: all sources together hold fewer than `count`.
    """
    left = count
    with tqdm(total=count, unit="article", disable=not sys.stdout.isatty()) as progress:
        for number, source in enumerate(sources):
            if not left:
                break
            share = -(-left // (len(sources) - number))
            documents = (text for _, text in read_documents(source, retries=RETRIES) if isinstance(text, str))
            for text in documents:
                if len(text) < least:
                    continue
                yield text
                progress.update()
                left -= 1
                share -= 1
                if not share:
                    break
    if left:
        raise UserError(
            f"there are only {count - left} texts of {least} characters, not {count}; give fewer --documents or a "
            "smaller --least"
        )


def write(folder: Path, texts: Iterator[str]) -> None:
    """Spread texts over train-*.jsonl.xz and validation.jsonl.xz by their hashes."""
    with ExitStack() as stack:
        train = [stack.enter_context(_compressed(folder / f"train-{k:05d}.jsonl.xz")) for k in range(TRAIN_FILES)]
        validation = stack.enter_context(_compressed(folder / "validation.jsonl.xz"))
        for text in texts:
            place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
            file = train[place // VALIDATION_ONE_IN % TRAIN_FILES] if place % VALIDATION_ONE_IN else validation
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def _compressed(path: Path) -> lzma.LZMAFile:
    return lzma.open(path, "wt", preset=1, encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
