"""Models scaled to a requested number of parameters, which are counted on the real modules."""

import pytest

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.model_sizes import parameters, scaled_to
from salaad.config.run import ModelConfig
from salaad.model.build import describe_model, outline
from salaad.model.parameters import count_parameters


def model_of(*words: str) -> ModelConfig:
    return read_command_line([*words, "--method", "full_rank"])[0].model


@pytest.mark.parametrize("name", ["nano", "60m", "350m", "1b"])
@pytest.mark.parametrize("share", ["0.2", "0.5", "0.9", "1"])
def test_a_model_like_another_has_the_parameters_asked_for(name, share):
    whole = model_of("--config", name)
    found = model_of("--config", name, "--model.like", name, "--model.parameters", share)
    count = count_parameters(outline(describe_model(found, 256)))
    asked = float(share) * count_parameters(outline(describe_model(whole, 256)))
    assert count == parameters(found)
    assert abs(count - asked) <= 1.5 * found.hidden_size * found.num_hidden_layers + 1  # half a unit of SwiGLU width
    assert (found.num_hidden_layers, found.num_attention_heads) == (whole.num_hidden_layers, whole.num_attention_heads)
    assert found.hidden_size % (2 * found.num_attention_heads) == 0
    if share == "1":
        assert found == whole
    # Its proportions are those of the whole model as nearly as one step of the width allows.
    ratio = whole.intermediate_size / whole.hidden_size
    step = 2 * whole.num_attention_heads / found.hidden_size
    assert abs(found.intermediate_size / found.hidden_size / ratio - 1) < 6 * step


def test_the_vocabulary_is_the_runs_own_and_the_resolved_model_has_plain_sizes():
    found = model_of("--model.like", "350m", "--model.parameters", "194M", "--model.vocab_size", "16000")
    assert (found.vocab_size, found.like, found.parameters, found.num_hidden_layers) == (16000, None, None, 24)
    assert abs(parameters(found) / 194e6 - 1) < 1e-3


def test_a_size_that_cannot_be_had_is_refused_with_the_least_one():
    with pytest.raises(UserError, match=r"at least 0\.07 M parameters, more than 0\.01 M; give model.parameters (\d+)"):
        model_of("--config", "nano", "--model.like", "nano", "--model.parameters", "10K")
    named = ModelConfig(vocab_size=4096)
    assert parameters(scaled_to(named, 66728)) == 66728
    with pytest.raises(UserError, match="belong together; give both"):
        model_of("--model.like", "nano")
    with pytest.raises(UserError, match="give only one"):
        model_of("--model.like", "nano", "--model.parameters", "0.5", "--model.path", "somewhere")
    with pytest.raises(UserError, match=r"--model.like nono is no file and not in configs/; give .*nano"):
        model_of("--model.like", "nono", "--model.parameters", "0.5")


@pytest.mark.parametrize(("written", "typed"), [("0.5", "0.5"), ("194000000", "194M"), ("1.94e+8", "194M")])
def test_a_file_names_a_number_of_parameters_as_an_option_does(tmp_path, written, typed):
    file = tmp_path / "half.yaml"
    file.write_text(f"model: {{like: 350m, parameters: {written}}}\n")
    assert model_of("--config", str(file)) == model_of("--model.like", "350m", "--model.parameters", typed)


def test_a_model_is_like_no_file_without_sizes_of_its_own(tmp_path):
    file = tmp_path / "half.yaml"
    file.write_text("model: {like: 350m, parameters: 194M}\n")
    for name in ("fast", str(file)):
        with pytest.raises(UserError, match="names no sizes of a model; give a file in configs/ with sizes"):
            model_of("--model.like", name, "--model.parameters", "0.5")
