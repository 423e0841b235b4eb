"""A training run that takes seconds: its text, its tokenizer, its options. For the tests and for scripts/torture.py."""

import json
import os
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = (  # noqa: SIM905
    "a the of and to in it is was on matrix rank sparse low model train step loss weight value singular "
    "threshold gradient token text stream file row batch seed window cursor epoch resume exact number "
    "every other small large"
).split()
FILES = (("a", "train", 150), ("b", "train", 100), ("c", "train", 75), ("v", "validation", 60))
MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_documents(count: int, seed: int) -> list[str]:
    """Return distinct documents: two numbers, `seed` and that of the document, then 3 to 60 random words."""
    pick = random.Random(seed)
    return [f"{seed} {k} " + " ".join(pick.choices(WORDS, k=pick.randint(3, 60))) for k in range(count)]


def write_text(folder: Path) -> dict[str, list[str]]:
    """Write JSON lines; return split → files: `train` with 150, 100 and 75 documents, `validation` with 60."""
    files: dict[str, list[str]] = {"train": [], "validation": []}
    for name, split, count in FILES:
        path = folder / f"{name}.jsonl"
        documents = make_documents(count, seed=ord(name))
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        files[split].append(str(path))
    return files


def write_tokenizer(folder: Path) -> str:
    """Write a Hugging Face folder with a BPE tokenizer of at most 512 ids: pad 0, eos 1, unk 2; return its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_documents(300, seed=7), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def toy_arguments(text_files: dict[str, list[str]], tokenizer: str, **overrides: object) -> list[str]:
    """Command-line options of the run; `overrides` like train__steps=3."""
    options: dict[str, object] = {f"model__{key}": value for key, value in MODEL.items()}
    options |= {
        "model__vocab_size": 512,
        "data__source": "files",
        "data__files": json.dumps(text_files["train"]),
        "data__validation_files": json.dumps(text_files["validation"]),
        "data__tokenizer": tokenizer,
        "data__sequence_length": 32,
        "data__workers": 0,
        "train__steps": 12,
        "train__batch": 4,
        "train__log_every": 1,
        "train__eval_every": 0,
        "train__save_every": 0,
        "train__eval_tokens": 2000,
        "salaad__every": 3,
        "salaad__delta_alpha": 0.1,
        "salaad__delta_beta": 0.01,
        "salaad__rho_constant": 5.0,
    }
    options |= overrides
    return [f"--{key.replace('__', '.')}={value}" for key, value in options.items()]


def launch_command(arguments: list[str], output: Path, processes: int) -> tuple[list[str], dict[str, str]]:
    """`accelerate launch train.py` as a user types it, and its environment: one thread per process."""
    command = [str(Path(sys.executable).parent / "accelerate"), "launch"]
    if processes > 1:
        command += ["--config_file", "configs/accelerate/cpu2.yaml", "--num_processes", str(processes)]
        command += ["--main_process_port", "0"]
    return [*command, "train.py", *arguments, f"--output={output}"], os.environ | {"OMP_NUM_THREADS": "1"}
