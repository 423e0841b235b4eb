"""The defaults of the configuration, and the values that it refuses before any file is read."""

import dataclasses
import json
import math

import pytest

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig, WandbConfig

SECTIONS = (ModelConfig, DataConfig, OptimizerConfig, TrainConfig, SalaadConfig, WandbConfig, RunConfig)

# section, wrong values, what the sentence must say: the name, the value, the limit, the cure
REFUSED = [
    (ModelConfig, {"hidden_size": 0}, "model.hidden_size is 0", "least is 1", "give 1 or more"),
    (ModelConfig, {"intermediate_size": -3}, "model.intermediate_size is -3", "least is 1", "give 1 or more"),
    (ModelConfig, {"num_hidden_layers": 0}, "model.num_hidden_layers is 0", "least is 1", "give 1 or more"),
    (ModelConfig, {"num_attention_heads": 0}, "model.num_attention_heads is 0", "least is 1", "give 1 or more"),
    (ModelConfig, {"vocab_size": 0}, "model.vocab_size is 0", "least is 1", "give 1 or more"),
    (ModelConfig, {"hidden_size": 100, "num_attention_heads": 3}, "hidden_size 100", "3 heads", "multiple of 6"),
    (ModelConfig, {"hidden_size": 12, "num_attention_heads": 4}, "hidden_size 12", "even width", "multiple of 8"),
    (DataConfig, {"sequence_length": 1}, "data.sequence_length is 1", "least is 2", "give 2 or more"),
    (DataConfig, {"shuffle_window": 0}, "data.shuffle_window is 0", "least is 1", "give 1 or more"),
    (DataConfig, {"streams": 0}, "data.streams is 0", "least is 1", "give 1 or more"),
    (DataConfig, {"workers": -1}, "data.workers is -1", "least is 0", "give 0 or more"),
    (DataConfig, {"max_bad_documents": -1}, "data.max_bad_documents is -1", "least is 0", "give 0 or more"),
    (
        RunConfig,
        {"data": DataConfig(source="files", validation_files=("b",))},
        "data.source is files",
        "data.files is empty",
        "give at least one",
    ),
    (
        RunConfig,
        {"data": DataConfig(source="files", files=("a",))},
        "data.validation_files is empty",
        "source is files",
        "give files",
    ),
    (DataConfig, {"files": ("a",)}, "data.files is given", "data.source is python-docs", "set data.source to files"),
    (
        DataConfig,
        {"validation_files": ("a",)},
        "data.validation_files is given",
        "is python-docs",
        "set data.source to files",
    ),
    (
        DataConfig,
        {"source": "c4", "validation_files": ("a",)},
        "given",
        "data.source is c4",
        "set data.source to files",
    ),
    (OptimizerConfig, {"lr": -1e-3}, "optimizer.lr is -0.001", "least is 0", "give 0 or more"),
    (OptimizerConfig, {"lr": math.nan}, "optimizer.lr is nan", "least is 0", "give 0 or more"),
    (OptimizerConfig, {"eps": -1.0}, "optimizer.eps is -1.0", "least is 0", "give 0 or more"),
    (OptimizerConfig, {"weight_decay": -0.1}, "optimizer.weight_decay is -0.1", "least is 0", "give 0 or more"),
    (OptimizerConfig, {"clip": -1.0}, "optimizer.clip is -1.0", "least is 0", "give 0 or more"),
    (OptimizerConfig, {"warmup": 1.5}, "optimizer.warmup is 1.5", "fraction", "from 0 to 1"),
    (OptimizerConfig, {"final_lr": -0.1}, "optimizer.final_lr is -0.1", "fraction", "from 0 to 1"),
    (OptimizerConfig, {"betas": (0.9, 1.0)}, "optimizer.betas holds 1.0", "below 1", "give numbers"),
    (OptimizerConfig, {"betas": (-0.1, 0.9)}, "optimizer.betas holds -0.1", "from 0", "give numbers"),
    (TrainConfig, {"steps": 0}, "train.steps is 0", "least is 1", "give 1 or more"),
    (TrainConfig, {"batch": 0}, "train.batch is 0", "least is 1", "give 1 or more"),
    (TrainConfig, {"micro_batch": 0}, "train.micro_batch is 0", "least is 1", "give 1 or more"),
    (TrainConfig, {"log_every": 0}, "train.log_every is 0", "least is 1", "give 1 or more"),
    (TrainConfig, {"eval_tokens": 0}, "train.eval_tokens is 0", "least is 1", "give 1 or more"),
    (TrainConfig, {"eval_every": -1}, "train.eval_every is -1", "least is 0", "give 0 or more"),
    (TrainConfig, {"save_every": -1}, "train.save_every is -1", "least is 0", "give 0 or more"),
    (TrainConfig, {"keep_last": -1}, "train.keep_last is -1", "least is 0", "give 0 or more"),
    (SalaadConfig, {"rank_ratio": 0.0}, "salaad.rank_ratio is 0.0", "(0, 1]", "give a fraction"),
    (SalaadConfig, {"rank_ratio": 15}, "salaad.rank_ratio is 15", "(0, 1]", "give a fraction"),
    (SalaadConfig, {"rank_ratio": math.nan}, "salaad.rank_ratio is nan", "(0, 1]", "give a fraction"),
    (SalaadConfig, {"gamma": 1.01}, "salaad.gamma is 1.01", "(0, 1]", "give a fraction"),
    (SalaadConfig, {"gamma": 0.0}, "salaad.gamma is 0.0", "(0, 1]", "give a fraction"),
    (SalaadConfig, {"density": -0.1}, "salaad.density is -0.1", "[0, 1]", "give a fraction"),
    (SalaadConfig, {"density": 5}, "salaad.density is 5", "[0, 1]", "give a fraction"),
    (SalaadConfig, {"density": math.nan}, "salaad.density is nan", "[0, 1]", "give a fraction"),
    (SalaadConfig, {"every": 0}, "salaad.every is 0", "least is 1", "give 1 or more"),
    (SalaadConfig, {"inner": 0}, "salaad.inner is 0", "least is 1", "give 1 or more"),
    (SalaadConfig, {"delta_alpha": -0.2}, "salaad.delta_alpha is -0.2", "least is 0", "give 0 or more"),
    (SalaadConfig, {"delta_beta": -0.2}, "salaad.delta_beta is -0.2", "least is 0", "give 0 or more"),
    (SalaadConfig, {"rho_constant": -1.0}, "salaad.rho_constant is -1.0", "least is 0", "give 0 or more"),
    (SalaadConfig, {"rho": -1e-6}, "salaad.rho is -1e-06", "least is 0", "give 0 or more"),
    (SalaadConfig, {"rho": math.inf}, "salaad.rho is inf", "has to be finite", "give a number of 0 or more"),
    (SalaadConfig, {"energy": "cubed"}, "salaad.energy is 'cubed'", "nuclear, squared", "has to be one of"),
    (SalaadConfig, {"schedule": "random"}, "salaad.schedule is 'random'", "synchronous, staggered", "has to be one of"),
    (SalaadConfig, {"method": "lanczos"}, "salaad.method is 'lanczos'", "auto, exact, gram", "has to be one of"),
]

ALLOWED = [
    (ModelConfig, {"hidden_size": 8, "num_attention_heads": 4}),
    (DataConfig, {"source": "files", "files": ("a",), "validation_files": ("b",)}),
    (DataConfig, {"workers": 0, "max_bad_documents": 0, "sequence_length": 2}),
    (OptimizerConfig, {"lr": 0.0, "clip": 0.0, "warmup": 0.0, "final_lr": 1.0, "betas": (0.0, 0.999)}),
    (OptimizerConfig, {"warmup": 1.0, "final_lr": 0.0}),
    (TrainConfig, {"eval_every": 0, "save_every": 0, "keep_last": 0}),
    (SalaadConfig, {"rank_ratio": 1.0, "density": 0.0, "gamma": 1.0, "every": 1}),
    (SalaadConfig, {"density": 1.0, "rho": 0.0, "rho_constant": 0.0, "delta_alpha": 0.0, "delta_beta": 0.0}),
]


@pytest.mark.parametrize(("section", "values", "what", "limit", "cure"), REFUSED)
def test_a_wrong_value_is_refused_with_the_value_the_limit_and_the_cure(section, values, what, limit, cure):
    with pytest.raises(UserError) as error:
        section(**values)
    sentence = str(error.value)
    assert what in sentence
    assert limit in sentence
    assert cure in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(("section", "values"), ALLOWED)
def test_values_on_the_border_are_allowed(section, values):
    chosen = section(**values)
    assert {name: getattr(chosen, name) for name in values} == values


@pytest.mark.parametrize("section", SECTIONS)
def test_a_configuration_cannot_be_changed_after_it_was_checked(section):
    config = section()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))


def test_the_defaults_of_the_admm_are_the_papers():
    # γ, the targets, J: footnote of section 4.2, appendix. Δα, Δβ: the authors' example. c: S-SALAAD's 60M recipe.
    chosen = dataclasses.asdict(SalaadConfig())
    assert chosen == {
        "rank_ratio": 0.15,
        "density": 0.05,
        "gamma": 0.999,
        "energy": "nuclear",
        "every": 10,
        "inner": 1,
        "delta_alpha": 0.2,
        "delta_beta": 0.002,
        "rho_constant": 0.03,
        "rho": None,
        "pull": "coupled",
        "pull_rate": 0.3,
        "onset": 0.0,
        "release": 0.0,
        "roles": (),
        "embedding": False,
        "lm_head": False,
        "schedule": "synchronous",
        "owners": "round_robin",
        "overlap": False,
        "method": "auto",
    }


def test_the_defaults_of_training_are_the_papers():
    run = RunConfig()
    optimizer = run.optimizer
    assert (optimizer.name, optimizer.betas, optimizer.eps, optimizer.weight_decay) == ("AdamW", (0.9, 0.95), 1e-8, 0)
    assert (optimizer.warmup, optimizer.final_lr, optimizer.clip) == (0.1, 0.1, 1.0)
    assert (run.train.batch, run.data.sequence_length) == (512, 256)
    assert (run.method, run.train.precision, run.model.vocab_size) == ("salaad", "fp32", 32_000)


def test_a_run_as_plain_values_survives_json_and_builds_the_same_run():
    settings = SalaadConfig(roles=("q", "re:down"), rho=1e-6)
    run = RunConfig(sections={"salaad": settings}, data=DataConfig(source="c4"))
    plain = json.loads(json.dumps(run.to_dict()))
    assert plain == run.to_dict()
    assert plain["salaad"]["roles"] == ["q", "re:down"]
    kinds = {name: type(getattr(run, name)) for name in plain}
    rebuilt = {
        name: section(**{key: tuple(value) if isinstance(value, list) else value for key, value in plain[name].items()})
        if dataclasses.is_dataclass(section)
        else plain[name]
        for name, section in kinds.items()
    }
    assert RunConfig(sections={"salaad": rebuilt.pop("salaad")}, **rebuilt) == run


def test_the_settings_of_other_methods_are_told_only_where_they_are_given():
    given = {"salaad": SalaadConfig(every=7)}
    assert "salaad" not in RunConfig(method="full_rank").to_dict()
    assert RunConfig(method="full_rank", sections=given).to_dict()["salaad"]["every"] == 7
    assert RunConfig().to_dict()["salaad"]["every"] == SalaadConfig().every


def test_a_method_that_is_none_is_refused_with_the_names_there_are():
    with pytest.raises(UserError, match="method is 'lowrank', which is none; give one of full_rank, salaad"):
        RunConfig(method="lowrank")


@pytest.mark.parametrize(("name", "ranks"), [("350m", 8), ("1b", 32)])
def test_every_worker_of_a_cluster_has_a_stream_of_its_own(name, ranks):
    config, _ = read_command_line(["--config", name])
    assert math.gcd(config.data.streams, config.train.batch) % (ranks * config.data.workers) == 0
