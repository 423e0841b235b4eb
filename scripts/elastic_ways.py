"""The ways from a trained model to smaller ones that compare_elastic.py measures, each at every size that it offers.

A way is a function that takes a trained model and yields every share of the compressible parameters with the figures
measured there. The head counts as never compressed even where a way splits it, so that a share is the same size in all
ways.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from salaad.common.errors import UserError
from salaad.common.files import read_json
from salaad.compression.deployment import Deployment
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.opening import open_deployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant
from salaad.compression.write import compress
from salaad.config.command_line import read_command_line
from salaad.config.commands import ALTERNATIONS, CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.methods.registry import method_of
from salaad.model.roles import find_blocks
from salaad.runs.model_on_disk import RECORD, ModelOnDisk
from salaad.spectral.cost import RATES
from salaad.training.plan import flops_of_passes, rebuilt_outline
from scripts.in_context import losses
from scripts.outlines import description_of
from scripts.reproduction.records import KAPPAS
from scripts.shares import NAMED, all_shares

BEGINS = (0.45, 0.28, 0.2)  # shares at which the ranges of an elastic folder begin
MATCH = 256  # sequences that layers are matched on
DISTILL = 20  # distillation reads one in so many of the training tokens
TEXT_SHARE = 0.3  # share of the text in the targets of distillation; the rest is X's predictions
BEGINNING = "The village is"  # of the text that the smallest and the largest size go on with
BLOCKS = SalaadConfig(embedding=True)
SPLITS = ("rpca", "godec")  # methods of splitting a model that was trained full-rank
FOLDERS = {"tuned": (BEGINS,), "tuned, each": tuple((share,) for share in NAMED)}  # way → shares of each folder


@dataclass(frozen=True)
class TrainedModel:
    """A trained model whose sizes are measured.

    Args:
        run: folder of its run.
        tokens: validation tokens; every figure is measured on their second half.
        text_tokens: tokens of text in the training.
        other_text: a second validation file, on which the sizes that tables name are measured too.
    """

    run: Path
    tokens: int
    text_tokens: int
    other_text: str | None = None

    def evaluation(self, source: ModelOnDisk, split: PostHoc | None = None) -> VariantEvaluation:
        """Return the evaluation of models cut from `source`, which `split`, if given, splits after training."""
        deployment = open_deployment(source, split)
        if split is not None and split.method == "godec":
            room = budgets_of(self)[0][1] - deployment.fixed  # parameters that the largest size leaves to blocks
            split = split.with_room(deployment.shapes.values(), room, ("rank_ratio", "density"))
            deployment = open_deployment(source, split)
        data = DataConfig(**self.source.run["data"])
        return VariantEvaluation(deployment, data, tokens=self.tokens, dtype="float32", batch=16, half="second")

    def on_other_text(self, deployment: Deployment, variant: Variant) -> dict[str, float]:
        """Return a variant's perplexity on the second validation file as `other_perplexity`; {} without such a file."""
        if self.other_text is None:
            return {}
        data = replace(DataConfig(**self.source.run["data"]), source="files", validation_files=(self.other_text,))
        measure = VariantEvaluation(deployment, data, tokens=self.tokens, dtype="float32", batch=16)
        return {"other_perplexity": measure(variant)["perplexity"]}

    def row(self, evaluation: VariantEvaluation, variant: Variant, share: float = 1) -> dict[str, Any]:
        """Return the figures of a variant.

        At shares that tables name and for whole models they include the perplexity on the second text, and the losses
        on tokens that can be copied from their row and on others, with the numbers of these tokens (`in_context`).
        """
        row = evaluation(variant)
        if share not in (*NAMED, 1):
            return row
        with evaluation.opened(variant) as (model, _, _):
            row["in_context"] = losses(model, evaluation.batches())
        return row | self.on_other_text(evaluation.deployment, variant)

    def training_cost(self, positions: int) -> dict[str, float]:
        """Return tokens and operations of the training's forward and backward passes; periodic work is not counted."""
        config, _ = read_command_line(["--config", str(self.run / "config.yaml")])
        model = rebuilt_outline(config, description_of(config))
        work = method_of(config).work(model, config, 1, RATES["cpu"])
        return {"tokens": positions, "operations": flops_of_passes(model, work, config) * positions}

    def costs_of(self, way: str) -> dict[str, float]:
        """Return tokens, operations and bytes of all folders that a way fits, summed over compress.py's records."""
        names = [folder_name(chosen, *split_of_way(way)) for chosen in FOLDERS.get(way_of_tuning(way), ())]
        found = [read_json(self.run / name / RECORD) for name in names]
        costs = [one["tuning"] | {"bytes": one["bytes_on_disk"][1]} for one in found]
        return {key: sum(cost[key] for cost in costs) for key in ("tokens", "operations", "bytes")} if costs else {}

    @property
    def source(self) -> ModelOnDisk:
        """The newest checkpoint."""
        return ModelOnDisk.open(self.run)


def budget_of(deployment: Deployment, share: float) -> int:
    """Parameters of the whole model with this share of the compressible ones."""
    return round(deployment.fixed + share * (deployment.dense - deployment.fixed))


def budgets_of(model: TrainedModel) -> list[tuple[float, int]]:
    """Return all shares and their budgets; the head counts as never compressed, so that sizes are equal in all ways."""
    deployment = open_deployment(model.source, split_for("rpca", head=False))
    return [(share, budget_of(deployment, share)) for share in all_shares()]


Sizes = Iterator[tuple[float, dict[str, Any]]]  # share of the compressible parameters, and the figures measured there


def way_of_tuning(way: str) -> str:
    """Return the part of a way's name that says how it fits on text, `tuned` or `tuned, each`; else an empty string."""
    return way[way.index("tuned") :] if "tuned" in way else ""


def split_of_way(way: str) -> tuple[str | None, bool]:
    """Return how the way of this name splits after training (None: not), and whether it splits the head too."""
    words = way.split(", ")
    return next((name for name in SPLITS if name in words), None), "head" in words


def split_for(how: str | None, head: bool) -> PostHoc:
    """Return what to split after training: all blocks by `how`, or for None only an embedding that is no block.

    With `head` the head is split too.
    """
    if how is None:
        return PostHoc(replace(BLOCKS, roles=("embedding", *["lm_head"] * head)), beside=True)
    return PostHoc(replace(BLOCKS, lm_head=head), how)


def by_energy(model: TrainedModel, how: str | None = None, head: bool = False, weighed: bool = True) -> Sizes:
    """Yield every size, cut by energy and refined; `weighed` by the optimizer's second moments."""
    evaluation = model.evaluation(model.source, split_for(how, head))
    deployment = evaluation.deployment
    if not weighed:  # as before the optimizer's second moments were kept: every entry counts alike
        deployment.trained_weights, deployment.kind = {}, f"{deployment.kind}-alike"
    for share, budget in budgets_of(model):
        variant = Variant(f"{budget}@energy", budget, None, ALTERNATIONS)
        yield share, model.row(evaluation, variant, share) | {"bytes": cut_bytes(deployment, variant)}


def by_hpa(model: TrainedModel, head: bool = False) -> Sizes:
    """Yield every size, cut by HPA with the κ that is best on validation text that no figure is measured on."""
    split = split_for(None, head) if head else None
    evaluation = model.evaluation(model.source, split)
    half = (
        TrainedModel(model.run, model.tokens // 3, model.text_tokens).evaluation(model.source, split).on_half("first")
    )
    for share, budget in budgets_of(model):
        variants = [Variant(f"{budget}@{kappa:g}", budget, kappa) for kappa in KAPPAS]
        best = min(variants, key=lambda variant: half(variant)["perplexity"])
        yield share, model.row(evaluation, best, share) | {"bytes": cut_bytes(evaluation.deployment, best)}


def cut_bytes(deployment: CheckpointDeployment, variant: Variant) -> int:
    """Return the bytes of the file that stores a variant of a checkpoint in float32."""
    return deployment.disk_bytes(deployment.cut(variant), element=4)


def tuned(model: TrainedModel, split: str | None = None, head: bool = False) -> Sizes:
    """Yield the sizes of one elastic folder, whose ranges are matched where they begin and distilled at all sizes."""
    folder = ModelOnDisk.open(compressed(model, BEGINS, split, head))
    evaluation = model.evaluation(folder)
    for share, budget in budgets_of(model):
        variant = Variant(str(budget), budget, stored=True)
        row = model.row(evaluation, variant, share)
        if share in NAMED:
            row["bytes"] = bytes_alone(folder, budget, DataConfig(**model.source.run["data"]))
        yield share, row


def bytes_alone(source: ModelOnDisk, budget: int, data: DataConfig) -> int:
    """Return the bytes of one size of an elastic folder when it is stored in a folder of its own."""
    with TemporaryDirectory() as place:
        path = str(source.folder.path)
        options = CompressOptions(checkpoint=path, output=f"{place}/alone", budget=str(budget), dtype="float32")
        compress(options, source, data)
        return read_json(Path(options.output) / RECORD)["bytes_on_disk"][1]


def tuned_each(model: TrainedModel, split: str | None = None, head: bool = False) -> Sizes:
    """Yield every size that tables name, each from a folder of its own, matched and distilled for this size alone."""
    for share in NAMED:
        folder = compressed(model, (share,), split, head)
        row, of = model.row(model.evaluation(ModelOnDisk.open(folder)), Variant("X")), read_json(folder / RECORD)
        yield share, {**row, "parameters": of["parameters"][1], "bytes": of["bytes_on_disk"][1]}


def compressed(model: TrainedModel, chosen: Sequence[float], split: str | None, head: bool) -> Path:
    """Return the folder that compress.py makes of the model, matched and distilled; made unless it is there.

    Args:
        model: the trained model.
        chosen: share of the compressible parameters to keep; several shares make an elastic folder with their ranges.
        split: how the model is split after training; None takes L + S as trained.
        head: whether the head is split too.
    """
    deployment = open_deployment(model.source, split_for("rpca", head=False))
    budgets = [budget_of(deployment, share) for share in chosen]
    folder = model.run / folder_name(chosen, split, head)
    options = CompressOptions(
        checkpoint=str(model.run),
        output=str(folder),
        budget=",".join(map(str, budgets)),
        elastic=len(chosen) > 1,
        dtype="float32",
        match=MATCH,
        distill=str(model.text_tokens // DISTILL),
        text_share=TEXT_SHARE,
        rpca=split == "rpca",
        godec=split == "godec",
        embedding=True,
        lm_head=head,
    )
    if folder.exists():
        _require_made_so(folder, options, budgets, model.source.digest)
    else:
        compress(options, model.source, DataConfig(**model.source.run["data"]))
    return folder


def _require_made_so(folder: Path, options: CompressOptions, budgets: Sequence[int], digest: str) -> None:
    """Raise a UserError if a folder was made of another checkpoint or in another way."""
    record = read_json(folder / RECORD)
    asked = {key: getattr(options, key) for key in ("match", "distill", "text_share")} | {"digest": digest}
    asked |= {"ranges_from": list(budgets)} if options.elastic else {"budget": budgets[0]}
    other = [key for key, value in asked.items() if record[key] != value]
    if other:
        raise UserError(f"{folder} was made with another {' and '.join(other)}; move it away, and it is made anew")


def folder_name(chosen: Sequence[float], split: str | None, head: bool) -> str:
    """Return the name of the folder that `compressed` makes."""
    return "-".join(["elastic" if len(chosen) > 1 else f"{chosen[0]:g}", *filter(None, [split, "head" * head])])


def samples(folder: Path, least: int) -> list[dict[str, Any]]:
    """Return the texts that the smallest (`least`) and the largest size of an elastic folder make of `BEGINNING`."""
    found, tokenizer = [], AutoTokenizer.from_pretrained(folder)
    units = open_deployment(ModelOnDisk.open(folder))
    prompt = tokenizer(BEGINNING, return_tensors="pt", add_special_tokens=False).input_ids
    for budget in (least, units.largest):
        model = AutoModelForCausalLM.from_pretrained(folder, budget=budget, dtype=torch.float32)
        torch.manual_seed(0)
        ids = model.generate(prompt, max_new_tokens=40, do_sample=True, top_k=10, pad_token_id=0)
        found.append({"parameters": budget, "text": tokenizer.decode(ids[0], skip_special_tokens=True)})
    return found


def nested(model: TrainedModel) -> Sizes:
    """Yield MatFormer's largest width, or mixture of widths, that fits each share, and every uniform narrower width."""
    evaluation = model.evaluation(model.source)
    deployment = evaluation.deployment
    compressible = sum(X.numel() for X in find_blocks(model.source.folder.outline, BLOCKS).values())
    budgets = {share: round(deployment.dense - (1 - share) * compressible) for share in all_shares()}
    widths = [deployment.widths.parameters(deployment.widths.everywhere(w)) for w in deployment.widths.uniform[1:]]
    budgets |= {1 - (deployment.dense - size) / compressible: size for size in widths}
    for share, budget in budgets.items():
        if budget >= deployment.fixed:
            row = model.row(evaluation, Variant(str(budget), budget, stored=True))
            yield share, row | {"bytes": 4 * row["parameters"]}  # its weights in float32


def _ways() -> dict[str, Callable[[TrainedModel], Sizes]]:
    """Return all ways by name: cuts and fits on text, from L + S as trained or a split, the head whole or split."""
    found: dict[str, Callable[[TrainedModel], Sizes]] = {}
    for split, head in product((None, *SPLITS), (False, True)):
        beside = ["head"] if head else []
        words = [*filter(None, [split]), *beside]
        found[", ".join([split or "cut", *beside])] = partial(by_energy, how=split, head=head)
        found[", ".join([*words, "tuned"])] = partial(tuned, split=split, head=head)
        found[", ".join([*words, "tuned", "each"])] = partial(tuned_each, split=split, head=head)
    by_rule = {"energy": partial(by_energy, weighed=False), "hpa": by_hpa, "hpa, head": partial(by_hpa, head=True)}
    return {**found, **by_rule, "nested": nested}


WAYS = _ways()
