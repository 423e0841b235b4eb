"""One training at every size: SALAAD's cuts beside small dense models, all other methods and all other ways to cut.

    python scripts/compare_elastic.py --config nano-20 --seeds 0,1,2 --output results/elastic/nano-20.json \\
        --search results/methods/nano-20.json --other-text runs/c4.parquet \\
        --data.source files --data.files 'runs/wikipedia/train-*' --data.validation_files 'runs/wikipedia/valid*'

Every model is trained on the same tokens and measured whole, and what can be cut also at eight sizes, from three
quarters of the compressible parameters to a fifth, evenly spaced in their logarithm. The elastic score of a curve is
its mean of log perplexity over full-rank's of the same seed. What the JSON file has is kept, and an interrupted run
goes on.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check, split_list
from salaad.compression.deployment import Deployment
from salaad.compression.opening import open_deployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant, parse_kappas
from salaad.compression.write import compress
from salaad.config.command_line import read_command_line
from salaad.config.commands import ALTERNATIONS, CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.model.build import describe_model, outline, training_flops
from salaad.model.parameters import count_parameters
from salaad.model.roles import find_blocks
from salaad.runs.model_on_disk import RECORD, ModelOnDisk
from scripts.compare_methods import best_rate
from scripts.research.search_elastic import NAMED, shares
from scripts.trainings import ROOT, trained

DENSE_SHARES = (0.75, 0.5, 0.35, 0.2)  # of the compressible parameters, at which small dense models are trained
BEGINS = (0.6, 0.42, 0.34, 0.28, 0.235, 0.2)  # shares at which the ranges of an elastic folder begin
MATCH = 256  # sequences
DISTILL = 20  # the part of the training tokens is one of so many
TEXT_SHARE = 0.3  # of what is learned in distillation that the text says
KAPPAS = "0:1:0.05"
BEGINNING = "The village is"  # of the text that the smallest and the largest size go on with
FIGURES = ("variant", "parameters", "perplexity")
ONE_RATE = ("--optimizer.lr=3e-3", "--optimizer.projection_lr=1")  # as most trainers have it
BLOCKS = SalaadConfig(embedding=True)
FOLDERS = {"tuned": (BEGINS,), "tuned, each": tuple((share,) for share in NAMED)}  # way → what each folder keeps
TUNED = ("tuned, each", "head, tuned, each", "head, tuned")


def all_shares() -> list[float]:
    """The eight of the elastic score, and those that tables name."""
    return sorted({*shares(), *NAMED}, reverse=True)


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
    """What is laid over the configuration of all runs, as options of train.py.

    Args:
        dense: of dense models and of SALAAD, such as their learning rates.
        salaad: that this project recommends for SALAAD.
        rates: method → learning rate, of the other methods; those without are left out.
    """

    dense: tuple[str, ...]
    salaad: tuple[str, ...]
    rates: Mapping[str, float]


def trainings(config: str, extra: tuple[str, ...], settings: Settings) -> list[Training]:
    """All that are compared at a scale."""
    run, _ = read_command_line(["--config", config, *extra])
    model = outline(describe_model(run.model, run.data.sequence_length))
    dense = count_parameters(model)
    compressible = sum(X.numel() for X in find_blocks(model, BLOCKS).values())
    small = []
    for share in DENSE_SHARES:
        size = round(dense - (1 - share) * compressible)
        words = ("--method=full_rank", *settings.dense, f"--model.like={config}", f"--model.parameters={size}")
        small.append(Training(f"dense, {share:g}", words, ()))
    whole = ("--method=full_rank", *settings.dense)
    others = {name: (f"--method={name}", f"--optimizer.lr={lr:g}") for name, lr in settings.rates.items()}
    return [
        Training("full-rank", whole, ("rpca", "rpca, head", *(f"rpca, {way}" for way in TUNED), "godec")),
        Training("SALAAD", (*settings.dense, *settings.salaad), ("cut", "cut, head", *TUNED)),
        Training("SALAAD, as in the paper", settings.dense, ("hpa", "energy")),
        *small,
        Training("matformer", others.pop("matformer", ("--method=matformer",)), ("nested",)),
        Training("full-rank, one rate", (*whole, *ONE_RATE), ()),
        *(Training(name, words, ()) for name, words in others.items()),
    ]


@dataclass(frozen=True)
class Measured:
    """A trained model whose sizes are measured.

    Args:
        run: its folder.
        tokens: validation tokens, of whose second half every figure is.
        text_tokens: of the training.
    """

    run: Path
    tokens: int
    text_tokens: int

    def evaluation(self, source: ModelOnDisk, split: PostHoc | None = None) -> VariantEvaluation:
        """Of what can be cut from `source`."""
        deployment = open_deployment(source, split)
        if split is not None and split.method == "godec":
            room = round(max(all_shares()) * (deployment.dense - deployment.fixed))
            split = split.with_room(deployment.shapes.values(), room, ("rank_ratio", "density"))
            deployment = open_deployment(source, split)
        data = DataConfig(**self.source.run["data"])
        return VariantEvaluation(deployment, data, tokens=self.tokens, dtype="float32", batch=16, half="second")

    def on_other_text(self, file: str, variant: str) -> float:
        """Perplexity of X or L + S on another validation file."""
        data = replace(DataConfig(**self.source.run["data"]), source="files", validation_files=(file,))
        deployment = open_deployment(self.source)
        measure = VariantEvaluation(deployment, data, tokens=self.tokens, dtype="float32", batch=16)
        return measure(Variant(variant))["perplexity"]

    def training_cost(self, positions: int) -> dict[str, float]:
        """What the training took."""
        length = DataConfig(**self.source.run["data"]).sequence_length
        return {"tokens": positions, "operations": training_flops(self.source.folder.outline, length) * positions}

    def costs_of(self, way: str) -> dict[str, float]:
        """What fitting all folders of a way took together, as compress.py counts it; nothing of one without any."""
        names = [folder_name(chosen, *split_of_way(way)) for chosen in FOLDERS.get(way_of_tuning(way), ())]
        costs = [read_json(self.run / name / RECORD)["tuning"] for name in names]
        return {key: sum(cost[key] for cost in costs) for key in ("tokens", "operations")} if costs else {}

    @property
    def source(self) -> ModelOnDisk:
        """The newest checkpoint."""
        return ModelOnDisk.open(self.run)


def budget_of(deployment: Deployment, share: float) -> int:
    """Parameters of the whole model with this share of the compressible ones."""
    return round(deployment.fixed + share * (deployment.dense - deployment.fixed))


def budgets_of(model: Measured) -> list[tuple[float, int]]:
    """All shares and their budgets. The head counts as never compressed, also where it is, so that sizes are equal."""
    deployment = open_deployment(model.source, split_for("rpca", head=False))
    return [(share, budget_of(deployment, share)) for share in all_shares()]


Sizes = Iterator[tuple[float, dict[str, Any]]]  # share, and what was measured there


def way_of_tuning(way: str) -> str:
    """`tuned` or `tuned, each` of what a way is called; another way as it is."""
    return way.removeprefix("rpca, ").removeprefix("head, ")


def split_of_way(way: str) -> tuple[str | None, bool]:
    """How a way splits after the fact, if it does, and whether it splits the head too."""
    words = way.split(", ")
    return ("rpca" if "rpca" in words else None), "head" in words


def split_for(how: str | None, head: bool) -> PostHoc | None:
    """What is split after the fact: nothing, all blocks in this way, and the head with them or beside L + S."""
    if how is None:
        return PostHoc(SalaadConfig(roles=("lm_head",)), beside=True) if head else None
    return PostHoc(replace(BLOCKS, lm_head=head), how)


def by_energy(model: Measured, how: str | None = None, head: bool = False, weighed: bool = True) -> Sizes:
    """Cut by energy and refined, every size by itself."""
    evaluation = model.evaluation(model.source, split_for(how, head))
    deployment = evaluation.deployment
    if not weighed:  # as before the optimizer's second moments were kept: every entry counts alike
        deployment.trained_weights, deployment.kind = {}, f"{deployment.kind}-alike"
    for share, budget in budgets_of(model):
        yield share, evaluation(Variant(f"{budget}@energy", budget, None, ALTERNATIONS))


def by_hpa(model: Measured) -> Sizes:
    """Cut by HPA, with the κ that is best on the half of the text that no other figure is of."""
    evaluation = model.evaluation(model.source)
    deployment = evaluation.deployment
    half = Measured(model.run, model.tokens // 3, model.text_tokens).evaluation(model.source).on_half("first")
    for share in all_shares():
        budget = budget_of(deployment, share)
        variants = [Variant(f"{budget}@{kappa:g}", budget, kappa) for kappa in parse_kappas(KAPPAS)]
        best = min(variants, key=lambda variant: half(variant)["perplexity"])
        yield share, evaluation(best)


def tuned(model: Measured, split: str | None = None, head: bool = False) -> Sizes:
    """One elastic folder, every range of which is matched where it begins and distilled at all of its sizes."""
    evaluation = model.evaluation(ModelOnDisk.open(compressed(model, BEGINS, split, head)))
    for share, budget in budgets_of(model):
        yield share, evaluation(Variant(str(budget), budget, stored=True))


def tuned_each(model: Measured, split: str | None = None, head: bool = False) -> Sizes:
    """Every size that tables name in a folder of its own, matched and distilled by itself."""
    for share in NAMED:
        folder = compressed(model, (share,), split, head)
        row = model.evaluation(ModelOnDisk.open(folder))(Variant("X"))
        yield share, {**row, "parameters": read_json(folder / RECORD)["parameters"][1]}


def compressed(model: Measured, chosen: Sequence[float], split: str | None, head: bool) -> Path:
    """The folder that compress.py makes of the model, matched and distilled; made unless it is there.

    Args:
        model: the model.
        chosen: the share of the compressible parameters that is kept; of several, an elastic folder has all ranges.
        split: how it is split after the fact, if it is.
        head: the head is split too.
    """
    elastic = len(chosen) > 1
    deployment = open_deployment(model.source, split_for("rpca", head=False))
    folder = model.run / folder_name(chosen, split, head)
    if not folder.exists():
        options = CompressOptions(
            checkpoint=str(model.run),
            output=str(folder),
            budget=",".join(str(budget_of(deployment, share)) for share in chosen),
            elastic=elastic,
            dtype="float32",
            match=MATCH,
            distill=str(model.text_tokens // DISTILL),
            text_share=TEXT_SHARE,
            rpca=split == "rpca",
            godec=split == "godec",
            embedding=split is not None,
            lm_head=head,
        )
        compress(options, model.source, DataConfig(**model.source.run["data"]))
    return folder


def folder_name(chosen: Sequence[float], split: str | None, head: bool) -> str:
    """Of what `compressed` makes."""
    return "-".join(["elastic" if len(chosen) > 1 else f"{chosen[0]:g}", *filter(None, [split, "head" * head])])


def samples(folder: Path, least: int) -> list[dict[str, Any]]:
    """What the smallest size and the largest of an elastic folder make of the same beginning."""
    found, tokenizer = [], AutoTokenizer.from_pretrained(folder)
    units = open_deployment(ModelOnDisk.open(folder))
    prompt = tokenizer(BEGINNING, return_tensors="pt", add_special_tokens=False).input_ids
    for budget in (least, units.largest):
        model = AutoModelForCausalLM.from_pretrained(folder, budget=budget, dtype=torch.float32)
        torch.manual_seed(0)
        ids = model.generate(prompt, max_new_tokens=40, do_sample=True, top_k=10, pad_token_id=0)
        found.append({"parameters": budget, "text": tokenizer.decode(ids[0], skip_special_tokens=True)})
    return found


def nested(model: Measured) -> Sizes:
    """The largest width, or mixture of widths, that fits."""
    evaluation = model.evaluation(model.source)
    deployment = evaluation.deployment
    compressible = sum(X.numel() for X in find_blocks(model.source.folder.outline, BLOCKS).values())
    for share in all_shares():
        budget = round(deployment.dense - (1 - share) * compressible)
        if budget >= deployment.fixed:
            yield share, evaluation(Variant(str(budget), budget, stored=True))


WAYS: dict[str, Callable[[Measured], Sizes]] = {
    "cut": by_energy,
    "cut, head": partial(by_energy, head=True),
    "energy": partial(by_energy, weighed=False),
    "hpa": by_hpa,
    "tuned": tuned,
    "tuned, each": tuned_each,
    "head, tuned": partial(tuned, head=True),
    "head, tuned, each": partial(tuned_each, head=True),
    "rpca": partial(by_energy, how="rpca"),
    "rpca, head": partial(by_energy, how="rpca", head=True),
    "rpca, tuned": partial(tuned, split="rpca"),
    "rpca, tuned, each": partial(tuned_each, split="rpca"),
    "rpca, head, tuned": partial(tuned, split="rpca", head=True),
    "rpca, head, tuned, each": partial(tuned_each, split="rpca", head=True),
    "godec": partial(by_energy, how="godec"),
    "nested": nested,
}


@dataclass(frozen=True)
class Comparison:
    """What every training is given alike.

    Args:
        config: file in configs/.
        runs: folder of the runs.
        extra: options of train.py for all.
        tokens: validation tokens, of whose second half every figure is.
        other_text: a second validation file, on which whole models are measured too.
    """

    config: str
    runs: Path
    extra: tuple[str, ...]
    tokens: int
    other_text: str | None = None

    def complete(self, training: Training, seed: int, row: dict[str, Any], save: Callable[[], None]) -> None:
        """Add to the row of a training with one seed what it lacks: the model itself, and the ways to its sizes."""
        left = [way for way in training.ways if way not in row.get("ways", {})]
        if row and not left:
            return
        folder = self.runs / f"{training.label.replace(', ', '-').replace(' ', '_')}-{seed}"
        words = ["--config", self.config, *self.extra, *training.words, f"--seed={seed}"]
        about, summary = trained(words, folder)
        if summary is None:
            raise UserError(f"{folder.name} diverged; give lower learning rates")
        model = Measured(folder, self.tokens, summary["tokens"])
        if not row:
            row |= {"label": training.label, "seed": seed, **about, "text_tokens": summary["tokens"]}
            row |= {"method": read_command_line(words)[0].method, **self.figures(model, summary), "ways": {}}
            row["minutes"] = {"train": summary["seconds"]["train"] / 60}
            print(f"{folder.name}: X {row['X']['perplexity']:.2f}", flush=True)
            save()
        row.setdefault("costs", {}).setdefault("train", model.training_cost(summary["positions"]))
        for way in left:
            since = time.perf_counter()
            sizes = [{"share": share, **{key: size[key] for key in FIGURES}} for share, size in WAYS[way](model)]
            row["minutes"][way] = (time.perf_counter() - since) / 60
            row["ways"][way] = sizes
            if costs := model.costs_of(way):
                row.setdefault("costs", {})[way] = costs
            if way_of_tuning(way) == "tuned":
                name = folder_name(BEGINS, *split_of_way(way))
                row.setdefault("samples", {})[way] = samples(folder / name, budgets_of(model)[-1][1])
            found = ", ".join(f"{size['perplexity']:.2f}" for size in sizes)
            print(f"{folder.name}, {way}: {found}", flush=True)
            save()

    def figures(self, model: Measured, summary: dict[str, Any]) -> dict[str, Any]:
        """Of the whole model, and of L + S where there is one."""
        measure, found = model.evaluation(model.source), {}
        for name in {"X", "L+S"} & set(measure.deployment.default_variants.split(",")):
            row, of = measure(Variant(name)), summary["variants"][name]
            found[name] = {key: row[key] for key in (*FIGURES, "legacy_perplexity", "tokens")}
            found[name] |= {key: of[key] for key in ("trained", "bytes") if key in of}
            if self.other_text:
                found[name]["other_perplexity"] = model.on_other_text(self.other_text, name)
        return found


def main() -> None:
    """Train and measure what is missing; write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="nano", help="configuration of all runs")
    parser.add_argument("--seeds", default="0", help="separated by commas; the first is trained for every row")
    parser.add_argument("--rows", help="labels, separated by semicolons; all unless given")
    parser.add_argument("--repeated", default="full-rank;SALAAD", help="labels that are trained with every seed")
    parser.add_argument("--dense", default="", help="options of train.py for dense models and SALAAD")
    parser.add_argument("--search", type=Path, help="JSON of compare_methods.py, of which the other methods are taken")
    parser.add_argument("--other-text", help="a second validation file, on which whole models are measured too")
    parser.add_argument("--salaad", default="", help="settings of the recommended SALAAD, as options of train.py")
    parser.add_argument(
        "--tokens", type=int, default=600_000, help="validation tokens; figures are of their second half"
    )
    parser.add_argument("--runs", type=Path, help="where the runs go; runs/elastic-CONFIG unless given")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file, to which rows are added")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options, extra = parser.parse_known_args()
    at_least(options, 1, "jobs", "tokens")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name, file in (("--search", options.search), ("--other-text", options.other_text)):
        check(file is None or Path(file).is_file(), f"{name} {file} is no file; give an existing one")
    runs = options.runs or ROOT / "runs" / f"elastic-{options.config}"
    runs.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(options.config, runs, tuple(extra), options.tokens, options.other_text)
    searched = read_json(options.search)["methods"] if options.search else {}
    rates = {name: best_rate(entry) for name, entry in searched.items() if name not in ("full_rank", "salaad")}
    settings = Settings(tuple(options.dense.split()), tuple(options.salaad.split()), rates)
    every = trainings(options.config, tuple(extra), settings)
    asked = options.rows.split(";") if options.rows else [training.label for training in every]
    labels = [training.label for training in every]
    for label in (*asked, *options.repeated.split(";")):
        check(label in labels, f"there is no row {label!r}; give some of {'; '.join(labels)}")
    check(
        all(seed.isdigit() for seed in split_list(options.seeds)),
        f"--seeds is {options.seeds}; give whole numbers such as 0,1,2",
    )
    seeds = [int(seed) for seed in split_list(options.seeds)]
    todo = [
        (training, seed)
        for training in every
        if training.label in asked
        for seed in (seeds if training.label in options.repeated.split(";") else seeds[:1])
    ]
    kept = read_json(options.output)["rows"] if options.output.exists() else []
    rows, lock = {(row["label"], row["seed"]): row for row in kept}, Lock()

    def save() -> None:
        with lock:
            there = [row for row in rows.values() if row]
            write_json({"config": options.config, **provenance(), "rows": there}, options.output)

    def measure(item: tuple[Training, int]) -> None:
        training, seed = item
        comparison.complete(training, seed, rows.setdefault((training.label, seed), {}), save)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(measure, todo))


if __name__ == "__main__":
    run_command(main)
