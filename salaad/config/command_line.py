"""From the command line to a `RunConfig`: YAML beneath, `--section.key value` above, every error one sentence."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from salaad.common.errors import UserError
from salaad.common.files import CHECKOUT, is_file, replacing
from salaad.common.validation import check, require_types
from salaad.config.methods import SETTINGS
from salaad.config.run import DataConfig, RunConfig

CONFIGS = CHECKOUT / "configs"
_LARGEST_YAML, _DEEPEST_YAML = 2**18, 8  # bytes; ours have a thousandth of it, and three levels
_LONGEST_VALUE = 3500  # characters; Python writes out no number of more than 4300 digits

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
    parser.add_class_arguments(RunConfig, skip={"sections"})
    settings = {name: kind for name, kind in SETTINGS.items() if fields(kind)}
    for name, kind in settings.items():
        parser.add_class_arguments(kind, name)
    kinds = [(RunConfig, ""), *((kind, name) for name, kind in settings.items())]
    parsed, instantiated = _parse(parser, _find_configs(arguments), *kinds)
    own = {f.name: instantiated[f.name] for f in fields(RunConfig) if f.name != "sections"}
    config = RunConfig(**own, sections={name: instantiated[name] for name in settings})
    options = TrainOptions(**{f.name: instantiated[f.name] for f in fields(TrainOptions)})
    if options.output is None:
        stem = Path(parsed.config[-1].relative).stem if parsed.config else "run"
        options = TrainOptions(f"runs/{stem}-{config.method}", options.resume, options.dry_run)
    return config, options


class Command(NamedTuple):
    """What a command line asks for.

    Args:
        name: the subcommand.
        options: its options.
        model: whatever `open_model` made of --checkpoint.
        data: the data settings, if the subcommand takes any.
    """

    name: str
    options: Any
    model: Any
    data: DataConfig | None


def read_options(
    program: str,
    description: str,
    commands: Mapping[str, type],
    open_model: Callable[[Path], Any],
    with_data: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> Command:
    """Parse the command line of a program with subcommands, or with none if the only one is named "".

    Args:
        program: its file name.
        description: one sentence.
        commands: subcommand → dataclass of its options, `checkpoint` among them.
        open_model: opens and checks what --checkpoint names, once; the configuration of the run that trained it is its
            attribute `run`.
        with_data: subcommands that also take --data.*, whose defaults are the settings the checkpoint was trained with.
        arguments: without the program's name; those of this process unless given.

    Raises:
        UserError: as `read_command_line`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in arguments if word in commands), "")
    if command not in commands:
        shown = [word for word in arguments if not word.startswith("-")][:1]
        if not {"-h", "--help"} & set(arguments):
            raise UserError(f"{program} has no command {' '.join(shown)!r}; give one of {', '.join(commands)}")
        print(f"usage: {program} {{{','.join(commands)}}} --help\n\n{description}\n")
        for name, kind in commands.items():
            print(f"  {name:11} {kind.__doc__.splitlines()[0]}")
        sys.exit(0)
    arguments.remove(command) if command else None
    kind = commands[command]
    parser = ArgumentParser(
        prog=f"{program} {command}".strip(),
        description=kind.__doc__.splitlines()[0],
        exit_on_error=False,
        allow_abbrev=False,
    )
    arguments = _as_python_names(arguments, kind)
    parser.add_class_arguments(kind)
    model = None
    if command in with_data:
        parser.add_class_arguments(DataConfig, "data")
        checkpoint = _checkpoint_of(arguments)
        if checkpoint is not None:
            model = open_model(Path(checkpoint))
            parser.set_defaults(_trained_with(model.run, arguments))
    _, instantiated = _parse(parser, arguments, *([(DataConfig, "data")] if command in with_data else []))
    options = kind(**{f.name: instantiated[f.name] for f in fields(kind)})
    return Command(command, options, model or open_model(Path(options.checkpoint)), instantiated.get("data"))


def _as_python_names(arguments: list[str], kind: type) -> list[str]:
    """Options as documented, `--task-data DIR` and a bare `--rpca`, in the library's form."""
    switches = {f"--{f.name}" for f in fields(kind) if f.type is bool}
    named = [re.sub(r"^--[a-z-]+", lambda match: "--" + match[0][2:].replace("-", "_"), word) for word in arguments]
    following = [*named[1:], ""]
    return [
        f"{word}=true" if word in switches and value not in ("true", "false") else word
        for word, value in zip(named, following, strict=True)
    ]


def _checkpoint_of(arguments: list[str]) -> str | None:
    """The value of --checkpoint, before anything else is parsed."""
    scanner = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    scanner.add_argument("--checkpoint")
    return scanner.parse_known_args(arguments)[0].checkpoint


def _trained_with(run: Mapping[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Defaults of --data.*: those of the run that trained the model; of another text, how rows are cut."""
    data = run.get("data", {})
    other = any(argument.startswith("--data.source") for argument in arguments)
    # The tokenizer lies with the model; where it once came from may be gone.
    kept = ("sequence_length", "packing") if other else [key for key in data if key != "tokenizer"]
    return {f"data.{key}": data[key] for key in kept if key in data}


def _parse(parser: ArgumentParser, arguments: list[str], *kinds: tuple[type, str]) -> tuple[Any, Any]:
    """What is given, as read and as made; `kinds` are the dataclasses in it and their keys, whose types are compared.

    The library itself takes null for a value of any type.
    """
    try:
        parsed = parser.parse_args(arguments)
        for kind, name in kinds:
            require_types(kind, parsed if not name else parsed[name], name)
        return parsed, parser.instantiate(parsed)
    except argparse.ArgumentError as error:
        raise UserError(_sentence(str(error), parser)) from None
    except (UserError, MemoryError):
        raise
    except Exception as error:
        # The library promises the one above. A file can make it raise others, by keys with dots, by a number where a
        # section belongs or by digits without end, from wherever in it the value first meets an operation.
        raise UserError(f"what is set is no configuration ({error}); see {parser.prog} --help") from None


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
        if is_file(place):
            read_plain_yaml(place)  # refuses what the library would choke on
            return place
    known = ", ".join(sorted(path.name for path in CONFIGS.glob("*.yaml")))
    raise UserError(f"--config {name} is no file and not in {CONFIGS.name}/; give a path or one of {known}")


def read_plain_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that is a plain tree of named sections with one value a key.

    A reader of YAML can be kept busy for good: by an alias of an alias of an alias, which a line turns into gigabytes,
    or by brackets in brackets, which a parser follows until its stack is full. Nothing of that belongs in a
    configuration, and it shows before a value is made.

    Raises:
        UserError: it is not, or no YAML.
    """
    cure = "give a plain YAML file as in configs/"
    sections = {*SETTINGS, *(f.name for f in fields(RunConfig) if is_dataclass(getattr(RunConfig(), f.name)))}
    try:
        size = path.stat().st_size
        check(size <= _LARGEST_YAML, f"{path} has {size:,} bytes, more than {_LARGEST_YAML:,}; {cure}")
        text, depth = path.read_text(), 0
        for event in yaml.parse(text, yaml.SafeLoader):
            check(not isinstance(event, yaml.AliasEvent), f"{path} has an alias (*); write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            check(depth <= _DEEPEST_YAML, f"{path} has brackets in brackets; {cure}")
        root = yaml.compose(text, yaml.SafeLoader)
        check(root is None or isinstance(root, yaml.MappingNode), f"{path} holds no sections; {cure}")
        _require_single_keys(root, path)
        for key, value in root.value if root else ():
            # The library would take a name here for that of another file, to be read in its place.
            section = key.value in sections and not isinstance(value, yaml.MappingNode)
            check(not section, f"{path} has {key.value} without keys of its own below it; {cure}")
        return yaml.safe_load(text) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({error}); {cure}") from None


def _require_single_keys(node: yaml.Node | None, path: Path, place: str = "") -> None:
    """Refuse keys that are no names or there twice, and values longer than Python would write out as a number."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            plain = isinstance(key, yaml.ScalarNode) and key.tag.endswith(":str")
            check(plain, f"{path} has a key that is no name; give names as in configs/")
            name = f"{place}{key.value}"
            check(name not in seen, f"{path} has {name} twice; leave one of them")
            seen.add(name)
            _require_single_keys(value, path, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _require_single_keys(value, path, place)
    elif node is not None:
        length = len(node.value)
        check(
            length <= _LONGEST_VALUE, f"{path} has {place} of {length:,} characters; give {_LONGEST_VALUE:,} or fewer"
        )


def _sentence(message: str, parser: ArgumentParser) -> str:
    """The library's message on one line, with the nearest known key where a key is unknown."""
    message = " ".join(message.split())
    unknown = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    key = f"{unknown[1]}.{unknown[2]}" if unknown else None
    if key is None:
        plain = re.search(r"Option '([\w.]+)' is not accepted|[Uu]nrecognized arguments: --([\w.-]+)", message)
        key = (plain[1] or plain[2]) if plain else None
    if key is None:
        missing = re.search(r"arguments are required: (.*)", message)
        if missing:
            names = ", ".join(f"--{name.strip()}" for name in missing[1].split(","))
            return f"{names} is not given; add it, see {parser.prog} --help"
        wrong = re.search(r'Parser key "([\w.]+)": (.*)', message)
        if wrong:
            return f"{wrong[1]}: {wrong[2].rstrip('.')}; see {parser.prog} --help for what it takes"
        return f"{message.rstrip('.:')}; see {parser.prog} --help for what there is"
    known = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.3)
    cure = f"did you mean {near[0]}?" if near else f"see {parser.prog} --help for the keys"
    return f"there is no option {key}; {cure}"


def write_config(config: RunConfig, comments: Sequence[str], path: Path) -> None:
    """Write the resolved configuration, readable by --config again, with `comments` as its first lines."""
    text = "".join(line + "\n" for line in comments) + yaml.safe_dump(config.to_dict(), sort_keys=False)
    with replacing(path) as temporary:
        temporary.write_text(text)
