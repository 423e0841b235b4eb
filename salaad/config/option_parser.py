"""jsonargparse adapted to this project: lists in any form, help without Python's types, errors in one sentence."""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from threading import Lock
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from salaad.common.errors import UserError
from salaad.common.validation import PLAIN_TYPES, require_types, split_list

# The deprecation warnings of jsonargparse are about its own next release, not about the user's input.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
set_parsing_settings(validate_defaults=False)

# jsonargparse reads a file from within its folder: two threads at once could leave the process in that folder.
_ALONE = Lock()

# Name of an option in other training programs → name of ours.
_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "max_steps": "train.steps",
    "batch_size": "train.batch",
    "per_device_train_batch_size": "train.micro_batch",
    "output_dir": "output",
    "model_name_or_path": "model.path",
    "bf16": "train.precision",
}
_EMPTY = ("null", "()", "")


class HelpFormatter(DefaultHelpFormatter):
    """A help formatter that shows each option's meaning and default without the names of Python types."""

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        found = re.search(r" \((required, )?type: .*?(?:, default: (.*))?\)$", text, re.DOTALL)
        if found is None:
            return text
        shown = "(required)" if found[1] else f"(default: {found[2]})" if (found[2] or "") not in _EMPTY else ""
        return f"{text[: found.start()]} {shown}".rstrip()


class OptionParser(ArgumentParser):
    """A parser whose help writes options as they are documented."""

    def __init__(self, **options: Any) -> None:
        super().__init__(exit_on_error=False, allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def format_help(self) -> str:
        """Return the help, in which options of a command have dashes and keys of a configuration underscores.

        `null` is removed from the choices: it is how optional values are declared, not what anybody types.
        """
        text = super().format_help().replace(",null}", "}")
        return re.sub(r"--[a-z]+(_[a-z]+)+(?![\w.])", lambda option: option[0].replace("_", "-"), text)


def is_list(kind: Any) -> bool:
    """Whether a declared type is a tuple, or a union that contains one."""
    return get_origin(kind) is tuple or (isinstance(kind, UnionType) and any(map(is_list, get_args(kind))))


def with_lists(arguments: list[str], kinds: Iterable[tuple[type, str]]) -> list[str]:
    """Return the arguments with every list, given as `a,b`, `a b` or `["a", "b"]`, as one word for jsonargparse.

    Args:
        arguments: the words of a command line.
        kinds: dataclasses of its options, each with its section. A field holds a list if its type is a tuple, or, as
            text with commas, if `lists` of the dataclass names it.
    """
    lists = {name: kind for one in kinds for name, kind in _lists_of(*one)}
    merged: list[str] = []
    words = iter(arguments)
    word = next(words, None)
    while word is not None:
        option, equals, value = word.partition("=")
        key = option.removeprefix("--")
        following = next(words, None)
        if option.startswith("--") and key in lists:
            values = [value] if equals else []
            while following is not None and not following.startswith("--"):
                values.append(following)
                following = next(words, None)
            word = f"{option}={_one_word(values, lists[key])}" if values else word
        merged.append(word)
        word = following
    return merged


def _lists_of(kind: type, section: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, type) of every list in a dataclass and in the dataclasses in it."""
    hints = get_type_hints(kind)
    for name in (f.name for f in fields(kind)):
        key = f"{section}.{name}".lstrip(".")
        if is_dataclass(hints[name]):
            yield from _lists_of(hints[name], key)
        elif is_list(hints[name]) or name in getattr(kind, "lists", ()):
            yield key, hints[name]


def _one_word(values: list[str], kind: Any) -> str:
    text = " ".join(values)
    items = [item for value in values for item in split_list(value)]
    if text.startswith("["):
        with suppress(yaml.YAMLError):  # a glob may begin with a bracket, too
            items = [str(item) for item in yaml.safe_load(text)]
    if not is_list(kind):
        return ",".join(items)
    return (
        yaml.safe_dump(items, default_flow_style=True, width=10**9).strip()
        if str in _leaves(kind)
        else f"[{','.join(items)}]"
    )


def _leaves(kind: Any) -> set[Any]:
    return {kind} if not get_args(kind) else set().union(*map(_leaves, get_args(kind)))


def parse(parser: OptionParser, arguments: list[str], *kinds: tuple[type, str]) -> tuple[Any, Any]:
    """Return the parsed values and the objects made from them.

    `kinds` are the dataclasses among them with their keys; their values' types are checked here, as jsonargparse takes
    null for a value of any type.
    """
    try:
        with _ALONE:
            parsed = parser.parse_args(arguments)
        for kind, name in kinds:
            require_types(kind, parsed if not name else parsed[name], name)
        return parsed, parser.instantiate(parsed)
    except argparse.ArgumentError as error:
        raise UserError(_sentence(str(error), parser)) from None
    except (UserError, MemoryError):
        raise
    except Exception as error:
        # jsonargparse promises only ArgumentError. A file can make it raise others, by keys with dots, by a number
        # where a section belongs or by digits without end, from wherever in its code the value is first used.
        raise UserError(f"what is set is no configuration ({error}); see {parser.prog} --help") from None


def _sentence(message: str, parser: OptionParser) -> str:
    """Turn a message of jsonargparse into one sentence, which names the nearest known option for an unknown one."""
    message = " ".join(message.split())
    unknown = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    key, plain = (f"{unknown[1]}.{unknown[2]}" if unknown else None), None
    if key is None:
        plain = re.search(r"Option '([\w.]+)' is not accepted|[Uu]nrecognized arguments: --([\w.-]+)", message)
        key = (plain[1] or plain[2]) if plain else None
    if key is not None:
        near = nearest(key, (option.lstrip("-") for action in parser._actions for option in action.option_strings))
        cure = f"did you mean {typed(near)}?" if near else f"see {parser.prog} --help for those there are"
        same = near and typed(near) == typed(key)  # as for --dry_run, which has to be typed with a dash
        return f"there is no option {f'--{key}' if same else typed(key)}; {cure}"
    missing = re.search(r"arguments are required: (.*)", message)
    if missing:
        names = ", ".join(typed(name.strip()) for name in missing[1].split(","))
        return f"{names} is not given; add it, see {parser.prog} --help"
    stray = re.search(r"[Uu]nrecognized arguments: (.*)", message)
    if stray:
        return f"{stray[1]!r} belongs to no option; see {parser.prog} --help for what there is"
    wrong = re.search(r'Parser key "([\w.]+)": (.*)', message)
    if wrong:
        return f"{typed(wrong[1])} {_complaint(wrong[2])}; see {parser.prog} --help for what it takes"
    return f"{message.rstrip('.:')}; see {parser.prog} --help for what there is"


def _complaint(text: str) -> str:
    """Turn what jsonargparse says about a value into words without the names of Python types."""
    value = re.search(r"(?:Got|Given) value: (.*?)$", text)
    choices = re.search(r"Literal\[(.*?)\]", text)
    expected = text.partition("Given value type")[0]
    kinds = list(dict.fromkeys(PLAIN_TYPES[name] for name in re.findall(r"<class '(int|float|bool|str)'>", expected)))
    if value is None or not (choices or kinds):
        return f"cannot be read ({text.rstrip('.')})"
    wanted = f"one of {choices[1]}" if choices else " or ".join(kinds)
    return f"is {value[1].rstrip('.')}, but has to be {wanted}".replace("'", "")


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Return the known key that was probably meant: with the same last part, our name for it, or a similar one."""
    known = [name for name in known if name not in ("h", "help")]
    key = key.replace("-", "_")
    leaves: Mapping[str, str] = {name.rpartition(".")[2]: name for name in reversed(known)}
    leaf = key.rpartition(".")[2]
    if leaf in leaves:
        return leaves[leaf]
    if _ELSEWHERE.get(leaf) in known:
        return _ELSEWHERE[leaf]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)
    return leaves[close[0]] if close else None


def typed(key: str) -> str:
    """An option as it is typed: the keys of a configuration with underscores, all others with dashes."""
    return f"--{key}" if "." in key else f"--{key.replace('_', '-')}"
