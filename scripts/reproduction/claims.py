"""The claims of the paper, and two of ours: what each says, by what it is judged, the paper's numbers, and ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from salaad.common.files import read_json
from scripts.reproduction import criteria, deployment_judges, judges
from scripts.reproduction.evidence import NOT_SHOWN, Number, percent, structure_text
from scripts.reproduction.experiments import NUMBERS
from scripts.reproduction.freshness import MARK, commits_of, is_fresh
from scripts.reproduction.grid import Scale


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim at one scale.

    Args:
        numbers: our numbers, each with its limit if it has one; empty if the claim is not measured.
        missing: the command that measures the missing results; if results are there, with the reason to repeat them.
        fresh: whether the results come from committed code that has not changed since.
    """

    numbers: Sequence[Number] = ()
    missing: str = ""
    fresh: bool = True

    @property
    def answer(self) -> str:
        """Yes, no, not shown or not measured, as text; with a mark if the results are not fresh."""
        if not self.numbers:
            return "not measured"
        return ANSWERS[self.agrees] if self.fresh else f"{ANSWERS[self.agrees]} {MARK}"

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
        items: names of the items that the claim is judged from.
        judge: function from the results of these items to numbers.
        beside: names of experiments that explain the outcome; if measured, their numbers are listed after the others.
    """

    name: str
    section: str
    statement: str
    measure: str
    paper: str
    items: tuple[str, ...]
    judge: judges.Judge
    beside: tuple[str, ...] = ()

    def verdict(self, folder: Path, scale: Scale) -> Verdict:
        """Return the verdict from the results in `folder`."""
        missing = [name for name in self.items if not (folder / f"{name}.json").exists()]
        if missing:
            return Verdict(missing=scale.command(*missing))
        there = [name for name in self.beside if (folder / f"{name}.json").exists()]
        results = {name: read_json(folder / f"{name}.json") for name in self.items}
        try:
            numbers = self.judge(results)
        except (KeyError, StopIteration, TypeError, ValueError) as error:
            files = ", ".join(f"{name}.json" for name in self.items)
            return Verdict(missing=f"{scale.command(*self.items)} --again (for {error!r}, which {files} lack)")
        why = [number for name in there for number in NUMBERS[name](read_json(folder / f"{name}.json")["rows"])]
        fresh = is_fresh(commit for result in results.values() for commit in commits_of(result))
        return Verdict([*numbers, *why], fresh=fresh)


CLAIMS = (
    Claim(
        "L + S stands for X",
        "5.1, Table 1",
        "The structured surrogate L + S matches X at fewer parameters.",
        f"perplexity of L + S over that of X: in every seed at most {percent(criteria.WHOLE_OVER_X)}, with at most "
        f"{criteria.WHOLE_PARAMETERS:.0%} of the parameters",
        "60M −1.0 % at 86 %, 130M −1.1 % at 94 %, 350M −1.4 % at 75 %, 1B −0.1 % at 68 %",
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
        "bfloat16 and not tuned (60M 34.06; others report 30.08)",
        ("table1",),
        judges.against_full_rank,
    ),
    Claim(
        "A smooth elastic curve, by HPA",
        "5.1, Flexible deployment",
        "One checkpoint deploys at any budget, smoothly, where vanilla weights split by robust PCA degrade rapidly.",
        "perplexity of SALAAD below vanilla + RPCA at every budget below L + S and in every seed, and a smaller "
        "largest step from L + S down, both cut by HPA at κ* as in the paper",
        "a figure: SALAAD below vanilla + RPCA at all budgets",
        ("flexible",),
        deployment_judges.elastic_by_hpa,
    ),
    Claim(
        "The same, by energy and refined",
        "beyond the paper",
        "The same of the cut that serves both best.",
        "as above, both cut by energy and refined",
        "no other cut than HPA was tried",
        ("flexible",),
        deployment_judges.elastic_by_energy,
    ),
    Claim(
        "A cut beats a small dense model",
        "beyond the paper",
        "What is cut from one training is better than a dense model trained at that size on the same tokens.",
        "perplexity of the cut, by energy and refined, the head whole, below that of the dense model at every budget "
        "below L + S; seed 0",
        "no small dense model was trained",
        ("one_training",),
        deployment_judges.against_small_dense,
    ),
    Claim(
        "κ* is stable and above 0.5",
        "5.3",
        "The best allocation ratio hardly depends on the budget, and gives the low-rank side more of what is removed.",
        "κ* of every seed and every budget that removes at least 5 % of L + S, in steps of 0.05, chosen on half of the "
        f"text: all at least {criteria.LEAST_KAPPA} and in a band of at most {criteria.KAPPA_BAND}",
        "0.55 to 0.8 over sizes and budgets (Table 1 0.6 to 0.8; with the embedding 0.55 to 0.8)",
        ("kappa",),
        deployment_judges.kappa,
        beside=("kappa_share",),
    ),
    Claim(
        "The embedding is benign",
        "5.1, appendix",
        "The embedding takes low-rank and sparse structure at no cost.",
        "X and L + S with the embedding among the blocks over those without: at most "
        f"{' and '.join(map(percent, criteria.EMBEDDING_COST.values()))}, in the mean over the seeds; in every seed "
        "fewer parameters, and a rank ratio and a density of the embedding of at most "
        f"{structure_text(criteria.EMBEDDING_STRUCTURE)}",
        "X +0.1 %, +0.2 %, +0.1 %; L + S +0.1 %, −0.8 %, −0.1 % (60M, 130M, 350M); 48 M for 50 M, 113 M for 126 M, "
        "231 M for 276 M; at 350M rank ratio 0.21, density 0.12",
        ("embedding",),
        judges.embedding,
        beside=("embedding_why",),
    ),
    Claim(
        "The LM head is not",
        "5.1, appendix",
        "The LM head takes no stable structure at a small ρ, and at a larger one it costs loss.",
        "in every seed: at neither of two ρ does the head both end at a rank ratio and a density of at most "
        f"{criteria.HEAD_STRUCTURE} and cost at most {percent(criteria.HEAD_COST)} of perplexity against the run "
        "without it, and the embedding is at least as structured at both, which shows nothing where the embedding is "
        f"not structured either; the larger ρ costs over {criteria.HEAD_LOSS} nats more with the head, and gives it "
        "more structure",
        "a figure at 60M: no stable structure at ρ = 1e-7; structure, and a higher training loss, at 1e-6",
        ("lm_head",),
        judges.lm_head,
    ),
    Claim(
        "Δα, Δβ and ρ trade perplexity for size",
        "5.3, appendix",
        "A larger Δα, Δβ or ρ raises perplexity and lowers the parameters.",
        f"of the 130M grid's {criteria.KNOB_PAIRS} pairs each of settings that differ in one of the three: in at least "
        "as many as in the paper the larger has fewer parameters, a higher perplexity of X, and a higher one of L + S",
        "fewer parameters Δα 100 %, Δβ 89 %, ρ 100 %; X 93 %, 81 %, 93 %; L + S 78 %, 96 %, 89 % (three numbers of the "
        "grid are printed for two settings)",
        ("ablation350m", "ablation350m_rho", "ablation130m", "ablation130m_pairs"),
        judges.knobs,
    ),
    Claim(
        "K/J trades structure for error",
        "appendix",
        "More frequent ADMM updates give stronger structure and a larger reconstruction error at almost the same loss.",
        "over rising K, in every seed: rank ratio, density and parameters of L + S rise, mean δ falls, final losses "
        f"within {criteria.LOSSES_OVER_K - 1:.1%}",
        "K/J 5, 10, 20 at 1B, with the embedding, which Table 1 leaves out: loss 2.84, 2.84, 2.78; mean δ 10.16, 7.74, "
        "5.73; ranks of the shown blocks rise with K",
        ("frequency",),
        judges.frequency,
    ),
    Claim(
        "The reconstruction error is bounded",
        "4.1, appendix",
        "The mean distance of X from L + S stays bounded all through training.",
        f"mean δ in the second half of the updates never above {criteria.LATE_OVER_EARLY} times its largest value of "
        f"the first half, and in the last quarter at most {criteria.LAST_OVER_THIRD} times that of the third, on "
        f"average; no block with ‖X − L − S‖ above {criteria.WORST_BLOCK:.0%} of ‖X‖ at the end; and, as with J = 1 no "
        "entry of X − L − S can exceed 2·τ_S, no τ_S of the last quarter above "
        f"{criteria.THRESHOLD_GROWTH} times that of the third; all in every seed",
        "figures at four sizes: bounded",
        ("dynamics",),
        judges.bounded,
    ),
    Claim(
        "bfloat16 costs little",
        "5.1, appendix",
        "SALAAD can be trained in bfloat16 with a moderate loss of perplexity.",
        f"X and L + S trained in bfloat16 over those in float32 at most {percent(criteria.BF16_COST)}, the paper's "
        "worst, in the mean over the seeds, both with the embedding among the blocks",
        "X +4.0 %, +5.8 %, +3.9 %; L + S +4.2 %, +7.6 %, +5.0 % (60M, 130M, 350M), with a slightly larger ρ",
        ("bf16",),
        judges.bf16,
    ),
    Claim(
        "Robust PCA finds what is there",
        "appendix A",
        "Robust PCA finds no useful structure in vanilla weights, and finds that of SALAAD weights.",
        "RPCA's L + S of vanilla no smaller than X, as the paper means it; rank ratio and density of vanilla at least "
        f"{criteria.VANILLA_OVER_NOISE} of those of Gaussian noise of the same variance; those of SALAAD's L + S, and "
        "of its cut of Table 1, found as they are: their means to "
        f"{' and '.join(map(str, criteria.FOUND_LESS_TRUE.values()))}, as in the paper, and a block's to "
        f"{criteria.FOUND_OF_A_BLOCK}, in the mean",
        "1B: vanilla rank 0.48 ± 0.02, density 0.32 ± 0.05 (no noise to compare); SALAAD found 0.25 ± 0.08 and "
        "0.03 ± 0.02, trained 0.23 ± 0.08 and 0.06 ± 0.03, which fits its cut to 646 M parameters, not L + S of 905 M",
        ("rpca_vanilla", "rpca_salaad", "flexible"),
        deployment_judges.rpca,
        beside=("rpca_limit",),
    ),
)


def verdicts(scale: Scale, folder: Path | None = None) -> list[tuple[Claim, Verdict]]:
    """Return every claim with its verdict at a scale; `folder` holds the results, `scale.results` unless given."""
    return [(claim, claim.verdict(folder or scale.results, scale)) for claim in CLAIMS]


def claims_tables(scale: Scale, folder: Path | None = None) -> str:
    """Two Markdown tables: by what each claim is judged and whether it agrees; and the numbers it is judged by."""
    found, lines = verdicts(scale, folder), []
    for claim, verdict in found:
        numbers = verdict.numbers or [Number("not measured yet", f"`{verdict.missing}`")]
        names = [f"**{claim.name}**", *[""] * (len(numbers) - 1)]
        holds = ["–" if one.holds is None else ANSWERS.get(one.holds, one.holds) for one in numbers]
        lines += [(name, one.what, one.ours, kept) for name, one, kept in zip(names, numbers, holds, strict=True)]
    return "\n\n".join(
        (
            text_table(
                ("claim", "measure", "the paper", "agrees"),
                [(f"**{c.name}** ({c.section}): {c.statement}", c.measure, c.paper, v.answer) for c, v in found],
            ),
            text_table(("claim", "number, and its limit", "ours", "holds"), lines),
        )
    )


ANSWERS = {True: "yes", False: "no", None: NOT_SHOWN}


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of sentences, which are set to the left and not padded."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))
