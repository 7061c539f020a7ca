"""The presets' commands against the real argument parsers: `make versions`. A program that is not here is skipped, by name.

MEGATRON_LM and TORCHTITAN name checkouts; MAXTEXT_PYTHON an interpreter that has MaxText; PRESETS_PYTHON one with torch and
what else those checkouts need. deepspeed and accelerate are asked where they are installed.
"""

import importlib.util
import os
import shlex
import socket
import subprocess
import sys

import pytest

from drumbeat.jobfile.flags import with_preset
from drumbeat.jobfile.job import job_from_text

PYTHON = os.environ.get("PRESETS_PYTHON", sys.executable)


def words(preset):
    """The command's own arguments, after the program."""
    command = with_preset(job_from_text(f"preset: {preset}\n")).command
    argv = list(command) if not isinstance(command, str) else shlex.split(command)
    after = next(place for place, word in enumerate(argv) if word.endswith(".py") or argv[place - 1] == "-m")
    return argv[after + 1 :]


def checkout(variable):
    folder = os.environ.get(variable, "")
    if not os.path.isdir(folder):
        pytest.skip(f"{variable} names no checkout: make versions")
    return folder


def parsed(python, script, arguments, folder=None, given=None):
    environ = {
        **os.environ,
        "PYTHONPATH": folder or "",
        "JAX_PLATFORMS": "cpu",
        "DS_ACCELERATOR": "cpu",
        **(given or {}),
    }
    done = subprocess.run(
        [python, "-c", script, *arguments], capture_output=True, text=True, env=environ, cwd=folder, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_megatron_lm():
    """It is for Python 3.12, of which its parser needs no more than a name."""
    script = (
        "import typing, typing_extensions; typing.override = typing_extensions.override\n"
        "from megatron.training.arguments import parse_args; print('layers', parse_args().num_layers)"
    )
    assert "layers 32" in parsed(PYTHON, script, words("megatron-lm-nvidia"), checkout("MEGATRON_LM"))


def test_torchtitan():
    script = (
        "import sys; from torchtitan.config.manager import ConfigManager\n"
        "print('config', type(ConfigManager().parse_args(sys.argv[1:])).__name__)"
    )
    assert "config" in parsed(PYTHON, script, words("torchtitan"), checkout("TORCHTITAN"))


def test_maxtext():
    """The preset's own words, unchanged, as the only process of one node: `hardware=` decides how it meets the others."""
    python = os.environ.get("MAXTEXT_PYTHON", "")
    if not python:
        pytest.skip("MAXTEXT_PYTHON names no interpreter: make versions")
    script = (
        "import sys; from maxtext.configs import pyconfig\n"
        "config = pyconfig.initialize_pydantic(['maxtext.trainers.pre_train.train', *sys.argv[1:]])\n"
        "import jax; from jax._src import distributed, xla_bridge\n"
        "print('model', config.model_name, config.max_target_length)\n"
        "print('met', distributed.global_state.coordinator_address, jax.process_count())\n"
        "print('devices', xla_bridge.CUDA_VISIBLE_DEVICES.value)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"JAX_COORDINATOR_IP": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port), "NNODES": "1", "NODE_RANK": "0"}
    out = parsed(python, script, words("jax-maxtext"), given=given)
    assert "model llama3-8b 8192" in out and f"met 127.0.0.1:{port} 1" in out and "devices all" in out


def test_deepspeed():
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: make versions")
    script = (
        "import argparse, deepspeed; known = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()\n"
        "print(known.deepspeed, known.deepspeed_config)"
    )
    assert "True ds_config.json" in parsed(sys.executable, script, words("deepspeed"))


def test_accelerate():
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: make versions")
    script = (
        "from accelerate.commands.launch import launch_command_parser as p; print(p().parse_args().training_script)"
    )
    assert "train.py" in parsed(sys.executable, script, ["train.py"])
