"""Every table and figure of the paper, in its order."""

from scripts.reproduction import curves, deployments, experiments, tables, trainings
from scripts.reproduction.items import Item

OTHER = ("other-text",)
ITEMS = (
    Item("table1", "Perplexity and parameters", "5.1, Table 1", trainings.table1, tables.table1, reads=OTHER),
    Item(
        "embedding",
        "The embedding among the blocks",
        "5.1, appendix",
        trainings.embedding,
        curves.embedding,
        reads=OTHER,
    ),
    Item("time", "Wall-time breakdown", "5.1", trainings.one_of_each, curves.time_breakdown, folders=trainings.none),
    Item("flexible", "Flexible deployment", "5.1", trainings.table1, deployments.flexible),
    Item(
        "downstream", "Zero-shot accuracy", "5.2", trainings.one_of_each, deployments.downstream, reads=("task-data",)
    ),
    Item("kappa", "Allocation ratio κ", "5.3", trainings.salaad_seeds, deployments.kappa_sweep),
    Item("ablation350m", "Δβ and Δα", "5.3", trainings.ablation_350m, tables.ablation_350m, folders=trainings.none),
    Item(
        "ablation350m_rho",
        "ρ under pairs of Δα, Δβ",
        "5.3",
        trainings.ablation_rho_350m,
        tables.ablation_rho_350m,
        folders=trainings.none,
    ),
    Item(
        "rpca_vanilla",
        "Robust PCA of vanilla weights",
        "appendix A",
        trainings.vanilla_seeds,
        deployments.rpca_vanilla,
        hub="python evaluate.py rpca --checkpoint FOLDER_OF_LLAMA-3.2-3B",
    ),
    Item("rpca_salaad", "Robust PCA of SALAAD weights", "appendix A", trainings.salaad_seeds, deployments.rpca_salaad),
    Item("overview", "The two pipelines", "appendix", trainings.none, curves.overview),
    Item("hpa", "HPA across the blocks", "appendix", trainings.salaad_alone, deployments.hpa_blocks),
    Item("bf16", "Training in bfloat16", "appendix", trainings.bf16, tables.bf16, reads=OTHER),
    Item("dynamics", "Learning dynamics", "appendix", trainings.salaad_seeds, curves.learning_dynamics),
    Item(
        "lm_head",
        "The LM head among the blocks",
        "appendix",
        trainings.lm_head,
        curves.lm_head,
        folders=trainings.first_seeds(*trainings.HEADS, *trainings.EMBEDDINGS),
    ),
    Item(
        "ablation130m",
        "Δβ and Δα over decades",
        "appendix",
        trainings.ablation_130m,
        tables.ablation_130m,
        folders=trainings.none,
    ),
    Item(
        "ablation130m_pairs",
        "ρ, Δα and Δβ",
        "appendix",
        trainings.ablation_pairs_130m,
        curves.ablation_pairs,
        folders=trainings.none,
    ),
    Item(
        "frequency",
        "ADMM update frequency K/J",
        "appendix",
        trainings.update_frequency,
        curves.update_frequency,
        folders=trainings.first_seeds(*trainings.FREQUENCIES),
    ),
    Item(
        "embedding_why",
        "What gives the embedding a structure",
        "beyond the paper",
        lambda scale: list(trainings.embedding_why(scale).values()),
        experiments.embedding_why,
        folders=trainings.none,
    ),
    Item(
        "rpca_limit", "Where robust PCA finds L + S", "beyond the paper", trainings.salaad_alone, experiments.rpca_limit
    ),
    Item("kappa_share", "Why κ* is where it is", "beyond the paper", trainings.kappa_share, experiments.kappa_share),
)
