"""The limits by which claims are judged: the paper's own number at its worst size, wherever it prints one."""

# L + S relative to X, perplexity and parameters, of every model of Table 1 and of the table with the embedding.
WHOLE_OVER_X = (
    *((31.26 / 31.59, 50 / 58), (22.65 / 22.90, 126 / 134), (18.04 / 18.30, 276 / 368), (14.72 / 14.74, 905 / 1339)),
    *((31.29 / 31.61, 48 / 58), (22.48 / 22.94, 113 / 134), (18.02 / 18.31, 231 / 368)),
)
# The cut by HPA relative to X at 350M with the embedding among the blocks, as it is at all scales that are judged: its
# perplexity, and the parameters down to which it must stay so (185 of 368 M).
CUT_OVER_X, CUT_PARAMETERS = 19.20 / 18.31 - 1, 0.5
# L + S relative to full-rank training (Table 1): perplexity at 350M.
WHOLE_OVER_FULL_RANK = 18.04 / 18.80 - 1
# With the embedding among the blocks at 350M, too: perplexity of L + S relative to the best of LoRA, ReLoRA and GaLore,
# and of its cut (185 M parameters) relative to the best of LORO, CoLA, SLTrain and LOST (Table 1).
WHOLE_OVER_METHODS, CUT_OVER_METHODS = 18.02 / 18.95 - 1, 19.20 / 18.95 - 1
# The part of a method's parameters that a cut has at least, if the two are compared; at most it has all of them.
LEAST_OF_SIZE = 0.9
# κ* over all sizes and budgets (section 5.3 and Table 1).
LEAST_KAPPA, KAPPA_BAND = 0.55, 0.25
# The embedding among the blocks: perplexity relative to that without it, of X at 130M and of L + S at 60M; its rank
# ratio and density at 350M.
EMBEDDING_COST = {"X": 22.94 / 22.90 - 1, "L+S": 31.29 / 31.26 - 1}
EMBEDDING_STRUCTURE = {"rank_ratio": 0.21, "density": 0.12}
# The LM head, of which the paper has plots only: up to which rank ratio and density it counts as low-rank and sparse,
# what that may cost in perplexity, and what the larger ρ has to cost in loss.
HEAD_STRUCTURE, HEAD_COST, HEAD_LOSS = 0.3, 0.01, 0.01
# In how many of the paper's 27 pairs of settings at 130M the larger Δα, Δβ or ρ has the claimed effect.
KNOB_PAIRS = 27
KNOBS = {
    "Δα": {"fewer parameters": 27, "higher PPL of X": 25, "higher PPL of L + S": 21},
    "Δβ": {"fewer parameters": 24, "higher PPL of X": 22, "higher PPL of L + S": 26},
    "ρ": {"fewer parameters": 27, "higher PPL of X": 25, "higher PPL of L + S": 24},
}
# The largest less the smallest final loss of the three K/J at 1B, in nats.
LOSSES_OVER_K = 2.84 - 2.78
# The reconstruction error, of which the paper has plots only.
LATE_OVER_EARLY, LAST_OVER_THIRD, WORST_BLOCK, THRESHOLD_GROWTH = 1.5, 1.1, 0.3, 1.1
# Training in bfloat16 relative to float32: perplexity at 130M.
BF16_COST = {"X": 24.26 / 22.94 - 1, "L+S": 24.18 / 22.48 - 1}
# Robust PCA at 1B: the mean of what it finds in SALAAD weights less the true value; and, beyond the paper, the mean
# absolute difference over the blocks, and what it finds in vanilla weights relative to noise.
FOUND_LESS_TRUE = {"rank_ratio": 0.022, "density": 0.032}
FOUND_OF_A_BLOCK, VANILLA_OVER_NOISE = 0.1, 0.8
