"""The Slurm job script, in a bash with stand-ins for Slurm's commands and for the launcher."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.launches import torch_launch

SCRIPT = Path("configs/slurm/train.sbatch")
TRAINING = """printf '%s\\n' "$@" > launched; echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > patience
if [[ -n ${ENDS_WITH:-} ]]; then exit "$ENDS_WITH"; fi
trap 'sleep 0.5; echo saved > saved; exit 0' TERM; touch ready; while :; do sleep 0.1; done"""
# Each writes what it was called with into the folder it runs in.
STAND_INS = {
    "srun": """while [[ $1 == --* ]]; do shift; done; echo $$ > srun.pid; echo "${SRUN_CPUS_PER_TASK:-1}" > cpus
SLURM_NODEID=0 exec "$@" """,
    "scontrol": """case $1 in show) echo first-host; echo second-host;; *) echo "$*" > requeued;; esac""",
    "scancel": """echo "$*" > cancelled; kill -TERM "$(cat srun.pid)" """,
    "accelerate": TRAINING,
    "python": TRAINING,
}


# The job's own environment variables, as Slurm sets them for the script.
JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "24",
}


@pytest.fixture
def job(tmp_path):
    """A function that starts the script with arguments as a job of two nodes, and returns its process."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)

    def start(*arguments: str, **environment: str) -> subprocess.Popen:
        own = {**JOB, "PATH": f"{tools}:{os.environ['PATH']}", **environment}
        command = ["bash", str(SCRIPT.absolute()), *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=os.environ | own, stdout=subprocess.PIPE, text=True)

    return start


def test_the_launcher_gets_nodes_processes_and_the_arguments_of_the_training(job, tmp_path):
    process = job("--config", "1b.yaml", "--output", "runs/a b", ENDS_WITH="0")
    assert process.wait(timeout=30) == 0
    words = (tmp_path / "launched").read_text().splitlines()
    options = dict(zip(words[2:-5:2], words[3:-5:2], strict=False))
    assert words[:2] == ["launch", "--multi_gpu"]
    assert (options["--num_machines"], options["--num_processes"]) == ("2", "8")
    assert (options["--machine_rank"], options["--main_process_ip"]) == ("0", "first-host")
    launch = torch_launch(words[1:])
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("static", "first-host:29500")
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node, launch.max_restarts) == (2, 2, 4, 0)
    # Nothing is added: train.py goes on by itself, and the last of two options would win.
    assert words[-5:] == ["train.py", "--config", "1b.yaml", "--output", "runs/a b"]
    assert (tmp_path / "cpus").read_text() == "24\n"  # srun no longer takes it from the job by itself
    assert int((tmp_path / "patience").read_text()) < 300  # Slurm's signal comes 300 s before the end
    assert not (tmp_path / "requeued").exists()


def test_one_gpu_trains_without_the_launcher_which_refuses_a_single_process(job, tmp_path):
    process = job("--config", "nano.yaml", SLURM_NNODES="1", SLURM_GPUS_ON_NODE="1", ENDS_WITH="0")
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "launched").read_text().splitlines() == ["train.py", "--config", "nano.yaml"]
    with pytest.raises(ValueError, match="at least 2 processes"):
        torch_launch(["--multi_gpu", "--num_machines", "1", "--num_processes", "1", "train.py"])


@pytest.mark.parametrize("gpus", ["1", "4"])
def test_before_its_time_is_over_the_job_saves_and_queues_itself_again(job, tmp_path, gpus):
    process = job("--config", "1b.yaml", SLURM_NNODES="1", SLURM_GPUS_ON_NODE=gpus)
    for _ in range(300):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "saved").exists(), "the job was queued again before the training had saved"
    assert (tmp_path / "cancelled").read_text().split() == ["--signal=TERM", "77.0"]
    assert (tmp_path / "requeued").read_text().split() == ["requeue", "77"]


def test_a_training_that_fails_is_not_queued_again(job, tmp_path):
    assert job("--config", "1b.yaml", ENDS_WITH="2").wait(timeout=30) == 2
    assert not (tmp_path / "requeued").exists()


def test_the_script_asks_for_the_signal_and_may_be_queued_again():
    asked = {line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")}
    assert {"--signal=B:USR1@300", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= asked
