"""The claims of the paper, and two of ours: what each says, by what it is judged, the paper's numbers, and ours."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from salaad.common.files import read_json
from scripts.reproduction import comparison_judges, criteria, deployment_judges, judges
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.comparison_judges import NOTHING, Compared, Found
from scripts.reproduction.evidence import NOT_SHOWN, Lacking, Number, percent
from scripts.reproduction.experiments import NUMBERS
from scripts.reproduction.freshness import OTHERS, commits_of, mark_of, with_legend
from scripts.reproduction.grid import Scale
from scripts.reproduction.records import KAPPA_STEP

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim at one scale.

    Args:
        numbers: our numbers, some with a limit; empty if the claim is not measured.
        missing: the command that measures the missing results; if results are there, with the reason to repeat them.
        mark: of numbers from code that has changed since or was not committed; none for others.
    """

    numbers: Sequence[Number] = ()
    missing: str = ""
    mark: str = ""

    @property
    def answer(self) -> str:
        """Yes, no, not shown or not measured, as text."""
        return ANSWERS[self.agrees] if self.numbers else NOT_MEASURED

    @property
    def agrees(self) -> bool | None:
        """Whether all limits are kept; None where nothing with a limit is measured, or some are kept by chance."""
        decisive = [number.holds for number in self.numbers if number.holds is not None]
        if False in decisive:
            return False
        return True if decisive and NOT_SHOWN not in decisive else None


@dataclass(frozen=True)
class Claim:
    """A claim of the paper or of ours, and how it is judged.

    Args:
        name: in a few words.
        section: section and table of the paper.
        statement: the claim as a sentence.
        measure: what is computed, and for which values the claim agrees.
        paper: the paper's value.
        items: names of the items that the claim is judged from; none for a claim that is judged by comparisons alone.
        judge: function from the results of these items to numbers.
        beside: names of experiments that explain the outcome; if measured, their numbers are listed after the others.
        compared: function from comparisons at a scale to numbers, for where an item is missing.
        prefers_comparisons: whether numbers from comparisons decide where both are there, as their trainings have
            better learning rates.
    """

    name: str
    section: str
    statement: str
    measure: str
    paper: str
    items: tuple[str, ...] = ()
    judge: judges.Judge | None = None
    beside: tuple[str, ...] = ()
    compared: Callable[[Compared], Found] | None = None
    prefers_comparisons: bool = False

    def verdict(self, folder: Path, scale: Scale) -> Verdict:
        """Return the verdict from the results in `folder`, or from comparisons beside its scale."""
        if self.prefers_comparisons and (preferred := self._from_comparisons(folder, scale)).numbers:
            return preferred
        missing = [name for name in self.items if not (folder / f"{name}.json").exists()]
        if missing or not self.items:
            command = scale.command(*missing) if missing else comparison(scale)
            return self._from_comparisons(folder, scale, command)
        there = [name for name in self.beside if (folder / f"{name}.json").exists()]
        results = {name: read_json(folder / f"{name}.json") for name in self.items}
        try:
            numbers = self.judge(results)
        except (LookupError, TypeError, ValueError) as error:
            lacking = str(error) if isinstance(error, Lacking | KeyError) else "a row or figure"
            files = ", ".join(f"{name}.json" for name in self.items)
            again = f"{scale.command(*self.items)} --again ({lacking} is not in {files})"
            return self._from_comparisons(folder, scale, again)
        why = [number for name in there for number in NUMBERS[name](read_json(folder / f"{name}.json")["rows"])]
        mark = mark_of(commit for result in results.values() for commit in commits_of(result))
        others = any(item.is_of_others(scale, results[item.name]) for item in ITEMS if item.name in results)
        return Verdict([*numbers, *why], mark=mark + (OTHERS if others else ""))

    def _from_comparisons(self, folder: Path, scale: Scale, missing: str = "") -> Verdict:
        """Return the verdict from comparisons at a scale; `missing` is what measures the items instead."""
        found = self.compared(Compared.at(folder.parents[1], scale.name)) if self.compared else NOTHING
        return Verdict(found.numbers, missing=missing, mark=mark_of(found.commits))


def comparison(scale: Scale) -> str:
    """Return the command that trains all methods at a scale."""
    text = scale.command_options[2:] if scale.text else ()
    output = f"results/methods/{scale.name}.json"
    return shlex.join(["python", "scripts/compare_methods.py", "--config", scale.name, "--output", output, *text])


CLAIMS = (
    Claim(
        "L + S can replace X",
        "5.1, Table 1",
        "The structured surrogate L + S matches X at fewer parameters.",
        "perplexity of L + S over that of X, and parameters of L + S over those of X: in every seed both at most those "
        "of one of the paper's seven models",
        "60M −1.0 % at 86 %, 130M −1.1 % at 94 %, 350M −1.4 % at 75 %, 1B −0.1 % at 68 %; with the embedding among the "
        "blocks 60M −1.0 % at 83 %, 130M −2.0 % at 84 %, 350M −1.6 % at 63 %",
        ("table1",),
        judges.central,
    ),
    Claim(
        "L + S beats full-rank training",
        "5.1, Table 1",
        "L + S has a lower perplexity than a model trained full-rank on the same tokens.",
        "perplexity of L + S over that of full-rank training: in every seed at most "
        f"{percent(criteria.WHOLE_OVER_FULL_RANK)}",
        "60M −8.2 %, 130M −7.0 %, 350M −4.0 %, 1B −5.4 %, against full-rank rows copied from another paper, trained in "
        "bfloat16, their learning rates not searched (60M 34.06; others report 30.08)",
        ("table1",),
        judges.against_full_rank,
    ),
    Claim(
        "SALAAD is no worse than other methods of its size",
        "5.1, Table 1",
        "At comparable or smaller sizes, L + S and its cuts match or outperform existing methods.",
        "perplexity of L + S, with no more parameters, over that of LoRA, ReLoRA and GaLore: each at most "
        f"{percent(criteria.WHOLE_OVER_METHODS)}; of L + S cut by HPA at κ*, to a size no larger, over that of LORO, "
        f"CoLA, SLTrain and LOST: each at most {percent(criteria.CUT_OVER_METHODS)}; seed 0, every method at its best "
        "learning rate of a search in runs of an eighth of the length, at nano with one rate for all weights of SALAAD",
        "over the best of them: L + S 60M −10.4 %, 130M −10.7 %, 350M −4.8 %, 1B −5.9 %; the cut 60M −0.9 %, 130M "
        "−0.6 %, 350M +4.0 %, 1B +0.3 %, with up to 6 % more parameters than the method; with the embedding among the "
        "blocks L + S 60M −10.3 %, 130M −11.4 %, 350M −4.9 %; the cut, with as many parameters as LOST, 60M −2.7 %, "
        "130M −4.4 %, 350M +1.3 %; all rows of other methods are copied from another paper, trained in bfloat16",
        compared=comparison_judges.other_methods,
    ),
    Claim(
        "Smooth elastic deployment, cut by HPA",
        "5.1, Flexible deployment",
        "One checkpoint deploys at any budget, smoothly, while vanilla weights split by robust PCA degrade rapidly.",
        "both models cut by HPA at κ*, which is chosen on other text: perplexity of SALAAD below vanilla + RPCA at "
        "every budget below L + S and in every seed; largest ratio of the perplexities of neighbouring sizes, from "
        f"L + S down, smaller than for vanilla + RPCA; with at least {criteria.CUT_PARAMETERS:.0%} of X's parameters, "
        f"perplexity over that of X at most {percent(criteria.CUT_OVER_X)} in every seed",
        "a figure: SALAAD below vanilla + RPCA at all budgets; the cut over X in Table 1: 60M +1.2 % at 76 %, 130M "
        "+4.4 % at 72 %, 350M +7.7 % at 53 %, 1B +2.2 % at 48 %; with the embedding among the blocks 60M −0.7 % at "
        "74 %, 130M +0.2 % at 70 %, 350M +4.9 % at 50 %",
        ("flexible",),
        deployment_judges.elastic_by_hpa,
    ),
    Claim(
        "Smooth elastic deployment, cut by energy and refined",
        "beyond the paper",
        "The claim about HPA also holds for the cut that suits both models best.",
        "both models cut by energy and refined; the rest as for HPA",
        "no cut other than HPA was tried",
        ("flexible",),
        deployment_judges.elastic_by_energy,
    ),
    Claim(
        "A cut of the paper's model, its head dense, beats a small dense model",
        "beyond the paper",
        "A model trained as in the paper and cut is better than a dense model trained at that size on the same tokens.",
        "perplexity of the cut (by energy with weighted entries, refined, the head left dense) below that of the dense "
        "model at every budget below L + S; seed 0; of trainings of compare_elastic.py where all are there, with a "
        "learning rate of their own for the projections, else of trainings with the scale's one rate",
        "no small dense model was trained",
        ("one_training",),
        deployment_judges.against_small_dense,
        compared=comparison_judges.small_dense,
        prefers_comparisons=True,
    ),
    Claim(
        "κ* is stable and above 0.5",
        "5.3",
        "The best allocation ratio hardly depends on the budget, and takes most of the removed parameters from L.",
        f"κ* of every seed and every budget that removes at least 5 % of L + S, in steps of {KAPPA_STEP}, chosen on "
        "other text than the perplexity at κ* is measured on (by compare_elastic.py on a sixth of the validation text)"
        f": all at least {criteria.LEAST_KAPPA} and in a band of at most {criteria.KAPPA_BAND}",
        "0.55 to 0.8 over sizes and budgets (Table 1 0.6 to 0.8; with the embedding 0.55 to 0.8)",
        ("kappa",),
        deployment_judges.kappa,
        beside=("kappa_share",),
        compared=comparison_judges.kappa,
    ),
    Claim(
        "The embedding accepts structure",
        "5.1, appendix",
        "The embedding becomes low-rank and sparse at no cost: in the paper's word, it is benign.",
        "perplexity of X and of L + S with the embedding among the blocks over that without: mean over the seeds at "
        f"most {' and '.join(map(percent, criteria.EMBEDDING_COST.values()))}; in every seed fewer parameters of "
        "L + S, and rank ratio and density of the embedding at most "
        f"{' and '.join(map(str, criteria.EMBEDDING_STRUCTURE.values()))}",
        "X +0.1 %, +0.2 %, +0.1 %; L + S +0.1 %, −0.8 %, −0.1 % (60M, 130M, 350M); 48 M instead of 50 M, 113 M instead "
        "of 126 M, 231 M instead of 276 M parameters; at 350M rank ratio 0.21, density 0.12",
        ("embedding",),
        judges.embedding,
        beside=("embedding_why",),
    ),
    Claim(
        "The LM head resists structure",
        "5.1, appendix",
        "At a small ρ the LM head gets no stable structure; at a larger ρ it does, but the training loss rises.",
        "in every seed: (1) at neither of two ρ does the head end at a rank ratio and a density of at most "
        f"{criteria.HEAD_STRUCTURE} while perplexity rises by at most {percent(criteria.HEAD_COST)} over the run "
        "without the head; (2) at both ρ, rank ratio and density of the embedding are at most those of the head; "
        f"(1) and (2) show nothing where the embedding itself is above {criteria.HEAD_STRUCTURE}; (3) from the smaller "
        f"to the larger ρ the training loss rises by over {criteria.HEAD_LOSS} nats more with the head than without "
        "it; (4) the larger ρ lowers rank ratio and density of the head; the limits are ours",
        "a figure at 60M: no stable structure at ρ = 1e-7; structure, and a higher training loss, at 1e-6",
        ("lm_head",),
        judges.lm_head,
    ),
    Claim(
        "Δα, Δβ and ρ trade perplexity for size",
        "5.3, appendix",
        "A larger Δα, Δβ or ρ raises perplexity and lowers the parameters.",
        f"in the 130M grid, {criteria.KNOB_PAIRS} pairs of settings differ in Δα alone, as many in Δβ and as many in "
        "ρ: in each group the larger value gives fewer parameters, a higher perplexity of X and a higher perplexity of "
        "L + S, each in at least as many pairs as in the paper",
        "share of pairs for Δα, Δβ, ρ: fewer parameters 100 %, 89 %, 100 %; higher perplexity of X 93 %, 81 %, 93 %, "
        "of L + S 78 %, 96 %, 89 % (three numbers of the grid are printed for two settings, and at 350M the row of "
        "Δα 0.1, Δβ 0.01, ρ 5e-8 repeats that of Δβ 0.005)",
        ("ablation350m", "ablation350m_rho", "ablation130m", "ablation130m_pairs"),
        judges.knobs,
    ),
    Claim(
        "K/J trades structure for error",
        "appendix",
        "More frequent ADMM updates give stronger structure and a larger reconstruction error at almost the same loss.",
        "as K rises, in every seed: rank ratio, density and parameters of L + S rise, the mean error δ = ‖X − L − S‖ "
        f"falls, and the final losses stay within {criteria.LOSSES_OVER_K:.2f} nats",
        "K/J 5, 10, 20 at 1B, with the embedding among the blocks, unlike in Table 1: loss 2.84, 2.84, 2.78; mean δ "
        "10.16, 7.74, 5.73; ranks of the shown blocks rise with K",
        ("frequency",),
        judges.frequency,
    ),
    Claim(
        "The reconstruction error is bounded, in every block too",
        "4.1, appendix",
        "The mean distance between X and L + S stays bounded throughout training.",
        f"in every seed: mean δ in the second half of the updates is never above {criteria.LATE_OVER_EARLY} times its "
        "largest value in the first half; with the updates in 200 equal parts, and the largest mean δ of each, the "
        f"average of these over the last quarter is at most {criteria.LAST_OVER_THIRD} times that over the third "
        f"quarter; no block ends with ‖X − L − S‖ above {criteria.WORST_BLOCK:.0%} of ‖X‖; and no block's mean τ_S "
        f"over the last quarter is above {criteria.THRESHOLD_GROWTH} times that over the third quarter, since with "
        "J = 1 no entry of X − L − S can exceed 2·τ_S; all four limits are ours",
        "figures of the mean δ at four sizes: bounded; nothing is said of single blocks or of τ_S",
        ("dynamics",),
        judges.bounded,
    ),
    Claim(
        "bfloat16 costs little",
        "5.1, appendix",
        "SALAAD can be trained in bfloat16 with a moderate loss of perplexity.",
        "perplexity of X and of L + S trained in bfloat16 over that in float32: mean over the seeds at most "
        f"{' and '.join(map(percent, criteria.BF16_COST.values()))}, the paper's worst; both with the embedding among "
        "the blocks",
        "X +4.0 %, +5.8 %, +3.9 %; L + S +4.2 %, +7.6 %, +5.0 % (60M, 130M, 350M), with a slightly larger ρ",
        ("bf16",),
        judges.bf16,
    ),
    Claim(
        "Robust PCA finds structure only in SALAAD weights",
        "appendix A",
        "Robust PCA finds no useful structure in vanilla weights, but recovers the structure of SALAAD weights.",
        "in vanilla weights, RPCA's L + S is no smaller than X (the paper's sense of no useful structure), and rank "
        f"ratio and density are at least {criteria.VANILLA_OVER_NOISE} of those in Gaussian noise of the same "
        "variance; in SALAAD's L + S, and in its cut of Table 1, found minus true rank ratio and density are at most "
        f"±{' and ±'.join(map(str, criteria.FOUND_LESS_TRUE.values()))} in the mean over the blocks, as in the paper, "
        f"and at most {criteria.FOUND_OF_A_BLOCK} in mean absolute value (the limits on noise and on absolute values "
        "are ours)",
        "1B: vanilla rank 0.48 ± 0.02, density 0.32 ± 0.05 (not compared with noise); SALAAD found 0.25 ± 0.08 and "
        "0.03 ± 0.02, true 0.23 ± 0.08 and 0.06 ± 0.03, which fits its cut to 646 M parameters, not L + S of 905 M",
        ("rpca_vanilla", "rpca_salaad", "flexible"),
        deployment_judges.rpca,
        beside=("rpca_limit",),
    ),
)


def verdicts(scale: Scale, folder: Path | None = None) -> list[tuple[Claim, Verdict]]:
    """Return every claim with its verdict at a scale; `folder` holds the results, `scale.results` unless given."""
    return [(claim, claim.verdict(folder or scale.results, scale)) for claim in CLAIMS]


def claims_table(scale: Scale, folder: Path | None = None) -> str:
    """A Markdown table of every claim at a scale: the verdict, and the numbers that it rests on."""
    lines, found = [], verdicts(scale, folder)
    measured = [verdict.mark for _, verdict in found if verdict.numbers]
    marks = iter(with_legend(measured, "verdict")[0])
    for claim, verdict in found:
        numbers = verdict.numbers or [Number("not measured yet", f"`{verdict.missing}`")]
        names = [
            f"**{claim.name}**: {verdict.answer}{next(marks) if verdict.numbers else ''}",
            *[""] * (len(numbers) - 1),
        ]
        holds = ["–" if one.holds is None else ANSWERS.get(one.holds, one.holds) for one in numbers]
        lines += [
            (name, one.what, one.ours, one.limit or "–", kept)
            for name, one, kept in zip(names, numbers, holds, strict=True)
        ]
    return text_table(("claim", "number", "ours", "limit", "holds"), lines)


ANSWERS = {True: "yes", False: "no", None: NOT_SHOWN}


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of sentences, which are set to the left and not padded."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))
