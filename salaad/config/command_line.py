"""From the command line to a `RunConfig`: `--section.key value` overrides YAML, and every error is one sentence."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import yaml
from jsonargparse import ActionConfigFile

from salaad.common.budgets import parse_budget
from salaad.common.errors import UserError
from salaad.common.files import CHECKOUT, at_home, is_file, replacing
from salaad.common.validation import check
from salaad.config.method_sizes import settings_of
from salaad.config.methods import SETTINGS
from salaad.config.model_sizes import parameters, scaled_to
from salaad.config.option_parser import OptionParser, parse, typed, with_lists
from salaad.config.run import DataConfig, ModelConfig, RunConfig
from salaad.config.suggestion import settings_for

CONFIGS = CHECKOUT / "configs"
_LARGEST_YAML, _DEEPEST_YAML = 2**18, 8  # bytes and levels; our files have a thousandth of these bytes and three levels
_NO_OTHER_PULL = {"rho": None, "onset": 0.0, "release": 0.0}  # what a preset sets unless its own settings differ
_LONGEST_VALUE = 3500  # characters; Python writes out no number of more than 4300 digits


@dataclass(frozen=True)
class TrainOptions:
    """What belongs to this launch and not to the run.

    Args:
        output: the run's folder; runs/CONFIG-METHOD when none is given, with the names of all --config in order.
        resume: auto goes on from the newest checkpoint of the output folder if there is one, none insists on a new
            folder, anything else is the checkpoint folder to go on from.
        preset: auto takes K, c, Δα and Δβ of salaad from the number of steps, in place of what a --config before it
            gives, which loses its rho, onset and release too; elastic likewise for a model that is to be cut, with a
            weaker pull in the second quarter alone, and with the embedding left whole.
        dry_run: print the plan (parameters, tokens, blocks per owner, memory, operations) and stop.
        device: with --dry-run, predict the time of a step and of the run on this kind of GPU, in place of a look at the
            text.
    """

    output: str | None = None
    resume: str = "auto"
    preset: Literal["auto", "elastic"] | None = None
    dry_run: bool = False
    device: Literal["h100", "h200", "a100", "4090"] | None = None

    def __post_init__(self) -> None:
        check(self.device is None or self.dry_run, f"--device {self.device} only predicts; add --dry-run")


def read_command_line(arguments: Sequence[str] | None = None) -> tuple[RunConfig, TrainOptions]:
    """Parse the command line of train.py.

    Raises:
        UserError: an unknown key (with the nearest known one), a wrong type, a value out of range, a missing file.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    settings = {name: kind for name, kind in SETTINGS.items() if fields(kind)}
    kinds = [(RunConfig, ""), *((kind, name) for name, kind in settings.items())]
    given = words = _find_configs(with_lists(arguments, kinds))
    parser, defaults = _training_parser(tuple(settings.items())), {}
    parsed, instantiated = parse(parser, words, *kinds)
    if parsed.preset is not None:
        is_typed = any(word.startswith("--preset") for word in words)
        method = instantiated["method"]
        check(not is_typed or method == "salaad", f"--preset is of method salaad, but method is {method}; leave it out")
        if method == "salaad":
            words = _with_preset(parsed.preset, instantiated["train"].steps, words)
    if table := settings_of(instantiated["method"], _with_sizes(instantiated["model"])):
        words, defaults = _with_table(table, instantiated["method"], words)
    if defaults:
        parser = _training_parser.__wrapped__(tuple(settings.items()))
        parser.set_defaults(defaults)
    if defaults or words != given:
        parsed, instantiated = parse(parser, words, *kinds)
    own = {f.name: instantiated[f.name] for f in fields(RunConfig) if f.name != "sections"}
    own["model"] = _with_sizes(own["model"])
    config = RunConfig(**own, sections={name: instantiated[name] for name in settings})
    options = TrainOptions(**{f.name: instantiated[f.name] for f in fields(TrainOptions)})
    if not arguments:  # train.py without arguments shows the plan instead of training
        options = replace(options, dry_run=True)
    if options.output is None:
        stem = "-".join(Path(file.relative).stem for file in parsed.config or ()) or "run"
        options = replace(options, output=f"runs/{stem}-{config.method}")
    return config, options


@cache  # as building it takes far longer than parsing a command line
def _training_parser(settings: tuple[tuple[str, type], ...]) -> OptionParser:
    """Return the parser of train.py; `settings` are the sections of the methods, each with its dataclass."""
    parser = OptionParser(
        prog="train.py",
        description="Pretrain a language model with SALAAD, or in one of nine other ways beside it.",
    )
    config_help = "a YAML file, by path or by its name in configs/; a second one is laid over the first"
    parser.add_argument("--config", action=ActionConfigFile, help=config_help)
    parser.add_class_arguments(TrainOptions, skip={"dry_run"})
    parser.add_argument("--dry-run", action="store_true", help="print the plan (memory, owners, operations) and stop")
    parser.add_class_arguments(RunConfig, skip={"sections"})
    for name, kind in settings:
        parser.add_class_arguments(kind, name)
    return parser


def _with_preset(preset: str, steps: int, words: list[str]) -> list[str]:
    """Return the words of a command line with the settings that a preset stands for, right after it.

    The preset of a --config file stands where the file does, beneath what this file itself sets.

    Raises:
        UserError: a typed preset stands before a --config that overrides parts of it, or any after options that it
            overrides.
    """
    elastic = preset == "elastic"
    suggested = _NO_OTHER_PULL | settings_for(steps, elastic=elastic) | ({"embedding": False} if elastic else {})
    settings = {f"salaad.{name}": value for name, value in suggested.items()}
    place = max((i + (word == "--preset") for i, word in enumerate(words) if word.startswith("--preset")), default=None)
    given = f"--preset {preset}"
    if place is None:
        given = f"--config, whose preset is {preset}"
        place, content = [(at, file) for at, file in _given_files(words) if file.get("preset") is not None][-1]
        settings = {key: value for key, value in settings.items() if key not in _own_settings(content, "salaad")}
    else:
        for word in words[place + 1 :]:
            said = f"{word} stands after --preset and overrides parts of it; give it before"
            check(not word.startswith("--config"), said)
    return _inserted(settings, place, words, f"{given}, which overrides it; give it after")


def _with_table(table: Mapping[str, Any], method: str, words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the words of a command line with the method's own settings added, which later options override.

    The settings override all --config files before the first that names this method, as those were written for another
    one or for none, but not what these files have in the method's own section. Without such files, the settings are
    returned as defaults of the parser.

    Raises:
        UserError: an option before these files would be overridden without a word.
    """
    last, given = None, set()  # of these files, the place of the last one among the words, and their settings
    for place, content in _given_files(words):
        if content.get("method") == method:
            break
        last, given = place, given | _own_settings(content, method)
    if last is None:
        return words, dict(table)
    table = {key: value for key, value in table.items() if key not in given}
    said = f"--config, and the settings of {method} after it; give it after --config"
    return _inserted(table, last, words, said), {}


def _given_files(words: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield of every --config file among the words of a command line its place and its content."""
    for i, word in enumerate(words):
        if word.startswith("--config"):
            place = i + (word == "--config")
            yield place, read_plain_yaml(Path(words[place].removeprefix("--config=")))


def _own_settings(content: Mapping[str, Any], section: str) -> set[str]:
    """Return the keys, such as salaad.every, that a file has in a section of its own."""
    own, dotted = content.get(section), {key for key in content if key.startswith(f"{section}.")}
    return dotted | ({f"{section}.{name}" for name in own} if isinstance(own, dict) else set())


def _inserted(settings: Mapping[str, Any], place: int, words: Sequence[str], said: str) -> list[str]:
    """Return the words with settings as options after the one at `place`.

    Raises:
        UserError: an option before them would be overridden without a word; `said` is what it stands before.
    """
    for word in words[:place]:
        is_overridden = word.removeprefix("--").partition("=")[0] in settings
        check(not is_overridden, f"{word} stands before {said}")
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return [*words[: place + 1], *(f"--{key}={text}" for key, text in texts.items()), *words[place + 1 :]]


def _with_sizes(model: ModelConfig) -> ModelConfig:
    """Return the model with its sizes filled in: for a model that is `like` another, those found for `parameters`."""
    if model.like is None:
        return model
    sizes = read_plain_yaml(_config_path(model.like, "--model.like")).get("model", {})
    plain = sizes.get("hidden_size") and not (sizes.get("path") or sizes.get("like"))
    check(bool(plain), f"model.like {model.like} names no sizes of a model; give a file in configs/ with sizes")
    named = ModelConfig(**{**sizes, "vocab_size": model.vocab_size})
    return scaled_to(named, parse_budget(str(model.parameters), parameters(named)))


class Command(NamedTuple):
    """A parsed command line.

    Args:
        name: the subcommand.
        options: its options.
        model: the result of `open_model` for --checkpoint, or None.
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
    open_model: Callable[[Path], Any] | None,
    with_data: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> Command:
    """Parse the command line of a program with subcommands, or without any if the only key of `commands` is "".

    Args:
        program: file name of the program.
        description: one sentence on the program.
        commands: subcommand → dataclass of its options, `checkpoint` among them.
        open_model: opens and checks what --checkpoint names, once; the attribute `run` of its result is the
            configuration of the training run. With None only the options are checked.
        with_data: subcommands that also take --data.*, whose defaults are the settings the checkpoint was trained with.
        arguments: the words after the program's name; by default those of this process.

    Raises:
        UserError: as in `read_command_line`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in arguments if word in commands), "")
    if not arguments or command not in commands:
        _show_commands(program, description, commands, arguments)
    arguments.remove(command) if command else None
    kind = commands[command]
    parser = OptionParser(prog=f"{program} {command}".strip(), description=kind.__doc__.splitlines()[0])
    parser.add_class_arguments(kind)
    sections = [(DataConfig, "data")] if command in with_data else []
    for section, name in sections:
        parser.add_class_arguments(section, name, skip={"workers"})  # which read ahead of a training
    arguments = with_lists(_as_python_names(arguments, kind), [(kind, ""), *sections])
    _, given = parse(parser, arguments, *sections)  # before a model is opened, which takes its time
    options = kind(**{f.name: given[f.name] for f in fields(kind)})
    model = None if open_model is None else open_model(Path(options.checkpoint))
    if model is not None and sections:
        parser.set_defaults(_trained_with(model.run, arguments))
        _, given = parse(parser, arguments, *sections)
    return Command(command, options, model, given.get("data"))


def _show_commands(program: str, description: str, commands: Mapping[str, type], arguments: Sequence[str]) -> NoReturn:
    """Print a program's usage and exit, with code 0 if --help was given, else 2; a UserError for an unknown command."""
    named = [name for name in commands if name]
    asked = bool({"-h", "--help"} & set(arguments))
    if arguments and not asked:
        first = arguments[0]
        wrong = f"needs a command before {first}" if first.startswith("-") else f"has no command {first!r}"
        raise UserError(f"{program} {wrong}; give one of {', '.join(named)}")
    if named:
        usage = f"usage: {program} {{{','.join(named)}}} --help\n\n{description}\n"
        usage += "".join(f"\n  {name:11} {commands[name].__doc__.splitlines()[0]}" for name in named)
    else:
        required = " ".join(typed(f.name) + " ..." for f in fields(commands[""]) if f.default is MISSING)
        usage = f"usage: {program} {required}\n\n{description} See {program} --help."
    print(usage, file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)


def _as_python_names(arguments: list[str], kind: type) -> list[str]:
    """Turn options as documented, such as `--task-data DIR` or a bare `--rpca`, into the form of jsonargparse."""
    switches = {f"--{f.name}" for f in fields(kind) if f.type in (bool, bool | None)}
    named = [re.sub(r"^--[a-z-]+", lambda match: "--" + match[0][2:].replace("-", "_"), word) for word in arguments]
    following = [*named[1:], ""][: len(named)]
    return [
        f"{word}=true" if word in switches and value not in ("true", "false") else word
        for word, value in zip(named, following, strict=True)
    ]


def _trained_with(run: Mapping[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Return defaults of --data.*: the training run's settings; if --data.source is given, only how rows are cut."""
    data = run.get("data", {})
    other = any(argument.startswith("--data.source") for argument in arguments)
    # The tokenizer is stored with the model; the place that training took it from may be gone. Workers only train.
    kept = ("sequence_length", "packing") if other else [key for key in data if key not in ("tokenizer", "workers")]
    return {f"data.{key}": data[key] for key in kept if key in data}


def _find_configs(arguments: list[str]) -> list[str]:
    """Replace the name after each --config by the path of its file, whose content is checked."""
    found, expecting = [], False
    for argument in arguments:
        name = argument if expecting else argument.removeprefix("--config=")
        if expecting or name != argument:
            argument = ("" if expecting else "--config=") + str(_config_path(name))
        expecting = argument == "--config"
        found.append(argument)
    return found


def _config_path(name: str, option: str = "--config") -> Path:
    places = [at_home(name), CONFIGS / name, CONFIGS / f"{name}.yaml"]
    for place in places:
        if is_file(place):
            read_plain_yaml(place)  # raises a UserError for content that jsonargparse cannot handle
            return place
    known = ", ".join(sorted(path.name for path in CONFIGS.glob("*.yaml")))
    raise UserError(f"{option} {name} is no file and not in {CONFIGS.name}/; give a path or one of {known}")


def read_plain_yaml(path: Path, largest: int = _LARGEST_YAML) -> dict[str, Any]:
    """Read a YAML file that has to be a plain tree of named sections with one value a key.

    A small file can exhaust a YAML reader: aliases of aliases turn a line into gigabytes, and a parser follows brackets
    in brackets until its stack is full. A configuration needs neither, and both are found before a value is made.

    Args:
        path: the file.
        largest: bytes that it has at most.

    Raises:
        UserError: the file is no such tree, or no YAML.
    """
    cure = "give a plain YAML file as in configs/"
    sections = {*SETTINGS, *(f.name for f in fields(RunConfig) if is_dataclass(getattr(RunConfig(), f.name)))}
    try:
        size = path.stat().st_size
        check(size <= largest, f"{path} has {size:,} bytes, more than {largest:,}; {cure}")
        text, depth = path.read_text(), 0
        for event in yaml.parse(text, yaml.SafeLoader):
            check(not isinstance(event, yaml.AliasEvent), f"{path} has an alias (*); write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            check(depth <= _DEEPEST_YAML, f"{path} has brackets in brackets; {cure}")
        root = yaml.compose(text, yaml.SafeLoader)
        check(isinstance(root, yaml.MappingNode), f"{path} holds no settings; {cure}")
        _require_single_keys(root, path)
        for key, value in root.value:
            # jsonargparse would take a text in place of a section for the name of another file, and read that file.
            section = key.value in sections and not isinstance(value, yaml.MappingNode)
            check(not section, f"{path} has {key.value} without keys of its own below it; {cure}")
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read ({error}); {cure}") from None


def _require_single_keys(node: yaml.Node | None, path: Path, place: str = "") -> None:
    """Raise a UserError for keys that are no names or appear twice, and for values too long to print as a number."""
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


def write_config(config: RunConfig, comments: Sequence[str], path: Path) -> None:
    """Write the resolved configuration, readable by --config again, with `comments` as its first lines."""
    text = "".join(line + "\n" for line in comments) + yaml.safe_dump(config.to_dict(), sort_keys=False)
    with replacing(path) as temporary:
        temporary.write_text(text)
