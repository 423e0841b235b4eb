"""The models that compare_elastic.py trains at a scale, and the ways to smaller ones that it measures on each."""

from collections.abc import Mapping
from typing import NamedTuple

from salaad.config.command_line import read_command_line
from salaad.config.suggestion import settings_for
from salaad.methods.registry import method_of
from salaad.model.parameters import count_parameters
from salaad.model.roles import find_blocks
from scripts.compare_methods import Rates
from scripts.elastic_ways import BLOCKS, SPLITS
from scripts.outlines import outline_of
from scripts.shares import SEARCHED, SMALL

DENSE_SHARES = (0.75, 0.5, 0.35, 0.2)  # of the compressible parameters, at which small dense models are trained
DENSE_LIKE = ("loro", "sltrain")  # methods at whose sizes dense models are trained too; CoLA has the size of LORO
ONE_RATE = ("--optimizer.lr=3e-3", "--optimizer.projection_lr=1")  # one rate for all weights, as in most trainers
CUTS = ("cut", "cut, head")
TUNED = ("tuned, each", "head, tuned, each", "head, tuned")


class Training(NamedTuple):
    """A model to train, and the ways to smaller ones that are measured on it.

    Args:
        label: what tables call it.
        words: options of train.py.
        ways: names in `WAYS`.
    """

    label: str
    words: tuple[str, ...]
    ways: tuple[str, ...]


class Settings(NamedTuple):
    """Options of train.py that are added to the common configuration, by kind of training.

    Args:
        dense: options of dense models and of SALAAD, such as their learning rates.
        small: label of a dense model of a smaller size → options of it alone, which count more than those in `dense`.
        salaad: options of the recommended SALAAD; if empty, those that `--preset elastic` suggests for the run's
            length, with the embedding left whole.
        rates: method → the best rates of its search; methods without rates are left out, except for MatFormer.
    """

    dense: tuple[str, ...]
    small: Mapping[str, tuple[str, ...]]
    salaad: tuple[str, ...]
    rates: Mapping[str, Rates]

    def recommended(self, steps: int) -> tuple[str, ...]:
        """Return the recommended SALAAD's options: as given, else as suggested for `steps`, the embedding whole."""
        suggested = tuple(f"--salaad.{name}={value:g}" for name, value in settings_for(steps, elastic=True).items())
        return self.salaad or (*suggested, "--salaad.embedding=false")


def trainings(config: str, extra: tuple[str, ...], settings: Settings) -> list[Training]:
    """Return all trainings that are compared at the scale of `config`."""
    run, _ = read_command_line(["--config", config, *extra])
    model = outline_of(run)
    dense = count_parameters(model)
    compressible = sum(X.numel() for X in find_blocks(model, BLOCKS).values())
    sizes = {f"{share:g}": round(dense - (1 - share) * compressible) for share in DENSE_SHARES}
    sizes |= {f"as {method}": _stored_by(method, config, extra) for method in DENSE_LIKE}
    whole = ("--method=full_rank", *settings.dense)
    small = [
        Training(
            f"{SMALL}{name}",
            (*whole, *settings.small.get(f"{SMALL}{name}", ()), f"--model.like={config}", f"--model.parameters={size}"),
            (),
        )
        for name, size in sizes.items()
    ]
    others = {name: (f"--method={name}", *rates.words) for name, rates in settings.rates.items() if name != "salaad"}
    searched = others.pop("full_rank", ())
    return [
        Training("full-rank", whole, tuple(way for split in SPLITS for way in of_a_split(split))),
        Training("SALAAD", (*settings.dense, *settings.recommended(run.train.steps)), (*CUTS, *TUNED)),
        Training("SALAAD, as in the paper", settings.dense, ("hpa", "hpa, head", "energy", *CUTS)),
        *small,
        Training("matformer", others.pop("matformer", ("--method=matformer",)), ("nested",)),
        Training("full-rank, one rate", (*whole, *ONE_RATE), ()),
        *([Training(SEARCHED, searched, ())] if searched else []),
        *(Training(name, words, ()) for name, words in others.items()),
    ]


def _stored_by(method: str, config: str, extra: tuple[str, ...]) -> int:
    """Return the number of parameters stored by the model that a method trains at the scale of `config`."""
    run, _ = read_command_line(["--config", config, *extra, f"--method={method}"])
    model = outline_of(run)
    method_of(run).rebuild(model, run)
    return method_of(run).stored(model)["parameters"]


def of_a_split(name: str) -> tuple[str, ...]:
    """Return the ways for a full-rank model split after training by `name`; they match those for a SALAAD model."""
    return (*(way.replace("cut", name) for way in CUTS), *(f"{name}, {way}" for way in TUNED))
