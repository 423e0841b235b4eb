"""Every table and figure of the paper, in the paper's order, then our experiments beyond it."""

from scripts.reproduction import appendix_c, curves, deployments, diagrams, experiments, tables
from scripts.reproduction import trainings as t
from scripts.reproduction.items import Item

OTHER = ("other-text",)
LLAMA = "python evaluate.py rpca --checkpoint FOLDER_OF_LLAMA-3.2-3B"
TABLE_1 = t.every_seed(t.VANILLA, t.SALAAD)
SEEDS = t.every_seed(t.SALAAD)
BOTH = t.once(t.VANILLA, t.SALAAD)
BF16 = t.every_seed(t.VANILLA_BF16, t.SALAAD_BF16, t.VANILLA, t.WITH_EMBEDDING)
RECORDS = t.once()  # opens no run folder: the records of the trainings are enough
# fmt: off
ITEMS = (
    Item("table1", "Perplexity and parameters", "5.1, Table 1", TABLE_1, tables.table1, reads=OTHER),
    Item("embedding", "The embedding among the blocks", "5.1, appendix",
         t.every_seed(t.WITH_EMBEDDING, t.WITHOUT_EMBEDDING), tables.embedding, reads=OTHER),
    Item("time", "Wall-time breakdown", "5.1", BOTH, curves.time_breakdown, RECORDS),
    Item("flexible", "Flexible deployment", "5.1", TABLE_1, deployments.flexible),
    Item("downstream", "Zero-shot accuracy", "5.2", BOTH, deployments.downstream, reads=("task-data",)),
    Item("kappa", "Allocation ratio κ", "5.3", SEEDS, deployments.kappa_sweep),
    Item("ablation350m", "Δβ and Δα", "5.3", t.once(*t.BETAS_350M, *t.ALPHAS_350M), tables.ablation_350m),
    Item("ablation350m_rho", "ρ under pairs of Δα, Δβ", "5.3", t.once(*t.RHO_PAIRS_350M), tables.ablation_rho_350m),
    Item("rpca_vanilla", "Robust PCA of vanilla weights", "appendix A", t.every_seed(t.VANILLA),
         deployments.rpca_vanilla, hub=LLAMA),
    Item("rpca_salaad", "Robust PCA of SALAAD weights", "appendix A", SEEDS, deployments.rpca_salaad),
    Item("overview", "The two pipelines", "appendix", t.once(), diagrams.overview),
    Item("cost", "Memory and operations", "appendix C", t.once(), appendix_c.memory_and_operations),
    Item("hpa", "HPA across the blocks", "appendix", t.once(t.SALAAD), deployments.hpa_blocks),
    Item("bf16", "Training in bfloat16", "appendix", BF16, tables.bf16, reads=OTHER),
    Item("dynamics", "Learning dynamics", "appendix", SEEDS, curves.learning_dynamics),
    Item("lm_head", "The LM head among the blocks", "appendix", t.every_seed(*t.HEADS, *t.EMBEDDINGS), tables.lm_head),
    Item("ablation130m", "Δβ and Δα over decades", "appendix", t.once(*t.BETAS_130M, *t.ALPHAS_130M),
         tables.ablation_130m),
    Item("ablation130m_pairs", "ρ, Δα and Δβ", "appendix", t.once(*t.PAIRS_130M), tables.ablation_pairs_130m),
    Item("frequency", "ADMM update frequency K/J", "appendix", t.every_seed(*t.FREQUENCIES), tables.update_frequency),
    Item("one_training", "One training or one per size", "beyond the paper",
         lambda scale: [t.VANILLA, t.SALAAD, *t.small_dense(scale).values()], experiments.one_training),
    Item("embedding_why", "What gives the embedding a structure", "beyond the paper",
         lambda scale: list(t.embedding_why(scale).values()), experiments.embedding_why),
    Item("rpca_limit", "Where robust PCA finds L + S", "beyond the paper", t.once(t.SALAAD), experiments.rpca_limit),
    Item("kappa_share", "Why κ* is where it is", "beyond the paper", t.once(*t.SHARES), experiments.kappa_share),
)
