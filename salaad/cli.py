"""From the command line to a `RunConfig`: YAML beneath, `--section.key value` above, every error one sentence."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from salaad.config import RunConfig
from salaad.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

# The oldest version of the library's own warnings is about its next release, not about the user's input.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
set_parsing_settings(validate_defaults=False)


@dataclass(frozen=True)
class TrainOptions:
    """What belongs to this launch and not to the run.

    Args:
        output: the run's folder; runs/CONFIG-METHOD when none is given.
        resume: auto goes on from the newest checkpoint of the output folder if there is one, none insists on a new
            folder, anything else is the checkpoint folder to go on from.
        dry_run: print the plan (parameters, tokens, blocks per owner, memory, operations) and stop.
    """

    output: str | None = None
    resume: str = "auto"
    dry_run: bool = False


def read_command_line(arguments: Sequence[str] | None = None) -> tuple[RunConfig, TrainOptions]:
    """Parse the command line of train.py.

    Raises:
        UserError: an unknown key (with the nearest known one), a wrong type, a value out of range, a missing file.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(
        prog="train.py",
        description="Pretrain a language model with SALAAD, or full-rank beside it.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file, by path or by its name in configs/")
    parser.add_class_arguments(TrainOptions, skip={"dry_run"})
    parser.add_argument("--dry-run", action="store_true", help="print the plan (memory, owners, operations) and stop")
    parser.add_class_arguments(RunConfig)
    try:
        parsed = parser.parse_args(_find_configs(arguments))
        instantiated = parser.instantiate(parsed)
    except argparse.ArgumentError as error:
        raise UserError(_sentence(str(error), parser)) from None
    config = RunConfig(**{f.name: instantiated[f.name] for f in fields(RunConfig)})
    options = TrainOptions(**{f.name: instantiated[f.name] for f in fields(TrainOptions)})
    if options.output is None:
        stem = Path(parsed.config[-1].relative).stem if parsed.config else "run"
        options = TrainOptions(f"runs/{stem}-{config.method}", options.resume, options.dry_run)
    return config, options


def _find_configs(arguments: list[str]) -> list[str]:
    """Turn the bare name behind --config into a path, and a run's own config.yaml into one that can be read again."""
    found, expecting = [], False
    for argument in arguments:
        name = argument if expecting else argument.removeprefix("--config=")
        if expecting or name != argument:
            argument = ("" if expecting else "--config=") + str(_config_path(name))
        expecting = argument == "--config"
        found.append(argument)
    return found


def _config_path(name: str) -> Path:
    places = [Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"]
    for place in places:
        if place.is_file():
            return place
    known = ", ".join(sorted(path.name for path in CONFIGS.glob("*.yaml")))
    raise UserError(f"--config {name} is no file and not in {CONFIGS.name}/; give a path or one of {known}")


def _sentence(message: str, parser: ArgumentParser) -> str:
    """The library's message on one line, with the nearest known key where a key is unknown."""
    message = " ".join(message.split())
    unknown = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    key = f"{unknown[1]}.{unknown[2]}" if unknown else None
    if key is None:
        plain = re.search(r"Option '([\w.]+)' is not accepted|[Uu]nrecognized arguments: --([\w.-]+)", message)
        key = (plain[1] or plain[2]) if plain else None
    if key is None:
        wrong = re.search(r'Parser key "([\w.]+)": (.*)', message)
        if wrong:
            return f"{wrong[1]}: {wrong[2].rstrip('.')}; see train.py --help for what it takes"
        return message
    known = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.3)
    cure = f"did you mean {near[0]}?" if near else "see train.py --help for the keys"
    return f"there is no option {key}; {cure}"


def write_config(config: RunConfig, comments: Sequence[str], path: Path) -> None:
    """Write the resolved configuration, readable by --config again, with `comments` as its first lines."""
    text = "".join(line + "\n" for line in comments) + yaml.safe_dump(config.to_dict(), sort_keys=False)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text)
    temporary.replace(path)
