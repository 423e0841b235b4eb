"""The package without its checkout: built as a wheel, installed elsewhere, used from another folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.helpers.deploying import ok

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("salaad", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel in it; the dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps"]
    # Without isolation, which would fetch the build backend: torch has brought a setuptools that can build it.
    wheel = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run(wheel, check=True, capture_output=True, timeout=120, env=alone())
    shutil.rmtree(source)
    venv.create(folder / "environment", with_pip=False)
    python = folder / "environment" / "bin" / "python"
    [site] = (folder / "environment").glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but its own .pth files, such as this checkout's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [*pip, "--python", str(python), "install", *offline, *map(str, folder.glob("*.whl"))]
    subprocess.run(install, check=True, capture_output=True, timeout=120, env=alone())
    return python


def alone() -> dict[str, str]:
    """Return the environment variables without PYTHONPATH, through which Python and pip would find this checkout."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(python: Path, code: str, folder: Path) -> str:
    """Run `code` in `folder` with the interpreter that has the wheel, and return what is printed."""
    environment = alone() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "SALAAD_CACHE": str(folder / "cache")}
    begin = "import salaad, sys; assert salaad.__file__.startswith(sys.prefix), salaad.__file__\n"
    done = subprocess.run(
        [python, "-c", begin + code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_ten_lines_of_the_readme_run(installed, tmp_path):
    code = re.search(r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    assert run(installed, code, tmp_path)


def test_a_factored_folder_opens_and_computes_with_the_compiled_products(installed, runs, own_caches, tmp_path):
    folder = tmp_path / "factored"
    given = ("--checkpoint", runs / "salaad", "--budget", "0.6", "--kappa", "0.5", "--dtype", "float32")
    ok("compress.py", *given, "--output", folder)
    code = f"""
import torch
from transformers import AutoModelForCausalLM
from salaad.factored import SlrLinear, cpu_kernels
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
assert any(isinstance(module, SlrLinear) for module in model.modules())
print(bool(model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.isfinite().all()), cpu_kernels.SOURCE.is_file())
"""
    assert run(installed, code, tmp_path).split() == ["True", "True"]


def test_the_corpus_of_documentation_knows_the_dependencies_without_the_list_of_the_checkout(installed, tmp_path):
    code = "from salaad.data import python_docs; print(*python_docs._required_names())"
    listed = re.findall(r"^([\w-]+)==", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)
    found = run(installed, code, tmp_path).split()
    assert {name.lower().replace("_", "-") for name in listed} <= {*found, "jsonargparse"}
